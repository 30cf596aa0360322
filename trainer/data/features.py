"""Defines batches of samples, hashes features to keys and transforms dense columns.

Shapes: B samples, F slots, nnz features in the batch, Dn dense columns, T tasks.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from trainer.config import DenseColumn
from trainer.data.values import CANONICAL

HASH_BITS = 52
HASH_NAME = (
  'farmhash64 of the stripped text, whole numbers without a fraction of zeros, booleans in lower '
  'case, mod 2^52'
)


class SlotBatch(NamedTuple):
  """A batch of B samples, as NumPy arrays or as tensors; B may be 0.

  If, as most often, every slot of every sample holds exactly one feature of value 1, `values` and
  `segments` are empty, and `keys` has the F keys of each sample side by side. Where no sample has a
  feature, all three are empty.
  """

  keys: np.ndarray  # int64 [nnz]
  values: np.ndarray  # float32 [nnz] x_i, or [0]
  segments: np.ndarray  # int32 [nnz] sample·F + slot, ascending, or [0]
  dense: np.ndarray  # float32 [B, Dn], NaN where missing
  label: np.ndarray  # float32 [B]; of several tasks [B, T], NaN where blank
  weight: np.ndarray  # float32 [B]; 1 if the log has none
  group: np.ndarray  # int64 [B]; 0 if the log has none
  # Only in training steps of model.retrieval, where C candidates follow the B samples. A candidate
  # has an item, but no label, weight or group.
  item: np.ndarray = np.zeros([0], np.int64)  # int64 [B + C]: keys of the items, −1 where blank
  log_share: np.ndarray = np.zeros([0], np.float32)  # float32 [B + C]: log P(the item is drawn)
  # int64 [n, 2]: pairs of a sample and a candidate that is a positive of the sample's user, which
  # the loss leaves out. Filled only with `model.retrieval.own_positives: pass`.
  left_out: np.ndarray = np.zeros([0, 2], np.int64)


def empty_batch(num_dense: int, num_tasks: int = 1) -> SlotBatch:
  """Returns a batch of 0 samples. With it, a rank that has no data left takes part in a step."""
  f, i = np.zeros([0], np.float32), np.zeros([0], np.int64)
  label = np.zeros([0, num_tasks], np.float32) if num_tasks > 1 else f
  return SlotBatch(i, f, np.zeros([0], np.int32), np.zeros([0, num_dense], np.float32), label, f, i)


def sole_features(batch: SlotBatch, slot: int, slots: int) -> np.ndarray:
  """Returns the keys of a slot that has at most one feature a sample, int64 [B], −1 where blank.

  `slot` is an index in `Config.ordered_slots`, which has `slots`; the batch holds NumPy arrays.
  """
  if len(batch.keys) and not len(batch.segments):
    return batch.keys.reshape(-1, slots)[:, slot]
  keys = np.full([len(batch.dense)], -1, np.int64)
  own = batch.segments % slots == slot
  keys[batch.segments[own] // slots] = batch.keys[own]
  return keys


def weigh_labels(batch: SlotBatch) -> SlotBatch:
  """Returns a batch in which each label has its own weight; blank labels get weight and value 0.

  `weight` becomes float32 [B, T]; a batch with one task is returned as it is. Arrays are NumPy's.
  """
  if batch.label.ndim == 1:
    return batch
  blank = np.isnan(batch.label)
  return batch._replace(
    label=np.where(blank, np.float32(0), batch.label),
    weight=np.where(blank, np.float32(0), batch.weight[:, None]),
  )


def canonical(texts: tf.Tensor) -> tf.Tensor:
  """Returns texts as they are hashed: stripped, and 12.0 as 12, True as true."""
  texts = tf.strings.strip(texts)
  for pattern, replacement in CANONICAL:
    texts = tf.strings.regex_replace(texts, pattern, replacement)
  return texts


def hash_keys(texts: tf.Tensor, slot_id: int | tf.Tensor) -> tf.Tensor:
  """Returns the keys of features: `slot_id << 52 | farmhash64(canonical(text)) mod 2^52`.

  A SavedModel computes them by the same ops. No text is blank; integers are hashed as decimal text.
  `slot_id`, of `Config.slot_ids()`, may be an int64 tensor that broadcasts against `texts`.
  """
  texts = tf.convert_to_tensor(texts)
  if texts.dtype.is_integer:
    texts = tf.strings.as_string(texts)
  hashed = tf.strings.to_hash_bucket_fast(canonical(texts), 1 << HASH_BITS)
  bits = tf.constant(HASH_BITS, tf.int64)
  return tf.bitwise.left_shift(tf.cast(slot_id, tf.int64), bits) + hashed


def has_log1p(column: DenseColumn) -> bool:
  return column.transform in ('log1p', 'log1p_standardise')


def dense_stats(
  columns: Sequence[DenseColumn],
  measured: Mapping[str, Sequence[float]],
  click_rate: float | None = None,
  bound: float = 0.0,
) -> np.ndarray:
  """Returns what `transform_dense` reads, float32 [3, Dn]: a mean, deviation and bound a column.

  A column that is not standardised has mean 0 and deviation 1; a constant column has deviation 1.

  Args:
    measured: {column: [count, mean, Σ (x − mean)²]} of its values x that are not missing, after
      log1p if the transform has it.
    click_rate: clicks of a sample, if a slot has `counts`. A column is then added behind the
      others: the log-odds of this rate, 1 and 0.
    bound: how far from 0 a standardised value may be; 0 for no bound.
  """
  stats = np.zeros([3, len(columns)], np.float32)
  stats[1] = 1
  for i, column in enumerate(columns):
    if 'standardise' not in column.transform:
      continue
    count, mean, m2 = measured[column.name]
    std = np.sqrt(m2 / count) if count else 0
    stats[:, i] = mean, std if std > 0 else 1, bound
  if click_rate is None:
    return stats
  rate = np.clip(click_rate, 1e-6, 1 - 1e-6)
  return np.column_stack([stats, np.float32([np.log(rate / (1 - rate)), 1, 0])])


# A feature's counts begin as if it had this many impressions at the click rate of the log.
COUNT_SMOOTHING = 10.0


def transform_counts(seen: tf.Tensor, log_odds: tf.Tensor) -> tf.Tensor:
  """Converts shows and clicks of features to dense inputs, for slots with `counts` in the config.

  For s shows (impressions) and c clicks of a slot, summed over its features (`seen`, float32 [B,
  Fc, 2]), the click rate a of the log and k = COUNT_SMOOTHING, its two inputs are

      s / (s + k),  log((c + k·a) / (s − c + k·(1 − a))) − log(a / (1 − a))

  The second is the log-odds of the slot's click rate, smoothed towards a, minus `log_odds`, those
  of a. The first is the weight of the slot's own clicks in the smoothed rate. Returns float32 [B,
  2·Fc]: the first input of each of Fc slots, then the second; 0 for no shows.
  """
  shows, clicks = tf.unstack(seen, 2, -1)
  rate = tf.sigmoid(log_odds)
  # A late click is counted without a show, so there may be more clicks than shows.
  missed = tf.maximum(shows - clicks, 0) + COUNT_SMOOTHING * (1 - rate)
  odds = (clicks + COUNT_SMOOTHING * rate) / missed
  return tf.concat([shows / (shows + COUNT_SMOOTHING), tf.math.log(odds) - log_odds], 1)


def transform_dense(
  dense: tf.Tensor, columns: Sequence[DenseColumn], stats: tf.Tensor
) -> tf.Tensor:
  """Applies the transforms of dense columns, then replaces NaN by the column's `missing`.

  A transform is log1p, x → sign(x)·log(1 + |x|); or standardise, x → (x − mean) / deviation,
  clipped to [−bound, bound] if the column has a bound; or log1p followed by standardise.

  Args:
    dense: float32 [B, Dn], NaN where missing; the result is finite.
    columns: `Config.data.dense`.
    stats: float32 [3, >= Dn], a result of `dense_stats`.
  """
  dense = tf.convert_to_tensor(dense, tf.float32)
  is_missing = tf.math.is_nan(dense)
  if any(has_log1p(c) for c in columns):
    dense = tf.where(
      [has_log1p(c) for c in columns], tf.sign(dense) * tf.math.log1p(tf.abs(dense)), dense
    )
  if any('standardise' in c.transform for c in columns):
    mean, deviation, bound = tf.unstack(stats[:, : len(columns)])
    dense = (dense - mean) / deviation
    dense = tf.where(bound > 0, tf.clip_by_value(dense, -bound, bound), dense)
  missing = tf.constant([c.missing for c in columns], tf.float32)
  # Layers need the static width, and a file reader may not set it.
  return tf.ensure_shape(tf.where(is_missing, missing, dense), [None, len(columns)])


def average_lists(
  values: tf.Tensor, segments: tf.Tensor, batch_size: int | tf.Tensor, averaged: tf.Tensor
) -> tf.Tensor:
  """Divides the values in lists of another slot's features by the length of the list.

  So a list weighs as much as one feature wherever features are added up. Rendle 2010,
  "Factorization Machines", scales the other items that a user has rated in the same way. `values`
  and `segments`, of a SlotBatch, may be empty; `averaged`, bool [F], says which slots hold such
  lists (`Config.averaged`).
  """
  ones = tf.ones_like(values)
  lengths = tf.math.unsorted_segment_sum(ones, segments, batch_size * averaged.shape[0])
  is_averaged = tf.gather(averaged, segments % averaged.shape[0])
  return values / tf.where(is_averaged, tf.gather(lengths, segments), ones)


def pool_norm(
  values: tf.Tensor, segments: tf.Tensor, batch_size: int | tf.Tensor, poolings: Sequence[str]
) -> tf.Tensor | None:
  """Returns the divisors of mean and sqrt-n pooling, float32 [B, F], or None if all are 1.

  Pooling sums x_i v_i over the features of a sample's slot, where x_i is the value and v_i the
  embedding of a feature. The sum is divided by Σ x_i for 'mean' and by √(Σ x_i²) for 'sqrtn', as in
  `tf.nn.embedding_lookup_sparse`. A divisor is 1 for 'sum' and for slots without features; infinity
  in place of 0, so that the quotient is 0. All are 1 if each slot is 'sum', or the static shape of
  `segments` is [0]. `values` and `segments`, of a SlotBatch, may be empty.
  """
  if all(p == 'sum' for p in poolings) or segments.shape[0] == 0:
    return None
  num_slots = len(poolings)

  def summed(x: tf.Tensor) -> tf.Tensor:
    sums = tf.math.unsorted_segment_sum(x, segments, batch_size * num_slots)
    return tf.reshape(sums, [batch_size, num_slots])

  is_sqrtn = tf.constant([p == 'sqrtn' for p in poolings])
  squared = tf.gather(is_sqrtn, segments % num_slots)
  total, count = summed(tf.where(squared, values * values, values)), summed(tf.ones_like(values))
  total = tf.where(is_sqrtn, tf.sqrt(tf.maximum(total, 0)), total)
  total = tf.where(tf.equal(total, 0), tf.constant(np.inf, tf.float32), total)
  return tf.where(tf.logical_or([p == 'sum' for p in poolings], tf.equal(count, 0)), 1.0, total)
