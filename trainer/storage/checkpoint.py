"""Checkpoints: everything of a run. Any number of processes writes one, any other number reads it.

    checkpoints/ckpt-000000123/
      rows/part-00000-of-00002/   what process 0 of 2 owns: the logical shards [0, 128)
        key.npy, show.npy, …      one file a column (docs/architecture.md), all in one row order: by
                                  logical shard
        factors_default.npy       the admitted rows of a table, in the same order: float32, or the
                                  bits of bfloat16 as uint16, as the table's dtype is
        index.json                where each block of rows starts, and its checksum in every column
      dense.npz                   dense variables, optimizer slots, metrics: name -> array
      progress.json  config.yaml
      MANIFEST.json               every file, its size and checksum
      DONE                        the checkpoint counts; holds MANIFEST.json's checksum

A block is a run of rows of one of the 256 logical shards (ops.sharding). Each block has a checksum
of its own, so that a process reads and checks only the blocks of the shards that it owns. The
checksums of a column are those of its header and of its blocks, which cover every byte; they stand
in index.json, whose checksum is in MANIFEST.json. Rows are written and read one block at a time, in
one sequential pass.
"""

import filecmp
import functools
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, BinaryIO, Protocol

import numpy as np
import tensorflow as tf
from absl import logging

from ops.sharding import SHARDS, shard_of, shards_of
from trainer import files
from trainer.comm.communicator import Communicator, SingleProcess
from trainer.data.prefetch import prefetch
from trainer.errors import DataLoss, UserError, plain_errors

FORMAT = 1
_NAME = re.compile(r'ckpt-(\d{9,})(?:-(\d+))?')

Chunk = dict[str, np.ndarray]  # rows of one logical shard: column -> array [n, …]


class Store(Protocol):
  """What a checkpoint needs of the rows that a process owns (ops.row_store.RowStore)."""

  def export_state(self) -> Iterator[Chunk]:
    """Yields all rows, logical shards ascending."""

  def import_state(self, source: Iterable[Chunk]) -> None:
    """Takes up the rows in place of those that it holds."""

  def clear(self) -> None:
    """Drops all rows."""


def _part(rank: int, size: int) -> str:
  return f'part-{rank:05d}-of-{size:05d}'


class _ColumnWriter:
  """Writes a column of rows, block by block.

  Args:
    path: of the file.
    first: the first block: [n, …], or a scalar where the column has one value a block.
  """

  def __init__(self, path: str, first: np.ndarray):
    self._path, self._scalar = path, first.ndim == 0
    self._file = files.NpyWriter(path, first.dtype, first.shape[1:])
    self._counts: list[int] = []  # rows of each block
    self._crc32: list[int] = []  # of each block

  def append(self, array: np.ndarray) -> None:
    """Writes a block."""
    dtype, row_shape = self._file.dtype, self._file.row_shape
    _check_finite(self._path, array)
    if (array.dtype, array.ndim == 0, array.shape[1:]) != (dtype, self._scalar, row_shape):
      raise ValueError(
        f'{self._path}: a block of {array.dtype} {array.shape}; wanted {dtype} and rows of '
        f'{row_shape}'
      )
    self._counts.append(array.size if self._scalar else len(array))
    self._crc32.append(zlib.crc32(self._file.append(array)))

  def close(self) -> dict[str, Any]:
    """Completes the file on the disk; returns the column's entry of index.json."""
    header = self._file.close()
    return {
      'dtype': self._file.dtype.str,
      'scalar': self._scalar,
      'row_shape': self._file.row_shape,
      'header_bytes': len(header),
      'header_crc32': zlib.crc32(header),
      'counts': self._counts,
      'crc32': self._crc32,
    }


def _check_finite(name: str, array: np.ndarray) -> None:
  if os.path.basename(name).startswith('factors_') and array.dtype == np.uint16:  # bfloat16
    finite = ((array & 0x7F80) != 0x7F80).all()
  else:  # the sum is finite where all values are, unless they are far too large already
    finite = array.dtype.kind != 'f' or np.isfinite(array.sum())
  if not finite:
    raise UserError(
      f'{name}: holds values that are not finite, and is not saved; wanted lower learning rates, '
      'clip, or dense columns and weights without huge values'
    )


def _bytes_of(array: np.ndarray) -> memoryview:
  return memoryview(array.reshape(-1).view(np.uint8))


