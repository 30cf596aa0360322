"""Replies to collectives, without any connection."""

import numpy as np
import tensorflow as tf

from trainer.parameter_server.collectives import replies


class CollectivesTest(tf.test.TestCase):
  def replies(self, kind, values):
    """Replies by worker; workers arrive in the order of `values`."""
    return replies({worker: (kind, value) for worker, value in values.items()})

  def test_ranks_follow_the_order_of_workers_not_of_arrival(self):
    self.assertEqual(
      self.replies('gather', {7: 'c', 2: 'a', 5: 'b'}), dict.fromkeys((2, 5, 7), ['a', 'b', 'c'])
    )
    self.assertEqual(self.replies('close_pass', {7: None, 2: None}), {2: [0, 2], 7: [1, 2]})
    self.assertEqual(
      self.replies('exchange', {7: ['7→2', '7→7'], 2: ['2→2', '2→7']}),
      {2: ['2→2', '7→2'], 7: ['2→7', '7→7']},
    )

  def test_sums_do_not_depend_on_the_order_of_arrival(self):
    rng = np.random.default_rng(0)
    values = {i: {'x': rng.standard_normal(1000), 'n': np.array(i)} for i in range(5)}
    one, other = (self.replies('sum', dict(sorted(values.items(), reverse=r))) for r in (0, 1))
    for worker in range(5):
      self.assertEqual(one[worker]['x'].tobytes(), other[worker]['x'].tobytes())
      self.assertEqual(one[worker]['n'], 10)
    self.assertAllClose(one[0]['x'], sum(v['x'] for v in values.values()))

  def test_workers_must_call_the_same(self):
    with self.assertRaisesRegex(ValueError, 'different collectives: worker 1 gather, worker 2 sum'):
      replies({2: ('sum', {}), 1: ('gather', None)})
    for other in ({'y': np.zeros(2)}, {'x': np.zeros(3)}, {'x': np.zeros(2, np.float32)}):
      with self.assertRaisesRegex(ValueError, 'workers sum different arrays'):
        replies({0: ('sum', {'x': np.zeros(2)}), 1: ('sum', other)})
    with self.assertRaises(ValueError):
      replies({0: ('exchange', ['a', 'b']), 1: ('exchange', ['a'])})
