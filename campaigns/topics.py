"""Kills jobs that train on a topic: every message must have been trained on exactly once.

Other jobs find their topic made anew, or the list of its cuts damaged.
"""

import os
import random
import shutil
import signal
import time

import numpy as np
import yaml

from campaigns.damage import damage
from campaigns.processes import SOON, Fault, Job
from campaigns.units import TRACE, Found, Kind, fork, in_child, killed_in_the_end, text_of
from tests.support import topics
from tests.support.states import OF_ROWS, state_of
from trainer.topics import topic as topic_reader
from trainer.topics.topic_passes import FILE

MESSAGES, PASS, BATCH = 3000, 400, 100
RANKS = (1, 2, 3, 1)  # of the starts of a job, in turn
HIDDEN = 3  # a partition that is added at the third start
KILLS = 4  # of a unit
# Of the calls of a job, those of the first passes: it makes 2,400 before it asks for one.
_CALLS = 2_400, 9_000
_LINEAR = OF_ROWS.index('linear')
_BOUNDS = topic_reader.Topic.bounds


def _cluster(path: str, count: int = MESSAGES, seed: int = 0, begin: int | None = None) -> None:
  """Answers as a cluster with so many messages, a millisecond apart from the time `begin` on."""
  cluster = topics.Cluster()
  times = None if begin is None else range(begin, begin + count)
  some = topics.records(4 * MESSAGES, seed)[:count]
  cluster.send('log', map(topics.as_json, some), times=times)
  with open(path + '.new', 'w', encoding='utf-8') as f:
    f.write(cluster.brokers)
  os.replace(path + '.new', path)
  signal.pause()


def write_config(folder: str, brokers: str) -> str:
  """Writes the config of a job on the topic; returns its path."""
  tree = {
    'seed': 5,
    'data': {
      'topic': {'brokers': brokers, 'topic': 'log', 'pass': {'records': PASS}},
      'label': 'click',
      'slots': [{'name': 'user'}, {'name': 'item'}],
      'dense': [{'name': 'price'}],
    },
    'lifecycle': {'admission_threshold': 0.5},
    'sparse': {'tables': {'default': {'width': 4}}},
    'model': {'interactions': ['linear', 'fm', {'dnn': {'hidden': [8]}}]},
    'train': {'batch_size': BATCH, 'deterministic': True, 'log_every_steps': 2},
    'checkpoint': {'every_steps': 3},
    'export': {'delta_every_passes': 1},
  }
  path = f'{folder}/config.yaml'
  with open(path, 'w', encoding='utf-8') as f:
    yaml.safe_dump(tree, f)
  return path


def _hide() -> None:
  """Lets this process see one partition less."""
  topic_reader.Topic.bounds = lambda self: {
    p: span for p, span in _BOUNDS(self).items() if p != str(HIDDEN)
  }


def _run(job: Job, fault: Fault | None, hides: bool) -> bool:
  """Starts a job and kills all of it at the fault; returns whether it trained all there is."""
  names = list(job._environments)
  arms = {name: (_hide if hides else lambda: None) for name in names}
  if fault:
    arms[names[0]] = lambda: (_hide() if hides else None, fault.arm())
  job.start(arms)
  deadline = time.monotonic() + SOON
  while job.wait(0.05) and time.monotonic() < deadline:
    if job.statuses:
      break
    if 'waiting for records' in job.said():
      os.kill(job.pids[names[0]], signal.SIGTERM)
      job.wait(SOON)
  is_done = set(job.statuses.values()) == {0}
  job.end()
  return is_done


