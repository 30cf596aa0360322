"""The sections below `sparse`: the embedding tables and their row optimizers."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pydantic

from ops.row_kinds import HYPERPARAMETERS, ROW_OPTIMIZERS, meaning_of
from trainer.config.layers import BUILT_IN
from trainer.config.section import PositiveInt, Rules, Scale, Section

MAX_FACTORS = 1 << 20  # the largest number of factors of a row
WIDTH = 16
# Hyperparameters that only some row optimizers read.
_KIND_KEYS = frozenset().union(*(kind.reads for kind in ROW_OPTIMIZERS.values()))


class _RowRule(Section):
  """How a row's weights are updated; ops/cc/rows/row_optimizers.cc has the formulas."""

  kind: Literal[tuple(ROW_OPTIMIZERS)] = 'adagrad'
  """The rule; the table of row optimizers has their state and defaults."""
  preset: Literal['tuned', 'keras', 'paddle'] = 'tuned'
  """Where the defaults of the hyperparameters come from. tuned: what learned best on several
  logs, adapted to train.batch_size, the width and sparse.features_per_sample; keras: those of
  tf.keras.optimizers.legacy; paddle: those of PaddlePaddle's CTR accessor. Not every kind has all
  three."""
  l2_mode: Literal['touch', 'catch_up'] = 'touch'
  """touch: only rows of the batch take a step. catch_up: a row also takes the steps of the batches
  that it was not in, with the penalty alone. It takes them in its next update, or before it is
  evaluated or saved. So the penalty acts on the whole table, as in a dense optimizer."""

  def mistakes(self, cfg: Any) -> Rules:
    presets = ROW_OPTIMIZERS[self.kind].presets
    if self.preset not in presets:
      yield 'preset', f"found '{self.preset}'; kind '{self.kind}' has {', '.join(presets)}"
    if self.learning_rate > (most := HYPERPARAMETERS['learning_rate'].high):
      found = f'found {self.learning_rate:g}, which follows from train.batch_size'
      yield 'learning_rate', f'{found}; wanted at most {most:g}'

  def idle(self, cfg: Any) -> Rules:
    kind = ROW_OPTIMIZERS[self.kind]
    for key in sorted(_KIND_KEYS - kind.reads):
      yield key, f"on kind '{self.kind}'"
    # A step without a gradient still changes a state that decays, such as the moments of Adam.
    if self.kind == 'ftrl':
      yield 'l2_mode', "on kind 'ftrl', whose weights follow from sums"
    elif not (self.l1 or self.l2 or kind.has_decaying_state):
      yield 'l2_mode', 'without l1 or l2'


def _key(name: str) -> tuple[Any, pydantic.fields.FieldInfo]:
  """Returns the type and the pydantic field of a hyperparameter of row optimizers."""
  number = HYPERPARAMETERS[name]
  low = 'gt' if number.excludes == 'low' else 'ge'
  high = 'lt' if number.excludes == 'high' else 'le'
  bounds = pydantic.Field(**{low: number.low, high: number.high}, allow_inf_nan=False)
  kind = Annotated[float, bounds]
  field = pydantic.Field(number.default, description=meaning_of(name))
  return (kind if number.default is not None else kind | None, field)


_KEYS = {name: _key(name) for name in HYPERPARAMETERS}
RowOptimizer = pydantic.create_model(
  'RowOptimizer', __base__=_RowRule, __doc__=_RowRule.__doc__, **_KEYS
)


