"""Which files are passes, what they are called, of which day they are, and in which order."""

import collections
import dataclasses
import datetime
import glob
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Sequence

from trainer.config import Config
from trainer.data.log_files import (
  CODECS,
  CSV_SUFFIXES,
  SUFFIXES,
  matching,
  natural_key,
  normal,
  refusing,
  walk,
)
from trainer.data.prepared import META, is_prepared, read_meta
from trainer.errors import BadPass, UserError, printable

_FORMATS = '|'.join(map(re.escape, [*CSV_SUFFIXES, *SUFFIXES]))
_CODECS = '|'.join(map(re.escape, CODECS))
SUFFIX = re.compile(rf'({_FORMATS})({_CODECS})?$')
DONE_MARKER = '.done'  # NAME.done announces the pass NAME beside it
DIRECTORY_MARKER = '_SUCCESS'  # announces all passes of its directory
_DATE = re.compile(r'([0-9]{4})-([0-9]{2})-([0-9]{2})')
_NUMBER = re.compile(r'[0-9]{1,18}')
_FOLDER_BYTES = 150  # of a converted pass's name; a file system takes 255, what is added included


@dataclasses.dataclass(frozen=True)
class Pass:
  """A unit of input: a raw file or a prepared directory.

  Attributes:
    name: tells it from all others in reports; it has no suffix.
    path: where it lies.
    day: a whole number; of a date YYYYMMDD.
    marker: the file that announced it, in watch mode.
  """

  name: str
  path: str
  day: int = 0
  marker: str | None = None


def folder_name(name: str) -> str:
  """A pass's name as that of one directory, 'a/b' as 'a+b'; different names give different ones."""
  folder = name.replace('%', '%25').replace('+', '%2B').replace(os.sep, '+')
  if len(folder.encode()) <= _FOLDER_BYTES:
    return folder
  digest = hashlib.sha256(name.encode()).hexdigest()
  return f'{folder.encode()[:_FOLDER_BYTES].decode(errors="ignore")}%{digest[:32]}'


def pass_day(cfg: Config, path: str) -> int | None:
  """The day that data.day_pattern finds in a path, or None.

  The last place where it matches counts, so that a directory's date serves where the file's name
  has none. A date, as 2024-01-31 or as three groups, is the number 20240131.

  Raises:
    UserError: where what it finds is neither a whole number nor a date.
  """
  if cfg.data.day_pattern is None:
    return None
  found = None
  for found in re.finditer(cfg.data.day_pattern, normal(path)):
    pass
  if found is None:
    return None
  groups = found.groups()
  text = '-'.join(map(str, groups)) if len(groups) == 3 else str(groups[0])
  try:
    if len(groups) == 3:
      if not all(map(_NUMBER.fullmatch, map(str, groups))):
        raise ValueError('not three whole numbers')
      return _number(datetime.date(*map(int, groups)))
    if date := _DATE.fullmatch(text):
      return _number(datetime.date(*map(int, date.groups())))
    if _NUMBER.fullmatch(text):
      return int(text)
    raise ValueError('not a whole number')
  except (ValueError, OverflowError) as e:
    raise UserError(
      f'data.day_pattern: found {text[:40]!r} in {path}; wanted a whole number or a date as '
      f'2024-01-31 ({e})'
    ) from None


def _number(date: datetime.date) -> int:
  return date.year * 10000 + date.month * 100 + date.day


