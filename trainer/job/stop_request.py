"""Handles the signals that ask a job to stop."""

import math
import signal
from types import FrameType

from trainer.data import file_system

SECONDS_FOR_OTHERS = 5.0  # how long a job that is to stop still tries to reach other machines


class StopRequest:
  """Whether a signal has asked this process to stop; a job looks at it after each step."""

  def __init__(self):
    # The number of the signal; 0 if none came. If SIGINT and SIGTERM came, it is SIGINT.
    self.signal = 0

  def __bool__(self) -> bool:
    return self.signal != 0

  def listen(self) -> None:
    """Handles SIGTERM and SIGINT from now on. Only the main thread may call it."""
    file_system.attempt_for(math.inf)
    for number in (signal.SIGTERM, signal.SIGINT):
      signal.signal(number, self._on_signal)

  def _on_signal(self, number: int, _: FrameType | None) -> None:
    if not self.signal:
      file_system.attempt_for(SECONDS_FOR_OTHERS)
    self.signal = min(number, self.signal or number)
