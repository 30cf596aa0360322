"""Reads prepared passes: directories of arrays, each converted from one pass of the log.

docs/data.md has the format. Shapes: n samples of the pass, B of a batch, F slots, nnz features, Dn
dense columns.
"""

import ctypes
import functools
import itertools
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from ops.keys import MAX_SAMPLES
from ops.library import PATH, load
from ops.samples import SampleArrays
from trainer import config
from trainer.data.arrays import ranges
from trainer.data.features import SlotBatch
from trainer.data.file_system import is_remote
from trainer.data.parse import Parsed
from trainer.data.schema import schema
from trainer.errors import BadPass, UserError
from trainer.files import crc32_of_stream, to_json
from trainer.plain_data import JsonObject

META = 'meta.json'  # written last; only with it a directory is a prepared pass
HEADER_BYTES = 128  # of each .npy
CHUNK = MAX_SAMPLES  # samples that are stored together, and whose distinct fields are numbered
SMALL_PASS = 2_000_000  # samples; a smaller pass is shuffled as a whole
# Larger passes are shuffled by blocks of samples, then within windows of blocks, so that reads stay
# close together.
BLOCK = 8192
WINDOW = 64 * BLOCK
TEXTS = ('text_keys', 'text_lengths', 'text_bytes')  # with data.keep_texts
OF_FEATURES = ('codes', 'bases', 'keys', 'splits', 'values', 'dense')


def read_meta(path: str) -> JsonObject:
  """Returns a prepared pass's meta.json; BadPass if it is damaged, UserError if there is none."""
  file = os.path.join(path, META)
  try:
    if not os.path.isfile(file):  # opening a pipe would wait
      raise FileNotFoundError
    with open(file, encoding='utf-8') as f:
      meta = json.load(f)
  except (FileNotFoundError, NotADirectoryError):
    raise UserError(
      f'{path}: not a prepared pass, it holds no {META}; wanted a directory that ctr-prepare wrote'
    ) from None
  except (ValueError, RecursionError) as e:
    raise BadPass(f'{file}: not JSON: {e}; prepare the pass again') from None
  if not isinstance(meta, dict) or meta.pop('crc32', None) != zlib.crc32(to_json(meta)):
    raise BadPass(f'{file}: its checksum is wrong; prepare the pass again')
  return meta


def is_prepared(data: config.Data, path: str) -> bool:
  """Returns whether a path of the config is a prepared pass; UserError if it is, but remote."""
  if is_remote(path):
    if data.format == 'prepared':
      raise UserError(f"{path}: data.format 'prepared' wants a local path; remote passes are logs")
    return False
  if data.format is None:
    return os.path.isfile(os.path.join(path, META))
  return data.format == 'prepared'


