"""Compares two runs on the same samples."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

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


def differences(first: Scored, other: Scored) -> pd.DataFrame:
  """Returns a row for each task and metric of two runs on the same samples.

  The columns are task, metric, first, other, difference (other minus first), and the ends of its
  95 % interval, low and high. The interval is paired: its width follows from how differently each
  sample influences the two metrics, for AUC by DeLong et al. 1988.
  """
  rows = []
  for task, is_of_numbers in [key for key in first if key in other]:
    (y, p, w), (*alike, q) = first[task, is_of_numbers], other[task, is_of_numbers][[0, 2, 1]]
    if not np.array_equal([y, w], alike):
      raise UserError('found other labels or weights in the two runs; wanted the same samples')
    for measure in (influence.rmse,) if is_of_numbers else (influence.auc, influence.logloss):
      if None not in (pair := [measure(y[w > 0], of[w > 0], w[w > 0]) for of in (p, q)]):
        gain = pair[1].value - pair[0].value
        half = Z * float(np.linalg.norm(pair[1].influence - pair[0].influence))
        ends = pair[0].value, pair[1].value, gain, gain - half, gain + half
        rows.append((task, measure.__name__, *ends))
  if not rows:
    raise UserError('found no label that both runs predict; wanted one')
  return pd.DataFrame(rows, columns='task metric first other difference low high'.split())
