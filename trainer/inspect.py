"""Shows what a checkpoint holds: `python -m trainer.inspect --run_dir DIR [--importance] …`.

It prints the parameters and bytes of each layer and slot. With --features it prints the features of
a slot that have the most impressions, with --feature one feature, with --against the differences
from another run, and with --importance how much the model's quality depends on each slot. Under
horovodrun the ranks share the work of --importance.
"""

import contextlib
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

from absl import flags

from trainer import api, command_line, config, runtime
from trainer.errors import DataLoss, UserError

if TYPE_CHECKING:
  import pandas as pd

  from trainer.reporting.inspection import Inspection

RUN_DIR = flags.DEFINE_string('run_dir', None, 'The run_dir of a run.', required=True)
CHECKPOINT = flags.DEFINE_enum('checkpoint', 'best', ['best', 'last'], 'best is by data.valid.')
IMPORTANCE = flags.DEFINE_bool('importance', False, 'How much worse metrics get without a slot.')
DATA = flags.DEFINE_multi_string(
  'data', [], 'Files for --importance; without it data.test. May be repeated.'
)
FEATURE = flags.DEFINE_string('feature', None, 'SLOT=TEXT: all that is known of one feature.')
FEATURES = flags.DEFINE_string('features', None, 'A slot: its features with the most impressions.')
AGAINST = flags.DEFINE_string('against', None, 'Another run_dir: what differs, by slot.')
JSON = flags.DEFINE_bool('json', False, 'Prints one JSON object instead of tables.')

_ATTEMPTS = 3
_LISTED = 20  # the most features that --features lists
_TEXT_WIDTH = 32  # of a feature's text in the table of --features, in characters


@command_line.command
def main() -> None:
  from trainer.reporting.live_line import WIDTH
  from trainer.storage.bucket import EXPORTS, STATE, copy_of

  others = {
    '--feature': FEATURE.value,
    '--features': FEATURES.value,
    '--against': AGAINST.value,
  }
  found = [flag for flag, value in others.items() if value is not None]
  if DATA.value and (found or not IMPORTANCE.value):
    found = found[0] if found else 'no --importance'
    wanted = 'wanted --importance alone, which reads it'
    raise UserError(f'--data {DATA.value[0]}: found {found}; {wanted}')
  with contextlib.ExitStack() as stack:
    # Only one feature is looked for in exports.
    parts = (*STATE, *EXPORTS) if FEATURE.value else STATE
    run_dirs = RUN_DIR.value, AGAINST.value
    of = [path and stack.enter_context(copy_of(path, parts)) for path in run_dirs]
    for attempts_left in reversed(range(_ATTEMPTS)):
      try:
        inspection, tables = _look(*of)
        break
      except (FileNotFoundError, DataLoss):
        if not attempts_left:
          raise
        # A trainer at work has removed this checkpoint: there is a newer one.
  if runtime.rank() > 0:
    return
  if JSON.value:
    plain = {name: json.loads(table.to_json(orient='table')) for name, table in tables.items()}
    print(json.dumps({name: table['data'] for name, table in plain.items()}))
    return
  print(f'checkpoint {inspection.path}, step {inspection.progress["step"]:,}')
  for name, table in tables.items():
    if name == 'feature':
      lines = [f'{key}: {_in_words(value)}' for key, value in table.iloc[0].items()]
      text = '\n'.join(command_line.wrapped(line, WIDTH) for line in lines)
      if 'show' in table:
        text += _notes(inspection, table['slot'])
    elif name == 'features':
      text = _features_text(table, FEATURES.value) + _notes(inspection, [FEATURES.value])
    elif name == 'made':
      lines = [f'{slot}: {row["kind"]}, from {row["from"]}' for slot, row in table.iterrows()]
      text = '\n'.join(command_line.wrapped(line, WIDTH) for line in lines)
    elif name == 'importance':
      text = _importance_text(table)
    else:
      if 'dead_columns' in table and not table['dead_columns'].map(bool).any():
        table = table.drop(columns='dead_columns')
      table = table.rename(columns={'shows': 'impressions'})
      text = _tables_text(table, WIDTH)
      if name == 'slots':
        sharing = [slot for slot in inspection.cfg.data.slots if slot.shares]
        text += ''.join(f'\n{slot.name}: with those of {slot.shares}' for slot in sharing)
        text += _notes(inspection, table.index)
    print(f'\n{name}\n{text}')


def _tables_text(table: 'pd.DataFrame', width: int) -> str:
  """Returns a table as text; columns beyond `width` characters follow in further tables."""
  named, texts = table.rename_axis(index=None, columns=table.index.name), []
  while len(named.columns):
    for count in range(len(named.columns), 0, -1):
      text = named.iloc[:, :count].to_string(float_format=_in_words)
      if max(map(len, text.split('\n'))) <= width:
        break
    texts.append(text)
    named = named.iloc[:, count:]
  return '\n\n'.join(texts)


