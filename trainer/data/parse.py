"""Converts raw records to typed arrays and checks every record.

Shapes: n records, F slots, T labels, nnz features, Dn dense columns, u distinct fields of a column.
"""

import collections
import functools
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ops.keys import NO_FEATURE, integer_keys, text_keys
from ops.tensors import aligned
from trainer import config
from trainer.data.block import BadRecord, Block
from trainer.errors import UserError

# What a float has to be to stand for a feature.
WHOLE_NUMBER = (
  'a whole number or a text (ids that became floats: pandas.read_csv(…, dtype=str) keeps them)'
)
MAX_EXAMPLES = 10
MAX_TEXT = 200
_DECIMAL_COMMA = re.compile(r'[+-]?\d+,\d+')
BLANK_GROUP = 0x16A3B2F90404F  # farmhash64 of no text, mod 2^52: a group of its own


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
  """Returns the integers of [starts[i], starts[i] + counts[i]) for every i, int64 [Σ counts]."""
  ends = np.cumsum(counts)
  return np.repeat(starts - ends + counts, counts) + np.arange(ends[-1] if len(ends) else 0)


class Parsed(NamedTuple):
  """The n good records of a block, and what was wrong with the others."""

  counts: np.ndarray | None  # int32 [n, F], features in each slot
  # int64 [nnz], a sample's slots one after another. If counts are None, each slot has one feature
  # or none (the key NO_FEATURE), all values are 1, and the keys are columns: [F, n].
  keys: np.ndarray
  values: np.ndarray | None  # float32 [nnz]; None if all are 1
  dense: np.ndarray  # float32 [n, Dn], NaN where missing
  label: np.ndarray  # float32 [n, T], NaN where blank
  weight: np.ndarray | None = None  # float32 [n]
  group: np.ndarray | None = None  # int64 [n]
  bad: collections.Counter[str] = collections.Counter()  # kind -> dropped records
  examples: Sequence[BadRecord] = ()  # the first of them


# Values of one column


def _is_list(t: pa.DataType) -> bool:
  return pa.types.is_list(t) or pa.types.is_large_list(t) or pa.types.is_fixed_size_list(t)


def text_of_float(value: float) -> str | None:
  """Returns the text of a whole number, 12.0 as '12'.

  Returns None for a fraction, and for a number so large that its neighbours are the same float.
  """
  return str(int(value)) if abs(value) < 2**53 and value == int(value) else None


def whole_numbers(array: pa.Array) -> tuple[pa.Array, np.ndarray | None]:
  """Turns floats into integers, so that 12.0 is the same feature as 12.

  Args:
    array: of any type.
  Returns:
    The array, as int64 if it held floats, null where a value is missing or wrong; and whether each
    value is wrong, bool [n]: a fraction or too large, as in `text_of_float`. None instead if the
    array held no floats.
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
  """Returns a string array, nulls kept. Raises UserError if the type has no text of its own."""
  if pa.types.is_dictionary(array.type):
    array = array.dictionary_decode()
  array, _ = whole_numbers(array)
  t = array.type
  # Bytes are hashed as they are; nobody checks that they are UTF-8.
  if pa.types.is_large_binary(t) or pa.types.is_large_string(t):
    array, t = array.cast(pa.binary()), pa.binary()
  if pa.types.is_binary(t):
    return array.view(pa.string())
  try:
    return array.cast(pa.string())
  except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
    raise UserError(
      f"column '{column}': found values of type {t}; wanted strings or integers"
    ) from None


def _text_buffers(texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
  """Returns the bytes of a string array, and the offsets of its texts in them."""
  n = len(texts)
  _, offsets, data = texts.buffers()
  if not n or offsets is None:
    return np.zeros([0], np.uint8), np.zeros([n + 1], np.int32)
  offsets = np.frombuffer(offsets, np.int32, n + 1, 4 * texts.offset)
  first, last = int(offsets[0]), int(offsets[-1])
  data = np.zeros([0], np.uint8) if last == first else np.frombuffer(data, np.uint8, last)[first:]
  return data, offsets - offsets[0]


@functools.lru_cache
def _marker_keys(missing_values: tuple[str, ...], slot_id: int) -> np.ndarray:
  """Returns the keys that the texts of `data.missing_values` would have in a slot."""
  markers = pa.array([m for m in missing_values if m.strip()], pa.string())
  return text_keys(*_text_buffers(markers), slot_id)


def _keys(array: pa.Array, column: str, slot_id: int, missing_values: Sequence[str]) -> np.ndarray:
  """Returns the keys of a slot's features, int64 [n]; NO_FEATURE where one is blank or missing."""
  t = array.type
  if pa.types.is_null(t):
    return np.full([len(array)], NO_FEATURE)
  if pa.types.is_dictionary(t):
    distinct = np.append(_keys(array.dictionary, column, slot_id, missing_values), NO_FEATURE)
    indices = array.indices
    if indices.null_count:
      indices = indices.fill_null(len(distinct) - 1)
    return distinct.take(indices.to_numpy())
  if pa.types.is_integer(t) and t != pa.uint64():
    values = array.fill_null(0) if array.null_count else array
    keys = integer_keys(values.cast(pa.int64()).to_numpy(), slot_id)
  else:
    keys = text_keys(*_text_buffers(_as_text(array, column)), slot_id)
  if array.null_count:
    keys[array.is_null().to_numpy(zero_copy_only=False)] = NO_FEATURE
  if missing_values:
    markers = _marker_keys(tuple(missing_values), slot_id)
    keys = np.where(np.isin(keys, markers), NO_FEATURE, keys)
  return keys


