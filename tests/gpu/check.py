"""Checks on a machine with a GPU what no test can see: `python tests/gpu/check.py [--out DIR]`.

Each item is a process of its own with a time limit, and DIR/results.json is written after each.
Without a GPU the items run on the CPU, or are skipped where that says nothing. The exit status is 1
if an item failed.
"""

import argparse
import concurrent.futures
import dataclasses
import itertools
import json
import math
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

Told = dict[str, Any]  # what an item found; `ok` is false if it is wrong, null if it says nothing
# The README's AUC of day_01, whose days have so many samples.
DEMO_AUC, DEMO_SAMPLES = {'train': 0.7962, 'next': 0.7626}, 250_000
MLPS, BATCHES = ((256, 128), (1024, 512, 256)), (4096, 16_384, 65_536)
NO_GPU = {'ok': None, 'found': 'no GPU seen'}


@dataclasses.dataclass(frozen=True)
class Options:
  out: pathlib.Path  # where results, the log and runs go
  samples: int  # of a day of the demo
  batches: tuple[int, ...]


def run(*arguments: str, timeout: float | None = None, **env: str) -> tuple[int, str]:
  """Runs Python in the tree; returns its status and output. A timeout ends it and its children."""
  process = subprocess.Popen(
    [sys.executable, *arguments],
    cwd=ROOT,
    env=os.environ
    | {'PYTHONPATH': str(ROOT), 'TF_USE_LEGACY_KERAS': '1', 'TF_FORCE_GPU_ALLOW_GROWTH': 'true'}
    | env,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    start_new_session=True,
  )
  try:
    text = process.communicate(timeout=timeout)[0]
  except subprocess.TimeoutExpired:
    os.killpg(process.pid, signal.SIGKILL)
    return -1, process.communicate()[0] + f'\nended after {timeout:.0f} s'
  return process.returncode, text


def succeed(*arguments: str) -> str:
  """Runs Python in the tree; returns its output, and raises RuntimeError with it if it fails."""
  status, text = run(*arguments)
  if status:
    raise RuntimeError(text[-3000:])
  return text


# --- items ---


def devices(options: Options) -> Told:
  """What TensorFlow sees, and how exactly the GPU multiplies."""
  import numpy as np
  import tensorflow as tf

  build, gpus = tf.sysconfig.get_build_info(), tf.config.list_physical_devices('GPU')
  query = ['nvidia-smi', '--query-gpu=name,driver_version,memory.total', '--format=csv,noheader']
  card = subprocess.check_output(query, text=True).strip() if shutil.which(query[0]) else None
  told = {'card': card, 'tensorflow': tf.__version__, 'cores': len(os.sched_getaffinity(0))}
  told |= {key: build.get(key) for key in ('cuda_version', 'cudnn_version')}
  if not gpus:
    return told | NO_GPU | ({'ok': False} if card else {})
  told['details'] = str([tf.config.experimental.get_device_details(gpu) for gpu in gpus])
  a = np.random.default_rng(0).normal(size=[512, 512]).astype(np.float32)
  for products in ('tf32', 'float32'):  # the first is what TensorFlow does by default
    tf.config.experimental.enable_tensor_float_32_execution(products == 'tf32')
    with tf.device('GPU:0'):
      error = tf.matmul(a, a).numpy() - a.astype(np.float64) @ a
    told[f'error_{products}'] = float(np.abs(error).max())
  found = f'{card}; errors {told["error_float32"]:.1e}, with TF32 {told["error_tf32"]:.1e}'
  return told | {'ok': told['error_float32'] < 1e-3, 'found': found}


def doctor(options: Options) -> Told:
  """What ctr-doctor says."""
  lines = succeed('-m', 'trainer.cli.doctor').splitlines()
  found = [line for line in lines if line.startswith('slow')]
  return {'ok': True, 'found': '; '.join(found) or 'all is well', 'lines': lines}


