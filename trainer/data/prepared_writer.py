"""Writes prepared passes (docs/data.md). Shapes: n samples, F slots, Dn dense columns."""

import collections
import concurrent.futures
import os
import zlib
from collections.abc import Callable, Sequence

import numpy as np

from ops.keys import NO_FEATURE, encode_fields
from ops.tensors import aligned
from trainer import config
from trainer.data.arrays import text_buffers
from trainer.data.features import has_log1p
from trainer.data.parse import Parsed
from trainer.data.prepared import CHUNK, META, TEXTS, PreparedPass
from trainer.files import NpyWriter, to_json, write_synced
from trainer.plain_data import JsonObject

MOST_WRITING = 2  # chunks that wait for the writer
OF_SAMPLES = ('counts', 'dense', 'label', 'weight', 'group')  # of `Parsed`: one row a sample


class _Column(NpyWriter):
  """A .npy file of a prepared pass, with the running checksum of its array."""

  def __init__(self, directory: str, name: str, dtype: str, *row_shape: int):
    self._path = os.path.join(directory, name + '.npy')
    super().__init__(self._path, dtype, row_shape)
    self._crc = 0

  def append(self, array: np.ndarray) -> memoryview:
    data = super().append(array)
    self._crc = zlib.crc32(data, self._crc)
    return data

  def complete(self) -> JsonObject:
    """Syncs and closes the file; returns its entry in meta.json."""
    self.close()
    return {'dtype': self.dtype.str, 'shape': [self.rows, *self.row_shape], 'crc32': self._crc}

  def discard(self) -> None:
    self._file.close()
    os.remove(self._path)


def _counted(parsed: Parsed) -> Parsed:
  """Returns the same samples, with `counts` filled in if it is None."""
  if parsed.counts is not None:
    return parsed
  present = [keys != NO_FEATURE for keys in parsed.keys]
  keys = [keys[own] for keys, own in zip(parsed.keys, present)]
  return parsed._replace(counts=np.stack(present, 1).astype(np.int32), keys=keys)


def _concatenate(parts: Sequence[Parsed]) -> Parsed:
  """Joins the samples of several blocks."""
  if len(parts) == 1:
    return parts[0]
  if any(p.counts is not None for p in parts):
    parts = [_counted(p) for p in parts]
  if any(p.values is not None for p in parts):
    ones = lambda p: [np.ones(len(keys), np.float32) for keys in p.keys]
    parts = [p._replace(values=p.values or ones(p)) for p in parts]
  of_samples, of_slots = _columns(parts[0])
  columns = {name: np.concatenate([getattr(p, name) for p in parts]) for name in of_samples}
  for name in of_slots:
    columns[name] = [np.concatenate(own) for own in zip(*(getattr(p, name) for p in parts))]
  return parts[0]._replace(**columns)


def _columns(parsed: Parsed) -> tuple[list[str], list[str]]:
  """Returns the names of fields that are not None: arrays by sample, and lists by slot."""
  names = OF_SAMPLES, ('keys', 'values')
  return tuple([name for name in some if getattr(parsed, name) is not None] for some in names)


def _cut(parsed: Parsed, n: int) -> tuple[Parsed, Parsed]:
  """Returns the first n samples, and the other samples."""
  counts, (of_samples, of_slots) = parsed.counts, _columns(parsed)
  ends = [n] * len(parsed.keys) if counts is None else counts[:n].sum(0).tolist()

  def part(samples: slice, wheres: Sequence[slice]) -> Parsed:
    columns = {name: getattr(parsed, name)[samples] for name in of_samples}
    for name in of_slots:
      columns[name] = [own[where] for own, where in zip(getattr(parsed, name), wheres)]
    return parsed._replace(**columns)

  rest = [slice(end, None) for end in ends]
  return part(slice(n), list(map(slice, ends))), part(slice(n, None), rest)


