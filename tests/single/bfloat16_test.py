"""Products in bfloat16 against NumPy, and training steps that multiply so."""

import numpy as np
import tensorflow as tf

from ops import bfloat16
from tests.support.steps import make_config
from trainer.embedding.layer_inputs import LayerInputs
from trainer.errors import UserError
from trainer.model.builder import build

WANTED = 'wants a processor with avx512_bf16'


def rounded(x: np.ndarray) -> np.ndarray:
  return tf.cast(tf.cast(x, tf.bfloat16), tf.float32).numpy().astype(np.float64)


class ProductTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    if not bfloat16.available():
      self.skipTest(WANTED)
    self.random = np.random.default_rng(0)

  def matrix(self, *shape: int) -> np.ndarray:
    return self.random.normal(size=shape).astype(np.float32)

  def test_product_and_gradients_round_their_factors_and_nothing_else(self):
    for m, k, n in ((70, 101, 65), (1, 3, 1), (0, 4, 5), (5, 0, 4), (4, 3, 0)):
      for turned_a in (False, True):
        for turned_b in (False, True):
          a = self.matrix(*((k, m) if turned_a else (m, k)))
          b = self.matrix(*((n, k) if turned_b else (k, n)))
          grad = self.matrix(m, n)
          left, right = tf.constant(a), tf.constant(b)
          with tf.GradientTape() as tape:
            tape.watch([left, right])
            product = bfloat16.product(left, right, turned_a, turned_b)
          of_a, of_b = tape.gradient(product, [left, right], tf.constant(grad))
          plain_a = rounded(a).T if turned_a else rounded(a)
          plain_b = rounded(b).T if turned_b else rounded(b)
          wanted_a, wanted_b = rounded(grad) @ plain_b.T, plain_a.T @ rounded(grad)
          self.assertAllClose(product, plain_a @ plain_b, rtol=1e-5, atol=1e-4)
          self.assertAllClose(of_a, wanted_a.T if turned_a else wanted_a, rtol=1e-5, atol=1e-4)
          self.assertAllClose(of_b, wanted_b.T if turned_b else wanted_b, rtol=1e-5, atol=1e-4)

  def test_shapes_that_do_not_fit_are_refused(self):
    for a, b in (((2, 3), (4, 5)), ((2,), (2, 3)), ((2, 3), (3, 4, 5))):
      with self.assertRaises((tf.errors.InvalidArgumentError, ValueError)):
        bfloat16.product(tf.zeros(a), tf.zeros(b))

  def test_what_is_not_finite_stays_so(self):
    product = bfloat16.product(tf.constant([[np.inf, 1], [np.nan, 1]]), tf.ones([2, 1]))
    self.assertAllEqual(np.isfinite(product), [[False], [False]])


class ModelTest(tf.test.TestCase):
  """Layers whose training steps multiply in bfloat16."""

  layers = (
    {'dnn': {'hidden': [16, 8]}},
    {'dlrm': {'bottom': [8], 'hidden': [16]}},
    {'cross': {'layers': 2}},
    {'cross': {'layers': 2, 'low_rank': 4}},
  )

  def logits(self, layer: dict, dtype: str, training: bool) -> np.ndarray:
    cfg = make_config({'model.interactions': [layer], 'train.dense_dtype': dtype})
    random = np.random.default_rng(1)
    count = len(cfg.slots)
    width = next(iter(cfg.sparse.tables.values())).width
    normal = random.normal(size=(50, count, width)).astype(np.float32)
    inputs = LayerInputs(
      linear=None,
      factors=[tf.constant(normal)],
      totals=[],
      squares=None,
      field_factors=None,
      field_squares=None,
      norm=None,
      dense=tf.constant(random.normal(size=(50, len(cfg.data.dense))).astype(np.float32)),
    )
    return build(cfg)(inputs, training=training).numpy()

  def test_training_is_near_float32_and_predictions_are_float32(self):
    if not bfloat16.available():
      self.skipTest(WANTED)
    for layer in self.layers:
      exact = self.logits(layer, 'float32', training=True)
      near = self.logits(layer, 'bfloat16', training=True)
      self.assertAllClose(near, exact, rtol=0.02, atol=0.02 * np.abs(exact).max())
      self.assertNotAllEqual(near, exact)
      for training_dtype in ('float32', 'bfloat16'):
        given = self.logits(layer, training_dtype, training=False)
        self.assertAllClose(given, exact, rtol=1e-5, atol=1e-5)

  def test_a_model_without_such_layers_is_refused(self):
    with self.assertRaisesRegex(UserError, 'train.dense_dtype.*no layer of this model'):
      build(make_config({'model.interactions': ['linear', 'fm'], 'train.dense_dtype': 'bfloat16'}))


if __name__ == '__main__':
  tf.test.main()
