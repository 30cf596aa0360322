"""Reads the columns of requests to what the log's reader makes of the same values.

That reader uses Arrow, which has a fixed cost for each column. A column of a log has many values,
so that cost is small; a column of a request has few, so it is large. So a column of plain texts or
numbers takes another way: one call of C++ reads all texts, NumPy the numbers and their bins. The
log's reader reads the others: made columns, lists, features with values, and whatever is wrong,
which it explains.
"""

import contextlib
import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from ops.request import RequestReader, TextSlot
from trainer import config
from trainer.config.export import input_name
from trainer.data.arrays import is_nested
from trainer.data.block import Block
from trainer.data.columns import bins
from trainer.data.jsonl_format import WrongValue, slot_array, slot_value, value_at
from trainer.data.parse import Parsed, parse
from trainer.data.values import MOST, Writing, feature_keys, marker_numbers
from trainer.errors import UserError
from trainer.plain_data import Json

_END = '\n'  # between texts; hashing removes white space around a text
# Examples to try for a column of numbers (False) and one of texts (True); all columns accept null.
_EXAMPLES = {False: (1.0, None), True: ('1', '2024-01-31T13:05:00', '2024013113', None)}


class WrongRequest(UserError):
  """A request's columns cannot be read."""


class Shared(list):
  """The values of a column that samples share; any other column has one for each sample.

  Requests say which it is, never the number of values: that may be the number of samples by chance.
  """


class Samples(NamedTuple):
  """B samples of a request; a feature that many have, such as their user, may be there once.

  `values` and `segments` are those of a SlotBatch with n features.
  """

  keys: np.ndarray  # int64 [u]
  places: np.ndarray  # int32 [n], the place of each feature in `keys`
  values: np.ndarray  # float32 [n], or [0]
  segments: np.ndarray  # int32 [n], or [0]
  dense: np.ndarray  # float32 [B, Dn], NaN where missing


