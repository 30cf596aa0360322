"""Kills every part of the loop from click to score, and checks that every answer is right.

    python -m campaigns.serving [--kills 100] [--seed 0] [--source redis] [--trainer]
    python -m campaigns.serving --fuzz 10000

The campaign kills, at seeded moments, a process that writes the exports of a made-up run,
`ctr-publish`, `ctr-serve` and, with --source redis, Redis, and starts them again. A client
asks for scores and compares each with one that NumPy computes for the version that the answer
names. In the end the store must equal the full export, key by key. With --source run the scorer
follows the run itself, and its final score of every feature must equal that of the full export.

With --trainer the exports are those of trainer.run, which follows a directory of passes and is
killed too. Scores are compared with those that NumPy computes from the exports of the version, and
the store with what `ctr-export` writes of the trainer's last state.

All processes are forked from this one, which has imported everything and runs no op itself. So they
start in a tenth of the time.
"""

import json
import os
import random
import shutil
import signal
import socket
import tempfile
import time
from typing import Any

os.environ.setdefault('TF_USE_LEGACY_KERAS', '1')
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')

import numpy as np
import yaml
from absl import app, flags

from campaigns.units import command, fork
from tests.support.exports import RedisServer, Run, contents
from tests.support.fuzz import requests
from tests.support.scorer import Client
from trainer import config
from trainer.data.features import hash_keys
from trainer.job import job  # noqa: F401 likewise
from trainer.serving import embedded_store, redis_store  # noqa: F401 before the forks
from trainer.serving.stores import open_store
from trainer.storage import chain

KILLS = flags.DEFINE_integer('kills', 100, 'The number of kills.')
FUZZ = flags.DEFINE_integer('fuzz', 0, 'Sends this number of broken requests instead of kills.')
SEED = flags.DEFINE_integer('seed', 0, 'Seed of everything.')
SOURCE = flags.DEFINE_enum(
  'source',
  'directory',
  ['directory', 'redis', 'run'],
  'Where the scorer reads rows; run: the exports themselves, without a publisher.',
)
TRAINER = flags.DEFINE_bool('trainer', False, 'Lets trainer.run write the exports.')
SECONDS_BETWEEN_KILLS = flags.DEFINE_float('seconds_between_kills', 1.0, 'On average.')
SECONDS_BETWEEN_EXPORTS, SECONDS_BETWEEN_PASSES = 0.2, 0.5
BASE_EVERY = 7
SLOTS = ('a', 'b', 'c')
EXPORTS = 10_000  # more than there is time for
TEXTS = 600  # of a slot
PASSES_A_DAY, PASSES_AHEAD, SAMPLES = 5, 3, 2000
CONFIG = {
  'data': {
    'day_pattern': r'day_(\d+)',
    'label': 'click',
    'slots': [{'name': name, 'separator': '|'} for name in SLOTS],
  },
  'sparse': {'tables': {'default': {'width': 4, 'init_scale': 0.1}}},
  'lifecycle': {  # every change is exported; features come and go
    'admission': 'score',
    'admission_threshold': 1.0,
    'base_threshold': 0.0,
    'delta_threshold': 0.0,
    'eviction': 'score',
    'decay': 0.5,
    'delete_threshold': 0.5,
  },
  'model': {'interactions': ['linear', 'fm']},
  'train': {'batch_size': 200},
  'export': {'base': True, 'delta_every_passes': 1, 'keep': EXPORTS},
}


def kind_of(number: int) -> str:
  return 'base' if number % BASE_EVERY == 1 else 'delta'


def write_exports(folder: str) -> None:
  """Writes exports until SIGTERM; those that exist are not written again."""
  stop = []
  signal.signal(signal.SIGTERM, lambda *_: stop.append(True))
  run = Run(folder, SEED.value)
  done = len(os.listdir(run.directory)) if os.path.isdir(run.directory) else 0
  for number in range(1, EXPORTS):
    run.train()
    run.export(kind_of(number))
    if number >= done:
      if stop:
        return
      time.sleep(SECONDS_BETWEEN_EXPORTS)


class Oracle:
  """The scores and rows of each version of the made-up run."""

  def __init__(self):
    self._run = Run(None, SEED.value)

  def score(self, version: int, sample: dict[str, list[str]]) -> float:
    """Returns a version's probability for a sample, {slot: texts}."""
    return self.run(version).score(version, sample)

  def run(self, version: int) -> Run:
    """Returns the run, continued at least to this version."""
    while len(self._run.versions) < version:
      self._run.train()
      self._run.export(kind_of(len(self._run.versions) + 1))
    return self._run


