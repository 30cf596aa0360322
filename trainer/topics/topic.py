"""Topics of Kafka: the spans of messages that are passes, and how they are read.

Nobody subscribes: the run itself says which messages it reads, and keeps the offsets of the next
ones in its checkpoints. Offsets are committed to the cluster only for those who monitor it.
"""

import contextlib
import functools
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from trainer import config, files
from trainer.data.block import Block
from trainer.data.conversion import Parts, reader
from trainer.data.file_system import attempts_end
from trainer.data.spans import Span, Spans
from trainer.errors import BadPass, Stopped, UserError

try:
  import confluent_kafka
except ModuleNotFoundError as e:
  wanted = "pip install 'ctr-trainer[kafka]'"
  raise UserError(f"data.topic: needs the package '{e.name}'; wanted {wanted}") from None

GROUP = 'ctr-train'  # under which offsets are committed, unless data.topic.config has group.id
SECONDS_TO_ANSWER = 5.0
DAY_MS = 24 * 3600 * 1000
_BLOCK_MESSAGES, _BLOCK_BYTES = 1 << 16, 8 << 20
_AT_ONCE, _SECONDS_AT_ONCE = 10_000, 0.1
# Errors that waiting does not end, as the client names them.
_REFUSALS = frozenset(
  '_INVALID_ARG _AUTHENTICATION _CONFLICT _NOT_IMPLEMENTED SASL_AUTHENTICATION_FAILED '
  'TOPIC_AUTHORIZATION_FAILED GROUP_AUTHORIZATION_FAILED CLUSTER_AUTHORIZATION_FAILED '
  'TOPIC_EXCEPTION MSG_SIZE_TOO_LARGE'.split()
)


class Away(UserError):
  """The cluster does not answer."""


class Expired(UserError):
  """The cluster has deleted messages that a run wants; `there` is the span that it still has."""

  there: Span


class Known(NamedTuple):
  """A message by which a partition is known again: the last one that was read of it."""

  offset: int
  time: int  # its timestamp, in ms since 1970
  crc32: int  # of its key and value

  @classmethod
  def of(cls, message: confluent_kafka.Message) -> 'Known':
    crc32 = zlib.crc32(message.value() or b'', zlib.crc32(message.key() or b''))
    return cls(message.offset(), message.timestamp()[1], crc32)


def another(topic: str, what: str) -> UserError:
  """Returns the error that a topic is not the one of the run; `what` says how that shows."""
  wanted = 'a new run, which --init_from lets begin with the model of this one'
  return UserError(
    f'topic {topic}, {what}; wanted the topic that the run was trained on, or {wanted}'
  )


def expired(topic: str, partition: str, wanted: int, there: Span) -> UserError:
  """Returns the error that offset `wanted` is not in `there`, the messages of a partition."""
  what = f'partition {partition}: wanted offset {wanted}'
  if wanted > there.end:
    return another(topic, f'{what}, beyond its end {there.end}: the topic was made anew')
  what = f'topic {topic}, {what}'
  error = Expired(f'{what}, which has expired: the oldest there is {there.start}')
  error.there = there
  return error


def client_settings(brokers: str, given: Mapping[str, Any]) -> dict[str, Any]:
  """Returns settings of librdkafka; a text @FILE in `given` becomes the content of that file."""
  return {'bootstrap.servers': brokers, 'log_level': 0} | {
    key: files.secret(value[1:], f'the setting {key}') if str(value).startswith('@') else value
    for key, value in given.items()
  }


def raise_error(what: str, error: confluent_kafka.KafkaError) -> None:
  """Raises the UserError for an error of the client; its message begins with `what`.

  The error is an Away, which may pass, unless the cluster refuses us or a setting is wrong.
  """
  text = f'{what}: {" ".join(error.str().split())}'
  raise UserError(text) if error.name() in _REFUSALS else Away(text)


@contextlib.contextmanager
def plain_kafka(what: str) -> Iterator[None]:
  """Turns errors of the client into Away, or into a UserError that begins with `what`."""
  try:
    yield
  except confluent_kafka.KafkaException as e:
    raise_error(what, e.args[0])


