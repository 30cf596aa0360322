"""Every format gives the same prepared pass; each against a reader that is not ours."""

import gzip
import io
import json
import os

os.environ.setdefault('TF_USE_LEGACY_KERAS', '1')
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.orc
import pyarrow.parquet
import sklearn.datasets
import tensorflow as tf

from tests.support import small
from trainer.data.conversion import prepare_pass
from trainer.data.features import hash_keys
from trainer.data.prepared import PreparedPass
from trainer.errors import BadPass, UserError


def make_config(**data):
  return small.config(data={'label': 'click'} | data)


def example(record):
  """A tf.Example; None is left out, lists are several values."""
  features = {}
  for name, value in record.items():
    values = [v for v in (value if isinstance(value, list) else [value]) if v is not None]
    if values and isinstance(values[0], str):
      features[name] = tf.train.Feature(
        bytes_list=tf.train.BytesList(value=[v.encode() for v in values])
      )
    elif values and isinstance(values[0], int):
      features[name] = tf.train.Feature(int64_list=tf.train.Int64List(value=values))
    elif values:
      features[name] = tf.train.Feature(float_list=tf.train.FloatList(value=values))
  return tf.train.Example(features=tf.train.Features(feature=features))


class FormatsTestCase(tf.test.TestCase):
  def path(self, *names):
    return os.path.join(self.get_temp_dir(), *names)

  def write(self, name, content):
    os.makedirs(os.path.dirname(self.path(name)), exist_ok=True)
    with open(self.path(name), 'wb') as f:
      f.write(content if isinstance(content, bytes) else content.encode())
    return self.path(name)

  def write_tfrecord(self, name, records):
    options = 'GZIP' if name.endswith('.gz') else ''
    with tf.io.TFRecordWriter(self.path(name), options) as writer:
      for record in records:
        writer.write(record if isinstance(record, bytes) else example(record).SerializeToString())
    return self.path(name)

  def prepare(self, cfg, raw):
    meta = prepare_pass(cfg, raw, self.path('out'))
    return meta, PreparedPass(self.path('out'), cfg)

  def columns_of(self, cfg, raw):
    """The bytes of a prepared pass's files but meta.json, and what meta.json says of them."""
    meta, _ = self.prepare(cfg, raw)
    files = {}
    for name in meta['arrays']:
      with open(self.path('out', name + '.npy'), 'rb') as f:
        files[name] = f.read()
    return files, {k: meta[k] for k in ('samples', 'features', 'dense', 'arrays')}


def made_up(n, seed=0):
  """n records with blanks and several tags."""
  rng = np.random.default_rng(seed)
  return [
    {
      'click': int(rng.random() < 0.3),
      'user': int(rng.integers(50)),
      'item': None if rng.random() < 0.1 else f'größe {rng.integers(20)}',
      'tags': [f't{t}' for t in rng.integers(9, size=rng.integers(4))],
      'price': None if rng.random() < 0.1 else float(np.float32(rng.integers(1000) / 8)),
    }
    for _ in range(n)
  ]


