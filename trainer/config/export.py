"""The section `export`: what is written for serving, and when."""

from typing import Literal

from trainer.config.metrics import METRICS
from trainer.config.section import NonNegative, PositiveInt, Section


class Gate(Section):
  """Withholds exports after a pass on which the model got worse, until a pass is good again."""

  metric: Literal[tuple(METRICS)] = 'auc'
  """The metric of train.progressive_validation by which a pass is compared with earlier passes."""
  tolerance: NonNegative = 0.002
  """How much worse the metric may be. A slot that turns blank, or a metric that is not finite,
  never passes."""


class Export(Section):
  """What is written for serving, and when."""

  base: bool = False
  """Whether a base is written after the last pass of each day; with model.retrieval it is of kind
  items."""
  delta_every_passes: PositiveInt | None = None
  """Passes between deltas; null: no deltas."""
  saved_model: bool = False
  """Whether a SavedModel is written at each day's end."""
  keep: PositiveInt | None = None
  """How many bases, each with the deltas after it, and how many versions of each kind of model are
  kept. The default is 3 with data.watch; null: all."""
  gate: Gate | None = None
  """Withholds exports after bad passes; null: every export is written."""
