"""Only the dense part of the model: with any hash table, a step takes at least this long.

It runs FM, linear and MLP as a Keras user writes them, on vectors that were gathered beforehand:
forward, and backward to the variables and to the vectors, without an optimizer. The spec has
`shape`.
"""

import tensorflow as tf

from benchmarks.bench_data import Shape
from benchmarks.contenders import channel
from benchmarks.contenders.keras_model import Model


def main():
  spec = channel.spec()
  shape = Shape(**spec['shape'])
  model = Model(shape)

  @tf.function
  def step(vectors, weights, dense, label):
    with tf.GradientTape() as tape:
      tape.watch([vectors, weights])
      loss = model.loss(vectors, weights, dense, label)
    return tape.gradient(loss, [*model.net.trainable_variables, vectors, weights])

  rng = tf.random.Generator.from_seed(spec['seed'])

  def gathered():
    normal = (
      rng.normal([shape.batch, *s], stddev=0.01)
      for s in ([shape.slots, shape.width], [shape.slots, 1], [shape.dense])
    )
    return *normal, tf.cast(rng.uniform([shape.batch, 1]) < 0.25, tf.float32)

  batches = [gathered() for _ in range(8)]
  channel.train(spec, step, batches, lambda gradients: gradients[0].numpy())


if __name__ == '__main__':
  main()