def _trim(texts: pa.Array) -> pa.Array:
  """Removes ASCII white space on both sides; blank texts become null."""
  texts = pc.ascii_trim_whitespace(texts)
  return pc.if_else(pc.greater(pc.binary_length(texts), 0), texts, pa.scalar(None, pa.string()))


def _float_or_none(text: str) -> float | None:
  try:
    return float(text)
  except ValueError:
    return None


def _numbers_of_texts(texts: pa.Array, missing_values: Sequence[str]) -> pa.Array:
  """Returns float64, null where a text is blank or missing, infinite where it is no number."""
  if not missing_values:
    try:
      return texts.cast(pa.float64())
    except pa.ArrowInvalid:
      pass  # a blank, white space, or no number
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
  """Reads the numbers of a column.

  Returns:
    float64 [n], NaN where missing; and whether each is wrong, that is no finite float32, bool [n].
  """
  if pa.types.is_dictionary(array.type):
    array = array.dictionary_decode()
  if pa.types.is_boolean(array.type):
    array = array.cast(pa.uint8())
  t = array.type
  if pa.types.is_floating(t) or pa.types.is_integer(t) or pa.types.is_decimal(t):
    numbers = array.cast(pa.float64(), safe=False)
    if missing_values:
      markers = [m for m in map(_float_or_none, missing_values) if m is not None]
      known = pc.is_in(numbers, pa.array(markers, pa.float64()))
      numbers = pc.if_else(known, pa.scalar(None, pa.float64()), numbers)
  else:
    numbers = _numbers_of_texts(_as_text(array, column), missing_values)
  missing = None
  if numbers.null_count:
    missing = numbers.is_null().to_numpy(zero_copy_only=False)
    numbers = numbers.fill_null(0)
  numbers = numbers.to_numpy(zero_copy_only=False)
  with np.errstate(over='ignore', invalid='ignore'):
    wrong = ~np.isfinite(numbers.astype(np.float32))
  return numbers if missing is None else np.where(missing, np.nan, numbers), wrong


def _one_each(array: pa.Array) -> tuple[pa.Array, np.ndarray | None]:
  """Unpacks a column that holds one value a record, if it came as lists.

  Returns:
    The values, null for an empty list; and whether each record has several, bool [n], None if the
    column was no list.
  """
  if not _is_list(array.type):
    return array, None
  counts = pc.list_value_length(array).fill_null(0).to_numpy()
  if (counts == 1).all():
    return array.flatten(), None
  first = pa.array(np.cumsum(counts) - counts, mask=counts != 1)
  return array.flatten().take(first), counts > 1


