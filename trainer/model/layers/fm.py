"""Factorization machine."""

import tensorflow as tf

from trainer.embedding.layer_inputs import LayerInputs


class FM(tf.keras.layers.Layer):
  """Sums the inner products of all pairs of features, also of pairs within one slot.

  Rendle 2010, "Factorization Machines". With x_i the value and v_i the factors of feature i:

      Σ_{i<j} ⟨v_i, v_j⟩ x_i x_j = ½ (‖Σ_i x_i v_i‖² − Σ_i x_i² ‖v_i‖²)

  Reads `totals` of every table, [B, D], whose sum is Σ_i x_i v_i, and `squares`, [B]. All tables
  have the same D. The layer has no weights.
  """

  kind = 'fm'
  needs = {'totals'}
  reads_dense = False
  one_width = True

  def call(self, inputs: LayerInputs, training: bool = False) -> tf.Tensor:
    """Returns logits, float32 [B, 1]."""
    squared_totals = tf.reduce_sum(tf.square(tf.add_n(inputs.totals)), 1, keepdims=True)
    return 0.5 * (squared_totals - inputs.squares[:, None])
