"""Reads exports: which ones a directory holds, which chains they form, and what rows they hold.

    exports/000012-base/  000013-delta/ …      rows; export_writer.py describes the files
    exports/saved_model/14/     a model, in TensorFlow Serving's layout NAME/VERSION
    exports/items/15/           a base of a run with model.retrieval, with the vectors of its items
                                (`trainer.retrieval.items`)

An export's number is called its *sequence*. Exports of all kinds are counted together.
"""

import contextlib
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from absl import logging

from ops.sharding import SHARDS, owners_with, within
from trainer import files
from trainer.data.features import HASH_BITS
from trainer.errors import DataLoss
from trainer.plain_data import JsonObject

ITEMS = 'items.parquet'  # a file beside rows, of a model that finds items
ROW_KINDS = ('base', 'delta', 'items')
FOLDERS = ('saved_model', 'items')  # kinds whose versions lie in a directory of their own
CONFIG = 'config.yaml'
DENSE = 'dense.npz'
SHOW_CLICK = ('show', 'click')  # columns of rows, where a slot has `counts`
_NAME = re.compile(r'(\d{6,})-(base|delta)')
_VERSION = re.compile(r'\d+')

Result = TypeVar('Result')


class StoredExport(NamedTuple):
  sequence: int
  kind: str
  path: str


class LeftOut(NamedTuple):
  """Why served scores may differ from those of ctr-predict."""

  rows: int = 0  # the number of features that the lifecycle's thresholds keep out of exports
  of: int = 0  # the number of features in the table; 0 if no threshold is set
  share_of_shows: float = 0.0  # share of all shows that belong to the rows left out
  older: Sequence[str] = ()  # descriptions of features whose older values stay until the next base

  def __str__(self) -> str:
    """Describes the differences for the user; empty if there are none."""
    told = []
    if self.rows:
      told.append(
        f'{self.rows:,} of {self.of:,} features, which had {self.share_of_shows:.1%} of the '
        'impressions, are left out: samples with these features get other scores than from '
        'ctr-predict; to serve all, set lifecycle.base_threshold and lifecycle.delta_keep_days to '
        'null and export again'
      )
    if self.older:
      told.append(
        'deltas leave at their older values, until the next base or until they change more: '
        + '; '.join(self.older)
      )
    return '; '.join(told)


class Rows(NamedTuple):
  """Rows of n features. `factors` has counts[0] factors of feature 0, then counts[1] of 1, …"""

  key: np.ndarray  # int64 [n]
  linear: np.ndarray  # float32 [n]
  counts: np.ndarray  # int64 [n], 0 before admission
  factors: np.ndarray  # float32 [Σ counts]
  # [n, 2], show and click, where a slot has `counts`.
  show_click: np.ndarray = np.zeros([0, 0], np.float32)

  @property
  def slot(self) -> np.ndarray:
    """The slot ids, int64 [n]."""
    return self.key >> HASH_BITS


_NO_ROWS = Rows(*(np.zeros([0], t) for t in (np.int64, np.float32, np.int64, np.float32)))


def path_of(directory: str, kind: str, sequence: int) -> str:
  """Returns the path of an export in the directory of exports."""
  if kind in FOLDERS:
    return os.path.join(directory, kind, str(sequence))
  return os.path.join(directory, f'{sequence:06d}-{kind}')


def name_of(path: str) -> str:
  """Returns an export's path within the directory of exports, such as items/12."""
  folder, name = os.path.split(path)
  return f'{os.path.basename(folder)}/{name}' if _VERSION.fullmatch(name) else name


def part_name(content: str, rank: int, size: int) -> str:
  """Returns the name of the file of 'rows' or 'tombstones' that process `rank` of `size` writes."""
  return f'{content}-{rank:05d}-of-{size:05d}.parquet'


def _names(directory: str) -> list[str]:
  try:
    return os.listdir(directory)
  except FileNotFoundError:
    return []


