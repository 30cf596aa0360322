"""Durable files: a write takes effect as a whole or not at all.

A directory is written under a temporary name, synced and renamed; then it gets a DONE marker.
Readers ignore a directory without DONE. A crash or a power cut at any moment leaves the old
directories intact.
"""

import concurrent.futures
import contextlib
import fcntl
import io
import json
import math
import os
import shutil
import stat
import tempfile
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import BinaryIO, TextIO, TypeVar

import numpy as np
from absl import logging

from trainer.errors import DataLoss, UserError, is_exhausted, plain_errors
from trainer.plain_data import Json, JsonObject

DONE = 'DONE'
MANIFEST = 'MANIFEST.json'
UNFINISHED = '.unfinished'  # the end of temporary names
_TEMPORARY = 'ctr-trainer-'  # the beginning of the names of temporary directories
_YOUNG_SECONDS = 60.0  # a younger directory may have an owner that does not hold it yet

_PATIENCE = 30  # seconds for others to give back what the machine has no more of

Value = TypeVar('Value')
Listed = Mapping[str, Mapping[str, int]]  # a manifest's files: relative path -> bytes, crc32


def patient(action: Callable[..., Value], *args: object, **settings: object) -> Value:
  """Calls `action`, again and again for a while if the machine is out of descriptors or memory."""
  for left in range(_PATIENCE, 0, -1):
    try:
      return action(*args, **settings)
    except OSError as e:
      if not is_exhausted(e):
        raise
      if left == _PATIENCE:
        logging.warning('%s; trying again for %d s', e, _PATIENCE)
      time.sleep(1)
  return action(*args, **settings)


@contextlib.contextmanager
def exclusive(path: str, patience: float = math.inf) -> Iterator[TextIO]:
  """Opens a file that only one process at a time may hold; others wait for `patience` seconds.

  The operating system releases the file when its holder dies. The holder writes a text into it that
  names the holder; the UserError of other processes quotes it.
  """
  with patient(open, path, 'a+', encoding='utf-8') as f:
    began = time.monotonic()
    while True:
      try:
        fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        break
      except BlockingIOError:
        if time.monotonic() - began > patience:
          f.seek(0)
          holds = f'has held it for {patience:.0f} s' if patience else 'holds it'
          raise UserError(
            f'{path}: {f.read() or "another process"} {holds}; wanted that process to end first'
          ) from None
        time.sleep(0.05)  # between attempts
    yield f


@contextlib.contextmanager
def temporary_directory(folder: str | None = None) -> Iterator[str]:
  """Yields a new directory that only this user can read, and removes it at the end.

  A killed process cannot remove its directory, so the next call does: one that nobody holds a lock
  of, and only in this machine's directory for temporary files, the default `folder`.
  """
  if folder is None:
    _remove_abandoned(tempfile.gettempdir())
  path = tempfile.mkdtemp('', _TEMPORARY, folder)
  held = os.open(path, os.O_RDONLY)
  try:
    with contextlib.suppress(OSError):  # some file systems lock no directories
      fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    yield path
  finally:
    os.close(held)
    shutil.rmtree(path, ignore_errors=True)


def _remove_abandoned(folder: str) -> None:
  """Removes the temporary directories of this user whose process was killed."""
  with contextlib.suppress(OSError), os.scandir(folder) as found:
    for entry in found:
      if not entry.name.startswith(_TEMPORARY):
        continue
      with contextlib.suppress(OSError):  # another process holds, owns or has removed it
        held = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
          info = os.fstat(held)
          if info.st_uid == os.geteuid() and time.time() - info.st_mtime > _YOUNG_SECONDS:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(entry.path, ignore_errors=True)
        finally:
          os.close(held)


def read_small(path: str, most_bytes: int = 16 << 20) -> bytes:
  """Returns the content of a small file that a user named, such as a config; it never waits.

  UserError: the path is a device, a pipe or a socket, or the file has more than `most_bytes`.
  """
  with patient(open, path, 'rb', opener=lambda p, flags: os.open(p, flags | os.O_NONBLOCK)) as f:
    if not stat.S_ISREG(os.fstat(f.fileno()).st_mode):
      raise UserError(f'{path}: is a device, a pipe or a socket; wanted a file')
    if len(data := f.read(most_bytes + 1)) > most_bytes:
      raise UserError(f'{path}: has more than {most_bytes:,} bytes; wanted a small file')
  return data


def secret(path: str | None, flag: str) -> str | None:
  """Returns the token or password in a file, or None without a path; a UserError if none."""
  if path is None:
    return None
  with plain_errors(flag):
    data = read_small(path, 64 << 10)
  try:
    text = data.decode().strip()
  except UnicodeDecodeError:
    raise UserError(f'{flag} {path}: is not UTF-8; wanted a text') from None
  if not text:
    raise UserError(f'{flag} {path}: is empty; wanted a text')
  return text


