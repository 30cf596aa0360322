"""Computes slots with one feature, whose value x_i is a number of the log; none if missing."""

import numpy as np
import pyarrow as pa
import tensorflow as tf

from trainer import config
from trainer.data.arrays import offsets_of
from trainer.data.columns.arrow_columns import ArrowReader
from trainer.data.columns.graph_columns import GraphColumn, GraphReader

TEXT = 'value'  # of the feature


def arrow(made: config.Number, reader: ArrowReader) -> pa.Array:
  numbers = reader.rounded(made.number)
  present = ~np.isnan(numbers)
  offsets = offsets_of(present)
  texts = pa.array([TEXT]).take(np.zeros([offsets[-1]], np.int64))
  return pa.MapArray.from_arrays(offsets, texts, pa.array(numbers[present]))


def graph(made: config.Number, reader: GraphReader) -> GraphColumn:
  numbers = reader.rounded(made.number)
  column = GraphColumn.single(tf.where(tf.math.is_nan(numbers), '', TEXT))
  return column._replace(
    x=tf.cast(tf.where(tf.math.is_nan(numbers), tf.zeros_like(numbers), numbers), tf.float32)
  )
