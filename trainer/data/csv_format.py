"""Reads delimited text: CSV and TSV, also compressed (.gz, .zst, .bz2, .lz4).

A record is a line that ends in LF, in CRLF or at the end of the file. A quoted field ("a,b"; ""
stands for a quote) contains no line end. Blank lines are skipped. Lines that repeat the header, as
in concatenated files, are left out with a warning; with its names in another order, they refuse the
file. In a file of one column, a line like the header is a record, unless a byte-order mark stands
before it; a warning tells of such lines, and of blank ones. Whether any other line is accepted
depends on that line alone.
"""

import codecs
import contextlib
import csv
import functools
import itertools
import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.csv

from trainer import config
from trainer.data.block import BadRecord, Block
from trainer.data.file_system import WHOLE, Part, suffix_of
from trainer.data.schema import check_columns
from trainer.data.text_blocks import MAX_LINE_BYTES, text_blocks
from trainer.data.values import float_or_none
from trainer.errors import BadPass, UserError, printable

HEAD_BYTES = 64 << 10
PARSED_BYTES = 1 << 20  # what Arrow parses at once: few enough to stay in the processor's cache
OTHER_DELIMITERS = '\t;|,'

# What is odd in a line, as warnings tell it; TIMES becomes 'once' or 'N times'.
REPEATED = 'found the line of names again, TIMES in the file; left out'
LIKE_NAMES = (
  "found the column's name, TIMES in a file of one column; taken for a record, as any text may be "
  'one: take such lines out if they are none'
)
BLANK = (
  'found a blank line, TIMES in a file of one column; left out; wanted "" where a value is missing'
)
STRAY_QUOTE = (
  'found a quote in the middle of a text, where quoting: {} has none; wanted '
  'data.quoting: none for a log that quotes nothing, or backslash for one that writes \\"'
)

csv.field_size_limit(2 * MAX_LINE_BYTES)


def _delimiter(path: str, data: config.Data) -> str:
  if data.delimiter is not None:
    return data.delimiter
  return '\t' if suffix_of(path) == '.tsv' else ','


class _Dialect(NamedTuple):
  """How a file separates and quotes the fields of a line."""

  delimiter: bytes
  quoting: str  # data.quoting

  @property
  def is_quoted(self) -> bool:
    return self.quoting != 'none'

  def doubled(self, raw: bytes) -> bytes:
    """Returns lines in which a quote within a quoted field is written twice, whatever `quoting`."""
    if self.quoting != 'backslash' or b'\\' not in raw:
      return raw
    by = re.escape(self.delimiter)
    field = b'(?:^|(?<=[\n%b]))"(?:[^"\\\\\n]|\\\\.|"")*"(?=[%b\r\n])' % (by, by)
    escape = lambda match: b'""' if match[1] == b'"' else match[1]
    return re.sub(field, lambda match: re.sub(rb'\\(["\\])', escape, match[0]), raw)

  def fields(self, line: bytes) -> list[bytes] | None:
    """Returns a line's fields; None if a quote stays open or a CR splits the line."""
    if b'\r' in line:
      return None
    if not self.is_quoted or b'"' not in line:
      return line.split(self.delimiter)
    # The reader also gets a line 'x'. If a quote stays open, it joins both lines to one row.
    lines = [line.decode('latin-1') + '\n', 'x']
    rows = list(csv.reader(lines, delimiter=self.delimiter.decode('latin-1')))
    return [f.encode('latin-1') for f in rows[0]] if len(rows) == 2 else None

  def stray_quote(self, raw: bytes) -> int | None:
    """Returns where a quote is neither at a border of a field nor beside a quote, or None."""
    if not self.is_quoted or b'"' not in raw:
      return None
    data = np.frombuffer(raw, np.uint8)
    for start in range(0, len(data), PARSED_BYTES):
      part = data[start : start + PARSED_BYTES + 2]
      is_quote = part == ord('"')
      is_border = (
        is_quote | (part == ord(self.delimiter)) | (part == ord('\n')) | (part == ord('\r'))
      )
      is_stray = is_quote[1:-1] & ~(is_border[:-2] | is_border[2:])
      if is_stray.any():
        return start + 1 + int(is_stray.argmax())
    return None


