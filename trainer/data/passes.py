"""Finds the passes among files: their names, their days and their order."""

import collections
import contextlib
import dataclasses
import datetime
import functools
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Sequence

from trainer.config import DAY_GROUPS, Data
from trainer.data.file_system import exists, is_remote, natural_key, normal, refusing, walk
from trainer.data.pass_files import (
  SUFFIX,
  fixed_folder,
  folders_above,
  is_data,
  matching,
  refuse_tables,
  tell_left_out,
)
from trainer.data.prepared import META, is_prepared, read_meta
from trainer.data.spans import Spans
from trainer.errors import BadPass, ConfigError, UserError, printable

DONE_MARKER = '.done'  # NAME.done announces the pass NAME beside it
DIRECTORY_MARKER = '_SUCCESS'  # announces all passes of its directory
_DATE = re.compile(r'([0-9]{4})-([0-9]{2})-([0-9]{2})')
_DIGITS = re.compile(r'[0-9]{1,18}')
_FOLDER_BYTES = 150  # of a folder's name; file systems allow 255, but suffixes are added


@dataclasses.dataclass(frozen=True)
class Pass:
  """A unit of input: a file or directory of the log, converted samples, or messages of a topic.

  Attributes:
    name: identifies the pass in reports; it has no suffix.
    path: where it lies, or the text that names its messages.
    day: a whole number; YYYYMMDD for a date.
    marker: the file in data.watch that announced the pass, if one did.
  """

  name: str
  path: str
  day: int = 0
  marker: str | None = None

  @functools.cached_property
  def spans(self) -> Spans | None:
    """The messages of the pass; None if it lies in files."""
    return Spans.of(self.path)

  @property
  def raw(self) -> str | Spans:
    """What is read: the path of files, or messages."""
    return self.spans or self.path

  def exists(self) -> bool:
    return self.spans is not None or exists(self.path)

  def refusing(self) -> contextlib.AbstractContextManager[None]:
    """Turns an error in reading the pass into a BadPass, as `file_system.refusing` says."""
    return refusing(self.path, of_topic=self.spans is not None)


def folder_name(name: str) -> str:
  """Returns a directory name for a pass's name, such as 'a+b' for 'a/b'; no two names share one."""
  folder = name.replace('%', '%25').replace('+', '%2B').replace(os.sep, '+')
  if len(folder.encode()) <= _FOLDER_BYTES:
    return folder
  digest = hashlib.sha256(name.encode()).hexdigest()
  return f'{folder.encode()[:_FOLDER_BYTES].decode(errors="ignore")}%{digest[:32]}'


def pass_day(data: Data, path: str) -> int | None:
  """Returns the day that data.day_pattern finds in a path, or None; UserError if it is no number.

  The last match counts, so a date in the directory is used if the file's name has none. A date,
  written 2024-01-31 or matched by three groups, becomes the number 20240131. The groups are year,
  month and day in this order, unless they have these names.
  """
  if data.day_pattern is None:
    return None
  matches = list(re.finditer(data.day_pattern, normal(path)))
  if not matches:
    return None
  named = matches[-1].groupdict()
  groups = (
    [str(named[name]) for name in DAY_GROUPS]
    if len(named) > 1
    else [*map(str, matches[-1].groups())]
  )
  text = '-'.join(groups) if len(groups) == 3 else groups[0]
  date = _DATE.fullmatch(text)
  parts = groups if len(groups) == 3 else date.groups() if date else [text]
  try:
    if not all(map(_DIGITS.fullmatch, parts)):
      raise ValueError('not whole numbers' if len(parts) == 3 else 'not a whole number')
    return int(text) if len(parts) == 1 else _number(datetime.date(*map(int, parts)))
  except (ValueError, OverflowError) as e:
    hint = r'; groups named year, month and day read any order, as (?P<day>\d+)'
    raise UserError(
      f'data.day_pattern: found {text[:40]!r} in {path}; wanted a whole number or a date as '
      f'2024-01-31 ({e}){hint * (not named)}'
    ) from None


def _number(date: datetime.date) -> int:
  return date.year * 10000 + date.month * 100 + date.day


