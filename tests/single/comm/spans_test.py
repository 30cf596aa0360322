"""How long exchanges take: spans that overlap count once."""

import numpy as np
import tensorflow as tf

from trainer.comm.spans import Spans, seconds_of
from trainer.training.stopwatch import Stopwatch


class SpansTest(tf.test.TestCase):
  def test_where_spans_overlap_they_count_once(self):
    rng = np.random.default_rng(0)
    for _ in range(50):
      begins = rng.integers(0, 50, 4)
      spans = np.stack([begins, begins + rng.integers(0, 20, 4)], 1).astype(float)
      covered = set().union(*(range(int(a), int(b)) for a, b in spans))
      self.assertEqual(seconds_of(spans), len(covered))
    self.assertEqual(seconds_of(np.zeros([0, 2])), 0)

  def test_a_span_is_from_inputs_to_outputs(self):
    spans = Spans()

    @tf.function
    def graph(x):
      y = spans.timed(lambda: [x + 1], [x])[0]
      return y, spans.collect()

    y, (span,) = graph(tf.constant(2.0))
    self.assertEqual(y.numpy(), 3)
    self.assertLessEqual(span[0], span[1])
    self.assertAllEqual(tf.function(lambda: spans.collect())(), np.zeros([0, 2]))

  def test_a_part_of_a_part_is_told_apart(self):
    clock = Stopwatch()
    with clock.of('step'):
      pass
    clock.move(2.0, 'exchange', within='step')
    found = clock.lap()
    self.assertEqual(found['exchange'], 2)
    self.assertAllClose(found['step'], -2, atol=0.1)


if __name__ == '__main__':
  tf.test.main()
