"""A process's connection to the coordinator; for workers, it is also their communicator."""

import os
import queue
import signal
import threading
import time
import traceback
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from trainer import runtime
from trainer.comm import messages
from trainer.comm.communicator import Communicator
from trainer.comm.heartbeat import EXIT_STATUS
from trainer.config import Sync
from trainer.errors import is_exhausted, one_line
from trainer.parameter_server.cluster import CONTINUE, Cluster
from trainer.parameter_server.work_queue import Claimed
from trainer.plain_data import Json, Plain


class Process:
  """Ends, restarts or stops this process when the coordinator says so; tests replace it."""

  def end(self, status: int) -> None:
    os._exit(status)

  def restart(self, connection: messages.MessageConnection) -> None:
    """Restarts this process, which keeps its connection to the coordinator; does not return."""
    runtime.restart(connection.hand_over())

  def ask_to_stop(self, number: int) -> None:
    """Sends a signal to the process itself, whose job then saves its state and ends."""
    signal.raise_signal(number)


class CoordinatorClient(Communicator):
  """Lets a process join the job, and waits until the job has formed.

  A thread of its own ends this process if the coordinator is lost or ends the job.

  Args:
    settings: {name: value}; all processes must have the same.
  Attributes:
    rank, size: this worker's rank and the number of workers; `close_pass` may change both.
    generation: how often the job has formed; it forms again after it lost workers.
    independent: whether this worker is late, or within a pass of an asynchronous mode; collectives
      then return its own values.
    late: whether this worker joined a running job. It first calls `enter`, and is rank 0 of 1 until
      the pass that it enters is closed.
  """

  def __init__(
    self,
    connection: messages.MessageConnection,
    cluster: Cluster,
    sync: Sync,
    settings: Mapping[str, Json],
    process: Process = Process(),
  ):
    self._cluster, self._lost_seconds, self._process = cluster, sync.lost_peer_seconds, process
    self._leaving = self.late = False
    self._ended = threading.Event()
    self._welcomes: queue.SimpleQueue[tuple[Plain, ...]] = queue.SimpleQueue()
    self._replies: queue.SimpleQueue[Plain] = queue.SimpleQueue()
    self._statuses: queue.SimpleQueue[int] = queue.SimpleQueue()
    self.progress()
    self._connection = connection
    connection.beat = self._beat
    here = f'process {os.getpid()} on {os.uname().nodename}'
    self._connection.send(['hello', cluster.kind, cluster.index, here, dict(settings)])
    threading.Thread(target=self._receive, daemon=True).start()
    self.generation, self.rank, self.size, self.late = self._welcomes.get()
    self.independent = self.late
    self.progress()

  def progress(self) -> None:
    """Notes that a step, or a chunk of slow work, is done."""
    self._progress = time.monotonic()

  # Collectives

  def sum_arrays(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    arrays = {name: np.asarray(array) for name, array in arrays.items()}
    return arrays if self.independent else self._meet('sum', arrays)

  def exchange(self, per_process: Sequence[Plain]) -> list[Plain]:
    if self.independent:
      return [per_process[self.rank]]
    return self._meet('exchange', list(per_process))

  def gather(self, value: Plain) -> list[Plain]:
    return [value] if self.independent else self._meet('gather', value)

  def broadcast(self, value: Plain) -> Plain:
    return value if self.independent else super().broadcast(value)

  def _meet(self, kind: str, value: Plain) -> Plain:
    self._connection.send(['meet', kind, value])
    return self._replies.get()

  # Work

  def enter(self) -> Plain:
    """Waits for the others to be within a pass, and joins it; returns the pass's `state`."""
    self._connection.send(['enter'])
    state = self._replies.get()
    self.late = False
    return state

  def open_pass(self, work: Mapping[str, int | None], state: Plain) -> None:
    """Begins a pass, whose units the worker then claims; `work` has the arguments of WorkQueue.

    All workers call it and wait for one another, except one that has joined the pass by `enter`,
    which returned the `state` given here.
    """
    if not self.independent:
      self._meet('open_pass', [dict(work), state])
      self.independent = True

  def claim(self, stop: bool, save: bool, is_merged: bool = True) -> Claimed:
    """Reports this worker's last unit as done, and waits for the next one; see WorkQueue.claim."""
    self._connection.send(['claim', stop, save, is_merged])
    return Claimed(*self._replies.get())

  def give_up(self, why: str) -> None:
    """Ends the pass for all workers: each finds no more work when it claims its next unit."""
    self._connection.send(['give_up', why])

  def close_pass(self) -> str | None:
    """Waits until all workers of the pass have called it, then updates `rank` and `size`.

    It returns why a worker gave up the pass, the same on all workers; None if none did.
    """
    self.rank, self.size, why = self._meet('close_pass', None)
    self.independent = False
    return why

  # The end

  def bye(self, status: int) -> None:
    """Reports this worker's exit status and disconnects; the servers end after the last worker."""
    self._leaving = True
    self._connection.send(['bye', status])
    self._connection.close()

  def wait(self) -> int:
    """Waits, on a server, until the job has ended; returns the job's exit status."""
    return self._statuses.get()

  def stop(self, number: int) -> None:
    """Asks all workers to save the state and then to stop."""
    self._connection.send(['stop', int(number)])

  def end(self, text: str, status: int) -> None:
    """Ends the job: every process, including this one, prints the text and ends with the status."""
    self._connection.send(['fail', text, status])
    self._ended.wait(min(10, self._lost_seconds))  # the coordinator's answer ends this process
    self._end(text, status)

  def end_by(self, error: Exception) -> None:
    """Ends the job because of an exception in this process.

    If a request to a server was aborted, all workers go back to the last checkpoint instead. If
    TensorFlow reports that another process is gone, it first waits for the coordinator to name it.
    """
    if isinstance(error, tf.errors.AbortedError):  # see Servers._repeat
      self._connection.send(['refused', one_line(error)])
    gone = tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError
    if isinstance(error, gone):
      self._ended.wait(self._lost_seconds + 5)
    elif not is_exhausted(error):
      traceback.print_exception(error)
    self.end(one_line(error), EXIT_STATUS if is_exhausted(error) else 1)

  # The coordinator's messages

  def _beat(self) -> list[Plain]:
    is_server = self._cluster.kind == 'ps'  # a server only waits
    return ['beat', 0.0 if is_server else time.monotonic() - self._progress]

  def _receive(self) -> None:
    handlers = {
      'beat': lambda _: None,
      'welcome': lambda *job: self._welcomes.put(job),
      'reply': self._replies.put,
      'note': self._cluster.say,
      'stop': self._process.ask_to_stop,
      'restart': self._restart,
      'finish': self._finish,
      'end': self._end,
    }
    try:
      while not self._ended.is_set():
        kind, *rest = self._connection.receive()
        if kind not in handlers:
          raise messages.not_understood([kind, *rest])
        handlers[kind](*rest)
    except ConnectionError as e:
      if not self._leaving:
        self._end(f'ps 0 was lost: {e}. The job ends; {CONTINUE}.', EXIT_STATUS)
    except Exception as e:  # else this process would wait forever
      text = f'what ps 0 sent was not understood: {one_line(e)}'
      self._end(f'{text}. The job ends; {CONTINUE}.', EXIT_STATUS)

  def _restart(self, text: str) -> None:
    self._cluster.say(text)
    self._process.restart(self._connection)

  def _finish(self, status: int) -> None:
    is_at_work = self._cluster.kind == 'worker' and not self._leaving
    self._leaving = True
    self._statuses.put(status)
    if is_at_work:  # this worker joined too late to take part
      self._cluster.say('the other workers have finished')
      self._process.end(0)

  def _end(self, text: str, status: int) -> None:
    if not self._ended.is_set():
      self._cluster.say(text, status)
      self._ended.set()
    self._process.end(status)
