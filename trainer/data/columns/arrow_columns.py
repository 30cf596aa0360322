"""Computes made columns, those with `from` in the config, from the Arrow columns of a block.

graph_columns.py does it inside a SavedModel. Shapes: n records, m features of a column in all.
"""

import copy
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from ops.keys import NO_FEATURE
from trainer import config
from trainer.data.arrays import is_nested, one_each, ranges
from trainer.data.columns.kinds import module_of
from trainer.data.slot_features import distinct_texts, several_features
from trainer.data.values import (
  MOST_FLOAT32,
  WHOLE_NUMBER,
  Writing,
  as_text,
  feature_keys,
  floats,
  trim,
  whole_numbers,
  without_markers,
)

# The least normal numbers. TensorFlow takes smaller ones, which are subnormal, as 0.
TINY, TINY32 = float(np.finfo(np.float64).tiny), float(np.finfo(np.float32).tiny)

# drop(wrong, kind of mistake, column, what was wanted): leaves out records; wrong is bool [n].
Drop = Callable[[np.ndarray | None, str, str, str], None]
_Result = TypeVar('_Result')


class Features(NamedTuple):
  """The features of a column as hashes: each is a feature's key without the slot's id."""

  hashes: np.ndarray  # int64 [m], in the order of the records; [n] if `counts` is None
  counts: np.ndarray | None  # int64 [n]; None: each record has one, or none (NO_FEATURE)

  def by_record(self) -> tuple[np.ndarray, np.ndarray]:
    """Returns the hashes of all features, int64 [m], and how many each record has, int64 [n]."""
    if self.counts is not None:
      return self.hashes, self.counts
    present = self.hashes != NO_FEATURE
    return self.hashes[present], present.astype(np.int64)


