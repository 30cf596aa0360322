"""Writes predictions to files, beside columns that are copied from the log."""

import contextlib
import functools
import json
import os
from collections.abc import Iterator, Sequence
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from trainer import config
from trainer.data.conversion import blocks_of_pass
from trainer.data.schema import CARRIED
from trainer.errors import UserError


def _plain(array: pa.Array, as_text: bool, column: str) -> pa.Array:
  """Returns a column without dictionary encoding; if `as_text`, values of all types as texts."""
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
  """Yields `columns` of a raw pass as tables, in order, a block of records at a time."""
  for block in blocks_of_pass(cfg, path, dict.fromkeys(columns, CARRIED)):
    yield pa.table({c: _plain(block.columns[c], as_text, c) for c in columns})


def _added(table: pa.Table, names: Sequence[str], columns: Sequence[pa.Array]) -> pa.Table:
  """Returns a table with more columns. One whose name the table has is called predicted_NAME."""
  for name, column in zip(names, columns):
    while name in table.column_names:
      name = f'predicted_{name}'
    table = table.append_column(name, column)
  return table


def beside(
  tables: Iterator[pa.Table] | None, predictions: Iterator[np.ndarray], names: Sequence[str]
) -> Iterator[pa.Table]:
  """Yields a table for each batch of predictions: columns copied from the log, then predictions.

  Args:
    tables: the copied columns, in the order of the predictions, of any size; None: none.
    predictions: batches [B] or [B, T].
    names: of the T columns of predictions. One that a copied column has, such as that of a label,
      becomes predicted_NAME.
  """
  rest = None
  for batch in predictions:
    batch = batch.reshape(len(batch), -1)
    columns = [pa.array(np.ascontiguousarray(column)) for column in batch.T]
    if tables is None:
      yield pa.table(columns, names)
      continue
    while rest is None or rest.num_rows < len(batch):
      following = next(tables)
      rest = following if rest is None else pa.concat_tables([rest, following])
    table, rest = rest.slice(0, len(batch)), rest.slice(len(batch))
    yield _added(table, names, columns)


def joined(tables: Iterator[pa.Table], items: Iterator[pa.Table]) -> Iterator[pa.Table]:
  """Yields tables of recommended items, with the columns copied from the log in front.

  `tables` have these of all samples, in order. `items` have a line for each item; the first column,
  `sample`, is its sample's number, ascending, and the copied columns replace it.
  """
  rest, first = next(tables), 0
  for table in items:
    sample = table['sample'].to_numpy()
    while len(sample) and sample[-1] >= first + rest.num_rows:
      rest = pa.concat_tables([rest, next(tables)])
    yield _added(rest.take(sample - first), table.column_names[1:], table.columns[1:])
    if len(sample):
      rest, first = rest.slice(sample[-1] - first), int(sample[-1])


# The formats of a file of predictions by its suffix; a file without one is text.
TEXT_DELIMITERS = {'': ',', '.txt': ',', '.csv': ',', '.tsv': '\t'}
JSON_SUFFIXES = ('.json', '.jsonl', '.ndjson')
PARQUET_SUFFIXES = ('.parquet', '.pq')


def out_suffix(path: str) -> str:
  """Returns a path's suffix, the format of predictions, '' for text; UserError for an unknown one.

  It begins with a letter, so scores.2024-01-31 has none.
  """
  suffix = os.path.splitext(path)[1].lower()
  known = [s for s in (*TEXT_DELIMITERS, *JSON_SUFFIXES, *PARQUET_SUFFIXES) if s]
  if suffix in known:
    return suffix
  if suffix[1:2].isalpha():
    raise UserError(f'--out: found {path}; wanted one of {", ".join(known)}, or no suffix')
  return ''


def write_lines(predictions: Iterator[np.ndarray], out: BinaryIO, delimiter: str) -> None:
  """Writes predictions [B] or [B, T], a line for each sample, without a header."""
  for batch in predictions:
    rows = batch.reshape(len(batch), -1)
    out.writelines((delimiter.join(f'{p:.9g}' for p in row) + '\n').encode() for row in rows)


def _write_json(out: BinaryIO, table: pa.Table) -> None:
  for row in table.to_pylist():
    plain = {name: _plain_json(value) for name, value in row.items()}
    out.write(json.dumps(plain, ensure_ascii=False, default=str).encode() + b'\n')


def _plain_json(value: object) -> object:
  """Returns a value for JSON: floats rounded to a float32's digits, infinity and NaN as null."""
  if isinstance(value, (list, tuple)):  # a list, or a pair of a map
    return [_plain_json(v) for v in value]
  if not isinstance(value, float):
    return value
  return float(f'{value:.9g}') if np.isfinite(value) else None


def write_tables(tables: Iterator[pa.Table], out: BinaryIO, suffix: str) -> None:
  """Writes tables to a file in the format of a result of `out_suffix`; delimited text has a header.

  UserError: the values of a later table do not fit the types of the first, or a text that is not
  UTF-8 cannot be written in this format.
  """
  write = schema = None
  with contextlib.ExitStack() as stack:
    for table in tables:
      if write is None:
        schema = table.schema
        if suffix in JSON_SUFFIXES:
          write = functools.partial(_write_json, out)
        elif suffix in PARQUET_SUFFIXES:
          write = stack.enter_context(pa.parquet.ParquetWriter(out, schema)).write_table
        else:
          options = pa.csv.WriteOptions(delimiter=TEXT_DELIMITERS[suffix])
          write = stack.enter_context(pa.csv.CSVWriter(out, schema, write_options=options)).write
      try:
        write(table.cast(schema))
      except pa.ArrowException as e:
        raise UserError(f'--columns: their values change their type: {e}') from None
      except UnicodeDecodeError:
        raise UserError('--columns: found bytes that are no UTF-8; wanted --out as .csv') from None
