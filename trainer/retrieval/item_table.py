"""Reads the table of items, data.items: a line for each item, with the item tower's columns."""

import functools

import numpy as np

from trainer.data import arrays
from trainer.data.features import SlotBatch, sole_features
from trainer.data.prepared import PreparedPass
from trainer.errors import UserError, short

_ITEMS_AT_ONCE = 65536


class ItemTable:
  """The C items of data.items; UserError if two lines hold the same item, or a line holds none.

  `prepared` is the table as a prepared pass, converted with `config_of_items`; `slot` names the one
  of `slots` slots, at the index `field`, that holds the item.
  """

  def __init__(self, prepared: PreparedPass, slot: str, field: int, slots: int):
    self.prepared, path = prepared, prepared.meta['source']['path']
    keys = np.concatenate(
      [sole_features(b, field, slots) for b in prepared.batches(_ITEMS_AT_ONCE)]
    )
    self._rows = np.argsort(keys, kind='stable')
    self.keys = keys[self._rows]  # int64 [C], the items' keys, ascending
    if blank := int(np.sum(keys < 0)):
      raise UserError(
        f"{path}: column '{slot}' is blank in {blank:,} of {len(keys):,} lines; wanted the id of "
        'an item in each'
      )
    if len(twice := self.keys[1:][self.keys[1:] == self.keys[:-1]]):
      raise UserError(
        f'{path}: the item {short(self.texts[int(twice[0])])} is there twice; wanted it once'
      )

  @functools.cached_property
  def texts(self) -> dict[int, str]:
    """The text of each item, {key: text}."""
    keys, lengths, data = self.prepared.texts
    ends, data = np.cumsum(lengths, dtype=np.int64).tolist(), data.tobytes()
    texts = (data[start:end].decode(errors='replace') for start, end in zip([0, *ends], ends))
    return dict(zip(keys.tolist(), texts))

  def columns(self, keys: np.ndarray) -> tuple[np.ndarray, SlotBatch]:
    """Looks up items' columns by their keys, int64 [n].

    Returns the indices in `keys` of the m items that the table has, int64 [m], ascending, and a
    batch of these items.
    """
    place = arrays.places(self.keys, keys)
    known = np.flatnonzero(place >= 0)
    return known, self.prepared.gather(self._rows[place[known]])
