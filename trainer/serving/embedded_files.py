"""The open files of an LMDB store."""

import contextlib
import os
import threading

import lmdb

from trainer.serving.embedded_check import SECONDS_TO_CHECK, VERSION, Damaged

_MAP_BYTES = 1 << 40  # the largest size; only addresses are reserved, not memory or disk
_SECONDS_TO_WRITE = 600  # which another publisher may take


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