# Slots that may hold several features


class _Slot(NamedTuple):
  """A column's features by distinct field: record i has those of entry `index[i]`."""

  index: np.ndarray  # int64 [n]
  starts: np.ndarray  # int64 [u]
  counts: np.ndarray  # int64 [u]
  keys: np.ndarray  # int64
  values: np.ndarray | None  # float32, beside keys
  wrong: np.ndarray  # bool [u]: has a value that is no finite number, or one without a feature


def _split_values(texts: pa.Array, separator: str) -> pa.Array:
  """Splits texts such as sports:0.5 at the last separator, into lists of one or two parts."""
  return pc.split_pattern(texts.fill_null(''), pattern=separator, max_splits=1, reverse=True)


def _several(
  array: pa.Array, slot: config.Slot, slot_id: int, missing_values: Sequence[str]
) -> _Slot:
  """Reads a slot that may hold several features, or features with values."""
  column = slot.column or slot.name
  is_map = pa.types.is_map(array.type)
  if is_map:  # as a list, because a map's offsets may skip what null entries hold
    pair = pa.struct([('k', array.type.key_type), ('v', array.type.item_type)])
    array = array.cast(pa.list_(pair))
  if _is_list(array.type):
    fields, index = array, np.arange(len(array))
  else:
    encoded = _as_text(array, column).dictionary_encode()
    distinct = encoded.dictionary
    # One past the end stands for no features.
    index = encoded.indices.fill_null(len(distinct)).to_numpy().astype(np.int64)
    if slot.separator:
      fields = pc.split_pattern(distinct, pattern=slot.separator)
    else:
      fields = pa.ListArray.from_arrays(np.arange(len(distinct) + 1, dtype=np.int32), distinct)
  owner = np.repeat(np.arange(len(fields)), pc.list_value_length(fields).fill_null(0).to_numpy())
  pairs = fields.flatten()
  texts, wrong = whole_numbers(pairs.field('k') if is_map else pairs)
  wrong = np.zeros(len(texts), bool) if wrong is None else wrong
  values = None
  if is_map:
    values, not_a_number = _floats(pairs.field('v'), column)
    wrong |= not_a_number | np.isnan(values)
  elif slot.value_separator:
    parts = _split_values(_as_text(texts, column), slot.value_separator)
    has_value = pc.list_value_length(parts).to_numpy() == 2
    texts = pc.list_element(parts, 0)
    values = np.ones(len(texts), np.float64)
    given = pc.list_element(parts.filter(pa.array(has_value)), 1)
    values[has_value], not_a_number = _floats(given, column)
    wrong[has_value] |= not_a_number | np.isnan(values[has_value])
    wrong |= has_value & _trim(texts).is_null().to_numpy(zero_copy_only=False)
  keys = _keys(texts, column, slot_id, missing_values)
  present = keys != NO_FEATURE
  if is_map:
    wrong |= ~present
  if values is not None:
    values = values[present].astype(np.float32)
    values = None if (values == 1).all() else values
  counts = np.bincount(owner[present], minlength=len(fields) + 1)
  is_wrong = np.bincount(owner[wrong], minlength=len(fields) + 1) > 0
  return _Slot(index, np.cumsum(counts) - counts, counts, keys[present], values, is_wrong)


def feature_texts(array: pa.Array, slot: config.Slot) -> pa.Array:
  """Returns the texts of all features in a slot's column, in the order of the records; null where
  a value is null.
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
    texts = pc.list_element(_split_values(texts, slot.value_separator), 0)
  return texts


def _assemble(
  slots: Sequence[np.ndarray | _Slot], n: int
) -> tuple[np.ndarray | None, np.ndarray, np.ndarray | None]:
  """Puts the slots' features side by side.

  Args:
    slots: for each slot its keys [n], NO_FEATURE where it has none; or a `_Slot`.
    n: the number of records.
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


# Records


