"""Permutation importance: how much of a model's quality each slot and dense column carries."""

import itertools
from collections.abc import Sequence

import numpy as np
import pandas as pd
import tensorflow as tf

from ops.tensors import to_tensor
from trainer.data.features import SlotBatch
from trainer.data.prepared import PreparedPass
from trainer.model.metrics import MetricSums, result
from trainer.plain_data import JsonObject
from trainer.training.inputs import Inputs

MOST_SAMPLES = 1 << 18  # the most that a job scores when it ends
_BATCHES_A_COLUMN = 8  # the least, if there is enough data
_LEAST_BATCH = 64


def permuted(batch: SlotBatch, column: int, slots: int, order: np.ndarray) -> SlotBatch:
  """Returns a batch in which sample i has the values of sample `order[i]` in one column.

  Args:
    batch: a batch of NumPy arrays.
    column: the place of a slot among the slots, or F and the place of a dense column.
    slots: F.
    order: int64 [B], a permutation.
  """
  if column >= slots:
    dense = batch.dense.copy()
    dense[:, column - slots] = dense[order, column - slots]
    return batch._replace(dense=dense)
  if not len(batch.segments):
    keys = batch.keys.reshape(-1, slots).copy()
    keys[:, column] = keys[order, column]
    return batch._replace(keys=keys.reshape(-1))
  place = np.empty_like(order)
  place[order] = np.arange(len(order))
  segments = batch.segments.copy()
  own = segments % slots == column
  segments[own] = place[segments[own] // slots] * slots + column
  sorted_order = np.argsort(segments, kind='stable')
  values = batch.values[sorted_order] if len(batch.values) else batch.values
  return batch._replace(
    keys=batch.keys[sorted_order], values=values, segments=segments[sorted_order]
  )


def _joined(a: SlotBatch, b: SlotBatch, slots: int) -> SlotBatch:
  """Returns the samples of two batches of arrays."""
  columns = {name: np.concatenate(pair) for name, pair in zip(SlotBatch._fields, zip(a, b))}
  if len(a.segments):
    shift = np.int32(len(a.dense) * slots)
    columns['segments'] = np.concatenate([a.segments, b.segments + shift])
  return SlotBatch(**columns)


def importance_table(inputs: Inputs, prepared: Sequence[PreparedPass]) -> pd.DataFrame:
  """Returns `slot_importance` as a table, the most important slot or column first."""
  importance = slot_importance(inputs, prepared)
  columns = [pd.DataFrame(importance[kind]).T for kind in ('slots', 'dense') if importance[kind]]
  table = pd.concat(columns).astype(float).rename_axis('column')
  table.columns = [f'{name}_worse_by' for name in table]
  return table.sort_values(table.columns[0], ascending=False)


def slot_importance(
  inputs: Inputs, prepared: Sequence[PreparedPass], most_samples: int | None = None
) -> JsonObject:
  """Measures how much worse metrics get if a slot or a dense column is permuted over samples.

  This is permutation importance (Breiman 2001, "Random Forests"). Each batch is scored twice, as it
  is and with one column permuted; the column changes from batch to batch. So the time is that of
  two evaluations, however many columns there are, and each column is measured on some of the
  batches. Every process calls it.

  Args:
    inputs: the model, and how the processes meet.
    most_samples: about how many samples to score; None: all.
  Returns:
    auc and logloss of the batches as they are; and `slots` and `dense`, {name: how much AUC falls
    and logloss rises}. For squared error, rmse in place of both. A figure that the samples do not
    define is None.
  """
  cfg, communicator, step = inputs.cfg, inputs.communicator, inputs.step
  slots, dense = ([column.name for column in kind] for kind in (cfg.ordered_slots, cfg.data.dense))
  names = slots + dense
  total = min(sum(p.num_samples for p in prepared), most_samples or 1 << 62)
  size = max(_LEAST_BATCH * communicator.size, total // (_BATCHES_A_COLUMN * len(names)))
  size = min(size, cfg.train.batch_size)
  metrics = MetricSums(cfg, buckets=4_000)
  measure = tf.function(metrics.update, autograph=False, reduce_retracing=True)
  sums: dict[str, np.ndarray] = {}

  def score(batch: SlotBatch, exchanged: SlotBatch, column: int) -> None:
    # Both are scored at once because they read the same rows.
    staged = step.stage(_joined(batch, exchanged, len(slots)))
    probabilities = step.predict(staged)
    label, weight = staged.batch.label, staged.batch.weight
    half = len(probabilities) // 2
    for kind, some in (('before', slice(None, half)), ('after', slice(half, None))):
      metrics.reset()
      measure(label[some], to_tensor(probabilities[some]), weight[some])
      for name, array in metrics.state().items():
        key = f'{kind}|{column}|{name}'
        sums[key] = sums[key] + array if key in sums else array
    inputs.progress_made()

  batches = itertools.chain.from_iterable(
    data_pass.batches(size, rank=communicator.rank, size=communicator.size)
    for data_pass in prepared
  )
  for i, batch in enumerate(itertools.islice(batches, max(1, -(-total // size)))):
    column = i % len(names)
    rng = np.random.default_rng([cfg.seed, communicator.rank, i])
    order = rng.permutation(len(batch.dense))
    score(batch, permuted(batch, column, len(slots), order), column)
  sums = communicator.sum_arrays(sums)

  def quality(kind: str, columns: Sequence[int]) -> JsonObject:
    state: dict[str, np.ndarray] = {}
    for key, array in sums.items():
      of, column, name = key.split('|')
      if of == kind and int(column) in columns:
        state[name] = state[name] + array if name in state else array
    return result(state) if state else {}

  signs = {'rmse': -1} if cfg.labels[0].loss == 'squared_error' else {'auc': 1, 'logloss': -1}
  losses: list[JsonObject] = []
  for i in range(len(names)):
    before, after = quality('before', [i]), quality('after', [i])
    losses.append(
      {
        metric: None
        if before.get(metric) is None or after.get(metric) is None
        else sign * (before[metric] - after[metric])
        for metric, sign in signs.items()
      }
    )
  whole = quality('before', range(len(names)))
  by_column = {'slots': dict(zip(slots, losses)), 'dense': dict(zip(dense, losses[len(slots) :]))}
  return {metric: whole.get(metric) for metric in signs} | by_column
