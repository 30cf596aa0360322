"""launch/online_demo.sh: what is clicked in a pass changes the score that is served."""

import pathlib
import re
import subprocess

import pytest
import tensorflow as tf
from absl.testing import parameterized

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.long
class OnlineTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.parameters([[]], [['--topic']])
  def test_clicks_change_scores(self, flags):
    done = subprocess.run(
      ['launch/online_demo.sh', *flags, '3'],
      cwd=ROOT,
      capture_output=True,
      text=True,
      timeout=300,
    )
    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
    after = [float(x) for x in re.findall(r'\w[_-]\d+ +\w+ +\S+ → ([\d.]+)', done.stdout)]
    self.assertLen(after, 3, done.stdout)
    self.assertLess(after[1], after[0] - 0.05)
    self.assertGreater(after[2], after[1] + 0.05)
    with open(ROOT / 'build/online/trainer.log', encoding='utf-8') as f:
      self.assertIn('the state is saved', f.read())


if __name__ == '__main__':
  tf.test.main()
