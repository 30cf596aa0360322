"""Writes report.html of a run, or of several to compare: `ctr-report RUN_DIR…`.

A run may be finished, killed or still at work. With --data, the runs to compare predict the same
samples, so their differences have paired intervals. With --seeds N, each N runs in a row are one
model with N seeds, and the intervals also tell of the spread of seeds.
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

SEEDS = flags.DEFINE_integer(
  'seeds', 1, 'How many runs in a row differ by the seed alone, in the same order.', lower_bound=1
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
  paired, seeds = None, SEEDS.value
  if seeds > 1 and not (DATA.value and len(run_dirs) > seeds):
    raise UserError(
      f'--seeds {seeds}: wanted --data, and so many RUN_DIR of each of several models'
    )
  if DATA.value:
    runs = list(map(api.load, run_dirs))
    first, *others = (runs[i : i + seeds] for i in range(0, len(runs), seeds))
    paired = {other[0].run_dir: api.compare(first, other, DATA.value) for other in others}
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
