"""The dense part of our step alone, the floor that no table can lower: layers and loss on rows that were gathered before.

Forward, and backward with respect to the variables and what comes from rows; no optimizer. spec: config, a YAML file.
"""
import tensorflow as tf

from benchmarks.contenders import channel
from trainer import config, runtime


def gathered(cfg, model, samples, seed):
  """A random Embedded of `samples` samples."""
  from trainer.model import empty_batch
  rng = tf.random.Generator.from_seed(seed)
  return tf.nest.map_structure(lambda t: None if t is None else rng.normal([samples, *t.shape[1:]], stddev=0.01),
                               empty_batch(cfg, model.needs))


def from_rows(embedded):
  """The tensors of an Embedded that come from rows."""
  tensors = [embedded.linear, *embedded.factors, embedded.squares, embedded.field_factors, embedded.field_squares]
  return [t for t in tensors if t is not None]


def main():
  spec = channel.spec()
  cfg = config.load(spec['config'])
  runtime.start(cfg)
  from trainer.losses import per_sample_loss
  from trainer.model import build
  model, loss_of = build(cfg), per_sample_loss(cfg.model)
  samples = cfg.train.batch_size
  weight = tf.ones([samples])

  @tf.function
  def step(embedded, label):
    rows = from_rows(embedded)
    with tf.GradientTape() as tape:
      tape.watch(rows)
      loss = tf.reduce_sum(weight * loss_of(label, model(embedded, training=True)))
    return tape.gradient(loss, [*model.trainable_variables, *rows])

  rng = tf.random.Generator.from_seed(cfg.seed)
  following = channel.turns([(gathered(cfg, model, samples, i), tf.cast(rng.uniform([samples]) < 0.25, tf.float32)) for i in range(8)])

  def take_steps(count):
    for _ in range(count):
      gradients = step(*following())
    gradients[0].numpy()
  channel.serve(spec, take_steps)


if __name__ == '__main__':
  main()
