"""The made-up log: repeatable, as told by its truth, and readable by configs/demo.yaml."""

import hashlib
import json
import os
import pathlib

import numpy as np
import pandas as pd
import tensorflow as tf
from sklearn.metrics import log_loss, roc_auc_score

from trainer import config
from trainer.data.conversion import prepare_pass
from trainer.data.prepared import PreparedPass
from trainer.data.synthetic import World, best_reachable, synthesize

ROOT = pathlib.Path(__file__).resolve().parents[2]


class SynthesizeTest(tf.test.TestCase):
  def path(self, *names):
    return os.path.join(self.get_temp_dir(), *names)

  def digests(self, directory):
    return {
      name: hashlib.sha256(pathlib.Path(directory, name).read_bytes()).hexdigest()
      for name in os.listdir(directory)
    }

  def test_repeatable(self):
    for out, days, seed in (('a', 2, 7), ('b', 2, 7), ('more', 3, 7), ('other', 2, 8)):
      synthesize(self.path(out), days, 3000, seed, 100, 50)
    a, b, more, other = (self.digests(self.path(d)) for d in ('a', 'b', 'more', 'other'))
    self.assertEqual(set(a), {'day_00.csv', 'day_01.csv', 'test_day_02.csv', 'truth.json'})
    self.assertEqual(a, b)
    self.assertEqual(
      [more['day_00.csv'], more['day_01.csv'], more['day_02.csv']],
      [a['day_00.csv'], a['day_01.csv'], a['test_day_02.csv']],
    )
    self.assertNotEqual(a['day_00.csv'], other['day_00.csv'])

  def test_bound_is_that_of_the_true_probabilities(self):
    world = World(1, 500, 300, 3)
    table, probability, click = world.log(2, 20_000)
    best = best_reachable(probability, click)
    self.assertAllClose(best['auc'], roc_auc_score(click, probability), 1e-9)
    self.assertAllClose(best['logloss'], log_loss(click, probability), 1e-9)
    self.assertAllEqual(table['click'].to_numpy(), click)
    # The clicks are drawn from these probabilities: calibrated in every fifth of them.
    for part in np.array_split(np.argsort(probability), 5):
      p = probability[part]
      self.assertLess(abs(click[part].sum() - p.sum()), 4 * np.sqrt((p * (1 - p)).sum()))

  def test_ties_and_one_class(self):
    p, click = np.array([0.5, 0.5, 0.2, 0.9, 0.2]), np.array([True, False, False, True, True])
    self.assertAllClose(best_reachable(p, click)['auc'], roc_auc_score(click, p))
    self.assertIsNone(best_reachable(p, np.zeros(5, bool))['auc'])

  def test_the_world(self):
    truth = synthesize(self.path('log'), 4, 20_000, 0, 2000, 1000)
    with open(self.path('log', 'truth.json')) as f:
      self.assertEqual(json.load(f), truth)
    days = [pd.read_csv(self.path('log', f'day_{d:02d}.csv')) for d in range(4)]
    for day, name in zip(days, truth['passes']):
      self.assertBetween(day.click.mean(), 0.1, 0.25)
      self.assertAllClose(truth['passes'][name]['ctr'], day.click.mean())
      self.assertBetween(truth['passes'][name]['auc'], 0.8, 0.9)
      self.assertBetween(day.price.isna().mean(), 0.03, 0.07)
      self.assertBetween(day.age.isna().mean(), 0.05, 0.4)
    items = [set(d.item) for d in days]
    self.assertGreater(len(items[3] - items[0]), 50)  # born
    self.assertGreater(len(items[0] - items[3]), 50)  # died
    for column in ('user', 'item'):  # power laws: the first hundredth takes far more than its share
      counts = days[0][column].value_counts()
      self.assertGreater(counts.iloc[: len(counts) // 100].sum() / counts.sum(), 0.08)
    self.assertTrue(days[0].tags.isna().any() and days[0].tags.str.contains('|', regex=False).any())

  def test_demo_config_reads_it(self):
    cfg = config.load(ROOT / 'configs' / 'demo.yaml')
    synthesize(self.path('log'), 1, 2000, 0, 100, 50)
    meta = prepare_pass(cfg, self.path('log', 'day_00.csv'), self.path('out'))
    self.assertEqual((meta['samples'], meta['bad']['records']), (2000, 0))
    log = pd.read_csv(self.path('log', 'day_00.csv'))
    batch = next(PreparedPass(self.path('out'), cfg).batches(2000))
    self.assertAllEqual(batch.label, log.click)
    self.assertAllClose(batch.dense, log[['price', 'age']])
    tags = batch.segments % len(cfg.slots) == [s.name for s in cfg.slots].index('tags')
    self.assertEqual(tags.sum(), log.tags.dropna().str.count(r'\|').add(1).sum())


if __name__ == '__main__':
  tf.test.main()