def _descriptor(path: str) -> int | None:
  """Returns the descriptor that a path such as /dev/stdout names; None for other paths."""
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
  """Opens a file to write; it appears at `path` when the `with` ends without an error.

  Links are followed. Pipes, devices and this process's own descriptors, such as /dev/stdout, are
  written in place; the latter are duplicated, because reopening one would truncate a file that the
  shell opened with `>>`.
  """
  number = _descriptor(path)
  if number is not None or (os.path.exists(path) and not os.path.isfile(path)):
    with patient(open, path if number is None else os.dup(number), 'wb') as f:
      yield f
    return
  target = os.path.realpath(path)
  new = f'{target}.new{os.getpid()}'
  try:
    with patient(open, new, 'wb') as f:
      yield f
      f.flush()
      os.fsync(f.fileno())
    os.replace(new, target)
  except OSError as e:
    e.filename = path if e.filename == new else e.filename  # the name that the caller knows
    raise
  finally:
    with contextlib.suppress(OSError):
      os.remove(new)


def sync_directory(path: str) -> None:
  """Syncs a directory, so that its new and renamed files survive a crash; or syncs a file."""
  fd = patient(os.open, path, os.O_RDONLY)
  try:
    os.fsync(fd)
  finally:
    os.close(fd)


def sync(paths: Iterable[str]) -> None:
  """Syncs files and directories in parallel, which takes hardly longer than syncing one."""
  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    list(pool.map(sync_directory, paths))


def write(path: str, data: bytes) -> None:
  """Writes bytes to a file without syncing it; `sync` or `publish` does that later."""
  with patient(open, path, 'wb') as f:
    f.write(data)


def write_synced(path: str, data: bytes) -> None:
  """Writes bytes to a file and waits until they are on the disk."""
  write(path, data)
  sync_directory(path)


def to_json(value: Json) -> bytes:
  """Returns compact JSON; equal values give equal bytes."""
  return json.dumps(value, sort_keys=True, separators=(',', ':')).encode()


def to_npz(arrays: Mapping[str, np.ndarray]) -> bytes:
  """Returns an uncompressed .npz; equal arrays give equal bytes."""
  out = io.BytesIO()
  np.savez(out, **arrays)
  return out.getvalue()


def from_npz(data: bytes) -> dict[str, np.ndarray]:
  """Returns the arrays in a .npz, keyed by name."""
  with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
    return {name: arrays[name] for name in arrays.files}


class NpyWriter:
  """Writes a .npy file that grows along its first axis; `close` writes the final shape."""

  def __init__(self, path: str, dtype: np.dtype | str, row_shape: Sequence[int] = ()):
    self.dtype, self.row_shape, self.rows = np.dtype(dtype), tuple(row_shape), 0
    self._file = patient(open, path, 'wb')
    self._file.write(self._header())

  def _header(self) -> bytes:
    out = io.BytesIO()
    shape = (self.rows, *self.row_shape)
    fields = {'descr': self.dtype.str, 'fortran_order': False, 'shape': shape}
    np.lib.format.write_array_header_1_0(out, fields)
    return out.getvalue()

  def append(self, array: np.ndarray) -> memoryview:
    """Writes rows, cast to the file's dtype; returns the bytes that were written."""
    array = np.ascontiguousarray(array, self.dtype).reshape(-1, *self.row_shape)
    data = memoryview(array.reshape(-1).view(np.uint8))
    self._file.write(data)
    self.rows += len(array)
    return data

  def close(self) -> bytes:
    """Completes and syncs the file; returns its header."""
    header = self._header()  # as long as the first one
    with self._file as f:
      f.seek(0)
      f.write(header)
      f.flush()
      os.fsync(f.fileno())
    return header


def crc32_of(path: str) -> int:
  with patient(open, path, 'rb') as f:
    return crc32_of_stream(f)


def crc32_of_stream(stream: BinaryIO, crc: int = 0) -> int:
  """Returns the CRC-32 of a whole stream; `crc` is the CRC-32 of bytes already read from it."""
  while data := stream.read(4 << 20):
    crc = zlib.crc32(data, crc)
  return crc


def entries(folder: str, unchecked: Collection[str] = ()) -> dict[str, dict[str, int]]:
  """Returns a manifest's entries for all files below a folder, {relative path: {bytes, crc32}}.

  Files whose names end in one of `unchecked` get no crc32.
  """
  listed = {}
  for name in _names_below(folder):
    path = os.path.join(folder, name)
    listed[name] = {'bytes': os.path.getsize(path)}
    if not name.endswith(tuple(unchecked)):
      listed[name]['crc32'] = crc32_of(path)
  return listed


