from collections.abc import Callable

import numpy as np
import tensorflow as tf

from ops.tensors import to_tensor


class Graph:
  """A TensorFlow graph that is called with arrays or tensors, and returns {name: array}."""

  def __init__(self, function: Callable[..., dict[str, tf.Tensor]], *specs: tf.TensorSpec):
    traced = tf.function(function, autograph=False)
    self._graph = traced.get_concrete_function(*specs)
    self._captured = self._graph.captured_inputs
    self._dtypes = [output.dtype for output in self._graph.outputs]
    self.names = list(self._graph.structured_outputs)

  def __call__(self, *inputs: np.ndarray | tf.Tensor) -> dict[str, np.ndarray]:
    tensors = [i if isinstance(i, tf.Tensor) else to_tensor(i) for i in inputs]
    # For small graphs, calling self._graph itself takes three times as long.
    outputs = tf.raw_ops.StatefulPartitionedCall(
      args=tensors + self._captured, Tout=self._dtypes, f=self._graph
    )
    found = dict(zip(sorted(self.names), outputs))
    return {name: found[name].numpy() for name in self.names}