def _to_arrow(
  raw: bytes,
  numbers: Collection[str] = (),
  parsed_bytes: int | None = None,
  *,
  names: Sequence[str],
  wanted: Sequence[str],
  dialect: _Dialect,
  decimal: str,
) -> tuple[dict[str, pa.Array], int]:
  """Parses whole lines that end in LF and contain no CR.

  Args:
    numbers: the wanted columns to return as float64; the others are binary.
    parsed_bytes: how many bytes to parse at a time; None: all. Ignored if anything is quoted.
    names: the columns of the file.
  Returns:
    {wanted column: array}, in which a blank number is null; and the number of rows. There are fewer
      rows than lines if a line is blank, or an open quote joins a line with the next one.
  Raises:
    pa.ArrowInvalid: if a line has another number of fields than `names`, or more than
      `parsed_bytes`; or if a number cannot be parsed or is not finite as float32.
  """
  if not raw:
    return {name: pa.array([], pa.binary()) for name in wanted}, 0
  quoted = dialect.is_quoted and b'"' in raw
  if quoted:
    # A quote that is left open joins its line with the next. The line that is added here shows
    # whether the last one has such a quote: then a row is missing.
    raw += dialect.delimiter * (len(names) - 1) + b'0\n'
  block_size = len(raw) + 1 if quoted or parsed_bytes is None else parsed_bytes
  fields, quote = [str(i) for i in range(len(names))], '"' if quoted else False
  parse_options = pa.csv.ParseOptions(delimiter=dialect.delimiter.decode(), quote_char=quote)
  index = [str(names.index(w)) for w in wanted]
  types = {i: pa.float64() if w in numbers else pa.binary() for w, i in zip(wanted, index)}
  table = pa.csv.read_csv(
    pa.BufferReader(raw),
    read_options=pa.csv.ReadOptions(column_names=fields, use_threads=False, block_size=block_size),
    parse_options=parse_options,
    convert_options=pa.csv.ConvertOptions(
      column_types=types,
      include_columns=index,
      null_values=[''],
      strings_can_be_null=False,
      decimal_point=decimal,
    ),
  )
  table = table.slice(0, table.num_rows - quoted)
  columns = {w: table.column(i).combine_chunks() for w, i in zip(wanted, index)}
  with np.errstate(over='ignore'):
    for name in numbers:
      if not np.isfinite(columns[name].fill_null(0).to_numpy().astype(np.float32)).all():
        raise pa.ArrowInvalid(f'{name}: not finite')
  return columns, table.num_rows


def _lines_of_names(
  raw: bytes, header: Sequence[bytes], wanted: Collection[bytes], dialect: _Dialect
) -> Iterator[tuple[int, int, list[bytes]]]:
  """Yields (start, next start, fields) of lines with all wanted names, and mostly column names."""
  written = sorted((name.replace(b'"', b'""') for name in wanted), key=len, reverse=True)
  if not written or not all(name in raw for name in written):  # a long name is ruled out fastest
    return
  by, name, behind, end = re.escape(dialect.delimiter), re.escape(written[0]), b'\n' + raw, 0
  borders = b'" \r\n' + by + codecs.BOM_UTF8[-1:]
  for match in re.finditer(b'%b(?<=[%b]%b)(?=[%b])' % (name, borders, name, borders), behind):
    if match.start() < end:
      continue  # the line was looked at
    begin = behind.rindex(b'\n', 0, match.start()) + 1
    end = behind.index(b'\n', match.end()) + 1
    line = behind[begin : end - 1].removesuffix(b'\r').removeprefix(codecs.BOM_UTF8)
    names = [field.strip() for field in dialect.fields(line) or ()]
    if set(wanted) <= set(names) and 2 * len({*header} & {*names}) > len(names):
      yield begin - 1, end - 1, names


