"""Searches settings: `ctr-tune --config FILE --set KEY=8,16 --range KEY=1e-4:.1:log`, or --columns.

Optuna (the extra `tune`) draws the settings of each trial, which is a run in STUDY_DIR. A trial is
evaluated on data.valid after each epoch, and ends early if it falls behind the others. The same
command continues a search. At the end it prints a table of the trials, the best first, and writes
STUDY_DIR/report.html.

With --columns it trains without each column of the log that the findings of a first run name, and
suggests which one to leave out.
"""

import os
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

import yaml
from absl import flags

from trainer import command_line, config
from trainer.errors import UserError

if TYPE_CHECKING:
  from trainer.tools.tuning import Choices, Range

CONFIG = flags.DEFINE_string('config', None, 'YAML file; configs/ has examples.', required=True)
SET = flags.DEFINE_multi_string('set', [], 'KEY=VALUE, or KEY=VALUE,VALUE,… to choose from.')
RANGE = flags.DEFINE_multi_string('range', [], 'KEY=LOW:HIGH or KEY=LOW:HIGH:log, of numbers.')
COLUMNS = flags.DEFINE_bool('columns', False, 'Trains without each column that findings name.')
TRIALS = flags.DEFINE_integer('trials', 20, 'The number, earlier ones included.', lower_bound=1)
METRIC = flags.DEFINE_enum(
  'metric', None, list(config.METRICS), 'The metric of data.valid; by default that of the config.'
)
STUDY_DIR = flags.DEFINE_string('study_dir', None, 'Of the search; by default runs/NAME-tune.')
LAUNCHER = flags.DEFINE_string('launcher', '', 'Starts each trial, as in "horovodrun -np 2".')


def space_of(
  sets: Sequence[str], ranges: Sequence[str]
) -> tuple[dict[str, 'Choices | Range'], list[str]]:
  """Returns the settings to search, and those that all trials share, from --set and --range."""
  space: dict[str, 'Choices | Range'] = {}
  fixed = []
  for assignment in sets:
    key, equals, text = assignment.partition('=')
    try:
      values = yaml.safe_load(f'[{text}]')
    except yaml.YAMLError:
      values = None
    if not equals or not values:
      raise UserError(f"--set: found '{assignment}'; wanted KEY=VALUE or KEY=VALUE,VALUE")
    if len(values) == 1:
      fixed.append(assignment)
    else:
      space[key] = values
  for assignment in ranges:
    key, _, text = assignment.partition('=')
    low, _, rest = text.partition(':')
    high, _, log = rest.partition(':')
    try:
      numbers = [int(x) if x.lstrip('-').isdigit() else float(x) for x in (low, high)]
    except ValueError:
      numbers = []
    if not numbers or log not in ('', 'log'):
      raise UserError(f"--range: found '{assignment}'; wanted KEY=LOW:HIGH or KEY=LOW:HIGH:log")
    space[key] = (*numbers, *([log] if log else ()))
  return space, fixed


def _title(column: str) -> str:
  """Returns the title of a column: the last part of a key, if no other key of the config has it."""
  name = column.rpartition('.')[2]
  return name if config.settings_named(name) == column else column


@command_line.command
def main() -> None:
  command_line.end_by_sigterm()
  from trainer.reporting.live_line import WIDTH

  space, fixed = space_of(SET.value, RANGE.value)
  name = os.path.splitext(os.path.basename(CONFIG.value))[0]
  study_dir = STUDY_DIR.value or f'runs/{name}-tune'
  launcher = shlex.split(LAUNCHER.value)
  if COLUMNS.value:
    from trainer.tools.column_search import try_columns

    if space:
      raise UserError(f'--columns: found {next(iter(space))} to search; wanted one of the two')
    for line in try_columns(CONFIG.value, study_dir, METRIC.value, fixed, launcher):
      print(line, flush=True)
    return
  from trainer.tools import tuning

  table = tuning.tune(CONFIG.value, space, TRIALS.value, study_dir, METRIC.value, fixed, launcher)
  table.columns = [_title(key) for key in table]
  table['run_dir'] = table['run_dir'].map(os.path.basename)

  def number(x: float) -> str:
    return f'{x:.{4 if abs(x) >= 0.1 else 6}f}'

  print(table.to_string(index=False, na_rep='', float_format=number))
  if said := tuning.difference(table):
    print(command_line.wrapped(said, WIDTH))
  print(f'the runs and report.html: {study_dir}')
  best = os.path.join(study_dir, table['run_dir'].iloc[0])
  print(f'next: ctr-evaluate --run_dir {best}, or ctr-resolve --run_dir {best} for its settings')
  print(f'to train with them: ctr-train --config {os.path.join(best, config.GIVEN)} --run_dir NEW')


if __name__ == '__main__':
  main()
