"""Measures the time that each part of a job takes."""

import collections
import contextlib
import time
from collections.abc import Iterator
from typing import TypeVar

Item = TypeVar('Item')


class Stopwatch:
  """Counts the seconds of each part of the work. While an inner part runs, the outer one pauses.

  Attributes:
    waited: the seconds spent so far waiting for items in `waiting`.
  """

  def __init__(self):
    self.waited = 0.0
    self._seconds: collections.Counter[str] = collections.Counter()
    self._running: list[str] = []
    self._since = 0.0

  def _tick(self) -> None:
    now = time.monotonic()
    if self._running:
      self._seconds[self._running[-1]] += now - self._since
    self._since = now

  @contextlib.contextmanager
  def of(self, part: str) -> Iterator[None]:
    """Counts the time inside a `with` statement as time of `part`."""
    self._tick()
    self._running.append(part)
    try:
      yield
    finally:
      self._tick()
      self._running.pop()

  def move(self, seconds: float, part: str, within: str) -> None:
    """Counts seconds as time of `part` that were counted as time of `within` until now."""
    self._tick()
    self._seconds[part] += seconds
    self._seconds[within] -= seconds

  def waiting(self, items: Iterator[Item]) -> Iterator[Item]:
    """Yields the items. The time spent waiting for them counts as the part `wait`."""
    done = object()
    while True:
      began = time.monotonic()
      with self.of('wait'):
        item = next(items, done)
      self.waited += time.monotonic() - began
      if item is done:
        return
      yield item

  def lap(self) -> dict[str, float]:
    """Returns {part: seconds} since the last call of `lap`."""
    self._tick()
    found = {part: round(seconds, 3) for part, seconds in self._seconds.items()}
    self._seconds.clear()
    return found