class Topic:
  """A connection to the cluster of data.topic. Only one thread uses it."""

  def __init__(self, topic: config.Topic):
    self.what, self._name = f'data.topic: {topic.topic}', topic.topic
    self._errors: list[confluent_kafka.KafkaError] = []
    with plain_kafka(self.what):
      # Few messages, because those behind a pass are read again with the next one. At the end of a
      # partition a fetch waits for messages, and other questions to the broker wait behind it.
      settings = (
        {'group.id': GROUP, 'queued.min.messages': 20_000, 'fetch.wait.max.ms': 50}
        | client_settings(topic.brokers, topic.config)
        | {
          'enable.auto.commit': False,
          'enable.partition.eof': True,
          'auto.offset.reset': 'error',  # what has expired is told, and not passed over
          'error_cb': self._errors.append,
        }
      )
      self._consumer = confluent_kafka.Consumer(settings)

  def _at(self, partition: str, offset: int = -1001) -> confluent_kafka.TopicPartition:
    return confluent_kafka.TopicPartition(self._name, int(partition), offset)

  def _check_refused(self) -> None:
    for error in self._errors:
      if error.name() in _REFUSALS:
        raise_error(self.what, error)
    self._errors.clear()

  def bounds(self) -> dict[str, Span]:
    """Returns {partition: the span of its messages}; {} if there is no such topic."""
    try:
      with plain_kafka(self.what):
        found = self._consumer.list_topics(self._name, timeout=SECONDS_TO_ANSWER)
        return {p: self._there(p) for p in map(str, sorted(found.topics[self._name].partitions))}
    except Away as e:
      self._consumer.unassign()
      self._consumer.poll(0)  # calls what notes errors; it would also take a message
      why = self._errors[-1].str() if self._errors else 'no answer'
      self._check_refused()
      raise Away(f'{e} ({why})') from None

  def cluster(self) -> str | None:
    """Returns the id of a cluster that has answered; None if it has none."""
    with contextlib.suppress(confluent_kafka.KafkaException):
      return self._consumer.cluster_id(timeout=_SECONDS_AT_ONCE)
    return None

  def _there(self, partition: str) -> Span:
    at = self._at(partition)
    return Span(*self._consumer.get_watermark_offsets(at, timeout=SECONDS_TO_ANSWER, cached=False))

  def commit(self, offsets: Mapping[str, int]) -> None:
    """Tells the cluster the next offsets, for those who monitor it; errors do not matter."""
    with contextlib.suppress(confluent_kafka.KafkaException):
      self._consumer.commit(offsets=[self._at(p, n) for p, n in offsets.items()])

  def times(self, offsets: Mapping[str, int]) -> list[int]:
    """Returns the timestamp of each partition's first message from an offset on, if it comes."""
    left, found = {p: self._at(p, n) for p, n in offsets.items()}, []
    self._consumer.assign([*left.values()])
    end = time.monotonic() + SECONDS_TO_ANSWER
    while left and time.monotonic() < end:
      with plain_kafka(self.what):
        message = self._consumer.poll(_SECONDS_AT_ONCE)
        if message is not None and (at := left.pop(str(message.partition()), None)):
          found += [message.timestamp()[1]] if message.error() is None else []
          self._consumer.incremental_unassign([at])
    self._consumer.unassign()
    return found

  def messages(self, partition: str, span: Span) -> Iterator[list[confluent_kafka.Message]]:
    """Yields the messages of a partition in order, some at a time.

    It raises Away if the cluster does not answer, and Expired if it has deleted the next message.
    """
    place, since = span.start, time.monotonic()
    self._consumer.assign([self._at(partition, place)])
    while place < span.end:
      got, is_there = [], True
      with plain_kafka(self.what):
        messages = self._consumer.consume(min(_AT_ONCE, span.end - place), _SECONDS_AT_ONCE)
      for message in messages:
        if (error := message.error()) is None:
          place = message.offset() + 1
          if place <= span.end:
            got.append(message)
        elif error.name() == '_PARTITION_EOF':
          place = max(place, message.offset())  # the last offsets may have no message
        elif error.name() == '_AUTO_OFFSET_RESET':
          is_there = False
      if got:
        yield got
      if not is_there and place < span.end:
        with plain_kafka(self.what):
          raise expired(self._name, partition, place, self._there(partition))
      if got or place >= span.end:
        since = time.monotonic()
        continue
      self._check_refused()
      if time.monotonic() - since > SECONDS_TO_ANSWER:
        raise Away(f'{self.what}:{partition}:{place}: no answer')
    self._consumer.unassign()  # else `bounds` is answered only after a fetch that waits

  def close(self) -> None:
    self._consumer.close()


