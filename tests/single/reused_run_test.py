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
from trainer.training.finished_run import open_run

DNN = {'dnn': {'hidden': [4]}}


def untrained(layers):
  """What is told of layers, as a regular expression."""
  return f'adds or extends {", ".join(f"layer {n}" for n in layers)}, and no step has trained that'


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
      self.assertEqual(api.train_here(api.Source(tree, (), None), init_from=init_from), 0)
    return printed.getvalue()

  def warnings(self, act):
    """Returns the warnings of untrained layers that `act` gives."""
    with self.assertLogs(level='WARNING') as logged:
      logging.warning('nothing else')
      act()
    return [line for line in logged.output if 'no step has trained' in line]

  def check_trained(self):
    """Checks that neither predicting nor an export tells of untrained layers."""
    self.assertEmpty(self.warnings(self.predict))
    with open_run(self.run_dir, only_trained=True):  # as trainer.export does
      pass

  def check_untrained(self, *layers):
    """Checks that predicting tells of these layers, and that an export refuses them in one line."""

    def export():
      with self.assertRaisesRegex(UserError, untrained(layers)):
        with open_run(self.run_dir, only_trained=True):
          pass

    (told,) = self.warnings(self.predict)
    self.assertRegex(told, untrained(layers))
    self.assertEmpty(self.warnings(export))

  def predict(self):
    return api.load(self.run_dir).predict(str(self.folder / 'log.csv'))

  def test_a_finished_run_says_that_nothing_is_left_to_train(self):
    first = self.fit()
    self.assertIn(' AUC ', first)
    self.assertNotIn('nothing left', first)
    for train in ({}, {'dense_optimizer': {'learning_rate': 0.3}}):
      again = self.fit(train=train)
      self.assertIn(f'nothing left to train; {self.run_dir} has trained 1 of 1 epochs', again)
      self.assertIn('raise train.epochs', again)
      self.assertIn('settings that are new have trained nothing', again)
      self.assertNotIn(' AUC ', again, 'the old table')
    self.assertNotIn('nothing left', self.fit(train={'epochs': 2}))
    self.write('log_2.csv', seed=2)
    self.assertNotIn('nothing left', self.fit(train={'epochs': 2}))

  def test_a_layer_that_was_never_trained_is_told_and_not_exported(self):
    self.fit()
    before = self.predict()
    more = 'linear', 'fm', DNN
    for _ in range(2):  # also where the run was started again since
      (told,) = self.warnings(lambda: self.fit(more))
      self.assertRegex(told, untrained(['dnn 0']))
      self.check_untrained('dnn 0')
    self.fit(more, train={'epochs': 2})
    self.check_trained()
    self.assertNotAllClose(before, self.predict())
    source, self.run_dir = self.run_dir, str(self.folder / 'next')
    told = self.warnings(lambda: self.fit(more, init_from=source))
    self.assertEmpty(told, 'trained since, though it was new once')

  def test_every_kind_of_change_to_a_finished_run(self):
    deep = 'linear', 'fm', {'dnn': {'hidden': [4, 4]}}
    for name, first, then, layers in (
      ('another dnn', ('linear', DNN), ('linear', DNN, DNN), ['dnn 1']),
      ('two at once', ('linear', 'fm'), ('linear', 'fm', 'cross', DNN), ['cross 0', 'dnn 0']),
      ('no variables', ('linear', DNN), ('linear', 'fm', DNN), ['fm 0']),
      ('a deeper dnn', ('linear', 'fm', DNN), deep, ['dnn 0']),
      ('a wider dnn', ('linear', DNN), ('linear', {'dnn': {'hidden': [6]}}), ['dnn 0']),
      ('another place', ('linear', 'fm', DNN), (DNN, 'fm', 'linear'), []),
      ('a layer less', deep, ('linear', 'fm'), []),
    ):
      with self.subTest(name):
        self.run_dir = str(self.folder / name)
        self.fit(first)
        before = self.predict()
        self.fit(then)
        if not layers:
          self.check_trained()
        else:
          self.check_untrained(*layers)
          self.fit(first)  # what the refusal advises
          self.check_trained()
          self.assertAllClose(before, self.predict(), rtol=0, atol=1e-6)
    with self.subTest('another optimizer'):
      self.run_dir = str(self.folder / 'optimizer')
      self.fit(('linear', DNN))
      self.fit(('linear', DNN), train={'dense_optimizer': {'kind': 'adagrad'}})
      self.check_trained()

  def test_a_model_that_begins_with_another_is_trained(self):
    self.fit()
    source, self.run_dir = self.run_dir, str(self.folder / 'other')
    self.fit(('linear', 'fm', {'dnn': {'hidden': [4]}}), init_from=source)
    self.check_trained()


if __name__ == '__main__':
  tf.test.main()
