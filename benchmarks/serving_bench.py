"""Speed from click to score: `python -m benchmarks.serving_bench [--rows N] [--seconds S]`.

It measures the time from a pass's marker to the changed score, with its parts
(launch/online_demo.sh), the rows published per second, and the requests answered per second with
their latency.

The model is DeepFM (D = 8, DNN 64-32) on six slots of one feature, one of several, and two dense
columns. Requests of benchmarks.load have 1 and 100 candidates of one user, in columns. They come
from 4 connections, first as fast as they are answered, then at half of that rate. Meanwhile a delta
of 1 % of the rows is applied about every second, until 50 versions have come. The server,
`ctr-serve --store DIRECTORY`, has as many processes as there are cores.

Servers of one process then get 100 candidates in turn: from the store, from memory, by gRPC, and a
plain TensorFlow SavedModel of the same rows behind the same HTTP server, without new versions. The
last model is DeepFM (D = 16, DNN 256-128) on 26 slots, 13 of them the user's. All processes share
the cores. Writes build/bench/serving_bench.json.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

os.environ.setdefault('TF_USE_LEGACY_KERAS', '1')
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')

import numpy as np
import tensorflow as tf
import yaml
from absl import app, flags

from tests.support.exports import RedisServer
from tests.support.scorer import Client
from trainer import config, runtime
from trainer.data.features import hash_keys
from trainer.model.builder import build
from trainer.serving import http, http_server, processes
from trainer.serving.limits import Limits
from trainer.serving.publisher import Publisher
from trainer.serving.scorer import Scores
from trainer.serving.stores import open_store
from trainer.storage import export_writer

ROWS = flags.DEFINE_integer('rows', 500_000, 'Features of the model.')
SECONDS = flags.DEFINE_integer('seconds', 10, 'Length of each measurement.')
SAVED_MODEL = flags.DEFINE_string('saved_model', None, 'Serves it; the bench calls itself so.')
SEED = 0  # of everything
SECONDS_TO_LOAD = 120  # a server's first version
BODIES = 199  # prime, so that each of several connections sends all of them in turn
VERSIONS = 50  # at least so many come while requests are answered
PASSES = 12  # of the loop; the first one is left out
OUT = os.path.join('build', 'bench', 'serving_bench.json')
WIDTH = 8
CONFIG = {
  'data': {
    'train': ['none'],
    'slots': [{'name': name} for name in ('user', 'item', 'category', 'query', 'hour', 'device')]
    + [{'name': 'tags', 'separator': '|'}],
    'dense': [{'name': 'price', 'transform': 'log1p'}, {'name': 'age'}],
  },
  'sparse': {'tables': {'default': {'width': WIDTH}}},
  'model': {'interactions': ['linear', 'fm', {'dnn': {'hidden': [64, 32]}}]},
}
CONTEXT = ('user', 'query', 'hour', 'device', 'age')
WIDE_SLOTS = [f'{whose}_{i}' for whose in ('user', 'item') for i in range(13)]
WIDE_CONFIG = {
  'data': {'train': ['none'], 'slots': [{'name': name} for name in WIDE_SLOTS]},
  'sparse': {'tables': {'default': {'width': 16}}},
  'model': {'interactions': ['linear', 'fm', {'dnn': {'hidden': [256, 128]}}]},
}
ROUNDS = 3  # of servers that are compared
_RATIOS = {
  'store_over_memory': ('store', 'memory'),
  'grpc_over_rest': ('grpc', 'memory'),
  'serving_over_saved_model': ('store', 'saved_model'),
}


class Rows:
  """Stands for a RowTable that trainer.storage.export_writer reads.

  Args:
    cfg: the config.
    keys: int64 [n].
    vectors: (keys int64 [m]) -> their factors, float32 [m, D].
    linear: the standard deviation of linear weights.
  """

  def __init__(
    self,
    cfg: config.Config,
    keys: np.ndarray,
    vectors: Callable[[np.ndarray], np.ndarray],
    linear: float = 0,
  ):
    self.keys = self.changed = keys
    self.policy, self._vectors, self._linear = cfg.policy(), vectors, linear
    self.rng = np.random.default_rng(SEED)

  def select(self, kind: str, among: None = None) -> np.ndarray:
    return self.changed if kind == 'delta' else self.keys

  def commit(self, kind: str, keys: np.ndarray) -> None:
    pass

  def pull(self, keys: np.ndarray, train: bool) -> types.SimpleNamespace:
    factors = self._vectors(np.asarray(keys))
    return types.SimpleNamespace(
      linear=(self._linear * self.rng.normal(size=len(keys))).astype(np.float32),
      offsets=np.arange(len(keys) + 1, dtype=np.int32) * factors.shape[1],
      factors=factors.ravel(),
    )


class Exports:
  """Writes exports of made-up rows of a config."""

  def __init__(self, folder: str, tree: dict[str, Any] = CONFIG):
    os.makedirs(folder)
    path = os.path.join(folder, 'config.yaml')
    with open(path, 'w', encoding='utf-8') as f:
      yaml.safe_dump(tree | {'run_dir': os.path.join(folder, 'run')}, f)
    self.cfg = config.load(path)
    self.directory = os.path.join(self.cfg.run_dir, 'exports')
    ids = self.cfg.slot_ids().values()
    texts = [str(i) for i in range(-(-ROWS.value // len(ids)))]
    rng, keys = np.random.default_rng(SEED), [hash_keys(texts, slot).numpy() for slot in ids]
    width = self.cfg.sparse.tables['default'].width

    def vectors(keys: np.ndarray) -> np.ndarray:
      return rng.normal(size=[len(keys), width]).astype(np.float32) / 10

    self.rows = Rows(self.cfg, np.concatenate(keys), vectors, linear=0.1)
    self.model, self.number, self.ancestors = build(self.cfg), 0, []

  def write(self, kind: str) -> str:
    """Writes an export; returns its path."""
    self.number += 1
    self.rows.changed = self.rows.rng.choice(self.rows.keys, len(self.rows.keys) // 100, False)
    columns = len(self.cfg.data.dense)
    stats = np.stack([np.zeros(columns), np.ones(columns), np.zeros(columns)]).astype(np.float32)
    position = {'number': self.number}
    more = {'store': self.rows, 'model': self.model, 'dense_stats': stats}
    done = export_writer.write(self.cfg, kind, position, ancestors=self.ancestors, **more)
    self.ancestors = [done.checksum]
    return done.path


def measure_publishing(folder: str, figures: dict[str, float]) -> None:
  """Measures rows per second of a base and a delta, into a directory and into Redis."""
  exports = Exports(os.path.join(folder, 'published'))
  addresses = {'embedded': os.path.join(folder, 'store')}
  with contextlib.ExitStack() as stack:
    if RedisServer.installed():
      server = RedisServer()
      stack.callback(server.stop)
      addresses['redis'] = server.url
    publishers = {}
    for name, address in addresses.items():
      store = open_store(address, '--to', writable=True)
      stack.callback(store.close)
      publishers[name] = Publisher(exports.directory, store)
    for kind in ('base', 'delta'):
      exports.write(kind)
      for name, publisher in publishers.items():
        applied = publisher.advance()
        rate = applied.rows / applied.seconds
        figures[f'publish_{name}_{kind}_rows_per_second'] = rate
        print(f'publish {kind:5} to {name:8} {applied.rows:9,} rows {rate:12,.0f} rows/s')


def measure_loop(figures: dict[str, float]) -> None:
  """Measures the seconds from a pass's marker to the changed score, as medians over passes."""
  command = ['launch/online_demo.sh', str(PASSES)]
  done = subprocess.run(command, capture_output=True, text=True, check=False)
  rows = re.findall(r'^day_.* \d+ +([\d. ]+)$', done.stdout, re.MULTILINE)
  if len(rows) < PASSES:
    print(f'the loop was not measured: {(done.stderr or done.stdout).strip()[-500:]}')
    return
  seconds = np.array([row.split()[-5:] for row in rows[1:]], float)
  names = ('all', 'train', 'export', 'publish', 'apply')
  found = dict(zip(names, np.median(seconds, 0).tolist()))
  figures['loop_seconds'] = found.pop('all')
  figures['loop_first_seconds'] = float(rows[0].split()[-5])
  figures |= {f'loop_{name}_seconds': value for name, value in found.items()}
  parts = ', '.join(f'{name} {value:.2f}' for name, value in found.items())
  print(
    f'from marker to changed score {figures["loop_seconds"]:.2f} s ({parts}), the slowest of '
    f'{len(seconds)} passes {seconds[:, 0].max():.2f} s; the first pass, with which all begins, '
    f'{figures["loop_first_seconds"]:.2f} s',
    flush=True,
  )


