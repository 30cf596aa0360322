"""A process's side of the coordinator; for workers, the communicator of their job."""

import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from trainer.comm import messages
from trainer.comm.communicator import Communicator
from trainer.comm.heartbeat import EXIT_STATUS
from trainer.config import Sync
from trainer.errors import UserError, one_line
from trainer.parameter_server.cluster import CONTINUE, Cluster
from trainer.parameter_server.work_queue import Claimed
from trainer.plain_data import Json, Plain


class Process:
  """What the coordinator may do to this process; tests replace it."""

  def end(self, status: int) -> None:
    """Ends it at once."""
    os._exit(status)

  def restart(self) -> None:
    """Starts it again with the same command."""
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])

  def ask_to_stop(self) -> None:
    """Does what SIGTERM does: a job saves its state and ends."""
    signal.raise_signal(signal.SIGTERM)


class CoordinatorClient(Communicator):
  """Connects a process to the coordinator, and waits until the job has formed.

  A worker is *independent* while it claims units of a pass: it then meets nobody, and collectives
  give its own values back.

  Args:
    address: the coordinator's.
    secret: the coordinator's.
    cluster: the processes of the job.
    sync: the section of the config.
    settings: plain data by name, which must be the same on all processes.
    process: this one.
  Attributes:
    rank: of this worker among those that meet; changes with `close_pass`.
    size: their number; likewise.
    generation: how often the job has formed.
    independent: see above.
    late: whether this worker came to a job that is under way. It begins with `enter`, and is by
      itself, at rank 0 of 1, until the pass that it enters is closed.
  Raises:
    UserError: where the coordinator cannot be reached.
  """

  def __init__(
    self,
    address: messages.Address,
    secret: bytes,
    cluster: Cluster,
    sync: Sync,
    settings: Mapping[str, Json],
    process: Process = Process(),
  ):
    self._cluster, self._lost_seconds, self._process = cluster, sync.lost_peer_seconds, process
    self._leaving = self._entered = self.late = False
    self._ended = threading.Event()
    self._welcomes: queue.SimpleQueue[list[Plain]] = queue.SimpleQueue()
    self._replies: queue.SimpleQueue[Plain] = queue.SimpleQueue()
    self._statuses: queue.SimpleQueue[int] = queue.SimpleQueue()
    try:
      connection = messages.connect(address, secret, sync.lost_peer_seconds)
    except ConnectionError as e:
      raise UserError(
        f'{cluster.name} cannot reach the coordinator of ps 0 at {address[0]}:{address[1]}: {e}; '
        'wanted this port open between hosts'
      ) from None
    self.progress()
    self._connection = messages.MessageConnection(connection, sync.lost_peer_seconds, self._beat)
    here = f'process {os.getpid()} on {os.uname().nodename}'
    self._connection.send(['hello', cluster.kind, cluster.index, here, dict(settings)])
    threading.Thread(target=self._receive, daemon=True).start()
    self.generation, self.rank, self.size, self.late = self._welcomes.get()
    self.independent = self.late
    self.progress()

  def progress(self) -> None:
    """Says that this process gets on; called once a step or once a chunk of slow work."""
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
    if self.independent:
      return value
    return self.gather(value if self.rank == 0 else None)[0]

  def _meet(self, kind: str, value: Plain) -> Plain:
    self._connection.send(['meet', kind, value])
    return self._replies.get()

  # Work

  def enter(self) -> Plain:
    """Waits until the other workers are within a pass, and shares the rest of it.

    Returns:
      What they passed to `open_pass` as its state.
    """
    self._connection.send(['enter'])
    state = self._replies.get()
    self.late, self._entered = False, True
    return state

  def open_pass(
    self, slices: int, first: int, total: int, pause_after: int | None, state: Plain
  ) -> None:
    """From here on workers claim units of a pass; all call it but those that have just entered.

    Args:
      slices: of a batch, as for WorkQueue.
      first: the first unit.
      total: the number of units of the whole pass.
      pause_after: pause for a checkpoint after so many units; None: do not.
      state: plain data that a worker needs which enters.
    """
    if self._entered:
      self._entered = False
    else:
      self._meet('open_pass', [slices, first, total, pause_after, state])
    self.independent = True

  def claim(self, stop: bool, save: bool) -> Claimed:
    """Says that the last unit is done, and waits for another. Args: as of WorkQueue.claim."""
    self._connection.send(['claim', stop, save])
    return Claimed(*self._replies.get())

  def close_pass(self) -> None:
    """Meets all workers that are there; ranks may have changed."""
    self.rank, self.size = self._meet('close_pass', None)
    self.independent = False

  # The end

  def bye(self, status: int) -> None:
    """Says that this worker's work is done, and its exit status; after the last, servers end."""
    self._leaving = True
    self._connection.send(['bye', status])
    self._connection.close()

  def wait(self) -> int:
    """Waits, on a server, until the work is done; returns the exit status."""
    return self._statuses.get()

  def stop(self) -> None:
    """Asks all workers to save the state and to stop."""
    self._connection.send(['stop'])

  def end(self, text: str, status: int) -> None:
    """Ends the job and this process: every process says why, and ends with the status."""
    self._connection.send(['fail', text, status])
    self._ended.wait(min(10, self._lost_seconds))  # the coordinator's answer ends this process
    self._end(text, status)

  def end_by(self, error: Exception) -> None:
    """Ends the job because of an exception; an aborted request sends all back instead.

    Where TensorFlow found another process gone, the coordinator has the time to say which one.
    """
    if isinstance(error, tf.errors.AbortedError):  # see Servers._repeat
      self._connection.send(['refused', one_line(error)])
    gone = tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError
    if isinstance(error, gone):
      self._ended.wait(self._lost_seconds + 5)
    else:
      traceback.print_exception(error)
    self.end(one_line(error), 1)

  # What the coordinator says

  def _beat(self) -> list[Plain]:
    # A server makes progress by being there.
    waits = self._cluster.kind == 'ps'
    return ['beat', 0.0 if waits else time.monotonic() - self._progress]

  def _receive(self) -> None:
    handlers = {
      'beat': lambda _: None,
      'welcome': lambda generation, rank, size, late: self._welcomes.put(
        [generation, rank, size, late]
      ),
      'reply': self._replies.put,
      'note': self._cluster.say,
      'stop': self._process.ask_to_stop,
      'restart': self._restart,
      'finish': self._finish,
      'end': self._end,
    }
    try:
      while not self._ended.is_set():
        kind, *rest = self._connection.receive_list()
        if kind not in handlers:
          raise messages.not_understood([kind, *rest])
        handlers[kind](*rest)
    except ConnectionError as e:
      if not self._leaving:
        self._end(f'ps 0 was lost: {e}. The job ends; {CONTINUE}.', EXIT_STATUS)
    except Exception as e:  # else this process would wait for ever
      text = f'what ps 0 sent was not understood: {one_line(e)}'
      self._end(f'{text}. The job ends; {CONTINUE}.', EXIT_STATUS)

  def _restart(self, text: str) -> None:
    self._cluster.say(text)
    self._process.restart()

  def _finish(self, status: int) -> None:
    is_at_work = self._cluster.kind == 'worker' and not self._leaving
    self._leaving = True
    self._statuses.put(status)
    if is_at_work:  # it came too late to take part
      self._cluster.say('the other workers have finished')
      self._process.end(0)

  def _end(self, text: str, status: int) -> None:
    if not self._ended.is_set():
      self._cluster.say_end(text, status)
      self._ended.set()
    self._process.end(status)
