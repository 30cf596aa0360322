"""Days of made-up streams: what the trainer's stream does is what an independent model of it says.

Passes come in order, late, twice under one name or under two, damaged, misnamed, or not at all
though their markers say so; the process ends at any moment and takes up a state of before.
"""

import json
import os
import random
import re
import signal
import time
import types
from typing import Any

import numpy as np
import yaml

from campaigns.processes import SOON, Fault, Job
from campaigns.units import Found, Kind, in_child
from tests.support.states import state_of
from trainer import config
from trainer.comm.communicator import SingleProcess
from trainer.errors import BadPass
from trainer.training.ledger import Ledger
from trainer.training.run_state import Progress
from trainer.training.stream import End, EndDay, Stream, TrainPass, Wait

STREAMS = 25  # of a unit
MOMENTS = 30  # of a stream, at each of which something happens
# What may happen to a pass. 'found': a file comes whose marker was there before it.
_EVENTS = ('pass', 'day', 'late', 'double', 'corrupt', 'misnamed', 'missing', 'found', 'far')
DAYS_AHEAD = 14  # data.max_days_ahead with data.watch


class Model:
  """What should become of each pass, told by rules that know nothing of the trainer's code.

  Args:
    late: data.late.
  Attributes:
    log: what was done: names trained, 'end N' of days.
    fates: by name.
    texts: of passes by name, as whoever plays the stream notes them.
  """

  def __init__(self, late: str):
    self._late = late
    self.log: list[str] = []
    self.fates: dict[str, str] = {}
    self.texts: dict[str, str] = {}
    self._open: int | None = None
    self._closed: int | None = None
    self._bytes: set[str] = set()  # of what was trained

  def look(self, there: dict[str, str], bad: set[str]) -> None:
    """Does what is to be done until nothing is ready.

    Args:
      there: the bytes of the passes that are announced and there, by name.
      bad: names of those that cannot be read.
    """
    for name in sorted(there):
      if not re.search(r'day_\d', name):
        self.fates[name] = 'refused'
    while True:
      new = [n for n in there if n not in self.fates]
      if not new:
        return
      # The first by day, then with numbers as numbers.
      name = min(new, key=lambda n: (_day(n), [int(x) for x in re.findall(r'\d+', n)], n))
      day, ended = _day(name), self._open if self._open is not None else self._closed
      # Before the first pass, a day of eight digits is compared with today.
      is_far = 90_000_000 <= day <= 9999_12_31 if ended is None else day > ended + DAYS_AHEAD
      if is_far or there[name] in self._bytes:
        self.fates[name] = 'refused' if is_far else 'seen'
        continue
      is_late = day < self._open if self._open is not None else ended is not None and day <= ended
      if is_late and self._late == 'skip':
        self.fates[name] = 'skipped'
        continue
      if not is_late and self._open is not None and day > self._open:
        self.log.append(f'end {self._open}')
        self._open, self._closed = None, self._open
        continue
      if name in bad:
        self.fates[name] = 'refused'
        continue
      self.log.append(name)
      self._bytes.add(there[name])
      if is_late:
        self.fates[name] = 'late'
      else:
        self.fates[name], self._open = 'trained', day


def _name(draw: random.Random, what: str, day: int, number: int) -> str:
  match what:
    case 'late':
      return f'day_{max(0, day - draw.randrange(1, 4))}_hour_{number}.csv'
    case 'far':
      return f'day_{day + 90_000_000}_hour_{number}.csv'
    case 'misnamed':
      return f'hour_{number}.csv'
    case _:
      return f'day_{day}_hour_{number}.csv'


def _day(name: str) -> int:
  return int(re.search(r'day_(\d+)', name)[1])


