"""Kills, stops and freezes processes, sends strangers to their ports, fills their disks.

After all of it a job must end in the state of an undisturbed one.
"""

import contextlib
import ctypes
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any

import numpy as np
import plotly.graph_objects as go
import psutil
import yaml
from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
from horovod.runner.http.http_server import RendezvousServer

from campaigns.units import (
  TRACE,
  Found,
  Kind,
  command,
  fork,
  in_child,
  killed_in_the_end,
  text_of,
  told,
  wait,
)
from ops.sharding import SHARDS
from tests.support.parameter_servers import free_addresses
from tests.support.states import state_of
from trainer import files
from trainer.comm import horovod  # noqa: F401 before the forks
from trainer.job import job as training_job  # noqa: F401
from trainer.parameter_server import run as parameter_server_run  # noqa: F401
from trainer.storage import chain

# Plotly imports most of itself when it first draws; forks then have it, too.
go.Figure([go.Scatter(x=[0]), go.Bar(x=[0]), go.Heatmap(z=[[0]])]).to_html(include_plotlyjs=False)

LOST_SECONDS = 15
BOUND = 90  # seconds in which a job that has lost a process must have ended
SOON = 900  # seconds in which a job that is left alone must have ended, on a busy machine
FAULTS = 6  # in a row, before the job is left alone
STARTS = 12  # units that share the places of a start
_STARTED = 'job/stream.py:Stream.next'  # called first when a job has started
DAYS, SAMPLES, BATCH = 3, 500, 100
MODES = ('single', 'ranks', 'ps', 'ps_async', 'ps_geo')
EXACT = ('single', 'ranks', 'ps')  # modes whose runs are the same each time
# Follows a mode: the table has many features, no day ends, and each step's checkpoint has the rows
# that changed.
INCREMENTS = ' with increments'
# These may differ as well: a job reports a lost rank, and the bytes that a rank sends depend on the
# steps since its start.
DIFFERING = ('bytes_per_sample', 'lost')
STATUSES = {0, 2, 3, 143, -signal.SIGKILL, -signal.SIGTERM}


def write_log(folder: str, seed: int = 0, shelf: int = 0) -> None:
  """Writes the days of a log whose clicks depend on user and item, and one more day to predict.

  With `shelf`, each sample of the first day has so many values of a further slot, and others two.
  """
  rng = np.random.default_rng(seed)
  for day in range(DAYS + 1):
    user, item = rng.integers(0, 60, [2, SAMPLES])
    click = rng.random(SAMPLES) < 1 / (1 + np.exp(1 - np.sin(user) - np.cos(item)))
    with open(f'{folder}/day_{day}.csv', 'w', encoding='utf-8') as f:
      f.write('user,item,tags,price,click' + ',shelf' * bool(shelf) + '\n')
      for u, i, c in zip(user, item + 20 * day, click):
        tags = '|'.join(f't{t}' for t in rng.integers(0, 12, rng.integers(0, 3)))
        f.write(f'u{u},i{i},{tags},{rng.exponential():.3f},{c:d}')
        if shelf:
          values = rng.integers(0, 10**6, 2 if day else shelf)
          f.write(',' + '|'.join(map(str, values)))
        f.write('\n')


def write_config(folder: str, mode_and_more: str) -> str:
  """Writes the config of a job in this mode on the folder's log; returns its path."""
  mode = mode_and_more.removesuffix(INCREMENTS)
  sync = {
    'mode': 'allreduce' if mode not in ('ps', 'ps_async', 'ps_geo') else mode,
    'lost_peer_seconds': LOST_SECONDS,
    'stalled_peer_seconds': 120,
    'geo_steps': 2,
  }
  lifecycle = {'admission_threshold': 0.5, 'delete_threshold': 0.1, 'delete_after_unseen_days': 1}
  tree = {
    'seed': 5,
    'data': {
      'train': [f'{folder}/day_[0-{DAYS - 1}].csv'],
      'day_pattern': r'day_(\d+)',
      'label': 'click',
      'slots': [{'name': 'user'}, {'name': 'item'}, {'name': 'tags', 'separator': '|'}],
      'dense': [{'name': 'price', 'transform': 'log1p_standardise'}],
    },
    # Runs that are not exact are compared by their shows, so these must not decay.
    'lifecycle': lifecycle | {'decay': 0.9} if mode in EXACT else {'decay': 1.0},
    'sparse': {'tables': {'default': {'width': 4}}},
    'model': {'interactions': ['linear', 'fm', {'dnn': {'hidden': [8]}}]},
    'train': {'batch_size': BATCH, 'deterministic': True, 'log_every_steps': 2},
    'checkpoint': {'every_steps': 3},
    'export': {'base': True, 'delta_every_passes': 1},
    'sync': sync,
  }
  if mode != mode_and_more:
    del tree['lifecycle'], tree['data']['day_pattern']
    tree['data']['slots'].append({'name': 'shelf', 'separator': '|'})
    tree['export'] = {'delta_every_passes': 1}
    tree['checkpoint'] = {'every_steps': 1, 'max_increments': 4}
  path = f'{folder}/{mode_and_more}.yaml'
  with open(path, 'w', encoding='utf-8') as f:
    yaml.safe_dump(tree, f)
  return path


