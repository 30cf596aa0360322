"""The files of a log: what patterns match, what a pass consists of, what its folders say."""

import collections
import contextlib
import fnmatch
import functools
import glob
import hashlib
import itertools
import os
import re
import stat
import urllib.parse
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import pyarrow.fs
from absl import logging

from trainer.data import file_system
from trainer.data.file_system import LogFile, absolute, is_remote, natural_key, normal, retried
from trainer.errors import BadPass, ConfigError, UserError, plain_errors, printable
from trainer.runtime import rank

# Hidden names, and what copies under way, editors, checksums and markers leave beside data.
_NO_DATA = re.compile(
  r'[._].*|.*(~|_\$folder\$|\.(_COPYING_|te?mp([.-]?\d\w*)?|in-?progress|incomplete|(file)?part|'
  r'partial|done|crc|(cr)?download|aria2|bak\d*|backup|old|orig|rej|sw[a-p]|md5(sum)?|sha\d+(sum)?))',
  re.IGNORECASE | re.DOTALL,
)
# Of these, nobody asks where they went.
_UNTOLD = re.compile(r'(.*/)?[._].*|.*(\.done|_\$folder\$)', re.DOTALL)
_HIVE = re.compile('[^.=][^=]*=.*', re.DOTALL)  # a folder that gives a column
_MISSING = '__HIVE_DEFAULT_PARTITION__'
_FORMATS, _CODECS = (
  '|'.join(map(re.escape, names)) for names in (file_system.SUFFIXES, file_system.CODECS)
)
SUFFIX = re.compile(rf'({_FORMATS})({_CODECS})?$', re.IGNORECASE)
_PERHAPS_SUFFIX = re.compile(rf'({_FORMATS})?({_CODECS})?$', re.IGNORECASE)
# Tables whose own log says which files count: an entry of their directory, and what reads them.
_TABLES = {
  '_delta_log': ('a Delta table', "deltalake's DeltaTable(path).to_pyarrow_table()"),
  '.hoodie': ('a Hudi table', "Spark's read.format('hudi')"),
  '_spark_metadata': ('what a stream of Spark writes', "Spark's read.parquet(path)"),
  'metadata': ('an Iceberg table', "pyiceberg's scan().to_arrow()"),
}
_ICEBERG = re.compile(r'.*\.metadata\.json(\.gz)?|version-hint\.text', re.DOTALL)


def is_data(name: str, is_directory: bool = False) -> bool:
  """Returns whether a file or directory may belong to a log, by its name; folders key=value do."""
  return bool(is_directory and _HIVE.fullmatch(name)) or not _NO_DATA.fullmatch(name)


@functools.cache
def warn_once(text: str) -> None:
  """Warns, unless this process has warned of the same before."""
  logging.warning('%s', printable(text))


def tell_left_out(where: str, names: Iterable[str]) -> None:
  """Warns of files that are left out because of their names, unless these are hidden or markers."""
  if left := sorted((name for name in names if not _UNTOLD.fullmatch(name)), key=natural_key):
    more = f' and {len(left) - 1:,} more' if len(left) > 1 else ''
    are = 'by their names unfinished copies, backups or checksums; wanted other names for data'
    warn_once(f'{where}: left out {left[0]}{more}, {are}')


def fixed_folder(pattern: str) -> str:
  """Returns the directory above the wildcards of a pattern: a/b for a/b/*/c, also for a/b/c."""
  pattern = normal(pattern)
  while glob.has_magic(os.path.dirname(pattern)):
    pattern = os.path.dirname(pattern)
  return os.path.dirname(pattern) or os.curdir


def folders_above(path: str) -> Iterator[str]:
  """Yields the directories that a path lies in, the nearest first."""
  folder = os.path.dirname(path)
  if folder not in ('', path) and is_remote(folder) == is_remote(path):
    yield folder
    yield from folders_above(folder)


