"""The client of launch/online_demo.sh: writes passes, and prints how they change a score.

`python launch/online_demo.py FOLDER PASSES` announces passes in FOLDER/passes, one after another.
If FOLDER has a file `brokers`, it sends them to the topic `clicks` instead.
In each pass, a user sees one item 100 times and clicks either always or never. Then the client asks
the scorer until the score of this pair changes. It prints the seconds until the pass is trained on,
until its export exists, until the store holds it, and until the scorer uses it.
"""

import http.client
import itertools
import json
import os
import re
import signal
import sys
import time

import pyarrow as pa
import pyarrow.csv

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from examples.synthetic_log import World
from trainer.serving.stores import open_store

SAMPLES, SHOWS, PASSES_A_DAY = 10_000, 100, 10
SECONDS_TO_WAIT = 120
PAIR = {
  'user': 'you',
  'item': 'this',
  'category': 'c1',
  'tags': 't1|t2',
  'query': 'q',
  'hour': '12',
  'device': 'phone',
  'price': '9.9',
  'age': '40',
}


class Scorer:
  """Asks for the score of the pair, over one connection."""

  def __init__(self, log: str):
    address = None
    while not address:  # the scorer says where it listens
      with open(log, encoding='utf-8', errors='replace') as f:
        address = re.search(r'serving http://([^/]+)(/\S+)', f.read())
      time.sleep(0.1)
    self.connection, self.path = http.client.HTTPConnection(address[1]), address[2]

  def ask(self) -> tuple[float | None, str]:
    """Returns the score and the model's version; (None, '') while there is none."""
    self.connection.request('POST', self.path, json.dumps({'instances': [PAIR]}))
    answer = json.loads(self.connection.getresponse().read())
    if 'error' in answer:
      return None, ''
    return answer['predictions'][0], answer['model_version']


def announce(folder: str, number: int, world: World, clicks: bool) -> tuple[str, float]:
  """Writes a pass and its marker; returns its name, and when the marker appeared."""
  table = world.log(number, SAMPLES).table.select([*PAIR, 'click'])
  texts = pa.schema([(name, pa.string()) for name in table.column_names])
  row = PAIR | {'click': str(int(clicks))}
  own = pa.table({name: [row[name]] * SHOWS for name in table.column_names}, texts)
  both = pa.concat_tables([table.cast(texts), own])
  if os.path.exists(brokers := os.path.join(folder, 'brokers')):
    import confluent_kafka

    with open(brokers, encoding='utf-8') as f:
      producer = confluent_kafka.Producer({'bootstrap.servers': f.read()})
    for row, partition in zip(both.to_pylist(), itertools.cycle(range(4))):
      producer.produce('clicks', json.dumps(row), partition=partition)
    producer.flush()
    return f'clicks-{number * (SAMPLES + SHOWS)}', time.time()
  name = f'day_{number // PASSES_A_DAY}_pass_{number:04d}'
  path = os.path.join(folder, 'passes', f'{name}.csv')
  pa.csv.write_csv(both, path, pa.csv.WriteOptions(quoting_style='none'))
  with open(path + '.done', 'wb'):
    pass
  return name, os.path.getmtime(path + '.done')


def serve_cluster(path: str) -> None:
  """Runs a cluster of Kafka for tests, and writes its addresses to a file."""
  import confluent_kafka

  producer = confluent_kafka.Producer({'test.mock.num.brokers': 3, 'bootstrap.servers': 'none'})
  brokers = producer.list_topics(timeout=30).brokers.values()
  with open(path + '.new', 'w', encoding='utf-8') as f:
    f.write(','.join(f'{broker.host}:{broker.port}' for broker in brokers))
  os.replace(path + '.new', path)
  signal.pause()


def events(folder: str, name: str) -> dict[str, float]:
  """Returns when each kind of event of a pass was written, {kind: time}."""
  with open(os.path.join(folder, 'run', 'metrics.jsonl'), encoding='utf-8') as f:
    lines = [json.loads(line) for line in f]
  return {e['event']: e['time'] for e in lines if e.get('pass') == name}


def main() -> None:
  if sys.argv[1] == 'cluster':
    return serve_cluster(sys.argv[2])
  folder, passes = sys.argv[1], int(sys.argv[2])
  scorer = Scorer(os.path.join(folder, 'scorer.log'))
  store = open_store(os.path.join(folder, 'store'), 'store')
  world = World(seed=0, users=2000, items=1000, days=passes)
  print(f'{"":42}   seconds since the log was there')
  print(
    'pass               clicks      score         version    all   train  export publish   apply'
  )
  before, _ = scorer.ask()
  for number in range(passes):
    clicks = number % 2 == 0
    name, announced = announce(folder, number, world, clicks)
    after, version = scorer.ask()
    published: dict[str, float] = {}  # version -> when the store was first seen to hold it
    while after is None or after == before:
      if time.time() - announced > SECONDS_TO_WAIT:
        sys.exit(f'the score has not changed in {SECONDS_TO_WAIT} s; see the logs in {folder}')
      time.sleep(0.01)
      if held := store.version():
        published.setdefault(str(held.sequence), time.time())
      after, version = scorer.ask()
    applied = time.time()
    at = events(folder, name)
    stored = max(at['export'], min(published.get(version, applied), applied))
    score = f'{"–" if before is None else f"{before:.3f}"} → {after:.3f}'
    parts = [at['train'] - announced, at['export'] - at['train'], stored - at['export']]
    parts.append(applied - stored)
    print(
      f'{name:18} {"all" if clicks else "none":>6}  {score:>14} {version:>8} '
      f'{applied - announced:6.2f}  ' + ' '.join(f'{part:7.2f}' for part in parts),
      flush=True,
    )
    before = after


if __name__ == '__main__':
  main()
