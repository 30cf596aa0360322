"""Messages and the connections that carry them, between threads of one process."""

import contextlib
import itertools
import queue
import socket
import struct
import threading
from unittest import mock

import numpy as np
import psutil
import tensorflow as tf

from trainer.comm import door, messages
from trainer.errors import UserError

SECRET = b'of this job'
# Not every container has one.
IPV6_LOOPBACK = [
  address.address
  for addresses in psutil.net_if_addrs().values()
  for address in addresses
  if address.address == '::1'
]


class EncodingTest(tf.test.TestCase):
  def test_plain_data_arrives_as_it_was(self):
    value = {
      'none': None,
      'numbers': [1, -(2**70), 0.1, float('inf'), True],
      'text': 'grün',
      'nested': [{'a': []}, {}],
      'scalar': np.float64(0.1),
    }
    decoded = messages.decode(messages.encode(value))
    self.assertEqual(decoded, value)
    self.assertIsInstance(decoded['numbers'][4], bool)
    self.assertEqual(messages.decode(messages.encode((1, (2,)))), [1, [2]])

  def test_arrays_keep_dtype_shape_and_values(self):
    rng = np.random.default_rng(0)
    arrays = [
      rng.standard_normal([3, 4]).astype(np.float32)[:, ::2],
      np.array(2**62, np.int64),
      np.zeros([0, 7], np.float64),
      np.array([True, False]),
      np.array(['a', 'bcd']),
      np.array([b'x\0y'], dtype='S4'),
    ]
    for found, wanted in zip(messages.decode(messages.encode(arrays)), arrays):
      self.assertEqual((found.dtype, found.shape), (wanted.dtype, wanted.shape))
      np.testing.assert_array_equal(found, wanted)

  def test_bytes_after_a_message_do_not_matter(self):
    data = messages.encode([np.arange(3)])
    self.assertAllEqual(messages.decode(data + b'\0' * 40)[0], [0, 1, 2])

  def test_refuses_what_is_not_plain_data(self):
    for value in (object(), {1: 2}, b'bytes', {'__array__': 1}, [np.array([object()])], {1, 2}):
      with self.assertRaisesRegex(TypeError, 'wanted plain data'):
        messages.encode(value)

  def test_refuses_what_is_no_message(self):
    data = messages.encode({'a': np.arange(5)})
    longer = struct.pack('!QI', len(data) + 8, struct.unpack_from('!QI', data)[1]) + data[12:]
    framed = [
      struct.pack('!QI', 12 + len(text), len(text)) + text
      for text in (
        b'{"__array__": 1}',
        b'{"__array__": ["O", [0]]}',
        b'{"__array__": ["<f4", [-1]]}',
        b'{"__array__": ["<f4", [1e9]]}',
        b'{"__array__": ["(", [0]]}',
        b'[' * 100_000,
      )
    ]
    for broken in (b'', data[:7], data[:-1], longer + b'\0' * 8, b'\xff' * 64, *framed):
      with self.assertRaises(ValueError):
        messages.decode(broken)


