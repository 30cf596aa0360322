"""A run as a run of MLflow (the extra `mlflow`).

MLflow's own variables say where it goes: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME.
"""

import os
import re
import time
from collections.abc import Mapping, Sequence

from trainer.config import Config, flatten

_MOST_PARAMS = 100  # that MLflow takes at once


def _key(name: str) -> str:
  """Returns a name in the letters that MLflow takes."""
  return re.sub(r'[^\w./ -]', '_', name)


class MlflowTracker:
  """Settings as params, figures as metrics SPLIT/NAME, files as artifacts.

  Args:
    cfg: of the run.
    known: the id of the run to go on with; None begins one.

  Attributes:
    id: of the run.
  """

  def __init__(self, cfg: Config, known: str | None):
    import mlflow

    name = None if known else os.path.basename(os.path.normpath(cfg.run_dir))
    run = mlflow.start_run(run_id=known, run_name=name)
    self.id, self._client = run.info.run_id, mlflow.MlflowClient()
    settings = {_key(key): str(value) for key, value in flatten(cfg.model_dump()).items()}
    # MLflow never changes a param: what changed since stands in config.yaml.
    new = [
      mlflow.entities.Param(key, value)
      for key, value in settings.items()
      if key not in run.data.params
    ]
    for first in range(0, len(new), _MOST_PARAMS):
      self._client.log_batch(self.id, params=new[first : first + _MOST_PARAMS])

  def scalars(self, kind: str, step: int, values: Mapping[str, float]) -> None:
    """Logs figures by name; `kind` is the split or the event that they are of."""
    from mlflow.entities import Metric

    now = int(1000 * time.time())
    # A metric auc leaves no room for auc/TASK in a store of files.
    metrics = [
      Metric(_key(f'{kind}/{name.replace("/", "_")}'), value, now, step)
      for name, value in values.items()
    ]
    self._client.log_batch(self.id, metrics=metrics)

  def end(self, is_finished: bool, paths: Sequence[str]) -> None:
    """Logs files and directories, and ends the run."""
    for path in paths:
      if os.path.isdir(path):
        self._client.log_artifacts(self.id, path, os.path.basename(path))
      else:
        self._client.log_artifact(self.id, path)
    self._client.set_terminated(self.id, 'FINISHED' if is_finished else 'KILLED')
