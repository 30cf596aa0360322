"""An S3 endpoint on loopback (moto's), which can lose connections."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import moto.server
import werkzeug.serving


class S3(contextlib.AbstractContextManager):
  """An S3 endpoint, for the time of a `with` that of this process and those that it starts.

  Attributes:
    environment: what clients of it find it by.
    losing: how many of the next responses to GET end in the middle, the connection lost.
    requests: method and path of all requests so far.
    before: called with method and path before a request is answered.
  """

  def __init__(self):
    self._app = moto.server.DomainDispatcherApplication(moto.server.create_backend_app)
    self._server = werkzeug.serving.make_server('127.0.0.1', 0, self._answer, threaded=True)
    self._server.RequestHandlerClass.log = lambda *_: None
    self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
    self._thread.start()
    self.losing, self.requests = 0, []
    self.before: Callable[[str, str], None] = lambda method, path: None
    self.environment = {
      'AWS_ENDPOINT_URL': f'http://127.0.0.1:{self._server.server_port}',
      'AWS_ACCESS_KEY_ID': 'test',
      'AWS_SECRET_ACCESS_KEY': 'test',
      'AWS_DEFAULT_REGION': 'us-east-1',
      'AWS_EC2_METADATA_DISABLED': 'true',
    }
    self._patched = mock.patch.dict(os.environ, self.environment)
    self._patched.start()

  def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    self.requests.append((environ['REQUEST_METHOD'], environ['PATH_INFO']))
    self.before(*self.requests[-1])
    body = self._app(environ, start_response)
    if environ['REQUEST_METHOD'] == 'GET' and self.losing > 0:
      self.losing -= 1
      return self._lost(body)
    return body

  def _lost(self, body: Iterable[bytes]) -> Iterator[bytes]:
    data = b''.join(body)
    yield data[: len(data) // 2]
    raise ConnectionResetError('lost, as the test wants')

  def stop(self) -> None:
    """Ends the server; who connects is refused."""
    self._server.shutdown()
    self._server.server_close()
    self._thread.join()

  def __exit__(self, *_: object) -> None:
    self._patched.stop()
    if self._thread.is_alive():
      self.stop()
