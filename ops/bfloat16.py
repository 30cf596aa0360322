"""Matrix products in bfloat16 with sums in float32."""

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from ops import float32, library
from ops.tensors import to_tensor

# A layer such as models have, small enough to be timed in some 50 ms: samples, its width, and how
# often it is timed.
_SAMPLES, _WIDTH, _ROUNDS = 512, 256, 7


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

  On CPUs with avx512_bf16 a row of it depends on the same row of a alone, to the last bit, whatever
  the number of rows and of threads. Other CPUs round the factors likewise and multiply in float32,
  which is slower and differs by the order of the sums alone. GPUs round the product to bfloat16,
  too. Its gradients are such products.

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
  if not available():
    right = tf.transpose(b) if transpose_b else b
    return float32.finished(_product_of_rounded(tf.concat(parts, 1), right), bias, relu)
  biases = [] if bias is None else [bias]
  return library.load().ctr_bfloat16_product(
    a=parts, b=b, bias=biases, transpose_b=transpose_b, relu=relu
  )


@tf.custom_gradient
def _product_of_rounded(a: tf.Tensor, b: tf.Tensor) -> tuple[tf.Tensor, Callable]:
  """Returns a b in float32, of factors rounded to bfloat16; its gradients are such products."""

  def rounded(x: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.cast(x, tf.bfloat16), tf.float32)

  a, b = rounded(a), rounded(b)

  def gradients(grad: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    grad = rounded(grad)
    return tf.matmul(grad, b, transpose_b=True), tf.matmul(a, grad, transpose_a=True)

  return tf.matmul(a, b), gradients


def seconds() -> dict[str, float]:
  """Times a typical layer's product with its gradients in each dtype, by turns.

  Returns:
    The median seconds by dtype, float32 and bfloat16.
  """
  random = np.random.default_rng(0)
  a, b, bias = (
    to_tensor(random.normal(size=shape).astype(np.float32))
    for shape in ([_SAMPLES, _WIDTH], [_WIDTH, _WIDTH], [_WIDTH])
  )
  taken: dict[str, list[float]] = {'float32': [], 'bfloat16': []}
  for _ in range(1 + _ROUNDS):
    for dtype, multiply in (('float32', float32.product), ('bfloat16', product)):
      began = time.perf_counter()
      with tf.GradientTape() as tape:
        tape.watch([a, b, bias])
        layer = multiply(a, b, bias, relu=True)
      tape.gradient(layer, [a, b, bias])[0].numpy()
      taken[dtype].append(time.perf_counter() - began)
  # The first round warms up.
  return {dtype: statistics.median(rounds[1:]) for dtype, rounds in taken.items()}


@tf.RegisterGradient('CtrBfloat16Product')
def _gradients(op: tf.Operation, grad: tf.Tensor) -> list[tf.Tensor]:
  parts = op.get_attr('parts')
  a, b, bias = op.inputs[:parts], op.inputs[parts], bool(op.get_attr('biases'))
  shared = {name: op.get_attr(name) for name in ('transpose_b', 'relu')}
  shared |= {'a': list(a), 'b': b, 'product': op.outputs[0], 'grad': grad}
  ops = library.load()
  of_b, of_bias = ops.ctr_bfloat16_product_grad_b(bias=bias, **shared)
  return [*ops.ctr_bfloat16_product_grad_a(**shared), of_b, *([of_bias] if bias else [])]