class PreparedPass:
  """A prepared pass, mapped into memory; opening it verifies the checksums.

  UserError if the directory is no such pass, or not of the `schema` of `cfg`; BadPass if damaged.
  """

  def __init__(self, path: str, cfg: config.Config | None = None):
    self.path, self.name = path, os.path.basename(os.path.normpath(path))
    self.meta = read_meta(path)
    for part, wanted in schema(cfg).items() if cfg is not None else ():
      own = self.meta['schema'].get(part)
      if own != wanted:
        if isinstance(own, list) and isinstance(wanted, list):  # the first that differs
          own, wanted = next((a, b) for a, b in itertools.zip_longest(own, wanted) if a != b)
        raise UserError(
          f"{path}: prepared for another schema: its '{part}' has {own!r}, the config wants "
          f'{wanted!r}; prepare it again'
        )
    self.num_samples, self.day = self.meta['samples'], self.meta['day']
    self.num_slots = len(self.meta['schema']['slots'])
    self._grouped = self.meta['schema']['group'] is not None
    self._files: dict[str, os.stat_result] = {}  # as they were when they were mapped
    # From now on, a read past the end of a mapped file that was cut short prints its name and ends
    # the process with status 2. In the file's last memory page such a read gives zeros: see
    # `_check_sizes`.
    load()
    ctypes.CDLL(PATH).ctr_tell_files_cut_short()
    arrays = {name: self._array(name, of) for name, of in self.meta['arrays'].items()}
    # Keys, the lengths of their texts in bytes, and all texts' bytes; None without data.keep_texts.
    self.texts = [arrays.pop(name) for name in TEXTS] if TEXTS[0] in arrays else None
    self._arrays, self._label, self._weight = arrays, arrays['label'], arrays.get('weight')
    self._samples = SampleArrays(
      **{name: arrays.get(name) for name in OF_FEATURES}, slots=self.num_slots, chunk=CHUNK
    )

  def _array(self, name: str, written: JsonObject) -> np.ndarray:
    file = os.path.join(self.path, name + '.npy')
    dtype, shape = np.dtype(written['dtype']), tuple(written['shape'])
    size = int(np.prod(shape)) * dtype.itemsize
    total, again = HEADER_BYTES + size, 'prepare the pass again'
    try:
      with open(file, 'rb') as f:
        at_open = os.fstat(f.fileno())
        if at_open.st_size != total:
          raise BadPass(f'{file}: has {at_open.st_size} bytes; wanted {total}; {again}')
        f.seek(HEADER_BYTES)
        crc = crc32_of_stream(f)
        array = np.memmap(f, dtype, 'r', HEADER_BYTES, shape) if size else np.zeros(shape, dtype)
    except OSError as e:
      raise BadPass(f'{file}: cannot be read ({e}); {again}') from None
    if (wanted := written['crc32']) != crc:
      raise BadPass(f'{file}: its checksum is {crc:08x}; wanted {wanted:08x}; {again}')
    self._files[file] = at_open
    return np.asarray(array)

  def chunks(self, n: int) -> dict[str, np.ndarray]:
    """Returns {name: array} of the first n chunks of CHUNK samples, with `splits` and `values`."""
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
    """Returns the samples [start, end) in the form that `parse.parse` returns."""
    batch, shape = self.gather(np.arange(start, end)), (end - start, self.num_slots)
    counts = values = None
    if len(batch.segments) or not len(batch.keys):
      counts = np.bincount(batch.segments, minlength=shape[0] * shape[1])
      counts = counts.reshape(shape).astype(np.int32)
      slot, ends = batch.segments % self.num_slots, np.cumsum(counts.sum(0))[:-1]
      by_slot = np.argsort(slot.astype(np.uint16), kind='stable')  # so small, linear in time
      keys = np.split(batch.keys[by_slot], ends)
      values = np.split(batch.values[by_slot], ends) if len(batch.values) else None
    else:
      keys = [*batch.keys.reshape(shape).T]
    weight = None if self._weight is None else batch.weight
    group = batch.group if self._grouped else None
    return Parsed(counts, keys, values, batch.dense, self._label[start:end], weight, group)

  @property
  def num_chunks(self) -> int:
    """The number of chunks of CHUNK samples; the last may have fewer."""
    return len(self._arrays['bases'])

  def fields(self, chunk: int, slot: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns what the samples of a chunk hold in a slot, without gathering each sample.

    What a sample holds there is a *field*: no feature, one or several. C of them are distinct.

    Returns:
      How many samples hold each field, int64 [C].
      How many features each field has, int64 [C].
      The keys of these features, int64, field by field.
    """
    samples = np.bincount(self._arrays['codes'][chunk * CHUNK : (chunk + 1) * CHUNK, slot])
    splits, first = self._arrays['bases'][chunk, slot].tolist()
    features = np.ones_like(samples)
    if 'splits' in self._arrays:
      of_slot = self._arrays['splits'][splits : splits + len(samples) + 1]
      features = np.diff(of_slot.astype(np.int64))
    keys = self._arrays['keys'][first : first + int(features.sum())]
    self._check_sizes()
    return samples, features, keys

  def dense(self, chunks: int) -> np.ndarray:
    """Returns the dense columns of the first chunks, float32 [n, Dn], NaN where missing."""
    dense = self._arrays['dense'][: chunks * CHUNK].copy()
    self._check_sizes()
    return dense

  def sole_labels(self) -> list[float | None]:
    """Returns, for each task, the label of all samples that have one; None if they differ."""
    if not self.num_samples:
      return [None] * self._label.shape[1]
    # If all are blank, both are NaN, which differ.
    least, most = np.fmin.reduce(self._label), np.fmax.reduce(self._label)
    return [float(low) if low == high else None for low, high in zip(least, most)]

  def weighs_nothing(self) -> bool:
    """Returns whether the samples have weights, all of which are 0."""
    return self._weight is not None and self.num_samples > 0 and not self._weight.any()

  def counts(self, task: int) -> np.ndarray:
    """Returns which samples count for a task, bool [n]: they have a label and a weight above 0."""
    known = ~np.isnan(self._label[:, task].astype(np.float32))
    return known if self._weight is None else known & (self._weight > 0)

  def labels(self, task: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the m labels of a task that are not blank, and their weights, float64 [m] each."""
    label = self._label[:, task].astype(np.float64)
    weight = np.ones_like(label) if self._weight is None else self._weight.astype(np.float64)
    known = ~np.isnan(label)
    return label[known], weight[known]

  def mean_labels(self) -> np.ndarray:
    """Returns each task's weighted mean label, float64 [T], without blanks; NaN for weight 0."""
    means = np.full([self._label.shape[1]], np.nan)
    for task in range(len(means)):
      label, weight = self.labels(task)
      if weight.any():
        means[task] = np.average(label, weights=weight)
    return means

  def click_rate(self, shares: Sequence[float]) -> float:
    """Returns the mean clicks of a sample; `shares` are how many each task's positive counts as."""
    return float(np.mean((self._label > 0.5) @ np.array(shares))) if self.num_samples else 0.0

  def num_batches(self, batch_size: int) -> int:
    return -(-self.num_samples // batch_size)

  def slices(
    self, batch_size: int, size: int, seed: int = 0, epoch: int = 0, shuffle: bool = False
  ) -> Callable[[int, int], SlotBatch]:
    """Cuts each global batch of `batch_size` samples into `size` slices, one for each process.

    The global batches depend only on (seed, name of the pass, epoch). Of the b samples of one,
    slice r has the samples [r·b // size, (r + 1)·b // size), none perhaps in the last batch.
    Returns a function (number of a global batch, number of a slice) -> SlotBatch of NumPy arrays,
    fastest in order.
    """
    samples_at = self._shuffled(seed, epoch) if shuffle else np.arange

    def slice_of(batch: int, r: int) -> SlotBatch:
      start = batch * batch_size
      b = min(batch_size, self.num_samples - start)
      return self.gather(samples_at(start + r * b // size, start + (r + 1) * b // size))

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

    Every rank gets the same number of slices. Batches before `start_batch` are not read.
    """
    slice_of = self.slices(batch_size, size, seed, epoch, shuffle)
    for batch in range(start_batch, self.num_batches(batch_size)):
      yield slice_of(batch, rank)

  def _shuffled(self, seed: int, epoch: int) -> Callable[[int, int], np.ndarray]:
    """Returns a function (lo, hi) -> the numbers of the samples [lo, hi) in the shuffled order."""
    n = self.num_samples

    def generator(*window: int) -> np.random.Generator:
      return np.random.default_rng([seed, epoch, zlib.crc32(self.name.encode()), *window])

    if n < SMALL_PASS:
      order = generator().permutation(n).astype(np.int32)
      return lambda lo, hi: order[lo:hi]
    blocks = generator().permutation(-(-n // BLOCK))
    # The last block of the pass may be short, wherever it is in the shuffled order.
    starts = np.concatenate([[0], np.cumsum(np.minimum(BLOCK, n - blocks * BLOCK))])
    per_window = WINDOW // BLOCK

    @functools.lru_cache(maxsize=1)
    def window(w: int) -> np.ndarray:
      mine = blocks[w * per_window : (w + 1) * per_window]
      return generator(1, w).permutation(ranges(mine * BLOCK, np.minimum(BLOCK, n - mine * BLOCK)))

    def samples_at(lo: int, hi: int) -> np.ndarray:
      parts = [np.empty([0], np.int64)]
      while lo < hi:
        w = (np.searchsorted(starts, lo, side='right') - 1) // per_window
        first, last = starts[w * per_window], starts[min((w + 1) * per_window, len(blocks))]
        end = min(hi, last)
        parts.append(window(w)[lo - first : end - first])
        lo = end
      return np.concatenate(parts)

    return samples_at

  def gather(self, samples: np.ndarray) -> SlotBatch:
    """Returns the batch of the samples at these indices, integers [B], in this order."""
    try:
      features = self._samples.gather(samples)
      label = self._label[samples].astype(np.float32)
      weight = self._weight[samples] if self._weight is not None else np.ones_like(label[:, 0])
      return SlotBatch(
        *features[:4],
        label=label[:, 0] if label.shape[1] == 1 else label,
        weight=weight,
        group=features.group if self._grouped else np.zeros([len(samples)], np.int64),
      )
    finally:
      self._check_sizes()

  def _check_sizes(self) -> None:
    """Raises BadPass if a mapped file's size has changed; a part cut off might be read as zeros."""
    for file, at_open in self._files.items():
      try:
        now = os.stat(file)
      except OSError:
        continue  # a removed file stays mapped
      if now.st_ino == at_open.st_ino and now.st_size != at_open.st_size:
        raise BadPass(
          f'{file}: had {at_open.st_size} bytes and has {now.st_size}: it was changed while it was '
          'read; prepare the pass again'
        )


def same_samples(pairs: Iterable[tuple[PreparedPass, PreparedPass]]) -> Iterator[tuple[str, str]]:
  """Yields the paths of each pair of passes that differ in path, but hold the same samples."""
  for one, other in pairs:
    paths = one.meta['source']['path'], other.meta['source']['path']
    if one.num_samples and one.meta['arrays'] == other.meta['arrays'] and paths[0] != paths[1]:
      yield paths
