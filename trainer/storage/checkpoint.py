"""Checkpoints: everything of a run, lossless, that any number of processes writes and any other
number reads.

    checkpoints/ckpt-000000123/
      rows/part-00000-of-00002/   what process 0 of 2 owns: the logical shards [0, 128)
        key.npy, show.npy, …      one file a column (docs/architecture.md), all in one row order: by
        logical shard
        factors_default.npy       the admitted rows of a table, in the same order
        index.json                where each block of rows starts, and its checksum in every column
      dense.npz                   dense variables, optimizer slots, metrics: name -> array
      progress.json  config.yaml
      MANIFEST.json               every file, its size and checksum
      DONE                        the checkpoint counts; holds MANIFEST.json's checksum

A block is a run of rows of one logical shard (256 of them by the key's hash, whatever the number of
processes), and each is
checked by itself: a process reads and checks only the blocks of its own shards. A column's
  checksums are those of its
header and of its blocks, which cover every byte; they stand in index.json, whose checksum is in
MANIFEST.json.
Both ways go one block at a time, in one sequential pass over the rows.
"""

import functools
import io
import json
import os
import re
import zlib

import numpy as np
import tensorflow as tf
from absl import logging

from ops.sharding import shard_of, shards_of
from trainer import files
from trainer.comm.communicator import SingleProcess
from trainer.data.prepared import prefetch
from trainer.errors import DataLoss, UserError, plain_errors

FORMAT = 1
_NAME = re.compile(r'ckpt-(\d{9,})(?:-(\d+))?')


def _part(rank, size):
  return f'part-{rank:05d}-of-{size:05d}'


class _Column:
  """A .npy file written block by block; its header, which holds the number of rows, is written
  again at the end.

  Args:
    array: the first block: [n, …]; or a scalar, one each block.
  """

  def __init__(self, path, array):
    self._file = open(path, 'wb', buffering=0)
    self._dtype, self._scalar, self._row_shape = array.dtype, array.ndim == 0, array.shape[1:]
    self._header_bytes = self._file.write(self._header(0))
    self._counts, self._crc32 = [], []  # of each block

  def _header(self, rows):
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(
      out, {'descr': self._dtype.str, 'fortran_order': False, 'shape': (rows, *self._row_shape)}
    )
    return out.getvalue()

  def append(self, array):
    if (
      array.dtype != self._dtype
      or (array.ndim == 0) != self._scalar
      or array.shape[1:] != self._row_shape
    ):
      raise ValueError(
        f'{self._file.name}: a block of {array.dtype} {array.shape}; wanted {self._dtype} and '
        f'rows of {self._row_shape}'
      )
    array = np.ascontiguousarray(array).reshape(-1, *self._row_shape)
    data = memoryview(array.reshape(-1).view(np.uint8))
    self._crc32.append(zlib.crc32(data))
    self._counts.append(len(array))
    while data:
      data = data[self._file.write(data) :]

  def close(self):
    """Returns: the column's entry of index.json."""
    header = self._header(sum(self._counts))  # NumPy leaves room in it for any number of rows
    self._file.seek(0)
    self._file.write(header)
    os.fsync(self._file.fileno())
    self._file.close()
    return {
      'dtype': self._dtype.str,
      'scalar': self._scalar,
      'row_shape': self._row_shape,
      'header_bytes': self._header_bytes,
      'header_crc32': zlib.crc32(header),
      'counts': self._counts,
      'crc32': self._crc32,
    }


def _write_rows(folder, store, shards):
  """Writes a store's rows as one part. Returns: their number."""
  os.makedirs(folder)
  columns, block_shards, rows = {}, [], 0
  for chunk in store.export_state():
    shard = int(shard_of(chunk['key'][:1])[0])
    if shard not in shards:
      raise ValueError(f'the store gave a row of shard {shard}; it owns {shards}')
    for name, array in chunk.items():
      if name not in columns:
        columns[name] = _Column(os.path.join(folder, name + '.npy'), array)
      columns[name].append(array)
    block_shards.append(shard)
    rows += len(chunk['key'])
  index = {
    'rows': rows,
    'block_shards': block_shards,
    'columns': {n: c.close() for n, c in columns.items()},
  }
  files.write_synced(os.path.join(folder, 'index.json'), files.to_json(index))
  files.sync_directory(folder)
  return rows


def npz(arrays):
  """dict of arrays -> the bytes of an uncompressed .npz, the same for the same arrays."""
  out = io.BytesIO()
  np.savez(out, **arrays)
  return out.getvalue()


