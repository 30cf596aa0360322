"""Measures how long the exchanges in a step's graph take."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import tensorflow as tf

from ops.library import load
from trainer.runtime import HOST

Outputs = TypeVar('Outputs')  # nested tensors


def _clock(after: tf.Tensor) -> tf.Tensor:
  """Returns when `after` was computed, float64 [], in seconds of a monotonic clock.

  Unlike tf.timestamp, it does not wait for the other stateful ops of its function. `after` must not
  be a constant: the clock would be computed once, while TensorFlow optimizes the graph.
  """
  return load().ctr_clock(after=after)


class Spans:
  """Measures exchanges in a graph by a clock before and after each exchange."""

  def __init__(self):
    self._stamps: list[tf.Tensor] = []

  def timed(self, exchange: Callable[[], Outputs], inputs: Sequence[tf.Tensor]) -> Outputs:
    """Adds an exchange between two clocks to the graph; returns the outputs of the exchange."""
    with tf.device(HOST), tf.control_dependencies(inputs):
      begins = _clock(inputs[-1])
    with tf.control_dependencies([begins]):
      outputs = exchange()
    tensors = tf.nest.flatten(outputs)
    with tf.device(HOST), tf.control_dependencies([tensor.op for tensor in tensors]):
      self._stamps.append(tf.stack([begins, _clock(tensors[-1])]))
    return outputs

  def collect(self) -> tf.Tensor:
    """Returns when each exchange begins and ends, in seconds, float64 [n, 2]; then forgets them."""
    stamps, self._stamps = self._stamps, []
    return tf.stack(stamps) if stamps else tf.zeros([0, 2], tf.float64)


def seconds_of(spans: np.ndarray) -> float:
  """Returns the length in seconds of the union of time spans, float64 [n, 2] (begin, end)."""
  total, reached = 0.0, -np.inf
  for begins, ends in sorted(spans.tolist()):
    total += max(0.0, ends - max(begins, reached))
    reached = max(reached, ends)
  return total
