"""Compares two models on the same samples, of one seed or of several."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import tensorflow as tf

from trainer.data.prepared import PreparedPass
from trainer.errors import UserError
from trainer.evaluation.finished_run import FinishedRun
from trainer.model import influence
from trainer.reporting.metric_text import Z

Scored = dict[tuple[str, bool], np.ndarray]


def scored(run: FinishedRun, prepared: Sequence[PreparedPass]) -> Scored:
  """Returns {(task, whether its loss is squared_error): labels, predictions and weights [3, n]}."""
  labels, columns = run.cfg.labels, []
  for batch, predictions in (pair for p in prepared for pair in run.evaluation.predict(p)):
    arrays = (np.asarray(a, np.float64) for a in (batch.label, predictions, batch.weight))
    columns.append(np.stack([a.reshape(-1, len(labels)) for a in arrays]))
  whole = np.concatenate([np.zeros([3, 0, len(labels)]), *columns], 1)
  return {(x.name, x.loss == 'squared_error'): whole[..., t] for t, x in enumerate(labels)}


def differences(first: Sequence[Scored], other: Sequence[Scored]) -> pd.DataFrame:
  """Returns a row for each task and metric of two models on the same samples.

  The columns are those of `trainer.compare`. The interval is paired. With d_ij the difference of
  the influences of sample j in pair i of S runs, for AUC those of DeLong et al. 1988, and g_i that
  of the metrics of pair i, its variance is that of the samples and that of the seeds:

      Σ_j (mean over i of d_ij)² + (sample variance of g_i) / S

  It is Student's, with the degrees of freedom of Welch and Satterthwaite: the first term is taken
  as known, the second has S − 1. With S = 1 there is only the first.
  """
  rows, runs = [], [*first, *other]
  for key in [key for key in first[0] if all(key in run for run in runs)]:
    (task, is_of_numbers), (y, _, w) = key, first[0][key]
    if not all(np.array_equal([y, w], run[key][[0, 2]]) for run in runs):
      raise UserError('found other labels or weights in the two runs; wanted the same samples')
    for measure in (influence.rmse,) if is_of_numbers else (influence.auc, influence.logloss):
      found = [measure(y[w > 0], run[key][1][w > 0], w[w > 0]) for run in runs]
      if None in found:
        continue
      values = np.reshape([one.value for one in found], [2, len(first)])
      influences = np.reshape([one.influence for one in found], [2, len(first), -1]).mean(1)
      gains, gain = values[1] - values[0], np.diff(values.mean(1)).item()
      half = _half_width(float(np.linalg.norm(influences[1] - influences[0])), gains)
      rows.append((task, measure.__name__, *values.mean(1), gain, gain - half, gain + half))
  if not rows:
    raise UserError('found no label that both runs predict; wanted one')
  return pd.DataFrame(rows, columns='task metric first other difference low high'.split())


def _half_width(of_samples: float, gains: np.ndarray) -> float:
  """Returns half of the 95 % interval of the mean gain, whose error by samples is `of_samples`."""
  pairs = len(gains)
  if pairs == 1 or not np.ptp(gains):
    return Z * of_samples
  of_seeds = np.var(gains, ddof=1) / pairs
  variance = of_samples**2 + of_seeds
  freedom = (pairs - 1) * (variance / of_seeds) ** 2
  return _t_quantile(min(freedom, 1e9)) * float(np.sqrt(variance))


def _t_quantile(freedom: float) -> float:
  """Returns the t with P(|T| > t) = 0.05 for Student's T with these degrees of freedom."""
  low, high, half = 0.0, 1e4, np.float64(0.5)
  for _ in range(60):
    t = (low + high) / 2
    beyond = tf.math.betainc(half * freedom, half, np.float64(freedom / (freedom + t * t)))
    low, high = (t, high) if beyond > 0.05 else (low, t)
  return high
