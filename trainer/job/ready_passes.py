"""The passes that a run may train on now, as process 0 finds them in data.train and a stream."""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence

from absl import logging

from trainer import config
from trainer.data.file_system import is_remote, modified
from trainer.data.passes import Pass, announced, days_ahead, in_order, is_date, passes
from trainer.errors import UserError, printable
from trainer.plain_data import Json, JsonObject
from trainer.training.ledger import TRAINED, Entry, entry_of, refused_entry, stamp, stamp_if_any
from trainer.training.run_state import RunState
from trainer.wings import wing

SECONDS_BETWEEN_REMOTE_LOOKS = 10.0
# A look at a local directory is followed by the next one after this many times its own duration, or
# after as long as at a remote directory. So looking takes 2 % of the time, however many passes lie
# there.
DURATIONS_BETWEEN_LOOKS = 50


class Source:
  """What a run follows beside data.train: here nothing, in subclasses a directory or a topic.

  Only process 0 calls `look`, `since`, `figures` and `messages`.

  Attributes:
    waiting_for: what the run waits for, for the user.
    arrived: when the newest pass or message came; when this process began if it has seen none.
    misnamed: {path: the mistake in its name} of passes that were found.
  """

  waiting_for, misnamed = '', {}

  def __init__(self, data: config.Data, state: RunState, clock: Callable[[], float]):
    self._data, self._state, self._clock = data, state, clock
    self.arrived = clock()
    self._said: set[str] = set()

  def look(self) -> list[Pass] | None:
    """Returns the passes in order, also those in the ledger; None if it cannot be reached."""
    return []

  def since(self, ready: Sequence[Pass]) -> float | None:
    """Returns when the oldest pass or message came that is not trained on yet; None if none waits.

    `ready` are the passes that are ready.
    """
    del ready
    return None

  def messages(self) -> int | None:
    """Returns how many messages are not trained on yet, as last seen; None for files."""
    return None

  def figures(self, data_pass: Pass) -> JsonObject:
    """Returns fields that the source adds to the event of a pass."""
    del data_pass
    return {}

  def settled(self) -> None:
    """Called by every process when passes of the ledger were trained on, refused or left out."""

  def trained(self, meta: Mapping[str, Json]) -> None:
    """Called by every process with the meta.json of a pass that was trained on."""

  def forget(self) -> None:
    """Forgets what it has read in the ledger, which a new epoch or a restored state replaces."""

  def say(self, text: str) -> None:
    """Warns, once in a run."""
    if text not in self._said:
      self._said.add(text)
      logging.warning('%s', text)


class Watch(Source):
  """Follows the directory data.watch."""

  def __init__(self, data: config.Data, state: RunState, clock: Callable[[], float]):
    super().__init__(data, state, clock)
    self.waiting_for = f"a pass in '{data.watch}'"
    self._look_again = -math.inf  # when the result of the last look counts no longer
    self._announcement: tuple[list[Pass], list[str], dict[str, str]] = [], [], {}
    self._announced_at: dict[str, float | None] = {}  # the times of markers of ready passes
    # By directory, the names of those passes there of which the ledger keeps a hash only.
    self._settled: dict[str, set[str]] = {}

  def forget(self) -> None:
    self._settled = {}

  def look(self) -> list[Pass] | None:
    """Does what `Source.look` does; the result of an earlier look is used again for a while."""
    began, ledger, epoch = self._clock(), self._state.ledger, self._state.progress.epoch
    if not self._look_again - SECONDS_BETWEEN_REMOTE_LOOKS <= began < self._look_again:
      is_settled = lambda path: ledger.has_folded(path, epoch)
      known = {data_pass.path for data_pass in self._announcement[0]}
      try:
        self._announcement = announced(self._data, is_settled, self._settled)
      except OSError as e:
        self.say(f'{self._data.watch}: {e.strerror}; waiting for it')
        return None
      if came := {p.marker for p in self._announcement[0] if p.path not in known}:
        is_first = self._look_again == -math.inf and not is_remote(self._data.watch)
        self.arrived = max(modified(m) or 0 for m in came) if is_first else self._clock()
      pause = SECONDS_BETWEEN_REMOTE_LOOKS
      if not is_remote(self._data.watch):
        pause = min(pause, DURATIONS_BETWEEN_LOOKS * (self._clock() - began))
      self._look_again = self._clock() + pause
    watched, missing, self.misnamed = self._announcement
    for path in missing:
      if ledger.of(Pass('', path), epoch) is None:  # trained passes may be deleted
        self.say(f'{path}: is announced but not there; waiting for it')
    return watched

  def since(self, ready: Sequence[Pass]) -> float | None:
    markers = [data_pass.marker for data_pass in ready if data_pass.marker is not None]
    if is_remote(self._data.watch):  # looking costs a request; the first is likely oldest
      markers = markers[:1]
    known = self._announced_at
    self._announced_at = {m: known[m] if m in known else modified(m) for m in markers}
    return min((t for t in self._announced_at.values() if t is not None), default=None)


