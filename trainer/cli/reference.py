"""Prints the reference of the config: `python -m trainer.cli.reference > docs/config.md`.

For each key it prints the values, the default, an example and the meaning, from the schema
(trainer/config/) and the docstrings of layers.
"""

import inspect
import re
from collections.abc import Iterable, Iterator

from ops.row_kinds import ROW_OPTIMIZERS, TUNED_BATCH_SIZE, TUNED_FEATURES
from trainer import command_line, config
from trainer.config.schema_text import Key, keys, one_line_yaml

HEAD = """# Every key of the config

Made by `python -m trainer.cli.reference` out of the schema; a test holds it current.
`ctr-resolve --config FILE` shows them with
the values that a config has. Keys are joined by dots in `--set` and in
messages, as in `--set train.batch_size=1024`; an entry of a list goes by its number, as in
`--set data.slots.0.name=user`. `null` means off. Units stand in the names (`…_seconds`, `…_steps`,
`…_days`).
"""
# Examples for keys whose default is a poor one.
EXAMPLES = {
  'data.train': '[logs/day_*.csv]',
  'data.valid': '[logs/valid.csv]',
  'data.test': '[logs/test.csv]',
  'data.watch': 'incoming',
  'data.topic': '{brokers: "kafka-1:9092", topic: clicks}',
  'data.topic.brokers': 'kafka-1:9092,kafka-2:9092',
  'data.topic.topic': 'clicks',
  'data.topic.pass.seconds': '60',
  'data.delimiter': '"\\t"',
  'data.columns': '[label, user, item]',
  'data.label': 'click',
  'data.label_positive': "'>50K'",
  'data.weight': 'weight',
  'data.group': 'user_id',
  'data.day_pattern': r"'day_(\d+)'",
  'data.max_bad_share': '0.001',
  'data.slots': "[{name: user_id}, {name: tags, separator: '|'}]",
  'data.slots.*.name': 'user_id',
  'data.slots.*.column': 'uid',
  'data.slots.*.from': '{bins: price, boundaries: [1, 5, 20]}',
  'data.slots.*.separator': "'|'",
  'data.slots.*.value_separator': "':'",
  'data.slots.*.shares': 'item_id',
  'data.slots.*.lifecycle': '{admission_threshold: 3}',
  'data.dense': '[{name: price, transform: log1p_standardise}]',
  'data.dense.*.name': 'price',
  'data.dense.*.from': "{expression: 'price / category_price'}",
  'sparse.tables': '{default: {width: 16}, ids: {width: 32}}',
  'model.interactions': '[linear, fm, {dnn: {hidden: [256, 128]}}]',
  'model.dense_embedding': 'piecewise_linear',
  'model.interactions.*.kind': 'dnn',
  'model.interactions.*.args': '{hidden: [256, 128]}',
  'train.dense_optimizer.args': '{beta_1: 0.8}',
  'train.schedule': '{kind: cosine, warmup_steps: 500, period: 20000}',
  'train.plateau': '{metric: logloss, patience: 2, stop_after: 4}',
  'checkpoint.every_steps': '1000',
  'checkpoint.every_seconds': '600',
  'export.delta_every_passes': '1',
  'export.keep': '7',
  'sync.ports': '[40000, 40016]',
  'sync.max_staleness': '100',
}


def _table(prefix: str, found: Iterable[Key]) -> Iterator[str]:
  yield '| key | takes | default | example | meaning |'
  yield '|---|---|---|---|---|'
  for key in found:
    path = prefix + key.name
    default = 'required' if key.default is None else f'`{key.default}`'
    default = 'see below' if key.section and key.default not in (None, 'null', '[]') else default
    example = EXAMPLES.get(path, '' if key.section else key.default)
    example = f'`{key.name}: {example}`' if example else ''
    cells = (f'`{key.name}`', key.wanted, default, example, key.meaning)
    yield '| ' + ' | '.join(c.replace('|', '\\|') for c in cells) + ' |'


def _sections(prefix: str, section: type) -> Iterator[str]:
  found = list(keys(section))
  yield from _table(prefix, found)
  for key in found:
    if key.section is config.Made:
      if prefix == 'data.slots.*.':  # those of dense columns are the same
        for kind, made in config.MADE.items():
          yield f'\n## `data.slots.*.from.{kind}`\n\n{" ".join(inspect.getdoc(made).split())}\n'
          yield from _table(f'{prefix}from.', keys(made))
    elif key.section:
      path = prefix + key.name + {list: '.*', dict: '.NAME', None: ''}[key.container]
      yield f'\n## `{path}`\n\n{" ".join(inspect.getdoc(key.section).split())}\n'
      yield from _sections(path + '.', key.section)


def _row_optimizers() -> Iterator[str]:
  yield '\n## Row optimizers\n'
  yield 'The kinds of `sparse.tables.NAME.linear` and `.factors`. A row holds weights, then state.'
  yield f'The defaults of `tuned` are for batches of {TUNED_BATCH_SIZE:,} samples, up to 8'
  yield f'weights and up to {TUNED_FEATURES} features of a sample ([layers.md](layers.md)).\n'
  presets = list(dict.fromkeys(name for rule in ROW_OPTIMIZERS.values() for name in rule.presets))
  yield f'| kind | rule | floats of state | {" | ".join(f"`{name}`" for name in presets)} |'
  yield '|---' * (3 + len(presets)) + '|'
  for kind, rule in ROW_OPTIMIZERS.items():
    parts = ((rule.state_per_weight, 'a weight'), (rule.state_per_row, 'a row'))
    state = ', '.join(f'{number} {of}' for number, of in parts if number) or '–'
    defaults = (rule.presets.get(name, {}) for name in presets)
    cells = (', '.join(f'`{key}: {value:g}`' for key, value in of.items()) for of in defaults)
    yield '| ' + ' | '.join([f'`{kind}`', rule.meaning, state, *(c or '–' for c in cells)]) + ' |'


def _layers() -> Iterator[str]:
  """Yields a Markdown table of each built-in interaction's arguments, read from its docstring."""
  from trainer.model.builder import PASSED, layer_class

  yield '\n## Arguments of interactions\n'
  yield 'What stands beside the kind; docs/layers.md has the formulas.\n'
  yield '| interaction | argument | default | meaning |\n|---|---|---|---|'
  layers = {kind: layer_class(kind, kind) for kind in config.BUILT_IN}
  for kind, layer in layers.items():
    text = inspect.getdoc(layer).partition('Args:\n')[2]
    meanings = dict(re.findall(r'^  (\w+): (.*(?:\n    .*)*)', text, re.MULTILINE))
    own = vars(layer).get('__init__')
    parameters = inspect.signature(own).parameters.values() if own else ()
    rows = [
      p for p in parameters if p.kind is not p.VAR_KEYWORD and p.name not in ('self', *PASSED)
    ]
    for p in rows:
      value = list(p.default) if isinstance(p.default, tuple) else p.default
      meaning = ' '.join(meanings[p.name].split()).replace('|', '\\|')
      yield f'| `{kind}` | `{p.name}` | `{one_line_yaml(value)}` | {meaning} |'
    base = next((name for name, c in layers.items() if c in layer.__mro__[1:]), None)
    if base:
      yield f'| `{kind}` | {"the others" if rows else "all"} | | as for `{base}` |'
    elif not rows:
      yield f'| `{kind}` | – | | |'


def page() -> str:
  """Returns the text of docs/config.md."""
  return '\n'.join([HEAD, *_sections('', config.Config), *_row_optimizers(), *_layers()]) + '\n'


@command_line.command
def main() -> None:
  print(page(), end='')


if __name__ == '__main__':
  main()
