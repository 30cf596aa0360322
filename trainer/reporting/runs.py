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
      events = events.drop(columns=['deciles', 'ranking', 'spread'], errors='ignore')
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
    """The evaluation of data.valid whose state is kept as the best, and predicts.

    None where no validation chooses among states: then the last state is kept. Of several tasks the
    one that decides says which it is.
    """
    if self.task != self.deciding_task:
      best = self.deciding.best
      return None if best is None else self.events.loc[best.name]
    if self.cfg.data.watch or self.metric not in self.events:
      return None
    plateau = self.cfg.train.plateau
    margin = plateau.min_delta if plateau else 0
    sign = -1 if self.metric in ('logloss', 'rmse') else 1
    best = None
    for _, one in self.evaluated('valid').dropna(subset=[self.metric]).iterrows():
      if best is None or sign * one[self.metric] > sign * best[self.metric] + margin:
        best = one
    return best

  def of_kept(self, event: str) -> pd.DataFrame:
    """The events of one kind up to the state that is kept."""
    found = self.of(event)
    return found if self.best is None else found[found['step'] <= self.best['step']]

  @functools.cached_property
  def scores(self) -> dict[str, pd.Series]:
    """The evaluations of the state that is kept, by split: of valid, of test.

    Where there is neither, next has the last pass before it was trained on.
    """
    found = {split: self.evaluated(split) for split in ('valid', 'test', 'next')}
    last = {split: rows.iloc[-1] for split, rows in found.items() if len(rows)}
    if self.best is not None:
      last['valid'] = self.best
    return {s: one for s, one in last.items() if s != 'next'} or last

  @property
  def samples(self) -> float:
    """How many samples it has trained on, each counted once however many epochs there were."""
    return self.of('train').drop_duplicates('pass')['examples'].sum()

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
