"""Prepared passes: what training reads. docs/data.md has the format.

Shapes: n samples of the pass, F slots, nnz features, Dn dense columns, B samples of a batch.
"""

import collections
import concurrent.futures
import functools
import itertools
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ops.keys import MAX_SAMPLES, NO_FEATURE, encode_fields
from ops.mapped import tell_files_cut_short
from ops.samples import SampleArrays
from ops.tensors import aligned
from trainer import config
from trainer.data.features import SlotBatch, has_log1p
from trainer.data.log_files import is_remote
from trainer.data.parse import Parsed
from trainer.data.schema import schema
from trainer.data.values import ranges, text_buffers
from trainer.errors import BadPass, UserError
from trainer.files import NpyWriter, crc32_of_stream, to_json, write_synced
from trainer.plain_data import JsonObject

META = 'meta.json'  # written last: the pass counts when it exists
HEADER_BYTES = 128  # of each .npy
CHUNK = MAX_SAMPLES  # samples whose distinct fields are numbered together
SMALL_PASS = 2_000_000  # samples; a pass below is shuffled as a whole
# samples; larger passes are shuffled in blocks, then inside windows of blocks, so that reads stay
# near one another
BLOCK = 8192
WINDOW = 64 * BLOCK
MOST_WRITING = 2  # chunks that wait for the writer
OF_SAMPLES = ('counts', 'dense', 'label', 'weight', 'group')  # of `Parsed`, with a row a sample
TEXTS = ('text_keys', 'text_lengths', 'text_bytes')  # of data.keep_texts
OF_FEATURES = ('codes', 'bases', 'keys', 'splits', 'values', 'dense')


class _Column(NpyWriter):
  """A column of a prepared pass, as it is written."""

  def __init__(self, directory: str, name: str, dtype: str, *row_shape: int):
    self._path = os.path.join(directory, name + '.npy')
    super().__init__(self._path, dtype, row_shape)
    self._crc = 0

  def append(self, array: np.ndarray) -> memoryview:
    data = super().append(array)
    self._crc = zlib.crc32(data, self._crc)
    return data

  def complete(self) -> JsonObject:
    """Closes the file, synced."""
    self.close()
    return {'dtype': self.dtype.str, 'shape': [self.rows, *self.row_shape], 'crc32': self._crc}

  def discard(self) -> None:
    """Removes the file."""
    self._file.close()
    os.remove(self._path)


def _counted(parsed: Parsed) -> Parsed:
  """Returns the same samples with `counts`."""
  if parsed.counts is not None:
    return parsed
  keys = parsed.keys.T
  present = keys != NO_FEATURE
  return parsed._replace(counts=present.astype(np.int32), keys=keys[present])


def _concatenate(parts: Sequence[Parsed]) -> Parsed:
  """Returns the samples of several blocks as one."""
  if len(parts) == 1:
    return parts[0]
  if any(p.counts is not None for p in parts):
    parts = [_counted(p) for p in parts]
  if any(p.values is not None for p in parts):
    ones = [np.ones([len(p.keys)], np.float32) if p.values is None else p.values for p in parts]
    parts = [p._replace(values=values) for p, values in zip(parts, ones)]
  of_keys = [p.keys for p in parts]
  shape = *of_keys[0].shape[:-1], sum(k.shape[-1] for k in of_keys)
  columns = {
    name: None if array is None else np.concatenate([getattr(p, name) for p in parts])
    for name, array in parts[0]._asdict().items()
    if name in (*OF_SAMPLES, 'values')
  }
  keys = np.concatenate(of_keys, axis=-1, out=aligned(shape, np.int64))
  return Parsed(keys=keys, **columns)


def _cut(parsed: Parsed, n: int) -> tuple[Parsed, Parsed]:
  """Returns the first n samples, and the others."""
  features = n if parsed.counts is None else int(parsed.counts[:n].sum())

  def part(samples: slice, of_keys: slice) -> Parsed:
    columns = {
      name: None if array is None else array[samples if name in OF_SAMPLES else of_keys]
      for name, array in parsed._asdict().items()
      if name in (*OF_SAMPLES, 'values')
    }
    return Parsed(keys=parsed.keys[..., of_keys], **columns)

  return part(slice(n), slice(features)), part(slice(n, None), slice(features, None))


