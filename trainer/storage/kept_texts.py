"""The texts of features, kept beside their rows where data.keep_texts asks for them."""

import io
from collections.abc import Iterable, Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from absl import logging

from ops.sharding import shards_of, within
from trainer.comm.communicator import Communicator
from trainer.data.features import HASH_BITS
from trainer.data.prepared import PreparedPass
from trainer.data.values import feature_keys
from trainer.embedding.row_table import RowTable


class KeptTexts:
  """The texts of the admitted features that a process owns, for the slots in data.keep_texts.

  They are read from each pass after the model has trained on it; `dump` removes those of evicted
  features. A text takes 16 bytes of memory in addition to its own bytes. `ids` is {slot: its id}.
  """

  def __init__(self, ids: Mapping[str, int], communicator: Communicator, store: RowTable):
    self._ids = dict(ids)
    self._tells, self._store = communicator.rank == 0, store
    self._own = shards_of(communicator.rank, communicator.size)
    self._keys = np.zeros([0], np.int64)
    self._texts = pa.array([], pa.large_binary())

  def learn(self, prepared: PreparedPass) -> None:
    """Adds the texts of the admitted features in a pass."""
    if not self._ids:
      return
    if prepared.texts is None:
      if self._tells:
        logging.warning(
          'data.keep_texts: %s was prepared without it, so that its texts are not kept; prepare it '
          'again',
          prepared.path,
        )
      return
    keys, lengths, data = prepared.texts
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(data)]
    self._add(keys, pa.Array.from_buffers(pa.large_binary(), len(keys), buffers))

  def _add(self, keys: np.ndarray, texts: pa.Array) -> None:
    """Adds the texts of keys [n] that are admitted and new, and that this process owns."""
    keys, first = np.unique(keys, return_index=True)
    new = within(keys, self._own) & ~np.isin(keys, self._keys)
    new &= np.isin(keys >> HASH_BITS, list(self._ids.values()))
    keys, first = keys[new], first[new]
    admitted = self._admitted(keys)
    self._keys = np.concatenate([self._keys, keys[admitted]])
    self._texts = pa.concat_arrays([self._texts, texts.take(pa.array(first[admitted]))])

  def _admitted(self, keys: np.ndarray) -> np.ndarray:
    return np.asarray(self._store.lookup(keys)['admitted'], bool)

  def dump(self) -> bytes | None:
    """Returns the texts of features still admitted, as a Parquet file; None if no slot keeps texts.

    It holds the names of slots, because their ids may change.
    """
    if not self._ids:
      return None
    admitted = self._admitted(self._keys)
    self._keys, self._texts = self._keys[admitted], self._texts.filter(pa.array(admitted))
    ids = sorted(self._ids, key=self._ids.get)
    of_key = np.searchsorted([self._ids[name] for name in ids], self._keys >> HASH_BITS)
    table = pa.table({'slot': pa.array(ids).take(pa.array(of_key)), 'text': self._texts})
    out = io.BytesIO()
    pq.write_table(table, out, compression='zstd')
    return out.getvalue()

  def load(self, dumps: Iterable[bytes]) -> None:
    """Replaces all texts by those in dumps. Features that other processes own are skipped."""
    self._keys, self._texts = self._keys[:0], self._texts[:0]
    for dump in dumps if self._ids else ():
      for name, id_of in self._ids.items():
        texts = texts_of_slot(dump, name)
        self._add(feature_keys(texts, name, id_of, []), texts.cast(pa.large_binary()))


def texts_of_slot(dump: bytes, slot: str) -> pa.Array:
  """Returns the texts of a slot's features in a KeptTexts dump, as an Arrow array of binary."""
  table = pq.read_table(io.BytesIO(dump))
  return table.filter(pc.equal(table['slot'], slot))['text'].combine_chunks().cast(pa.binary())


def texts_by_key(dumps: Iterable[bytes], slot: str, slot_id: int) -> dict[int, str]:
  """Returns {key: text} of a slot's features in the KeptTexts dumps of several processes."""
  found: dict[int, str] = {}
  for dump in dumps:
    texts = texts_of_slot(dump, slot)
    keys = feature_keys(texts, slot, slot_id, []).tolist()
    found |= zip(keys, (text.decode(errors='replace') for text in texts.to_pylist()))
  return found
