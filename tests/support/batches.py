"""Random SlotBatches for tests:

power-law features, several in a slot, blanks, values, dense columns with gaps.
"""

import numpy as np

from trainer.data.features import SlotBatch


def make_batch(
  rng, samples, slots=3, vocabulary=40, num_dense=2, single=False, tasks=1, ids=(1, 2, 3)
):
  """A SlotBatch of `samples` samples; single: exactly one feature a slot (the fast path).

  Labels of several tasks have blanks, the later tasks the more. `ids` are the slots' in keys: one
  that shares another's features has its id.
  """
  counts = np.ones([samples, slots], int) if single else rng.integers(0, 4, [samples, slots])
  segments = np.repeat(np.arange(samples * slots, dtype=np.int32), counts.ravel())
  texts = (vocabulary * rng.random(len(segments)) ** 2).astype(np.int64)
  keys = (np.array(ids, np.int64)[segments % slots] << 52) + texts * 7919
  dense = rng.normal(size=[samples, num_dense]).astype(np.float32)
  dense[rng.random(dense.shape) < 0.1] = np.nan
  empty = np.zeros([0], np.float32)
  label = (rng.random(samples) < 0.4).astype(np.float32)
  if tasks > 1:
    label = (rng.random([samples, tasks]) < 0.4).astype(np.float32)
    label[rng.random([samples, tasks]) < 0.3 * np.arange(tasks)] = np.nan
  return SlotBatch(
    keys,
    empty if single else rng.uniform(0.5, 1.5, len(keys)).astype(np.float32),
    empty.astype(np.int32) if single else segments,
    dense,
    label,
    rng.uniform(0.5, 2, samples).astype(np.float32),
    rng.integers(0, 9, samples),
  )


def join(batches, slots=3):
  """One SlotBatch of all samples, in order: the global batch of these ranks' batches."""
  offsets = np.cumsum([0] + [len(b.label) for b in batches[:-1]]) * slots
  columns = {
    name: np.concatenate([getattr(b, name) for b in batches]) for name in SlotBatch._fields
  }
  columns['segments'] = np.concatenate([b.segments + o for b, o in zip(batches, offsets)]).astype(
    np.int32
  )
  return SlotBatch(**columns)
