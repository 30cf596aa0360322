"""How long the exchanges of a step take, measured inside its graph."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf


class Spans:
  """Collects, while a graph is traced, when its exchanges begin and end.

  Args:
    active: whether it does; TensorFlow has no clock where its ops are deterministic.
  """

  def __init__(self, active: bool = True):
    self._active = active
    self._stamps: list[tf.Tensor] = []

  def timed(self, exchange: Callable[[], Any], inputs: Sequence[tf.Tensor]) -> Any:
    """Returns what `exchange` returns; its span begins when the inputs are there."""
    if not self._active:
      return exchange()
    with tf.control_dependencies(inputs):
      begins = tf.timestamp()
    with tf.control_dependencies([begins]):
      outputs = exchange()
    with tf.control_dependencies([t.op for t in tf.nest.flatten(outputs)]):
      self._stamps.append(tf.stack([begins, tf.timestamp()]))
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
