"""Keeps one version of a model in an LMDB database, which one process writes and many read.

    DIRECTORY/data.mdb  lock.mdb
    DIRECTORY/damaged    a reader found damage and says which; the publisher writes a new store
    logical shard (2 bytes), key (8 bytes, big-endian) -> a row (trainer.serving.versioned_store)
    'version of format 3'  -> Version as JSON
    'config'               -> the resolved config
    'dense'                -> the dense variables, .npz
    'changed to version N' -> of the last versions, except bases: the version before and this one,
                              each as JSON and a line end, then the keys of all rows that differ;
                              absent if too many

Each value ends in a checksum, and a store is read through before it is opened (embedded_files.py).
A damaged store is refused; the publisher then makes new files, from the exports, and a reader goes
on with the files that it has open until the new ones have a version.

Rows have the same order as in exports, so those of a base can be appended. One write transaction
applies all exports of a new version. A reader sees the version that the store held when its
transaction began. It keeps the rows that it has read in a row store in memory, where a graph
looks up those of a request at once. A new version takes them over, and reads the changed ones.
"""

import collections
import contextlib
import itertools
import os
import threading
import time
from collections.abc import Iterator, Sequence

import lmdb
import numpy as np
from absl import logging

from ops.row_store import RowStore
from ops.sharding import shard_of
from trainer.errors import DataLoss, UserError
from trainer.files import from_npz, to_npz
from trainer.serving.embedded_files import (
  VERSION,
  Damaged,
  StoreFiles,
  check,
  is_of_the_machine,
  read_through,
  sealed,
  unsealed,
  value_of,
)
from trainer.serving.processes import MARKER
from trainer.serving.served_rows import ServedRows
from trainer.serving.versioned_store import (
  LookedUpRows,
  Overtaken,
  Version,
  VersionedStore,
  View,
  decode,
  encode,
  plain,
  without_show_click,
)
from trainer.storage.chain import RowExport, Rows

_KEY = np.dtype([('shard', '>u2'), ('key', '>i8')])
_CONFIG, _DENSE, _CHANGED_TO = b'config', b'dense', b'changed to version '
_READ_AT_ONCE = 4096
_MOST_KEPT = 1 << 18  # rows in a reader's memory, some 40 MB with 16 factors
_LISTED = 9  # the last versions whose changes are known: a reader that skips 8 keeps its rows


def _changed_to(sequence: int) -> bytes:
  return _CHANGED_TO + b'%d' % sequence


def _keys(keys: np.ndarray) -> list[bytes]:
  names = np.empty([len(keys)], _KEY)
  names['shard'], names['key'] = shard_of(keys), keys
  return names.view(f'V{_KEY.itemsize}').tolist()


