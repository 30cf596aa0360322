"""A job's passes: converted once, opened by every process, staged for the step."""

import concurrent.futures
import contextlib
import glob
import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterator, Sequence

from trainer import config
from trainer.comm.communicator import Communicator
from trainer.data.conversion import (
  is_prepared_from,
  join_parts,
  look_at,
  prepare_part,
  prepare_pass,
)
from trainer.data.log_files import LogFile, exists, refusing
from trainer.data.passes import Pass, folder_name
from trainer.data.prefetch import prefetch
from trainer.data.prepared import META, PreparedPass, is_prepared
from trainer.data.shares import count_lines, parts_of, shareable
from trainer.files import UNFINISHED
from trainer.plain_data import Plain
from trainer.reporting.live_line import shortened
from trainer.training.step import Staged, Step

SECONDS_BETWEEN_LINES = 0.5  # on a conversion that is waited for


class _Stopped(Exception):
  """A conversion was given up, for the job ends."""


class Inputs:
  """Gives each process its share of every pass.

  Args:
    cfg: the job's config.
    communicator: how the processes meet.
    step: stages the batches.
    progress_made: called after each chunk of slow work.
    folder: where converted passes go, one folder a split.
    show: shows a line on how the conversion gets on.
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
    self._folder, self._show = folder, show
    self._cfg, self._communicator, self._step = cfg, communicator, step
    self._progress_made = progress_made
    self._owners: dict[str, int] = {}  # the rank that converts a pass ahead, by its prepared path
    self._ahead: dict[str, concurrent.futures.Future] = {}  # what this process converts ahead
    self._samples_ahead = 0  # of the pass at hand, so far
    # A training step goes first; what it leaves of the cores is for conversion. On Linux threads
    # have their own priority, and hand it to those that they start.
    self._thread = concurrent.futures.ThreadPoolExecutor(1, 'convert', os.nice, (10,))
    self._stopped = threading.Event()

  def prepared(
    self, passes: Sequence[Pass], split: str, labelled: bool = True
  ) -> list[PreparedPass]:
    """Converts those passes that are raw, each by one process, and opens them all on each.

    A large file is shared by the processes where there are fewer passes than processes.

    Args:
      passes: the same on every process.
      split: names the folder that converted passes go to.
      labelled: whether labels, weights and groups are read; what only predicts needs none.
    Raises:
      UserError: on every process, where one of them found something wrong.
    """
    rank, size = self._communicator.rank, self._communicator.size
    paths = [self._path(one, split) for one in passes]
    if len(passes) < size:
      for i, file in self._shareable(passes, paths, labelled):
        self._share(passes[i], paths[i], file, f'{split} pass {i + 1} of {len(passes)}', labelled)

    def convert() -> None:
      for i, (one, path) in enumerate(zip(passes, paths)):
        if self._owners.get(path, i % size) == rank:
          self._wait_for(one, path)
          self._convert(one, path, f'{split} pass {i + 1} of {len(passes)}', labelled)

    def opened() -> list[PreparedPass]:
      found = []
      for one, path in zip(passes, paths):
        with refusing(one.path if path == one.path else path):
          found.append(PreparedPass(path, self._cfg))
      return found

    self._communicator.together(f'cannot prepare passes for {split}', convert)
    return self._communicator.together('cannot read passes', opened)

  def _shareable(
    self, passes: Sequence[Pass], paths: Sequence[str], labelled: bool
  ) -> list[tuple[int, LogFile]]:
    """The places and the files of raw passes that processes convert together; process 0's look."""

    def look() -> list[list[Plain]]:
      found = []
      for i, (one, path) in enumerate(zip(passes, paths)):
        if path != one.path and path not in self._owners and exists(one.path):
          with contextlib.suppress(Exception):  # it is told where the pass is converted
            file = shareable(self._cfg, one.path)
            if file and not is_prepared_from(self._cfg, one.path, path, labelled):
              found.append([i, list(file)])
      return found

    is_first = self._communicator.rank == 0
    found = self._communicator.together('cannot read passes', look if is_first else list)
    return [(i, LogFile(*file)) for i, file in self._communicator.broadcast(found)]

  def _share(self, one: Pass, path: str, file: LogFile, place: str, labelled: bool) -> None:
    """Converts a raw pass of one file, of which each process takes a part; every process calls it.

    Raises:
      UserError: as `prepared`.
    """
    rank, size = self._communicator.rank, self._communicator.size
    together = self._communicator.together
    cfg, on_block = self._cfg, self._on_block(one, place)

    def count() -> list[int]:
      with refusing(one.path):
        return count_lines(cfg, file, rank, size)

    counted = self._communicator.gather(together(f'cannot read {one.path}', count))

    def convert() -> int:
      with refusing(one.path):
        parts = parts_of(cfg, file, counted, size)
        if rank < len(parts):
          prepare_part(cfg, file, parts[rank], own_path(rank), labelled, on_block)
        return len(parts)

    def join() -> None:
      with refusing(one.path):
        join_parts(cfg, one.path, list(map(own_path, range(parts))), path, labelled, on_block)

    def own_path(r: int) -> str:
      return f'{path}{UNFINISHED}part{r}'

    try:
      parts = together(f'preparing {one.path}', convert)
      together(f'preparing {one.path}', join if rank == 0 else lambda: None)
    finally:
      shutil.rmtree(own_path(rank), ignore_errors=True)

  def look_at(self, passes: Sequence[Pass], split: str) -> None:
    """Reads the beginnings of raw passes, each by one process, so that what is plainly wrong with
    one is told before another is trained on. Every process calls it, with the same passes.

    Raises:
      UserError: on every process, where one of them found something wrong.
    """
    rank, size = self._communicator.rank, self._communicator.size

    def look() -> None:
      for one in passes[rank::size]:
        if not self.is_ready(one, split):
          with refusing(one.path):
            look_at(self._cfg, one.path)
        self._progress_made()

    self._communicator.together('cannot read passes', look)

  def convert_ahead(self, passes: Sequence[Pass], split: str, processes: int) -> None:
    """Has those passes that are raw converted in the background, each by one process, in order.

    `prepared` waits for them; what is wrong with one is met again there. Every process calls it,
    with the same passes.

    Args:
      passes: that come next.
      split: names the folder that converted passes go to.
      processes: the first so many take turns.
    """
    for one in passes:
      path = self._path(one, split)
      if path == one.path or path in self._owners:
        continue
      self._owners[path] = len(self._owners) % processes
      if self._owners[path] == self._communicator.rank:
        self._ahead[path] = self._thread.submit(self._convert_ahead, one, path)

  def _convert_ahead(self, one: Pass, path: str) -> None:
    def on_block(samples: int) -> None:
      if self._stopped.is_set():
        raise _Stopped
      self._samples_ahead = samples

    self._samples_ahead = 0
    with contextlib.suppress(Exception):  # what is wrong is met again by `prepared`
      if exists(one.path):
        prepare_pass(self._cfg, one.path, path, on_block=on_block)

  def _wait_for(self, one: Pass, path: str) -> None:
    """Returns when nothing in the background converts a pass."""
    ahead, seen = self._ahead.pop(path, None), -1
    if ahead is None or ahead.cancel():
      return
    while not concurrent.futures.wait([ahead], SECONDS_BETWEEN_LINES).done:
      if self._samples_ahead != seen:
        seen = self._samples_ahead
        self._progress_made()
        self._show(f'waiting for the conversion of {shortened(one.name, 24)} · {seen:,} samples')
    ahead.result()

  def is_ready(self, one: Pass, split: str) -> bool:
    """Whether a pass was converted, or need not be."""
    return os.path.exists(os.path.join(self._path(one, split), META))

  def remove_unfinished(self) -> None:
    """Removes what conversions that were killed have left; process 0 calls it before the first."""
    for path in glob.glob(os.path.join(glob.escape(self._folder), '*', f'*{UNFINISHED}*')):
      shutil.rmtree(path, ignore_errors=True)

  def stop(self) -> None:
    """Gives up what is converted in the background."""
    self._stopped.set()
    self._thread.shutdown(cancel_futures=True)

  def _path(self, one: Pass, split: str) -> str:
    """Where the prepared pass lies."""
    if is_prepared(self._cfg.data, one.path):
      return one.path
    return os.path.join(self._folder, split, folder_name(one.name))

  def _convert(self, one: Pass, path: str, place: str, labelled: bool = True) -> None:
    self._progress_made()
    # A pass in the middle of which the run stopped may have lost its file since.
    if path == one.path or (os.path.exists(path) and not exists(one.path)):
      return

    with refusing(one.path):
      prepare_pass(self._cfg, one.path, path, labelled, self._on_block(one, place))

  def _on_block(self, one: Pass, place: str) -> Callable[[int], None]:
    """What a conversion calls with its samples so far."""

    def on_block(samples: int) -> None:
      self._progress_made()
      self._show(f'converting {place} · {shortened(one.name, 24)} · {samples:,} samples')

    return on_block

  def remove(self, names: Collection[str], split: str) -> None:
    """Removes what was converted of some passes, by name; process 0 calls it."""
    folder = os.path.join(self._folder, split)
    for name in {*map(folder_name, names)}.intersection(
      os.listdir(folder) if os.path.isdir(folder) else ()
    ):
      shutil.rmtree(os.path.join(folder, name), ignore_errors=True)

  def staged(
    self, prepared: PreparedPass, epoch: int = 0, shuffle: bool = False, start: int = 0
  ) -> Iterator[Staged]:
    """Yields this process's share of a pass's global batches, made ready in a thread of its own.

    Args:
      prepared: the pass.
      epoch: another one is shuffled otherwise.
      shuffle: whether the samples are shuffled, by seed, pass and epoch.
      start: the first global batch.
    """
    return prefetch(
      map(
        self._step.stage,
        prepared.batches(
          self._cfg.train.batch_size,
          rank=self._communicator.rank,
          size=self._communicator.size,
          seed=self._cfg.seed,
          epoch=epoch,
          shuffle=shuffle,
          start_batch=start,
        ),
      )
    )
