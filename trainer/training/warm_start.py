"""Warm start: what a model with changed settings takes over from a checkpoint.

Features are matched by the name of their slot; dense variables by the names of their layer and of
the variable. Slots and layers that the new config lacks are dropped. A new slot or layer starts
fresh, that is, from initial values. So does a slot that is made from other columns or bins than
before. A layer or table that has become wider keeps its values, and the added part starts fresh.

If a table has another row optimizer or width, rows keep their weights, but their optimizer state
starts fresh. Rows of a table that now uses bfloat16 are rounded to nearest.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ops import chunks, row_optimizers, row_store
from ops.sharding import shards_of, within
from trainer import config
from trainer.data.features import HASH_BITS
from trainer.embedding.embedding import table_specs
from trainer.model.builder import layer_class, layer_name


class Fate(NamedTuple):
  """What a warm start did with one part of the model."""

  what: str  # such as 'slot user' or 'layer dnn 0'
  fate: str  # taken over, weights taken over, rounded, partly, fresh or dropped


def layouts(cfg: config.Config) -> dict[str, row_store.TableSpec]:
  layers = cfg.model.all_interactions().items()
  needs = {need for key, layer in layers for need in layer_class(layer.kind, key).needs}
  needs = needs if layers else {'factors'}  # without layers there are towers
  specs = table_specs(cfg.sparse.tables, len(cfg.data.slots), needs)
  return {spec.name: spec for spec in specs}


def slots_of(cfg: config.Config) -> list[tuple[str, int, config.Made | None]]:
  ids = cfg.slot_ids()
  return [(slot.name, ids[slot.name], slot.made) for slot in cfg.ordered_slots]


def _places_of_parts(spec: row_store.TableSpec) -> dict[str, range]:
  """Returns {kind of an ops.row_store.FactorPart: range of columns} of a table's factors."""
  ends = list(itertools.accumulate(part.width for part in spec.parts))
  return {p.kind: range(end - p.width, end) for p, end in zip(spec.parts, ends)}


def _by_layer(
  arrays: Mapping[str, np.ndarray], model: config.Model, histories: Sequence[str]
) -> dict[str, str]:
  """Gives the variables of a checkpoint names by which another model's variables are matched.

  The variable '012/dnn_2/kernel_0/m:0' is named 'dnn 0/kernel_0/m:0' if dnn_2 is the first dnn, so
  the name does not depend on the layers of other kinds. What a layer has for each history, its
  class's `per_history`, is named after the history. Layers within a layer of the user are numbered
  within it, because Keras' numbers differ between processes: 'agegate_0/dense_7/kernel:0' is
  'agegate 0/dense 0/kernel:0'. Arrays whose name does not begin with a number are left out.

  Returns:
    {new name: name in the checkpoint}.
  """
  names, layers, own, classes = {}, {}, _own_layers(model), _classes(model)
  within: dict[tuple[str, str], list[str]] = {}
  for name in arrays:
    if not re.match(r'\d+/', name):
      continue
    layer, slash, rest = name.partition('/')[2].partition('/')
    kind = re.sub(r'_\d+$', '', layer)
    if slash:
      per_history = getattr(classes.get(layer), 'per_history', None)
      of_kind = layers.setdefault(kind, [])
      if layer not in of_kind:
        of_kind.append(layer)
      layer = f'{kind} {of_kind.index(layer)}'
      if per_history and (unit := re.match(rf'{per_history}_(\d+)', rest)):
        rest = f'{per_history} of {histories[int(unit[1])]}{rest[unit.end() :]}'
      elif layer.startswith(own):
        *sublayers, variable = rest.split('/')
        for i, sublayer in enumerate(sublayers):
          base = re.sub(r'_\d+$', '', sublayer)
          of_base = within.setdefault((layer, base), [])
          if sublayer not in of_base:
            of_base.append(sublayer)
          sublayers[i] = f'{base} {of_base.index(sublayer)}'
        rest = '/'.join([*sublayers, variable])
    names[layer + slash + rest] = name
  return names


def _classes(model: config.Model) -> dict[str, type]:
  """Returns the classes of a model's layers, by their names in a checkpoint."""
  layers = model.all_interactions().items()
  return {layer_name(key, layer.kind): layer_class(layer.kind, key) for key, layer in layers}


