"""Streaming metrics whose state adds up: over steps, over ranks, over files."""

import numpy as np
import tensorflow as tf

# Buckets share the logits evenly within an octave of |logit|: fine wherever predictions crowd, near
# 0 or far below it.
_LEAST_EXPONENT, _OCTAVES = (
  -20,
  25,
)  # |logit| from 2^-20 to 2^5; what lies outside goes to the nearest
_LEAST_BITS = (
  127 + _LEAST_EXPONENT
) << 23  # of 2^-20 as float32; bits of positive floats grow as they do
_BITS = _OCTAVES << 23


def _bucket(logits, buckets):
  """float32 [B] -> int32 [B] in [0, buckets), not falling as the logit grows."""
  half = buckets // 2
  bits = tf.bitcast(tf.abs(logits), tf.int32)
  share = tf.cast(tf.clip_by_value(bits - _LEAST_BITS, 0, _BITS - 1), tf.float64) / _BITS
  place = tf.cast(share * half, tf.int32)
  return tf.where(logits < 0, half - 1 - place, half + place)


class Metrics:
  """Sums over the samples seen since the last `reset`; `update` works inside a tf.function.

  For clicks a state holds `histogram` float64 [2, buckets], the weight of negatives and of
  positives by predicted probability, and
  `sums` float64 [5]: weight, samples, Σ weight·log loss, Σ weight·predicted, Σ weight·clicked. For
  squared error it holds
  `errors` float64 [3]: weight, samples, Σ weight·error².
  """

  def __init__(self, cfg):
    self._regression = cfg.model.loss == 'squared_error'
    self._buckets = max(2, cfg.metrics.auc_buckets // 2 * 2)
    shapes = {'errors': [3]} if self._regression else {'histogram': [2, self._buckets], 'sums': [5]}
    with tf.device('CPU:0'):
      self._state = {
        name: tf.Variable(tf.zeros(shape, tf.float64), trainable=False, name=f'metrics_{name}')
        for name, shape in shapes.items()
      }

  def update(self, labels, probabilities, weights):
    """Adds a batch.

    Args:
      labels, probabilities, weights: float32 [B]; what a model of squared error predicts stands in
        for a probability.
    """
    y, p, w = (tf.cast(t, tf.float64) for t in (labels, probabilities, weights))
    totals = [tf.reduce_sum(w), tf.cast(tf.size(labels), tf.float64)]
    if self._regression:
      self._state['errors'].assign_add(tf.stack([*totals, tf.reduce_sum(w * tf.square(p - y))]))
      return
    # float32 rounds what lies within 2^-25 of 1 to 1.
    inside = tf.clip_by_value(p, 1e-15, 1 - 2.0**-25)
    of_click, of_none = tf.math.log(inside), tf.math.log1p(-inside)
    row, bucket = (
      tf.cast(labels > 0.5, tf.int32),
      _bucket(tf.cast(of_click - of_none, tf.float32), self._buckets),
    )
    self._state['histogram'].scatter_nd_add(tf.stack([row, bucket], 1), w)
    loss = -y * of_click - (1 - y) * of_none
    self._state['sums'].assign_add(
      tf.stack([*totals, *(tf.reduce_sum(w * t) for t in (loss, p, y))])
    )

  def state(self):
    """dict of NumPy arrays; the sum of two states is the state of both."""
    return {name: v.numpy() for name, v in self._state.items()}

  def load(self, state):
    for name, variable in self._state.items():
      variable.assign(state[name])

  def reset(self):
    for variable in self._state.values():
      variable.assign(tf.zeros_like(variable))


def _ratio(a, b):
  return float(a / b) if b > 0 else None


def result(state):
  """What a state (or a sum of states) says: dict auc, logloss, calibration, examples; for squared
  error rmse, examples.

  Calibration is Σ predicted / Σ clicked. A figure that the samples do not define (AUC of one class,
  …) is None.
  """
  if 'errors' in state:
    weight, examples, squares = state['errors']
    return {
      'rmse': float(np.sqrt(squares / weight)) if weight > 0 else None,
      'examples': int(examples),
    }
  negatives, positives = state['histogram']
  weight, examples, loss, predicted, clicked = state['sums']
  # A pair within one bucket counts half.
  below = np.cumsum(negatives) - 0.5 * negatives
  return {
    'auc': _ratio(positives @ below, positives.sum() * negatives.sum()),
    'logloss': _ratio(loss, weight),
    'calibration': _ratio(predicted, clicked),
    'examples': int(examples),
  }


def group_auc_sums(labels, probabilities, groups, weights):
  """Sums of GAUC, the mean of the groups' own AUC weighted by impressions.

  Zhu et al. 2017, "Optimized Cost per Click in Taobao Display Advertising".
  Groups with one class only have no AUC and are left out. Sums of disjoint sets of groups add up.

  Args:
    labels, probabilities, weights: float [n].
    groups: int64 [n].
  Returns: (Σ_g weight_g · AUC_g, Σ_g weight_g), weight_g being the sum of the group's weights: its
    impressions where all weigh 1.
  """
  n = len(labels)
  if not n:
    return 0.0, 0.0
  order = np.lexsort((probabilities, groups))
  g, p = np.asarray(groups)[order], np.asarray(probabilities)[order]
  w = np.asarray(weights, np.float64)[order]
  positive = np.where(np.asarray(labels)[order] > 0.5, w, 0)
  negative = w - positive
  new_group = np.concatenate([[True], g[1:] != g[:-1]])
  ties = np.flatnonzero(
    new_group | np.concatenate([[True], p[1:] != p[:-1]])
  )  # first of each run of one group and one probability
  starts = np.flatnonzero(new_group)
  tied_positive, tied_negative = np.add.reduceat(positive, ties), np.add.reduceat(negative, ties)
  group_positive, group_negative = (
    np.add.reduceat(positive, starts),
    np.add.reduceat(negative, starts),
  )
  before = np.concatenate(
    [[0.0], np.cumsum(negative)[:-1]]
  )  # negatives before each sample, over all groups
  group_of_tie = np.searchsorted(starts, ties, side='right') - 1
  won = np.add.reduceat(
    tied_positive * (before[ties] - before[starts][group_of_tie] + 0.5 * tied_negative),
    np.searchsorted(ties, starts),
  )
  both = (group_positive > 0) & (group_negative > 0)
  weight = (group_positive + group_negative)[both]
  return float(np.sum(weight * won[both] / (group_positive * group_negative)[both])), float(
    np.sum(weight)
  )