class Fault:
  """A signal that a process sends itself.

  Args:
    number: the signal.
    calls: how many functions of trainer/ are called before it is sent.
    place: 'file:function' in trainer/; its first call sends the signal, if it comes earlier.
  """

  def __init__(self, number: signal.Signals, calls: int, place: str | None = None):
    self.number, self.calls, self.place = number, calls, place

  def __str__(self) -> str:
    place = f'{self.place} or ' if self.place else ''
    return f'{self.number.name} at {place}call {self.calls}'

  def arm(self) -> None:
    """Arms this process."""
    left = self.calls

    def at_call(place: str) -> None:
      nonlocal left
      left -= 1
      if place == self.place or left < 0:
        sys.setprofile(None)
        os.write(1, b'FAULT\n')
        os.kill(os.getpid(), self.number)

    _watch_calls(at_call)


def _watch_calls(at_call: Callable[[str], None]) -> None:
  def profile(frame: FrameType, event: str, _: Any) -> None:
    code = frame.f_code
    if event == 'call' and '/trainer/' in code.co_filename:
      at_call(f'{code.co_filename.rpartition("/trainer/")[2]}:{code.co_qualname}')

  sys.setprofile(profile)


_CALLS_A_LINE = 100


def _record_calls(path: str) -> Callable[[], None]:
  """Returns a function that makes its process write a file of its calls.

  The file has the name of each function once, and an empty line for every _CALLS_A_LINE calls.
  """

  def arm() -> None:
    # The process ends by os._exit, so lines must not wait in a buffer.
    out = open(path, 'w', buffering=1, encoding='utf-8')
    seen: set[str] = set()
    calls = 0

    def at_call(place: str) -> None:
      nonlocal calls
      calls += 1
      if place not in seen:
        seen.add(place)
        out.write(f'{place}\n')
      if calls % _CALLS_A_LINE == 0:
        out.write('\n')

    _watch_calls(at_call)

  return arm


def _rendezvous(slots: list[Any], path: str) -> None:
  store = RendezvousServer()
  port = store.start()
  store.init(slots)
  with open(path + '.new', 'w', encoding='utf-8') as f:
    f.write(str(port))
  os.replace(path + '.new', path)
  signal.pause()


