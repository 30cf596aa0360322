"""The end of a day in the tables: decays shows and clicks, evicts features, ages the others."""

import shutil

import numpy as np

from trainer import files
from trainer.config import Config
from trainer.data.features import HASH_BITS
from trainer.embedding.row_table import table_counts
from trainer.training.inputs import Inputs
from trainer.training.run_log import RunLog


def end_day(cfg: Config, inputs: Inputs, log: RunLog, day: int, is_empty: bool) -> None:
  """Decays shows and clicks, evicts features, counts one more day for those that are left.

  Every process calls it. It changes only memory: a job that crashes before the next checkpoint
  repeats the whole day end.
  """
  communicator, store = inputs.communicator, inputs.step.store
  store.decay()
  evicted = store.evict(lambda counts: communicator.sum_arrays({'capacity': counts})['capacity'])
  store.age()
  slot_ids = cfg.own_slot_ids()
  own = np.bincount(np.asarray(evicted) >> HASH_BITS, minlength=max(slot_ids.values()) + 1)
  of_ids = communicator.sum_arrays({'n': own.astype(np.int64)})['n']
  by_slot = {slot: int(of_ids[i]) for slot, i in slot_ids.items()}
  evicted, counts, disk = sum(by_slot.values()), table_counts(store, communicator), {}
  if cfg.data.stream and communicator.rank == 0:
    free = shutil.disk_usage(cfg.run_dir).free
    disk = {'disk_bytes': files.size_of(cfg.run_dir), 'disk_free': free}
  slots = {slot: {'evicted': n} for slot, n in by_slot.items()}
  fields = {'day': day, 'evicted': evicted, 'empty': is_empty or None, 'slots': slots}
  log.write('day_end', **fields, **counts, **disk)
  log.show(
    f'day {day} ended{" without a pass" * is_empty} · {evicted:,} features evicted · '
    f'{counts["features"]:,} left, {counts["admitted"]:,} admitted',
    keep=True,
  )
