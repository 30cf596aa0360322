"""What slots and dense columns are made of is the same in conversion, the server and TensorFlow."""

import datetime
import gzip
import json
import os
import random
import re
import zoneinfo
from typing import NamedTuple

os.environ.setdefault('TF_USE_LEGACY_KERAS', '1')
import numpy as np
import pyarrow as pa
import pyarrow.orc
import pyarrow.parquet
import tensorflow as tf
import yaml

from tests.support import small
from tests.support.random_values import (
  ZONES,
  ids,
  iso,
  lists,
  numbers,
  odd_numbers,
  odd_times,
  seconds,
  texts,
)
from trainer.data.columns import cross, lookup
from trainer.data.columns.graph_columns import GraphColumn, GraphReader
from trainer.data.conversion import prepare_pass
from trainer.data.features import hash_keys
from trainer.data.prepared import PreparedPass, read_meta
from trainer.data.request_columns import RequestColumns, WrongRequest
from trainer.data.texts import texts_of
from trainer.errors import UserError


def example(row):
  """Returns a tf.Example of a record; it has no feature where a value is missing."""
  kinds = {
    str: lambda v: tf.train.Feature(bytes_list=tf.train.BytesList(value=[v.encode()])),
    int: lambda v: tf.train.Feature(int64_list=tf.train.Int64List(value=[v])),
    float: lambda v: tf.train.Feature(float_list=tf.train.FloatList(value=[v])),
  }
  found = {n: next(make(v) for t, make in kinds.items() if isinstance(v, t))
           for n, v in row.items() if v is not None}  # fmt: skip
  return tf.train.Example(features=tf.train.Features(feature=found))


def make_config(slots, dense=(), **data):
  return small.config(data={'slots': slots, 'dense': list(dense)} | data)


class ColumnsTest(tf.test.TestCase):
  def path(self, name):
    return os.path.join(self.get_temp_dir(), name)

  def write(self, name, columns, **kwargs):
    """Writes columns, lists of texts or None, in the format that the suffix says."""
    path, rows = self.path(name), [dict(zip(columns, row)) for row in zip(*columns.values())]
    if name.endswith('.tfrecord'):
      with tf.io.TFRecordWriter(path) as f:
        for row in rows:
          f.write(example(row).SerializeToString())
      return path
    if name.endswith(('.csv', '.csv.gz')):
      text = ','.join(columns) + '\n'
      for row in rows:
        values = ('' if v is None else str(v) for v in row.values())
        text += ','.join('"' + v.replace('"', '""') + '"' for v in values) + '\n'
    elif name.endswith('.jsonl'):
      text = ''.join(json.dumps(row, ensure_ascii=random.random() < 0.5) + '\n' for row in rows)
    else:
      writer = {'parquet': pa.parquet.write_table, 'orc': pa.orc.write_table}[name.split('.')[-1]]
      writer(pa.table({n: pa.array(c) for n, c in columns.items()}), path, **kwargs)
      return path
    with (gzip.open if name.endswith('.gz') else open)(
      path, 'wt', encoding='utf-8', newline=''
    ) as f:
      f.write(text)
    return path

  def prepared(self, cfg, path, labelled=False):
    prepare_pass(cfg, path, self.path('out'), labelled)
    return PreparedPass(self.path('out'))

  def converted(self, cfg, columns, name='log.csv'):
    batch = next(self.prepared(cfg, self.write(name, columns)).batches(10**6))
    return Found.of_batch(cfg, batch)

  def served(self, cfg, columns, size):
    """The same from small requests, in which plain columns are not read as a log's."""
    reader, step = RequestColumns(cfg), 50
    starts = range(0, size, step)
    parts = [
      reader.read({n: list(c[i : i + step]) for n, c in columns.items()}, min(step, size - i))
      for i in starts
    ]
    parts = [part._replace(keys=part.keys[part.places]) for part in parts]
    found = [Found.of_batch(cfg, part) for part in parts]
    slots = [
      tuple(map(np.concatenate, zip(*((k, v, s + i) for i, (k, v, s) in zip(starts, of_slot)))))
      for of_slot in zip(*(one.slots for one in found))
    ]
    return Found(slots, np.concatenate([one.dense for one in found]))

  def graph(self, cfg, columns, size):
    """The same from plain TensorFlow ops in a graph that TensorFlow has optimized."""
    ids, kinds = cfg.slot_ids(), cfg.data.log_columns()

    @tf.function(autograph=False)
    def run(inputs):
      log = {n: GraphColumn.single(c) for n, c in inputs.items()}
      made = GraphReader(cfg.data, log, tf.constant(size, tf.int64))
      dense = [tf.broadcast_to(made.dense(c), [size]) for c in cfg.data.dense]
      return [made.slot(s, ids[s.name])[:3] for s in cfg.ordered_slots], dense

    inputs = {
      n: tf.constant(['' if v is None else v for v in columns[n]])
      if is_text
      else tf.constant(
        [np.nan if v in (None, '') else float(v) for v in columns[n]],
        tf.float64 if n in cfg.data.exact_columns() else tf.float32,
      )
      for n, is_text in kinds.items()
    }
    slots, dense = run(inputs)
    dense = np.stack([d.numpy() for d in dense], 1) if dense else np.zeros([size, 0], np.float32)
    return Found([tuple(a.numpy() for a in slot) for slot in slots], dense)

  def check(self, cfg, columns):
    """Finds conversion, server and graph equal to the bit, and returns what they found."""
    size = len(next(iter(columns.values())))
    found = self.converted(cfg, columns)
    for other in (self.served(cfg, columns, size), self.graph(cfg, columns, size)):
      for slot, ours, theirs in zip(cfg.ordered_slots, found.slots, other.slots):
        for what, a, b in zip(('keys', 'values', 'samples'), ours, theirs):
          same = len(a) == len(b) and (a == b).all()
          if not same:
            n = min(len(a), len(b))
            at = int(np.argmin(np.append(a[:n] == b[:n], False)))
            i = int((ours if at < len(ours[2]) else theirs)[2][at])
            given = {name: c[i] for name, c in columns.items()}
            self.fail(
              f'{what} of slot {slot.name}, {i} {given}: {a[at : at + 3]}, other {b[at : at + 3]}'
            )
      for j, column in enumerate(cfg.data.dense):
        a, b = found.dense[:, j], other.dense[:, j]
        same = (a == b) | np.isnan(a) & np.isnan(b)
        if not same.all():
          i = int(np.argmin(same))
          given = {n: c[i] for n, c in columns.items()}
          self.fail(f'{column.name}, {given}: {a[i]!r}, other {b[i]!r}')
    return found

  def assert_texts(self, cfg, found, name, texts):
    """Checks that a slot's features are those of texts, a list a sample."""
    keys, _, samples = found.slots[[s.name for s in cfg.ordered_slots].index(name)]
    self.assertAllEqual(samples, np.repeat(np.arange(len(texts)), list(map(len, texts))))
    flat = [t for one in texts for t in one]
    self.assertAllEqual(keys, hash_keys(flat, cfg.slot_ids()[name]) if flat else [])


