"""The order of a run's passes: which one comes next, when days end, which passes are set aside.

Process 0 looks at the files and decides. It broadcasts its decision, so that all processes do the
same. Every process keeps the ledger, which records what became of each pass.
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Mapping

from trainer import config
from trainer.comm.communicator import Communicator
from trainer.data.conversion import look_at
from trainer.data.passes import Pass, day_after, days_between
from trainer.data.prepared import is_prepared
from trainer.errors import BadPass, UserError
from trainer.job.ready_passes import ReadyPasses
from trainer.plain_data import Json, JsonObject
from trainer.training.ledger import TRAINED, Entry, Ledger, entry_of, refused_entry, stamp
from trainer.training.run_state import RunState

# The beginning of a pass of this size or more is checked before all of it is read.
LARGE_BYTES = 1 << 30
DAY_SECONDS = 24 * 3600


# What a run does next.


@dataclasses.dataclass(frozen=True)
class TrainPass:
  data_pass: Pass
  late: bool = False  # its own day has ended, so it counts for the day that is open
  waiting: int = 0  # number of passes that are ready behind it
  seconds_behind: float | None = None  # how long ago the oldest pass or message came
  # Fields of its event that the source adds.
  of_topic: JsonObject = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class EndDay:
  day: int
  is_empty: bool = False  # the day had no passes
  data_pass: Pass | None = None  # of a later day; if it is refused, the day does not end
  when: str = ''  # what ends the day, as in 'data.train ended'


@dataclasses.dataclass(frozen=True)
class Wait:
  """No pass is ready; the run will look again later."""

  reason: str
  seconds_behind: float | None = None  # how long ago the oldest message came that no pass has yet


@dataclasses.dataclass(frozen=True)
class End:
  """The epoch ends: every pass was trained on, or the job was asked to stop."""

  is_finished: bool  # false if the job was asked to stop


Action = TrainPass | EndDay | Wait | End
_ACTIONS = {kind.__name__: kind for kind in (TrainPass, EndDay, Wait, End)}


class Stream:
  """Decides what a run does next.

  A pass is identified by its path, its name and its bytes, and has one fate per epoch (listed in
  trainer.training.ledger.Entry). A day ends once: when a pass of a later day comes, when data.train
  ends, or after data.close_day_after_hours without a pass. A pass after the end of its day is late.

  Args:
    tell: called on every process for each pass that is late, skipped, seen or refused, with the
      pass's name, its fate and the reason.
    clock: returns the seconds since 1970.
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
    self.limit = cfg.data.max_refused_passes  # how many passes in a row may be refused
    self._passes = ReadyPasses(cfg.data, state, clock)
    self.source = self._passes.source  # what the run follows
    self._trains: Entry | None = None  # the pass that is being trained on
    self._refusal: str | None = None  # why the last pass was refused; None if it was not
    self._following: list[Pass] | None = None  # passes that were ready behind the last TrainPass

  def next(self, stop: bool = False) -> Action:
    """Returns what to do next. Every process calls it, and all get the same answer.

    `stop` says whether this process was asked to stop. A UserError, on all of them, says that a
    pass is late and data.late is fail, or that too many passes in a row were refused.
    """
    progress = self._state.progress
    if self._cfg.data.close_day_after_hours is not None:
      # A clock that was set back must not keep the day open until it has caught up.
      progress.last_time = min(progress.last_time or math.inf, self._clock())
    begun = self._state.ledger.entered()
    what = f'cannot read {self._cfg.data.stream or "data.train"}'
    if begun is not None and self._trains is None:
      # A pass begun before the checkpoint: its entry is already in every process's ledger.
      data_pass, self._trains = begun.data_pass, begun
      if not progress.batch:  # all of it will be trained on, as it is now
        renewed = self._communicator.on_first(what, lambda: self._renewed(data_pass, begun))
        self._trains = Entry(**renewed)
      return TrainPass(data_pass, begun.reason != '')
    stop = any(self._communicator.gather(stop))
    kind, fields, settled = self._communicator.on_first(what, lambda: self._decide(stop))
    for entry in (Entry(**entry) for entry in settled):
      self._state.ledger.put(entry)
      if entry.fate == 'entered':
        self._trains = entry
      if entry.reason:
        self._tell(entry.name, 'late' if entry.fate == 'entered' else entry.fate, entry.reason)
      if entry.fate == 'refused':
        self._count_refused(entry)
    self.source.settled()
    # With any other action a pass is ready, and the run may go on if that pass is good.
    if (is_last := fields.get('is_finished', False)) or kind == 'Wait':
      self._check_refused(is_last)
    if fields.get('data_pass'):
      fields['data_pass'] = Pass(**fields['data_pass'])
    if 'entry' in fields:  # of the pass that comes with an EndDay, in case it is refused
      self._trains = Entry(**fields.pop('entry'))
    return _ACTIONS[kind](**fields)

  def trained(self, meta: Mapping[str, Json] = {}) -> None:
    """Records that the pass of the last TrainPass, prepared with `meta`, was trained on; on all."""
    entry, progress = self._trains, self._state.progress
    self._settle('late' if entry.reason else 'trained', entry.reason)
    self.source.trained(meta)
    progress.refused_in_a_row, self._refusal = 0, None
    if self._cfg.data.close_day_after_hours is not None:
      progress.last_time = self._clock()

  def refused(self, error: BadPass) -> None:
    """Records that the pass of the last TrainPass or EndDay cannot be read. Every process calls it.

    Raises UserError if more passes in a row were refused than data.max_refused_passes allows.
    """
    if not self.limit:
      raise self.refusal_error(str(error))
    what = f'cannot read {self._trains.path}'
    is_there = self._communicator.on_first(what, self._trains.data_pass.exists)
    if not is_there:  # once it is there again, it is trained on
      gone = {'size': None, 'crc32': None, 'modified': None}
      self._trains = dataclasses.replace(self._trains, **gone)
    self._refuse(str(error))

  def _refuse(self, reason: str) -> None:
    entry = self._settle('refused', reason)
    self._tell(entry.name, 'refused', entry.reason)
    self._count_refused(entry)
    self._check_refused()

  def went_back(self, unsaved: Ledger, error: BadPass, in_pass: bool) -> bool:
    """Refuses the pass that ruined the state, after an earlier state was restored.

    Every process calls it. BadPass, on all of them, ends the run if no pass can be refused, or if
    too many were.

    Args:
      unsaved: the ledger before the restoration.
      in_pass: whether training failed on the pass of the last TrainPass. If not, the state could
        not be saved after it was trained on all passes since the restored state.
    Returns:
      Whether a pass was refused; false if several passes were trained on since.
    """
    ledger, suspects = self._state.ledger, [self._trains]
    if not in_pass:
      before = {(entry.epoch, entry.path) for entry in ledger if entry.fate in TRAINED}
      trained = [entry for entry in unsaved if entry.fate in TRAINED]
      suspects = [entry for entry in trained if (entry.epoch, entry.path) not in before]
    self._trains = self._following = None
    self._passes.went_back()
    if not suspects:
      raise error
    if len(suspects) > 1:
      return False
    self._trains, text = suspects[0], str(error)
    self._refuse(text if self._trains.path in text else f'{self._trains.path}: {text}')
    return True

  def _settle(self, fate: str, reason: str) -> Entry:
    entry = dataclasses.replace(self._trains, fate=fate, reason=reason)
    self._state.ledger.put(entry)
    self.source.settled()
    self._trains = None
    return entry

  def _count_refused(self, entry: Entry) -> None:
    """Counts a refused pass, unless its file has vanished; BadPass if no pass may be refused."""
    self._state.progress.refused_in_a_row += entry.size is not None
    self._refusal = entry.reason
    if not self.limit:
      raise self.refusal_error(entry.reason)

  def _check_refused(self, is_last: bool = False) -> None:
    """Raises BadPass if too many in a row were refused or, if `is_last`, none was trained on."""
    refused, why = self._state.progress.refused_in_a_row, self._refusal
    if why is not None and refused > self.limit:
      raise self.refusal_error(why, refused)
    if why is not None and is_last and not TRAINED & self._state.ledger.counts().keys():
      raise BadPass(f'{why}; no pass of data.train was trained on')

  def refusal_error(self, reason: str, refused: int = 1) -> UserError:
    """Returns the error that ends a run because passes were refused, the last for `reason`."""
    if not self.limit:
      return BadPass(reason)
    count = '1 pass was' if refused <= 1 else f'{refused} passes in a row were'
    return BadPass(f'{reason}; {count} refused, data.max_refused_passes allows {self.limit}')

  def day_ended(self, ended: EndDay) -> None:
    """Records that the day-end step of a day is done. Every process calls it."""
    progress = self._state.progress
    progress.closed_day, progress.closed_when, progress.day = ended.day, ended.when, None
    self._trains = None
    if ended.is_empty:
      progress.empty_days += 1
    if self._cfg.data.close_day_after_hours is not None:
      # If the next day stays empty, it ends one day from now, whatever the clock said before.
      progress.last_time = self._clock()

  def epoch_begins(self) -> None:
    """Starts over with the first pass, for the next epoch. Every process calls it."""
    self._following = None
    self._passes.begin_epoch()
    self._state.progress.closed_day = None

  def upcoming(self, most: int | None = None) -> list[Pass]:
    """Returns at most `most` passes that are ready and not yet in the ledger, in order.

    These are the passes that process 0 saw when it last looked. Every process calls it.
    """

    def look() -> list[JsonObject]:
      return [dataclasses.asdict(data_pass) for data_pass in self._waiting()[:most]]

    upcoming = self._communicator.on_first('cannot look for passes', look)
    return [Pass(**data_pass) for data_pass in upcoming]

  # What follows runs on process 0 alone.

  def lag(self) -> JsonObject:
    """Returns the fields `waiting` and `seconds_behind` of an event.

    They say how many passes wait behind the last action, and how long ago the first was announced.
    """
    behind = self._waiting()
    return {
      'waiting': len(behind),
      'seconds_behind': self._passes.seconds_behind(behind) if behind else 0,
    }

  def _waiting(self) -> list[Pass]:
    """Returns the passes that were ready behind the last action."""
    if self._following is None:
      self._following = self._passes.look()[0]
    return self._following

  def _decide(self, stop: bool) -> tuple[str, JsonObject, list[JsonObject]]:
    """Returns the name of the next action, its fields, and the new entries of the ledger."""
    if stop:
      return 'End', {'is_finished': False}, []
    cfg, progress = self._cfg.data, self._state.progress
    ready, settled = self._passes.look()
    self._following = None

    def decided(action: Action, **more: JsonObject) -> tuple[str, JsonObject, list[JsonObject]]:
      fields = dataclasses.asdict(action) | more
      return type(action).__name__, fields, [dataclasses.asdict(entry) for entry in settled]

    for place, data_pass in enumerate(ready):
      if too_far := self._passes.too_far_ahead(data_pass):
        entry = refused_entry(data_pass, progress.epoch, too_far)
        entry.modified = None  # it is tried again when its day is near
        settled.append(entry)
        continue
      try:
        with data_pass.refusing():
          if data_pass.spans is None and not is_prepared(cfg, data_pass.path):
            if stamp(data_pass).size >= LARGE_BYTES:  # if it is no log, it is not read whole
              look_at(self._cfg, data_pass.path)
          entry = entry_of(data_pass, progress.epoch)
      except BadPass as e:
        settled.append(refused_entry(data_pass, progress.epoch, str(e)))
        continue
      if how := self._state.ledger.trained_before(entry, by_name=cfg.has_days):
        entry.fate, entry.reason = 'seen', f'{data_pass.path}: not trained on: {how}'
        settled.append(entry)
        continue
      late = self._is_late(data_pass)
      if late:
        entry.reason = (
          f'{data_pass.path}: its day {data_pass.day} is over{self._why_over(data_pass)}'
        )
        if cfg.late == 'fail':
          raise UserError(f"{entry.reason}; data.late is 'fail'; wanted train or skip")
        if cfg.late == 'skip':
          entry.fate = 'skipped'
          settled.append(entry)
          continue
      elif (ending := self._ends(data_pass)) is not None:
        self._following = ready[place + 1 :]
        ending = dataclasses.replace(ending, data_pass=data_pass)
        return decided(ending, entry=dataclasses.asdict(entry))
      settled.append(entry)
      self._following = ready[place + 1 :]
      behind = self._passes.seconds_behind(ready[place:])
      waiting, of_topic = len(ready) - place - 1, self.source.figures(data_pass)
      return decided(TrainPass(data_pass, late, waiting, behind, of_topic))
    self._following = []
    if (ending := self._ends(None)) is not None:
      return decided(ending)
    if cfg.stream:
      waits = f'waiting for {self.source.waiting_for}'
      return decided(Wait(waits, self._passes.seconds_behind([])))
    return decided(End(is_finished=True))

  def _renewed(self, data_pass: Pass, begun: Entry) -> JsonObject:
    """Returns the fields of `begun`, a pass's entry, brought up to date if the pass has changed.

    Size, times and checksum are then those of the pass's present files. They stay as they are if
    the files cannot be read.
    """
    with contextlib.suppress(OSError, UserError):  # who reads it next will tell
      if not begun.is_of(stamp(data_pass)):
        begun = dataclasses.replace(entry_of(data_pass, begun.epoch), reason=begun.reason)
    return dataclasses.asdict(begun)

  def _is_late(self, data_pass: Pass) -> bool:
    progress = self._state.progress
    if not self._cfg.data.has_days:
      return False
    if progress.day is not None:
      return data_pass.day < progress.day
    return progress.closed_day is not None and data_pass.day <= progress.closed_day

  def _why_over(self, late: Pass) -> str:
    """Returns why the day of a late pass is over, as the end of a sentence."""
    if late.day < self._passes.newest_day:
      return f': the newest day so far is {self._passes.newest_day}'
    when = self._state.progress.closed_when  # not known of a day that an earlier version ended
    return f': it ended when {when}' if when else ''

  def _ends(self, following: Pass | None) -> EndDay | None:
    """Returns the day that must end before `following`, the next ready pass, or None."""
    cfg, progress = self._cfg.data, self._state.progress
    if not cfg.has_days:
      return None
    hours, since = cfg.close_day_after_hours, progress.last_time
    came = following and f'a pass of day {following.day} came'
    if progress.day is not None:
      if following is not None:
        return EndDay(progress.day, when=came) if following.day > progress.day else None
      if not cfg.stream:
        return EndDay(progress.day, when='data.train ended')
      is_due = hours is not None and since is not None and self._clock() - since >= hours * 3600
      return EndDay(progress.day, when=_idle(hours)) if is_due else None
    if hours is None or progress.closed_day is None:
      return None
    if following is not None:
      empty = days_between(progress.closed_day, following.day)
      return EndDay(empty[0], is_empty=True, when=came) if empty else None
    is_due = cfg.stream and since is not None and self._clock() - since >= DAY_SECONDS
    if not is_due:
      return None
    return EndDay(day_after(progress.closed_day), is_empty=True, when=_idle(DAY_SECONDS / 3600))


def _idle(hours: float) -> str:
  return f'no pass had come for {hours:g} {"hour" if hours == 1 else "hours"}'
