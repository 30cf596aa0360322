"""How a process reaches rows:

its own, or its peers' by all-to-all. One small interface: `route`, `pull` and `push`.
"""

from typing import NamedTuple

import tensorflow as tf

from ops import packing, row_store, sharding
from ops.dedupe import DEDUPED_SPEC, Deduped, dedupe


def rows_of(store, communicator, cfg):
  """The rows of one process, or of N ranks."""
  return LocalRows(store, cfg) if communicator.size == 1 else ShardedRows(store, communicator, cfg)


class LocalRows:
  """All rows are this process's own.

  Args:
    store: trainer.embedding.stores.

  Attributes:
    routed: TensorSpecs of what `route` returns; () where keys need not travel.
  """

  routed = ()

  def __init__(self, store, cfg):
    self._store = store
    self._per_feature = cfg.sparse.gradient_scale == 'feature'

  def route(self, deduped, weight):
    """Sends keys to their owners and tells all ranks how much this one has; reads no rows, so that
    it may happen a batch ahead.

    Args:
      deduped: ops.dedupe.Deduped of this process's samples.
      weight: float32 [B], theirs.
    Returns: what `totals` and `pull` want of it.
    """
    del deduped, weight
    return ()

  def totals(self, weight, routed):
    """The weight of all ranks' samples, float32 [], and how many lower ranks have, int64 [].

    Args: as of, and from, `route`.
    """
    del routed
    return tf.reduce_sum(weight), tf.zeros([], tf.int64)

  def pull(self, deduped, routed, train):
    """Reads rows; changes nothing.

    Args:
      deduped: ops.dedupe.Deduped of this process's samples.
      routed: what `route` returned for them.
      train: whether features unknown so far read the factors they will start with (admission none);
        else they read 0.
    Returns: ops.row_store.Rows of the unique keys.
    """
    return self._store.pull(deduped.unique, train)

  def push(self, deduped, rows, linear_gradient, factors_gradient, scale, hyper, step):
    """Updates rows, then counts shows and clicks and admits.

    Args:
      rows: what `pull` returned.
      linear_gradient: float32 [u]; factors_gradient: float32, flat as rows.factors: sums over this
        process's samples.
      scale: float32 [], one over the global weight.
      hyper: float32 [T, 2, H]; step: int64 [], counted from 1.
    """
    self._push(deduped, rows, linear_gradient, factors_gradient, scale, hyper, step)

  def _push(self, deduped, rows, linear_gradient, factors_gradient, scale, hyper, step):
    # `feature`: a rare feature's step does not shrink as the batch, or the number of ranks, grows.
    scale = 1 / tf.maximum(deduped.shows, 1) if self._per_feature else tf.reshape(scale, [1])
    return self._store.push(
      deduped.unique,
      rows,
      deduped.shows,
      deduped.clicks,
      linear_gradient,
      factors_gradient,
      scale,
      hyper,
      step,
    )


class Routed(NamedTuple):
  """Where the keys of this rank went and which came here."""

  sent: tf.Tensor  # int32 [N] keys that went to each owner
  received: tf.Tensor  # int32 [N] keys that came from each rank
  owned: Deduped  # of all keys that came here
  weights: tf.Tensor  # float32 [N], of each rank's samples
  samples: tf.Tensor  # int64 [N], how many each rank has


class _Sharded(NamedTuple):
  """Rows of this rank's unique keys, and what the way back to their owners needs."""

  linear: tf.Tensor
  factors: tf.Tensor
  offsets: tf.Tensor
  routed: Routed
  owned: row_store.Rows  # of routed.owned


class ShardedRows(LocalRows):
  """Rows are sharded over N ranks by the hash of their key; a step takes three all-to-alls of rows.

  Keys (with their shows and clicks) go to their owners, rows come back, gradients go to the owners,
  who sum them. What travels is
  one entry for each key that is unique on a rank; a feature that has no factors yet costs no
  factors.
  """

  routed = Routed(
    *[tf.TensorSpec([None], tf.int32)] * 2,
    DEDUPED_SPEC,
    tf.TensorSpec([None]),
    tf.TensorSpec([None], tf.int64),
  )

  def __init__(self, store, communicator, cfg):
    super().__init__(store, cfg)
    # An exchange each: the next batch's keys may come before or after this one's rows.
    self._keys, self._rows, self._gradients = (
      communicator.row_exchange(name) for name in ('keys', 'rows', 'gradients')
    )
    self._rank, self._size = communicator.rank, communicator.size
    self._dtype = tf.as_dtype(cfg.sparse.exchange_dtype)

  def route(self, deduped, weight):
    sent = sharding.owner_counts(
      deduped.unique, self._size
    )  # owners hold contiguous ranges of shards, and keys are grouped by shard
    (keys, shows, clicks), received = self._keys.all_to_all(
      [deduped.unique, deduped.shows, deduped.clicks], sent
    )
    own = tf.reduce_sum(weight), tf.size(weight, tf.int64)
    (weights, samples), _ = self._keys.all_to_all(
      [tf.fill([self._size], x) for x in own], tf.ones([self._size], tf.int32)
    )
    return Routed(sent, received, dedupe(keys, shows, clicks), weights, samples)

  def totals(self, weight, routed):
    return tf.reduce_sum(routed.weights), tf.reduce_sum(routed.samples[: self._rank])

  def pull(self, deduped, routed, train):
    owned = self._store.pull(routed.owned.unique, train)
    buffer, splits = packing.pack_rows(owned, routed.owned.inverse, routed.received, self._dtype)
    (buffer,), _ = self._rows.all_to_all([buffer], splits)
    linear, factors, offsets = packing.unpack_rows(
      buffer,
      routed.sent,
      deduped.unique,
      self._store.slot_table,
      [t.width for t in self._store.tables],
    )
    return _Sharded(linear, factors, offsets, routed, owned)

  def push(self, deduped, rows, linear_gradient, factors_gradient, scale, hyper, step):
    routed = rows.routed
    buffer, splits = packing.pack_gradients(
      linear_gradient, factors_gradient, rows.offsets, routed.sent, self._dtype
    )
    (buffer,), _ = self._gradients.all_to_all([buffer], splits)
    linear, factors = packing.sum_gradients(
      buffer, routed.received, rows.owned.offsets, routed.owned
    )
    self._push(routed.owned, rows.owned, linear, factors, scale, hyper, step)
