"""Logical shards and their owners."""

import numpy as np
import tensorflow as tf

from ops import sharding
from ops.dedupe import dedupe


class ShardingTest(tf.test.TestCase):
  def test_mix64_is_murmur3s_finaliser(self):
    self.assertEqual(int(sharding.mix64(0)), 0)
    self.assertEqual(int(sharding.mix64(1)), 0xB456BCFC34C2CB2C)

  def test_the_shards_of_all_owners_are_all_shards_in_order(self):
    for owners in (1, 2, 3, 5, 40, 256, 300, 4096, 5000):
      of_each = [list(sharding.shards_of(owner, owners)) for owner in range(owners)]
      self.assertEqual(sum(of_each, []), list(range(4096)))
      for owner, shards in enumerate(of_each):
        self.assertAllEqual(sharding.owner_of(np.array(shards, int), owners), [owner] * len(shards))
      self.assertLessEqual(max(map(len, of_each)) - min(map(len, of_each)), 1)

  def test_owners_of_a_range_of_shards(self):
    for owners in (1, 3, 7, 300):
      for first, last in ((0, 4096), (5, 6), (1365, 1367), (4000, 4096)):
        wanted = {int(sharding.owner_of(shard, owners)) for shard in range(first, last)}
        self.assertEqual(set(sharding.owners_with(range(first, last), owners)), wanted)

  def test_counts_of_owners_and_the_order_of_dedupe_agree(self):
    keys = np.random.default_rng(8).integers(0, 2**62, 1000)
    unique = dedupe(keys).unique.numpy()
    shards = sharding.shard_of(unique)
    self.assertAllEqual(np.sort(shards), shards)
    self.assertAllEqual(shards // sharding.IN_TABLE_SHARD, sharding.table_shard_of(unique))
    for owners in (1, 3, 40, 256, 4096):
      self.assertAllEqual(
        sharding.owner_counts(unique, owners),
        np.bincount(sharding.owner_of(shards, owners), minlength=owners),
      )


if __name__ == '__main__':
  tf.test.main()
