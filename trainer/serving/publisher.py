"""Follows the exports of a run and applies them to a store."""

import math
import os
import time
from collections.abc import Callable
from typing import NamedTuple

from absl import logging

from trainer import files
from trainer.errors import DataLoss, UserError
from trainer.serving.versioned_store import Overtaken, Version, VersionedStore
from trainer.storage import chain
from trainer.storage.chain import ROW_KINDS, RowExport


class Applied(NamedTuple):
  """What a publisher applied to a store.

  `replaced` is the version that a base has replaced, if the run has no export of it now: it is of
  another run, or the run has begun anew or removed that export.
  """

  version: Version
  rows: int
  tombstones: int
  seconds: float
  replaced: Version | None


class Publisher:
  """Brings a store to the newest exported version of a run.

  Only the exports and the store's version determine what is applied: it may be killed and started
  again at any moment. `look` is called before the directory of exports is read, to update a copy of
  a bucket.
  """

  def __init__(
    self, directory: str, store: VersionedStore, look: Callable[[], None] = lambda: None
  ):
    self._directory, self._store, self._look = directory, store, look
    # Why the last call of `advance` refused an export; None if it did not.
    self.refused: str | None = None
    self.held: Version | None = None  # the version that the store had or got in the last call
    # When the oldest export that the store lacks was written or, if it is not known which one that
    # is, when this began; None if the store lacks none.
    self.behind_since: float | None = None

  def advance(self) -> Applied | None:
    """Applies the newer exports, if any, and says which; what it cannot read is logged once."""
    refused, self.refused = self.refused, None
    since, self.behind_since = self.behind_since, self.behind_since or time.time()
    self._look()
    try:
      self.held = held = self._store.version()
      exports = pending(self._directory, held)
      if exports:
        self.behind_since = min(since or math.inf, exports[0].done_at)
        applied = self._apply(exports, held)
        self.held = applied.version
      self.behind_since = None
      return applied if exports else None
    except Overtaken:
      return None
    except (DataLoss, FileNotFoundError) as e:
      # Either the trainer removed an old export during the read, and the next call finds newer
      # ones. Or the export is damaged, and the store keeps its version until the next base.
      self.refused = str(e)
      if self.refused != refused:
        logging.warning('an export was not applied: %s', e)
      return None

  def figures(self) -> dict[str, Callable[[], float | None]]:
    """Returns functions for the figures of trainer.reporting.status, which give None if unknown."""
    return {
      'version': lambda: self.held and self.held.sequence,
      'version_age_seconds': lambda: self.held and time.time() - self.held.done_at,
      'seconds_behind': lambda: self.behind_since and time.time() - self.behind_since or 0,
    }

  def roll_back(self, sequence: int) -> Applied:
    """Brings the store to an earlier version, where it stays until the run's next base."""
    self._look()
    paths = {
      export.sequence: export.path
      for export in chain.exports(self._directory)
      if export.kind in ROW_KINDS
    }
    if sequence not in paths:
      names = ', '.join(map(str, paths)) or 'none'
      raise UserError(f'--rollback {sequence}: no such version in {self._directory}; found {names}')
    newest = max(paths)
    withdrawn = None if newest == sequence else RowExport(paths[newest]).checksum
    exports = chain.chain(self._directory, paths[sequence])
    return self._apply(exports, self._store.version(), withdrawn)

  def _apply(
    self, exports: list[RowExport], held: Version | None, withdrawn: int | None = None
  ) -> Applied:
    started = time.monotonic()
    replaced = held if held and exports[0].begins_chain and not self._has(held) else None
    version = self._store.apply(exports, held, withdrawn)
    return Applied(
      version,
      sum(e.num_rows for e in exports),
      sum(e.num_tombstones for e in exports),
      time.monotonic() - started,
      replaced,
    )

  def _has(self, held: Version) -> bool:
    """Returns whether the run has the export of a version."""
    path = os.path.join(self._directory, held.export)
    return files.is_done(path) and held.checksum == files.checksum(path)


def pending(directory: str, held: Version | None) -> list[RowExport]:
  """Returns the exports to apply to a store, oldest first, to bring it to the newest version.

  They are those after the version `held`, or a new base and its deltas; none if the store holds the
  newest version, or if a rollback withdrew an export on which that version builds.
  """
  links: list[RowExport] = []
  for export in chain.backwards(directory):
    if held and (export.name, export.checksum) == (held.export, held.checksum):
      break
    if held and export.checksum == held.withdrawn:
      return []
    links.insert(0, export)
  return links
