"""How long the exchanges of a step take, measured inside its graph."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import tensorflow as tf

from ops import clock

Outputs = TypeVar('Outputs')  # tensors, nested


class Spans:
  """Collects, while a graph is traced, when its exchanges begin and end."""

  def __init__(self):
    self._stamps: list[tf.Tensor] = []

  def timed(self, exchange: Callable[[], Outputs], inputs: Sequence[tf.Tensor]) -> Outputs:
    """Returns what `exchange` returns; its span begins when the inputs are there."""
    with tf.control_dependencies(inputs):
      begins = clock.seconds(inputs[-1])
    with tf.control_dependencies([begins]):
      outputs = exchange()
    found = tf.nest.flatten(outputs)
    with tf.control_dependencies([tensor.op for tensor in found]):
      self._stamps.append(tf.stack([begins, clock.seconds(found[-1])]))
    return outputs

  def taken(self) -> tf.Tensor:
    """Returns beginnings and ends in seconds, float64 [n, 2], of the calls since the last one."""
    found = tf.stack(self._stamps) if self._stamps else tf.zeros([0, 2], tf.float64)
    self._stamps = []
    return found


def seconds_of(spans: np.ndarray) -> float:
  """Returns how long any of the spans [n, 2] was under way; where they overlap, counted once."""
  total, reached = 0.0, -np.inf
  for begins, ends in sorted(spans.tolist()):
    total += max(0.0, ends - max(begins, reached))
    reached = max(reached, ends)
  return total