def _names_below(folder: str) -> list[str]:
  return [
    os.path.relpath(os.path.join(base, name), folder)
    for base, _, names in os.walk(folder)
    for name in names
  ]


def publish(unfinished: str, final: str, manifest: Mapping[str, Json]) -> None:
  """Gives the directory `unfinished` its final name and marks it DONE.

  Only process 0 calls this, once all others have written and synced their files. A directory of the
  final name, which must not be DONE, is removed first. DONE holds the checksum of MANIFEST.json.
  """
  data = to_json(manifest)
  write(os.path.join(unfinished, MANIFEST), data)
  sync(
    os.path.join(folder, name)
    for folder, _, names in os.walk(unfinished)
    for name in (*names, os.curdir)
  )
  shutil.rmtree(final, ignore_errors=True)
  os.rename(unfinished, final)
  marker = os.path.join(final, DONE)
  write_synced(marker + UNFINISHED, to_json({'manifest_crc32': zlib.crc32(data)}))
  os.rename(marker + UNFINISHED, marker)
  sync([final, os.path.dirname(final)])


def link_or_copy(source: str, target: str) -> None:
  """Gives a file a second name; makes a copy where the file system has no hard links."""
  try:
    os.link(source, target)
  except OSError:
    shutil.copyfile(source, target)


def size_of(path: str) -> int:
  """Returns the size in bytes of a file, or of all files below a directory, each counted once.

  Checkpoints share files, which then have several names.
  """
  if os.path.isfile(path):
    return os.path.getsize(path)
  sizes = {}
  for name in _names_below(path):
    with contextlib.suppress(FileNotFoundError):  # it may be removed meanwhile
      found = os.stat(os.path.join(path, name))
      sizes[found.st_dev, found.st_ino] = found.st_size
  return sum(sizes.values())


def is_done(path: str) -> bool:
  return os.path.isfile(os.path.join(path, DONE))


def read_manifest(path: str) -> JsonObject:
  """Returns a directory's MANIFEST.json; DataLoss if it is not DONE, or is damaged."""
  file = os.path.join(path, DONE)
  try:
    with patient(open, file, 'rb') as f:
      crc = int(json.load(f)['manifest_crc32'])
    file = os.path.join(path, MANIFEST)
    return json.loads(_read(file, crc))
  except FileNotFoundError:
    raise DataLoss(f'{file}: is missing; the directory does not count') from None
  except (ValueError, KeyError, TypeError):
    raise DataLoss(f'{file}: is damaged') from None


def checksum(path: str) -> int:
  """Returns the checksum of a directory's manifest; directories with other contents have others."""
  return crc32_of(os.path.join(path, MANIFEST))


def check_listed(path: str, listed: Listed) -> None:
  """Raises DataLoss if a directory has other files than its manifest, or of other sizes."""
  present = set(_names_below(path))
  for name in sorted(present - listed.keys() - {DONE, MANIFEST}):
    raise DataLoss(f'{os.path.join(path, name)}: the {MANIFEST} of its directory does not list it')
  for name, entry in sorted(listed.items()):
    file = os.path.join(path, name)
    if name not in present:
      raise DataLoss(f'{file}: is missing')
    if os.path.getsize(file) != entry['bytes']:
      raise DataLoss(f'{file}: has {os.path.getsize(file)} bytes; wanted {entry["bytes"]}')


def check_crc32(path: str, name: str, listed: Listed) -> None:
  """Raises DataLoss if a file, which may be large, has another checksum than in the manifest."""
  file = os.path.join(path, name)
  _compare(file, crc32_of(file), listed[name]['crc32'])


def read_checked(path: str, name: str, listed: Listed) -> bytes:
  """Returns the content of a file; DataLoss if it has another checksum than in the manifest."""
  return _read(os.path.join(path, name), listed[name]['crc32'])


def _read(file: str, crc: int) -> bytes:
  with patient(open, file, 'rb') as f:
    data = f.read()
  _compare(file, zlib.crc32(data), crc)
  return data


def _compare(file: str, crc: int, wanted: int) -> None:
  if crc != wanted:
    raise DataLoss(f'{file}: its checksum is {crc:08x}; wanted {wanted:08x}')


def remove(path: str) -> None:
  """Removes a directory, DONE first, so that readers ignore a half-removed directory."""
  with contextlib.suppress(FileNotFoundError):
    os.remove(os.path.join(path, DONE))
  shutil.rmtree(path, ignore_errors=True)
