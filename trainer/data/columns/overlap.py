"""Computes overlaps: the number or share of one column's features that another column has too."""

import numpy as np
import pyarrow as pa
import tensorflow as tf

from trainer import config
from trainer.data.columns.arrow_columns import ArrowReader
from trainer.data.columns.graph_columns import GraphColumn, GraphReader


def _distinct(hashes: np.ndarray, counts: np.ndarray) -> np.ndarray:
  """Returns the distinct pairs (record, hash), int64 [d, 2], ascending; the hashes are [m]."""
  records = np.repeat(np.arange(len(counts)), counts)
  order = np.lexsort((hashes, records))
  pairs = np.stack([records[order], hashes[order]], 1)
  return pairs[np.append(True, (pairs[1:] != pairs[:-1]).any(1))[: len(pairs)]]


def arrow(made: config.Overlap, reader: ArrowReader) -> pa.Array:
  first, second = (_distinct(*reader.features(name).by_record()) for name in made.overlap)
  both = np.concatenate([first, second])
  both = both[np.lexsort((both[:, 1], both[:, 0]))]
  twice = both[1:][(both[1:] == both[:-1]).all(1)] if len(both) else both
  count = np.bincount(twice[:, 0], minlength=reader.num_records)
  if made.of == 'count':
    return pa.array(count)
  of_first = np.bincount(first[:, 0], minlength=reader.num_records)
  return pa.array(count / np.maximum(of_first, 1), mask=of_first == 0)


def graph(made: config.Overlap, reader: GraphReader) -> GraphColumn:
  sets = []
  for name in made.overlap:
    features = reader.features(name)
    ragged = tf.RaggedTensor.from_value_rowids(features.hashes, features.samples, reader.size)
    sets.append(ragged.to_sparse())
  # tf.sets wants sets of one shape; its `size` counts distinct elements.
  shape = tf.stack([reader.size, tf.maximum(*(s.dense_shape[1] for s in sets))])
  first, second = (tf.SparseTensor(s.indices, s.values, shape) for s in sets)
  count = tf.sets.size(tf.sets.intersection(first, second))
  count = tf.cast(tf.reshape(count, [-1]), tf.float64)
  if made.of == 'count':
    return GraphColumn.single(count)
  of_first = tf.cast(tf.reshape(tf.sets.size(first), [-1]), tf.float64)
  return GraphColumn.single(tf.where(of_first > 0, count / tf.maximum(of_first, 1.0), np.nan))
