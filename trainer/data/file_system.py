"""Finds and opens files: local ones, and those on s3://, gs:// and hdfs:// by pyarrow.fs."""

import contextlib
import errno
import functools
import io
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.fs

from trainer import errors
from trainer.config.formats import FORMATS
from trainer.errors import BadPass, UserError, one_line, printable, refuse_secrets
from trainer.files import patient, temporary_directory

# The format of a file by its suffix; with any other suffix it is CSV.
SUFFIXES = {suffix: name for name, kind in FORMATS.items() for suffix in kind.suffixes}
CODECS = {'.gz': 'gzip', '.zst': 'zstd', '.bz2': 'bz2', '.lz4': 'lz4'}
# Attempts to use a remote file. Each waits at most 3 s for an answer of S3, 10 s for one of gs.
ATTEMPTS = 6
SECONDS_BETWEEN_ATTEMPTS = 1.0

# Errors for which the machine is to blame, not the file.
_OF_THE_MACHINE = errno.ENOSPC, errno.EDQUOT, errno.EROFS

Value = TypeVar('Value')

_last_attempt = math.inf  # when, by time.monotonic(), the last attempt may begin


def attempt_for(seconds: float) -> None:
  """Lets no attempt to reach another machine begin later than `seconds` from now."""
  global _last_attempt
  _last_attempt = time.monotonic() + seconds


def attempts_end() -> bool:
  """Returns whether no attempt may begin any more."""
  return time.monotonic() > _last_attempt


class LogFile(NamedTuple):
  path: str
  bytes: int
  mtime_ns: int
  below: str = ''  # the directory that is its pass, if it is one of several files


class Part(NamedTuple):
  """Consecutive records of a file; by default all.

  Attributes:
    start, end: bytes of a text file, or rows, from 0, of a Parquet or ORC file; `end` is None for
      the file's end.
    line: the number of the first record, from 1, for messages.
  """

  start: int = 0
  end: int | None = None
  line: int = 1


WHOLE = Part()


def is_remote(path: str) -> bool:
  """Returns whether a path is a URL such as s3://bucket/key, which pyarrow.fs reaches."""
  return '://' in path


def normal(path: str) -> str:
  """Returns a path without .., double slashes and ~."""
  if not is_remote(path):
    return os.path.normpath(os.path.expanduser(path))
  scheme, _, rest = path.partition('://')
  return f'{scheme}://{os.path.normpath(rest)}'


def absolute(path: str) -> str:
  """Returns an absolute path; a URL stays as it is."""
  return path if is_remote(path) else os.path.abspath(path)


@functools.cache
def _filesystem(root: str) -> pa.fs.FileSystem:
  filesystem = pa.fs.FileSystem.from_uri(root)[0]
  if isinstance(filesystem, pa.fs.S3FileSystem):  # left to itself, it tries for minutes
    make, (settings,) = filesystem.__reduce__()
    once = pa.fs.AwsStandardS3RetryStrategy(max_attempts=1)
    filesystem = make(settings | {'retry_strategy': once})
  return filesystem


def _locate(path: str) -> tuple[pa.fs.FileSystem, str]:
  """Returns pyarrow's file system for a path, and the path within this file system."""
  if not is_remote(path):
    return _filesystem('file:///'), os.path.abspath(os.path.expanduser(path))
  refuse_secrets(path, 'the path of a file')
  scheme, _, rest = path.partition('://')
  host, _, inside = os.path.normpath(rest).partition('/')
  # Left to itself, the client of gs:// tries for a quarter of an hour.
  options = '?retry_limit_seconds=10' if scheme in ('gs', 'gcs') else ''
  try:
    filesystem = _filesystem(f'{scheme}://{host}/{options}')
  except (pa.ArrowException, OSError) as e:
    hadoop = '; HDFS needs JAVA_HOME, HADOOP_HOME and CLASSPATH (docs/data.md)'
    hint = hadoop if scheme in ('hdfs', 'viewfs') else ''
    raise UserError(f'{path}: cannot be reached: {first_line(e)}{hint}') from None
  host = host.rpartition('@')[2]
  return filesystem, f'/{inside}' if scheme in ('hdfs', 'viewfs') else f'{host}/{inside}'


def first_line(error: BaseException) -> str:
  """Returns the first line of an error's message, up to 300 characters."""
  return ' '.join(str(error).partition('\n')[0].split())[:300]


def retried(path: str, action: Callable[[], Value], verb: str = 'read') -> Value:
  """Returns the result of `action`; for a remote file, repeats it while it raises an OSError.

  After ATTEMPTS attempts it raises a UserError that names `verb` and `path`, whose cause is the
  last OSError. A FileNotFoundError is raised at once.
  """
  if not is_remote(path):
    return action()
  for attempt in range(1, ATTEMPTS + 1):
    try:
      return action()
    except FileNotFoundError:
      raise
    except OSError as e:
      is_denied = re.search('access.?denied|forbidden', str(e), re.IGNORECASE)
      if attempt == ATTEMPTS or attempts_end() or is_denied:
        attempts = '1 attempt' if attempt == 1 else f'{attempt} attempts'
        raise UserError(f'{path}: cannot be {verb} after {attempts}: {first_line(e)}') from e
      time.sleep(SECONDS_BETWEEN_ATTEMPTS * attempt)
  raise AssertionError


