"""Evaluates a run: `python -m trainer.evaluate --run_dir DIR [--data PATTERN]… [--by SLOT]…`.

In a terminal it prints the figures of quality. With --by it also prints a table with a line for
each value of a slot, the worst first: samples, clicks, AUC, logloss, calibration, 95 % intervals.
To a pipe or a file, or with --json, it prints all figures as one JSON object. Under horovodrun the
ranks share the work.
"""

import itertools
import json
from typing import TYPE_CHECKING

from absl import flags, logging

from trainer import api, command_line, config, runtime
from trainer.errors import UserError, nearest
from trainer.plain_data import JsonObject

if TYPE_CHECKING:
  from trainer.data.prepared import PreparedPass
  from trainer.training.finished_run import FinishedRun

RUN_DIR = flags.DEFINE_string('run_dir', None, 'The run_dir of a run.', required=True)
DATA = flags.DEFINE_multi_string(
  'data', [], 'Files to evaluate on; data.test of the config where left out. May be repeated.'
)
SET = flags.DEFINE_multi_string('set', [], 'Overrides a key of the config.')
CHECKPOINT = flags.DEFINE_enum(
  'checkpoint', 'best', ['best', 'last'], 'best by validation, or the last.'
)


BY = flags.DEFINE_multi_string(
  'by', [], 'A slot: evaluates the samples of each of its values by themselves. May be repeated.'
)
MOST = flags.DEFINE_integer(
  'most', 20, 'Values of a slot that --by shows; the others together are "other".', lower_bound=1
)
JSON = flags.DEFINE_bool('json', False, 'Prints all figures as one JSON object, in a terminal too.')


@command_line.command
def main() -> None:
  from trainer.reporting.evaluated import in_words
  from trainer.training.finished_run import open_run

  here = runtime.launched()
  as_json = JSON.value or not runtime.is_terminal()
  with open_run(RUN_DIR.value, SET.value, CHECKPOINT.value, here) as run:
    names = [slot.name for slot in run.cfg.ordered_slots]
    for name in BY.value:
      if name not in names:
        raise UserError(f"--by: '{name}' is no slot of this model{nearest(name, names)}")
    prepared = run.inputs.prepared(api.passes_to_score(run, DATA.value), 'evaluate')
    if BY.value:
      config.refuse_retrieval(run.cfg.model.retrieval, '--by')
      by_slot = slices_by_text(run, prepared)
      if here.rank == 0:
        print(json.dumps(by_slot)) if as_json else print_slices(by_slot)
      return
    values = run.evaluation.evaluate(prepared)
    if here.rank == 0:
      if warning := run.cfg.uncalibrated():
        logging.warning('%s', warning)
      print(json.dumps(values) if as_json else '\n'.join(in_words(values)))


def slices_by_text(
  run: 'FinishedRun', prepared: list['PreparedPass']
) -> dict[str, list[JsonObject]]:
  """Returns the slices of each slot in --by, with `value` in place of `key`.

  The value is the text in the log or, if the log is gone, the key. Every rank must call this; only
  rank 0 receives the texts.
  """
  from trainer.data.texts import texts_of
  from trainer.training.slices import BLANK, OTHER, slices

  scored = itertools.chain.from_iterable(map(run.evaluation.predict, prepared))
  by_slot = slices(run.cfg, run.communicator, scored, BY.value, MOST.value)
  paths = [data_pass.meta['source']['path'] for data_pass in prepared]
  slots = {slot.name: slot for slot in run.cfg.ordered_slots}
  named = {}
  for name, rows in by_slot.items():
    values = {BLANK: '(blank)', OTHER: '(other)'}
    keys = {row['key'] for row in rows} - values.keys()
    if run.communicator.rank == 0:
      for texts in texts_of(run.cfg, paths, slots[name], keys):
        values |= texts
        run.progress_made()
    named[name] = [
      {'value': values.get(row['key'], f'key {row["key"]}')}
      | {field: v for field, v in row.items() if field != 'key'}
      for row in rows
    ]
  return named


def print_slices(by_slot: dict[str, list[JsonObject]]) -> None:
  """Prints slices as tables, one for each task."""
  from trainer.reporting.evaluated import slice_table

  for name, rows in by_slot.items():
    for task, of_task in itertools.groupby(rows, lambda row: row['task']):
      if task:
        print(f'{task}:')
      print(f'{slice_table(name, list(of_task))}\n')


if __name__ == '__main__':
  main()