class Job:
  """The processes of one run of a job.

  Args:
    folder: of their logs.
    mode: one of MODES.
    flags: of trainer.run.
    ranks: the number of ranks, in the mode `ranks`.
  Attributes:
    pids: by name.
    statuses: of those that have ended, by name.
  """

  names = {
    'single': ['single'],
    'ranks': ['rank 0', 'rank 1'],
  } | dict.fromkeys(('ps', 'ps_async', 'ps_geo'), ['ps 0', 'worker 0', 'worker 1'])

  def __init__(self, folder: str, mode: str, flags: list[str], ranks: int = 2):
    self._folder, self._flags, self._ranks = folder, flags, ranks
    self._mode = mode.removesuffix(INCREMENTS)
    self.pids: dict[str, int] = {}
    self.statuses: dict[str, int] = {}
    self._environments = self._make_environments()

  def _make_environments(self) -> dict[str, dict[str, str]]:
    if self._mode == 'single':
      return {'single': {}}
    if self._mode == 'ranks':
      slots = get_host_assignments(parse_hosts(f'localhost:{self._ranks}'), self._ranks)
      path = f'{self._folder}/port'
      with contextlib.suppress(FileNotFoundError):
        os.remove(path)
      self.pids['rendezvous'] = fork(lambda: _rendezvous(slots, path), f'{path}.log')
      while not (port := text_of(path)):
        time.sleep(0.005)
      common = create_run_env_vars('127.0.0.1', ['lo'], port)
      return {f'rank {slot.rank}': create_slot_env_vars(slot) | common for slot in slots}
    addresses = free_addresses(3)
    cluster = {'ps': list(addresses[:1]), 'worker': list(addresses[1:])}
    return {
      name: {
        'TF_CONFIG': json.dumps(
          {'cluster': cluster, 'task': {'type': name.split()[0], 'index': int(name.split()[1])}}
        )
      }
      for name in self.names[self._mode]
    }

  def log(self, name: str) -> str:
    return f'{self._folder}/{name}.log'

  def start(self, arm: dict[str, Callable[[], None]] | None = None) -> None:
    """Starts all processes; those named in `arm` first call its function."""
    for name, environment in self._environments.items():
      self.start_one(name, environment, (arm or {}).get(name))

  def start_one(
    self, name: str, environment: dict[str, str], arm: Callable[[], None] | None = None
  ) -> None:
    begin = command('trainer.run', *self._flags)

    def action() -> None:
      os.environ.update(environment)
      signal.signal(signal.SIGTERM, signal.SIG_DFL)
      if arm:
        arm()
      begin()

    self.pids[name] = fork(action, self.log(name))

  def wait(self, seconds: float, but: str | None = None) -> list[str]:
    """Waits for the processes other than `but`; returns the names of those that still run."""
    deadline = time.monotonic() + seconds
    left = [name for name in self._environments if name not in self.statuses and name != but]
    for name in left:
      status = wait(self.pids[name], max(0.1, deadline - time.monotonic()))
      if status is not None:
        self.statuses[name] = status
    return [name for name in left if name not in self.statuses]

  def stop_when_waiting(self, name: str) -> list[str]:
    """Sends SIGTERM to a process once the job waits for a pass; returns what still runs then."""
    deadline = time.monotonic() + SOON
    while time.monotonic() < deadline and self.wait(0.1):
      if 'waiting for a pass in' in self.said():
        os.kill(self.pids[name], signal.SIGTERM)
        break
    left = self.wait(SOON)
    self.end()
    return left

  def end(self) -> None:
    """Kills what still runs."""
    with killed_in_the_end([p for name, p in self.pids.items() if name not in self.statuses]):
      pass

  def said(self) -> str:
    """Returns the output of all processes."""
    return ''.join(text_of(self.log(name)) for name in self._environments)

  def problem(self) -> str | None:
    """Returns what is wrong with the ends of the processes, in one line; None if nothing is."""
    odd = {name: status for name, status in self.statuses.items() if status not in STATUSES}
    said = self.said()
    if odd:
      return f'statuses {odd}: {told(said)[-3:] or said[-600:]}'
    if TRACE in said:
      return f'a stack trace: {said[said.index(TRACE) :][:1500]}'
    refused = [name for name, status in self.statuses.items() if status in (2, 3)]
    if refused and not told(said):
      return f'{refused} ended without a reason: {said[-600:]}'
    return None


def undisturbed(mode: str, shared: str) -> tuple[str, dict[str, Any]]:
  """Runs a mode's job once for all units; returns its config and the calls that it made."""
  folder = f'{shared}/{mode}'
  lock, done = f'{folder}.lock', f'{folder}/reference.json'
  while not os.path.exists(done):
    try:
      os.mkdir(lock)
    except FileExistsError:  # another unit runs it
      time.sleep(0.1)
      continue
    os.makedirs(folder)
    write_log(folder, shelf=40 if mode.endswith(INCREMENTS) else 0)
    config = write_config(folder, mode)
    names, record = Job.names[mode.removesuffix(INCREMENTS)], {}
    for begun in ('first', 'again'):  # the second run resumes the first
      os.makedirs(f'{folder}/{begun}')
      job = Job(f'{folder}/{begun}', mode, ['--config', config, '--run_dir', f'{folder}/run'])
      job.start({name: _record_calls(f'{folder}/{begun}/{name}.calls') for name in names})
      left = job.wait(SOON)
      job.end()
      if left or set(job.statuses.values()) != {0}:
        raise AssertionError(f'undisturbed: {job.statuses}, {left} run: {job.said()[-3000:]}')
      lines = {name: text_of(f'{folder}/{begun}/{name}.calls').split('\n') for name in names}
      record[begun] = {
        name: {'places': [one for one in noted if one], 'calls': noted.count('') * _CALLS_A_LINE}
        for name, noted in lines.items()
      }
    with open(f'{done}.new', 'w', encoding='utf-8') as f:
      json.dump(record, f)
    os.replace(f'{done}.new', done)
  with open(done, encoding='utf-8') as f:
    return f'{folder}/{mode}.yaml', json.load(f)


