"""Cuts one large file of a log into parts, which several processes convert.

Converted samples are stored in chunks of CHUNK, so a file is cut at multiples of CHUNK records:
joining the parts then only copies chunks.
"""

import contextlib

import numpy as np

from trainer import config
from trainer.config.formats import FORMATS
from trainer.data.conversion import format_of, reader
from trainer.data.csv_format import header_lines
from trainer.data.file_system import LogFile, Part, codec_of, open_file
from trainer.data.pass_files import files_of
from trainer.data.prepared import CHUNK
from trainer.errors import UserError

SHARED_BYTES = 64 << 20  # smaller files are converted by one process
SCAN_BYTES = 8 << 20


def shareable(data: config.Data, raw_path: str) -> LogFile | None:
  """Returns the file of a pass if several processes can share its conversion, else None.

  It must be the only file of the pass, large, and either uncompressed text, Parquet or ORC.
  """
  with contextlib.suppress(UserError):  # the conversion reports the mistake
    files = files_of(raw_path)
    kind = format_of(data, raw_path)
    has_lines = FORMATS[kind].has_lines
    is_cuttable = not codec_of(raw_path) if has_lines else hasattr(reader(kind), 'num_rows')
    if is_cuttable and len(files) == 1 and files[0].path == raw_path:
      return files[0] if files[0].bytes >= SHARED_BYTES else None
  return None


def count_lines(data: config.Data, file: LogFile, rank: int, size: int) -> list[int]:
  """Counts line ends in the blocks (SCAN_BYTES) rank, rank + size, … of a file; [] if no text."""
  if not FORMATS[format_of(data, file.path)].has_lines:
    return []
  with open_file(file.path) as f:
    starts = range(rank * SCAN_BYTES, file.bytes, size * SCAN_BYTES)
    return [f.read_at(SCAN_BYTES, start).count(b'\n') for start in starts]


def _start_of(file: LogFile, counts: np.ndarray, line: int) -> int:
  """Returns the byte at which a line (>= 1) begins; `counts` are the line ends of each block."""
  ends = np.cumsum(counts)
  block = int(np.searchsorted(ends, line))
  with open_file(file.path) as f:
    text = np.frombuffer(f.read_at(SCAN_BYTES, block * SCAN_BYTES), np.uint8)
  places = np.flatnonzero(text == ord('\n'))
  return block * SCAN_BYTES + int(places[line - 1 - (ends[block] - counts[block])]) + 1


def parts_of(data: config.Data, file: LogFile, counted: list[list[int]], size: int) -> list[Part]:
  """Cuts a file into `size` parts of whole chunks; `counted` has each rank's `count_lines`."""
  kind = format_of(data, file.path)
  is_text = FORMATS[kind].has_lines
  header = header_lines(file.path, data) if kind == 'csv' else 0
  counts = np.zeros([sum(map(len, counted))], np.int64)
  for rank, own in enumerate(counted):
    counts[rank :: len(counted)] = own
  records = int(counts.sum()) - header if is_text else reader(kind).num_rows(file.path)
  chunks = -(-records // CHUNK)
  firsts = sorted({r * chunks // size * CHUNK for r in range(size)})  # records that begin parts
  starts = [0] + [_start_of(file, counts, header + n) if is_text else n for n in firsts[1:]]
  lines = [1] + [header + n + 1 for n in firsts[1:]]
  return [Part(*part) for part in zip(starts, [*starts[1:], None], lines)]
