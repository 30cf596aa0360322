"""Where logs lie: local paths, and s3://, gs:// and hdfs:// through pyarrow.fs."""

import codecs
import contextlib
import errno
import fnmatch
import functools
import glob
import io
import math
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.fs

from trainer.errors import BadPass, ConfigError, UserError, one_line, plain_errors, printable

# The format of a file by its suffix; CSV_SUFFIXES and all others are CSV.
SUFFIXES = {
  '.jsonl': 'jsonl',
  '.ndjson': 'jsonl',
  '.json': 'jsonl',
  '.orc': 'orc',
  '.tfrecord': 'tfrecord',
  '.tfrecords': 'tfrecord',
  '.libsvm': 'libsvm',
  '.svm': 'libsvm',
  '.libffm': 'libffm',
  '.ffm': 'libffm',
  '.parquet': 'parquet',
  '.pq': 'parquet',
}
CSV_SUFFIXES = ('.csv', '.tsv', '.txt', '.data', '.test')
CODECS = {'.gz': 'gzip', '.zst': 'zstd', '.bz2': 'bz2', '.lz4': 'lz4'}
BLOCK_BYTES = 8 << 20  # of a text that are read at once
MAX_LINE_BYTES = 64 << 20
ATTEMPTS = 3  # at a remote place, beyond what its client retries by itself
SECONDS_BETWEEN_ATTEMPTS = 1.0

# Errors of the operating system that no pass is to blame for.
_OF_THE_MACHINE = (
  errno.ENOSPC,
  errno.EDQUOT,
  errno.EROFS,
  errno.EMFILE,
  errno.ENFILE,
  errno.ENOMEM,
)

Value = TypeVar('Value')


class LogFile(NamedTuple):
  """A file of a pass."""

  path: str
  bytes: int
  mtime_ns: int


class Part(NamedTuple):
  """Records of a file that stand one after another; by default all.

  Attributes:
    start: the first byte of a text, the first row (from 0) of a table.
    end: likewise, one past the last; None: to the file's end.
    line: the number of the first record, from 1, as messages name it.
  """

  start: int = 0
  end: int | None = None
  line: int = 1


WHOLE = Part()


def is_remote(path: str) -> bool:
  """Whether a path names a place that pyarrow.fs reaches, as s3://bucket/key."""
  return '://' in path


def normal(path: str) -> str:
  """A path without needless parts, ~ replaced."""
  if not is_remote(path):
    return os.path.normpath(os.path.expanduser(path))
  scheme, _, rest = path.partition('://')
  return f'{scheme}://{os.path.normpath(rest)}'


def absolute(path: str) -> str:
  """The path from its file system's root on."""
  return path if is_remote(path) else os.path.abspath(path)


@functools.cache
def _filesystem(root: str) -> pa.fs.FileSystem:
  return pa.fs.FileSystem.from_uri(root)[0]


def _locate(path: str) -> tuple[pa.fs.FileSystem, str]:
  """The file system of a path, and the path in it."""
  if not is_remote(path):
    return _filesystem('file:///'), os.path.abspath(os.path.expanduser(path))
  scheme, _, rest = path.partition('://')
  host, _, inside = os.path.normpath(rest).partition('/')
  # Left to itself, the client of gs:// tries for a quarter of an hour.
  options = '?retry_limit_seconds=30' if scheme in ('gs', 'gcs') else ''
  try:
    filesystem = _filesystem(f'{scheme}://{host}/{options}')
  except (pa.ArrowException, OSError) as e:
    raise UserError(f'{path}: cannot be reached: {first_line(e)}') from None
  host = host.rpartition('@')[2]
  return filesystem, f'/{inside}' if scheme in ('hdfs', 'viewfs') else f'{host}/{inside}'


def first_line(error: BaseException) -> str:
  lines = str(error).splitlines() or ['']
  return ' '.join(lines[0].split())[:300]


def retried(path: str, action: Callable[[], Value]) -> Value:
  """Runs `action` on a file; where a remote place fails, some times more.

  Raises:
    UserError: where it keeps failing; its cause is the last OSError.
    FileNotFoundError: where there is no such file.
  """
  if not is_remote(path):
    return action()
  for attempt in range(1, ATTEMPTS + 1):
    try:
      return action()
    except FileNotFoundError:
      raise
    except OSError as e:
      if attempt == ATTEMPTS:
        raise UserError(f'{path}: cannot be read after {ATTEMPTS} attempts: {first_line(e)}') from e
      time.sleep(SECONDS_BETWEEN_ATTEMPTS * attempt)
  raise AssertionError


