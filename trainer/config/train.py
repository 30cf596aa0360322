"""The sections of the training loop: `train` and `checkpoint`."""

import difflib
import math
from typing import Any, Literal

from trainer.config.metrics import wrong_metric
from trainer.config.section import (
  NOT_OF_RETRIEVAL,
  NonNegative,
  NonNegativeInt,
  Positive,
  PositiveInt,
  PositiveShare,
  Rules,
  Scale,
  Section,
  Share,
)
from trainer.errors import nearest, short

BATCH_SIZE = 4096
LEAST_GAIN = 0.0005  # the default of train.plateau.min_delta for auc, gauc and logloss
STATIC_EPOCHS = 20  # the default of train.epochs for a log without days that has data.valid


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


class DenseOptimizer(Section):
  """A Keras optimizer for the dense variables."""

  kind: Literal['sgd', 'adagrad', 'adam', 'ftrl', 'rmsprop'] = 'adam'
  """Which optimizer."""
  learning_rate: Scale = 1e-3
  """The step's size. The default is .01 for adam in a model of linear alone on a log without days
  that has data.valid."""
  args: dict[str, Any] = {}
  """Further arguments of the Keras optimizer."""

  def mistakes(self, cfg: Any) -> Rules:
    for name, value in self.args.items():
      key, found = f'args.{name}', f'found {short(value)}'
      if name not in (*OPTIMIZER_ARGS[self.kind], *CLIPPING):
        yield key, f'unknown{_right_argument(name, self.kind)}'
      if not isinstance(value, (int, float)) or not abs(value) < math.inf:
        yield key, f'{found}; wanted a finite number'
      if name in ('beta_1', 'beta_2', 'momentum', 'rho') and not 0 <= value < 1:
        yield key, f'{found}; wanted a number >= 0 and < 1'
      if value < 0 and name != 'learning_rate_power':
        yield key, f'{found}; wanted a number >= 0'
      if value > 0 and name == 'learning_rate_power':
        yield key, f'{found}; wanted a number <= 0'


def _right_argument(name: str, kind: str) -> str:
  """Suggests an argument for a wrong `name`; if `kind` lacks it, says which optimizers have it."""
  valid = (*OPTIMIZER_ARGS[kind], *CLIPPING)
  every = {argument for arguments in OPTIMIZER_ARGS.values() for argument in arguments}
  close = difflib.get_close_matches(str(name).lower(), sorted({*every, *valid}), n=1, cutoff=0.7)
  if not close or close[0] in valid:
    return nearest(name, valid)
  kinds = ' and '.join(k for k, arguments in OPTIMIZER_ARGS.items() if close[0] in arguments)
  return f"; '{close[0]}' is of {kinds}; {kind} takes {', '.join(valid)}"


class Plateau(Section):
  """What to do when the validation metric stops improving. The best epoch is kept. When rates are
  lowered, training goes on from its state. With linear alone, or the recipe ensemble, `patience` is
  4 and `stop_after` 6 by default."""

  metric: str | None = None
  """The metric that the best epoch is chosen by. logloss judges probabilities; auc and gauc judge
  only the order of samples, and their best epoch often comes later; rmse is of squared_error;
  recall@20, ndcg@20 and so on are of model.retrieval. null: logloss, rmse of squared_error, or
  recall at the first of model.retrieval.eval_at."""
  task: str | None = None
  """The task whose metric it is; null: the first of data.labels."""
  factor: PositiveShare = 0.3
  """What every learning rate is multiplied by."""
  patience: PositiveInt = 1
  """Evaluations in a row without improvement after which the rates are lowered, each time anew."""
  stop_after: PositiveInt = 3
  """Evaluations without improvement after which training stops."""
  min_delta: NonNegative = 0.0
  """The smallest change that counts as an improvement. The default is .0005 for auc, gauc and
  logloss."""

  def mistakes(self, cfg: Any) -> Rules:
    names = [label.name for label in cfg.data.labels]
    if cfg.data.stream:
      yield '', 'with a stream there are no epochs to compare; wanted it left out'
    if not cfg.data.valid:
      yield '', 'needs data.valid; found no validation files'
    if self.task is not None and self.task not in names:
      missing = '' if names else ', which the config lacks'
      wanted = f'wanted a name of data.labels{missing}{nearest(self.task, names)}'
      yield 'task', f"found '{self.task}'; {wanted}"


