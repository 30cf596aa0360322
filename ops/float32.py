"""Matrix products in float32, called as those in bfloat16 are."""

from collections.abc import Sequence

import tensorflow as tf


def product(
  a: tf.Tensor | Sequence[tf.Tensor],
  b: tf.Tensor,
  bias: tf.Tensor | None = None,
  relu: bool = False,
  transpose_b: bool = False,
) -> tf.Tensor:
  """Returns a b + bias, or what of it is above 0; `ops.bfloat16.product` in float32.

  Args:
    a: float32 [m, k]; or [m, k_i] of several, whose columns stand side by side.
    b: float32 [k, n], or [n, k] with `transpose_b`.
    bias: float32 [n].
    relu: whether what is below 0 becomes 0.
  Returns:
    float32 [m, n].
  """
  parts = a if isinstance(a, (list, tuple)) else [a]
  # Each part times its rows of b, summed: joining the parts first would copy [m, k] once forward
  # and once backward.
  rows = tf.split(b, [part.shape[1] for part in parts], int(transpose_b))
  found = tf.add_n([tf.matmul(p, r, transpose_b=transpose_b) for p, r in zip(parts, rows)])
  return finished(found, bias, relu)


def finished(found: tf.Tensor, bias: tf.Tensor | None, relu: bool) -> tf.Tensor:
  """Returns a product, [m, n], plus the bias; where `relu`, what of it is above 0."""
  found = found if bias is None else tf.nn.bias_add(found, bias)
  return tf.nn.relu(found) if relu else found
