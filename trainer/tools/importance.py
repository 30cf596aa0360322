"""Permutation importance: how much of a model's quality each column of the log carries."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from trainer.config import Config
from trainer.data.arrays import ranges
from trainer.data.features import SlotBatch
from trainer.data.prepared import PreparedPass
from trainer.evaluation.finished_run import FinishedRun
from trainer.model import influence
from trainer.model.influence import Measured
from trainer.plain_data import JsonObject
from trainer.reporting.listener import Listener
from trainer.reporting.metric_text import Z
from trainer.tools.columns import units
from trainer.training.inputs import Inputs
from trainer.training.run_log import RunLog

# The most predictions to make, on request and at the end of a job. They limit time and memory.
MOST_PREDICTIONS, MOST_AT_END = 1 << 22, 1 << 18
MOST_REPETITIONS = 5  # the most permutations of a column
_LEAST_BATCH = 1024


class Importance(Listener):
  """At the end of a run, writes the permutation importance of each column for the kept state."""

  def __init__(self, cfg: Config, inputs: Inputs, log: RunLog):
    self._cfg, self._inputs, self._log = cfg, inputs, log

  def finished(self, prepared: Sequence[PreparedPass], split: str) -> None:
    with self._log.clock.of('evaluate'):
      importance = column_importance(self._cfg, self._inputs, prepared, MOST_AT_END)
    self._log.write('importance', split=split, **importance)


def importance_table(run: FinishedRun, prepared: Sequence[PreparedPass]) -> pd.DataFrame:
  """Returns the result of `column_importance` as a table with a row per column of the log.

  The most important comes first. Columns of the table: `auc_worse_by`, `auc_plus_minus` and so on.
  Its `attrs['examples']` is the number of scored samples.
  """
  importance = column_importance(run.cfg, run.inputs, prepared, MOST_PREDICTIONS)
  table = pd.DataFrame(importance['columns']).T.astype(float).rename_axis('column')
  table.columns = [n if n.endswith('_plus_minus') else f'{n}_worse_by' for n in table]
  table.attrs['examples'] = importance['examples']
  return table.sort_values(table.columns[0], ascending=False)


def column_importance(
  cfg: Config, inputs: Inputs, prepared: Sequence[PreparedPass], most_predictions: int
) -> JsonObject:
  """Measures how much worse metrics get if a column is permuted over samples.

  This is permutation importance (Breiman 2001, "Random Forests"). Each column of the log is
  permuted over all scored samples, with all slots and dense columns that are made of it
  (trainer.tools.columns), several times if `most_predictions` allows. Every process calls it and
  gets the same result, which does not depend on the number of processes or on the batch size.

  Args:
    most_predictions: the limit of samples · columns · repetitions. To keep it, a random part of the
      samples is scored.
  Returns:
    A dict with these keys. A figure that the samples do not define is None.

    - examples: the number of scored samples. Those without a label or of weight 0 are not scored.
    - repetitions: how often each column was permuted.
    - auc, logloss: the metrics of the samples as they are; for squared error, rmse instead.
    - columns: {name: {auc: how much it falls, logloss: how much it rises, auc_plus_minus and
      logloss_plus_minus: half of the 95 % interval}}. The interval covers both the choice of the
      samples and of the permutations.
  """
  names, rng = units(cfg), np.random.default_rng(cfg.seed)
  members = np.zeros([len(names), len(cfg.data.slots) + len(cfg.data.dense)], bool)
  for own, places in zip(members, names.values()):
    own[places] = True
  known = np.flatnonzero(np.concatenate([p.counts(0) for p in prepared]))
  count = min(len(known), most_predictions // (1 + len(names)))
  repetitions = min(MOST_REPETITIONS, max(1, most_predictions // max(1, count * len(names))))
  chosen = known[np.sort(rng.choice(len(known), count, replace=False, shuffle=False))]
  samples = _Samples(prepared, chosen, len(cfg.data.slots))
  # In the first round, no sample takes a value of another one.
  columns = np.array([0, *np.repeat(np.arange(len(names)), repetitions)])
  donors = np.stack([np.arange(count), *(rng.permutation(count) for _ in columns[1:])])
  batch_size = max(_LEAST_BATCH, cfg.train.batch_size // inputs.communicator.size)
  predictions = _predictions(inputs, samples, members[columns], donors, batch_size)
  labels, weights = samples.first_task()
  metrics = {'auc': (1, influence.auc), 'logloss': (-1, influence.logloss)}
  if cfg.labels[0].loss == 'squared_error':
    metrics = {'rmse': (-1, influence.rmse)}
  whole: JsonObject = {}
  losses: list[JsonObject] = [{} for _ in names]
  for metric, (sign, measure) in metrics.items():
    rounds = [measure(labels, p, weights) for p in predictions]
    whole[metric] = rounds[0] and rounds[0].value
    for i, values in enumerate(losses):
      first = 1 + i * repetitions
      lost = _difference(rounds[0], rounds[first : first + repetitions])
      values[metric] = lost and sign * lost.value
      values[f'{metric}_plus_minus'] = lost and Z * float(np.linalg.norm(lost.influence))
  sizes = {'examples': count, 'repetitions': repetitions}
  return sizes | whole | {'columns': dict(zip(names, losses))}


def _difference(whole: Measured | None, rounds: Sequence[Measured | None]) -> Measured | None:
  """Returns the metric of the samples as they are, minus its mean over the permutations."""
  if whole is None:
    return None
  value, influence = (np.mean(parts, axis=0) for parts in zip(*rounds))
  return Measured(whole.value - float(value), whole.influence - influence)


def _predictions(
  inputs: Inputs, samples: '_Samples', members: np.ndarray, donors: np.ndarray, batch_size: int
) -> np.ndarray:
  """Predicts n samples in each of R rounds; in each round, one column is permuted.

  Every process calls it, makes its share of the predictions, and receives all of them.

  Args:
    members: which slots and dense columns are permuted in each round, bool [R, F + Dn].
    donors: for each round and sample, the index of the sample whose values in these it takes,
      int64 [R, n].
  Returns:
    The predictions of the first task, float64 [R, n].
  """
  rank, size = inputs.communicator.rank, inputs.communicator.size
  start, end = (donors.size * r // size for r in (rank, rank + 1))
  predictions = [np.zeros([0], np.float32)]
  for first in range(0, -(-donors.size // size), batch_size):  # equally often on every process
    places = np.arange(start + first, min(start + first + batch_size, end))
    rounds, own = np.divmod(places, donors.shape[1])
    batch = samples.batch(own, members[rounds], donors[rounds, own])
    predicted = inputs.step.predict(inputs.step.stage(batch))
    predictions.append(predicted if predicted.ndim == 1 else predicted[:, 0])
    inputs.progress_made()
  whole = np.concatenate(inputs.communicator.gather(np.concatenate(predictions)))
  return whole.astype(np.float64).reshape(donors.shape)


class _Samples:
  """Samples in memory, from which batches with permuted columns are made.

  Args:
    chosen: the indices of the samples, counted over all passes, int64 [n], ascending.
    slots: the number of slots, F.
  """

  def __init__(self, prepared: Sequence[PreparedPass], chosen: np.ndarray, slots: int):
    ends = np.cumsum([0, *(p.num_samples for p in prepared)])
    parts = np.split(chosen, np.searchsorted(chosen, ends[1:-1]))
    batches = [p.gather(part - end) for p, part, end in zip(prepared, parts, ends)]
    self._slots, counts = slots, []
    for batch in batches:
      cells = len(batch.dense) * slots
      is_single = not len(batch.segments) and len(batch.keys) == cells
      segments = np.arange(cells) if is_single else batch.segments
      counts.append(np.bincount(segments, minlength=cells))
    self._counts = np.concatenate(counts)  # how many features each sample has in each slot
    self._first = np.cumsum(self._counts) - self._counts
    self._keys, self._dense, self._label, self._weight = (
      np.concatenate([getattr(batch, name) for batch in batches])
      for name in ('keys', 'dense', 'label', 'weight')
    )
    values = [b.values if len(b.values) else np.ones(len(b.keys), np.float32) for b in batches]
    self._values = np.concatenate(values)

  def first_task(self) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first task's labels and weights, float64 [n]."""
    label = self._label if self._label.ndim == 1 else self._label[:, 0]
    return label.astype(np.float64), self._weight.astype(np.float64)

  def batch(self, samples: np.ndarray, members: np.ndarray, donors: np.ndarray) -> SlotBatch:
    """Returns a batch of samples, each of which takes some columns from another sample.

    Args:
      samples: the indices of the samples among the chosen ones, int64 [B].
      members: which slots and dense columns each sample takes, bool [B, F + Dn].
      donors: the index of the sample from which it takes them, int64 [B].
    """
    slots = self._slots
    sources = np.where(members, donors[:, None], samples[:, None])
    cells = (sources[:, :slots] * slots + np.arange(slots)).ravel()
    counts = self._counts[cells]
    features = ranges(self._first[cells], counts)
    values, segments = self._values[features], np.repeat(np.arange(len(cells)), counts)
    if np.all(counts == 1) and np.all(values == 1):
      values, segments = values[:0], segments[:0]
    return SlotBatch(
      keys=self._keys[features],
      values=values,
      segments=segments.astype(np.int32),
      dense=self._dense[sources[:, slots:], np.arange(self._dense.shape[1])],
      label=self._label[samples],
      weight=self._weight[samples],
      group=np.zeros([len(samples)], np.int64),
    )
