"""Warm start: what a model with changed settings takes over from a checkpoint.

Features are matched by the name of their slot, dense variables by their layer and name. A new slot
or layer starts fresh, and so does a slot that is made otherwise, as of other bins; one that is gone
is dropped. A layer or table that has become wider keeps what it had, and the rest starts fresh.
Under another row optimizer, or in a table of another width, rows keep their weights and their
optimizer state starts fresh. Rows of a table that is now in bfloat16 are rounded to nearest.
"""

import collections
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from ops import chunks, row_optimizers, row_store
from ops.row_kinds import HYPERPARAMETERS
from ops.sharding import shard_of, shards_of
from trainer import config
from trainer.data.features import HASH_BITS
from trainer.plain_data import JsonObject

# Keys that may change beside those of run_state.MAY_CHANGE: how the model learns, the lifecycle of
# its features, its slots and its layers.
_RATES = '|'.join(HYPERPARAMETERS)
_MAY_CHANGE = re.compile(
  r'data\.label_negative|data\.labels\.\d+\.negative|train\..*|lifecycle\..*|sparse\.gradient_scale|sparse\.exchange_dtype'
  rf'|sparse\.tables\..*\.(linear|factors)\.({_RATES}|kind)|sparse\.tables\..*\.dtype'
  r'|model\.label_smoothing|model\.focal_gamma|model\.(interactions|dense_embedding)\..*|model\.dense_embedding'
)


class Taken(NamedTuple):
  """The fate of one part of the model."""

  what: str
  fate: str  # taken over, weights taken over, rounded, partly, fresh or dropped


def _identity(slot: config.Slot) -> JsonObject:
  """Returns what must not change of a slot: a slot that is made otherwise starts fresh."""
  return slot.model_dump(exclude={'pooling', 'lifecycle', 'made'})


def may_change(key: str, old: config.Config, new: config.Config) -> bool:
  """Whether a run may continue with another value of this key."""
  if key.startswith('data.slots.'):
    by_name = {slot.name: slot for slot in old.data.slots}
    same = all(
      _identity(slot) == _identity(by_name[slot.name])
      for slot in new.data.slots
      if slot.name in by_name
    )
    same &= bool(old.counted_fields()) == bool(new.counted_fields())
    return same and (not _has_ffm(old, new) or _slots(old) == _slots(new))
  if re.fullmatch(r'sparse\.tables\..*\.width', key):
    return not _has_ffm(old, new)
  return _MAY_CHANGE.fullmatch(key) is not None


def _has_ffm(*configs: config.Config) -> bool:
  """Whether one of the models has field-aware factors (FFM)."""
  return any(i.kind == 'ffm' for cfg in configs for i in cfg.model.all_interactions().values())


def _layouts(cfg: config.Config) -> dict[str, tuple[int, str, str, str]]:
  """Returns by table what the layout of rows depends on: width, row optimizers and dtype."""
  return {
    n: (t.width, t.linear.kind, t.factors.kind, t.dtype) for n, t in cfg.sparse.tables.items()
  }


def _slots(cfg: config.Config) -> list[tuple[str, int, config.Made | None]]:
  ids = cfg.slot_ids()
  return [(slot.name, ids[slot.name], slot.made) for slot in cfg.slots]


def is_needed(old: config.Config, new: config.Config) -> bool:
  """Whether `new` needs other rows or dense variables than a checkpoint of `old` has."""
  return (
    _slots(old) != _slots(new)
    or old.model.interactions != new.model.interactions
    or old.model.dense_embedding != new.model.dense_embedding
    or _layouts(old) != _layouts(new)
    or old.train.dense_optimizer.kind != new.train.dense_optimizer.kind
  )


def rows(
  old: config.Config, new: config.Config, rank: int, size: int
) -> Callable[[Iterator[chunks.Chunk]], Iterator[chunks.Chunk]]:
  """Returns a function from the old model's rows to the new rows that process `rank` owns.

  Args:
    old: the config that the rows were written with.
    new: the config that the run continues with.
    rank: the rank of this process.
    size: the number of processes.
  """
  new_ids, old_ids = new.slot_ids(), old.slot_ids()
  made = {slot.name: slot.made for slot in new.data.slots}
  new_id = np.full([config.MAX_SLOTS + 2], -1, np.int64)
  tables: dict[str, set[int]] = {}  # old slot ids, by table
  for slot in old.data.slots:
    tables.setdefault(slot.table, set()).add(old_ids[slot.name])
    if made.get(slot.name, ...) == slot.made:
      new_id[old_ids[slot.name]] = new_ids[slot.name]
  own = shards_of(rank, size)

  def changed(given: Iterator[chunks.Chunk]) -> Iterator[chunks.Chunk]:
    for chunk in given:
      slot = chunk['key'] >> HASH_BITS
      to = new_id[slot]
      key = (chunk['key'] & ((1 << HASH_BITS) - 1)) | (np.maximum(to, 0) << HASH_BITS)
      shard = shard_of(key)
      kept = (to >= 0) & (shard >= own.start) & (shard < own.stop)
      changed_chunk = chunks.select(chunk, kept, tables)
      changed_chunk['key'], changed_chunk['slot'] = key[kept], to[kept].astype(chunk['slot'].dtype)
      if _layouts(old) != _layouts(new):
        _lay_out(changed_chunk, old, new)
      yield changed_chunk

  return changed


