"""A trained model with exports, and a scorer of it that runs in this process."""

import asyncio
import concurrent.futures
import contextlib
import http.client
import json
import threading
from collections.abc import Iterator
from typing import Any

from trainer.serving import processes
from trainer.serving.http import App, Limits
from trainer.serving.http_server import server as server_of
from trainer.serving.recommend import Recommender
from trainer.serving.service import Service


class Client:
  """Speaks to a scorer over one connection.

  Args:
    port: where it listens.
    name: of the model.
  """

  def __init__(self, port: int, name: str = 'ctr'):
    self.port, self._path = port, f'/v1/models/{name}'
    self._connection = http.client.HTTPConnection('127.0.0.1', port, timeout=60)

  def ask(
    self, method: str, path: str, body: Any = None, **headers: str
  ) -> tuple[int, bytes, http.client.HTTPResponse]:
    """Returns: (status, body, response)."""
    if body is not None and not isinstance(body, bytes):
      body = json.dumps(body).encode()
    try:
      self._connection.request(method, path, body, headers)
      response = self._connection.getresponse()
      return response.status, response.read(), response
    except Exception:
      self.close()  # else all requests after this one would fail
      raise

  def predict(self, body: Any, **headers: str) -> tuple[int, Any]:
    """Returns: (status, answer)."""
    status, text, _ = self.ask('POST', f'{self._path}:predict', body, **headers)
    return status, json.loads(text)

  def status(self) -> tuple[int, Any]:
    status, text, _ = self.ask('GET', self._path)
    return status, json.loads(text)

  def close(self) -> None:
    self._connection.close()


@contextlib.contextmanager
def served(
  service: Service,
  limits: Limits = Limits(),
  token: str | None = None,
  recommender: Recommender | None = None,
  rpc: bool = False,
  rpc_port: int = 0,
) -> Iterator[Client]:
  """Serves in a thread, on ports of its own; the client's `rpc_port` answers gRPC if `rpc`."""
  app = App(service, 'ctr', limits, token, recommender)
  server, listener = server_of(app), processes.listener('127.0.0.1', 0)
  started: concurrent.futures.Future[int | None] = concurrent.futures.Future()

  async def serve() -> None:
    async with contextlib.AsyncExitStack() as stack:
      port = None
      if rpc:
        from trainer.serving.rpc import listening

        port = await stack.enter_async_context(listening(app, '127.0.0.1', rpc_port, False))
      started.set_result(port)
      await server.serve(sockets=[listener])

  def run() -> None:
    try:
      asyncio.run(serve())
    except Exception as e:
      started.set_exception(e)

  thread = threading.Thread(target=run)
  thread.start()
  client = Client(listener.getsockname()[1])
  try:
    client.rpc_port = started.result()
    yield client
  finally:
    client.close()
    server.should_exit = True
    thread.join()
    listener.close()
