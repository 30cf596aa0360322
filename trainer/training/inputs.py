"""A job's passes: converted once, opened by every process, staged for the step."""

import contextlib
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence

from trainer import config
from trainer.comm.communicator import Communicator
from trainer.data.conversion import prepare_pass
from trainer.data.log_files import exists
from trainer.data.passes import Pass, folder_name
from trainer.data.prefetch import prefetch
from trainer.data.prepared import PreparedPass, is_prepared
from trainer.errors import BadPass, UserError
from trainer.reporting.live_line import shortened
from trainer.training.step import Staged, Step


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

  def prepared(
    self, passes: Sequence[Pass], split: str, labelled: bool = True
  ) -> list[PreparedPass]:
    """Converts those passes that are raw, each by one process, and opens them all on each.

    Args:
      passes: the same on every process.
      split: names the folder that converted passes go to.
      labelled: whether labels, weights and groups are read; what only predicts needs none.
    Raises:
      UserError: on every process, where one of them found something wrong.
    """
    rank, size = self._communicator.rank, self._communicator.size
    paths = [self._path(one, split) for one in passes]

    def convert() -> None:
      for i in range(rank, len(passes), size):
        self._convert(passes[i], paths[i], f'{split} pass {i + 1} of {len(passes)}', labelled)

    self._communicator.together(f'cannot prepare passes for {split}', convert)
    return self._communicator.together(
      'cannot read passes', lambda: [PreparedPass(path, self._cfg) for path in paths]
    )

  def convert_good(self, passes: Sequence[Pass], split: str) -> None:
    """Converts those passes that are raw and whole; what is wrong with the others is met again when
    they are opened. Every process calls it, with the same passes.
    """
    rank, size = self._communicator.rank, self._communicator.size

    def convert() -> None:
      for i in range(rank, len(passes), size):
        with contextlib.suppress(BadPass):
          path = self._path(passes[i], split)
          self._convert(passes[i], path, f'{split} pass {i + 1} of {len(passes)}')

    self._communicator.together(f'cannot prepare passes for {split}', convert)

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

    def on_block(samples: int) -> None:
      self._progress_made()
      self._show(f'converting {place} · {shortened(one.name, 24)} · {samples:,} samples')

    try:
      prepare_pass(self._cfg, one.path, path, labelled, on_block)
    except UserError as e:
      if isinstance(e.__cause__, OSError):  # of the disk, not of the pass
        raise
      raise BadPass(str(e)) from None

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
