"""Rows in the hash tables of tensorflow-recommenders-addons (TFRA): one packed row for a feature.

A packed row is [linear weight, its optimizer state | factors, their optimizer state | 1 if the
feature has factors, else 0 | step of the last update, as bits]. Before admission the factors are
zeros. The table of features is ours, in C++. A step looks up and upserts each table once. As each
row says whether it has factors, a reader sees all of them or none while another worker's push
admits the feature.
"""

import functools
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow_recommenders_addons import dynamic_embedding as de

from ops import row_optimizers, row_store
from ops.chunks import Chunk
from ops.feature_lifecycle import FeatureLifecycle, Remote
from ops.library import TensorLike
from ops.policy import Policy
from ops.sharding import SHARDS


class PackedRows(NamedTuple):
  """The packed rows that a pull has read from one table."""

  places: tf.Tensor  # int32 [n], the indices of these keys among the keys of the pull
  rows: tf.Tensor  # float32 [n, R], R floats for each key
  exist: tf.Tensor  # bool [n], whether the table has the row


class TfraRows(NamedTuple):
  """The fields of ops.row_store.PulledRows except `ids`, and the packed rows that `push` reads."""

  offsets: tf.Tensor
  linear: tf.Tensor
  factors: tf.Tensor
  packed: list[PackedRows]  # one for each table
  show_click: tf.Tensor | tuple[()] = ()


