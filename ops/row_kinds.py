"""The row optimizers: which hyperparameters each reads, their defaults, and the size of its state.

The schema of the config's section `sparse.tables.NAME.factors` is built from HYPERPARAMETERS and
ROW_OPTIMIZERS below. A new row optimizer needs an entry here and one in
ops/cc/rows/row_optimizers.cc; a test compares the two. Imports no TensorFlow.
"""

import dataclasses
import math
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Hyperparameter:
  """A number that row optimizers read."""

  default: float | None  # where a preset gives none; None: it then has no effect
  meaning: str  # in docs/config.md
  low: float = 0.0
  high: float | None = None
  excludes: str = ''  # the bound that is itself not allowed, 'low' or 'high'


_FOLLOWS = 'Its default follows from preset, kind'
HYPERPARAMETERS = {
  'learning_rate': Hyperparameter(
    0.2,
    f"The step's size. {_FOLLOWS}, width, batch size and sparse.features_per_sample; "
    'beside a dnn without `hidden` see docs/tuning.md.',
    high=1e6,  # above it every float32 overflows in a few steps
  ),
  'initial_accumulator': Hyperparameter(
    1e-6,
    'What the sums of squared gradients start from. It should be small beside the squares of mean '
    f'gradients (a few 1e-4 each): .1 keeps rows from learning. {_FOLLOWS} and batch size.',
  ),
  'beta1': Hyperparameter(
    0.9, 'Decay of the mean of gradients, per step.', high=1.0, excludes='high'
  ),
  'beta2': Hyperparameter(
    0.999, 'Decay of the mean of squared gradients, per step.', high=1.0, excludes='high'
  ),
  'epsilon': Hyperparameter(1e-7, f'Added to the denominator. {_FOLLOWS} and batch size.'),
  'l1': Hyperparameter(0.0, 'Weight of Σ|w| in the loss, not divided by the batch.'),
  'l2': Hyperparameter(0.0, 'Weight of ½·Σw² in the loss, not divided by the batch.'),
  'clip': Hyperparameter(
    None,
    "Bounds each element of a row's gradient, after the division of sparse.gradient_scale, before "
    f'the penalties; null: no bound. {_FOLLOWS} and batch size.',
    excludes='low',
  ),
}
# Fields of the `hyper` tensor, in the order of RowHyper in ops/cc/rows/row_optimizers.h.
HYPER_FIELDS = (*HYPERPARAMETERS, 'l2_catch_up')
TUNED_BATCH_SIZE = 4096  # the batch size at which the preset `tuned` was measured
TUNED_FEATURES = 10  # the most features of a sample for which its learning rates were measured


@dataclasses.dataclass(frozen=True)
class RowKind:
  """The properties of one row optimizer."""

  meaning: str  # the source of the update rule and what is special, for docs/config.md
  presets: Mapping[str, Mapping[str, float | None]]  # {its name: {hyperparameter: default}}
  state_per_weight: int = 0  # floats of state
  state_per_row: int = 0  # in addition, whatever the width
  reads: frozenset[str] = frozenset()  # besides learning_rate, l1, l2 and clip
  follows_gradient: bool = False  # whether a step is proportional to the gradient

  @property
  def has_decaying_state(self) -> bool:
    """Whether state holds moving averages: l2_mode matters without l2, as they always change."""
    return 'beta2' in self.reads


