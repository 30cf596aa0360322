"""What became of every pass: part of each checkpoint, and ledger.jsonl for people."""

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from trainer.data.log_files import LogFile, absolute, files_of, is_remote, open_file
from trainer.data.passes import Pass
from trainer.data.prepared import META
from trainer.errors import BadPass
from trainer.files import crc32_of_stream

FILE = 'ledger.jsonl'
TRAINED = ('trained', 'late')


@dataclasses.dataclass
class Entry:
  """A pass and its fate.

  Attributes:
    path: absolute, or the URL of a remote pass.
    name: as in reports.
    day: of its name or path.
    epoch: in which it was met.
    size: in bytes; None where the file was not read.
    crc32: of its bytes, those of its files one after another; of a prepared pass, of its meta.json.
    modified: when the file was changed last, in ns since 1970.
    fate: entered (its training has begun), trained, late (trained after its day had ended), skipped
      (late, and data.late is skip), seen (its name or its bytes were trained before) or refused (it
      could not be read).
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
  """The files of a pass; none of a directory that is empty, which is told where it is read."""
  meta = os.path.join(path, META)
  try:
    return files_of(meta if not is_remote(path) and os.path.exists(meta) else path)
  except BadPass:
    return []


def stamp(path: str) -> tuple[int, int]:
  """Size and time of change of a pass's files, quickly: they differ where it may have changed."""
  files = _files(path)
  return sum(f.bytes for f in files), max((f.mtime_ns for f in files), default=0)


def entry_of(one: Pass, epoch: int) -> Entry:
  """The entry of a pass that is met for the first time; reads the whole pass."""
  size, modified = stamp(one.path)
  crc32 = 0
  for file in _files(one.path):
    with open_file(file.path) as f:
      crc32 = crc32_of_stream(f, crc32)
  return Entry(absolute(one.path), one.name, one.day, epoch, size, crc32, modified)


class Ledger:
  """The entries of all passes met so far, in the order in which they were met.

  Every process of a job holds the same. An epoch begins with no pass seen.
  """

  def __init__(self, entries: Iterable[Mapping[str, Any]] = ()):
    self._entries: dict[tuple[int, str], Entry] = {}  # by epoch and path
    self._by_name: dict[tuple, str] = {}  # paths of what was trained on, by epoch, name and day
    self._by_content: dict[tuple, str] = {}  # likewise, by epoch, size and checksum
    for fields in entries:
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

  def like(self, entry: Entry, by_name: bool) -> Entry | None:
    """Another entry of the epoch, trained on, that is the same pass, or None.

    Args:
      entry: of a path that is new.
      by_name: whether an equal name and day make it the same; equal bytes always do.
    """
    path = self._by_content.get((entry.epoch, *entry.content))
    if path is None and by_name:
      path = self._by_name.get((entry.epoch, entry.name, entry.day))
    return self._entries.get((entry.epoch, path))

  def entered(self) -> Entry | None:
    """The pass whose training has begun and not ended, or None."""
    last = [entry for entry in self if entry.fate == 'entered']
    return last[-1] if last else None

  def counts(self) -> dict[str, int]:
    """The number of passes of each fate."""
    fates = [entry.fate for entry in self]
    return {fate: fates.count(fate) for fate in dict.fromkeys(fates)}

  def state(self) -> list[dict[str, Any]]:
    """Plain data that another Ledger can be made of."""
    return [dataclasses.asdict(entry) for entry in self]

  def write(self, run_dir: str) -> None:
    """Writes ledger.jsonl, an entry a line; the checkpoint is what a run continues from."""
    path = os.path.join(run_dir, FILE)
    with open(path + '.new', 'w', encoding='utf-8') as f:
      f.writelines(json.dumps(entry) + '\n' for entry in self.state())
    os.replace(path + '.new', path)