class EmbeddedStore(VersionedStore):
  """Keeps one version of a model in the directory `path`, which a writer makes.

  A reader may start before that; it opens the store at the first use, which may raise a UserError.
  """

  def __init__(self, path: str, writable: bool = False):
    self._path, self._what, self._writable = path, f'the store {path}', writable
    self._data, self._marker = os.path.join(path, 'data.mdb'), os.path.join(path, MARKER)
    self._files: StoreFiles | None = None
    self._next_check = 0.0  # when a writer may read the store through, a tenth of its time
    self._newest: _EmbeddedView | None = None  # from which the next one takes over kept rows
    self._refused: tuple[tuple[int, int], str] | None = None  # files that are not opened, and why
    if writable:
      with plain(self._what, lmdb.Error, OSError):
        os.makedirs(path, exist_ok=True)
        self._open_to_write()

  def _open_to_write(self) -> None:
    """Opens the store; if it is damaged, opens a new one in its place."""
    lock = os.path.join(self._path, 'lock.mdb')
    try:
      if os.path.exists(self._marker):
        with open(self._marker, encoding='utf-8', errors='replace') as f:
          raise Damaged(f.read(200))
      if os.path.exists(self._data):
        if not os.path.exists(lock) or (self._files and not self._files.are_replaced()):
          raise Damaged('its lock.mdb was removed')  # readers would not be seen
        check(self._path)
      elif self._files:
        raise Damaged('its data.mdb was removed')
      self.close()
    except Damaged as e:
      logging.warning('%s is damaged (%s); it is written anew from the exports', self._what, e)
      self.close()
      for name in (self._data, lock, self._marker):
        with contextlib.suppress(FileNotFoundError):
          os.remove(name)
    self._files = StoreFiles(self._path, writable=True)
    if self._files.are_foreign():
      self.close()
      told = f'{self._what}: is of another format, which other servers may read'
      raise UserError(f'{told}; wanted another --to (docs/upgrading.md)')

  def version(self) -> Version | None:
    with self._guarded(), self._reading() or contextlib.nullcontext() as transaction:
      return transaction and self._version(transaction)

  def _version(self, transaction: lmdb.Transaction) -> Version | None:
    version = Version.from_json(unsealed(VERSION, transaction.get(VERSION)))
    if self._files.had_version and not version:
      with transaction.cursor() as cursor:
        is_of_another = cursor.set_range(VERSION[:-1]) and cursor.key().startswith(VERSION[:-1])
      if not is_of_another:  # a publisher of another release has written there
        raise Damaged('it reads as empty')
    self._files.had_version |= bool(version)
    return version

  @contextlib.contextmanager
  def _guarded(self) -> Iterator[None]:
    """Refuses damage that the `with` block finds, and leaves word of it for the publisher."""
    try:
      with plain(self._what, OSError):
        yield
    except (Damaged, lmdb.Error, OverflowError, MemoryError) as e:
      if is_of_the_machine(e):
        raise UserError(f'{self._what}: {e}') from e
      raise self._told(e) from None

  def _told(self, damage: Exception) -> DataLoss:
    if self._files is None or not self._files.are_replaced():
      with contextlib.suppress(OSError), open(self._marker, 'w', encoding='utf-8') as f:
        f.write(str(damage))
    return DataLoss(f'{self._what}: is damaged: {damage}; ctr-publish writes it anew')

  def _apply(self, exports: Sequence[RowExport], expected: Version | None, new: Version) -> None:
    config = exports[-1].config()
    with self._guarded():
      env = self._files.env
      env.reader_check()  # frees the pages that a killed reader held
      with self._files.begin(write=True) as transaction:
        if self._version(transaction) != expected or self._files.are_replaced():
          raise Overtaken
        if (began := time.monotonic()) > self._next_check:  # damaged pages must not be copied
          read_through(transaction)
          self._next_check = time.monotonic() + 9 * (time.monotonic() - began)
        is_new, changed = any(export.begins_chain for export in exports), []
        for export in exports:
          if export.begins_chain:
            transaction.drop(env.open_db(txn=transaction), delete=False)
          for names in _write(transaction, export):
            if not is_new and len(changed) <= _MOST_KEPT:
              changed += names
        values = {
          VERSION: new.to_json(),
          _CONFIG: config.encode(),
          _DENSE: to_npz(exports[-1].dense()),
        }
        if not is_new and len(changed) <= _MOST_KEPT:
          for sequence in _listed(transaction)[: 1 - _LISTED]:
            transaction.delete(_changed_to(sequence))
          differ = b'\n'.join([expected.to_json(), new.to_json(), b''.join(changed)])
          values[_changed_to(new.sequence)] = differ
        for name, value in values.items():
          transaction.put(name, sealed(name, value))

  def view(self) -> View | None:
    with self._guarded():
      transaction = self._reading()
      if transaction is None:
        return None
      if self._version(transaction) is None:
        transaction.abort()
        return None
      self._newest = view = _EmbeddedView(self, transaction, self._newest)
      return view

  def _reading(self) -> lmdb.Transaction | None:
    """Begins a read transaction and returns it; None if no writer has made the store yet."""
    if self._writable:
      at_work = self._files and not self._files.are_replaced() and self._files.are_locked()
      if not at_work or os.path.exists(self._marker):
        self._open_to_write()
    elif self._files is None or self._files.are_replaced():
      self._files = self._opened() or self._files
    return self._files and self._files.begin()

  def _opened(self) -> StoreFiles | None:
    """Returns the files that lie in the directory; None if there are none or they are empty yet."""
    try:
      info = os.stat(self._data)
    except FileNotFoundError:
      return None
    state = info.st_ino, info.st_ctime_ns
    if self._refused and self._refused[0] == state:
      raise DataLoss(self._refused[1])
    try:
      check(self._path)
    except Damaged as e:
      error = self._told(e)
      self._refused = state, str(error)
      raise error from None
    files = StoreFiles(self._path)
    with files.begin() as transaction:
      return files if self._files is None or transaction.get(VERSION) else None

  def absent(self) -> str | None:
    if self._files and self._files.are_foreign():
      return f'{self._path}: is of another format; wanted a server of the version that wrote it'
    if os.path.exists(self._path):
      return None
    return f'{self._path}: is not there yet; ctr-publish --to {self._path} makes it'

  def close(self) -> None:
    if self._files is not None:
      self._files.close()
      self._files = None


