"""Computes made columns from the Arrow columns of a block: in conversion, prediction, the server.

Shapes: n records, m features of a column in all of them.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ops.keys import NO_FEATURE
from trainer import config
from trainer.data.columns.kinds import module_of
from trainer.data.values import (
  WHOLE_NUMBER,
  Writing,
  as_text,
  distinct_texts,
  feature_keys,
  floats,
  is_list,
  one_each,
  ranges,
  several_features,
  trim,
  whole_numbers,
)

# drop(wrong bool [n], kind of mistake, column, what was wanted): leaves records out.
Drop = Callable[[np.ndarray | None, str, str, str], None]
_Result = TypeVar('_Result')


class Features(NamedTuple):
  """The features of a column as hashes: the key without a slot's id."""

  hashes: np.ndarray  # int64 [m], in the order of the records; without counts [n]
  counts: np.ndarray | None  # int64 [n]; None: each record has one, or none (NO_FEATURE)

  def by_record(self) -> tuple[np.ndarray, np.ndarray]:
    """Returns hashes [m] and counts [n]."""
    if self.counts is not None:
      return self.hashes, self.counts
    present = self.hashes != NO_FEATURE
    return self.hashes[present], present.astype(np.int64)


class ArrowColumns:
  """The made columns of n records.

  Args:
    cfg: the config.
    columns: the columns of the log.
    num_records: n.
    drop: called with the records for which a column cannot be made; leaves them out.
  """

  def __init__(
    self, cfg: config.Config, columns: Mapping[str, pa.Array], num_records: int, drop: Drop
  ):
    self._data, self._log, self._drop, self.num_records = cfg.data, columns, drop, num_records
    self._made = cfg.data.made
    self._found: dict[object, object] = {}

  def made(self, name: str) -> pa.Array:
    """Returns a made column [n], in the form in which a file could hold it."""
    made = self._made[name]
    return self.once(('made', name), lambda: module_of(made).arrow(made, ArrowReader(self, name)))

  def one_each(self, name: str) -> pa.Array:
    """As `made`, one value a record; drops records that have several."""
    return self.single(name, '', 'one number, or none for missing')[0]

  def once(self, key: object, compute: Callable[[], _Result]) -> _Result:
    """Returns the result of `compute`, which is called only once for each key."""
    if key not in self._found:
      self._found[key] = compute()
    return self._found[key]

  def is_made(self, name: str, own: str) -> bool:
    """Returns whether column `own` reads this name from a made column, not from the log."""
    return name in self._made and name != own

  def _array(self, name: str, own: str) -> tuple[pa.Array, str]:
    """Returns the array that column `own` reads as `name`, and the name for messages."""
    if self.is_made(name, own):
      return self.made(name), name
    column = self._data.log_column(name)
    return self._log[column], column

  def single(self, name: str, own: str, wanted: str) -> tuple[pa.Array, str]:
    """As `_array`, one value a record; drops records that have several."""
    array, column = self._array(name, own)
    array, several = one_each(array)
    self.drop(several, column, own, wanted)
    return array, column

  def drop(self, wrong: np.ndarray | None, column: str, own: str, wanted: str) -> None:
    """Drops records for which column `own` cannot be made; '' stands for the dense columns."""
    self._drop(wrong, 'made', column, f"{wanted}, which '{own}' is made of" if own else wanted)

  def markers(self, name: str, own: str) -> list[str]:
    """Returns the texts that stand for a missing value in what column `own` reads as `name`."""
    return [] if self.is_made(name, own) else self._data.missing_values

  def floats(
    self, array: pa.Array, column: str, markers: list[str]
  ) -> tuple[np.ndarray, np.ndarray]:
    """Reads numbers; see `trainer.data.values.floats`."""
    return floats(array, column, markers, Writing.of(self._data))

  def features(self, name: str, own: str) -> Features:
    """Returns the features of a column as hashes, without a slot's id."""
    array, column = self._array(name, own)
    array, wrong = whole_numbers(array)
    self.drop(wrong, column, own, WHOLE_NUMBER)
    markers, slot = self.markers(name, own), self._slot(name, own, column)
    nested = is_list(array.type) or pa.types.is_map(array.type)
    if pa.types.is_null(array.type) or not (nested or slot.separator):
      return Features(feature_keys(array, column, 0, markers), None)
    found = several_features(array, slot, 0, markers)
    wanted = f'features each of which is {WHOLE_NUMBER}'
    self.drop(found.wrong[found.index], column, own, wanted)
    counts = found.counts[found.index]
    return Features(found.keys[ranges(found.starts[found.index], counts)], counts)

  def feature_texts(self, name: str, own: str) -> tuple[np.ndarray, pa.Array]:
    """Returns the distinct features of a column, ascending, and a text of each."""
    array, column = self._array(name, own)
    array, slot = whole_numbers(array)[0], self._slot(name, own, column)
    hashes, texts = distinct_texts(array, slot, 0, self.markers(name, own))
    hashes, first = np.unique(hashes, return_index=True)
    return hashes, texts.take(first)

  def _slot(self, name: str, own: str, column: str) -> config.Slot:
    """Returns the slot that says how the features of a column are separated."""
    slots = (s for s in self._data.slots if s.name == name and s.name != own)
    return next(slots, config.Slot(name=column))


