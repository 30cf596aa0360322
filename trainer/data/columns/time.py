"""Parts of a time, on the clock of a time zone.

All arithmetic is of int64 and written once: with operators, for NumPy arrays and tensors alike. A
time zone is a table of the offsets from UTC and when each begins, made from Python's `zoneinfo`.
"""

import datetime
import functools
import types
import zoneinfo
from collections.abc import Sequence

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
WANTED = {
  'iso': 'a time as 2024-01-31T13:05:00, of the years 1900 to 2199',
  'seconds': 'whole seconds since 1970, of the years 1900 to 2199',
  'milliseconds': 'whole milliseconds since 1970, of the years 1900 to 2199',
  'yyyymmddHH': 'a time as 2024013113, of the years 1900 to 2199',
}
_STEP = 5 * DAY  # no offset lasts shorter
# The groups of each unit are whole numbers; a group that is absent is 0, or 1 of month and day.
_PATTERNS = {
  'iso': (
    r'^(?P<year>\d{4})-(?P<month>\d\d)-(?P<day>\d\d)'
    r'(?:[T ](?P<hour>\d\d)(?::(?P<minute>\d\d)(?::(?P<second>\d\d)(?:\.\d{1,9})?)?)?'
    r'(?P<offset>Z|[+-]\d\d:?\d\d)?)?$'
  ),
  'yyyymmddHH': r'^(?P<year>\d{4})(?P<month>\d\d)(?P<day>\d\d)(?P<hour>\d\d)(?:\.0+)?$',
  'seconds': r'^(?P<number>-?\d{1,15})(?:\.0+)?$',
  'milliseconds': r'^(?P<number>-?\d{1,15})(?:\.0+)?$',
}
_OFFSET = r'^(?P<sign>[+-])(?P<hours>\d\d):?(?P<minutes>\d\d)$'
_PARTS = ('year', 'month', 'day', 'hour', 'minute', 'second')


@functools.cache
def transitions(zone: str) -> tuple[np.ndarray, np.ndarray]:
  """Returns when each offset of a zone begins, in seconds since 1970, and the offset in seconds."""
  clock = zoneinfo.ZoneInfo(zone)

  def offset(seconds: int) -> int:
    at = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
    at += datetime.timedelta(seconds=seconds)
    return int(at.astimezone(clock).utcoffset().total_seconds())

  begins, offsets = [FIRST], [offset(FIRST)]
  for at in range(FIRST + _STEP, END, _STEP):
    if (found := offset(at)) == offsets[-1]:
      continue
    low, high = at - _STEP, at  # the offset changes in (low, high]
    while high - low > 1:
      middle = (low + high) // 2
      low, high = (middle, high) if offset(middle) == offsets[-1] else (low, middle)
    begins.append(high)
    offsets.append(found)
  return np.array(begins, np.int64), np.array(offsets, np.int64)


def _days(year: TensorLike, month: TensorLike, day: TensorLike) -> TensorLike:
  """Returns the days from 1970 to a date. A year begins in March: a leap day is its last.

  https://howardhinnant.github.io/date_algorithms.html#days_from_civil
  """
  months = month + 9 - (month + 9) // 12 * 12  # March is 0
  year = year - (13 - month) // 11  # of January and February the year before
  return year * 365 + year // 4 - year // 100 + year // 400 + (months * 153 + 2) // 5 + day - 719469


