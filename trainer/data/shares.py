"""Cuts one large file into parts that several processes convert.

A prepared pass consists of chunks of CHUNK samples. If all parts but the last have whole chunks,
joining them is mere copying, so files are cut by numbers of records.
"""

import contextlib

import numpy as np

from trainer import config
from trainer.data import orc_format, parquet_format
from trainer.data.conversion import format_of
from trainer.data.csv_format import header_lines
from trainer.data.log_files import LogFile, Part, codec_of, files_of, open_file
from trainer.data.prepared import CHUNK
from trainer.errors import UserError

SHARED_BYTES = 64 << 20  # smaller files are converted by one process
SCAN_BYTES = 8 << 20
TEXTS = ('csv', 'jsonl', 'libsvm', 'libffm')
TABLES = {'parquet': parquet_format.num_rows, 'orc': orc_format.num_rows}


def shareable(cfg: config.Config, raw_path: str) -> LogFile | None:
  """Returns the file of a raw pass if several processes can convert it, else None.

  They can if it is one large uncompressed text, Parquet or ORC file.
  """
  with contextlib.suppress(UserError):  # the conversion reports it
    files = files_of(raw_path)
    kind = format_of(cfg.data, raw_path)
    is_cuttable = kind in TABLES or (kind in TEXTS and codec_of(raw_path) is None)
    if is_cuttable and len(files) == 1 and files[0].path == raw_path:
      return files[0] if files[0].bytes >= SHARED_BYTES else None
  return None


def count_lines(cfg: config.Config, file: LogFile, rank: int, size: int) -> list[int]:
  """Counts the line ends in each of the blocks rank, rank + size, rank + 2·size, … of a text.

  Returns:
    The count of each of these blocks of SCAN_BYTES; [] if the file is not a text.
  """
  if format_of(cfg.data, file.path) not in TEXTS:
    return []
  with open_file(file.path) as f:
    starts = range(rank * SCAN_BYTES, file.bytes, size * SCAN_BYTES)
    return [f.read_at(SCAN_BYTES, start).count(b'\n') for start in starts]


def _start_of(file: LogFile, counts: np.ndarray, line: int) -> int:
  """Returns the place in a text file, in bytes, at which a line begins.

  Args:
    counts: int64, how many line ends each block of SCAN_BYTES has.
    line: the number of the line, counted from 0; at least 1.
  """
  ends = np.cumsum(counts)
  block = int(np.searchsorted(ends, line))
  with open_file(file.path) as f:
    text = np.frombuffer(f.read_at(SCAN_BYTES, block * SCAN_BYTES), np.uint8)
  places = np.flatnonzero(text == ord('\n'))
  return block * SCAN_BYTES + int(places[line - 1 - (ends[block] - counts[block])]) + 1


def parts_of(cfg: config.Config, file: LogFile, counted: list[list[int]], size: int) -> list[Part]:
  """Cuts a file into at most `size` parts; all parts but the last have whole chunks of records.

  Args:
    file: a result of `shareable`.
    counted: for a text, the results of `count_lines` on all ranks.
  """
  kind = format_of(cfg.data, file.path)
  is_text = kind in TEXTS
  header = header_lines(file.path, cfg.data) if kind == 'csv' else 0
  counts = np.zeros([sum(map(len, counted))], np.int64)
  for rank, own in enumerate(counted):
    counts[rank :: len(counted)] = own
  records = int(counts.sum()) - header if is_text else TABLES[kind](file.path)
  chunks = -(-records // CHUNK)
  firsts = sorted({r * chunks // size * CHUNK for r in range(size)})  # records that begin parts
  starts = [0] + [_start_of(file, counts, header + n) if is_text else n for n in firsts[1:]]
  lines = [1] + [header + n + 1 for n in firsts[1:]]
  return [Part(*part) for part in zip(starts, [*starts[1:], None], lines)]
