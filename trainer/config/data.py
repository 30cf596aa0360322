"""The section `data`: where the log is, and how to read it."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import pydantic

from trainer.config.columns import Bins, Expression, Made, NumberOfBins
from trainer.config.formats import FORMATS
from trainer.config.section import (
  NonNegativeInt,
  Positive,
  PositiveInt,
  RegularExpression,
  Rules,
  Section,
  Share,
  distinct,
)
from trainer.config.slots import DenseColumn, Label, Slot
from trainer.config.topic import Topic
from trainer.errors import nearest

MAX_SLOTS = 2047  # a slot id takes the 11 bits of a key below the sign bit
_DAY_OF_SPAN = r'/(\d{4}-\d\d-\d\d)T'  # which 0.2.0 wrote into configs with topic.days
DAY_GROUPS = 'year', 'month', 'day'  # the names that groups of day_pattern may have


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
  topic: Topic | None = None
  """A topic of Kafka to follow in place of `watch`."""
  format: Literal[(*FORMATS, 'prepared')] | None = None
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
  dense_bins: NumberOfBins | None = None
  """Adds a slot 'NAME bins' of so many quantiles for each column of `dense` that is not made of
  others and has no bins yet. The default is 32 for a log without days that has data.valid, if
  `dnn` has no `hidden` and stands beside at most linear and fm (docs/tuning.md). With the recipe
  plain, a run that begins on raw files of less than four million samples tries that and null for
  two epochs each, and keeps what data.valid finds better."""
  crosses: list[list[str]] = []
  """Adds a slot 'A x B' of the cross of two to eight slots or columns for each list of them, unless
  there is one. With the recipe plain, a run that begins looks for at most four, tries them as it
  tries bins, and keeps what data.valid finds better (docs/tuning.md)."""
  counts: bool = False
  """What `counts` of a slot is if the slot does not say; slots that share rows have none. The
  default is true where that of dense_bins is 32, unless there are more than 50 slots, those of bins
  included, the loss is squared_error, the mode ps_geo, or the lifecycle deletes by score or has a
  capacity."""
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
  refused. The default is 0.01 with data.topic, whose messages cannot be mended."""
  shuffle: bool = True
  """Whether the samples of a training pass are shuffled, by seed."""
  late: Literal['train', 'skip', 'fail'] = 'train'
  """What to do with a pass that comes when its day has ended. train: it counts for the open day;
  skip: it is left out; fail: the run ends."""
  max_refused_passes: NonNegativeInt = 0
  """How many passes in a row may be set aside because they are empty, damaged, wrongly named or
  hold too many bad records. One more ends the run; a good pass resets the count. The default is 10
  with data.watch or data.topic."""
  max_days_ahead: PositiveInt | None = None
  """The most days by which a pass may be ahead of the newest day of the stream. A pass further
  ahead is refused: its date is most likely wrong, and would make all later passes late. For days
  that are plain numbers, their difference counts. The default is 14 with data.watch or data.topic;
  null: any."""
  close_day_after_hours: Positive | None = None
  """Hours without a pass after which the open day ends; days without passes then end too, and age
  the features. null: a day ends when a pass of a later day comes or, without a stream, when the
  log ends; empty days do not count."""
  keep_prepared_passes: NonNegativeInt | None = None
  """How many converted passes are kept in run_dir/prepared after they were trained on. The default
  is 2 with data.watch or data.topic; null: all."""

  @pydantic.field_validator('day_pattern')
  @classmethod
  def _not_of_0_2_0(cls, pattern: str | None, others: pydantic.ValidationInfo) -> str | None:
    topic = others.data.get('topic')
    return None if topic and topic.days and pattern == _DAY_OF_SPAN else pattern

  def mistakes(self, cfg: Any) -> Rules:
    text = self.thousands
    if text is not None and (len(text) != 1 or text.isalnum() or text in f'+-%{self.decimal}'):
      wanted = 'wanted one character that numbers do not have otherwise'
      yield 'thousands', f'found {text!r}; {wanted}'
    yield from self._wrong_slots()
    labels = [label.column or label.name for label in self.labels]
    labels = labels or ([self.label] if self.label is not None else [])
    for key, columns in (
      ('slots', [name for slot in self.slots for name, _ in self.columns_of(slot)]),
      ('dense', [name for column in self.dense for name, _ in self.columns_of(column)]),
      ('weight', [self.weight]),
      ('group', [self.group]),
    ):
      if read := [label for label in labels if label in columns]:
        yield key, f"found '{read[0]}', which is a label: the model would read what it predicts"
    yield from self._wrong_labels(cfg)
    yield from self._wrong_days()
    for section in ('slots', 'dense'):
      for i, column in enumerate(getattr(self, section)):
        if column.made is not None:
          yield from self._wrongly_made(column, f'{section}.{i}')
    retrieval = cfg.model.retrieval
    if retrieval is None and self.items is not None:
      yield 'items', f"found '{self.items}'; model.retrieval alone reads it"
    if retrieval is not None and self.group is None:
      yield 'group', 'found null; model.retrieval wants the column of the user'
    if not self.stream and not self.train:
      yield 'train', 'found []; wanted files, or data.watch set to a directory'
    if self.topic and self.topic.days and self.train and self.day_pattern is None:
      yield (
        'day_pattern',
        'found null; wanted what finds the days of data.train: data.topic has days',
      )
    if self.watch and self.topic:
      yield 'topic', 'found beside data.watch; wanted one of the two'

  def _wrong_slots(self) -> Rules:
    names = [slot.name for slot in self.slots]
    if not names:
      yield 'slots', 'found []; wanted at least one slot'
    if len(names) > MAX_SLOTS:
      yield 'slots', f'found {len(names)} slots; wanted at most {MAX_SLOTS}'
    yield from distinct('slots', names)
    yield from distinct('dense', [column.name for column in self.dense])
    by_name = dict(zip(names, self.slots))
    for i, slot in enumerate(self.slots):
      delimiter = self.delimiter or ','
      if slot.value_separator == delimiter and not slot.separator:
        yield f'slots.{i}.value_separator', f'found {delimiter!r}, which is data.delimiter'
      if slot.shares is None:
        continue
      key, shared = f'slots.{i}.shares', by_name.get(slot.shares)
      if shared is None or shared is slot:
        others = set(names) - {slot.name}
        yield key, f"found '{slot.shares}'; wanted another slot{nearest(slot.shares, others)}"
      if shared.shares:
        yield key, f"'{slot.shares}' itself shares '{shared.shares}'; wanted the latter"
      if shared.table != slot.table:
        wanted = f"'{shared.table}', the table of '{slot.shares}', which it shares"
        yield f'slots.{i}.table', f"found '{slot.table}'; wanted {wanted}"
    own = {name for name, slot in by_name.items() if slot.shares is None}
    for name in self.keep_texts:
      if name not in own:
        shared = name in by_name and by_name[name].shares
        wanted = f"'{shared}', which it shares" if shared else f'a slot{nearest(name, own)}'
        yield 'keep_texts', f"found '{name}'; wanted {wanted}"
    yield from distinct('keep_texts', self.keep_texts)

  def _wrong_labels(self, cfg: Any) -> Rules:
    names = [label.name for label in self.labels]
    if not names and cfg.model.retrieval is None:
      if self.label is None:
        yield 'label', 'found null, which is for model.retrieval; wanted the column of the label'
      for key in ('label_positive', 'label_negative'):
        if getattr(self, key) is not None and cfg.model.loss == 'squared_error':
          yield key, 'makes labels of 0 and 1; wanted a loss for them with it'
    if not names:
      return
    if len(names) < 2:
      yield 'labels', f'found {names}; wanted at least two, or the one as data.label'
    if (self.label, self.label_positive, self.label_negative) != ('label', None, None):
      yield 'labels', 'found beside the keys of data.label; wanted one of the two'
    for name in names:
      if not re.fullmatch(r'[A-Za-z]\w*', name, re.ASCII):
        yield 'labels', f"found the name '{name}'; wanted letters, digits and underscores alone"
    yield from distinct('labels', names)
    shares = [label.click or 0.0 for label in self.labels]
    if sum(shares) > 1 + 1e-6:
      yield 'labels', f'found click {shares}; wanted shares that sum to at most 1'

  def _wrong_days(self) -> Rules:
    if not self.has_days:
      for key, off, what in (
        ('close_day_after_hours', None, 'what a day is'),
        ('max_days_ahead', None, 'what a day is'),
        ('late', 'train', 'what is late'),
      ):
        found = getattr(self, key)
        if found != off:
          yield key, f'found {found!r}; it needs {self.days_key}, which says {what}'
    if self.day_pattern is None:
      return
    pattern, found = re.compile(self.day_pattern), f'found {self.day_pattern!r}'
    if not pattern.groups:
      yield 'day_pattern', f'{found}; wanted the day in parentheses'
    if pattern.groups > 1 and pattern.groupindex and set(pattern.groupindex) != set(DAY_GROUPS):
      named = f'with groups named {", ".join(pattern.groupindex)}'
      yield 'day_pattern', f'{found}, {named}; wanted the names year, month and day, or none'

  def _wrongly_made(self, column: Slot | DenseColumn, place: str) -> Rules:
    """Yields mistakes in what a column with `from` reads."""
    made, of_name = column.made, self.made
    key, one = f'{place}.from.{made.kind}', f'wanted one {made.how} a sample'
    if [c.name for c in (*self.slots, *self.dense) if c.made].count(column.name) > 1:
      yield f'{place}.name', f"found '{column.name}', which is made twice; wanted distinct names"
    for name in made.reads():
      source = of_name.get(name) if name != column.name else None
      if source is None:
        slot = next((s for s in self.slots if s.name == name and s.made is None), None)
        if slot and slot.value_separator and made.how == 'features':
          yield key, f"found '{name}', whose features have values, which {made.kind} would lose"
        if slot and slot.separator and made.how != 'features':
          yield key, f"found '{name}', which holds several features; {one}"
        continue
      is_bin = isinstance(source, Bins) and made.how == 'number'
      if source.has_values or is_bin or (source.is_several and made.how != 'features'):
        other = f"another name for it, where the log's column '{name}' is meant"
        yield key, f"found '{name}', which is made by {source.kind}; {one} ({other})"
      if source.is_fraction and made.how == 'features':
        yield key, f"found '{name}', whose numbers are no features; wanted bins of it"
    yield from _cycles(of_name, [column.name], key)

  def idle(self, cfg: Any) -> Rules:
    if why := cfg.model.why_dense_is_idle():
      yield 'dense', why

  @property
  def days_key(self) -> str:
    """The key that says what a day is."""
    return 'data.topic.days' if self.topic else 'data.day_pattern'

  @property
  def has_days(self) -> bool:
    """Whether each pass belongs to a day, so that a day-end step follows the day's last pass."""
    return self.day_pattern is not None or (self.topic is not None and self.topic.days)

  @property
  def stream(self) -> str | None:
    """The directory or topic that a run follows, for messages; None if it ends with data.train."""
    return f'topic {self.topic.topic}' if self.topic else self.watch

  @property
  def made(self) -> dict[str, Made]:
    """{name of a slot or dense column: how it is made from other columns}."""
    return {c.name: c.made for c in (*self.slots, *self.dense) if c.made is not None}

  def left_open(self) -> dict[str, Slot | DenseColumn]:
    """Returns {config key that a run measures or reads: the slot or dense column of its `from`}."""
    return {
      f'data.{section}.{i}.from.{key}': column
      for section in ('slots', 'dense')
      for i, column in enumerate(getattr(self, section))
      if column.made and (key := column.made.left_open)
    }

  def log_column(self, name: str) -> str:
    """Returns the log's column that a key `from` means: that of the slot `name`, or `name`."""
    columns = {s.name: s.column for s in self.slots if s.made is None}
    return columns.get(name) or name

  def log_columns(self, without: Collection[str] = ()) -> dict[str, bool]:
    """Returns {column of the log that slots and dense columns, also with `from`, read: as text?}.

    What only the slots and dense columns named in `without` read is left out.
    """
    columns: dict[str, bool] = {}
    for column in (*self.slots, *self.dense):
      for name, is_text in self.columns_of(column) if column.name not in without else ():
        columns[name] = columns.get(name, False) or is_text
    return columns

  def exact_columns(self) -> set[str]:
    """Returns the columns of the log that expressions read; they need a float64's precision."""
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

    It may read others with `from`; those `visited` were followed, and this call adds to them.
    """
    made = self.made
    visited.add(name)
    for read in made[name].reads():
      if read not in made or read == name:
        yield self.log_column(read), made[name].how != 'number'
      elif read not in visited:  # a cycle is refused later
        yield from self._leaves(read, visited)


def _cycles(made: Mapping[str, Made], path: Sequence[str], key: str) -> Rules:
  """Yields a mistake for each column that reads itself; each column of `path` reads the next."""
  for read in made[path[-1]].reads():
    if read in path[:-1]:
      yield key, f'found a cycle: {" reads ".join([*path, read])}; wanted none'
    elif read in made and read != path[-1]:
      yield from _cycles(made, [*path, read], key)
