"""Keeps one version of a model in an LMDB database, which one process writes and many read.

    DIRECTORY/data.mdb  lock.mdb

    logical shard (2 bytes), key (8 bytes, big-endian) -> a row (trainer.serving.versioned_store)
    'version of format 2'  -> Version as JSON
    'config'               -> the resolved config
    'dense'                -> the dense variables, .npz
    'changed'              -> the version before and this one, each as JSON and a line end, then the
                              keys of all rows that differ; absent if too many, and after a base

A logical shard is one of 4,096 parts into which a hash divides all keys. Rows have the same order
as in exports, so the rows of a base can be appended. One write transaction applies all exports of a
new version. A reader sees the version that the store held when its transaction began. It keeps the
rows that it has read in memory: LMDB releases Python's lock for each row, and other threads of a
busy server then take it. By the list of changed keys, a new version takes over the kept rows.
"""

import contextlib
import itertools
import os
import threading
from collections.abc import Iterator, Sequence

import lmdb
import numpy as np

from ops.sharding import shard_of
from trainer.errors import DataLoss
from trainer.files import from_npz, to_npz
from trainer.serving.versioned_store import (
  LookedUpRows,
  Overtaken,
  Version,
  VersionedStore,
  View,
  decode,
  encode,
  plain,
)
from trainer.storage.chain import RowExport

_KEY = np.dtype([('shard', '>u2'), ('key', '>i8')])
# A store of another format reads as an empty one, so that it is published again from a base.
_VERSION, _CONFIG, _DENSE = b'version of format 2', b'config', b'dense'
_CHANGED = b'changed'
# The largest size of a store. Only addresses are reserved, not memory or disk.
_MAP_BYTES = 1 << 40
_MOST_KEPT = 1 << 18  # rows in a reader's memory, some 60 MB with 16 factors
_UNREAD = object()


def _keys(keys: np.ndarray) -> list[bytes]:
  names = np.empty([len(keys)], _KEY)
  names['shard'], names['key'] = shard_of(keys), keys
  return names.view(f'V{_KEY.itemsize}').tolist()


class EmbeddedStore(VersionedStore):
  """Keeps one version of a model in a directory.

  Args:
    path: the directory. A writer makes it; a reader may start before it exists.
    writable: whether this process writes the store.
  Raises:
    UserError: if the store cannot be opened. A reader opens it at the first use, so any method may
      raise this.
  """

  def __init__(self, path: str, writable: bool = False):
    self._path, self._what, self._writable = path, f'the store {path}', writable
    self._env: lmdb.Environment | None = None
    # The last view, from which the next one takes over kept rows.
    self._newest: _EmbeddedView | None = None
    if writable:
      with plain(self._what, lmdb.Error, OSError):
        os.makedirs(path, exist_ok=True)
        self._open()

  def _open(self) -> None:
    self._env = lmdb.open(
      self._path,
      map_size=_MAP_BYTES,
      readonly=not self._writable,
      create=self._writable,
      max_readers=1024,
    )

  def version(self) -> Version | None:
    with plain(self._what, lmdb.Error), self._reading() or contextlib.nullcontext() as transaction:
      return transaction and Version.from_json(transaction.get(_VERSION))

  def _apply(self, exports: Sequence[RowExport], expected: Version | None, new: Version) -> None:
    config = exports[-1].config()
    with plain(self._what, lmdb.Error):
      self._env.reader_check()  # frees the pages that a killed reader held
      with self._env.begin(write=True) as transaction:
        if Version.from_json(transaction.get(_VERSION)) != expected:
          raise Overtaken
        is_new, changed = any(export.begins_chain for export in exports), []
        for export in exports:
          if export.begins_chain:
            transaction.drop(self._env.open_db(txn=transaction), delete=False)
          for names in _write(transaction, export):
            if not is_new and len(changed) <= _MOST_KEPT:
              changed += names
        transaction.put(_VERSION, new.to_json())
        transaction.put(_CONFIG, config.encode())
        transaction.put(_DENSE, to_npz(exports[-1].dense()))
        if is_new or len(changed) > _MOST_KEPT:
          transaction.delete(_CHANGED)
        else:
          transaction.put(
            _CHANGED, b'\n'.join([expected.to_json(), new.to_json(), b''.join(changed)])
          )

  def view(self) -> View | None:
    with plain(self._what, lmdb.Error):
      transaction = self._reading()
      if transaction is None:
        return None
      if transaction.get(_VERSION) is None:
        transaction.abort()
        return None
      self._newest = _EmbeddedView(transaction, self._newest)
      return self._newest

  def _reading(self) -> lmdb.Transaction | None:
    """Begins a read transaction and returns it; None if no writer has made the store yet."""
    if self._env is None:
      if not os.path.exists(os.path.join(self._path, 'data.mdb')):
        return None
      self._open()
    return self._env.begin()

  def absent(self) -> str | None:
    if os.path.exists(self._path):
      return None
    return f'{self._path}: is not there yet; ctr-publish --to {self._path} makes it'

  def close(self) -> None:
    if self._env is not None:
      self._env.close()


def _write(transaction: lmdb.Transaction, export: RowExport) -> Iterator[list[bytes]]:
  """Applies an export batch by batch; yields the keys that each batch has written or deleted."""
  tombstones = _keys(export.tombstones())
  for key in tombstones:
    transaction.delete(key)
  yield tombstones
  with transaction.cursor() as cursor:
    for rows in export.rows():
      names = _keys(rows.key)
      items = list(zip(names, encode(rows)))
      _, added = cursor.putmulti(items, append=export.begins_chain)
      if export.begins_chain and added < len(items):
        raise DataLoss(f'{export.path}: its rows are not sorted by shard, then key')
      yield names


class _EmbeddedView(View):
  """Reads one version. LMDB keeps the version's pages until the read transaction ends.

  Args:
    transaction: the read transaction.
    before: the last view of the same store; its kept rows are taken over if all changes since are
      known.
  """

  def __init__(self, transaction: lmdb.Transaction, before: '_EmbeddedView | None'):
    self._transaction = transaction
    self._lock = threading.Lock()  # a transaction serves one thread at a time
    version, config, dense = map(transaction.get, (_VERSION, _CONFIG, _DENSE))
    super().__init__(Version.from_json(version), config.decode(), from_npz(dense))
    # key -> the row that was read, None for an absent one
    self._kept: dict[bytes, bytes | None] = {}
    *versions, changed = (transaction.get(_CHANGED) or b'').split(b'\n', 2)
    if before and versions == [before.version.to_json(), version]:
      self._kept = before._kept.copy()
      for name in np.frombuffer(changed, f'V{_KEY.itemsize}').tolist():
        self._kept.pop(name, None)

  def look_up(self, keys: np.ndarray) -> LookedUpRows:
    names = _keys(keys)
    values = list(map(self._kept.get, names, itertools.repeat(_UNREAD)))
    if unread := [i for i, value in enumerate(values) if value is _UNREAD]:
      with self._lock:
        if len(self._kept) > _MOST_KEPT:
          self._kept.clear()
        for i in unread:
          values[i] = self._kept[names[i]] = self._transaction.get(names[i])
    return decode(values)

  def close(self) -> None:
    self._transaction.abort()
