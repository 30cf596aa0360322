"""Interactions against double loops over features, and their gradients in the rows against finite
differences.
"""

import itertools
import os
import pathlib
import sys

import numpy as np
import tensorflow as tf

from trainer.embedding.layer_inputs import LayerInputs, slot_vectors
from trainer.model.layers.batch_norm import BatchNorm
from trainer.model.layers.cross import Cross
from trainer.model.layers.dlrm import DLRM
from trainer.model.layers.dnn import DNN, dropout
from trainer.model.layers.ffm import FFM
from trainer.model.layers.fm import FM
from trainer.model.layers.fwfm import FwFM
from trainer.model.layers.linear import Linear

F, D, DN, ROWS = 4, 3, 2, 12


class Log:
  """Samples as lists of (slot, row, x), the rows they read, and what pooling makes of both."""

  def __init__(self, samples, seed=0, dtype=tf.float32, tables=((F, D),)):
    rng = np.random.default_rng(seed)
    self.samples, self.tables = samples, tables
    self.linear = rng.normal(size=ROWS)
    self.factors = [rng.normal(size=(ROWS, width)) for _, width in tables]
    self.field_factors = rng.normal(size=(ROWS, F, D))
    self.dense = rng.normal(size=(len(samples), DN))
    self._features = [(b, f, row, x) for b, sample in enumerate(samples) for f, row, x in sample]

  def rows(self):
    return [tf.constant(a, tf.float32) for a in (self.linear, *self.factors, self.field_factors)]

  def pool(self, linear, *factors, norm=None):
    """Slot sums of the rows, in differentiable TensorFlow ops."""
    *factors, field_factors = factors
    batch = len(self.samples)
    b, f, row = (np.array([c[i] for c in self._features], np.int64) for i in range(3))
    x = np.array([c[3] for c in self._features], np.float32)
    segments = b * F + f

    def sums(values):  # [nnz, k] -> [B, F, k]
      return tf.reshape(
        tf.math.unsorted_segment_sum(values * x[:, None], segments, batch * F),
        [batch, F, values.shape[1]],
      )

    def squares(values):
      return tf.math.unsorted_segment_sum(
        tf.reduce_sum(tf.square(values * x[:, None]), 1), b, batch
      )

    starts = np.cumsum([0, *(n for n, _ in self.tables)])
    by_table = [
      sums(tf.gather(v, row))[:, s : s + n] for v, s, (n, _) in zip(factors, starts, self.tables)
    ]
    own_field = tf.gather_nd(field_factors, np.stack([row, f], 1))
    return LayerInputs(
      linear=sums(tf.gather(linear, row)[:, None])[:, :, 0],
      factors=by_table,
      totals=[tf.reduce_sum(t, 1) for t in by_table],
      squares=tf.add_n(
        [
          squares(tf.gather(v, row) * ((f >= s) & (f < s + n)).astype(np.float32)[:, None])
          for v, s, (n, _) in zip(factors, starts, self.tables)
        ]
      ),
      field_factors=sums(tf.reshape(tf.gather(field_factors, row), [-1, F * D])),
      field_squares=squares(own_field),
      norm=None if norm is None else tf.constant(norm, tf.float32),
      dense=tf.constant(self.dense, tf.float32),
    )

  def pairs(self, term):
    """Σ over i < j of term(i, j) x_i x_j of each sample, i and j being (slot, row)."""
    return np.array(
      [
        sum(
          term((f, i), (g, j)) * x * y for (f, i, x), (g, j, y) in itertools.combinations(sample, 2)
        )
        for sample in self.samples
      ]
    )

  def slot_sums(self, sample):
    sums = [np.zeros(self._width(f)) for f in range(F)]
    for f, row, x in sample:
      sums[f] += x * self.factor(f, row)
    return sums

  def _width(self, slot):
    return [width for n, width in self.tables for _ in range(n)][slot]

  def factor(self, slot, row):
    table = int(np.searchsorted(np.cumsum([n for n, _ in self.tables]), slot, side='right'))
    return self.factors[table][row]


