"""Checkpoints: the whole state of a run, readable by any number of processes.

    checkpoints/ckpt-000000123/
      rows-7-00000-of-00002.bin   what process 0 of 2 owned at the save with serial number 7: the
                                  logical shards [0, 2048), block by block; a block holds its
                                  columns one after another
      rows-7-00000-of-00002.json  names, dtypes and row shapes of the columns; for each block, its
                                  first and last table shard, the lengths of its columns, and its
                                  checksum
      rows-8-00000-of-00002.bin …    rows that had changed at save 8
      rows-6-merged-00000-of-00001.bin …    rows of save 6 and those before, in place of their files
      texts-00000-of-00002.parquet   with data.keep_texts, texts of its features (kept_texts.py)
      dense.npz                   variables of layers and optimizer, metrics: name -> array
      progress.json  config.yaml
      MANIFEST.json               the saves whose rows it holds; every file's size and checksum
      DONE                        marks the checkpoint as complete; holds MANIFEST.json's checksum

A save writes all rows, or those that changed since the checkpoint before it, whose files of rows it
then links: so a checkpoint is complete in itself, and a feature's row is that of the last save that
wrote it. `checkpoint_rows.read_rows` yields each row once.

A linked file is one copy. So with `keep` of 2 or more, a kept checkpoint shares no file with the
newest: a save writes all rows if there were none otherwise, or after damage was found (merger.py).

A block is a chunk that the store exports (ops/row_store.py). Its rows are in the order of a table's
256 shards (ops.sharding). A column `factors_NAME` holds the factors of the admitted features of a
table, as float32, or as uint16 with the bits of bfloat16. A process reads and checks only the
blocks that may hold its own rows. Rows are written and read one block at a time.
"""

import filecmp
import functools
import json
import os
import re
import shutil
from collections.abc import Callable, Container, Iterator, Mapping, Sequence

import numpy as np
import tensorflow as tf
from absl import logging

from ops.chunks import Chunk
from ops.sharding import SHARDS, owners_with, shards_of
from trainer import config, files
from trainer.comm.communicator import Communicator, SingleProcess
from trainer.data.prefetch import prefetch
from trainer.embedding.row_table import RowTable
from trainer.embedding.stores import plain_disk_errors
from trainer.errors import DataLoss, Exhausted, OtherModel, UserError, plain_errors
from trainer.plain_data import Json, JsonObject
from trainer.storage.checkpoint_rows import Layer, check_finite, part_name, read_rows, write_rows
from trainer.storage.kept_texts import KeptTexts
from trainer.storage.merger import Merger, Scrub

_FORMAT = config.CHECKPOINT_FORMAT
_NAME = re.compile(r'ckpt-(\d{9,})(?:-(\d+))?')


def _texts(rank: int, size: int) -> str:
  return f'texts-{rank:05d}-of-{size:05d}.parquet'


def _serial(path: str) -> int | None:
  """Returns a checkpoint's serial number, which grows with each save; None if it is damaged."""
  try:
    return int(files.read_manifest(path)['serial'])
  except DataLoss:
    return None


def candidates(directory: str) -> dict[str, int | None]:
  """Returns {path: serial number} of the checkpoints that are DONE; a damaged one has None.

  First the damaged ones, then the others from new to old: who tries them in order reports all
  damage.
  """
  names = os.listdir(directory) if os.path.exists(directory) else []
  paths = [os.path.join(directory, name) for name in names if _NAME.fullmatch(name)]
  serials = {path: _serial(path) for path in paths if files.is_done(path)}
  newest_first = sorted(serials, key=lambda p: (serials[p] is None, serials[p], p), reverse=True)
  return {path: serials[path] for path in newest_first}


def _intact(found: Mapping[str, int | None], damaged: Container[str]) -> dict[str, set[str]]:
  """Returns {path: the names of its layers} for those of the `candidates` that are intact.

  A checkpoint that shares a layer with one of the `damaged` ones counts as damaged.
  """
  readable = [path for path, serial in found.items() if serial]
  layers = {path: {name for name, *_ in files.read_manifest(path)['layers']} for path in readable}
  doubtful = set[str]().union(*(own for path, own in layers.items() if path in damaged))
  return {path: own for path, own in layers.items() if path not in damaged and not own & doubtful}


def _apart(intact: Mapping[str, set[str]], layers: set[str]) -> str | None:
  """Returns the newest of the checkpoints `intact` that has none of `layers`; None if all have."""
  return next((path for path, own in intact.items() if not own & layers), None)