def _date(day: int) -> datetime.date | None:
  """The date that a day YYYYMMDD is; None where it is a plain number."""
  try:
    return datetime.date(day // 10000, day // 100 % 100, day % 100) if is_date(day) else None
  except (ValueError, OverflowError):
    return None


def is_date(day: int) -> bool:
  """Whether a day has the eight digits of a date; day 90000000 is a wrong one."""
  return 1900_01_01 <= day <= 9999_12_31


def day_after(day: int) -> int:
  """The day that follows: of dates by the calendar."""
  date = _date(day)
  return day + 1 if date is None else _number(date + datetime.timedelta(1))


def days_between(day: int, later: int, at_most: int = 366) -> list[int]:
  """The days after `day` and before `later`, in order; of a long gap the last `at_most`."""
  start, end = _date(day), _date(later)
  if start is None or end is None:
    return list(range(max(day + 1, later - at_most), later))
  gap = (end - start).days - 1
  return [
    _number(end - datetime.timedelta(back)) for back in range(min(max(gap, 0), at_most), 0, -1)
  ]


def days_ahead(day: int, later: int) -> int:
  """How many days after `day` the day `later` is; of dates by the calendar."""
  start, end = _date(day), _date(later)
  return later - day if start is None or end is None else (end - start).days


def _fixed(pattern: str) -> str:
  """The directories of a pattern before its first wildcard."""
  pattern = normal(pattern)
  while glob.has_magic(os.path.dirname(pattern)):
    pattern = os.path.dirname(pattern)
  return os.path.dirname(pattern) or os.curdir


def _pass(cfg: Config, path: str, below: str, key: str, marker: str | None = None) -> Pass:
  """The pass at a path, named as seen from the directory `below`."""
  name = printable(SUFFIX.sub('', os.path.relpath(path, below)))
  if is_prepared(cfg.data, path):
    day = read_meta(path).get('day')
    if type(day) is not int:
      raise BadPass(f'{path}: its {META} has the day {day!r}; wanted a whole number')
    return Pass(name, path, day, marker)
  day = pass_day(cfg, path)
  if day is None and cfg.data.day_pattern is not None and key in ('data.train', 'data.watch'):
    raise UserError(
      f'{path}: data.day_pattern {cfg.data.day_pattern!r} does not match it; wanted a day in '
      "the file's name or path"
    )
  return Pass(name, path, day or 0, marker)


def in_order(found: Iterable[Pass]) -> list[Pass]:
  """Passes by day, those of one day by name, numbers in it as numbers."""
  return sorted(found, key=lambda one: (one.day, natural_key(one.name), one.path))


def _good_passes(
  paths: Iterable[str], pass_of: Callable[[str], Pass], wrong: dict[str, str] | None
) -> list[Pass]:
  """The passes at some paths. What is wrong with others goes into `wrong`, or is raised."""
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
  cfg: Config, patterns: Sequence[str], key: str, wrong: dict[str, str] | None = None
) -> list[Pass]:
  """The passes that `patterns` (the value of config key `key`) name.

  Those to train on stand by day, then naturally; others, and where there are no days, a pattern at
  a time, naturally within it. A pass is named by its path from its pattern's first wildcard on,
  without suffix; where two would have one name, by their whole paths.

  Args:
    cfg: the config.
    patterns: of paths.
    key: the config key that they are of.
    wrong: takes what is wrong with single passes, by path; None: that is raised.
  Raises:
    UserError: where a pattern matches nothing, two passes have one name, a training file no day, or
      a prepared pass is none.
  """
  found: dict[str, Pass] = {}  # by path
  for pattern in patterns:
    matched, below = map(normal, matching([pattern], key)), _fixed(pattern)
    new = _good_passes(matched, lambda path, below=below: _pass(cfg, path, below, key), wrong)
    found |= {one.path: found.get(one.path, one) for one in in_order(new)}
  names = collections.Counter(one.name for one in found.values())
  named: dict[str, Pass] = {}
  for one in found.values():
    if names[one.name] > 1:
      one = dataclasses.replace(one, name=printable(SUFFIX.sub('', one.path).lstrip(os.sep)))
    if one.name in named:
      raise UserError(
        f"{key}: '{named[one.name].path}' and '{one.path}' are both named '{one.name}'; wanted "
        'distinct names'
      )
    named[one.name] = one
  by_day = cfg.data.day_pattern is not None and key == 'data.train'
  return in_order(named.values()) if by_day else list(named.values())


def announced(
  cfg: Config, is_settled: Callable[[str], bool] = lambda path: False
) -> tuple[list[Pass], list[str], dict[str, str]]:
  """What the markers in and below data.watch announce.

  NAME.done announces the pass NAME beside it, _SUCCESS every pass of its directory. Names that
  begin with a dot or an underscore are no passes.

  Args:
    cfg: the config.
    is_settled: whether nothing is to be known of the pass at a path any more: it costs no look.
  Returns:
    The passes, in order; the paths of passes that are announced and not there; and by path what is
    wrong with others.
  Raises:
    OSError: where the directory cannot be read.
  """
  directory = normal(cfg.data.watch)
  markers: dict[str, str] = {}  # by the path of the pass
  missing: list[str] = []

  def fail(error: OSError) -> None:
    if error.filename == directory:
      raise error

  def is_pass(path: str) -> bool:
    return is_settled(path) or os.path.exists(os.path.join(path, META))

  for folder, folders, names in walk(directory, fail):
    here = {*folders, *names}
    marked = {n.removesuffix(DONE_MARKER): n for n in names if n.endswith(DONE_MARKER)}
    if DIRECTORY_MARKER in names:
      is_prepared = cfg.data.format == 'prepared'
      for name in folders if is_prepared else names:
        if not name.startswith(('.', '_')) and not name.endswith(DONE_MARKER):
          if not is_prepared or is_pass(os.path.join(folder, name)):
            marked.setdefault(name, DIRECTORY_MARKER)
    for name, marker in marked.items():
      path = os.path.join(folder, name)
      if is_settled(path):
        continue
      if name in here:
        markers[path] = os.path.join(folder, marker)
      else:
        missing.append(path)
    if cfg.data.format == 'prepared':  # what lies in a pass is none
      folders[:] = [name for name in folders if not is_pass(os.path.join(folder, name))]
  wrong: dict[str, str] = {}
  found = _good_passes(
    markers, lambda path: _pass(cfg, path, directory, 'data.watch', markers[path]), wrong
  )
  return in_order(found), sorted(missing), wrong
