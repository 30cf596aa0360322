"""The time, inside a graph."""

import tensorflow as tf

from ops import library


def seconds(after: tf.Tensor) -> tf.Tensor:
  """Returns when `after` was there, float64 [], in seconds of a clock that never goes back.

  Unlike tf.timestamp it waits for no other stateful op of its function.

  Args:
    after: any tensor that is no constant, which the optimiser would replace the time by.
  """
  return library.load().ctr_clock(after=after)