def matching(patterns: Sequence[str], key: str) -> list[str]:
  """Returns the files that patterns match, sorted within each; ConfigError if one matches none.

  BadPass if one of them lies in a table, such as one of Delta.
  """
  files, listed = [], functools.cache(_children)
  for pattern in patterns:
    path = normal(pattern)
    is_there = file_system.exists if is_remote(path) else os.path.lexists
    # A file's name may have brackets, which are no wildcards then.
    paths = _glob(path, listed) or [path] * is_there(path)
    if not paths:
      place = '' if is_remote(path) or os.path.isabs(path) else f' in {os.getcwd()}'
      raise ConfigError(f"{key}: found no file that matches '{pattern}'{place}")
    refuse_tables({above for p in paths for above in folders_above(absolute(p))}, listed)
    files += sorted(paths)
  return files


def _children(folder: str) -> dict[str, bool]:
  """Returns what is in a directory, {name: whether it is a directory}; {} if there is none."""
  if is_remote(folder):
    infos = retried(folder, lambda: file_system.infos_below(folder, False, is_missing_empty=True))
    return {name: not info.is_file for name, info in infos.items()}
  with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
    return {entry.name: file_system.is_folder(entry) for entry in entries}
  return {}


def _glob(pattern: str, listed: Callable[[str], dict[str, bool]]) -> list[str]:
  """Returns what matches a pattern, as glob.glob(recursive=True) does, for remote paths too.

  A name that is no data matches only where the pattern's is none either, as *.bak. A link to a
  directory that it lies in is not followed by **, and what ends in **/* matches files alone. With
  ** elsewhere, a directory that holds other matches is no match.
  """
  if not glob.has_magic(pattern):
    return []
  left, found = set(), {}

  def search(folder: str, names: Sequence[str], through: Sequence[str]) -> None:
    name, *rest = names
    if name == '**':
      search(folder, rest, through)
    try:
      children = listed(folder)
    except OSError as e:
      return warn_once(f'{folder}: left out: {e.strerror}')
    for child, is_directory in children.items():
      path = child if folder == os.curdir else os.path.join(folder, child)
      if name == '**':
        real = path if is_remote(path) else os.path.realpath(path)
        is_loop = any(f'{other}/'.startswith(f'{real}/') for other in through)
        if is_directory and is_data(child, True) and not is_loop:
          search(path, names, [*through, real])
      elif fnmatch.fnmatchcase(child, name):
        if is_data(name) and not is_data(child, is_directory):
          left.add(child)
        elif not rest:
          found[path] = is_directory
        elif is_directory:
          search(path, rest, through)

  folder = fixed_folder(pattern)
  names = os.path.relpath(pattern, folder).split(os.sep)
  names += ['*'] * (names[-1] == '**')
  search(folder, names, [os.path.realpath(folder)])
  if not rank():
    tell_left_out(pattern, left)
  above = {folder for path in found for folder in folders_above(path)} if '**' in names else ()
  only_files = names[-2:] == ['**', '*']
  return [p for p, is_directory in found.items() if not (is_directory and only_files or p in above)]


def refuse_tables(
  folders: Iterable[str], listed: Callable[[str], Collection[str]] = _children
) -> None:
  """Raises BadPass if one of some directories is a table; `listed` returns what is in one."""
  for folder in folders:
    names = ()
    with contextlib.suppress(OSError, UserError):  # above the log, who may read it may not look
      names = listed(folder)
    for mark in _TABLES.keys() & names:
      if mark != 'metadata' or any(map(_ICEBERG.fullmatch, listed(os.path.join(folder, mark)))):
        what, reader = _TABLES[mark]
        raise BadPass(
          f'{folder}: is {what}, whose {mark} says which of its files count; wanted the rows that '
          f'it has now, exported to files such as Parquet by {reader}'
        )


