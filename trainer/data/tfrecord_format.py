"""Reads TFRecord files of tf.Example, also gzipped (.gz).

A column is a feature of tf.Example: a list of bytes, integers or floats, which may be empty. The
first record that has the feature determines its kind; one with another kind is malformed.
"""

import functools
import os
import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import tensorflow as tf
from google.protobuf.message import DecodeError

from trainer import config
from trainer.data.arrays import offsets_of, texts_from
from trainer.data.block import BadRecord, Block
from trainer.data.file_system import codec_of, first_line, local_copy, open_stream
from trainer.data.schema import check_columns
from trainer.errors import BadPass

BLOCK_RECORDS = 16384
FRAME_BYTES = 16  # around each record: its length and two checksums
# UnicodeDecodeError: TensorFlow's error message has the record's bytes, which may be no text.
DOES_NOT_PARSE = (tf.errors.InvalidArgumentError, UnicodeDecodeError)
KINDS = {'bytes_list': tf.string, 'int64_list': tf.int64, 'float_list': tf.float32}


def _to_arrow(feature: tf.RaggedTensor) -> pa.Array:
  """Converts one feature of parsed examples to an Arrow list column."""
  values, splits = feature.values, pa.array(feature.row_splits.numpy().astype(np.int32))
  if values.dtype != tf.string:
    return pa.ListArray.from_arrays(splits, pa.array(values.numpy()))
  offsets = offsets_of(tf.strings.length(values).numpy())
  texts = texts_from(tf.strings.reduce_join(values).numpy(), offsets)
  return pa.ListArray.from_arrays(splits, texts.view(pa.binary()))


def _bad_records(
  records: tf.Tensor, features: dict[str, tf.io.RaggedFeature], first: int = 0
) -> list[int]:
  """Finds by bisection the records that do not parse; returns their indices, each plus `first`."""
  try:
    tf.io.parse_example(records, features)
    return []
  except DOES_NOT_PARSE:
    if len(records) == 1:
      return [first]
  half = len(records) // 2
  halves = (records[:half], first), (records[half:], first + half)
  return [bad for part, start in halves for bad in _bad_records(part, features, start)]


def _block(records: tf.Tensor, first_record: int, kinds: dict[str, tf.DType]) -> Block:
  features = {
    name: tf.io.RaggedFeature(kind, row_splits_dtype=tf.int64) for name, kind in kinds.items()
  }
  lines, malformed = first_record + np.arange(len(records)), []
  try:
    parsed = tf.io.parse_example(records, features)
  except DOES_NOT_PARSE:
    bad = _bad_records(records, features)
    for i in bad:
      raw, wanted = records[i].numpy(), 'a tf.Example with features of one kind'
      malformed.append(BadRecord(int(lines[i]), f'{len(raw)} bytes', wanted, repr(raw[:200])))
    good = np.delete(np.arange(len(lines)), bad)
    records, lines = tf.gather(records, good), lines[good]
    parsed = tf.io.parse_example(records, features)

  def text(i: int) -> str:
    raw = records[i].numpy()
    try:
      return ' '.join(str(tf.train.Example.FromString(raw)).split())
    except DecodeError:  # stricter than TensorFlow's parser
      return repr(raw[:200])

  return Block({n: _to_arrow(f) for n, f in parsed.items()}, lines, text, malformed)


def _kinds(records: np.ndarray, missing: set[str], names: set[str]) -> dict[str, tf.DType]:
  """Returns {name: dtype} for the features in `missing` whose dtype the records tell.

  `records` are serialized tf.Examples; the names of all features that it sees go into `names`.
  """
  kinds: dict[str, tf.DType] = {}
  for record in records:
    if len(kinds) == len(missing):
      break
    if names and not any(name.encode() in record for name in missing - kinds.keys()):
      continue
    try:
      feature = tf.train.Example.FromString(record).features.feature
    except DecodeError:  # it is counted as a bad record when it is parsed
      continue
    names.update(feature)
    for name in missing - kinds.keys():
      if name in feature and (kind := feature[name].WhichOneof('kind')):
        kinds[name] = KINDS[kind]
  return kinds


def _size(path: str) -> int:
  """Returns the number of bytes of a local file after decompression."""
  if codec_of(path) is None:
    return os.path.getsize(path)
  with open_stream(path) as f:
    return sum(map(len, iter(lambda: f.read(4 << 20), b'')))


def _reason(error: Exception) -> str:
  """Returns what an error in reading says of the file, without the names of TensorFlow's ops."""
  if place := re.search(r'(truncated|corrupted) record at (\d+)', str(error)):
    how = 'it ends in the middle of' if place[1] == 'truncated' else 'found a wrong checksum in'
    return f'{how} a record that begins near byte {place[2]}'
  return re.sub(r'^\{\{.*?\}\} | \[Op:.*', '', first_line(error))


def of_messages(values: Sequence[bytes], data: config.Data, wanted: dict[str, str]) -> Block:
  """Parses messages of a topic, one tf.Example each, to a Block whose lines are indices from 0."""
  with tf.device('cpu'):
    kinds = _kinds(np.array(values, object), set(wanted), set())
    examples = tf.constant([value or b'no example' for value in values])
    return _block(examples, 0, {name: kinds.get(name, tf.string) for name in wanted})


def blocks(path: str, data: config.Data, wanted: dict[str, str]) -> Iterator[Callable[[], Block]]:
  """Reads a TFRecord file in blocks as `csv_format.blocks` does; lines are records, from 1."""
  kinds, names, record, size = {}, set(), 1, 0
  compression = {'gzip': 'GZIP', None: ''}.get(codec_of(path))
  if compression is None:
    raise BadPass(f'{path}: found a TFRecord file compressed otherwise; wanted .gz')
  try:
    with local_copy(path) as local, tf.device('cpu'):
      for batch in tf.data.TFRecordDataset(local, compression, 1 << 20).batch(BLOCK_RECORDS):
        missing = wanted.keys() - kinds.keys()
        if missing:
          kinds = kinds | _kinds(batch.numpy(), missing, names)
        own = {name: kinds.get(name, tf.string) for name in wanted}
        yield functools.partial(_block, batch, record, own)
        record += len(batch)
        size += int(tf.reduce_sum(tf.strings.length(batch)))
      # TensorFlow takes a rest that is shorter than a header for the end of the file.
      left = _size(local) - size - FRAME_BYTES * (record - 1)
      if left:
        raise BadPass(
          f'{path}: not a TFRecord file that can be read: it ends in the middle of a record, '
          f'{left} bytes after record {record - 1}'
        )
  except (tf.errors.OpError, UnicodeDecodeError, OSError, pa.ArrowException) as e:
    raise BadPass(f'{path}: not a TFRecord file that can be read: {_reason(e)}') from None
  if record > 1:
    # An example may lack a feature; if all examples lack it, its name is wrong.
    check_columns(path, sorted(names | kinds.keys()), wanted, data.made)
