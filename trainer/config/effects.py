"""Refuses settings that need days in a config without days; warns of useless and harmful ones."""

import itertools
import re
from collections.abc import Iterator

from ops.row_kinds import ROW_OPTIMIZERS
from trainer.config.layers import BUILT_IN
from trainer.config.lifecycle import LIFECYCLE_MODES, Lifecycle
from trainer.config.schema import Config
from trainer.config.section import Section
from trainer.config.yaml_text import flatten
from trainer.errors import ConfigError, short

# Hyperparameters that only some row optimizers read.
_KIND_KEYS = sorted(frozenset().union(*(kind.reads for kind in ROW_OPTIMIZERS.values())))

# Keys that do nothing in a model without factors.
_KEYS = r'width|init_scale|factors\.(kind|learning_rate|l1|l2)'
_OF_FACTORS = re.compile(rf'sparse\.tables\.\w+\.({_KEYS})')


def check_effects(cfg: Config, where: str) -> None:
  """Refuses settings that act at the end of each day if the config has no data.day_pattern.

  Args:
    where: the file that the config comes from, for messages.
  Raises:
    ConfigError: if there is such a setting; the message names the first.
  """
  if cfg.data.day_pattern is not None:
    return
  policy = cfg.policy()
  for key, value, off in (
    ('lifecycle.eviction', policy.eviction, 'none'),
    ('lifecycle.capacity', policy.capacity, None),
    ('export.base', cfg.export.base, False),
    ('export.saved_model', cfg.export.saved_model, False),
  ):
    if value != off:
      raise ConfigError(
        f"{where}: key '{key}': found {short(value)}, which happens at the end of each day, and "
        'without data.day_pattern there are no days; wanted data.day_pattern, or this left out'
      )


def warnings(cfg: Config) -> Iterator[str]:
  """Yields a line for each setting that has no effect in this job, or that harms the model."""
  idle = (_of_slots, _of_rows, _of_lifecycle, _of_model, _of_sync)
  for key, value, why in itertools.chain.from_iterable(find(cfg) for find in idle):
    yield f'{key}: found {short(value)}, which has no effect {why}'
  train = cfg.train
  if train.dense_optimizer.kind == 'ftrl' and (train.plateau or train.schedule):
    changing = 'train.plateau' if train.plateau else 'train.schedule'
    yield (
      "train.dense_optimizer.kind: found 'ftrl', whose weights shrink with its learning rate, "
      f'which {changing} changes; wanted another kind, or a constant rate'
    )
  if reason := cfg.uncalibrated():
    yield reason
  counted = {slot.name for slot in cfg.data.slots if slot.counts}
  for slot in cfg.data.slots:
    if slot.shares in counted:
      yield (
        f"slot '{slot.shares}': its counts also count its features in slot '{slot.name}'; a second "
        'slot of the same column (`column`) has counts of its own'
      )


Idle = Iterator[tuple[str, object, str]]  # a key without effect, its value, and why


def _of_slots(cfg: Config) -> Idle:
  for i, slot in enumerate(cfg.data.slots):
    if slot.is_list_of_another and slot.pooling == 'sum' and cfg.sparse.shared_lists == 'mean':
      why = f"on a list of features of '{slot.shares}' with sparse.shared_lists: mean"
      yield f'data.slots.{i}.pooling', slot.pooling, why
  if not any(slot.is_list_of_another for slot in cfg.data.slots):
    yield from _changed(
      'sparse', cfg.sparse, ['shared_lists'], "without a list of another slot's features"
    )


def _changed(path: str, section: Section, names: list[str], why: str) -> Idle:
  """Yields (key, value, `why`) for each key in `names` whose value is not its default."""
  for name in names:
    value = getattr(section, name)
    if value != type(section).model_fields[name].default:
      yield f'{path}.{name}', value, why


def _of_rows(cfg: Config) -> Idle:
  for path, rule, _ in cfg.sparse.optimizers():
    kind = ROW_OPTIMIZERS[rule.kind]
    other = [key for key in _KIND_KEYS if key not in kind.reads]
    yield from _changed(path, rule, other, f"on kind '{rule.kind}'")
    # A step without a gradient still changes a state that decays, such as the moments of Adam.
    if rule.kind == 'ftrl':
      yield from _changed(path, rule, ['l2_mode'], "on kind 'ftrl', whose weights follow from sums")
    elif not (rule.l1 or rule.l2 or kind.has_decaying_state):
      yield from _changed(path, rule, ['l2_mode'], 'without l1 or l2')


def _of_lifecycle(cfg: Config) -> Idle:
  policy = cfg.policy()
  idle = {
    key: f"with lifecycle.{kind} '{getattr(policy, kind)}'"
    for kind, modes in LIFECYCLE_MODES.items()
    for key, mode in modes.items()
    if getattr(policy, kind) != mode
  }
  if policy.eviction == 'score':
    del idle['delete_after_unseen_days']  # eviction 'score' reads it too
  if policy.capacity is None:
    idle['capacity_by'] = 'without lifecycle.capacity'
  if cfg.data.day_pattern is None:
    idle['decay'] = 'without data.day_pattern: it happens at the end of each day'
  places = [('lifecycle', cfg.lifecycle, Lifecycle())]
  places += [
    (f'data.slots.{i}.lifecycle', slot.lifecycle, cfg.lifecycle)
    for i, slot in enumerate(cfg.data.slots)
    if slot.lifecycle
  ]
  for path, section, usual in places:
    for key, why in idle.items():
      value = getattr(section, key, None)
      if value is not None and value != getattr(usual, key):
        yield f'{path}.{key}', value, why


def _of_model(cfg: Config) -> Idle:
  kinds = {interaction.kind for interaction in cfg.model.all_interactions().values()}
  if kinds == {'linear'}:
    for key, value in flatten(cfg.given).items():
      if _OF_FACTORS.fullmatch(key):
        yield key, value, 'with linear alone, which reads no factors'
  if kinds and not any(k not in BUILT_IN or BUILT_IN[k].reads_dense for k in kinds):
    why = f'with {" and ".join(sorted(kinds))} alone: linear and dnn read dense columns'
    if cfg.data.dense:
      yield 'data.dense', [column.name for column in cfg.data.dense], why
    for i, slot in enumerate(cfg.data.slots):
      yield from _changed(f'data.slots.{i}', slot, ['counts'], why)
  losses = [label.loss for label in cfg.labels]
  if 'focal' not in losses:
    yield from _changed('model', cfg.model, ['focal_gamma'], 'without a loss of kind focal')
  if set(losses) == {'squared_error'}:
    of_clicks = ['label_smoothing', 'negative_sampling_rate']
    yield from _changed('model', cfg.model, of_clicks, 'on squared_error, which predicts no clicks')
  if (retrieval := cfg.model.retrieval) and retrieval.loss == 'in_batch_softmax':
    why = 'on in_batch_softmax, which draws nothing'
    yield from _changed(
      'model.retrieval', retrieval, ['negatives', 'sampling', 'own_positives'], why
    )


def _of_sync(cfg: Config) -> Idle:
  for name, mode in (
    ('row_exchange', 'allreduce'),
    ('max_staleness', 'ps_async'),
    ('geo_steps', 'ps_geo'),
    ('on_lost_worker', 'ps'),
  ):
    if cfg.sync.mode != mode:
      why = f"with sync.mode '{cfg.sync.mode}': it is of '{mode}'"
      yield from _changed('sync', cfg.sync, [name], why)
