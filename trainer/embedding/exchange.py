"""How a process reaches rows: its own, or those that other ranks own, by all-to-all."""

from typing import Any, NamedTuple

import tensorflow as tf

from ops import packing, sharding
from ops.dedupe import DEDUPED_SPEC, Deduped, dedupe
from ops.row_store import Rows, RowStore
from trainer.comm.communicator import Communicator, RankCommunicator
from trainer.comm.spans import Spans
from trainer.config import Config


class LocalRows:
  """All rows are this process's own.

  Args:
    store: the rows (trainer.embedding.stores).
    cfg: the job's config.

  Attributes:
    routed: the TensorSpecs of what `route` returns; () where keys need not travel.
  """

  routed: Any = ()

  def __init__(self, store: RowStore, cfg: Config):
    self._store = store
    self._scales_by_feature = cfg.sparse.gradient_scale == 'feature'

  def route(self, deduped: Deduped, weight: tf.Tensor) -> Any:
    """Sends keys to their owners where there are several, and the weight of samples to all ranks.

    It reads no rows, so that it may happen a batch ahead.

    Args:
      deduped: of this process's samples.
      weight: float32 [B], theirs; of several tasks [B, T], as of each label.
    Returns:
      What `totals` and `pull` want of it.
    """
    del deduped, weight
    return ()

  def totals(self, weight: tf.Tensor, routed: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the weight of all ranks' samples, and how many samples lower ranks have.

    Args:
      weight: as for `route`.
      routed: what it returned.
    Returns:
      float32 [] or [T], int64 [].
    """
    del routed
    return tf.reduce_sum(weight, 0), tf.zeros([], tf.int64)

  def pull(self, deduped: Deduped, routed: Any, train: bool) -> Any:
    """Reads rows; changes nothing.

    Args:
      deduped: of this process's samples.
      routed: what `route` returned for them.
      train: whether features that are new read the factors they will start with (admission none);
        else they read 0.
    Returns:
      The rows of the unique keys: `linear`, `factors` and `offsets` as of ops.row_store.Rows.
    """
    del routed
    return self._store.pull(deduped.unique, train)

  def push(
    self,
    deduped: Deduped,
    rows: Any,
    linear_gradient: tf.Tensor,
    factors_gradient: tf.Tensor,
    scale: tf.Tensor,
    hyper: tf.Tensor,
    step: tf.Tensor,
  ) -> None:
    """Updates rows, then counts shows and clicks and admits.

    Args:
      deduped: of this process's samples.
      rows: what `pull` returned for them.
      linear_gradient: float32 [u], summed over this process's samples.
      factors_gradient: float32, flat as rows.factors, likewise.
      scale: float32 [], one over the global weight.
      hyper: float32 [T, 2, H], of ops.row_optimizers.hyper.
      step: int64 [], counted from 1.
    """
    self._push_own(deduped, rows, linear_gradient, factors_gradient, scale, hyper, step)

  def _push_own(
    self,
    deduped: Deduped,
    rows: Rows,
    linear_gradient: tf.Tensor,
    factors_gradient: tf.Tensor,
    scale: tf.Tensor,
    hyper: tf.Tensor,
    step: tf.Tensor,
  ) -> None:
    if self._scales_by_feature:
      # A rare feature's step does not shrink as the batch, or the number of ranks, grows.
      scale = 1 / tf.maximum(deduped.shows, 1)
    else:
      scale = tf.reshape(scale, [1])
    self._store.push(
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
  """Where the keys of this rank went, and which came here."""

  sent: tf.Tensor  # int32 [N], keys that went to each owner
  received: tf.Tensor  # int32 [N], keys that came from each rank
  owned: Deduped  # of all keys that came here
  weights: tf.Tensor  # float32 [N] or [N, T], of each rank's samples
  samples: tf.Tensor  # int64 [N], how many each rank has


class ShardedPull(NamedTuple):
  """Rows of this rank's unique keys, and what the way back to their owners needs."""

  linear: tf.Tensor  # float32 [u]
  factors: tf.Tensor  # float32 [offsets[u]]
  offsets: tf.Tensor  # int32 [u + 1]
  routed: Routed
  owned: Rows  # of routed.owned


class ShardedRows(LocalRows):
  """Rows are sharded over N ranks by the hash of their key.

  A step takes four all-to-alls: keys, the weights of samples, rows, and gradients.

  Keys with their shows and clicks go to their owners, rows come back, and gradients go to the
  owners, who sum them. What travels is one entry for each key that is unique on a rank. A feature
  that has no factors yet costs no factors.

  Args:
    store: the rows that this rank owns.
    communicator: of the ranks.
    cfg: the job's config.
    spans: is told how long a step waits for rows and gradients; keys travel beside other work.
  """

  def __init__(self, store: RowStore, communicator: RankCommunicator, cfg: Config, spans: Spans):
    super().__init__(store, cfg)
    self._spans = spans
    # Three exchanges: the next batch's keys may travel before or after this batch's rows.
    self._keys = communicator.row_exchange('keys')
    self._rows = communicator.row_exchange('rows')
    self._gradients = communicator.row_exchange('gradients')
    self._rank, self._size = communicator.rank, communicator.size
    self._dtype = tf.as_dtype(cfg.sparse.exchange_dtype)
    tasks = len(cfg.labels)
    self.routed = Routed(
      sent=tf.TensorSpec([None], tf.int32),
      received=tf.TensorSpec([None], tf.int32),
      owned=DEDUPED_SPEC,
      weights=tf.TensorSpec([None] if tasks == 1 else [None, tasks]),
      samples=tf.TensorSpec([None], tf.int64),
    )

  def route(self, deduped: Deduped, weight: tf.Tensor) -> Routed:
    # Owners hold contiguous ranges of shards and keys are grouped by shard, so counts say it all.
    sent = sharding.owner_counts(deduped.unique, self._size)
    (keys, shows, clicks), received = self._keys.all_to_all(
      [deduped.unique, deduped.shows, deduped.clicks], sent
    )
    own = tf.reduce_sum(weight, 0), tf.shape(weight, tf.int64)[0]
    (weights, samples), _ = self._keys.all_to_all(
      [tf.broadcast_to(x, [self._size, *x.shape]) for x in own], tf.ones([self._size], tf.int32)
    )
    return Routed(sent, received, dedupe(keys, shows, clicks), weights, samples)

  def totals(self, weight: tf.Tensor, routed: Routed) -> tuple[tf.Tensor, tf.Tensor]:
    del weight
    return tf.reduce_sum(routed.weights, 0), tf.reduce_sum(routed.samples[: self._rank])

  def pull(self, deduped: Deduped, routed: Routed, train: bool) -> ShardedPull:
    owned = self._store.pull(routed.owned.unique, train)
    buffer, splits = packing.pack_rows(owned, routed.owned.inverse, routed.received, self._dtype)
    (buffer,), _ = self._spans.timed(lambda: self._rows.all_to_all([buffer], splits), [buffer])
    widths = [t.width for t in self._store.tables]
    linear, factors, offsets = packing.unpack_rows(
      buffer, routed.sent, deduped.unique, self._store.slot_table, widths
    )
    return ShardedPull(linear, factors, offsets, routed, owned)

  def push(
    self,
    deduped: Deduped,
    rows: ShardedPull,
    linear_gradient: tf.Tensor,
    factors_gradient: tf.Tensor,
    scale: tf.Tensor,
    hyper: tf.Tensor,
    step: tf.Tensor,
  ) -> None:
    routed = rows.routed
    buffer, splits = packing.pack_gradients(
      linear_gradient, factors_gradient, rows.offsets, routed.sent, self._dtype
    )
    (buffer,), _ = self._spans.timed(lambda: self._gradients.all_to_all([buffer], splits), [buffer])
    linear, factors = packing.sum_gradients(
      buffer, routed.received, rows.owned.offsets, routed.owned
    )
    self._push_own(routed.owned, rows.owned, linear, factors, scale, hyper, step)


def rows_of(store: RowStore, communicator: Communicator, cfg: Config, spans: Spans) -> LocalRows:
  """Returns how this process reaches rows: alone, or as one of N ranks."""
  if communicator.size == 1:
    return LocalRows(store, cfg)
  return ShardedRows(store, communicator, cfg, spans)
