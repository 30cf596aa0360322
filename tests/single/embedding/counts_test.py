"""The layers read counts of before the sample, in every epoch, so that no label leaks."""

import collections
import os
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from ops.row_store import RowStore
from tests.support import noise
from tests.support.batches import make_batch
from tests.support.steps import COUNTS, make_config, train
from trainer import api, config
from trainer.comm.communicator import SingleProcess
from trainer.data.features import COUNT_SMOOTHING, transform_counts
from trainer.embedding.exchange import LocalRows
from trainer.errors import ConfigError
from trainer.training.step import TrainStep

LOG_ODDS = -1.2


def expected(shows: np.ndarray, clicks: np.ndarray) -> np.ndarray:
  """The formulas of docs/layers.md, by NumPy: [B, 2·Fc] of shows and clicks [B, Fc]."""
  rate = 1 / (1 + np.exp(-LOG_ODDS))
  odds = (clicks + COUNT_SMOOTHING * rate) / (shows - clicks + COUNT_SMOOTHING * (1 - rate))
  return np.concatenate([shows / (shows + COUNT_SMOOTHING), np.log(odds) - LOG_ODDS], 1)


class CountsTest(tf.test.TestCase):
  def test_formulas(self):
    shows = np.array([[0.0, 1.0], [3.0, 1e6], [5.5, 7.0]])
    clicks = np.array([[0.0, 1.0], [0.0, 1e3], [2.5, 7.0]])
    found = transform_counts(np.float32(np.stack([shows, clicks], -1)), tf.constant(LOG_ODDS))
    self.assertAllClose(found, expected(shows, clicks), 1e-5, 1e-5)
    self.assertAllClose(found[0], [0, 1 / 11, 0, found[0, 3]])  # no shows: 0 and 0
    late = transform_counts(np.float32([[[1, 3]]]), tf.constant(LOG_ODDS))  # clicks without a show
    self.assertTrue(np.isfinite(late).all())

  def test_layers_read_the_counts_of_earlier_batches(self):
    for single in (False, True):  # also where each slot has one feature
      cfg = make_config(COUNTS)
      step = TrainStep(cfg, SingleProcess())
      step.dense.embedding.stats.assign(np.float32([[0, 0, LOG_ODDS], [1, 1, 1], [0, 0, 0]]))
      rows, rng = LocalRows(step.store, reads_counts=True), np.random.default_rng(4)
      counts = collections.defaultdict(lambda: np.zeros(2))
      for size in (7, 16, 0, 16):
        batch = make_batch(rng, size, single=single)
        segments = np.arange(len(batch.keys)) if single else batch.segments
        seen = np.zeros([size * 3, 2])
        for key, segment in zip(batch.keys, segments):
          seen[segment] += counts[key]
        seen = seen.reshape([size, 3, 2])[:, :2]  # the last slot has no counts
        staged = step.stage(batch)
        pulled = rows.pull(staged.deduped, (), True)
        dense = step.dense.embedding.embed(staged.batch, staged.deduped, pulled).dense
        self.assertAllClose(dense[:, 2:], expected(seen[..., 0], seen[..., 1]), 1e-5, 1e-5)
        train(step, batch)
        for key, segment in zip(batch.keys, segments):
          counts[key] += 1, batch.label[segment // 3]

  def test_counts_begin_anew_and_rows_stay(self):
    step = TrainStep(make_config(COUNTS), SingleProcess())
    batch = make_batch(np.random.default_rng(4), 16)
    train(step, batch)
    keys = np.unique(batch.keys)
    before = step.store.pull(keys, False)
    step.store.forget_counts()
    found = step.store.lookup(keys)
    self.assertAllEqual(found['show'], np.zeros(len(keys)))
    self.assertAllEqual(found['click'], np.zeros(len(keys)))
    self.assertTrue(np.all(found['exists']))
    self.assertAllEqual(step.store.pull(keys, False).factors, before.factors)
    train(step, batch)
    self.assertEqual(float(np.sum(step.store.lookup(keys)['show'])), len(batch.keys))

  def fit(self, name: str, **changes: object) -> list[float]:
    """The training AUC of each epoch on labels that are noise; each sample before its step."""
    folder = self.get_temp_dir()
    run = api.fit(noise.config(folder, **changes), run_dir=os.path.join(folder, name))
    events = run.metrics.query("event == 'train'")
    held_out = run.metrics.query("event == 'eval' and split == 'valid'")
    self.assertNear(held_out['auc'].iloc[-1], 0.5, 0.04)
    return events['auc'].tolist()

  @pytest.mark.long
  def test_noise_stays_noise(self):
    """Three epochs on labels by chance: what the counts tell of them is nothing."""
    # Rows that learn nothing leave the counts alone with the layers.
    alone = self.fit('alone', rows_learn=False)
    self.assertAllClose(alone, [0.5] * 3, atol=0.03)
    # Rows learn labels by heart, with and without counts; together they do not learn more.
    without, together = self.fit('without', counts=False), self.fit('together')
    self.assertAllLess(np.subtract(together, without), 0.03)
    # The test sees leaks: counts that hold the labels of the epoch before.
    with mock.patch.object(RowStore, 'forget_counts', lambda self: None):
      leaking = self.fit('leaking', rows_learn=False)
    self.assertGreater(leaking[1], 0.53)

  def test_mistakes_are_told(self):
    for changes, text in (
      ({'sync.mode': 'ps_geo'}, "mode 'ps_geo'"),
      ({'model.loss': 'squared_error'}, 'no clicks'),
      ({'lifecycle.eviction': 'score', 'train.epochs': 2}, 'begin anew'),
      ({'lifecycle.capacity': 9, 'train.epochs': 2}, 'lifecycle.capacity_by: score'),
    ):
      with self.assertRaisesRegex(ConfigError, f"key 'data.slots.0.counts': found true.*{text}"):
        make_config(COUNTS | changes)
    make_config(COUNTS | {'lifecycle.eviction': 'score'})
    self.assertEqual(config.parse(config.dump(make_config(COUNTS)), '').counted_fields(), [0, 1])


if __name__ == '__main__':
  tf.test.main()
