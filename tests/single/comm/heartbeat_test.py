"""How a rank ends when it has lost another one, or hears what no rank says."""

import contextlib
import errno
import io
import json
import os
import queue
import threading
import urllib.request
from unittest import mock

import tensorflow as tf
from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousServer

from ops.build import NotBuilt
from tests.support.steps import make_config
from trainer.comm import messages
from trainer.comm.heartbeat import Heartbeat
from trainer.errors import UserError, one_line
from trainer.runtime import Runtime

SECRET = b'of this job alone'
PATIENCE = 60  # seconds that a test waits for what must come


class HeartbeatTest(tf.test.TestCase):
  def begin(self, lost_seconds=20.0):
    """Begins the heartbeat of rank 0, to which this test is rank 1."""
    store = RendezvousServer()
    url = f'http://127.0.0.1:{store.start()}'
    self.addCleanup(store.stop)
    store.init(get_host_assignments(parse_hosts('localhost:2'), 2))
    self.said = self.enter_context(contextlib.redirect_stderr(io.StringIO()))
    self.statuses = queue.SimpleQueue()

    def end(status):
      self.statuses.put(status)
      if threading.current_thread() is threading.main_thread():
        raise SystemExit
      threading.Event().wait()  # this thread does nothing more

    self.enter_context(mock.patch('os._exit', end))
    self.heartbeat = Heartbeat(
      Runtime(0, 2, 0, 2, None, url, SECRET), make_config({'sync.lost_peer_seconds': lost_seconds})
    )
    with urllib.request.urlopen(f'{url}/ctr_trainer/heartbeat') as response:
      record = json.load(response)
    self.rank_1 = messages.connect(record['address'], SECRET, PATIENCE)

  def say(self, message):
    self.rank_1.send_bytes(messages.encode(message))

  def fail(self, error):
    """Raises an error in rank 0 once rank 1 has come. Returns: the status, and what was said."""
    self.begin()
    self.say(['hello', 1, 'rank 1'])
    self.rank_1.recv_bytes()  # a beat
    with self.assertRaises(SystemExit), mock.patch('trainer.comm.heartbeat.time.sleep'):
      with self.heartbeat:
        raise error
    return self.statuses.get(timeout=PATIENCE), self.said.getvalue()

  def test_whoever_lost_a_peer_prints_no_stack_trace(self):
    for error in (
      tf.errors.AbortedError(None, None, 'rank 1 is gone: its connection ended'),
      ConnectionError('rank 0 cannot reach rank 1'),
    ):
      status, said = self.fail(error)
      self.assertEqual(status, 3, said)
      self.assertIn(one_line(error), said)
      self.assertNotIn('Traceback', said)

  def test_a_mistake_is_one_line(self):
    for error in (UserError('data.train: found nothing'), NotBuilt('run `python -m ops.build`')):
      self.assertEqual(self.fail(error), (2, f'error: {error}\n'))

  def test_a_machine_without_descriptors_is_no_mistake(self):
    for make in UserError, OSError:
      status, said = self.fail(make(f'owner.json: {os.strerror(errno.EMFILE)}'))
      self.assertEqual(status, 3)
      self.assertNotIn('Traceback', said)

  def test_a_fault_of_our_own_prints_one(self):
    status, said = self.fail(KeyError('x'))
    self.assertEqual(status, 1)
    self.assertIn('Traceback', said)

  def test_what_no_rank_says_is_a_loss(self):
    for said in ([1], ['greet'], ['beat'], ['beat', 'x'], ['end', 1, 2], {'hello': 1}):
      self.begin()
      self.say(['hello', 1, 'rank 1'])
      self.say(said)
      self.assertEqual(self.statuses.get(timeout=PATIENCE), 3)
      told = r'(?m)^[-\d]{10} [:\d]{8} rank 1 was lost: it sent .* no process of this'
      self.assertRegex(self.said.getvalue(), told)

  def test_a_rank_that_says_no_hello_never_came(self):
    for said in (['hello', 2, 'rank 2'], ['hello', 'x', 'y'], [], 3):
      self.begin(lost_seconds=1.0)
      self.say(said)
      self.assertEqual(self.statuses.get(timeout=PATIENCE), 3)
      self.assertIn(' rank 1 was lost: it did not start within 1 s', self.said.getvalue())


if __name__ == '__main__':
  tf.test.main()
