"""The configuration: a strict schema read once from YAML, with every check that spans several keys.

`load(path, overrides)` is the only way in. A mistake raises `ConfigError`, whose text is one line:
what, where (file and key), the value found, the value wanted and, for an unknown key, the nearest
valid one. This file imports no TensorFlow: a mistake is reported before anything slow starts.

The string under each key is its description.
"""

import dataclasses
import difflib
import math
import os
import re
import sys
import typing
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal, NoReturn

import pydantic
import yaml

from ops.policy import Policy
from trainer import files, schema_text
from trainer.errors import ConfigError, nearest

# Interactions that are built in; others are dotted paths of Keras layers.
INTERACTIONS = ('linear', 'fm', 'ffm', 'fwfm', 'cross', 'dnn', 'dlrm', 'tower', 'din')
# What several tasks' towers may read, likewise.
SHARED = ('shared_bottom', 'mmoe')
Loss = Literal['log_loss', 'focal', 'squared_error', 'fake_negative']
MAX_SLOTS = 2047  # slot ids take the 11 bits under the sign of a key


class Section(pydantic.BaseModel):
  """A part of the config: unknown keys are errors, and nothing changes once it was read."""

  model_config = pydantic.ConfigDict(
    extra='forbid', frozen=True, protected_namespaces=(), use_attribute_docstrings=True
  )


MAX_FACTORS = 1 << 20  # of a row of the store
MAX_INT = 2**63 - 1
Positive = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]
# Of learning rates and initial scales: what lies above makes every float32 overflow in a few steps.
Scale = Annotated[float, pydantic.Field(ge=0, le=1e6)]
PositiveInt = Annotated[int, pydantic.Field(gt=0, le=MAX_INT, strict=True)]
NonNegativeInt = Annotated[int, pydantic.Field(ge=0, le=MAX_INT, strict=True)]
Port = Annotated[int, pydantic.Field(ge=1, le=65535, strict=True)]
Share = Annotated[float, pydantic.Field(ge=0, le=1)]
PositiveShare = Annotated[float, pydantic.Field(gt=0, le=1)]


class History(Section):
  """A history: a slot whose features stand in order, the oldest first."""

  max_length: PositiveInt
  """L: of a longer history the last L features are read."""


class Slot(Section):
  """A column of the log with categorical features."""

  name: str
  """Names the slot in reports and in other keys."""
  column: str | None = None
  """Its column in the file; null: the slot's name."""
  separator: str | None = None
  """Stands between the features of a multi-valued slot; null: each value is one feature."""
  value_separator: str | None = None
  """Stands between a feature and its value x_i, as in sports:0.5; null: every x_i is 1."""
  table: str = 'default'
  """The table of sparse.tables that holds the rows of this slot."""
  shares: str | None = None
  """Another slot whose features (keys and rows) this one uses."""
  sequence: History | None = None
  """That the slot is a history of features of the slot that it `shares`, the candidate, which din
  reads it against."""
  pooling: Literal['sum', 'mean', 'sqrtn'] = 'mean'
  """How several features of a sample become the slot vector that dnn and cross read."""
  lifecycle: dict[str, Any] = {}
  """Thresholds of `lifecycle` that differ for this slot."""


class DenseColumn(Section):
  """A numeric column; blank means missing."""

  name: str
  """Its column in the file."""
  transform: Literal['none', 'log1p', 'standardise', 'log1p_standardise'] = 'none'
  """log1p is sign(x)·log(1 + |x|); standardise is (x − mean) / std, after log1p."""
  missing: float = 0.0
  """What the model sees, after the transform, where the value is missing."""
  mean: float | None = None
  """Of standardise; null: measured on the first training pass."""
  std: Positive | None = None
  """Of standardise; null: measured on the first training pass."""


class Label(Section):
  """One label of several. Where it is blank, the sample brings no loss for its task."""

  name: str
  """Names the task in reports, in model.tasks and in serving."""
  column: str | None = None
  """Its column in the file; null: the label's name."""
  positive: str | None = None
  """A regular expression: a label that matches it whole is 1, any other text 0."""
  loss: Loss = 'log_loss'
  """log_loss, focal and fake_negative (conversions that come late, docs/layers.md) want 0 or 1,
  squared_error any number."""
  weight: NonNegative = 1.0
  """Of the task's mean loss in the sum over tasks."""
  click: Share | None = None
  """How much of a click a positive label adds to the clicks of its features in the lifecycle; all
  labels together at most 1. null: 1 for the first label where no label says it, else 0. To let a
  conversion count three times a click: .25 for the click, .75 for the conversion, and four times
  lifecycle.clk_coeff."""


class Data(Section):
  """Where the log lies and how to read it. Every file that a pattern matches is one pass."""

  train: list[str] = []
  """Patterns of the files to train on, in order of their days."""
  valid: list[str] = []
  """Patterns of the files to validate on after each epoch."""
  test: list[str] = []
  """Patterns of the files that the best epoch is evaluated on at the end."""
  watch: str | None = None
  """A directory to follow, with its subdirectories. A pass NAME is ready once NAME.done lies beside
  it, and all passes of a directory once it holds _SUCCESS (docs/online.md)."""
  format: (
    Literal['csv', 'jsonl', 'parquet', 'orc', 'tfrecord', 'libsvm', 'libffm', 'prepared'] | None
  ) = None
  """Of all these files; docs/data.md has a table. prepared: directories that trainer.prepare wrote;
  null: what each file's suffix says, csv where it says nothing."""
  delimiter: str = ','
  """Between the fields of a csv line; a tab is written "\\t"."""
  columns: list[str] | None = None
  """Names of the columns, where a csv file has no header line."""
  label: str = 'label'
  """The column of the label."""
  label_is: Literal['binary', 'real'] = 'binary'
  """binary: 0 or 1; real: any number, for squared_error."""
  label_positive: str | None = None
  """A regular expression: a label that matches it whole is 1, any other text 0."""
  labels: list[Label] = []
  """Several labels, each the task of its name in model.tasks, in place of `label`; the first is
  the main one."""
  weight: str | None = None
  """The column of the samples' weights; null: each weighs 1."""
  group: str | None = None
  """The column of the user, say: GAUC is computed over its values."""
  slots: list[Slot]
  """The categorical columns."""
  dense: list[DenseColumn] = []
  """The numeric columns."""
  day_pattern: str | None = None
  """A regular expression that finds the day in a path: one group that holds a whole number or a
  date as 2024-01-31, or three groups of year, month and day. Features age and are evicted at the
  end of each day; null: there are no days."""
  missing_values: list[str] = []
  """Texts that stand for a missing value, as NULL and NaN do in some logs; blank always does."""
  max_bad_share: Share = 0.0
  """The share of a pass's records that may be malformed and are left out; above it the pass is
  refused."""
  shuffle: bool = True
  """Whether the samples of a training pass are shuffled, by seed."""
  late: Literal['train', 'skip', 'fail'] = 'train'
  """What to do with a pass that comes when its day has ended. train: it counts for the open day;
  skip: it is left out; fail: the run ends."""
  max_refused_passes: NonNegativeInt | None = None
  """How many passes that are empty, damaged or hold too many bad records are set aside; one more
  ends the run. null: none of data.train, 10 of data.watch."""
  close_day_after_hours: Positive | None = None
  """Hours without a pass after which the open day ends; days without passes then end too, and age
  the features. null: a day ends when a pass of a later one comes, and empty days do not count."""
  keep_prepared_passes: NonNegativeInt | None = None
  """How many of the passes that the run converted are kept in run_dir/prepared once they were
  trained on; null: all."""


