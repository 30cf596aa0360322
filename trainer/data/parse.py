"""Raw records to typed arrays, with every record checked.

Shapes: n records, F slots, nnz features, Dn dense columns, u distinct texts of a column.
"""

import collections
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ops.keys import NO_FEATURE, integer_keys, text_keys
from ops.tensors import aligned
from trainer import config
from trainer.data.block import Block
from trainer.errors import UserError

# What is wanted of floats that stand for features.
WHOLE_NUMBER = (
  'a whole number or a text (ids that became floats: pandas.read_csv(…, dtype=str) keeps them)'
)
MAX_EXAMPLES = 10
MAX_TEXT = 200
BLANK_GROUP = 0x16A3B2F90404F  # farmhash64 of no text, mod 2^52: a group of its own


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
  """The integers of [starts[i], starts[i] + counts[i]) for every i, one after another: int64
  [Σ counts].
  """
  ends = np.cumsum(counts)
  return np.repeat(starts - ends + counts, counts) + np.arange(ends[-1] if len(ends) else 0)


class Parsed(NamedTuple):
  """The good records of a block, n of them, and what was wrong with the others."""

  counts: np.ndarray | None  # int32 [n, F], features in each slot
  # int64 [nnz], a sample's slots one after another. Where counts are None each slot has one
  # feature, or none and the key NO_FEATURE, all values are 1, and the keys are [F, n]: columns.
  keys: np.ndarray
  values: np.ndarray | None  # float32 [nnz]; None where all are 1
  dense: np.ndarray  # float32 [n, Dn], NaN where missing
  label: np.ndarray  # float32 [n]; of several tasks [n, T], NaN where blank
  weight: np.ndarray | None = None  # float32 [n]
  group: np.ndarray | None = None  # int64 [n]
  bad: collections.Counter = collections.Counter()  # kind -> records dropped for it
  examples: list[dict[str, Any]] = []  # of `_example`: the first of the block


def _is_list(t: pa.DataType) -> bool:
  return pa.types.is_list(t) or pa.types.is_large_list(t) or pa.types.is_fixed_size_list(t)


def _is_text(t: pa.DataType) -> bool:
  return (
    pa.types.is_string(t)
    or pa.types.is_binary(t)
    or pa.types.is_large_string(t)
    or pa.types.is_large_binary(t)
  )


def text_of_float(value: float) -> str | None:
  """Returns the text of a whole number, 12.0 as 12; None where the float is none, or so large that
  whole numbers beside it have the same float.
  """
  return str(int(value)) if abs(value) < 2**53 and value == int(value) else None


def whole_numbers(array: pa.Array) -> tuple[pa.Array, np.ndarray | None]:
  """Turns floats into integers, so that 12.0 is the feature that 12 is.

  Args:
    array: of any type.
  Returns:
    The array, int64 where it held floats, null where one is missing or wrong; and whether each is
    wrong [n]: no whole number, or too large as of `text_of_float`. None where it held no floats.
  """
  t = array.type
  if pa.types.is_dictionary(t) and pa.types.is_floating(t.value_type):
    array = array.dictionary_decode()
  elif not pa.types.is_floating(t):
    return array, None
  digits = np.finfo(array.type.to_pandas_dtype()).nmant + 1
  floats = array.to_numpy(zero_copy_only=False)  # NaN where null
  missing = np.isnan(floats)
  with np.errstate(invalid='ignore'):
    wrong = ~missing & ~((np.abs(floats) < 2.0**digits) & (floats == np.floor(floats)))
  numbers = np.where(missing | wrong, 0, floats).astype(np.int64)
  return pa.array(numbers, mask=missing | wrong), wrong


def _as_text(array: pa.Array, column: str) -> pa.Array:
  """A string array, nulls kept. Raises: UserError where the type has no text of its own."""
  t = array.type
  if pa.types.is_dictionary(t):
    array = array.dictionary_decode()
  array, _ = whole_numbers(array)
  t = array.type
  # The bytes are hashed as they are; nobody checks that they are UTF-8.
  if pa.types.is_binary(t):
    return array.view(pa.string())
  if pa.types.is_large_binary(t):
    return array.cast(pa.binary()).view(pa.string())
  if not (
    _is_text(t)
    or pa.types.is_integer(t)
    or pa.types.is_boolean(t)
    or pa.types.is_decimal(t)
    or pa.types.is_temporal(t)
    or pa.types.is_null(t)
  ):
    raise UserError(f"column '{column}': found values of type {t}; wanted strings or integers")
  return array.cast(pa.string())


