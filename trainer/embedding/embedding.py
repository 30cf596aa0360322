"""From a batch and its rows to what the layers read, and the row layout of a config."""

import numpy as np
import tensorflow as tf

from ops import pooling, row_optimizers, row_store
from ops.dedupe import dedupe
from trainer.data.features import transform_dense
from trainer.embedding.layer_inputs import LayerInputs


class Embedding:
  """The static side of the sparse path: slots to tables, parts of a row, hyperparameters.

  Args:
    cfg: trainer.config.Config.
    needs: what the model's interactions read: a subset of trainer.embedding.layer_inputs.NEEDS.
  """

  def __init__(self, cfg, needs):
    self._data = cfg.data
    slots, names = cfg.slots, list(cfg.sparse.tables)
    self.num_slots = len(slots)
    self._slots, self._totals, self._field = (
      name in needs for name in ('factors', 'totals', 'field_factors')
    )
    # A feature's own value divides by itself: pooling only matters where a slot may hold several.
    poolings = tuple(s.pooling if s.separator or s.value_separator else 'sum' for s in slots)
    self._pools = any(p != 'sum' for p in poolings)
    ids = cfg.slot_ids()
    self.slot_table = [-1] * (max(ids.values()) + 1)
    for s in slots:
      self.slot_table[ids[s.name]] = names.index(s.table)

    def parts(table):
      plain = [row_store.Part('plain', table.width)] if self._slots or self._totals else []
      return tuple(
        plain + ([row_store.Part('field', table.width * self.num_slots)] if self._field else [])
      )

    tables = cfg.sparse.tables.items()
    self.tables = [
      row_store.TableSpec(
        name=name,
        parts=parts(t),
        init=t.init,
        init_scale=t.init_scale,
        linear=t.linear.kind,
        factors=t.factors.kind,
      )
      for name, t in tables
    ]
    self.layout = pooling.PoolLayout(
      slot_table=tuple(names.index(s.table) for s in slots),
      parts=tuple(t.parts for t in self.tables),
      poolings=poolings if self._pools else (),
      slots=self._slots,
      totals=self._totals,
    )
    self._optimizers = [(t.linear, t.factors) for _, t in tables]
    # Whether rows that were in no batch of some steps take those steps later.
    self.catches_up = any(o.l2_mode == 'catch_up' for pair in self._optimizers for o in pair)
    self._one = tf.ones(
      [1]
    )  # a show of each occurrence; made once, for TensorFlow 2.16 loses memory with every constant
    self.stats = tf.Variable(
      np.stack([np.zeros(len(cfg.data.dense)), np.ones(len(cfg.data.dense))]),
      dtype=tf.float32,
      trainable=False,
      name='dense_stats',
    )

  def hyper(self, rate):
    """Hyperparameters of every table's linear weights and factors, learning rates times `rate`:

    float32 [T, 2, fields].
    """
    return row_optimizers.hyper(self._optimizers, rate)

  def dedupe(self, batch):
    """The batch's unique keys with the shows and clicks of their occurrences:

    ops.dedupe.Deduped.
    """
    return dedupe(
      batch.keys,
      shows=self._one,
      clicks=tf.cast(batch.label > 0.5, tf.float32),
      segments=batch.segments,
      fields=self.num_slots,
    )

  def embed(self, batch, deduped, rows):
    """Pools rows (linear [u], factors flat) to `LayerInputs`; differentiable in both."""
    size = tf.shape(batch.label)[0]
    pooled = pooling.pool(rows, deduped, batch.values, batch.segments, size, self.layout)
    # A table's parts: plain first, then field.
    field_factors, field_squares = (
      (pooled.slots[0][-1], pooled.squares[0][-1]) if self._field else (None, None)
    )
    return LayerInputs(
      linear=pooled.linear,
      factors=[parts[0] for parts in pooled.slots] if self._slots else [],
      totals=[parts[0] for parts in pooled.totals] if self._totals else [],
      squares=tf.add_n([parts[0] for parts in pooled.squares]) if self._totals else None,
      field_factors=field_factors,
      field_squares=field_squares,
      norm=pooled.norm if self._pools else None,
      dense=transform_dense(batch.dense, self._data.dense, self.stats),
    )
