"""Both stores, one contract:

the same steps give the same rows, and each takes up the other's state.
"""

import sys
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from ops import row_store
from ops.dedupe import dedupe
from ops.sharding import shards_of
from tests.support.batches import make_batch
from tests.support.steps import make_config, rows_of, train
from trainer.comm.communicator import SingleProcess
from trainer.embedding.stores import store_class
from trainer.errors import UserError
from trainer.training.step import TrainStep

SETTINGS = {
  'at_once': {'lifecycle': {'admission': 'none', 'eviction': 'none'}},
  'admission': {'lifecycle': {'admission_threshold': 1.5, 'delete_threshold': 0.4, 'decay': 0.7}},
  'linear_only': {
    'lifecycle': {'admission': 'none', 'eviction': 'none'},
    'model': {'interactions': ['linear']},
  },
}


class StoreTest(tf.test.TestCase, parameterized.TestCase):
  def assert_same(self, first, second):
    first, second = rows_of(first.store.export_state()), rows_of(second.store.export_state())
    self.assertEqual(first.keys(), second.keys())
    for key, (show, click, admitted, linear, factors) in first.items():
      self.assertAllClose(second[key][:2], (show, click))
      self.assertEqual(second[key][2], admitted)
      self.assertAllClose(second[key][3], linear, rtol=1e-6, atol=1e-7)
      if admitted and factors is not None:
        self.assertAllClose(second[key][4], factors, rtol=1e-6, atol=1e-7)

  @parameterized.product(setting=list(SETTINGS), kind=['adagrad', 'ftrl'])
  def test_equal_steps_and_state(self, setting, kind):
    rule = {'kind': kind, 'learning_rate': 0.1}
    tree = SETTINGS[setting] | {
      'sparse.tables.default.linear': rule,
      'sparse.tables.default.factors': rule,
    }
    steps = [
      TrainStep(make_config(tree | {'sparse.store': store}), SingleProcess())
      for store in ('rows', 'tfra')
    ]
    rng = np.random.default_rng(2)
    for _ in range(4):
      batch = make_batch(rng, 32)
      losses = [train(step, batch).loss for step in steps]
      self.assertAllClose(losses[0], losses[1], rtol=1e-6)
    for step in steps:
      step.store.decay()
    evicted = [sorted(step.store.evict().numpy()) for step in steps]
    self.assertEqual(evicted[0], evicted[1])
    self.assert_same(*steps)
    crossed = [
      TrainStep(make_config(tree | {'sparse.store': store}), SingleProcess())
      for store in ('rows', 'tfra')
    ]
    for step, source in zip(crossed, steps[::-1]):
      chunks = list(source.store.export_state())
      parts = [source.store.within(c, shards_of(r, 3)) for c in chunks for r in range(3)]
      step.store.import_state(parts)
      step.load_dense_state(source.dense_state())
    self.assert_same(*crossed)
    batch = make_batch(rng, 16)
    staged = steps[0].stage(batch)
    self.assertAllClose(crossed[0].predict(staged), steps[0].predict(staged), rtol=1e-6)
    self.assertAllClose(train(crossed[1], batch), train(steps[0], batch), rtol=1e-6)

  @parameterized.parameters('rows', 'tfra')
  def test_a_feature_whose_weight_is_0_is_known(self, store):
    rule = {'kind': 'ftrl', 'l1': 1e3}  # sets every weight to 0
    tree = SETTINGS['linear_only'] | {'sparse.tables.default.linear': rule, 'sparse.store': store}
    step = TrainStep(make_config(tree), SingleProcess())
    trained, other = (make_batch(np.random.default_rng(seed), 16) for seed in (1, 2))
    train(step, trained)
    weights = np.array([row.linear[0] for row in rows_of(step.store.export_state()).values()])
    self.assertAllEqual(weights, np.zeros_like(weights))
    again = TrainStep(make_config(tree), SingleProcess())
    again.store.import_state(step.store.export_state())
    keys = [np.asarray(batch.keys) for batch in (trained, other)]
    self.assertNotEmpty(np.setdiff1d(*keys[::-1]))
    for each in (step, again):
      for batch, own in zip((trained, other), keys):
        _, known = each.predict_and_know(each.stage(batch))
        self.assertAllEqual(known, np.isin(own, keys[0]))

  @parameterized.product(
    setting=['at_once', 'admission'], kind=['adagrad', 'adam'], add=[False, True]
  )
  @pytest.mark.long
  def test_equal_pushes_of_rows_that_others_have_changed(self, setting, kind, add):
    """Workers of parameter servers:

    two pull, then one pushes after the other, and what they send are plain rows.
    """
    rule = {'kind': kind, 'learning_rate': 0.1}
    tree = SETTINGS[setting] | {
      'sparse.tables.default.linear': rule,
      'sparse.tables.default.factors': rule,
    }
    steps = [
      TrainStep(make_config(tree | {'sparse.store': store}), SingleProcess())
      for store in ('rows', 'tfra')
    ]
    hyper = steps[0].dense.embedding.hyper(1.0)
    for i in range(4):
      keys = [
        dedupe(make_batch(np.random.default_rng([i, worker]), 8).keys).unique.numpy()
        for worker in range(2)
      ]
      pulled = [[step.store.pull(k, True) for k in keys] for step in steps]
      for worker, k in enumerate(keys):
        rng = np.random.default_rng([i, worker, 1])
        rows, of_tfra = pulled[0][worker], pulled[1][worker]
        self.assertAllEqual(rows.offsets, of_tfra.offsets)
        self.assertAllClose(rows.linear, of_tfra.linear, rtol=1e-6)
        self.assertAllClose(rows.factors, of_tfra.factors, rtol=1e-6)
        sent = row_store.PulledRows(
          -np.ones(len(k), np.int64),
          rows.offsets,
          *(rng.normal(size=len(x)).astype(np.float32) for x in (k, rows.factors)),
        )
        shows = rng.integers(1, 3, len(k)).astype(np.float32)
        for step in steps:
          step.store.push(
            k,
            sent,
            shows,
            0 * shows,
            sent.linear,
            sent.factors,
            [0.1],
            hyper,
            2 * i + 2 - worker,
            add=add,
          )
    self.assert_same(*steps)

  def test_what_is_missing_is_said(self):
    cfg = make_config({})
    sparse = cfg.sparse.model_copy(update={'store': 'tfra'})
    missing = dict.fromkeys(['tensorflow_recommenders_addons'])
    with mock.patch.dict(sys.modules, missing):
      sys.modules.pop('trainer.embedding.tfra_store', None)
      with self.assertRaisesRegex(
        UserError, "^sparse.store: found 'tfra', but .* is not installed"
      ):
        store_class(sparse.store)


if __name__ == '__main__':
  tf.test.main()
