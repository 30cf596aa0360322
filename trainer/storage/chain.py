"""Exports as they lie on the disk: which there are, which follow one another, what they hold.

    exports/000012-base/  000013-delta/ …      rows; `trainer.storage.export` says what they mean
    exports/saved_model/14/  dense_model/15/   models, in TensorFlow Serving's layout NAME/VERSION

The number, an export's *sequence*, counts all kinds together and only grows.
"""

import functools
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from absl import logging

from ops.sharding import SHARDS, shard_of, shards_of
from trainer import files
from trainer.data.features import HASH_BITS
from trainer.errors import DataLoss
from trainer.plain_data import JsonObject

ROW_KINDS = ('base', 'delta')
MODEL_KINDS = ('saved_model', 'dense_model')
CONFIG = 'config.yaml'
DENSE = 'dense.npz'
# Exports of before had their SavedModels beside their rows.
_NAME = re.compile(r'(\d{6,})-(base|delta|saved_model)')
_VERSION = re.compile(r'\d+')


class StoredExport(NamedTuple):
  """An export that is DONE."""

  sequence: int
  kind: str
  path: str


class LeftOut(NamedTuple):
  """What the thresholds of the lifecycle leave out of a base and the deltas after it."""

  rows: int = 0  # features that are not exported
  of: int = 0  # features in the table; 0 where nothing is filtered
  share_of_shows: float = 0.0  # that the rows left out had

  def __str__(self) -> str:
    """One line that says what is missing, what that means, and how to have it."""
    return (
      f'{self.rows:,} of {self.of:,} features, which had {self.share_of_shows:.1%} of the shows, '
      'are left out: samples that hold them get other scores than from ctr-predict; to serve all, '
      'set lifecycle.base_threshold and lifecycle.delta_keep_days to null and export again'
    )


class Rows(NamedTuple):
  """Rows of n features; feature i's factors are the next `counts[i]` of `factors`."""

  key: np.ndarray  # int64 [n]
  linear: np.ndarray  # float32 [n]
  counts: np.ndarray  # int64 [n], 0 before admission
  factors: np.ndarray  # float32 [Σ counts]

  @property
  def slot(self) -> np.ndarray:
    """Returns the slot ids, int64 [n]."""
    return self.key >> HASH_BITS


def path_of(directory: str, kind: str, sequence: int) -> str:
  """Returns where an export of this kind and sequence lies."""
  if kind in MODEL_KINDS:
    return os.path.join(directory, kind, str(sequence))
  return os.path.join(directory, f'{sequence:06d}-{kind}')


def part_name(content: str, rank: int, size: int) -> str:
  """Returns the name of what process `rank` of `size` wrote of 'rows' or 'tombstones'."""
  return f'{content}-{rank:05d}-of-{size:05d}.parquet'


def _names(directory: str) -> list[str]:
  try:
    return os.listdir(directory)
  except FileNotFoundError:
    return []


def _all(directory: str, suffix: str = '') -> Iterator[StoredExport]:
  """Yields exports whose names end in `suffix`, whether they are DONE or not."""
  for name in _names(directory):
    if name.endswith(suffix) and (match := _NAME.fullmatch(name.removesuffix(suffix))):
      yield StoredExport(int(match[1]), match[2], os.path.join(directory, name))
  for kind in MODEL_KINDS:
    for name in _names(os.path.join(directory, kind)):
      if name.endswith(suffix) and _VERSION.fullmatch(name.removesuffix(suffix)):
        path = os.path.join(directory, kind, name)
        yield StoredExport(int(name.removesuffix(suffix)), kind, path)


def exports(directory: str) -> list[StoredExport]:
  """Returns the exports that are DONE, by sequence."""
  return sorted(found for found in _all(directory) if files.is_done(found.path))


