"""Delimited text: CSV and TSV, also compressed (.gz, .zst, .bz2).

A record is a line, ended by LF or CRLF (or the file's end); quoted fields ("a,b", "" for a quote)
hold no line ends. Blank lines
are skipped.
"""

import csv
import functools

import numpy as np
import pyarrow as pa
import pyarrow.csv

from trainer.data.block import Block, Malformed
from trainer.data.schema import check_columns
from trainer.errors import UserError

BLOCK_BYTES = 8 << 20
MAX_LINE_BYTES = 64 << 20


def _fields(line, delimiter):
  """Fields (bytes) of one line without its end, or None where a quote stays open or a stray CR
  splits the line.
  """
  if b'"' not in line and b'\r' not in line:
    return line.split(delimiter)
  # With a line of its own behind it: an open quote would swallow that one.
  rows = (
    list(csv.reader([line.decode('latin-1') + '\n', 'x'], delimiter=delimiter.decode('latin-1')))
    if b'\r' not in line
    else []
  )
  return [f.encode('latin-1') for f in rows[0]] if len(rows) == 2 else None


def _to_arrow(raw, names, wanted, delimiter):
  """Parses whole lines. Returns: table of binary columns. Raises: pa.ArrowInvalid."""
  index = [str(names.index(w)) for w in wanted]
  table = pa.csv.read_csv(
    pa.BufferReader(raw),
    read_options=pa.csv.ReadOptions(
      column_names=[str(i) for i in range(len(names))], use_threads=False, block_size=len(raw) + 1
    ),
    parse_options=pa.csv.ParseOptions(delimiter=delimiter.decode()),
    convert_options=pa.csv.ConvertOptions(
      column_types={i: pa.binary() for i in index}, include_columns=index, strings_can_be_null=False
    ),
  )
  return {w: table.column(i).combine_chunks() for w, i in zip(wanted, index)}, table.num_rows


def _block(path, raw, first_line, names, wanted, delimiter):
  """Returns the Block of `raw`, lines that all end in LF, the first of which is line `first_line`
  of the file.
  """

  def line_text(line):
    return (
      raw.split(b'\n', line - first_line + 1)[line - first_line]
      .rstrip(b'\r')
      .decode(errors='replace')
    )

  try:
    columns, rows = _to_arrow(raw, names, wanted, delimiter)
    lines = first_line + np.arange(rows)
    malformed = []
    regular = rows == raw.count(b'\n')
  except pa.ArrowInvalid:
    regular = False
  # a blank line, a malformed record, or an open quote that swallowed the next lines: look at each
  # line
  if not regular:
    good, lines, malformed = [], [], []
    for number, line in enumerate(raw.split(b'\n')[:-1], first_line):
      line = line.rstrip(b'\r')
      if not line:
        continue
      fields = _fields(line, delimiter)
      if fields is not None and len(fields) == len(names):
        good.append(line)
        lines.append(number)
      else:
        found = 'an open quote or a stray line end' if fields is None else f'{len(fields)} fields'
        malformed.append(
          Malformed(number, found, f'{len(names)} fields', line.decode(errors='replace'))
        )
    lines = np.array(lines, np.int64)
    try:
      columns, rows = {w: pa.array([], pa.binary()) for w in wanted}, 0
      if good:
        columns, rows = _to_arrow(b'\n'.join(good) + b'\n', names, wanted, delimiter)
    except pa.ArrowInvalid:
      rows = None
    if rows != len(good):
      raise UserError(
        f'{path}: lines {first_line} to {number}: found quotes that do not pair up; wanted '
        'delimited text'
      )
  return Block(columns, lines, lambda i: line_text(lines[i]), malformed)


def _raw_blocks(path):
  """Yields bytes of whole lines, each of which ends in LF."""
  with pa.input_stream(path, compression='detect') as f:
    rest = f.read(3)
    rest = b'' if rest == b'\xef\xbb\xbf' else rest  # a byte order mark
    while chunk := f.read(BLOCK_BYTES):
      cut = chunk.rfind(b'\n') + 1
      if cut:
        yield rest + chunk[:cut]
        rest = chunk[cut:]
      else:
        rest += chunk
        if len(rest) > MAX_LINE_BYTES:
          raise UserError(f'{path}: found no line end in {len(rest)} bytes; wanted delimited text')
    if rest:
      # Short files and the last line; the end of file ends a line too.
      yield rest if rest.endswith(b'\n') else rest + b'\n'


def blocks(path, data, wanted):
  """Reads a text file in blocks of bounded size.

  Args:
    path: the file.
    data: `Config.data`. With `columns` the file needs no header; a first line that repeats them is
      skipped.
    wanted: column -> the config key that asks for it.
  Yields: functions without arguments that return one Block each, in file order; they may run in
    parallel.
  Raises: UserError where the file is missing, empty or no text, or lacks a wanted column.
  """
  delimiter = data.delimiter.encode()
  if len(delimiter) != 1:
    raise UserError(f'data.delimiter: found {data.delimiter!r}; wanted one ASCII character')
  names, line = data.columns, 1
  if names is not None:
    check_columns('data.columns', names, wanted)
  try:
    for raw in _raw_blocks(path):
      if line == 1:
        end = raw.index(b'\n') + 1
        first = [
          f.decode(errors='replace').strip()
          for f in _fields(raw[:end].rstrip(b'\r\n'), delimiter) or ['']
        ]
        if names is None or first == names:
          if names is None:
            check_columns(f'{path}:1', first, wanted)
          names, raw, line = first, raw[end:], 2
      if raw:
        yield functools.partial(_block, path, raw, line, names, list(wanted), delimiter)
      line += raw.count(b'\n')
  except (OSError, pa.ArrowInvalid) as e:
    raise UserError(f'{path}: cannot be read: {e}') from None
