"""Exact rankings of a catalogue, and their metrics, for Q queries, C items and K ranks."""

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from ops.tensors import aligned, share
from trainer.data.arrays import places

_SCORES_AT_ONCE = 1 << 24
POPULAR = 0.1  # the share of the catalogue that counts as popular


def top_k(
  queries: np.ndarray,
  items: np.ndarray,
  k: int,
  left_out: Callable[[int, int], tuple[np.ndarray, np.ndarray]],
  on_block: Callable[[int], None] = lambda done: None,
) -> tuple[np.ndarray, np.ndarray]:
  """Finds the items with the highest scores ⟨query, item⟩; of equal scores, the lower index wins.

  Returns the scores, float32 [Q, k], descending, and the items' indices, int64 [Q, k]. If fewer
  than k items are left, the row ends with scores −inf and indices C.

  Args:
    left_out: a function of (start, end) that returns the items to leave out for the queries start,
      …, end − 1, as n pairs: queries' indices minus start, and items' indices, int64 [n] each.
    on_block: called after each block of queries with the number of queries that are done.
  """
  k_here, count = min(k, len(items)), max(1, _SCORES_AT_ONCE // max(1, len(items)))
  scores = np.full([len(queries), k], -np.inf, np.float32)
  places = np.full([len(queries), k], len(items), np.int64)
  transposed = np.ascontiguousarray(items.T)
  for start in range(0, len(queries), count):
    end = min(start + count, len(queries))
    block = aligned([end - start, len(items)], np.float32)
    np.matmul(queries[start:end], transposed, out=block)
    block[left_out(start, end)] = -np.inf
    best = tf.math.top_k(share(block), k_here)
    scores[start:end, :k_here], places[start:end, :k_here] = (t.numpy() for t in best)
    on_block(end)
  places[scores == -np.inf] = len(items)
  return scores, places


def merged(
  scores: Sequence[np.ndarray], places: Sequence[np.ndarray], k: int
) -> tuple[np.ndarray, np.ndarray]:
  """Merges the rankings of parts of a catalogue to that of the best k items, [Q, k] each.

  Each part has scores, float32, and places, the items' indices in the whole catalogue, int64.
  """
  all_scores, all_places = np.concatenate(scores, 1), np.concatenate(places, 1)
  order = np.lexsort((all_places, -all_scores))[:, :k]
  return np.take_along_axis(all_scores, order, 1), np.take_along_axis(all_places, order, 1)


def judge(
  ranked: np.ndarray,
  positives: tuple[np.ndarray, np.ndarray],
  counts: np.ndarray,
  shows: np.ndarray,
  eval_at: Sequence[int],
) -> dict[str, float]:
  """Returns ranking metrics; all but coverage and popular are means over the queries.

  With h_i = 1 if the item at rank i is one of the query's n positives, else 0:

      recall@K = Σ_{i ≤ K} h_i / n
      ndcg@K = Σ_{i ≤ K} h_i / log₂(i + 1), divided by its value for min(n, K) hits at the top
      hitrate@K = 1 if Σ_{i ≤ K} h_i > 0, else 0
      mrr@K = 1 / i for the least i ≤ K with h_i = 1, or 0 if there is none
      coverage@K = the share of the catalogue that is at a rank ≤ K of any query
      popular@K = the share of the items at ranks ≤ K that are among the 10 % of the catalogue's
                  items with the most shows

  Args:
    ranked: int64 [Q, at least the greatest K], each query's items, best first, as indices in the
      catalogue; C for none.
    positives: distinct pairs (query, index of the item), int64 [p] each, sorted by query.
    counts: int64 [Q], n for each query; it includes positives that are not in the catalogue.
    shows: float64 [C], the impressions of each item of the catalogue.
  """
  items = len(shows)
  codes = np.sort(positives[0] * (items + 1) + positives[1])
  mine = np.arange(len(ranked))[:, None] * (items + 1) + ranked
  hits = (places(codes, mine) >= 0) & (ranked < items)
  gains = 1 / np.log2(np.arange(2, ranked.shape[1] + 2))
  ideal = np.concatenate([[0], np.cumsum(gains)])
  is_popular = np.zeros([items + 1], bool)
  is_popular[np.argsort(-shows, kind='stable')[: round(POPULAR * items)]] = True
  values = {}
  for k in eval_at:
    of_k, recommended = hits[:, :k], ranked[:, :k]
    numbers = of_k.sum(1)
    first = np.where(numbers > 0, of_k.argmax(1) + 1, np.inf)
    there = recommended[recommended < items]
    values |= {
      f'recall@{k}': float(np.mean(numbers / counts)),
      f'ndcg@{k}': float(np.mean(of_k @ gains[:k] / ideal[np.minimum(counts, k)])),
      f'hitrate@{k}': float(np.mean(numbers > 0)),
      f'mrr@{k}': float(np.mean(1 / first)),
      f'coverage@{k}': len(np.unique(there)) / max(1, items),
      f'popular@{k}': float(np.mean(is_popular[there])) if len(there) else 0.0,
    }
  return values