def file_entries(folder, unchecked=()):
  """For a manifest:

  relative path -> size and, but for names that end in one of `unchecked`, checksum.
  """
  entries = {}
  for base, _, names in os.walk(folder):
    for name in names:
      path = os.path.join(base, name)
      entries[os.path.relpath(path, folder)] = entry = {'bytes': os.path.getsize(path)}
      if not name.endswith(tuple(unchecked)):
        entry['crc32'] = files.crc32_of(path)
  return entries


def _serial(path):
  """Counts the saves in a directory:

  a later save has a greater one, whatever its step. None where the manifest is damaged.
  """
  try:
    return int(files.read_manifest(path)['serial'])
  except DataLoss:
    return None


def candidates(directory):
  """Checkpoints that are DONE, as dict of path -> serial (see `_serial`), newest first by time of
  writing, damaged ones before all.
  """
  try:
    paths = [os.path.join(directory, n) for n in os.listdir(directory) if _NAME.fullmatch(n)]
  except FileNotFoundError:
    return {}
  serials = [(_serial(p), p) for p in paths if files.is_done(p)]
  return {
    p: s for s, p in sorted(serials, key=lambda x: (x[0] is None, x[0] or 0, x[1]), reverse=True)
  }


def save(
  directory, step, *, store, dense, progress, config_text, keep, communicator=SingleProcess()
):
  """Writes a checkpoint; every process calls it, each with the rows that it owns.

  Args:
    directory: of the checkpoints, which all processes see.
    step: the number in its name; a second one at the same step is named `ckpt-STEP-2`.
    store: has `export_state()`: an iterator of dicts of columns, each of one logical shard, shards
      ascending.
    dense: dict of name -> array, process 0's counts.
    progress: dict that JSON can hold, process 0's counts.
    config_text: the resolved config.
    keep: the newest so many are kept, this one among them.
    communicator: how the processes meet (trainer.comm.horovod).
  Returns: its path.
  Raises: UserError on every process where one could not write; earlier checkpoints are then as they
    were.
  """
  what = f'cannot save a checkpoint in {directory}'

  def begin():
    if communicator.rank:
      return None
    os.makedirs(directory, exist_ok=True)
    done = candidates(directory)
    for name in os.listdir(directory):  # left by a crash
      if name.startswith('ckpt-') and os.path.join(directory, name) not in done:
        files.remove(os.path.join(directory, name))
    same = [
      int(m[2] or 1)
      for m in (_NAME.fullmatch(os.path.basename(p)) for p in done)
      if int(m[1]) == step
    ]
    final = os.path.join(directory, f'ckpt-{step:09d}' + (f'-{max(same) + 1}' if same else ''))
    os.makedirs(os.path.join(final + files.UNFINISHED, 'rows'))
    return final, 1 + max(filter(None, done.values()), default=0)

  final, serial = communicator.broadcast(communicator.together(what, begin))
  unfinished = final + files.UNFINISHED

  def write():
    part = os.path.join(unfinished, 'rows', _part(communicator.rank, communicator.size))
    _write_rows(part, store, shards_of(communicator.rank, communicator.size))
    if communicator.rank == 0:
      files.write_synced(os.path.join(unfinished, 'dense.npz'), npz(dense))
      files.write_synced(
        os.path.join(unfinished, 'progress.json'), json.dumps(progress, indent=1).encode()
      )
      files.write_synced(os.path.join(unfinished, 'config.yaml'), config_text.encode())

  def finish():
    if communicator.rank:
      return
    entries = file_entries(unfinished, unchecked=['.npy'])
    for rank in range(communicator.size):
      index = os.path.join('rows', _part(rank, communicator.size), 'index.json')
      if index not in entries:
        raise DataLoss(
          f'{os.path.join(unfinished, index)}: is missing; do all processes write to the same '
          f'{directory}?'
        )
    files.publish(
      unfinished,
      final,
      {
        'format': FORMAT,
        'serial': serial,
        'step': step,
        'parts': communicator.size,
        'files': entries,
      },
    )
    for old in [p for p, serial in candidates(directory).items() if serial][keep:]:
      files.remove(old)

  try:
    communicator.together(what, write)
    communicator.together(what, finish)
  except UserError:
    if communicator.rank == 0:
      files.remove(unfinished)  # gives its space back
    raise
  return final


