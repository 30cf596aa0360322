"""What a new model takes from the first passes: statistics of dense columns, and biases."""

import numpy as np

from trainer import config
from trainer.data.features import dense_stats
from trainer.data.prepared import PreparedPass
from trainer.model.click_model import first_biases
from trainer.training.run_state import Progress
from trainer.training.step import Step

# Where later days follow, a standardised value is at most so many deviations off. A column may
# have hardly varied in the first pass, and the model knows nothing of values so far from it.
BOUND = 3.0


def set_initial_values(
  cfg: config.Config,
  step: Step,
  progress: Progress,
  prepared: PreparedPass,
  items: PreparedPass | None = None,
) -> None:
  """Sets the statistics of dense columns and the biases, if not set yet, before a pass.

  The statistics of a run's first pass, and of the table `items`, standardise dense columns in all
  passes. With its first bias a task predicts its mean label in the first pass that has labels of
  both classes. If the bias began at 0, the rows of features would learn this mean, and a feature
  without a row would be predicted without it.
  """
  if step.steps == 0:
    click_rate = prepared.click_rate(cfg.click_shares()) if cfg.counted_fields() else None
    measured = dict(prepared.meta['dense'])
    if items is not None:
      of_items, columns = cfg.columns_of_items(), items.meta['dense'].items()
      measured |= {name: figures for name, figures in columns if name in of_items}
    bound = BOUND if cfg.data.has_days or cfg.data.stream else 0.0
    step.dense.embedding.stats.assign(dense_stats(cfg.data.dense, measured, click_rate, bound))
  if unset := progress.unset_biases:
    names = [label.name for label in cfg.labels]
    biases = first_biases(cfg.model, cfg.labels, prepared.mean_labels())
    biases[[name not in unset for name in names]] = np.nan
    step.set_biases(biases)
    progress.unset_biases = [n for n, b in zip(names, biases) if n in unset and np.isnan(b)]
