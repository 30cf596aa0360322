"""Row optimizers against Keras' where the semantics coincide, and against NumPy."""

import os

os.environ.setdefault('TF_USE_LEGACY_KERAS', '1')
import dataclasses
import pathlib
import re

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from ops import row_kinds, row_optimizers, row_store
from tests.support import row_oracle
from tests.support.row_oracle import Optimizer

KERAS = tf.keras.optimizers.legacy
ROWS, DIM, STEPS = 7, 37, 25  # more elements than one block of the C++ holds


def one_hyper(o):
  return row_optimizers.hyper([(o, o)])[0, 1]


class RowOptimizersTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.parameters(
    (Optimizer('sgd'), KERAS.SGD(0.05)),
    (Optimizer('adagrad'), KERAS.Adagrad(0.05, initial_accumulator_value=0.1)),
    (Optimizer('adam'), KERAS.Adam(0.05)),
    (Optimizer('rmsprop', beta2=0.9), KERAS.RMSprop(0.05, rho=0.9)),
    (Optimizer('ftrl'), KERAS.Ftrl(0.05)),
    (
      Optimizer('ftrl', l1=0.5, l2=0.3),
      KERAS.Ftrl(0.05, l1_regularization_strength=0.5, l2_regularization_strength=0.15),
    ),
  )
  def test_equals_keras_on_rows_touched_at_every_step(self, ours, keras):
    rng = np.random.default_rng(1)
    start = (
      np.zeros([ROWS, DIM], np.float32)
      if ours.kind == 'ftrl'
      else rng.normal(size=[ROWS, DIM]).astype(np.float32)
    )
    variable, rows = tf.Variable(start), row_optimizers.row_init(start, one_hyper(ours), ours.kind)
    for step in range(1, STEPS + 1):
      g = rng.normal(size=[ROWS, DIM]).astype(np.float32)
      keras.apply_gradients([(tf.constant(g), variable)])
      rows = row_optimizers.row_update(
        rows, g, [1.0], np.full(ROWS, step - 1), one_hyper(ours), step, ours.kind
      )
    self.assertAllClose(rows[:, :DIM], variable, rtol=2e-5, atol=2e-6)
    if ours.kind == 'ftrl' and ours.l1:
      self.assertGreater(np.sum(rows[:, :DIM].numpy() == 0), 0)
      self.assertAllEqual(rows[:, :DIM] == 0, variable == 0)

  def test_the_table_of_row_optimizers_is_that_of_the_c_plus_plus(self):
    header = (pathlib.Path(row_optimizers.__file__).parent / 'cc/rows/row_optimizers.h').read_text()
    struct = header.partition('struct RowHyper {')[2].partition('}')[0]
    self.assertEqual(tuple(re.findall(r'float (\w+);', struct)), row_kinds.HYPER_FIELDS)
    weights = np.ones([1, DIM], np.float32)
    changes = {'initial_accumulator': 0.9, 'beta1': 0.5, 'beta2': 0.5, 'epsilon': 0.1}

    def stepped(o):
      hyper = one_hyper(o)
      rows = row_optimizers.row_init(weights, hyper, o.kind)
      self.assertEqual(rows.shape[1], DIM + row_optimizers.state_floats(o.kind, DIM))
      for step in (1, 2, 3):
        gradient = np.full([1, DIM], 0.3 * step, np.float32)
        rows = row_optimizers.row_update(rows, gradient, [1.0], [step - 1], hyper, step, o.kind)
      return rows[:, :DIM].numpy().tolist()

    for kind, rule in row_kinds.ROW_OPTIMIZERS.items():
      usual = Optimizer(kind, l1=0.01, l2=0.01, clip=0.5, initial_accumulator=0.2)
      for key, value in changes.items():
        same = stepped(usual) == stepped(dataclasses.replace(usual, **{key: value}))
        self.assertEqual(same, key not in rule.reads, (kind, key))

  @parameterized.product(
    kind=list(row_kinds.ROW_OPTIMIZERS), dim=[1, 8, 37], mode=['touch', 'catch_up']
  )
  def test_equals_numpy(self, kind, dim, mode):
    o = Optimizer(kind, l1=0.01, l2=0.2, l2_mode=mode, clip=1.5, learning_rate=0.07, beta2=0.95)
    rng = np.random.default_rng(2)
    w = rng.normal(size=[ROWS, dim]).astype(np.float32)
    rows = row_optimizers.row_init(w, one_hyper(o), kind).numpy()
    w, states = (
      list(w.astype(np.float64)),
      [row_oracle.fresh_state(o, x) for x in w.astype(np.float64)],
    )
    last = np.zeros(ROWS, np.int32)
    for step in range(1, STEPS + 1):
      touched = np.flatnonzero(rng.random(ROWS) < 0.5)  # a row misses steps
      g = (3 * rng.normal(size=[len(touched), dim])).astype(np.float32)
      scale = rng.uniform(0.3, 1, len(touched)).astype(np.float32)
      before = rows.copy()
      rows[touched] = row_optimizers.row_update(
        rows[touched], g, scale, last[touched], one_hyper(o), step, kind
      )
      for i, j in enumerate(touched):
        missed = max(0, step - 1 - last[j]) if last[j] else 0
        w[j] = row_oracle.step_row(
          o, w[j], states[j], g[i].astype(np.float64), float(scale[i]), step, missed
        )
      last[touched] = step
      self.assertAllEqual(np.delete(rows, touched, 0), np.delete(before, touched, 0))
    self.assertAllClose(rows[:, :dim], np.stack(w), rtol=2e-4, atol=2e-5)
    if states[0]:
      self.assertAllClose(
        rows[:, dim:],
        np.stack([np.concatenate(list(s.values())) for s in states]),
        rtol=2e-4,
        atol=2e-5,
      )

  @parameterized.parameters(
    (Optimizer('sgd', l2=0.1, l2_mode='catch_up'), KERAS.SGD(0.05)),
    (
      Optimizer('adagrad', l2=0.1, l2_mode='catch_up'),
      KERAS.Adagrad(0.05, initial_accumulator_value=0.1),
    ),
    (Optimizer('adam', l2=0.1, l2_mode='catch_up'), KERAS.Adam(0.05)),
    (Optimizer('adam', l2=0.0, l2_mode='catch_up'), KERAS.Adam(0.05)),
    (Optimizer('rmsprop', beta2=0.9, l2=0.1, l2_mode='catch_up'), KERAS.RMSprop(0.05, rho=0.9)),
  )
  def test_catch_up_equals_keras_with_a_penalty_on_the_whole_table(self, ours, keras):
    rng = np.random.default_rng(4)
    start = rng.normal(size=[ROWS, DIM]).astype(np.float32)
    variable, rows = (
      tf.Variable(start),
      row_optimizers.row_init(start, one_hyper(ours), ours.kind).numpy(),
    )
    last = np.zeros(ROWS, np.int32)
    for step in range(1, STEPS + 1):
      touched = np.arange(ROWS) if step in (1, STEPS) else np.flatnonzero(rng.random(ROWS) < 0.3)
      g = np.zeros([ROWS, DIM], np.float32)
      g[touched] = rng.normal(size=[len(touched), DIM])
      keras.apply_gradients([(g + ours.l2 * variable, variable)])
      rows[touched] = row_optimizers.row_update(
        rows[touched], g[touched], [1.0], last[touched], one_hyper(ours), step, ours.kind
      )
      last[touched] = step
    self.assertAllClose(rows[:, :DIM], variable, rtol=2e-4, atol=2e-5)

  def test_ftrl_keeps_initial_weights_and_counts_zeros(self):
    o = Optimizer('ftrl', l1=0.2, l2=0.1)
    w = np.random.default_rng(3).normal(size=[4, 5]).astype(np.float32)
    rows = row_optimizers.row_init(w, one_hyper(o), 'ftrl')
    rows = row_optimizers.row_update(
      rows, tf.zeros([4, 5]), [1.0], tf.ones([4], tf.int32), one_hyper(o), 2, 'ftrl'
    )
    self.assertAllClose(rows[:, :5], w, rtol=1e-5)
    rows = row_optimizers.row_update(
      tf.zeros([4, 15]),
      tf.fill([4, 5], 0.1),
      [1.0],
      tf.zeros([4], tf.int32),
      one_hyper(o),
      1,
      'ftrl',
    )
    self.assertAllEqual(rows[:, :5], np.zeros([4, 5]))  # |z| = 0.1 <= l1

  @parameterized.parameters(*row_kinds.ROW_OPTIMIZERS)
  def test_a_lower_rate_makes_smaller_steps_and_moves_no_weight_itself(self, kind):
    o = Optimizer(kind, l1=0.01 if kind == 'ftrl' else 0.0)
    rng = np.random.default_rng(5)
    start = rng.normal(size=[4, DIM]).astype(np.float32)
    rows = row_optimizers.row_init(start, one_hyper(o), kind).numpy()
    for step in range(1, 4):
      g = rng.normal(size=[4, DIM]).astype(np.float32)
      rows = row_optimizers.row_update(
        rows, g, [1.0], np.full(4, step - 1), one_hyper(o), step, kind
      )

    def moved(factor):
      lower = one_hyper(dataclasses.replace(o, learning_rate=o.learning_rate * factor))
      then = row_optimizers.row_update(rows, g, [1.0], np.full(4, 3), lower, 4, kind)
      return np.abs(then[:, :DIM] - rows[:, :DIM])

    self.assertTrue(np.all(moved(0.1) <= 0.11 * moved(1.0) + 1e-6))

  def test_never_updated_row_gets_its_state_first(self):
    o = Optimizer('adagrad', initial_accumulator=0.7)
    rows = row_optimizers.row_update([[1.0, 99.0]], [[2.0]], [1.0], [0], one_hyper(o), 1, 'adagrad')
    self.assertAllClose(rows, [[1 - 0.05 * 2 / np.sqrt(4.7), 4.7]], rtol=1e-6)

  def test_state_floats(self):
    for kind in row_kinds.ROW_OPTIMIZERS:
      for dim in (1, 5):
        rows = row_optimizers.row_init(tf.zeros([3, dim]), one_hyper(Optimizer(kind)), kind)
        self.assertEqual(rows.shape[1], dim + row_optimizers.state_floats(kind, dim))

  @parameterized.parameters(
    dict(learning_rate=-1),
    dict(learning_rate=float('nan')),
    dict(beta2=1.0),
    dict(l1=-1),
    dict(clip=0.0),
    dict(epsilon=float('inf')),
    dict(l2=float('nan')),
  )
  def test_hostile_hyper(self, **fields):
    o = Optimizer('adam', **fields)
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, f'{next(iter(fields))}: found'):
      row_optimizers.row_update(tf.zeros([1, 3]), [[1.0]], [1.0], [0], one_hyper(o), 1, 'adam')

  def test_hostile_shapes(self):
    h = one_hyper(Optimizer())
    good = dict(
      rows=tf.zeros([2, 6]),
      gradient=tf.zeros([2, 3]),
      scale=[1.0],
      last_step=[0, 0],
      hyper=h,
      step=1,
      kind='adagrad',
    )
    row_optimizers.row_update(**good)
    for name, wrong in (
      ('rows', tf.zeros([2, 5])),
      ('rows', tf.zeros([3, 6])),
      ('gradient', tf.zeros([2, 0])),
      ('scale', tf.zeros([3])),
      ('last_step', [0]),
      ('hyper', tf.zeros([4])),
      ('step', tf.constant(0, tf.int64)),
      ('step', 2**31),
    ):
      with self.assertRaises(tf.errors.InvalidArgumentError, msg=name):
        row_optimizers.row_update(**{**good, name: wrong})
    with self.assertRaises(tf.errors.InvalidArgumentError):
      row_optimizers.row_update(**{**good, 'rows': tf.zeros([6])})


class InitialFactorsTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.product(width=[1, 2, 7, 16], seed=[0, 12345])
  def test_equals_numpy(self, width, seed):
    keys = np.concatenate([np.arange(50), (np.arange(50) << 52) + 7])
    found = row_store.initial_factors(keys, seed, width, 0.3)
    self.assertAllClose(
      found, row_oracle.initial_factors(keys, seed, width, 0.3), rtol=1e-6, atol=1e-8
    )

  def test_is_distributed_as_said(self):
    x = row_store.initial_factors(np.arange(20000), 3, 5, 0.5).numpy()
    self.assertAllClose(x.mean(0), np.zeros(5), atol=0.02)
    self.assertAllClose(np.cov(x.T), 0.5**2 * np.eye(5), atol=0.01)

  def test_columns_do_not_depend_on_width_and_seeds_differ(self):
    wide, narrow = (row_store.initial_factors([1, 2, 3], 9, w) for w in (8, 3))
    self.assertAllEqual(wide[:, :3], narrow)
    self.assertNotAllClose(wide, row_store.initial_factors([1, 2, 3], 10, 8))


if __name__ == '__main__':
  tf.test.main()
