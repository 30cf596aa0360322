"""Computes made columns, those with `from` in the config, in plain TensorFlow ops for SavedModels.

Shapes: B samples, m features of a column, which has L samples: B, or 1 that stands for all B.
"""

import copy
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from trainer import config
from trainer.data.columns.arrow_columns import TINY, TINY32
from trainer.data.columns.kinds import module_of
from trainer.data.features import canonical, hash_keys
from trainer.data.values import BOOLEANS, Writing, marker_numbers

_LONGEST = 200  # bytes of a number's text; TensorFlow refuses much longer ones


def _blank(texts: tf.Tensor, markers: Sequence[str]) -> tf.Tensor:
  """Replaces texts that stand for a missing value by blank ones."""
  written = canonical(texts) if markers else texts
  for marker in markers:
    texts = tf.where(tf.equal(written, canonical(marker)), '', texts)
  return texts


def numbers_of_texts(texts: tf.Tensor, writing: Writing) -> tf.Tensor:
  """Turns texts, string [n], into float64 [n]; NaN where they are blank or no number."""
  stripped = texts = tf.strings.strip(texts)
  is_number = tf.strings.regex_full_match(texts, writing.pattern())
  is_number &= tf.strings.length(texts) < _LONGEST
  is_percent = tf.strings.regex_full_match(texts, '(?s).*%')
  for pattern, replacement in writing.replacements():
    texts = tf.strings.regex_replace(texts, pattern, replacement)
  numbers = tf.strings.to_number(tf.where(is_number, texts, '0'), tf.float64)
  numbers = tf.where(is_percent, numbers / 100, numbers)
  numbers = tf.where(is_number, numbers, np.nan)
  for number, texts_of_it in BOOLEANS.items():
    is_it = tf.reduce_any([tf.equal(stripped, text) for text in texts_of_it], 0)
    numbers = tf.where(is_it, tf.constant(float(number), tf.float64), numbers)
  return numbers


class GraphColumn(NamedTuple):
  """The values of a column in L samples."""

  values: tf.Tensor  # [m]: strings, '' if missing; int64; or floats, NaN if missing
  samples: tf.Tensor  # int64 [m], the sample of each value, ascending
  length: tf.Tensor  # int64 []: L
  x: tf.Tensor | None = None  # float32 [m], the features' values; None: 1
  is_single: bool = False  # whether each sample has one value

  @classmethod
  def single(cls, values: tf.Tensor) -> 'GraphColumn':
    """Returns a column with one value a sample, [L]."""
    length = tf.size(values, tf.int64)
    return cls(values, tf.range(length), length, is_single=True)

  def firsts(self) -> tf.Tensor:
    """Returns the first value of each sample, [L]; where a sample has none: blank, 0 or NaN."""
    if self.is_single:
      return self.values
    kind = self.values.dtype
    default = '' if kind == tf.string else np.nan if kind.is_floating else 0
    ragged = tf.RaggedTensor.from_value_rowids(self.values, self.samples, self.length)
    return ragged[:, :1].to_tensor(default, shape=[None, 1])[:, 0]


def texts_of(values: tf.Tensor) -> tf.Tensor:
  """Returns a column's values as texts; numbers must be whole, and a missing one becomes blank."""
  if values.dtype == tf.string:
    return values
  if values.dtype.is_integer:
    return tf.strings.as_string(values)
  missing = tf.math.is_nan(values)
  whole = tf.strings.as_string(tf.cast(tf.where(missing, tf.zeros_like(values), values), tf.int64))
  return tf.where(missing, '', whole)


def _keys(texts: tf.Tensor, slot_id: int, markers: Sequence[str]) -> tuple[tf.Tensor, tf.Tensor]:
  """Returns the keys of texts, int64 [m]; and bool [m], false for a blank or missing feature."""
  keys, present = hash_keys(texts, slot_id), tf.not_equal(tf.strings.strip(texts), '')
  for marker in filter(None, map(str.strip, markers)):
    present &= tf.not_equal(keys, hash_keys(marker, slot_id))
  return keys, present


class GraphFeatures(NamedTuple):
  """The features of a column as hashes (keys without a slot's id); blank ones are left out."""

  hashes: tf.Tensor  # int64 [m]
  samples: tf.Tensor  # int64 [m], ascending


