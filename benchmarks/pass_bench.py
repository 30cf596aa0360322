"""What a pass costs, by part and size of the table: `python -m benchmarks.pass_bench`.

    [--features 1000000,20000000] [--passes 12] [--samples 100000] [--seed 0] [--dir DIR]

One process, D = 16, AdaGrad, trains on the same passes of 100 k samples with a checkpoint and a
delta each; between the runs only the number of other features in the table differs. A pass should
stop training for its checkpoint for at most .3 s, write at most 1.5 times the bytes of the rows
that it changed, and cost at most 1.25 times what it costs with 1 M features.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile

os.environ.setdefault('TF_USE_LEGACY_KERAS', '1')
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')

import numpy as np
import pandas as pd
import psutil
from absl import app, flags

from benchmarks.page import markdown_table

FEATURES = flags.DEFINE_list(
  'features', ['100000', '1000000', '5000000', '20000000'], 'How many other features it has.'
)
PASSES = flags.DEFINE_integer('passes', 12, 'Passes after the first, whose checkpoint is whole.')
SAMPLES = flags.DEFINE_integer('samples', 100_000, 'Samples of a pass.')
DIR = flags.DEFINE_string('dir', None, 'Where to make a temporary directory.')
SEED = flags.DEFINE_integer('seed', 0, 'Seed of the log.')
RUN = flags.DEFINE_string('run', None, 'Internal: the directory of the log, to run one size.')
SLOTS, IDS, WIDTH = 8, 1_000_000, 16
MILLION = 1_000_000  # other features, with which larger tables are compared
PARTS = {
  'training': ('step', 'wait', 'convert', 'exchange'),
  'delta': ('export',),
  'checkpoint': ('save',),
}
SIZES = 'sizes.jsonl'


def settings(folder: str, name: str) -> dict:
  return {
    'run_dir': os.path.join(folder, name),
    'data': {
      'format': 'prepared',
      'train': [os.path.join(folder, 'prepared', '*')],
      'label': 'click',
      'slots': [{'name': f's{i}'} for i in range(SLOTS)],
    },
    'sparse': {'tables': {'default': {'width': WIDTH}}},
    'model': {'interactions': ['linear', 'fm', {'dnn': {'hidden': [64, 32]}}]},
    'train': {'batch_size': 4096},
    'checkpoint': {'every_passes': 1},
    'export': {'delta_every_passes': 1},
  }


def write_log(folder: str) -> None:
  """Writes the passes, whose values have Zipf's frequencies, and prepares them."""
  import yaml

  from trainer import config
  from trainer.data.conversion import prepare_pass

  tree = settings(folder, 'log')
  tree['data'] |= {'format': 'csv', 'train': ['none']}
  cfg = config.parse(yaml.safe_dump(tree), 'pass_bench')
  rng = np.random.default_rng(SEED.value)
  for i in range(1 + PASSES.value):
    # The density of the place falls with 1 / place.
    ids = np.exp(rng.random([SAMPLES.value, SLOTS]) * np.log(IDS)).astype(int)
    log = pd.DataFrame(ids, columns=[f's{j}' for j in range(SLOTS)])
    log['click'] = (rng.random(len(log)) < 0.2).astype(int)
    path = os.path.join(folder, f'{i:03d}.csv')
    log.to_csv(path, index=False)
    prepare_pass(cfg, path, os.path.join(folder, 'prepared', f'{i:03d}'))
    os.remove(path)


def fill(store, features: int) -> None:
  """Adds other features, with factors, to a table."""
  import tensorflow as tf

  from ops import row_optimizers
  from trainer.config import RowOptimizer

  hyper = row_optimizers.hyper([(RowOptimizer(), RowOptimizer())])
  for begin in range(0, features, 1 << 18):
    places = np.arange(begin, min(features, begin + (1 << 18)))
    keys = (1 + places % SLOTS).astype(np.int64) << 52 | (places * 2654435761 % (1 << 52))
    keys = tf.constant(np.sort(keys))
    rows, n = store.pull(keys, train=True), len(places)
    shows, clicks = tf.ones([n]), tf.zeros([n])
    gradients = (0.01 * tf.ones_like(g) for g in (rows.linear, rows.factors))
    store.push(keys, rows, shows, clicks, *gradients, tf.ones([1]), hyper, tf.constant(1, tf.int64))


