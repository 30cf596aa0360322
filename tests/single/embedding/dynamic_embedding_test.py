"""DynamicEmbedding in one process, beside an embedding and an optimizer of Keras."""

import numpy as np
import tensorflow as tf

from ops.policy import Policy
from ops.row_store import initial_factors
from trainer.comm.communicator import SingleProcess
from trainer.config import RowOptimizer
from trainer.data.features import hash_keys
from trainer.embedding.dynamic_embedding import DynamicEmbedding

SLOTS, WIDTH, FEATURES, RATE = 3, 4, 6, 0.5


def loss_of(linear, factors, goal):
  return tf.reduce_sum(linear[:, :, None] * factors * goal + factors)


class DynamicEmbeddingTest(tf.test.TestCase):
  def test_rows_learn_as_an_embedding_of_keras_does(self):
    rng = np.random.default_rng(1)
    layer = DynamicEmbedding(
      SLOTS,
      WIDTH,
      SingleProcess(),
      Policy(admission='none'),
      RowOptimizer(kind='sgd', preset='keras', learning_rate=RATE),
      seed=7,
    )
    every = np.tile(np.arange(FEATURES)[:, None], [1, SLOTS])
    keys = tf.reshape(hash_keys(every, tf.range(1, SLOTS + 1, dtype=tf.int64)), [-1])
    factors = tf.Variable(initial_factors(keys, 7, WIDTH))
    linear = tf.Variable(tf.zeros([FEATURES * SLOTS]))
    optimizer = tf.keras.optimizers.SGD(RATE)
    optimizer.build([linear, factors])
    for size in (5, 0, 1, 8):
      features = rng.integers(0, FEATURES, [size, SLOTS])
      goal = rng.normal(size=[size, SLOTS, WIDTH]).astype(np.float32)
      places = features * SLOTS + np.arange(SLOTS)
      with tf.GradientTape() as tape:
        first, vectors = layer(features, training=True)
        loss = loss_of(first, vectors, goal)
      tape.gradient(loss, layer.trainable_variables)
      with tf.GradientTape() as tape:
        expected = tf.gather(linear, places), tf.gather(factors, places)
        self.assertAllClose(first, expected[0])
        self.assertAllClose(vectors, expected[1])
        loss = loss_of(*expected, goal)
      gradients = tape.gradient(loss, [linear, factors])
      optimizer.apply_gradients(
        (tf.convert_to_tensor(g), v) for g, v in zip(gradients, [linear, factors])
      )
    self.assertGreater(float(tf.reduce_max(tf.abs(linear))), 0.01)

  def test_clicks_admit_and_what_only_reads_changes_nothing(self):
    policy = Policy(admission_threshold=2.0, nonclk_coeff=0.0, clk_coeff=1.0)
    layer = DynamicEmbedding(1, WIDTH, SingleProcess(), policy)
    texts, clicks = tf.constant([['a'], ['b'], ['a']]), tf.constant([1.0, 1.0, 1.0])

    @tf.function(autograph=False)
    def take_step():
      with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(x) for x in layer(texts, clicks, training=True)])
      return tape.gradient(loss, layer.trainable_variables)

    self.assertAllEqual(layer(texts)[1], np.zeros([3, 1, WIDTH]))
    self.assertEqual(int(layer.store.size()), 0)
    self.assertAllEqual(take_step(), [0.0])
    self.assertEqual((int(layer.store.size()), int(layer.store.admitted_size())), (2, 1))
    linear, factors = layer(texts)
    self.assertAllEqual(linear != 0, np.ones([3, 1]))
    self.assertAllEqual(tf.reduce_any(factors != 0, [1, 2]), [True, False, True])

  def test_a_gradient_that_is_not_finite_is_an_error(self):
    layer = DynamicEmbedding(1, WIDTH, SingleProcess())
    with tf.GradientTape() as tape:
      loss = tf.reduce_sum(layer([[1]], training=True)[0]) * np.inf
    with self.assertRaises(tf.errors.OutOfRangeError):
      tape.gradient(loss, layer.trainable_variables)


if __name__ == '__main__':
  tf.test.main()
