"""What happens to the embedding tables when a day is over."""

from typing import Any

import numpy as np

from trainer.comm.communicator import Communicator


def table_counts(store: Any, communicator: Communicator) -> dict[str, int]:
  """What the tables of all processes hold: features, admitted and table_bytes."""
  own = {
    'features': store.size(),
    'admitted': store.admitted_size(),
    'table_bytes': store.bytes(),
  }
  total = communicator.sum_arrays({name: np.array(n, np.int64) for name, n in own.items()})
  return {name: int(n) for name, n in total.items()}


def end_day(store: Any, communicator: Communicator) -> int:
  """Decays shows and clicks, evicts features, then ages the others; every process calls it.

  All of it is state of the tables, which a checkpoint holds or does not hold as a whole: a job that
  crashes in between repeats the whole day end from the checkpoint before it.

  Returns:
    The number of features evicted, over all processes.
  """
  store.decay()
  evicted = store.evict(lambda counts: communicator.sum_arrays({'capacity': counts})['capacity'])
  store.age()
  return int(communicator.sum_arrays({'n': np.array(len(evicted), np.int64)})['n'])