BATCH_SIZE, WIDTH = 4096, 16
# What a row optimizer learns with where the config gives it no learning_rate, in batches of
# BATCH_SIZE samples (docs/quality.md). Gradients are means over the batch, so that a feature that
# was seen once has a small one, 2e-4. Rules that make all steps equally large would learn such
# features by heart: epsilon and initial_accumulator keep theirs small, and clip bounds the steps of
# sgd and adagrad_row on frequent features at a rate from which rare ones learn at all.
_ROW_DEFAULTS = {
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
  found = {key: value * scale ** powers[key] for key, value in _ROW_DEFAULTS[kind].items()}
  if kind in SCALED_BY_FEATURE:
    found['learning_rate'] *= min(1, 8 / width) ** 0.5
  return found


STATIC_EPOCHS = 20  # at most, of a log without days that has data.valid


class RowOptimizer(Section):
  """How a row's weights are updated; ops/cc/rows/row_optimizers.h has the formulas."""

  kind: Literal['sgd', 'adagrad', 'adagrad_row', 'adam', 'ftrl', 'rmsprop'] = 'adagrad'
  """The rule; docs/layers.md has a table of them and of their defaults."""
  learning_rate: Scale = _ROW_DEFAULTS['adagrad']['learning_rate']
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


class Interaction(Section):
  """One term of the logit. `fm` and `{dnn: {hidden: [64]}}` are short forms."""

  kind: str
  """Built in (docs/layers.md), or the dotted path of a Keras layer."""
  args: dict[str, Any] = {}
  """What the layer's constructor is given."""


def _interaction(item: Any) -> Any:
  """`fm`, `{dnn: {hidden: [64]}}` and `{kind: dnn, args: {...}}` all name an interaction."""
  if isinstance(item, str):
    return {'kind': item}
  if isinstance(item, dict) and len(item) == 1 and 'kind' not in item:
    ((kind, args),) = item.items()
    return {'kind': kind, 'args': args or {}}
  return item


def _interactions(value: Any) -> Any:
  return [_interaction(item) for item in value] if isinstance(value, list) else value


Interactions = Annotated[list[Interaction], pydantic.BeforeValidator(_interactions)]


class Task(Section):
  """What predicts one label of several."""

  interactions: Interactions = []
  """Terms of this task's logit alone, beside those of model.interactions."""
  given: str | None = None
  """Another task: the prediction is that one's times σ(logit), as in ESMM, where a conversion
  wants a click."""


class Model(Section):
  """The layers and the loss."""

  interactions: Interactions = []
  """The terms of the logit, which are added up; of every task's, where there are several."""
  shared: Annotated[Interaction | None, pydantic.BeforeValidator(_interaction)] = None
  """What the `tower`s of several tasks read: shared_bottom, mmoe or the dotted path of a Keras
  layer."""
  tasks: dict[str, Task] = {}
  """By the name of each of data.labels."""
  loss: Loss = 'log_loss'
  """log_loss, focal and fake_negative want clicks, squared_error any number."""
  focal_gamma: NonNegative = 2.0
  """γ of focal."""
  label_smoothing: Share = 0.0
  """s turns a label y into y·(1 − s) + s/2."""
  dense_linear: bool = True
  """Whether dense columns have linear weights, where linear is among the interactions."""
  negative_sampling_rate: PositiveShare = 1.0
  """The share of the negatives that the log kept; predictions are corrected for it."""

  def all_interactions(self) -> dict[str, Interaction]:
    """Those of all tasks, and the shared part, each by its key."""
    listed = [('model.interactions', self.interactions)]
    listed += [(f'model.tasks.{n}.interactions', t.interactions) for n, t in self.tasks.items()]
    found = {f'{key}.{i}': one for key, some in listed for i, one in enumerate(some)}
    return found | ({} if self.shared is None else {'model.shared': self.shared})


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

  metric: Literal['auc', 'gauc', 'logloss'] = 'auc'
  """The metric that the best epoch is chosen by: auc and gauc for the order of what is shown,
  logloss for probabilities, which often has its best some epochs before."""
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

  kind: Literal['warmup', 'cosine', 'step']
  """warmup: the rates rise, then stay. cosine: they fall to `floor` in `period` steps, then stay.
  step: they fall by `factor` every `period` steps."""
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
  """Samples of a step, over all ranks and workers together; in ps_async of one worker. Where it is
  left out and data.train has fewer than 122,880 samples, it is the power of two, at least 64, that
  makes thirty steps of an epoch."""
  epochs: PositiveInt = 1
  """How often the passes of data.train are trained on. The default is 20, with early stopping (a
  plateau), for a log without days that has data.valid."""
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
  """Early stopping by data.valid; null: all epochs are trained."""
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


class Gate(Section):
  """When a pass is so bad that nothing is exported after it, until a good one comes."""

  metric: Literal['auc', 'gauc', 'logloss', 'rmse'] = 'auc'
  """The metric of train.progressive_validation that is compared with that of the passes before."""
  tolerance: NonNegative = 0.002
  """How much worse it may be. A slot that turns blank, or a metric that is not finite, never
  passes."""


class Export(Section):
  """What is written for serving, and when."""

  base: bool = False
  """Whether a base is written after the last pass of each day."""
  delta_every_passes: PositiveInt | None = None
  """Passes between deltas; null: no deltas."""
  saved_model: bool = False
  """Whether a SavedModel is written at each day's end."""
  keep: PositiveInt | None = None
  """How many bases, each with the deltas after it, and how many versions of each kind of model are
  kept; null: all."""
  gate: Gate | None = None
  """Withholds exports after bad passes; null: all are written."""


class Sync(Section):
  """How the processes of a job work together, and when one of them counts as lost."""

  mode: Literal['allreduce', 'ps', 'ps_async', 'ps_geo'] = 'allreduce'
  """allreduce: Horovod's ranks; the others: parameter servers (docs/architecture.md)."""
  dense_allreduce: Literal['horovod', 'connections'] = 'horovod'
  """allreduce: what sums dense gradients over ranks: Horovod's ring allreduce, or our own
  connections, which wait for less (docs/performance.md)."""
  row_exchange: Literal['connections', 'horovod'] = 'connections'
  """allreduce: what carries rows between ranks: our own connections, or Horovod's all-to-all, for
  clusters where only Horovod's network may be used."""
  ports: tuple[Port, Port] | None = None
  """The first and the last port that a process may listen at; null: any port. A host needs one for
  each of its ranks, and one more where rank 0 runs; of parameter servers only server 0 needs one
  beside the ports of TF_CONFIG."""
  lost_peer_seconds: Positive = 60
  """A process that is silent for so long ends the job."""
  stalled_peer_seconds: Positive = 1800
  """A process that lives but makes no progress for so long ends the job; so does a process of
  parameter servers that has not come for so long."""
  max_staleness: PositiveInt | None = None
  """ps_async: steps that a worker may be ahead of the slowest; null: any number."""
  geo_steps: PositiveInt = 10
  """ps_geo: a worker's steps between merges."""
  on_lost_worker: Literal['end', 'wait'] = 'end'
  """ps: whether a lost worker ends the job or is waited for."""


class Metrics(Section):
  """How quality is measured."""

  auc_buckets: Annotated[int, pydantic.Field(ge=2, le=10**7, strict=True)] = 100_000
  """Buckets of predictions that AUC is computed from; finer where predictions crowd."""


class Config(Section):
  """Everything that a job is told."""

  @pydantic.model_validator(mode='before')
  @classmethod
  def _rows_learn_by_kind_and_batch(cls, tree: Any) -> Any:
    """Completes each row optimizer without a learning_rate, and sparse.gradient_scale."""
    sparse = tree.get('sparse') or {} if isinstance(tree, dict) else None
    tables = sparse.get('tables', {'default': {}}) if isinstance(sparse, dict) else None
    if not isinstance(tables, dict):
      return tree
    train = tree.get('train')
    batch_size = train.get('batch_size', BATCH_SIZE) if isinstance(train, dict) else BATCH_SIZE
    if type(batch_size) is not int or batch_size < 1:
      return tree
    by_feature, completed = False, {}
    for name, table in tables.items():
      rules = {}
      for part in ('linear', 'factors') if isinstance(table, dict) else ():
        rule = table.get(part, {})
        kind = rule.get('kind', 'adagrad') if isinstance(rule, dict) else None
        if not isinstance(kind, str) or kind not in _ROW_DEFAULTS:
          continue
        if 'learning_rate' in rule:
          by_feature |= kind in SCALED_BY_FEATURE
        else:
          width = table.get('width', WIDTH) if part == 'factors' else 1
          if type(width) is not int or width < 1:
            return tree
          rules[part] = row_defaults(kind, batch_size, width) | rule
      completed[name] = table | rules if rules else table
    scale = {'gradient_scale': 'feature' if by_feature else 'batch'}
    return tree | {'sparse': scale | sparse | {'tables': completed}}

  @pydantic.model_validator(mode='before')
  @classmethod
  def _epochs_of_a_static_log(cls, tree: Any) -> Any:
    """A log without days is trained on until validation says that it is enough."""
    if not isinstance(tree, dict) or not isinstance(tree.get('data'), dict):
      return tree
    data, train, model = tree['data'], tree.get('train') or {}, tree.get('model')
    ends = data.get('valid') and not data.get('watch') and not data.get('day_pattern')
    if not ends or not isinstance(train, dict) or not isinstance(model, dict):
      return tree
    losses = [model.get('loss')] + [
      label.get('loss') for label in data.get('labels') or [] if isinstance(label, dict)
    ]
    if {'epochs', 'plateau'} & set(train) or 'squared_error' in losses:
      return tree
    return tree | {'train': train | {'plateau': {}, 'epochs': STATIC_EPOCHS}}

  seed: NonNegativeInt = 0
  """Of initial weights, shuffling, dropout and admission by probability."""
  run_dir: str = 'runs/default'
  """Where the run is kept: checkpoints, reports, exports."""
  data: Data
  """Where the log lies and how to read it."""
  sparse: Sparse = Sparse()
  """The embedding tables."""
  lifecycle: dict[str, Any] = {}
  """When features earn their factors, fade and are deleted: fields of ops.policy.Policy. Admission
  and eviction that are not given are none; a threshold of theirs, here or of a slot, switches on
  what it is of."""
  model: Model
  """The layers and the loss."""
  train: Train = Train()
  """The training loop."""
  checkpoint: Checkpoint = Checkpoint()
  """When the state is saved."""
  export: Export = Export()
  """What is written for serving, and when."""
  sync: Sync = Sync()
  """How the processes of a job meet."""
  metrics: Metrics = Metrics()
  """How quality is measured."""

  @property
  def slots(self) -> list[Slot]:
    """Slots in canonical order: by table (as in `sparse.tables`), then as listed.

    A slot's position in it is its field's index.
    """
    order = list(self.sparse.tables)
    return sorted(self.data.slots, key=lambda s: order.index(s.table))

  def poolings(self) -> list[str]:
    """How each slot's sum is divided, [F]: one feature divides by itself."""
    several = [s.separator or s.value_separator or s.sequence for s in self.slots]
    return [s.pooling if many else 'sum' for s, many in zip(self.slots, several)]

  def slot_ids(self) -> dict[str, int]:
    """The slot id in the top bits of keys, by slot.

    It is 1 + the slot's position in `data.slots`, or the id of the slot that it shares.
    """
    own = {s.name: i + 1 for i, s in enumerate(self.data.slots)}
    return {s.name: own[s.shares or s.name] for s in self.data.slots}

  @property
  def labels(self) -> list[Label]:
    """What is predicted: `data.labels`, or the one label in the same form."""
    data = self.data
    one = Label(name=data.label, positive=data.label_positive, loss=self.model.loss, click=1.0)
    return data.labels or [one]

  def own_slot_ids(self) -> dict[str, int]:
    """As `slot_ids`, of the slots that have features of their own."""
    ids = self.slot_ids()
    return {s.name: ids[s.name] for s in self.slots if s.shares is None}

  def policy(self) -> Policy:
    """The lifecycle's policy, per-slot thresholds included."""
    ids = self.slot_ids()
    per_slot = {ids[s.name]: s.lifecycle for s in self.data.slots if s.lifecycle}
    modes = {kind: (self._modes(kind) or ['none'])[0] for kind in LIFECYCLE_MODES}
    return Policy(**modes | self.lifecycle, per_slot=per_slot)

  def _modes(self, kind: str) -> list[str]:
    """The modes of admission or eviction that the given thresholds are of."""
    given = set(self.lifecycle).union(*(s.lifecycle for s in self.data.slots))
    return list(dict.fromkeys(mode for key, mode in LIFECYCLE_MODES[kind].items() if key in given))


# What a threshold switches on where the mode is not given.
LIFECYCLE_MODES = {
  'admission': {
    'admission_threshold': 'score',
    'admission_count': 'count',
    'admission_probability': 'probability',
  },
  'eviction': {
    'delete_threshold': 'score',
    'min_age_days': 'score',
    'delete_after_unseen_days': 'unseen',
  },
}
# Arguments of tf.keras.optimizers.legacy, beside the learning rate.
_CLIPPING = ('clipnorm', 'clipvalue', 'global_clipnorm', 'decay')
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


def _of_other_kinds(name: str, kind: str, valid: Sequence[str]) -> str:
  """As nearest, of an argument that an optimizer has not; another kind may have it."""
  every = {one for names in OPTIMIZER_ARGS.values() for one in names}
  close = difflib.get_close_matches(str(name).lower(), sorted({*every, *valid}), n=1, cutoff=0.7)
  if not close or close[0] in valid:
    return nearest(name, valid)
  kinds = ' and '.join(k for k, names in OPTIMIZER_ARGS.items() if close[0] in names)
  return f"; '{close[0]}' is of {kinds}; {kind} takes {', '.join(valid)}"


def short(value: Any, length: int = 120) -> str:
  """A value as messages show it: its repr, cut where it is long."""
  if isinstance(value, int) and value.bit_length() > 400:  # Python shows none of 4,300 digits
    return f'a number of {value.bit_length()} bits'
  text = repr(value)
  return text if len(text) <= length else text[: length - 1] + '…'


def _fields_at(loc: Sequence[str | int]) -> list[str]:
  """The valid keys of the model that holds the key at `loc`."""
  model: Any = Config
  for part in loc[:-1]:
    if isinstance(part, int):
      continue
    fields = getattr(model, 'model_fields', {})
    if part not in fields:  # a key of a dict of models (a table's name)
      continue
    model = next((inner for inner, _ in _sections_in(fields[part].annotation, '')), model)
  return list(getattr(model, 'model_fields', {}))


def _sections_with(key: str) -> list[str]:
  """The sections that have a key of exactly this name, as in `train.dense_optimizer`."""
  found = []

  def look(section: type[Section], path: str) -> None:
    for name, field in section.model_fields.items():
      if name == key:
        found.append(path or 'the top level')
      for inner, place in _sections_in(field.annotation, f'{path}.{name}'.strip('.')):
        look(inner, place)

  look(Config, '')
  return found


def _sections_in(annotation: Any, path: str) -> Iterator[tuple[type[Section], str]]:
  """Yields the sections that a key's annotation holds, each with its path."""
  if isinstance(annotation, type) and issubclass(annotation, Section):
    yield annotation, path
  inner = {list: f'{path}.0', dict: f'{path}.NAME'}.get(typing.get_origin(annotation), path)
  for argument in typing.get_args(annotation):
    yield from _sections_in(argument, inner)


def _as_in(error: Any) -> str:
  """Says what stands in a section, or in a list, by an example; `error` is one of pydantic's."""
  found = error['input']
  if error['type'] == 'list_type':
    return 'a list' + (f", as in ['{found}']" if isinstance(found, str) else '')
  off = ', or null for off' if found is False else ''
  model = globals().get(error.get('ctx', {}).get('class_name'))
  if model is None:
    return f'keys with values{off}'
  value = found if isinstance(found, str) else '…'
  return f'keys with values, as in {{{next(iter(model.model_fields))}: {value}}}{off}'


def _one_line(error: pydantic.ValidationError, where: str) -> str:
  first = error.errors()[0]
  loc = first['loc']
  key = '.'.join(str(p) for p in loc)
  if first['type'] == 'extra_forbidden':
    sections = _sections_with(str(loc[-1]))
    told = f"; '{loc[-1]}' is a key of {', '.join(sections)}" if sections else ''
    return f"{where}: unknown key '{key}'{told or nearest(loc[-1], _fields_at(loc))}"
  if first['type'] == 'missing':
    return f"{where}: key '{key}' is missing; it is required"
  wanted = first['msg'][0].lower() + first['msg'][1:]
  if first['type'] == 'string_type' and isinstance(first['input'], bool):
    wanted = "wanted a text; YAML reads yes, no, on and off so, but not 'yes' in quotes"
  elif first['type'] in ('model_type', 'dict_type', 'list_type'):
    wanted = 'wanted ' + _as_in(first)
  return f"{where}: key '{key}': found {short(first['input'])}; {wanted}"


def _check_tasks(cfg: Config, fail: Callable[[str, str], NoReturn]) -> None:
  """Checks of data.labels and model.tasks; `fail(key, text)` raises."""
  data, model = cfg.data, cfg.model
  names = [label.name for label in data.labels]
  if not names:
    for key in ('shared', 'tasks'):
      if getattr(model, key):
        fail(f'model.{key}', 'is for several tasks; wanted data.labels, or this left out')
    return
  if len(names) < 2:
    fail('data.labels', f'found {names}; wanted at least two, or the one as data.label')
  if data.label != 'label' or data.label_positive is not None or data.label_is != 'binary':
    fail('data.labels', 'found beside the keys of data.label; wanted either')
  for name in names:
    if not re.fullmatch(r'[A-Za-z]\w*', name, re.ASCII):
      fail('data.labels', f"found the name '{name}'; wanted letters, digits and underscores alone")
    if names.count(name) > 1:
      fail('data.labels', f"the name '{name}' stands twice; wanted distinct names")
  for i, label in enumerate(data.labels):
    if label.positive is None:
      continue
    if label.loss == 'squared_error':
      fail(f'data.labels.{i}.positive', 'makes labels of 0 and 1; wanted a loss for them with it')
    try:
      re.compile(label.positive)
    except re.error as e:
      fail(
        f'data.labels.{i}.positive',
        f'found {label.positive!r}; wanted a regular expression ({e})',
      )
  for name in model.tasks:
    if name not in names:
      fail(f'model.tasks.{name}', 'is no name of data.labels' + nearest(name, names))
  for name in names:
    if name not in model.tasks:
      fail('model.tasks', f"has no '{name}', a name of data.labels; wanted an entry for each")
    if not (model.tasks[name].interactions or model.interactions):
      fail(f'model.tasks.{name}', 'has no interactions; wanted at least one')
  shares = [label.click or 0.0 for label in data.labels]
  if sum(shares) > 1 + 1e-6:
    fail('data.labels', f'found click {shares}; wanted shares that sum to at most 1')
  losses = {label.name: label.loss for label in data.labels}
  for name, task in model.tasks.items():
    seen = [name]
    while (given := model.tasks[seen[-1]].given) is not None:
      if given not in names or given in seen:
        key = f'model.tasks.{seen[-1]}.given'
        fail(key, f"found '{given}'; wanted another task" + nearest(given, set(names) - set(seen)))
      seen.append(given)
    if task.given is not None and 'squared_error' in (losses[name], losses[task.given]):
      fail(f'model.tasks.{name}.given', "wants probabilities; found loss 'squared_error'")
  if model.loss != 'log_loss':
    fail('model.loss', f"found '{model.loss}'; with data.labels the loss is a key of each label")
  if model.negative_sampling_rate != 1:
    fail(
      'model.negative_sampling_rate',
      f'found {model.negative_sampling_rate}; with data.labels it is not known of which label; '
      'wanted 1',
    )


def _check_schedule(cfg: Config, fail: Callable[[str, str], NoReturn]) -> None:
  """Checks of train.schedule; `fail(key, text)` raises."""
  schedule = cfg.train.schedule
  if schedule is None:
    return
  if schedule.kind == 'warmup' and not schedule.warmup_steps:
    fail(
      'train.schedule.warmup_steps', "found 0 with kind 'warmup'; wanted how long the rates rise"
    )
  if schedule.kind != 'warmup' and schedule.period is None:
    fail(
      'train.schedule.period',
      f"found null with kind '{schedule.kind}'; wanted the steps of a fall (trainer.run --dry_run "
      'tells how many an epoch has)',
    )
  for name, kinds in (
    ('period', ('cosine', 'step')),
    ('factor', ('step',)),
    ('floor', ('cosine',)),
  ):
    default = Schedule.model_fields[name].default
    if getattr(schedule, name) != default and schedule.kind not in kinds:
      fail(
        f'train.schedule.{name}', f"does nothing with kind '{schedule.kind}'; wanted it left out"
      )
  if cfg.sync.mode == 'ps_geo':
    fail(
      'train.schedule',
      "found with sync.mode 'ps_geo', whose workers each count their own steps; wanted it left "
      "out, or mode 'ps' or 'ps_async'",
    )


def _check(cfg: Config, where: str) -> None:
  """Checks that span several keys."""

  def fail(key: str, text: str) -> NoReturn:
    raise ConfigError(f"{where}: key '{key}': {text}")

  data, names = cfg.data, [s.name for s in cfg.data.slots]
  if not names:
    fail('data.slots', 'found []; wanted at least one slot')
  if len(names) > MAX_SLOTS:
    fail('data.slots', f'found {len(names)} slots; wanted at most {MAX_SLOTS}')
  for what, found in (('data.slots', names), ('data.dense', [d.name for d in data.dense])):
    twice = {n for n in found if found.count(n) > 1}
    if twice:
      fail(what, f"the name '{min(twice)}' stands twice; wanted distinct names")
  for key, columns in (
    ('data.slots', [s.column or s.name for s in data.slots]),
    ('data.dense', [d.name for d in data.dense]),
    ('data.weight', [data.weight]),
    ('data.group', [data.group]),
  ):
    for label in [one.column or one.name for one in data.labels] or [data.label]:
      if label in columns:
        fail(key, f"found '{label}', which is a label: the model would read what it predicts")
  by_name = {s.name: s for s in data.slots}
  for i, s in enumerate(data.slots):
    if s.table not in cfg.sparse.tables:
      fail(
        f'data.slots.{i}.table',
        f"found '{s.table}'; wanted a table of sparse.tables" + nearest(s.table, cfg.sparse.tables),
      )
    if s.shares is not None:
      if s.shares not in by_name or s.shares == s.name:
        fail(
          f'data.slots.{i}.shares',
          f"found '{s.shares}'; wanted another slot" + nearest(s.shares, set(names) - {s.name}),
        )
      if by_name[s.shares].shares:
        fail(
          f'data.slots.{i}.shares',
          f"'{s.shares}' itself shares '{by_name[s.shares].shares}'; wanted a slot with features "
          'of its own',
        )
      if by_name[s.shares].table != s.table:
        fail(
          f'data.slots.{i}.table',
          f"found '{s.table}'; wanted '{by_name[s.shares].table}', the table of '{s.shares}', "
          'which it shares',
        )
    if s.sequence and s.shares is None:
      fail(f'data.slots.{i}.shares', "found null; a sequence wants its candidate's slot")
    if s.sequence and s.value_separator:
      fail(f'data.slots.{i}.value_separator', 'a sequence has no values; wanted null')
    if s.value_separator and not s.separator and s.value_separator == data.delimiter:
      fail(
        f'data.slots.{i}.value_separator',
        f'found {s.value_separator!r}, which is data.delimiter; wanted another character',
      )
  for name in cfg.sparse.tables:
    if not any(s.table == name for s in data.slots):
      fail(
        f'sparse.tables.{name}', 'no slot uses this table; wanted it named by a slot or left out'
      )
  for name, table in cfg.sparse.tables.items():
    if cfg.sparse.store == 'tfra' and 'catch_up' in (table.linear.l2_mode, table.factors.l2_mode):
      fail(
        f'sparse.tables.{name}',
        "l2_mode 'catch_up' wants sparse.store 'rows'; found 'tfra', which takes no step on rows "
        'outside the batch',
      )
    if table.dtype == 'bfloat16' and cfg.sparse.store == 'tfra':
      fail(
        f'sparse.tables.{name}.dtype',
        "found 'bfloat16', which wants sparse.store 'rows', not 'tfra'",
      )
  if not data.train and not data.watch:
    fail('data.train', 'found []; wanted files, or data.watch set to a directory')
  if data.watch:
    if cfg.train.epochs != 1:
      fail('train.epochs', f'found {cfg.train.epochs}; with data.watch each pass is trained once')
    if cfg.train.plateau:
      fail('train.plateau', 'with data.watch there are no epochs to compare; wanted it left out')
  if data.close_day_after_hours is not None and data.day_pattern is None:
    fail('data.close_day_after_hours', 'needs data.day_pattern, which says what a day is')
  if data.late != 'train' and data.day_pattern is None:
    fail('data.late', f"found '{data.late}'; it needs data.day_pattern, which says what is late")
  if data.day_pattern is not None:
    try:
      groups = re.compile(data.day_pattern).groups
    except re.error as e:
      fail('data.day_pattern', f'found {data.day_pattern!r}; wanted a regular expression ({e})')
    if groups < 1:
      fail(
        'data.day_pattern',
        f'found {data.day_pattern!r}; wanted a group in parentheses that holds the day',
      )
  _check_tasks(cfg, fail)
  interactions = cfg.model.all_interactions()
  shared = interactions.pop('model.shared', None)
  kinds = [t.kind for t in interactions.values()]
  if not kinds:
    fail('model.interactions', 'found []; wanted at least one interaction')
  for key, kind in [(key, t.kind) for key, t in interactions.items()]:
    if kind not in INTERACTIONS and '.' not in kind:
      fail(
        key,
        f"unknown interaction '{kind}'"
        + nearest(kind, INTERACTIONS)
        + ', or give the dotted path of a Keras layer',
      )
    if kind == 'din' and not any(s.sequence for s in data.slots):
      fail(key, "found 'din', which reads histories; wanted a slot with `sequence`")
    if kind == 'tower' and shared is None:
      fail(key, "found 'tower', which reads model.shared; wanted that set, or 'dnn'")
  if shared is not None and shared.kind not in SHARED and '.' not in shared.kind:
    fail(
      'model.shared',
      f"unknown layer '{shared.kind}'"
      + nearest(shared.kind, SHARED)
      + ', or give the dotted path of a Keras layer',
    )
  widths = {s.name: cfg.sparse.tables[s.table].width for s in data.slots}
  for kind in ('fm', 'fwfm', 'ffm', 'dlrm'):
    if kind in kinds and len(set(widths.values())) > 1:
      fail(
        'model.interactions',
        f"'{kind}' needs one width for all slots; found widths {sorted(set(widths.values()))}",
      )
  factors = len(data.slots) if 'ffm' in kinds else 1
  for name, table in cfg.sparse.tables.items():
    if table.width * factors > MAX_FACTORS:
      of_slots = f', times {factors} slots of ffm,' if factors > 1 else ''
      fail(
        f'sparse.tables.{name}.width',
        f'found {table.width}{of_slots} of factors a row; wanted at most {MAX_FACTORS:,}',
      )
  if 'ffm' in kinds and len(cfg.sparse.tables) > 1:
    fail('model.interactions', f"'ffm' needs one table; found {sorted(cfg.sparse.tables)}")
  if data.label_is == 'real' and cfg.model.loss != 'squared_error':
    fail('model.loss', f"found '{cfg.model.loss}'; data.label_is 'real' wants 'squared_error'")
  gate = cfg.export.gate
  if gate and not cfg.train.progressive_validation:
    fail('export.gate', 'needs train.progressive_validation true; found false')
  if gate and gate.metric == 'gauc' and not data.group:
    fail('export.gate.metric', "found 'gauc'; it needs data.group, the column of the user")
  loss = cfg.labels[0].loss
  if gate and (gate.metric == 'rmse') != (loss == 'squared_error'):
    fail(
      'export.gate.metric',
      f"found '{gate.metric}'; the loss '{loss}' has "
      + ('rmse' if loss == 'squared_error' else 'auc, gauc and logloss'),
    )
  _check_schedule(cfg, fail)
  if cfg.train.plateau and not data.valid:
    fail('train.plateau', 'needs data.valid; found no validation files')
  if cfg.train.plateau and cfg.train.plateau.task is not None:
    names = [label.name for label in data.labels]
    if cfg.train.plateau.task not in names:
      fail(
        'train.plateau.task',
        f"found '{cfg.train.plateau.task}'; wanted a name of data.labels"
        + nearest(cfg.train.plateau.task, names),
      )
  plateau_label = next(
    (x for x in cfg.labels if cfg.train.plateau and x.name == cfg.train.plateau.task), cfg.labels[0]
  )
  if cfg.train.plateau and plateau_label.loss == 'squared_error':
    fail('train.plateau', "has no metric of 'squared_error'; wanted it left out")
  if cfg.train.plateau and cfg.train.plateau.metric == 'gauc' and not data.group:
    fail('train.plateau.metric', "found 'gauc'; it needs data.group, the column of the user")
  if cfg.sync.dense_allreduce == 'connections' and cfg.sync.row_exchange == 'horovod':
    fail(
      'sync.row_exchange',
      "found 'horovod' with sync.dense_allreduce 'connections'; wanted 'connections' for rows too, "
      "or 'horovod' for both",
    )
  if cfg.sync.ports and cfg.sync.ports[0] > cfg.sync.ports[1]:
    fail('sync.ports', f'found {list(cfg.sync.ports)}; wanted [first, last] with first <= last')
  known = {f.name for f in dataclasses.fields(Policy)} - {'per_slot'}
  for place, keys in [('lifecycle', cfg.lifecycle)] + [
    (f'data.slots.{i}.lifecycle', s.lifecycle) for i, s in enumerate(data.slots)
  ]:
    for key in keys:
      if key not in known:
        raise ConfigError(f"{where}: unknown key '{place}.{key}'{nearest(key, known)}")
  for kind in LIFECYCLE_MODES:
    modes = cfg._modes(kind)
    if kind not in cfg.lifecycle and len(modes) > 1 and kind == 'admission':
      fail('lifecycle', f'found thresholds of {modes}; wanted lifecycle.{kind} to say which counts')
  optimizer = cfg.train.dense_optimizer
  valid = (*OPTIMIZER_ARGS[optimizer.kind], *_CLIPPING)
  for name, value in optimizer.args.items():
    key = f'train.dense_optimizer.args.{name}'
    if name not in valid:
      raise ConfigError(
        f"{where}: unknown key '{key}'{_of_other_kinds(name, optimizer.kind, valid)}"
      )
    if not isinstance(value, (int, float)) or not abs(value) < math.inf:
      fail(key, f'found {short(value)}; wanted a finite number')
    if name in ('beta_1', 'beta_2', 'momentum', 'rho') and not 0 <= value < 1:
      fail(key, f'found {short(value)}; wanted a number >= 0 and < 1')
    if value < 0 and name != 'learning_rate_power':
      fail(key, f'found {short(value)}; wanted a number >= 0')
    if value > 0 and name == 'learning_rate_power':
      fail(key, f'found {short(value)}; wanted a number <= 0')
  try:
    cfg.policy()
  except (ValueError, TypeError) as e:
    raise ConfigError(f"{where}: key 'lifecycle': {e}") from None


class _Loader(yaml.SafeLoader):
  """YAML's plain values: a key may stand once, and a date is a text."""

  yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(':timestamp')]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
  }

  def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    keys = [k for k, _ in node.value if isinstance(k, yaml.ScalarNode) and k.value != '<<']
    names = [k.value for k in keys]
    for i, key in enumerate(keys):
      if key.value in names[:i]:
        problem = f'the key {short(key.value)} stands twice'
        raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
    return super().construct_mapping(node, deep)


