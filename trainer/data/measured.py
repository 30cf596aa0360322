"""Measures what a config leaves open on its log: the batch size of a small one, bins of numbers."""

import contextlib
from collections.abc import Collection

import numpy as np

from trainer import config
from trainer.data.columns.arrow_columns import ArrowColumns, ArrowReader
from trainer.data.conversion import blocks_of_pass
from trainer.data.log_files import matching
from trainer.data.passes import announced, passes
from trainer.data.prepared import is_prepared, read_meta
from trainer.data.schema import wanted_columns
from trainer.errors import BadPass, UserError
from trainer.plain_data import Json

LEAST_STEPS = 30  # of an epoch: with fewer, the epochs end before all was learned
SMALLEST = 64
MOST_SAMPLES = 1_000_000  # whose numbers bins are measured on


def measured(cfg: config.Config, init_from: str | None = None) -> tuple[dict[str, Json], list[str]]:
  """Returns the values of the keys that a config leaves open, and a line on each.

  They are those of its run where there is one, and of the run that it begins with. Others are
  measured, the same on every process because they follow from the files alone.

  Args:
    cfg: the config.
    init_from: the run_dir of `--init_from`.
  """
  values = config.measured_of_run(cfg, cfg.run_dir)
  told = [f'{key}: {value}, measured when the run began' for key, value in values.items()]
  if init_from:
    for key, value in config.measured_of_run(cfg, init_from).items():
      if key in cfg.data.unmeasured() and key not in values:
        values[key] = value
        told.append(f'{key}: {value}, as in {init_from}')
  if 'batch_size' not in cfg.train.model_fields_set and 'train.batch_size' not in values:
    size, samples = suitable(cfg)
    values['train.batch_size'] = size
    if size != cfg.train.batch_size:
      told.append(
        f'train.batch_size: {size}, measured: the log has {samples:,} samples '
        f'({cfg.train.batch_size} in a large one)'
      )
  bins = boundaries(cfg, values)
  return values | bins, told + [f'{k}: {v}, measured on the first pass' for k, v in bins.items()]


def suitable(cfg: config.Config) -> tuple[int, int]:
  """Returns the batch size if the config gives none, and the samples that it is for.

  Only as much of a large log is read as shows that it is large.
  """
  most = LEAST_STEPS * config.BATCH_SIZE
  samples = _count(cfg, most) if cfg.data.train else most
  size = config.BATCH_SIZE
  while size > SMALLEST and samples < LEAST_STEPS * size:
    size //= 2
  return size, samples


def _count(cfg: config.Config, most: int) -> int:
  """Counts the samples of data.train, up to `most`.

  Returns `most` if the files cannot be read: conversion tells what is wrong with them.
  """
  samples = 0
  with contextlib.suppress(Exception):
    for path in matching(cfg.data.train, 'data.train'):
      if is_prepared(cfg.data, path):
        samples += read_meta(path)['samples']
        continue
      with contextlib.closing(blocks_of_pass(cfg, path, wanted_columns(cfg))) as blocks:
        for block in blocks:
          samples += len(block.lines)
          if samples >= most:
            return most
    return samples
  return most


def boundaries(cfg: config.Config, known: Collection[str] = ()) -> dict[str, Json]:
  """Measures the boundaries of bins on the first pass that can be read.

  Args:
    cfg: the config.
    known: keys that need not be measured.
  Returns:
    The boundaries, by their keys in the config.
  Raises:
    UserError: if there is no pass, or it has no number for some bins.
  """
  slots = {key: slot for key, slot in cfg.data.unmeasured().items() if key not in known}
  if not slots:
    return {}
  listed = passes(cfg, cfg.data.train, 'data.train') if cfg.data.train else announced(cfg)[0]
  error = UserError(
    f'{next(iter(slots))}: found no pass in {cfg.data.watch} that they could be measured on; '
    'wanted one, or boundaries'
  )
  for data_pass in listed:
    try:
      if is_prepared(cfg.data, data_pass.path):
        return _of_prepared(data_pass.path, slots)
      numbers = _numbers(cfg, data_pass.path, slots)
    except BadPass as e:
      error = e
      continue
    return {key: _boundaries(slots[key], x, data_pass.path) for key, x in numbers.items()}
  raise error


def _of_prepared(path: str, slots: dict[str, config.Slot]) -> dict[str, Json]:
  """Returns the boundaries that a pass was prepared with."""
  made = read_meta(path)['schema']['made']
  for slot in slots.values():
    found = made.get(slot.name, {}) | {'boundaries': None}
    if found != slot.made.model_dump():
      raise UserError(
        f"{path}: prepared for another schema: its slot '{slot.name}' is made of {found}, the "
        f'config wants {slot.made.model_dump()}; prepare it again'
      )
  return {key: made[slot.name]['boundaries'] for key, slot in slots.items()}


def _numbers(cfg: config.Config, path: str, slots: dict[str, config.Slot]) -> dict[str, np.ndarray]:
  """Returns the numbers of a pass's first samples that go into bins, by the key of `slots`."""
  found: dict[str, list[np.ndarray]] = {key: [] for key in slots}
  wanted = {
    name: f"slot '{slot.name}'" for slot in slots.values() for name, _ in cfg.data.columns_of(slot)
  }
  samples = 0
  with contextlib.closing(blocks_of_pass(cfg, path, wanted)) as blocks:
    for block in blocks:
      columns = ArrowColumns(cfg, block.columns, len(block.lines), lambda *_: None)
      for key, slot in slots.items():
        x = ArrowReader(columns, slot.name).numbers(slot.made.bins)
        found[key].append(x[~np.isnan(x)])
      samples += len(block.lines)
      if samples >= MOST_SAMPLES:
        break
  return {key: np.concatenate([np.zeros([0]), *parts]) for key, parts in found.items()}


def _boundaries(slot: config.Slot, numbers: np.ndarray, path: str) -> list[float]:
  """Returns the boundaries of a slot's bins, each in the shortest text of its float32."""
  if not len(numbers):
    raise UserError(
      f"{path}: slot '{slot.name}': found no number in the column '{slot.made.bins}' that bins "
      'could be measured on; wanted some, or boundaries'
    )
  if (bins := slot.made.quantiles) is not None:
    found = np.sort(numbers)[np.arange(1, bins) * len(numbers) // bins]
  else:
    found = np.linspace(numbers.min(), numbers.max(), slot.made.widths + 1)[1:-1]
  return [float(str(bound)) for bound in np.unique(found.astype(np.float32))]