def _own_layers(model: config.Model) -> tuple[str, ...]:
  """Returns how the names of the layers that a user wrote begin, as we or Keras name them."""
  names = {layer.kind.rpartition('.')[2] for layer in model.all_interactions().values()}
  names = names.difference(config.BUILT_IN)
  snake = [re.sub(r'(?<=[a-z0-9])(?=[A-Z])', '_', name) for name in names]
  return tuple(name.lower() for name in (*names, *snake))


def _histories(slots: Sequence[config.Slot]) -> list[str]:
  return sorted(slot.name for slot in slots if slot.sequence)


def _inputs(cfg: config.Config) -> dict[str, list[str]]:
  """Returns {a layer input as layers' `axes` name it, such as 'dense': its entries' names}."""
  slots, dense = [s.name for s in cfg.ordered_slots], cfg.dense_inputs()
  histories = _histories(cfg.data.slots)
  widths = {s.name: cfg.sparse.tables[s.table].width for s in cfg.ordered_slots}
  vectors = [f'vector of {name}' for name in dense if cfg.model.dense_embedding is not None]
  table_width = next(iter(cfg.sparse.tables.values())).width

  def columns(names: Sequence[str]) -> list[str]:
    return [f'{name} {i}' for name in names for i in range(widths.get(name, table_width))]

  fields = slots + vectors
  joined, bottom = columns(fields) + dense, ['bottom'] if dense else []
  pairs = [' and '.join(sorted(pair)) for pair in itertools.combinations(fields + bottom, 2)]
  inputs = {
    'dense': dense,
    'fields': fields,
    'joined': joined,
    'joined with histories': joined + [f'history {name}' for name in columns(histories)],
    'products': columns(bottom) + pairs,
  }
  for name in histories:
    parts = ('event', 'candidate', 'difference', 'product')
    inputs[f'unit of {name}'] = [f'{part} {i}' for part in parts for i in range(widths[name])]
  for side, tower in cfg.model.towers.items():
    encoded = histories if getattr(tower, 'encoder', None) is not None else []
    read = [name for name in tower.slots if name not in encoded]
    inputs[side] = columns(read) + tower.dense + columns([n for n in tower.slots if n in encoded])
  return inputs


def _followed(axes: Mapping[str, Sequence[str | None]], variable: str) -> Sequence[str | None]:
  """Returns, for each of a variable's first axes, the key in `_inputs` of what it follows.

  `axes` is that of the layer's class, {pattern of variables' names: such keys}.
  """
  for pattern, inputs in axes.items():
    if match := re.fullmatch(rf'(?:{pattern})(?:/\w+)?:0', variable):
      return [name and match.expand(name) for name in inputs]
  return ()


def _places(
  before: Mapping[str, list[str]],
  now: Mapping[str, list[str]],
  keys: Sequence[str],
  is_guessed: bool,
  n: int,
  m: int,
) -> tuple[np.ndarray, np.ndarray]:
  """Chooses the entries of an old variable to copy into a new variable, along one axis.

  Args:
    before: the `_inputs` of the old model.
    keys: the inputs that the axis may follow.
    is_guessed: whether only the length of the axis, n before and m now, shows which inputs it
      follows. So if these differ but not their number, no entry is copied.
  Returns:
    The indices of the entries in the old variable, and their indices in the new one, int64 [k].
  """
  for key in keys:
    a, b = before.get(key, []), now.get(key, [])
    if (n, m) == (len(a), len(b)) and a != b:
      is_sure = n != m or not is_guessed
      pairs = [(a.index(name), j) for j, name in enumerate(b) if is_sure and name in a]
      return tuple(np.array(pairs, np.int64).reshape(-1, 2).T)
  both = np.arange(min(n, m))
  return both, both


