"""Models that plain TensorFlow runs, without TFRA, an op of ours or Python of ours.

`save` writes the whole model: raw columns in, probability out. Its rows lie in variables, features
sorted by key: a look-up is a binary search (`tf.searchsorted`), and loading reads arrays and builds
nothing. A feature that is not there reads 0, in weight and factors, as in evaluation; features that
read 0 anyway are not written. Its signatures, both with the output `probability` float32 [B], or of
several tasks one of each task's name:

- `serving_default`: a tensor for every column: string for a slot's (its features stand as in the
  log, with the slot's separators; blank is none), int64 where the slot is among `integer_slots`,
  float32 for a dense column (NaN is missing). A column that is both a slot's and dense is one
  string. All columns have one length, B, or length 1, which is repeated: one user and B items.
  TensorFlow wants plain names: whatever is no letter, digit or underscore in a column's name is an
  underscore (`input_name`).
- `examples`: serialised tf.Examples, string [B], with the same features: bytes lists (each element
  as in the log; several are several features), int64 lists, and a float for a dense column, which
  may be left out.

`save_dense` writes the dense part alone, for who keeps the rows elsewhere. Its size does not depend
on the number of features. Its signature `serving_default` takes, of what the model reads
(trainer.embedding.layer_inputs.LayerInputs), with B or 1 as the first dimension:

- `linear` float32 [B, F]: Σ x·w over the features of each slot;
- `factors_TABLE` float32 [B, F_t, D_t]: Σ x·v over the features of each of the table's slots;
- `squares` float32 [B]: Σ x²·‖v‖² over all features of the sample (fm);
- `field_factors` float32 [B, F, F·D], `field_squares` float32 [B] (ffm);
- `norm` float32 [B, F]: what mean or sqrt-n pooling divides by, where a slot has such pooling;
- `dense` float32 [B, Dn]: raw dense columns, NaN where missing.

Both are written with warm-up requests for TensorFlow Serving (`trainer.storage.warmup`).
"""

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from absl import logging

from trainer import config, files
from trainer.data.features import hash_keys, pool_norm, transform_dense
from trainer.embedding.layer_inputs import HistoryVectors, LayerInputs, history_places
from trainer.errors import UserError
from trainer.plain_data import Json
from trainer.storage import warmup
from trainer.storage.chain import Rows

NO_KEY = np.int64(2**63 - 1)  # the last place of `keys`: where a search for an unknown feature ends
ROWS_AT_ONCE = 1 << 18  # factor rows that are copied at a time: their indices take more memory
_NUMBER = r'[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?'


def input_name(column: str) -> str:
  """Returns the name of a column's tensor in `serving_default`."""
  name = re.sub(r'[^A-Za-z0-9_]', '_', column)
  return name if name[:1].isalpha() else f'column_{name}'


def _numbers(texts: tf.Tensor) -> tf.Tensor:
  """Turns texts, string [n], into float32 [n]; NaN where they are blank or no number."""
  texts = tf.strings.strip(texts)
  is_number = tf.strings.regex_full_match(texts, _NUMBER)
  return tf.where(is_number, tf.strings.to_number(tf.where(is_number, texts, '0')), np.nan)


def _common_size(lengths: Mapping[str, tf.Tensor]) -> tf.Tensor:
  """Returns B, int64 [], of inputs whose first dimension is B or 1; fails for other lengths."""
  sizes = tf.stack(list(lengths.values()))
  others = tf.boolean_mask(sizes, tf.not_equal(sizes, 1))
  size = tf.cond(tf.size(others) > 0, lambda: others[0], lambda: tf.ones([], tf.int64))
  found = [
    part for name, length in lengths.items() for part in (f' {name} ', tf.strings.as_string(length))
  ]
  message = tf.strings.join(
    ['found inputs of lengths', *found, '; wanted one length, or 1, which is repeated']
  )
  fits = tf.reduce_all(tf.equal(sizes, 1) | tf.equal(sizes, size))
  with tf.control_dependencies([tf.debugging.Assert(fits, [message], summarize=1)]):
    return tf.identity(size)


