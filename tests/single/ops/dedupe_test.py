"""Dedupe against NumPy's unique."""

import os

os.environ.setdefault('TF_USE_LEGACY_KERAS', '1')
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from ops import sharding
from ops.dedupe import Deduped, dedupe
from tests.support import commands


def power_law_keys(rng, n, slots=5, vocabulary=3000):
  slot = rng.integers(1, slots + 1, n).astype(np.int64)
  return (slot << 52) + (vocabulary * rng.random(n) ** 3).astype(np.int64)


class DedupeTest(tf.test.TestCase, parameterized.TestCase):
  def check(self, keys, shows, clicks):
    d = Deduped(*(x.numpy() for x in dedupe(keys, shows, clicks)))
    n = len(keys)
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    order = np.lexsort((first, sharding.shard_of(keys[first])))  # by shard, then first occurrence
    self.assertAllEqual(d.unique, keys[first][order])
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    self.assertAllEqual(d.inverse, rank[inverse])
    for found, of_each in ((d.shows, shows), (d.clicks, clicks)):
      wanted = np.bincount(d.inverse, np.broadcast_to(of_each, [n]).astype(np.float64), len(order))
      self.assertAllClose(found, wanted, rtol=1e-6)
    self.assertEqual((d.starts[0], d.starts[-1], len(d.starts)), (0, n, len(order) + 1))
    self.assertAllEqual(d.order, np.argsort(d.inverse, kind='stable'))
    self.assertAllEqual(d.starts, np.searchsorted(np.sort(d.inverse), np.arange(len(order) + 1)))

  @parameterized.parameters(0, 1, 2, 100, 5000, 60000)
  def test_equals_numpy(self, n):
    rng = np.random.default_rng(n)
    self.check(
      power_law_keys(rng, n),
      rng.integers(0, 9, n).astype(np.float32),
      rng.random(n).astype(np.float32),
    )

  @parameterized.parameters(False, True)
  def test_clicks_of_samples(self, one_each):
    rng = np.random.default_rng(2)
    segments = (
      np.arange(4000 * 5)
      if one_each
      else np.repeat(np.arange(4000 * 5), rng.integers(0, 3, 4000 * 5))
    )
    keys, clicks = power_law_keys(rng, len(segments)), rng.random(4000).astype(np.float32)
    found = dedupe(
      keys, clicks=clicks, segments=() if one_each else segments.astype(np.int32), slots=5
    )
    wanted = dedupe(keys, clicks=clicks[segments // 5])
    self.assertAllEqual(
      tf.concat([tf.cast(x, tf.float64) for x in found], 0),
      tf.concat([tf.cast(x, tf.float64) for x in wanted], 0),
    )
    for wrong in (segments - 5, segments + 5 * 4000):
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, 'segments: wanted'):
        dedupe(keys, clicks=clicks, segments=wrong.astype(np.int32), slots=5)

  def test_one_number_for_all(self):
    rng = np.random.default_rng(1)
    self.check(power_law_keys(rng, 9000), np.ones(1, np.float32), np.zeros(1, np.float32))

  def test_extremes(self):
    keys = np.array([0, -1, 2**63 - 1, -(2**63), 0, -1, 5], np.int64)
    self.check(keys, np.ones(7, np.float32), np.ones(7, np.float32))
    self.check(
      np.full(50000, 7, np.int64), np.ones(1, np.float32), np.ones(50000, np.float32)
    )  # one shard has everything
    self.check(np.arange(50000), np.ones(1, np.float32), np.ones(1, np.float32))

  def test_same_for_any_number_of_threads(self):
    code = (
      'import numpy as np, tensorflow as tf, sys, hashlib; n = int(sys.argv[1]);'
      'tf.config.threading.set_intra_op_parallelism_threads(n);'
      'from ops.dedupe import dedupe; '
      'from tests.single.ops.dedupe_test import power_law_keys as p; '
      'r = np.random.default_rng(0);'
      'd = dedupe(p(r, 50000), r.random(50000, np.float32), r.random(50000, np.float32));'
      'print(hashlib.md5(b"".join(x.numpy().tobytes() for x in d)).hexdigest())'
    )
    found = {
      (done.returncode, done.stdout) for done in (commands.run('-c', code, str(n)) for n in (1, 5))
    }
    self.assertLen(found, 1)
    self.assertEqual(found.pop()[0], 0)

  def test_in_a_function_of_unknown_length(self):
    f = tf.function(lambda k: dedupe(k), input_signature=[tf.TensorSpec([None], tf.int64)])
    self.assertAllEqual(f(tf.constant([5, 5, 5], tf.int64)).shows, [3.0])
    self.assertAllEqual(f(tf.zeros([0], tf.int64)).unique, np.zeros(0))

  def test_hostile_input_is_refused(self):
    for keys, shows, clicks in (
      ([[1]], [1.0], [1.0]),
      ([1, 2, 3], [1.0, 1.0], [0.0]),
      ([1, 2, 3], [1.0], []),
      ([1], [[1.0]], [0.0]),
    ):
      with self.assertRaises(tf.errors.InvalidArgumentError):
        dedupe(tf.constant(keys, tf.int64), shows, tf.constant(clicks, tf.float32))


if __name__ == '__main__':
  tf.test.main()
