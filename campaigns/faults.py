"""Looks for silent differences, hangs, crashes and stack traces under faults of every kind.

    python -m campaigns.faults [--share 0.05] [--seed 0] [--only NAME …] [--out FILE]

The seed draws units of trials; `--jobs` of them run at a time, each in a process of its own. A unit
that ends adds a line to the results file. With the same file, the campaign continues where it was.
At the end it prints a table; its status is 1 if anything failed. docs/reliability.md says what is
tried and what must hold.
"""

import argparse
import collections
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable
from typing import Any

os.environ.setdefault('TF_USE_LEGACY_KERAS', '1')
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
os.environ.setdefault('CUDA_VISIBLE_DEVICES', '')
os.environ['CTR_THREADS'] = '1'

from campaigns import (
  damage,
  days,
  fuzzing,
  places,
  processes,
  splits_and_searches,
  strangers,
  streams,
  topics,
  wire,
)
from campaigns.units import Found, Kind, append, fork, text_of, wait

_MODULES = (
  processes,
  splits_and_searches,
  places,
  damage,
  streams,
  topics,
  days,
  fuzzing,
  wire,
  strangers,
)
KINDS = [kind for module in _MODULES for kind in module.KINDS]


def parse(argv: list[str]) -> argparse.Namespace:
  """Returns the options."""
  # absl's flags belong to the commands that run in forked processes.
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--out', default='build/campaign/results.jsonl', help='the results file')
  parser.add_argument('--share', type=float, default=1.0, help='of a whole campaign')
  parser.add_argument('--seed', type=int, default=0, help='of everything')
  names = [kind.name for kind in KINDS]
  parser.add_argument(
    '--only', nargs='*', choices=names, metavar='NAME', help='kinds that are tried; all'
  )
  parser.add_argument('--jobs', type=int, default=2, help='units at a time')
  parser.add_argument('--minutes', type=float, help='no unit begins after so long')
  return parser.parse_args(argv)


def finished(path: str, seed: int) -> list[dict[str, Any]]:
  """Returns the records of a results file that are of this seed."""
  records = [json.loads(line) for line in text_of(path).splitlines() if line.endswith('}')]
  return [record for record in records if record['seed'] == seed]


def planned(options: argparse.Namespace, done: Iterable[dict[str, Any]]) -> list[tuple[Kind, int]]:
  """Returns the units that are left, ordered so that all kinds advance evenly."""
  known = {(record['kind'], record['number']) for record in done}
  units = []
  for kind in KINDS:
    if options.only and kind.name not in options.only:
      continue
    wanted = max(1, round(kind.units * options.share))
    units += [(i / wanted, kind, i) for i in range(wanted) if (kind.name, i) not in known]
  return [unit[1:] for unit in sorted(units, key=lambda unit: unit[0])]


class Running:
  """A unit that runs, in a process group of its own."""

  def __init__(self, kind: Kind, number: int, seed: int, shared: str):
    self.kind, self.number, self.seed = kind, number, seed
    self.folder = tempfile.mkdtemp(prefix=f'unit{number}-', dir=shared)
    self.began = time.monotonic()
    self.pid = fork(lambda: self._run(shared), f'{self.folder}/unit.log')

  def _run(self, shared: str) -> None:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    draw = random.Random(f'{self.seed} {self.kind.name} {self.number}')
    found = self.kind.run(draw, self.folder, shared)
    with open(f'{self.folder}/found.json', 'w', encoding='utf-8') as f:
      json.dump([found.trials, found.outcomes, found.failures], f)

  def record(self) -> dict[str, Any] | None:
    """Returns the result of the unit as a record; None while it runs."""
    status, seconds = wait(self.pid, 0), time.monotonic() - self.began
    if status is None and seconds < self.kind.seconds:
      return None
    found = Found()
    if status == 0:
      with open(f'{self.folder}/found.json', encoding='utf-8') as f:
        found = Found(*json.load(f))
    elif status is None:
      found.trial('', f'still runs after {seconds:.0f} s')
    else:
      found.trial('', f'ended with status {status}: {text_of(self.folder + "/unit.log")[-1500:]}')
    self.kill()
    return {
      'seed': self.seed,
      'kind': self.kind.name,
      'number': self.number,
      'unit': self.kind.unit,
      'trials': found.trials,
      'outcomes': found.outcomes,
      'failures': found.failures,
      'seconds': round(seconds, 1),
    }

  def kill(self) -> None:
    """Ends whatever is left of the unit's processes."""
    try:
      os.killpg(self.pid, signal.SIGKILL)
    except ProcessLookupError:
      return
    try:
      os.waitpid(self.pid, 0)
    except ChildProcessError:
      pass  # it had ended by itself


def table(records: Iterable[dict[str, Any]]) -> str:
  """Returns, as Markdown, what each kind does and must hold, then its results."""
  kinds: dict[str, list[str]] = {}  # by what was done
  lines = ['| kind | trials | how they ended | failures |', '|---|---|---|---|']
  totals: collections.Counter[str] = collections.Counter()
  for kind in KINDS:
    own = [record for record in records if record['kind'] == kind.name]
    if not own:
      continue
    outcomes = collections.Counter[str]()
    for record in own:
      outcomes.update(record['outcomes'])
    failed = outcomes.pop('failed', 0)
    trials = sum(record['trials'] for record in own)
    ends = ', '.join(f'{n:,} {name}' for name, n in outcomes.most_common())
    lines.append(f'| {kind.name} | {trials:,} {kind.unit} | {ends} | {failed} |')
    kinds.setdefault(kind.what, []).append(kind.name)
    totals[kind.unit] += trials
    totals['failures'] += failed
  figures = ', '.join(f'{n:,} {name}' for name, n in totals.items() if name != 'failures')
  what = [f'- **{"; ".join(names)}**: {text}' for text, names in kinds.items()]
  return '\n'.join([*what, '', *lines, '', f'{figures}, {totals["failures"]} failures.'])


def run(options: argparse.Namespace, shared: str) -> None:
  """Runs the units that are left."""
  units, running = planned(options, finished(options.out, options.seed)), []
  began, count = time.monotonic(), len(units)
  try:
    while units or running:
      if options.minutes is not None and time.monotonic() - began > options.minutes * 60:
        units.clear()
      while units and len(running) < options.jobs:
        running.append(Running(*units.pop(0), options.seed, shared))
      for unit in list(running):
        if record := unit.record():
          running.remove(unit)
          append(options.out, record)
          left = len(units) + len(running)
          print(f'{count - left}/{count} {unit.kind.name} {unit.number}: ', end='')
          print(f'{record["trials"]} in {record["seconds"]} s', *record['failures'], flush=True)
          if not record['failures']:
            shutil.rmtree(unit.folder, ignore_errors=True)
      time.sleep(0.02)  # between looks
  finally:
    for unit in running:
      unit.kill()


def main(argv: list[str]) -> int:
  options = parse(argv)
  os.makedirs(os.path.dirname(options.out) or '.', exist_ok=True)
  shared = tempfile.mkdtemp(prefix='ctr-campaign-')
  signal.signal(signal.SIGTERM, signal.default_int_handler)
  try:
    run(options, shared)
  except KeyboardInterrupt:
    shutil.rmtree(shared, ignore_errors=True)
    print('interrupted; the same command goes on')
    return 130
  records = finished(options.out, options.seed)
  print(table(records))
  failed = any(record['failures'] for record in records)
  if failed:
    print(f'what is left of failed units: {shared}')
  else:
    shutil.rmtree(shared, ignore_errors=True)
  return int(failed)


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
