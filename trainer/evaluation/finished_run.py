"""Opens a trained run, to evaluate, predict, export or inspect it."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from absl import logging

from trainer import config, files, runtime
from trainer.comm import horovod
from trainer.comm.communicator import Communicator
from trainer.comm.heartbeat import Heartbeat
from trainer.data.file_system import is_remote
from trainer.embedding.stores import plain_disk_errors
from trainer.errors import OtherModel, UserError
from trainer.evaluation.evaluators import Evaluator
from trainer.evaluation.task import Task, task_of
from trainer.reporting.events import read_events
from trainer.storage import bucket
from trainer.storage.checkpoint_reader import CheckpointReader
from trainer.training.inputs import Inputs
from trainer.training.run_state import Progress, RunState
from trainer.training.step import TrainStep

_RESTORE_ATTEMPTS = 3  # a trainer at work may delete a checkpoint while it is read


@dataclasses.dataclass(frozen=True)
class FinishedRun:
  """The model of a run, restored from a checkpoint. Each rank that shares the work has one."""

  cfg: config.Config
  communicator: Communicator
  step: TrainStep
  progress: Progress
  inputs: Inputs
  task: Task
  evaluation: Evaluator
  checkpoint: str  # which one the caller asked for, 'best' or 'last'

  def texts(self, slot: str, keys: np.ndarray) -> dict[int, str]:
    """Returns {key: text} of a slot's features, as CheckpointReader.texts finds them."""
    return CheckpointReader(self.cfg.run_dir, self.checkpoint).texts(slot, keys)


@contextlib.contextmanager
def open_run(
  run_dir: str,
  overrides: Sequence[str] = (),
  checkpoint: str = 'best',
  here: runtime.Runtime = runtime.Runtime(),
  only_trained: bool = False,
) -> Iterator[FinishedRun]:
  """Restores a run, for a `with` statement. Every rank that shares the work calls it.

  It leaves the run's files as they are, because a trainer may be at work in the run_dir. Passes are
  converted in a temporary directory, which is removed at the end. If the ranks run on several
  hosts, that directory is made inside the run_dir, because all hosts can reach it there.

  Args:
    overrides: strings `a.b=value` that change the run's config.
    checkpoint: 'best' or 'last'. If validation chose no best state, the last one is taken.
    only_trained: refuses a model that no step has trained, for example because an override changed
      it; else there is a warning.
  """
  if here.host and is_remote(run_dir):
    raise UserError(f'--run_dir {run_dir}: is in a bucket; wanted all ranks on one host to read it')
  with contextlib.ExitStack() as stack:
    run_dir = stack.enter_context(bucket.copy_of(run_dir, bucket.STATE))
    cfg = config.load_of_run(run_dir, overrides)
    progress_made, end = (lambda: None), None
    if here.size > 1:
      heartbeat = stack.enter_context(Heartbeat(here, cfg))
      progress_made, end = heartbeat.progress, heartbeat.end
    runtime.start(cfg, here, end)
    stack.enter_context(plain_disk_errors())
    communicator = horovod.communicator(here, cfg.sync)
    where = here.host and run_dir
    folder = stack.enter_context(files.temporary_directory(where or None))
    prepared_folder = communicator.broadcast(folder)
    task = task_of(cfg)
    step = task.step(communicator)
    state = RunState(cfg, communicator, step)
    if not _restore(state, checkpoint == 'best'):
      raise UserError(f'--run_dir {run_dir}: no finished checkpoint there; wanted a trained run')
    untrained = state.untrained_told()
    if untrained and only_trained:
      raise UserError(untrained)
    inputs = Inputs(cfg, communicator, step, progress_made, prepared_folder)
    slots_before = []
    with contextlib.suppress(OSError):  # metrics.jsonl may be gone
      events = read_events(run_dir)
      evaluated = events[events['event'] == 'eval'].get('slots', ())
      slots_before = [slots for slots in evaluated if isinstance(slots, dict)]
    judge, progress = task.evaluator(inputs, slots_before), state.progress
    yield FinishedRun(cfg, communicator, step, progress, inputs, task, judge, checkpoint)
    if untrained and communicator.rank == 0:  # after the work, so that a mistake in it is one line
      logging.warning('%s', untrained)
    communicator.barrier()  # all processes use the temporary directory of process 0


def _restore(state: RunState, best: bool) -> bool:
  """Restores the best state, if wanted and of this model, or the last; False if there is none."""
  for attempt in range(_RESTORE_ATTEMPTS):
    try:
      # The best state may belong to the model of an earlier config.
      return (best and state.restore(best=True) and not state.untrained) or state.restore()
    except OtherModel:
      raise
    except UserError:
      if attempt + 1 == _RESTORE_ATTEMPTS:
        raise
  return False
