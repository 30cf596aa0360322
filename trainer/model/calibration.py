"""Compares predictions with clicks: by decile of the predictions, and by slot.

A `histogram` is float64 [2, buckets] of MetricSums: the total weight of the samples without and
with a click (row 0, row 1) in each bucket of the predictions.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from trainer.data.features import SlotBatch
from trainer.model.metrics import bucket_logits


def first_task(column: np.ndarray) -> np.ndarray:
  """Returns the first task's column, [B], of an array [B, T]; an array [B] is returned as it is."""
  return column if column.ndim == 1 else column[:, 0]


def _sigmoid(logits: np.ndarray) -> np.ndarray:
  return 1 / (1 + np.exp(-logits))


def _rounded(values: np.ndarray) -> list[float]:
  """Rounds numbers to six significant digits, to keep metrics.jsonl small."""
  return [float(f'{value:.6g}') for value in values]


def deciles(histogram: np.ndarray) -> dict[str, list[float]]:
  """Compares predictions with clicks in each tenth of the samples, ordered by prediction.

  A bucket is never split, so tenths differ in size if many predictions are equal. Returns for each
  tenth that has samples, the lowest predictions first: `weight`, the sum of the samples' weights;
  `predicted`, their mean prediction; `ctr`, their share of clicks.
  """
  weight = histogram.sum(0)
  predicted = weight * _sigmoid(bucket_logits(len(weight)))
  middle = (np.cumsum(weight) - weight / 2) / max(weight.sum(), 1e-9)
  tenth = np.minimum((10 * middle).astype(int), 9)
  sums = np.stack([np.bincount(tenth, column, 10) for column in (weight, predicted, histogram[1])])
  w, p, c = sums[:, sums[0] > 0]
  return {'weight': _rounded(w), 'predicted': _rounded(p / w), 'ctr': _rounded(c / w)}


# The shares of the samples at which `ranking` measures, starting with the highest predictions.
_SHARES = np.concatenate([[0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03], np.arange(0.05, 1.01, 0.05)])


def ranking(histogram: np.ndarray) -> dict[str, list[float]]:
  """Returns points of the gain curve and of the ROC curve; {} if only one class has samples.

  Each list ascends from 0 to 1: the share `samples[i]` with the highest predictions has the share
  `clicks[i]` of all clicks and `others[i]` of all samples without a click.
  """
  others, clicks = (np.concatenate([[0], np.cumsum(of_kind[::-1])]) for of_kind in histogram)
  if not (others[-1] and clicks[-1]):
    return {}
  samples = (others + clicks) / (others[-1] + clicks[-1])
  return {
    'samples': _rounded(_SHARES),
    'clicks': _rounded(np.interp(_SHARES, samples, clicks / clicks[-1])),
    'others': _rounded(np.interp(_SHARES, samples, others / others[-1])),
  }


_BINS = 40


def spread(histogram: np.ndarray) -> dict[str, list[float]]:
  """Returns the distribution of the predictions over bins, for samples with and without a click.

  `edges`, the n + 1 edges of n bins; `clicks` and `others`, the weight of the samples with and
  without a click in each. {} without samples. Bins have equal widths or, if predictions differ by
  more than a factor of 20, edges in a geometric series. The outer ones also hold the extreme 0.1 %.
  """
  weight = histogram.sum(0)
  if not weight.sum():
    return {}
  predicted = _sigmoid(bucket_logits(len(weight)))
  places = np.searchsorted(np.cumsum(weight), np.array([0.001, 0.999]) * weight.sum())
  low, high = predicted[places]
  spaced = np.geomspace if high > 20 * low else np.linspace
  edges = spaced(0.98 * low, min(1.02 * high, 1), _BINS + 1)
  place = np.clip(np.searchsorted(edges, predicted, side='right') - 1, 0, _BINS - 1)
  others, clicks = (np.bincount(place, of_kind, _BINS) for of_kind in histogram)
  return {'edges': _rounded(edges), 'clicks': _rounded(clicks), 'others': _rounded(others)}


def prediction_histogram(histogram: np.ndarray) -> np.ndarray:
  """Returns 50 ranges of predictions of equal width: [50, (left, right, total weight)]."""
  weight, edges = histogram.sum(0), np.arange(51) / 50
  place = (_sigmoid(bucket_logits(len(weight))) * 50).astype(int)
  return np.stack([edges[:-1], edges[1:], np.bincount(np.minimum(place, 49), weight, 50)], 1)


