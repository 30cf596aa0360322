"""Converts a job's passes once, opens them on every process, and makes batches of tensors."""

import concurrent.futures
import contextlib
import glob
import itertools
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence

from absl import logging

from trainer import config
from trainer.comm.communicator import Communicator
from trainer.data.conversion import (
  config_of_items,
  is_prepared_from,
  join_parts,
  look_at,
  prepare_part,
  prepare_pass,
)
from trainer.data.features import SlotBatch
from trainer.data.file_system import LogFile, exists, normal, refusing
from trainer.data.passes import Pass, folder_name
from trainer.data.passes import passes as listed
from trainer.data.prefetch import prefetch
from trainer.data.prepared import META, PreparedPass, is_prepared, same_samples
from trainer.data.shares import count_lines, parts_of, shareable
from trainer.errors import UserError
from trainer.files import UNFINISHED
from trainer.plain_data import Plain
from trainer.reporting.live_line import short_name
from trainer.training.ledger import TRAINED, Ledger
from trainer.training.step import Staged, Step

SECONDS_BETWEEN_LINES = 0.5  # between lines about a conversion that the job waits for

TWICE = '%s holds the samples of %s: they count twice'


class _Stopped(Exception):
  """Ends a background conversion because the job ends."""


class Inputs:
  """Converts and opens passes, and gives each process its share of every batch.

  Args:
    progress_made: called after each chunk of slow work, for the heartbeat.
    folder: where converted passes go, one folder per split.
    show: called with a line of text about the progress of slow work.
  """

  def __init__(
    self,
    cfg: config.Config,
    communicator: Communicator,
    step: Step,
    progress_made: Callable[[], None],
    folder: str,
    show: Callable[[str], None] = lambda text: None,
  ):
    self._folder, self.show = folder, show
    self._cfg, self.communicator, self.step = cfg, communicator, step
    self.progress_made = progress_made
    self._owners: dict[str, int] = {}  # {prepared path: the rank that converts it ahead}
    self._converted_ahead = itertools.count()
    # {prepared path: conversion in the background by this process}
    self._ahead: dict[str, concurrent.futures.Future] = {}
    self._samples_ahead = 0  # how many samples the running background conversion has converted
    # A training step has precedence; conversion takes the processor time that it leaves. On Linux
    # each thread has a priority of its own, which the threads that it starts inherit.
    self._thread = concurrent.futures.ThreadPoolExecutor(1, 'convert', os.nice, (10,))
    self._stopped = threading.Event()

  def read_by(self, cfg: config.Config) -> 'Inputs':
    """Returns Inputs that read passes as `cfg` says, and convert them into the same folder."""
    return Inputs(cfg, self.communicator, self.step, self.progress_made, self._folder, self.show)

  def prepared(
    self, passes: Sequence[Pass], split: str, labelled: bool = True
  ) -> list[PreparedPass]:
    """Converts the raw passes, each on one process, and opens all passes on every process.

    If there are fewer passes than processes, the processes convert a large file together. Every
    process calls it with the same passes, and a UserError is raised on all of them.

    The passes go to the folder `split`; without labels, weights and groups unless `labelled`.
    """
    rank, size = self.communicator.rank, self.communicator.size
    paths = [self._path(data_pass, split) for data_pass in passes]
    if len(passes) < size:
      for i, file in self._shareable(passes, paths, labelled):
        self._share(passes[i], paths[i], file, f'{split} pass {i + 1} of {len(passes)}', labelled)

    def convert() -> None:
      for i, (data_pass, path) in enumerate(zip(passes, paths)):
        if self._owners.get(path, i % size) == rank:
          self._wait_for(data_pass, path)
          self._convert(data_pass, path, f'{split} pass {i + 1} of {len(passes)}', labelled)

    def opened() -> list[PreparedPass]:
      prepared = []
      for path in paths:
        with refusing(path):
          prepared.append(PreparedPass(path, self._cfg))
      return prepared

    self.communicator.together(f'cannot prepare passes for {split}', convert)
    prepared = self.communicator.together('cannot read passes', opened)
    if labelled and not rank:
      for twins in same_samples(itertools.combinations(prepared, 2)):
        logging.warning(TWICE, *reversed(twins))
    return prepared

  def of_split(self, split: str) -> list[PreparedPass]:
    """Returns the passes of data.train, data.valid or data.test, as `prepared` opens them."""
    data = self._cfg.data
    return self.prepared(listed(data, getattr(data, split), f'data.{split}'), split)

  def items(self) -> PreparedPass | None:
    """Returns the table data.items, and tells the dense part of it; None if the config has none.

    The file is read again only if it has changed. Every process calls it.
    """
    if self._cfg.data.items is None:
      return None

    def look() -> config.Config:
      if not exists(normal(self._cfg.data.items)):
        raise UserError(f'data.items: {self._cfg.data.items}: no such file')
      return config_of_items(self._cfg)

    cfg = self.communicator.together('cannot read data.items', look)
    table = Pass('items', self._cfg.data.items)
    (prepared,) = self.read_by(cfg).prepared([table], 'items', labelled=False)
    self.step.dense.read_items(prepared)
    return prepared

  def _shareable(
    self, passes: Sequence[Pass], paths: Sequence[str], labelled: bool
  ) -> list[tuple[int, LogFile]]:
    """Returns the index and the file of each raw pass that the processes convert together."""

    def look() -> list[list[Plain]]:
      shared = []
      for i, (data_pass, path) in enumerate(zip(passes, paths)):
        if path != data_pass.path and path not in self._owners and data_pass.exists():
          with contextlib.suppress(Exception):  # the conversion reports what is wrong
            file = shareable(self._cfg.data, data_pass.path)
            if file and not is_prepared_from(self._cfg, data_pass.path, path, labelled):
              shared.append([i, list(file)])
      return shared

    shared = self.communicator.on_first('cannot read passes', look)
    return [(i, LogFile(*file)) for i, file in shared]

  def _share(self, data_pass: Pass, path: str, file: LogFile, place: str, labelled: bool) -> None:
    """Converts a raw pass that is one file; every process converts a part."""
    rank, size = self.communicator.rank, self.communicator.size
    together = self.communicator.together
    cfg, on_block = self._cfg, self._on_block(data_pass, place)

    def count() -> list[int]:
      with data_pass.refusing():
        return count_lines(cfg.data, file, rank, size)

    counted = self.communicator.gather(together(f'cannot read {data_pass.path}', count))

    def convert() -> int:
      with data_pass.refusing():
        parts = parts_of(cfg.data, file, counted, size)
        if rank < len(parts):
          prepare_part(cfg, file, parts[rank], own_path(rank), labelled, on_block)
        return len(parts)

    def join() -> None:
      with data_pass.refusing():
        join_parts(cfg, data_pass.path, list(map(own_path, range(parts))), path, labelled, on_block)

    def own_path(r: int) -> str:
      return f'{path}{UNFINISHED}part{r}'

    try:
      parts = together(f'preparing {data_pass.path}', convert)
      self.communicator.on_first(f'preparing {data_pass.path}', join)
    finally:
      shutil.rmtree(own_path(rank), ignore_errors=True)

  def look_at(self, passes: Sequence[Pass], split: str) -> None:
    """Reads the beginning of each raw pass, to report obvious mistakes before training.

    Every process calls it with the same passes; each process reads some of them. A UserError is
    raised on all of them.
    """
    rank, size = self.communicator.rank, self.communicator.size

    def look() -> None:
      for data_pass in passes[rank::size]:
        if not self.is_ready(data_pass, split):
          with data_pass.refusing():
            look_at(self._cfg, data_pass.path)
        self.progress_made()

    self.communicator.together('cannot read passes', look)

  def convert_ahead(self, passes: Sequence[Pass], split: str, processes: int) -> None:
    """Starts to convert raw passes in the background, in order, each on one process.

    The method `prepared` waits for the conversions and raises their errors. Every process calls
    `convert_ahead` with the same passes, which go to rank 0, 1, … of `processes` in turn.
    """
    for data_pass in passes:
      path = self._path(data_pass, split)
      if path == data_pass.path or path in self._owners:
        continue
      self._owners[path] = next(self._converted_ahead) % processes
      if self._owners[path] == self.communicator.rank:
        self._ahead[path] = self._thread.submit(self._convert_ahead, data_pass, path)

  def _convert_ahead(self, data_pass: Pass, path: str) -> None:
    def on_block(samples: int) -> None:
      if self._stopped.is_set():
        raise _Stopped
      self._samples_ahead = samples

    self._samples_ahead = 0
    with contextlib.suppress(Exception):  # `prepared` converts it again and raises the error
      if data_pass.exists():
        prepare_pass(self._cfg, data_pass.raw, path, on_block=on_block)

  def _wait_for(self, data_pass: Pass, path: str) -> None:
    """Waits for the background conversion of a pass to end; cancels it if it has not begun."""
    ahead, samples = self._ahead.pop(path, None), -1
    if ahead is None or ahead.cancel():
      return
    name = short_name(data_pass.name, 24)
    while not concurrent.futures.wait([ahead], SECONDS_BETWEEN_LINES).done:
      if self._samples_ahead != samples:
        samples = self._samples_ahead
        self.progress_made()
        self.show(f'waiting for the conversion of {name} · {samples:,} samples')
    ahead.result()

  def is_ready(self, data_pass: Pass, split: str) -> bool:
    """Returns whether a pass is already converted, or needs no conversion."""
    return os.path.exists(os.path.join(self._path(data_pass, split), META))

  def remove_unfinished(self) -> None:
    """Removes what killed conversions left; process 0 calls it before the first conversion."""
    for path in glob.glob(os.path.join(glob.escape(self._folder), '*', f'*{UNFINISHED}*')):
      shutil.rmtree(path, ignore_errors=True)

  def stop(self) -> None:
    self._stopped.set()
    self._thread.shutdown(cancel_futures=True)

  def _path(self, data_pass: Pass, split: str) -> str:
    if data_pass.spans is None and is_prepared(self._cfg.data, data_pass.path):
      return data_pass.path
    return os.path.join(self._folder, split, folder_name(data_pass.name))

  def _convert(self, data_pass: Pass, path: str, place: str, labelled: bool) -> None:
    self.progress_made()
    # If the run stopped within this pass, its raw file may be gone by now.
    if path == data_pass.path or (os.path.exists(path) and not data_pass.exists()):
      return
    with data_pass.refusing():
      prepare_pass(self._cfg, data_pass.raw, path, labelled, self._on_block(data_pass, place))

  def _on_block(self, data_pass: Pass, place: str) -> Callable[[int], None]:
    """Returns a callback that takes the number of samples converted so far and reports it.

    `place` says which pass it is, such as 'train pass 1 of 3'.
    """

    def on_block(samples: int) -> None:
      self.progress_made()
      self.show(f'converting {place} · {short_name(data_pass.name, 24)} · {samples:,} samples')

    return on_block

  def remove_settled(self, ledger: Ledger, epoch: int) -> None:
    """In the last epoch, removes converted passes, except the newest data.keep_prepared_passes."""
    keep = self._cfg.data.keep_prepared_passes
    if keep is None or epoch + 1 < self._cfg.train.epochs:
      return
    settled = [e for e in ledger if e.epoch == epoch and e.fate != 'entered']
    trained = [e.name for e in settled if e.fate in TRAINED]
    for name in {e.name for e in settled}.difference(trained[max(0, len(trained) - keep) :]):
      path = os.path.join(self._folder, 'train', folder_name(name))
      self._owners.pop(path, None)
      if ahead := self._ahead.pop(path, None):
        ahead.cancel()
      if self.communicator.rank == 0 and os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)

  def staged(
    self,
    prepared: PreparedPass,
    epoch: int = 0,
    shuffle: bool = False,
    start: int = 0,
    ready: Callable[[SlotBatch, int], SlotBatch] | None = None,
  ) -> Iterator[Staged]:
    """Yields this process's share of each global batch from `start` on, as tensors.

    Another thread makes them. `ready(batch, step)`, if given, prepares a batch of NumPy arrays for
    the step of this number. The order of shuffled samples depends on seed, epoch and pass.
    """
    batches = prepared.batches(
      self._cfg.train.batch_size,
      rank=self.communicator.rank,
      size=self.communicator.size,
      seed=self._cfg.seed,
      epoch=epoch,
      shuffle=shuffle,
      start_batch=start,
    )
    if ready is not None:
      batches = map(ready, batches, itertools.count(self.step.steps))
    return prefetch(map(self.step.stage, batches))
