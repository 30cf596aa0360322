"""How several processes convert one large file: each its part, cut so that the parts of a prepared
pass can be put side by side.

A prepared pass numbers its samples in chunks of CHUNK. Where every part but the last has whole
chunks of samples, joining them is copying; so files are cut by their numbers of records.
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
  """The file of a raw pass where it is one, large, and can be read from the middle; else None.

  These are text that is not compressed, Parquet and ORC.
  """
  with contextlib.suppress(UserError):  # it is told where the pass is converted
    files = files_of(raw_path)
    kind = format_of(cfg.data, raw_path)
    is_cuttable = kind in TABLES or (kind in TEXTS and codec_of(raw_path) is None)
    if is_cuttable and len(files) == 1 and files[0].path == raw_path:
      return files[0] if files[0].bytes >= SHARED_BYTES else None
  return None


def count_lines(cfg: config.Config, file: LogFile, rank: int, size: int) -> list[int]:
  """The line ends in every size-th SCAN_BYTES of a text, from the rank-th on; else none."""
  if format_of(cfg.data, file.path) not in TEXTS:
    return []
  with open_file(file.path) as f:
    found = []
    for start in range(rank * SCAN_BYTES, file.bytes, size * SCAN_BYTES):
      f.seek(start)
      found.append(f.read(SCAN_BYTES).count(b'\n'))
  return found


def _start_of(file: LogFile, counts: np.ndarray, line: int) -> int:
  """Where the line with this number, from 0, begins. counts: line ends of each SCAN_BYTES."""
  ends = np.cumsum(counts)
  block = int(np.searchsorted(ends, line))
  with open_file(file.path) as f:
    f.seek(block * SCAN_BYTES)
    places = np.flatnonzero(np.frombuffer(f.read(SCAN_BYTES), np.uint8) == ord('\n'))
  return block * SCAN_BYTES + int(places[line - 1 - (ends[block] - counts[block])]) + 1


def parts_of(cfg: config.Config, file: LogFile, counted: list[list[int]], size: int) -> list[Part]:
  """Cuts a file into at most `size` parts of whole chunks of records.

  Args:
    cfg: the config.
    file: as `shareable` gave it.
    counted: of a text, what `count_lines` gave for each rank.
    size: the number of processes.
  """
  kind = format_of(cfg.data, file.path)
  is_text = kind in TEXTS
  header, counts = 0, np.zeros([0], np.int64)
  if is_text:
    counts = np.zeros([sum(map(len, counted))], np.int64)
    for rank, own in enumerate(counted):
      counts[rank :: len(counted)] = own
    header = header_lines(file.path, cfg.data) if kind == 'csv' else 0
    records = int(counts.sum()) - header
  else:
    records = TABLES[kind](file.path)
  chunks = -(-records // CHUNK)
  firsts = sorted({r * chunks // size * CHUNK for r in range(size)})  # records that begin parts
  starts = [0] + [_start_of(file, counts, header + n) if is_text else n for n in firsts[1:]]
  lines = [1] + [header + n + 1 for n in firsts[1:]]
  return [Part(*part) for part in zip(starts, [*starts[1:], None], lines)]
