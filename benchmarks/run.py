"""Measures our trainer beside others: `python -m benchmarks.run` (`make bench`).

The contenders of a group are processes that take turns, A, B, C, A, B, C, …; in its turn, or
*round*, each runs some training steps while the others are stopped. So a machine that gets slower
gets slower for all. A ratio compares the rates of one round, and its median over the rounds counts.
Everything goes to build/bench.json. A run of all groups without --quick also rewrites this
processor's tables and picture in docs/performance.md. The last lines name the missed goals.
"""

import contextlib
import dataclasses
import glob
import itertools
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from typing import NamedTuple

import numpy as np
import yaml
from absl import app, flags, logging

from benchmarks import bench_data, page
from benchmarks.bench_data import CRITEO, HISTORIES
from benchmarks.page import ROOT, WANTED
from ops import bfloat16

QUICK = flags.DEFINE_bool('quick', False, 'Runs one round of a few steps, to see that it works.')
FULL = flags.DEFINE_bool(
  'full', False, 'Adds 100 M features and 10 k steps: 16 GiB, 30 minutes; of panel: whole logs.'
)
ROUNDS = flags.DEFINE_integer('rounds', 7, 'Turns of each contender.', lower_bound=1)
SEED = flags.DEFINE_integer('seed', 0, 'Seed of data and models.')
CORES = flags.DEFINE_integer('cores', 2, 'Cores that a contender may use.', lower_bound=1)
ONLY = flags.DEFINE_list('only', None, 'Groups to measure, by the names in GROUPS; default: all.')

OUT = os.path.join('build', 'bench')
CONTENDERS = os.path.join('build', 'contenders-venv')
PAGE = os.path.join('docs', 'performance.md')


class Failed(Exception):
  """A contender could not be measured; the message says why."""


