"""Raw records to typed arrays, with every record checked.

Shapes: n records, F slots, nnz features, Dn dense columns, u distinct texts of a column.
"""

import collections
import re
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trainer.data.features import has_log1p, hash_keys
from trainer.errors import UserError

MAX_EXAMPLES = 10
MAX_TEXT = 200


def ranges(starts, counts):
  """The integers of [starts[i], starts[i] + counts[i]) for every i, one after another:

  int64 [Σ counts].
  """
  ends = np.cumsum(counts)
  return np.repeat(starts - ends + counts, counts) + np.arange(ends[-1] if len(ends) else 0)


class Parsed(NamedTuple):
  """The good records of a block, n of them, and what was wrong with the others."""

  counts: np.ndarray  # int64 [n, F], features in each slot
  keys: np.ndarray  # int64 [nnz], a sample's slots one after another
  values: np.ndarray | None  # float32 [nnz]; None where all are 1
  dense: np.ndarray  # float32 [n, Dn], NaN where missing
  label: np.ndarray  # float32 [n]; of several tasks [n, T], NaN where blank
  weight: np.ndarray | None  # float32 [n]
  group: np.ndarray | None  # int64 [n]
  # float64 [Dn, 3]: count, mean, M2 of the dense values present, after log1p where the transform
  # has it
  stats: np.ndarray
  bad: collections.Counter  # kind -> records dropped for it
  examples: list  # of `_example`: the first of the block


def _as_text(array, column):
  """string array, nulls kept. Raises: UserError where the type has no text of its own."""
  t = array.type
  if pa.types.is_dictionary(t):
    array, t = array.dictionary_decode(), t.value_type
  if pa.types.is_binary(t):
    return array.view(
      pa.string()
    )  # the bytes are hashed as they are; nobody checks that they are UTF-8
  if pa.types.is_large_binary(t):
    return array.cast(pa.binary()).view(pa.string())
  if not (
    pa.types.is_string(t)
    or pa.types.is_large_string(t)
    or pa.types.is_integer(t)
    or pa.types.is_boolean(t)
    or pa.types.is_null(t)
  ):
    raise UserError(f"column '{column}': found values of type {t}; wanted strings or integers")
  return array.cast(pa.string())


def _hash(texts, slot_id):
  """int64 keys of a string array without nulls; each distinct text is hashed once."""
  encoded = texts.dictionary_encode()
  distinct = encoded.dictionary.view(pa.binary()).to_numpy(zero_copy_only=False)
  return hash_keys(distinct if len(distinct) else np.zeros([0], 'S1'), slot_id).numpy()[
    encoded.indices.to_numpy()
  ]


def _trim(texts):
  """Without ASCII white space on both sides, blanks as null."""
  texts = pc.ascii_trim_whitespace(texts)
  return pc.if_else(pc.greater(pc.binary_length(texts), 0), texts, pa.scalar(None, pa.string()))


def _floats(array, column):
  """Numbers of a column.

  Returns: (float64 [n], NaN where missing; whether wrong [n]: no finite float32).
  """
  if pa.types.is_boolean(array.type):
    array = array.cast(pa.uint8())
  if (
    pa.types.is_floating(array.type)
    or pa.types.is_integer(array.type)
    or pa.types.is_decimal(array.type)
  ):
    numbers = array.cast(pa.float64(), safe=False)
  else:
    texts = _trim(_as_text(array, column))
    try:
      numbers = texts.cast(pa.float64())
    except pa.ArrowInvalid:
      encoded = texts.dictionary_encode()

      def number(text):
        try:
          return text.cast(pa.float64()).as_py()
        except pa.ArrowInvalid:
          return np.inf

      numbers = pa.array([number(t) for t in encoded.dictionary], pa.float64()).take(
        encoded.indices
      )
  missing = numbers.is_null().to_numpy(zero_copy_only=False)
  numbers = numbers.fill_null(0).to_numpy(zero_copy_only=False)
  with np.errstate(over='ignore', invalid='ignore'):
    wrong = ~np.isfinite(numbers.astype(np.float32))
  return np.where(missing, np.nan, numbers), wrong


