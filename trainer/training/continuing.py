"""What may change when a run continues with another config, or begins with another run's model."""

import collections
import json
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase

from ops.row_kinds import HYPERPARAMETERS
from trainer import config
from trainer.config.schema_text import one_line_yaml
from trainer.errors import OtherModel, short
from trainer.model.builder import PASSED, constructor_parameters, layer_class
from trainer.plain_data import Json, JsonObject
from trainer.training.warm_start import layouts, slots_of

# Keys and sections that may change when a run continues; * is any text. `_may_change` decides about
# slots and widths. Any other change is refused.
_MAY_CHANGE = (
  *('run_dir', 'train', 'lifecycle', 'checkpoint', 'export', 'report', 'sync'),
  *('data.train', 'data.valid', 'data.test', 'data.watch', 'data.topic'),
  *('data.group', 'data.format', 'data.delimiter', 'data.quoting', 'data.columns'),
  *('data.missing_values', 'data.decimal', 'data.thousands'),
  *('data.label_negative', 'data.labels.*.negative'),
  *('data.max_bad_share', 'data.late', 'data.max_refused_passes', 'data.max_days_ahead'),
  *('data.close_day_after_hours', 'data.keep_prepared_passes', 'data.keep_texts', 'data.items'),
  *('model.retrieval.eval_at', 'model.retrieval.leave_out'),
  *('model.label_smoothing', 'model.focal_gamma'),
  *('model.interactions.*', 'model.dense_embedding'),
  *('sparse.store', 'sparse.gradient_scale', 'sparse.exchange_dtype', 'sparse.tables.*.dtype'),
  *('sparse.features_per_sample', 'sparse.shared_lists'),
  *('sparse.memory_limit', 'sparse.cold_dir'),
  *(f'sparse.tables.*.{o}.{k}' for o in ('linear', 'factors') for k in (*HYPERPARAMETERS, 'kind')),
)


def _identity(slot: config.Slot) -> JsonObject:
  """Returns the settings of a slot that may not change when a run continues."""
  return slot.model_dump(exclude={'pooling', 'lifecycle', 'made'})


def _has_ffm(*configs: config.Config) -> bool:
  return any(i.kind == 'ffm' for cfg in configs for i in cfg.model.all_interactions().values())


def parts(cfg: config.Config) -> dict[str, JsonObject]:
  """Returns {part: its settings}, for each slot, table and layer, that decide what weights predict.

  Two models with equal settings predict the same from the same weights.
  """
  settings: dict[str, JsonObject] = {
    f'data.slots: {s.name}': {'pooling': p} | ({'shared_lists': 'mean'} if is_mean else {})
    for s, p, is_mean in zip(cfg.ordered_slots, cfg.poolings(), cfg.averaged())
  }
  for name, spec in layouts(cfg).items():
    if spec.width:
      settings[f'sparse.tables: {name}'] = {'width': cfg.sparse.tables[name].width}
  counts: collections.Counter[str] = collections.Counter()
  for key, layer in cfg.model.all_interactions().items():
    parameters, _ = constructor_parameters(layer_class(layer.kind, key))
    usual = {n: p.default for n, p in parameters.items() if p.default is not p.empty}
    args = {n: v for n, v in (usual | layer.args).items() if n not in ('dropout', *PASSED)}
    # As a checkpoint returns them: tuples become lists, other types that JSON lacks their names.
    args = json.loads(json.dumps(args, default=lambda value: type(value).__name__))
    settings[f'model.interactions: {layer.kind} {counts[layer.kind]}'] = args
    counts[layer.kind] += 1
  return settings


def differences(
  trained: Mapping[str, JsonObject | None], now: Mapping[str, JsonObject]
) -> list[str]:
  """Returns a text for each difference between a model and the trained one, as `parts` tell them.

  In `trained`, a part whose weights were dropped is None; it is {} if no model was trained.
  """
  if not trained:
    return ['all of it is new']
  texts = []
  for part in sorted(trained.keys() | now.keys()):
    was, wanted = trained.get(part), now.get(part)
    if wanted is None:
      texts.append(f'{part}, which was trained, is gone')
    elif was is None:
      texts.append(f'{part} is new')
    else:
      texts += [
        f'{part}: {key} was trained as {short(was.get(key))}, '
        f'the config has {short(wanted.get(key))}'
        for key in dict.fromkeys((*was, *wanted))
        if was.get(key) != wanted.get(key)
      ]
  return texts


def _shown(flat: Mapping[str, Json], key: str) -> str:
  """Returns a flat config's value of a key as text; of a list of sections, their names."""
  names = [v for k, v in flat.items() if re.fullmatch(rf'{re.escape(key)}\.\d+\.name', k)]
  return f'[{", ".join(map(str, names))}]' if names else short(flat.get(key))


