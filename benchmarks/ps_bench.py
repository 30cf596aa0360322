"""Samples a second of allreduce and of each parameter-server mode, with one worker and with two,
beside each other.

    python -m benchmarks.ps_bench [--modes ps,ps_async] [--workers 1,2] [--slowed] [--samples
    200000]

Jobs of real processes on this machine's loopback, one server each; the rate is that of the second
of two passes, over all workers.
--slowed: also ps_async with the second of two workers slowed 5 times (it is stopped for four of
every five slices of time); both together
should reach 0.8 of the rate of a job of one worker at least. All meet at the ends of a pass, so let
passes be long: --samples 1000000.
Processes share the machine's cores: with fewer cores than processes, two workers cannot be twice as
fast as one.
"""

import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import threading

from absl import app, flags

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MODES = flags.DEFINE_list('modes', ['allreduce', 'ps', 'ps_async', 'ps_geo'], 'Which to measure.')
WORKERS = flags.DEFINE_list('workers', ['1', '2'], 'Ranks or workers.')
SLOWED = flags.DEFINE_bool('slowed', False, 'Measure a slowed worker too.')
SAMPLES = flags.DEFINE_integer('samples', 200_000, 'Of a pass.')
BATCH = flags.DEFINE_integer('batch_size', 2048, 'train.batch_size.')
SEED = flags.DEFINE_integer('seed', 0, 'Of the data and the model.')
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


def environment(**more):
  return (
    os.environ
    | {'TF_CPP_MIN_LOG_LEVEL': '3', 'TF_USE_LEGACY_KERAS': '1', 'PYTHONPATH': ROOT}
    | more
  )


def addresses(n):
  held = [socket.create_server(('127.0.0.1', 0)) for _ in range(n)]
  found = [f'127.0.0.1:{s.getsockname()[1]}' for s in held]
  for s in held:
    s.close()
  return found


def slow(process, share, period=0.25):
  """Lets a process run for `share` of the time only, until it ends."""
  ended = threading.Event()
  while process.poll() is None:
    process.send_signal(signal.SIGSTOP)
    ended.wait(period * (1 - share))
    process.send_signal(signal.SIGCONT)
    ended.wait(period * share)


def measure(mode, workers, work, slowed=False):
  """Runs a job. Returns: the event of its second pass."""
  run_dir = tempfile.mkdtemp(dir=work)
  threads = str(
    max(1, len(os.sched_getaffinity(0)) // max(map(int, WORKERS.value)))
  )  # of a worker, the same in every job
  command = [
    sys.executable,
    '-m',
    'trainer.run',
    '--config',
    os.path.join(work, 'config.yaml'),
    '--run_dir',
    run_dir,
    '--set',
    f'sync.mode={mode}',
  ]
  with open(os.path.join(run_dir, 'log'), 'w', encoding='utf-8') as log:

    def start(command, **env):
      return subprocess.Popen(
        command,
        env=environment(CTR_THREADS=threads, **env),
        cwd=ROOT,
        stdout=log,
        stderr=subprocess.STDOUT,
      )

    if mode == 'allreduce':
      horovodrun = [
        os.path.join(os.path.dirname(sys.executable), 'horovodrun'),
        '-np',
        str(workers),
        '-H',
        f'localhost:{workers}',
      ]
      processes = [start((horovodrun if workers > 1 else []) + command)]
    else:
      found = addresses(1 + workers)
      cluster = {'ps': found[:1], 'worker': found[1:]}
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
    synthesize = [
      sys.executable,
      '-m',
      'trainer.synthesize',
      '--out',
      log,
      '--days',
      '2',
      '--samples_per_day',
      str(SAMPLES.value),
    ]
    subprocess.run(
      [*synthesize, '--seed', str(SEED.value)],
      check=True,
      env=environment(),
      cwd=ROOT,
      stdout=subprocess.DEVNULL,
    )
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
      line(
        'ps_async',
        2,
        event,
        f'  one slowed 5 times: {event["examples_per_second"] / alone["examples_per_second"]:.2f} '
        'of one alone',
      )


if __name__ == '__main__':
  app.run(main)
