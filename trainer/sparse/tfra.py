"""Rows on TFRA's tables, the portable store: one packed row a feature, one lookup and one upsert a table and step.

A row is [linear weight, its state | factors, their state | step of its last update, as bits]; a feature on probation has zeros for factors.
The lifecycle is the same C++ feature table as the fused store's; only the rows lie elsewhere.
"""
import uuid
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow_recommenders_addons import dynamic_embedding as de

from ops import row_store
from ops.feature_lifecycle import COLUMNS, FeatureLifecycle


class TfraRows(NamedTuple):
  """As ops.row_store.Rows, with the packed rows kept from the pull, so that the push looks nothing up."""
  offsets: tf.Tensor
  linear: tf.Tensor
  factors: tf.Tensor
  packed: list  # a table each: (which of the keys are its own int32 [n], their rows float32 [n, R])


class TfraStore(FeatureLifecycle):
  """The verbs of ops.row_store.RowStore on TFRA's tables; its arguments are the same."""

  def __init__(self, policy=None, *, tables, slot_table, seed=0, name=None):
    super().__init__(policy, name)
    self.tables, self.slot_table, self._seed = tables, slot_table, seed
    self.widths = [t.width for t in tables]
    self._linear_floats = [1 + row_store.state_floats(t.linear, 1) for t in tables]
    self._factor_floats = [t.width + row_store.state_floats(t.factors, t.width) for t in tables]
    unique = uuid.uuid4().hex
    self._rows = [de.get_variable(f'rows_{t.name}_{unique}', key_dtype=tf.int64, value_dtype=tf.float32, dim=a + b + 1, devices=['/CPU:0'], initializer=0.0,
                                  partitioner=lambda keys, shards: tf.zeros_like(keys, tf.int32), trainable=False)
                  for t, a, b in zip(tables, self._linear_floats, self._factor_floats)]

  def _of_table(self, keys, t):
    slot = tf.cast(tf.bitwise.right_shift(keys, tf.constant(52, tf.int64)), tf.int32)
    return tf.cast(tf.where(tf.equal(tf.gather(self.slot_table, slot), t))[:, 0], tf.int32)

  def _initial(self, keys, t):
    spec = self.tables[t]
    return row_store.initial_factors(keys, self._seed, spec.width, spec.init, spec.init_scale)

  def pull(self, keys, train=True):
    """As ops.row_store.RowStore.pull."""
    readable = self.admitted(keys)
    at_once = train and self.policy.admission == 'none'
    size = tf.size(keys)
    linear, widths, packed = tf.zeros([size]), tf.zeros([size], tf.int32), []
    for t, spec in enumerate(self.tables):
      own = self._of_table(keys, t)
      own_keys = tf.gather(keys, own)
      rows = tf.reshape(self._rows[t].lookup(own_keys), [-1, self._linear_floats[t] + self._factor_floats[t] + 1])
      if at_once and spec.width:
        fresh = tf.equal(tf.bitcast(rows[:, -1], tf.int32), 0)
        initial = tf.pad(self._initial(own_keys, t), [[0, 0], [self._linear_floats[t], self._factor_floats[t] - spec.width + 1]])
        rows = tf.where(fresh[:, None], initial, rows)
      packed.append((own, rows))
      linear = tf.tensor_scatter_nd_update(linear, own[:, None], rows[:, 0])
      has = tf.ones_like(own) if at_once else tf.cast(tf.gather(readable, own), tf.int32)
      widths = tf.tensor_scatter_nd_update(widths, own[:, None], has * spec.width)
    offsets = tf.concat([[0], tf.cumsum(widths)], 0)
    factors = tf.zeros([offsets[-1]])
    for t, (own, rows) in enumerate(packed):
      _, places = self._places(offsets, own, t)
      has = tf.gather(widths, own) > 0
      start = self._linear_floats[t]
      factors = tf.tensor_scatter_nd_update(factors, places[:, :, None], tf.boolean_mask(rows[:, start:start + self.widths[t]], has))
    return TfraRows(offsets, linear, factors, packed)

  def _places(self, offsets, own, t):
    """Which of a table's keys have factors (int32 [m]), and where those lie in the flat factors (int32 [m, D])."""
    starts = tf.gather(offsets, own)
    has = tf.cast(tf.where(tf.gather(offsets, own + 1) > starts)[:, 0], tf.int32)
    return has, tf.gather(starts, has)[:, None] + tf.range(self.widths[t])

  def push(self, keys, rows, shows, clicks, linear_gradient, factors_gradient, scale, hyper, step):
    """As ops.row_store.RowStore.push."""
    admitted = self.observe(keys, shows, clicks)
    upserts = []
    for t, (own, packed) in enumerate(rows.packed):
      spec, own_keys, start = self.tables[t], tf.gather(keys, own), self._linear_floats[t]
      last = tf.bitcast(packed[:, -1], tf.int32)
      own_scale = tf.gather(tf.broadcast_to(scale, tf.shape(keys)), own)
      linear = row_store.row_update(packed[:, :start], tf.gather(linear_gradient, own)[:, None], own_scale, last, hyper[t, 0], step, spec.linear)
      factors = packed[:, start:-1]
      if spec.width:
        has, places = self._places(rows.offsets, own, t)
        updated = row_store.row_update(tf.gather(factors, has), tf.gather(factors_gradient, places), tf.gather(own_scale, has), tf.gather(last, has),
                                       hyper[t, 1], step, spec.factors)
        factors = tf.tensor_scatter_nd_update(factors, has[:, None], updated)
        had = tf.scatter_nd(has[:, None], tf.ones_like(has), tf.shape(own))
        newly = tf.cast(tf.where(tf.gather(admitted, own) & tf.equal(had, 0))[:, 0], tf.int32)
        initial = row_store.row_init(self._initial(tf.gather(own_keys, newly), t), hyper[t, 1], spec.factors)
        factors = tf.tensor_scatter_nd_update(factors, newly[:, None], initial)
      now = tf.fill([tf.size(own), 1], tf.bitcast(tf.cast(step, tf.int32), tf.float32))
      upserts.append(self._rows[t].upsert(own_keys, tf.concat([linear, factors, now], 1)))
    return tf.group(upserts)

  def evict(self, all_reduce=None):
    keys = super().evict(all_reduce)
    for t, table in enumerate(self._rows):
      table.remove(tf.gather(keys, self._of_table(keys, t)))
    return keys

  def _row_floats(self):
    return max(t.floats for t in self.tables)

  def clear(self):
    super().import_state([])
    for table in self._rows:
      table.clear()

  def bytes(self):
    """int64 []: what the lifecycle allocated and what the rows hold (TFRA does not say what it allocated)."""
    return super().bytes() + sum(table.size() * (8 + 4 * (a + b + 1)) for table, a, b in zip(self._rows, self._linear_floats, self._factor_floats))

  def _chunks(self, shards):
    """As ops.row_store.RowStore._chunks."""
    for features in super()._chunks(shards):
      chunk = {name: features[name] for name in COLUMNS}
      keys = tf.constant(chunk['key'])
      linear, last = np.zeros([len(keys), max(self._linear_floats)], np.float32), np.zeros([len(keys)], np.int32)
      for t, spec in enumerate(self.tables):
        own = self._of_table(keys, t).numpy()
        rows = self._rows[t].lookup(tf.gather(keys, own)).numpy().reshape(len(own), -1)
        start = self._linear_floats[t]
        linear[own, :start], last[own] = rows[:, :start], np.ascontiguousarray(rows[:, -1]).view(np.int32)
        if spec.width:
          chunk[f'factors_{spec.name}'] = rows[:, start:-1][chunk['admitted'][own]]
      yield chunk | {'linear': linear, 'last_step': last}

  def import_state(self, source, replace=True):
    """As ops.row_store.RowStore.import_state, of chunks."""
    if replace:
      self.clear()
    for chunk in source:
      self._ops.ctr_lifecycle_import(self.handle, **{name: chunk[name] for name in COLUMNS})
      keys = tf.constant(chunk['key'])
      for t, spec in enumerate(self.tables):
        own = self._of_table(keys, t).numpy()
        start = self._linear_floats[t]
        rows = np.zeros([len(own), start + self._factor_floats[t] + 1], np.float32)
        rows[:, :start], rows[:, -1] = chunk['linear'][own, :start], chunk['last_step'][own].view(np.float32)
        if spec.width:
          rows[chunk['admitted'][own], start:-1] = chunk[f'factors_{spec.name}']
        self._rows[t].upsert(tf.gather(keys, own), tf.constant(rows))
