"""Trains a config for some epochs, to find whether a new run should begin with it."""

import os
import shutil
from collections.abc import Callable

from trainer import config, runtime
from trainer.comm.communicator import SingleProcess
from trainer.errors import BadPass
from trainer.evaluation.task import task_of
from trainer.files import UNFINISHED
from trainer.job.initial_values import set_initial_values
from trainer.training.inputs import Inputs
from trainer.training.loop import train_in_lockstep
from trainer.training.run_state import RunState
from trainer.training.save_policy import SavePolicy


def reached(cfg: config.Config, epochs: int, progress_made: Callable[[], None]) -> float | None:
  """Trains in this process alone; returns how well data.valid judges the model.

  That is the metric by which the best epoch is chosen, negated where less is better. It is None if
  the metric has no value, or if a pass cannot be read, which the run itself will report.
  """
  folder = os.path.join(cfg.run_dir, 'prepared', 'race', f'log{UNFINISHED}')
  communicator, never = SingleProcess(), lambda: False
  task = task_of(cfg)
  step = task.step(communicator)
  inputs = Inputs(cfg, communicator, step, progress_made, folder)
  state = RunState(cfg, communicator, step)
  saves = SavePolicy(cfg.checkpoint, state, is_stream=False, goes_back=False)
  calls = {'saves': saves, 'save': never, 'stop_requested': never, 'on_step': progress_made}
  try:
    train, valid = map(inputs.of_split, ('train', 'valid'))
    for epoch in range(epochs):
      if epoch and cfg.counted_fields():
        step.store.forget_counts()
      for prepared in train:
        set_initial_values(cfg, step, state.progress, prepared)
        step.dense.begin_pass(prepared, step.store, True)
        batches = inputs.staged(prepared, epoch, cfg.data.shuffle, ready=step.dense.for_step)
        train_in_lockstep(inputs, state, batches, **calls)
        step.consolidate()
    values = dict(task.evaluator(inputs).figures(valid))
  except BadPass:
    return None
  finally:
    inputs.stop()
    shutil.rmtree(os.path.dirname(folder), ignore_errors=True)
    runtime.seed_everything(cfg.seed)  # what follows begins as if there had been no race
  if cfg.train.plateau and cfg.train.plateau.task:
    values = values['tasks'][cfg.train.plateau.task]
  value = values[cfg.deciding_metric]
  return value and value * config.direction(cfg.deciding_metric)
