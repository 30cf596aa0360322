"""Works on checkpoints in the background: merges the rows of saves, and looks for damage."""

import errno
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence

from absl import logging

from ops.sharding import SHARDS
from trainer import files
from trainer.errors import one_line
from trainer.plain_data import Json
from trainer.storage.checkpoint_rows import Layer, part_name, read_layer, read_rows, write_rows

_BYTES_PER_SECOND = 32e6  # that Scrub reads; some 3 % of a core


class Scrub:
  """Verifies checkpoints in the background, on process 0: in a round, each file once."""

  THREAD = 'verify checkpoints'  # its name

  def __init__(self):
    self.damaged: set[str] = set()  # the paths of checkpoints in which damage was found
    self.news: list[str] = []  # what was found since a checkpoint wrote all rows
    self._thread = threading.Thread()

  def found(self, path: str, error: Exception) -> None:
    """Notes that a checkpoint is damaged, so that the next save writes all rows. Thread-safe."""
    if path not in self.damaged:
      self.damaged.add(path)
      self.news.append(str(error) if path in str(error) else f'{path}: {one_line(error)}')

  def begin(self, paths: Iterable[str]) -> None:
    """Begins a round over some checkpoints, unless one is under way."""
    if not self._thread.is_alive():
      self._thread = threading.Thread(None, self._run, self.THREAD, (list(paths),), daemon=True)
      self._thread.start()

  def _run(self, paths: list[str]) -> None:
    os.nice(10)  # on Linux, of this thread alone
    read: set[int] = set()
    for path in paths:
      try:
        _verify(path, read)
      except Exception as e:
        if path not in self.damaged and files.is_done(path):  # else it was removed meanwhile
          self.found(path, e)
          logging.warning('%s: the next checkpoint writes all rows: %s', path, one_line(e))


def _verify(path: str, read: set[int]) -> None:
  """Reads a checkpoint except layers whose inodes are in `read`; adds the others' inodes to it."""
  manifest = files.read_manifest(path)
  listed = manifest['files']
  files.check_listed(path, listed)
  for name in listed:
    with open(os.path.join(path, name), 'rb') as f:  # what is in memory is no longer used
      os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if 'crc32' in listed[name]:
      files.check_crc32(path, name, listed)
      time.sleep(listed[name]['bytes'] / _BYTES_PER_SECOND)
  for layer in [Layer(*layer) for layer in manifest['layers']]:
    inode = os.stat(os.path.join(path, layer.files()[-1])).st_ino
    if inode not in read:
      for chunk in read_layer(path, manifest, layer, range(SHARDS)):
        time.sleep(sum(column.nbytes for column in chunk.values()) / _BYTES_PER_SECOND)
      read.add(inode)


class Merger:
  """Merges the rows of one checkpoint at a time, without the table; process 0 has it."""

  THREAD = 'merge rows'  # its name

  def __init__(self, directory: str, scrub: Scrub):
    self.scrub = scrub  # is told of damage
    # Where the merged rows lie until a checkpoint takes them.
    self.folder = os.path.join(directory, 'merged')
    # The checkpoint that is merged, which must not be removed; None once that is taken.
    self.source: str | None = None
    self._thread = threading.Thread()
    self._before: list[Layer] = []  # the layers that the last finished merge has in one
    self._result: Layer | None = None

  def begin(self, path: str, manifest: Mapping[str, Json]) -> None:
    """Begins to merge a checkpoint, unless one is being merged."""
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
      if getattr(e, 'errno', None) not in (errno.ENOSPC, errno.EDQUOT):
        self.scrub.found(path, e)
      self.source = None

  def merged(self, layers: Sequence[Layer]) -> list[Layer]:
    """Returns `layers`, with the merged one in place of those merged, if the merge has finished."""
    count = len(self._before)
    if self._thread.is_alive():
      return list(layers)
    self.source = None
    if self._result and layers[:count] == self._before:
      if all(os.path.exists(os.path.join(self.folder, name)) for name in self._result.files()):
        return [self._result, *layers[count:]]
      logging.warning('%s: merged rows are missing; they are merged anew', self.folder)
    files.remove(self.folder)  # gives its space back
    return list(layers)
