"""When a run is saved, of each thing that may happen to it."""

from unittest import mock

import tensorflow as tf
from absl.testing import parameterized

from trainer.config.train import Checkpoint
from trainer.training import save_policy
from trainer.training.run_state import Progress
from trainer.training.save_policy import SavePolicy


class SavePolicyTest(tf.test.TestCase, parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.state = mock.Mock(progress=Progress(), last_save=100.0, is_saved=True, has_checkpoint=True)
    self.state.is_saved_within_pass = False

  def policy(self, is_stream=False, goes_back=False, **every):
    every = dict.fromkeys(('every_steps', 'every_seconds', 'every_passes')) | every
    return SavePolicy(Checkpoint(**every), self.state, is_stream, goes_back)

  def after_passes(self, policy, count):
    """After which of so many passes it saves before the next one."""
    saved = []
    for done in range(1, count + 1):
      self.state.progress.done = done
      policy.pass_ended()
      if policy.goes_on():
        saved.append(done)
        policy.saved()
    return saved

  def test_within_a_pass(self):
    never, policy = self.policy(), self.policy(every_steps=3, every_seconds=50)
    steps = range(1, 10)
    self.assertEqual([n for n in steps if policy.step_ended(n, is_asked=n == 4)], [3, 4, 6, 9])
    self.assertEqual([n for n in steps if never.step_ended(n, is_asked=False)], [])
    for now, is_late in ((149.0, False), (151.0, True)):
      with mock.patch.object(save_policy.time, 'monotonic', return_value=now):
        self.assertEqual(policy.asks(), is_late)
        self.assertFalse(never.asks())

  @parameterized.parameters((None, []), (1, [1, 2, 3, 4]), (2, [2, 4]))
  def test_after_passes(self, every, saved):
    self.assertEqual(self.after_passes(self.policy(every_passes=every), 4), saved)

  def test_it_stays_due_until_it_is_saved(self):
    policy = self.policy(every_passes=2)
    self.state.progress.done = 2
    policy.pass_ended()
    self.state.progress.done = 3
    policy.pass_ended()
    self.assertTrue(policy.goes_on())
    policy.saved()
    self.assertFalse(policy.goes_on())

  @parameterized.parameters((True, 3, True), (True, None, False), (False, 3, False))
  def test_days_of_a_stream(self, is_stream, every, is_due):
    policy = self.policy(is_stream, every_passes=every)
    policy.day_ended()
    self.assertEqual(policy.goes_on(), is_due)

  def test_a_run_that_refuses_passes_has_a_state_between_passes(self):
    self.state.has_checkpoint = False
    self.assertTrue(self.policy(goes_back=True).pass_begins())
    self.assertFalse(self.policy().pass_begins())
    self.state.has_checkpoint = True
    self.assertFalse(self.policy(goes_back=True).pass_begins())
    self.state.is_saved_within_pass = True
    self.assertEqual(self.after_passes(self.policy(goes_back=True), 1), [1])
    self.assertEqual(self.after_passes(self.policy(), 1), [])

  def test_after_it_went_back_every_pass_is_saved_until_the_bad_one_is_found(self):
    policy = self.policy(goes_back=True)
    policy.went_back(is_found=False)
    self.assertFalse(policy.goes_on())
    self.assertEqual(self.after_passes(policy, 2), [1, 2])
    policy.went_back(is_found=True)
    self.assertTrue(policy.goes_on())
    policy.saved()
    self.assertEqual(self.after_passes(policy, 2), [])

  def test_nothing_is_saved_twice_where_an_epoch_ends(self):
    policy = self.policy()
    self.assertFalse(policy.would_lose())
    self.state.is_saved = False
    self.assertTrue(policy.would_lose())


if __name__ == '__main__':
  tf.test.main()
