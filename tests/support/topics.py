"""A cluster of Kafka in this process, as librdkafka has for tests, and messages to it."""

import json
import time
from collections.abc import Iterable, Mapping
from typing import Any

import confluent_kafka
import numpy as np
import tensorflow as tf


class Cluster:
  """Answers on the loopback until it is closed; a topic has 4 partitions once it has a message.

  A partition keeps some 5 MB.
  """

  def __init__(self):
    self._producer = confluent_kafka.Producer(
      {'test.mock.num.brokers': 1, 'bootstrap.servers': 'mock', 'log_level': 0}
    )
    found = self._producer.list_topics(timeout=30).brokers.values()
    self.brokers = ','.join(f'{broker.host}:{broker.port}' for broker in found)

  def send(
    self,
    topic: str,
    values: Iterable[bytes | None],
    partition: int | None = None,
    times: Iterable[int] | None = None,
  ) -> None:
    """Sends messages, in turn to partitions 0 to 3 or to one; `times` are ms since 1970."""
    times = iter(times) if times is not None else None
    for i, value in enumerate(values):
      at = i % 4 if partition is None else partition
      moment = round(time.time() * 1000) if times is None else next(times)
      self._producer.produce(topic, value, partition=at, timestamp=moment)
      if i % 10_000 == 9_999:
        self._producer.flush(30)
    if left := self._producer.flush(30):
      raise AssertionError(f'{left} messages were not sent')

  def close(self) -> None:
    self._producer = None


class ClusterTest(tf.test.TestCase):
  """A test of one cluster, `cluster`, for all its methods."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.cluster = Cluster()

  @classmethod
  def tearDownClass(cls):
    cls.cluster.close()
    super().tearDownClass()


def records(count: int, seed: int = 0) -> list[dict[str, Any]]:
  """Returns made-up impressions with the columns user, item, price and click."""
  rng = np.random.default_rng(seed)
  users, items = rng.integers(200, size=count), rng.integers(50, size=count)
  clicks = rng.random(count) < 0.1 + 0.5 * (users % 3 == items % 3)
  return [
    {'user': f'u{u}', 'item': f'i{i}', 'price': round(float(p), 3), 'click': int(c)}
    for u, i, p, c in zip(users, items, rng.random(count), clicks)
  ]


def as_json(record: Mapping[str, Any]) -> bytes:
  return json.dumps(record).encode()
