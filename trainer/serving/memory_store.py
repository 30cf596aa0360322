"""A store in this process's memory, for a scorer that follows a run itself: our own row store.

There is one copy of the rows, and deltas change it in place. Before a delta does so, the rows that
it changes are laid aside, and a view of the version before shows these in place of what it finds in
the row store. So nobody waits for a delta, which takes its rows' memory once more until the last
view of the version before is closed. A base goes into a row store of its own, beside the one of
before, which is given back with its last view.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ops.row_store import RowStore, to_bfloat16
from ops.tensors import to_tensor
from trainer import config
from trainer.data.features import HASH_BITS
from trainer.embedding.embedding import Embedding
from trainer.errors import DataLoss
from trainer.model.builder import build
from trainer.serving.versioned_store import (
  LookedUpRows,
  Overtaken,
  Version,
  VersionedStore,
  View,
  replace,
)
from trainer.storage.chain import RowExport, Rows


class _RowsOfAChain:
  """A row store of the weights that a chain of exports adds up to.

  Args:
    text: the config of the chain.
  """

  def __init__(self, text: str):
    cfg = config.parse(text, "an export's config.yaml")
    embedding = Embedding(cfg, build(cfg).needs)
    # Without an optimizer's state.
    tables = [dataclasses.replace(t, linear='sgd', factors='sgd') for t in embedding.tables]
    # Ids that no slot has are given a table too, so that whoever asks for them finds nothing.
    self._slot_table = np.zeros([1 << (63 - HASH_BITS)], np.int64)
    self._slot_table[: len(embedding.slot_table)] = np.maximum(embedding.slot_table, 0)
    self._store = RowStore(tables=tables, slot_table=self._slot_table.tolist())
    self._widths = np.array([t.width for t in tables])

  def check(self, export: RowExport, rows: Rows) -> None:
    """Raises: DataLoss where rows are laid out otherwise than the chain's config says."""
    wrong = (rows.counts > 0) & (rows.counts != self._widths[self._slot_table[rows.slot]])
    if wrong.any():
      i = int(np.argmax(wrong))
      raise DataLoss(
        f'{export.path}: key {rows.key[i]}: found {rows.counts[i]} factors in slot id '
        f'{rows.slot[i]}; wanted what the config of its chain says'
      )

  def put(self, rows: Rows) -> None:
    """Takes rows in place of those of the same keys."""
    self.erase(rows.key)
    zero = np.zeros([len(rows.key)])
    columns = {'key': rows.key, 'show': zero, 'click': zero, 'delta_score': zero}
    columns |= {name: zero.astype(np.uint16) for name in ('unseen_days', 'age_days')}
    columns |= {'slot': rows.slot.astype(np.uint16), 'admitted': rows.counts > 0}
    columns |= {'linear': rows.linear[:, None], 'last_step': zero.astype(np.int32)}
    table = np.repeat(self._slot_table[rows.slot], rows.counts)  # of each factor
    for t, spec in enumerate(self._store.tables):
      if spec.width:
        factors = rows.factors[table == t].reshape(-1, spec.width)
        is_half = spec.dtype == 'bfloat16'
        columns[f'factors_{spec.name}'] = to_bfloat16(factors) if is_half else factors
    chunk = {name: to_tensor(column) for name, column in columns.items()}
    self._store.import_chunk('an export', chunk)

  def erase(self, keys: np.ndarray) -> None:
    self._store.erase(to_tensor(keys))

  def pull(self, keys: np.ndarray) -> LookedUpRows:
    ids, offsets, linear, factors = (
      tensor.numpy() for tensor in self._store.pull(to_tensor(keys), train=False)
    )
    return LookedUpRows(linear, np.diff(offsets).astype(np.int64), factors, ids >= 0)


class _Replaced(NamedTuple):
  """Rows of before a version, of all keys that the version changes."""

  keys: np.ndarray  # int64 [n], ascending
  rows: LookedUpRows
  by: '_MemoryView'  # the version


class _MemoryView(View):
  """A version; the store and all that read it share the one object."""

  def __init__(
    self, version: Version, config: str, dense: dict[str, np.ndarray], rows: _RowsOfAChain
  ):
    super().__init__(version, config, dense)
    self.row_store = rows
    self.replaced: _Replaced | None = None  # set before the row store is changed

  def look_up(self, keys: np.ndarray) -> LookedUpRows:
    rows = self.row_store.pull(keys)
    # Rows are laid aside before they change, so every change that the pull met is in this list.
    changes, replaced = [], self.replaced
    while replaced:
      changes.append(replaced)
      replaced = replaced.by.replaced
    for replaced in reversed(changes):  # the newest is undone first
      rows = replace(keys, rows, replaced.keys, replaced.rows)
    return rows


class MemoryStore(VersionedStore):
  """A store that ends with the process."""

  def __init__(self):
    self._held: _MemoryView | None = None

  def version(self) -> Version | None:
    return self._held and self._held.version

  def apply(
    self,
    exports: Sequence[RowExport],
    expected: Version | None,
    withdrawn: int | None = None,
  ) -> Version:
    held, version = self._held, Version.of(exports[-1], withdrawn)
    if self.version() != expected:
      raise Overtaken
    text, dense = exports[-1].config(), exports[-1].dense()
    if exports[0].begins_chain:
      rows = _RowsOfAChain(text)
      for export in exports:
        rows.erase(export.tombstones())
        for some in export.rows():
          rows.check(export, some)
          rows.put(some)
      self._held = _MemoryView(version, text, dense, rows)
      return version
    view = _MemoryView(version, text, dense, held.row_store)
    # All is read and checked before anything changes.
    changes = [(export.tombstones(), list(export.rows())) for export in exports]
    keys = [np.zeros([0], np.int64)]
    for export, (tombstones, parts) in zip(exports, changes):
      for some in parts:
        view.row_store.check(export, some)
      keys += [tombstones, *(some.key for some in parts)]
    keys = np.unique(np.concatenate(keys))
    held.replaced = _Replaced(keys, view.row_store.pull(keys), view)
    try:
      for tombstones, parts in changes:
        view.row_store.erase(tombstones)
        for some in parts:
          view.row_store.put(some)
    except BaseException:
      self._held = None  # rows of two versions: views of before undo them, nobody reads them else
      raise
    self._held = view
    return version

  def view(self) -> View | None:
    return self._held
