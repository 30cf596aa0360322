"""The made-up log: repeatable, as told by its truth, and readable by configs/demo.yaml."""

import hashlib
import json
import os
import pathlib

import numpy as np
import pandas as pd
import tensorflow as tf
from sklearn.metrics import log_loss, roc_auc_score

from examples.synthetic_log import World, best_reachable, synthesize
from trainer import config
from trainer.data.conversion import prepare_pass
from trainer.data.prepared import PreparedPass

ROOT = pathlib.Path(__file__).resolve().parents[3]


class SynthesizeTest(tf.test.TestCase):
  def path(self, *names):
    return os.path.join(self.get_temp_dir(), *names)

  def digests(self, directory):
    return {
      name: hashlib.sha256(pathlib.Path(directory, name).read_bytes()).hexdigest()
      for name in os.listdir(directory)
    }

  def test_equal_arguments_give_equal_files(self):
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
    log = world.log(2, 20_000)
    table, probability, click = log.table, log.probability, log.click
    best = best_reachable(probability, click)
    self.assertAllClose(best['auc'], roc_auc_score(click, probability), 1e-9)
    self.assertAllClose(best['logloss'], log_loss(click, probability), 1e-9)
    self.assertAllEqual(table['click'].to_numpy(), click)
    # The clicks are drawn from these probabilities: calibrated in every fifth of them.
    for part in np.array_split(np.argsort(probability), 5):
      p = probability[part]
      self.assertLess(abs(click[part].sum() - p.sum()), 4 * np.sqrt((p * (1 - p)).sum()))

  def test_conversions_come_late_and_histories_are_what_was_clicked_before(self):
    plain, more = self.path('plain'), self.path('more')
    synthesize(plain, 3, 5000, 1, 200, 100)
    truth = synthesize(more, 3, 5000, 1, 200, 100, conversions=True, histories=True)
    days = [pd.read_csv(os.path.join(more, f'day_{d:02d}.csv')) for d in range(3)]
    streams = [pd.read_csv(os.path.join(more, f'stream_{d:02d}.csv')) for d in range(3)]
    late = [stream[stream.click.isna()] for stream in streams]
    for day, stream in zip(days, streams):
      self.assertAllEqual(stream.user[stream.click.notna()], day.user)
    before = pd.read_csv(os.path.join(plain, 'day_00.csv'))
    for name in ('user', 'item', 'query', 'price'):  # the same impressions
      self.assertTrue(before[name].equals(days[0][name]))
    for day, again in zip(days, late):
      self.assertTrue((day.conversion <= day.click).all())
      self.assertTrue((day.conversion_seen <= day.conversion).all())
      self.assertEqual(day.conversion_now.sum(), 0)
      self.assertAllEqual(day.delay_days.notna(), day.conversion == 1)
      self.assertTrue((again.conversion_now == 1).all())
    # Each conversion stands once among the late ones, on the day that it comes on.
    comes = np.concatenate(
      [
        np.floor(d + day.hour / 24 + day.delay_days)[day.conversion == 1]
        for d, day in enumerate(days)
      ]
    )
    self.assertAllClose(
      [len(again) for again in late], [(comes == d).sum() for d in range(3)], atol=2
    )
    self.assertEqual(len(late[0]), days[0].conversion_seen.sum())
    self.assertTrue(days[0].history.isna().all())
    user = days[0][days[0].click == 1].user.value_counts().index[0]
    clicked = days[0][(days[0].click == 1) & (days[0].user == user)].item.tolist()
    for history in days[1][days[1].user == user].history:
      self.assertEqual([int(i) for i in str(history).split('|')], clicked[-20:])
    for d, day in enumerate(days):
      best = truth['passes'][f'day_{d:02d}']['tasks']
      self.assertAllClose(best['conversion']['ctr'], day.conversion.mean())
      self.assertBetween(best['conversion']['auc'], 0.8, 0.99)

  def test_drift(self):
    still, moving = (World(3, 400, 200, 3, True, drift=drift) for drift in (0.0, 0.2))
    logs = [[world.log(day, 4000) for day in range(3)] for world in (still, moving)]
    users = [[set(log.table['user'].to_pylist()) for log in of_world] for of_world in logs]
    self.assertEqual(users[0][0], users[1][0])
    self.assertLess(max(users[0][2]), 400)
    gone, new = users[1][0] - users[1][2], users[1][2] - users[1][0]
    self.assertBetween(len(gone) / 400, 0.2, 0.5)  # 1 − .8² of those that were there, about
    self.assertBetween(len([u for u in new if u >= 400]) / 400, 0.15, 0.45)
    # What moves keeps its spread, and little of where it was.
    before, after = World(3, 400, 200, 3, True).item_worth, moving.item_worth
    self.assertBetween(np.std(after), 0.8, 1.2)
    self.assertBetween(np.corrcoef(before, after)[0, 1], 0.65, 0.9)

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
    tags = batch.segments % len(cfg.data.slots) == [s.name for s in cfg.ordered_slots].index('tags')
    self.assertEqual(tags.sum(), log.tags.dropna().str.count(r'\|').add(1).sum())


if __name__ == '__main__':
  tf.test.main()
