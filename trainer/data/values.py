"""Says what a raw value means: converts Arrow columns to feature keys or to numbers.

Every format, data frames and requests become Arrow columns; the SavedModel does the same in
TensorFlow ops (columns/graph_columns.py), by the regular expressions of this file. slot_features.py
reads several features of a record.
"""

import contextlib
import datetime
import functools
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ops.keys import NO_FEATURE, integer_keys, text_keys
from trainer import config
from trainer.data.arrays import text_buffers
from trainer.errors import UserError

# What messages want where a column holds floats that cannot be features.
WHOLE_NUMBER = (
  'a whole number or a text (ids that became floats: pandas.read_csv(…, dtype=str) keeps them)'
)

# The largest number that a model may read: its square, which gradients are made of, is a float32.
MOST_FLOAT32 = float(np.finfo(np.float32).max)
MOST = MOST_FLOAT32**0.5
_OFFSET = re.compile(r'([+-])(\d\d):(\d\d)')  # of a timestamp's type, in place of a time zone
# The writings of the numbers 1 and 0 as booleans: of JSON, of pandas, and of R and Excel.
BOOLEANS = {'1': ('true', 'True', 'TRUE'), '0': ('false', 'False', 'FALSE')}
# (regular expression, replacement) pairs that turn the writings of one value into one text: 12.00
# into 12, -0.0 into 0, True into true. Hashing does so too (ops/cc/data/keys.cc).
CANONICAL = (
  (r'^(?:-(0)|(-?[0-9]+))\.0+$', r'\1\2'),
  *((f'^(?:{"|".join(texts[1:])})$', texts[0]) for texts in BOOLEANS.values()),
)


def whole_numbers(array: pa.Array) -> tuple[pa.Array, np.ndarray | None]:
  """Turns floats into integers, so that 12.0 is the same feature as 12.

  Returns int64 [n], null where missing or wrong; and bool [n], true where wrong: with a fraction,
  or too large to be exact. An array without floats is returned with None.
  """
  t = array.type
  if pa.types.is_dictionary(t) and pa.types.is_floating(t.value_type):
    array = array.dictionary_decode()
  elif not pa.types.is_floating(t):
    return array, None
  digits = np.finfo(array.type.to_pandas_dtype()).nmant + 1
  values = array.to_numpy(zero_copy_only=False)  # NaN where null
  missing = np.isnan(values)
  with np.errstate(invalid='ignore'):
    wrong = ~missing & ~((np.abs(values) < 2.0**digits) & (values == np.floor(values)))
  numbers = np.where(missing | wrong, 0, values).astype(np.int64)
  return pa.array(numbers, mask=missing | wrong), wrong


def as_text(array: pa.Array, column: str) -> pa.Array:
  """Returns the values as strings, null as null; a UserError for types that have no text."""
  if pa.types.is_dictionary(array.type):
    array = array.dictionary_decode()
  array, _ = whole_numbers(array)
  t = array.type
  if pa.types.is_string(t):
    return array
  # Bytes are hashed as they are, even if they are not UTF-8.
  if pa.types.is_large_binary(t) or pa.types.is_large_string(t):
    array, t = array.cast(pa.binary()), pa.binary()
  if pa.types.is_binary(t):
    return array.view(pa.string())
  try:
    if pa.types.is_duration(t):  # its text would depend on the unit
      raise pa.ArrowNotImplementedError
    offset = _OFFSET.fullmatch(t.tz or '') if pa.types.is_timestamp(t) else None
    if offset:  # a zone that Arrow does not know
      sign, hours, minutes = offset.groups()
      east = datetime.timedelta(hours=int(sign + hours), minutes=int(sign + minutes))
      local = pc.add(array.cast(pa.timestamp(t.unit)), pa.scalar(east, pa.duration(t.unit)))
      texts = pc.binary_join_element_wise(local.cast(pa.string()), sign + hours + minutes, '')
    else:
      texts = array.cast(pa.string())
  except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
    wanted = 'strings or integers'
    if pa.types.is_timestamp(t) and t.tz:
      wanted = 'a time zone that is known here, an offset such as +01:00, or times without a zone'
    raise UserError(f"column '{column}': found values of type {t}; wanted {wanted}") from None
  if pa.types.is_timestamp(t) or pa.types.is_time(t):  # one text, whatever the unit
    texts = pc.replace_substring_regex(texts, r'(\.\d*[1-9])0+', r'\1')
    texts = pc.replace_substring_regex(texts, r'\.0+(\D|$)', r'\1')
  return texts


