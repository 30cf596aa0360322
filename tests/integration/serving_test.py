"""The campaign against the loop from export to score, in short; the long one is a command
(campaigns/serving.py).
"""

import unittest

import pytest
import tensorflow as tf

from tests.support import commands
from tests.support.exports import RedisServer


class ServingTest(tf.test.TestCase):
  def campaign(self, *arguments):
    done = commands.run('-m', 'campaigns.serving', *arguments)
    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
    self.assertIn(' right, 0 wrong', done.stdout)

  @pytest.mark.long
  def test_killed_at_any_moment_nothing_wrong_is_served(self):
    self.campaign('--kills', '5')

  @unittest.skipUnless(RedisServer.installed(), 'redis-server is not installed')
  @pytest.mark.long
  def test_the_same_with_redis(self):
    self.campaign('--kills', '5', '--source', 'redis', '--seed', '2')

  @pytest.mark.long
  def test_the_same_without_a_publisher(self):
    self.campaign('--kills', '5', '--source', 'run', '--seed', '4')

  @pytest.mark.long
  def test_the_same_with_the_trainer(self):
    self.campaign('--trainer', '--kills', '4', '--seconds_between_kills', '2', '--seed', '3')


if __name__ == '__main__':
  tf.test.main()
