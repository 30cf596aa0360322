"""Threads that collect what they raise, and a communicator of N threads in place of N processes."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any

import numpy as np

from trainer.comm import messages
from trainer.comm.communicator import Communicator
from trainer.errors import UserError


class _Meeting:
  """Where the threads meet."""

  def __init__(self, size: int):
    self.barrier, self.sent = threading.Barrier(size), [None] * size


class ThreadCommunicator(Communicator):
  """Makes messages of what its thread passes and reads those of the others back."""

  def __init__(self, rank: int, size: int, meeting: _Meeting):
    self.rank, self.size, self._meeting = rank, size, meeting

  def exchange(self, per_process: Sequence[Any]) -> list[Any]:
    self._meeting.sent[self.rank] = [messages.encode(value) for value in per_process]
    self._meeting.barrier.wait()
    received = [messages.decode(sent[self.rank]) for sent in self._meeting.sent]
    self._meeting.barrier.wait()
    return received

  def sum_arrays(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    parts = self.gather(dict(arrays))
    return {name: np.asarray(sum(part[name] for part in parts)) for name in arrays}


def on_threads(size: int, action: Callable[[Communicator], Any]) -> list[Any]:
  """Runs action(communicator) on `size` threads that stand for processes.

  Returns:
    The results by rank; in place of one, the exception that was raised.
  """
  meeting, results = _Meeting(size), [None] * size

  def run(rank: int) -> None:
    try:
      results[rank] = action(ThreadCommunicator(rank, size, meeting))
    except BaseException as e:
      results[rank] = e
      if not isinstance(e, UserError):
        meeting.barrier.abort()

  threads = [threading.Thread(target=run, args=(r,)) for r in range(size)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  return results


def in_thread(action: Callable[[], Any]) -> futures.Future:
  """Runs an action in a thread of its own; the future has its result, or what it raised."""
  future = futures.Future()

  def run() -> None:
    try:
      future.set_result(action())
    except BaseException as e:
      future.set_exception(e)

  threading.Thread(target=run, daemon=True).start()
  return future
