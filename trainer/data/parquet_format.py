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
from trainer.data.log_files import WHOLE, Part, open_table
from trainer.data.schema import check_columns

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


def num_rows(path: str) -> int:
  """The number of a file's rows.

  Raises:
    BadPass: where it is no Parquet file.
  """
  with open_table(path, 'a Parquet') as f:
    return pa.parquet.read_metadata(f).num_rows


def blocks(
  path: str, data: config.Data, wanted: dict[str, str], part: Part = WHOLE
) -> Iterator[Callable[[], Block]]:
  """As `csv_format.blocks`; a line is a record, from 1. Only row groups of the part are read."""
  del data
  with (
    open_table(path, 'a Parquet') as f,
    pa.parquet.ParquetFile(f, page_checksum_verification=True) as table,
  ):
    check_columns(path, table.schema_arrow.names, wanted)
    groups = [table.metadata.row_group(i).num_rows for i in range(table.num_row_groups)]
    ends = np.cumsum(groups)
    end = table.metadata.num_rows if part.end is None else part.end
    mine = [i for i in range(len(groups)) if ends[i] > part.start and ends[i] - groups[i] < end]
    row = int(ends[mine[0]]) - groups[mine[0]] if mine else 0
    for batch in table.iter_batches(BLOCK_ROWS, row_groups=mine, columns=list(wanted)):
      skipped = max(0, part.start - row)
      own = batch.slice(skipped, max(0, min(batch.num_rows, end - row) - skipped))
      if own.num_rows:
        yield functools.partial(record_block, own, row + skipped + 1)
      row += batch.num_rows