class ArrowReader:
  """What one made column reads: the columns of a block. Its own name means the log's column.

  Args:
    columns: of the block.
    own: the name of the made column.
  """

  def __init__(self, columns: ArrowColumns, own: str):
    self._columns, self._own = columns, own
    self.num_records = columns.num_records

  def _key(self, how: str, name: str) -> tuple[object, ...]:
    return how, name, self._columns.is_made(name, self._own)

  def once(self, key: object, compute: Callable[[], _Result]) -> _Result:
    """Returns the result of `compute`, which is called only once for all columns of a block."""
    return self._columns.once(key, compute)

  def numbers(self, name: str) -> np.ndarray:
    """Returns float64 [n] with the digits of a float32, as dense columns have them.

    A missing number is NaN. Below the least normal float32 a number is 0, as in TensorFlow.
    """

    def read() -> np.ndarray:
      wanted = 'a finite number, or blank for missing'
      array, column = self._columns.single(name, self._own, wanted)
      numbers, wrong = self._columns.floats(array, column, self._columns.markers(name, self._own))
      self.drop(wrong, column, wanted)
      with np.errstate(over='ignore', invalid='ignore'):
        numbers = numbers.astype(np.float32).astype(np.float64)
      numbers[np.abs(numbers) < np.finfo(np.float32).tiny] = 0
      numbers[np.isinf(numbers)] = np.nan
      return numbers

    return self.once(self._key('numbers', name), read)

  def texts(self, name: str, wanted: str = 'one text in UTF-8') -> pa.Array:
    """Returns texts [n] without white space around them, null where missing or blank.

    The result is dictionary-encoded if the column is, or has few distinct texts.
    """

    def read() -> pa.DictionaryArray:
      array, column = self._columns.single(name, self._own, wanted)
      array, wrong = whole_numbers(array)
      self.drop(wrong, column, WHOLE_NUMBER)
      if not pa.types.is_dictionary(array.type):
        array = as_text(array, column).dictionary_encode()
      texts, is_text = _unicode(as_text(array.dictionary, column))
      if not is_text.all():
        of_record = np.append(is_text, True)[array.indices.fill_null(len(texts)).to_numpy()]
        self.drop(~of_record, column, wanted)
      texts = trim(texts)
      if markers := self._columns.markers(name, self._own):
        known = pc.is_in(texts, pa.array([m.strip() for m in markers], pa.string()))
        texts = pc.if_else(known, pa.scalar(None, pa.string()), texts)
      return pa.DictionaryArray.from_arrays(array.indices, texts)

    return self.once(self._key('texts', name), read)

  def features(self, name: str) -> Features:
    """Returns the features of a slot or column."""
    found = self._columns.features
    return self.once(self._key('features', name), lambda: found(name, self._own))

  def feature_texts(self, name: str) -> tuple[np.ndarray, pa.Array]:
    """Returns the distinct features of a slot or column as hashes, ascending, and their texts."""
    return self._columns.feature_texts(name, self._own)

  def drop(self, wrong: np.ndarray, name: str, wanted: str) -> None:
    """Leaves out the records at which `wrong`, bool [n], is true: their value cannot be read."""
    self._columns.drop(wrong, name, self._own, wanted)


def _unicode(texts: pa.Array) -> tuple[pa.Array, np.ndarray]:
  """Returns texts with null in place of those that are not UTF-8; and which are UTF-8."""
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
  """Returns a value for each record, found by the record's text.

  Args:
    texts: a result of `ArrowReader.texts`, [n].
    values: the value of each text in the dictionary of `texts`.
    missing: the value of records without a text.
  """
  values = np.append(values, values.dtype.type(missing))
  return values[texts.indices.fill_null(len(values) - 1).to_numpy()]
