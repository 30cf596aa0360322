"""Reads text files in blocks of whole lines."""

import codecs
import math
from collections.abc import Iterator

import pyarrow as pa

from trainer.data.file_system import WHOLE, Part, first_line, open_stream
from trainer.errors import BadPass

BLOCK_BYTES = 8 << 20  # how much of a text is read at once
MAX_LINE_BYTES = 64 << 20


def text_blocks(
  path: str, part: Part = WHOLE, block_bytes: int | None = None
) -> Iterator[tuple[range, bytes]]:
  """Reads a text file, or a part of an uncompressed one, in blocks of whole lines, ended by LF.

  A byte-order mark at the beginning is left out. Yields the numbers of the block's lines, from 1 in
  the file, and its bytes. BadPass if it is no text with line ends, or its compression is damaged.
  """
  try:
    with open_stream(path) as f:
      rest, line, is_start, left = b'', part.line, part.start == 0, math.inf
      if part != WHOLE:
        f.seek(part.start)
        left = math.inf if part.end is None else part.end - part.start
      while chunk := f.read(min(block_bytes or BLOCK_BYTES, left)):
        left -= len(chunk)
        if is_start:
          while len(chunk) < 3 and (more := f.read(3)):
            chunk += more
          chunk, is_start = chunk.removeprefix(codecs.BOM_UTF8), False
          refuse_other_files(path, chunk)
        if cut := chunk.rfind(b'\n') + 1:
          lines = range(line, line + chunk.count(b'\n'))
          yield lines, rest + chunk[:cut]
          line, rest = lines.stop, chunk[cut:]
          continue
        rest += chunk
        if len(rest) > MAX_LINE_BYTES:
          raise _no_line_end(path, rest)
      if rest:
        if line == part.line and rest.count(b'\r') > 1:
          raise _no_line_end(path, rest)
        # The end of the file ends a line too.
        yield range(line, line + 1), rest + b'\n'
  except (OSError, pa.ArrowException) as e:
    raise BadPass(f'{path}: cannot be read: {first_line(e)}') from None


def _no_line_end(path: str, data: bytes) -> BadPass:
  if b'\r' in data:
    return BadPass(f'{path}: found lines that end in CR; wanted LF or CRLF at the end of each')
  return BadPass(f'{path}: found no line end in {len(data)} bytes; wanted text in lines')


def refuse_other_files(path: str, start: bytes) -> None:
  """Raises BadPass if a file that should be text begins like a file of another kind."""
  for magic, what in (
    (b'PAR1', 'a Parquet file; wanted text, or data.format: parquet'),
    (b'ORC', 'an ORC file; wanted text, or data.format: orc'),
    (b'\x1f\x8b', 'gzip-compressed data; wanted text, or the suffix .gz'),
    (b'\x28\xb5\x2f\xfd', 'zstd-compressed data; wanted text, or the suffix .zst'),
    (b'BZh', 'bzip2-compressed data; wanted text, or the suffix .bz2'),
    (b'PK\x03\x04', 'a zip archive; wanted text'),
    (b'\xff\xfe', 'UTF-16 text; wanted UTF-8'),
    (b'\xfe\xff', 'UTF-16 text; wanted UTF-8'),
  ):
    if start.startswith(magic) and not (magic == b'ORC' and start[3:4].isalnum()):
      raise BadPass(f'{path}: found {what}')
  if b'\0' in (start[:1], start[1:2]) and start[:2] != b'\0\0':
    raise BadPass(f'{path}: found zero bytes, as UTF-16 text has; wanted UTF-8')
