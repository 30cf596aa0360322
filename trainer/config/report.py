"""The section `report`: where the figures of a run go."""

from typing import Literal

from trainer.config.section import Section


class Report(Section):
  """Where the figures of a run go, in addition to metrics.jsonl and report.html in its run_dir."""

  to: list[Literal['tensorboard', 'mlflow', 'wandb']] = ['tensorboard']
  """tensorboard: into run_dir/tensorboard. mlflow and wandb: to MLflow and to Weights & Biases.
  They need the extra of their name (pip install 'ctr-trainer[mlflow]'), and their own variables say
  where figures go: MLFLOW_TRACKING_URI, WANDB_PROJECT and so on."""
