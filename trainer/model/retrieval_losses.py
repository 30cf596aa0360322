"""Losses that compare a query's positive item with negatives that all samples share.

Shapes: B samples, C negatives.
"""

from collections.abc import Callable

import tensorflow as tf

NEVER = -1e30  # a logit whose item takes no part

# (logits of the positives [B], logits of the negatives [B, C]) -> losses [B]
RankingLoss = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


def softmax(positive: tf.Tensor, negatives: tf.Tensor) -> tf.Tensor:
  """−log of the positive's share of e^logit among itself and the negatives.

  Its gradient is (1 − p)·∇(log Σ_negatives − positive) with p that share, so that what stands for
  all other items is the sum over the negatives alone, as in Khrylchenko et al. 2025, "Correcting
  the LogQ Correction" (arXiv 2507.09331), wherever the positive's logit is not corrected.
  """
  return tf.nn.softplus(tf.reduce_logsumexp(negatives, 1) - positive)


def bpr(positive: tf.Tensor, negatives: tf.Tensor) -> tf.Tensor:
  """The mean of −log σ(positive − negative) over the negatives.

  Rendle et al. 2009, "BPR: Bayesian Personalized Ranking from Implicit Feedback".
  """
  return tf.reduce_mean(tf.nn.softplus(negatives - positive[:, None]), 1)


def nce(positive: tf.Tensor, negatives: tf.Tensor) -> tf.Tensor:
  """Log loss of the positive as 1 and of each negative as 0, summed.

  Gutmann and Hyvärinen 2010, "Noise-contrastive estimation", with logits that are lowered by the
  log of the expected counts; without that, it is negative sampling as in word2vec.
  """
  return tf.nn.softplus(-positive) + tf.reduce_sum(tf.nn.softplus(negatives), 1)


LOSSES: dict[str, RankingLoss] = {
  'sampled_softmax': softmax,
  'in_batch_softmax': softmax,
  'bpr': bpr,
  'nce': nce,
}


def own_positives(
  users: tf.Tensor, all_users: tf.Tensor, all_items: tf.Tensor, negatives: tf.Tensor
) -> tf.Tensor:
  """Finds the negatives that are a positive of the same user in the step: accidental hits.

  Args:
    users: int64 [B], of this process's samples.
    all_users: int64 [G], of the samples of all processes.
    all_items: int64 [G], their positives.
    negatives: int64 [C], items.
  Returns:
    int64 [n, 2]: places (sample, negative).
  """
  # (a sample of all, a negative) that are of one item, and the samples here of each one's user.
  pairs = tf.where(tf.equal(all_items[:, None], negatives))
  mine = tf.where(tf.equal(all_users[:, None], users))
  samples = tf.RaggedTensor.from_value_rowids(
    mine[:, 1], mine[:, 0], tf.size(all_users, tf.int64), validate=False
  )
  found = tf.gather(samples, pairs[:, 0])
  return tf.stack([found.values, tf.repeat(pairs[:, 1], found.row_lengths())], 1)
