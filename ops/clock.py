"""An op that reads a clock inside a graph."""

import tensorflow as tf

from ops import library


def seconds(after: tf.Tensor) -> tf.Tensor:
  """Returns the time at which `after` was computed, float64 [], in seconds of a monotonic clock.

  Unlike tf.timestamp it does not wait for the other stateful ops of its function.

  Args:
    after: any tensor that is not a constant; after a constant, the graph optimiser would make the
      time a constant too.
  """
  return library.load().ctr_clock(after=after)
