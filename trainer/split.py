"""Splits one log: `python -m trainer.split --data FILE --out DIR --by_time COLUMN`.

It writes DIR/train, DIR/valid and DIR/test, each with FILE's suffix, but never compressed.
--by_time orders samples by time into train, valid and test. --shares gives their sizes, or --at the
times at which valid and test begin; samples of the same time stay together. --by_hash keeps all
samples of a user, or of another column's value, together. FILE is CSV, TSV, JSON lines (also .gz,
.bz2) or Parquet. In JSON, COLUMN may be a path, as device.os. No value changes, but values of CSV
may be quoted, and lines that repeat the names of the columns are left out.
"""

import codecs
import contextlib
import itertools
import json
import os
import re
from collections.abc import Callable, Collection, Iterator

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
from absl import flags, logging
from pandas.api.types import is_numeric_dtype, is_string_dtype

from trainer import command_line
from trainer.data.csv_format import delimiter_of
from trainer.data.log_files import open_table
from trainer.data.text_blocks import text_blocks
from trainer.errors import UserError, nearest, one_line, plain_errors
from trainer.plain_data import JsonObject

DATA = flags.DEFINE_string('data', None, 'The log.', required=True)
OUT = flags.DEFINE_string('out', None, 'A directory for the three files.', required=True)
BY_TIME = flags.DEFINE_string('by_time', None, 'A column of numbers, or times that sort as texts.')
BY_HASH = flags.DEFINE_string('by_hash', None, 'A column whose equal values stay together.')
SHARES = flags.DEFINE_list(
  'shares',
  ['80', '10', '10'],
  'Per cent of samples, or of values of --by_hash, for train, valid, test.',
)
AT = flags.DEFINE_list(
  'at',
  None,
  'In place of --shares: when valid and test begin, as 2024-01-30,2024-01-31 or by --time_format.',
)
TIME_FORMAT = flags.DEFINE_string('time_format', None, 'Of --by_time, as %d.%m.%Y %H:%M:%S.')
DELIMITER = flags.DEFINE_string('delimiter', None, 'Of a CSV file; default: as between its names.')
COLUMNS = flags.DEFINE_list('columns', [], 'Names, where a CSV file has no line of them.')

SPLITS = ('train', 'valid', 'test')
_LINE = ' line'  # the column that holds whole lines, a name that no log has
Split = Callable[[pa.Table], np.ndarray]
_FORMAT = '%Y-%m-%d %H:%M:%S.%f%z'
_DAY_OR_MONTH_FIRST = re.compile(r'\d{1,2}[./-]\d{1,2}[./-]\d{4}')
_YEAR_FIRST = re.compile(r'\d{4}([./-])\d\d\1\d\d')
_OF_DATE = re.compile('%[^HIMSfpzZ]')  # a directive of a date, not of a time of day
_TIME = r'\d{4}|\d\d:\d\d'  # how a text that sorts by time begins


def _delimiter() -> str:
  if DELIMITER.value:
    return '\t' if DELIMITER.value == '\\t' else DELIMITER.value
  found = None if COLUMNS.value else delimiter_of(DATA.value, [BY_TIME.value or BY_HASH.value])
  return found or ('\t' if '.tsv' in DATA.value else ',')


def _paths(record: JsonObject, parent: str = '') -> Iterator[str]:
  """Yields the keys of a record and the paths of nested ones, such as device.os."""
  for key, value in record.items():
    yield parent + key
    if isinstance(value, dict):
      yield from _paths(value, f'{parent}{key}.')


def _check_json_column(name: str) -> None:
  """Raises UserError if no record has the column; stops at the first that has it, or is wrong."""
  names: set[str] = set()  # of the first record
  for _, block in text_blocks(DATA.value):
    for line in block.split(b'\n')[:-1]:
      try:
        here = set(_paths(json.loads(line)))
      except (ValueError, AttributeError):
        return
      if name in here:
        return
      names = names or here
  if names:
    raise _no_column(name, names)


def _tables_of_json(name: str) -> Iterator[pa.Table]:
  """Yields the log in parts, as tables of two columns: `name` as text, and _LINE, whole lines."""
  for numbers, block in text_blocks(DATA.value):
    lines, texts = block.split(b'\n')[:-1], []
    for number, line in zip(numbers, lines):
      try:
        value = json.loads(line)
        for part in name.split('.'):
          value = value.get(part)
      except (ValueError, AttributeError):
        where = f'{DATA.value}:{number}'
        raise UserError(f"{where}: wanted a line of JSON, an object with '{name}'") from None
      texts.append(None if value is None else str(value))
    yield pa.table({name: pa.array(texts, pa.string()), _LINE: pa.array(lines, pa.binary())})


