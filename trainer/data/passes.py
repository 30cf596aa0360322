"""Which files are passes, in which order, of which day."""

import dataclasses
import os
import re

from trainer.config import expand
from trainer.data.prepared import read_meta
from trainer.errors import UserError

SUFFIX = re.compile(r'\.(csv|tsv|txt|data|test|parquet)(\.(gz|bz2|zst|lz4))?$')


@dataclasses.dataclass(frozen=True)
class Pass:
  """A unit of input: a raw file or a prepared directory."""

  name: str
  path: str
  day: int = 0


def pass_day(cfg, path):
  """The day that data.day_pattern finds in the file's name, or None.

  Raises: UserError where what it finds is no integer.
  """
  if cfg.data.day_pattern is None:
    return None
  name = os.path.basename(os.path.normpath(path))
  found = re.search(cfg.data.day_pattern, name)
  if found is None:
    return None
  try:
    return int(found.group(1))
  except (ValueError, TypeError):
    raise UserError(
      f"data.day_pattern: found {found.group(1)!r} in the name '{name}'; wanted an integer"
    ) from None


def passes(cfg, patterns, key):
  """The passes that `patterns` (the value of config key `key`) name, a pattern at a time, each in
  name order.

  The day comes from data.day_pattern (required to match training files; 0 where there is none), or
  from the meta.json of a prepared pass.

  Raises: UserError where a pattern matches nothing, two passes have one name, a training file no
    day, or a prepared pass is none.
  """
  found = {}
  for path in expand(patterns, key):
    path = os.path.normpath(path)
    if cfg.data.format == 'prepared':
      one = Pass(os.path.basename(path), path, read_meta(path)['day'])
    else:
      day = pass_day(cfg, path)
      if day is None and cfg.data.day_pattern is not None and key in ('data.train', 'data.watch'):
        raise UserError(
          f"{path}: data.day_pattern {cfg.data.day_pattern!r} does not match the file's name; "
          'wanted a day in it'
        )
      one = Pass(SUFFIX.sub('', os.path.basename(path)), path, day or 0)
    if one.name in found:
      raise UserError(
        f"{key}: '{found[one.name].path}' and '{path}' are both named '{one.name}'; wanted "
        'distinct names'
      )
    found[one.name] = one
  return list(found.values())
