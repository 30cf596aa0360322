"""Writes the rows of bases and deltas as Parquet; export_writer.py describes the files."""

import zlib
from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ops.sharding import shard_of
from ops.tensors import to_tensor
from trainer.data.features import HASH_BITS
from trainer.embedding.row_table import RowTable, counts_of
from trainer.storage import chain

ROWS_AT_ONCE = 1 << 16  # rows that are read from the store at a time; they form one row group
FACTORS = pa.list_(pa.field('item', pa.float32(), nullable=False))
SCHEMA = pa.schema(
  [('key', pa.int64()), ('slot', pa.int32()), ('linear', pa.float32()), ('factors', FACTORS)]
)
COUNTED_SCHEMA = pa.schema([*SCHEMA, *((name, pa.float32()) for name in chain.SHOW_CLICK)])
KEY_SCHEMA = pa.schema([('key', pa.int64())])


def by_shard(keys: np.ndarray) -> np.ndarray:
  """Sorts keys by logical shard, then key."""
  return keys[np.lexsort((keys, shard_of(keys)))]


def write_parquet(path: str, schema: pa.Schema, tables: Iterable[pa.Table]) -> int:
  """Writes a Parquet file without syncing it; returns the CRC-32 of its column `key`."""
  crc, is_rows = 0, schema is not KEY_SCHEMA
  encodings = {
    'use_dictionary': ['slot'] if is_rows else False,
    'use_byte_stream_split': ['factors.list.element'] if is_rows else False,
  }
  with open(path, 'wb') as f, pq.ParquetWriter(f, schema, **encodings) as writer:
    for table in tables:
      writer.write_table(table)
      crc = zlib.crc32(table['key'].to_numpy().tobytes(), crc)
  return crc


def row_tables(store: RowTable, keys: np.ndarray, schema: pa.Schema = SCHEMA) -> Iterator[pa.Table]:
  """Yields the rows of keys, int64 [n], as Arrow tables of SCHEMA or COUNTED_SCHEMA."""
  for begin in range(0, len(keys), ROWS_AT_ONCE):
    block = keys[begin : begin + ROWS_AT_ONCE]
    rows = store.pull(block, train=False)
    offsets, linear, factors = (
      pa.array(np.asarray(a)) for a in (rows.offsets, rows.linear, rows.factors)
    )
    lists = pa.ListArray.from_arrays(offsets, factors, type=FACTORS)
    columns = [pa.array(block), pa.array((block >> HASH_BITS).astype(np.int32)), linear, lists]
    if schema is COUNTED_SCHEMA:
      columns += [pa.array(column) for column in counts_of(store, to_tensor(block)).numpy().T]
    yield pa.Table.from_arrays(columns, schema=schema)
