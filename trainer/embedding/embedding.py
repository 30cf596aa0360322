"""Turns a batch and its rows into the inputs of the layers; derives the rows' layout."""

from collections.abc import Collection, Mapping

import numpy as np
import tensorflow as tf

from ops import pooling, row_optimizers, row_store
from ops.dedupe import Deduped, dedupe
from ops.library import TensorLike
from trainer.config import Config
from trainer.config.sparse import Table
from trainer.data.features import SlotBatch, transform_counts, transform_dense
from trainer.embedding.layer_inputs import HistoryVectors, LayerInputs


def _size(batch: SlotBatch) -> tf.Tensor:
  """Returns the number of samples in a batch, plus the candidates added for model.retrieval."""
  return tf.maximum(tf.shape(batch.label)[0], tf.shape(batch.item)[0])


def table_specs(
  tables: Mapping[str, Table], slots: int, needs: Collection[str]
) -> list[row_store.TableSpec]:
  """Returns the layout of each table's rows, for layers that read `needs` (layer_inputs.NEEDS)."""
  specs = []
  for name, table in tables.items():
    parts = []
    if 'factors' in needs or 'totals' in needs:
      parts.append(row_store.FactorPart('plain', table.width))
    if 'field_factors' in needs:
      parts.append(row_store.FactorPart('field', table.width * slots))
    specs.append(
      row_store.TableSpec(
        name=name,
        parts=tuple(parts),
        init_scale=table.init_scale,
        linear=table.linear.kind,
        factors=table.factors.kind,
        dtype=table.dtype,
      )
    )
  return specs