class RowExport:
  """A base or delta, read with its checksums.

  Args:
    path: where it lies.

  Attributes:
    name: its folder, which ends in its kind.
    sequence: its number, the version that readers see.
    kind: base or delta.
    previous: the name of the export that it follows; None where it begins a chain.
    checksum: of its manifest, which tells it from an export of the same name of another run.
    done_at: when it was DONE, as time.time().
    left_out: what the chain up to here leaves out.
  Raises:
    DataLoss: where it is damaged.
  """

  def __init__(self, path: str):
    self.path, self.name = path, os.path.basename(path)
    self._manifest = files.read_manifest(path)
    files.check_listed(path, self._manifest['files'])
    self.sequence: int = self._manifest['sequence']
    self.kind: str = self._manifest['kind']
    self.previous: str | None = self._manifest['previous']
    self.num_rows: int = self._manifest['rows']
    self.num_tombstones: int = self._manifest['tombstones']
    self.left_out = LeftOut(**self._manifest['left_out'])
    self.checksum = files.crc32_of(os.path.join(path, files.MANIFEST))
    self.done_at = os.path.getmtime(os.path.join(path, files.DONE))

  @property
  def begins_chain(self) -> bool:
    """Whether a reader that applies it starts from nothing."""
    return self.previous is None

  def dense(self) -> dict[str, np.ndarray]:
    """Returns the dense variables by name, and `dense_stats`."""
    return files.from_npz(files.read_checked(self.path, DENSE, self._manifest['files']))

  def config(self) -> str | None:
    """Returns the resolved config as YAML; None for exports of before, which lack it."""
    if CONFIG not in self._manifest['files']:
      return None
    return files.read_checked(self.path, CONFIG, self._manifest['files']).decode()

  def rows(self) -> Iterator[Rows]:
    """Yields the rows by logical shard, then key, some at a time.

    A file is read once for its checksum before anything of it is yielded.
    """
    for name in self._parts('rows', range(SHARDS)):
      files.check_crc32(self.path, name, self._manifest['files'])
      yield from read_rows(os.path.join(self.path, name))

  def tombstones(self) -> np.ndarray:
    """Returns the keys that are gone, int64 [n], by logical shard, then key."""
    return self.keys('tombstones', range(SHARDS))

  def keys(self, content: str, shards: range) -> np.ndarray:
    """Returns the keys of 'rows' or 'tombstones' in some logical shards, int64 [n]."""
    found = [np.zeros([0], np.int64)]
    for name in self._parts(content, shards):
      keys = self._checked_keys(name)
      shard = shard_of(keys)
      found.append(keys[(shard >= shards.start) & (shard < shards.stop)])
    return np.concatenate(found)

  def _parts(self, content: str, shards: range) -> Iterator[str]:
    """Yields the names of the parts that may hold keys of these shards."""
    parts = self._manifest['parts']
    for rank in range(parts):
      own, name = shards_of(rank, parts), part_name(content, rank, parts)
      if name in self._manifest['files'] and own.start < shards.stop and shards.start < own.stop:
        yield name

  def _checked_keys(self, name: str) -> np.ndarray:
    entry = self._manifest['files'][name]
    if 'keys_crc32' not in entry:  # of exports of before
      files.check_crc32(self.path, name, self._manifest['files'])
    file = os.path.join(self.path, name)
    keys = read_column(file, 'key')
    if 'keys_crc32' in entry and zlib.crc32(keys.tobytes()) != entry['keys_crc32']:
      raise DataLoss(
        f'{file}: the checksum of its keys is {zlib.crc32(keys.tobytes()):08x}; wanted '
        f'{entry["keys_crc32"]:08x}'
      )
    return keys


def _damaged(file: str, error: Exception) -> DataLoss:
  return DataLoss(f'{file}: is damaged: {" ".join(str(error).split())}')


# What pyarrow raises where a file is no Parquet file, or not the one that was written.
_DAMAGE = (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError)


def read_column(file: str, column: str) -> np.ndarray:
  """Returns one column of a Parquet file as an array [n]. Raises: DataLoss."""
  try:
    with pq.ParquetFile(file, memory_map=True) as parquet:
      return np.ascontiguousarray(parquet.read(columns=[column])[column].to_numpy())
  except FileNotFoundError:
    raise
  except (*_DAMAGE, KeyError) as e:
    raise _damaged(file, e) from None


def read_rows(file: str) -> Iterator[Rows]:
  """Yields the rows of a Parquet file, a row group at a time. Raises: DataLoss."""
  try:
    with pq.ParquetFile(file, memory_map=True) as parquet:
      for group in range(parquet.num_row_groups):
        yield _rows_of(parquet.read_row_group(group, columns=['key', 'linear', 'factors']))
  except FileNotFoundError:
    raise
  except _DAMAGE as e:
    raise _damaged(file, e) from None


