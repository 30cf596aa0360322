"""A model goes on with other settings: what of a checkpoint is taken over where they differ.

Features are known by their slot's name, dense variables by their layer and name. A slot or layer
that is new starts fresh, one that is gone is dropped; of a layer that has become wider, what it had
is taken over and the rest starts fresh.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from ops import chunks
from ops.sharding import shard_of, shards_of
from trainer import config
from trainer.data.features import HASH_BITS

# Keys that may differ between runs of one model, beside those of run_state.MAY_CHANGE: how it
# learns, when features live, and its slots and layers.
_RATES = 'learning_rate|beta1|beta2|epsilon|learning_rate_power|beta|l1|l2|clip|initial_accumulator'
_MAY_CHANGE = re.compile(
  r'train\..*|lifecycle\..*|sparse\.gradient_scale|sparse\.exchange_dtype'
  rf'|sparse\.tables\..*\.(linear|factors)\.({_RATES})'
  r'|model\.label_smoothing|model\.focal_gamma|model\.interactions\..*'
)


class Taken(NamedTuple):
  """What became of a part of the model."""

  what: str
  fate: str  # taken over, partly, fresh or dropped


def _identity(slot: config.Slot) -> dict[str, Any]:
  """What decides a slot's keys and the layout of its rows."""
  return slot.model_dump(exclude={'pooling', 'lifecycle'})


def may_change(key: str, old: config.Config, new: config.Config) -> bool:
  """Whether a model goes on though this key's value differs."""
  if key.startswith('data.slots.'):
    by_name = {slot.name: slot for slot in old.data.slots}
    same = all(
      _identity(slot) == _identity(by_name[slot.name])
      for slot in new.data.slots
      if slot.name in by_name
    )
    # The factors of ffm are laid out by field.
    has_ffm = any(
      i.kind == 'ffm' for cfg in (old, new) for i in cfg.model.all_interactions().values()
    )
    return same and (not has_ffm or _slots(old) == _slots(new))
  return _MAY_CHANGE.fullmatch(key) is not None


def _slots(cfg: config.Config) -> list[tuple[str, int]]:
  ids = cfg.slot_ids()
  return [(slot.name, ids[slot.name]) for slot in cfg.slots]


def is_needed(old: config.Config, new: config.Config) -> bool:
  """Whether a checkpoint of `old` has other rows or dense variables than `new` wants."""
  return (
    _slots(old) != _slots(new)
    or old.model.interactions != new.model.interactions
    or old.train.dense_optimizer.kind != new.train.dense_optimizer.kind
  )


def rows(
  old: config.Config, new: config.Config, rank: int, size: int
) -> Callable[[Iterator[chunks.Chunk]], Iterator[chunks.Chunk]]:
  """Returns what makes chunks of all of the old model's rows to those that process `rank` owns.

  Args:
    old: the config that the rows were written with.
    new: the config that they go on with.
    rank: of this process.
    size: the number of processes.
  """
  new_ids, old_ids = new.slot_ids(), old.slot_ids()
  new_id = np.full([config.MAX_SLOTS + 2], -1, np.int64)
  tables: dict[str, set[int]] = {}  # old slot ids, by table
  for slot in old.data.slots:
    tables.setdefault(slot.table, set()).add(old_ids[slot.name])
    if slot.name in new_ids:
      new_id[old_ids[slot.name]] = new_ids[slot.name]
  own = shards_of(rank, size)

  def changed(given: Iterator[chunks.Chunk]) -> Iterator[chunks.Chunk]:
    for chunk in given:
      slot = chunk['key'] >> HASH_BITS
      to = new_id[slot]
      key = (chunk['key'] & ((1 << HASH_BITS) - 1)) | (np.maximum(to, 0) << HASH_BITS)
      shards = shard_of(key)
      for shard in np.unique(shards[to >= 0]):
        if int(shard) not in own:
          continue
        kept = (to >= 0) & (shards == shard)
        one = {}
        for name, column in chunk.items():
          if name.startswith('factors_'):  # of the admitted rows of a table
            of_table = chunk['admitted'] & np.isin(slot, list(tables[name[len('factors_') :]]))
            one[name] = column[kept[of_table]]
          elif np.ndim(column):
            one[name] = column[kept]
        one['key'], one['slot'] = key[kept], to[kept].astype(chunk['slot'].dtype)
        if 'checksum' in chunk:
          one['shard'] = np.int64(shard)
          one['checksum'] = np.int64(chunks.checksum(one))
        yield one

  return changed


def _by_layer(arrays: Mapping[str, np.ndarray]) -> dict[str, str]:
  """Names that stay the same when layers before are added or removed -> names in a checkpoint.

  '012/dnn_2/kernel_0/m:0' is 'dnn 0/kernel_0/m:0' where it belongs to the first dnn.
  """
  found, layers = {}, {}
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
    found[layer + slash + rest] = name
  return found


def _inputs(cfg: config.Config) -> list[str]:
  """What each column of the slot vectors joined with dense is of: what dnn and cross read."""
  columns = [f'{s.name} {i}' for s in cfg.slots for i in range(cfg.sparse.tables[s.table].width)]
  return columns + [f'dense {column.name}' for column in cfg.data.dense]


def _places(
  old: config.Config, new: config.Config, n: int, m: int
) -> tuple[np.ndarray, np.ndarray]:
  """Which of n old places along an axis go to which of m new ones."""
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
    new: the config that it goes on with.
    saved: the dense state of the checkpoint.
    fresh: that of the new model before training.
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
    Taken(f'layer {layer}', found.pop() if len(found) == 1 else 'partly')
    for layer, found in fates.items()
  ]
  table += [Taken(f'layer {layer}', 'dropped') for layer in sorted(layers - fates.keys())]
  before, now = ([s.name for s in cfg.data.slots] for cfg in (old, new))
  slots = [Taken(f'slot {n}', 'taken over' if n in before else 'fresh') for n in now]
  slots += [Taken(f'slot {n}', 'dropped') for n in before if n not in now]
  return state, slots + table
