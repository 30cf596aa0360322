"""Reads Arrow IPC streams, each a message of a topic that holds any number of records."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from trainer import config
from trainer.data.block import BadRecord, Block
from trainer.data.parquet_format import known_columns, record_block, to_read
from trainer.data.schema import check_columns
from trainer.errors import UserError


def of_messages(values: Sequence[bytes], data: config.Data, wanted: dict[str, str]) -> Block:
  """Parses messages to a Block; its lines are the indices, from 0, of the records' messages."""
  lines, malformed = [], []
  tables: list[pa.Table] = []
  for i, value in enumerate(values):
    try:
      with pa.ipc.open_stream(value) as stream:
        table = stream.read_all()
      table.validate(full=True)
      check_columns('it', known_columns(table.schema, wanted), wanted, data.made)
      table = table.select(to_read(table.schema, wanted))
      if tables and not table.schema.equals(tables[0].schema):
        raise UserError(f'types {table.schema}, and in an earlier message {tables[0].schema}')
      tables.append(table)
      lines += [i] * table.num_rows
    except (OSError, UserError, pa.ArrowException) as e:
      found = ' '.join(str(e).split())[:200]
      malformed.append(BadRecord(i, found, 'an Arrow IPC stream', repr(value[:200])))
  if not tables:
    empty = {name: pa.array([], pa.string()) for name in wanted}
    return Block(empty, np.array([], np.int64), lambda i: '', malformed)
  block = record_block(pa.concat_tables(tables).combine_chunks(), 0, wanted)
  return block._replace(lines=np.array(lines, np.int64), malformed=malformed)
