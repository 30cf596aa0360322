"""Answers requests for items: one model finds items, and another model may rank them."""

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from trainer.data.request_columns import Shared
from trainer.errors import nearest
from trainer.plain_data import Json
from trainer.serving import rest
from trainer.serving.limits import BadRequest, TooLarge
from trainer.serving.requests import Request, Signature, check_cost, weight
from trainer.serving.service import Service

_K = 20  # items, unless a request says how many


class Recommend(NamedTuple):
  """A request for items."""

  queries: Request
  k: int
  seen: list[list[Json]] | None  # the items that each query leaves out; None: not given


class Answer(NamedTuple):
  """The answer to a request for items."""

  body: bytes
  samples: int  # the number of queries or, with a ranker, of the candidates that it scored
  unknown: Mapping[str, int]  # slot -> its number of distinct features without a row


class Recommender:
  """Finds items with the model of `finder`, and may rank them with that of `ranker`.

  A ranker is given at least `candidates` items and sorts them by the scores of its first task. The
  methods raise Refused while a model has no version yet.
  """

  def __init__(self, finder: Service, ranker: Service | None = None, candidates: int = 0):
    self._finder, self._ranker, self._candidates = finder, ranker, candidates

  @property
  def not_ready(self) -> str | None:
    """Why a model has no version to serve yet; None if each has one."""
    return self._finder.not_ready or (self._ranker or self._finder).not_ready

  def signature(self) -> Signature:
    """Returns the columns and outputs of a request for items."""
    finder = self._finder.signature()
    if self._ranker is None:
      return finder
    ranker = self._ranker.signature()
    columns = {n: t for n, t in ranker.columns.items() if n != self._finder.item_column}
    # A column that both models read gets an example that both accept, or null.
    example = {n: ranker.example[n] for n in columns} | finder.example
    example |= {n: None for n in columns if example[n] != ranker.example[n]}
    return ranker._replace(columns=finder.columns | columns, example=example)

  def unknown_columns(self, request: Request) -> list[str]:
    """Returns the names of a request's columns that no model reads."""
    unknown = self._finder.unknown_columns(request)
    if self._ranker is None:
      return unknown
    read = set(unknown) - set(self._ranker.unknown_columns(request)) - {self._finder.item_column}
    return [name for name in unknown if name not in read]

  def parse(self, body: bytes, max_instances: int) -> Recommend:
    """Parses the body of a request; TooLarge if it costs more than `max_instances` samples."""
    tree = rest.tree_of(body)
    known = ('instances', 'context', 'inputs', 'signature_name', 'k', 'seen')
    for name in tree.keys() - known:
      raise BadRequest(f"the body: '{name[:80]}' is unknown{nearest(name[:80], known)}")
    queries, k, seen = rest.request_of(tree, max_instances), tree.get('k', _K), tree.get('seen')
    if type(k) is not int or k < 1:
      raise BadRequest(f'k: found {str(k)[:80]}; wanted a whole number of at least 1')
    if seen is not None:
      if not isinstance(seen, list) or not all(isinstance(items, list) for items in seen):
        raise BadRequest('seen: wanted a list of items for each query, as in [["5", "6"]]')
      if len(seen) != queries.size:
        raise BadRequest(
          f'seen: found {len(seen)} lists; wanted {queries.size}, one for each query'
        )
      seen = [rest.decoded(items) for items in seen]
    of_query = self._finder.cost_of_query(max(k, self._candidates))
    if queries.size * of_query > max_instances:
      raise TooLarge(
        f'found {queries.size} queries, each of which costs as much as {of_query:,} samples; '
        f'wanted at most {max_instances // of_query:,} queries'
      )
    if self._ranker is not None:  # each candidate is a sample with the columns of its query
      columns = [values for values in queries.columns.values() if values]
      shared = sum(sum(map(weight, values)) // len(values) for values in columns)
      check_cost(queries.size * of_query, shared, max_instances)
    return Recommend(queries, k, seen)

  def recommend(self, request: Recommend) -> Answer:
    """Finds items for the queries of a request, and ranks them if there is a ranker.

    It raises Refused if the finder's model has no model.retrieval, or the ranker's has one.
    """
    queries, k, seen = request
    if self._ranker is None:
      found, version = self._finder.find(queries, k, seen)
      body = _written(queries, found.items, model_version=version)
      return Answer(body, queries.size, found.unknown)
    found, retrieval_version = self._finder.find(queries, k, seen, max(k, self._candidates))
    counts = [len(items) for items, _ in found.items]
    if not sum(counts):
      versions = {'model_version': self._ranker.signature().version}
      versions['retrieval_version'] = retrieval_version
      return Answer(_written(queries, found.items, **versions), 0, found.unknown)

    some = np.flatnonzero(counts)  # the queries with items
    columns = {
      name: Shared(values * len(some) if isinstance(values, Shared) else [values[q] for q in some])
      for name, values in queries.columns.items()
    }
    columns[found.column] = [item for items, _ in found.items for item in items]
    of_query = np.repeat(np.arange(len(some), dtype=np.int32), np.take(counts, some))
    to_rank = Request(columns, len(of_query), by_row=False, shared=of_query)
    scores, version = self._ranker.predict(to_rank)
    (first, *_) = scores.outputs.values()
    ranked = []
    for (items, _), own in zip(found.items, np.split(first, np.cumsum(counts)[:-1])):
      order = np.argsort(-own, kind='stable')[:k]
      ranked.append(([items[place] for place in order], own[order].tolist()))
    body = _written(queries, ranked, model_version=version, retrieval_version=retrieval_version)
    return Answer(body, sum(counts), found.unknown)


def _written(
  request: Request, items: Sequence[tuple[list[str], list[float]]], **versions: int
) -> bytes:
  """Returns the body of an answer: of each query the items and their scores."""
  if request.by_row:
    answer = {'predictions': [{'items': texts, 'scores': scores} for texts, scores in items]}
  else:
    texts, scores = zip(*items) if items else ((), ())
    answer = {'outputs': {'items': texts, 'scores': scores}}
  answer |= {name: str(version) for name, version in versions.items()}
  return json.dumps(answer, ensure_ascii=False, separators=(',', ':')).encode()
