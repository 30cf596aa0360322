"""Delimited text: CSV and TSV, also compressed (.gz, .zst, .bz2, .lz4).

A record is a line, ended by LF or CRLF (or the file's end); quoted fields ("a,b", "" for a quote)
hold no line ends. Blank lines are skipped. So are lines that repeat the line of names, as files
that were put together have them; the log tells of these. Whether a line is accepted depends on that
line alone.
"""

import codecs
import contextlib
import csv
import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from trainer import config
from trainer.data.block import BadRecord, Block
from trainer.data.log_files import WHOLE, Part, text_blocks
from trainer.data.schema import check_columns
from trainer.errors import BadPass, UserError

HEAD_BYTES = 64 << 10
BLOCK_BYTES = 8 << 20
PARSED_BYTES = 1 << 20  # that Arrow parses at once; its buffers then stay in the cache
MAX_LINE_BYTES = 64 << 20
OTHER_DELIMITERS = b'\t;|,'

csv.field_size_limit(MAX_LINE_BYTES + BLOCK_BYTES)


def _fields(line: bytes, delimiter: bytes) -> list[bytes] | None:
  """Fields of one line without its end, or None where a quote stays open or a CR splits it."""
  if b'\r' in line:
    return None
  if b'"' not in line:
    return line.split(delimiter)
  # With a line of its own behind it: an open quote would swallow that one.
  rows = list(
    csv.reader([line.decode('latin-1') + '\n', 'x'], delimiter=delimiter.decode('latin-1'))
  )
  return [f.encode('latin-1') for f in rows[0]] if len(rows) == 2 else None


def _to_arrow(
  raw: bytes,
  names: Sequence[str],
  wanted: Sequence[str],
  delimiter: bytes,
  numbers: Collection[str] = (),
  parsed_bytes: int | None = None,
) -> tuple[dict[str, pa.Array], int]:
  """Parses whole lines that end in LF and hold no CR, `parsed_bytes` at once where they say so and
  nothing is quoted.

  Returns:
    The columns, and the number of rows; fewer than lines where a line is blank or an open quote
    swallows the next. Those of `numbers` are float64, null where blank, the others binary.
  Raises:
    pa.ArrowInvalid: where a line has another number of fields, or is longer than `parsed_bytes`,
      or a field of `numbers` is no number, or none that is finite as float32.
  """
  quoted = b'"' in raw
  if quoted:  # a line of our own at the end, so that an open quote before it is noticed
    raw += delimiter * (len(names) - 1) + b'x\n'
  block_size = len(raw) + 1 if quoted or parsed_bytes is None else parsed_bytes
  index = [str(names.index(w)) for w in wanted]
  table = pa.csv.read_csv(
    pa.BufferReader(raw),
    read_options=pa.csv.ReadOptions(
      column_names=[str(i) for i in range(len(names))], use_threads=False, block_size=block_size
    ),
    parse_options=pa.csv.ParseOptions(
      delimiter=delimiter.decode(), quote_char='"' if quoted else False
    ),
    convert_options=pa.csv.ConvertOptions(
      column_types={
        i: pa.float64() if w in numbers else pa.binary() for w, i in zip(wanted, index)
      },
      include_columns=index,
      null_values=[''],
      strings_can_be_null=False,
    ),
  )
  table = table.slice(0, table.num_rows - quoted)
  columns = {w: table.column(i).combine_chunks() for w, i in zip(wanted, index)}
  with np.errstate(over='ignore'):
    for name in numbers:
      found = columns[name].fill_null(0).to_numpy().astype(np.float32)
      if not np.isfinite(found).all():
        raise pa.ArrowInvalid(f'{name}: not finite')
  return columns, table.num_rows


def _is_header(fields: Sequence[bytes], header: Sequence[bytes]) -> bool:
  """Whether a line repeats the names of the columns; a byte-order mark may precede them."""
  return fields[1:] == header[1:] and fields[:1] in ([header[0]], [codecs.BOM_UTF8 + header[0]])


