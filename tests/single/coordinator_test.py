"""Where parameter servers' processes meet:

TF_CONFIG, collectives, units of work, and who is lost; no TensorFlow servers needed.
"""

import pickle
import socket
import threading

import numpy as np
import tensorflow as tf

from trainer.config import Sync
from trainer.errors import UserError
from trainer.parameter_server import coordinator as hub_module
from trainer.parameter_server.cluster import Cluster
from trainer.parameter_server.coordinator import Coordinator, CoordinatorClient
from trainer.parameter_server.run import _flat

ADDRESSES = {'ps': ['127.0.0.1:1'], 'worker': ['127.0.0.1:2', '127.0.0.1:3', '127.0.0.1:4']}


def cluster(kind, index, workers):
  return Cluster(('127.0.0.1:1',), tuple(ADDRESSES['worker'][:workers]), kind, index)


class TfConfigTest(tf.test.TestCase):
  def refuse(self, tf_config, text):
    with self.assertRaisesRegex(UserError, text) as raised:
      Cluster.from_tf_config(tf_config, 'ps')
    self.assertNotIn('\n', str(raised.exception))

  def test_user_errors(self):
    task = {'type': 'worker', 'index': 0}
    self.refuse(None, 'TF_CONFIG: is not set; sync.mode=ps needs it')
    self.refuse([1], 'found list')
    self.refuse({'task': task}, "key 'cluster': found None")
    self.refuse({'cluster': ADDRESSES}, "key 'task': found None")
    self.refuse({'cluster': {'worker': ['h:1']}, 'task': task}, "'cluster.ps': is missing")
    self.refuse(
      {'cluster': ADDRESSES | {'worker': ['host']}, 'task': task},
      "found the address 'host'; host:port is needed",
    )
    self.refuse(
      {'cluster': ADDRESSES | {'worker': ['127.0.0.1:1']}, 'task': task},
      "the address '127.0.0.1:1' stands twice",
    )
    self.refuse(
      {'cluster': ADDRESSES | {'evaluator': ['h:1']}, 'task': task},
      "'cluster.evaluator': unknown kind of task",
    )
    self.refuse(
      {'cluster': ADDRESSES, 'task': {'type': 'master', 'index': 0}}, "'task.type': found 'master'"
    )
    self.refuse(
      {'cluster': ADDRESSES, 'task': {'type': 'ps', 'index': 1}},
      "'task.index': found 1; the cluster has 1 of 'ps'",
    )

  def test_a_chief_is_worker_0(self):
    found = Cluster.from_tf_config(
      {
        'cluster': {'chief': ['c:1'], 'worker': ['w:1'], 'ps': ['s:1']},
        'task': {'type': 'worker', 'index': 0},
      },
      'ps',
    )
    self.assertEqual((found.name, found.workers), ('worker 1', ('c:1', 'w:1')))


