"""Describes a mistake in a config in one line: file, key, the value found and the value wanted."""

from collections.abc import Iterator, Sequence

import pydantic
from pydantic_core import ErrorDetails

from trainer.config.columns import MADE
from trainer.config.schema import Config
from trainer.config.schema_text import keys
from trainer.config.section import Section
from trainer.config.yaml_text import flatten, shown
from trainer.errors import closest, nearest, short

# The keys that a user may mean by `learning_rate`.
_LEARNING_RATE = (
  'train.dense_optimizer.learning_rate of the layers; of the features, learning_rate of '
  'sparse.tables.default.factors and sparse.tables.default.linear'
)
# Our keys, each with the words for it in other systems and in earlier versions.
_WORDS = {
  'train.plateau': 'early_stopping',
  _LEARNING_RATE: 'lr learning_rate',
  'no key, because tables grow with their features': (
    'vocab_size vocabulary_size num_embeddings hash_bucket_size num_buckets'
  ),
  'sparse.tables.NAME.width': 'embedding_dim embedding_size embed_dim output_dim dim',
  'train.dense_optimizer and sparse.tables.NAME.factors': 'optimizer',
  'data.label': 'target label_column label_col',
  'data.slots': 'features categorical cat_features sparse_features categorical_features',
  'data.dense': 'numerical numeric dense_features numeric_features numerical_features',
  'data.delimiter of fields, separator of a slot': 'sep',
  'data.train': 'path file files data_path',
  'data.valid and data.test, which ctr-split makes of one file': (
    'validation_split val_split valid_size test_size'
  ),
  "data.day_pattern, which reads a file's name": 'date day timestamp',
  'no key, because only listed columns are read': 'ignore drop drop_columns exclude',
  'transform': 'log normalize normalise scale mean std',
  'data.group': 'user user_id group_id query_id',
  'data.columns, the names where a file has no header line': 'header',
  'l2 of sparse.tables.NAME.factors': 'weight_decay',
  'init_scale, the standard deviation of initial factors': (
    'init initializer embeddings_initializer'
  ),
  'no key, because ftrl divides by the root of the sums, as with -0.5': 'learning_rate_power',
  'initial_accumulator, with which the sums of ftrl begin': 'beta',
  'no key, because AUC has as many as it needs': 'auc_buckets',
  'model.loss': 'objective label_is',
  "no key, because the interaction 'linear' reads dense columns too": 'dense_linear',
  'model.interactions': 'model_type architecture',
}
# Keys that went, none of which had an effect on the model, each with what took its place. A config
# that a run has stored may still have them.
GONE = {'sync.dense_allreduce': 'no key, because Horovod sums dense gradients'}
_ELSEWHERE = {word: ours for ours, words in _WORDS.items() for word in words.split()}
# Our names of losses, optimizers and others, each with the names in other systems.
_VALUES = {
  'log_loss': 'bce binary_crossentropy cross_entropy crossentropy logloss logistic',
  'squared_error': 'mse mean_squared_error regression',
  'adam': 'adamw nadam lazyadam',
  'a trainer.Callback, as in examples/own_tracker': 'wandb comet neptune',
}
_OTHER_VALUES = {word: ours for ours, words in _VALUES.items() for word in words.split()}
_NEAR_ELSEWHERE = 0.8  # how like a misspelling a key of another section must be to be suggested
_OF_LAYERS = ('hidden', 'dropout', 'activation', 'batch_norm')  # arguments that look like keys
# The values that a type of pydantic takes, in our words.
_KINDS = {'int': 'a whole number', 'float': 'a number', 'finite': 'a finite number'}
_KINDS |= {'bool': 'true or false', 'string': 'a text'}


def _section_with(loc: Sequence[str | int]) -> type[Section]:
  """Returns the class of the section that holds the key at the path `loc`."""
  section: type[Section] = Config
  for part in loc[:-1]:  # the name of a table or an index in a list is skipped
    section = next((k.section for k in keys(section) if k.name == part and k.section), section)
  return section


def _sections_with(name: str, section: type[Section] = Config, path: str = '') -> Iterator[str]:
  """Yields the paths of the sections, such as `train.dense_optimizer`, that have a key `name`."""
  for key in keys(section):
    if key.name == name:
      yield path or 'the top level'
    if key.section:
      place = {None: '', list: '.0', dict: '.default'}[key.container]
      yield from _sections_with(name, key.section, f'{path}.{key.name}{place}'.strip('.'))


def _all_names(section: type[Section] = Config) -> Iterator[str]:
  """Yields the name of every key of a section, and of the sections in it, without their path."""
  for key in keys(section):
    yield key.name
    yield from _all_names(key.section) if key.section else ()


def _as_in(error: ErrorDetails) -> str:
  """Describes, with an example, the section or list that pydantic wanted in place of a value."""
  value = error['input']
  if error['type'] == 'list_type':
    if not isinstance(value, str):
      return 'a list'
    has_name = 'name' in _section_with([*error['loc'], 0, '']).model_fields
    return f'a list, as in [{{name: {value}}}]' if has_name else f"a list, as in ['{value}']"
  off = ', or null for off' if value is False else ''
  name, field = next(iter(_section_with([*error['loc'], '']).model_fields.items()))
  if 'class_name' not in error.get('ctx', {}) or field.annotation is float:
    return f'keys with values{off}'
  return f'keys with values, as in {{{name}: {value if isinstance(value, str) else "…"}}}{off}'


