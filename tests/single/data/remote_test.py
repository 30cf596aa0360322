"""Logs at remote places, read from an S3 endpoint on loopback."""

import gzip
import math
import os
import socket
import types
from unittest import mock

import boto3
import numpy as np
import pyarrow as pa
import pyarrow.orc
import pyarrow.parquet
import tensorflow as tf

from tests.support import small
from tests.support.s3 import S3
from trainer.comm.communicator import SingleProcess
from trainer.data import file_system, pass_files
from trainer.data.conversion import prepare_pass
from trainer.data.passes import Pass, announced, passes
from trainer.errors import BadPass, ConfigError, UserError
from trainer.job.stream import Stream, TrainPass, Wait
from trainer.storage.bucket import Bucket
from trainer.training import ledger
from trainer.training.run_state import Progress


def make_config(**data):
  return small.config(data={'label': 'click'} | data)


class RemoteTest(tf.test.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.s3 = cls.enter_context(S3())
    cls.client = boto3.client('s3')

  def setUp(self):
    super().setUp()
    self.bucket = self.id().rpartition('.')[2].replace('_', '-')  # pyarrow's clients live for ever
    self.client.create_bucket(Bucket=self.bucket)
    self.enter_context(mock.patch.object(file_system, 'SECONDS_BETWEEN_ATTEMPTS', 0))

  def put(self, name, body=b''):
    self.client.put_object(Bucket=self.bucket, Key=name, Body=body)
    return self.url(name)

  def url(self, name=''):
    return f's3://{self.bucket}/{name}'

  def columns_of(self, cfg, raw):
    out = os.path.join(self.get_temp_dir(), 'out')
    meta = prepare_pass(cfg, raw, out)
    return {k: meta[k] for k in ('samples', 'features', 'dense', 'arrays')}

  def test_every_format_reads_the_same_as_local(self):
    rng = np.random.default_rng(0)
    users, items, clicks = rng.integers(0, [[99999], [999], [2]], [3, 20000])
    table = pa.table({'click': clicks, 'user': users, 'item': items})
    csv = 'click,user,item\n' + ''.join(f'{c},{u},{i}\n' for u, i, c in zip(users, items, clicks))
    local = os.path.join(self.get_temp_dir(), 'day')
    with open(local, 'w', encoding='utf-8') as f:
      f.write(csv)
    with tf.io.TFRecordWriter(local + '.tfrecord') as writer:
      for row in table.slice(0, 20000).to_pylist():
        feature = {
          k: tf.train.Feature(int64_list=tf.train.Int64List(value=[v])) for k, v in row.items()
        }
        example = tf.train.Example(features=tf.train.Features(feature=feature))
        writer.write(example.SerializeToString())
    pa.parquet.write_table(table, local + '.parquet', row_group_size=5000)
    pa.orc.write_table(table, local + '.orc')
    for suffix, data in {
      '.csv': csv.encode(),
      '.csv.gz': gzip.compress(csv.encode()),
      '.jsonl': ''.join(
        f'{{"click": {c}, "user": {u}, "item": {i}}}\n' for u, i, c in zip(users, items, clicks)
      ).encode(),
    }.items():
      with open(local + suffix, 'wb') as f:
        f.write(data)
    cfg = make_config()
    want = self.columns_of(cfg, local)
    with mock.patch('trainer.data.text_blocks.BLOCK_BYTES', 64 << 10):
      for suffix in ('.csv', '.csv.gz', '.jsonl', '.tfrecord', '.parquet', '.orc'):
        with self.subTest(suffix):
          with open(local + suffix, 'rb') as f:
            remote = self.put('day' + suffix, f.read())
          self.s3.losing = 3
          self.assertEqual(self.columns_of(cfg, remote), want)
          self.assertEqual(self.s3.losing, 0)

  def test_passes_of_patterns(self):
    for name in (
      'log/dt=2024-02-10/b.csv',
      'log/dt=2024-02-09/part-9',
      'log/dt=2024-02-09/part-10',
    ):
      self.put(name, b'x')
    cfg = make_config(day_pattern=r'dt=(\d+-\d+-\d+)')
    days = passes(cfg.data, [self.url('log/dt=*')], 'data.train')
    self.assertEqual(
      days,
      [
        Pass('dt=2024-02-09', self.url('log/dt=2024-02-09'), 20240209),
        Pass('dt=2024-02-10', self.url('log/dt=2024-02-10'), 20240210),
      ],
    )
    self.assertEqual(
      [os.path.basename(f.path) for f in pass_files.files_of(days[0].path)], ['part-9', 'part-10']
    )
    (one,) = passes(cfg.data, [self.url('log/*/*.csv')], 'data.train')
    self.assertEqual(one, Pass('dt=2024-02-10/b', self.url('log/dt=2024-02-10/b.csv'), 20240210))
    self.assertEqual(
      passes(cfg.data, [self.url('log//dt=2024-02-10/b.csv')], 'data.test')[0].name, 'b'
    )
    with self.assertRaisesRegex(ConfigError, r"data.train: found no file that matches 's3://.*\*'"):
      passes(cfg.data, [self.url('nothing/*')], 'data.train')
    with self.assertRaisesRegex(UserError, 'no such file'):
      pass_files.files_of(self.url('nothing'))

  def test_entries_of_the_ledger(self):
    local = os.path.join(self.get_temp_dir(), 'parts')
    os.makedirs(local)
    for name, body in (('part-10', b'b' * 99), ('part-9', b'a')):
      with open(os.path.join(local, name), 'wb') as f:
        f.write(body)
      self.put('parts/' + name, body)
    want = ledger.entry_of(Pass('parts', local), 0)
    found = ledger.entry_of(Pass('parts', self.url('parts')), 0)
    self.assertEqual((found.path, found.content), (self.url('parts'), want.content))
    self.assertEqual(found.size, 100)

  def test_markers_announce_remote_passes(self):
    for name in ('a.csv', 'a.csv.done', 'h/b.csv', 'h/c.csv', 'h/_SUCCESS', 'd.csv', 'x.csv.done'):
      self.put('watched/' + name)
    cfg = make_config(watch=self.url('watched'))
    found, missing, wrong = announced(cfg.data)
    self.assertEqual([one.name for one in found], ['a', 'h/b', 'h/c'])
    self.assertEqual(found[1].marker, self.url('watched/h/_SUCCESS'))
    self.assertEqual((missing, wrong), ([self.url('watched/x.csv')], {}))
    self.assertLess(
      abs(file_system.modified(found[0].marker) - file_system.modified(self.url('watched/d.csv'))),
      60,
    )

  def test_a_bucket_that_does_not_exist(self):
    """Pyarrow's client of gs:// then says so as if a file were missing."""
    with mock.patch.object(file_system, 'open_to_write', side_effect=FileNotFoundError):
      with self.assertRaisesRegex(UserError, 'run_dir gs://none/run: there is no such bucket'):
        Bucket('gs://none/run', self.get_temp_dir()).take()

  def test_a_bucket_that_accepts_and_never_answers(self):
    """A process that is to stop tries once, and the client gives up after some seconds."""
    self.addCleanup(file_system.attempt_for, math.inf)
    with socket.create_server(('127.0.0.1', 0)) as silent:
      endpoint = {'AWS_ENDPOINT_URL': f'http://127.0.0.1:{silent.getsockname()[1]}'}
      self.enter_context(mock.patch.dict(os.environ, endpoint))
      file_system.attempt_for(0)
      with self.assertRaisesRegex(UserError, 's3://silent/x: cannot be read after 1 attempt: .*'):
        file_system.exists('s3://silent/x')

  def test_a_run_that_another_has_claimed(self):
    bucket = Bucket(self.url('run'), self.get_temp_dir())
    bucket.take()
    bucket.upload()
    for body, wanted in (
      (b'{"process": 7, "host": "a\\nb", "time": 0}', r'process 7 on host a\\nb trains into it'),
      (b'{"process": 7}', 'its trained_by.json was overwritten'),
      (b'[]', 'its trained_by.json was overwritten'),
      (b'\xff', 'its trained_by.json was overwritten'),
    ):
      self.put('run/trained_by.json', body)
      with self.assertRaisesRegex(
        UserError, f'^run_dir {self.url("run")}: {wanted}.*this one ends$'
      ):
        bucket.upload()
    self.client.delete_object(Bucket=self.bucket, Key='run/trained_by.json')
    with self.assertRaisesRegex(UserError, 'its trained_by.json was deleted; this one ends'):
      bucket.upload()

  def test_a_watched_bucket(self):
    """It is listed now and then, and waited for where it cannot be."""
    now, state = 1e9, types.SimpleNamespace(progress=Progress(), ledger=ledger.Ledger())
    cfg = make_config(watch=self.url('watched'))
    stream = Stream(cfg, SingleProcess(), state, lambda *told: None, lambda: now)

    def taken():
      found = []
      while isinstance(action := stream.next(), TrainPass):
        found.append(action.data_pass.name)
        stream.trained()
      self.assertIsInstance(action, Wait)
      return found

    def announce(name):
      self.put(f'watched/{name}.csv', name.encode())
      self.put(f'watched/{name}.csv.done')

    announce('a')
    announce('h/b')
    self.assertEqual(taken(), ['a', 'h/b'])
    announce('c')
    asked = len(self.s3.requests)
    now += 9
    self.assertEqual(taken(), [])
    self.assertLen(self.s3.requests, asked)
    now += 2
    self.s3.losing = 1000
    with self.assertLogs(level='WARNING') as logs:
      self.assertEqual(taken(), [])
    self.assertRegex(logs.output[0], r's3://.*watched: .*; waiting for it')
    self.s3.losing = 0
    self.assertEqual(taken(), ['c'])
    restarted = types.SimpleNamespace(
      progress=state.progress, ledger=ledger.Ledger(state.ledger.state())
    )
    stream = Stream(cfg, SingleProcess(), restarted, lambda *told: None, lambda: now)
    self.assertEqual(taken(), [])

  def test_what_is_wrong_is_one_line(self):
    cfg = make_config()
    with self.assertRaisesRegex(BadPass, 'not a Parquet file'):
      self.columns_of(cfg, self.put('x.parquet', b'x' * 999))
    with self.assertRaisesRegex(BadPass, r'day.csv.gz: cannot be read'):
      self.columns_of(cfg, self.put('day.csv.gz', gzip.compress(b'click,user\n' * 9999)[:-9]))
    with self.assertRaisesRegex(
      UserError, r's3x://b/x: cannot be reached: Unrecognized filesystem'
    ):
      pass_files.files_of('s3x://b/x')
    with self.assertRaisesRegex(UserError, "'prepared' wants a local path"):
      passes(make_config(format='prepared').data, [self.put('x.csv')], 'data.train')

  def test_a_connection_that_stays_lost(self):
    self.enter_context(mock.patch.object(file_system, 'ATTEMPTS', 1))
    bodies = {'x.csv': b'click,user,item\n' + b'1,2,3\n' * 99, 'x.parquet': b'PAR1' * 99}
    for name, body in bodies.items():
      remote = self.put(name, body)
      with self.subTest(name):
        self.s3.losing = 1000
        with self.assertRaisesRegex(
          UserError, rf'^s3://.*{name}: cannot be read after 1 attempt: .*NETWORK_CONNECTION'
        ) as raised:
          self.columns_of(make_config(), remote)
        self.assertNotIsInstance(raised.exception, BadPass)
        self.assertIsInstance(raised.exception.__cause__, OSError)
    self.s3.losing = 0


if __name__ == '__main__':
  tf.test.main()
