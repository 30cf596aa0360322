"""The row store: a feature table that also holds the trained weights of its features.

A training step calls, in this order (docs/architecture.md, "Features and rows"):

  d = dedupe(keys, shows, clicks)                        distinct keys, summed shows and clicks
  rows = store.pull(d.unique, train=True)                linear weights and factors
  pooled = pool(rows, d, values, segments, b, layout)    slot sums, differentiable
  store.push(d.unique, rows, d.shows, d.clicks, …)       one optimizer step in place, then the
                                                         lifecycle's observation

ops/packing.py carries rows and gradients between processes. ops/cc/rows/row_store.h has contracts.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
import tensorflow as tf

from ops import chunks, sharding
from ops.feature_lifecycle import FeatureLifecycle
from ops.library import TensorLike, load
from ops.policy import Policy
from ops.row_optimizers import state_floats
from ops.sharding import SHARDS


@dataclasses.dataclass(frozen=True)
class FactorPart:
  """A group of columns in a table's factors; different interactions read different groups."""

  kind: Literal['plain', 'field']  # plain: D columns (fm, dnn); field: D for each field, F*D (ffm)
  width: int  # D, or F*D


@dataclasses.dataclass(frozen=True)
class TableSpec:
  """The layout of a table's rows: a linear weight, factors after admission, optimizer state."""

  name: str
  parts: tuple[FactorPart, ...]  # side by side
  init_scale: float = 0.01  # the standard deviation of initial factors
  linear: str = 'adagrad'  # the linear weight's optimizer, a key of row_kinds.ROW_OPTIMIZERS
  factors: str = 'adagrad'  # the factors' optimizer
  dtype: str = 'float32'  # of the factors and their state; or 'bfloat16'

  @property
  def width(self) -> int:
    """The number of factors in a row."""
    return sum(p.width for p in self.parts)

  @property
  def factors_dtype(self) -> np.dtype:
    """The dtype of exported factors: float32, or uint16 that holds the bits of bfloat16."""
    return np.dtype(np.uint16 if self.dtype == 'bfloat16' else np.float32)

  @property
  def floats(self) -> int:
    """The number of floats in a row: its weights and their optimizer state."""
    return 1 + state_floats(self.linear, 1) + self.width + state_floats(self.factors, self.width)


class PulledRows(NamedTuple):
  """The rows of u keys; the factors of key j are factors[offsets[j]:offsets[j + 1]]."""

  ids: tf.Tensor  # int64 [u], the rows' places in the store; -1 for absent features
  offsets: tf.Tensor  # int32 [u + 1]
  linear: tf.Tensor  # float32 [u]; -0 for absent features, and for them alone (`has_row`)
  factors: tf.Tensor  # float32 [offsets[u]]
  show_click: tf.Tensor | tuple[()] = ()  # float32 [u, 2], show and click, if a slot has `counts`


def has_row(linear: TensorLike) -> tf.Tensor:
  """Returns which features have a row, bool [u]; `linear` is what a pull gave for them."""
  return tf.not_equal(tf.bitcast(linear, tf.int32), tf.int32.min)  # the bits of -0


def to_float32(column: np.ndarray) -> np.ndarray:
  """Returns exported factors, whose dtype is `TableSpec.factors_dtype`, as float32."""
  if column.dtype == np.float32:
    return column
  return (column.astype(np.uint32) << 16).view(np.float32)


def to_bfloat16(rows: np.ndarray) -> np.ndarray:
  """Rounds float32 factors to the nearest bfloat16, and returns its bits as uint16."""
  return rows.astype(tf.bfloat16.as_numpy_dtype).view(np.uint16)


def initial_factors(keys: TensorLike, seed: int, width: int, scale: float = 0.01) -> tf.Tensor:
  """Returns random factors [n, width] of deviation `scale`, given by seed, key and column alone."""
  return load().ctr_initial_factors(keys=keys, seed=seed, width=width, scale=scale)


def without_counts(chunk: chunks.Chunk) -> chunks.Chunk:
  """Returns a copy of a chunk of features in which every show and click is 0."""
  zeros = np.zeros(len(chunk['key']))
  return {**chunk, 'show': zeros, 'click': zeros}


