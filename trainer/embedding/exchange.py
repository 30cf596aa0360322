"""Reads and updates rows: this process's rows directly, other ranks' rows by all-to-all."""

from typing import Any, NamedTuple

import tensorflow as tf

from ops import packing, sharding
from ops.dedupe import DEDUPED_SPEC, Deduped, dedupe
from ops.row_store import PulledRows, RowStore
from trainer.comm.communicator import Communicator, RankCommunicator
from trainer.comm.spans import Spans
from trainer.embedding.row_table import counts_of
from trainer.runtime import HOST


class Routed(NamedTuple):
  """The keys that one of N ranks has sent to their owners, and those that it owns and received."""

  sent: tf.Tensor  # int32 [N], how many keys went to each owner
  received: tf.Tensor  # int32 [N], how many keys came from each rank
  owned: Deduped  # the distinct ones among the received keys
  weights: tf.Tensor  # float32 [N] or [N, T], the summed weight of each rank's samples
  samples: tf.Tensor  # int64 [N], the number of samples of each rank


class ShardedPull(NamedTuple):
  """The rows of this rank's unique keys, and what `push` needs to send gradients to the owners."""

  linear: tf.Tensor  # float32 [u]
  factors: tf.Tensor  # float32 [offsets[u]]
  offsets: tf.Tensor  # int32 [u + 1]; key j has factors[offsets[j]:offsets[j + 1]]
  routed: Routed
  owned: PulledRows  # the rows of routed.owned, which this rank owns
  show_click: tf.Tensor | tuple[()]  # float32 [u, 2], if a slot has `counts`


Routing = Routed | tuple[()]


def gradient_scale(kind: str, scale: tf.Tensor, shows: tf.Tensor) -> tf.Tensor:
  """Returns the factor of the gradients of rows, float32 [1] or [u] (sparse.gradient_scale).

  With 'batch', it is `scale`, 1 / the weight of the step's samples. With 'feature', it is 1 / the
  feature's shows, float32 [u], in the step: a rare feature's steps do not shrink as the batch
  grows.
  """
  return 1 / tf.maximum(shows, 1) if kind == 'feature' else tf.reshape(scale, [1])


