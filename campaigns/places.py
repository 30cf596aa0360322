"""Disturbs what lies elsewhere: a run in a bucket, the table of items, files that are none."""

import contextlib
import os
import random
import re
import signal
import socket
from collections.abc import Callable

import boto3

from campaigns.processes import SOON, difference, undisturbed
from campaigns.units import TRACE, Found, Kind, command, fork, in_child, text_of, told, wait
from tests.support.retrieval import (
  ITEM_COLUMNS,
  ITEM_TABLE,
  make_lines,
  run_config,
  write_items,
  write_queries,
)
from tests.support.s3 import S3
from trainer import config
from trainer.storage import bucket

FAULTS = 5  # of a unit, in a row
MOST_REQUESTS = 250  # about as many as a run makes
TABLES = 8  # of a unit
SPECIAL = 12
PATIENCE = 240  # seconds for a small job on a busy machine
_ALL = (*bucket.STATE, *bucket.EXPORTS)


def _said(words: list[str], log: str, environment: dict[str, str] | None = None) -> Callable:
  """Starts a command; returns a function that waits for it and returns status and output."""

  def action() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.update(environment or {})
    command(*words)()

  pid = fork(action, log)

  def ended(seconds: float = SOON) -> tuple[int | None, str]:
    status = wait(pid, seconds)
    if status is None:
      os.kill(pid, signal.SIGKILL)
      os.waitpid(pid, 0)
    return status, text_of(log)

  ended.pid = pid
  return ended


def _wrong(status: int | None, said: str, good: set[int]) -> str | None:
  """Returns what is wrong with the end of a command; None if nothing is."""
  if status is None:
    return f'still runs: {said[-500:]}'
  if TRACE in said or status not in good:
    return f'status {status}: {said[-1500:]}'
  if status == 2 and len(told(said)) != 1:
    return f'not one line: {said[-1500:]}'
  return None


def _buckets(draw: random.Random, folder: str, shared: str) -> Found:
  """Trains into a bucket on two machines in turn, and kills the trainer at a random request to it.

  Or it loses connections, puts an object below the run's prefix or lets another process claim the
  run. What is not the run's must stay as it is, and the run must end as an undisturbed one.
  """
  written, _ = undisturbed('single', shared)
  url, found = 's3://runs/team/run', Found()
  beside = {'team/run2/metrics.jsonl': b'2', 'team/notes.txt': b'n', 'team/run.old/DONE': b'd'}
  with S3() as s3:
    client = boto3.client('s3')
    client.create_bucket(Bucket='runs')
    for key, body in beside.items():
      client.put_object(Bucket='runs', Key=key, Body=body)

    def trained(number: int) -> Callable:
      words = ['trainer.run', '--config', written, '--run_dir', url]
      machine = {'CTR_WORK_DIR': f'{folder}/machine{draw.randrange(2)}'}
      return _said(words, f'{folder}/{number}.log', machine)

    for i in range(FAULTS):
      how = draw.choice(('killed', 'killed', 'killed', 'lost', 'foreign', 'claimed'))
      left, foreign = draw.randrange(1, MOST_REQUESTS), 'team/run/runA/best/ckpt-000000001/DONE'
      s3.requests.clear()
      wanted, pids = {0}, []
      if how == 'lost':
        s3.losing = draw.choice((1, 2, 4))
      elif how == 'foreign':
        client.put_object(Bucket='runs', Key=foreign, Body=b'f')
        s3.requests.clear()
        wanted = {2}

      def at_request(*_: str, how: str = how, left: int = left, pids: list[int] = pids) -> None:
        if len(s3.requests) != left:
          return
        if how == 'killed':
          os.kill(pids[0], signal.SIGKILL)
        elif how == 'claimed':
          owner = b'{"host": "other", "process": 7, "time": 0}'
          client.put_object(Bucket='runs', Key='team/run/trained_by.json', Body=owner)

      s3.before = at_request
      ended = trained(i)
      pids.append(ended.pid)
      status, said = ended()
      s3.before = lambda *_: None
      s3.losing = 0
      if how in ('killed', 'claimed'):
        wanted = {0, -signal.SIGKILL} if how == 'killed' else {0, 2}
      wrong = _wrong(status, said, wanted)
      if how == 'foreign':
        if {method for method, _ in s3.requests} - {'GET', 'HEAD'}:
          wrong = wrong or f'it wrote although it was refused: {s3.requests}'
        client.delete_object(Bucket='runs', Key=foreign)
      found.trial(f'{how}: {"went on" if status == 0 else "ended"}', wrong)
      if wrong:
        return found
    wrong = _wrong(*trained(FAULTS)(), {0})
    for key, body in beside.items():
      if client.get_object(Bucket='runs', Key=key)['Body'].read() != body:
        wrong = wrong or f'{key} is another'

    def compared() -> str | None:
      with bucket.copy_of(url, _ALL) as local:
        return difference('single', local, f'{os.path.dirname(written)}/run', 0)

    wrong = wrong or in_child(compared, folder)
    if wrong:
      found.trial('', wrong)
  return found


