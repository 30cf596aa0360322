"""The verbs of the tables that hold rows, wherever those lie."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import tensorflow as tf

from ops.chunks import Chunk
from ops.library import TensorLike
from ops.policy import Policy
from ops.row_store import PulledRows, TableSpec


class RowTable(Protocol):
  """The rows that a process answers for: its own row store or TFRA's, or those on all servers.

  `ops.row_store.RowStore` describes each verb.

  Attributes:
    policy: the rules of the feature lifecycle.
    tables: the layouts of rows.
    slot_table: the table (its place in `tables`) of each slot id.
  """

  policy: Policy
  tables: Sequence[TableSpec]
  slot_table: Sequence[int]

  # How much there is: int64 [], tensors or whole numbers.
  def size(self) -> TensorLike: ...
  def admitted_size(self) -> TensorLike: ...
  def bytes(self) -> TensorLike: ...

  # The end of a day.
  def decay(self) -> None: ...
  def evict(self, all_reduce: Callable[[np.ndarray], np.ndarray] | None = None) -> TensorLike: ...
  def age(self) -> None: ...

  # The beginning of a later epoch.
  def forget_counts(self) -> None: ...

  # Exports and checkpoints.
  def catch_up(self, hyper: TensorLike, step: TensorLike) -> None: ...
  def select(self, kind: str) -> TensorLike: ...
  def lookup(self, keys: TensorLike) -> Mapping[str, TensorLike]: ...
  def pull(self, keys: TensorLike, train: bool) -> PulledRows: ...
  def commit(self, kind: str, keys: TensorLike) -> None: ...
  def export_state(self, *, shards: Iterable[int] | None = None) -> Iterator[Chunk]: ...
  def import_state(self, source: Iterable[Chunk]) -> None: ...
  def within(self, chunk: Chunk, shards: range) -> Chunk: ...
  def clear(self) -> None: ...


def counts_of(store: RowTable, keys: TensorLike) -> tf.Tensor:
  """Returns show and click of keys, float32 [u, 2]; 0 where a feature is absent."""
  columns = store.lookup(keys)
  return tf.cast(tf.stack([columns['show'], columns['click']], 1), tf.float32)
