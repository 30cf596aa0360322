"""One meaning of a value however it is written and wherever it arrives: one key, one number."""

import contextlib
import json
import math
import os
import random
import types

os.environ.setdefault('TF_USE_LEGACY_KERAS', '1')
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.orc
import pyarrow.parquet
import tensorflow as tf

from tests.support import small
from tests.support.scorer import served
from trainer.data import frames
from trainer.data.columns.graph_columns import GraphColumn, GraphReader
from trainer.data.conversion import prepare_pass, prepare_table
from trainer.data.features import hash_keys
from trainer.data.prepared import PreparedPass
from trainer.data.request_columns import RequestColumns
from trainer.data.schema import wanted_columns
from trainer.serving.scorer import Scores

try:
  import grpc
  from tensorflow_serving.apis.predict_pb2 import PredictRequest
  from tensorflow_serving.apis.prediction_service_pb2_grpc import PredictionServiceStub
except ModuleNotFoundError:
  grpc = None

REFUSED = 'refused'
QUOTED = 'say "a, b"; \\"c\\"'
# What is written, the texts of the features that it means in a slot, and the number that it means.
# A typed float with a fraction may be refused in a slot, because its text is lost.
TABLE = [
  (['7', '7.0', ' 7.00 ', 7, 7.0], ['7'], 7),
  (['0', '-0.0', 0, 0.0], ['0'], 0),
  (['2.5', 2.5], ['2.5'], 2.5),
  (['-25e-1'], ['-25e-1'], -2.5),
  (['true', 'True', 'TRUE', True], ['true'], 1),
  (['false', 'False', ' FALSE', False], ['false'], 0),
  (['', ' ', None], [], None),
  (['-999', '-999.0', -999, -999.0], [], None),
  (['NULL', ' NULL'], [], None),
  (['Weird "Al" Sample', '"'], None, REFUSED),
  ([QUOTED], None, REFUSED),
  (['a|b', ['a', 'b']], ['a', 'b'], REFUSED),
  (['7.0|True|NULL|', ['7.0', 'True', 'NULL', '']], ['7', 'true'], REFUSED),
]
VALUES = [(v, (keys or [v.strip()]) if keys != [] else [], n) for vs, keys, n in TABLE for v in vs]


def make_config(is_slot, column='v', id='id', other='other', **data):
  """A config that reads `column` as a slot or as a number, and the number of the record, `id`."""
  slots = [{'name': 'f', 'column': column, 'separator': '|'}] if is_slot else [{'name': other}]
  data = {'slots': slots, 'missing_values': ['-999', 'NULL'], **data}
  data['dense'] = [{'name': id}] if is_slot else [{'name': id}, {'name': column}]
  return small.config(data=data | {'max_bad_share': 1.0})


def polars_table(columns):
  """A table of the types that Polars exports."""
  table = pa.table(columns)
  large = {pa.string(): pa.large_string(), pa.list_(pa.string()): pa.large_list(pa.large_string())}
  fields = [field.with_type(large.get(field.type, field.type)) for field in table.schema]
  return table.cast(pa.schema(fields))


def kind_of(value):
  return list if isinstance(value, list) else type(value)


def example(record):
  feature = {}
  for name, value in record.items():
    values = value if isinstance(value, list) else [value]
    if value is None:
      continue
    own = feature[name] = tf.train.Feature()
    if values and isinstance(values[0], str):
      own.bytes_list.value.extend(v.encode() for v in values)
    elif values and isinstance(values[0], float):
      own.float_list.value.extend(values)
    else:
      own.int64_list.value.extend(values)
  return tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()


class Reading:
  """A service whose only work is to read requests; it keeps the samples of the last one."""

  version, not_ready = types.SimpleNamespace(sequence=1), None

  def __init__(self, cfg):
    self._columns = RequestColumns(cfg)

  def unknown_columns(self, request):
    return []

  def predict(self, request):
    self.samples = self._columns.read(request.columns, request.size)
    return Scores({'probability': np.zeros([request.size], np.float32)}, {}), 1