class HubTest(tf.test.TestCase):
  def run_workers(self, works, sync, settings=None):
    """Each of `works` in a thread, as worker i of them. Returns: (the hub's status, results)."""
    n = len(works)
    hub = Coordinator(cluster('ps', 0, n), sync, {'a': 1})
    results = [None] * n

    def run(i):
      communicator = CoordinatorClient(
        hub.address, cluster('worker', i, n), sync, (settings or {}).get(i, {'a': 1})
      )
      results[i] = works[i](communicator)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(n)]
    for t in threads:
      t.start()
    status = hub.wait()
    for t in threads:
      t.join(20)
    return status, results

  def test_collectives(self):
    def work(communicator):
      found = (
        communicator.gather(communicator.rank * 10),
        communicator.broadcast(f'from {communicator.rank}'),
        communicator.exchange([(communicator.rank, to) for to in range(communicator.size)]),
        communicator.sum_arrays({'x': np.array([communicator.rank, 1.0])})['x'].tolist(),
      )
      communicator.barrier()
      communicator.bye()
      return found

    status, results = self.run_workers([work] * 3, Sync(mode='ps', lost_peer_seconds=20))
    self.assertEqual(status, 0)
    for rank, (gathered, broadcast, exchanged, summed) in enumerate(results):
      self.assertEqual(gathered, [0, 10, 20])
      self.assertEqual(broadcast, 'from 0')
      self.assertEqual(exchanged, [(r, rank) for r in range(3)])
      self.assertEqual(summed, [3.0, 3.0])

  def units(self, communicator, first, total, pause_after=None, stop_at=None):
    communicator.open_pass(2, first, total, pause_after, 'state')
    mine = []
    while True:
      unit, reason, batches = communicator.claim(
        stop_at is not None and len(mine) >= stop_at, False
      )
      if unit is None:
        communicator.close_pass()
        return mine, reason, batches
      mine.append(unit)

  def test_every_unit_goes_to_one_worker(self):
    def work(communicator):
      found = self.units(communicator, 4, 40, pause_after=9), self.units(communicator, 14, 40)
      communicator.bye()
      return found

    status, results = self.run_workers([work] * 2, Sync(mode='ps_async', lost_peer_seconds=20))
    self.assertEqual(status, 0)
    (a, again_a), (b, again_b) = results
    self.assertEqual(sorted(a[0] + b[0]), list(range(4, 14)))  # a pause comes at a whole batch
    self.assertEqual([a[1:], b[1:]], [('save', 7)] * 2)
    self.assertEqual(sorted(again_a[0] + again_b[0]), list(range(14, 40)))
    self.assertEqual([again_a[1:], again_b[1:]], [('end', 20)] * 2)

  def test_a_stop_ends_at_a_whole_batch(self):
    def work(communicator):
      found = self.units(communicator, 0, 1000, stop_at=5)
      communicator.bye()
      return found

    _, ((a, reason, batches), (b, _, _)) = self.run_workers(
      [work] * 2, Sync(mode='ps_async', lost_peer_seconds=20)
    )
    self.assertEqual(reason, 'stop')
    self.assertEqual(sorted(a + b), list(range(2 * batches)))

  def test_a_lost_workers_unit_goes_to_another_and_it_may_enter_again(self):
    lost = threading.Event()
    dead = []

    def first(communicator):
      communicator.open_pass(2, 0, 20, None, {'place': 7})
      lost.wait(20)
      mine = []
      while True:
        unit, reason, _ = communicator.claim(False, False)
        if unit is None:
          break
        mine.append(unit)
        if len(mine) == 4:  # the lost one comes back
          entering.start()
          entered.wait(20)
      communicator.close_pass()
      found = communicator.gather('first')
      communicator.bye()
      return mine, reason, found

    def second(communicator):
      communicator.open_pass(2, 0, 20, None, {'place': 7})
      dead.append(communicator.claim(False, False)[0])
      communicator._leaving = True
      communicator._wire._connection.close()
      communicator._wire._connection.detach()
      lost.set()
      return communicator

    entered = threading.Event()

    def enter():
      communicator = CoordinatorClient(self.address, cluster('worker', 1, 2), self.sync, {'a': 1})
      self.assertTrue(communicator.late)
      self.assertEqual(communicator.sum_arrays({'x': 3}), {'x': 3})  # it meets nobody
      self.state = communicator.enter()
      entered.set()
      self.late_units, _, _ = self.units(communicator, 0, 0)
      self.late_gather = communicator.gather('second')
      communicator.bye()

    entering = threading.Thread(target=enter, daemon=True)
    self.sync = Sync(mode='ps_async', lost_peer_seconds=20)
    original = hub_module.Coordinator.__init__

    def remember(hub, *args):
      original(hub, *args)
      self.address = hub.address

    with tf.compat.v1.test.mock.patch.object(hub_module.Coordinator, '__init__', remember):
      status, results = self.run_workers([first, second], self.sync)
    entering.join(20)
    self.assertEqual(status, 0)
    mine, reason, found = results[0]
    self.assertEqual(reason, 'end')
    self.assertEqual(found, ['first', 'second'])
    self.assertEqual(self.late_gather, found)
    self.assertEqual(self.state, {'place': 7})
    self.assertEqual(sorted(mine + self.late_units), list(range(20)))
    self.assertIn(dead[0], mine + self.late_units)

  def test_staleness_is_bounded(self):
    behind = threading.Event()
    taken = [0, 0]

    def fast(communicator):
      communicator.open_pass(1, 0, 60, None, None)
      while communicator.claim(False, False)[0] is not None:
        taken[0] += 1
        self.assertLessEqual(taken[0] - taken[1], 4 + 1)  # a step more while it is under way
        if taken[0] == 4:
          behind.set()
      communicator.close_pass()
      communicator.bye()

    def slow(communicator):
      communicator.open_pass(1, 0, 60, None, None)
      behind.wait(20)
      while communicator.claim(False, False)[0] is not None:
        taken[1] += 1
      communicator.close_pass()
      communicator.bye()

    status, _ = self.run_workers(
      [fast, slow], Sync(mode='ps_async', max_staleness=4, lost_peer_seconds=20)
    )
    self.assertEqual(status, 0)
    self.assertEqual(sum(taken), 60)

  def ended(self):
    """Where a process would have ended: its status; the thread goes on."""
    exits = []

    def leave(communicator, text, status):
      communicator._leaving = True
      exits.append((text, status))
      communicator._replies.put(None)
      communicator._welcome.put((0, 0, 0, False))

    patch = tf.compat.v1.test.mock.patch.object(hub_module.CoordinatorClient, '_exit', leave)
    return exits, patch

  def test_a_lost_worker_ends_mode_ps_and_is_named(self):
    exits, patch = self.ended()

    def dies(communicator):
      communicator._leaving = True
      communicator._wire._connection.close()
      communicator._wire._connection.detach()

    with patch:
      status, _ = self.run_workers(
        [lambda communicator: communicator.gather(0), dies], Sync(mode='ps', lost_peer_seconds=20)
      )
    self.assertEqual(status, 3)
    ((text, status),) = exits
    self.assertEqual(status, 3)
    self.assertRegex(text, r'^worker 1 \(process \d+ on .*\) was lost: its connection closed')

  def test_all_go_back_to_the_checkpoint_where_a_request_was_refused(self):
    for mode in ('ps', 'ps_async'):
      self.check_back(Sync(mode=mode, lost_peer_seconds=600))

  def check_back(self, sync):
    again = threading.Event()
    hub, restarts = Coordinator(cluster('ps', 0, 2), sync, {'a': 1}), []

    def restart(*_):  # stands in for exec: two processes come again and finish
      restarts.append(threading.get_ident())
      if len(restarts) == 2:
        for i in range(2):
          threading.Thread(
            target=lambda i=i: CoordinatorClient(
              hub.address, cluster('worker', i, 2), sync, {'a': 1}
            ).bye(),
            daemon=True,
          ).start()
      again.wait()

    def work(i):
      communicator = CoordinatorClient(hub.address, cluster('worker', i, 2), sync, {'a': 1})
      if i == 1:
        communicator.fail_by(
          tf.errors.AbortedError(
            None, None, 'The same RunGraph (Worker) request was received twice.'
          )
        )
      communicator.gather(i)

    with tf.compat.v1.test.mock.patch.object(hub_module.os, 'execv', restart):
      for i in range(2):
        threading.Thread(target=work, args=(i,), daemon=True).start()
      self.assertEqual(hub.wait(), 0)
    self.assertLen(restarts, 2)

  def test_processes_must_be_told_the_same(self):
    exits, patch = self.ended()
    with patch:
      status, _ = self.run_workers(
        [lambda communicator: None] * 2,
        Sync(mode='ps', lost_peer_seconds=20),
        {0: {'a': 1}, 1: {'a': 2}},
      )
    self.assertEqual(status, 2)
    self.assertIn(
      ('a: found 2 on worker 1 and 1 on ps 0; wanted the same command on every process', 2), exits
    )

  def test_strangers_are_not_listened_to(self):
    sync = Sync(mode='ps', lost_peer_seconds=20)
    hub = Coordinator(cluster('ps', 0, 1), sync, {'a': 1})
    host, port, secret = hub.address
    with tf.compat.v1.test.mock.patch.object(hub_module.pickle, 'loads') as loads:
      for said in (
        pickle.dumps(('hello', 'worker', 0, 'stranger', {'a': 1})).ljust(1000),
        secret[:-1].encode() + b'\0' * 1000,
      ):
        with socket.create_connection((host, port), timeout=20) as stranger:
          try:
            stranger.sendall(said)
            self.assertEmpty(stranger.recv(1))  # closed
          except ConnectionError:
            pass
      loads.assert_not_called()
    socket.create_connection((host, port)).close()
    communicator = CoordinatorClient(hub.address, cluster('worker', 0, 1), sync, {'a': 1})
    self.assertEqual(communicator.gather(7), [7])
    communicator.bye()
    self.assertEqual(hub.wait(), 0)

  def test_settings_are_compared_key_by_key(self):
    self.assertEqual(
      _flat({'a': {'b': [1, {'c': 2}]}, 'd': []}), {'a.b.0': 1, 'a.b.1.c': 2, 'd': []}
    )


if __name__ == '__main__':
  tf.test.main()
