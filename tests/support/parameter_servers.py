"""Processes of a parameter-server job, played by threads of one process."""

import contextlib
import os
import random
import socket
import threading
from collections.abc import Callable
from concurrent import futures
from multiprocessing.connection import Connection
from typing import Any

from tests.support.threads import in_thread
from trainer.comm.messages import MessageConnection
from trainer.config import Sync
from trainer.errors import one_line
from trainer.parameter_server import membership
from trainer.parameter_server.client import CoordinatorClient, Process
from trainer.parameter_server.cluster import Cluster
from trainer.parameter_server.coordinator import Coordinator

SETTINGS = {'a': 1}
PATIENCE = 60  # seconds that a test waits for what must come


class PlayedProcess(Process):
  """Notes what the coordinator does to a process; its threads go on.

  Attributes:
    ended: the status with which it was ended; None while it runs.
    restarts: how often it was started again.
    kept: the connection that it keeps then.
    stops: the signals by which it was asked to stop.
  """

  def __init__(self) -> None:
    self.ended: int | None = None
    self.restarts = 0
    self.stops: list[int] = []
    self.kept: Connection | None = None
    self._changed = threading.Condition()

  def end(self, status: int) -> None:
    with self._changed:
      self.ended = status
      self._changed.notify_all()

  def restart(self, connection: MessageConnection) -> None:
    with self._changed:
      self.restarts += 1
      self.kept = Connection(os.dup(connection.hand_over()))
      self._changed.notify_all()
    threading.Event().wait()  # this thread has ended in a real process

  def ask_to_stop(self, number: int) -> None:
    with self._changed:
      self.stops.append(number)
      self._changed.notify_all()

  def wait_for(self, condition: Callable[['PlayedProcess'], Any]) -> None:
    """Waits until the condition holds."""
    with self._changed:
      assert self._changed.wait_for(lambda: condition(self), PATIENCE), vars(self)


def free_addresses(number: int) -> tuple[str, ...]:
  """Returns loopback addresses at which nothing listens.

  Their ports are below those that the system gives to outgoing connections. Such a connection of
  another test could otherwise take a port before the test's own server does.
  """
  held: list[socket.socket] = []
  while len(held) < number:
    with contextlib.suppress(OSError):  # the port is taken
      port = random.SystemRandom().randrange(10_000, 32_000)
      held.append(socket.create_server(('127.0.0.1', port)))
  addresses = tuple(f'127.0.0.1:{s.getsockname()[1]}' for s in held)
  for s in held:
    s.close()
  return addresses


class PlayedJob:
  """A coordinator, and what threads need that stand for the other processes.

  Args:
    sync: the section of the config.
    workers: their addresses, or how many need none.
    servers: likewise.
  """

  def __init__(
    self, sync: Sync, workers: int | tuple[str, ...], servers: int | tuple[str, ...] = 1
  ):
    self._sync = sync
    self._addresses = [
      tuple(f'{kind}:{1 + i}' for i in range(tasks)) if isinstance(tasks, int) else tasks
      for kind, tasks in (('ps', servers), ('worker', workers))
    ]
    self.coordinator = Coordinator(self.cluster('ps', 0), sync, SETTINGS, '127.0.0.1')
    self.processes = [PlayedProcess() for _ in self._addresses[1]]

  def cluster(self, kind: str, index: int) -> Cluster:
    """Returns the job's processes as one of them knows them."""
    return Cluster(*self._addresses, kind, index)

  def connect(
    self, index: int, kind: str = 'worker', settings: dict[str, Any] | None = None
  ) -> CoordinatorClient:
    """Connects a process, unless it kept its connection; returns once the job has formed."""
    seconds = self._sync.lost_peer_seconds
    kept = self.processes[index].kept if kind == 'worker' else None
    if kept:
      connection = MessageConnection(kept, seconds, lambda: ['beat', 0.0])
    else:
      connection = membership.connect(self.coordinator.address, self.coordinator.secret, seconds)
    return CoordinatorClient(
      connection,
      self.cluster(kind, index),
      self._sync,
      settings or SETTINGS,
      self.processes[index] if kind == 'worker' else PlayedProcess(),
    )

  def run(self, *works: Callable[[CoordinatorClient], Any]) -> list[Any]:
    """Runs works[i] as worker i, and then its good-bye; all servers wait.

    Returns:
      The results by worker.
    Raises:
      What one of the workers raised.
    """
    servers = range(1, len(self._addresses[0]))
    waiting = [in_thread(lambda i=i: self.connect(i, 'ps').wait()) for i in servers]
    working = [in_thread(lambda i=i: self._work(i, works[i])) for i in range(len(works))]
    status = self.coordinator.wait()
    done, _ = futures.wait(working, PATIENCE, futures.FIRST_EXCEPTION)
    for future in done:
      future.result()
    assert [status, *(future.result(PATIENCE) for future in waiting)] == [0] * (1 + len(waiting))
    return [future.result(0) for future in working]

  def _work(self, index: int, work: Callable[[CoordinatorClient], Any]) -> Any:
    client = self.connect(index)
    try:
      result = work(client)
    except BaseException as e:
      client.end(one_line(e), 1)  # so that the others do not wait
      raise
    client.bye(0)
    return result
