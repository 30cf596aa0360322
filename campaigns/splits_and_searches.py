"""Kills ctr-split and ctr-tune, fills their disk, starts two at once."""

import os
import random
import re
import resource
import signal
import time
from collections.abc import Callable

import numpy as np
import pandas as pd
import yaml

from campaigns.processes import SOON
from campaigns.units import (
  TRACE,
  Found,
  Kind,
  command,
  fork,
  killed_in_the_end,
  text_of,
  told,
  wait,
)
from trainer import files
from trainer.errors import UserError

TRIALS = 20  # of a unit of splits
STARTS = 3  # of a search that is disturbed, before it is left alone
_SIGNALS = (signal.SIGKILL, signal.SIGTERM)
_STATUSES = {0, 2, 143, -signal.SIGKILL, -signal.SIGTERM}


def _wrong(status: int | None, log: str) -> str | None:
  """Returns what is wrong with the end of a command; None if nothing is."""
  said = text_of(log)
  if status not in _STATUSES or TRACE in said or (status == 2 and not told(said)):
    return f'ended with {status}: {said[-1500:]}'
  return None


def _splits(draw: random.Random, folder: str, shared: str) -> Found:
  """Sends SIGKILL or SIGTERM to `ctr-split` at random moments, fills its disk, starts two at once.

  Its three files must be those that were there, or those of an undisturbed run; after SIGKILL some
  may be missing, but none is cut short, and no old one stands beside a new one.
  """
  suffix, found = draw.choice(['csv', 'jsonl', 'parquet']), Found()
  rng = np.random.default_rng(draw.randrange(1 << 30))
  frame = pd.DataFrame(rng.integers(0, 1000, [20000, 3]), columns=['time', 'user', 'item'])
  path, out = f'{folder}/log.{suffix}', f'{folder}/out'
  if suffix == 'parquet':
    frame.to_parquet(path)
  elif suffix == 'csv':
    frame.to_csv(path, index=False)
  else:
    frame.to_json(path, orient='records', lines=True)

  def split(by: str, before: Callable[[], object] = lambda: None) -> tuple[int, str]:
    """Starts a split; returns its process and its log."""
    log = f'{folder}/{by}-{len(os.listdir(folder))}.log'
    begin = command('trainer.cli.split', '--data', path, '--out', out, f'--by_{by}', by_columns[by])
    return fork(lambda: (before(), begin()), log), log

  def content() -> dict[str, bytes]:
    names = [name for name in os.listdir(out) if not name.startswith('.')]
    return {name: open(f'{out}/{name}', 'rb').read() for name in names}

  by_columns, wanted, seconds = {'time': 'time', 'hash': 'user'}, {}, 0.0
  for by in by_columns:
    began = time.monotonic()
    status = wait(split(by)[0], SOON)
    seconds = time.monotonic() - began
    wanted[by] = content()
    if status or len(wanted[by]) != 3:
      found.trial('', f'undisturbed: status {status}, {sorted(wanted[by])}')
      return found
  there = 'hash'
  for _ in range(TRIALS):
    by, fault = draw.choice(list(by_columns)), draw.choice(['signal', 'signal', 'disk', 'two'])
    most = draw.randrange(max(map(len, wanted[by].values())))

    def small(most: int = most) -> None:  # as a disk that is full
      signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
      resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    started = [split(by, small)] if fault == 'disk' else [split(by)]
    if fault == 'two':
      started.append(split('time'))
    number = draw.choice(_SIGNALS)
    if fault == 'signal':
      time.sleep(draw.random() * seconds)
      os.kill(started[0][0], number)
    statuses = [wait(pid, SOON) for pid, _ in started]
    wrong = next(filter(None, map(_wrong, statuses, (log for _, log in started))), None)
    after = content()
    may = {name: wanted[name] for name in (there, by, 'time')} if 0 in statuses else {}
    may = may or {there: wanted[there], **({by: wanted[by]} if fault == 'signal' else {})}
    same = [name for name, whole in may.items() if after == whole]
    part = [name for name, whole in may.items() if after.items() <= whole.items()]
    if not same and not (number == signal.SIGKILL and fault == 'signal' and part):
      wrong = wrong or f'{sorted(after)} are of no run, after {fault}, {statuses}'
    if wrong:
      found.trial('', f'{wrong}, {fault} at a split of .{suffix} by {by}')
      return found
    there = same[0] if same else there
    found.trial('new files' if 0 in statuses else 'old files')
    if not same:
      wait(split(there)[0], SOON)
  return found


