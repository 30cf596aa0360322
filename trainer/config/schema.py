"""The whole config: all sections, and the defaults that follow from several of them."""

from typing import Any

import pydantic

from ops.policy import Policy
from trainer.config.data import Data, Label, Slot
from trainer.config.export import Export
from trainer.config.lifecycle import LIFECYCLE_MODES
from trainer.config.model import Model
from trainer.config.section import NonNegativeInt, Section
from trainer.config.sparse import ROW_DEFAULTS, SCALED_BY_FEATURE, WIDTH, Sparse, row_defaults
from trainer.config.sync import Sync
from trainer.config.train import BATCH_SIZE, STATIC_EPOCHS, Checkpoint, Metrics, Train


class Config(Section):
  """Everything that a job is told."""

  @pydantic.model_validator(mode='before')
  @classmethod
  def _rows_learn_by_kind_and_batch(cls, tree: Any) -> Any:
    """Completes each row optimizer without a learning_rate, and sparse.gradient_scale."""
    sparse = tree.get('sparse') or {} if isinstance(tree, dict) else None
    tables = sparse.get('tables', {'default': {}}) if isinstance(sparse, dict) else None
    if not isinstance(tables, dict):
      return tree
    train = tree.get('train')
    batch_size = train.get('batch_size', BATCH_SIZE) if isinstance(train, dict) else BATCH_SIZE
    if type(batch_size) is not int or batch_size < 1:
      return tree
    by_feature, completed = False, {}
    for name, table in tables.items():
      rules = {}
      for part in ('linear', 'factors') if isinstance(table, dict) else ():
        rule = table.get(part, {})
        kind = rule.get('kind', 'adagrad') if isinstance(rule, dict) else None
        if not isinstance(kind, str) or kind not in ROW_DEFAULTS:
          continue
        if 'learning_rate' in rule:
          by_feature |= kind in SCALED_BY_FEATURE
        else:
          width = table.get('width', WIDTH) if part == 'factors' else 1
          if type(width) is not int or width < 1:
            return tree
          rules[part] = row_defaults(kind, batch_size, width) | rule
      completed[name] = table | rules if rules else table
    scale = {'gradient_scale': 'feature' if by_feature else 'batch'}
    return tree | {'sparse': scale | sparse | {'tables': completed}}

  @pydantic.model_validator(mode='before')
  @classmethod
  def _exports_of_a_stream(cls, tree: Any) -> Any:
    """A stream never ends, so that its exports are bounded."""
    if not isinstance(tree, dict) or not isinstance(tree.get('data'), dict):
      return tree
    export = tree.get('export') or {}
    if not tree['data'].get('watch') or not isinstance(export, dict):
      return tree
    return tree | {'export': {'keep': 3} | export}

  @pydantic.model_validator(mode='before')
  @classmethod
  def _epochs_of_a_static_log(cls, tree: Any) -> Any:
    """A log without days is trained on until validation says that it is enough."""
    if not isinstance(tree, dict) or not isinstance(tree.get('data'), dict):
      return tree
    data, train = tree['data'], tree.get('train') or {}
    ends = data.get('valid') and not data.get('watch') and not data.get('day_pattern')
    if not ends or not isinstance(train, dict) or {'epochs', 'plateau'} & set(train):
      return tree
    return tree | {'train': train | {'plateau': {}, 'epochs': STATIC_EPOCHS}}

  seed: NonNegativeInt = 0
  """Of initial weights, shuffling, dropout and admission by probability."""
  run_dir: str = 'runs/default'
  """Where the run is kept: checkpoints, reports, exports. The default is runs/NAME for a config
  in a file NAME.yaml."""
  data: Data
  """Where the log lies and how to read it."""
  sparse: Sparse = Sparse()
  """The embedding tables."""
  lifecycle: dict[str, Any] = {}
  """When features earn their factors, fade and are deleted: fields of ops.policy.Policy. Admission
  and eviction that are not given are none; a threshold of theirs, here or of a slot, switches on
  what it is of. Where neither is by
  score, base_threshold, delta_threshold and delta_keep_days are null."""
  model: Model
  """The layers and the loss."""
  train: Train = Train()
  """The training loop."""
  checkpoint: Checkpoint = Checkpoint()
  """When the state is saved."""
  export: Export = Export()
  """What is written for serving, and when."""
  sync: Sync = Sync()
  """How the processes of a job meet."""
  metrics: Metrics = Metrics()
  """How quality is measured."""

  @property
  def slots(self) -> list[Slot]:
    """Slots in canonical order: by table (as in `sparse.tables`), then as listed.

    A slot's position in it is its field's index.
    """
    order = list(self.sparse.tables)
    return sorted(self.data.slots, key=lambda s: order.index(s.table))

  def poolings(self) -> list[str]:
    """How each slot's sum is divided, [F]: one feature divides by itself."""
    several = [s.separator or s.value_separator or s.sequence for s in self.slots]
    return [s.pooling if many else 'sum' for s, many in zip(self.slots, several)]

  def slot_ids(self) -> dict[str, int]:
    """The slot id in the top bits of keys, by slot.

    It is 1 + the slot's position in `data.slots`, or the id of the slot that it shares.
    """
    own = {s.name: i + 1 for i, s in enumerate(self.data.slots)}
    return {s.name: own[s.shares or s.name] for s in self.data.slots}

  @property
  def labels(self) -> list[Label]:
    """What is predicted: `data.labels`, or the one label in the same form."""
    data = self.data
    one = Label(
      name=data.label,
      positive=data.label_positive,
      negative=data.label_negative,
      loss=self.model.loss,
      click=1.0,
    )
    return data.labels or [one]

  def uncalibrated(self) -> str | None:
    """Says which key makes predictions that order samples and are no probabilities; None where
    none does.
    """
    focal = self.model.focal_gamma > 0 and [x.name for x in self.labels if x.loss == 'focal']
    if focal:
      key = f'the loss focal of {", ".join(focal)}' if self.data.labels else 'model.loss focal'
    elif self.model.label_smoothing > 0:
      key = f'model.label_smoothing {self.model.label_smoothing:g}'
    else:
      return None
    return (
      f'{key} does not calibrate: predictions order the samples, but are no probabilities of a '
      'click; wanted log_loss without smoothing where they are used as such'
    )

  @property
  def deciding_label(self) -> Label:
    """The label whose metric the best epoch is chosen by."""
    task = self.train.plateau and self.train.plateau.task
    return next((label for label in self.labels if label.name == task), self.labels[0])

  @property
  def deciding_metric(self) -> str:
    """The metric of `deciding_label` that the best epoch is chosen by."""
    plateau = self.train.plateau
    default = 'rmse' if self.deciding_label.loss == 'squared_error' else 'auc'
    return plateau.metric if plateau and plateau.metric else default

  def own_slot_ids(self) -> dict[str, int]:
    """As `slot_ids`, of the slots that have features of their own."""
    ids = self.slot_ids()
    return {s.name: ids[s.name] for s in self.slots if s.shares is None}

  def policy(self) -> Policy:
    """The lifecycle's policy, per-slot thresholds included."""
    ids = self.slot_ids()
    per_slot = {ids[s.name]: s.lifecycle for s in self.data.slots if s.lifecycle}
    modes = {kind: (self._modes(kind) or ['none'])[0] for kind in LIFECYCLE_MODES}
    fields = modes | self.lifecycle
    if 'score' not in (fields['admission'], fields['eviction']):
      # Where scores decide nothing else, no row is left out of an export for its score.
      fields = dict.fromkeys(('base_threshold', 'delta_threshold', 'delta_keep_days')) | fields
    return Policy(**fields, per_slot=per_slot)

  def _modes(self, kind: str) -> list[str]:
    """The modes of admission or eviction that the given thresholds are of."""
    given = set(self.lifecycle).union(*(s.lifecycle for s in self.data.slots))
    return list(dict.fromkeys(mode for key, mode in LIFECYCLE_MODES[kind].items() if key in given))
