"""Where logs lie: local paths, and s3://, gs:// and hdfs:// through pyarrow.fs."""

import contextlib
import functools
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.fs

from trainer.errors import BadPass, UserError, plain_errors

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
ATTEMPTS = 3  # at a remote place, beyond what its client retries by itself
SECONDS_BETWEEN_ATTEMPTS = 1.0

Value = TypeVar('Value')


class LogFile(NamedTuple):
  """A file of a pass."""

  path: str
  bytes: int
  mtime_ns: int


def is_remote(path: str) -> bool:
  """Whether a path names a place that pyarrow.fs reaches, as s3://bucket/key."""
  return '://' in path


@functools.cache
def _filesystem(root: str) -> pa.fs.FileSystem:
  return pa.fs.FileSystem.from_uri(root)[0]


def _locate(path: str) -> tuple[pa.fs.FileSystem, str]:
  """The file system of a path, and the path in it."""
  if not is_remote(path):
    return _filesystem('file:///'), os.path.abspath(os.path.expanduser(path))
  scheme, _, rest = path.partition('://')
  host, slash, inside = rest.partition('/')
  options = ''
  if '?' in inside:
    inside, _, options = inside.partition('?')
    options = '?' + options
  try:
    filesystem = _filesystem(f'{scheme}://{host}/{options}')
  except (pa.ArrowException, OSError) as e:
    raise UserError(f'{path}: cannot be reached: {first_line(e)}') from None
  return filesystem, inside if scheme == 'hdfs' and not host else f'{host}/{inside}' if (
    scheme != 'hdfs'
  ) else f'/{inside}'


def first_line(error: BaseException) -> str:
  lines = str(error).splitlines() or ['']
  return ' '.join(lines[0].split())[:300]


def retried(path: str, action: Callable[[], Value]) -> Value:
  """Runs `action` on a file; where a remote place fails, some times more.

  Raises:
    UserError: where it keeps failing.
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
        raise UserError(
          f'{path}: cannot be read after {ATTEMPTS} attempts: {first_line(e)}'
        ) from None
      time.sleep(SECONDS_BETWEEN_ATTEMPTS * attempt)
  raise AssertionError


def codec_of(path: str) -> str | None:
  """What a file's suffix says that it is compressed with."""
  return CODECS.get(os.path.splitext(path)[1])


def open_stream(path: str) -> pa.NativeFile:
  """Opens a file to be read from its beginning, decompressed by its suffix."""
  filesystem, inside = _locate(path)
  raw = retried(path, lambda: filesystem.open_input_stream(inside, compression=None))
  codec = codec_of(path)
  return pa.CompressedInputStream(raw, codec) if codec else raw


def open_file(path: str) -> pa.NativeFile:
  """Opens a file to be read at any place."""
  filesystem, inside = _locate(path)
  return retried(path, lambda: filesystem.open_input_file(inside))


@contextlib.contextmanager
def local_copy(path: str) -> Iterator[str]:
  """A local path of a file: its own, or for the time of a `with` that of a copy."""
  if not is_remote(path):
    yield path
    return
  filesystem, inside = _locate(path)
  with tempfile.TemporaryDirectory() as folder:
    copy = os.path.join(folder, os.path.basename(inside))

    def fetch() -> None:
      with filesystem.open_input_stream(inside, compression=None) as source:
        with open(copy, 'wb') as target:
          shutil.copyfileobj(source, target, 4 << 20)

    retried(path, fetch)
    yield copy


def natural(text: str) -> list[str | int]:
  """A sort key under which part-9 stands before part-10."""
  return [
    int(part) if i % 2 else part for i, part in enumerate(re.split(r'([0-9]+)', text.lower()))
  ]


def files_of(path: str) -> list[LogFile]:
  """The files of a pass: the file itself, or those below a directory, in natural order.

  Files whose names begin with . or _ (as _SUCCESS) do not count, nor do .crc files.

  Raises:
    UserError: where there is no such file.
    BadPass: where the directory holds none.
  """
  filesystem, inside = _locate(path)
  with plain_errors(f'cannot read {path}'):
    info = retried(path, lambda: filesystem.get_file_info(inside))
    if info.type == pa.fs.FileType.NotFound:
      raise UserError(f'{path}: no such file')
    if info.type == pa.fs.FileType.File:
      return [LogFile(path, info.size, info.mtime_ns or 0)]
    selector = pa.fs.FileSelector(inside, recursive=True)
    found = retried(path, lambda: filesystem.get_file_info(selector))
  prefix = len(inside.rstrip('/')) + 1
  parts = []
  for one in found:
    below = one.path[prefix:]
    hidden = any(name.startswith(('.', '_')) for name in below.split('/'))
    if one.type == pa.fs.FileType.File and not hidden and not below.endswith('.crc'):
      parts.append((below, one))
  if not parts:
    raise BadPass(f'{path}: the directory holds no files; wanted part files of the pass')
  parts.sort(key=lambda part: natural(part[0]))
  return [LogFile(os.path.join(path, below), one.size, one.mtime_ns or 0) for below, one in parts]


def partition_columns(path: str) -> dict[str, str]:
  """Hive's partition columns of a path: dt=2024-01-31/hour=03/x gives dt and hour."""
  folders = re.split(r'[/\\]', path)[:-1]
  return dict(f.split('=', 1) for f in folders if re.fullmatch(r'[A-Za-z_][\w.-]*=.*', f))


def raw_blocks(path: str, block_bytes: int, max_line_bytes: int) -> Iterator[bytes]:
  """Yields a text file in runs of whole lines, each line ended by LF, without a byte order mark.

  Raises:
    BadPass: where the file is no text with line ends, or its compression is damaged.
  """
  try:
    with open_stream(path) as f:
      rest, is_start, yielded = b'', True, False
      while chunk := retried(path, lambda: f.read(block_bytes)):
        if is_start:
          while len(chunk) < 3 and (more := f.read(3)):
            chunk += more
          chunk, is_start = chunk.removeprefix(b'\xef\xbb\xbf'), False
          refuse_other_files(path, chunk)
        cut = chunk.rfind(b'\n') + 1
        if cut:
          yielded = True
          yield rest + chunk[:cut]
          rest = chunk[cut:]
        else:
          rest += chunk
          if len(rest) > max_line_bytes:
            raise _no_line_end(path, rest)
      if rest:
        if not yielded and rest.count(b'\r') > 1:
          raise _no_line_end(path, rest)
        # Short files and the last line; the end of the file ends a line too.
        yield rest + b'\n'
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
  ):
    if start.startswith(magic) and not (magic == b'ORC' and start[3:4].isalnum()):
      raise BadPass(f'{path}: found {what}')
