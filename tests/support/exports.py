"""Exports of a made-up run, whose rows are known, and a Redis for tests."""

import os
import shutil
import subprocess
import tempfile
import time
import types
from collections.abc import Collection, Iterator

import numpy as np

from ops.policy import Policy
from tests.support.steps import make_config
from trainer.data.features import hash_keys
from trainer.model.builder import build
from trainer.serving.versioned_store import VersionedStore
from trainer.storage import export_writer

WIDTH = 3


class Run:
  """A run without training: features come, change, earn factors and go, as the seed has it.

  Two runs of one seed have the same versions, so that one can tell what the other has written.

  Args:
    run_dir: where its exports lie; None: it writes none.
    seed: of everything.
    features: about how many it has.

  Attributes:
    rows: key -> the values of its row: linear weight, then factors.
    directory: of the exports.
    versions: sequence -> what the full export of that moment holds, as `rows`.
    keys: (slot, text) of every feature that there may be -> its key.
  """

  def __init__(self, run_dir: str | None, seed: int = 0, features: int = 300):
    self.directory = run_dir and os.path.join(run_dir, 'exports')
    self.rows: dict[int, tuple[float, ...]] = {}
    self.versions: dict[int, dict[int, tuple[float, ...]]] = {}
    changes = {'sparse.tables.default.width': WIDTH, 'data.dense': []}
    cfg = make_config(changes | {'model.interactions': ['linear', 'fm']})
    self._cfg = cfg.model_copy(update={'run_dir': run_dir or ''})
    self._rng = np.random.default_rng(seed)
    self._features, self._changed = features, set()
    self._ancestors: list[int] = []
    self._model = build(self._cfg)
    (self._bias,) = self._model.variables
    texts = [str(i) for i in range(2 * features)]
    self.keys = {
      (name, text): key
      for name, slot in self._cfg.slot_ids().items()
      for text, key in zip(texts, hash_keys(texts, slot).numpy().tolist())
    }
    self._all_keys = np.array(list(self.keys.values()))

  def train(self) -> None:
    """A pass: some features change, some are new, some are gone."""
    rng = self._rng
    for key in rng.choice(self._all_keys, self._features // 3).tolist():
      width = 1 if key not in self.rows and rng.random() < 0.6 else 1 + WIDTH
      self.rows[key] = tuple(rng.normal(size=width).astype(np.float32).tolist())
      self._changed.add(key)
    for key in list(self.rows):
      if rng.random() < 0.1:
        del self.rows[key]
        self._changed.discard(key)

  def export(self, kind: str) -> int:
    """Writes an export, whose version is its number and 100 times the model's bias.

    Returns:
      Its sequence.
    """
    number = len(self.versions) + 1
    self._bias.assign([number / 100])
    sequence = number
    if self.directory:
      done = export_writer.write(
        self._cfg,
        kind,
        {'number': number},
        store=self,
        model=self._model,
        dense_stats=np.zeros([3, 0], np.float32),
        ancestors=self._ancestors,
      )
      self._ancestors = [done.checksum]
      sequence = int(os.path.basename(done.path)[:6])
    self.versions[sequence] = dict(self.rows)
    return sequence

  def score(self, version: int, sample: dict[str, list[str]]) -> float:
    """Returns the probability that a version gives a sample: texts by slot."""
    rows = self.versions[version]
    found = [
      rows.get(self.keys[name, text], (0.0,)) for name, texts in sample.items() for text in texts
    ]
    factors = np.array([row[1:] for row in found if len(row) > 1]).reshape(-1, WIDTH)
    fm = 0.5 * np.sum(factors.sum(0) ** 2 - (factors**2).sum(0))
    return float(1 / (1 + np.exp(-(version / 100 + sum(row[0] for row in found) + fm))))

  # What an export asks of a store of rows

  policy = Policy(base_threshold=None, delta_threshold=None, delta_keep_days=None)

  def select(self, kind: str, among: None = None) -> np.ndarray:
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


def contents(
  store: VersionedStore, keys: Collection[int]
) -> tuple[int, float, dict[int, tuple[float, ...]]]:
  """Returns what a store holds: version, the number in its dense part, rows as `Run.rows`.

  Args:
    store: holds a version.
    keys: of all features that there may be.
  """
  view = store.view()
  try:
    rows = view.look_up(np.array(list(keys), np.int64))
    parts = np.split(rows.factors, np.cumsum(rows.counts)[:-1])
    held = {
      key: (linear, *factors.tolist())
      for key, linear, factors, present in zip(keys, rows.linear.tolist(), parts, rows.present)
      if present
    }
    bias = next(value for name, value in view.dense.items() if 'bias' in name)
    return view.version.sequence, round(100 * float(bias[0]), 3), held
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