@functools.lru_cache
def _marker_keys(missing_values: tuple[str, ...], slot_id: int) -> np.ndarray:
  """Returns the keys that the texts of `data.missing_values` would have in a slot."""
  markers = pa.array([m for m in missing_values if m.strip()], pa.string())
  return text_keys(*text_buffers(markers), slot_id)


def feature_keys(
  array: pa.Array, column: str, slot_id: int, missing_values: Sequence[str]
) -> np.ndarray:
  """Returns the key of each value's feature, int64 [n]; NO_FEATURE where it is blank or missing."""
  t = array.type
  if pa.types.is_null(t):
    return np.full([len(array)], NO_FEATURE)
  if pa.types.is_dictionary(t):
    distinct = feature_keys(array.dictionary, column, slot_id, missing_values)
    indices = array.indices.fill_null(len(distinct))
    return np.append(distinct, NO_FEATURE).take(indices.to_numpy())
  if pa.types.is_integer(t) and t != pa.uint64():
    values = array.fill_null(0) if array.null_count else array
    keys = integer_keys(values.cast(pa.int64()).to_numpy(), slot_id)
  else:
    keys = text_keys(*text_buffers(as_text(array, column)), slot_id)
  if array.null_count:
    keys[array.is_null().to_numpy(zero_copy_only=False)] = NO_FEATURE
  if missing_values:
    keys = np.where(np.isin(keys, _marker_keys(tuple(missing_values), slot_id)), NO_FEATURE, keys)
  return keys


def trim(texts: pa.Array) -> pa.Array:
  """Removes ASCII white space around texts; blank texts become null."""
  texts = pc.ascii_trim_whitespace(texts)
  return pc.if_else(pc.equal(texts, ''), pa.scalar(None, pa.string()), texts)


def canonical(texts: pa.Array) -> pa.Array:
  """Returns trimmed texts as they are hashed, in which one value has one text."""
  for pattern, replacement in CANONICAL:
    texts = pc.replace_substring_regex(texts, pattern=pattern, replacement=replacement)
  return texts


def label_text(text: str) -> str:
  """Returns the one text of a label's value: 4 for 4.0, 4.5 for 4.50, true for TRUE."""
  if re.fullmatch(r'-?[0-9]*(?:\.[0-9]*|(?:\.[0-9]+)?[eE][-+]?[0-9]+)', text):
    number = float_or_none(text)
    return text if number is None else repr(number + 0.0).removesuffix('.0')  # -0.0 is 0
  return next((texts[0] for texts in BOOLEANS.values() if text in texts), text)


def label_writings(text: str) -> Sequence[str]:
  """Returns the writings of a label that a regular expression may match, its one text first."""
  if re.fullmatch('-?[0-9]+', text):
    return text, f'{text}.0'
  return next((texts for texts in BOOLEANS.values() if text in texts), (text,))


def without_markers(texts: pa.Array, missing_values: Sequence[str]) -> pa.Array:
  """Replaces texts that stand for a missing value by null; `texts` must be trimmed."""
  if not missing_values:
    return texts
  markers = canonical(trim(pa.array(missing_values, pa.string())))
  known = pc.is_in(canonical(texts), markers.drop_null())
  return pc.if_else(known, pa.scalar(None, pa.string()), texts)


class Writing(NamedTuple):
  """How texts write numbers: the decimal mark, and the mark between thousands if there is one."""

  decimal: str = '.'
  thousands: str | None = None

  @classmethod
  def of(cls, data: config.Data) -> 'Writing':
    return cls(data.decimal, data.thousands)

  def pattern(self) -> str:
    """Returns a regular expression whose first group is a number, which a % may follow."""
    point, digits = re.escape(self.decimal), r'\d+'
    if self.thousands is not None:
      digits = rf'(?:\d{{1,3}}(?:{re.escape(self.thousands)}\d{{3}})+|\d+)'
    return rf'^([-+]?(?:{digits}(?:{point}\d*)?|{point}\d+)(?:[eE][-+]?\d+)?)(?: ?%)?$'

  def replacements(self) -> list[tuple[str, str]]:
    """Returns (regular expression, replacement) pairs that turn texts into plain decimal numbers.

    They apply, in this order, to texts that match `pattern`. They also remove the %.
    """
    pairs = [(r'^\+|(?: ?%)$', '')]
    pairs += [] if self.thousands is None else [(re.escape(self.thousands), '')]
    return pairs + ([] if self.decimal == '.' else [(re.escape(self.decimal), '.')])


def float_or_none(text: str) -> float | None:
  try:
    return float(text)
  except ValueError:
    return None


