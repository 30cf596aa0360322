"""Compares the trainer's handling of made-up streams with an independent model of it.

Passes come in order, late, twice under one name or under two, damaged, misnamed, or not at all
although a marker announces them. The process ends at any moment and resumes an earlier state.
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

from campaigns.processes import Fault, Job
from campaigns.units import Found, Kind, in_child
from tests.support.states import state_of
from trainer import config
from trainer.comm.communicator import SingleProcess
from trainer.errors import BadPass
from trainer.job.stream import End, EndDay, Stream, TrainPass, Wait
from trainer.training.ledger import Ledger
from trainer.training.run_state import Progress

STREAMS = 25  # of a unit
MOMENTS = 30  # of a stream, at each of which something happens
# What may happen to a pass. 'found': its file comes after its marker.
_EVENTS = ('pass', 'day', 'late', 'double', 'corrupt', 'misnamed', 'missing', 'found', 'far')
DAYS_AHEAD = 14  # data.max_days_ahead with data.watch


class Model:
  """Decides what should become of each pass, by rules that do not use the trainer's code.

  Args:
    late: data.late.
  Attributes:
    log: what should have been done: names of trained passes, and 'end N' for days.
    fates: the fate of each pass by name.
    texts: the content of passes by name, set by the caller.
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
    """Handles all passes that are ready.

    Args:
      there: the bytes of the passes that are announced and exist, by name.
      bad: the names of those that cannot be read.
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
  """The trainer's stream without training: it logs what a trainer would do."""

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
    """Returns the state that a checkpoint would hold."""
    progress = vars(self.state.progress)
    state = {'progress': progress, 'ledger': self.state.ledger.state(), 'log': self.log}
    return json.dumps(state)

  def restore(self, text: str) -> None:
    """Resumes from a state that `saved` returned."""
    state = json.loads(text)
    progress, ledger = Progress(**state['progress']), Ledger(state['ledger'])
    self.log = state['log']
    self.state = types.SimpleNamespace(progress=progress, ledger=ledger)
    now = time.time()  # a clock that stands still, so that every look is a new one
    self._stream = Stream(self._cfg, SingleProcess(), self.state, lambda *_: None, lambda: now)

  def look(self, actions: int | None = None) -> None:
    """Follows the stream until it waits, or for a number of actions."""
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
    """Returns the fate of each pass by the name of its file."""
    return {os.path.basename(entry.path): entry.fate for entry in self.state.ledger}


def _stream(draw: random.Random, folder: str) -> str | None:
  """Plays one stream; returns what differs from the model, or None."""
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
    # Model and trainer look at the same moments, but the trainer may die at any action and resume
    # what was saved.
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
  """Sends passes of some days in order, late, twice, damaged, misnamed or not at all, and restarts
  the trainer. The order of training, the ends of days and the ledger must be those of an
  independent model.
  """
  found = Found()
  for i in range(STREAMS):
    wrong = _stream(draw, f'{folder}/{i}')
    found.trial('as the model says', wrong)
  return found


# Whole jobs

ROUNDS = 5  # of a stream: passes come, and the trainer runs until it waits
_SAMPLES = 120  # of a pass
_BAD = ('', 'user,item,click\n', 'user,item\n1,2\n', '\0\1\2\n' * 50, 'PAR1')


def _pass_text(number: int) -> str:
  rng = np.random.default_rng(number)
  lines = zip(rng.integers(0, 40, _SAMPLES), rng.integers(0, 30, _SAMPLES), rng.random(_SAMPLES))
  return 'user,item,click\n' + ''.join(f'{u},{i},{p < 0.3:d}\n' for u, i, p in lines)


def write_config(folder: str, **sections: dict[str, Any]) -> list[str]:
  """Writes the config of a job that follows folder/passes; returns the flags of trainer.run."""
  os.makedirs(f'{folder}/passes')
  tree = {
    'seed': 3,
    'data': {
      'watch': f'{folder}/passes',
      'day_pattern': r'day_(\d+)',
      'label': 'click',
      'label_negative': '0',  # a tiny pass may have one class
      'slots': [{'name': 'user'}, {'name': 'item'}],
    },
    'lifecycle': {'admission_threshold': 0.5, 'delete_threshold': 0.2, 'decay': 0.5},
    'sparse': {'tables': {'default': {'width': 4}}},
    'model': {'interactions': ['linear', 'fm', {'dnn': {'hidden': [4]}}]},
    'train': {'batch_size': 50},
    'checkpoint': {'every_steps': 4},
    'export': {'base': True, 'delta_every_passes': 1},
    'sync': {'lost_peer_seconds': 15, 'stalled_peer_seconds': 120},
  }
  for section, values in sections.items():
    tree[section] = tree.get(section, {}) | values
  with open(f'{folder}/config.yaml', 'w', encoding='utf-8') as f:
    yaml.safe_dump(tree, f)
  return ['--config', f'{folder}/config.yaml', '--run_dir', f'{folder}/run']


def _watching(folder: str, late: str) -> list[str]:
  # `shuffle` follows the names of passes, which differ between a run and its reference.
  data = {'late': late, 'max_refused_passes': 1000, 'shuffle': False}
  return write_config(folder, data=data, lifecycle={'decay': 0.8}, train={'deterministic': True})


def _run_until_it_waits(folder: str, number: int, fault: Fault | None = None) -> str | None:
  """Runs the trainer until it waits for a pass, and stops it; returns what is wrong, or None."""
  os.makedirs(f'{folder}/{number}')
  flags = ['--config', f'{folder}/config.yaml', '--run_dir', f'{folder}/run']
  job = Job(f'{folder}/{number}', 'single', flags)
  job.start({'single': fault.arm} if fault else None)
  left, wrong = job.stop_when_waiting('single'), job.problem()
  status = job.statuses.get('single')
  if left or wrong or status not in ((0, -signal.SIGKILL) if fault else (0,)):
    return f'{left} run; {wrong}; {job.statuses}: {job.said()[-1500:]}'
  return None


def _reference(folder: str, model: Model, late: str) -> str | None:
  """Trains in one run, in order, only the passes that the model calls trained.

  Returns:
    The run_dir; None if a pass was trained while no day was open, which such a run cannot do.
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
  """Sends such streams to a whole trainer, which is stopped or killed in between.

  Its rows and layers must also equal, bit by bit, those of a stream of only the trained passes.
  """
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
  """Returns the log and the fates of a run, in the form of Model's."""
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
  Kind('streams', 'faults', 16, 600, _streams),
  Kind('watched streams', 'faults', 12, 3000, _jobs),
]
