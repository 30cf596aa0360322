"""The passes that a run may train on now, as process 0 finds them in data.train and data.watch."""

import math
import os
import time
from collections.abc import Callable, Sequence

from absl import logging

from trainer import config
from trainer.data.file_system import is_remote, is_span, modified
from trainer.data.passes import Pass, announced, days_ahead, in_order, is_date, passes
from trainer.errors import UserError, printable
from trainer.plain_data import JsonObject
from trainer.topics.topic_passes import TopicPasses
from trainer.training.ledger import TRAINED, Entry, entry_of, refused_entry, stamp, stamp_if_any
from trainer.training.run_state import RunState

SECONDS_BETWEEN_REMOTE_LOOKS = 10.0
# A look at a local directory is followed by the next one after this many times its own duration, or
# after as long as at a remote directory. So looking takes 2 % of the time, however many passes lie
# there.
DURATIONS_BETWEEN_LOOKS = 50


class ReadyPasses:
  """Looks at the files of data.train and data.watch. Only process 0 calls its methods."""

  def __init__(self, cfg: config.Config, state: RunState, clock: Callable[[], float]):
    self._cfg, self._state, self._clock = cfg, state, clock
    self._listed: list[Pass] | None = None
    self._mistakes: dict[str, str] = {}  # errors of data.train's passes, by path
    self._said: set[str] = set()
    self._look_again = -math.inf  # when the result of the last look counts no longer
    self._announcement: tuple[list[Pass], list[str], dict[str, str]] = [], [], {}
    self._announced_at: dict[str, float | None] = {}  # the times of markers of ready passes
    self._checked: set[str] = set()  # paths of remote passes, found unchanged since training
    # Stamp and content of files that have changed, by path.
    self._read: dict[str, tuple[tuple, tuple]] = {}
    # By directory, the names of those passes there of which the ledger keeps a hash only.
    self._settled: dict[str, set[str]] = {}
    self._topic = TopicPasses(cfg, state, clock) if cfg.data.topic else None

  def begin_epoch(self) -> None:
    self._listed, self._settled = None, {}

  def went_back(self) -> None:
    """Forgets what it knows from the ledger, which is an earlier one now."""
    self._settled, self._checked = {}, set()

  def look(self) -> tuple[list[Pass], list[Entry]]:
    """Returns the passes that may be trained on now, in order, and entries for misnamed passes.

    A pass may be trained on if it is not in the ledger, or was refused and has since been repaired.
    """
    cfg, epoch = self._cfg, self._state.progress.epoch
    if self._listed is None:
      wrong = self._mistakes if self._cfg.data.max_refused_passes else None
      self._listed = passes(cfg, cfg.data.train, 'data.train', wrong)
    self._listed = [data_pass for data_pass in self._listed if not self._is_settled(data_pass.path)]
    watched, mistakes = [], self._mistakes
    if cfg.data.watch:
      try:
        watched, missing, misnamed = self._announced()
      except OSError as e:
        self._say(f'{cfg.data.watch}: {e.strerror}; waiting for it')
        return [], []
      mistakes = mistakes | misnamed
      for path in missing:
        if self._state.ledger.of(Pass('', path), epoch) is None:  # trained passes may be deleted
          self._say(f'{path}: is announced but not there; waiting for it')
    wrong = []
    for path, text in mistakes.items():
      if self._state.ledger.of(Pass('', path), epoch) is None:
        name = printable(os.path.relpath(path, cfg.data.watch or os.curdir))
        wrong.append(refused_entry(Pass(name, path), epoch, text))
    by_path = {data_pass.path: data_pass for data_pass in (*watched, *self._listed)}
    self._checked &= by_path.keys()
    for path in self._read.keys() - by_path.keys():
      del self._read[path]
    ready = []
    for data_pass in by_path.values():
      known = self._state.ledger.of(data_pass, epoch)
      if known is None or (known.fate == 'refused' and self._is_repaired(data_pass, known)):
        ready.append(data_pass)
      elif known.fate in TRAINED:
        self._warn_if_changed(data_pass, known)
    if self._topic:
      ready += self._topic.look()
    # What is announced is in order already.
    return (in_order(ready) if cfg.data.watch and self._listed else ready), wrong

  def _is_settled(self, path: str) -> bool:
    """Returns whether the ledger keeps only a hash of the entry of this pass."""
    return self._state.ledger.has_folded(path, self._state.progress.epoch)

  def _announced(self) -> tuple[list[Pass], list[str], dict[str, str]]:
    """Returns what data.watch announces: passes, absent paths, and {path: mistake in its name}.

    The result of an earlier look is used again for a while.
    """
    began = self._clock()
    if not self._look_again - SECONDS_BETWEEN_REMOTE_LOOKS <= began < self._look_again:
      self._announcement = announced(self._cfg, self._is_settled, self._settled)
      pause = SECONDS_BETWEEN_REMOTE_LOOKS
      if not is_remote(self._cfg.data.watch):
        pause = min(pause, DURATIONS_BETWEEN_LOOKS * (self._clock() - began))
      self._look_again = self._clock() + pause
    return self._announcement

  def _is_repaired(self, data_pass: Pass, refused: Entry) -> bool:
    """Returns whether a refused pass has changed and its day is not too far ahead."""
    if self.too_far_ahead(data_pass):
      return False
    if refused.crc32 is None:
      return not refused.is_of(stamp_if_any(data_pass.path))
    return self._new_content(data_pass, refused) is not None

  def _warn_if_changed(self, data_pass: Pass, trained: Entry) -> None:
    if data_pass.path in self._checked:
      return
    if content := self._new_content(data_pass, trained):
      lengths = f'{trained.size:,} bytes then, {content[0]:,} now'
      ignored = 'ignored, unless the state goes back to before it'
      self._say(f'{data_pass.path}: has changed since it was trained on ({lengths}): {ignored}')

  def _new_content(self, data_pass: Pass, known: Entry) -> tuple | None:
    """Returns the size and checksum of a pass that has changed since its entry was made.

    It returns None if the pass has not changed, or cannot be read.
    """
    path = data_pass.path
    try:
      changed = stamp(path)
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
    most, reached, which = self._cfg.data.max_days_ahead, self.newest_day, 'the newest day so far'
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
    """Returns how long ago the oldest of some passes was announced; None if nothing did."""
    if self._topic:
      cut = [self._topic.cut_at[p.name] for p in ready if p.name in self._topic.cut_at]
      return round(max(0.0, self._clock() - min(cut)), 3) if cut else None
    markers = [data_pass.marker for data_pass in ready if data_pass.marker is not None]
    if is_remote(self._cfg.data.watch or ''):  # looking costs a request; the first is likely oldest
      markers = markers[:1]
    known = self._announced_at
    self._announced_at = {m: known[m] if m in known else modified(m) for m in markers}
    times = [time for time in self._announced_at.values() if time is not None]
    return round(max(0.0, self._clock() - min(times)), 3) if times else None

  @property
  def waiting_for(self) -> str:
    """What a stream waits for, for the user."""
    return self._topic.waiting_for if self._topic else f"a pass in '{self._cfg.data.watch}'"

  def of_topic(self, data_pass: Pass) -> JsonObject:
    """Returns fields of the event of a pass of data.topic; {} for a file."""
    return self._topic.figures(data_pass) if is_span(data_pass.path) else {}

  def _say(self, text: str) -> None:
    if text not in self._said:
      self._said.add(text)
      logging.warning('%s', text)
