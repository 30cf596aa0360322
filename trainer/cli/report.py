"""Writes report.html of a run, or of several to compare: `ctr-report RUN_DIR…`.

A run may be finished, killed or still at work. With --data, the runs to compare predict the same
samples, so their differences have paired intervals.
"""

import contextlib
import gc
import os

from absl import flags

from trainer import api, command_line
from trainer.data.file_system import is_remote
from trainer.errors import UserError, plain_errors

OUT = flags.DEFINE_string(
  'out', None, 'Where to write; by default RUN_DIR/report.html, or comparison.html of several runs.'
)
DATA = flags.DEFINE_multi_string(
  'data', [], 'Files that all runs to compare predict, for paired intervals. May be repeated.'
)


@command_line.command
def main(run_dirs: list[str]) -> None:
  from trainer.storage.bucket import REPORTS, copy_of
  from trainer.tools import report

  gc.disable()  # it would look for garbage among all events, half of the time
  if not run_dirs:
    raise UserError('found no RUN_DIR; wanted ctr-report RUN_DIR…')
  if DATA.value and len(run_dirs) == 1:
    raise UserError('--data: found one RUN_DIR; wanted several, which are compared on the data')
  paired = None
  if DATA.value:
    first, *others = map(api.load, run_dirs)
    paired = {other.run_dir: first.compare(other, DATA.value) for other in others}
  default = 'comparison.html'
  if len(run_dirs) == 1:
    default = os.path.join('' if is_remote(run_dirs[0]) else run_dirs[0], 'report.html')
  with contextlib.ExitStack() as stack, plain_errors('cannot write the report'):
    local = [stack.enter_context(copy_of(run_dir, REPORTS)) for run_dir in run_dirs]
    report.write(local, OUT.value or default, paired)
  if not OUT.value or (os.path.isfile(OUT.value) and not os.path.islink(OUT.value)):
    print(OUT.value or default)


if __name__ == '__main__':
  main()
