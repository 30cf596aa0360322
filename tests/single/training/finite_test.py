"""What is not finite is told with its likely cause, and ruins no state that lies on disk."""

import os
import tempfile
from unittest import mock

import numpy as np
import tensorflow as tf

from tests.support import small
from tests.support.states import state_of
from trainer.data import values
from trainer.errors import UserError
from trainer.storage import checkpoint
from trainer.training import dense_part


class FiniteTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = tempfile.mkdtemp(dir=self.get_temp_dir())
    self.write('a', 40, price=1)
    # Only a model knows what ruins it, so the bound of all numbers is lifted.
    most = mock.patch.object(values, 'MOST', float(np.finfo(np.float32).max))
    self.enterContext(most)

  def write(self, name, samples, price):
    with open(f'{self.folder}/{name}.csv', 'w', encoding='utf-8') as f:
      rows = (f'{i % 5},{price},{i % 2}\n' for i in range(samples))
      f.write('user,price,label\n' + ''.join(rows))

  def make_job(self, passes, **sections):
    data = {'train': [f'{self.folder}/{one}.csv' for one in passes], 'slots': [{'name': 'user'}]}
    tree = small.tree(
      run_dir=f'{self.folder}/run',
      data=data | {'dense': [{'name': 'price'}]},
      model={'interactions': ['linear', 'fm', {'dnn': {'hidden': [4]}}]},
      train={'batch_size': 10},
      checkpoint={'every_steps': 1},
    )
    return small.job(small.config(tree | sections))

  def checkpoints(self):
    folder = f'{self.folder}/run/checkpoints'
    return [os.path.basename(path) for path in checkpoint.candidates(folder)]

  def test_a_huge_dense_column(self):
    self.make_job('a').run()
    before = self.checkpoints()
    self.write('b', 10, price=3e38)
    wanted = (
      "not finite at step 5: dense column 'price' holds values up to 3e.38; wanted transform: "
      r'log1p_standardise.*; earlier checkpoints are intact; 3e\+38 is in .*b.csv:2$'
    )
    with self.assertRaisesRegex(UserError, wanted):
      self.make_job('ab').run()
    self.assertEqual(self.checkpoints(), before)
    self.write('b', 10, price=2)
    again = self.make_job('ab')
    again.run()
    self.assertEqual(again.step.steps, 5)

  def test_a_gradient_that_overflows_where_the_loss_does_not(self):
    """Five samples of a column are summed in its weight's gradient alone."""
    self.write('a', 10, price=3e38)
    with self.assertRaisesRegex(UserError, "not finite at step 1: dense column 'price'"):
      self.make_job('a', model={'interactions': ['linear']}).run()
    self.assertEmpty(self.checkpoints())

  def test_huge_weights(self):
    data = {
      'train': [f'{self.folder}/a.csv'],
      'slots': [{'name': 'user'}],
      'weight': 'price',
    }
    self.write('a', 40, price=3e38)
    with self.assertRaisesRegex(
      UserError, 'step 1: data.weight: the column holds weights up to 3e'
    ):
      self.make_job('a', data=data).run()

  def test_a_gradient_where_the_loss_is_finite(self):
    def root_of_nothing(*_):
      return lambda label, logits: tf.sqrt(0 * logits)

    with mock.patch.object(dense_part, 'sample_losses', root_of_nothing):
      with self.assertRaisesRegex(
        UserError, 'a gradient is not finite at step 1: lower the learning rates'
      ):
        self.make_job('a').run()
    self.assertEqual(self.checkpoints(), [])

  def test_a_rate_far_above_its_default_is_named(self):
    rule = {'kind': 'sgd', 'learning_rate': 1e6, 'clip': None}
    sparse = {'tables': {'default': {'linear': rule, 'factors': rule}}}
    wanted = r'sparse.tables.default.\w+.learning_rate is 1e\+06; wanted about '
    with self.assertRaisesRegex(UserError, wanted):
      model = {'interactions': ['linear'], 'loss': 'squared_error'}
      self.make_job('a', sparse=sparse, model=model, train={'batch_size': 2, 'epochs': 20}).run()

  def test_a_pass_that_ruins_the_state_is_refused(self):
    """The state is then that of a run that has never seen the pass."""
    for samples, name in enumerate('bde', 30):
      self.write(name, samples, price=2)
    self.write('c', 30, price=1)
    with open(f'{self.folder}/c.csv', 'a', encoding='utf-8') as f:
      f.write('1,1e30,1\n')
    slots = [{'name': 'user'}, {'name': 'price', 'from': {'number': 'price'}}]
    undisturbed = {}  # what runs without it leave
    for case, (interactions, checkpoints, order) in enumerate(
      (
        (['linear', 'fm'], {'every_steps': 2, 'keep': 1}, 'abcde'),  # a step fails
        (['linear', 'fm'], {'every_steps': 2, 'keep': 1}, 'cabde'),
        (['linear'], {'every_passes': 1}, 'abcde'),  # the state after it cannot be saved
        (['linear'], {'every_passes': 1}, 'cabde'),
        (['linear'], {'every_passes': 3}, 'abcde'),  # nor that after two passes more
        (['linear'], {'every_passes': 3}, 'abdec'),
      )
    ):
      with self.subTest(interactions=interactions, checkpoints=checkpoints, order=order):
        without = order.replace('c', '')
        alike = str([interactions, checkpoints, without])
        states, jobs = [], []
        for passes in (order, without):
          if passes == without and alike in undisturbed:
            states.append(undisturbed[alike])
            continue
          run_dir = f'{self.folder}/{case}-{passes}'
          data = {
            'train': [f'{self.folder}/{one}.csv' for one in passes],
            'slots': slots,
            'max_refused_passes': 1,
          }
          sections = {'model': {'interactions': interactions}, 'run_dir': run_dir, 'data': data}
          sections['train'] = {'batch_size': 10, 'deterministic': True}
          export = {'delta_every_passes': 1}
          job = self.make_job('', checkpoint=checkpoints, export=export, **sections)
          self.assertEqual(job.run(), 0)
          states.append(state_of(run_dir, without=['pass', 'waiting']))
          jobs.append(job)
        undisturbed[alike] = states[1]
        for part in ('rows', 'dense', 'events'):
          self.assertEqual(states[0][part], states[1][part], part)
        fates = {entry.name[-1]: entry.fate for entry in jobs[0].state.ledger}
        self.assertEqual(fates.pop('c'), 'refused')
        self.assertEmpty(jobs[0].log.events.troubles)
        self.assertEqual(set(fates.values()), {'trained'})
        (reason,) = (e.reason for e in jobs[0].state.ledger if e.fate == 'refused')
        self.assertRegex(
          reason, f'not finite.*{self.folder}/c.csv:32$|^{self.folder}/c.csv: .*not f'
        )
        if 'fm' in interactions:
          self.assertIn("slot 'price' holds values up to 1e+30; wanted `from: bins`", reason)

  def test_a_state_that_is_not_finite_is_not_saved(self):
    job = self.make_job('a')
    job.run()
    before = self.checkpoints()
    job.open_run()
    state = job.step.dense_state()
    name = next(name for name in state if 'kernel' in name)
    job.step.load_dense_state(state | {name: np.full_like(state[name], np.nan)})
    with self.assertRaisesRegex(UserError, f'after step 4, {name} holds values that are not'):
      job.save()
    self.assertEqual(self.checkpoints(), before)


if __name__ == '__main__':
  tf.test.main()
