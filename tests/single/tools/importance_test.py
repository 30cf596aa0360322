"""Permutation importance, against a permutation of the log's columns and against resampling."""

import tempfile

import numpy as np
import pandas as pd
import tensorflow as tf

from tests.support import small
from trainer import api
from trainer.evaluation.finished_run import open_run
from trainer.model import influence
from trainer.reporting.events import read_events
from trainer.tools.columns import units, without
from trainer.tools.importance import column_importance, importance_table

COLUMNS = ('hour', 'tags', 'noise', 'price')


def make_log(rng, samples):
  """Clicks that follow the hour, by which the log is sorted, the number of tags and the price."""
  hour = np.sort(rng.integers(0, 24, samples))
  number, noise = rng.integers(0, 4, samples), rng.integers(0, 30, samples)
  price = rng.normal(size=samples)
  logit = 0.15 * (hour - 12) + 0.8 * (number - 1.5) + price - 1
  click = rng.random(samples) < 1 / (1 + np.exp(-logit))
  tags = ['|'.join('abc'[:n]) for n in number]
  return pd.DataFrame(
    {'click': click.astype(int), 'hour': hour, 'tags': tags, 'noise': noise, 'price': price}
  )


def pairs_won(labels, predictions):
  """The share of pairs of a click and another sample in which the click is ranked above."""
  clicks, others = predictions[labels == 1][:, None], predictions[labels == 0]
  return float(np.mean(clicks > others) + np.mean(clicks == others) / 2)


def log_loss(labels, predictions):
  return -float(np.mean(np.log(np.where(labels == 1, predictions, 1 - predictions))))


