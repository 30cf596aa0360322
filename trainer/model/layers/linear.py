"""Logistic regression's term."""

import tensorflow as tf


class Linear(tf.keras.layers.Layer):
  """Σ_i w_i x_i over the features, and Σ_j u_j dense_j where `dense_linear`.

  The bias is the model's. The w_i live in rows; u float32 [Dn] is the layer's own and starts at 0.
  """

  needs = frozenset({'linear'})

  def __init__(self, dense_linear=True, name=None):
    super().__init__(name=name)
    self._dense_linear = dense_linear

  def build(self, shapes):
    self._weights = None
    if self._dense_linear and shapes.dense[1]:
      self._weights = self.add_weight('dense', [shapes.dense[1], 1], initializer='zeros')
    self.built = True

  def call(self, inputs, training=False):
    """LayerInputs -> float32 [B, 1]."""
    logits = tf.reduce_sum(inputs.linear, 1, keepdims=True)
    return logits if self._weights is None else logits + inputs.dense @ self._weights
