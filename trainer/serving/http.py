"""The HTTP server of a model: routes, limits, tokens and metrics, as an ASGI application."""

import asyncio
import collections
import concurrent.futures
import contextlib
import hmac
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import anyio
import prometheus_client
from absl import logging
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from trainer.errors import UserError, nearest
from trainer.serving import rest
from trainer.serving.limits import Limits, Refused
from trainer.serving.processes import Member, summed
from trainer.serving.scorer import BadRequest
from trainer.serving.service import NotAnswered, NotReady, Service
from trainer.serving.sparing_log import SparingLog
from trainer.wings import wing

_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)  # seconds
_BYTES_TOGETHER = 64 << 10  # of bodies scored in one batch; more would gain nothing
_SHORT_SAMPLES = 256  # what a short request may cost (trainer/serving/rest.py)
_SHORT_BYTES = _SHORT_SAMPLES * rest.SAMPLE_BYTES
_SAMPLES_TOGETHER = 4 * _SHORT_SAMPLES  # scored in one batch
_LONG_SHARE = 0.25  # of the requests at a time that may be long
_METHODS = ('GET', 'HEAD', 'POST', 'PUT', 'PATCH', 'DELETE', 'OPTIONS')


class _Long(Exception):
  """A request that seemed short is a long one, which another thread must work on."""


class _Waiting(NamedTuple):
  """A request that has arrived completely, and the future of its answer."""

  form: rest.Form
  message: bytes
  answer: asyncio.Future[bytes]


