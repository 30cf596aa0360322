"""Requests that are almost right, or not at all; and logs with odd columns beside predictions."""

import copy
import csv
import gzip
import io
import json
import os
import random
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.orc
import pyarrow.parquet
import tensorflow as tf

_VALUES = (
  None,
  True,
  False,
  0,
  -1,
  2**70,
  10**400,
  1.5,
  1e308,
  float('nan'),
  float('inf'),
  '',
  ' ',
  'x' * 2000,
  '\ud800',
  '\0',
  '|;:|;:',
  'größe',
  [],
  [[]],
  [None],
  ['a', 1, None],
  {},
  {'b64': 'eA=='},
  {'b64': '*'},
  {'b64': 1},
  {'a': {'b': []}},
)


def _places(tree: Any, path: tuple = ()) -> Iterator[tuple]:
  """Yields the path of every value in a JSON tree."""
  yield path
  if isinstance(tree, (dict, list)):
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
      yield from _places(value, (*path, key))


def requests(rng: random.Random, good: dict[str, Any], count: int) -> Iterator[bytes]:
  """Yields bodies: a good one with some values changed, added or gone, or some bytes."""
  for _ in range(count):
    tree: Any = copy.deepcopy(good)
    for _ in range(rng.choice((0, 1, 1, 2, 5))):
      places = [path for path in _places(tree) if path]
      if not places:
        break
      *path, last = rng.choice(places)
      node = tree
      for key in path:
        node = node[key]
      if rng.random() < 0.3:
        del node[last]
      elif isinstance(node, dict) and rng.random() < 0.2:
        node[f'{last}{rng.randrange(9)}'] = rng.choice(_VALUES)
      else:
        node[last] = copy.deepcopy(rng.choice(_VALUES))
    body = bytearray(json.dumps(tree).encode())
    if rng.random() < 0.3:
      for _ in range(rng.choice((1, 3, 30))):
        at = rng.randrange(len(body) + 1)
        body[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(3))
    if rng.random() < 0.05:
      body = body[: rng.randrange(len(body) + 1)]
    yield bytes(body)


def mixed(
  rng: random.Random, rows: Sequence[dict[str, Any]], shared: Collection[str], count: int
) -> Iterator[dict[str, Any]]:
  """Yields requests of every form and size, none and many samples too; some lack a column.

  Args:
    rows: the samples to take.
    shared: the names of columns of which all samples of a request may have one value.
  """
  for _ in range(count):
    size = rng.choice((0, 0, 1, 1, 2, 3, 7, 30, rng.choice((256, 300))))
    some = [rng.choice(rows) for _ in range(size)]
    one = rng.choice(rows)
    if rng.random() < 0.1:
      gone = rng.choice(sorted(one))
      some = [{n: v for n, v in row.items() if n != gone} for row in some]
    form = rng.choice(('rows', 'columns', 'context')) if size else 'columns'
    if form == 'rows':
      yield {'instances': some}
    elif form == 'context':
      own = [{n: v for n, v in row.items() if n not in shared} for row in some]
      yield {'context': {n: one[n] for n in shared}, 'instances': own}
    else:
      names = rng.choice((list(shared), rng.sample(sorted(one), rng.randrange(len(one) + 1))))
      columns = {n: [one[n]] if n in names else [row.get(n) for row in some] for n in one}
      yield {'inputs': columns}


_CARRIED = (
  *(None, True, False, 0, 1, -7, 0.5, -0.0, 1.25, 3.0, 0.1234567890123456, 1e300, 5e-324),
  *(
    2**53 + 1,
    -(2**63),
    2**63 - 1,
    2**64 - 1,
    2**70,
    '',
    ' ',
    'x',
    '7',
    '007',
    'null',
    '[1]',
    '{}',
  ),
  *('a,"b"', "it's", 'größe', '😀', 'tab\there', 'line\nend', '\ud800', '"', [], [1], [1, 2.5]),
  *([None], ['a', 'b'], [[1], []], {}, {'eur': 0.5}, {'a': {'b': [1]}}, ['{', {'x': None}]),
)
_OF_ONE_TYPE = {  # what a column of Parquet, ORC or TFRecord may hold
  'int64': (0, 1, -7, 2**53 + 1, 2**63 - 1, -(2**63)),
  'double': (0.5, 1.25, 3.0, 0.1234567890123456, 1e300),
  'string': ('x', '7', '007', '1.50', 'a,"b"', 'größe', '😀'),
  'bool': (True, False),
  'list': ([], [1], [2, 3]),
}


