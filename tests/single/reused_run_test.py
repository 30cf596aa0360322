"""What a run_dir that was used before says and does."""

import contextlib
import io
import pathlib
import tempfile

import numpy as np
import pandas as pd
import tensorflow as tf
from absl import logging

from trainer import api
from trainer.errors import UserError
from trainer.training.job import finished_job

UNTRAINED = 'adds layer dnn 0 to the model, which no step has trained yet'


class ReusedRunTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(tempfile.mkdtemp(dir=self.get_temp_dir()))
    self.run_dir = str(self.folder / 'run')
    self.write('log.csv', seed=0)

  def write(self, name, seed):
    rng = np.random.default_rng(seed)
    ids = rng.integers(20, size=600)
    clicks = rng.random(600) < 0.1 + 0.5 * (ids < 5)
    frame = pd.DataFrame({'click': clicks.astype(int), 'user': ids})
    frame.to_csv(self.folder / name, index=False)

  def fit(self, interactions=('linear', 'fm'), init_from=None, **sections):
    """Trains, or goes on. Returns: what was printed."""
    data = {'label': 'click', 'slots': [{'name': 'user'}], 'train': [f'{self.folder}/log*.csv']}
    tree = {'run_dir': self.run_dir, 'data': data, 'model': {'interactions': list(interactions)}}
    for name, keys in sections.items():
      tree[name] = tree.get(name, {}) | keys
    with contextlib.redirect_stdout(io.StringIO()) as printed:
      self.assertEqual(api.train(api.Source(tree, (), None), init_from=init_from), 0)
    return printed.getvalue()

  def check_trained(self):
    """As trainer.export does before it writes anything."""
    with finished_job(self.run_dir) as job:
      job.check_trained()

  def test_a_finished_run_says_that_nothing_is_left_to_train(self):
    first = self.fit()
    self.assertIn(' AUC ', first)
    self.assertNotIn('nothing left', first)
    for train in ({}, {'dense_optimizer': {'learning_rate': 0.3}}):
      again = self.fit(train=train)
      self.assertIn(f'nothing left to train; {self.run_dir} has trained 1 of 1 epochs', again)
      self.assertIn('raise train.epochs', again)
      self.assertNotIn(' AUC ', again, 'the old table')
    self.assertNotIn('nothing left', self.fit(train={'epochs': 2}))
    self.write('log_2.csv', seed=2)
    self.assertNotIn('nothing left', self.fit(train={'epochs': 2}))

  def test_a_layer_that_was_never_trained_is_told_and_not_exported(self):
    self.fit()
    run = api.load(self.run_dir)
    before = run.predict(str(self.folder / 'log.csv'))
    more = 'linear', 'fm', {'dnn': {'hidden': [4]}}
    for _ in range(2):  # also where the run was started again since
      with self.assertLogs(level='WARNING') as logged:
        self.fit(more)
      self.assertRegex(str(logged.output), UNTRAINED)
      with self.assertLogs(level='WARNING') as logged:
        api.load(self.run_dir).predict(str(self.folder / 'log.csv'))
      self.assertRegex(str(logged.output), UNTRAINED)
      with self.assertRaisesRegex(UserError, UNTRAINED):
        self.check_trained()
    self.fit(more, train={'epochs': 2})
    with self.assertLogs(level='WARNING') as logged:
      logging.warning('nothing else')
      after = api.load(self.run_dir).predict(str(self.folder / 'log.csv'))
    self.assertNotRegex(str(logged.output), UNTRAINED)
    self.assertNotAllClose(before, after)
    self.check_trained()

  def test_a_model_that_begins_with_another_is_trained(self):
    self.fit()
    source, self.run_dir = self.run_dir, str(self.folder / 'other')
    self.fit(('linear', 'fm', {'dnn': {'hidden': [4]}}), init_from=source)
    self.check_trained()


if __name__ == '__main__':
  tf.test.main()
