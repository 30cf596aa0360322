"""The interface of the stores from which servers read the rows of a model.

A run exports a *base*, which has all rows, then *deltas*, which have the rows that changed and
*tombstones*, the keys of deleted rows. Applied in order, this *chain* gives a *version* of the
model: its rows, dense variables and config, with the number of the last export. One publisher at a
time writes a store, and any number of scorers read it. A scorer sees all changes of a new version
at once.

A row is kept as float32 values, little-endian: the linear weight, then the factors, if any.
"""

import abc
import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ops.row_store import RowStore
from trainer.data.arrays import places, ranges
from trainer.errors import UserError
from trainer.storage.chain import RowExport, Rows

_TRIES = 3  # to read a row store that changes
_Read = TypeVar('_Read')
_ZERO = bytes(4)  # reads as a linear weight of 0 without factors


class Version(NamedTuple):
  """The number of a version of the model, and the last export that it is made from."""

  sequence: int  # the number that clients see
  export: str  # the name of the last export
  checksum: int  # of that export's manifest; exports of other runs may have the same name
  done_at: float  # when that export was written, in seconds as time.time() counts them
  # After a rollback to this version, the checksum of the newest export at that moment; exports that
  # build on that one are not applied.
  withdrawn: int | None = None
  # A sentence about features that the export lacks, or has with older values, or None.
  left_out: str | None = None

  @classmethod
  def of(cls, export: RowExport, withdrawn: int | None = None) -> 'Version':
    """Returns the version whose last export is `export`."""
    left_out = str(export.left_out) or None
    return cls(export.sequence, export.name, export.checksum, export.done_at, withdrawn, left_out)

  def to_json(self) -> bytes:
    return json.dumps(self._asdict(), sort_keys=True).encode()

  @classmethod
  def from_json(cls, data: bytes | None) -> 'Version | None':
    return None if data is None else cls(**json.loads(data))


class Overtaken(Exception):
  """Another publisher has changed the store since this publisher read its version."""


class VersionGone(Exception):
  """The store no longer holds the version that a view reads."""


class LookedUpRows(NamedTuple):
  """The rows of n keys, in the order of the keys.

  If a slot has `counts`, a row has shows and clicks as two more factors, the last ones.
  """

  linear: np.ndarray  # float32 [n]; 0 for a key without a row
  counts: np.ndarray  # int64 [n], the number of each row's factors
  factors: np.ndarray  # float32 [Σ counts]
  present: np.ndarray  # bool [n], whether the key has a row


class View(abc.ABC):
  """Reads one version of a store. Threads may share it.

  Attributes:
    config: the resolved config as YAML.
    dense: {name: the value of a dense variable}; `dense_stats` is among them.
  """

  items: Any = None  # the search of the items of a model with model.retrieval; else None
  # With rows of this version; None if only `look_up` can read them, and before a later version
  # changes the row store.
  row_store: RowStore | None = None
  is_damaged = False  # whether rows can no longer be read; the store then gets the version anew
  # Another number after each change of `row_store`. It is read before and after the row store is,
  # and once a change that has begun is complete.
  changes = 0

  def __init__(self, version: Version, config: str, dense: dict[str, np.ndarray]):
    self.version, self.config, self.dense = version, config, dense

  @abc.abstractmethod
  def look_up(self, keys: np.ndarray) -> LookedUpRows:
    """Returns the rows of keys, int64 [n]; VersionGone if the store holds another version."""

  def fetch(self, keys: np.ndarray) -> None:
    """Copies the rows of `keys`, int64 [n], into `row_store`, which lacks them.

    Keys that have no row in this version are passed over.
    """

  def settled(self, read: Callable[[RowStore], tuple[_Read, np.ndarray]]) -> _Read | None:
    """Reads the row store; None if there is none, or if it changes again and again.

    `read` returns what it has read, and the keys that the row store lacks.
    """
    for _ in range(_TRIES):
      changes = self.changes
      if (row_store := self.row_store) is None:
        break
      found, absent = read(row_store)
      if len(absent):
        self.fetch(absent)
      if self.changes == changes:
        return found
    return None

  def close(self) -> None:
    """Releases the version's resources."""


