"""Turns each number into a vector that changes linearly between fixed numbers, the knots."""

import statistics

import numpy as np
import tensorflow as tf

from trainer.embedding.layer_inputs import LayerInputs
from trainer.model.layers.arguments import check_whole

_MOST = 3.0  # the last knot, in standard deviations; beyond it the vector is constant


class PiecewiseLinear(tf.keras.layers.Layer):
  """Maps the number in each dense column to a vector, linearly between knots b_0 < … < b_H.

  Gorishniy et al. 2022, "On Embeddings for Numerical Features in Tabular Deep Learning". For the
  number x in column c, with learned vectors v_c0 … v_cH:

      vector = v_c0 + Σ_{k=1..H} min(max((x − b_{k−1}) / (b_k − b_{k−1}), 0), 1) v_ck, [D]

  The knots are quantiles of the normal distribution, from −3 to 3, which suit standardised columns.

  Args:
    bins: H, the number of intervals between knots.
    table_width: D, the length of a vector.
  """

  kind = 'piecewise_linear'
  needs = set()
  part = 'dense_embedding'
  axes = {r'\w+': ('dense',)}

  def __init__(self, bins: int = 20, table_width: int = 8, seed: int = 0, name: str | None = None):
    super().__init__(name=name)
    check_whole('bins', bins)
    self._width, self._seed = table_width, seed
    normal = statistics.NormalDist()
    inner = [normal.inv_cdf(k / bins) for k in range(1, bins)]
    self._knots = np.array([-_MOST, *np.clip(inner, -_MOST, _MOST), _MOST], np.float32)

  def build(self, shapes: LayerInputs) -> None:
    normal = tf.keras.initializers.RandomNormal(stddev=0.01, seed=self._seed)
    shape = [shapes.dense[1], len(self._knots), self._width]
    self._vectors = self.add_weight('vectors', shape, initializer=normal)
    self.built = True

  def call(self, inputs: LayerInputs, training: bool = False) -> tf.Tensor:
    """Returns the vectors, float32 [B, Dn, D]."""
    low, high = self._knots[:-1], self._knots[1:]
    parts = tf.clip_by_value((inputs.dense[:, :, None] - low) / (high - low), 0.0, 1.0)
    parts = tf.concat([tf.ones_like(parts[:, :, :1]), parts], 2)
    return tf.einsum('bck,ckd->bcd', parts, self._vectors)
