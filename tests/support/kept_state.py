"""What a release leaves on a disk, small, and what it and the next release do with it.

`python tests/support/kept_state.py FILE.tar.xz`, in a tree of the release (its root is the working
directory and on PYTHONPATH), writes what tests/integration/upgrade_test.py reads:

    epochs.yaml days.yaml topic.yaml retrieval.yaml    with runs of the same names beside them
    log/                    the made-up log; later/ holds what `go_on` trains on
    epochs/  2 ranks, 2 of 4 epochs, with best/ and measured bins
    days/    a stream within its second day: a lifecycle, checkpoints of increments, deltas
    topic/   offsets of a topic whose messages are log/messages.jsonl
    retrieval/  finds items
    prepared/   passes of ctr-prepare
    days_store/   what ctr-publish has made of days/
    killed/  the same stream, as if its trainer had been killed within a pass, after a merge of rows
    numbers.json  what the release itself predicts, serves, and does when it goes on
"""

import http.client
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import yaml

from tests.support.commands import module
from tests.support.topics import Cluster
from trainer import files

# What this script has written at the release before this one.
ARCHIVE = pathlib.Path(__file__).resolve().parents[1] / 'data' / 'state-0.2.0.tar.xz'
TOPIC = 'log'
SENT = 330  # messages of the topic before a run goes on
LABELS = 'label', 'click'
DENSE = [{'name': 'price', 'transform': 'standardise'}]
TRAIN = {'batch_size': 32, 'deterministic': True}
SMALL = {'sparse': {'tables': {'default': {'width': 4}}}, 'checkpoint': {'keep': 2}}
CONFIGS = {
  'epochs': {
    'data': {
      'train': ['log/part_*.csv'],
      'valid': ['log/valid.csv'],
      'label': 'click',
      'slots': [
        {'name': 'user'},
        {'name': 'item'},
        {'name': 'price_bins', 'from': {'bins': 'price', 'quantiles': 8}},
      ],
      'dense': DENSE,
    },
    'model': {'interactions': ['linear', 'cross', {'dnn': {'hidden': [8], 'batch_norm': 'sync'}}]},
    'train': TRAIN | {'epochs': 2, 'plateau': {'stop_after': 9}},
  },
  'days': {
    'data': {
      'watch': 'log/passes',
      'day_pattern': r'day_(\d)',
      'label': 'click',
      'keep_texts': ['item'],
      'slots': [
        {'name': 'user', 'counts': True},
        {'name': 'item'},
        {'name': 'tags', 'separator': '|'},
      ],
      'dense': DENSE,
    },
    'lifecycle': {
      'admission_threshold': 0.3,
      'decay': 0.8,
      'delete_threshold': 0.07,
      'base_threshold': None,
      'delta_threshold': None,
      'delta_keep_days': None,
    },
    'model': {'interactions': ['linear', 'fm', {'dnn': {'hidden': [8]}}]},
    'train': TRAIN | {'batch_size': 2, 'progressive_validation': True},
    'checkpoint': {'keep': 2, 'every_steps': 1, 'max_increments': 12},
    'export': {'base': True, 'delta_every_passes': 1},
  },
  'topic': {
    'data': {
      'topic': {'brokers': 'none', 'topic': TOPIC, 'pass': {'records': 110}},
      'label': 'click',
      'slots': [{'name': 'user'}, {'name': 'item'}],
    },
    'model': {'interactions': ['linear', 'fm']},
    'train': TRAIN,
  },
  'retrieval': {
    'data': {
      'train': ['log/part_*.csv'],
      'label': None,
      'group': 'user',
      'slots': [{'name': 'user'}, {'name': 'item'}],
      'keep_texts': ['item'],
    },
    'model': {
      'retrieval': {'query': {'slots': ['user']}, 'item': {'slots': ['item']}, 'eval_at': [3]}
    },
    'train': TRAIN | {'epochs': 2},
  },
}
Start = Callable[..., Any]  # as tests.support.commands.start
Numbers = dict[str, Any]


