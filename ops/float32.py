"""Matrix products in float32, with the interface of `ops.bfloat16.product`."""

from collections.abc import Sequence

import tensorflow as tf


def product(
  a: tf.Tensor | Sequence[tf.Tensor],
  b: tf.Tensor,
  bias: tf.Tensor | None = None,
  relu: bool = False,
  transpose_b: bool = False,
) -> tf.Tensor:
  """Returns a·b + bias in float32; the arguments are those of `ops.bfloat16.product`."""
  parts = a if isinstance(a, (list, tuple)) else [a]
  # Multiplies each part by its rows of b and adds the products. Joining the parts first would copy
  # [m, k] once forward and once backward.
  rows = tf.split(b, [part.shape[1] for part in parts], int(transpose_b))
  ab = tf.add_n([tf.matmul(p, r, transpose_b=transpose_b) for p, r in zip(parts, rows)])
  return finished(ab, bias, relu)


def finished(ab: tf.Tensor, bias: tf.Tensor | None, relu: bool) -> tf.Tensor:
  """Adds the bias [n], if any, to a product [m, n], and applies a ReLU if `relu`."""
  ab = ab if bias is None else tf.nn.bias_add(ab, bias)
  return tf.nn.relu(ab) if relu else ab
