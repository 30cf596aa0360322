"""Keys, dense transforms and pooling against plain TensorFlow and NumPy."""

import numpy as np
import tensorflow as tf

from ops.tensors import to_tensor
from trainer.config import DenseColumn
from trainer.data.features import (
  average_lists,
  dense_stats,
  empty_batch,
  hash_keys,
  pool_norm,
  sole_features,
  transform_dense,
)


class HashKeysTest(tf.test.TestCase):
  def test_slot_in_the_top_bits(self):
    texts = [b'5', 'größe'.encode(), b'\xff\xfe', b'a' * 1000]
    keys = hash_keys(texts, 2047).numpy()
    self.assertAllEqual(keys >> 52, [2047] * 4)
    self.assertAllEqual(keys & ((1 << 52) - 1), tf.strings.to_hash_bucket_fast(texts, 1 << 52))
    self.assertAllGreaterEqual(keys, 0)

  def test_never_changes(self):
    # Models in service depend on it: keys written down once, from FarmHash's Fingerprint64.
    self.assertAllEqual(
      hash_keys(['hello', '5', ''], 1), [7852339209178344, 6996394395781867, 4901877037678671]
    )

  def test_space_around_and_integers(self):
    self.assertAllEqual(hash_keys([' a b\t', '\r\nx '], 3), hash_keys(['a b', 'x'], 3))
    self.assertAllEqual(hash_keys(np.array([5, -17]), 3), hash_keys(['5', '-17'], 3))

  def test_in_a_graph_with_a_slot_for_each(self):
    keys = tf.function(hash_keys)(
      tf.constant([['a', 'b'], ['c', 'a']]), tf.constant([1, 2], tf.int64)
    )
    self.assertAllEqual(keys[:, 0], hash_keys(['a', 'c'], 1))
    self.assertAllEqual(keys[:, 1], hash_keys(['b', 'a'], 2))


class SoleFeaturesTest(tf.test.TestCase):
  def test_with_and_without_blanks(self):
    keys, places = np.array([11, 12, 21, 22]), np.array([0, 1, 2, 5], np.int32)
    for num, batch, want in (
      (2, {'keys': keys}, [12, 22]),
      (3, {'keys': keys, 'segments': places}, [12, -1, 22]),
      (2, {}, [-1, -1]),
      (0, {}, []),
    ):
      batch = empty_batch(0)._replace(dense=np.zeros([num, 0], np.float32), **batch)
      self.assertAllEqual(sole_features(batch, 1, 2), want)


class TransformDenseTest(tf.test.TestCase):
  def test_against_numpy(self):
    kinds = ('none', 'log1p', 'standardise', 'log1p_standardise')
    columns = [DenseColumn(name=k, transform=k, missing=i + 0.5) for i, k in enumerate(kinds)]
    x = np.random.default_rng(0).normal(0, 20, [50, 4]).astype(np.float32)
    x[::7, 1:] = np.nan
    x[3] = 0
    slog = np.sign(x) * np.log1p(np.abs(x))
    seen = np.stack([x[:, 0], slog[:, 1], x[:, 2], slog[:, 3]], 1).astype(np.float64)
    measured = {
      k: [np.sum(~np.isnan(c)), np.nanmean(c), np.nansum((c - np.nanmean(c)) ** 2)]
      for k, c in zip(kinds, seen.T)
    }
    for bound in (0, 1.2):
      stats = dense_stats(columns, measured, bound=bound)
      want = seen.copy()
      for i in (2, 3):
        want[:, i] = (want[:, i] - np.nanmean(want[:, i])) / np.nanstd(want[:, i])
      if bound:
        want[:, 2:] = np.clip(want[:, 2:], -bound, bound)
      want = np.where(np.isnan(want), [0.5, 1.5, 2.5, 3.5], want)
      self.assertAllClose(transform_dense(x, columns, stats), want, 1e-5, 1e-5)
    self.assertAllEqual(
      tf.function(lambda d: transform_dense(d, columns, stats))(tf.zeros([0, 4])).shape, [0, 4]
    )

  def test_constant_and_empty_statistics(self):
    columns = [
      DenseColumn(name='b', transform='standardise'),
      DenseColumn(name='c', transform='standardise'),
    ]
    stats = dense_stats(columns, {'b': [5, 3, 0], 'c': [0, 0, 0]})
    self.assertAllClose(transform_dense([[3, 1]], columns, stats), [[0, 1]])

  def test_no_columns(self):
    self.assertAllEqual(
      transform_dense(np.zeros([3, 0], np.float32), [], dense_stats([], {})).shape, [3, 0]
    )


