"""Evaluates a model with model.retrieval by ranking the whole catalogue for each query."""

import collections
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from absl import logging

from trainer.data.features import SlotBatch, sole_features
from trainer.data.passes import passes
from trainer.data.prepared import PreparedPass
from trainer.errors import UserError
from trainer.model import ranking
from trainer.plain_data import Json
from trainer.training.inputs import Inputs

_SAMPLES_AT_ONCE = 65536
_VECTORS_AT_ONCE = 8192
_SECONDS_BETWEEN_LINES = 0.5


class Positives(NamedTuple):
  """Distinct pairs of a user and an item, sorted by user, then item."""

  users: np.ndarray  # int64 [n]
  items: np.ndarray  # int64 [n]

  @classmethod
  def of(cls, users: np.ndarray, items: np.ndarray) -> 'Positives':
    """Sorts pairs and removes duplicates."""
    order = np.lexsort((items, users))
    users, items = users[order], items[order]
    is_new = np.ones([len(users)], bool)
    is_new[1:] = (users[1:] != users[:-1]) | (items[1:] != items[:-1])
    return cls(users[is_new], items[is_new])

  def without(self, other: 'Positives') -> 'Positives':
    """Returns the pairs that `other` does not have."""
    pairs = [np.concatenate(both) for both in zip(other, self)]
    order = np.lexsort((np.arange(len(pairs[0])), pairs[1], pairs[0]))
    users, items = pairs[0][order], pairs[1][order]
    repeats = np.zeros([len(users)], bool)
    repeats[1:] = (users[1:] == users[:-1]) & (items[1:] == items[:-1])
    kept = ~repeats & (order >= len(other.users))
    return Positives(users[kept], items[kept])


