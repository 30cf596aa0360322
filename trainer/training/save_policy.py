"""When a run is saved; nothing else decides it."""

import time

from trainer.config.train import Checkpoint
from trainer.training.run_state import RunState


class SavePolicy:
  """Decides whether to save the state of a run, after what has happened in it.

  A stop saves it in any case. A save that is due after a pass waits for what comes next: if the
  pass ended a day or an epoch, the checkpoint holds that end too.

  Args:
    every: the steps, seconds and passes of the section `checkpoint`.
    is_stream: whether days end while the run waits for more.
    goes_back: whether a bad pass is refused, for which the run goes back to a state between passes.
  Attributes:
    each_pass: whether a save follows every pass, to find the one of them that ruins the state.
  """

  def __init__(self, every: Checkpoint, state: RunState, is_stream: bool, goes_back: bool):
    self._every, self._state = every, state
    self._is_stream, self._goes_back = is_stream, goes_back
    self._is_due = self.each_pass = False

  @property
  def every_steps(self) -> int | None:
    return self._every.every_steps

  def asks(self) -> bool:
    """Whether this process asks for a save, because the last one is too long ago."""
    seconds = self._every.every_seconds
    return seconds is not None and time.monotonic() - self._state.last_save > seconds

  def step_ended(self, number: int, is_asked: bool) -> bool:
    """Whether to save after step `number`, if the pass goes on; `is_asked` if a process `asks`."""
    every = self._every.every_steps
    return is_asked or (every is not None and number % every == 0)

  def pass_begins(self) -> bool:
    """Whether to save before a pass, because there is no state yet to go back to."""
    return self._goes_back and not self._state.has_checkpoint

  def pass_ended(self) -> None:
    every = self._every.every_passes
    self._is_due |= every is not None and self._state.progress.done % every == 0
    # A state within a pass is none to go back to.
    self._is_due |= self._goes_back and self._state.is_saved_within_pass
    self._is_due |= self.each_pass

  def day_ended(self) -> None:
    self._is_due |= self._is_stream and self._every.every_passes is not None

  def went_back(self, is_found: bool) -> None:
    """Takes note that the last passes were undone; `is_found` says that one of them was refused."""
    self._is_due, self.each_pass = is_found, not is_found

  def goes_on(self) -> bool:
    """Whether to save before another pass, or before the run waits for one."""
    return self._is_due

  def would_lose(self) -> bool:
    """Whether no checkpoint has the present state: then it is saved after an epoch, for example."""
    return not self._state.is_saved

  def saved(self) -> None:
    self._is_due = False
