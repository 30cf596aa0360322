"""Splits one log: `python -m trainer.split --data FILE --out DIR --by_time COLUMN`.

It writes DIR/train, DIR/valid and DIR/test, each with FILE's suffix. --by_time puts the latest
samples into test; --by_hash keeps all samples of one user (or another column's value) together.
FILE is CSV, TSV (also .gz, .bz2) or Parquet. No value changes, though fields of CSV are quoted;
samples of one time stay together.
"""

import os
import re
from collections.abc import Callable, Iterator

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
from absl import flags

from trainer import command_line
from trainer.errors import UserError, nearest, one_line, plain_errors

DATA = flags.DEFINE_string('data', None, 'The log.', required=True)
OUT = flags.DEFINE_string('out', None, 'A directory for the three files.', required=True)
BY_TIME = flags.DEFINE_string('by_time', None, 'A column of numbers, or texts that sort by time.')
BY_HASH = flags.DEFINE_string('by_hash', None, 'A column whose equal values stay together.')
SHARES = flags.DEFINE_list('shares', ['80', '10', '10'], 'Per cent for train, valid and test.')
TIME_FORMAT = flags.DEFINE_string(
  'time_format', None, 'How --by_time is written, as %d.%m.%Y %H:%M:%S.'
)
DELIMITER = flags.DEFINE_string(
  'delimiter', None, 'Separates the fields of a CSV file; tab for .tsv and comma where left out.'
)
COLUMNS = flags.DEFINE_list('columns', [], 'Names, where a CSV file has no line of them.')

SPLITS = ('train', 'valid', 'test')
_DAY_OR_MONTH_FIRST = re.compile(r'\d{1,2}[./-]\d{1,2}[./-]\d{4}')


def _delimiter() -> str:
  delimiter = DELIMITER.value or ('\t' if '.tsv' in DATA.value else ',')
  return '\t' if delimiter == '\\t' else delimiter


def _tables() -> Iterator[pa.Table]:
  """Yields the log in parts; all columns of a text file are read as texts."""
  path = DATA.value
  if path.endswith('.parquet'):
    yield from (pa.Table.from_batches([batch]) for batch in pq.ParquetFile(path).iter_batches())
    return
  parse = pa.csv.ParseOptions(delimiter=_delimiter(), newlines_in_values=True)
  read = pa.csv.ReadOptions(column_names=COLUMNS.value or None)
  try:
    with pa.csv.open_csv(path, read, parse) as reader:
      names = reader.schema.names
    convert = pa.csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()))
    with pa.csv.open_csv(path, read, parse, convert) as reader:
      yield from (pa.Table.from_batches([batch]) for batch in reader)
  except pa.ArrowInvalid as e:
    raise UserError(f'{path}: {one_line(e)}; wanted another --delimiter or --columns?') from None


def _column(table: pa.Table, name: str) -> pa.ChunkedArray:
  if name not in table.column_names:
    raise UserError(f"{DATA.value}: has no column '{name}'{nearest(name, table.column_names)}")
  return table[name]


def _ends() -> np.ndarray:
  """Returns the shares of the log at which train and valid end."""
  try:
    shares = np.array([float(share) for share in SHARES.value])
  except ValueError:
    shares = np.zeros(0)
  if len(shares) != len(SPLITS) or (shares < 0).any() or abs(shares.sum() - 100) > 1e-6:
    raise UserError(f'--shares: found {",".join(SHARES.value)}; wanted three that sum to 100')
  return np.cumsum(shares)[:2] / 100


def _by_time(name: str) -> Callable[[pa.Table], np.ndarray]:
  """Returns a function from rows to their splits; no time is in two splits."""

  def times(table: pa.Table) -> pd.Series:
    texts = _column(table, name).to_pandas()
    if TIME_FORMAT.value is None:
      return texts
    try:
      return pd.to_datetime(texts, format=TIME_FORMAT.value)
    except ValueError as e:
      raise UserError(f"{DATA.value}: column '{name}': {one_line(e)}") from None

  # pandas would keep the blocks' own indices if the values are sorted already.
  values = pd.concat([times(table) for table in _tables()], ignore_index=True)
  if (missing := int(values.isna().sum() + (values == '').sum())) > 0:
    raise UserError(f"{DATA.value}: column '{name}' is empty in {missing:,} samples; wanted a time")
  first = str(values.iloc[0])
  if TIME_FORMAT.value is None and _DAY_OR_MONTH_FIRST.match(first):
    raise UserError(
      f"{DATA.value}: column '{name}': found {first!r}, which does not sort by time as a text; "
      'wanted --time_format, as %d.%m.%Y or %m/%d/%Y %H:%M'
    )
  numbers = pd.to_numeric(values, errors='coerce') if TIME_FORMAT.value is None else values
  is_number = numbers.notna().all()
  ordered = (numbers if is_number else values).sort_values(ignore_index=True)
  bounds = [ordered[min(int(end * len(ordered)), len(ordered) - 1)] for end in _ends()]

  def split(table: pa.Table) -> np.ndarray:
    own = times(table)
    own = pd.to_numeric(own) if is_number and TIME_FORMAT.value is None else own
    return sum((own >= bound).to_numpy().astype(int) for bound in bounds)

  return split


def _by_hash(name: str) -> Callable[[pa.Table], np.ndarray]:
  """Returns a function from rows to their splits, by a hash that is the same everywhere."""
  ends = _ends() * 2.0**64

  def split(table: pa.Table) -> np.ndarray:
    texts = pc.cast(_column(table, name), pa.string()).fill_null('').to_numpy().astype(object)
    return np.searchsorted(ends, pd.util.hash_array(texts).astype(np.float64), side='right')

  return split


@command_line.command
def main() -> None:
  if (BY_TIME.value is None) == (BY_HASH.value is None):
    raise UserError('wanted --by_time COLUMN or --by_hash COLUMN')
  if not os.path.isfile(DATA.value):
    raise UserError(f'--data {DATA.value}: no such file')
  split_of = _by_time(BY_TIME.value) if BY_TIME.value else _by_hash(BY_HASH.value)
  is_parquet = DATA.value.endswith('.parquet')
  suffix = '.parquet' if is_parquet else '.tsv' if '.tsv' in DATA.value else '.csv'
  csv = pa.csv.WriteOptions(
    include_header=not COLUMNS.value,
    delimiter=_delimiter(),
    quoting_style='needed',
  )
  writers, counts = [], np.zeros(len(SPLITS), np.int64)
  with plain_errors('cannot write --out'):
    os.makedirs(OUT.value, exist_ok=True)
    for table in _tables():
      if not writers:
        for name in SPLITS:
          path = os.path.join(OUT.value, name + suffix)
          writer = pq.ParquetWriter(path, table.schema) if is_parquet else None
          writers.append(writer or pa.csv.CSVWriter(path, table.schema, write_options=csv))
      places = split_of(table)
      counts += np.bincount(places, minlength=len(SPLITS))
      for place, writer in enumerate(writers):
        writer.write_table(table.filter(pa.array(places == place)))
    for writer in writers:
      writer.close()
  for name, count in zip(SPLITS, counts):
    print(f'{os.path.join(OUT.value, name + suffix)}: {count:,} samples')


if __name__ == '__main__':
  main()
