"""Reads the config and the events of a run, which may be finished, at work or killed."""

import dataclasses
import functools
import json
import os
from collections.abc import Mapping

import numpy as np
import pandas as pd

from trainer import config
from trainer.errors import UserError
from trainer.plain_data import Json
from trainer.reporting.events import read_events

SPLITS = ('next', 'valid', 'test')
# Fields that events have for each task.
QUALITY = (
  *(*config.METRICS, 'base_logloss', 'base_rmse', 'calibration', 'ctr', 'mean', 'weight'),
  *('examples', 'effective_clicks', 'effective_others'),
)
# Columns that RecordedRun.events always has, even if no event has the field yet.
EVENT_COLUMNS = (
  *('pass', 'day', 'epoch', 'split', 'samples', 'status', 'fate', 'tasks', 'seconds', 'bad'),
  *('slots', 'dense', 'features', 'admitted', 'table_bytes', 'disk_bytes', 'examples_per_second'),
  *QUALITY,
)


@dataclasses.dataclass(frozen=True)
class RecordedRun:
  """The config and the events of a run, with the metrics of one of its tasks."""

  directory: str
  cfg: config.Config
  events: pd.DataFrame  # of read_events, with every column of EVENT_COLUMNS
  truth: dict  # of truth.json, which lies beside a synthetic log; {} for other logs
  task: str = ''  # '' if there is one label

  @property
  def name(self) -> str:
    return os.path.basename(os.path.normpath(self.directory))

  @property
  def metric(self) -> str:
    """The metric by which the quality of the task is measured."""
    losses = {label.name: label.loss for label in self.cfg.data.labels}
    if losses.get(self.task, self.cfg.labels[0].loss) == 'squared_error':
      return 'rmse'
    return self.cfg.deciding_metric if self.task == self.deciding_task else 'auc'

  @property
  def deciding_task(self) -> str:
    """The task by which the best epoch is chosen; '' if there is one label."""
    return self.cfg.deciding_label.name if self.cfg.data.labels else ''

  @property
  def deciding(self) -> 'RecordedRun':
    """This run with the metrics of `deciding_task`."""
    return next(r for r in self.by_task() if r.task == self.deciding_task)

  def by_task(self) -> list['RecordedRun']:
    """Returns a copy of this run for each task, with its metrics; [self] if there is one label."""
    if not self.cfg.data.labels:
      return [self]
    return [self._of_task(label.name) for label in self.cfg.data.labels]

  def _of_task(self, name: str) -> 'RecordedRun':
    events = self.events.copy()
    rows = events[events['tasks'].map(lambda tasks: isinstance(tasks, dict) and name in tasks)]
    for figure in QUALITY:
      values = [tasks[name].get(figure) for tasks in rows['tasks']]
      events.loc[rows.index, figure] = pd.Series(values, rows.index, float)
    if name != self.cfg.labels[0].name:  # these fields are the first label's
      events = events.drop(columns=['deciles', 'ranking', 'spread'], errors='ignore')
      events['slots'] = events['slots'].where(events['event'] != 'eval')
    truth = self.truth
    if 'passes' in truth:
      passes = {key: r.get('tasks', {}).get(name, {}) for key, r in truth['passes'].items()}
      truth = truth | {'passes': passes}
    return dataclasses.replace(self, events=events, truth=truth, task=name)

  @functools.cached_property
  def _by_event(self) -> dict[str, pd.DataFrame]:
    return dict(iter(self.events.groupby('event')))

  def of(self, event: str) -> pd.DataFrame:
    return self._by_event.get(event, self.events[:0])

  def evaluated(self, split: str) -> pd.DataFrame:
    rows = self.of('eval')
    return rows[rows['split'] == split]

  @functools.cached_property
  def best(self) -> pd.Series | None:
    """The evaluation of data.valid that chose the kept state; None if the last state is kept."""
    chosen = self.events[self.events['event'].isin(['best', 'best_forgotten'])].tail(1)
    if not len(chosen) or chosen['event'].iloc[0] == 'best_forgotten':
      return None
    evaluated = self.evaluated('valid').loc[: chosen.index[0]]
    return evaluated.iloc[-1] if len(evaluated) else None

  def of_kept(self, event: str) -> pd.DataFrame:
    """Returns the events of one kind, up to the step of the state kept for prediction."""
    events = self.of(event)
    return events if self.best is None else events[events['step'] <= self.best['step']]

  @property
  def begins_with_another(self) -> bool:
    """Whether the run began with the model of another (--init_from), so not at step 0."""
    starts = self.of('start')
    return len(starts) > 0 and starts.iloc[0]['step'] > 0

  def added_passes(self) -> list[str]:
    """Returns the names of passes that came when the run had gone through the others in epochs."""
    first = self.of('train').drop_duplicates('pass')
    return first['pass'][first['epoch'] > first['epoch'].min()].tolist()

  @functools.cached_property
  def scores(self) -> dict[str, pd.Series]:
    """{split: evaluation} of the kept state on valid and test or, without them, the last of next.

    If the last state is kept, evaluations from before the last trained pass do not count.
    """
    evaluated = {split: self.evaluated(split) for split in ('valid', 'test', 'next')}
    if self.best is None:
      trained = self.of('train')['step'].max()
      for split in ('valid', 'test'):
        evaluated[split] = evaluated[split][~(evaluated[split]['step'] < trained)]
    last = {split: rows.iloc[-1] for split, rows in evaluated.items() if len(rows)}
    if self.best is not None:
      last['valid'] = self.best
    return {split: row for split, row in last.items() if split != 'next'} or last

  @property
  def baseline(self) -> str:
    """What the metrics of `constants` are of."""
    return 'popular' if self.cfg.ranking_metrics else 'constant'

  @functools.cached_property
  def constants(self) -> pd.DataFrame:
    """The metrics of a constant for each event `train` and `eval`.

    It is the weighted mean of the labels trained up to this event, NaN before the first pass. It is
    among all impressions, not those that model.negative_sampling_rate has kept, where the run's own
    predictions are. Where items are found, it is the list of the most shown ones.
    """
    rows = self.events[self.events['event'].isin(['train', 'eval'])]
    ctr, mean, base, weight = (
      rows[field].astype(float) for field in ('ctr', 'mean', 'base_rmse', 'weight')
    )
    mean = mean.fillna(ctr)
    weight = weight.where((rows['event'] == 'train') & mean.notna(), 0.0)
    known = (weight * mean.fillna(0)).cumsum() / weight.cumsum()
    rate = self.cfg.model.negative_sampling_rate
    is_sampled = ctr.isna() | ~rows['split'].isin(['valid', 'test'])
    known = known.where(is_sampled, known * rate / (known * rate + 1 - known))
    with np.errstate(divide='ignore', invalid='ignore'):
      # 0 · log 0 is 0, where all labels and the constant are 0.
      losses = [s * np.log(p).where(s > 0, 0) for s, p in ((ctr, known), (1 - ctr, 1 - known))]
    figures = {'logloss': -sum(losses), 'rmse': np.hypot(base, known - mean)}
    figures |= {'auc': 0.5 + 0 * known * ctr, 'calibration': known / ctr}
    figures |= {name: rows.get(f'base_{name}') for name in self.cfg.ranking_metrics}
    return pd.DataFrame(figures)

  @property
  def samples(self) -> float:
    """The number of samples trained on. A sample counts once, however many epochs there are."""
    return self.of('train').drop_duplicates('pass')['samples'].sum()

  def by_slot(self, event: str, field: str, columns: str = 'slots') -> pd.DataFrame:
    """Returns the statistic `field`: a row for each event, a column for each slot that has it.

    `columns` is 'slots', or 'dense' for dense columns in place of slots.
    """
    of_slots = self.of(event)[columns].dropna()
    rows = [{slot: values.get(field) for slot, values in slots.items()} for slots in of_slots]
    return pd.DataFrame(rows, of_slots.index).dropna(axis=1, how='all')

  def of_scores(self, field: str) -> dict[str, Mapping[str, Json]]:
    """Returns {split: value} of the field in `scores`, without splits whose value is no dict."""
    return {s: row[field] for s, row in self.scores.items() if isinstance(row.get(field), dict)}

  def kept_slots(self) -> dict[str, dict]:
    """Returns statistics of each slot's rows in the kept state, {slot: {name: value}}.

    `shows` and `clicks` are of one epoch; if the run began with another's model, of all epochs.
    """
    trained = self.of_kept('train')
    statistics = trained['slots'].dropna()
    if not len(statistics):
      return {}
    # If a slot has the key `counts`, shows are reset at the start of each epoch.
    is_one = self.cfg.counted_fields() or self.begins_with_another
    epochs = 1 if is_one else max(1, trained['epoch'].nunique())
    return {
      slot: values | {name: values[name] / epochs for name in ('shows', 'clicks') if name in values}
      for slot, values in statistics.iloc[-1].items()
    }

  def undecayed(self) -> float:
    """Returns by which factor the days' decay has reduced the number of impressions; >= 1."""
    trained = self.of_kept('train')
    if self.cfg.counted_fields():  # shows are reset at the start of each epoch
      trained = trained[trained['epoch'] == trained['epoch'].iloc[-1]]
    ends = np.searchsorted(self.of('day_end').index, trained.index)
    left = trained['samples'] * self.cfg.policy().decay ** (ends[-1] - ends)
    return trained['samples'].sum() / left.sum()

  def reachable(self, name: str, metric: str) -> float | None:
    """Returns the metric that the true click probabilities have on the pass `name`, or None."""
    return self.truth.get('passes', {}).get(name, {}).get(metric)


