"""Speed of allreduce and the parameter-server modes: `python -m benchmarks.ps_bench`.

    [--modes ps,ps_async] [--workers 1,2] [--slowed] [--samples 200000]

Each job has real processes on this machine's loopback, and one server. The rate is that of the
second of two passes, over all workers. The processes share the cores: with fewer cores than
processes, two workers cannot be twice as fast as one.

--slowed also measures ps_async with the second of two workers slowed 5 times: it is stopped for
four of every five slices of time. Both workers should reach 0.8 of the rate of a job of one worker.
They meet at the ends of passes, so passes must be long: --samples 1000000.
"""

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading

from absl import app, flags

from benchmarks.page import ROOT
from tests.support.parameter_servers import free_addresses

MODES = flags.DEFINE_list('modes', ['allreduce', 'ps', 'ps_async', 'ps_geo'], 'Modes to measure.')
WORKERS = flags.DEFINE_list('workers', ['1', '2'], 'Numbers of ranks or workers.')
SLOWED = flags.DEFINE_bool('slowed', False, 'Measures a slowed worker too.')
SAMPLES = flags.DEFINE_integer('samples', 200_000, 'Samples of a pass.')
BATCH = flags.DEFINE_integer('batch_size', 2048, 'train.batch_size.')
SEED = flags.DEFINE_integer('seed', 0, 'Seed of data and model.')
CONFIG = """
seed: {seed}
data:
  train: [{log}/day_*.csv]
  label: click
  slots: [{{name: user}}, {{name: item}}, {{name: category}}, {{name: tags, separator: '|'}},
    {{name: hour}}, {{name: device}}]
  dense: [{{name: price, transform: log1p_standardise}}, {{name: age, transform: standardise}}]
sparse: {{tables: {{default: {{width: 16}}}}}}
model: {{interactions: [linear, fm, {{dnn: {{hidden: [128, 64]}}}}]}}
train: {{batch_size: {batch}}}
checkpoint: {{every_passes: null}}
"""


ENVIRONMENT = {'TF_CPP_MIN_LOG_LEVEL': '3', 'TF_USE_LEGACY_KERAS': '1', 'PYTHONPATH': ROOT}


def slow(process, share, period=0.25):
  """Stops a process for all but `share` of the time, until it ends."""
  ended = threading.Event()
  while process.poll() is None:
    process.send_signal(signal.SIGSTOP)
    ended.wait(period * (1 - share))
    process.send_signal(signal.SIGCONT)
    ended.wait(period * share)


def measure(mode, workers, work, slowed=False):
  """Runs a job; returns the event of its second pass."""
  run_dir = tempfile.mkdtemp(dir=work)
  # Each worker has the same number of threads in every job.
  threads = str(max(1, len(os.sched_getaffinity(0)) // max(map(int, WORKERS.value))))
  config = os.path.join(work, 'config.yaml')
  command = [sys.executable, '-m', 'trainer.run', '--config', config, '--run_dir', run_dir]
  command += ['--set', f'sync.mode={mode}']
  with open(os.path.join(run_dir, 'log'), 'w', encoding='utf-8') as log:

    def start(command, **more):
      env = os.environ | ENVIRONMENT | {'CTR_THREADS': threads} | more
      return subprocess.Popen(command, env=env, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)

    if mode == 'allreduce':
      horovodrun = os.path.join(os.path.dirname(sys.executable), 'horovodrun')
      ranks = [horovodrun, '-np', str(workers), '-H', f'localhost:{workers}']
      processes = [start((ranks if workers > 1 else []) + command)]
    else:
      server, *others = free_addresses(1 + workers)
      cluster = {'ps': [server], 'worker': others}
      processes = [
        start(
          command, TF_CONFIG=json.dumps({'cluster': cluster, 'task': {'type': kind, 'index': i}})
        )
        for kind in cluster
        for i in range(len(cluster[kind]))
      ]
    if slowed:
      threading.Thread(target=slow, args=(processes[-1], 0.2), daemon=True).start()
    statuses = [p.wait() for p in processes]
  if any(statuses):
    with open(os.path.join(run_dir, 'log'), encoding='utf-8') as log:
      sys.exit(f'{mode} with {workers} workers ended with {statuses}:\n{log.read()[-3000:]}')
  with open(os.path.join(run_dir, 'metrics.jsonl'), encoding='utf-8') as f:
    return [e for e in map(json.loads, f) if e['event'] == 'train'][1]


def main(_):
  with tempfile.TemporaryDirectory() as work:
    log = os.path.join(work, 'log')
    synthesize = [sys.executable, '-m', 'trainer.cli.synthesize', '--out', log, '--days', '2']
    synthesize += ['--samples_per_day', str(SAMPLES.value), '--seed', str(SEED.value)]
    env = os.environ | ENVIRONMENT
    subprocess.run(synthesize, check=True, env=env, cwd=ROOT, stdout=subprocess.DEVNULL)
    with open(os.path.join(work, 'config.yaml'), 'w', encoding='utf-8') as f:
      f.write(CONFIG.format(seed=SEED.value, log=log, batch=BATCH.value))
    print(
      f'{platform.processor() or platform.machine()}, {len(os.sched_getaffinity(0))} cores, seed '
      f'{SEED.value}, {SAMPLES.value:,} samples a pass, '
      f'batch {BATCH.value}, 6 slots, D = 16, dnn 128-64, one server'
    )
    print(f'{"mode":12}{"workers":>8}{"samples/s":>12}{"bytes/sample":>14}{"logloss":>9}')

    def line(mode, workers, event, note=''):
      print(
        f'{mode:12}{workers:8}{event["examples_per_second"]:12,.0f}'
        f'{event.get("bytes_per_sample", float("nan")):14,.0f}'
        f'{event["logloss"]:9.4f}{note}',
        flush=True,
      )

    for mode in MODES.value:
      for workers in map(int, WORKERS.value):
        line(mode, workers, measure(mode, workers, work))
    if SLOWED.value:
      alone = measure('ps_async', 1, work)
      line('ps_async', 1, alone)
      event = measure('ps_async', 2, work, slowed=True)
      share = event['examples_per_second'] / alone['examples_per_second']
      line('ps_async', 2, event, f'  one slowed 5 times: {share:.2f} of one alone')


if __name__ == '__main__':
  app.run(main)
