"""What features on disk cost: `python -m benchmarks.cold_bench`.

    [--features 20000000] [--tables 8:0.25] [--rounds 5] [--steps 20] [--dir DIR] [--seed 0]

Two processes train a model on the same batches in turns: one holds its table in memory, the other
a share of it (`--tables D:SHARE`), the rest in `--dir` (`sparse.memory_limit`). A cgroup holds the
latter to 1.1 times that, the system's cache of the files included, where one can be made. So many
per cent of a batch's distinct keys are drawn from the whole table, most of which is on disk. Each
figure stands beside its goal.
"""

import contextlib
import ctypes
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

os.environ.setdefault('TF_USE_LEGACY_KERAS', '1')
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')

import numpy as np
import psutil
from absl import app, flags

from benchmarks.page import machine, markdown_table

FEATURES = flags.DEFINE_integer('features', 20_000_000, 'Features of the table.')
TABLES = flags.DEFINE_list('tables', ['8:0.25'], 'Widths, and shares kept in memory.')
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


def fill(store, features: int, part: int) -> None:
  """Pushes every feature once, those of low places last."""
  import tensorflow as tf

  from ops import row_optimizers
  from trainer.config import RowOptimizer

  hyper = row_optimizers.hyper([(RowOptimizer(), RowOptimizer())])
  for i, end in enumerate(range(features, 0, -part)):
    places = np.arange(max(0, end - part), end)
    keys = tf.constant(np.sort(keys_of(places)))
    rows, one = store.pull(keys, train=True), tf.ones([len(places)])
    gradients = (0.01 * tf.ones_like(g) for g in (rows.linear, rows.factors))
    step = tf.constant(1 + i, tf.int64)
    store.push(keys, rows, 10 * one, 0 * one, *gradients, tf.ones([1]), hyper, step)


