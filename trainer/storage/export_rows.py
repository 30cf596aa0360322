"""The rows of an export that one process selects and writes."""

import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from ops.tensors import to_tensor
from trainer import files
from trainer.comm.communicator import Communicator
from trainer.data.features import HASH_BITS
from trainer.embedding.row_table import RowTable
from trainer.storage import chain
from trainer.storage.chain import part_name
from trainer.storage.row_files import KEY_SCHEMA, ROWS_AT_ONCE, by_shard, row_tables, write_parquet


class Selection(NamedTuple):
  """The keys that an export of one process writes, deletes and keeps, int64 [n] each.

  `rows` and `tombstones` are ordered by logical shard, then by key.
  """

  rows: np.ndarray  # to write
  tombstones: np.ndarray | None  # to delete; None: this kind of export has none
  kept: np.ndarray | None  # that the chain holds after this export; None if it was not looked for
  commits: dict[str, np.ndarray]  # {base or delta: the keys to pass to `store.commit` afterwards}


class Part(NamedTuple):
  """What one process wrote; the last four are 0 if the policy keeps nothing out of exports."""

  rows: int = 0
  tombstones: int = 0
  keys_crc32: dict[str, int] = {}  # of the keys in each of its files
  slots: dict[str, int] = {}  # rows by slot id
  features: int = 0  # in this process's table
  kept: int = 0  # features that the chain holds after this export
  shows: float = 0.0  # of `features`
  shows_kept: float = 0.0  # of `kept`


def _of(slot_ids: Sequence[int] | None, keys: np.ndarray) -> np.ndarray:
  """Returns those of the keys that belong to the slots; all of them if `slot_ids` is None."""
  return keys if slot_ids is None else keys[np.isin(keys >> HASH_BITS, slot_ids)]


def select(
  slot_ids: Sequence[int] | None,
  store: RowTable,
  kind: str,
  links: Sequence[str],
  unchanged: bool,
  shards: range,
  replay: chain.Replay,
  changed: np.ndarray,
  touched: np.ndarray | None,
) -> Selection:
  """Selects the rows that this process writes and deletes.

  Args:
    slot_ids: of the slots that serving looks up; None: of all.
    links: the exports of the chain that a delta continues.
    unchanged: whether the last of them is of this very state.
    changed: the keys of items whose vectors have changed; a delta holds their rows.
    touched: the keys of the features that have changed since the last of `links`, if that is known.
  """
  if kind == 'saved_model':
    keys = by_shard(np.asarray(store.select('all')))
    return Selection(keys, None, keys, {})
  # Of the others, none is to be written or deleted: nothing filters them, and none was erased.
  among = None
  if touched is not None and not store.policy.filters_exports and store.policy.delta_takes_gains:
    among = np.union1d(touched, changed)
  base = np.sort(_of(slot_ids, np.asarray(store.select('base', among))))
  kept = base if among is None else None
  delta = base[:0]
  if kind == 'delta' and not unchanged:
    delta = _of(slot_ids, np.asarray(store.select('delta', among)))
  changed, tombstones = np.intersect1d(base, changed), None
  if kind == 'delta':
    live = replay.live_keys(links, shards)
    tombstones = base[:0]
    if among is None:
      tombstones = by_shard(np.setdiff1d(live.all(), np.union1d(base, delta), assume_unique=True))
    base = base[~live.has(base)]
  commits = {'delta': delta, 'base': np.setdiff1d(base, delta, assume_unique=True)}
  rows = np.union1d(np.union1d(base, delta), changed)
  return Selection(by_shard(rows), tombstones, kept, commits)


def _shows(store: RowTable, keys: np.ndarray) -> float:
  blocks = (to_tensor(keys[i : i + ROWS_AT_ONCE]) for i in range(0, len(keys), ROWS_AT_ONCE))
  return sum(float(np.sum(store.lookup(block)['show'])) for block in blocks)


def write_part(
  slot_ids: Sequence[int] | None,
  store: RowTable,
  selection: Selection,
  schema: pa.Schema,
  unfinished: str,
  communicator: Communicator,
) -> Part:
  """Writes this process's rows and tombstones into the directory `unfinished`."""
  contents = {'rows': (schema, row_tables(store, selection.rows, schema))}
  tombstones = selection.tombstones
  if tombstones is not None:
    contents['tombstones'] = KEY_SCHEMA, [pa.table({'key': tombstones}, KEY_SCHEMA)]
  crc = {}
  for content, (schema, tables) in contents.items():
    name = part_name(content, communicator.rank, communicator.size)
    crc[name] = write_parquet(os.path.join(unfinished, name), schema, tables)
  if communicator.rank:  # files.publish syncs the files of process 0
    files.sync(os.path.join(unfinished, name) for name in crc)
  ids, counts = np.unique(selection.rows >> HASH_BITS, return_counts=True)
  slots = dict(zip(map(str, ids.tolist()), counts.tolist()))
  part = Part(len(selection.rows), 0 if tombstones is None else len(tombstones), crc, slots)
  if not store.policy.filters_exports:
    return part
  features, kept = _of(slot_ids, np.asarray(store.select('all'))), selection.kept
  shows, shows_kept = _shows(store, features), _shows(store, kept)
  return part._replace(features=len(features), kept=len(kept), shows=shows, shows_kept=shows_kept)
