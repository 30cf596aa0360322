"""Writes that count as a whole or not at all: temporary name, fsync, rename, then one DONE marker.

A directory without DONE does not count, whatever lies in it. Everything is flushed to the disk
before DONE appears, so a crash or a power cut at any moment leaves the old directories as they
were.
"""

import contextlib
import fcntl
import io
import json
import os
import shutil
import time
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, TextIO

import numpy as np

from trainer.errors import DataLoss, UserError
from trainer.plain_data import Json, JsonObject

DONE = 'DONE'
MANIFEST = 'MANIFEST.json'
UNFINISHED = '.unfinished'  # ends the temporary name

Listed = Mapping[str, Mapping[str, int]]  # a manifest's files: relative path -> bytes, crc32


@contextlib.contextmanager
def exclusive(path: str, patience: float | None = None) -> Iterator[TextIO]:
  """Opens a file for reading and writing that one process at a time may hold; others wait.

  The operating system gives it free where its holder dies.

  Args:
    path: of the file.
    patience: seconds to wait; None: for ever.
  Raises:
    UserError: naming what the file says of its holder, who has held it for so long.
  """
  with open(path, 'a+', encoding='utf-8') as f:
    began = time.monotonic()
    while patience is not None:
      try:
        fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        break
      except BlockingIOError:
        if time.monotonic() - began > patience:
          f.seek(0)
          raise UserError(
            f'{path}: {f.read() or "another process"} has held it for {patience:.0f} s; wanted it '
            'ended first'
          ) from None
        time.sleep(0.05)  # between attempts
    else:
      fcntl.flock(f, fcntl.LOCK_EX)
    yield f


def _descriptor(path: str) -> int | None:
  """Returns the descriptor of this process that a path names, as /dev/stdout and links to it name
  1; None for any other path.
  """
  own = os.path.realpath('/proc/self/fd')
  for _ in range(40):  # as many links as Linux follows
    folder, name = os.path.split(path)
    folder = os.path.realpath(folder)
    if folder == own and name.isdigit():
      return int(name)
    path = os.path.join(folder, name)
    if not os.path.islink(path):
      return None
    path = os.path.join(folder, os.readlink(path))
  return None


@contextlib.contextmanager
def whole_file(path: str) -> Iterator[BinaryIO]:
  """A file to write, which bears the name `path` once the `with` ends without an error.

  A link is followed; a pipe or a device is written as it is. Where the path names a descriptor of
  this process, as /dev/stdout does, that descriptor is written to: opening it anew would truncate
  the file that a shell appends to with `>>`.
  """
  number = _descriptor(path)
  if number is not None:
    with os.fdopen(os.dup(number), 'wb') as f:
      yield f
    return
  if os.path.exists(path) and not os.path.isfile(path):
    with open(path, 'wb') as f:
      yield f
    return
  target = os.path.realpath(path)
  new = f'{target}.new{os.getpid()}'
  try:
    with open(new, 'wb') as f:
      yield f
      f.flush()
      os.fsync(f.fileno())
    os.replace(new, target)
  finally:
    with contextlib.suppress(OSError):
      os.remove(new)


def sync_directory(path: str) -> None:
  """Makes the names in a directory durable."""
  fd = os.open(path, os.O_RDONLY)
  try:
    os.fsync(fd)
  finally:
    os.close(fd)


def write_synced(path: str, data: bytes) -> None:
  """Writes bytes to a file and waits until they are on the disk."""
  with open(path, 'wb') as f:
    f.write(data)
    f.flush()
    os.fsync(f.fileno())


def to_json(value: Json) -> bytes:
  """Returns compact JSON, the same bytes for the same value."""
  return json.dumps(value, sort_keys=True, separators=(',', ':')).encode()


def to_npz(arrays: Mapping[str, np.ndarray]) -> bytes:
  """Returns an uncompressed .npz, the same bytes for the same arrays."""
  out = io.BytesIO()
  np.savez(out, **arrays)
  return out.getvalue()


def from_npz(data: bytes) -> dict[str, np.ndarray]:
  """Returns the arrays of a .npz by name."""
  with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
    return {name: arrays[name] for name in arrays.files}


class NpyWriter:
  """Writes a .npy file that grows along its first axis.

  Its header, which holds the number of rows and is equally long for any, is written again at the
  end.

  Args:
    path: of the file.
    dtype: of the array.
    row_shape: the array's shape without its first axis.

  Attributes:
    rows: written so far.
    header_bytes: the length of the header.
  """

  def __init__(self, path: str, dtype: np.dtype | str, row_shape: Sequence[int] = ()):
    self.dtype, self.row_shape, self.rows = np.dtype(dtype), tuple(row_shape), 0
    self._file = open(path, 'wb')
    self.header_bytes = self._file.write(self._header())

  def _header(self) -> bytes:
    out = io.BytesIO()
    shape = (self.rows, *self.row_shape)
    fields = {'descr': self.dtype.str, 'fortran_order': False, 'shape': shape}
    np.lib.format.write_array_header_1_0(out, fields)
    return out.getvalue()

  def append(self, array: np.ndarray) -> memoryview:
    """Writes rows; returns their bytes.

    Args:
      array: [n, …] of the row shape; it is cast to the dtype.
    """
    array = np.ascontiguousarray(array, self.dtype).reshape(-1, *self.row_shape)
    data = memoryview(array.reshape(-1).view(np.uint8))
    self._file.write(data)
    self.rows += len(array)
    return data

  def close(self) -> bytes:
    """Completes the file on the disk; returns its header."""
    header = self._header()
    self._file.seek(0)
    self._file.write(header)
    self._file.flush()
    os.fsync(self._file.fileno())
    self._file.close()
    return header


