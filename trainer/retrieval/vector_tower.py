"""The tower that computes the vector of a query or an item."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from ops.float32 import product
from trainer.embedding.layer_inputs import LayerInputs
from trainer.model.layers.dnn import DNN
from trainer.retrieval.sasrec import SASRec


class SlotPlace(NamedTuple):
  """Where LayerInputs holds the values of one slot."""

  field: int  # index in Config.ordered_slots
  table: int  # index in sparse.tables
  place: int  # index among the slots of the table


class VectorTower(DNN):
  """Computes the vector of a query or an item, float32 [B, d].

      h_0 = the slot vectors, the dense columns and the history's encoding
      vector = the output of a perceptron on the joined h_0, whose last layer has no activation;
               if `hidden` is [], the sum of the vectors of h_0

  Args:
    slots: the slots that the tower reads, other than `history`.
    dense: the indices, in LayerInputs.dense, of the dense columns that the tower reads.
    hidden: widths of the layers, the last of which is d; [] for no layers.
    history: the name of the slot that `encoder` maps to float32 [B, D]; None without an encoder.
  """

  needs = {'factors'}

  def __init__(
    self,
    slots: Sequence[SlotPlace],
    dense: Sequence[int],
    hidden: Sequence[int],
    history: str | None = None,
    encoder: SASRec | None = None,
    seed: int = 0,
    name: str | None = None,
  ):
    super().__init__(hidden=hidden[:-1], seed=seed, name=name)
    self._slots, self._dense = list(slots), list(dense)
    self._outputs = hidden[-1] if hidden else 0
    self._history, self._encoder = history, encoder
    if encoder is not None:
      self.needs = {*self.needs, 'histories'}

  def build(self, shapes: LayerInputs) -> None:
    if self._encoder is not None:
      self._encoder.build(shapes.histories[self._history])
    if self._outputs:
      super().build(shapes)
    self.built = True

  def _width(self, shapes: LayerInputs) -> int:
    width = sum(shapes.factors[slot.table][2] for slot in self._slots) + len(self._dense)
    if self._encoder is not None:
      width += shapes.histories[self._history].vectors[2]
    return width

  def _parts(
    self, inputs: LayerInputs, multiply: Callable[..., tf.Tensor], training: bool
  ) -> list[tf.Tensor]:
    parts = []
    tables = [tf.unstack(factors, axis=1) for factors in inputs.factors]
    for slot in self._slots:
      vector = tables[slot.table][slot.place]
      if inputs.norm is not None:
        vector *= tf.math.divide_no_nan(1.0, inputs.norm[:, slot.field])[:, None]
      parts.append(vector)
    if self._dense:
      parts.append(tf.gather(inputs.dense, self._dense, axis=1))
    if self._encoder is not None:
      parts.append(self._encoder(inputs.histories[self._history], inputs.position, training))
    return parts

  def call(self, inputs: LayerInputs, training: bool = False) -> tf.Tensor:
    """Returns the vectors, float32 [B, d]."""
    if self._outputs:
      return super().call(inputs, training)
    return tf.add_n(self._parts(inputs, product, training))