def _without_names(table: pa.Table) -> pa.Table:
  """Leaves out the rows that repeat the names of the columns, as concatenated files have."""
  names = table.column_names
  # Most tables have none, which the first column shows. A byte-order mark may precede it.
  is_names = pc.is_in(table.column(0), pa.array([names[0], codecs.BOM_UTF8.decode() + names[0]]))
  if not pc.any(is_names).as_py():
    return table
  for i, name in enumerate(names[1:], 1):
    is_names = pc.and_(is_names, pc.equal(table.column(i), name))
  return table.filter(pc.invert(is_names))


def _tables() -> Iterator[pa.Table]:
  """Yields the log in parts. All columns of a text file are read as text."""
  path = DATA.value
  if '.jsonl' in path:
    yield from _tables_of_json(BY_TIME.value or BY_HASH.value)
    return
  if path.endswith('.parquet'):
    with open_table(path, 'a Parquet') as f:
      yield from (pa.Table.from_batches([batch]) for batch in pq.ParquetFile(f).iter_batches())
    return
  parse = pa.csv.ParseOptions(delimiter=_delimiter(), newlines_in_values=True)
  read = pa.csv.ReadOptions(column_names=COLUMNS.value or None)
  try:
    with pa.csv.open_csv(path, read, parse) as reader:
      names = reader.schema.names
    convert = pa.csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()))
    headers = 0
    with pa.csv.open_csv(path, read, parse, convert) as reader:
      for batch in reader:
        table = _without_names(pa.Table.from_batches([batch]))
        headers += len(batch) - len(table)
        yield table
  except pa.ArrowInvalid as e:
    raise UserError(f'{path}: {one_line(e)}; wanted another --delimiter or --columns?') from None
  if headers:  # told once, though the log may be read twice
    text = '%s: found the line of names again, %d times in the file; left out'
    logging.log_first_n(logging.WARNING, text, 1, path, headers)


def _flag() -> str:
  return '--by_time' if BY_TIME.value else '--by_hash'


def _column(table: pa.Table, name: str) -> pa.ChunkedArray:
  """Returns a column that can be hashed or, for --by_time, sorted.

  Columns to be hashed become texts. In others, only dictionaries, bytes and decimals change.

  Raises:
    UserError: if there is no such column, or its type is another.
  """
  if name not in table.column_names:
    raise _no_column(name, table.column_names)
  column, t = table[name], pa.types
  kind = column.type
  try:
    if t.is_dictionary(kind):
      column = column.cast(kind.value_type)
    inner = column.type
    if BY_HASH.value or t.is_binary(inner) or t.is_large_binary(inner):
      return column.cast(pa.string())
    if t.is_decimal(inner):
      return column.cast(pa.float64())
    number_or_text = (t.is_integer, t.is_floating, t.is_string, t.is_large_string, t.is_null)
    if any(is_kind(inner) for is_kind in (*number_or_text, t.is_date, t.is_timestamp)):
      return column
  except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
    pass
  wanted = 'texts, numbers, dates or timestamps'
  raise UserError(f'{_flag()} {name}: found {kind} in {DATA.value}; wanted {wanted}')


def _no_column(name: str, names: Collection[str]) -> UserError:
  near = nearest(name, names)
  return UserError(f'{_flag()} {name}: {DATA.value} has no column of this name{near}')


def _ends() -> np.ndarray:
  """Returns where train and valid end, as shares of the log, 0 to 1, float64 [2]."""
  try:
    shares = np.array([float(share) for share in SHARES.value])
  except ValueError:
    shares = np.zeros(0)
  if len(shares) != len(SPLITS) or (shares < 0).any() or abs(shares.sum() - 100) > 1e-6:
    raise UserError(f'--shares: found {",".join(SHARES.value)}; wanted three that sum to 100')
  return np.cumsum(shares)[:2] / 100


