"""What is told by slot: calibration, unknown features, what the tables hold."""

import numpy as np
import tensorflow as tf
from sklearn.metrics import roc_auc_score

from tests.support.batches import make_batch
from tests.support.steps import make_config
from trainer.embedding.slot_statistics import (
  MOST_FEATURES,
  SlotStatistics,
  effective_rank,
  shards_to_read,
)
from trainer.model.calibration import (
  SlotCalibration,
  deciles,
  prediction_histogram,
  ranking,
  spread,
  unknown_jumps,
)
from trainer.model.metrics import MetricSums


def histogram_of(labels, predictions):
  metrics = MetricSums({'click': 'clicks'})
  metrics.update(labels, predictions, tf.ones_like(labels))
  return metrics.state()['histogram']


class CalibrationTest(tf.test.TestCase):
  def test_deciles_equal_sorting(self):
    rng = np.random.default_rng(0)
    p = (1 / (1 + np.exp(-rng.normal(-2, 1, 20_000)))).astype(np.float32)
    y = (rng.random(20_000) < p).astype(np.float32)
    order = np.argsort(p).reshape(10, -1)
    wanted = np.stack([np.full(10, 2000), p[order].mean(1), y[order].mean(1)], 1)
    found = np.array(list(deciles(histogram_of(y, p)).values())).T
    self.assertAllClose(found[:, 0], wanted[:, 0], atol=20)
    self.assertAllClose(found[:, 1:], wanted[:, 1:], atol=2e-3)
    bins = prediction_histogram(histogram_of(y, p))
    self.assertAllClose(bins[:, 2], np.histogram(p, np.arange(51) / 50)[0], atol=20)

  def test_equal_predictions_are_one_tenth(self):
    found = deciles(histogram_of(np.array([0, 1, 1, 0], np.float32), np.full(4, 0.25, np.float32)))
    self.assertAllClose(list(found.values()), [[4], [0.25], [0.5]], atol=1e-3)

  def test_ranking_and_spread_equal_sorting(self):
    rng = np.random.default_rng(3)
    p = (1 / (1 + np.exp(-rng.normal(-3, 1.5, 20_000)))).astype(np.float32)
    y = (rng.random(20_000) < p).astype(np.float32)
    histogram = histogram_of(y, p)
    found = ranking(histogram)
    of_order = y[np.argsort(-p)]
    for share, clicks, others in zip(*found.values()):
      first = of_order[: round(share * len(y))]
      self.assertAllClose(clicks, first.sum() / y.sum(), atol=2e-3)
      self.assertAllClose(others, (1 - first).sum() / (1 - y).sum(), atol=2e-3)
    area = np.trapezoid if hasattr(np, 'trapezoid') else np.trapz
    self.assertAllClose(area(found['clicks'], found['others']), roc_auc_score(y, p), atol=5e-3)
    found = spread(histogram)
    inner = slice(1, -1)
    for kind, label in (('clicks', 1), ('others', 0)):
      counts = np.histogram(p[y == label], found['edges'])[0]
      self.assertAllClose(found[kind][inner], counts[inner], atol=10)
      self.assertEqual(sum(found[kind]), (y == label).sum())
    of_one_class = histogram_of(np.zeros(4, np.float32), np.full(4, 0.25, np.float32))
    self.assertEqual(ranking(of_one_class), {})
    self.assertEqual(sum(spread(of_one_class)['others']), 4)
    self.assertEqual(spread(np.zeros([2, 100])), {})

  def test_slots_equal_a_loop(self):
    rng = np.random.default_rng(1)
    for single in (True, False):
      parts = SlotCalibration(['a', 'b', 'c']), SlotCalibration(['a', 'b', 'c'])
      sums = np.zeros([3, 7])
      for part in parts:
        batch = make_batch(rng, 50, single=single)
        known = rng.random(len(batch.keys)) < 0.7
        p = rng.random(50).astype(np.float32)
        part.update(batch, known, p)
        segments = batch.segments if len(batch.segments) else np.arange(150)
        for sample in range(50):
          w = float(batch.weight[sample])
          for slot in range(3):
            own = known[segments == sample * 3 + slot]
            values = np.array([w * p[sample], w * batch.label[sample]])
            sums[slot] += [1, len(own) == 0, len(own) > 0 and not own.any(), 0, 0, 0, 0]
            sums[slot, 3:5] += values * own.any()
            sums[slot, 5:7] += values * (not own.any())
      total = {'slots': parts[0].state()['slots'] + parts[1].state()['slots']}
      self.assertAllClose(total['slots'], sums, rtol=1e-5)
      found = parts[0].result(total)['b']
      self.assertAllClose(found['unknown'], sums[1, 2] / 100)
      self.assertAllClose(found['calibration_known'], sums[1, 3] / sums[1, 4], rtol=1e-5)

  def test_features_that_are_written_otherwise_are_told(self):
    healthy = {'a': {'blank': 0.5, 'unknown': 0.1}, 'query': {'blank': 0.0, 'unknown': 0.8}}
    other = {'a': {'blank': 0.5, 'unknown': 0.48}, 'query': {'blank': 0.0, 'unknown': 0.85}}
    self.assertEqual(unknown_jumps(other, []), [], 'some are known, so the others are new')
    (told,) = unknown_jumps({'a': {'blank': 0.5, 'unknown': 0.5}}, [])
    self.assertRegex(told, "^slot 'a': 100% of the samples .* not u4117")
    (told,) = unknown_jumps(other, [healthy] * 3)
    self.assertRegex(told, "^slot 'a': 96% of the samples .*, 20% in the evaluations before; ")
    self.assertEqual(unknown_jumps(other, [other]), [], 'it is told once')
    (told,) = unknown_jumps({'query': {'blank': 0.0, 'unknown': 0.95}}, [healthy])
    self.assertRegex(told, "^slot 'query': 95% of the samples .*, 80% in the evaluations before; ")
    self.assertEqual(unknown_jumps({'a': {'blank': 1.0, 'unknown': 0.0}}, []), [])


