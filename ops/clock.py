"""The time, inside a graph."""

import tensorflow as tf

from ops import library


def seconds(after: tf.Tensor) -> tf.Tensor:
  """Returns the time at which `after` was computed, float64 [], in seconds of a monotonic clock.

  Unlike tf.timestamp it does not wait for the other stateful ops of its function.

  Args:
    after: a tensor. For a constant, the graph optimiser would fold the time into a constant too.
  """
  return library.load().ctr_clock(after=after)
