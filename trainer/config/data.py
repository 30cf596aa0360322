"""The section `data`: where the log is, and how to read it."""

import re
from collections.abc import Collection, Iterator
from typing import Literal

import pydantic

from trainer.config.columns import Expression, From, Made
from trainer.config.lifecycle import Thresholds
from trainer.config.section import (
  NonNegative,
  NonNegativeInt,
  Positive,
  PositiveInt,
  RegularExpression,
  Section,
  Share,
  check_distinct,
  wrong,
)
from trainer.errors import nearest

MAX_SLOTS = 2047  # a slot id takes the 11 bits of a key below the sign bit
DAY_GROUPS = 'year', 'month', 'day'  # the names that groups of day_pattern may have
Loss = Literal['log_loss', 'focal', 'squared_error', 'fake_negative']


class History(Section):
  """A history: a slot whose features are in order, the oldest first."""

  max_length: PositiveInt
  """L: a longer history is cut to its last L features."""


class Slot(Section):
  """A column of the log with categorical features."""

  name: str
  """Names the slot in reports and in other keys."""
  column: str | None = None
  """Its column in the file; null: the slot's name. ctx.device.os is a nested field, unless
  the file has a column of that name."""
  made: From = pydantic.Field(None, alias='from')
  """How it is made from other columns: bins of a number, a cross, … (docs/data.md); null: it is a
  column of the file."""
  separator: str | None = None
  """Separates the features of a multi-valued slot; null: each value is one feature."""
  value_separator: str | None = None
  """Separates a feature from its value x_i, as in sports:0.5; null: every x_i is 1."""
  table: str = 'default'
  """The table of sparse.tables that holds the rows of this slot."""
  shares: str | None = None
  """Another slot whose features (keys and rows) this one uses. sparse.shared_lists says how lists
  of them are added up."""
  sequence: History | None = None
  """Makes the slot a history: a sequence of features of the slot that it `shares`, the candidate.
  din compares the two."""
  pooling: Literal['sum', 'mean', 'sqrtn'] = 'mean'
  """How several features of a sample become the slot vector that dnn and cross read."""
  counts: bool = False
  """Whether the layers also read the counts of the slot's features, as dense columns: the
  smoothed log-odds of a click, and how much the feature's own impressions weigh in them, both as of
  before the sample (docs/layers.md, Counts)."""
  lifecycle: Thresholds | None = None
  """Thresholds that differ for this slot; null: those of `lifecycle`."""

  @property
  def may_hold_several(self) -> bool:
    """Whether a sample may have several features in this slot."""
    made = self.made is not None and self.made.is_several
    return bool(self.separator or self.value_separator or self.sequence or made)

  @property
  def is_list_of_another(self) -> bool:
    """Whether a sample may have several features of another slot here, as in a history."""
    return self.shares is not None and self.may_hold_several

  @pydantic.model_validator(mode='after')
  def _check_separators(self) -> 'Slot':
    for key in ('separator', 'value_separator'):
      if getattr(self, key) == '':
        wrong(key, "found ''; wanted a text of at least one character, or null")
    return self

  @pydantic.model_validator(mode='after')
  def _check_sequence(self) -> 'Slot':
    if self.sequence and self.shares is None:
      wrong('shares', 'found null; a sequence needs the slot of its candidates, as in shares: item')
    if self.sequence and self.value_separator:
      wrong('value_separator', 'a sequence has no values; wanted null')
    return self


class DenseColumn(Section):
  """A numeric column; blank means missing."""

  name: str
  """Its column in the file, or the name of what `from` makes."""
  made: From = pydantic.Field(None, alias='from')
  """What it is made of: a time, text, lookup, expression or overlap; null: the column as
  it is."""
  transform: Literal['none', 'log1p', 'standardise', 'log1p_standardise'] = 'none'
  """log1p is sign(x)·log(1 + |x|); standardise is (x − mean) / std, after log1p."""
  missing: float = 0.0
  """Replaces a missing value, after the transform."""


