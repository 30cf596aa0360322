"""Prepared passes: what training reads. docs/data.md has the format.

Shapes: n samples of the pass, F slots, nnz features, Dn dense columns, B samples of a batch.
"""

import collections
import concurrent.futures
import itertools
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from ops.keys import MAX_SAMPLES, NO_FEATURE, encode_fields
from ops.mapped import tell_files_cut_short
from ops.samples import SampleArrays
from ops.tensors import aligned
from trainer import config
from trainer.data.features import SlotBatch, has_log1p
from trainer.data.log_files import is_remote
from trainer.data.parse import Parsed, ranges
from trainer.data.schema import schema
from trainer.errors import BadPass, UserError
from trainer.files import NpyWriter, crc32_of_stream, to_json, write_synced

META = 'meta.json'  # written last: the pass counts when it exists
HEADER_BYTES = 128  # of each .npy
CHUNK = MAX_SAMPLES  # samples whose distinct fields are numbered together
SMALL_PASS = 2_000_000  # samples; a pass below is shuffled as a whole
# samples; larger passes are shuffled in blocks, then inside windows of blocks, so that reads stay
# near one another
BLOCK = 8192
WINDOW = 64 * BLOCK
MOST_WRITING = 2  # chunks that wait for the writer

Item = TypeVar('Item')


class _Column:
  """A column of a prepared pass, as it is written."""

  def __init__(self, directory: str, name: str, dtype: str, *shape: int):
    self._file = NpyWriter(os.path.join(directory, name + '.npy'), dtype, shape)
    self._crc = 0

  @property
  def length(self) -> int:
    """Rows written so far."""
    return self._file.rows

  def add(self, array: np.ndarray) -> None:
    self._crc = zlib.crc32(self._file.append(array), self._crc)

  def close(self) -> dict[str, Any]:
    """Completes the file, synced; returns what meta.json says of it."""
    header = self._file.close()
    if len(header) != HEADER_BYTES:
      raise ValueError(f'found a header of {len(header)} bytes; wanted {HEADER_BYTES}')
    shape = [self.length, *self._file.row_shape]
    return {'dtype': self._file.dtype.str, 'shape': shape, 'crc32': self._crc}


def _counted(parsed: Parsed) -> Parsed:
  """The same samples, with `counts`."""
  if parsed.counts is not None:
    return parsed
  keys = parsed.keys.T
  present = keys != NO_FEATURE
  return parsed._replace(counts=present.astype(np.int32), keys=keys[present])


def _concatenate(parts: Sequence[Parsed]) -> Parsed:
  """The samples of several blocks."""
  if len(parts) == 1:
    return parts[0]
  counts = values = None
  if any(p.counts is not None for p in parts):
    parts = [_counted(p) for p in parts]
    counts = np.concatenate([p.counts for p in parts])
  if any(p.values is not None for p in parts):
    values = np.concatenate(
      [np.ones([len(p.keys)], np.float32) if p.values is None else p.values for p in parts]
    )
  of_keys = [p.keys for p in parts]
  shape = *of_keys[0].shape[:-1], sum(k.shape[-1] for k in of_keys)
  keys = np.concatenate(of_keys, axis=-1, out=aligned(shape, np.int64))

  def joined(name: str) -> np.ndarray | None:
    arrays = [getattr(p, name) for p in parts]
    return None if arrays[0] is None else np.concatenate(arrays)

  return Parsed(
    counts, keys, values, **{name: joined(name) for name in ('dense', 'label', 'weight', 'group')}
  )


def _cut(parsed: Parsed, n: int) -> tuple[Parsed, Parsed]:
  """The first n samples, and the others."""
  features = n if parsed.counts is None else int(parsed.counts[:n].sum())

  def part(samples: slice, of_keys: slice) -> Parsed:
    def of(name: str) -> np.ndarray | None:
      array = getattr(parsed, name)
      return None if array is None else array[samples]

    values = None if parsed.values is None else parsed.values[of_keys]
    names = ('counts', 'dense', 'label', 'weight', 'group')
    return Parsed(keys=parsed.keys[..., of_keys], values=values, **{n: of(n) for n in names})

  return (
    part(slice(None, n), slice(None, features)),
    part(slice(n, None), slice(features, None)),
  )


