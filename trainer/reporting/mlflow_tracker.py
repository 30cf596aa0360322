"""Reports a run to MLflow (the extra `mlflow`).

MLflow's own variables say where to: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME.
"""

import os
import re
import time
from collections.abc import Mapping, Sequence

from trainer.config import Config

_MOST_PARAMS = 100  # of one request


def _key(name: str) -> str:
  """Replaces the characters that MLflow refuses in a name."""
  return re.sub(r'[^\w./ -]', '_', name)


class MlflowTracker:
  """A Tracker. It logs settings as params, metrics as SPLIT/NAME, and files as artifacts."""

  def __init__(self, cfg: Config, known: str | None):
    import mlflow

    name = None if known else os.path.basename(os.path.normpath(cfg.run_dir))
    run = mlflow.start_run(run_id=known, run_name=name)
    self.id, self._client = run.info.run_id, mlflow.MlflowClient()
    settings = {_key(key): str(value) for key, value in cfg.settings().items()}
    # MLflow cannot change a param; config.yaml has the settings that changed later.
    new = [
      mlflow.entities.Param(key, value)
      for key, value in settings.items()
      if key not in run.data.params
    ]
    for first in range(0, len(new), _MOST_PARAMS):
      self._client.log_batch(self.id, params=new[first : first + _MOST_PARAMS])

  def scalars(self, kind: str, step: int, values: Mapping[str, float]) -> None:
    from mlflow.entities import Metric

    now = int(1000 * time.time())
    # In a store of files, auc is a file and cannot be the directory of auc/TASK.
    metrics = [
      Metric(_key(f'{kind}/{name.replace("/", "_")}'), value, now, step)
      for name, value in values.items()
    ]
    self._client.log_batch(self.id, metrics=metrics)

  def end(self, is_finished: bool, paths: Sequence[str]) -> None:
    for path in paths:
      if os.path.isdir(path):
        self._client.log_artifacts(self.id, path, os.path.basename(path))
      else:
        self._client.log_artifact(self.id, path)
    self._client.set_terminated(self.id, 'FINISHED' if is_finished else 'KILLED')
