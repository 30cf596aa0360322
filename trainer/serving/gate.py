"""Which requests are answered and which are refused, whatever their protocol."""

import asyncio
import contextlib
import hmac
import time
from collections.abc import Callable, Hashable, Iterator

from absl import logging

from trainer.data.request_columns import WrongRequest
from trainer.errors import UserError, nearest
from trainer.serving.figures import Figures
from trainer.serving.limits import BadRequest, Limits, Refused

_LONG_SHARE = 0.25  # of the requests at a time that may be long
_SECONDS = 60  # between two lines of the log about refusals of one kind


class Gate:
  """Lets in requests for the model `name` within the limits, counts all, and logs the refused.

  Clients must send `token`, unless it is None, in a header `Authorization: Bearer TOKEN`.
  """

  def __init__(self, name: str, limits: Limits, token: str | None, figures: Figures):
    self.name, self.limits, self._token, self.figures = name, limits, token, figures
    self._under_way = 0  # requests that are scored or wait
    self._long_under_way = 0  # those of them that are long
    self._arriving = 0  # bytes of bodies that have not arrived completely
    self._log = SparingLog()
    figures.under_way.set_function(lambda: self._under_way)

  def authorise(self, header: str) -> None:
    """Refuses a request whose header `authorization`, '' if it has none, lacks the token."""
    if self._token is None:
      return
    if not hmac.compare_digest(header.encode(), f'Bearer {self._token}'.encode()):
      raise Refused(401, 'wanted the header Authorization: Bearer TOKEN')

  def check_name(self, name: str) -> None:
    """Refuses a request for another model than this one."""
    if name != self.name:
      raise Refused(404, f"model '{name[:80]}' is unknown{nearest(name[:80], [self.name])}")

  @contextlib.contextmanager
  def arriving(self) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with the number of bytes of each piece of a body that arrives."""
    limit, total = self.limits.body_bytes, 0

    def add(count: int) -> None:
      nonlocal total
      total += count
      self._arriving += count
      if total > limit:
        raise Refused(413, f'body: found more than {limit} bytes; wanted at most {limit}')
      if self._arriving > limit * self.limits.concurrency:
        raise Refused(429, 'too many bytes are arriving; wanted fewer requests at a time')

    try:
      yield add
    finally:
      self._arriving -= total

  @contextlib.contextmanager
  def under_way(self) -> Iterator[None]:
    """Counts a request whose body has arrived, and measures its latency."""
    if self._under_way >= self.limits.concurrency:
      raise Refused(429, f'{self._under_way} requests are under way; wanted fewer at a time')
    self._under_way += 1
    started = time.perf_counter()
    try:
      yield
      self.figures.latency.observe(time.perf_counter() - started)
    finally:
      self._under_way -= 1

  @contextlib.contextmanager
  def long_under_way(self) -> Iterator[None]:
    """Counts a request that is under way as a long one."""
    if (count := self._long_under_way) >= max(1, self.limits.concurrency * _LONG_SHARE):
      raise Refused(429, f'{count} long requests are under way; wanted fewer at a time')
    self._long_under_way += 1
    try:
      yield
    finally:
      self._long_under_way -= 1

  def told(self, kind: str, error: Exception, what: str = '') -> tuple[int, str]:
    """Counts a request that ends in an error, and logs it sparingly, in one line.

    `kind`, of which there are few, and `what`, such as a path, say what the client asked for.
    Returns the HTTP status and the text for the client; only the log tells the server's own errors.
    """
    trace = None
    if isinstance(error, RecursionError):
      error = BadRequest('found values nested too deeply')
    elif isinstance(error, WrongRequest):
      error = BadRequest(str(error))
    if isinstance(error, Refused):
      level, status, text = logging.WARNING, error.status, str(error)
      line = f'refused {what or kind}: {status} {text[:500]!r}'  # repr keeps it on one line
    elif isinstance(error, UserError):
      level, status, text = logging.ERROR, 503, 'the rows cannot be read now'
      line = f'a request failed: {error}'
    else:
      level, status, text = logging.ERROR, 500, 'an error of the server; its log has more'
      line, trace = 'a request failed', error
    self._log.log((kind, status, type(error)), level, line, trace)
    self.count(status)
    return status, text

  def count(self, status: int) -> None:
    """Counts a request by the HTTP status of its answer."""
    self.figures.requests.labels(status).inc()


class SparingLog:
  """Logs the first line of a kind at once, then how many came in each minute, in an event loop."""

  def __init__(self):
    self._left_out: dict[Hashable, tuple[int, str]] = {}  # kind -> the lines' number, the last one

  def log(self, kind: Hashable, level: int, text: str, error: BaseException | None = None) -> None:
    """Logs a line and `error`'s trace, unless one of the same kind was within the last minute."""
    if kind in self._left_out:
      self._left_out[kind] = self._left_out[kind][0] + 1, text
      return
    logging.log(level, '%s', text, exc_info=error)
    self._wait(kind, level)

  def _wait(self, kind: Hashable, level: int) -> None:
    self._left_out[kind] = 0, ''
    asyncio.get_running_loop().call_later(_SECONDS, self._tell, kind, level)

  def _tell(self, kind: Hashable, level: int) -> None:
    count, last = self._left_out.pop(kind)
    if count:
      logging.log(level, '%d more in %d s; the last: %s', count, _SECONDS, last)
      self._wait(kind, level)