def write_passes(folder: str, exports: str) -> None:
  """Announces passes of drifting features until SIGTERM, a few ahead of the trainer."""
  stop = []
  signal.signal(signal.SIGTERM, lambda *_: stop.append(True))
  os.makedirs(folder, exist_ok=True)
  taste = np.random.default_rng(SEED.value).normal(size=[len(SLOTS), TEXTS])
  for number in range(EXPORTS):
    rng = np.random.default_rng([SEED.value, number])
    popular = (TEXTS / 3 * rng.random([SAMPLES, len(SLOTS), 2]) ** 3).astype(int)
    texts = (popular + 8 * number) % TEXTS
    logit = sum(taste[s][texts[:, s]].mean(1) for s in range(len(SLOTS))) - 1
    click = rng.random(SAMPLES) < 1 / (1 + np.exp(-logit))
    path = os.path.join(folder, f'day_{number // PASSES_A_DAY:04d}_{number % PASSES_A_DAY}.csv')
    with open(path, 'w', encoding='utf-8') as f:
      f.write(','.join([*SLOTS, 'click']) + '\n')
      for pairs, clicked in zip(texts.tolist(), click.tolist()):
        f.write(','.join('|'.join(map(str, pair)) for pair in pairs) + f',{clicked:d}\n')
    with open(path + '.done', 'wb'):
      pass
    while True:
      time.sleep(SECONDS_BETWEEN_PASSES)
      if stop:
        return
      names = os.listdir(exports) if os.path.isdir(exports) else []
      if number - sum(name.endswith('-delta') for name in names) < PASSES_AHEAD:
        break


class TrainerOracle:
  """The scores and rows of each version, read from the exports of a trainer's run_dir."""

  def __init__(self, run_dir: str):
    self._directory = os.path.join(run_dir, 'exports')
    self._versions: dict[int, tuple[float, dict[int, np.ndarray]]] = {}
    cfg = config.load(os.path.join(run_dir, 'config.yaml'), (), run_dir)
    texts = [str(i) for i in range(TEXTS)]
    self.keys = {
      (name, text): key
      for name, slot in cfg.slot_ids().items()
      for text, key in zip(texts, hash_keys(texts, slot).numpy().tolist())
    }

  def version(self, version: int) -> tuple[float, dict[int, np.ndarray]]:
    """Returns the bias, and each key's linear weight and factors."""
    if version not in self._versions:
      (path,) = [
        one.path
        for one in chain.exports(self._directory)
        if one.sequence == version and one.kind in chain.ROW_KINDS
      ]
      rows: dict[int, np.ndarray] = {}
      links = chain.chain(self._directory, path)
      for export in links:
        for key in export.tombstones().tolist():
          rows.pop(key, None)
        for some in export.rows():
          ends = np.cumsum(some.counts)
          for key, linear, begin, end in zip(some.key, some.linear, ends - some.counts, ends):
            rows[int(key)] = np.concatenate([[linear], some.factors[begin:end]])
      (bias,) = [value for name, value in links[-1].dense().items() if 'bias' in name]
      self._versions[version] = float(bias[0]), rows
    return self._versions[version]

  def score(self, version: int, sample: dict[str, list[str]]) -> float:
    """Does what Oracle.score does."""
    bias, rows = self.version(version)
    found = [
      rows[key] for s, texts in sample.items() for t in texts if (key := self.keys[s, t]) in rows
    ]
    factors = [row[1:].astype(np.float64) for row in found if len(row) > 1]
    squares = np.sum([f @ f for f in factors])
    total = np.sum(factors, 0)
    fm = 0.5 * (np.sum(total * total) - squares)
    return float(1 / (1 + np.exp(-(bias + sum(float(row[0]) for row in found) + fm))))


def ask(port: int, out: str, run_dir: str) -> None:
  """Asks for scores and compares them until SIGTERM, then writes the counts to a file."""
  stop: list[bool] = []
  signal.signal(signal.SIGTERM, lambda *_: stop.append(True))
  rng = random.Random(SEED.value)
  oracle = TrainerOracle(run_dir) if TRAINER.value else Oracle()
  found: dict[str, Any] = {'right': 0, 'refused': 0, 'unanswered': 0, 'wrong': [], 'versions': 0}
  texts, versions = [str(i) for i in range(TEXTS)], set()
  client = Client(port)
  while not stop:
    samples = [{s: rng.choices(texts, k=rng.randrange(4)) for s in SLOTS} for _ in range(8)]
    instances = [{s: '|'.join(sample[s]) for s in SLOTS} for sample in samples]
    try:
      status, answer = client.predict({'instances': instances})
    except Exception:  # the scorer is not there
      found['unanswered'] += 1
      client.close()
      time.sleep(0.05)
      continue
    if status != 200:
      found['refused'] += 1
      if status != 503:
        found['wrong'].append([status, answer])
      time.sleep(0.02)
      continue
    version = int(answer['model_version'])
    wanted = [oracle.score(version, sample) for sample in samples]
    if np.abs(np.array(wanted) - answer['predictions']).max() > 1e-6:
      found['wrong'].append([version, wanted, answer['predictions']])
    found['right'] += 1
    versions.add(version)
  found['versions'] = len(versions)
  with open(out, 'w', encoding='utf-8') as f:
    json.dump(found, f)


