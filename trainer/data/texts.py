"""Finds the texts of features in the log, because a key is only a hash of its text."""

import contextlib
from collections.abc import Collection, Iterator

import numpy as np
import pyarrow as pa

from trainer import config
from trainer.data.block import Block
from trainer.data.columns import cross
from trainer.data.columns.arrow_columns import ArrowReader
from trainer.data.conversion import blocks_of_pass
from trainer.data.features import hash_keys
from trainer.data.file_system import exists
from trainer.data.slot_features import feature_texts


def texts_of(
  cfg: config.Config, paths: Collection[str], slot: config.Slot, keys: Collection[int]
) -> Iterator[dict[int, str]]:
  """Yields {key: text} for wanted keys that occur in raw passes; stops when all have been found.

  `paths` that no longer exist are skipped. For texts of groups, `slot` is Slot(name=data.group).
  """
  wanted = np.array(sorted(keys), np.int64)
  slot_id = cfg.slot_ids().get(slot.name, 0)
  columns = {name: f"slot '{slot.name}'" for name, _ in cfg.data.columns_of(slot)}
  done: set[int] = set()
  for path in filter(exists, paths):
    with contextlib.closing(blocks_of_pass(cfg.data, path, columns)) as blocks:
      for block in blocks:
        texts, shown = _texts(cfg.data, block, slot)
        hashed = hash_keys(texts, slot_id).numpy() if texts else np.zeros([0], np.int64)
        here = np.flatnonzero(np.isin(hashed, wanted)).tolist()
        texts_here = {int(hashed[i]): shown[i].strip().decode(errors='replace') for i in here}
        done |= texts_here.keys()
        yield texts_here
        if len(done) == len(wanted):
          return


def _texts(data: config.Data, block: Block, slot: config.Slot) -> tuple[list[bytes], list[bytes]]:
  """Returns a block's distinct texts as a slot hashes them, and as shown: for a cross 'a × b'."""
  reader = ArrowReader(data, block.columns, len(block.lines))
  if isinstance(slot.made, config.SlotCross):
    texts, shown = cross.shown(slot.made, reader.of(slot.name))
  else:
    column = reader.made(slot.name) if slot.made else block.columns[slot.column or slot.name]
    texts = shown = feature_texts(column, slot)
  encoded = texts.dictionary_encode()
  places, first = np.unique(encoded.indices.fill_null(-1).to_numpy(), return_index=True)
  shown = shown.take(first[places >= 0])
  return tuple(a.cast(pa.binary()).to_pylist() for a in (encoded.dictionary, shown))
