"""The sections below `sparse`: the embedding tables and their row optimizers."""

from typing import Annotated, Any, Literal

import pydantic

from trainer.config.section import NonNegative, Positive, PositiveInt, Scale, Section, Share
from trainer.config.train import BATCH_SIZE

MAX_FACTORS = 1 << 20  # of a row of the store
WIDTH = 16


# What a row optimizer learns with where the config gives it no learning_rate, in batches of
# BATCH_SIZE samples (docs/quality.md). Gradients are means over the batch, so that a feature that
# was seen once has a small one, 2e-4. Rules that make all steps equally large would learn such
# features by heart: epsilon and initial_accumulator keep theirs small, and clip bounds the steps of
# sgd and adagrad_row on frequent features at a rate from which rare ones learn at all.
ROW_DEFAULTS = {
  'sgd': {'learning_rate': 80.0, 'clip': 2e-4},
  'adagrad': {'learning_rate': 0.2, 'initial_accumulator': 1e-6},
  'adagrad_row': {'learning_rate': 100.0, 'clip': 2.5e-4, 'initial_accumulator': 1e-5},
  'adam': {'learning_rate': 0.03, 'epsilon': 1e-5},
  'ftrl': {'learning_rate': 0.2, 'initial_accumulator': 1e-6},
  'rmsprop': {'learning_rate': 0.01, 'epsilon': 1e-4},
}
# The steps of these follow the gradient's size. Where they have a learning_rate of their own, the
# gradient is divided by the feature's shows, as PaddlePaddle has them.
SCALED_BY_FEATURE = {'sgd', 'adagrad_row'}


def row_defaults(kind: str, batch_size: int = BATCH_SIZE, width: int = 1) -> dict[str, float]:
  """Returns what a row optimizer learns with where the config gives it no learning_rate.

  In another batch than one of BATCH_SIZE samples the mean gradients of rare features are larger or
  smaller by `scale`; what is compared with them changes alike, so that the sum of a feature's
  gradients moves its row as far. Where steps follow the gradient's size, those of more than 8
  weights together are as long as those of 8 (docs/quality.md).

  Args:
    kind: of the row optimizer.
    batch_size: of a step.
    width: how many weights of a row it moves.
  """
  scale = BATCH_SIZE / batch_size
  powers = {'clip': 1, 'epsilon': 1, 'initial_accumulator': 2}
  powers['learning_rate'] = -1 if kind in SCALED_BY_FEATURE else 0
  found = {key: value * scale ** powers[key] for key, value in ROW_DEFAULTS[kind].items()}
  if kind in SCALED_BY_FEATURE:
    found['learning_rate'] *= min(1, 8 / width) ** 0.5
  return found


class RowOptimizer(Section):
  """How a row's weights are updated; ops/cc/rows/row_optimizers.h has the formulas."""

  kind: Literal['sgd', 'adagrad', 'adagrad_row', 'adam', 'ftrl', 'rmsprop'] = 'adagrad'
  """The rule; docs/layers.md has a table of them and of their defaults."""
  learning_rate: Scale = ROW_DEFAULTS['adagrad']['learning_rate']
  """The step's size. Where it is left out, it and what else makes the rule learn (clip, epsilon,
  initial_accumulator) have defaults of the kind and of the batch's size, in docs/layers.md; below
  are those beside a rate of your own."""
  initial_accumulator: NonNegative = 1e-6
  """adagrad, adagrad_row, ftrl: what the sums of squared gradients start from. It should be small
  beside the squares of mean gradients (a few 1e-4 each): .1 keeps rows from learning. Beside
  a learning_rate, that of adagrad_row is 3, PaddlePaddle's."""
  beta1: Share = 0.9
  """adam: decay of the mean of gradients, a step."""
  beta2: Share = 0.999
  """adam, rmsprop: decay of the mean of squared gradients, a step."""
  epsilon: NonNegative = 1e-7
  """adam, rmsprop: added to the denominator."""
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
  penalties; null: no bound."""

  @pydantic.model_validator(mode='before')
  @classmethod
  def _accumulator_of_paddle(cls, value: Any) -> Any:
    own_rate = isinstance(value, dict) and 'learning_rate' in value
    if own_rate and value.get('kind') == 'adagrad_row':
      return {'initial_accumulator': 3.0} | value
    return value

  @pydantic.field_validator('l2_mode', mode='before')
  @classmethod
  def _old_spelling(cls, value: Any) -> Any:
    """Configs and run_dirs of before say `owed` for `catch_up`."""
    return 'catch_up' if value == 'owed' else value


class Table(Section):
  """Rows of one layout: a linear weight, then, after admission, factors."""

  width: PositiveInt = WIDTH
  """D, the number of factors (of ffm: for each field)."""
  init: Literal['normal', 'uniform'] = 'normal'
  """The distribution of the initial factors."""
  init_scale: Scale = 0.01
  """Its standard deviation, or half its range."""
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
  is feature where an optimizer of sgd or adagrad_row is given a learning_rate."""
  exchange_dtype: Literal['float32', 'float16', 'bfloat16'] = 'float32'
  """Of rows and their gradients on the way between processes."""
  tables: dict[str, Table] = {'default': Table()}
  """The tables by name."""