class SamePassTest(FormatsTestCase):
  def test_same_pass_byte_for_byte(self):
    records = made_up(700)
    slots = [{'name': 'user'}, {'name': 'item'}, {'name': 'tags', 'separator': '|'}]
    cfg = make_config(
      slots=slots, dense=[{'name': 'price', 'transform': 'log1p_standardise'}], group='user'
    )

    def text(value):
      return '' if value is None else '|'.join(value) if isinstance(value, list) else str(value)

    lines = [','.join(records[0])] + [','.join(text(v) for v in r.values()) for r in records]
    csv = '\n'.join(lines) + '\n'
    want = self.columns_of(cfg, self.write('day.csv', csv))
    self.assertIn('splits', want[0])
    table = pa.Table.from_pylist(records)
    pa.parquet.write_table(table, self.path('day.parquet'), row_group_size=100)
    pa.parquet.write_table(table, self.path('plain.parquet'), use_dictionary=False)
    # Dictionaries that are given up on the way.
    pa.parquet.write_table(
      table, self.path('both.parquet'), dictionary_pagesize_limit=64, write_batch_size=8
    )
    pa.orc.write_table(table, self.path('day.orc'))
    decimals = table.set_column(4, 'price', table['price'].cast(pa.decimal128(12, 3)))
    decimals = decimals.set_column(2, 'item', table['item'].dictionary_encode())
    pa.parquet.write_table(decimals, self.path('decimals.parquet'))
    jsonl = ''.join(json.dumps(r, ensure_ascii=i % 2 == 0) + '\n' for i, r in enumerate(records))
    odd = [dict(r, user=str(r['user'])) if i % 3 else r for i, r in enumerate(records)]
    self.write('day.tsv', csv.replace(',', '\t'))
    raws = {
      'csv.gz': self.write('day.csv.gz', gzip.compress(csv.encode())),
      'quoted': self.write(
        'quoted.csv', pd.read_csv(io.StringIO(csv), dtype=str).to_csv(index=False, quoting=1)
      ),
      'parquet': self.path('day.parquet'),
      'plain': self.path('plain.parquet'),
      'both': self.path('both.parquet'),
      'decimals': self.path('decimals.parquet'),
      'orc': self.path('day.orc'),
      'jsonl': self.write('day.jsonl', jsonl),
      'jsonl, line by line': self.write('odd.jsonl', ''.join(json.dumps(r) + '\n' for r in odd)),
      'tfrecord': self.write_tfrecord('day.tfrecord', records),
      'tfrecord.gz': self.write_tfrecord('day.tfrecord.gz', records),
    }
    for name, raw in raws.items():
      with self.subTest(name):
        self.assertEqual(self.columns_of(cfg, raw), want)
        folder, name = os.path.split(raw)
        shouted = os.path.join(folder, name.upper())
        os.rename(raw, shouted)
        self.assertEqual(self.columns_of(cfg, shouted), want)
        os.rename(shouted, raw)
    tsv = cfg.model_copy(update={'data': cfg.data.model_copy(update={'delimiter': '\t'})})
    self.assertEqual(self.columns_of(tsv, self.path('day.tsv')), want)

  def test_a_directory_of_parts_and_hive_columns(self):
    cfg = make_config(slots=[{'name': 'user'}, {'name': 'hour'}])
    self.write('log/dt=2024-01-31/hour=9/part-9.csv', 'click,user\n1,a\n')
    self.write('log/dt=2024-01-31/hour=9/part-10.csv', 'click,user\n0,b\n1,c\n')
    table = pa.table({'click': [0], 'user': ['d']})
    os.makedirs(self.path('log/dt=2024-01-31/hour=10'))
    pa.parquet.write_table(table, self.path('log/dt=2024-01-31/hour=10/part-0.parquet'))
    for extra in ('_SUCCESS', '.part-1.csv.crc', '_temporary/x.csv'):
      self.write(f'log/{extra}', 'x')
    meta, one = self.prepare(cfg, self.path('log'))
    self.assertEqual((meta['samples'], meta['source']['files']), (4, 3))
    batch = next(one.batches(9))
    users, hours = (
      [hash_keys([t], slot).numpy()[0] for t in texts]
      for slot, texts in ((1, 'abcd'), (2, ['9', '9', '9', '10']))
    )
    self.assertAllEqual(batch.keys.reshape(4, 2), np.stack([users, hours], 1))

  def test_missing_values(self):
    cfg = make_config(
      slots=[{'name': 'a'}, {'name': 'b', 'separator': '|'}],
      dense=[{'name': 'x'}],
      missing_values=['\\N', 'NULL', 'NaN', '-1'],
    )
    csv = 'click,a,b,x\n1,\\N,u|NULL,NaN\n0, NULL ,-1,-1\n1,v,,2\n'
    want = self.columns_of(cfg, self.write('day.csv', csv))
    table = pa.table(
      {
        'click': [1, 0, 1],
        'a': [None, 'NULL', 'v'],
        'b': [['u', 'NULL'], ['-1'], None],
        'x': [np.nan, -1.0, 2.0],
      }
    )
    pa.parquet.write_table(table, self.path('day.parquet'))
    self.assertEqual(self.columns_of(cfg, self.path('day.parquet')), want)
    batch = next(PreparedPass(self.path('out')).batches(9))
    self.assertAllEqual(batch.segments, [1, 4])
    self.assertAllEqual(np.isnan(batch.dense[:, 0]), [True, True, False])


