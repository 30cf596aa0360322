"""Default values of keys that depend on the values of other keys, given or by default.

So a user may write any key with its default value, and nothing changes, except for keys that a run
measures, like train.batch_size.
"""

from typing import TYPE_CHECKING

from ops.row_kinds import ROW_OPTIMIZERS, row_defaults
from trainer.config.columns import Bins, bins_slot
from trainer.config.lifecycle import LIFECYCLE_MODES, Lifecycle, Thresholds
from trainer.config.metrics import METRICS
from trainer.config.train import LEAST_GAIN, STATIC_EPOCHS
from trainer.errors import ConfigError
from trainer.plain_data import Json, JsonObject

if TYPE_CHECKING:
  from trainer.config.schema import Config

# A stream never ends, so the number of passes that it refuses and keeps is bounded.
_OF_A_STREAM = {
  ('data', 'max_refused_passes'): 10,
  ('data', 'max_days_ahead'): 14,
  ('data', 'keep_prepared_passes'): 2,
  ('export', 'keep'): 3,
}
DAY_OF_SPAN = r'/(\d{4}-\d\d-\d\d)T'  # in the path of a pass of a topic
_OF_MODES = {
  ('admission', 'score'): {'admission_threshold': 10.0},
  ('admission', 'count'): {'admission_count': 10.0},
  ('admission', 'probability'): {'admission_probability': 0.1},
  ('eviction', 'score'): {'delete_threshold': 0.8, 'delete_after_unseen_days': 30},
  ('eviction', 'unseen'): {'delete_after_unseen_days': 30},
}
_OF_SCORE = {'base_threshold': 1.5, 'delta_threshold': 0.25, 'delta_keep_days': 16}

# Of a model whose dnn leaves out `hidden`: the arguments of the layer by model.recipe.
# docs/quality.md has how they were found: members learn best slowly.
RECIPES = {
  'ensemble': {'hidden': [128, 128], 'dropout': 0.1, 'members': 8},
  'plain': {'hidden': [64, 32]},
  'stream': {'hidden': [256, 128]},
}
RATES = {'linear': 0.05, 'factors': 0.01}  # of an ensemble's rows, in batches of at most 1,024
PATIENCE, SLOW_EPOCHS = {'patience': 4, 'stop_after': 6}, 60  # of linear alone, too
BINS = 32  # quantile bins of a dense column
MOST_COUNTED = 50  # slots; each with counts adds two inputs to the layers, and their steps add up
# l2 of a plain dnn's factors, times the batch size from 1,024 on: a rare feature's penalty is
# divided by the batch size, as its mean gradient is. docs/quality.md has what it does.
L2_OF_BATCH = 0.4
# What rates of linear rows are multiplied by in a stream: fast ones follow each day's noise.
LINEAR_OF_STREAM = 0.25


class _Tree:
  """The keys that the user gave, and defaults that are added to them.

  `origins` is {key: what its default follows from}: {'train.epochs': 'from train.plateau'}.
  """

  def __init__(self, cfg: 'Config'):
    self.values: JsonObject = cfg.model_dump(exclude_unset=True)
    self.origins: dict[str, str] = {}

  def default(self, key: tuple[str | int, ...], value: Json, origin: str) -> Json:
    """Sets a key, unless the user gave it, to a default from `origin`; returns the key's value."""
    node: Json = self.values
    for part in key[:-1]:
      node = node[part] if isinstance(node, list) else node.setdefault(part, {})
    if key[-1] not in node:
      node[key[-1]] = value
      self.origins['.'.join(map(str, key))] = f'from {origin}'
    return node[key[-1]]


