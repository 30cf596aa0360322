"""The layers of one task on top of a part that all tasks share."""

from collections.abc import Callable

import tensorflow as tf

from trainer.embedding.layer_inputs import LayerInputs
from trainer.model.layers.dnn import DNN


class Tower(DNN):
  """A DNN on the output of `model.shared` for its task; `hidden: []` makes it one linear layer."""

  kind = 'tower'
  needs = {'shared'}
  reads_dense = False
  axes = {}

  def _width(self, shapes: LayerInputs) -> int:
    return shapes.shared[1]

  def _parts(
    self, inputs: LayerInputs, multiply: Callable[..., tf.Tensor], training: bool
  ) -> list[tf.Tensor]:
    return [inputs.shared]
