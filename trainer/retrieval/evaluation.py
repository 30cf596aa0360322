"""Judges a model with model.retrieval: ranks the whole catalogue."""

from collections.abc import Iterator, Sequence

import numpy as np

from trainer.config.retrieval import Retrieval
from trainer.data.prepared import PreparedPass
from trainer.errors import UserError
from trainer.evaluation.evaluators import Evaluator
from trainer.plain_data import Json
from trainer.retrieval.ranker import Ranker
from trainer.retrieval.ranking import judge


class RankingEvaluation(Evaluator):
  """Ranks the whole catalogue for the users of passes, and measures the rankings."""

  def __init__(self, settings: Retrieval, ranker: Ranker):
    self._eval_at, self._metrics, self._ranker = settings.eval_at, settings.metrics(), ranker

  def figures(
    self, prepared: Sequence[PreparedPass], in_log: bool = False
  ) -> Iterator[tuple[str, Json]]:
    """Yields how high the rankings place the positives that users have in the passes.

    The items that a user has as positives in other passes of data.train and data.valid are neither
    ranked for the user nor counted as positives. With data.watch, all items are ranked.

    The figures are the metrics of trainer.retrieval.ranking.judge, and three counts: `queries`
    (users), `items` (of the catalogue) and `examples` (positives). `base_recall@K` and so on are
    the metrics if every user gets the most shown items. `unknown_queries` is the share of queries
    of which the model knows nothing: they are empty, or of features without factors. `in_log` has
    no effect.

    Raises:
      UserError: if a K of model.retrieval.eval_at exceeds the catalogue, or no positive is left.
    """
    ranker, most = self._ranker, max(self._eval_at)
    ranker.refresh('model.retrieval.eval_at', most)
    seen = ranker.seen(prepared)
    merged = ranker.pairs(prepared).merge(seen, 'left', indicator='source')
    wanted = merged[merged['source'] == 'left_only']
    if not len(wanted):
      where = ', '.join(data_pass.name for data_pass in prepared)
      raise UserError(f'{where}: no positive that is not in data.train; wanted some to find')
    users, counts = np.unique(wanted['user'], return_counts=True)
    queries, known = ranker.query_vectors(prepared, users)
    left_out = ranker.left_out(users, seen)
    ranked, _ = ranker.rank(queries, left_out, most, ranker.item_vectors())
    catalogue, of_query = ranker.catalogue, np.searchsorted(users, wanted['user'])
    place = catalogue.places(wanted['item'].to_numpy())
    pairs = of_query[place >= 0], place[place >= 0]
    judged = pairs, counts, catalogue.shows, self._eval_at
    yield from judge(ranked, *judged).items()
    base = judge(ranker.rank_by_shows(len(users), left_out, most), *judged)
    yield from ((f'base_{name}', base[name]) for name in self._metrics)
    yield from {
      'unknown_queries': 1 - float(known.mean()),
      'queries': len(users),
      'items': len(catalogue.keys),
      'examples': len(wanted),
    }.items()