def read_rows(path, manifest, shards):
  """Yields the rows of some logical shards, block by block as they were given to `save`, each
  checked.

  Args:
    manifest: of `check`.
    shards: a range.
  Raises: DataLoss naming the file.
  """
  for rank in range(manifest['parts']):
    own = shards_of(rank, manifest['parts'])
    if own.start >= shards.stop or shards.start >= own.stop:
      continue
    part = os.path.join('rows', _part(rank, manifest['parts']))
    index = json.loads(
      files.read_checked(path, os.path.join(part, 'index.json'), manifest['files'])
    )
    columns, opened = index['columns'], {}
    try:
      for name, column in columns.items():
        file = os.path.join(path, part, name + '.npy')
        opened[name] = open(file, 'rb', buffering=0)
        if zlib.crc32(opened[name].read(column['header_bytes'])) != column['header_crc32']:
          raise DataLoss(f'{file}: its header has changed')
      starts = {n: np.concatenate([[0], np.cumsum(c['counts'])]) for n, c in columns.items()}
      for i, shard in enumerate(index['block_shards']):
        if shard in shards:
          yield {n: _read_block(opened[n], c, i, starts[n][i]) for n, c in columns.items()}
    finally:
      for f in opened.values():
        f.close()


def _read_block(file, column, i, start):
  array = np.empty([column['counts'][i], *column['row_shape']], np.dtype(column['dtype']))
  data = memoryview(array.reshape(-1).view(np.uint8))
  file.seek(
    column['header_bytes']
    + int(start) * (array.itemsize * int(np.prod(column['row_shape'], dtype=np.int64)))
  )
  left = data
  while left:
    n = file.readinto(left)
    if not n:
      raise DataLoss(f'{file.name}: ends {len(left)} bytes too early')
    left = left[n:]
  if zlib.crc32(data) != column['crc32'][i]:
    raise DataLoss(
      f'{file.name}: block {i}, rows {start} to {start + len(array)}: its checksum is '
      f'{zlib.crc32(data):08x}; '
      f'wanted {column["crc32"][i]:08x}'
    )
  return array[0] if column['scalar'] else array


def check(path):
  """Checks that a checkpoint is whole, as far as sizes and names tell.

  Returns: its manifest. Raises: DataLoss.
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


def restore(path, *, store, communicator=SingleProcess()):
  """Reads one checkpoint, of whatever number of processes: the rows that this process owns, in
  place of what its store holds.

  Args:
    store: has `import_state(chunks)`; a chunk is what `export_state` yields.
  Returns: (dense: dict of arrays, progress: dict).
  Raises: DataLoss, UserError; the store may then hold some of the rows.
  """
  with plain_errors(f'cannot read {path}'):
    manifest = check(path)
    listed = manifest['files']
    with np.load(
      io.BytesIO(files.read_checked(path, 'dense.npz', listed)), allow_pickle=False
    ) as z:
      dense = {name: z[name] for name in z.files}
    progress = json.loads(files.read_checked(path, 'progress.json', listed))
    files.read_checked(path, 'config.yaml', listed)
    try:
      # The next block is read and checked while one goes into the table.
      store.import_state(
        prefetch(
          read_rows(path, manifest, shards_of(communicator.rank, communicator.size)), depth=1
        )
      )
    except tf.errors.OpError as e:
      raise DataLoss(
        f'{path}: its rows do not go into this table: {" ".join(e.message.split())}'
      ) from e
  return dense, progress


def restore_latest(directory, *, store, communicator=SingleProcess()):
  """Reads the newest checkpoint that is good on every process; says in the log why a newer one was
  refused.

  Args:
    store: as of `restore`; it is empty, or `import_state` replaces what it holds. `clear` empties
      it.
  Returns: (path, dense, progress), or None where there is none yet.
  Raises: UserError where there are checkpoints and none is good.
  """
  paths = communicator.broadcast(
    communicator.together(
      f'cannot read {directory}', lambda: [] if communicator.rank else list(candidates(directory))
    )
  )
  refusal = None
  for path in paths:
    try:
      dense, progress = communicator.together(
        f'cannot read {path}',
        functools.partial(restore, path, store=store, communicator=communicator),
      )
      if refusal:
        logging.warning('using %s instead', path)
      return path, dense, progress
    except UserError as e:
      refusal = refusal or e
      logging.warning('checkpoint refused: %s', e)
      store.clear()  # of the rows that came before what is wrong
  if refusal:
    raise UserError(f'{directory}: none of its {len(paths)} checkpoints is good: {refusal}')
  return None
