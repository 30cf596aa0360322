"""Where the processes of a parameter-server job meet beside TensorFlow: a hub in server 0's
process, a TCP connection from each other.

Over it go the collectives of `CoordinatorClient` (metrics, counts, barriers), the units of work
that asynchronous workers claim, beats that tell
the living from the lost, and the farewells that let servers end. Nothing waits without bound:
whoever is silent for
`sync.lost_peer_seconds`, or beats without progress for `sync.stalled_peer_seconds`, is named and,
by mode, ends the job, sends all
back to the last checkpoint, or is done without.

A job is *together* (every collective waits for all workers of the view) or, within a pass of an
asynchronous mode, *apart*: workers
claim units, none waits for another, a lost one's unit goes to the next that asks, and a restarted
one enters.

What travels is pickled, so the hub listens only to who begins with the job's secret, which stands
in a variable on TensorFlow's server 0:
the hub is no more open than TensorFlow's own runtime.
"""

import hmac
import os
import pickle
import queue
import secrets
import socket
import struct
import sys
import threading
import time

import numpy as np
import tensorflow as tf

from trainer.comm.communicator import Communicator
from trainer.comm.heartbeat import EXIT_STATUS
from trainer.errors import UserError
from trainer.parameter_server.cluster import sent_twice

_LENGTH = struct.Struct('!Q')
_SECRET_BYTES = 64  # as they travel, in hexadecimal
CONTINUE = 'run the same command again to continue from the last checkpoint'


def read_exactly(connection, size):
  """Returns `size` bytes of a socket. Raises: OSError."""
  data = bytearray()
  while len(data) < size:
    part = connection.recv(min(size - len(data), 1 << 20))
    if not part:
      raise ConnectionError('closed')
    data += part
  return data


def one_line(error):
  """What an exception says, in a line;

  TensorFlow's own begin with where it was found and end with stacks.
  """
  lines = [line.strip() for line in str(error).splitlines() if line.strip()]
  telling = [
    line
    for line in lines
    if not line.startswith(
      ('Graph execution error', 'Detected at', 'Node:', 'File ', 'From /', '[')
    )
  ]
  return f'{type(error).__name__}: {(telling or lines or [""])[0]}'


class _MessageConnection:
  """Pickled tuples both ways over one connection;

  a thread sends them, and a beat in every quiet second.
  """

  def __init__(self, connection, silence, beat):
    connection.settimeout(silence)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    self._connection, self._beat = connection, beat
    self._outgoing = queue.SimpleQueue()
    self._sender = threading.Thread(target=self._send_all, daemon=True)
    self._sender.start()

  def send(self, *message):
    self._outgoing.put(message)

  def receive(self):
    """The next message. Raises: OSError, as `read_exactly`."""
    return pickle.loads(
      read_exactly(
        self._connection, _LENGTH.unpack(read_exactly(self._connection, _LENGTH.size))[0]
      )
    )

  def close(self):
    """Sends what is waiting, then closes."""
    self._outgoing.put(None)
    if threading.current_thread() is not self._sender:
      self._sender.join(5)

  def _send_all(self):
    beaten = 0.0
    while True:
      message = ()
      try:
        message = self._outgoing.get(timeout=1)
      except queue.Empty:
        pass
      try:
        if message is None:
          self._connection.shutdown(socket.SHUT_WR)
          return
        if time.monotonic() - beaten > 1:
          self._write(('beat', self._beat()))
          beaten = time.monotonic()
        if message:
          self._write(message)
      except OSError:
        return  # the receiving side notices, and knows what it means

  def _write(self, message):
    data = pickle.dumps(message, protocol=5)
    self._connection.sendall(_LENGTH.pack(len(data)))
    self._connection.sendall(data)


def _say(text):
  sys.stderr.write(text + '\n')
  sys.stderr.flush()


