"""The sections below `model`: interactions, tasks and the loss."""

from typing import Annotated, Any

import pydantic

from trainer.config.data import Loss
from trainer.config.layers import BUILT_IN
from trainer.config.retrieval import Retrieval
from trainer.config.section import NonNegative, PositiveShare, Section, Share, wrong
from trainer.errors import nearest
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

  def all_interactions(self) -> dict[str, Interaction]:
    """Returns {config key: layer} of all layers of the model.

    They include the layers of tasks, model.shared and model.dense_embedding.
    """
    listed = [('model.interactions', self.interactions)]
    listed += [(f'model.tasks.{n}.interactions', t.interactions) for n, t in self.tasks.items()]
    layers = {f'{key}.{i}': layer for key, some in listed for i, layer in enumerate(some)}
    others = {'model.shared': self.shared, 'model.dense_embedding': self.dense_embedding}
    return layers | {key: layer for key, layer in others.items() if layer is not None}

  @pydantic.model_validator(mode='after')
  def _check_interactions(self) -> 'Model':
    layers = {key.removeprefix('model.'): kind for key, kind in self.all_interactions().items()}
    if not layers.keys() - {'shared', 'dense_embedding'} and self.retrieval is None:
      wrong('interactions', 'found []; wanted at least one interaction')
    for key, layer in layers.items():
      kind, part = layer.kind, 'interactions' if 'interactions' in key else key
      known = [name for name, built_in in BUILT_IN.items() if built_in.part == part]
      if kind not in known and '.' not in kind:
        what = 'interaction' if part == 'interactions' else 'layer'
        dotted = ', or give the dotted path of a Keras layer'
        wrong(key, f"unknown {what} '{kind}'{nearest(kind, known)}{dotted}")
      if kind in BUILT_IN and 'shared' in BUILT_IN[kind].needs and self.shared is None:
        wrong(key, f"found '{kind}', which reads model.shared; wanted that set, or 'dnn'")
    return self

  @pydantic.model_validator(mode='after')
  def _check_given(self) -> 'Model':
    for name in self.tasks:
      path = [name]
      while (given := self.tasks[path[-1]].given) is not None:
        key = f'tasks.{path[-1]}.given'
        if given not in self.tasks:
          others = set(self.tasks) - set(path)
          wrong(key, f"found '{given}'; wanted another task{nearest(given, others)}")
        if given in path:
          cycle = ' → '.join([*path[path.index(given) :], given])
          wrong(key, f'found a cycle, {cycle}; wanted one of these tasks without `given`')
        path.append(given)
    return self