MAX_DEPTH, MAX_NODES = 40, 1_000_000


def _read_yaml(text: str, where: str) -> Any:
  """YAML text as plain values. Raises: ConfigError with one line."""
  try:
    tree = yaml.load(text, _Loader)
  except yaml.YAMLError as e:
    mark = getattr(e, 'problem_mark', None)
    at = f':{mark.line + 1}' if mark else ''
    problem = ' '.join(str(getattr(e, 'problem', None) or e).split())
    raise ConfigError(f'{where}{at}: not YAML: {problem}') from None
  except RecursionError:
    raise ConfigError(f'{where}: values are nested too deep; wanted a config') from None
  except (ValueError, TypeError, LookupError, AttributeError) as e:  # of !!int "" and the like
    raise ConfigError(f'{where}: not YAML: {" ".join(str(e).split())[:200]}') from None
  level, nodes = [tree], 0
  for _ in range(MAX_DEPTH):  # anchors may make a short text a huge tree, or one without end
    level = [v for n in level for v in _children(n)]
    nodes += len(level)
    if not level or nodes > MAX_NODES:
      break
  if level:
    raise ConfigError(
      f'{where}: found values nested over {MAX_DEPTH} deep, or over {MAX_NODES:,} of them; wanted '
      'a config'
    )
  return tree


