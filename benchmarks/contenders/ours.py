"""Our complete training loop, in one process or one rank.

That is prepared pass, prefetch, dedupe, lifecycle, rows, layers, optimizers and metrics. The spec
has `config`, a YAML file, and may have `features`, the number of features that are in the table
before the first step. A rank counts the bytes that it sends.
"""

import itertools
import os

import numpy as np
import tensorflow as tf

from benchmarks.contenders import channel
from trainer import config, runtime


def stream(cfg, communicator, stage=lambda batch: batch, step=None):
  """Yields the batches of this rank as a job does, epoch after epoch.

  With model.retrieval, `step` is needed: its catalogue adds the negatives.
  """
  from trainer.data.prefetch import prefetch
  from trainer.data.prepared import PreparedPass

  one, numbers, ready = PreparedPass(cfg.data.train[0], cfg), itertools.count(), stage
  if cfg.model.retrieval is not None:
    catalogue = step.dense.catalogue
    catalogue.refresh(step.store, communicator, one)
    ready = lambda batch: stage(catalogue.for_step(batch, next(numbers)))
  return prefetch(
    ready(batch)
    for epoch in itertools.count()
    for batch in one.batches(
      cfg.train.batch_size,
      rank=communicator.rank,
      size=communicator.size,
      seed=cfg.seed,
      epoch=epoch,
      shuffle=cfg.data.shuffle,
    )
  )


def fill(step, cfg, count, part=1 << 18):
  """Fills the table with `count` features, in random order, each with one show.

  They are the features of the pass and random others.
  """
  from ops.dedupe import dedupe

  rng = np.random.default_rng(cfg.seed + 1)
  own = np.unique(np.load(os.path.join(cfg.data.train[0], 'keys.npy')))
  others = max(0, count - len(own))
  keys = np.concatenate(
    [own, rng.integers(1, len(cfg.data.slots) + 1, others) << 52 | rng.integers(0, 1 << 52, others)]
  )
  rng.shuffle(keys)
  for start in range(0, len(keys), part):
    observe(
      step.store, dedupe(keys[start : start + part]), step.dense.row_hyperparameters(step.steps)
    )


def observe(store, deduped, hyper):
  """Creates, counts and admits features by a push that trains nothing."""
  rows = store.pull(deduped.unique, False)
  store.push(
    deduped.unique,
    rows,
    deduped.shows,
    deduped.clicks,
    tf.zeros_like(rows.linear),
    tf.zeros_like(rows.factors),
    tf.ones([1]),
    hyper,
    tf.constant(1, tf.int64),
  )


def count_exchange(communicator):
  """Makes the communicator's row exchanges count the bytes that this rank sends to others.

  Returns:
    The counter, int64. It counts the exchanges of steps that are built afterwards.
  """
  sent, plain = tf.Variable(0, dtype=tf.int64, trainable=False), communicator.row_exchange

  def row_exchange(name):
    made = plain(name)
    all_to_all = made.all_to_all

    def counting(values, counts):
      row = sum(
        tf.size(v, tf.int64) // tf.maximum(tf.shape(v, tf.int64)[0], 1) * v.dtype.size
        for v in values
      )
      sent.assign_add(row * tf.cast(tf.reduce_sum(counts) - counts[communicator.rank], tf.int64))
      return all_to_all(values, counts)

    made.all_to_all = counting
    return made

  communicator.row_exchange = row_exchange
  return sent


def main():
  spec = channel.spec()
  cfg = config.load(spec['config'])
  place = runtime.launched()
  runtime.start(cfg, place)
  from trainer.comm import horovod
  from trainer.evaluation.task import task_of
  from trainer.training import dense_dtype
  from trainer.training.inputs import Inputs
  from trainer.training.loop import train_in_lockstep
  from trainer.training.run_state import RunState
  from trainer.training.save_policy import SavePolicy

  communicator = horovod.communicator(place, cfg.sync)
  sent = count_exchange(communicator) if communicator.size > 1 else None
  dtype = dense_dtype.chosen(cfg.train.dense_dtype, cfg.run_dir, communicator)
  step = task_of(cfg).step(communicator, dtype)
  state = RunState(cfg, communicator, step)
  saves = SavePolicy(cfg.checkpoint, state, is_stream=False, goes_back=False)
  inputs = Inputs(cfg, communicator, step, progress_made=lambda: None, folder='')
  if spec.get('features'):
    fill(step, cfg, spec['features'])
  batches = stream(cfg, communicator, step.stage, step)

  def take_steps(count):
    train_in_lockstep(
      inputs,
      state,
      itertools.islice(batches, count),
      saves=saves,
      save=lambda: None,
      stop_requested=lambda: False,
      on_step=lambda: None,
    )

  def more():
    seen, bytes_sent = (
      step.dense.metrics.state()['losses' if cfg.model.retrieval else 'sums'][1],
      0 if sent is None else int(sent.numpy()),
    )
    step.dense.metrics.reset()
    if sent is not None:
      sent.assign(0)
    return {
      'steps': step.steps,
      'samples': seen,
      'sent_bytes': bytes_sent,
      'features': int(step.store.size()),
      'admitted': int(step.store.admitted_size()),
      'table_bytes': int(step.store.bytes()),
      'dense_bytes': 4 * sum(v.shape.num_elements() for v in step.dense.trainable),
    }

  channel.serve(spec, take_steps, {'version': f'tensorflow {tf.__version__}'}, more)


if __name__ == '__main__':
  main()
