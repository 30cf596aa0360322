"""Which passes there are, and that their global batches are the same for any number of ranks."""

import os
from unittest import mock

import numpy as np
import tensorflow as tf

from trainer import config
from trainer.data import prepared
from trainer.data.parse import Parsed
from trainer.data.passes import Pass, passes
from trainer.data.prepared import PreparedPass, Writer
from trainer.data.schema import schema
from trainer.errors import ConfigError, UserError

SLOTS, DENSE = 3, 2


def make_config(**data):
  tree = {
    'slots': [{'name': f's{i}'} for i in range(SLOTS)],
    'dense': [{'name': f'd{i}'} for i in range(DENSE)],
    'weight': 'w',
    'group': 's0',
  }
  return config.Config.model_validate({'data': tree | data, 'model': {'interactions': ['linear']}})


class PassesTest(tf.test.TestCase):
  def path(self, *names):
    return os.path.join(self.get_temp_dir(), *names)

  def touch(self, *names):
    for name in names:
      os.makedirs(os.path.dirname(self.path(name)), exist_ok=True)
      open(self.path(name), 'w').close()

  def test_order_names_and_days(self):
    self.touch('day_10.csv', 'day_02.csv.gz', 'first_day_3.parquet', 'other/x')
    cfg = make_config(day_pattern=r'day_(\d+)')
    found = passes(cfg, [self.path('first*'), self.path('day_*')], 'data.train')
    self.assertEqual(
      found,
      [
        Pass('first_day_3', self.path('first_day_3.parquet'), 3),
        Pass('day_02', self.path('day_02.csv.gz'), 2),
        Pass('day_10', self.path('day_10.csv'), 10),
      ],
    )
    self.assertEqual(
      passes(cfg, [self.path('other/x')], 'data.test'), [Pass('x', self.path('other/x'), 0)]
    )
    self.assertEqual(passes(make_config(), [self.path('day_10.csv')], 'data.train')[0].day, 0)

  def test_mistakes(self):
    self.touch('a.csv', 'b/a.csv', 'day_x.csv')
    cfg = make_config(day_pattern=r'day_(\w+)')
    with self.assertRaisesRegex(ConfigError, "data.train: found no file that matches '.*nothing"):
      passes(cfg, [self.path('nothing*')], 'data.train')
    with self.assertRaisesRegex(UserError, 'a.csv: data.day_pattern .* does not match'):
      passes(cfg, [self.path('a.csv')], 'data.train')
    with self.assertRaisesRegex(
      UserError, "data.day_pattern: found 'x' in the name 'day_x.csv'; wanted an integer"
    ):
      passes(cfg, [self.path('day_x.csv')], 'data.train')
    with self.assertRaisesRegex(UserError, "are both named 'a'"):
      passes(make_config(), [self.path('a.csv'), self.path('b/*')], 'data.train')
    with self.assertRaisesRegex(UserError, 'not a prepared pass'):
      passes(make_config(format='prepared'), [self.path('b')], 'data.train')