def carried_log(rng: random.Random, folder: str, count: int = 40) -> tuple[str, list[Any]]:
  """Writes a log with columns n (0, 1, …) and odd, in any format; returns its path and `odd`."""
  kind = rng.choice(('jsonl', 'jsonl.gz', 'csv', 'parquet', 'orc', 'tfrecord'))
  path, of_type = (
    os.path.join(folder, f'{rng.randrange(10**9)}.{kind}'),
    rng.choice([*_OF_ONE_TYPE]),
  )
  if 'jsonl' in kind:
    some = rng.sample(_CARRIED, rng.choice((1, 2, 5, len(_CARRIED))))
    values = [rng.choice(some) for _ in range(count)]
    lines = [json.dumps({'n': n, 'odd': v}) for n, v in enumerate(values)]
    if rng.random() < 0.3:  # what is absent is null
      lines = [
        json.dumps({'n': n} | ({} if v is None and n else {'odd': v})) for n, v in enumerate(values)
      ]
    opened = gzip.open if kind.endswith('gz') else open
    with opened(path, 'wt', encoding='utf-8') as f:
      f.writelines(f'{line}\n' + '\n' * (rng.random() < 0.1) for line in lines)
    return path, values
  if kind == 'csv':
    texts = [v for v in _CARRIED if isinstance(v, str) and '\n' not in v and '\ud800' not in v]
    values = [rng.choice(texts) for _ in range(count)]
    with open(path, 'w', encoding='utf-8', newline='') as f:
      csv.writer(f, lineterminator='\n').writerows([('n', 'odd'), *enumerate(values)])
    return path, values
  values = [rng.choice((*_OF_ONE_TYPE[of_type], None)) for _ in range(count)]
  if kind == 'tfrecord':
    return path, _tfrecord(path, values)
  table = pa.table({'n': range(count), 'odd': values})
  if kind == 'parquet':
    pyarrow.parquet.write_table(table, path, row_group_size=rng.choice((7, 1000)))
  else:
    pyarrow.orc.write_table(table, path)
  return path, values


def _tfrecord(path: str, values: list[Any]) -> list[Any]:
  """Writes tf.Examples; returns the values as they are there, a boolean as an integer."""
  values = [
    int(v) if isinstance(v, bool) else float(np.float32(v)) if v == 0.5 else v for v in values
  ]
  values = [0.5 if isinstance(v, float) else v for v in values]
  with tf.io.TFRecordWriter(path) as writer:
    for n, value in enumerate(values):
      several = value if isinstance(value, list) else [] if value is None else [value]
      feature = {'n': tf.train.Feature(int64_list=tf.train.Int64List(value=[n]))}
      if several and isinstance(several[0], str):
        several = tf.train.Feature(
          bytes_list=tf.train.BytesList(value=[v.encode() for v in several])
        )
      elif several and isinstance(several[0], float):
        several = tf.train.Feature(float_list=tf.train.FloatList(value=several))
      elif several:
        several = tf.train.Feature(int64_list=tf.train.Int64List(value=several))
      feature |= {'odd': several} if several else {}
      writer.write(
        tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()
      )
  return values


def carried_trial(rng: random.Random, folder: str) -> str | None:
  """Writes odd columns beside predictions; returns what is wrong with the file, or None.

  Each line must have the value of its record, exactly, and its own prediction.
  """
  from tests.support import small
  from trainer.data import carried
  from trainer.errors import UserError

  logs = [carried_log(rng, folder) for _ in range(rng.choice((1, 1, 2)))]
  wanted = [(n, v) for _, values in logs for n, v in enumerate(values)]
  suffix = rng.choice(('.csv', '.jsonl', '.parquet'))
  passes = [(path, len(values)) for path, values in logs]
  predictions = np.arange(len(wanted), dtype=np.float32) / 128
  cuts = sorted(rng.sample(range(1, len(wanted)), 3))
  out = io.BytesIO()
  tables = carried.carried_tables(small.config().data, passes, ['n', 'odd'], suffix)
  beside = carried.beside(tables, iter(np.split(predictions, cuts)), ['p'])
  try:
    carried.write_tables(beside, out, suffix)
  except UserError as e:  # of Parquet alone: integers above 2^53 beside fractions, in other blocks
    return None if suffix == '.parquet' and 'not in range' in str(e) else str(e)
  if suffix == '.jsonl':
    rows = [json.loads(line) for line in out.getvalue().decode().split('\n')[:-1]]
  elif suffix == '.csv':
    rows = list(csv.DictReader(io.StringIO(out.getvalue().decode(), newline='')))
  else:
    rows = pyarrow.parquet.read_table(io.BytesIO(out.getvalue())).to_pylist()
  if len(rows) != len(wanted):
    return f'{passes} {suffix}: {len(rows)} rows; wanted {len(wanted)}'
  for i, (row, (n, value)) in enumerate(zip(rows, wanted)):
    if int(row['n']) != n or float(row['p']) != i / 128 or not _alike(row['odd'], value, suffix):
      return f'{passes} {suffix}, row {i}: found {row}; wanted {n}, {value!r}, {i / 128}'
  return None


def _alike(found: Any, value: Any, suffix: str) -> bool:
  """Returns whether a value is the same in the output, as itself or, where allowed, as a text."""
  if type(found) is type(value) and found == value:
    return True
  if found == [] and value is None:  # in TFRecord they are alike
    return True
  if suffix == '.jsonl' or not isinstance(found, str):
    one = isinstance(value, list) and len(value) < 2 and found == (value or [None])[0]  # TFRecord
    return one or found == value and bool not in (type(found), type(value))
  if value is None or value == []:
    return found in ('', '[]')
  if isinstance(value, list) and len(value) == 1 and found == str(value[0]):
    return True
  if isinstance(value, str):
    return found in (value, value.encode(errors='backslashreplace').decode())
  return json.loads(found) == value and type(json.loads(found)) in (type(value), int)
