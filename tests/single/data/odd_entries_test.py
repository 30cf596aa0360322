"""Odd entries among the passes: each is refused with its line, and the stream goes on."""

import contextlib
import io
import json
import os
import shutil
import socket
import tempfile
import zlib
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.orc
import pyarrow.parquet
import pytest
import tensorflow as tf

from tests.support import small
from tests.support.waiting import stopped_when_it_waits
from trainer.errors import BadPass
from trainer.files import to_json
from trainer.job import stream
from trainer.tools import closing
from trainer.training import inputs

pytestmark = pytest.mark.reports


def _text(seed, samples=20):
  rng = np.random.default_rng(seed)
  rows = (f'{rng.integers(9)},{rng.integers(5)},{rng.integers(2)}\n' for _ in range(samples))
  return ('user,item,label\n' + ''.join(rows)).encode()


def _table(write, **options):
  """Makes a file of tables that has a column whose name is no UTF-8."""

  def make(path):
    columns = {'user': ['a', 'b'], 'item': ['c', 'd'], 'label': [0, 1], 'extra': [1, 2]}
    write(pa.table(columns), path, **options)
    with open(path, 'rb') as f:
      data = f.read()
    with open(path, 'wb') as f:
      f.write(data.replace(b'extra', b'ex\xffra'))

  return make


def _bytes(data):
  def make(path):
    with open(path, 'wb') as f:
      f.write(data)

  return make


def _link(target):
  return lambda path: os.symlink(target, path)


def _folder(name, make):
  """Makes a directory that holds one thing."""

  def make_folder(path):
    os.mkdir(path)
    make(os.path.join(path, name))

  return make_folder


def _meta(fields):
  """Makes a prepared pass whose meta.json has a right checksum and holds little else."""
  return _folder('meta.json', _bytes(to_json(fields | {'crc32': zlib.crc32(to_json(fields))})))


def _socket(path):
  here = os.open(os.path.dirname(path), os.O_RDONLY)  # the path itself may be too long for one
  with socket.socket(socket.AF_UNIX) as s:
    s.bind(f'/proc/self/fd/{here}/{os.path.basename(path)}')
  os.close(here)


def _sparse(path):
  with open(path, 'wb') as f:
    f.truncate(1 << 40)


_TERMINAL = os.openpty()  # a device of our own: no test names one of the machine's
_SCHEMA = {'schema': {'format': 3, 'slots': []}, 'day': 1}
# By the name of the entry, a path below the directory: what makes it.
ODD = {
  b'day_1_not_\xff.csv': _bytes(_text(1)),
  b'in_\xfe/day_1.csv': _bytes(_text(2)),
  b'day_1_columns_parquet.parquet': _table(pa.parquet.write_table, store_schema=False),
  b'day_1_columns_orc.orc': _table(pa.orc.write_table, compression='uncompressed'),
  b'day_1_text_parquet.parquet': _bytes(_text(3)),
  b'day_1_text_gz.csv.gz': _bytes(_text(4)),
  b'day_1_text_tfrecord.tfrecord': _bytes(_text(5)),
  b'day_1_text_jsonl.jsonl': _bytes(_text(6)),
  b'day_1_empty.csv': _bytes(b''),
  b'day_1_zeros.csv': _bytes(bytes(50)),
  b'day_1_huge.csv': _sparse,
  b'day_1_dangling.csv': _link('nowhere'),
  b'day_1_itself.csv': _link('day_1_itself.csv'),
  b'day_1_parent.csv': _link('.'),
  b'day_1_device.csv': _link(os.ttyname(_TERMINAL[1])),
  b'day_1_fails.csv': _link('/proc/self/mem'),
  b'day_1_pipe.csv': os.mkfifo,
  b'day_1_socket.csv': _socket,
  b'day_1_no_files.csv': os.mkdir,
  b'day_1_holds_pipe': _folder('part-0.csv', os.mkfifo),
  b'day_1_holds_dangling': _folder('part-0.csv', _link('nowhere')),
  b'day_1_holds_link': _folder('part', _link('..')),
  b'day_1_holds_\xff': _folder(b'part_\xff.csv'.decode(errors='surrogateescape'), _bytes(_text(7))),
  b'day_1_meta_is_pipe': _folder('meta.json', os.mkfifo),
  b'day_1_meta_is_folder': _folder('meta.json', os.mkdir),
  b'day_1_meta_no_text': _folder('meta.json', _bytes(b'\xff\xfe{')),
  b'day_1_meta_deep': _folder('meta.json', _bytes(b'[' * 100_000)),
  b'day_1_meta_list': _folder('meta.json', _bytes(b'[]')),
  b'day_1_meta_old': _folder('meta.json', _bytes(b'{"schema": {"format": 1}, "day": 1}')),
  b'day_1_meta_no_day': _meta({'schema': {'format': 2}}),
  b'day_1_meta_day_text': _meta(_SCHEMA | {'day': '1'}),
  b'day_1_meta_day_huge': _meta(_SCHEMA | {'day': 10**30}),
  b'day_1_meta_bare': _meta(_SCHEMA),
  b'no_date.csv': _bytes(_text(8)),
  b'day_90000000.csv': _bytes(_text(9)),
}
# Unusual names that nothing is wrong with.
GOOD = [
  b'day_1_' + b'n' * 234 + b'.csv',
  b'day_1_\xc3\xa4\xe2\x82\xac.csv',
  b'day_1_a\nb\x1b[2J.csv',
]


class OddEntriesTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    # Not in get_temp_dir(), which TensorFlow removes following links to directories, for ever.
    self.folder = tempfile.mkdtemp()
    self.addCleanup(shutil.rmtree, self.folder)
    self.log = f'{self.folder}/log'
    os.mkdir(self.log)

  def put(self, name, make):
    """Makes and announces an entry."""
    path = os.path.join(self.log, os.fsdecode(name))
    os.makedirs(os.path.dirname(path), exist_ok=True)
    make(path)
    if len(os.path.basename(os.fsencode(path))) < 250:
      _bytes(b'')(path + '.done')

  def make_job(self, **data):
    cfg = small.config(
      run_dir=f'{self.folder}/run',
      data={'day_pattern': r'day_(\d+)'} | data,
      train={'batch_size': 16},
      checkpoint={'every_passes': 3},
    )
    return small.job(cfg)

  def run_job(self, one):
    """Trains on what there is, then stops. Returns: what it printed."""
    # As a terminal that takes UTF-8 and nothing else.
    printed = io.TextIOWrapper(io.BytesIO(), 'utf-8')
    with stopped_when_it_waits(one), contextlib.redirect_stdout(printed):
      self.assertEqual(0, one.run())
      closing.write_report(one.cfg.run_dir)
      printed.flush()
      return printed.buffer.getvalue().decode()

  def events(self, kind):
    with open(f'{self.folder}/run/metrics.jsonl', encoding='utf-8') as f:
      return [e for e in map(json.loads, f) if e['event'] == kind]

  def check(self, output, good):
    """Every good pass was trained on once, and every odd one was refused in one line."""
    trained = [e['pass'] for e in self.events('train')]
    self.assertLen(trained, len(good))
    self.assertLen(set(trained), len(good))
    told = {e['pass']: e['reason'] for e in self.events('pass')}
    self.assertLen(told, len(ODD), set(told))
    self.assertEqual({e['fate'] for e in self.events('pass')}, {'refused'})
    for name in ODD:
      shown = name.decode(errors='backslashreplace')
      lines = [line for line in output.splitlines() if ' refused: ' in line]
      self.assertLen([line for line in lines if f'{self.log}/{shown}' in line], 1, name)

  def test_a_watched_directory(self):
    good = [b'day_1_a.csv', b'day_1_l.csv', b'day_1_z.csv', b'day_2.csv', *GOOD]
    for i, name in enumerate(good):
      self.put(name, _bytes(_text(100 + i)))
    for name, make in ODD.items():
      self.put(name, make)
    # The name of 240 letters leaves no room for a marker of its own.
    long = os.path.join(self.log, os.fsdecode(GOOD[0]))
    os.makedirs(f'{self.log}/long')
    shutil.move(long, f'{self.log}/long/{os.path.basename(long)}')
    _bytes(b'')(f'{self.log}/long/_SUCCESS')
    data = {'watch': self.log, 'max_refused_passes': 50}
    output = self.run_job(self.make_job(**data))
    self.check(output, good)
    self.put(b'day_2_b.csv', _bytes(_text(300)))
    again = self.run_job(self.make_job(**data))
    self.assertNotIn('refused:', again, 'after a restart they are known')
    self.check(output, [*good, b'day_2_b.csv'])

  def test_patterns_of_data_train(self):
    good = [b'day_1_a.csv', b'day_1_z.csv', b'day_2.csv', *GOOD]
    for i, name in enumerate(good):
      self.put(name, _bytes(_text(100 + i)))
    for name, make in ODD.items():
      self.put(name, make)
    for folder, _, names in os.walk(self.log):
      for name in names:
        if name.endswith('.done'):
          os.remove(os.path.join(folder, name))
    data = {'train': [f'{self.log}/day*', f'{self.log}/no_date*', f'{self.log}/in_*/*']}
    data |= {'max_refused_passes': 50, 'max_days_ahead': 14}
    output = self.run_job(self.make_job(**data))
    self.check(output, good)
    self.assertNotIn('refused:', self.run_job(self.make_job(**data)))

  @pytest.mark.long
  def test_one_alone_ends_a_run_that_may_refuse_none(self):
    self.put(b'day_0.csv', _bytes(_text(10)))
    for name, make in ODD.items():
      if name == b'day_90000000.csv':
        continue  # the bound is of streams
      with self.subTest(name):
        self.put(name, make)
        # A config is UTF-8, so that only a pattern matches other names.
        path = os.path.join(self.log, name.decode(errors='replace').replace('\ufffd', '?'))
        with self.assertRaisesRegex(
          BadPass, 'data.max_refused_passes|day_pattern|meta.json|log/'
        ) as raised:
          self.run_job(self.make_job(train=[f'{self.log}/day_0.csv', path.replace('[', '[[]')]))
        self.assertNotIn('\n', str(raised.exception))
        str(raised.exception).encode()

  @pytest.mark.long
  def test_a_file_that_vanishes_while_it_is_read(self):
    """The stream goes on, and it is trained on once it is there again."""
    good = [b'day_1_a.csv', b'day_1_c.csv']
    for place, name in ((stream, 'entry_of'), (inputs, 'prepare_pass'), (inputs, 'PreparedPass')):
      with self.subTest(name):
        shutil.rmtree(self.log)
        shutil.rmtree(f'{self.folder}/run', ignore_errors=True)
        os.mkdir(self.log)
        for i, one in enumerate([*good, b'day_1_b.csv']):
          self.put(one, _bytes(_text(100 + i)))
        wrapped = getattr(place, name)

        def vanish(*args, wrapped=wrapped, **options):
          if 'day_1_b' in str(args):
            shutil.rmtree(f'{self.folder}/run/prepared/train/day_1_b', ignore_errors=True)
            with contextlib.suppress(FileNotFoundError):
              os.remove(f'{self.log}/day_1_b.csv')
          return wrapped(*args, **options)

        with mock.patch.object(place, name, vanish):
          self.run_job(self.make_job(watch=self.log, max_refused_passes=1))
        self.assertEqual([e['pass'] for e in self.events('train')], ['day_1_a', 'day_1_c'])
        self.put(b'day_1_b.csv', _bytes(_text(102)))
        self.run_job(self.make_job(watch=self.log, max_refused_passes=1))
        self.assertEqual([e['pass'] for e in self.events('train')][2:], ['day_1_b'])

  def test_a_full_disk_is_no_fault_of_a_pass(self):
    self.put(b'day_1.csv', _bytes(_text(1)))
    full = OSError(28, 'No space left on device', f'{self.folder}/run/prepared/x.npy')
    with mock.patch('trainer.files.NpyWriter.append', side_effect=full):
      with self.assertRaisesRegex(Exception, 'No space left') as raised:
        self.run_job(self.make_job(watch=self.log))
    self.assertNotIsInstance(raised.exception, BadPass)


if __name__ == '__main__':
  tf.test.main()
