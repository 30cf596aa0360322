"""A model of plain tf.keras with our dynamic embedding as a layer, trained by a loop of its own.

horovodrun -np 2 -H localhost:2 python examples/keras_model/train.py
"""

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from ops.policy import Policy
from trainer import config, runtime
from trainer.comm.communicator import Communicator
from trainer.comm.horovod import communicator
from trainer.embedding.dynamic_embedding import DynamicEmbedding

SLOTS, SAMPLES, STEPS = 5, 512, 100


class WideAndDeep(tf.keras.Model):
  def __init__(self, ranks: Communicator):
    super().__init__()
    # A feature has its factors from the step after its third impression.
    policy = Policy(admission='count', admission_count=3)
    self.embedding = DynamicEmbedding(SLOTS, 8, ranks, policy)
    hidden = tf.keras.layers.Dense(32, 'relu')
    self.deep = tf.keras.Sequential([tf.keras.layers.Flatten(), hidden, tf.keras.layers.Dense(1)])

  def call(self, features: tf.Tensor, training: bool = False) -> tf.Tensor:
    linear, factors = self.embedding(features, training=training)
    return tf.reduce_sum(linear, 1) + self.deep(factors)[:, 0]


def samples(step: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns the features, int64 [B, F], and the clicks, float32 [B], of all ranks in a step."""
  rng = np.random.default_rng(step)
  features = rng.zipf(1.3, [SAMPLES, SLOTS]) % 100_000
  return features, (rng.random(SAMPLES) < 0.1 + 0.8 * (features % 3 == 0).mean(1)).astype(
    np.float32
  )


def train(ranks: Communicator) -> tuple[WideAndDeep, list[float]]:
  """Trains on this rank's share of the samples; returns the model and the loss of each step."""
  tf.keras.utils.set_random_seed(1)  # the same layers on every rank
  model, optimizer = WideAndDeep(ranks), tf.keras.optimizers.Adam(0.01)

  @tf.function(autograph=False)
  def take_step(features: tf.Tensor, clicks: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
      logits = model(features, training=True)
      losses = tf.nn.sigmoid_cross_entropy_with_logits(clicks, logits)
      loss = tf.reduce_sum(losses) / SAMPLES
    gradients = tape.gradient(loss, model.trainable_variables)  # the rows take their step
    *sums, loss = ranks.all_reduce([*gradients, loss])
    optimizer.apply_gradients(zip(sums, model.trainable_variables))
    return loss

  own = slice(ranks.rank, None, ranks.size)
  losses = [float(take_step(*(a[own] for a in samples(step)))) for step in range(STEPS)]
  return model, losses


if __name__ == '__main__':
  hvd.init()
  ranks = communicator(runtime.launched(), config.Sync())
  model, losses = train(ranks)
  store = model.embedding.store
  print(
    f'rank {ranks.rank}: loss {losses[0]:.4f} -> {losses[-1]:.4f}, '
    f'{int(store.size())} features, {int(store.admitted_size())} with factors'
  )