def _lay_out(chunk: dict[str, np.ndarray], old: config.Config, new: config.Config) -> None:
  """Changes rows to the layout of the new config's tables.

  Args:
    chunk: columns as of ops.row_store.RowStore, with the new keys and slots; changed in place.
    old: the config that the rows were written with.
    new: the config that the run continues with.
  """
  before, now = _layouts(old), _layouts(new)
  hyper = row_optimizers.hyper([(t.linear, t.factors) for t in new.sparse.tables.values()])
  ids = new.slot_ids()
  linear = chunk['linear']
  width = 1 + max(row_optimizers.state_floats(kind, 1) for _, kind, _, _ in now.values())
  chunk['linear'] = np.zeros([len(linear), width], np.float32)
  for i, (name, (width, kind, factors_kind, dtype)) in enumerate(now.items()):
    slots = [ids[slot.name] for slot in new.data.slots if slot.table == name]
    here = np.isin(chunk['slot'], slots)
    old_width, old_kind, old_factors_kind, old_dtype = before.get(name, (0, '', '', ''))
    if kind == old_kind:
      rows = linear[here, : 1 + row_optimizers.state_floats(kind, 1)]
    else:
      rows = row_optimizers.row_init(linear[here, :1], hyper[i, 0], kind).numpy()
    chunk['linear'][here, : rows.shape[1]] = rows
    column, keys = f'factors_{name}', chunk['key'][here & chunk['admitted']]
    fits = (width, factors_kind) == (old_width, old_factors_kind) or _has_ffm(new)
    if fits and dtype == old_dtype:
      continue
    rows = row_store.to_float32(chunk[column]) if old_width else None
    if not fits:
      table, kept = new.sparse.tables[name], min(width, old_width)
      initial = row_store.initial_factors(keys, new.seed, width, scale=table.init_scale)
      weights = initial.numpy()
      if kept:
        weights[:, :kept] = rows[:, :kept]
      rows = row_optimizers.row_init(weights, hyper[i, 1], factors_kind).numpy()
    chunk[column] = row_store.to_bfloat16(rows) if dtype == 'bfloat16' else rows


def _by_layer(arrays: Mapping[str, np.ndarray]) -> dict[str, str]:
  """Returns the names in a checkpoint, by names that other layers do not influence.

  '012/dnn_2/kernel_0/m:0' is 'dnn 0/kernel_0/m:0' if it belongs to the first dnn.
  """
  names, layers = {}, {}
  for name in arrays:
    if not re.match(r'\d+/', name):
      continue
    layer, slash, rest = name.partition('/')[2].partition('/')
    kind = re.sub(r'_\d+$', '', layer)
    if slash:
      of_kind = layers.setdefault(kind, [])
      if layer not in of_kind:
        of_kind.append(layer)
      layer = f'{kind} {of_kind.index(layer)}'
    names[layer + slash + rest] = name
  return names


def _inputs(cfg: config.Config) -> list[str]:
  """Returns the slot or dense column of each column that dnn and cross read."""
  columns = [f'{s.name} {i}' for s in cfg.slots for i in range(cfg.sparse.tables[s.table].width)]
  if cfg.model.dense_embedding is not None:
    width = next(iter(cfg.sparse.tables.values())).width
    columns += [f'vector of {name} {i}' for name in cfg.dense_inputs() for i in range(width)]
  return columns + cfg.dense_inputs()


