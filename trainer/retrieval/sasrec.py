"""Self-attentive sequential recommendation."""

import tensorflow as tf

from trainer.embedding.layer_inputs import HistoryVectors
from trainer.model.layers.dnn import dropout

_NEVER = -1e30  # the logit of attention to a position that may not be read


class SASRec(tf.keras.layers.Layer):
  """Encodes a history by causal self-attention; its vector is the output at its newest feature.

  Kang and McAuley 2018, "Self-Attentive Sequential Recommendation". x_1 … x_n are the vectors of a
  history, the newest last. p_0, p_1, … are learned vectors of positions, counted from the newest.
  LN is layer normalisation; K, k, L and l are learned weights of each block.

      h_i = dropout(x_i·√D + p_{n − i})
      in each block  a_i = LN(h_i) + dropout(attention of LN(h_i) to h_1 … h_i)
                     h_i = a_i + dropout(relu(LN(a_i) K + k) L + l)
      vector = LN(h_n), [B, D]; 0 for an empty history

  Features without factors are left out. The last block computes only a_n and h_n. A history has at
  most `max_length` features; `layers` is the number of blocks, and `rate` of dropout.
  """

  def __init__(self, max_length: int, layers: int, heads: int, rate: float, seed: int = 0):
    super().__init__(name='sasrec')
    self._max_length, self._blocks, self._heads = max_length, layers, heads
    self._rate, self._seed = rate, seed

  def build(self, shapes: HistoryVectors) -> None:
    width = shapes.vectors[2]
    self._width = width
    glorot = tf.keras.initializers.GlorotUniform
    normal = tf.keras.initializers.RandomNormal(stddev=0.02, seed=self._seed)
    self._places = self.add_weight('places', [self._max_length, width], initializer=normal)
    self._kernels, self._biases, self._norms = {}, {}, {}
    for l in range(self._blocks):
      for i, part in enumerate(('query', 'key', 'value', 'hidden', 'out')):
        initial = glorot(self._seed + 10 * l + i + 1)
        name = f'{part}_{l}'
        self._kernels[name] = self.add_weight(f'{name}_kernel', [width, width], initializer=initial)
        self._biases[name] = self.add_weight(f'{name}_bias', [width], initializer='zeros')
    for name in (*(f'{part}_{l}' for l in range(self._blocks) for part in 'ab'), 'last'):
      self._norms[name] = (
        self.add_weight(f'norm_{name}_scale', [width], initializer='ones'),
        self.add_weight(f'norm_{name}_shift', [width], initializer='zeros'),
      )
    self.built = True

  def call(
    self, history: HistoryVectors, position: tf.Tensor | None, training: bool = False
  ) -> tf.Tensor:
    """Returns a vector for each of B histories, float32 [B, D].

    `position` is LayerInputs.position, from which the random numbers of dropout follow.
    """
    size, length, width = tf.shape(history.mask)[0], tf.shape(history.mask)[1], self._width
    # Histories are padded to max_length with their newest feature at the end, so that dropout draws
    # the same numbers for a sample in any batch.
    ends = tf.where(history.mask, tf.range(1, length + 1), 0)
    count = tf.reduce_max(tf.pad(ends, [[0, 0], [1, 0]]), 1, keepdims=True)
    at = tf.range(-self._max_length, 0) + count  # [B, max_length]
    at = tf.where(at < 0, length, at)
    h = tf.gather(tf.concat([history.vectors, tf.zeros([size, 1, width])], 1), at, batch_dims=1)
    h.set_shape([None, self._max_length, width])
    is_there = tf.gather(tf.pad(history.mask, [[0, 0], [0, 1]]), at, batch_dims=1)
    drops = iter(range(1 + 2 * self._blocks))

    def dropped(x: tf.Tensor) -> tf.Tensor:
      seed = self._seed + 1000 + next(drops)
      if not training or not self._rate:
        return x
      flat = tf.reshape(x, [size, x.shape[1] * width])
      flat.set_shape([None, x.shape[1] * width])
      return tf.reshape(dropout(flat, self._rate, seed, position), [size, x.shape[1], width])

    h = dropped(h * width**0.5 + tf.reverse(self._places, [0]))
    for l in range(self._blocks):
      normed = self._norm(f'a_{l}', h)
      if l + 1 == self._blocks:
        normed = normed[:, -1:]
      a = normed + dropped(self._attention(l, normed, h, is_there))
      hidden = tf.nn.relu(self._linear(f'hidden_{l}', self._norm(f'b_{l}', a)))
      h = a + dropped(self._linear(f'out_{l}', hidden))
    return tf.where(is_there[:, -1:], self._norm('last', h[:, -1]), 0.0)

  def _norm(self, name: str, x: tf.Tensor) -> tf.Tensor:
    scale, shift = self._norms[name]
    mean, variance = tf.nn.moments(x, [-1], keepdims=True)
    return (x - mean) * tf.math.rsqrt(variance + 1e-8) * scale + shift

  def _linear(self, name: str, x: tf.Tensor) -> tf.Tensor:
    return tf.tensordot(x, self._kernels[name], 1) + self._biases[name]

  def _attention(self, l: int, x: tf.Tensor, to: tf.Tensor, is_there: tf.Tensor) -> tf.Tensor:
    """Returns the attention of the last P positions over all L positions: float32 [B, P, D].

    Block `l` reads queries from `x`, float32 [B, P, D], keys and values from `to`, [B, L, D], where
    `is_there`, bool [B, L], holds.
    """
    places, length = x.shape[1], to.shape[1]

    def heads(name: str, t: tf.Tensor) -> tf.Tensor:
      split = [-1, t.shape[1], self._heads, self._width // self._heads]
      return tf.reshape(self._linear(f'{name}_{l}', t), split)

    scores = tf.einsum('bqhd,bkhd->bhqk', heads('query', x), heads('key', to))
    scores *= (self._width // self._heads) ** -0.5
    own = tf.range(length - places, length)
    seen = is_there[:, None] & (tf.range(length) <= own[:, None])
    weights = tf.nn.softmax(tf.where(seen[:, None], scores, _NEVER))
    read = tf.einsum('bhqk,bkhd->bqhd', weights, heads('value', to))
    return tf.reshape(read, [-1, places, self._width])
