"""Evaluates slices separately; a slice is the samples with the same value in a slot or column."""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from trainer import config
from trainer.comm.communicator import Communicator
from trainer.data.features import SlotBatch
from trainer.data.parse import BLANK_GROUP
from trainer.model import influence
from trainer.model.metrics import group_auc_sums
from trainer.plain_data import JsonObject
from trainer.reporting.metric_text import Z, auc_interval

# In place of a key: samples without a value, samples whose value has no own slice, and all samples.
BLANK, OTHER, ALL = -1, -2, -3


def _values(batch: SlotBatch, slot: int | None, slots: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns the distinct keys that each sample has in a slot, and the samples' indices, int64 [m].

  A sample without a value has the key BLANK.

  Args:
    slot: the index of the slot; None for the column data.group.
    slots: the number of slots, F.
  """
  if slot is None:
    group = np.asarray(batch.group)
    return np.where(group == BLANK_GROUP, BLANK, group), np.arange(len(group))
  keys, segments = np.asarray(batch.keys), np.asarray(batch.segments)
  samples = len(batch.label)
  if not len(segments) and len(keys) == samples * slots:
    return keys.reshape(-1, slots)[:, slot], np.arange(samples)
  own = segments % slots == slot
  pairs = np.unique(np.stack([segments[own] // slots, keys[own]], 1).astype(np.int64), axis=0)
  blank = np.setdiff1d(np.arange(samples), pairs[:, 0])
  return np.append(pairs[:, 1], np.full(len(blank), BLANK)), np.append(pairs[:, 0], blank)


def slices(
  cfg: config.Config,
  communicator: Communicator,
  scored: Iterable[tuple[SlotBatch, np.ndarray]],
  names: Sequence[str],
  most: int,
) -> dict[str, list[JsonObject]]:
  """Evaluates all samples, and separately the samples of each value of some slots.

  A sample with several values counts in the slice of each. All samples of a slice are sent to one
  process, so the slice's AUC is exact. Every process calls it.

  Args:
    scored: this process's batches with their predictions, [B] or [B, T].
    names: names of slots; any other name stands for the column data.group.
    most: the largest number of slices for one slot. The most frequent values get a slice each; the
      samples with other values form the slice OTHER.
  Returns:
    {name: slices}. A slice has `key` (a key, or BLANK, OTHER or ALL), `task` (None if there is only
    one) and the figures of `slice_figures` or `slice_errors`.

    For each task the worst slices come first. For clicks, a slice is worse if the upper confidence
    limit of its AUC is lower; so no slice is first just because it is small. For squared error, it
    is worse if its RMSE is larger. Then come slices without such a figure, and last the slice ALL.
  """
  places = {slot.name: i for i, slot in enumerate(cfg.ordered_slots)}
  by_name: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {name: [] for name in names}
  columns, count = [], 0
  tasks = len(cfg.labels)
  for batch, probabilities in scored:
    for name in names:
      keys, samples = _values(batch, places.get(name), len(places))
      by_name[name].append((keys, samples + count))
    shape = len(probabilities), tasks
    of_batch = np.asarray(batch.label), probabilities, np.asarray(batch.weight)
    columns.append(np.stack([a.reshape(shape) for a in of_batch]))
    count += len(probabilities)
  # Labels, predictions and weights: float32 [3, n, T].
  whole = np.concatenate([np.zeros([3, 0, tasks], np.float32), *columns], 1)
  return {
    name: _of_slot(cfg.labels, communicator, whole, some, most) for name, some in by_name.items()
  }


def _of_slot(
  labels: Sequence[config.Label],
  communicator: Communicator,
  whole: np.ndarray,
  parts: Sequence[tuple[np.ndarray, np.ndarray]],
  most: int,
) -> list[JsonObject]:
  empty = np.zeros([0], np.int64)
  keys, samples = (np.concatenate(a) for a in zip((empty, empty), *parts))
  head = _most_frequent(keys, communicator, most)
  place = np.searchsorted(head, keys)
  is_head = head[np.minimum(place, len(head) - 1)] == keys
  # A sample with several values counts once in OTHER.
  others = np.unique(samples[~is_head])
  everyone = np.arange(whole.shape[1])
  place = [place[is_head], np.full(len(others), len(head)), np.full(len(everyone), len(head) + 1)]
  place, samples = np.concatenate(place), np.concatenate([samples[is_head], others, everyone])
  to = [place % communicator.size == rank for rank in range(communicator.size)]
  received = communicator.exchange([[place[own], whole[:, samples[own]]] for own in to])
  places, columns = zip(*received)
  place, columns = np.concatenate(places), np.concatenate(columns, 1)
  order = np.argsort(place, kind='stable')
  ends = np.searchsorted(place[order], np.arange(len(head) + 3))
  rows = []
  for i, key in enumerate([*head.tolist(), OTHER, ALL]):
    own = columns[:, order[ends[i] : ends[i + 1]]]
    if not own.shape[1]:
      continue
    for t, label in enumerate(labels):
      figures = slice_errors if label.loss == 'squared_error' else slice_figures
      task = label.name if len(labels) > 1 else None
      rows.append({'key': key, 'task': task} | figures(*own[:, :, t]))
  rows = [row for of_process in communicator.gather(rows) for row in of_process]
  order_of = {label.name: i for i, label in enumerate(labels)}

  def badness(row: JsonObject) -> tuple[int, bool, float, int]:
    worst = -row['rmse'] if row.get('rmse') is not None else row.get('auc_high')
    worst = np.inf if worst is None else worst
    return order_of.get(row['task'], 0), row['key'] == ALL, worst, -row['samples']

  return sorted(rows, key=badness)


def _most_frequent(keys: np.ndarray, communicator: Communicator, most: int) -> np.ndarray:
  """Returns BLANK and the `most` most frequent keys over all processes, int64 [n], ascending."""
  distinct, counts = np.unique(keys, return_counts=True)
  gathered = communicator.gather([distinct, counts])
  all_keys, of = np.unique(np.concatenate([k for k, _ in gathered]), return_inverse=True)
  totals = np.bincount(of, np.concatenate([c for _, c in gathered]), len(all_keys))
  totals[all_keys == BLANK] = 0
  first = np.argsort(-totals, kind='stable')[:most]
  return np.unique(np.append(all_keys[first], BLANK))


def slice_figures(
  labels: np.ndarray, probabilities: np.ndarray, weights: np.ndarray
) -> dict[str, float | int | None]:
  """Returns the metrics of a slice, {metric: value}, None where its samples do not define one.

  They are samples, clicks, ctr, auc, auc_low, auc_high, logloss, calibration (Σ predicted / Σ
  clicked), calibration_low and calibration_high. The last interval assumes that the predictions are
  right up to a constant factor, so only the randomness of clicks makes calibration vary, and that
  its logarithm is normally distributed. All arguments are float [n]; the labels are 0 or 1, and
  samples of weight 0 do not count.
  """
  known = weights > 0
  y, p, w = (np.asarray(a, np.float64)[known] for a in (labels, probabilities, weights))
  values: dict[str, float | int | None] = {'samples': len(y), 'clicks': float(w @ y)}
  total, clicks, predicted = w.sum(), w @ y, w @ p
  won, pairs_weight = group_auc_sums(y, p, np.zeros(len(y), np.int64), w)
  auc = won / pairs_weight if pairs_weight > 0 else None
  low = high = None
  if auc is not None:
    # The effective number of samples of unequal weights (Kish 1965).
    low, high = auc_interval(auc, *(c.sum() ** 2 / (c @ c) for c in [w[y > 0.5], w[y <= 0.5]]))
  loss = influence.logloss(y, p, w)
  values |= {'ctr': clicks / total if total else None, 'auc': auc, 'auc_low': low, 'auc_high': high}
  values['logloss'] = loss and loss.value
  ratio = predicted / clicks if clicks and predicted else None
  values |= {'calibration': ratio, 'calibration_low': None, 'calibration_high': None}
  if ratio:
    error = math.sqrt((w * w) @ np.square(y - p / ratio)) / clicks
    values['calibration_low'] = ratio * math.exp(-Z * error)
    values['calibration_high'] = ratio * math.exp(Z * error)
  return values


def slice_errors(
  labels: np.ndarray, predictions: np.ndarray, weights: np.ndarray
) -> dict[str, float | int | None]:
  """Returns the metrics of a slice of a task with squared error, as `slice_figures`.

  They are samples, rmse, error (the mean of predicted − true), error_low and error_high (its 95 %
  interval by the normal distribution).
  """
  known = weights > 0
  y, p, w = (np.asarray(a, np.float64)[known] for a in (labels, predictions, weights))
  rmse, error = influence.rmse(y, p, w), influence.mean(p - y, w)
  values = {'samples': len(y), 'rmse': rmse and rmse.value, 'error': error and error.value}
  half = Z * float(np.linalg.norm(error.influence)) if len(y) > 1 else None
  ends = (None, None) if half is None else (error.value - half, error.value + half)
  return values | dict(zip(('error_low', 'error_high'), ends))
