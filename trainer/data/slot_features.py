"""Reads the features of slots whose records may hold several, or features with values.

Shapes: n records, u distinct cells: what one record holds in a column, before it is split.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ops.keys import NO_FEATURE
from trainer import config
from trainer.data.arrays import is_list, is_nested, of_union
from trainer.data.values import (
  Writing,
  as_text,
  feature_keys,
  floats,
  holds_texts,
  trim,
  whole_numbers,
)


class SlotFeatures(NamedTuple):
  """The features of a slot in n records; records with the same text share one of u cells.

  Record i has the cell c = index[i], whose features are keys[starts[c] : starts[c] + counts[c]].
  """

  index: np.ndarray  # int64 [n]
  starts: np.ndarray  # int64 [u]
  counts: np.ndarray  # int64 [u]
  keys: np.ndarray  # int64
  values: np.ndarray | None  # float32, one for each key; None if all are 1
  wrong: np.ndarray  # bool [u]: a value is no finite number, or belongs to no feature


def _split_values(texts: pa.Array, separator: str) -> pa.Array:
  """Splits texts such as sports:0.5 at their last separator; returns lists of one or two parts."""
  return pc.split_pattern(texts.fill_null(''), pattern=separator, max_splits=1, reverse=True)


def several_features(
  array: pa.Array,
  slot: config.Slot,
  slot_id: int,
  missing_values: Sequence[str],
  writing: Writing = Writing(),
) -> SlotFeatures:
  """Reads a column whose records may hold several features, or features with values.

  Records hold lists, maps from features to values, or texts that the separators of `slot` split.
  """
  column = slot.column or slot.name
  if pa.types.is_union(array.type):
    children, places = of_union(array)
    parts = [several_features(c, slot, slot_id, missing_values, writing) for c in children]
    return _joined(parts, places)
  is_map = pa.types.is_map(array.type)
  if is_map:  # as a list, because a map's offsets may skip what null entries hold
    pair = pa.struct([('k', array.type.key_type), ('v', array.type.item_type)])
    array = array.cast(pa.list_(pair))
  if is_list(array.type):
    fields, index = array, np.arange(len(array))
  else:
    encoded = as_text(array, column).dictionary_encode()
    distinct = encoded.dictionary
    # The index one past the end stands for a record without features.
    index = encoded.indices.fill_null(len(distinct)).to_numpy().astype(np.int64)
    if slot.separator:
      fields = pc.split_pattern(distinct, pattern=slot.separator)
    else:
      fields = pa.ListArray.from_arrays(np.arange(len(distinct) + 1, dtype=np.int32), distinct)
  owner = np.repeat(np.arange(len(fields)), pc.list_value_length(fields).fill_null(0).to_numpy())
  pairs = fields.flatten()
  if is_list(array.type) and not is_map and slot.separator and holds_texts(pairs.type):
    # A text in a list may hold several features, as a text alone does.
    pieces = pc.split_pattern(as_text(pairs, column).fill_null(''), pattern=slot.separator)
    owner, pairs = owner[pc.list_parent_indices(pieces).to_numpy()], pieces.flatten()
  texts, wrong = whole_numbers(pairs.field('k') if is_map else pairs)
  wrong = np.zeros(len(texts), bool) if wrong is None else wrong
  values = None
  if is_map:
    values, not_a_number = floats(pairs.field('v'), column)
    wrong |= not_a_number | np.isnan(values)
  elif slot.value_separator:
    parts = _split_values(as_text(texts, column), slot.value_separator)
    has_value = pc.list_value_length(parts).to_numpy() == 2
    texts = pc.list_element(parts, 0)
    values = np.ones(len(texts), np.float64)
    written = pc.list_element(parts.filter(pa.array(has_value)), 1)
    values[has_value], not_a_number = floats(written, column, (), writing)
    wrong[has_value] |= not_a_number | np.isnan(values[has_value])
    wrong |= has_value & trim(texts).is_null().to_numpy(zero_copy_only=False)
  if is_map:
    wrong |= feature_keys(texts, column, slot_id, ()) == NO_FEATURE
  keys = feature_keys(texts, column, slot_id, missing_values)
  present = keys != NO_FEATURE
  if values is not None:
    values = values[present].astype(np.float32)
    values = None if (values == 1).all() else values
  counts = np.bincount(owner[present], minlength=len(fields) + 1)
  is_wrong = np.bincount(owner[wrong], minlength=len(fields) + 1) > 0
  return SlotFeatures(index, np.cumsum(counts) - counts, counts, keys[present], values, is_wrong)


def _joined(parts: Sequence[SlotFeatures], places: np.ndarray) -> SlotFeatures:
  """Joins columns of features; `places` [n] has each record's place in them, one after another."""
  cells = np.cumsum([0, *(len(p.counts) for p in parts)])
  keys = np.cumsum([0, *(len(p.keys) for p in parts)])
  values = None
  if any(p.values is not None for p in parts):
    ones = [np.ones([len(p.keys)], np.float32) for p in parts]
    values = np.concatenate([o if p.values is None else p.values for p, o in zip(parts, ones)])
  return SlotFeatures(
    np.concatenate([p.index + first for p, first in zip(parts, cells)])[places],
    np.concatenate([p.starts + first for p, first in zip(parts, keys)]),
    np.concatenate([p.counts for p in parts]),
    np.concatenate([p.keys for p in parts]),
    values,
    np.concatenate([p.wrong for p in parts]),
  )


def feature_texts(array: pa.Array, slot: config.Slot) -> pa.Array:
  """Returns the texts of all features in a slot's column; null where a value is null."""
  column = slot.column or slot.name
  if pa.types.is_union(array.type):
    return pa.concat_arrays([feature_texts(child, slot) for child in of_union(array)[0]])
  if pa.types.is_map(array.type):
    return as_text(array.keys, column)
  if is_list(array.type):
    array = array.flatten()
  texts = as_text(array, column)
  if slot.separator:
    texts = pc.split_pattern(texts, pattern=slot.separator).flatten()
  if slot.value_separator:
    texts = pc.list_element(_split_values(texts, slot.value_separator), 0)
  return texts


def distinct_texts(
  array: pa.Array, slot: config.Slot, slot_id: int, missing_values: Sequence[str]
) -> tuple[np.ndarray, pa.Array]:
  """Returns the keys, int64, and the distinct texts of a slot; 12 and 12.0 have the same key."""
  if not is_nested(array.type):
    array = pc.unique(array)
  texts = trim(pc.unique(feature_texts(array, slot)))
  keys = feature_keys(texts, slot.column or slot.name, slot_id, missing_values)
  return keys[keys != NO_FEATURE], texts.filter(pa.array(keys != NO_FEATURE))
