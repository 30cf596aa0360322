"""Losses that compare a query's positive item with negatives, which all samples share.

Shapes: B samples, C negatives.
"""

from collections.abc import Callable

import tensorflow as tf

NEVER = -1e30  # the logit of an item that is left out

# (logits of the positives [B], logits of the negatives [B, C]) -> losses [B]
RankingLoss = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


def softmax(positive: tf.Tensor, negatives: tf.Tensor) -> tf.Tensor:
  """Softmax cross-entropy: −log p, with p the softmax of the positive among all logits.

  Its gradient is (1 − p)·∇(log Σ e^negative − positive). If the positive's logit is not corrected
  for sampling, this is the corrected estimator of Khrylchenko et al. 2025, "Correcting the LogQ
  Correction" (arXiv 2507.09331): only the negatives estimate the sum over all other items.
  """
  return tf.nn.softplus(tf.reduce_logsumexp(negatives, 1) - positive)


def bpr(positive: tf.Tensor, negatives: tf.Tensor) -> tf.Tensor:
  """Pairwise loss: the mean over the negatives of −log σ(positive − negative).

  Rendle et al. 2009, "BPR: Bayesian Personalized Ranking from Implicit Feedback".
  """
  return tf.reduce_mean(tf.nn.softplus(negatives - positive[:, None]), 1)


def nce(positive: tf.Tensor, negatives: tf.Tensor) -> tf.Tensor:
  """The sum of the log losses of the positive as 1 and of each negative as 0.

  With logits lowered by the log of the expected counts (logq), this is noise-contrastive estimation
  (Gutmann and Hyvärinen 2010); without, it is the negative sampling of word2vec.
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
  """Finds accidental hits: negatives that the same user has as a positive in this step.

  Args:
    users: int64 [B], the users of this process's samples.
    all_users: int64 [G], the users of all processes' samples.
    all_items: int64 [G], the positives of all processes' samples.
    negatives: int64 [C], items.
  Returns:
    int64 [n, 2]: index of the sample, index of the negative.
  """
  # Pairs (any sample, negative) with the same item; then this process's samples of the same user.
  pairs = tf.where(tf.equal(all_items[:, None], negatives))
  mine = tf.where(tf.equal(all_users[:, None], users))
  samples = tf.RaggedTensor.from_value_rowids(
    mine[:, 1], mine[:, 0], tf.size(all_users, tf.int64), validate=False
  )
  hits = tf.gather(samples, pairs[:, 0])
  return tf.stack([hits.values, tf.repeat(pairs[:, 1], hits.row_lengths())], 1)