def _difference(run_dir: str, wanted: str, is_exact: bool) -> str | None:
  """Returns what differs from the run that was left alone; values may, unless `is_exact`."""
  found, expected = state_of(run_dir), state_of(wanted)
  for progress in (found['progress'], expected['progress']):
    for name in ('done', 'batch', 'last', 'examples', 'topics'):
      if found['progress'][name] != expected['progress'][name]:
        return f'progress.{name}: {found["progress"][name]}; wanted {expected["progress"][name]}'
    entries = [(e['path'], e['fate']) for e in progress['ledger']['entries']]
    if len(set(entries)) != len(entries) or {fate for _, fate in entries} != {'trained'}:
      return f'ledger: {entries}'
  if is_exact:
    return None if found['rows'] == expected['rows'] else 'rows differ'
  if found['rows'].keys() != expected['rows'].keys():
    return 'features differ'
  for key, row in expected['rows'].items():
    for i, (mine, theirs) in enumerate(zip(found['rows'][key], row)):
      is_weight = i == _LINEAR or i >= len(OF_ROWS)
      values = [np.frombuffer(value, np.float32) for value in (mine, theirs) if is_weight]
      if not np.allclose(*values, rtol=1e-3, atol=1e-5) if is_weight else mine != theirs:
        return f'feature {key}: part {i} is {values[:1] or mine}; wanted {values[1:] or theirs}'
  return None


def run_unit(draw: random.Random, folder: str, shared: str, kills: int = KILLS) -> Found:
  """Kills a job that trains on a topic, again and again, at any call of its first process.

  It goes on with 1, 2, 3 and 1 ranks, and with a partition more from the third start on. In the end
  it must equal, row by row, a job of one process that was left alone: in what rows have seen
  exactly, in weights as far as sums over ranks allow, bit by bit if it had one process throughout.
  """
  del shared
  found, brokers, history = Found(), f'{folder}/brokers', []
  pid = fork(lambda: _cluster(brokers), f'{folder}/cluster.log')
  with killed_in_the_end([pid]):
    while not text_of(brokers):
      time.sleep(0.02)
    path = write_config(folder, text_of(brokers))
    flags = ['--config', path, '--run_dir', f'{folder}/run']
    is_exact, i = draw.random() < 0.3, 0
    while True:
      ranks = 1 if is_exact else RANKS[i % len(RANKS)]
      fault = Fault(signal.SIGKILL, draw.randrange(*_CALLS)) if i < kills else None
      history.append(f'{ranks} ranks, {fault}')
      os.makedirs(f'{folder}/{i}')
      job = Job(f'{folder}/{i}', 'single' if ranks == 1 else 'ranks', flags, ranks)
      is_done, hides = _run(job, fault, hides=i < 2), i < 2
      found.trial('ended' if is_done else 'killed')
      if problem := job.problem():
        found.trial('', f'{problem}, after {history}')
        return found
      i += 1
      if is_done and not hides:
        break
      if fault is None and not is_done:
        found.trial('', f'did not end: {job.said()[-500:]}, after {history}')
        return found
    os.makedirs(f'{folder}/alone')
    shutil.copy(f'{folder}/run/{FILE}', f'{folder}/alone/{FILE}')  # so that it cuts the same
    os.makedirs(f'{folder}/alone.logs')
    flags = ['--config', path, '--run_dir', f'{folder}/alone']
    if not _run(Job(f'{folder}/alone.logs', 'single', flags), None, hides=False):
      found.trial('', 'the job that was left alone did not end')
      return found
  wrong = in_child(lambda: _difference(f'{folder}/run', f'{folder}/alone', is_exact), folder)
  if wrong:
    found.trial('', f'{wrong}, after {history}')
  return found


def _trained(job: Job) -> tuple[int | None, str]:
  """Runs a job until it waits; returns its status and what is wrong with it, besides a refusal."""
  _run(job, None, hides=False)
  status, said = job.statuses.get('single'), job.said()
  refusals = [line for line in said.splitlines() if line.startswith('error: ')]
  if TRACE in said or status not in (0, 2) or len(refusals) != (status == 2):
    return status, f'ended with {status}: {said[-1500:]}'
  return status, ''