def completed(cfg: 'Config') -> tuple[JsonObject, dict[str, str]]:
  """Adds the defaults that follow from other keys to a config of the schema's own defaults.

  Returns all keys, as nested dicts and lists still to be validated, and {added key: what its
  default follows from}. ConfigError: thresholds of two modes of admission are given, but no mode.
  """
  tree = _Tree(cfg)
  data = cfg.data
  is_static = data.valid and not data.stream and not data.day_pattern
  is_once = bool(data.stream or data.day_pattern) and cfg.train.epochs == 1
  recipe, bare = None, _bare_dnns(cfg) if is_static or is_once else []
  if bare:  # null is that of runs that began before there were recipes, or one for streams
    first, origin = ('stream', 'days') if is_once else ('ensemble', 'data.valid')
    recipe = tree.default(('model', 'recipe'), first, origin) or (None if is_once else first)
    if (recipe == 'stream') != is_once:
      recipe, bare = None, []
  for key in bare:
    path = [int(part) if part.isdigit() else part for part in key.split('.')]
    for argument, value in RECIPES[recipe].items():
      tree.default((*path, 'args', argument), value, 'model.recipe')
  is_linear = is_static and {i.kind for i in cfg.model.all_interactions().values()} == {'linear'}
  if is_linear and cfg.train.dense_optimizer.kind == 'adam':
    # The bias and the weights of dense columns move by about this much a step.
    tree.default(('train', 'dense_optimizer', 'learning_rate'), 0.01, 'model.interactions')
  if is_static and tree.default(('train', 'plateau'), {}, 'data.valid') is not None:
    epochs = SLOW_EPOCHS if recipe or is_linear else STATIC_EPOCHS
    tree.default(('train', 'epochs'), epochs, 'train.plateau')
    for key, value in PATIENCE.items() if recipe == 'ensemble' or is_linear else ():
      tree.default(('train', 'plateau', key), value, 'model.interactions')
  if tree.values.get('train', {}).get('plateau') is not None:
    metric = METRICS.get(cfg.deciding_metric)  # of retrieval: None
    least = LEAST_GAIN if metric and not metric.of_numbers else 0.0
    tree.default(('train', 'plateau', 'min_delta'), least, 'train.plateau.metric')
  if data.topic and data.topic.days:
    tree.default(('data', 'day_pattern'), DAY_OF_SPAN, 'data.topic.days')
  if data.topic:  # a bad message can never be mended, and would cost its pass all others
    tree.default(('data', 'max_bad_share'), 0.01, 'data.topic')
  if data.stream:
    for key, value in _OF_A_STREAM.items():
      if key[-1] != 'max_days_ahead' or tree.values['data'].get('day_pattern'):
        tree.default(key, value, 'data.topic' if data.topic else 'data.watch')
  _of_lifecycle(cfg, tree)
  _of_columns(cfg, tree, recipe in ('ensemble', 'plain'))
  features = cfg.sparse.features_per_sample or len(tree.values['data']['slots']) or 1
  for name, table in cfg.sparse.tables.items():
    for part, rule, width in (('linear', table.linear, 1), ('factors', table.factors, table.width)):
      if rule.preset not in ROW_OPTIMIZERS[rule.kind].presets:
        continue  # which is refused later
      key = ('sparse', 'tables', name, part)
      defaults = row_defaults(rule.kind, rule.preset, cfg.train.batch_size, width, features)
      if recipe and (rule.kind, rule.preset) == ('adagrad', 'tuned'):
        if recipe == 'ensemble':  # the steps of many features add up, as row_defaults says
          rate = RATES[part] * max(1, cfg.train.batch_size / 1024)
          defaults['learning_rate'] = min(rate, 2 * defaults['learning_rate'])
        elif recipe == 'stream':
          defaults['learning_rate'] *= LINEAR_OF_STREAM if part == 'linear' else 1
        elif part == 'factors':
          l2 = L2_OF_BATCH / max(1024, cfg.train.batch_size)
          tree.default((*key, 'l2'), l2, 'model.recipe and train.batch_size')
      for field, value in defaults.items():
        origin = f'{part}.kind, preset, width, train.batch_size and sparse.features_per_sample'
        tree.default((*key, field), value, origin)
      if rule.preset == 'paddle':
        tree.default(('sparse', 'gradient_scale'), 'feature', f'{part}.preset')
  return tree.values, tree.origins


