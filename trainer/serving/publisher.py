"""Follows the exports of a run, and brings a store to the newest version."""

import time
from typing import NamedTuple

from absl import logging

from trainer.errors import DataLoss, UserError
from trainer.serving.versioned_store import Overtaken, Version, VersionedStore
from trainer.storage import chain
from trainer.storage.chain import ROW_KINDS, RowExport


class Applied(NamedTuple):
  """What one call has applied to the store."""

  version: Version
  rows: int
  tombstones: int
  seconds: float


class Publisher:
  """Brings a store to the newest version of a run.

  What is applied follows from the exports and from the version that the store itself holds, so
  that a publisher may be killed and started again at any moment, and doing it twice does nothing.

  Args:
    directory: the exports of a run.
    store: the store to update.

  Attributes:
    refused: why the last call of `advance` did not apply an export; None otherwise.
  """

  def __init__(self, directory: str, store: VersionedStore):
    self._directory, self._store = directory, store
    self.refused: str | None = None

  def advance(self) -> Applied | None:
    """Applies the exports that the store lacks.

    Returns:
      What was applied; None if there was nothing to apply, or if an export cannot be read, which it
      logs once.
    """
    refused, self.refused = self.refused, None
    try:
      held = self._store.version()
      exports = pending(self._directory, held)
      if not exports:
        return None
      return self._apply(exports, held)
    except Overtaken:
      return None
    except (DataLoss, FileNotFoundError) as e:
      # The trainer may have removed an old export while it was read. Otherwise the export is
      # damaged, and the store waits for the next base.
      self.refused = str(e)
      if self.refused != refused:
        logging.warning('an export was not applied: %s', e)
      return None

  def roll_back(self, sequence: int) -> Applied:
    """Brings the store to an earlier version, where it stays until the next base is written.

    Raises:
      UserError: if an export of that version is missing.
    """
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
    version = self._store.apply(exports, held, withdrawn)
    return Applied(
      version,
      sum(e.num_rows for e in exports),
      sum(e.num_tombstones for e in exports),
      time.monotonic() - started,
    )


def pending(directory: str, held: Version | None) -> list[RowExport]:
  """Returns the exports that lead from what a store holds to the newest version.

  Args:
    directory: the exports of a run.
    held: what the store holds; None: nothing.
  Returns:
    Oldest first: those after the one that is held, or the newest chain from its beginning. [] where
    the newest version is held, was withdrawn, or lacks an earlier export.
  Raises:
    DataLoss: where an export is damaged.
  """
  links: list[RowExport] = []
  for export in chain.backwards(directory):
    if held and (export.name, export.checksum) == (held.export, held.checksum):
      break
    if held and export.checksum == held.withdrawn:
      return []
    links.insert(0, export)
  return links
