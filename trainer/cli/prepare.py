"""Converts logs ahead of time: `ctr-prepare --config FILE [--set a.b=value]… --out
DIR [--split train]`.

Each raw pass of a split becomes a directory DIR/SPLIT/NAME, with + for each / in the pass's name.
Train on these with `--set data.format=prepared --set 'data.train=[DIR/train/*]'`, and set
data.valid and data.test in the same way. `--describe` also prints statistics of each split, and
writes them to DIR/SPLIT.json.
"""

import json
import os

from absl import flags

from trainer import command_line, config
from trainer.errors import UserError

SPLITS = ('train', 'valid', 'test')

CONFIG = flags.DEFINE_string('config', None, 'YAML file; configs/ has examples.', required=True)
SET = flags.DEFINE_multi_string('set', [], 'KEY=VALUE, overrides the config. May be repeated.')
OUT = flags.DEFINE_string('out', None, 'The directory of the prepared passes.', required=True)
SPLIT = flags.DEFINE_enum('split', 'all', ['all', *SPLITS], 'Which files of the config.')

DESCRIBE = flags.DEFINE_bool('describe', False, 'Whether to print statistics of each split.')


@command_line.command
def main() -> None:
  cfg = config.load(CONFIG.value, SET.value)
  if cfg.data.format == 'prepared':
    raise UserError("data.format: found 'prepared'; wanted the format of raw files")
  from trainer import runtime  # noqa: F401  sets what TensorFlow reads when it is imported
  from trainer.data.conversion import prepare_pass
  from trainer.data.measured import in_words, open_values, recipe
  from trainer.data.passes import folder_name, passes
  from trainer.data.prepared import PreparedPass, is_prepared
  from trainer.data.statistics import describe, table

  for find in (recipe, open_values):
    for key, value in (measured := find(cfg)).items():
      print(in_words(cfg.data, key, value))
    cfg = config.resolve(cfg, measured)
  for split in SPLITS if SPLIT.value == 'all' else [SPLIT.value]:
    prepared = []
    for data_pass in passes(cfg.data, getattr(cfg.data, split), f'data.{split}'):
      path = data_pass.path
      if not is_prepared(cfg.data, path):
        path = os.path.join(OUT.value, split, folder_name(data_pass.name))
        meta = prepare_pass(cfg, data_pass.path, path)
        print(
          f'{split}/{data_pass.name}: {meta["samples"]:,} samples, {meta["features"]:,} features, '
          f'{meta["bad"]["records"]:,} bad records dropped',
          flush=True,
        )
      if DESCRIBE.value:
        prepared.append(PreparedPass(path, cfg))
    if prepared:
      statistics = describe(prepared, cfg)
      print(f'{split}: {table(statistics)}')
      os.makedirs(OUT.value, exist_ok=True)
      with open(os.path.join(OUT.value, f'{split}.json'), 'w', encoding='utf-8') as f:
        json.dump(statistics, f, indent=1)


if __name__ == '__main__':
  main()
