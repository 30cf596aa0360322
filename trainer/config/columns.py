"""The kinds of `from`: ways to compute a slot or a dense column from columns of the log.

trainer/data/columns/ has the computations, with Arrow, for logs, and in TensorFlow, for
SavedModels.
"""

import ast
import functools
import zoneinfo
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import pydantic

from trainer.config.section import PositiveInt, Rules, Section, wrong
from trainer.errors import nearest, short
from trainer.plain_data import Json

MOST_BINS = 10_000
NumberOfBins = Annotated[int, pydantic.Field(ge=2, le=MOST_BINS, strict=True)]


class Made(Section):
  """How a made column is computed: the kind of computation, and the columns that it reads.

  In `bins: age` the kind is `bins`, and the column that it reads is `age`.
  """

  # A kind in which one of these depends on other keys has a property of that name.
  how: ClassVar[Literal['number', 'text', 'features']]  # how it reads columns
  left_open: ClassVar[str | None] = None  # the null key whose value a run must measure or read
  is_several: ClassVar[bool] = False  # may make several features for a sample
  has_values: ClassVar[bool] = False  # makes features with values x_i other than 1
  is_fraction: ClassVar[bool] = False  # makes numbers with fractions, which cannot be features

  @property
  def kind(self) -> str:
    return next(iter(type(self).model_fields))

  def reads(self) -> list[str]:
    columns = getattr(self, self.kind)
    return [columns] if isinstance(columns, str) else columns


def bins_slot(name: str) -> str:
  """Returns the name of the slot that data.dense_bins adds for a dense column."""
  return f'{name} bins'


def cross_slot(cross: Sequence[str]) -> str:
  """Returns the name of the slot that data.crosses adds for a cross of columns."""
  return ' x '.join(cross)


class Bins(Made):
  """Turns a number into a bin. The bin of x is the number of boundaries <= x; a missing number has
  a bin of its own."""

  how = 'number'
  bins: str
  """The numeric column."""
  boundaries: list[float] | None = None
  """Rising numbers. Leave null with log_squared, quantiles or widths; with the latter two the run
  measures them when it begins and stores them here."""
  log_squared: bool = False
  """One bin for each ⌊ln²x⌋ of the x > 2, one for each whole number from 0 to 2, and one for all
  numbers below 0."""
  quantiles: NumberOfBins | None = None
  """At most this number of bins with equally many samples, measured on the first million samples of
  the first pass. A value with more samples gets a bin of its own, and the other values share the
  other bins."""
  widths: NumberOfBins | None = None
  """This number of bins of equal width between the least and the largest number, measured as
  quantiles are."""

  @property
  def _is_measured(self) -> bool:
    return self.quantiles is not None or self.widths is not None

  @property
  def left_open(self) -> str | None:
    return 'boundaries' if self._is_measured and self.boundaries is None else None

  def mistakes(self, cfg: Any) -> Rules:
    ways = [self.log_squared, self.quantiles is not None, self.widths is not None]
    is_set = self.boundaries is not None
    if sum(ways) + (is_set and not self._is_measured) != 1:
      yield '', 'wanted one of boundaries, log_squared, quantiles, widths'
    if is_set:
      with np.errstate(over='ignore'):
        rounded = np.array(self.boundaries, np.float32)
      if not 0 < len(rounded) <= MOST_BINS:
        yield 'boundaries', f'found {len(rounded)} numbers; wanted 1 to {MOST_BINS}'
      if not np.isfinite(rounded).all() or (np.diff(rounded) <= 0).any():
        found = f'found {short(self.boundaries)}'
        yield 'boundaries', f'{found}; wanted finite, rising float32 numbers'


class Number(Made):
  """One feature whose value x_i is the number, as in libffm; no feature for a missing number."""

  how, has_values = 'number', True
  number: str
  """The numeric column."""


class SlotCross(Made):
  """A feature for each combination of the features of two or more columns."""

  how, is_several = 'features', True
  cross: list[str]
  """Slots, or columns of the log."""
  most: Annotated[int, pydantic.Field(ge=1, le=10_000, strict=True)] = 100
  """At most this many combinations a sample; later ones are left out."""

  def mistakes(self, cfg: Any) -> Rules:
    return _columns(self, 'two or more columns', 8)


