"""How ranks meet: dense gradients, counts and flags in one allreduce, rows in all-to-alls, objects and barriers beside them.

Every rank reaches every collective, with zero rows too. `hvd.join` is not used: it cannot carry all-to-all.
"""
import pickle
import secrets
import socket

import numpy as np
import tensorflow as tf

from ops.lane import Lane
from trainer.sync.watch import read_exactly

_CONNECT_SECONDS = 60


class Alone:
  """One process: what N ranks do together, it does by itself."""
  rank, size = 0, 1

  def sum_all(self, tensors):
    """list of float32 tensors of any shapes -> the list of their sums over ranks."""
    return list(tensors)

  def sum_with_gradient(self, tensor):
    """Sum over ranks of a float32 tensor; its gradient is the sum over ranks of the incoming ones."""
    return tensor

  def sum_arrays(self, arrays):
    """dict of NumPy arrays -> dict of their sums over ranks (float64 and int64 stay exact)."""
    return arrays

  def exchange(self, per_peer):
    """list of N picklable objects, one for each rank -> list of what each rank had for this one."""
    return per_peer

  def broadcast(self, value):
    """The value that rank 0 passed, whatever the others passed."""
    return value

  def gather(self, value):
    """What every rank passed, in rank order."""
    return [value]

  def barrier(self):
    pass


class Horovod:
  """N ranks that Horovod started and brought together.

  Args:
    host: this rank's, as the others reach it.
    nccl: whether this rank's dense gradients are on a GPU. Where all are, they meet by Horovod's NCCL; else on a lane: Horovod's
      Gloo, which negotiates and turns in its event loop, took a rank 6 ms of a step of 45 (docs/performance.md).
  """

  def __init__(self, host, nccl):
    import horovod.tensorflow as hvd
    self._hvd, self._host = hvd, host
    self.rank, self.size = hvd.rank(), hvd.size()
    self._objects = self._connected(hvd.allgather_object)
    self._lane = None if all(self.gather(nccl)) else self.lane()  # of all sums of a step: a graph keeps the order of its ops on one lane

  def sum_all(self, tensors):
    if self._lane is not None:
      return self._lane.all_reduce(tensors)
    # One buffer, so that a step has one allreduce whatever the number of variables.
    flat = self._hvd.allreduce(tf.concat([tf.reshape(t, [-1]) for t in tensors], 0), op=self._hvd.Sum, name='dense')
    parts = tf.split(flat, [tf.size(t) for t in tensors])
    return [tf.reshape(part, tf.shape(t)) for part, t in zip(parts, tensors)]

  def sum_with_gradient(self, tensor):
    def over_ranks(t):
      return self._hvd.allreduce(t, op=self._hvd.Sum) if self._lane is None else self._lane.all_reduce([t])[0]
    return tf.custom_gradient(lambda t: (over_ranks(t), over_ranks))(tensor)

  def sum_arrays(self, arrays):
    parts = self.gather(arrays)
    return {name: sum(part[name] for part in parts) for name in arrays}

  def exchange(self, per_peer):
    return self._swap([pickle.dumps(value) for value in per_peer])

  def _swap(self, sent):
    (received,), counts = self._objects.all_to_all([np.frombuffer(b''.join(sent), np.uint8)], [len(s) for s in sent])
    return [pickle.loads(part) for part in np.split(received.numpy(), np.cumsum(counts[:-1]))]

  def broadcast(self, value):
    return self.gather(value if self.rank == 0 else None)[0]

  def gather(self, value):
    return self._swap([pickle.dumps(value)] * self.size)

  def barrier(self):
    self.gather(None)

  def lane(self):
    """A new ops.lane.Lane between all ranks: each connects to those below it. Every rank calls it.

    Raises: ConnectionError naming a rank that cannot be reached.
    """
    return self._connected(self.gather)

  def _connected(self, gather):
    """As `lane`; `gather`: what tells all ranks' addresses to all."""
    listener = _listen(self._host, self.size)
    listener.settimeout(_CONNECT_SECONDS)
    name = listener.getsockname()
    own = name if listener.family == socket.AF_UNIX else (self._host, name[1])
    secret = secrets.token_bytes(16)  # nobody else's connection is taken for a rank's
    connections = {}
    for rank, (address, asked) in enumerate(gather((own, secret))[:self.rank]):
      try:
        connections[rank] = _connect(address)
      except OSError as e:
        raise ConnectionError(f'rank {self.rank} cannot reach rank {rank} at {_text(address)}: {e.strerror or e}; '
                              'wanted all ports open between hosts') from None
      connections[rank].sendall(asked + self.rank.to_bytes(4, 'big'))
    while len(connections) < self.size - 1:
      try:
        connection, _ = listener.accept()
      except socket.timeout:
        missing = min(set(range(self.size)) - set(connections) - {self.rank})
        raise ConnectionError(f'rank {missing} did not reach rank {self.rank} at {_text(own)} within {_CONNECT_SECONDS} s; '
                              'wanted all ports open between hosts') from None
      connection.settimeout(_CONNECT_SECONDS)
      try:
        hello = read_exactly(connection, 20)
      except OSError:
        continue  # a stranger's
      if secrets.compare_digest(hello[:16], secret):
        connections[int.from_bytes(hello[16:], 'big')] = connection
    listener.close()
    for connection in connections.values():
      if connection.family == socket.AF_UNIX:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
      else:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Lane([connections[r].detach() if r in connections else -1 for r in range(self.size)], self.rank)


def _listen(host, backlog):
  """A socket to be reached at. Ranks of one host meet by Unix sockets: half the time of TCP's for as many bytes."""
  if host != 'localhost':
    return socket.create_server((host, 0), backlog=backlog)
  listener = socket.socket(socket.AF_UNIX)
  listener.bind('')  # to a name that no other has
  listener.listen(backlog)
  return listener


def _connect(address):
  if isinstance(address, tuple):
    return socket.create_connection(address, timeout=_CONNECT_SECONDS)
  connection = socket.socket(socket.AF_UNIX)
  connection.settimeout(_CONNECT_SECONDS)
  connection.connect(address)
  return connection


def _text(address):
  return '{}:{}'.format(*address) if isinstance(address, tuple) else address.decode().replace('\0', '@')


def peers(runtime):
  """Alone, or the Horovod of all ranks, which is up."""
  if runtime.size == 1:
    return Alone()
  import horovod.tensorflow as hvd
  return Horovod(runtime.host, nccl=bool(hvd.nccl_built() and tf.config.list_logical_devices('GPU')))
