"""Writes report.html of a run, or of several to compare: `python -m trainer.report RUN_DIR…`.

A run may be finished, killed or still at work.
"""

import contextlib
import os

from absl import flags

from trainer import command_line
from trainer.data.log_files import is_remote
from trainer.errors import UserError, plain_errors

OUT = flags.DEFINE_string(
  'out', None, 'Where to write; by default RUN_DIR/report.html, or comparison.html of several runs.'
)


@command_line.command
def main(run_dirs: list[str]) -> None:
  from trainer.reporting import report
  from trainer.storage.bucket import REPORTS, copy_of

  if not run_dirs:
    raise UserError('found no RUN_DIR; wanted ctr-report RUN_DIR…')
  default = 'comparison.html'
  if len(run_dirs) == 1:
    default = os.path.join('' if is_remote(run_dirs[0]) else run_dirs[0], 'report.html')
  with contextlib.ExitStack() as stack, plain_errors('cannot write the report'):
    local = [stack.enter_context(copy_of(run_dir, REPORTS)) for run_dir in run_dirs]
    report.write(local, OUT.value or default)
  if not OUT.value or (os.path.isfile(OUT.value) and not os.path.islink(OUT.value)):
    print(OUT.value or default)


if __name__ == '__main__':
  main()
