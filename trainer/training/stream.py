"""The order of a run's passes: which is trained next, which days end when, what is set aside.

Process 0 looks at the files and decides; the others learn of its decision, so that all take the
same one. What became of each pass stands in the ledger, on every process.
"""

import dataclasses
import math
import os
import time
from collections.abc import Callable

from absl import logging

from trainer import config
from trainer.comm.communicator import Communicator
from trainer.data.conversion import look_at
from trainer.data.log_files import exists, is_remote, modified, refusing
from trainer.data.passes import (
  Pass,
  announced,
  day_after,
  days_ahead,
  days_between,
  in_order,
  is_date,
  passes,
)
from trainer.data.prepared import is_prepared
from trainer.errors import BadPass, UserError, printable
from trainer.plain_data import JsonObject
from trainer.training.ledger import (
  TRAINED,
  Entry,
  Ledger,
  entry_of,
  refused_entry,
  stamp,
  stamp_if_any,
)
from trainer.training.run_state import RunState

LARGE_BYTES = 1 << 30  # of a pass whose beginning is read before all of it is
SECONDS_BETWEEN_REMOTE_LOOKS = 10.0
DAY_SECONDS = 24 * 3600


@dataclasses.dataclass(frozen=True)
class TrainPass:
  """A pass is to be trained on."""

  data_pass: Pass
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


