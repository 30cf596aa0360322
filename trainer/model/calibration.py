"""Compares predictions with clicks: by tenths of the predictions, and by slot."""

from collections.abc import Mapping, Sequence

import numpy as np

from trainer.data.features import SlotBatch
from trainer.model.metrics import bucket_logits


def first_histogram(state: Mapping[str, np.ndarray]) -> np.ndarray | None:
  """Returns the histogram of the first task in a MetricSums state; None where it counts errors."""
  return next((array for name, array in state.items() if name.endswith('histogram')), None)


def first_task(column: np.ndarray) -> np.ndarray:
  """Returns the first task's column of [B] or [B, T]."""
  return column if column.ndim == 1 else column[:, 0]


def _sigmoid(logits: np.ndarray) -> np.ndarray:
  return 1 / (1 + np.exp(-logits))


def deciles(histogram: np.ndarray) -> list[list[float]]:
  """Compares predictions with clicks in each tenth of the samples, by ascending prediction.

  Args:
    histogram: float64 [2, buckets] of trainer.model.metrics.MetricSums.
  Returns:
    The weight, the mean prediction and the click rate of each tenth that has samples. A bucket is
    never split, so tenths differ in size if many predictions are equal.
  """
  weight = histogram.sum(0)
  if not weight.sum():
    return []
  predicted = weight * _sigmoid(bucket_logits(len(weight)))
  middle = (np.cumsum(weight) - weight / 2) / weight.sum()
  tenth = np.minimum((10 * middle).astype(int), 9)
  sums = [np.bincount(tenth, column, 10) for column in (weight, predicted, histogram[1])]
  return [[float(w), float(p / w), float(c / w)] for w, p, c in zip(*sums) if w > 0]


def prediction_histogram(histogram: np.ndarray, bins: int = 50) -> np.ndarray:
  """Returns the weight in equal ranges of probability.

  Args:
    histogram: as in `deciles`.
    bins: the number of ranges.
  Returns:
    float64 [bins, 3]: left edge, right edge, weight.
  """
  weight = histogram.sum(0)
  place = (_sigmoid(bucket_logits(len(weight))) * bins).astype(int)
  edges = np.arange(bins + 1) / bins
  counts = np.bincount(np.minimum(place, bins - 1), weight, bins)
  return np.stack([edges[:-1], edges[1:], counts], 1)


# A slot is reported if the share of samples with an unknown feature exceeds UNKNOWN, or exceeds the
# median of the earlier evaluations by UNKNOWN_JUMP.
UNKNOWN, UNKNOWN_JUMP = 0.9, 0.5


class SlotCalibration:
  """Sums for each slot over the samples whose feature the model knows, and over the others.

  The sums of several processes add up.

  Args:
    slots: their names, F of them.
  """

  def __init__(self, slots: Sequence[str]):
    self._slots = list(slots)
    # By slot: samples, blank, unknown; Σ weight·predicted and Σ weight·clicked of known, of others.
    self._sums = np.zeros([len(slots), 7])

  def update(self, batch: SlotBatch, known: np.ndarray, probabilities: np.ndarray) -> None:
    """Adds a batch.

    Args:
      batch: of arrays or tensors.
      known: bool [nnz], whether the model has trained each of the batch's features.
      probabilities: float32 [B]; with several tasks [B, T], of which the first counts.
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
    """Returns arrays by name; the sum of two states is the state of both."""
    return {'slots': self._sums}

  def result(self, state: Mapping[str, np.ndarray]) -> dict[str, dict[str, float | None]]:
    """Returns the figures of a state or a sum of states, for each slot that has samples.

    They are the shares of blank samples and of samples with an unknown feature, and Σ predicted /
    Σ clicked of the samples with a known feature and of the others.
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
  found: Mapping[str, Mapping[str, float | None]],
  before: Sequence[Mapping[str, Mapping[str, float | None]]],
) -> list[str]:
  """Returns a warning for each slot of which the model knows far fewer features than before.

  Args:
    found: SlotCalibration.result of an evaluation or prediction.
    before: the results of the earlier evaluations, oldest first.
  """

  def share(of_slot: Mapping[str, float | None]) -> float:
    """Returns the share of unknown features among the samples that have one."""
    filled = 1 - (of_slot.get('blank') or 0)
    return (of_slot.get('unknown') or 0) / filled if filled > 0 else 0.0

  told = []
  for slot, of_slot in found.items():
    shares = [share(result[slot]) for result in before if result.get(slot)]
    usual = float(np.median(shares)) if shares else None
    limit = UNKNOWN if usual is None else usual + UNKNOWN_JUMP
    if share(of_slot) > limit:
      compared = '' if usual is None else f', {usual:.0%} in the evaluations before'
      told.append(
        f"slot '{slot}': the model does not know the features of {share(of_slot):.0%} of the "
        f'samples{compared}; wanted values written as those that it was trained on (4117 is not '
        'u4117)'
      )
  return told