def _with_group(parsed: Parsed) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
  """Returns keys, values and counts of samples, with their group as one more slot, the last."""
  if parsed.counts is None:
    return np.vstack([parsed.keys, parsed.group]), None, None
  ends = np.cumsum(parsed.counts.sum(1))
  counts = np.hstack([parsed.counts, np.ones([len(ends), 1], np.int32)])
  values = None if parsed.values is None else np.insert(parsed.values, ends, 1)
  return np.insert(parsed.keys, ends, parsed.group), values, counts


def _stats(dense: np.ndarray, columns: Sequence[config.DenseColumn]) -> np.ndarray:
  """Returns count, mean and M2 = Σ (x − mean)² of the values that are present, float64 [Dn, 3].

  They are taken after log1p if the column's transform has it.
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
  """Merges the statistics of two sets of values, float64 [Dn, 3] each (Chan et al. 1979)."""
  count = a[:, 0] + b[:, 0]
  share = b[:, 0] / np.maximum(count, 1)
  delta = b[:, 1] - a[:, 1]
  return np.stack(
    [count, a[:, 1] + delta * share, a[:, 2] + b[:, 2] + delta**2 * a[:, 0] * share], 1
  )


class Writer:
  """Writes a prepared pass into a directory, CHUNK samples at a time, in a thread of its own.

  The files follow from the samples alone, not from the blocks that they came in; but texts repeat
  from block to block. Call `close` in the end, or `stop` to give it up.

  Args:
    directory: an empty one.
  """

  def __init__(self, directory: str, cfg: config.Config):
    data, labels = cfg.data, cfg.labels
    self._directory, self._dense = directory, data.dense
    self._grouped = data.group is not None
    width = len(cfg.slots) + self._grouped  # the group is one more slot, the last
    is_class = len(labels) == 1 and labels[0].loss != 'squared_error'  # always 0 or 1
    used = {
      'codes': ('<u2', width),
      'bases': ('<i8', width, 2),
      'splits': ('<u4',),
      'keys': ('<i8',),
      'values': ('<f4',),
      'label': ('|u1' if is_class else '<f4', len(labels)),
    }
    used |= {'dense': ('<f4', len(data.dense))} if data.dense else {}
    used |= {'weight': ('<f4',)} if data.weight is not None else {}
    used |= dict(zip(TEXTS, (('<i8',), ('<i4',), ('|u1',)))) if data.keep_texts else {}
    self._columns = {name: _Column(directory, name, *of) for name, of in used.items()}
    # Columns without information: as long as every field has one feature, and all values are 1.
    self._idle = {'splits', 'values'}
    self._waiting: list[Parsed] = []
    self._num_waiting = 0
    self._stats = np.zeros([len(data.dense), 3])
    self._features = self.samples = 0
    self._thread = concurrent.futures.ThreadPoolExecutor(1, 'writer')
    self._writing: collections.deque[concurrent.futures.Future[None]] = collections.deque()

  def add(self, parsed: Parsed) -> None:
    """Appends samples. If the disk fails, this or a later call raises OSError."""
    for keys, texts in parsed.texts:
      data, offsets = text_buffers(texts)
      self._submit(self._write_texts, (keys, np.diff(offsets), data))
    self._waiting.append(parsed)
    self._num_waiting += len(parsed.label)
    self.samples += len(parsed.label)
    if self._num_waiting >= CHUNK:
      rest = _concatenate(self._waiting)
      while len(rest.label) >= CHUNK:
        chunk, rest = _cut(rest, CHUNK)
        self._submit(self._write, chunk)
      self._waiting, self._num_waiting = [rest] if len(rest.label) else [], len(rest.label)

  def append(self, prepared: 'PreparedPass') -> None:
    """Appends a pass of the same schema; copies whole chunks unless samples are waiting."""
    samples = prepared.num_samples
    copied = 0 if self._num_waiting else samples // CHUNK * CHUNK
    if copied:
      rest = prepared.parsed(copied, samples)
      self.samples += copied
      self._submit(self._copy, prepared, copied, prepared.meta['features'] - rest.keys.size)
    for start in range(copied, samples, CHUNK):
      self.add(prepared.parsed(start, min(start + CHUNK, samples)))
    if (texts := prepared.texts) is not None:
      self._submit(self._write_texts, texts)

  def _submit(self, task: Callable[..., None], *args: object) -> None:
    """Has the thread run a task; waits if too many are waiting."""
    self._writing.append(self._thread.submit(task, *args))
    if len(self._writing) > MOST_WRITING:
      self._writing.popleft().result()

  def _copy(self, prepared: 'PreparedPass', samples: int, features: int) -> None:
    """Appends the first samples of a pass, which are whole chunks, behind whole chunks."""
    arrays = prepared.chunks(samples // CHUNK)
    arrays['bases'] = arrays['bases'] + [self._columns['splits'].rows, self._columns['keys'].rows]
    for name, array in arrays.items():
      self._columns[name].append(array)
    self._idle -= prepared.meta['arrays'].keys()
    self._features += features
    for start in range(0, samples if self._dense else 0, CHUNK):
      chunk = _stats(arrays['dense'][start : start + CHUNK], self._dense)
      self._stats = merge_stats(self._stats, chunk)

  def _write_texts(self, arrays: Sequence[np.ndarray]) -> None:
    for name, array in zip(TEXTS, arrays):
      self._columns[name].append(array)

  def stop(self) -> None:
    """Ends the thread; what it has not begun to write is left out."""
    self._thread.shutdown(cancel_futures=True)

  def _write(self, chunk: Parsed) -> None:
    keys, values, counts = chunk.keys, chunk.values, chunk.counts
    if self._grouped:
      keys, values, counts = _with_group(chunk)
    encoded = encode_fields(keys, values, counts)
    columns, distinct = self._columns, encoded.fields_of
    of_slots = np.split(encoded.counts, np.cumsum(distinct)[:-1])
    splits = [np.concatenate([[0], np.cumsum(counts)]) for counts in of_slots]
    widths = np.array([own[-1] for own in splits], np.int64)
    bases = np.stack(
      [
        columns['splits'].rows + np.cumsum(distinct + 1) - distinct - 1,
        columns['keys'].rows + np.cumsum(widths) - widths,
      ],
      1,
    )
    columns['bases'].append(bases[None])
    columns['splits'].append(np.concatenate(splits))
    if (encoded.counts != 1).any():
      self._idle.discard('splits')
    if len(encoded.values):
      self._idle.discard('values')
    columns['values'].append(encoded.values if len(encoded.values) else np.ones(len(encoded.keys)))
    columns['codes'].append(encoded.codes)
    columns['keys'].append(encoded.keys)
    for name in ('dense', 'label', 'weight'):
      if name in columns:
        columns[name].append(getattr(chunk, name))
    self._features += int(np.count_nonzero(chunk.keys != NO_FEATURE))
    self._stats = merge_stats(self._stats, _stats(chunk.dense, self._dense))

  def close(self, meta: JsonObject) -> None:
    """Completes the files, then writes `meta`, all of them synced."""
    if self._num_waiting:
      self._submit(self._write, _concatenate(self._waiting))
    while self._writing:
      self._writing.popleft().result()
    self.stop()
    for name in self._idle:
      self._columns.pop(name).discard()
    meta = meta | {
      'samples': self.samples,
      'features': self._features,
      'dense': {c.name: row for c, row in zip(self._dense, self._stats.tolist())},
      'arrays': {name: column.complete() for name, column in self._columns.items()},
    }
    meta['crc32'] = zlib.crc32(to_json(meta))
    write_synced(os.path.join(self._directory, META), to_json(meta))


def read_meta(path: str) -> JsonObject:
  """Returns the meta.json of a prepared pass.

  Raises:
    UserError: if there is none.
    BadPass: if it is damaged.
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
  if not isinstance(meta, dict) or meta.pop('crc32', None) != zlib.crc32(to_json(meta)):
    raise BadPass(f'{file}: its checksum is wrong; prepare the pass again')
  return meta