def placement(options: Options) -> Told:
  """Three steps of each model on the GPU and on the host, and what crosses between them.

  What should cross is what crosses to a CPU device in place of the GPU (placement_test).
  """
  import tensorflow as tf

  def of(device: str) -> list[Told]:
    lines = succeed('-m', 'tests.support.placement', device).splitlines()
    return [json.loads(line) for line in lines if line.startswith('{')]

  def large(shapes: list[list[int]]) -> list[list[int]]:
    return sorted(shape for shape in shapes if math.prod(shape) > 5)

  device = 'GPU:0' if tf.config.list_physical_devices('GPU') else 'CPU:1'
  stand_in = of('CPU:1')
  real = of(device) if device == 'GPU:0' else stand_in
  told: Told = {'device': device, 'models': {}}
  wrong = []
  for one, other in zip(real, stand_in, strict=True):
    limit = 2e-4 if one['products'] == 'float32' else 0.05
    checks = {
      'devices': (one['devices'], one['own_ops']) == ([device], ['CPU:0']),
      'weights': one['apart'] < limit,
      'crossing': not one['unknown']
      and all(large(one[way]) == large(other[way]) for way in ('to', 'from')),
      'kernels': not one['without_kernel'],
    }
    name = f'{one["model"]} {one["products"]}'
    told['models'][name] = one | {'checks': checks}
    wrong += [f'{name}: {check}' for check, right in checks.items() if not right]
  apart = ', '.join(f'{name} {of["apart"]:.1e}' for name, of in told['models'].items())
  return told | {'ok': not wrong, 'found': '; '.join([f'on {device}, apart: {apart}', *wrong])}


def log(options: Options) -> Told:
  """Two days of the demo's log."""
  out, samples = str(options.out / 'log'), str(options.samples)
  succeed('-m', 'trainer.cli.synthesize', '--out', out, '--days=2', '--samples_per_day', samples)
  return {'ok': True, 'found': f'2 days of {options.samples:,} samples'}


def _demo(options: Options, name: str) -> list[str]:
  """Returns the command, of which the last argument is the run_dir."""
  files = options.out / 'log' / 'day_*.csv'
  settings = f'data.train=["{files}"]', 'data.test=[]', 'checkpoint.every_steps=50'
  command = ['-m', 'trainer.run', '--config', 'configs/demo.yaml']
  command += itertools.chain.from_iterable(('--set', setting) for setting in settings)
  return [*command, '--run_dir', str(options.out / name)]


def _auc(command: list[str]) -> dict[str, float]:
  """Returns the AUC of the second day in a finished run, by the kind of table row."""
  with open(pathlib.Path(command[-1], 'metrics.jsonl'), encoding='utf-8') as f:
    events = [json.loads(line) for line in f]
  names = {'train': 'train', 'eval': 'next'}
  second = [e for e in events if e['event'] in names and e.get('pass') == 'day_01']
  return {names[e['event']]: round(e['auc'], 5) for e in second}


def _differs(found: dict[str, float], wanted: dict[str, float]) -> bool:
  return any(abs(found[name] - auc) > 0.002 for name, auc in wanted.items())


def demo(options: Options) -> Told:
  """Two passes of the demo end with the README's AUC."""
  succeed(*(command := _demo(options, 'demo')))
  found = _auc(command)
  if options.samples != DEMO_SAMPLES:
    return {'ok': None, 'found': f'{found}; the README has a larger log'}
  return {'ok': not _differs(found, DEMO_AUC), 'found': f'{found}, README {DEMO_AUC}'}


def resumed(options: Options) -> Told:
  """The demo killed after its first checkpoint, and continued, ends as one that was not."""
  command = _demo(options, 'resumed')
  checkpoints = pathlib.Path(command[-1], 'checkpoints')
  with subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=subprocess.DEVNULL) as process:
    while not list(checkpoints.glob('ckpt-*/DONE')):
      if process.poll() is not None:
        return {'ok': False, 'found': f'ended with {process.returncode} before it was killed'}
      time.sleep(0.02)
    process.kill()
  killed_at = max(os.listdir(checkpoints))
  succeed(*command)
  found, whole = _auc(command), _auc(_demo(options, 'demo'))
  told = f'killed at {killed_at}: {found}, not killed {whole}'
  return {'ok': not _differs(found, whole), 'found': told}


