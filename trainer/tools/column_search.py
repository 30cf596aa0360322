"""Trains without each column that findings name, and says what is gained: `ctr-tune --columns`."""

import functools
import os
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator, Sequence

from trainer import api, config
from trainer.errors import ConfigError, UserError
from trainer.tools.columns import without
from trainer.tools.findings import suspicious
from trainer.tools.runs import read_run


def try_columns(
  path: str, study_dir: str, metric: str | None, overrides: Sequence[str], launcher: Sequence[str]
) -> Iterator[str]:
  """Trains as a config says, and without each column of the log that the findings of that run name.

  What gains is tried with another seed too: runs that differ by the seed alone may differ by more
  than the choice of samples explains. The same call goes on after an interruption.

  Args:
    metric: auc, logloss or rmse of the deciding label; by default the one that chooses the epoch.
    overrides, launcher: those of trainer.tune.
  Yields:
    A line on each training without a column, and at the end one on what is suggested. The runs are
    `study_dir`/all-SEED and `study_dir`/without-COLUMN-SEED.
  """
  cfg = config.load(path, overrides)
  cfg.model.want('interactions', f'{path}: --columns')
  if not cfg.data.valid:
    raise UserError(f'{path}: data.valid: columns are judged by it; wanted files')
  metric = (metric or cfg.deciding_metric).replace('gauc', 'auc')  # GAUC has no such interval
  label = cfg.deciding_label
  known = ('rmse',) if label.loss == 'squared_error' else ('auc', 'logloss')
  if metric not in known:
    wanted = f'{" or ".join(known)}, which label {label.name} has'
    raise UserError(f"--metric: found '{metric}'; wanted {wanted}")
  os.makedirs(study_dir, exist_ok=True)

  @functools.cache
  def trained(seed: int, column: str = '') -> api.Run:
    name = f'without-{urllib.parse.quote(column, safe="")}' if column else 'all'
    settings = [*overrides, f'seed={seed}', *(without(cfg, column) if column else ())]
    return _trained(path, settings, f'{study_dir}/{name}-{seed}', launcher)

  columns: Sequence[str] = suspicious(read_run(trained(cfg.seed).run_dir))
  gains: dict[str, float] = {}
  for seed in (cfg.seed, cfg.seed + 1) if columns else ():
    whole, gains = trained(seed), {}
    for column in columns:
      try:
        run = trained(seed, column)
      except ConfigError as e:  # other keys need the column
        yield str(e)
        continue
      table = whole.compare(run, cfg.data.valid).set_index(['task', 'metric'])
      if (label.name, metric) not in table.index:  # all its labels are alike
        raise UserError(f'data.valid: has no {metric}; wanted labels of both classes')
      row = config.direction(metric) * table.loc[label.name, metric]
      gain, low, high = row['difference'], *sorted(row[['low', 'high']])
      yield (
        f"without '{column}', seed {seed}: {metric} of data.valid gains {gain:.4f} "
        f'(95 % {low:.4f} to {high:.4f})'
      )
      if low > 0:
        gains[column] = gain
    if not (columns := list(gains)):
      break
  if gains:
    best = max(gains, key=gains.get)
    given = os.path.join(trained(cfg.seed, best).run_dir, config.GIVEN)
    yield f"suggested: without '{best}', which gains with two seeds"
    yield f'to train so: ctr-train --config {given} --run_dir NEW'
  else:
    yield 'suggested: all columns; findings name none without which two seeds gain'


def _trained(path: str, settings: Sequence[str], run_dir: str, launcher: Sequence[str]) -> api.Run:
  """Trains, or goes on with what was interrupted, in a process of its own; returns the run."""
  cfg, stored = config.load(path, settings, run_dir), os.path.join(run_dir, config.GIVEN)
  if os.path.exists(stored) and config.load(stored).given != cfg.given:
    raise UserError(f'{run_dir}: was trained with another config; wanted another --study_dir')
  command = [*launcher, sys.executable, '-m', 'trainer.run', '--config', path]
  command += [*(f'--set={setting}' for setting in settings), '--run_dir', run_dir]
  with open(f'{run_dir}.log', 'wb') as log:
    status = subprocess.run(command, stdout=log, stderr=log).returncode
  if status:
    raise UserError(f'{run_dir}: ended with status {status}, see {run_dir}.log')
  return api.load(run_dir)
