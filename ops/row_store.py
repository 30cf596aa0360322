"""The row store: a feature table with the trained weights of its features beside it.

The verbs of a training step, in their order (docs/architecture.md, "Features and rows"):

  d = dedupe(keys, shows, clicks)                        distinct keys, summed shows and clicks
  rows = store.pull(d.unique, train=True)                linear weights and factors
  pooled = pool(rows, d, values, segments, b, layout)    slot sums, differentiable
  store.push(d.unique, rows, d.shows, d.clicks, …)       one optimizer step in place, then the
                                                         lifecycle's observation

ops/dedupe.py has the first, ops/pooling.py the third; between processes ops/packing.py carries rows
and gradients. ops/cc/rows/row_store.h states the contracts.
"""

import dataclasses
import functools
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from ops import chunks
from ops.feature_lifecycle import FeatureLifecycle
from ops.library import TensorLike, load
from ops.policy import Policy
from ops.row_optimizers import state_floats
from ops.sharding import shard_of


@dataclasses.dataclass(frozen=True)
class FactorPart:
  """Columns of a table's factors that an interaction reads."""

  kind: str  # 'plain': D columns (fm, dnn); 'field': F*D, D for each field (ffm)
  width: int  # D, or F*D


@dataclasses.dataclass(frozen=True)
class TableSpec:
  """Rows of one layout: a linear weight and, after admission, factors; with optimizer state."""

  name: str
  parts: tuple[FactorPart, ...]  # side by side
  init: str = 'normal'  # or 'uniform'
  init_scale: float = 0.01  # standard deviation, or half the range
  linear: str = 'adagrad'  # one of ops.row_optimizers.ROW_OPTIMIZERS
  factors: str = 'adagrad'
  dtype: str = 'float32'  # or 'bfloat16': of the factors and their state

  @property
  def width(self) -> int:
    """The factors of a row."""
    return sum(p.width for p in self.parts)

  @property
  def column(self) -> np.dtype:
    """What holds factor rows outside the store: the bits of bfloat16 as uint16."""
    return np.dtype(np.uint16 if self.dtype == 'bfloat16' else np.float32)

  @property
  def floats(self) -> int:
    """The weights and optimizer state of a row."""
    return 1 + state_floats(self.linear, 1) + self.width + state_floats(self.factors, self.width)


class PulledRows(NamedTuple):
  """Rows of u keys.

  Feature j's factors are factors[offsets[j]:offsets[j + 1]], none before admission.
  """

  ids: tf.Tensor  # int64 [u], where the push finds them; -1 where absent
  offsets: tf.Tensor  # int32 [u + 1]
  linear: tf.Tensor  # float32 [u]
  factors: tf.Tensor  # float32 [offsets[u]]


def to_float32(column: np.ndarray) -> np.ndarray:
  """Returns factor rows as float32, of a table of either dtype.

  Args:
    column: float32, or uint16 with the bits of bfloat16.
  """
  if column.dtype == np.float32:
    return column
  return (column.astype(np.uint32) << 16).view(np.float32)


def to_bfloat16(rows: np.ndarray) -> np.ndarray:
  """Returns factor rows rounded to nearest, as uint16 with the bits of bfloat16.

  Args:
    rows: float32.
  """
  return rows.astype(tf.bfloat16.as_numpy_dtype).view(np.uint16)


def initial_factors(
  keys: TensorLike, seed: int, width: int, init: str = 'normal', scale: float = 0.01
) -> tf.Tensor:
  """Returns what a store initialises factors with: a pure function of (seed, key, column).

  Args:
    keys: int64 [n].
    seed: the store's.
    width: the number of factors.
    init: 'normal' or 'uniform'.
    scale: the standard deviation, or half the range.

  Returns:
    float32 [n, width].
  """
  return load().ctr_initial_factors(keys=keys, seed=seed, width=width, init=init, scale=scale)