class Trained:
  """DeepFM on made-up batches in memory, as wide as Criteo's log."""

  def __init__(self, options: Options, hidden: tuple[int, ...]):
    import yaml

    from benchmarks import bench_data
    from trainer import config, runtime

    self._data, self._hidden = bench_data, hidden
    path = options.out / f'speed-{os.getpid()}.yaml'
    path.write_text(yaml.safe_dump(bench_data.config(self._shape(1, 1), 'none')))
    cfg = config.load(str(path))
    runtime.start(cfg)
    from trainer.comm.communicator import SingleProcess
    from trainer.training.step import TrainStep

    self.step = TrainStep(cfg, SingleProcess())

  def _shape(self, batch: int, batches: int) -> Any:
    return dataclasses.replace(self._data.CRITEO, hidden=self._hidden, batch=batch, batches=batches)

  def steps(self, size: int) -> Callable[[], None]:
    """Returns a function that takes a step, whose batch a thread prepared."""
    import numpy as np

    from trainer.data.features import SlotBatch
    from trainer.data.prefetch import prefetch
    from trainer.training.step import StepFlags

    made = self._data.batches(self._shape(size, 4), 1, self._data.hashed_keys)
    none = np.zeros([0], np.float32), np.zeros([0], np.int32)
    whole = np.ones([size], np.float32), np.zeros([size], np.int64)  # weights and groups
    batches = [SlotBatch(k.ravel(), *none, d, x.ravel(), *whole) for k, d, x in zip(*made)]
    self.staged = self.step.stage(batches[0])
    staged = prefetch(self.step.stage(batch) for batch in itertools.cycle(batches))

    def take() -> None:
      batch = next(staged)
      self.step.train(batch, self.step.route(batch), None, StepFlags(True, False, False))

    return take

  def layers(self) -> Callable[[], None]:
    """Returns a function that computes a step of the layers, whose inputs are on their device."""
    import tensorflow as tf

    dense, staged = self.step.dense, self.staged
    rows = self.step.store.pull(staged.deduped.unique, True)
    inputs = dense.embedding.embed(*staged, rows)
    with tf.device(dense.device):
      inputs, label, weight = tf.nest.map_structure(
        lambda x: x if x is None else tf.identity(x),
        (inputs, staged.batch.label, staged.batch.weight),
      )
    batch = staged.batch._replace(label=label, weight=weight)

    @tf.function(autograph=False)
    def take() -> tf.Tensor:
      with tf.device(dense.device):
        pooled = inputs.of_rows()
        with tf.GradientTape() as tape:
          tape.watch(pooled)
          loss, _ = dense._loss_of(batch, inputs, weight, None)
        *gradients, of_pooled = tape.gradient(loss, [*dense.trainable, pooled])
        dense.apply(gradients, tf.constant(1e-6), tf.constant(1, tf.int64))
        return loss + tf.add_n([tf.reduce_sum(gradient) for gradient in of_pooled])

    return lambda: take().numpy()


def _seconds(take: Callable[[], None], least: float = 2.0) -> float:
  """Returns the seconds of a call, after some to warm up."""
  for _ in range(4):
    take()
  began, count = time.monotonic(), 0
  while (passed := time.monotonic() - began) < least or count < 3:
    take()
    count += 1
  return passed / count


def speed(options: Options) -> Told:
  """Samples a second, and the share of a step for which the layers' device waits for the host.

  The share says nothing where the host is that device.
  """
  import tensorflow as tf

  if os.environ.get('CUDA_VISIBLE_DEVICES') != '' and not tf.config.list_physical_devices('GPU'):
    return NO_GPU
  table: Told = {}
  for hidden in MLPS:
    trained = Trained(options, hidden)
    for size in options.batches:
      step = _seconds(trained.steps(size))
      layers = _seconds(trained.layers(), 0.5)
      table[f'{"-".join(map(str, hidden))} {size}'] = {
        'samples_per_second': round(size / step),
        'step_ms': round(1000 * step, 2),
        'layers_ms': round(1000 * layers, 2),
        'waits': round(1 - layers / step, 2),
      }
  found = f'on {trained.step.dense.device}' + ''.join(
    f'\n    {name:>20}: {of["samples_per_second"]:>9,}/s, step {of["step_ms"]} ms, layers alone '
    f'{of["layers_ms"]} ms'
    for name, of in table.items()
  )
  return {'ok': True, 'found': found, 'table': table}