def _children(node: Any) -> list[Any]:
  """What a list or a mapping holds."""
  if isinstance(node, dict):
    return list(node.values())
  return node if isinstance(node, list) else []


def _is_index(part: str, node: list[Any]) -> bool:
  return re.fullmatch('[0-9]{1,9}', part) is not None and int(part) < len(node)


def _set(tree: dict[str, Any], assignment: str) -> None:
  """Applies one `a.b.0.c=value`; the value is YAML."""
  key, equals, text = assignment.partition('=')
  if not equals or not key:
    raise ConfigError(f'--set {assignment}: wanted KEY=VALUE, as in --set train.batch_size=1024')
  value = _read_yaml(text, f'--set {short(assignment)}')
  *path, last = key.split('.')
  node = tree
  for i, part in enumerate(path):
    if isinstance(node, list):
      if not _is_index(part, node):
        raise ConfigError(
          f"--set {assignment}: '{'.'.join(path[: i + 1])}' is not there; the list has "
          f'{len(node)} entries'
        )
      node = node[int(part)]
    elif isinstance(node, dict):
      if node.get(part) is None:
        node[part] = {}
      node = node[part]
    if not isinstance(node, (dict, list)):
      raise ConfigError(
        f"--set {assignment}: '{'.'.join(path[: i + 1])}' is the value {node!r}, which holds no "
        'keys'
      )
  if isinstance(node, list):
    if not _is_index(last, node):
      raise ConfigError(
        f"--set {assignment}: '{last}' is not there; the list has {len(node)} entries"
      )
    node[int(last)] = value
  else:
    node[last] = value


