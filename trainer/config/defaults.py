"""Default values of keys that depend on the values of other keys, given or by default.

So a user may write any key with its default value, and nothing changes, except for keys that a run
measures, like train.batch_size.
"""

from typing import Any

from ops.row_kinds import ROW_OPTIMIZERS, row_defaults
from trainer.config.columns import Bins, Made, SlotCross, bins_slot, cross_slot
from trainer.config.lifecycle import LIFECYCLE_MODES, Thresholds
from trainer.config.metrics import METRICS
from trainer.config.section import UNSET, set_value, with_value
from trainer.config.slots import Slot
from trainer.config.train import LEAST_GAIN, STATIC_EPOCHS, Plateau
from trainer.errors import ConfigError

# A stream never ends, so the number of passes that it refuses and keeps is bounded.
_OF_A_STREAM = {
  ('data', 'max_refused_passes'): 10,
  ('data', 'max_days_ahead'): 14,
  ('data', 'keep_prepared_passes'): 2,
  ('export', 'keep'): 3,
}
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
  """A config to which defaults are added.

  `origins` is {key: what its default follows from}: {'train.epochs': 'from train.plateau'}.
  """

  def __init__(self, cfg: Any):
    self.cfg = cfg
    self.origins: dict[str, str] = {}

  def default(self, key: tuple[str | int, ...], value: object, origin: str) -> Any:
    """Sets a key, unless it is set, to a default from `origin`; returns the key's value."""
    path = [str(part) for part in key]
    if (found := set_value(self.cfg, path)) is not UNSET:
      return found
    self.cfg = with_value(self.cfg, path, value)
    self.origins['.'.join(path)] = f'from {origin}'
    return value


def completed(cfg: Any) -> tuple[Any, dict[str, str]]:
  """Adds the defaults that follow from other keys to a config of the schema's own defaults.

  Returns the whole config, and {added key: what its default follows from}. Raises ConfigError if
  admission has thresholds of two modes but no mode, or if an entry of data.crosses is no cross.
  """
  tree = _Tree(cfg)
  data = cfg.data
  is_static = data.valid and not data.stream and not data.has_days
  is_once = bool(data.stream or data.has_days) and cfg.train.epochs == 1
  recipe, bare = None, _bare_dnns(cfg) if is_static or is_once else []
  source = 'data.topic' if data.topic else 'data.watch' if data.watch else 'data.day_pattern'
  if bare:  # null: the run began before there were recipes, or before `stream` was one
    first, origin = ('stream', source) if is_once else ('ensemble', 'data.valid')
    recipe = tree.default(('model', 'recipe'), first, origin) or (None if is_once else first)
    if (recipe == 'stream') != is_once:
      recipe, bare = None, []
  for key in bare:
    for argument, value in RECIPES[recipe].items():
      tree.default((*key.split('.'), 'args', argument), value, 'model.recipe')
  is_linear = is_static and {i.kind for i in cfg.model.all_interactions().values()} == {'linear'}
  if is_linear and cfg.train.dense_optimizer.kind == 'adam':
    # The bias and the weights of dense columns move by about this much a step.
    tree.default(('train', 'dense_optimizer', 'learning_rate'), 0.01, 'model.interactions')
  if is_static and tree.default(('train', 'plateau'), Plateau(), 'data.valid') is not None:
    epochs = SLOW_EPOCHS if recipe or is_linear else STATIC_EPOCHS
    tree.default(('train', 'epochs'), epochs, 'train.plateau')
    for key, value in PATIENCE.items() if recipe == 'ensemble' or is_linear else ():
      tree.default(('train', 'plateau', key), value, 'model.interactions')
  if tree.cfg.train.plateau is not None:
    metric = METRICS.get(cfg.deciding_metric)  # of retrieval: None
    least = LEAST_GAIN if metric and not metric.of_numbers else 0.0
    tree.default(('train', 'plateau', 'min_delta'), least, 'train.plateau.metric')
  if data.topic:  # a bad message can never be mended, and would cost its pass all others
    tree.default(('data', 'max_bad_share'), 0.01, 'data.topic')
  if data.stream:
    for key, value in _OF_A_STREAM.items():
      if key[-1] != 'max_days_ahead' or data.has_days:
        tree.default(key, value, source)
  _of_lifecycle(cfg, tree)
  if recipe == 'plain':
    tree.default(('data', 'crosses'), [], 'model.recipe')
  _of_columns(cfg, tree, recipe in ('ensemble', 'plain'))
  features = cfg.sparse.features_per_sample or len(tree.cfg.data.slots) or 1
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
  return tree.cfg, tree.origins


