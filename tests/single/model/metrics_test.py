"""Metrics against scikit-learn's."""

import numpy as np
import tensorflow as tf
from sklearn.metrics import log_loss, roc_auc_score

from ops import library
from trainer.model.metrics import MetricSums, group_auc_sums, result
from trainer.reporting.metric_text import auc_interval_of, clicks_of


def kinds(loss='log_loss'):
  return {'label': loss if loss == 'squared_error' else 'clicks'}


def sample(n, mean, spread, seed=0):
  """Labels of probabilities with normal logits: (labels, predictions float32, weights)."""
  rng = np.random.default_rng(seed)
  logits = rng.normal(mean, spread, n)
  # So that the classes separate, whatever the spread.
  truth = 1 / (1 + np.exp(-(logits - mean) * 2 / spread))
  predictions = (1 / (1 + np.exp(-logits))).astype(np.float32)
  return (
    (rng.random(n) < truth).astype(np.float32),
    predictions,
    rng.integers(1, 4, n).astype(np.float32),
  )


class MetricsTest(tf.test.TestCase):
  def test_equals_sklearn_in_batches(self):
    y, p, w = sample(20000, -1, 1.5)
    metrics = MetricSums(kinds())
    update = tf.function(metrics.update)
    for i in range(0, 20000, 7000):
      update(y[i : i + 7000], p[i : i + 7000], w[i : i + 7000])
    update(tf.zeros([0]), tf.zeros([0]), tf.zeros([0]))
    found = result(metrics.state())
    self.assertAllClose(found['auc'], roc_auc_score(y, p, sample_weight=w), atol=1e-5)
    self.assertAllClose(
      found['logloss'], log_loss(y, p.astype(np.float64), sample_weight=w), atol=1e-7
    )
    self.assertAllClose(
      found['calibration'], (w * p.astype(np.float64)).sum() / (w * y).sum(), rtol=1e-9
    )
    self.assertAllClose(found['ctr'], np.average(y, weights=w), rtol=1e-9)
    self.assertEqual(found['examples'], 20000)

  def test_certainty_counts_what_counts(self):
    """Few of many samples count, some more than others: as uncertain as bootstrap samples are."""
    rng = np.random.default_rng(5)
    p = 1 / (1 + np.exp(-rng.normal(-2, 1, 20_000)))
    y = (rng.random(20_000) < p).astype(np.float32)
    for w in (
      rng.random(20_000) < 0.02,
      rng.lognormal(0, 0.5, 20_000) * (rng.random(20_000) < 0.1),
    ):
      w = w.astype(np.float32)
      metrics = MetricSums(kinds())
      metrics.update(y, p.astype(np.float32), w)
      found = result(metrics.state())
      known = np.flatnonzero(w)
      self.assertEqual((found['examples'], found['samples']), (len(known), 20_000))
      drawn = [rng.choice(known, len(known)) for _ in range(1000)]
      aucs = [roc_auc_score(y[i], p[i], sample_weight=w[i]) for i in drawn]
      ratios = [np.log((w[i] @ p[i]) / (w[i] @ y[i])) for i in drawn]
      low, high = auc_interval_of(found)
      self.assertAllClose((high - low) / 2, 1.96 * np.std(aucs), rtol=0.25)
      self.assertAllClose(1 / clicks_of(found) ** 0.5, np.std(ratios), rtol=0.3)

  def test_sums_of_a_checkpoint_of_version_0_2(self):
    for loss in ('log_loss', 'squared_error'):
      y, p, _ = sample(500, -1, 1.0)
      old, metrics = MetricSums(kinds(loss)), MetricSums(kinds(loss))
      old.update(y, p, np.ones_like(p))
      lengths = {8: 5, 4: 3}
      metrics.load({k: v[: lengths.get(len(v))] for k, v in old.state().items()})
      self.assertEqual(result(metrics.state()), result(old.state()))

  def test_the_order_of_additions_does_not_matter(self):
    """However batches are spread over ranks, and whatever a resumed run begins with: bit by bit."""
    for loss in ('log_loss', 'squared_error'):
      for scale in (1e-6, 1.0, 1e6):
        y, p, w = sample(6000, -1, 1.5)
        w = (w * np.float32(0.1) * scale).astype(np.float32)
        batches = np.split(np.arange(6000), np.sort(np.random.default_rng(1).choice(6000, 40)))
        states = []
        for seed in range(5):
          rng = np.random.default_rng(seed)
          ranks = [MetricSums(kinds(loss), 1000) for _ in range(rng.integers(1, 5))]
          for batch in rng.permutation(len(batches)):
            rows = batches[batch]
            ranks[rng.integers(len(ranks))].update(y[rows], p[rows], w[rows])
            if rng.random() < 0.1:  # saved, and resumed: rank 0 has all, the others nothing
              total = self.total(ranks)
              for one in ranks:
                one.reset()
              ranks[0].load(total)
          states.append(self.total(ranks))
        for name, wanted in states[0].items():
          for found in states[1:]:
            self.assertAllEqual(found[name], wanted)

  def total(self, ranks):
    states = [one.state() for one in ranks]
    return {name: sum(state[name] for state in states) for name in states[0]}

  def test_auc_of_skewed_and_of_crowded_predictions(self):
    for buckets, least_spread in ((1_000_000, 3e-3), (2**16, 3e-2)):
      for mean, spread in (
        (-14, 1),
        (-7, 1e-1),
        (-7, least_spread),
        (0, 1e-4),
        (-1.4, least_spread),
        (9, 1),
        (0, 8),
      ):
        y, p, w = sample(20000, mean, spread)
        metrics = MetricSums(kinds(), buckets)
        metrics.update(y, p, w)
        with self.subTest(buckets=buckets, mean=mean, spread=spread):
          self.assertAllClose(
            result(metrics.state())['auc'], roc_auc_score(y, p, sample_weight=w), atol=1e-3
          )

  def test_probabilities_of_0_and_1(self):
    metrics = MetricSums(kinds())
    metrics.update(
      tf.constant([0.0, 1.0, 0.0, 1.0]), tf.constant([0.0, 1.0, 0.5, 0.5]), tf.ones([4])
    )
    found = result(metrics.state())
    self.assertAllClose(found['auc'], 0.875)
    self.assertAllClose(found['logloss'], np.log(2) / 2, atol=1e-6)

  def test_labels_of_one_class(self):
    for label in (0.0, 1.0):
      metrics = MetricSums(kinds())
      metrics.update(tf.fill([4], label), tf.fill([4], 0.5), tf.ones([4]))
      found = result(metrics.state())
      self.assertIsNone(found['auc'])
      self.assertEqual(str(found['base_logloss']), '0.0', 'not -0.0')

  def test_states_add_up(self):
    y, p, w = sample(3000, -2, 1)
    whole, parts = MetricSums(kinds()), [MetricSums(kinds()) for _ in range(3)]
    whole.update(y, p, w)
    for part, rows in zip(parts, (slice(0, 2500), slice(2500, 3000), slice(0, 0))):
      part.update(y[rows], p[rows], w[rows])
    states = [part.state() for part in parts]
    self.assertAllClose(
      result({k: sum(s[k] for s in states) for k in states[0]}), result(whole.state()), rtol=1e-12
    )

  def test_load_and_reset(self):
    y, p, w = sample(100, 0, 1)
    one, other = MetricSums(kinds()), MetricSums(kinds())
    one.update(y, p, w)
    other.load(one.state())
    self.assertEqual(result(other.state()), result(one.state()))
    one.reset()
    self.assertEqual(
      result(one.state()),
      {
        **dict.fromkeys(('auc', 'base_logloss', 'logloss', 'calibration', 'ctr')),
        **dict.fromkeys(
          ('weight', 'effective_clicks', 'effective_others', 'examples', 'samples'), 0
        ),
      },
    )

  def test_what_was_read_does_not_change(self):
    sums, histogram = (tf.Variable(tf.zeros(shape, tf.float64)) for shape in ([8], [2, 10]))
    read = tf.convert_to_tensor(sums), tf.convert_to_tensor(histogram)
    y, p, w = sample(100, 0, 1)
    library.load().ctr_metric_sums(y, p, w, sums.handle, [histogram.handle], 'clicks', 10)
    self.assertAllEqual(read[0], np.zeros(8))
    self.assertAllEqual(read[1], np.zeros([2, 10]))
    self.assertAllEqual(tf.reduce_sum(histogram, 1), [w[y == 0].sum(), w[y == 1].sum()])

  def test_a_prediction_that_is_no_number(self):
    metrics = MetricSums(kinds())
    metrics.update(tf.ones([2]), tf.constant([np.nan, 0.5]), tf.ones([2]))
    self.assertAllEqual(np.isnan(metrics.state()['sums']), [False, False, True, True, *[False] * 4])
    self.assertEqual(metrics.state()['histogram'].sum(), 2)

  def test_the_op_checks_its_arguments(self):
    op = library.load().ctr_metric_sums
    three, sums, wide = (
      tf.Variable(tf.zeros(shape, tf.float64)).handle for shape in (4, 8, [2, 9])
    )
    one = tf.ones([1])
    for wrong, message in (
      (lambda: op(one, tf.ones([2]), one, three, [], 'losses', 4), 'probabilities'),
      (lambda: op(one, one, tf.ones([2]), three, [], 'losses', 4), 'weights'),
      (lambda: op(tf.ones([1, 1]), one, one, three, [], 'losses', 4), 'labels'),
      (lambda: op(one, one, one, sums, [], 'losses', 4), 'variable 3'),
      (lambda: op(one, one, one, sums, [wide], 'clicks', 4), 'variable 4'),
      (lambda: op(one, one, one, sums, [], 'clicks', 4), 'histogram'),
      (lambda: op(one, one, one, sums, [wide], 'clicks', 9), 'buckets'),
    ):
      with self.subTest(message), self.assertRaisesRegex(tf.errors.InvalidArgumentError, message):
        wrong()

  def test_one_class_has_no_auc(self):
    metrics = MetricSums(kinds())
    metrics.update(tf.zeros([5]), tf.fill([5], 0.5), tf.ones([5]))
    found = result(metrics.state())
    self.assertIsNone(found['auc'])
    self.assertIsNone(found['calibration'])
    self.assertAllClose(found['logloss'], np.log(2))

  def test_regression_has_rmse(self):
    metrics = MetricSums(kinds('squared_error'))
    nothing = dict.fromkeys(('rmse', 'mean', 'base_rmse'))
    nothing |= {'weight': 0, 'examples': 0, 'samples': 0}
    self.assertEqual(result(metrics.state()), nothing)
    metrics.update(
      tf.constant([1.0, -2.0, 9.0]), tf.constant([2.0, 0.0, 0.0]), tf.constant([1.0, 3.0, 0.0])
    )
    mean = (1 - 3 * 2) / 4
    self.assertAllClose(
      result(metrics.state()),
      {
        'rmse': np.sqrt((1 + 3 * 4) / 4),
        'mean': mean,
        'weight': 4,
        'examples': 2,
        'samples': 3,
        'base_rmse': np.sqrt(((1 - mean) ** 2 + 3 * (-2 - mean) ** 2) / 4),
      },
    )
    metrics.reset()
    metrics.update(tf.constant([1e6, 1e6 + 1]), tf.zeros([2]), tf.ones([2]))
    self.assertIsNone(result(metrics.state())['base_rmse'], 'the sums have too few digits for it')


