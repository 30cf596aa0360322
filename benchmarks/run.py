"""The benchmark page: `python -m benchmarks.run` (`make bench`) measures us beside others and
rewrites docs/performance.md.

Contenders are processes that stay alive for their group's whole run and take turns, A, B, C, A, B,
C, …, a round being some training steps; only one works at a time, so that a machine that drifts
drifts for all. A ratio is the median over rounds of the rates of one round. All goes to
build/bench.json; a run of all groups, not --quick, also rewrites this processor's tables and
picture in docs/performance.md. The last lines say which goals were missed.
"""

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

import numpy as np
import yaml
from absl import app, flags, logging

from benchmarks import bench_data
from benchmarks.bench_data import (
  ATTENTION,
  CRITEO,
  DLRM_BOTTOM,
  FRAPPE,
  HISTORIES,
  MF,
  OTHERS,
  RECORD,
)
from benchmarks.page import (
  ROOT,
  WANTED,
  machine,
  missed,
  picture,
  picture_of,
  tables,
  write_results,
)
from ops import bfloat16

QUICK = flags.DEFINE_bool(
  'quick', False, 'One round of a few steps: whether it runs, not how fast.'
)
FULL = flags.DEFINE_bool(
  'full', False, 'Also 50 M features and 10 k steps: 16 GiB of memory, half an hour more.'
)
ROUNDS = flags.DEFINE_integer('rounds', 7, 'Turns of each contender.', lower_bound=1)
SEED = flags.DEFINE_integer('seed', 0, 'Of data and models.')
CORES = flags.DEFINE_integer('cores', 2, 'Cores that a contender may use.', lower_bound=1)
ONLY = flags.DEFINE_list(
  'only',
  None,
  'Groups to measure, by name: see GROUPS.',
)

OUT = os.path.join('build', 'bench')
CONTENDERS = os.path.join('build', 'contenders-venv')
PAGE = os.path.join('docs', 'performance.md')


class Failed(Exception):
  """A contender could not be measured; the text says why."""


class Contender:
  """A process (or several ranks) of benchmarks.contenders; see contenders/channel.py for the line
  to it.

  Args:
    module: in benchmarks.contenders.
    spec: dict for it.
    ranks: > 1: Horovod ranks that share the cores.
    python: its interpreter.
    pace: its steps in a round, as a multiple of the others'; for one whose steps are short.
  """

  def __init__(self, module, spec, ranks=1, python=sys.executable, pace=1):
    self.module, self.spec, self.ranks, self.python, self.pace = module, spec, ranks, python, pace

  def start(self, name):
    """Starts it, waits for its first step, and stops it until its turn.

    Returns: what it tells of itself. Raises: Failed.
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
      'HOROVOD_GLOO_TIMEOUT_SECONDS': '100000',
    }  # a stopped rank is not a lost one
    spec = json.dumps(self.spec | {'seed': SEED.value, 'socket': path, 'launched': time.time()})
    command = [self.python, '-m', f'benchmarks.contenders.{self.module}', spec]
    if self.ranks > 1:
      horovodrun = os.path.join(os.path.dirname(sys.executable), 'horovodrun')
      command = [
        horovodrun,
        '--gloo',
        '-np',
        str(self.ranks),
        '-H',
        f'localhost:{self.ranks}',
        *command,
      ]
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
    """Lets it work for `count` steps.

    Returns: what the ranks told, summed, `seconds` being the slowest's. Raises: Failed.
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
        try:
          os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
          pass
    for line in self._lines:
      try:
        line.close()
      except BrokenPipeError:
        pass
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


class Round(dict):
  """name -> list of samples/s, a round each, of contenders that took turns.

  Attributes:
    of_cpu: the same of samples per second of processor time, which a busy machine changes less.
  """

  def __init__(self):
    super().__init__()
    self.of_cpu = {}

  def rate(self, name):
    return statistics.median(self[name]) if self.get(name) else None

  def ratios(self, over, under, of_cpu=False):
    """Rates of `over` by those of `under`, round by round; [] where either is missing."""
    rates = self.of_cpu if of_cpu else self
    return [a / b for a, b in zip(rates.get(over, []), rates.get(under, []))]


