"""Metrics with the influence of each sample, from which confidence intervals are computed.

A sample's influence is how far it moves a metric from its expectation. The metric's variance is the
sum of the squared influences. For a difference of two metrics on the same samples, influences are
subtracted.
"""

from typing import NamedTuple

import numpy as np

LEAST_OF_A_CLASS = 10  # samples of a class; with fewer, the intervals of AUC are too narrow


class Measured(NamedTuple):
  """A metric, and how far each of the n samples moves it from its expectation, float64 [n]."""

  value: float
  influence: np.ndarray


def auc(labels: np.ndarray, probabilities: np.ndarray, weights: np.ndarray) -> Measured | None:
  """Returns the AUC with the influences of DeLong et al. 1988.

  All arguments are float [n]; the labels are 0 or 1, and the weights above 0. The result is None if
  a class has fewer than LEAST_OF_A_CLASS samples.
  """
  clicked = labels > 0.5
  classes = np.where(clicked, weights, 0), np.where(clicked, 0, weights)
  # The effective numbers of samples of unequal weights (Kish 1965).
  counts = [c.sum() ** 2 / max(c @ c, 1e-300) for c in classes]
  if min(counts) < LEAST_OF_A_CLASS:
    return None
  distinct, place = np.unique(probabilities, return_inverse=True)

  def share_below(weight: np.ndarray) -> np.ndarray:
    """Returns the share of a class's `weight` (0 for others) predicted lower; equal counts half."""
    sums = np.bincount(place, weight, len(distinct)) / weight.sum()
    return (np.cumsum(sums) - sums / 2)[place]

  won = np.where(clicked, share_below(classes[1]), 1 - share_below(classes[0]))
  value = float(classes[0] @ won / classes[0].sum())
  scale = [c / c.sum() * np.sqrt(n / (n - 1)) for c, n in zip(classes, counts)]
  return Measured(value, (won - value) * np.where(clicked, *scale))


def logloss(labels: np.ndarray, probabilities: np.ndarray, weights: np.ndarray) -> Measured | None:
  """Returns the log loss; None without samples. Labels are 0 or 1, weights above 0, all [n]."""
  inside = np.clip(probabilities, 1e-15, 1 - 2.0**-25)
  return mean(-labels * np.log(inside) - (1 - labels) * np.log1p(-inside), weights)


def rmse(labels: np.ndarray, predictions: np.ndarray, weights: np.ndarray) -> Measured | None:
  """Returns the root of the mean squared error; None without samples. Weights are above 0."""
  square = mean(np.square(predictions - labels), weights)
  if square is None:
    return None
  root = float(np.sqrt(square.value))
  return Measured(root, square.influence / max(2 * root, 1e-300))


def mean(values: np.ndarray, weights: np.ndarray) -> Measured | None:
  """Returns the weighted mean; None without samples. Weights are above 0."""
  if not len(values):
    return None
  share = weights / weights.sum()
  value = float(share @ values)
  return Measured(value, share * (values - value))
