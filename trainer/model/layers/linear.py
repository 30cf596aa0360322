"""Logistic regression."""

import tensorflow as tf

from trainer.embedding.layer_inputs import LayerInputs


class Linear(tf.keras.layers.Layer):
  """Computes Σ_i w_i x_i over the features, plus Σ_j u_j dense_j over the dense columns.

  x_i is the value of feature i, and w_i its linear weight, which is kept in the feature's row. The
  layer's own weights are u_j, one for each dense column; they start at 0. The model adds the bias.
  """

  kind = 'linear'
  needs = {'linear'}
  axes = {'dense': ('dense',)}

  def build(self, shapes: LayerInputs) -> None:
    self._weights = None
    if shapes.dense[1]:
      self._weights = self.add_weight('dense', [shapes.dense[1], 1], initializer='zeros')
    self.built = True

  def call(self, inputs: LayerInputs, training: bool = False) -> tf.Tensor:
    """Returns logits, float32 [B, 1]."""
    logits = tf.reduce_sum(inputs.linear, 1, keepdims=True)
    return logits if self._weights is None else logits + inputs.dense @ self._weights
