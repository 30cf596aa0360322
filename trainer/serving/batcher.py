"""Scores requests together, whatever their protocol."""

import asyncio
import collections
import concurrent.futures
import contextlib
import functools
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from trainer.errors import nearest
from trainer.serving.gate import Gate
from trainer.serving.limits import BadRequest, TooLarge
from trainer.serving.requests import SAMPLE_BYTES, Request, together
from trainer.serving.service import Service

_BYTES_TOGETHER = 64 << 10  # of messages scored in one batch; more would gain nothing
_SHORT_SAMPLES = 256  # what a short request may cost (trainer/serving/requests.py)
_SHORT_BYTES = _SHORT_SAMPLES * SAMPLE_BYTES
_SAMPLES_TOGETHER = 4 * _SHORT_SAMPLES  # scored in one batch
_Found = TypeVar('_Found')


class Form(Protocol):
  """Reads and writes the messages of a protocol."""

  def parse(self, message: bytes, max_instances: int) -> Request: ...

  def answer(self, request: Request, outputs: Mapping[str, np.ndarray], version: int) -> bytes: ...


class _Long(Exception):
  """A request that seemed short is a long one, which another thread must work on."""


class _Waiting(NamedTuple):
  """A request that has arrived completely, and the future of its answer."""

  form: Form
  message: bytes
  answer: asyncio.Future[bytes]


class Batcher:
  """Answers requests that have arrived completely, in threads.

  Requests that arrive while others are scored wait, and are then scored in one batch, because most
  of the cost of a small request does not depend on its size. A long one, of more than
  _SHORT_SAMPLES or as many bytes, waits for a thread of its own kind.
  """

  def __init__(self, service: Service, gate: Gate):
    self._service, self.gate = service, gate
    self._waiting: collections.deque[_Waiting] = collections.deque()
    self._taking = threading.Lock()
    self._pool = concurrent.futures.ThreadPoolExecutor(gate.limits.threads, 'score')
    self._long_pool = concurrent.futures.ThreadPoolExecutor(1, 'score_long')

  async def scored(self, form: Form, message: bytes) -> bytes:
    """Returns `form.answer` of a message, scored together with others that wait."""

    async def short() -> bytes:
      waiting = _Waiting(form, message, asyncio.get_running_loop().create_future())
      self._waiting.append(waiting)
      if len(self._waiting) == 1:  # else a thread is about to take it with those before
        self._pool.submit(self._score_some)
      return await waiting.answer

    def long() -> bytes:
      request = self._parse(form, message, self.gate.limits.instances)
      return self._score_together([(form, request)])[0]

    return await self._answered(message, short, long)

  async def found(self, message: bytes, find: Callable[[int], bytes]) -> bytes:
    """Returns `find(most)`; `most` is what the request may cost, in samples."""

    async def short() -> bytes:
      return await asyncio.get_running_loop().run_in_executor(self._pool, self._cheaply, find)

    return await self._answered(message, short, lambda: find(self.gate.limits.instances))

  async def _answered(
    self, message: bytes, short: Callable[[], Awaitable[bytes]], long: Callable[[], bytes]
  ) -> bytes:
    """Returns `short`'s answer, or `long`'s if the message is long or `short` raises _Long."""
    with self.gate.under_way():
      if len(message) <= _SHORT_BYTES:
        with contextlib.suppress(_Long):
          return await short()
      with self.gate.long_under_way():
        return await asyncio.get_running_loop().run_in_executor(self._long_pool, long)

  def _cheaply(self, work: Callable[[int], _Found]) -> _Found:
    """Returns `work(most)`, where `most` is what a short request may cost, or raises _Long."""
    most = self.gate.limits.instances
    try:
      return work(min(most, _SHORT_SAMPLES))
    except TooLarge:
      if most > _SHORT_SAMPLES:
        raise _Long from None
      raise

  def _parse(self, form: Form, message: bytes, most: int) -> Request:
    request = form.parse(message, most)
    if self.gate.limits.strict:
      refuse_unknown(self._service, request)
    return request

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
    groups: dict[frozenset, dict[int, Request]] = {}
    for i, one in enumerate(some):
      try:
        request = self._cheaply(functools.partial(self._parse, one.form, one.message))
        groups.setdefault(request.kind(), {})[i] = request
      except Exception as e:
        answers[i] = e

    def score(group: dict[int, Request]) -> None:
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

  def _score_together(self, some: Sequence[tuple[Form, Request]]) -> list[bytes]:
    requests = together([request for _, request in some])
    scores, version = self._service.predict(requests)
    ignored = len(some) * len(self._service.unknown_columns(requests))
    self.gate.figures.scored(requests.size, ignored, scores.unknown)
    answers, start = [], 0
    for form, request in some:
      own = slice(start, start + request.size)
      outputs = {name: values[own] for name, values in scores.outputs.items()}
      answers.append(form.answer(request, outputs, version))
      start += request.size
    return answers


def refuse_unknown(model: Service, request: Request) -> None:
  """Raises BadRequest if a request has a column that the model does not read."""
  if unknown := model.unknown_columns(request):
    name = unknown[0][:80]
    raise BadRequest(f"column '{name}' is unknown{nearest(name, model.signature().columns)}")
