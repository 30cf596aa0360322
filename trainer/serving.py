"""A SavedModel that plain TensorFlow runs: raw columns in, probability out; no TFRA, no op of ours, no Python of ours.

Signatures, both with the output `probability` float32 [B]:
- `serving_default`: a tensor [B] for every column: string for a slot's (its features stand as in the log, with the slot's separators;
  blank is none), int64 where the slot is among `integer_slots`, float32 for a dense column (NaN is missing). A column that is both a
  slot's and dense is one string. TensorFlow wants plain names: what is no letter, digit or underscore in a column's is an underscore
  (`input_name`).
- `examples`: serialised tf.Examples, string [B], with the same features: bytes lists (each element as in the log; several are several
  features), int64 lists, and a float for a dense column, which may be left out.

The rows lie in variables, features sorted by key: a look-up is a binary search (`tf.searchsorted`), and loading reads arrays and builds
nothing. A feature that is not there reads 0, in weight and factors, as in evaluation; features that read 0 anyway are not written.
"""
import os
import re
import time
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq
import tensorflow as tf

from trainer.config import UserError
from trainer.features import hash_keys, pool_norm, transform_dense
from trainer.layers.embedded import Embedded

NO_KEY = np.int64(2**63 - 1)  # the last place of `keys`: where a search for an unknown feature ends
_NUMBER = r'[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?'


def input_name(column):
  """The name of a column's tensor in `serving_default`."""
  name = re.sub(r'[^A-Za-z0-9_]', '_', column)
  return name if name[:1].isalpha() else f'column_{name}'


class Rows(NamedTuple):
  """Rows of features in any order; feature i's factors are the next `counts[i]` of `factors`."""
  key: np.ndarray  # int64 [n]
  slot: np.ndarray  # int32 [n], ids
  linear: np.ndarray  # float32 [n]
  counts: np.ndarray  # int64 [n], 0 before admission
  factors: np.ndarray  # float32


def read_rows(parts):
  """The Rows of Parquet files that trainer.export wrote."""
  tables = [pq.read_table(p) for p in parts]
  lists = [chunk for t in tables for chunk in t['factors'].chunks]
  counts = np.concatenate([np.zeros([0], np.int64), *(np.diff(c.offsets.to_numpy()) for c in lists)])
  factors = np.concatenate([np.zeros([0], np.float32), *(c.flatten().to_numpy() for c in lists)])
  return Rows(*(np.concatenate([t[c].to_numpy() for t in tables]) for c in ('key', 'slot', 'linear')), counts, factors)


def _numbers(texts):
  """string [n] -> float32 [n]; NaN where blank or no number."""
  texts = tf.strings.strip(texts)
  is_number = tf.strings.regex_full_match(texts, _NUMBER)
  return tf.where(is_number, tf.strings.to_number(tf.where(is_number, texts, '0')), np.nan)