class Trainer:
  """The trainer's stream without a training: it notes what it would do, and keeps its state as a
  checkpoint would.
  """

  def __init__(self, folder: str, late: str, bad: set[str]):
    tree = {
      'watch': folder,
      'late': late,
      'max_refused_passes': 1000,
      'slots': [{'name': 'a'}],
      'day_pattern': r'day_(\d+)',
    }
    model = {'interactions': ['linear']}
    self._cfg = config.Config.model_validate({'data': tree, 'model': model})
    self._bad = bad
    self.log: list[str] = []
    self.restore('{"progress": {}, "ledger": null, "log": []}')

  def saved(self) -> str:
    """Returns all that a checkpoint would hold."""
    progress = vars(self.state.progress)
    state = {'progress': progress, 'ledger': self.state.ledger.state(), 'log': self.log}
    return json.dumps(state)

  def restore(self, text: str) -> None:
    """Begins anew from what `saved` gave."""
    state = json.loads(text)
    progress, ledger = Progress(**state['progress']), Ledger(state['ledger'])
    self.log = state['log']
    self.state = types.SimpleNamespace(progress=progress, ledger=ledger)
    self._stream = Stream(self._cfg, SingleProcess(), self.state, lambda *_: None)

  def look(self, actions: int | None = None) -> None:
    """Does what the stream says until it waits, or so many actions."""
    progress, done = self.state.progress, 0
    while actions is None or done < actions:
      done += 1
      match self._stream.next():
        case TrainPass(one, late):
          if os.path.basename(one.path) in self._bad:
            self._stream.refused(BadPass(one.name))
            continue
          if not late:
            progress.day = one.day
          self._stream.trained()
          progress.done, progress.last = progress.done + 1, one.name
          self.log.append(os.path.basename(one.path))
        case EndDay(day) as ended:
          self._stream.day_ended(ended)
          self.log.append(f'end {day}')
        case Wait() | End():
          return

  def fates(self) -> dict[str, str]:
    """Returns what became of each pass, by its file's name."""
    return {os.path.basename(entry.path): entry.fate for entry in self.state.ledger}


def _stream(draw: random.Random, folder: str) -> str | None:
  """Plays one stream. Returns: what differs, or None."""
  os.makedirs(folder)
  late, bad, there = draw.choice(['train', 'skip']), set(), {}
  trainer, model = Trainer(folder, late, bad), Model(late)
  events: list[Any] = []
  day, number, contents = draw.choice([1, 8, 20240227]), 0, []
  promised: list[tuple[str, str]] = []
  checkpoint = trainer.saved()

  def arrive(name: str, content: str) -> None:
    _write(folder, name, content)
    _write(folder, name + '.done', '')
    there[name] = content

  for _ in range(MOMENTS):
    number += 1
    content = f'content {number}'
    what = draw.choices(_EVENTS, [8, 4, 3, 2, 2, 1, 2, 2, 1])[0]
    if what == 'day':
      day += draw.choice([1, 1, 1, 2])
    name = _name(draw, what, day, number)
    match what:
      case 'double' if contents:
        content = draw.choice(contents)
      case 'corrupt':
        bad.add(name)
      case 'missing':
        _write(folder, name + '.done', '')
        promised.append((name, content))
      case 'found' if promised:
        name, content = promised.pop(draw.randrange(len(promised)))
    if what != 'missing':
      arrive(name, content)
      contents += [content] if what != 'corrupt' else []
    events.append((what, name))
    # The model looks after every event or a few; the trainer at the same moments, but it may die
    # at any action and take up what was saved.
    if draw.random() < 0.6:
      model.look(there, bad)
      while draw.random() < 0.4:
        trainer.look(draw.randrange(5))
        if draw.random() < 0.5:
          trainer.restore(checkpoint)
          events.append('died')
        else:
          checkpoint = trainer.saved()
      trainer.look()
      checkpoint = trainer.saved()
      if (trainer.log, trainer.fates()) != (model.log, model.fates):
        return f'{trainer.log} {trainer.fates()}; wanted {model.log} {model.fates}: {events}'
  return None


