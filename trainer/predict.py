"""Predicts with a run: `python -m trainer.predict --run_dir DIR --data PATTERN --out FILE`.

It writes one probability a line, in input order; of several tasks one a column, with a comma
between them, in the order of data.labels.
"""

import os

from absl import flags

from trainer import command_line
from trainer.errors import UserError, plain_errors

RUN_DIR = flags.DEFINE_string('run_dir', None, 'A run of trainer.run.', required=True)
DATA = flags.DEFINE_multi_string(
  'data', [], 'Files to predict on; data.test of the config where left out. May be repeated.'
)
OUT = flags.DEFINE_string('out', '-', 'Where to write; - is standard output.')
SET = flags.DEFINE_multi_string('set', [], 'Overrides a key of the config.')
CHECKPOINT = flags.DEFINE_enum(
  'checkpoint', 'best', ['best', 'last'], 'best by validation, or the last.'
)


@command_line.command
def main() -> None:
  from trainer.data.passes import passes
  from trainer.training.job import finished_job

  # A bad record ends it: dropped ones would shift the lines after them.
  overrides = [*SET.value, 'data.max_bad_share=0']
  with (
    finished_job(RUN_DIR.value, overrides, CHECKPOINT.value) as job,
    plain_errors('cannot write --out'),
  ):
    patterns = DATA.value or job.cfg.data.test
    if not patterns:
      raise UserError(
        '--data: found none, and the config has no data.test; wanted files to predict on'
      )
    prepared = job.inputs.prepared(passes(job.cfg, patterns, '--data'), 'predict')
    out = '/dev/stdout' if OUT.value == '-' else f'{OUT.value}.new{os.getpid()}'
    with open(out, 'w', encoding='ascii') as f:
      for one in prepared:
        for _, probabilities in job.evaluation.predict(one):
          rows = probabilities.reshape(len(probabilities), -1)
          f.writelines(','.join(f'{p:.9g}' for p in row) + '\n' for row in rows)
    if OUT.value != '-':
      os.replace(out, OUT.value)


if __name__ == '__main__':
  main()
