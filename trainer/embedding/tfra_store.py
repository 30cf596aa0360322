"""Rows on TFRA's tables, the portable store: one packed row a feature, one lookup and one upsert a
table and step.

A row is [linear weight, its state | factors, their state | 1 where it has factors | step of its
last update, as bits]; a feature on
probation has zeros for factors. The lifecycle is the same C++ feature table as the fused store's;
only the rows lie elsewhere. A row says
itself whether it has factors, so that whoever reads it while another worker's push admits the
feature sees all of them or none.
"""

import uuid
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow_recommenders_addons import dynamic_embedding as de

from ops import row_optimizers, row_store
from ops.chunks import COLUMNS
from ops.feature_lifecycle import FeatureLifecycle, Remote


class TfraRows(NamedTuple):
  """As ops.row_store.Rows, with the packed rows kept from the pull, so that the push looks nothing
  up.
  """

  offsets: tf.Tensor
  linear: tf.Tensor
  factors: tf.Tensor
  packed: list  # a table each: (which of the keys are its own int32 [n], their rows float32 [n, R])


class TfraStore(FeatureLifecycle):
  """The verbs of ops.row_store.RowStore on TFRA's tables; its arguments are the same.

  In a v1 graph the tables are shared by the names of their nodes: between processes that build the
    same graph.
  """

  def __init__(self, policy=None, *, tables, slot_table, seed=0, name=None):
    super().__init__(policy, name)
    self.tables, self.slot_table, self._seed = tables, slot_table, seed
    self.widths = [t.width for t in tables]
    self._linear_floats = [1 + row_optimizers.state_floats(t.linear, 1) for t in tables]
    self._factor_floats = [
      t.width + row_optimizers.state_floats(t.factors, t.width) for t in tables
    ]
    self._row_sizes = [a + b + 2 for a, b in zip(self._linear_floats, self._factor_floats)]
    self._rows = [
      de.CuckooHashTable(
        tf.int64, tf.float32, tf.zeros([size]), name=f'rows_{t.name}', device='/CPU:0'
      )
      for t, size in zip(tables, self._row_sizes)
    ]
    self._turns = tf.CriticalSection(shared_name=name or uuid.uuid4().hex)

  def remote(self, run):
    """As FeatureLifecycle.remote."""
    store = super().remote(run)
    store._rows = [Remote(table, run) for table in self._rows]
    return store

  def _of_table(self, keys, t):
    slot = tf.cast(tf.bitwise.right_shift(keys, tf.constant(52, tf.int64)), tf.int32)
    return tf.cast(tf.where(tf.equal(tf.gather(self.slot_table, slot), t))[:, 0], tf.int32)

  def _initial(self, keys, t):
    spec = self.tables[t]
    return row_store.initial_factors(keys, self._seed, spec.width, spec.init, spec.init_scale)

  def _packed(self, keys):
    """Rows of all tables: TfraRows.packed."""
    own = [self._of_table(keys, t) for t in range(len(self.tables))]
    return [
      (o, tf.reshape(table.lookup(tf.gather(keys, o)), [-1, size]))
      for o, table, size in zip(own, self._rows, self._row_sizes)
    ]

  def pull(self, keys, train=True):
    """As ops.row_store.RowStore.pull."""
    at_once = train and self.policy.admission == 'none'
    size, packed = tf.size(keys), self._packed(keys)
    linear, widths = tf.zeros([size]), tf.zeros([size], tf.int32)
    for spec, (own, rows) in zip(self.tables, packed):
      linear = tf.tensor_scatter_nd_update(linear, own[:, None], rows[:, 0])
      has = tf.ones_like(own) if at_once else tf.cast(rows[:, -2], tf.int32)
      widths = tf.tensor_scatter_nd_update(widths, own[:, None], has * spec.width)
    offsets = tf.concat([[0], tf.cumsum(widths)], 0)
    factors = tf.zeros([offsets[-1]])
    for t, (own, rows) in enumerate(packed):
      has, places = self._places(offsets, own, t)
      weights = rows[:, self._linear_floats[t] : self._linear_floats[t] + self.widths[t]]
      if at_once and self.widths[t]:
        weights = tf.where(rows[:, -2:-1] > 0, weights, self._initial(tf.gather(keys, own), t))
      factors = tf.tensor_scatter_nd_update(factors, places[:, :, None], tf.gather(weights, has))
    return TfraRows(offsets, linear, factors, packed)

  def _places(self, offsets, own, t):
    """Which of a table's keys have factors (int32 [m]), and where those lie in the flat factors
    (int32 [m, D]).
    """
    starts = tf.gather(offsets, own)
    has = tf.cast(tf.where(tf.gather(offsets, own + 1) > starts)[:, 0], tf.int32)
    return has, tf.gather(starts, has)[:, None] + tf.range(self.widths[t])

  def push(
    self,
    keys,
    rows,
    shows,
    clicks,
    linear_gradient,
    factors_gradient,
    scale,
    hyper,
    step,
    add=False,
  ):
    """As ops.row_store.RowStore.push, of distinct keys.

    Rows that come from elsewhere than a pull here are looked up now, and no other push comes
    between that and their update.
    """
    step, scale = tf.cast(step, tf.int64), tf.broadcast_to(scale, tf.shape(keys))

    def update(part, gradient, scale, last, hyper, kind):
      return row_optimizers.row_update(part, gradient, scale, last, hyper, step, kind, add)

    def push():
      admitted, upserts = self.observe(keys, shows, clicks), []
      for t, (own, old) in enumerate(
        rows.packed if isinstance(rows, TfraRows) else self._packed(keys)
      ):
        spec, own_keys, own_scale = self.tables[t], tf.gather(keys, own), tf.gather(scale, own)
        start, had, last = self._linear_floats[t], old[:, -2] > 0, tf.bitcast(old[:, -1], tf.int32)
        linear = update(
          old[:, :start],
          tf.gather(linear_gradient, own)[:, None],
          own_scale,
          last,
          hyper[t, 0],
          spec.linear,
        )
        factors, has = old[:, start:-2], had | tf.gather(admitted, own)
        if spec.width:
          given = tf.cast(tf.where(has & ~had)[:, 0], tf.int32)
          initial = row_optimizers.row_init(
            self._initial(tf.gather(own_keys, given), t), hyper[t, 1], spec.factors
          )
          factors = tf.tensor_scatter_nd_update(factors, given[:, None], initial)
          trained, places = self._places(rows.offsets, own, t)
          if (
            self.policy.admission != 'none'
          ):  # those that have just been given theirs are not trained yet
            trains = tf.gather(had, trained)
            trained, places = tf.boolean_mask(trained, trains), tf.boolean_mask(places, trains)
          updated = update(
            tf.gather(factors, trained),
            tf.gather(factors_gradient, places),
            tf.gather(own_scale, trained),
            tf.ones_like(trained),
            hyper[t, 1],
            spec.factors,
          )  # 1: their state is there, whatever the step
          factors = tf.tensor_scatter_nd_update(factors, trained[:, None], updated)
        now = last if add else tf.maximum(last, tf.cast(step, tf.int32))
        packed = [
          linear,
          factors,
          tf.cast(has, tf.float32)[:, None],
          tf.bitcast(now, tf.float32)[:, None],
        ]
        upserts.append(self._rows[t].insert(own_keys, tf.concat(packed, 1)))
      return tf.group(upserts)

    return push() if isinstance(rows, TfraRows) else self._turns.execute(push)

  def _forget_rows(self, keys):
    for t, table in enumerate(self._rows):
      table.remove(tf.gather(keys, self._of_table(keys, t)))
    return keys

  def _row_floats(self):
    return max(t.floats for t in self.tables)

  def clear(self):
    super().clear()
    for table in self._rows:
      table.clear()

  def bytes(self):
    """int64 []:

    what the lifecycle allocated and what the rows hold (TFRA does not say what it allocated).
    """
    return super().bytes() + sum(
      table.size() * (8 + 4 * size) for table, size in zip(self._rows, self._row_sizes)
    )

  def _chunks(self, shards):
    """As ops.row_store.RowStore._chunks."""
    for features in super()._chunks(shards):
      chunk = {name: features[name] for name in COLUMNS}
      keys = tf.constant(chunk['key'])
      linear, last = (
        np.zeros([len(keys), max(self._linear_floats)], np.float32),
        np.zeros([len(keys)], np.int32),
      )
      for spec, start, (own, rows) in zip(self.tables, self._linear_floats, self._packed(keys)):
        own, rows = own.numpy(), rows.numpy()
        linear[own, :start], last[own] = (
          rows[:, :start],
          np.ascontiguousarray(rows[:, -1]).view(np.int32),
        )
        if spec.width:
          chunk[f'factors_{spec.name}'] = rows[:, start:-2][chunk['admitted'][own]]
      yield chunk | {'linear': linear, 'last_step': last}

  def import_state(self, source, replace=True):
    """As ops.row_store.RowStore.import_state, of chunks."""
    if replace:
      self.clear()
    for chunk in source:
      self._ops.ctr_lifecycle_import(self.handle, **{name: chunk[name] for name in COLUMNS})
      keys = tf.constant(chunk['key'])
      for t, (spec, start, size) in enumerate(
        zip(self.tables, self._linear_floats, self._row_sizes)
      ):
        own = self._of_table(keys, t).numpy()
        rows, admitted = np.zeros([len(own), size], np.float32), chunk['admitted'][own]
        rows[:, :start], rows[:, -2], rows[:, -1] = (
          chunk['linear'][own, :start],
          admitted,
          chunk['last_step'][own].view(np.float32),
        )
        if spec.width:
          rows[admitted, start:-2] = chunk[f'factors_{spec.name}']
        self._rows[t].insert(tf.gather(keys, own), tf.constant(rows))