class RankingEvaluation:
  """Ranks the catalogue for the users of passes; has the methods of Evaluation that a job calls.

  Every process calls them. Each process computes the vectors of its share of the queries and of the
  items, gets the vectors of all queries, and ranks its items. The best of all processes are the
  ranking.

  Attributes:
    catalogue: the items at the time of the last ranking.
    predictions: None: there are no probabilities.
    slots_before: empty.
  """

  predictions = None

  def __init__(self, inputs: Inputs):
    self._cfg, self._inputs = inputs.cfg, inputs
    self._communicator, self._step = inputs.communicator, inputs.step
    self.catalogue = inputs.step.dense.catalogue
    self._eval_at = inputs.cfg.model.retrieval.eval_at
    self._positives_by_path: dict[str, Positives] = {}
    self.slots_before: collections.deque[Mapping[str, Json]] = collections.deque(maxlen=0)

  def evaluate(
    self, prepared: Sequence[PreparedPass], in_log: bool = False
  ) -> dict[str, float | int]:
    """Measures how high the rankings place the positives that users have in the passes.

    Positives of data.train and, unless it is evaluated, of data.valid are neither recommended nor
    counted. With data.watch, none is left out.

    Args:
      in_log: has no effect.
    Returns:
      The result of trainer.model.ranking.judge, and the numbers of queries, of items in the
      catalogue, and of examples (positives).
    Raises:
      UserError: if a K is above the size of the catalogue, or there is no positive.
    """
    del in_log
    self._refresh()
    keys, most = self.catalogue.keys, max(self._eval_at)
    self._check_k('model.retrieval.eval_at', most)
    seen = self._positives(self._seen_passes(prepared))
    wanted = self._positives(prepared).without(seen)
    if not len(wanted.users):
      where = ', '.join(data_pass.name for data_pass in prepared)
      raise UserError(f'{where}: no positive that is not in data.train; wanted some to find')
    users, counts = np.unique(wanted.users, return_counts=True)
    queries = self.query_vectors(prepared, users)
    ranked, _ = self.rank(queries, self._left_out(users, seen), most, self.item_vectors())
    of_query, place = np.searchsorted(users, wanted.users), self.catalogue.places(wanted.items)
    pairs = of_query[place >= 0], place[place >= 0]
    values = ranking.judge(ranked, pairs, counts, self.catalogue.shows, self._eval_at)
    return values | {'queries': len(users), 'items': len(keys), 'examples': len(wanted.users)}

  def tell_unknown(self) -> None:
    """Does nothing; a ranking has no unknown features."""

  def recommend(
    self, prepared: Sequence[PreparedPass], k: int
  ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the best k items of each sample, in order, for a block of n samples at a time.

    Positives that the sample's user has in data.train or data.valid are left out, unless the run
    follows a stream (data.watch). A query of vector 0, none of whose features has a row, finds
    nothing; a warning has the number of these.

    Yields:
      keys int64 [n, k], −1 where there are fewer items, and scores float32 [n, k], descending.
    Raises:
      UserError: if k is above the size of the catalogue.
    """
    self._refresh()
    self._check_k('k', k)
    unknown = 0
    rank, size = self._communicator.rank, self._communicator.size
    keys, items = np.append(self.catalogue.keys, -1), self.item_vectors()
    seen = self._positives(self._seen_passes(prepared))
    for data_pass in prepared:
      for start in range(0, data_pass.num_samples, _VECTORS_AT_ONCE):
        samples = np.arange(start, min(start + _VECTORS_AT_ONCE, data_pass.num_samples))
        batch = data_pass.gather(np.array_split(samples, size)[rank])
        queries, users = self._vectors(batch), batch.group
        if size > 1:
          queries, users = map(np.concatenate, zip(*self._communicator.gather([queries, users])))
        left_out = self._left_out(users, seen)
        places, scores = self.rank(queries, left_out, k, items)
        is_unknown = ~queries.any(1)
        places[is_unknown] = len(keys) - 1
        unknown += np.sum(is_unknown)
        yield keys[places], scores
    if unknown and rank == 0:
      logging.warning('%d queries have no feature with a row: no items are found for them', unknown)

  def _refresh(self) -> None:
    self.catalogue.table = self._inputs.items()
    self.catalogue.refresh(self._step.store, self._communicator)

  def _check_k(self, key: str, k: int) -> None:
    if k > (count := len(self.catalogue.keys)):
      raise UserError(
        f'{key}: found {k}; the catalogue has {count:,} items, wanted at most so many'
      )

  def rank(
    self,
    queries: np.ndarray,
    left_out: tuple[np.ndarray, np.ndarray],
    k: int,
    items: np.ndarray,
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns the best k items of each query: indices in the catalogue and scores, [Q, k].

    Args:
      queries: float32 [Q, d], the same on every process.
      left_out: sorted pairs (query, index), int64 [n] each, that are not ranked.
    """
    rank, size = self._communicator.rank, self._communicator.size
    first = rank * len(self.catalogue.keys) // size
    known = np.flatnonzero(ranking.is_trained(items))
    column = np.full([len(items) + 1], -1)
    column[known] = np.arange(len(known))
    is_mine = (left_out[1] >= first) & (left_out[1] < first + len(items))
    of_query, mine = left_out[0][is_mine], column[left_out[1][is_mine] - first]
    of_query, mine = of_query[mine >= 0], mine[mine >= 0]
    began = time.monotonic()

    def pairs(start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
      low, high = np.searchsorted(of_query, [start, end])
      return of_query[low:high] - start, mine[low:high]

    def on_block(done: int) -> None:
      nonlocal began
      self._inputs.progress_made()
      if time.monotonic() - began > _SECONDS_BETWEEN_LINES:
        began = time.monotonic()
        self._inputs.show(f'ranking {len(self.catalogue.keys):,} items · {done / len(queries):.0%}')

    scores, places = ranking.top_k(queries, items[known], k, pairs, on_block)
    no_item = len(self.catalogue.keys)
    places = np.append(known + first, no_item)[places]
    if size > 1:
      parts = self._communicator.gather([scores, places])
      scores, places = ranking.merged(*zip(*parts), k)
    return places, scores

  def item_vectors(self) -> np.ndarray:
    """Returns the vectors of this process's share of the catalogue, float32 [C', d].

    An item of which nothing is known, no feature with a row and no dense column, has vector 0,
    whatever the tower computes of its biases.
    """
    vectors, slots = [], len(self._cfg.data.slots)
    reads_dense = bool(self._cfg.model.retrieval.item.dense)
    rank, size = self._communicator.rank, self._communicator.size
    for batch in self.catalogue.batches(_VECTORS_AT_ONCE, rank, size):
      of_batch, has_row = self._step.predict_and_know(self._step.stage(batch))
      known = np.full([len(of_batch)], reads_dense)
      known[batch.segments[has_row] // slots] = True
      vectors.append(of_batch[:, 1] * known[:, None])
      self._inputs.progress_made()
    return np.concatenate(vectors)

  def all_item_vectors(self) -> tuple[np.ndarray, np.ndarray]:
    """Returns the trained items of the catalogue, the most shown first, the same on every process.

    Returns:
      Keys int64 [C] and vectors float32 [C, d].
    """
    self._refresh()
    vectors = np.concatenate(self._communicator.gather(self.item_vectors()))
    order = np.argsort(-self.catalogue.shows, kind='stable')
    order = order[ranking.is_trained(vectors)[order]]
    return self.catalogue.keys[order], vectors[order]

  def query_vectors(self, prepared: Sequence[PreparedPass], users: np.ndarray) -> np.ndarray:
    """Returns the vector of each user, computed from the user's first sample in the passes.

    Args:
      users: int64 [Q], ascending; each has a positive there.
    Returns:
      float32 [Q, d], the same on every process.
    """
    first: dict[int, np.ndarray] = {}
    left = np.ones([len(users)], bool)
    for i, data_pass in enumerate(prepared):
      samples = np.full([len(users)], -1)
      start = 0
      for batch in data_pass.batches(_SAMPLES_AT_ONCE):
        group, at = np.unique(batch.group, return_index=True)
        place = np.minimum(np.searchsorted(users, group), len(users) - 1)
        is_new = (users[place] == group) & left[place]
        samples[place[is_new]] = start + at[is_new]
        left[place[is_new]] = False
        start += len(batch.label)
      first[i] = samples
    rank, size = self._communicator.rank, self._communicator.size
    share = range(rank * len(users) // size, (rank + 1) * len(users) // size)
    vectors, most = [], -(-len(users) // size)
    for start in range(0, most, _VECTORS_AT_ONCE):
      mine = np.array(share[start : start + _VECTORS_AT_ONCE], np.int64)
      for i, data_pass in enumerate(prepared):
        samples = first[i][mine]
        batch = data_pass.gather(samples[samples >= 0])
        vectors.append((mine[samples >= 0], self._vectors(batch)))
    own = np.concatenate([v for _, v in vectors])[
      np.argsort(np.concatenate([m for m, _ in vectors]))
    ]
    return np.concatenate(self._communicator.gather(own)) if size > 1 else own

  def _vectors(self, batch: SlotBatch) -> np.ndarray:
    """Returns the vectors of the queries of this process's samples."""
    self._inputs.progress_made()
    return self._step.predict(self._step.stage(batch))[:, 0]

  def _left_out(self, users: np.ndarray, seen: Positives) -> tuple[np.ndarray, np.ndarray]:
    """Returns the items that each query's user has seen: pairs (query, index in the catalogue)."""
    low, high = (np.searchsorted(seen.users, users, side) for side in ('left', 'right'))
    counts = high - low
    before = np.cumsum(counts) - counts
    query = np.repeat(np.arange(len(users)), counts)
    place = self.catalogue.places(seen.items[np.arange(len(query)) + (low - before)[query]])
    return query[place >= 0], place[place >= 0]

  def _seen_passes(self, prepared: Sequence[PreparedPass]) -> list[PreparedPass]:
    data, found = self._cfg.data, []
    if data.watch:
      return []
    evaluated = {data_pass.meta['source']['path'] for data_pass in prepared}
    for split in ('train', 'valid'):
      listed = passes(self._cfg, getattr(data, split), f'data.{split}')
      found += self._inputs.prepared(listed, split)
    return [data_pass for data_pass in found if data_pass.meta['source']['path'] not in evaluated]

  def _positives(self, prepared: Sequence[PreparedPass]) -> Positives:
    for data_pass in prepared:
      if data_pass.path not in self._positives_by_path:
        self._positives_by_path[data_pass.path] = self._positives_of(data_pass)
    empty = np.zeros([0], np.int64)
    parts = [self._positives_by_path[data_pass.path] for data_pass in prepared]
    return Positives.of(*map(np.concatenate, zip(Positives(empty, empty), *parts)))

  def _positives_of(self, data_pass: PreparedPass) -> Positives:
    users, items = [np.zeros([0], np.int64)], [np.zeros([0], np.int64)]
    for batch in data_pass.batches(_SAMPLES_AT_ONCE):
      own = sole_features(batch, self.catalogue.field, len(self._cfg.data.slots))
      is_positive = (batch.label > 0.5) & (own >= 0)
      users.append(batch.group[is_positive])
      items.append(own[is_positive])
    return Positives.of(np.concatenate(users), np.concatenate(items))
