"""Losses [B] of logits: each sample's positive, [B], against the C shared negatives, [B, C]."""

from collections.abc import Callable

import tensorflow as tf

NEVER = -1e30  # the logit of an item that is left out

# (logits of the positives [B], logits of the negatives [B, C]) -> losses [B]
RankingLoss = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


def softmax(positive: tf.Tensor, negatives: tf.Tensor) -> tf.Tensor:
  """Softmax cross-entropy: −log p, with p the softmax of the positive among all logits.

  Its gradient is (1 − p)·∇(log Σ e^negative − positive). For the estimator of Khrylchenko et al.
  2025, "Correcting the LogQ Correction" (arXiv 2507.09331), the caller subtracts the log of the
  sampling probability from the logits of the negatives, not of the positive, which is not sampled.
  """
  return tf.nn.softplus(_log_sum_exp(negatives) - positive)


@tf.custom_gradient
def _log_sum_exp(logits: tf.Tensor) -> tuple[tf.Tensor, Callable]:
  """Returns log Σ e^logit of each row, [B]; the gradient reuses the e^logit, the costliest part."""
  top = tf.reduce_max(logits, 1, keepdims=True)
  powers = tf.exp(logits - top)
  total = tf.reduce_sum(powers, 1, keepdims=True)
  value = tf.squeeze(tf.math.log(total) + top, 1)
  return value, lambda gradient: powers * (gradient[:, None] / total)


def bpr(positive: tf.Tensor, negatives: tf.Tensor) -> tf.Tensor:
  """Pairwise loss: the mean over the negatives, NEVER apart, of −log σ(positive − negative).

  Rendle et al. 2009, "BPR: Bayesian Personalized Ranking from Implicit Feedback".
  """
  count = tf.reduce_sum(tf.cast(negatives > NEVER, negatives.dtype), 1)
  total = tf.reduce_sum(tf.nn.softplus(negatives - positive[:, None]), 1)
  return tf.math.divide_no_nan(total, count)


def nce(positive: tf.Tensor, negatives: tf.Tensor) -> tf.Tensor:
  """Binary loss: the log loss of the positive as label 1, plus that of each negative as label 0.

  With logits lowered by the logarithm of the expected counts (logq), this is noise-contrastive
  estimation (Gutmann and Hyvärinen 2010), else the negative sampling of word2vec.
  """
  return tf.nn.softplus(-positive) + tf.reduce_sum(tf.nn.softplus(negatives), 1)


LOSSES: dict[str, RankingLoss] = {
  'sampled_softmax': softmax,
  'in_batch_softmax': softmax,
  'bpr': bpr,
  'nce': nce,
}


@tf.custom_gradient
def leave_out(logits: tf.Tensor, hits: tf.Tensor) -> tuple[tf.Tensor, Callable]:
  """Returns the logits of negatives, [B, C], with NEVER (−1e30) at `hits`, int64 [n, 2].

  Every loss has gradient 0 where a logit is NEVER, so this function passes gradients on unchanged.
  """
  never = tf.fill([tf.shape(hits)[0]], NEVER)
  return tf.tensor_scatter_nd_update(logits, hits, never), lambda gradient: (gradient, None)


def own_positives(
  users: tf.Tensor, all_users: tf.Tensor, all_items: tf.Tensor, negatives: tf.Tensor
) -> tf.Tensor:
  """Finds accidental hits: negatives of a sample that are positives of its user in this step.

  `users`, int64 [B], are those of this process's samples; `all_users` and `all_items`, [G], are the
  users and positive items of all processes' samples; `negatives`, [C], are items. Returns int64
  [n, 2]: for each hit, the index of the sample and the index of the negative.
  """
  any_sample, negative = _equal_pairs(all_items, negatives)
  pair, sample = _equal_pairs(tf.gather(all_users, any_sample), users)
  return tf.cast(tf.stack([sample, tf.gather(negative, pair)], 1), tf.int64)


def _equal_pairs(left: tf.Tensor, right: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
  """Returns the indices i and j, int32 [n] each, of all pairs with left[i] == right[j]."""
  order = tf.argsort(right)
  ordered = tf.gather(right, order)
  first = tf.searchsorted(ordered, left)
  count = tf.searchsorted(ordered, left, side='right') - first
  i = tf.repeat(tf.range(tf.size(left)), count)
  of_its_own = tf.range(tf.size(i)) - tf.gather(tf.cumsum(count, exclusive=True), i)
  return i, tf.gather(order, tf.gather(first, i) + of_its_own)
