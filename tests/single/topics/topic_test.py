"""A topic in place of files: what is a pass, what is trained on, and what is told."""

import contextlib
import json
import math
import os
import pathlib
import signal
import tempfile
import time
from unittest import mock

import confluent_kafka
import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests.support import small, topics
from tests.support.states import state_of
from tests.support.waiting import stopped_when_it_waits
from trainer import config
from trainer.data import file_system, values
from trainer.data.conversion import prepare_pass
from trainer.data.passes import Pass
from trainer.data.spans import Span, Spans
from trainer.errors import BadPass, ConfigError, UserError
from trainer.job import stop_request
from trainer.job.callback import Callback
from trainer.job.job import Job
from trainer.reporting.status import Status
from trainer.topics import topic
from trainer.topics.topic_passes import TopicPasses, shared

pytestmark = pytest.mark.reports

COLUMNS = ('user', 'item', 'price', 'click')


def as_csv(record):
  return ','.join(str(record[name]) for name in COLUMNS).encode()


def as_arrow(some):
  table, sink = pa.Table.from_pylist(some), pa.BufferOutputStream()
  with pa.ipc.new_stream(sink, table.schema) as writer:
    writer.write_table(table)
  return sink.getvalue().to_pybytes()


def as_example(record):
  example = tf.train.Example()
  for name in ('user', 'item'):
    example.features.feature[name].bytes_list.value.append(record[name].encode())
  example.features.feature['price'].float_list.value.append(record['price'])
  example.features.feature['click'].int64_list.value.append(record['click'])
  return example.SerializeToString()


