"""The section `export`: what is written for serving, and when."""

import keyword
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal

from trainer.config.metrics import METRICS, wrong_metric
from trainer.config.section import NOT_OF_RETRIEVAL, NonNegative, PositiveInt, Rules, Section


def input_name(column: str) -> str:
  """Returns the name that the tensor of a log's column has in a SavedModel.

  It has only letters of ASCII, digits and underscores, and begins with a letter. Other letters are
  spelt by their code points, so 用户 is column_u7528u6237. `self` and words of Python, which cannot
  name an argument, become column_self and column_class.
  """
  name = re.sub(r'[^A-Za-z0-9_]', lambda c: '_' if c[0] < '\x80' else f'u{ord(c[0]):04x}', column)
  is_plain = column[:1].isascii() and name[:1].isalpha() and name != 'self'
  return name if is_plain and not keyword.iskeyword(name) else f'column_{name}'


def same_inputs(columns: Iterable[str]) -> str | None:
  """Returns why a SavedModel cannot have inputs for these columns of the log; None if it can."""
  columns = sorted(columns)
  (name, count), *_ = Counter(map(input_name, columns)).most_common(1) or [('', 0)]
  if count < 2:
    return None
  alike = ', '.join(f"'{column}'" for column in columns if input_name(column) == name)
  return (
    f'a SavedModel has the same input {name} for the columns {alike}; wanted names that differ in '
    'their letters, digits or underscores'
  )


class Gate(Section):
  """Withholds exports after a pass on which the model got worse, until a pass is good again."""

  metric: Literal[tuple(METRICS)] = 'auc'
  """The metric of train.progressive_validation by which a pass is compared with earlier passes."""
  tolerance: NonNegative = 0.002
  """How much worse the metric may be. A slot that turns blank, or a metric that is not finite,
  never passes."""

  def mistakes(self, cfg: Any) -> Rules:
    if not cfg.train.progressive_validation:
      yield '/export.gate', 'needs train.progressive_validation true; found false'
    if why := wrong_metric(self.metric, cfg.labels[0].loss, cfg.data.group):
      yield 'metric', why


class Export(Section):
  """What is written for serving, and when."""

  base: bool = False
  """Whether a base is written after the last pass of each day; with model.retrieval it is of kind
  items."""
  delta_every_passes: PositiveInt | None = None
  """Passes between deltas; null: no deltas."""
  saved_model: bool = False
  """Whether a SavedModel is written at each day's end."""
  keep: PositiveInt | None = None
  """How many bases, each with the deltas after it, and how many versions of each kind of model are
  kept. The default is 3 with data.watch or data.topic; null: all."""
  gate: Gate | None = None
  """Withholds exports after bad passes; null: every export is written."""

  def mistakes(self, cfg: Any) -> Rules:
    if self.saved_model and (why := same_inputs(cfg.data.log_columns())):
      yield 'saved_model', f'found true; {why}'
    if cfg.model.retrieval is None:
      return
    if self.saved_model:
      yield 'saved_model', NOT_OF_RETRIEVAL
    item, texts = cfg.item_slot.name, cfg.data.keep_texts
    if (self.base or self.delta_every_passes) and item not in texts and cfg.data.items is None:
      wanted = f'exports while a run trains name its items: wanted [{item}], or data.items'
      yield '/data.keep_texts', f'found {texts}; {wanted}'
