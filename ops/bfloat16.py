"""Matrix products in bfloat16 with sums in float32."""

import tensorflow as tf

from ops import library


def available() -> bool:
  """Returns whether there is a GPU, or this processor multiplies in bfloat16 (avx512_bf16)."""
  if tf.config.get_visible_devices('GPU'):
    return True
  with open('/proc/cpuinfo', encoding='ascii', errors='replace') as f:
    flags = next((line.split() for line in f if line.startswith('flags')), [])
  return 'avx512_bf16' in flags


def product(
  a: tf.Tensor, b: tf.Tensor, transpose_a: bool = False, transpose_b: bool = False
) -> tf.Tensor:
  """Returns a b, float32 [m, n], with the elements of a and b rounded to bfloat16.

  On CPUs a row of it depends on the same row of a alone, to the last bit, whatever the number of
  rows and of threads. GPUs round the result to bfloat16, too. Its gradients are such products.

  Args:
    a: float32 [m, k], or [k, m] with `transpose_a`.
    b: float32 [k, n], or [n, k] with `transpose_b`.
  """
  if tf.config.get_visible_devices('GPU'):
    rounded = tf.cast(a, tf.bfloat16), tf.cast(b, tf.bfloat16)
    return tf.cast(tf.matmul(*rounded, transpose_a, transpose_b), tf.float32)
  return library.load().ctr_bfloat16_product(
    a=a, b=b, transpose_a=transpose_a, transpose_b=transpose_b
  )


@tf.RegisterGradient('CtrBfloat16Product')
def _gradients(op: tf.Operation, grad: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
  a, b = op.inputs
  a_turned, b_turned = op.get_attr('transpose_a'), op.get_attr('transpose_b')
  if a_turned:
    of_a = product(b, grad, b_turned, True)
  else:
    of_a = product(grad, b, False, not b_turned)
  if b_turned:
    of_b = product(grad, a, True, a_turned)
  else:
    of_b = product(a, grad, not a_turned, False)
  return of_a, of_b