ONE_EACH = [[(f, (b * F + f) % ROWS, 1.0) for f in range(F)] for b in range(5)]
# Several features a slot, values of either sign, a feature twice in a sample, empty slots, an empty
# sample.
MANY = [
  [(0, 1, 0.5), (0, 2, -1.5), (0, 3, 1.0), (2, 4, 2.0), (3, 5, 1.0), (3, 6, 0.25)],
  [],
  [(1, 7, 1.0), (1, 7, 1.0), (1, 8, -0.5)],
  [(0, 0, 3.0)],
  [(0, 9, 1.0), (1, 10, 1.0), (2, 11, -1.0), (2, 1, 1.0), (3, 2, 0.1)],
]
LOGS = {'one': ONE_EACH, 'many': MANY, 'none': []}


def built(layer, embedded):
  layer.build(tf.nest.map_structure(lambda t: None if t is None else t.shape, embedded))
  rng = np.random.default_rng(5)
  for v in layer.variables:
    if 'variance' not in v.name:
      v.assign(rng.normal(scale=0.5, size=v.shape))
  return layer


class LayerTestCase(tf.test.TestCase):
  def check(self, layer, oracle, **log_args):
    """Compares logits and gradients with `oracle(log, layer)`, the logits [B], on every log."""
    for name, samples in LOGS.items():
      with self.subTest(log=name):
        log = Log(samples, **log_args)
        rows = log.rows()
        layer = built(layer, log.pool(*rows))
        for training in (False, True):
          logits = layer(log.pool(*rows), training=training)
          self.assertEqual(logits.shape, [len(samples), 1])
          self.assertAllClose(logits[:, 0], oracle(log, layer), rtol=1e-4, atol=1e-4)
          self.check_gradient(layer, log, rows, training)

  def check_gradient(self, layer, log, rows, training):
    """Along random directions in the rows and in the layer's variables: central differences."""
    rng = np.random.default_rng(7)
    weights = tf.constant(rng.normal(size=(len(log.samples), 1)), tf.float32)

    def loss():
      return tf.reduce_sum(weights * layer(log.pool(*rows), training=training))

    with tf.GradientTape() as tape:
      tape.watch(rows)
      value = loss()
    targets = rows + layer.trainable_variables
    gradients = tape.gradient(value, targets, unconnected_gradients='zero')
    original = list(rows)
    for i, (target, gradient) in enumerate(zip(targets, gradients)):
      direction = tf.constant(rng.normal(size=target.shape), tf.float32)
      ends = []
      for step in (1e-2, -1e-2):
        if i < len(rows):
          rows[i] = original[i] + step * direction
        else:
          target.assign_add(step * direction)
        ends.append(loss())
        if i < len(rows):
          rows[i] = original[i]
        else:
          target.assign_sub(step * direction)
      self.assertAllClose(
        tf.reduce_sum(direction * gradient), (ends[0] - ends[1]) / 2e-2, rtol=2e-2, atol=2e-2
      )