class Serving(tf.Module):
  """The rows of a trained model, and its graph from raw columns on.

  Shapes: B samples, F slots, n occurrences of features.

  Args:
    cfg: trainer.config.Config.
    model: trainer.model.CTRModel, built for `cfg`.
    dense_stats: float32 [2, Dn], what dense columns are standardised with.
    rows: Rows.
    integer_slots: names of slots whose columns are int64.
  """

  def __init__(self, cfg, model, dense_stats, rows, integer_slots=()):
    super().__init__(name='serving')
    self._slots, self._ids, self._dense_columns = cfg.slots, cfg.slot_ids(), cfg.data.dense
    names = {s.name for s in self._slots}
    for name in set(integer_slots) - names:
      raise UserError(f"integer slot '{name}': is not among data.slots; wanted one of {', '.join(sorted(names))}")
    self._integer_columns = {s.column or s.name for s in self._slots if s.name in integer_slots}
    self._slots_of = [[f for f, s in enumerate(self._slots) if s.table == name] for name in cfg.sparse.tables]
    self._poolings = [s.pooling if s.separator or s.value_separator else 'sum' for s in self._slots]  # as trainer.sparse.embedding
    # Not an attribute: Keras would trace signatures of its own for a model that it finds.
    self._probability = lambda embedded: model.probability(model(embedded, training=False))
    self.dense_variables = list(model.variables)
    self.dense_stats = tf.Variable(dense_stats, trainable=False, name='dense_stats')
    # A table's row is [plain D | field F·D], each part where an interaction needs it (trainer.sparse.embedding).
    self._plain = [t.width if {'factors', 'totals'} & model.needs else 0 for t in cfg.sparse.tables.values()]
    self._field = [t.width if 'field_factors' in model.needs else 0 for t in cfg.sparse.tables.values()]
    with tf.device('CPU'):
      self._make_variables(rows)

  def _make_variables(self, rows):
    keep = np.flatnonzero((rows.linear != 0) | (rows.counts > 0))  # the others read 0 anyway
    keep = keep[np.argsort(rows.key[keep])]
    starts = (np.cumsum(rows.counts) - rows.counts)[keep]
    slot, counts = rows.slot[keep], rows.counts[keep]
    place = np.full([len(keep) + 1], -1, np.int32)  # of a feature's factors among its table's; -1: none
    self.factors = []
    for slots, plain, field in zip(self._slots_of, self._plain, self._field):
      width = plain + field * len(self._slots)
      admitted = np.flatnonzero(np.isin(slot, [self._ids[self._slots[f].name] for f in slots]) & (counts > 0))
      if (counts[admitted] != width).any():
        raise ValueError(f'found rows of {set(counts[admitted].tolist())} factors; wanted {width}')
      place[admitted] = np.arange(len(admitted))
      values = np.zeros([len(admitted) + 1, width], np.float32)  # the last row is for features without factors
      for begin in range(0, len(admitted), 1 << 18):  # some at a time: the indices are larger than what they fetch
        some = admitted[begin:begin + (1 << 18)]
        values[begin:begin + len(some)] = rows.factors[starts[some, None] + np.arange(width)]
      self.factors.append(tf.Variable(values, trainable=False, name='factors'))
    self.keys = tf.Variable(np.append(rows.key[keep], NO_KEY), trainable=False, name='keys')
    self.linear = tf.Variable(np.append(rows.linear[keep], np.float32(0)), trainable=False, name='linear')
    self.place = tf.Variable(place, trainable=False, name='place')

  # From raw columns to features

  def column_specs(self):
    """Raw columns and their types: name -> tf.TensorSpec [B]."""
    types = {c.name: tf.float32 for c in self._dense_columns}
    types |= {s.column or s.name: tf.string for s in self._slots}  # a column that is dense too is parsed
    types |= dict.fromkeys(self._integer_columns, tf.int64)
    return {name: tf.TensorSpec([None], dtype, input_name(name)) for name, dtype in types.items()}

  def from_columns(self, **inputs):
    """Raw columns [B] by `input_name` -> {'probability': float32 [B]}."""
    size = tf.size(next(iter(inputs.values())), out_type=tf.int64)
    slots = [(inputs[input_name(s.column or s.name)], tf.range(size)) for s in self._slots]
    return {'probability': self._predict(slots, [inputs[input_name(c.name)] for c in self._dense_columns], size)}

  def from_examples(self, examples):
    """Serialised tf.Examples, string [B] -> {'probability': float32 [B]}."""
    def feature(dtype):
      return tf.io.FixedLenFeature([], dtype, np.nan) if dtype == tf.float32 else tf.io.RaggedFeature(dtype, row_splits_dtype=tf.int64)

    def dense_column(column):  # [B], or a list each where it is a slot's too: its first element
      if not isinstance(column, tf.RaggedTensor):
        return column
      return column[:, :1].to_tensor(default_value=b'' if column.dtype == tf.string else 0, shape=[None, 1])[:, 0]
    parsed = tf.io.parse_example(examples, {name: feature(spec.dtype) for name, spec in self.column_specs().items()})
    lists = [parsed[s.column or s.name] for s in self._slots]
    dense = [dense_column(parsed[c.name]) for c in self._dense_columns]
    return {'probability': self._predict([(r.values, r.value_rowids()) for r in lists], dense, tf.size(examples, out_type=tf.int64))}

  def _features(self, slot, raw, samples):
    """A slot's features as trainer.prepare finds them.

    Args:
      raw: string or int64 [m]: its column.
      samples: int64 [m]: whose they are, ascending.
    Returns: keys int64 [n], values float32 [n], samples int64 [n].
    """
    texts = tf.strings.as_string(raw) if raw.dtype.is_integer else raw
    if slot.separator:
      pieces = tf.strings.split(texts, slot.separator)
      texts, samples = pieces.values, tf.gather(samples, pieces.value_rowids())
    values = tf.ones_like(texts, tf.float32)
    if slot.value_separator:
      split = f'(?s)(.*){re.escape(slot.value_separator)}(.*)'  # at the last one
      has_value = tf.strings.regex_full_match(texts, split)
      values = tf.where(has_value, _numbers(tf.strings.regex_replace(texts, f'^{split}$', r'\2')), values)
      texts = tf.where(has_value, tf.strings.regex_replace(texts, f'^{split}$', r'\1'), texts)
    texts = tf.strings.strip(texts)
    # Conversion drops a record whose value is no number; here its feature goes.
    present = tf.not_equal(texts, '') & tf.math.is_finite(values)
    return tuple(tf.boolean_mask(c, present) for c in (hash_keys(texts, self._ids[slot.name]), values, samples))

  # From features to the probability

  def _predict(self, raw_slots, dense, size):
    """raw_slots: a slot's (raw, samples) each; dense: a column [B] each. Returns: float32 [B]."""
    found = [self._features(slot, *raw) for slot, raw in zip(self._slots, raw_slots)]
    num_slots = len(self._slots)
    keys, values, samples = (tf.concat(c, 0) for c in zip(*found))
    slot = tf.repeat(tf.range(num_slots, dtype=tf.int64), [tf.size(f[0]) for f in found])
    at = tf.searchsorted(self.keys, keys)
    last = tf.size(self.keys) - 1
    at = tf.where(tf.equal(tf.gather(self.keys, at), keys), at, last)
    place = tf.gather(self.place, at)
    segments = samples * num_slots + slot
    linear = tf.math.unsorted_segment_sum(values * tf.gather(self.linear, at), segments, size * num_slots)
    embedded = {
        'linear': tf.reshape(linear, [size, num_slots]), 'factors': [], 'totals': [], 'squares': tf.zeros([size]),
        'field_factors': None, 'field_squares': None, 'norm': pool_norm(values, segments, size, self._poolings)}
    for table, (slots, plain, field) in enumerate(zip(self._slots_of, self._plain, self._field)):
      mine = (slot >= slots[0]) & (slot <= slots[-1])  # a table's slots are neighbours
      x, of_sample, of_slot = (tf.boolean_mask(c, mine) for c in (values, samples, slot))
      row = tf.boolean_mask(place, mine)
      row = tf.gather(self.factors[table], tf.where(row < 0, tf.shape(self.factors[table])[0] - 1, row))
      scaled = row * x[:, None]  # [n, plain + F·field]
      sums = tf.math.unsorted_segment_sum(scaled, of_sample * len(slots) + of_slot - slots[0], size * len(slots))
      if plain:
        embedded['factors'].append(tf.reshape(sums[:, :plain], [size, len(slots), plain]))
        embedded['totals'].append(tf.reduce_sum(embedded['factors'][-1], 1))
        embedded['squares'] += tf.math.unsorted_segment_sum(tf.reduce_sum(scaled[:, :plain]**2, 1), of_sample, size)
      if field:  # one table holds all slots
        embedded['field_factors'] = tf.reshape(sums[:, plain:], [size, num_slots, num_slots * field])
        own = tf.gather(tf.reshape(scaled[:, plain:], [-1, num_slots, field]), of_slot, batch_dims=1)
        embedded['field_squares'] = tf.math.unsorted_segment_sum(tf.reduce_sum(own**2, 1), of_sample, size)
    dense = [_numbers(d) if d.dtype == tf.string else tf.cast(d, tf.float32) for d in dense]
    dense = tf.stack(dense, 1) if dense else tf.zeros([size, 0])
    return self._probability(Embedded(dense=transform_dense(dense, self._dense_columns, self.dense_stats), **embedded))