def _rows_like_header(
  columns: dict[str, pa.Array], names: Sequence[str], header: Sequence[bytes]
) -> list[int]:
  """Returns the rows whose fields stand in the header too, in every column of `columns`."""
  if not all(pa.types.is_binary(array.type) for array in columns.values()):
    return []  # a column was read as numbers, which no name is
  rows = None
  for place in sorted(map(names.index, columns), reverse=True):
    # The first column comes last: a byte-order mark may stand before its name.
    like = pc.equal if place else pc.ends_with
    array = columns[names[place]]
    found = pc.indices_nonzero(like(array if rows is None else array.take(rows), header[place]))
    rows = found if rows is None else rows.take(found)
    if not len(rows):
      break
  return [] if rows is None else rows.to_pylist()


def _block(
  path: str,
  raw: bytes,
  first_line: int,
  names: Sequence[str],
  header: Sequence[bytes],
  wanted: Sequence[str],
  delimiter: bytes,
  num_lines: int,
  numbers: Collection[str],
) -> Block:
  """Returns the Block of some lines.

  Args:
    path: the file.
    raw: the lines, which all end in LF.
    first_line: the number of the first of them.
    names: of the file's columns.
    header: the fields of the line of names, as they stand in it.
    wanted: the columns to read.
    delimiter: between fields.
    num_lines: how many lines there are.
    numbers: those of `wanted` that may become float64; the others are binary.
  """

  def line_text(line: int) -> str:
    text = raw.split(b'\n', line - first_line + 1)[line - first_line]
    return text.removesuffix(b'\r').decode(errors='replace')

  clean, repeated = raw, []
  if b'\r' in raw:
    clean = raw.replace(b'\r\n', b'\n')
  if b'\r' not in clean:
    # A long line, or a field that is no number, is read again: all fields are bytes then, so that
    # they can be shown as they are.
    for as_numbers, parsed_bytes in ((numbers, PARSED_BYTES), ((), None)):
      with contextlib.suppress(pa.ArrowInvalid):
        columns, rows = _to_arrow(clean, names, wanted, delimiter, as_numbers, parsed_bytes)
        # An open quote swallows the end of its line. Nothing makes two rows of one line: where
        # their numbers agree, each row is a line.
        if rows == num_lines:
          places = np.arange(rows)
          if like := _rows_like_header(columns, names, header):
            texts = clean.split(b'\n')
            repeated = [i for i in like if _is_header(_fields(texts[i], delimiter) or [], header)]
            places = np.delete(places, repeated)
            columns = {name: array.take(pa.array(places)) for name, array in columns.items()}
            repeated = (first_line + np.array(repeated, np.int64)).tolist()
          lines = first_line + places
          return Block(columns, lines, lambda i, lines=lines: line_text(lines[i]), [], repeated)
        break
  # A blank line, a malformed one, or an open quote: look at each line by itself.
  good, lines, malformed = [], [], []
  for number, line in enumerate(raw.split(b'\n')[:-1], first_line):
    line = line.removesuffix(b'\r')
    if not line:
      continue
    fields = _fields(line, delimiter)
    if fields is not None and _is_header(fields, header):
      repeated.append(number)
    elif fields is not None and len(fields) == len(names):
      good.append(line)
      lines.append(number)
    else:
      found = 'an open quote or a stray line end' if fields is None else f'{len(fields)} fields'
      malformed.append(
        BadRecord(number, found, f'{len(names)} fields', line.decode(errors='replace'))
      )
  columns = {w: pa.array([], pa.binary()) for w in wanted}
  if good:
    columns, rows = _to_arrow(b'\n'.join(good) + b'\n', names, wanted, delimiter)
    if rows != len(good):
      raise BadPass(
        f'{path}: lines {first_line} to {number}: found {rows} rows in {len(good)} lines; wanted '
        'delimited text'
      )
  lines = np.array(lines, np.int64)
  return Block(columns, lines, lambda i: line_text(lines[i]), malformed, repeated)


def _is_no_name(text: str) -> bool:
  """Whether a text is blank or a number, as the fields of records are."""
  try:
    return not text or float(text) is not None
  except ValueError:
    return False