def repeated(samples: tf.Tensor, length: tf.Tensor, size: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
  """Repeats the features of a column that has one sample, so that each of B samples has them.

  Thus the features of one user are hashed only once, however many items are scored.

  Args:
    samples: int64 [n], the sample of each feature.
    length: int64 [], the number of samples that the column has: B or 1.
    size: int64 [], B.
  Returns:
    For each of the m repeated features: the index of the original, and the sample; int64 [m] each.
  """
  count, times = tf.size(samples, tf.int64), tf.where(tf.equal(length, 1), size, 1)
  places = tf.tile(tf.range(count), [times])
  return places, tf.tile(samples, [times]) + tf.repeat(tf.range(times), count)


def _split(
  texts: tf.Tensor, samples: tf.Tensor, separator: str | None
) -> tuple[tf.Tensor, tf.Tensor]:
  """Splits texts at a separator; returns the pieces, and the sample of each piece."""
  if not separator:
    return texts, samples
  pieces = tf.strings.split(texts, separator)
  return pieces.values, tf.gather(samples, pieces.value_rowids())


class SlotTensors(NamedTuple):
  """The n features of one slot in all samples."""

  keys: tf.Tensor  # int64 [n]
  values: tf.Tensor  # float32 [n]
  samples: tf.Tensor  # int64 [n], the sample of each feature, ascending
  length: tf.Tensor  # int64 []: B, or 1 if they are repeated for every sample


class GraphReader:
  """Gives a batch's columns to the model and to made columns, as `ArrowReader` does elsewhere.

  `columns` are the log's; `size` is int64 [], B.
  """

  def __init__(self, data: config.Data, columns: Mapping[str, GraphColumn], size: tf.Tensor):
    self._data, self._log, self.size = data, columns, size
    self._made, self._writing = data.made, Writing.of(data)
    self._own = ''  # the made column for which this reader reads; '' for the model
    self._results: dict[str, GraphColumn] = {}

  def _read(self, name: str) -> tuple[GraphColumn, list[str]]:
    """Returns a made column or one of the log, and the texts that stand for a missing value."""
    if name not in self._made or name == self._own:
      return self._log[self._data.log_column(name)], self._data.missing_values
    if name not in self._results:
      reader = copy.copy(self)
      reader._own = name
      self._results[name] = module_of(self._made[name]).graph(self._made[name], reader)
    return self._results[name], []

  def _column(self, column: config.Slot | config.DenseColumn) -> tuple[GraphColumn, list[str]]:
    """Returns a slot's or dense column's values, and the texts that stand for a missing value."""
    if column.made:
      return self._read(column.name)
    ((name, _),) = self._data.columns_of(column)
    return self._log[name], self._data.missing_values

  def _numbers(self, column: GraphColumn, markers: Sequence[str]) -> tf.Tensor:
    """Returns the first number of each sample of a column, floats [L], NaN where missing."""
    values = column.firsts()
    if values.dtype == tf.string:
      texts = _blank(tf.strings.strip(values), markers)
      values = numbers_of_texts(texts, self._writing)
    elif values.dtype.is_integer:
      values = tf.cast(values, tf.float64)
    for marker in marker_numbers(tuple(markers), self._writing).tolist():
      values = tf.where(tf.equal(values, marker), tf.constant(np.nan, values.dtype), values)
    return values

  def dense(self, column: config.DenseColumn) -> tf.Tensor:
    """Returns the numbers of a dense column, float32 [L], NaN where missing."""
    return tf.cast(self._numbers(*self._column(column)), tf.float32)

  def slot(self, slot: config.Slot, slot_id: int) -> SlotTensors:
    """Returns the features of a slot, the same as conversion does."""
    column, markers = self._column(slot)
    texts, samples = _split(texts_of(column.values), column.samples, slot.separator)
    values = tf.ones_like(texts, tf.float32) if column.x is None else column.x
    if slot.value_separator:
      split = f'(?s)(.*){re.escape(slot.value_separator)}(.*)'  # at the last separator
      has_value = tf.strings.regex_full_match(texts, split)
      written = tf.strings.regex_replace(texts, f'^{split}$', r'\2')
      numbers = numbers_of_texts(written, self._writing)
      values = tf.where(has_value, tf.cast(numbers, tf.float32), values)
      texts = tf.where(has_value, tf.strings.regex_replace(texts, f'^{split}$', r'\1'), texts)
    # Conversion drops a record whose value is no number; here only its feature is left out.
    is_number = tf.math.is_finite(values)
    keys, present = _keys(texts, slot_id, markers)
    columns = [tf.boolean_mask(c, present & is_number) for c in (keys, values, samples)]
    if slot.sequence:
      ends = tf.cumsum(tf.math.bincount(tf.cast(columns[2], tf.int32)))
      after = tf.gather(ends, columns[2]) - tf.range(tf.size(columns[2]))
      columns = [tf.boolean_mask(c, after <= slot.sequence.max_length) for c in columns]
    return SlotTensors(*columns, column.length)

  def numbers(self, name: str) -> tf.Tensor:
    """Returns a column as float64 [L]; NaN where missing or beyond float32's range."""
    column, markers = self._read(name)
    numbers = tf.cast(self._numbers(column, markers), tf.float64)
    numbers = tf.where(tf.abs(numbers) < TINY, tf.zeros_like(numbers), numbers)
    is_huge = tf.math.is_inf(tf.cast(numbers, tf.float32))
    return tf.where(is_huge, tf.constant(np.nan, tf.float64), numbers)

  def rounded(self, name: str) -> tf.Tensor:
    """Returns `numbers` rounded to float32, float64 [L]."""
    numbers = tf.cast(tf.cast(self.numbers(name), tf.float32), tf.float64)
    return tf.where(tf.abs(numbers) < TINY32, tf.zeros_like(numbers), numbers)

  def texts(self, name: str) -> tf.Tensor:
    """Returns a column's stripped texts, string [L], blank where missing or not UTF-8."""
    column, markers = self._read(name)
    texts = texts_of(column.firsts())
    is_text = tf.equal(
      tf.strings.unicode_transcode(texts, 'UTF-8', 'UTF-8', errors='ignore'), texts
    )
    return _blank(tf.strings.strip(tf.where(is_text, texts, '')), markers)

  def features(self, name: str) -> GraphFeatures:
    """Returns a slot's or column's features in all B samples; those of one sample are repeated."""
    column, markers = self._read(name)
    slots = self._data.slots
    slot = next((s for s in slots if s.name == name and s.name != self._own), None)
    separator = slot and slot.separator
    texts, samples = _split(texts_of(column.values), column.samples, separator)
    hashes, present = _keys(texts, 0, markers)
    hashes, samples = tf.boolean_mask(hashes, present), tf.boolean_mask(samples, present)
    places, samples = repeated(samples, column.length, self.size)
    return GraphFeatures(tf.gather(hashes, places), samples)