def _kept(tree: Any, old: Any) -> Any:
  """Returns `tree` with what it leaves out as `old` has it, but where `kind` is another."""
  if not isinstance(tree, dict) or not isinstance(old, dict):
    return tree
  if 'kind' in tree and tree['kind'] != old.get('kind'):
    return tree
  return old | {key: _kept(value, old.get(key)) for key, value in tree.items()}


def _with_defaults_of_run(tree: dict[str, Any]) -> dict[str, Any]:
  """Returns `tree` with the defaults that its run_dir was begun with, where it says nothing.

  Defaults may change from release to release; a run goes on with those that it has.
  """
  path = os.path.join(str(tree.get('run_dir') or ''), 'config.yaml')
  if not tree.get('run_dir') or not os.path.isfile(path):
    return tree
  old = _read_yaml(_text_of_run(path), path)
  old_sparse, old_train = (
    dict(old[key]) if isinstance(old, dict) and isinstance(old.get(key), dict) else {}
    for key in ('sparse', 'train')
  )
  sparse = tree.get('sparse', {})
  if not isinstance(sparse, dict):
    return tree
  tables = sparse.get('tables')
  if isinstance(tables, dict) and isinstance(old_sparse.get('tables'), dict):
    old_sparse['tables'] = {n: t for n, t in old_sparse['tables'].items() if n in tables}
  train = {key: old_train[key] for key in ('epochs', 'plateau', 'batch_size') if key in old_train}
  return tree | {'sparse': _kept(sparse, old_sparse), 'train': _kept(tree.get('train', {}), train)}


