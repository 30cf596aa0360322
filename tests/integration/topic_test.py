"""A job on a topic is killed again and again, on 1, 2, 3 and 1 ranks: every message counts once."""

import os
import subprocess
import sys

import tensorflow as tf


class TopicTest(tf.test.TestCase):
  def test_every_message_once_whatever_is_killed(self):
    """A unit of the campaign of kills (campaigns/topics.py)."""
    results = os.path.join(self.get_temp_dir(), 'results.jsonl')
    command = [sys.executable, '-m', 'campaigns.faults', '--share', '0.04', '--only', 'topics']
    done = subprocess.run([*command, '--out', results], capture_output=True, text=True, timeout=600)
    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
    self.assertIn('| topics | ', done.stdout)


if __name__ == '__main__':
  tf.test.main()