class InteractionsTest(LayerTestCase):
  def test_linear(self):
    def oracle(log, layer):
      return (
        np.array([sum(log.linear[row] * x for _, row, x in sample) for sample in log.samples])
        + (log.dense @ layer.variables[0].numpy())[:, 0]
      )

    self.check(Linear(), oracle)

  def test_fm(self):
    self.check(FM(), lambda log, _: log.pairs(lambda i, j: log.factor(*i) @ log.factor(*j)))

  def test_fm_over_two_tables(self):
    self.check(
      FM(),
      lambda log, _: log.pairs(lambda i, j: log.factor(*i) @ log.factor(*j)),
      tables=((1, D), (3, D)),
    )

  def test_ffm(self):
    self.check(
      FFM(),
      lambda log, _: log.pairs(
        lambda i, j: log.field_factors[i[1], j[0]] @ log.field_factors[j[1], i[0]]
      ),
    )

  def test_fwfm(self):
    def oracle(log, layer):
      r = layer.variables[0].numpy()
      return log.pairs(
        lambda i, j: (
          0
          if i[0] == j[0]
          else r[min(i[0], j[0]), max(i[0], j[0])] * log.factor(*i) @ log.factor(*j)
        )
      )

    self.check(FwFM(), oracle)
    self.check(FwFM(), oracle, tables=((3, D), (1, D)))

  def cross_oracle(self, log, layer):
    named = {v.name.split(':')[0]: v.numpy() for v in layer.variables}
    layers = sum(name.startswith('b_') for name in named)
    logits = []
    for sample, dense in zip(log.samples, log.dense):
      x = x0 = np.concatenate([*log.slot_sums(sample), dense])
      for l in range(layers):
        w = named[f'w_{l}'] if f'w_{l}' in named else named[f'v_{l}'] @ named[f'u_{l}']
        x = x0 * (x @ w + named[f'b_{l}']) + x
      logits.append(x @ named['head'][:, 0])
    return np.array(logits)

  def test_cross(self):
    self.check(Cross(layers=2), self.cross_oracle)
    self.check(Cross(layers=2), self.cross_oracle, tables=((1, 2), (3, 5)))

  def test_cross_of_low_rank(self):
    for layers in (1, 2, 3):
      self.check(Cross(layers=layers, low_rank=2), self.cross_oracle)
    self.check(Cross(layers=2, low_rank=3), self.cross_oracle, tables=((1, 2), (3, 5)))

  def dnn_oracle(self, log, layer):
    named = {v.name.split(':')[0]: v.numpy() for v in layer.variables}
    logits = []
    for sample, dense in zip(log.samples, log.dense):
      h = np.concatenate([*log.slot_sums(sample), dense])
      for l in range(2):
        h = np.tanh(h @ named[f'kernel_{l}'] + named[f'bias_{l}'])
      logits.append(h @ named['kernel_2'][:, 0])
    return np.array(logits)

  def test_dnn(self):
    self.check(DNN(hidden=[6, 5], activation='tanh'), self.dnn_oracle)
    self.check(DNN(hidden=[6, 5], activation='tanh'), self.dnn_oracle, tables=((1, 2), (3, 5)))

  def members_of_oracle(self, log, layer):
    """The logit of each member, [B, members]."""
    named = {v.name.split(':')[0]: v.numpy() for v in layer.variables}
    logits = np.zeros([len(log.samples), layer.members])
    for b, (sample, dense) in enumerate(zip(log.samples, log.dense)):
      for m in range(layer.members):
        h = np.concatenate([*log.slot_sums(sample), dense]) * named['signs'][:, m]
        h = np.tanh(h @ named['kernel_0'] + named['bias_0'].reshape(layer.members, -1)[m])
        h = np.tanh(h @ named['kernel_1'] + named['bias_1'])
        logits[b, m] = h @ named['kernel_2'][:, m]
    return logits

  def test_members_of_dnn_share_kernels_and_predict_their_mean(self):
    layer = DNN(hidden=[6, 5], activation='tanh', members=3)
    log = Log(MANY)
    rows = log.rows()
    layer.build(tf.nest.map_structure(lambda t: None if t is None else t.shape, log.pool(*rows)))
    signs = next(v for v in layer.variables if 'signs' in v.name)
    self.assertAllEqual(np.unique(signs), [-10, 10])
    for v in layer.variables:
      v.assign(np.random.default_rng(5).normal(scale=0.5, size=v.shape))
    inputs, wanted = log.pool(*rows), self.members_of_oracle(log, layer)
    self.assertAllClose(layer(inputs, training=True), wanted, rtol=1e-4, atol=1e-4)
    self.assertAllClose(layer(inputs)[:, 0], wanted.mean(1), rtol=1e-4, atol=1e-4)
    self.check_gradient(layer, log, rows, training=False)
    normed = built(DNN(hidden=[6, 5], batch_norm='local', members=3), inputs)
    self.assertEqual(normed(inputs, training=True).shape, [len(MANY), 3])
    with self.assertRaisesRegex(ValueError, 'members: found 2 without hidden layers'):
      DNN(hidden=[], members=2)

  def test_dlrm(self):
    def oracle(log, layer):
      named = {v.name.split(':')[0]: v.numpy() for v in layer.variables}
      logits = []
      for sample, dense in zip(log.samples, log.dense):
        e = dense
        for l in range(2):
          e = np.maximum(e @ named[f'bottom_kernel_{l}'] + named[f'bottom_bias_{l}'], 0)
        vectors = [*log.slot_sums(sample), e]
        dots = [a @ b for i, a in enumerate(vectors) for b in vectors[i + 1 :]]
        h = np.tanh(np.concatenate([e, dots]) @ named['kernel_0'] + named['bias_0'])
        logits.append(h @ named['kernel_1'][:, 0])
      return np.array(logits)

    self.check(DLRM(bottom=[5], hidden=[6], activation='tanh'), oracle)
    self.check(DLRM(bottom=[5], hidden=[6], activation='tanh'), oracle, tables=((1, D), (3, D)))

  def test_dlrm_refuses_slots_of_several_widths(self):
    log = Log(ONE_EACH, tables=((1, 2), (3, 5)))
    with self.assertRaisesRegex(ValueError, 'one width for all slots; found widths'):
      built(DLRM(), log.pool(*log.rows()))

  def test_dnn_with_batch_norm_has_the_gradient_of_its_training_pass(self):
    log = Log(ONE_EACH)
    rows = log.rows()
    layer = built(DNN(hidden=[6, 5], activation='tanh', batch_norm='local'), log.pool(*rows))
    self.check_gradient(layer, log, rows, training=True)

  def test_slot_vectors_are_divided_by_the_norm_of_their_slot(self):
    log = Log(MANY, tables=((1, 2), (3, 5)))
    count = np.array([[sum(f == g for f, _, _ in sample) for g in range(F)] for sample in MANY])
    vectors = tf.concat(slot_vectors(log.pool(*log.rows(), norm=count)), 1)
    expected = [
      np.concatenate([*(s / max(n, 1) for s, n in zip(log.slot_sums(sample), counts)), dense])
      for sample, counts, dense in zip(MANY, count, log.dense)
    ]
    self.assertAllClose(vectors, expected, rtol=1e-5, atol=1e-5)


