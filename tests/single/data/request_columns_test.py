"""Requests of plain values are read as the log's reader reads them, to the bit."""

import random
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tests.support.retrieval import ITEM_COLUMNS
from tests.support.retrieval import make_config as of_items
from tests.support.steps import make_config
from trainer.data import request_columns
from trainer.data.request_columns import RequestColumns, Samples, Shared, WrongRequest

FEW = ['a', ' b ', '7', '12.0', 'größe', '']
MORE = [' ', 'NA', '-1', 'x|y', '|', 'a||b| ', 'two\nlines']
TEXTS = FEW * 7 + MORE + [None, 3, -0, 2**70, 5.0, ['a', 'b'], True]
NUMBERS = [0.5, -1, 7, None, float('nan'), 1e-40, 2**60] * 4 + [
  '1.5',
  'NA',
  '',
  2**2000,
  1e39,
  1e30,
]
OF_COLUMN = {
  'age': ['7', '12.0', ' ', None, 3, 'NA', '-1', '1e40', 'a', '1e-40'],
  'ts': ['1700000000', 0, '-5', None, '', 'NA', '1.5', 'a', 10**12, True],
  'topics': ['a', 'ax2', 'NAx3|b', '|bx-1.5', None, 7, 'ax', 'x2', 'axb', 'ax1e39', 'ax1e-40'],
}

CONFIGS = {
  'plain': {
    'data.slots': [
      {'name': 'item'},
      {'name': 'tags', 'separator': '|'},
      {'name': 'age'},
      {'name': 'seen', 'separator': '|', 'shares': 'item', 'sequence': {'max_length': 1}},
    ],
    'data.dense': [{'name': 'price'}, {'name': 'age'}, {'name': 'height'}],
    'data.missing_values': ['NA', '-1'],
  },
  'single': {'data.slots': [{'name': 'item'}, {'name': 'user'}], 'data.dense': []},
  'binned': {
    'data.slots': [
      {'name': 'item'},
      {'name': 'price bins', 'from': {'bins': 'price', 'boundaries': [0, 1e-41, 0.7, 5]}},
    ],
    'data.dense': [{'name': 'price'}],
    'data.missing_values': ['1', '-1', 'missing'],
  },
  'computed': {
    'data.slots': [
      {'name': 'tags', 'separator': '|'},
      {'name': 'topics', 'separator': '|', 'value_separator': 'x'},
      {'name': 'age'},
      {'name': 'age_bin', 'from': {'bins': 'age', 'boundaries': [1, 7]}},
      {'name': 'size', 'from': {'number': 'height'}},
      {'name': 'cross', 'from': {'cross': ['tags', 'age_bin', 'word']}},
      {'name': 'first', 'from': {'text': 'word', 'prefixes': [1, 2]}},
      {'name': 'hour', 'from': {'time': 'ts', 'part': 'hour', 'unit': 'seconds'}},
    ],
    'data.dense': [
      {'name': 'twice', 'from': {'expression': 'price * 2'}},
      {'name': 'height'},
      {'name': 'share', 'from': {'overlap': ['tags', 'word'], 'of': 'share'}},
    ],
    'data.missing_values': ['NA', '-1'],
  },
  'made_dense': {
    'data.slots': [{'name': 'item'}, {'name': 'user'}],
    'data.dense': [{'name': 'price'}, {'name': 'twice', 'from': {'expression': 'price * 2'}}],
  },
  'made_alone': {
    'data.slots': [{'name': 'a', 'from': {'text': 'b', 'lower': True}}],
    'data.dense': [],
  },
}


def _listed(samples):
  """With the key and segment of each feature: without what many share, and without short forms."""
  keys, segments = samples.keys[samples.places], samples.segments
  if len(segments) == len(keys):
    return samples._replace(keys=keys, places=None)
  segments = np.arange(len(keys), dtype=np.int32)
  values = np.ones([len(keys)], np.float32)
  return samples._replace(keys=keys, places=None, segments=segments, values=values)


class RequestColumnsTest(parameterized.TestCase, tf.test.TestCase):
  @parameterized.named_parameters((name, name) for name in (*CONFIGS, 'queries'))
  def test_requests_read_as_a_log_does(self, name):
    is_of_queries, rng = name == 'queries', random.Random(3)
    cfg = of_items(ITEM_COLUMNS) if is_of_queries else make_config(CONFIGS[name])
    reader, parse, parsed = RequestColumns(cfg), request_columns.parse, 0

    def counted(*arguments, **options):
      nonlocal parsed
      parsed += 1
      return parse(*arguments, **options)

    for _ in range(300):
      size, users = rng.choice([(1, 1), (2, 1), (5, 1), (5, 2), (2, 3), (3, 3)])
      shared = np.sort(rng.choices(range(users), k=size))
      few = rng.random() < 0.5  # most kinds of values are left to the log's reader
      columns = {}
      for column, is_text in reader.names.items():
        values = TEXTS if is_text else NUMBERS
        if name == 'computed':
          values = OF_COLUMN.get(column, values)
        kind, count = rng.choice([(Shared, users), (list, size)])
        columns[column] = kind(rng.choices(values[: 6 if few else None], k=count))
      found = []
      with mock.patch.object(request_columns, 'parse', counted):
        found.append(self.read(reader, columns, shared))
      with (
        mock.patch.object(request_columns, '_plain_texts', lambda _: None),
        mock.patch.object(RequestColumns, '_numbers', lambda *_: None),
      ):
        found.append(self.read(reader, columns, shared))
      if isinstance(found[1], str):
        self.assertEqual(*found)
        continue
      for field, value, wanted in zip(Samples._fields, *map(_listed, found)):
        if value is not wanted:
          self.assertEqual((value.dtype, value.shape), (wanted.dtype, wanted.shape), field)
          np.testing.assert_array_equal(value, wanted, f'{field} of {columns}')
    if name in ('single', 'binned'):
      self.assertBetween(parsed, 30, 200)  # the other requests are read without the log's reader

  def read(self, reader, columns, shared):
    try:
      return reader.read(columns, len(shared), shared.astype(np.int32))
    except WrongRequest as e:
      return str(e)


if __name__ == '__main__':
  tf.test.main()
