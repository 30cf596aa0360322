"""Lets several processes serve at one port: `ctr-serve --processes N`.

The first one starts alone, and the others once it has loaded a version, so that a mistake is told
once. All of them accept connections of one socket. What one of them answers at /metrics is the sum
over all.
"""

import asyncio
import contextlib
import ctypes
import errno
import mmap
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import types
from collections.abc import AsyncIterator, Callable, Mapping

from absl import logging

from trainer import command_line

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
BACKLOG = 1024
_SECONDS_TO_ANSWER = 5
_SECONDS_TO_BIND = 2
_CRASHES = signal.SIGBUS, signal.SIGSEGV, signal.SIGABRT
_LONGEST_PAUSE = 60
MARKER = 'damaged'  # the file of a store in which a reader says what is damaged
_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


def listener(host: str, port: int) -> socket.socket:
  """Returns a socket that listens; port 0: any free port.

  A server that was killed may hold the port for a moment, so it tries for _SECONDS_TO_BIND.
  """
  family = socket.AF_INET6 if ':' in host else socket.AF_INET
  deadline = time.monotonic() + _SECONDS_TO_BIND
  while True:
    try:
      found = socket.create_server((host, port), family=family, backlog=BACKLOG)
      break
    except OSError as e:
      if e.errno != errno.EADDRINUSE or time.monotonic() > deadline:
        raise
    time.sleep(0.05)
  # An answer's head and body are sent in two pieces; without this the second waits for 40 ms.
  found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
  return found


class Turns:
  """Spreads connections over processes: one that has more than another lets the other accept."""

  def __init__(self, count: int = 1):
    # 1 + the connections of each process; 0: it does not accept. Forks share this memory.
    self._numbers = memoryview(mmap.mmap(-1, 8 * count)).cast('q')
    self.own = 0  # which one this process is
    self.ends = False  # whether it stops, and lets nobody accept in its place

  def has(self, connections: int | None) -> None:
    """Tells the others how many connections this process has; None: it does not accept."""
    self._numbers[self.own] = 0 if self.ends or connections is None else 1 + connections

  def are_anothers(self) -> bool:
    """Returns whether another process that accepts has fewer connections."""
    return any(0 < number < self._numbers[self.own] for number in self._numbers)


class Member:
  """One of the processes, which share the socket `listener` and meet in the directory `folder`."""

  def __init__(self, number: int, listener: socket.socket, folder: str, started: int, turns: Turns):
    self.number, self.listener, self.turns = number, listener, turns
    self._folder, self._started = folder, started
    turns.own = number

  def starts(self) -> None:
    """Tells that this process has a version to serve."""
    if self.number == 0:
      os.write(self._started, b'1')

  @contextlib.asynccontextmanager
  async def telling(self, figures: Callable[[], bytes]) -> AsyncIterator[None]:
    """Gives the other processes the figures of this one while the context lasts."""

    async def tell(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
      writer.write(figures())
      writer.close()

    path = os.path.join(self._folder, str(self.number))
    async with await asyncio.start_unix_server(tell, path):
      yield

  async def figures(self) -> list[str]:
    """Returns the figures of all processes that serve, as /metrics has them."""

    async def asked(name: str) -> str:
      reader, writer = await asyncio.open_unix_connection(os.path.join(self._folder, name))
      with contextlib.closing(writer):
        return (await asyncio.wait_for(reader.read(), _SECONDS_TO_ANSWER)).decode()

    found = await asyncio.gather(*map(asked, os.listdir(self._folder)), return_exceptions=True)
    return [text for text in found if isinstance(text, str)]  # one may be ending


def fork(count: int, listener: socket.socket) -> Member:
  """Forks `count` processes and returns in each; the calling process ends when they have ended.

  A signal to stop is passed on. If a process ends without one, so do the others, with status 1.
  """
  folder, pids, asked = tempfile.mkdtemp(prefix='ctr-serve-'), [], []
  told, started = os.pipe()
  turns, parent = Turns(count), os.getpid()

  def stop(number: int, _: types.FrameType | None = None) -> None:
    if os.getpid() == parent:
      asked.append(number)
      for pid in pids:
        os.kill(pid, number)

  defaults = {number: signal.signal(number, stop) for number in _SIGNALS}
  for number in range(count):
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    if not (pid := os.fork()):
      os.close(told)
      _begin(defaults, parent, signal.SIGTERM)
      return Member(number, listener, folder, started, turns)
    pids.append(pid)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    if number == 0:
      os.close(started)
      if not os.read(told, 1):  # it ends, and has told why
        break
    if asked:
      os.kill(pid, asked[0])  # in case that it is new
      break
  listener.close()  # else the kernel would let clients wait here for nobody
  status = 0
  while pids:
    pid, raw = os.wait()
    pids.remove(pid)
    if not asked and not status:
      status = max(os.waitstatus_to_exitcode(raw), 0) or 1
      if pids:
        logging.error('a process of the server ended (%d); all end', os.waitstatus_to_exitcode(raw))
      for other in pids:
        os.kill(other, signal.SIGTERM)
  shutil.rmtree(folder, ignore_errors=True)
  sys.exit(status or command_line.status_of_server(asked))


def _begin(handlers: Mapping[int, object], parent: int, last: signal.Signals) -> None:
  """Lets a new process listen to signals itself; it gets the signal `last` at its parent's end."""
  for number, handler in handlers.items():
    signal.signal(number, handler)
  signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
  os.setpgrp()  # Ctrl-C reaches the parent, which passes it on, once
  ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, last)
  if os.getppid() != parent:
    sys.exit(1)


def crash_alone(store: str, turns: Turns | None = None) -> None:
  """Returns in a new process; if it crashes, the calling one says so and starts another one.

  Reading the files of a damaged store may crash a process; the file MARKER in `store` then says so
  too, and `turns` know. The calling process passes signals on, and ends with the new one's status.
  """
  child, parent, pause = 0, os.getpid(), 1

  def stop(number: int, _: types.FrameType | None) -> None:
    if not child:
      sys.exit(command_line.status_of_server([number]))
    os.kill(child, number)

  defaults = {number: signal.signal(number, stop) for number in _SIGNALS}
  while True:
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    if not (child := os.fork()):
      return _begin(defaults, parent, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    child = 0
    if -status not in _CRASHES:
      sys.exit(status if status >= 0 else command_line.SIGNALLED - status)
    if turns:
      turns.has(None)
    name = signal.Signals(-status).name
    logging.error('the process at work crashed (%s); it is started again in %d s', name, pause)
    with contextlib.suppress(OSError), open(f'{store}/{MARKER}', 'w', encoding='utf-8') as f:
      f.write(f'a process that used it crashed: {name}')
    time.sleep(pause)
    pause = min(2 * pause, _LONGEST_PAUSE)