class _RemoteFile(io.RawIOBase):
  """A remote file that repeats failed reads, so that a decompressor never sees a failure."""

  def __init__(self, path: str):
    self._path, self._place, self._file = path, 0, None
    self._size = retried(path, self._open).size()

  def _open(self) -> pa.NativeFile:
    if self._file is None:
      filesystem, inside = _locate(self._path)
      self._file = filesystem.open_input_file(inside)
    return self._file

  def _read_at(self, size: int) -> bytes:
    try:
      data = self._open().read_at(size, self._place)
    except OSError:
      self._file = None
      raise
    if len(data) != size:
      raise OSError(f'found {len(data)} bytes at byte {self._place}; wanted {size}')
    return data

  def readable(self) -> bool:
    return True

  def seekable(self) -> bool:
    return True

  def read(self, size: int = -1) -> bytes:
    left = max(0, self._size - self._place)
    size = left if size is None or size < 0 else min(size, left)
    data = retried(self._path, lambda: self._read_at(size)) if size else b''
    self._place += len(data)
    return data

  def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
    self._place = offset + (0, self._place, self._size)[whence]
    return self._place

  def tell(self) -> int:
    return self._place


def codec_of(path: str) -> str | None:
  """Returns the compression that a file's suffix names, such as 'gzip'; None if it names none."""
  return CODECS.get(os.path.splitext(path)[1].lower())


def suffix_of(path: str) -> str:
  """Returns a file's suffix in lower case, '.csv' for both A.CSV and a.csv.gz."""
  stem, suffix = os.path.splitext(path.lower())
  return os.path.splitext(stem)[1] if suffix in CODECS else suffix


def open_file(path: str) -> pa.NativeFile:
  if is_remote(path):
    return pa.PythonFile(_RemoteFile(path), 'r')
  filesystem, inside = _locate(path)
  return patient(filesystem.open_input_file, inside)


def open_to_write(path: str) -> pa.NativeFile:
  """Opens a file to write. In a bucket, the file appears only when it is closed."""
  filesystem, inside = _locate(path)
  return filesystem.open_output_stream(inside)


def copy(source: str, target: str) -> None:
  """Copies a file of a bucket to another name in it, without bringing it here."""
  filesystem, inside = _locate(source)
  filesystem.copy_file(inside, _locate(target)[1])


def delete(path: str) -> None:
  """Deletes a remote file or directory, if it exists."""
  filesystem, inside = _locate(path)
  kinds = pa.fs.FileType
  deletes = {kinds.Directory: filesystem.delete_dir, kinds.File: filesystem.delete_file}
  if action := deletes.get(info_of(path).type):
    retried(path, lambda: action(inside), 'deleted')


def listed(folder: str, recursive: bool = True) -> list[str]:
  """Returns the files below a remote directory, as relative paths; [] if it is missing.

  Unless `recursive`, it returns the names of the files and directories in the directory itself.
  """
  infos = retried(folder, lambda: infos_below(folder, recursive, is_missing_empty=True))
  return [name for name, info in infos.items() if info.is_file or not recursive]


@contextlib.contextmanager
def open_table(path: str, kind: str) -> Iterator[pa.NativeFile]:
  """Opens a Parquet or ORC file; an error in reading it within the `with` becomes a BadPass."""
  try:
    with open_file(path) as f:
      yield f
  except (OSError, UnicodeError, pa.ArrowException) as e:  # also where a column's name is no UTF-8
    found = f'{first_line(e).removesuffix(".")}{_as_text(path)}'
    raise BadPass(f'{path}: not {kind} file that can be read: {found}') from None


def _as_text(path: str) -> str:
  """Returns '; it looks like text, …' if a file begins with text, else ''."""
  with contextlib.suppress(OSError, pa.ArrowException), open_file(path) as f:
    start = f.read(80).decode(errors='ignore').strip()
    if start and ' '.join(start.split()).isprintable():
      return f'; it looks like text, as it begins with {start.splitlines()[0][:40]!r}'
  return ''


def open_stream(path: str) -> pa.NativeFile:
  """Opens a file for sequential reading; decompresses it if its suffix says so."""
  codec = codec_of(path)
  return pa.CompressedInputStream(open_file(path), codec) if codec else open_file(path)


