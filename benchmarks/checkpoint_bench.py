"""Speed, size and memory of checkpoints: `python -m benchmarks.checkpoint_bench`.

    [--full] [--dir DIR]

It saves a checkpoint, loads it, and inspects it by slot as ctr-inspect does. Then it changes
one in a hundred features and saves, 20 times, and loads that. One process, D = 8, AdaGrad;
`--admitted` is the share of the features that have factors. Saving includes the fsync.
"""

import os
import shutil
import tempfile
import threading
import time

os.environ.setdefault('TF_USE_LEGACY_KERAS', '1')
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')

import numpy as np
import psutil
from absl import app, flags

FEATURES = flags.DEFINE_integer('features', 2_000_000, 'The number of features.')
FULL = flags.DEFINE_bool('full', False, 'Takes 20 M features.')
ADMITTED = flags.DEFINE_float('admitted', 1.0, 'Share of the features that have factors.')
DIR = flags.DEFINE_string('dir', None, 'Where to make a temporary directory.')
SEED = flags.DEFINE_integer('seed', 0, 'Seed of keys and values.')
WIDTH = 8
SHARE, INCREMENTS = 0.01, 20  # of the features, that each changes
CONFIG = {
  'data': {'train': ['none'], 'slots': [{'name': 'slot'}]},
  'sparse': {'tables': {'default': {'width': WIDTH}}},
  'model': {'interactions': ['linear', 'fm']},
}


class PeakMemory:
  """Measures the time of a block and the most resident memory in it, looking every 5 ms.

  Attributes:
    seconds: how long the block took.
    more: bytes of the peak above the beginning.
  """

  def __enter__(self):
    self._process, self._ended = psutil.Process(), threading.Event()
    self._started, self._before = time.monotonic(), self._process.memory_info().rss
    self._peak = self._before
    self._thread = threading.Thread(target=self._sample)
    self._thread.start()
    return self

  def _sample(self):
    while not self._ended.wait(0.005):
      self._peak = max(self._peak, self._process.memory_info().rss)

  def __exit__(self, *_):
    self.seconds = time.monotonic() - self._started
    self._ended.set()
    self._thread.join()
    self.more = max(self._peak, self._process.memory_info().rss) - self._before


def make_store():
  from ops.policy import Policy
  from ops.row_store import FactorPart, RowStore, TableSpec

  table = TableSpec(
    name='default', parts=(FactorPart('plain', WIDTH),), linear='adagrad', factors='adagrad'
  )
  return RowStore(
    Policy(admission='count', admission_count=2.0),
    tables=[table],
    slot_table=[-1, 0],
    seed=SEED.value,
  )


def fill(store, features, stride=1, first_step=1):
  """Adds features to the table; those with two shows are admitted and get factors.

  With another `stride`, it trains every so-manieth of them.
  """
  import tensorflow as tf

  from ops import row_optimizers
  from ops.dedupe import dedupe
  from trainer.config import RowOptimizer

  rng = np.random.default_rng(SEED.value)
  hyper = row_optimizers.hyper([(RowOptimizer(), RowOptimizer())])
  for step, begin in enumerate(range(0, features, stride << 18), first_step):
    places = np.arange(begin, min(features, begin + (stride << 18)), stride)
    n = len(places)
    keys = np.int64(1) << 52 | (places * 2654435761 % (1 << 52))
    shows = 1.0 + (rng.random(n) < ADMITTED.value)
    d = dedupe(keys, shows.astype(np.float32), np.zeros([1], np.float32))
    for shows in (d.shows, tf.zeros_like(d.shows)):  # the second push trains the factors
      rows = store.pull(d.unique, train=True)
      store.push(
        d.unique,
        rows,
        shows,
        d.clicks,
        tf.random.stateless_normal(tf.shape(rows.linear), [step, 0]),
        tf.random.stateless_normal(tf.shape(rows.factors), [step, 1]),
        tf.ones([1]),
        hyper,
        tf.constant(step, tf.int64),
      )


def payload(store):
  """Returns the bytes of the columns that a checkpoint must hold."""
  return sum(
    np.asarray(column).nbytes for chunk in store.export_state() for column in chunk.values()
  )


def main(_):
  from trainer import config
  from trainer.storage import checkpoint
  from trainer.storage.checkpoint_reader import CheckpointReader

  features = 20_000_000 if FULL.value else FEATURES.value
  print(
    f'{os.uname().nodename}, {len(os.sched_getaffinity(0))} cores, seed {SEED.value}, '
    f'{features:,} features, D = {WIDTH}, adagrad, {ADMITTED.value:.0%} admitted'
  )
  store = make_store()
  fill(store, features)
  run_dir = tempfile.mkdtemp(dir=DIR.value)
  directory = os.path.join(run_dir, 'checkpoints')
  checkpoints = checkpoint.Checkpoints(directory, most_layers=1 + INCREMENTS)
  try:
    config.write_of_run(config.Config.model_validate(CONFIG | {'run_dir': run_dir}))
    with PeakMemory() as memory:
      path = checkpoints.save(1, store=store, dense={}, progress={}, config_text='')
    size = sum(
      os.path.getsize(os.path.join(folder, name))
      for folder, _, names in os.walk(path)
      for name in names
    )
    print(
      f'save {features / memory.seconds / 1e6:6.2f} M rows/s  {memory.seconds:6.1f} s  '
      f'{size / 1e9:.3f} GB = {size / payload(store):.4f} x payload  '
      f'{memory.more / 2**20:6.0f} MiB above the table'
    )
    new = make_store()
    with PeakMemory() as memory:
      checkpoint.restore(path, store=new)
    table = int(new.bytes())
    print(
      f'load {features / memory.seconds / 1e6:6.2f} M rows/s  {memory.seconds:6.1f} s  '
      f'{(memory.more - table) / 2**20:6.0f} MiB above the table of {table / 2**20:,.0f} MiB'
    )
    assert int(new.size()) == int(store.size())
    with PeakMemory() as memory:
      (inspected,) = CheckpointReader(run_dir).slots()['features']
    print(
      f'inspect {features / memory.seconds / 1e6:5.2f} M rows/s  {memory.seconds:4.1f} s  '
      f'{memory.more / 2**20:6.0f} MiB above what it began with'
    )
    assert inspected == int(store.size())
    store.keep_changes()
    stopped, written = [], []
    for step in range(2, 2 + INCREMENTS):
      fill(store, features, int(1 / SHARE), step)
      changed = int(store.count_changes())
      with PeakMemory() as memory:
        path = checkpoints.save(step, store=store, dense={}, progress={}, config_text='')
      stopped.append(memory.seconds)
      own = checkpoint.check(path)
      name = f'rows-{own["serial"]}-00000-of-00001.bin'
      written.append(own['files'][name]['bytes'])
    share = np.median(written) / changed / (payload(store) / features)
    print(
      f'save {changed:,} changed rows  {np.median(stopped):.3f} s, at most {max(stopped):.3f}  '
      f'{np.median(written) / 1e6:.1f} MB = {share:.3f} x payload of these rows'
    )
    again = make_store()
    with PeakMemory() as memory:
      checkpoint.restore(path, store=again)
    print(f'load with {len(own["layers"]) - 1} increments  {memory.seconds:6.1f} s')
    assert int(again.size()) == int(store.size())
  finally:
    shutil.rmtree(run_dir, ignore_errors=True)


if __name__ == '__main__':
  app.run(main)
