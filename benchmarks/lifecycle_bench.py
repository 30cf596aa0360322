"""Speed and memory of the feature lifecycle: `python -m benchmarks.lifecycle_bench [--full]`.

It measures `ops.feature_lifecycle` and prints each figure beside its goal. Each is the best of
several rounds, because other work on the machine only slows.
"""

import os
import time

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')

import numpy as np
import tensorflow as tf
from absl import app, flags

from benchmarks.page import machine
from ops.feature_lifecycle import FeatureLifecycle, Policy

FLAGS = flags.FLAGS
flags.DEFINE_integer('features', 10_000_000, 'Features of the table.')
flags.DEFINE_integer('batch', 50_000, 'Keys of a batch.')
flags.DEFINE_integer('threads', 2, 'Threads of TensorFlow.')
flags.DEFINE_integer('seed', 1, 'The seed of the keys.')
flags.DEFINE_bool('full', False, 'Measures 50 million features too, in half a minute.')


def random_keys(rng, n):
  """Returns n keys like the trainer's: one of 26 slots above a 52-bit hash."""
  return rng.integers(1, 27, n) << 52 | rng.integers(0, 1 << 52, n)


def fill(table, keys):
  """Observes each key with ten shows, so that it survives the first day end."""
  for part in np.array_split(keys, max(1, len(keys) // 1_000_000)):
    table.observe(part, np.full(len(part), 10.0), np.zeros(len(part)))


def best_seconds(rounds, work):
  """Returns the shortest time of some rounds."""
  times = []
  for i in range(rounds):
    start = time.perf_counter()
    work(i)
    times.append(time.perf_counter() - start)
  return min(times)


def line(name, value, unit, wanted):
  print(f'{name:<44}{value:>10.2f} {unit:<14} wanted {wanted}')


def day_end(table):
  table.decay()
  evicted = len(table.evict())
  table.age()
  return evicted


def main(_):
  tf.config.threading.set_intra_op_parallelism_threads(FLAGS.threads)
  n, batch = FLAGS.features, FLAGS.batch
  rng = np.random.default_rng(FLAGS.seed)
  print(
    f'{machine()["cpu"]}, {os.cpu_count()} cores, {FLAGS.threads} threads; seed {FLAGS.seed}; '
    f'{n} features, batches of {batch} keys'
  )
  table = FeatureLifecycle(Policy(delete_threshold=0.5))
  keys = random_keys(rng, n)
  start = time.perf_counter()
  fill(table, keys)
  print(f'filled at {n / (time.perf_counter() - start) / 1e6:.1f} M keys/s')
  batches = [tf.constant(keys[rng.integers(0, n, batch)]) for _ in range(40)]
  shows, clicks = tf.ones([batch], tf.float64), tf.zeros([batch], tf.float64)

  def observe(i):
    for b in batches[i % 2 :: 2]:
      table.observe(b, shows, clicks)

  def admitted(i):
    for b in batches[i % 2 :: 2]:
      table.admitted(b)

  line('observe', 20 * batch / best_seconds(10, observe) / 1e6, 'M keys/s', '>= 15')
  line('admitted', 20 * batch / best_seconds(10, admitted) / 1e6, 'M keys/s', '>= 25')
  line('bytes a feature', int(table.bytes()) / int(table.size()), 'bytes', '<= 64')
  seconds = best_seconds(5, lambda _: day_end(table))
  line('decay + evict + age', n / seconds / 1e6, 'M features/s', '>= 20')
  lone = random_keys(rng, n // 4)
  table.observe(lone, np.ones(len(lone)), np.zeros(len(lone)))
  held = int(table.size())
  start = time.perf_counter()
  evicted = day_end(table)
  seconds = time.perf_counter() - start
  line(f'the same, evicting {evicted / held:.0%}', held / seconds / 1e6, 'M features/s', '>= 20')
  if FLAGS.full:
    del table
    table = FeatureLifecycle(Policy(delete_threshold=0.5))
    for _ in range(50):
      fill(table, random_keys(rng, 1_000_000))
    line(f'{int(table.size())} features', int(table.bytes()) / 2**30, 'GiB', '<= 4')
    start = time.perf_counter()
    day_end(table)
    line('day end on them', time.perf_counter() - start, 's', 'seconds')


if __name__ == '__main__':
  app.run(main)
