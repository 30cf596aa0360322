"""Exports a run for serving.

`ctr-export --run_dir DIR --kind base|delta|saved_model [--out DIR]`. For a run with
model.retrieval, KIND is `items` (in place of a base), `delta` or `saved_model`, which computes the
vector of a query. To a SavedModel, a missing text is '' and a missing number NaN.
"""

import re
import time
from typing import TYPE_CHECKING

import numpy as np
from absl import flags

from trainer import command_line, files
from trainer.data.file_system import is_remote
from trainer.errors import UserError

if TYPE_CHECKING:
  from trainer.evaluation.finished_run import FinishedRun

_KINDS = ('base', 'delta', 'items', 'saved_model')
RUN_DIR = flags.DEFINE_string('run_dir', None, 'The run_dir of a run.', required=True)
KIND = flags.DEFINE_enum('kind', None, _KINDS, 'What to write.', required=True)
OUT = flags.DEFINE_string('out', None, 'A directory, in place of RUN_DIR/exports.')
SET = flags.DEFINE_multi_string('set', [], 'Overrides a key of the config.')
INTEGER_SLOTS = flags.DEFINE_list(
  'integer_slots',
  [],
  'Slots of whole numbers that a SavedModel takes as int64, not as strings. A number that the log '
  'never has, such as -1, stands for a missing one.',
)
CHECKPOINT = flags.DEFINE_enum(
  'checkpoint', 'best', ['best', 'last'], 'best is by data.valid. Use the same for all kinds.'
)


def _check_integer_slots(run: 'FinishedRun') -> None:
  """Refuses a slot in --integer_slots if texts of it were kept, and none is a number."""
  if INTEGER_SLOTS.value and KIND.value != 'saved_model':
    raise UserError(f'--integer_slots: found with --kind {KIND.value}; wanted --kind saved_model')
  unknown = []
  for slot in dict.fromkeys(INTEGER_SLOTS.value):
    is_kept = slot in run.cfg.data.keep_texts
    kept = run.texts(slot, np.zeros(0, np.int64)).values() if is_kept else []
    if not kept:
      unknown.append(slot)
    elif not any(re.fullmatch('-?[0-9]+', text) for text in kept):
      found = f"the texts of '{slot}' are no whole numbers, as {next(iter(kept))!r}"
      raise UserError(f'--integer_slots: {found}; wanted slots of whole numbers')
  if unknown := [slot for slot in unknown if slot in run.cfg.slot_ids()]:
    print(
      f'--integer_slots: not checked for {", ".join(unknown)}, whose texts the run has not kept '
      '(data.keep_texts): all of them must be whole numbers'
    )


@command_line.command
def main() -> None:
  import tensorflow as tf

  from trainer.evaluation.finished_run import open_run
  from trainer.storage import export_writer
  from trainer.storage.chain import ROW_KINDS

  if is_remote(RUN_DIR.value) and not OUT.value:
    raise UserError(f'--run_dir {RUN_DIR.value}: is in a bucket; wanted --out, a directory here')
  with open_run(RUN_DIR.value, SET.value, CHECKPOINT.value, only_trained=True) as run:
    if KIND.value not in run.task.exports:
      has = f'a run with model.{run.cfg.model.section} has {", ".join(run.task.exports)}'
      raise UserError(f"--kind: found '{KIND.value}'; {has}")
    _check_integer_slots(run)
    has_rows = KIND.value in ROW_KINDS
    items = run.task.items(run.inputs, run.texts) if has_rows else None
    position = {'command': 'trainer.export', 'step': run.step.steps}
    position |= {'examples': run.progress.examples, 'day': run.progress.day}
    if KIND.value == 'items':  # an export with an index is not the same as one without
      position['index'] = items.has_index
    done = export_writer.write(
      run.cfg,
      KIND.value,
      position,
      store=run.step.store,
      model=run.step.dense.model,
      dense_stats=run.step.dense.embedding.stats,
      integer_slots=INTEGER_SLOTS.value,
      folder=OUT.value,
      items=items,
      ancestors=run.progress.ancestors,
      checkpoint=run.progress.ancestors[-1],
    )
  if done.told:
    print(done.told)
  if KIND.value == 'items':
    print(f'{done.path}: {items.told}, in {done.seconds:.1f} s')
    return
  print(f'{done.path}: {done.rows:,} rows, {done.tombstones:,} tombstones in {done.seconds:.1f} s')
  if left_out := str(done.left_out):
    print(left_out)
  if KIND.value == 'saved_model':
    started = time.monotonic()
    tf.saved_model.load(done.path)
    print(f'{files.size_of(done.path) / 1e6:.1f} MB, loaded in {time.monotonic() - started:.1f} s')


if __name__ == '__main__':
  main()
