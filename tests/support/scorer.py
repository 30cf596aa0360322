"""A trained model with exports, and a scorer of it that runs in this process."""

import asyncio
import concurrent.futures
import contextlib
import http.client
import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from trainer.retrieval.recommend import Recommender
from trainer.serving import processes
from trainer.serving.http import App
from trainer.serving.http_server import server as server_of
from trainer.serving.limits import Limits
from trainer.serving.requests import Request
from trainer.serving.scorer import Scores
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


class Held:
  """A service that notes the sizes of what it scores, and holds all until `asked_together` says."""

  def __init__(self, service: Service):
    self._service, self.sizes = service, []
    self.entered, self.ended = threading.Event(), threading.Event()

  def __getattr__(self, name: str) -> Any:
    return getattr(self._service, name)

  def predict(self, request: Request) -> tuple[Scores, int]:
    self.sizes.append(request.size)
    self.entered.set()
    self.ended.wait()
    return self._service.predict(request)


def asked_together(
  service: Service, asks: Sequence[Callable[[Client], Any]], rpc: bool = False
) -> tuple[list[Any], list[int]]:
  """Asks while the first request is held, so that the others wait, and are scored together.

  Each of `asks` gets a client of its own. Returns what they returned, and the sizes of batches.
  """
  held, found = Held(service), [None] * len(asks)
  with served(held, Limits(concurrency=2 * len(asks)), rpc=rpc) as client:

    def ask(i: int) -> None:
      own = Client(client.port)
      own.rpc_port = client.rpc_port
      with contextlib.closing(own):
        found[i] = asks[i](own)

    first, *others = (threading.Thread(target=ask, args=(i,)) for i in range(len(asks)))
    first.start()
    held.entered.wait()
    for thread in others:
      thread.start()
    under_way = -1
    while under_way + sum(one is not None for one in found) < len(asks):
      figures = client.ask('GET', '/metrics')[1].decode()
      under_way = int(re.search(r'(?m)^ctr_requests_under_way (\d+)', figures)[1])
    held.ended.set()
    for thread in (first, *others):
      thread.join()
  return found, held.sizes


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

        port = await stack.enter_async_context(listening(app.batcher, '127.0.0.1', rpc_port, False))
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
    client.rpc_port, client.server = started.result(), server
    yield client
  finally:
    client.close()
    server.should_exit = True
    thread.join()
    listener.close()