def files_of(path: str) -> list[LogFile]:
  """Returns the files of a pass, itself or those below a directory: part_9 before part_10.

  Files and directories whose names are no data (`is_data`) are left out.

  Raises:
    UserError: if there is no such file, or it is a device, a pipe or a socket.
    BadPass: if the directory has no files, is a table, holds one, or has one part in two forms, as
      x.csv and x.csv.gz.
  """
  with plain_errors(f'cannot read {path}'):
    files = _remote_files(path) if is_remote(path) else _local_files(os.path.expanduser(path))
  if isinstance(files, LogFile):
    return [files]
  inside = collections.defaultdict(set)  # {directory: names}
  for name in files:
    while name:
      name, child = os.path.split(name)
      inside[os.path.join(path, name) if name else path].add(child)
  refuse_tables(inside, lambda folder: inside.get(folder, ()))
  parts = sorted(filter(_is_part, files), key=natural_key)
  tell_left_out(path, files.keys() - parts)
  if not parts:
    raise BadPass(f'{path}: the directory holds no files; wanted part files of the pass')
  stems: dict[str, str] = {}
  for part in parts:
    if (other := stems.setdefault(_PERHAPS_SUFFIX.sub('', part, 1), part)) is not part:
      found = f'{os.path.join(path, other)} and {os.path.basename(part)}'
      raise BadPass(f'{found}: most likely the same records twice; wanted one, or another name')
  return [files[part] for part in parts]


def _is_part(name: str) -> bool:
  *folders, file = name.split('/')
  return is_data(file) and all(is_data(folder, True) for folder in folders)


def _remote_files(path: str) -> LogFile | dict[str, LogFile]:
  """Returns a remote file, or {relative path: file} of a remote directory."""
  info = file_system.info_of(path)
  if info.type == pyarrow.fs.FileType.NotFound:
    raise UserError(f'{path}: no such file')
  if info.is_file:
    return LogFile(path, info.size, info.mtime_ns or 0)
  return {
    below: LogFile(os.path.join(path, below), child.size, child.mtime_ns or 0, path)
    for below, child in retried(path, lambda: file_system.infos_below(path)).items()
    if child.is_file
  }


def _local_files(path: str) -> LogFile | dict[str, LogFile | None]:
  """Returns a local file, or {relative path: file} of a directory; None for what is no data."""
  if not os.path.isdir(path):
    return _local_file(path)
  here = os.path.realpath(os.path.dirname(os.path.abspath(path)))
  if (here + os.sep).startswith(os.path.realpath(path) + os.sep):
    raise BadPass(f'{path}: is a link to a directory that it lies in; wanted one of its own')

  def fail(error: OSError) -> None:
    raise error

  files = {}
  for folder, folders, names in os.walk(path, onerror=fail):
    below = os.path.relpath(folder, path)
    below = '' if below == os.curdir else f'{below}/'
    files |= {below + name: None for name in folders if not is_data(name, True)}
    folders[:] = [name for name in folders if is_data(name, True)]
    for name in folders:
      if os.path.islink(os.path.join(folder, name)):
        raise BadPass(f'{os.path.join(folder, name)}: is a link to a directory; wanted files')
    for name in names:
      files[below + name] = (
        _local_file(os.path.join(folder, name))._replace(below=path) if is_data(name) else None
      )
  return files


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


def stamp_of(files: Sequence[LogFile]) -> str | None:
  """Returns a hash of the names, sizes and times of a directory's files; None for a single file."""
  if not files or not files[0].below:
    return None
  text = repr([(os.path.relpath(f.path, f.below), f.bytes, f.mtime_ns) for f in files])
  return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def folder_columns(file: LogFile) -> tuple[dict[str, str | None], dict[str, str | None]]:
  """Returns the columns that the names of folders give a file: dt=31/x has the column dt, '31'.

  Returns two dicts {name: text}. The first has the columns of folders within the pass, if it is a
  folder. The second has those of the pass itself and of the folders directly above it. Names, texts
  and missing values are encoded as Hive does.
  """
  folders = os.path.dirname(absolute(file.path)).split('/')
  own = len(absolute(file.below).split('/')) if file.below else len(folders)
  above = itertools.takewhile(_HIVE.fullmatch, reversed(folders[:own]))
  inside = filter(_HIVE.fullmatch, folders[own:])

  def columns(folders: Iterable[str]) -> dict[str, str | None]:
    try:
      texts = [[urllib.parse.unquote(t, errors='strict') for t in f.split('=', 1)] for f in folders]
    except UnicodeDecodeError:
      raise BadPass(f'{file.path}: what its folders encode by % is not UTF-8') from None
    return {name: None if text == _MISSING else text for name, text in texts}

  return columns(inside), columns(reversed([*above]))
