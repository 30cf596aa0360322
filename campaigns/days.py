"""Streams on changing numbers of ranks, and a day of 1,440 passes in which nothing may grow."""

import json
import os
import random
import signal
import time

import numpy as np
import psutil

from campaigns.processes import SOON, Fault, Job
from campaigns.streams import write_config
from campaigns.units import Found, Kind, fork, in_child, killed_in_the_end, told
from tests.support.states import state_of
from trainer.job import ready_passes
from trainer.job.stream import Stream

ROUNDS = 5  # of a stream: its job is started again
_SAMPLES = 120  # of a pass
_OF_COUNTS = (0, 1, 3, 4, 5)  # of a row's values in state_of: show, click, days and admitted


def _write_pass(folder: str, name: str, samples: int, seed: int) -> None:
  rng = np.random.default_rng(seed)
  user, item = rng.integers(0, 40, samples), rng.integers(0, 30, samples)
  click = rng.random(samples)
  with open(f'{folder}/{name}.csv', 'w', encoding='utf-8') as f:
    f.write('user,item,click\n')
    f.writelines(f'{u},{i},{c < 0.3:d}\n' for u, i, c in zip(user, item, click))
  with open(f'{folder}/{name}.csv.done', 'w', encoding='utf-8'):
    pass


def _run(folder: str, ranks: int, flags: list[str], fault: tuple[str, Fault] | None) -> str | None:
  """Runs a job until it waits for a pass or meets its fault; returns what is wrong, or None."""
  os.makedirs(folder)
  job = Job(folder, 'single' if ranks == 1 else 'ranks', flags, ranks)
  job.start({fault[0]: fault[1].arm} if fault else None)
  left = job.stop_when_waiting(next(name for name in job.pids if name != 'rendezvous'))
  if left or (wrong := job.problem()) or (not fault and set(job.statuses.values()) != {0}):
    return f'{left} run; {wrong}; {job.statuses}: {told(job.said())}'
  return None


def _resized(draw: random.Random, folder: str, shared: str) -> Found:
  """Stops or kills a job that follows a directory, within days and passes, and continues it on 1, 2
  or 3 ranks. The trained passes, and the shows, clicks and days of all features, must equal those
  of one undisturbed process.
  """
  found, flags = Found(), write_config(folder)
  number, day, history = 0, 1, []
  for i in range(ROUNDS):
    for _ in range(draw.choice([1, 2, 3])):
      number, day = number + 1, day + draw.choice([0, 0, 0, 1])
      _write_pass(f'{folder}/passes', f'day_{day}_hour_{number}', _SAMPLES, number)
    # A killed job is started again at once, on another number of ranks.
    for killed in (*[True] * draw.choice([0, 1, 1]), False):
      ranks = draw.choice([1, 2, 3])
      name = 'single' if ranks == 1 else f'rank {draw.randrange(ranks)}'
      fault = (name, Fault(signal.SIGKILL, draw.randrange(20_000))) if killed else None
      history.append(f'{ranks} ranks{", killed" if killed else ""}')
      if wrong := _run(f'{folder}/{i}-{killed}', ranks, flags, fault):
        found.trial('', f'{wrong}, after {history}')
        return found
      found.trial('went on')
  os.makedirs(f'{folder}/alone')
  alone = write_config(f'{folder}/alone/1')
  os.rmdir(f'{folder}/alone/1/passes')
  os.symlink(f'{folder}/passes', f'{folder}/alone/1/passes')
  wrong = _run(f'{folder}/alone/log', 1, alone, None) or in_child(
    lambda: _counts_differ(f'{folder}/run', f'{folder}/alone/1/run'), folder
  )
  if wrong:
    found.trial('', f'{wrong}, after {history}')
  return found


def _counts_differ(run_dir: str, wanted: str) -> str | None:
  """Compares which passes two runs trained, and what they counted of each feature."""
  runs = [state_of(path) for path in (run_dir, wanted)]
  trained = [[e['pass'] for e in run['events'] if e['event'] == 'train'] for run in runs]
  if trained[0] != trained[1]:
    return f'trained {trained[0]}; wanted {trained[1]}'
  counts = [{key: [row[i] for i in _OF_COUNTS] for key, row in run['rows'].items()} for run in runs]
  return None if counts[0] == counts[1] else 'shows, clicks, days or admissions differ'


# A day of a stream

_PASSES = 1440
_WARM_UP, _BETWEEN = 240, 120  # passes
_SPEED = 300  # of the clock, at which a small machine trains a pass a minute
_MORE_BYTES, _MORE_FILES = 24 << 20, 8  # of memory and of open files, after the warm-up
_MORE_SECONDS = 1.5  # how many times the seconds a pass may grow


