"""Prepared passes: what training reads. docs/architecture.md, "Prepared pass", has the format.

Shapes: n samples of the pass, F slots, nnz features, Dn dense columns, B samples of a batch.
"""

import itertools
import json
import os
import queue
import threading
import zlib

import numpy as np

from trainer.data.features import SlotBatch
from trainer.data.parse import ranges
from trainer.data.schema import schema
from trainer.errors import UserError

META = 'meta.json'  # written last: the pass counts when it exists
HEADER_BYTES = 128
SMALL_PASS = 2_000_000  # samples; a pass below is shuffled as a whole
# samples; larger passes are shuffled in blocks, then inside windows of blocks, so that reads stay
# near one another
BLOCK = 8192
WINDOW = 64 * BLOCK


class _Column:
  """A .npy file that grows: [n, width] or, with width None, [n]."""

  def __init__(self, directory, name, dtype):
    self._file = open(os.path.join(directory, name + '.npy'), 'wb')
    self._file.write(bytes(HEADER_BYTES))
    self._dtype = np.dtype(dtype)

  def add(self, array):
    self._file.write(np.ascontiguousarray(array, self._dtype).data)

  def close(self, shape):
    header = repr(
      {'descr': self._dtype.str, 'fortran_order': False, 'shape': tuple(shape)}
    ).encode()
    self._file.seek(0)
    self._file.write(
      b'\x93NUMPY\x01\x00'
      + (HEADER_BYTES - 10).to_bytes(2, 'little')
      + header.ljust(HEADER_BYTES - 11)
      + b'\n'
    )
    self._file.flush()
    os.fsync(self._file.fileno())
    self._file.close()


class Writer:
  """Writes the columns of a prepared pass into a directory, block by block;

  `splits` and `values` only from when they are needed.
  """

  def __init__(self, directory, num_slots, num_dense, weighted, grouped, num_tasks=1):
    self._directory, self._num_slots, self._num_dense = directory, num_slots, num_dense
    self._num_tasks = num_tasks
    used = {'keys': '<i8', 'label': '<f4'} | ({'dense': '<f4'} if num_dense else {})
    used |= ({'weight': '<f4'} if weighted else {}) | ({'group': '<i8'} if grouped else {})
    self._columns = {name: _Column(directory, name, dtype) for name, dtype in used.items()}
    self.samples = self.features = 0

  def add(self, parsed):
    """Appends a `trainer.data.parse.Parsed`."""
    columns = self._columns
    if 'splits' not in columns and (parsed.values is not None or (parsed.counts != 1).any()):
      columns['splits'] = _Column(self._directory, 'splits', '<i8')
      for start in range(0, self.features + 1, 1 << 20):  # so far every slot held one feature
        columns['splits'].add(np.arange(start, min(start + (1 << 20), self.features + 1)))
    if 'values' not in columns and parsed.values is not None:
      columns['values'] = _Column(self._directory, 'values', '<f4')
      for start in range(0, self.features, 1 << 20):
        columns['values'].add(np.ones([min(1 << 20, self.features - start)]))
    if 'splits' in columns:
      columns['splits'].add(self.features + np.cumsum(parsed.counts))
    if 'values' in columns:
      columns['values'].add(np.ones([len(parsed.keys)]) if parsed.values is None else parsed.values)
    for name in ('keys', 'dense', 'label', 'weight', 'group'):
      if name in columns:
        columns[name].add(getattr(parsed, name))
    self.samples += len(parsed.label)
    self.features += len(parsed.keys)

  def close(self, meta):
    """Completes the files, then writes `meta` (a dict), each of them synced."""
    n, f = self.samples, self._num_slots
    shapes = {
      'keys': (self.features,) if 'splits' in self._columns else (n, f),
      'splits': (n * f + 1,),
      'values': (self.features,),
      'dense': (n, self._num_dense),
    }
    if self._num_tasks > 1:
      shapes['label'] = (n, self._num_tasks)
    for name, column in self._columns.items():
      column.close(shapes.get(name, (n,)))
    meta = meta | {
      'samples': n,
      'features': self.features,
      'arrays': {c: list(shapes.get(c, (n,))) for c in self._columns},
    }
    with open(os.path.join(self._directory, META), 'w', encoding='utf-8') as out:
      json.dump(meta, out)
      out.flush()
      os.fsync(out.fileno())