class _RemoteFile(io.RawIOBase):
  """A remote file, read at any place; each read is tried again where the connection is lost.

  The retries lie below decompression and parsing, which must not meet a failed read: what they had
  read before it would be lost.
  """

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
    start = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._size}[whence]
    self._place = start + offset
    return self._place

  def tell(self) -> int:
    return self._place


def codec_of(path: str) -> str | None:
  """What a file's suffix says that it is compressed with."""
  return CODECS.get(os.path.splitext(path)[1])


def open_file(path: str) -> pa.NativeFile:
  """Opens a file to be read at any place."""
  if is_remote(path):
    return pa.PythonFile(_RemoteFile(path), 'r')
  filesystem, inside = _locate(path)
  return filesystem.open_input_file(inside)


@contextlib.contextmanager
def open_table(path: str, kind: str) -> Iterator[pa.NativeFile]:
  """Opens a file of tables to be read within a `with`.

  Args:
    path: of the file.
    kind: as messages name it, with its article.
  Raises:
    BadPass: where it cannot be read as such a file.
  """
  try:
    with open_file(path) as f:
      yield f
  except (OSError, UnicodeError, pa.ArrowException) as e:  # also where a column's name is no UTF-8
    raise BadPass(f'{path}: not {kind} file that can be read: {first_line(e)}') from None


def open_stream(path: str) -> pa.NativeFile:
  """Opens a file to be read from its beginning, decompressed by its suffix."""
  codec = codec_of(path)
  return pa.CompressedInputStream(open_file(path), codec) if codec else open_file(path)


@contextlib.contextmanager
def local_copy(path: str) -> Iterator[str]:
  """A local path of a file: its own, or for the time of a `with` that of a copy."""
  if not is_remote(path):
    yield path
    return
  with tempfile.TemporaryDirectory() as folder:
    copy = os.path.join(folder, os.path.basename(path))
    with open_file(path) as source, open(copy, 'wb') as target:
      shutil.copyfileobj(source, target, 4 << 20)
    yield copy


def natural_key(text: str) -> list[tuple[int, int, str]]:
  """What to sort by so that numbers in a text count as numbers: day_9 stands before day_10."""
  return [
    (1, int(part), part) if i % 2 else (0, 0, part)
    for i, part in enumerate(re.split(r'([0-9]{1,18})', text))
  ]


def _children(folder: str) -> list[pa.fs.FileInfo]:
  """What lies in a remote directory; nothing where there is none."""
  filesystem, inside = _locate(folder)
  selector = pa.fs.FileSelector(inside, allow_not_found=True)
  return retried(folder, lambda: filesystem.get_file_info(selector))


def matching(patterns: Sequence[str], key: str) -> list[str]:
  """Files and directories that the patterns of a config key match, a pattern at a time, by name.

  Raises:
    ConfigError: where a pattern matches nothing.
  """
  files = []
  for pattern in patterns:
    if is_remote(pattern):
      found = _remote_glob(pattern)
    else:  # brackets in the name of a file that is there mean themselves
      path = normal(pattern)
      found = glob.glob(path) or [path] * os.path.exists(path)
    found.sort()
    if not found:
      place = '' if is_remote(pattern) or os.path.isabs(normal(pattern)) else f' in {os.getcwd()}'
      raise ConfigError(f"{key}: found no file that matches '{pattern}'{place}")
    files += found
  return files


def _remote_glob(pattern: str) -> list[str]:
  """As glob.glob; a directory that has no wildcards is not listed."""
  folder, name = os.path.split(normal(pattern))
  if not glob.has_magic(pattern):
    return [pattern] if exists(pattern) else []
  folders = _remote_glob(folder) if glob.has_magic(folder) else [folder]
  return [
    os.path.join(one, child.base_name)
    for one in folders
    for child in _children(one)
    if fnmatch.fnmatchcase(child.base_name, name) and not child.base_name.startswith('.')
  ]


@contextlib.contextmanager
def refusing(path: str) -> Iterator[None]:
  """Turns whatever goes wrong with one pass into BadPass, so that it can be set aside.

  What ails the machine stays what it is: a full disk, too many open files, another file that cannot
  be written, a remote place that is away.

  Args:
    path: of the pass.
  Raises:
    BadPass: in one line that names the pass.
  """
  try:
    yield
  except Exception as e:
    cause = e if isinstance(e, OSError) else e.__cause__
    if isinstance(cause, OSError):
      is_of_another = bool(cause.filename) and not str(cause.filename).startswith(path)
      if is_remote(path) or is_of_another or cause.errno in _OF_THE_MACHINE:
        raise
    text = str(e) if isinstance(e, UserError) else one_line(e)
    raise BadPass(printable(text if path in text else f'{path}: {text}')) from e


