"""Reads requests of plain texts and numbers, in a tenth of the time that the log's reader takes.

The log's reader uses Arrow, which has a fixed cost for each column. A column of a log has many
values, so that cost is small; a column of a request has few, so it is large. Here, NumPy reads the
columns as they are and bins of dense columns, and the graph of SavedModels computes other columns
with `from` or with values.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import tensorflow as tf

from ops.keys import NO_FEATURE, text_keys
from trainer import config
from trainer.data.columns import bins
from trainer.data.columns.graph_columns import GraphColumn, GraphReader, repeated
from trainer.data.features import HASH_BITS
from trainer.data.values import Writing, feature_keys, marker_numbers, ranges
from trainer.plain_data import Json
from trainer.serving.graph import Graph

_END = '\n'  # between texts; hashing removes white space around a text
_MOST = 300  # samples; of more, Arrow computes columns in less time than the graph
_TEXTS, _NUMBERS = {str, int, type(None)}, {float, int, type(None)}


def _texts(values: Sequence[Json]) -> Sequence[str] | None:
  """Returns texts and whole numbers as texts; None if there are values of other types."""
  kinds = set(map(type, values))
  if kinds == {str}:
    return values
  return ['' if v is None else str(v) for v in values] if kinds <= _TEXTS else None


def _numbers(values: Sequence[Json]) -> np.ndarray | None:
  """Returns numbers as float64, NaN for null; None if there are values of other types."""
  if not _NUMBERS.issuperset(map(type, values)):
    return None
  try:
    return np.array(values, np.float64)
  except OverflowError:
    return None


class Samples(NamedTuple):
  """B samples of a request; a feature that many have, such as their user, may be there once.

  `values` and `segments` are those of a SlotBatch with n features.
  """

  keys: np.ndarray  # int64 [u]
  places: np.ndarray  # int32 [n], the place of each feature in `keys`
  values: np.ndarray  # float32 [n], or [0]
  segments: np.ndarray  # int32 [n], or [0]
  dense: np.ndarray  # float32 [B, Dn], NaN where missing


class _Computed:
  """Reads the slots and dense columns that have `from` or values, by the graph of SavedModels."""

  def __init__(self, cfg: config.Config):
    self._cfg = cfg
    self._slots = [(f, s) for f, s in enumerate(cfg.ordered_slots) if _is_computed(s, cfg)]
    self._dense = [column for column in cfg.data.dense if column.made]
    names = {n for _, s in self._slots for n, _ in cfg.data.columns_of(s)}
    names |= {n for column in self._dense for n, _ in cfg.data.columns_of(column)}
    is_text = cfg.data.log_columns()
    self._texts = sorted(name for name in names if is_text[name])
    self._numbers = sorted(names.difference(self._texts))
    whole, floats = tf.TensorSpec([None], tf.int32), tf.TensorSpec([None], tf.float64)
    self._graph = Graph(self._computed, whole, whole, floats, whole, tf.TensorSpec([], tf.int64))

  def _computed(self, *tensors: tf.Tensor) -> dict[str, tf.Tensor]:
    """Returns the n features and the dense columns of B samples, and whether a value is doubtful.

    Args:
      *tensors: the characters of all texts as numbers, where each text begins and the last ends,
        all numbers, how many values each column has, columns of texts first, and B.
    """
    characters, begins, numbers, lengths, size = tensors
    texts = tf.raw_ops.UnicodeEncode(
      input_values=characters,
      input_splits=begins,
      output_encoding='UTF-8',
      errors='ignore',  # else some characters are replaced, such as U+FFFF
    )
    columns = {}
    for values, names in ((texts, self._texts), (numbers, self._numbers)):
      if names:
        own, lengths = lengths[: len(names)], lengths[len(names) :]
        columns |= zip(names, map(GraphColumn.single, tf.split(values, own, num=len(names))))
    reader, ids, num_slots = (
      GraphReader(self._cfg, columns, size),
      self._cfg.slot_ids(),
      len(self._cfg.data.slots),
    )
    found = {
      'keys': [tf.zeros([0], tf.int64)],
      'places': [tf.zeros([0], tf.int64)],
      'values': [tf.zeros([0])],
      'segments': [tf.zeros([0], tf.int64)],
    }
    for field, slot in self._slots:
      own = reader.slot(slot, ids[slot.name])
      places, samples = repeated(own.samples, own.length, size)
      found['places'].append(places + sum(tf.size(k, tf.int64) for k in found['keys']))
      found['keys'].append(own.keys)
      found['values'].append(tf.gather(own.values, places))
      found['segments'].append(samples * num_slots + field)
    dense = [tf.broadcast_to(reader.dense(column), size[None]) for column in self._dense]
    return {name: tf.concat(parts, 0) for name, parts in found.items()} | {
      'dense': tf.stack(dense, 1) if dense else tf.zeros([size, 0]),
      'has_doubts': reader.has_doubts(),
    }

  def read(self, columns: Mapping[str, Sequence[Json]], size: int) -> dict[str, np.ndarray] | None:
    """Returns what `_computed` does; None if a value is doubtful, or of a type not read here."""
    texts = [_texts(columns[name]) for name in self._texts]
    numbers = [_numbers(columns[name]) for name in self._numbers]
    if any(column is None for column in (*texts, *numbers)):
      return None
    lengths = np.array([*map(len, texts), *map(len, numbers)], np.int32)
    texts = list(itertools.chain.from_iterable(texts))
    try:
      characters = np.frombuffer(''.join(texts).encode('utf-32-le'), np.int32)
    except UnicodeEncodeError:
      return None
    begins = np.cumsum([0, *map(len, texts)], dtype=np.int32)
    numbers = np.concatenate([np.zeros([0]), *numbers])
    found = self._graph(characters, begins, numbers, lengths, np.int64(size))
    return None if found['has_doubts'] else found


def _is_computed(slot: config.Slot, cfg: config.Config) -> bool:
  if isinstance(slot.made, config.Bins):
    plain = {c.name for c in cfg.data.dense if not c.made} - {s.name for s in cfg.data.slots}
    return slot.made.bins not in plain
  return slot.made is not None or slot.value_separator is not None


class PlainColumns:
  """Reads the columns of requests for a config without model.retrieval."""

  def __init__(self, cfg: config.Config):
    missing, ids = cfg.data.missing_values, cfg.slot_ids()
    self._num_slots, self._num_dense = len(cfg.data.slots), len(cfg.data.dense)
    self._slots = [(f, s) for f, s in enumerate(cfg.ordered_slots) if not _is_computed(s, cfg)]
    self._dense = [(i, c.name) for i, c in enumerate(cfg.data.dense) if not c.made]
    places = {name: i for i, name in self._dense}
    self._bins = {
      s.name: (places[s.made.bins], bins.reader(s.made)) for _, s in self._slots if s.made
    }
    self._computed_dense = [i for i, c in enumerate(cfg.data.dense) if c.made]
    is_plain = len(self._slots) == self._num_slots and not self._computed_dense
    self._computed = None if is_plain else _Computed(cfg)
    self._fields = np.array([f for f, _ in self._slots], np.int32)
    self._high_bits = np.array([ids[s.name] << HASH_BITS for _, s in self._slots], np.int64)
    self._missing_keys = feature_keys(pa.array(missing, pa.string()), '', 0, [])
    self._missing_numbers = marker_numbers(tuple(missing), Writing.of(cfg.data))

  def read(self, columns: Mapping[str, Sequence[Json]], shared: np.ndarray) -> Samples | None:
    """Reads B samples.

    The result is None if the log's reader must read them: a value is wrong or of a type that this
    class does not read, or there are so many samples that Arrow is faster.

    Args:
      columns: {name: B values, or C values that the samples share}.
      shared: int32 [B], for each sample, which of the C values it has.
    """
    size = len(shared)
    if self._computed and size > _MOST:
      return None
    numbers = self._read_numbers(columns)
    if numbers is None or (found := self._features(columns, numbers, shared)) is None:
      return None
    dense = np.full([self._num_dense, size], np.nan, np.float32)
    with np.errstate(over='ignore'):
      for i, column in numbers.items():
        dense[i] = column if len(column) in (1, size) else column[shared]
    if np.isinf(dense).any():
      return None
    dense = np.ascontiguousarray(dense.T)
    keys, places, segments = found
    values = np.ones([len(segments)], np.float32)
    if self._computed:
      if shared.any():  # several users; the graph knows one value for all samples, or one for each
        columns = {n: c if len(c) == size else [c[i] for i in shared] for n, c in columns.items()}
      if (computed := self._computed.read(columns, size)) is None:
        return None
      dense[:, self._computed_dense] = computed['dense']
      segments = np.concatenate([segments, computed['segments'].astype(np.int32)])
      order = np.argsort(segments, kind='stable')
      places = np.concatenate([places, computed['places'] + len(keys)])[order].astype(np.int32)
      keys, segments = np.concatenate([keys, computed['keys']]), segments[order]
      values = np.concatenate([values, computed['values']])[order]
      if np.array_equal(segments, np.arange(size * self._num_slots)) and (values == 1).all():
        values, segments = values[:0], segments[:0]  # one feature in each slot
    return Samples(keys, places, values, segments, dense)

  def _read_numbers(self, columns: Mapping[str, Sequence[Json]]) -> dict[int, np.ndarray] | None:
    """Returns {index: the dense column, float64}; None if this class cannot read a value."""
    found = {}
    for i, name in self._dense:
      if (numbers := _numbers(columns[name])) is None:
        return None
      if len(self._missing_numbers):
        numbers[np.isin(numbers, self._missing_numbers)] = np.nan
      found[i] = numbers
    return found

  def _features(
    self,
    columns: Mapping[str, Sequence[Json]],
    numbers: Mapping[int, np.ndarray],
    shared: np.ndarray,
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Returns `keys`, `places` and `segments` of plain slots; None if it cannot read a value."""
    texts, size, of_slots = [], len(shared), []
    counts = np.ones([len(self._slots), size], np.int32)  # of texts
    starts, samples, begin = np.empty_like(counts), np.arange(size, dtype=np.int32), 0
    for i, (_, slot) in enumerate(self._slots):
      if slot.made:
        place, features = self._bins[slot.name]
        with np.errstate(over='ignore'):
          values = features(numbers[place].astype(np.float32))
      elif (values := _texts(columns[slot.column or slot.name])) is None:
        return None
      at, of_slot = samples if len(values) == size else shared, len(values)
      if slot.separator:
        own = np.array([1 + value.count(slot.separator) for value in values], np.int32)
        values = [value.replace(slot.separator, _END) for value in values]
        ends = np.cumsum(own, dtype=np.int32)
        counts[i], at, of_slot = own[at], (ends - own)[at], int(ends[-1]) if size else 0
      np.add(at, begin, out=starts[i])
      begin += of_slot
      of_slots.append(of_slot)
      texts += values
    try:
      data = np.frombuffer(_END.join(texts).encode(), np.uint8)
    except UnicodeEncodeError:
      return None
    ends = np.flatnonzero(data == ord(_END))
    if len(ends) != max(begin - 1, 0):
      return None  # a text has a line break
    offsets = np.concatenate([[0], ends + 1, [len(data)] * bool(texts)]).astype(np.int32)
    keys = text_keys(data, offsets, 0)
    if len(self._missing_keys):
      is_missing = np.isin(keys, self._missing_keys)
      is_missing &= np.repeat([slot.made is None for _, slot in self._slots], of_slots)
      keys[is_missing] = NO_FEATURE
    keys |= np.repeat(self._high_bits, of_slots)  # NO_FEATURE, all bits 1, stays as it is
    is_single = not any(slot.separator for _, slot in self._slots)
    places, counts = starts.T.ravel(), counts.T.ravel()
    if not is_single:
      places = ranges(places, counts).astype(np.int32)
    present = keys != NO_FEATURE
    is_whole = present.all()
    if is_single and is_whole and not self._computed:
      return keys, places, np.zeros([0], np.int32)
    segments = (samples[:, None] * self._num_slots + self._fields).ravel()
    segments = segments if is_single else np.repeat(segments, counts)
    if not is_whole:
      kept = present[places]
      segments, places = segments[kept], (np.cumsum(present, dtype=np.int32) - 1)[places[kept]]
      keys = keys[present]
    for f, slot in self._slots:
      if slot.sequence:  # keep the last max_length features
        own = np.flatnonzero(segments % self._num_slots == f)
        to_end = np.searchsorted(segments, segments[own], side='right') - own
        left_out = own[to_end > slot.sequence.max_length]
        places, segments = np.delete(places, left_out), np.delete(segments, left_out)
    return keys, places, segments
