"""Helpers for arrays of NumPy and Arrow: lists one after another, sorted keys, nested columns."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
  """Returns range(starts[i], starts[i] + counts[i]) for every i, joined; int64 [Σ counts]."""
  ends = np.cumsum(counts)
  return np.repeat(starts - ends + counts, counts) + np.arange(ends[-1] if len(ends) else 0)


def offsets_of(counts: np.ndarray) -> np.ndarray:
  """Returns the offsets of n lists of these lengths, one after another, int32 [n + 1]."""
  return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def places(keys: np.ndarray, wanted: np.ndarray) -> np.ndarray:
  """Returns the index of each wanted key in ascending `keys`; int64, −1 where a key is absent."""
  if not len(keys):
    return np.full(wanted.shape, -1)
  at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
  return np.where(keys[at] == wanted, at, -1)


def is_list(t: pa.DataType) -> bool:
  return pa.types.is_list(t) or pa.types.is_large_list(t) or pa.types.is_fixed_size_list(t)


def is_nested(t: pa.DataType) -> bool:
  """Returns whether a record may hold several values: lists, maps, or a union with these."""
  return is_list(t) or pa.types.is_map(t) or pa.types.is_union(t)


def of_union(union: pa.UnionArray) -> tuple[list[pa.Array], np.ndarray]:
  """Returns the children of a dense union, and each record's place in them joined, int64 [n]."""
  children = [union.field(i) for i in range(union.type.num_fields)]
  lengths = np.array([len(child) for child in children])
  starts = np.cumsum(lengths) - lengths
  return children, starts[union.type_codes.to_numpy()] + union.offsets.to_numpy()


def one_each(array: pa.Array) -> tuple[pa.Array, np.ndarray | None]:
  """Unpacks a column of lists that should hold one value each; returns other columns as they are.

  Returns the values [n], null where a list has none or several; and bool [n], true where it has
  several, or a record holds features with values. The latter is None if no record does.
  """
  if pa.types.is_union(array.type):
    children, places = of_union(array)
    values, several = zip(*map(one_each, children))
    several = [np.zeros([len(v)], bool) if s is None else s for v, s in zip(values, several)]
    values = pa.concat_arrays([v.cast(pa.string()) for v in values])
    return values.take(pa.array(places)), np.concatenate(several)[places]
  if pa.types.is_map(array.type):
    return pa.nulls(len(array), pa.string()), array.is_valid().to_numpy(zero_copy_only=False)
  if not is_list(array.type):
    return array, None
  counts = pc.list_value_length(array).fill_null(0).to_numpy()
  if (counts == 1).all():
    return array.flatten(), None
  first = pa.array(np.cumsum(counts) - counts, mask=counts != 1)
  return array.flatten().take(first), counts > 1


def column_at(table: pa.Table | pa.RecordBatch, name: str) -> pa.Array:
  """Returns the column `name`; if there is none, that of a path as ctx.os, in structs and maps."""
  if name in table.schema.names:
    column = table.column(name)
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
  head, _, rest = name.partition('.')
  inner = column_at(table, head)
  if pa.types.is_map(inner.type):
    return pc.map_lookup(inner, pa.scalar(rest, inner.type.key_type), 'first')
  fields = pa.table(
    [pc.struct_field(inner, f.name) for f in inner.type], [f.name for f in inner.type]
  )
  return column_at(fields, rest)


def has_column(fields: pa.Schema | pa.DataType, name: str) -> bool:
  """Returns whether `column_at` would find a column by this name or path."""
  names = [field.name for field in fields]
  head, dot, rest = name.partition('.')
  if name in names or not dot or head not in names:
    return name in names
  inner = fields.field(names.index(head)).type
  return pa.types.is_map(inner) or pa.types.is_struct(inner) and has_column(inner, rest)


def text_buffers(texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
  """Returns the joined bytes of a string array, uint8, and each text's offset, int32 [n + 1]."""
  n = len(texts)
  _, offsets, data = texts.buffers()
  if not n or offsets is None:
    return np.zeros([0], np.uint8), np.zeros([n + 1], np.int32)
  offsets = np.frombuffer(offsets, np.int32, n + 1, 4 * texts.offset)
  first, last = int(offsets[0]), int(offsets[-1])
  data = np.zeros([0], np.uint8) if last == first else np.frombuffer(data, np.uint8, last)[first:]
  return data, offsets - offsets[0]


def texts_from(data: bytes | np.ndarray, offsets: np.ndarray) -> pa.Array:
  """Returns a string array from the results of `text_buffers`; the bytes need not be UTF-8."""
  buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
  return pa.Array.from_buffers(pa.string(), len(offsets) - 1, buffers)