class VersionedStore(abc.ABC):
  """Keeps the rows, the dense variables and the config of one version of a model."""

  holds_items = False  # whether the store can hold the items of a model with model.retrieval
  is_applying = False  # whether this object is bringing the store to a new version

  @abc.abstractmethod
  def version(self) -> Version | None:
    """Returns the version that the store holds, if any; readers ask many times a second."""

  def apply(
    self, exports: Sequence[RowExport], expected: Version | None, withdrawn: int | None = None
  ) -> Version:
    """Brings the store to a new version, which it returns; until then, the store holds the old one.

    Args:
      exports: oldest first. The first one follows the store's version, or is a base, which replaces
        all that the store holds.
      withdrawn: in a rollback, the checksum of the newest export that it undoes (see `Version`).
    Raises:
      Overtaken: if the store does not hold `expected`.
    """
    if exports[-1].has_items and not self.holds_items:
      raise UserError(
        f'{exports[-1].path}: is of a run with model.retrieval, whose items no store holds; wanted '
        'ctr-serve --run_dir, which follows the run itself'
      )
    new = Version.of(exports[-1], withdrawn)
    self.is_applying = True
    try:
      self._apply(exports, expected, new)
    finally:
      self.is_applying = False
    return new

  @abc.abstractmethod
  def _apply(self, exports: Sequence[RowExport], expected: Version | None, new: Version) -> None:
    """Applies the exports if the store holds `expected`; afterwards it holds the version `new`."""

  @abc.abstractmethod
  def view(self) -> View | None:
    """Returns a view of the version that the store holds; None if it is empty."""

  def absent(self) -> str | None:
    """Returns a sentence that says that the store does not exist; None if it does, even empty."""
    return None

  def close(self) -> None:
    """Closes files and connections."""


def with_show_click(rows: LookedUpRows, show_click: np.ndarray) -> LookedUpRows:
  """Appends show and click, float32 [n, 2], to the factors of each row that exists."""
  ends, at = np.cumsum(rows.counts), rows.present
  factors = np.insert(rows.factors, np.repeat(ends[at], 2), show_click[at].ravel())
  return rows._replace(counts=rows.counts + 2 * at, factors=factors)


def without_show_click(rows: LookedUpRows) -> tuple[LookedUpRows, np.ndarray]:
  """Undoes `with_show_click`; returns the rows, and show and click, float32 [n, 2], 0 if absent."""
  at, show_click = rows.present, np.zeros([len(rows.linear), 2], np.float32)
  places = np.cumsum(rows.counts)[at, None] - [2, 1]
  show_click[at] = rows.factors[places]
  rest = np.delete(rows.factors, places.ravel())
  return rows._replace(counts=rows.counts - 2 * at, factors=rest), show_click


def encode(rows: Rows) -> list[bytes]:
  """Returns each row as bytes: linear weight, factors, then show and click if they are kept."""
  looked_up = LookedUpRows(rows.linear, rows.counts, rows.factors, np.ones([len(rows.key)], bool))
  if rows.show_click.size:
    looked_up = with_show_click(looked_up, rows.show_click)
  linear, counts, factors, _ = looked_up
  starts = np.cumsum(counts) - counts
  values = np.empty([len(counts)], object)
  for count in np.unique(counts):
    chosen = np.flatnonzero(counts == count)
    block = np.empty([len(chosen), 1 + count], '<f4')
    block[:, 0] = linear[chosen]
    block[:, 1:] = factors[starts[chosen, None] + np.arange(count)]
    values[chosen] = block.view(f'V{block.itemsize * (1 + count)}')[:, 0].astype(object)
  return values.tolist()


def decode(values: Sequence[bytes | None]) -> LookedUpRows:
  """Returns the rows that `encode` encoded; a value None stands for an absent row."""
  lengths = np.array([0 if v is None else len(v) for v in values], np.int64) // 4
  flat = np.frombuffer(b''.join([v or _ZERO for v in values]), '<f4')
  present = lengths > 0
  lengths = np.maximum(lengths, 1)
  first = np.cumsum(lengths) - lengths
  return LookedUpRows(flat[first], lengths - 1, np.delete(flat, first), present)


def replace(
  keys: np.ndarray, rows: LookedUpRows, other_keys: np.ndarray, other: LookedUpRows
) -> LookedUpRows:
  """Returns the rows of `keys` with some of them replaced.

  A key that is in `other_keys`, which ascend, gets its row from `other`, any other from `rows`.
  """
  if not len(other_keys):
    return rows
  at = places(other_keys, keys)
  both = LookedUpRows(*map(np.concatenate, zip(rows, other)))
  place = np.where(at >= 0, len(keys) + at, np.arange(len(keys)))
  starts = (np.cumsum(both.counts) - both.counts)[place]
  counts = both.counts[place]
  factors = both.factors[ranges(starts, counts)]
  return LookedUpRows(both.linear[place], counts, factors, both.present[place])


@contextlib.contextmanager
def plain(what: str, *errors: type[Exception]) -> Iterator[None]:
  """Turns `errors`, raised by a library, into a UserError of one line that begins with `what`."""
  try:
    yield
  except errors as e:
    raise UserError(f'{what}: {" ".join(str(e).split())}') from e
