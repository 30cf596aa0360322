"""Field-aware factorization machine."""

import tensorflow as tf

from ops import ffm as ops
from trainer.embedding.layer_inputs import LayerInputs


class FFM(tf.keras.layers.Layer):
  """Sums the inner products of all pairs of features, each with its factors for the other's field.

  Juan et al. 2016, "Field-aware Factorization Machines for CTR Prediction". With x_i the value of
  feature i, and v_{i,g} its factors for field g (a slot), the logit is

      Σ_{i<j} ⟨v_{i,field(j)}, v_{j,field(i)}⟩ x_i x_j

  It is computed from sums over slots, A[f, g] = Σ_{i in slot f} x_i v_{i,g}, as

      ½ (Σ_{f,g} ⟨A[f, g], A[g, f]⟩ − field_squares),  field_squares = Σ_i x_i² ‖v_{i,field(i)}‖²

  because the sum over f and g has every pair of features twice, and each feature with itself once.
  As in libffm, pairs within one field count, with the factors for their own field. libffm also
  normalises each sample by default; for that, scale the values x_i.

  Reads `field_factors` [B, F, F·D], which is A, and `field_squares` [B]; D is the table's `width`.
  The layer has no weights. A step holds `field_factors` and its gradient, 8·B·F²·D bytes: 13 MB for
  B 4096, F 10, D 4; 200 MB for F 39.
  """

  kind = 'ffm'
  needs = {'field_factors'}
  reads_dense = False
  one_width = True

  def call(self, inputs: LayerInputs, training: bool = False) -> tf.Tensor:
    """Returns logits, float32 [B, 1]."""
    # Served graphs may contain only TensorFlow's own ops.
    sum_of_pairs = ops.pairs if training else ops.pairs_in_plain_ops
    return (sum_of_pairs(inputs.field_factors) - 0.5 * inputs.field_squares)[:, None]
