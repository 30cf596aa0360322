"""The order of a run's passes: which is trained next, which days end when, what is set aside.

Process 0 looks at the files and decides; the others learn of its decision, so that all take the
same one. What became of each pass stands in the ledger, on every process.
"""

import dataclasses
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from absl import logging

from trainer import config
from trainer.comm.communicator import Communicator
from trainer.data.log_files import absolute, exists, is_remote, modified
from trainer.data.passes import (
  Pass,
  announced,
  day_after,
  days_between,
  in_order,
  passes,
)
from trainer.errors import BadPass, UserError
from trainer.training.ledger import TRAINED, Entry, Ledger, entry_of, stamp
from trainer.training.run_state import RunState

REFUSED_OF_WATCH = 10  # passes, where data.max_refused_passes says nothing
SECONDS_BETWEEN_REMOTE_LOOKS = 10.0
DAY_SECONDS = 24 * 3600


@dataclasses.dataclass(frozen=True)
class Train:
  """A pass is to be trained on."""

  one: Pass
  late: bool = False  # its own day has ended: it counts for the open one
  waiting: int = 0  # passes that are ready and come after it
  seconds_behind: float | None = None  # since the oldest of all that are ready was announced


@dataclasses.dataclass(frozen=True)
class EndDay:
  """A day is over."""

  day: int
  is_empty: bool = False  # it had no passes


@dataclasses.dataclass(frozen=True)
class Wait:
  """Nothing is ready."""

  reason: str


@dataclasses.dataclass(frozen=True)
class Finished:
  """Every pass of the epoch was trained on."""


@dataclasses.dataclass(frozen=True)
class Stopped:
  """The job was asked to stop."""


Action = Train | EndDay | Wait | Finished | Stopped
_ACTIONS = {kind.__name__: kind for kind in (Train, EndDay, Wait, Finished, Stopped)}


