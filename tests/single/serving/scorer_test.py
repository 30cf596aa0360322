"""A scorer gives, over HTTP, what the trainer predicts in the same state; whatever else it is sent,
it refuses in one line.
"""

import asyncio
import contextlib
import csv
import errno
import functools
import json
import os
import random
import re
import resource
import socket
import tempfile
import threading
import time
import unittest
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from absl import logging
from absl.testing import parameterized

from tests.support import commands, small
from tests.support.damage import cut_scratch_files
from tests.support.exports import RedisServer
from tests.support.fuzz import mixed, requests
from tests.support.scorer import Client, asked_together, served
from tests.support.steps import TASKS, make_config, scores, train
from trainer import config
from trainer.comm.communicator import SingleProcess
from trainer.data import jsonl_format
from trainer.data.conversion import prepare_pass
from trainer.data.prepared import PreparedPass
from trainer.data.request_columns import Shared
from trainer.errors import UserError
from trainer.serving import http_server
from trainer.serving.gate import SparingLog
from trainer.serving.limits import Limits
from trainer.serving.memory_store import MemoryStore
from trainer.serving.publisher import Publisher
from trainer.serving.scorer import Scorer
from trainer.serving.service import Service
from trainer.serving.stores import open_store
from trainer.storage import export_writer
from trainer.training.step import TrainStep

BATCH = 64
CONFIG = small.tree(
  data={
    'train': ['x'],
    'delimiter': '\t',
    'slots': [
      {'name': 'user', 'column': 'user id', 'table': 'small'},
      {'name': 'tags', 'separator': '|', 'pooling': 'mean'},
      {'name': 'history', 'separator': '|', 'pooling': 'sqrtn', 'shares': 'item'},
      {'name': 'item'},
      {'name': 'topics', 'separator': ';', 'value_separator': ':', 'pooling': 'mean'},
      {'name': 'age'},
    ],
    'dense': [
      {'name': 'price', 'transform': 'log1p_standardise', 'missing': -0.5},
      {'name': 'age', 'transform': 'log1p'},
    ],
  },
  sparse={
    'tables': {
      'default': {'width': 4, 'init_scale': 0.3},
      'small': {'width': 4, 'init_scale': 0.3, 'dtype': 'bfloat16'},
    }
  },
  lifecycle={
    'admission': 'count',
    'admission_count': 4.0,
    'eviction': 'score',
    'base_threshold': 0.0,
    'delta_threshold': 0.0,
    'delta_keep_days': 30,
    'decay': 0.5,
    'delete_threshold': 0.04,
    'delete_after_unseen_days': 3,
  },
  model={'interactions': ['linear', 'fm', {'dnn': {'hidden': [8]}}]},
)
COLUMNS = ('user id', 'tags', 'history', 'item', 'topics', 'age', 'price')
PATH = '/v1/models/ctr:predict'
LIMIT = 1_000_000  # bytes of memory; the table takes 2,400,000
CONTEXT = ('user id', 'tags', 'topics', 'age')


def make_records(rng, n, first_id=0):
  """Records as texts, with blanks, several features a field and odd white space."""

  def some(prefix, at_most, separator):
    ids = rng.integers(first_id, first_id + 20, rng.integers(0, at_most + 1))
    return separator.join(f'{prefix}{i}' for i in ids)

  return [
    {
      'user id': f' größe {first_id + int(300 * rng.random() ** 3)}',
      'tags': some('t', 4, '|'),
      'history': some('', 4, '|'),
      'item': str(first_id + int(100 * rng.random() ** 3)),
      'topics': some('x:', 3, ';') and some('x', 3, ':0.5;') + ';y:2',
      'age': str(rng.integers(18, 40)) if rng.random() < 0.8 else '',
      'price': f'{rng.random() * 90:.3f}' if rng.random() < 0.8 else ' ',
      'label': str(int(rng.random() < 0.4)),
    }
    for _ in range(n)
  ]


def _nested(depth):
  value = []
  for _ in range(depth):
    value = [value]
  return value