class Change:
  """A change of a run's config, from the one of its checkpoint to that of the present start.

  `before` may also be the config of another run, whose model a new run begins with.
  """

  def __init__(self, before: config.Config, cfg: config.Config):
    self._before, self._cfg = before, cfg

  def check(self, run_dir: str) -> None:
    """Raises OtherModel if a changed key makes another model, and names the first such key."""
    before, cfg = self._before, self._cfg
    other, wanted = f'run_dir {run_dir}: it holds another model', 'or another --run_dir'
    mine, others = ({slot.name for slot in x.data.slots} for x in (cfg, before))
    if not mine & others:
      names = ', '.join(sorted(others))
      raise OtherModel(f'{other}: data.slots has none of its slots, {names}; wanted some, {wanted}')
    if (was := before.model.section) != cfg.model.section:
      differs = f'its config.yaml has model.{was}, this config model.{cfg.model.section}'
      raise OtherModel(f'{other}: {differs}; wanted the same, {wanted}')
    mine, others = ([column.name for column in x.data.dense] for x in (cfg, before))
    lacks = [f"lacks its '{name}'" for name in others if name not in mine]
    adds = [f"adds '{name}'" for name in mine if name not in others]
    if differs := ', '.join(lacks + adds):
      raise OtherModel(f'{other}: data.dense {differs}; wanted the same, {wanted}')
    old, new = config.flatten(before.model_dump()), config.flatten(cfg.model_dump())
    for key in sorted(old.keys() | new.keys()):
      if old.get(key) != new.get(key) and not self._may(key):
        differs = f'its config.yaml has {key} = {_shown(old, key)}, this config {_shown(new, key)}'
        raise OtherModel(f'{other}: {differs}; wanted the same, {wanted}')

  def _may(self, key: str) -> bool:
    """Returns whether a run may continue if the value of this key has changed."""
    old, new = self._before, self._cfg
    if key.startswith('data.slots.'):
      by_name = {slot.name: slot for slot in old.data.slots}
      kept = [slot for slot in new.data.slots if slot.name in by_name]
      same = all(_identity(slot) == _identity(by_name[slot.name]) for slot in kept)
      same &= bool(old.counted_fields()) == bool(new.counted_fields())
      return same and (not _has_ffm(old, new) or slots_of(old) == slots_of(new))
    if re.fullmatch(r'sparse\.tables\..*\.width', key):
      return not _has_ffm(old, new)
    return any(fnmatchcase(key, k) or fnmatchcase(key, f'{k}.*') for k in _MAY_CHANGE)

  def tell(self) -> None:
    """Prints a line for each difference between the two configs.

    A list or a section that only one of them has is one difference.
    """

    def by_name(tree: JsonObject) -> JsonObject:
      for key in ('slots', 'dense', 'labels'):
        tree['data'][key] = {section['name']: section for section in tree['data'][key]}
      return tree

    def tell(key: str, was: Json, now: Json) -> None:
      was_within, now_within = (
        dict(enumerate(x)) if isinstance(x, (list, tuple)) else x for x in (was, now)
      )
      if all(isinstance(x, dict) and x for x in (was_within, now_within)):
        for name in dict.fromkeys((*was_within, *now_within)):
          tell(f'{key}.{name}', was_within.get(name, ...), now_within.get(name, ...))
      elif was != now:
        was, now = ('nothing' if x is ... else one_line_yaml(x) for x in (was, now))
        print(f'{key[1:]}: {now} from here on; the run had {was}')

    tell('', *(by_name(x.model_dump(exclude={'run_dir'})) for x in (self._before, self._cfg)))

  def too_different(self) -> str | None:
    """Returns why a new run cannot begin with the model of the config before; None if it can."""
    old, new = self._before, self._cfg
    if old.data.dense != new.data.dense:
      listed = ', '.join(f'{c.name} ({c.transform})' for c in old.data.dense)
      return f'its model reads other data.dense: {listed or "none"}; wanted the same, in this order'
    was, now = ([label.name for label in cfg.labels] for cfg in (old, new))
    if len(was) > 1 and len(now) > 1 and was != now[: len(was)]:
      return (
        f'its labels are {", ".join(was)}, not {", ".join(now)}; wanted the same, in this order'
      )
    for a, b in zip(old.labels, new.labels):
      if (a.loss == 'squared_error') != (b.loss == 'squared_error'):
        return f"its label {a.name} has loss '{a.loss}', this config '{b.loss}'; wanted the same"
    counted = [[slot.name for slot in cfg.data.slots if slot.counts] for cfg in (old, new)]
    if bool(counted[0]) != bool(counted[1]):
      was, now = (', '.join(names) or 'no slot' for names in counted)
      return f'{was} has counts in it, {now} in this config; wanted counts in both or in neither'
    before = {slot.name: slot for slot in old.data.slots}
    for slot in new.data.slots:
      for key in ('table', 'shares'):
        was, now = getattr(before.get(slot.name, slot), key), getattr(slot, key)
        if was != now:
          differs = f'has {key} {short(was)}, this config {short(now)}'
          return f'its slot {slot.name} {differs}; wanted the same'
    return None
