"""The columns of `data`: slots, dense columns and labels."""

from typing import Any, Literal

import pydantic

from trainer.config.columns import Bins, From, Lookup, Number, SlotCross, Text
from trainer.config.lifecycle import Thresholds
from trainer.config.section import (
  NonNegative,
  PositiveInt,
  RegularExpression,
  Rules,
  Section,
  Share,
)
from trainer.errors import nearest

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
  before the sample (docs/layers.md, Counts). The default is data.counts."""
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

  def mistakes(self, cfg: Any) -> Rules:
    tables, lifecycle = cfg.sparse.tables, cfg.lifecycle
    for key in ('separator', 'value_separator'):
      if getattr(self, key) == '':
        yield key, "found ''; wanted a text of at least one character, or null"
    if self.sequence and self.shares is None:
      yield 'shares', 'found null; a sequence needs the slot of its candidates, as in shares: item'
    if self.sequence and self.value_separator:
      yield 'value_separator', 'a sequence has no values; wanted null'
    if self.shares is None and self.table not in tables:
      wanted = f'wanted a table of sparse.tables{nearest(self.table, tables)}'
      yield 'table', f"found '{self.table}'; {wanted}"
    if self.made is not None:
      yield from self._made_wrongly()
    if not self.counts:
      return
    if cfg.model.retrieval is not None:
      yield 'counts', 'found true with model.retrieval, whose towers read no counts; wanted false'
    if cfg.labels[0].loss == 'squared_error':
      yield 'counts', "found true with loss 'squared_error', which has no clicks; wanted false"
    by_counts = ''
    if lifecycle.capacity is not None and lifecycle.capacity_by != 'recency':
      by_counts = f'lifecycle.capacity_by: {lifecycle.capacity_by}'
    if lifecycle.eviction == 'score':
      by_counts = 'lifecycle.eviction: score'
    if cfg.train.epochs > 1 and by_counts:
      found = f'found true with {by_counts} and {cfg.train.epochs} epochs'
      why = 'counts begin anew with each epoch, whose first day end would delete what is rare then'
      yield 'counts', f'{found}: {why}; wanted false, one epoch, or another eviction'

  def _made_wrongly(self) -> Rules:
    made = self.made
    if self.column is not None:
      found = f"found '{self.column}' with from"
      yield 'column', f'{found}, which says what is read; wanted null'
    if self.value_separator is not None:
      yield 'value_separator', f'found {self.value_separator!r} with from; wanted null'
    is_text = isinstance(made, (Text, Lookup)) and not made.is_several
    if self.separator is not None and not is_text:
      found = f'found {self.separator!r} with {made.kind}'
      yield 'separator', f'{found}, which makes no text to split; wanted null'
    if self.sequence:
      yield 'sequence', f'found with {made.kind}; wanted a history of the log'
    if made.is_fraction:
      found = f'found {made.kind}, which makes numbers that are not whole'
      yield 'from', f'{found}; wanted it in data.dense, and here bins or number of it'

  def idle(self, cfg: Any) -> Rules:
    if self.is_list_of_another and self.pooling == 'sum' and cfg.sparse.shared_lists == 'mean':
      yield 'pooling', f"on a list of features of '{self.shares}' with sparse.shared_lists: mean"
    if why := cfg.model.why_dense_is_idle():
      yield 'counts', why


class DenseColumn(Section):
  """A numeric column; blank means missing."""

  name: str
  """Its column in the file, or the name of what `from` makes."""
  made: From = pydantic.Field(None, alias='from')
  """What it is made of: a time, text, lookup, expression or overlap; null: the column as
  it is."""
  transform: Literal['none', 'log1p', 'standardise', 'log1p_standardise'] = 'none'
  """log1p is sign(x)·log(1 + |x|); standardise is (x − mean) / std of the first pass, after log1p,
  and from −3 to 3 on a log with days or a stream."""
  missing: float = 0.0
  """Replaces a missing value, after the transform."""

  def mistakes(self, cfg: Any) -> Rules:
    made = self.made
    if isinstance(made, (Bins, SlotCross, Number)) or made is not None and made.is_several:
      here = 'here time, text, lookup, expression or overlap'
      yield 'from', f'found {made.kind}, which makes features; wanted it in data.slots, and {here}'


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

  def mistakes(self, cfg: Any) -> Rules:
    for key, pattern in (('positive', self.positive), ('negative', self.negative)):
      if pattern is not None and self.loss == 'squared_error':
        yield key, 'makes labels of 0 and 1; wanted a loss for them with it'
