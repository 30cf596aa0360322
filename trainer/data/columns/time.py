"""Computes parts of a time, such as the hour, on the clock of a time zone.

Arithmetic is in int64, with operators that NumPy arrays and tensors share. A time zone is a table
of its UTC offsets and the times when they begin, made with Python's `zoneinfo`.
"""

import datetime
import functools
import zoneinfo
from collections.abc import Callable
from types import ModuleType

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import tensorflow as tf

from ops.library import TensorLike
from trainer import config
from trainer.data.columns.arrow_columns import ArrowReader, by_text
from trainer.data.columns.graph_columns import GraphColumn, GraphReader

DAY = 24 * 3600
# Seconds since 1970 of the years that are read, 1900 to 2199.
FIRST, END = (
  int(datetime.datetime(year, 1, 1, tzinfo=datetime.timezone.utc).timestamp())
  for year in (1900, 2200)
)
# Numbers of one log that count from 1970 tell their unit by their size: as seconds, milliseconds, …
# they lie in the years 1973 to 2199.
LEAST = 10**8
UNITS = {'seconds': 1, 'milliseconds': 10**3, 'microseconds': 10**6, 'nanoseconds': 10**9}
WANTED = {
  'iso': 'a time as 2024-01-31T13:05:00, of the years 1900 to 2199',
  'seconds': 'whole seconds since 1970, of the years 1900 to 2199',
  'milliseconds': 'whole milliseconds since 1970, not seconds, of the years 1900 to 2199',
  'yyyymmddHH': 'a time as 2024013113, of the years 1900 to 2199',
}
_STEP = 5 * DAY  # every UTC offset of a zone lasts at least so long
# Groups match whole numbers. An absent month or day counts as 1, another absent group as 0.
_PATTERNS = {
  'iso': (
    r'^(?P<year>\d{4})-(?P<month>\d\d)-(?P<day>\d\d)'
    r'(?:[T ](?P<hour>\d\d)(?::(?P<minute>\d\d)(?::(?P<second>\d\d)(?:\.\d{1,9})?)?)?'
    r'(?:(?:\+(?P<east>\d\d)|-(?P<west>\d\d)):?(?P<minutes>\d\d))?)?$'
  ),
  'yyyymmddHH': (
    r'^(?P<year>\d{4})(?P<month>\d\d)(?P<day>\d\d)(?P<hour>\d\d)(?P<minute>)(?P<second>)(?:\.0+)?$'
  ),
  'seconds': r'^(?P<number>-?\d{1,15})(?:\.0+)?$',
  'milliseconds': r'^(?P<number>-?\d{1,15})(?:\.0+)?$',
}
_ZULU = 'Z$', '+0000'  # Z is another way to write the offset +0000
_PARTS = ('year', 'month', 'day', 'hour', 'minute', 'second')


def is_unit(numbers: TensorLike, unit: str) -> TensorLike:
  """Returns which numbers, as a unit of UNITS, are times since 1970, of the years 1973 to 2199."""
  return (numbers >= LEAST * UNITS[unit]) & (numbers < END * UNITS[unit])


@functools.cache
def transitions(zone: str) -> tuple[np.ndarray, np.ndarray]:
  """Returns when each UTC offset of a zone begins, and the offset, both in seconds, int64 [t]."""
  clock = zoneinfo.ZoneInfo(zone)

  def offset(seconds: int) -> int:
    at = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
    at += datetime.timedelta(seconds=seconds)
    return int(at.astimezone(clock).utcoffset().total_seconds())

  begins, offsets = [FIRST], [offset(FIRST)]
  for at in range(FIRST + _STEP, END, _STEP):
    if (new := offset(at)) == offsets[-1]:
      continue
    low, high = at - _STEP, at  # the offset changes in (low, high]
    while high - low > 1:
      middle = (low + high) // 2
      low, high = (middle, high) if offset(middle) == offsets[-1] else (low, middle)
    begins.append(high)
    offsets.append(new)
  return np.array(begins, np.int64), np.array(offsets, np.int64)


