"""Reads Parquet files.

Slots may be strings, integers, booleans, decimals, dates, lists of these, or maps from these to
numbers; columns may be dictionary-encoded.
"""

import functools
from collections.abc import Callable, Collection, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet

from trainer import config
from trainer.data.arrays import column_at, has_column, offsets_of
from trainer.data.block import Block
from trainer.data.file_system import WHOLE, Part, open_table
from trainer.data.schema import check_columns
from trainer.errors import UserError

BLOCK_ROWS = 65536
# In bytes. A column whose dictionary is not larger is read as a dictionary, so that each text is
# hashed once. (When a dictionary reaches about 1 MiB, writers go on with plain texts.)
SMALL_DICTIONARY = 1 << 18


def _plain_type(t: pa.DataType) -> pa.DataType:
  """Returns a type without views; raises ArrowNotImplementedError for a type that no log has."""
  types = pa.types
  if types.is_string_view(t) or types.is_binary_view(t):
    return pa.string() if types.is_string_view(t) else pa.binary()
  if types.is_decimal32(t) or types.is_decimal64(t):
    return pa.decimal128(t.precision, t.scale)
  if types.is_list(t) or types.is_large_list(t):
    inner = t.value_field.with_type(_plain_type(t.value_type))
    return (pa.list_ if types.is_list(t) else pa.large_list)(inner)
  if types.is_struct(t) and t.num_fields:
    return pa.struct([field.with_type(_plain_type(field.type)) for field in t])
  if types.is_map(t):
    key, item = (f.with_type(_plain_type(f.type)) for f in (t.key_field, t.item_field))
    return pa.map_(key, item, t.keys_sorted)
  if types.is_nested(t) and not types.is_fixed_size_list(t) or types.is_interval(t):
    raise pa.ArrowNotImplementedError
  if isinstance(t, pa.BaseExtensionType):
    raise pa.ArrowNotImplementedError
  return t


def plain(array: pa.Array, column: str) -> pa.Array:
  """Returns an array without run ends and views; a UserError for types that no log has."""
  t = array.type
  try:
    if pa.types.is_run_end_encoded(t):
      runs = np.searchsorted(array.run_ends, array.offset + np.arange(len(array)), side='right')
      return plain(array.values, column).take(pa.array(runs))
    if pa.types.is_dictionary(t):
      values = plain(array.dictionary, column)
      return pa.DictionaryArray.from_arrays(array.indices, values)
    if pa.types.is_list_view(t) or pa.types.is_large_list_view(t):
      counts = pc.list_value_length(array).fill_null(0).to_numpy()
      values, mask = plain(array.flatten(), column), array.is_null()
      return pa.ListArray.from_arrays(pa.array(offsets_of(counts)), values, mask=mask)
    kind = _plain_type(t)
    return array if kind == t else array.cast(kind)
  except pa.ArrowNotImplementedError:
    wanted = 'strings, numbers, booleans, dates, times, or lists or maps of these'
    raise UserError(f"column '{column}': found values of type {t}; wanted {wanted}") from None


def record_block(
  batch: pa.RecordBatch | pa.Table, first_row: int, wanted: Collection[str]
) -> Block:
  """Converts Arrow columns to a Block; its first record has the number `first_row` in the file."""

  def text(i: int) -> str:
    try:
      return str(batch.slice(i, 1).to_pylist()[0])
    except UnicodeDecodeError:  # a string of bytes that are no text
      return 'a record whose strings are not UTF-8'

  columns = {name: plain(column_at(batch, name), name) for name in wanted}
  return Block(columns, first_row + np.arange(batch.num_rows), text, [])


def known_columns(schema: pa.Schema, wanted: Collection[str]) -> list[str]:
  """Returns the file's columns, and the `wanted` paths into nested columns, such as `device.os`."""
  return [*schema.names, *(w for w in wanted if w not in schema.names and has_column(schema, w))]


def to_read(schema: pa.Schema, wanted: Collection[str]) -> list[str]:
  """Returns the file's columns that hold the wanted ones: `device.os`, or else `device`."""
  return list(dict.fromkeys(w if w in schema.names else w.partition('.')[0] for w in wanted))


def table_blocks(table: pa.Table, wanted: Collection[str]) -> Iterator[Callable[[], Block]]:
  """Yields functions that return the blocks of a table in memory, as `blocks` does."""
  for row in range(0, table.num_rows, BLOCK_ROWS):
    yield functools.partial(record_block, table.slice(row, BLOCK_ROWS), row + 1, list(wanted))


def num_rows(path: str) -> int:
  """Returns the number of rows of a file; raises BadPass if it is no Parquet file."""
  with open_table(path, 'a Parquet') as f:
    return pa.parquet.read_metadata(f).num_rows


def _of_few_texts(metadata: pa.parquet.FileMetaData, names: Collection[str]) -> list[str]:
  """Returns the columns of strings that have a small dictionary in every row group."""
  groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]

  def is_small(i: int) -> bool:
    return all(
      c.has_dictionary_page and c.data_page_offset - c.dictionary_page_offset <= SMALL_DICTIONARY
      for c in (group.column(i) for group in groups)
    )

  def is_text(column: pa.parquet.ColumnSchema) -> bool:
    return column.physical_type == 'BYTE_ARRAY' and column.logical_type.type in ('STRING', 'NONE')

  columns = map(metadata.schema.column, range(metadata.num_columns))
  return [c.path for i, c in enumerate(columns) if c.path in names and is_text(c) and is_small(i)]


def blocks(
  path: str, data: config.Data, wanted: dict[str, str], part: Part = WHOLE
) -> Iterator[Callable[[], Block]]:
  """Reads a Parquet file in blocks as `csv_format.blocks` does; lines are records, from 1.

  Only row groups that contain rows of the part are read.
  """
  with open_table(path, 'a Parquet') as f:
    metadata = pa.parquet.read_metadata(f)
    few = _of_few_texts(metadata, wanted)
    options = {'read_dictionary': few, 'page_checksum_verification': True}
    table = pa.parquet.ParquetFile(f, metadata=metadata, **options)
    schema = table.schema_arrow
    check_columns(path, known_columns(schema, wanted), wanted, data.made)
    groups = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    ends = np.cumsum(groups)
    end = metadata.num_rows if part.end is None else part.end
    mine = [i for i in range(len(groups)) if ends[i] > part.start and ends[i] - groups[i] < end]
    row = int(ends[mine[0]]) - groups[mine[0]] if mine else 0
    for batch in table.iter_batches(BLOCK_ROWS, row_groups=mine, columns=to_read(schema, wanted)):
      skipped = max(0, part.start - row)
      own = batch.slice(skipped, max(0, min(batch.num_rows, end - row) - skipped))
      if own.num_rows:
        yield functools.partial(record_block, own, row + skipped + 1, list(wanted))
      row += batch.num_rows