def _by_time(name: str) -> tuple[Split, list[str]]:
  """Returns a function that splits the log by time, and a text for each split about its times.

  The function must be called with each part of the log, in order. It returns the index in SPLITS of
  each row. Rows of the same time are in the same split.
  """
  # Without ignore_index, pandas would number the rows of each part from 0.
  texts = pd.concat([_column(t, name).to_pandas() for t in _tables()], ignore_index=True)
  if (missing := int(texts.isna().sum() + (texts == '').sum())) > 0:
    raise UserError(f"{DATA.value}: column '{name}' is empty in {missing:,} samples; wanted a time")
  times = _times(texts, name)
  order = np.argsort(times.to_numpy(), kind='stable')
  if AT.value:
    bounds = _bounds(times)
  else:
    bounds = [times[order[min(int(end * len(times)), len(times) - 1)]] for end in _ends()]
  places = sum((times >= bound).to_numpy().astype(int) for bound in bounds)
  ends = np.cumsum(np.bincount(places, minlength=len(SPLITS)))
  if AT.value and len(set(places)) < len(SPLITS):
    found = f'{texts[order[0]]} to {texts[order[-1]]}'
    raise UserError(f"--at: a split is empty; '{name}' is {found}; wanted times between them")
  told = [
    f', {name} {texts[order[start]]} to {texts[order[end - 1]]}' if start < end else ''
    for start, end in zip([0, *ends], ends)
  ]
  rows = iter(places)
  return lambda table: np.fromiter(itertools.islice(rows, len(table)), int), told


def _times(texts: pd.Series, name: str) -> pd.Series:
  """Converts texts to values that can be sorted: timestamps or numbers; else returns the texts."""
  if TIME_FORMAT.value is not None:
    try:
      times = pd.to_datetime(texts, format=TIME_FORMAT.value, errors='coerce', utc=True)
    except ValueError as e:
      raise UserError(f'--time_format: {one_line(e)}') from None
    if times.isna().any():
      raise UserError(
        f"{DATA.value}: column '{name}': found {texts[times.isna()].iloc[0]!r}; wanted a time by "
        f"--time_format '{TIME_FORMAT.value}', which must describe all of it, as {_FORMAT}"
      )
    return times
  if not (is_string_dtype(texts) or is_numeric_dtype(texts)):
    return pd.to_datetime(texts, utc=True)  # dates or times of Parquet
  if _DAY_OR_MONTH_FIRST.match(str(texts[0])):
    raise UserError(
      f"{DATA.value}: column '{name}': found {texts[0]!r}, which does not sort by time as a text; "
      'wanted --time_format, as %d.%m.%Y or %m/%d/%Y %H:%M'
    )
  numbers = pd.to_numeric(texts, errors='coerce')
  is_other = numbers.isna()
  if not is_other.any():
    return numbers
  if date := _YEAR_FIRST.match(str(texts[0])):
    by = re.escape(date[1])
    is_other = ~texts.str.match(rf'\d{{4}}{by}\d\d{by}\d\d')
  if not is_other[0] and is_other.any():
    at = int(is_other.to_numpy().argmax())
    raise UserError(
      f"{DATA.value}: column '{name}', sample {at + 1:,}: found {texts[at]!r}, which does not sort "
      f'by time with {texts[0]!r} of sample 1; wanted one format'
    )
  is_no_time = is_other & ~texts.astype(str).str.match(_TIME)
  if is_other[0] and is_no_time.any():
    at = int(is_no_time.to_numpy().argmax())
    raise UserError(
      f"{DATA.value}: column '{name}', sample {at + 1:,}: found {texts[at]!r}, which is no time; "
      'wanted numbers, texts such as 2024-01-30 12:00, or --time_format'
    )
  return texts


def _bounds(times: pd.Series) -> list:
  """Returns the two times given in --at, converted to the type of the log's time column."""
  read, wanted = _timestamp, 'times as 2024-01-30 or 2024-01-30 12:00'
  if TIME_FORMAT.value is not None:
    wanted = (
      f"times by --time_format '{TIME_FORMAT.value}', whole or without a time of day at its end, "
      'or as 2024-01-30'
    )
  elif is_numeric_dtype(times):
    read, wanted = float, f'numbers, as {times[0]}'
  elif is_string_dtype(times):
    read = str
  try:
    bounds = [read(text) for text in AT.value]
    wanted = 'two times that rise: where valid and where test begin'
    if len(bounds) == len(SPLITS) - 1 and bounds[0] < bounds[1]:
      return bounds
  except ValueError:
    pass
  raise UserError(f'--at: found {",".join(AT.value)}; wanted {wanted}')