class _SlotFeatures(NamedTuple):
  """The n features of one slot in `length` samples."""

  keys: tf.Tensor  # int64 [n]
  values: tf.Tensor  # float32 [n]
  samples: tf.Tensor  # int64 [n], the sample of each feature, ascending
  length: tf.Tensor  # int64 []: B, or 1 if they are repeated for every sample

  def repeated(self, size: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns (places among these features, samples), int64 [m], as B = `size` samples have them.

    The features of a single user are hashed and looked up once, however many items there are.
    """
    count = tf.size(self.keys, tf.int64)
    times = tf.where(tf.equal(self.length, 1), size, 1)
    places = tf.tile(tf.range(count), [times])
    return places, tf.tile(self.samples, [times]) + tf.repeat(tf.range(times), count)


class _Served(tf.Module):
  """The dense variables of a trained model.

  Args:
    cfg: the job's config.
    model: trainer.model.builder.CTRModel, built for `cfg`.
    dense_stats: float32 [2, Dn], the statistics that standardise dense columns.
  """

  def __init__(self, cfg: config.Config, model: tf.keras.Model, dense_stats: tf.Variable):
    super().__init__()
    self._dense_columns = cfg.data.dense
    # Not an attribute: Keras would trace its own signatures for a model that it finds.
    self._outputs = lambda embedded: model.predictions(model(embedded, training=False))
    self.dense_variables = list(model.variables)
    self.dense_stats = tf.Variable(dense_stats, trainable=False, name='dense_stats')


class Serving(_Served):
  """The rows of a trained model, and its graph from raw columns to outputs.

  Shapes: B samples, F slots, n occurrences of features.

  Args:
    cfg, model, dense_stats: as of `_Served`.
    rows: all rows.
    integer_slots: the slots whose columns are int64.
  """

  def __init__(
    self,
    cfg: config.Config,
    model: tf.keras.Model,
    dense_stats: tf.Variable,
    rows: Rows,
    integer_slots: Sequence[str] = (),
  ):
    super().__init__(cfg, model, dense_stats)
    self._slots, self._ids = cfg.slots, cfg.slot_ids()
    names = {s.name for s in self._slots}
    for name in set(integer_slots) - names:
      raise UserError(
        f"integer slot '{name}': is not among data.slots; wanted one of {', '.join(sorted(names))}"
      )
    self._integer_columns = {s.column or s.name for s in self._slots if s.name in integer_slots}
    self._slots_of = [
      [f for f, s in enumerate(self._slots) if s.table == name] for name in cfg.sparse.tables
    ]
    self._poolings = cfg.poolings()
    self._reads_histories = 'histories' in model.needs
    # A table's row is [plain D | field F·D], each part where an interaction needs it
    # (trainer.embedding.embedding).
    self._plain = [
      t.width if {'factors', 'totals'} & model.needs else 0 for t in cfg.sparse.tables.values()
    ]
    self._field = [
      t.width if 'field_factors' in model.needs else 0 for t in cfg.sparse.tables.values()
    ]
    with tf.device('CPU'):
      self._make_variables(rows)

  def _make_variables(self, rows: Rows) -> None:
    keep = np.flatnonzero((rows.linear != 0) | (rows.counts > 0))  # the others read 0 anyway
    keep = keep[np.argsort(rows.key[keep])]
    starts = (np.cumsum(rows.counts) - rows.counts)[keep]
    slot, counts = rows.slot[keep], rows.counts[keep]
    # The place of a feature's factors among its table's; -1: none.
    place = np.full([len(keep) + 1], -1, np.int32)
    self.factors = []
    for slots, plain, field in zip(self._slots_of, self._plain, self._field):
      width = plain + field * len(self._slots)
      ids = [self._ids[self._slots[f].name] for f in slots]
      admitted = np.flatnonzero(np.isin(slot, ids) & (counts > 0))
      if (counts[admitted] != width).any():
        raise ValueError(f'found rows of {set(counts[admitted].tolist())} factors; wanted {width}')
      place[admitted] = np.arange(len(admitted))
      # The last row is for features without factors.
      values = np.zeros([len(admitted) + 1, width], np.float32)
      for begin in range(0, len(admitted), ROWS_AT_ONCE):
        some = admitted[begin : begin + ROWS_AT_ONCE]
        values[begin : begin + len(some)] = rows.factors[starts[some, None] + np.arange(width)]
      self.factors.append(tf.Variable(values, trainable=False, name='factors'))
    self.keys = tf.Variable(np.append(rows.key[keep], NO_KEY), trainable=False, name='keys')
    self.linear = tf.Variable(
      np.append(rows.linear[keep], np.float32(0)), trainable=False, name='linear'
    )
    self.place = tf.Variable(place, trainable=False, name='place')

  # From raw columns to features

  def column_specs(self) -> dict[str, tf.TensorSpec]:
    """Returns the raw columns and their types: by name, specs of shape [B]."""
    types = {c.name: tf.float32 for c in self._dense_columns}
    # A column that is dense too is parsed.
    types |= {s.column or s.name: tf.string for s in self._slots}
    types |= dict.fromkeys(self._integer_columns, tf.int64)
    return {name: tf.TensorSpec([None], dtype, input_name(name)) for name, dtype in types.items()}

  def from_columns(self, **inputs: tf.Tensor) -> dict[str, tf.Tensor]:
    """Raw columns, [B] or [1], by `input_name` -> the outputs, float32 [B] each."""
    size = _common_size({name: tf.size(c, tf.int64) for name, c in inputs.items()})

    def features(slot: config.Slot) -> _SlotFeatures:
      column = inputs[input_name(slot.column or slot.name)]
      length = tf.size(column, tf.int64)
      return self._features(slot, column, tf.range(length), length)

    dense = [tf.broadcast_to(inputs[input_name(c.name)], size[None]) for c in self._dense_columns]
    return self._predict([features(s) for s in self._slots], dense, size)

  def from_examples(self, examples: tf.Tensor) -> dict[str, tf.Tensor]:
    """Serialised tf.Examples, string [B] -> the outputs, float32 [B] each."""

    def feature(dtype: tf.DType) -> tf.io.FixedLenFeature | tf.io.RaggedFeature:
      return (
        tf.io.FixedLenFeature([], dtype, np.nan)
        if dtype == tf.float32
        else tf.io.RaggedFeature(dtype, row_splits_dtype=tf.int64)
      )

    def dense_column(column: tf.Tensor | tf.RaggedTensor) -> tf.Tensor:
      """float32 [B], or a list each where the column is a slot's too: its first element."""
      if not isinstance(column, tf.RaggedTensor):
        return column
      blank = b'' if column.dtype == tf.string else 0
      return column[:, :1].to_tensor(default_value=blank, shape=[None, 1])[:, 0]

    parsed = tf.io.parse_example(
      examples, {name: feature(spec.dtype) for name, spec in self.column_specs().items()}
    )
    size = tf.size(examples, out_type=tf.int64)
    lists = [parsed[s.column or s.name] for s in self._slots]
    slots = [
      self._features(slot, ragged.values, ragged.value_rowids(), size)
      for slot, ragged in zip(self._slots, lists)
    ]
    dense = [dense_column(parsed[c.name]) for c in self._dense_columns]
    return self._predict(slots, dense, size)

  def _features(
    self, slot: config.Slot, raw: tf.Tensor, samples: tf.Tensor, length: tf.Tensor
  ) -> _SlotFeatures:
    """Finds a slot's features as trainer.prepare does.

    Args:
      slot: of the config.
      raw: string or int64 [m]: its column.
      samples: int64 [m]: whose they are, ascending.
      length: int64 []: how many samples there are.
    """
    texts = tf.strings.as_string(raw) if raw.dtype.is_integer else raw
    if slot.separator:
      pieces = tf.strings.split(texts, slot.separator)
      texts, samples = pieces.values, tf.gather(samples, pieces.value_rowids())
    values = tf.ones_like(texts, tf.float32)
    if slot.value_separator:
      split = f'(?s)(.*){re.escape(slot.value_separator)}(.*)'  # at the last one
      has_value = tf.strings.regex_full_match(texts, split)
      values = tf.where(
        has_value, _numbers(tf.strings.regex_replace(texts, f'^{split}$', r'\2')), values
      )
      texts = tf.where(has_value, tf.strings.regex_replace(texts, f'^{split}$', r'\1'), texts)
    texts = tf.strings.strip(texts)
    # Conversion drops a record whose value is no number; here its feature goes.
    present = tf.not_equal(texts, '') & tf.math.is_finite(values)
    columns = hash_keys(texts, self._ids[slot.name]), values, samples
    columns = [tf.boolean_mask(c, present) for c in columns]
    if slot.sequence:
      ends = tf.cumsum(tf.math.bincount(tf.cast(columns[2], tf.int32)))
      after = tf.gather(ends, columns[2]) - tf.range(tf.size(columns[2]))
      columns = [tf.boolean_mask(c, after <= slot.sequence.max_length) for c in columns]
    return _SlotFeatures(*columns, length)

  # From features to the outputs

  def _predict(
    self, found: list[_SlotFeatures], dense: list[tf.Tensor], size: tf.Tensor
  ) -> dict[str, tf.Tensor]:
    """Returns the outputs of slots' features and dense columns [B]."""
    num_slots = len(self._slots)
    keys = tf.concat([f.keys for f in found], 0)
    at = tf.searchsorted(self.keys, keys)
    at = tf.where(tf.equal(tf.gather(self.keys, at), keys), at, tf.size(self.keys) - 1)
    starts = tf.cumsum([tf.size(f.keys, tf.int64) for f in found], exclusive=True)
    repeated = [f.repeated(size) for f in found]
    places = tf.concat([starts[i] + r[0] for i, r in enumerate(repeated)], 0)
    samples = tf.concat([r[1] for r in repeated], 0)
    slot = tf.repeat(tf.range(num_slots, dtype=tf.int64), [tf.size(r[0]) for r in repeated])
    at = tf.gather(at, places)
    values = tf.gather(tf.concat([f.values for f in found], 0), places)
    place = tf.gather(self.place, at)
    segments = samples * num_slots + slot
    linear = tf.math.unsorted_segment_sum(
      values * tf.gather(self.linear, at), segments, size * num_slots
    )
    embedded = {
      'linear': tf.reshape(linear, [size, num_slots]),
      'factors': [],
      'totals': [],
      'squares': tf.zeros([size]),
      'field_factors': None,
      'field_squares': None,
      'norm': pool_norm(values, segments, size, self._poolings),
    }
    for table, (slots, plain, field) in enumerate(zip(self._slots_of, self._plain, self._field)):
      mine = (slot >= slots[0]) & (slot <= slots[-1])  # a table's slots are neighbours
      x, of_sample, of_slot = (tf.boolean_mask(c, mine) for c in (values, samples, slot))
      row = tf.boolean_mask(place, mine)
      row = tf.gather(
        self.factors[table], tf.where(row < 0, tf.shape(self.factors[table])[0] - 1, row)
      )
      scaled = row * x[:, None]  # [n, plain + F·field]
      sums = tf.math.unsorted_segment_sum(
        scaled, of_sample * len(slots) + of_slot - slots[0], size * len(slots)
      )
      if plain:
        embedded['factors'].append(tf.reshape(sums[:, :plain], [size, len(slots), plain]))
        embedded['totals'].append(tf.reduce_sum(embedded['factors'][-1], 1))
        embedded['squares'] += tf.math.unsorted_segment_sum(
          tf.reduce_sum(scaled[:, :plain] ** 2, 1), of_sample, size
        )
      if field:  # one table holds all slots
        embedded['field_factors'] = tf.reshape(
          sums[:, plain:], [size, num_slots, num_slots * field]
        )
        own = tf.gather(
          tf.reshape(scaled[:, plain:], [-1, num_slots, field]), of_slot, batch_dims=1
        )
        embedded['field_squares'] = tf.math.unsorted_segment_sum(
          tf.reduce_sum(own**2, 1), of_sample, size
        )
    embedded['histories'] = {
      s.name: self._history(f, embedded['factors'], samples, slot, place, size)
      for f, s in enumerate(self._slots)
      if self._reads_histories and s.sequence
    }
    dense = [_numbers(d) if d.dtype == tf.string else tf.cast(d, tf.float32) for d in dense]
    dense = tf.stack(dense, 1) if dense else tf.zeros([size, 0])
    return self._outputs(
      LayerInputs(dense=transform_dense(dense, self._dense_columns, self.dense_stats), **embedded)
    )

  def _history(
    self,
    field: int,
    sums: list[tf.Tensor],
    samples: tf.Tensor,
    slot: tf.Tensor,
    place: tf.Tensor,
    size: tf.Tensor,
  ) -> HistoryVectors:
    """Returns the history of one slot, as trainer.embedding.embedding gives it.

    Args:
      field: the slot's place among all.
      sums: of each table, float32 [B, F_t, D_t].
      samples, slot, place: [n], of each occurrence.
      size: int64 [], B.
    """
    table, slots = next((t, some) for t, some in enumerate(self._slots_of) if field in some)
    names = [self._slots[f].name for f in slots]
    mine = tf.equal(slot, field)
    none = tf.shape(self.factors[table])[0] - 1  # the row without factors
    row = tf.boolean_mask(place, mine)
    row = tf.concat([tf.where(row < 0, none, row), none[None]], 0)
    places = history_places(tf.boolean_mask(samples, mine), size)
    row = tf.gather(row, tf.where(places < 0, tf.size(row) - 1, places))
    vectors = tf.gather(self.factors[table], row)[:, :, : self._plain[table]]
    candidate = sums[table][:, names.index(self._slots[field].shares)]
    return HistoryVectors(vectors, row < none, candidate)


class DenseServing(_Served):
  """The dense part of a trained model; the file's docstring lists its inputs, the slot sums."""

  def __init__(self, cfg: config.Config, model: tf.keras.Model, dense_stats: tf.Variable):
    super().__init__(cfg, model, dense_stats)
    slots, self._tables = len(cfg.slots), list(cfg.sparse.tables)
    shapes: dict[str, list[int]] = {}
    if 'linear' in model.needs:
      shapes['linear'] = [slots]
    if {'factors', 'totals'} & model.needs:
      for name, table in cfg.sparse.tables.items():
        in_table = sum(s.table == name for s in cfg.slots)
        shapes[f'factors_{name}'] = [in_table, table.width]
    if 'totals' in model.needs:
      shapes['squares'] = []
    if 'field_factors' in model.needs:
      shapes['field_factors'] = [slots, slots * cfg.sparse.tables[self._tables[0]].width]
      shapes['field_squares'] = []
    if 'factors' in model.needs and any(p != 'sum' for p in cfg.poolings()):
      shapes['norm'] = [slots]
    if self._dense_columns:
      shapes['dense'] = [len(self._dense_columns)]
    self._shapes = shapes

  def specs(self) -> dict[str, tf.TensorSpec]:
    """Returns the inputs by name; a table's name is made plain as `input_name` does."""
    return {
      name: tf.TensorSpec([None, *shape], tf.float32, input_name(name))
      for name, shape in self._shapes.items()
    }

  def from_sums(self, **inputs: tf.Tensor) -> dict[str, tf.Tensor]:
    """Inputs of `specs` -> the outputs, float32 [B] each."""
    lengths = {name: tf.shape(t, tf.int64)[0] for name, t in inputs.items()}
    size = _common_size(lengths)

    def given(name: str) -> tf.Tensor | None:
      shape = self._shapes.get(name)
      if shape is None:
        return None
      return tf.broadcast_to(
        inputs[input_name(name)], tf.concat([size[None], tf.constant(shape, tf.int64)], 0)
      )

    factors = [given(f'factors_{name}') for name in self._tables]
    factors = [f for f in factors if f is not None]
    dense = given('dense') if self._dense_columns else tf.zeros([size, 0])
    embedded = LayerInputs(
      linear=given('linear'),
      factors=factors,
      totals=[tf.reduce_sum(f, 1) for f in factors],
      squares=given('squares'),
      field_factors=given('field_factors'),
      field_squares=given('field_squares'),
      norm=given('norm'),
      dense=transform_dense(dense, self._dense_columns, self.dense_stats),
    )
    return self._outputs(embedded)


def save(
  cfg: config.Config,
  model: tf.keras.Model,
  dense_stats: tf.Variable,
  rows: Rows,
  path: str,
  integer_slots: Sequence[str] = (),
) -> None:
  """Writes the whole model into the directory `path`; the other arguments are those of `Serving`.

  Raises:
    UserError: if two columns have the same `input_name`, or an integer slot does not exist.
  """
  serving = Serving(cfg, model, dense_stats, rows, integer_slots)
  columns = serving.column_specs()
  specs = {spec.name: spec for spec in columns.values()}
  if len(specs) < len(columns):
    raise UserError(
      f"a SavedModel's inputs: found columns {', '.join(sorted(columns))}; "
      'wanted names that differ in their letters, digits or underscores'
    )
  signatures = {
    'serving_default': _graph(serving.from_columns, specs),
    'examples': _graph(
      serving.from_examples, {'examples': tf.TensorSpec([None], tf.string, 'examples')}
    ),
  }
  _write(serving, signatures, specs, path)


def save_dense(
  cfg: config.Config, model: tf.keras.Model, dense_stats: tf.Variable, path: str
) -> None:
  """Writes the dense part alone; the arguments are those of `save`.

  Raises:
    UserError: if an interaction reads histories, which slot sums do not contain.
  """
  if 'histories' in model.needs:
    raise UserError(
      'a dense_model: found an interaction that reads histories, feature by feature; wanted kind '
      "'saved_model'"
    )
  serving = DenseServing(cfg, model, dense_stats)
  specs = {spec.name: spec for spec in serving.specs().values()}
  _write(serving, {'serving_default': _graph(serving.from_sums, specs)}, specs, path)


def _graph(
  function: Callable, specs: Mapping[str, tf.TensorSpec]
) -> tf.types.experimental.ConcreteFunction:
  return tf.function(function, autograph=False).get_concrete_function(**specs)


def _write(
  module: tf.Module, signatures: Mapping[str, Json], specs: Mapping[str, tf.TensorSpec], path: str
) -> None:
  """Writes the SavedModel and its warm-up requests, and waits until they are on the disk."""
  verbosity = logging.get_verbosity()
  logging.set_verbosity(logging.WARNING)  # TensorFlow logs every step
  try:
    tf.saved_model.save(module, path, signatures)
  finally:
    logging.set_verbosity(verbosity)
  warmup.write(path, specs)
  for folder, _, names in os.walk(path):
    for name in names:
      with open(os.path.join(folder, name), 'rb') as f:
        os.fsync(f.fileno())


def measure(path: str) -> tuple[int, float]:
  """Returns the size of a SavedModel's files in bytes, and the seconds that it takes to load."""
  started = time.monotonic()
  tf.saved_model.load(path)
  return files.size_of(path), time.monotonic() - started
