"""Shows what a checkpoint holds: `ctr-inspect --run_dir DIR [--importance] …`.

It prints the parameters and bytes of each layer and slot. With --features it prints the features of
a slot that have the most impressions, with --feature one feature, with --against the differences
from another run, and with --importance how much the model's quality depends on each column. Under
horovodrun the ranks share the work of --importance.
"""

import contextlib
import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from absl import flags

from trainer import api, command_line, runtime
from trainer.errors import DataLoss, UserError

if TYPE_CHECKING:
  import pandas as pd

  from trainer.storage.checkpoint_reader import CheckpointReader

RUN_DIR = flags.DEFINE_string('run_dir', None, 'The run_dir of a run.', required=True)
CHECKPOINT = flags.DEFINE_enum('checkpoint', 'best', ['best', 'last'], 'best is by data.valid.')
IMPORTANCE = flags.DEFINE_bool('importance', False, 'How much worse metrics get without a column.')
DATA = flags.DEFINE_multi_string(
  'data', [], 'Files for --importance, by default data.valid, else data.test. May be repeated.'
)
FEATURE = flags.DEFINE_string('feature', None, 'SLOT=TEXT: all that is known of one feature.')
FEATURES = flags.DEFINE_string('features', None, 'A slot: its features with the most impressions.')
AGAINST = flags.DEFINE_string('against', None, 'Another run_dir: what differs, by slot.')
JSON = flags.DEFINE_bool('json', False, 'Prints one JSON object instead of tables.')

_ATTEMPTS = 3
_LISTED = 20  # the most features that --features lists
_WIDTH, _TEXT_WIDTH = 80, 32  # of all tables, and of a feature's text in that of --features


@command_line.command
def main() -> None:
  from trainer.storage.bucket import EXPORTS, STATE, copy_of
  from trainer.storage.checkpoint_reader import CheckpointReader

  others = {'--feature': FEATURE, '--features': FEATURES, '--against': AGAINST}
  found = [name for name, flag in others.items() if flag.value is not None]
  if DATA.value and (found or not IMPORTANCE.value):
    found = found[0] if found else 'no --importance'
    wanted = 'wanted --importance alone, which reads it'
    raise UserError(f'--data {DATA.value[0]}: found {found}; {wanted}')
  with contextlib.ExitStack() as stack:
    # Only one feature is looked for in exports.
    parts = (*STATE, *EXPORTS) if FEATURE.value else STATE
    run_dirs = [path for path in (RUN_DIR.value, AGAINST.value) if path]
    run_dirs = [stack.enter_context(copy_of(path, parts)) for path in run_dirs]
    for attempts_left in reversed(range(_ATTEMPTS)):
      try:
        readers = [CheckpointReader(run_dir, CHECKPOINT.value) for run_dir in run_dirs]
        tables = list(_tables(*readers))
        break
      except (FileNotFoundError, DataLoss):
        if not attempts_left:
          raise
        # A trainer at work has removed this checkpoint: there is a newer one.
  if runtime.rank() > 0:
    return
  if JSON.value:
    plain = {name: json.loads(table.to_json(orient='table')) for name, table, _ in tables}
    print(json.dumps({name: table['data'] for name, table in plain.items()}))
    return
  print(f'checkpoint {readers[0].path}, step {readers[0].progress["step"]:,}')
  for name, _, text in tables:
    print(f'\n{name}\n{text}')


def _tables(
  reader: 'CheckpointReader', other: 'CheckpointReader | None' = None
) -> Iterator[tuple[str, 'pd.DataFrame', str]]:
  """Yields the tables that the flags request: name, table, and the table as text."""
  import pandas as pd

  if FEATURE.value is not None:
    slot, sign, text = FEATURE.value.partition('=')
    if not sign:
      listed = f'; --features {slot} lists its features' if slot in reader.cfg.slot_ids() else ''
      raise UserError(f"--feature: found '{FEATURE.value}'; wanted SLOT=TEXT{listed}")
    feature = reader.feature(slot, text)
    lines = [f'{key}: {_in_words(value)}' for key, value in feature.items()]
    lines += _notes(reader, [slot]) if 'show' in feature else []
    yield 'feature', pd.DataFrame([feature]), _wrapped(lines)
  elif FEATURES.value is not None:
    yield 'features', *_features(reader, FEATURES.value)
  elif other is not None:
    table = reader.against(other)
    yield 'against', table, _text(table)
  elif IMPORTANCE.value:
    yield 'importance', *_importances(reader)
  else:
    layers, slots, made = reader.layers(), reader.slots(), reader.made()
    yield 'layers', layers, _text(layers)
    shown = slots.rename(columns={'shows': 'impressions'})
    if 'dead_columns' in shown and not shown['dead_columns'].map(bool).any():
      shown = shown.drop(columns='dead_columns')
    sharing = [f'{s.name}: with those of {s.shares}' for s in reader.cfg.data.slots if s.shares]
    notes = _wrapped([*sharing, *_notes(reader, slots.index)])
    yield 'slots', slots, f'{_text(shown)}\n{notes}'.rstrip('\n')
    if not made.empty:
      yield (
        'made',
        made,
        _wrapped(f'{slot}: {kind}, from {of}' for slot, kind, of in made.itertuples()),
      )