def _rows_of(table: pa.Table) -> Rows:
  table = table.combine_chunks()
  if not table.num_rows:
    return Rows(*(np.zeros([0], t) for t in (np.int64, np.float32, np.int64, np.float32)))
  lists = table['factors'].chunk(0)
  return Rows(
    table['key'].to_numpy(),
    table['linear'].to_numpy(),
    np.diff(lists.offsets.to_numpy()).astype(np.int64),
    lists.flatten().to_numpy(),
  )


def concatenate(parts: list[Rows]) -> Rows:
  """Returns the rows of all parts, in their order."""
  none = Rows(*(np.zeros([0], t) for t in (np.int64, np.float32, np.int64, np.float32)))
  return Rows(*map(np.concatenate, zip(none, *parts)))


def _links(
  directory: str,
  found: Iterable[StoredExport],
  last: str | None,
  previous: Callable[[str], str | None],
) -> list[str]:
  """Returns the paths of a chain, base first.

  Args:
    directory: the exports of a run.
    found: of `exports`.
    last: as of `chain`.
    previous: the name of the export that the one at a path follows.
  """
  of_rows = dict.fromkeys(one.path for one in found if one.kind in ROW_KINDS)
  path = last or next(reversed(of_rows), None)
  links: list[str] = []
  while path:
    if path not in of_rows:
      if links:
        logging.warning(
          '%s: is missing, and %s names it as the one before; the chain cannot be replayed',
          path,
          links[-1],
        )
      return []
    links.append(path)
    name = previous(path)
    path = name and os.path.join(directory, name)
  return links[::-1]


def chain(directory: str, last: str | None = None) -> list[RowExport]:
  """Returns a base and the deltas after it, in the order of their replay.

  Args:
    directory: the exports of a run.
    last: the path that the chain ends with; None: the newest base or delta.
  Returns:
    [] where there is no base or delta yet, or where an export before `last` is missing, which is
    said in the log.
  Raises:
    DataLoss: where an export is damaged.
  """
  opened = functools.cache(RowExport)
  links = _links(directory, exports(directory), last, lambda path: opened(path).previous)
  return [opened(path) for path in links]


class Replay:
  """The exports of a run as the writer of the next one needs them.

  Each is read once, and again only where another took its place, so that an export takes no longer
  the more there are. The keys that the chain holds stay in memory, 8 bytes each.
  """

  def __init__(self):
    self._manifests: dict[tuple[str, int], tuple[object, str | None]] = {}
    self._replayed: list[tuple[str, int]] = []  # the links that `_live` is of
    self._shards, self._live = range(0), np.zeros([0], np.int64)

  def look(self, directory: str) -> tuple[list[StoredExport], JsonObject, list[str]]:
    """Returns the exports that are DONE, the place in the data of each by its path, and the paths
    of the newest chain. Removes what a crash left of others.

    Raises:
      DataLoss: where a manifest is damaged.
    """
    for one in _all(directory, files.UNFINISHED):
      files.remove(one.path)
    found, before = [], self._manifests
    self._manifests, positions, previous = {}, {}, {}
    for one in sorted(_all(directory)):
      path = one.path
      try:
        identity = _identity(path)
      except FileNotFoundError:
        files.remove(path)
        continue
      found.append(one)
      if identity not in before:
        manifest = files.read_manifest(path)
        before[identity] = manifest['position'], manifest['previous']
      self._manifests[identity] = positions[path], previous[path] = before[identity]
    return found, positions, _links(directory, found, None, previous.__getitem__)

  def live_keys(self, links: Sequence[str], shards: range) -> np.ndarray:
    """Returns the keys of some logical shards that the replay of a chain holds, int64, ascending.

    Args:
      links: the paths of the chain.
      shards: the logical shards.
    Raises:
      DataLoss: where an export is damaged.
    """
    wanted = [_identity(path) for path in links]
    if shards != self._shards or self._replayed != wanted[: len(self._replayed)]:
      self._replayed, self._shards, self._live = [], shards, np.zeros([0], np.int64)
    for path, identity in zip(links[len(self._replayed) :], wanted[len(self._replayed) :]):
      export = RowExport(path)
      gone, rows = (export.keys(content, shards) for content in ('tombstones', 'rows'))
      self._live = np.union1d(np.setdiff1d(self._live, gone, assume_unique=True), rows)
      self._replayed.append(identity)
    return self._live


def _identity(path: str) -> tuple[str, int]:
  """Returns what tells an export from one of the same name that took its place."""
  return path, os.stat(os.path.join(path, files.DONE)).st_mtime_ns