def _timestamp(text: str) -> pd.Timestamp:
  """Reads a time of --at: by --time_format, whole or cut after its date, else as ISO 8601.

  pandas would read 08.12.2025, without a format, as the 12th of August.

  Raises:
    ValueError: if it is written otherwise.
  """
  whole = TIME_FORMAT.value or ''
  date_end = max((found.end() for found in _OF_DATE.finditer(whole)), default=len(whole))
  for end in range(len(whole), date_end - 1, -1):
    part = whole[:end]
    if '%I' in part and '%p' in whole[end:]:
      continue  # without %p, an hour of 12 may be in the morning or in the afternoon
    with contextlib.suppress(ValueError):
      return pd.to_datetime(text, format=part, utc=True)
  return pd.to_datetime(text, format='ISO8601', utc=True)


def _by_hash(name: str) -> Split:
  """Returns a function that splits the log by a hash of a column, the same on every machine.

  The function returns the index in SPLITS of each row.
  """
  ends = _ends() * 2.0**64

  def split(table: pa.Table) -> np.ndarray:
    texts = _column(table, name).fill_null('').to_numpy().astype(object)
    return np.searchsorted(ends, pd.util.hash_array(texts).astype(np.float64), side='right')

  return split


def _writer(
  stack: contextlib.ExitStack, path: str, schema: pa.Schema
) -> Callable[[pa.Table], None]:
  """Opens a file, which `stack` will close; returns a function that writes a table into it."""
  if path.endswith('.jsonl'):
    file = stack.enter_context(open(path, 'wb'))
    return lambda table: file.writelines(
      line.rstrip(b'\r\n') + b'\n' for line in table[_LINE].to_pylist()
    )
  if path.endswith('.parquet'):
    return stack.enter_context(pq.ParquetWriter(path, schema)).write_table
  style = {'delimiter': _delimiter(), 'quoting_style': 'needed'}
  options = pa.csv.WriteOptions(include_header=not COLUMNS.value, **style)
  return stack.enter_context(pa.csv.CSVWriter(path, schema, write_options=options)).write_table


@command_line.command
def main() -> None:
  if (BY_TIME.value is None) == (BY_HASH.value is None):
    found = 'neither' if BY_TIME.value is None else 'both'
    raise UserError(f'found {found}; wanted --by_time COLUMN or --by_hash COLUMN')
  if os.path.isdir(DATA.value):
    raise UserError(f'--data {DATA.value}: found a directory; wanted a file')
  if not os.path.isfile(DATA.value):
    raise UserError(f'--data {DATA.value}: no such file')
  if '.jsonl' in DATA.value:
    _check_json_column(BY_TIME.value or BY_HASH.value)
  if not any(map(len, _tables())):
    raise UserError(f'--data {DATA.value}: found no samples; wanted at least one')
  if BY_TIME.value:
    split_of, told = _by_time(BY_TIME.value)
  elif AT.value:
    raise UserError('--at: found with --by_hash; wanted --by_time')
  else:
    split_of, told = _by_hash(BY_HASH.value), [''] * len(SPLITS)
  suffix = next((s for s in ('.parquet', '.tsv', '.jsonl') if s in DATA.value), '.csv')
  paths = [os.path.join(OUT.value, name + suffix) for name in SPLITS]
  replaced = {path for path in paths if os.path.exists(path)}
  for path in replaced:
    if os.path.samefile(path, DATA.value):
      raise UserError(f'--out {OUT.value}: {path} is --data itself; wanted another directory')
  writers, counts = [], np.zeros(len(SPLITS), np.int64)
  with plain_errors('cannot write --out'), contextlib.ExitStack() as stack:
    os.makedirs(OUT.value, exist_ok=True)
    for table in _tables():
      places = split_of(table)  # before the files are opened, because it may find a mistake
      writers = writers or [_writer(stack, path, table.schema) for path in paths]
      counts += np.bincount(places, minlength=len(SPLITS))
      for place, write in enumerate(writers):
        write(table.filter(pa.array(places == place)))
  for path, count, times in zip(paths, counts, told):
    place = ', in place of the file that was there' * (path in replaced)
    print(f'{path}: {count:,} samples{times}{place}')


if __name__ == '__main__':
  main()