class Label(Section):
  """One of several labels. A sample whose label is blank adds nothing to the loss of the task."""

  name: str
  """Names the task in reports, in model.tasks and in serving."""
  column: str | None = None
  """Its column in the file; null: the label's name."""
  positive: RegularExpression | None = None
  """As data.label_positive."""
  negative: RegularExpression | None = None
  """As data.label_negative."""
  loss: Loss = 'log_loss'
  """log_loss, focal and fake_negative (conversions that come late, docs/layers.md) want 0 or 1,
  squared_error any number."""
  weight: NonNegative = 1.0
  """The weight of the task's mean loss in the sum over tasks."""
  click: Share | None = None
  """How much of a click a positive label adds to the clicks of its features in the lifecycle; all
  labels together at most 1. null: 1 for the first label if no label sets it, else 0. To let a
  conversion count three times a click: .25 for the click, .75 for the conversion, and four times
  lifecycle.clk_coeff."""

  @pydantic.model_validator(mode='after')
  def _check_patterns(self) -> 'Label':
    for key, pattern in (('positive', self.positive), ('negative', self.negative)):
      if pattern is not None and self.loss == 'squared_error':
        wrong(key, 'makes labels of 0 and 1; wanted a loss for them with it')
    return self


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
  """The format of all these files; docs/data.md has a table. prepared: directories that
  ctr-prepare wrote; null: what each file's suffix says, or csv if it says nothing."""
  delimiter: str | None = None
  """Separates the fields of a csv line; a tab is written "\\t". null: a tab in files named
  .tsv, .tsv.gz and so on, and a comma in all others."""
  quoting: Literal['doubled', 'backslash', 'none'] = 'doubled'
  """How csv files quote texts, and write a quote within a quoted text. doubled: twice, as in
  "a ""b"", c"; backslash: as in "a \\"b\\", c", which Spark writes. none: nothing is quoted, as in
  logs of Hive, and each quote belongs to its text."""
  columns: list[str] | None = None
  """Names of the columns of a csv file without a header line."""
  label: str | None = 'label'
  """The column of the label: 0 or 1, or any number where model.loss is squared_error. With
  model.retrieval a sample of label 1 is a positive; null: every sample is."""
  label_positive: RegularExpression | None = None
  """A regular expression: a label that matches it whole is 1, any other text 0. A number or
  boolean matches however it is written: 4|5 takes 4.0, true takes TRUE. null: labels are 0 and
  1."""
  label_negative: RegularExpression | None = None
  """A regular expression: a label that matches it whole is 0. A record is bad if its label matches
  neither this nor label_positive (or, if that is null, is not 1). It also allows passes in
  data.train whose labels are all 0, or all 1, which are refused otherwise."""
  labels: list[Label] = []
  """Several labels in place of `label`, each with a task of the same name in model.tasks; the
  first is the main one."""
  weight: str | None = None
  """The column of the samples' weights; null: each weighs 1."""
  group: str | None = None
  """The column, usually the user, over whose values GAUC averages. Samples in which it is blank are
  left out of GAUC, and a warning tells their share."""
  slots: list[Slot]
  """The categorical columns."""
  dense: list[DenseColumn] = []
  """The numeric columns."""
  items: str | None = None
  """The table of items, with the columns that the item tower reads (docs/retrieval.md): a file of
  any format that a log may have, one line per item. null: that tower reads the item's id alone."""
  keep_texts: list[str] = []
  """Slots whose admitted features keep their texts, in memory and in checkpoints, so that
  run.embeddings and run.features show them even if the log is gone. A feature's row holds only a
  hash of its text."""
  day_pattern: RegularExpression | None = None
  """A regular expression that finds the day in a path: one group that holds a whole number or a
  date like 2024-01-31, or three groups of year, month and day: in this order, or in any with these
  names, as `(?P<day>..)`. Features age and are evicted at the end of each day; null: there are no
  days."""
  missing_values: list[str] = []
  """Texts that stand for a missing value, as NULL and NaN do in some logs; blank always does."""
  decimal: Literal['.', ','] = '.'
  """The decimal mark of numbers in text. 12.5% is read as 0.125."""
  thousands: str | None = None
  """The thousands separator of numbers in text, such as the dot in 1.234.567,8; null: none."""
  max_bad_share: Share = 0.0
  """The share of a pass's records that may be malformed; they are left out. A pass with more is
  refused."""
  shuffle: bool = True
  """Whether the samples of a training pass are shuffled, by seed."""
  late: Literal['train', 'skip', 'fail'] = 'train'
  """What to do with a pass that comes when its day has ended. train: it counts for the open day;
  skip: it is left out; fail: the run ends."""
  max_refused_passes: NonNegativeInt = 0
  """How many passes in a row may be set aside because they are empty, damaged, wrongly named or
  hold too many bad records. One more ends the run; a good pass resets the count. The default is 10
  with data.watch."""
  max_days_ahead: PositiveInt | None = None
  """The most days by which a pass may be ahead of the newest day of the stream. A pass further
  ahead is refused: its date is most likely wrong, and would make all later passes late. For days
  that are plain numbers, their difference counts. The default is 14 with data.watch; null: any."""
  close_day_after_hours: Positive | None = None
  """Hours without a pass after which the open day ends; days without passes then end too, and age
  the features. null: a day ends when a pass of a later day comes or, without data.watch, when the
  log ends; empty days do not count."""
  keep_prepared_passes: NonNegativeInt | None = None
  """How many converted passes are kept in run_dir/prepared after they were trained on. The default
  is 2 with data.watch; null: all."""

  @pydantic.model_validator(mode='after')
  def _check_thousands(self) -> 'Data':
    text = self.thousands
    if text is not None and (len(text) != 1 or text.isalnum() or text in f'+-%{self.decimal}'):
      wrong('thousands', f'found {text!r}; wanted one character that numbers do not have otherwise')
    return self

  @pydantic.model_validator(mode='after')
  def _check_slots(self) -> 'Data':
    names = [slot.name for slot in self.slots]
    if not names:
      wrong('slots', 'found []; wanted at least one slot')
    if len(names) > MAX_SLOTS:
      wrong('slots', f'found {len(names)} slots; wanted at most {MAX_SLOTS}')
    check_distinct('slots', names)
    check_distinct('dense', [column.name for column in self.dense])
    by_name = dict(zip(names, self.slots))
    for i, slot in enumerate(self.slots):
      delimiter = self.delimiter or ','
      if slot.value_separator == delimiter and not slot.separator:
        wrong(f'slots.{i}.value_separator', f'found {delimiter!r}, which is data.delimiter')
      if slot.shares is None:
        continue
      key, shared = f'slots.{i}.shares', by_name.get(slot.shares)
      if shared is None or shared is slot:
        others = set(names) - {slot.name}
        wrong(key, f"found '{slot.shares}'; wanted another slot{nearest(slot.shares, others)}")
      if shared.shares:
        wrong(key, f"'{slot.shares}' itself shares '{shared.shares}'; wanted the latter")
      if shared.table != slot.table:
        wanted = f"'{shared.table}', the table of '{slot.shares}', which it shares"
        wrong(f'slots.{i}.table', f"found '{slot.table}'; wanted {wanted}")
    own = {name for name, slot in by_name.items() if slot.shares is None}
    for name in self.keep_texts:
      if name not in own:
        shared = name in by_name and by_name[name].shares
        wanted = f"'{shared}', which it shares" if shared else f'a slot{nearest(name, own)}'
        wrong('keep_texts', f"found '{name}'; wanted {wanted}")
    check_distinct('keep_texts', self.keep_texts)
    return self

  @pydantic.model_validator(mode='after')
  def _check_no_column_is_a_label(self) -> 'Data':
    labels = [label.column or label.name for label in self.labels]
    labels = labels or ([self.label] if self.label is not None else [])
    for key, columns in (
      ('slots', [name for slot in self.slots for name, _ in self.columns_of(slot)]),
      ('dense', [name for column in self.dense for name, _ in self.columns_of(column)]),
      ('weight', [self.weight]),
      ('group', [self.group]),
    ):
      if read := [label for label in labels if label in columns]:
        wrong(key, f"found '{read[0]}', which is a label: the model would read what it predicts")
    return self

  @pydantic.model_validator(mode='after')
  def _check_labels(self) -> 'Data':
    names = [label.name for label in self.labels]
    if not names:
      return self
    if len(names) < 2:
      wrong('labels', f'found {names}; wanted at least two, or the one as data.label')
    if (self.label, self.label_positive, self.label_negative) != ('label', None, None):
      wrong('labels', 'found beside the keys of data.label; wanted one of the two')
    for name in names:
      if not re.fullmatch(r'[A-Za-z]\w*', name, re.ASCII):
        wrong('labels', f"found the name '{name}'; wanted letters, digits and underscores alone")
    check_distinct('labels', names)
    shares = [label.click or 0.0 for label in self.labels]
    if sum(shares) > 1 + 1e-6:
      wrong('labels', f'found click {shares}; wanted shares that sum to at most 1')
    return self

  @pydantic.model_validator(mode='after')
  def _check_days(self) -> 'Data':
    if self.day_pattern is None:
      for key, off, what in (
        ('close_day_after_hours', None, 'what a day is'),
        ('max_days_ahead', None, 'what a day is'),
        ('late', 'train', 'what is late'),
      ):
        found = getattr(self, key)
        if found != off:
          wrong(key, f'found {found!r}; it needs data.day_pattern, which says {what}')
      return self
    pattern = re.compile(self.day_pattern)
    if not pattern.groups:
      wrong('day_pattern', f'found {self.day_pattern!r}; wanted the day in parentheses')
    if pattern.groups > 1 and pattern.groupindex and set(pattern.groupindex) != set(DAY_GROUPS):
      names = f'with groups named {", ".join(pattern.groupindex)}'
      wrong(
        'day_pattern',
        f'found {self.day_pattern!r}, {names}; wanted the names year, month and day, or none',
      )
    return self

  @property
  def made(self) -> dict[str, Made]:
    """{name of a slot or dense column: how it is made from other columns}."""
    return {c.name: c.made for c in (*self.slots, *self.dense) if c.made is not None}

  def left_open(self) -> dict[str, Slot | DenseColumn]:
    """Returns the keys below `from` that are null, so that a run measures or reads their values.

    Returns:
      {config key: the slot or dense column that it belongs to}.
    """
    return {
      f'data.{section}.{i}.from.{key}': column
      for section in ('slots', 'dense')
      for i, column in enumerate(getattr(self, section))
      if column.made and (key := column.made.left_open)
    }

  def log_column(self, name: str) -> str:
    """Returns the column of the log that the config means by `name` under a key `from`.

    If a slot has this name, it is the slot's column, else `name` itself is the column.
    """
    columns = {s.name: s.column for s in self.slots if s.made is None}
    return columns.get(name) or name

  def log_columns(self, without: Collection[str] = ()) -> dict[str, bool]:
    """Returns the columns of the log that slots and dense columns read, directly or by `from`.

    Args:
      without: names of slots and dense columns to leave out.
    Returns:
      {column: whether it is read as text rather than as a number}.
    """
    columns: dict[str, bool] = {}
    for column in (*self.slots, *self.dense):
      for name, is_text in self.columns_of(column) if column.name not in without else ():
        columns[name] = columns.get(name, False) or is_text
    return columns

  def exact_columns(self) -> set[str]:
    """Returns the columns of the log that expressions read, as numbers with a float64's digits."""
    made = self.made
    return {
      self.log_column(read)
      for name, column in made.items()
      if isinstance(column, Expression)
      for read in column.reads()
      if read == name or read not in made
    }

  def columns_of(self, column: Slot | DenseColumn) -> Iterator[tuple[str, bool]]:
    """Yields each column of the log that `column` reads, and whether it is read as text."""
    if column.made is not None:
      yield from self._leaves(column.name, set())
    elif isinstance(column, Slot):
      yield column.column or column.name, True
    else:
      yield column.name, False

  def _leaves(self, name: str, visited: set[str]) -> Iterator[tuple[str, bool]]:
    """Yields each column of the log that a column with `from` reads, and whether as text.

    Args:
      name: the column with `from`; it may read other columns with `from`.
      visited: names of columns whose `from` was followed already; this call adds to it.
    """
    made = self.made
    visited.add(name)
    for read in made[name].reads():
      if read not in made or read == name:
        yield self.log_column(read), made[name].how != 'number'
      elif read not in visited:  # a cycle is refused later
        yield from self._leaves(read, visited)
