"""Reports a run to MLflow, if `report.to` names it."""

import contextlib
import importlib.util
import json
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from trainer import files
from trainer.errors import UserError, one_line
from trainer.plain_data import Json, JsonObject
from trainer.reporting.listener import Listener

if TYPE_CHECKING:  # importing TensorFlow takes seconds
  from trainer.training.run_log import RunLog

_MOST_PARAMS = 100  # params in one request
_MOST_WAITING = 10_000  # calls that may wait for a slow server
SECONDS_TO_END = 300  # how long a finished run waits for MLflow
_FILES = ('config.yaml', 'metrics.jsonl', 'report.html')


def _key(name: str) -> str:
  """Replaces the characters that MLflow refuses in a name."""
  return re.sub(r'[^\w./ -]', '_', name)


class MlflowTracker:
  """Reports to MLflow: settings as params, metrics as SPLIT/NAME, and files as artifacts.

  MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME say to which server and experiment. One thread
  makes all calls, and any may raise any error. `known` is the id of a run to continue.
  """

  def __init__(self, run_dir: str, settings: JsonObject, known: str | None):
    import mlflow

    name = None if known else os.path.basename(os.path.normpath(run_dir))
    run = mlflow.start_run(run_id=known, run_name=name)
    self.id, self._client = run.info.run_id, mlflow.MlflowClient()
    settings = {_key(key): str(value) for key, value in settings.items()}
    # MLflow cannot change a param; config.yaml has the settings that changed later.
    new = [mlflow.entities.Param(k, v) for k, v in settings.items() if k not in run.data.params]
    for first in range(0, len(new), _MOST_PARAMS):
      self._client.log_batch(self.id, params=new[first : first + _MOST_PARAMS])

  def scalars(self, kind: str, step: int, values: Mapping[str, float]) -> None:
    """Logs the metrics of `kind`, a split or event."""
    from mlflow.entities import Metric

    now = int(1000 * time.time())
    # In a store of files, auc is a file and cannot be the directory of auc/TASK.
    keys = [_key(f'{kind}/{name.replace("/", "_")}') for name in values]
    metrics = [Metric(key, value, now, step) for key, value in zip(keys, values.values())]
    self._client.log_batch(self.id, metrics=metrics)

  def end(self, is_finished: bool, paths: Sequence[str]) -> None:
    """Uploads the files and directories at `paths`, and ends the run as finished or as killed."""
    for path in paths:
      if os.path.isdir(path):
        self._client.log_artifacts(self.id, path, os.path.basename(path))
      else:
        self._client.log_artifact(self.id, path)
    self._client.set_terminated(self.id, 'FINISHED' if is_finished else 'KILLED')


class MlflowStudy:
  """A run in MLflow whose children are the trials of a study. Errors are told, and end nothing.

  As a context manager it ends the run, as killed if the `with` block raises.

  Args:
    searched: {config key: what it may be}, for tags.
    known: the id of a run to continue.
  """

  def __init__(self, study_dir: str, searched: Mapping[str, Json], known: str | None):
    self.id, self._dir = None, study_dir  # None if MLflow gives no run
    with self._told():
      import mlflow

      name = os.path.basename(os.path.normpath(study_dir))
      # The caller of trainer.tune may have a run of its own, which becomes the parent of this one.
      run = mlflow.start_run(known, run_name=name, nested=True, tags=_searched(searched))
      self.id, self._mlflow = run.info.run_id, mlflow

  def of_trial(self, settings: Mapping[str, Json]) -> list[str]:
    """Returns words to put before a trial's command: its run is a child, tagged with `settings`."""
    tags = {'mlflow.parentRunId': self.id} | _searched(settings)
    return ['env', f'MLFLOW_RUN_CONTEXT={json.dumps(tags)}'] if self.id else []

  def __enter__(self) -> 'MlflowStudy':
    return self

  def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
    with self._told():
      if self.id:
        for name in () if kind else ('report.html', 'trials.csv'):
          self._mlflow.log_artifact(os.path.join(self._dir, name), run_id=self.id)
        self._mlflow.end_run('KILLED' if kind else 'FINISHED')

  @contextlib.contextmanager
  def _told(self) -> Iterator[None]:
    try:
      yield
    except Exception as e:
      print(f'warning: mlflow: {one_line(e)}; the search does not need it')


