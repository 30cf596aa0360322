"""Field-weighted factorization machine."""

import numpy as np
import tensorflow as tf

from trainer.embedding.layer_inputs import LayerInputs


class FwFM(tf.keras.layers.Layer):
  """Sums the inner products of all pairs of slots, each times a learned weight.

  Pan et al. 2018, "Field-weighted Factorization Machines for CTR Prediction". With x_i the value
  and v_i the factors of feature i:

      Σ_{f<g} r_{f,g} ⟨S_f, S_g⟩,  S_f = Σ_{i in slot f} x_i v_i

  Pairs of features within one slot do not count, because in the paper a field has one feature. All
  r_{f,g} start at 1, which makes this an FM over slots.

  Reads `factors` of every table, [B, F_t, D]; all tables have the same D. The weights are r,
  float32 [F, F], of which only the part above the diagonal counts.
  """

  kind = 'fwfm'
  needs = {'factors'}
  reads_dense = False
  one_width = True
  axes = {'r': ('fields', 'fields')}
  upper = ('r',)

  def build(self, shapes: LayerInputs) -> None:
    slots = sum(s[1] for s in shapes.factors)
    self._above = np.triu(np.ones([slots, slots], np.float32), 1)
    self._strength = self.add_weight('r', [slots, slots], initializer='ones')
    self.built = True

  def call(self, inputs: LayerInputs, training: bool = False) -> tf.Tensor:
    """Returns logits, float32 [B, 1]."""
    sums = inputs.factors[0] if len(inputs.factors) == 1 else tf.concat(inputs.factors, 1)
    strength = self._above * self._strength
    return _weighted_pairs(sums, strength + tf.transpose(strength))


@tf.custom_gradient
def _weighted_pairs(sums: tf.Tensor, strength: tf.Tensor) -> tuple:
  """Returns ½ Σ_{f,g} r_{f,g} ⟨S_f, S_g⟩, [B, 1], for S [B, F, D] and a symmetric r [F, F]."""
  # This computes every ⟨S_f, S_g⟩ of a sample at once, several times faster than weighting the
  # vectors by r first. The gradient is one matrix product because r is symmetric; automatic
  # differentiation would sum two.
  slots = sums.shape[1]
  products = tf.reshape(tf.matmul(sums, sums, transpose_b=True), [-1, slots * slots])
  weights = tf.reshape(strength, [1, -1])

  def gradient(grad: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return (
      tf.matmul(tf.reshape(grad * weights, [-1, slots, slots]), sums),
      0.5 * tf.reshape(tf.matmul(grad, products, transpose_a=True), [slots, slots]),
    )

  return 0.5 * tf.matmul(products, weights, transpose_b=True), gradient