def load(path: str, overrides: Sequence[str] = (), run_dir: str | None = None) -> Config:
  """Reads, overrides and checks a config.

  Args:
    path: a YAML file.
    overrides: strings `a.b=value`.
    run_dir: replaces `run_dir` where given.
  Returns:
    A frozen `Config`.
  Raises:
    ConfigError: with one line.
  """
  return parse(_text_of(path), path, overrides, run_dir)


def _text_of(path: str) -> str:
  try:
    with open(path, encoding='utf-8') as f:
      return f.read()
  except FileNotFoundError:
    raise ConfigError(f'--config {path}: no such file') from None
  except IsADirectoryError:
    raise ConfigError(f'--config {path}: found a directory; wanted a YAML file') from None
  except UnicodeDecodeError as e:
    raise ConfigError(f'{path}: not YAML: {e}') from None


_STAMP = '# crc32 of what follows: '


def write_of_run(cfg: Config) -> None:
  """Writes config.yaml of the config's run_dir: a first line with a checksum, then `dump`."""
  path, text = os.path.join(cfg.run_dir, 'config.yaml'), dump(cfg)
  stamp = f'{_STAMP}{zlib.crc32(text.encode()):08x}\n'
  files.write_synced(path + '.new', (stamp + text).encode())
  os.replace(path + '.new', path)