def _listed(transaction: lmdb.Transaction) -> list[int]:
  """Returns the numbers of the earlier versions whose changes the store lists, ascending."""
  with transaction.cursor() as cursor:
    cursor.set_range(_CHANGED_TO)
    names = itertools.takewhile(
      lambda name: name.startswith(_CHANGED_TO), cursor.iternext(values=False)
    )
    return sorted(int(name.removeprefix(_CHANGED_TO)) for name in names)


def _write(transaction: lmdb.Transaction, export: RowExport) -> Iterator[list[bytes]]:
  """Applies an export batch by batch; yields the keys that each batch has written or deleted."""
  tombstones = _keys(export.tombstones())
  for key in tombstones:
    transaction.delete(key)
  yield tombstones
  with transaction.cursor() as cursor:
    for rows in export.rows():
      names = _keys(rows.key)
      items = [(name, sealed(name, row)) for name, row in zip(names, encode(rows))]
      _, added = cursor.putmulti(items, append=export.begins_chain)
      if export.begins_chain and added < len(items):
        raise DataLoss(f'{export.path}: its rows are not sorted by shard, then key')
      yield names


class _Kept:
  """Rows that a reader has read, and keys that have none; beyond _MOST_KEPT the oldest go."""

  def __init__(self, config: str):
    self.rows = ServedRows(config)
    self._absent: set[int] = set()
    # Keys as they were kept, and their number; one that was kept anew is there twice.
    self._order: collections.deque[np.ndarray] = collections.deque()
    self._size = 0

  def unread(self, keys: np.ndarray) -> np.ndarray:
    """Returns those of `keys` that may have a row."""
    if not self._absent:
      return keys
    return np.array([k for k in keys.tolist() if k not in self._absent], np.int64)

  def keep(self, keys: np.ndarray, found: LookedUpRows, source: str) -> None:
    at, show_click = found.present, np.zeros([0, 0], np.float32)
    if self.rows.counts:
      found, show_click = without_show_click(found)
      show_click = show_click[at]
    # An absent row has no factors.
    rows = Rows(keys[at], found.linear[at], found.counts[at], found.factors, show_click)
    self.rows.check(rows, source)
    self._order.append(keys)
    self._size += len(keys)
    while self._size > _MOST_KEPT and len(self._order) > 1:
      self._size -= len(oldest := self._order.popleft())
      self.forget(oldest)
    self._absent.update(keys[~at].tolist())
    self.rows.put(rows)

  def forget(self, keys: np.ndarray) -> None:
    self._absent.difference_update(keys.tolist())
    self.rows.erase(keys)

  def clear(self) -> None:
    self._absent.clear()
    self._order.clear()
    self._size = 0
    self.rows.store.clear()