class ScorerTest(tf.test.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.stack = contextlib.ExitStack()
    cls.folder = cls.stack.enter_context(tempfile.TemporaryDirectory())
    path = os.path.join(cls.folder, 'in.json')
    cls.cfg = config.load(small.write(path, CONFIG, run_dir=os.path.join(cls.folder, 'run')))
    cls.exports = os.path.join(cls.cfg.run_dir, 'exports')
    cls.rng = np.random.default_rng(5)
    cls.records = make_records(cls.rng, 60) + make_records(cls.rng, 15, first_id=1000)
    cls.step = TrainStep(cls.cfg, SingleProcess())
    cls.step.dense.embedding.stats.assign(np.array([[1.2, 0], [0.7, 1], [3, 0]], np.float32))
    cls.written, cls.expected = 0, {}
    cls.train_and_export('base')
    store = MemoryStore()  # as of serve --run_dir
    cls.service = Service(store, Publisher(cls.exports, store).advance)
    cls.service.refresh()
    cls.client = cls.stack.enter_context(
      served(cls.service, Limits(body_bytes=100_000, instances=200, seconds_to_send=2))
    )
    cls.roomy = cls.stack.enter_context(served(cls.service))

  @classmethod
  def tearDownClass(cls):
    cls.stack.close()
    super().tearDownClass()

  @classmethod
  def prepared(cls, records):
    cls.written += 1
    path = os.path.join(cls.folder, f'{cls.written}.csv')
    with open(path, 'w', encoding='utf-8', newline='') as f:
      writer = csv.DictWriter(f, records[0].keys(), delimiter='\t')
      writer.writeheader()
      writer.writerows(records)
    prepare_pass(cls.cfg, path, path + '.pass')
    return PreparedPass(path + '.pass', cls.cfg)

  @classmethod
  def predicted(cls, records):
    """What the trainer predicts now."""
    batches = cls.prepared(records).batches(BATCH)
    return np.concatenate([cls.step.predict(cls.step.stage(b)) for b in batches])

  @classmethod
  def train_and_export(cls, kind):
    for batch in cls.prepared(make_records(cls.rng, 4 * BATCH)).batches(BATCH):
      train(cls.step, batch, has_next=True)
    cls.step.store.decay()
    cls.step.store.evict()
    cls.step.store.age()
    done = export_writer.write(
      cls.cfg,
      kind,
      {'number': cls.written},
      store=cls.step.store,
      model=cls.step.dense.model,
      dense_stats=cls.step.dense.embedding.stats,
      ancestors=[1],  # all exports are of this checkpoint
      checkpoint=1,
    )
    version = os.path.basename(done.path)[:6].lstrip('0')
    cls.expected[version] = cls.predicted(cls.records)
    return version

  def rows(self, records):
    return {'instances': [{name: r[name] for name in COLUMNS} for r in records]}

  def test_scores_are_the_trainers(self):
    gone = 0
    for kind in (None, 'delta', 'delta', 'base', 'delta'):
      before = set(np.asarray(self.step.store.select('all')).tolist())
      version = self.train_and_export(kind) if kind else max(self.expected, key=int)
      after = np.asarray(self.step.store.select('all'))
      gone += len(before - set(after.tolist()))
      self.assertBetween(np.mean(self.step.store.admitted(after)), 0.1, 0.95)
      self.service.refresh()
      status, answer = self.client.predict(self.rows(self.records))
      self.assertEqual(status, 200, answer)
      self.assertEqual(answer['model_version'], version)
      self.assertAllClose(answer['predictions'], self.expected[version], atol=1e-6, rtol=0)
      self.assertGreater(np.std(answer['predictions']), 1e-3)
      columns = {name: [r[name] for r in self.records] for name in COLUMNS}
      _, again = self.client.predict({'signature_name': 'serving_default', 'inputs': columns})
      self.assertEqual(again['outputs'], answer['predictions'])
    self.assertGreater(gone, 10)  # evicted features are scored like those never seen
    status, answer = self.client.status()
    one = answer['model_version_status'][0]
    self.assertEqual((status, one['version'], one['state']), (200, version, 'AVAILABLE'))

  def test_one_user_and_many_items(self):
    for user in self.records[:4]:
      many = [user | {n: r[n] for n in COLUMNS if n not in CONTEXT} for r in self.records]
      _, wanted = self.client.predict(self.rows(many))
      columns = {n: [user[n]] if n in CONTEXT else [r[n] for r in many] for n in COLUMNS}
      status, found = self.client.predict({'inputs': columns})
      self.assertEqual(status, 200)
      self.assertAllClose(found['outputs'], wanted['predictions'], atol=1e-6, rtol=0)
      context = {n: user[n] for n in CONTEXT}
      items = [{n: r[n] for n in COLUMNS if n not in CONTEXT} for r in many]
      status, found = self.client.predict({'context': context, 'instances': items})
      self.assertEqual((status, found['predictions']), (200, wanted['predictions']))

  def test_values_of_every_type(self):
    def one(**changes):
      record = dict.fromkeys(COLUMNS) | {'item': '3', 'age': '20', 'price': '1.5'} | changes
      status, answer = self.client.predict({'instances': [record]})
      self.assertEqual(status, 200, answer)
      return answer['predictions'][0]

    plain = one()
    for same in ({'item': 3}, {'price': 1.5}, {'age': 20}, {'tags': ''}, {'tags': []}):
      self.assertEqual(one(**same), plain, same)
    self.assertEqual(one(item={'b64': 'Mw=='}), plain)
    self.assertEqual(one(tags=['t1', 't2']), one(tags='t1|t2'))
    self.assertEqual(one(history=[1, 2]), one(history='1|2'))
    self.assertEqual(one(topics=['x1:0.5', 'y:2']), one(topics='x1:0.5;y:2'))
    self.assertNotEqual(one(tags='t1|t2'), plain)
    self.assertEqual(one(price=None), one(price=''))
    full = {'user id': 'x', 'tags': 't1', 'history': '1', 'topics': 'y'}  # one feature in each slot
    self.assertEqual(one(**full), one(**full | {'topics': 'y:1'}))
    record = dict.fromkeys(COLUMNS, '') | {'item': '3', 'age': '20', 'price': '1.5'}
    record['user_id'] = record.pop('user id')  # as the SavedModel has it
    self.assertEqual(self.client.predict({'inputs': record})[1]['outputs'], [plain])

  def test_columns_that_the_model_does_not_read_are_counted_or_refused(self):
    good = {name: self.records[0][name] for name in COLUMNS}
    more = {'instances': [good | {'itm': 1, 'x' * 90_000: 2}]}
    self.assertEqual(self.client.predict(more), self.client.predict({'instances': [good]}))
    self.assertIn('ctr_ignored_columns_total 2.0', self.client.ask('GET', '/metrics')[1].decode())
    with served(self.service, Limits(strict=True)) as client:
      self.assertEqual(client.predict({'instances': [good]})[0], 200)
      for name, text in (
        ('itm', "'itm' is unknown; .* 'item'"),
        ('x' * 90_000, "^column 'x{80}' is unknown"),
      ):
        status, answer = client.predict({'instances': [good | {name: 1}]})
        self.assertEqual(status, 400)
        self.assertRegex(answer['error'], text)

  def test_mistakes_end_in_one_line(self):
    good = {name: self.records[0][name] for name in COLUMNS}
    for body, status, text in (
      (b'{', 400, 'the body is not JSON: '),
      (b'\xff', 400, 'the body is not JSON: '),
      (b'[' * 50_000, 400, 'the body is not JSON: '),
      ({'instances': [good | {'tags': _nested(500)}]}, 400, 'nested more than 2 deep'),
      ({'inputs': good | {'tags': _nested(500)}}, 400, 'nested more than 2 deep'),
      ({'instances': [good | {'item': {'b64': _nested(500)}}]}, 400, "'item', sample 0: found"),
      ({'inputs': dict.fromkeys(map(str, range(6_000)))}, 400, "'age' is missing; .* found '0'"),
      (
        {'instances': [{'x' * 90_000: 1}]},
        400,
        "'age' is missing; .* found 'x{80}', which",
      ),
      ({'instances': [good], 'signature_name': _nested(500)}, 400, 'signature_name'),
      ([1], 400, 'the body: found a JSON list; wanted an object'),
      ({}, 400, "wanted either 'instances' or 'inputs'"),
      ({'instances': []}, 400, 'at least one'),
      ({'instances': [{'item': 1}]}, 400, "column 'age' is missing; a missing value is null or ''"),
      ({'instances': [good | {'item': 1.5}]}, 400, "'item', sample 0: found 1.5; wanted a string"),
      ({'instances': [good | {'price': 'x'}]}, 400, "'price', sample 0: found 'x'; wanted a fin"),
      ({'instances': [good | {'price': 1e39}]}, 400, "'price', sample 0: found 1e\\+39"),
      ({'instances': [good | {'topics': 'x:oops'}]}, 400, "'topics', sample 0.*NAME:NUMBER"),
      ({'instances': [good | {'item': '\ud800'}]}, 400, "'item': found a string that is not Uni"),
      (
        {'inputs': good | {'item': ['1', '2'], 'tags': ['', '', '']}},
        400,
        "'item' with 2.*'tags' with 3",
      ),
      ({'instances': [good], 'signature_name': 'x'}, 400, 'signature_name'),
      ({'instances': [good] * 201}, 413, 'found 201 samples; wanted at most 200'),
      (b' ' * 100_001, 413, 'found more than 100000 bytes'),
    ):
      with self.subTest(text):
        found, answer = self.client.predict(body)
        self.assertEqual(found, status, answer)
        self.assertRegex(answer['error'], text)
        self.assertNotIn('\n', answer['error'])
        self.assertLess(len(answer['error']), 500)
    status, answer, _ = self.client.ask('GET', '/v1/models/crt')
    self.assertEqual(status, 404)
    self.assertIn("the nearest valid name is 'ctr'", answer.decode())

  def test_json_is_what_a_log_may_hold(self):
    """A request is refused where a line of a log is, and for nothing else."""
    good = {name: self.records[0][name] for name in COLUMNS}
    for changes, is_good in (
      ({}, True),
      ({'item': '1, "item": 2'}, False),
      ({'item': '1, "item": 1'}, False),
      ({'price': '1, "price": 2'}, False),
      ({'price': 'NaN'}, False),
      ({'price': '-Infinity'}, False),
      ({'more': 'Infinity'}, False),
      ({'more': '1, "more": 2'}, True),
      ({'more': '{"a": 1, "a": 2}'}, True),
      ({'topics': '{"x": 1, "x": 2}'}, False),
      ({'tags': '["x", NaN]'}, False),
    ):
      texts = {n: json.dumps(v) for n, v in good.items()} | changes
      line = f'{{{", ".join(f"{json.dumps(n)}: {text}" for n, text in texts.items())}}}'
      block = jsonl_format.of_messages([line.encode()], self.cfg.data, dict.fromkeys(COLUMNS, ''))
      self.assertEqual(not block.malformed, is_good, line)
      for body in f'{{"instances": [{line}]}}', f'{{"inputs": {line}}}':
        if changes.get('topics') and 'inputs' in body:
          continue
        status, answer = self.client.predict(body.encode())
        self.assertEqual(status, 200 if is_good else 400, f'{body}: {answer}')
    status, answer = self.client.predict(b'{"inputs": {}, "inputs": {}}')
    self.assertEqual((status, answer['error'][:35]), (400, "the body: found the name 'inputs' t"))

  def test_a_name_that_some_samples_lack_is_missing_there(self):
    rows = [{name: record[name] for name in COLUMNS} for record in self.records[:40]]
    some = [{n: v for n, v in row.items() if (i + len(n)) % 3} for i, row in enumerate(rows)]
    whole = [{name: row.get(name) for name in COLUMNS} for row in some]
    answers = [self.client.predict({'instances': each})[1] for each in (some, whole)]
    self.assertEqual(answers[0], answers[1])
    self.assertLen(answers[0]['predictions'], 40)

  def test_the_server_describes_itself(self):
    paths = json.loads(self.client.ask('GET', '/')[1])
    status, body, _ = self.client.ask('GET', paths['metadata'].removeprefix('GET '))
    self.assertEqual(status, 200)
    found = json.loads(body)
    definition = found['metadata']['signature_def']['signature_def']['serving_default']
    self.assertCountEqual(definition['inputs'], COLUMNS)
    kinds = {name: tensor['dtype'] for name, tensor in definition['inputs'].items()}
    self.assertEqual((kinds['item'], kinds['price']), ('DT_STRING', 'DT_FLOAT'))
    self.assertEqual(list(definition['outputs']), ['probability'])
    self.assertEqual(found['model_spec']['version'], str(self.service.version.sequence))
    example = found['example_request']
    self.assertEqual(self.client.predict(example)[0], 200)
    (row,) = example['instances']
    for name in definition['inputs']:
      self.assertEqual(self.client.predict({'instances': [row | {name: None}]})[0], 200, name)

  def test_a_wrong_method_is_refused_on_every_path_and_logged_in_one_line(self):
    for place in json.loads(self.client.ask('GET', '/')[1]).values():
      right, path = place.split()
      for method in {'GET', 'POST', 'PUT', 'DELETE', 'TRACE'} - {right}:
        with self.subTest(f'{method} {path}'):
          status, answer, *_ = self.client.ask(method, path)
          self.assertEqual((status, list(json.loads(answer))), (405, ['error']))
    for path in ('/v1/models/ctr:classify', '/predict'):
      status, answer, *_ = self.client.ask('POST', path)
      self.assertEqual((status, list(json.loads(answer))), (404, ['error']))
    with served(self.service) as client, self.assertLogs(level='WARNING') as logged:
      for _ in range(9):
        client.ask('GET', '/v1/models/c%0Aoops')
    self.assertLen(logged.output, 1)
    self.assertNotIn('\n', logged.output[0])

  def test_a_kind_of_refusal_takes_a_line_a_minute(self):
    async def refused():
      log, loop = SparingLog(), asyncio.get_running_loop()
      with mock.patch.object(loop, 'call_later') as minute:
        for texts in (['a', 'b', 'c'], ['d'], [], ['e']):
          for text in texts:
            log.log('one', logging.WARNING, text)
          _, tell, *arguments = minute.call_args.args
          if texts != ['e']:
            tell(*arguments)
        log.log('other', logging.ERROR, 'f')

    with self.assertLogs(level='WARNING') as logged:
      asyncio.run(refused())
    told = [line.partition(':absl:')[2] for line in logged.output]
    more = ['2 more in 60 s; the last: c', '1 more in 60 s; the last: d']
    self.assertEqual(told, ['a', *more, 'e', 'f'])

  def test_bytes_that_are_no_request_are_told_like_refusals(self):
    with served(self.service) as client, self.assertLogs(level='WARNING') as logged:
      for _ in range(9):
        with socket.create_connection(('127.0.0.1', client.port)) as stranger:
          stranger.sendall(b'\x16\x03\x01 what?\r\n\r\n')
          self.assertStartsWith(stranger.recv(1000), b'HTTP/1.1 400')
    told = "refused HTTP: 400 'Invalid HTTP request received.'"
    self.assertEqual(logged.output, [f'WARNING:absl:{told}'])

  def test_what_samples_share_counts_for_each(self):
    column = {name: [record[name] for record in self.records] for name in COLUMNS}
    one = COLUMNS[0]
    deep = None
    for _ in range(900):
      deep = {'a': deep}
    for body, status, wanted in (
      ({'inputs': column | {one: 'x' * 1500}}, 200, None),
      ({'inputs': column | {one: 'x' * 2800}}, 413, '75 samples that share 2,808 bytes; wanted a'),
      ({'inputs': column | {one: [['x'] * 700]}}, 413, 'found 75 samples that share 3,508 bytes'),
      (
        {'instances': [{f'c{i}{j}': 1 for j in range(30)} for i in range(100)]},
        413,
        'share 35,540 bytes',
      ),
      ({'inputs': {n: [deep] * 2 for n in column}}, 400, 'sample 0: found {'),
      ({'instances': [{'.'.join('a' * 900): 1}, {'a': deep}]}, 400, "column '"),
    ):
      with self.subTest(wanted):
        found, answer = self.client.predict(body)
        self.assertEqual(found, status, answer)
        self.assertIn(wanted or '', str(answer))

    names = dict.fromkeys(map(str, range(10_001)))
    for body in {'instances': [names]}, {'context': names, 'instances': [{}]}, {'inputs': names}:
      status, answer = self.roomy.predict(body)
      self.assertEqual((status, answer['error'][:19]), (413, 'found 10001 columns'))

  def test_short_requests_do_not_wait_for_long_ones(self):
    entered, ended = threading.Event(), threading.Event()

    class Held:
      """Holds long requests until it is told."""

      version, unknown_columns = self.service.version, self.service.unknown_columns

      def predict(held, request):
        if request.size > 1:
          entered.set()
          ended.wait()
        return self.service.predict(request)

    short, found = self.rows(self.records[:1]), []
    big = {'instances': [r | {'more': 'x' * 300_000} for r in self.records[:2]]}
    shared = {n: [r[n] for r in self.records] for n in COLUMNS} | {'more': 'x' * 4000}
    with served(Held(), Limits(concurrency=8)) as client:

      def ask(body):
        found.append(Client(client.port).predict(body)[0])

      for bodies in ([big, big], [{'inputs': shared}] * 2):
        with contextlib.ExitStack() as stack:
          for body in bodies:
            thread = threading.Thread(target=ask, args=[body])
            thread.start()
            stack.callback(thread.join)
          stack.callback(ended.set)
          entered.wait()
          while not client.ask('GET', '/metrics')[1].count(b'ctr_requests_under_way 2.0'):
            pass
          self.assertEqual(client.predict(short)[0], 200)
          status, answer = client.predict(bodies[0])
          self.assertEqual(status, 429)
          self.assertIn('2 long requests are under way', answer['error'])
        entered.clear()
        ended.clear()
    self.assertEqual(found, [200] * 4)

  def test_fuzzed_requests_end_in_an_answer(self):
    good = self.rows(self.records[:3])
    statuses = [
      self.client.predict(body)[0] for body in requests(random.Random(1), good, count=400)
    ]
    self.assertContainsSubset({200, 400}, statuses)
    self.assertEmpty(set(statuses) - {200, 400, 413})

  def test_a_client_that_does_not_finish_is_told(self):
    with socket.create_connection(('127.0.0.1', self.client.port)) as slow:
      slow.sendall(b'POST /v1/models/ctr:predict HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{')
      self.assertStartsWith(slow.recv(1000), b'HTTP/1.1 408')

  def test_slow_clients_take_no_place(self):
    heads = (
      b'POST /v1/models/ctr:predict HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{',
      b'POST /v1',
    )
    with served(self.service, Limits(concurrency=2, seconds_to_send=60)) as client:
      with contextlib.ExitStack() as stack:
        for head in heads * 20:
          slow = stack.enter_context(socket.create_connection(('127.0.0.1', client.port)))
          slow.sendall(head)
        self.assertEqual(client.predict(self.rows(self.records[:1]))[0], 200)

  def test_of_too_many_connections_the_longest_idle_ones_end(self):
    with (
      mock.patch.object(http_server, '_MOST', 4),
      served(self.service, Limits(seconds_to_send=60)) as client,
      contextlib.ExitStack() as stack,
    ):
      address = '127.0.0.1', client.port
      idle = [stack.enter_context(socket.create_connection(address, 60)) for _ in range(9)]
      self.assertEqual(client.predict(self.rows(self.records[:1]))[0], 200)
      for one in idle[:6]:
        self.assertEqual(one.recv(1), b'')
      self.assertEqual(client.predict(self.rows(self.records[:1]))[0], 200)

  def test_what_follows_an_answer_keeps_no_connection(self):
    """Such as the rest of a body, byte by byte, or an answer that is not read."""
    with (
      mock.patch.object(http_server, '_SECONDS_IDLE', 0.2),
      served(self.service, Limits(seconds_to_send=0.3)) as client,
      socket.create_connection(('127.0.0.1', client.port)) as slow,
    ):
      slow.settimeout(0.1)
      slow.sendall(b'GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 9999\r\n\r\n')
      with self.assertRaises(ConnectionError):
        for _ in range(100):
          slow.sendall(b'x')
          with contextlib.suppress(TimeoutError):
            if not slow.recv(1000):
              raise ConnectionError

  def test_a_head_must_come_in_time_and_be_short(self):
    with socket.create_connection(('127.0.0.1', self.client.port)) as slow:
      slow.sendall(b'POST /v1')
      self.assertEqual(slow.recv(1000), b'')
    with socket.create_connection(('127.0.0.1', self.client.port)) as talkative:
      with self.assertRaises(ConnectionError):  # its end is not waited for
        talkative.sendall(b'GET /healthz HTTP/1.1\r\nHost: x\r\n')
        while True:
          talkative.sendall(b'X: ' + b'x' * 1000 + b'\r\n')

  def test_bodies_that_arrive_have_a_bound_together(self):
    limits = Limits(body_bytes=1000, concurrency=2, seconds_to_send=60)
    head = b'POST /v1/models/ctr:predict HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n'
    with served(self.service, limits) as client, contextlib.ExitStack() as stack:
      for _ in range(3):
        slow = stack.enter_context(socket.create_connection(('127.0.0.1', client.port)))
        slow.sendall(head + b' ' * 900)
      self.assertStartsWith(slow.recv(1000), b'HTTP/1.1 429')

  def test_what_goes_wrong_inside_is_told_to_the_log_only(self):
    for error in UserError('the store redis://u:secret@x: away'), RuntimeError('secret'):
      service = mock.Mock(version=self.service.version, predict=mock.Mock(side_effect=error))
      with served(service) as client, self.assertLogs(level='ERROR') as logged:
        status, answer = client.predict(self.rows(self.records[:1]))
      self.assertEqual(status, 503 if isinstance(error, UserError) else 500)
      self.assertNotIn('secret', str(answer))
      self.assertIn('secret', str(logged.output))

  def test_no_address_shows_its_password(self):
    store = open_store('redis://:secret@127.0.0.1:1/0', '--store')
    with self.assertRaisesRegex(UserError, 'the store redis://…@127.0.0.1:1/0: ') as raised:
      store.version()
    self.assertNotIn('secret', str(raised.exception))

  def test_only_layers_that_are_named_are_imported(self):
    changed = {'model.interactions': ['linear', {'os.path.Layer': {}}]}
    text = config.dump(make_config(changed))
    with self.assertRaisesRegex(UserError, r'model.interactions.1 names the layer os.path.Layer'):
      Scorer(text)
    with self.assertRaisesRegex(UserError, "'os.path' has no 'Layer'"):
      Scorer(text, ['os.path.Layer'])

  def test_too_many_at_a_time_are_refused(self):
    started, ended = threading.Event(), threading.Event()

    class Held:
      version = self.service.version

      def predict(self, request):
        started.set()
        ended.wait()
        raise UserError('ended')

    with served(Held(), Limits(concurrency=1)) as client:
      body = self.rows(self.records[:1])
      first = threading.Thread(target=lambda: Client(client.port).predict(body))
      first.start()
      started.wait()
      status, answer = client.predict(body)
      ended.set()
      first.join()
      self.assertEqual(status, 429, answer)
      self.assertEqual(client.predict(body)[0], 503)

  def test_requests_that_wait_are_scored_together(self):
    bodies = [self.rows(self.records[:3])]
    for user in self.records[:4]:
      columns = {n: [r[n] for r in self.records] for n in COLUMNS}
      bodies.append({'inputs': columns | {n: [user[n]] for n in CONTEXT}})
    wanted = [self.client.predict(body) for body in bodies]
    asks = [functools.partial(Client.predict, body=body) for body in bodies]
    found, sizes = asked_together(self.service, asks)
    self.assertEqual((found, sizes), (wanted, [3, 4 * len(self.records)]))

  def test_strangers_do_not_change_an_answer(self):
    """Requests that wait together are answered as each alone, to the last bit."""
    rows = [{name: record[name] for name in COLUMNS} for record in self.records]
    objects = [row | {'more': 1, 'tags': ['t1', 't2'], 'topics': {'x1': 0.5}} for row in rows[:4]]
    rng = random.Random(4)
    plain = list(mixed(rng, rows, CONTEXT, 60))
    good, half = self.rows(self.records[:3]), list(mixed(rng, objects, CONTEXT, 12))
    empty = {n: [] if n == 'item' else [rows[0][n]] for n in COLUMNS}
    empties = [{'inputs': empty | changes} for changes in ({}, {'price': ['x']}, {'tags': []})]
    two = {n: [rows[1][n]] if n in CONTEXT else [r[n] for r in rows[1:3]] for n in COLUMNS}
    one_each = [{'inputs': {n: [row[n]] for n in COLUMNS}} for row in rows[:4]]
    odd = list(requests(rng, good, 40))
    for name, bodies in {
      'as many as samples': [good, empties[0], {'inputs': two}],
      'empty ones': [plain[0], *empties, *one_each, *empties[:1]],
      'plain': plain + empties,
      'objects': half + empties,
      'all': plain + half + odd,
    }.items():
      asks = [functools.partial(Client.ask, method='POST', path=PATH, body=b) for b in bodies]
      asks = [lambda client, ask=ask: ask(client)[:2] for ask in asks]
      wanted = [ask(self.roomy) for ask in asks]
      found, sizes = asked_together(self.service, asks)
      for body, one, alone in zip(bodies, found, wanted):
        self.assertEqual(one, alone, f'{name}: {body}')
      self.assertLess(len(sizes), len(bodies) / 2 if name == 'plain' else len(bodies))
      self.assertContainsSubset({200}, {status for status, _ in wanted})

  def test_connections_that_wait_are_answered_when_the_server_stops(self):
    entered, ended = threading.Event(), threading.Event()

    class Busy:
      """Holds the server's event loop, so that connections wait to be accepted."""

      def __getattr__(busy, name):
        return getattr(self.service, name)

      @property
      def not_ready(busy):
        entered.set()
        ended.wait()

    request = json.dumps(self.rows(self.records[:1])).encode()
    head = f'POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(request)}\r\n\r\n'
    with served(Busy()) as client, contextlib.ExitStack() as stack:
      holding = threading.Thread(target=Client(client.port).status)
      holding.start()
      entered.wait()
      waiting = [
        stack.enter_context(socket.create_connection(('127.0.0.1', client.port))) for _ in range(40)
      ]
      for one in waiting:
        one.sendall(head.encode() + request)
      client.server.should_exit = True
      time.sleep(0.2)  # longer than between two looks of uvicorn at should_exit: it looks at once
      ended.set()
      for one in waiting:
        answer = one.makefile('rb').read()  # to the end: the connection closes
        self.assertStartsWith(answer, b'HTTP/1.1 200 OK')
        self.assertIn(b'connection: close', answer)
      holding.join()

  def test_a_server_ends_that_has_many_files_open(self):
    more = 1200  # beyond the 1,024 that select() knows
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit < more + 200:
      resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, more + 1000), most))
      self.addCleanup(resource.setrlimit, resource.RLIMIT_NOFILE, (limit, most))
    with contextlib.ExitStack() as stack:
      for _ in range(more):
        stack.enter_context(open(os.devnull))
      with served(self.service) as client:  # an exception in its thread fails the test
        self.assertEqual(client.ask('GET', '/healthz')[0], 200)

  def test_a_connection_that_cannot_be_accepted_costs_no_other_one(self):
    accept = socket.socket.accept
    errors = [OSError(errno.EMFILE, os.strerror(errno.EMFILE)), ConnectionAbortedError()]

    def accepted(listener):
      if errors:
        raise errors.pop()
      return accept(listener)

    with (
      mock.patch.object(http_server, '_SECONDS_TO_RECOVER', 0.1),
      mock.patch.object(socket.socket, 'accept', accepted),
      self.assertLogs(level='WARNING') as logged,
      served(self.service) as client,
    ):
      self.assertEqual(client.ask('GET', '/healthz')[0], 200)
    (line,) = logged.output  # a client that is gone is none's fault
    self.assertIn('a connection is not accepted: [Errno 24] Too many open files', line)

  def test_a_token_is_asked_for(self):
    with served(self.service, token='secret') as client:
      body = self.rows(self.records[:1])
      self.assertEqual(client.predict(body)[0], 401)
      self.assertEqual(client.predict(body, Authorization='Bearer sécret')[0], 401)
      self.assertEqual(client.predict(body, Authorization='Bearer secret')[0], 200)
      self.assertEqual(client.ask('GET', '/metrics')[0], 401)
      self.assertEqual(client.ask('GET', '/healthz')[0], 200)

  def test_metrics_count_requests(self):
    self.client.predict(self.rows(make_records(self.rng, 3, first_id=5000)))
    status, text, _ = self.client.ask('GET', '/metrics')
    self.assertEqual(status, 200)
    for line in (
      rb'^ctr_requests_total{status="200"} \d+',
      rb'^ctr_request_seconds_bucket{le="0.02"} \d+',
      rb'^ctr_unknown_features_total{slot="user"} \d+',
      rb'^ctr_version \d+',
      rb'^ctr_version_age_seconds \d+',
    ):
      self.assertRegex(text, b'(?m)' + line)

  def test_before_the_first_version(self):
    path = os.path.join(self.folder, 'later')
    store = open_store(path, '--store')
    service = Service(store)
    with served(service) as client:
      for why in ('the server is loading its first version', 'no version is published yet'):
        status, text, _ = client.ask('GET', '/healthz')
        self.assertEqual((status, text), (503, f'{why}\n'.encode()))
        status, text, _ = client.ask('GET', '/v1/models/ctr')
        self.assertEqual((status, json.loads(text)['error']), (503, why))
        status, answer = client.predict(self.rows(self.records[:1]))
        self.assertEqual((status, answer['error']), (503, why))
        service.refresh()
    for why in (
      f'{path}: is not there yet; ctr-publish --to {path} makes it',
      'no base was exported (export.base: true) or published',
    ):
      stop = mock.Mock()
      stop.is_set.side_effect = [False, False, True]
      with self.assertLogs(level='WARNING') as logged:
        service.follow(stop, 0)
      self.assertLen(logged.output, 1)
      self.assertEndsWith(logged.output[0], f'nothing is served yet: {why}')
      os.makedirs(path, exist_ok=True)

  def test_while_the_first_version_is_loaded(self):
    """A run's first export appears only after the server has found none."""
    store, found = MemoryStore(), []
    publisher, is_there = Publisher(self.exports, store), False
    service = Service(store, lambda: publisher.advance() if is_there else None)
    service.refresh()
    self.assertEqual(service.not_ready, 'no version is published yet')
    is_there = True

    def noting(act):
      def noted(*args):
        found.append(service.not_ready)
        return act(*args)

      return noted

    with (
      mock.patch.object(store, '_apply', noting(store._apply)),
      mock.patch.object(service, '_load', noting(service._load)),
    ):
      service.refresh()
    self.assertEqual(found, ['the server is loading its first version'] * 2)
    self.assertIsNone(service.not_ready)

  def test_rows_on_disk_score_alike_and_come_anew_after_damage(self):
    store = MemoryStore(memory_limit=LIMIT, cold_dir=self.folder)
    service, body = Service(store, Publisher(self.exports, store).advance), self.rows(self.records)
    with served(service) as client:
      for _ in range(2):
        service.refresh()
        self.service.refresh()
        self.assertEqual(client.predict(body), self.roomy.predict(body))
        self.assertLess(int(store.view().row_store.bytes()), 1.05 * LIMIT)
        self.train_and_export('delta')
      self.assertGreater(max(cut_scratch_files()), 0)
      with self.assertLogs(level='ERROR') as logged:
        status, answer = client.predict(body)
      self.assertEqual((status, answer), (503, {'error': 'the rows cannot be read now'}))
      self.assertIn(f'--cold_dir: {self.folder}: cannot read the row of key', str(logged.output))
      service.refresh()
      self.service.refresh()
      self.assertEqual(client.predict(body), self.roomy.predict(body))

  def test_mistakes_in_the_limit_are_one_line(self):
    run_dir, nowhere = f'--run_dir={self.cfg.run_dir}', f'{self.folder}/none'
    limit = '--memory_limit=1e9'
    for flags, told in (
      (('--store=x', limit, '--cold_dir=/tmp'), '--cold_dir: found with --store; wanted it with'),
      ((run_dir, limit), '--memory_limit, --cold_dir: found one of them; wanted both'),
      ((run_dir, '--memory_limit=nan', '--cold_dir=/tmp'), '--memory_limit: found nan; wanted'),
      ((run_dir, limit, f'--cold_dir={nowhere}'), f'--cold_dir: found {nowhere}, where no file'),
    ):
      done = commands.run('-m', 'trainer.cli.serve', '--port=0', *flags)
      self.assertRegex(done.stderr, f'^error: {re.escape(told)}[^\n]*\n$')
      self.assertEqual(done.returncode, 2)

  def test_a_new_version_builds_no_model(self):
    """That would hold up requests for 0.2 s and more; the first one of a config builds two."""
    store = MemoryStore()
    Publisher(self.exports, store).advance()
    service, held = Service(store), store.view()
    config = held.config
    with (
      mock.patch('trainer.serving.service.Scorer', wraps=Scorer) as built,
      mock.patch.object(store, 'version', lambda: None),  # so that each look finds another one
    ):
      for text, count in ((config, 2), (f'{config}\n', 4)):
        held.config = text
        for _ in range(4):
          service.refresh()
          self.assertEqual(built.call_count, count)

  def test_an_error_of_the_store_names_what_is_served(self):
    stop = threading.Event()

    def fail():
      stop.set()
      raise UserError('the store is away')

    store = MemoryStore()
    for is_published, wanted in (
      (False, 'nothing is'),
      (True, r'version 1 \(000001-base\) is still'),
    ):
      service = Service(store)
      if is_published:
        Publisher(self.exports, store).advance()
        service.refresh()
      stop.clear()
      with (
        self.assertLogs('absl', 'WARNING') as told,
        mock.patch.object(service, 'refresh', fail),
      ):
        service.follow(stop, 0)
      self.assertRegex(told.records[0].getMessage(), f'^{wanted} served: the store is away$')

  def test_every_answer_is_of_one_version_while_versions_change(self):
    store = open_store(os.path.join(self.folder, 'changing'), '--to', writable=True)
    self._answers_while_versions_change(store)

  @pytest.mark.long
  def test_every_answer_from_memory_is_of_one_version(self):
    self._answers_while_versions_change(MemoryStore())

  @unittest.skipUnless(RedisServer.installed(), 'redis-server is not installed')
  def test_every_answer_from_redis_is_of_one_version(self):
    server = RedisServer()
    self.addCleanup(server.stop)
    self._answers_while_versions_change(open_store(server.url, '--to', writable=True))

  def _answers_while_versions_change(self, store):
    self.addCleanup(store.close)
    publisher, service = Publisher(self.exports, store), Service(store)
    publisher.advance()
    service.refresh()
    stop, ended, answers, came = threading.Event(), threading.Event(), [], threading.Condition()
    follower = threading.Thread(target=service.follow, args=(stop, 0.001))
    follower.start()
    with served(service) as client:

      def ask():
        own = Client(client.port)
        while not ended.is_set():
          answer = own.predict(self.rows(self.records))
          with came:
            answers.append(answer)
            came.notify_all()
        own.close()

      clients = [threading.Thread(target=ask) for _ in range(2)]
      for thread in clients:
        thread.start()
      for kind in ('delta', 'delta', 'base', 'delta'):
        self.train_and_export(kind)
        publisher.advance()
        with came:  # on a busy machine, all might be published before the next answer
          came.wait_for(
            lambda: {a.get('model_version') for _, a in answers} >= {max(self.expected, key=int)},
            60,
          )
      ended.set()
      for thread in clients:
        thread.join()
    stop.set()
    follower.join()
    self.assertEqual({status for status, _ in answers}, {200})
    self.assertGreater(len({answer['model_version'] for _, answer in answers}), 3)
    for _, answer in answers:
      wanted = self.expected[answer['model_version']]
      self.assertAllClose(answer['predictions'], wanted, atol=1e-6, rtol=0)


