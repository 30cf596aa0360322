"""Early stopping: lowers the learning rates, then ends the run, if data.valid stops improving."""

from collections.abc import Iterator

from absl import logging

from trainer import config
from trainer.config.train import Train
from trainer.plain_data import JsonObject
from trainer.reporting.metric_text import has_one_class, metric_text, plus_minus
from trainer.training.run_state import Progress


def follow(
  train: Train, metric: str, progress: Progress, values: JsonObject, step: int
) -> Iterator[str]:
  """Compares an epoch's metrics of data.valid with the best epoch's; yields lines for the user.

  It updates `best`, `best_step`, `best_passes`, `stalls`, `rate` and `finished` of `progress`.
  `step` is the number of training steps so far.
  """
  plateau, has_tasks = train.plateau, 'tasks' in values
  if plateau and plateau.task:
    values = values['tasks'][plateau.task]
  value = values[metric]
  if value is None or (metric == 'logloss' and has_one_class(values)):
    logging.warning('data.valid has no %s: all labels are alike, or all weights are 0', metric)
    return
  interval = plus_minus(metric, values, has_tasks)
  told = f'valid {metric} {metric_text(metric, value)}{interval}'
  value *= config.direction(metric)
  if progress.best is None or value > progress.best + (plateau.min_delta if plateau else 0):
    progress.best, progress.stalls, progress.best_step = value, 0, step
    progress.best_passes = progress.done
    yield f'{told} is the best so far'
    return
  if not plateau:
    return
  progress.stalls += 1
  yield f'{told} is not better than the best, {metric_text(metric, abs(progress.best))}'
  progress.finished = progress.stalls >= plateau.stop_after
  lowers = progress.stalls % plateau.patience == 0
  if lowers:
    progress.rate *= plateau.factor
  if progress.finished:
    best = f'{progress.epoch - progress.stalls}, at step {progress.best_step:,}'
    yield f'stopping after epoch {progress.epoch}; the best is {best}'
  elif lowers:
    base = 'scheduled' if train.schedule else 'configured'
    yield f'learning rates are now {progress.rate:g} of the {base} ones'
