"""Writes the items of a run with model.retrieval: their vectors, and an index of them.

    exports/items/12/
      items.parquet    item string, key int64, vector list<float32>; the most shown first
      items.faiss      an index of the vectors (faiss, HNSW by the inner product), where faiss is
                       installed; its number i is row i of items.parquet
      MANIFEST.json  DONE    as in checkpoints

With similarity cosine the vectors have length 1, so the score is the inner product, too. The index
is HNSW (Malkov and Yashunin 2016, "Efficient and robust approximate nearest neighbor
search using Hierarchical Navigable Small World graphs"): it needs no training, and takes new items.
"""

import importlib.util
import os
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trainer import files

ITEMS, INDEX = 'items.parquet', 'items.faiss'
_NEIGHBOURS, _BUILD_EFFORT = 32, 80  # M and efConstruction of HNSW
_EFFORT = 128  # efSearch: the candidates that a search keeps, unless it asks for others


class Items(NamedTuple):
  """The C items of a catalogue."""

  keys: np.ndarray  # int64 [C]
  texts: np.ndarray  # object [C]
  vectors: np.ndarray  # float32 [C, d]


def save(items: Items, path: str) -> None:
  """Writes items, and if faiss is installed their index, into the directory `path`."""
  count, width = items.vectors.shape
  numbers = pa.array(items.vectors.reshape(-1))
  offsets = pa.array(np.arange(count + 1, dtype=np.int64) * width)
  table = pa.table(
    {
      'item': pa.array(items.texts, pa.string()),
      'key': items.keys,
      'vector': pa.LargeListArray.from_arrays(offsets, numbers),
    }
  )
  with open(os.path.join(path, ITEMS), 'wb') as f:
    pq.write_table(table, f)
    f.flush()
    os.fsync(f.fileno())
  if has_faiss():
    import faiss

    index = faiss.IndexHNSWFlat(width, _NEIGHBOURS, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction, index.hnsw.efSearch = _BUILD_EFFORT, _EFFORT
    index.add(items.vectors)
    files.write_synced(os.path.join(path, INDEX), faiss.serialize_index(index).tobytes())


def has_faiss() -> bool:
  """Returns whether the extra `index` is installed."""
  return importlib.util.find_spec('faiss') is not None
