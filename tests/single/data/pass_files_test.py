"""What patterns match and what a directory holds, against Python's glob, pandas and pyarrow."""

import dataclasses
import glob
import gzip
import io
import json
import os
import shutil

import boto3
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset
import pyarrow.orc
import pyarrow.parquet
import tensorflow as tf

from tests.support import small
from tests.support.s3 import S3
from trainer.data.conversion import blocks_of_pass, prepare_pass
from trainer.data.features import hash_keys
from trainer.data.pass_files import files_of, matching
from trainer.data.passes import Pass, also_trained, announced, passes
from trainer.data.prepared import PreparedPass
from trainer.errors import BadPass, UserError
from trainer.training import ledger


def make_config(**data):
  return small.config(data={'label': 'click'} | data)


def records(n, seed):
  rng = np.random.default_rng(seed)
  columns = {'user': rng.integers(0, 9, n), 'item': rng.integers(0, 5, n)}
  return pd.DataFrame(columns | {'click': rng.integers(0, 2, n)})


def tfrecord(table):
  out = os.path.join(tf.compat.v1.test.get_temp_dir(), 'one.tfrecord')
  with tf.io.TFRecordWriter(out) as writer:
    for row in table.to_dict('records'):
      kinds = {
        k: tf.train.Feature(bytes_list=tf.train.BytesList(value=[v.encode()]))
        if isinstance(v, str)
        else tf.train.Feature(int64_list=tf.train.Int64List(value=[v]))
        for k, v in row.items()
        if v is not None
      }
      features = tf.train.Features(feature=kinds)
      writer.write(tf.train.Example(features=features).SerializeToString())
  with open(out, 'rb') as f:
    return f.read()


def arrow(write, table):
  out = io.BytesIO()
  write(pa.Table.from_pandas(table, preserve_index=False), out)
  return out.getvalue()


FORMATS = {
  '.csv': lambda table: table.to_csv(index=False).encode(),
  '.csv.gz': lambda table: gzip.compress(table.to_csv(index=False).encode()),
  '.jsonl': lambda table: table.to_json(orient='records', lines=True).encode(),
  '.parquet': lambda table: arrow(pa.parquet.write_table, table),
  '.orc': lambda table: arrow(pa.orc.write_table, table),
  '.tfrecord': tfrecord,
}