def newest_version(run_dir: str) -> int:
  names = os.listdir(os.path.join(run_dir, 'exports'))
  return max(int(name[:6]) for name in names if name.endswith(('base', 'delta')))


def compare_scores(run_dir: str, port: int) -> None:
  """Waits until the newest version is served, and compares every feature's scores."""
  newest, client = newest_version(run_dir), Client(port)
  deadline = time.monotonic() + 120
  while client.status()[1]['model_version_status'][0]['version'] != str(newest):
    if time.monotonic() > deadline:
      raise AssertionError(f'{client.status()} is served; wanted version {newest}')
    time.sleep(0.1)
  # Each feature twice, beside others, so that factors count.
  samples = [
    {s: [str((i * step) % TEXTS)] for s, step in zip(SLOTS, steps)}
    for i in range(TEXTS)
    for steps in ((1, 7, 11), (1, 13, 17))
  ]
  instances = [{s: texts[0] for s, texts in sample.items()} for sample in samples]
  status, answer = client.predict({'instances': instances})
  oracle = TrainerOracle(run_dir) if TRAINER.value else Oracle()
  wanted = [oracle.score(newest, sample) for sample in samples]
  if status != 200 or np.abs(np.array(wanted) - answer['predictions']).max() > 1e-6:
    raise AssertionError(f'the scores are not those of the full export of version {newest}')
  print(f'{len(wanted)} scores of version {newest} equal the full export', flush=True)


def compare(run_dir: str, address: str) -> None:
  """Waits until the store is at the newest version, and compares it with the full export."""
  directory, newest = os.path.join(run_dir, 'exports'), newest_version(run_dir)
  store = open_store(address, '--to')
  deadline = time.monotonic() + 120
  while (version := store.version()) is None or version.sequence < newest:
    if time.monotonic() > deadline:
      raise AssertionError(f'the store is at {version}; wanted {newest}')
    time.sleep(0.1)
  if TRAINER.value:  # before this process runs an op, after which a fork may stand still
    pid = fork(
      command('trainer.cli.export', '--run_dir', run_dir, '--kind', 'base', '--checkpoint', 'last'),
      os.path.join(run_dir, 'export.log'),
    )
    if os.waitpid(pid, 0)[1]:
      raise AssertionError(f'trainer.cli.export failed; see {run_dir}/export.log')
  oracle = TrainerOracle(run_dir) if TRAINER.value else Oracle().run(newest)
  _, bias, rows = contents(store, oracle.keys.values())
  if TRAINER.value:
    full = max(o.sequence for o in chain.exports(directory) if o.kind == 'base')
    wanted_bias, wanted = oracle.version(full)
    if abs(bias - 100 * wanted_bias) > 1e-3 or rows != {k: tuple(v) for k, v in wanted.items()}:
      different = sum(rows.get(k) != tuple(v) for k, v in wanted.items())
      raise AssertionError(
        f'the store of version {newest} has {len(rows)} rows and bias {bias}, the full export '
        f'{len(wanted)} rows and {100 * wanted_bias}; {different} rows differ'
      )
    print(f'{len(rows)} rows of version {newest} equal the full export', flush=True)
    return
  if bias != newest or rows != oracle.versions[newest]:
    raise AssertionError(f'the store is not the full export of version {newest}')


def free_port() -> int:
  with socket.create_server(('127.0.0.1', 0)) as listener:
    return listener.getsockname()[1]