class TfrecordTest(FormatsTestCase):
  def test_against_tensorflows_parser(self):
    records = made_up(300, 1)
    raw = self.write_tfrecord('day.tfrecords', records)
    cfg = make_config(slots=[{'name': 'tags'}, {'name': 'user'}], dense=[{'name': 'price'}])
    _, one = self.prepare(cfg, raw)
    batch = next(one.batches(300))
    parsed = tf.io.parse_example(
      list(tf.data.TFRecordDataset(raw).as_numpy_iterator()),
      {
        'tags': tf.io.VarLenFeature(tf.string),
        'user': tf.io.FixedLenFeature([], tf.int64),
        'click': tf.io.FixedLenFeature([], tf.int64),
        'price': tf.io.FixedLenFeature([], tf.float32, np.nan),
      },
    )
    tags = parsed['tags']
    mine = batch.segments % 2 == 0
    self.assertAllEqual(batch.keys[mine], hash_keys(tags.values, 1))
    self.assertAllEqual(batch.segments[mine] // 2, tags.indices[:, 0])
    self.assertAllEqual(batch.keys[~mine], hash_keys(parsed['user'], 2))
    self.assertAllEqual(batch.label, tf.cast(parsed['click'], tf.float32))
    self.assertAllEqual(batch.dense[:, 0], parsed['price'])

  def test_bad_records_and_files(self):
    cfg = make_config(slots=[{'name': 'user'}], dense=[{'name': 'price'}], max_bad_share=0.9)
    records = [
      {'click': 1, 'user': 'u', 'price': 1.0},
      b'\xff\xff no example',
      {'click': 1, 'user': 5, 'price': 1.0},  # an integer where the first had bytes
      {'click': 0, 'user': ['a', 'b']},
      {'click': [1, 0], 'user': 'u'},
      {'click': 1, 'user': 'u', 'price': [1.0, 2.0]},
      {'user': 'u'},
    ]
    raw = self.write_tfrecord('day.tfrecord', records)
    meta, one = self.prepare(cfg, raw)
    self.assertEqual(meta['bad']['kinds'], {'malformed': 2, 'label': 2, 'dense': 1})
    self.assertEqual(sorted(e['line'] for e in meta['bad']['examples']), [2, 3, 5, 6, 7])
    self.assertEqual(one.num_samples, 2)
    with self.assertRaisesRegex(UserError, "no column 'usr' .*; the nearest valid name is 'user'"):
      self.prepare(make_config(slots=[{'name': 'usr'}], max_bad_share=0.9), raw)
    with open(raw, 'rb') as f:
      good = f.read()
    cut, packed = 'it ends in the middle of a record', gzip.compress(good)
    for name, damaged, reason in (
      ('bad.tfrecord', good[:-3], f'{cut} that begins near byte [0-9]+'),
      ('bad.tfrecord', good[:40] + b'x' + good[41:], 'found a wrong checksum in a record that'),
      ('bad.tfrecord', b'no records', f'{cut}, 10 bytes after record 0'),
      ('bad.tfrecord', good + b'\0', f'{cut}, 1 bytes after record 7'),
      ('bad.tfrecord.gz', packed[:-3], ''),
      ('bad.tfrecord.gz', packed[:40], cut),
      ('bad.tfrecord.gz', gzip.compress(good + b'x'), cut),
      ('bad.tfrecord.gz', good, r'inflate\(\) failed'),
    ):
      wanted = rf'not a TFRecord file that can be read: {reason}[^\n{{\[]*$'  # no names of ops
      with self.assertRaisesRegex(BadPass, wanted):
        self.prepare(cfg, self.write(name, damaged))


class LibsvmTest(FormatsTestCase):
  def test_against_scikit_learn(self):
    rng = np.random.default_rng(0)
    matrix = np.where(rng.random([50, 12]) < 0.3, np.round(rng.normal(size=[50, 12]), 3), 0)
    label = rng.integers(0, 2, 50)
    sklearn.datasets.dump_svmlight_file(
      matrix,
      label,
      self.path('day.svm'),
      zero_based=False,
      query_id=np.arange(50) // 7,
      comment='x',
    )
    cfg = make_config(
      slots=[{'name': 'all', 'column': 'features'}],
      dense=[{'name': '3'}],
      group='qid',
    )
    _, one = self.prepare(cfg, self.path('day.svm'))
    batch = next(one.batches(99))
    found, labels, queries = sklearn.datasets.load_svmlight_file(
      self.path('day.svm'), zero_based=False, query_id=True, n_features=12
    )
    rows, columns = found.nonzero()
    self.assertAllEqual(batch.segments, rows)
    self.assertAllEqual(batch.keys, hash_keys([str(c + 1) for c in columns], 1))
    self.assertAllEqual(batch.values, found.data.astype(np.float32))
    self.assertAllEqual(batch.label, labels)
    self.assertAllEqual(batch.group, hash_keys([str(q) for q in queries], 0))
    third = found[:, 2].toarray()[:, 0]
    self.assertAllEqual(batch.dense[:, 0], third.astype(np.float32))  # 0 where it is absent

  def test_an_absent_index_is_0(self):
    cfg = make_config(slots=[{'name': '2'}, {'name': 'all', 'column': 'features'}],
                      dense=[{'name': '3'}, {'name': '4'}])  # fmt: skip
    path = self.write('day.svm', '1 2:7 3:0.5\n0 3:1e-3\n1\n')
    with self.assertLogs('absl', 'WARNING') as logs:
      _, one = self.prepare(cfg, path)
    self.assertRegex(str(logs.output), 'day.svm: no record has the index 4, so it is 0 in all')
    batch = next(one.batches(9))
    self.assertAllEqual(batch.dense, np.float32([[0.5, 0], [1e-3, 0], [0, 0]]))
    self.assertAllEqual(batch.keys[batch.segments % 2 == 0], hash_keys(['7', '0', '0'], 1))
    for name in ('price', 'qid'):
      cfg = make_config(slots=[{'name': 'features'}], dense=[{'name': name}])
      if name == 'qid':  # the line has none
        self.assertAllEqual(
          np.isnan(next(self.prepare(cfg, path)[1].batches(9)).dense), [[True]] * 3
        )
        continue
      told = "no column 'price' .data.dense.: the columns of libsvm are 'features', 'qid' and the"
      with self.assertRaisesRegex(UserError, told):
        self.prepare(cfg, path)

  def test_libffm_is_the_csv_of_its_fields(self):
    slots = [{'name': 'user', 'column': '0'}, {'name': 'topics', 'column': '1'}]
    cfg = make_config(slots=slots)
    ffm = '1 0:5:1 1:7:0.5 1:8:2\n0 1:9:1\r\n\n1\n'
    want = self.columns_of(cfg, self.write('day.ffm', ffm))
    slots[1] |= {'separator': '|', 'value_separator': ':'}
    csv = make_config(slots=slots, columns=['click', '0', '1'])
    self.assertEqual(
      self.columns_of(csv, self.write('day.csv', '1,5,7:0.5|8:2\n0,,9:1\n1,,\n')), want
    )

  def test_bad_lines(self):
    cfg = make_config(slots=[{'name': 'user', 'column': '0'}], max_bad_share=0.9)
    lines = ['1 0:5:1', '1 0:5', 'x 0:5:1', '1 0:5:x', '1 0::1', '1 0:5:', '0 0:1:1:1', '0 1:5:1']
    meta, one = self.prepare(cfg, self.write('day.libffm', '\n'.join(lines)))
    self.assertEqual(one.num_samples, 2)
    self.assertEqual(meta['bad']['kinds'], {'malformed': 2, 'label': 1, 'value': 3})
    self.assertEqual([e['line'] for e in meta['bad']['examples']], [2, 3, 4, 5, 6, 7])
    with self.assertRaisesRegex(UserError, "no column 'user' .*numbers of its fields"):
      self.prepare(make_config(slots=[{'name': 'user'}]), self.path('day.libffm'))


class JsonlTest(FormatsTestCase):
  def test_each_line_by_itself(self):
    good = [
      '{"click": 1, "user": "u"}',
      ' {"user": 5, "click": true} ',
      '{"click": 0, "user": ["a", 7, null, true], "other": {"deep": [1, {}]}}',
      '{"click": "1", "user": {"a": 0.5, "b": 2}}',
      '{"click": 0}',
      '{"click": 1, "user": "2024-01-31 10:00:00"}',
    ]
    bad = [
      '{"click": 1, "user": "u"',
      '{"click": 1}{"click": 0}',
      '{"click": 1, "click": 0}',
      '[1]',
      '{"click": 1, "user": 0.5}',
      '{"click": NaN, "user": "u"}',
      '{"click": 1, "user": "\\ud800"}',
      '{"click": 2, "user": "u"}',
      '{"click": 1, "user": {"a": "x"}}',
      '{"click": [1], "user": "u"}',
      '"user": 1}',
      '{"click": 1, "x": ' + '[' * 100_000 + '}',
    ]
    cfg = make_config(slots=[{'name': 'user'}], max_bad_share=1.0)
    rng = np.random.default_rng(0)
    for _ in range(20):
      lines = [(good if rng.random() < 0.6 else bad)[rng.integers(6)] for _ in range(9)]
      lines += [bad[rng.integers(6, 12)], good[0], '']
      meta, one = self.prepare(cfg, self.write('day.jsonl', '\n'.join(lines)))
      wanted = [i for i, line in enumerate(lines, 1) if line and line not in good]
      self.assertEqual(one.num_samples, sum(line in good for line in lines))
      self.assertEqual([e['line'] for e in meta['bad']['examples']], wanted[:10])

  def test_json_lines_read_as_pandas_does(self):
    records = made_up(200, 2)
    raw = self.write('day.jsonl', ''.join(json.dumps(r) + '\n' for r in records))
    cfg = make_config(slots=[{'name': 'user'}], dense=[{'name': 'price'}])
    _, one = self.prepare(cfg, raw)
    batch, table = next(one.batches(200)), pd.read_json(raw, lines=True)
    self.assertAllEqual(batch.keys, hash_keys(table['user'].to_numpy(np.int64), 1))
    self.assertAllEqual(batch.dense[:, 0], table['price'].to_numpy(np.float32))
    with self.assertRaisesRegex(UserError, "no column 'usr' .*nearest valid name is 'user'"):
      self.prepare(make_config(slots=[{'name': 'usr'}]), raw)


if __name__ == '__main__':
  tf.test.main()