def _write_rows(folder: str, store: Store, shards: range) -> None:
  """Writes a store's rows, which are of these logical shards, as one part."""
  os.makedirs(folder)
  columns: dict[str, _ColumnWriter] = {}
  block_shards, rows = [], 0
  for chunk in store.export_state():
    shard = int(shard_of(chunk['key'][:1])[0])
    if shard not in shards:
      raise ValueError(f'the store gave a row of shard {shard}; it owns {shards}')
    for name, array in chunk.items():
      if name not in columns:
        columns[name] = _ColumnWriter(os.path.join(folder, name + '.npy'), array)
      columns[name].append(array)
    block_shards.append(shard)
    rows += len(chunk['key'])
  index = {
    'rows': rows,
    'block_shards': block_shards,
    'columns': {name: column.close() for name, column in columns.items()},
  }
  files.write_synced(os.path.join(folder, 'index.json'), files.to_json(index))
  files.sync_directory(folder)


def _serial(path: str) -> int | None:
  """Returns a checkpoint's serial number, or None where its manifest is damaged.

  Saves in one directory are counted: a later one has a greater number, whatever its step.
  """
  try:
    return int(files.read_manifest(path)['serial'])
  except DataLoss:
    return None


def candidates(directory: str) -> dict[str, int | None]:
  """Returns the checkpoints that are DONE: path -> serial number (None: damaged).

  Damaged ones come first, then the newest; so a reader that takes the first good one says of each
  damaged one that it was refused.
  """
  try:
    paths = [os.path.join(directory, n) for n in os.listdir(directory) if _NAME.fullmatch(n)]
  except FileNotFoundError:
    return {}
  found = [(_serial(path), path) for path in paths if files.is_done(path)]
  found.sort(key=lambda one: (one[0] is None, one[0] or 0, one[1]), reverse=True)
  return {path: serial for serial, path in found}


def save(
  directory: str,
  step: int,
  *,
  store: Store,
  dense: Mapping[str, np.ndarray],
  progress: Mapping[str, Any],
  config_text: str,
  keep: int,
  communicator: Communicator | None = None,
) -> str:
  """Writes a checkpoint; every process calls it, each with the rows that it owns.

  Args:
    directory: of the checkpoints; all processes see it.
    step: the number in its name; a second one at the same step is named `ckpt-STEP-2`.
    store: the rows.
    dense: name -> array; process 0's counts.
    progress: what JSON can hold; process 0's counts.
    config_text: the resolved config.
    keep: so many of the newest are kept, this one among them.
    communicator: how the processes meet; None: there is one.
  Returns:
    Its path.
  Raises:
    UserError: on every process where one could not write, or has values that are not finite;
      earlier checkpoints are then as they were.
  """
  communicator = communicator or SingleProcess()
  rank, size = communicator.rank, communicator.size
  what = f'cannot save a checkpoint in {directory}'

  def begin() -> tuple[str, int] | None:
    return _begin(directory, step) if rank == 0 else None

  final, serial = communicator.broadcast(communicator.together(what, begin))
  unfinished = final + files.UNFINISHED

  def write() -> None:
    _write_rows(os.path.join(unfinished, 'rows', _part(rank, size)), store, shards_of(rank, size))
    if rank == 0:
      for name, array in dense.items():
        _check_finite(name, np.asarray(array))
      for name, data in (
        ('dense.npz', files.to_npz(dense)),
        ('progress.json', json.dumps(progress, indent=1).encode()),
        ('config.yaml', config_text.encode()),
      ):
        files.write_synced(os.path.join(unfinished, name), data)

  def finish() -> None:
    if rank:
      return
    entries = files.entries(unfinished, unchecked=['.npy'])
    for part in range(size):
      index = os.path.join('rows', _part(part, size), 'index.json')
      if index not in entries:
        raise DataLoss(
          f'{os.path.join(unfinished, index)}: is missing; do all processes write to the same '
          f'{directory}?'
        )
    manifest = {'format': FORMAT, 'serial': serial, 'step': step, 'parts': size, 'files': entries}
    files.publish(unfinished, final, manifest)
    for old in [path for path, serial in candidates(directory).items() if serial][keep:]:
      files.remove(old)

  try:
    communicator.together(what, write)
    communicator.together(what, finish)
  except UserError:
    if rank == 0:
      files.remove(unfinished)  # gives its space back
    raise
  return final