def _shows(run_dir: str) -> float:
  """Returns the sum of the shows of all features of the slot user."""
  state, total = state_of(run_dir), 0.0
  for key, row in state['rows'].items():
    if key >> 52 == min(k >> 52 for k in state['rows']):
      total += float(np.frombuffer(row[0], np.float32 if len(row[0]) == 4 else np.float64)[0])
  return total


def difference(
  mode: str, run_dir: str, wanted: str, faults: int, but: Collection[str] = ()
) -> str | None:
  """Compares a run with the undisturbed one.

  Args:
    mode: the mode of both.
    run_dir: the run's.
    wanted: the undisturbed run's.
    faults: how many faults the run had.
    but: parts that may differ: exports, events.
  Returns:
    What differs, or None.
  """
  found, expected = (state_of(path, DIFFERING) for path in (run_dir, wanted))
  if [n for n in os.listdir(f'{run_dir}/exports') if 'unfinished' in n]:
    return 'an unfinished export is left'
  if mode.removesuffix(INCREMENTS) in EXACT:
    for what in ('rows', 'dense', 'progress', 'exports'):
      if what in but:
        continue
      if what == 'progress':
        for state in (found, expected):
          for entry in state['progress']['ledger']['entries']:
            del entry['modified']
      if found[what] != expected[what]:
        return f'{what} differ: {_first_difference(found[what], expected[what])}'
    for name, value in expected['metrics'].items():
      if not np.array_equal(found['metrics'][name], value):
        return f'{name} differs'
    if 'events' in but:
      return None
    names = [
      [(e['event'], e.get('pass'), e['step']) for e in s['events']] for s in (found, expected)
    ]
    return None if names[0] == names[1] else f'events differ: {names}'
  # The successor of a lost worker may repeat what that worker had begun.
  for name in ('done', 'last', 'epoch', 'day'):
    if found['progress'][name] != expected['progress'][name]:
      return f'progress.{name}: {found["progress"][name]}; wanted {expected["progress"][name]}'
  fates = [entry['fate'] for entry in found['progress']['ledger']['entries']]
  if fates != ['trained'] * DAYS:
    return f'fates: {fates}'
  shows, least = _shows(run_dir), DAYS * SAMPLES
  if not least <= shows <= least + faults * 2 * BATCH:
    return f'{shows:.0f} shows; wanted {least}, and at most {2 * BATCH} more for each fault'
  trained = [e['pass'] for e in found['events'] if e['event'] == 'train']
  if trained != [f'day_{day}' for day in range(DAYS)]:
    return f'train events of {trained}'
  return None


def _first_difference(found: Any, wanted: Any) -> str:
  for key in sorted(found.keys() | wanted.keys(), key=str):
    if found.get(key) != wanted.get(key):
      return f'{key}: {str(found.get(key))[:150]} and {str(wanted.get(key))[:150]}'
  return ''


def _draw_fault(draw: random.Random, name: str, reference: dict[str, Any], is_first: bool) -> Fault:
  """Draws a fault of a process; `is_first` if its job has nothing to resume yet."""
  number = draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
  # A resumed job makes as few calls as one that is finished, or as many as a new one.
  seen = reference['first' if is_first else draw.choice(['first', 'again'])][name]
  place = draw.choice(seen['places']) if draw.random() < 0.4 else None
  return Fault(number, draw.randrange(seen['calls']), place)