def memory(options: Options) -> Told:
  """The GPU's memory is as full after 500 steps as after 100."""
  import tensorflow as tf

  if not tf.config.list_physical_devices('GPU'):
    return NO_GPU
  take, used = Trained(options, MLPS[0]).steps(BATCHES[0]), {}
  for number in range(1, 501):
    take()
    if number in (100, 300, 500):
      used[number] = tf.config.experimental.get_memory_info('GPU:0')
  grown = used[500]['current'] - used[100]['current']
  found = f'{used[500]["current"] / 1e6:.1f} MB, peak {used[500]["peak"] / 1e6:.1f} MB; +{grown} B'
  return {'ok': grown < 1 << 20, 'found': found, 'used': used}


# --- all of them ---

# {item: seconds}. Those of a stage run beside one another; those that measure time run alone.
STAGES = (
  {'devices': 60, 'log': 60, 'doctor': 60},
  {'placement': 120, 'demo': 80},
  {'resumed': 120},
  {'speed': 80},
  {'memory': 40},
  {'speed_cpu': 80},
)
LIMITS = {name: seconds for stage in STAGES for name, seconds in stage.items()}


def plan(only: str) -> list[list[str]]:
  """Returns the stages with the chosen items; all if `only` is empty."""
  chosen = only.split(',') if only else list(LIMITS)
  if unknown := set(chosen) - set(LIMITS):
    sys.exit(f'--only: found {", ".join(sorted(unknown))}; wanted some of {", ".join(LIMITS)}')
  return [stage for names in STAGES if (stage := [name for name in names if name in chosen])]


def check(name: str, arguments: list[str], seconds: float) -> Told:
  """Runs an item in a process, which prints what it found as its last line."""
  began, own = time.monotonic(), {'CUDA_VISIBLE_DEVICES': ''} if name == 'speed_cpu' else {}
  if seconds < 5:
    return {'ok': None, 'found': 'not run: no time is left', 'seconds': 0}
  status, text = run(__file__, *arguments, '--item', name, timeout=seconds, **own)
  try:
    told = json.loads(text.splitlines()[-1])
  except (ValueError, IndexError):
    told = {'ok': False, 'found': f'status {status}: {text[-300:]}', 'text': text[-8000:]}
  return told | {'seconds': round(time.monotonic() - began, 1)}


def main(arguments: list[str]) -> int:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--out', default='build/gpu_check', help='where results, log and runs go')
  parser.add_argument('--only', default='', help=f'items, from {",".join(LIMITS)}; default: all')
  parser.add_argument('--seconds', type=float, default=240, help='for all items')
  parser.add_argument('--patience', type=float, default=1, help='multiplies all time limits')
  parser.add_argument('--samples', type=int, default=DEMO_SAMPLES, help='a day of the demo')
  parser.add_argument('--batches', default=','.join(map(str, BATCHES)), help='sizes to measure')
  parser.add_argument('--item', help=argparse.SUPPRESS)
  given = parser.parse_args(arguments)
  out = pathlib.Path(given.out).resolve()
  options = Options(out, given.samples, tuple(int(n) for n in given.batches.split(',')))
  if given.item:
    print('\n' + json.dumps(globals()[given.item.removesuffix('_cpu')](options)), flush=True)
    return 0
  stages = plan(given.only)
  out.mkdir(parents=True, exist_ok=True)
  deadline, results, lock = time.monotonic() + given.patience * given.seconds, {}, threading.Lock()

  def one(name: str) -> None:
    limit = min(given.patience * LIMITS[name], deadline - time.monotonic())
    told = check(name, arguments, limit)
    with lock:
      results[name] = told
      (out / 'results.json.new').write_text(json.dumps(results, indent=1))
      os.replace(out / 'results.json.new', out / 'results.json')
      state = {True: 'ok', False: 'FAILED', None: '-'}[told['ok']]
      print(f'{state:6} {name:10} {told["seconds"]:6} s  {told["found"]}', flush=True)

  for stage in stages:
    with concurrent.futures.ThreadPoolExecutor() as pool:
      list(pool.map(one, stage))
  failed = [name for name, told in results.items() if told['ok'] is False]
  if 'devices' in results and not results['devices'].get('details'):
    print('no GPU seen: what ran, ran on the CPU')
  print(
    f'{len(results) - len(failed)} of {len(results)} items without a failure; {out}/results.json'
  )
  return 1 if failed else 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
