"""Reads requests of plain texts and numbers, in a tenth of the time that the log's reader takes.

The log's reader uses Arrow, which has a fixed cost for each column. A column of a log has many
values, so that cost is small; a column of a request has few, so it is large.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from ops.keys import NO_FEATURE, text_keys
from trainer import config
from trainer.data.columns import bins
from trainer.data.features import HASH_BITS, SlotBatch
from trainer.data.schema import blank_columns
from trainer.data.values import Writing, feature_keys, marker_numbers
from trainer.plain_data import Json

_END = '\n'  # between texts; hashing removes white space around a text
_TEXTS, _NUMBERS = {str, int, type(None)}, {float, int, type(None)}


class PlainColumns:
  """Reads the columns of requests for a config that `reads` accepts."""

  def __init__(self, cfg: config.Config):
    missing, ids = cfg.data.missing_values, cfg.slot_ids()
    self._slots = cfg.ordered_slots
    self._dense = [column.name for column in cfg.data.dense]
    self._bins = {
      s.name: (self._dense.index(s.made.bins), bins.reader(s.made)) for s in self._slots if s.made
    }
    self._high_bits = np.array([ids[s.name] << HASH_BITS for s in self._slots], np.int64)
    self._missing_keys = feature_keys(pa.array(missing, pa.string()), '', 0, [])
    self._missing_numbers = marker_numbers(tuple(missing), Writing.of(cfg.data))

  @staticmethod
  def reads(cfg: config.Config) -> bool:
    """Returns whether this class can read requests for a config.

    It cannot if a column has `from`, unless it is bins of a dense column, if features have values,
    or if the config has model.retrieval.
    """
    slots, dense = cfg.data.slots, {column.name for column in cfg.data.dense}
    dense -= {slot.name for slot in slots}
    return not (
      any(column.made for column in cfg.data.dense)
      or any(
        s.made and not (isinstance(s.made, config.Bins) and s.made.bins in dense) for s in slots
      )
      or any(slot.value_separator for slot in slots)
      or blank_columns(cfg, labelled=False)
      or cfg.model.retrieval
    )

  def read(self, columns: Mapping[str, Sequence[Json]], size: int) -> SlotBatch | None:
    """Returns B = `size` samples; None if a value is wrong or of a type that only the log's reader
    reads.

    `columns` has {name: B values, or one that stands for all samples}.
    """
    dense = self._numbers(columns, size)
    if dense is None or (found := self._keys(columns, dense)) is None:
      return None
    keys, segments = found
    zeros = np.zeros([size], np.float32)
    values = np.ones([len(segments)], np.float32)
    return SlotBatch(keys, values, segments, dense, zeros, zeros, zeros)

  def _numbers(self, columns: Mapping[str, Sequence[Json]], size: int) -> np.ndarray | None:
    """Returns the dense columns, float32 [B, Dn]; None if this class cannot read a value."""
    dense = np.empty([len(self._dense), size], np.float32)
    with np.errstate(over='ignore'):
      for i, name in enumerate(self._dense):
        values = columns[name]
        if not _NUMBERS.issuperset(map(type, values)):
          return None
        try:
          numbers = np.array(values, np.float64)  # None becomes NaN
        except OverflowError:
          return None
        if len(self._missing_numbers):
          numbers[np.isin(numbers, self._missing_numbers)] = np.nan
        dense[i] = numbers
    return None if np.isinf(dense).any() else np.ascontiguousarray(dense.T)

  def _keys(
    self, columns: Mapping[str, Sequence[Json]], dense: np.ndarray
  ) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns `keys` and `segments` of a SlotBatch; None if this class cannot read a value."""
    texts, fields, size = [], len(self._slots), len(dense)
    counts = np.ones([fields, size], np.int64)
    for f, slot in enumerate(self._slots):
      if slot.made:
        place, features = self._bins[slot.name]
        texts += features(dense[:, place])
        continue
      values = columns[slot.column or slot.name]
      kinds = set(map(type, values))
      if not kinds <= _TEXTS:
        return None
      if kinds != {str}:
        values = ['' if value is None else str(value) for value in values]
      if slot.separator:
        counts[f] = [1 + value.count(slot.separator) for value in values]
        values = [value.replace(slot.separator, _END) for value in values]
      texts += values if len(values) == size else values * size
    try:
      data = np.frombuffer(_END.join(texts).encode(), np.uint8)
    except UnicodeEncodeError:
      return None
    ends = np.flatnonzero(data == ord(_END))
    if len(ends) != counts.sum() - 1:
      return None  # a text has a line break
    offsets = np.concatenate([[0], ends + 1, [len(data)]]).astype(np.int32)
    keys = text_keys(data, offsets, 0)
    if len(self._missing_keys):
      is_missing = np.isin(keys, self._missing_keys)
      is_missing &= np.repeat([slot.made is None for slot in self._slots], counts.sum(1))
      keys[is_missing] = NO_FEATURE
    keys |= np.repeat(self._high_bits, counts.sum(1))  # NO_FEATURE, all bits 1, stays as it is
    present = keys != NO_FEATURE
    if len(keys) == counts.size and present.all() and not any(s.separator for s in self._slots):
      return keys.reshape(fields, size).T.reshape(-1), np.zeros([0], np.int32)
    segments = np.arange(size, dtype=np.int32) * fields + np.arange(fields, dtype=np.int32)[:, None]
    segments = np.repeat(segments.reshape(-1), counts.reshape(-1))[present]
    order = np.argsort(segments, kind='stable')
    keys, segments = keys[present][order], segments[order]
    for f, slot in enumerate(self._slots):
      if slot.sequence:  # keep the last max_length features
        own = np.flatnonzero(segments % fields == f)
        to_end = np.searchsorted(segments, segments[own], side='right') - own
        left_out = own[to_end > slot.sequence.max_length]
        keys, segments = np.delete(keys, left_out), np.delete(segments, left_out)
    return keys, segments
