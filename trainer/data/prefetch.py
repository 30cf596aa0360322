"""Runs an iterator ahead of its consumer, in a thread."""

import os
import queue
import threading
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar('Item')


def prefetch(iterable: Iterable[Item], depth: int = 2) -> Iterator[Item]:
  """Yields the items of an iterable, which runs up to `depth` items ahead in its own thread.

  Its exception is raised to the consumer. The thread stops when the consumer stops.
  """
  items, stopped, end = queue.Queue(depth), threading.Event(), object()

  def produce() -> None:
    os.nice(10)  # on Linux, only this thread; the training step has precedence
    try:
      for item in iterable:
        items.put((item, None))
        if stopped.is_set():
          return
      items.put((end, None))
    except BaseException as e:  # the consumer raises it, whatever it is
      items.put((end, e))

  thread = threading.Thread(target=produce, name='prefetch', daemon=True)
  thread.start()
  try:
    while True:
      item, error = items.get()
      if error is not None:
        raise error
      if item is end:
        return
      yield item
  finally:
    stopped.set()
    while not items.empty():  # the thread may be waiting for room in the queue
      items.get_nowait()
    thread.join()