class ContextTest(tf.test.TestCase, parameterized.TestCase):
  """What all samples share is said once; scores are those of the samples written out."""

  @parameterized.parameters(
    ({'model.interactions': ['linear', 'ffm', {'dnn': {'hidden': [8]}}]},),
    ({'model.interactions': ['linear', 'fm', {'din': {'hidden': [8]}}]},),
    (TASKS | {'model.shared': {'mmoe': {'hidden': [8], 'experts': 2}}},),
  )
  def test_scores_are_the_trainers(self, changes):
    slots = [
      {'name': 'user'},
      {'name': 'item'},
      {'name': 'tags', 'separator': '|', 'pooling': 'mean'},
      {'name': 'topics', 'separator': ';', 'value_separator': ':', 'pooling': 'sqrtn'},
    ]
    if 'din' in str(changes):
      sequence = {'max_length': 3}
      slots += [{'name': 'history', 'separator': '|', 'shares': 'item', 'sequence': sequence}]
    cfg = make_config(
      changes
      | {
        'data.slots': slots,
        'data.dense': [{'name': 'age', 'transform': 'log1p'}, {'name': 'price', 'missing': 0.3}],
        'data.delimiter': '\t',
        'sparse.tables.default.init_scale': 0.4,
        'lifecycle': {'admission': 'count', 'admission_count': 2.0, 'eviction': 'none'},
      }
    )
    rng, folder = np.random.default_rng(7), self.get_temp_dir()

    def some(prefix, separator, suffix=''):
      ids = rng.integers(0, 9, rng.integers(0, 5))
      return separator.join(f'{prefix}{i}{suffix}' for i in ids)

    def record():
      return {
        'user': some('u', '')[:2],
        'item': f'i{rng.integers(9)}',
        'tags': some('t', '|'),
        'topics': some('x', ';', ':0.5'),
        'history': some('i', '|'),
        'age': str(rng.integers(9)) if rng.random() < 0.7 else '',
        'price': f'{rng.random():.2f}' if rng.random() < 0.7 else '',
      }

    def batches(records):
      path = f'{folder}/{len(os.listdir(folder))}.tsv'
      with open(path, 'w', encoding='utf-8') as f:
        labels = [label.name for label in cfg.data.labels] or ['label']
        f.write('\t'.join([*records[0], *labels]) + '\n')
        for i, one in enumerate(records):
          f.write('\t'.join([*one.values(), *(str(int(i % 3 == 0)) for _ in labels)]) + '\n')
      prepare_pass(cfg, path, path + '.pass')
      return PreparedPass(path + '.pass', cfg).batches(BATCH)

    step = TrainStep(cfg, SingleProcess())
    for batch in batches([record() for _ in range(4 * BATCH)]):
      train(step, batch)
    records = [record() for _ in range(20)]
    names = [*(slot['name'] for slot in slots), 'age', 'price']
    for shared in (
      ('user', 'tags', 'history', 'age'),
      ('item', 'topics', 'price'),
      names[:-1],
      [name for name in names if name not in ('age', 'price')],
    ):
      shared = {name: records[0][name] for name in shared if name in names}
      (batch,) = batches([one | shared for one in records])
      wanted = np.reshape(step.predict(step.stage(batch)), [len(records), -1])
      self.assertGreater(np.std(wanted), 1e-3)
      columns = {n: Shared([shared[n]]) if n in shared else [r[n] for r in records] for n in names}
      found = scores(step, cfg, columns, len(records))
      self.assertAllClose(np.stack([*found.values()], 1), wanted, rtol=0, atol=1e-6)
      none = {n: columns[n] if n in shared else [] for n in names}
      self.assertEqual([len(c) for c in scores(step, cfg, none, 0).values()], [0] * len(found))


