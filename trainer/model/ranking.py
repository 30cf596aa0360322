"""Rankings of a catalogue: the best items of each query, exactly, and what they are worth.

Shapes: Q queries, C items, K the length of a ranking.
"""

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from ops.tensors import aligned, share

_SCORES_AT_ONCE = 1 << 24
POPULAR = 0.1  # the share of the catalogue that counts as popular


def top_k(
  queries: np.ndarray,
  items: np.ndarray,
  k: int,
  left_out: Callable[[int, int], tuple[np.ndarray, np.ndarray]],
  on_block: Callable[[int], None] = lambda done: None,
) -> tuple[np.ndarray, np.ndarray]:
  """Finds the items of the greatest scores ⟨query, item⟩; of equal ones those of lower places.

  Args:
    queries: float32 [Q, d].
    items: float32 [C, d].
    k: how many.
    left_out: (start, end) -> the pairs (query − start, item) of queries [start, end) whose item is
      not to be found: int64 [n] each.
    on_block: called with the number of queries that are done.
  Returns:
    scores float32 [Q, k], descending, and places int64 [Q, k]; −inf and C where there are fewer.
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
    found = tf.math.top_k(share(block), k_here)
    scores[start:end, :k_here], places[start:end, :k_here] = (t.numpy() for t in found)
    on_block(end)
  places[scores == -np.inf] = len(items)
  return scores, places


def merged(
  scores: Sequence[np.ndarray], places: Sequence[np.ndarray], k: int
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the best k of rankings of parts of a catalogue, likewise; arrays [Q, k] of each."""
  all_scores, all_places = np.concatenate(scores, 1), np.concatenate(places, 1)
  order = np.lexsort((all_places, -all_scores))[:, :k]
  return np.take_along_axis(all_scores, order, 1), np.take_along_axis(all_places, order, 1)


def judge(
  found: np.ndarray,
  wanted: tuple[np.ndarray, np.ndarray],
  sought: np.ndarray,
  shows: np.ndarray,
  eval_at: Sequence[int],
) -> dict[str, float]:
  """Returns the means over queries of what their rankings are worth.

  With h_i whether the item at rank i is one of a query's n wanted ones:

      recall@K = Σ_{i ≤ K} h_i / n
      ndcg@K = Σ_{i ≤ K} h_i / log₂(i + 1), divided by the same of min(n, K) hits at the top
      hitrate@K = whether Σ_{i ≤ K} h_i > 0
      mrr@K = 1 / the least i ≤ K with h_i, or 0
      coverage@K = the share of the catalogue that is in any ranking
      popular@K = the share of the rankings that is of the tenth of the catalogue with most shows

  Args:
    found: int64 [Q, at least the greatest K], places in the catalogue, C where there is none.
    wanted: the pairs (query, place) that are to be found, int64 [n] each, distinct, by query.
    sought: int64 [Q], how many items each query wants, those included that are not in the
      catalogue.
    shows: float64 [C].
    eval_at: each K.
  """
  count, items = len(found), len(shows)
  codes = np.sort(wanted[0] * (items + 1) + wanted[1])
  mine = np.arange(count)[:, None] * (items + 1) + found
  at = np.minimum(np.searchsorted(codes, mine), max(0, len(codes) - 1))
  hits = (codes[at] == mine) & (found < items) if len(codes) else np.zeros(found.shape, bool)
  gains = 1 / np.log2(np.arange(2, found.shape[1] + 2))
  ideal = np.concatenate([[0], np.cumsum(gains)])
  is_popular = np.zeros([items + 1], bool)
  is_popular[np.argsort(-shows, kind='stable')[: round(POPULAR * items)]] = True
  values = {}
  for k in eval_at:
    of_k, recommended = hits[:, :k], found[:, :k]
    numbers = of_k.sum(1)
    first = np.where(numbers > 0, of_k.argmax(1) + 1, np.inf)
    there = recommended[recommended < items]
    values |= {
      f'recall@{k}': float(np.mean(numbers / sought)),
      f'ndcg@{k}': float(np.mean(of_k @ gains[:k] / ideal[np.minimum(sought, k)])),
      f'hitrate@{k}': float(np.mean(numbers > 0)),
      f'mrr@{k}': float(np.mean(1 / first)),
      f'coverage@{k}': len(np.unique(there)) / max(1, items),
      f'popular@{k}': float(np.mean(is_popular[there])) if len(there) else 0.0,
    }
  return values