def run(folder: str, features: int) -> None:
  """Trains one run; prints the seconds of each pass by part as JSON."""
  from trainer import files, runtime
  from trainer.comm.communicator import SingleProcess
  from trainer.job.job import Job
  from trainer.job.source import Source
  from trainer.training.step import TrainStep

  source = Source(settings(folder, f'run_{features}'))
  runtime.start(source.cfg)
  cfg = source.with_measured_values()

  class FilledJob(Job):
    def open_run(self):
      super().open_run()
      fill(self.step.store, features)

    def save(self):
      super().save()
      sizes = [psutil.Process().memory_info().rss, files.size_of(cfg.run_dir)]
      with open(os.path.join(cfg.run_dir, SIZES), 'a', encoding='utf-8') as f:
        f.write(json.dumps(sizes) + '\n')

  communicator = SingleProcess()
  FilledJob(cfg, communicator, TrainStep(cfg, communicator, None)).run()


def parts_of(run_dir: str) -> pd.DataFrame:
  """Returns the seconds of each pass by part, and the bytes of memory and disk after it.

  The first two are left out: their checkpoint and delta are whole, and then read.
  """
  with open(os.path.join(run_dir, 'metrics.jsonl'), encoding='utf-8') as f:
    trained = [event for event in map(json.loads, f) if event['event'] == 'train']
  with open(os.path.join(run_dir, SIZES), encoding='utf-8') as f:
    sizes = [json.loads(line) for line in f]
  rows = []
  for before, event, (memory, disk) in zip(trained, trained[1:], sizes):
    whole = event['time'] - before['time']
    parts = {name: sum(event['seconds'].get(p, 0.0) for p in of) for name, of in PARTS.items()}
    rest = whole - sum(parts.values())
    rows.append(parts | {'the rest': rest, 'whole': whole, 'memory': memory, 'disk': disk})
  return pd.DataFrame(rows[2:])


def written_of(run_dir: str) -> tuple[int, float]:
  """Returns how many rows the last checkpoint wrote, and its bytes as a multiple of theirs."""
  from ops.chunks import COLUMNS
  from trainer import files
  from trainer.storage import checkpoint
  from trainer.storage.checkpoint_rows import Layer

  path = next(iter(checkpoint.candidates(os.path.join(run_dir, 'checkpoints'))))
  manifest = files.read_manifest(path)
  name, parts, rows = manifest['layers'][-1]
  size = sum(manifest['files'][file]['bytes'] for file in Layer(name, parts, rows).files())
  # Beside the columns of the lifecycle: weights, their AdaGrad state, and the last step.
  row_bytes = sum(np.dtype(dtype).itemsize for dtype in COLUMNS.values()) + 8 * (1 + WIDTH) + 4
  return rows, size / (rows * row_bytes)


def main(_):
  if RUN.value:
    run(RUN.value, int(FEATURES.value[0]))
    return
  print(f'{os.uname().nodename}, {len(os.sched_getaffinity(0))} cores, seed {SEED.value}')
  folder, rows, wholes = tempfile.mkdtemp(dir=DIR.value), [], {}
  try:
    write_log(folder)
    for features in map(int, FEATURES.value):
      command = [sys.executable, '-m', 'benchmarks.pass_bench', '--run', folder]
      subprocess.run(
        [*command, '--features', str(features), '--passes', str(PASSES.value)],
        check=True,
        stdout=subprocess.DEVNULL,
      )
      run_dir = os.path.join(folder, f'run_{features}')
      found = parts_of(run_dir)
      milliseconds = 1e3 * found.drop(columns=['memory', 'disk']).median()
      wholes[features] = milliseconds['whole']
      rows.append([f'{features:,}', *(f'{value:,.0f}' for value in milliseconds)])
      head = ['other features', *milliseconds.index]
      count, share = written_of(run_dir)
      longest = 1e3 * found['checkpoint'].max()
      print(
        f'{features:,} other features: checkpoints take at most {longest:,.0f} ms; the last wrote '
        f'{count:,} rows, {share:.3f} x their bytes'
      )
      tenth = max(1, len(found) // 10)
      for name in 'whole', 'memory', 'disk':
        first, last = found[name][:tenth].median(), found[name][-tenth:].median()
        print(f'  {name}: the last {tenth} passes {last / first:.2f} x the first {tenth}', end='')
        print(f', at most {found[name].max() / first:.2f} x')
      shutil.rmtree(run_dir)
  finally:
    shutil.rmtree(folder, ignore_errors=True)
  print(f'Milliseconds of a pass of {SAMPLES.value:,} samples, medians:\n')
  print(markdown_table(head, rows))
  largest = max(wholes)
  if largest > MILLION and MILLION in wholes:
    ratio = wholes[largest] / wholes[MILLION]
    print(f'\nwith {largest:,} others a pass takes {ratio:.2f} x as long as with {MILLION:,}')


if __name__ == '__main__':
  app.run(main)