def exists(path: str) -> bool:
  """Whether there is such a file or directory."""
  if not is_remote(path):
    return os.path.exists(path)
  return _info(path).type != pa.fs.FileType.NotFound


def is_directory(path: str) -> bool:
  """Whether there is a directory of this name; of a bucket it is the beginning of a file's name."""
  return _info(path).type == pa.fs.FileType.Directory


def modified(path: str) -> float | None:
  """When a file was changed last, in seconds since 1970; None where there is none."""
  if not is_remote(path):
    return os.path.getmtime(path) if os.path.exists(path) else None
  info = _info(path)
  return None if info.type == pa.fs.FileType.NotFound else (info.mtime_ns or 0) / 1e9


def _info(path: str) -> pa.fs.FileInfo:
  filesystem, inside = _locate(path)
  return retried(path, lambda: filesystem.get_file_info(inside))


def walk(
  directory: str, onerror: Callable[[OSError], None]
) -> Iterator[tuple[str, list[str], list[str]]]:
  """As os.walk: yields each directory with its directories and its files.

  Args:
    directory: where to begin.
    onerror: called with what was met instead of a directory's contents.
  """
  if not is_remote(directory):
    yield from os.walk(directory, onerror=onerror)
    return
  filesystem, inside = _locate(directory)
  try:
    selector = pa.fs.FileSelector(inside, recursive=True)
    found = filesystem.get_file_info(selector)
  except OSError as e:
    onerror(OSError(e.errno, first_line(e), directory))
    return
  contents = {directory: ([], [])}
  for one in found:
    folder, name = os.path.split(directory + one.path[len(inside.rstrip('/')) :])
    contents.setdefault(folder, ([], []))[one.type == pa.fs.FileType.File].append(name)
  for folder, (folders, names) in sorted(contents.items()):
    yield folder, folders, names


def files_of(path: str) -> list[LogFile]:
  """The files of a pass: the file itself, or those below a directory, in natural order.

  Files whose names begin with . or _ (as _SUCCESS) do not count, nor do .crc files.

  Raises:
    UserError: where there is no such file, or something else than files.
    BadPass: where the directory holds none.
  """
  if not is_remote(path):
    with plain_errors(f'cannot read {path}'):
      return _local_files(os.path.expanduser(path))
  filesystem, inside = _locate(path)
  with plain_errors(f'cannot read {path}'):
    info = _info(path)
    if info.type == pa.fs.FileType.NotFound:
      raise UserError(f'{path}: no such file')
    if info.type == pa.fs.FileType.File:
      return [LogFile(path, info.size, info.mtime_ns or 0)]
    selector = pa.fs.FileSelector(inside, recursive=True)
    found = retried(path, lambda: filesystem.get_file_info(selector))
  prefix = len(inside.rstrip('/')) + 1
  return _parts(
    path,
    {
      one.path[prefix:]: LogFile(os.path.join(path, one.path[prefix:]), one.size, one.mtime_ns or 0)
      for one in found
      if one.type == pa.fs.FileType.File
    },
  )


def _parts(path: str, files: Mapping[str, LogFile]) -> list[LogFile]:
  """Those files of a directory that belong to the pass, in order. files: by path below it."""
  parts = [
    below
    for below in files
    if not any(map(_is_hidden, below.split('/'))) and not below.endswith('.crc')
  ]
  if not parts:
    raise BadPass(f'{path}: the directory holds no files; wanted part files of the pass')
  return [files[below] for below in sorted(parts, key=natural_key)]


def _is_hidden(name: str) -> bool:
  return name.startswith(('.', '_'))


def _local_files(path: str) -> list[LogFile]:
  """As `files_of`, of a local pass."""
  if not os.path.isdir(path):
    return [_local_file(path)]
  here = os.path.realpath(os.path.dirname(os.path.abspath(path)))
  if (here + os.sep).startswith(os.path.realpath(path) + os.sep):
    raise BadPass(f'{path}: is a link to a directory that it lies in; wanted one of its own')

  def fail(error: OSError) -> None:
    raise error

  files = {}
  for folder, folders, names in os.walk(path, onerror=fail):
    folders[:] = [name for name in folders if not _is_hidden(name)]
    for name in names:
      file = os.path.join(folder, name)
      if not _is_hidden(name):
        files[os.path.relpath(file, path)] = _local_file(file)
    for name in folders:
      if os.path.islink(os.path.join(folder, name)):
        raise BadPass(f'{os.path.join(folder, name)}: is a link to a directory; wanted files')
  return _parts(path, files)