class BatchNormTest(tf.test.TestCase):
  def reference(self, x, gamma, beta):
    mean, variance = tf.nn.moments(x, 0)
    return tf.nn.batch_normalization(x, mean, variance, beta, gamma, 1e-5)

  def layer(self, sum_across_ranks=None):
    layer = BatchNorm(sum_across_ranks)
    layer.build([None, 3])
    layer.gamma.assign([1.0, 2.0, 0.5])
    layer.beta.assign([0.0, -1.0, 3.0])
    return layer

  def test_equals_the_textbook_and_its_gradient(self):
    layer, x, c = (
      self.layer(),
      tf.random.stateless_normal([9, 3], [1, 2]) * 3 + 1,
      tf.random.stateless_normal([9, 3], [3, 4]),
    )
    grads = []
    for function in (
      lambda: layer(x, training=True),
      lambda: self.reference(x, layer.gamma, layer.beta),
    ):
      with tf.GradientTape() as tape:
        tape.watch(x)
        y = function()
      grads.append((y, *tape.gradient(y, [x, layer.gamma, layer.beta], output_gradients=c)))
    self.assertAllClose(*grads, rtol=1e-4, atol=1e-5)
    self.assertAllClose(layer.moving_mean, 0.1 * tf.reduce_mean(x, 0))
    self.assertAllClose(layer.moving_variance, 0.9 + 0.1 * tf.math.reduce_variance(x, 0))
    self.assertAllClose(
      layer(x),
      (x - layer.moving_mean) / tf.sqrt(layer.moving_variance + 1e-5) * layer.gamma + layer.beta,
      rtol=1e-4,
      atol=1e-5,
    )

  def test_uneven_ranks_equal_one_process(self):
    """Ranks of 6, 3 and 0 samples, made in turn: each is told what the others' sums are."""
    x, c = tf.random.stateless_normal([9, 3], [1, 2]), tf.random.stateless_normal([9, 3], [3, 4])
    whole = self.layer()
    with tf.GradientTape() as tape:
      tape.watch(x)
      y = whole(x, training=True)
    expected = tape.gradient(y, [x, whole.gamma, whole.beta], output_gradients=c)
    parts, own = [slice(0, 6), slice(6, 9), slice(9, 9)], {}

    def run(rank, sums_of):
      calls = itertools.count()

      def sum_across_ranks(sums):
        call = next(calls)
        own[rank, call] = sums
        return sums_of(rank, call, sums)

      layer, part = self.layer(sum_across_ranks), x[parts[rank]]
      with tf.GradientTape() as tape:
        tape.watch(part)
        out = layer(part, training=True)
      return (
        out,
        tape.gradient(out, [part, layer.gamma, layer.beta], output_gradients=c[parts[rank]]),
        layer,
      )

    def summed(calls, known):
      return lambda rank, call, sums: (
        tf.add_n([known[i, call] for i in range(3)]) if call < calls else sums
      )

    # First learn the sums that each rank brings forward, then, given those, backward.
    for calls in range(2):
      known = dict(own)
      for rank in range(3):
        run(rank, summed(calls, known))
    known = dict(own)
    ranks = [run(rank, summed(2, known)) for rank in range(3)]
    self.assertAllClose(tf.concat([out for out, _, _ in ranks], 0), y, rtol=1e-5, atol=1e-5)
    self.assertAllClose(
      tf.concat([g[0] for _, g, _ in ranks], 0), expected[0], rtol=1e-4, atol=1e-5
    )
    for i in (1, 2):
      self.assertAllClose(tf.add_n([g[i] for _, g, _ in ranks]), expected[i], rtol=1e-4, atol=1e-5)
    for _, _, layer in ranks:
      self.assertAllClose(layer.moving_mean, whole.moving_mean)
      self.assertAllClose(layer.moving_variance, whole.moving_variance)

  def test_a_batch_of_none_leaves_the_moving_statistics_alone(self):
    layer, x = self.layer(), tf.zeros([0, 3])
    layer(tf.random.stateless_normal([9, 3], [1, 2]), training=True)
    before = [v.numpy() for v in layer.variables]
    with tf.GradientTape() as tape:
      tape.watch(x)
      y = tf.function(lambda: layer(x, training=True))()
    gradients = tape.gradient(y, [x, layer.gamma, layer.beta])
    self.assertEqual(y.shape, [0, 3])
    self.assertAllEqual(gradients[1], tf.zeros([3]))
    self.assertAllEqual(gradients[2], tf.zeros([3]))
    for v, old in zip(layer.variables, before):
      self.assertAllEqual(v, old)