class AverageListsTest(tf.test.TestCase):
  def test_as_a_loop_over_the_lists(self):
    values, segments = [2.0, 3, 5, 1, 1, 1, 7], [0, 1, 1, 2, 3, 3, 3]  # of 2 samples, 2 slots
    averaged = tf.constant([False, True])
    found = average_lists(tf.constant(values), tf.constant(segments), 2, averaged)
    self.assertAllClose(found, [2, 1.5, 2.5, 1, 1 / 3, 1 / 3, 7 / 3])
    none = tf.zeros([0])  # every slot of every sample holds one feature
    self.assertEqual(average_lists(none, tf.zeros([0], tf.int32), 2, averaged).shape, [0])


class PoolNormTest(tf.test.TestCase):
  def test_as_embedding_lookup_sparse(self):
    rng = np.random.default_rng(1)
    b, poolings = 7, ['mean', 'sqrtn', 'sum']
    f = len(poolings)
    segments = np.sort(rng.integers(0, b * f, 30)).astype(np.int32)
    segments = segments[segments // f != 4]  # a sample with nothing in any slot
    values = rng.normal(1, 1, len(segments)).astype(np.float32)
    rows = tf.constant(rng.normal(size=[len(segments), 3]), tf.float32)
    norm = pool_norm(values, segments, b, poolings)
    sums = tf.reshape(
      tf.math.unsorted_segment_sum(rows * values[:, None], segments, b * f), [b, f, 3]
    )
    for slot, combiner in enumerate(poolings):
      mine = np.flatnonzero(segments % f == slot)
      # Every sample has an id of weight 0, which changes no sum, so that empty slots stay in their
      # place.
      sample = np.concatenate([segments[mine] // f, np.arange(b)])
      order = np.argsort(sample, kind='stable')
      ids = tf.SparseTensor(
        np.stack([sample[order], np.arange(len(order))], 1).astype(np.int64),
        np.concatenate([mine, np.zeros(b, np.int64)])[order],
        [b, len(order)],
      )
      weights = tf.SparseTensor(
        ids.indices, np.concatenate([values[mine], np.zeros(b, np.float32)])[order], ids.dense_shape
      )
      want = tf.nn.embedding_lookup_sparse(rows, ids, weights, combiner=combiner)
      self.assertAllClose(sums[:, slot] / norm[:, slot, None], want, 1e-5, 1e-5)
    self.assertAllEqual(norm[4], [1, 1, 1])

  def test_a_divisor_of_zero(self):
    norm = pool_norm(tf.constant([1.0, -1, 0]), tf.constant([0, 0, 1]), 1, ['mean', 'sqrtn'])
    self.assertAllEqual(norm, [[np.inf, np.inf]])

  def test_nothing_to_divide(self):
    none = tf.zeros([0]), tf.zeros([0], tf.int32)
    self.assertIsNone(pool_norm(*none, 3, ['mean']))
    self.assertIsNone(pool_norm(tf.ones([1]), tf.zeros([1], tf.int32), 3, ['sum', 'sum']))
    spec = [tf.TensorSpec([None]), tf.TensorSpec([None], tf.int32), tf.TensorSpec([], tf.int32)]
    graph = tf.function(lambda v, s, b: pool_norm(v, s, b, ['mean', 'sqrtn']), input_signature=spec)
    self.assertAllEqual(graph(*none, 3), np.ones([3, 2]))
    self.assertAllEqual(graph(*none, 0), np.ones([0, 2]))


class ToTensorTest(tf.test.TestCase):
  def test_is_a_copy_of_any_array(self):
    for array in (
      np.arange(7, dtype=np.int64)[::2],
      np.float32([[1, 2], [3, 4]]).T,
      np.zeros([0, 3], np.float32),
      np.int32(5),
      np.zeros([0], np.int64),
    ):
      tensor = to_tensor(array)
      wanted = np.array(array)
      self.assertEqual(
        (tensor.dtype.as_numpy_dtype, tuple(tensor.shape)), (wanted.dtype, wanted.shape)
      )
      self.assertAllEqual(tensor, wanted)
    own = np.zeros([3])
    tensor = to_tensor(own)
    own[0] = 1
    self.assertAllEqual(tensor, [0, 0, 0])

  def test_loses_no_memory(self):
    import psutil

    array, process = np.zeros([10], np.float32), psutil.Process()
    for _ in range(2000):
      to_tensor(array)
    before = process.memory_info().rss
    for _ in range(20_000):
      to_tensor(array)
    self.assertLess(process.memory_info().rss - before, 2 << 20)  # tf.constant: 6.5 MiB


if __name__ == '__main__':
  tf.test.main()
