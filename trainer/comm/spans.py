"""Measures how long the exchanges in a step's graph take."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import tensorflow as tf

from ops import clock

Outputs = TypeVar('Outputs')  # tensors, nested


class Spans:
  """Adds clocks to a graph at the beginnings and ends of its exchanges."""

  def __init__(self):
    self._stamps: list[tf.Tensor] = []

  def timed(self, exchange: Callable[[], Outputs], inputs: Sequence[tf.Tensor]) -> Outputs:
    """Adds an exchange to the graph, and measures it.

    Args:
      exchange: adds its ops to the graph.
      inputs: the measured span begins when these are computed.
    Returns:
      The outputs of `exchange`.
    """
    with tf.control_dependencies(inputs):
      begins = clock.seconds(inputs[-1])
    with tf.control_dependencies([begins]):
      outputs = exchange()
    tensors = tf.nest.flatten(outputs)
    with tf.control_dependencies([tensor.op for tensor in tensors]):
      self._stamps.append(tf.stack([begins, clock.seconds(tensors[-1])]))
    return outputs

  def collect(self) -> tf.Tensor:
    """Returns the spans since the last call, float64 [n, 2]: beginnings and ends in seconds."""
    stamps, self._stamps = self._stamps, []
    return tf.stack(stamps) if stamps else tf.zeros([0, 2], tf.float64)


def seconds_of(spans: np.ndarray) -> float:
  """Returns the total time of spans [n, 2]; overlaps count once."""
  total, reached = 0.0, -np.inf
  for begins, ends in sorted(spans.tolist()):
    total += max(0.0, ends - max(begins, reached))
    reached = max(reached, ends)
  return total
