"""Metrics of a slice of the samples, with confidence intervals that hold for few samples too."""

import math
from collections.abc import Mapping

import numpy as np

from trainer.model.metrics import group_auc_sums
from trainer.plain_data import Json

Z = 1.959964  # 95 % of the normal distribution lie between -Z and Z
_STEPS = 50  # steps of a bisection in [0, 1]


def auc_interval(
  auc: float, positives: float, negatives: float, z: float = Z
) -> tuple[float, float]:
  """Returns the low and the high end of the confidence interval of an AUC, by default of 95 %.

  This is method 5 of Newcombe 2006, "Confidence intervals for an effect size measure based on the
  Mann-Whitney statistic": all t with |auc − t| ≤ z·√V(t), where V is the variance of Hanley and
  McNeil 1982, except that its last two terms have the mean of the two class sizes in place of
  either size. Unlike DeLong's interval, it also covers the true AUC if a slice has few clicks, or
  if all clicks are ranked first. With unequal weights, the numbers of samples are effective ones.
  """
  mean = (positives + negatives) / 2 - 1

  def variance(t: float) -> float:
    shared = 1 + mean * (1 - t) / (2 - t) + mean * t / (1 + t)
    return t * (1 - t) * max(shared, 1) / (positives * negatives)

  def end(bound: float) -> float:
    inside, outside = auc, bound
    for _ in range(_STEPS):
      middle = (inside + outside) / 2
      if abs(auc - middle) <= z * math.sqrt(variance(middle)):
        inside = middle
      else:
        outside = middle
    return outside

  return end(0.0), end(1.0)


def class_sizes(values: Mapping[str, Json]) -> tuple[float, float] | None:
  """Returns the effective numbers of samples with and without a click in an evaluation.

  None if they are unknown. Events of version 0.2 have the number of samples, of whatever weight.
  """
  ctr, examples = values.get('ctr'), values.get('examples')
  sizes = values.get('effective_clicks'), values.get('effective_others')
  if ctr is None or examples is None or ctr != ctr:  # events have NaN for a missing metric
    return None
  is_old = any(size is None or size != size for size in sizes)
  return (ctr * examples, (1 - ctr) * examples) if is_old else sizes


def auc_interval_of(values: Mapping[str, Json], z: float = Z) -> tuple[float, float] | None:
  """Returns the confidence interval of an evaluation's AUC, from its metrics.

  None if they are missing, None or NaN, or if there is only one class.
  """
  auc, sizes = values.get('auc'), class_sizes(values)
  if auc is None or auc != auc or sizes is None or not min(sizes) > 0:
    return None
  return auc_interval(auc, *sizes, z)


def slice_figures(
  labels: np.ndarray, probabilities: np.ndarray, weights: np.ndarray
) -> dict[str, float | int | None]:
  """Returns the metrics of a slice, {metric: value}, None where its samples do not define one.

  They are samples, clicks, ctr, auc, auc_low, auc_high, logloss, calibration (Σ predicted / Σ
  clicked), calibration_low and calibration_high. The last interval assumes that the predictions are
  right up to a constant factor, so only the randomness of clicks makes calibration vary, and that
  its logarithm is normally distributed. All arguments are float [n]; the labels are 0 or 1, and
  samples of weight 0 do not count.
  """
  known = weights > 0
  y, p, w = (np.asarray(a, np.float64)[known] for a in (labels, probabilities, weights))
  values: dict[str, float | int | None] = {'samples': len(y), 'clicks': float(w @ y)}
  total, clicks, predicted = w.sum(), w @ y, w @ p
  won, pairs_weight = group_auc_sums(y, p, np.zeros(len(y), np.int64), w)
  auc = won / pairs_weight if pairs_weight > 0 else None
  low = high = None
  if auc is not None:
    # The effective number of samples of unequal weights (Kish 1965).
    low, high = auc_interval(auc, *(c.sum() ** 2 / (c @ c) for c in [w[y > 0.5], w[y <= 0.5]]))
  inside = np.clip(p, 1e-15, 1 - 2.0**-25)
  loss = -w @ (y * np.log(inside) + (1 - y) * np.log1p(-inside))
  values |= {'ctr': clicks / total if total else None, 'auc': auc, 'auc_low': low, 'auc_high': high}
  values['logloss'] = loss / total if total else None
  ratio = predicted / clicks if clicks and predicted else None
  values |= {'calibration': ratio, 'calibration_low': None, 'calibration_high': None}
  if ratio:
    error = math.sqrt((w * w) @ np.square(y - p / ratio)) / clicks
    values['calibration_low'] = ratio * math.exp(-Z * error)
    values['calibration_high'] = ratio * math.exp(Z * error)
  return values


def slice_errors(
  labels: np.ndarray, predictions: np.ndarray, weights: np.ndarray
) -> dict[str, float | int | None]:
  """Returns the metrics of a slice of a task with squared error, as `slice_figures`.

  They are samples, rmse, error (the mean of predicted − true), error_low and error_high (its 95 %
  interval by the normal distribution).
  """
  known = weights > 0
  y, p, w = (np.asarray(a, np.float64)[known] for a in (labels, predictions, weights))
  values: dict[str, float | int | None] = dict.fromkeys(
    ['samples', 'rmse', 'error', 'error_low', 'error_high']
  )
  values['samples'] = len(y)
  if len(y):
    error = w @ (p - y) / w.sum()
    values |= {'rmse': math.sqrt(w @ np.square(p - y) / w.sum()), 'error': error}
    if len(y) > 1:
      half = Z * math.sqrt((w * w) @ np.square(p - y - error)) / w.sum()
      values |= {'error_low': error - half, 'error_high': error + half}
  return values
