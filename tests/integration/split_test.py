"""Splitting one log into three."""

import bz2
import datetime
import gzip
import os

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import tensorflow as tf

from tests.support import commands

SPLITS = ('train', 'valid', 'test')


def _write(frame, path):
  if path.endswith('.parquet'):
    frame.to_parquet(path, index=False)
  elif path.endswith('.jsonl'):
    frame.to_json(path, orient='records', lines=True)
  else:
    frame.to_csv(path, index=False)


def _read(path):
  if path.endswith('.parquet'):
    return pd.read_parquet(path)
  return pd.read_json(path, lines=True) if path.endswith('.jsonl') else pd.read_csv(path)


class SplitTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    rng = np.random.default_rng(0)
    columns = {'time': rng.integers(500, size=2000), 'user': rng.integers(99, size=2000)}
    self.frame = pd.DataFrame(columns)
    self.frame['text'] = [f'a, "{i}"' if i % 3 else '' for i in range(2000)]
    self.folder = self.get_temp_dir()

  def split(self, name, *arguments):
    path, out = f'{self.folder}/{name}', f'{self.folder}/{name}_split'
    if name.endswith('parquet'):
      self.frame.to_parquet(path, index=False)
    elif '.jsonl' in name:
      self.frame.to_json(path, orient='records', lines=True)
    else:
      self.frame.to_csv(path, index=False, sep='\t' if '.tsv' in name else ',')
    ended = commands.run('-m', 'trainer.cli.split', '--data', path, '--out', out, *arguments)
    self.told = ended.stdout
    if ended.returncode:
      return ended.returncode, ended.stderr
    parts = []
    for split in ('train', 'valid', 'test'):
      (file,) = [f for f in os.listdir(out) if f.startswith(split)]
      if file.endswith('parquet'):
        parts.append(pd.read_parquet(f'{out}/{file}'))
      elif file.endswith('jsonl'):
        parts.append(pd.read_json(f'{out}/{file}', lines=True))
      else:
        by = '\t' if 'tsv' in file else ','
        parts.append(pd.read_csv(f'{out}/{file}', sep=by, keep_default_na=False))
    rows = [tuple(row) for part in parts for row in part.values]
    self.assertCountEqual(rows, [tuple(row) for row in self.frame.values], 'nothing is lost')
    return parts

  def test_by_time_no_time_is_in_two(self):
    for name in ('log.csv', 'log.tsv.gz', 'log.parquet', 'log.jsonl.gz'):
      train, valid, test = self.split(name, '--by_time', 'time')
      self.assertLess(train['time'].max(), valid['time'].min())
      self.assertLess(valid['time'].max(), test['time'].min())
      self.assertAllClose([len(train), len(valid), len(test)], [1600, 200, 200], atol=20)

  def test_by_texts_that_are_sorted_already_in_several_blocks(self):
    days = pd.Timestamp('2023-01-01') + pd.to_timedelta(np.arange(2000), 'min')
    self.frame['time'] = days.strftime('%Y-%m-%d %H:%M:%S')
    self.frame['text'] = 'x' * 1500  # 3 MB; a block of a text file has 1 MB
    parts = self.split('log.csv', '--by_time', 'time')
    self.assertEqual([len(part) for part in parts], [1600, 200, 200])

  def test_a_log_with_another_delimiter_and_days_first(self):
    path, out = f'{self.folder}/log.csv', f'{self.folder}/german'
    days = pd.Timestamp('2023-01-01') + pd.to_timedelta(self.frame['time'], 'D')
    self.frame.assign(time=days.dt.strftime('%d.%m.%Y')).to_csv(path, sep=';', index=False)
    command = '-m', 'trainer.cli.split', '--data', path, '--out', out, '--by_time', 'time'
    for further, wanted in (
      (['--delimiter', ','], 'one field by --delimiter "," and 3 by ";"; wanted --delimiter: ";"'),
      ([], 'which is no time; wanted numbers, .*, or --time_format, as %d'),
      (['--time_format', '%Y'], "found '.*'; wanted a time by --time_format '%Y'"),
      (['--time_format', '%d.%m.%Y'], None),
    ):
      ended = commands.run(*command, *further)
      self.assertEqual(ended.returncode, 2 if wanted else 0, ended.stderr)
      self.assertRegex(ended.stderr, wanted or '^')
    parts = [pd.read_csv(f'{out}/{name}.csv', sep=';') for name in ('train', 'valid', 'test')]
    times = [pd.to_datetime(part['time'], format='%d.%m.%Y') for part in parts]
    self.assertLess(times[0].max(), times[1].min())
    self.assertLess(times[1].max(), times[2].min())
    self.assertEqual(sum(map(len, parts)), len(self.frame))

  def test_times_of_two_formats(self):
    days = pd.Timestamp('2026-01-01') + pd.to_timedelta(self.frame['time'], 'D')
    for column, other, why in (
      (days.dt.strftime('%Y-%m-%d %H:%M'), '31.12.2026', 'which is no time'),
      (days.dt.strftime('%Y-%m-%d'), '20261231', 'beside {!r} of sample 1; wanted one format'),
      (self.frame['time'].astype(str), '2026-12-31', 'beside {!r} of sample 1; wanted one format'),
      (days.dt.strftime('%Y-%m-%d %H:%M'), '2026-12-31 12:00+01:00', 'beside {!r} of sample 1; '),
    ):
      column[1500] = other
      self.frame['time'] = column
      for name in ('log.csv', 'log.parquet'):
        status, told = self.split(name, '--by_time', 'time')
        self.assertEqual(status, 2)
        self.assertIn(f"sample 1,501: found '{other}', {why.format(column[0])}", told)
        self.assertIn('or --time_format, as %d.%m.%Y', told)

  def test_times_of_two_units(self):
    """The web writes seconds since 1970, the app another unit: they are not ordered by instants."""
    for power, unit in ((3, 'milliseconds'), (6, 'microseconds'), (9, 'nanoseconds')):
      seconds = 1_700_000_000 + 600 * np.arange(40)
      times = [int(s) if i % 3 else int(s) * 10**power for i, s in enumerate(seconds)]
      for name, first in (('log.jsonl', 1), ('log.csv', 2), ('log.parquet', 1)):
        self.frame = pd.DataFrame({'ts': times, 'click': 0})
        told = self.split(name, '--by_time', 'ts')
        where = f"{name}:{first + 1}: column 'ts': found {times[1]}, seconds since 1970, beside "
        self.assertEqual(told[0], 2)
        self.assertRegex(told[1], f'{where}1[.7][^ ]* of line {first}, {unit}; wanted one unit')

  def test_times_that_do_not_sort_as_texts(self):
    at = pd.Timestamp('2016-01-01') + pd.to_timedelta(self.frame['time'], 'h')
    zones = [f'{hours:+03}:00' for hours in np.random.default_rng(1).integers(-9, 9, size=2000)]
    local = [(t + pd.Timedelta(hours=int(z[:3]))).isoformat() for t, z in zip(at, zones)]
    for column in (
      [f'{t.year}/{t.month}/{t.day} {t.hour}:{t.minute:02}' for t in at],
      [f'{t}{z}' for t, z in zip(local, zones)],
      [t.isoformat() if i % 2 else f'{t:%Y/%m/%d %H:%M}' for i, t in enumerate(at)],
      [t.timestamp() + 0.5 for t in at],
      at.dt.tz_localize('UTC').dt.tz_convert('Asia/Tokyo'),
    ):
      self.frame['time'] = column
      for name in ('log.parquet', 'log.csv', 'log.jsonl'):
        if name == 'log.jsonl' and not isinstance(column, list):
          continue  # pandas writes milliseconds
        path, out = f'{self.folder}/{name}', f'{self.folder}/{name}_split'
        self.frame.assign(instant=at.astype('int64')).pipe(_write, path)
        flags = '--data', path, '--out', out, '--by_time', 'time'
        done = commands.run('-m', 'trainer.cli.split', *flags)
        self.assertEqual(done.returncode, 0, done.stderr)
        suffix = name.partition('.')[2]
        parts = [_read(f'{out}/{split}.{suffix}')['instant'] for split in SPLITS]
        self.assertAllClose([len(part) for part in parts], [1600, 200, 200], atol=20)
        self.assertLess(parts[0].max(), parts[1].min())
        self.assertLess(parts[1].max(), parts[2].min())

  def test_at_two_times(self):
    days = pd.Timestamp('2023-01-01') + pd.to_timedelta(self.frame['time'], 'D')
    numbers = days.astype('datetime64[s]').astype('int64').astype(str)
    wanted = [(days < '2023-02-01'), (days >= '2023-02-01') & (days < '2024'), days >= '2024']
    for time, at, further in (
      (days.dt.strftime('%Y-%m-%d %H:%M:%S'), '2023-02-01,2024-01-01', []),
      (days.dt.strftime('%d.%m.%Y'), '2023-02-01,2024-01-01', ['--time_format', '%d.%m.%Y']),
      (numbers, '1675209600,1704067200', []),
      (days.dt.date, '2023-02-01,2024-01-01', []),
    ):
      self.frame['time'] = time
      parts = self.split('log.parquet', '--by_time', 'time', '--at', at, *further)
      self.assertEqual([len(part) for part in parts], [count.sum() for count in wanted])
      by_time = zip(('train', 'valid', 'test'), wanted)
      for name, own in by_time:
        first, last = time[days[own].idxmin()], time[days[own].idxmax()]
        self.assertIn(f'{name}.parquet: {own.sum():,} samples, time {first} to {last}', self.told)

  def test_at_in_the_time_format(self):
    # Days first, in one month: read with the month first, they would be another order, or none.
    times = pd.Timestamp('2025-12-01') + pd.to_timedelta(self.frame['time'] * 29, 'min')
    german, american = '%d.%m.%Y %H:%M:%S', '%m/%d/%Y %I:%M %p'
    for form, at, bounds in (
      (german, '08.12.2025,09.12.2025', ['2025-12-08', '2025-12-09']),
      (german, '08.12.2025 12:00,09.12.2025 00:00:00', ['2025-12-08 12:00', '2025-12-09']),
      (german, '2025-12-08 12:00,2025-12-09', ['2025-12-08 12:00', '2025-12-09']),
      (american, '12/08/2025 01:00 PM,12/09/2025', ['2025-12-08 13:00', '2025-12-09']),
      ('%H:%M %d.%m.%y', '12:30 08.12.25,2025-12-09', ['2025-12-08 12:30', '2025-12-09']),
      ('%Y%m%d', '20251208,20251209', ['2025-12-08', '2025-12-09']),
    ):
      self.frame['time'] = times.dt.strftime(form)
      parts = self.split('log.parquet', '--by_time', 'time', '--time_format', form, '--at', at)
      days = pd.to_datetime(times.dt.strftime(form), format=form)
      first, second = map(pd.Timestamp, bounds)
      wanted = [days < first, (days >= first) & (days < second), days >= second]
      self.assertEqual([len(part) for part in parts], [own.sum() for own in wanted], (form, at))
    by_german = f"times by --time_format '{german}', whole or without a time of day at its end"
    for column, further, wanted in (
      (times.dt.strftime(german), ['--time_format', german], by_german),
      (times, [], 'times as 2024-01-30 or 2024-01-30 12:00'),
    ):
      self.frame['time'] = column
      at = '12/08/2025,12/09/2025'
      status, told = self.split('log.parquet', '--by_time', 'time', '--at', at, *further)
      self.assertEqual(status, 2)
      self.assertIn(f'error: --at: found {at}; wanted {wanted}', told)

  def test_by_hash_no_user_is_in_two(self):
    parts = self.split('log.csv', '--by_hash', 'user', '--shares', '60,20,20')
    users = [set(part['user']) for part in parts]
    self.assertLen(set.union(*users), sum(map(len, users)))
    again = self.split('log.parquet', '--by_hash', 'user', '--shares', '60,20,20')
    self.assertEqual([set(part['user']) for part in again], users, 'by the texts')

  def test_names_again_as_in_concatenated_files(self):
    path, out = f'{self.folder}/log.csv', f'{self.folder}/several'
    names = ['user,time\n', '"user",time\r\n', '\ufeffuser,time\n']
    files = [
      name + ''.join(f'{i},{100 * n + i}\n' for i in range(50)) for n, name in enumerate(names)
    ]
    files[1] += 'user,3\n'  # a sample
    for further, header in (['--by_hash', 'user'], 2), (['--by_time', 'time'], 2):
      with open(path, 'w', newline='') as f:
        f.write(''.join(files))
      command = '-m', 'trainer.cli.split', '--data', path, '--out', out, *further
      done = commands.run(*command)
      self.assertEqual(done.returncode, 0, done.stderr)
      told = f'{path}:52: found the line of names again, {header} times in the file; left out'
      self.assertEqual(' '.join(done.stderr.split()).count(told), 1, done.stderr)
      parts = [pd.read_csv(f'{out}/{name}.csv') for name in ('train', 'valid', 'test')]
      times = pd.concat(parts)['time'].tolist()
      self.assertCountEqual(times, [100 * n + i for n in range(3) for i in range(50)] + [3])
    done = commands.run(*command, '--columns', 'user,time')
    self.assertEqual(done.returncode, 0, done.stderr)
    self.assertIn('again, 2 times', ' '.join(done.stderr.split()))

  def test_files_without_samples_or_times(self):
    path, out = f'{self.folder}/log.csv', f'{self.folder}/log.csv_split'
    self.split('log.csv', '--by_time', 'time')
    with open(f'{out}/train.csv') as f:
      before = f.read()
    device = ''.join(f'{1000 + i},{"phone" if i else "car"}\n' for i in range(9))
    for content, flags, wanted in (
      ('', ['--by_hash', 'user'], f'--data {path}: found no samples; wanted at least one\n'),
      ('', ['--by_time', 'user'], f'--data {path}: found no samples; wanted at least one\n'),
      (device, ['--by_time', 'device'], "sample 1: found 'car', which is no time; wanted numbers"),
      (
        '1,2,\x1b\0\n',
        ['--by_hash', 'user'],
        'log.csv:2: malformed record: found 3 fields; wanted 2 fields; or another --delim',
      ),
    ):
      with open(path, 'w') as f:
        f.write('user,device\n' + content)
      done = commands.run('-m', 'trainer.cli.split', '--data', path, '--out', out, *flags)
      self.assertEqual(done.returncode, 2)
      self.assertIn(wanted, done.stderr)
      with open(f'{out}/train.csv') as f:
        self.assertEqual(f.read(), before)
    self.frame.to_csv(f'{self.folder}/text.parquet', index=False)
    flags = '--data', f'{self.folder}/text.parquet', '--out', out, '--by_hash', 'user'
    done = commands.run('-m', 'trainer.cli.split', *flags)
    self.assertRegex(done.stderr, '^error: .*not a Parquet file .* looks like text, as it begins')

  def test_a_directory(self):
    flags = '--data', self.folder, '--out', 'out', '--by_time', 'time'
    done = commands.run('-m', 'trainer.cli.split', *flags)
    self.assertEqual(done.returncode, 2)
    self.assertIn(f'--data {self.folder}: found a directory; wanted a file', done.stderr)

  def test_samples_stay_as_they_are(self):
    names = 'user , "text"\n'
    for name, lines in (
      ('x.parquet.d/log.CSV', [names, '7,"a ""b"""\r\n', '7.0, b\n', '\n', ' 7 ,\n', '"8",\xff\n']),
      (
        'x.jsonl.d/log.txt.gz',
        ['\ufeff' + names, '8,"a,b"\n', *(f'{i},\n' for i in range(90)), '1,'],
      ),
      ('log.ndjson', ['{"user": 7, "t": 1.50}\n', '{"t": 2, "user":  7.0}\n', '{"user": "7"}']),
      ('log.json.bz2', [f'{{"user": "u{i % 9}"}}\n' for i in range(99)]),
      ('log.svm', [f'1 qid:{i % 9} 3:0.5 # {i}\n' for i in range(99)]),
    ):
      path, out = f'{self.folder}/{name}', f'{self.folder}/as-they-are'
      os.makedirs(os.path.dirname(path), exist_ok=True)
      opened = {'gz': gzip.open, 'bz2': bz2.open}.get(name.rpartition('.')[2], open)
      with opened(path, 'wb') as f:
        f.writelines(line.encode('latin-1' if '\xff' in line else 'utf-8') for line in lines)
      by = 'qid' if name == 'log.svm' else 'user'
      done = commands.run('-m', 'trainer.cli.split', '--data', path, '--out', out, '--by_hash', by)
      self.assertEqual(done.returncode, 0, done.stderr)
      suffix = {'CSV': '.csv', 'gz': '.txt', 'bz2': '.json'}.get(name[-3:].strip('.'), name[3:])
      parts = [open(f'{out}/{split}{suffix}', 'rb').read().splitlines(True) for split in SPLITS]
      header = [line.lstrip('\ufeff').encode() for line in lines[:1] if 'text' in line]
      for part in parts:
        self.assertEqual(part[: len(header)], header)
      found = [line for part in parts for line in part[len(header) :]]
      wanted = [line.removesuffix('\n').encode('latin-1') + b'\n' for line in lines[len(header) :]]
      self.assertCountEqual(found, [line for line in wanted if line.strip()])
      if len(lines) < 9:
        full = [len(part) > len(header) for part in parts]
        self.assertIn(sum(full), (1, 2), 'user 7 is one, however it is written')
    pq.write_table(pa.table({'x': [1, 2]}), f'{self.folder}/log.pq')
    done = commands.run(
      *('-m', 'trainer.cli.split', '--data', f'{self.folder}/log.pq'),
      *('--out', out, '--by_time', 'x', '--shares', '50,0,50'),
    )
    self.assertEqual(
      [pq.read_table(f'{out}/{split}.pq')['x'].to_pylist() for split in SPLITS], [[1], [], [2]]
    )

  def test_a_share_of_none(self):
    for shares, sizes in (('90,10,0', [1, 1, 0]), ('0,0,100', [0, 0, 1]), ('0,50,50', [0, 1, 1])):
      for flag in ('--by_time', '--by_hash'):
        parts = self.split('log.csv', flag, 'time', '--shares', shares)
        self.assertEqual([int(len(part) > 0) for part in parts], sizes)

  def test_a_stray_quote_swallows_nothing(self):
    path, out = f'{self.folder}/quotes.csv', f'{self.folder}/quotes'
    lines = [f'{i},text {i}\n' for i in range(99)]
    lines[9], lines[59] = '9,"an inch\n', '59,"two\n'
    with open(path, 'w') as f:
      f.writelines(['user,text\n', *lines])
    done = commands.run(
      '-m', 'trainer.cli.split', '--data', path, '--out', out, '--by_hash', 'user'
    )
    self.assertEqual(done.returncode, 2)
    self.assertIn(f'error: {path}:11: malformed record: found an open quote', done.stderr)
    self.assertFalse(os.path.exists(out))

  def test_a_failure_changes_no_file(self):
    self.split('log.csv', '--by_hash', 'user')
    out = f'{self.folder}/log.csv_split'

    def content():
      return {n: open(f'{out}/{n}').read() for n in os.listdir(out) if n != '.split.unfinished'}

    before = content()
    self.assertLen(before, 3)
    words = '--data', f'{self.folder}/log.csv', '--out', out, '--by_time', 'time'
    begin = f"""
import os, resource, signal, sys, time
from trainer import files
from trainer.cli import split
sys.argv = ['split', *{words}]
"""
    for what, status, told in (
      # Larger files than this cannot be written, as on a full disk.
      (
        'signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n'
        'resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, 1 << 14))',
        2,
        'error: cannot write --out: .*File too large',
      ),
      ('files.sync = lambda paths: os.kill(os.getpid(), signal.SIGTERM)', 143, '^$'),
      ('files.sync = lambda paths: os.kill(os.getpid(), signal.SIGKILL)', -9, '^$'),
      # The log grows while it is read.
      (
        'from trainer.data import csv_format\n'
        'read = csv_format.blocks\n'
        'def blocks(path, *rest):\n'
        '  yield from read(path, *rest)\n'
        '  open(path, "a").write("1,2,x\\n")\n'
        'csv_format.blocks = blocks',
        2,
        'log.csv: changed meanwhile; wanted a log that is complete',
      ),
      ('', 0, '^$'),
    ):
      done = commands.run('-c', f'{begin}{what}\nsplit.main()')
      self.assertEqual(done.returncode, status, done.stderr)
      self.assertRegex(done.stderr, told)
      self.assertEqual(content() == before, status != 0)
    self.assertLen(os.listdir(out), 3, 'what a killed process left is gone')

  def test_mistakes_end_in_one_line(self):
    for arguments, wanted in (
      ([], 'found neither; wanted --by_time COLUMN or --by_hash COLUMN'),
      (['--by_hash', 'usr'], "no column 'usr' .--by_hash. among 3 columns.*'user'"),
      (['--by_time', 'text'], "column 'text' is empty in 667 samples"),
      (['--by_hash', 'user', '--shares', '50,50'], 'found 50,50; wanted three'),
      (['--by_hash', 'user', '--shares', 'nan,nan,nan'], '--shares: found nan,nan,nan; wanted'),
      (['--by_hash', 'user', '--shares', 'inf,-inf,100'], '--shares: found inf,-inf,100; wanted'),
      (['--by_hash', 'user', '--delimiter', ';;'], "--delimiter: found ';;'; wanted one ASCII"),
      (['--by_hash', 'user', '--columns', 'user,user,x'], "column 'user' .* is there 2 times"),
      (['--by_hash', 'user', '--time_format', '%Y'], '--time_format: found with --by_hash'),
      (['--by_hash', 'user', '--at', '1,2'], '--at: found with --by_hash; wanted --by_time'),
      (['--by_time', 'time', '--at', '1'], '--at: found 1; wanted two times that rise'),
      (['--by_time', 'time', '--at', '2024-01-01,2'], '--at: found .*; wanted numbers, as'),
      (['--by_time', 'time', '--at', '400,600'], "a split is empty; 'time' is 0 to 499"),
    ):
      status, told = self.split('log.csv', *arguments)
      self.assertEqual(status, 2)
      self.assertRegex(told, f'^error: .*{wanted}')

  def test_columns_that_have_no_order_or_hash(self):
    path, out = f'{self.folder}/odd.parquet', f'{self.folder}/odd'
    os.makedirs(out)
    with open(f'{out}/train.parquet', 'w') as f:
      f.write('as it was')
    columns = {
      'list': pa.array([['a', 'b']] * 9),
      'struct': pa.array([{'x': 1}] * 9),
      'map': pa.array([[('a', 1)]] * 9, pa.map_(pa.string(), pa.int64())),
      'bytes': pa.array([b'\xff'] * 9),
      'bool': pa.array([True] * 9),
      'half': pa.array([0.5] * 9),
      'clock': pa.array([datetime.time(1, 2)] * 9),
      'decimal': pa.array(range(9)).cast(pa.decimal128(38, 0)),
      'dictionary': pa.array([str(i) for i in range(9)]).dictionary_encode(),
    }
    pq.write_table(pa.table(columns), path)
    for flag, name, wanted in (
      ('--by_hash', 'list', "--by_hash list: found ['a', 'b'] in .*; wanted one value a sample"),
      ('--by_hash', 'struct', "column 'struct': found values of type struct"),
      ('--by_hash', 'map', "column 'map': found values of type map|--by_hash map: found"),
      ('--by_hash', 'half', '--by_hash half: found 0.5 in .*; wanted a whole number or a text'),
      ('--by_time', 'list', "column 'list' is empty in 9 samples; wanted a time"),
      ('--by_time', 'struct', "column 'struct': found values of type struct"),
      ('--by_time', 'map', "column 'map'"),
      ('--by_time', 'bytes', '--by_time bytes: found bytes that are no UTF-8; wanted times'),
      ('--by_time', 'bool', "found 'true', which is no time"),
      ('--by_time', 'clock', "found '01:02:00', which is no time"),
    ):
      done = commands.run('-m', 'trainer.cli.split', '--data', path, '--out', out, flag, name)
      self.assertRegex(done.stderr, f'^error: .*{wanted.replace("[", ".")}.*\n$')
      self.assertEqual(done.returncode, 2)
    with open(f'{out}/train.parquet') as f:
      self.assertEqual(f.read(), 'as it was')
    for name in ('decimal', 'dictionary'):
      done = commands.run(
        '-m', 'trainer.cli.split', '--data', path, '--out', out, '--by_time', name
      )
      self.assertEqual(
        pq.read_table(f'{out}/train.parquet')[name].to_pylist(), columns[name].to_pylist()[:7]
      )

  def test_files_that_are_there_already(self):
    told = 'train.csv: .* in place of the file that was there\n'
    self.split('log.csv', '--by_time', 'time')
    self.assertNotRegex(self.told, told)
    self.split('log.csv', '--by_hash', 'user')
    self.assertRegex(self.told, told)
    path = f'{self.folder}/train.csv'
    self.frame.to_csv(path, index=False)
    flags = '--data', path, '--out', self.folder, '--by_time', 'time'
    done = commands.run('-m', 'trainer.cli.split', *flags)
    self.assertEqual(done.returncode, 2)
    self.assertIn(f'error: --out {self.folder}: {path} is --data itself; wanted', done.stderr)
    self.assertLen(pd.read_csv(path), len(self.frame))

  def test_a_column_that_no_record_of_json_lines_has(self):
    path, out = f'{self.folder}/nested.jsonl', f'{self.folder}/nested'
    with open(path, 'w') as f:
      f.writelines('{"user": {"id": %d}, "time": %d}\n' % (i % 9, i) for i in range(100))
    for flag, column, near in (
      ('--by_time', 'tim', 'time'),
      ('--by_hash', 'user.idd', 'user'),
    ):
      done = commands.run('-m', 'trainer.cli.split', '--data', path, '--out', out, flag, column)
      self.assertEqual(done.returncode, 2)
      told = f"error: {path}: no column '{column}' ({flag}) among 2 columns; the nearest valid name"
      self.assertIn(f"{told} is '{near}'", done.stderr)
      self.assertNoCommonElements(os.listdir(self.folder), ['nested'], 'nothing is written')
    # The trainer takes usr.id for a column that these records lack, because they have an id.
    done = commands.run(
      '-m', 'trainer.cli.split', '--data', path, '--out', out, '--by_hash', 'usr.id'
    )
    self.assertIn("column 'usr.id' is empty in all samples; wanted values", done.stderr)
    with open(path, 'a') as f:
      f.write('{"late": 1}\n')
    done = commands.run(
      '-m', 'trainer.cli.split', '--data', path, '--out', out, '--by_time', 'late'
    )
    self.assertIn("column 'late' is empty in 100 samples; wanted a time", done.stderr)


if __name__ == '__main__':
  tf.test.main()