def _text_buffers(texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
  """The bytes of a string array and the offsets of its texts in them."""
  n = len(texts)
  _, offsets, data = texts.buffers()
  if not n or offsets is None:
    return np.zeros([0], np.uint8), np.zeros([n + 1], np.int32)
  offsets = np.frombuffer(offsets, np.int32, n + 1, 4 * texts.offset)
  first, last = int(offsets[0]), int(offsets[-1])
  data = np.zeros([0], np.uint8) if last == first else np.frombuffer(data, np.uint8, last)[first:]
  return data, offsets - offsets[0]


class _Keys:
  """Keys of one slot's features; texts that stand for a missing value have none.

  Args:
    slot_id: in the top bits of the keys.
    missing_values: `data.missing_values`.
    column: for messages.
  """

  def __init__(self, slot_id: int, missing_values: Sequence[str], column: str):
    self._slot_id, self._column = slot_id, column
    markers = pa.array([m for m in missing_values if m.strip()], pa.string())
    self._markers = text_keys(*_text_buffers(markers), slot_id) if len(markers) else None

  def __call__(self, array: pa.Array) -> np.ndarray:
    """int64 [n], NO_FEATURE where the value is blank or missing."""
    t = array.type
    if pa.types.is_null(t):
      return np.full([len(array)], NO_FEATURE)
    if pa.types.is_dictionary(t):
      distinct = np.append(self(array.dictionary), NO_FEATURE)
      indices = array.indices
      if indices.null_count:
        indices = indices.fill_null(len(distinct) - 1)
      return distinct.take(indices.to_numpy())
    if pa.types.is_integer(t) and t != pa.uint64():
      values = array.fill_null(0) if array.null_count else array
      keys = integer_keys(values.cast(pa.int64()).to_numpy(), self._slot_id)
    else:
      texts = _as_text(array, self._column)
      if pa.types.is_large_string(texts.type):
        texts = texts.cast(pa.string())
      keys = text_keys(*_text_buffers(texts), self._slot_id)
    if array.null_count:
      keys[array.is_null().to_numpy(zero_copy_only=False)] = NO_FEATURE
    if self._markers is not None:
      keys = np.where(np.isin(keys, self._markers), NO_FEATURE, keys)
    return keys


def _trim(texts: pa.Array) -> pa.Array:
  """Without ASCII white space on both sides, blanks as null."""
  texts = pc.ascii_trim_whitespace(texts)
  return pc.if_else(pc.greater(pc.binary_length(texts), 0), texts, pa.scalar(None, pa.string()))


def _null_where_empty(texts: pa.Array) -> pa.Array:
  """A string array whose empty texts are null; nothing is copied but a bit a text."""
  _, offsets = _text_buffers(texts)
  present = offsets[1:] > offsets[:-1]
  if present.all():
    return texts
  if texts.null_count:
    present &= texts.is_valid().to_numpy(zero_copy_only=False)
  bits = np.packbits(present, bitorder='little')
  if texts.offset:
    bits = np.packbits(np.concatenate([np.zeros(texts.offset, bool), present]), bitorder='little')
  return pa.Array.from_buffers(
    pa.string(), len(texts), [pa.py_buffer(bits), *texts.buffers()[1:]], offset=texts.offset
  )


def _numbers_of_texts(texts: pa.Array, missing_values: Sequence[str]) -> pa.Array:
  """float64 array, null where blank or missing, infinite where a text is no number."""
  if not missing_values:
    try:
      return _null_where_empty(texts).cast(pa.float64())
    except pa.ArrowInvalid:
      pass  # white space, or no number
  texts = _trim(texts)
  if missing_values:
    known = pc.is_in(texts, pa.array([m.strip() for m in missing_values], pa.string()))
    texts = pc.if_else(known, pa.scalar(None, pa.string()), texts)
  try:
    return texts.cast(pa.float64())
  except pa.ArrowInvalid:
    encoded = texts.dictionary_encode()

  def number(text: pa.Scalar) -> float:
    try:
      return text.cast(pa.float64()).as_py()
    except pa.ArrowInvalid:
      return np.inf

  return pa.array([number(t) for t in encoded.dictionary], pa.float64()).take(encoded.indices)


def _floats(
  array: pa.Array, column: str, missing_values: Sequence[str] = ()
) -> tuple[np.ndarray, np.ndarray]:
  """Numbers of a column.

  Returns:
    float64 [n], NaN where missing; whether wrong [n]: no finite float32.
  """
  t = array.type
  if pa.types.is_integer(t) and not missing_values:
    return array.to_numpy(zero_copy_only=False).astype(np.float64), np.zeros([len(array)], bool)
  if pa.types.is_null(t):
    return np.full([len(array)], np.nan), np.zeros([len(array)], bool)
  if pa.types.is_dictionary(t):
    numbers, wrong = _floats(array.dictionary, column, missing_values)
    indices = array.indices.fill_null(len(numbers)).to_numpy()
    return np.append(numbers, np.nan)[indices], np.append(wrong, False)[indices]
  if pa.types.is_boolean(t):
    array, t = array.cast(pa.uint8()), pa.uint8()
  if pa.types.is_floating(t) or pa.types.is_integer(t) or pa.types.is_decimal(t):
    numbers = array.cast(pa.float64(), safe=False)
    if missing_values:
      markers = [_float_or_none(m) for m in missing_values]
      known = pa.array([m for m in markers if m is not None], pa.float64())
      numbers = pc.if_else(pc.is_in(numbers, known), pa.scalar(None, pa.float64()), numbers)
  else:
    texts = _as_text(array, column)
    if pa.types.is_large_string(texts.type):
      texts = texts.cast(pa.string())
    numbers = _numbers_of_texts(texts, missing_values)
  missing = None
  if numbers.null_count:
    missing = numbers.is_null().to_numpy(zero_copy_only=False)
    numbers = numbers.fill_null(0)
  numbers = numbers.to_numpy(zero_copy_only=False)
  with np.errstate(over='ignore', invalid='ignore'):
    wrong = ~np.isfinite(numbers.astype(np.float32))
  return numbers if missing is None else np.where(missing, np.nan, numbers), wrong


def _float_or_none(text: str) -> float | None:
  try:
    return float(text)
  except ValueError:
    return None


def _one_each(array: pa.Array) -> tuple[pa.Array, np.ndarray | None]:
  """A column that holds one value a record, where it came as lists.

  Returns:
    The values, null for an empty list; whether a record has several [n], None where none has.
  """
  if not _is_list(array.type):
    return array, None
  counts = pc.list_value_length(array).fill_null(0).to_numpy()
  if (counts == 1).all():
    return array.flatten(), None
  ends = np.cumsum(counts)
  first = pa.array(ends - counts, mask=counts != 1)
  return array.flatten().take(first), counts > 1


def _feature_type(t: pa.DataType) -> pa.DataType:
  """The type of the features in a list or a map."""
  inner = t.key_type if pa.types.is_map(t) else t.value_type
  return inner.value_type if pa.types.is_dictionary(inner) else inner


class _Slot(NamedTuple):
  """A column's features by distinct field: record i has those of entry `index[i]`."""

  index: np.ndarray  # int64 [n]
  starts: np.ndarray  # int64 [u]
  counts: np.ndarray  # int64 [u]
  keys: np.ndarray  # int64
  values: np.ndarray | None  # float32, beside keys
  wrong: np.ndarray  # bool [u]: a value that is no finite number, or one without a feature

  def select(self, keep: np.ndarray) -> '_Slot':
    return self._replace(index=self.index[keep])


def _several(array: pa.Array, slot: config.Slot, keys_of: _Keys) -> _Slot:
  """A slot that may hold several features, or values."""
  column = slot.column or slot.name
  is_map = pa.types.is_map(array.type)
  if _is_list(array.type) or is_map:
    index, lists = np.arange(len(array)), array
  else:
    encoded = _as_text(array, column).dictionary_encode()
    fields = len(encoded.dictionary)
    # One past the end: no features.
    index = encoded.indices.fill_null(fields).to_numpy().astype(np.int64)
    lists = pc.split_pattern(encoded.dictionary, pattern=slot.separator) if slot.separator else None
  if lists is None:
    texts, owner = encoded.dictionary, np.arange(fields)
  else:
    fields = len(lists)
    if is_map:  # its offsets may skip what null entries hold
      lists = lists.cast(
        pa.list_(pa.struct([('k', array.type.key_type), ('v', array.type.item_type)]))
      )
    texts = lists.flatten()
    owner = np.repeat(np.arange(fields), pc.list_value_length(lists).fill_null(0).to_numpy())
  values, wrong = None, np.zeros(fields + 1, bool)
  pairs = texts
  texts, not_whole = whole_numbers(pairs.field('k') if is_map else pairs)
  if not_whole is not None:
    wrong[owner[not_whole]] = True
  if is_map:
    values, not_a_number = _floats(pairs.field('v'), column)
    keys = keys_of(texts)
    wrong[owner[not_a_number | np.isnan(values) | (keys == NO_FEATURE)]] = True
  elif slot.value_separator:
    parts = pc.split_pattern(
      _as_text(texts, column).fill_null(''),
      pattern=slot.value_separator,
      max_splits=1,
      reverse=True,
    )
    first = parts.offsets.to_numpy()[:-1].astype(np.int64)
    has_value = np.diff(parts.offsets.to_numpy()) == 2
    texts = parts.values.take(pa.array(first))
    values = np.ones(len(texts), np.float64)
    values[has_value], not_a_number = _floats(
      parts.values.take(pa.array(first[has_value] + 1)), column
    )
    not_a_number |= np.isnan(values[has_value])
    blank = pc.equal(pc.binary_length(pc.ascii_trim_whitespace(texts)), 0).to_numpy(
      zero_copy_only=False
    )
    wrong[owner[has_value][not_a_number | blank[has_value]]] = True
    keys = keys_of(texts)
  else:
    keys = keys_of(texts)
  present = keys != NO_FEATURE
  if values is not None:
    values = values[present].astype(np.float32)
    values = None if (values == 1).all() else values
  counts = np.bincount(owner[present], minlength=fields + 1)
  return _Slot(index, np.cumsum(counts) - counts, counts, keys[present], values, wrong)


def feature_texts(array: pa.Array, slot: config.Slot) -> pa.Array:
  """Returns the texts of all features in a slot's column, in the order of the records; null where
  a value is.
  """
  column = slot.column or slot.name
  if pa.types.is_map(array.type):
    return _as_text(array.keys, column)
  if _is_list(array.type):
    texts = _as_text(array.flatten(), column)
  else:
    texts = _as_text(array, column)
    if slot.separator:
      texts = pc.split_pattern(texts, pattern=slot.separator).flatten()
  if slot.value_separator:
    parts = pc.split_pattern(
      texts.fill_null(''), pattern=slot.value_separator, max_splits=1, reverse=True
    )
    texts = pc.list_element(parts, 0)
  return texts


def _assemble(
  slots: list[np.ndarray | _Slot], n: int
) -> tuple[np.ndarray | None, np.ndarray, np.ndarray | None]:
  """The slots' features side by side.

  Args:
    slots: of each slot its keys [n], NO_FEATURE where it has none; or a `_Slot`.
  Returns:
    counts, keys and values of `Parsed`.
  """
  if not any(isinstance(s, _Slot) for s in slots):
    keys = aligned([len(slots), n], np.int64)
    for f, own in enumerate(slots):
      keys[f] = own
    return None, keys, None
  counts = np.stack(
    [s.counts[s.index] if isinstance(s, _Slot) else s != NO_FEATURE for s in slots], 1
  ).astype(np.int32)
  starts = (np.cumsum(counts) - counts.ravel()).reshape(n, len(slots))
  keys = np.empty([counts.sum()], np.int64)
  valued = any(isinstance(s, _Slot) and s.values is not None for s in slots)
  values = np.ones([len(keys)], np.float32) if valued else None
  for f, s in enumerate(slots):
    if not isinstance(s, _Slot):
      present = counts[:, f] > 0
      keys[starts[present, f]] = s[present]
      continue
    to, source = ranges(starts[:, f], counts[:, f]), ranges(s.starts[s.index], counts[:, f])
    keys[to] = s.keys[source]
    if s.values is not None:
      values[to] = s.values[source]
  return counts, keys, values


def _example(line: int, what: str, found: str, wanted: str, text: str) -> dict[str, Any]:
  return {
    'line': line,
    'what': what,
    'found': found[:MAX_TEXT],
    'wanted': wanted,
    'text': text[:MAX_TEXT],
  }


class _Records:
  """Which records of a block are kept, and why the others are not.

  A record that is wrong is counted once, under the first thing that is wrong with it.
  """

  def __init__(self, block: Block):
    self._block = block
    self.keep = np.ones([len(block.lines)], bool)
    self.bad = collections.Counter()
    self.examples = []
    if block.malformed:
      self.bad['malformed'] = len(block.malformed)
      self.examples += [
        _example(m.line, 'malformed record', m.found, m.wanted, m.text)
        for m in block.malformed[:MAX_EXAMPLES]
      ]

  def drop(self, wrong: np.ndarray | None, kind: str, column: str, wanted: str) -> None:
    """Drops the records `wrong` [n] that are still there."""
    rows = [] if wrong is None or not wrong.any() else np.flatnonzero(wrong & self.keep)
    if not len(rows):
      return
    self.bad[kind] += len(rows)
    self.keep[rows] = False
    for i in rows[:MAX_EXAMPLES].tolist():
      try:
        found = self._block.columns[column][i].as_py()
        found = found.decode(errors='replace') if isinstance(found, bytes) else found
      except UnicodeDecodeError:  # a string of bytes that are no text
        found = self._block.text(i)
      hint = ''
      if isinstance(found, str) and found.strip() and _float_or_none(found) is None:
        if kind == 'label' and wanted == '0 or 1':
          hint = ', or data.label_positive, which says what text is a 1'
        elif kind == 'dense':
          hint = f', or data.missing_values: [{found[:MAX_TEXT]!r}]'
      self.examples.append(
        _example(
          int(self._block.lines[i]),
          f"column '{column}'",
          repr(found),
          wanted + hint,
          self._block.text(i),
        )
      )


def label_texts(array: pa.Array, column: str) -> tuple[list[str], np.ndarray]:
  """Returns the distinct texts of labels, and the place among them of each label, int64 [n]; one
  past the end where it is blank.
  """
  encoded = _trim(_as_text(_one_each(array)[0], column)).dictionary_encode()
  distinct = [t.decode(errors='replace') for t in encoded.dictionary.view(pa.binary()).to_pylist()]
  return distinct, encoded.indices.fill_null(len(distinct)).to_numpy()


def _classes(
  array: pa.Array, column: str, label: config.Label, missing: Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
  """Labels by what their texts match.

  Returns:
    float64 [n], 0 or 1, NaN where blank or missing; whether wrong [n]: neither positive nor
    negative.
  """

  def of(text: str) -> float:
    if text in missing:
      return np.nan
    if re.fullmatch('1' if label.positive is None else label.positive, text):
      return 1.0
    return 0.0 if label.negative is None or re.fullmatch(label.negative, text) else np.inf

  distinct, places = label_texts(array, column)
  found = np.array([*map(of, distinct), np.nan])[places]
  return found, np.isinf(found)


def _labels(cfg: config.Config, block: Block, records: _Records) -> np.ndarray:
  """float64 [n], or of several tasks [n, T]; records whose label is none are dropped.

  A blank label of one task of several is kept, as NaN.
  """
  data, columns = cfg.data, []
  for label in data.labels:
    column = label.column or label.name
    array, several = _one_each(block.columns[column])
    records.drop(several, 'label', column, 'one label')
    if label.positive is not None or label.negative is not None:
      classes, wrong = _classes(array, column, label, data.missing_values)
      records.drop(wrong, 'label', column, 'what positive or negative of data.labels matches')
      columns.append(classes)
      continue
    numbers, wrong = _floats(array, column, data.missing_values)
    if label.loss == 'squared_error':
      records.drop(wrong, 'label', column, 'a finite number, or blank')
    else:
      wrong |= ~np.isnan(numbers) & (numbers != 0) & (numbers != 1)
      records.drop(wrong, 'label', column, '0 or 1, or blank')
    columns.append(numbers)
  if columns:
    return np.stack(columns, 1)
  column = data.label
  array, several = _one_each(block.columns[column])
  records.drop(several, 'label', column, 'one label')
  if data.label_positive is not None or data.label_negative is not None:
    label, wrong = _classes(array, column, cfg.labels[0], data.missing_values)
    records.drop(wrong, 'label', column, 'what data.label_positive or label_negative matches')
    records.drop(np.isnan(label), 'label', column, 'a text')
    return label
  label, wrong = _floats(array, column, data.missing_values)
  if cfg.model.loss == 'squared_error':
    records.drop(wrong | np.isnan(label), 'label', column, 'a finite number')
  else:
    records.drop(~((label == 0) | (label == 1)), 'label', column, '0 or 1')
  return label


def _labels_of_none(
  data: config.Data, n: int
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
  """label, weight and group of n records that have none."""
  label = np.zeros([n, len(data.labels)] if data.labels else [n])
  weight = None if data.weight is None else np.ones([n])
  return label, weight, None if data.group is None else np.full([n], BLANK_GROUP)


def parse(cfg: config.Config, block: Block, labelled: bool = True) -> Parsed:
  """Turns a `Block` into `Parsed`.

  A record that is wrong is dropped and counted: once, under the first of malformed, label, weight,
  dense, value that it fails.

  Args:
    cfg: the config.
    block: the records.
    labelled: whether they have labels, weights and groups; where not, labels are 0, weights 1, and
      all are of one group.
  Raises:
    UserError: where a column's type cannot be read at all.
  """
  data, ids, n = cfg.data, cfg.slot_ids(), len(block.lines)
  records = _Records(block)
  label, weight, group = _labels_of_none(data, n)
  if labelled:
    label = _labels(cfg, block, records)
    if data.weight is not None:
      array, several = _one_each(block.columns[data.weight])
      records.drop(several, 'weight', data.weight, 'one weight')
      weight, wrong = _floats(array, data.weight, data.missing_values)
      records.drop(wrong | ~(weight >= 0), 'weight', data.weight, 'a finite number >= 0')
    if data.group is not None:
      array, several = _one_each(block.columns[data.group])
      records.drop(several, 'group', data.group, 'one value')
      array, wrong = whole_numbers(array)
      records.drop(wrong, 'group', data.group, WHOLE_NUMBER)
      group = _Keys(0, data.missing_values, data.group)(array)
      group = np.where(group == NO_FEATURE, BLANK_GROUP, group)
  dense = np.empty([n, len(data.dense)], np.float32)
  for i, column in enumerate(data.dense):
    array, several = _one_each(block.columns[column.name])
    records.drop(several, 'dense', column.name, 'one number, or none for missing')
    numbers, wrong = _floats(array, column.name, data.missing_values)
    records.drop(wrong, 'dense', column.name, 'a finite number, or blank for missing')
    with np.errstate(over='ignore', invalid='ignore'):
      dense[:, i] = numbers
  slots = []
  for s in cfg.slots:
    column = s.column or s.name
    array, wrong = whole_numbers(block.columns[column])
    records.drop(wrong, 'value', column, WHOLE_NUMBER)
    keys_of = _Keys(ids[s.name], data.missing_values, column)
    nested = _is_list(array.type) or pa.types.is_map(array.type)
    if not (nested or s.separator or s.value_separator) or pa.types.is_null(array.type):
      slots.append(keys_of(array))
      continue
    parsed = _several(array, s, keys_of)
    wanted = f'features as NAME or NAME{s.value_separator or ": "}NUMBER'
    if nested and pa.types.is_floating(_feature_type(array.type)):
      wanted = f'features each of which is {WHOLE_NUMBER}'
    records.drop(parsed.wrong[parsed.index], 'value', column, wanted)
    if s.sequence:  # the last so many
      counts = np.minimum(parsed.counts, s.sequence.max_length)
      parsed = parsed._replace(starts=parsed.starts + parsed.counts - counts, counts=counts)
    slots.append(parsed)
  keep = records.keep
  if not keep.all():
    slots = [s.select(keep) if isinstance(s, _Slot) else s[keep] for s in slots]
    dense, label = dense[keep], label[keep]
    weight, group = (a if a is None else a[keep] for a in (weight, group))
  counts, keys, values = _assemble(slots, len(label))
  return Parsed(
    counts,
    keys,
    values,
    dense,
    label.astype(np.float32),
    None if weight is None else weight.astype(np.float32),
    group,
    records.bad,
    sorted(records.examples, key=lambda e: e['line'])[:MAX_EXAMPLES],
  )
