"""A whole number is one feature, however it is written: in every format, in a frame and served."""

import datetime
import decimal
import json
import os
import re

os.environ.setdefault('TF_USE_LEGACY_KERAS', '1')
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.orc
import pyarrow.parquet
import tensorflow as tf

from ops import keys
from tests.support import small
from trainer import api
from trainer.data.conversion import prepare_pass
from trainer.data.features import hash_keys
from trainer.data.prepared import PreparedPass
from trainer.data.request_columns import WrongRequest
from trainer.errors import BadPass, UserError
from trainer.evaluation.finished_run import open_run
from trainer.serving import rest
from trainer.serving.memory_store import MemoryStore
from trainer.serving.publisher import Publisher
from trainer.serving.service import Service
from trainer.storage import export_writer

WANTED = r'wanted .*a whole number or a text .*dtype=str'


def canonical(text):
  """The text that is hashed, in plain Python."""
  text = text.strip(' \t\r\n\v\f')
  match = re.fullmatch(r'(-?[0-9]+)\.0+', text)
  return text if not match else '0' if match[1] == '-0' else match[1]


def example(value):
  feature = tf.train.Feature()
  if isinstance(value, str):
    feature.bytes_list.value.append(value.encode())
  elif isinstance(value, float):
    feature.float_list.value.append(value)
  else:
    feature.int64_list.value.append(value)
  label = tf.train.Feature(int64_list=tf.train.Int64List(value=[1]))
  features = tf.train.Features(feature={'click': label, 'id': feature})
  return tf.train.Example(features=features).SerializeToString()


class WholeNumbersTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.cfg = self.make_config()
    rng = np.random.default_rng(7)
    small = [0, 1, -1, 10, 100, -120, *rng.integers(-(2**24), 2**24, 20).tolist()]
    self.large = [2**53 - 1, -(2**53) + 1, *rng.integers(-(2**53), 2**53, 20).tolist()]
    self.small = small

  def make_config(self, **slot):
    return small.config(data={'label': 'click', 'slots': [{'name': 'id'} | slot]})

  def path(self, name):
    return os.path.join(self.get_temp_dir(), name)

  def keys_of(self, name, cfg=None):
    prepare_pass(cfg or self.cfg, self.path(name), self.path('out'))
    return next(PreparedPass(self.path('out')).batches(999)).keys

  def write(self, name, values):
    """Writes a column of values in the format that the suffix says."""
    path = self.path(name)
    suffix = os.path.splitext(name)[1]
    if suffix in ('.parquet', '.orc'):
      values = values if isinstance(values, pa.Array) else pa.array(values)
      table = pa.table({'click': pa.array([1] * len(values)), 'id': values})
      {'.parquet': pa.parquet.write_table, '.orc': pa.orc.write_table}[suffix](table, path)
    elif suffix == '.tfrecord':
      with tf.io.TFRecordWriter(path) as writer:
        for value in values:
          writer.write(example(value))
    else:
      lines = {
        '.csv': lambda v: f'1,{v}\n',
        '.jsonl': lambda v: json.dumps({'click': 1, 'id': v}) + '\n',
        '.libsvm': lambda v: f'1 {v}:1\n',
      }[suffix]
      with open(path, 'w', encoding='utf-8') as f:
        f.write('click,id\n' * (suffix == '.csv') + ''.join(map(lines, values)))

  def test_texts_hash_as_in_a_serving_graph(self):
    rng = np.random.default_rng(1)
    texts = ['5.', '.0', '-.0', '-0.0', '--1.0', '+5.0', '1.0.0', '01.0', '1e3', '0', '-0', '٣.0']
    texts += [' 5.0\t', '5.0x', 'x5.0', '5 .0', '5.0\n', '5\n.0', '0.0', '00.00', '5.00\0', '5.01']
    texts += [''.join(rng.choice(list('-0019..'), rng.integers(1, 9))) for _ in range(3000)]
    raw = [t.encode() for t in texts]
    offsets = np.cumsum([0, *map(len, raw)]).astype(np.int32)
    found = keys.text_keys(np.frombuffer(b''.join(raw), np.uint8), offsets, 3)
    self.assertAllEqual(found, hash_keys(raw, 3))
    wanted = tf.strings.to_hash_bucket_fast([canonical(t) for t in texts], 1 << 52)
    self.assertAllEqual(found & ((1 << 52) - 1), wanted)

  def test_every_format_gives_the_same_keys(self):
    small, large = self.small, [*self.small, *self.large]
    spellings = {
      name: (make, large)
      for name, make in {
        'int.csv': int,
        'float.csv': lambda n: f'{n}.0',
        'zeros.csv': lambda n: f' {n}.000',
        'quoted.csv': lambda n: f'"{n}.0"',
        'int.jsonl': int,
        'float.jsonl': float,
        'text.jsonl': lambda n: f'{n}.00',
        'mixed.jsonl': lambda n: (int, float, str)[n % 3](n),
        'list.jsonl': lambda n: [float(n)],
        'map.jsonl': lambda n: {f'{n}.0': 1},
        'int.parquet': int,
        'float.parquet': float,
        'text.parquet': lambda n: f'{n}.0',
        'decimal.parquet': lambda n: decimal.Decimal(n).quantize(decimal.Decimal('1.00')),
        'list.parquet': lambda n: [float(n)],
        'float.orc': float,
        'int.orc': int,
        'text.orc': lambda n: f'{n}.0',
        'int.tfrecord': int,
        'text.tfrecord': lambda n: f'{n}.0',
      }.items()
    } | {'float.tfrecord': (float, [n for n in small if abs(n) < 2**24])}
    for name, (make, numbers) in spellings.items():
      with self.subTest(name):
        self.write(name, [make(n) for n in numbers])
        self.assertAllEqual(self.keys_of(name), hash_keys([str(n) for n in numbers], 1))
    floats = pa.array(list(map(float, large)))
    wanted = hash_keys([str(n) for n in large], 1)
    for kind, array in {
      'dictionary': floats.dictionary_encode(),
      'map': pa.array([[(float(n), 1.0)] for n in large], pa.map_(pa.float64(), pa.float64())),
      'categories': pa.array([[float(n)] for n in large], pa.list_(pa.float64())),
    }.items():
      with self.subTest(kind):
        self.write('one.parquet', array)
        self.assertAllEqual(self.keys_of('one.parquet'), wanted)
    with self.subTest('float32'):
      numbers = [n for n in small if abs(n) < 2**24]
      self.write('one.parquet', pa.array(numbers, pa.float32()))
      self.assertAllEqual(self.keys_of('one.parquet'), hash_keys([str(n) for n in numbers], 1))
    with self.subTest('libsvm'):
      for form in ('{}', '{}.0'):
        self.write('one.libsvm', [form.format(abs(n)) for n in small])
        found = self.keys_of('one.libsvm', self.make_config(column='features'))
        self.assertAllEqual(found, hash_keys([str(abs(n)) for n in small], 1))
    with self.subTest('several in a field'):
      cfg = self.make_config(separator='|', value_separator=':')
      self.write('one.csv', [f'{n}.0:0.5|{n}:2' for n in small])
      wanted = np.repeat(hash_keys(list(map(str, small)), 1), 2)
      self.assertAllEqual(self.keys_of('one.csv', cfg), wanted)

  def test_other_floats_are_refused_with_file_column_and_remedy(self):
    for value in (1.5, -0.25, 1e-9, 2.0**53, -1e300):
      for name, values in {
        'a.jsonl': [7, value],
        'b.jsonl': [[7, 8], [value]],
        'a.parquet': [7.0, value],
        'b.parquet': [[7.0], [8.0, value]],
        'a.orc': [7.0, value],
        'a.tfrecord': [7.0, value],
      }.items():
        with self.subTest(name, value=value):
          self.write(name, values)
          with self.assertRaisesRegex(BadPass, f"{name}:2: .*'id'.*{WANTED}"):
            self.keys_of(name)
    self.write('a.parquet', pa.array([1.0, 2.0**24], pa.float32()))
    with self.assertRaisesRegex(BadPass, f"a.parquet:2: column 'id': found 16777216.0; {WANTED}"):
      self.keys_of('a.parquet')
    self.write('a.csv', ['1.5', '1.50', '2.5e3'])  # texts
    self.assertAllEqual(self.keys_of('a.csv'), hash_keys(['1.5', '1.50', '2.5e3'], 1))

  def test_missing_floats_and_groups(self):
    cfg = self.cfg.model_copy(update={'data': self.cfg.data.model_copy(update={'group': 'id'})})
    groups = []
    for values in ([5, None, 7], [5.0, None, 7.0], [5.0, float('nan'), 7.0], ['5.0', '', '7']):
      self.write('a.parquet', values)
      prepare_pass(cfg, self.path('a.parquet'), self.path('out'))
      batch = next(PreparedPass(self.path('out')).batches(9))
      self.assertAllEqual(batch.keys, hash_keys(['5', '7'], 1))
      groups.append(batch.group.tolist())
    self.assertEqual(groups, [groups[0]] * 4)

  def test_a_time_is_one_feature_in_every_unit(self):
    times = {
      '2024-01-31 05:00:00': 1706677200000000000,
      '2024-01-31 05:00:00.5': 1706677200500000000,
      '1969-12-31 23:59:58.12': -1880000000,
      '2024-01-31 05:00:00.000001': 1706677200000001000,
      '2024-01-31 05:00:00.00000001': 1706677200000000010,
    }
    for name in ('one.parquet', 'one.orc'):
      zones = {None: '', 'UTC': 'Z'}
      if name == 'one.parquet':  # ORC has no other zones
        zones |= {'Etc/UTC': '+0000', '+00:00': '+0000'}
      for zone, mark in zones.items():
        for unit, digits in {'s': 0, 'ms': 3, 'us': 6, 'ns': 9}.items():
          held = {
            t: n // 10 ** (9 - digits) for t, n in times.items() if not n % 10 ** (9 - digits)
          }
          with self.subTest(name, unit=unit, zone=zone):
            self.write(name, pa.array(held.values(), pa.timestamp(unit, zone)))
            wanted = hash_keys([text + mark for text in held], 1)
            self.assertAllEqual(self.keys_of(name), wanted)
    for zone, text in (
      ('+05:30', '2024-01-31 10:30:00+0530'),
      ('-01:00', '2024-01-31 04:00:00-0100'),
    ):
      self.write('one.parquet', pa.array([1706677200], pa.timestamp('s', zone)))
      self.assertAllEqual(self.keys_of('one.parquet'), hash_keys([text], 1))
    self.write('one.parquet', pa.array([0], pa.timestamp('s', 'Mars/X')))
    with self.assertRaisesRegex(UserError, r'tz=Mars/X\]; wanted a time zone that is known here'):
      self.keys_of('one.parquet')
    for kind in (pa.time32('s'), pa.time32('ms'), pa.time64('us'), pa.time64('ns')):
      with self.subTest(kind):
        self.write('one.parquet', pa.array([datetime.time(5, 1), datetime.time(5, 20, 30)], kind))
        wanted = hash_keys(['05:01:00', '05:20:30'], 1)
        self.assertAllEqual(self.keys_of('one.parquet'), wanted)
    self.write('one.parquet', pa.array([5], pa.duration('s')))
    with self.assertRaisesRegex(
      UserError, r"column 'id': found values of type duration\[s\]; wanted"
    ):
      self.keys_of('one.parquet')

  def test_a_run_predicts_serves_and_exports_alike(self):
    ids = np.random.default_rng(3).integers(-20, 20, 400)
    table = pd.DataFrame({'click': (ids % 3 == 0).astype(int), 'id': ids})
    table.to_csv(self.path('log.csv'), index=False)
    data = {'train': [self.path('log.csv')], 'label': 'click', 'slots': [{'name': 'id'}]}
    run = api.fit(small.tree(data=data, lifecycle={'base_threshold': 0}), run_dir=self.path('run'))
    numbers = list(range(-20, 20))
    wanted = run.predict(pd.DataFrame({'id': numbers}))
    self.assertGreater(np.std(wanted), 0.01)
    with open_run(run.run_dir) as job:
      model = {'store': job.step.store, 'model': job.step.dense.model}
      model |= {'dense_stats': job.step.dense.embedding.stats}
      export_writer.write(job.cfg, 'base', {'number': 1}, **model)
      path = export_writer.write(job.cfg, 'saved_model', {'number': 1}, **model).path
    store = MemoryStore()
    service = Service(store, Publisher(f'{run.run_dir}/exports', store).advance)
    service.refresh()
    signature = tf.saved_model.load(path).signatures['serving_default']

    def served(values):
      body = json.dumps({'inputs': {'id': values}}).encode()
      return service.predict(rest.parse(body, 99))[0].outputs['probability']

    for name, values in {
      'integers': numbers,
      'floats': list(map(float, numbers)),
      'float texts': [f'{n}.0' for n in numbers],
      'texts': list(map(str, numbers)),
      'objects': [(int, float, str)[n % 3](n) for n in numbers],
    }.items():
      with self.subTest(name):
        self.assertAllEqual(run.predict(pd.DataFrame({'id': values})), wanted)
        self.assertAllClose(served(values), wanted, rtol=0, atol=1e-6)
        self.assertAllClose(served([[v] for v in values]), wanted, rtol=0, atol=1e-6)
        if 'text' in name:
          found = signature(id=tf.constant(values))['probability']
          self.assertAllClose(found, wanted, rtol=0, atol=1e-6)
    for value in (1.5, 2.0**53):
      with self.assertRaisesRegex(
        WrongRequest, f'found {re.escape(str(value))}; wanted a string, a wh'
      ):
        served([1.0, value])
    frame = pd.DataFrame({'id': np.array(numbers, np.float32)})
    self.assertAllEqual(run.predict(frame), wanted)
    for value in (1.5, 2.0**53, np.inf):
      told = f"column 'id': found {re.escape(str(value))}; {WANTED}"
      with self.assertRaisesRegex(UserError, told):
        run.predict(pd.DataFrame({'id': [1.0, None, value]}))


if __name__ == '__main__':
  tf.test.main()
