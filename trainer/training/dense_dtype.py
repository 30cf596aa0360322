"""Chooses the dtype of matrix products in training steps if `train.dense_dtype` is bfloat16.

Some processors multiply in bfloat16 more slowly than in float32, so a new run measures both. The
choice is kept in a file of the run_dir: it changes the model, so a restart on another machine must
not choose anew.
"""

import os

from absl import logging

from ops import bfloat16
from trainer import files
from trainer.comm.communicator import Communicator
from trainer.errors import UserError

FILE = 'dense_dtype'  # the file in the run_dir that holds the choice


def chosen(wanted: str, run_dir: str, communicator: Communicator) -> str:
  """Returns the dtype of matrix products if the config wants `wanted`. Every process calls it."""
  if wanted == 'float32':
    return wanted
  everywhere = all(communicator.gather(bfloat16.available()))
  path = os.path.join(run_dir, FILE)

  def choose() -> str:
    if os.path.exists(path):
      return _kept(path, everywhere)
    dtype = _measured() if everywhere else 'float32'
    if not everywhere:
      logging.warning(
        'train.dense_dtype: the run trains in float32, because a processor of this job cannot '
        'multiply in bfloat16 (no avx512_bf16)'
      )
    os.makedirs(run_dir, exist_ok=True)
    files.write_synced(path + files.UNFINISHED, dtype.encode())
    os.replace(path + files.UNFINISHED, path)
    files.sync_directory(run_dir)
    return dtype

  return communicator.on_first(f'cannot use {path}', choose)


def _measured() -> str:
  """Measures which dtype multiplies faster on this machine; prints and returns it."""
  seconds = bfloat16.seconds()
  dtype = min(seconds, key=seconds.__getitem__)
  told = ', '.join(f'{1000 * s:.2f} ms in {name}' for name, s in seconds.items())
  print(f'train.dense_dtype: a layer takes {told}; the run trains in {dtype}', flush=True)
  return dtype


def _kept(path: str, everywhere: bool) -> str:
  """Returns, and prints, the dtype that the run chose when it began; UserError for another text.

  Unless processors can multiply in bfloat16 `everywhere`, it warns that this is slow.
  """
  with open(path, encoding='utf-8', errors='replace') as f:
    dtype = f.read()
  if dtype not in ('float32', 'bfloat16'):
    raise UserError(f"{path}: found {dtype[:20]!r}; wanted 'float32', 'bfloat16', or no such file")
  print(f'train.dense_dtype: the run goes on in {dtype}, as it began', flush=True)
  if dtype == 'bfloat16' and not everywhere:
    logging.warning(
      'train.dense_dtype: the run began in bfloat16; a processor of this job (no avx512_bf16) '
      'multiplies rounded factors in float32, which is slower and gives the same up to sum order'
    )
  return dtype
