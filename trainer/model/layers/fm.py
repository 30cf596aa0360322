"""Factorization machine."""

import tensorflow as tf


class FM(tf.keras.layers.Layer):
  """Pairs of features (Rendle 2010, "Factorization Machines"), those within one slot included.

      Σ_{i<j} ⟨v_i, v_j⟩ x_i x_j = ½ (‖Σ_f S_f‖² − Σ_i x_i² ‖v_i‖²),  S_f = Σ_{i in slot f} x_i v_i

  Reads `totals` [B, D] of every table (one D for all) and `squares` [B]. No weights of its own.
  """

  needs = frozenset({'totals'})

  def call(self, inputs, training=False):
    """LayerInputs -> float32 [B, 1]."""
    return 0.5 * (
      tf.reduce_sum(tf.square(tf.add_n(inputs.totals)), 1, keepdims=True) - inputs.squares[:, None]
    )