class BatchesTest(tf.test.TestCase):
  def write(self, n, ragged, name='pass'):
    """A pass whose samples can be told apart, and its content by sample.

    Returns: (PreparedPass, list of comparable tuples).
    """
    rng = np.random.default_rng(n)
    counts = rng.integers(0, 4, [n, SLOTS]) if ragged else np.ones([n, SLOTS], np.int64)
    keys = np.arange(counts.sum())
    values = rng.random(len(keys)).astype(np.float32) if ragged else None
    dense = rng.random([n, DENSE]).astype(np.float32)
    label, weight, group = (
      (np.arange(n) + 0.25).astype(np.float32),
      rng.random(n).astype(np.float32),
      rng.integers(0, 9, n),
    )
    directory = os.path.join(self.get_temp_dir(), name)
    os.makedirs(directory, exist_ok=True)
    writer = Writer(directory, SLOTS, DENSE, True, True)
    split = n // 3
    ends = np.cumsum(counts.sum(1))
    for lo, hi in ((0, split), (split, n)):
      a, b = (0 if lo == 0 else ends[lo - 1]), (0 if hi == 0 else ends[hi - 1])
      writer.add(
        Parsed(
          counts[lo:hi],
          keys[a:b],
          None if values is None else values[a:b],
          dense[lo:hi],
          label[lo:hi],
          weight[lo:hi],
          group[lo:hi],
          None,
          None,
          None,
        )
      )
    writer.close({'schema': schema(make_config()), 'day': 4})
    starts = (np.cumsum(counts) - counts.ravel()).reshape(n, SLOTS)
    by_slot = [[tuple(keys[s : s + c]) for s, c in zip(starts[i], counts[i])] for i in range(n)]
    samples = [(*by_slot[i], tuple(dense[i]), label[i], weight[i], group[i]) for i in range(n)]
    return PreparedPass(directory, make_config()), samples

  def samples(self, batch):
    """A batch, sample by sample, as `write` has them."""
    b = len(batch.label)
    segments = batch.segments if len(batch.segments) else np.arange(len(batch.keys))
    by_slot = [tuple(batch.keys[segments == s]) for s in range(b * SLOTS)]
    return [
      (
        *by_slot[i * SLOTS : (i + 1) * SLOTS],
        tuple(batch.dense[i]),
        batch.label[i],
        batch.weight[i],
        batch.group[i],
      )
      for i in range(b)
    ]

  def test_in_order(self):
    for n in (1, 7, 40):
      for ragged in (False, True):
        one, samples = self.write(n, ragged)
        self.assertEqual((one.day, one.num_batches(8)), (4, -(-n // 8)))
        self.assertEqual([s for b in one.batches(8) for s in self.samples(b)], samples)

  def test_ranks_side_by_side_are_one_process(self):
    for n in (1, 2, 100):
      for ragged in (False, True):
        one, samples = self.write(n, ragged)
        options = {'seed': 5, 'epoch': 2, 'shuffle': True}
        alone = [self.samples(b) for b in one.batches(16, **options)]
        self.assertEqual([len(b) for b in alone], [16] * (n // 16) + [n % 16])
        self.assertCountEqual([s for b in alone for s in b], samples)
        for size in (2, 3):
          ranks = [list(one.batches(16, rank, size, **options)) for rank in range(size)]
          self.assertEqual(
            [len(r) for r in ranks], [one.num_batches(16)] * size
          )  # an empty slice is a batch too
          self.assertEqual(
            [sum((self.samples(b) for b in step), []) for step in zip(*ranks)], alone
          )

  def test_empty_slice(self):
    one, _ = self.write(1, True)
    batch = next(one.batches(16, rank=0, size=2))
    self.assertEqual([a.shape for a in batch], [(0,), (0,), (0,), (0, DENSE), (0,), (0,), (0,)])

  def test_values_travel_with_their_keys(self):
    one, _ = self.write(60, True)
    stored = np.load(os.path.join(one.path, 'values.npy'))
    for batch in one.batches(16, rank=1, size=3, shuffle=True):
      self.assertAllEqual(batch.values, stored[batch.keys])

  def test_order_follows_seed_epoch_and_name(self):
    one, _ = self.write(50, False)
    other, _ = self.write(50, False, 'other')

    def order(p, **options):
      return [b.label.tolist() for b in p.batches(16, shuffle=True, **options)]

    self.assertEqual(order(one, seed=1, epoch=1), order(PreparedPass(one.path), seed=1, epoch=1))
    different = [
      order(one, seed=1, epoch=1),
      order(one, seed=2, epoch=1),
      order(one, seed=1, epoch=2),
      order(other, seed=1, epoch=1),
    ]
    self.assertEqual(len({str(o) for o in different}), 4)

  def test_blocks_and_windows(self):
    # The way of large passes: every sample once, the same for all ranks, resumed anywhere, mixed
    # across blocks.
    with mock.patch.multiple(prepared, SMALL_PASS=10, BLOCK=8, WINDOW=32):
      for n in (10, 64, 203, 1000):
        one, _ = self.write(n, True)
        alone = [self.samples(b) for b in one.batches(7, seed=3, shuffle=True)]
        labels = np.array([s[-3] for b in alone for s in b])
        self.assertAllEqual(np.sort(labels), np.arange(n) + 0.25)
        if n > 32:  # neighbours are mostly of different blocks
          self.assertGreater(np.count_nonzero(np.diff(labels // 8)), n // 2)
        ranks = [
          [self.samples(b) for b in one.batches(7, r, 3, seed=3, shuffle=True)] for r in range(3)
        ]
        self.assertEqual([a + b + c for a, b, c in zip(*ranks)], alone)
        for start in (1, len(alone) // 2, len(alone)):
          self.assertEqual(
            [self.samples(b) for b in one.batches(7, seed=3, shuffle=True, start_batch=start)],
            alone[start:],
          )

  def test_resume_at_a_batch(self):
    for shuffle in (False, True):
      one, _ = self.write(50, True)
      alone = [self.samples(b) for b in one.batches(8, rank=1, size=2, shuffle=shuffle)]
      for start in (0, 3, 6, 7):
        self.assertEqual(
          [
            self.samples(b)
            for b in one.batches(8, rank=1, size=2, shuffle=shuffle, start_batch=start)
          ],
          alone[start:],
        )


if __name__ == '__main__':
  tf.test.main()
