"""Pooling against a double loop, and its gradient against finite differences."""

import dataclasses
import os

os.environ.setdefault('TF_USE_LEGACY_KERAS', '1')
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from ops import pooling, row_store
from ops.dedupe import Deduped, dedupe
from ops.library import load
from ops.pooling import PoolLayout
from ops.row_store import FactorPart
from trainer.data.features import average_lists, pool_norm

PLAIN = PoolLayout([0, 0, 0], [[FactorPart('plain', 4)]], totals=True)
FIELD = PoolLayout([0, 0, 0], [[FactorPart('field', 6)]])
BOTH = PoolLayout([0, 0, 0], [[FactorPart('plain', 5), FactorPart('field', 3)]], totals=True)
TABLES = PoolLayout([0, 0, 1], [[FactorPart('plain', 3)], [FactorPart('plain', 17)]], totals=True)
NO_TOTALS = PoolLayout([0, 1, 1], [[FactorPart('plain', 3)], [FactorPart('plain', 2)]])
NO_SLOTS = PoolLayout(
  [0, 0, 1],
  [[FactorPart('plain', 3), FactorPart('field', 6)], [FactorPart('plain', 16)]],
  slots=False,
  totals=True,
)
LINEAR_ONLY = PoolLayout([0, 0, 1], [[], []])
AVERAGED = dataclasses.replace(BOTH, averaged=(True, False, True))
LAYOUTS = [PLAIN, FIELD, BOTH, TABLES, NO_TOTALS, NO_SLOTS, LINEAR_ONLY, AVERAGED]


def with_(array, i, value):
  """Returns a copy of an array with one value changed."""
  array = array.copy()
  array[i] = value
  return array


class Batch(NamedTuple):
  rows: row_store.PulledRows
  deduped: Deduped
  values: np.ndarray
  segments: np.ndarray
  size: int


def make_batch(rng, layout, size=5, fast=False, vocabulary=6, admitted=0.7):
  """Random occurrences; keys are shared between the fields of a table."""
  fields = len(layout.table_of_slot)
  counts = np.ones([size * fields], int) if fast else rng.integers(0, 4, size * fields)
  segments = np.repeat(np.arange(size * fields), counts).astype(np.int32)
  table = np.asarray(layout.table_of_slot)[segments % fields]
  keys = ((table + 1).astype(np.int64) << 52) + rng.integers(0, vocabulary, len(segments))
  d = Deduped(*(x.numpy() for x in dedupe(keys)))
  widths = np.array([sum(p.width for p in parts) for parts in layout.parts])
  width = widths[(d.unique >> 52) - 1] * (rng.random(len(d.unique)) < admitted)
  offsets = np.concatenate([[0], np.cumsum(width)]).astype(np.int32)
  rows = row_store.PulledRows(
    None,
    offsets,
    rng.normal(size=len(width)).astype(np.float32),
    rng.normal(size=offsets[-1]).astype(np.float32),
  )
  values = (
    np.zeros(0, np.float32) if fast else rng.uniform(0.5, 2, len(segments)).astype(np.float32)
  )
  return Batch(rows, d, values, segments[:0] if fast else segments, size)