def is_prepared(data: config.Data, path: str) -> bool:
  """Returns whether a path of the config is a prepared pass, not a raw one."""
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
    cfg: if given, the pass must have been prepared with this config's schema.

  Raises:
    UserError: if it is no prepared pass, or has another schema.
    BadPass: if its files are not those that were written.
  """

  def __init__(self, path: str, cfg: config.Config | None = None):
    self.path, self.name = path, os.path.basename(os.path.normpath(path))
    self.meta = read_meta(path)
    for part, wanted in schema(cfg).items() if cfg is not None else ():
      found = self.meta['schema'].get(part)
      if found != wanted:
        if isinstance(found, list) and isinstance(wanted, list):  # the first that differs
          found, wanted = next((a, b) for a, b in itertools.zip_longest(found, wanted) if a != b)
        raise UserError(
          f"{path}: prepared for another schema: its '{part}' has {found!r}, the config wants "
          f'{wanted!r}; prepare it again'
        )
    self.num_samples, self.day = self.meta['samples'], self.meta['day']
    self.num_slots = len(self.meta['schema']['slots'])
    self._grouped = self.meta['schema']['group'] is not None
    self._files: dict[str, os.stat_result] = {}  # as they were when they were mapped
    tell_files_cut_short()
    arrays = {name: self._array(name, of) for name, of in self.meta['arrays'].items()}
    # Keys, bytes of the text of each, and these bytes; None: prepared without data.keep_texts.
    self.texts = [arrays.pop(name) for name in TEXTS] if TEXTS[0] in arrays else None
    self._arrays, self._label, self._weight = arrays, arrays['label'], arrays.get('weight')
    self._samples = SampleArrays(
      **{name: arrays.get(name) for name in OF_FEATURES}, slots=self.num_slots, chunk=CHUNK
    )

  def _array(self, name: str, written: JsonObject) -> np.ndarray:
    """Maps an array into memory, after checking that its bytes are those that were written."""
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

  def chunks(self, n: int) -> dict[str, np.ndarray]:
    """Returns the arrays of the first n chunks, which are full; `splits` and `values` always."""
    arrays, bases = self._arrays, self._arrays['bases'].reshape(-1, 2)
    num_keys, first = len(arrays['keys']), n * self._arrays['bases'].shape[1]
    if first < len(bases):
      num_splits, num_keys = bases[first].tolist()
    else:
      num_splits = len(arrays['splits']) if 'splits' in arrays else num_keys + len(bases)
    lengths = np.diff(bases[:first, 0], append=num_splits)
    chunks = {name: array[: n * CHUNK] for name, array in arrays.items()}
    return chunks | {
      'bases': arrays['bases'][:n],
      'keys': arrays['keys'][:num_keys],
      'splits': arrays['splits'][:num_splits]
      if 'splits' in arrays
      else np.concatenate([np.arange(length) for length in lengths]),
      'values': arrays['values'][:num_keys] if 'values' in arrays else np.ones([num_keys]),
    }

  def parsed(self, start: int, end: int) -> Parsed:
    """Returns the samples [start, end) as they were parsed."""
    batch = self.gather(np.arange(start, end))
    counts, keys, values = None, batch.keys, batch.values if len(batch.values) else None
    if not len(batch.segments):
      keys = keys.reshape(-1, self.num_slots).T
    else:
      counts = np.bincount(batch.segments, minlength=(end - start) * self.num_slots)
      counts = counts.reshape(-1, self.num_slots).astype(np.int32)
    weight = None if self._weight is None else batch.weight
    group = batch.group if self._grouped else None
    return Parsed(counts, keys, values, batch.dense, self._label[start:end], weight, group)

  def sole_labels(self) -> list[float | None]:
    """Returns for each task the label that all of the pass's samples have.

    It is None if the labels differ or are all blank. A pass without samples has none of them.
    """
    if not self.num_samples:
      return [None] * self._label.shape[1]
    # NaN where all are blank, which is unequal to itself.
    least, most = np.fmin.reduce(self._label), np.fmax.reduce(self._label)
    return [float(low) if low == high else None for low, high in zip(least, most)]

  def click_rate(self, shares: Sequence[float]) -> float:
    """Returns the mean clicks of a sample; `shares` are those of a click of each label, [T]."""
    return float(np.mean((self._label > 0.5) @ np.array(shares))) if self.num_samples else 0.0

  def num_batches(self, batch_size: int) -> int:
    """Returns the number of global batches."""
    return -(-self.num_samples // batch_size)

  def slices(
    self, batch_size: int, size: int, seed: int = 0, epoch: int = 0, shuffle: bool = False
  ) -> Callable[[int, int], SlotBatch]:
    """Cuts the pass's global batches of `batch_size` samples into `size` slices each.

    The global batches follow from (seed, name of the pass, epoch) alone. Slice r has samples [r·b
    // size, (r + 1)·b // size) of a global batch of b samples, so slices side by side give it in
    order. A slice of the last batch may be empty.

    Returns:
      A function (global batch, slice) -> SlotBatch of NumPy arrays; fast if batches come in order.
    """
    rows = self._shuffled(seed, epoch) if shuffle else np.arange

    def slice_of(batch: int, r: int) -> SlotBatch:
      start = batch * batch_size
      b = min(batch_size, self.num_samples - start)
      return self.gather(rows(start + r * b // size, start + (r + 1) * b // size))

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
    """Yields this rank's slice of each global batch, from `start_batch` on; see `slices`.

    Every rank gets `num_batches(batch_size) - start_batch` SlotBatches. The batches before
    `start_batch` cost nothing.
    """
    slice_of = self.slices(batch_size, size, seed, epoch, shuffle)
    for batch in range(start_batch, self.num_batches(batch_size)):
      yield slice_of(batch, rank)

  def _shuffled(self, seed: int, epoch: int) -> Callable[[int, int], np.ndarray]:
    """Returns a function: (lo, hi) -> the samples at places [lo, hi) of the shuffled order."""
    n = self.num_samples

    def generator(*window: int) -> np.random.Generator:
      return np.random.default_rng([seed, epoch, zlib.crc32(self.name.encode()), *window])

    if n < SMALL_PASS:
      order = generator().permutation(n).astype(np.int32)
      return lambda lo, hi: order[lo:hi]
    blocks = generator().permutation(-(-n // BLOCK))
    # The pass's last block is short. Wherever it stands, the places behind it move up by what it
    # lacks.
    starts = np.concatenate([[0], np.cumsum(np.minimum(BLOCK, n - blocks * BLOCK))])
    per_window = WINDOW // BLOCK

    @functools.lru_cache(maxsize=1)
    def window(w: int) -> np.ndarray:
      mine = blocks[w * per_window : (w + 1) * per_window]
      rows = ranges(mine * BLOCK, np.minimum(BLOCK, n - mine * BLOCK))
      return generator(1, w).permutation(rows)

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

  def gather(self, rows: np.ndarray) -> SlotBatch:
    """Returns the samples at places `rows` [B].

    Raises:
      BadPass: if a file has another size than when it was opened.
    """
    try:
      samples = self._samples.gather(rows)
      label = self._label[rows].astype(np.float32)
      return SlotBatch(
        *samples[:4],
        label=label[:, 0] if label.shape[1] == 1 else label,
        weight=np.ones([len(rows)], np.float32) if self._weight is None else self._weight[rows],
        group=samples.group if self._grouped else np.zeros([len(rows)], np.int64),
      )
    finally:
      self._check_sizes()

  def _check_sizes(self) -> None:
    """Raises BadPass if a mapped file has another size: what was cut off may read as zeros."""
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