def parts(
  data: config.Data,
  spans: Spans,
  wanted: dict[str, str],
  waits: Callable[[], None],
  meta: dict[str, Any],
) -> Parts:
  """Yields the partitions of a pass, and notes in `meta` what was read of them.

  That is `lost`, how many messages had expired (data.topic.on_expired: skip); `late`, how many are
  of a day before that of the pass; `absent`, how many offsets have no message, as in a compacted
  topic; `known`, the last message that was read of each partition; at the end, `cluster`.
  """
  if data.topic is None or data.topic.topic != spans.topic:
    raise BadPass(f'{spans.path}: data.topic is another one now')
  meta |= {'late': 0, 'lost': 0, 'absent': spans.messages, 'known': {}}
  with contextlib.closing(Topic(data.topic)) as client:
    messages = _PassReader(data, spans, waits, meta, client)
    for partition in spans.parts:
      yield f'{spans.topic}:{partition}', messages.blocks(partition, wanted)
    meta['cluster'] = client.cluster()


class _PassReader(NamedTuple):
  """Reads the messages of a pass, and counts them in `meta` as `parts` says."""

  data: config.Data
  spans: Spans
  waits: Callable[[], None]
  meta: dict[str, Any]
  client: Topic

  def blocks(self, partition: str, wanted: dict[str, str]) -> Iterator[Callable[[], Block]]:
    """Yields functions that return the blocks of a partition, in order; lines are offsets."""
    values, offsets, size = [], [], 0
    for messages in self._messages(partition):
      new = [message.value() or b'' for message in messages]
      values += new
      offsets += [message.offset() for message in messages]
      size += sum(map(len, new))
      if len(values) >= _BLOCK_MESSAGES or size >= _BLOCK_BYTES:
        yield functools.partial(self._block, values, offsets, wanted)
        values, offsets, size = [], [], 0
    if values:
      yield functools.partial(self._block, values, offsets, wanted)

  def _block(self, values: list[bytes], offsets: list[int], wanted: dict[str, str]) -> Block:
    """Parses messages to a Block in which the offsets of the messages take the place of lines."""
    block = reader(self.data.topic.format).of_messages(values, self.data, wanted)
    malformed = [bad._replace(line=offsets[bad.line]) for bad in block.malformed]
    return block._replace(lines=np.array(offsets, np.int64)[block.lines], malformed=malformed)

  def _messages(self, partition: str) -> Iterator[list[confluent_kafka.Message]]:
    span, meta, is_away = self.spans.parts[partition], self.meta, False
    while span.start < span.end:
      try:
        for messages in self.client.messages(partition, span):
          if is_away:
            logging.warning('%s: the cluster answers again', self.client.what)
          is_away = False
          span = span._replace(start=messages[-1].offset() + 1)
          meta['absent'] -= len(messages)
          meta['known'][partition] = Known.of(messages[-1])
          yield self._in_time(messages) if self.data.topic.days else messages
        return
      except Away as e:
        if not is_away:
          logging.warning('%s; waiting for it', e)
        is_away = True
        self.waits()
        if attempts_end():
          raise Stopped(f'{self.client.what}: asked to stop while no message came') from None
      except Expired as e:
        if self.data.topic.on_expired == 'fail':
          raise
        start = min(span.end, e.there.start)
        meta['lost'] += start - span.start
        meta['absent'] -= start - span.start
        logging.warning('%s: %s messages are lost', e, f'{start - span.start:,}')
        span = span._replace(start=start)

  def _in_time(self, messages: list[confluent_kafka.Message]) -> list[confluent_kafka.Message]:
    """Returns the messages that data.late lets in; counts those of a day before the pass's."""
    begin, late = self.spans.time // DAY_MS * DAY_MS, self.data.late
    of_before = [message for message in messages if 0 <= message.timestamp()[1] < begin]
    self.meta['late'] += len(of_before)
    if of_before and late == 'fail':
      where = f'{self.spans.topic}:{of_before[0].partition()}:{of_before[0].offset()}'
      raise UserError(f"{where}: its day is over; data.late is 'fail'; wanted train or skip")
    if not of_before or late == 'train':
      return messages
    return [message for message in messages if not 0 <= message.timestamp()[1] < begin]
