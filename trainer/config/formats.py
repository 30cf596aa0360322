"""The formats of a log's files: each is read by the trainer/data/*_format.py of its name."""

from typing import NamedTuple


class Format(NamedTuple):
  suffixes: tuple[str, ...]  # of its files
  has_lines: bool = False  # a record is a line, so that several processes can share a file


FORMATS = {
  'csv': Format(('.csv', '.tsv', '.txt', '.data', '.test'), has_lines=True),
  'jsonl': Format(('.jsonl', '.ndjson', '.json'), has_lines=True),
  'parquet': Format(('.parquet', '.pq')),
  'orc': Format(('.orc',)),
  'tfrecord': Format(('.tfrecord', '.tfrecords')),
  'libsvm': Format(('.libsvm', '.svm'), has_lines=True),
  'libffm': Format(('.libffm', '.ffm'), has_lines=True),
}
