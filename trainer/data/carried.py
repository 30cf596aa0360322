"""Columns of raw files that are carried beside predictions, and how both are written."""

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from trainer import config
from trainer.data.conversion import raw_blocks
from trainer.data.log_files import files_of
from trainer.errors import UserError


def _plain(array: pa.Array, as_text: bool, column: str) -> pa.Array:
  """An array without dictionary, bytes as text; where `as_text`, whatever it holds as text."""
  if pa.types.is_dictionary(array.type):
    array = array.dictionary_decode()
  if pa.types.is_binary(array.type):
    array = array.view(pa.string())
  if not as_text:
    return array
  try:
    return array.cast(pa.string())
  except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
    raise UserError(
      f"--columns: '{column}' holds {array.type}; wanted one value a record, or --out as .parquet"
    ) from None


def carried_columns(
  cfg: config.Config, path: str, columns: Sequence[str], as_text: bool
) -> Iterator[pa.Table]:
  """Yields the columns of a raw pass, some records at a time, in order."""
  wanted = dict.fromkeys(columns, '--columns')
  for file in files_of(path):
    for read in raw_blocks(cfg, file, wanted):
      block = read()
      yield pa.table({c: _plain(block.columns[c], as_text, c) for c in columns})


def beside(
  tables: Iterator[pa.Table] | None, predictions: Iterator[np.ndarray], names: Sequence[str]
) -> Iterator[pa.Table]:
  """Yields the carried columns with the predictions of the same records.

  Args:
    tables: the carried columns; None where none are.
    predictions: [B] or [B, T], of any B.
    names: of the T columns of predictions.
  """
  rest = None
  for batch in predictions:
    batch = batch.reshape(len(batch), -1)
    if tables is None:
      yield pa.table({n: np.ascontiguousarray(c) for n, c in zip(names, batch.T)})
      continue
    while rest is None or rest.num_rows < len(batch):
      following = next(tables)
      rest = following if rest is None else pa.concat_tables([rest, following])
    table, rest = rest.slice(0, len(batch)), rest.slice(len(batch))
    for name, column in zip(names, batch.T):
      table = table.append_column(name, pa.array(np.ascontiguousarray(column)))
    yield table


def write_tables(tables: Iterator[pa.Table], out: str, as_parquet: bool) -> None:
  """Writes tables of one schema as CSV with a first line of names, or as Parquet."""
  writer = None
  try:
    for table in tables:
      if writer is None:
        make = pa.parquet.ParquetWriter if as_parquet else pa.csv.CSVWriter
        writer = make(out, table.schema)
      try:
        writer.write_table(table.cast(writer.schema) if as_parquet else table)
      except pa.ArrowException as e:
        raise UserError(f'--columns: their values change their type: {e}') from None
  finally:
    if writer is not None:
      writer.close()