def _check_header(
  path: str, line: bytes, names: Sequence[str], wanted: dict[str, str], delimiter: bytes
) -> None:
  """Raises UserError where the first line lacks a wanted column, with what is likely meant."""
  missing = [w for w in wanted if w not in names]
  if missing and len(names) == 1:
    counts = {d: line.count(bytes([d])) for d in OTHER_DELIMITERS if bytes([d]) != delimiter}
    best = max(counts, key=lambda d: counts[d])
    if counts[best]:
      shown = '"\\t"' if best == ord('\t') else f"'{chr(best)}'"
      raise UserError(
        f'{path}:1: the first line has one field by data.delimiter {delimiter.decode()!r} and '
        f'{counts[best] + 1} by {shown}; wanted data.delimiter: {shown}'
      )
  if missing and len(missing) == len(wanted) and any(_is_no_name(n) for n in names):
    raise UserError(
      f"{path}:1: no column '{missing[0]}' ({wanted[missing[0]]}); the first line looks like a "
      f'record, it begins with {names[0][:40]!r}; wanted a line of names, or data.columns'
    )
  check_columns(f'{path}:1', names, wanted)


def header_lines(path: str, data: config.Data) -> int:
  """How many lines of a file, 0 or 1, name its columns."""
  if data.columns is None:
    return 1
  fields = _fields(_head(path).removesuffix(b'\n').removesuffix(b'\r'), data.delimiter.encode())
  return int([f.decode(errors='replace').strip() for f in fields or []] == data.columns)


def _head(path: str) -> bytes:
  """The first line of a file, ended by LF."""
  raw = next(text_blocks(path, HEAD_BYTES, MAX_LINE_BYTES), b'\n')
  return raw[: raw.index(b'\n') + 1]


def blocks(
  path: str, data: config.Data, wanted: dict[str, str], part: Part = WHOLE
) -> Iterator[Callable[[], Block]]:
  """Reads a text file in blocks of bounded size.

  Args:
    path: the file.
    data: `Config.data`. With `columns` the file needs no header; a first line that repeats them is
      skipped.
    wanted: column -> the config key that asks for it.
    part: which lines to read; whole ones.
  Yields:
    Functions without arguments that return one Block each, in file order; they may run in
    parallel.
  Raises:
    BadPass: where the file is no text or is damaged.
    UserError: where it lacks a wanted column.
  """
  delimiter = data.delimiter.encode()
  if len(delimiter) != 1 or delimiter in b'"\r\n':
    hint = '; a tab is written "\\t" in double quotes' if data.delimiter == '\\t' else ''
    raise UserError(
      f'data.delimiter: found {data.delimiter!r}; wanted one ASCII character, no quote and no line '
      f'end{hint}'
    )
  names = data.columns
  line = 1 if names is None else part.line
  numbers: set[str] = set()
  if not data.missing_values:  # whose texts are no numbers
    of_slots = {s.column or s.name for s in data.slots}
    numbers = {c for c, key in wanted.items() if key == 'data.dense'} - of_slots
  fields: list[bytes] | None = None  # of the line of names, as they stand in it
  if names is not None:
    check_columns('data.columns', names, wanted)
    fields = [name.encode() for name in names]
  raws = text_blocks(path, BLOCK_BYTES, MAX_LINE_BYTES, part)
  for raw in itertools.chain([_head(path)] if line < part.line else [], raws):
    if line == 1:
      end = raw.index(b'\n') + 1
      header = raw[:end].removesuffix(b'\n').removesuffix(b'\r')
      found = _fields(header, delimiter)
      if found is None and names is None:
        raise BadPass(
          f'{path}:1: found an open quote or a stray line end in the first line; wanted the names '
          'of the columns'
        )
      first = [f.decode(errors='replace').strip() for f in found or []]
      if names is None or first == names:
        if names is None:
          _check_header(path, header, first, wanted, delimiter)
        names, fields, raw, line = first, found, raw[end:], max(2, part.line)
    num_lines = raw.count(b'\n')
    if raw:
      yield functools.partial(
        _block, path, raw, line, names, fields, list(wanted), delimiter, num_lines, numbers
      )
    line += num_lines
