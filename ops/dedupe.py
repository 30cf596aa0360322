"""Finds the distinct keys of a batch."""

from typing import NamedTuple

import tensorflow as tf

from ops.library import TensorLike, load


class Deduped(NamedTuple):
  """The u distinct keys among n occurrences, ordered by logical shard, then by first occurrence."""

  unique: tf.Tensor  # int64 [u]
  inverse: tf.Tensor  # int32 [n]: for each occurrence, the place of its key in `unique`
  shows: tf.Tensor  # float32 [u], summed over occurrences
  clicks: tf.Tensor  # float32 [u], likewise
  # int32 [u + 1] and int32 [n]: the occurrences of unique key j are
  # order[starts[j]:starts[j + 1]], ascending.
  starts: tf.Tensor
  order: tf.Tensor


DEDUPED_SPEC = Deduped(
  *(tf.TensorSpec([None], t) for t in (tf.int64, tf.int32, tf.float32, tf.float32)),
  *(tf.TensorSpec([None], tf.int32) for _ in range(2)),
)


def dedupe(
  keys: TensorLike,
  shows: TensorLike = (1.0,),
  clicks: TensorLike = (0.0,),
  segments: TensorLike = (),
  slots: int = 0,
) -> Deduped:
  """Finds the distinct keys of a batch, int64 [n], and sums the shows and clicks of each.

  Args:
    shows: float32 [n], or [1] for one number that holds for all keys.
    clicks: as shows; with `slots`, [B], one number for all keys of each sample.
    segments: int32 [n], as in `ops.pooling.pool`; read only with `slots`.
    slots: the number of slots F, if `clicks` has a number for each sample; else 0.
  """
  return Deduped(
    *load().ctr_dedupe(keys=keys, shows=shows, clicks=clicks, segments=segments, fields=slots)
  )