class Time(Made):
  """A part of a time, such as the hour or the weekday."""

  how = 'text'
  time: str
  """The column of the time."""
  part: Literal['hour', 'weekday', 'day', 'month', 'is_weekend', 'minutes_since']
  """hour is 0 to 23, weekday 0 (Monday) to 6, day of the month, month 1 to 12, is_weekend 0 or 1,
  minutes_since the minutes from the time in `since` to this one."""
  zone: str = 'UTC'
  """The time zone, such as Europe/Berlin. Only times of the years 1900 to 2199 are read."""
  unit: Literal['iso', 'seconds', 'milliseconds', 'yyyymmddHH'] = 'iso'
  """How the time is written: 2024-01-31T13:05:00.5+01:00 (T or a blank; time, fraction and offset
  may be left out), or in seconds or milliseconds since 1970 in UTC, or as 2024013113. Numbers that
  would be seconds of the years 1973 to 2199 are no milliseconds."""
  since: str | None = None
  """For minutes_since: the column of the earlier time, written in the same unit."""

  def reads(self) -> list[str]:
    return [self.time] if self.since is None else [self.time, self.since]

  @property
  def is_fraction(self) -> bool:
    return self.part == 'minutes_since'

  def mistakes(self, cfg: Any) -> Rules:
    try:
      zoneinfo.ZoneInfo(self.zone)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
      near = nearest(self.zone, zoneinfo.available_timezones())
      yield 'zone', f'found {short(self.zone)}; wanted a time zone such as Europe/Berlin{near}'
    if (self.since is None) == (self.part == 'minutes_since'):
      yield 'since', f'found {self.since!r} with part {self.part}; minutes_since alone wants it'


class Text(Made):
  """Features of a text, without white space at its ends. Lengths count Unicode characters."""

  how = 'text'
  text: str
  """The column of the text."""
  lower: bool = False
  """Whether A to Z become a to z. Other letters stay as they are, because Arrow and TensorFlow
  lower them in different ways."""
  match: str | None = None
  r"""A regular expression (RE2, in which \w, \d and \b are ASCII; \p{L} is any letter) with one
  group. What the group holds at the first match replaces the text; null: the text stays whole."""
  ngrams: PositiveInt | None = None
  """The length of runs. Every run of so many characters is a feature; a shorter text is one
  feature."""
  prefixes: list[PositiveInt] | None = None
  """Lengths of prefixes, such as [3, 6]. Each prefix is a feature; a text that is shorter than a
  prefix takes its place."""

  @property
  def is_several(self) -> bool:
    return self.ngrams is not None or self.prefixes is not None

  def mistakes(self, cfg: Any) -> Rules:
    if self.ngrams is not None and self.prefixes is not None:
      yield 'prefixes', 'found with ngrams; wanted one of them'
    if self.prefixes is not None:
      if not self.prefixes or (np.diff(self.prefixes) <= 0).any():
        yield 'prefixes', f'found {short(self.prefixes)}; wanted rising lengths, as [3, 6]'
    if self.match is not None and (wanted := _lacks_group(self.match)):
      yield 'match', f'found {short(self.match)}; wanted {wanted}'
    if not (self.lower or self.match is not None or self.ngrams or self.prefixes):
      yield '', 'found a text alone; wanted lower, match, ngrams or prefixes, or no from'


FUNCTIONS = {'log': 1, 'abs': 1, 'missing': 1, 'min': 2, 'max': 2, 'clip': 3, 'where': 3}
_MOST_NODES = 200


@functools.cache
def _tree(expression: str) -> ast.expr:
  return ast.parse(expression.strip(), mode='eval').body


class Expression(Made):
  """Computes a number from others in float64. The result is missing if one of the numbers that the
  expression needs is missing, or if the result would not be finite."""

  how, is_fraction = 'number', True
  expression: str
  """Made of columns, numbers, + - * /, comparisons (1 or 0), log, abs, min, max,
  clip(x, low, high), where(condition, x, y) and missing(x): 'price / category_price'."""

  def tree(self) -> ast.expr:
    return _tree(self.expression)

  def reads(self) -> list[str]:
    return sorted(set(names_in(self.tree())))

  def mistakes(self, cfg: Any) -> Rules:
    key, found = 'expression', short(self.expression)
    try:
      tree = self.tree()
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
      reason = f' ({e.msg})' if isinstance(e, SyntaxError) else ''
      yield key, f'found {found}{reason}; wanted an expression such as price / category_price'
    if sum(1 for _ in ast.walk(tree)) > _MOST_NODES:
      yield key, f'found over {_MOST_NODES} parts; wanted fewer'
    for problem in _problems(tree):
      wanted = f'columns, numbers, + - * /, comparisons, {", ".join(FUNCTIONS)}'
      yield key, f'found {problem} in {found}; wanted {wanted}'
    if not self.reads():
      yield key, f'found {found}, which reads no column; wanted one'


class Lookup(Made):
  """Looks up a text in a small table, for example the category or the price of an item."""

  how = 'text'
  lookup: str
  """The column of the log whose text is looked up."""
  table: str
  """A file with a header line or a schema, such as items.csv or items.parquet."""
  value: str
  """The column of the table that is wanted."""
  key: str | None = None
  """The column of the table that holds the texts, each once; null: the name of the log's column."""
  content: str | None = None
  """The content of the table, as the run keeps it; null: the run reads it when it begins."""

  @property
  def left_open(self) -> str | None:
    return 'content' if self.content is None else None


