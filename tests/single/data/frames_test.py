"""A frame means what a CSV file of its values means; all else is refused in one line."""

import datetime
import decimal
import os
import pathlib
import tempfile
import uuid

os.environ.setdefault('TF_USE_LEGACY_KERAS', '1')
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import tensorflow as tf

from tests.support import small
from trainer.data import frames
from trainer.data.conversion import prepare_pass, prepare_table
from trainer.data.prepared import PreparedPass, read_meta
from trainer.data.schema import wanted_columns
from trainer.errors import UserError

N = 60
SLOTS = [{'name': 'user'}, {'name': 'tags', 'separator': '|'}]


def make_config(**data):
  return small.config(data={'label': 'click', 'slots': SLOTS, 'dense': [{'name': 'x'}]} | data)


class Exporter:
  """What is no frame of a library that we know, but exports an Arrow stream."""

  def __init__(self, table):
    self._table = table

  def __arrow_c_stream__(self, requested_schema=None):
    if self._table is None:
      raise RuntimeError('out of\nluck')
    return self._table.__arrow_c_stream__(requested_schema)


class FramesTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    rng, ids = np.random.default_rng(0), np.arange(N)
    self.frame = pd.DataFrame(
      {
        'click': rng.integers(0, 2, N),
        'user': rng.integers(0, 20, N).astype(str),
        'tags': ['|'.join(['a', 'größe', 'c'][: i % 4]) for i in ids],
        'x': rng.normal(size=N),
      }
    )
    self.table = pa.Table.from_pandas(self.frame, preserve_index=False)
    self.out = tempfile.mkdtemp(dir=self.get_temp_dir()) + '/out'

  def arrays(self, frame, cfg=None):
    """Checksums of all arrays that a frame is converted to."""
    cfg = cfg or make_config()
    table = frames.table_of(frame, wanted_columns(cfg), cfg.data.made)
    prepare_table(cfg, table, frames.FRAME, self.out)
    return read_meta(self.out)['arrays']

  def of_csv(self, frame, cfg=None):
    path = tempfile.mkdtemp(dir=self.get_temp_dir()) + '/log.csv'
    frame.to_csv(path, index=False)
    prepare_pass(cfg or make_config(), path, self.out)
    return read_meta(self.out)['arrays']

  def put(self, name, values):
    """The table with other values in one column."""
    table = self.table.drop_columns([name]) if name in self.table.column_names else self.table
    return table.append_column(name, values)

  def test_values_are_those_of_a_csv_file(self):
    user, n = self.frame['user'], np.arange(N)
    for name, column in {
      'whole': user.astype(int),
      'floats': user.astype(float).where(n % 5 > 0),
      'nullable': user.astype(int).astype('Int64').where(n % 5 > 0),
      'categories': user.astype('category'),
      'integers as categories': user.astype(int).astype('category'),
      'sparse': user.astype(int).astype('Sparse[int]'),
      'objects': user.astype(object).where(n % 5 > 0, None),
      'mixed': pd.Series([1, 'b', 2.0, None, decimal.Decimal('1.5'), 10**30] * 10, dtype=object),
      'bins': pd.cut(self.frame['x'], 4),
      'periods': pd.Series(pd.period_range('2024-01', periods=N, freq='M')),
      'days': pd.Series([datetime.date(2024, 1, 1 + i % 28) for i in n]),
      'ids': pd.Series([uuid.UUID(int=int(i) % 7) for i in n]),
      'ids that Arrow cannot read': pd.Series([uuid.UUID(int=i % 7) for i in n]),
      'booleans': self.frame['x'] > 0,
      'booleans with blanks': (self.frame['x'] > 0).astype('boolean').where(n % 5 > 0),
      'mixed with booleans': pd.Series([True, 'TRUE', 1, 'x', None, False] * 10, dtype=object),
      'texts': pd.Series(['a "b"', ' c,d ', '', ' ', 'größe', '1.50'] * 10),
    }.items():
      with self.subTest(name):
        frame = self.frame.assign(user=column)
        self.assertEqual(self.arrays(frame), self.of_csv(frame))
        # What nobody reads does not matter.
        self.assertEqual(self.arrays(self.frame.assign(unread=column)), self.of_csv(self.frame))

  def test_what_a_csv_file_cannot_hold(self):
    wanted = self.of_csv(self.frame)
    lists = [text.split('|') if text else [] for text in self.frame['tags']]
    self.assertEqual(self.arrays(self.frame.assign(tags=lists)), wanted)
    for name, column in {
      'a line break': 'a\nb"',
      'sets and texts': [{1}, 'a'] * (N // 2),
      'objects': [object()] * N,
      'surrogates': pd.Series(['\ud800'] * N, dtype=object),
    }.items():
      with self.subTest(name):
        self.assertEqual(self.arrays(self.frame.assign(unread=column)), wanted)
    twice = pd.concat([self.frame, self.frame[['x']].set_axis(['y'], axis=1)] * 2, axis=1)
    twice = twice.loc[:, ['y', *self.frame]].iloc[:, [0, 1, 2, 4, 6, 8]]
    self.assertEqual(list(twice), ['y', 'y', *self.frame])
    self.assertEqual(self.arrays(twice), wanted)
    marked = self.frame.assign(x=self.frame['x'].where(np.arange(N) % 3 > 0, -999))
    cfg = make_config(missing_values=['-999'])
    self.assertEqual(self.arrays(marked, cfg), self.of_csv(marked, cfg))
    self.assertTrue(np.isnan(next(PreparedPass(self.out).batches(N)).dense[::3]).all())
    # Numbers are numbers, whatever the decimal mark of the log's texts.
    cfg = make_config(decimal=',')
    self.assertEqual(self.arrays(self.frame, cfg)['dense'], wanted['dense'])

  def test_every_arrow_type(self):
    wanted, table = self.arrays(self.table), self.table
    user, x = table['user'].combine_chunks().cast(pa.string()), table['x'].combine_chunks()
    ends = pa.array(np.arange(2, N + 2), pa.int32())
    runs = lambda a: pa.RunEndEncodedArray.from_arrays(ends, pa.concat_arrays([a]))[1:]
    views = pa.array(user.to_pylist(), pa.string_view())
    lists = [text.split('|') if text else None for text in self.frame['tags']]
    for name, column, of in (
      ('user', runs(user), 'runs'),
      ('user', runs(views), 'runs of views'),
      ('user', runs(user.dictionary_encode()), 'runs of categories'),
      ('user', views, 'views'),
      (
        'user',
        pa.DictionaryArray.from_arrays(pa.array(np.arange(N)), views),
        'views as categories',
      ),
      ('user', user.cast(pa.binary()), 'bytes'),
      ('user', user.cast(pa.decimal32(5, 0)), 'decimals'),
      ('user', pa.array([[u] for u in user.to_pylist()], pa.list_(pa.string(), 1)), 'one each'),
      ('user', pa.chunked_array([user[:9], user[9:9], user[9:]]), 'chunks'),
      ('tags', pa.array(lists), 'lists'),
      ('tags', pa.array(lists, pa.large_list(pa.string_view())), 'lists of views'),
      ('tags', pa.array(lists, pa.list_view(pa.string())), 'views of lists'),
      ('tags', runs(pa.array(lists)), 'runs of lists'),
      ('x', runs(x), 'runs'),
      ('x', pc.cast(x, pa.string()), 'texts'),
    ):
      with self.subTest(f'{name}: {of}'):
        other = self.put(name, column)
        self.assertEqual(self.arrays(other), wanted)
        cfg = make_config().model_copy(
          update={'run_dir': tempfile.mkdtemp(dir=self.get_temp_dir())}
        )
        ((written,),) = frames.write_passes(cfg, {'train': other}).values()
        (path,) = pathlib.Path(cfg.run_dir, 'frames').iterdir()
        self.assertEqual(str(path), written)
        prepare_pass(cfg, str(path), self.out)
        self.assertEqual(read_meta(self.out)['arrays'], wanted)
    polars = Exporter(self.put('user', views))
    spaced = self.frame.rename(columns={'user': ' user'})
    for frame in (table.to_batches()[0], table.to_reader(), Exporter(table), polars, spaced):
      self.assertEqual(self.arrays(frame), wanted)

  def test_an_arrow_type_that_no_log_has(self):
    user = self.table['user'].combine_chunks().cast(pa.string())
    odd = {
      'union': pa.UnionArray.from_sparse(pa.array([0] * N, pa.int8()), [user]),
      'extension<arrow.uuid>': pa.array([uuid.UUID(int=0).bytes] * N, pa.uuid()),
      'struct<>': pa.array([{}] * N, pa.struct([])),
      'month_day_nano_interval': pa.array([(1, 2, 3)] * N, pa.month_day_nano_interval()),
      'list<item: union|list<item: sparse_union': pa.ListArray.from_arrays(
        pa.array(np.arange(N + 1), pa.int32()),
        pa.UnionArray.from_sparse(pa.array([0] * N, pa.int8()), [user]),
      ),
      'duration': pa.array([1] * N, pa.duration('s')),
      'struct<a: int64>': pa.array([{'a': 1}] * N),
    }
    wanted = self.arrays(self.table)
    for name, column in odd.items():
      for column_name in ('user', 'tags', 'x', 'click'):
        told = f"column '{column_name}': found values of type .*({name}).*; wanted strings"
        with self.assertRaisesRegex(UserError, told):
          self.arrays(self.put(column_name, column))
      self.assertEqual(self.arrays(self.put('unread', column)), wanted)

  def test_mistakes_are_told_in_one_line(self):
    frame, user = self.frame, self.table['user']
    cases = (
      (
        frame.assign(user=[{1}, 'a'] * (N // 2)),
        "^the frame: column 'user': found a set among its",
      ),
      (
        frame.assign(user=1j),
        "^the frame: column 'user': found a complex among its values; wanted",
      ),
      (frame.assign(user=[['a'], 'b'] * (N // 2)), "'user': found a list among its values; wanted"),
      (
        frame.assign(user=pd.Series(['\ud800'] * N, dtype=object)),
        "^the frame: column 'user': found a text that is not Unicode",
      ),
      (frame.assign(user=1.5), "^the frame:1: column 'user': found 1.5; .* dtype=str"),
      (frame.assign(tags=[[1.5]] * N), r"column 'tags': found \[1.5\]; wanted features each"),
      (frame.assign(x=[[1.0, 2.0]] * N), r"column 'x': found \[1.0, 2.0\]; wanted one number"),
      (frame[:0], '^the frame: found no records; wanted at least one'),
      (pd.DataFrame(), "^the frame: no column 'click' .data.label. among 0 columns; also"),
      (frame.set_index('user'), "^the frame: no column 'user' .slot 'user'. among 3 columns"),
      (
        pa.Table.from_arrays([*self.table.columns, user], [*self.table.column_names, 'user']),
        "^the frame: column 'user' .slot 'user'. is there 2 times; wanted once",
      ),
      (Exporter(None), '^the frame: found a Exporter that is no table: out of$'),
    )
    for given, told in cases:
      with self.assertRaisesRegex(UserError, told) as raised:
        self.arrays(given)
      self.assertNotIn('\n', str(raised.exception))

  def test_what_is_no_frame(self):
    for value in (self.frame['user'], self.table['user'], self.table['x'].chunk(0), {}, 3, None):
      self.assertFalse(frames.is_frame(value), type(value))
      with self.assertRaisesRegex(UserError, 'train: found .*; wanted a frame'):
        frames.check_frames({'train': value})
    with self.assertRaisesRegex(UserError, 'train: found a list; wanted a frame'):
      frames.check_frames({'train': []})


if __name__ == '__main__':
  tf.test.main()
