"""A topic that has the rows of each version: a copy of it equals the full export."""

import importlib.util
import os
import pathlib
import sys
import tempfile
from unittest import mock

import numpy as np
import tensorflow as tf

from tests.support import topics
from tests.support.exports import Run, events
from trainer.errors import UserError
from trainer.serving.publisher import Publisher
from trainer.serving.stores import open_store
from trainer.topics import topic
from trainer.topics.topic_store import TopicStore
from trainer.wings import wing

EXAMPLE = pathlib.Path(__file__).resolve().parents[3] / 'examples' / 'topic_table.py'


def versions(*args):
  """Yields what examples/topic_table.py does."""
  spec = importlib.util.spec_from_file_location('topic_table', EXAMPLE)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module.versions(*args)


class TopicStoreTest(topics.ClusterTest):
  def setUp(self):
    super().setUp()
    self.run_ = Run(tempfile.mkdtemp(dir=self.get_temp_dir()))
    self.name = self.id().rpartition('.')[2]
    self.address = f'kafka://{self.cluster.brokers}/{self.name}'

  def publish(self):
    store = open_store(self.address, '--to', writable=True)
    try:
      return Publisher(self.run_.directory, store).advance()
    finally:
      store.close()

  def check(self, copy, sequence):
    for version, table in copy:
      if version['sequence'] == sequence:
        found = {key: tuple(row.tolist()) for key, row in table.items()}
        self.assertEqual(found, self.run_.versions[sequence])
        return

  def test_a_copy_equals_every_full_export(self):
    rng, copy = np.random.default_rng(1), None
    for i, kind in enumerate(events(rng, 12)):
      self.run_.train()
      sequence = self.run_.export(kind)
      if i and rng.random() < 0.4:  # several at once
        continue
      self.assertEqual(self.publish().version.sequence, sequence)
      self.assertIsNone(self.publish())
      copy = copy or versions(self.cluster.brokers, self.name)
      self.check(copy, sequence)
      self.check(versions(self.cluster.brokers, self.name), sequence)  # one that starts now

  def test_a_publisher_that_is_killed_writes_the_version_again(self):
    self.run_.train()
    self.run_.export('base')
    self.publish()
    copy = versions(self.cluster.brokers, self.name)
    self.check(copy, 1)
    for trial, kind in enumerate(('delta', 'base', 'delta', 'base')):
      self.run_.train()
      sequence = self.run_.export(kind)
      send, left = TopicStore._send, [10 + 40 * trial]

      def dies(store, *args, send=send, left=left):
        left[0] -= 1
        if not left[0]:
          raise KeyboardInterrupt
        send(store, *args)

      with mock.patch.object(TopicStore, '_send', dies), self.assertRaises(KeyboardInterrupt):
        self.publish()
      self.assertEqual(self.publish().version.sequence, sequence)
      self.check(copy, sequence)

  def test_a_publisher_that_was_overtaken_goes_on(self):
    store = open_store(self.address, '--to', writable=True)
    self.addCleanup(store.close)
    first, found = Publisher(self.run_.directory, store), []
    for kind in ('base', 'delta', 'delta'):
      self.run_.train()
      self.run_.export(kind)
      found.append(first.advance() if kind == 'base' else self.publish())
      found.append(first.advance())
    self.assertEqual([a and a.version.sequence for a in found], [1, None, 2, None, 3, None])
    self.run_.train()
    self.run_.export('delta')
    self.assertEqual(first.advance().version.sequence, 4)

  def test_a_cluster_that_is_away_is_told(self):
    with mock.patch('trainer.topics.topic.SECONDS_TO_ANSWER', 0.2):
      with self.assertRaisesRegex(UserError, 'data.topic: x: .*'):
        open_store('kafka://127.0.0.1:1/x', '--to', writable=True).version()

  def test_a_cluster_that_goes_away_while_a_partition_is_read(self):
    self.run_.train()
    self.run_.export('base')
    self.cluster = topics.Cluster()
    self.address = f'kafka://{self.cluster.brokers}/{self.name}'
    self.publish()
    store = open_store(self.address, '--to', writable=True)
    self.addCleanup(store.close)
    publisher, bounds = Publisher(self.run_.directory, store), topic.Topic.bounds

    def goes_away(client):
      found = bounds(client)
      self.cluster.close()
      return found

    briefly = mock.patch.object(topic, 'SECONDS_TO_ANSWER', 1.0)
    with briefly, mock.patch.object(topic, '_AT_ONCE', 0):  # as if no message came
      with self.assertRaisesRegex(topic.Away, f'{self.name}:0:.*: no answer'):
        publisher.advance()
    self.assertIsNone(publisher.advance())  # it has read again: the version is there
    again = open_store(self.address, '--to', writable=True)
    self.addCleanup(again.close)
    with briefly, mock.patch.object(topic.Topic, 'bounds', goes_away):
      with self.assertRaisesRegex(topic.Away, f'{self.name}:0:.*: no answer'):
        Publisher(self.run_.directory, again).advance()

  def test_messages_that_nobody_takes(self):
    self.run_.train()
    self.run_.export('base')
    self.cluster = topics.Cluster()
    few = {'queue.buffering.max.messages': 10, 'message.timeout.ms': 200}
    store = open_store(
      f'kafka://{self.cluster.brokers}/{self.name}', '--to', writable=True, settings=few
    )
    self.addCleanup(store.close)
    self.cluster.send(self.name, [None])  # makes the topic
    send = TopicStore._send

    def goes_away(store, *args):
      self.cluster.close()
      with mock.patch.object(TopicStore, '_send', send):
        while True:
          send(store, *args)

    with mock.patch.object(TopicStore, '_send', goes_away):
      with self.assertRaisesRegex(topic.Away, self.name):
        Publisher(self.run_.directory, store).advance()

  def test_a_package_that_is_missing_is_told(self):
    wanted = r"'confluent_kafka'; wanted pip install 'ctr-trainer\[kafka\]'$"
    with mock.patch.dict(sys.modules, {'confluent_kafka': None}):
      for name in ('topic', 'topic_passes', 'topic_store'):
        sys.modules.pop(f'trainer.topics.{name}', None)
      with self.assertRaisesRegex(UserError, f'--to {self.address}: needs the package {wanted}'):
        open_store(self.address, '--to', writable=True)
      with self.assertRaisesRegex(UserError, f'data.topic: needs the package {wanted}'):
        wing('topic_passes')

  def test_settings_come_from_files(self):
    path = os.path.join(self.get_temp_dir(), 'secret')
    pathlib.Path(path).write_text('geheim\n')
    settings = {'sasl.mechanism': 'PLAIN', 'sasl.password': f'@{path}', 'nonsense': 1}
    with self.assertRaisesRegex(UserError, 'nonsense') as raised:
      open_store(self.address, '--to', writable=True, settings=settings)
    self.assertNotIn('geheim', str(raised.exception))


if __name__ == '__main__':
  tf.test.main()
