"""Writes the rows of each version into a compacted topic of Kafka, for whoever keeps a copy.

The key of a message is that of a row, 8 bytes, big-endian. Its value is the row as versioned_store
encodes it, or null if the row is gone. Behind its last row, a version has a marker in each
partition, whose key is `ctr:version` and whose value is the Version as JSON. A reader of a
partition collects messages up to the next marker, and then applies them. A publisher that was
killed before it wrote the markers writes the version again.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import confluent_kafka

from trainer import config
from trainer.data.spans import Span
from trainer.errors import UserError, fit_to_print
from trainer.serving.versioned_store import Overtaken, Version, VersionedStore, View, encode
from trainer.storage.chain import RowExport
from trainer.topics.topic import Topic, client_settings, plain_kafka, raise_error

MARKER = b'ctr:version'
_LEAST_BACK = 1000  # messages in which the last marker is looked for first
_SECONDS_TO_SEND = 300


class TopicStore(VersionedStore):
  """Keeps the rows of a version in a topic, kafka://BROKERS/TOPIC, that nothing else writes.

  `settings` are of librdkafka; @FILE stands for what that file holds.
  """

  def __init__(self, address: str, settings: Mapping[str, Any]):
    brokers, _, name = address.partition('://')[2].partition('/')
    self._what, self._name = f'the store {fit_to_print(address)}', name
    self._topic = Topic(config.Topic(brokers=brokers, topic=name, config=dict(settings)))
    with plain_kafka(self._what):
      ours = {'enable.idempotence': True, 'linger.ms': 50, 'compression.type': 'lz4'}
      ours['on_delivery'] = self._check_sent
      self._producer = confluent_kafka.Producer(client_settings(brokers, settings) | ours)
    self._version: Version | None = None

  def version(self) -> Version | None:
    self._version = self._version or self._newest()
    return self._version

  def _newest(self) -> Version | None:
    """Returns the version whose markers all partitions have, if any."""
    versions = []
    for partition, span in (bounds := self._topic.bounds()).items():
      back, marker = _LEAST_BACK, None
      while marker is None and back < 2 * (span.end - span.start + _LEAST_BACK):
        for key, value in self._read(partition, Span(max(span.start, span.end - back), span.end)):
          marker = value if key == MARKER else marker
        back *= 8
      versions.append(json.loads(marker) if marker else None)
    if None in versions or not versions:
      return None
    fields = min(versions, key=lambda version: version['done_at'])
    if (partitions := fields.pop('partitions')) != len(bounds):
      found = f'has {len(bounds)} partitions and had {partitions}: keys would lie in two of them'
      raise UserError(f'{self._what}: {found}; wanted a new topic')
    return Version(**fields)

  def _read(self, partition: str, span: Span) -> Iterator[tuple[bytes, bytes | None]]:
    for messages in self._topic.messages(partition, span):
      yield from ((message.key(), message.value()) for message in messages)

  def _apply(self, exports: Sequence[RowExport], expected: Version | None, new: Version) -> None:
    self._version = self._newest()
    if self._version != expected:
      raise Overtaken
    if not (bounds := self._topic.bounds()):
      self._producer.produce(self._name, None, b'')  # makes the topic, where the cluster lets it
      self._flush()
      if not (bounds := self._topic.bounds()):
        raise UserError(f'{self._what}: no such topic; wanted one with cleanup.policy=compact')
    old: set[bytes] = set()
    if exports[0].begins_chain:  # it replaces all rows that there are
      for partition, span in bounds.items():
        for key, value in self._read(partition, span):
          if key and key != MARKER:
            (old.discard if value is None else old.add)(key)
    for export in exports:
      for key in export.tombstones().astype('>i8').view('V8').tolist():
        self._send(key, None, len(bounds))
      for rows in export.rows():
        for key, value in zip(rows.key.astype('>i8').view('V8').tolist(), encode(rows)):
          self._send(key, value, len(bounds))
          old.discard(key)
    for key in old:
      self._send(key, None, len(bounds))
    self._flush()
    marker = json.dumps(new._asdict() | {'partitions': len(bounds)}, sort_keys=True)
    for partition in bounds:
      self._producer.produce(self._name, marker, MARKER, int(partition))
    self._flush()
    self._version = new

  def _send(self, key: bytes, value: bytes | None, partitions: int) -> None:
    """Sends a message to the partition of its key."""
    partition = int.from_bytes(key, 'big') % partitions
    while True:
      try:
        return self._producer.produce(self._name, value, key, partition)
      except BufferError:  # too many messages wait to be sent
        self._producer.poll(0.1)

  def _check_sent(self, error: Any, _: Any) -> None:
    if error is not None:  # `poll` and `flush` raise what this raises
      raise_error(self._what, error)

  def _flush(self) -> None:
    for _ in range(_SECONDS_TO_SEND):
      if not (left := self._producer.flush(1)):  # a signal is heeded after each
        return
    raise UserError(f'{self._what}: {left:,} messages were not taken')

  def view(self) -> View | None:
    raise UserError(f'{self._what}: a topic is read by a copy of it; wanted a directory or Redis')

  def close(self) -> None:
    self._topic.close()
