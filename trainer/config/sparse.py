"""The sections below `sparse`: the embedding tables and their row optimizers."""

from typing import Annotated, Literal

import pydantic

from ops.row_kinds import ROW_KINDS
from trainer.config.section import (
  NonNegative,
  Positive,
  PositiveInt,
  Scale,
  Section,
  Share,
  wrong,
)

MAX_FACTORS = 1 << 20  # of a row of the store
WIDTH = 16


class RowOptimizer(Section):
  """How a row's weights are updated; ops/cc/rows/row_optimizers.h has the formulas."""

  kind: Literal[tuple(ROW_KINDS)] = 'adagrad'
  """The rule; docs/layers.md has a table of the rules and of their defaults."""
  preset: Literal['tuned', 'keras', 'paddle'] = 'tuned'
  """Whose defaults learning_rate, initial_accumulator, beta2, epsilon and clip have. tuned: what
  learned best on several logs, adapted to train.batch_size and to the width; keras: those of
  tf.keras.optimizers.legacy; paddle: those of PaddlePaddle's CTR accessor (sgd, adagrad_row)."""
  learning_rate: Scale = 0.2
  """The step's size. Its default follows from preset, kind, width and batch size."""
  initial_accumulator: NonNegative = 1e-6
  """adagrad, adagrad_row, ftrl: what the sums of squared gradients start from. It should be small
  beside the squares of mean gradients (a few 1e-4 each): .1 keeps rows from learning. Its default
  follows from preset, kind and batch size."""
  beta1: Share = 0.9
  """adam: decay of the mean of gradients, a step."""
  beta2: Share = 0.999
  """adam, rmsprop: decay of the mean of squared gradients, a step."""
  epsilon: NonNegative = 1e-7
  """adam, rmsprop, adagrad: added to the denominator. Its default follows from preset, kind and
  batch size."""
  learning_rate_power: Annotated[float, pydantic.Field(ge=-1, le=0)] = -0.5
  """ftrl: the power of the sums of squared gradients that the rate is multiplied by."""
  beta: NonNegative = 0.0
  """ftrl: added to the root of those sums."""
  l1: NonNegative = 0.0
  """Weight of Σ|w| in the loss, not divided by the batch."""
  l2: NonNegative = 0.0
  """Weight of ½·Σw² in the loss, not divided by the batch."""
  l2_mode: Literal['touch', 'catch_up'] = 'touch'
  """touch: only rows of the batch take a step. catch_up: a row also takes the steps of the batches
  that it was not in, with the penalty alone, at its next touch or before it is evaluated or saved,
  as a dense optimizer with a penalty on the whole table would."""
  clip: Positive | None = None
  """Bounds each element of a row's gradient, as sparse.gradient_scale has divided it, before the
  penalties; null: no bound. Its default follows from preset, kind and batch size."""

  @pydantic.model_validator(mode='after')
  def _has_its_preset(self) -> 'RowOptimizer':
    presets = ROW_KINDS[self.kind].presets
    if self.preset not in presets:
      wrong('preset', f"found '{self.preset}'; kind '{self.kind}' has {', '.join(presets)}")
    return self


class Table(Section):
  """Rows of one layout: a linear weight, then, after admission, factors."""

  width: PositiveInt = WIDTH
  """D, the number of factors (of ffm: for each field)."""
  init_scale: Scale = 0.01
  """The standard deviation of the initial factors, which are drawn from a normal distribution."""
  linear: RowOptimizer = RowOptimizer()
  """Of the linear weights."""
  factors: RowOptimizer = RowOptimizer()
  """Of the factors."""
  dtype: Literal['float32', 'bfloat16'] = 'float32'
  """What factors and their optimizer state are kept in, in memory and in checkpoints. bfloat16
  halves them; steps are taken in float32 and rounded by chance, seeded. Linear weights stay
  float32."""


class Sparse(Section):
  """The embedding tables."""

  store: Literal['rows', 'tfra'] = 'rows'
  """rows: our C++ row store; tfra: the hash tables of tensorflow-recommenders-addons."""
  gradient_scale: Literal['batch', 'feature'] = 'batch'
  """What a feature's summed gradient is divided by: batch: the weight of the global batch; feature:
  its own shows in it, so that a rare feature's step does not shrink as the batch grows. The default
  is feature where an optimizer has the preset paddle."""
  exchange_dtype: Literal['float32', 'float16', 'bfloat16'] = 'float32'
  """Of rows and their gradients on the way between processes."""
  tables: dict[str, Table] = {'default': Table()}
  """The tables by name."""