@contextlib.contextmanager
def local_copy(path: str) -> Iterator[str]:
  """Yields the local path of a file. A remote file is copied; the copy is deleted at the end."""
  if not is_remote(path):
    yield path
    return
  with temporary_directory() as folder:
    copy = os.path.join(folder, os.path.basename(path))
    with open_file(path) as source, open(copy, 'wb') as target:
      shutil.copyfileobj(source, target, 4 << 20)
    yield copy


def natural_key(text: str) -> list[tuple[int, int, str]]:
  """Returns a sort key in which digits count as numbers: day_9 comes before day_10."""
  parts = enumerate(re.split(r'([0-9]{1,18})', text))
  return [(1, int(part), part) if i % 2 else (0, 0, part) for i, part in parts]


def infos_below(
  folder: str, recursive: bool = True, is_missing_empty: bool = False
) -> dict[str, pa.fs.FileInfo]:
  """Returns what is in a remote directory: {path relative to it: FileInfo}.

  `recursive` lists subdirectories too. A missing one is {} if `is_missing_empty`, else an error.
  """
  filesystem, inside = _locate(folder)
  selector = pa.fs.FileSelector(inside, allow_not_found=is_missing_empty, recursive=recursive)
  below = len(inside.rstrip('/')) + 1
  return {info.path[below:]: info for info in filesystem.get_file_info(selector)}


@contextlib.contextmanager
def refusing(path: str, of_topic: bool = False) -> Iterator[None]:
  """Turns an error in reading a pass into a BadPass that names the pass.

  Errors of another cause stay: a full disk, too many open files, another file, no connection, or
  that of the topic itself (`of_topic`).
  """
  try:
    yield
  except Exception as e:
    if errors.is_exhausted(e):
      raise errors.Exhausted(str(e)) from e
    cause = e if isinstance(e, OSError) else e.__cause__
    if isinstance(cause, OSError):
      is_of_another = bool(cause.filename) and not str(cause.filename).startswith(path)
      if is_remote(path) or is_of_another or cause.errno in _OF_THE_MACHINE:
        raise
    if of_topic and isinstance(e, UserError) and not isinstance(e, BadPass):
      raise
    text = str(e) if isinstance(e, UserError) else one_line(e)
    raise BadPass(printable(text if path in text else f'{path}: {text}')) from e


def exists(path: str) -> bool:
  return info_of(path).type != pa.fs.FileType.NotFound if is_remote(path) else os.path.exists(path)


def is_directory(path: str) -> bool:
  """Returns whether a path is a directory; in a bucket, a directory must contain a file."""
  return info_of(path).type == pa.fs.FileType.Directory


def modified(path: str) -> float | None:
  """Returns when a file was last changed, in seconds since 1970; None if there is no file."""
  if exists(path):  # pyarrow refuses local names that are not UTF-8
    return (info_of(path).mtime_ns or 0) / 1e9 if is_remote(path) else os.path.getmtime(path)
  return None


def info_of(path: str) -> pa.fs.FileInfo:
  filesystem, inside = _locate(path)
  return retried(path, lambda: filesystem.get_file_info(inside))


def walk(
  directory: str, onerror: Callable[[OSError], None], skip: Mapping[str, set[str]]
) -> Iterator[tuple[str, list[str], list[str]]]:
  """Does what os.walk does, for remote directories too, but leaves out the names in `skip`.

  `skip` is {directory: names}. Names that a directory no longer holds are removed from it.
  """
  if not is_remote(directory):
    yield from _walk_here(directory, onerror, skip)
    return
  contents: dict[str, tuple[list[str], list[str]]] = {directory: ([], [])}
  try:
    for below, info in infos_below(directory).items():
      folder, name = os.path.split(os.path.join(directory, below))
      contents.setdefault(folder, ([], []))[info.is_file].append(name)
  except OSError as e:
    onerror(OSError(e.errno, first_line(e), directory))
    return
  for folder, (folders, names) in sorted(contents.items()):
    if skipped := skip.get(folder):
      skipped.intersection_update(names)
      names = [name for name in names if name not in skipped]
    yield folder, folders, names


def _walk_here(
  directory: str, onerror: Callable[[OSError], None], skip: Mapping[str, set[str]]
) -> Iterator[tuple[str, list[str], list[str]]]:
  """Does what `walk` does, for a local directory."""
  skipped, met = skip.get(directory, set()), set()
  folders, names = [], []
  try:
    with os.scandir(directory) as entries:
      for entry in entries:
        if entry.name in skipped:
          met.add(entry.name)
        else:
          (folders if is_folder(entry) else names).append(entry.name)
  except OSError as e:
    onerror(e)
    return
  skipped.intersection_update(met)
  yield directory, folders, names
  for path in (os.path.join(directory, name) for name in folders):
    if not os.path.islink(path):
      yield from _walk_here(path, onerror, skip)


def is_folder(entry: os.DirEntry) -> bool:
  """Returns whether an entry is a directory, or a link to one."""
  try:
    return entry.is_dir()
  except OSError:  # such as a link to itself
    return False
