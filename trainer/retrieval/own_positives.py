"""Finds drawn negatives that were right for the same user elsewhere in the pass."""

import numpy as np

from trainer.data import arrays


class OwnPositives:
  """The items that were right for each user, as indices in a catalogue. 8 bytes per positive.

  `users` and `items`, int64 [n], have the positives in any order; the catalogue has `num_items`.
  """

  def __init__(self, users: np.ndarray, items: np.ndarray, num_items: int):
    order = np.argsort(users, kind='stable')
    self._items, self._num_items = items[order], num_items
    self._users, self._first, self._counts = np.unique(
      users[order], return_index=True, return_counts=True
    )

  def among(self, negatives: np.ndarray, users: np.ndarray) -> np.ndarray:
    """Finds the drawn negatives, int64 [N], that are positives of a sample's user.

    `negatives` may have an item twice; `users`, int64 [B], are those of the samples. Returns int64
    [n, 2]: for each negative to leave out, the sample's index, then the index in `negatives`.
    """
    place = arrays.places(self._users, users)
    counts = np.append(self._counts, 0)[place]  # a user without positives has place -1, so 0
    items = self._items[arrays.ranges(np.append(self._first, 0)[place], counts)]
    samples = np.repeat(np.arange(len(users)), counts)
    # A step draws few of the catalogue's items, so most positives are dropped here, cheaply.
    is_drawn = np.zeros([self._num_items], bool)
    is_drawn[negatives] = True
    kept = is_drawn[items]
    order = np.argsort(negatives, kind='stable')
    first, end = (
      np.searchsorted(negatives[order], items[kept], side) for side in ('left', 'right')
    )
    drawn = order[arrays.ranges(first, end - first)]
    return np.stack([np.repeat(samples[kept], end - first), drawn], 1)
