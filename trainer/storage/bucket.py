"""A run_dir in a bucket (s3://, gs:// or hdfs://), read and written by the same clients as logs.

A job trains into a working directory on its machine. After each checkpoint and export, it copies
that into the bucket, in an order that keeps the bucket consistent at any moment: reports and
config; then new checkpoints and exports, each with its DONE marker last; then it deletes the
directories that the job has removed, the marker of each first. Commands that read the run copy what
they need. A file of rows that several checkpoints share travels once, in either direction.

Only names of a run are ever read, written or deleted (`_NAME`), and a job refuses a prefix that
holds anything else.
"""

import contextlib
import filecmp
import glob
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator

from trainer import command_line, files
from trainer.data import file_system
from trainer.errors import UserError, printable
from trainer.storage import run_lock

_OWNER = 'trained_by.json'
# The files of a run, as paths below its run_dir. Locks, and what each start makes again, stay on
# the machine. `folder` is a checkpoint or export, which is copied and deleted as a whole; 0.2.0
# wrote dense_model.
_NAME = re.compile(
  r'config\.yaml|given\.yaml|dense_dtype|(?:metrics|ledger)\.jsonl|report\.html'
  r'|tensorboard/(?:.+/)?events\.out\.tfevents\.[^/]+'
  r'|(?P<folder>(?:checkpoints|best)/ckpt-[\d-]+|exports/\d+-(?:base|delta)'
  r'|exports/(?:saved_model|dense_model|items)/\d+)/.+'
)
REPORTS = ('config.yaml', 'metrics.jsonl')
STATE = (*REPORTS, 'checkpoints', 'best')
EXPORTS = ('config.yaml', 'exports')
_FOLDERS = ('checkpoints', 'best', 'exports', 'tensorboard')
_SECONDS_BETWEEN_LOOKS = 1.0
_BLOCK_BYTES = 1 << 20


def await_run_dir(
  flag: str, run_dir: str, progress: Callable[[], None] = lambda: None, waits: bool = True
) -> None:
  """Waits until a trainer has made a run_dir, and calls `progress` meanwhile.

  A UserError says that it is no directory or, unless `waits`, that it is not there yet.
  """
  told = False
  while not file_system.is_directory(run_dir):
    if not waits or os.path.exists(run_dir):
      raise UserError(f'{flag} {run_dir}: no such directory; wanted the run_dir of a run')
    if not told:
      command_line.say(f'waiting: {flag} {run_dir}: no such directory yet')
    told = True
    progress()
    time.sleep(_SECONDS_BETWEEN_LOOKS)


@contextlib.contextmanager
def copy_of(run_dir: str, parts: Iterable[str]) -> Iterator[str]:
  """Yields the run_dir or, if it is in a bucket, a local copy of its `parts`, such as EXPORTS."""
  with followed(run_dir, parts) as (directory, look):
    look()
    yield directory


@contextlib.contextmanager
def followed(run_dir: str, parts: Iterable[str]) -> Iterator[tuple[str, Callable[[], None]]]:
  """Yields a local directory that holds a run_dir, and a function that updates this directory.

  If the run_dir is a URL, the first call of the function copies the `parts`, such as EXPORTS, into
  the empty directory; later calls do so again if the last copy is at least a second old.
  """
  if not file_system.is_remote(run_dir):
    yield run_dir, lambda: None
    return
  if not file_system.exists(run_dir):
    raise UserError(f'--run_dir {run_dir}: no such directory; wanted the run_dir of a run')
  with files.temporary_directory() as directory:
    bucket, looked = Bucket(run_dir, directory), -_SECONDS_BETWEEN_LOOKS

    def look() -> None:
      nonlocal looked
      if time.monotonic() - looked >= _SECONDS_BETWEEN_LOOKS:
        bucket.refresh(parts)
        looked = time.monotonic()

    yield directory, look