def is_between_passes(path: str) -> bool:
  """Returns whether an intact checkpoint was saved when no pass was trained on in part."""
  return not files.read_manifest(path).get('within_pass', False)


# A function of the text of a checkpoint's config. It returns None if the rows fit this run as they
# are, else a function that converts all rows of the checkpoint to the rows that this process owns.
Adapt = Callable[[str], Callable[[Iterator[Chunk]], Iterator[Chunk]] | None]


class Checkpoints:
  """The checkpoints of a run. Every process has this object, and calls its methods with the others.

  Args:
    directory: on a file system that all processes share.
    keep: how many to keep. The newest one between two passes is kept in any case, because a bad
      pass brings the state back there; with 2 or more, so is the newest one that shares no file
      with the last. Damaged ones stay until there are `keep` intact ones.
    most_layers: how many saves the rows of a checkpoint may come from.
    merger: on process 0, merges the rows of saves in the background.
  Attributes:
    latest: the path of the one that was saved or restored last, from which the store has noted
      changes; '' if there is none.
    scrub: knows which are damaged.
  """

  def __init__(
    self,
    directory: str,
    communicator: Communicator = SingleProcess(),
    keep: int = 1,
    most_layers: int = 1,
    merger: Merger | None = None,
  ):
    self.directory, self.latest = directory, ''
    self._communicator, self._keep, self._most_layers = communicator, keep, most_layers
    self._merger, self.scrub = merger, merger.scrub if merger else Scrub()

  def save(
    self,
    step: int,
    *,
    store: RowTable,
    dense: Mapping[str, np.ndarray],
    progress: Mapping[str, Json],
    config_text: str,
    texts: KeptTexts | None = None,
  ) -> str:
    """Writes a checkpoint, and returns its path.

    It writes only the rows that changed since `latest`, unless the increments would hold more than
    half as many rows as the table. Process 0 writes all but rows.

    Args:
      step: the number in its name; a second checkpoint at the same step is named `ckpt-STEP-2`.
      dense: {name: array} of the variables of layers and optimizer, and of metrics.
    Raises:
      UserError: on every process, if any process cannot write; BadPass if one holds values that are
        not finite. Earlier checkpoints stay intact.
    """
    rank, size = self._communicator.rank, self._communicator.size
    what = f'cannot save a checkpoint in {self.directory}'
    sizes = self._communicator.gather([int(store.count_changes()), int(store.size())])
    news = list(self.scrub.news)
    final, serial, before = self._communicator.on_first(
      what, lambda: self._begin(step, sizes, news)
    )
    unfinished = final + files.UNFINISHED

    def write() -> int:
      path = os.path.join(unfinished, part_name(str(serial), rank, size))
      rows = store.export_state(changed=bool(before))
      written = write_rows(path, rows, shards_of(rank, size), step)
      if texts and (dump := texts.dump()) is not None:
        files.write(os.path.join(unfinished, _texts(rank, size)), dump)
      if rank == 0:
        for name, array in dense.items():
          check_finite(step, name, np.asarray(array))
        for name, data in (
          ('dense.npz', files.to_npz(dense)),
          ('progress.json', files.to_json(progress)),
          ('config.yaml', config_text.encode()),
        ):
          files.write(os.path.join(unfinished, name), data)
      else:  # files.publish syncs the files of process 0
        own = (part_name(str(serial), rank, size), _texts(rank, size))
        files.sync(e.path for e in os.scandir(unfinished) if e.name.startswith(own))
      return written

    def finish() -> None:
      layers = [*(Layer(*layer) for layer in before), Layer(str(serial), size, sum(rows))]
      manifest = {'format': _FORMAT, 'serial': serial, 'step': step, 'parts': size}
      slots = np.array(store.slot_table)
      slots_of = {t.name: np.flatnonzero(slots == i).tolist() for i, t in enumerate(store.tables)}
      manifest |= {'layers': layers, 'table_slots': slots_of}
      self._publish(final, manifest | {'within_pass': progress.get('batch', 0) > 0})
      del self.scrub.news[: len(news)]

    try:
      rows = self._communicator.gather(self._communicator.together(what, write))
      self._communicator.on_first(what, finish)
    except UserError:
      if rank == 0:
        files.remove(unfinished)  # gives its space back
      raise
    store.keep_changes()
    self.latest = final
    return final

  def _begin(
    self, step: int, sizes: Sequence[Sequence[int]], news: Sequence[str]
  ) -> tuple[str, int, list[Layer]]:
    """Makes the directory of a checkpoint, and links the rows into it that it need not write.

    Returns the path that it will have, its serial number, and the layers of the linked rows.
    `sizes` are as for `_fit`, `news` as in Scrub.
    """
    before, troubles = {}, list(news)
    try:
      before = check(self.latest) if self.latest else {}
    except DataLoss as e:  # it was removed or damaged meanwhile
      troubles.append(str(e))
    layers, folders = [Layer(*layer) for layer in before.get('layers', [])], [self.latest]
    if self._merger:
      layers, folders = self._merger.merged(layers), [self.latest, self._merger.folder]
    intact = _intact(candidates(self.directory), self.scrub.damaged)
    final, serial = _make(self.directory, step, before.get('serial', 0))
    is_apart = self._keep == 1 or _apart(intact, {layer.name for layer in layers})
    if troubles or not is_apart or not _fit(layers, sizes, self._most_layers):
      layers = []
    for name in [name for layer in layers for name in layer.files()]:
      paths = [os.path.join(folder, name) for folder in folders]
      source = next(filter(os.path.exists, paths), paths[0])
      files.link_or_copy(source, os.path.join(final + files.UNFINISHED, name))
    if troubles:
      told = '%s writes all rows and links no file of an earlier one: %s'
      logging.warning(told, final, '; '.join(troubles))
    return final, serial, layers

  def _publish(self, final: str, manifest: JsonObject) -> None:
    """Completes a checkpoint, begins to merge its layers, and deletes older ones beyond `keep`."""
    unfinished, parts = final + files.UNFINISHED, manifest['parts']
    entries = files.entries(unfinished, unchecked=['.bin'])
    for part in range(parts):
      index = part_name(str(manifest['serial']), part, parts) + '.json'
      if index not in entries:
        raise DataLoss(
          f'{os.path.join(unfinished, index)}: is missing; do all processes write to the same '
          f'{self.directory}?'
        )
    manifest['files'] = entries
    files.publish(unfinished, final, manifest)
    if self._merger and 2 * len(manifest['layers']) > max(2, self._most_layers):
      self._merger.begin(final, manifest)
    self.scrub.damaged.discard(final)
    found = candidates(self.directory)
    intact = _intact(found, self.scrub.damaged)
    if final in intact and len(intact) >= self._keep:
      readable = sorted(filter(found.get, found), key=lambda path: path not in intact)
      kept = {*list(intact)[: self._keep], next(filter(is_between_passes, readable), None)}
      kept |= {self._merger and self._merger.source}
      kept |= {_apart(intact, intact[final]) if self._keep > 1 else None}
      for old in found.keys() - kept:
        files.remove(old)

  def restore(
    self,
    store: RowTable,
    texts: KeptTexts | None = None,
    adapt: Adapt | None = None,
    between_passes: bool = False,
  ) -> tuple[str, dict[str, np.ndarray], JsonObject] | None:
    """Reads the newest checkpoint that every process can read, and logs why newer ones are skipped.

    With `between_passes`, those saved within a pass are left out. Returns the path, `dense` and
    `progress`; None if there is no checkpoint yet.

    Raises:
      OtherModel: if a checkpoint is of another format, or `adapt` refuses it as such; older ones
        are not tried.
      DataLoss: if there are checkpoints and all are damaged.
    """
    directory = self.directory

    def listed() -> list[str]:
      found = candidates(directory).items()
      return [p for p, serial in found if not between_passes or (serial and is_between_passes(p))]

    paths = self._communicator.on_first(f'cannot read {directory}', listed)
    refusal = None
    for path in paths:
      try:
        read = functools.partial(restore, path, store, self._communicator, adapt, texts)
        dense, progress = self._communicator.together(f'cannot read {path}', read)
        if refusal:
          logging.warning('using %s instead', path)
        self.latest = path
        return path, dense, progress
      except (OtherModel, Exhausted):
        raise
      except UserError as e:
        refusal = refusal or e
        logging.warning('checkpoint refused: %s', e)
        self.scrub.found(path, e)
        store.clear()  # deletes the rows that were read before the damage was found
    if refusal:
      raise DataLoss(f'{directory}: all of its {len(paths)} checkpoints are damaged: {refusal}')
    return None


