"""Judges a model with model.retrieval by ranking the whole catalogue for each query."""

import collections
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from trainer import config
from trainer.comm.communicator import Communicator
from trainer.data.features import SlotBatch, sole_features
from trainer.data.passes import passes
from trainer.data.prepared import PreparedPass
from trainer.errors import UserError
from trainer.model import ranking
from trainer.plain_data import Json
from trainer.training.inputs import Inputs
from trainer.training.step import Step

_SAMPLES_AT_ONCE = 65536
_VECTORS_AT_ONCE = 8192
_SECONDS_BETWEEN_LINES = 0.5


class Positives(NamedTuple):
  """Pairs of a user and an item, by user, then item, each once."""

  users: np.ndarray  # int64 [n]
  items: np.ndarray  # int64 [n]

  @classmethod
  def of(cls, users: np.ndarray, items: np.ndarray) -> 'Positives':
    """Returns pairs in order."""
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
  """Ranks the catalogue for the users of passes; has the verbs of Evaluation that a job calls.

  Every process calls it. Each makes the vectors of its share of the queries and of the items, gets
  those of all queries, and ranks its items; the best of all of them are the ranking.

  Args:
    cfg: a config with model.retrieval.
    communicator: how the processes meet.
    step: the model and its rows.
    inputs: gives passes.
    progress_made: called after each chunk of work.
    show: shows a line on the progress.

  Attributes:
    predictions: None: there are no probabilities.
    slots_before: empty.
  """

  predictions = None

  def __init__(
    self,
    cfg: config.Config,
    communicator: Communicator,
    step: Step,
    inputs: Inputs,
    progress_made: Callable[[], None],
    show: Callable[[str], None] = lambda text: None,
  ):
    self._cfg, self._communicator, self._step, self._inputs = cfg, communicator, step, inputs
    self._progress_made, self._show = progress_made, show
    self._catalogue = step.dense.catalogue
    self._eval_at = cfg.model.retrieval.eval_at
    self._found: dict[str, Positives] = {}  # by the path of a pass
    self.slots_before: collections.deque[Mapping[str, Json]] = collections.deque(maxlen=0)

  def evaluate(
    self, prepared: Sequence[PreparedPass], in_log: bool = False
  ) -> dict[str, float | int]:
    """Judges the rankings of the users of these passes, who want their positives there.

    Their items in data.train, and in data.valid where that is not what is evaluated, are neither
    recommended nor wanted. With data.watch, none is left out.

    Args:
      prepared: the passes.
      in_log: has no effect.
    Returns:
      What trainer.model.ranking.judge returns, and queries, items (of the catalogue) and examples
      (the positives).
    Raises:
      UserError: where a K is above the catalogue's size, or there is no positive.
    """
    del in_log
    self._catalogue.refresh(self._step.store, self._communicator)
    keys, most = self._catalogue.keys, max(self._eval_at)
    if most > len(keys):
      raise UserError(
        f'model.retrieval.eval_at: found {most}; the catalogue has {len(keys):,} items, wanted at '
        'most so many'
      )
    seen = self._positives(self._seen_passes(prepared))
    wanted = self._positives(prepared).without(seen)
    if not len(wanted.users):
      where = ', '.join(one.name for one in prepared)
      raise UserError(f'{where}: no positive that is not in data.train; wanted some to find')
    users, sought = np.unique(wanted.users, return_counts=True)
    queries = self.query_vectors(prepared, users)
    found, _ = self.rank(queries, self._pairs(users, seen), most)
    of_query, place = np.searchsorted(users, wanted.users), self._catalogue.places(wanted.items)
    pairs = of_query[place >= 0], place[place >= 0]
    values = ranking.judge(found, pairs, sought, self._catalogue.shows, self._eval_at)
    return values | {'queries': len(users), 'items': len(keys), 'examples': len(wanted.users)}

  def tell_unknown(self) -> None:
    """Does nothing: what a ranking does not know is not in it."""

  def rank(
    self, queries: np.ndarray, left_out: tuple[np.ndarray, np.ndarray], k: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns the best k items of each query: places in the catalogue and scores, [Q, k].

    Args:
      queries: float32 [Q, d], the same on every process.
      left_out: pairs (query, place) in order, int64 [n] each, that are not to be found.
      k: how many.
    """
    rank, size = self._communicator.rank, self._communicator.size
    items = self.item_vectors()
    first = rank * len(self._catalogue.keys) // size
    # Nothing is known of an item whose vector is 0.
    known = np.flatnonzero(np.any(items != 0, 1))
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
      self._progress_made()
      if time.monotonic() - began > _SECONDS_BETWEEN_LINES:
        began = time.monotonic()
        self._show(f'ranking {len(self._catalogue.keys):,} items · {done / len(queries):.0%}')

    scores, places = ranking.top_k(queries, items[known], k, pairs, on_block)
    none = len(self._catalogue.keys)
    places = np.append(known + first, none)[places]
    if size > 1:
      parts = self._communicator.gather([scores, places])
      scores, places = ranking.merged(*zip(*parts), k)
    return places, scores

  def item_vectors(self) -> np.ndarray:
    """Returns the vectors of this process's share of the catalogue, float32 [C', d]."""
    size = self._communicator.size
    shares = self._catalogue.batches(_VECTORS_AT_ONCE, self._communicator.rank, size)
    return self._vectors(shares, 1)

  def query_vectors(self, prepared: Sequence[PreparedPass], users: np.ndarray) -> np.ndarray:
    """Returns the vectors of users, as the first sample of each in the passes has them.

    Args:
      prepared: the passes.
      users: int64 [Q], ascending; each has a positive there.
    Returns:
      float32 [Q, d], the same on every process.
    """
    first: dict[int, np.ndarray] = {}
    left = np.ones([len(users)], bool)
    for i, one in enumerate(prepared):
      samples = np.full([len(users)], -1)
      start = 0
      for batch in one.batches(_SAMPLES_AT_ONCE):
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
      for i, one in enumerate(prepared):
        samples = first[i][mine]
        batch = one.gather(samples[samples >= 0])
        vectors.append((mine[samples >= 0], self._vectors([batch], 0)))
    own = np.concatenate([v for _, v in vectors])[
      np.argsort(np.concatenate([m for m, _ in vectors]))
    ]
    return np.concatenate(self._communicator.gather(own)) if size > 1 else own

  def _vectors(self, batches: Iterable[SlotBatch], side: int) -> np.ndarray:
    """Returns the vectors of queries (side 0) or items (1) of this process's samples."""
    vectors = []
    for batch in batches:
      vectors.append(self._step.predict(self._step.stage(batch))[:, side])
      self._progress_made()
    return np.concatenate(vectors)

  def _pairs(self, users: np.ndarray, seen: Positives) -> tuple[np.ndarray, np.ndarray]:
    """Returns what was seen as pairs (query, place in the catalogue), by query."""
    query = np.minimum(np.searchsorted(users, seen.users), len(users) - 1)
    place = self._catalogue.places(seen.items)
    kept = (users[query] == seen.users) & (place >= 0)
    return query[kept], place[kept]

  def _seen_passes(self, prepared: Sequence[PreparedPass]) -> list[PreparedPass]:
    data, found = self._cfg.data, []
    if data.watch:
      return []
    evaluated = {one.meta['source']['path'] for one in prepared}
    for split in ('train', 'valid'):
      listed = passes(self._cfg, getattr(data, split), f'data.{split}')
      found += self._inputs.prepared(listed, split)
    return [one for one in found if one.meta['source']['path'] not in evaluated]

  def _positives(self, prepared: Sequence[PreparedPass]) -> Positives:
    for one in prepared:
      if one.path not in self._found:
        self._found[one.path] = self._positives_of(one)
    parts = [self._found[one.path] for one in prepared]
    none = np.zeros([0], np.int64)
    return (
      Positives.of(*(np.concatenate([none, *part]) for part in zip(*parts)))
      if parts
      else (Positives(none, none))
    )

  def _positives_of(self, one: PreparedPass) -> Positives:
    users, items = [np.zeros([0], np.int64)], [np.zeros([0], np.int64)]
    for batch in one.batches(_SAMPLES_AT_ONCE):
      own = sole_features(batch, self._catalogue.field, len(self._cfg.slots))
      is_positive = (batch.label > 0.5) & (own >= 0)
      users.append(batch.group[is_positive])
      items.append(own[is_positive])
    return Positives.of(np.concatenate(users), np.concatenate(items))