def _signals(mode: str) -> Callable[[random.Random, str, str], Found]:
  def run_unit(draw: random.Random, folder: str, shared: str) -> Found:
    """Sends SIGKILL, SIGTERM or SIGSTOP to any process, several times in a row.

    It comes at a random call, or at the first call of a random function, also while a job starts or
    resumes. Then the job is left alone. Its rows, dense state, place in the data, exports and
    events must equal those of an undisturbed run, bit by bit. In modes ps_async and ps_geo it must
    train every pass once and lose no sample.
    """
    config, reference = undisturbed(mode, shared)
    flags, found = ['--config', config, '--run_dir', f'{folder}/run'], Found()
    history: list[str] = []
    for i in range(FAULTS + 1):
      os.makedirs(f'{folder}/{i}')
      job = Job(f'{folder}/{i}', mode, flags)
      if i == FAULTS:
        job.start()
        was_met = _met(job, '', None, found, history)
      else:
        name = draw.choice(job.names[mode.removesuffix(INCREMENTS)])
        fault = _draw_fault(draw, name, reference, is_first=i == 0)
        history.append(f'{fault} in {name}')
        job.start({name: fault.arm})
        was_met = _met(job, name, fault, found, history)
      if found.failures:
        return found
      if not was_met:  # it was left alone to its end
        break
    run_dir, wanted = f'{folder}/run', f'{os.path.dirname(config)}/run'
    wrong = in_child(lambda: difference(mode, run_dir, wanted, FAULTS), folder)
    if wrong:
      found.trial('', f'{wrong}, after {history}')
    return found

  return run_unit


def half_trained(shared: str) -> str:
  """Trains on all days but the last, once for all units; returns the run_dir."""
  path, _ = undisturbed('single', shared)
  folder, done = f'{shared}/half', f'{shared}/half/done'
  with files.exclusive(f'{shared}/half.lock'):
    if not os.path.exists(done):
      os.makedirs(folder)
      days = [f'{os.path.dirname(path)}/day_{day}.csv' for day in range(DAYS - 1)]
      flags = ['--config', path, '--run_dir', f'{folder}/run', '--set', f'data.train={days}']
      job = Job(folder, 'single', flags)
      job.start()
      job.wait(SOON)
      job.end()
      if set(job.statuses.values()) != {0}:
        raise AssertionError(f'{job.statuses}: {job.said()[-1000:]}')
      with open(done, 'w', encoding='utf-8'):
        pass
  return f'{folder}/run'


def _starts(draw: random.Random, folder: str, shared: str) -> Found:
  """Sends SIGKILL or SIGTERM to a process that resumes a run.

  It comes at the first call of each function before the first pass. Then the process is left alone.
  Its state must equal that of an undisturbed run, bit by bit.
  """
  config, reference = undisturbed('single', shared)
  run_dir, found = f'{folder}/run', Found()
  shutil.copytree(half_trained(shared), run_dir)
  places = reference['again']['single']['places']
  places = places[: places.index(_STARTED)]
  # Each unit has its share of the places, whatever it draws.
  number = _number_of_unit(folder)
  history: list[str] = []
  for i, place in enumerate([*places[number % STARTS :: STARTS], None]):
    os.makedirs(f'{folder}/{i}')
    job = Job(f'{folder}/{i}', 'single', ['--config', config, '--run_dir', run_dir])
    if place is None:
      fault = None
      job.start()
    else:
      fault = Fault(draw.choice([signal.SIGKILL, signal.SIGTERM]), sys.maxsize, place)
      history.append(str(fault))
      job.start({'single': fault.arm})
    was_met = _met(job, 'single', fault, found, history)
    if found.failures:
      return found
    if place is not None and not was_met:
      found.trial('', f'{place} was not met, after {history}')
      return found
  wanted = f'{os.path.dirname(config)}/run'
  wrong = in_child(lambda: difference('single', run_dir, wanted, 0), folder)
  if wrong:
    found.trial('', f'{wrong}, after {history}')
  return found


def _number_of_unit(folder: str) -> int:
  return int(re.search(r'unit(\d+)-', folder)[1])