class TfraStore(FeatureLifecycle):
  """A row store on TFRA's tables; ops.row_store.RowStore describes its methods and arguments.

  Processes that build the same v1 graph share the store's tables, which they find by node name.
  """

  def __init__(
    self,
    policy: Policy | None = None,
    *,
    tables: Sequence[row_store.TableSpec],
    slot_table: Sequence[int],
    seed: int = 0,
    name: str | None = None,
  ):
    super().__init__(policy, name)
    self.tables, self.slot_table, self._seed = tables, slot_table, seed
    self.widths = [t.width for t in tables]
    self._linear_floats = [1 + row_optimizers.state_floats(t.linear, 1) for t in tables]
    self._row_sizes = [t.floats + 2 for t in tables]
    self._rows = self._read_rows = [
      de.CuckooHashTable(
        tf.int64, tf.float32, tf.zeros([size]), name=f'rows_{t.name}', device='/CPU:0'
      )
      for t, size in zip(tables, self._row_sizes)
    ]
    # A push that looks up rows itself holds this until it has updated them.
    self._one_push_at_a_time = tf.CriticalSection(shared_name=name or uuid.uuid4().hex)

  def remote(self, run: Callable, read: Callable) -> 'TfraStore':
    store = super().remote(run, read)
    store._rows = [Remote(table, run) for table in self._rows]
    store._read_rows = [Remote(table, read) for table in self._rows]
    return store

  def pull(self, keys: TensorLike, train: bool = True) -> TfraRows:
    has_at_once = train and self.policy.admission == 'none'
    size, packed = tf.size(keys), self._look_up(keys)
    linear, widths = tf.zeros([size]), tf.zeros([size], tf.int32)
    for spec, (places, rows, exist) in zip(self.tables, packed):
      zeros = tf.where(exist, 0.0, -0.0)
      weights = tf.where(tf.equal(rows[:, 0], 0), zeros, rows[:, 0])  # == compares no v1 tensors
      linear = tf.tensor_scatter_nd_update(linear, places[:, None], weights)
      has = tf.ones_like(places) if has_at_once else tf.cast(rows[:, -2], tf.int32)
      widths = tf.tensor_scatter_nd_update(widths, places[:, None], has * spec.width)
    offsets = tf.concat([[0], tf.cumsum(widths)], 0)
    factors = tf.zeros([offsets[-1]])
    for t, (places, rows, _) in enumerate(packed):
      has, columns = self._with_factors(offsets, places, t)
      weights = rows[:, self._linear_floats[t] : self._linear_floats[t] + self.widths[t]]
      if has_at_once and self.widths[t]:
        weights = tf.where(rows[:, -2:-1] > 0, weights, self._initial(tf.gather(keys, places), t))
      factors = tf.tensor_scatter_nd_update(factors, columns[:, :, None], tf.gather(weights, has))
    return TfraRows(offsets, linear, factors, packed)

  def push(
    self,
    keys: TensorLike,
    rows: TfraRows | row_store.PulledRows,
    shows: TensorLike,
    clicks: TensorLike,
    linear_gradient: TensorLike,
    factors_gradient: TensorLike,
    scale: TensorLike,
    hyper: TensorLike,
    step: TensorLike,
    add: bool = False,
  ) -> tf.Operation | None:
    # Rows that were not pulled from this store are looked up here. A critical section prevents
    # other such pushes between the look-up and the update. The keys are distinct.
    step, scale = tf.cast(step, tf.int64), tf.broadcast_to(scale, tf.shape(keys))
    update = functools.partial(row_optimizers.row_update, step=step, add=add)

    def updated_row(t: int, admitted: tf.Tensor, places: tf.Tensor, old: tf.Tensor) -> tf.Tensor:
      """Returns the packed rows of one table after this step, float32 [n, R]."""
      spec, table_scale = self.tables[t], tf.gather(scale, places)
      start, had, last = self._linear_floats[t], old[:, -2] > 0, tf.bitcast(old[:, -1], tf.int32)
      gradient = tf.gather(linear_gradient, places)[:, None]
      linear = update(old[:, :start], gradient, table_scale, last, hyper[t, 0], kind=spec.linear)
      factors, has = old[:, start:-2], had | tf.gather(admitted, places)
      if spec.width:
        new = tf.cast(tf.where(has & ~had)[:, 0], tf.int32)
        initial = self._initial(tf.gather(tf.gather(keys, places), new), t)
        factors = tf.tensor_scatter_nd_update(
          factors, new[:, None], row_optimizers.row_init(initial, hyper[t, 1], spec.factors)
        )
        trained, columns = self._with_factors(rows.offsets, places, t)
        if self.policy.admission != 'none':
          # Factors that this push admits are not trained yet.
          trains = tf.gather(had, trained)
          trained, columns = tf.boolean_mask(trained, trains), tf.boolean_mask(columns, trains)
        stepped = update(
          tf.gather(factors, trained),
          tf.gather(factors_gradient, columns),
          tf.gather(table_scale, trained),
          tf.ones_like(trained),  # step 0 would mean that there is no optimizer state
          hyper[t, 1],
          kind=spec.factors,
        )
        factors = tf.tensor_scatter_nd_update(factors, trained[:, None], stepped)
      now = last if add else tf.maximum(last, tf.cast(step, tf.int32))
      flags = [tf.cast(has, tf.float32)[:, None], tf.bitcast(now, tf.float32)[:, None]]
      return tf.concat([linear, factors, *flags], 1)

    def push() -> tf.Operation | None:
      admitted = self.observe(keys, shows, clicks)
      packed = rows.packed if isinstance(rows, TfraRows) else self._look_up(keys)
      upserts = [
        self._rows[t].insert(tf.gather(keys, places), updated_row(t, admitted, places, old))
        for t, (places, old, _) in enumerate(packed)
      ]
      return tf.group(upserts)

    return push() if isinstance(rows, TfraRows) else self._one_push_at_a_time.execute(push)

  def clear(self) -> None:
    super().clear()
    for table in self._rows:
      table.clear()

  def forget_counts(self) -> None:
    features = list(super().export_state())
    super().clear()
    for chunk in map(row_store.without_counts, features):
      super()._import(chunk)

  def bytes(self) -> tf.Tensor:
    # TFRA does not report how much it has allocated, so the bytes that rows fill are counted.
    rows = (table.size() * (8 + 4 * size) for table, size in zip(self._read_rows, self._row_sizes))
    return super().bytes() + sum(rows)

  within = row_store.RowStore.within
  _row_floats = row_store.RowStore._row_floats

  def _import(self, chunk: Chunk) -> None:
    super()._import(chunk)
    keys = tf.constant(chunk['key'])
    for t, spec in enumerate(self.tables):
      start, places = self._linear_floats[t], self._of_table(keys, t).numpy()
      rows = np.zeros([len(places), self._row_sizes[t]], np.float32)
      admitted = chunk['admitted'][places]
      rows[:, :start], rows[:, -2] = chunk['linear'][places, :start], admitted
      rows[:, -1] = chunk['last_step'][places].view(np.float32)
      if spec.width:
        rows[admitted, start:-2] = chunk[f'factors_{spec.name}']
      self._rows[t].insert(tf.gather(keys, places), tf.constant(rows))

  def count_changes(self) -> tf.Tensor:
    return tf.constant(-1, tf.int64)  # checkpoints of this store have all rows each time

  def export_state(self, shards: range = range(SHARDS), changed: bool = False) -> Iterator[Chunk]:
    for chunk in super().export_state(shards, changed):
      keys = tf.constant(chunk['key'])
      linear = np.zeros([len(keys), max(self._linear_floats)], np.float32)
      last_step = np.zeros([len(keys)], np.int32)
      for spec, start, packed in zip(self.tables, self._linear_floats, self._look_up(keys)):
        places, rows = packed.places.numpy(), packed.rows.numpy()
        linear[places, :start] = rows[:, :start]
        last_step[places] = np.ascontiguousarray(rows[:, -1]).view(np.int32)
        if spec.width:
          chunk[f'factors_{spec.name}'] = rows[:, start:-2][chunk['admitted'][places]]
      yield chunk | {'linear': linear, 'last_step': last_step}

  def _forget_rows(self, keys: tf.Tensor) -> tf.Tensor:
    for t, table in enumerate(self._rows):
      table.remove(tf.gather(keys, self._of_table(keys, t)))
    return keys

  def _of_table(self, keys: TensorLike, t: int) -> tf.Tensor:
    """Returns the indices of the keys that belong to table t, int32 [n]."""
    slot = tf.cast(tf.bitwise.right_shift(keys, tf.constant(52, tf.int64)), tf.int32)
    return tf.cast(tf.where(tf.equal(tf.gather(self.slot_table, slot), t))[:, 0], tf.int32)

  def _look_up(self, keys: TensorLike) -> list[PackedRows]:
    packed = []
    for t, (table, size) in enumerate(zip(self._read_rows, self._row_sizes)):
      places = self._of_table(keys, t)
      rows, exist = table.lookup(tf.gather(keys, places), return_exists=True)
      packed.append(PackedRows(places, tf.reshape(rows, [-1, size]), exist))
    return packed

  def _initial(self, keys: tf.Tensor, t: int) -> tf.Tensor:
    spec = self.tables[t]
    return row_store.initial_factors(keys, self._seed, spec.width, spec.init_scale)

  def _with_factors(
    self, offsets: tf.Tensor, places: tf.Tensor, t: int
  ) -> tuple[tf.Tensor, tf.Tensor]:
    """Finds the m keys of table t that have factors; `places` [n] are its keys' places in a pull.

    Returns their indices in `places`, int32 [m], and those of their factors in the pull's, [m, D].
    """
    starts = tf.gather(offsets, places)
    has = tf.cast(tf.where(tf.gather(offsets, places + 1) > starts)[:, 0], tf.int32)
    return has, tf.gather(starts, has)[:, None] + tf.range(self.widths[t])