class ConnectionTest(tf.test.TestCase):
  def listen(self, host=None, ports=None, lost_seconds=20.0):
    """A Listener, and the queue of connections that it let in."""
    arrived = queue.SimpleQueue()
    return messages.Listener(host, ports, SECRET, lost_seconds, arrived.put), arrived

  def pair(self, host=None, lost_seconds=20.0):
    listener, arrived = self.listen(host, lost_seconds=lost_seconds)
    return messages.connect(listener.address, SECRET, lost_seconds), arrived.get(timeout=20)

  def test_messages_arrive_in_order_over_every_kind_of_address(self):
    for host in (None, '127.0.0.1', *IPV6_LOOPBACK):
      ends = [messages.MessageConnection(c, 20, lambda: ['beat']) for c in self.pair(host)]
      sent = [['turn', i, np.full([200_000], i)] for i in range(3)]
      for one, other in (ends, ends[::-1]):
        for message in sent:
          one.send(message)
        received = (m for m in iter(other.receive, None) if m != ['beat'])
        for found, wanted in zip(itertools.islice(received, 3), sent):
          self.assertEqual(found[:2], wanted[:2])
          self.assertAllEqual(found[2], wanted[2])

  def test_a_side_beats_while_it_has_nothing_to_say(self):
    count = iter(range(100))
    one, other = self.pair(lost_seconds=1.0)
    sender = messages.MessageConnection(one, 1.0, lambda: ['beat', next(count)])
    receiver = messages.MessageConnection(other, 1.0, lambda: None)
    # More beats than one silence is long.
    self.assertEqual([receiver.receive() for _ in range(15)], [['beat', i] for i in range(15)])
    sender.close()

  def test_silence_is_a_loss(self):
    silent, other = self.pair(lost_seconds=1.0)
    receiver = messages.MessageConnection(other, 1.0, lambda: None)
    with self.assertRaisesRegex(ConnectionError, '^it was silent for 1 s'):
      receiver.receive()
    silent.close()

  def test_a_message_that_stops_in_the_middle_is_a_loss(self):
    one, other = self.pair(lost_seconds=0.5)
    with socket.socket(fileno=one.fileno()) as raw:
      raw.sendall(struct.pack('!i', 100) + b'x')
      receiver = messages.MessageConnection(other, 0.5, lambda: None)
      with self.assertRaisesRegex(ConnectionError, '^it was silent'):
        receiver.receive()
      raw.detach()

  def test_says_how_the_other_side_ended(self):
    one, other = self.pair()
    one = messages.MessageConnection(one, 20, lambda: ['beat'])
    one.send(['last words'])
    one.close()
    other = messages.MessageConnection(other, 20, lambda: ['beat'])
    self.assertEqual([other.receive(), other.receive()], [['beat'], ['last words']])
    with self.assertRaisesRegex(ConnectionError, '^its connection closed: the process has ended'):
      other.receive()

  def test_rubbish_from_the_other_side_is_a_loss(self):
    one, other = self.pair()
    one.send_bytes(b'no message')
    with self.assertRaisesRegex(ConnectionError, '^it sent .* no message: found a message of'):
      messages.MessageConnection(other, 20, lambda: None).receive()

  def test_strangers_are_dropped_and_delay_nobody(self):
    listener, arrived = self.listen('127.0.0.1', lost_seconds=20)
    address = tuple(listener.address)
    silent = socket.create_connection(address)  # waits until the end of this test
    socket.create_connection(address).close()
    for rubbish in (
      b'GET / HTTP/1.1\r\n\r\n',
      b'\0' * 1000,
      b'\xff' * 1000,
      b'\0\0\0\x10' + b'x' * 16,
    ):
      with socket.create_connection(address) as stranger:
        stranger.settimeout(20)
        stranger.sendall(rubbish)
        try:
          while stranger.recv(1000):
            pass  # the challenge, then the end
        except ConnectionResetError:
          pass
    with self.assertRaisesRegex(ConnectionError, 'no authentication by a process of this job'):
      messages.connect(listener.address, b'another secret', 20)
    known = messages.connect(listener.address, SECRET, 20)
    let_in = arrived.get(timeout=20)
    known.send_bytes(b'hello')
    self.assertEqual(let_in.recv_bytes(), b'hello')
    self.assertTrue(arrived.empty())
    silent.close()

  def test_a_silent_stranger_is_dropped_in_bounded_time(self):
    listener, arrived = self.listen('127.0.0.1', lost_seconds=0.5)
    with socket.create_connection(tuple(listener.address)) as stranger:
      stranger.settimeout(20)
      while stranger.recv(1000):
        pass  # the challenge, then the end
    # One who sends a byte now and then is dropped too.
    with socket.create_connection(tuple(listener.address)) as stranger:
      stranger.settimeout(0.2)
      stranger.sendall(b'\0\0\0\x64')
      ended = False
      for _ in range(100):
        try:
          ended = ended or not stranger.recv(1000)
          stranger.sendall(b'x')
        except TimeoutError:
          stranger.sendall(b'x')
        except OSError:
          ended = True
        if ended:
          break
    self.assertTrue(ended)
    self.assertTrue(arrived.empty())

  def test_few_strangers_are_met_at_a_time_and_keep_nobody_out(self):
    lock, met, most = threading.Lock(), [0, 0], 0
    authenticated = messages._authenticated

    def counted(*args):
      nonlocal most
      with lock:
        met[0] += 1
        most = max(most, met[0] - met[1])
      try:
        return authenticated(*args)
      finally:
        with lock:
          met[1] += 1

    listener, arrived = self.listen('127.0.0.1', lost_seconds=2)
    with (
      mock.patch.object(door, '_MOST', 3),
      mock.patch.object(messages, '_authenticated', counted),
      contextlib.ExitStack() as stack,
    ):
      for _ in range(30):
        stack.enter_context(socket.create_connection(tuple(listener.address)))
      known = messages.connect(listener.address, SECRET, 20)
      let_in = arrived.get(timeout=20)
      known.send_bytes(b'hello')
      self.assertEqual(let_in.recv_bytes(), b'hello')
    self.assertLess(most, 15)  # this side's, and those that are about to leave

  def test_whoever_listens_but_does_not_greet_is_left_in_bounded_time(self):
    with socket.create_server(('127.0.0.1', 0)) as silent:
      with self.assertRaisesRegex(ConnectionError, 'no authentication by a process of this job'):
        messages.connect(list(silent.getsockname()), SECRET, 0.5)
      port = silent.getsockname()[1]
    with self.assertRaisesRegex(ConnectionError, 'Connection refused'):
      messages.connect(['127.0.0.1', port], SECRET, 5)

  def test_ports_of_a_range(self):
    with socket.create_server(('127.0.0.1', 0)) as taken:
      first = taken.getsockname()[1]
      message = rf'sync.ports: found \[{first}, {first}\], .*127.0.0.1.*Address already in use'
      with self.assertRaisesRegex(UserError, message):
        self.listen('127.0.0.1', [first, first])
      listener, _ = self.listen('127.0.0.1', [first, min(first + 50, 65535)])
      self.assertBetween(listener.address[1], first + 1, first + 50)

  def test_many_connect_at_once(self):
    listener, arrived = self.listen('127.0.0.1')
    threads = [
      threading.Thread(
        target=lambda r=r: messages.connect(listener.address, SECRET, 20).send_bytes(bytes([r]))
      )
      for r in range(50)
    ]
    for thread in threads:
      thread.start()
    found = {arrived.get(timeout=20).recv_bytes()[0] for _ in threads}
    for thread in threads:
      thread.join()
    self.assertEqual(found, set(range(50)))


if __name__ == '__main__':
  tf.test.main()