def _met(job: Job, name: str, fault: Fault | None, found: Found, history: list[str]) -> bool:
  """Waits for the end of a started job, and counts its fault.

  Args:
    job: the job.
    name: the process that has the fault.
    fault: the fault, if any.
    found: the result to which it is added.
    history: the faults so far.
  Returns:
    Whether the fault took place; if not, the job has run undisturbed to its end.
  """
  frozen = fault is not None and fault.number == signal.SIGSTOP
  left = _wait_for_fault(job, name) if frozen else job.wait(SOON)
  if frozen and not left and name not in job.statuses:  # the others have ended, or there are none
    os.kill(job.pids[name], signal.SIGCONT)
    left = job.wait(BOUND)
  met = fault is not None and 'FAULT' in text_of(job.log(name))
  job.end()
  wrong = f'still run: {left}: {job.said()[-1500:]}' if left else job.problem()
  if not wrong and not met and set(job.statuses.values()) != {0}:
    wrong = f'the job that was left alone: {job.statuses} {told(job.said())}'
  if wrong:
    found.trial('', f'{wrong}, after {history}')
  elif met:
    statuses = [s for n, s in job.statuses.items() if n != name]
    went_on = bool(statuses) and set(statuses) == {0}
    own = job.statuses[name]
    outcome = 'went on' if went_on or own == 0 else 'saved and stopped' if own == 143 else ''
    if not outcome:
      outcome = 'ended by name' if 3 in statuses else 'ended at once'
    found.trial(outcome)
  return met


def _wait_for_fault(job: Job, name: str) -> list[str]:
  """Waits until a process is frozen or has ended, and the others have ended.

  Returns:
    The names of the others that still run.
  """
  process = psutil.Process(job.pids[name])
  deadline = time.monotonic() + SOON
  while time.monotonic() < deadline:
    if process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
      break
    time.sleep(0.02)
  if process.status() == psutil.STATUS_ZOMBIE:
    return job.wait(SOON)
  return job.wait(SOON, but=name)


# Strangers

_SAYINGS = (
  b'',
  b'GET / HTTP/1.0\r\n\r\n',
  b'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n',
  b'\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03',
  b'\xff' * 100,
  b'\x7f\xff\xff\xff',
  b'\0\0\0\x14#CHALLENGE#1234567890',
)
_STRANGERS = 3  # of each saying, at each port


def _talk_to_all(pids: list[int], ports: range, draw: random.Random) -> None:
  """Connects to the ports and sockets of processes as soon as they listen, and sends bytes.

  It runs until it is killed, and leaves out ports that are not in `ports`.
  """
  met: set[Any] = set()
  staying: list[socket.socket] = []
  while True:
    for pid in pids:
      with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        found: set[Any] = {
          ('127.0.0.1', c.laddr.port)
          for c in process.net_connections('tcp')
          if c.status == psutil.CONN_LISTEN and c.laddr.port in ports
        }
        names = (c.laddr for c in process.net_connections('unix'))
        found |= {b'\0' + name[1:].encode() for name in names if name.startswith('@')}
        for address in found - met:
          met.add(address)
          print('stranger at', address, flush=True)
          for saying in _SAYINGS * _STRANGERS:
            with contextlib.suppress(OSError):
              one = socket.socket(socket.AF_INET if isinstance(address, tuple) else socket.AF_UNIX)
              one.settimeout(5)
              one.connect(address)
              one.sendall(saying)
              staying.append(one)
              if draw.random() < 0.3:
                one.close()
    time.sleep(0.02)


def _strangers(draw: random.Random, folder: str, shared: str) -> Found:
  """Opens many connections to each port and socket of a job as soon as it listens.

  They send nothing, random bytes, HTTP, TLS or half of our own greeting. The job must end as an
  undisturbed one. Ports are counted.
  """
  mode = ('ranks', 'ps', 'ps_async')[_number_of_unit(folder) % 3]
  config, _ = undisturbed(mode, shared)
  # Ranks listen at Unix sockets; their only ports are Gloo's, which are left out: it aborts its
  # process where a stranger is the first to come.
  ports = range(0) if mode == 'ranks' else range(1, 1 << 16)
  job, found = Job(folder, mode, ['--config', config, '--run_dir', f'{folder}/run']), Found()
  job.start()
  pids = [pid for name, pid in job.pids.items() if name != 'rendezvous']
  stranger = fork(lambda: _talk_to_all(pids, ports, draw), f'{folder}/stranger.log')
  with killed_in_the_end([stranger]):
    left = job.wait(SOON)
  job.end()
  said = text_of(f'{folder}/stranger.log')
  wrong = f'still run: {left}' if left else job.problem()
  if wrong is None and set(job.statuses.values()) != {0}:
    wrong = f'{job.statuses}: {told(job.said())}'
  run_dir, wanted = f'{folder}/run', f'{os.path.dirname(config)}/run'
  wrong = wrong or in_child(lambda: difference(mode, run_dir, wanted, 0), folder)
  ports_met = said.count('stranger')
  for _ in range(ports_met if not wrong else 1):
    found.trial('finished the same', wrong and f'{wrong}, with strangers at {mode}, {said}')
  return found