class LocalRows:
  """Reads and updates the rows of the store in this process; `ShardedRows` extends it to N ranks.

  `by` is `sparse.gradient_scale`; with `reads_counts`, `pull` also returns shows and clicks.
  """

  routed: Routing = ()  # the TensorSpecs of the result of `route`; () with one process
  # Whether the last push changed nothing, because a sum of gradients over ranks was not finite. The
  # rank that owns the row alone knows it, and must tell the others. (With one process, the push
  # raises an OutOfRangeError.)
  overflowed: tf.Variable | None = None

  def __init__(self, store: RowStore, by: str = 'batch', reads_counts: bool = False):
    self._store, self._by, self._reads_counts = store, by, reads_counts

  def route(self, deduped: Deduped, weight: tf.Tensor) -> Routing:
    """Sends the keys of a batch to their owners, and the weight of its samples to all ranks.

    Every rank calls it, even without samples; `weight` is float32 [B], or [B, T] with several
    tasks. It reads no rows, so it can run while the previous batch is still training.
    """
    return ()

  def weight_and_samples(
    self, weight: tf.Tensor, routed: Routing
  ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns the weight of all ranks' samples, the number on lower ranks, and that on all ranks.

    `weight`, of this rank's samples, is float32 [B] or, with T tasks, [B, T]; the returned weight
    is [] or [T]. The numbers are int64 [].
    """
    return tf.reduce_sum(weight, 0), tf.zeros([], tf.int64), tf.shape(weight, tf.int64)[0]

  def pull(self, deduped: Deduped, routed: Routing, train: bool) -> PulledRows | ShardedPull:
    """Reads the rows of the unique keys without changing them; every rank calls it.

    New features have initial factors if `train` and admission is 'none'; else they have none.
    """
    return self._pull(deduped.unique, train)

  def _pull(self, keys: tf.Tensor, train: bool) -> PulledRows:
    """Reads rows from this process's store, with shows and clicks if a slot has `counts`."""
    rows = self._store.pull(keys, train)
    return rows._replace(show_click=counts_of(self._store, keys)) if self._reads_counts else rows

  def push(
    self,
    deduped: Deduped,
    rows: PulledRows | ShardedPull,
    linear_gradient: tf.Tensor,
    factors_gradient: tf.Tensor,
    scale: tf.Tensor,
    hyper: tf.Tensor,
    step: tf.Tensor,
  ) -> None:
    """Updates rows, adds shows and clicks to features, and admits features; every rank calls it.

    `rows` is the result of `pull` for these keys. Gradients, laid out as `rows.linear` and
    `rows.factors`, are sums over this process's samples. `scale` is 1 / the weight of all ranks'
    samples, `hyper` the result of ops.row_optimizers.hyper, `step` the number of this step, from 1.
    """
    scale = gradient_scale(self._by, scale, deduped.shows)
    gradients = linear_gradient, factors_gradient
    self._store.push(
      deduped.unique, rows, deduped.shows, deduped.clicks, *gradients, scale, hyper, step
    )


class ShardedRows(LocalRows):
  """Reads and updates rows on N ranks, each of which owns the keys that hash to it.

  A step takes four all-to-alls: keys with their shows and clicks go to the keys' owners, weights of
  samples to all ranks, rows come back, and gradients go to the owners, which sum them. Each unique
  key of a rank travels once, and only admitted features have factors to send. Rows and gradients
  travel in `dtype`; a sample has one weight for each of the `tasks`.
  """

  def __init__(
    self,
    store: RowStore,
    by: str = 'batch',
    reads_counts: bool = False,
    *,
    communicator: RankCommunicator,
    dtype: str = 'float32',
    tasks: int = 1,
    spans: Spans | None = None,
  ):
    super().__init__(store, by, reads_counts)
    self._timed = spans.timed if spans else lambda exchange, inputs: exchange()
    # Three exchanges, because the next batch's keys may travel before or after this batch's rows.
    self._keys = communicator.row_exchange('keys')
    self._rows = communicator.row_exchange('rows')
    self._gradients = communicator.row_exchange('gradients')
    if self._reads_counts:
      self._counts = communicator.row_exchange('counts')
    self._rank, self._size = communicator.rank, communicator.size
    with tf.device(HOST):
      self.overflowed = tf.Variable(False, trainable=False)
    self._dtype = tf.as_dtype(dtype)
    self.routed = Routed(
      sent=tf.TensorSpec([None], tf.int32),
      received=tf.TensorSpec([None], tf.int32),
      owned=DEDUPED_SPEC,
      weights=tf.TensorSpec([None] if tasks == 1 else [None, tasks]),
      samples=tf.TensorSpec([None], tf.int64),
    )

  def route(self, deduped: Deduped, weight: tf.Tensor) -> Routed:
    # Keys are grouped by shard, and an owner's shards are consecutive. So each owner's keys lie
    # together, and their number says where they end.
    sent = sharding.owner_counts(deduped.unique, self._size)
    (keys, shows, clicks), received = self._keys.all_to_all(
      [deduped.unique, deduped.shows, deduped.clicks], sent
    )
    own = tf.reduce_sum(weight, 0), tf.shape(weight, tf.int64)[0]
    (weights, samples), _ = self._keys.all_to_all(
      [tf.broadcast_to(x, [self._size, *x.shape]) for x in own], tf.ones([self._size], tf.int32)
    )
    return Routed(sent, received, dedupe(keys, shows, clicks), weights, samples)

  def weight_and_samples(
    self, weight: tf.Tensor, routed: Routed
  ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    lower = tf.reduce_sum(routed.samples[: self._rank])
    return tf.reduce_sum(routed.weights, 0), lower, tf.reduce_sum(routed.samples)

  def pull(self, deduped: Deduped, routed: Routed, train: bool) -> ShardedPull:
    owned = self._pull(routed.owned.unique, train)
    buffer, splits = packing.pack_rows(owned, routed.owned.inverse, routed.received, self._dtype)
    (buffer,), _ = self._timed(lambda: self._rows.all_to_all([buffer], splits), [buffer])
    widths = [t.width for t in self._store.tables]
    linear, factors, offsets = packing.unpack_rows(
      buffer, routed.sent, deduped.unique, self._store.slot_table, widths
    )
    show_click: tf.Tensor | tuple[()] = ()
    if self._reads_counts:
      answers = tf.unstack(tf.gather(owned.show_click, routed.owned.inverse), 2, 1)
      exchange = lambda: self._counts.all_to_all(answers, routed.received)
      show_click = tf.stack(self._timed(exchange, answers)[0], 1)
    return ShardedPull(linear, factors, offsets, routed, owned, show_click)

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
    (buffer,), _ = self._timed(lambda: self._gradients.all_to_all([buffer], splits), [buffer])
    linear, factors = packing.sum_gradients(
      buffer, routed.received, rows.owned.offsets, routed.owned
    )
    is_finite = tf.math.is_finite(tf.reduce_sum(linear) + tf.reduce_sum(factors))
    self.overflowed.assign(~is_finite)
    linear, factors = (tf.where(is_finite, g, tf.zeros_like(g)) for g in (linear, factors))
    super().push(routed.owned, rows.owned, linear, factors, scale, hyper, step)


def rows_of(
  store: RowStore,
  communicator: Communicator,
  by: str = 'batch',
  reads_counts: bool = False,
  **between_ranks: Any,
) -> LocalRows:
  """Returns LocalRows for a single process, ShardedRows(…, **between_ranks) for one of N ranks."""
  if communicator.size == 1:
    return LocalRows(store, by, reads_counts)
  return ShardedRows(store, by, reads_counts, communicator=communicator, **between_ranks)
