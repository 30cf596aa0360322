"""An interaction of one's own:

any Keras layer that says what it `needs` and gives logits [B, 1].
"""

import tensorflow as tf

from trainer.embedding.layer_inputs import LayerInputs


class BiInteraction(tf.keras.layers.Layer):
  """A hidden layer over the bi-interaction of slots (He & Chua 2017, "Neural Factorization
  Machines").

  p = Σ_{f<g} S_f ⊙ S_g = ½ ((Σ_f S_f)² − Σ_f S_f²), [B, D];  logit = relu(p K + c) · head
  """

  needs = {'factors'}

  def __init__(self, units: int = 64, name: str | None = None):
    super().__init__(name=name)
    if units < 1:
      raise ValueError(f'units: found {units}; wanted a whole number >= 1')
    self.hidden = tf.keras.layers.Dense(units, 'relu', name='hidden')
    self.head = tf.keras.layers.Dense(1, use_bias=False, name='head')

  def call(self, inputs: LayerInputs, training: bool = False) -> tf.Tensor:
    sums = tf.concat(inputs.factors, 1)  # [B, F, D]
    pooled = 0.5 * (tf.square(tf.reduce_sum(sums, 1)) - tf.reduce_sum(tf.square(sums), 1))
    return self.head(self.hidden(pooled))
