"""Damages records of every format and converts them: `python -m tests.support.damage --records
100000`.

Each trial ends in a count of records that an independent look at the bytes confirms, or in one
line; never in another exception.
"""

import argparse
import json
import os
import re
import struct
import tempfile
from collections.abc import Callable

os.environ.setdefault('TF_USE_LEGACY_KERAS', '1')
import numpy as np
import pyarrow as pa
import pyarrow.orc
import pyarrow.parquet
import tensorflow as tf

from tests.support import small
from trainer import config
from trainer.data.conversion import prepare_pass
from trainer.errors import UserError

RECORDS = 200  # of a file
INTERESTING = b'"\r\n,:|\t\0{}[]\\#\xff\xc3 0-e.'
HEADER = b'click,user,tags,price\n'


def cut_scratch_files() -> list[str]:
  """Cuts the files in which this process keeps rows, which have no name. Returns: their lengths."""
  links = {fd: f'/proc/self/fd/{fd}' for fd in os.listdir('/proc/self/fd')}
  named = {link: os.readlink(link) for link in links.values() if os.path.islink(link)}
  found = [path for path, name in named.items() if re.search(r'/rows-\w+ \(deleted\)$', name)]
  lengths = [os.path.getsize(path) for path in found]
  for path in found:
    os.truncate(path, 0)
  return lengths


def damaged(data: bytes, rng: np.random.Generator) -> bytes:
  """Some bytes with one to three of them changed, added, removed, or cut off."""
  data = bytearray(data)
  for _ in range(rng.integers(1, 4)):
    at = int(rng.integers(len(data) + 1))
    match rng.integers(5):
      case 0 if at < len(data):
        data[at] ^= 1 << int(rng.integers(8))
      case 1:
        data.insert(at, INTERESTING[rng.integers(len(INTERESTING))])
      case 2 if at < len(data):
        data[at] = INTERESTING[rng.integers(len(INTERESTING))]
      case 3:
        del data[at : at + int(rng.integers(1, 4))]
      case 4 if rng.random() < 0.2:
        del data[at:]
  return bytes(data)


def record(i: int) -> dict[str, object]:
  """A good record."""
  return {'click': i % 2, 'user': f'u{i % 17}', 'tags': [f't{i % 5}', 'x'], 'price': i / 8}


def text_records(data: bytes) -> int:
  """Lines that are not blank."""
  return sum(bool(line.removesuffix(b'\r')) for line in data.split(b'\n'))


def spaced_records(data: bytes) -> int:
  """As `text_records`, where a line of white space alone is blank."""
  return sum(bool(line.strip()) for line in data.split(b'\n'))


def svm_records(data: bytes) -> int:
  """As `spaced_records`, where # begins a comment."""
  return sum(bool(line.split(b'#')[0].strip()) for line in data.split(b'\n'))


def csv(rng: np.random.Generator) -> tuple[bytes, int]:
  """A file, and how many records it holds."""
  lines = []
  for i in range(RECORDS):
    r = record(i)
    user = f'"{r["user"]}"' if i % 3 == 0 else r['user']
    lines.append(f'{r["click"]},{user},{"|".join(r["tags"])},{r["price"]}'.encode())
  data = b'\n'.join(damaged(line, rng) for line in lines)
  return HEADER + data + b'\n', text_records(data)


def jsonl(rng: np.random.Generator) -> tuple[bytes, int]:
  """Likewise; a first line that stays good names the columns."""
  first = json.dumps(record(0)).encode() + b'\n'
  data = b'\n'.join(damaged(json.dumps(record(i)).encode(), rng) for i in range(RECORDS))
  return first + data, 1 + spaced_records(data)


def libsvm(rng: np.random.Generator) -> tuple[bytes, int]:
  """Likewise."""
  data = b'\n'.join(damaged(b'%d 1:0.5 %d:1' % (i % 2, i % 9 + 2), rng) for i in range(RECORDS))
  return b'1 1:1\n' + data, 1 + svm_records(data)


def libffm(rng: np.random.Generator) -> tuple[bytes, int]:
  """Likewise."""
  data = b'\n'.join(damaged(b'%d 0:1:0.5 1:%d:1' % (i % 2, i % 9), rng) for i in range(RECORDS))
  return b'1 0:1:1\n' + data, 1 + svm_records(data)


