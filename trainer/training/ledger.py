"""What became of every pass: part of each checkpoint, and ledger.jsonl for people."""

import base64
import collections
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping

from trainer.data.log_files import LogFile, absolute, exists, files_of, is_remote, open_file
from trainer.data.passes import Pass
from trainer.data.prepared import META
from trainer.errors import UserError
from trainer.files import crc32_of_stream
from trainer.plain_data import Json, JsonObject

FILE = 'ledger.jsonl'
TRAINED = ('trained', 'late')
WHOLE_ENTRIES = 200  # that are kept; of older passes the ledger keeps hashes
_MARK_BYTES = 8  # of a hash: among a million passes, one new one in 6e12 is taken for an old one


@dataclasses.dataclass
class Entry:
  """A pass and its fate.

  Attributes:
    path: absolute, or the URL of a remote pass.
    name: as in reports.
    day: of its name or path.
    epoch: in which it was met.
    size: in bytes; None where there was no such file.
    crc32: of its bytes, those of its files one after another; of a prepared pass, of its meta.json;
      None where they were not read.
    modified: when the file was changed last, in ns since 1970; None: whenever it is looked at
      again, it counts as changed.
    fate: entered (its training has begun), trained, late (trained after its day had ended), skipped
      (late, and data.late is skip), seen (its name or its bytes were trained before) or refused (it
      cannot be trained on).
    reason: why, where it was not simply trained.
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

  @property
  def content(self) -> tuple[int | None, int | None]:
    """What tells the bytes of two passes apart."""
    return self.size, self.crc32

  def as_pass(self) -> Pass:
    """The pass; its path counts, its marker is forgotten."""
    return Pass(self.name, self.path, self.day)


def _files(path: str) -> list[LogFile]:
  """The files that tell a pass from others."""
  meta = os.path.join(path, META)
  return files_of(meta if not is_remote(path) and os.path.exists(meta) else path)


def stamp(path: str) -> tuple[int, int]:
  """Size and time of change of a pass's files, quickly: they differ where it may have changed."""
  files = _files(path)
  return sum(f.bytes for f in files), max(f.mtime_ns for f in files)


def stamp_if_any(path: str) -> tuple[int | None, int | None]:
  """As `stamp`; zeros where something is there that has none, None where nothing is."""
  try:
    return stamp(path)
  except (OSError, UserError):
    return (0, 0) if exists(path) else (None, None)


def refused_entry(one: Pass, epoch: int, reason: str) -> Entry:
  """The entry of a pass that cannot be trained on, and that was not read."""
  size, modified = stamp_if_any(one.path)
  path = absolute(one.path)
  return Entry(path, one.name, one.day, epoch, size, None, modified, 'refused', reason)


def entry_of(one: Pass, epoch: int) -> Entry:
  """The entry of a pass that is met for the first time; reads the whole pass."""
  size, modified = stamp(one.path)
  crc32 = 0
  for file in _files(one.path):
    with open_file(file.path) as f:
      crc32 = crc32_of_stream(f, crc32)
  return Entry(absolute(one.path), one.name, one.day, epoch, size, crc32, modified)


def _mark(*what: Json) -> bytes:
  """A hash that stands for a path, a name or a content."""
  return hashlib.blake2b(json.dumps(what).encode(), digest_size=_MARK_BYTES).digest()


