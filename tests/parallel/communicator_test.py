"""Every communicator of ranks keeps the contract. Run under horovodrun."""

import tensorflow as tf

from tests.support.communicator_contract import RankCommunicatorContract
from tests.support.ranks import ranks


class _OnRanks(RankCommunicatorContract):
  sync = {}

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.communicator = ranks(**cls.sync)

  def on_every_rank(self, action):
    action(self.communicator)


class DefaultTest(_OnRanks, tf.test.TestCase):
  """Sums and plain data by Horovod, rows by our connections."""

  def test_counts_what_travels(self):
    size = self.communicator.size
    exchange = self.communicator.row_exchange('counted')
    for _ in range(5):
      exchange.all_to_all([tf.zeros([size, 4])], tf.ones([size], tf.int32))
    counters = exchange.counters()
    messages = 5 * (size - 1)
    bytes_each = 64 + 4 * 4
    self.assertEqual(counters['connections'], size - 1)
    self.assertEqual(counters['bytes_sent'], messages * bytes_each)
    self.assertEqual(counters['bytes_received'], messages * bytes_each)
    self.assertBetween(counters['system_calls'], 2 * messages, 7 * messages)


class HorovodTest(_OnRanks, tf.test.TestCase):
  """Everything by Horovod."""

  sync = {'row_exchange': 'horovod'}


if __name__ == '__main__':
  tf.test.main()
