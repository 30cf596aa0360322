"""The texts of features, found again in the log: keys are hashes, which do not tell them."""

from collections.abc import Collection, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trainer import config
from trainer.data.conversion import raw_blocks
from trainer.data.features import hash_keys
from trainer.data.log_files import files_of
from trainer.data.parse import feature_texts
from trainer.errors import UserError


def texts_of(
  cfg: config.Config, paths: Collection[str], slot: config.Slot, keys: Collection[int]
) -> Iterator[dict[int, str]]:
  """Yields the texts of some keys as they are found in raw passes, until all are.

  Args:
    cfg: of the log.
    paths: of raw passes; those that are not there any more are left out.
    slot: whose features they are.
    keys: what to look for.
  """
  wanted = np.array(sorted(keys), np.int64)
  slot_id = cfg.slot_ids()[slot.name]
  seen: set[int] = set()
  for path in paths:
    try:
      files = files_of(path)
    except (OSError, UserError):
      continue
    for file in files:
      for read in raw_blocks(cfg, file, {slot.column or slot.name: f"slot '{slot.name}'"}):
        if len(seen) == len(wanted):
          return
        block = read()
        texts = pc.unique(feature_texts(block.columns[slot.column or slot.name], slot))
        texts = texts.drop_null().cast(pa.binary()).to_pylist()
        hashed = hash_keys(texts, slot_id).numpy() if texts else np.zeros([0], np.int64)
        here = np.flatnonzero(np.isin(hashed, wanted)).tolist()
        found = {int(hashed[i]): texts[i].strip().decode(errors='replace') for i in here}
        seen |= found.keys()
        yield found