def write(folder: str, start: Start, cluster: Cluster) -> None:
  """Writes the log and the runs; later passes and messages are kept aside."""
  rng = np.random.default_rng(7)
  for name in ('log/passes', 'later'):
    os.makedirs(f'{folder}/{name}')
  for name, count in {'part_0': 160, 'part_1': 160, 'valid': 200, 'test': 60}.items():
    _write_log(f'{folder}/log/{name}.csv', rng, count)
  for name in ('day_0_a', 'day_0_b', 'day_1_a', 'day_1_b', 'day_2_a'):
    place = 'log/passes' if name < 'day_1_b' else 'later'
    _write_log(f'{folder}/{place}/{name}.csv', rng, 80)
    pathlib.Path(f'{folder}/{place}/{name}.csv.done').touch()
  _write_log(f'{folder}/log/messages.csv', rng, 2 * SENT)
  for name, tree in CONFIGS.items():
    pathlib.Path(f'{folder}/{name}.yaml').write_text(
      yaml.safe_dump({'run_dir': name} | SMALL | tree)
    )
  ranks = [f'{os.path.dirname(sys.executable)}/horovodrun', '-np', '2', sys.executable]
  trained = [*ranks, '-m', 'trainer.run', '--config', 'epochs.yaml']
  subprocess.run(trained, cwd=folder, env=_environment(), check=True, stdout=subprocess.DEVNULL)
  run(folder, start, 'run', '--config', 'retrieval.yaml')
  run(folder, start, 'export', '--run_dir', 'epochs', '--kind', 'base')
  run(folder, start, 'export', '--run_dir', 'retrieval', '--kind', 'items')
  stream(folder, start, 'days', 'checkpoint.keep=1000')
  _part_checkpoints(folder)
  send(folder, cluster, 0, SENT)
  stream(folder, start, 'topic', f'data.topic.brokers={cluster.brokers}')
  publish(folder, start)
  run(folder, start, 'prepare', '--config', 'epochs.yaml', '--out', 'prepared', '--split', 'valid')


def _part_checkpoints(folder: str) -> None:
  """Leaves the last checkpoints to days/, and to killed/ two that were written within a pass."""
  names = sorted(os.listdir(f'{folder}/days/checkpoints'), reverse=True)
  names.remove('merged')
  layers = {n: manifest_of(f'{folder}/days/checkpoints/{n}')['layers'] for n in names}
  chosen = next(n for n in names if len(layers[n]) > 2 and 'merged' in layers[n][0][0])
  subprocess.run(['cp', '-al', 'days', 'killed'], cwd=folder, check=True)  # keeps what is linked
  at = names.index(chosen)
  for run_dir, kept in (('days', names[:2]), ('killed', names[at : at + 2])):
    for name in set(names) - set(kept):
      shutil.rmtree(f'{folder}/{run_dir}/checkpoints/{name}')


def _write_log(path: str, rng: np.random.Generator, count: int) -> None:
  with open(path, 'w', encoding='utf-8') as f:
    f.write('user,item,tags,price,click\n')
    for _ in range(count):
      user, item = (int(n * rng.random() ** 2) for n in (400, 40))
      tags = '|'.join(f't{n}' for n in rng.integers(12, size=rng.integers(3)))
      click = rng.random() < 0.15 + 0.5 * (user % 3 == item % 3)
      f.write(f'u{user},i{item},{tags},{rng.normal():.3f},{click:d}\n')
  os.utime(path, (1_760_000_000, 1_760_000_000))  # archives may keep whole seconds alone


def records(path: str) -> list[dict[str, Any]]:
  """Returns the samples of a file of the log, without labels."""
  names, *lines = pathlib.Path(path).read_text().splitlines()
  samples = [dict(zip(names.split(','), line.split(','))) for line in lines]
  return [{k: v for k, v in sample.items() if k not in LABELS} for sample in samples]


def send(folder: str, cluster: Cluster, begin: int, end: int) -> None:
  """Sends messages `begin` to `end` of the log to the topic, in turn to its 4 partitions."""
  names, *lines = pathlib.Path(f'{folder}/log/messages.csv').read_text().splitlines()
  for i, line in enumerate(lines[begin:end], begin):
    sample = dict(zip(names.split(','), line.split(',')))
    message = json.dumps(sample | {'click': int(sample['click'])}).encode()
    cluster.send(TOPIC, [message], partition=i % 4)


