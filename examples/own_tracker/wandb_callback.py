"""A callback that reports a run to a tracker, here Weights & Biases (pip install wandb)."""

import wandb

import trainer


class WandbCallback(trainer.Callback):
  """Logs metrics as train/auc, valid/auc and kept/auc; `settings` go to wandb.init."""

  def __init__(self, **settings: object):
    self._settings = settings

  def on_train_begin(self) -> None:
    self._run = wandb.init(**self._settings)

  def on_pass_end(self, name: str, logs: dict) -> None:
    self._log('train', logs)

  def on_epoch_end(self, epoch: int, logs: dict) -> None:
    self._log('valid', logs)

  def on_train_end(self, logs: dict) -> None:
    self._log('kept', logs)
    self._run.finish()

  def _log(self, split: str, logs: dict) -> None:
    numbers = {name: value for name, value in logs.items() if isinstance(value, (int, float))}
    self._run.log({f'{split}/{name}': value for name, value in numbers.items()})
