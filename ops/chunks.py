"""Checks, writes and reads chunks, the parts in which a feature table is exported.

A chunk is a dict {column: array} of some of a table's features, ordered by the table's shards. It
has the `COLUMNS`. A chunk of a `RowStore` has more columns; any other chunk has a `checksum`. (A
chunk of a prepared pass is something else.)
"""

import os
import uuid
import zipfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NoReturn

import numpy as np
import tensorflow as tf

COLUMNS = {
  'key': np.int64,
  'show': np.float64,
  'click': np.float64,
  'delta_score': np.float64,
  'unseen_days': np.uint16,
  'age_days': np.uint16,
  'slot': np.uint16,
  'admitted': np.bool_,
}

Chunk = Mapping[str, np.ndarray]


def checksum(chunk: Chunk) -> int:
  """Returns the CRC-32 of a chunk's `COLUMNS` and their length."""
  crc = zlib.crc32(str(len(chunk['key'])).encode())
  for name in COLUMNS:
    crc = zlib.crc32(np.ascontiguousarray(chunk[name]).view(np.uint8), crc)
  return crc


def check(where: str, chunk: object) -> None:
  """Checks the dtypes, shapes and checksum of a chunk's `COLUMNS`.

  Args:
    where: names the chunk in messages.
  Raises:
    DataLossError: if any of these is wrong.
  """

  def fail(text: str) -> NoReturn:
    raise tf.errors.DataLossError(None, None, f'{where}: {text}')

  if not hasattr(chunk, 'keys'):
    fail(f'found {type(chunk).__name__}; wanted a dict of columns')
  for name in [*COLUMNS, 'checksum']:
    if name not in chunk:
      fail(f'{name}: found nothing; wanted a column')
  for name, dtype in COLUMNS.items():
    column = chunk[name]
    own_dtype = getattr(column, 'dtype', type(column).__name__)
    if own_dtype != dtype:
      fail(f'{name}: found dtype {own_dtype}; wanted {np.dtype(dtype)}')
    if column.ndim != 1 or len(column) != len(chunk['key']):
      wanted = np.size(chunk['key'])
      fail(f'{name}: found shape {list(column.shape)}; wanted [{wanted}], as many as key')
  computed, written = checksum(chunk), int(chunk['checksum'])
  if computed != written:
    fail(f'checksum: found {computed} for these columns; wanted {written}, as written with them')


def select(
  chunk: Chunk, kept: np.ndarray, table_slots: Mapping[str, Collection[int]]
) -> dict[str, np.ndarray]:
  """Returns a row store's chunk with only the features to keep.

  Args:
    chunk: a chunk; its column `factors_NAME` has rows only for admitted features of table NAME.
    kept: bool [n], true for the features to keep.
    table_slots: {name of a table: the ids of its slots}.
  """
  selected = {}
  for name, column in chunk.items():
    if name.startswith('factors_'):
      of_table = np.isin(chunk['slot'], list(table_slots[name.removeprefix('factors_')]))
      selected[name] = column[kept[chunk['admitted'] & of_table]]
    else:
      selected[name] = column[kept]
  return selected


def write(path: str | os.PathLike, chunks: Iterable[Chunk]) -> int:
  """Writes chunks to an .npz file, which appears once it is whole; returns how many features."""
  temporary = f'{path}.{uuid.uuid4().hex}.tmp'
  features = 0
  try:
    with open(temporary, 'wb') as file:
      with zipfile.ZipFile(file, 'w') as archive:
        for i, chunk in enumerate(chunks):
          features += len(chunk['key'])
          for name, column in chunk.items():
            with archive.open(f'{i:06d}.{name}.npy', 'w', force_zip64=True) as member:
              np.lib.format.write_array(member, np.asarray(column), allow_pickle=False)
      file.flush()
      os.fsync(file.fileno())
    os.replace(temporary, path)
  finally:
    if os.path.exists(temporary):
      os.remove(temporary)
  return features


def read(source: str | os.PathLike | Iterable[Chunk]) -> Iterable[Chunk]:
  """Returns an iterator over the chunks in the file `source`, which `write` wrote.

  If `source` is not a path but an iterable of chunks, returns it as it is.

  Raises:
    DataLossError: during the iteration, if the file is truncated or damaged.
    NotFoundError: during the iteration, if there is no such file.
  """
  return _read_file(source) if isinstance(source, (str, os.PathLike)) else source


def _read_file(path: str | os.PathLike) -> Iterator[Chunk]:
  try:
    with zipfile.ZipFile(path) as archive:
      members = {}
      for name in archive.namelist():
        number, _, column = name.removesuffix('.npy').partition('.')
        members.setdefault(number, {})[column] = name
      for number in sorted(members):
        chunk = {}
        for column, name in members[number].items():
          with archive.open(name) as member:
            chunk[column] = np.lib.format.read_array(member, allow_pickle=False)
        yield chunk
  except FileNotFoundError:
    raise tf.errors.NotFoundError(None, None, f'{path}: no such file') from None
  except (zipfile.BadZipFile, zlib.error, ValueError, EOFError, OSError, RuntimeError) as e:
    raise tf.errors.DataLossError(
      None, None, f'{path}: {e}; wanted a file that export_state wrote'
    ) from None