@functools.lru_cache
def marker_numbers(missing_values: tuple[str, ...], writing: Writing = Writing()) -> np.ndarray:
  """Returns the numbers among the texts of `data.missing_values`, float64."""
  texts = [text.strip() for text in missing_values]
  written = [re.match(writing.pattern(), text, re.ASCII) is not None for text in texts]
  numbers = _numbers_of_texts(pa.array(texts, pa.string()), (), writing).to_pylist()
  # A text such as NaN stands for the float NaN, too.
  found = [n if is_number else float_or_none(t) for t, n, is_number in zip(texts, numbers, written)]
  return np.array([n for n in found if n is not None], np.float64)


def _without_numbers(numbers: pa.Array, markers: np.ndarray) -> pa.Array:
  """Replaces numbers that stand for a missing value by null."""
  if not len(markers):
    return numbers
  return pc.if_else(pc.is_in(numbers, pa.array(markers)), pa.scalar(None, pa.float64()), numbers)


def _numbers_of_texts(texts: pa.Array, missing_values: Sequence[str], writing: Writing) -> pa.Array:
  """Reads texts as float64 [n]: null if blank or missing, infinity if the text is no number."""
  if not missing_values and writing == Writing():
    with contextlib.suppress(pa.ArrowInvalid):  # a blank, white space, or no number
      return texts.cast(pa.float64())
  encoded = trim(texts).dictionary_encode()
  distinct = plain = encoded.dictionary
  for pattern, replacement in writing.replacements():
    plain = pc.replace_substring_regex(plain, pattern=pattern, replacement=replacement)
  is_number = pc.match_substring_regex(distinct, writing.pattern())
  if not pc.all(is_number).as_py():
    is_other = pc.invert(is_number)
    others = without_markers(distinct.filter(is_other), missing_values)
    numbers = pc.if_else(pc.is_valid(others), 'inf', pa.scalar(None, pa.string()))
    for number, texts_of_it in BOOLEANS.items():
      numbers = pc.if_else(pc.is_in(others, pa.array(texts_of_it)), number, numbers)
    plain = pc.replace_with_mask(plain, is_other, numbers)
  numbers = pc.cast(plain, pa.float64(), safe=False)
  numbers = pc.if_else(pc.ends_with(distinct, '%'), pc.divide(numbers, 100.0), numbers)
  if missing_values:
    numbers = _without_numbers(numbers, marker_numbers(tuple(missing_values), writing))
  return numbers.take(encoded.indices)


def floats(
  array: pa.Array,
  column: str,
  missing_values: Sequence[str] = (),
  writing: Writing = Writing(),
  most: float | None = None,
) -> tuple[np.ndarray, np.ndarray]:
  """Reads numbers: float64 [n], NaN where missing; and bool [n], true where a value is wrong.

  A value is wrong if it is no number, or beyond ±`most`, by default MOST.
  """
  if pa.types.is_dictionary(array.type):
    array = array.dictionary_decode()
  if pa.types.is_boolean(array.type):
    array = array.cast(pa.uint8())
  t = array.type
  if pa.types.is_floating(t) or pa.types.is_integer(t) or pa.types.is_decimal(t):
    numbers = array.cast(pa.float64(), safe=False)
    if missing_values:
      markers = marker_numbers(tuple(missing_values), writing)
      if pa.types.is_floating(t):  # -0.1 in float32 is another float64
        with np.errstate(over='ignore'):
          markers = markers.astype(t.to_pandas_dtype()).astype(np.float64)
      numbers = _without_numbers(numbers, markers)
  else:
    numbers = _numbers_of_texts(as_text(array, column), missing_values, writing)
  missing = None
  if numbers.null_count:
    missing = numbers.is_null().to_numpy(zero_copy_only=False)
    numbers = numbers.fill_null(0)
  numbers = numbers.to_numpy(zero_copy_only=False)
  wrong = ~(np.abs(numbers) <= (most or MOST))
  return numbers if missing is None else np.where(missing, np.nan, numbers), wrong


# Slots that may hold several features


def holds_texts(t: pa.DataType) -> bool:
  """Returns whether values of this type are texts, or bytes."""
  t = t.value_type if pa.types.is_dictionary(t) else t
  is_text = pa.types.is_string(t) or pa.types.is_large_string(t)
  return is_text or pa.types.is_binary(t) or pa.types.is_large_binary(t)


def holds_floats(t: pa.DataType) -> bool:
  """Returns whether the values of a list type, or the keys of a map type, are floats."""
  if pa.types.is_union(t):
    return False
  inner = t.key_type if pa.types.is_map(t) else t.value_type
  return pa.types.is_floating(inner.value_type if pa.types.is_dictionary(inner) else inner)
