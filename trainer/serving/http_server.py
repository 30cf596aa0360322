"""The HTTP server of an application: its connections, and limits for the heads of requests."""

import asyncio
import functools
import math
import resource
import select
import socket

import uvicorn
from absl import logging
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from trainer.serving.gate import Gate
from trainer.serving.http import App
from trainer.serving.limits import BadRequest
from trainer.serving.processes import Turns

_HEAD_BYTES = 16 << 10  # the longest head of a request
SECONDS_TO_FINISH = 10  # for requests under way, when the server stops
SECONDS_TO_ACCEPT = 5  # before that, while connections wait
_SECONDS_TO_BEGIN = 1  # of these, for a connection's request to come
_TRIES, _SECONDS_TO_TRY = 100, 0.002  # in which another process may accept, unless it hangs
_SECONDS_TO_RECOVER = 1  # after an error, as of too many open files
_PASSES = 10  # of the event loop, in which a connection that waits becomes a request under way
# An idle connection closes after this time. A short time would often end just as a client sends.
_SECONDS_IDLE = 75
_MOST = 4096  # connections at a time, or half of what the process may open


def most_connections() -> int:
  """Returns how many connections may be open; for another one, the longest idle one is closed."""
  return min(_MOST, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


class _Protocol(HttpToolsProtocol):
  """HTTP/1.1 that limits the number of connections, and the bytes and seconds of a request's head.

  `idle` holds the connections that wait for a request's whole head, the longest waiting one first.
  """

  def __init__(self, gate: Gate, turns: Turns, idle: 'dict[_Protocol, None]', **settings: object):
    super().__init__(**settings)
    self._gate, self._turns = gate, turns
    self._seconds_to_send = gate.limits.seconds_to_send
    self._timer: asyncio.TimerHandle | None = None  # set while no request is under way
    self._head_bytes, self._idle = 0, idle

  def connection_made(self, transport: asyncio.Transport) -> None:
    super().connection_made(transport)
    self._turns.has(len(self.connections))
    self.on_message_begin()
    if len(self.connections) > most_connections():
      longest = next(iter(self._idle))
      longest._stop_waiting()
      longest.transport.abort()

  def on_message_begin(self) -> None:
    super().on_message_begin()
    self._head_bytes = 0
    self._wait(self._seconds_to_send)

  def on_response_complete(self) -> None:
    super().on_response_complete()
    if self.cycle.response_complete:  # else the next request has come already
      self._wait(_SECONDS_IDLE + self._seconds_to_send)  # to read the answer, too
      self._head_bytes = -math.inf  # what still comes is the rest of the body

  def _wait(self, seconds: float) -> None:
    self._stop_waiting()
    self._idle[self] = None
    self._timer = self.loop.call_later(seconds, self.transport.abort)

  def data_received(self, data: bytes) -> None:
    self._head_bytes += len(data)
    super().data_received(data)
    if self._timer and self._head_bytes > _HEAD_BYTES:
      self.transport.close()

  def on_headers_complete(self) -> None:
    self._stop_waiting()
    super().on_headers_complete()
    self.cycle.keep_alive &= not self._turns.ends

  def may_begin(self) -> bool:
    """Returns whether a request may be about to arrive.

    That is so for _SECONDS_TO_BEGIN after the connection opened, or after a request's head began,
    until the head is complete.
    """
    if self._timer is None or self._head_bytes < 0:  # a request is under way, or was answered
      return False
    return self._timer.when() - self.loop.time() > self._seconds_to_send - _SECONDS_TO_BEGIN

  def send_400_response(self, msg: str) -> None:
    self._gate.told('HTTP', BadRequest(msg))
    super().send_400_response(msg)

  def connection_lost(self, error: Exception | None) -> None:
    self._stop_waiting()
    super().connection_lost(error)
    self._turns.has(len(self.connections))

  def _stop_waiting(self) -> None:
    self._idle.pop(self, None)
    if self._timer:
      self._timer.cancel()
    self._timer = None


class _Server(uvicorn.Server):
  """Accepts connections itself: asyncio's server lets no process with fewer go first."""

  def __init__(self, settings: uvicorn.Config, turns: Turns):
    super().__init__(settings)
    self._turns = turns

  async def startup(self, sockets: list[socket.socket] | None = None) -> None:
    await super().startup([])
    (self._listener,) = sockets
    self._listener.setblocking(False)
    self._waiting = select.poll()  # select.select knows no descriptor above 1,023
    self._waiting.register(self._listener, select.POLLIN)
    self._turns.has(0)
    self._accepting = asyncio.create_task(self._accept())

  async def _accept(self) -> None:
    loop, readable, tries = asyncio.get_running_loop(), asyncio.Event(), 0
    settings = {'config': self.config, 'server_state': self.server_state, 'app_state': {}}
    while True:
      loop.add_reader(self._listener, readable.set)
      await readable.wait()
      loop.remove_reader(self._listener)
      readable.clear()
      while tries < _TRIES and self._turns.are_anothers() and self._waiting.poll(0):
        await asyncio.sleep(_SECONDS_TO_TRY)
        tries += 1
      try:
        connection, _ = self._listener.accept()
        protocol = functools.partial(self.config.http_protocol_class, **settings)
        await loop.connect_accepted_socket(protocol, connection)
        tries *= self._turns.are_anothers()  # if still so, that one hangs; do not wait again
      except (BlockingIOError, ConnectionError):  # another was faster, or the client is gone
        tries = 0
      except OSError as e:
        logging.warning('a connection is not accepted: %s', e)
        await asyncio.sleep(_SECONDS_TO_RECOVER)

  async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
    """Stops listening once no connection waits (the kernel would reset it), or time is up."""
    self._turns.ends = True
    self._turns.has(0)
    loop, quiet = asyncio.get_running_loop(), 0
    deadline = loop.time() + SECONDS_TO_ACCEPT
    while quiet < _PASSES and loop.time() < deadline:
      connections = self.server_state.connections
      busy = self._waiting.poll(0) or any(one.may_begin() for one in connections)
      quiet = 0 if busy else quiet + 1
      await asyncio.sleep(0.01 if busy else 0)
    self._accepting.cancel()
    loop.remove_reader(self._listener)
    await super().shutdown(sockets)


def server(app: App, turns: Turns | None = None) -> uvicorn.Server:
  """Returns a server, whose `run` takes a listening socket; a single process has no `turns`."""
  turns = turns or Turns()
  settings = uvicorn.Config(
    app.asgi,
    http=functools.partial(_Protocol, app.gate, turns, {}),
    ws='none',
    interface='asgi3',
    proxy_headers=False,  # nothing here asks who the client is
    log_level='error',  # of bytes that are not HTTP, `Gate.told` tells
    access_log=False,
    lifespan='off',
    timeout_graceful_shutdown=SECONDS_TO_FINISH,
    timeout_keep_alive=_SECONDS_IDLE,
  )
  return _Server(settings, turns)