class TopicTest(topics.ClusterTest, parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = tempfile.mkdtemp(dir=self.get_temp_dir())
    self.run_dir = f'{self.folder}/run'
    self.name = f'log-{self.id().rpartition(".")[2].partition(" ")[0]}'

  def config(self, topic=(), data=(), **sections):
    own = {'topic': {'brokers': self.cluster.brokers, 'topic': self.name} | dict(topic)}
    own |= {'columns': list(COLUMNS), 'label': 'click', 'dense': [{'name': 'price'}]}
    tree = small.tree(
      seed=3,
      run_dir=self.run_dir,
      data=own | dict(data),
      model={'interactions': ['linear', 'fm']},
      lifecycle={'admission_threshold': 0.5},
      train={'batch_size': 64, 'deterministic': True},
    )
    return small.checked(tree | sections)

  def train(self, *args, figures=None, **sections):
    """Trains on what is there, then stops; returns the events of metrics.jsonl."""
    cfg = self.config(*args, **sections)
    one = small.job(cfg, figures=figures)
    with stopped_when_it_waits(one):
      self.assertEqual(0, one.run())
      one.close()
    return self.events()

  def events(self, *kinds):
    with open(f'{self.run_dir}/metrics.jsonl', encoding='utf-8') as f:
      events = [json.loads(line) for line in f]
    return [e for e in events if e['event'] in (kinds or ('train', 'day_end', 'pass'))]

  @parameterized.parameters('jsonl', 'csv', 'arrow', 'tfrecord')
  def test_a_pass_of_messages_is_that_of_a_file(self, kind):
    some = topics.records(1000)
    values = {
      'jsonl': lambda: map(topics.as_json, some),
      'csv': lambda: map(as_csv, some),
      'arrow': lambda: (as_arrow(some[i : i + 7]) for i in range(0, len(some), 7)),
      'tfrecord': lambda: map(as_example, some),
    }[kind]()
    self.cluster.send(self.name, values, partition=2)
    cfg = self.config({'format': kind})
    messages = -(-len(some) // 7) if kind == 'arrow' else len(some)
    spans = Spans(self.name, None, {'2': Span(0, messages)})
    prepare_pass(cfg, spans, f'{self.folder}/of_topic')
    with open(f'{self.folder}/log.jsonl', 'wb') as f:
      f.writelines(topics.as_json(record) + b'\n' for record in some)
    prepare_pass(cfg, f'{self.folder}/log.jsonl', f'{self.folder}/of_file')
    for name in os.listdir(f'{self.folder}/of_file'):
      if name.endswith('.npy'):
        found, wanted = (
          pathlib.Path(f'{self.folder}/{of}/{name}').read_bytes() for of in ('of_topic', 'of_file')
        )
        self.assertEqual(found, wanted, name)

  def test_every_message_once_and_lag(self):
    some = topics.records(1000)
    self.cluster.send(self.name, map(topics.as_json, some))
    cut = {'pass': {'records': 300}}
    trained = self.train(cut)
    self.assertEqual([e['pass'] for e in trained], [f'{self.name}-{n}' for n in (0, 300, 600)])
    self.assertEqual([e['examples'] for e in trained], [300] * 3)
    self.assertEqual([e['absent_offsets'] for e in trained], [0] * 3)
    self.assertEqual([e['lag'] for e in trained], [700, 400, 100])
    self.assertEqual(trained[-1]['lag_by_partition'], {str(p): 25 for p in range(4)})
    self.cluster.send(self.name, map(topics.as_json, topics.records(250, seed=1)), partition=1)
    again = self.train(cut)
    self.assertEqual([e['examples'] for e in again[3:]], [300])
    self.assertIn(
      'Messages behind each pass', pathlib.Path(f'{self.run_dir}/report.html').read_text()
    )
    progress = state_of(self.run_dir)['progress']
    self.assertEqual(
      progress['topics'][self.name]['offsets'], {'0': 250, '1': 450, '2': 250, '3': 250}
    )

  def test_the_marks_of_transactions_are_no_messages(self):
    """The mark alone stays behind the pass: its time is not waited for."""
    producer = confluent_kafka.Producer(
      {'bootstrap.servers': self.cluster.brokers, 'transactional.id': self.name}
    )
    producer.init_transactions(30)
    for i in range(2):
      producer.begin_transaction()
      for record in topics.records(99, seed=i):
        producer.produce(self.name, topics.as_json(record), partition=0)
      producer.commit_transaction(30)
    figures = Status('trainer', 1800)
    with mock.patch.object(topic, 'SECONDS_TO_ANSWER', 3600.0):
      (trained,) = self.train({'pass': {'records': 199}}, figures=figures)
    self.assertEqual([trained[name] for name in ('examples', 'absent_offsets', 'lag')], [198, 1, 1])
    self.assertEqual(figures.read()['seconds_behind'], 0)

  def test_how_late_it_is(self):
    """By the time of the next message, however lately it was cut, also of one without a pass."""
    hours_ago = round(1000 * (time.time() - 5 * 3600))
    some = map(topics.as_json, topics.records(1000))
    self.cluster.send(self.name, some, times=[hours_ago + 10_000 * i for i in range(1000)])
    figures = Status('trainer', 1800)
    trained = self.train({'pass': {'records': 300}}, figures=figures)
    late = [5 * 3600 - 10 * n for n in (0, 300, 600, 900)]
    self.assertAllClose([e['seconds_behind'] for e in trained], late[:3], atol=300)
    found = figures.read()
    self.assertNear(found['seconds_behind'], late[3], 300)
    self.assertEqual(found['messages_waiting'], 100)
    self.assertLess(found['seconds_since_arrival'], 300)

  def test_a_bad_message_is_told_with_its_place(self):
    values = list(map(topics.as_json, topics.records(400)))
    values[42] = b'{"user": '
    values[44] = None
    self.cluster.send(self.name, values)
    cfg = {'pass': {'records': 400}}
    (refused,) = self.train(cfg, {'max_bad_share': 0.0})
    self.assertEqual(refused['fate'], 'refused')
    self.assertIn(f'{self.name}:0:11: malformed record: found NoneType', refused['reason'])
    self.assertIn('2 of 400 records are bad', refused['reason'])
    self.cluster.send(self.name, values)
    (trained,) = self.train(cfg)[1:]
    self.assertEqual((trained['examples'], trained['bad']), (398, 2))

  def test_messages_that_have_expired(self):
    """A partition of the cluster keeps some 5 MB."""
    values = list(map(topics.as_json, topics.records(400)))
    cut = {'pass': {'records': 100, 'seconds': 0.001}}
    self.cluster.send(self.name, values[:100], partition=1)
    self.assertLen(self.train(cut), 1)
    for _ in range(50):
      self.cluster.send(self.name, [b' ' * 1000 + value for value in values], partition=1)
    told = (
      rf'topic {self.name}, partition 1: wanted offset 100, which has expired: the oldest there'
    )
    with self.assertRaisesRegex(UserError, told):
      self.train(cut)
    with self.assertLogs(level='WARNING') as logs:
      trained = self.train(cut | {'pass': {'records': 1000}, 'on_expired': 'skip'})
    self.assertRegex('\n'.join(logs.output), r'expired.*messages are lost')
    told = (
      f"topic {self.name}: none of the messages .* goes on, because its cluster's id, .*the same"
    )
    self.assertRegex('\n'.join(logs.output), told)
    there = sum(e['examples'] for e in trained[1:])
    self.assertGreater(there, 1000)
    (offsets,) = [t['offsets'] for t in state_of(self.run_dir)['progress']['topics'].values()]
    lost = sum(e['lost_messages'] for e in trained)
    self.assertEqual(there + lost, offsets['1'] - 100)
    self.assertGreater(lost, 0)

  def test_offsets_belong_to_their_topic(self):
    """The next messages of a topic that was made anew under the same name are others."""
    some, times = topics.records(1600), range(10**12, 10**12 + 1600)
    cut = {'pass': {'records': 200}}
    self.cluster.send(self.name, map(topics.as_json, some[:400]), times=times[:400])
    self.assertLen(self.train(cut), 2)
    (place,) = state_of(self.run_dir)['progress']['topics'].values()
    self.assertEqual(
      {p: known[:2] for p, known in place['known'].items()},
      {str(p): [99, 10**12 + 396 + p] for p in range(4)},
    )
    before = self.files()
    anew = rf'topic {self.name}, partition \d: was made anew: .* --init_from'
    for some_others, moments, told in (
      (topics.records(800, seed=1), times, f'{anew} lets begin with the model of this one$'),
      (some, [moment + 1 for moment in times], anew),
      (some[:200], times, rf'{anew}'),
    ):
      with contextlib.closing(topics.Cluster()) as other:
        other.send(self.name, map(topics.as_json, some_others), times=moments[: len(some_others)])
        with self.assertRaisesRegex(UserError, told):
          self.train(cut | {'brokers': other.brokers})
    self.assertEqual(self.files(), before)
    with contextlib.closing(topics.Cluster()) as copy, self.assertLogs(level='WARNING') as logs:
      copy.send(self.name, map(topics.as_json, some[:800]), times=times[:800])
      self.assertLen(self.train(cut | {'brokers': copy.brokers}), 4)
    self.assertRegex('\n'.join(logs.output), 'the id of its cluster was .* are the same')

  def files(self):
    """Returns the content of the files by which a run goes on."""
    names = ('cuts.json', 'ledger.jsonl')
    return [pathlib.Path(self.run_dir, name).read_bytes() for name in names]

  def test_a_topic_is_made_anew_while_a_run_goes_on(self):
    self.cluster.send(self.name, map(topics.as_json, topics.records(400)))
    self.cluster.send(f'{self.name}-anew', map(topics.as_json, topics.records(4000, seed=1)))
    at = topic.Topic._at

    def of_another(client, *args):
      one = at(client, *args)
      return confluent_kafka.TopicPartition(f'{one.topic}-anew', one.partition, one.offset)

    with mock.patch.object(topic.Topic, '_at', at):

      class Remake(Callback):
        def on_pass_end(self, name, figures):
          topic.Topic._at = of_another

      cfg = self.config({'pass': {'records': 400}})
      one = small.job(cfg, callbacks=[Remake()])
      with self.assertRaisesRegex(UserError, rf'topic {self.name}, partition \d: was made anew'):
        one.run()
    self.assertEqual([e['examples'] for e in self.events()], [400])

  def test_a_state_of_0_2_0_goes_on(self):
    """It does not know by what the topic is known again; its cuts.json has no checksum."""
    cut = {'pass': {'records': 100}}
    self.cluster.send(self.name, map(topics.as_json, topics.records(300)))
    with mock.patch.object(TopicPasses, 'trained', lambda *_: None):
      self.train({'pass': {'records': 200}})
    (place,) = state_of(self.run_dir)['progress']['topics'].values()
    self.assertEqual(place.keys(), {'offsets', 'time'})
    path = pathlib.Path(self.run_dir, 'cuts.json')
    cuts = json.loads(path.read_bytes())
    del cuts['crc32']
    path.write_text(json.dumps(cuts), encoding='utf-8')
    self.assertEqual([e['examples'] for e in self.train(cut)], [200, 100])
    self.assertIn('crc32', json.loads(path.read_bytes()))

  def test_a_damaged_list_of_cuts(self):
    cut = {'pass': {'records': 100}}
    self.cluster.send(self.name, map(topics.as_json, topics.records(600)))

    def stop(job, *_):
      job.stop_request.signal = signal.SIGINT
      return False

    with mock.patch.object(Job, '_train_on_pass', stop):  # when all is cut
      cfg = self.config(cut)
      one = small.job(cfg)
      one.run()
      one.close()
    path = pathlib.Path(self.run_dir, 'cuts.json')
    whole = path.read_text(encoding='utf-8')
    cuts = json.loads(whole)
    self.assertLen(cuts['cuts'], 6)
    del cuts['crc32']
    plain = json.dumps(cuts)  # as 0.2.0 wrote it
    damaged = [whole[:n] for n in range(0, len(whole), 97)] + ['[]', '{}', 'null', '\0' * 64]
    damaged += [
      whole.replace('0:50-75', '0:60-75'),  # it would leave out ten messages
      whole.replace('0:50-75', '0:50-85'),  # and train some twice
      plain.replace('0:50-75', '0:60-75'),
      plain.replace('0:50-75', '0:40-75'),
      plain.replace('0:50-75', '0:75-50'),
      plain.replace('3:125-150', '7:125-150'),
      plain.replace('3:125-150', '3:125-950'),
      plain.replace('{"0": 50', '{"0": 51'),
      plain.replace('"path": "kafka', '"path": "other'),
      plain.replace('"at": ', '"at": "x'),
    ]
    for text in damaged:
      with self.subTest(text=text[:200]):
        self.assertNotIn(text, (whole, plain))
        path.write_text(text, encoding='utf-8')
        with self.assertRaisesRegex(UserError, r'run/cuts.json: .*; wanted it removed: ') as raised:
          TopicPasses(cfg.data, one.state, time.time).look()
        self.assertNotIn('\n', str(raised.exception))
    path.unlink()
    self.assertEqual([e['examples'] for e in self.train(cut)], [100] * 6)

  def test_days_end_by_the_time_of_messages(self):
    day = 24 * 3600 * 1000
    begin = 20_000 * day
    some = topics.records(400)
    # The partitions advance alike; each fourth message of one comes 20 s late.
    times = [begin + (i // 4) * day // 50 - 20_000 * (i // 4 % 4 == 3) for i in range(400)]
    by_day = {'pass': {'records': 150}, 'days': True}
    data = {'max_days_ahead': None}
    self.cluster.send(self.name, map(topics.as_json, some[:220]), times=times[:220])
    self.train(by_day, data)
    # Messages of the first day, when it has ended.
    self.cluster.send(self.name, map(topics.as_json, some[:8]), 3, [begin] * 8)
    self.cluster.send(self.name, map(topics.as_json, some[220:]), times=times[220:])
    events = self.train(by_day, data)
    shown = [(e['event'], e['day'], e.get('examples'), e.get('late_messages')) for e in events]
    self.assertEqual(
      shown,
      [
        ('train', 20241004, 150, 0),
        ('train', 20241004, 54, 0),
        ('day_end', 20241004, None, None),
        ('train', 20241005, 150, 8),
      ],
    )

  def test_a_config_of_0_2_0_has_the_same_days(self):
    cfg, pattern = self.config({'days': True}), r'/(\d{4}-\d\d-\d\d)T'
    self.assertEqual(self.config({'days': True}, {'day_pattern': pattern}), cfg)
    self.assertTrue(cfg.data.has_days)
    self.assertNotIn('day_pattern', config.dump(cfg))  # 0.2.0 reads it as its own
    self.assertEqual(config.parse(config.dump(cfg), 'a run'), cfg)
    with self.assertRaisesRegex(ConfigError, 'data.day_pattern.*wanted what finds the days of'):
      self.config({'days': True}, {'train': ['log.csv']})

  def test_windows_by_the_time_of_messages(self):
    some = topics.records(300)
    times = [1_700_000_000_000 // 60_000 * 60_000 + (i // 4) * 2_000 for i in range(300)]
    self.cluster.send(self.name, map(topics.as_json, some), times=times)
    cut = {'records': 1000, 'seconds': 60, 'by': 'time'}
    events = self.train({'pass': cut, 'lateness_seconds': 10})
    # A window is complete once a message is 10 s newer; until then 5 messages of a partition come.
    self.assertEqual([e['examples'] for e in events], [140, 120])

  def test_partitions_that_are_added(self):
    self.cluster.send(self.name, map(topics.as_json, topics.records(400)))
    bounds = topic.Topic.bounds

    def some(client):
      return {p: span for p, span in bounds(client).items() if p != '2'}

    with mock.patch.object(topic.Topic, 'bounds', some):
      (first,) = self.train({'pass': {'records': 300}})
    self.assertEqual(first['lag_by_partition'], {'0': 0, '1': 0, '3': 0})
    (second,) = self.train({'pass': {'records': 100}})[1:]
    self.assertEqual(second['examples'], 100)
    self.assertEqual(second['lag_by_partition'], dict.fromkeys('0123', 0))

  def test_where_a_run_begins(self):
    self.cluster.send(self.name, map(topics.as_json, topics.records(400)))
    begins = {'start': 'latest', 'pass': {'records': 100}}
    self.assertEmpty(self.train(begins))
    self.cluster.send(self.name, map(topics.as_json, topics.records(100, seed=1)))
    (only,) = self.train(begins)  # what came before this start counts, too
    self.assertEqual((only['pass'], only['lag']), (f'{self.name}-0', 0))
    self.run_dir += '2'
    (only,) = self.train({'start': {0: 100, 1: 100, 2: 100}, 'pass': {'records': 200}})
    self.assertEqual(only['lag_by_partition'], {'0': 0, '1': 0, '2': 0, '3': 0})

  def test_a_cluster_that_is_away(self):
    with mock.patch.object(topic, 'SECONDS_TO_ANSWER', 0.2):
      with self.assertLogs(level='WARNING') as logs:
        self.assertEmpty(self.train({'brokers': '127.0.0.1:1'}))
    self.assertIn('waiting for the cluster', '\n'.join(logs.output))

  def test_a_stop_while_no_message_comes(self):
    self.cluster.send(self.name, map(topics.as_json, topics.records(100)))
    cfg = self.config({'pass': {'records': 100}})
    one = small.job(cfg)
    told = []

    def stop(*args):  # in place of the line that says so
      told.append(args[0] % args[1:])
      os.kill(os.getpid(), signal.SIGTERM)

    with contextlib.ExitStack() as stack:
      stack.callback(file_system.attempt_for, math.inf)
      for module, name, value in (
        (topic, '_AT_ONCE', 0),  # as if no message came
        (topic, 'SECONDS_TO_ANSWER', 1.0),
        (stop_request, 'SECONDS_FOR_OTHERS', 0.0),
        (topic.logging, 'warning', stop),
      ):
        stack.enter_context(mock.patch.object(module, name, value))
      self.assertEqual(one.run(), 0)
      one.close()
    self.assertRegex(told[0], f'{self.name}:0:0: no answer; waiting')
    self.assertEqual([e['status'] for e in self.events('end')], ['stopped'])
    self.assertLen(self.train({'pass': {'records': 100}}), 1)

  def test_a_message_that_would_ruin_its_pass_is_left_out_alone(self):
    some = topics.records(400)
    some[42]['price'], some[43]['tags'] = 1e30, {'a': 1e30}
    data = {'slots': [{'name': 'user'}, {'name': 'tags'}]}
    messages = [*map(topics.as_json, [{'tags': {'b': 0.5}} | record for record in some])]
    self.cluster.send(self.name, messages)
    told = (
      rf"{self.name}:2:10: column 'price': found '1e\+30'; .* beyond 1.8e\+19, .*"
      r'dropped 2 bad of 400 records \(dense 1, value 1\)'
    )
    with self.assertLogs(level='WARNING') as logs:
      (trained,) = self.train({'pass': {'records': 400}}, data)
    self.assertEqual((trained['examples'], trained['bad']), (398, 2))
    self.assertRegex('\n'.join(logs.output), told)
    # A file is read by the same rule.
    path = f'{self.folder}/log.jsonl'
    pathlib.Path(path).write_bytes(b'\n'.join(messages))
    bad = prepare_pass(self.config(data=data), path, f'{self.folder}/of_file')['bad']
    self.assertEqual([e['line'] for e in bad['examples']], [43, 44])

  def test_a_pass_that_ruins_the_model_is_left_out(self):
    some = topics.records(300)
    some[150]['price'] = 1e30
    self.cluster.send(self.name, map(topics.as_json, some), partition=0)
    price = [{'name': 'price', 'from': {'number': 'price'}}, {'name': 'user'}]
    data = {'slots': price, 'dense': []}
    with mock.patch.object(
      values, 'MOST', 3e38
    ):  # as if it were a smaller number, in a larger model
      events = self.train({'pass': {'records': 100}}, data, checkpoint={'every_passes': 1})
    (reason,) = [e['reason'] for e in events if e['event'] == 'pass']
    self.assertIn("slot 'price' holds values up to 1e+30", reason)
    self.assertEndsWith(reason, f'1e+30 is in {self.name}:0:150')
    fates = [(e['pass'], e.get('fate', 'trained')) for e in events]
    names = [f'{self.name}-{n}' for n in (0, 100, 200)]
    self.assertEqual(sorted(fates), sorted(zip(names, ('trained', 'refused', 'trained'))))
    (offsets,) = [t['offsets'] for t in state_of(self.run_dir)['progress']['topics'].values()]
    self.assertEqual(offsets['0'], 300)

  def test_slow_answers_lose_nothing(self):
    self.cluster.send(self.name, [b'%d' % i for i in range(800)])
    with mock.patch.object(topic, '_SECONDS_AT_ONCE', 1e-4):
      for start in range(0, 200, 40):
        client = topic.Topic(self.config().data.topic)
        for p in map(str, range(4)):
          read = client.messages(p, Span(start, start + 40))
          offsets = [message.offset() for some in read for message in some]
          self.assertEqual(offsets, list(range(start, start + 40)), p)
        client.close()

  def test_a_pass_of_a_topic_that_the_config_has_no_more(self):
    begun = Pass('begun', Spans('before', None, {'0': Span(0, 100)}).path)
    files = {'topic': None, 'watch': self.folder}
    for cfg in (self.config(), self.config(data=files)):
      with self.assertRaisesRegex(BadPass, 'data.topic is another one now'), begun.refusing():
        prepare_pass(cfg, begun.raw, f'{self.folder}/begun')

  def test_what_ends_a_run_while_it_converts_a_pass(self):
    begin = 20_000 * 24 * 3600 * 1000
    self.cluster.send(self.name, map(topics.as_json, topics.records(100)), 0, [begin] * 100)
    cfg = self.config({'days': True, 'on_expired': 'skip'}, {'late': 'fail'})
    spans = Spans(self.name, begin + 24 * 3600 * 1000, {'0': Span(0, 100)})
    told = rf"{self.name}:0:0: its day is over; data.late is 'fail'"
    with self.assertRaisesRegex(UserError, told), Pass('late', spans.path).refusing():
      prepare_pass(cfg, spans, f'{self.folder}/late')
    for _ in range(50):
      self.cluster.send(self.name, [b' ' * 1000 + topics.as_json(topics.records(1)[0])] * 400, 1)
    (low, end) = topic.Topic(cfg.data.topic).bounds()['1']
    self.assertGreater(low, 50)
    spans = Spans(self.name, None, {'1': Span(50, end)})
    expired, told = Pass('expired', spans.path), 'wanted offset 50, which has'
    with self.assertRaisesRegex(UserError, told) as e, expired.refusing():
      prepare_pass(self.config(), expired.raw, f'{self.folder}/expired')
    self.assertNotIsInstance(e.exception, BadPass)
    meta = prepare_pass(self.config({'on_expired': 'skip'}), spans, f'{self.folder}/expired')
    self.assertEqual((meta['lost'], meta['samples']), (low - 50, end - low))
    beyond = Spans(self.name, None, {'1': Span(end + 9, end + 10)})
    with self.assertRaisesRegex(UserError, 'the topic was made anew'):
      prepare_pass(self.config(), beyond, f'{self.folder}/beyond')

  def test_secrets_are_not_kept(self):
    with self.assertRaisesRegex(ConfigError, "sasl.password.*wanted '@FILE'") as raised:
      self.config({'config': {'sasl.password': 'geheim'}})
    self.assertNotIn('geheim', str(raised.exception))
    with open(f'{self.folder}/secret', 'w', encoding='utf-8') as f:
      f.write('geheim\n')
    self.cluster.send(self.name, map(topics.as_json, topics.records(100)))
    self.train({'pass': {'records': 100}, 'config': {'sasl.password': f'@{self.folder}/secret'}})
    for folder, _, names in os.walk(self.run_dir):
      for name in names:
        self.assertNotIn(b'geheim', pathlib.Path(folder, name).read_bytes(), name)

  def test_shares(self):
    self.assertEqual(shared({'0': 9, '1': 9, '2': 9}, 10), {'0': 4, '1': 3, '2': 3})
    self.assertEqual(shared({'0': 1, '1': 0, '2': 9}, 8), {'0': 1, '1': 0, '2': 7})
    rng = np.random.default_rng(0)
    for _ in range(200):
      there = {str(p): int(rng.integers(20)) for p in range(rng.integers(1, 6))}
      total = int(rng.integers(sum(there.values()) + 1))
      shares = shared(there, total)
      self.assertEqual(sum(shares.values()), total)
      self.assertTrue(all(0 <= shares[p] <= there[p] for p in there))


if __name__ == '__main__':
  tf.test.main()
