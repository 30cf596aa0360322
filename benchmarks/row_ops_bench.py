"""Milliseconds of each op on rows, at the shape of a CTR model: `python -m
benchmarks.row_ops_bench`.

Power-law keys over vocabularies from 10 to 2 million, AdaGrad, every feature admitted; TensorFlow's
own unique and segment sums beside
dedupe. Ops are interleaved in each round; the median and the least of all rounds are printed.
"""

import os
import platform
import time
import types

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
os.environ.setdefault('TF_USE_LEGACY_KERAS', '1')
import numpy as np
import tensorflow as tf
from absl import app, flags

from ops import library, pooling, row_optimizers, row_store, sharding
from ops.dedupe import dedupe as distinct
from ops.policy import Policy

_BATCH = flags.DEFINE_integer('batch', 4096, 'Samples a batch.')
_SLOTS = flags.DEFINE_integer('slots', 26, 'Slots, of one feature each.')
_WIDTH = flags.DEFINE_integer('width', 16, 'Factors of a row.')
_ROUNDS = flags.DEFINE_integer('rounds', 40, 'Batches that are measured.')
_WARM = flags.DEFINE_integer(
  'warm', 10, 'Batches before that; then the same ones come again, so that most features are known.'
)
_THREADS = flags.DEFINE_integer('threads', 2, 'Threads of an op.')
_FEATURES = flags.DEFINE_integer(
  'features', 0, 'Features in the table beside those of the batches.'
)
_OPTIMIZER = flags.DEFINE_enum(
  'optimizer', 'adagrad', list(row_optimizers.ROW_OPTIMIZERS), 'The row optimizer.'
)
_DTYPE = flags.DEFINE_enum('dtype', 'float32', ('float32', 'bfloat16'), 'Of the factors.')
_SEED = flags.DEFINE_integer('seed', 0, 'Of the keys.')


def power_law_keys(rng, batch, slots):
  """int64 [batch * slots], in a batch's order."""
  sizes = np.geomspace(10, 2_000_000, slots).astype(int)
  ids = (sizes * rng.random([batch, slots]) ** 3).astype(np.int64)
  return (
    (np.arange(1, slots + 1) << 52) + (sharding.mix64(ids) >> np.uint64(12)).astype(np.int64)
  ).reshape(-1)


def main(_):
  tf.config.threading.set_intra_op_parallelism_threads(_THREADS.value)
  rng = np.random.default_rng(_SEED.value)
  slots, width, batch = _SLOTS.value, _WIDTH.value, _BATCH.value
  table = row_store.TableSpec(
    'default',
    (row_store.FactorPart('plain', width),),
    linear=_OPTIMIZER.value,
    factors=_OPTIMIZER.value,
    dtype=_DTYPE.value,
  )
  store = row_store.RowStore(
    Policy(admission='score', admission_threshold=0.0),
    tables=[table],
    slot_table=[-1] + [0] * slots,
  )
  layout = pooling.PoolLayout((0,) * slots, (table.parts,), totals=True)
  attributes = {k: v for k, v in layout.attributes().items() if k != 'parts'}
  optimizer = types.SimpleNamespace(
    kind=_OPTIMIZER.value,
    learning_rate=0.05,
    initial_accumulator=0.1,
    beta1=0.9,
    beta2=0.999,
    epsilon=1e-7,
    l1=0.0,
    l2=0.0,
    l2_mode='touch',
    clip=None,
  )
  hyper = row_optimizers.hyper([(optimizer, optimizer)])
  empty = tf.zeros([0], tf.int32)

  @tf.function(reduce_retracing=True)
  def dedupe(keys, labels):
    return distinct(keys, [1.0], labels)

  @tf.function(reduce_retracing=True)
  def unique(keys, labels):
    distinct, inverse = tf.unique(keys)
    n = tf.size(distinct)
    return (
      distinct,
      tf.math.unsorted_segment_sum(tf.ones_like(labels), inverse, n),
      tf.math.unsorted_segment_sum(labels, inverse, n),
    )

  @tf.function(reduce_retracing=True)
  def pull(keys):
    return store.pull(keys)

  @tf.function(reduce_retracing=True)
  def pool(rows, d):
    return pooling.pool(rows, d, tf.zeros([0]), empty, batch, layout)

  @tf.function(reduce_retracing=True)
  def pool_gradient(rows, d, linear, slots, totals, squares):
    return library.load().ctr_pool_grad(
      factors=rows.factors,
      offsets=rows.offsets,
      values=tf.zeros([0]),
      segments=empty,
      batch_size=batch,
      starts=d.starts,
      order=d.order,
      linear_grad=linear,
      slots_grads=[slots],
      totals_grads=[totals],
      squares_grads=[squares],
      **attributes,
    )

  @tf.function(reduce_retracing=True)
  def push(d, rows, linear, factors, step):
    store.push(d.unique, rows, d.shows, d.clicks, linear, factors, tf.constant([1e-3]), hyper, step)

  for begin in range(0, _FEATURES.value, 1 << 20):
    n = min(1 << 20, _FEATURES.value - begin)
    keys = distinct((1 << 52) + (1 << 51) + np.arange(begin, begin + n)).unique
    pulled = store.pull(keys)
    store.push(keys, pulled, tf.ones([n]), tf.zeros([n]), tf.zeros([n]), [], [1.0], hyper, 1)

  batches = [
    (
      tf.constant(power_law_keys(rng, batch, slots)),
      tf.constant((rng.random(batch * slots) < 0.25).astype(np.float32)),
    )
    for _ in range(max(1, _WARM.value))
  ]
  times = {}

  def timed(name, f, *args):
    start = np.array([time.perf_counter(), time.process_time()])
    result = f(*args)
    times.setdefault(name, []).append(
      1e3 * (np.array([time.perf_counter(), time.process_time()]) - start)
    )
    return result

  u = 0
  for step in range(1, _WARM.value + _ROUNDS.value + 1):
    keys, labels = batches[step % len(batches)]
    d = timed('dedupe', dedupe, keys, labels)
    timed('tf.unique and two segment sums', unique, keys, labels)
    rows = timed('pull', pull, d.unique)
    pooled = timed('pool', pool, rows, d)
    linear, factors = timed(
      'pool gradient',
      pool_gradient,
      rows,
      d,
      pooled.linear,
      pooled.slots[0][0],
      pooled.totals[0][0],
      pooled.squares[0][0],
    )
    timed('push', push, d, rows, linear, factors, tf.constant(step, tf.int64))
    u += len(d.unique) / (_WARM.value + _ROUNDS.value)
  print(
    f'{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {_THREADS.value} '
    f'threads, load {os.getloadavg()[0]:.1f}, seed {_SEED.value}; '
    f'batch {batch} x {slots}, {u:.0f} distinct, width {width}, {_OPTIMIZER.value}, '
    f'{_DTYPE.value}, '
    f'{int(store.size())} features, '
    f'{int(store.bytes()) / int(store.size()):.0f} bytes each'
  )
  print(f'{"ms":32}{"median":>8}{"least":>8}{"of CPU":>8}')
  for name, ms in times.items():
    wall, cpu = np.array(ms[_WARM.value :]).T
    print(f'{name:32}{np.median(wall):8.2f}{np.min(wall):8.2f}{np.median(cpu):8.2f}')


if __name__ == '__main__':
  app.run(main)