class Contender:
  """A process or several ranks of benchmarks.contenders; channel.py there has their protocol.

  Args:
    module: the module in benchmarks.contenders.
    spec: what the module reads, as a dict.
    ranks: if more than 1, the number of Horovod ranks that share the cores.
    python: the interpreter.
    pace: how many times as many steps as the others it takes in a round.
  """

  def __init__(self, module, spec, ranks=1, python=sys.executable, pace=1):
    self.module, self.spec, self.ranks, self.python, self.pace = module, spec, ranks, python, pace

  def start(self, name):
    """Starts it, waits for its first step, and stops it until its turn.

    Returns:
      Its first message.
    Raises:
      Failed: if it ended.
    """
    self._log = os.path.join(OUT, f'{name}.log')
    self._directory = tempfile.TemporaryDirectory()
    path = os.path.join(self._directory.name, 'line')
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(self.ranks)
    threads = str(max(1, CORES.value // self.ranks))
    env = os.environ | {
      'PYTHONPATH': ROOT,
      'CTR_THREADS': threads,
      'OMP_NUM_THREADS': threads,
      'CUDA_VISIBLE_DEVICES': '',
      'TF_CPP_MIN_LOG_LEVEL': '3',
      'TF_USE_LEGACY_KERAS': '1',
      'HOROVOD_GLOO_TIMEOUT_SECONDS': '100000',  # a rank that waits for its turn is not lost
    }
    spec = json.dumps(self.spec | {'seed': SEED.value, 'socket': path, 'launched': time.time()})
    command = [self.python, '-m', f'benchmarks.contenders.{self.module}', spec]
    if self.ranks > 1:
      horovodrun = os.path.join(os.path.dirname(sys.executable), 'horovodrun')
      where = ['-np', str(self.ranks), '-H', f'localhost:{self.ranks}']
      command = [horovodrun, '--gloo', *where, *command]
    with open(self._log, 'wb') as log:
      self._process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
      )
    self._lines = []
    listener.settimeout(1)
    while len(self._lines) < self.ranks:
      try:
        line, _ = listener.accept()
        line.settimeout(None)
        self._lines.append(line.makefile('rw', encoding='ascii'))
        line.close()
      except TimeoutError:
        if self._process.poll() is not None:
          self.close()
          raise Failed(self._last_words()) from None
    listener.close()
    hellos = self._hear()
    self._pids = [h['pid'] for h in hellos]
    self._signal(signal.SIGSTOP)
    return hellos[0] | {'startup_seconds': max(h['startup_seconds'] for h in hellos)}

  def _hear(self):
    answers = [line.readline() for line in self._lines]
    if not all(answers):
      self.close()
      raise Failed(self._last_words())
    return [json.loads(a) for a in answers]

  def _signal(self, number):
    for pid in self._pids:
      os.kill(pid, number)

  def take_steps(self, count):
    """Lets it take `count` steps.

    Returns:
      The sums of the ranks' figures; for `seconds`, the slowest rank's.
    Raises:
      Failed: if it ended.
    """
    self._signal(signal.SIGCONT)
    for line in self._lines:
      line.write(f'{count}\n')
      line.flush()
    answers = self._hear()
    self._signal(signal.SIGSTOP)
    total = {k: sum(a[k] for a in answers) for k in answers[0]}
    return total | {'seconds': max(a['seconds'] for a in answers)}

  def close(self):
    if self._process.poll() is None:
      for pid in getattr(self, '_pids', []):
        with contextlib.suppress(ProcessLookupError):
          os.kill(pid, signal.SIGCONT)
    for line in self._lines:
      with contextlib.suppress(BrokenPipeError):
        line.close()
    try:
      self._process.wait(60)
    except subprocess.TimeoutExpired:
      self._process.kill()
      self._process.wait()
    self._directory.cleanup()

  def _last_words(self):
    with open(self._log, encoding='utf-8', errors='replace') as f:
      words = [text.strip() for text in f if text.strip()]
    last = words[-1] if words else 'said nothing'
    return f'ended with status {self._process.returncode}: {last} ({self._log})'


class Rounds(dict):
  """The samples/s of each contender in each round: name -> list.

  Attributes:
    of_cpu: the same per second of processor time, which a busy machine changes less.
  """

  def __init__(self):
    super().__init__()
    self.of_cpu = {}

  def rate(self, name):
    return statistics.median(self[name]) if self.get(name) else None

  def ratios(self, over, under, of_cpu=False):
    """Returns the rate of `over` divided by that of `under` in each round; [] if one is missing."""
    rates = self.of_cpu if of_cpu else self
    return [a / b for a, b in zip(rates.get(over, []), rates.get(under, []))]


class Measured(NamedTuple):
  """What contenders that took turns reached, each dict by their names."""

  rounds: Rounds
  hellos: dict  # the first message
  last: dict  # the last figures
  failed: dict  # why a contender was left out


def interleave(contenders, shape_of, steps, warm_up=20):
  """Measures contenders side by side.

  Args:
    contenders: name -> Contender.
    shape_of: name -> Shape.
    steps: the steps of a round.
    warm_up: the steps before the first round.
  Returns:
    Measured.
  """
  rounds, hellos, last, failed = Rounds(), {}, {}, {}
  count, steps, warm_up = (1, min(steps, 4), 2) if QUICK.value else (ROUNDS.value, steps, warm_up)

  def attempt(name, work):
    try:
      return work()
    except (Failed, OSError) as e:
      failed[name] = str(e)
      rounds.pop(name, None)
      rounds.of_cpu.pop(name, None)
      logging.warning('%s is left out: %s', name, e)
      return None

  for name, contender in contenders.items():
    hello = attempt(name, lambda: contender.start(name))
    if hello and attempt(name, lambda: contender.take_steps(warm_up)):
      hellos[name], rounds[name] = hello, []
  for r in range(count):
    for name in list(rounds):
      own_steps = steps * contenders[name].pace
      answer = attempt(name, lambda: contenders[name].take_steps(own_steps))
      if answer:
        samples = own_steps * shape_of(name).batch
        rounds[name].append(samples / answer['seconds'])
        rounds.of_cpu.setdefault(name, []).append(samples / answer['cpu_seconds'])
        last[name] = answer
    rates = ', '.join(f'{name} {rates[-1]:,.0f}' for name, rates in rounds.items())
    logging.info('round %d of %d: %s', r + 1, count, rates)
  for name in list(rounds):
    contenders[name].close()
  return Measured(rounds, hellos, last, failed)


class Bench:
  """Measures the groups, each by the method of its name.

  Attributes:
    figures: the figures at the top of bench.json, which have goals.
    spread: the lowest and the highest round of figures, by key.
    raw: what each group measured.
    left_out: why a contender or a group was not measured.
    others: the output of benchmarks with a command of their own.
  """

  def __init__(self):
    self.figures = dict.fromkeys(WANTED)
    self.spread, self.raw, self.left_out, self.others = {}, {}, {}, {}
    self._numbers = itertools.count()

  def ratio(self, key, ratios):
    """Sets a figure to the median of its rounds."""
    if ratios:
      self.figures[key], self.spread[key] = statistics.median(ratios), [min(ratios), max(ratios)]

  def measure(self, group, contenders, shape=CRITEO, steps=20, warm_up=20):
    """Measures the contenders of a group and keeps their rates; `shape` may be a dict by name."""
    shape_of = shape.get if isinstance(shape, dict) else lambda _: shape
    found = interleave(contenders, shape_of, steps, warm_up)
    self.raw[group] = {
      name: {
        'samples_per_second': found.rounds.rate(name),
        'rounds': rates,
        'shape': shape_of(name).as_dict(),
      }
      for name, rates in found.rounds.items()
    }
    self.left_out |= found.failed
    return found

  def with_torch(self, contenders, name, module, spec):
    """Adds a contender that uses PyTorch, if PyTorch can be installed."""
    if why := contenders_environment():
      self.left_out[name] = why
    else:
      python = os.path.join(CONTENDERS, 'bin', 'python')
      contenders[name] = Contender(module, spec, python=python)

  def spec(self, shape, **config):
    """Writes config and data of a contender of ours; returns its spec."""
    from trainer import config as trainer_config
    from trainer import runtime  # noqa: F401 TensorFlow reads what it sets

    directory = os.path.abspath(
      os.path.join(OUT, 'data', f'{zlib.crc32(repr((shape, SEED.value)).encode()):08x}')
    )
    file = self._written(bench_data.config(shape, directory, **config))
    bench_data.prepare(shape, SEED.value, trainer_config.load(file), directory)
    return {'config': file}

  def raw_spec(self, shape, suffix, made=()):
    """Writes a raw log and its config with `made` columns; returns the spec of its conversion."""
    crc = zlib.crc32(repr((shape, SEED.value)).encode())
    path = os.path.abspath(os.path.join(OUT, 'data', f'{crc:08x}{suffix}'))
    bench_data.write_log(shape, SEED.value, path)
    return {
      'config': self._written(bench_data.raw_config(shape, path, made)),
      'samples': shape.samples,
    }

  def _written(self, tree):
    """Writes a config, given as a dict; returns its path."""
    run_dir = os.path.abspath(os.path.join(OUT, f'config_{next(self._numbers)}'))
    shutil.rmtree(run_dir, ignore_errors=True)  # a continued run keeps its dense_dtype
    with open(run_dir + '.yaml', 'w', encoding='utf-8') as f:
      yaml.safe_dump(tree | {'seed': SEED.value, 'run_dir': run_dir}, f)
    return run_dir + '.yaml'

  def main(self):
    ours, other = self.spec(CRITEO), {'shape': CRITEO.as_dict(), 'capacity': 8_000_000}
    no_lifecycle = {'admission': 'none', 'eviction': 'none'}
    contenders = {
      'ours, AdaGrad': Contender('ours', ours),
      'TFRA, AdaGrad': Contender('tfra', other | {'optimizer': 'Adagrad'}),
      'Keras static, AdaGrad': Contender('keras_static', other),
      'ours, Adam': Contender('ours', self.spec(CRITEO, optimizer='adam')),
      'TFRA, Adam': Contender('tfra', other | {'optimizer': 'Adam'}),
      'dense part alone': Contender('dense_part', other),
      'ours, no lifecycle': Contender('ours', self.spec(CRITEO, lifecycle=no_lifecycle)),
      'input alone': Contender('input', ours, pace=10),
    }
    self.with_torch(contenders, 'PyTorch static, AdaGrad', 'torch_static', other)
    rounds, hellos, _, _ = self.measure('main', contenders, steps=40)
    self.figures['samples_per_second'] = rounds.rate('ours, AdaGrad')
    for key, over, under in (
      ('vs_tfra_adagrad', 'ours, AdaGrad', 'TFRA, AdaGrad'),
      ('vs_tfra_adam', 'ours, Adam', 'TFRA, Adam'),
      ('vs_torch_static', 'ours, AdaGrad', 'PyTorch static, AdaGrad'),
      ('vs_keras_static', 'ours, AdaGrad', 'Keras static, AdaGrad'),
      ('input_over_train', 'input alone', 'ours, AdaGrad'),
      ('lifecycle_over_none', 'ours, no lifecycle', 'ours, AdaGrad'),
    ):
      self.ratio(key, rounds.ratios(over, under))
    self.raw['versions'] = {
      name: hello['version'] for name, hello in hellos.items() if 'version' in hello
    }
    self.figures['startup_seconds'] = hellos.get('ours, AdaGrad', {}).get('startup_seconds')

  def floor(self):
    """Compares our step with its dense part alone.

    The other contenders of `main` would push the data of these out of the caches.
    """
    contenders = {
      'ours, AdaGrad': Contender('ours', self.spec(CRITEO)),
      'dense part alone': Contender('dense_part', {'shape': CRITEO.as_dict()}),
      'ours, bfloat16': Contender('ours', self.spec(CRITEO, dense_dtype='bfloat16')),
    }
    rounds = self.measure('floor', contenders, steps=40).rounds
    names = 'dense part alone', 'ours, AdaGrad'
    self.ratio('over_dense_floor', rounds.ratios(*names))
    self.ratio('over_dense_floor_cpu', rounds.ratios(*names, of_cpu=True))
    self.ratio('bfloat16_over_float32', rounds.ratios('ours, AdaGrad', 'ours, bfloat16'))
    self.ratio('bfloat16_over_dense_floor', rounds.ratios('dense part alone', 'ours, bfloat16'))

  def logs(self):
    """Converts raw logs, beside training on the result."""
    # The log is long, so that the start and the end of a conversion hardly count.
    log, steps = dataclasses.replace(CRITEO, batches=60 if QUICK.value else 240), 20
    pace = log.batches // steps  # a round converts the log once
    contenders = {
      'training': Contender('ours', self.spec(CRITEO)),
      'raw TSV': Contender('convert', self.raw_spec(log, '.tsv'), pace=pace),
      'raw TSV, made columns': Contender(
        'convert', self.raw_spec(log, '.tsv', bench_data.MADE), pace=pace
      ),
      'raw Parquet': Contender('convert', self.raw_spec(log, '.parquet'), pace=pace),
    }
    rounds = self.measure('logs', contenders, steps=steps).rounds
    self.ratio('raw_over_train', rounds.ratios('raw TSV', 'training'))
    self.ratio('made_over_train', rounds.ratios('raw TSV, made columns', 'training'))
    self.ratio('parquet_over_train', rounds.ratios('raw Parquet', 'training'))

  def ranks(self):
    """Compares 2 ranks of half the threads with one process of all."""
    contenders = {'one process': Contender('ours', self.spec(CRITEO))} | {
      name: Contender('ours', self.spec(CRITEO, sync=sync), ranks=2)
      for name, sync in (
        ('2 ranks', None),
        ('2 ranks, rows by Horovod, too', {'row_exchange': 'horovod'}),
      )
    }
    rounds, _, last, _ = self.measure('ranks', contenders, steps=40)
    for key, name in zip(
      ('two_rank_efficiency', 'two_rank_efficiency_horovod'), list(contenders)[1:]
    ):
      self.ratio(key, rounds.ratios(name, 'one process'))
    if two := last.get('2 ranks'):
      self.figures['bytes_per_sample'] = two['sent_bytes'] / two['samples']
      # In a ring of N ranks each sends 2 (N − 1)/N of the buffer: for 2 ranks, all of it.
      self.figures['dense_bytes_per_sample'] = two['dense_bytes'] / CRITEO.batch
      self.figures['bytes_per_sample_needed'] = needed_bytes(CRITEO)

  def stores(self):
    """Compares the complete loop on our row store and on TFRA's tables (`sparse.store: tfra`)."""
    contenders = {
      'own row store': Contender('ours', self.spec(CRITEO)),
      "TFRA's tables": Contender('ours', self.spec(CRITEO, store='tfra')),
    }
    rounds = self.measure('stores', contenders).rounds
    self.ratio('own_over_tfra_store', rounds.ratios('own row store', "TFRA's tables"))

  def shapes(self):
    for key, shape in bench_data.OTHERS.items():
      contenders = {
        f'ours, {key}': Contender('ours', self.spec(shape)),
        f'dense part, {key}': Contender('dense_part', {'shape': shape.as_dict()}),
      }
      rounds = self.measure(key, contenders, shape).rounds
      self.figures[f'{key}_samples_per_second'] = rounds.rate(f'ours, {key}')
      self.ratio(f'{key}_over_dense_floor', rounds.ratios(f'dense part, {key}', f'ours, {key}'))

  def record(self):
    """Measures the shape of MLPerf's DLRM, for which others published figures."""
    shape = bench_data.RECORD
    dlrm = [{'dlrm': {'bottom': list(bench_data.DLRM_BOTTOM), 'hidden': list(shape.hidden)}}]
    contenders = {
      f'DLRM, {dtype}': Contender('ours', self.spec(shape, interactions=dlrm, dense_dtype=dtype))
      for dtype in ('float32', *['bfloat16'] * bfloat16.available())
    }
    rounds = self.measure('record', contenders, shape, steps=4, warm_up=8).rounds
    vectors = shape.slots + 1
    bottom = [shape.dense, *bench_data.DLRM_BOTTOM, shape.width]
    top = [shape.width + vectors * (vectors - 1) // 2, *shape.hidden, 1]
    multiplications = sum(a * b for mlp in (bottom, top) for a, b in itertools.pairwise(mlp))
    for name, rates in rounds.items():
      per_core = statistics.median(rates) / CORES.value
      # Forward, and backward to weights and inputs: six operations per multiplication.
      self.raw['record'][name] |= {
        'samples_per_second_a_core': per_core,
        'gflops_a_core': 6 * multiplications * per_core / 1e9,
      }

  def interactions(self):
    dnn = {'dnn': {'hidden': list(CRITEO.hidden)}}
    added = {'fm': ['fm'], 'cross': [{'cross': {'layers': 2, 'low_rank': 32}}], 'fwfm': ['fwfm']}
    contenders = {
      name: Contender('ours', self.spec(CRITEO, interactions=[dnn, *more]))
      for name, more in ({'dnn': []} | added).items()
    }
    rounds = self.measure('interactions', contenders).rounds
    for name in added:
      self.ratio(f'{name}_over_dnn', rounds.ratios('dnn', name))

  def histories(self):
    """Compares DIN on histories of several lengths with the same in plain TensorFlow ops."""
    contenders, shapes = {}, {}
    for length, shape in HISTORIES.items():
      din = {'din': {'attention': bench_data.ATTENTION, 'hidden': list(shape.hidden)}}
      ours, plain = f'ours, L = {length}', f'plain ops, L = {length}'
      contenders[ours] = Contender('ours', self.spec(shape, interactions=['linear', din]))
      contenders[plain] = Contender('keras_din', {'shape': shape.as_dict()})
      shapes |= {ours: shape, plain: shape}
    rounds = self.measure('histories', contenders, shapes).rounds
    for length in HISTORIES:
      ratios = rounds.ratios(f'ours, L = {length}', f'plain ops, L = {length}')
      self.ratio(f'din_{length}_vs_plain', ratios)

  def retrieval(self):
    """Compares matrix factorisation with 800 shared negatives with the same on static embeddings.

    Then runs benchmarks.retrieval_bench.
    """
    shape = bench_data.MF
    contenders = {
      'ours, MF': Contender('ours', self.spec(shape, lifecycle={}, retrieval=True)),
      'Keras static, MF': Contender('keras_mf', {'shape': shape.as_dict()}),
    }
    self.with_torch(contenders, 'PyTorch static, MF', 'torch_mf', {'shape': shape.as_dict()})
    rounds = self.measure('retrieval', contenders, shape, steps=100).rounds
    ratios = [rounds.ratios('ours, MF', name) for name in rounds if name != 'ours, MF']
    self.ratio('mf_vs_better', min(filter(None, ratios), key=statistics.median, default=[]))
    self.own_command('retrieval_bench')

  def ffm(self):
    shape = dataclasses.replace(bench_data.FRAPPE, width=4)
    contenders = {'ours, FFM': Contender('ours', self.spec(shape, interactions=['linear', 'ffm']))}
    rounds = self.measure('ffm', contenders, shape, steps=60).rounds
    self.figures['ffm_samples_per_second'] = rounds.rate('ours, FFM')

  def measure_tables(self, group, contenders, shapes=CRITEO):
    """Measures contenders whose tables differ in size; keeps the sizes too."""
    found = self.measure(group, contenders, shapes)
    for name, answer in found.last.items():
      kept = ('features', 'admitted', 'table_bytes', 'rss')
      self.raw[group][name] |= {key: answer[key] for key in kept}
    return found

  def table(self):
    """Measures steps on tables of several sizes.

    The smallest holds the features of two batches, which each epoch shuffles anew; the larger ones
    hold those of all 60 batches, and others.
    """
    small = dataclasses.replace(CRITEO, batches=2)
    sizes = {'0.1 M features': (small, 100_000), '5 M features': (CRITEO, 5_000_000)}
    if FULL.value:
      sizes['50 M features'] = (CRITEO, 50_000_000)
    contenders = {
      name: Contender('ours', self.spec(shape) | {'features': count})
      for name, (shape, count) in sizes.items()
    }
    shapes = {name: shape for name, (shape, _) in sizes.items()}
    rounds = self.measure_tables('table', contenders, shapes).rounds
    self.ratio('step_5m_over_100k', rounds.ratios('0.1 M features', '5 M features'))
    self.ratio('step_50m_over_100k', rounds.ratios('0.1 M features', '50 M features'))

  def small_rows(self):
    """Measures steps on tables of several sizes with rows in bfloat16."""
    large = {'100 M features': 100_000_000} if FULL.value else {'20 M features': 20_000_000}
    contenders = {
      f'{name}, bfloat16': Contender('ours', self.spec(CRITEO, small_rows=True) | {'features': n})
      for name, n in ({'1 M features': 1_000_000} | large).items()
    }
    rounds, _, last, _ = self.measure_tables('small_rows', contenders)
    one = '1 M features, bfloat16'
    self.ratio('step_20m_over_1m_bfloat16', rounds.ratios(one, '20 M features, bfloat16'))
    self.ratio('step_100m_over_1m_bfloat16', rounds.ratios(one, '100 M features, bfloat16'))
    if most := last.get('100 M features, bfloat16'):
      self.figures['gib_of_100m_bfloat16'] = most['table_bytes'] / 2**30

  def flat(self):
    """Compares resident memory at the end of a long run with that after 100 steps.

    All samples have been read by then.
    """
    early, steps = (10, 20) if QUICK.value else (100, 10_000 if FULL.value else 1000)
    contender = Contender('ours', self.spec(CRITEO))
    contender.start('flat')
    first, end = contender.take_steps(early)['rss'], contender.take_steps(steps - early)['rss']
    contender.close()
    self.raw['flat'] = {'early_steps': early, 'early_rss': first, 'steps': steps, 'rss': end}
    self.figures['rss_growth'] = end / first

  def memory(self):
    def told(features, **config):
      features = 300_000 if QUICK.value else features
      contender = Contender('memory', self.spec(CRITEO, **config) | {'features': features})
      hello = contender.start('memory')
      contender.close()
      return hello

    payload = 4 * 2 * (1 + CRITEO.width)  # AdaGrad has an accumulator for each weight
    full, half = told(3_000_000), told(6_000_000, small_rows=True)
    self.raw['memory'] = {name: value for name, value in full.items() if name.endswith('bytes')} | {
      'payload_bytes': payload,
      'bfloat16_bytes': half['admitted_bytes'],
      'bfloat16_resident_bytes': half['admitted_resident_bytes'],
    }
    self.figures['memory_over_payload'] = full['admitted_bytes'] / payload
    self.figures['probation_bytes'] = full['probation_bytes']
    self.figures['bytes_bfloat16'] = half['admitted_bytes']

  def parts(self):
    contender = Contender('parts', self.spec(CRITEO) | {'repeats': 5 if QUICK.value else 40})
    self.raw['parts'] = contender.start('parts')['milliseconds']
    contender.close()

  def other_benchmarks(self):
    """Runs the benchmarks of single parts, `*_bench.py`."""
    for file in sorted(glob.glob(os.path.join(ROOT, 'benchmarks', '*_bench.py'))):
      name = os.path.basename(file).removesuffix('.py')
      if name not in self.others:
        self.own_command(name)

  def own_command(self, name):
    """Keeps the output of `python -m benchmarks.NAME`, and the figures in build/bench/NAME.json."""
    result = os.path.join(OUT, f'{name}.json')
    command = [sys.executable, '-m', f'benchmarks.{name}']
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
      self.left_out[name] = (done.stderr.strip().splitlines() or ['said nothing'])[-1]
      return
    self.others[name] = {'command': f'python -m benchmarks.{name}', 'output': done.stdout}
    if os.path.exists(result):
      with open(result, encoding='utf-8') as f:
        self.raw[name] = json.load(f)
      self.figures |= {key: self.raw[name][key] for key in WANTED if key in self.raw[name]}


def needed_bytes(shape):
  """Returns the bytes per sample that 2 ranks must exchange.

  The other rank owns half of a rank's unique keys. Each of these costs 16 bytes (key, show and
  click), and 4 (1 + D) bytes each for its row and its gradient.
  """
  keys, _, _ = bench_data.batches(shape, SEED.value, bench_data.hashed_keys)
  unique = (
    sum(len(np.unique(half)) for batch in keys[:20] for half in np.array_split(batch, 2)) / 20
  )
  return unique / 2 * (16 + 8 * (1 + shape.width)) / shape.batch


def contenders_environment():
  """Installs, once, the packages that only contenders need; returns why it failed, or None."""
  requirements = os.path.join('benchmarks', 'requirements-contenders.txt')
  stamp = os.path.join(CONTENDERS, 'installed.txt')
  with open(requirements, encoding='utf-8') as f:
    wanted = f.read()
  if os.path.exists(stamp):
    with open(stamp, encoding='utf-8') as f:
      if f.read() == wanted:
        return None
  print(f'installing {requirements} into {CONTENDERS}', flush=True)
  pip = [os.path.join(CONTENDERS, 'bin', 'python'), '-m', 'pip', 'install', '-q']
  for command in (
    [sys.executable, '-m', 'venv', '--clear', CONTENDERS],
    [*pip, '--disable-pip-version-check', '-r', requirements],
  ):
    done = subprocess.run(
      command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
      return f'not installable: {(done.stdout.strip().splitlines() or ["pip said nothing"])[-1]}'
  with open(stamp, 'w', encoding='utf-8') as f:
    f.write(wanted)
  return None


GROUPS = (
  *('floor', 'main', 'logs', 'ranks', 'stores', 'shapes', 'record', 'interactions', 'histories'),
  *('ffm', 'retrieval', 'table', 'small_rows', 'flat', 'memory', 'parts', 'others'),
)


def main(_):
  os.chdir(ROOT)
  os.makedirs(OUT, exist_ok=True)
  cores = sorted(os.sched_getaffinity(0))[: CORES.value]
  os.sched_setaffinity(0, cores)  # the contenders inherit it
  chosen = ONLY.value or GROUPS
  for group in chosen:
    if group not in GROUPS:
      raise app.UsageError(f"--only: found '{group}'; wanted some of {', '.join(GROUPS)}")
  here = page.machine()
  load = here['load_before']
  print(
    f'{here["cpu"]}, {here["cores_used"]} of {here["cores"]} cores, {here["memory_gib"]} GiB, '
    f'load {load:.1f}; seed {SEED.value}; {CRITEO}',
    flush=True,
  )
  if load > 0.5 * len(cores):
    logging.warning('this machine is busy (load %.1f): rates are low and ratios vary', load)
  bench = Bench()
  for group in chosen:
    print(f'-- {group}', flush=True)
    try:
      getattr(bench, 'other_benchmarks' if group == 'others' else group)()
    except Failed as e:
      bench.left_out[group] = str(e)
      logging.warning('%s is left out: %s', group, e)
  result = {
    **bench.figures,
    'seed': SEED.value,
    'rounds': 1 if QUICK.value else ROUNDS.value,
    'quick': QUICK.value,
    'machine': here,
    'spread': bench.spread,
    'raw': bench.raw,
    'left_out': bench.left_out,
    'others': bench.others,
  }
  with open(os.path.join('build', 'bench.json'), 'w', encoding='utf-8') as f:
    json.dump(result, f, indent=1)
  print(page.side_by_side({page.processor(here): page.figures_of(result)}))
  print(page.tables(result))
  if not ONLY.value and not QUICK.value:
    page.picture(bench.raw['main'], os.path.join('docs', page.picture_of(here)))
    page.write_results(PAGE, result)
    print(f'wrote build/bench.json and {PAGE}')
  print(page.missed(bench.figures))


if __name__ == '__main__':
  app.run(main)
