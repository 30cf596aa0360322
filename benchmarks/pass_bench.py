"""What a pass costs, by part and size of the table: `python -m benchmarks.pass_bench`.

    [--features 1000000,20000000] [--passes 12] [--dir DIR]

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
from absl import app, flags

FEATURES = flags.DEFINE_list('features', ['1000000', '20000000'], 'Sizes of the table.')
PASSES = flags.DEFINE_integer('passes', 12, 'Passes after the first, whose checkpoint is whole.')
SAMPLES = flags.DEFINE_integer('samples', 100_000, 'Samples of a pass.')
DIR = flags.DEFINE_string('dir', None, 'Where to make a temporary directory.')
SEED = flags.DEFINE_integer('seed', 0, 'Seed of the log and of the features.')
RUN = flags.DEFINE_string('run', None, 'Internal: the directory of the log, to run one size.')
SLOTS, IDS, WIDTH = 8, 1_000_000, 16
PARTS = ('step', 'wait', 'convert', 'export', 'save')


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
  from trainer import runtime
  from trainer.comm.communicator import SingleProcess
  from trainer.job.job import Job
  from trainer.source import Source
  from trainer.training.step import TrainStep

  source = Source(settings(folder, f'run_{features}'))
  runtime.start(source.cfg)
  cfg = source.with_measured_values()

  class FilledJob(Job):
    def open_run(self):
      super().open_run()
      fill(self.step.store, features)

  communicator = SingleProcess()
  FilledJob(cfg, communicator, TrainStep(cfg, communicator, None)).run()


def parts_of(run_dir: str) -> pd.DataFrame:
  """Returns the seconds of each pass by part, without the first ones, and what it has written."""
  with open(os.path.join(run_dir, 'metrics.jsonl'), encoding='utf-8') as f:
    events = [json.loads(line) for line in f]
  trained = [e for e in events if e['event'] == 'train']
  rows = []
  for before, event in zip(trained, trained[1:]):
    between = [e for e in events if before['time'] <= e['time'] < event['time']]
    seconds = event['seconds'] | {'whole': event['time'] - before['time']}
    for kind in ('save', 'export'):
      seconds[f'{kind} alone'] = sum(e['seconds'] for e in between if e['event'] == kind)
    seconds['rows of delta'] = sum(e['rows'] for e in between if e['event'] == 'export')
    rows.append(seconds)
  return pd.DataFrame(rows[1:]).fillna(0.0)


def main(_):
  if RUN.value:
    run(RUN.value, int(FEATURES.value[0]))
    return
  folder = tempfile.mkdtemp(dir=DIR.value)
  try:
    write_log(folder)
    for features in FEATURES.value:
      command = [sys.executable, '-m', 'benchmarks.pass_bench', '--run', folder]
      subprocess.run([*command, '--features', features], check=True, stdout=subprocess.DEVNULL)
      run_dir = os.path.join(folder, f'run_{features}')
      found = parts_of(run_dir)
      print(features)
      print(found.to_string())
      print(found.median())
      shutil.rmtree(run_dir)
  finally:
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == '__main__':
  app.run(main)
