"""Matrix products in bfloat16 with sums in float32."""

from collections.abc import Sequence

import tensorflow as tf

from ops import float32, library


def available() -> bool:
  """Returns whether there is a GPU, or this processor multiplies in bfloat16 (avx512_bf16)."""
  if tf.config.get_visible_devices('GPU'):
    return True
  with open('/proc/cpuinfo', encoding='ascii', errors='replace') as f:
    flags = next((line.split() for line in f if line.startswith('flags')), [])
  return 'avx512_bf16' in flags


def product(
  a: tf.Tensor | Sequence[tf.Tensor],
  b: tf.Tensor,
  bias: tf.Tensor | None = None,
  relu: bool = False,
  transpose_b: bool = False,
) -> tf.Tensor:
  """Returns a b + bias, or what of it is above 0, with a and b rounded to bfloat16.

  On CPUs a row of it depends on the same row of a alone, to the last bit, whatever the number of
  rows and of threads. GPUs round the product to bfloat16, too. Its gradients are such products.

  Args:
    a: float32 [m, k]; or [m, k_i] of several, whose columns stand side by side.
    b: float32 [k, n], or [n, k] with `transpose_b`.
    bias: float32 [n]; not with `transpose_b`.
    relu: whether what is below 0 becomes 0.
  Returns:
    float32 [m, n].
  """
  parts = a if isinstance(a, (list, tuple)) else [a]
  if tf.config.get_visible_devices('GPU'):
    left, right = (tf.cast(x, tf.bfloat16) for x in (tf.concat(parts, 1), b))
    found = tf.cast(tf.matmul(left, right, transpose_b=transpose_b), tf.float32)
    return float32.finished(found, bias, relu)
  biases = [] if bias is None else [bias]
  return library.load().ctr_bfloat16_product(
    a=parts, b=b, bias=biases, transpose_b=transpose_b, relu=relu
  )


@tf.RegisterGradient('CtrBfloat16Product')
def _gradients(op: tf.Operation, grad: tf.Tensor) -> list[tf.Tensor]:
  parts = op.get_attr('parts')
  a, b, bias = op.inputs[:parts], op.inputs[parts], bool(op.get_attr('biases'))
  shared = {name: op.get_attr(name) for name in ('transpose_b', 'relu')}
  shared |= {'a': list(a), 'b': b, 'product': op.outputs[0], 'grad': grad}
  ops = library.load()
  of_b, of_bias = ops.ctr_bfloat16_product_grad_b(bias=bias, **shared)
  return [*ops.ctr_bfloat16_product_grad_a(**shared), of_b, *([of_bias] if bias else [])]