def read_meta(path):
  """The meta.json of a prepared pass. Raises: UserError where there is none."""
  try:
    with open(os.path.join(path, META), encoding='utf-8') as f:
      return json.load(f)
  except (FileNotFoundError, NotADirectoryError):
    raise UserError(
      f'{path}: not a prepared pass, it holds no {META}; wanted a directory that trainer.prepare '
      'wrote'
    ) from None
  except ValueError as e:
    raise UserError(f'{os.path.join(path, META)}: not JSON: {e}; prepare the pass again') from None


class PreparedPass:
  """A prepared pass, memory-mapped: a process reads no more of it than the samples of its own
  slices.

  Args:
    path: its directory.
    cfg: where given, the pass must have been prepared with this config's schema.
  Raises: UserError where it is no prepared pass, of another schema, or incomplete.
  """

  def __init__(self, path, cfg=None):
    self.path, self.name = path, os.path.basename(os.path.normpath(path))
    self.meta = read_meta(path)
    if cfg is not None:
      for part, wanted in schema(cfg).items():
        found = self.meta['schema'].get(part)
        if found != wanted:
          if isinstance(found, list) and isinstance(
            wanted, list
          ):  # name no more than the first that differs
            found, wanted = next((a, b) for a, b in itertools.zip_longest(found, wanted) if a != b)
          raise UserError(
            f"{path}: prepared for another schema: its '{part}' has {found!r}, the config wants "
            f'{wanted!r}; prepare it again'
          )
    self.num_samples, self.day = self.meta['samples'], self.meta['day']
    self.num_slots, self._num_dense = (
      len(self.meta['schema']['slots']),
      len(self.meta['schema']['dense']),
    )
    arrays = {name: self._array(name, shape) for name, shape in self.meta['arrays'].items()}
    self._keys, self._values = arrays['keys'], arrays.get('values')
    self._label, self._dense, self._weight, self._group = (
      arrays.get(name) for name in ('label', 'dense', 'weight', 'group')
    )
    self._splits = None
    if 'splits' in arrays:  # a row a sample, with the next sample's first split at its end
      self._splits = np.lib.stride_tricks.as_strided(
        arrays['splits'],
        [self.num_samples, self.num_slots + 1],
        [8 * self.num_slots, 8],
        writeable=False,
      )

  def _array(self, name, shape):
    file = os.path.join(self.path, name + '.npy')
    try:
      array = np.load(file, mmap_mode='r' if np.prod(shape) else None)
    except (OSError, ValueError) as e:
      raise UserError(f'{file}: cannot be read ({e}); prepare the pass again') from None
    if list(array.shape) != shape:
      raise UserError(
        f'{file}: found shape {list(array.shape)}; wanted {shape}; prepare the pass again'
      )
    return np.asarray(array)

  def num_batches(self, batch_size):
    return -(-self.num_samples // batch_size)

  def slices(self, batch_size, size, seed=0, epoch=0, shuffle=False):
    """The pass's global batches in `size` slices each.

    The global batches follow from (seed, name of the pass, epoch) alone. Slice r has samples [r·b
    // size, (r + 1)·b // size) of a
    global batch of b samples, so slices side by side give it in order; a slice of the last batch
    may be empty.

    Args:
      batch_size: samples of a global batch.
    Returns: a function (global batch, slice) -> SlotBatch of NumPy arrays; fast where batches come
      in order.
    """
    rows = self._shuffled(seed, epoch) if shuffle else np.arange

    def slice_of(batch, r):
      start = batch * batch_size
      b = min(batch_size, self.num_samples - start)
      return self._gather(rows(start + r * b // size, start + (r + 1) * b // size))

    return slice_of

  def batches(self, batch_size, rank=0, size=1, seed=0, epoch=0, shuffle=False, start_batch=0):
    """This rank's slice of each global batch.

    Args:
      start_batch: the first global batch to give; those before it cost nothing.
    Yields: `num_batches(batch_size) - start_batch` SlotBatches on every rank.
    """
    slice_of = self.slices(batch_size, size, seed, epoch, shuffle)
    for batch in range(start_batch, self.num_batches(batch_size)):
      yield slice_of(batch, rank)

  def _shuffled(self, seed, epoch):
    """Returns a function: (lo, hi) -> the samples at places [lo, hi) of the shuffled order."""
    n = self.num_samples

    def generator(*window):
      return np.random.default_rng([seed, epoch, zlib.crc32(self.name.encode()), *window])

    if n < SMALL_PASS:
      order = generator().permutation(n).astype(np.int32)
      return lambda lo, hi: order[lo:hi]
    blocks = generator().permutation(-(-n // BLOCK))
    # The pass's last block is short. Wherever it stands, the places behind it move up by what it
    # lacks.
    starts = np.concatenate([[0], np.cumsum(np.minimum(BLOCK, n - blocks * BLOCK))])
    per_window = WINDOW // BLOCK
    kept = {}

    def window(w):
      if w not in kept:
        kept.clear()
        mine = blocks[w * per_window : (w + 1) * per_window]
        kept[w] = generator(1, w).permutation(
          ranges(mine * BLOCK, np.minimum(BLOCK, n - mine * BLOCK))
        )
      return kept[w]

    def rows(lo, hi):
      parts = [np.empty([0], np.int64)]
      while lo < hi:
        w = (np.searchsorted(starts, lo, side='right') - 1) // per_window
        first, last = starts[w * per_window], starts[min((w + 1) * per_window, len(blocks))]
        end = min(hi, last)
        parts.append(window(w)[lo - first : end - first])
        lo = end
      return np.concatenate(parts)

    return rows

  def _gather(self, rows):
    """The samples `rows` [B] as a SlotBatch."""
    b, f = len(rows), self.num_slots
    dense = np.zeros([b, 0], np.float32) if self._dense is None else self._dense[rows]
    weight = np.ones([b], np.float32) if self._weight is None else self._weight[rows]
    group = np.zeros([b], np.int64) if self._group is None else self._group[rows]
    if self._splits is None:
      none = np.empty([0], np.float32), np.empty([0], np.int32)
      return SlotBatch(self._keys[rows].reshape(-1), *none, dense, self._label[rows], weight, group)
    splits = self._splits[rows]
    at = ranges(splits[:, 0], splits[:, -1] - splits[:, 0])
    segments = np.repeat(np.arange(b * f, dtype=np.int32), np.diff(splits).ravel())
    values = np.ones([len(at)], np.float32) if self._values is None else self._values[at]
    return SlotBatch(self._keys[at], values, segments, dense, self._label[rows], weight, group)


def prefetch(iterable, depth=2):
  """Runs an iterator ahead, in a thread of its own.

  Args:
    depth: how many items may wait. Up to `depth` + 1 are made ahead.
  Yields: its items, in order. An exception in it comes out here. When the consumer stops, so does
    the thread.
  """
  items, stopped, end = queue.Queue(depth), threading.Event(), object()

  def produce():
    os.nice(10)  # on Linux of this thread alone: a step goes first, and this fills its waits
    try:
      for item in iterable:
        items.put((item, None))
        if stopped.is_set():
          return
      items.put((end, None))
    except BaseException as e:  # told to the consumer, whatever it is
      items.put((end, e))

  thread = threading.Thread(target=produce, name='prefetch', daemon=True)
  thread.start()
  try:
    while True:
      item, error = items.get()
      if error is not None:
        raise error
      if item is end:
        return
      yield item
  finally:
    stopped.set()
    while not items.empty():  # a place in the queue lets the thread see that it is to stop
      items.get_nowait()
    thread.join()