def _begin(directory: str, step: int) -> tuple[str, int]:
  """Makes room for a checkpoint under its temporary name; returns its path and serial number."""
  os.makedirs(directory, exist_ok=True)
  done = candidates(directory)
  for name in os.listdir(directory):
    path = os.path.join(directory, name)
    if name.startswith('ckpt-') and path not in done:  # a crash has left it
      files.remove(path)
  names = [_NAME.fullmatch(os.path.basename(path)) for path in done]
  same_step = [int(name[2] or 1) for name in names if int(name[1]) == step]
  suffix = f'-{max(same_step) + 1}' if same_step else ''
  final = os.path.join(directory, f'ckpt-{step:09d}{suffix}')
  os.makedirs(os.path.join(final + files.UNFINISHED, 'rows'))
  return final, 1 + max(filter(None, done.values()), default=0)


def link(path: str, directory: str) -> None:
  """Makes a checkpoint the only one of another directory, as hard links to the same files; as
  copies where the file system has no links.

  Args:
    path: of a checkpoint that is DONE.
    directory: of checkpoints.
  """

  def link_or_copy(source: str, target: str) -> None:
    try:
      os.link(source, target)
    except OSError:
      shutil.copyfile(source, target)

  os.makedirs(directory, exist_ok=True)
  final = os.path.join(directory, os.path.basename(path))
  done = os.path.join(final, files.DONE)
  if not os.path.exists(done) or not filecmp.cmp(done, os.path.join(path, files.DONE), False):
    unfinished = final + files.UNFINISHED
    files.remove(unfinished)
    files.remove(final)
    skip_done = shutil.ignore_patterns(files.DONE)
    shutil.copytree(path, unfinished, copy_function=link_or_copy, ignore=skip_done)
    for folder, _, _ in os.walk(unfinished):
      files.sync_directory(folder)
    os.rename(unfinished, final)
    link_or_copy(os.path.join(path, files.DONE), done)
    files.sync_directory(final)
    files.sync_directory(directory)
  for name in os.listdir(directory):
    if name != os.path.basename(path):
      files.remove(os.path.join(directory, name))


def read_rows(path: str, manifest: Mapping[str, Any], shards: range) -> Iterator[Chunk]:
  """Yields the rows of some logical shards, block by block as they were given to `save`.

  Args:
    path: of the checkpoint.
    manifest: of `check`.
    shards: the logical shards.
  Raises:
    DataLoss: naming the file whose bytes are not those that were written.
  """
  parts, listed = manifest['parts'], manifest['files']
  for rank in range(parts):
    own = shards_of(rank, parts)
    if own.start >= shards.stop or shards.start >= own.stop:
      continue
    part = os.path.join('rows', _part(rank, parts))
    index = json.loads(files.read_checked(path, os.path.join(part, 'index.json'), listed))
    columns: dict[str, dict[str, Any]] = index['columns']
    opened: dict[str, BinaryIO] = {}
    try:
      for name, column in columns.items():
        file = os.path.join(path, part, name + '.npy')
        opened[name] = open(file, 'rb', buffering=0)
        if zlib.crc32(opened[name].read(column['header_bytes'])) != column['header_crc32']:
          raise DataLoss(f'{file}: its header has changed')
      starts = {n: np.concatenate([[0], np.cumsum(c['counts'])]) for n, c in columns.items()}
      for i, shard in enumerate(index['block_shards']):
        if shard in shards:
          yield {n: _read_block(opened[n], c, i, int(starts[n][i])) for n, c in columns.items()}
    finally:
      for file in opened.values():
        file.close()


def _read_block(file: BinaryIO, column: Mapping[str, Any], i: int, start: int) -> np.ndarray:
  """Reads block i of a column, whose first row is row `start`."""
  array = np.empty([column['counts'][i], *column['row_shape']], np.dtype(column['dtype']))
  data = left = _bytes_of(array)
  row_bytes = array.itemsize * int(np.prod(column['row_shape'], dtype=np.int64))
  file.seek(column['header_bytes'] + start * row_bytes)
  while left:  # an unbuffered read may bring a part
    n = file.readinto(left)
    if not n:
      raise DataLoss(f'{file.name}: ends {len(left)} bytes too early')
    left = left[n:]
  if zlib.crc32(data) != column['crc32'][i]:
    raise DataLoss(
      f'{file.name}: block {i}, rows {start} to {start + len(array)}: its checksum is '
      f'{zlib.crc32(data):08x}; wanted {column["crc32"][i]:08x}'
    )
  return array[0] if column['scalar'] else array


