"""Losses against their closed forms."""

import numpy as np
import tensorflow as tf

from trainer.config import Model
from trainer.model.losses import per_sample_loss

Y = np.array([0, 1, 0, 1, 1, 0], np.float32)
Z = np.array([[-3.0], [-3.0], [2.0], [2.0], [0.0], [0.5]], np.float32)
P = 1 / (1 + np.exp(-Z[:, 0].astype(np.float64)))


def loss(**args):
  return per_sample_loss(Model(interactions=['linear'], **args))


class LossesTest(tf.test.TestCase):
  def test_log_loss(self):
    self.assertAllClose(loss()(Y, Z), -np.log(np.where(Y > 0, P, 1 - P)))

  def test_label_smoothing(self):
    y = Y * 0.8 + 0.1
    self.assertAllClose(loss(label_smoothing=0.2)(Y, Z), -y * np.log(P) - (1 - y) * np.log(1 - P))

  def test_focal(self):
    right = np.where(Y > 0, P, 1 - P)
    self.assertAllClose(loss(loss='focal')(Y, Z), -((1 - right) ** 2) * np.log(right))
    self.assertAllClose(
      loss(loss='focal', focal_gamma=0.5)(Y, Z), -((1 - right) ** 0.5) * np.log(right)
    )
    self.assertAllClose(loss(loss='focal', focal_gamma=0)(Y, Z), loss()(Y, Z))

  def test_fake_negative_is_log_loss_of_the_final_label(self):
    negative, positive = tf.zeros_like(Y), tf.ones_like(Y)
    late = loss(loss='fake_negative')
    self.assertAllClose(late(negative, Z), loss()(negative, Z))
    self.assertAllClose(late(negative, Z) + late(positive, Z), loss()(positive, Z), atol=1e-6)
    # Each sample stands as negative, and the share q of them once more as positive.
    q, z = 0.2, tf.Variable([[4.0]])
    for _ in range(100):
      with tf.GradientTape() as tape:
        both = late(tf.constant([0.0, 1.0]), tf.repeat(z, 2, 0))
        expected = both[0] + q * both[1]
      gradient = tape.gradient(expected, z)
      self.assertAllClose(gradient, tf.sigmoid(z) - q, atol=1e-6)
      z.assign_sub(5 * gradient)
    self.assertAllClose(tf.sigmoid(z), [[q]], atol=1e-4)

  def test_squared_error(self):
    y = np.array([0.5, -2, 0, 1, 7, 3], np.float32)
    self.assertAllClose(loss(loss='squared_error')(y, Z), (y - Z[:, 0]) ** 2)

  def test_squared_error_without_label_smoothing(self):
    y = np.array([0.5, -2, 0, 1, 7, 3], np.float32)
    self.assertAllEqual(
      loss(loss='squared_error', label_smoothing=0.1)(y, Z), loss(loss='squared_error')(y, Z)
    )

  def test_far_out_logits_keep_loss_and_gradient_finite(self):
    z = tf.constant([[-90.0], [90.0], [-90.0], [90.0]])
    for args in ({}, {'loss': 'focal'}, {'loss': 'focal', 'focal_gamma': 0.5}):
      with tf.GradientTape() as tape:
        tape.watch(z)
        value = loss(**args)(tf.constant([0.0, 0.0, 1.0, 1.0]), z)
      self.assertAllClose(value, [0, 90, 90, 0])
      self.assertAllClose(tape.gradient(value, z)[:, 0], [0, 1, -1, 0])

  def test_no_samples(self):
    self.assertEqual(loss()(tf.zeros([0]), tf.zeros([0, 1])).shape, [0])
