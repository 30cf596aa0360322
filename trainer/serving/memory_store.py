"""Keeps one version of a model in this process's memory, for a server that reads a run's exports.

A base is read into a new row store. A delta changes the row store in place, after the rows that it
replaces are copied; views of the earlier version read the copies, so no request waits for a delta.
Copies and old row stores are freed with the last view. With a limit, each row store keeps further
rows on disk; if these cannot be read, the exports are read again.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ops.row_store import RowStore, TableSpec
from trainer.embedding.stores import plain_disk_errors
from trainer.serving.served_rows import ServedRows
from trainer.serving.versioned_store import (
  LookedUpRows,
  Overtaken,
  Version,
  VersionedStore,
  View,
  replace,
)
from trainer.storage.chain import RowExport, Rows
from trainer.wings import wing


class _Replaced(NamedTuple):
  """Copies of the rows that a new version replaces, as they were in the earlier version."""

  keys: np.ndarray  # int64 [n], ascending
  rows: LookedUpRows
  by: '_MemoryView'  # the new version


class _MemoryView(View):
  """Reads one version; all its readers share this object."""

  def __init__(self, version: Version, export: RowExport, rows: ServedRows):
    super().__init__(version, export.config(), export.dense())
    self.rows = rows
    self.replaced: _Replaced | None = None  # set before the next version changes the rows

  @property
  def row_store(self) -> RowStore | None:
    return None if self.replaced else self.rows.store

  @property
  def is_damaged(self) -> bool:
    return self.rows.store.is_damaged

  @property
  def changes(self) -> int:
    return int(self.replaced is not None)

  def look_up(self, keys: np.ndarray) -> LookedUpRows:
    rows = self.rows.pull(keys)
    # Old rows are copied before they change, so every change that the pull saw is listed here.
    changes, replaced = [], self.replaced
    while replaced:
      changes.append(replaced)
      replaced = replaced.by.replaced
    for replaced in reversed(changes):  # undo the newest change first
      rows = replace(keys, rows, replaced.keys, replaced.rows)
    return rows


class MemoryStore(VersionedStore):
  """Holds a version in memory; the row store of each base has the `limit` of ServedRows."""

  holds_items = True

  def __init__(self, **limit: Any):
    self._held: _MemoryView | None = None
    self._limit = limit
    with plain_disk_errors('--'):  # wrong ones are told at once
      RowStore(tables=[TableSpec('', ())], slot_table=[0], **limit)

  def version(self) -> Version | None:
    view = self.view()
    return view and view.version

  @plain_disk_errors('--')
  def _apply(self, exports: Sequence[RowExport], expected: Version | None, new: Version) -> None:
    held = self._held
    if self.version() != expected:
      raise Overtaken
    begins = exports[0].begins_chain
    rows = ServedRows(exports[-1].config(), self._limit) if begins else held.rows
    view = _MemoryView(new, exports[-1], rows)
    view.items = None if begins else held.items
    for export in exports if exports[-1].has_items else ():
      view.items = wing('retrieval.search')(export, view.items)
    if begins:
      for export in exports:
        rows.change(export.tombstones(), _checked(rows, export))
      self._held = view
      return
    # Read and check everything before anything changes.
    changes = [(export.tombstones(), list(_checked(rows, export))) for export in exports]
    keys = [[tombstones, *(batch.key for batch in batches)] for tombstones, batches in changes]
    keys = np.unique(np.concatenate(sum(keys, [])))
    held.replaced = _Replaced(keys, rows.pull(keys), view)
    try:
      for change in changes:
        rows.change(*change)
    except BaseException:
      self._held = None  # the rows may be of two versions, which only views of the earlier one undo
      raise
    self._held = view

  def view(self) -> View | None:
    held = self._held
    return None if held and held.is_damaged else held


def _checked(rows: ServedRows, export: RowExport) -> Iterator[Rows]:
  """Yields an export's rows; DataLoss if one has another number of factors than its table."""
  for batch in export.rows():
    rows.check(batch, export.path)
    yield batch
