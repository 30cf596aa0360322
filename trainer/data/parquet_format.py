"""Parquet files. Slots may be strings, integers, booleans, or lists of them."""

import functools

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from trainer.data.block import Block
from trainer.data.schema import check_columns
from trainer.errors import UserError

BLOCK_ROWS = 65536


def _block(batch, first_row):
  columns = dict(zip(batch.schema.names, batch.columns))
  return Block(
    columns,
    first_row + np.arange(batch.num_rows),
    lambda i: str(batch.slice(i, 1).to_pylist()[0]),
    [],
  )


def blocks(path, data, wanted):
  """As `csv_reader.blocks`; a line is a row, from 1."""
  del data
  try:
    with pa.parquet.ParquetFile(path, memory_map=True) as f:
      check_columns(path, f.schema_arrow.names, wanted)
      row = 1
      for batch in f.iter_batches(BLOCK_ROWS, columns=list(wanted), use_threads=False):
        yield functools.partial(_block, batch, row)
        row += batch.num_rows
  except (OSError, pa.ArrowInvalid) as e:
    raise UserError(f'{path}: not a Parquet file that can be read: {e}') from None