def _fit(layers: Sequence[Layer], sizes: Sequence[Sequence[int]], most_layers: int) -> bool:
  """Returns whether a save may add to some layers the rows that changed, and not write all rows.

  `sizes` has, for each process, how many of its rows changed (-1: not known), and how many it has.
  """
  changed, rows = (sum(column) for column in zip(*sizes))
  increments = sum(layer.rows for layer in layers[1:]) + changed
  is_known = min(n for n, _ in sizes) >= 0
  return is_known and 0 < len(layers) < most_layers and 2 * increments <= rows


def _make(directory: str, step: int, other: int) -> tuple[str, int]:
  """Makes a new checkpoint's directory, and removes what crashes have left.

  Returns the complete checkpoint's future path, and its serial number, which is above `other` too.
  """
  os.makedirs(directory, exist_ok=True)
  done = candidates(directory)
  for name in os.listdir(directory):
    path = os.path.join(directory, name)
    if name.startswith('ckpt-') and path not in done:  # left by a crash
      files.remove(path)
  names = [_NAME.fullmatch(os.path.basename(path)) for path in done]
  same_step = [int(name[2] or 1) for name in names if int(name[1]) == step]
  suffix = f'-{max(same_step) + 1}' if same_step else ''
  final = os.path.join(directory, f'ckpt-{step:09d}{suffix}')
  os.makedirs(final + files.UNFINISHED)
  return final, 1 + max([other, *filter(None, done.values())])