class Bucket:
  """A run_dir in a bucket (`run_dir`, a URL), and its copy in a directory of this machine."""

  def __init__(self, run_dir: str, directory: str):
    self.run_dir, self._directory = run_dir, directory
    # What the bucket holds, as far as this process knows.
    self._markers: dict[str, bytes | None] = {}  # {directory: content of DONE, None without one}
    self._reports: dict[str, int] = {}  # {file outside of these: its checksum}
    process = {'host': socket.gethostname(), 'process': os.getpid(), 'time': time.time()}
    self._owner = json.dumps(process).encode()

  def download(self) -> None:
    """Makes the directory equal to the bucket, before a job trains in the directory.

    A run's files that only the directory has are removed: a job may have been killed before it
    copied them, and the run have continued elsewhere. UserError if a process trains here.
    """
    names = file_system.listed(self.run_dir)
    if foreign := [name for name in names if not _NAME.fullmatch(name) and name != _OWNER]:
      more = f' and {len(foreign) - 1:,} more' if len(foreign) > 1 else ''
      raise UserError(
        f'run_dir {self.run_dir}: holds {printable(min(foreign))!r}{more}, which no run has '
        'written there; wanted a prefix for this run alone'
      )
    os.makedirs(self._directory, exist_ok=True)
    lock = run_lock.RunLock(self._directory)
    lock.acquire()
    try:
      self._copy_here(names, self._names())
    finally:
      lock.release()
    for name in _grouped(self._names()).get('', []):
      self._reports[name] = files.crc32_of(self._path(name))

  def refresh(self, parts: Iterable[str]) -> None:
    """Makes parts of the directory equal to the bucket. Unlike `download`, it takes no lock."""
    there = []
    for name in sorted(set(file_system.listed(self.run_dir, recursive=False)).intersection(parts)):
      below = file_system.listed(self._url(name)) if name in _FOLDERS else None
      there += [name] if below is None else [f'{name}/{file}' for file in below]
    self._copy_here(there, [name for name in self._names() if name.split('/')[0] in parts])

  def _copy_here(self, there: Iterable[str], here: Iterable[str]) -> None:
    """Copies the files `there` from the bucket, and removes those of the files `here` not there."""
    remote, local = _grouped(there), _grouped(here)
    reports = remote.pop('', []), local.pop('', [])
    self._markers = {}
    for folder, names in remote.items():
      marker = f'{folder}/{files.DONE}'
      with contextlib.suppress(FileNotFoundError):  # it is being removed
        self._markers[folder] = self._read(marker) if marker in names else None
    for folder in list(local):
      if self._marker(folder) is None or self._marker(folder) != self._markers.get(folder):
        files.remove(self._path(folder))
        del local[folder]
    for folder in self._markers.keys() - local:
      if self._markers[folder] is not None:
        self._get_folder(folder, remote[folder])
    for name in set(reports[1]).difference(reports[0]):
      os.remove(self._path(name))
    for name in reports[0]:
      self._get(name)

  def take(self) -> None:
    """Claims the run_dir for this process; the next `upload` of an earlier claimant then fails."""

    def take() -> None:
      with file_system.open_to_write(self._url(_OWNER)) as f:
        f.write(self._owner)

    try:
      file_system.retried(self.run_dir, take, 'written')
    except FileNotFoundError:  # from gs://; s3:// raises an OSError
      raise UserError(f'run_dir {self.run_dir}: there is no such bucket') from None

  def upload(self) -> None:
    """Copies to the bucket what has changed; a UserError if another process claimed the run_dir."""
    self._check_owner()
    local = _grouped(self._names())
    for name in local.pop('', []):
      checksum = files.crc32_of(self._path(name))
      if self._reports.get(name) != checksum:
        self._put(name)
        self._reports[name] = checksum
    for folder in sorted(local, key=file_system.natural_key):
      marker = self._marker(folder)
      if marker is not None and marker != self._markers.get(folder):
        self._delete(folder)
        self._markers[folder] = None
        there = self._inodes(f for f, done in self._markers.items() if done == self._marker(f))
        for name in _marker_last(local[folder]):
          self._put(name, there.get(os.stat(self._path(name)).st_ino))
        self._markers[folder] = marker
    for folder in [f for f in self._markers if self._marker(f) is None]:
      self._delete(folder)
      del self._markers[folder]

  def _check_owner(self) -> None:
    """Raises UserError if `trained_by.json` no longer names this process."""
    try:
      if (found := self._read(_OWNER)) == self._owner:
        return
      owner = json.loads(found)
      who = f'process {owner["process"]} on host {owner["host"]} trains into it since'
    except FileNotFoundError:
      who = f'its {_OWNER} was deleted'
    except (ValueError, LookupError, TypeError):  # no process of ours has written it
      who = f'its {_OWNER} was overwritten'
    raise UserError(f'run_dir {self.run_dir}: {printable(who)}; this one ends')

  def _names(self) -> list[str]:
    """Returns the files of the run in the directory, as paths within it."""
    names = []
    for folder, folders, found in os.walk(self._directory):
      below = os.path.relpath(folder, self._directory)
      if below == os.curdir:
        folders[:] = _FOLDERS
      names += [os.path.normpath(os.path.join(below, name)) for name in found]
    return [name for name in names if _NAME.fullmatch(name) and files.UNFINISHED not in name]

  def _inodes(self, folders: Iterable[str]) -> dict[int, str]:
    """Returns, by inode, the files in some local directories that have more than one name."""
    stats = {}
    for folder in folders:
      with contextlib.suppress(FileNotFoundError):  # the job has removed it
        stats |= {f'{folder}/{e.name}': e.stat() for e in os.scandir(self._path(folder))}
    return {stat.st_ino: name for name, stat in stats.items() if stat.st_nlink > 1}

  def _path(self, name: str) -> str:
    return os.path.join(self._directory, name)

  def _url(self, name: str) -> str:
    return f'{self.run_dir.rstrip("/")}/{name}'

  def _marker(self, folder: str) -> bytes | None:
    """Returns the content of DONE in a local directory; None if there is no DONE."""
    try:
      with open(self._path(f'{folder}/{files.DONE}'), 'rb') as f:
        return f.read()
    except FileNotFoundError:
      return None

  def _read(self, name: str) -> bytes:
    def read() -> bytes:
      with file_system.open_file(self._url(name)) as f:
        return f.read()

    return file_system.retried(self._url(name), read)

  def _get(self, name: str) -> None:
    path = self._path(name)
    os.makedirs(os.path.dirname(path), exist_ok=True)

    def get() -> None:
      with (
        file_system.open_file(self._url(name)) as source,
        open(path + files.UNFINISHED, 'wb') as f,
      ):
        shutil.copyfileobj(source, f, _BLOCK_BYTES)

    file_system.retried(self._url(name), get)
    os.replace(path + files.UNFINISHED, path)

  def _get_folder(self, folder: str, names: Iterable[str]) -> None:
    try:
      for name in _marker_last(names):
        if (twin := self._twin_here(name)) is None:
          self._get(name)
        else:
          os.link(twin, self._path(name))
    except FileNotFoundError:  # a trainer has removed it meanwhile
      files.remove(self._path(folder))

  def _twin_here(self, name: str) -> str | None:
    """Returns a local file equal to a checkpoint's file of rows, by their indices; None if none."""
    if not name.endswith('.bin'):
      return None
    folder, file = os.path.split(self._path(name))
    for twin in glob.glob(os.path.join(glob.escape(os.path.dirname(folder)), 'ckpt-*', file)):
      indices = [os.path.splitext(path)[0] + '.json' for path in (self._path(name), twin)]
      is_done = files.is_done(os.path.dirname(twin)) and os.path.dirname(twin) != folder
      if is_done and filecmp.cmp(*indices, shallow=False):
        return twin
    return None

  def _put(self, name: str, twin: str | None = None) -> None:
    """Writes a file into the bucket; `twin` is a name under which the bucket has it already."""

    def put() -> None:
      if twin is not None:
        with contextlib.suppress(OSError):  # what cannot be copied there is sent again
          return file_system.copy(self._url(twin), self._url(name))
      with open(self._path(name), 'rb') as f, file_system.open_to_write(self._url(name)) as target:
        shutil.copyfileobj(f, target, _BLOCK_BYTES)

    file_system.retried(self.run_dir, put, 'written')

  def _delete(self, folder: str) -> None:
    """Deletes a directory of the bucket, its DONE marker first."""
    if folder in self._markers:
      file_system.delete(self._url(f'{folder}/{files.DONE}'))
      file_system.delete(self._url(folder))


def _grouped(names: Iterable[str]) -> dict[str, list[str]]:
  """Returns {directory of a checkpoint or export, '' for none: paths of a run's files in it}."""
  found: dict[str, list[str]] = {}
  for name in names:
    if match := _NAME.fullmatch(name):
      found.setdefault(match['folder'] or '', []).append(name)
  return found


def _marker_last(names: Iterable[str]) -> list[str]:
  """Orders files: DONE comes last, and rows come after their index."""
  return sorted(names, key=lambda n: (os.path.basename(n) == files.DONE, n.endswith('.bin')))
