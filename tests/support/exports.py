"""Exports of a made-up run, whose rows are known, and a Redis for tests."""

import os
import shutil
import subprocess
import tempfile
import time
import types
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from tests.support.steps import make_config
from trainer.serving.store import Store
from trainer.storage import export

WIDTH = 3


class Run:
  """A run without training: features come, change, earn factors and go, as the seed has it.

  Args:
    run_dir: where its exports lie.
    seed: of everything.
    features: about how many it has.

  Attributes:
    rows: key -> the values of its row: linear weight, then factors.
    directory: of the exports.
    versions: sequence -> what the full export of that moment holds, as `rows`.
  """

  def __init__(self, run_dir: str, seed: int = 0, features: int = 300):
    self.directory = os.path.join(run_dir, 'exports')
    self.rows: dict[int, tuple[float, ...]] = {}
    self.versions: dict[int, dict[int, tuple[float, ...]]] = {}
    self._cfg = make_config({'sparse.tables.default.width': WIDTH}).model_copy(
      update={'run_dir': run_dir}
    )
    self._rng = np.random.default_rng(seed)
    self._features, self._changed = features, set()
    self._bias = tf.Variable([0.0], name='bias')
    self._model = types.SimpleNamespace(variables=[self._bias])

  def train(self) -> None:
    """A pass: some features change, some are new, some are gone."""
    rng = self._rng
    slots = rng.integers(1, 4, self._features // 3)
    ids = rng.integers(0, 2 * self._features, len(slots))
    for key in ((slots << 52) + ids * 7919).tolist():
      width = 1 if key not in self.rows and rng.random() < 0.6 else 1 + WIDTH
      self.rows[key] = tuple(rng.normal(size=width).astype(np.float32).tolist())
      self._changed.add(key)
    for key in list(self.rows):
      if rng.random() < 0.1:
        del self.rows[key]
        self._changed.discard(key)

  def export(self, kind: str) -> int:
    """Writes an export. Returns: its sequence."""
    number = len(self.versions) + 1
    self._bias.assign([float(number)])
    done = export.write(
      self._cfg,
      kind,
      {'number': number},
      store=self,
      model=self._model,
      dense_stats=np.zeros([2, 2], np.float32),
    )
    sequence = int(os.path.basename(done.path)[:6])
    self.versions[sequence] = dict(self.rows)
    return sequence

  # What an export asks of a store of rows

  def select(self, kind: str) -> np.ndarray:
    return np.array(sorted(self._changed if kind == 'delta' else self.rows), np.int64)

  def commit(self, kind: str, keys: np.ndarray) -> None:
    self._changed.difference_update(keys.tolist())

  def pull(self, keys: np.ndarray, train: bool) -> types.SimpleNamespace:
    values = [self.rows[key] for key in keys.tolist()]
    return types.SimpleNamespace(
      linear=np.array([v[0] for v in values], np.float32),
      offsets=np.cumsum([0] + [len(v) - 1 for v in values]).astype(np.int32),
      factors=np.array([x for v in values for x in v[1:]], np.float32),
    )


def contents(store: Store) -> tuple[int, float, dict[int, tuple[float, ...]]]:
  """Returns what a store holds: version, the dense variable of `Run`, rows as `Run.rows`."""
  view = store.view()
  try:
    found = {}
    for rows in view.rows():
      ends = np.cumsum(rows.counts)
      for key, linear, begin, end in zip(rows.key, rows.linear, ends - rows.counts, ends):
        found[int(key)] = (float(linear), *rows.factors[begin:end].tolist())
    return view.version.sequence, float(view.dense()['000/bias:0'][0]), found
  finally:
    view.close()


class RedisServer:
  """A Redis of one's own, behind a socket in a temporary directory; keeps what it is told.

  Attributes:
    url: its address.
  """

  def __init__(self):
    self._directory = tempfile.mkdtemp()
    path = os.path.join(self._directory, 'socket')
    self.url = f'unix://{path}'
    self.start()

  @staticmethod
  def installed() -> bool:
    return shutil.which('redis-server') is not None

  def start(self) -> None:
    import redis

    settings = {
      'port': '0',
      'unixsocket': os.path.join(self._directory, 'socket'),
      'dir': self._directory,
      'save': '',
      'appendonly': 'yes',
      'appendfsync': 'no',
    }
    arguments = [part for name, value in settings.items() for part in (f'--{name}', value)]
    self._process = subprocess.Popen(['redis-server', *arguments], stdout=subprocess.DEVNULL)
    client = redis.Redis.from_url(self.url)
    deadline = time.monotonic() + 30
    while True:
      try:
        client.ping()
        return client.close()
      except redis.RedisError:
        if time.monotonic() > deadline or self._process.poll() is not None:
          raise

  def kill(self) -> None:
    """SIGKILL."""
    self._process.kill()
    self._process.wait()

  def stop(self) -> None:
    self.kill()
    shutil.rmtree(self._directory)


def events(rng: np.random.Generator, count: int) -> Iterator[str]:
  """Yields kinds of exports, a base first."""
  yield 'base'
  for _ in range(count - 1):
    yield 'base' if rng.random() < 0.2 else 'delta'
