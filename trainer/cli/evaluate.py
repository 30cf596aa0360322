"""Evaluates a run: `ctr-evaluate --run_dir DIR [--data PATTERN]… [--by COLUMN]…`.

In a terminal it prints the metrics. With --by it prints a table with a line for each value of a
slot or another column of the data, the worst first, and a line for all samples. A line has the
samples, clicks, AUC, logloss, calibration and 95 % intervals. With --by pass there is a line for
each pass, in order. To a pipe or a file it prints one JSON object, unless --nojson is given. Under
horovodrun the ranks share the work.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
from absl import flags, logging

from trainer import api, command_line, config, runtime
from trainer.errors import UserError
from trainer.plain_data import JsonObject

if TYPE_CHECKING:
  from trainer.data.passes import Pass
  from trainer.evaluation.finished_run import FinishedRun

RUN_DIR = flags.DEFINE_string('run_dir', None, 'The run_dir of a run.', required=True)
DATA = flags.DEFINE_multi_string('data', [], 'Files; without it data.test. May be repeated.')
SET = flags.DEFINE_multi_string('set', [], 'Overrides a key of the config.')
CHECKPOINT = flags.DEFINE_enum('checkpoint', 'best', ['best', 'last'], 'best is by data.valid.')
BY = flags.DEFINE_multi_string(
  'by', [], 'A slot or column, or pass: evaluates each of its values. May be repeated.'
)
PASS = 'pass'  # in --by: the passes, unless a slot has this name
MOST = flags.DEFINE_integer('most', 20, 'Values that --by shows by themselves.', lower_bound=1)
JSON = flags.DEFINE_bool(
  'json', None, 'Prints JSON, or with --nojson none; without it, only to a pipe or a file.'
)


@command_line.command
def main() -> None:
  from trainer.evaluation.finished_run import open_run
  from trainer.tools.evaluated import in_words, json_text, without_auc

  here = runtime.launched()
  as_json = not runtime.is_terminal() if JSON.value is None else JSON.value
  with open_run(RUN_DIR.value, SET.value, CHECKPOINT.value, here) as run:
    passes = api.passes_to_score(run, DATA.value)
    if BY.value:
      run.cfg.model.want('interactions', '--by')
      by_column = slices_by_pass(run, passes)
      for run_by, names in grouped(run, passes):
        by_column |= slices_by_text(run_by, passes, names)
      if here.rank == 0:
        by_column = {name: by_column[name] for name in BY.value}
        print(json_text(by_column, runtime.is_terminal())) if as_json else print_slices(by_column)
      return
    values = dict(run.evaluation.figures(run.inputs.prepared(passes, 'evaluate')))
    if here.rank == 0:
      findings = without_auc(values) if as_json else ()  # in_words says it too
      for warning in filter(None, (run.cfg.uncalibrated(), *(one.sentence for one in findings))):
        logging.warning('%s', warning)
      lines = in_words(values, has_slices=run.task.scores_samples)
      print(json_text(values, runtime.is_terminal()) if as_json else '\n'.join(lines))


def grouped(run: 'FinishedRun', passes: list['Pass']) -> Iterator[tuple['FinishedRun', list[str]]]:
  """Yields pairs of a run and some of the names in --by; evaluating the run gives their slices.

  All slots are in the first pair. Each other column, PASS apart, has a pair of its own, because the
  pair's run reads it as data.group.
  """
  import pyarrow as pa

  from trainer.data.arrays import one_each
  from trainer.data.conversion import blocks_of_pass
  from trainer.data.prepared import is_prepared

  slots = {slot.name for slot in run.cfg.ordered_slots}
  if of_slots := [name for name in BY.value if name in slots]:
    yield run, of_slots
  for name in BY.value:
    if name in slots or name == PASS:
      continue
    for data_pass in passes[:1]:
      if not is_prepared(run.cfg.data, data_pass.path):
        block = next(blocks_of_pass(run.cfg.data, data_pass.path, {name: '--by'}), None)
        column = block.columns[name] if block else pa.nulls(0)
        several = one_each(column)[1]
        if pa.types.is_map(column.type) or (several is not None and several.any()):
          of_slot = (f", as '{s.name}'" for s in run.cfg.ordered_slots if s.column == name)
          wanted = f'a slot{next(of_slot, "")}, or a column of single values'
          raise UserError(f'--by {name}: found lists or maps in {data_pass.path}; wanted {wanted}')
    data = run.cfg.data.model_copy(update={'group': name})
    cfg = run.cfg.model_copy(update={'data': data})
    inputs, task = run.inputs.read_by(cfg), type(run.task)(cfg)
    judge = task.evaluator(inputs)
    yield dataclasses.replace(run, cfg=cfg, inputs=inputs, task=task, evaluation=judge), [name]


def slices_by_pass(run: 'FinishedRun', passes: list['Pass']) -> dict[str, list[JsonObject]]:
  """Returns {PASS: the metrics of each pass, in order}; {} if --by does not name PASS."""
  from trainer.tools.slices import ALL, OTHER, slices

  if PASS not in BY.value or any(slot.name == PASS for slot in run.cfg.ordered_slots):
    return {}
  scored = (
    (batch._replace(group=np.full(len(probabilities), i)), probabilities)
    for i, data_pass in enumerate(run.inputs.prepared(passes, 'evaluate'))
    for batch, probabilities in run.evaluation.predict(data_pass)
  )
  rows = slices(run.cfg, run.communicator, scored, [PASS], MOST.value)[PASS]
  names = dict(enumerate(data_pass.name for data_pass in passes)) | {OTHER: '(other)', ALL: '(all)'}
  tasks, keys = [None, *(label.name for label in run.cfg.labels)], list(names)
  rows.sort(key=lambda row: (tasks.index(row['task']), keys.index(row['key'])))
  return {PASS: _named(rows, names)}


def _named(rows: list[JsonObject], values: Mapping[int, str]) -> list[JsonObject]:
  """Replaces the `key` of each row by its text, as `value`; by 'key KEY' if it has none."""
  names = [values.get(row['key'], f'key {row["key"]}') for row in rows]
  return [{'value': n} | {f: row[f] for f in row if f != 'key'} for n, row in zip(names, rows)]


def slices_by_text(
  run: 'FinishedRun', passes: list['Pass'], names: list[str]
) -> dict[str, list[JsonObject]]:
  """Returns {slot or column: the metrics of each of its values, by text or, without a log, key}.

  Every rank must call this; only rank 0 receives the texts.
  """
  from trainer.data.texts import texts_of
  from trainer.tools.slices import ALL, BLANK, OTHER, slices

  prepared = run.inputs.prepared(passes, 'evaluate')
  scored = itertools.chain.from_iterable(map(run.evaluation.predict, prepared))
  by_column = slices(run.cfg, run.communicator, scored, names, MOST.value)
  paths = [data_pass.meta['source']['path'] for data_pass in prepared]
  slots = {slot.name: slot for slot in run.cfg.ordered_slots}
  named = {}
  for name, rows in by_column.items():
    values = {BLANK: '(blank)', OTHER: '(other)', ALL: '(all)'}
    keys = {row['key'] for row in rows} - values.keys()
    if run.communicator.rank == 0:
      slot = slots.get(name, config.Slot(name=name))
      for texts in texts_of(run.cfg, paths, slot, keys):
        values |= texts
        run.inputs.progress_made()
    named[name] = _named(rows, values)
  return named


def print_slices(by_column: dict[str, list[JsonObject]]) -> None:
  """Prints the metrics of the slices: a table for each name in `by_column` and each task."""
  from trainer.tools.evaluated import slice_table

  for name, rows in by_column.items():
    for task, of_task in itertools.groupby(rows, lambda row: row['task']):
      if task:
        print(f'{task}:')
      print(f'{slice_table(name, list(of_task))}\n')


if __name__ == '__main__':
  main()
