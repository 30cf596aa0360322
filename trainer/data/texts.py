"""Finds the texts of features in the log, because their keys are only hashes of them."""

import contextlib
from collections.abc import Collection, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trainer import config
from trainer.data.conversion import blocks_of_pass
from trainer.data.features import hash_keys
from trainer.data.log_files import exists
from trainer.data.parse import slot_column
from trainer.data.values import feature_texts


def texts_of(
  cfg: config.Config, paths: Collection[str], slot: config.Slot, keys: Collection[int]
) -> Iterator[dict[int, str]]:
  """Yields texts by key as they occur in raw passes; stops when all keys have been seen.

  Args:
    paths: raw passes; those that no longer exist are skipped.
  """
  wanted = np.array(sorted(keys), np.int64)
  slot_id = cfg.slot_ids()[slot.name]
  columns = {name: f"slot '{slot.name}'" for name, _ in cfg.data.columns_of(slot)}
  seen: set[int] = set()
  for path in filter(exists, paths):
    with contextlib.closing(blocks_of_pass(cfg, path, columns)) as blocks:
      for block in blocks:
        texts = pc.unique(feature_texts(slot_column(cfg, block, slot), slot))
        texts = texts.drop_null().cast(pa.binary()).to_pylist()
        hashed = hash_keys(texts, slot_id).numpy() if texts else np.zeros([0], np.int64)
        here = np.flatnonzero(np.isin(hashed, wanted)).tolist()
        texts_here = {int(hashed[i]): texts[i].strip().decode(errors='replace') for i in here}
        seen |= texts_here.keys()
        yield texts_here
        if len(seen) == len(wanted):
          return