class GroupAucTest(tf.test.TestCase):
  def data(self, n=4000):
    rng = np.random.default_rng(3)
    groups = rng.choice(rng.integers(0, 2**62, 300), n)
    p = np.round(rng.random(n), 1).astype(np.float32)  # many ties
    return (
      (rng.random(n) < p).astype(np.float32),
      p,
      groups,
      rng.integers(1, 5, n).astype(np.float32),
    )

  def test_equals_a_loop_of_sklearn(self):
    y, p, groups, w = self.data()
    total = weight = 0
    for g in np.unique(groups):
      own = groups == g
      if 0 < y[own].sum() < own.sum():
        own_weight = float(w[own].sum())  # else NumPy 2 adds in float32
        total += own_weight * roc_auc_score(y[own], p[own], sample_weight=w[own])
        weight += own_weight
    self.assertAllClose(group_auc_sums(y, p, groups, w), (total, weight), rtol=1e-9)

  def test_adds_up_over_disjoint_groups(self):
    columns = self.data()
    to = columns[2] % 3
    parts = [group_auc_sums(*(c[to == r] for c in columns)) for r in range(3)]
    self.assertAllClose(np.sum(parts, 0), group_auc_sums(*columns), rtol=1e-12)

  def test_no_samples_or_one_class(self):
    self.assertEqual(group_auc_sums(*np.zeros([4, 0])), (0, 0))
    self.assertEqual(
      group_auc_sums(np.ones(3), np.ones(3), np.array([1, 1, 2]), np.ones(3)), (0, 0)
    )