def _all(directory: str, suffix: str = '') -> Iterator[StoredExport]:
  """Yields the exports of a directory whose names end in `suffix`, complete or not."""
  for name in _names(directory):
    if name.endswith(suffix) and (match := _NAME.fullmatch(name.removesuffix(suffix))):
      yield StoredExport(int(match[1]), match[2], os.path.join(directory, name))
  for kind in FOLDERS:
    for name in _names(os.path.join(directory, kind)):
      if name.endswith(suffix) and _VERSION.fullmatch(name.removesuffix(suffix)):
        path = os.path.join(directory, kind, name)
        yield StoredExport(int(name.removesuffix(suffix)), kind, path)


def exports(directory: str) -> list[StoredExport]:
  """Returns the exports in a directory that are DONE, in the order of their numbers."""
  return sorted(export for export in _all(directory) if files.is_done(export.path))


class RowExport:
  """A base (of kind 'base' or 'items') or a delta; its checksums are verified as it is read.

  The constructor, and each method that reads files, raises DataLoss if the export is damaged.
  """

  def __init__(self, path: str):
    self.path, self.name = path, name_of(path)
    self._manifest = files.read_manifest(path)
    files.check_listed(path, self._manifest['files'])
    # Its number, the version that clients of a server see.
    self.sequence: int = self._manifest['sequence']
    self.kind: str = self._manifest['kind']
    # The name of the export before it in the chain; None if it begins a chain.
    self.previous: str | None = self._manifest['previous']
    self.num_rows: int = self._manifest['rows']
    self.num_tombstones: int = self._manifest['tombstones']
    # Why scores served from this export may differ from those of ctr-predict.
    self.left_out = LeftOut(**self._manifest['left_out'])
    self.has_items = ITEMS in self._manifest['files']
    # Of its manifest; an export of another run may have the same name.
    self.checksum = files.checksum(path)
    # When it was completed, in seconds as time.time() counts them.
    self.done_at = os.path.getmtime(os.path.join(path, files.DONE))

  @property
  def begins_chain(self) -> bool:
    """Whether this export is the first of its chain; such an export replaces all earlier rows."""
    return self.previous is None

  def dense(self) -> dict[str, np.ndarray]:
    """Returns {name: array} of the dense variables, and of `dense_stats`."""
    return files.from_npz(files.read_checked(self.path, DENSE, self._manifest['files']))

  def config(self) -> str:
    """Returns the resolved config as YAML."""
    return files.read_checked(self.path, CONFIG, self._manifest['files']).decode()

  def content(self, name: str) -> bytes | None:
    """Returns what a file of the export holds; None if it has no such file."""
    if name not in self._manifest['files']:
      return None
    return files.read_checked(self.path, name, self._manifest['files'])

  def rows(self) -> Iterator[Rows]:
    """Yields batches of rows by logical shard, then key; verifies each file's checksum first."""
    for name in self._parts('rows', range(SHARDS)):
      files.check_crc32(self.path, name, self._manifest['files'])
      yield from read_rows(os.path.join(self.path, name))

  def tombstones(self) -> np.ndarray:
    """Returns the keys to delete, int64 [n], ordered by logical shard, then by key."""
    return self.keys('tombstones', range(SHARDS))

  def keys(self, content: str, shards: range) -> np.ndarray:
    """Returns the keys of 'rows' or 'tombstones' in some logical shards, int64 [n]."""
    parts = [_NO_ROWS.key]
    for name in self._parts(content, shards):
      file = os.path.join(self.path, name)
      with _parquet(file) as parquet:
        keys = np.ascontiguousarray(parquet.read(columns=['key'])['key'].to_numpy())
      crc, expected = zlib.crc32(keys.tobytes()), self._manifest['files'][name]['keys_crc32']
      if crc != expected:
        raise DataLoss(f'{file}: the checksum of its keys is {crc:08x}; expected {expected:08x}')
      parts.append(keys[within(keys, shards)])
    return np.concatenate(parts)

  def _parts(self, content: str, shards: range) -> Iterator[str]:
    """Yields the names of the files that may hold keys of `shards`."""
    parts = self._manifest['parts']
    for rank in owners_with(shards, parts):
      if (name := part_name(content, rank, parts)) in self._manifest['files']:
        yield name


