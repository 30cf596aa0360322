from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import tensorflow as tf

from ops.chunks import Chunk
from ops.library import TensorLike
from ops.policy import Policy
from ops.row_store import PulledRows, TableSpec
from trainer.comm.communicator import Communicator


class RowTable(Protocol):
  """What holds rows, in this process or on all servers; `RowStore` describes the methods."""

  policy: Policy
  tables: Sequence[TableSpec]
  slot_table: Sequence[int]

  # Sizes: int64 [] tensors, or ints.
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
  def select(self, kind: str, among: TensorLike | None = None) -> TensorLike: ...
  def lookup(self, keys: TensorLike) -> Mapping[str, TensorLike]: ...
  def pull(self, keys: TensorLike, train: bool) -> PulledRows: ...
  def commit(self, kind: str, keys: TensorLike) -> None: ...
  def count_changes(self) -> TensorLike: ...
  def keep_changes(self) -> None: ...
  def take_changes(self) -> np.ndarray | None: ...
  def export_state(
    self, *, shards: Iterable[int] | None = None, changed: bool = False
  ) -> Iterator[Chunk]: ...
  def import_state(self, source: Iterable[Chunk]) -> None: ...
  def within(self, chunk: Chunk, shards: range) -> Chunk: ...
  def clear(self) -> None: ...


def counts_of(store: RowTable, keys: TensorLike) -> tf.Tensor:
  """Returns the shows and clicks of each key's feature, float32 [u, 2]; 0 for an absent feature."""
  columns = store.lookup(keys)
  return tf.cast(tf.stack([columns['show'], columns['click']], 1), tf.float32)


def table_counts(store: RowTable, communicator: Communicator) -> dict[str, int]:
  """Returns {'features': …, 'admitted': …, 'table_bytes': …}, sums over all processes.

  Admitted are the features that have factors. Every process calls it.
  """
  own = np.array([store.size(), store.admitted_size(), store.bytes()], np.int64)
  total = communicator.sum_arrays({'counts': own})['counts'].tolist()
  return dict(zip(('features', 'admitted', 'table_bytes'), total))
