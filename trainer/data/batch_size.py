"""Chooses the size of a batch that suits a small log."""

import contextlib

from trainer import config
from trainer.data.conversion import blocks_of_pass
from trainer.data.log_files import matching
from trainer.data.prepared import is_prepared, read_meta
from trainer.data.schema import wanted_columns

LEAST_STEPS = 30  # of an epoch: with fewer, the epochs end before all was learned
SMALLEST = 64


def suitable(cfg: config.Config) -> tuple[int, int]:
  """Returns the batch size if the config gives none, and the samples that it is for.

  It is the same on every process because it follows from the files alone. Only as much of a large
  log is read as shows that it is large.
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
