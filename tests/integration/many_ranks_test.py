"""Sixteen ranks train as one process does: a test of tests/parallel, which else has 2 or 3."""

import pytest
import tensorflow as tf

from tests.support import jobs


@pytest.mark.long
class ManyRanksTest(tf.test.TestCase):
  def test_sixteen_ranks_train_as_one_process(self):
    said = jobs.run(16, 'pytest', '-x', 'tests/parallel', '-k', 'uneven_data_adagrad')
    self.assertIn('1 passed', said)


if __name__ == '__main__':
  tf.test.main()
