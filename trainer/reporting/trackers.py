"""Trackers beyond the run_dir, MLflow and Weights & Biases, which `report.to` names."""

import contextlib
import importlib.util
import os
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from trainer import files
from trainer.config import Config
from trainer.errors import UserError
from trainer.reporting.mlflow_tracker import MlflowTracker
from trainer.reporting.wandb_tracker import WandbTracker

# By the name in `report.to`, which is the name of the package that a tracker needs, too.
TRACKERS = {'mlflow': MlflowTracker, 'wandb': WandbTracker}
_MOST_WAITING = 10_000  # calls that a slow tracker has yet to make
SECONDS_TO_END = 300  # that a run waits for a tracker once it is done
_FILES = ('config.yaml', 'metrics.jsonl', 'report.html')


class Tracker(Protocol):
  """A run of a tracker; everything is called from one thread and may raise any error.

  The constructor takes the config and the id of the run that goes on, None for a new one.

  Attributes:
    id: of the run, by which it can be continued.
  """

  id: str

  def scalars(self, kind: str, step: int, values: Mapping[str, float]) -> None:
    """Shows figures by name; `kind` is the split or the event that they are of."""

  def end(self, is_finished: bool, paths: Sequence[str]) -> None:
    """Keeps files and directories, and ends the run."""


def check_packages(names: Iterable[str]) -> None:
  """Checks that the packages of trackers are installed.

  Raises:
    UserError: naming the first one that is missing.
  """
  for name in names:
    if name in TRACKERS and importlib.util.find_spec(name) is None:
      raise UserError(
        f"report.to: found '{name}', whose package is not installed; wanted it: pip install "
        f"'ctr-trainer[{name}]'"
      )


class InBackground:
  """Calls a tracker in a thread of its own: the training never waits for a server.

  Args:
    name: of the tracker, one of TRACKERS.
    cfg: of the run.
    guarded: tells of an error and goes on, as EventLog.guarded.
  """

  def __init__(
    self,
    name: str,
    cfg: Config,
    guarded: Callable[[str], contextlib.AbstractContextManager],
  ):
    self._name, self._cfg, self._guarded = name, cfg, guarded
    self._calls: queue.Queue = queue.Queue(_MOST_WAITING)
    self._has_failed = False
    self._thread = threading.Thread(target=self._run, name=name, daemon=True)
    self._thread.start()

  def call(self, action: Callable[[Tracker], None]) -> None:
    """Has the thread call `action`, after those of before."""
    with self._told_once():
      self._calls.put_nowait(action)

  def close(self, status: str, is_waiting: Callable[[], None]) -> None:
    """Ends the tracker's run, with the files that the run has written.

    Args:
      status: of the run.
      is_waiting: called every second meanwhile.
    """
    run_dir = self._cfg.run_dir
    paths = [os.path.join(run_dir, name) for name in (*_FILES, 'exports')]
    there = [path for path in paths if os.path.exists(path)]
    self.call(lambda tracker: tracker.end(status == 'finished', there))
    self.call(None)
    for _ in range(SECONDS_TO_END):
      self._thread.join(1)
      if not self._thread.is_alive():
        return
      is_waiting()
    with self._told_once():
      raise TimeoutError(f'has not taken all that it was sent within {SECONDS_TO_END} s')

  def _run(self) -> None:
    tracker = None
    with self._told_once():
      tracker = self._begin()
    for action in iter(self._calls.get, None):
      if tracker is not None:
        with self._told_once():
          action(tracker)

  def _begin(self) -> Tracker:
    """Begins the tracker's run, or goes on with that of this run_dir."""
    path = os.path.join(self._cfg.run_dir, f'{self._name}_run')  # holds the run's id
    known = None
    with contextlib.suppress(FileNotFoundError), open(path, encoding='utf-8') as f:
      known = f.read()
    tracker = TRACKERS[self._name](self._cfg, known)
    files.write_synced(path, tracker.id.encode())
    return tracker

  @contextlib.contextmanager
  def _told_once(self):
    """Tells of the first error; the others of a network that is down read alike."""
    try:
      yield
    except Exception:
      was_told, self._has_failed = self._has_failed, True
      if not was_told:
        with self._guarded(self._name):
          raise