class Table(Section):
  """Rows of one layout: a linear weight and, once the feature is admitted, factors."""

  width: PositiveInt = WIDTH
  """D, the number of factors (of ffm: for each field)."""
  init_scale: Scale = 0.01
  """The standard deviation of the initial factors, which are drawn from a normal distribution."""
  linear: RowOptimizer = RowOptimizer()
  """The optimizer of linear weights."""
  factors: RowOptimizer = RowOptimizer()
  """The optimizer of factors."""
  dtype: Literal['float32', 'bfloat16'] = 'float32'
  """The dtype of factors and their optimizer state, in memory and in checkpoints. bfloat16 halves
  them; steps are taken in float32 and rounded stochastically, by seed. Linear weights stay
  float32."""

  def mistakes(self, cfg: Any) -> Rules:
    if cfg.sparse.store == 'tfra':
      if 'catch_up' in (self.linear.l2_mode, self.factors.l2_mode):
        yield '', "l2_mode 'catch_up' needs sparse.store 'rows'; found 'tfra'"
      if self.dtype == 'bfloat16':
        yield 'dtype', "found 'bfloat16', which needs sparse.store 'rows'"
    slots, fields, of_slots = len(cfg.data.slots), 1, ''
    for layer in cfg.model.all_interactions().values():
      if layer.kind in BUILT_IN and 'field_factors' in BUILT_IN[layer.kind].needs:
        fields, of_slots = slots, f', times {slots} slots of {layer.kind},'
    if self.width * fields > MAX_FACTORS:
      found = f'found {self.width}{of_slots} of factors a row'
      yield 'width', f'{found}; wanted at most {MAX_FACTORS:,}'

  def idle(self, cfg: Any) -> Rules:
    if {layer.kind for layer in cfg.model.all_interactions().values()} == {'linear'}:
      of_factors = ('kind', 'learning_rate', 'l1', 'l2')
      for key in ('width', 'init_scale', *(f'factors.{key}' for key in of_factors)):
        yield key, 'with linear alone, which reads no factors'


class Sparse(Section):
  """The embedding tables."""

  store: Literal['rows', 'tfra'] = 'rows'
  """rows: our C++ row store; tfra: the hash tables of tensorflow-recommenders-addons."""
  gradient_scale: Literal['batch', 'feature'] = 'batch'
  """What a feature's summed gradient is divided by. batch: the weight of the global batch; feature:
  its own impressions in that batch, so that a rare feature's step does not shrink as the batch
  grows. The default is feature where an optimizer has the preset paddle."""
  exchange_dtype: Literal['float32', 'float16', 'bfloat16'] = 'float32'
  """The dtype in which rows and their gradients travel between processes."""
  features_per_sample: Annotated[float, pydantic.Field(ge=1, le=1e6)] | None = None
  """The mean number of features of a sample, at least the number of slots. The default learning
  rates of rows follow it. Default: measured on the log's first samples if a slot may hold several
  features; the number of slots otherwise, with model.retrieval, and if there is no sample yet."""
  shared_lists: Literal['mean', 'sum'] | None = None
  """How linear, fm, ffm and fwfm add up a list of another slot's features (shares), such as a
  history. mean: each of n features has 1/n of its value, so that a list weighs as much as one
  feature (Rendle 2010); sum: its whole value. Default: mean, which a run records when it begins.
  Runs that did not record it go on with sum."""
  memory_limit: Annotated[float, pydantic.Field(gt=0, le=1e18)] | None = None
  """How many bytes of memory the tables of each process may take; up to 1, a share of its machine's
  memory. Above it, the features that were not seen for longest lie, with all that they have, in
  scratch files in cold_dir, and come back before the step that needs them; some 27 bytes of each
  stay in memory. The model is the same. With parameter servers it limits the servers: in mode
  ps_geo, a worker's own copy has no limit. Default: no limit."""
  cold_dir: str | None = None
  """A directory on a local disk (of parameter servers: on each server's) for these files."""
  tables: dict[str, Table] = {'default': Table()}
  """The tables by name."""

  def optimizers(self) -> Iterator[tuple[str, RowOptimizer, int]]:
    """Yields each row optimizer: its config key, its section, and how many weights it updates."""
    for name, table in self.tables.items():
      yield f'sparse.tables.{name}.linear', table.linear, 1
      yield f'sparse.tables.{name}.factors', table.factors, table.width

  def mistakes(self, cfg: Any) -> Rules:
    for name in self.tables.keys() - {slot.table for slot in cfg.data.slots}:
      wanted = 'wanted it named by a slot or left out'
      yield f'tables.{name}', f'no slot uses this table; {wanted}'
    if self.memory_limit and self.cold_dir is None:
      yield 'memory_limit', 'wanted sparse.cold_dir too, a directory on a local disk'
    if self.memory_limit and self.store == 'tfra':
      yield 'memory_limit', "needs sparse.store 'rows'; found 'tfra'"

  def idle(self, cfg: Any) -> Rules:
    if not any(slot.is_list_of_another for slot in cfg.data.slots):
      yield 'shared_lists', "without a list of another slot's features"
    if self.memory_limit is None:
      yield 'cold_dir', 'without memory_limit'