def bodies(candidates: int) -> list[str]:
  """Returns requests, as JSON, of one user with a number of candidates each."""
  rng, found = np.random.default_rng(SEED), []
  names = ('user', 'item', 'category', 'query', 'hour', 'device')
  for _ in range(BODIES):
    columns: dict[str, list[Any]] = {}
    for name in names:
      count = 1 if name in CONTEXT else candidates
      columns[name] = [str(i) for i in rng.integers(0, ROWS.value // 6, count)]
    tags = rng.integers(0, 1000, [candidates, 3])
    columns['tags'] = ['|'.join(map(str, some)) for some in tags]
    columns['price'] = rng.random(candidates).round(3).tolist()
    columns['age'] = [float(rng.integers(18, 80))]
    found.append(json.dumps({'inputs': columns}))
  return found


def wide_bodies(candidates: int) -> list[str]:
  """Returns requests for the model of 26 slots, as `bodies` does for the other one."""
  rng, found = np.random.default_rng(SEED), []
  for _ in range(BODIES):
    counts = {name: 1 if name.startswith('user') else candidates for name in WIDE_SLOTS}
    ids = {name: rng.integers(0, ROWS.value // 26, count) for name, count in counts.items()}
    columns = {name: [str(i) for i in some] for name, some in ids.items()}
    found.append(json.dumps({'inputs': columns}))
  return found


def load(
  port: int,
  requests: Sequence[str],
  connections: int,
  rate: float | None = None,
  calls: bool = False,
) -> dict[str, float]:
  """Calls benchmarks.load.measure in a process of its own, for `--seconds`."""
  what = {'port': port, 'bodies': requests, 'connections': connections, 'rate': rate}
  what['calls'] = calls
  done = subprocess.run(
    [sys.executable, '-m', 'benchmarks.load'],
    input=json.dumps(what | {'seconds': SECONDS.value}),
    capture_output=True,
    text=True,
    check=True,
  )
  return json.loads(done.stdout)


@contextlib.contextmanager
def process(*arguments: str) -> Iterator[int | tuple[int, int]]:
  """Runs a server; yields its port or, with `--grpc_port`, the ports of HTTP and gRPC."""
  command = [sys.executable, '-m', *arguments]
  server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
  try:
    port = int(re.search(r':(\d+)/', server.stdout.readline())[1])
    calls = None
    if '--grpc_port' in arguments:
      calls = int(re.search(r':(\d+)$', server.stdout.readline())[1])
    ends = time.monotonic() + SECONDS_TO_LOAD
    while True:
      client = Client(port)
      ready = client.ask('GET', '/healthz')[0] == 200
      client.close()
      if ready:
        break
      if time.monotonic() > ends:
        raise TimeoutError(f'{" ".join(arguments)} serves nothing after {SECONDS_TO_LOAD} s')
      time.sleep(0.2)
    yield (port, calls) if calls else port
  finally:
    server.terminate()
    server.wait()


def measure_requests(
  name: str,
  port: int,
  requests_of: dict[int, Sequence[str]],
  versions: Callable[[], int],
  figures: dict[str, float],
) -> None:
  """Measures requests, {number of candidates: bodies}."""
  for candidates, requests in requests_of.items():
    load(port, requests, 4)  # warms up
    before = versions()
    most = load(port, requests, 4)
    half = load(port, requests, 4, most['rate'] / 2)
    key = f'{name}_{candidates}'
    figures |= {f'{key}_per_second': most['rate'], f'{key}_failed': most['failed'] + half['failed']}
    figures |= {f'{key}_p50_ms': half['p50_ms'], f'{key}_p99_ms': half['p99_ms']}
    print(
      f'{name:12} {candidates:4} candidates: at most {most["rate"]:7,.0f} requests/s (p50 '
      f'{most["p50_ms"]:.1f}, p99 {most["p99_ms"]:.1f} ms); at {half["rate"]:7,.0f}/s p50 '
      f'{half["p50_ms"]:.1f}, p99 {half["p99_ms"]:.1f} ms; '
      f'{figures[f"{key}_failed"]:.0f} failed; {versions() - before} versions meanwhile',
      flush=True,
    )


class SavedModel:
  """Stands for trainer.serving.service.Service, and runs a SavedModel's graph."""

  not_ready = None

  def __init__(self, path: str):
    self._model = tf.saved_model.load(path)
    self._call = self._model.signatures['serving_default']
    self._dtypes = {n: s.dtype for n, s in self._call.structured_input_signature[1].items()}
    self.version = types.SimpleNamespace(sequence=1, done_at=time.time())

  def predict(self, request: Any) -> tuple[Any, int]:
    inputs = {name: tf.constant(request.columns[name], d) for name, d in self._dtypes.items()}
    outputs = self._call(**inputs)
    return Scores({name: value.numpy() for name, value in outputs.items()}, {}), 1

  def unknown_columns(self, request: Any) -> list[str]:
    return []


def serve_saved_model(path: str) -> None:
  runtime.start_serving()
  app = http.App(SavedModel(path), 'ctr', Limits())
  listener = processes.listener('127.0.0.1', 0)
  print(f'serving http://127.0.0.1:{listener.getsockname()[1]}/', flush=True)
  http_server.server(app).run(sockets=[listener])


def main(_: list[str]) -> None:
  if SAVED_MODEL.value:
    return serve_saved_model(SAVED_MODEL.value)
  figures: dict[str, float] = {}
  print(f'{os.cpu_count()} cores, {ROWS.value:,} features, seed {SEED}')
  with tempfile.TemporaryDirectory() as folder:
    measure_loop(figures)
    measure_publishing(folder, figures)
    _measure_serving(folder, figures)
  os.makedirs(os.path.dirname(OUT), exist_ok=True)
  with open(OUT, 'w', encoding='utf-8') as f:
    json.dump(figures, f, indent=1)


@contextlib.contextmanager
def published(exports: Exports, address: str) -> Iterator[list[Any]]:
  """Publishes a base, then a delta about every second; yields what was applied."""
  exports.write('base')
  store, stop = open_store(address, '--to', writable=True), threading.Event()
  publisher = Publisher(exports.directory, store)
  publisher.advance()
  applied = []

  def publish() -> None:
    while not stop.wait(1):
      exports.write('delta')
      applied.append(publisher.advance())

  thread = threading.Thread(target=publish)
  thread.start()
  try:
    yield applied
  finally:
    stop.set()
    thread.join()
    store.close()


def _measure_serving(folder: str, figures: dict[str, float]) -> None:
  on_all_cores = '--port', '0', '--processes', str(os.cpu_count())
  exports = Exports(os.path.join(folder, 'small'))
  saved_model, address = exports.write('saved_model'), os.path.join(folder, 'small', 'store')
  with published(exports, address) as applied:
    with process('trainer.cli.serve', '--store', address, *on_all_cores) as port:
      requests_of = {n: bodies(n) for n in (1, 100)}
      measure_requests('serve', port, requests_of, lambda: len(applied), figures)
      failed = figures['serve_1_failed'] + figures['serve_100_failed']
      while len(applied) < VERSIONS:
        failed += load(port, bodies(100), 2, rate=50)['failed']
      figures |= {'serve_failed': failed, 'serve_versions': len(applied)}
      print(f'{failed:.0f} failed requests through {len(applied)} versions', flush=True)
    _compare(exports, address, saved_model, figures)
  exports = Exports(os.path.join(folder, 'wide'), WIDE_CONFIG)
  address = os.path.join(folder, 'wide', 'store')
  with published(exports, address) as applied:
    with process('trainer.cli.serve', '--store', address, *on_all_cores) as port:
      measure_requests('wide', port, {100: wide_bodies(100)}, lambda: len(applied), figures)


def _compare(exports: Exports, address: str, saved_model: str, figures: dict[str, float]) -> None:
  """Measures servers of one process beside one another, by 100 candidates."""
  memory = 'trainer.cli.serve', '--run_dir', exports.cfg.run_dir, '--port', '0', '--grpc_port', '0'
  rates: dict[str, list[float]] = {}
  with contextlib.ExitStack() as stack:
    serving = lambda *arguments: stack.enter_context(process(*arguments))
    store = serving('trainer.cli.serve', '--store', address, '--port', '0')
    http_port, grpc_port = serving(*memory)
    plain = serving('benchmarks.serving_bench', '--saved_model', saved_model)
    ports = {'store': store, 'memory': http_port, 'grpc': grpc_port, 'saved_model': plain}
    for _ in range(1 + ROUNDS):  # the first one warms up
      for name, port in ports.items():
        rates.setdefault(name, []).append(load(port, bodies(100), 4, calls=name == 'grpc')['rate'])
  for name, found in rates.items():
    figures[f'{name}_100_per_second'] = float(np.median(found[1:]))
    rounds = ', '.join(f'{rate:,.0f}' for rate in found[1:])
    print(f'{name:12}  100 candidates, one process: {rounds} requests/s', flush=True)
  for key, (a, b) in _RATIOS.items():
    figures[key] = float(np.median(np.divide(rates[a][1:], rates[b][1:])))
    print(f'{key}: {figures[key]:.2f}', flush=True)


if __name__ == '__main__':
  app.run(main)