def _bare_dnns(cfg: 'Config') -> list[str]:
  """Returns the keys of all dnn without `hidden`; [] beside other layers than linear and fm."""
  layers = cfg.model.all_interactions()
  bare = [key for key, i in layers.items() if i.kind == 'dnn' and 'hidden' not in i.args]
  others = [key for key, i in layers.items() if key not in bare and i.kind not in ('linear', 'fm')]
  return [] if others else bare


def _of_columns(cfg: 'Config', tree: _Tree, has_recipe: bool) -> None:
  """Adds the slots of data.dense_bins, and `counts` of slots as data.counts says.

  `has_recipe`: both keys have the defaults of a dnn without `hidden`.
  """
  data, slots = tree.values['data'], tree.values['data']['slots']
  if has_recipe:
    tree.default(('data', 'dense_bins'), BINS, 'model.recipe')
  if bins := data.get('dense_bins'):
    binned = {slot.made.bins for slot in cfg.data.slots if isinstance(slot.made, Bins)}
    for column in cfg.data.dense:
      if column.made is None and column.name not in binned:
        for key in ('name', 'from'):
          tree.origins[f'data.slots.{len(slots)}.{key}'] = 'from data.dense_bins'
        made = {'bins': column.name, 'quantiles': bins}
        table = next((slot.table for slot in cfg.data.slots), 'default')
        slots.append({'name': bins_slot(column.name), 'from': made, 'table': table})
  if has_recipe:
    lifecycle = tree.values.get('lifecycle', {})
    by_counts = lifecycle.get('eviction') == 'score' or lifecycle.get('capacity') is not None
    has_clicks = cfg.labels[0].loss != 'squared_error' and cfg.sync.mode != 'ps_geo'
    is_old = tree.values['model']['recipe'] is None  # such a run has counts already
    can_count = (len(slots) <= MOST_COUNTED or is_old) and has_clicks and not by_counts
    tree.default(('data', 'counts'), can_count, 'model.recipe')
  if data.get('counts'):
    shared = {slot.shares for slot in cfg.data.slots}
    for i, slot in enumerate(slots):
      if slot['name'] not in shared and slot.get('shares') is None:
        tree.default(('data', 'slots', i, 'counts'), True, 'data.counts')


def _of_lifecycle(cfg: 'Config', tree: _Tree) -> None:
  slots = [(i, slot.lifecycle) for i, slot in enumerate(cfg.data.slots) if slot.lifecycle]
  modes = {}
  for kind, of_keys in LIFECYCLE_MODES.items():
    sections = [cfg.lifecycle, *(section for _, section in slots)]
    keys = [k for k in of_keys if any(getattr(section, k) is not None for section in sections)]
    if kind == 'admission' and len(keys) > 1 and kind not in cfg.lifecycle.model_fields_set:
      found = f'found {" and ".join(keys)}, which are of several modes'
      raise ConfigError(f"key 'lifecycle.{kind}': {found}; wanted the mode that counts")
    modes[kind] = getattr(cfg.lifecycle, kind)
    if keys:
      modes[kind] = tree.default(('lifecycle', kind), of_keys[keys[0]], f'lifecycle.{keys[0]}')
  for kind, mode in modes.items():
    of_mode = _OF_MODES.get((kind, mode), {}) | (_OF_SCORE if mode == 'score' else {})
    for field, value in of_mode.items():
      tree.default(('lifecycle', field), value, f'lifecycle.{kind}')
  whole = Lifecycle.model_validate(tree.values.get('lifecycle', {}))
  for i, _ in slots:
    for field in Thresholds.model_fields:
      key = ('data', 'slots', i, 'lifecycle', field)
      tree.default(key, getattr(whole, field), f'lifecycle.{field}')
