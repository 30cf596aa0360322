"""The sum over pairs of fields in a field-aware factorization machine (FFM)."""

import tensorflow as tf

from ops import library

_HOST = 'CPU:0'  # where the kernels are, and the factors: then a GPU receives the sums alone


def pairs(field_factors: tf.Tensor) -> tf.Tensor:
  """Returns ½ Σ_{f,g} ⟨A[f, g], A[g, f]⟩ of each sample, float32 [B].

  The gradient with respect to A[f, g] is A[g, f]. The forward and the backward pass each read the
  factors once.

  Args:
    field_factors: A, float32 [B, F, F·D]. A[f, g], at columns [g·D, (g+1)·D) of row f, is the sum
      over the features in field f of their factors for field g.
  """
  with tf.device(_HOST):
    return library.load().ctr_ffm(factors=field_factors)


@tf.RegisterGradient('CtrFfm')
def _gradient(op: tf.Operation, grad: tf.Tensor) -> tf.Tensor:
  with tf.device(_HOST):
    return library.load().ctr_ffm_grad(factors=op.inputs[0], grad=grad)


def pairs_in_plain_ops(field_factors: tf.Tensor) -> tf.Tensor:
  """Returns what `pairs` returns, computed with TensorFlow's own ops, for served graphs."""
  slots = field_factors.shape[1]
  factors = tf.reshape(field_factors, [-1, slots, slots, field_factors.shape[2] // slots])
  return 0.5 * tf.reduce_sum(factors * tf.transpose(factors, [0, 2, 1, 3]), [1, 2, 3])
