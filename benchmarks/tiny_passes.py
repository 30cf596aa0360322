"""A day of tiny passes: how memory grows, and where the time of a pass goes.

    python -m benchmarks.tiny_passes [--passes 350] [--watch] [--dir DIR]

Each pass of 100 samples is evaluated before it is trained on, then there is a delta and a
checkpoint. Memory is what the trainer's process holds after each fiftieth pass. The seconds of a
pass are those of its parts in metrics.jsonl, over the passes after the first fifty.
"""

import collections
import json
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np
import psutil
import yaml
from absl import app, flags

PASSES = flags.DEFINE_integer('passes', 350, 'How many.')
WATCH = flags.DEFINE_bool('watch', False, 'By data.watch; otherwise by data.train.')
DIR = flags.DEFINE_string('dir', None, 'Where to make a temporary directory.')
SAMPLES, PASSES_OF_A_DAY, WARM_UP = 100, 40, 50
SLOTS = ('user', 'item', 'category', 'query', 'hour', 'device')
CONFIG = {
  'data': {
    'day_pattern': r'day_(\d+)',
    'label': 'click',
    'slots': [{'name': slot} for slot in SLOTS],
    'dense': [{'name': 'price', 'transform': 'log1p_standardise'}],
  },
  'model': {'interactions': ['linear', 'fm', {'dnn': {'hidden': [64, 32]}}]},
  'train': {'batch_size': 64, 'progressive_validation': True},
  'export': {'base': True, 'delta_every_passes': 1, 'keep': 2},
}


def write_passes(folder: pathlib.Path, passes: int) -> None:
  """Writes passes, with the files that announce them."""
  random = np.random.default_rng(0)
  for i in range(passes):
    path = folder / f'day_{i // PASSES_OF_A_DAY:03}_pass_{i % PASSES_OF_A_DAY:03}.csv'
    columns = [random.zipf(1.5, SAMPLES) % 1000 for _ in SLOTS]
    columns += [random.integers(1, 100, SAMPLES), random.random(SAMPLES) < 0.2]
    rows = '\n'.join(','.join(str(int(v)) for v in row) for row in zip(*columns))
    path.write_text(','.join([*SLOTS, 'price', 'click']) + f'\n{rows}\n')
    path.with_name(path.name + '.done').touch()


def taken(process: psutil.Process) -> tuple[float, float]:
  """Returns the MB that only this process holds, and its seconds on processors so far."""
  return process.memory_full_info().uss / 1e6, sum(process.cpu_times()[:2])


def events(path: pathlib.Path) -> list[dict]:
  """Returns the events that were written so far."""
  lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
  return [json.loads(line) for line in lines if line.endswith(b'\n')]


def measure(folder: pathlib.Path, passes: int, watch: bool) -> None:
  """Trains on the passes in a process of its own, and prints what it took."""
  logs = folder / 'logs'
  logs.mkdir()
  write_passes(logs, passes)
  tree = CONFIG | {'run_dir': f'{folder}/run'}
  tree['data'] = CONFIG['data'] | ({'watch': f'{logs}'} if watch else {'train': [f'{logs}/*.csv']})
  (folder / 'config.yaml').write_text(yaml.safe_dump(tree))
  command = [sys.executable, '-m', 'trainer.run', '--config', f'{folder}/config.yaml']
  job = subprocess.Popen(command, stdout=subprocess.DEVNULL)
  process, log = psutil.Process(job.pid), folder / 'run' / 'metrics.jsonl'
  told, first, before = 0, 0.0, 0.0
  while job.poll() is None and told < passes:
    time.sleep(0.05)
    trained = sum(event['event'] == 'train' for event in events(log))
    if trained // WARM_UP > told // WARM_UP or trained >= passes:
      megabytes, seconds = taken(process)
      first = first or megabytes
      print(f'after {trained:4} passes {megabytes:8.1f} MB, {megabytes - first:+6.1f}', end='')
      ran = f', {(seconds - before) / (trained - told):.3f} s of processors a pass' if told else ''
      print(ran, flush=True)
      told, before = trained, seconds
  if watch:
    job.send_signal(signal.SIGTERM)
  job.wait()
  by_part, found = collections.Counter(), events(log)
  measured = [event for event in found if event['event'] == 'train'][WARM_UP:]
  for event in measured:
    by_part.update(event['seconds'])
  wall = (measured[-1]['time'] - measured[0]['time']) / (len(measured) - 1)
  parts = {part: total / len(measured) for part, total in by_part.items()}
  parts['other'] = wall - sum(parts.values())
  print(f'{wall:.3f} s a pass: ', end='')
  print(', '.join(f'{part} {mean:.3f}' for part, mean in parts.items()))


def main(_: list[str]) -> None:
  with tempfile.TemporaryDirectory(dir=DIR.value) as folder:
    measure(pathlib.Path(folder), PASSES.value, WATCH.value)


if __name__ == '__main__':
  app.run(main)