def double_loop(batch, layout, linear, factors):
  """What `pool` gives, as a flat list, in float64."""
  fields, d = len(layout.table_of_slot), batch.deduped
  n = len(d.inverse)
  segments = batch.segments if len(batch.segments) else np.arange(n)
  values = batch.values if len(batch.values) else np.ones(n)
  pooled_linear = np.zeros([batch.size, fields])
  field = [[p.kind == 'field' for p in parts] for parts in layout.parts]
  slots = [
    [
      np.zeros([batch.size * (layout.slots or field[t][k]), layout.table_of_slot.count(t), p.width])
      for k, p in enumerate(parts)
    ]
    for t, parts in enumerate(layout.parts)
  ]
  totals = [
    [
      np.zeros([batch.size * (layout.totals and not field[t][k]), p.width])
      for k, p in enumerate(parts)
    ]
    for t, parts in enumerate(layout.parts)
  ]
  squares = [
    [np.zeros([batch.size * (layout.totals or field[t][k])]) for k in range(len(parts))]
    for t, parts in enumerate(layout.parts)
  ]
  for i in range(n):
    b, f, j, x = segments[i] // fields, segments[i] % fields, d.inverse[i], float(values[i])
    if layout.averaged and layout.averaged[f]:
      x /= np.count_nonzero(segments == segments[i])
    table = layout.table_of_slot[f]
    pooled_linear[b, f] += x * linear[j]
    row = factors[batch.rows.offsets[j] : batch.rows.offsets[j + 1]]
    if not len(row):
      continue
    for k, p in enumerate(layout.parts[table]):
      v, row = row[: p.width], row[p.width :]
      if len(slots[table][k]):
        slots[table][k][b, f - layout.table_of_slot.index(table)] += x * v
      if len(totals[table][k]):
        totals[table][k][b] += x * v
      if len(squares[table][k]):
        own = v.reshape(fields, -1)[f] if p.kind == 'field' else v
        squares[table][k][b] += x * x * np.dot(own, own)
  return tf.nest.flatten([pooled_linear, slots, totals, squares])


def run(batch, layout, linear=None, factors=None):
  rows = row_store.PulledRows(
    None,
    batch.rows.offsets,
    batch.rows.linear if linear is None else linear,
    batch.rows.factors if factors is None else factors,
  )
  pooled = pooling.pool(rows, batch.deduped, batch.values, batch.segments, batch.size, layout)
  return tf.nest.flatten([pooled.linear, pooled.slots, pooled.totals, pooled.squares])


class PoolTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.product(
    layout=LAYOUTS, fast=[False, True], admitted=[0.0, 0.7, 1.0], size=[0, 1, 40]
  )
  def test_equals_double_loop(self, layout, fast, admitted, size):
    batch = make_batch(np.random.default_rng(1), layout, size, fast, admitted=admitted)
    found, wanted = (
      run(batch, layout),
      double_loop(batch, layout, batch.rows.linear, batch.rows.factors),
    )
    self.assertEqual([list(x.shape) for x in found], [list(x.shape) for x in wanted])
    for f, w in zip(found, wanted):
      self.assertAllClose(f, w, rtol=1e-4, atol=1e-5)

  @parameterized.product(fast=[False, True], size=[0, 1, 50])
  def test_norm_equals_the_served_one(self, fast, size):
    batch = make_batch(np.random.default_rng(7), PLAIN, size, fast)
    values = batch.values
    if len(values) > 9:
      values[:9] = [0, -1, 1, 2, 0, 0, -3, 3, -1]
    poolings = ('mean', 'sum', 'sqrtn')
    for averaged in ((), (True, True, True), (True, False, False)):
      layout = PoolLayout([0, 0, 0], PLAIN.parts, poolings=poolings, averaged=averaged)
      found = pooling.pool(batch.rows, batch.deduped, values, batch.segments, size, layout).norm
      if fast or not size:  # no segments
        self.assertAllEqual(found, np.ones([size, 3]))
        continue
      served = values
      if averaged:
        served = average_lists(tf.constant(values), batch.segments, size, tf.constant(averaged))
      self.assertAllClose(found, pool_norm(served, batch.segments, size, poolings))

  @parameterized.product(layout=LAYOUTS, fast=[False, True])
  def test_gradient_equals_finite_differences(self, layout, fast):
    rng = np.random.default_rng(2)
    batch = make_batch(rng, layout, 6, fast)
    linear, factors = tf.constant(batch.rows.linear), tf.constant(batch.rows.factors)
    with tf.GradientTape() as tape:
      tape.watch([linear, factors])
      out = run(batch, layout, linear, factors)
      weights = [rng.normal(size=x.shape) for x in out]
      loss = tf.add_n([tf.reduce_sum(x * w.astype(np.float32)) for x, w in zip(out, weights)])
    found = tape.gradient(loss, [linear, factors])

    def loss_at(linear, factors):
      return sum(
        np.sum(x * w) for x, w in zip(double_loop(batch, layout, linear, factors), weights)
      )

    point = [batch.rows.linear.astype(np.float64), batch.rows.factors.astype(np.float64)]
    for which in (0, 1):
      wanted = np.zeros(len(point[which]))
      for i in range(len(wanted)):
        moved = [[p.copy() for p in point] for _ in range(2)]
        moved[0][which][i] += 1e-4
        moved[1][which][i] -= 1e-4
        wanted[i] = (loss_at(*moved[0]) - loss_at(*moved[1])) / 2e-4
      self.assertAllClose(found[which], wanted, rtol=1e-3, atol=1e-3)

  def test_large_batch_equals_double_loop(self):
    for layout, fast in ((BOTH, True), (TABLES, False)):  # many blocks of work
      rng = np.random.default_rng(3)
      batch = make_batch(rng, layout, 3000, fast, vocabulary=500)
      linear, factors = tf.constant(batch.rows.linear), tf.constant(batch.rows.factors)
      with tf.GradientTape() as tape:
        tape.watch([linear, factors])
        out = run(batch, layout, linear, factors)
        loss = tf.add_n([tf.reduce_sum(x) for x in out])
      for f, w in zip(out, double_loop(batch, layout, batch.rows.linear, batch.rows.factors)):
        self.assertAllClose(f, w, rtol=1e-4, atol=1e-4)
      linear_grad, factors_grad = tape.gradient(loss, [linear, factors])
      values = batch.values if len(batch.values) else np.ones(len(batch.deduped.inverse))
      self.assertAllClose(linear_grad, np.bincount(batch.deduped.inverse, values), rtol=1e-4)
      # Euler: sums are linear in the factors, squares quadratic.
      self.assertAllClose(
        tf.reduce_sum(factors_grad * factors),
        sum((2 if x.shape.ndims == 1 else 1) * tf.reduce_sum(x) for x in out[1:]),
        rtol=1e-3,
      )

  def test_only_what_is_used_has_a_gradient(self):
    batch = make_batch(np.random.default_rng(4), BOTH)
    linear, factors = tf.constant(batch.rows.linear), tf.constant(batch.rows.factors)

    @tf.function
    def gradients():
      out = pooling.pool(
        row_store.PulledRows(None, batch.rows.offsets, linear, factors),
        batch.deduped,
        batch.values,
        batch.segments,
        batch.size,
        BOTH,
      )
      return tf.gradients(
        tf.reduce_sum(out.linear), [linear, factors], unconnected_gradients='zero'
      )

    linear_grad, factors_grad = gradients()
    self.assertAllClose(linear_grad, np.bincount(batch.deduped.inverse, batch.values))
    self.assertAllEqual(factors_grad, np.zeros(factors.shape))

  def test_in_a_function_of_unknown_sizes(self):
    batch = make_batch(np.random.default_rng(5), PLAIN, 4)
    spec = tf.TensorSpec

    @tf.function(
      input_signature=[
        spec([None], tf.float32),
        spec([None], tf.float32),
        spec([None], tf.int32),
        spec([None], tf.int64),
        spec([None], tf.float32),
        spec([None], tf.int32),
        spec([], tf.int32),
      ]
    )
    def f(linear, factors, offsets, keys, values, segments, size):
      pooled = pooling.pool(
        row_store.PulledRows(None, offsets, linear, factors),
        dedupe(keys),
        values,
        segments,
        size,
        PLAIN,
      )
      self.assertEqual(pooled.linear.shape.as_list(), [None, 3])
      self.assertEqual(pooled.slots[0][0].shape.as_list(), [None, 3, 4])
      return pooled

    keys = batch.deduped.unique[batch.deduped.inverse]
    found = f(
      batch.rows.linear,
      batch.rows.factors,
      batch.rows.offsets,
      keys,
      batch.values,
      batch.segments,
      batch.size,
    )
    self.assertAllClose(
      tf.nest.flatten([found.linear, found.slots, found.totals, found.squares]), run(batch, PLAIN)
    )

  def test_no_features_at_all(self):
    empty = np.zeros([0], np.float32)
    d = dedupe(np.zeros([0], np.int64))
    pooled = pooling.pool(
      row_store.PulledRows(None, [0], empty, empty), d, empty, empty.astype(np.int32), 3, BOTH
    )
    self.assertAllEqual(pooled.linear, np.zeros([3, 3]))
    self.assertAllEqual(pooled.slots[0][0], np.zeros([3, 3, 5]))
    self.assertAllEqual(pooled.squares[0][1], np.zeros([3]))

  def test_hostile_rows_and_samples_are_refused(self):
    batch = make_batch(np.random.default_rng(6), PLAIN, 4, admitted=1.0)
    u, n = len(batch.deduped.unique), len(batch.deduped.inverse)
    inverse, offsets = batch.deduped.inverse, batch.rows.offsets

    wrong = [
      dict(inverse=with_(inverse, 0, u)),
      dict(inverse=with_(inverse, 0, -1)),
      dict(inverse=inverse[1:]),
      dict(segments=batch.segments[::-1]),
      dict(segments=with_(batch.segments, n - 1, 12)),
      dict(segments=with_(batch.segments, 0, -1)),
      dict(values=batch.values[1:]),
      dict(size=-1),
      dict(size=3),
      dict(offsets=with_(offsets, 1, -5)),
      dict(offsets=with_(offsets, u, 10**9)),
      dict(offsets=with_(offsets, 1, 1)),
      dict(offsets=offsets[:0]),
      dict(linear=batch.rows.linear[1:]),
      dict(factors=batch.rows.factors[1:]),
      dict(segments=batch.segments[:0], values=batch.values[:0]),
      dict(size=2**31 - 1),
    ]
    for change in wrong:
      rows = batch.rows._replace(
        **{k: v for k, v in change.items() if k in row_store.PulledRows._fields}
      )
      d = batch.deduped._replace(**{k: v for k, v in change.items() if k in Deduped._fields})
      with self.assertRaises(tf.errors.InvalidArgumentError, msg=str(change)):
        pooling.pool(
          rows,
          d,
          change.get('values', batch.values),
          change.get('segments', batch.segments),
          change.get('size', batch.size),
          PLAIN,
        )

  def test_hostile_inputs_are_refused_by_the_gradient(self):
    batch = make_batch(np.random.default_rng(6), PLAIN, 4, admitted=1.0)
    inverse, starts = batch.deduped.inverse, batch.deduped.starts
    pooled = pooling.pool(
      batch.rows, batch.deduped, batch.values, batch.segments, batch.size, PLAIN
    )
    gradients = [tf.nest.flatten(part) for part in (pooled.slots, pooled.totals, pooled.squares)]

    def gradient(**change):
      inputs = dict(inverse=inverse, starts=starts, segments=batch.segments) | change
      attributes = PLAIN.attributes()
      attributes.pop('parts', None)
      return load().ctr_pool_grad(
        factors=batch.rows.factors,
        offsets=batch.rows.offsets,
        values=batch.values,
        batch_size=batch.size,
        linear_grad=pooled.linear,
        slots_grads=gradients[0],
        totals_grads=gradients[1],
        squares_grads=gradients[2],
        **inputs,
        **attributes,
      )

    gradient()
    for change in (
      dict(inverse=with_(inverse, 0, len(starts) - 1)),
      dict(inverse=with_(inverse, 0, -1)),
      dict(inverse=inverse[1:]),
      dict(starts=with_(starts, 1, len(inverse) + 1)),
      dict(starts=starts[1:]),
      dict(segments=with_(batch.segments, 0, -1)),
    ):
      with self.assertRaises(tf.errors.InvalidArgumentError, msg=str(change)):
        gradient(**change)

  def test_hostile_layouts_are_refused(self):
    batch = make_batch(np.random.default_rng(6), PLAIN, 4, admitted=1.0)
    for layout in (
      dict(table_of_slot=[1, 0, 0]),
      dict(table_of_slot=[0, 0, -1]),
      dict(averaged=[True, False]),
    ):
      with self.assertRaises(tf.errors.InvalidArgumentError):
        run(batch, dataclasses.replace(PLAIN, **layout))
    with self.assertRaisesRegex(ValueError, 'multiple'):
      PoolLayout([0, 0, 0], [[FactorPart('field', 7)]])
    with self.assertRaisesRegex(ValueError, "'plane'"):
      PoolLayout([0], [[FactorPart('plane', 7)]])


if __name__ == '__main__':
  tf.test.main()