def _write(folder: str, name: str, text: str) -> None:
  with open(os.path.join(folder, name), 'w', encoding='utf-8') as f:
    f.write(text)


def _streams(draw: random.Random, folder: str, shared: str) -> Found:
  found = Found()
  for i in range(STREAMS):
    wrong = _stream(draw, f'{folder}/{i}')
    found.trial('as the model says', wrong)
  return found


# Whole jobs

ROUNDS = 5  # of a stream: so often passes come, and the trainer runs until it waits
_SAMPLES = 120  # of a pass
_BAD = ('', 'user,item,click\n', 'user,item\n1,2\n', '\0\1\2\n' * 50, 'PAR1')


def _pass_text(number: int) -> str:
  rng = np.random.default_rng(number)
  lines = zip(rng.integers(0, 40, _SAMPLES), rng.integers(0, 30, _SAMPLES), rng.random(_SAMPLES))
  return 'user,item,click\n' + ''.join(f'{u},{i},{p < 0.3:d}\n' for u, i, p in lines)


def _watching(folder: str, late: str) -> str:
  """Writes the config of a job that follows folder/passes. Returns: its path."""
  os.makedirs(f'{folder}/passes')
  tree = {
    'seed': 3,
    'data': {
      'watch': f'{folder}/passes',
      'day_pattern': r'day_(\d+)',
      'late': late,
      'max_refused_passes': 1000,
      'shuffle': False,  # which follows the names of passes
      'label': 'click',
      'slots': [{'name': 'user'}, {'name': 'item'}],
    },
    'lifecycle': {'admission_threshold': 0.5, 'delete_threshold': 0.2, 'decay': 0.8},
    'sparse': {'tables': {'default': {'width': 4}}},
    'model': {'interactions': ['linear', 'fm', {'dnn': {'hidden': [4]}}]},
    'train': {'batch_size': 50, 'deterministic': True},
    'checkpoint': {'every_steps': 4},
    'export': {'base': True, 'delta_every_passes': 1},
  }
  with open(f'{folder}/config.yaml', 'w', encoding='utf-8') as f:
    yaml.safe_dump(tree, f)
  return f'{folder}/config.yaml'


def _run_until_it_waits(folder: str, number: int, fault: Fault | None = None) -> str | None:
  """Runs the trainer until it waits for a pass, and stops it. Returns: what is wrong, or None."""
  os.makedirs(f'{folder}/{number}')
  job = Job(
    f'{folder}/{number}',
    'single',
    ['--config', f'{folder}/config.yaml', '--run_dir', f'{folder}/run'],
  )
  job.start({'single': fault.arm} if fault else None)
  deadline = time.monotonic() + SOON
  while time.monotonic() < deadline and job.wait(0.1):
    if 'waiting for a pass in' in job.said():
      os.kill(job.pids['single'], signal.SIGTERM)
      job.wait(SOON)
      break
  left = job.wait(0)
  job.end()
  status = job.statuses.get('single')
  wrong = job.problem()
  if left or wrong or status not in ((0, -signal.SIGKILL) if fault else (0,)):
    return f'{left} run; {wrong}; {job.statuses}: {job.said()[-1500:]}'
  return None


def _reference(folder: str, model: Model, late: str) -> str | None:
  """Trains what the model says was trained, each pass in its place and nothing else, in one go.

  Returns:
    The run_dir; None where a pass was trained while no day was open, which no such job can do.
  """
  os.makedirs(folder)
  _watching(folder, late)
  day: int | None = None
  for i, done in enumerate(model.log):
    if done.startswith('end '):
      day = None
      continue
    if model.fates[done] == 'trained':
      day = _day(done)
    if day is None:
      return None
    _write(f'{folder}/passes', f'day_{day}_hour_{i}.csv', model.texts[done])
    _write(f'{folder}/passes', f'day_{day}_hour_{i}.csv.done', '')
  if wrong := _run_until_it_waits(folder, 0):
    raise AssertionError(wrong)
  return f'{folder}/run'


