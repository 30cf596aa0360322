"""Matrix products that multiply in bfloat16 and add in float32."""

import time
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from ops import float32, library
from ops.tensors import to_tensor

# `seconds` measures a layer of this width on so many samples, so many times; it takes about 50 ms.
_SAMPLES, _WIDTH, _ROUNDS = 512, 256, 7


def available() -> bool:
  """Returns whether there is a GPU, or a processor that multiplies in bfloat16 (avx512_bf16)."""
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
  """Returns a·b + bias, float32 [m, n], where a and b are first rounded to bfloat16.

  On CPUs with avx512_bf16, row i of the result depends only on row i of a, to the last bit. Other
  CPUs multiply the rounded numbers in float32, and add the terms in another order. On GPUs the bias
  and the result are rounded too, as by a Keras layer with the policy mixed_bfloat16.

  Args:
    a: float32 [m, k], or a list of parts [m, k_i] whose columns are joined.
    b: float32 [k, n], or [n, k] with `transpose_b`, which takes no bias [n].
  """
  parts = a if isinstance(a, (list, tuple)) else [a]
  if tf.config.get_visible_devices('GPU'):
    half = [x if x is None else tf.cast(x, tf.bfloat16) for x in (tf.concat(parts, 1), b, bias)]
    ab = tf.matmul(*half[:2], transpose_b=transpose_b)
    return tf.cast(float32.finished(ab, half[2], relu), tf.float32)
  if not available():
    right = tf.transpose(b) if transpose_b else b
    return float32.finished(_product_of_rounded(tf.concat(parts, 1), right), bias, relu)
  biases = [] if bias is None else [bias]
  return library.load().ctr_bfloat16_product(
    a=parts, b=b, bias=biases, transpose_b=transpose_b, relu=relu
  )


@tf.custom_gradient
def _product_of_rounded(a: tf.Tensor, b: tf.Tensor) -> tuple[tf.Tensor, Callable]:
  """Returns a·b, multiplied in float32; a, b and the gradient are rounded to bfloat16 first."""

  def rounded(x: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.cast(x, tf.bfloat16), tf.float32)

  a, b = rounded(a), rounded(b)

  def gradients(grad: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    grad = rounded(grad)
    return tf.matmul(grad, b, transpose_b=True), tf.matmul(a, grad, transpose_a=True)

  return tf.matmul(a, b), gradients


def seconds() -> dict[str, float]:
  """Returns the least of several measured times of a layer and its gradients, for either dtype."""
  random = np.random.default_rng(0)
  a, b, bias = (
    tf.identity(to_tensor(random.normal(size=shape).astype(np.float32)))  # on the GPU, if any
    for shape in ([_SAMPLES, _WIDTH], [_WIDTH, _WIDTH], [_WIDTH])
  )
  seconds: dict[str, list[float]] = {'float32': [], 'bfloat16': []}
  for _ in range(1 + _ROUNDS):
    for dtype, multiply in (('float32', float32.product), ('bfloat16', product)):
      began = time.perf_counter()
      with tf.GradientTape() as tape:
        tape.watch([a, b, bias])
        layer = multiply(a, b, bias, relu=True)
      tape.gradient(layer, [a, b, bias])[0].numpy()
      seconds[dtype].append(time.perf_counter() - began)
  # The first round warms up.
  return {dtype: min(rounds[1:]) for dtype, rounds in seconds.items()}


@tf.RegisterGradient('CtrBfloat16Product')
def _gradients(op: tf.Operation, grad: tf.Tensor) -> list[tf.Tensor]:
  parts = op.get_attr('parts')
  a, b, bias = op.inputs[:parts], op.inputs[parts], bool(op.get_attr('biases'))
  shared = {name: op.get_attr(name) for name in ('transpose_b', 'relu')}
  shared |= {'a': list(a), 'b': b, 'product': op.outputs[0], 'grad': grad}
  ops = library.load()
  of_b, of_bias = ops.ctr_bfloat16_product_grad_b(bias=bias, **shared)
  return [*ops.ctr_bfloat16_product_grad_a(**shared), of_b, *([of_bias] if bias else [])]
