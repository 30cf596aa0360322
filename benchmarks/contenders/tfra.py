"""TFRA's Keras path: Embedding layers on dynamic hash tables and DynamicEmbeddingOptimizer.

The spec has `optimizer`, Adagrad or Adam.
"""

import tensorflow as tf
from tensorflow_recommenders_addons import dynamic_embedding as de

from benchmarks.bench_data import Shape, hashed_keys
from benchmarks.contenders import channel
from benchmarks.contenders.keras_model import contend

if __name__ == '__main__':
  spec = channel.spec()
  shape = Shape(**spec['shape'])
  init = tf.keras.initializers
  capacity = spec['capacity']
  contend(
    spec,
    shape,
    hashed_keys,
    de.keras.layers.Embedding(
      shape.width, name='vectors', initializer=init.RandomNormal(0, 0.01), init_capacity=capacity
    ),
    de.keras.layers.Embedding(1, name='linear', initializer=init.Zeros(), init_capacity=capacity),
    de.DynamicEmbeddingOptimizer(getattr(tf.keras.optimizers, spec['optimizer'])(1e-2)),
  )
