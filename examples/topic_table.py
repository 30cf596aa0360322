"""Keeps a copy of the table that `ctr-publish --to kafka://BROKERS/TOPIC` writes.

    python -m examples.topic_table BROKERS TOPIC

It prints each version and how many rows it has; `versions` is for programs of your own.
"""

import json
import sys
from collections.abc import Iterator

import confluent_kafka
import numpy as np

Table = dict[int, np.ndarray]  # the linear weight, then the factors, by key


def versions(brokers: str, topic: str) -> Iterator[tuple[dict, Table]]:
  """Yields each version's marker, and the table, which later versions change."""
  settings = {'bootstrap.servers': brokers, 'group.id': 'copy', 'enable.auto.commit': False}
  consumer = confluent_kafka.Consumer(settings | {'auto.offset.reset': 'earliest'})
  partitions = consumer.list_topics(topic, timeout=30).topics[topic].partitions
  consumer.assign([confluent_kafka.TopicPartition(topic, p, 0) for p in partitions])
  table: Table = {}
  waiting = {p: {} for p in partitions}  # by partition, what came since its last marker
  marked = dict.fromkeys(partitions)
  while True:
    message = consumer.poll(1.0)
    if message is None or message.error() or not message.key():
      continue
    p, key, value = message.partition(), message.key(), message.value()
    if key != b'ctr:version':
      waiting[p][int.from_bytes(key, 'big')] = value
      continue
    for row, new in waiting[p].items():
      table.pop(row, None) if new is None else table.update({row: np.frombuffer(new, '<f4')})
    waiting[p], marked[p] = {}, value
    if len(set(marked.values())) == 1:  # all partitions are at one version
      yield json.loads(value), table


if __name__ == '__main__':
  for version, rows in versions(*sys.argv[1:]):
    print(f'version {version["sequence"]}: {len(rows):,} rows', flush=True)
