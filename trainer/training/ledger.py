"""The ledger of passes: what became of each one.

It is part of each checkpoint, and is written to ledger.jsonl for people to read.
"""

import base64
import collections
import dataclasses
import hashlib
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from trainer.data.file_system import LogFile, absolute, is_remote, open_file
from trainer.data.pass_files import files_of, stamp_of
from trainer.data.passes import Pass
from trainer.data.prepared import META
from trainer.errors import UserError
from trainer.files import crc32_of_stream
from trainer.plain_data import Json, JsonObject

FILE = 'ledger.jsonl'
TRAINED = frozenset({'trained', 'late'})
WHOLE_ENTRIES = 200  # how many of the newest entries the ledger keeps whole
# Length of a hash. Among a million old passes, a new one is mistaken for one of them with
# probability 1e6 / 2^64.
_MARK_BYTES = 8


@dataclasses.dataclass
class Entry:
  """A pass and its fate.

  Attributes:
    path: absolute, or the URL of a remote pass.
    day: the day that the pass's name or path gives.
    size: the size in bytes; None if there was no such file.
    crc32: the checksum of the pass's files, in order, or of a prepared pass's meta.json. None if
      they were not read.
    modified: when the pass was last changed, in ns since 1970; if None, the pass counts as changed.
    fate: entered (training has begun), trained, late (trained after its day had ended), skipped
      (late, and data.late is skip), seen (a pass of the same name or bytes was trained before) or
      refused (it cannot be trained on).
    reason: why the pass is late, skipped, seen or refused; else empty.
    files: a hash of the names, sizes and times of a directory's files; None for a single file, and
      in entries of 0.2.0.
  """

  path: str
  name: str
  day: int
  epoch: int
  size: int | None = None
  crc32: int | None = None
  modified: int | None = None
  fate: str = 'entered'
  reason: str = ''
  files: str | None = None

  def is_of(self, now: 'Stamp') -> bool:
    """Returns whether a pass that has the stamp `now` is unchanged since this entry was made."""
    return now[:2] == (self.size, self.modified) and self.files in (None, now.files)

  @property
  def data_pass(self) -> Pass:
    return Pass(self.name, self.path, self.day)

  @property
  def content(self) -> tuple[int | None, int | None]:
    """Size and checksum; two passes count as the same if both are equal."""
    return self.size, self.crc32


def _files(path: str) -> list[LogFile]:
  """Returns the files that identify a pass: its raw files, or a prepared pass's meta.json."""
  meta = os.path.join(path, META)
  return files_of(meta if not is_remote(path) and os.path.exists(meta) else path)


class Stamp(NamedTuple):
  """Tells the states of a pass apart; the attributes are those of its entry."""

  size: int | None
  modified: int | None
  files: str | None = None


def stamp(data_pass: Pass) -> Stamp:
  """Returns the stamp of a pass, without reading its files; it is the same while none changes."""
  if data_pass.spans:  # messages never change
    return Stamp(data_pass.spans.messages, 0)
  files = _files(data_pass.path)
  return Stamp(sum(f.bytes for f in files), max(f.mtime_ns for f in files), stamp_of(files))


def stamp_if_any(data_pass: Pass) -> Stamp:
  """Returns the `stamp` of a pass; with None in it if nothing is there, with 0 if unreadable."""
  try:
    return stamp(data_pass)
  except (OSError, UserError):
    return Stamp(0, 0) if data_pass.exists() else Stamp(None, None)


def refused_entry(data_pass: Pass, epoch: int, reason: str) -> Entry:
  """Returns the entry of a pass that was refused before it was read."""
  path, now = absolute(data_pass.path), stamp_if_any(data_pass)
  known = now._asdict() | {'fate': 'refused', 'reason': reason}
  return Entry(path, data_pass.name, data_pass.day, epoch, **known)


def entry_of(data_pass: Pass, epoch: int) -> Entry:
  """Returns the entry of a new pass. It reads all files of the pass for the checksum."""
  path, now = absolute(data_pass.path), stamp(data_pass)
  files, crc32 = ([], zlib.crc32(path.encode())) if data_pass.spans else (_files(path), 0)
  for file in files:
    with open_file(file.path) as f:
      crc32 = crc32_of_stream(f, crc32)
  return Entry(path, data_pass.name, data_pass.day, epoch, crc32=crc32, **now._asdict())


def _mark(*what: Json) -> bytes:
  """Returns a short hash of `what`: 'path', 'name' or 'content', followed by its values."""
  return hashlib.blake2b(json.dumps(what).encode(), digest_size=_MARK_BYTES).digest()