def importances(event: pd.Series) -> dict[str, dict[str, float]]:
  """Returns what each column of the log is worth, of an event `importance`.

  Version 0.2.0 permuted slots and dense columns one by one.
  """
  if isinstance(columns := event.get('columns'), dict):
    return columns
  dense = event.get('dense')
  return event['slots'] | (dense if isinstance(dense, dict) else {})


def _truth(data: config.Data) -> dict:
  truth: dict = {}
  for pattern in [*data.train, *data.valid, *data.test]:
    path = os.path.join(os.path.dirname(os.path.expanduser(pattern)), 'truth.json')
    if os.path.exists(path):
      with open(path, encoding='utf-8') as f:
        of_log = json.load(f)
      truth |= of_log | {'passes': truth.get('passes', {}) | of_log['passes']}
  return truth


def read_run(run_dir: str) -> RecordedRun:
  """Reads what a run has written so far; its training data is not needed."""
  cfg = config.load_of_run(run_dir)
  if not os.path.exists(os.path.join(run_dir, 'metrics.jsonl')):
    raise UserError(f'{run_dir}: no metrics.jsonl there; wanted the run_dir of a training run')
  events = read_events(run_dir, without='heartbeat')
  missing = [name for name in EVENT_COLUMNS if name not in events]
  events = events.reindex(columns=[*events, *missing])
  events['samples'] = events['samples'].fillna(events['examples'])  # of version 0.2
  return RecordedRun(run_dir, cfg, events, _truth(cfg.data))
