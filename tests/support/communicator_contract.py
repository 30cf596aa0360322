"""What every Communicator must do, as tests that each implementation's test class inherits."""

import threading
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from trainer.comm.communicator import Communicator
from trainer.errors import DataLoss, UserError


class CommunicatorContract:
  """Tests of a Communicator; a subclass says how an action runs on every process.

  Attributes:
    in_graphs: whether sums are tried inside a tf.function, too. Threads of one process that stand
      for several cannot: all would wait in the few threads that TensorFlow runs Python in.
  """

  in_graphs = True

  def on_every_rank(self, action: Callable[[Communicator], None]) -> None:
    """Runs action(communicator) on every process of a job; an assertion that fails is raised."""
    raise NotImplementedError

  def test_sums_have_the_same_exact_bits_everywhere(self):
    def action(communicator):
      rank, size = communicator.rank, communicator.size
      ranks = np.arange(size)
      arrays = {
        'int64': np.array([rank, 2**60 // size, -1], np.int64),
        'scalar': np.array(rank, np.int64),
        'float64': np.array([1 + rank * 2.0**-40, 0.1 * rank]),
        'float32': np.full([3, 2], rank, np.float32),
        'none': np.zeros([0, 4], np.float64),
        'large': np.full([300, 1001], rank, np.float64),
      }
      sums = communicator.sum_arrays(arrays)
      self.assertEqual(
        {k: (v.dtype, v.shape) for k, v in sums.items()},
        {k: (v.dtype, v.shape) for k, v in arrays.items()},
      )
      self.assertAllEqual(sums['int64'], [ranks.sum(), 2**60 // size * size, -size])
      self.assertAllEqual(sums['scalar'], ranks.sum())
      self.assertEqual(sums['float64'][0], size + ranks.sum() * 2.0**-40)
      self.assertAllClose(sums['float64'][1], 0.1 * ranks.sum(), rtol=1e-15)
      self.assertAllEqual(sums['float32'], np.full([3, 2], ranks.sum()))
      self.assertAllEqual(sums['large'], np.full([300, 1001], ranks.sum()))
      self.assertEqual(communicator.sum_arrays({}), {})

    self.on_every_rank(action)

  def test_sums_of_tensors_in_and_out_of_a_graph(self):
    def action(communicator):
      rng = np.random.default_rng(communicator.rank)
      shapes = [2, 3], [], [0, 4], [1001]
      own = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
      everyone = communicator.gather(own)
      in_graph = tf.function(communicator.all_reduce, autograph=False)
      for run in [communicator.all_reduce, *[in_graph] * 3 * self.in_graphs]:
        sums = run([tf.constant(v) for v in own])
        bits = [b''.join(t.numpy().tobytes() for t in sums).hex()]
        self.assertEqual(communicator.gather(bits), [bits] * communicator.size)
        for total, *values in zip(sums, *everyone):
          self.assertAllClose(total, np.sum(values, 0, np.float64), rtol=1e-5, atol=1e-6)

    self.on_every_rank(action)

  def test_the_gradient_of_a_sum_is_the_sum_of_gradients(self):
    def action(communicator):
      weight = tf.constant([1.0 + communicator.rank, -2.0])
      own = tf.constant([10.0 * communicator.rank, 1.0])
      with tf.GradientTape() as tape:
        tape.watch(own)
        loss = tf.reduce_sum(weight * communicator.all_reduce_with_gradient(own))
      size = communicator.size
      self.assertAllClose(tape.gradient(loss, own), [size * (size + 1) / 2, -2.0 * size])

    self.on_every_rank(action)

  def test_plain_data_reaches_whom_it_is_for(self):
    def action(communicator):
      rank, size = communicator.rank, communicator.size
      received = communicator.exchange(
        [{'from': rank, 'to': to, 'rows': np.full([rank, to], 0.5)} for to in range(size)]
      )
      for sender, value in enumerate(received):
        self.assertEqual((value['from'], value['to']), (sender, rank))
        self.assertAllEqual(value['rows'], np.full([sender, rank], 0.5))
        self.assertEqual(value['rows'].dtype, np.float64)
      self.assertEqual(communicator.gather([rank, 'x' * rank]), [[r, 'x' * r] for r in range(size)])
      self.assertEqual(communicator.broadcast(f'from {rank}'), 'from 0')
      self.assertIsNone(communicator.broadcast(None))
      columns = communicator.gather(np.arange(100_000 * rank))
      self.assertEqual([len(c) for c in columns], [100_000 * r for r in range(size)])
      communicator.barrier()

    self.on_every_rank(action)

  def test_the_first_acts_alone_and_all_get_its_result_or_its_error(self):
    def action(communicator):
      rank, ran = communicator.rank, []
      self.assertEqual(communicator.on_first('cannot', lambda: ran.append(rank) or [7]), [7])
      self.assertEqual(ran, [0] * (rank == 0))
      with self.assertRaisesRegex(UserError, '^cannot act: '):
        communicator.on_first('cannot act', lambda: open('/none/such', encoding='utf-8'))

    self.on_every_rank(action)

  def test_one_mistake_is_raised_by_all(self):
    def action(communicator):
      rank, size = communicator.rank, communicator.size
      self.assertEqual(communicator.together('cannot', lambda: rank), rank)

      def mistake():
        if rank == size - 1:
          raise DataLoss(f'rank {rank} found nothing')
        return rank

      with self.assertRaisesRegex(DataLoss, f'^rank {size - 1} found nothing$'):
        communicator.together('cannot', mistake)
      with self.assertRaisesRegex(UserError, '^cannot read: /nowhere: No such file or directory'):
        communicator.together('cannot read', lambda: open('/nowhere') if rank == 0 else None)
      communicator.barrier()

    self.on_every_rank(action)


class RankCommunicatorContract(CommunicatorContract):
  """Tests of a communicator that exchanges rows, too."""

  def test_rows_go_where_counts_say(self):
    def action(communicator):
      rank, size = communicator.rank, communicator.size
      exchange = communicator.row_exchange('test')
      # Rank r has r·t rows for rank t: some have none at all.
      counts = tf.constant([rank * to for to in range(size)], tf.int32)
      to = np.repeat(np.arange(size), counts)
      values = [
        np.stack([np.full(len(to), rank), to, np.arange(len(to))], 1).astype(np.int64),
        (100.0 * rank + to).astype(np.float32),
        tf.cast(np.tile(to[:, None, None], [1, 2, 3]), tf.bfloat16),
        to.astype(np.uint8),
      ]
      run = tf.function(exchange.all_to_all, autograph=False)
      for all_to_all in (exchange.all_to_all, run, run):
        received, received_counts = all_to_all([tf.constant(v) for v in values], counts)
        self.assertAllEqual(received_counts, [sender * rank for sender in range(size)])
        sender = np.repeat(np.arange(size), received_counts)
        self.assertEqual([r.dtype for r in received], [tf.constant(v).dtype for v in values])
        self.assertAllEqual(received[0][:, 0], sender)
        self.assertAllEqual(received[0][:, 1], np.full(len(sender), rank))
        self.assertAllEqual(received[1], 100 * sender + rank)
        self.assertAllEqual(received[2], np.full([len(sender), 2, 3], rank))
        self.assertAllEqual(received[3], np.full(len(sender), rank))
      (flat,), _ = exchange.all_to_all([tf.zeros([0], tf.float32)], tf.zeros([size], tf.int32))
      self.assertAllEqual(flat, [])
      (halves,), _ = exchange.all_to_all([tf.ones([size], tf.float16)], tf.ones([size], tf.int32))
      self.assertAllEqual(halves, np.ones(size))

    self.on_every_rank(action)

  def test_exchanges_may_overlap(self):
    def action(communicator):
      first, second = (communicator.row_exchange(name) for name in ('first', 'second'))
      counts = tf.ones([communicator.size], tf.int32)
      results = {}

      def run(name, exchange):
        all_to_all = tf.function(exchange.all_to_all, autograph=False)
        for turn in range(20):
          value = tf.fill([communicator.size], len(name) * 1000 + turn)
          (results[name, turn],), _ = all_to_all([value], counts)

      # Ranks begin with different ones.
      pairs = [('first', first), ('other', second)][:: 1 if communicator.rank % 2 else -1]
      threads = [threading.Thread(target=run, args=pair) for pair in pairs]
      for thread in threads:
        thread.start()
      for thread in threads:
        thread.join()
      for name, _ in pairs:
        for turn in range(20):
          wanted = np.full(communicator.size, len(name) * 1000 + turn)
          self.assertAllEqual(results[name, turn], wanted)

    self.on_every_rank(action)
