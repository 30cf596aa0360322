"""The sections below `model`: interactions, tasks and the loss."""

from typing import Annotated, Any

import pydantic

from trainer.config.data import Loss
from trainer.config.retrieval import Retrieval
from trainer.config.section import NonNegative, PositiveShare, Section, Share
from trainer.plain_data import Json

# Interactions that are built in; others are dotted paths of Keras layers.
INTERACTIONS = ('linear', 'fm', 'ffm', 'fwfm', 'cross', 'dnn', 'dlrm', 'tower', 'din')
# What several tasks' towers may read, likewise.
SHARED = ('shared_bottom', 'mmoe')


class Interaction(Section):
  """One term of the logit. `fm` and `{dnn: {hidden: [64]}}` are short forms."""

  kind: str
  """Built in (docs/layers.md), or the dotted path of a Keras layer."""
  args: dict[str, Any] = {}
  """What the layer's constructor is given."""


def interaction(item: Json) -> Json:
  """`fm`, `{dnn: {hidden: [64]}}` and `{kind: dnn, args: {...}}` all name an interaction."""
  if isinstance(item, str):
    return {'kind': item}
  if isinstance(item, dict) and len(item) == 1 and 'kind' not in item:
    ((kind, args),) = item.items()
    return {'kind': kind, 'args': args or {}}
  return item


def _interactions(value: Json) -> Json:
  return [interaction(item) for item in value] if isinstance(value, list) else value


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
  retrieval: Retrieval | None = None
  """In place of interactions: two towers that find items (docs/retrieval.md)."""
  shared: Annotated[Interaction | None, pydantic.BeforeValidator(interaction)] = None
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
  negative_sampling_rate: PositiveShare = 1.0
  """The share of the negatives that the log kept; predictions are corrected for it."""

  def all_interactions(self) -> dict[str, Interaction]:
    """Those of all tasks, and the shared part, each by its key."""
    listed = [('model.interactions', self.interactions)]
    listed += [(f'model.tasks.{n}.interactions', t.interactions) for n, t in self.tasks.items()]
    found = {f'{key}.{i}': one for key, some in listed for i, one in enumerate(some)}
    return found | ({} if self.shared is None else {'model.shared': self.shared})
