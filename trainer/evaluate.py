"""Evaluates a run: `python -m trainer.evaluate --run_dir DIR [--data PATTERN]…`.

It prints one JSON object.
"""

import json

from absl import flags

from trainer import command_line
from trainer.errors import UserError

RUN_DIR = flags.DEFINE_string('run_dir', None, 'A run of trainer.run.', required=True)
DATA = flags.DEFINE_multi_string(
  'data', [], 'Files to evaluate on; data.test of the config where left out. May be repeated.'
)
SET = flags.DEFINE_multi_string('set', [], 'Overrides a key of the config.')
CHECKPOINT = flags.DEFINE_enum(
  'checkpoint', 'best', ['best', 'last'], 'best by validation, or the last.'
)


@command_line.command
def main() -> None:
  from trainer.data.passes import passes
  from trainer.training.job import finished_job

  with finished_job(RUN_DIR.value, SET.value, CHECKPOINT.value) as job:
    patterns = DATA.value or job.cfg.data.test
    if not patterns:
      raise UserError(
        '--data: found none, and the config has no data.test; wanted files to evaluate on'
      )
    found = passes(job.cfg, patterns, '--data')
    print(json.dumps(job.evaluation.evaluate(job.inputs.prepared(found, 'evaluate'))))


if __name__ == '__main__':
  main()