def interleave(contenders, shape_of, steps, warm_up=20):
  """Measures contenders side by side.

  Args:
    contenders: name -> Contender.
    shape_of: name -> Shape.
    steps: a round's.
  Returns: (Round, name -> what it told first, name -> its last answer, name -> why it was left
    out).
  """
  rounds, hellos, last, failed = Round(), {}, {}, {}
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
    logging.info(
      'round %d of %d: %s',
      r + 1,
      count,
      ', '.join(f'{name} {rates[-1]:,.0f}' for name, rates in rounds.items()),
    )
  for name in list(rounds):
    contenders[name].close()
  return rounds, hellos, last, failed


class Bench:
  """Measures group by group;

  `figures` holds what bench.json says at its top, `raw` what it is made of.
  """

  def __init__(self):
    self.figures = dict.fromkeys(WANTED)
    self.spread, self.raw, self.left_out, self.others = {}, {}, {}, {}
    self._numbers = itertools.count()

  def ratio(self, key, ratios):
    """Takes a figure as the median of its rounds."""
    if ratios:
      self.figures[key], self.spread[key] = statistics.median(ratios), [min(ratios), max(ratios)]

  def keep(self, group, rounds, shapes, failed):
    self.raw[group] = {
      name: {
        'samples_per_second': rounds.rate(name),
        'rounds': rates,
        'shape': shapes[name].as_dict(),
      }
      for name, rates in rounds.items()
    }
    self.left_out |= failed

  def spec(self, shape, **config):
    """spec of a contender of ours, its config and data written."""
    from trainer import config as trainer_config
    from trainer import runtime  # noqa: F401 TensorFlow reads what it sets

    directory = os.path.abspath(
      os.path.join(OUT, 'data', f'{zlib.crc32(repr((shape, SEED.value)).encode()):08x}')
    )
    file = self._written(bench_data.config(shape, directory, **config))
    bench_data.prepare(shape, SEED.value, trainer_config.load(file), directory)
    return {'config': file}

  def raw_spec(self, shape, suffix, made=()):
    """spec of the conversion of a raw log, its config and log written; `made` as for raw_config."""
    crc = zlib.crc32(repr((shape, SEED.value)).encode())
    path = os.path.abspath(os.path.join(OUT, 'data', f'{crc:08x}{suffix}'))
    bench_data.write_log(shape, SEED.value, path)
    return {
      'config': self._written(bench_data.raw_config(shape, path, made)),
      'samples': shape.samples,
    }

  def _written(self, tree):
    """The path of a config, as a dict, that is written here."""
    run_dir = os.path.abspath(os.path.join(OUT, f'config_{next(self._numbers)}'))
    shutil.rmtree(run_dir, ignore_errors=True)  # else a run would go on in its dense_dtype
    with open(run_dir + '.yaml', 'w', encoding='utf-8') as f:
      yaml.safe_dump(tree | {'seed': SEED.value, 'run_dir': run_dir}, f)
    return run_dir + '.yaml'

  def main(self):
    shape = CRITEO
    other = {'shape': shape.as_dict(), 'capacity': 8_000_000}
    ours = self.spec(shape)
    contenders = {
      'ours, AdaGrad': Contender('ours', ours),
      'TFRA, AdaGrad': Contender('tfra', other | {'optimizer': 'Adagrad'}),
      'PyTorch static, AdaGrad': Contender(
        'torch_static', other, python=os.path.join(CONTENDERS, 'bin', 'python')
      ),
      'Keras static, AdaGrad': Contender('keras_static', other),
      'ours, Adam': Contender('ours', self.spec(shape, optimizer='adam')),
      'TFRA, Adam': Contender('tfra', other | {'optimizer': 'Adam'}),
      'dense part alone': Contender('dense_part', other),
      'ours, default admission': Contender('ours', self.spec(shape, lifecycle={})),
      'ours, no lifecycle': Contender(
        'ours', self.spec(shape, lifecycle={'admission': 'none', 'eviction': 'none'})
      ),
      'input alone': Contender('input', ours, pace=10),
    }
    why = contenders_environment()
    if why:
      del contenders['PyTorch static, AdaGrad']
      self.left_out['PyTorch static, AdaGrad'] = why
    rounds, hellos, _, failed = interleave(contenders, lambda _: shape, steps=40)
    self.keep('main', rounds, dict.fromkeys(contenders, shape), failed)
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
    """Our step over its dense part alone, without the other contenders of `main`, whose data would
    push theirs out of the caches.
    """
    shape = CRITEO
    contenders = {
      'ours, AdaGrad': Contender('ours', self.spec(shape)),
      'dense part alone': Contender('dense_part', {'shape': shape.as_dict()}),
      'ours, bfloat16': Contender('ours', self.spec(shape, dense_dtype='bfloat16')),
    }
    rounds, _, _, failed = interleave(contenders, lambda _: shape, steps=40)
    self.keep('floor', rounds, dict.fromkeys(contenders, shape), failed)
    names = 'dense part alone', 'ours, AdaGrad'
    self.ratio('over_dense_floor', rounds.ratios(*names))
    self.ratio('over_dense_floor_cpu', rounds.ratios(*names, of_cpu=True))
    self.ratio('bfloat16_over_float32', rounds.ratios('ours, AdaGrad', 'ours, bfloat16'))
    self.ratio('bfloat16_over_dense_floor', rounds.ratios('dense part alone', 'ours, bfloat16'))

  def logs(self):
    """Conversion of raw logs beside training on what it makes."""
    # As long as logs are: what a conversion's begin and end take must not count for much.
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
    rounds, _, _, failed = interleave(contenders, lambda _: CRITEO, steps=steps)
    self.keep('logs', rounds, dict.fromkeys(contenders, CRITEO), failed)
    self.ratio('raw_over_train', rounds.ratios('raw TSV', 'training'))
    self.ratio('made_over_train', rounds.ratios('raw TSV, made columns', 'training'))
    self.ratio('parquet_over_train', rounds.ratios('raw Parquet', 'training'))

  def ranks(self):
    """2 ranks of half the threads beside one process of all, by what sums and carries rows."""
    shape = CRITEO
    contenders = {
      'one process': Contender('ours', self.spec(shape)),
      '2 ranks': Contender('ours', self.spec(shape), ranks=2),
      '2 ranks, sums by our connections, too': Contender(
        'ours', self.spec(shape, sync={'dense_allreduce': 'connections'}), ranks=2
      ),
      '2 ranks, rows by Horovod, too': Contender(
        'ours', self.spec(shape, sync={'row_exchange': 'horovod'}), ranks=2
      ),
    }
    rounds, _, last, failed = interleave(contenders, lambda _: shape, steps=40)
    self.keep('ranks', rounds, dict.fromkeys(contenders, shape), failed)
    keys = 'two_rank_efficiency', 'two_rank_efficiency_connections', 'two_rank_efficiency_horovod'
    for key, name in zip(keys, list(contenders)[1:]):
      self.ratio(key, rounds.ratios(name, 'one process'))
    two = last.get('2 ranks')
    if two:
      self.figures['bytes_per_sample'] = two['sent_bytes'] / two['samples']
      # A ring of N ranks sends 2 (N − 1)/N of the buffer from each: the whole buffer where N is 2.
      self.figures['dense_bytes_per_sample'] = two['dense_bytes'] / shape.batch
      self.figures['bytes_per_sample_needed'] = needed_bytes(shape)

  def stores(self):
    """The complete loop on our row store and on TFRA's tables (`sparse.store: tfra`)."""
    contenders = {
      'own row store': Contender('ours', self.spec(CRITEO)),
      "TFRA's tables": Contender('ours', self.spec(CRITEO, store='tfra')),
    }
    rounds, _, _, failed = interleave(contenders, lambda _: CRITEO, steps=20)
    self.keep('stores', rounds, dict.fromkeys(contenders, CRITEO), failed)
    self.ratio('own_over_tfra_store', rounds.ratios('own row store', "TFRA's tables"))

  def shapes(self):
    for key, shape in OTHERS.items():
      spec = self.spec(shape)
      rounds, _, _, failed = interleave(
        {
          f'ours, {key}': Contender('ours', spec),
          f'dense part, {key}': Contender('dense_part', {'shape': shape.as_dict()}),
        },
        lambda _: shape,
        steps=20,
      )
      self.keep(key, rounds, dict.fromkeys(rounds, shape), failed)
      self.figures[f'{key}_samples_per_second'] = rounds.rate(f'ours, {key}')
      self.ratio(f'{key}_over_dense_floor', rounds.ratios(f'dense part, {key}', f'ours, {key}'))

  def record(self):
    """The shape of MLPerf's DLRM, beside the figures that were published for it."""
    shape = RECORD
    dlrm = [{'dlrm': {'bottom': list(DLRM_BOTTOM), 'hidden': list(shape.hidden)}}]
    contenders = {
      f'DLRM, {dtype}': Contender('ours', self.spec(shape, interactions=dlrm, dense_dtype=dtype))
      for dtype in ('float32', *['bfloat16'] * bfloat16.available())
    }
    rounds, _, _, failed = interleave(contenders, lambda _: shape, steps=4, warm_up=8)
    self.keep('record', rounds, dict.fromkeys(rounds, shape), failed)
    vectors = shape.slots + 1
    bottom = [shape.dense, *DLRM_BOTTOM, shape.width]
    top = [shape.width + vectors * (vectors - 1) // 2, *shape.hidden, 1]
    multiplications = sum(a * b for mlp in (bottom, top) for a, b in itertools.pairwise(mlp))
    for name, rates in rounds.items():
      per_core = statistics.median(rates) / CORES.value
      # Forward, and backward to weights and to inputs: six operations a multiplication.
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
    rounds, _, _, failed = interleave(contenders, lambda _: CRITEO, steps=20)
    self.keep('interactions', rounds, dict.fromkeys(rounds, CRITEO), failed)
    for name in added:
      self.ratio(f'{name}_over_dnn', rounds.ratios('dnn', name))

  def histories(self):
    """DIN by the length of histories, beside the same in plain TensorFlow ops."""
    contenders, shapes = {}, {}
    for length, shape in HISTORIES.items():
      din = {'din': {'attention': ATTENTION, 'hidden': list(shape.hidden)}}
      ours, plain = f'ours, L = {length}', f'plain ops, L = {length}'
      contenders[ours] = Contender('ours', self.spec(shape, interactions=['linear', din]))
      contenders[plain] = Contender('keras_din', {'shape': shape.as_dict()})
      shapes |= {ours: shape, plain: shape}
    rounds, _, _, failed = interleave(contenders, shapes.get, steps=20)
    self.keep('histories', rounds, shapes, failed)
    for length in HISTORIES:
      ratios = rounds.ratios(f'ours, L = {length}', f'plain ops, L = {length}')
      self.ratio(f'din_{length}_vs_plain', ratios)

  def retrieval(self):
    """Matrix factorisation with 800 shared negatives beside the same on static embeddings, and
    what benchmarks.retrieval_bench measures.
    """
    python = os.path.join(CONTENDERS, 'bin', 'python')
    spec = {'shape': MF.as_dict()}
    contenders = {
      'ours, MF': Contender('ours', self.spec(MF, lifecycle={}, retrieval=True)),
      'Keras static, MF': Contender('keras_mf', spec),
      'PyTorch static, MF': Contender('torch_mf', spec, python=python),
    }
    why = contenders_environment()
    if why:
      del contenders['PyTorch static, MF']
      self.left_out['PyTorch static, MF'] = why
    rounds, _, _, failed = interleave(contenders, lambda _: MF, steps=100)
    self.keep('retrieval', rounds, dict.fromkeys(contenders, MF), failed)
    others = [rounds.ratios('ours, MF', name) for name in rounds if name != 'ours, MF']
    self.ratio('mf_vs_better', min(others, key=statistics.median) if others else [])
    self.own_command('retrieval_bench')

  def ffm(self):
    shape = dataclasses.replace(FRAPPE, width=4)
    contenders = {'ours, FFM': Contender('ours', self.spec(shape, interactions=['linear', 'ffm']))}
    rounds, _, _, failed = interleave(contenders, lambda _: shape, steps=60)
    self.keep('ffm', rounds, dict.fromkeys(rounds, shape), failed)
    self.figures['ffm_samples_per_second'] = rounds.rate('ours, FFM')

  def table(self):
    """A table of 0.1 M features holds those of two batches, shuffled anew each epoch;

    larger ones those of all 60, and others.
    """
    small, large = dataclasses.replace(CRITEO, batches=2), CRITEO
    sizes = {'0.1 M features': (small, 100_000), '5 M features': (large, 5_000_000)}
    if FULL.value:
      sizes['50 M features'] = (large, 50_000_000)
    contenders = {
      name: Contender('ours', self.spec(shape) | {'features': count})
      for name, (shape, count) in sizes.items()
    }
    rounds, _, last, failed = interleave(contenders, lambda _: CRITEO, steps=20)
    self.keep('table', rounds, {name: shape for name, (shape, _) in sizes.items()}, failed)
    for name, answer in last.items():
      self.raw['table'][name] |= {
        k: answer[k] for k in ('features', 'admitted', 'table_bytes', 'rss')
      }
    self.ratio('step_5m_over_100k', rounds.ratios('0.1 M features', '5 M features'))
    self.ratio('step_50m_over_100k', rounds.ratios('0.1 M features', '50 M features'))

  def small_rows(self):
    """Steps on tables of rows in bfloat16, by their size."""
    large = {'100 M features': 100_000_000} if FULL.value else {'20 M features': 20_000_000}
    contenders = {
      f'{name}, bfloat16': Contender('ours', self.spec(CRITEO, small_rows=True) | {'features': n})
      for name, n in ({'1 M features': 1_000_000} | large).items()
    }
    rounds, _, last, failed = interleave(contenders, lambda _: CRITEO, steps=20)
    self.keep('small_rows', rounds, dict.fromkeys(rounds, CRITEO), failed)
    for name, answer in last.items():
      self.raw['small_rows'][name] |= {
        k: answer[k] for k in ('features', 'admitted', 'table_bytes', 'rss')
      }
    one = '1 M features, bfloat16'
    self.ratio('step_20m_over_1m_bfloat16', rounds.ratios(one, '20 M features, bfloat16'))
    self.ratio('step_100m_over_1m_bfloat16', rounds.ratios(one, '100 M features, bfloat16'))
    most = last.get('100 M features, bfloat16')
    if most:
      self.figures['gib_of_100m_bfloat16'] = most['table_bytes'] / 2**30

  def flat(self):
    """Resident memory over a long run:

    after 100 steps, every sample having been seen, and at its end.
    """
    early, steps = (10, 20) if QUICK.value else (100, 10_000 if FULL.value else 1000)
    contender = Contender('ours', self.spec(CRITEO))
    contender.start('flat')
    first = contender.take_steps(early)
    end = contender.take_steps(steps - early)
    contender.close()
    self.raw['flat'] = {
      'early_steps': early,
      'early_rss': first['rss'],
      'steps': steps,
      'rss': end['rss'],
    }
    self.figures['rss_growth'] = end['rss'] / first['rss']

  def memory(self):
    contender = Contender(
      'memory', self.spec(CRITEO) | {'features': 300_000 if QUICK.value else 3_000_000}
    )
    told = contender.start('memory')
    contender.close()
    payload = 4 * 2 * (1 + CRITEO.width)  # AdaGrad: an accumulator for each weight
    self.raw['memory'] = {k: v for k, v in told.items() if k.endswith('bytes')} | {
      'payload_bytes': payload
    }
    self.figures['memory_over_payload'] = told['admitted_bytes'] / payload
    self.figures['probation_bytes'] = told['probation_bytes']
    contender = Contender(
      'memory',
      self.spec(CRITEO, small_rows=True) | {'features': 300_000 if QUICK.value else 6_000_000},
    )
    told = contender.start('memory')
    contender.close()
    self.figures['bytes_bfloat16'] = told['admitted_bytes']
    self.raw['memory']['bfloat16_bytes'] = told['admitted_bytes']
    self.raw['memory']['bfloat16_resident_bytes'] = told['admitted_resident_bytes']

  def parts(self):
    contender = Contender('parts', self.spec(CRITEO) | {'repeats': 5 if QUICK.value else 40})
    self.raw['parts'] = contender.start('parts')['milliseconds']
    contender.close()

  def other(self):
    """The benchmarks of single parts, each by its own command:

    their output, and where they write build/bench/NAME.json, that.
    """
    for file in sorted(glob.glob(os.path.join(ROOT, 'benchmarks', '*_bench.py'))):
      name = os.path.basename(file).removesuffix('.py')
      if name not in self.others:
        self.own_command(name)

  def own_command(self, name):
    """Takes what `python -m benchmarks.NAME` prints, and the figures that it writes."""
    result = os.path.join(OUT, f'{name}.json')
    command = [sys.executable, '-m', f'benchmarks.{name}']
    done = subprocess.run(
      command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
      self.left_out[name] = (done.stderr.strip().splitlines() or ['said nothing'])[-1]
      return
    self.others[name] = {'command': f'python -m benchmarks.{name}', 'output': done.stdout}
    if os.path.exists(result):
      with open(result, encoding='utf-8') as f:
        self.raw[name] = json.load(f)
      self.figures |= {key: self.raw[name][key] for key in WANTED if key in self.raw[name]}


def needed_bytes(shape):
  """Bytes a sample that must cross between 2 ranks: half of each rank's unique keys belong to the
  other.

  Each costs its key and show and click one way (16 bytes), its row the other way and its gradient
  the first again (4 (1 + D) each).
  """
  keys, _, _ = bench_data.batches(shape, SEED.value, bench_data.hashed_keys)
  unique = (
    sum(len(np.unique(half)) for batch in keys[:20] for half in np.array_split(batch, 2)) / 20
  )
  return unique / 2 * (16 + 8 * (1 + shape.width)) / shape.batch


def contenders_environment():
  """Installs the contenders that are not our dependencies, once.

  Returns: why that could not be done, or None.
  """
  requirements = os.path.join('benchmarks', 'requirements-contenders.txt')
  stamp = os.path.join(CONTENDERS, 'installed.txt')
  with open(requirements, encoding='utf-8') as f:
    wanted = f.read()
  if os.path.exists(stamp):
    with open(stamp, encoding='utf-8') as f:
      if f.read() == wanted:
        return None
  print(f'installing {requirements} into {CONTENDERS}', flush=True)
  for command in (
    [sys.executable, '-m', 'venv', '--clear', CONTENDERS],
    [
      os.path.join(CONTENDERS, 'bin', 'python'),
      '-m',
      'pip',
      'install',
      '-q',
      '--disable-pip-version-check',
      '-r',
      requirements,
    ],
  ):
    done = subprocess.run(
      command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
      return f'not installable: {(done.stdout.strip().splitlines() or ["pip said nothing"])[-1]}'
  with open(stamp, 'w', encoding='utf-8') as f:
    f.write(wanted)
  return None


GROUPS = {
  'floor': Bench.floor,
  'main': Bench.main,
  'logs': Bench.logs,
  'ranks': Bench.ranks,
  'stores': Bench.stores,
  'shapes': Bench.shapes,
  'record': Bench.record,
  'interactions': Bench.interactions,
  'histories': Bench.histories,
  'ffm': Bench.ffm,
  'retrieval': Bench.retrieval,
  'table': Bench.table,
  'small_rows': Bench.small_rows,
  'flat': Bench.flat,
  'memory': Bench.memory,
  'parts': Bench.parts,
  'others': Bench.other,
}


def main(_):
  os.chdir(ROOT)
  os.makedirs(OUT, exist_ok=True)
  cores = sorted(os.sched_getaffinity(0))[: CORES.value]
  os.sched_setaffinity(0, cores)  # for the contenders, who inherit it
  chosen = ONLY.value or list(GROUPS)
  for group in chosen:
    if group not in GROUPS:
      raise app.UsageError(f"--only: found '{group}'; wanted some of {', '.join(GROUPS)}")
  here = machine()
  print(
    f'{here["cpu"]}, {here["cores_used"]} of {here["cores"]} cores, {here["memory_gib"]} GiB, '
    f'load {here["load_before"]:.1f}; '
    f'seed {SEED.value}; {CRITEO}',
    flush=True,
  )
  if here['load_before'] > 0.5 * len(cores):
    logging.warning(
      'this machine is busy (load %.1f): ratios will wander, figures will be low',
      here['load_before'],
    )
  bench = Bench()
  for group in chosen:
    print(f'-- {group}', flush=True)
    try:
      GROUPS[group](bench)
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
  print(tables(result))
  if not ONLY.value and not QUICK.value:
    picture(bench.raw['main'], os.path.join('docs', picture_of(here)))
    write_results(PAGE, result)
    print(f'wrote build/bench.json and {PAGE}')
  print(missed(bench.figures))


if __name__ == '__main__':
  app.run(main)