def _fast_clock() -> None:
  began, clock = time.time(), time.time

  def fast() -> float:
    return began + (clock() - began) * _SPEED

  time.time = fast
  make = Stream.__init__  # its default is the clock at import
  make.__defaults__ = tuple(fast if value is clock else value for value in make.__defaults__)
  # The pause after a look at the directory would else end so much sooner than its duration asks.
  ready_passes.SECONDS_BETWEEN_REMOTE_LOOKS *= _SPEED


def _feed(folder: str) -> None:
  """Announces a pass as soon as the one before it is trained."""
  for number in range(_PASSES):
    name = f'day_1_{number // 60:02}{number % 60:02}'
    _write_pass(f'{folder}/passes', name, 100, number)
    while number - _trained(folder) > 2:
      time.sleep(0.01)


def _trained(folder: str) -> int:
  try:
    with open(f'{folder}/run/metrics.jsonl', 'rb') as f:
      return f.read().count(b'"event": "train"')
  except FileNotFoundError:
    return 0


def _day(draw: random.Random, folder: str, shared: str) -> Found:
  """Trains a day of tiny passes, one a minute by a fast clock, each with a checkpoint and a delta.

  Memory, open files, disk space and the processor time of a pass must not grow.
  """
  found = Found()
  flags = write_config(
    folder,
    data={'day_pattern': r'day_(\d+)', 'close_day_after_hours': 6},
    checkpoint={'every_steps': None, 'every_passes': 1},
    lifecycle={'admission_threshold': 0.5, 'delete_threshold': 0.01},
  )
  job = Job(folder, 'single', flags)
  job.start({'single': _fast_clock})
  feeder = fork(lambda: _feed(folder), f'{folder}/feeder.log')
  process, figures, before, work = psutil.Process(job.pids['single']), [], (0, 0.0), []
  with killed_in_the_end([feeder]):
    while job.wait(0.1):
      work.append(_seconds_of_some_work())
      trained = _trained(folder)
      if trained >= _WARM_UP + len(figures) * _BETWEEN and trained - before[0] >= _BETWEEN:
        seconds = sum(process.cpu_times()[:2])
        figures.append(
          {
            'passes': trained,
            # The unique set would grow whenever it first writes to a page from before the fork.
            'memory': process.memory_info().rss,
            'files': process.num_fds(),
            'disk': _bytes_below(f'{folder}/run'),
            'seconds': (seconds - before[1]) / (trained - before[0]),
            # On a busy machine all work takes longer.
            'relative': (seconds - before[1]) / (trained - before[0]) / np.mean(work),
          }
        )
        before, work = (trained, seconds), []
      if trained >= _PASSES and 'day 1 ended' in job.said():  # the clock ends it
        os.kill(process.pid, signal.SIGTERM)
        break
  left = job.wait(SOON)
  job.end()
  wrong = f'still runs: {left}' if left else job.problem()
  with open(f'{folder}/figures.json', 'w', encoding='utf-8') as f:
    json.dump(figures, f)
  wrong = wrong or _growth(figures)
  for _ in range(1 if wrong else _trained(folder)):
    found.trial('trained, level', wrong and f'{wrong}: {figures}')
  return found


def _seconds_of_some_work() -> float:
  """Returns the processor time that a fixed piece of work takes, about a millisecond."""
  began = time.process_time()
  sorted(range(20_000), key=lambda i: -i)
  return time.process_time() - began


def _growth(figures: list[dict[str, float]]) -> str | None:
  """Returns what has grown from the first look after the warm-up to the last, or None."""
  first, last = figures[1], figures[-1]  # the first has the seconds of the start
  if last['memory'] - first['memory'] > _MORE_BYTES:
    return 'memory grows'
  # A look may find a pass in the middle of its files: the least of some looks is what stays open.
  third = len(figures) // 3
  before, after = (min(f['files'] for f in some) for some in (figures[:third], figures[-third:]))
  if after - before > _MORE_FILES:
    return 'open files grow'
  if last['relative'] > _MORE_SECONDS * first['relative']:
    return 'the seconds a pass grow'
  halves = [figures[i + 1]['disk'] - figures[i]['disk'] for i in range(1, len(figures) - 1)]
  if sum(halves[len(halves) // 2 :]) > 2 * sum(halves[: len(halves) // 2]) + (1 << 20):
    return 'the disk that a pass takes grows'
  return None


def _bytes_below(folder: str) -> int:
  return sum(
    os.stat(os.path.join(base, name)).st_blocks * 512
    for base, _, names in os.walk(folder)
    for name in names
    if os.path.exists(os.path.join(base, name))  # it may have been deleted
  )


KINDS = [
  Kind('resized streams', 'faults', 8, 3000, _resized),
  Kind('a day of passes', 'passes', 1, 3600, _day),
]