# Two of everything

_BESIDE = {
  'base': 'trainer.cli.export --kind base --run_dir {run_dir}',
  'delta': 'trainer.cli.export --kind delta --run_dir {run_dir}',
  'saved_model': 'trainer.cli.export --kind saved_model --run_dir {run_dir}',
  'predict': 'trainer.cli.predict --run_dir {run_dir} --data {data} --out {out}',
  'evaluate': 'trainer.cli.evaluate --run_dir {run_dir} --data {data}',
  'inspect': 'trainer.cli.inspect --run_dir {run_dir}',
}


def _two(draw: random.Random, folder: str, shared: str) -> Found:
  """Lets two trainers use one run_dir, beside exports, predictions, evaluations and inspections.

  One must train and the other be refused in a line that names the first; the others
  must succeed. State and last base must equal those of one run. Pairs are counted.
  """
  config, _ = undisturbed('single', shared)
  source, run_dir, found = os.path.dirname(config), f'{folder}/run', Found()
  trains = command('trainer.run', '--config', config, '--run_dir', run_dir)
  drawn = draw.choices(list(_BESIDE), k=draw.choice([2, 3])) * 2
  pids: dict[str, int] = {}
  for name in ('trainer 0', 'trainer 1'):
    pids[name] = fork(trains, f'{folder}/{name}.log')
  time.sleep(draw.random() * 3)
  for i, name in enumerate(drawn):
    data, out = f'{source}/day_{DAYS}.csv', f'{folder}/out{i}'
    words = _BESIDE[name].format(run_dir=run_dir, data=data, out=out).split()
    pids[f'{name} {i}'] = fork(command(*words), f'{folder}/{name} {i}.log')
  statuses = {name: wait(pid, SOON) for name, pid in pids.items()}
  if None in statuses.values():
    found.trial('', f'still run: {statuses}')
    return found
  wrong = None
  for name, status in statuses.items():
    said = text_of(f'{folder}/{name}.log')
    if status not in (0, 2) or TRACE in said or (status == 2 and not told(said)):
      wrong = f'{name} ended with {status}: {said[-1500:]}'
  if sorted(statuses[f'trainer {i}'] for i in range(2)) not in ([0, 2], [0, 0]):
    wrong = wrong or f'trainers: {statuses}'
  # Exports of commands take their place in the chain, so that its numbers differ.
  but = ['exports', 'events']
  wrong = wrong or in_child(
    lambda: (
      difference('single', run_dir, f'{source}/run', 0, but)
      or _last_base_differs(run_dir, f'{source}/run')
    ),
    folder,
  )
  for _ in range(1 if wrong else 1 + len(drawn) // 2):  # so many pairs
    found.trial('as one after the other', wrong and f'{wrong}: {drawn}')
  return found


def _last_base_differs(run_dir: str, wanted: str) -> str | None:
  """Compares the trainer's last base with that of the undisturbed run."""
  last = [one for one in chain.exports(f'{wanted}/exports') if one.kind == 'base'][-1]
  position = files.read_manifest(last.path)['position']
  for one in chain.exports(f'{run_dir}/exports'):
    if one.kind == 'base' and files.read_manifest(one.path)['position'] == position:
      keys = [chain.RowExport(path).keys('rows', range(SHARDS)) for path in (one.path, last.path)]
      same = np.array_equal(*keys)
      return None if same else f'{one.path} has other keys than {last.path}'
  return f'there is no base of {position}'


# Disks

_NEW_NAMESPACE = 0x00020000  # CLONE_NEWNS


def _mounted(path: str, kilobytes: int) -> bool:
  """Mounts a file system of this size that only this process and its children see."""
  if ctypes.CDLL(None).unshare(_NEW_NAMESPACE):
    return False
  quiet = {'stdout': subprocess.DEVNULL, 'stderr': subprocess.DEVNULL}
  if subprocess.run(['mount', '--make-rprivate', '/'], **quiet).returncode:
    return False
  os.makedirs(path)
  size = f'size={kilobytes}k'
  return not subprocess.run(['mount', '-t', 'tmpfs', '-o', size, 'tmpfs', path], **quiet).returncode


def _fill(path: str, draw: random.Random) -> None:
  """Fills a disk at random moments and frees the space a while later, until it is killed."""
  while True:
    time.sleep(draw.random() * 2)
    with contextlib.suppress(OSError), open(f'{path}/ballast', 'wb', buffering=0) as f:
      while True:
        f.write(bytes(1 << 14))
    time.sleep(draw.random())
    os.remove(f'{path}/ballast')


def _full_disks(draw: random.Random, folder: str, shared: str) -> Found:
  """Makes the disk too small, or full at random moments, several times in a row; then it has space.

  One line must say so, and the state must equal that of an undisturbed run.
  """
  mode = draw.choice(['single', 'ranks']) + draw.choice(['', INCREMENTS])
  config, _ = undisturbed(mode, shared)
  wanted, disk, found = f'{os.path.dirname(config)}/run', f'{folder}/disk', Found()
  needed = sum(os.path.getsize(path) for path in _files(wanted)) // 1024
  if not _mounted(disk, needed):
    found.outcomes['cannot mount here'] += 1
    return found
  flags, history = ['--config', config, '--run_dir', f'{disk}/run'], []
  for i in range(FAULTS + 1):
    is_last = i == FAULTS
    size = 4 * needed if is_last else int(needed * draw.random() * draw.choice([0.1, 1, 1.5])) + 40
    space = os.statvfs(disk)  # what is used stays
    used = (space.f_blocks - space.f_bfree) * space.f_frsize // 1024
    size = max(size, used + draw.choice([4, 40, 400]))
    subprocess.run(['mount', '-o', f'remount,size={size}k', disk], check=True)
    os.makedirs(f'{folder}/{i}')
    job = Job(f'{folder}/{i}', mode, flags)
    job.start()
    filler = [] if is_last else [fork(lambda: _fill(disk, draw), f'{folder}/filler.log')]
    with killed_in_the_end(filler):
      left = job.wait(SOON)
    job.end()
    with contextlib.suppress(FileNotFoundError):
      os.remove(f'{disk}/ballast')
    said, statuses = job.said(), set(job.statuses.values())
    history.append(f'{size} kB: {sorted(statuses)}')
    wrong = f'still run: {left}' if left else None
    if 1 in statuses and 'but the reports are not' not in said or statuses - {0, 1, 2}:
      wrong = wrong or f'{job.statuses}: {said[-1500:]}'
    if TRACE in said:
      wrong = wrong or f'a stack trace: {said[said.index(TRACE) :][:2000]}'
    if 2 in statuses and not ('No space left' in said or 'wanted free space' in said):
      wrong = wrong or f'status 2 names no full disk: {told(said)}'
    if is_last and statuses - {0, 1}:
      wrong = wrong or f'the disk has space again: {job.statuses}: {told(said)}'
    if wrong:
      found.trial('', f'{wrong}, {mode}, after {history}')
      return found
    if not is_last:
      told_of = 'named, then gone on' if 2 in statuses else 'reports named, state whole'
      found.trial('had space enough' if statuses == {0} else told_of)
  wrong = in_child(lambda: difference(mode, f'{disk}/run', wanted, 0, ['events']), folder)
  if wrong:
    found.trial('', f'{wrong}, {mode}, after {history}')
  return found


def _files(folder: str) -> list[str]:
  return [os.path.join(base, name) for base, _, names in os.walk(folder) for name in names]


KINDS = [
  *(
    Kind(f'signals, {mode}', 'faults', units, 6000, _signals(mode))
    for mode, units in zip(MODES, (40, 30, 25, 25, 25, 25))
  ),
  *(
    Kind(f'signals, {mode}{INCREMENTS}', 'faults', 12, 6000, _signals(mode + INCREMENTS))
    for mode in EXACT
  ),
  Kind('starts', 'faults', STARTS, 3000, _starts),
  Kind('strangers', 'faults', 16, 3000, _strangers),
  Kind('two of everything', 'faults', 30, 3000, _two),
  Kind('full disks', 'faults', 16, 3000, _full_disks),
]
