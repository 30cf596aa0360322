"""The end of a day in the tables: decays shows and clicks, evicts features, ages the others."""

from collections.abc import Mapping

import numpy as np

from trainer.comm.communicator import Communicator
from trainer.data.features import HASH_BITS
from trainer.embedding.row_table import RowTable


def table_counts(store: RowTable, communicator: Communicator) -> dict[str, int]:
  """Returns {'features': …, 'admitted': …, 'table_bytes': …}, sums over all processes.

  Admitted are the features that have factors. Every process calls it.
  """
  own = np.array([store.size(), store.admitted_size(), store.bytes()], np.int64)
  total = communicator.sum_arrays({'counts': own})['counts'].tolist()
  return dict(zip(('features', 'admitted', 'table_bytes'), total))


def age_tables(
  store: RowTable, communicator: Communicator, slot_ids: Mapping[str, int]
) -> dict[str, int]:
  """Decays shows and clicks, evicts features, then counts one more day for those that are left.

  Every process calls it. It changes only memory: a job that crashes before the next checkpoint
  repeats the whole day end.

  Args:
    slot_ids: {slot: id}, without the slots that share the features of another slot.
  Returns:
    {slot: number of evicted features}, summed over all processes.
  """
  store.decay()
  evicted = store.evict(lambda counts: communicator.sum_arrays({'capacity': counts})['capacity'])
  store.age()
  own = np.bincount(np.asarray(evicted) >> HASH_BITS, minlength=max(slot_ids.values()) + 1)
  counts = communicator.sum_arrays({'n': own.astype(np.int64)})['n']
  return {slot: int(counts[i]) for slot, i in slot_ids.items()}