def save(cfg, model, dense_stats, parts, path, integer_slots=()):
  """Writes the SavedModel.

  Args:
    parts: Parquet files that hold every row (trainer.export).
    path: a directory.
  """
  serving = Serving(cfg, model, dense_stats, read_rows(parts), integer_slots)
  inputs = {spec.name: spec for spec in serving.column_specs().values()}
  if len(inputs) < len(serving.column_specs()):
    raise UserError(f"a SavedModel's inputs: found columns {', '.join(sorted(serving.column_specs()))}; "
                    'wanted names that differ in their letters, digits or underscores')
  signatures = {
      'serving_default': tf.function(serving.from_columns, autograph=False).get_concrete_function(**inputs),
      'examples': tf.function(serving.from_examples, autograph=False).get_concrete_function(tf.TensorSpec([None], tf.string, 'examples'))}
  tf.saved_model.save(serving, path, signatures)
  for folder, _, names in os.walk(path):
    for name in names:
      with open(os.path.join(folder, name), 'rb') as f:
        os.fsync(f.fileno())


def measure(path):
  """Returns: (bytes of a SavedModel's files, seconds that loading it takes here)."""
  size = sum(os.path.getsize(os.path.join(folder, name)) for folder, _, names in os.walk(path) for name in names)
  started = time.monotonic()
  tf.saved_model.load(path)
  return size, time.monotonic() - started
