"""Cross network, version 2."""
import itertools

import tensorflow as tf

from ops import cross as ops
from trainer.layers.embedded import slot_vectors, vector_width


class Cross(tf.keras.layers.Layer):
  """Explicit crosses of bounded degree (Wang et al. 2021, "DCN V2").

      x_0 = slot vectors joined with dense, [B, W]
      x_{l+1} = x_0 ⊙ (x_l W_l + b_l) + x_l,  W_l = V_l U_l with V [W, r], U [r, W] where `low_rank` is r
      logit = x_L · head

  Beside `dnn` in one list this is DCN V2's parallel form: one linear layer over both towers joined is the sum of two heads.

  Args:
    layers: L.
    low_rank: r, or None for full W_l [W, W]. A full layer costs W² multiplications a sample, a low-rank one 2·W·r.
    seed: of the initial weights (Glorot uniform; the biases start at 0).
  """
  needs = frozenset({'factors'})

  def __init__(self, layers=3, low_rank=None, seed=0, name=None):
    super().__init__(name=name)
    for key, value in (('layers', layers), ('low_rank', low_rank)):
      if not (isinstance(value, int) and not isinstance(value, bool) and value > 0) and not (key == 'low_rank' and value is None):
        raise ValueError(f'{key}: found {value!r}; wanted a whole number >= 1' + (' or null' if key == 'low_rank' else ''))
    self._layers, self._rank, self._seed = layers, low_rank, seed

  def build(self, shapes):
    width = vector_width(shapes)
    shape_of = {'w': [width, width]} if self._rank is None else {'v': [width, self._rank], 'u': [self._rank, width]}
    seeds = itertools.count(self._seed)

    def matrix(name, shape):
      return self.add_weight(name, shape, initializer=tf.keras.initializers.GlorotUniform(next(seeds)))
    self._kernels = [[matrix(f'{name}_{l}', shape) for name, shape in shape_of.items()] for l in range(self._layers)]
    self._biases = [self.add_weight(f'b_{l}', [width], initializer='zeros') for l in range(self._layers)]
    self._head = matrix('head', [width, 1])
    self.built = True

  def call(self, embedded, training=False):
    """Embedded -> float32 [B, 1]."""
    parts = slot_vectors(embedded)
    if training and self._rank is not None:  # a served graph holds TensorFlow's own ops only
      v, u = (tf.stack(matrices) for matrices in zip(*self._kernels))
      return ops.logits(parts, v, u, tf.stack(self._biases), self._head[:, 0])[:, None]
    x0 = x = tf.concat(parts, 1)
    for kernels, bias in zip(self._kernels, self._biases):
      product = x
      for kernel in kernels:
        product = product @ kernel
      x += x0 * tf.nn.bias_add(product, bias)
    return x @ self._head
