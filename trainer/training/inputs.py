"""A job's passes: converted once, opened by every process, staged for the step."""

import os
from collections.abc import Callable, Iterator, Sequence

from trainer import config
from trainer.comm.communicator import Communicator
from trainer.data.conversion import prepare_pass
from trainer.data.passes import Pass
from trainer.data.prepared import PreparedPass, prefetch
from trainer.training.step import Staged, Step


class Inputs:
  """Gives each process its share of every pass.

  Args:
    cfg: the job's config.
    communicator: how the processes meet.
    step: stages the batches.
    progress_made: called after each chunk of slow work.
  """

  def __init__(
    self,
    cfg: config.Config,
    communicator: Communicator,
    step: Step,
    progress_made: Callable[[], None],
  ):
    self._cfg, self._communicator, self._step = cfg, communicator, step
    self._progress_made = progress_made

  def prepared(self, passes: Sequence[Pass], split: str) -> list[PreparedPass]:
    """Converts those passes that are raw, each by one process, and opens them all on each.

    Args:
      passes: the same on every process.
      split: names the folder of `run_dir/prepared` that converted passes go to.
    Raises:
      UserError: on every process, where one of them found something wrong.
    """
    folder = os.path.join(self._cfg.run_dir, 'prepared', split)
    rank, size = self._communicator.rank, self._communicator.size
    is_raw = self._cfg.data.format != 'prepared'
    paths = [os.path.join(folder, p.name) if is_raw else p.path for p in passes]

    def convert() -> None:
      for i, (one, path) in enumerate(zip(passes, paths)):
        if is_raw and i % size == rank:
          prepare_pass(self._cfg, one.path, path)
        self._progress_made()

    self._communicator.together(f'cannot prepare passes in {folder}', convert)
    return self._communicator.together(
      'cannot read passes', lambda: [PreparedPass(path, self._cfg) for path in paths]
    )

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
