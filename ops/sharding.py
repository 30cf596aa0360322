"""Which shards a key belongs to, and which process owns it.

A hash puts each key into one of 4,096 logical shards, each with one owner. A table in memory has
256 shards, each of 16 logical shards and a lock. ops/cc/lifecycle/hash.h has the same rules.
"""

from typing import TypeVar

import numpy as np
import tensorflow as tf

from ops.library import TensorLike, load

SHARDS = 4096
TABLE_SHARDS = 256
IN_TABLE_SHARD = SHARDS // TABLE_SHARDS

IntOrArray = TypeVar('IntOrArray', int, np.ndarray)


def mix64(keys: np.ndarray) -> np.ndarray:
  """Returns the hashes of int64 keys, uint64, by MurmurHash3's finaliser, which is a bijection."""
  h = np.asarray(keys).astype(np.int64).view(np.uint64)
  with np.errstate(over='ignore'):
    h = (h ^ (h >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    h = (h ^ (h >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
  return h ^ (h >> np.uint64(33))


def shard_of(keys: np.ndarray) -> np.ndarray:
  """Returns the logical shard of each key, int32 […] in [0, 4096): the top 12 bits of its hash."""
  return (mix64(keys) >> np.uint64(52)).astype(np.int32)


def table_shard_of(keys: np.ndarray) -> np.ndarray:
  """Returns which of a table's 256 shards holds each key, uint8 […]: the top 8 bits of its hash."""
  return (mix64(keys) >> np.uint64(56)).astype(np.uint8)


def within(keys: np.ndarray, shards: range) -> np.ndarray:
  """Returns which of the keys [n] belong to a range of logical shards, bool [n]."""
  shard = shard_of(keys)
  return (shard >= shards.start) & (shard < shards.stop)


def owner_of(shards: IntOrArray, owners: int) -> IntOrArray:
  """Returns the owner of each logical shard; the shards of an owner are consecutive."""
  return shards * owners // SHARDS


def shards_of(owner: int, owners: int) -> range:
  """Returns the logical shards that process `owner` of `owners` processes owns."""
  return range(-(-owner * SHARDS // owners), -(-(owner + 1) * SHARDS // owners))


def owners_with(shards: range, owners: int) -> range:
  """Returns which of `owners` processes own any of these logical shards."""
  return range(owner_of(shards.start, owners), owner_of(shards.stop - 1, owners) + 1)


def owner_counts(keys: TensorLike, owners: int) -> tf.Tensor:
  """Returns how many keys each process owns, int32 [owners], of keys that `dedupe` has ordered."""
  return load().ctr_owner_counts(keys=keys, owners=owners)
