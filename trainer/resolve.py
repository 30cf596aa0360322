"""Shows what a config resolves to: `python -m trainer.resolve --config FILE [--set a.b=value]…`.

Every key stands with its meaning, its value and where the value comes from: given, default, or from
another key. `python -m trainer.resolve --diff A B` shows where two configs differ.
"""

from absl import flags

from trainer import command_line, config
from trainer.config import schema_text
from trainer.errors import UserError

CONFIG = flags.DEFINE_string('config', None, 'YAML file to show.')
SET = flags.DEFINE_multi_string(
  'set', [], 'Overrides a key, as in --set train.batch_size=1024; may be repeated.'
)
DIFF = flags.DEFINE_bool('diff', False, 'Compares the two YAML files that follow.')


@command_line.command
def main(files: list[str]) -> None:
  if DIFF.value:
    if len(files) != 2 or CONFIG.value:
      raise UserError(f'--diff: found {len(files)} files; wanted two, and no --config')
    one, other = (config.load(path, SET.value) for path in files)
    for key, of_one, of_other in schema_text.differences(one, other):
      print(f'{key}: {of_one} → {of_other}')
    return
  if files or not CONFIG.value:
    raise UserError('wanted --config FILE, or --diff and two files')
  print(schema_text.explained(config.load(CONFIG.value, SET.value)), end='')


if __name__ == '__main__':
  main()