class WarmStart:
  """What a model of the config `cfg` takes over from a checkpoint of the config `old`."""

  def __init__(self, old: config.Config, cfg: config.Config):
    self._old, self._cfg = old, cfg
    self._before, self._now = layouts(old), layouts(cfg)

  def is_needed(self) -> bool:
    """Returns whether the checkpoint must be converted."""
    old, new = self._old, self._cfg
    return (
      slots_of(old) != slots_of(new)
      or old.model.interactions != new.model.interactions
      or old.model.dense_embedding != new.model.dense_embedding
      or self._before != self._now
      or old.train.dense_optimizer.kind != new.train.dense_optimizer.kind
    )

  def rows(
    self, rank: int, size: int
  ) -> Callable[[Iterator[chunks.Chunk]], Iterator[chunks.Chunk]]:
    """Returns a function that converts the rows of the old model to those of the new one.

    The function takes chunks of a checkpoint, and yields the rows that process `rank` of `size`
    owns.
    """
    old, new = self._old, self._cfg
    new_ids, old_ids = new.slot_ids(), old.slot_ids()
    made = {slot.name: slot.made for slot in new.data.slots}
    new_id = np.full([config.MAX_SLOTS + 2], -1, np.int64)
    tables: dict[str, set[int]] = {}  # {table: old slot ids}
    for slot in old.data.slots:
      tables.setdefault(slot.table, set()).add(old_ids[slot.name])
      # Slots that share the features of another one read its rows, so that one decides.
      if slot.shares is None and made.get(slot.name, ...) == slot.made:
        new_id[old_ids[slot.name]] = new_ids[slot.name]
    own = shards_of(rank, size)

    def changed(saved: Iterator[chunks.Chunk]) -> Iterator[chunks.Chunk]:
      for chunk in saved:
        slot = chunk['key'] >> HASH_BITS
        to = new_id[slot]
        key = (chunk['key'] & ((1 << HASH_BITS) - 1)) | (np.maximum(to, 0) << HASH_BITS)
        kept = (to >= 0) & within(key, own)
        changed_chunk = chunks.select(chunk, kept, tables)
        changed_chunk['key'], changed_chunk['slot'] = (
          key[kept],
          to[kept].astype(chunk['slot'].dtype),
        )
        if self._before != self._now:
          self._lay_out(changed_chunk)
        yield changed_chunk

    return changed

  def _lay_out(self, chunk: dict[str, np.ndarray]) -> None:
    """Converts rows, in place, from the old table layouts to the new ones.

    Their keys and slots must already be those of the new model.
    """
    before, now, new = self._before, self._now, self._cfg
    hyper = row_optimizers.hyper([(t.linear, t.factors) for t in new.sparse.tables.values()])
    ids = new.slot_ids()
    linear = chunk['linear']
    width = 1 + max(row_optimizers.state_floats(spec.linear, 1) for spec in now.values())
    chunk['linear'] = np.zeros([len(linear), width], np.float32)
    for i, (name, spec) in enumerate(now.items()):
      was = before.get(name, row_store.TableSpec(name, (), linear='', factors=''))
      slots = [ids[slot.name] for slot in new.data.slots if slot.table == name]
      here = np.isin(chunk['slot'], slots)
      if spec.linear == was.linear:
        rows = linear[here, : 1 + row_optimizers.state_floats(spec.linear, 1)]
      else:
        rows = row_optimizers.row_init(linear[here, :1], hyper[i, 0], spec.linear).numpy()
      chunk['linear'][here, : rows.shape[1]] = rows
      column, keys = f'factors_{name}', chunk['key'][here & chunk['admitted']]
      fits = (spec.parts, spec.factors) == (was.parts, was.factors)
      if fits and spec.dtype == was.dtype:
        continue
      rows = row_store.to_float32(chunk.pop(column)) if was.width else None
      if not spec.width:
        continue
      if not fits:
        initial = row_store.initial_factors(keys, new.seed, spec.width, scale=spec.init_scale)
        weights, old_places = initial.numpy(), _places_of_parts(was)
        for part, to in _places_of_parts(spec).items():
          of = old_places.get(part, range(0))
          kept = min(len(of), len(to))
          if kept:
            weights[:, to.start : to.start + kept] = rows[:, of.start : of.start + kept]
        rows = row_optimizers.row_init(weights, hyper[i, 1], spec.factors).numpy()
      chunk[column] = row_store.to_bfloat16(rows) if spec.dtype == 'bfloat16' else rows

  def dense(
    self, saved: Mapping[str, np.ndarray], fresh: Mapping[str, np.ndarray]
  ) -> tuple[dict[str, np.ndarray], list[Fate]]:
    """Returns the new model's dense state, and what became of each slot, table and layer.

    `saved` is the state of the old model in the checkpoint, `fresh` that of the new one before
    training, both {name: array}.
    """
    old, new = self._old, self._cfg
    state, both = dict(saved), ((saved, old), (fresh, new))
    was, wanted = (_by_layer(a, cfg.model, _histories(cfg.data.slots)) for a, cfg in both)
    for name in was.values():
      del state[name]
    own, classes = _own_layers(new.model), _classes(new.model)
    towers = {side: {'kernel_0': (side,)} for side in ('query', 'item')}  # of model.retrieval
    before, now = _inputs(old), _inputs(new)
    fates: dict[str, set[str]] = {}
    for stable, name in wanted.items():
      layer, _, variable = stable.partition('/')
      state[name] = np.array(fresh[name])
      if stable not in was or saved[was[stable]].ndim != state[name].ndim:
        fates.setdefault(layer, set()).add('fresh')
        continue
      value = saved[was[stable]]
      raw_layer = name.split('/')[1]
      of_class = classes.get(raw_layer)
      if re.match(r'\w*', variable)[0] in getattr(of_class, 'upper', ()):  # fills its lower half
        value = np.triu(value) + np.triu(value, 1).T
      axes = towers.get(raw_layer) or getattr(of_class, 'axes', {})
      shapes, followed = list(zip(value.shape, state[name].shape)), _followed(axes, variable)
      is_guessed = stable.startswith(own) and not followed
      at = []
      for axis, lengths in enumerate(shapes):
        keys = ['joined', 'fields'] if is_guessed else filter(None, followed[axis : axis + 1])
        at.append(_places(before, now, keys, is_guessed, *lengths))
      if at:
        state[name][np.ix_(*(to for _, to in at))] = value[np.ix_(*(of for of, _ in at))]
      else:
        state[name] = value
      is_whole = all(len(of) == n and len(to) == m for (of, to), (n, m) in zip(at, shapes))
      is_empty = not all(len(to) for _, to in at)
      fate = 'taken over' if is_whole else 'fresh' if is_empty else 'partly'
      fates.setdefault(layer, set()).add(fate)
    layers = {stable.partition('/')[0] for stable in was}
    table = [
      Fate(f'layer {layer}', of.pop() if len(of) == 1 else 'partly') for layer, of in fates.items()
    ]
    table += [Fate(f'layer {layer}', 'dropped') for layer in sorted(layers - fates.keys())]
    was_made, made = ({s.name: s.made for s in cfg.data.slots} for cfg in (old, new))
    slots = [Fate(f'slot {n}', 'taken over' if n in was_made else 'fresh') for n in made]
    for i, slot in enumerate(new.data.slots):
      of = slot.shares or slot.name
      if was_made.get(of, made[of]) != made[of]:
        what = 'which is' if of == slot.name else f'which shares {of}, which is'
        slots[i] = Fate(f'slot {slot.name}, {what} made otherwise now', 'fresh')
    slots += [Fate(f'slot {n}', 'dropped') for n in was_made if n not in made]
    return state, slots + self._tables() + table

  def _tables(self) -> list[Fate]:
    """Returns what a warm start does with each table whose layout differs between the configs."""
    fates = []
    for name, now in self._now.items():
      was = self._before.get(name, now)
      widths = [{p.kind: p.width for p in spec.parts} for spec in (was, now)]
      for part in dict.fromkeys((*widths[0], *widths[1])):
        a, b = (w.get(part) for w in widths)
        if a is None or b is None:
          fates.append(Fate(f'table {name}, {part} factors', 'dropped' if b is None else 'fresh'))
        elif a != b:
          fates.append(Fate(f'table {name}, width {a} to {b}', 'partly'))
      for part, a, b in (('linear', was.linear, now.linear), ('factors', was.factors, now.factors)):
        if a != b:
          fates.append(Fate(f'table {name}, {part} {a} to {b}', 'weights taken over'))
      if was.dtype != now.dtype:
        fate = 'rounded' if now.dtype == 'bfloat16' else 'taken over'
        fates.append(Fate(f'table {name}, {was.dtype} to {now.dtype}', fate))
    return fates