# unknown_jumps warns of a slot whose share of unknown samples exceeds m + UNKNOWN_JUMP·(1 - m),
# where m is the median share of earlier evaluations.
UNKNOWN_JUMP = 0.5


class SlotCalibration:
  """Compares predictions with clicks in each slot, for known and for unknown features separately.

  A feature is known if it has a row, whose weights may be 0. In a slot, a sample is blank without
  features, and unknown if none of them is known. The class keeps sums, which can be added over
  processes.
  """

  def __init__(self, slots: Sequence[str]):
    self._slots = list(slots)
    # For each slot: the numbers of samples, of blank and of unknown ones; Σ weight·predicted and
    # Σ weight·clicked of samples with a known feature; the same two sums of all other samples.
    self._sums = np.zeros([len(slots), 7])

  def update(self, batch: SlotBatch, known: np.ndarray, probabilities: np.ndarray) -> None:
    """Adds a batch, of arrays or tensors.

    `known` is bool [nnz]; `probabilities` float32 [B] or [B, T], of which only the first task's
    count.
    """
    shape = len(probabilities), len(self._slots)
    segments = np.asarray(batch.segments)
    if len(segments) == 0 and len(known) == shape[0] * shape[1]:
      present, learned = np.ones(shape, bool), known.reshape(shape)
    else:
      present, learned = np.zeros([2, *shape], bool)
      present.reshape(-1)[segments] = True
      learned.reshape(-1)[segments[known]] = True
    weight = first_task(np.asarray(batch.weight, np.float64))
    predicted = weight * first_task(probabilities)
    clicked = weight * first_task(np.asarray(batch.label))
    self._sums += np.stack(
      [
        np.full(shape[1], float(shape[0])),
        (~present).sum(0),
        (present & ~learned).sum(0),
        predicted @ learned,
        clicked @ learned,
        predicted @ ~learned,
        clicked @ ~learned,
      ],
      1,
    )

  def state(self) -> dict[str, np.ndarray]:
    """Returns the sums as {name: array}; add the arrays of several processes name by name."""
    return {'slots': self._sums}

  def result(self, state: Mapping[str, np.ndarray]) -> dict[str, dict[str, float | None]]:
    """Returns {slot with samples: {metric: value}} of a state, or of a sum of states.

    `blank` and `unknown` are shares of samples. `calibration_known` is Σ predicted / Σ clicked of
    the samples with a known feature, `calibration_unknown` that of all others; None without clicks.
    """
    figures = {}
    for slot, (samples, blank, unknown, *sums) in zip(self._slots, state['slots'].tolist()):
      if not samples:
        continue
      known, others = (sums[0], sums[1]), (sums[2], sums[3])
      figures[slot] = {
        'blank': blank / samples,
        'unknown': unknown / samples,
        'calibration_known': known[0] / known[1] if known[1] else None,
        'calibration_unknown': others[0] / others[1] if others[1] else None,
      }
    return figures


def unknown_jumps(
  by_slot: Mapping[str, Mapping[str, float | None]],
  before: Sequence[Mapping[str, Mapping[str, float | None]]],
) -> list[str]:
  """Returns a warning for each slot in which far more samples are unknown than before.

  Blank samples do not count. The limit depends on the median share in earlier evaluations,
  `before`; without any, none may be known: where some are, values are written as in training, and
  the others are new.
  """

  def share(of_slot: Mapping[str, float | None]) -> float:
    """Returns, for one slot, how many of the samples with a feature have only unknown ones."""
    filled = 1 - (of_slot.get('blank') or 0)
    return (of_slot.get('unknown') or 0) / filled if filled > 0 else 0.0

  warnings = []
  for slot, of_slot in by_slot.items():
    shares = [share(result[slot]) for result in before if result.get(slot)]
    usual = float(np.median(shares)) if shares else None
    limit = None if usual is None else usual + UNKNOWN_JUMP * (1 - usual)
    if share(of_slot) == 1 if limit is None else share(of_slot) > limit:
      compared = '' if usual is None else f', {usual:.0%} in the evaluations before'
      warnings.append(
        f"slot '{slot}': {share(of_slot):.0%} of the samples have unknown features{compared}; are "
        'its values written as in training (4117 is not u4117, 2024-01-31 not 2024-01-31 00:00:00)?'
      )
  return warnings
