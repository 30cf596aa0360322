"""Accepts connections from anyone, so that strangers who are slow or many keep nobody else out."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable

_MOST = 64  # connections at a time


class Door:
  """Accepts connections, each in a thread of its own, until the process ends.

  Each lasts for `seconds` at most. If there are more than _MOST, the oldest one is closed after a
  tenth of that time, and the next waits until then; so whoever is not slow is never cut off.

  Args:
    listener: a socket that listens.
    meet: called with each connection, which is closed when it returns. If it returns a function,
      that is called next, without these limits; the function may own a duplicate of the socket.
  """

  def __init__(
    self,
    listener: socket.socket,
    seconds: float,
    meet: Callable[[socket.socket], Callable[[], None] | None],
  ):
    self._seconds, self._meet = seconds, meet
    self._began: dict[socket.socket, float] = {}  # when each connection did, the oldest first
    self._left = threading.Condition()  # guards the end of each
    threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

  def _accept(self, listener: socket.socket) -> None:
    while True:
      listener.settimeout(self._make_room())
      try:
        accepted, _ = listener.accept()
        self._began[accepted] = time.monotonic()
        self._make_room()
        threading.Thread(target=self._serve, args=(accepted,), daemon=True).start()
      except TimeoutError:
        pass
      except (OSError, RuntimeError):  # it has hung up, or no descriptor or thread is left
        time.sleep(0.05)

  def _make_room(self) -> float | None:
    """Waits until connections are not too many; returns in how many seconds the oldest one ends."""
    with self._left:
      while self._began:
        oldest, began = next(iter(self._began.items()))
        is_full = len(self._began) > _MOST
        left = began + self._seconds / (10 if is_full else 1) - time.monotonic()
        if left > 0 and not is_full:
          return left
        if left > 0:
          self._left.wait(left)
        else:
          del self._began[oldest]
          with contextlib.suppress(OSError):  # its thread then meets its end
            oldest.shutdown(socket.SHUT_RDWR)
    return None

  def _serve(self, accepted: socket.socket) -> None:
    go_on = None
    with contextlib.suppress(Exception):  # a stranger may send anything
      go_on = self._meet(accepted)
    with self._left:
      self._began.pop(accepted, None)
      accepted.close()
      self._left.notify()
    if go_on:
      go_on()