def _with_group(parsed: Parsed) -> Parsed:
  """Returns samples with the group of each as one more slot, the last."""
  one = np.ones([len(parsed.group), 1], np.int32)
  return parsed._replace(
    counts=None if parsed.counts is None else np.hstack([parsed.counts, one]),
    keys=[*parsed.keys, parsed.group],
    values=parsed.values and [*parsed.values, one[:, 0].astype(np.float32)],
  )


def _stats(dense: np.ndarray, columns: Sequence[config.DenseColumn]) -> np.ndarray:
  """Returns count, mean and M2 = Σ (x − mean)² of each column, float64 [Dn, 3].

  Missing values do not count; x is the value after log1p if the transform has it.
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
  """Merges count, mean and Σ (x − mean)², float64 [Dn, 3], of two sets (Chan et al. 1979)."""
  count = a[:, 0] + b[:, 0]
  share = b[:, 0] / np.maximum(count, 1)
  delta = b[:, 1] - a[:, 1]
  return np.stack(
    [count, a[:, 1] + delta * share, a[:, 2] + b[:, 2] + delta**2 * a[:, 0] * share], 1
  )


class Writer:
  """Writes a prepared pass, CHUNK samples at a time, in a thread of its own.

  The division into blocks does not change the files, except texts of features (data.keep_texts):
  each block writes its own. Call `close` at the end, or `stop` to give up.
  """

  def __init__(self, directory: str, data: config.Data, labels: Sequence[config.Label]):
    self._directory, self._dense = directory, data.dense
    self._grouped = data.group is not None
    width = len(data.slots) + self._grouped  # the group is one more slot, the last
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
    # Arrays that are not needed as long as each sample has one feature in each slot, of value 1.
    self._idle = {'splits', 'values'}
    self._waiting: list[Parsed] = []
    self._num_waiting = 0
    self._stats = np.zeros([len(data.dense), 3])
    self._features = self.samples = 0
    self._thread = concurrent.futures.ThreadPoolExecutor(1, 'writer')
    self._writing: collections.deque[concurrent.futures.Future[None]] = collections.deque()

  def add(self, parsed: Parsed) -> None:
    """Appends samples. If a write fails, this or a later call raises OSError."""
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

  def append(self, prepared: PreparedPass) -> None:
    """Appends a prepared pass of the same schema; copies its full chunks if no samples wait."""
    samples = prepared.num_samples
    copied = 0 if self._num_waiting else samples // CHUNK * CHUNK
    if copied:
      rest = prepared.parsed(copied, samples)
      self.samples += copied
      features = prepared.meta['features'] - sum(map(len, rest.keys))
      self._submit(self._copy, prepared, copied, features)
    for start in range(copied, samples, CHUNK):
      self.add(prepared.parsed(start, min(start + CHUNK, samples)))
    if (texts := prepared.texts) is not None:
      self._submit(self._write_texts, texts)

  def _submit(self, task: Callable[..., None], *args: object) -> None:
    """Has the thread run a task; blocks while more than MOST_WRITING tasks wait."""
    self._writing.append(self._thread.submit(task, *args))
    if len(self._writing) > MOST_WRITING:
      self._writing.popleft().result()

  def _copy(self, prepared: PreparedPass, samples: int, features: int) -> None:
    """Copies the first samples, a multiple of CHUNK, which have `features` features, of a pass."""
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
    """Ends the thread; tasks that wait are not run."""
    self._thread.shutdown(cancel_futures=True)

  def _write(self, chunk: Parsed) -> None:
    coded = _with_group(chunk) if self._grouped else chunk
    keys = np.concatenate(coded.keys, out=aligned([sum(map(len, coded.keys))], np.int64))
    values = coded.values and np.concatenate(coded.values)
    counts = None if coded.counts is None else coded.counts.T
    encoded = encode_fields(keys, values, counts, len(coded.keys))
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
    self._features += sum(int(np.count_nonzero(keys != NO_FEATURE)) for keys in chunk.keys)
    self._stats = merge_stats(self._stats, _stats(chunk.dense, self._dense))

  def close(self, meta: JsonObject) -> None:
    """Completes and syncs the files, then writes meta.json with the entries `meta`."""
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
