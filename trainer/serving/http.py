"""The routes of a model's HTTP server, as an ASGI application."""

from collections.abc import Callable
from typing import Any

import anyio
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from trainer.serving import rest
from trainer.serving.batcher import Batcher, refuse_unknown
from trainer.serving.figures import Figures, summed
from trainer.serving.gate import Gate
from trainer.serving.limits import Limits, Refused
from trainer.serving.processes import Member
from trainer.serving.service import Service
from trainer.wings import wing


class App:
  """The HTTP application of one model, or of two: one that finds items and one that ranks them.

  `name` and `token` are as in Gate. `recommender` finds items that `service` ranks; without it,
  `service` finds them, if it can. `member` is this process, if several serve together.
  """

  def __init__(
    self,
    service: Service,
    name: str,
    limits: Limits,
    token: str | None = None,
    recommender: Any = None,
    member: Member | None = None,
  ):
    self._member = member
    self._recommender = recommender or wing('retrieval.recommender')(service)
    self._ranks = recommender is not None
    self._service, self.figures = service, Figures(lambda: service.version)
    self.gate = Gate(name, limits, token, self.figures)
    self.batcher = Batcher(service, self.gate)
    self.asgi = Starlette(
      routes=[
        self._route('/', 'GET', self._index),
        self._route('/v1/models/{name}:predict', 'POST', self._predict),
        self._route('/v1/models/{name}:recommend', 'POST', self._recommend),
        self._route('/v1/models/{name}/metadata', 'GET', self._metadata),
        self._route('/v1/models/{name}', 'GET', self._status),
        self._route('/metrics', 'GET', self._metrics),
        self._route('/healthz', 'GET', self._health, is_open=True),
      ],
      exception_handlers={404: self._no_route},
    )

  def _route(self, path: str, method: str, route: Callable, is_open: bool = False) -> Route:
    """Returns a route that checks method, token (unless `is_open`) and name, and answers."""

    async def answer(request: Request) -> Response:
      try:
        if not is_open:
          self.gate.authorise(request.headers.get('authorization', ''))
        name = request.path_params.get('name', '')
        if ':' in name:  # such as :classify, which no path above has
          raise _unknown_path(request)
        if request.method != method and (request.method, method) != ('HEAD', 'GET'):
          raise Refused(405, f'method: found {request.method}; wanted {method}')
        if name:
          self.gate.check_name(name)
        response = await route(request)
        if not is_open:
          self.gate.count(response.status_code)
      except ClientDisconnect:
        response = Response(status_code=400)  # nobody reads it
        self.gate.count(400)
      except Exception as e:
        response = self._refusal(request, e, path)
        if response.status_code == 405:
          response.headers['allow'] = method
      return response

    # () accepts all methods: otherwise a wrong one would be matched with later paths.
    return Route(path, answer, methods=())

  def _refusal(self, request: Request, error: Exception, kind: str = 'HTTP') -> Response:
    status, text = self.gate.told(kind, error, f'{request.method} {request.url.path[:200]!r}')
    return _json(rest.error(text), status)

  async def _no_route(self, request: Request, _: HTTPException) -> Response:
    return self._refusal(request, _unknown_path(request))

  async def _predict(self, request: Request) -> Response:
    return _json(await self.batcher.scored(rest, await self._body(request)), 200)

  async def _recommend(self, request: Request) -> Response:
    body = await self._body(request)
    return _json(await self.batcher.found(body, lambda most: self._find(body, most)), 200)

  async def _body(self, request: Request) -> bytes:
    body, seconds = bytearray(), self.gate.limits.seconds_to_send
    try:
      with anyio.fail_after(seconds), self.gate.arriving() as add:
        async for piece in request.stream():
          add(len(piece))
          body += piece
    except TimeoutError:
      raise Refused(408, f'the body took more than {seconds:g} s to arrive') from None
    return bytes(body)

  def _find(self, body: bytes, most: int) -> bytes:
    """Returns the answer to a request for items, which may cost as much as `most` samples."""
    request = self._recommender.parse(body, most)
    if self.gate.limits.strict:
      refuse_unknown(self._recommender, request.queries)
    unknown = self._recommender.unknown_columns(request.queries)
    answer = self._recommender.recommend(request)
    self.figures.scored(answer.samples, len(unknown), answer.unknown)
    return answer.body

  async def _status(self, request: Request) -> Response:
    if reason := self._service.not_ready:
      raise Refused(503, reason)
    return _json(rest.status(self._service.version.sequence), 200)

  async def _metadata(self, request: Request) -> Response:
    methods = self._methods()
    predict = self._service.signature() if 'predict' in methods else None
    recommend = self._recommender.signature() if 'recommend' in methods else None
    return _json(rest.metadata(self.gate.name, predict, recommend), 200)

  def _methods(self) -> list[str]:
    """Returns the methods that requests may call: 'predict', 'recommend' or both."""
    finds = self._service.item_column is not None
    return ['predict'] * (not finds) + ['recommend'] * (finds or self._ranks)

  async def _index(self, request: Request) -> Response:
    is_known = self._service.version is not None
    return _json(rest.index(self.gate.name, self._methods() if is_known else rest.METHODS), 200)

  async def _metrics(self, request: Request) -> Response:
    text = summed(await self._member.figures()) if self._member else self.figures.text()
    return Response(text, media_type=CONTENT_TYPE_LATEST)

  async def _health(self, request: Request) -> Response:
    reason = self._service.not_ready or self._recommender.not_ready
    return Response(f'{reason or "ok"}\n', 503 if reason else 200)


def _unknown_path(request: Request) -> Refused:
  return Refused(404, f'path: {request.url.path[:80]!r} is unknown; GET / lists the paths')


def _json(body: bytes, status: int) -> Response:
  return Response(body, status, media_type='application/json')