def _text(table: 'pd.DataFrame') -> str:
  """Returns a table as text; columns beyond _WIDTH characters follow in further tables."""
  named, texts = table.rename_axis(index=None, columns=table.index.name), []
  while len(named.columns):
    for count in range(len(named.columns), 0, -1):
      text = named.iloc[:, :count].to_string(float_format=_in_words)
      if max(map(len, text.split('\n'))) <= _WIDTH:
        break
    texts.append(text)
    named = named.iloc[:, count:]
  return '\n\n'.join(texts)


def _wrapped(lines: Iterable[str]) -> str:
  return '\n'.join(command_line.wrapped(line, _WIDTH) for line in lines)


def _notes(reader: 'CheckpointReader', slots: Iterable[str]) -> list[str]:
  """Returns the lines below a table that say what its impressions and clicks count."""
  return [*reader.shared(slots), *filter(None, [reader.counted()])]


def _in_words(value: object) -> str:
  if isinstance(value, list):
    return ' '.join(map(_in_words, value))
  if isinstance(value, float):
    return f'{value:,.0f}' if abs(value) >= 1000 else f'{value:.4g}'
  return '-' if value is None else str(value)


def _features(reader: 'CheckpointReader', slot: str) -> tuple['pd.DataFrame', str]:
  """Returns the features of a slot with the most impressions, also as text."""
  import numpy as np

  from trainer.reporting.live_line import shortened

  found, count = reader.most_shown(slot, _LISTED)
  numbers = dict.fromkeys(('show', 'click', 'linear'), float)
  table = found[['text', 'key', *numbers]].astype(numbers)
  if 'factors' in found:
    norms = [np.nan if row is None else np.linalg.norm(row) for row in found['factors']]
    table['norm'] = np.array(norms, float)
  if table.empty:
    return table, _wrapped(['none', *_notes(reader, [slot])])
  known = table['text'].where(table['text'].notna(), table['key'].astype(str))
  shown = table.drop(columns=['text', 'key']).rename_axis(columns='text')
  shown = shown.set_axis([shortened(text, _TEXT_WIDTH) for text in known])
  shown = shown.rename(columns={'show': 'impressions', 'click': 'clicks'})
  more = [f'… of {count:,} features; run.features({slot!r}) in Python has all']
  notes = _wrapped([*more * (count > len(table)), *_notes(reader, [slot])])
  return table, f'{shown.to_string(float_format=_in_words, na_rep="–")}\n{notes}'.rstrip('\n')


def _importances(reader: 'CheckpointReader') -> tuple['pd.DataFrame', str]:
  """Returns the table of --importance, also as text, which says which effects may be chance."""
  from trainer.evaluation.finished_run import open_run
  from trainer.tools.importance import importance_table

  reader.cfg.model.want('interactions', f'--importance: run_dir {reader.run_dir}')
  with open_run(reader.run_dir, (), CHECKPOINT.value, runtime.launched()) as run:
    passes = api.passes_to_score(run, DATA.value or run.cfg.data.valid)
    prepared = run.inputs.prepared(passes, 'evaluate')
    table = importance_table(run, prepared)
  titles = [name.replace('_', ' ').replace('auc', 'AUC') for name in table]
  shown = table.set_axis(['±' if t.endswith('plus minus') else t for t in titles], axis=1)
  text = shown.rename_axis(None).to_string(float_format='{:,.5f}'.format, na_rep='-')
  loss, plus_minus = table.iloc[:, 0].abs(), table.iloc[:, 1]
  data = ', '.join(DATA.value) or ('data.valid' if reader.cfg.data.valid else 'data.test')
  told = [f'On {table.attrs["examples"]:,} samples of {data}.', '± is half of the 95 % interval.']
  if loss.isna().all():
    told.append('There are too few clicks to measure AUC.')
  elif unclear := list(table.index[~(loss > plus_minus)]):
    told.append(f'Indistinguishable from no effect: {", ".join(unclear)}.')
  return table, f'{text}\n{_wrapped(told)}'


if __name__ == '__main__':
  main()