def _items(draw: random.Random, folder: str, shared: str) -> Found:
  """Changes lines and bytes of data.items, and the items of passes of a stream.

  Each pass must be trained or refused with a reason, or the table be refused in one line.
  """
  found, lines = Found(), make_lines()['train']
  for i in range(TABLES):
    here = f'{folder}/{i}'
    os.makedirs(here)
    rows = list(ITEM_TABLE.items())
    for _ in range(draw.choice((0, 0, 1, 2))):
      at, how = draw.randrange(len(rows)), draw.choice(('twice', 'blank', 'less', 'number'))
      item, columns = rows[at]
      if how == 'less':
        del rows[at]
      else:
        odd = (columns[0], columns[1], '1e30' if how == 'number' else columns[2])
        rows.append(('' if how == 'blank' else item if how == 'twice' else 1000 + at, odd))
    table = write_items(f'{here}/items.csv', rows)
    if draw.random() < 0.3:
      with open(table, 'r+b') as f:
        f.seek(draw.randrange(os.path.getsize(table)))
        f.write(draw.choice((b'\0', b'\xff', b'"', b'\n', b',', b'\r')))
    passes = []
    for number in range(3):
      pairs = [(user, draw.choice((item, 99, ''))) for user, item in lines[number * 50 :][:50]]
      items = draw.choice((None, None, 99, ''))
      pairs = [(user, item if items is None else items) for user, item in pairs]
      passes.append(write_queries(f'{here}/{number}.csv', pairs))
    changes = {'data.items': table, 'data.train': passes, 'data.max_refused_passes': 3}
    cfg = run_config(here, **ITEM_COLUMNS | changes | {'data.valid': [], 'train.epochs': 1})
    with open(f'{here}/config.yaml', 'w', encoding='utf-8') as f:
      f.write(config.dump(cfg))
    words = ['trainer.run', '--config', f'{here}/config.yaml']
    status, said = _said(words, f'{here}/log')(PATIENCE)
    wrong = _wrong(status, said, {0, 2})
    ledger = text_of(f'{cfg.run_dir}/ledger.jsonl')
    if status == 0 and len(re.findall('"fate": "(?:trained|refused|seen)"', ledger)) != 3:
      wrong = wrong or f'ledger: {ledger}'
    found.trial('trained or refused by pass' if status == 0 else 'refused in one line', wrong)
  return found


def _special(draw: random.Random, folder: str, shared: str) -> Found:
  """Gives commands a pipe, a device, a socket, a directory or a huge file for one that they read.

  They must end soon, in one line.
  """
  written, _ = undisturbed('single', shared)
  found = Found()
  for i in range(SPECIAL):
    path, what = (
      f'{folder}/{i}.csv',
      draw.choice(('pipe', 'zero', 'socket', 'folder', 'huge', 'link')),
    )
    match what:
      case 'pipe':
        os.mkfifo(path)
      case 'zero':
        path = '/dev/zero'
      case 'folder':
        os.makedirs(path)
      case 'link':
        os.symlink(path, path)
      case 'huge':
        with open(path, 'wb') as f:
          f.truncate(1 << 40)
      case 'socket':
        with contextlib.chdir(folder), socket.socket(socket.AF_UNIX) as s:  # the path may be long
          s.bind(f'{i}.csv')
    train = ['trainer.run', '--run_dir', f'{folder}/run{i}', '--config']
    made = f'{{name: made, from: {{lookup: user, table: {path}, value: x}}}}'
    name, words = draw.choice(
      (
        ('--config', [*train, path]),
        ('table', [*train, written, '--set', f'data.slots=[{{name: user}}, {made}]']),
        (
          'train',
          [*train, written, '--set', f'data.train=["{path}"]', '--set', 'data.day_pattern=null'],
        ),
        ('valid', [*train, written, '--set', f'data.valid=["{path}"]']),
        (
          '--data',
          ['trainer.cli.predict', '--run_dir', f'{os.path.dirname(written)}/run', '--data', path],
        ),
      )
    )
    status, said = _said(words, f'{folder}/{i}.log')(PATIENCE)
    wrong = _wrong(status, said, {2})
    found.trial('refused in one line', wrong and f'{name} is a {what}: {wrong}')
  return found


KINDS = [
  Kind('buckets', 'faults', 12, 3000, _buckets),
  Kind('items tables', 'inputs', 12, 2400, _items),
  Kind('special files', 'inputs', 12, 3000, _special),
]