@contextlib.contextmanager
def _parquet(file: str) -> Iterator[pq.ParquetFile]:
  """Yields an open Parquet file; within the context, pyarrow's errors become DataLoss."""
  try:
    with pq.ParquetFile(file, memory_map=True) as parquet:
      yield parquet
  except FileNotFoundError:
    raise
  # These are pyarrow's errors for damaged files.
  except (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError, KeyError) as e:
    raise DataLoss(f'{file}: is damaged: {" ".join(str(e).split())}') from None


def read_rows(file: str) -> Iterator[Rows]:
  """Yields the rows of a Parquet file, a row group at a time."""
  with _parquet(file) as parquet:
    for group in range(parquet.num_row_groups):
      table = parquet.read_row_group(group, columns=['key', 'linear', 'factors', *SHOW_CLICK])
      yield _rows_of(table.combine_chunks())


def _rows_of(table: pa.Table) -> Rows:
  show_click = [table[name].to_numpy() for name in SHOW_CLICK if name in table.column_names]
  if not table.num_rows:
    return _NO_ROWS._replace(show_click=np.zeros([0, len(show_click)], np.float32))
  lists = table['factors'].chunk(0)
  return Rows(
    table['key'].to_numpy(),
    table['linear'].to_numpy(),
    np.diff(lists.offsets.to_numpy()).astype(np.int64),
    lists.flatten().to_numpy(),
    np.stack(show_click, 1) if show_click else np.zeros([table.num_rows, 0], np.float32),
  )


def concatenate(parts: list[Rows]) -> Rows:
  return Rows(*map(np.concatenate, zip(*parts or [_NO_ROWS])))


def backwards(directory: str, last: str | None = None) -> Iterator[RowExport]:
  """Yields the exports of a chain, newest first, opened one by one; `last` is a path or None."""
  paths = [export.path for export in exports(directory) if export.kind in ROW_KINDS]
  path = last or (paths[-1] if paths else None)
  after = ''
  while path:
    if path not in paths:
      raise DataLoss(f'{path}: is missing; {after} follows it')
    export = RowExport(path)
    yield export
    after, path = export.name, export.previous and os.path.join(directory, export.previous)


def chain(directory: str, last: str | None = None) -> list[RowExport]:
  """Returns what `backwards` yields, oldest first."""
  return list(backwards(directory, last))[::-1]


def links_of(directory: str, last: str | None, manifests: Mapping[str, JsonObject]) -> list[str]:
  """Returns a chain's paths, oldest first, up to the name `last`; [] if an export is missing.

  `manifests` are those of all exports in the directory, by path.
  """
  links: list[str] = []
  while last:
    path = os.path.join(directory, last)
    if path not in manifests:
      what = f', and {links[-1]} follows it' if links else ''
      logging.warning('%s: is missing%s; the next delta begins a new chain', path, what)
      return []
    links.append(path)
    last = manifests[path]['previous']
  return links[::-1]


class KeySet:
  """A set of many keys to which few are added at a time.

  It holds ascending arrays, each less than half as long as the one before.
  """

  def __init__(self, keys: np.ndarray = np.zeros([0], np.int64)):
    self._parts = [np.unique(keys)]

  def has(self, keys: np.ndarray) -> np.ndarray:
    """Returns whether each key is in the set, bool [n]; fastest where keys ascend."""
    found = np.zeros([len(keys)], bool)
    for part in self._parts:
      if len(part):
        found |= part[np.minimum(np.searchsorted(part, keys), len(part) - 1)] == keys
    return found

  def add(self, keys: np.ndarray) -> None:
    keys = np.unique(keys)
    self._parts.append(keys[~self.has(keys)])
    while len(self._parts) > 1 and len(self._parts[-2]) <= 2 * len(self._parts[-1]):
      self._merge(2)

  def remove(self, keys: np.ndarray) -> None:
    if len(keys):
      gone = KeySet(keys)
      self._parts = [part[~gone.has(part)] for part in self._parts]

  def all(self) -> np.ndarray:
    """Returns the keys, int64 [n], ascending."""
    self._merge(len(self._parts))
    return self._parts[0]

  def _merge(self, count: int) -> None:
    merged = np.concatenate(self._parts[-count:])
    merged.sort(kind='stable')  # which merges what ascends already
    self._parts[-count:] = [merged]


