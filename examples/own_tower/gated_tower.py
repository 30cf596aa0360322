"""A tower of one's own: any Keras layer that reads what the tasks share and gives logits [B, 1]."""

import tensorflow as tf

from trainer.embedding.layer_inputs import LayerInputs


class GatedTower(tf.keras.layers.Layer):
  """One hidden layer whose units a gate opens and closes (Dauphin et al. 2017, GLU).

  logit = ((s K + c) ⊙ σ(s G + d)) · head, with s = what `model.shared` gives for the task
  """

  needs = {'shared'}

  def __init__(self, units: int = 16, name: str | None = None):
    super().__init__(name=name)
    self.hidden = tf.keras.layers.Dense(units, name='hidden')
    self.gate = tf.keras.layers.Dense(units, 'sigmoid', name='gate')
    self.head = tf.keras.layers.Dense(1, use_bias=False, name='head')

  def call(self, inputs: LayerInputs, training: bool = False) -> tf.Tensor:
    return self.head(self.hidden(inputs.shared) * self.gate(inputs.shared))