class App:
  """The HTTP application of one model, or of two: one that finds items and one that ranks them.

  Requests that arrive while others are scored wait, and are then scored in one batch, because most
  of the cost of a small request does not depend on its size. A long one, of more than
  _SHORT_SAMPLES or as many bytes, waits for a thread of its own kind. trainer.serving.rpc uses the
  public methods.

  Args:
    name: the model's name in the paths of requests.
    token: clients must send it as `Authorization: Bearer TOKEN`; None: they need no token.
    recommender: finds items that `service` ranks; None: `service` finds them, if it can.
    member: this process among those that serve; None: it is alone.
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
    self._service, self._name, self.limits, self._token = service, name, limits, token
    self._under_way = 0  # requests that are scored or wait
    self._long_under_way = 0  # those of them that are long
    self._arriving = 0  # bytes of bodies that have not arrived completely
    self._waiting: collections.deque[_Waiting] = collections.deque()
    self._taking = threading.Lock()
    self._log = SparingLog()
    self._pool = concurrent.futures.ThreadPoolExecutor(limits.threads, 'score')
    self._long_pool = concurrent.futures.ThreadPoolExecutor(1, 'score_long')
    self._make_figures()
    self.asgi = Starlette(
      routes=[
        self._route('/', 'GET', self._index),
        self._route('/v1/models/{name}:predict', 'POST', self._predict),
        self._route('/v1/models/{name}:recommend', 'POST', self._recommend),
        self._route('/v1/models/{name}/metadata', 'GET', self._metadata),
        self._route('/v1/models/{name}', 'GET', self._status),
        self._route('/metrics', 'GET', self._metrics),
        Route('/healthz', self._health, methods=['GET']),
      ],
      exception_handlers={404: self._no_route, 405: self._no_route},
    )

  def _make_figures(self) -> None:
    registry = self._registry = prometheus_client.CollectorRegistry()
    self._requests = prometheus_client.Counter(
      'ctr_requests', 'Requests by status.', ['status'], registry=registry
    )
    self._latency = prometheus_client.Histogram(
      'ctr_request_seconds',
      'From the whole request to its answer.',
      registry=registry,
      buckets=_BUCKETS,
    )
    self._samples = prometheus_client.Counter('ctr_samples', 'Samples scored.', registry=registry)
    self._unknown = prometheus_client.Counter(
      'ctr_unknown_features',
      'Distinct features without a row, of the requests that were scored together.',
      ['slot'],
      registry=registry,
    )
    self._ignored = prometheus_client.Counter(
      'ctr_ignored_columns', 'Columns of requests that the model does not read.', registry=registry
    )
    version = prometheus_client.Gauge('ctr_version', 'The version served.', registry=registry)
    version.set_function(lambda: getattr(self._service.version, 'sequence', 0))
    under_way = prometheus_client.Gauge(
      'ctr_requests_under_way', 'Requests that are scored or wait for that.', registry=registry
    )
    under_way.set_function(lambda: self._under_way)
    age = prometheus_client.Gauge(
      'ctr_version_age_seconds',
      'Since the newest export that is served was written.',
      registry=registry,
    )
    age.set_function(self._age)

  def _age(self) -> float:
    version = self._service.version
    return time.time() - version.done_at if version else float('nan')

  # Routes

  def _route(self, path: str, method: str, route: Callable) -> Route:
    """Returns a route that checks method and token, then answers by `route` or with an error."""

    async def answer(request: Request) -> Response:
      try:
        self.authorise(request.headers.get('authorization', ''))
        if ':' in request.path_params.get('name', ''):  # such as :classify, which no path above has
          raise _unknown_path(request)
        if request.method != method and (request.method, method) != ('HEAD', 'GET'):
          raise Refused(405, f'method: found {request.method}; wanted {method}')
        response = await route(request)
        self.count(response.status_code)
      except ClientDisconnect:
        response = Response(status_code=400)  # nobody reads it
        self.count(400)
      except Exception as e:
        response = self._refusal(request, e, path)
        if response.status_code == 405:
          response.headers['allow'] = method
      return response

    # The route accepts all methods: otherwise a wrong method would be matched with later paths.
    return Route(path, answer, methods=_METHODS)

  def authorise(self, header: str) -> None:
    """Refuses a request whose header `authorization`, '' if it has none, lacks the token."""
    if self._token is None:
      return
    if not hmac.compare_digest(header.encode(), f'Bearer {self._token}'.encode()):
      raise Refused(401, 'wanted the header Authorization: Bearer TOKEN')

  def check_name(self, name: str) -> None:
    """Raises Refused if another model than this one is asked for."""
    if name != self._name:
      raise Refused(404, f"model '{name[:80]}' is unknown{nearest(name[:80], [self._name])}")

  def told(self, kind: str, error: Exception, what: str = '') -> tuple[int, str]:
    """Counts a request that ends in an error, and logs it sparingly, in one line.

    `kind`, of which there are few, and `what`, such as a path, say what the client asked for.
    Returns the HTTP status and the text for the client; only the log tells errors inside the
    server.
    """
    trace = None
    if isinstance(error, RecursionError):
      error = BadRequest('found values nested too deeply')
    if isinstance(error, (Refused, BadRequest, NotAnswered, NotReady)):
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
    self._requests.labels(status).inc()

  def _refusal(self, request: Request, error: Exception, kind: str = 'HTTP') -> Response:
    status, text = self.told(kind, error, f'{request.method} {request.url.path[:200]!r}')
    return _json(rest.error(text), status)

  async def _no_route(self, request: Request, error: HTTPException) -> Response:
    """Refuses a request to an unknown path, or one to /healthz with a wrong method."""
    refused = _unknown_path(request)
    if error.status_code == 405:
      refused = Refused(405, f'method: found {request.method}; wanted GET')
    response = self._refusal(request, refused)
    response.headers.update(error.headers or {})  # the methods that are allowed
    return response

  async def _predict(self, request: Request) -> Response:
    return _json(await self.scored(rest, await self._arrived(request)), 200)

  async def scored(self, form: rest.Form, message: bytes) -> bytes:
    """Returns `form.answer` of a whole message, scored together with others that wait."""

    async def short() -> bytes:
      waiting = _Waiting(form, message, asyncio.get_running_loop().create_future())
      self._waiting.append(waiting)
      if len(self._waiting) == 1:  # else a thread is about to take it with those before
        self._pool.submit(self._score_some)
      return await waiting.answer

    def long() -> bytes:
      return self._score_together([(form, self._parse(form, message, is_short=False))])[0]

    return await self._worked_on(message, short, long)

  async def _recommend(self, request: Request) -> Response:
    body = await self._arrived(request)

    async def short() -> bytes:
      return await asyncio.get_running_loop().run_in_executor(self._pool, self._find, body, True)

    return _json(await self._worked_on(body, short, lambda: self._find(body, False)), 200)

  async def _worked_on(
    self, message: bytes, short: Callable[[], Awaitable[bytes]], long: Callable[[], bytes]
  ) -> bytes:
    """Returns the answer of `long` if the message is or `short` raises _Long, else of `short`."""
    with self._under_way_now():
      if len(message) <= _SHORT_BYTES:
        try:
          return await short()
        except _Long:
          pass
      if (count := self._long_under_way) >= max(1, self.limits.concurrency * _LONG_SHARE):
        raise Refused(429, f'{count} long requests are under way; wanted fewer at a time')
      self._long_under_way += 1
      try:
        return await asyncio.get_running_loop().run_in_executor(self._long_pool, long)
      finally:
        self._long_under_way -= 1

  async def _arrived(self, request: Request) -> bytes:
    self.check_name(request.path_params['name'])
    return await self._body(request)

  @contextlib.contextmanager
  def _under_way_now(self) -> Iterator[None]:
    """Counts a request whose body has arrived, and measures its latency; a limit refuses others."""
    if self._under_way >= self.limits.concurrency:
      raise Refused(429, f'{self._under_way} requests are under way; wanted fewer at a time')
    self._under_way += 1
    started = time.perf_counter()
    try:
      yield
      self._latency.observe(time.perf_counter() - started)
    finally:
      self._under_way -= 1

  async def _body(self, request: Request) -> bytes:
    limit = self.limits.body_bytes
    body = bytearray()
    try:
      with anyio.fail_after(self.limits.seconds_to_send):
        async for piece in request.stream():
          body += piece
          self._arriving += len(piece)
          if len(body) > limit:
            raise Refused(413, f'body: found more than {limit} bytes; wanted at most {limit}')
          if self._arriving > limit * self.limits.concurrency:
            raise Refused(429, 'too many bytes are arriving; wanted fewer requests at a time')
    except TimeoutError:
      seconds = self.limits.seconds_to_send
      raise Refused(408, f'the body took more than {seconds:g} s to arrive') from None
    finally:
      self._arriving -= len(body)
    return bytes(body)

  def _score_some(self) -> None:
    """Scores some of the waiting requests and answers them; runs in a thread of the pool."""
    some, size = [], 0
    with self._taking:
      while self._waiting and (not some or size + len(self._waiting[0].message) <= _BYTES_TOGETHER):
        some.append(self._waiting.popleft())
        size += len(some[-1].message)
      if self._waiting:
        self._pool.submit(self._score_some)
    if not some:  # another thread has taken the request
      return
    answers = self._score(some)

    def deliver() -> None:
      for one, answer in zip(some, answers):
        if one.answer.done():  # cancelled: the client is gone, or the server stops
          continue
        if isinstance(answer, Exception):
          one.answer.set_exception(answer)
        else:
          one.answer.set_result(answer)

    some[0].answer.get_loop().call_soon_threadsafe(deliver)

  def _score(self, some: Sequence[_Waiting]) -> list[bytes | Exception]:
    """Returns for each request its answer, or the exception that refuses it."""
    answers: dict[int, bytes | Exception] = {}
    groups: dict[frozenset, dict[int, rest.Request]] = {}
    for i, one in enumerate(some):
      try:
        request = self._parse(one.form, one.message, is_short=True)
        groups.setdefault(request.kind(), {})[i] = request
      except Exception as e:
        answers[i] = e

    def score(group: dict[int, rest.Request]) -> None:
      try:
        if len(group) > 1 and sum(r.cost for r in group.values()) > _SAMPLES_TOGETHER:
          raise _Long
        found = self._score_together([(some[i].form, request) for i, request in group.items()])
        answers.update(zip(group, found))
      except Exception as e:
        if len(group) == 1:
          answers.update(dict.fromkeys(group, e))
        else:  # each alone, so that nobody is told of another's mistake
          for i, request in group.items():
            score({i: request})

    for group in groups.values():
      score(group)
    return [answers[i] for i in range(len(some))]

  @contextlib.contextmanager
  def _most(self, is_short: bool) -> Iterator[int]:
    """Gives what a request may cost, in samples; _Long if one that must be short costs more.

    So long requests are not even parsed where short ones wait.
    """
    most = min(self.limits.instances, _SHORT_SAMPLES) if is_short else self.limits.instances
    try:
      yield most
    except rest.TooLarge:
      if most < self.limits.instances:
        raise _Long from None
      raise

  def _parse(self, form: rest.Form, message: bytes, is_short: bool) -> rest.Request:
    with self._most(is_short) as most:
      request = form.parse(message, most)
    if self.limits.strict and (unknown := self._service.unknown_columns(request)):
      raise _unknown_column(unknown[0], self._service.signature().columns)
    return request

  def _score_together(self, some: Sequence[tuple[rest.Form, rest.Request]]) -> list[bytes]:
    together = rest.together([request for _, request in some])
    scores, version = self._service.predict(together)
    ignored = len(some) * len(self._service.unknown_columns(together))
    self._count(together.size, ignored, scores.unknown)
    answers, start = [], 0
    for form, request in some:
      own = slice(start, start + request.size)
      outputs = {name: values[own] for name, values in scores.outputs.items()}
      answers.append(form.answer(request, outputs, version))
      start += request.size
    return answers

  def _find(self, body: bytes, is_short: bool) -> bytes:
    """Returns the answer to a request for items; _Long if it must be short and is not."""
    with self._most(is_short) as most:
      request = rest.parse_recommend(body, most)
      self._recommender.check_cost(request, most)
    unknown = self._recommender.unknown_columns(request.queries)
    if self.limits.strict and unknown:
      raise _unknown_column(unknown[0], self._recommender.signature().columns)
    answer = self._recommender.recommend(request)
    self._count(answer.samples, len(unknown), answer.unknown)
    return answer.body

  def _count(self, samples: int, ignored: int, unknown: Mapping[str, int]) -> None:
    self._ignored.inc(ignored)
    self._samples.inc(samples)
    for slot, count in unknown.items():
      self._unknown.labels(slot).inc(count)

  async def _status(self, request: Request) -> Response:
    self.check_name(request.path_params['name'])
    if reason := self._service.not_ready:
      raise NotReady(reason)
    return _json(rest.status(self._service.version.sequence), 200)

  async def _metadata(self, request: Request) -> Response:
    self.check_name(request.path_params['name'])
    methods = self._methods()
    predict = self._service.signature() if 'predict' in methods else None
    recommend = self._recommender.signature() if 'recommend' in methods else None
    return _json(rest.metadata(self._name, predict, recommend), 200)

  def _methods(self) -> list[str]:
    """Returns the methods that requests may call: 'predict', 'recommend' or both."""
    finds = self._service.item_column is not None
    return ['predict'] * (not finds) + ['recommend'] * (finds or self._ranks)

  async def _index(self, request: Request) -> Response:
    is_known = self._service.version is not None
    return _json(rest.index(self._name, self._methods() if is_known else rest.METHODS), 200)

  def figures(self) -> bytes:
    """Returns the metrics of this process."""
    return prometheus_client.generate_latest(self._registry)

  async def _metrics(self, request: Request) -> Response:
    text = summed(await self._member.figures()) if self._member else self.figures()
    return Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)

  async def _health(self, request: Request) -> Response:
    """Answers 200 once a version is served; needs no token."""
    reason = self._service.not_ready or self._recommender.not_ready
    return Response(f'{reason or "ok"}\n', 503 if reason else 200)


def _unknown_path(request: Request) -> Refused:
  return Refused(404, f'path: {request.url.path[:80]!r} is unknown; GET / lists the paths')


def _unknown_column(name: str, columns: Collection[str]) -> BadRequest:
  return BadRequest(f"column '{name[:80]}' is unknown{nearest(name[:80], columns)}")


def _json(body: bytes, status: int) -> Response:
  return Response(body, status, media_type='application/json')