class Stream:
  """Decides what a run does next.

  A pass is known by its path, its name and its bytes, and has one fate an epoch (see Entry). Days
  end when a pass of a later day comes, at the end of data.train, or by
  data.close_day_after_hours; each ends once. A pass that comes when its day has ended is late.

  Args:
    cfg: the job's config.
    communicator: how the processes meet.
    state: the place in the data, and the ledger.
    tell: called on every process with each pass that is not simply trained on: its name, its fate,
      why.
    clock: seconds since 1970.
  """

  def __init__(
    self,
    cfg: config.Config,
    communicator: Communicator,
    state: RunState,
    tell: Callable[[str, str, str], None],
    clock: Callable[[], float] = time.time,
  ):
    self._cfg, self._communicator, self._state = cfg, communicator, state
    self._tell, self._clock = tell, clock
    self._listed: list[Pass] | None = None
    self._said: set[str] = set()
    self._looked: tuple[float, Any] | None = None  # at the watched directory
    self._checked: set[str] = set()  # remote passes that have not changed since they were trained
    self._read: dict[str, tuple[Any, Any]] = {}  # of files that changed: stamp and content, by path
    self._trains: Entry | None = None

  @property
  def _ledger(self) -> Ledger:
    return self._state.ledger

  @property
  def limit(self) -> int:
    """How many passes may be refused."""
    limit = self._cfg.data.max_refused_passes
    if limit is not None:
      return limit
    return REFUSED_OF_WATCH if self._cfg.data.watch else 0

  def next(self, stop: bool = False) -> Action:
    """Returns what to do next; every process calls it.

    Args:
      stop: whether this process was asked to stop; process 0's counts.
    Raises:
      UserError: on every process: a late pass where data.late is fail, or more refused passes than
        are allowed.
    """
    progress = self._state.progress
    if self._cfg.data.close_day_after_hours is not None:
      # A clock that was set back must not keep the day open until it has caught up.
      progress.last_time = min(progress.last_time or math.inf, self._clock())
    begun = self._ledger.entered()
    if begun is not None and self._trains is None:
      # Every process knows it from the checkpoint, or from the workers whose pass it enters.
      self._trains = begun
      return Train(begun.as_pass(), begun.reason != '')
    is_first = self._communicator.rank == 0
    decided = self._communicator.together(
      f'cannot read {self._cfg.data.watch or "data.train"}',
      lambda: self._decide(stop) if is_first else None,
    )
    kind, fields, settled = self._communicator.broadcast(decided)
    for entry in (Entry(**entry) for entry in settled):
      self._ledger.put(entry)
      if entry.fate == 'entered':
        self._trains = entry
      if entry.reason:
        self._tell(entry.name, 'late' if entry.fate == 'entered' else entry.fate, entry.reason)
    self._check_refused()
    if 'one' in fields:
      fields['one'] = Pass(**fields['one'])
    return _ACTIONS[kind](**fields)

  def trained(self) -> None:
    """The pass of the last Train was trained on; every process calls it."""
    entry, progress = self._trains, self._state.progress
    self._settle('late' if entry.reason else 'trained', entry.reason)
    if self._cfg.data.close_day_after_hours is not None:
      progress.last_time = self._clock()

  def refused(self, error: BadPass) -> None:
    """The pass of the last Train cannot be read; every process calls it.

    Raises:
      UserError: where no more passes may be refused.
    """
    if not self.limit:
      raise error
    name = self._trains.name
    self._settle('refused', str(error))
    self._tell(name, 'refused', str(error))
    self._check_refused()

  def _settle(self, fate: str, reason: str) -> None:
    self._ledger.put(dataclasses.replace(self._trains, fate=fate, reason=reason))
    self._trains = None

  def _check_refused(self) -> None:
    refused = [entry for entry in self._ledger if entry.fate == 'refused']
    if len(refused) > self.limit:
      raise UserError(
        f'{refused[-1].reason}; {len(refused)} passes were refused, data.max_refused_passes '
        f'allows {self.limit}'
      )

  def day_ended(self, ended: EndDay) -> None:
    """That day's end was done; every process calls it."""
    progress, hours = self._state.progress, self._cfg.data.close_day_after_hours
    progress.closed_day, progress.day = ended.day, None
    if ended.is_empty:
      progress.empty_days += 1
    if hours is not None and progress.last_time is not None:
      # The next day, should it stay empty, is over a day later, whenever the process looks.
      due = DAY_SECONDS if ended.is_empty else hours * 3600
      progress.last_time = min(progress.last_time + due, self._clock())

  def epoch_begins(self) -> None:
    """The passes begin anew; every process calls it."""
    self._listed = None
    self._state.progress.closed_day = None

  def upcoming(self) -> list[Pass]:
    """The passes that are ready and were not met yet, in order; process 0's look.

    Every process calls it.
    """
    is_first = self._communicator.rank == 0
    found = self._communicator.together(
      'cannot look for passes',
      lambda: [dataclasses.asdict(one) for one in self._ready()[0]] if is_first else None,
    )
    return [Pass(**one) for one in self._communicator.broadcast(found)]

  # What follows runs on process 0 alone.

  def _decide(self, stop: bool) -> tuple[str, dict[str, Any], list[dict[str, Any]]]:
    """Returns the name of an action, its fields, and new entries of the ledger."""
    if stop:
      return 'Stopped', {}, []
    cfg, progress = self._cfg.data, self._state.progress
    settled: list[Entry] = []

    def decided(action: Action) -> tuple[str, dict[str, Any], list[dict[str, Any]]]:
      fields = dataclasses.asdict(action)
      return type(action).__name__, fields, [dataclasses.asdict(entry) for entry in settled]

    ready, wrong = self._ready()
    settled += wrong
    for place, one in enumerate(ready):
      entry = entry_of(one, progress.epoch)
      if like := self._ledger.like(entry, by_name=cfg.day_pattern is not None):
        how = 'content' if like.content == entry.content else 'name'
        moved = '' if exists(like.path) else ', which is gone'
        entry.fate = 'seen'
        entry.reason = f'{one.path}: not trained: its {how} is that of {like.path}{moved}'
        settled.append(entry)
        continue
      late = self._is_late(one)
      if late:
        ended = progress.day if progress.day is not None else progress.closed_day
        entry.reason = f'{one.path}: its day {one.day} is over: the stream has come to {ended}'
        if cfg.late == 'fail':
          raise UserError(
            f"{entry.reason}; data.late is 'fail'; wanted no such pass, or train or skip"
          )
        if cfg.late == 'skip':
          entry.fate = 'skipped'
          settled.append(entry)
          continue
      elif (ending := self._ends(one)) is not None:
        return decided(ending)
      settled.append(entry)
      markers = [p.marker for p in ready[place:] if p.marker is not None]
      if is_remote(cfg.watch or ''):  # each costs a request; the first is most likely the oldest
        markers = markers[:1]
      times = [time for time in map(modified, markers) if time is not None]
      behind = round(max(0.0, self._clock() - min(times)), 3) if times else None
      return decided(Train(one, late, len(ready) - place - 1, behind))
    if (ending := self._ends(None)) is not None:
      return decided(ending)
    if cfg.watch:
      return decided(Wait(f'waiting for a pass in {cfg.watch}'))
    return decided(Finished())

  def _ready(self) -> tuple[list[Pass], list[Entry]]:
    """The passes not met yet, in order, and entries of those whose names are wrong."""
    cfg, epoch = self._cfg, self._state.progress.epoch
    if self._listed is None:
      self._listed = passes(cfg, cfg.data.train, 'data.train')
      self._adopt(self._listed)
    found, wrong = list(self._listed), []
    if cfg.data.watch:
      try:
        watched, missing, mistakes = self._look()
      except OSError as e:
        self._say(f'{cfg.data.watch}: {e.strerror}; waiting for it')
        return [], []
      self._adopt(watched)
      paths = {one.path for one in found}
      found = in_order([*found, *(one for one in watched if one.path not in paths)])
      for path in missing:
        if self._ledger.of(Pass('', path), epoch) is None:  # what was trained may go
          self._say(f'{path}: is announced and not there; waiting for it')
      for path, text in mistakes.items():
        if self._ledger.of(Pass('', path), epoch) is None:
          name = os.path.relpath(path, cfg.data.watch)
          entry = Entry(absolute(path), name, 0, epoch, fate='refused', reason=text)
          wrong.append(entry)
    ready = []
    for one in found:
      known = self._ledger.of(one, epoch)
      if known is None or self._is_new(one, known):
        ready.append(one)
    return ready, wrong

  def _look(self) -> tuple[list[Pass], list[str], dict[str, str]]:
    """What the watched directory announces; a remote one is listed now and then only."""
    if is_remote(self._cfg.data.watch) and self._looked is not None:
      looked, found = self._looked
      if self._clock() - looked < SECONDS_BETWEEN_REMOTE_LOOKS:
        return found
    found = announced(self._cfg)
    self._looked = self._clock(), found
    return found

  def _adopt(self, found: Sequence[Pass]) -> None:
    """Enters what a checkpoint without a ledger says was trained: all up to its last, as text."""
    progress = self._state.progress
    if not progress.done or any(True for _ in self._ledger):
      return
    watch = self._cfg.data.watch

    def old_name(one: Pass) -> str:
      return os.path.basename(one.path) if watch else one.name

    for one in found:
      if old_name(one) <= progress.last:
        path = absolute(one.path)
        self._ledger.put(Entry(path, one.name, one.day, progress.epoch, fate='trained'))

  def _is_new(self, one: Pass, known: Entry) -> bool:
    """Whether a pass was repaired since it was refused; tells where one changed after training."""
    if known.fate not in (*TRAINED, 'refused') or known.size is None:
      return False
    try:
      if one.path in self._checked:
        return False
      found = stamp(one.path)
      if found == (known.size, known.modified):
        if is_remote(one.path) and known.fate in TRAINED:  # asking costs a request
          self._checked.add(one.path)
        return False
      if self._read.get(one.path, (None, None))[0] != found:
        self._read[one.path] = found, entry_of(one, known.epoch).content
    except (OSError, UserError):
      return False
    content = self._read[one.path][1]
    if known.fate == 'refused':
      return content != known.content
    if content != known.content:
      self._say(
        f'{one.path}: has changed after it was trained ({known.size:,} bytes then, {content[0]:,} '
        'now); it is not trained again'
      )
    return False

  def _is_late(self, one: Pass) -> bool:
    progress = self._state.progress
    if self._cfg.data.day_pattern is None:
      return False
    if progress.day is not None:
      return one.day < progress.day
    return progress.closed_day is not None and one.day <= progress.closed_day

  def _ends(self, following: Pass | None) -> EndDay | None:
    """The day that ends before the pass `following` (None: nothing is ready), or None."""
    cfg, progress = self._cfg.data, self._state.progress
    if cfg.day_pattern is None:
      return None
    hours, since = cfg.close_day_after_hours, progress.last_time
    if progress.day is not None:
      if following is not None:
        return EndDay(progress.day) if following.day > progress.day else None
      if not cfg.watch:
        return EndDay(progress.day)
      is_due = hours is not None and since is not None and self._clock() - since >= hours * 3600
      return EndDay(progress.day) if is_due else None
    if hours is None or progress.closed_day is None:
      return None
    if following is not None:
      empty = days_between(progress.closed_day, following.day)
      return EndDay(empty[0], is_empty=True) if empty else None
    is_due = cfg.watch and since is not None and self._clock() - since >= DAY_SECONDS
    return EndDay(day_after(progress.closed_day), is_empty=True) if is_due else None

  def _say(self, text: str) -> None:
    if text not in self._said:
      self._said.add(text)
      logging.warning('%s', text)