def run(folder: str, start: Start, command: str, *flags: str, status: int = 0) -> str:
  """Runs a command of the trainer in `folder` to its end; returns what it printed."""
  with tempfile.TemporaryFile('w+') as out, tempfile.TemporaryFile('w+') as errors:
    job = start('-m', module(command), *flags, cwd=folder, stdout=out, stderr=errors)
    found = job.wait(300)
    out.seek(0)
    errors.seek(0)
    printed, told = out.read(), errors.read()
  assert found == status, f'{command} {flags}: status {found}: {printed[-2000:]} {told[-4000:]}'
  return printed + told if status else printed


def stream(folder: str, start: Start, name: str, *changes: str, run_dir: str | None = None) -> str:
  """Trains on a stream until it waits, then stops it; returns what it printed."""
  flags = [word for change in changes for word in ('--set', change)]
  words = '-m', 'trainer.run', '--config', f'{name}.yaml', *flags, '--run_dir', run_dir or name
  return until(r'waiting for (a pass|records)', start, folder, *words)


def until(told: str, start: Start, folder: str, *words: str) -> str:
  """Runs a command until it says what a regular expression matches, then stops it with SIGTERM."""
  job = start(*words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
  output = ''
  for line in job.stdout:
    output += line
    if re.search(told, line):
      job.send_signal(signal.SIGTERM)
      break
  output += job.stdout.read()
  assert job.wait(120) == 0 and re.search(told, output), output
  return output


def publish(folder: str, start: Start) -> str:
  """Brings days_store to the newest export of days/."""
  return run(folder, start, 'publish', '--run_dir', 'days', '--to', 'days_store', '--once')


def predicted(folder: str, start: Start, name: str, checkpoint: str) -> list[float]:
  flags = '--run_dir', name, '--data', 'log/test.csv', '--checkpoint', checkpoint
  return [float(line) for line in run(folder, start, 'predict', *flags).split()]


def evaluated(folder: str, start: Start, *flags: str) -> dict[str, float]:
  """Returns the metrics of ctr-evaluate."""
  tree = json.loads(run(folder, start, 'evaluate', '--json', *flags))
  return {k: v for k, v in tree.items() if isinstance(v, float) and 'second' not in k}


def served(folder: str, start: Start, *flags: str, method: str = 'predict') -> Any:
  """Returns what ctr-serve answers to the samples of log/test.csv, and its version."""
  words = '-m', 'trainer.cli.serve', '--port', '0', *flags
  server = start(*words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
  try:
    port = next(int(m[1]) for m in map(re.compile(r'http://.*:(\d+)/').search, server.stdout) if m)
    return ask(port, records(f'{folder}/log/test.csv'), method)
  finally:
    server.send_signal(signal.SIGTERM)
    server.stdout.read()
    server.wait(60)


def ask(port: int, samples: Sequence[dict[str, Any]], method: str = 'predict') -> Any:
  """Returns a server's answer, once it has a version."""
  samples = [s | {'price': float(s['price']), 'tags': s['tags'].split('|')} for s in samples]
  if method == 'recommend':
    samples = [{'user': s['user']} for s in samples]
  body = json.dumps({'instances': samples} | ({'k': 3} if method == 'recommend' else {}))
  begun = time.monotonic()
  while True:
    connection = http.client.HTTPConnection('127.0.0.1', port, timeout=60)
    connection.request('POST', f'/v1/models/ctr:{method}', body)
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    if answer.status != 503 or time.monotonic() > begun + 120:
      assert answer.status == 200, text
      return json.loads(text)['predictions']


def read(folder: str, start: Start) -> Numbers:
  """Returns what is predicted, measured and served, and changes nothing."""
  items = served(folder, start, '--run_dir', 'retrieval', method='recommend')
  return {
    'predicted by epochs': predicted(folder, start, 'epochs', 'best'),
    'predicted by the last of epochs': predicted(folder, start, 'epochs', 'last'),
    'predicted by days': predicted(folder, start, 'days', 'last'),
    'predicted by killed': predicted(folder, start, 'killed', 'last'),
    'predicted by topic': predicted(folder, start, 'topic', 'last'),
    'epochs on a prepared pass': evaluated(
      folder, start, '--run_dir', 'epochs', '--data', 'prepared/valid/valid'
    ),
    'retrieval': evaluated(folder, start, '--run_dir', 'retrieval', '--data', 'log/valid.csv'),
    'served of epochs': served(folder, start, '--run_dir', 'epochs'),
    'served of days': served(folder, start, '--run_dir', 'days'),
    'served of the store': served(folder, start, '--store', 'days_store'),
    'recommended': items,
  }


def go_on(folder: str, start: Start, cluster: Cluster) -> Numbers:
  """Goes on with all runs, and publishes; returns what is predicted and served then."""
  run(folder, start, 'run', '--config', 'epochs.yaml', '--set', 'train.epochs=4')
  run(folder, start, 'run', '--config', 'retrieval.yaml', '--set', 'train.epochs=3')
  for name in os.listdir(f'{folder}/later'):
    shutil.copy2(f'{folder}/later/{name}', f'{folder}/log/passes/{name}')
  stream(folder, start, 'days')
  stream(folder, start, 'days', run_dir='killed')
  send(folder, cluster, SENT, 2 * SENT)
  stream(folder, start, 'topic', f'data.topic.brokers={cluster.brokers}')
  publish(folder, start)
  exports = sorted(os.listdir(f'{folder}/days/exports'))
  progress = {}
  for name in ('days', 'killed', 'topic'):
    newest = max(pathlib.Path(f'{folder}/{name}/checkpoints').glob('ckpt-*/progress.json'))
    tree = json.loads(newest.read_text())
    progress[name] = {k: tree[k] for k in ('step', 'examples', 'last', 'day', 'topics')}
  return {
    'exports': [(n, manifest_of(f'{folder}/days/exports/{n}')['previous']) for n in exports],
    'progress': progress,
    'predicted by epochs': predicted(folder, start, 'epochs', 'best'),
    'predicted by the last of epochs': predicted(folder, start, 'epochs', 'last'),
    'predicted by days': predicted(folder, start, 'days', 'last'),
    'predicted by killed': predicted(folder, start, 'killed', 'last'),
    'predicted by topic': predicted(folder, start, 'topic', 'last'),
    'retrieval': evaluated(folder, start, '--run_dir', 'retrieval', '--data', 'log/valid.csv'),
    'served of days': served(folder, start, '--run_dir', 'days'),
    'served of the store': served(folder, start, '--store', 'days_store'),
  }  # fmt: skip


def manifest_of(path: str) -> dict[str, Any]:
  """Returns the manifest of a checkpoint or an export."""
  return json.loads(pathlib.Path(f'{path}/MANIFEST.json').read_text())


def unpack(archive: str | os.PathLike, folder: str) -> None:
  """Unpacks what `main` has written. Prepared passes take the log here for the one they are of."""
  with tarfile.open(archive) as tar:
    tar.extractall(folder)
  for path in pathlib.Path(folder).glob('*/prepared/*/*/meta.json'):
    meta = json.loads(path.read_text())
    del meta['crc32']
    name = meta['source']['path']
    meta['source']['path'] = re.sub('^/.*(?=/log/)', os.path.realpath(folder), name)
    path.write_bytes(files.to_json(meta | {'crc32': zlib.crc32(files.to_json(meta))}))


def _environment() -> dict[str, str]:
  path = os.pathsep.join([os.getcwd(), os.environ.get('PYTHONPATH', '')])
  return os.environ | {'PYTHONPATH': path, 'CUDA_VISIBLE_DEVICES': ''}


def _start(*words: str, **kwargs: Any) -> subprocess.Popen:
  return subprocess.Popen([sys.executable, *words], text=True, env=_environment(), **kwargs)


def main() -> None:
  """Writes the archive that is named on the command line."""
  with tempfile.TemporaryDirectory() as folder:
    cluster = Cluster()
    write(folder, _start, cluster)
    for path in [
      *pathlib.Path(folder).glob('*/tensorboard'),
      *pathlib.Path(folder).glob('*/*.html'),
    ]:
      shutil.rmtree(path) if path.is_dir() else path.unlink()
    with tempfile.TemporaryDirectory() as copy:
      shutil.copytree(folder, copy, dirs_exist_ok=True)
      numbers = {'read': read(copy, _start), 'gone on': go_on(copy, _start, cluster)}
    pathlib.Path(f'{folder}/numbers.json').write_text(json.dumps(numbers))
    with tarfile.open(sys.argv[1], 'w:xz') as tar:
      tar.add(folder, '.')


if __name__ == '__main__':
  main()