class _Records:
  """Which records of a block are kept, and why the others are not.

  A record is counted once, under the first mistake that is found in it.
  """

  def __init__(self, block: Block):
    self._block = block
    self.keep = np.ones([len(block.lines)], bool)
    self.bad: collections.Counter[str] = collections.Counter()
    if block.malformed:
      self.bad['malformed'] = len(block.malformed)
    self._examples = [
      e._replace(found=e.found[:MAX_TEXT], text=e.text[:MAX_TEXT])
      for e in block.malformed[:MAX_EXAMPLES]
    ]

  def examples(self) -> list[BadRecord]:
    """Returns the first bad records, by line."""
    return sorted(self._examples, key=lambda e: e.line)[:MAX_EXAMPLES]

  def single(self, column: str, kind: str, wanted: str) -> pa.Array:
    """Returns a column with one value a record; drops records that have several."""
    array, several = _one_each(self._block.columns[column])
    self.drop(several, kind, column, wanted)
    return array

  def drop(self, wrong: np.ndarray | None, kind: str, column: str, wanted: str) -> None:
    """Drops those of the records `wrong`, bool [n], that are still kept."""
    if wrong is None or not (wrong := wrong & self.keep).any():
      return
    rows = np.flatnonzero(wrong)
    self.bad[kind] += len(rows)
    self.keep[rows] = False
    for i in rows[:MAX_EXAMPLES].tolist():
      text = self._block.text(i)
      try:
        found = self._block.columns[column][i].as_py()
        found = found.decode(errors='replace') if isinstance(found, bytes) else found
      except UnicodeDecodeError:  # a string of bytes that are no text
        found = text
      hint = ''
      if isinstance(found, str) and found.strip() and _float_or_none(found) is None:
        if kind == 'label' and wanted == '0 or 1':
          hint = ', or data.label_positive, which says what text is a 1'
        elif kind == 'dense' and _DECIMAL_COMMA.fullmatch(found.strip()):
          hint = '; a decimal comma is not read: write a point in its place'
        elif kind == 'dense':
          hint = (
            f', or data.missing_values: [{found[:MAX_TEXT]!r}]; a column of texts belongs into '
            'data.slots'
          )
      self._examples.append(
        BadRecord(
          int(self._block.lines[i]),
          repr(found)[:MAX_TEXT],
          wanted + hint,
          text[:MAX_TEXT],
          f"column '{column}'",
        )
      )


def label_texts(array: pa.Array, column: str) -> tuple[list[str], np.ndarray]:
  """Returns the distinct texts of labels, and the place among them of each label, int64 [n].

  The place of a blank label is one past the end.
  """
  encoded = _trim(_as_text(_one_each(array)[0], column)).dictionary_encode()
  distinct = [t.decode(errors='replace') for t in encoded.dictionary.view(pa.binary()).to_pylist()]
  return distinct, encoded.indices.fill_null(len(distinct)).to_numpy()


