"""The common part of the SavedModels that we write. Plain TensorFlow runs them.

There are two: the whole model (`saved_model`) and the dense part alone (`dense_model`). The output
is `probability` float32 [B], or one of each task's name; with model.retrieval it is `vector`
float32 [B, d], of the query. Both hold warm-up requests for TensorFlow Serving.
"""

from collections.abc import Callable, Mapping

import tensorflow as tf
from absl import logging

from trainer import config
from trainer.data.features import transform_counts, transform_dense
from trainer.embedding.layer_inputs import HistoryVectors, LayerInputs
from trainer.storage import warmup

Graph = tf.types.experimental.ConcreteFunction


class ServedModel(tf.Module):
  """The dense part of a CTRModel, or of a RetrievalModel, which computes the vector of a query.

  `dense_stats`, float32 [3, Dn], are the statistics that standardise dense columns.
  """

  def __init__(self, cfg: config.Config, model: tf.keras.Model, dense_stats: tf.Variable):
    super().__init__()
    self._cfg, self._dense_columns = cfg, cfg.data.dense
    # A closure, because Keras traces signatures of its own for a model that is an attribute.
    self._call = lambda inputs: model.predictions(model(inputs, training=False))
    self.dense_variables = list(model.variables)
    self.dense_stats = tf.Variable(dense_stats, trainable=False, name='dense_stats')

  def _outputs(
    self,
    dense: tf.Tensor,
    factors: list[tf.Tensor],
    show_click: tf.Tensor | None = None,
    **sums: tf.Tensor | dict[str, HistoryVectors] | None,
  ) -> dict[str, tf.Tensor]:
    """Returns the outputs, {name: float32 [B]}; with model.retrieval, {'vector': float32 [B, d]}.

    Args:
      dense: float32 [B, Dn], dense columns as in the log; NaN where a number is missing.
      show_click: float32 [B, Fc, 2], the shows and clicks in each of the Fc slots with `counts`.
      factors, **sums: as in LayerInputs; `totals` are computed from `factors`.
    """
    totals = [tf.reduce_sum(slots, 1) for slots in factors]
    dense = transform_dense(dense, self._dense_columns, self.dense_stats)
    if show_click is not None:
      dense = tf.concat([dense, transform_counts(show_click, self.dense_stats[0, -1])], 1)
    return self._call(LayerInputs(dense=dense, factors=factors, totals=totals, **sums))


def common_size(lengths: Mapping[str, tf.Tensor]) -> tf.Tensor:
  """Returns B of inputs of length B or 1; other lengths fail when the graph runs."""
  sizes = tf.stack(list(lengths.values()))
  others = tf.boolean_mask(sizes, tf.not_equal(sizes, 1))
  size = tf.cond(tf.size(others) > 0, lambda: others[0], lambda: tf.ones([], tf.int64))
  found = [
    part for name, length in lengths.items() for part in (f' {name} ', tf.strings.as_string(length))
  ]
  message = tf.strings.join(
    ['found inputs of lengths', *found, '; wanted one length, or 1, which is repeated']
  )
  fits = tf.reduce_all(tf.equal(sizes, 1) | tf.equal(sizes, size))
  with tf.control_dependencies([tf.debugging.Assert(fits, [message], summarize=1)]):
    return tf.identity(size)


def graph(function: Callable, specs: Mapping[str, tf.TensorSpec]) -> Graph:
  """Traces a function whose keyword arguments are {name: spec}, and returns the graph."""
  return tf.function(function, autograph=False).get_concrete_function(**specs)


def write(
  module: ServedModel,
  signatures: Mapping[str, Graph],
  specs: Mapping[str, tf.TensorSpec],
  path: str,
) -> None:
  """Writes a SavedModel, with warm-up requests, into a directory; `specs` are inputs by name."""
  verbosity = logging.get_verbosity()
  logging.set_verbosity(logging.WARNING)  # TensorFlow logs every step
  try:
    tf.saved_model.save(module, path, signatures)
  finally:
    logging.set_verbosity(verbosity)
  warmup.write(path, specs)
