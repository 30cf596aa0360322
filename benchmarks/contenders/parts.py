"""Where the time of a step goes: each part of TrainStep runs alone, on the same batches.

The spec has `config`, a YAML file, and `repeats`, the number of batches that are timed. The parts
do not add up to the step, in which independent parts run side by side and a part finds data of
another in the caches.
"""

import statistics
import time

import tensorflow as tf

from benchmarks.contenders import channel
from benchmarks.contenders.ours import stream
from trainer import config, runtime


def main():
  spec = channel.spec()
  cfg = config.load(spec['config'])
  runtime.start(cfg)
  from trainer.comm.communicator import SingleProcess
  from trainer.embedding.exchange import LocalRows
  from trainer.model.losses import per_sample_loss
  from trainer.training.dense_part import dense_optimizer
  from trainer.training.step import StepFlags, TrainStep

  communicator = SingleProcess()
  step, flags = TrainStep(cfg, communicator), StepFlags(True, False, False)
  batches = stream(cfg, communicator)
  rows, loss_of, optimizer = (
    LocalRows(step.store, cfg),
    per_sample_loss(cfg.model),
    dense_optimizer(cfg.train.dense_optimizer),
  )
  for _ in range(max(20, 80 * (spec['repeats'] > 5))):  # every feature of the pass is in the table
    staged = step.stage(next(batches))
    step.train(staged, step.route(staged), None, flags)
  fixed = [next(batches) for _ in range(spec['repeats'])]

  def function(fn, signature=None):
    return tf.function(fn, input_signature=signature, autograph=False, reduce_retracing=True)

  def layers(embedded, label, weight):
    inputs = embedded.of_rows()
    with tf.GradientTape() as tape:
      tape.watch(inputs)
      logits = step.dense.model(embedded, training=True)
      loss = tf.reduce_sum(weight * loss_of(label, logits))
    gradients = tape.gradient(loss, [*step.dense.trainable, *inputs])
    return step.dense.model.probability(logits), gradients[: len(step.dense.trainable)]

  def embed_and_back(batch, deduped, pulled):
    with tf.GradientTape() as tape:
      tape.watch([pulled.linear, pulled.factors])
      embedded = step.dense.embedding.embed(batch, deduped, pulled)
      out = embedded.of_rows()
    # The outputs stand in for their gradients: same shapes, as dense.
    return tape.gradient(out, [pulled.linear, pulled.factors], output_gradients=out)

  def push(deduped, pulled, linear, factors, number):
    rows.push(
      deduped,
      pulled,
      linear,
      factors,
      1.0 / cfg.train.batch_size,
      step.dense.embedding.hyper(tf.constant(1.0)),
      number,
    )

  pull = function(lambda d: rows.pull(d, (), True))
  embed, pool_both, model, push = (
    function(step.dense.embedding.embed),
    function(embed_and_back),
    function(layers),
    function(push),
  )

  def update(gradients):
    optimizer.apply_gradients(list(zip(gradients, step.dense.trainable)))

  optimize = function(update)
  measure = function(step.dense.metrics.update)
  times = {}

  def timed(name, fn):
    start, cpu = time.perf_counter(), time.process_time()
    out = fn()
    times.setdefault(name, []).append(
      (1000 * (time.perf_counter() - start), 1000 * (time.process_time() - cpu))
    )
    return out

  for batch in fixed:
    timed('input (in a thread of its own)', lambda: next(batches))
    tensors, deduped = staged = timed(
      'batch to tensors, dedupe (likewise)', lambda: step.stage(batch)
    )
    pulled = timed('pull', lambda: pull(deduped))
    embedded = timed('pool, dense transforms', lambda: embed(tensors, deduped, pulled))
    linear, factors = timed('pool and its gradient', lambda: pool_both(tensors, deduped, pulled))
    probabilities, dense = timed(
      'layers and loss, forward and backward',
      lambda: model(embedded, tensors.label, tensors.weight),
    )
    timed('dense optimizer', lambda: optimize(dense))
    timed('push', lambda: push(deduped, pulled, linear, factors, tf.constant(step.steps, tf.int64)))
    timed('metrics', lambda: measure(tensors.label, probabilities, tensors.weight))
    timed('the whole step', lambda: step.train(staged, (), None, flags))
  told = {
    name: [statistics.median(column) for column in zip(*values[2:])]
    for name, values in times.items()
  }
  channel.serve(spec, lambda _: None, {'milliseconds': told})


if __name__ == '__main__':
  main()
