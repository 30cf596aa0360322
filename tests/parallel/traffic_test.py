"""What a training step sends, and when. Run under horovodrun."""

import threading

import numpy as np
import tensorflow as tf

from ops import sharding
from tests.support.batches import make_batch
from tests.support.ranks import ranks
from tests.support.steps import make_config, train
from trainer.training.step import StepFlags, TrainStep

WIDTH, HEADER_BYTES = 4, 64
CONFIG = {'lifecycle': {'admission': 'none', 'eviction': 'none'}}


def after(tensors, action):
  """Returns the tensors once `action()` was called; in a graph this depends on nothing else."""

  def act(*values):
    action()
    return list(values)

  # Not stateful: TensorFlow would otherwise call them in the order of the program.
  values = tf.numpy_function(act, tensors, [t.dtype for t in tensors], stateful=False)
  return [tf.ensure_shape(v, t.shape) for v, t in zip(tf.nest.flatten(values), tensors)]


class TrafficTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.communicator = ranks()

  def train_held_back(self, held_back):
    """Takes a step in which sums, or rows, are held back until the other has happened."""
    happened = threading.Event()
    all_reduce, opened = self.communicator.all_reduce, self.communicator.row_exchange

    def hold_back(tensors):
      return after(tensors, lambda: self.assertTrue(happened.wait(60)))

    def tell(tensors):
      return after(tensors, happened.set)

    def changed_sums(tensors):
      return all_reduce(hold_back(tensors)) if held_back == 'sums' else tell(all_reduce(tensors))

    def row_exchange(name):
      exchange = opened(name)
      if name == 'gradients':
        all_to_all = exchange.all_to_all

        def changed(values, counts):
          if held_back == 'rows':
            return all_to_all(hold_back(values), counts)
          received, counts = all_to_all(values, counts)
          return tell(received), counts

        exchange.all_to_all = changed
      return exchange

    self.communicator.all_reduce = changed_sums
    self.communicator.row_exchange = row_exchange
    step = TrainStep(make_config(CONFIG), self.communicator)
    train(step, make_batch(np.random.default_rng(self.communicator.rank), 8))
    self.assertTrue(happened.is_set())

  def test_sums_do_not_wait_for_rows(self):
    self.train_held_back('rows')

  def test_rows_do_not_wait_for_sums(self):
    self.train_held_back('sums')

  def test_bytes_and_system_calls_are_what_the_number_of_ranks_predicts(self):
    exchanges, opened = {}, self.communicator.row_exchange

    def row_exchange(name):
      exchanges[name] = opened(name)
      return exchanges[name]

    def spent(name):
      return sum(exchange.counters()[name] for exchange in exchanges.values())

    self.communicator.row_exchange = row_exchange
    step = TrainStep(make_config(CONFIG), self.communicator)
    size, rank, steps = self.communicator.size, self.communicator.rank, 5
    others = np.arange(size) != rank
    rng = np.random.default_rng(rank)
    staged = [step.stage(make_batch(rng, 32)) for _ in range(steps + 1)]
    routed = step.route(staged[0])
    sent = [sharding.owner_counts(s.deduped.unique, size).numpy() for s in staged]
    received = [np.array(self.communicator.gather(s))[:, rank] for s in sent]
    bytes_before, calls_before = spent('bytes_sent'), spent('system_calls')
    for now, following in zip(staged, staged[1:]):
      _, routed = step.train(now, routed, following, StepFlags(True, False, False))
    predicted = 4 * steps * (size - 1) * HEADER_BYTES
    for i in range(steps):
      keys = sent[i + 1] * (8 + 4 + 4) + (4 + 8)  # with show, click; the rank's weight, samples
      rows = 4 * (received[i] * (1 + WIDTH) + -(-received[i] // 32))  # a bit: has it factors?
      gradients = 4 * sent[i] * (1 + WIDTH)
      predicted += (keys + rows + gradients)[others].sum()
    self.assertEqual(spent('bytes_sent') - bytes_before, predicted)
    messages = 4 * steps * (size - 1)
    # A message is sent by one call and received by one or two; a few find nothing yet, or wait.
    self.assertBetween(spent('system_calls') - calls_before, 2 * messages, 8 * messages)
    self.assertEqual([e.counters()['connections'] for e in exchanges.values()], [size - 1] * 3)


if __name__ == '__main__':
  tf.test.main()