def _searched(settings: Mapping[str, Json]) -> dict[str, str]:
  return {
    _key(f'searched.{key}'): value if isinstance(value, str) else json.dumps(value)
    for key, value in settings.items()
  }


def check_mlflow() -> None:
  """Refuses MLflow if it is not installed, or refuses a store that is no server."""
  if importlib.util.find_spec('mlflow') is None:
    wanted = "pip install 'ctr-trainer[mlflow]'"
    raise UserError(f"report.to: the package 'mlflow' is not installed; wanted {wanted}")
  import mlflow

  uri = mlflow.get_tracking_uri()
  if uri.partition(':')[0] not in ('file', uri):
    return
  try:
    mlflow.MlflowClient()
  except mlflow.exceptions.MlflowException as e:
    text = ' '.join(str(e).split()).partition('. ')[0]
    raise UserError(
      f'report.to: MLflow refuses {uri}: {text}; wanted MLFLOW_TRACKING_URI with a server or '
      'sqlite:///mlflow.db, or MLFLOW_ALLOW_FILE_STORE=true'
    ) from None


class Mlflow(Listener):
  """Calls MlflowTracker in a thread of its own, so that training never waits for a server."""

  what = 'mlflow'

  def __init__(self, run_dir: str, settings: JsonObject, log: 'RunLog'):
    self._run_dir, self._settings, self._log = run_dir, settings, log
    self._calls: queue.Queue = queue.Queue(_MOST_WAITING)
    self._has_failed = False
    self._thread: threading.Thread | None = None

  def begin(self) -> None:
    if self._thread is None:  # a worker may become the first one twice
      self._thread = threading.Thread(target=self._run, name='mlflow', daemon=True)
      self._thread.start()

  def scalars(self, kind: str, step: int, values: Mapping[str, float]) -> None:
    self._call(lambda tracker: tracker.scalars(kind, step, values))

  def _call(self, action: Callable[[MlflowTracker], None] | None) -> None:
    """Queues `action` for the thread, which runs the actions in order; None ends it."""
    with self._told_once():
      self._calls.put_nowait(action)

  def close(self, has_trained: bool) -> None:
    """Uploads the run's files, ends it in MLflow, and waits for that."""
    if self._thread is None:
      return
    is_finished = self._log.events.ending == 'finished'
    paths = [os.path.join(self._run_dir, name) for name in (*_FILES, 'exports')]
    there = [path for path in paths if os.path.exists(path)]
    self._call(lambda tracker: tracker.end(is_finished, there))
    self._call(None)
    for _ in range(SECONDS_TO_END):
      self._thread.join(1)
      if not self._thread.is_alive():
        return
      self._log.status.progress()
    with self._told_once():
      raise TimeoutError(f'did not take everything within {SECONDS_TO_END} s')

  def _run(self) -> None:
    tracker = None
    with self._told_once():
      tracker = self._begin()
    for action in iter(self._calls.get, None):
      if tracker is not None:
        with self._told_once():
          action(tracker)

  def _begin(self) -> MlflowTracker:
    """Starts a run in MLflow, or continues the one of this run_dir."""
    path = os.path.join(self._run_dir, 'mlflow_run')  # holds the run's id
    known = None
    with contextlib.suppress(FileNotFoundError), open(path, encoding='utf-8') as f:
      known = f.read()
    tracker = MlflowTracker(self._run_dir, self._settings, known)
    files.write_synced(path, tracker.id.encode())
    return tracker

  @contextlib.contextmanager
  def _told_once(self):
    """Catches errors, and reports only the first: if the network is down, every call fails."""
    try:
      yield
    except Exception:
      was_told, self._has_failed = self._has_failed, True
      if not was_told:
        with self._log.events.guarded(self.what):
          raise
