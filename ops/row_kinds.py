"""The table of row optimizers: their keys, defaults and state. Imports no TensorFlow.

The config, its documentation and its checks follow from this table. A new row optimizer is an entry
here and a rule in ops/cc/rows/row_optimizers.cc; a test compares the two.
"""

import dataclasses
import math
from collections.abc import Mapping

# Fields of the `hyper` tensor, in its order: RowHyper of ops/cc/rows/row_optimizers.h.
HYPER_FIELDS = (
  'learning_rate',
  'initial_accumulator',
  'beta1',
  'beta2',
  'epsilon',
  'learning_rate_power',
  'beta',
  'l1',
  'l2',
  'l2_catch_up',
  'clip',
)
TUNED_BATCH_SIZE = 4096  # samples of a step that the preset `tuned` was measured with


@dataclasses.dataclass(frozen=True)
class RowKind:
  """What one row optimizer is.

  Attributes:
    state_per_weight: floats of state that it keeps for each weight.
    state_per_row: floats of state that it keeps for a row, whatever its width.
    reads: the hyperparameters that it reads beside learning_rate, l1, l2 and clip.
    presets: its defaults by the name of the preset.
    follows_gradient: whether the length of its steps follows the gradient's.
  """

  state_per_weight: int
  state_per_row: int
  reads: frozenset[str]
  presets: Mapping[str, Mapping[str, float | None]]
  follows_gradient: bool = False


# The presets. keras: the defaults of tf.keras.optimizers.legacy. paddle: those of PaddlePaddle's
# CTR accessor, which also divides a feature's gradient by its shows (sparse.gradient_scale). tuned:
# what learned best on several logs in batches of TUNED_BATCH_SIZE samples (docs/quality.md).
# Gradients are means over the batch, so that a feature that was seen once has a small one, 2e-4.
# Rules that make all steps equally large would learn such features by heart: epsilon and
# initial_accumulator keep theirs small, and clip bounds the steps of sgd and adagrad_row on
# frequent features at a rate from which rare ones learn at all.
ROW_KINDS = {
  'sgd': RowKind(
    0,
    0,
    frozenset(),
    {
      'tuned': {'learning_rate': 80.0, 'clip': 2e-4},
      'keras': {'learning_rate': 0.01},
      'paddle': {'learning_rate': 0.05},
    },
    follows_gradient=True,
  ),
  'adagrad': RowKind(
    1,
    0,
    frozenset({'initial_accumulator', 'epsilon'}),
    {
      'tuned': {'learning_rate': 0.2, 'initial_accumulator': 1e-6},
      'keras': {'learning_rate': 0.001, 'initial_accumulator': 0.1},
    },
  ),
  'adagrad_row': RowKind(
    0,
    1,
    frozenset({'initial_accumulator'}),
    {
      'tuned': {'learning_rate': 100.0, 'clip': 2.5e-4, 'initial_accumulator': 1e-5},
      'paddle': {'learning_rate': 0.05, 'initial_accumulator': 3.0},
    },
    follows_gradient=True,
  ),
  'adam': RowKind(
    2,
    0,
    frozenset({'beta1', 'beta2', 'epsilon'}),
    {
      'tuned': {'learning_rate': 0.03, 'epsilon': 1e-5},
      'keras': {'learning_rate': 0.001},
    },
  ),
  'ftrl': RowKind(
    2,
    0,
    frozenset({'initial_accumulator', 'learning_rate_power', 'beta'}),
    {
      'tuned': {'learning_rate': 0.2, 'initial_accumulator': 1e-6},
      'keras': {'learning_rate': 0.001, 'initial_accumulator': 0.1},
    },
  ),
  'rmsprop': RowKind(
    1,
    0,
    frozenset({'beta2', 'epsilon'}),
    {
      'tuned': {'learning_rate': 0.01, 'epsilon': 1e-4},
      'keras': {'learning_rate': 0.001, 'beta2': 0.9},
    },
  ),
}


def row_defaults(
  kind: str, preset: str = 'tuned', batch_size: int = TUNED_BATCH_SIZE, width: int = 1
) -> dict[str, float | None]:
  """Returns the defaults of a row optimizer, by key.

  In batches of another size than TUNED_BATCH_SIZE the mean gradients of rare features are larger
  or smaller. The preset `tuned` scales what is compared with them alike, so that the sum of a
  feature's gradients moves its row as far. Where steps follow the gradient's size, those of more
  than 8 weights together are as long as those of 8 (docs/quality.md).

  Args:
    kind: a key of ROW_KINDS.
    preset: a key of its presets.
    batch_size: samples of a step.
    width: how many weights of a row it moves.
  """
  rule = ROW_KINDS[kind]
  if preset != 'tuned':
    return dict(rule.presets[preset])
  scale = TUNED_BATCH_SIZE / batch_size
  powers = {'clip': 1, 'epsilon': 1, 'initial_accumulator': 2}
  powers['learning_rate'] = -1 if rule.follows_gradient else 0
  defaults = {key: value * scale ** powers[key] for key, value in rule.presets['tuned'].items()}
  if rule.follows_gradient:
    defaults['learning_rate'] *= math.sqrt(min(1, 8 / width))
  return defaults