def _date(day: int) -> datetime.date | None:
  """Returns the date of a day YYYYMMDD; None for a day that is no date."""
  try:
    return datetime.date(day // 10000, day // 100 % 100, day % 100) if is_date(day) else None
  except ValueError:
    return None


def is_date(day: int) -> bool:
  """Returns whether a day has the form YYYYMMDD; 20249999 does, although it is no date."""
  return 1900_01_01 <= day <= 9999_12_31


def days_ahead(day: int, later: int) -> int:
  """Returns the number of days from `day` to `later`; between dates, by the calendar."""
  start, end = _date(day), _date(later)
  return later - day if start is None or end is None else (end - start).days


def day_after(day: int) -> int:
  """Returns the next day; for a date, by the calendar."""
  date = _date(day)
  return day + 1 if date is None else _number(date + datetime.timedelta(1))


def days_between(day: int, later: int) -> list[int]:
  """Returns the days after `day` and before `later`, in order; at most the last 366 of them."""
  end = _date(later) if _date(day) else None
  gaps = range(min(days_ahead(day, later) - 1, 366), 0, -1)
  return [later - gap if end is None else _number(end - datetime.timedelta(gap)) for gap in gaps]


def _pass(data: Data, path: str, below: str, key: str, marker: str | None = None) -> Pass:
  """Returns the pass at a path; its name is the path relative to the directory `below`."""
  name = printable(SUFFIX.sub('', os.path.relpath(path, below)))
  if is_prepared(data, path):
    day = read_meta(path).get('day')
    if type(day) is not int:
      raise BadPass(f'{path}: its {META} has the day {day!r}; wanted a whole number')
    return Pass(name, path, day, marker)
  day = pass_day(data, path)
  if day is None and data.day_pattern is not None and key in ('data.train', 'data.watch'):
    raise UserError(
      f'{path}: data.day_pattern {data.day_pattern!r} does not match it; wanted a day in '
      "the file's name or path"
    )
  return Pass(name, path, day or 0, marker)


def in_order(all_passes: Iterable[Pass]) -> list[Pass]:
  """Sorts passes by day and then by name, in which digits count as numbers."""
  return sorted(all_passes, key=lambda p: (p.day, natural_key(p.name), p.path))


def _good_passes(
  paths: Iterable[str], pass_of: Callable[[str], Pass], wrong: dict[str, str] | None
) -> list[Pass]:
  """Makes the passes at `paths`; `wrong` collects mistakes, {path: text}, which else are raised."""
  good = []
  for path in paths:
    try:
      with refusing(path):
        good.append(pass_of(path))
    except BadPass as e:
      if wrong is None:
        raise
      wrong[path] = str(e)
  return good


def passes(
  data: Data, patterns: Sequence[str], key: str, wrong: dict[str, str] | None = None
) -> list[Pass]:
  """Returns the passes that match the patterns of a config key.

  Passes of data.train are sorted by day if data.day_pattern is set, and within a day in natural
  order: h_9 before h_10. Others are in natural order within each pattern. A pass's name is its path
  from the first wildcard of its pattern on, without suffix; or its whole path, if another pass
  would have the same name.

  Args:
    wrong: receives mistakes in individual passes, {path: text}; if None, the first is raised.
  Raises:
    UserError: if a pattern matches nothing, two passes have the same name, a training file has no
      day, or a directory is not a prepared pass.
  """
  by_path: dict[str, Pass] = {}
  for pattern in patterns:
    matched, below = map(normal, matching([pattern], key)), fixed_folder(pattern)
    new = _good_passes(matched, lambda path, below=below: _pass(data, path, below, key), wrong)
    for data_pass in in_order(new):
      by_path.setdefault(data_pass.path, data_pass)
  for path in by_path:
    for folder in by_path.keys() & {*folders_above(path)}:
      raise UserError(f"{key}: '{path}' lies in '{folder}', a pass too; wanted each file once")
  names = collections.Counter(p.name for p in by_path.values())
  named: dict[str, Pass] = {}
  for data_pass in by_path.values():
    if names[data_pass.name] > 1:
      name = printable(SUFFIX.sub('', data_pass.path).lstrip(os.sep))
      data_pass = dataclasses.replace(data_pass, name=name)
    other = named.setdefault(data_pass.name, data_pass)
    if other is not data_pass:
      raise UserError(
        f"{key}: '{other.path}' and '{data_pass.path}' are both named '{other.name}'; wanted "
        'distinct names'
      )
  by_day = data.day_pattern is not None and key == 'data.train'
  return in_order(named.values()) if by_day else list(named.values())


def also_trained(data: Data, split: str) -> list[str]:
  """Returns a line if data.valid or data.test, which `split` names, shares files with the log.

  They may share them through directories or links. The log is data.train, and what data.watch
  announces now.
  """
  real = lambda path: path if is_remote(path) else os.path.realpath(path)
  known = set(map(real, paths_of_log(data)))
  above = {folder for path in known for folder in folders_above(path)}
  held_out = matching(getattr(data, split), f'data.{split}')
  shared = [p for p in held_out if real(p) in known | above or known & {*folders_above(real(p))}]
  files = f'{len(shared)} of its files' if len(shared) > 1 else ''.join(shared)
  log = 'data.train or data.watch' if data.watch else 'data.train'
  told = f'data.{split}: {log} has {files} too, so its metrics say nothing of new samples'
  return [told] if shared else []


def paths_of_log(data: Data) -> list[str]:
  """Returns the paths of the passes of data.train and of those that data.watch announces now."""
  paths: list[str] = []
  with contextlib.suppress(ConfigError, OSError):  # what is not there is reported elsewhere
    paths += map(normal, matching(data.train, 'data.train'))
    paths += [p.path for p in announced(data)[0]] if data.watch else []
  return list(dict.fromkeys(paths))


def announced(
  data: Data,
  is_settled: Callable[[str], bool] = lambda path: False,
  settled: dict[str, set[str]] | None = None,
) -> tuple[list[Pass], list[str], dict[str, str]]:
  """Returns the passes that marker files in and below data.watch announce.

  NAME.done announces the pass NAME beside it. _SUCCESS announces every pass of its directory whose
  name does not begin with a dot or an underscore.

  Args:
    is_settled: path -> whether the pass there needs no more work; such passes are left out.
    settled: {directory: names in it that need no more work}, which this call passes over and brings
      up to date, so that each call looks only at what is left.
  Returns:
    The passes, by day and name; the paths of passes that are announced but missing; and what is
      wrong with the passes that were refused, {path: text}.
  """
  directory, of_prepared = normal(data.watch), data.format == 'prepared'
  markers: dict[str, str] = {}  # by the path of the pass
  missing: list[str] = []
  settled = {} if settled is None else settled
  walked: dict[str, set[str]] = {}  # {directory: what is in it}

  def fail(error: OSError) -> None:
    if error.filename == directory:
      raise error

  def is_prepared_pass(path: str) -> bool:
    return is_settled(path) or os.path.exists(os.path.join(path, META))

  for folder, folders, names in walk(directory, fail, settled):
    here = walked[folder] = {*folders, *names}
    marked = {n.removesuffix(DONE_MARKER): n for n in names if n.endswith(DONE_MARKER)}
    # A directory in a prepared pass is not a pass.
    inside = {n for n in folders if of_prepared and is_prepared_pass(os.path.join(folder, n))}
    if DIRECTORY_MARKER in names:
      for name in inside if of_prepared else names:
        if is_data(name):
          marked.setdefault(name, DIRECTORY_MARKER)
      tell_left_out(folder, [name for name in names if not is_data(name)])
    for name, marker in marked.items():
      path = os.path.join(folder, name)
      if is_settled(path):
        done = {name, marker} - {DIRECTORY_MARKER} - set(() if of_prepared else folders)
        settled.setdefault(folder, set()).update(done & here)
      elif name in here:
        markers[path] = os.path.join(folder, marker)
      else:
        missing.append(path)
    folders[:] = [name for name in folders if name not in inside]
  for folder in settled.keys() - walked.keys():
    del settled[folder]
  wrong: dict[str, str] = {}

  def pass_of(path: str) -> Pass:
    above = walked.keys() & {*folders_above(path)}
    refuse_tables(above, lambda folder: walked.get(folder, ()))
    return _pass(data, path, directory, 'data.watch', markers[path])

  good = _good_passes(markers, pass_of, wrong)
  return in_order(good), sorted(missing), wrong