def _jobs(draw: random.Random, folder: str, shared: str) -> Found:
  """Plays a stream to a real trainer, which is stopped and killed between and within passes."""
  found, late, bad, there = Found(), draw.choice(['train', 'train', 'skip']), set(), {}
  _watching(folder, late)
  model, watch, promised, texts, runs = Model(late), f'{folder}/passes', [], [], 0
  day, number, events = draw.choice([1, 8, 20240227]), 0, []
  for _ in range(ROUNDS):
    for _ in range(draw.choice([1, 2, 3])):
      number += 1
      text = _pass_text(draw.randrange(1 << 30))
      what = draw.choices(_EVENTS, [4, 4, 3, 2, 2, 1, 2, 2, 1])[0]
      if what == 'day':
        day += draw.choice([1, 1, 2])
      name = _name(draw, what, day, number)
      match what:
        case 'double' if texts:
          text = draw.choice(texts)
        case 'corrupt':
          bad.add(name)
          text = draw.choice(_BAD)
        case 'missing':
          promised.append((name, text))
        case 'found' if promised:
          name, text = promised.pop(draw.randrange(len(promised)))
      if what != 'missing':
        _write(watch, name, text)
        there[name] = model.texts[name] = text
        texts += [text] if what != 'corrupt' else []
      _write(watch, name + '.done', '')
      events.append((what, name))
      found.trials += what not in ('pass', 'day')
    model.look(there, bad)
    faults = [Fault(signal.SIGKILL, draw.randrange(20_000)) for _ in range(draw.choice([0, 1, 1]))]
    for fault in (*faults, None):
      events.append(str(fault))
      runs += 1
      if wrong := _run_until_it_waits(folder, runs, fault):
        found.trial('', f'{wrong}, after {events}')
        return found
      found.trials += 1  # a kill, or a stop and a start
  log, fates = _log_of(f'{folder}/run')
  wrong = None
  if (log, fates) != (model.log, model.fates):
    wrong = f'{log} {fates}; wanted {model.log} {model.fates}'
  elif reference := _reference(f'{folder}/reference', model, late):
    wrong = in_child(lambda: _states_differ(f'{folder}/run', reference), folder)
  found.outcomes['as the model says, and the rows of a stream without trouble'] = found.trials
  if wrong:
    found.trial('', f'{wrong}, after {events}')
  return found


def _log_of(run_dir: str) -> tuple[list[str], dict[str, str]]:
  """What a run did, and what its ledger says, as Model has it."""
  with open(f'{run_dir}/metrics.jsonl', encoding='utf-8') as f:
    events = [json.loads(line) for line in f]
  log = [
    f'{e["pass"]}.csv' if e['event'] == 'train' else f'end {e["day"]}'
    for e in events
    if e['event'] in ('train', 'day_end')
  ]
  with open(f'{run_dir}/ledger.jsonl', encoding='utf-8') as f:
    entries = [json.loads(line) for line in f]
  return log, {os.path.basename(entry['path']): entry['fate'] for entry in entries}


def _states_differ(run_dir: str, reference: str) -> str | None:
  found, wanted = state_of(run_dir), state_of(reference)
  for what in ('rows', 'dense'):
    if found[what] != wanted[what]:
      return f'{what} differ from those of a stream without trouble'
  return None


KINDS = [
  Kind(
    'streams',
    f'{MOMENTS} passes of some days come in order, late, twice, damaged, misnamed or not at all, '
    'and the trainer restarts. The order of training, the ends of days and the ledger must be '
    'those of an independent model.',
    'faults',
    16,
    600,
    _streams,
  ),
  Kind(
    'watched streams',
    'The same with a whole trainer, which is stopped or killed in between. Its rows and layers '
    'must also equal, bit by bit, those of a stream of only the trained passes.',
    'faults',
    12,
    3000,
    _jobs,
  ),
]