def _bare_dnns(cfg: Any) -> list[str]:
  """Returns the keys of all dnn without `hidden`; [] if any layer is no dnn, linear or fm."""
  layers = cfg.model.all_interactions()
  bare = [key for key, i in layers.items() if i.kind == 'dnn' and 'hidden' not in i.args]
  others = [key for key, i in layers.items() if key not in bare and i.kind not in ('linear', 'fm')]
  return [] if others else bare


def _of_columns(cfg: Any, tree: _Tree, has_recipe: bool) -> None:
  """Adds the slots of data.dense_bins and data.crosses, and `counts` of slots as data.counts says.

  If `has_recipe`, data.dense_bins and data.crosses have the defaults of a dnn without `hidden`.
  """
  if has_recipe:
    tree.default(('data', 'dense_bins'), BINS, 'model.recipe')
  slots = list(cfg.data.slots)
  first_table = next((slot.table for slot in slots), 'default')

  def add(name: str, made: Made, table: str, key: str) -> None:
    for part in ('name', 'from'):
      tree.origins[f'data.slots.{len(slots)}.{part}'] = f'from {key}'
    slots.append(Slot(**{'name': name, 'from': made, 'table': table}))

  if bins := tree.cfg.data.dense_bins:
    binned = {slot.made.bins for slot in cfg.data.slots if isinstance(slot.made, Bins)}
    for column in cfg.data.dense:
      if column.made is None and column.name not in binned:
        made = Bins(bins=column.name, quantiles=bins)
        add(bins_slot(column.name), made, first_table, 'data.dense_bins')
  crossed = [slot.made.cross for slot in cfg.data.slots if isinstance(slot.made, SlotCross)]
  for i, cross in enumerate(tree.cfg.data.crosses):
    if not 2 <= len({*cross}) == len(cross) <= 8:
      wanted = 'wanted two to eight distinct columns'
      raise ConfigError(f"key 'data.crosses.{i}': found {cross}; {wanted}")
    if cross not in crossed:
      crossed.append(cross)
      table = next((slot.table for slot in cfg.data.slots if slot.name in cross), first_table)
      add(cross_slot(cross), SlotCross(cross=cross), table, 'data.crosses')
  tree.cfg = with_value(tree.cfg, ['data', 'slots'], slots)
  if has_recipe:
    lifecycle = tree.cfg.lifecycle
    by_counts = lifecycle.eviction == 'score' or lifecycle.capacity is not None
    has_clicks = cfg.labels[0].loss != 'squared_error' and cfg.sync.mode != 'ps_geo'
    is_old = tree.cfg.model.recipe is None  # such a run has counts already
    can_count = (len(slots) <= MOST_COUNTED or is_old) and has_clicks and not by_counts
    tree.default(('data', 'counts'), can_count, 'model.recipe')
  if tree.cfg.data.counts:
    shared = {slot.shares for slot in cfg.data.slots}
    for i, slot in enumerate(slots):
      if slot.name not in shared and slot.shares is None:
        tree.default(('data', 'slots', i, 'counts'), True, 'data.counts')


def _of_lifecycle(cfg: Any, tree: _Tree) -> None:
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
  whole = tree.cfg.lifecycle
  for i, section in slots:
    left_out = [key for key in Thresholds.model_fields if key not in section.model_fields_set]
    section = section.model_copy(update={key: getattr(whole, key) for key in left_out})
    tree.cfg = with_value(tree.cfg, ['data', 'slots', str(i), 'lifecycle'], section)
    tree.origins |= {f'data.slots.{i}.lifecycle.{key}': f'from lifecycle.{key}' for key in left_out}
