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
from trainer.data.arrays import one_each
from trainer.data.conversion import format_of, raw_blocks
from trainer.data.file_system import first_line
from trainer.data.jsonl_format import json_text
from trainer.data.pass_files import files_of
from trainer.errors import UserError


def carried_tables(
  data: config.Data, passes: Sequence[tuple[str, int]], columns: Sequence[str], suffix: str
) -> Iterator[pa.Table]:
  """Yields `columns` of raw passes as tables of one schema, in order, a block of records at a time.

  A column may hold any values, of different types in each file. They become texts if `suffix` (of
  `out_suffix`) is of text, texts of JSON for JSON lines, and for Parquet values of one type, which
  are texts where there is no other. All passes are read once before the first table: UserError if
  one does not have as many records as predictions.

  `passes` has the path of each pass, and the number of its predictions.
  """
  is_typed, wanted = suffix in PARQUET_SUFFIXES, dict.fromkeys(columns, '--columns')

  def read() -> Iterator[dict[str, pa.Array]]:
    for path, predictions in passes:
      records = 0
      for file in files_of(path):
        is_tfrecord = format_of(data, file.path) == 'tfrecord'
        for block in (f() for f in raw_blocks(data, file, wanted, as_written=True)):
          if block.malformed:
            raise UserError(f'--columns: {block.malformed[0]._replace(path=file.path)}')
          arrays = {c: _plain(block.columns[c], is_tfrecord) for c in columns}
          yield {c: _of_json(array) for c, array in arrays.items()} if is_typed else arrays
          records += len(block.lines)
      if records != predictions:
        found = f'found {records:,} records for --columns beside {predictions:,} predictions'
        raise UserError(f'{path}: {found}; wanted one for each, in a log that does not change')

  types = dict.fromkeys(columns, pa.null())
  for arrays in read():
    types = {c: _common(t, arrays[c].type) if is_typed else t for c, t in types.items()}
  for arrays in read():
    if is_typed:
      arrays = {c: _cast(array, types[c]) for c, array in arrays.items()}
    elif suffix in JSON_SUFFIXES:
      texts = {c: pa.array(_json(array), pa.string()) for c, array in arrays.items()}
      arrays = {c: pa.ExtensionArray.from_storage(pa.json_(), t) for c, t in texts.items()}
    else:
      arrays = {c: _texts(array) for c, array in arrays.items()}
    yield pa.table(arrays)


def _plain(array: pa.Array, is_tfrecord: bool) -> pa.Array:
  """Returns a column without dictionaries; of TFRecord, values in place of lists of one value."""
  if is_tfrecord and pa.types.is_list(array.type):
    values, several = one_each(array)
    array = values if several is None or not several.any() else array
  if pa.types.is_dictionary(array.type):
    array = array.dictionary_decode()
  return array.view(pa.string()) if pa.types.is_binary(array.type) else array


def _common(one: pa.DataType, other: pa.DataType) -> pa.DataType:
  """Returns a type that can hold the values of both; string if there is no other."""
  schemas = [pa.schema([('', t)]) for t in (one, other)]
  try:
    return pa.unify_schemas(schemas, promote_options='permissive').field(0).type
  except pa.ArrowException:
    return pa.string()


def _cast(array: pa.Array, wanted: pa.DataType) -> pa.Array:
  try:
    return _texts(array) if pa.types.is_string(wanted) else array.cast(wanted)
  except pa.ArrowException as e:
    raise UserError(f'--columns: their values change their type: {e}; wanted .jsonl') from None


def _of_json(array: pa.Array) -> pa.Array:
  """Returns texts of JSON as values of one type; as texts if no type suits, or any is an object."""
  if array.type != pa.json_():
    return array
  texts = array.storage.to_pylist()
  with contextlib.suppress(pa.ArrowException, OverflowError, UnicodeEncodeError):
    if not any(text and '{' in text for text in texts):
      return pa.array([text and json.loads(text) for text in texts])
  return _texts(array)


def _texts(array: pa.Array) -> pa.Array:
  """Returns values as texts; as texts of JSON if Arrow cannot cast them."""
  with contextlib.suppress(pa.ArrowException):
    if array.type != pa.json_():
      return array.cast(pa.string())
  texts = [json.loads(t) if t and t.startswith('"') else t for t in _json(array)]
  return pa.array([t and t.encode(errors='backslashreplace').decode() for t in texts], pa.string())


def _json(array: pa.Array | pa.ChunkedArray) -> list[str | None]:
  """Returns values as texts of JSON, None for null; UserError for bytes that are no text."""
  if array.type == pa.json_():
    return array.cast(pa.string()).to_pylist()
  # As many digits as a float32 has; a float64 has them all.
  digits = 9 if pa.types.is_float32(getattr(array.type, 'value_type', array.type)) else 17
  try:
    values = array.to_pylist()
  except UnicodeDecodeError:
    raise UserError('--columns: found bytes that are no UTF-8; wanted --out as .csv') from None
  return [None if v is None else json_text(_finite(v, digits)) for v in values]


def _finite(value: object, digits: int) -> object:
  """Returns a value for JSON: floats with so many digits, infinity and NaN as null."""
  if isinstance(value, dict):
    return {str(name): _finite(v, digits) for name, v in value.items()}
  if isinstance(value, (list, tuple)):  # a list, or a pair of a map
    return [_finite(v, digits) for v in value]
  if not isinstance(value, float):
    return value
  return float(f'{value:.{digits}g}') if np.isfinite(value) else None


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
    tables: the copied columns, in the order of the predictions, of any size; None to copy none.
    predictions: batches [B] or [B, T].
    names: of the T columns of predictions. One that a copied column has becomes predicted_NAME.
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
  """Replaces the column `sample` of recommended items by the columns copied from the log.

  `tables` have the copied columns, a row for each sample of the log, in order. `items` have a row
  for each item; their first column, `sample`, is the index of the sample for which the item is
  recommended, ascending.
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

  A suffix begins with a letter, so scores.2024-01-31 has none.
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
  names = [json_text(name) for name in table.column_names]
  for row in zip(*map(_json, table.columns)):
    pairs = ', '.join(f'{name}: {text or "null"}' for name, text in zip(names, row))
    out.write(f'{{{pairs}}}\n'.encode())


def write_tables(tables: Iterator[pa.Table], out: BinaryIO, suffix: str) -> None:
  """Writes tables to a file in the format of a result of `out_suffix`; delimited text has a header.

  All tables have the columns of the first; UserError for a text that this format cannot have.
  """
  write = None
  with contextlib.ExitStack() as stack:
    for table in tables:
      if write is None:
        if suffix in JSON_SUFFIXES:
          write = functools.partial(_write_json, out)
        elif suffix in PARQUET_SUFFIXES:
          write = stack.enter_context(pa.parquet.ParquetWriter(out, table.schema)).write_table
        else:
          options = pa.csv.WriteOptions(delimiter=TEXT_DELIMITERS[suffix])
          writer = pa.csv.CSVWriter(out, table.schema, write_options=options)
          write = stack.enter_context(writer).write
      try:
        write(table)
      except pa.ArrowException as e:
        raise UserError(f'--columns: they cannot be written to --out: {first_line(e)}') from None
