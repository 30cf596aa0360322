"""Ranks the catalogue of a model with model.retrieval for queries."""

import time
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pandas as pd
from absl import logging

from trainer.config import Config
from trainer.data.arrays import ranges
from trainer.data.features import SlotBatch, sole_features
from trainer.data.prepared import PreparedPass
from trainer.errors import UserError
from trainer.retrieval import ranking
from trainer.training.inputs import Inputs

_SAMPLES_AT_ONCE = 65536
_VECTORS_AT_ONCE = 8192
_SECONDS_BETWEEN_LINES = 0.5


class Ranker:
  """Finds the best items of the catalogue for queries.

  Every process calls each method. A process computes the vectors of its share of the queries and of
  its share of the items. It receives the vectors of all queries, and ranks its items for each. The
  best items of all processes then make the ranking.

  Pairs of a user and an item are tables with int64 columns `user` and `item`, sorted by user and
  without duplicates.
  """

  def __init__(self, cfg: Config, inputs: Inputs):
    self._cfg, self._inputs = cfg, inputs
    self._communicator, self._step = inputs.communicator, inputs.step
    self.catalogue = inputs.step.dense.catalogue  # the items at the time of the last ranking
    self._pairs_by_path: dict[tuple[str, bool], pd.DataFrame] = {}

  def refresh(self, key: str | None = None, k: int = 0) -> None:
    """Reads the catalogue anew; UserError about the config's `key` if it has fewer than k items."""
    self._inputs.items()  # which also hands them to the catalogue
    self.catalogue.refresh(self._step.store, self._communicator)
    if k > (count := len(self.catalogue.keys)):
      raise UserError(f'{key}: found {k}; wanted at most {count:,}, the items of the catalogue')

  def recommend(
    self, prepared: Sequence[PreparedPass], k: int
  ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the best k items of each sample, in the order of samples, for n samples at a time.

    Items that the sample's user has in data.train or data.valid, with a positive label or, by
    model.retrieval.leave_out: seen, with any, are left out; in a run that follows a stream
    (data.watch), none are. A sample gets no items if none of its query's features has a row and the
    query's vector is 0. A warning tells how many samples get none.

    Yields:
      The keys of the items, int64 [n, k], −1 where there are fewer than k items, and their scores,
      float32 [n, k], descending.
    Raises:
      UserError: if k is above the size of the catalogue.
    """
    self.refresh('k', k)
    unknown: list[int] = []  # numbers of samples
    before = 0  # samples of earlier passes
    rank, size = self._communicator.rank, self._communicator.size
    keys, items = np.append(self.catalogue.keys, -1), self.item_vectors()
    seen = self.seen(prepared, self._cfg.model.retrieval.leave_out == 'seen')
    for data_pass in prepared:
      for start in range(0, data_pass.num_samples, _VECTORS_AT_ONCE):
        samples = np.arange(start, min(start + _VECTORS_AT_ONCE, data_pass.num_samples))
        batch = data_pass.gather(np.array_split(samples, size)[rank])
        own = [self._vectors(batch)[0], batch.group]
        queries, users = map(np.concatenate, zip(*self._communicator.gather(own)))
        places, scores = self.rank(queries, self.left_out(users, seen), k, items)
        unknown += (before + samples[~queries.any(1)]).tolist()
        yield keys[places], scores
      before += data_pass.num_samples
    if unknown and rank == 0:
      told = 'no items for %d of %d samples, whose queries have no feature with a row: sample %d%s'
      logging.warning(told, len(unknown), before, unknown[0], ' and others' * (len(unknown) > 1))

  def rank(
    self, queries: np.ndarray, left_out: tuple[np.ndarray, np.ndarray], k: int, items: np.ndarray
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns the best k items of each query, the best first; the same on every process.

    These are indices in the catalogue, int64, and scores, float32, each [Q, k]. Where a query has
    fewer than k items, the index is the size of the catalogue. A query of zeros has none.

    Args:
      queries: vectors, float32 [Q, d], the same on every process.
      left_out: the pairs that are not ranked, as the method `left_out` returns them.
      items: the vectors of this process's share of the catalogue, from `item_vectors`.
    """
    rank, size = self._communicator.rank, self._communicator.size
    first = rank * len(self.catalogue.keys) // size
    known = np.flatnonzero(items.any(1))
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
    places[~queries.any(1)] = no_item
    return places, scores

  def rank_by_shows(
    self, queries: int, left_out: tuple[np.ndarray, np.ndarray], k: int
  ) -> np.ndarray:
    """Returns the k most shown items for each of some queries, as the method `rank` does.

    Items that were never shown are left out.
    """
    shows, (rank, size) = self.catalogue.shows, (self._communicator.rank, self._communicator.size)
    longest = int(np.bincount(left_out[0], minlength=1).max())
    best = np.argsort(-shows, kind='stable')[: k + longest]  # no query gets others
    scores = np.zeros([len(shows), 1], np.float32)
    scores[best, 0] = shows[best]
    own = scores[rank * len(shows) // size : (rank + 1) * len(shows) // size]
    return self.rank(np.ones([queries, 1], np.float32), left_out, k, own)[0]

  def item_vectors(self) -> np.ndarray:
    """Returns the vectors of this process's share of the catalogue, float32 [items, d].

    Nothing is known of an item if none of its features has factors and its dense columns are blank.
    Then it gets the zero vector, not the vector that the item tower would make of its biases alone.
    """
    rank, size = self._communicator.rank, self._communicator.size
    batches = self.catalogue.batches(_VECTORS_AT_ONCE, rank, size)
    of_batches = (self._vectors(batch, 'item') for batch in batches)
    return np.concatenate([vectors * known[:, None] for vectors, known in of_batches])

  def _vectors(self, batch: SlotBatch, side: str = 'query') -> tuple[np.ndarray, np.ndarray]:
    """Returns a tower's vector of each sample in a batch, float32 [B, d], and which are known.

    Known are samples of which the tower, `query` or `item`, knows a feature or a number, bool [B].
    """
    self._inputs.progress_made()
    vectors, has_factors = self._step.predict_and_know(self._step.stage(batch))
    tower = self._cfg.model.towers[side]
    data, slots = self._cfg.data, [slot.name for slot in self._cfg.ordered_slots]
    known = ~np.isnan(batch.dense[:, [c.name in tower.dense for c in data.dense]]).all(1)
    segments = batch.segments if len(batch.segments) else np.arange(len(batch.keys))
    sample, field = divmod(segments[has_factors], len(slots))
    known[sample[np.isin(slots, tower.slots)[field]]] = True
    return vectors[:, ('query', 'item').index(side)], known

  def all_item_vectors(self) -> tuple[np.ndarray, np.ndarray]:
    """Returns the keys of the trained items, int64 [n], and their vectors, float32 [n, d].

    Every process gets the same: items by falling shows, without those whose vector is 0.
    """
    self.refresh()
    vectors = np.concatenate(self._communicator.gather(self.item_vectors()))
    order = np.argsort(-self.catalogue.shows, kind='stable')
    order = order[vectors.any(1)[order]]
    return self.catalogue.keys[order], vectors[order]

  def query_vectors(
    self, prepared: Sequence[PreparedPass], users: np.ndarray
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns the vector of each user's first sample in the passes, float32 [Q, d], everywhere.

    Also, bool [Q], whether the query tower knows anything of it. `users` are int64 [Q], ascending;
    each has a sample in the passes.
    """
    samples, no_groups = [], np.zeros([0], np.int64)
    for i, data_pass in enumerate(prepared):
      groups = [batch.group for batch in data_pass.batches(_SAMPLES_AT_ONCE)]
      groups = np.concatenate([no_groups, *groups])
      of_pass = pd.DataFrame({'user': groups, 'pass': i, 'sample': np.arange(len(groups))})
      samples.append(of_pass.drop_duplicates('user'))
    first = pd.concat(samples).drop_duplicates('user').set_index('user').loc[users]
    rank, size = self._communicator.rank, self._communicator.size
    own = first[rank * len(users) // size : (rank + 1) * len(users) // size]
    places, parts = [], []
    for start in range(0, -(-len(users) // size), _VECTORS_AT_ONCE):  # equally often on all ranks
      block = own[start : start + _VECTORS_AT_ONCE]
      for i, data_pass in enumerate(prepared):
        here = np.flatnonzero(block['pass'] == i)
        places.append(start + here)
        parts.append(self._vectors(data_pass.gather(block['sample'].to_numpy()[here])))
    order = np.argsort(np.concatenate(places))
    mine = [np.concatenate(of_part)[order] for of_part in zip(*parts)]
    return tuple(map(np.concatenate, zip(*self._communicator.gather(mine))))

  def left_out(self, users: np.ndarray, seen: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Returns which items the user of each query, `users`, int64 [Q], has in the pairs `seen`.

    These are indices of queries and indices in the catalogue, both int64 [n], sorted by query.
    """
    low, high = (np.searchsorted(seen['user'], users, side) for side in ('left', 'right'))
    query = np.repeat(np.arange(len(users)), high - low)
    place = self.catalogue.places(seen['item'].to_numpy()[ranges(low, high - low)])
    return query[place >= 0], place[place >= 0]

  def seen(self, prepared: Sequence[PreparedPass], has_all: bool = False) -> pd.DataFrame:
    """Returns the `pairs` of other passes of data.train and data.valid; none of a stream."""
    splits = () if self._cfg.data.stream else ('train', 'valid')
    seen = [data_pass for split in splits for data_pass in self._inputs.of_split(split)]
    judged = {data_pass.meta['source']['path'] for data_pass in prepared}
    others = [other for other in seen if other.meta['source']['path'] not in judged]
    return self.pairs(others, has_all)

  def pairs(self, prepared: Sequence[PreparedPass], has_all: bool = False) -> pd.DataFrame:
    """Returns the pairs of passes: those of the positives or, if `has_all`, of all samples."""
    known = self._pairs_by_path
    for data_pass in prepared:
      if (key := (data_pass.path, has_all)) not in known:
        batches = data_pass.batches(_SAMPLES_AT_ONCE)
        known[key] = _distinct(self._pairs_of(batch, has_all) for batch in batches)
    return _distinct(known[data_pass.path, has_all] for data_pass in prepared)

  def _pairs_of(self, batch: SlotBatch, has_all: bool) -> pd.DataFrame:
    items = sole_features(batch, self.catalogue.field, len(self._cfg.data.slots))
    is_pair = ((batch.label > 0.5) | has_all) & (items >= 0)
    return pd.DataFrame({'user': batch.group[is_pair], 'item': items[is_pair]})


def _distinct(parts: Iterable[pd.DataFrame]) -> pd.DataFrame:
  """Joins tables of pairs into one, sorted and without duplicates."""
  none = pd.DataFrame({'user': [], 'item': []}, dtype=np.int64)
  pairs = pd.concat([none, *parts]).drop_duplicates()
  return pairs.sort_values(['user', 'item'], ignore_index=True)
