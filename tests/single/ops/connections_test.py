"""Connections from Python: two ends in one process, each in a thread of its own.

The protocol's own tests are tests/cc/connections_test.cc.
"""

import concurrent.futures
import socket

import numpy as np
import tensorflow as tf

from ops.connections import Connections


class ConnectionsTest(tf.test.TestCase):
  def pairs(self):
    a, b = socket.socketpair()
    return Connections([-1, a.detach()], 0), Connections([b.detach(), -1], 1)

  def test_rows_go_where_counts_say(self):
    first, second = self.pairs()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
      for dtype in (tf.int64, tf.float32, tf.float16, tf.bfloat16):
        mine, other = (
          tf.cast(np.arange(10).reshape(5, 2), dtype),
          tf.cast(100 + np.arange(2).reshape(1, 2), dtype),
        )
        ranks = np.array([7, 7, 8, 8, 8], np.int64), np.array([9], np.int64)
        both = (
          pool.submit(first.all_to_all, [mine, ranks[0]], [2, 3]),
          pool.submit(second.all_to_all, [other, ranks[1]], [1, 0]),
        )
        ((values, beside), counts), ((values_2, beside_2), counts_2) = (f.result() for f in both)
        self.assertAllEqual(beside, [7, 7, 9])
        self.assertAllEqual(beside_2, [8, 8, 8])
        self.assertAllEqual(values, tf.concat([mine[:2], other], 0))
        self.assertAllEqual(counts, [2, 1])
        self.assertAllEqual(values_2, mine[2:])
        self.assertAllEqual(counts_2, [3, 0])

  def test_refuses_counts_that_are_not_of_the_values(self):
    pair, _ = self.pairs()
    for counts, message in (
      ([1, 1], 'sum of 2; wanted 3'),
      ([1, 3], r'counts\[1\]: found 3; wanted at most 2'),
      ([-1, 4], r'counts\[0\]: found -1'),
      ([3], r'wanted \[2\]'),
    ):
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, message):
        pair.all_to_all([tf.zeros([3, 2])], counts)

    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, 'the same n of all'):
      pair.all_to_all([tf.zeros([3, 2]), tf.zeros([2])], [1, 2])

  def test_names_a_rank_that_sends_what_is_no_text(self):
    own, other = socket.socketpair()
    with other:
      pair = Connections([-1, own.detach()], 0)
      other.sendall(b'\xff' * 64)
      with self.assertRaisesRegex(tf.errors.DataLossError, r"rank 1 sent operation \d+, '\?+'"):
        pair.all_to_all([tf.zeros([4])], [0, 4])

  def test_names_a_rank_that_is_gone(self):
    pair, other = self.pairs()
    del other
    with self.assertRaisesRegex(tf.errors.AbortedError, 'rank 1 is gone'):
      pair.all_to_all([tf.zeros([3, 2])], [1, 2])


if __name__ == '__main__':
  tf.test.main()