def serialised(i: int) -> bytes:
  """A good tf.Example."""
  r = record(i)
  feature = {
    'click': tf.train.Feature(int64_list=tf.train.Int64List(value=[r['click']])),
    'price': tf.train.Feature(float_list=tf.train.FloatList(value=[r['price']])),
  }
  for name, values in (('user', [r['user']]), ('tags', r['tags'])):
    texts = [v.encode() for v in values]
    feature[name] = tf.train.Feature(bytes_list=tf.train.BytesList(value=texts))
  return tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()


def tfrecord(rng: np.random.Generator) -> tuple[bytes, int]:
  """Likewise; now and then the framing is damaged, too."""
  with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, 'x')
    with tf.io.TFRecordWriter(path) as writer:
      writer.write(serialised(0))
      for i in range(RECORDS):
        writer.write(damaged(serialised(i), rng))
    with open(path, 'rb') as f:
      data = f.read()
  if rng.random() < 0.2:
    data = damaged(data, rng)
  count, at = 0, 0
  while at + 12 <= len(data):
    at += 16 + struct.unpack_from('<Q', data, at)[0]
    count += 1
  return data, count


def columnar(write: Callable) -> Callable[[np.random.Generator], tuple[bytes, int]]:
  """Likewise, of a format that is damaged anywhere in the file."""

  def make(rng: np.random.Generator) -> tuple[bytes, int]:
    sink = pa.BufferOutputStream()
    write(pa.Table.from_pylist([record(i) for i in range(RECORDS)]), sink)
    return damaged(sink.getvalue().to_pybytes(), rng), RECORDS

  return make


FORMATS = {
  'csv': csv,
  'jsonl': jsonl,
  'libsvm': libsvm,
  'libffm': libffm,
  'tfrecord': tfrecord,
  'parquet': columnar(
    lambda t, sink: pa.parquet.write_table(t, sink, write_page_checksum=True, row_group_size=50)
  ),
  'orc': columnar(pa.orc.write_table),
}


def config_of(name: str) -> config.Config:
  """The config that reads a format's files."""
  slots = [{'name': 'user'}, {'name': 'tags', 'separator': '|'}]
  dense = [{'name': 'price'}]
  if name == 'libsvm':
    slots, dense = [{'name': 'all', 'column': 'features'}], [{'name': '1'}]
  elif name == 'libffm':
    slots, dense = [{'name': 'a', 'column': '0'}, {'name': 'b', 'column': '1'}], []
  data = {'label': 'click', 'slots': slots, 'dense': dense, 'max_bad_share': 1.0, 'format': name}
  return small.config(data=data)


def trials(name: str, records: int, seed: int = 0) -> dict[str, int]:
  """Damages and converts files of a format.

  Returns:
    How many records there were, and how many were kept, counted as bad, or refused with their file.
  Raises:
    AssertionError: where the number of records is another, or a message has several lines.
  """
  rng, cfg = np.random.default_rng(seed), config_of(name)
  totals = dict.fromkeys(('records', 'kept', 'bad', 'refused'), 0)
  with tempfile.TemporaryDirectory() as folder:
    raw = os.path.join(folder, 'raw')
    while totals['records'] < records:
      data, count = FORMATS[name](rng)
      with open(raw, 'wb') as f:
        f.write(data)
      totals['records'] += RECORDS
      try:
        meta = prepare_pass(cfg, raw, os.path.join(folder, f'out{totals["records"]}'))
      except UserError as e:
        assert '\n' not in str(e) and len(str(e)) < 2000, str(e)
        totals['refused'] += count
        continue
      found = meta['samples'] + meta['bad']['records']
      if found != count:
        with open(f'damaged.{name}', 'wb') as f:
          f.write(data)
      assert found == count, f'{name}: found {found} records; wanted {count}: damaged.{name}'
      totals['kept'] += meta['samples']
      totals['bad'] += meta['bad']['records']
  return totals


if __name__ == '__main__':
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--records', type=int, default=100_000)
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--only', nargs='*', default=list(FORMATS))
  options = parser.parse_args()
  for name in options.only:
    print(name, trials(name, options.records // len(options.only), options.seed), flush=True)