def items_of(batch):
  """The key of each sample's feature in the second slot; −1 where it has none."""
  if not len(batch.segments):
    return batch.keys.reshape(-1, 2)[:, 1]
  items, at = np.full([len(batch.label)], -1), batch.segments % 2 == 1
  items[batch.segments[at] // 2] = batch.keys[at]
  return items


class PassFilesTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = os.path.join(self.get_temp_dir(), self.id())

  def path(self, name):
    return os.path.join(self.folder, name)

  def write(self, name, content=b''):
    os.makedirs(os.path.dirname(self.path(name)), exist_ok=True)
    with open(self.path(name), 'wb') as f:
      f.write(content if isinstance(content, bytes) else content.encode())
    return self.path(name)

  def prepare(self, raw, cfg=None, out='out'):
    prepare_pass(cfg or make_config(), raw, self.path(out))
    return PreparedPass(self.path(out))

  def samples(self, raw, cfg=None):
    """What a pass holds, {name of its array: bytes}, whatever its files."""
    shutil.rmtree(self.path('out'), ignore_errors=True)
    meta = self.prepare(raw, cfg).meta
    return meta['samples'], meta['arrays']

  def test_two_stars_match_any_depth_as_in_python(self):
    names = ('a.csv', 'x/b.csv', 'x/y/c.csv', 'x/y/d.txt', 'x/dt=1/e.csv', 'z/dt=1/f.csv')
    for name in names:
      self.write(f'log/{name}')
    for name in ('.h/g.csv', 'x/_temporary/0/h.csv', 'x/.i.csv'):  # hidden, as elsewhere
      self.write(f'log/{name}')
    for pattern in (
      '**/*.csv',
      '**/y/*',
      'x/**/*.csv',
      '**/dt=*/**/*.csv',
      '**/x/**/c.*',
      '*/*.csv',
    ):
      with self.subTest(pattern):
        found = matching([self.path(f'log/{pattern}')], 'data.train')
        want = glob.glob(self.path(f'log/{pattern}'), recursive=True)
        self.assertEqual(found, sorted(p for p in want if '_temporary' not in p))
    files = sorted(self.path(f'log/{name}') for name in names)
    for pattern in ('**', '**/*', '**/**'):
      self.assertEqual(matching([self.path(f'log/{pattern}')], 'data.train'), files)
    days = ['x/dt=1', 'z/dt=1']
    found = passes(make_config().data, [self.path('log/**/dt=*')], 'data.train')
    self.assertEqual([one.name for one in found], days)
    for place, to in (('x/up', '..'), ('x/z', '../z'), ('z/x', '../x')):  # links in a circle
      os.symlink(to, self.path(f'log/{place}'))
      self.addCleanup(os.unlink, self.path(f'log/{place}'))  # what empties the folder follows them
    found = matching([self.path('log/**/*.csv')], 'data.train')
    self.assertContainsSubset([*files[:1], self.path('log/x/z/dt=1/f.csv')], found)
    self.assertLess(len(found), 20)
    with self.assertRaisesRegex(UserError, "'.*/log/x/b.csv' lies in '.*/log/x', a pass too"):
      passes(make_config().data, [self.path('log/x'), self.path('log/x/*.csv')], 'data.train')

  def test_names_that_are_no_data(self):
    """Leftovers are left out with a line, in a directory, of a pattern and of a marker."""
    a, b = records(20, 1), records(30, 2)
    parts = {'part-0.csv': a.to_csv(index=False), 'part-1.csv': b.to_csv(index=False)}
    for name, content in parts.items():
      self.write(f'clean/{name}', content)
    want = self.samples(self.path('clean'))
    self.assertEqual(want[0], 50)
    cut = parts['part-1.csv'][:-9]
    left = ['part-2.csv._COPYING_', 'part-2.csv.tmp', 'part-2.csv.TMP.17', 'part-0.csv~', 'x.bak']
    left += [f'part-2.csv.{end}' for end in ('inprogress', 'filepart', 'part', 'crdownload', 'md5')]
    left += [f'part-0.csv.{end}' for end in ('partial', 'orig', 'old', 'swp', 'crc', 'sha256')]
    for i, name in enumerate(left):
      shutil.copytree(self.path('clean'), self.path(f'{i}'))
      self.write(f'{i}/{name}', cut)
      self.write(f'{i}/_SUCCESS')
      with self.assertLogs('absl', 'WARNING') as told:
        self.assertEqual(self.samples(self.path(f'{i}')), want)
      self.assertIn(f'{self.path(str(i))}: left out {name}, by their names', str(told.output))
      with self.assertLogs('absl', 'WARNING') as told:
        found = matching([self.path(f'{i}/*')], 'data.train')
      self.assertEqual([os.path.basename(p) for p in found], [*parts])
      self.assertIn(f'left out {name}', str(told.output))
      found = announced(make_config(watch=self.path(f'{i}')).data)[0]
      self.assertEqual([one.name for one in found], ['part-0', 'part-1'])
    self.assertLen(matching([self.path('*/*.md5')], 'data.train'), 1)
    self.write('hive/k=a~/part-0.csv', parts['part-0.csv'])
    self.write('hive/_k=b/part-1.csv', parts['part-1.csv'])
    self.assertLen(files_of(self.path('hive')), 2)

  def test_a_part_that_is_there_twice(self):
    text = records(20, 1).to_csv(index=False)
    for other, content in (
      ('part-0.csv.gz', gzip.compress(text.encode())),
      ('part-0.parquet', FORMATS['.parquet'](records(20, 1))),
    ):
      self.write('forms/part-0.csv', text)
      self.write(f'forms/{other}', content)
      with self.assertRaisesRegex(BadPass, f'part-0.csv and {other}: most likely the same records'):
        files_of(self.path('forms'))
      os.remove(self.path(f'forms/{other}'))
    self.write('copied/part-0.csv', text)
    for i in range(3):
      self.write(f'copied/header-{i}.csv', text.partition('\n')[0] + '\n')
    self.write('copied/part-0 (1).csv', text)
    with self.assertLogs('absl', 'WARNING') as told:
      self.prepare(self.path('copied'))
    self.assertLen(told.output, 1)
    self.assertRegex(told.output[0], r'/part-0.* has the bytes of part-0.*: so|count twice')
    self.write('note/part-0.csv', text)
    self.write('note/README.txt', 'clicks of January\n')
    with self.assertRaisesRegex(UserError, "README.txt:1: no column 'click'"):
      self.prepare(self.path('note'))

  def test_parts_without_records_add_nothing(self):
    tables = records(20, 1), records(30, 2)
    want = None
    for suffix, write in FORMATS.items():
      blank = [b''] + [b'\n', b'\r\n \n'] * (suffix in ('.csv', '.jsonl'))
      blank += [gzip.compress(b''), gzip.compress(b'\n')] * (suffix == '.csv.gz')
      for i, nothing in enumerate(blank):
        with self.subTest(suffix=suffix, nothing=nothing):
          name = f'log{i}{suffix}'
          for at, content in enumerate((nothing, write(tables[0]), nothing, write(tables[1]))):
            self.write(f'{name}/part-{at}{suffix}', content)
          found = self.samples(self.path(name))
          want = want or found
          self.assertEqual(found, want)
      self.write(f'only{suffix}/part-0{suffix}')
      with self.assertRaisesRegex(BadPass, 'found no records; wanted at least one'):
        self.prepare(self.path(f'only{suffix}'))
      with self.assertRaisesRegex(BadPass, 'the file is empty; wanted records'):
        self.prepare(self.path(f'only{suffix}/part-0{suffix}'))
    self.assertEqual(want[0], 50)

  def test_folders_of_hive(self):
    """Their texts are those that pyarrow reads; above the log they replace no column."""
    cities = ['A:B', 'K/B', '5 %', 'plain', 'größe', None]
    table = pd.concat([records(10, i).assign(item=city) for i, city in enumerate(cities)])
    flavor = pa.dataset.partitioning(pa.schema([('item', pa.string())]), flavor='hive')
    rows = pa.Table.from_pandas(table, preserve_index=False)
    pa.dataset.write_dataset(rows, self.path('log'), format='parquet', partitioning=flavor)
    read = pa.dataset.dataset(self.path('log'), partitioning=flavor).to_table().to_pandas()
    folders = sorted(os.listdir(self.path('log')))
    self.assertIn('item=A%3AB', folders)
    keys = hash_keys([str(text) for text in read['item']], 2).numpy()
    keys[read['item'].isna()] = -1
    want = sorted(zip(keys.tolist(), read['click'].tolist()))
    with S3():
      client = boto3.client('s3')
      client.create_bucket(Bucket='hive')
      for suffix, write in FORMATS.items():
        with self.subTest(suffix):
          for folder in folders:
            part = pd.read_parquet(self.path(f'log/{folder}/part-0.parquet'))
            body = write(part[['user', 'click']])
            self.write(f'log{suffix}/{folder}/part-0{suffix}', body)
            client.put_object(Bucket='hive', Key=f'{suffix}/{folder}/part-0{suffix}', Body=body)
          for raw in (self.path(f'log{suffix}'), f's3://hive/{suffix}'):
            shutil.rmtree(self.path('out'), ignore_errors=True)
            batch = next(self.prepare(raw).batches(99))
            found = [(int(k), label) for k, label in zip(items_of(batch), batch.label)]
            self.assertEqual(sorted(found), want)
            one = f'{raw}/item=A%3AB/part-0{suffix}'
            for block in blocks_of_pass(make_config().data, one, {'item': '', 'user': ''}):
              self.assertEqual(set(block.columns['item'].to_pylist()), {'A:B'})
    for suffix, write in FORMATS.items():
      # Above the log: its own column counts. Within: both must say the same.
      plain = self.samples(self.write(f'flat{suffix}', write(records(20, 3))))
      above = self.write(f'to{suffix}/user=alice/day{suffix}', write(records(20, 3)))
      with self.assertLogs('absl', 'WARNING') as told:
        for raw in (above, os.path.dirname(above)):
          self.assertEqual(self.samples(raw), plain)
      self.assertIn('the folder user=alice does not count', str(told.output))
      os.remove(above)
      self.write(f'both{suffix}/user=alice/part-0{suffix}', write(records(20, 3)))
      with self.assertRaisesRegex(BadPass, r"column 'user': found '\d', and 'alice' in the name"):
        self.samples(self.path(f'both{suffix}'))
      own = records(20, 3).assign(user=7)
      flat = self.samples(self.write(f'sevens{suffix}', write(own)))
      self.write(f'same{suffix}/user=7/part-0{suffix}', write(own))
      self.assertEqual(self.samples(self.path(f'same{suffix}')), flat)
    self.write('bad/user=%FF/part-0.csv', 'item,click\n1,1\n')
    with self.assertRaisesRegex(BadPass, 'by % is not UTF-8'):
      self.samples(self.path('bad'))

  def test_tables_that_have_a_log_of_their_own(self):
    body = records(20, 1).to_csv(index=False)
    marks = {
      '_delta_log/00000000000000000000.json': 'a Delta table.*deltalake',
      '.hoodie/hoodie.properties': 'a Hudi table.*Spark',
      '_spark_metadata/0': 'what a stream of Spark writes',
      'metadata/v1.metadata.json': 'an Iceberg table.*pyiceberg',
      'metadata/version-hint.text': 'an Iceberg table',
    }
    with S3():
      client = boto3.client('s3')
      client.create_bucket(Bucket='tables')
      for i, (mark, told) in enumerate(marks.items()):
        for name, content in ((mark, '1'), ('data/dt=1/part-0.csv', body), ('p.csv', body)):
          self.write(f'{i}/in/t/{name}', content)
          client.put_object(Bucket='tables', Key=f'{i}/in/t/{name}', Body=content.encode())
        for place in (self.path(f'{i}'), f's3://tables/{i}'):
          for pattern in (
            'in/t',
            'in',
            '*',
            '*/t/*.csv',
            '**/*.csv',
            'in/t/data/dt=1/*.csv',
            'in/*',
          ):
            with self.subTest(mark=mark, pattern=f'{place}/{pattern}'):
              with self.assertRaisesRegex(BadPass, f'/in/t: is {told}'):
                for one in passes(make_config().data, [f'{place}/{pattern}'], 'data.train'):
                  files_of(one.path)
      self.write('0/in/t/p.csv.done')
      _, _, wrong = announced(make_config(watch=self.path('0/in')).data)
      self.assertIn('is a Delta table', wrong[self.path('0/in/t/p.csv')])
    self.write('beside/a/day.csv', body)
    self.write('beside/b/_delta_log/0.json')
    self.write('beside/a/metadata/notes.json.csv')
    self.assertLen(matching([self.path('beside/*/*.csv')], 'data.train'), 1)

  def test_a_part_that_is_mended_is_read_again(self):
    """Although the size of all and the newest time stay."""
    cfg = make_config(train=[self.path('log')])
    for i, at in ((0, 100), (1, 300)):
      self.write(f'log/part-{i}.csv', f'user,item,click\n1,{i},1\n')
      os.utime(self.path(f'log/part-{i}.csv'), (at, at))
    one = Pass('log', self.path('log'))
    before = ledger.entry_of(one, 0)
    self.assertAllEqual(next(self.prepare(one.path, cfg).batches(9)).label, [1, 1])
    self.assertTrue(before.is_of(ledger.stamp(one)))
    self.write('log/part-0.csv', 'user,item,click\n1,0,0\n')
    os.utime(self.path('log/part-0.csv'), (200, 200))
    self.assertFalse(before.is_of(ledger.stamp(one)))
    self.assertAllEqual(next(self.prepare(one.path, cfg).batches(9)).label, [0, 1])
    os.rename(self.path('log/part-0.csv'), self.path('log/part-2.csv'))
    self.assertAllEqual(next(self.prepare(one.path, cfg).batches(9)).label, [1, 0])

  def test_what_0_2_0_knew_of_a_directory(self):
    """Its ledger recognises the pass; what it converted is converted again."""
    for i in range(2):
      self.write(f'log/part-{i}.csv', f'user,item,click\n1,{i},1\n')
    one = Pass('log', self.path('log'))
    entry = dataclasses.asdict(ledger.entry_of(one, 0)) | {'fate': 'trained'}
    del entry['files']
    old = ledger.Ledger({'entries': [entry], 'folded': {}, 'epoch': 0, 'marks': ''})
    self.assertTrue(old.of(one, 0).is_of(ledger.stamp(one)))
    self.assertIn('its content', old.trained_before(ledger.entry_of(one, 0), False))
    self.assertEqual(json.loads(json.dumps(old.state()))['entries'][0]['files'], None)

  def test_held_out_passes_that_are_trained_on(self):
    for name in ('log/day_1.csv', 'log/valid.csv', 'log/more/day_2.csv', 'else/day_3.csv'):
      self.write(name)
    os.symlink('log/valid.csv', self.path('link.csv'))
    told = 'data.valid: data.train has {} too, so its metrics say nothing of new samples'
    for train, valid, found in (
      ('log/*.csv', 'log/valid.csv', 'log/valid.csv'),
      ('log/*.csv', 'link.csv', 'link.csv'),
      ('log', 'log/valid.csv', 'log/valid.csv'),
      ('log/more/*', 'log', 'log'),
      ('log/**', 'else/*', None),
    ):
      cfg = make_config(train=[self.path(train)], valid=[self.path(valid)])
      want = [told.format(self.path(found))] if found else []
      self.assertEqual(also_trained(cfg.data, 'valid'), want)
    for marker, count in (('log/day_1.csv.done', 0), ('log/_SUCCESS', 1)):
      self.write(marker)
      cfg = make_config(watch=self.path('log'), train=[], valid=[self.path('log/valid.csv')])
      want = [told.replace('data.train', 'data.train or data.watch')] * count
      self.assertEqual(
        also_trained(cfg.data, 'valid'), [text.format(self.path('log/valid.csv')) for text in want]
      )


if __name__ == '__main__':
  tf.test.main()
