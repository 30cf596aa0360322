"""Messages of plain data between processes: their encoding, and the connections that carry them.

A message is a JSON text, with the dtype and shape of arrays, followed by their bytes. Decoding
never runs code from it. All hosts of a job must have the same byte order.
`multiprocessing.connection` frames messages; before the first, both sides prove with an HMAC that
they know the job's secret. If one does not, the other closes the connection after a limited time.
"""

import contextlib
import functools
import json
import math
import multiprocessing
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

import numpy as np

from trainer.comm.door import Door
from trainer.errors import UserError, one_line
from trainer.plain_data import Json, JsonObject, Plain

_HEADER = struct.Struct('!QI')  # bytes of the whole message, bytes of its JSON text
_ARRAY = '__array__'
_KINDS = 'biufUS'  # the kinds of NumPy dtypes that may be sent
_BEATS = 10  # how many beats each side sends within `lost_seconds`

Address = str | list[str | int]  # a Unix socket's name in hexadecimal, or [host, port]


def encode(value: Plain) -> bytes:
  """Returns the message of plain data (trainer.comm.communicator); TypeError for anything else."""
  arrays = []

  def plain(v: Plain) -> Json:
    if isinstance(v, np.generic):
      v = v.item()
    if v is None or type(v) in (bool, int, float, str):
      return v
    if isinstance(v, np.ndarray) and v.dtype.kind in _KINDS:
      arrays.append(np.ascontiguousarray(v))
      return {_ARRAY: [v.dtype.str, v.shape]}
    if isinstance(v, (list, tuple)):
      return [plain(item) for item in v]
    if isinstance(v, dict) and all(isinstance(k, str) and k != _ARRAY for k in v):
      return {k: plain(item) for k, item in v.items()}
    raise TypeError(f'cannot send {v!r} of type {type(v).__name__}; wanted plain data')

  text = json.dumps(plain(value)).encode()
  size = _HEADER.size + len(text) + sum(a.nbytes for a in arrays)
  return b''.join([_HEADER.pack(size, len(text)), text, *(a.tobytes() for a in arrays)])


def decode(data: bytes | bytearray | memoryview) -> Plain:
  """Returns the plain data of a message that `encode` made; its arrays are views of `data`.

  Bytes after the message are ignored. It raises ValueError if `data` begins with no whole message.
  """
  view = memoryview(data)
  if len(view) < _HEADER.size:
    raise ValueError(f'found a message of {len(view)} bytes; wanted at least {_HEADER.size}')
  size, text_size = _HEADER.unpack_from(view)
  if size > len(view):
    raise ValueError(f'found {len(view)} bytes of a message; wanted {size}')
  place = _HEADER.size + text_size

  def with_arrays(fields: JsonObject) -> Plain:
    nonlocal place
    if _ARRAY not in fields:
      return fields
    name, shape = fields[_ARRAY]
    dtype, count = np.dtype(str(name)), math.prod(shape)
    if dtype.kind not in _KINDS or any(type(n) is not int or n < 0 for n in shape):
      raise ValueError(f'found an array of dtype {name} and shape {shape}')
    array = np.frombuffer(view, dtype, count, place) if count else np.empty([0], dtype)
    place += count * dtype.itemsize
    return array.reshape(shape)

  try:
    value = json.loads(bytes(view[_HEADER.size : place]), object_hook=with_arrays)
  except (TypeError, OverflowError, RecursionError, SyntaxError) as e:
    raise ValueError(one_line(e)) from None
  if place != size:
    raise ValueError(f'found a message of {size} bytes; wanted {place}')
  return value


class Listener:
  """Accepts and authenticates connections, each in its own thread, until the process ends.

  Args:
    host: the IPv4 or IPv6 address to listen at; None for a Unix socket.
    ports: the first and the last port to try, or None for any; UserError if none of them is free.
    lost_seconds: the time limit for authentication, and for the rest of a message that has begun.
    serve: called with each authenticated Connection, in the connection's thread.
  """

  def __init__(
    self,
    host: str | None,
    ports: Sequence[int] | None,
    secret: bytes,
    lost_seconds: float,
    serve: Callable[[Connection], None],
  ):
    self._secret, self._lost_seconds, self._serve = secret, lost_seconds, serve
    self._socket = _listen(host, ports)
    name = self._socket.getsockname()
    # The address to give to `connect`.
    self.address: Address = name.hex() if host is None else [host, name[1]]
    Door(self._socket, lost_seconds, self._authenticated)

  def _authenticated(self, accepted: socket.socket) -> Callable[[], None]:
    steps = deliver_challenge, answer_challenge
    connection = _authenticated(accepted, self._secret, self._lost_seconds, steps)
    return functools.partial(self._serve, connection)


def connect(address: Address, secret: bytes, lost_seconds: float) -> Connection:
  """Connects to a Listener by its `address`; ConnectionError if none that knows the secret answers.

  `lost_seconds` limits connecting, authentication, and the rest of a message that has begun.
  """
  try:
    if isinstance(address, str):
      connected = socket.socket(socket.AF_UNIX)
      connected.settimeout(lost_seconds)
      connected.connect(bytes.fromhex(address))
    else:
      connected = socket.create_connection((address[0], address[1]), timeout=lost_seconds)
  except OSError as e:
    raise ConnectionError(e.strerror or str(e)) from None
  timer = threading.Timer(lost_seconds, _shut_down, (connected, socket.SHUT_RDWR))
  timer.start()
  with connected:
    try:
      steps = answer_challenge, deliver_challenge
      return _authenticated(connected, secret, lost_seconds, steps)
    finally:
      timer.cancel()


