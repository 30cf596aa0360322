"""Reports a run to Weights & Biases (the extra `wandb`).

Its own variables say where to: WANDB_PROJECT, WANDB_MODE=offline and others.
"""

import os
from collections.abc import Mapping, Sequence

from trainer.config import Config


class WandbTracker:
  """A Tracker. It logs settings as the config, metrics as SPLIT/NAME, all files as one artifact."""

  def __init__(self, cfg: Config, known: str | None):
    import wandb

    self._wandb, self._name = wandb, os.path.basename(os.path.normpath(cfg.run_dir))
    self._run = wandb.init(
      id=known,
      resume='allow',
      name=self._name,
      dir=cfg.run_dir,
      config=cfg.settings(),
      reinit='create_new',  # the caller of trainer.fit may have a run of its own
      # W&B asks nothing in the terminal and leaves the output of the run alone.
      settings=wandb.Settings(console='off', silent=True, login_timeout=1),
    )
    self.id = self._run.id
    # W&B's own steps can only grow, but a run that continues repeats some steps.
    self._run.define_metric('*', step_metric='step')

  def scalars(self, kind: str, step: int, values: Mapping[str, float]) -> None:
    self._run.log({f'{kind}/{name}': value for name, value in values.items()} | {'step': step})

  def end(self, is_finished: bool, paths: Sequence[str]) -> None:
    artifact = self._wandb.Artifact(f'run-{self.id}', type='run')
    for path in paths:
      if os.path.isdir(path):
        artifact.add_dir(path, os.path.basename(path))
      else:
        artifact.add_file(path)
    self._run.log_artifact(artifact)
    self._run.finish(exit_code=0 if is_finished else 1)
