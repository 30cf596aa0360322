"""Matrix factorisation with sampled softmax on a static Keras Embedding, as a user writes it.

A batch shares uniform negatives; a negative that is the sample's own item is left out. Legacy
Adagrad updates only the rows of the batch.
"""

import tensorflow as tf

from benchmarks.bench_data import MF_NEGATIVES, MF_TEMPERATURE, Shape, batches, static_ids
from benchmarks.contenders import channel

if __name__ == '__main__':
  spec = channel.spec()
  shape = Shape(**spec['shape'])
  users, items = shape.vocabulary
  embedding = tf.keras.layers.Embedding(users + items, shape.width)
  optimizer = tf.keras.optimizers.legacy.Adagrad(1e-2)
  keys_of_batches, _, _ = batches(shape, spec['seed'], static_ids(shape))

  @tf.function
  def step(keys):
    drawn = tf.random.uniform([MF_NEGATIVES], users, users + items, tf.int64)
    with tf.GradientTape() as tape:
      vectors = tf.math.l2_normalize(embedding(tf.concat([tf.reshape(keys, [-1]), drawn], 0)), 1)
      pairs = tf.reshape(vectors[: shape.batch * 2], [shape.batch, 2, shape.width])
      positive = tf.reduce_sum(pairs[:, 0] * pairs[:, 1], 1, keepdims=True)
      negative = tf.matmul(pairs[:, 0], vectors[shape.batch * 2 :], transpose_b=True)
      negative = tf.where(keys[:, 1:] == drawn, -1e9, negative)
      logits = tf.concat([positive, negative], 1) / MF_TEMPERATURE
      labels = tf.zeros([shape.batch], tf.int64)
      loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
    variables = embedding.trainable_variables
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    return loss

  tensors = [(tf.constant(keys),) for keys in keys_of_batches]
  channel.train(
    spec, step, tensors, lambda loss: loss.numpy(), {'version': f'tensorflow {tf.__version__}'}
  )
