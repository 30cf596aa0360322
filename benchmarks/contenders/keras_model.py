"""The model of the contenders that use TensorFlow, as a user writes it.

FM, linear and MLP on vectors [B, F, D] and weights [B, F, 1].
"""

import tensorflow as tf

from benchmarks.bench_data import batches
from benchmarks.contenders import channel


class Model:
  def __init__(self, shape):
    self.net = tf.keras.Sequential(
      [*(tf.keras.layers.Dense(h, 'relu') for h in shape.hidden), tf.keras.layers.Dense(1)]
    )
    self._width = shape.slots * shape.width

  def loss(self, vectors, weights, dense, label):
    total = tf.reduce_sum(vectors, 1)
    fm = 0.5 * tf.reduce_sum(total * total - tf.reduce_sum(vectors * vectors, 1), 1, keepdims=True)
    flat = tf.concat([tf.reshape(vectors, [-1, self._width]), dense], 1)
    logits = tf.reduce_sum(weights, 1) + fm + self.net(flat)
    return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(label, logits))


def contend(spec, shape, keys_of, embedding, linear, optimizer):
  """Serves rounds of training steps with the given embedding layers and optimizer."""
  model = Model(shape)

  @tf.function
  def step(keys, dense, label):
    with tf.GradientTape() as tape:
      loss = model.loss(embedding(keys), linear(keys), dense, label)
    variables = (
      embedding.trainable_variables + linear.trainable_variables + model.net.trainable_variables
    )
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    return loss

  arrays = zip(*batches(shape, spec['seed'], keys_of))
  tensors = [tuple(map(tf.constant, batch)) for batch in arrays]
  channel.train(
    spec, step, tensors, lambda loss: loss.numpy(), {'version': f'tensorflow {tf.__version__}'}
  )
