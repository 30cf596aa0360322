"""Writes and reads the items of a run with model.retrieval: their vectors, and an index of them.

    exports/items/12/   000013-delta/  beside the rows of the query tower (export_writer.py)
      items.parquet     item string, key int64, vector list<float32>; the most shown first. In a
                        delta: the items that are new or have another vector, then those that left,
                        with neither text nor vector
      items.faiss       not in deltas, and only if faiss is installed: its index of the vectors, of
                        type IVF; number i of the index is row i of items.parquet

The score of an item is the inner product of its vector and the query's; with the similarity
`cosine`, vectors have length 1. The index divides the n items into √n lists, by k-means on a part
of the items. A search reads the PROBES lists whose centres have the highest scores, so it is exact
for up to PROBES² items. To build the index takes n^1.5: some seconds for a million items, where a
graph (HNSW) would take many minutes.
"""

import importlib.util
import io
import logging
import os
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trainer import files
from trainer.data.arrays import places
from trainer.errors import DataLoss
from trainer.storage.chain import ITEMS, Replay, RowExport

INDEX = 'items.faiss'
PROBES = 128  # the number of lists that a search reads by default


class Items(NamedTuple):
  """The C items of a catalogue."""

  keys: np.ndarray  # int64 [C]
  texts: np.ndarray  # object [C]
  vectors: np.ndarray  # float32 [C, d]

  def take(self, places: np.ndarray) -> 'Items':
    """Returns the items at some indices, or where a bool [C] is true."""
    return Items(*(column[places] for column in self))

  def by_key(self) -> 'Items':
    """Returns the items in ascending order of their keys."""
    return self.take(np.argsort(self.keys))

  @property
  def told(self) -> str:
    index = f'and {INDEX}' if self.has_index else "no index: pip install 'ctr-trainer[index]'"
    return f'{len(self.keys):,} items, {index}'

  @property
  def has_index(self) -> bool:
    return has_faiss()

  def since(self, links: Sequence[str], replay: Replay) -> 'Change':
    """Returns how the items differ from those of the chain `links`; all items if it is empty."""

    def added(items: Items | None, export: RowExport) -> Items:
      change = read(export)
      return change.items.by_key() if items is None else change.applied(items)

    before = replay.replayed('items', links, None, lambda: None, added)
    if before is None:
      return Change(self, np.zeros([0], np.int64))
    return Change.between(before, self)

  def save_index(self, directory: str) -> None:
    """Writes an index of the items, if there are any and faiss is installed."""
    if len(self.keys) and has_faiss():
      files.write(os.path.join(directory, INDEX), index_of(self.vectors))


class Change(NamedTuple):
  """How the items of a run differ from those of an earlier export."""

  items: Items  # new items, and items with another vector
  gone: np.ndarray  # int64 [n], the keys of the items that left the catalogue

  @property
  def keys(self) -> np.ndarray:
    return self.items.keys

  @classmethod
  def between(cls, before: Items, now: Items) -> 'Change':
    """Returns the change from `before`, ascending by key, to `now`, in the order of `now`."""
    place = places(before.keys, now.keys)
    same = place >= 0
    same[same] = (before.vectors[place[same]] == now.vectors[same]).all(1)
    return cls(now.take(~same), np.setdiff1d(before.keys, now.keys, assume_unique=True))

  def applied(self, before: Items) -> Items:
    """Returns `before` with this change applied; both are in ascending order of their keys."""
    kept = before.take(~np.isin(before.keys, np.concatenate([self.gone, self.items.keys])))
    if not len(self.items.keys):
      return kept
    return Items(*map(np.concatenate, zip(kept, self.items))).by_key()

  def save(self, directory: str) -> None:
    """Writes the change, which may be all items, into a directory."""
    items, gone = self
    count, width = items.vectors.shape
    offsets = np.arange(count + 1) * width
    vectors = pa.LargeListArray.from_arrays(offsets, pa.array(items.vectors.reshape(-1)))
    left = [pa.nulls(len(gone), kind) for kind in (pa.string(), vectors.type)]
    table = pa.table(
      {
        'item': pa.concat_arrays([pa.array(items.texts, pa.string()), left[0]]),
        'key': np.concatenate([items.keys, gone]),
        'vector': pa.concat_arrays([vectors, left[1]]),
      }
    )
    out = io.BytesIO()
    pq.write_table(table, out)
    files.write(os.path.join(directory, ITEMS), out.getvalue())


def index_of(vectors: np.ndarray) -> bytes:
  """Returns a faiss index of the vectors, float32 [n, d], n > 0, as bytes."""
  faiss, (count, width) = import_faiss(), vectors.shape
  centres, lists = faiss.IndexFlatIP(width), round(count**0.5)
  index = faiss.IndexIVFFlat(centres, width, lists, faiss.METRIC_INNER_PRODUCT)
  index.cp.min_points_per_centroid, index.nprobe = 1, PROBES
  index.train(vectors)
  index.add(vectors)
  return faiss.serialize_index(index).tobytes()


def read(export: RowExport) -> Change:
  """Returns the items of an export: all items of a base, or those that differ in a delta."""
  data = export.content(ITEMS)
  try:
    table = pq.read_table(io.BytesIO(data)).combine_chunks()
    left = table['vector'].is_null().to_numpy()
    keys, texts = (table[name].to_numpy() for name in ('key', 'item'))
    vectors = table['vector'].drop_null().combine_chunks()
    flat = vectors.flatten().to_numpy()
    vectors = flat.reshape(len(vectors), -1) if len(vectors) else np.zeros([0, 0], np.float32)
    return Change(Items(keys[~left], texts[~left], vectors), keys[left])
  except (pa.ArrowException, OSError, ValueError, KeyError) as e:
    where = os.path.join(export.path, ITEMS)
    raise DataLoss(f'{where}: is damaged: {" ".join(str(e).split())}') from None


def has_faiss() -> bool:
  """Returns whether faiss is installed; the extra `index` of our package installs it."""
  return importlib.util.find_spec('faiss') is not None


def import_faiss() -> ModuleType:
  """Returns the module faiss, without the log lines that it would write while it is imported."""
  logging.getLogger('faiss.loader').setLevel(logging.WARNING)
  import faiss

  return faiss
