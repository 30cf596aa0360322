"""Finds the items with the highest scores for a query's vector, exactly or by a faiss index."""

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from trainer.data.arrays import places
from trainer.retrieval.items import INDEX, PROBES, Change, Items, has_faiss, import_faiss, read
from trainer.storage.chain import RowExport

EXACT_UP_TO = 100_000  # items; to search so many exactly takes some milliseconds
_MOST_REPLACED = 0.25  # share of the index's items; if more are replaced, it is not used


class _Index(NamedTuple):
  """The faiss index of a base export; later deltas may have replaced some of its n vectors."""

  lists: Any  # faiss.IndexIVFFlat
  keys: np.ndarray  # int64 [n], of the items in the order of the index
  # int64 [n], each item's place in ItemSearch.items; −1 if it was removed or its vector replaced.
  place: np.ndarray


class ItemSearch:
  """Searches the C items of one version, with vectors of width d. Threads may share it.

  If there are more than `exact_up_to` items and their base has an index, the index is searched,
  approximately, and the items that deltas have changed since, exactly. Once deltas have replaced or
  removed more than a quarter of the index's items, all are searched exactly, until the next base.

  Attributes:
    items: in ascending order of their keys.
    by_index: whether `best` searches the index.
  """

  def __init__(self, items: Items, index: _Index | None = None, exact_up_to: int = EXACT_UP_TO):
    self.items, self._exact_up_to, self._index = items, exact_up_to, index
    self.by_index = index is not None and len(items.keys) > exact_up_to
    if self.by_index:
      is_current = index.place >= 0
      self.by_index = np.mean(is_current) >= 1 - _MOST_REPLACED
      self._current = np.packbits(is_current, bitorder='little')
      self._number = np.full([len(items.keys)], -1)  # each item's number in the index, or −1
      self._number[index.place[is_current]] = np.flatnonzero(is_current)
      self._others = np.flatnonzero(self._number < 0)  # places of items not in the index
      self._of_others = items.vectors[self._others]

  @classmethod
  def of_base(cls, export: RowExport, exact_up_to: int = EXACT_UP_TO) -> 'ItemSearch':
    """Returns the ItemSearch of a base export, with its index if needed and faiss is installed."""
    unsorted = read(export).items
    items, data = unsorted.by_key(), None
    if has_faiss() and len(items.keys) > exact_up_to:
      data = export.content(INDEX)
    if data is None:
      return cls(items, None, exact_up_to)
    lists = import_faiss().deserialize_index(np.frombuffer(data, np.uint8))
    return cls(items, _Index(lists, unsorted.keys, places(items.keys, unsorted.keys)), exact_up_to)

  def changed(self, change: Change) -> 'ItemSearch':
    """Returns a new ItemSearch with the change applied; this object is not modified."""
    items, index = change.applied(self.items), self._index
    if index is not None:
      place = places(items.keys, index.keys)
      replaced = (index.place < 0) | np.isin(index.keys, change.items.keys)
      index = index._replace(place=np.where(replaced, -1, place))
    return ItemSearch(items, index, self._exact_up_to)

  def searched(self, k: int) -> int:
    """Returns about how many items' scores `best` computes for a query."""
    if not self.by_index:
      return len(self.items.keys)
    lists = self._index.lists
    return self._lists_to_search(k) * len(self._number) // lists.nlist + len(self._others)

  def _lists_to_search(self, k: int) -> int:
    """Returns how many lists of the index hold 8·k items on average, but at least PROBES."""
    lists = self._index.lists.nlist
    return min(lists, max(PROBES, 8 * k * lists // len(self._number)))

  def best(self, query: np.ndarray, k: int, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Finds the best k <= C items for a query, float32 [d], other than those with indices `seen`.

    Returns their indices in `items`, int64 [r], and scores, float32 [r], descending; r <= k.
    """
    if not self.by_index:
      return _best(self.items.vectors, query, k, seen)
    faiss = import_faiss()
    allowed, numbers = self._current.copy(), self._number[seen]
    numbers = numbers[numbers >= 0]
    np.bitwise_and.at(allowed, numbers // 8, ~np.left_shift(1, numbers % 8).astype(np.uint8))
    parameters = faiss.SearchParametersIVF(
      sel=faiss.IDSelectorBitmap(allowed), nprobe=self._lists_to_search(k)
    )
    scores, found = self._index.lists.search(query[None], k, params=parameters)
    scores, found = scores[0][found[0] >= 0], self._index.place[found[0][found[0] >= 0]]
    seen_others = places(self._others, seen)
    other, of_other = _best(
      self._of_others, query, min(k, len(self._others)), seen_others[seen_others >= 0]
    )
    found, scores = np.append(found, self._others[other]), np.append(scores, of_other)
    order = np.lexsort((found, -scores))[:k]
    return found[order], scores[order]


def search_after(export: RowExport, before: ItemSearch | None) -> ItemSearch:
  """Returns the ItemSearch after an export, which is a base, or a delta that changes `before`."""
  return ItemSearch.of_base(export) if export.begins_chain else before.changed(read(export))


def _best(
  vectors: np.ndarray, query: np.ndarray, k: int, left_out: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the indices and scores of the best k vectors; equal scores by ascending index."""
  scores = vectors @ query
  scores[left_out] = -np.inf
  scores, found = (tensor.numpy() for tensor in tf.math.top_k(scores, k))
  is_left = scores > -np.inf
  return found[is_left].astype(np.int64), scores[is_left]
