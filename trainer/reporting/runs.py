"""A run as its run_dir tells it: the config and the events, of a finished run or any other."""

import dataclasses
import functools
import json
import os

import pandas as pd

from trainer import config
from trainer.errors import UserError
from trainer.reporting.events import read_events

SPLITS = ('next', 'valid', 'test')
# What is there of any run, at whatever moment it was killed.
COLUMNS = ('pass', 'day', 'epoch', 'split', 'examples', 'status', 'fate', 'tasks')
QUALITY = ('auc', 'logloss', 'rmse', 'gauc', 'calibration', 'ctr')  # figures that each task has


@dataclasses.dataclass(frozen=True)
class RecordedRun:
  """What is known of a run.

  Attributes:
    directory: its run_dir.
    cfg: its config.
    events: of trainer.reporting.events.read_events, with their place in the file as the index, and
      every column of COLUMNS.
    truth: the content of truth.json beside its data, where the log was synthesized; else {}.
    task: whose figures the events have, one of data.labels; '' where there is one label.
  """

  directory: str
  cfg: config.Config
  events: pd.DataFrame
  truth: dict
  task: str = ''

  @property
  def name(self) -> str:
    """The last part of its run_dir."""
    return os.path.basename(os.path.normpath(self.directory))

  @property
  def metric(self) -> str:
    """What its quality is measured by."""
    losses = {label.name: label.loss for label in self.cfg.data.labels}
    if losses.get(self.task, self.cfg.labels[0].loss) == 'squared_error':
      return 'rmse'
    return self.cfg.deciding_metric if self.task == self.deciding_task else 'auc'

  @property
  def deciding_task(self) -> str:
    """The task that the best epoch is chosen by; '' where there is one label."""
    if not self.cfg.data.labels:
      return ''
    return self.cfg.deciding_label.name

  @property
  def deciding(self) -> 'RecordedRun':
    """The run with the figures of the deciding task."""
    return next(one for one in self.by_task() if one.task == self.deciding_task)

  def by_task(self) -> list['RecordedRun']:
    """The run once for each task, with the task's figures in its events; [itself] of one label."""
    if not self.cfg.data.labels:
      return [self]
    return [self._of_task(label.name) for label in self.cfg.data.labels]

  def _of_task(self, name: str) -> 'RecordedRun':
    events = self.events.copy()
    rows = events[events['tasks'].map(lambda tasks: isinstance(tasks, dict) and name in tasks)]
    for figure in QUALITY:
      values = [tasks[name].get(figure) for tasks in rows['tasks']]
      if figure in events or any(value is not None for value in values):
        events.loc[rows.index, figure] = pd.Series(values, rows.index, float)
    if name != self.cfg.labels[0].name:  # whose these are
      events = events.drop(columns=['deciles'], errors='ignore')
      evaluated = events['event'] == 'eval'
      if 'slots' in events:
        events['slots'] = events['slots'].where(~evaluated)
    truth = self.truth
    if 'passes' in truth:
      passes = {key: one.get('tasks', {}).get(name, {}) for key, one in truth['passes'].items()}
      truth = truth | {'passes': passes}
    return dataclasses.replace(self, events=events, truth=truth, task=name)

  def of(self, event: str) -> pd.DataFrame:
    """The events of one kind, with a column for every field that some event has."""
    return self.events[self.events['event'] == event]

  def evaluated(self, split: str) -> pd.DataFrame:
    """The evaluations of one split."""
    found = self.of('eval')
    return found[found['split'] == split]

  @functools.cached_property
  def best(self) -> pd.Series | None:
    """The best evaluation: of the validation where there is one, else of each pass ahead of it.

    Of several tasks the one that decides says which it is.
    """
    if self.task != self.deciding_task:
      best = self.deciding.best
      return None if best is None else self.events.loc[best.name]
    for split in ('valid', 'next', 'test'):
      found = self.evaluated(split)
      if len(found) and self.metric in found and found[self.metric].notna().any():
        sign = 1 if self.metric in ('logloss', 'rmse') else -1
        return found.loc[(sign * found[self.metric]).idxmin()]
    return None

  def reachable(self, name: str, metric: str) -> float | None:
    """What the true probabilities reach on a pass, where they are known."""
    return self.truth.get('passes', {}).get(name, {}).get(metric)


def _truth(cfg: config.Config) -> dict:
  found: dict = {}
  for pattern in [*cfg.data.train, *cfg.data.valid, *cfg.data.test]:
    path = os.path.join(os.path.dirname(os.path.expanduser(pattern)), 'truth.json')
    if os.path.exists(path):
      with open(path, encoding='utf-8') as f:
        one = json.load(f)
      found |= one | {'passes': found.get('passes', {}) | one['passes']}
  return found


def read_run(run_dir: str) -> RecordedRun:
  """Reads what a run has written so far; the data itself may be gone.

  Raises:
    UserError: where `run_dir` is not that of a run.
  """
  cfg = config.load_of_run(run_dir)
  if not os.path.exists(os.path.join(run_dir, 'metrics.jsonl')):
    raise UserError(f'{run_dir}: no metrics.jsonl there; wanted the run_dir of a training run')
  events = read_events(run_dir)
  missing = [name for name in COLUMNS if name not in events]
  return RecordedRun(run_dir, cfg, events.reindex(columns=[*events, *missing]), _truth(cfg))


def differing_keys(runs: list[RecordedRun]) -> pd.DataFrame:
  """The keys of the config in which runs differ: a row each, a column a run."""
  flat = {
    run.directory: pd.json_normalize(run.cfg.model_dump(exclude={'run_dir'})).iloc[0].map(str)
    for run in runs
  }
  table = pd.DataFrame(flat)
  return table[table.nunique(axis=1, dropna=False) > 1].fillna('')
