"""SASRec against loops over places, heads and blocks in NumPy."""

import numpy as np
import tensorflow as tf

from trainer.embedding.layer_inputs import HistoryVectors
from trainer.retrieval.sasrec import SASRec

WIDTH, HEADS, BLOCKS, MOST = 6, 2, 2, 5


def softmax(x):
  e = np.exp(x - x.max())
  return e / e.sum()


def encoded(weights, vectors):
  """The vector of one history [n, D], of which each place has a feature."""
  w = {name.split(':')[0].split('/')[-1]: value.astype(np.float64) for name, value in weights}

  def norm(name, x):
    centred = x - x.mean()
    scaled = centred / np.sqrt((centred**2).mean() + 1e-8)
    return scaled * w[f'norm_{name}_scale'] + w[f'norm_{name}_shift']

  def linear(name, x):
    return x @ w[f'{name}_kernel'] + w[f'{name}_bias']

  n = len(vectors)
  h = [v * np.sqrt(WIDTH) + w['places'][n - 1 - i] for i, v in enumerate(vectors)]
  for l in range(BLOCKS):
    after = []
    for i in range(n):
      normed, read = norm(f'a_{l}', h[i]), []
      for head in range(HEADS):
        part = slice(head * WIDTH // HEADS, (head + 1) * WIDTH // HEADS)
        query = linear(f'query_{l}', normed)[part]
        keys = [linear(f'key_{l}', h[j])[part] for j in range(i + 1)]
        values = [linear(f'value_{l}', h[j])[part] for j in range(i + 1)]
        shares = softmax(np.array([query @ key for key in keys]) / np.sqrt(WIDTH / HEADS))
        read.append(sum(share * value for share, value in zip(shares, values)))
      a = normed + np.concatenate(read)
      hidden = np.maximum(linear(f'hidden_{l}', norm(f'b_{l}', a)), 0)
      after.append(a + linear(f'out_{l}', hidden))
    h = after
  return norm('last', h[-1])


class SASRecTest(tf.test.TestCase):
  def make(self, rate=0.0):
    layer = SASRec(MOST, BLOCKS, HEADS, rate, seed=1)
    layer.build(HistoryVectors(*map(tf.TensorShape, ([None, None, WIDTH], [None, None], [None]))))
    rng = np.random.default_rng(0)
    layer.set_weights([rng.normal(size=v.shape) for v in layer.weights])
    return layer

  def batch(self, lengths, places):
    rng = np.random.default_rng(1)
    mask = np.arange(places) < np.array(lengths)[:, None]
    vectors = rng.normal(size=[len(lengths), places, WIDTH]).astype(np.float32) * mask[:, :, None]
    return HistoryVectors(tf.constant(vectors), tf.constant(mask), tf.zeros([len(lengths), WIDTH]))

  def test_is_that_of_loops(self):
    layer, history = self.make(), self.batch([3, 0, 5, 1, 4], 5)
    weights = [(v.name, v.numpy()) for v in layer.weights]
    found = layer(history, None)
    for row, length in enumerate([3, 0, 5, 1, 4]):
      vectors = history.vectors.numpy()[row, :length]
      expected = encoded(weights, vectors) if length else np.zeros([WIDTH])
      self.assertAllClose(found[row], expected, rtol=1e-4, atol=1e-4)

  def test_does_not_depend_on_what_is_padded(self):
    layer = self.make(rate=0.5)
    position = tf.constant([3, 7], tf.int64)
    wide = self.batch([3, 2], 5)
    narrow = HistoryVectors(wide.vectors[:, :3], wide.mask[:, :3], wide.candidate)
    found = [layer(history, position, training=True) for history in (wide, narrow)]
    self.assertAllEqual(*found)
    self.assertNotAllClose(found[0], layer(wide, None))

  def test_drops_by_the_place_in_the_global_batch(self):
    layer, history = self.make(rate=0.5), self.batch([3, 2, 4], 5)
    whole = layer(history, tf.constant([3, 0], tf.int64), training=True)
    second = HistoryVectors(*(t[1:] for t in history))
    part = layer(second, tf.constant([3, 1], tf.int64), training=True)
    self.assertAllClose(whole[1:], part)

  def test_features_without_factors_do_not_take_part(self):
    layer, history = self.make(), self.batch([4], 5)
    mask = history.mask.numpy()
    mask[0, 3] = False  # the newest: as if it were not there
    shorter = HistoryVectors(history.vectors, tf.constant(mask), history.candidate)
    vectors = history.vectors.numpy()[0, :3]
    weights = [(v.name, v.numpy()) for v in layer.weights]
    self.assertAllClose(layer(shorter, None)[0], encoded(weights, vectors), rtol=1e-4, atol=1e-4)


if __name__ == '__main__':
  tf.test.main()
