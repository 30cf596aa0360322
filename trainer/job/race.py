"""Trains candidates of a config for some epochs, to find which one a new run begins with."""

import os
import shutil
from collections.abc import Callable, Sequence

from trainer import config, runtime
from trainer.comm.communicator import SingleProcess
from trainer.data.passes import passes
from trainer.errors import BadPass
from trainer.evaluation.evaluators import evaluation_of
from trainer.files import UNFINISHED
from trainer.job.initial_values import set_biases, set_statistics
from trainer.training.inputs import Inputs
from trainer.training.loop import train_in_lockstep
from trainer.training.run_state import RunState
from trainer.training.step import TrainStep


def race(
  candidates: Sequence[config.Config], epochs: int, progress_made: Callable[[], None] = lambda: None
) -> list[float | None]:
  """Trains each config in this process alone; returns how well data.valid judges them.

  That is the metric by which the best epoch is chosen, negated where less is better. None: it has
  no value, or a pass cannot be read, of which the run itself will speak.
  """
  try:
    return [_reached(cfg, epochs, progress_made) for cfg in candidates]
  except BadPass:
    return [None] * len(candidates)
  finally:
    runtime.seed_everything(candidates[0].seed)  # as if there had been no race


def _reached(cfg: config.Config, epochs: int, progress_made: Callable[[], None]) -> float | None:
  runtime.seed_everything(cfg.seed)
  folder = os.path.join(cfg.run_dir, 'prepared', 'race', f'log{UNFINISHED}')
  communicator, never = SingleProcess(), lambda: False
  step = TrainStep(cfg, communicator)
  inputs = Inputs(cfg, communicator, step, progress_made, folder)
  state = RunState(cfg, communicator, step)
  try:
    train, valid = (
      inputs.prepared(passes(cfg, getattr(cfg.data, split), f'data.{split}'), split)
      for split in ('train', 'valid')
    )
    set_statistics(cfg, step, train[0], None)
    for epoch in range(epochs):
      if epoch and cfg.counted_fields():
        step.store.forget_counts()
      for prepared in train:
        if state.progress.unset_biases:
          set_biases(cfg, step, prepared, state.progress)
        step.dense.begin_pass(prepared, None, step.store, True)
        batches = inputs.staged(prepared, epoch, cfg.data.shuffle, ready=step.dense.for_step)
        calls = {'save': never, 'stop_requested': never, 'on_step': progress_made}
        train_in_lockstep(inputs, state, batches, **calls)
        step.consolidate()
    figures = dict(evaluation_of(inputs).figures(valid))
  finally:
    inputs.stop()
    shutil.rmtree(os.path.dirname(folder), ignore_errors=True)
  if cfg.train.plateau and cfg.train.plateau.task:
    figures = figures['tasks'][cfg.train.plateau.task]
  value = figures[cfg.deciding_metric]
  return None if value is None else value * config.direction(cfg.deciding_metric)
