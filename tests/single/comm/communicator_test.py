"""The communicators that need no horovodrun keep the contract."""

import os
import socket
from unittest import mock

import numpy as np
import tensorflow as tf

from ops.connections import Connections
from tests.support.communicator_contract import CommunicatorContract, RankCommunicatorContract
from tests.support.parameter_servers import PlayedJob
from tests.support.threads import on_threads
from trainer.comm import connections
from trainer.comm.communicator import SingleProcess
from trainer.comm.connections import Connector
from trainer.config import Sync


class SingleProcessTest(CommunicatorContract, tf.test.TestCase):
  def on_every_rank(self, action):
    action(SingleProcess())


class CoordinatorClientTest(CommunicatorContract, tf.test.TestCase):
  """Workers of a parameter-server job that are threads."""

  in_graphs = False

  def on_every_rank(self, action):
    PlayedJob(Sync(mode='ps', lost_peer_seconds=30), workers=3).run(*[action] * 3)


class ConnectionsTest(RankCommunicatorContract, tf.test.TestCase):
  """Ranks that are threads connect as processes do, by Unix sockets and by TCP."""

  SIZE, in_graphs = 3, False

  def on_every_rank(self, action, host=None, sync=Sync(lost_peer_seconds=30)):
    def rank(communicator):
      communicator.connector = Connector(communicator, host, sync)
      communicator.row_exchange = communicator.connector.connect
      action(communicator)

    for result in on_threads(self.SIZE, rank):
      if isinstance(result, BaseException):
        raise result

  def test_over_tcp_in_a_range_of_ports(self):
    used = []

    def action(communicator):
      used.append(communicator.connector._listener.address)
      (ones,), _ = communicator.row_exchange('ones').all_to_all([tf.ones([9])], [3, 3, 3])
      self.assertAllEqual(ones, np.ones(9))

    # Below the ports that the system gives to outgoing connections, some of which may be taken.
    self.on_every_rank(action, '127.0.0.1', Sync(ports=(21000, 21100), lost_peer_seconds=30))
    self.assertLen({tuple(address) for address in used}, self.SIZE)
    for host, port in used:
      self.assertEqual(host, '127.0.0.1')
      self.assertBetween(port, 21000, 21100)

  def test_a_broken_tcp_link_is_noticed_in_time(self):
    """The system probes a quiet link and gives up one on which nothing is acknowledged."""
    found = []

    def remember(fds, rank):
      for fd in (fd for fd in fds if fd >= 0):
        with socket.socket(fileno=os.dup(fd)) as same:
          option = same.getsockopt
          idle, interval = (
            option(socket.IPPROTO_TCP, o) for o in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL)
          )
          limit = option(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
          found.append((option(socket.SOL_SOCKET, socket.SO_KEEPALIVE), idle, interval, limit))
      return Connections(fds, rank)

    with mock.patch.object(connections, 'Connections', remember):
      connect = lambda communicator: communicator.row_exchange('rows')
      self.on_every_rank(connect, '127.0.0.1', Sync(lost_peer_seconds=30))
    self.assertLen(found, self.SIZE * (self.SIZE - 1))
    self.assertEqual(set(found), {(1, 7, 7, 30_000)})

  def test_a_rank_that_does_not_come_is_named(self):
    def action(communicator):
      if communicator.rank < self.SIZE - 1:
        communicator.row_exchange('where rank 2 is missing')

    with self.assertRaisesRegex(ConnectionError, r'rank 2 did not reach rank [01] .* within 1 s'):
      self.on_every_rank(action, sync=Sync(lost_peer_seconds=1))

  def test_a_rank_without_a_port_is_a_mistake_of_all(self):
    sync = Sync(ports=(21101, 21101))
    errors = on_threads(2, lambda bootstrap: Connector(bootstrap, '127.0.0.1', sync))
    for error in errors:  # one of them has the port
      self.assertRegex(str(error), r'sync.ports: found \[21101, 21101\], .*wanted a range with')


if __name__ == '__main__':
  tf.test.main()
