"""What processes of a server share."""

import socket
from unittest import mock

import tensorflow as tf

from trainer.serving import processes


class ListenerTest(tf.test.TestCase):
  def test_a_port_that_is_held_for_a_moment(self):
    holder = socket.create_server(('127.0.0.1', 0))
    port = holder.getsockname()[1]
    with mock.patch.object(processes.time, 'sleep', lambda _: holder.close()):
      with processes.listener('127.0.0.1', port) as found:
        self.assertEqual(found.getsockname()[1], port)

  def test_a_port_that_stays_taken_is_refused(self):
    with socket.create_server(('127.0.0.1', 0)) as holder:
      with mock.patch.object(processes, '_SECONDS_TO_BIND', 0), self.assertRaises(OSError):
        processes.listener('127.0.0.1', holder.getsockname()[1])


if __name__ == '__main__':
  tf.test.main()
