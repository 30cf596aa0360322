"""Writes the whole model as a SavedModel, which computes predictions from the columns of the log.

The rows of features are variables, sorted by key; a look-up is a binary search (`tf.searchsorted`).
The weight and the factors of an unknown feature are 0, as in evaluation; a known one without
factors whose other values are all 0 is left out. There are two signatures:

- `serving_default` takes one tensor for every column of the log, under the name that `input_name`
  gives it. A slot's tensor has strings, written as in the log: with the slot's separators, and
  blank for no feature. For a slot among `integer_slots`, it is int64. A dense column's tensor is
  float32, NaN where a number is missing; if an expression reads the column, it is float64. If a
  slot and a dense column read the same column of the log, its tensor has strings. Every tensor has
  length B or 1; one of length 1 is repeated B times, so that one user is scored with B items.
- `examples` takes serialised tf.Examples, string [B]. Each holds the same columns, under their
  names in the log. A slot is a bytes list or an int64 list; each element is written as in the log,
  and several elements are several features. A dense column is a float, which may be left out.

The output is `probability` float32 [B], or one of each task's name; with model.retrieval it is
`vector` float32 [B, d], of the query. Plain TensorFlow runs both signatures.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf
from absl import logging

from trainer import config
from trainer.config.export import input_name, same_inputs
from trainer.data.columns.graph_columns import GraphColumn, GraphReader, SlotTensors, repeated
from trainer.data.features import average_lists, pool_norm, transform_counts, transform_dense
from trainer.embedding.layer_inputs import HistoryVectors, LayerInputs, history_places
from trainer.errors import UserError
from trainer.storage.chain import Rows

NO_KEY = np.int64(2**63 - 1)  # the last of `keys`, where the search for an unknown feature ends
ROWS_AT_ONCE = 1 << 18  # factor rows to copy at a time; the indices of a copy take more memory


class Serving(tf.Module):
  """A whole trained model: its rows, and its graph from the columns of the log to outputs.

  `dense_stats`, float32 [3, Dn], are the statistics that standardise dense columns.
  """

  def __init__(
    self,
    cfg: config.Config,
    model: tf.keras.Model,
    dense_stats: tf.Variable,
    integer_slots: Sequence[str],
    rows: Rows,
  ):
    super().__init__()
    self._cfg, self._dense_columns = cfg, cfg.data.dense
    # A closure, because Keras traces signatures of its own for a model that is an attribute.
    self._call = lambda inputs: model.predictions(model(inputs, training=False))
    self.dense_variables = list(model.variables)
    self.dense_stats = tf.Variable(dense_stats, trainable=False, name='dense_stats')
    self._slots, self._ids = cfg.ordered_slots, cfg.slot_ids()
    # Columns that only describe items are no inputs of the SavedModel; inside it they are blank.
    self._of_items = cfg.only_of_items()
    self._integer_columns = {
      name
      for s in self._slots
      if s.name in integer_slots
      for name, is_text in cfg.data.columns_of(s)
      if is_text
    }
    self._slots_of = [
      [f for f, s in enumerate(self._slots) if s.table == name] for name in cfg.sparse.tables
    ]
    self._poolings, self._counted = cfg.poolings(), cfg.counted_fields()
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
    keep = (rows.linear != 0) | (rows.counts > 0)  # the others are 0 anyway
    if self._counted:
      keep |= rows.show_click.any(1)
    if self._of_items:
      queried = [self._ids[s.name] for s in self._slots if s.name not in self._of_items]
      keep &= np.isin(rows.slot, queried)
    keep = np.flatnonzero(keep)
    keep = keep[np.argsort(rows.key[keep])]
    starts = (np.cumsum(rows.counts) - rows.counts)[keep]
    slot, counts = rows.slot[keep], rows.counts[keep]
    # For each feature, the index of its factors in those of its table; -1 if it has none.
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
        block = admitted[begin : begin + ROWS_AT_ONCE]
        values[begin : begin + len(block)] = rows.factors[starts[block, None] + np.arange(width)]
      self.factors.append(tf.Variable(values, trainable=False, name='factors'))
    self.keys = tf.Variable(np.append(rows.key[keep], NO_KEY), trainable=False, name='keys')
    self.linear = tf.Variable(
      np.append(rows.linear[keep], np.float32(0)), trainable=False, name='linear'
    )
    self.place = tf.Variable(place, trainable=False, name='place')
    if self._counted:
      show_click = np.append(rows.show_click[keep], np.zeros([1, 2], np.float32), 0)
      self.show_click = tf.Variable(show_click, trainable=False, name='show_click')

  def save(self, path: str) -> None:
    """Writes the model into the directory `path`; UserError if `input_name`s are equal."""
    columns = self.column_specs()
    if why := same_inputs(columns):
      raise UserError(why)
    examples = tf.TensorSpec([None], tf.string, 'examples')
    signatures = {
      name: tf.function(function, autograph=False).get_concrete_function(**specs)
      for name, function, specs in (
        ('serving_default', self.from_columns, {spec.name: spec for spec in columns.values()}),
        ('examples', self.from_examples, {'examples': examples}),
      )
    }
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.WARNING)  # TensorFlow logs every step
    try:
      tf.saved_model.save(self, path, signatures)
    finally:
      logging.set_verbosity(verbosity)

  # From raw columns to features

  def column_specs(self) -> dict[str, tf.TensorSpec]:
    """Returns the inputs of `serving_default`: {column of the log: its spec, of shape [B]}."""
    # A column that is both a slot's and dense is a string, which is parsed.
    columns = self._cfg.data.log_columns(without=self._of_items)
    exact = self._cfg.data.exact_columns()
    types = {
      name: tf.string if is_text else tf.float64 if name in exact else tf.float32
      for name, is_text in columns.items()
    }
    types |= dict.fromkeys(self._integer_columns, tf.int64)
    return {name: tf.TensorSpec([None], dtype, input_name(name)) for name, dtype in types.items()}

  def from_columns(self, **inputs: tf.Tensor) -> dict[str, tf.Tensor]:
    """Returns the outputs of columns of the log, [B] or [1], by `input_name`."""
    size = _common_size({name: tf.size(c, tf.int64) for name, c in inputs.items()})
    columns = {name: GraphColumn.single(inputs[input_name(name)]) for name in self.column_specs()}
    return self._from_log(columns, size)

  def from_examples(self, examples: tf.Tensor) -> dict[str, tf.Tensor]:
    """Returns the outputs for serialised tf.Examples, string [B]."""

    def feature(dtype: tf.DType) -> tf.io.FixedLenFeature | tf.io.RaggedFeature:
      return (
        tf.io.FixedLenFeature([], tf.float32, np.nan)  # an Example holds no float64
        if dtype.is_floating
        else tf.io.RaggedFeature(dtype, row_splits_dtype=tf.int64)
      )

    parsed = tf.io.parse_example(
      examples, {name: feature(spec.dtype) for name, spec in self.column_specs().items()}
    )
    size = tf.size(examples, out_type=tf.int64)
    columns = {
      name: GraphColumn(column.values, column.value_rowids(), size)
      if isinstance(column, tf.RaggedTensor)
      else GraphColumn.single(column)
      for name, column in parsed.items()
    }
    return self._from_log(columns, size)

  def _from_log(self, columns: Mapping[str, GraphColumn], size: tf.Tensor) -> dict[str, tf.Tensor]:
    """Returns the outputs of B samples; a column that is absent is blank."""
    blank = GraphColumn.single(tf.constant(['']))
    columns = dict.fromkeys(self._cfg.data.log_columns(), blank) | dict(columns)
    made = GraphReader(self._cfg.data, columns, size)
    slots = [made.slot(s, self._ids[s.name]) for s in self._slots]
    dense = [made.dense(c) for c in self._dense_columns]
    return self._predict(slots, [tf.broadcast_to(d, size[None]) for d in dense], size)

  # From features to the outputs

  def _predict(
    self, features: list[SlotTensors], dense: list[tf.Tensor], size: tf.Tensor
  ) -> dict[str, tf.Tensor]:
    """Returns the outputs, from slots and dense columns as in the log; `size` is B."""
    num_slots = len(self._slots)
    keys = tf.concat([f.keys for f in features], 0)
    at = tf.searchsorted(self.keys, keys)
    at = tf.where(tf.equal(tf.gather(self.keys, at), keys), at, tf.size(self.keys) - 1)
    starts = tf.cumsum([tf.size(f.keys, tf.int64) for f in features], exclusive=True)
    of_slots = [repeated(f.samples, f.length, size) for f in features]
    places = tf.concat([starts[i] + r[0] for i, r in enumerate(of_slots)], 0)
    samples = tf.concat([r[1] for r in of_slots], 0)
    slot = tf.repeat(tf.range(num_slots, dtype=tf.int64), [tf.size(r[0]) for r in of_slots])
    at = tf.gather(at, places)
    segments = samples * num_slots + slot
    values = tf.gather(tf.concat([f.values for f in features], 0), places)
    if any(averaged := self._cfg.averaged()):
      values = average_lists(values, segments, size, tf.constant(averaged))
    place = tf.gather(self.place, at)
    linear = tf.math.unsorted_segment_sum(
      values * tf.gather(self.linear, at), segments, size * num_slots
    )
    dense = transform_dense(
      tf.stack(dense, 1) if dense else tf.zeros([size, 0]), self._dense_columns, self.dense_stats
    )
    if self._counted:
      show_click = tf.math.unsorted_segment_sum(
        tf.gather(self.show_click, at), segments, size * num_slots
      )
      show_click = tf.gather(tf.reshape(show_click, [size, num_slots, 2]), self._counted, axis=1)
      dense = tf.concat([dense, transform_counts(show_click, self.dense_stats[0, -1])], 1)
    factors: list[tf.Tensor] = []
    squares, field_factors, field_squares = tf.zeros([size]), None, None
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
        factors.append(tf.reshape(sums[:, :plain], [size, len(slots), plain]))
        squares += tf.math.unsorted_segment_sum(
          tf.reduce_sum(scaled[:, :plain] ** 2, 1), of_sample, size
        )
      if field:  # one table holds all slots
        field_factors = tf.reshape(sums[:, plain:], [size, num_slots, num_slots * field])
        own = tf.gather(
          tf.reshape(scaled[:, plain:], [-1, num_slots, field]), of_slot, batch_dims=1
        )
        field_squares = tf.math.unsorted_segment_sum(tf.reduce_sum(own**2, 1), of_sample, size)
    histories = {
      s.name: self._history(f, factors, samples, slot, place, size)
      for f, s in enumerate(self._slots)
      if self._reads_histories and s.sequence
    }
    inputs = LayerInputs(
      dense=dense,
      factors=factors,
      totals=[tf.reduce_sum(slots, 1) for slots in factors],
      linear=tf.reshape(linear, [size, num_slots]),
      squares=squares,
      field_factors=field_factors,
      field_squares=field_squares,
      norm=pool_norm(values, segments, size, self._poolings),
      histories=histories,
    )
    return self._call(inputs)

  def _history(
    self,
    field: int,
    sums: list[tf.Tensor],
    samples: tf.Tensor,
    slot: tf.Tensor,
    place: tf.Tensor,
    size: tf.Tensor,
  ) -> HistoryVectors:
    """Returns the history in slot `field`: the factors of each sample's features there, in order.

    `sums` has each table's sums of the factors by slot, float32 [B, slots, width], of which one is
    the candidate's vector. `samples`, `slot` and `place` are of each of the n features of the
    batch: its sample, the index of its slot, and of its row in `self.factors[table]`, negative
    without factors.
    """
    table, slots = next((t, some) for t, some in enumerate(self._slots_of) if field in some)
    names = [self._slots[f].name for f in slots]
    mine = tf.equal(slot, field)
    no_factors = tf.shape(self.factors[table])[0] - 1  # the row without factors
    row = tf.boolean_mask(place, mine)
    row = tf.concat([tf.where(row < 0, no_factors, row), no_factors[None]], 0)
    places = history_places(tf.boolean_mask(samples, mine), size)
    row = tf.gather(row, tf.where(places < 0, tf.size(row) - 1, places))
    vectors = tf.gather(self.factors[table], row)[:, :, : self._plain[table]]
    candidate = sums[table][:, names.index(self._slots[field].shares)]
    return HistoryVectors(vectors, row < no_factors, candidate)


def _common_size(lengths: Mapping[str, tf.Tensor]) -> tf.Tensor:
  """Returns B of inputs of length B or 1; other lengths fail when the graph runs."""
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