def _places(
  old: config.Config, new: config.Config, n: int, m: int
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the places along an axis that are kept, in the old and in the new variable."""
  for a, b in (
    (_inputs(old), _inputs(new)),
    ([s.name for s in old.slots], [s.name for s in new.slots]),
  ):
    if (n, m) == (len(a), len(b)) and a != b:
      pairs = [(a.index(name), j) for j, name in enumerate(b) if name in a]
      return tuple(np.array(pairs, np.int64).reshape(-1, 2).T)
  both = np.arange(min(n, m))
  return both, both


def dense(
  old: config.Config,
  new: config.Config,
  saved: Mapping[str, np.ndarray],
  fresh: Mapping[str, np.ndarray],
) -> tuple[dict[str, np.ndarray], list[Taken]]:
  """Returns the new model's dense state, and what became of each slot and layer.

  Args:
    old: the config that `saved` was written with.
    new: the config of the new model.
    saved: the dense state of the checkpoint.
    fresh: the dense state of the new model before training.
  """
  state, was, wanted = dict(saved), _by_layer(saved), _by_layer(fresh)
  for name in was.values():
    del state[name]
  fates: dict[str, set[str]] = {}
  for stable, name in wanted.items():
    layer = stable.partition('/')[0]
    state[name] = np.array(fresh[name])
    if stable not in was or saved[was[stable]].ndim != state[name].ndim:
      fates.setdefault(layer, set()).add('fresh')
      continue
    value = saved[was[stable]]
    at = [_places(old, new, n, m) for n, m in zip(value.shape, state[name].shape)]
    if at:
      state[name][np.ix_(*(to for _, to in at))] = value[np.ix_(*(of for of, _ in at))]
    else:
      state[name] = value
    is_whole = value.shape == state[name].shape
    fates.setdefault(layer, set()).add('taken over' if is_whole else 'partly')
  layers = {stable.partition('/')[0] for stable in was}
  table = [
    Taken(f'layer {layer}', layer_fates.pop() if len(layer_fates) == 1 else 'partly')
    for layer, layer_fates in fates.items()
  ]
  table += [Taken(f'layer {layer}', 'dropped') for layer in sorted(layers - fates.keys())]
  before, now = ({s.name: s.made for s in cfg.data.slots} for cfg in (old, new))
  slots = [Taken(f'slot {n}', 'taken over' if n in before else 'fresh') for n in now]
  for i, (name, made) in enumerate(now.items()):
    if before.get(name, made) != made:
      slots[i] = Taken(f'slot {name}, which is made otherwise now', 'fresh')
  slots += [Taken(f'slot {n}', 'dropped') for n in before if n not in now]
  return state, slots + _tables(old, new) + table


def untrained(
  old: config.Config,
  new: config.Config,
  saved: Mapping[str, np.ndarray],
  fresh: Mapping[str, np.ndarray],
  trainable: Collection[str],
  before: Collection[str],
) -> list[str]:
  """Returns the layers and variables of the new model that no step has trained.

  They are named as 'dnn 0' and 'dnn 0/kernel_0:0'.

  Args:
    old, new, saved, fresh: as for `dense`.
    trainable: the names of the new model's trainable variables.
    before: the untrained layers and variables of the old model.
  """
  was = _by_layer(saved)
  # Variables that are not trainable belong to the optimizer.
  wanted = {s: n for s, n in _by_layer(fresh).items() if n.partition('/')[2] in trainable}
  new_variables = set()
  for stable, name in wanted.items():
    shape, old_shape = fresh[name].shape, saved[was[stable]].shape if stable in was else ()
    if stable not in was or len(shape) != len(old_shape) or np.greater(shape, old_shape).any():
      new_variables.add(stable)
  # Layers without variables, such as fm, appear only in the config.
  had, has = (_layers(cfg) for cfg in (old, new))
  # A variable that shrinks back to its old size keeps what was trained before it grew.
  same = {s for s, name in wanted.items() if s in was and saved[was[s]].shape == fresh[name].shape}
  return sorted(new_variables | has - had | set(before) & (same | has))


def _layers(cfg: config.Config) -> set[str]:
  """Returns the layers of a config, with the names of `_by_layer`."""
  counts = collections.Counter(layer.kind for layer in cfg.model.all_interactions().values())
  return {f'{kind} {i}' for kind, n in counts.items() for i in range(n)}


def _tables(old: config.Config, new: config.Config) -> list[Taken]:
  """Returns what became of the tables whose layout differs."""
  before, taken = _layouts(old), []
  for name, now in _layouts(new).items():
    was = before.get(name, now)
    if was[0] != now[0]:
      taken.append(Taken(f'table {name}, width {was[0]} to {now[0]}', 'partly'))
    for part, a, b in zip(('linear', 'factors'), was[1:3], now[1:3]):
      if a != b:
        taken.append(Taken(f'table {name}, {part} {a} to {b}', 'weights taken over'))
    if was[3] != now[3]:
      fate = 'rounded' if now[3] == 'bfloat16' else 'taken over'
      taken.append(Taken(f'table {name}, {was[3]} to {now[3]}', fate))
  return taken
