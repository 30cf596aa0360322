"""Vectors of dense columns against loops in NumPy, and their gradients against differences."""

import os

os.environ.setdefault('TF_USE_LEGACY_KERAS', '1')
import numpy as np
import tensorflow as tf

from tests.support import small
from trainer import config
from trainer.embedding.layer_inputs import LayerInputs, slot_vectors, with_fields
from trainer.errors import ConfigError, UserError
from trainer.model.builder import build, empty_inputs
from trainer.model.layers.autodis import AutoDis
from trainer.model.layers.fm import FM
from trainer.model.layers.piecewise_linear import PiecewiseLinear

SAMPLES, COLUMNS, WIDTH = 7, 3, 4
NONE = dict.fromkeys(LayerInputs._fields)


def of_autodis(x, column, layer):
  first, second, vectors = (v.numpy()[column].astype(np.float64) for v in layer.variables)
  h = x * first
  h = np.where(h > 0, h, 0.2 * h)
  h = h @ second + 0.1 * h
  s = np.exp(h / 0.8)
  return s @ vectors / s.sum()


def of_pieces(x, column, layer):
  (vectors,) = (v.numpy()[column].astype(np.float64) for v in layer.variables)
  knots = [-3, -0.6744898, 0, 0.6744898, 3]  # the quartiles of the normal distribution
  total = vectors[0].copy()
  for k in range(4):
    total += np.interp(x, knots[k : k + 2], [0, 1]) * vectors[k + 1]
  return total


def make(interactions, embedding, **data):
  cfg = small.config(
    data={'train': ['x.csv'], 'slots': [{'name': 'a'}, {'name': 'b'}]} | data,
    model={'interactions': interactions, 'dense_embedding': embedding},
    sparse={'tables': {'default': {'width': WIDTH}}},
  )
  return config.parse(config.dump(cfg), 'test')


class DenseEmbeddingTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    rng = np.random.default_rng(0)
    self.dense = np.float32(rng.normal(size=(SAMPLES, COLUMNS)) * [1, 3, 0.1])
    self.inputs = LayerInputs(**NONE | {'dense': tf.constant(self.dense)})
    self.rng = rng

  def built(self, layer):
    layer.build(LayerInputs(**NONE | {'dense': tf.TensorShape([None, COLUMNS])}))
    for v in layer.variables:
      v.assign(self.rng.normal(size=v.shape))
    return layer

  def test_vectors_and_their_gradients(self):
    for layer, oracle in (
      (AutoDis(bins=5, table_width=WIDTH), of_autodis),
      (PiecewiseLinear(bins=4, table_width=WIDTH), of_pieces),
    ):
      with self.subTest(layer.name):
        layer = self.built(layer)
        wanted = [[oracle(float(x), c, layer) for c, x in enumerate(row)] for row in self.dense]
        self.assertAllClose(layer(self.inputs), wanted, rtol=1e-4, atol=1e-4)
        weights = tf.constant(self.rng.normal(size=[SAMPLES, COLUMNS, WIDTH]), tf.float32)

        def loss(layer=layer, weights=weights):
          return tf.reduce_sum(weights * layer(self.inputs, training=True))

        with tf.GradientTape() as tape:
          value = loss()
        for v, gradient in zip(layer.variables, tape.gradient(value, layer.variables)):
          way = tf.constant(self.rng.normal(size=v.shape), tf.float32)
          ends = []
          for step in (1e-2, -2e-2):
            v.assign_add(step * way)
            ends.append(loss())
          v.assign_add(1e-2 * way)
          self.assertAllClose(
            tf.reduce_sum(way * gradient), (ends[0] - ends[1]) / 2e-2, rtol=2e-2, atol=2e-2
          )

  def test_they_are_fields_beside_the_slots(self):
    slots = self.rng.normal(size=[SAMPLES, 2, WIDTH])
    vectors = self.rng.normal(size=[SAMPLES, COLUMNS, WIDTH])
    inputs = self.inputs._replace(
      factors=[tf.constant(slots, tf.float32)],
      totals=[tf.constant(slots.sum(1), tf.float32)],
      squares=tf.constant((slots**2).sum((1, 2)), tf.float32),
      norm=tf.constant([[2.0, 1.0]] * SAMPLES),
    )
    inputs = with_fields(inputs, tf.constant(vectors, tf.float32))
    every = np.concatenate([slots, vectors], 1)
    pairs = [(i, j) for i in range(2 + COLUMNS) for j in range(i)]
    logits = sum((every[:, i] * every[:, j]).sum(1) for i, j in pairs)
    self.assertAllClose(FM()(inputs)[:, 0], logits, rtol=1e-4, atol=1e-4)
    every[:, 0] /= 2
    wanted = np.concatenate([every.reshape([SAMPLES, -1]), self.dense], 1)
    self.assertAllClose(tf.concat(slot_vectors(inputs), 1), wanted)

  def test_models_read_them(self):
    dense = [{'name': 'x'}, {'name': 'y'}]
    for interactions in (['fm'], ['fwfm', {'dnn': {'hidden': [4]}}], ['cross'], ['dlrm']):
      for embedding in ('autodis', {'piecewise_linear': {'bins': 3}}):
        cfg = make(interactions, embedding, dense=dense)
        model = build(cfg)
        inputs = empty_inputs(cfg, model.needs)
        self.assertEqual(model(inputs).shape, [0, 1])
        self.assertIn('dense_embedding/', ' '.join(v.name for v in model.trainable_variables))

  def test_mistakes(self):
    dense = [{'name': 'x'}]
    for interactions, embedding, data, message in (
      (['linear'], 'autodis', {'dense': dense}, 'dense_embedding.: no interaction reads it'),
      (['fm'], 'autodis', {}, "dense_embedding.: found 'autodis' without data.dense"),
      (['fm'], 'autodic', {'dense': dense}, "unknown layer 'autodic'.*'autodis'"),
      (['fm'], {'autodis': {'bin': 3}}, {'dense': dense}, "unknown argument 'bin'.*'bins'"),
      (['fm'], {'piecewise_linear': {'bins': 0}}, {'dense': dense}, 'bins: found 0; wanted'),
      (['fm'], 'linear', {'dense': dense}, "unknown layer 'linear'"),
    ):
      with self.assertRaisesRegex((ConfigError, UserError, ValueError), message):
        build(make(interactions, embedding, **data))


if __name__ == '__main__':
  tf.test.main()