class Overlap(Made):
  """The number of distinct features that two columns have in common, or that number divided by the
  number of distinct features of the first column."""

  how = 'features'
  overlap: list[str]
  """Two slots, or columns of the log."""
  of: Literal['count', 'share'] = 'count'
  """share: count divided by the distinct features of the first column; missing if it has none."""

  @property
  def is_fraction(self) -> bool:
    return self.of == 'share'

  def mistakes(self, cfg: Any) -> Rules:
    return _columns(self, 'two columns', 2)


def _columns(made: Made, wanted: str, most: int) -> Rules:
  columns = made.reads()
  if not 2 <= len(columns) <= most:
    yield made.kind, f'found {len(columns)} column{"s" * (len(columns) != 1)}; wanted {wanted}'
  if len(set(columns)) < len(columns):
    yield made.kind, f'found {short(columns)}; wanted distinct columns'


MADE = {
  next(iter(made.model_fields)): made
  for made in (Bins, Number, SlotCross, Time, Text, Lookup, Expression, Overlap)
}


def _made(value: Json | Made) -> Made | None:
  """Validates the value of a key `from` by the class of its kind, such as Bins."""
  if value is None or isinstance(value, Made):
    return value
  if not isinstance(value, dict):
    wrong('', f'found {short(value)}; wanted a kind with its column, as in {{bins: price, …}}')
  kinds = [key for key in value if key in MADE]
  if len(kinds) != 1:
    near = nearest(str(next(iter(value), '')), MADE)
    found = ' and '.join(kinds) or ', '.join(map(str, value)) or 'nothing'
    wrong('', f'found {short(found)}; wanted one of {", ".join(MADE)}{"" if kinds else near}')
  made = MADE[kinds[0]]
  for key in value.keys() - made.model_fields.keys():
    wrong(str(key), f'is no key of {kinds[0]}{nearest(str(key), made.model_fields)}')
  return made.model_validate(value)


From = Annotated[pydantic.SerializeAsAny[Made] | None, pydantic.BeforeValidator(_made)]


def names_in(tree: ast.expr) -> Iterator[str]:
  """Yields the names of the columns that an expression reads; `a.b` is one name."""
  if (name := column_of(tree)) is not None:
    yield name
    return
  for child in ast.iter_child_nodes(tree):
    if isinstance(child, ast.expr) and not (isinstance(tree, ast.Call) and child is tree.func):
      yield from names_in(child)


def column_of(node: ast.AST) -> str | None:
  """Returns the column that a node of an expression names; None if the node is no name or path."""
  if isinstance(node, ast.Name):
    return node.id
  if isinstance(node, ast.Attribute) and (rest := column_of(node.value)) is not None:
    return f'{rest}.{node.attr}'
  return None


def _problems(node: ast.AST) -> Iterator[str]:
  """Finds the parts of an expression that are not allowed; yields a text for a message on each."""
  match node:
    case ast.Name() | ast.Attribute() if column_of(node) is not None:
      return
    case ast.Constant(value=value):
      if type(value) not in (int, float) or not abs(value) <= 1e300:
        yield f'{value!r}'
      return
    case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div()):
      inner = [node.left, node.right]
    case ast.UnaryOp(op=ast.USub()):
      inner = [node.operand]
    case ast.Compare(ops=[ast.Lt() | ast.LtE() | ast.Gt() | ast.GtE() | ast.Eq() | ast.NotEq()]):
      inner = [node.left, *node.comparators]
    case ast.Call(func=ast.Name(id=name), keywords=[]) if name in FUNCTIONS:
      if len(node.args) != FUNCTIONS[name]:
        yield f'{name} of {len(node.args)} arguments, which takes {FUNCTIONS[name]},'
      inner = node.args
    case _:
      yield f'{ast.unparse(node)[:40]!r}'
      return
  for child in inner:
    yield from _problems(child)


def _lacks_group(pattern: str) -> str:
  """Returns what is wanted if a regular expression is not one of RE2 with one group; else ''."""
  import pyarrow as pa
  import pyarrow.compute as pc

  def holds(replacement: str) -> bool:
    try:
      pc.replace_substring_regex(pa.array(['']), pattern=pattern, replacement=replacement)
      return True
    except (pa.ArrowInvalid, UnicodeEncodeError):
      return False

  if not holds(''):
    return 'a regular expression of RE2'
  return 'one group, as in (\\w+)/' if not holds('\\1') or holds('\\2') else ''
