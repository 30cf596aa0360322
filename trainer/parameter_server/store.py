"""The rows on the servers, in either store, as one store with the verbs of ops.row_store.RowStore;

a worker's share of them is what a rank would own.
"""

import functools
import itertools

import numpy as np
import tensorflow as tf

from ops.feature_lifecycle import capacity_cut
from ops.sharding import owner_of, shard_of, shards_of


class ServedStore:
  """The part of all rows that this worker answers for.

  Of what is asked of features, worker r of M answers for the logical shards that rank r of M would
  own; of what is asked of a whole
  server, one worker does.

  Args:
    servers: trainer.parameter_server.servers.Servers.
    communicator: trainer.parameter_server.coordinator.CoordinatorClient.
  """

  def __init__(self, servers, communicator):
    self._servers, self._communicator = servers, communicator
    self._remote = [
      store.remote(functools.partial(servers.run, i)) for i, store in enumerate(servers.stores)
    ]
    self.policy, self.tables, self.slot_table = (
      servers.stores[0].policy,
      servers.stores[0].tables,
      servers.stores[0].slot_table,
    )

  def _shards(self):
    return shards_of(self._communicator.rank, self._communicator.size)

  def _server(self, shard):
    return self._remote[owner_of(shard, self._servers.count)]

  def _own(self):
    """The servers that this worker speaks for:

    of those it shares with others, the ones whose first shard is its own.
    """
    first = [shards_of(i, self._servers.count)[0] for i in range(self._servers.count)]
    return [
      self._remote[i]
      for i, s in enumerate(first)
      if owner_of(s, self._communicator.size) == self._communicator.rank
    ]

  # Of servers

  def size(self):
    return sum(int(s.size()) for s in self._own())

  def admitted_size(self):
    return sum(int(s.admitted_size()) for s in self._own())

  def bytes(self):
    return sum(int(s.bytes()) for s in self._own())

  def decay(self):
    for store in self._own():
      store.decay()

  def age(self):
    for store in self._own():
      store.age()

  def catch_up(self, hyper, step):
    hyper, step = np.asarray(hyper), np.asarray(tf.convert_to_tensor(step))
    for store in self._own():
      store.catch_up(hyper, step)

  def evict(self, all_reduce=None):
    """As FeatureLifecycle.evict; `capacity` bounds all servers together."""
    if self.policy.capacity is None:
      found = [np.asarray(s.evict()) for s in self._own()]
    else:

      def histogram(prefix):
        counts = sum(
          (s.rank_histogram(prefix).numpy() for s in self._own()), np.zeros([1 << 16], np.int64)
        )
        return all_reduce(counts) if all_reduce else counts

      found = [np.asarray(s.evict_by_tests()) for s in self._own()]
      cut = capacity_cut(self.policy.capacity, histogram)
      found += [np.asarray(s.evict_below(cut)) for s in self._own()]
    return np.concatenate([np.zeros([0], np.int64), *found])

  def clear(self):
    """Erases everything; every worker calls it."""
    self._communicator.barrier()
    for store in self._own():
      store.clear()
    self._communicator.barrier()

  # Of features

  def select(self, kind):
    keys = [
      np.asarray(s.select(kind))
      for s in {id(s): s for s in map(self._server, self._shards())}.values()
    ]
    keys = np.concatenate([np.zeros([0], np.int64), *keys])
    return keys[owner_of(shard_of(keys), self._communicator.size) == self._communicator.rank]

  def commit(self, kind, keys):
    keys = np.asarray(keys)
    servers = owner_of(shard_of(keys), self._servers.count)
    for i in np.unique(servers):
      self._remote[i].commit(kind, keys[servers == i])

  def pull(self, keys, train):
    """As RowStore.pull; keys by logical shard."""
    return self._servers.pull(np.asarray(keys), train)[0]

  def export_state(self):
    for shard in self._shards():
      yield from self._server(shard).export_state(shards=[shard])

  def import_state(self, chunks):
    """Adds what exports gave, each chunk of one logical shard;

    `clear` comes before, on all workers.
    """
    some = (c for c in chunks if len(c['key']))
    for server, group in itertools.groupby(
      some, lambda c: owner_of(int(shard_of(c['key'][0])), self._servers.count)
    ):
      self._remote[server].import_state(group, replace=False)
