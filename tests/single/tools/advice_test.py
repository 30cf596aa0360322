"""What a run says of an evaluation in which a constant predicts better."""

import types

import tensorflow as tf

from tests.support.steps import make_config
from trainer.tools.advice import Advice

WORSE = {'auc': 0.6, 'logloss': 0.7, 'base_logloss': 0.5, 'ctr': 0.2, 'examples': 1e5, 'epoch': 0}


class AdviceTest(tf.test.TestCase):
  def test_the_auc_in_training_is_that_of_the_state_that_was_judged(self):
    state = types.SimpleNamespace(progress=types.SimpleNamespace(step=0))
    advice = Advice(make_config({}), state)
    advice.begin()
    for event, step, fields, wanted in (
      ('train', 100, {'auc': 0.8}, None),
      ('eval', 100, {'split': 'valid'}, 'AUC was 0.80 in training and is 0.60 here'),
      ('best', 100, {}, None),
      ('train', 200, {'auc': 0.9}, None),
      ('eval', 200, {'split': 'valid'}, 'AUC was 0.90 in training'),
      ('train', 300, {'auc': 0.95}, None),
      # The last pass was refused: the run went back to the state before it.
      ('eval', 200, {'split': 'valid'}, 'AUC was 0.95 in training'),
      ('eval', 100, {'split': 'test'}, 'AUC was 0.80 in training'),
    ):
      record = {'event': event, 'step': step} | (WORSE if event == 'eval' else {}) | fields
      if wanted is None:
        advice.wrote(record)
        continue
      with self.assertLogs('absl', 'WARNING') as logs:
        advice.wrote(record)
      self.assertIn(wanted, str(logs.output))

  def test_each_task_is_judged_by_its_own_constant(self):
    state = types.SimpleNamespace(progress=types.SimpleNamespace(step=0))
    advice = Advice(make_config({}), state)
    advice.begin()
    tasks = {'click': WORSE | {'logloss': 0.4}, 'buy': WORSE}
    tasks |= {'spent': {'rmse': 2.0, 'base_rmse': 1.5}}
    advice.wrote({'event': 'train', 'step': 100, 'tasks': {'click': {}, 'buy': {'auc': 0.9}}})
    with self.assertLogs('absl', 'WARNING') as logs:
      advice.wrote({'event': 'eval', 'step': 100, 'split': 'valid', 'epoch': 0, 'tasks': tasks})
    buy, spent = (line.partition('valid: ')[2] for line in logs.output)
    self.assertIn('of predicting the share of clicks for all of buy: the model overfits: AUC', buy)
    self.assertStartsWith(spent, 'rmse 2.0000 is worse than the 1.5000 of predicting the mean for')

  def test_a_cold_start_is_no_overfitting(self):
    state = types.SimpleNamespace(progress=types.SimpleNamespace(step=0))
    advice = Advice(make_config({}), state)
    advice.begin()
    advice.wrote({'event': 'train', 'step': 100, 'auc': 0.8})
    slot = make_config({}).ordered_slots[0].name
    record = {'event': 'eval', 'step': 100, 'split': 'valid', 'slots': {slot: {'unknown': 0.9}}}
    for values in (WORSE, WORSE | {'tasks': {'': WORSE}}):
      with self.assertLogs('absl', 'WARNING') as logs:
        advice.wrote(record | values)
      self.assertIn(
        f"Cold start: training never saw the values of slot '{slot}' in 90%", logs.output[0]
      )
      self.assertNotIn('overfits', logs.output[0])


if __name__ == '__main__':
  tf.test.main()
