"""Checkpoints: rows a second, bytes against the payload, and memory above the table's: saving,
loading, and inspecting by slot as trainer.inspect does.

    python -m benchmarks.checkpoint_bench [--full] [--dir DIR]

One process, D = 8, AdaGrad; all features have factors (`--admitted`). Saving ends with everything
on the disk.
"""

import os
import shutil
import tempfile
import threading
import time

os.environ.setdefault('TF_USE_LEGACY_KERAS', '1')
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')

import numpy as np
import yaml
from absl import app, flags

FEATURES = flags.DEFINE_integer('features', 2_000_000, 'How many.')
FULL = flags.DEFINE_bool('full', False, '20 M features.')
ADMITTED = flags.DEFINE_float('admitted', 1.0, 'Share of the features that have factors.')
DIR = flags.DEFINE_string('dir', None, 'Where to make a temporary directory.')
SEED = flags.DEFINE_integer('seed', 0, 'Of keys and values.')
WIDTH = 8
CONFIG = {
  'data': {'train': ['none'], 'slots': [{'name': 'slot'}]},
  'sparse': {'tables': {'default': {'width': WIDTH}}},
  'model': {'interactions': ['linear', 'fm']},
}


class PeakMemory:
  """The most this process held while the block ran, in bytes: resident memory sampled each 5 ms."""

  def _resident(self):
    with open('/proc/self/statm', encoding='ascii') as f:
      return int(f.read().split()[1]) * os.sysconf('SC_PAGE_SIZE')

  def __enter__(self):
    self.start = self.peak = self._resident()
    self._ended = threading.Event()

    def sample():
      while not self._ended.wait(0.005):
        self.peak = max(self.peak, self._resident())

    self._thread = threading.Thread(target=sample)
    self._thread.start()
    return self

  def __exit__(self, *_):
    self._ended.set()
    self._thread.join()
    self.end = self._resident()
    self.peak = max(self.peak, self.end)


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


def fill(store, features):
  """Pushes every key once, and once more those to be admitted: they get factors. Returns: keys."""
  import tensorflow as tf

  from ops import row_optimizers
  from ops.dedupe import dedupe
  from trainer.config import RowOptimizer

  rng = np.random.default_rng(SEED.value)
  hyper = row_optimizers.hyper([(RowOptimizer(), RowOptimizer())])
  for step, begin in enumerate(range(0, features, 1 << 18), 1):
    n = min(1 << 18, features - begin)
    keys = np.int64(1) << 52 | (np.arange(begin, begin + n) * 2654435761 % (1 << 52))
    shows = 1.0 + (rng.random(n) < ADMITTED.value)
    d = dedupe(keys, shows.astype(np.float32), np.zeros([1], np.float32))
    for shows in (d.shows, tf.zeros_like(d.shows)):  # the second trains the factors
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
  """Bytes of what a checkpoint must hold: the columns themselves."""
  return sum(
    np.asarray(column).nbytes for chunk in store.export_state() for column in chunk.values()
  )


def main(_):
  from trainer.reporting.inspection import Inspection
  from trainer.storage import checkpoint

  features = 20_000_000 if FULL.value else FEATURES.value
  print(
    f'{os.uname().nodename}, {len(os.sched_getaffinity(0))} cores, seed {SEED.value}, '
    f'{features:,} features, D = {WIDTH}, adagrad, '
    f'{ADMITTED.value:.0%} admitted'
  )
  store = make_store()
  fill(store, features)
  run_dir = tempfile.mkdtemp(dir=DIR.value)
  directory = os.path.join(run_dir, 'checkpoints')
  try:
    with open(os.path.join(run_dir, 'config.yaml'), 'w', encoding='utf-8') as f:
      yaml.safe_dump(CONFIG, f)
    with PeakMemory() as memory:
      started = time.monotonic()
      path = checkpoint.save(
        directory, 1, store=store, dense={}, progress={}, config_text='', keep=1
      )
      seconds = time.monotonic() - started
    size = sum(
      os.path.getsize(os.path.join(folder, name))
      for folder, _, names in os.walk(path)
      for name in names
    )
    print(
      f'save {features / seconds / 1e6:6.2f} M rows/s  {seconds:6.1f} s  {size / 1e9:.3f} GB = '
      f'{size / payload(store):.4f} x payload  '
      f'{(memory.peak - memory.start) / 2**20:6.0f} MiB above the table'
    )
    new = make_store()
    with PeakMemory() as memory:
      started = time.monotonic()
      checkpoint.restore(path, store=new)
      seconds = time.monotonic() - started
    print(
      f'load {features / seconds / 1e6:6.2f} M rows/s  {seconds:6.1f} s  '
      f'{(memory.peak - memory.start - int(new.bytes())) / 2**20:6.0f} MiB above the table of '
      f'{int(new.bytes()) / 2**20:,.0f} MiB'
    )
    assert int(new.size()) == int(store.size())
    with PeakMemory() as memory:
      started = time.monotonic()
      (found,) = Inspection(run_dir).slots()['features']
      seconds = time.monotonic() - started
    print(
      f'inspect {features / seconds / 1e6:5.2f} M rows/s  {seconds:4.1f} s  '
      f'{(memory.peak - memory.start) / 2**20:6.0f} MiB above what it began with'
    )
    assert found == int(store.size())
  finally:
    shutil.rmtree(run_dir, ignore_errors=True)


if __name__ == '__main__':
  app.run(main)
