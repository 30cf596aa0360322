"""AutoDis: turns each number into a mixture of learned vectors."""

import tensorflow as tf

from trainer.embedding.layer_inputs import LayerInputs
from trainer.errors import short
from trainer.model.layers.arguments import check_whole


class AutoDis(tf.keras.layers.Layer):
  """Maps the number in each dense column to a mixture of learned vectors.

  Guo et al. 2021, "An Embedding Learning Framework for Numerical Features in CTR Prediction". For
  the number x in column c, with learned w_c [H], W_c [H, H] and vectors v_c1 … v_cH:

      h = leaky_relu(x w_c), [H];  s = softmax((h W_c + skip·h) / temperature), [H]
      vector = Σ_k s_k v_ck, [D]

  Args:
    bins: H, the number of vectors of each column.
    temperature: the lower it is, the closer the mixture is to a single vector.
    skip: the factor of h in the skip connection.
    table_width: D, the length of a vector.
  """

  kind = 'autodis'
  needs = set()
  part = 'dense_embedding'
  axes = {r'\w+': ('dense',)}

  def __init__(
    self,
    bins: int = 20,
    temperature: float = 0.8,
    skip: float = 0.1,
    table_width: int = 8,
    seed: int = 0,
    name: str | None = None,
  ):
    super().__init__(name=name)
    check_whole('bins', bins)
    if not temperature > 0:
      raise ValueError(f'temperature: found {short(temperature)}; wanted a number above 0')
    self._bins, self._temperature, self._skip = bins, temperature, skip
    self._width, self._seed = table_width, seed

  def build(self, shapes: LayerInputs) -> None:
    columns, bins = shapes.dense[1], self._bins
    uniform = tf.keras.initializers.GlorotUniform
    self._first = self.add_weight('first', [columns, bins], initializer=uniform(self._seed))
    self._second = self.add_weight(
      'second', [columns, bins, bins], initializer=uniform(self._seed + 1)
    )
    normal = tf.keras.initializers.RandomNormal(stddev=0.01, seed=self._seed + 2)
    self._vectors = self.add_weight('vectors', [columns, bins, self._width], initializer=normal)
    self.built = True

  def call(self, inputs: LayerInputs, training: bool = False) -> tf.Tensor:
    """Returns the vectors, float32 [B, Dn, D]."""
    h = tf.nn.leaky_relu(inputs.dense[:, :, None] * self._first)
    h = tf.einsum('bch,chk->bck', h, self._second) + self._skip * h
    return tf.einsum('bck,ckd->bcd', tf.nn.softmax(h / self._temperature), self._vectors)