def _block(
  raw: bytes,
  numbered: range,
  path: str,
  header: Sequence[bytes],
  wanted: Collection[bytes],
  dialect: _Dialect,
  numbers: Collection[str],
  to_arrow: Callable[..., tuple[dict[str, pa.Array], int]],
) -> Block:
  """Parses whole lines, of which those in `numbers` may become float64, the others binary."""
  lines = np.arange(numbered.start, numbered.stop)
  repeated, kept, remarks, at, row = [], [], [], 0, 0
  for begin, end, names in _lines_of_names(raw, header, wanted, dialect):
    row += raw.count(b'\n', at, begin)
    if names != header:
      raise _other_order(f'{path}:{lines[row]}', names, header)
    is_record = len(header) == 1 and not raw.startswith(codecs.BOM_UTF8, begin)
    remarks.append((int(lines[row]), LIKE_NAMES if is_record else REPEATED))
    repeated += [] if is_record else [row]
    kept.append(raw[at : end if is_record else begin])
    at, row = end, row + 1
  original = b''.join([*kept, raw[at:]]) if repeated else raw
  lines = np.delete(lines, np.array(repeated, int))

  def text(row: int) -> str:
    return original.split(b'\n', row + 1)[row].removesuffix(b'\r').decode(errors='replace')

  raw = dialect.doubled(original)
  if (stray := dialect.stray_quote(raw)) is not None:
    quoting = STRAY_QUOTE.format(dialect.quoting)
    remarks.append((int(lines[raw.count(b'\n', 0, stray)]), quoting))
  clean = raw.replace(b'\r\n', b'\n') if b'\r' in raw else raw
  if b'\r' not in clean:
    # On failure the whole block is read again as bytes, so that messages show the original text.
    for as_numbers, parsed_bytes in ((numbers, PARSED_BYTES), ((), None)):
      with contextlib.suppress(pa.ArrowInvalid):
        columns, rows = to_arrow(clean, as_numbers, parsed_bytes)
        # An open quote joins lines, and nothing splits one. So if there are as many rows as lines,
        # each row is a line.
        if rows == len(lines):
          return Block(columns, lines, text, [], remarks)
        break
  # There is a blank line, a malformed one, or an open quote: look at each line by itself.
  texts, good, malformed = [line.removesuffix(b'\r') for line in raw.split(b'\n')[:-1]], [], []
  for row, line in enumerate(texts):
    fields = dialect.fields(line) if line else []
    if fields is None or len(fields) not in (0, len(header)):
      shown = 'an open quote or a stray line end' if fields is None else f'{len(fields)} fields'
      malformed.append(BadRecord(int(lines[row]), shown, f'{len(header)} fields', text(row)))
    elif fields:
      good.append(row)
    elif len(header) == 1:
      remarks.append((int(lines[row]), BLANK))
  columns, rows = to_arrow(b''.join(texts[row] + b'\n' for row in good))
  if rows != len(good):
    raise BadPass(
      f'{path}: lines {lines[0]} to {lines[-1]}: found {rows} rows in {len(good)} lines; wanted '
      'delimited text'
    )
  good = np.array(good, np.int64)
  return Block(columns, lines[good], lambda i: text(good[i]), malformed, remarks)


def _other_order(where: str, names: Sequence[bytes], header: Sequence[bytes]) -> BadPass:
  """Returns the error for a line of names that are not those of the columns, in their order."""
  pairs = itertools.zip_longest(names, header, fillvalue=b'')
  found, wanted = next(_decoded(pair) for pair in pairs if pair[0] != pair[1])
  return BadPass(
    f"{where}: found a line of names with '{found}' in the place of the column '{wanted}'; wanted "
    'the same columns in the same order in the whole file, or a file for each order'
  )


def _check_header(
  path: str,
  line: str,
  names: Sequence[str],
  wanted: dict[str, str],
  delimiter: str,
  data: config.Data,
) -> None:
  """Raises a UserError with a likely cause if the first line lacks a wanted column."""
  missing = [w for w in wanted if w not in names]
  untabbed = [name.replace('\t', ' ') for name in names]
  if missing and any(printable(name) != name for name in untabbed):
    raise UserError(
      f"{path}:1: no column '{missing[0]}' ({wanted[missing[0]]}); the first line is no text, it "
      f'begins with {line[:20]!r}; wanted a line of names'
    )
  if missing and len(names) == 1:
    best = max(OTHER_DELIMITERS.replace(delimiter, ''), key=line.count)
    if count := line.count(best):
      shown = json.dumps(best)  # YAML writes it in the same way
      raise UserError(
        f'{path}:1: the first line has one field by data.delimiter {json.dumps(delimiter)} and '
        f"{count + 1} by {shown}; wanted data.delimiter: {shown}, as by --set 'data.delimiter="
        f"{shown}'"
      )
  if len(missing) == len(wanted) > 0 and any(not n or float_or_none(n) is not None for n in names):
    raise UserError(
      f"{path}:1: no column '{missing[0]}' ({wanted[missing[0]]}); the first line looks like a "
      f'record, it begins with {names[0][:40]!r}; wanted a line of names, or data.columns'
    )
  check_columns(f'{path}:1', names, wanted, data.made)


def _header(head: bytes, dialect: _Dialect) -> list[bytes] | None:
  """Returns the names in the first line; None if it is malformed."""
  fields = dialect.fields(dialect.doubled(head[: head.index(b'\n')].removesuffix(b'\r')))
  return fields and [field.strip() for field in fields]


def _decoded(names: Sequence[bytes] | None) -> list[str]:
  return [name.decode(errors='replace') for name in names or ()]


def _head(path: str) -> bytes:
  """Returns the first lines of a file; a single line end if the file is empty."""
  return next(text_blocks(path, block_bytes=HEAD_BYTES), (None, b'\n'))[1]