class ArrowReader:
  """Reads the columns of n records, for the model and for computing made columns.

  A made column may have the name of a column of the log: `price` may be made from the log's
  `price`. Then only the computation of that made column sees the log's `price`; the model and all
  other made columns see the made one. `drop` is called with the records for which a column cannot
  be computed.
  """

  def __init__(
    self,
    data: config.Data,
    columns: Mapping[str, pa.Array],
    num_records: int,
    drop: Drop = lambda *_: None,
  ):
    self._data, self._log, self._drop, self.num_records = data, columns, drop, num_records
    self._made = data.made
    self._own = ''  # the made column for which this reader reads; '' for the model
    self._results: dict[object, object] = {}

  def of(self, own: str) -> 'ArrowReader':
    """Returns a reader to which `own` is the log's column of that name; it shares the results."""
    reader = copy.copy(self)
    reader._own = own
    return reader

  def made(self, name: str) -> pa.Array:
    """Computes a made column [n], as an Arrow array that a file of the log could hold."""
    made = self._made[name]
    return self.once(('made', name), lambda: module_of(made).arrow(made, self.of(name)))

  def once(self, key: object, compute: Callable[[], _Result]) -> _Result:
    """Returns the result of `compute`, which is called only once for each key."""
    if key not in self._results:
      self._results[key] = compute()
    return self._results[key]

  def drop(self, wrong: np.ndarray | None, column: str, wanted: str) -> None:
    """Leaves out the records where `wrong`, bool [n], is true."""
    of_own = f", which '{self._own}' is made of" if self._own else ''
    self._drop(wrong, 'made', column, wanted + of_own)

  def _is_made(self, name: str) -> bool:
    """Returns whether this reader takes `name` as a made column, not as a column of the log."""
    return name in self._made and name != self._own

  def _array(self, name: str) -> tuple[pa.Array, str, list[str]]:
    """Returns a column, its name for messages, and the texts that stand for a missing value."""
    if self._is_made(name):
      return self.made(name), name, []
    column = self._data.log_column(name)
    return self._log[column], column, self._data.missing_values

  def single(self, name: str, wanted: str) -> tuple[pa.Array, str, list[str]]:
    """Returns a column, its name, and its texts for missing; drops records with several values."""
    array, column, markers = self._array(name)
    array, several = one_each(array)
    self.drop(several, column, wanted)
    return array, column, markers

  def numbers(self, name: str) -> np.ndarray:
    """Returns the column, float64 [n]: NaN if missing or beyond float32's range, 0 if subnormal."""

    def read() -> np.ndarray:
      wanted = 'a finite number, or blank for missing'
      array, column, markers = self.single(name, wanted)
      numbers, wrong = floats(array, column, markers, Writing.of(self._data), MOST_FLOAT32)
      self.drop(wrong, column, wanted)
      return np.where(np.abs(numbers) < TINY, 0, np.where(wrong, np.nan, numbers))

    return self.once(('numbers', name, self._is_made(name)), read)

  def rounded(self, name: str) -> np.ndarray:
    """Returns `numbers` rounded to float32, as dense columns are, float64 [n]; subnormals are 0."""
    numbers = self.numbers(name).astype(np.float32).astype(np.float64)
    return np.where(np.abs(numbers) < TINY32, 0, numbers)

  def texts(self, name: str, wanted: str = 'one text in UTF-8') -> pa.Array:
    """Returns the column's texts as a DictionaryArray [n], stripped, null where missing or blank.

    Records with several texts, or with a text that is not UTF-8, are dropped.
    """

    def read() -> pa.DictionaryArray:
      array, column, markers = self.single(name, wanted)
      array, wrong = whole_numbers(array)
      self.drop(wrong, column, WHOLE_NUMBER)
      if not pa.types.is_dictionary(array.type):
        array = as_text(array, column).dictionary_encode()
      texts, is_text = only_unicode(as_text(array.dictionary, column))
      if not is_text.all():
        of_record = np.append(is_text, True)[array.indices.fill_null(len(texts)).to_numpy()]
        self.drop(~of_record, column, wanted)
      texts = without_markers(trim(texts), markers)
      return pa.DictionaryArray.from_arrays(array.indices, texts)

    return self.once(('texts', name, self._is_made(name)), read)

  def _slot(self, name: str, column: str) -> config.Slot:
    """Returns the slot `name`; without one, a slot in which each value of `column` is a feature."""
    slots = (s for s in self._data.slots if s.name == name and s.name != self._own)
    return next(slots, config.Slot(name=column))

  def features(self, name: str) -> Features:
    """Returns the features of a slot or column as hashes."""

    def read() -> Features:
      array, column, markers = self._array(name)
      array, wrong = whole_numbers(array)
      self.drop(wrong, column, WHOLE_NUMBER)
      slot = self._slot(name, column)
      if not (is_nested(array.type) or slot.separator) or pa.types.is_null(array.type):
        return Features(feature_keys(array, column, 0, markers), None)
      several = several_features(array, slot, 0, markers)
      index = several.index
      self.drop(several.wrong[index], column, f'features each of which is {WHOLE_NUMBER}')
      counts = several.counts[index]
      return Features(several.keys[ranges(several.starts[index], counts)], counts)

    return self.once(('features', name, self._is_made(name)), read)

  def feature_texts(self, name: str) -> tuple[np.ndarray, pa.Array]:
    """Returns the hashes, int64 [u], ascending, and the texts of a column's u distinct features."""
    array, column, markers = self._array(name)
    hashes, texts = distinct_texts(whole_numbers(array)[0], self._slot(name, column), 0, markers)
    hashes, first = np.unique(hashes, return_index=True)
    return hashes, texts.take(first)


def only_unicode(texts: pa.Array) -> tuple[pa.Array, np.ndarray]:
  """Returns texts [u], with null in place of any that is not UTF-8, and which are, bool [u]."""
  is_text = np.ones([len(texts)], bool)
  try:
    texts.validate(full=True)
    return texts, is_text
  except pa.ArrowInvalid:
    raw = texts.view(pa.binary()).to_pylist()
  for i, value in enumerate(raw):
    try:
      raw[i] = value if value is None else value.decode()
    except UnicodeDecodeError:
      raw[i], is_text[i] = None, False
  return pa.array(raw, pa.string()), is_text


def by_text(texts: pa.DictionaryArray, values: np.ndarray, missing: float) -> np.ndarray:
  """Returns a value for each record, found by the record's text; `missing` where it has none."""
  values = np.append(values, values.dtype.type(missing))
  return values[texts.indices.fill_null(len(values) - 1).to_numpy()]
