"""examples/keras_model on N ranks trains the same model as one process. Run under horovodrun."""

import os
import sys

import tensorflow as tf

from tests.support.ranks import ranks
from tests.support.steps import rows_of
from trainer.comm.communicator import SingleProcess

EXAMPLE = os.path.join(os.path.dirname(__file__), '..', '..', 'examples', 'keras_model')


class KerasModelTest(tf.test.TestCase):
  def test_ranks_equal_one_process(self):
    sys.path.insert(0, EXAMPLE)
    import train as example

    example.STEPS = 20
    communicator = ranks()
    model, losses = example.train(communicator)
    own = [[key, *row] for key, row in rows_of(model.embedding.store.export_state()).items()]
    parts = communicator.gather(own)
    if communicator.rank:
      return
    self.assertTrue(all(parts), 'a rank owns no rows')
    rows = {key: row for part in parts for key, *row in part}
    self.assertEqual(len(rows), sum(map(len, parts)), 'a key has two owners')
    alone, expected_losses = example.train(SingleProcess())
    expected = rows_of(alone.embedding.store.export_state())
    self.assertAllClose(losses, expected_losses, rtol=1e-5)
    self.assertEqual(rows.keys(), expected.keys())
    self.assertEqual({row[2] for row in rows.values()}, {False, True})
    for column in range(5):
      trained = [row[column] for key, row in rows.items() if expected[key][2]]
      wanted = [expected[key][column] for key in rows if expected[key][2]]
      self.assertAllClose(trained, wanted, rtol=1e-4, atol=1e-6)
    linear = [row[3][0] for row in rows.values()]
    self.assertAllClose(linear, [expected[key][3][0] for key in rows], rtol=1e-4, atol=1e-6)
    for own_value, value in zip(model.get_weights(), alone.get_weights()):
      self.assertAllClose(own_value, value, rtol=1e-4, atol=1e-6)


if __name__ == '__main__':
  tf.test.main()