# The presets. keras: the defaults of tf.keras.optimizers.legacy. paddle: those of PaddlePaddle's
# CTR accessor, which also divides a feature's gradient by its shows (sparse.gradient_scale). tuned:
# the values that learned best on several logs in batches of TUNED_BATCH_SIZE samples
# (docs/quality.md). Gradients are means over the batch, so a feature that was seen once has a small
# one, 2e-4. Rules that make all steps equally large would overfit such features: epsilon and
# initial_accumulator keep the steps small. With sgd and adagrad_row, rare features learn only at a
# high learning rate; clip then bounds the steps on frequent features.
ROW_OPTIMIZERS = {
  'sgd': RowKind(
    'Gradient descent',
    presets={
      'tuned': {'learning_rate': 80.0, 'clip': 2e-4},
      'keras': {'learning_rate': 0.01},
      'paddle': {'learning_rate': 0.05},
    },
    follows_gradient=True,
  ),
  'adagrad': RowKind(
    'Duchi et al. 2011: an accumulator for each weight',
    state_per_weight=1,
    reads=frozenset({'initial_accumulator', 'epsilon'}),
    presets={
      'tuned': {'learning_rate': 0.2, 'initial_accumulator': 1e-6},
      'keras': {'learning_rate': 0.001, 'initial_accumulator': 0.1},
    },
  ),
  'adagrad_row': RowKind(
    "PaddlePaddle's: one accumulator for a row, of the means of squared gradients",
    state_per_row=1,
    reads=frozenset({'initial_accumulator'}),
    presets={
      'tuned': {'learning_rate': 100.0, 'clip': 2.5e-4, 'initial_accumulator': 1e-5},
      'paddle': {'learning_rate': 0.05, 'initial_accumulator': 3.0},
    },
    follows_gradient=True,
  ),
  'adam': RowKind(
    'Kingma & Ba 2015, lazy: moments move only in steps that touch the row; '
    'the bias correction counts all steps',
    state_per_weight=2,
    reads=frozenset({'beta1', 'beta2', 'epsilon'}),
    presets={'tuned': {'learning_rate': 0.03, 'epsilon': 1e-5}, 'keras': {'learning_rate': 0.001}},
  ),
  'ftrl': RowKind(
    'McMahan et al. 2013, with L1 and L2: weights become exactly 0',
    state_per_weight=2,
    reads=frozenset({'initial_accumulator'}),
    presets={
      'tuned': {'learning_rate': 0.2, 'initial_accumulator': 1e-6},
      'keras': {'learning_rate': 0.001, 'initial_accumulator': 0.1},
    },
  ),
  'rmsprop': RowKind(
    'Tieleman & Hinton 2012',
    state_per_weight=1,
    reads=frozenset({'beta2', 'epsilon'}),
    presets={
      'tuned': {'learning_rate': 0.01, 'epsilon': 1e-4},
      'keras': {'learning_rate': 0.001, 'beta2': 0.9},
    },
  ),
}


def row_defaults(
  kind: str,
  preset: str = 'tuned',
  batch_size: int = TUNED_BATCH_SIZE,
  width: int = 1,
  features: float = 1,
) -> dict[str, float | None]:
  """Returns the defaults of a row optimizer, {hyperparameter: value}.

  Only the preset `tuned` depends on batch_size, on width (how many weights of a row the optimizer
  updates) and on features (how many a sample has on average). Gradients are means over the batch,
  so a rare feature has a larger gradient in a smaller batch: clip, epsilon and initial_accumulator
  are scaled to match. There are two rules for the learning rate (docs/quality.md). Where steps are
  proportional to gradients, it is scaled inversely to them, and lowered for rows of more than 8
  weights, so that their step is as long as one on 8. Otherwise the first steps are about as long as
  the rate, and add up over a sample's features: it is lowered for more than TUNED_FEATURES of them.
  """
  rule = ROW_OPTIMIZERS[kind]
  if preset != 'tuned':
    return dict(rule.presets[preset])
  scale = TUNED_BATCH_SIZE / batch_size
  powers = {'clip': 1, 'epsilon': 1, 'initial_accumulator': 2}
  powers['learning_rate'] = -1 if rule.follows_gradient else 0
  defaults = {key: value * scale ** powers[key] for key, value in rule.presets['tuned'].items()}
  if rule.follows_gradient:
    defaults['learning_rate'] *= math.sqrt(min(1, 8 / width))
  else:
    defaults['learning_rate'] *= min(1, TUNED_FEATURES / features) ** 1.5
  return defaults


def meaning_of(hyperparameter: str) -> str:
  """Describes a hyperparameter. If only some optimizers read it, their names come first."""
  kinds = [kind for kind, rule in ROW_OPTIMIZERS.items() if hyperparameter in rule.reads]
  meaning = HYPERPARAMETERS[hyperparameter].meaning
  return f'{", ".join(kinds)}: {meaning[0].lower()}{meaning[1:]}' if kinds else meaning
