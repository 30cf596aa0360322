"""The layers of one task on top of a part that all tasks share."""

from collections.abc import Callable

import tensorflow as tf

from trainer.embedding.layer_inputs import LayerInputs
from trainer.model.layers.dnn import DNN


class Tower(DNN):
  """A DNN with h_0 = LayerInputs.shared, [B, H]; with `hidden: []` it is one linear layer."""

  needs = frozenset({'shared'})

  def _width(self, shapes: LayerInputs) -> int:
    return shapes.shared[1]

  def _parts(
    self, inputs: LayerInputs, multiply: Callable[..., tf.Tensor], training: bool
  ) -> list[tf.Tensor]:
    return [inputs.shared]
