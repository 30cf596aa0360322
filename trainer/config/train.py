"""The sections of the training loop: `train` and `checkpoint`."""

import difflib
from collections.abc import Sequence
from typing import Any, Literal

from trainer.config.section import (
  NonNegative,
  NonNegativeInt,
  Positive,
  PositiveInt,
  PositiveShare,
  Scale,
  Section,
  Share,
)
from trainer.errors import nearest

BATCH_SIZE = 4096


STATIC_EPOCHS = 20  # at most, of a log without days that has data.valid


class DenseOptimizer(Section):
  """A Keras optimizer for the dense variables."""

  kind: Literal['sgd', 'adagrad', 'adam', 'ftrl', 'rmsprop'] = 'adam'
  """The rule."""
  learning_rate: Scale = 1e-3
  """The step's size."""
  args: dict[str, Any] = {}
  """Further arguments of the Keras optimizer."""


class Plateau(Section):
  """What to do when the validation metric stops improving. The best epoch is kept."""

  metric: str | None = None
  """The metric that the best epoch is chosen by: auc and gauc for the order of what is shown,
  logloss for probabilities, which often has its best some epochs before, rmse of squared_error;
  recall@20, ndcg@20 and so on of model.retrieval. null: auc, rmse of squared_error, or recall at
  the first of model.retrieval.eval_at."""
  task: str | None = None
  """The task that it is of; null: the first of data.labels."""
  factor: PositiveShare = 0.1
  """What every learning rate is multiplied by."""
  patience: PositiveInt = 1
  """Evaluations without improvement before the rates are lowered, each time."""
  stop_after: PositiveInt = 2
  """Evaluations without improvement before the training stops."""
  min_delta: NonNegative = 0.0
  """How much better counts as an improvement."""


class Schedule(Section):
  """How every learning rate changes with the steps taken, those of rows too; a plateau lowers what
  is left. A restart goes on where the run stood; with --init_from steps count from its start."""

  kind: Literal['constant', 'cosine', 'step'] = 'constant'
  """What the rates do after `warmup_steps`. cosine: they fall to `floor` in `period` steps, then
  stay. step: they fall by `factor` every `period` steps."""
  warmup_steps: NonNegativeInt = 0
  """Steps in which the rates rise evenly to the configured ones, before all else."""
  period: PositiveInt | None = None
  """cosine, step: steps of a fall; trainer.run --dry_run tells how many an epoch has."""
  factor: PositiveShare = 0.1
  """step: what the rates are multiplied by at each fall."""
  floor: Share = 0.0
  """cosine: the share of the configured rates that is left."""


class Train(Section):
  """The training loop."""

  batch_size: PositiveInt = BATCH_SIZE
  """Samples of a step, over all ranks and workers together; in ps_async of one worker. Left out, it
  is measured when a run begins, and kept: where data.train has fewer than 122,880 samples, it is
  the power of two, at least 64, that makes thirty steps of an epoch."""
  epochs: PositiveInt = 1
  """How often the passes of data.train are trained on. The default is 20 with a plateau, for a log
  without days."""
  dense_optimizer: DenseOptimizer = DenseOptimizer()
  """Of the dense variables."""
  schedule: Schedule | None = None
  """Warm-up and decay of every learning rate by steps; null: rates stay as configured."""
  dense_dtype: Literal['float32', 'bfloat16'] = 'float32'
  """In which training steps multiply by the kernels of dnn, dlrm, din, tower, cross, mmoe and
  shared_bottom. With bfloat16 their factors are rounded and sums stay in float32, as do weights,
  optimizer, predictions and exports. Wants a GPU or a processor with avx512_bf16; elsewhere it is
  float32, with a warning. A new run measures for some 50 ms whether bfloat16 is faster; where it is
  not, the run trains in float32. The choice is told, and kept in the run_dir."""
  plateau: Plateau | None = None
  """Early stopping by data.valid; null: all epochs are trained. The default is {} for a log without
  days that has data.valid."""
  progressive_validation: bool = False
  """Whether each pass is predicted before it is trained on."""
  log_every_steps: PositiveInt = 50
  """How often the live line changes."""
  deterministic: bool = False
  """Whether a run repeats bit for bit; somewhat slower."""


class Checkpoint(Section):
  """When the state is saved."""

  every_steps: PositiveInt | None = None
  """Steps between checkpoints; null: not by steps."""
  every_seconds: Positive | None = None
  """Seconds between checkpoints; null: not by time."""
  every_passes: PositiveInt | None = 1
  """Passes between checkpoints; null: not by passes."""
  keep: PositiveInt = 3
  """How many of the newest are kept."""


# Arguments of tf.keras.optimizers.legacy, beside the learning rate.
CLIPPING = ('clipnorm', 'clipvalue', 'global_clipnorm', 'decay')
OPTIMIZER_ARGS = {
  'sgd': ('momentum', 'nesterov'),
  'adagrad': ('initial_accumulator_value', 'epsilon'),
  'adam': ('beta_1', 'beta_2', 'epsilon', 'amsgrad'),
  'ftrl': (
    'learning_rate_power',
    'initial_accumulator_value',
    'l1_regularization_strength',
    'l2_regularization_strength',
    'l2_shrinkage_regularization_strength',
    'beta',
  ),
  'rmsprop': ('rho', 'momentum', 'epsilon', 'centered'),
}


def of_other_kinds(name: str, kind: str, valid: Sequence[str]) -> str:
  """As nearest, of an argument that an optimizer has not; another kind may have it."""
  every = {one for names in OPTIMIZER_ARGS.values() for one in names}
  close = difflib.get_close_matches(str(name).lower(), sorted({*every, *valid}), n=1, cutoff=0.7)
  if not close or close[0] in valid:
    return nearest(name, valid)
  kinds = ' and '.join(k for k, names in OPTIMIZER_ARGS.items() if close[0] in names)
  return f"; '{close[0]}' is of {kinds}; {kind} takes {', '.join(valid)}"