class Ledger:
  """The entries of the passes met so far, in the order in which they were met.

  Every process of a job holds the same. An epoch begins with no pass seen. Of passes that were
  settled long ago only hashes of path, name and bytes are left, by which they are known when they
  come again; and how many had which fate.

  Args:
    state: what `state` gave of another ledger; None: nothing was met yet.
  """

  def __init__(self, state: Mapping[str, Json] | None = None):
    state = state or {'entries': [], 'folded': {}, 'epoch': 0, 'marks': ''}
    self._entries: dict[tuple[int, str], Entry] = {}  # by epoch and path
    self._by_name: dict[tuple, str] = {}  # paths of what was trained on, by epoch, name and day
    self._by_content: dict[tuple, str] = {}  # likewise, by epoch, size and checksum
    self._folded = collections.Counter(state['folded'])  # passes by fate
    self._epoch = state['epoch']  # of the marks
    marks = base64.b64decode(state['marks'])
    self._marks = {marks[i : i + _MARK_BYTES] for i in range(0, len(marks), _MARK_BYTES)}
    for fields in state['entries']:
      self.put(Entry(**fields))

  def __iter__(self) -> Iterator[Entry]:
    return iter(self._entries.values())

  def put(self, entry: Entry) -> None:
    """Adds an entry, or replaces the one of its path and epoch."""
    self._entries[entry.epoch, entry.path] = entry
    if entry.fate in TRAINED:
      self._by_name.setdefault((entry.epoch, entry.name, entry.day), entry.path)
      if entry.crc32 is not None:
        self._by_content.setdefault((entry.epoch, *entry.content), entry.path)

  def of(self, one: Pass, epoch: int) -> Entry | None:
    """The entry of a pass by its path, or None."""
    return self._entries.get((epoch, absolute(one.path)))

  def has_folded(self, path: str, epoch: int) -> bool:
    """Whether the pass at a path was settled so long ago that it has no entry any more."""
    return self._has(epoch, 'path', absolute(path))

  def _has(self, epoch: int, *what: Json) -> bool:
    return bool(self._marks) and epoch == self._epoch and _mark(*what) in self._marks

  def trained_before(self, entry: Entry, by_name: bool) -> str | None:
    """How a path that is new is that of a pass of the epoch that was trained on, in words, or None.

    Args:
      entry: of the path.
      by_name: whether an equal name and day make it the same; equal bytes always do.
    """
    epoch, name = entry.epoch, (entry.name, entry.day)
    for how, path, what in (
      ('content', self._by_content.get((epoch, *entry.content)), entry.content),
      *([('name', self._by_name.get((epoch, *name)), name)] if by_name else []),
    ):
      if path is not None:
        return f'its {how} is that of {path}{"" if exists(path) else ", which is gone"}'
      if self._has(epoch, how, *what):
        return f'its {how} is that of a pass that was trained on long ago'
    return None

  def entered(self) -> Entry | None:
    """The pass whose training has begun and not ended, or None."""
    last = [entry for entry in self if entry.fate == 'entered']
    return last[-1] if last else None

  def counts(self) -> dict[str, int]:
    """The number of passes of each fate."""
    return dict(self._folded + collections.Counter(entry.fate for entry in self))

  def fold(self, whole: int = WHOLE_ENTRIES) -> None:
    """Keeps marks in place of all but the last `whole` settled entries."""
    old = [key for key, entry in self._entries.items() if entry.fate != 'entered']
    newest = max((epoch for epoch, _ in self._entries), default=0)
    if newest != self._epoch:
      self._epoch, self._marks = newest, set()
    for key in old[: max(0, len(old) - whole)]:
      entry = self._entries.pop(key)
      self._folded[entry.fate] += 1
      if entry.epoch != self._epoch:
        continue
      self._marks.add(_mark('path', entry.path))
      if entry.fate in TRAINED:
        self._marks.add(_mark('name', entry.name, entry.day))
        self._marks.add(_mark('content', *entry.content))
        self._by_name.pop((entry.epoch, entry.name, entry.day), None)
        self._by_content.pop((entry.epoch, *entry.content), None)

  def state(self) -> JsonObject:
    """Plain data that another Ledger can be made of."""
    return {
      'entries': [dict(vars(entry)) for entry in self],
      'folded': dict(self._folded),
      'epoch': self._epoch,
      'marks': base64.b64encode(b''.join(sorted(self._marks))).decode(),
    }

  def write(self, run_dir: str) -> None:
    """Writes ledger.jsonl, an entry a line; the checkpoint is what a run continues from."""
    path = os.path.join(run_dir, FILE)
    with open(path + '.new', 'w', encoding='utf-8') as f:
      if self._folded:
        f.write(json.dumps({'fates_of_older_passes': dict(self._folded)}) + '\n')
      f.writelines(json.dumps(vars(entry)) + '\n' for entry in self)
    os.replace(path + '.new', path)
