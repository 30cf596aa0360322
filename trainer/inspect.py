"""Says what a checkpoint holds: `python -m trainer.inspect --run_dir DIR [--importance] …`.

Parameters and bytes by layer and slot; with --feature one feature, with --against what differs from
another run. With --importance, under horovodrun the ranks share the work.
"""

import json
from typing import Any

from absl import flags

from trainer import command_line, runtime
from trainer.errors import UserError

RUN_DIR = flags.DEFINE_string('run_dir', None, 'A run of trainer.run.', required=True)
CHECKPOINT = flags.DEFINE_enum(
  'checkpoint', 'best', ['best', 'last'], 'best by validation, or the last.'
)
IMPORTANCE = flags.DEFINE_bool(
  'importance', False, 'What AUC and logloss lose when a slot is exchanged between samples.'
)
DATA = flags.DEFINE_multi_string(
  'data', [], 'Files for --importance; data.test of the config where left out. May be repeated.'
)
FEATURE = flags.DEFINE_string('feature', None, 'SLOT=TEXT: all that is known of one feature.')
AGAINST = flags.DEFINE_string('against', None, 'Another run_dir: what differs, by slot.')
JSON = flags.DEFINE_bool('json', False, 'Prints one JSON object instead of tables.')


@command_line.command
def main() -> None:
  import pandas as pd

  from trainer.reporting.inspection import Inspection
  from trainer.reporting.live_line import WIDTH

  inspection = Inspection(RUN_DIR.value, CHECKPOINT.value)
  if FEATURE.value is not None:
    slot, sign, text = FEATURE.value.partition('=')
    if not sign:
      raise UserError(f"--feature: found '{FEATURE.value}'; wanted SLOT=TEXT")
    found = {'feature': pd.DataFrame([inspection.feature(slot, text)])}
  elif AGAINST.value is not None:
    found = {'against': inspection.against(Inspection(AGAINST.value, CHECKPOINT.value))}
  elif IMPORTANCE.value:
    found = {'importance': importance(RUN_DIR.value)}
  else:
    found = {'layers': inspection.layers(), 'slots': inspection.slots()}
  if runtime.rank() > 0:
    return
  if JSON.value:
    told = {
      name: json.loads(table.to_json(orient='table', index=True)) for name, table in found.items()
    }
    print(json.dumps({name: table['data'] for name, table in told.items()}))
    return
  print(f'checkpoint {inspection.path}, step {inspection.progress["step"]:,}')
  for name, table in found.items():
    table = table.T if name == 'feature' else table
    text = table.to_string(float_format=lambda x: f'{x:,.4g}', line_width=WIDTH)
    print(f'\n{name}\n{text}')


def importance(run_dir: str) -> Any:
  """Returns a DataFrame of the losses by slot, the most important first."""
  import pandas as pd

  from trainer.data.passes import passes
  from trainer.training.finished_run import open_run
  from trainer.training.importance import slot_importance

  with open_run(run_dir, (), CHECKPOINT.value, runtime.launched()) as run:
    patterns = DATA.value or run.cfg.data.test
    if not patterns:
      raise UserError('--data: found none, and the config has no data.test; wanted files')
    prepared = run.inputs.prepared(passes(run.cfg, patterns, '--data'), 'evaluate')
    found = slot_importance(
      run.cfg, run.communicator, run.step, prepared, progress_made=run.progress_made
    )
  table = pd.DataFrame(found['slots']).T.astype(float).rename_axis('slot')
  table.columns = [f'loss_of_{name}' for name in table]
  return table.sort_values(table.columns[0], ascending=False)


if __name__ == '__main__':
  main()