def _days(year: TensorLike, month: TensorLike, day: TensorLike) -> TensorLike:
  """Returns the number of days from 1970-01-01 to a date; in the formula, leap days come last.

  https://howardhinnant.github.io/date_algorithms.html#days_from_civil
  """
  months = month + 9 - (month + 9) // 12 * 12  # March is 0
  year = year - (13 - month) // 11  # January and February belong to the year before
  return year * 365 + year // 4 - year // 100 + year // 400 + (months * 153 + 2) // 5 + day - 719469


def _date(days: TensorLike) -> tuple[TensorLike, TensorLike]:
  """Returns the month and the day of the month of a date, given as days since 1970."""
  days = days + 719468
  of_era = days - days // 146097 * 146097
  year = (of_era - of_era // 1460 + of_era // 36524 - of_era // 146096) // 365
  of_year = of_era - (365 * year + year // 4 - year // 100)
  month = (5 * of_year + 2) // 153  # March is 0
  return (month + 2) - (month + 2) // 12 * 12 + 1, of_year - (153 * month + 2) // 5 + 1


def _is_date(year: TensorLike, month: TensorLike, day: TensorLike) -> TensorLike:
  """Returns whether a date exists: converted to days and back, it must stay the same."""
  there = _date(_days(year, month, day))
  return (month >= 1) & (month <= 12) & (day >= 1) & (there[0] == month) & (there[1] == day)


def _part(part: str, local: TensorLike) -> TensorLike:
  """Returns one part of times, int64; `local` is in seconds since 1970 on the zone's clock."""
  days = local // DAY
  weekday = (days + 3) - (days + 3) // 7 * 7  # 1970 began on a Thursday
  parts = {
    'hour': lambda: (local - days * DAY) // 3600,
    'weekday': lambda: weekday,
    'is_weekend': lambda: weekday // 5,
    'month': lambda: _date(days)[0],
    'day': lambda: _date(days)[1],
  }
  return parts[part]()


def _read(
  is_time: TensorLike, group: Callable[[str, int], TensorLike], made: config.Time, xp: ModuleType
) -> tuple[TensorLike, TensorLike, TensorLike]:
  """Reads texts as times, in UTC and on the zone's clock, in seconds; returns these and is_time.

  When clocks change, a time that occurs twice means the first of the two, and a skipped one is
  converted with the offset before the change. `is_time` says which texts match the unit's pattern;
  `group(name, default)` gives the number that a group matches in each text, int64.
  """
  if made.unit in UNITS:
    number = group('number', 0)
    seconds = number // UNITS[made.unit]
    is_time &= (made.unit == 'seconds') | ~is_unit(number, 'seconds')  # as milliseconds, of 1970
    is_utc = is_time | True
  else:
    year, month, day, hour, minute, second = (group(n, int(n in _PARTS[:3])) for n in _PARTS)
    seconds = ((_days(year, month, day) * 24 + hour) * 60 + minute) * 60 + second
    is_time &= _is_date(year, month, day) & (hour < 24) & (minute < 60) & (second < 60)
    is_utc = is_time & False
  if made.unit == 'iso':
    east, west, minutes = group('east', -1), group('west', -1), group('minutes', 0)
    hours = xp.maximum(xp.maximum(east, west), 0)
    shift = (hours * 60 + minutes) * 60
    seconds = xp.where(west < 0, seconds - shift, seconds + shift)
    is_utc = (east >= 0) | (west >= 0)
    is_time &= (hours < 24) & (minutes < 60)
  begins, offsets = transitions(made.zone)
  # On the zone's clock, an offset begins after the hours that happen twice or are left out.
  starts = begins + np.maximum(offsets, np.concatenate([offsets[:1], offsets[:-1]]))
  take = np.take if xp is np else tf.gather
  of_utc, of_clock = (
    take(offsets, xp.maximum(xp.searchsorted(places, seconds, side='right') - 1, 0))
    for places in (begins, np.maximum.accumulate(starts))
  )
  utc = xp.where(is_utc, seconds, seconds - of_clock)
  local = xp.where(is_utc, seconds + of_utc, seconds)
  return utc, local, is_time & (utc >= FIRST) & (utc < END)


def _arrow_times(
  name: str, made: config.Time, reader: ArrowReader
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Reads a column's texts as times, as `_read` does; drops records whose text is no time."""

  def read() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    unit, column = made.unit, reader.texts(name, WANTED[made.unit])
    texts = column.dictionary
    fields = pc.extract_regex(pc.replace_substring_regex(texts, *_ZULU), _PATTERNS[unit])

    digits = pc.coalesce(pa.concat_arrays(fields.flatten()), '')  # of all groups, one after another
    is_absent = pc.equal(digits, '')
    numbers = pc.if_else(is_absent, '0', digits).cast(pa.int64()).to_numpy()
    is_absent = is_absent.to_numpy(zero_copy_only=False)

    def group(name: str, default: int) -> np.ndarray:
      begin = len(texts) * fields.type.get_field_index(name)
      own = slice(begin, begin + len(texts))
      return np.where(is_absent[own], default, numbers[own])

    is_matched = ~fields.is_null().to_numpy(zero_copy_only=False)
    utc, local, is_time = _read(is_matched, group, made, np)
    wrong = ~texts.is_null().to_numpy(zero_copy_only=False) & ~is_time
    wanted = WANTED[unit]
    if unit == 'iso' and wrong.any():
      # The texts may be seconds since 1970, where 2024-01-31T13:05:00 is wanted, or 31.01.2024.
      is_number = pc.match_substring_regex(texts, r'^\d+(\.0+)?$').fill_null(False)
      is_number = is_number.to_numpy(zero_copy_only=False)
      if (wrong & is_number).any():
        wanted += ' (unit: seconds, milliseconds or yyyymmddHH reads numbers)'
      elif (wrong & fields.is_null().to_numpy(zero_copy_only=False)).any():
        take = rf"from: {{text: {name}, match: ' (\d+):'}}"
        wanted += f' ({take} takes a part, as the hour, of a text written otherwise)'
    reader.drop(by_text(column, wrong, False), name, wanted)
    return tuple(by_text(column, values, 0) for values in (utc, local, is_time))

  return reader.once(('time', name, made.unit, made.zone), read)


def arrow(made: config.Time, reader: ArrowReader) -> pa.Array:
  utc, local, is_time = _arrow_times(made.time, made, reader)
  if made.since is None:
    return pa.array(_part(made.part, local), mask=~is_time)
  since, _, is_since = _arrow_times(made.since, made, reader)
  return pa.array((utc - since) / 60, mask=~(is_time & is_since))


def _graph_times(
  name: str, made: config.Time, reader: GraphReader
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
  """Reads a column's texts as times, with TensorFlow ops.

  Returns the times in UTC and on the zone's clock, in seconds, and which texts are times.
  """
  pattern = _PATTERNS[made.unit]
  texts = tf.strings.regex_replace(reader.texts(name), *_ZULU)
  is_matched = tf.strings.regex_full_match(texts, pattern)
  texts = tf.where(is_matched, texts, '')

  def group(name: str, default: int) -> tf.Tensor:
    before, named, _ = pattern.partition(f'(?P<{name}>')
    digits = tf.strings.regex_replace(texts, pattern, f'\\{(before + named).count("(?P<")}')
    return tf.strings.to_number(tf.where(tf.equal(digits, ''), str(default), digits), tf.int64)

  return _read(is_matched, group, made, tf)


def graph(made: config.Time, reader: GraphReader) -> GraphColumn:
  utc, local, is_time = _graph_times(made.time, made, reader)
  if made.since is None:
    numbers = tf.cast(_part(made.part, local), tf.float64)
  else:
    since, _, is_since = _graph_times(made.since, made, reader)
    numbers, is_time = tf.cast(utc - since, tf.float64) / 60, is_time & is_since
  return GraphColumn.single(tf.where(is_time, numbers, np.nan))
