"""The size of a batch that suits a small log."""

import contextlib

from trainer import config
from trainer.data.conversion import raw_blocks
from trainer.data.log_files import files_of, matching
from trainer.data.prepared import is_prepared, read_meta
from trainer.data.schema import wanted_columns

LEAST_STEPS = 30  # of an epoch: with fewer, the epochs end before all was learned
SMALLEST = 64


def suitable(cfg: config.Config) -> tuple[int, int]:
  """Returns the batch size where the config gives none, and the samples that it is for.

  It is the same on every process: it follows from the files alone. Of a large log only as much is
  read as shows that it is large.
  """
  most = LEAST_STEPS * config.BATCH_SIZE
  samples = _count(cfg, most) if cfg.data.train else most
  size = config.BATCH_SIZE
  while size > SMALLEST and samples < LEAST_STEPS * size:
    size //= 2
  return size, samples


def _count(cfg: config.Config, most: int) -> int:
  """The samples of data.train, or `most` where they are no fewer or the files cannot be read: what
  is wrong with them is told when they are converted.
  """
  samples = 0
  with contextlib.suppress(Exception):
    for path in matching(cfg.data.train, 'data.train'):
      if is_prepared(cfg.data, path):
        samples += read_meta(path)['samples']
        continue
      for file in files_of(path):
        with contextlib.closing(raw_blocks(cfg, file, wanted_columns(cfg))) as blocks:
          for read in blocks:
            samples += len(read().lines)
            if samples >= most:
              return most
    return samples
  return most
