"""The files of an LMDB store, and whether they are whole.

LMDB has no checksums, and ends its process on some kinds of damage. So each value carries a
checksum of its key and itself, and the store is read through once in a process of its own before
others open it: its keys must ascend, be as many as LMDB counts, and be found by a search.
"""

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
import zlib

import lmdb

from trainer.errors import UserError

# A store of another format reads as an empty one, and is not written.
VERSION = b'version of format 3'
_CHECKSUM_BYTES = 4
_MAP_BYTES = 1 << 40  # the largest size; only addresses are reserved, not memory or disk
_SECONDS_TO_WRITE = 600  # which another publisher may take
SECONDS_TO_CHECK = 60  # and for each _BYTES_A_SECOND one more: else a lock of it is never free
_BYTES_A_SECOND = 1 << 20
_NUMBERS = 'ENOSPC EDQUOT EFBIG EACCES EROFS EMFILE ENFILE ENOMEM'.split()
_OF_THE_MACHINE = tuple(os.strerror(getattr(errno, name)) for name in _NUMBERS) + (
  'MDB_READERS_FULL',
  'MDB_MAP_FULL',
  'already open in this process',
)


class Damaged(Exception):
  """A value is not the one that was written."""


class StoreFiles:
  """The open files of a store; `env` is the LMDB environment."""

  _file = -1

  def __init__(self, path: str, writable: bool = False):
    self.env = lmdb.open(
      path, map_size=_MAP_BYTES, readonly=not writable, create=writable, max_readers=1024
    )
    self._path, self._lock = (os.path.join(path, name) for name in ('data.mdb', 'lock.mdb'))
    self._file, self._locked = os.open(self._path, os.O_RDONLY), _inode(self._lock)
    self._bytes, self._is_stuck = 0, False  # which the file had at least
    self.had_version = False

  def are_replaced(self) -> bool:
    """Returns whether the directory now holds other files than those that are open."""
    return _inode(self._path) != os.fstat(self._file).st_ino

  def are_locked(self) -> bool:
    """Returns whether other processes meet the same lock file."""
    return _inode(self._lock) == self._locked

  def are_foreign(self) -> bool:
    """Returns whether a version with another format wrote the store."""
    with self.begin() as transaction:
      return transaction.get(VERSION) is None and transaction.stat()['entries'] > 0

  def are_cut(self) -> bool:
    """Returns whether the file has become shorter; LMDB's memory map would then end the process."""
    known = self._bytes  # first, because another thread may see the file grow
    size = os.fstat(self._file).st_size
    self._bytes = max(size, known)
    return size < known

  def begin(self, write: bool = False) -> lmdb.Transaction:
    """Begins a transaction; Damaged if the file is cut short or its lock never free."""
    if self.are_cut():
      raise Damaged('data.mdb is cut short')

    def try_lock() -> None:
      with contextlib.suppress(lmdb.Error):  # env.begin below raises it, too
        self.env.begin(write=write).abort()

    trial = threading.Thread(target=try_lock, daemon=True)
    trial.start()
    trial.join(_SECONDS_TO_WRITE if write else SECONDS_TO_CHECK)
    if trial.is_alive():
      self._is_stuck = True
      raise Damaged('its lock is never free')
    return self.env.begin(write=write)

  def close(self) -> None:
    if not self._is_stuck:  # else a thread still waits within
      self.env.close()
    os.close(self._file)
    self._file = -1

  def __del__(self):
    if self._file >= 0:
      os.close(self._file)


def _inode(path: str) -> int | None:
  with contextlib.suppress(FileNotFoundError):
    return os.stat(path).st_ino


def sealed(name: bytes, value: bytes) -> bytes:
  """Returns a value with the checksum of its key and itself."""
  return value + zlib.crc32(value, zlib.crc32(name)).to_bytes(_CHECKSUM_BYTES, 'little')


def unsealed(name: bytes, data: bytes | None) -> bytes | None:
  """Returns the value that `sealed` was given; Damaged if it has changed since."""
  if data is None:
    return None
  value = data[:-_CHECKSUM_BYTES]
  if sealed(name, value) != data:
    raise Damaged(f'the value of key {name.hex()} is not the one that was written')
  return value


def value_of(transaction: lmdb.Transaction, name: bytes) -> bytes | None:
  """Returns a key's value; None if there is none, as the keys before and after it prove."""
  if (data := transaction.get(name)) is None:
    with transaction.cursor() as cursor:
      after = cursor.item() if (found := cursor.set_range(name)) else None
      before = cursor.item() if (cursor.prev() if found else cursor.last()) else None
      for key, value in filter(None, (before, after)):
        unsealed(key, value)
      if before and before[0] >= name or after and after[0] <= name:
        raise Damaged(f'a search for key {name.hex()} does not find it')
  return unsealed(name, data)


def is_of_the_machine(error: object) -> bool:
  """Returns whether an error of LMDB, or its text, is one of a full disk or the like."""
  return any(text in str(error) for text in _OF_THE_MACHINE)


def check(path: str) -> None:
  """Checks a store in its own process; Damaged if it is not whole, UserError if none can tell."""
  program = f'import sys; sys.path[:] = {sys.path}; from {__name__} import main; main()'
  words = [sys.executable, '-c', program, path]
  patience = SECONDS_TO_CHECK + os.path.getsize(f'{path}/data.mdb') / _BYTES_A_SECOND
  try:
    done = subprocess.run(
      words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=patience
    )
  except subprocess.TimeoutExpired:
    raise Damaged(f'a process that read it waited for {patience:.0f} s') from None
  text = done.stderr.strip().rpartition('\n')[2]
  if done.returncode in (-signal.SIGKILL, -signal.SIGTERM) or is_of_the_machine(text):
    raise UserError(f'{path}: cannot be checked: {text or signal.Signals(-done.returncode).name}')
  if done.returncode < 0:
    raise Damaged(f'signal {-done.returncode} ended a process that read it')
  if done.returncode:
    raise Damaged(text)


def read_through(transaction: lmdb.Transaction) -> None:
  """Reads a whole store; Damaged or an error of LMDB if it is not whole, or the process ends."""
  with transaction.cursor() as cursor:
    if transaction.get(VERSION) is None:
      is_foreign = cursor.set_range(VERSION[:-1]) and cursor.key().startswith(VERSION[:-1])
      if transaction.stat()['entries'] and not is_foreign:
        raise Damaged('it has keys and no version')
      return
    count, before = 0, b''
    for name, data in cursor:
      if name <= before:
        raise Damaged(f'key {name.hex()} follows {before.hex()}')
      unsealed(name, data)
      if transaction.get(name) != data:  # the inner pages of the tree have no checksums
        raise Damaged(f'a search for key {name.hex()} does not find it')
      count, before = count + 1, name
    if count != (entries := transaction.stat()['entries']):
      raise Damaged(f'found {count} keys; wanted {entries}')


def main() -> None:
  """Checks the store that the command line names; ends with a line if it is not whole."""
  try:
    with lmdb.open(sys.argv[1], readonly=True, create=False, max_readers=1024) as env:
      with env.begin() as transaction:
        read_through(transaction)
  except (Damaged, lmdb.Error, OverflowError, MemoryError) as e:
    sys.exit(f'{type(e).__name__}: {e}')