class RowStore(FeatureLifecycle):
  """A feature table, with all of `FeatureLifecycle`'s verbs, and rows beside its features.

  Args:
    policy: as in `FeatureLifecycle`.
    tables: the layouts of rows.
    slot_table: the table (its place in `tables`) of each slot id, -1 for ids that are not used.
    seed: of the initial factors and the rounding.
    name: as in `FeatureLifecycle`. A second store of one name must be given the same arguments.
  """

  def __init__(
    self,
    policy: Policy | None = None,
    *,
    tables: Sequence[TableSpec],
    slot_table: Sequence[int],
    seed: int = 0,
    name: str | None = None,
  ):
    self.tables = tuple(tables)
    self.slot_table = tuple(slot_table)
    self.widths = [t.width for t in self.tables]
    create_handle = functools.partial(
      load().ctr_row_store_handle,
      slot_table=list(self.slot_table),
      widths=self.widths,
      inits=[t.init for t in self.tables],
      init_scales=[t.init_scale for t in self.tables],
      linear_optimizers=[t.linear for t in self.tables],
      factors_optimizers=[t.factors for t in self.tables],
      factors_dtypes=[t.dtype for t in self.tables],
      seed=seed,
    )
    super().__init__(policy, name, create_handle=create_handle)

  def pull(self, keys: TensorLike, train: bool = True) -> PulledRows:
    """Reads rows and changes nothing.

    Args:
      keys: int64 [u], >= 0, of slots that have a table; fastest in the order of `dedupe`.
      train: with admission 'none', whether features that have no factors yet read their initial
        ones.

    Returns:
      The rows; absent features have linear weight 0, no factors and id -1.
    """
    return PulledRows(*self._ops.ctr_row_store_pull(self.handle, keys, train=train))

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
    """Takes one optimizer step on each key's row, then observes its shows and clicks.

    Absent features are created. The push that admits a feature does not train its factors; with
    admission 'none' it does. All of a key happens under its shard's lock.

    Args:
      keys: int64 [u]; repeats take their turns.
      rows: what the pull of these keys returned.
      shows: float32 [u], summed over the batch.
      clicks: float32 [u], likewise.
      linear_gradient: float32 [u], likewise.
      factors_gradient: float32 [offsets[u]], as rows.factors, likewise.
      scale: float32 [1] or [u], by which the gradients are multiplied.
      hyper: float32 [T, 2, 11], of `ops.row_optimizers.hyper`.
      step: int64 [], the global step, from 1.
      add: whether the gradients are differences to add to the weights, without an optimizer; of its
        state only FTRL's z moves, with its weight.

    Raises:
      InvalidArgumentError: naming argument, key and value, for gradients that are not finite and
        impossible counts; then nothing has changed.
    """
    return self._ops.ctr_row_store_push(
      self.handle,
      keys,
      rows.ids,
      rows.offsets,
      shows,
      clicks,
      linear_gradient,
      factors_gradient,
      scale,
      hyper,
      step,
      add=add,
    )

  def catch_up(self, hyper: TensorLike, step: TensorLike) -> None:
    """Takes the steps that rows missed while they were in no batch, where l2_mode is 'catch_up'.

    Call it before rows are evaluated, saved or exported.

    Args:
      hyper: as in `push`.
      step: int64 [], the last step that is taken.
    """
    return self._ops.ctr_row_store_catch_up(self.handle, hyper, step)

  def erase(self, keys: TensorLike) -> None:
    """Forgets features and their rows; absent ones are passed over.

    Args:
      keys: int64 [n].
    """
    return self._ops.ctr_row_store_erase(self.handle, keys)

  def _row_floats(self) -> int:
    return max(t.floats for t in self.tables)

  def _chunks(self, shards: range) -> Iterator[dict[str, np.ndarray]]:
    """Yields chunks with the lifecycle's columns [n] and these:

    `linear` float32 [n, 1 + k], weight, then state; `last_step` int32 [n]; of each table that has
    factors, `factors_NAME` [its admitted features, width + state], in the order of `key`, float32
    or, of a table in bfloat16, its bits as uint16.
    """
    for chunk in super()._chunks(shards):
      linear, last_step, factors = self._ops.ctr_row_store_export(
        self.handle, chunk['key'], chunk['admitted'], dtypes=[t.column for t in self.tables]
      )
      columns = {name: chunk[name] for name in chunks.COLUMNS}
      rows = {f'factors_{t.name}': rows.numpy() for t, rows in zip(self.tables, factors) if t.width}
      yield columns | {'linear': linear.numpy(), 'last_step': last_step.numpy()} | rows

  def within(self, chunk: chunks.Chunk, shards: range) -> chunks.Chunk:
    """Returns the features of a chunk that are of some logical shards."""
    shard = shard_of(chunk['key'])
    kept = (shard >= shards.start) & (shard < shards.stop)
    if kept.all():
      return chunk
    slots = np.array(self.slot_table)
    table_slots = {t.name: np.flatnonzero(slots == i) for i, t in enumerate(self.tables)}
    return chunks.select(chunk, kept, table_slots)

  def import_state(
    self, source: str | os.PathLike | Iterable[chunks.Chunk], replace: bool = True
  ) -> None:
    """Takes what any number of stores exported. Eager only.

    Args:
      source: a file that `export_state` wrote, or chunks.
      replace: whether the features replace what the store holds, or are added to it.

    Raises:
      DataLossError: naming what is wrong; the store is then empty. What `source` raises, likewise.
    """
    if replace:
      self.clear()
    try:
      for i, chunk in enumerate(chunks.read(source)):
        self.import_chunk(f'chunk {i}', chunk)
    except BaseException:
      self.clear()
      raise

  def import_chunk(self, where: str, chunk: chunks.Chunk) -> None:
    """Adds the features of one exported chunk to those of the store. Eager only.

    Args:
      where: names the chunk, for messages.
      chunk: columns as `export_state` gives them, arrays or tensors.

    Raises:
      DataLossError: naming what is wrong; some of the chunk's features may then be there.
    """
    dtypes = chunks.COLUMNS | {'linear': np.float32, 'last_step': np.int32}
    dtypes |= {f'factors_{t.name}': t.column for t in self.tables if t.width}
    for name, dtype in dtypes.items():
      found = chunk[name].dtype if name in chunk else 'nothing'
      if found != dtype:
        raise tf.errors.DataLossError(
          None, None, f'{where}: {name}: found {found}; wanted a column of {np.dtype(dtype)}'
        )
    factors = [
      chunk[f'factors_{t.name}'] if t.width else np.zeros([0, 0], t.column) for t in self.tables
    ]
    try:
      self._ops.ctr_lifecycle_import(self.handle, **{name: chunk[name] for name in chunks.COLUMNS})
      self._ops.ctr_row_store_import(
        self.handle, chunk['key'], chunk['admitted'], chunk['linear'], chunk['last_step'], factors
      )
    except tf.errors.InvalidArgumentError as e:
      raise tf.errors.DataLossError(None, None, f'{where}: {e.message}') from None
