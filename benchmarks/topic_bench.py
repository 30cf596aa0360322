"""Measures reading a topic of JSON: messages a second of processor time, from cluster to pass.

`python -m benchmarks.topic_bench`. The cluster is librdkafka's own, in another process on another
core, as there is one. A message has 4 categories, a number and a label, some 110 bytes.
"""

import json
import multiprocessing
import os
import statistics
import tempfile
import time

MESSAGES, ROUNDS = 120_000, 5  # 4 partitions keep some 5 MB each
COLUMNS = ('user', 'item', 'query', 'device')
OUT = os.path.join('build', 'bench', 'topic_bench.json')


def cluster(pipe) -> None:
  """Sends the messages, tells the addresses, and answers until it is told to end."""
  import numpy as np

  from tests.support import topics

  rng = np.random.default_rng(0)
  values = rng.integers(0, 1_000_000, [MESSAGES, len(COLUMNS)]).tolist()
  one = topics.Cluster()
  texts = (
    {name: f'{name[0]}{v}' for name, v in zip(COLUMNS, row)}
    | {'price': row[0] / 8, 'click': i % 5 // 4}
    for i, row in enumerate(values)
  )
  one.send('log', map(topics.as_json, texts))
  pipe.send(one.brokers)
  pipe.recv()


def main() -> None:
  here, there = multiprocessing.get_context('spawn').Pipe()
  child = multiprocessing.get_context('spawn').Process(target=cluster, args=[there])
  child.start()
  brokers = here.recv()
  cores = sorted(os.sched_getaffinity(0))
  os.sched_setaffinity(0, cores[-1:])  # before threads are counted
  os.sched_setaffinity(child.pid, cores[:1])
  from trainer import config
  from trainer.data.conversion import prepare_pass
  from trainer.data.spans import Span, Spans

  data = {
    'topic': {'brokers': brokers, 'topic': 'log'},
    'label': 'click',
    'slots': [{'name': name} for name in COLUMNS],
    'dense': [{'name': 'price'}],
  }
  cfg = config.Config.model_validate({'data': data, 'model': {'interactions': ['linear']}})
  spans = Spans('log', None, {str(p): Span(0, MESSAGES // 4) for p in range(4)})
  rates = []
  for _ in range(ROUNDS):
    with tempfile.TemporaryDirectory() as folder:
      began = time.process_time()
      samples = prepare_pass(cfg, spans, f'{folder}/out')['samples']
      rates.append(samples / (time.process_time() - began))
  rate = statistics.median(rates)
  print(f'topic of JSON   {MESSAGES:>9,} messages   {rate:>9,.0f} messages/s of one core')
  os.makedirs(os.path.dirname(OUT), exist_ok=True)
  with open(OUT, 'w', encoding='utf-8') as f:
    json.dump({'topic_messages_per_second': rate, 'all': rates}, f)
  here.send('end')
  child.join()


if __name__ == '__main__':
  main()