class _Slot(NamedTuple):
  """A column's features by distinct field: record i has those of entry `index[i]`."""

  index: np.ndarray  # int64 [n]
  starts: np.ndarray  # int64 [u]
  counts: np.ndarray  # int64 [u]
  keys: np.ndarray  # int64
  values: np.ndarray | None  # float32, beside keys
  wrong: np.ndarray  # bool [u]: a value that is no finite number, or one without a feature


def _slot(array, slot, slot_id):
  column = slot.column or slot.name
  if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
    index, lists = np.arange(len(array)), array
  else:
    encoded = _as_text(array, column).dictionary_encode()
    index = (
      encoded.indices.fill_null(len(encoded.dictionary)).to_numpy().astype(np.int64)
    )  # one past the end: no features
    lists = pc.split_pattern(encoded.dictionary, pattern=slot.separator) if slot.separator else None
  if lists is None:
    fields, texts = len(encoded.dictionary), encoded.dictionary
    owner = np.arange(fields)
  else:
    fields, texts = len(lists), _as_text(lists.flatten(), column)
    owner = np.repeat(np.arange(fields), pc.list_value_length(lists).fill_null(0).to_numpy())
  values, wrong = None, np.zeros(fields + 1, bool)
  if slot.value_separator:
    parts = pc.split_pattern(
      texts.fill_null(''), pattern=slot.value_separator, max_splits=1, reverse=True
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
  texts = _trim(texts)
  present = texts.is_valid().to_numpy(zero_copy_only=False)
  owner = owner[present]
  if values is not None:
    values = values[present].astype(np.float32)
    values = None if (values == 1).all() else values
  counts = np.bincount(owner, minlength=fields + 1)
  return _Slot(
    index, np.cumsum(counts) - counts, counts, _hash(texts.drop_null(), slot_id), values, wrong
  )


def _stats(dense, columns):
  """float64 [Dn, 3]: count, mean and M2 = Σ (x − mean)² of what is present."""
  stats = np.zeros([len(columns), 3])
  for i, column in enumerate(columns):
    x = dense[:, i].astype(np.float64)
    x = x[~np.isnan(x)]
    if len(x):
      x = np.sign(x) * np.log1p(np.abs(x)) if has_log1p(column) else x
      stats[i] = len(x), x.mean(), np.square(x - x.mean()).sum()
  return stats


def merge_stats(a, b):
  """Statistics of two sets of values together (Chan et al. 1979). a, b: float64 [Dn, 3]."""
  count = a[:, 0] + b[:, 0]
  share = b[:, 0] / np.maximum(count, 1)
  delta = b[:, 1] - a[:, 1]
  return np.stack(
    [count, a[:, 1] + delta * share, a[:, 2] + b[:, 2] + delta**2 * a[:, 0] * share], 1
  )


def _assemble(slots, n):
  """The slots' features side by side.

  Returns: counts int64 [n, F], keys [nnz], values [nnz] or None.
  """
  counts = np.stack([s.counts[s.index] for s in slots], 1)
  starts = (np.cumsum(counts) - counts.ravel()).reshape(n, len(slots))
  keys = np.empty([counts.sum()], np.int64)
  values = np.ones([len(keys)], np.float32) if any(s.values is not None for s in slots) else None
  for f, s in enumerate(slots):
    to, source = ranges(starts[:, f], counts[:, f]), ranges(s.starts[s.index], counts[:, f])
    keys[to] = s.keys[source]
    if s.values is not None:
      values[to] = s.values[source]
  return counts, keys, values


def _example(line, what, found, wanted, text):
  return {
    'line': line,
    'what': what,
    'found': found[:MAX_TEXT],
    'wanted': wanted,
    'text': text[:MAX_TEXT],
  }


def _positive(array, column, pattern):
  """Whether texts match a pattern whole. Returns: float64 [n], NaN where blank."""
  encoded = _trim(_as_text(array, column)).dictionary_encode()
  distinct = [t.decode(errors='replace') for t in encoded.dictionary.view(pa.binary()).to_pylist()]
  positive = np.array([re.fullmatch(pattern, t) is not None for t in distinct] + [np.nan])
  return positive[encoded.indices.fill_null(len(distinct)).to_numpy()]


def _task_labels(labels, block, drop):
  """The labels of several tasks; blanks are kept. Returns: float64 [n, T]."""
  columns = []
  for label in labels:
    column = label.column or label.name
    if label.positive is not None:
      columns.append(_positive(block.columns[column], column, label.positive))
      continue
    numbers, wrong = _floats(block.columns[column], column)
    if label.loss == 'squared_error':
      drop(wrong, 'label', column, 'a finite number, or blank')
    else:
      wrong |= ~np.isnan(numbers) & (numbers != 0) & (numbers != 1)
      drop(wrong, 'label', column, '0 or 1, or blank')
    columns.append(numbers)
  return np.stack(columns, 1)


def parse(cfg, block):
  """Turns a `Block` into `Parsed`.

  Raises: UserError where a column's type cannot be read at all. A record that is wrong is dropped
    and counted: once, under
    the first of malformed, label, weight, dense, value that it fails.
  """
  data, ids, n = cfg.data, cfg.slot_ids(), len(block.lines)
  bad, examples = collections.Counter(), []
  if block.malformed:
    bad['malformed'] = len(block.malformed)
    examples += [
      _example(m.line, 'malformed record', m.found, m.wanted, m.text)
      for m in block.malformed[:MAX_EXAMPLES]
    ]
  keep = np.ones([n], bool)

  def drop(wrong, kind, column, wanted):
    rows = np.flatnonzero(wrong & keep)
    if len(rows):
      bad[kind] += len(rows)
      keep[rows] = False
      for i in rows[:MAX_EXAMPLES].tolist():
        found = block.columns[column][i].as_py()
        found = found.decode(errors='replace') if isinstance(found, bytes) else found
        examples.append(
          _example(int(block.lines[i]), f"column '{column}'", repr(found), wanted, block.text(i))
        )

  if data.labels:
    label = _task_labels(data.labels, block, drop)
  elif data.label_positive is None:
    label, wrong = _floats(block.columns[data.label], data.label)
    if data.label_is == 'binary':
      drop(~((label == 0) | (label == 1)), 'label', data.label, '0 or 1')
    else:
      drop(wrong | np.isnan(label), 'label', data.label, 'a finite number')
  else:
    label = _positive(block.columns[data.label], data.label, data.label_positive)
    drop(np.isnan(label), 'label', data.label, 'a text')
  weight = group = None
  if data.weight is not None:
    weight, wrong = _floats(block.columns[data.weight], data.weight)
    drop(wrong | ~(weight >= 0), 'weight', data.weight, 'a finite number >= 0')
  if data.group is not None:
    group = _hash(_as_text(block.columns[data.group], data.group).fill_null(''), 0)
  dense = np.empty([n, len(data.dense)], np.float32)
  for i, column in enumerate(data.dense):
    numbers, wrong = _floats(block.columns[column.name], column.name)
    drop(wrong, 'dense', column.name, 'a finite number, or blank for missing')
    with np.errstate(over='ignore', invalid='ignore'):
      dense[:, i] = numbers
  slots = []
  for s in cfg.slots:
    parsed = _slot(block.columns[s.column or s.name], s, ids[s.name])
    drop(
      parsed.wrong[parsed.index],
      'value',
      s.column or s.name,
      f'features as NAME or NAME{s.value_separator}NUMBER',
    )
    slots.append(parsed)
  if not keep.all():
    slots = [s._replace(index=s.index[keep]) for s in slots]
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
    _stats(dense, data.dense),
    bad,
    sorted(examples, key=lambda e: e['line'])[:MAX_EXAMPLES],
  )
