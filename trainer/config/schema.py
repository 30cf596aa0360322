"""The whole config: its sections, and values that are computed from several of them."""

import os
from collections.abc import Callable
from typing import Annotated, Any

import pydantic

from ops.policy import Policy
from trainer.config.data import Data
from trainer.config.export import Export
from trainer.config.lifecycle import LIFECYCLE_MODES, Lifecycle, Thresholds
from trainer.config.model import Model
from trainer.config.report import Report
from trainer.config.resolve import resolve
from trainer.config.section import UNSET, NonNegativeInt, Section, set_value
from trainer.config.slots import Label, Slot
from trainer.config.sparse import Sparse
from trainer.config.sync import Sync
from trainer.config.train import Checkpoint, Train
from trainer.config.yaml_text import flatten
from trainer.plain_data import JsonObject

# Thresholds for which Policy has defaults; if they are null, Policy is made without them.
_NUMBERS_OF_POLICY = {*LIFECYCLE_MODES['admission'], 'delete_threshold'}


class Config(Section):
  """The config of a job."""

  seed: NonNegativeInt = 0
  """The seed of initial weights, shuffling, dropout and admission by probability."""
  run_dir: Annotated[str, pydantic.AfterValidator(os.path.expanduser)] = 'runs/default'
  """The directory of the run: checkpoints, reports, exports; or a URL, s3://, gs:// or hdfs://. The
  default for a config in a file NAME.yaml is runs/NAME."""
  data: Data
  """Where the log lies and how to read it."""
  sparse: Sparse = Sparse()
  """The embedding tables."""
  lifecycle: Lifecycle = Lifecycle()
  """When features earn their factors, fade and are deleted."""
  model: Model
  """The layers and the loss."""
  train: Train = Train()
  """The training loop."""
  checkpoint: Checkpoint = Checkpoint()
  """When the state is saved."""
  export: Export = Export()
  """What is written for serving, and when."""
  report: Report = Report()
  """Where the figures of a run go."""
  sync: Sync = Sync()
  """How the processes of a job work together."""

  # What `resolve` begins with, and what it has added.
  _given: 'Config | None' = pydantic.PrivateAttr(None)
  _measured: JsonObject = pydantic.PrivateAttr(default_factory=dict)
  _origins: dict[str, str] = pydantic.PrivateAttr(default_factory=dict)

  @property
  def given(self) -> JsonObject:
    """The keys that the file and --set gave, as nested dicts and lists, without defaults."""
    return self._given.model_dump(exclude_unset=True)

  def origin(self, key: str) -> str:
    """Returns where a key's value comes from: given, measured, default, or 'from train.plateau'."""
    if key in self._origins:
      return self._origins[key]
    return 'default' if set_value(self._given, key.split('.')) is UNSET else 'given'

  def settings(self) -> JsonObject:
    """Returns {key: value} of the settings by which runs are compared.

    Empty values, bins' boundaries that the run measured, and look-up tables' content are left out.
    """
    measured = [key for key, origin in self._origins.items() if origin == 'measured']
    of_data = tuple(key for key in measured if '.from.' in key)
    values = flatten(self.model_dump()).items()
    return {k: v for k, v in values if v not in (None, [], {}) and not k.startswith(of_data)}

  @pydantic.model_validator(mode='wrap')
  @classmethod
  def _complete(cls, tree: Any, validated: Callable[[Any], 'Config']) -> 'Config':
    """Adds the defaults that follow from the values of other keys."""
    return resolve(validated(tree))

  def __eq__(self, other: object) -> bool:
    return isinstance(other, Config) and self.model_dump() == other.model_dump()

  @property
  def ordered_slots(self) -> list[Slot]:
    """The slots by their table in sparse.tables; axes of F slots in arrays have this order."""
    order = list(self.sparse.tables)
    return sorted(self.data.slots, key=lambda s: order.index(s.table))

  @property
  def item_slot(self) -> Slot | None:
    """The slot of the item's id. Only a config with model.retrieval has one."""
    name = self.model.retrieval and self.model.retrieval.item.slots[0]
    return next((slot for slot in self.data.slots if slot.name == name), None)

  def columns_of_items(self) -> set[str]:
    """Returns the names of slots and dense columns that are read from data.items, not the log."""
    if self.data.items is None:
      return set()
    return self.only_of_items() - {self.item_slot.name}

  def only_of_items(self) -> set[str]:
    """Returns the names of slots and dense columns that describe items alone, not queries."""
    if self.model.retrieval is None:
      return set()
    query, item = self.model.retrieval.query, self.model.retrieval.item
    return {*item.slots, *item.dense} - {*query.slots, *query.dense}

  def blank_columns(self, labelled: bool) -> set[str]:
    """Returns the names of the slots and dense columns that are not read from the log but blank.

    Training and evaluation (`labelled`) skip the columns of the table data.items; prediction skips
    those that only describe items.
    """
    return self.columns_of_items() if labelled else self.only_of_items()

  @property
  def predicts_for_users(self) -> bool:
    """Whether predictions, too, read data.group: items are found for the user in it."""
    return self.model.retrieval is not None

  @property
  def adds_up_rows(self) -> bool:
    """Whether layers read sums over a sample's features, so that their number matters."""
    return self.model.retrieval is None

  @property
  def features_per_sample(self) -> float:
    """The mean number of features of a sample; the number of slots if the mean is not known."""
    return self.sparse.features_per_sample or max(1, len(self.data.slots))

  def poolings(self) -> list[str]:
    """Returns each slot's pooling, [F]; 'sum' for a slot with at most one feature a sample."""
    return [s.pooling if s.may_hold_several else 'sum' for s in self.ordered_slots]

  def averaged(self) -> list[bool]:
    """Returns for each slot, [F], whether layers read the mean of a list of shared features."""
    is_mean = self.sparse.shared_lists == 'mean'
    return [is_mean and s.is_list_of_another for s in self.ordered_slots]

  def counted_fields(self) -> list[int]:
    """Returns the indices in `ordered_slots` of the slots with `counts`."""
    return [f for f, slot in enumerate(self.ordered_slots) if slot.counts]

  def dense_inputs(self) -> list[str]:
    """Returns the names of the columns of LayerInputs.dense, in order.

    First come the dense columns, then the shows of all slots with `counts`, then their log-odds.
    """
    counted = [self.ordered_slots[f].name for f in self.counted_fields()]
    names = [f'dense {column.name}' for column in self.data.dense]
    return names + [f'{what} {name}' for what in ('show', 'log-odds') for name in counted]

  def click_shares(self) -> list[float]:
    """Returns, for each label, how many clicks a positive label adds to a feature, from 0 to 1.

    If no label sets the key `click`, this is 1 for the first label and 0 for all others.
    """
    shares = [label.click for label in self.labels]
    if set(shares) == {None}:
      shares[0] = 1.0
    return [share or 0.0 for share in shares]

  def slot_ids(self) -> dict[str, int]:
    """Returns {slot: its id in the top bits of keys}, the same for slots that `shares` connects."""
    own = {s.name: i + 1 for i, s in enumerate(self.data.slots)}
    return {s.name: own[s.shares or s.name] for s in self.data.slots}

  @property
  def labels(self) -> list[Label]:
    """The labels to predict: data.labels or, if there is one label, a list of data.label."""
    data = self.data
    one = Label(
      name=data.label or '',
      positive=data.label_positive,
      negative=data.label_negative,
      loss=self.model.loss,
      click=1.0,
    )
    return data.labels or [one]

  @property
  def kinds_of_labels(self) -> dict[str, str]:
    """What each label measures: 'clicks', 'squared_error', or the 'losses' of finding items."""
    others = 'clicks' if self.model.retrieval is None else 'losses'
    return {x.name: x.loss if x.loss == 'squared_error' else others for x in self.labels}

  @property
  def ranking_metrics(self) -> list[str]:
    """The metrics of the items that the model finds, such as recall@20; [] if it finds none."""
    return self.model.retrieval.metrics() if self.model.retrieval else []

  def uncalibrated(self) -> str | None:
    """Returns a warning if a setting makes predictions differ from probabilities; else None."""
    focal = self.model.focal_gamma > 0 and [x.name for x in self.labels if x.loss == 'focal']
    if focal:
      key = f'the loss focal of {", ".join(focal)}' if self.data.labels else 'model.loss focal'
    elif self.model.label_smoothing > 0 and any(x.loss != 'squared_error' for x in self.labels):
      key = f'model.label_smoothing {self.model.label_smoothing:g}'
    else:
      return None
    return (
      f'{key} does not calibrate: predictions order the samples, but are no probabilities of a '
      'click; wanted log_loss without smoothing where they are used as such'
    )

  @property
  def deciding_label(self) -> Label:
    """The label by whose metric the best epoch is chosen."""
    task = self.train.plateau and self.train.plateau.task
    return next((label for label in self.labels if label.name == task), self.labels[0])

  @property
  def deciding_metric(self) -> str:
    """The metric of `deciding_label` by which the best epoch is chosen."""
    plateau = self.train.plateau
    default = 'rmse' if self.deciding_label.loss == 'squared_error' else 'logloss'
    if self.model.retrieval is not None:
      default = next(iter(self.ranking_metrics), '')
    return plateau.metric if plateau and plateau.metric else default

  def own_slot_ids(self) -> dict[str, int]:
    """Returns {slot: id} of the slots without the key `shares`."""
    ids = self.slot_ids()
    return {s.name: ids[s.name] for s in self.data.slots if s.shares is None}

  def policy(self) -> Policy:
    """Returns the rules of the lifecycle, including the thresholds of single slots."""
    ids = self.slot_ids()

    def fields(section: Thresholds) -> JsonObject:
      values = section.model_dump().items()
      return {k: v for k, v in values if v is not None or k not in _NUMBERS_OF_POLICY}

    per_slot = {ids[s.name]: fields(s.lifecycle) for s in self.data.slots if s.lifecycle}
    return Policy(
      **fields(self.lifecycle),
      seed=self.seed,
      # A retrieval model also pushes gradients of drawn negatives, which have no shows.
      empty_push_is_seen=self.model.retrieval is None,
      per_slot=per_slot,
    )
