"""The cross network of DCN V2."""

import itertools
from collections.abc import Callable

import tensorflow as tf

from ops.float32 import product
from trainer.embedding.layer_inputs import LayerInputs, slot_vectors, vector_width
from trainer.model.layers.arguments import check_whole


class Cross(tf.keras.layers.Layer):
  """Crosses of up to L + 1 features (Wang et al. 2021, "DCN V2").

      x_0 = slot vectors joined with dense columns, [B, W]
      x_{l+1} = x_0 ⊙ (x_l W_l + b_l) + x_l,  with `low_rank` r: W_l = V_l U_l, V [W, r], U [r, W]
      logit = x_L · head

  `cross` and `dnn` in one list of interactions are the parallel form of DCN V2. The paper's linear
  layer on both joined outputs equals the sum of their two logits.

  Args:
    layers: L, the number of cross layers.
    low_rank: r, the rank of W_l; None: W_l is a full matrix [W, W]. A full layer costs W²
      multiplications a sample, a low-rank one 2·W·r.
    multiply: multiplies matrices in training steps, as `train.dense_dtype` says. Predictions use
      float32, and so does the head if `low_rank` is None.
  """

  kind = 'cross'
  needs = {'factors'}
  axes = {
    r'w_\d+': ('joined', 'joined'),
    r'v_\d+|b_\d+|head': ('joined',),
    r'u_\d+': (None, 'joined'),
  }

  def __init__(
    self,
    layers: int = 3,
    low_rank: int | None = None,
    seed: int = 0,
    multiply: Callable[..., tf.Tensor] = product,
    name: str | None = None,
  ):
    super().__init__(name=name)
    check_whole('layers', layers)
    check_whole('low_rank', low_rank, or_null=True)
    self._layers, self._rank, self._seed = layers, low_rank, seed
    self._multiply = multiply

  def build(self, shapes: LayerInputs) -> None:
    width = vector_width(shapes)
    shape_of = {'w': [width, width]}
    if self._rank is not None:
      shape_of = {'v': [width, self._rank], 'u': [self._rank, width]}
    seeds = itertools.count(self._seed)

    def matrix(name: str, shape: list[int]) -> tf.Variable:
      return self.add_weight(
        name, shape, initializer=tf.keras.initializers.GlorotUniform(next(seeds))
      )

    self._kernels = [
      [matrix(f'{name}_{l}', shape) for name, shape in shape_of.items()]
      for l in range(self._layers)
    ]
    self._biases = [
      self.add_weight(f'b_{l}', [width], initializer='zeros') for l in range(self._layers)
    ]
    self._head = matrix('head', [width, 1])
    self.built = True

  def call(self, inputs: LayerInputs, training: bool = False) -> tf.Tensor:
    """Returns logits, float32 [B, 1]."""
    parts = slot_vectors(inputs)
    multiply = self._multiply if training else product
    if self._rank is not None:
      return self._low_rank_logits(parts, multiply)
    x0 = x = tf.concat(parts, 1)
    for (kernel,), bias in zip(self._kernels, self._biases):
      x += x0 * multiply(x, kernel, bias)
    return x @ self._head

  def _low_rank_logits(
    self, parts: list[tf.Tensor], multiply: Callable[..., tf.Tensor]
  ) -> tf.Tensor:
    """Returns the logits of low-rank layers, computed so that few arrays of [B, W] are written.

    `parts` are matrices that join to x_0. With c_l = x_l V_l, [B, r], the layers are

        x_l = x_0 ⊙ z_l
        z_l = 1 + Σ_{k<l} (c_k U_k + b_k) = [1, c_0 … c_{l-1}] [1 + Σ_{k<l} b_k; U_0; …; U_{l-1}]
        logit = x_{L-1}·head + x_0·(head ⊙ b_{L-1}) + ⟨c_{L-1}, x_0 (head ⊙ U_{L-1})ᵀ⟩

    So each z_l is one matrix product, and x_L is never computed.
    """
    v, u = zip(*self._kernels)
    v, head = [tf.transpose(kernel) for kernel in v], tf.transpose(self._head)
    r, widths = self._rank, [part.shape[1] for part in parts]
    # Kernels are [columns, W], so that their gradient is a product of [columns, B] and [B, W]. On
    # CPUs, TensorFlow takes up to three times as long for the product of [W, B] and [B, columns].
    first = tf.concat([v[0], head, head * u[-1], head * self._biases[-1]], 0)
    products = multiply(parts, first, transpose_b=True)
    c, head_of_x, q, bias = tf.split(products, [r, 1, r, 1], 1)
    left = [tf.ones_like(bias), c]
    for l in range(1, len(v)):
      right = tf.concat([1 + tf.add_n(self._biases[:l])[None], *u[:l]], 0)
      z = [multiply(tf.concat(left, 1), columns) for columns in tf.split(right, widths, 1)]
      x = [part * factor for part, factor in zip(parts, z)]
      c, head_of_x = tf.split(multiply(x, tf.concat([v[l], head], 0), transpose_b=True), [r, 1], 1)
      left.append(c)
    return head_of_x + bias + tf.reduce_sum(c * q, 1, keepdims=True)