def _with_group(parsed: Parsed) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
  """keys, values and counts of samples whose group is one more slot, the last."""
  if parsed.counts is None:
    return np.vstack([parsed.keys, parsed.group]), None, None
  ends = np.cumsum(parsed.counts.sum(1))
  counts = np.hstack([parsed.counts, np.ones([len(ends), 1], np.int32)])
  values = None if parsed.values is None else np.insert(parsed.values, ends, 1)
  return np.insert(parsed.keys, ends, parsed.group), values, counts


def _stats(dense: np.ndarray, columns: Sequence[config.DenseColumn]) -> np.ndarray:
  """float64 [Dn, 3]: count, mean and M2 = Σ (x − mean)² of what is present, after log1p where the
  transform has it.
  """
  stats = np.zeros([len(columns), 3])
  for i, column in enumerate(columns):
    x = dense[:, i].astype(np.float64)
    x = x[~np.isnan(x)]
    if len(x):
      x = np.sign(x) * np.log1p(np.abs(x)) if has_log1p(column) else x
      stats[i] = len(x), x.mean(), np.square(x - x.mean()).sum()
  return stats


def merge_stats(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  """Statistics of two sets of values together (Chan et al. 1979). a, b: float64 [Dn, 3]."""
  count = a[:, 0] + b[:, 0]
  share = b[:, 0] / np.maximum(count, 1)
  delta = b[:, 1] - a[:, 1]
  return np.stack(
    [count, a[:, 1] + delta * share, a[:, 2] + b[:, 2] + delta**2 * a[:, 0] * share], 1
  )


class Writer:
  """Writes a prepared pass into a directory, CHUNK samples at a time, in a thread of its own.

  The files follow from the samples alone, not from the blocks that they came in. Call `close` in
  the end, or `stop` where it is given up.

  Args:
    directory: an empty one.
    cfg: of the log.
  """

  def __init__(self, directory: str, cfg: config.Config):
    data = cfg.data
    self._directory, self._dense, self._num_slots = directory, data.dense, len(cfg.slots)
    self._grouped = data.group is not None
    width = self._num_slots + self._grouped  # the group is one more slot, the last
    used = {
      'codes': ('<u2', width),
      'bases': ('<i8', width, 2),
      'keys': ('<i8',),
      'label': ('<f4' if cfg.model.loss == 'squared_error' else '|u1',),
    }
    if data.labels:
      used['label'] = ('<f4', len(data.labels))
    used |= {'dense': ('<f4', len(data.dense))} if data.dense else {}
    used |= {'weight': ('<f4',)} if data.weight is not None else {}
    self._columns = {name: _Column(directory, name, *of) for name, of in used.items()}
    self._waiting: list[Parsed] = []
    self._num_waiting = 0
    self._distinct: list[int] = []  # fields of each chunk and slot
    self._stats = np.zeros([len(data.dense), 3])
    self._features = self.samples = 0
    self._thread = concurrent.futures.ThreadPoolExecutor(1, 'writer')
    self._writing: collections.deque[concurrent.futures.Future] = collections.deque()

  def add(self, parsed: Parsed) -> None:
    """Appends samples; where the disk fails, this or a later call says so."""
    self._waiting.append(parsed)
    self._num_waiting += len(parsed.label)
    self.samples += len(parsed.label)
    if self._num_waiting >= CHUNK:
      rest = _concatenate(self._waiting)
      while len(rest.label) >= CHUNK:
        chunk, rest = _cut(rest, CHUNK)
        self._writing.append(self._thread.submit(self._write, chunk))
        if len(self._writing) > MOST_WRITING:
          self._writing.popleft().result()
      self._waiting, self._num_waiting = [rest] if len(rest.label) else [], len(rest.label)

  def append(self, one: 'PreparedPass') -> None:
    """Appends the samples of a pass of the same schema; whole chunks are copied where they fit."""
    copied = 0 if self._num_waiting else one.num_samples // CHUNK
    rest = range(copied * CHUNK, one.num_samples, CHUNK)
    others = (one.parsed(start, min(start + CHUNK, one.num_samples)) for start in rest)
    if copied:
      others = list(others)  # less than a chunk
      features = one.meta['features'] - sum(o.keys.size for o in others)
      self.samples += copied * CHUNK
      self._writing.append(self._thread.submit(self._copy, one, copied, features))
    for parsed in others:
      self.add(parsed)

  def _copy(self, one: 'PreparedPass', chunks: int, features: int) -> None:
    """Appends the first chunks of a pass, where only whole chunks were written."""
    columns, (arrays, distinct) = self._columns, one.chunks(chunks)
    before = sum(self._distinct) + len(self._distinct)
    columns['bases'].add(arrays.pop('bases') + [before, columns['keys'].length])
    for name, ones in (
      ('splits', lambda n: [np.arange(d + 1) for d in n]),
      ('values', lambda n: [np.ones([columns['keys'].length])]),
    ):
      if name in arrays and name not in columns:
        columns[name] = _Column(self._directory, name, one.meta['arrays'][name]['dtype'])
        for filler in ones(self._distinct):
          columns[name].add(filler)
    if 'splits' in columns and 'splits' not in arrays:
      arrays['splits'] = np.concatenate([np.arange(d + 1) for d in distinct])
    if 'values' in columns and 'values' not in arrays:
      arrays['values'] = np.ones([len(arrays['keys'])])
    self._distinct += distinct
    self._features += features
    for name, array in arrays.items():
      columns[name].add(array)
    for start in range(0, chunks * CHUNK, CHUNK):
      if self._dense:
        chunk = _stats(arrays['dense'][start : start + CHUNK], self._dense)
        self._stats = merge_stats(self._stats, chunk)

  def stop(self) -> None:
    """Ends the thread; what it has not begun to write is left out."""
    self._thread.shutdown(cancel_futures=True)

  def _write(self, chunk: Parsed) -> None:
    keys, values, counts = chunk.keys, chunk.values, chunk.counts
    if self._grouped:
      keys, values, counts = _with_group(chunk)
    encoded = encode_fields(keys, values, counts)
    columns, distinct = self._columns, encoded.fields_of
    self._features += int(np.count_nonzero(chunk.keys != NO_FEATURE))
    if 'splits' not in columns and (encoded.counts != 1).any():
      columns['splits'] = _Column(self._directory, 'splits', '<u4')
      for n in self._distinct:  # so far every field held one feature
        columns['splits'].add(np.arange(n + 1))
    if 'values' not in columns and len(encoded.values):
      columns['values'] = _Column(self._directory, 'values', '<f4')
      columns['values'].add(np.ones([columns['keys'].length]))
    ends = np.cumsum(distinct)
    of_slot = np.split(encoded.counts, ends[:-1])
    widths = np.array([c.sum() for c in of_slot], np.int64)
    before = sum(self._distinct) + len(self._distinct)  # a slot has one split more than fields
    bases = np.stack(
      [
        before + np.cumsum(distinct + 1) - distinct - 1,
        columns['keys'].length + np.cumsum(widths) - widths,
      ],
      1,
    )
    columns['bases'].add(bases[None])
    if 'splits' in columns:
      for c in of_slot:
        columns['splits'].add(np.concatenate([[0], np.cumsum(c)]))
    if 'values' in columns:
      columns['values'].add(encoded.values if len(encoded.values) else np.ones([len(encoded.keys)]))
    self._distinct += distinct.tolist()
    columns['codes'].add(encoded.codes)
    columns['keys'].add(encoded.keys)
    for name in ('dense', 'label', 'weight'):
      if name in columns:
        columns[name].add(getattr(chunk, name))
    self._stats = merge_stats(self._stats, _stats(chunk.dense, self._dense))

  def close(self, meta: dict[str, Any]) -> None:
    """Completes the files, then writes `meta`, all of them synced."""
    if self.samples and self._num_waiting:
      rest = _concatenate(self._waiting)
      self._writing.append(self._thread.submit(self._write, rest))
    while self._writing:
      self._writing.popleft().result()
    self.stop()
    meta = meta | {
      'samples': self.samples,
      'features': self._features,
      'dense': {c.name: row for c, row in zip(self._dense, self._stats.tolist())},
      'arrays': {name: column.close() for name, column in self._columns.items()},
    }
    meta['crc32'] = zlib.crc32(to_json(meta))
    write_synced(os.path.join(self._directory, META), to_json(meta))


def read_meta(path: str) -> dict[str, Any]:
  """The meta.json of a prepared pass.

  Raises:
    UserError: where there is none.
    BadPass: where it is damaged.
  """
  file = os.path.join(path, META)
  try:
    if not os.path.isfile(file):  # opening a pipe would wait
      raise FileNotFoundError
    with open(file, encoding='utf-8') as f:
      meta = json.load(f)
  except (FileNotFoundError, NotADirectoryError):
    raise UserError(
      f'{path}: not a prepared pass, it holds no {META}; wanted a directory that trainer.prepare '
      'wrote'
    ) from None
  except (ValueError, RecursionError) as e:
    raise BadPass(f'{file}: not JSON: {e}; prepare the pass again') from None
  # Passes of format 1 had no checksum; their schema says so in a better line.
  if not isinstance(meta, dict) or not isinstance(meta.get('schema'), dict):
    raise BadPass(f'{file}: is damaged; prepare the pass again')
  if 'crc32' in meta or meta['schema'].get('format') != 1:
    written = meta.pop('crc32', None)
    if written != zlib.crc32(to_json(meta)):
      raise BadPass(f'{file}: its checksum is wrong; prepare the pass again')
  return meta


def is_prepared(data: config.Data, path: str) -> bool:
  """Whether a path of the config is a prepared pass, not a raw one."""
  if is_remote(path):
    if data.format == 'prepared':
      raise UserError(f"{path}: data.format 'prepared' wants a local path; remote passes are logs")
    return False
  if data.format is None:
    return os.path.isfile(os.path.join(path, META))
  return data.format == 'prepared'


class PreparedPass:
  """A prepared pass, memory-mapped; its checksums are verified when it is opened.

  Args:
    path: its directory.
    cfg: where given, the pass must have been prepared with this config's schema.

  Raises:
    UserError: where it is no prepared pass or of another schema.
    BadPass: where its files are not those that were written.
  """

  def __init__(self, path: str, cfg: config.Config | None = None):
    self.path, self.name = path, os.path.basename(os.path.normpath(path))
    self.meta = read_meta(path)
    if cfg is not None:
      for part, wanted in schema(cfg).items():
        found = self.meta['schema'].get(part)
        if found != wanted:
          # Name no more than the first that differs.
          if isinstance(found, list) and isinstance(wanted, list):
            found, wanted = next((a, b) for a, b in itertools.zip_longest(found, wanted) if a != b)
          raise UserError(
            f"{path}: prepared for another schema: its '{part}' has {found!r}, the config wants "
            f'{wanted!r}; prepare it again'
          )
    if self.meta['schema']['format'] != 2:
      raise UserError(f'{path}: prepared by an earlier version; prepare it again')
    self.num_samples, self.day = self.meta['samples'], self.meta['day']
    self.num_slots = len(self.meta['schema']['slots'])
    self._files: dict[str, os.stat_result] = {}  # as they were when they were mapped
    tell_files_cut_short()
    arrays = {name: self._array(name, of) for name, of in self.meta['arrays'].items()}
    self._codes, self._keys, self._bases = (arrays[name] for name in ('codes', 'keys', 'bases'))
    self._splits, self._values = arrays.get('splits'), arrays.get('values')
    self._label, self._dense = arrays['label'], arrays.get('dense')
    self._weight, self._grouped = arrays.get('weight'), self.meta['schema']['group'] is not None
    if not len(self._label) == len(self._codes) == self.num_samples:
      raise BadPass(f'{path}: {META} and the arrays differ in the samples; prepare the pass again')
    of_features = self._codes, self._bases, self._keys, self._splits, self._values, self._dense
    self._samples = SampleArrays(*of_features, self.num_slots, CHUNK)

  def _array(self, name: str, written: dict[str, Any]) -> np.ndarray:
    """A memory-mapped array whose bytes are those that were written."""
    file = os.path.join(self.path, name + '.npy')
    dtype, shape = np.dtype(written['dtype']), tuple(written['shape'])
    size = int(np.prod(shape)) * dtype.itemsize
    try:
      with open(file, 'rb') as f:
        at_open = os.fstat(f.fileno())
        if at_open.st_size != HEADER_BYTES + size:
          raise BadPass(
            f'{file}: has {at_open.st_size} bytes; wanted {HEADER_BYTES + size}; prepare the pass '
            'again'
          )
        f.seek(HEADER_BYTES)
        crc = crc32_of_stream(f)
        array = np.memmap(f, dtype, 'r', HEADER_BYTES, shape) if size else np.zeros(shape, dtype)
    except OSError as e:
      raise BadPass(f'{file}: cannot be read ({e}); prepare the pass again') from None
    if crc != written['crc32']:
      raise BadPass(
        f'{file}: its checksum is {crc:08x}; wanted {written["crc32"]:08x}; prepare the pass again'
      )
    self._files[file] = at_open
    return np.asarray(array)

  def chunks(self, n: int) -> tuple[dict[str, np.ndarray], list[int]]:
    """What the files hold of the first n chunks, and the fields of each chunk and slot."""
    bases = self._bases
    ends = {'keys': len(self._keys), 'splits': 0 if self._splits is None else len(self._splits)}
    if n < len(bases):
      ends = dict(zip(('splits', 'keys'), bases[n, 0].tolist()))
    samples = min(n * CHUNK, self.num_samples)
    arrays = {
      'codes': self._codes[:samples],
      'bases': bases[:n],
      'keys': self._keys[: ends['keys']],
      'splits': None if self._splits is None else self._splits[: ends['splits']],
      'values': None if self._values is None else self._values[: ends['keys']],
      'label': self._label[:samples],
      'dense': None if self._dense is None else self._dense[:samples],
      'weight': None if self._weight is None else self._weight[:samples],
    }
    of, gap = ('keys', 0) if self._splits is None else ('splits', 1)
    begin = bases[:n, :, int(of == 'keys')].reshape(-1)
    distinct = np.diff(begin, append=ends[of]) - gap
    return {k: v for k, v in arrays.items() if v is not None}, distinct.tolist()

  def parsed(self, start: int, end: int) -> Parsed:
    """The samples [start, end), as they were parsed."""
    batch = self._gather(np.arange(start, end))
    counts, keys, values = None, batch.keys, batch.values if len(batch.values) else None
    if not len(batch.segments):
      keys = keys.reshape(-1, self.num_slots).T
    else:
      counts = np.bincount(batch.segments, minlength=(end - start) * self.num_slots)
      counts = counts.reshape(-1, self.num_slots).astype(np.int32)
    weight = None if self._weight is None else batch.weight
    group = batch.group if self._grouped else None
    return Parsed(counts, keys, values, batch.dense, batch.label, weight, group)

  def sole_labels(self) -> list[float | None]:
    """Returns for each task the label that all of the pass's samples have; None where they differ
    or are blank.
    """
    labels = self._label if self._label.ndim == 2 else self._label[:, None]
    found: list[set[float]] = [set() for _ in range(labels.shape[1])]
    for start in range(0, len(labels), CHUNK):
      for own, column in zip(found, labels[start : start + CHUNK].T):
        if len(own) < 2:
          own.update(np.unique(column[~np.isnan(column)]).tolist())
      if all(len(own) > 1 for own in found):
        break
    return [own.pop() if len(own) == 1 else None for own in found]

  def num_batches(self, batch_size: int) -> int:
    """The number of global batches of so many samples."""
    return -(-self.num_samples // batch_size)

  def slices(
    self, batch_size: int, size: int, seed: int = 0, epoch: int = 0, shuffle: bool = False
  ) -> Callable[[int, int], SlotBatch]:
    """The pass's global batches in `size` slices each.

    The global batches follow from (seed, name of the pass, epoch) alone. Slice r has samples [r·b
    // size, (r + 1)·b // size) of a global batch of b samples, so slices side by side give it in
    order; a slice of the last batch may be empty.

    Args:
      batch_size: samples of a global batch.
      size: slices of a batch.
      seed: of the order, where shuffled.
      epoch: another one is shuffled otherwise.
      shuffle: whether the samples are shuffled.
    Returns:
      A function (global batch, slice) -> SlotBatch of NumPy arrays; fast where batches come in
      order.
    """
    rows = self._shuffled(seed, epoch) if shuffle else np.arange

    def slice_of(batch: int, r: int) -> SlotBatch:
      start = batch * batch_size
      b = min(batch_size, self.num_samples - start)
      return self._gather(rows(start + r * b // size, start + (r + 1) * b // size))

    return slice_of

  def batches(
    self,
    batch_size: int,
    rank: int = 0,
    size: int = 1,
    seed: int = 0,
    epoch: int = 0,
    shuffle: bool = False,
    start_batch: int = 0,
  ) -> Iterator[SlotBatch]:
    """This rank's slice of each global batch.

    Args:
      batch_size: samples of a global batch.
      rank: which slice.
      size: slices of a batch.
      seed: of the order, where shuffled.
      epoch: another one is shuffled otherwise.
      shuffle: whether the samples are shuffled.
      start_batch: the first global batch to give; those before it cost nothing.
    Yields:
      `num_batches(batch_size) - start_batch` SlotBatches on every rank.
    """
    slice_of = self.slices(batch_size, size, seed, epoch, shuffle)
    for batch in range(start_batch, self.num_batches(batch_size)):
      yield slice_of(batch, rank)

  def _shuffled(self, seed: int, epoch: int) -> Callable[[int, int], np.ndarray]:
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

    def window(w: int) -> np.ndarray:
      if w not in kept:
        kept.clear()
        mine = blocks[w * per_window : (w + 1) * per_window]
        kept[w] = generator(1, w).permutation(
          ranges(mine * BLOCK, np.minimum(BLOCK, n - mine * BLOCK))
        )
      return kept[w]

    def rows(lo: int, hi: int) -> np.ndarray:
      parts = [np.empty([0], np.int64)]
      while lo < hi:
        w = (np.searchsorted(starts, lo, side='right') - 1) // per_window
        first, last = starts[w * per_window], starts[min((w + 1) * per_window, len(blocks))]
        end = min(hi, last)
        parts.append(window(w)[lo - first : end - first])
        lo = end
      return np.concatenate(parts)

    return rows

  def _gather(self, rows: np.ndarray) -> SlotBatch:
    """The samples `rows` [B] as a SlotBatch.

    Raises:
      BadPass: where a file has another size than when it was opened.
    """
    try:
      found = self._samples.gather(rows)
      return SlotBatch(
        found.keys,
        found.values,
        found.segments,
        found.dense,
        label=self._label[rows].astype(np.float32),
        weight=np.ones([len(rows)], np.float32) if self._weight is None else self._weight[rows],
        group=found.group if self._grouped else np.zeros([len(rows)], np.int64),
      )
    finally:
      self._check_sizes()

  def _check_sizes(self) -> None:
    """Raises BadPass where a mapped file has another size: what was cut off may read as zeros."""
    for file, at_open in self._files.items():
      try:
        now = os.stat(file)
      except OSError:
        continue  # a file that was removed stays whole where it is mapped
      if now.st_ino == at_open.st_ino and now.st_size != at_open.st_size:
        raise BadPass(
          f'{file}: had {at_open.st_size} bytes and has {now.st_size}: it was changed while it was '
          'read; prepare the pass again'
        )