class DropoutTest(tf.test.TestCase):
  def test_a_rank_drops_what_one_process_drops_in_its_place(self):
    x = tf.random.stateless_uniform([50, 7], [1, 2], 1, 2)
    whole = dropout(x, 0.3, 11, tf.constant([4, 0], tf.int64))
    for start, stop in ((0, 20), (20, 50), (50, 50)):
      self.assertAllEqual(
        dropout(x[start:stop], 0.3, 11, tf.constant([4, start], tf.int64)), whole[start:stop]
      )
    for other in (
      dropout(x, 0.3, 11, tf.constant([5, 0], tf.int64)),
      dropout(x, 0.3, 12, tf.constant([4, 0], tf.int64)),
    ):
      self.assertNotAllEqual(whole == 0, other == 0)

  def test_drops_a_share_and_keeps_the_mean(self):
    out = dropout(tf.ones([4000, 5]), 0.3, 1, tf.constant([1, 0], tf.int64)).numpy()
    self.assertAllClose((out == 0).mean(0), [0.3] * 5, atol=0.03)
    self.assertAllClose(out[out != 0], np.full((out != 0).sum(), 1 / 0.7))

  def test_says_what_it_misses(self):
    log = Log(ONE_EACH)
    embedded = log.pool(*log.rows())
    layer = built(DNN(hidden=[4], dropout=0.5), embedded)
    with self.assertRaisesRegex(ValueError, 'dropout needs LayerInputs.position'):
      layer(embedded, training=True)
    placed = embedded._replace(position=tf.constant([1, 0], tf.int64))
    self.assertAllClose(layer(placed, training=False), layer(embedded, training=False))
    self.assertNotAllClose(layer(placed, training=True), layer(embedded, training=False))


class OwnInteractionTest(LayerTestCase):
  def test_the_example_equals_its_formula(self):
    tf.keras.utils.set_random_seed(1)  # it leaves its initialisers unseeded
    sys.path.insert(
      0, os.path.join(pathlib.Path(__file__).parents[3], 'examples', 'own_interaction')
    )
    try:
      from bi_interaction import BiInteraction
    finally:
      del sys.path[0]

    def oracle(log, layer):
      named = {
        v.name.split('/')[-2] + '/' + v.name.split('/')[-1].split(':')[0]: v.numpy()
        for v in layer.variables
      }
      logits = []
      for sample in log.samples:
        sums = log.slot_sums(sample)
        pooled = sum((a * b for a, b in itertools.combinations(sums, 2)), np.zeros(D))
        hidden = np.maximum(pooled @ named['hidden/kernel'] + named['hidden/bias'], 0)
        logits.append(hidden @ named['head/kernel'][:, 0])
      return np.array(logits)

    self.check(BiInteraction(units=6), oracle)