class ReadyPasses:
  """Looks at data.train and at what the run follows. Only process 0 calls its methods."""

  def __init__(self, data: config.Data, state: RunState, clock: Callable[[], float]):
    self._data, self._state, self._clock = data, state, clock
    kind = wing('topic_passes') if data.topic else Watch if data.watch else Source
    self.source: Source = kind(data, state, clock)
    self._listed: list[Pass] | None = None
    self._mistakes: dict[str, str] = {}  # errors of data.train's passes, by path
    self._checked: set[str] = set()  # paths of remote passes, found unchanged since training
    # Stamp and content of files that have changed, by path.
    self._read: dict[str, tuple[tuple, tuple]] = {}

  def begin_epoch(self) -> None:
    self._listed = None
    self.source.forget()

  def went_back(self) -> None:
    """Forgets what it knows from the ledger, which is an earlier one now."""
    self._checked = set()
    self.source.forget()

  def look(self) -> tuple[list[Pass], list[Entry]]:
    """Returns the passes that may be trained on now, in order, and entries for misnamed passes.

    A pass may be trained on if it is not in the ledger, or was refused and has since been repaired.
    """
    data, ledger, epoch = self._data, self._state.ledger, self._state.progress.epoch
    if self._listed is None:
      wrong = self._mistakes if data.max_refused_passes else None
      self._listed = passes(data, data.train, 'data.train', wrong)
    new = lambda found: [p for p in found if not ledger.has_folded(p.path, epoch)]
    self._listed = new(self._listed)
    if (followed := self.source.look()) is None:
      return [], []
    followed = new(followed)  # a look that is used again may be older than what was folded since
    wrong = []
    for path, text in (self._mistakes | self.source.misnamed).items():
      if ledger.of(Pass('', path), epoch) is None:
        name = printable(os.path.relpath(path, data.watch or os.curdir))
        wrong.append(refused_entry(Pass(name, path), epoch, text))
    # Passes of data.train come first; one that data.watch announces too counts as data.train's.
    by_path = {p.path: p for p in (*self._listed, *followed, *self._listed)}
    self._checked &= by_path.keys()
    for path in self._read.keys() - by_path.keys():
      del self._read[path]
    ready = []
    for data_pass in by_path.values():
      known = ledger.of(data_pass, epoch)
      if known is None or (known.fate == 'refused' and self._is_repaired(data_pass, known)):
        ready.append(data_pass)
      elif known.fate in TRAINED:
        self._warn_if_changed(data_pass, known)
    # What a directory announces is in order already.
    return (in_order(ready) if data.watch and self._listed else ready), wrong

  def _is_repaired(self, data_pass: Pass, refused: Entry) -> bool:
    """Returns whether a refused pass has changed and its day is not too far ahead."""
    if self.too_far_ahead(data_pass):
      return False
    if refused.crc32 is None:
      return not refused.is_of(stamp_if_any(data_pass))
    return self._new_content(data_pass, refused) is not None

  def _warn_if_changed(self, data_pass: Pass, trained: Entry) -> None:
    if data_pass.path in self._checked:
      return
    if content := self._new_content(data_pass, trained):
      changed = (
        f'has changed since it was trained on ({trained.size:,} bytes then, {content[0]:,} now)'
      )
      ignored = 'ignored, unless the state goes back to before it'
      self.source.say(f'{data_pass.path}: {changed}: {ignored}')

  def _new_content(self, data_pass: Pass, known: Entry) -> tuple | None:
    """Returns the size and checksum of a pass that has changed since its entry was made.

    It returns None if the pass has not changed, or cannot be read.
    """
    path = data_pass.path
    try:
      changed = stamp(data_pass)
      if known.is_of(changed):
        if is_remote(path) and known.fate in TRAINED:  # looking again would cost a request
          self._checked.add(path)
        return None
      if self._read.get(path, (None, None))[0] != changed:
        self._read[path] = changed, entry_of(data_pass, known.epoch).content
    except (OSError, UserError):
      return None
    content = self._read[path][1]
    return None if content == known.content else content

  def too_far_ahead(self, data_pass: Pass) -> str | None:
    """Returns a text if the day of a pass is so far ahead that it is most likely wrong; else None.

    The day is compared with the newest day so far or, if there is none yet, with today.
    """
    most, reached, which = self._data.max_days_ahead, self.newest_day, 'the newest day so far'
    if reached is None and is_date(data_pass.day):
      reached, which = int(time.strftime('%Y%m%d', time.localtime(self._clock()))), 'today'
    if None in (most, reached) or (days := days_ahead(reached, data_pass.day)) <= most:
      return None
    far = f'its day {data_pass.day} is {days:,} days after {reached}, {which}'
    return f'{data_pass.path}: {far}; data.max_days_ahead allows {most}'

  @property
  def newest_day(self) -> int | None:
    """The open day or, between days, the day that ended last; None before the first day."""
    progress = self._state.progress
    return progress.closed_day if progress.day is None else progress.day

  def seconds_behind(self, ready: Sequence[Pass]) -> float | None:
    """Returns how many seconds ago the oldest pass or message came that is not trained on yet.

    None if there is none. `ready` are the passes that are ready.
    """
    since = self.source.since(ready)
    return None if since is None else round(max(0.0, self._clock() - since), 3)
