"""Parquet files. Slots may be strings, integers, booleans, decimals, dates, lists of them, or maps
from them to numbers; columns may be dictionary-encoded.
"""

import functools
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from trainer import config
from trainer.data.block import Block
from trainer.data.log_files import first_line, open_file
from trainer.data.schema import check_columns
from trainer.errors import BadPass

BLOCK_ROWS = 65536


def record_block(batch: pa.RecordBatch, first_row: int) -> Block:
  """A Block of the records of a batch, the first of which is record `first_row` of the file."""

  def text(i: int) -> str:
    try:
      return str(batch.slice(i, 1).to_pylist()[0])
    except UnicodeDecodeError:  # a string of bytes that are no text
      return 'a record whose strings are not UTF-8'

  columns = dict(zip(batch.schema.names, batch.columns))
  return Block(columns, first_row + np.arange(batch.num_rows), text, [])


def blocks(path: str, data: config.Data, wanted: dict[str, str]) -> Iterator[Callable[[], Block]]:
  """As `csv_format.blocks`; a line is a record, from 1."""
  del data
  try:
    with open_file(path) as f, pa.parquet.ParquetFile(f, page_checksum_verification=True) as table:
      check_columns(path, table.schema_arrow.names, wanted)
      row = 1
      for batch in table.iter_batches(BLOCK_ROWS, columns=list(wanted)):
        yield functools.partial(record_block, batch, row)
        row += batch.num_rows
  except (OSError, pa.ArrowException) as e:
    raise BadPass(f'{path}: not a Parquet file that can be read: {first_line(e)}') from None