class Found(NamedTuple):
  """The features of slots and the dense columns of some samples."""

  slots: list  # of each slot: keys, values and samples [m]
  dense: np.ndarray

  @classmethod
  def of_batch(cls, cfg, batch):
    num_slots = len(cfg.data.slots)
    segments = batch.segments if len(batch.segments) else np.arange(len(batch.keys))
    values = batch.values if len(batch.values) else np.ones([len(batch.keys)], np.float32)
    places = [np.flatnonzero(segments % num_slots == f) for f in range(num_slots)]
    slots = [(batch.keys[p], values[p], segments[p] // num_slots) for p in places]
    return cls(slots, batch.dense)


class FacesTest(ColumnsTest):
  N = int(os.environ.get('N', 1_000))

  def setUp(self):
    super().setUp()
    self.rng = np.random.default_rng(30)
    random.seed(30)

  def test_a_misspelt_made_column_is_told_in_every_format(self):
    bins = {'name': 'price_bin', 'from': {'bins': 'price', 'boundaries': [1]}}
    cfg = make_config([bins, {'name': 'x', 'from': {'cross': ['user', 'price_bins']}}])
    for suffix in ('csv', 'jsonl', 'parquet', 'orc', 'tfrecord'):
      path = self.write(f'log.{suffix}', {'price': ['1'], 'user': ['u'], 'label': ['0']})
      with self.assertRaisesRegex(UserError, "no column 'price_bins'.*name is 'price_bin'"):
        prepare_pass(cfg, path, self.path(suffix))

  def test_a_column_made_from_itself_that_the_log_lacks(self):
    cfg = make_config([{'name': 'z', 'from': {'cross': ['z', 'user']}}])
    path = self.write('log.csv', {'user': ['u'], 'label': ['0']})
    with self.assertRaisesRegex(UserError, "no column 'z' .*; 'z' is made from itself; wanted"):
      prepare_pass(cfg, path, self.path('itself'))

  def test_bins_and_numbers(self):
    x = numbers(self.rng, self.N)
    # No model reads a number as it is whose square is no float32.
    x = [None if v is None or abs(float(v)) > 1e19 else v for v in x]
    bounds = [-3.5, 0, 0.7, 5, 20, 1e6]
    cfg = make_config(
      [
        {'name': 'bin', 'from': {'bins': 'x', 'boundaries': bounds}},
        {'name': 'log', 'from': {'bins': 'x', 'log_squared': True}},
        {'name': 'x_i', 'from': {'number': 'x'}},
        {'name': 'y', 'from': {'bins': 'y', 'boundaries': [1]}},  # its own name is the log's
      ],
      [{'name': 'x'}],
    )  # fmt: skip
    found = self.check(cfg, {'x': x, 'y': x})
    as32 = [None if v is None else np.float32(float(v)) for v in x]
    tiny = np.finfo(np.float32).tiny
    as32 = [v if v is None or abs(v) >= tiny else np.float32(0) for v in as32]
    bins = [
      ['missing' if v is None else str(sum(np.float32(b) <= v for b in bounds))] for v in as32
    ]
    self.assert_texts(cfg, found, 'bin', bins)
    values = [[] if v is None else [float(v)] for v in as32]
    self.assertAllEqual(found.slots[2][1], [v for one in values for v in one])
    # Of two numbers above 2 the bins are equal where ⌊ln²x⌋ is, but for the last digits.
    large = [
      (float(np.log(float(v)) ** 2), key) for v, key in zip(as32, found.slots[1][0]) if v and v > 2
    ]
    far = [(int(square), key) for square, key in large if abs(square - round(square)) > 1e-4]
    self.assertEqual(len(set(far)), len({square for square, _ in far}))

  def test_numbers_as_people_write_them(self):
    same = {'7': 7, ' +7 ': 7, '-0': -0.0, '12%': 0.12, '12 %': 0.12, '1e3': 1000, '': None}
    wrong = [
      '1,2,3',
      '1..2',
      '12,,',
      '%',
      '1 000',
      '0x1',
      '1_0',
      'inf',
      '1%%',
      '12 345 678',
      '1e99',
    ]
    point = {'1.5': 1.5, '.5': 0.5, '5.': 5, '1.5e-3': 0.0015, '0.25%': 0.0025}
    comma = {'1,5': 1.5, ',5': 0.5, '5,': 5, '1,5e-3': 0.0015, '0,25%': 0.0025, '1234,5': 1234.5}
    for written, right, also_wrong in (
      ({}, point, ['1,5', '1.234.567']),
      ({'decimal': ','}, comma, ['1.5', '1.234']),
      ({'decimal': ',', 'thousands': '.'}, comma | {'1.234': 1234, '-1.234.567,5%': -12345.675},
       ['1.5', '12.34,5', '.5', '1234.567']),
      ({'thousands': ','}, point | {'1,234.5': 1234.5, '12,345': 12345}, ['1,5']),
      ({'decimal': ',', 'thousands': '\u202f'}, comma | {'1\u202f234,5': 1234.5}, ['1.5']),
    ):  # fmt: skip
      slots = [{'name': 't'}, {'name': 'b', 'from': {'bins': 't', 'boundaries': [1]}}]
      slots.append({'name': 'n', 'from': {'number': 't'}})
      cfg = make_config(slots, [{'name': 't'}], max_bad_share=1.0, **written)
      given = right | same
      found = self.check(cfg, {'t': list(given)})
      wanted = [np.nan if v is None else v for v in given.values()]
      self.assertAllEqual(found.dense[:, 0], np.float32(wanted))
      self.assertAllEqual(self.graph(cfg, {'t': ['1' * 400]}, 1).dense, [[np.nan]])
      # Columns of numbers alone are read in another way.
      alone = make_config([{'name': 'other'}], [{'name': 'x'}], max_bad_share=1.0, **written)
      columns = {'other': ['a'] * len(given), 'x': list(given)}
      self.assertAllEqual(self.converted(alone, columns).dense[:, 0], np.float32(wanted))
      numbers = {'other': ['a', 'b'], 'x': [1.5, next(iter(right))]}
      self.assertAllEqual(
        self.converted(alone, numbers, 'log.jsonl').dense,
        self.served(alone, numbers, 2).dense,
      )
      wrong_here = {'other': ['a'] * (len(wrong) + len(also_wrong)), 'x': wrong + also_wrong}
      bad = self.prepared(alone, self.write('log.csv', wrong_here)).meta['bad']
      self.assertEqual(bad['records'], len(wrong) + len(also_wrong))

  def test_a_decimal_comma_is_told(self):
    cfg = make_config([{'name': 's'}], [{'name': 'x'}], max_bad_share=1.0)
    path = self.write('log.csv', {'s': ['a'], 'x': ['0,5']})
    wanted = self.prepared(cfg, path).meta['bad']['examples'][0]['wanted']
    self.assertEndsWith(wanted, "; data.decimal: ',' reads a decimal comma")

  def test_crosses_and_overlap(self):
    cfg = make_config(
      [
        {'name': 'user'},
        {'name': 'tags', 'separator': '|'},
        {'name': 'more', 'separator': '|', 'column': 'others'},
        {'name': 'bin', 'from': {'bins': 'x', 'boundaries': [0, 1]}},
        {'name': 'a', 'from': {'cross': ['user', 'bin']}},
        {'name': 'b', 'from': {'cross': ['tags', 'user', 'more']}},
        {'name': 'c', 'from': {'cross': ['tags', 'more'], 'most': 7}},
        {'name': 'd', 'from': {'cross': ['a', 'c', 'plain'], 'most': 3}},
        {'name': 'n', 'from': {'overlap': ['tags', 'more']}},
      ],
      [{'name': 'share', 'from': {'overlap': ['more', 'tags'], 'of': 'share'}}],
    )  # fmt: skip
    n = self.N
    columns = {'user': ids(self.rng, n), 'tags': lists(self.rng, n), 'others': lists(self.rng, n)}
    columns |= {'x': numbers(self.rng, n), 'plain': ids(self.rng, n)}
    found = self.check(cfg, columns)
    names = [s.name for s in cfg.ordered_slots]

    def words(text):
      stripped = [w.strip() for w in (text or '').split('|')]
      return [re.sub(r'^(\d+)\.0+$', r'\1', w) for w in stripped if w]

    pairs = [
      [(x, y) for x in words(a) for y in words(b)]
      for a, b in zip(columns['tags'], columns['others'])
    ]
    keys, _, samples = found.slots[names.index('c')]
    self.assertAllEqual(np.bincount(samples, minlength=n), [min(len(p), 7) for p in pairs])
    of_pair = dict(zip([p for some in pairs for p in some[:7]], keys))
    self.assertAllEqual(keys, [of_pair[p] for some in pairs for p in some[:7]])
    self.assertEqual(len(set(of_pair.values())), len(of_pair))
    count = [len({*words(a)} & {*words(b)}) for a, b in zip(columns['tags'], columns['others'])]
    self.assert_texts(cfg, found, 'n', [[str(c)] for c in count])
    size = [len({*words(b)}) for b in columns['others']]
    share = [np.nan if s == 0 else np.float32(c / s) for c, s in zip(count, size)]
    self.assertAllEqual(found.dense[:, 0], share)

  def test_texts_of_crosses_show_their_parts(self):
    cfg = make_config(
      [
        {'name': 'user'},
        {'name': 'bin', 'from': {'bins': 'x', 'boundaries': [0, 1]}},
        {'name': 'cross', 'from': {'cross': ['user', 'bin']}},
        {'name': 'tags', 'separator': '|'},
        {'name': 'several', 'from': {'cross': ['tags', 'bin', 'user']}},
      ]  # fmt: skip
    )
    columns = {'user': ['a', 'ü', None, 'a', '7.0'], 'x': ['0.5', None, '3', '0.5', '-1']}
    columns['tags'] = ['s|t', '', 's', 't', '2|t|2.0']
    converted = self.converted(cfg, columns)
    several = ['s × 1 × a', 't × 1 × a', 't × 1 × a', '2 × 0 × 7.0', 't × 0 × 7.0', '2 × 0 × 7.0']
    for i, shown in ((2, ['a × 1', 'ü × missing', 'a × 1', '7.0 × 0']), (4, several)):
      slot, keys, found = cfg.ordered_slots[i], converted.slots[i][0].tolist(), {}
      for some in texts_of(cfg, [self.path('log.csv')], slot, set(keys)):
        found |= some
      self.assertEqual([found[key] for key in keys], shown)
      hashed = [cross.feature_of(text, slot.made) for text in shown]
      self.assertAllEqual(hash_keys(hashed, cfg.slot_ids()[slot.name]), keys)

  def test_times_equal_zoneinfo_in_arrow_and_graph(self):
    n = self.N // 5
    for zone in ZONES:
      for unit, make in {
        'iso': iso(self.rng, n),
        'seconds': list(map(str, seconds(self.rng, n))),
        'milliseconds': [
          str(s * 1000 + int(self.rng.integers(1000)))
          for s in seconds(self.rng, n)
          if not 10**5 <= s < 7258119  # which would be taken for seconds
        ],
        'yyyymmddHH': [
          (datetime.datetime(1970, 1, 1) + datetime.timedelta(seconds=s)).strftime('%Y%m%d%H')
          for s in seconds(self.rng, n)
        ],
      }.items():
        with self.subTest(zone, unit=unit):
          of = {'time': 'ts', 'zone': zone, 'unit': unit}
          parts = ['hour', 'weekday', 'day', 'month', 'is_weekend']
          cfg = make_config(
            [{'name': p, 'from': of | {'part': p}} for p in parts],
            [{'name': 'm', 'from': of | {'part': 'minutes_since', 'since': 'before'}}],
          )  # fmt: skip
          before = make[1:] + make[:1]
          found = self.check(cfg, {'ts': make, 'before': before})
          instants = [instant(text, unit, zone) for text in make]
          local = [
            t if t is None or is_local(text, unit) else t.astimezone(zoneinfo.ZoneInfo(zone))
            for t, text in zip(instants, make)
          ]
          instants = [t and t.astimezone(datetime.timezone.utc) for t in instants]
          for p, get in {
            'hour': lambda t: t.hour,
            'weekday': lambda t: t.weekday(),
            'day': lambda t: t.day,
            'month': lambda t: t.month,
            'is_weekend': lambda t: int(t.weekday() > 4),
          }.items():
            wanted = [[] if t is None else [str(get(t))] for t in local]
            self.assert_texts(cfg, found, p, wanted)
          apart = [
            np.nan if a is None or b is None else (a - b).total_seconds() / 60
            for a, b in zip(instants, instants[1:] + instants[:1])
          ]
          self.assertAllClose(found.dense[:, 0], apart, rtol=1e-6, atol=0)

  def test_wrong_values_are_the_same_everywhere(self):
    """Conversion drops them, the server refuses them, and the graph takes them as missing."""
    of = {'time': 'x', 'part': 'hour', 'zone': 'Europe/Berlin'}
    for slots, values in (
      ([{'name': 'made', 'from': {'bins': 'x', 'boundaries': [0, 5]}}], odd_numbers),
      ([{'name': 'made', 'from': {'number': 'x'}}], odd_numbers),
      ([{'name': 'made', 'from': of}], odd_times),
    ):
      cfg = make_config([{'name': 'row'}, *slots, {'name': 'x'}], max_bad_share=1.0)
      columns = {'row': list(range(self.N)), 'x': values(self.rng, self.N)}
      batch = next(self.prepared(cfg, self.write('log.csv', columns)).batches(10**6))
      converted, graph = Found.of_batch(cfg, batch), self.graph(cfg, columns, self.N)
      kept = np.flatnonzero(np.isin(graph.slots[0][0], converted.slots[0][0]))
      self.assertBetween(len(kept), self.N // 20, self.N * 19 // 20)
      keys, values, samples = graph.slots[1]
      here = np.isin(samples, kept)
      self.assertAllEqual(converted.slots[1][0], keys[here])
      self.assertAllEqual(converted.slots[1][1], values[here])
      self.assertAllEqual(kept[converted.slots[1][2]], samples[here])
      missing = {'bins': hash_keys(['missing'], cfg.slot_ids()['made'])[0]}
      others = np.setdiff1d(np.arange(self.N), kept)
      self.assertNoCommonElements(
        others, samples[keys != missing.get(cfg.ordered_slots[1].made.kind)]
      )
      reader = RequestColumns(cfg)
      for row, value in enumerate(columns['x']):
        try:
          reader.read({'row': ['1'], 'x': [value]}, 1)
          self.assertIn(row, kept, f'{value!r} was served')
        except WrongRequest:
          self.assertNotIn(row, kept, f'{value!r} was refused')

  def test_what_is_no_time_is_a_wrong_record(self):
    for unit, wrong in {
      'iso': ['2024-02-30', '2023-02-29', '2024-13-01', '2024-00-10', '24-01-01', '2024-01-01T25',
              '2024-01-01T10:60', '2024-01-01T10:00:61', '1899-12-31T00:00Z', '2200-01-01', 'now',
              '2024-01-01T10:00+25:00', '0000-01-01', '２０２４-01-01', '2024-1-1'],
      'seconds': ['-2208988801', '7258118400', '1e9', 'x', '99999999999999999999', '1.5'],
      'milliseconds': ['7258118400000', '12:30', '1700000000', '100000000', '7258118399'],
      'yyyymmddHH': ['2024013124', '2024023012', '20240131', '202401311200'],
    }.items():  # fmt: skip
      of = {'time': 'ts', 'part': 'hour', 'unit': unit}
      cfg = make_config([{'name': 'hour', 'from': of}], max_bad_share=1.0)
      good = {'iso': '2024-01-31', 'yyyymmddHH': '2024013100'}.get(unit, '0')
      bad = self.prepared(cfg, self.write('a.csv', {'ts': [*wrong, good]})).meta['bad']
      self.assertEqual(bad['kinds'], {'made': len(wrong)})
      self.assertIn("column 'ts'", bad['examples'][0]['what'])
      found = self.graph(cfg, {'ts': [*wrong, good]}, len(wrong) + 1)
      self.assertAllEqual(found.slots[0][2], [len(wrong)])
      told = "column 'ts', sample 0: .*wanted .*1900 to 2199( .*text.*)?, which 'hour' is made of$"
      with self.assertRaisesRegex(WrongRequest, told):
        self.served(cfg, {'ts': wrong}, len(wrong))
    cfg = make_config([{'name': 'hour', 'from': {'time': 'ts', 'part': 'hour'}}])
    with self.assertRaisesRegex(
      WrongRequest, r"found '889237269'; .* \(unit: seconds, milliseconds"
    ):
      self.served(cfg, {'ts': ['889237269']}, 1)
    with self.assertRaises(WrongRequest) as caught:
      self.served(cfg, {'ts': ['2024-02-30']}, 1)
    self.assertNotIn('from:', str(caught.exception), 'it is written right')

  def test_a_time_written_otherwise_is_told_how_a_text_takes_its_hour(self):
    given = {'Zeit': ['01.12.2025 01:36:35'], 'kind': ['Küche 1']}
    cfg = make_config([{'name': 'Stunde', 'from': {'time': 'Zeit', 'part': 'hour'}}])
    with self.assertRaises(WrongRequest) as caught:
      self.served(cfg, given, 1)
    told = re.search(r"1900 to 2199 \(from: (\{text: .*'\}) takes a part", str(caught.exception))
    made = {
      'hour': yaml.safe_load(told[1]),
      'letters': {'text': 'kind', 'match': r'^(\p{L}+) '},
      'ascii': {'text': 'kind', 'match': r'^(\w+) '},
    }
    cfg = make_config([{'name': name, 'from': how} for name, how in made.items()])
    found = self.check(cfg, given)
    for name, wanted in ('hour', ['01']), ('letters', ['Küche']), ('ascii', []):
      self.assert_texts(cfg, found, name, [wanted])

  def test_patterns_match_alike_in_arrow_and_graph(self):
    patterns = [r'(\w+)/', r'^(.)', r'a(.*)b', r'(?i)(a+)', r'([^ ]*)$', r'[\p{L}]+(\P{L}+)']
    cfg = make_config(
      [{'name': f'match {i}', 'from': {'text': 't', 'match': p}} for i, p in enumerate(patterns)]
      + [
        {'name': 'lower', 'from': {'text': 't', 'lower': True}},
        {'name': 'one', 'from': {'text': 't', 'ngrams': 1}},
        {'name': 'three', 'from': {'text': 't', 'ngrams': 3, 'lower': True}},
        {'name': 'first', 'from': {'text': 't', 'prefixes': [1, 3, 6]}},
        {'name': 'both', 'from': {'text': 't', 'match': '([A-Z].*)', 'ngrams': 2}},
        {'name': 'words', 'from': {'text': 't', 'lower': True}, 'separator': ' '},
        {'name': 'of a text', 'from': {'cross': ['lower', 'three']}},
      ]  # fmt: skip
    )
    given = texts(self.rng, self.N)
    found = self.check(cfg, {'t': given})
    stripped = [(t or '').strip(' \t\r\n\v\f') for t in given]
    lowered = [''.join(c.lower() if c.isascii() else c for c in t) for t in stripped]
    self.assert_texts(cfg, found, 'lower', [[t] if t else [] for t in lowered])
    grams = [[t[i : i + 3] for i in range(max(1, len(t) - 2))] if t else [] for t in lowered]
    grams = [[g for g in one if g.strip(' \t\r\n\v\f')] for one in grams]
    self.assert_texts(cfg, found, 'three', grams)
    firsts = [
      [t[:n] for before, n in ((0, 1), (1, 3), (3, 6)) if len(t) > before] for t in stripped
    ]
    self.assert_texts(cfg, found, 'first', firsts)
    matched = [re.search(r'a(.*)b', t) for t in stripped]
    matched = [[m[1]] if m and m[1].strip(' \t') else [] for m in matched]
    self.assert_texts(cfg, found, 'match 2', matched)

  def test_a_text_that_is_not_unicode_is_wrong(self):
    cfg = make_config([{'name': 'one', 'from': {'text': 't', 'ngrams': 1}}], max_bad_share=1.0)
    path = self.path('log.csv')
    with open(path, 'wb') as f:
      f.write(b't\nab\n\xff\n\xed\xa0\x80\nc\xc3\xa4\n')
    bad = self.prepared(cfg, path).meta['bad']
    self.assertEqual(bad['kinds'], {'made': 2})
    found = self.graph(cfg, {'t': [b'ab', b'\xff', b'\xed\xa0\x80', b'c\xc3\xa4']}, 4)
    self.assert_texts(cfg, found, 'one', [['a', 'b'], [], [], ['c', 'ä']])

  def test_lookups(self):
    keys = ['1', '2', '3', 'x y', 'ü', 'unseen', '03']
    content = lookup.encoded(dict(zip(keys, ['7', 'a|b', '', '-0.0', '1e-3', 'c', 'Ä|a'])))
    of = {'lookup': 'id', 'table': 'items.csv', 'value': 'kind', 'content': content}
    cfg = make_config(
      [
        {'name': 'kind', 'from': of},
        {'name': 'kinds', 'from': of, 'separator': '|'},
        {'name': 'cross', 'from': {'cross': ['kinds', 'id']}},
      ],
      [{'name': 'price', 'from': of | {'content': lookup.encoded({'1': '7', 'x y': '2.50'})}}],
    )  # fmt: skip
    given = ids(self.rng, self.N)
    found = self.check(cfg, {'id': given})
    of_id = {'1': '7', '2': 'a|b', '2.0': 'a|b', '03': 'Ä|a', 'x y': '-0.0', ' x y ': '-0.0'}
    of_id['ü'] = '1e-3'
    self.assert_texts(cfg, found, 'kind', [[of_id[i]] if i in of_id else [] for i in given])
    self.assert_texts(
      cfg, found, 'kinds', [of_id[i].split('|') if i in of_id else [] for i in given]
    )
    # A SavedModel's graph may be the first to read a table.
    fresh = {'name': 'k', 'from': of | {'content': lookup.encoded({'first read': 'in a graph'})}}
    cfg_of_fresh = make_config([fresh])
    found_in_graph = self.graph(cfg_of_fresh, {'id': ['first read']}, 1)
    self.assert_texts(cfg_of_fresh, found_in_graph, 'k', [['in a graph']])
    prices = {'1': 7, 'x y': 2.5, ' x y ': 2.5}
    self.assertAllEqual(found.dense[:, 0], [prices.get(i, np.nan) for i in given])

  def test_expressions(self):
    expressions = {
      'a / b': lambda a, b: a / b,
      '(a + 1) + 2 + b * 3 + a * 3': lambda a, b: (a + 1) + 2 + b * 3 + a * 3,
      'a * b - b * 0.1 + a * 0.1': lambda a, b: a * b - b * 0.1 + a * 0.1,
      'log(a)': lambda a, b: np.where(a > 0, np.log(np.where(a > 0, a, 1)), np.nan),
      'log(abs(a) + 1) / log(abs(b) + 2)': (
        lambda a, b: np.log(np.abs(a) + 1) / np.log(np.abs(b) + 2)
      ),
      'min(a, b) + max(a, -b)': lambda a, b: np.minimum(a, b) + np.maximum(a, -b),
      'clip(a, -1, 3)': lambda a, b: np.clip(a, -1, 3),
      'where(a < b, a, 7)': lambda a, b: np.where(a < b, a, 7),
      'where(missing(a), b, a)': lambda a, b: np.where(np.isnan(a), b, a),
      '-a * (a >= b) + (a != b) * 2': lambda a, b: -a * (a >= b) + (a != b) * 2,
      '1 / 3 + a - a': lambda a, b: 1 / 3 + a - a,
      '(c - 1700000000) / 3600': lambda a, b: (c - 1700000000) / 3600,
    }
    dense = [{'name': f'e{i}', 'from': {'expression': e}} for i, e in enumerate(expressions)]
    cfg = make_config([{'name': 'bin', 'from': {'bins': 'e3', 'boundaries': [0, 1]}}], dense)
    columns = {'a': numbers(self.rng, self.N), 'b': numbers(self.rng, self.N)}
    columns['c'] = [str(second) for second in seconds(self.rng, self.N)]
    found = self.check(cfg, columns).dense
    a, b, c = (np.array([np.nan if v is None else float(v) for v in columns[n]]) for n in 'abc')
    with np.errstate(all='ignore'):
      for i, oracle in enumerate(expressions.values()):
        wanted = oracle(a, b)
        wanted = np.where(np.abs(wanted) > np.finfo(np.float32).max, np.nan, wanted)
        self.assertAllClose(found[:, i], wanted.astype(np.float32), rtol=1e-6, atol=1e-30)

  def test_libsvm_and_libffm_give_the_same_bytes_as_csv(self):
    """A field of libffm holds features, which crosses read; it is no number."""
    rows = [(int(self.rng.integers(2)), *self.rng.integers(0, 8, 2).tolist()) for _ in range(200)]
    cross_of = {'name': 'cross', 'from': {'cross': ['3', '5']}}
    for name, slot, line in (
      ('c.libsvm', {'name': 'bin', 'from': {'bins': '3', 'boundaries': [2, 5]}}, '{} 3:{} 5:{}\n'),
      ('c.libsvm', cross_of, '{} 3:{} 5:{}\n'),
      ('c.libffm', cross_of, '{} 3:{}:1 5:{}:1\n'),
    ):
      with self.subTest(name, slot=slot):
        cfg, arrays = make_config([slot], label='click'), []
        for path, head, of_row in (('c.csv', 'click,3,5\n', '{},{},{}\n'), (name, '', line)):
          with open(self.path(path), 'w', encoding='utf-8') as f:
            f.write(head + ''.join(of_row.format(*row) for row in rows))
          out = prepare_to(cfg, self.path(path), self.path('out'))
          arrays.append(read_meta(out)['arrays'])
        self.assertEqual(*arrays)

  def test_missing_values_and_formats_give_the_same_bytes(self):
    cfg = make_config(
      [
        {'name': 'bin', 'from': {'bins': 'x', 'boundaries': [0, 1]}},
        {'name': 'user', 'column': 'ctx.user.id'},
        {'name': 'os', 'from': {'text': 'ctx.os', 'lower': True}},
        {'name': 'cross', 'from': {'cross': ['user', 'os', 'bin']}},
        {'name': 'hour', 'from': {'time': 'ts', 'part': 'hour', 'unit': 'seconds'}},
        {'name': 'n', 'from': {'number': 'ctx.n'}},
      ],
      [{'name': 'e', 'from': {'expression': 'ctx.n * 2 + x'}}],
      missing_values=['NULL'],
      label='click',
    )  # fmt: skip
    n = 500
    x = [self.rng.choice([None, 0.5, 2.0, -1.0]) for _ in range(n)]
    flat = {
      'click': [int(self.rng.integers(2)) for _ in range(n)],
      'x': x,
      'ctx.user.id': [self.rng.choice(['7', 'NULL', 'ü', '']) for _ in range(n)],
      'ctx.os': [self.rng.choice(['iOS', 'Android', 'NULL', ' ']) for _ in range(n)],
      'ctx.n': [float(self.rng.integers(-1, 4)) for _ in range(n)],
      'ts': [int(s) for s in seconds(self.rng, n)],
    }
    nested = {'click': flat['click'], 'x': x, 'ts': flat['ts']} | {
      'ctx': [
        {'user': {'id': i}, 'os': o, 'n': m, 'more': 1}
        for i, o, m in zip(flat['ctx.user.id'], flat['ctx.os'], flat['ctx.n'])
      ]
    }
    arrays = []
    for name, columns in {
      'a.csv': flat,
      'a.jsonl': flat,
      'b.jsonl': nested,
      'a.parquet': flat,
      'b.parquet': nested,
      'b.orc': nested,
      'a.tfrecord': flat,
      'a.csv.gz': flat,
    }.items():
      with self.subTest(name):
        path = self.write(name, columns)
        arrays.append(read_meta(prepare_to(cfg, path, self.path('out')))['arrays'])
        self.assertEqual(arrays[-1], arrays[0])
    rows = [json.loads(line) for line in open(self.path('b.jsonl'), encoding='utf-8')]
    reader = RequestColumns(cfg)
    batch = reader.read({c: [row[c] for row in rows] for c in ('x', 'ts', 'ctx')}, n)
    keys = batch.keys[batch.places]
    self.assertAllEqual(keys, next(PreparedPass(self.path('out')).batches(n)).keys)
    self.assertEqual(reader.unknown(['ctx', 'x', 'y']), ['y'])


def prepare_to(cfg, path, out):
  prepare_pass(cfg, path, out)
  return out


def instant(text, unit, zone):
  """The instant of a text, in Python's own words; None for a missing one."""
  if not text:
    return None
  utc = datetime.timezone.utc
  if unit in ('seconds', 'milliseconds'):
    number = int(text) // (1000 if unit == 'milliseconds' else 1)
    return datetime.datetime(1970, 1, 1, tzinfo=utc) + datetime.timedelta(seconds=number)
  if unit == 'yyyymmddHH':
    at = datetime.datetime.strptime(text, '%Y%m%d%H')
  else:
    at = datetime.datetime.fromisoformat(text.replace(' ', 'T')).replace(microsecond=0)
  return at if at.tzinfo else at.replace(tzinfo=zoneinfo.ZoneInfo(zone))


def is_local(text, unit):
  """Whether a text tells a time on the zone's clock, which the clock may leave out."""
  at = unit == 'iso' and text and datetime.datetime.fromisoformat(text.replace(' ', 'T'))
  return unit == 'yyyymmddHH' or bool(at) and at.tzinfo is None


if __name__ == '__main__':
  tf.test.main()