class OlderExportTest(tf.test.TestCase):
  def test_statistics_of_before_had_no_bounds(self):
    cfg = make_config({'data.dense': [{'name': 'price', 'transform': 'standardise'}]})
    step = TrainStep(cfg, SingleProcess())
    columns = {name: [2.0 if name == 'price' else 'a'] for name in cfg.data.log_columns()}
    embedding, wanted = step.dense.embedding, scores(step, cfg, columns, 1)
    with mock.patch.object(embedding, 'stats', tf.Variable(embedding.stats[:2])):
      self.assertAllEqual(scores(step, cfg, columns, 1), wanted)


class TasksTest(tf.test.TestCase):
  def test_each_task_has_its_score_by_name(self):
    folder = self.get_temp_dir()
    keep = {'lifecycle': {'admission': 'none', 'eviction': 'none', 'base_threshold': 0.0}}
    cfg = make_config(
      TASKS
      | keep
      | {
        'model.shared': {'shared_bottom': {'hidden': [8]}},
        'data.slots': [{'name': 'user'}, {'name': 'item'}],
        'data.dense': [{'name': 'x'}],
      }
    ).model_copy(update={'run_dir': folder})
    rng = np.random.default_rng(0)
    rows = [
      {'user': f'u{u}' if u else '', 'item': int(i), 'x': float(x)}
      for u, i, x in zip(rng.integers(9, size=200), rng.integers(7, size=200), rng.random(200))
    ]
    with open(f'{folder}/log.csv', 'w', encoding='utf-8') as f:
      f.write('user,item,x,click,conversion\n')
      for i, row in enumerate(rows):
        f.write(f'{row["user"]},{row["item"]},{row["x"]},{i % 3 == 0:d},{i % 6 == 0:d}\n')
    prepare_pass(cfg, f'{folder}/log.csv', f'{folder}/pass')
    step = TrainStep(cfg, SingleProcess())
    batches = list(PreparedPass(f'{folder}/pass', cfg).batches(50))
    for batch in batches:
      train(step, batch)
    wanted = step.predict(step.stage(batches[0]))
    stats = step.dense.embedding.stats
    model = {'store': step.store, 'model': step.dense.model, 'dense_stats': stats}
    export_writer.write(cfg, 'base', {'number': 1}, **model)
    path = export_writer.write(cfg, 'saved_model', {'number': 1}, **model).path
    store = MemoryStore()
    service = Service(store, Publisher(f'{folder}/exports', store).advance)
    service.refresh()
    columns = {name: [row[name] for row in rows[:50]] for name in rows[0]}
    with served(service) as client:
      by_row = client.predict({'instances': rows[:50]})[1]['predictions']
      by_column = client.predict({'inputs': columns})[1]['outputs']
    given = {'user': columns['user'], 'item': list(map(str, columns['item']))}
    given = {name: tf.constant(values) for name, values in given.items()}
    given['x'] = tf.constant(columns['x'], tf.float32)
    saved = tf.saved_model.load(path).signatures['serving_default'](**given)
    for t, task in enumerate(('click', 'conversion')):
      for found in ([row[task] for row in by_row], by_column[task], saved[task]):
        self.assertAllClose(found, wanted[:, t], rtol=0, atol=1e-6)


if __name__ == '__main__':
  tf.test.main()