def _searches(draw: random.Random, folder: str, shared: str) -> Found:
  """Sends SIGKILL or SIGTERM to `ctr-tune` at random moments, once while there are two.

  Then it is left alone. A trial whose search was killed must keep other searches out, each in one
  line; in the end every trial has the metric of an undisturbed search.
  """
  rng, found = np.random.default_rng(draw.randrange(1 << 30)), Found()
  for name in ('train', 'valid'):
    users = rng.integers(20, size=400)
    clicks = rng.random(400) < 0.1 + 0.6 * (users < 7)
    frame = pd.DataFrame({'label': clicks.astype(int), 'user': users})
    frame.to_csv(f'{folder}/{name}.csv', index=False)
  tree = {
    'data': {split: [f'{folder}/{split}.csv'] for split in ('train', 'valid')}
    | {'slots': [{'name': 'user'}]},
    'model': {'interactions': ['linear']},
    'train': {'epochs': 3, 'batch_size': 50, 'deterministic': True},
    'checkpoint': {'every_steps': 3},
  }
  with open(f'{folder}/search.yaml', 'w', encoding='utf-8') as f:
    yaml.safe_dump(tree, f)

  def search(study: str, i: int) -> tuple[int, str]:
    log = f'{folder}/{study}-{i}.log'
    words = '--config', f'{folder}/search.yaml', '--set', 'train.epochs=2,3', '--trials', '2'
    return fork(command('trainer.cli.tune', *words, '--study_dir', f'{folder}/{study}'), log), log

  def results(study: str) -> list[tuple]:
    table = pd.read_csv(f'{folder}/{study}/trials.csv')
    table['run_dir'] = table['run_dir'].map(os.path.basename)
    return sorted(table[['train.epochs', 'run_dir', 'state', 'auc']].itertuples(index=False))

  pid, log = search('undisturbed', 0)
  if status := wait(pid, SOON):
    found.trial('', f'undisturbed: {status}: {text_of(log)[-1500:]}')
    return found
  for i in range(STARTS + 1):
    started = [search('study', 10 * i + j) for j in range(2 if i == 0 else 1)]
    with killed_in_the_end([pid for pid, _ in started]):
      if i < STARTS:
        time.sleep(draw.random() * 12)
        os.kill(started[0][0], draw.choice(_SIGNALS))
      statuses = [wait(pid, SOON) for pid, _ in started]
    wrong = next(filter(None, map(_wrong, statuses, (log for _, log in started))), None)
    lock = f'{folder}/study/lock'
    try:
      with files.exclusive(lock, patience=0):
        pass
    except UserError as e:  # the trial of a killed search goes on
      os.kill(int(re.search(r'its trial, process (\d+)', str(e))[1]), signal.SIGTERM)
      with files.exclusive(lock, patience=60):
        pass
    if not wrong and i == STARTS and statuses != [0]:
      wrong = f'the search that was left alone: {statuses}: {text_of(started[0][1])[-1500:]}'
    if not wrong and i == STARTS and results('study') != results('undisturbed'):
      wrong = f'{results("study")}; wanted {results("undisturbed")}'
    if wrong:
      found.trial('', wrong)
      return found
    if i < STARTS:
      found.trial('saved and stopped' if statuses[0] == 143 else 'ended at once')
  return found


KINDS = [
  Kind('splits', 'faults', 10, 600, _splits),
  Kind('searches', 'faults', 8, 1800, _searches),
]