def delimiter_of(path: str, wanted: Collection[str]) -> str | None:
  """Returns the delimiter that separates all wanted names in a file's first line, or None."""
  head = _head(path)
  dialects = (_Dialect(by.encode(), 'doubled') for by in OTHER_DELIMITERS)
  found = (d for d in dialects if set(wanted) <= set(_decoded(_header(head, d))))
  return next((d.delimiter.decode() for d in found), None)


def _is_header(names: Sequence[str], data: config.Data) -> bool:
  """Returns whether a file's first line has the names of its columns; one alone may be a record."""
  return data.columns is None or (data.columns == names and len(names) > 1)


def header_lines(path: str, data: config.Data) -> int:
  """Returns 1 if the first line of a file names its columns, else 0."""
  dialect = _Dialect(_delimiter(path, data).encode(), data.quoting)
  return int(_is_header(_decoded(_header(_head(path), dialect)), data))


def _numbers(data: config.Data, wanted: dict[str, str]) -> set[str]:
  """Returns the wanted columns that Arrow reads as numbers; none with data.thousands and such."""
  if data.missing_values or data.thousands is not None:
    return set()
  numbers = {c for c, is_text in data.log_columns().items() if not is_text} & wanted.keys()
  return numbers - {data.group}


def of_messages(values: Sequence[bytes], data: config.Data, wanted: dict[str, str]) -> Block:
  """Parses messages of a topic, one line each, to a Block whose lines are indices from 0."""
  check_columns('data.columns', data.columns, wanted, data.made)
  dialect = _Dialect((data.delimiter or ',').encode(), data.quoting)
  settings = {'names': data.columns, 'wanted': list(wanted), 'decimal': data.decimal}
  to_arrow = functools.partial(_to_arrow, **settings, dialect=dialect)
  # A line end in a message is a stray one, which makes it a malformed line.
  lines = [
    v.removesuffix(b'\n').removesuffix(b'\r').replace(b'\n', b'\r') or b'\r ' for v in values
  ]
  header, of_wanted = ([name.encode() for name in names] for names in (data.columns, wanted))
  raw, numbered = b'\n'.join([*lines, b'']), range(len(lines))
  numbers = _numbers(data, wanted)
  return _block(raw, numbered, 'messages', header, of_wanted, dialect, numbers, to_arrow)


def blocks(
  path: str,
  data: config.Data,
  wanted: dict[str, str],
  part: Part = WHOLE,
  as_written: bool = False,
) -> Iterator[Callable[[], Block]]:
  """Reads a text file in blocks of bounded size.

  Args:
    data: `Config.data`. If it has `columns`, the file needs no header; a first line that equals
      two or more `columns` is skipped as one.
    wanted: {column: the config key that asks for it}.
    part: the lines to read.
    as_written: whether to keep every column as text, for copying; otherwise Arrow may read columns
      that the config declares as numbers.
  Yields:
    Functions without arguments that return one Block each, in file order; they may run in parallel.
  Raises:
    BadPass: if the file is no text or is damaged.
    UserError: if it lacks a wanted column.
  """
  by = _delimiter(path, data)
  delimiter = by.encode()
  if len(delimiter) != 1 or delimiter in b'"\r\n':
    hint = '; a tab is written "\\t" in double quotes' if by == '\\t' else ''
    raise UserError(
      f'data.delimiter: found {by!r}; wanted one ASCII character, no quote and no line end{hint}'
    )
  if data.columns is not None:
    check_columns('data.columns', data.columns, wanted, data.made)
  numbers = set() if as_written else _numbers(data, wanted)
  dialect, to_arrow = _Dialect(delimiter, data.quoting), None
  for lines, raw in text_blocks(path, part):
    if to_arrow is None:
      head = raw if lines.start == 1 else _head(path)
      header = _header(head, dialect)
      names = _decoded(header)
      if data.columns is None:
        if header is None:
          raise BadPass(
            f'{path}:1: found an open quote or a stray line end in the first line; wanted the '
            'names of the columns'
          )
        text = head[: head.index(b'\n')].decode(errors='replace')
        _check_header(path, text, names, wanted, by, data)
      is_header = _is_header(names, data)
      if not is_header:
        names, header = data.columns, [name.encode() for name in data.columns]
      settings = {'names': names, 'wanted': list(wanted), 'decimal': data.decimal}
      to_arrow = functools.partial(_to_arrow, **settings, dialect=dialect)
      of_wanted = [header[names.index(name)] for name in wanted]
      if is_header and lines.start == 1:
        raw, lines = raw[raw.index(b'\n') + 1 :], lines[1:]
    if raw:
      yield functools.partial(
        _block, raw, lines, path, header, of_wanted, dialect, numbers, to_arrow
      )
