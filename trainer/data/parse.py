"""Checks raw records, and converts the good ones to arrays.

Shapes: n records, F slots, T labels, nnz features, Dn dense columns.
"""

import collections
import contextlib
import functools
import math
import re
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ops.keys import NO_FEATURE
from trainer import config
from trainer.data.arrays import is_nested, one_each, ranges
from trainer.data.block import BadRecord, Block
from trainer.data.columns.arrow_columns import ArrowReader
from trainer.data.slot_features import SlotFeatures, distinct_texts, several_features
from trainer.data.values import (
  MOST,
  MOST_FLOAT32,
  WHOLE_NUMBER,
  Writing,
  as_text,
  feature_keys,
  float_or_none,
  floats,
  holds_floats,
  label_text,
  label_writings,
  trim,
  whole_numbers,
)
from trainer.plain_data import Json

MAX_EXAMPLES = 10
MAX_TEXT = 200
_DECIMAL_COMMA = re.compile(r'[+-]?(\d{1,3}(\.\d{3})+|\d*),\d+(e[+-]?\d+)?', re.IGNORECASE)
BLANK_GROUP = 0x16A3B2F90404F  # the group of samples without one: farmhash64 of '', mod 2^52


class Parsed(NamedTuple):
  """The n good records of a block as arrays, and the mistakes in its bad records."""

  # int32 [n, F], features in each slot; None if each has one key of value 1, which may be
  # NO_FEATURE.
  counts: np.ndarray | None
  keys: Sequence[np.ndarray]  # of each slot, int64, record by record
  values: Sequence[np.ndarray] | None  # of each slot, float32, one for each key; None if all are 1
  dense: np.ndarray  # float32 [n, Dn], NaN where missing
  label: np.ndarray  # float32 [n, T], NaN where blank
  weight: np.ndarray | None = None  # float32 [n]
  group: np.ndarray | None = None  # int64 [n]
  bad: collections.Counter[str] = collections.Counter()  # kind of mistake -> dropped records
  examples: Sequence[BadRecord] = ()  # the first bad records
  texts: Sequence[tuple[np.ndarray, pa.Array]] = ()  # keys and texts, for data.keep_texts
  largest: tuple[float, int] = 0.0, 0  # of the numbers that a model may read as they are; its line

  def by_sample(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns `keys`, `values` and `segments` as a SlotBatch has them, sample by sample."""
    if self.counts is None:
      keys, segments = np.stack(self.keys, 1).reshape(-1), np.zeros([0], np.int32)
      if (keys == NO_FEATURE).any():
        segments = np.flatnonzero(keys != NO_FEATURE).astype(np.int32)
        keys = keys[segments]
      return keys, np.ones([len(segments)], np.float32), segments
    starts = (np.cumsum(self.counts) - self.counts.ravel()).reshape(self.counts.shape)
    keys = np.empty([self.counts.sum()], np.int64)
    values = np.ones([len(keys)], np.float32)
    for f, own in enumerate(self.keys):
      if not len(own):
        continue
      to = ranges(starts[:, f], self.counts[:, f])
      keys[to] = own
      if self.values:
        values[to] = self.values[f]
    return keys, values, np.repeat(np.arange(starts.size, dtype=np.int32), self.counts.ravel())


def _ragged(slot: np.ndarray | SlotFeatures) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
  """Returns how many features each record has in a slot, [n], their keys, and their values."""
  if isinstance(slot, SlotFeatures):
    counts = slot.counts[slot.index]
    source = ranges(slot.starts[slot.index], counts)
    return counts, slot.keys[source], None if slot.values is None else slot.values[source]
  present = slot != NO_FEATURE
  return present, slot[present], None


def _assemble(
  slots: Sequence[np.ndarray | SlotFeatures],
) -> tuple[np.ndarray | None, Sequence[np.ndarray], Sequence[np.ndarray] | None]:
  """Returns `counts`, `keys` and `values` of `Parsed`.

  A slot is its keys [n], NO_FEATURE where a record has none, or a `SlotFeatures`.
  """
  if not any(isinstance(slot, SlotFeatures) for slot in slots):
    return None, slots, None
  counts, keys, values = zip(*map(_ragged, slots))
  if all(own is None for own in values):
    values = None
  else:
    values = [np.ones(len(k), np.float32) if v is None else v for k, v in zip(keys, values)]
  return np.stack(counts, 1).astype(np.int32), keys, values


def _largest(
  lines: np.ndarray,
  dense: np.ndarray,
  weight: np.ndarray | None,
  counts: np.ndarray | None,
  values: Sequence[np.ndarray] | None,
) -> tuple[float, int]:
  """Returns the `largest` of `Parsed`; its arrays have n > 0 records."""
  numbers = np.abs(np.nan_to_num(dense)).max(1, initial=0)
  numbers = numbers if weight is None else np.maximum(numbers, weight)
  found = [(float(numbers.max()), int(lines[numbers.argmax()]))]
  for own, of_slot in zip(values, counts.T) if values else ():
    if len(own):
      at = np.abs(own).argmax()
      record = np.searchsorted(of_slot.cumsum(), at, 'right')
      found.append((float(abs(own[at])), int(lines[record])))
  return max(found)


# Records


class _Records:
  """Marks the good records of a block; counts the bad ones by the kind of their first mistake."""

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
    """Returns the first bad records, in order of their lines."""
    return sorted(self._examples, key=lambda e: e.line)[:MAX_EXAMPLES]

  def single(self, column: str, kind: str, wanted: str) -> pa.Array:
    """Returns a column that has one value a record; drops records that have several."""
    array, several = one_each(self._block.columns[column])
    self.drop(several, kind, column, wanted)
    return array

  def drop(
    self,
    wrong: np.ndarray | None,
    kind: str,
    column: str,
    wanted: str,
    hint_of: Callable[[Json], str] | None = None,
  ) -> None:
    """Drops the records in `wrong`, bool [n] or None, that no earlier call dropped.

    `kind` is counted in `bad`; `wanted` and `hint_of(wrong value)` say what else the value should
    be.
    """
    if wrong is None or not (wrong := wrong & self.keep).any():
      return
    rows, is_of_log = np.flatnonzero(wrong), column in self._block.columns  # else it is computed
    self.bad[kind] += len(rows)
    self.keep[rows] = False
    for i in rows[:MAX_EXAMPLES].tolist():
      value = text = self._block.text(i)
      with contextlib.suppress(UnicodeDecodeError):  # a string of bytes that are no text
        value = self._block.columns[column][i].as_py() if is_of_log else text
        value = value.decode(errors='replace') if isinstance(value, bytes) else value
      hint = ''
      number = float_or_none(value) if is_of_log and isinstance(value, str) and value.strip() else 0
      if number is None or math.isnan(number):
        if kind == 'dense' and _DECIMAL_COMMA.fullmatch(value.strip()):
          hint = "; data.decimal: ',' reads a decimal comma"
        elif kind == 'dense':
          hint = '; a column of texts is a slot (data.slots); ' if number is None else '; '
          if any(map(str.isdigit, value)):
            hint += 'a number is written without a unit'
          else:
            hint += 'a text that stands for a missing number belongs in data.missing_values: '
            hint += f'[{value[:MAX_TEXT]!r}]'
      if MOST < abs(float_or_none(str(value)) or 0) < math.inf:
        hint = f'; it is beyond {MOST:.2g}, so that its square is no float32'
      hint = hint_of(value) if hint_of else hint
      shown = 'null' if value is None else repr(value)[:MAX_TEXT]
      line = int(self._block.lines[i])
      example = BadRecord(line, shown, wanted + hint, text[:MAX_TEXT], f"column '{column}'")
      self._examples.append(example)


def _label_hint(value: Json, positive: str, loss: str | None) -> str:
  """Returns the end of a message about a label that is neither 0 nor 1: how such labels are read.

  `positive` and `loss` are config keys; `loss` is None if the model cannot predict numbers.
  """
  if value is None or isinstance(value, list) or not str(value).strip():
    return ''
  number = float_or_none(str(value))
  if number is None:
    return f', or {positive}, which says what text is a 1'
  if number == -1:
    return f"; {positive}: '\\+?1' takes 1 and +1 as 1, and -1 as 0"
  predicts = f'; {loss}: squared_error predicts the number' if loss else ''
  return f"; {positive} says which are a 1, as '4|5'{predicts}"


def label_texts(array: pa.Array, column: str) -> tuple[list[str], np.ndarray]:
  """Returns the distinct label texts of a column, and each record's index into them, int64 [n].

  Numbers and booleans have one text: 4 for 4.0, true for TRUE. A blank label's index is len(texts).
  """
  array, _ = one_each(array)
  if pa.types.is_floating(array.type):  # with their fractions, which a feature may not have
    array = pc.if_else(pc.is_nan(array), pa.scalar(None, array.type), array).cast(pa.string())
  encoded = trim(as_text(array, column)).dictionary_encode()
  written = encoded.dictionary.view(pa.binary()).to_pylist()
  texts = [label_text(text.decode(errors='replace')) for text in written]
  places = {text: i for i, text in enumerate(dict.fromkeys(texts))}
  index = np.array([*map(places.__getitem__, texts), len(places)], np.int64)
  return list(places), index[encoded.indices.fill_null(len(texts)).to_numpy()]


def _classes(
  array: pa.Array, column: str, label: config.Label, missing: Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
  """Reads labels by the regular expressions `positive` and `negative`.

  Returns float64 [n]: 1 or 0, NaN where blank or missing, infinity where neither matches; and bool
  [n], true where neither matches.
  """
  markers = {label_text(marker.strip()) for marker in missing}

  def class_of(text: str) -> float:
    if text in markers:
      return np.nan
    for writing in label_writings(text):
      if re.fullmatch('1' if label.positive is None else label.positive, writing):
        return 1.0
      if label.negative is not None and re.fullmatch(label.negative, writing):
        return 0.0
    return 0.0 if label.negative is None else np.inf

  distinct, places = label_texts(array, column)
  classes = np.array([*map(class_of, distinct), np.nan])[places]
  return classes, np.isinf(classes)


def _labels(cfg: config.Config, records: _Records) -> np.ndarray:
  """Returns labels, float64 [n, T], and drops wrong ones; a blank one of several is NaN."""
  missing, columns = cfg.data.missing_values, []
  may_be_blank = len(cfg.labels) > 1
  keys = 'positive or negative' if may_be_blank else 'data.label_positive or label_negative'
  for i, label in enumerate(cfg.labels):
    column, hint_of = label.column or label.name, None
    array = records.single(column, 'label', 'one label')
    if label.positive is not None or label.negative is not None:
      numbers, wrong = _classes(array, column, label, missing)
      wanted = f'a text that {keys} matches'
    else:
      numbers, wrong = floats(array, column, missing, Writing.of(cfg.data))
      wanted = 'a finite number'
      if label.loss != 'squared_error':
        wrong |= ~np.isnan(numbers) & (numbers != 0) & (numbers != 1)
        wanted = '0 or 1'
        positive = f'data.labels.{i}.positive' if may_be_blank else 'data.label_positive'
        loss = f'data.labels.{i}.loss' if may_be_blank else 'model.loss'
        loss = loss if cfg.kinds_of_labels[label.name] == 'clicks' else None
        hint_of = functools.partial(_label_hint, positive=positive, loss=loss)
    if may_be_blank:
      wanted += ', or blank'
    else:
      wrong |= np.isnan(numbers)
    records.drop(wrong, 'label', column, wanted, hint_of)
    columns.append(numbers)
  return np.stack(columns, 1)


def parse(
  cfg: config.Config, block: Block, labelled: bool = True, without: Collection[str] = ()
) -> Parsed:
  """Converts the good records of a block to arrays, and counts the bad ones.

  A bad record is dropped and counted once, under the first of these mistakes that it has:
  malformed, label, weight, group, made (in a column from which another is computed), dense, value.
  If data.label is null, all labels are 1. If not `labelled`, for prediction, labels are 0, weights
  are 1, and all samples have one group; with model.retrieval, groups are read all the same, and
  columns that only describe items are blank, and so are slots and dense columns named in `without`.
  UserError if a column's type cannot be read at all.
  """
  data, ids, n = cfg.data, cfg.slot_ids(), len(block.lines)
  writing = Writing.of(data)
  blank = cfg.blank_columns(labelled).union(without)
  records = _Records(block)
  label = np.full([n, len(cfg.labels)], float(data.label is None))
  if data.label is not None and labelled:
    label = _labels(cfg, records)
  weight = group = None
  if data.weight is not None:
    weight = np.ones([n])
    if labelled:
      array = records.single(data.weight, 'weight', 'one weight')
      weight, wrong = floats(array, data.weight, data.missing_values, writing)
      records.drop(wrong | ~(weight >= 0), 'weight', data.weight, 'a finite number >= 0')
  if data.group is not None:
    group = np.full([n], BLANK_GROUP)
    if labelled or cfg.predicts_for_users:
      array, wrong = whole_numbers(records.single(data.group, 'group', 'one value'))
      records.drop(wrong, 'group', data.group, WHOLE_NUMBER)
      group = feature_keys(array, data.group, 0, data.missing_values)
      group = np.where(group == NO_FEATURE, BLANK_GROUP, group)
  made = ArrowReader(data, block.columns, n, records.drop)
  dense = np.empty([n, len(data.dense)], np.float32)
  for i, column in enumerate(data.dense):
    if column.name in blank:
      dense[:, i] = np.nan
      continue
    wanted = 'one number, or none for missing'
    if column.made:
      array, _, markers = made.single(column.name, wanted)
    else:
      array, markers = records.single(column.name, 'dense', wanted), data.missing_values
    most = MOST_FLOAT32 if column.made else None
    numbers, wrong = floats(array, column.name, markers, writing, most)
    records.drop(wrong, 'dense', column.name, 'a finite number, or blank for missing')
    with np.errstate(over='ignore', invalid='ignore'):
      dense[:, i] = numbers
  slots: list[np.ndarray | SlotFeatures] = []
  texts, absent = [], np.full([n], NO_FEATURE)
  for s in cfg.ordered_slots:
    column = s.column or s.name
    markers = [] if s.made else data.missing_values
    if s.name in blank:
      slots.append(absent)
      continue
    array, wrong = whole_numbers(made.made(s.name) if s.made else block.columns[column])
    records.drop(wrong, 'value', column, WHOLE_NUMBER)
    if (s.shares or s.name) in data.keep_texts:
      texts.append(distinct_texts(array, s, ids[s.name], markers))
    nested = is_nested(array.type)
    if not (nested or s.separator or s.value_separator) or pa.types.is_null(array.type):
      slots.append(feature_keys(array, column, ids[s.name], markers))
      continue
    slot = several_features(array, s, ids[s.name], markers, writing)
    wanted = f'features as NAME or NAME{s.value_separator or ": "}NUMBER'
    if nested and holds_floats(array.type):
      wanted = f'features each of which is {WHOLE_NUMBER}'
    records.drop(slot.wrong[slot.index], 'value', column, wanted)
    if s.sequence:  # keep the last max_length features
      counts = np.minimum(slot.counts, s.sequence.max_length)
      slot = slot._replace(starts=slot.starts + slot.counts - counts, counts=counts)
    slots.append(slot)
  keep = records.keep
  if not keep.all():
    slots = [
      s._replace(index=s.index[keep]) if isinstance(s, SlotFeatures) else s[keep] for s in slots
    ]
    dense, label = dense[keep], label[keep]
    weight, group = (a if a is None else a[keep] for a in (weight, group))
  features, lines = _assemble(slots), block.lines[keep]
  raw = dense[:, [column.transform == 'none' for column in data.dense]]
  has_largest = labelled and len(lines)
  return Parsed(
    *features,
    dense,
    label.astype(np.float32),
    None if weight is None else weight.astype(np.float32),
    group,
    records.bad,
    records.examples(),
    texts,
    _largest(lines, raw, weight, features[0], features[2]) if has_largest else (0.0, 0),
  )
