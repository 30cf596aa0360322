"""The sections below `data`: where the log lies and how to read it."""

from typing import Literal

from trainer.config.lifecycle import Thresholds
from trainer.config.section import (
  NonNegative,
  NonNegativeInt,
  Positive,
  PositiveInt,
  Section,
  Share,
)

MAX_SLOTS = 2047  # slot ids take the 11 bits under the sign of a key
Loss = Literal['log_loss', 'focal', 'squared_error', 'fake_negative']


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
  lifecycle: Thresholds | None = None
  """Thresholds that differ for this slot; null: those of `lifecycle`."""


class DenseColumn(Section):
  """A numeric column; blank means missing."""

  name: str
  """Its column in the file."""
  transform: Literal['none', 'log1p', 'standardise', 'log1p_standardise'] = 'none'
  """log1p is sign(x)·log(1 + |x|); standardise is (x − mean) / std, after log1p."""
  missing: float = 0.0
  """What the model sees, after the transform, where the value is missing."""


class Label(Section):
  """One label of several. Where it is blank, the sample brings no loss for its task."""

  name: str
  """Names the task in reports, in model.tasks and in serving."""
  column: str | None = None
  """Its column in the file; null: the label's name."""
  positive: str | None = None
  """As data.label_positive."""
  negative: str | None = None
  """As data.label_negative."""
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
  label: str | None = 'label'
  """The column of the label: 0 or 1, or any number where model.loss is squared_error. With
  model.retrieval a sample of label 1 is a positive; null: each is."""
  label_positive: str | None = None
  """A regular expression: a label that matches it whole is 1, any other text 0. null: labels are 0
  and 1."""
  label_negative: str | None = None
  """A regular expression: a label that matches it whole is 0; one that matches neither this nor
  label_positive (null: 1) is a bad record. It also says that passes whose labels are all 0, or all
  1, are meant: in data.train they are refused otherwise."""
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
  max_refused_passes: NonNegativeInt = 0
  """How many passes in a row may be set aside because they are empty, damaged, wrongly named or
  hold too many bad records; one more ends the run, one that can be trained on starts the count
  anew. The default is 10 with data.watch."""
  max_days_ahead: PositiveInt | None = None
  """How many days after the day that the stream has come to the day of a pass may be; one further
  ahead is refused, because its date is most likely wrong and would make all others late. Plain
  numbers count as days themselves. The default is 14 with data.watch; null: any."""
  close_day_after_hours: Positive | None = None
  """Hours without a pass after which the open day ends; days without passes then end too, and age
  the features. null: a day ends when a pass of a later one comes, and empty days do not count."""
  keep_prepared_passes: NonNegativeInt | None = None
  """How many of the passes that the run converted are kept in run_dir/prepared once they were
  trained on. The default is 2 with data.watch; null: all."""
