"""Shows what a config resolves to: `ctr-resolve --config FILE [--set a.b=value]…`.

Each key is printed with its meaning, its value and where the value comes from: *given*, *default*,
*from* another key, or *measured* on the log or the machine. `--run_dir DIR` alone shows the config
that a run was started with. `--changed` leaves out the keys that have their default, and their
meanings.
"""

import os
from collections.abc import Sequence

from absl import flags

from trainer import command_line, config
from trainer.config import schema_text
from trainer.errors import UserError

CONFIG = flags.DEFINE_string('config', None, 'YAML file to show.')
SET = flags.DEFINE_multi_string('set', [], 'KEY=VALUE, overrides the config. May be repeated.')
RUN_DIR = flags.DEFINE_string('run_dir', None, 'A run, whose measured values are shown.')
CHANGED = flags.DEFINE_bool('changed', False, 'Prints only keys that are not at their default.')


def resolved(path: str, overrides: Sequence[str] = (), run_dir: str | None = None) -> config.Config:
  """Returns the config that a start would train with: a YAML file's, or that of a run.

  Values that the run in its run_dir has measured stay. Without a run they are measured now, if the
  log is there.
  """
  if os.path.isdir(path):
    run_dir, path = path, os.path.join(path, config.GIVEN)
    if not os.path.exists(path):
      raise UserError(f'{run_dir}: no {config.GIVEN} there; wanted the run_dir of a training run')
  cfg = config.load(path, overrides, run_dir)
  from trainer.data.measured import measured
  from trainer.data.passes import paths_of_log

  values = measured(cfg)[0] if paths_of_log(cfg.data) else config.measured_of_run(cfg, cfg.run_dir)
  return config.resolve(cfg, values)


def explained(cfg: config.Config) -> str:
  """Returns a config as YAML with a comment on each key; with a run, its train.dense_dtype too."""
  path, notes = os.path.join(cfg.run_dir, 'dense_dtype'), {}
  if cfg.train.dense_dtype != 'float32' and os.path.exists(path):
    with open(path, encoding='utf-8') as f:
      notes['train.dense_dtype'] = f'measured: this run trains in {f.read()}'
  return schema_text.explained(cfg, notes)


@command_line.command
def main() -> None:
  if not (CONFIG.value or RUN_DIR.value):
    raise UserError('wanted --config FILE or --run_dir DIR')
  if not (CONFIG.value or os.path.isdir(RUN_DIR.value)):
    raise UserError(
      f'--run_dir {RUN_DIR.value}: no run there; wanted the run_dir of a training run'
    )
  cfg = resolved(CONFIG.value or RUN_DIR.value, SET.value, RUN_DIR.value)
  print('\n'.join(schema_text.changed(cfg)) if CHANGED.value else explained(cfg).rstrip())


if __name__ == '__main__':
  main()
