"""Keeps one version of a model in this process's memory, for a server that reads a run's exports.

A base is read into a new row store. A delta changes the row store in place, after the rows that it
replaces are copied; views of the earlier version read the copies, so no request waits for a delta.
Copies and old row stores are freed with the last view.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ops.row_store import RowStore, to_bfloat16
from ops.tensors import to_tensor
from trainer import config
from trainer.data.features import HASH_BITS
from trainer.embedding.embedding import Embedding
from trainer.embedding.row_table import counts_of
from trainer.errors import DataLoss
from trainer.model.builder import build
from trainer.serving.item_search import ItemSearch
from trainer.serving.versioned_store import (
  LookedUpRows,
  Overtaken,
  Version,
  VersionedStore,
  View,
  replace,
  with_show_click,
)
from trainer.storage.chain import RowExport, Rows


class _RowsOfAChain:
  """The rows of a base and the deltas after it, in a row store without optimizer state."""

  def __init__(self, text: str):
    cfg = config.parse(text, "an export's config.yaml")
    embedding = Embedding(cfg, build(cfg).needs)
    # SGD keeps no state.
    tables = [dataclasses.replace(t, linear='sgd', factors='sgd') for t in embedding.tables]
    # Unknown slot ids get a table too, so that a look-up of their keys finds nothing.
    self._slot_table = np.zeros([1 << (63 - HASH_BITS)], np.int64)
    self._slot_table[: len(embedding.slot_table)] = np.maximum(embedding.slot_table, 0)
    self.store = RowStore(tables=tables, slot_table=self._slot_table.tolist())
    self._widths = np.array([t.width for t in tables])
    self._counts = bool(cfg.counted_fields())

  def checked(self, export: RowExport) -> Iterator[Rows]:
    """Yields an export's rows; DataLoss if one has another number of factors than its table."""
    for rows in export.rows():
      wrong = (rows.counts > 0) & (rows.counts != self._widths[self._slot_table[rows.slot]])
      if wrong.any():
        i = int(np.argmax(wrong))
        raise DataLoss(
          f'{export.path}: key {rows.key[i]}: found {rows.counts[i]} factors in slot id '
          f"{rows.slot[i]}; wanted the table's width in the chain's config"
        )
      yield rows

  def change(self, tombstones: np.ndarray, batches: Iterable[Rows]) -> None:
    """Applies an export: deletes the rows of the keys `tombstones`, then adds batches of rows."""
    self.erase(tombstones)
    for rows in batches:
      self.put(rows)

  def put(self, rows: Rows) -> None:
    """Adds rows; each replaces the earlier row of its key."""
    self.erase(rows.key)
    zero = np.zeros([len(rows.key)])
    show, click = rows.show_click.astype(np.float64).T if self._counts else (zero, zero)
    columns = {'key': rows.key, 'show': show, 'click': click, 'delta_score': zero}
    columns |= {name: zero.astype(np.uint16) for name in ('unseen_days', 'age_days')}
    columns |= {'slot': rows.slot.astype(np.uint16), 'admitted': rows.counts > 0}
    columns |= {'linear': rows.linear[:, None], 'last_step': zero.astype(np.int32)}
    table = np.repeat(self._slot_table[rows.slot], rows.counts)  # of each factor
    for t, spec in enumerate(self.store.tables):
      if spec.width:
        factors = rows.factors[table == t].reshape(-1, spec.width)
        is_half = spec.dtype == 'bfloat16'
        columns[f'factors_{spec.name}'] = to_bfloat16(factors) if is_half else factors
    chunk = {name: to_tensor(column) for name, column in columns.items()}
    self.store.import_chunk('an export', chunk)

  def erase(self, keys: np.ndarray) -> None:
    self.store.erase(to_tensor(keys))

  def pull(self, keys: np.ndarray) -> LookedUpRows:
    keys = to_tensor(keys)
    pulled = self.store.pull(keys, train=False)
    ids, offsets, linear, factors = (tensor.numpy() for tensor in pulled[:4])
    rows = LookedUpRows(linear, np.diff(offsets).astype(np.int64), factors, ids >= 0)
    return with_show_click(rows, counts_of(self.store, keys).numpy()) if self._counts else rows


class _Replaced(NamedTuple):
  """Copies of the rows that a new version replaces, as they were in the earlier version."""

  keys: np.ndarray  # int64 [n], ascending
  rows: LookedUpRows
  by: '_MemoryView'  # the new version


class _MemoryView(View):
  """Reads one version; all its readers share this object."""

  def __init__(self, version: Version, export: RowExport, rows: _RowsOfAChain | None):
    super().__init__(version, export.config(), export.dense())
    self.rows = rows or _RowsOfAChain(self.config)
    self.replaced: _Replaced | None = None  # set before the next version changes the rows

  @property
  def row_store(self) -> RowStore | None:
    return None if self.replaced else self.rows.store

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
  holds_items = True

  def __init__(self):
    self._held: _MemoryView | None = None

  def version(self) -> Version | None:
    return self._held and self._held.version

  def _apply(self, exports: Sequence[RowExport], expected: Version | None, new: Version) -> None:
    held = self._held
    if self.version() != expected:
      raise Overtaken
    begins = exports[0].begins_chain
    view = _MemoryView(new, exports[-1], None if begins else held.rows)
    view.items = _items(exports, None if begins else held.items)
    rows = view.rows
    if begins:
      for export in exports:
        rows.change(export.tombstones(), rows.checked(export))
      self._held = view
      return
    # Read and check everything before anything changes.
    changes = [(export.tombstones(), list(rows.checked(export))) for export in exports]
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
    return self._held


def _items(exports: Sequence[RowExport], before: ItemSearch | None) -> ItemSearch | None:
  """Returns the items, if any, of exports after those `before`, None where the first is a base."""
  for export in exports if exports[-1].has_items else ():
    before = ItemSearch.of_base(export) if export.begins_chain else before.changed(export.items())
  return before
