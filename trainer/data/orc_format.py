"""ORC files; columns are as in Parquet."""

import functools
from collections.abc import Callable, Iterator

import pyarrow as pa
import pyarrow.orc

from trainer import config
from trainer.data.block import Block
from trainer.data.log_files import first_line, open_file
from trainer.data.parquet_format import BLOCK_ROWS, record_block
from trainer.data.schema import check_columns
from trainer.errors import BadPass


def blocks(path: str, data: config.Data, wanted: dict[str, str]) -> Iterator[Callable[[], Block]]:
  """As `csv_format.blocks`; a line is a record, from 1. A stripe is read as a whole."""
  del data
  try:
    with open_file(path) as f:
      table = pa.orc.ORCFile(f)
      check_columns(path, table.schema.names, wanted)
      row = 1
      for i in range(table.nstripes):
        stripe = table.read_stripe(i, columns=list(wanted))
        for start in range(0, stripe.num_rows, BLOCK_ROWS):
          batch = stripe.slice(start, BLOCK_ROWS)
          yield functools.partial(record_block, batch, row)
          row += batch.num_rows
  except (OSError, pa.ArrowException) as e:
    raise BadPass(f'{path}: not an ORC file that can be read: {first_line(e)}') from None
