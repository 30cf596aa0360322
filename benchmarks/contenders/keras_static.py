"""Keras' Embedding over a static vocabulary, without a hash table.

Legacy Adagrad updates only the rows of the batch.
"""

import tensorflow as tf

from benchmarks.bench_data import Shape, static_ids
from benchmarks.contenders import channel
from benchmarks.contenders.keras_model import contend

if __name__ == '__main__':
  spec = channel.spec()
  shape = Shape(**spec['shape'])
  contend(
    spec,
    shape,
    static_ids(shape),
    tf.keras.layers.Embedding(sum(shape.vocabulary), shape.width),
    tf.keras.layers.Embedding(sum(shape.vocabulary), 1),
    tf.keras.optimizers.legacy.Adagrad(1e-2),
  )
