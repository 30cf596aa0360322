"""Reads requests of plain texts and numbers, in a tenth of the time that the log's reader takes.

The log's reader uses Arrow, which has a fixed cost for each column. A column of a log has many
values, so that cost is small; a column of a request has few, so it is large. Here, one call of
C++ reads all texts, NumPy the numbers and their bins, and the graph of SavedModels computes other
columns with `from` or with values.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import tensorflow as tf

from ops.request import RequestReader, TextSlot
from ops.tensors import to_tensor
from trainer import config
from trainer.data.columns import bins
from trainer.data.columns.graph_columns import GraphColumn, GraphReader, repeated
from trainer.data.values import Writing, feature_keys, marker_numbers
from trainer.plain_data import Json

_END = '\n'  # between texts; hashing removes white space around a text
_MOST = 300  # samples; of more, Arrow computes columns in less time than the graph
_TEXTS, _NUMBERS = {str, int, type(None)}, {float, int, type(None)}


class Graph:
  """A TensorFlow graph that is called with arrays or tensors, and returns {name: array}."""

  def __init__(self, function: Callable[..., dict[str, tf.Tensor]], *specs: tf.TensorSpec):
    traced = tf.function(function, autograph=False)
    self._graph = traced.get_concrete_function(*specs)
    self._captured = self._graph.captured_inputs
    self._dtypes = [output.dtype for output in self._graph.outputs]
    self.names = list(self._graph.structured_outputs)

  def __call__(self, *inputs: np.ndarray | tf.Tensor) -> dict[str, np.ndarray]:
    tensors = [i if isinstance(i, tf.Tensor) else to_tensor(i) for i in inputs]
    # For small graphs, calling self._graph itself takes three times as long.
    outputs = tf.raw_ops.StatefulPartitionedCall(
      args=tensors + self._captured, Tout=self._dtypes, f=self._graph
    )
    found = dict(zip(sorted(self.names), outputs))
    return {name: found[name].numpy() for name in self.names}


class Shared(list):
  """A column's values in a request where several samples share a value; often there is one value.

  A column of any other type has one value for each sample. The type tells the two apart, because
  the number of values cannot: by chance, there may be as many shared values as samples.
  """


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
  """B samples of a request; a feature that many have, as their user, may be in `keys` once.

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
    self._slots = [(f, s) for f, s in enumerate(cfg.ordered_slots) if _is_computed(s, cfg.data)]
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
      *tensors: the code points of all texts; where each text begins, and the last ends; all
        numbers; how many values each column has, columns of texts first; and B.
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
    reader, ids = GraphReader(self._cfg.data, columns, size), self._cfg.slot_ids()
    found = {name: [tf.zeros([0], tf.int64)] for name in ('keys', 'places', 'segments')}
    found['values'] = [tf.zeros([0])]
    for field, slot in self._slots:
      own = reader.slot(slot, ids[slot.name])
      places, samples = repeated(own.samples, own.length, size)
      found['places'].append(places + sum(tf.size(k, tf.int64) for k in found['keys']))
      found['keys'].append(own.keys)
      found['values'].append(tf.gather(own.values, places))
      found['segments'].append(samples * len(self._cfg.data.slots) + field)
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


def _is_computed(slot: config.Slot, data: config.Data) -> bool:
  if isinstance(slot.made, config.Bins):
    plain = {c.name for c in data.dense if not c.made} - {s.name for s in data.slots}
    return slot.made.bins not in plain
  return slot.made is not None or slot.value_separator is not None


class PlainColumns:
  """Reads the columns of requests for a config without model.retrieval."""

  def __init__(self, cfg: config.Config):
    missing, ids = cfg.data.missing_values, cfg.slot_ids()
    self._num_slots, self._num_dense = len(cfg.data.slots), len(cfg.data.dense)
    self._slots = [(f, s) for f, s in enumerate(cfg.ordered_slots) if not _is_computed(s, cfg.data)]
    self._dense = [(i, c.name) for i, c in enumerate(cfg.data.dense) if not c.made]
    places = {name: i for i, name in self._dense}
    self._bins = {
      s.name: (places[s.made.bins], bins.reader(s.made)) for _, s in self._slots if s.made
    }
    self._computed_dense = [i for i, c in enumerate(cfg.data.dense) if c.made]
    is_plain = len(self._slots) == self._num_slots and not self._computed_dense
    self._computed = None if is_plain else _Computed(cfg)
    text_slots = [
      TextSlot(
        field,
        ids[slot.name],
        slot.separator or '',
        slot.sequence.max_length if slot.sequence else 0,
        has_markers=slot.made is None,
      )
      for field, slot in self._slots
    ]
    markers = feature_keys(pa.array(missing, pa.string()), '', 0, [])
    self._reader = RequestReader(text_slots, self._num_slots, markers)
    self._missing_numbers = marker_numbers(tuple(missing), Writing.of(cfg.data))

  def read(self, columns: Mapping[str, Sequence[Json]], shared: np.ndarray) -> Samples | None:
    """Reads B samples of `columns`, {name: B values, or Shared ones}.

    `shared`, int32 [B], says which Shared value a sample has. Returns None, so that the log's
    reader reads them, if a value is wrong or of a type unknown here, or if samples are many.
    """
    size = len(shared)
    if self._computed and size > _MOST:
      return None
    numbers = self._read_numbers(columns)
    if numbers is None or (found := self._features(columns, numbers, shared)) is None:
      return None
    dense, names = np.full([self._num_dense, size], np.nan, np.float32), dict(self._dense)
    with np.errstate(over='ignore'):
      for i, column in numbers.items():
        dense[i] = column[shared] if isinstance(columns[names[i]], Shared) else column
    if np.isinf(dense).any():
      return None
    dense = np.ascontiguousarray(dense.T)
    keys, places, segments = found
    if self._computed and not len(segments):
      segments = np.arange(len(places), dtype=np.int32)
    values = np.ones([len(segments)], np.float32)
    if self._computed:
      columns = {  # the graph knows one value for all samples, or one for each
        n: [c[i] for i in shared] if isinstance(c, Shared) and len(c) > 1 else c
        for n, c in columns.items()
      }
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
    texts, counts, is_shared = [], [], []
    for _, slot in self._slots:
      name = slot.made.bins if slot.made else slot.column or slot.name
      if slot.made:
        place, features = self._bins[slot.name]
        with np.errstate(over='ignore'):
          values = features(numbers[place].astype(np.float32))
      elif (values := _texts(columns[name])) is None:
        return None
      texts += values
      counts.append(len(values))
      is_shared.append(isinstance(columns[name], Shared))
    try:
      return self._reader.read(_END.join(texts).encode(), counts, is_shared, shared)
    except UnicodeEncodeError:
      return None