def address_text(address: Address) -> str:
  return f'Unix socket {address}' if isinstance(address, str) else '{}:{}'.format(*address)


class MessageConnection:
  """Sends and receives messages over one connection.

  A thread sends them, so `send` never waits. Each side also sends ten beats (what `beat` returns)
  within `lost_seconds`; after this time without a message, the other side counts as lost.
  """

  def __init__(self, connection: Connection, lost_seconds: float, beat: Callable[[], Plain]):
    self._connection, self._lost_seconds, self.beat = connection, lost_seconds, beat
    self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    self._sender = threading.Thread(target=self._send_all, daemon=True)
    self._sender.start()

  def send(self, message: Plain) -> None:
    """Queues a message with plain data, and returns at once; TypeError if it is anything else."""
    self._outgoing.put(encode(message))

  def receive(self) -> list[Plain]:
    """Waits for a message, which may be a beat; returns its kind and its arguments as a flat list.

    ConnectionError if the other side was silent for `lost_seconds`, hung up, or sent anything else.
    """
    try:
      # Several short waits: if this process itself was stopped for long, only one wait is used up,
      # and the other side's beats are in the buffer or arrive soon.
      if not any(self._connection.poll(self._lost_seconds / _BEATS) for _ in range(_BEATS)):
        raise TimeoutError
      message = decode(self._connection.recv_bytes())
    except (BlockingIOError, TimeoutError):
      raise ConnectionError(f'it was silent for {self._lost_seconds:.0f} s') from None
    except EOFError:
      raise ConnectionError('its connection closed: the process has ended') from None
    except ValueError as e:
      raise ConnectionError(f'it sent something that is no message: {e}') from None
    except OSError as e:
      raise ConnectionError(f'its connection broke: {e.strerror or e}') from None
    if not isinstance(message, list) or not message or not isinstance(message[0], str):
      raise not_understood(message)
    return message

  def close(self) -> None:
    """Sends the queued messages, then hangs up; waits at most `lost_seconds`."""
    self._stop_sending()
    with contextlib.suppress(OSError):  # closed already
      same = socket.socket(fileno=self._connection.fileno())
      _shut_down(same, socket.SHUT_WR)
      same.detach()

  def hand_over(self) -> int:
    """Sends the queued messages; returns a descriptor that an executed program inherits."""
    self._stop_sending()
    os.set_inheritable(self._connection.fileno(), True)
    return self._connection.fileno()

  def _stop_sending(self) -> None:
    self._outgoing.put(None)
    self._sender.join(self._lost_seconds)

  def _send_all(self) -> None:
    pause, beaten = self._lost_seconds / _BEATS, -np.inf
    try:
      while True:
        if time.monotonic() - beaten >= pause:
          self._connection.send_bytes(encode(self.beat()))
          beaten = time.monotonic()
        try:
          message = self._outgoing.get(timeout=max(0.0, beaten + pause - time.monotonic()))
        except queue.Empty:
          continue
        if message is None:
          return
        self._connection.send_bytes(message)
    except OSError:
      return  # `receive` meets the same error, and raises it


def not_understood(message: Plain) -> ConnectionError:
  return ConnectionError(f'it sent {str(message)[:100]!r}, which no process of this version sends')


def _listen(host: str | None, ports: Sequence[int] | None) -> socket.socket:
  if host is None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind('')  # the system gives it a unique name
    listener.listen(128)
    return listener
  family = socket.AF_INET6 if ':' in host else socket.AF_INET
  first, last = ports or (0, 0)
  for port in range(first, last + 1):
    try:
      return socket.create_server((host, port), family=family, backlog=128)
    except OSError as e:
      why = e.strerror or str(e)
  raise UserError(
    f'sync.ports: found {ports and list(ports)}, of which no port is free on {host}: {why}; wanted '
    'a range with a free port'
  )


def _authenticated(
  connected: socket.socket,
  secret: bytes,
  seconds: float,
  steps: Sequence[Callable[[Connection, bytes], None]],
) -> Connection:
  """Lets both sides prove that they know the secret; ConnectionError if one does not.

  The Connection owns a duplicate of the socket; each wait for the other side is within `seconds`.
  """
  connected.setblocking(True)
  limit = struct.pack('ll', int(seconds), int(seconds % 1 * 1e6))
  for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
    connected.setsockopt(socket.SOL_SOCKET, option, limit)
  if connected.family != socket.AF_UNIX:
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
  connection = Connection(os.dup(connected.fileno()))
  try:
    for step in steps:
      step(connection, secret)
    return connection
  except (OSError, EOFError, AssertionError, multiprocessing.AuthenticationError) as e:
    connection.close()
    raise ConnectionError(f'no authentication by a process of this job: {e}'.rstrip(': ')) from None


def _shut_down(connected: socket.socket, how: int) -> None:
  with contextlib.suppress(OSError):  # closed already
    connected.shutdown(how)