def _classes(
  array: pa.Array, column: str, label: config.Label, missing: Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
  """Reads labels by what their texts match.

  Returns:
    float64 [n], 0 or 1, NaN where blank or missing; and whether each is wrong, that is neither
    positive nor negative, bool [n].
  """

  def class_of(text: str) -> float:
    if text in missing:
      return np.nan
    if re.fullmatch('1' if label.positive is None else label.positive, text):
      return 1.0
    return 0.0 if label.negative is None or re.fullmatch(label.negative, text) else np.inf

  distinct, places = label_texts(array, column)
  classes = np.array([*map(class_of, distinct), np.nan])[places]
  return classes, np.isinf(classes)


def _labels(cfg: config.Config, records: _Records) -> np.ndarray:
  """Returns the labels, float64 [n, T]. Records with a wrong label are dropped.

  A blank label is NaN if there are several, and wrong if there is one.
  """
  missing, columns = cfg.data.missing_values, []
  may_be_blank = len(cfg.labels) > 1
  keys = 'positive or negative' if may_be_blank else 'data.label_positive or label_negative'
  for label in cfg.labels:
    column = label.column or label.name
    array = records.single(column, 'label', 'one label')
    if label.positive is not None or label.negative is not None:
      numbers, wrong = _classes(array, column, label, missing)
      wanted = f'a text that {keys} matches'
    else:
      numbers, wrong = _floats(array, column, missing)
      wanted = 'a finite number'
      if label.loss != 'squared_error':
        wrong |= ~np.isnan(numbers) & (numbers != 0) & (numbers != 1)
        wanted = '0 or 1'
    if may_be_blank:
      wanted += ', or blank'
    else:
      wrong |= np.isnan(numbers)
    records.drop(wrong, 'label', column, wanted)
    columns.append(numbers)
  return np.stack(columns, 1)


def parse(cfg: config.Config, block: Block, labelled: bool = True) -> Parsed:
  """Turns a `Block` into `Parsed`.

  A wrong record is dropped and counted once, under the first of malformed, label, weight, dense,
  value that it fails.

  Args:
    cfg: the config.
    block: the records.
    labelled: whether they have labels, weights and groups. If not, labels are 0, weights 1, and all
      are of one group. Where data.label is null, labels are 1.
  Raises:
    UserError: if a column's type cannot be read at all.
  """
  data, ids, n = cfg.data, cfg.slot_ids(), len(block.lines)
  records = _Records(block)
  if cfg.data.label is None:
    label = np.ones([n, 1])
  else:
    label = _labels(cfg, records) if labelled else np.zeros([n, len(cfg.labels)])
  weight = group = None
  if data.weight is not None:
    weight = np.ones([n])
    if labelled:
      array = records.single(data.weight, 'weight', 'one weight')
      weight, wrong = _floats(array, data.weight, data.missing_values)
      records.drop(wrong | ~(weight >= 0), 'weight', data.weight, 'a finite number >= 0')
  if data.group is not None:
    group = np.full([n], BLANK_GROUP)
    if labelled:
      array, wrong = whole_numbers(records.single(data.group, 'group', 'one value'))
      records.drop(wrong, 'group', data.group, WHOLE_NUMBER)
      group = _keys(array, data.group, 0, data.missing_values)
      group = np.where(group == NO_FEATURE, BLANK_GROUP, group)
  dense = np.empty([n, len(data.dense)], np.float32)
  for i, column in enumerate(data.dense):
    array = records.single(column.name, 'dense', 'one number, or none for missing')
    numbers, wrong = _floats(array, column.name, data.missing_values)
    records.drop(wrong, 'dense', column.name, 'a finite number, or blank for missing')
    with np.errstate(over='ignore', invalid='ignore'):
      dense[:, i] = numbers
  slots: list[np.ndarray | _Slot] = []
  for s in cfg.slots:
    column = s.column or s.name
    array, wrong = whole_numbers(block.columns[column])
    records.drop(wrong, 'value', column, WHOLE_NUMBER)
    nested = _is_list(array.type) or pa.types.is_map(array.type)
    if not (nested or s.separator or s.value_separator) or pa.types.is_null(array.type):
      slots.append(_keys(array, column, ids[s.name], data.missing_values))
      continue
    slot = _several(array, s, ids[s.name], data.missing_values)
    wanted = f'features as NAME or NAME{s.value_separator or ": "}NUMBER'
    if nested and _holds_floats(array.type):
      wanted = f'features each of which is {WHOLE_NUMBER}'
    records.drop(slot.wrong[slot.index], 'value', column, wanted)
    if s.sequence:  # the last so many
      counts = np.minimum(slot.counts, s.sequence.max_length)
      slot = slot._replace(starts=slot.starts + slot.counts - counts, counts=counts)
    slots.append(slot)
  keep = records.keep
  if not keep.all():
    slots = [s._replace(index=s.index[keep]) if isinstance(s, _Slot) else s[keep] for s in slots]
    dense, label = dense[keep], label[keep]
    weight, group = (a if a is None else a[keep] for a in (weight, group))
  return Parsed(
    *_assemble(slots, len(label)),
    dense,
    label.astype(np.float32),
    None if weight is None else weight.astype(np.float32),
    group,
    records.bad,
    records.examples(),
  )


def _holds_floats(t: pa.DataType) -> bool:
  """Returns whether the features in lists or maps of a type are floats."""
  inner = t.key_type if pa.types.is_map(t) else t.value_type
  return pa.types.is_floating(inner.value_type if pa.types.is_dictionary(inner) else inner)