class Schedule(Section):
  """How the learning rates of layers and rows change from step to step. A plateau lowers the
  scheduled rates. A run that is continued also continues its schedule; --init_from starts it
  anew."""

  kind: Literal['constant', 'cosine', 'step'] = 'constant'
  """What the rates do after `warmup_steps`. cosine: they fall to `floor` in `period` steps, then
  stay. step: they fall by `factor` every `period` steps."""
  warmup_steps: NonNegativeInt = 0
  """Steps at the beginning, in which the rates rise evenly to the configured ones."""
  period: PositiveInt | None = None
  """cosine, step: steps of a fall; ctr-train --dry_run tells how many an epoch has."""
  factor: PositiveShare = 0.1
  """step: what the rates are multiplied by at each fall."""
  floor: Share = 0.0
  """cosine: the share of the configured rates that is left at the end."""

  def mistakes(self, cfg: Any) -> Rules:
    if self.kind != 'constant' and self.period is None:
      found = f"found null with kind '{self.kind}'"
      yield 'period', f'{found}; wanted steps (ctr-train --dry_run tells how many an epoch has)'
    kinds_by_key = {'period': ('cosine', 'step'), 'factor': ('step',), 'floor': ('cosine',)}
    for key, kinds in kinds_by_key.items():
      if getattr(self, key) != type(self).model_fields[key].default and self.kind not in kinds:
        yield key, f"does nothing with kind '{self.kind}'; wanted it left out"


class Train(Section):
  """The training loop."""

  batch_size: PositiveInt = BATCH_SIZE
  """Samples of a step, over all ranks or workers together; with ps_async, of one worker. If
  it is not given, a run measures it when it begins, and keeps it: on a small log, the greatest
  power of two, at least 64, that gives thirty steps an epoch and 200 over all epochs. In a stream,
  it is the one, at least 256, that gives sixty steps to a pass, in the mean over the passes that
  are there when the run begins; if there is none yet, the default holds. For a log with days that
  is trained on once, it is at most what gives sixty steps to a pass, or 1,024 if that is more."""
  epochs: PositiveInt = 1
  """How often the passes of data.train are trained on. For a log without days that has a
  plateau, the default is 20, or 60 with linear alone or a recipe (model.recipe)."""
  dense_optimizer: DenseOptimizer = DenseOptimizer()
  """The optimizer of the dense variables."""
  schedule: Schedule | None = None
  """Warm-up and decay of every learning rate by steps; null: rates stay as configured."""
  dense_dtype: Literal['float32', 'bfloat16'] = 'float32'
  """The dtype in which training steps multiply by the kernels of dnn, dlrm, din, tower, cross, mmoe
  and shared_bottom. bfloat16 rounds the factors of these products; sums, weights, optimizer,
  predictions and exports stay float32. It needs a GPU or a processor with avx512_bf16; elsewhere
  the run trains in float32, with a warning. A new run measures for some 50 ms whether bfloat16 is
  faster, and trains in float32 if it is not. It prints its choice and keeps it in the run_dir."""
  plateau: Plateau | None = None
  """Early stopping by data.valid; null: all epochs are trained. The default is {} for a log without
  days that has data.valid."""
  progressive_validation: bool = False
  """Whether each pass is predicted before it is trained on."""
  log_every_steps: PositiveInt = 50
  """Steps between updates of the live line, and between `window` events of metrics.jsonl."""
  deterministic: bool = False
  """Whether the same run gives the same bits again; somewhat slower."""

  def mistakes(self, cfg: Any) -> Rules:
    retrieval, metric = cfg.model.retrieval, cfg.deciding_metric
    if cfg.data.stream and self.epochs != 1:
      key = 'data.topic' if cfg.data.topic else 'data.watch'
      yield 'epochs', f'found {self.epochs}; {key} trains on each pass once'
    if retrieval is None:
      if why := wrong_metric(metric, cfg.deciding_label.loss, cfg.data.group):
        yield 'plateau.metric', why
      return
    if metric not in retrieval.metrics():
      names = ', '.join(map(repr, retrieval.metrics()))
      yield 'plateau.metric', f"found '{metric}'; model.retrieval.eval_at has {names}"
    if self.dense_dtype != 'float32':
      yield 'dense_dtype', f"found '{self.dense_dtype}'; model.retrieval wants 'float32'"
    if self.progressive_validation:
      yield 'progressive_validation', NOT_OF_RETRIEVAL


class Checkpoint(Section):
  """When the state is saved."""

  every_steps: PositiveInt | None = None
  """Steps between checkpoints; null: not by steps."""
  every_seconds: Positive | None = None
  """Seconds between checkpoints; null: not by time."""
  every_passes: PositiveInt | None = 1
  """Passes between checkpoints; null: not by passes."""
  keep: PositiveInt = 3
  """How many of the newest are kept; with 2 or more, also the newest that shares no file with the
  last one. With 1, damage to one file may lose the run."""
  max_increments: NonNegativeInt = 20
  """How many checkpoints in a row may write only the rows that changed since the one before. When
  half of that number is reached, their rows are merged in the background with those of the last
  checkpoint that wrote all, and the count begins anew. A checkpoint writes all rows if the merge is
  not done in time, after the end of a day, once the changed rows are half as many as the table's,
  after damage was found, and if no other one were a second copy of the rows."""
