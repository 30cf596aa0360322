"""Writes report.html of a run, or of several to compare: `python -m trainer.report RUN_DIR…`.

A run may be finished, killed or still at work.
"""

import os

from absl import flags

from trainer import command_line
from trainer.errors import UserError, plain_errors

OUT = flags.DEFINE_string(
  'out', None, 'Where to write; RUN_DIR/report.html, or comparison.html of several runs.'
)


@command_line.command
def main(run_dirs: list[str]) -> None:
  from trainer.reporting import report

  if not run_dirs:
    raise UserError('found no RUN_DIR; wanted python -m trainer.report RUN_DIR…')
  default = os.path.join(run_dirs[0], 'report.html') if len(run_dirs) == 1 else 'comparison.html'
  with plain_errors('cannot write the report'):
    report.write(run_dirs, OUT.value or default)
  if not OUT.value:  # which may be the standard output
    print(default)


if __name__ == '__main__':
  main()
