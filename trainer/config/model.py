"""The sections below `model`: interactions, tasks and the loss."""

from typing import Annotated, Any, Literal

import pydantic

from trainer.config.layers import BUILT_IN
from trainer.config.retrieval import ItemTower, Retrieval
from trainer.config.section import NonNegative, PositiveShare, Rules, Section, Share
from trainer.config.slots import Loss
from trainer.errors import ConfigError, nearest
from trainer.plain_data import Json


class Interaction(Section):
  """A layer: a term of the logit, or the layer of model.shared or model.dense_embedding. Short
  forms are allowed, such as `fm` and `{dnn: {hidden: [64]}}`."""

  kind: str
  """Built in (docs/layers.md), or the dotted path of a Keras layer."""
  args: dict[str, Any] = {}
  """Arguments of the layer's constructor."""


def interaction(item: Json) -> Json:
  """Expands the short form of an interaction to the long form {kind: …, args: …}."""
  if isinstance(item, str):
    return {'kind': item}
  if isinstance(item, dict) and len(item) == 1 and 'kind' not in item:
    ((kind, args),) = item.items()
    return {'kind': kind, 'args': args or {}}
  return item


Interactions = list[Annotated[Interaction, pydantic.BeforeValidator(interaction)]]


class Task(Section):
  """How one of several labels is predicted."""

  interactions: Interactions = []
  """Terms of this task's logit alone, beside those of model.interactions."""
  given: str | None = None
  """Another task. Its prediction is multiplied by this task's σ(logit), as in ESMM: a conversion
  requires a click."""