def load_of_run(run_dir: str, overrides: Sequence[str] = ()) -> Config:
  """As `load`, of the config.yaml that a run has written.

  Raises:
    ConfigError: also where its bytes are not those that were written.
  """
  path = os.path.join(run_dir, 'config.yaml')
  return parse(_text_of_run(path), path, overrides, run_dir)


def _text_of_run(path: str) -> str:
  text = _text_of(path)
  stamp, _, rest = text.partition('\n')
  # Earlier releases wrote none.
  if stamp.startswith(_STAMP) and stamp != f'{_STAMP}{zlib.crc32(rest.encode()):08x}':
    raise ConfigError(
      f'{path}: its checksum is not that of its first line; wanted the file as the run wrote it, '
      'as checkpoints/*/config.yaml has it, and changes in another file or by --set'
    )
  return text


def parse(
  text: str, where: str, overrides: Sequence[str] = (), run_dir: str | None = None
) -> Config:
  """As `load`, of YAML text; `where` says in messages where it comes from."""
  tree = _read_yaml(text, where)
  if not isinstance(tree, dict):
    raise ConfigError(
      f'{where}: found {type(tree).__name__}; wanted a mapping with keys data, model, …'
    )
  for assignment in overrides:
    _set(tree, assignment)
  if run_dir:
    tree['run_dir'] = run_dir
  try:
    cfg = Config.model_validate(_with_defaults_of_run(tree))
  except pydantic.ValidationError as e:
    raise ConfigError(_one_line(e, where)) from None
  _check(cfg, where)
  return cfg


