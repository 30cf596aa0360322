"""What rows on disk cost: `python -m benchmarks.cold_bench`.

    [--features 2000000] [--tables 8:0.65,64:0.25] [--rounds 5] [--steps 20] [--dir DIR] [--seed 0]

One process trains two models on the same batches in turns: one holds its table in memory, the
other a share of it (`--tables D:SHARE`), the rest in `--dir` (`sparse.memory_limit`).
So many per cent of a batch's distinct keys are drawn from the whole table, most of which is on
disk; before each turn the system forgets what it has read of the scratch file. Each figure stands
beside its goal. With D = 8 the share is over half: keys, counts and linear weights take that.
"""

import ctypes
import os
import tempfile
import time

os.environ.setdefault('TF_USE_LEGACY_KERAS', '1')
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')

import numpy as np
import psutil
from absl import app, flags

from benchmarks.page import machine, markdown_table

FEATURES = flags.DEFINE_integer('features', 2_000_000, 'Features of the table.')
TABLES = flags.DEFINE_list('tables', ['8:0.65', '64:0.25'], 'Widths, and shares kept in memory.')
ROUNDS = flags.DEFINE_integer('rounds', 5, 'Turns of each model.', lower_bound=1)
STEPS = flags.DEFINE_integer('steps', 20, 'Steps of a turn.', lower_bound=1)
DIR = flags.DEFINE_string('dir', None, 'A directory on a local disk, for the scratch files.')
SEED = flags.DEFINE_integer('seed', 0, 'Seed of the batches.')
SLOTS, BATCH, HOT = 26, 4096, 200_000
GOALS = {1: 0.7, 5: 0.4}  # per cent of cold keys: samples/s over those of all in memory


def make_step(width: int, **sparse):
  from trainer import config
  from trainer.comm.communicator import SingleProcess
  from trainer.training.step import TrainStep

  tree = {
    'data': {'train': ['none'], 'slots': [{'name': f's{i}'} for i in range(SLOTS)]},
    'sparse': {'tables': {'default': {'width': width}}} | sparse,
    'model': {'interactions': ['linear', 'fm', {'dnn': {'hidden': [256, 128]}}]},
    'lifecycle': {'admission': 'none', 'delete_after_unseen_days': 30},
    'train': {'batch_size': BATCH},
  }
  return TrainStep(config.Config.model_validate(tree), SingleProcess())


def keys_of(places: np.ndarray) -> np.ndarray:
  return (1 + places % SLOTS).astype(np.int64) << 52 | places * 2654435761 % (1 << 52)


def fill(store) -> None:
  """Pushes every feature once, those of low places last."""
  import tensorflow as tf

  from ops import row_optimizers
  from trainer.config import RowOptimizer

  hyper = row_optimizers.hyper([(RowOptimizer(), RowOptimizer())])
  for i, places in enumerate(np.array_split(np.arange(FEATURES.value)[::-1], 64)):
    keys = tf.constant(np.sort(keys_of(places)))
    rows, one = store.pull(keys, train=True), tf.ones([len(places)])
    gradients = (0.01 * tf.ones_like(g) for g in (rows.linear, rows.factors))
    step = tf.constant(1 + i, tf.int64)
    store.push(keys, rows, 10 * one, 0 * one, *gradients, tf.ones([1]), hyper, step)


def make_batch(rng: np.random.Generator, cold_percent: int):
  """Returns a batch of frequent features, with so many per cent of cold ones among the distinct."""
  from trainer.data.features import SlotBatch

  # The density of the place falls with 1 / place; a slot has each SLOTS-th place.
  places = np.exp(rng.random([BATCH, SLOTS]) * np.log(HOT)).astype(np.int64)
  count = len(np.unique(places)) * cold_percent // 100
  places.reshape(-1)[rng.choice(places.size, count, replace=False)] = rng.integers(
    HOT, FEATURES.value, count
  )
  places += np.arange(SLOTS) - places % SLOTS
  no_numbers = np.zeros([BATCH, 0], np.float32)
  none = np.zeros([0], np.int64)
  return SlotBatch(
    keys=keys_of(places).reshape(-1),
    values=none.astype(np.float32),
    segments=none.astype(np.int32),
    dense=no_numbers,
    label=(rng.random(BATCH) < 0.2).astype(np.float32),
    weight=np.ones([BATCH], np.float32),
    group=np.zeros([BATCH], np.int64),
    item=none,
    log_share=none.astype(np.float32),
  )