def _job(folder: str, number: int, brokers: str) -> Job:
  here = f'{folder}/{number}'
  os.makedirs(here)
  flags = ['--config', write_config(here, brokers), '--run_dir', f'{folder}/run']
  return Job(here, 'single', flags)


def _offsets(run_dir: str) -> int:
  (place,) = state_of(run_dir)['progress']['topics'].values()
  return sum(place['offsets'].values())


def _remade(draw: random.Random, folder: str, shared: str) -> Found:
  """Continues runs on a topic that was made anew, or copied; the first must be refused."""
  del shared
  found, begin, first = Found(), 10**12, draw.randrange(PASS, MESSAGES)
  kinds = {  # count, seed and begin of the messages of the other topic; whether it is a copy
    'others': (draw.randrange(1, 2 * MESSAGES), 1, begin, False),
    'later': (draw.randrange(1, 2 * MESSAGES), 0, begin + draw.randrange(1, 9), False),
    'copy': (draw.randrange(first + PASS, 2 * MESSAGES), 0, begin, True),
  }
  clusters = {'first': (first, 0, begin)} | {kind: of[:3] for kind, of in kinds.items()}
  pids = [
    fork(lambda at=f'{folder}/{name}', of=of: _cluster(at, *of), f'{folder}/{name}.log')
    for name, of in clusters.items()
  ]
  with killed_in_the_end(pids):
    while not all(text_of(f'{folder}/{name}') for name in clusters):
      time.sleep(0.02)
    status, wrong = _trained(_job(folder, 0, text_of(f'{folder}/first')))
    wrong = wrong or (f'ended with {status}' if status else '')
    for i, (kind, of) in enumerate(kinds.items(), 1):
      if wrong:
        break
      job = _job(folder, i, text_of(f'{folder}/{kind}'))
      status, wrong = _trained(job)
      if not wrong and (status == 0) != of[3]:
        wrong = f'ended with {status}: {job.said()[-600:]}'
      if not wrong and status == 2 and 'was made anew' not in job.said():
        wrong = job.said()[-600:]
      found.trial(
        'refused in one line' if status else 'went on', f'{kind}: {wrong}' if wrong else None
      )
    if not wrong:
      read = in_child(lambda: _offsets(f'{folder}/run'), folder)
      wanted = kinds['copy'][0] // PASS * PASS
      wrong = '' if read == wanted else f'trained to {read}; wanted {wanted}'
  if wrong:
    found.trial('', wrong)
  return found


def _cuts(draw: random.Random, folder: str, shared: str) -> Found:
  """Damages cuts.json; each message is trained on once all the same, or a line wants it removed."""
  del shared
  found, brokers = Found(), f'{folder}/brokers'
  with killed_in_the_end([fork(lambda: _cluster(brokers), f'{folder}/cluster.log')]):
    while not text_of(brokers):
      time.sleep(0.02)
    _run(_job(folder, 0, text_of(brokers)), Fault(signal.SIGKILL, draw.randrange(*_CALLS)), False)
    path = f'{folder}/run/{FILE}'
    what, i = damage(draw, path) if os.path.exists(path) else 'nothing', 1
    while True:
      job = _job(folder, i, text_of(brokers))
      status, wrong = _trained(job)
      if not wrong and status == 2 and (i > 1 or f'{FILE}: ' not in job.said()):
        wrong = job.said()[-600:]
      found.trial(
        'refused in one line' if status else 'went on', f'{what}: {wrong}' if wrong else None
      )
      if wrong or status == 0:
        break
      os.remove(path)
      i += 1
    if not wrong:
      examples = in_child(lambda: state_of(f'{folder}/run')['progress']['examples'], folder)
      if examples != MESSAGES // PASS * PASS:
        found.trial('', f'{what}: trained on {examples} messages')
  return found


KINDS = [
  Kind('topics', 'kills', 25, 900, run_unit),
  Kind('re-made topics', 'faults', 10, 900, _remade),
  Kind('damaged cuts', 'faults', 25, 900, _cuts),
]
