"""How much of a model's quality each slot carries."""

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import tensorflow as tf

from ops.tensors import to_tensor
from trainer import config
from trainer.comm.communicator import Communicator
from trainer.data.features import SlotBatch
from trainer.data.prepared import PreparedPass
from trainer.model.metrics import MetricSums, result
from trainer.plain_data import JsonObject
from trainer.training.step import Step

if TYPE_CHECKING:
  from trainer.training.finished_run import FinishedRun

MOST_SAMPLES = 1 << 18  # that a job looks at when it ends
_BATCHES_A_SLOT = 8  # at least, where the data suffice
_LEAST_BATCH = 64


def permuted(batch: SlotBatch, slot: int, slots: int, order: np.ndarray) -> SlotBatch:
  """Returns a batch whose sample i has in one slot what sample `order[i]` had.

  Args:
    batch: of arrays.
    slot: its place among the slots.
    slots: F.
    order: int64 [B], a permutation.
  """
  if not len(batch.segments):
    keys = batch.keys.reshape(-1, slots).copy()
    keys[:, slot] = keys[order, slot]
    return batch._replace(keys=keys.reshape(-1))
  place = np.empty_like(order)
  place[order] = np.arange(len(order))
  segments = batch.segments.copy()
  own = segments % slots == slot
  segments[own] = place[segments[own] // slots] * slots + slot
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


def importance_table(run: 'FinishedRun', prepared: Sequence[PreparedPass]) -> pd.DataFrame:
  """Returns the losses by slot, the most important first; every rank calls it."""
  importance = slot_importance(
    run.cfg, run.communicator, run.step, prepared, progress_made=run.progress_made
  )
  table = pd.DataFrame(importance['slots']).T.astype(float).rename_axis('slot')
  table.columns = [f'loss_of_{name}' for name in table]
  return table.sort_values(table.columns[0], ascending=False)


def slot_importance(
  cfg: config.Config,
  communicator: Communicator,
  step: Step,
  prepared: Sequence[PreparedPass],
  progress_made: Callable[[], None] = lambda: None,
  most_samples: int | None = None,
) -> JsonObject:
  """Permutation importance (Breiman 2001, "Random Forests"): what quality loses when a slot's
  features are exchanged between samples.

  Each batch is scored twice, as it is and with one slot exchanged; slots take turns. So it takes
  two evaluations' time, however many slots there are, and a slot's loss is that of its own batches.
  Every process calls it.

  Args:
    cfg: the job's config.
    communicator: how the processes meet.
    step: the model and its rows.
    prepared: passes to look at.
    progress_made: called after each batch.
    most_samples: about how many samples; None: all.
  Returns:
    auc and logloss as they are, and `slots`: by name what AUC loses and what logloss gains; of
    squared error rmse in place of both. None stands for what the samples do not define.
  """
  names = [slot.name for slot in cfg.slots]
  total = min(sum(p.num_samples for p in prepared), most_samples or 1 << 62)
  size = max(_LEAST_BATCH * communicator.size, total // (_BATCHES_A_SLOT * len(names)))
  size = min(size, cfg.train.batch_size)
  metrics = MetricSums(cfg, buckets=4_000)
  measure = tf.function(metrics.update, autograph=False, reduce_retracing=True)
  sums: dict[str, np.ndarray] = {}

  def score(batch: SlotBatch, exchanged: SlotBatch, slot: int) -> None:
    # Both at once: they have the same rows but for one slot's places.
    staged = step.stage(_joined(batch, exchanged, len(names)))
    probabilities = step.predict(staged)
    label, weight = staged.batch.label, staged.batch.weight
    half = len(probabilities) // 2
    for kind, some in (('before', slice(None, half)), ('after', slice(half, None))):
      metrics.reset()
      measure(label[some], to_tensor(probabilities[some]), weight[some])
      for name, array in metrics.state().items():
        key = f'{kind}|{slot}|{name}'
        sums[key] = sums[key] + array if key in sums else array
    progress_made()

  batches = itertools.chain.from_iterable(
    one.batches(size, rank=communicator.rank, size=communicator.size) for one in prepared
  )
  for i, batch in enumerate(itertools.islice(batches, max(1, -(-total // size)))):
    slot = i % len(names)
    rng = np.random.default_rng([cfg.seed, communicator.rank, i])
    order = rng.permutation(len(batch.dense))
    score(batch, permuted(batch, slot, len(names), order), slot)
  sums = communicator.sum_arrays(sums)

  def quality(kind: str, slots: Sequence[int]) -> JsonObject:
    state: dict[str, np.ndarray] = {}
    for key, array in sums.items():
      of, slot, name = key.split('|')
      if of == kind and int(slot) in slots:
        state[name] = state[name] + array if name in state else array
    return result(state) if state else {}

  signs = {'rmse': -1} if cfg.labels[0].loss == 'squared_error' else {'auc': 1, 'logloss': -1}
  by_slot: JsonObject = {}
  for i, name in enumerate(names):
    before, after = quality('before', [i]), quality('after', [i])
    by_slot[name] = {
      metric: None
      if before.get(metric) is None or after.get(metric) is None
      else sign * (before[metric] - after[metric])
      for metric, sign in signs.items()
    }
  whole = quality('before', range(len(names)))
  return {metric: whole.get(metric) for metric in signs} | {'slots': by_slot}