def link(path: str, directory: str, copied: bool = False) -> None:
  """Puts a checkpoint alone into `directory`, by links to its files or, if `copied`, by copies."""
  os.makedirs(directory, exist_ok=True)
  final = os.path.join(directory, os.path.basename(path))
  done = os.path.join(final, files.DONE)
  if not os.path.exists(done) or not filecmp.cmp(done, os.path.join(path, files.DONE), False):
    unfinished = final + files.UNFINISHED
    files.remove(unfinished)
    files.remove(final)
    os.makedirs(unfinished)
    give = shutil.copyfile if copied else files.link_or_copy
    try:
      for name in os.listdir(path):
        give(os.path.join(path, name), os.path.join(unfinished, name))
      files.sync([*(entry.path for entry in os.scandir(unfinished)), unfinished])
    except OSError:
      files.remove(unfinished)  # gives its space back
      raise
    os.rename(unfinished, final)
    files.sync_directory(directory)
  for name in os.listdir(directory):
    if name != os.path.basename(path):
      files.remove(os.path.join(directory, name))


def read_texts(
  path: str, manifest: Mapping[str, Json], shards: range = range(SHARDS)
) -> Iterator[bytes]:
  """Yields the dumps of KeptTexts that may have features of `shards`, perhaps among others."""
  parts, listed = manifest['parts'], manifest['files']
  for rank in owners_with(shards, parts):
    if (name := _texts(rank, parts)) in listed:
      yield files.read_checked(path, name, listed)


def check(path: str) -> JsonObject:
  """Checks the names and sizes of a checkpoint's files, and returns its manifest."""
  manifest = files.read_manifest(path)
  config.refuse_format(path, manifest)
  for layer in manifest['layers']:
    for name in Layer(*layer).files():
      if name not in manifest['files']:
        raise DataLoss(f'{os.path.join(path, name)}: is missing')
  files.check_listed(path, manifest['files'])
  return manifest


def restore(
  path: str,
  store: RowTable,
  communicator: Communicator = SingleProcess(),
  adapt: Adapt | None = None,
  texts: KeptTexts | None = None,
) -> tuple[dict[str, np.ndarray], JsonObject]:
  """Reads a checkpoint of any number of processes; returns `dense` and `progress`, as saved.

  `store` and `texts` receive what this process owns, in place of what they hold; after DataLoss,
  the store may hold some rows. `adapt`, if not None, converts rows that do not fit this run.
  """
  with plain_errors(f'cannot read {path}'):
    manifest = check(path)
    listed = manifest['files']
    dense = files.from_npz(files.read_checked(path, 'dense.npz', listed))
    progress = json.loads(files.read_checked(path, 'progress.json', listed))
    config_text = files.read_checked(path, 'config.yaml', listed).decode()
    own = shards_of(communicator.rank, communicator.size)
    if change := adapt(config_text) if adapt else None:
      own = range(SHARDS)
      rows = change(read_rows(path, manifest, own))
    else:
      rows = read_rows(path, manifest, own)
      if communicator.size > 1:
        rows = (store.within(chunk, own) for chunk in rows)
    try:
      # The next block is read and checked while this one goes into the table.
      with plain_disk_errors():
        store.import_state(prefetch(rows, depth=1))
    except tf.errors.OpError as e:
      raise DataLoss(
        f'{path}: its rows do not fit this table: {" ".join(e.message.split())}'
      ) from e
    if texts:
      texts.load(read_texts(path, manifest, own))
  return dense, progress
