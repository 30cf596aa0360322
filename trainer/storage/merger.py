"""Merges the rows of a checkpoint's saves into one file in the background."""

import os
import threading
from collections.abc import Mapping, Sequence

from absl import logging

from ops.sharding import SHARDS
from trainer import files
from trainer.errors import one_line
from trainer.plain_data import Json
from trainer.storage.checkpoint_rows import Layer, part_name, read_rows, write_rows


class Merger:
  """Merges the rows of one checkpoint at a time, without the table; process 0 has it.

  Attributes:
    folder: where the merged rows lie until a checkpoint takes them.
    source: the checkpoint that is merged, which must not be removed; None between two.
  """

  THREAD = 'merge rows'  # its name

  def __init__(self, directory: str):
    self.folder = os.path.join(directory, 'merged')
    self.source: str | None = None
    self._thread = threading.Thread()
    self._before: list[Layer] = []  # the layers that the last finished merge has in one
    self._result: Layer | None = None

  def begin(self, path: str, manifest: Mapping[str, Json]) -> None:
    """Begins to merge a checkpoint, unless another one is being merged."""
    if not self._thread.is_alive():
      self.source, self._result = path, None
      self._thread = threading.Thread(None, self._merge, self.THREAD, (path, manifest), daemon=True)
      self._thread.start()

  def _merge(self, path: str, manifest: Mapping[str, Json]) -> None:
    os.nice(10)  # on Linux, of this thread alone
    try:
      files.remove(self.folder)
      os.makedirs(self.folder)
      name = f'{manifest["serial"]}-merged'
      rows = read_rows(path, manifest, range(SHARDS))
      part = os.path.join(self.folder, part_name(name, 0, 1))
      layer = Layer(name, 1, write_rows(part, rows, range(SHARDS), manifest['step']))
      files.sync(os.path.join(self.folder, file) for file in layer.files())
      self._before = [Layer(*one) for one in manifest['layers']]
      self._result = layer
    except Exception as e:  # the next checkpoint writes all rows when it must
      logging.warning('the rows of %s could not be merged: %s', path, one_line(e))
    finally:
      self.source = None

  def merged(self, layers: Sequence[Layer]) -> list[Layer]:
    """Returns the layers with those in one that have been merged since."""
    count = len(self._before)
    if self._thread.is_alive() or not self._result or layers[:count] != self._before:
      return list(layers)
    return [self._result, *layers[count:]]