def _date(days: TensorLike) -> tuple[TensorLike, TensorLike]:
  """Returns the month and the day of the month of a day, given as days since 1970."""
  days = days + 719468
  of_era = days - days // 146097 * 146097
  year = (of_era - of_era // 1460 + of_era // 36524 - of_era // 146096) // 365
  of_year = of_era - (365 * year + year // 4 - year // 100)
  month = (5 * of_year + 2) // 153  # March is 0
  return (month + 2) - (month + 2) // 12 * 12 + 1, of_year - (153 * month + 2) // 5 + 1


def _is_date(year: TensorLike, month: TensorLike, day: TensorLike) -> TensorLike:
  """Returns whether there is such a date: converted to days and back, it must be the same."""
  there = _date(_days(year, month, day))
  return (month >= 1) & (month <= 12) & (day >= 1) & (there[0] == month) & (there[1] == day)


def _part(part: str, local: TensorLike) -> TensorLike:
  """Returns a part of times, such as the hour; times are seconds on the zone's clock."""
  days = local // DAY
  weekday = (days + 3) - (days + 3) // 7 * 7  # 1970 began on a Thursday
  match part:
    case 'hour':
      return (local - days * DAY) // 3600
    case 'weekday':
      return weekday
    case 'is_weekend':
      return weekday // 5
    case 'month':
      return _date(days)[0]
    case 'day':
      return _date(days)[1]


# Arrow


def _integers(texts: pa.Array, name: str, fields: pa.StructArray, default: int) -> np.ndarray:
  """Returns what a named group of the pattern matches in each text, int64; else `default`."""
  if name not in [field.name for field in fields.type]:
    return np.full([len(texts)], default, np.int64)
  found = pc.struct_field(fields, name)
  absent = pc.equal(pc.binary_length(found), 0)
  found = pc.if_else(absent, str(default), found).fill_null(str(default))
  return found.cast(pa.int64()).to_numpy(zero_copy_only=False)


def _clock_of_texts(texts: pa.Array, unit: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Reads distinct texts. Returns: seconds, whether they are UTC, and whether each is a time."""
  fields = pc.extract_regex(texts, pattern=_PATTERNS[unit])
  is_time = ~fields.is_null().to_numpy(zero_copy_only=False)
  if unit in ('seconds', 'milliseconds'):
    number = _integers(texts, 'number', fields, 0)
    return number // (1000 if unit == 'milliseconds' else 1), np.ones_like(is_time), is_time
  parts = [_integers(texts, name, fields, int(name in _PARTS[:3])) for name in _PARTS]
  seconds = _seconds(parts)
  is_time &= _is_valid(parts)
  if unit != 'iso':
    return seconds, np.zeros_like(is_time), is_time
  offset = pc.struct_field(fields, 'offset').fill_null('')
  fields = pc.extract_regex(offset, pattern=_OFFSET)
  hours, minutes = (_integers(texts, name, fields, 0) for name in ('hours', 'minutes'))
  is_negative = pc.starts_with(offset, '-').to_numpy(zero_copy_only=False)
  shift = (hours * 60 + minutes) * 60 * np.where(is_negative, -1, 1)
  is_utc = pc.greater(pc.binary_length(offset), 0).to_numpy(zero_copy_only=False)
  return seconds - shift, is_utc, is_time & (hours < 24) & (minutes < 60)


def _seconds(parts: Sequence[TensorLike]) -> TensorLike:
  year, month, day, hour, minute, second = parts
  return ((_days(year, month, day) * 24 + hour) * 60 + minute) * 60 + second


def _is_valid(parts: Sequence[TensorLike]) -> TensorLike:
  year, month, day, hour, minute, second = parts
  return _is_date(year, month, day) & (hour < 24) & (minute < 60) & (second < 60)


def _arrow_times(
  name: str, unit: str, zone: str, reader: ArrowReader
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns each record's time in seconds, in UTC and on the zone's clock, and which have one."""

  def read() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    texts = reader.texts(name, WANTED[unit])
    seconds, is_utc, is_time = _clock_of_texts(texts.dictionary, unit)
    utc, local = _clocks(seconds, is_utc, zone, np)
    is_time &= (utc >= FIRST) & (utc < END)
    is_text = ~texts.dictionary.is_null().to_numpy(zero_copy_only=False)
    wrong = is_text & ~is_time
    # Such as seconds since 1970 in place of 2024-01-31T13:05:00.
    is_number = pc.match_substring_regex(texts.dictionary, r'^\d+(\.0+)?$')
    is_number = unit == 'iso' and (wrong & is_number.fill_null(False).to_numpy(False)).any()
    wanted = WANTED[unit] + is_number * ' (unit: seconds, milliseconds or yyyymmddHH reads numbers)'
    reader.drop(by_text(texts, wrong, False), name, wanted)
    return tuple(by_text(texts, values, 0) for values in (utc, local, is_time))

  return reader.once(('time', name, unit, zone), read)


def _clocks(
  seconds: TensorLike, is_utc: TensorLike, zone: str, xp: types.ModuleType
) -> tuple[TensorLike, TensorLike]:
  """Returns times in UTC and on a zone's clock.

  Where clocks change, an hour may happen twice: the first one is taken. An hour that is left out is
  converted by the offset before the change.

  Args:
    seconds: seconds in UTC, or on the zone's clock.
    is_utc: whether each is in UTC.
    zone: the name of the zone.
    xp: NumPy or TensorFlow, for searchsorted and where.
  """
  begins, offsets = transitions(zone)
  # On the clock an offset begins behind what happens twice or is left out.
  starts = begins + np.maximum(offsets, np.concatenate([offsets[:1], offsets[:-1]]))
  starts = np.maximum.accumulate(starts)
  if xp is np:
    of_utc = offsets[np.maximum(np.searchsorted(begins, seconds, side='right') - 1, 0)]
    of_clock = offsets[np.maximum(np.searchsorted(starts, seconds, side='right') - 1, 0)]
  else:
    found = [tf.searchsorted(tf.constant(b), seconds, side='right') - 1 for b in (begins, starts)]
    of_utc, of_clock = (tf.gather(tf.constant(offsets), tf.maximum(at, 0)) for at in found)
  return xp.where(is_utc, seconds, seconds - of_clock), xp.where(is_utc, seconds + of_utc, seconds)


def arrow(made: config.Time, reader: ArrowReader) -> pa.Array:
  utc, local, is_time = _arrow_times(made.time, made.unit, made.zone, reader)
  if made.since is None:
    return pa.array(_part(made.part, local), mask=~is_time)
  since, _, is_since = _arrow_times(made.since, made.unit, made.zone, reader)
  return pa.array((utc - since) / 60, mask=~(is_time & is_since))


# TensorFlow


def _graph_integers(texts: tf.Tensor, pattern: str, name: str, default: int) -> tf.Tensor:
  """Returns what a named group of the pattern matches in each text, int64; else `default`."""
  if f'(?P<{name}>' not in pattern:
    return tf.fill(tf.shape(texts), tf.constant(default, tf.int64))
  number = 1 + pattern[: pattern.index(f'(?P<{name}>')].count('(?P<')
  found = tf.strings.regex_replace(texts, pattern, f'\\{number}')
  is_there = tf.strings.regex_full_match(found, '-?[0-9]+')
  return tf.strings.to_number(tf.where(is_there, found, str(default)), tf.int64)


def _graph_times(
  name: str, unit: str, zone: str, reader: GraphReader
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
  """Does the same as `_arrow_times`, in TensorFlow."""
  texts, pattern = reader.texts(name), _PATTERNS[unit]
  is_time = tf.strings.regex_full_match(texts, pattern)
  texts = tf.where(is_time, texts, '')
  if unit in ('seconds', 'milliseconds'):
    seconds = _graph_integers(texts, pattern, 'number', 0) // (
      1000 if unit == 'milliseconds' else 1
    )
    is_utc = tf.ones_like(is_time)
  else:
    parts = [_graph_integers(texts, pattern, name, int(name in _PARTS[:3])) for name in _PARTS]
    seconds, is_utc = _seconds(parts), tf.zeros_like(is_time)
    is_time &= _is_valid(parts)
  if unit == 'iso':
    number = len(_PARTS) + 1
    offset = tf.strings.regex_replace(texts, pattern, f'\\{number}')
    hours, minutes = (_graph_integers(offset, _OFFSET, n, 0) for n in ('hours', 'minutes'))
    is_negative = tf.strings.regex_full_match(offset, '-.*')
    seconds -= (hours * 60 + minutes) * 60 * tf.where(is_negative, tf.constant(-1, tf.int64), 1)
    is_utc = tf.not_equal(offset, '')
    is_time &= (hours < 24) & (minutes < 60)
  utc, local = _clocks(seconds, is_utc, zone, tf)
  return utc, local, is_time & (utc >= FIRST) & (utc < END)


def graph(made: config.Time, reader: GraphReader) -> GraphColumn:
  utc, local, is_time = _graph_times(made.time, made.unit, made.zone, reader)
  if made.since is None:
    numbers = tf.cast(_part(made.part, local), tf.float64)
  else:
    since, _, is_since = _graph_times(made.since, made.unit, made.zone, reader)
    numbers, is_time = tf.cast(utc - since, tf.float64) / 60, is_time & is_since
  return GraphColumn.single(tf.where(is_time, numbers, np.nan))
