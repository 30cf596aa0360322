"""Rows that a server keeps in its memory, where a graph looks them up."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ops.feature_lifecycle import TensorLike
from ops.row_store import PulledRows, RowStore, to_bfloat16
from ops.tensors import to_tensor
from trainer import config
from trainer.data.features import HASH_BITS
from trainer.embedding.embedding import Embedding
from trainer.embedding.row_table import counts_of
from trainer.embedding.stores import plain_disk_errors
from trainer.errors import DataLoss, UserError
from trainer.model.builder import build
from trainer.serving.versioned_store import LookedUpRows, with_show_click
from trainer.storage.chain import Rows


class ServedRowStore(RowStore):
  is_damaged = False  # whether rows on disk could not be read

  def pull(self, keys: TensorLike, train: bool = True) -> PulledRows:
    try:
      with plain_disk_errors('--'):
        return super().pull(keys, train)
    except UserError:
      self.is_damaged = True
      raise


class ServedRows:
  """Rows of a version, in a row store without optimizer state.

  Args:
    text: the version's config.
    limit: `memory_limit` and `cold_dir` of the row store, or nothing.
  """

  def __init__(self, text: str, limit: Mapping[str, Any] = {}):
    cfg = config.parse(text, "an export's config.yaml")
    embedding = Embedding(cfg, build(cfg).needs)
    # SGD keeps no state.
    tables = [dataclasses.replace(t, linear='sgd', factors='sgd') for t in embedding.tables]
    # Unknown slot ids get a table too, so that a look-up of their keys finds nothing.
    self._slot_table = np.zeros([1 << (63 - HASH_BITS)], np.int64)
    self._slot_table[: len(embedding.slot_table)] = np.maximum(embedding.slot_table, 0)
    self.store = ServedRowStore(tables=tables, slot_table=self._slot_table.tolist(), **limit)
    self._exports = 0  # how many were applied
    self._widths = np.array([t.width for t in tables])
    self.counts = bool(cfg.counted_fields())

  def check(self, rows: Rows, source: str) -> None:
    """Raises DataLoss if a row has another number of factors than its table."""
    wrong = (rows.counts > 0) & (rows.counts != self._widths[self._slot_table[rows.slot]])
    if wrong.any():
      i = int(np.argmax(wrong))
      raise DataLoss(
        f'{source}: key {rows.key[i]}: found {rows.counts[i]} factors in slot id '
        f"{rows.slot[i]}; wanted the table's width in the chain's config"
      )

  def change(self, tombstones: np.ndarray, batches: Iterable[Rows]) -> None:
    """Applies an export: deletes the rows of the keys `tombstones`, then adds batches of rows."""
    self._exports += 1
    self.erase(tombstones)
    for rows in batches:
      self.put(rows)

  def put(self, rows: Rows) -> None:
    """Adds rows; each replaces the earlier row of its key."""
    self.erase(rows.key)
    zero = np.zeros([len(rows.key)])
    show, click = rows.show_click.astype(np.float64).T if self.counts else (zero, zero)
    columns = {'key': rows.key, 'show': show, 'click': click, 'delta_score': zero}
    columns |= {name: zero.astype(np.uint16) for name in ('unseen_days', 'age_days')}
    columns |= {'slot': rows.slot.astype(np.uint16), 'admitted': rows.counts > 0}
    last_step = np.full([len(zero)], self._exports, np.int32)  # the newest stay in memory
    columns |= {'linear': rows.linear[:, None], 'last_step': last_step}
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
    return with_show_click(rows, counts_of(self.store, keys).numpy()) if self.counts else rows
