"""A log of what clients can cause as often as they like."""

import asyncio
from collections.abc import Hashable

from absl import logging

SECONDS = 60


class SparingLog:
  """Logs a kind's first line at once, then one a minute, which counts; within an event loop."""

  def __init__(self):
    self._left_out: dict[Hashable, tuple[int, str]] = {}  # kind -> the lines' number, the last one

  def log(self, kind: Hashable, level: int, text: str, error: BaseException | None = None) -> None:
    """Logs a line and `error`'s trace, unless one of its (few) kinds was within a minute."""
    if kind in self._left_out:
      self._left_out[kind] = self._left_out[kind][0] + 1, text
      return
    logging.log(level, '%s', text, exc_info=error)
    self._wait(kind, level)

  def _wait(self, kind: Hashable, level: int) -> None:
    self._left_out[kind] = 0, ''
    asyncio.get_running_loop().call_later(SECONDS, self._tell, kind, level)

  def _tell(self, kind: Hashable, level: int) -> None:
    count, last = self._left_out.pop(kind)
    if count:
      logging.log(level, '%d more in %d s; the last: %s', count, SECONDS, last)
      self._wait(kind, level)
