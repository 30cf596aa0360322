"""What a run_dir that was used before says and does."""

import contextlib
import io
import pathlib
import re
import tempfile

import numpy as np
import pandas as pd
import pytest
import tensorflow as tf
from absl import logging

from tests.support import small
from trainer import api, config
from trainer.comm.communicator import SingleProcess
from trainer.errors import UserError
from trainer.evaluation.finished_run import open_run
from trainer.training.run_state import RunState
from trainer.training.step import TrainStep

DNN = {'dnn': {'hidden': [4]}}
USER, ITEM = {'name': 'user'}, {'name': 'item', 'separator': '|'}


def untrained(differences):
  """What is told of an untrained model, as a regular expression."""
  told = '; '.join(map(re.escape, sorted(differences)))
  return f'no step has trained the model of its config: {told}; wanted more training'


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
    items = rng.integers(9, size=600)
    frame = pd.DataFrame({'click': clicks.astype(int), 'user': ids, 'item': items})
    frame.to_csv(self.folder / name, index=False)

  def fit(self, interactions=('linear', 'fm'), init_from=None, **sections):
    """Trains, or goes on. Returns: what was printed."""
    data = {'label': 'click', 'slots': [{'name': 'user'}], 'train': [f'{self.folder}/log*.csv']}
    tree = small.tree(run_dir=self.run_dir, data=data, model={'interactions': list(interactions)})
    tree = small.tree(tree, **sections)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
      self.assertEqual(api.train_here(api.Source(tree, (), None), init_from=init_from)[0], 0)
    return printed.getvalue()

  def warnings(self, act):
    """Returns the warnings of an untrained model that `act` gives."""
    with self.assertLogs(level='WARNING') as logged:
      logging.warning('nothing else')
      act()
    return [line for line in logged.output if 'no step has trained' in line]

  def check_trained(self):
    """Checks that neither predicting nor an export tells of an untrained model."""
    self.assertEmpty(self.warnings(self.predict))
    with open_run(self.run_dir, only_trained=True):  # as trainer.cli.export does
      pass

  def check_untrained(self, *differences):
    """Checks that predicting tells of these, and that an export refuses them in one line."""

    def export():
      with self.assertRaisesRegex(UserError, untrained(differences)):
        with open_run(self.run_dir, only_trained=True):
          pass

    (told,) = self.warnings(self.predict)
    self.assertRegex(told, untrained(differences))
    self.assertEmpty(self.warnings(export))

  def predict(self):
    return api.load(self.run_dir).predict(str(self.folder / 'log.csv'))

  def test_a_finished_run_says_that_nothing_is_left_to_train(self):
    first = self.fit()
    self.assertIn(' AUC ', first)
    self.assertNotIn('nothing left', first)
    for train in ({}, {'dense_optimizer': {'learning_rate': 0.3}}):
      again = ' '.join(self.fit(train=train).split())  # it is wrapped
      self.assertIn(f'nothing left to train; {self.run_dir} has trained 1 of 1 epochs', again)
      self.assertIn('raise train.epochs', again)
      self.assertIn('New settings have trained nothing', again)
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
      self.assertRegex(told, untrained(['model.interactions: dnn 0 is new']))
      self.check_untrained('model.interactions: dnn 0 is new')
    self.fit(more, train={'epochs': 2})
    self.check_trained()
    self.assertNotAllClose(before, self.predict())
    source, self.run_dir = self.run_dir, str(self.folder / 'next')
    told = self.warnings(lambda: self.fit(more, init_from=source))
    self.assertEmpty(told, 'trained since, though it was new once')

  @pytest.mark.long
  def test_every_kind_of_change_to_a_finished_run(self):
    """Each is found where the run is opened with it; what leaves the model as it is passes."""
    self.fit(('linear', 'fm', {'dnn': {'hidden': [4, 4]}}), data={'slots': [USER, ITEM]})
    layer, of_dnn = 'model.interactions: ', 'model.interactions: dnn 0: '
    for interactions, told in (
      ('linear, fm, {dnn: {hidden: [4, 4]}}, {dnn: {}}', [f'{layer}dnn 1 is new']),
      (
        'linear, fm, cross, fwfm, {dnn: {hidden: [4, 4]}}',
        [f'{layer}cross 0 is new', f'{layer}fwfm 0 is new'],
      ),
      (
        'linear, fm, {dnn: {hidden: [4, 4, 4]}}',
        [f'{of_dnn}hidden was trained as [4, 4], the config has [4, 4, 4]'],
      ),
      (
        'linear, fm, {dnn: {hidden: [4]}}',
        [f'{of_dnn}hidden was trained as [4, 4], the config has [4]'],
      ),
      (
        'linear, fm, {dnn: {hidden: [6, 4]}}',
        [f'{of_dnn}hidden was trained as [4, 4], the config has [6, 4]'],
      ),
      (
        'linear, fm, {dnn: {hidden: [4, 4], activation: tanh}}',
        [f"{of_dnn}activation was trained as 'relu', the config has 'tanh'"],
      ),
      ('linear, {dnn: {hidden: [4, 4]}}', [f'{layer}fm 0, which was trained, is gone']),
      (
        'linear',
        [
          'sparse.tables: default, which was trained, is gone',
          f'{layer}fm 0, which was trained, is gone',
          f'{layer}dnn 0, which was trained, is gone',
        ],
      ),
      ('{dnn: {hidden: [4, 4]}}, linear, fm', []),
      ('linear, fm, {dnn: {hidden: [4, 4], activation: relu, dropout: 0.1}}', []),
    ):
      self.check_change(f'model.interactions=[{interactions}]', told)
    item = '{name: item, separator: "|"}'
    for change, told in (
      (f'data.slots=[{{name: user}}, {item}, {{name: query}}]', ['data.slots: query is new']),
      ('data.slots=[{name: user}]', ['data.slots: item, which was trained, is gone']),
      (
        'data.slots.1.pooling=sqrtn',
        ["data.slots: item: pooling was trained as 'mean', the config has 'sqrtn'"],
      ),
      ('data.slots.0.pooling=sqrtn', []),  # of one feature
      (
        'sparse.tables.default.width=3',
        ['sparse.tables: default: width was trained as 16, the config has 3'],
      ),
      (f'data.slots=[{item}, {{name: user}}]', []),
      ('train.dense_optimizer.kind=adagrad', []),
      ('sparse.tables.default.factors.kind=sgd', []),
    ):
      self.check_change(change, told)

  def check_change(self, change, told):
    """Checks what differs for a run that is opened with a change: `ctr-export` refuses it."""
    with self.subTest(change):
      with contextlib.ExitStack() as stack:
        if told:
          stack.enter_context(self.assertRaisesRegex(UserError, untrained(told)))
        stack.enter_context(open_run(self.run_dir, [change], only_trained=True))

  @pytest.mark.long
  def test_the_first_layers_with_factors(self):
    """All factors of all features begin with it."""
    self.fit(('linear',))
    before, more = self.predict(), ('linear', 'cross', DNN)
    told = self.fit(more)
    self.assertRegex(told, r'table default, plain factors +fresh')
    new = ('sparse.tables: default', 'model.interactions: cross 0', 'model.interactions: dnn 0')
    self.check_untrained(*(f'{part} is new' for part in new))
    self.fit(('linear',))  # what the refusal advises
    self.check_trained()
    self.assertAllClose(before, self.predict(), rtol=0, atol=1e-6)
    self.fit(more, train={'epochs': 2})
    self.check_trained()
    self.assertNotAllClose(before, self.predict())

  @pytest.mark.long
  def test_a_best_state_of_another_model_counts_no_more(self):
    """Not where the changed model is trained but validates worse, nor where it never validates."""
    valid = {'data': {'valid': [f'{self.folder}/log.csv']}}
    steep = {'epochs': 3, 'dense_optimizer': {'learning_rate': 3.0}}
    for name, sections in (('validates', valid), ('does not', {})):
      with self.subTest(name):
        self.run_dir = str(self.folder / name)
        self.fit(train={'epochs': 2}, **valid)
        self.fit(('linear', DNN), train=steep, **sections)
        self.check_trained()

  def test_a_state_that_was_saved_without_a_step_since_the_change(self):
    """Its weights fit neither model: what it has dropped is not there any more."""
    self.fit(('linear', 'fm', DNN))
    cfg = config.load_of_run(self.run_dir, ['model.interactions=[linear, fm]'])
    step = TrainStep(cfg, SingleProcess())
    state = RunState(cfg, SingleProcess(), step)
    state.restore()
    state.save(0)
    gone = 'model.interactions: dnn 0, which was trained, is gone'
    self.check_change('model.interactions=[linear, fm]', [gone])
    self.check_untrained('model.interactions: dnn 0 is new')

  def test_a_state_that_no_step_has_trained(self):
    """As a stream leaves it that was stopped before its first pass."""
    cfg = small.config(run_dir=self.run_dir, data={'train': ['log.csv'], 'slots': [USER]})
    pathlib.Path(self.run_dir).mkdir()
    config.write_of_run(cfg)
    RunState(cfg, SingleProcess(), TrainStep(cfg, SingleProcess())).save(0)
    self.check_untrained('all of it is new')

  def test_a_model_that_begins_with_another_is_trained(self):
    self.fit()
    source, self.run_dir = self.run_dir, str(self.folder / 'other')
    self.fit(('linear', 'fm', {'dnn': {'hidden': [4]}}), init_from=source)
    self.check_trained()


if __name__ == '__main__':
  tf.test.main()