class Replay:
  """Applies the deltas of a chain to its base, and keeps the result for the next export.

  The keys of the chain, 8 bytes each, and its items stay in memory, so each export is read once. If
  another export has taken the place of one that was read, the chain is read anew.
  """

  def __init__(self):
    # The last base or delta that was written, as `stamp_of` returns it, since which the table has
    # noted which features change; None: not known.
    self.noted: tuple[str, int] | None = None
    self._known: dict[str, tuple[int, JsonObject]] = {}  # by path: `_done_at` and the manifest
    # By name: the exports that `replayed` has read, and its result.
    self._results: dict[str, tuple[list[tuple], Result]] = {}

  def scan(self, directory: str) -> tuple[list[StoredExport], dict[str, JsonObject], list[str]]:
    """Lists the exports of a directory, and removes unfinished ones, which a crash has left.

    Returns those that are DONE; their manifests by path; and the paths of the exports in the newest
    chain, oldest first, or [] if one of these is missing.
    """
    for unfinished in _all(directory, files.UNFINISHED):
      files.remove(unfinished.path)
    done, before, self._known = [], self._known, {}
    for export in sorted(_all(directory)):
      path = export.path
      try:
        done_at = _done_at(path)
      except FileNotFoundError:
        files.remove(path)
        continue
      done.append(export)
      known = before.get(path)
      fresh = known is not None and known[0] == done_at
      self._known[path] = known if fresh else (done_at, files.read_manifest(path))
    manifests = {path: manifest for path, (_, manifest) in self._known.items()}
    newest = next((export for export in reversed(done) if export.kind in ROW_KINDS), None)
    return done, manifests, links_of(directory, newest and name_of(newest.path), manifests)

  def live_keys(self, links: Sequence[str], shards: range) -> KeySet:
    """Replays a chain; returns those of its keys that are in `shards`.

    `links` are the paths of the chain's exports, as `scan` returned them on process 0.
    """

    def added(live: KeySet, export: RowExport) -> KeySet:
      gone, rows = (export.keys(content, shards) for content in ('tombstones', 'rows'))
      live.remove(gone)
      live.add(rows)
      return live

    return self.replayed('keys', links, shards, KeySet, added)

  def replayed(
    self,
    name: str,
    links: Sequence[str],
    shards: range | None,
    empty: Callable[[], Result],
    added: Callable[[Result, RowExport], Result],
  ) -> Result:
    """Replays a chain: calls `added` with each export in order, and returns the last result.

    `empty` makes the result of no exports. The result is kept under `name`; if the next chain
    begins with the same exports, only those after them are read. `shards` are those that the result
    covers, None for all.
    """
    known = self._known  # empty except on process 0
    exports = [(shards, p, known[p][0] if p in known else _done_at(p)) for p in links]
    seen, result = self._results.get(name, ([], None))
    if not seen or seen != exports[: len(seen)]:
      seen, result = [], empty()
    for i, path in enumerate(links[len(seen) :], len(seen) + 1):
      result = added(result, RowExport(path))
      self._results[name] = exports[:i], result
    return result


def stamp_of(path: str) -> tuple[str, int]:
  """Returns what tells an export from another one that may take its place."""
  return path, _done_at(path)


def _done_at(path: str) -> int:
  """Returns when an export was completed, in ns; it tells a new export at the same path."""
  return os.stat(f'{path}/{files.DONE}').st_mtime_ns
