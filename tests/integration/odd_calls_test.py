"""Odd arguments and environments: a command does its work, or says why not in one line."""

import json

import pytest
import tensorflow as tf

from tests.support import commands

DRAWN = '40'  # calls


@pytest.mark.long
class OddCallsTest(tf.test.TestCase):
  def test_each_ends_in_its_result_or_one_line(self):
    ended = commands.run(
      *('-m', 'tests.support.odd_calls', self.get_temp_dir(), '0', DRAWN), env={'CTR_THREADS': '1'}
    )
    self.assertEqual(ended.returncode, 0, ended.stderr)
    lines = ended.stdout.splitlines()
    self.assertGreater(len(lines), int(DRAWN))
    for line in lines:
      *call, status, said = json.loads(line)
      with self.subTest(call):
        # 1: of a run whose reports could not be written; 3: of a rank that waits for another.
        self.assertIn(status, (0, 1, 2, 3), said)
        self.assertNotIn('Traceback', said)
        errors = [one for one in said.splitlines() if one.startswith('error: ')]
        if status == 1:
          self.assertNotEmpty(errors, said)
          for error in errors:
            self.assertStartsWith(error, 'error: the state is saved and whole, but the reports')
        if status == 2:
          self.assertLen(errors, 1, said)


if __name__ == '__main__':
  tf.test.main()