class RequestColumns:
  """The columns of requests for scores; with model.retrieval, those of a query.

  `names` says of each column of the log whether its values are texts; columns of texts come first.
  """

  def __init__(self, cfg: config.Config):
    self._cfg, self._ids, self._num_slots = cfg, cfg.slot_ids(), len(cfg.data.slots)
    data, missing, blank = cfg.data, cfg.data.missing_values, cfg.only_of_items()
    columns = sorted(data.log_columns(without=blank).items())
    self.names = dict(sorted(columns, key=lambda item: not item[1]))
    self._aliases = {input_name(name): name for name in self.names}
    self._readers = {name: set() for name in self.names}  # the slots and dense columns that read it
    self._all = {c.name for c in (*data.slots, *data.dense)}
    for column in (*data.slots, *data.dense):
      for name, _ in data.columns_of(column) if column.name not in blank else ():
        self._readers[name].add(column.name)
    self._dense = {
      c.name: i for i, c in enumerate(data.dense) if not c.made and c.name not in blank
    }
    binned = self._dense.keys() - {s.name for s in data.slots}
    self._slots = [
      s
      for s in cfg.ordered_slots
      if s.name not in blank
      and not s.value_separator
      and (not s.made or (isinstance(s.made, config.Bins) and s.made.bins in binned))
    ]
    self._bins = {s.name: bins.reader(s.made) for s in self._slots if s.made}
    # The names of slots and dense columns that the log's reader always reads.
    made = [s for s in data.slots if s not in self._slots] + [c for c in data.dense if c.made]
    self._left = {column.name for column in made} - blank
    fields = {slot.name: field for field, slot in enumerate(cfg.ordered_slots)}
    text_slots = [
      TextSlot(
        fields[slot.name],
        self._ids[slot.name],
        slot.separator or '',
        slot.sequence.max_length if slot.sequence else 0,
        has_markers=slot.made is None,
      )
      for slot in self._slots
    ]
    markers = feature_keys(pa.array(missing, pa.string()), '', 0, [])
    self._reader = RequestReader(text_slots, self._num_slots, markers)
    self._missing_numbers = marker_numbers(tuple(missing), Writing.of(data))

  @functools.cached_property
  def example(self) -> dict[str, Json]:
    """A sample that is read, {column: value}: each value is the first of _EXAMPLES that may be."""
    nothing = dict.fromkeys(self.names, [None])

    def accepted(column: str, value: Json) -> bool:
      try:
        self.read(nothing | {column: [value]}, 1)
      except WrongRequest:
        return False
      return True

    return {
      column: next(value for value in _EXAMPLES[is_text] if accepted(column, value))
      for column, is_text in self.names.items()
    }

  def _name(self, name: str) -> str | None:
    return name if name in self.names else self._aliases.get(name)

  def unknown(self, names: Iterable[str]) -> list[str]:
    """Returns those of `names` that are not columns of the model."""
    heads = {name.partition('.')[0] for name in self.names}
    return [name for name in names if self._name(name) is None and name not in heads]

  def _given(self, columns: Mapping[str, Sequence[Json]], size: int) -> dict[str, Sequence[Json]]:
    """Returns the columns that the model reads; one such as ctx.os is looked up in those of ctx."""
    heads = {n: n.partition('.')[0] for n in self.names if n not in columns}
    inner = {
      name: type(columns[head])(value_at({head: v}, name) for v in columns[head])
      for name, head in heads.items()
      if head != name and any(isinstance(v, dict) for v in columns.get(head, ()))
    }
    given: dict[str, Sequence[Json]] = {}
    for name, values in {**{n: c for n, c in columns.items() if self._name(n)}, **inner}.items():
      column = self._name(name)
      if column in given:
        raise WrongRequest(f"column '{column}' is given twice")
      if not isinstance(values, Shared) and len(values) != size:
        raise WrongRequest(f"column '{column}': found {len(values)} values; wanted {size}")
      given[column] = values
    for column in self.names:
      if column not in given:
        unknown = self.unknown(columns)
        near = f"; found '{unknown[0][:80]}', which is unknown" if unknown else ''
        raise WrongRequest(f"column '{column}' is missing; a missing value is null or ''{near}")
    return given

  def read(
    self, columns: Mapping[str, Sequence[Json]], size: int, shared: np.ndarray | None = None
  ) -> Samples:
    """Reads a request's columns, of B = `size` samples; WrongRequest for a value of no meaning.

    Args:
      columns: JSON values by the column's name or its name in a SavedModel (`input_name`). A column
        has B values, or is Shared. A missing value is null or ''. A dense value is a number, its
        text, or a boolean. Columns that the model does not read are ignored.
      shared: int32 [B], for each sample, which value it has of a Shared column; None: the first.
    """
    shared = np.zeros([size], np.int32) if shared is None else shared
    columns, left, numbers = self._given(columns, size), set(self._left), {}
    dense = np.full([len(self._cfg.data.dense), size], np.nan, np.float32)
    for name, i in self._dense.items():
      if (found := self._numbers(columns[name])) is None:
        left.add(name)
      else:
        numbers[name] = found
        dense[i] = found[shared] if isinstance(columns[name], Shared) else found
    keys, places, segments = self._features(columns, numbers, shared, left)
    if left and not len(segments):  # one feature in each slot
      segments = np.arange(len(places), dtype=np.int32)
    values = np.ones([len(segments)], np.float32)
    if not left:
      return Samples(keys, places, values, segments, np.ascontiguousarray(dense.T))
    parsed = self._parsed(columns, shared, left)
    for i, column in enumerate(self._cfg.data.dense):
      if column.name in left:
        dense[i] = parsed.dense[:, i]
    dense, (more, *others) = np.ascontiguousarray(dense.T), parsed.by_sample()
    if not len(places):
      return Samples(more, np.arange(len(more), dtype=np.int32), *others, dense)
    segments = np.concatenate([segments, others[1]])
    order, end = np.argsort(segments, kind='stable'), len(keys)
    places = np.concatenate([places, np.arange(end, end + len(more), dtype=np.int32)])[order]
    values, segments = np.concatenate([values, others[0]])[order], segments[order]
    if (values == 1).all() and np.array_equal(segments, np.arange(size * self._num_slots)):
      values, segments = values[:0], segments[:0]  # one feature in each slot
    return Samples(np.concatenate([keys, more]), places, values, segments, dense)

  def _numbers(self, values: Sequence[Json]) -> np.ndarray | None:
    """Returns a column's numbers, float32, NaN for null; None if only the log's reader can."""
    if not {float, int, type(None)}.issuperset(map(type, values)):
      return None
    try:
      numbers = np.array(values, np.float64)
    except OverflowError:
      return None
    if len(self._missing_numbers):
      numbers[np.isin(numbers, self._missing_numbers)] = np.nan
    return None if (np.abs(numbers) > MOST).any() else numbers.astype(np.float32)

  def _features(
    self,
    columns: Mapping[str, Sequence[Json]],
    numbers: Mapping[str, np.ndarray],
    shared: np.ndarray,
    left: set[str],
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns `keys`, `places` and `segments` of slots; adds the others to `left`."""
    texts, counts, is_shared = [], [], []
    for slot in self._slots:
      name = slot.made.bins if slot.made else slot.column or slot.name
      if not slot.made:
        values = _plain_texts(columns[name])
      else:
        values = self._bins[slot.name](numbers[name]) if name in numbers else None
      if values is None or slot.name in left:
        left.add(slot.name)
        values = [''] * len(shared)
      texts += values
      counts.append(len(values))
      is_shared.append(slot.name not in left and isinstance(columns[name], Shared))
    found = None
    with contextlib.suppress(UnicodeEncodeError):
      found = self._reader.read(_END.join(texts).encode(), counts, is_shared, shared)
    if found is None:  # a text has a line end, or is not Unicode
      left |= {slot.name for slot in self._slots}
      found = np.zeros([0], np.int64), np.zeros([0], np.int32), np.zeros([0], np.int32)
    return found

  def _parsed(
    self, columns: Mapping[str, Sequence[Json]], shared: np.ndarray, left: Collection[str]
  ) -> Parsed:
    """Reads the slots and dense columns in `left`, as records of the log."""
    data, size, arrays = self._cfg.data, len(shared), {}
    for column, is_text in self.names.items():
      if not self._readers[column].isdisjoint(left):
        values = columns[column]
        if isinstance(values, Shared):
          values = [values[i] for i in shared]
        arrays[column] = (
          _texts(column, values) if is_text else _numbers(column, values, data.decimal)
        )
    if self._cfg.predicts_for_users:  # items seen are named by the request, not looked up by user
      arrays.setdefault(data.group, pa.nulls(size))
    block = Block(arrays, np.arange(size), lambda i: '', [])
    parsed = parse(self._cfg, block, labelled=False, without=self._all.difference(left))
    if parsed.bad:
      bad = parsed.examples[0]
      raise WrongRequest(f'{bad.what}, sample {bad.line}: found {bad.found}; wanted {bad.wanted}')
    return parsed

  # Items, of a model with model.retrieval

  @property
  def item_column(self) -> str | None:
    """The column of the log that holds the item's id; None if the model finds no items."""
    slot = self._cfg.item_slot
    return slot and (slot.column or slot.name)

  def item_keys(self, items: Sequence[Json]) -> np.ndarray:
    """Returns the keys of the items that a request leaves out, int64 [n]."""
    array = _texts('seen', items)
    if is_nested(array.type):
      raise WrongRequest("'seen': found a list within a sample's list; wanted items")
    return feature_keys(
      array, 'seen', self._ids[self._cfg.item_slot.name], self._cfg.data.missing_values
    )

  def histories(self, samples: Samples) -> list[np.ndarray]:
    """Returns, for each sample, the keys of the items in its histories, int64 [h]."""
    item = self._cfg.item_slot.name
    fields = [f for f, s in enumerate(self._cfg.ordered_slots) if s.sequence and s.shares == item]
    mine = np.isin(samples.segments % self._num_slots, fields)
    sample = samples.segments[mine] // self._num_slots
    starts = np.searchsorted(sample, np.arange(1, len(samples.dense)))
    keys = samples.keys[samples.places]
    return np.split(keys[mine] if len(samples.segments) else keys[:0], starts)

  def is_empty(self, samples: Samples) -> np.ndarray:
    """Returns which samples have neither a feature nor a dense value, bool [B]."""
    if not len(samples.segments) and len(samples.keys):
      return np.zeros([len(samples.dense)], bool)  # one feature in each slot
    counts = np.bincount(samples.segments // self._num_slots, minlength=len(samples.dense))
    return (counts == 0) & np.isnan(samples.dense).all(1)


def _plain_texts(values: Sequence[Json]) -> Sequence[str] | None:
  """Returns texts and whole numbers as texts; None if only the log's reader can."""
  kinds = set(map(type, values))
  if kinds == {str}:
    return values
  return ['' if v is None else str(v) for v in values] if kinds <= {str, int, type(None)} else None


def _wrong(column: str, i: int, value: Json, wanted: str) -> WrongRequest:
  found = repr(value)
  found = found if len(found) <= 80 else found[:80] + '…'
  return WrongRequest(f"column '{column}', sample {i}: found {found}; wanted {wanted}")


def _texts(column: str, values: Sequence[Json]) -> pa.Array:
  """Returns a slot's values as an Arrow array, as from JSON lines."""
  texts = []
  for i, value in enumerate(values):
    try:
      texts.append(value if type(value) is str else slot_value(value))
    except WrongValue as e:
      wanted = 'a string, a whole number, a boolean, null or a list of them'
      raise _wrong(column, i, e.value, wanted) from None
  try:
    return slot_array(texts)
  except (UnicodeEncodeError, pa.ArrowException):
    raise WrongRequest(f"column '{column}': found a string that is not Unicode") from None


def _numbers(column: str, values: Sequence[Json], decimal: str) -> pa.Array:
  """Returns a dense column as Arrow numbers; if any is a text, as strings with `decimal`."""
  with contextlib.suppress(pa.ArrowException, OverflowError):  # an integer may be too large
    if set(map(type, values)) <= {float, int, type(None)}:
      return pa.array(values, pa.float64(), from_pandas=True)  # NaN is null
  wanted = 'a finite number, its text, or null'
  numbers: list[float | str | None] = []
  for i, value in enumerate(values):
    try:
      number = value if value is None or isinstance(value, str) else float(value)
    except (OverflowError, TypeError):
      raise _wrong(column, i, value, wanted) from None
    numbers.append(None if number != number else number)  # NaN
  if str not in map(type, numbers):
    return pa.array(numbers, pa.float64())
  try:
    texts = [repr(n).replace('.', decimal) if isinstance(n, float) else n for n in numbers]
    return pa.array(texts, pa.string())
  except UnicodeEncodeError:
    raise WrongRequest(f"column '{column}': found a string that is not Unicode") from None