class _Member:
  """A process that has said hello."""

  def __init__(self, wire, kind, index, process):
    self.wire, self.kind, self.index = wire, kind, index
    self.name = f'{kind} {index}'
    self.process = f'{self.name} ({process})'
    self.idle = 0.0  # seconds without progress, as of its last beat


class _WorkQueue:
  """The units of a pass:

  unit u is slice u % slices of batch u // slices, and each is trained on once.
  """

  def __init__(self, slices, first, total, pause_after, state):
    self.slices, self.state = slices, state
    self.next = first
    self.limit = (
      total if pause_after is None else min(total, first + -(-pause_after // slices) * slices)
    )
    self.reason = 'end' if self.limit == total else 'save'
    self.returned = []  # by the lost
    self.outstanding = {}  # worker -> unit
    self.steps = {}  # worker -> units done
    self.over = False

  def pause(self, reason):
    """No units beyond the batch that is begun."""
    if reason == 'stop' or self.reason == 'end':
      limit = min(self.limit, -(-self.next // self.slices) * self.slices)
      if reason == 'stop' or limit < self.limit:
        self.limit, self.reason = limit, reason


class Coordinator:
  """Runs in server 0's process.

  Args:
    cluster: trainer.parameter_server.cluster.Cluster of this process.
    sync: Config.sync.
    settings: flat dict that must be the same in all processes.
  Attributes:
    address: what CoordinatorClient need: host, port and the job's secret.
  """

  def __init__(self, cluster, sync, settings):
    self._cluster, self._sync, self._settings = cluster, sync, settings
    self._lock = threading.RLock()  # guards all below
    self._ended = threading.Condition(self._lock)
    self._status = None  # of this process, once it is known
    self._members = {}  # name -> _Member
    self._refused = []  # _Members that were told so
    self._phase = 'forming'  # forming | together | apart
    self._generation = 0
    self._formed_without = set()  # workers that an asynchronous job gave up waiting for
    self._view = []  # workers that meet, ascending
    self._live = set()  # while apart: workers that claim
    self._arrived = {}  # worker -> (kind, value) of the collective under way
    self._claims, self._entering = (
      set(),
      set(),
    )  # workers that wait for a unit, or for a pass to enter
    self._board = None
    self._finished = set()
    self._forming_since = time.monotonic()
    self._listener = socket.create_server(('', 0), backlog=128)
    self.address = (
      cluster.servers[0].rpartition(':')[0].strip('[]'),
      self._listener.getsockname()[1],
      secrets.token_hex(_SECRET_BYTES // 2),
    )
    for run in (self._accept, self._watch_forming):
      threading.Thread(target=run, daemon=True).start()

  def wait(self):
    """Waits until the job has ended. Returns: this process's exit status."""
    with self._lock:
      while self._status is None:
        self._ended.wait()
      members = [*self._members.values(), *self._refused]
    for member in members:
      member.wire.close()
    return self._status

  def asked_to_stop(self):
    """Ends the job where there are no workers;

    else they, asked likewise, save what is on the servers first, and then all end.
    """
    threading.Thread(
      target=self._stop_without_workers, daemon=True
    ).start()  # a signal may have come while the lock was held

  def _stop_without_workers(self):
    with self._lock:
      if not any(m.kind == 'worker' for m in self._members.values()):
        self._end('asked to stop, and there are no workers')

  # Connections

  def _accept(self):
    while True:
      connection, _ = self._listener.accept()
      threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

  def _serve(self, connection):
    connection.settimeout(self._sync.lost_peer_seconds)
    try:
      known = hmac.compare_digest(
        bytes(read_exactly(connection, _SECRET_BYTES)), self.address[2].encode()
      )
    except OSError:
      known = False
    if not known:
      connection.close()
      return
    wire = _MessageConnection(connection, self._sync.lost_peer_seconds, lambda: 0.0)
    member = None
    try:
      while True:
        kind, *rest = wire.receive()
        with self._lock:
          if kind == 'hello':
            member = self._hello(wire, *rest)
          elif member is not None and self._members.get(member.name) is member:
            getattr(self, '_on_' + kind)(member, *rest)
    except socket.timeout:
      self._lose(member, f'it was silent for {self._sync.lost_peer_seconds:.0f} s')
    except (OSError, EOFError, pickle.UnpicklingError, ValueError, MemoryError):
      self._lose(member, 'its connection closed: the process has ended')

  def _send(self, indices, *message):
    for index in list(indices):
      member = self._members.get(f'worker {index}')
      if member:
        member.wire.send(*message)

  # Coming and going

  def _hello(self, wire, kind, index, process, settings):
    member = _Member(wire, kind, index, process)
    for key in sorted(settings.keys() | self._settings.keys()):
      if settings.get(key) != self._settings.get(key):
        text = (
          f'{key}: found {settings.get(key)!r} on {member.name} and {self._settings.get(key)!r} '
          f'on {self._cluster.name}; '
          'wanted the same command on every process'
        )
        wire.send('error', text, 2)
        self._refused.append(member)
        self._fail(text, 2)
        return None
    if member.name in self._members:
      self._lose(self._members[member.name], 'another process took its place')
    self._members[member.name] = member
    if self._phase == 'forming':
      self._form()
    else:
      wire.send('welcome', self._generation, index, len(self._cluster.workers), True)
    return member

  def _missing(self):
    names = [f'ps {i}' for i in range(1, len(self._cluster.servers))] + [
      f'worker {i}' for i in range(len(self._cluster.workers))
    ]
    return [name for name in names if name not in self._members]

  def _form(self):
    missing = [name for name in self._missing() if name not in self._formed_without]
    if missing:
      return
    self._generation += 1
    self._phase, self._view = (
      'together',
      sorted(m.index for m in self._members.values() if m.kind == 'worker'),
    )
    self._arrived, self._claims, self._entering, self._board, self._finished = (
      {},
      set(),
      set(),
      None,
      set(),
    )
    for rank, index in enumerate(self._view):
      self._send([index], 'welcome', self._generation, rank, len(self._view), False)
    for member in self._members.values():
      if member.kind == 'ps':
        member.wire.send(
          'welcome', self._generation, member.index, len(self._cluster.servers), False
        )

  def _watch_forming(self):
    told = time.monotonic()
    while True:
      time.sleep(1)  # between looks at the clock
      with self._lock:
        waited = time.monotonic() - self._forming_since
        if self._phase != 'forming' or self._status is not None:
          told = time.monotonic()
          continue
        missing = self._missing()
        again = self._generation > 0
        if time.monotonic() - told > 10:
          told = time.monotonic()
          _say(f'[ps 0] waiting for {", ".join(missing)} ({waited:.0f} s)')
        somebody = any(m.kind == 'worker' for m in self._members.values())
        if again and self._sync.mode != 'ps' and somebody and waited > self._sync.lost_peer_seconds:
          self._formed_without = {name for name in missing if name.startswith('worker')}
          self._form()
        elif not again and waited > self._sync.stalled_peer_seconds:
          self._end(f'{", ".join(missing)} did not come within {waited:.0f} s')

  def _lose(self, member, why):
    with self._lock:
      if member is None or self._members.get(member.name) is not member or self._status is not None:
        return
      del self._members[member.name]
      text = f'{member.process} was lost: {why}'
      waits = self._sync.mode != 'ps' or self._sync.on_lost_worker == 'wait'
      if member.kind == 'worker' and member.index in self._finished:
        return
      if self._phase == 'forming':
        _say(f'[ps 0] {text}')
      elif member.kind == 'worker' and waits and not self._finished:
        if self._phase == 'apart' or member.index not in self._view:
          self._do_without(member.index, text)
        else:
          self._restart(text, ' when it is here again')
      else:
        self._end(text)

  def _do_without(self, index, text):
    self._live.discard(index)
    self._claims.discard(index)
    self._entering.discard(index)
    self._arrived.pop(index, None)
    unit = self._board.outstanding.pop(index, None) if self._board else None
    if unit is not None:
      self._board.returned.append(unit)
    if not self._live and self._phase == 'apart':
      self._end(f'{text}; no worker is left')
      return
    text += '. The others go on; it may be started again'
    _say(f'[ps 0] {text}')
    self._send(self._live, 'note', text)
    if self._phase == 'apart':
      self._hand_out()
      self._meet()

  def _restart(self, text, when=''):
    """Sends all workers back to the last checkpoint."""
    text += f'. All go back to the last checkpoint{when}'
    _say(f'[ps 0] {text}')
    for name in [n for n, m in self._members.items() if m.kind == 'worker']:
      self._members.pop(name).wire.send('restart', text)
    self._phase, self._forming_since, self._formed_without = 'forming', time.monotonic(), set()

  def _end(self, text):
    text = f'{text}. The job ends; {CONTINUE}.'
    _say(f'[ps 0] {text}')
    self._finish('lost', text, status=EXIT_STATUS)

  def _fail(self, text, status):
    _say(f'error: {text}' if status == 2 else f'[ps 0] {text}')
    self._finish('error', text, status, status=status)

  def _finish(self, *message, status):
    if self._status is not None:
      return
    for member in self._members.values():
      if member.name != message[-1]:
        member.wire.send(*message)
    self._status = status
    self._ended.notify_all()

  def _on_beat(self, member, idle):
    member.idle = idle
    if idle > self._sync.stalled_peer_seconds and self._phase != 'forming':
      worst = max(self._members.values(), key=lambda m: m.idle)
      self._lose(worst, f'it beats but has made no progress for {worst.idle:.0f} s')

  def _on_fail(self, member, text, status):
    if status == 2:
      self._fail(text, 2)
    else:
      self._fail(f'{member.process} failed: {text}. The job ends; {CONTINUE}.', status)

  def _on_again(self, member, text):
    if self._finished:
      self._on_fail(member, text, 1)
    elif self._phase != 'forming':  # else all are on their way back
      self._restart(f'{member.process} failed: {text}')

  def _on_bye(self, member):
    self._finished.add(member.index)
    if self._finished >= (self._live if self._phase == 'apart' else set(self._view)):
      self._finish('finish', status=0)

  # Collectives

  def _on_meet(self, member, kind, value):
    self._arrived[member.index] = kind, value
    self._meet()

  def _meet(self):
    expected = self._live if self._phase == 'apart' else set(self._view)
    if not expected or not expected <= self._arrived.keys():
      return
    order = sorted(expected)
    kinds = {self._arrived[i][0] for i in order}
    values = [self._arrived[i][1] for i in order]
    self._arrived = {}
    if len(kinds) > 1:
      self._fail(f'workers do not do the same: {sorted(kinds)}', 1)
      return
    (kind,) = kinds
    if kind == 'exchange':
      for rank, index in enumerate(order):
        self._send([index], 'reply', [row[rank] for row in values])
      return
    if kind == 'gather':
      reply = values
    elif kind == 'sum':
      reply = {
        name: sum((v[name] for v in values[1:]), np.asarray(values[0][name])) for name in values[0]
      }
    elif kind == 'open':
      self._phase, self._live = 'apart', set(order)
      self._board = _WorkQueue(*values[0])
      self._board.steps = dict.fromkeys(order, 0)
      reply = None
    elif kind == 'close':
      self._phase, self._view = 'together', order
      for rank, index in enumerate(order):
        self._send([index], 'reply', (rank, len(order)))
      return
    self._send(order, 'reply', reply)
    if kind == 'open':
      self._let_in()

  # Apart

  def _on_enter(self, member):
    self._entering.add(member.index)
    self._let_in()

  def _let_in(self):
    if self._phase != 'apart' or self._board.over:
      return
    for index in sorted(self._entering):
      self._entering.discard(index)
      self._board.steps[index] = min((self._board.steps[i] for i in self._live), default=0)
      self._live.add(index)
      self._send([index], 'reply', self._board.state)
      _say(f'[ps 0] worker {index} is here again')

  def _on_claim(self, member, stop, save):
    board = self._board
    if board.outstanding.pop(member.index, None) is not None:
      board.steps[member.index] += 1
    if stop:
      board.pause('stop')
    elif save:
      board.pause('save')
    self._claims.add(member.index)
    self._hand_out()

  def _hand_out(self):
    board, ahead = self._board, self._sync.max_staleness
    slowest = min((board.steps[i] for i in self._live), default=0)
    for index in sorted(self._claims):
      if not board.returned and board.next >= board.limit:
        break
      if ahead is not None and board.steps[index] - slowest >= ahead:
        continue
      if board.returned:
        unit = board.returned.pop()
      else:
        unit, board.next = board.next, board.next + 1
      board.outstanding[index] = unit
      self._claims.discard(index)
      self._send([index], 'reply', (unit, None, 0))
    # Who finds none waits for those that others hold: their holders may yet be lost.
    if not board.returned and board.next >= board.limit and not board.outstanding:
      board.over = True
      self._send(self._claims, 'reply', (None, board.reason, board.limit // board.slices))
      self._claims = set()


class CoordinatorClient(Communicator):
  """A process's side of the hub; for workers, how ranks meet (the methods of trainer.comm.horovod's
  classes).

  Args:
    address: the hub's.
    cluster, sync, settings: as for Coordinator.
  Attributes:
    rank, size: of this worker in the view, the workers that meet.
    generation: counts how often the job was formed.
    alone: whether this worker meets nobody now: collectives then give its own values back.
    late: whether this process came to a job that is under way; it then begins with `enter`.
  Raises: UserError where the hub refuses.
  """

  def __init__(self, address, cluster, sync, settings):
    self._name = cluster.name
    self._progress = time.monotonic()
    self._replies = queue.SimpleQueue()
    self._welcome = queue.SimpleQueue()
    self._leaving = self._entered = self.late = False
    self._finished = threading.Event()
    try:
      connection = socket.create_connection(address[:2], timeout=sync.lost_peer_seconds)
      connection.sendall(address[2].encode())
    except OSError as e:
      raise UserError(
        f'{self._name} cannot reach the hub of ps 0 at {address[0]}:{address[1]}: '
        f'{e.strerror or e}; '
        'wanted this port open between hosts'
      ) from None
    self._silence = sync.lost_peer_seconds
    self._wire = _MessageConnection(
      connection, sync.lost_peer_seconds, lambda: time.monotonic() - self._progress
    )
    self._wire.send(
      'hello',
      cluster.kind,
      cluster.index,
      f'process {os.getpid()} on {os.uname().nodename}',
      settings,
    )
    threading.Thread(target=self._receive, daemon=True).start()
    self.generation, self.rank, self.size, self.late = self._welcome.get()
    self.alone = self.late
    self.progress()

  def progress(self):
    """Says that this process still gets on."""
    self._progress = time.monotonic()

  # As trainer.comm.horovod

  def all_reduce_with_gradient(self, tensor):
    def total(t):
      summed = tf.numpy_function(
        lambda array: self.sum_arrays({'sum': array})['sum'], [t], t.dtype
      )  # stateful: in the same order on all workers
      return tf.ensure_shape(summed, t.shape)

    return tf.custom_gradient(lambda t: (total(t), total))(tensor)

  def all_reduce(self, tensors):
    summed = self.sum_arrays({str(i): np.asarray(t) for i, t in enumerate(tensors)})
    return [summed[str(i)] for i in range(len(summed))]

  def sum_arrays(self, arrays):
    return arrays if self.alone else self._meet('sum', arrays)

  def exchange(self, per_peer):
    return [per_peer[self.rank]] if self.alone else self._meet('exchange', per_peer)

  def broadcast(self, value):
    return value if self.alone else self.gather(value if self.rank == 0 else None)[0]

  def gather(self, value):
    return [value] if self.alone else self._meet('gather', value)

  def barrier(self):
    self.gather(None)

  # Apart

  def enter(self):
    """Waits until the others are within a pass;

    returns what they passed to `open_pass` as its state.
    """
    self._wire.send('enter')
    state = self._replies.get()
    self.late = False
    self._entered = True
    return state

  def open_pass(self, slices, first, total, pause_after, state):
    """From here on workers claim units of a pass.

    Args:
      slices: of a batch; unit u is slice u % slices of batch u // slices.
      first, total: the first unit, and the one after the last.
      pause_after: a pause for a checkpoint after so many units, or None.
      state: picklable; what a worker needs that enters.
    """
    if self._entered:
      self._entered = False
    else:
      self._meet('open', (slices, first, total, pause_after, state))
    self.alone = True

  def claim(self, stop, save):
    """Says that the last unit is done and asks for another.

    Args:
      stop, save: whether this worker asks all to stop, or to pause for a checkpoint.
    Returns: (unit, None, 0) or, once all units are done, (None, 'end' | 'stop' | 'save', batches
      done).
    """
    self._wire.send('claim', stop, save)
    return self._replies.get()

  def close_pass(self):
    """Meets all that are there; ranks may have changed."""
    self.rank, self.size = self._meet('close', None)
    self.alone = False

  # The end

  def fail(self, text, status):
    """Ends the job: every process says `text` and ends with `status`."""
    self._wire.send('fail', text, status)
    self._wire.close()

  def bye(self):
    """This worker's work is done; after all have said so, the servers end."""
    self._leaving = True
    self._wire.send('bye')
    self._wire.close()

  def wait(self):
    """For servers: waits for the end of the job."""
    while not self._finished.wait(1):
      self.progress()

  def fail_by(self, error):
    """Says that this process failed by an exception. Where TensorFlow found a process gone, the hub
    has time first to say which one.

    Where TensorFlow refused a request (sent_twice), all go back to the last checkpoint.
    """
    if sent_twice(error):
      self._wire.send('again', one_line(error))
    if isinstance(
      error, (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError)
    ):
      time.sleep(self._silence + 5)  # the hub ends this process
    self.fail(one_line(error), 1)

  def _meet(self, kind, value):
    self._wire.send('meet', kind, value)
    return self._replies.get()

  def _receive(self):
    try:
      while True:
        kind, *rest = self._wire.receive()
        if kind == 'reply':
          self._replies.put(*rest)
        elif kind == 'welcome':
          self._welcome.put(rest)
        elif kind == 'finish':
          self._leaving = True
          self._finished.set()
          if self.late:
            _say(f'[{self._name}] the others have finished')
            os._exit(0)
        elif kind == 'note':
          _say(f'[{self._name}] {rest[0]}')
        elif kind == 'lost':
          self._exit(rest[0], EXIT_STATUS)
        elif kind == 'error':
          self._exit(*rest)
        elif kind == 'restart':
          _say(f'[{self._name}] {rest[0]}')
          os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    except OSError as e:
      if not self._leaving:
        silent = isinstance(e, socket.timeout)
        why = (
          f'it was silent for {self._silence:.0f} s'
          if silent
          else 'its connection closed: the process has ended'
        )
        self._exit(f'ps 0 was lost: {why}. The job ends; {CONTINUE}.', EXIT_STATUS)

  def _exit(self, text, status):
    self._leaving = True
    _say(f'error: {text}' if status == 2 else f'[{self._name}] {text}')
    os._exit(status)
