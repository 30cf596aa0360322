"""Our own connections between ranks."""

import os
import secrets
import socket
import threading
from multiprocessing.connection import Connection

from ops.connections import Connections
from trainer.comm import messages
from trainer.comm.communicator import RankCommunicator
from trainer.config import Sync

_WANTED = 'wanted the ports of sync.ports, or all ports, open between hosts'


class Connector:
  """Connects all ranks of a job with one another.

  On one machine (`host` is None) they use Unix sockets, which take half the time of TCP. Otherwise
  they use TCP, and `host` is this rank's address for the others; a broken link is reported within
  `sync.lost_peer_seconds`. If a rank has no free port, every rank raises a UserError.
  """

  def __init__(self, communicator: RankCommunicator, host: str | None, sync: Sync):
    self._rank, self._size = communicator.rank, communicator.size
    self._lost_seconds = sync.lost_peer_seconds
    self._arrived: dict[tuple[str, int], Connection] = {}  # {(name, rank): …}; guarded by _changed
    self._changed = threading.Condition()
    self._secret = bytes.fromhex(communicator.broadcast(secrets.token_hex(32)))
    self._listener = communicator.together(
      'cannot listen for the other ranks',
      lambda: messages.Listener(host, sync.ports, self._secret, self._lost_seconds, self._accept),
    )
    self._addresses = communicator.gather(self._listener.address)

  def connect(self, name: str) -> Connections:
    """Makes a new set of connections, one to every other rank; every rank calls it and waits.

    Raises ConnectionError if a rank, named in the message, cannot be reached or connects too late.
    """
    connections = {}
    for rank, address in enumerate(self._addresses[: self._rank]):
      try:
        connections[rank] = messages.connect(address, self._secret, self._lost_seconds)
        connections[rank].send_bytes(messages.encode([name, self._rank]))
      except OSError as e:
        where = messages.address_text(address)
        raise ConnectionError(
          f'rank {self._rank} cannot reach rank {rank} at {where}: {e}; {_WANTED}'
        ) from None
    above = range(self._rank + 1, self._size)
    with self._changed:
      self._changed.wait_for(
        lambda: all((name, rank) in self._arrived for rank in above), self._lost_seconds
      )
      missing = [rank for rank in above if (name, rank) not in self._arrived]
      if missing:
        where = messages.address_text(self._listener.address)
        raise ConnectionError(
          f'rank {missing[0]} did not reach rank {self._rank} at {where} within '
          f'{self._lost_seconds:.0f} s; {_WANTED}'
        )
      connections |= {rank: self._arrived.pop((name, rank)) for rank in above}
    fds = [-1] * self._size
    for rank, connection in connections.items():
      fds[rank] = _as_descriptor(connection, self._lost_seconds)
    return Connections(fds, self._rank)

  def _accept(self, connection: Connection) -> None:
    """Keeps a connection that another rank has opened, until `connect` asks for it."""
    try:
      name, rank = messages.decode(connection.recv_bytes())
      with self._changed:
        self._arrived[name, rank] = connection
        self._changed.notify_all()
    except (OSError, EOFError, ValueError, TypeError):
      connection.close()  # the other rank's `connect` fails and says so


def _as_descriptor(connection: Connection, lost_seconds: float) -> int:
  """Returns a new descriptor of a connection's socket, and closes the `Connection` object.

  A TCP socket then reports an error if the other end acknowledges nothing for `lost_seconds`.
  """
  fd = os.dup(connection.fileno())
  connection.close()
  with socket.socket(fileno=os.dup(fd)) as same:
    if same.family == socket.AF_UNIX:
      same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    else:
      # The system probes an idle link, and breaks a link whose other end has acknowledged nothing
      # for `lost_seconds`.
      probe = max(1, int(lost_seconds / 4))
      same.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
      same.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe)
      same.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe)
      same.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(lost_seconds * 1000))
  return fd