class _EmbeddedView(View):
  """Reads one version. LMDB keeps the version's pages until the read transaction ends.

  At its first use it takes over the kept rows of `before`, the last view, with what has changed, or
  drops them if not all changes since are known. `before` then reads each row from the store.
  """

  def __init__(
    self, store: EmbeddedStore, transaction: lmdb.Transaction, before: '_EmbeddedView | None'
  ):
    self._store, self._files, self._transaction = store, store._files, transaction
    # A transaction serves one thread at a time; the lock also guards the kept rows.
    self._lock = threading.RLock()
    version, config, dense = (value_of(transaction, name) for name in (VERSION, _CONFIG, _DENSE))
    super().__init__(Version.from_json(version), config.decode(), from_npz(dense))
    self._kept: _Kept | None = None
    self._is_taken, self._changes = False, 0
    self._before: _EmbeddedView | None = None  # until its rows are taken over
    # The keys of all rows that differ from those of `before`; None: unknown.
    self._changed: np.ndarray | None = None
    self._fresh: list[tuple[np.ndarray, LookedUpRows]] = []  # the rows of those that it has kept
    if before and before.config == self.config:
      self._changed = self._changed_since(before.version)
      self._follow(before)

  def _changed_since(self, before: Version) -> np.ndarray | None:
    """Returns the keys of all rows that differ from those of `before`; None if unknown."""
    version, keys = self.version, [np.zeros([0], np.int64)]
    while version != before:
      names = _changed_to(version.sequence), b'changed'  # as 0.2.0 calls that of the newest version
      lists = (value_of(self._transaction, name) for name in names)
      earlier, later, changed = next(filter(None, lists), b'\n\n').split(b'\n', 2)
      if later != version.to_json():
        return None
      keys.append(np.frombuffer(changed, _KEY)['key'].astype(np.int64))
      version = Version.from_json(earlier)
    return np.unique(np.concatenate(keys))

  def _follow(self, before: '_EmbeddedView') -> None:
    """Reads what has changed of the rows that `before` keeps, so that `_take_over` is short."""
    with before._lock:
      before._take_over()
      kept = before._kept
    self._before = before
    if kept and self._changed is not None:
      found = self._changed[kept.rows.pull(self._changed).present]
      parts = (found[i : i + _READ_AT_ONCE] for i in range(0, len(found), _READ_AT_ONCE))
      self._fresh = [(keys, self._read(keys)) for keys in parts]

  def _take_over(self) -> None:
    """Takes over the kept rows of the view before, which then reads each row from the store."""
    before, self._before = self._before, None
    if before is None:
      return
    self._kept = before._given_up()
    if self._kept and self._changed is None:
      self._kept.clear()
    elif self._kept:
      self._kept.forget(self._changed)
      for keys, found in self._fresh:
        self._kept.keep(keys, found, self._store._what)
    self._changed, self._fresh = None, []

  def _given_up(self) -> _Kept | None:
    """Returns what it keeps, for one later view, and forgets it."""
    with self._lock:
      given = None if self._is_taken else self._kept
      self._is_taken = True
      self._changes += 1
      return given

  @property
  def row_store(self) -> RowStore | None:
    with self._lock:
      self._take_over()
      if self._is_taken:
        return None
      if self._kept is None:  # now, because the layers of the config may be imported
        self._kept = _Kept(self.config)
      return self._kept.rows.store

  @property
  def changes(self) -> int:
    with self._lock:
      return self._changes

  def _read(self, keys: np.ndarray) -> LookedUpRows:
    with self._store._guarded(), self._lock:
      if self._files.are_cut():
        raise Damaged('data.mdb is cut short')
      return decode([value_of(self._transaction, name) for name in _keys(keys)])

  def fetch(self, keys: np.ndarray) -> None:
    keys = np.unique(keys)
    for first in range(0, len(keys), _READ_AT_ONCE):  # meanwhile, other threads wait for the lock
      with self._lock:
        unread = self._kept.unread(keys[first : first + _READ_AT_ONCE])
        if len(unread) and not self._is_taken:
          self._changes += 1
          self._kept.keep(unread, self._read(unread), self._store._what)

  def look_up(self, keys: np.ndarray) -> LookedUpRows:
    def kept(_: RowStore) -> tuple[LookedUpRows, np.ndarray]:
      rows = self._kept.rows.pull(keys)
      return rows, keys[~rows.present]

    return self.settled(kept) or self._read(keys)

  def close(self) -> None:
    self._transaction.abort()