def check(path: str) -> dict[str, Any]:
  """Checks that a checkpoint is whole, as far as names and sizes tell.

  Returns:
    Its manifest.
  Raises:
    DataLoss: where it is not.
  """
  manifest = files.read_manifest(path)
  if manifest['format'] != FORMAT:
    raise DataLoss(f'{path}: is of format {manifest["format"]}; wanted {FORMAT}')
  for rank in range(manifest['parts']):
    name = os.path.join('rows', _part(rank, manifest['parts']), 'index.json')
    if name not in manifest['files']:
      raise DataLoss(f'{os.path.join(path, name)}: is missing')
  files.check_listed(path, manifest['files'])
  return manifest


def config_of(path: str) -> str:
  """Returns the config of a checkpoint, as text.

  Raises:
    DataLoss: where its bytes are not those that were written.
  """
  return files.read_checked(path, 'config.yaml', check(path)['files']).decode()


# Given a checkpoint's config, returns what converts the rows of the whole checkpoint into those
# that this process owns; None where the rows fit as they are.
Adapt = Callable[[str], Callable[[Iterator[Chunk]], Iterator[Chunk]] | None]


def restore(
  path: str,
  *,
  store: Store,
  communicator: Communicator | None = None,
  adapt: Adapt | None = None,
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
  """Reads one checkpoint, whatever number of processes wrote it.

  Args:
    path: of the checkpoint.
    store: takes up the rows that this process owns, in place of what it holds.
    communicator: how the processes meet; None: there is one.
    adapt: is given the checkpoint's config as text, and returns what changes its rows; None where
      they are taken as they are.
  Returns:
    What `save` was given as `dense` and `progress`.
  Raises:
    DataLoss: where the checkpoint is damaged; the store may then hold some of the rows.
    UserError: where it cannot be read.
  """
  communicator = communicator or SingleProcess()
  with plain_errors(f'cannot read {path}'):
    manifest = check(path)
    listed = manifest['files']
    dense = files.from_npz(files.read_checked(path, 'dense.npz', listed))
    progress = json.loads(files.read_checked(path, 'progress.json', listed))
    config_text = files.read_checked(path, 'config.yaml', listed).decode()
    if change := adapt(config_text) if adapt else None:
      rows = change(read_rows(path, manifest, range(SHARDS)))
    else:
      rows = read_rows(path, manifest, shards_of(communicator.rank, communicator.size))
    try:
      # The next block is read and checked while this one goes into the table.
      store.import_state(prefetch(rows, depth=1))
    except tf.errors.OpError as e:
      raise DataLoss(
        f'{path}: its rows do not go into this table: {" ".join(e.message.split())}'
      ) from e
  return dense, progress


def restore_latest(
  directory: str,
  *,
  store: Store,
  communicator: Communicator | None = None,
  adapt: Adapt | None = None,
) -> tuple[str, dict[str, np.ndarray], dict[str, Any]] | None:
  """Reads the newest checkpoint that is good on every process.

  Why a newer one was refused is said in the log.

  Args:
    directory: of the checkpoints.
    store: takes up the rows that this process owns, in place of what it holds.
    communicator: how the processes meet; None: there is one.
    adapt: as of `restore`.
  Returns:
    Its path and what `save` was given as `dense` and `progress`; None where there is none yet.
  Raises:
    UserError: where there are checkpoints and none is good.
  """
  communicator = communicator or SingleProcess()
  is_first = communicator.rank == 0
  paths = communicator.broadcast(
    communicator.together(
      f'cannot read {directory}', lambda: list(candidates(directory)) if is_first else None
    )
  )
  refusal = None
  for path in paths:
    try:
      dense, progress = communicator.together(
        f'cannot read {path}',
        functools.partial(restore, path, store=store, communicator=communicator, adapt=adapt),
      )
      if refusal:
        logging.warning('using %s instead', path)
      return path, dense, progress
    except UserError as e:
      refusal = refusal or e
      logging.warning('checkpoint refused: %s', e)
      store.clear()  # of the rows that were read before the damage was found
  if refusal:
    raise UserError(f'{directory}: none of its {len(paths)} checkpoints is good: {refusal}')
  return None
