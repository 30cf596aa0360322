"""The deep learning recommendation model."""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from trainer.embedding.layer_inputs import LayerInputs, slot_vectors
from trainer.model.layers.arguments import check_widths
from trainer.model.layers.dnn import DNN


class DLRM(DNN):
  """A perceptron over the dot products of all pairs of slot vectors.

  Naumov et al. 2019, "Deep Learning Recommendation Model for Personalization and Recommendation
  Systems":

      e = the bottom, an MLP of the dense columns with relu, whose last layer has width D: [B, D]
      V = slot vectors and e, n vectors of D columns
      h_0 = e joined with ⟨V_i, V_j⟩ for all i < j, [B, D + n (n − 1)/2]
      logit = the top, the MLP of the class DNN on h_0

  Without dense columns there is no e. All slots have the same width D.

  Args:
    bottom: widths of the hidden layers on the dense columns.
    hidden: widths of the top's hidden layers.
    **dnn: the other arguments of DNN.
  """

  kind = 'dlrm'
  needs = {'factors'}
  one_width = True
  axes = {'bottom_kernel_0': ('dense',), 'kernel_0|signs': ('products',)}

  def __init__(
    self,
    bottom: Sequence[int] = (512, 256),
    hidden: Sequence[int] = (1024, 1024, 512, 256),
    **dnn: object,
  ):
    super().__init__(hidden, **dnn)
    check_widths('bottom', bottom)
    self._bottom = tuple(bottom)

  def build(self, shapes: LayerInputs) -> None:
    widths = {s[2] for s in shapes.factors}
    if len(widths) > 1:
      raise ValueError(f'needs one width for all slots; found widths {sorted(widths)}')
    (self._vector_width,) = widths
    columns = shapes.dense[1]
    vectors = sum(s[1] for s in shapes.factors) + (columns > 0)
    # The indices of the upper triangle in the flattened matrix of all products.
    self._pairs = np.flatnonzero(np.triu(np.ones([vectors, vectors]), 1))
    self._layers = []
    if columns:
      sizes = itertools.pairwise([columns, *self._bottom, self._vector_width])
      for l, (rows, width) in enumerate(sizes):
        glorot = tf.keras.initializers.GlorotUniform(self._seed + 1000 + l)
        self._layers.append(
          (
            self.add_weight(f'bottom_kernel_{l}', [rows, width], initializer=glorot),
            self.add_weight(f'bottom_bias_{l}', [width], initializer='zeros'),
          )
        )
    super().build(shapes)

  def _width(self, shapes: LayerInputs) -> int:
    return len(self._pairs) + (self._vector_width if self._layers else 0)

  def _parts(
    self, inputs: LayerInputs, multiply: Callable[..., tf.Tensor], training: bool
  ) -> list[tf.Tensor]:
    parts, embedded = slot_vectors(inputs), []
    if self._layers:
      e = parts.pop()
      for kernel, bias in self._layers:
        e = multiply(e, kernel, bias, relu=True)
      embedded = [e]
    joined = tf.concat(parts + embedded, 1)
    vectors = tf.reshape(joined, [-1, joined.shape[1] // self._vector_width, self._vector_width])
    products = tf.matmul(vectors, vectors, transpose_b=True)
    products = tf.reshape(products, [-1, vectors.shape[1] ** 2])
    return [*embedded, tf.gather(products, self._pairs, axis=1)]
