"""The section `report`: where the figures of a run go."""

from typing import Literal

from trainer.config.section import PositiveInt, Section


class Report(Section):
  """Where the figures of a run go, in addition to metrics.jsonl and report.html in its run_dir."""

  to: list[Literal['tensorboard', 'mlflow']] = ['tensorboard']
  """tensorboard: into run_dir/tensorboard. mlflow: to MLflow, which needs its extra
  (pip install 'ctr-trainer[mlflow]'), and whose own variables say where figures go:
  MLFLOW_TRACKING_URI and so on."""
  keep_mb: PositiveInt | None = 100
  """How large metrics.jsonl may get, in MB; then the older half of its events is dropped, and the
  report is of the others. null: it keeps all."""