def _wanted(error: ErrorDetails) -> str:
  """Describes the value that pydantic wanted, in this project's words."""
  for limit, sign in (('gt', '>'), ('ge', '>='), ('lt', '<'), ('le', '<=')):
    if limit in error.get('ctx', {}):
      return f'wanted a number {sign} {error["ctx"][limit]}'
  kind = error['type'].partition('_')[0]
  if kind in _KINDS:
    return f'wanted {_KINDS[kind]}'
  return (error['msg'][0].lower() + error['msg'][1:]).replace('input should be', 'wanted')


def settings_named(name: str) -> str:
  """Returns, as one text, the keys whose last part is `name`: 'train.epochs' for 'epochs'.

  For a name that other systems use, such as early_stopping, it is our key; '' if there is none.
  """
  if name in _ELSEWHERE:
    return _ELSEWHERE[name]
  named = ', '.join(f'{section}.{name}' for section in _sections_with(name))
  return named.removeprefix('the top level.')


def place_of(key: str, where: str, overrides: Sequence[str]) -> str:
  """Returns the --set string that gives `key`, or a section it is in; else `where`, the file."""
  for assignment in reversed(overrides):
    given = assignment.partition('=')[0]
    if key == given or key.startswith(given + '.'):
      return shown(assignment)
  return where


def _told_first(errors: Sequence[ErrorDetails]) -> ErrorDetails:
  """Returns the first mistake or, if it is a missing key that was misspelt, the misspelt one."""
  first = errors[0]
  if first['type'] != 'missing':
    return first
  *section, missing = first['loc']
  unknown = [e for e in errors if e['type'] == 'extra_forbidden' and [*e['loc'][:-1]] == section]
  names = _names(first['loc'])
  key = '.'.join(map(str, first['loc']))
  for other in unknown:
    name = other['loc'][-1]
    if closest(name, names) == missing or _ELSEWHERE.get(str(name).lower()) == key:
      return other
  return first


def _names(loc: Sequence[str | int]) -> list[str]:
  """Returns the names of all keys of the section that holds the key at the path `loc`."""
  return [key.name for key in keys(_section_with(loc))]


def one_line(error: pydantic.ValidationError, where: str, overrides: Sequence[str]) -> str:
  """Returns the first mistake that pydantic found, in one line, with its file or --set string."""
  first = _told_first(error.errors())
  loc = first['loc']
  key = '.'.join(map(str, [*loc, *first.get('ctx', {}).get('key', ())]))
  where = place_of(key, where, overrides)
  if first['type'] == 'extra_forbidden':
    below = [place_of(inner, '', overrides) for inner in flatten(first['input'], f'{key}.')]
    where = below[0] if all(below) else where  # --set alone gives all that the unknown key holds
    if loc[0] == 'model' and loc[-1] in _OF_LAYERS and 'retrieval' not in loc:
      layer = 'model.interactions: [linear, {dnn: {hidden: [64, 32], dropout: 0.1}}]'
      return f"{where}: unknown key '{key}'; it is an argument of a layer, as in {layer}"
    if loc[-1] == 'learning_rate':
      return f"{where}: unknown key '{key}'; here that is {_LEARNING_RATE}"
    if sections := ', '.join(_sections_with(str(loc[-1]))):
      return f"{where}: unknown key '{key}'; '{loc[-1]}' is a key of {sections}"
    if loc[-1] in MADE and len(loc) > 3:
      return f"{where}: unknown key '{key}'; wanted it below from, as in from: {{{loc[-1]}: …}}"
    if here := GONE.get(key) or _ELSEWHERE.get(str(loc[-1]).lower()):
      return f"{where}: unknown key '{key}'; here that is {here}"
    names = _names(loc)
    misspelt = closest(loc[-1], _all_names(), _NEAR_ELSEWHERE)
    if misspelt and not closest(loc[-1], names):
      return f"{where}: unknown key '{key}'; the nearest valid name is {settings_named(misspelt)}"
    return f"{where}: unknown key '{key}'{nearest(loc[-1], names)}"
  if first['type'] == 'missing':
    return f"{where}: key '{key}' is missing; it is required"
  if first['type'] == 'wrong':  # raised by a check of the section
    return f"{where}: key '{key}': {first['msg']}"
  wanted = _wanted(first)
  if first['type'] == 'string_type' and isinstance(first['input'], bool):
    wanted = 'wanted a text; quote yes, no, on and off, which YAML reads as true or false'
  elif first['type'] == 'string_type' and isinstance(first['input'], int | float):
    wanted = 'wanted a text; quote a number that is meant as a text'
  elif first['type'] == 'literal_error' and str(first['input']) in _OTHER_VALUES:
    wanted += f'; here that is {_OTHER_VALUES[first["input"]]}'
  elif first['type'] in ('model_type', 'dict_type', 'list_type'):
    wanted = 'wanted ' + _as_in(first)
  found = 'a value' if key.startswith('data.topic.config') else short(first['input'])
  return f"{where}: key '{key}': found {found}; {wanted}"
