"""Runs an iterator ahead of its consumer, in a thread."""

import os
import queue
import threading
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar('Item')


def prefetch(iterable: Iterable[Item], depth: int = 2) -> Iterator[Item]:
  """Runs an iterator ahead, in a thread of its own.

  Args:
    depth: how many items may wait. Up to `depth` + 1 are made ahead.
  Yields: its items, in order. An exception in it comes out here. When the consumer stops, so does
    the thread.
  """
  items, stopped, end = queue.Queue(depth), threading.Event(), object()

  def produce():
    os.nice(10)  # on Linux of this thread alone: a step goes first, and this fills its waits
    try:
      for item in iterable:
        items.put((item, None))
        if stopped.is_set():
          return
      items.put((end, None))
    except BaseException as e:  # told to the consumer, whatever it is
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
    while not items.empty():  # a place in the queue lets the thread see that it is to stop
      items.get_nowait()
    thread.join()
