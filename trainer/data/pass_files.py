"""The files of a pass: one file, or those below a directory."""

import os
import re
import stat

import pyarrow.fs

from trainer.data.file_system import LogFile, info_of, infos_below, is_remote, natural_key, retried
from trainer.errors import BadPass, UserError, plain_errors


def files_of(path: str) -> list[LogFile]:
  """Returns the files of a pass, itself or those below a directory: part_9 before part_10.

  Files whose names begin with . or _ (such as _SUCCESS), and .crc files, are left out.

  Raises:
    UserError: if there is no such file, or it is a device, a pipe or a socket.
    BadPass: if the directory contains no files.
  """
  with plain_errors(f'cannot read {path}'):
    files = _remote_files(path) if is_remote(path) else _local_files(os.path.expanduser(path))
  if isinstance(files, LogFile):
    return [files]
  parts = [p for p in files if not (any(map(_is_hidden, p.split('/'))) or p.endswith('.crc'))]
  if not parts:
    raise BadPass(f'{path}: the directory holds no files; wanted part files of the pass')
  return [files[part] for part in sorted(parts, key=natural_key)]


def _is_hidden(name: str) -> bool:
  return name.startswith(('.', '_'))


def _remote_files(path: str) -> LogFile | dict[str, LogFile]:
  """Returns a remote file, or {relative path: file} of a remote directory."""
  info = info_of(path)
  if info.type == pyarrow.fs.FileType.NotFound:
    raise UserError(f'{path}: no such file')
  if info.is_file:
    return LogFile(path, info.size, info.mtime_ns or 0)
  return {
    below: LogFile(os.path.join(path, below), child.size, child.mtime_ns or 0)
    for below, child in retried(path, lambda: infos_below(path)).items()
    if child.is_file
  }


def _local_files(path: str) -> LogFile | dict[str, LogFile]:
  """Returns a local file, or {relative path: file} of the visible files of a directory."""
  if not os.path.isdir(path):
    return _local_file(path)
  here = os.path.realpath(os.path.dirname(os.path.abspath(path)))
  if (here + os.sep).startswith(os.path.realpath(path) + os.sep):
    raise BadPass(f'{path}: is a link to a directory that it lies in; wanted one of its own')

  def fail(error: OSError) -> None:
    raise error

  files = {}
  for folder, folders, names in os.walk(path, onerror=fail):
    folders[:] = [name for name in folders if not _is_hidden(name)]
    for name in folders:
      if os.path.islink(os.path.join(folder, name)):
        raise BadPass(f'{os.path.join(folder, name)}: is a link to a directory; wanted files')
    for file in (os.path.join(folder, name) for name in names if not _is_hidden(name)):
      files[os.path.relpath(file, path)] = _local_file(file)
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


def partition_columns(path: str) -> dict[str, str]:
  """Returns the Hive partition columns of a path: {'dt': '31', 'hour': '3'} for dt=31/hour=3/x."""
  folders = re.split(r'[/\\]', path)[:-1]
  return dict(f.split('=', 1) for f in folders if re.fullmatch(r'[A-Za-z_][\w.-]*=.*', f))