def flatten(tree: Any, prefix: str = '') -> dict[str, Any]:
  """Returns nested dicts and lists as one dict, by key as in 'data.slots.0.name'."""
  if not isinstance(tree, (dict, list, tuple)) or not tree:
    return {prefix[:-1]: tree}
  items = tree.items() if isinstance(tree, dict) else enumerate(tree)
  return {k: v for name, sub in items for k, v in flatten(sub, f'{prefix}{name}.').items()}


def dump(cfg: Config) -> str:
  """The resolved config as YAML text; `load` reads it back to an equal config."""
  dumper = getattr(yaml, 'CSafeDumper', yaml.SafeDumper)  # the C library's is 10 times faster
  return yaml.dump(cfg.model_dump(), Dumper=dumper, sort_keys=False, allow_unicode=True)


def columns_wanted(cfg: Config, path: str) -> str:
  """Returns what the data of a config must look like, for who does not have it, in one line."""
  data = cfg.data
  slots = [s.column or s.name for s in data.slots]
  dense = [d.name for d in data.dense]
  names = list(dict.fromkeys([*(label.name for label in cfg.labels), *slots, *dense]))
  shown = ', '.join(names[:12]) + (f' and {len(names) - 12} more' if len(names) > 12 else '')
  return (
    f'wanted files with the columns {shown}; the first lines of {path} may say where they come from'
  )


if __name__ == '__main__':
  # `--print` shows every key with its default and what it means; docs/config.md is made by
  # trainer.reference.
  if sys.argv[1:] != ['--print']:
    sys.exit(f'error: found {" ".join(sys.argv[1:])!r}; wanted python -m trainer.config --print')
  print(schema_text.commented_yaml(Config, {'lifecycle': Policy}), end='')
