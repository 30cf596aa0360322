"""Field-aware factorization machine."""

import tensorflow as tf

from ops import ffm as ops
from trainer.embedding.layer_inputs import LayerInputs


class FFM(tf.keras.layers.Layer):
  """Pairs of features, each seen by the other's field.

  Juan et al. 2016, "Field-aware Factorization Machines for CTR Prediction":

      Σ_{i<j} ⟨v_{i,field(j)}, v_{j,field(i)}⟩ x_i x_j

  With A[f, g] = Σ_{i in slot f} x_i v_{i,g} the product ⟨A[f, g], A[g, f]⟩ expands to the sum over
  all i in f and j in g. So summed over f and g, each pair of features in two different slots stands
  twice; for f = g, ‖A[f, f]‖² holds each pair within the slot twice and each feature with itself
  once, which `field_squares` = Σ_i x_i² ‖v_{i,field(i)}‖² takes off again:

      ½ (Σ_{f,g} ⟨A[f, g], A[g, f]⟩ − field_squares)

  That is every pair once, two features of one field included (both look at their own field), as
  libffm counts them. libffm's instance-wise normalisation (on by default there) is not applied:
  scale the values x_i for it.

  Reads `field_factors` [B, F, F·D] and `field_squares` [B]; D is a table's `width`. It has no
  weights of its own. A step holds `field_factors` and its gradient, 8·B·F²·D bytes, and nothing
  else of that size: 13 MB for B 4096, F 10, D 4; 200 MB for F 39.
  """

  needs = frozenset({'field_factors'})

  def call(self, inputs: LayerInputs, training: bool = False) -> tf.Tensor:
    """Returns logits, float32 [B, 1]."""
    # A served graph holds TensorFlow's own ops only.
    sum_of_pairs = ops.pairs if training else ops.pairs_in_plain_ops
    pairs = sum_of_pairs(inputs.field_factors)
    return (pairs - 0.5 * inputs.field_squares)[:, None]