class Embedding:
  """Sums the rows of a batch's features into the layer inputs in `needs`. It holds no weights."""

  def __init__(self, cfg: Config, needs: Collection[str]):
    self._data = cfg.data
    slots, names = cfg.ordered_slots, list(cfg.sparse.tables)
    self.num_slots = len(slots)
    self._reads_slots, self._reads_totals = 'factors' in needs, 'totals' in needs
    self._reads_field = 'field_factors' in needs
    poolings, ids = tuple(cfg.poolings()), cfg.slot_ids()
    self._divides = any(p != 'sum' for p in poolings)
    # For each slot id, the index of its table; −1 for unused ids.
    self.slot_table = [-1] * (max(ids.values()) + 1)
    for s in slots:
      self.slot_table[ids[s.name]] = names.index(s.table)
    self.tables = table_specs(cfg.sparse.tables, len(slots), needs)
    self._layout = pooling.PoolLayout(
      table_of_slot=tuple(names.index(s.table) for s in slots),
      parts=tuple(t.parts for t in self.tables),
      poolings=poolings if self._divides else (),
      averaged=tuple(cfg.averaged()) if any(cfg.averaged()) else (),
      slots=self._reads_slots,
      totals=self._reads_totals,
    )
    # For each slot with histories: its name, its index, the index of its table, and the place of
    # the candidate's slot among the slots of that table.
    self._history_slots = []
    for f, s in enumerate(slots if 'histories' in needs else []):
      if s.sequence:
        t = names.index(s.table)
        place = [x.name for x in slots if x.table == s.table].index(s.shares)
        self._history_slots.append((s.name, f, t, place))
    self._widths = [t.width for t in cfg.sparse.tables.values()]
    self._optimizers = [(t.linear, t.factors) for t in cfg.sparse.tables.values()]
    # Whether any table has `l2_mode: catch_up`: a row that is not in a batch takes the batch's step
    # of the penalty on weights (L1, L2) later.
    self.catches_up = any(o.l2_mode == 'catch_up' for pair in self._optimizers for o in pair)
    # One show for each occurrence. It is made once: every constant of TensorFlow 2.16 leaks memory.
    self._one_show = tf.ones([1])
    shares = cfg.click_shares()
    self._click_shares = tf.constant(shares) if len(shares) > 1 else None
    # The indices, in `Config.ordered_slots`, of the slots with `counts`.
    self.counted = cfg.counted_fields()
    columns = len(cfg.data.dense) + bool(self.counted)
    stats = np.stack([np.zeros(columns), np.ones(columns), np.zeros(columns)])
    # float32 [3, Dn], the means, deviations and bounds that standardise the Dn dense columns
    # (trainer.data.features.dense_stats); with `counts`, one more column.
    self.stats = tf.Variable(stats, trainable=False, name='dense_stats', dtype=tf.float32)

  def hyper(self, rate: TensorLike) -> tf.Tensor:
    """Returns the tables' hyperparameters for `RowStore.push`; `rate` multiplies learning rates."""
    return row_optimizers.hyper(self._optimizers, rate)

  def dedupe(self, batch: SlotBatch) -> Deduped:
    """Returns the batch's unique keys, each with the shows and clicks of all its occurrences."""
    clicks = tf.cast(batch.label > 0.5, tf.float32)
    if batch.item.shape[0] > batch.label.shape[0]:  # candidates have no shows
      sample = batch.segments // self.num_slots
      is_shown = sample < tf.size(clicks)
      clicks = tf.gather(tf.pad(clicks, [[0, 1]]), tf.minimum(sample, tf.size(clicks)))
      return dedupe(batch.keys, shows=tf.cast(is_shown, tf.float32), clicks=clicks)
    if self._click_shares is not None:
      clicks = tf.linalg.matvec(clicks, self._click_shares)
    return dedupe(batch.keys, self._one_show, clicks, batch.segments, self.num_slots)

  def embed(self, batch: SlotBatch, deduped: Deduped, rows: row_store.PulledRows) -> LayerInputs:
    """Sums the rows of a batch's unique keys into layer inputs; differentiable in `rows`."""
    size = _size(batch)
    pooled = pooling.pool(rows, deduped, batch.values, batch.segments, size, self._layout)
    # The parts of a table's factors: plain first, then field-aware.
    slots = [parts[0] for parts in pooled.slots] if self._reads_slots else []
    totals = [(t[0], s[0]) for t, s in zip(pooled.totals, pooled.squares) if self._reads_totals]
    dense = transform_dense(batch.dense, self._data.dense, self.stats)
    if self.counted:
      show_click = self._show_click(batch, deduped, rows.show_click, size)
      dense = tf.concat([dense, transform_counts(show_click, self.stats[0, -1])], 1)
    return LayerInputs(
      linear=pooled.linear,
      factors=slots,
      totals=[total for total, _ in totals],
      squares=tf.add_n([squares for _, squares in totals]) if totals else None,
      field_factors=pooled.slots[0][-1] if self._reads_field else None,
      field_squares=pooled.squares[0][-1] if self._reads_field else None,
      norm=pooled.norm if self._divides else None,
      dense=dense,
      histories=self._histories(batch, deduped, rows, slots) if self._history_slots else None,
    )

  def _show_click(
    self, batch: SlotBatch, deduped: Deduped, show_click: tf.Tensor, size: tf.Tensor
  ) -> tf.Tensor:
    """Sums shows and clicks over the features of the Fc slots with `counts`, float32 [B, Fc, 2]."""
    of_each, slots = tf.gather(show_click, deduped.inverse), size * self.num_slots
    one_each = tf.size(batch.segments) == 0  # each slot of each sample has one feature
    one_each &= tf.size(deduped.inverse) > 0
    summed = lambda: tf.math.unsorted_segment_sum(of_each, batch.segments, slots)
    sums = tf.cond(one_each, lambda: of_each, summed)
    return tf.gather(tf.reshape(sums, [size, self.num_slots, 2]), self.counted, axis=1)

  def _histories(
    self, batch: SlotBatch, deduped: Deduped, rows: row_store.PulledRows, sums: list[tf.Tensor]
  ) -> dict[str, HistoryVectors]:
    """Returns {name of a history's slot: its HistoryVectors}; gradients flow to `rows.factors`.

    `sums`, the slot sums of each table, float32 [B, F_t, D_t], give each history its `candidate`.
    """
    histories = {}
    for name, field, table, candidate in self._history_slots:
      vectors, mask = pooling.histories(
        rows,
        deduped,
        batch.segments,
        _size(batch),
        slots=self.num_slots,
        slot=field,
        width=self._widths[table],
      )
      histories[name] = HistoryVectors(vectors, mask, sums[table][:, candidate])
    return histories