class ImportanceTest(tf.test.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    rng = np.random.default_rng(0)
    cls.test = make_log(rng, 1500)
    cls.trained = api.fit(
      small.tree(
        run_dir=tempfile.mkdtemp(),
        data={
          'label': 'click',
          'slots': [{'name': 'hour'}, {'name': 'tags', 'separator': '|'}, {'name': 'noise'}],
          'dense': [{'name': 'price', 'transform': 'none'}],
        },
        sparse={'tables': {'default': {'width': 2}}},
        model={'interactions': ['linear', 'fm', {'dnn': {'hidden': [4]}}]},
        train={'batch_size': 64, 'epochs': 2},
      ),
      train=make_log(rng, 4000),
      test=cls.test,
    )
    cls.table = cls.trained.importance(cls.test)

  def test_it_is_what_a_permutation_of_the_column_costs(self):
    rng, times = np.random.default_rng(1), 12
    frames = [self.test]
    for column in COLUMNS:
      for _ in range(times):
        values = rng.permutation(self.test[column].to_numpy())
        frames.append(self.test.assign(**{column: values}))
    predictions = self.trained.predict(pd.concat(frames)).reshape(len(frames), -1).astype(float)
    labels = self.test['click'].to_numpy()
    for metric, measure, sign in (('auc', pairs_won, 1), ('logloss', log_loss, -1)):
      before, *after = (measure(labels, p) for p in predictions)
      for column, some in zip(COLUMNS, np.reshape(after, [-1, times])):
        with self.subTest(f'{metric} of {column}'):
          lost = sign * (before - some)
          # Both are means over permutations, five of the one and twelve of the other.
          by_chance = 3 * lost.std() * np.sqrt(1 / 5 + 1 / times)
          self.assertNear(self.table[f'{metric}_worse_by'][column], lost.mean(), by_chance)
          self.assertGreater(self.table[f'{metric}_plus_minus'][column], lost.std() / np.sqrt(5))

  def test_what_can_be_told_from_no_effect(self):
    is_clear = self.table['auc_worse_by'].abs() > self.table['auc_plus_minus']
    self.assertEqual(is_clear.to_dict(), {c: c != 'noise' for c in COLUMNS})
    (event,) = read_events(self.trained.run_dir).query('event == "importance"').to_dict('records')
    self.assertEqual((event['examples'], event['repetitions']), (1500, 5))
    own = event['columns']
    for name, column in (('auc', 'auc_worse_by'), ('auc_plus_minus',) * 2):
      self.assertAllClose(self.table[column], [own[c][name] for c in self.table.index], 1e-6)

  def test_the_order_of_the_samples_the_files_and_the_batch_size_do_not_matter(self):
    shuffled = self.test.sample(frac=1, random_state=0)
    for frame in (shuffled, self.test[::-1]):
      other = self.trained.importance(frame).loc[self.table.index]
      for metric in ('auc', 'logloss'):
        # Only the permutations differ, whose share of the interval is a part.
        self.assertAllLess(
          (other[f'{metric}_worse_by'] - self.table[f'{metric}_worse_by']).abs()
          / self.table[f'{metric}_plus_minus'],
          1,
        )
    folder = tempfile.mkdtemp()
    for name, some in (('a', self.test[:100]), ('b', self.test[100:])):
      some.to_parquet(f'{folder}/{name}.parquet')
    parts = f'{folder}/*.parquet'
    self.assertAllClose(self.trained.importance(parts), self.table, 1e-5, 1e-7)
    with open_run(self.trained.run_dir, ['train.batch_size=5000']) as run:
      prepared = run.inputs.prepared(api.passes_to_score(run, [parts]), 'test')
      self.assertAllClose(importance_table(run, prepared), self.table, 1e-5, 1e-7)

  def test_a_bound_on_predictions_scores_a_part_of_the_whole_log(self):
    with open_run(self.trained.run_dir) as run:
      prepared = run.inputs.prepared(api.passes_to_score(run, []), 'test')
      found = column_importance(run.cfg, run.inputs, prepared, 4000)
    self.assertEqual((found['examples'], found['repetitions']), (800, 1))
    for column, values in found['columns'].items():
      whole = self.table.loc[column]
      difference = abs(values['auc'] - whole['auc_worse_by'])
      self.assertLess(difference, values['auc_plus_minus'] + whole['auc_plus_minus'])
      self.assertEqual(abs(values['auc']) > values['auc_plus_minus'], column != 'noise')

  def test_a_column_is_permuted_with_all_that_is_made_of_it(self):
    bins = {'name': 'price bins', 'from': {'bins': 'price', 'quantiles': 4}}
    both = {'name': 'both', 'from': {'cross': ['hour', 'price bins']}}
    slots = [
      {'name': 'when', 'column': 'hour'},
      {'name': 'tags', 'separator': '|'},
      *(bins, both),
      {'name': 'before', 'column': 'noise', 'shares': 'when'},
    ]
    data = {'label': 'click', 'slots': slots, 'dense': [{'name': 'price'}, {'name': 'hour'}]}
    trained = api.fit(small.tree(data=data), run_dir=tempfile.mkdtemp(), train=self.test)
    places = {'hour': [0, 3, 4, 6], 'tags': [1], 'price': [2, 3, 5], 'noise': [4]}
    self.assertEqual(units(trained.cfg), places)
    table = trained.importance(self.test)
    self.assertCountEqual(table.index, places)
    # A linear model adds up: without the cross, which is of both, the price alone is permuted.
    others = self.test.assign(price=self.test['price'].to_numpy()[::-1])
    permuted = log_loss(self.test['click'], trained.predict(others).astype(float))
    whole = log_loss(self.test['click'], trained.predict(self.test).astype(float))
    self.assertGreater(table['logloss_worse_by']['price'], (permuted - whole) / 2)
    self.assertEqual(
      without(trained.cfg, 'price'),
      [
        'data.slots=[{"name": "when", "column": "hour"}, {"name": "tags", "separator": "|"}, '
        '{"name": "before", "column": "noise", "shares": "when"}]',
        'data.dense=[{"name": "hour"}]',
      ],
    )

  def test_few_clicks_say_nothing_about_auc(self):
    few = self.test[np.cumsum(self.test['click']) < 10]
    table = self.trained.importance(few)
    self.assertAllEqual(table['auc_worse_by'].isna(), [True] * 4)
    self.assertAllEqual(table['logloss_plus_minus'] > 0, [True] * 4)


class InfluenceTest(tf.test.TestCase):
  def test_intervals_are_those_of_resampling(self):
    """The differences of two models on the same samples, of unequal weights."""
    rng, n = np.random.default_rng(0), 600
    label = (rng.random(n) < 0.2).astype(float)
    weight = rng.uniform(0.5, 2, n)
    a, b = (1 / (1 + np.exp(-(label * s + rng.normal(size=n)).round(1))) for s in (1.0, 0.6))
    draws = rng.integers(0, n, [1000, n])
    for measure in (influence.auc, influence.logloss, influence.rmse):
      one, other = (measure(label, p, weight) for p in (a, b))
      error = np.linalg.norm(one.influence - other.influence)
      drawn = [
        measure(label[d], a[d], weight[d]).value - measure(label[d], b[d], weight[d]).value
        for d in draws
      ]
      self.assertAllClose(error, np.std(drawn), 0.1)

  def test_values(self):
    rng = np.random.default_rng(0)
    label, p = rng.integers(0, 2, 50).astype(float), rng.random(50).round(1) * 0.9 + 0.05
    ones = np.ones(50)
    self.assertAllClose(influence.auc(label, p, ones).value, pairs_won(label, p))
    self.assertAllClose(influence.logloss(label, p, ones).value, log_loss(label, p))
    self.assertAllClose(influence.rmse(label, p, ones).value, np.sqrt(np.mean((label - p) ** 2)))
    self.assertIsNone(influence.auc(np.append(ones[:9], 0 * ones), np.ones(59), np.ones(59)))
    self.assertIsNone(influence.rmse(ones[:0], ones[:0], ones[:0]))


if __name__ == '__main__':
  tf.test.main()
