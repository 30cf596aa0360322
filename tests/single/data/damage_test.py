"""A tenth of `python -m tests.support.damage`: damaged records of every format end in counts or in
one line.
"""

import logging

import tensorflow as tf
from absl.testing import parameterized

from tests.support.damage import FORMATS, trials


class DamageTest(tf.test.TestCase, parameterized.TestCase):
  def setUp(self):
    super().setUp()
    logging.disable(logging.WARNING)
    self.addCleanup(logging.disable, logging.NOTSET)

  @parameterized.parameters(*FORMATS)
  def test_ends_in_counts_or_one_line(self, name):
    totals = trials(name, 1400, seed=1)
    self.assertGreater(totals['bad'] + totals['refused'], 300)
    self.assertGreater(totals['kept'], 100)


if __name__ == '__main__':
  tf.test.main()
