"""Judges metrics, and writes them as text: with suitable digits, and with ± if clicks are few."""

import math
from collections.abc import Mapping, Sequence

from trainer.plain_data import Json

FEW_CLICKS = 1000  # with fewer, AUC is told with ±
SMALL_ERROR = 0.1  # smaller errors have more decimals, so that enough digits are shown
OVERFITTING = 0.1  # AUC on data.train minus AUC on data.valid
Z = 1.959964  # 95 % of the normal distribution lie between -Z and Z
_STEPS = 50  # steps of a bisection in [0, 1]
_ERRORS = ('logloss', 'base_logloss', 'rmse', 'base_rmse')


def decimals(name: str, least: float) -> int:
  """Returns the number of decimals of a metric; `least` is the smallest of the values shown."""
  return 6 if name in _ERRORS and abs(least) < SMALL_ERROR else 4


def listed(names: Sequence[str], most: int = 6) -> str:
  """Returns names as 'a, b and c'. If there are more than `most`, the last are only counted."""
  shown = names if len(names) <= most else [*names[: most - 1], f'{len(names) - most + 1} more']
  return shown[0] if len(shown) == 1 else f'{", ".join(shown[:-1])} and {shown[-1]}'


def plural(noun: str, number: float) -> str:
  return noun if number == 1 else f'{noun}{"es" if noun.endswith("s") else "s"}'


def counted(number: float, noun: str) -> str:
  return f'{number:,.0f} {plural(noun, number)}'


def metric_text(name: str, value: float) -> str:
  return f'{value:.{decimals(name, value)}f}'


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

  None if they are unknown. For events of version 0.2 they are the plain numbers of samples.
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


def clicks_of(values: Mapping[str, Json]) -> float | None:
  """Returns the effective number of clicks in an evaluation, from its metrics; None if unknown."""
  sizes = class_sizes(values)
  return None if sizes is None else sizes[0]


def has_one_class(values: Mapping[str, Json]) -> bool:
  """Returns whether all labels of an evaluation are 0, or all are 1."""
  return values.get('ctr') in (0, 1)


def overfits(trained_auc: float | None, values: Mapping[str, Json]) -> bool:
  """Returns whether AUC on new samples (`values`) is far below `trained_auc`, and not by chance."""
  auc, interval = values.get('auc'), auc_interval_of(values)
  if auc is None or trained_auc is None:
    return False
  return trained_auc - auc > OVERFITTING and not (interval and trained_auc < interval[1])


def is_miscalibrated(values: Mapping[str, Json], tolerance: float) -> bool:
  """Returns whether calibration differs from 1 by more than `tolerance`, and not by chance."""
  calibration, clicks = values.get('calibration'), clicks_of(values)
  if calibration is None or not calibration > 0:
    return False
  by_chance = Z / clicks**0.5 if clicks else 0  # the 95 % bound of an error of log(clicks)
  return abs(calibration - 1) > tolerance and abs(math.log(calibration)) > by_chance


def half_interval(values: Mapping[str, Json]) -> float | None:
  """Returns half the width of AUC's 95 % interval; None if it is unknown, or clicks are not few."""
  interval = auc_interval_of(values)
  few = interval is not None and clicks_of(values) < FEW_CLICKS
  return (interval[1] - interval[0]) / 2 if few else None


def positives_name(is_one_of_several: bool) -> str:
  """Returns what the samples of label 1 are called: with several tasks, not all are clicks."""
  return 'positives' if is_one_of_several else 'clicks'


def plus_minus(name: str, values: Mapping[str, Json], is_one_of_several: bool) -> str:
  """Returns a text such as ' ± 0.09 (43 clicks)' for an AUC from few clicks; else ''."""
  half = half_interval(values) if name == 'auc' else None
  what = positives_name(is_one_of_several)
  return '' if half is None else f' ± {half:.2f} ({clicks_of(values):,.0f} {what})'
