"""Runs the rules of a config's sections: tells the first mistake, and settings without effect."""

import functools
from collections.abc import Iterator, Sequence

from trainer.config.lifecycle import Thresholds
from trainer.config.messages import place_of
from trainer.config.schema import Config
from trainer.config.section import Section
from trainer.errors import ConfigError, short


def _sections(section: Section, path: str = '') -> Iterator[tuple[str, Section]]:
  """Yields each section, those within it first, with its key and a dot; '' is the whole config."""
  for name, field in type(section).model_fields.items():
    value, key = getattr(section, name), f'{path}{field.alias or name}.'
    parts = {key: value}
    if isinstance(value, (dict, list)):
      items = value.items() if isinstance(value, dict) else enumerate(value)
      parts = {f'{key}{part}.': inner for part, inner in items}
    for place, inner in parts.items():
      if isinstance(inner, Section):
        yield from _sections(inner, place)
  yield path, section


def check(cfg: Config, where: str, overrides: Sequence[str]) -> None:
  """Raises a ConfigError about the first mistake, if any; it names the file or --set string."""
  for path, section in _sections(cfg):
    for key, text in section.mistakes(cfg):
      key = key[1:] if key.startswith('/') else (path + key).removesuffix('.')
      raise ConfigError(f"{place_of(key, where, overrides)}: key '{key}': {text}")


def check_days(cfg: Config, where: str) -> None:
  """Refuses settings that act at the end of each day if the config has no days."""
  if cfg.data.has_days:
    return
  days = cfg.data.days_key
  for key, value, off in (
    ('lifecycle.eviction', cfg.lifecycle.eviction, 'none'),
    ('lifecycle.capacity', cfg.lifecycle.capacity, None),
    ('export.base', cfg.export.base, False),
    ('export.saved_model', cfg.export.saved_model, False),
  ):
    if value != off:
      raise ConfigError(
        f"{where}: key '{key}': found {short(value)}, which happens at the end of each day, and "
        f'without {days} there are no days; wanted {days}, or this left out'
      )


def warnings(cfg: Config) -> Iterator[str]:
  """Yields a line for each setting that has no effect in this job, or that harms the model."""
  for path, section in _sections(cfg):
    for key, why in section.idle(cfg):
      *inner, name = key.split('.')
      holder = functools.reduce(getattr, inner, section)
      value, usual = getattr(holder, name), type(holder).model_fields[name].default
      if type(holder) is Thresholds:  # those of a slot
        usual = getattr(cfg.lifecycle, name)
      if value not in (None, usual) and cfg.origin(path + key) == 'given':
        value = [column.name for column in value] if isinstance(value, list) else value
        yield f'{path}{key}: found {short(value)}, which has no effect {why}'
  train = cfg.train
  if train.dense_optimizer.kind == 'ftrl' and (train.plateau or train.schedule):
    changing = 'train.plateau' if train.plateau else 'train.schedule'
    yield (
      "train.dense_optimizer.kind: found 'ftrl', whose weights shrink with its learning rate, "
      f'which {changing} changes; wanted another kind, or a constant rate'
    )
  for key, layer in cfg.model.all_interactions().items():
    module, _, name = layer.kind.rpartition('.')
    if module == '__main__':
      yield (
        f"{key}: found '{layer.kind}', a class of this notebook or script, which no other process "
        'finds, such as ctr-evaluate, ctr-export or trainer.load; wanted it in a file on '
        f'PYTHONPATH, as my_layers.py, and my_layers.{name} here'
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
