"""The catalogue of items that a model with model.retrieval ranks and draws negatives from."""

from collections.abc import Iterator, Mapping

import numpy as np
from absl import logging

from trainer import config
from trainer.comm.communicator import Communicator
from trainer.data import arrays
from trainer.data.features import HASH_BITS, SlotBatch, sole_features
from trainer.data.prepared import PreparedPass
from trainer.embedding.row_table import RowTable
from trainer.errors import BadPass
from trainer.retrieval.item_table import ItemTable
from trainer.retrieval.own_positives import OwnPositives

_SAMPLES_AT_ONCE = 65536
_DRAWS = 0x6E65676174697665  # makes these draws differ from others of the config's seed


class Catalogue:
  """All items that can be ranked, with their shows (impressions); the same on every rank.

  If the config has data.items, the items are those of that table. Otherwise they are the items that
  occur in the current pass or have a row. So an item joins with the first pass in which it occurs,
  and leaves when its row is evicted.

  An item has the shows of its row at the start of the pass, plus one for each of its samples in the
  pass. Items and shows do not change during a pass. Checkpoints hold them.

  Attributes:
    keys: the keys of the items, int64 [C], ascending.
    shows: float64 [C], in the order of `keys`.
    table: the content of data.items, which `read_items` sets; None without data.items.
    field: the index in Config.ordered_slots of the slot that holds the items.
  """

  def __init__(self, cfg: config.Config):
    self._settings, self._seed = cfg.model.retrieval, cfg.seed
    self._slots, self._of_table = len(cfg.data.slots), cfg.columns_of_items()
    self._dense_of_table = [column.name in self._of_table for column in cfg.data.dense]
    self.table: ItemTable | None = None
    self._name = cfg.item_slot.name
    self.field = cfg.ordered_slots.index(cfg.item_slot)
    self._slot_id = cfg.slot_ids()[self._name]
    self._dense = len(cfg.data.dense)
    self._own_positives: OwnPositives | None = None
    self._set(np.zeros([0], np.int64), np.zeros([0]))

  def refresh(
    self, store: RowTable, communicator: Communicator, prepared: PreparedPass | None = None
  ) -> None:
    """Rebuilds the catalogue from the rows of all ranks. Every rank calls it.

    The items of `prepared`, the next pass to train on, are added. It raises BadPass if no item has
    a row or occurs in that pass, or if data.items lacks all items of the pass.
    """
    own = np.asarray(store.select('all'))
    own = own[own >> HASH_BITS == self._slot_id]
    shows = np.asarray(store.lookup(own)['show'])
    # A key has one owner, so no key is gathered twice.
    alive, of_alive = map(np.concatenate, zip(*communicator.gather([own, shows])))
    path = prepared and prepared.meta['source']['path']
    keys, times = self._of_pass(prepared) if prepared is not None else (alive[:0], alive[:0])
    merged, place = np.unique(np.concatenate([alive, keys]), return_inverse=True)
    shows = np.bincount(place, np.concatenate([of_alive, times]), len(merged))
    if prepared is not None and prepared.num_samples and not len(merged):
      wanted = 'wanted the items that were right'
      raise BadPass(f"{path}: slot '{self._name}' is blank in all samples; {wanted}")
    if self.table is None:
      self._set(merged, shows)
      return
    lacking = int(times[arrays.places(self.table.keys, keys) < 0].sum())
    if lacking:
      count = int(times.sum())
      told = f'{path}: data.items lacks the items of {lacking:,} of {count:,} samples'
      if lacking == count:
        raise BadPass(f'{told}; wanted the items of the log in it')
      if communicator.rank == 0:
        logging.warning('%s: they are left out', told)
    place = arrays.places(merged, self.table.keys)
    self._set(self.table.keys, np.where(place < 0, 0, np.append(shows, 0)[place]))

  def read_items(self, table: PreparedPass) -> None:
    if self.table is None or self.table.prepared.meta != table.meta:
      self.table = ItemTable(table, self._name, self.field, self._slots)

  def learn_positives(self, prepared: PreparedPass) -> None:
    """Notes which items were right for each user in a pass, where `own_positives: pass` needs it.

    Call it before training on a pass, after `refresh` or, if a job resumes within the pass, `load`.
    """
    if self._settings.own_positives == 'step' or self._settings.loss == 'in_batch_softmax':
      return
    users, items = [np.zeros([0], np.int64)], [np.zeros([0], np.int64)]
    for batch in prepared.batches(_SAMPLES_AT_ONCE):
      place = self.places(sole_features(batch, self.field, self._slots))
      is_positive = (batch.label > 0.5) & (place >= 0)
      users.append(batch.group[is_positive])
      items.append(place[is_positive])
    positives = np.concatenate(users), np.concatenate(items)
    self._own_positives = OwnPositives(*positives, len(self.keys))

  def _of_pass(self, prepared: PreparedPass) -> tuple[np.ndarray, np.ndarray]:
    """Returns the items of a pass, int64 [n], ascending, and the samples of each, float64 [n].

    Items that occur only in histories have 0 samples.
    """
    all_keys, times = [np.zeros([0], np.int64)], [np.zeros([0])]
    for batch in prepared.batches(_SAMPLES_AT_ONCE):
      in_batch = np.unique(batch.keys)
      in_batch = in_batch[in_batch >> HASH_BITS == self._slot_id]
      items = sole_features(batch, self.field, self._slots)
      keys, count = np.unique(items[items >= 0], return_counts=True)
      all_keys += [in_batch, keys]
      times += [np.zeros([len(in_batch)]), count]
    keys, place = np.unique(np.concatenate(all_keys), return_inverse=True)
    return keys, np.bincount(place, np.concatenate(times), len(keys))

  def _set(self, keys: np.ndarray, shows: np.ndarray) -> None:
    self.keys, self.shows = keys, shows
    settings, count = self._settings, max(1, len(keys))
    by_draws = settings.loss != 'in_batch_softmax'
    weights = 1 + shows if by_draws and settings.sampling == 'frequency' else shows
    with np.errstate(divide='ignore', invalid='ignore'):
      shares = weights / weights.sum()
    self._cumulated = np.cumsum(shares)
    if settings.logq != 'shows':
      shares = np.full([len(keys)], 1 / count)
    self._log_shares = np.log(np.maximum(shares, 1e-12)).astype(np.float32)

  def state(self) -> dict[str, np.ndarray]:
    return {'catalogue/keys': self.keys, 'catalogue/shows': self.shows}

  def load(self, arrays: Mapping[str, np.ndarray]) -> None:
    self._set(arrays['catalogue/keys'], arrays['catalogue/shows'])

  def places(self, keys: np.ndarray) -> np.ndarray:
    """Returns the index of each key in `self.keys`, int64 [n]; −1 for a key that is no item."""
    return arrays.places(self.keys, keys)

  def for_step(self, batch: SlotBatch, step: int) -> SlotBatch:
    """Prepares a batch of NumPy arrays for a training step.

    Samples with a negative label, or with an item that is not in the catalogue, get weight 0.
    Negative items are drawn, by the config's seed and the step's number from 0, and appended to the
    batch. Only the loss in_batch_softmax needs none, because it compares a sample with the items of
    the other samples. The batch also gets `item`, `log_share` (see `_log_share_of`), the columns of
    data.items and, if own_positives is 'pass', `left_out`.
    """
    items = sole_features(batch, self.field, self._slots)
    if self.table is not None:
      items = np.where(self.places(items) < 0, -1, items)
    log_shares = self._log_share_of(items)
    weight = batch.weight * ((batch.label > 0.5) & (items >= 0))
    batch = batch._replace(weight=weight, item=items, log_share=log_shares)
    if self._settings.loss == 'in_batch_softmax':
      return self._with_columns(batch, items)
    drawn = self._draw(step)
    samples, negatives = len(batch.label), self.keys[drawn]
    segments, values, ones = batch.segments, batch.values, np.ones([len(drawn)], np.float32)
    if not len(segments):
      segments = np.arange(len(batch.keys), dtype=np.int32)  # one key a place, or none at all
    of_drawn = (samples + np.arange(len(drawn))) * self._slots + self.field
    items = np.append(items, negatives)
    if self._own_positives is not None:
      batch = batch._replace(left_out=self._own_positives.among(drawn, batch.group))
    batch = batch._replace(
      keys=np.append(batch.keys, negatives),
      values=np.append(values, ones) if len(values) else values,
      segments=np.append(segments, of_drawn.astype(np.int32)),
      dense=np.concatenate([batch.dense, np.full([len(drawn), self._dense], np.nan, np.float32)]),
      item=items,
      log_share=np.append(log_shares, self._log_shares[drawn]),
    )
    return self._with_columns(batch, items)

  def _with_columns(self, batch: SlotBatch, items: np.ndarray) -> SlotBatch:
    """Adds to a batch the columns that data.items has for each of its items.

    `items`, int64 [B + negatives], are keys, −1 for none; those not in data.items get no columns.
    """
    if not self._of_table:
      return batch
    known, columns = self.table.columns(items)
    sample, field = divmod(columns.segments, self._slots)
    is_column = field != self.field
    segments = batch.segments if len(batch.segments) else np.arange(len(batch.keys), dtype=np.int32)
    segments = np.append(segments, (known[sample] * self._slots + field)[is_column])
    order = np.argsort(segments, kind='stable')
    keys = np.append(batch.keys, columns.keys[is_column])
    if len(values := batch.values) or len(columns.values):
      ones = [np.ones([len(b.keys)], np.float32) for b in (batch, columns)]
      own, of_table = (b.values if len(b.values) else o for b, o in zip((batch, columns), ones))
      values = np.append(own, of_table[is_column])[order]
    dense = batch.dense.copy()
    dense[np.ix_(known, self._dense_of_table)] = columns.dense[:, self._dense_of_table]
    return batch._replace(
      keys=keys[order], values=values, segments=segments[order].astype(np.int32), dense=dense
    )

  def _draw(self, step: int) -> np.ndarray:
    """Returns the indices in the catalogue of the step's negatives, int64 [negatives]."""
    generator = np.random.default_rng([_DRAWS, self._seed, step])
    count = self._settings.negatives
    if self._settings.sampling == 'uniform':
      return generator.integers(0, len(self.keys), count)
    at = np.searchsorted(self._cumulated, generator.random(count), side='right')
    return np.minimum(at, len(self.keys) - 1)

  def _log_share_of(self, items: np.ndarray) -> np.ndarray:
    """Returns log q of each item, float32 [n], for the logQ correction.

    The probability q is 1/C for a catalogue of C items. With `logq: shows`, q is the item's shows
    divided by the shows of all items; if items are drawn by frequency, 1 is first added to the
    shows of each item. An item that is not in the catalogue gets the smallest q.
    """
    if not len(self.keys):
      return np.zeros(items.shape, np.float32)
    place = self.places(items)
    return np.where(place < 0, self._log_shares.min(), self._log_shares[place])

  def batches(self, batch_size: int, rank: int, size: int) -> Iterator[SlotBatch]:
    """Yields a rank's share of the catalogue in batches, one sample per item.

    Of C items, it is those with the indices rank·C // size to (rank + 1)·C // size − 1. A sample
    has only the key of its item and the item's columns of data.items. Every rank yields the same
    number of batches; some may be empty.
    """
    count = len(self.keys)
    start, end = (r * count // size for r in (rank, rank + 1))
    no_values = np.zeros([0], np.float32)
    for i in range(-(-(-(-count // size)) // batch_size)):
      keys = self.keys[start:end][i * batch_size : (i + 1) * batch_size]
      zeros = np.zeros([len(keys)], np.float32)
      batch = SlotBatch(
        keys,
        no_values,
        np.arange(len(keys), dtype=np.int32) * self._slots + self.field,
        np.full([len(keys), self._dense], np.nan, np.float32),
        zeros,
        zeros,
        np.zeros([len(keys)], np.int64),
      )
      yield self._with_columns(batch, keys)