class Ledger:
  """The entries of the passes so far, in the order in which they arrived.

  Every process of a job holds the same ledger. An entry belongs to an epoch: in the next epoch,
  each pass may be trained on again.

  Old entries are folded: the ledger keeps only how many of them have each fate, and hashes of their
  paths, names and contents, by which it recognises a pass that arrives again.

  `state` is the result of `state` of another ledger, or None for an empty one.
  """

  def __init__(self, state: Mapping[str, Json] | None = None):
    state = state or {'entries': [], 'folded': {}, 'epoch': 0, 'marks': ''}
    self._entries: dict[tuple[int, str], Entry] = {}  # by epoch and path
    self._by_name: dict[tuple, str] = {}  # paths of trained passes, by epoch, name and day
    self._by_content: dict[tuple, str] = {}  # paths of trained passes, by epoch, size and checksum
    self._folded = collections.Counter(state['folded'])  # passes by fate
    self._epoch = state['epoch']  # the epoch of the hashes in _marks
    marks = base64.b64decode(state['marks'])  # a dict keeps their order: none need be sorted
    self._marks = {marks[i : i + _MARK_BYTES]: None for i in range(0, len(marks), _MARK_BYTES)}
    for fields in state['entries']:
      self.put(Entry(**fields))

  def __iter__(self) -> Iterator[Entry]:
    return iter(self._entries.values())

  def put(self, entry: Entry) -> None:
    """Adds an entry, which replaces any entry of the same path and epoch."""
    self._entries[entry.epoch, entry.path] = entry
    if entry.fate in TRAINED:
      self._by_name.setdefault((entry.epoch, entry.name, entry.day), entry.path)
      if entry.crc32 is not None:
        self._by_content.setdefault((entry.epoch, *entry.content), entry.path)

  def of(self, data_pass: Pass, epoch: int) -> Entry | None:
    """Returns the entry of a pass in an epoch; None if there is none, or only a hash of it."""
    return self._entries.get((epoch, absolute(data_pass.path)))

  def has_folded(self, path: str, epoch: int) -> bool:
    """Returns whether the ledger keeps only a hash of the entry of this path and epoch."""
    return self._has(epoch, 'path', absolute(path))

  def _has(self, epoch: int, *what: Json) -> bool:
    return bool(self._marks) and epoch == self._epoch and _mark(*what) in self._marks

  def trained_before(self, entry: Entry, by_name: bool) -> str | None:
    """Returns a text that names the trained pass that a new pass repeats; None if there is none.

    A pass repeats another pass if both have the same bytes or, if `by_name`, the same name and day.
    """
    epoch, name = entry.epoch, (entry.name, entry.day)
    for how, path, what in (
      ('content', self._by_content.get((epoch, *entry.content)), entry.content),
      *([('name', self._by_name.get((epoch, *name)), name)] if by_name else []),
    ):
      if path is not None:
        return f'its {how} is that of {path}{"" if Pass("", path).exists() else ", which is gone"}'
      if self._has(epoch, how, *what):
        return f'its {how} is that of a pass that was trained on long ago'
    return None

  def entered(self) -> Entry | None:
    """Returns the entry of the pass whose training has begun but not ended; None if none has."""
    last = [entry for entry in self if entry.fate == 'entered']
    return last[-1] if last else None

  def counts(self) -> dict[str, int]:
    """Returns {fate: number of passes}; it includes passes of which only hashes are kept."""
    return dict(self._folded + collections.Counter(entry.fate for entry in self))

  def fold(self, whole: int = WHOLE_ENTRIES) -> None:
    """Folds the oldest entries (see `Ledger`) until `whole` are left.

    The entry of a pass whose training has not ended is never folded.
    """
    old = [key for key, entry in self._entries.items() if entry.fate != 'entered']
    newest = max((epoch for epoch, _ in self._entries), default=0)
    if newest != self._epoch:
      self._epoch, self._marks = newest, {}
    for key in old[: max(0, len(old) - whole)]:
      entry = self._entries.pop(key)
      self._folded[entry.fate] += 1
      if entry.epoch != self._epoch:
        continue
      self._marks[_mark('path', entry.path)] = None
      if entry.fate in TRAINED:
        self._marks[_mark('name', entry.name, entry.day)] = None
        self._marks[_mark('content', *entry.content)] = None
        self._by_name.pop((entry.epoch, entry.name, entry.day), None)
        self._by_content.pop((entry.epoch, *entry.content), None)

  def state(self) -> JsonObject:
    """Returns plain data from which another Ledger can be made."""
    return {
      'entries': [dict(vars(entry)) for entry in self],
      'folded': dict(self._folded),
      'epoch': self._epoch,
      'marks': base64.b64encode(b''.join(self._marks)).decode(),
    }

  def write(self, run_dir: str) -> None:
    """Writes ledger.jsonl for people to read, one entry per line."""
    path = os.path.join(run_dir, FILE)
    with open(path + '.new', 'w', encoding='utf-8') as f:
      if self._folded:
        f.write(json.dumps({'fates_of_older_passes': dict(self._folded)}) + '\n')
      f.writelines(json.dumps(vars(entry)) + '\n' for entry in self)
    os.replace(path + '.new', path)