def make_batch(rng: np.random.Generator, cold_percent: int, features: int):
  """Returns a batch of frequent features, with so many per cent of cold ones among the distinct."""
  from trainer.data.features import SlotBatch

  # The density of the place falls with 1 / place; a slot has each SLOTS-th place.
  places = np.exp(rng.random([BATCH, SLOTS]) * np.log(HOT)).astype(np.int64)
  count = len(np.unique(places)) * cold_percent // 100
  places.reshape(-1)[rng.choice(places.size, count, replace=False)] = rng.integers(
    HOT, features, count
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


class Worker:
  """A model, which Remote makes and calls in a process of its own."""

  def __init__(self, width: int, features: int, steps: int, **sparse):
    self._step = make_step(width, **sparse)
    self._width, self._features, self._steps = width, features, steps
    train(self._step, [make_batch(np.random.default_rng(0), 0, features)])

  def fill(self) -> float:
    return seconds(lambda: fill(self._step.store, self._features, 400_000 // self._width))

  def train(self, percent: int, seed: int) -> float:
    rng = np.random.default_rng(seed)
    batches = [make_batch(rng, percent, self._features) for _ in range(self._steps)]
    return seconds(lambda: train(self._step, batches))

  def changed(self, percent: int, seed: int) -> float:
    self._step.store.keep_changes()
    self.train(percent, seed)
    return seconds(lambda: [None for _ in self._step.store.export_state(changed=True)])

  def everything(self) -> float:
    return seconds(lambda: [None for _ in self._step.store.export_state()])

  def end_day(self) -> float:
    store = self._step.store

    def work():
      store.decay()
      store.evict()
      store.age()

    return seconds(work)

  def resident(self) -> int:
    """Returns the bytes of the process, without what its allocator keeps of freed buffers."""
    ctypes.CDLL('libc.so.6').malloc_trim(0)
    return psutil.Process().memory_info().rss


def serve(pipe: Connection, *args, **kwargs) -> None:
  worker = Worker(*args, **kwargs)
  pipe.send(None)
  while call := pipe.recv():
    name, *arguments = call
    pipe.send(getattr(worker, name)(*arguments))


class Remote:
  """A Worker in a process of its own: `call` runs a method of it there and returns the result."""

  def __init__(self, *args, **kwargs):
    context = multiprocessing.get_context('spawn')
    self._pipe, other = context.Pipe()
    self.process = context.Process(target=serve, args=(other, *args), kwargs=kwargs, daemon=True)
    self.process.start()
    other.close()
    self._pipe.recv()

  def call(self, *call) -> float:
    self._pipe.send(call)
    try:
      return self._pipe.recv()
    except EOFError:
      raise SystemExit(f'{call[0]}: a model ended; was it killed above its limit?') from None

  def end(self) -> None:
    self._pipe.send(None)
    self.process.join()


@contextlib.contextmanager
def held(pid: int, most: int) -> Iterator[None]:
  """Holds what a process takes from now on to `most` bytes, if this user may make a cgroup."""
  root, file = '/sys/fs/cgroup', 'memory.max'
  if os.path.isdir(f'{root}/memory'):  # version 1
    root, file = f'{root}/memory', 'memory.limit_in_bytes'
  group = f'{root}/cold_bench_{os.getpid()}'
  try:
    os.mkdir(group)
    for name, value in ((file, most), ('cgroup.procs', pid)):
      with open(f'{group}/{name}', 'w') as f:
        f.write(str(value))
  except OSError as e:
    print(f'no cgroup holds the process to its limit: {e}')
    yield
    return
  try:
    yield
  finally:
    with contextlib.suppress(OSError), open(f'{root}/cgroup.procs', 'w') as f:
      f.write(str(pid))  # if it is still there
    os.rmdir(group)


def measure(width: int, share: float) -> list[list[str]]:
  """Measures one width; returns rows of a table: what, in memory, limited, their ratio, wanted."""
  floats = 2 * (1 + width)
  limit = int(share * FEATURES.value * (58 + 4 * floats))
  args = width, FEATURES.value, STEPS.value
  folder = DIR.value or tempfile.gettempdir()
  memory, limited = Remote(*args), Remote(*args, memory_limit=limit, cold_dir=folder)
  models = {'memory': memory, 'limited': limited}
  before = {kind: model.call('resident') for kind, model in models.items()}
  rows, peak = [], before['limited']

  def compare(name, wanted, *call, rounds=ROUNDS.value):
    nonlocal peak
    times = {kind: [] for kind in models}
    for i in range(rounds):
      turn = [SEED.value + i if word == 'seed' else word for word in call]
      for kind, model in models.items():
        times[kind].append(model.call(*turn))
      peak = max(peak, limited.call('resident'))
    figures = [np.median(times[kind]) for kind in ('memory', 'limited')]
    ratio = np.median(np.divide(times['memory'], times['limited']))
    cells = [f'{1e3 * f:,.0f} ms' for f in figures]
    rows.append([f'D = {width}: {name}', *cells, f'{ratio:.2f}', wanted])
    print(*rows[-1], sep=' | ', flush=True)

  with held(limited.process.pid, int(1.1 * limit)):
    compare('all features once', '–', 'fill', rounds=1)
    for percent in (0, *GOALS):
      goal = f'>= {GOALS[percent]}' if percent in GOALS else '–'
      compare(f'{STEPS.value} steps, {percent} % of keys cold', goal, 'train', percent, 'seed')
    what = 'rows that changed, as a checkpoint reads them'
    compare(what, '>= 0.83', 'changed', 1, 'seed')
    compare('all rows', '–', 'everything', rounds=1)
    compare("a day's end", '>= 0.67', 'end_day', rounds=3)
    own = memory.call('resident') - before['memory']
    grown = peak - before['limited']
    rows.append(
      [
        f'D = {width}: memory of the process, over the limit of {limit / 1e6:,.0f} MB',
        f'{own / 1e6:,.0f} MB',
        f'{grown / 1e6:,.0f} MB',
        f'{grown / limit:.2f}',
        '<= 1.10',
      ]
    )
  for model in models.values():
    model.end()
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
