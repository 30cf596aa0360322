"""Predicts with a run: `ctr-predict --run_dir DIR --data PATTERN --out FILE`.

It writes one probability in each line, in input order. With several tasks, a line has one for each
task, separated by commas, in the order of data.labels. With `--columns id,…` it writes CSV whose
first columns are these columns of the input. The suffix of FILE chooses another format: .tsv,
.jsonl or .json (JSON lines), or .parquet. `--data -` reads standard input. Labels, weights and
groups are not read. Under horovodrun the ranks share the work, and rank 0 writes.

For a run with model.retrieval it writes the best `--k` items of each sample. Each line has the
number of the sample (or the `--columns`), an item and its score.
"""

import collections
import contextlib
import os
import re
import shutil
import sys

import pyarrow as pa
from absl import flags

from trainer import api, command_line, runtime
from trainer.errors import UserError, plain_errors, renamed

RUN_DIR = flags.DEFINE_string('run_dir', None, 'The run_dir of a run.', required=True)
DATA = flags.DEFINE_multi_string(
  'data', [], 'Files, or - for standard input; without it data.test. May be repeated.'
)
OUT = flags.DEFINE_string('out', '-', 'Where to write; - is standard output.')
COLUMNS = flags.DEFINE_list('columns', [], 'Columns of the input to write beside the probability.')
SET = flags.DEFINE_multi_string('set', [], 'Overrides a key of the config.')
K = flags.DEFINE_integer('k', 20, 'How many items to find, with model.retrieval.', lower_bound=1)
CHECKPOINT = flags.DEFINE_enum('checkpoint', 'best', ['best', 'last'], 'best is by data.valid.')


def _copy_standard_input(path: str) -> None:
  """Copies standard input to a file, which can be read twice (for --columns)."""
  with open(path, 'wb') as f:
    shutil.copyfileobj(sys.stdin.buffer, f)


@command_line.command
def main() -> None:
  from trainer.data import carried
  from trainer.data.prepared import is_prepared
  from trainer.evaluation.finished_run import open_run
  from trainer.files import temporary_directory, whole_file

  here = runtime.launched()
  if here.size > 1 and ('-' in DATA.value or OUT.value == '-'):
    flag = '--data' if '-' in DATA.value else '--out'
    raise UserError(f'{flag}: found -, which ranks do not share; wanted a file')
  suffix = carried.out_suffix(OUT.value)
  is_text = suffix in carried.TEXT_DELIMITERS
  # A bad record is an error, because dropping it would shift the lines after it.
  overrides = [*SET.value, 'data.max_bad_share=0']
  items = 0

  def counted(table: pa.Table) -> pa.Table:
    nonlocal items
    items += len(table)
    return table

  with (
    open_run(RUN_DIR.value, overrides, CHECKPOINT.value, here) as run,
    temporary_directory() as folder,
    plain_errors('cannot write --out'),
    contextlib.ExitStack() as stack,
  ):
    cfg = run.cfg
    if flags.FLAGS['k'].present:
      cfg.model.want('retrieval', '--k')
    copy = os.path.join(folder, 'standard_input')
    if '-' in DATA.value:
      stack.enter_context(renamed(re.escape(copy), '--data - (standard input)'))
      _copy_standard_input(copy)
    passes = api.passes_to_score(run, [copy if p == '-' else p for p in DATA.value])
    for path in [p.path for p in passes if COLUMNS.value and is_prepared(cfg.data, p.path)]:
      raise UserError(f'--columns: {path} is a prepared pass; wanted raw files with them')
    prepared = run.inputs.prepared(passes, 'predict', labelled=False)
    names = [label.name for label in cfg.data.labels] or ['probability']

    found = run.task.recommendations(run.inputs, run.texts, prepared, K.value)
    predicted = api.predictions(run, prepared) if found is None else map(counted, found)
    if here.rank > 0:
      collections.deque(predicted, 0)  # the other ranks take part
      return

    out = stack.enter_context(whole_file('/dev/stdout' if OUT.value == '-' else OUT.value))
    counts = [(raw.path, of.num_samples) for raw, of in zip(passes, prepared)]
    tables = carried.carried_tables(cfg.data, counts, COLUMNS.value, suffix)
    if found is not None:
      tables = carried.joined(tables, predicted) if COLUMNS.value else predicted
      carried.write_tables(tables, out, suffix)
    elif is_text and not COLUMNS.value:
      carried.write_lines(predicted, out, carried.TEXT_DELIMITERS[suffix])
    else:
      tables = carried.beside(tables if COLUMNS.value else None, predicted, names)
      carried.write_tables(tables, out, suffix)
  if OUT.value != '-':
    count = sum(data_pass.num_samples for data_pass in prepared)
    told = (
      f'{count:,} predictions'
      if found is None
      else f'{items:,} recommendations for {count:,} samples'
    )
    print(f'{told} in {OUT.value}', file=sys.stderr)


if __name__ == '__main__':
  main()