Action = TrainPass | EndDay | Wait | Finished | Stopped
_ACTIONS = {kind.__name__: kind for kind in (TrainPass, EndDay, Wait, Finished, Stopped)}


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
    self._mistakes: dict[str, str] = {}  # what is wrong with passes of data.train, by path
    self._said: set[str] = set()
    self._looked: tuple[float, tuple] | None = None  # at the watched directory
    self._checked: set[str] = set()  # remote passes that have not changed since they were trained
    self._read: dict[
      str, tuple[tuple, tuple]
    ] = {}  # of files that changed: stamp and content, by path
    self._trains: Entry | None = None
    self._refusal: str | None = None  # why the last of the passes was that were refused in a row
    self._following: list[Pass] | None = (
      None  # the passes that were ready behind the last TrainPass
    )
    self._settled: set[str] = set()  # paths of passes that the ledger has folded

  @property
  def _ledger(self) -> Ledger:
    return self._state.ledger

  @property
  def limit(self) -> int:
    """How many passes in a row may be refused."""
    return self._cfg.data.max_refused_passes

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
      return TrainPass(begun.as_pass(), begun.reason != '')
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
      if entry.fate == 'refused':
        self._count_refused(entry)
    if kind in ('Wait', 'Finished'):  # else a pass is ready that may be good
      self._check_refused()
    if 'data_pass' in fields:
      fields['data_pass'] = Pass(**fields['data_pass'])
    return _ACTIONS[kind](**fields)

  def trained(self) -> None:
    """The pass of the last TrainPass was trained on; every process calls it."""
    entry, progress = self._trains, self._state.progress
    self._settle('late' if entry.reason else 'trained', entry.reason)
    progress.refused_in_a_row, self._refusal = 0, None
    if self._cfg.data.close_day_after_hours is not None:
      progress.last_time = self._clock()

  def refused(self, error: BadPass) -> None:
    """The pass of the last TrainPass cannot be read; every process calls it.

    Raises:
      UserError: where no more passes may be refused.
    """
    if not self.limit:
      raise self.too_many(str(error))
    is_first, path = self._communicator.rank == 0, self._trains.path
    is_there = self._communicator.together(
      f'cannot read {path}', lambda: exists(path) if is_first else True
    )
    if not self._communicator.broadcast(is_there):  # it is trained on once it is there again
      gone = {'size': None, 'crc32': None, 'modified': None}
      self._trains = dataclasses.replace(self._trains, **gone)
    entry = self._settle('refused', str(error))
    self._tell(entry.name, 'refused', entry.reason)
    self._count_refused(entry)
    self._check_refused()

  def _settle(self, fate: str, reason: str) -> Entry:
    entry = dataclasses.replace(self._trains, fate=fate, reason=reason)
    self._ledger.put(entry)
    self._trains = None
    return entry

  def _count_refused(self, entry: Entry) -> None:
    """Counts a refused pass; one that has vanished does not count."""
    self._state.progress.refused_in_a_row += entry.size is not None
    self._refusal = entry.reason
    if not self.limit:
      raise self.too_many(entry.reason)

  def _check_refused(self) -> None:
    """Ends the run where too many passes in a row were refused, the last by this process."""
    refused = self._state.progress.refused_in_a_row
    if self._refusal is not None and refused > self.limit:
      raise self.too_many(self._refusal, refused)

  def too_many(self, reason: str, refused: int = 1) -> UserError:
    """The error that ends a run where passes are refused.

    Args:
      reason: why the last one was.
      refused: how many were, one after another.
    """
    count = '1 pass was' if refused <= 1 else f'{refused} passes in a row were'
    return BadPass(
      f'{reason}; {count} refused, data.max_refused_passes allows {self.limit or "none"}'
    )

  def day_ended(self, ended: EndDay) -> None:
    """That day's end was done; every process calls it."""
    progress, hours = self._state.progress, self._cfg.data.close_day_after_hours
    progress.closed_day, progress.day = ended.day, None
    if ended.is_empty:
      progress.empty_days += 1
    if hours is not None:
      # The next day, should it stay empty, is over a day from now, whatever the clock said before.
      progress.last_time = self._clock()

  def epoch_begins(self) -> None:
    """The passes begin anew; every process calls it."""
    self._listed, self._settled = None, set()
    self._state.progress.closed_day = None

  def upcoming(self, most: int | None = None) -> list[Pass]:
    """The passes that are ready and were not met yet, in order; process 0's last look.

    Every process calls it.

    Args:
      most: how many are wanted; None: all.
    """

    def look() -> list[JsonObject]:
      if self._following is None:
        self._following = self._ready()[0]
      return [dataclasses.asdict(one) for one in self._following[:most]]

    is_first = self._communicator.rank == 0
    found = self._communicator.together('cannot look for passes', look if is_first else list)
    return [Pass(**one) for one in self._communicator.broadcast(found)]

  # What follows runs on process 0 alone.

  def _decide(self, stop: bool) -> tuple[str, JsonObject, list[JsonObject]]:
    """Returns the name of an action, its fields, and new entries of the ledger."""
    if stop:
      return 'Stopped', {}, []
    cfg, progress = self._cfg.data, self._state.progress
    settled: list[Entry] = []
    self._following = None

    def decided(action: Action) -> tuple[str, JsonObject, list[JsonObject]]:
      fields = dataclasses.asdict(action)
      return type(action).__name__, fields, [dataclasses.asdict(entry) for entry in settled]

    ready, wrong = self._ready()
    settled += wrong
    for place, one in enumerate(ready):
      if self._is_far_ahead(one):
        settled.append(self._refused_for_its_day(one))
        continue
      try:
        with refusing(one.path):
          entry = self._read_entry(one)
      except BadPass as e:
        settled.append(refused_entry(one, progress.epoch, str(e)))
        continue
      if how := self._ledger.trained_before(entry, by_name=cfg.day_pattern is not None):
        entry.fate, entry.reason = 'seen', f'{one.path}: not trained: {how}'
        settled.append(entry)
        continue
      late = self._is_late(one)
      if late:
        entry.reason = (
          f'{one.path}: its day {one.day} is over: the stream has come to {self._newest_day}'
        )
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
      self._following = ready[place + 1 :]
      markers = [p.marker for p in ready[place:] if p.marker is not None]
      if is_remote(cfg.watch or ''):  # each costs a request; the first is most likely the oldest
        markers = markers[:1]
      times = [time for time in map(modified, markers) if time is not None]
      behind = round(max(0.0, self._clock() - min(times)), 3) if times else None
      return decided(TrainPass(one, late, len(ready) - place - 1, behind))
    if (ending := self._ends(None)) is not None:
      return decided(ending)
    if cfg.watch:
      return decided(Wait(f'waiting for a pass in {cfg.watch}'))
    return decided(Finished())

  def _ready(self) -> tuple[list[Pass], list[Entry]]:
    """The passes not met yet, in order, and entries of those whose names are wrong."""
    cfg, epoch = self._cfg, self._state.progress.epoch
    if self._listed is None:
      wrong = self._mistakes if self.limit else None
      self._listed = passes(cfg, cfg.data.train, 'data.train', wrong)
    self._listed = [one for one in self._listed if not self._is_settled(one.path)]
    found, watched, mistakes = list(self._listed), [], self._mistakes
    if cfg.data.watch:
      try:
        watched, missing, misnamed = self._look()
      except OSError as e:
        self._say(f'{cfg.data.watch}: {e.strerror}; waiting for it')
        return [], []
      mistakes = mistakes | misnamed
      for path in missing:
        if self._ledger.of(Pass('', path), epoch) is None:  # what was trained may go
          self._say(f'{path}: is announced and not there; waiting for it')
    wrong = []
    for path, text in mistakes.items():
      if self._ledger.of(Pass('', path), epoch) is None:
        name = printable(os.path.relpath(path, cfg.data.watch or os.curdir))
        wrong.append(refused_entry(Pass(name, path), epoch, text))
    paths = {one.path for one in found}
    ready = []
    for one in (*found, *(one for one in watched if one.path not in paths)):
      known = self._ledger.of(one, epoch)
      if known is None or self._is_new(one, known):
        ready.append(one)
    return (in_order(ready) if cfg.data.watch else ready), wrong

  def _is_settled(self, path: str) -> bool:
    """Whether a pass was met so long ago that the ledger has folded it; quick the next time."""
    if path not in self._settled and self._ledger.has_folded(path, self._state.progress.epoch):
      self._settled.add(path)
    return path in self._settled

  def _read_entry(self, one: Pass) -> Entry:
    """The entry of a pass that is met for the first time; reads the whole pass."""
    if not is_prepared(self._cfg.data, one.path) and stamp(one.path)[0] >= LARGE_BYTES:
      look_at(self._cfg, one.path)  # what is plainly no log is not read to its end
    return entry_of(one, self._state.progress.epoch)

  def _look(self) -> tuple[list[Pass], list[str], dict[str, str]]:
    """What the watched directory announces; a remote one is listed now and then only."""
    if is_remote(self._cfg.data.watch) and self._looked is not None:
      looked, found = self._looked
      if self._clock() - looked < SECONDS_BETWEEN_REMOTE_LOOKS:
        return found
    found = announced(self._cfg, self._is_settled)
    self._looked = self._clock(), found
    return found

  def _is_new(self, one: Pass, known: Entry) -> bool:
    """Whether a pass was repaired since it was refused; tells where one changed after training."""
    if known.fate == 'refused' and (known.crc32 is None or self._is_far_ahead(one)):
      return not self._is_far_ahead(one) and stamp_if_any(one.path) != (known.size, known.modified)
    if known.fate not in (*TRAINED, 'refused') or one.path in self._checked:
      return False
    try:
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

  def _is_far_ahead(self, one: Pass) -> bool:
    """Whether a pass is of a day so late that its date is most likely wrong."""
    most, reached = self._cfg.data.max_days_ahead, self._reached_day(one)
    return None not in (most, reached) and days_ahead(reached, one.day) > most

  def _reached_day(self, one: Pass) -> int | None:
    """The day that a pass is compared with: of dates today, before a stream's first pass."""
    if self._newest_day is not None or not is_date(one.day):
      return self._newest_day
    return int(time.strftime('%Y%m%d', time.localtime(self._clock())))

  @property
  def _newest_day(self) -> int | None:
    """The day that the stream has come to; None where there is none yet."""
    progress = self._state.progress
    return progress.closed_day if progress.day is None else progress.day

  def _refused_for_its_day(self, one: Pass) -> Entry:
    """The entry of a pass that is far ahead, which is tried again once its day has come near."""
    reached, most = self._reached_day(one), self._cfg.data.max_days_ahead
    which = 'today' if self._newest_day is None else 'to which the stream has come'
    reason = (
      f'{one.path}: its day {one.day} is {days_ahead(reached, one.day):,} days after {reached}, '
      f'{which}; data.max_days_ahead allows {most}'
    )
    entry = refused_entry(one, self._state.progress.epoch, reason)
    return dataclasses.replace(entry, modified=None)

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