def _notes(inspection: 'Inspection', slots: Iterable[str]) -> str:
  """Returns the lines below a table that say what its impressions and clicks count."""
  from trainer.reporting.live_line import WIDTH

  counted = inspection.counted()
  notes = [*inspection.shared(slots), *([counted] if counted else [])]
  return ''.join(f'\n{command_line.wrapped(note, WIDTH)}' for note in notes)


def _features_text(table: 'pd.DataFrame', slot: str) -> str:
  """Returns the table of --features as text, with a line that says how many features are left."""
  from trainer.reporting.live_line import WIDTH, shortened

  if table.empty:
    return 'none'
  known = table['text'].where(table['text'].notna(), table['key'].astype(str))
  shown = table.drop(columns=['text', 'key'])
  shown = shown.set_axis([shortened(text, _TEXT_WIDTH) for text in known])
  shown = shown.rename(columns={'show': 'impressions', 'click': 'clicks'})
  shown = shown.rename_axis(columns='text')
  text = shown.to_string(float_format=_in_words, na_rep='–')
  if (count := table.attrs['of']) > len(table):
    told = f'… of {count:,} features; run.features({slot!r}) in Python has all'
    text += f'\n{command_line.wrapped(told, WIDTH)}'
  return text


def _importance_text(table: 'pd.DataFrame') -> str:
  """Returns the table of --importance as text, with a sentence on effects that may be chance."""
  from trainer.reporting.live_line import WIDTH

  examples = table.attrs['examples']
  titles = [name.replace('_', ' ').replace('auc', 'AUC') for name in table]
  table = table.set_axis(['±' if t.endswith('plus minus') else t for t in titles], axis=1)
  text = table.rename_axis(None).to_string(float_format='{:,.5f}'.format, na_rep='-')
  loss, plus_minus = table.iloc[:, 0].abs(), table.iloc[:, 1]
  data = ', '.join(DATA.value) or 'data.test'
  told = [f'On {examples:,} samples of {data}.', '± is half of the 95 % interval.']
  if loss.isna().all():
    told.append('There are too few clicks to measure AUC.')
  elif unclear := list(table.index[~(loss > plus_minus)]):
    told.append(f'Indistinguishable from no effect: {", ".join(unclear)}.')
  return '\n'.join([text, *(command_line.wrapped(line, WIDTH) for line in told)])


def _in_words(value: object) -> str:
  if isinstance(value, list):
    return ' '.join(map(_in_words, value))
  if isinstance(value, float):
    return f'{value:,.0f}' if abs(value) >= 1000 else f'{value:.4g}'
  return '-' if value is None else str(value)


def _look(run_dir: str, against: str | None) -> tuple['Inspection', dict[str, 'pd.DataFrame']]:
  """Opens the run's checkpoint; returns it, and the tables that the flags request, {name: table}.

  `against` is the other run_dir, for --against.
  """
  import pandas as pd

  from trainer.reporting.inspection import Inspection

  inspection = Inspection(run_dir, CHECKPOINT.value)
  if FEATURE.value is not None:
    slot, sign, text = FEATURE.value.partition('=')
    if not sign:
      listed = (
        f'; --features {slot} lists its features' if slot in inspection.cfg.slot_ids() else ''
      )
      raise UserError(f"--feature: found '{FEATURE.value}'; wanted SLOT=TEXT{listed}")
    return inspection, {'feature': pd.DataFrame([inspection.feature(slot, text)])}
  if FEATURES.value is not None:
    return inspection, {'features': _most_shown(inspection, FEATURES.value)}
  if against is not None:
    return inspection, {'against': inspection.against(Inspection(against, CHECKPOINT.value))}
  if IMPORTANCE.value:
    config.refuse_retrieval(inspection.cfg.model.retrieval, f'--importance: run_dir {run_dir}')
    from trainer.training.finished_run import open_run
    from trainer.training.importance import importance_table

    with open_run(run_dir, (), CHECKPOINT.value, runtime.launched()) as run:
      prepared = run.inputs.prepared(api.passes_to_score(run, DATA.value), 'evaluate')
      return inspection, {'importance': importance_table(run.inputs, prepared)}
  tables = {'layers': inspection.layers(), 'slots': inspection.slots()}
  return inspection, tables | ({} if (made := inspection.made()).empty else {'made': made})


def _most_shown(inspection: 'Inspection', slot: str) -> 'pd.DataFrame':
  """Returns the table of --features; its attrs['of'] is how many features the slot has."""
  import numpy as np

  found, count = inspection.most_shown(slot, _LISTED)
  table = found[['text', 'key', 'show', 'click', 'linear']].astype(
    {'show': float, 'click': float, 'linear': float}
  )
  if 'factors' in found:
    norms = [
      np.linalg.norm(row) if isinstance(row, np.ndarray) else np.nan for row in found['factors']
    ]
    table['norm'] = np.array(norms, float)
  table.attrs['of'] = count
  return table


if __name__ == '__main__':
  main()