def crc32_of(path: str) -> int:
  """Returns the CRC-32 of a file's bytes, read 4 MiB at a time."""
  with open(path, 'rb') as f:
    return crc32_of_stream(f)


def crc32_of_stream(stream: BinaryIO, crc: int = 0) -> int:
  """Returns the CRC-32 of what a stream still holds, behind bytes whose CRC-32 is `crc`."""
  while data := stream.read(4 << 20):
    crc = zlib.crc32(data, crc)
  return crc


def entries(folder: str, unchecked: Collection[str] = ()) -> dict[str, dict[str, int]]:
  """Returns what a manifest says of a folder's files: relative path -> size and checksum.

  Args:
    folder: to walk.
    unchecked: ends of names whose checksums are left out.
  """
  found = {}
  for base, _, names in os.walk(folder):
    for name in names:
      path = os.path.join(base, name)
      found[os.path.relpath(path, folder)] = entry = {'bytes': os.path.getsize(path)}
      if not name.endswith(tuple(unchecked)):
        entry['crc32'] = crc32_of(path)
  return found


def publish(unfinished: str, final: str, manifest: Mapping[str, Json]) -> None:
  """Gives a directory its final name and marks it DONE.

  Process 0 calls it once everything in the directory is written and synced.

  Args:
    unfinished: the directory under its temporary name.
    final: its final name; whatever unfinished thing lies there is removed.
    manifest: becomes MANIFEST.json, whose checksum DONE holds.
  """
  data = to_json(manifest)
  write_synced(os.path.join(unfinished, MANIFEST), data)
  for folder, _, _ in os.walk(unfinished):
    sync_directory(folder)
  shutil.rmtree(final, ignore_errors=True)
  os.rename(unfinished, final)
  sync_directory(os.path.dirname(final))
  marker = os.path.join(final, DONE)
  write_synced(marker + UNFINISHED, to_json({'manifest_crc32': zlib.crc32(data)}))
  os.rename(marker + UNFINISHED, marker)
  sync_directory(final)


def size_of(path: str) -> int:
  """Returns the bytes of a file, or of all files below a directory."""
  if os.path.isfile(path):
    return os.path.getsize(path)
  size = 0
  for folder, _, names in os.walk(path):
    for name in names:
      with contextlib.suppress(FileNotFoundError):  # it may be removed meanwhile
        size += os.path.getsize(os.path.join(folder, name))
  return size


def is_done(path: str) -> bool:
  """Returns whether a directory counts."""
  return os.path.isfile(os.path.join(path, DONE))


def read_manifest(path: str) -> JsonObject:
  """Returns the MANIFEST.json of a directory that is DONE.

  Raises:
    DataLoss: naming the file that is missing or damaged.
  """

  def load(name: str, crc: int | None = None) -> Any:
    file = os.path.join(path, name)
    try:
      with open(file, 'rb') as f:
        data = f.read()
      if crc is not None and zlib.crc32(data) != crc:
        raise DataLoss(f'{file}: its checksum is {zlib.crc32(data):08x}; wanted {crc:08x}')
      value = json.loads(data)
      return value if crc is not None else int(value['manifest_crc32'])
    except FileNotFoundError:
      raise DataLoss(f'{file}: is missing; the directory does not count') from None
    except (ValueError, KeyError, TypeError):
      raise DataLoss(f'{file}: is damaged; found {data[:40]!r}') from None

  return load(MANIFEST, load(DONE))


def check_listed(path: str, listed: Listed) -> None:
  """Checks that a directory holds exactly its manifest's files, each of its size.

  Args:
    path: of the directory.
    listed: the manifest's files.
  Raises:
    DataLoss: naming the first file that is missing, cut short or foreign.
  """
  found = {
    os.path.relpath(os.path.join(folder, name), path)
    for folder, _, names in os.walk(path)
    for name in names
  }
  for name in sorted(listed.keys() - found):
    raise DataLoss(f'{os.path.join(path, name)}: is missing')
  for name in sorted(found - listed.keys() - {DONE, MANIFEST}):
    raise DataLoss(
      f'{os.path.join(path, name)}: is not of this directory; its {MANIFEST} does not list it'
    )
  for name, entry in sorted(listed.items()):
    size = os.path.getsize(os.path.join(path, name))
    if size != entry['bytes']:
      raise DataLoss(f'{os.path.join(path, name)}: has {size} bytes; wanted {entry["bytes"]}')


def check_crc32(path: str, name: str, listed: Listed) -> None:
  """Checks one of the manifest's files, which may be larger than memory.

  Raises:
    DataLoss: where its bytes are not those that were written.
  """
  file = os.path.join(path, name)
  _compare(file, crc32_of(file), listed[name]['crc32'])


def read_checked(path: str, name: str, listed: Listed) -> bytes:
  """Returns the bytes of one of the manifest's files.

  Raises:
    DataLoss: where they are not those that were written.
  """
  file = os.path.join(path, name)
  with open(file, 'rb') as f:
    data = f.read()
  _compare(file, zlib.crc32(data), listed[name]['crc32'])
  return data


def _compare(file: str, found: int, wanted: int) -> None:
  if found != wanted:
    raise DataLoss(f'{file}: its checksum is {found:08x}; wanted {wanted:08x}')


def remove(path: str) -> None:
  """Removes a directory so that it counts at no moment from here on: DONE goes first."""
  with contextlib.suppress(FileNotFoundError):
    os.remove(os.path.join(path, DONE))
  shutil.rmtree(path, ignore_errors=True)
