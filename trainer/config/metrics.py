"""The metrics of a label, in display order. One of them chooses epochs, trials and exports."""

from typing import NamedTuple


class Metric(NamedTuple):
  title: str
  direction: int = 1  # -1: lower is better
  of_numbers: bool = False  # for the loss squared_error; other metrics are for labels 0 and 1
  needs_group: bool = False


METRICS = {
  'auc': Metric('AUC'),
  'gauc': Metric('GAUC', needs_group=True),
  'logloss': Metric('logloss', direction=-1),
  'rmse': Metric('RMSE', direction=-1, of_numbers=True),
}


def direction(metric: str) -> int:
  """Returns 1 if a higher value is better, as for every ranking metric; −1 if a lower one is."""
  return METRICS[metric].direction if metric in METRICS else 1


def wrong_metric(metric: str, loss: str, group: str | None) -> str | None:
  """Returns why `metric` cannot be computed for a label with the loss `loss`; None if it can."""
  names = [name for name, m in METRICS.items() if m.of_numbers == (loss == 'squared_error')]
  if metric not in names:
    return f"found '{metric}'; the loss '{loss}' has {', '.join(map(repr, names))}"
  if METRICS[metric].needs_group and not group:
    return f"found '{metric}'; it needs data.group, the column of the user"
  return None
