"""The sum over pairs of fields in a field-aware factorization machine (FFM)."""

import tensorflow as tf

from ops import library

_HOST = 'CPU:0'  # the kernels run where the factors are, so that a GPU receives only the sums


def pairs(field_factors: tf.Tensor) -> tf.Tensor:
  """Returns ½ Σ_{f,g} ⟨A[f, g], A[g, f]⟩ over all fields (slots) of each sample, float32 [B].

  A is float32 [B, F, F·D]. A[f, g], the columns [g·D, (g+1)·D) of row f, is the sum of the factors
  for field g of all features in field f.
  """
  with tf.device(_HOST):
    return library.load().ctr_ffm(factors=field_factors)


@tf.RegisterGradient('CtrFfm')
def _gradient(op: tf.Operation, grad: tf.Tensor) -> tf.Tensor:
  with tf.device(_HOST):
    return library.load().ctr_ffm_grad(factors=op.inputs[0], grad=grad)


def pairs_in_plain_ops(field_factors: tf.Tensor) -> tf.Tensor:
  """Computes `pairs` with TensorFlow's own ops, so that a SavedModel does not need our ops."""
  slots = field_factors.shape[1]
  factors = tf.reshape(field_factors, [-1, slots, slots, field_factors.shape[2] // slots])
  return 0.5 * tf.reduce_sum(factors * tf.transpose(factors, [0, 2, 1, 3]), [1, 2, 3])
