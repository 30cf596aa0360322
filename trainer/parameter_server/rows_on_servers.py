"""Lets workers treat the rows on all servers as one table."""

import functools
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import tensorflow as tf

from ops.chunks import Chunk
from ops.feature_lifecycle import FeatureLifecycle, capacity_cut
from ops.library import TensorLike
from ops.row_store import PulledRows
from ops.sharding import IntOrArray, owner_of, shard_of, shards_of
from trainer.parameter_server.client import CoordinatorClient
from trainer.parameter_server.servers import Servers

_HISTOGRAM_SIZE = 1 << 16  # the length of FeatureLifecycle.rank_histogram


class RowsOnServers:
  """The rows on all servers as one RowTable; workers divide the work.

  For `select` and `export_state`, they divide the logical shards as if they kept the rows. For
  `size`, `decay`, `age` and `evict`, each server belongs to one worker.
  """

  def __init__(self, servers: Servers, communicator: CoordinatorClient):
    self._servers, self._communicator = servers, communicator
    self._remote = [
      store.remote(
        *(functools.partial(servers.call, i, only_reads) for only_reads in (False, True))
      )
      for i, store in enumerate(servers.stores)
    ]
    store = servers.stores[0]
    self.policy, self.tables, self.slot_table = store.policy, store.tables, store.slot_table

  def _shards(self) -> range:
    return shards_of(self._communicator.rank, self._communicator.size)

  def _server_of(self, shard: IntOrArray) -> IntOrArray:
    return owner_of(shard, self._servers.count)

  def _own(self) -> list[FeatureLifecycle]:
    """Returns the stores of the servers whose first shard is in this worker's share."""
    stores = enumerate(self._remote)
    return [s for i, s in stores if shards_of(i, self._servers.count)[0] in self._shards()]

  def _together(self, verb: Callable[[FeatureLifecycle], None]) -> None:
    """Calls `verb` on the stores of all servers while all workers wait; every worker calls it."""
    self._communicator.barrier()
    for store in self._own():
      verb(store)
    self._communicator.barrier()

  # Verbs on whole servers

  def size(self) -> int:
    return sum(int(store.size()) for store in self._own())

  def admitted_size(self) -> int:
    return sum(int(store.admitted_size()) for store in self._own())

  def bytes(self) -> int:
    return sum(int(store.bytes()) for store in self._own())

  def count_changes(self) -> int:
    counts = [int(store.count_changes()) for store in self._own()]
    return -1 if min(counts, default=0) < 0 else sum(counts)

  def keep_changes(self) -> None:
    self._together(lambda store: store.keep_changes())

  def decay(self) -> None:
    self._together(lambda store: store.decay())

  def age(self) -> None:
    self._together(lambda store: store.age())

  def forget_counts(self) -> None:
    self._together(lambda store: store.forget_counts())

  def clear(self) -> None:
    self._together(lambda store: store.clear())

  def catch_up(self, hyper: TensorLike, step: TensorLike) -> None:
    hyper, step = np.asarray(hyper), np.asarray(tf.convert_to_tensor(step))
    for store in self._own():
      store.catch_up(hyper, step)

  def evict(self, all_reduce: Callable[[np.ndarray], np.ndarray] | None = None) -> np.ndarray:
    # `capacity` limits the number of features on all servers together.
    own, capacity = self._own(), self.policy.capacity

    def histogram(prefix: tf.Tensor) -> np.ndarray:
      zeros = np.zeros([_HISTOGRAM_SIZE], np.int64)
      counts = sum((store.rank_histogram(prefix).numpy() for store in own), zeros)
      return all_reduce(counts) if all_reduce else counts

    evicted = [store.evict_by_tests() for store in own]
    if capacity is not None:
      cut = capacity_cut(capacity, histogram)
      evicted += [store.evict_below(cut) for store in own]
    return np.concatenate([np.zeros([0], np.int64), *evicted])

  # Verbs on features

  def take_changes(self) -> None:
    return None  # a delta looks at all features

  def select(self, kind: str, among: None = None) -> np.ndarray:
    servers = sorted({self._server_of(shard) for shard in self._shards()})
    empty = np.zeros([0], np.int64)
    keys = np.concatenate([empty, *(self._remote[i].select(kind) for i in servers)])
    return keys[owner_of(shard_of(keys), self._communicator.size) == self._communicator.rank]

  def commit(self, kind: str, keys: TensorLike) -> None:
    keys = np.asarray(keys)
    servers = self._server_of(shard_of(keys))
    for i in np.unique(servers):
      self._remote[i].commit(kind, keys[servers == i])

  def lookup(self, keys: TensorLike) -> dict[str, np.ndarray]:
    keys = np.asarray(keys)
    servers = self._server_of(shard_of(keys))
    by_server = [self._remote[i].lookup(keys[servers == i]) for i in range(self._servers.count)]
    # The place of each key if the keys are ordered by server.
    places = np.argsort(np.argsort(servers, kind='stable'))
    return {
      name: np.concatenate([columns[name] for columns in by_server])[places]
      for name in by_server[0]
    }

  def pull(self, keys: TensorLike, train: bool) -> PulledRows:
    return self._servers.pull(np.asarray(keys), train)[0]

  def export_state(
    self, shards: range | None = None, changed: bool = False
  ) -> Iterator[dict[str, np.ndarray]]:
    shards = self._shards() if shards is None else shards
    for i, remote in enumerate(self._remote):
      own = shards_of(i, self._servers.count)
      both = range(max(own.start, shards.start), min(own.stop, shards.stop))
      yield from remote.export_state(shards=both, changed=changed)

  def within(self, chunk: Chunk, shards: range) -> Chunk:
    return self._remote[0].within(chunk, shards)

  def import_state(self, source: Iterable[Chunk]) -> None:
    """Adds chunks to the servers' rows; all workers have called `clear` before."""
    for chunk in source:
      for i in np.unique(self._server_of(shard_of(chunk['key']))):
        own = self.within(chunk, shards_of(i, self._servers.count))
        self._remote[i].import_state([own], replace=False)