class Model(Section):
  """The layers and the loss."""

  interactions: Interactions = []
  """The terms whose sum is the logit; with several tasks, terms of every task's logit."""
  recipe: Literal['ensemble', 'plain', 'stream'] | None = None
  """What the defaults are if `dnn` has no `hidden` and stands beside at most linear and fm
  (docs/tuning.md). On a log without days that has data.valid, ensemble: eight perceptrons and slow
  rows; plain: one perceptron and fast rows with l2. A run that begins chooses plain for at least
  100,000 samples, and keeps its choice; runs that began before have null, which is an ensemble. On
  a stream, or a log with days that is trained on once, stream: one perceptron, and slow rows of
  linear; of runs that began before, null leaves all as it was."""
  retrieval: Retrieval | None = None
  """Two towers that find items, in place of interactions (docs/retrieval.md)."""
  shared: Annotated[Interaction | None, pydantic.BeforeValidator(interaction)] = None
  """The layer whose output the `tower` of each task reads: shared_bottom, mmoe or the dotted path
  of a Keras layer."""
  dense_embedding: Annotated[Interaction | None, pydantic.BeforeValidator(interaction)] = None
  """The layer that gives each dense column a vector: autodis, piecewise_linear or the dotted path
  of a Keras layer; null: none. A layer that reads the vectors of slots reads this one as that of a
  further slot."""
  tasks: dict[str, Task] = {}
  """The tasks by their names, those of data.labels."""
  loss: Loss = 'log_loss'
  """log_loss, focal and fake_negative take labels 0 and 1, squared_error any number."""
  focal_gamma: NonNegative = 2.0
  """γ of the focal loss."""
  label_smoothing: Share = 0.0
  """s turns a label y into y·(1 − s) + s/2."""
  negative_sampling_rate: PositiveShare = 1.0
  """The share of the negatives that the log kept; predictions are corrected for it."""

  @property
  def section(self) -> str:
    """The section that says what the model learns: 'interactions' or 'retrieval'."""
    return 'interactions' if self.retrieval is None else 'retrieval'

  def want(self, section: str, where: str) -> None:
    """Raises ConfigError about `where` if the model has another section than the wanted one."""
    if self.section != section:
      wanted = f'wanted one with model.{section}'
      raise ConfigError(f'{where}: found a run with model.{self.section}; {wanted}')

  @property
  def towers(self) -> dict[str, ItemTower]:
    """The two towers of model.retrieval by their sides, query and item; {} without it."""
    sides = ('query', 'item') if self.retrieval else ()
    return {side: getattr(self.retrieval, side) for side in sides}

  def all_interactions(self) -> dict[str, Interaction]:
    """Returns {config key: layer}, also of tasks, model.shared and model.dense_embedding."""
    listed = [('model.interactions', self.interactions)]
    listed += [(f'model.tasks.{n}.interactions', t.interactions) for n, t in self.tasks.items()]
    layers = {f'{key}.{i}': layer for key, some in listed for i, layer in enumerate(some)}
    others = {'model.shared': self.shared, 'model.dense_embedding': self.dense_embedding}
    return layers | {key: layer for key, layer in others.items() if layer is not None}

  def why_dense_is_idle(self) -> str:
    """Returns why dense columns have no effect; '' if a layer may read them."""
    kinds = {layer.kind for layer in self.all_interactions().values()}
    if not kinds or any(k not in BUILT_IN or BUILT_IN[k].reads_dense for k in kinds):
      return ''
    return f'with {" and ".join(sorted(kinds))} alone: linear and dnn read dense columns'

  def idle(self, cfg: Any) -> Rules:
    losses = {label.loss for label in cfg.labels}
    if 'focal' not in losses:
      yield 'focal_gamma', 'without a loss of kind focal'
    layers = self.all_interactions()
    if not any(cfg.origin(f'{key}.args.hidden') == 'from model.recipe' for key in layers):
      wanted = 'days that are trained on once' if self.recipe == 'stream' else 'data.valid'
      yield 'recipe', f'without {wanted} and a dnn without `hidden` beside at most linear and fm'
    if losses == {'squared_error'}:
      for key in ('label_smoothing', 'negative_sampling_rate'):
        yield key, 'on squared_error, which predicts no clicks'

  def mistakes(self, cfg: Any) -> Rules:
    layers = {key.removeprefix('model.'): kind for key, kind in self.all_interactions().items()}
    tables = cfg.sparse.tables
    widths = sorted({table.width for table in tables.values()})
    if not layers.keys() - {'shared', 'dense_embedding'} and self.retrieval is None:
      yield 'interactions', 'found []; wanted at least one interaction'
    for key, layer in layers.items():
      kind, part = layer.kind, 'interactions' if 'interactions' in key else key
      known = [name for name, built_in in BUILT_IN.items() if built_in.part == part]
      if kind not in known and '.' not in kind:
        what = 'interaction' if part == 'interactions' else 'layer'
        dotted = ', or give the dotted path of a Keras layer'
        yield key, f"unknown {what} '{kind}'{nearest(kind, known)}{dotted}"
      if kind not in BUILT_IN:
        continue
      needs = BUILT_IN[kind].needs
      if 'shared' in needs and self.shared is None:
        yield key, f"found '{kind}', which reads model.shared; wanted that set, or 'dnn'"
      if BUILT_IN[kind].one_width and len(widths) > 1:
        yield 'interactions', f"'{kind}' needs one width for all slots; found widths {widths}"
      if 'field_factors' in needs and len(tables) > 1:
        yield 'interactions', f"'{kind}' needs one table; found {sorted(tables)}"
      if 'histories' in needs and not any(slot.sequence for slot in cfg.data.slots):
        yield key, f"found '{kind}', which reads histories; wanted a slot with `sequence`"
    yield from self._wrongly_given()
    yield from self._wrong_beside_towers(cfg) if self.retrieval else self._wrong_tasks(cfg)
    if self.dense_embedding is None:
      return
    if not cfg.dense_inputs():
      found = f"found '{self.dense_embedding.kind}'"
      yield 'dense_embedding', f'{found} without data.dense; wanted columns'
    readers = [kind for kind, layer in BUILT_IN.items() if layer.reads_slot_vectors]
    if not any(layer.kind in readers or '.' in layer.kind for layer in layers.values()):
      yield 'dense_embedding', f'no interaction reads it; wanted one of {", ".join(readers)}'

  def _wrongly_given(self) -> Rules:
    for name in self.tasks:
      path = [name]
      while (given := self.tasks[path[-1]].given) is not None:
        key = f'tasks.{path[-1]}.given'
        if given not in self.tasks:
          others = set(self.tasks) - set(path)
          yield key, f"found '{given}'; wanted another task{nearest(given, others)}"
        if given in path:
          cycle = ' → '.join([*path[path.index(given) :], given])
          yield key, f'found a cycle, {cycle}; wanted one of these tasks without `given`'
        path.append(given)

  def _wrong_beside_towers(self, cfg: Any) -> Rules:
    if self.interactions:
      yield 'retrieval', 'found beside model.interactions; wanted either'
    if cfg.data.labels or self.tasks or self.shared:
      yield 'retrieval', 'found beside several tasks; wanted either'
    if self.dense_embedding:
      yield 'dense_embedding', 'found with model.retrieval, which does not read it'
    for key in ('loss', 'label_smoothing', 'negative_sampling_rate'):
      if getattr(self, key) != type(self).model_fields[key].default:
        yield key, 'is of models of clicks; wanted model.retrieval.loss, or this left out'

  def _wrong_tasks(self, cfg: Any) -> Rules:
    losses = {label.name: label.loss for label in cfg.data.labels}
    if not losses:
      for key in ('shared', 'tasks'):
        if getattr(self, key):
          yield key, 'is for several tasks; wanted data.labels, or this left out'
      return
    for name in self.tasks:
      if name not in losses:
        yield f'tasks.{name}', f'is no name of data.labels{nearest(name, losses)}'
    for name in losses:
      if name not in self.tasks:
        yield 'tasks', f"has no '{name}', a name of data.labels; wanted an entry for each"
      if not (self.tasks[name].interactions or self.interactions):
        yield f'tasks.{name}', 'has no interactions; wanted at least one'
    for name, task in self.tasks.items():
      if task.given is not None and 'squared_error' in (losses[name], losses[task.given]):
        yield f'tasks.{name}.given', "needs probabilities; found loss 'squared_error'"
    if self.loss != 'log_loss':
      yield 'loss', f"found '{self.loss}'; wanted the key loss of each of data.labels"
    if (rate := self.negative_sampling_rate) != 1:
      yield 'negative_sampling_rate', f'found {rate}; data.labels has several; wanted 1'