class Campaign:
  """The processes of one campaign, in a folder of its own."""

  def __init__(self, folder: str):
    self.folder, self.port = folder, free_port()
    self.server = RedisServer() if SOURCE.value == 'redis' else None
    self.address = self.server.url if self.server else os.path.join(folder, 'store')
    run_dir = os.path.join(folder, 'run')
    os.makedirs(run_dir)
    self.run_dir = run_dir
    trained = os.path.join(folder, 'config.yaml')
    with open(trained, 'w', encoding='utf-8') as f:
      data = CONFIG['data'] | {'watch': os.path.join(folder, 'passes')}
      yaml.safe_dump(CONFIG | {'data': data, 'run_dir': run_dir, 'seed': SEED.value}, f)
    os.makedirs(data['watch'])
    from_run = SOURCE.value == 'run'
    source = ['--run_dir', run_dir] if from_run else ['--store', self.address]
    self._actions = {
      'exports': command('trainer.run', '--config', trained)
      if TRAINER.value
      else lambda: write_exports(run_dir),
      'passes': lambda: write_passes(data['watch'], os.path.join(run_dir, 'exports')),
      'publisher': command('trainer.cli.publish', '--run_dir', run_dir, '--to', self.address),
      'scorer': command('trainer.cli.serve', *source, '--port', str(self.port)),
      'client': lambda: ask(self.port, self.path('found.json'), run_dir),
      'comparison': (lambda: compare_scores(run_dir, self.port))
      if from_run
      else (lambda: compare(run_dir, self.address)),
    }
    self.loop = ['exports', *([] if from_run else ['publisher']), 'scorer']
    self._pids: dict[str, int] = {}

  def path(self, name: str) -> str:
    return os.path.join(self.folder, name)

  def start(self, name: str) -> None:
    self._pids[name] = fork(self._actions[name], self.path(f'{name}.log'))

  def end(self, name: str, number: signal.Signals | None) -> int:
    """Sends a signal, if any, and waits for the process; returns its status."""
    pid = self._pids.pop(name)
    if number is not None:
      os.kill(pid, number)
    return os.waitpid(pid, 0)[1]

  def kill(self, name: str) -> None:
    """Kills a part and starts it again."""
    if name == 'redis':
      self.server.kill()
      self.server.start()
    else:
      self.end(name, signal.SIGKILL)
      self.start(name)

  def close(self) -> None:
    for name in list(self._pids):
      self.end(name, signal.SIGKILL)
    if self.server:
      self.server.stop()

  def answers(self) -> None:
    """Waits until a version is served."""
    deadline = time.monotonic() + 180
    while True:
      client = Client(self.port)
      try:
        if client.ask('GET', '/healthz')[0] == 200:
          return
      except OSError:
        pass
      finally:
        client.close()
      if time.monotonic() > deadline:
        raise AssertionError(f'nothing is served; see {self.folder}')
      time.sleep(0.1)

  def trained(self) -> None:
    """Waits until the trainer has exported its last pass."""
    last = sorted(os.listdir(self.path('passes')))[-1].removesuffix('.csv.done')
    deadline = time.monotonic() + 300
    while True:
      with open(os.path.join(self.run_dir, 'metrics.jsonl'), encoding='utf-8') as f:
        if any(e['event'] == 'export' and e['pass'] == last for e in map(json.loads, f)):
          return
      if time.monotonic() > deadline:
        raise AssertionError(f'{last} is not exported; see {self.folder}')
      time.sleep(0.2)


def kill_campaign(campaign: Campaign) -> None:
  rng = random.Random(SEED.value)
  for name in (*['passes'] * TRAINER.value, *campaign.loop):
    campaign.start(name)
  campaign.answers()
  campaign.start('client')
  killed = dict.fromkeys(campaign.loop + ['redis'] * (campaign.server is not None), 0)
  for _ in range(KILLS.value):
    time.sleep(rng.random() * 2 * SECONDS_BETWEEN_KILLS.value)
    name = rng.choice(list(killed))
    campaign.kill(name)
    killed[name] += 1
  campaign.answers()  # the loop goes on
  if TRAINER.value:
    campaign.end('passes', signal.SIGTERM)
    campaign.trained()
  campaign.end('exports', signal.SIGTERM)
  campaign.start('comparison')
  if campaign.end('comparison', None):
    with open(campaign.path('comparison.log'), encoding='utf-8') as f:
      raise AssertionError(f.read())
  if campaign.end('client', signal.SIGTERM):
    raise AssertionError(f'the client failed; see {campaign.folder}')
  with open(campaign.path('found.json'), encoding='utf-8') as f:
    found = json.load(f)
  print(
    f'killed {killed}: {found["right"]} answers of {found["versions"]} versions right, '
    f'{len(found["wrong"])} wrong; {found["refused"]} refused with 503, {found["unanswered"]} '
    'unanswered; in the end all equals the full export'
  )
  if found['wrong'] or found['right'] < KILLS.value:
    raise AssertionError(found['wrong'][:3] or 'hardly anything was served')


def fuzz_campaign(campaign: Campaign) -> None:
  for name in campaign.loop:
    campaign.start(name)
  campaign.answers()
  good = {'instances': [{s: str(i) for s in SLOTS} for i in range(3)]}
  client, statuses = Client(campaign.port), {}
  for body in requests(random.Random(SEED.value), good, FUZZ.value):
    status, _ = client.predict(body)
    statuses[status] = statuses.get(status, 0) + 1
  client.close()
  print(f'{FUZZ.value} requests: answers by status {statuses}')
  if not set(statuses) <= {200, 400, 413}:
    raise AssertionError(statuses)


def main(_: list[str]) -> None:
  folder = tempfile.mkdtemp()
  campaign = Campaign(folder)
  try:
    (fuzz_campaign if FUZZ.value else kill_campaign)(campaign)
  finally:
    campaign.close()
  shutil.rmtree(folder)


if __name__ == '__main__':
  app.run(main)
