"""DIN in plain TensorFlow ops, as a user writes it from the paper.

It uses Keras' static Embedding, histories of one length without masks, and legacy Adagrad. The spec
has `shape`, with a history.
"""

import tensorflow as tf

from benchmarks.bench_data import ATTENTION, Shape, history_batches
from benchmarks.contenders import channel


def main():
  spec = channel.spec()
  shape = Shape(**spec['shape'])
  features = sum(shape.vocabulary[:-1])
  embedding = tf.keras.layers.Embedding(features, shape.width)
  linear = tf.keras.layers.Embedding(features, 1)
  unit = tf.keras.Sequential([tf.keras.layers.Dense(ATTENTION, 'relu'), tf.keras.layers.Dense(1)])
  net = tf.keras.Sequential(
    [*(tf.keras.layers.Dense(h, 'relu') for h in shape.hidden), tf.keras.layers.Dense(1)]
  )
  optimizer = tf.keras.optimizers.legacy.Adagrad(1e-2)

  def logits(keys, history, dense):
    vectors, past = embedding(keys), embedding(history)  # [B, F - 1, D], [B, L, D]
    candidate = tf.broadcast_to(vectors[:, :1], tf.shape(past))
    together = tf.concat([past, candidate, past - candidate, past * candidate], -1)
    interest = tf.reduce_sum(unit(together) * past, 1)
    flat = tf.reshape(vectors, [-1, (shape.slots - 1) * shape.width])
    x = tf.concat([flat, tf.reduce_mean(past, 1), dense, interest], 1)
    return net(x) + tf.reduce_sum(linear(keys), 1) + tf.reduce_sum(linear(history), 1)

  @tf.function
  def step(keys, history, dense, label):
    with tf.GradientTape() as tape:
      found = logits(keys, history, dense)
      loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(label, found))
    layers = (embedding, linear, unit, net)
    variables = [v for layer in layers for v in layer.trainable_variables]
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    return loss

  batches = [tuple(map(tf.constant, b)) for b in zip(*history_batches(shape, spec['seed']))]
  channel.train(
    spec, step, batches, lambda loss: loss.numpy(), {'version': f'tensorflow {tf.__version__}'}
  )


if __name__ == '__main__':
  main()