def _local_file(path: str) -> LogFile:
  try:
    path.encode()
  except UnicodeEncodeError:
    raise BadPass(f'{path}: its name is not UTF-8; wanted one that is') from None
  try:
    info = os.stat(path)
  except FileNotFoundError:
    gone = 'is a link to a file that is not there' if os.path.islink(path) else 'no such file'
    raise UserError(f'{path}: {gone}') from None
  if not stat.S_ISREG(info.st_mode):
    raise UserError(f'{path}: is a device, a pipe or a socket; wanted a file or a directory')
  return LogFile(path, info.st_size, info.st_mtime_ns)


def partition_columns(path: str) -> dict[str, str]:
  """Hive's partition columns of a path: dt=2024-01-31/hour=03/x gives dt and hour."""
  folders = re.split(r'[/\\]', path)[:-1]
  return dict(f.split('=', 1) for f in folders if re.fullmatch(r'[A-Za-z_][\w.-]*=.*', f))


def text_blocks(
  path: str, part: Part = WHOLE, block_bytes: int | None = None
) -> Iterator[tuple[int, bytes]]:
  """Yields a text file, or some lines of one that is not compressed, in runs of whole lines.

  Each line ends in LF. A byte-order mark at the beginning is left out. Each run, of `block_bytes`
  or BLOCK_BYTES, comes with the number of its first line.

  Raises:
    BadPass: if the file is no text with line ends, or its compression is damaged.
  """
  try:
    with open_stream(path) as f:
      rest, line, is_start, left = b'', part.line, part.start == 0, math.inf
      if part != WHOLE:
        f.seek(part.start)
        left = math.inf if part.end is None else part.end - part.start
      while chunk := f.read(min(block_bytes or BLOCK_BYTES, left)):
        left -= len(chunk)
        if is_start:
          while len(chunk) < 3 and (more := f.read(3)):
            chunk += more
          chunk, is_start = chunk.removeprefix(codecs.BOM_UTF8), False
          refuse_other_files(path, chunk)
        rest += chunk
        if cut := rest.rfind(b'\n') + 1:
          yield line, rest[:cut]
          line += rest.count(b'\n')
          rest = rest[cut:]
        elif len(rest) > MAX_LINE_BYTES:
          raise _no_line_end(path, rest)
      if rest:
        if line == part.line and rest.count(b'\r') > 1:
          raise _no_line_end(path, rest)
        # Short files and the last line; the end of the file ends a line too.
        yield line, rest + b'\n'
  except (OSError, pa.ArrowException) as e:
    raise BadPass(f'{path}: cannot be read: {first_line(e)}') from None


def _no_line_end(path: str, data: bytes) -> BadPass:
  if b'\r' in data:
    return BadPass(f'{path}: found lines that end in CR; wanted LF or CRLF at the end of each')
  return BadPass(f'{path}: found no line end in {len(data)} bytes; wanted text in lines')


def refuse_other_files(path: str, start: bytes) -> None:
  """Raises BadPass where a text file begins as a file of another kind does."""
  for magic, what in (
    (b'PAR1', 'a Parquet file; wanted text, or data.format: parquet'),
    (b'ORC', 'an ORC file; wanted text, or data.format: orc'),
    (b'\x1f\x8b', 'gzip-compressed data; wanted text, or the suffix .gz'),
    (b'\x28\xb5\x2f\xfd', 'zstd-compressed data; wanted text, or the suffix .zst'),
    (b'BZh', 'bzip2-compressed data; wanted text, or the suffix .bz2'),
    (b'PK\x03\x04', 'a zip archive; wanted text'),
    (b'\xff\xfe', 'UTF-16 text; wanted UTF-8'),
    (b'\xfe\xff', 'UTF-16 text; wanted UTF-8'),
  ):
    if start.startswith(magic) and not (magic == b'ORC' and start[3:4].isalnum()):
      raise BadPass(f'{path}: found {what}')
  if b'\0' in (start[:1], start[1:2]) and start[:2] != b'\0\0':
    raise BadPass(f'{path}: found zero bytes, as UTF-16 text has; wanted UTF-8')