class RowStore(FeatureLifecycle):
  """A feature table that also holds the features' rows, with the verbs of `FeatureLifecycle`.

  Args:
    slot_table: for each slot id, the index of its table in `tables`; -1 for unused ids.
    seed: of initial factors and of the random rounding to bfloat16.
    name: as in `FeatureLifecycle`. All stores of one name must have the same arguments.
    memory_limit: how many bytes of memory features and rows may take, or, up to 1, what share of
      the machine's; 0 is no limit. Beyond it, the features not seen for longest lie in
      `cold_dir`, a directory on a local disk, in files without a name.
  """

  def __init__(
    self,
    policy: Policy | None = None,
    *,
    tables: Sequence[TableSpec],
    slot_table: Sequence[int],
    seed: int = 0,
    name: str | None = None,
    memory_limit: float = 0,
    cold_dir: str = '',
  ):
    self.tables = tuple(tables)
    self.slot_table = tuple(slot_table)
    self.widths = [t.width for t in self.tables]
    create_handle = functools.partial(
      load().ctr_row_store_handle,
      slot_table=list(self.slot_table),
      widths=self.widths,
      init_scales=[t.init_scale for t in self.tables],
      linear_optimizers=[t.linear for t in self.tables],
      factors_optimizers=[t.factors for t in self.tables],
      factors_dtypes=[t.dtype for t in self.tables],
      seed=seed,
      memory_limit=memory_limit,
      cold_dir=cold_dir,
    )
    super().__init__(policy, name, create_handle=create_handle)

  def pull(self, keys: TensorLike, train: bool = True) -> PulledRows:
    """Returns the rows of keys; the store does not change.

    The keys, int64 [u], are >= 0, of slots that have a table, and fastest in the order of `dedupe`.
    A feature that the store does not have gets linear weight -0, no factors, id -1. With `train`,
    one without factors gets its initial factors if admission is 'none'.
    """
    return PulledRows(*self._reads.ctr_row_store_pull(self.handle, keys, train=train))

  def push(
    self,
    keys: TensorLike,
    rows: PulledRows,
    shows: TensorLike,
    clicks: TensorLike,
    linear_gradient: TensorLike,
    factors_gradient: TensorLike,
    scale: TensorLike,
    hyper: TensorLike,
    step: TensorLike,
    add: bool = False,
  ) -> None:
    """Takes one optimizer step on each key's row, then adds the key's shows and clicks.

    Features that the store does not have are created. The push that admits a feature does not train
    its factors yet, unless admission is 'none'. Each key is updated under the lock of its shard.

    Args:
      keys: int64 [u]; if a key repeats, its occurrences are processed one after the other.
      rows: what `pull` returned for these keys.
      shows, clicks, linear_gradient: float32 [u], summed over the batch.
      factors_gradient: float32 [offsets[u]], summed over the batch, in the layout of rows.factors.
      scale: float32 [1] or [u], multiplies the gradients.
      hyper: float32 [T, 2, H], the result of `ops.row_optimizers.hyper`.
      step: int64 [], the number of this global step, from 1.
      add: whether to add the gradients to the weights as they are. Optimizer state then does not
        change, except FTRL's z, which is set to match the new weight.
    Raises:
      OutOfRangeError: if a gradient is not finite; nothing has changed then.
    """
    gradients = linear_gradient, factors_gradient
    counts = shows, clicks
    return self._ops.ctr_row_store_push(
      self.handle, keys, rows.ids, rows.offsets, *counts, *gradients, scale, hyper, step, add=add
    )

  def catch_up(self, hyper: TensorLike, step: TensorLike) -> None:
    """Takes the optimizer steps up to `step` that rows missed because they were in no batch.

    Only rows with l2_mode 'catch_up' change, by the penalties (L1, L2) alone. Call this before rows
    are evaluated, saved or exported.
    """
    return self._ops.ctr_row_store_catch_up(self.handle, hyper, step)

  def erase(self, keys: TensorLike) -> None:
    """Deletes the features of these keys, int64 [n], and their rows; unknown keys are skipped."""
    return self._ops.ctr_row_store_erase(self.handle, keys)

  def forget_counts(self) -> None:
    """Sets show and click of every feature to 0. Eager only."""
    # To save memory, it exports, erases and imports a sixteenth of the features at a time.
    for first in range(0, SHARDS, SHARDS // 16):
      for chunk in list(self.export_state(shards=range(first, first + SHARDS // 16))):
        self.erase(chunk['key'])
        self._import(without_counts(chunk))

  def _row_floats(self) -> int:
    return max(t.floats for t in self.tables)

  def export_state(
    self, shards: range = range(SHARDS), changed: bool = False
  ) -> Iterator[chunks.Chunk]:
    """Yields chunks of n features, as `FeatureLifecycle` does, with the columns of their rows.

    linear: float32 [n, 1 + k], the linear weight, then its optimizer state.
    last_step: int32 [n], the global step of the row's last update.
    factors_NAME: [m, width + state] of `TableSpec.factors_dtype`: the factors of table NAME's m
    admitted features, then their state.
    """
    for chunk in super().export_state(shards, changed):
      linear, last_step, factors = self._reads.ctr_row_store_export(
        self.handle, chunk['key'], chunk['admitted'], dtypes=[t.factors_dtype for t in self.tables]
      )
      rows = {f'factors_{t.name}': rows.numpy() for t, rows in zip(self.tables, factors) if t.width}
      yield chunk | {'linear': linear.numpy(), 'last_step': last_step.numpy()} | rows

  def within(self, chunk: chunks.Chunk, shards: range) -> chunks.Chunk:
    """Returns a chunk with only the features that belong to these logical shards."""
    kept = sharding.within(chunk['key'], shards)
    if kept.all():
      return chunk
    slots = np.array(self.slot_table)
    table_slots = {t.name: np.flatnonzero(slots == i) for i, t in enumerate(self.tables)}
    return chunks.select(chunk, kept, table_slots)

  def _columns(self) -> dict[str, np.dtype]:
    factors = {f'factors_{t.name}': t.factors_dtype for t in self.tables if t.width}
    return chunks.COLUMNS | {'linear': np.float32, 'last_step': np.int32} | factors

  def _import(self, chunk: chunks.Chunk) -> None:
    super()._import(chunk)
    factors = [
      chunk[f'factors_{t.name}'] if t.width else np.zeros([0, 0], t.factors_dtype)
      for t in self.tables
    ]
    self._ops.ctr_row_store_import(
      self.handle, chunk['key'], chunk['admitted'], chunk['linear'], chunk['last_step'], factors
    )