class ValuesTest(tf.test.TestCase):
  def path(self, name):
    return os.path.join(self.get_temp_dir(), name)

  def write(self, name, values):
    """Writes records of an id, a value and another text, in the format that the suffix says."""
    rows, suffix = list(enumerate(values)), os.path.splitext(name)[1]
    records = [{'id': i, 'v': v, 'other': 'u'} for i, v in rows]
    if suffix in ('.parquet', '.orc'):
      table = pa.table({'id': range(len(rows)), 'v': values, 'other': ['u'] * len(rows)})
      (pa.parquet if suffix == '.parquet' else pa.orc).write_table(table, self.path(name))
    elif suffix == '.tfrecord':
      with tf.io.TFRecordWriter(self.path(name)) as writer:
        for record in records:
          writer.write(example(record))
    else:
      doubled = lambda text: '"' + text.replace('"', '""') + '"'
      backslash = lambda text: '"' + text.replace('\\', r'\\').replace('"', r'\"') + '"'
      quote = {'doubled.csv': doubled, 'backslash.csv': backslash}.get(name, str)
      by = '\t' if suffix == '.tsv' else ','
      line = {
        '.jsonl': lambda i, v: json.dumps(records[i]),
        '.libsvm': lambda i, v: (
          f'1 {v}:1 qid:{i}' if name == 'index.libsvm' else f'1 5:{v} qid:{i}'
        ),
      }.get(suffix, lambda i, v: by.join([str(i), quote(v or ''), 'u']))
      head = [by.join(['id', 'v', 'other'])] if suffix in ('.csv', '.tsv') else []
      with open(self.path(name), 'w', encoding='utf-8') as f:
        f.writelines(text + '\n' for text in [*head, *(line(i, v) for i, v in rows)])
    return self.path(name)

  def meanings(self, cfg, count):
    """What each of `count` values means in the prepared pass: its keys, or its number."""
    is_slot, one = len(cfg.data.dense) == 1, PreparedPass(self.path('out'))
    found = [REFUSED] * count
    batches = one.batches(999) if one.num_samples else ()
    for batch in batches:
      segments = batch.segments if len(batch.segments) else np.arange(len(batch.keys))
      for row, dense in enumerate(batch.dense):
        keys = batch.keys[segments == row].tolist()
        number = None if is_slot or math.isnan(dense[1]) else float(dense[1])
        found[int(dense[0])] = keys if is_slot else number
    return found

  def of_file(self, cfg, name, values):
    prepare_pass(cfg, self.write(name, values), self.path('out'), labelled=False)
    return self.meanings(cfg, len(values))

  def of_frame(self, cfg, make, values):
    columns = {'id': range(len(values)), 'v': values, 'other': ['u'] * len(values)}
    table = frames.table_of(make(columns), wanted_columns(cfg, labelled=False), cfg.data.made)
    prepare_table(cfg, table, 'the frame', self.path('out'), labelled=False)
    return self.meanings(cfg, len(values))

  def of_requests(self, cfg, values):
    """Yields what values mean by REST and, but for None, by gRPC."""
    service, is_slot = Reading(cfg), len(cfg.data.dense) == 1

    def meaning():
      number = float(service.samples.dense[0, -1])
      return service.samples.keys.tolist() if is_slot else None if math.isnan(number) else number

    with contextlib.ExitStack() as stack:
      client = stack.enter_context(served(service, rpc=grpc is not None))
      for value in values:
        status, _ = client.predict({'inputs': {'id': [0], 'other': ['u'], 'v': [value]}})
        yield 'rest', value, meaning() if status == 200 else REFUSED
      if grpc is None:
        return
      channel = stack.enter_context(grpc.insecure_channel(f'127.0.0.1:{client.rpc_port}'))
      predict = PredictionServiceStub(channel).Predict
      for value in values:
        if value is None:
          continue
        request = PredictRequest()
        request.model_spec.name = 'ctr'
        for name, one in {'id': 0.0, 'other': 'u', 'v': value}.items():
          request.inputs[name].CopyFrom(tf.make_tensor_proto([one]))
        try:
          predict(request, timeout=60)
          yield 'grpc', value, meaning()
        except grpc.RpcError:
          yield 'grpc', value, REFUSED

  def of_graph(self, cfg, values, dtype):
    """What values mean in a SavedModel."""
    size, is_slot = tf.constant(len(values), tf.int64), len(cfg.data.dense) == 1

    @tf.function
    def read(column):
      columns = {'v': GraphColumn.single(column)}
      reader = GraphReader(cfg.data, columns, size)
      if is_slot:
        return reader.slot(cfg.ordered_slots[0], 1)
      return reader.dense(cfg.data.dense[1])

    found = read(tf.constant(values, dtype))
    if not is_slot:
      return [None if math.isnan(n) else n for n in found.numpy().tolist()]
    return [found.keys.numpy()[found.samples.numpy() == i].tolist() for i in range(len(values))]

  def check(self, face, is_slot, values, found):
    """Compares what values mean with the table.

    Args:
      values: rows of VALUES.
    """
    for (value, texts, number), one in zip(values, found, strict=True):
      want = (hash_keys(texts, 1).numpy().tolist() if texts else []) if is_slot else number
      may_be_refused = is_slot and isinstance(value, float) and value % 1
      with self.subTest(face, value=value, is_slot=is_slot):
        self.assertIn(one, [want, REFUSED] if may_be_refused else [want])

  def faces(self, is_slot, rows, **data):
    """Yields (name, rows, what they mean) for everything that takes values."""
    cfg = make_config(is_slot, **data)
    texts = [row for row in rows if kind_of(row[0]) in (str, type(None))]
    by_kind = {
      kind: [row for row in rows if kind_of(row[0]) in (kind, type(None))]
      for kind in (str, int, float, bool, list)
    }
    values = lambda rows: [value for value, *_ in rows]
    yield 'csv', texts, self.of_file(cfg, 'doubled.csv', values(texts))
    for name, quoting in (('backslash.csv', 'backslash'), ('unquoted.tsv', 'none')):
      own = make_config(is_slot, quoting=quoting, **data)
      yield name, texts, self.of_file(own, name, values(texts))
    mixed = random.Random(0).sample(rows, len(rows))
    yield 'jsonl, mixed', mixed, self.of_file(cfg, 'mixed.jsonl', values(mixed))
    for row in rows:
      yield 'jsonl, alone', [row], self.of_file(cfg, 'one.jsonl', values([row]))
    for kind, own in by_kind.items():
      if all(value is None for value in values(own)):
        continue
      name = kind.__name__
      yield f'jsonl, {name}', own, self.of_file(cfg, 'kind.jsonl', values(own))
      yield f'parquet, {name}', own, self.of_file(cfg, 'x.parquet', values(own))
      yield f'orc, {name}', own, self.of_file(cfg, 'x.orc', values(own))
      if kind is not bool:
        yield f'tfrecord, {name}', own, self.of_file(cfg, 'x.tfrecord', values(own))
      yield f'pandas, {name}', own, self.of_frame(cfg, pd.DataFrame, values(own))
      yield f'polars, {name}', own, self.of_frame(cfg, polars_table, values(own))
    written = [row for row in texts if row[0] and row[0].isascii() and not set(row[0]) & set(' |"')]
    own = make_config(is_slot, 'features' if is_slot else '5', 'qid', other='7', **data)
    name = 'index.libsvm' if is_slot else 'value.libsvm'
    yield name, written, self.of_file(own, name, values(written))
    row_of = {repr(row[0]): row for row in rows}
    for face, value, meaning in self.of_requests(cfg, values(rows)):
      yield face, [row_of[repr(value)]], [meaning]
    graph = [row for row in texts if row[0] is not None and row[2] != REFUSED or is_slot and row[0]]
    yield 'saved_model, texts', graph, self.of_graph(cfg, values(graph), tf.string)
    for kind, dtype in ((int, tf.int64), (float, tf.float32)):
      own = [row for row in by_kind[kind] if row[0] is not None]
      own = [row for row in own if not is_slot or kind is int]
      yield f'saved_model, {dtype.name}', own, self.of_graph(cfg, values(own), dtype)

  def test_one_key(self):
    for face in self.faces(True, VALUES):
      self.check(face[0], True, *face[1:])

  def test_one_number(self):
    for face in self.faces(False, VALUES):
      self.check(face[0], False, *face[1:])

  def test_a_decimal_comma(self):
    rows = [('2,5', None, 2.5), (2.5, None, 2.5), ('-999,0', None, None), (-999.0, None, None)]
    for face in self.faces(False, rows, decimal=','):
      self.check(face[0], False, *face[1:])

  def test_a_record_means_the_same_beside_any_other(self):
    """Whatever makes Arrow refuse a block of JSON lines, wherever it stands."""
    slots = [
      {'name': 'f', 'separator': '|', 'value_separator': ':'},
      {'name': 'first', 'from': {'text': 'g', 'prefixes': [1, 9]}},
    ]
    data = {'label': 'y', 'label_positive': '4|5|true', 'slots': slots, 'max_bad_share': 1.0}
    data |= {'dense': [{'name': 'id'}, {'name': 'x'}], 'missing_values': ['-999', 'NULL']}
    cfg = small.config(data=data)
    values = {
      'f': ['a|b:0.5', ['a', 'NULL', 'b:2'], {'a': 3, 'NULL': 1}, 7, 7.0, True, None, ['7|8', 7.0]],
      'g': ['a b', 7.0, ['a b'], True, ['a', 'b'], {'a': 1}],
      'x': [-999.0, -999, '-999', 2.5, '2.5', True, 'TRUE', None, 1e30, 'x', [1]],
      'y': [4, 4.0, '4.0', '4', 4.5, 0, 3.0, '3', True, 'True', False, 'x', 40],
    }
    rng, records = random.Random(0), []
    for i in range(60):
      records.append({'id': i} | {name: rng.choice(some) for name, some in values.items()})
    odd = [
      '{"id": 1',
      '{"id": 99, "g": {"a": 1}, "f": [], "y": "4"}',
      '{"u": 1, "u": 2}',
      '[1]',
      ' ',
    ]

    def read(lines):
      with open(self.path('x.jsonl'), 'w', encoding='utf-8') as f:
        f.writelines(line + '\n' for line in lines)
      prepare_pass(cfg, self.path('x.jsonl'), self.path('out'))
      one = PreparedPass(self.path('out'))
      found = {}
      for batch in one.batches(999) if one.num_samples else ():
        segments = batch.segments if len(batch.segments) else np.arange(len(batch.keys))
        numbers = batch.values if len(batch.values) else np.ones([len(batch.keys)])
        for row, dense in enumerate(batch.dense):
          mine = segments // len(slots) == row
          parts = segments[mine] % len(slots), batch.keys[mine], numbers[mine]
          found[int(dense[0])] = (*(p.tolist() for p in parts), str(dense[1]), batch.label[row])
      return found

    lines = [json.dumps(record) for record in records]
    alone = {}
    for line in lines:
      alone |= read([line])
    self.assertGreater(len(alone), 20)
    self.assertEqual({one[-1] for one in alone.values()}, {0, 1})
    for record in records:
      if record['id'] in alone:
        self.assertEqual(alone[record['id']][-1], str(record['y']) in ('4', '4.0', 'True'), record)
    for place in (0, 30, 60):
      for line in odd:
        found = read([*lines[:place], line, *lines[place:]])
        found.pop(99, None)
        self.assertEqual(found, alone, (place, line))

  def test_labels_are_matched_however_they_are_written(self):
    ways = {
      '4|5': (['4', '4.0', '5.00', '40e-1', '4.5', '3', '3.0'], [1, 1, 1, 1, 0, 0, 0]),
      '4.0|5.0': (['4', '4.0', '5.00', '4.5', '40'], [1, 1, 1, 0, 0]),
      r'[45]\..*': (['4', '4.0', '4.50', '3.5'], [1, 1, 1, 0]),
      'True': (['True', 'true', 'TRUE', 'False', 'no'], [1, 1, 1, 0, 0]),
      '0?7': (['07', '7', '7.0', '0'], [1, 1, 1, 0]),
    }
    for positive, (texts, labels) in ways.items():
      data = {'label': 'v', 'label_positive': positive, 'max_bad_share': 1.0}
      cfg = small.config(data=data | {'slots': [{'name': 'other'}], 'missing_values': ['-1']})
      typed = (
        list(map(float, texts)) if positive[0] in '4[' else [t.lower() == 'true' for t in texts]
      )
      for name, values in (
        ('doubled.csv', texts),
        ('x.jsonl', texts),
        ('x.parquet', texts),
        ('x.jsonl', typed),
        ('x.parquet', typed),
      ):
        if positive == '0?7' and values is typed:
          continue
        with self.subTest(positive, name=name, typed=values is typed):
          blank = '-1.0' if values is texts else None
          prepare_pass(cfg, self.write(name, [*values, blank]), self.path('out'))
          self.assertAllEqual(next(PreparedPass(self.path('out')).batches(99)).label, labels)
