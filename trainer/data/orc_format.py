"""Reads ORC files; columns may have the types that parquet_format reads."""

import functools
from collections.abc import Callable, Iterator

import pyarrow as pa
import pyarrow.orc

from trainer import config
from trainer.data.block import Block
from trainer.data.file_system import WHOLE, Part, open_table
from trainer.data.parquet_format import BLOCK_ROWS, known_columns, record_block, to_read
from trainer.data.schema import check_columns


def num_rows(path: str) -> int:
  """Returns the number of rows of a file; raises BadPass if it is no ORC file."""
  with open_table(path, 'an ORC') as f:
    return pa.orc.ORCFile(f).nrows


def blocks(
  path: str, data: config.Data, wanted: dict[str, str], part: Part = WHOLE
) -> Iterator[Callable[[], Block]]:
  """Reads an ORC file a stripe at a time; yields blocks of at most BLOCK_ROWS of its records.

  `Block.lines` are the numbers of the records. For the rest, see `csv_format.blocks`.

  Pyarrow does not say how many rows a stripe has, so one column of the stripes before the part is
  read too, to count their rows.
  """
  with open_table(path, 'an ORC') as f:
    table = pa.orc.ORCFile(f)
    check_columns(path, known_columns(table.schema, wanted), wanted, data.made)
    columns = to_read(table.schema, wanted)
    row, end = 0, table.nrows if part.end is None else part.end
    for i in range(table.nstripes):
      if row >= end:
        break
      if row < part.start:
        rows = table.read_stripe(i, columns=columns[:1]).num_rows
        if row + rows <= part.start:
          row += rows
          continue
      stripe = table.read_stripe(i, columns=columns)
      for start in range(max(0, part.start - row), min(stripe.num_rows, end - row), BLOCK_ROWS):
        batch = stripe.slice(start, min(BLOCK_ROWS, end - row - start))
        yield functools.partial(record_block, batch, row + start + 1, list(wanted))
      row += stripe.num_rows
