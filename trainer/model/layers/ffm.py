"""Field-aware factorization machine."""

import tensorflow as tf

from ops import ffm as ops
from trainer.embedding.layer_inputs import LayerInputs


class FFM(tf.keras.layers.Layer):
  """Sums the inner products of all pairs of features, each with its factors for the other's field.

  Juan et al. 2016, "Field-aware Factorization Machines for CTR Prediction":

      Σ_{i<j} ⟨v_{i,field(j)}, v_{j,field(i)}⟩ x_i x_j

  With A[f, g] = Σ_{i in slot f} x_i v_{i,g}, ⟨A[f, g], A[g, f]⟩ is the sum over all i in f and j in
  g. The sum over f and g counts each pair of features in two different slots twice. For
  f = g, ‖A[f, f]‖² counts each pair within the slot twice and each feature with itself once; the
  latter are `field_squares` = Σ_i x_i² ‖v_{i,field(i)}‖²:

      ½ (Σ_{f,g} ⟨A[f, g], A[g, f]⟩ − field_squares)

  This counts every pair once, as libffm does, pairs within one field included (each uses the
  factors for its own field). libffm also normalises each instance by default; scale the values x_i
  for that.

  Reads `field_factors` [B, F, F·D] and `field_squares` [B]; D is the table's `width`. It has no
  weights of its own. A step holds `field_factors` and its gradient, 8·B·F²·D bytes: 13 MB for
  B 4096, F 10, D 4; 200 MB for F 39.
  """

  needs = frozenset({'field_factors'})

  def call(self, inputs: LayerInputs, training: bool = False) -> tf.Tensor:
    """Returns logits, float32 [B, 1]."""
    # Served graphs may contain only TensorFlow's own ops.
    sum_of_pairs = ops.pairs if training else ops.pairs_in_plain_ops
    pairs = sum_of_pairs(inputs.field_factors)
    return (pairs - 0.5 * inputs.field_squares)[:, None]
