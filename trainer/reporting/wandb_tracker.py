"""A run as a run of Weights & Biases (the extra `wandb`).

Its own variables say where it goes: WANDB_PROJECT, WANDB_MODE=offline and others.
"""

import os
from collections.abc import Mapping, Sequence

from trainer.config import Config


class WandbTracker:
  """Settings as config, figures as SPLIT/NAME over the run's own steps, files as an artifact.

  Args:
    cfg: of the run.
    known: the id of the run to go on with; None begins one.

  Attributes:
    id: of the run.
  """

  def __init__(self, cfg: Config, known: str | None):
    import wandb

    self._wandb, self._name = wandb, os.path.basename(os.path.normpath(cfg.run_dir))
    self._run = wandb.init(
      id=known,
      resume='allow',
      name=self._name,
      dir=cfg.run_dir,
      config=cfg.model_dump(),
      reinit='create_new',  # beside a run that the caller of trainer.fit may have
      # Nothing is asked in a terminal, and the run's lines stay as they are.
      settings=wandb.Settings(console='off', silent=True, login_timeout=1),
    )
    self.id = self._run.id
    # Steps of W&B only grow; a run that continues does some of its own again.
    self._run.define_metric('*', step_metric='step')

  def scalars(self, kind: str, step: int, values: Mapping[str, float]) -> None:
    """Logs figures by name; `kind` is the split or the event that they are of."""
    self._run.log({f'{kind}/{name}': value for name, value in values.items()} | {'step': step})

  def end(self, is_finished: bool, paths: Sequence[str]) -> None:
    """Logs files and directories, and ends the run."""
    artifact = self._wandb.Artifact(f'run-{self.id}', type='run')
    for path in paths:
      if os.path.isdir(path):
        artifact.add_dir(path, os.path.basename(path))
      else:
        artifact.add_file(path)
    self._run.log_artifact(artifact)
    self._run.finish(exit_code=0 if is_finished else 1)