def seconds(work) -> float:
  began = time.perf_counter()
  work()
  return time.perf_counter() - began


def train(step, batches) -> None:
  from trainer.training.step import StepFlags

  for batch in batches:
    staged = step.stage(batch)
    step.train(staged, step.route(staged), None, StepFlags(False, False, False))


def resident() -> int:
  """Returns the bytes of the process, without what its allocator keeps of freed buffers."""
  ctypes.CDLL('libc.so.6').malloc_trim(0)
  return psutil.Process().memory_info().rss


def forget_scratch() -> None:
  """Makes the system read the scratch files from the disk again."""
  for fd in os.listdir('/proc/self/fd'):
    path = f'/proc/self/fd/{fd}'
    if os.path.islink(path) and '/rows-' in os.readlink(path):
      with open(path, 'rb+') as f:
        os.fdatasync(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(width: int, share: float) -> list[list[str]]:
  """Measures one width; returns rows of a table: what, in memory, limited, their ratio, wanted."""
  rng = np.random.default_rng(SEED.value)
  floats = 2 * (1 + width)
  table_bytes = FEATURES.value * (58 + 4 * floats)
  limit = int(share * table_bytes)
  limited = make_step(width, memory_limit=limit, cold_dir=DIR.value or tempfile.gettempdir())
  train(limited, [make_batch(rng, 0)])
  before = resident()
  fill(limited.store)
  rows, filled = [], resident()
  everything = make_step(width)
  train(everything, [make_batch(rng, 0)])
  fill(everything.store)
  own = resident() - filled  # of the model in memory
  models = {'memory': everything, 'limited': limited}

  def compare(name, work, wanted, after=lambda: None):
    times = {kind: [] for kind in models}
    for _ in range(ROUNDS.value):
      forget_scratch()
      turn = work()
      for kind, model in models.items():
        times[kind].append(seconds(lambda: turn(model)))
        after()
    figures = [np.median(times[kind]) for kind in ('memory', 'limited')]
    ratios = np.divide(times['memory'], times['limited'])
    cells = [f'{1e3 * f:,.0f} ms' for f in figures]
    rows.append([f'D = {width}: {name}', *cells, f'{np.median(ratios):.2f}', wanted])

  peak = filled

  def note_memory():
    nonlocal peak
    peak = max(peak, resident() - own)

  for percent in (0, *GOALS):

    def steps(percent=percent):
      batches = [make_batch(rng, percent) for _ in range(STEPS.value)]
      return lambda model: train(model, batches)

    goal = f'>= {GOALS[percent]}' if percent in GOALS else '–'
    compare(f'{STEPS.value} steps, {percent} % of keys cold', steps, goal, note_memory)

  for model in models.values():
    model.store.keep_changes()

  def changed():
    batch = [make_batch(rng, 1)]
    for model in models.values():
      model.store.keep_changes()
      train(model, batch)
    return lambda model: [None for _ in model.store.export_state(changed=True)]

  compare('rows that changed, as a checkpoint reads them', changed, '>= 0.83')
  compare('all rows', lambda: lambda model: [None for _ in model.store.export_state()], '–')

  def end_of_day(model):
    model.store.decay()
    model.store.evict()
    model.store.age()

  compare("a day's end", lambda: end_of_day, '>= 0.67')
  grown = peak - before
  rows.append(
    [
      f'D = {width}: memory of the process, over the limit of {limit / 1e6:,.0f} MB',
      f'{own / 1e6:,.0f} MB',
      f'{grown / 1e6:,.0f} MB',
      f'{grown / limit:.2f}',
      '<= 1.10',
    ]
  )
  return rows


def main(_):
  print(f'{machine()}, seed {SEED.value}, {FEATURES.value:,} features')
  rows = []
  for table in TABLES.value:
    width, share = table.split(':')
    rows += measure(int(width), float(share))
  print(markdown_table(['what', 'all in memory', 'limited', 'ratio', 'wanted'], rows))


if __name__ == '__main__':
  app.run(main)
