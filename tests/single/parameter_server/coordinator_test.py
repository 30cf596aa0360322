"""The coordinator and its clients, over real connections: forming, losing, entering, ending."""

import contextlib
import io
import os
import signal
import socket

import tensorflow as tf

from tests.support.parameter_servers import PATIENCE, SETTINGS, PlayedJob
from tests.support.threads import in_thread
from trainer.comm import messages
from trainer.config import Sync
from trainer.errors import UserError
from trainer.parameter_server import membership
from trainer.parameter_server.client import CoordinatorClient
from trainer.parameter_server.cluster import Cluster

ADDRESSES = {'ps': ['127.0.0.1:1'], 'worker': ['127.0.0.1:2', '127.0.0.1:3', '127.0.0.1:4']}


def work_of(slices, first, total, pause_after=None):
  return {'slices': slices, 'first': first, 'total': total, 'pause_after': pause_after}


class ClusterTest(tf.test.TestCase):
  def refuse(self, tf_config, text):
    with self.assertRaisesRegex(UserError, text) as raised:
      Cluster.from_tf_config(tf_config, 'ps')
    self.assertNotIn('\n', str(raised.exception))

  def test_a_wrong_tf_config_is_refused_in_one_line(self):
    task = {'type': 'worker', 'index': 0}
    self.refuse(None, 'TF_CONFIG: is not set; sync.mode=ps needs it')
    self.refuse([1], 'found list')
    self.refuse({'task': task}, "key 'cluster': found null")
    self.refuse({'cluster': ADDRESSES}, "key 'task': found null")
    self.refuse({'cluster': {'worker': ['h:1']}, 'task': task}, r"'cluster.ps': found \[\]")
    self.refuse(
      {'cluster': ADDRESSES | {'worker': ['host']}, 'task': task},
      "'cluster.worker': found 'host'; wanted .*host:port",
    )
    self.refuse(
      {'cluster': ADDRESSES | {'worker': ['127.0.0.1:1']}, 'task': task},
      "'cluster': found '127.0.0.1:1'; wanted each address once",
    )
    self.refuse(
      {'cluster': ADDRESSES | {'evaluator': ['h:1']}, 'task': task},
      "'cluster.evaluator': found .*; wanted only the kinds ps, worker, chief",
    )
    self.refuse({'cluster': ADDRESSES | {'chief': 1}, 'task': task}, "'cluster.chief': found 1")
    self.refuse(
      {'cluster': ADDRESSES, 'task': {'type': 'master', 'index': 0}}, "'task.type': found 'master'"
    )
    for address in ('h:²', 'h:' + '9' * 5000):
      self.refuse(
        {'cluster': ADDRESSES | {'worker': [address]}, 'task': task}, 'wanted .*host:port'
      )
    self.refuse(
      {'cluster': ADDRESSES, 'task': {'type': [], 'index': 0}}, r"'task.type': found \[\]"
    )
    self.refuse(
      {'cluster': ADDRESSES, 'task': {'type': 'ps', 'index': 1}},
      "'task.index': found 1; wanted a whole number below 1",
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

  def test_listens_where_the_job_reaches_it(self):
    for address, host in (('localhost:1', '127.0.0.1'), ('[::1]:1', '::1'), ('10.1.2.3:1', None)):
      found = Cluster((address,), ('w:1',), 'ps', 0).host(0)
      self.assertEqual(found, host or '10.1.2.3')
    with self.assertRaisesRegex(UserError, "the host 'h.*h' of ps 0 has no address"):
      Cluster(('h' * 70 + ':1',), ('w:1',), 'ps', 0).host(0)
    with self.assertRaisesRegex(UserError, "the host 'no.such.invalid' of ps 0 has no address"):
      Cluster(('no.such.invalid:1',), ('w:1',), 'ps', 0).host(0)


class CoordinatorTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.said = self.enter_context(contextlib.redirect_stderr(io.StringIO()))

  def sync(self, mode='ps', lost_peer_seconds=30, **keys):
    return Sync(mode=mode, lost_peer_seconds=lost_peer_seconds, **keys)

  def say_hello(self, job, index):
    """Connects as a worker's process does that never beats; `close` is its death."""
    connection = messages.connect(job.coordinator.address, job.coordinator.secret, PATIENCE)
    self.hello(connection, index)
    return connection

  def hello(self, connection, index):
    process = f'process {os.getpid()} on host'
    self.send(connection, 'hello', 'worker', index, process, SETTINGS)

  def send(self, connection, *message):
    connection.send_bytes(messages.encode(list(message)))

  def receive(self, connection, wanted):
    """The next message of a kind."""
    while True:
      kind, *rest = messages.decode(connection.recv_bytes())
      if kind == wanted:
        return rest

  def units(self, client, first, total, pause_after=None, stop_at=None):
    """What one worker got of a pass: its units, what ended the pass, and the batches done."""
    client.open_pass(work_of(2, first, total, pause_after), 'state')
    mine = []
    while True:
      claimed = client.claim(stop_at is not None and len(mine) >= stop_at, False)
      if claimed.unit is None:
        client.close_pass()
        return mine, claimed.reason, claimed.batches
      mine.append(claimed.unit)

  def test_every_unit_goes_to_one_worker(self):
    def work(client):
      return (
        self.units(client, 4, 40, pause_after=9),
        self.units(client, 14, 40),
        client.gather(client.rank),
      )

    a, b = PlayedJob(self.sync('ps_async'), workers=2).run(work, work)
    self.assertEqual(sorted(a[0][0] + b[0][0]), list(range(4, 14)))
    self.assertEqual([a[0][1:], b[0][1:]], [('save', 7)] * 2)
    self.assertEqual(sorted(a[1][0] + b[1][0]), list(range(14, 40)))
    self.assertEqual([a[1][1:], b[1][1:]], [('end', 20)] * 2)
    self.assertEqual([a[2], b[2]], [[0, 1]] * 2)

  def test_a_worker_that_is_slow_to_ask_finds_the_work_done(self):
    job = PlayedJob(self.sync('ps_async'), workers=2)
    connecting = [in_thread(lambda i=i: job.connect(i)) for i in range(2)]
    clients = [future.result(PATIENCE) for future in connecting]
    opened = in_thread(lambda: clients[0].open_pass(work_of(1, 0, 1), None))
    clients[1].open_pass(work_of(1, 0, 1), None)
    opened.result(PATIENCE)
    found = [clients[0].claim(False, False) for _ in range(2)]
    found.append(clients[1].claim(False, False))
    self.assertEqual([(c.unit, c.reason) for c in found], [(0, None), (None, 'end'), (None, 'end')])

  def test_one_that_is_asked_to_stop_stops_all(self):
    def work(client):
      return self.units(client, 0, 1000, stop_at=5 if client.rank else None)

    (a, reason, batches), (b, _, _) = PlayedJob(self.sync('ps_async'), workers=2).run(work, work)
    self.assertEqual(reason, 'stop')
    self.assertEqual(sorted(a + b), list(range(2 * batches)))

  def test_one_that_gives_up_the_pass_ends_it_for_all(self):
    def work(client):
      client.open_pass(work_of(2, 0, 10**9), 'state')
      while client.claim(False, False, is_merged=False).unit is not None:
        if client.rank:
          client.give_up('ruinous')
          break
      return client.close_pass(), client.gather(client.rank)

    found = PlayedJob(self.sync('ps_geo'), workers=2).run(work, work)
    self.assertEqual(found, [('ruinous', [0, 1])] * 2)

  def test_a_pass_is_given_up_though_the_one_that_did_is_lost_then(self):
    job = PlayedJob(self.sync('ps_async'), workers=2)
    dying = self.say_hello(job, 1)
    staying = in_thread(lambda: job.connect(0))
    self.receive(dying, 'welcome')
    self.send(dying, 'meet', 'open_pass', [work_of(1, 0, 10**9), None])
    client = staying.result(PATIENCE)
    client.open_pass(work_of(1, 0, 10**9), None)
    self.receive(dying, 'reply')
    self.send(dying, 'give_up', 'ruinous')
    dying.close()
    while client.claim(False, False).unit is not None:
      pass
    self.assertEqual(client.close_pass(), 'ruinous')

  def test_a_lost_workers_unit_goes_to_another_and_it_may_enter_again(self):
    job = PlayedJob(self.sync('ps_async'), workers=2)
    dying = self.say_hello(job, 1)
    staying = in_thread(lambda: job.connect(0))
    self.receive(dying, 'welcome')
    self.send(dying, 'meet', 'open_pass', [work_of(2, 0, 20), {'place': 7}])
    client = staying.result(PATIENCE)
    client.open_pass(work_of(2, 0, 20), {'place': 7})
    self.assertEqual(self.receive(dying, 'reply'), [None])
    self.send(dying, 'claim', False, False, True)
    ((lost_unit, _, _),) = self.receive(dying, 'reply')
    dying.close()
    mine = [client.claim(False, False).unit for _ in range(4)]
    again = in_thread(lambda: job.connect(1))
    late = again.result(PATIENCE)
    self.assertTrue(late.late)
    self.assertEqual((late.rank, late.size), (0, 1))  # it meets nobody
    self.assertEqual(late.sum_arrays({'x': 3}), {'x': 3})
    self.assertEqual(late.broadcast('own'), 'own')
    self.assertEqual(late.enter(), {'place': 7})

    def rest(client, units):
      while True:
        claimed = client.claim(False, False)
        if claimed.unit is None:
          client.close_pass()
          found = client.gather(f'worker at rank {client.rank}')
          client.bye(0)
          return units, claimed.reason, found
        units.append(claimed.unit)

    late.open_pass(work_of(2, 0, 0), None)
    others = in_thread(lambda: rest(late, []))
    mine, reason, found = rest(client, mine)
    theirs, *same = others.result(PATIENCE)
    self.assertEqual(job.coordinator.wait(), 0)
    self.assertEqual([reason, found], same)
    self.assertEqual([reason, found], ['end', ['worker at rank 0', 'worker at rank 1']])
    self.assertEqual(sorted(mine + theirs), list(range(20)))
    self.assertIn(lost_unit, mine + theirs)
    self.assertRegex(
      self.said.getvalue(), r'worker 1 \(process \d+ on host\) was lost: .*The others go on'
    )

  def test_the_call_of_a_lost_worker_is_forgotten(self):
    job = PlayedJob(self.sync('ps_async'), workers=2)
    dying = self.say_hello(job, 1)
    staying = in_thread(lambda: job.connect(0))
    self.receive(dying, 'welcome')
    self.send(dying, 'meet', 'open_pass', [work_of(1, 0, 4), None])
    client = staying.result(PATIENCE)
    client.open_pass(work_of(1, 0, 4), None)
    self.receive(dying, 'reply')
    self.send(dying, 'meet', 'close_pass', None)
    dying.close()
    late = in_thread(lambda: job.connect(1)).result(PATIENCE)
    late.enter()
    late.open_pass(work_of(1, 0, 0), None)
    closing = in_thread(client.close_pass)
    self.assertEqual([late.claim(False, False).unit for _ in range(5)], [0, 1, 2, 3, None])
    late.close_pass()
    closing.result(PATIENCE)
    self.assertEqual([client.size, client.rank, late.size, late.rank], [2, 0, 2, 1])

  def test_a_lost_worker_ends_mode_ps_and_is_named(self):
    job = PlayedJob(self.sync(), workers=2)
    dying = self.say_hello(job, 1)
    in_thread(lambda: job.connect(0).gather(0))
    self.receive(dying, 'welcome')
    dying.close()
    self.assertEqual(job.coordinator.wait(), 3)
    job.processes[0].wait_for(lambda p: p.ended == 3)
    line = r'worker 1 \(process \d+ on host\) was lost: its connection .*\. The job ends; run'
    self.assertRegex(self.said.getvalue(), rf'\[ps 0\] {line}')
    self.assertRegex(self.said.getvalue(), rf'\[worker 0\] {line}')

  def test_a_frozen_worker_is_lost_also_before_the_job_has_formed(self):
    job = PlayedJob(self.sync(lost_peer_seconds=1, stalled_peer_seconds=3), workers=2)
    frozen = self.say_hello(job, 1)
    self.assertEqual(job.coordinator.wait(), 3)
    # Worker 0 is missing for as long as worker 1 is silent: either is told.
    self.assertRegex(
      self.said.getvalue(),
      r'worker 1 \(process .*\) was lost: it was silent for 1 s|worker 0 did not come within 1 s',
    )
    frozen.close()

  def test_a_worker_without_progress_is_lost(self):
    job = PlayedJob(self.sync(stalled_peer_seconds=50), workers=2)
    active, idle = (self.say_hello(job, i) for i in range(2))
    self.receive(idle, 'welcome')
    self.send(active, 'beat', 49)
    self.send(idle, 'beat', 51)
    self.assertEqual(job.coordinator.wait(), 3)
    text, status = self.receive(active, 'end')
    self.assertEqual(status, 3)
    self.assertRegex(
      text, r'^worker 1 .* lost: it beats but has made no progress for 51 s\. The job'
    )

  def test_a_lost_coordinator_ends_a_worker(self):
    listener_side = []
    secret = b'secret'
    listener = messages.Listener('127.0.0.1', None, secret, PATIENCE, listener_side.append)
    job = PlayedJob(self.sync(), workers=1)
    client = in_thread(
      lambda: CoordinatorClient(
        membership.connect(listener.address, secret, 1),
        job.cluster('worker', 0),
        self.sync(lost_peer_seconds=1),
        SETTINGS,
        job.processes[0],
      )
    )
    job.processes[0].wait_for(lambda p: p.ended == 3)  # it accepted, and is silent since
    self.assertRegex(self.said.getvalue(), r'ps 0 was lost: it was silent for 1 s')
    self.assertFalse(client.done())

  def test_all_go_back_to_the_checkpoint_where_a_request_was_refused(self):
    refused = tf.errors.AbortedError(None, None, 'of whatever reason')
    for mode in ('ps', 'ps_async'):
      job = PlayedJob(self.sync(mode, lost_peer_seconds=600), workers=2)
      in_thread(lambda job=job: job.connect(0).gather(0))
      in_thread(lambda job=job: job.connect(1).end_by(refused))
      for process in job.processes:
        process.wait_for(lambda p: p.restarts == 1)
      self.assertEqual(job.run(*[lambda client: client.generation] * 2), [2, 2])

  def test_the_others_go_on_without_a_worker_that_was_lost_between_passes(self):
    """They are waited for while they beat, though they take longer than a silence may last."""
    job = PlayedJob(self.sync('ps_async', lost_peer_seconds=2), workers=3)
    lost, slow, dying = (self.say_hello(job, i) for i in range(3))
    for connection in (lost, slow, dying):
      self.receive(connection, 'welcome')
    lost.close()
    (text,) = self.receive(slow, 'restart')
    self.assertRegex(text, r'^worker 0 .* was lost: .*The others go on from the last checkpoint')
    self.receive(dying, 'restart')
    dying.close()  # on its way back
    for _ in range(15):  # more than lost_peer_seconds
      self.receive(slow, 'beat')
      self.send(slow, 'beat', 0.0)
    self.send(slow, 'meet', 'gather', 1)  # of the old program; nobody waits for it
    self.hello(slow, 1)
    self.assertEqual(self.receive(slow, 'welcome'), [2, 0, 1, False])
    self.send(slow, 'bye', 0)
    self.assertEqual(job.coordinator.wait(), 0)

  def test_a_worker_that_hangs_while_it_restarts_is_lost(self):
    job = PlayedJob(self.sync('ps_async', stalled_peer_seconds=50), workers=3)
    lost, hanging, healthy = (self.say_hello(job, i) for i in range(3))
    self.receive(healthy, 'welcome')
    lost.close()
    self.receive(healthy, 'restart')
    self.hello(healthy, 2)
    self.send(healthy, 'beat', 60.0)  # it waits
    self.send(hanging, 'beat', 51.0)
    text, status = self.receive(hanging, 'end')
    self.assertEqual(status, 3)
    self.assertRegex(text, r'^worker 1 .* lost: it beats but has made no progress for 51 s\. This')
    self.assertEqual(self.receive(healthy, 'welcome'), [2, 0, 1, False])

  def test_a_process_that_was_only_silent_ends_once_it_goes_on(self):
    job = PlayedJob(self.sync('ps_async', lost_peer_seconds=1), workers=2)
    silent = self.say_hello(job, 1)
    in_thread(lambda: job.connect(0))
    text, status = self.receive(silent, 'end')
    self.assertEqual(status, 3)
    self.assertRegex(
      text, r'worker 1 .* was lost: it was silent for 1 s\. This process ends; it may'
    )

  def test_a_stop_while_the_job_forms_again_is_the_end(self):
    job = PlayedJob(self.sync('ps_async'), workers=2)
    lost, other = (self.say_hello(job, i) for i in range(2))
    self.receive(other, 'welcome')
    lost.close()
    self.receive(other, 'restart')
    job.coordinator.stop(signal.SIGTERM)
    self.assertEqual(self.receive(other, 'end')[1], 143)
    self.assertEqual(job.coordinator.wait(), 143)

  def test_a_stop_of_a_server_is_one_of_the_workers(self):
    job = PlayedJob(self.sync(), workers=2, servers=2)
    server = in_thread(lambda: job.connect(1, 'ps'))
    workers = [in_thread(lambda i=i: job.connect(i)) for i in range(2)]
    server.result(PATIENCE).stop(signal.SIGINT)
    for process in job.processes:
      process.wait_for(lambda p: p.stops == [signal.SIGINT])
    job.coordinator.stop(signal.SIGTERM)
    for process in job.processes:
      process.wait_for(lambda p: p.stops == [signal.SIGINT, signal.SIGTERM])
    for worker in workers:
      worker.result(PATIENCE).bye(143)
    self.assertEqual(job.coordinator.wait(), 143)
    self.assertEqual(server.result(PATIENCE).wait(), 143)

  def test_a_stop_before_the_training_is_the_end(self):
    job = PlayedJob(self.sync(), workers=2)
    in_thread(lambda: job.connect(0).gather(0))
    in_thread(lambda: job.connect(1).end('asked to stop', 143))
    self.assertEqual(job.coordinator.wait(), 143)
    for process in job.processes:
      process.wait_for(lambda p: p.ended == 143)
    self.assertNotIn('failed', self.said.getvalue())

  def test_a_stop_without_workers_is_the_end(self):
    job = PlayedJob(self.sync(), workers=1)
    job.coordinator.stop(signal.SIGTERM)
    self.assertEqual(job.coordinator.wait(), 143)

  def test_processes_must_be_told_the_same(self):
    job = PlayedJob(self.sync(), workers=2)
    in_thread(lambda: job.connect(0))
    in_thread(lambda: job.connect(1, settings={'a': 2}))
    self.assertEqual(job.coordinator.wait(), 2)
    job.processes[1].wait_for(lambda p: p.ended == 2)
    self.assertIn(
      'error: a: found 2 on worker 1 and 1 on ps 0; wanted the same command on every process\n',
      self.said.getvalue(),
    )

  def test_a_late_process_with_another_command_ends_alone(self):
    job = PlayedJob(self.sync('ps_async'), workers=2)
    dying = self.say_hello(job, 1)
    client = in_thread(lambda: job.connect(0)).result(PATIENCE)
    in_thread(lambda: job.connect(1, settings={'a': 2}))
    job.processes[1].wait_for(lambda p: p.ended == 2)
    self.send(dying, 'bye', 0)
    client.bye(0)
    self.assertEqual(job.coordinator.wait(), 0)

  def test_a_mistake_is_told_once_and_everywhere(self):
    job = PlayedJob(self.sync(), workers=2)
    in_thread(lambda: job.connect(0).gather(0))
    in_thread(lambda: job.connect(1).end('data.train: found nothing', 2))
    self.assertEqual(job.coordinator.wait(), 2)
    for process in job.processes:
      process.wait_for(lambda p: p.ended == 2)
    lines = [line for line in self.said.getvalue().splitlines() if 'waiting for' not in line]
    self.assertEqual(lines, ['error: data.train: found nothing'] * 3)

  def test_workers_that_do_not_call_the_same_end_the_job(self):
    job = PlayedJob(self.sync(), workers=2)
    in_thread(lambda: job.connect(0).gather(0))
    in_thread(lambda: job.connect(1).sum_arrays({}))
    self.assertEqual(job.coordinator.wait(), 1)
    self.assertIn('call different collectives: worker 0 gather, worker 1 sum', self.said.getvalue())

  def test_strangers_do_not_end_the_job(self):
    job = PlayedJob(self.sync(lost_peer_seconds=2), workers=1)
    host, port = job.coordinator.address
    self.assertEqual(host, '127.0.0.1')
    silent = socket.create_connection((host, port))
    for said in (b'', b'GET / HTTP/1.0\r\n\r\n', bytes(1000)):
      with socket.create_connection((host, port)) as stranger:
        stranger.sendall(said)
    with self.assertRaisesRegex(ConnectionError, 'no authentication'):
      messages.connect(job.coordinator.address, b'another secret', 5)
    # One who knows the secret and then says nothing, or nothing that is known.
    known = messages.connect(job.coordinator.address, job.coordinator.secret, 5)
    self.send(known, 'fail', 'I am nobody', 1)
    self.assertEqual(job.run(lambda client: client.gather(7)), [[7]])
    silent.settimeout(PATIENCE)
    while silent.recv(1000):
      pass  # until it is dropped
    silent.close()

  def test_a_process_of_another_version_is_left_alone_until_it_said_hello(self):
    job = PlayedJob(self.sync(), workers=1)
    known = messages.connect(job.coordinator.address, job.coordinator.secret, 5)
    self.send(known, 'hello', 'worker', 7, 'process 1 on host', SETTINGS)
    for said in (['hello', 'worker', 0], [1], 'hello', ['greet']):
      other = messages.connect(job.coordinator.address, job.coordinator.secret, 5)
      other.send_bytes(messages.encode(said))
    self.assertEqual(job.run(lambda client: client.gather(7)), [[7]])
    self.assertNotIn('Traceback', self.said.getvalue())

  def test_a_worker_that_says_what_no_worker_says_is_lost(self):
    job = PlayedJob(self.sync(), workers=1)
    self.send(self.say_hello(job, 0), 'greet')
    self.assertEqual(job.coordinator.wait(), 3)
    self.assertRegex(
      self.said.getvalue(), r'worker 0 \(.*\) was lost: it sent .*greet.*which no process of this'
    )

  def test_what_a_worker_does_not_understand_ends_it(self):
    for said, status, told in (
      (['reply'], 3, 'not understood: TypeError'),
      (['greet'], 3, 'it sent .*greet'),
      (['finish', 0], 0, 'the other workers have finished'),  # though this one has not
    ):
      listener = messages.Listener(
        '127.0.0.1',
        None,
        b'secret',
        PATIENCE,
        lambda connection, said=said: connection.send_bytes(messages.encode(said)),
      )
      job = PlayedJob(self.sync(), workers=1)
      cluster, process = job.cluster('worker', 0), job.processes[0]
      in_thread(
        lambda a=listener.address, c=cluster, p=process: CoordinatorClient(
          membership.connect(a, b'secret', PATIENCE), c, self.sync(), SETTINGS, p
        )
      )
      process.wait_for(lambda p, status=status: p.ended == status)
      self.assertRegex(self.said.getvalue(), told)

  def test_listens_at_the_ports_of_the_config(self):
    sync = self.sync(ports=(21200, 21300))
    ports = [PlayedJob(sync, workers=1).coordinator.address[1] for _ in range(2)]
    self.assertLen(set(ports), 2)
    for port in ports:
      self.assertBetween(port, 21200, 21300)


if __name__ == '__main__':
  tf.test.main()