class StatisticsTest(tf.test.TestCase):
  def chunk(self, rng, rows=400, width=4):
    admitted = rng.random(rows) < 0.5
    return {
      'key': np.arange(rows),
      'slot': rng.integers(1, 4, rows).astype(np.uint16),
      'admitted': admitted,
      'show': rng.integers(0, 20, rows).astype(float),
      'click': rng.integers(0, 5, rows).astype(float),
      'shard': np.int64(3),
      'linear': rng.normal(size=[rows, 2]).astype(np.float32),
      # Beside the weights lies their optimizer's state.
      'factors_default': rng.normal(size=[admitted.sum(), 2 * width]).astype(np.float32),
    }

  def test_equal_a_loop_over_slots(self):
    cfg, rng = make_config({}), np.random.default_rng(0)
    statistics = SlotStatistics(cfg.own_slot_ids(), cfg.data.slots, {'default': 4})
    chunks = [self.chunk(rng) for _ in range(2)]
    for chunk in chunks:
      # Slot 2: column 1 is dead; slot 3: all rows lie on one line.
      slots = chunk['slot'][chunk['admitted']]
      chunk['factors_default'][slots == 2, 1] = 0
      line = rng.normal(size=[(slots == 3).sum(), 1]) * [1.0, 2, 3, 4]
      chunk['factors_default'][slots == 3, :4] = line
      statistics.add(chunk)
    found = statistics.result(statistics.state(), share=0.5)
    for i, name in enumerate('abc'):
      own = [c['slot'] == i + 1 for c in chunks]
      self.assertEqual(found[name]['features'], 2 * sum(o.sum() for o in own))
      admitted = [o & c['admitted'] for o, c in zip(own, chunks)]
      self.assertEqual(found[name]['admitted'], 2 * sum(a.sum() for a in admitted))
      weights = np.concatenate(
        [c['factors_default'][o[c['admitted']], :4] for o, c in zip(own, chunks)]
      )
      self.assertAllClose(found[name]['norm'], np.linalg.norm(weights, axis=1).mean(), rtol=1e-5)
    self.assertEqual([found[s]['dead_columns'] for s in 'abc'], [[], [1], []])
    self.assertGreater(found['a']['effective_rank'], 3.9)
    self.assertBetween(found['b']['effective_rank'], 2.9, 3.01)
    self.assertAllClose(found['c']['effective_rank'], 1.0, atol=1e-3)
    self.assertAllClose(sum(row['bytes_share'] for row in found.values()), 1)
    bins = statistics.norm_histograms(statistics.state())['a']
    self.assertEqual(2 * bins[:, 2].sum(), found['a']['admitted'])

  def test_effective_rank(self):
    self.assertAllClose(effective_rank(np.eye(5)), 5)
    self.assertAllClose(effective_rank(np.zeros([3, 3])), 0)
    entropy = -(0.75 * np.log(0.75) + 0.25 * np.log(0.25))
    self.assertAllClose(effective_rank(np.diag([9.0, 1])), np.exp(entropy))

  def test_how_much_is_read(self):
    self.assertEqual(shards_to_read(1000, range(128, 256)), (range(128, 256), 1.0))
    shards, share = shards_to_read(16 * MOST_FEATURES, range(128, 256))
    self.assertEqual((shards, share), (range(128, 136), 8 / 128))
    self.assertLen(shards_to_read(10**12, range(256))[0], 1)


if __name__ == '__main__':
  tf.test.main()
