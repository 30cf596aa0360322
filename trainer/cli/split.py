"""Splits one log: `ctr-split --data FILE --out DIR --by_time COLUMN`.

It writes DIR/train, DIR/valid and DIR/test, each with FILE's suffix, but never compressed; all
three or, if it fails, none. --by_time orders samples by time into train, valid and test. --shares
gives their sizes, or --at the times at which valid and test begin; samples of the same time stay
together. --by_hash keeps all samples of a user, or of another column's value, together. FILE is
CSV, TSV, JSON lines, libsvm, libffm (also .gz, .zst, .bz2, .lz4) or Parquet. In JSON and Parquet,
COLUMN may be a path, as device.os. Samples are copied as they are; blank lines, and lines that
repeat the names of the columns, are left out.
"""

import contextlib
import itertools
import os
import re
import shutil
import signal
from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from absl import flags

from trainer import command_line, config, files
from trainer.data import file_system, pass_files
from trainer.errors import UserError, one_line, plain_errors, renamed

DATA = flags.DEFINE_string('data', None, 'The log.', required=True)
OUT = flags.DEFINE_string('out', None, 'A directory for the three files.', required=True)
BY_TIME = flags.DEFINE_string(
  'by_time', None, 'A column of numbers, or of times as 2024-01-30 12:00 or by --time_format.'
)
BY_HASH = flags.DEFINE_string('by_hash', None, 'A column whose equal values stay together.')
SHARES = flags.DEFINE_list(
  'shares',
  ['80', '10', '10'],
  'Per cent of samples, or of values of --by_hash, for train, valid, test.',
)
AT = flags.DEFINE_list(
  'at',
  None,
  'In place of --shares: when valid and test begin, as 2024-01-30,2024-01-31 or by --time_format; '
  'in UTC if the times have offsets.',
)
TIME_FORMAT = flags.DEFINE_string('time_format', None, 'Of --by_time, as %d.%m.%Y %H:%M:%S.')
DELIMITER = flags.DEFINE_string('delimiter', None, 'Of a CSV file; default: as between its names.')
QUOTING = flags.DEFINE_enum(
  'quoting', 'doubled', ['doubled', 'backslash', 'none'], 'Of a CSV file, as data.quoting.'
)
COLUMNS = flags.DEFINE_list('columns', [], 'Names, where a CSV file has no line of them.')

SPLITS = ('train', 'valid', 'test')
_ALL, _NONE = len(SPLITS), -1  # places of a line that every split gets, and of one that none gets
_FORMAT = '%Y-%m-%d %H:%M:%S.%f%z'
_OF_DATE = re.compile('%[^HIMSfpzZ]')  # a directive of a date, not of a time of day
_OFFSET = r'[T ].*(?:Z|[+-]\d\d(?::?\d\d)?)$'  # ends a time that has an offset from UTC


def _ends() -> np.ndarray:
  """Returns where train and valid end, as shares of the log, 0 to 1, float64 [2]."""
  try:
    shares = np.array([float(share) for share in SHARES.value])
  except ValueError:
    shares = np.zeros(0)
  if len(shares) != len(SPLITS) or not (shares >= 0).all() or not abs(shares.sum() - 100) <= 1e-6:
    raise UserError(f'--shares: found {",".join(SHARES.value)}; wanted three that sum to 100')
  ends = np.cumsum(shares)
  return ends[:2] / ends[2]


def _keys(column: pa.Array, name: str) -> np.ndarray:
  """Returns the key of each sample's feature, which is the same everywhere; negative if blank."""
  from trainer.data.arrays import one_each
  from trainer.data.values import WHOLE_NUMBER, feature_keys, whole_numbers

  values, several = one_each(column)
  values, has_fraction = whole_numbers(values)
  for wrong, wanted in ((several, 'one value a sample'), (has_fraction, WHOLE_NUMBER)):
    if wrong is not None and wrong.any():
      found = column[int(wrong.argmax())].as_py()
      raise UserError(f'--by_hash {name}: found {found} in {DATA.value}; wanted {wanted}')
  return feature_keys(values, name, 0, ())


def _by_hash(keys: np.ndarray, name: str) -> np.ndarray:
  """Returns the index in SPLITS of each sample."""
  from trainer.data.features import HASH_BITS

  if (keys < 0).all():
    raise UserError(f"{DATA.value}: column '{name}' is empty in all samples; wanted values")
  # Samples whose value is blank stay together, too.
  return np.searchsorted(_ends() * 2.0**HASH_BITS, np.maximum(keys, 0), side='right')


def _texts(column: pa.Array, name: str) -> pa.Array:
  """Returns times or numbers as texts, null where blank."""
  from trainer.data.arrays import one_each
  from trainer.data.values import as_text, trim

  values, _ = one_each(column)
  if pa.types.is_floating(values.type):  # which may have fractions; NaN becomes null
    values = pa.array(values.to_pandas(), from_pandas=True).cast(pa.string())
  texts = trim(as_text(values, name))
  try:
    texts.validate(full=True)
  except pa.ArrowInvalid:
    raise UserError(f'--by_time {name}: found bytes that are no UTF-8; wanted times') from None
  return texts


def _by_time(texts: pd.Series, name: str, lines: np.ndarray) -> tuple[np.ndarray, list[str]]:
  """Returns the index in SPLITS of each sample, equal for equal times; and texts about times."""
  if missing := int(texts.isna().sum()):
    raise UserError(f"{DATA.value}: column '{name}' is empty in {missing:,} samples; wanted a time")
  times = _times(texts, name)
  if times.dtype.kind != 'M':
    _check_units(times, texts, name, lines)
  order = np.argsort(times, kind='stable')
  if AT.value:
    bounds = _bounds(times.dtype.kind == 'M', texts[0])
  else:
    starts = np.rint(_ends() * len(times)).astype(int)
    bounds = [times[order[start]] for start in starts if start < len(times)]
  places = sum((times >= bound).astype(int) for bound in bounds) + np.zeros(len(times), int)
  ends = np.cumsum(np.bincount(places, minlength=len(SPLITS)))
  if AT.value and len(set(places)) < len(SPLITS):
    found = f'{texts[order[0]]} to {texts[order[-1]]}'
    raise UserError(f"--at: a split is empty; '{name}' is {found}; wanted times between them")
  return places, [
    f', {name} {texts[order[start]]} to {texts[order[end - 1]]}' if start < end else ''
    for start, end in zip([0, *ends], ends)
  ]


def _check_units(times: np.ndarray, texts: pd.Series, name: str, lines: np.ndarray) -> None:
  """Raises UserError if numbers cannot all be times since 1970 in one unit."""
  from trainer.data.columns.time import UNITS, is_unit

  firsts = {unit: np.flatnonzero(is_unit(times, unit))[:1].tolist() for unit in UNITS}
  firsts = sorted((at, unit) for unit, found in firsts.items() for at in found)
  if len(firsts) > 1:
    (before, unit), (at, other) = firsts[:2]
    raise UserError(
      f"{DATA.value}:{lines[at]}: column '{name}': found {texts[at]}, {other} since 1970, beside "
      f'{texts[before]} of line {lines[before]}, {unit}; wanted one unit'
    )


def _times(texts: pd.Series, name: str) -> np.ndarray:
  """Returns texts as numbers, or as datetime64 in UTC."""
  where, form = f"{DATA.value}: column '{name}'", TIME_FORMAT.value
  try:
    times = pd.to_datetime(texts, format=form or 'ISO8601', errors='coerce', utc=True)
  except ValueError as e:
    raise UserError(f'--time_format: {one_line(e)}') from None
  if form and times.isna().any():
    raise UserError(
      f'{where}: found {texts[times.isna()].iloc[0]!r}; wanted a time by --time_format '
      f"'{form}', which must describe all of it, as {_FORMAT}"
    )
  if not form:
    numbers = pd.to_numeric(texts, errors='coerce')
    is_number, has_offset = np.isfinite(numbers), texts.str.contains(_OFFSET)
    if is_number.all():
      return numbers.to_numpy()
    beside = f'beside {texts[0]!r} of sample 1'
    for is_other, why, wanted in (
      (times.isna() & ~is_number, 'which is no time', 'numbers, times such as 2024-01-30 12:00'),
      (is_number != is_number[0], beside, 'one format'),
      (has_offset != has_offset[0], beside, 'an offset from UTC in all times or in none'),
    ):
      if is_other.any():
        at = int(is_other.argmax())
        raise UserError(
          f'{where}, sample {at + 1:,}: found {texts[at]!r}, {why}; wanted {wanted}, or '
          '--time_format, as %d.%m.%Y or %m/%d/%Y %H:%M'
        )
  return times.dt.tz_localize(None).to_numpy()  # with a zone they would become objects


def _bounds(are_times: bool, first: str) -> list:
  """Returns the two times of --at; `first` is the first time of the log, for messages."""
  wanted = 'times as 2024-01-30 or 2024-01-30 12:00'
  if TIME_FORMAT.value:
    wanted = (
      f"times by --time_format '{TIME_FORMAT.value}', whole or without a time of day at its end, "
      'or as 2024-01-30'
    )
  elif not are_times:
    wanted = f'numbers, as {first}'
  with contextlib.suppress(ValueError):
    bounds = [(_timestamp if are_times else float)(text) for text in AT.value]
    wanted = 'two times that rise: where valid and where test begin'
    if len(bounds) == len(SPLITS) - 1 and bounds[0] < bounds[1]:
      return bounds
  raise UserError(f'--at: found {",".join(AT.value)}; wanted {wanted}')


def _timestamp(text: str) -> np.datetime64:
  """Reads a time of --at: by --time_format, whole or cut after its date, else as ISO 8601.

  pandas would read 08.12.2025, without a format, as the 12th of August. Else it is a ValueError.
  """
  whole = TIME_FORMAT.value or ''
  date_end = max((found.end() for found in _OF_DATE.finditer(whole)), default=len(whole))
  # Without %p, an hour of 12 may be in the morning or in the afternoon.
  parts = [whole[:end] for end in range(len(whole), date_end - 1, -1)]
  parts = [part for part in parts if '%I' not in part or '%p' in part or '%p' not in whole]
  for form in (*parts, 'ISO8601'):
    with contextlib.suppress(ValueError):
      return pd.to_datetime(text, format=form, utc=True).tz_localize(None).to_datetime64()
  raise ValueError(text)


def _copy_lines(places: np.ndarray, paths: Sequence[str]) -> None:
  from trainer.data.text_blocks import text_blocks

  with contextlib.ExitStack() as stack:
    outs = [stack.enter_context(open(path, 'wb')) for path in paths]
    for numbers, block in text_blocks(DATA.value):
      own, lines = places[numbers.start : numbers.stop], block.split(b'\n')
      for place, out in enumerate(outs):
        chosen = itertools.compress(lines, ((own == place) | (own == _ALL)).tolist())
        out.writelines(line + b'\n' for line in chosen)


def _copy_rows(places: np.ndarray, paths: Sequence[str]) -> None:
  row = 1
  with contextlib.ExitStack() as stack:
    file = pq.ParquetFile(stack.enter_context(file_system.open_file(DATA.value)))
    outs = [stack.enter_context(pq.ParquetWriter(path, file.schema_arrow)) for path in paths]
    for batch in file.iter_batches():
      own = places[row : row + len(batch)]
      for place, out in enumerate(outs):
        out.write_batch(batch.slice(0, len(own)).filter(pa.array(own == place)))
      row += len(batch)


@contextlib.contextmanager
def _all_or_none(paths: Sequence[str]) -> Iterator[list[str]]:
  """Yields paths to write to. At the end these files get the names `paths`, unless it fails.

  The old files are gone before the first new one gets its name, so a process that is killed leaves
  no cut file, and no old file beside a new one.
  """
  folder = os.path.join(OUT.value, f'.split{files.UNFINISHED}')
  os.makedirs(folder, exist_ok=True)
  with files.exclusive(os.path.join(folder, 'lock'), patience=0):
    try:
      new = [os.path.join(folder, os.path.basename(path)) for path in paths]
      yield new
      files.sync(new)
      for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
      for path in filter(os.path.lexists, paths):
        os.remove(path)
      for old, path in zip(new, paths):
        os.rename(old, path)
      files.sync_directory(OUT.value)
    finally:
      shutil.rmtree(folder, ignore_errors=True)


def _places(kind: str, column: str) -> tuple[np.ndarray, np.ndarray, list[str]]:
  """Returns each line's place in SPLITS, _ALL or _NONE, int8; sizes; and texts on times."""
  from trainer.data.conversion import reader, warn
  from trainer.data.csv_format import delimiter_of, header_lines

  by = '\t' if DELIMITER.value == '\\t' else DELIMITER.value
  if kind == 'csv' and not by and not COLUMNS.value:
    by = delimiter_of(DATA.value, [column])
  # A weight is read as a number, which may have a fraction, where the format tells them from texts.
  data = config.Data.model_construct(
    slots=[],
    label=None,
    weight=BY_TIME.value,
    delimiter=by,
    quoting=QUOTING.value,
    columns=COLUMNS.value or None,
  )
  lines, parts, remarks = [], [], []
  with renamed(r'data\.(?=delimiter|columns)', '--'), renamed(", as by --set '.*'$", ''):
    asked = {column: '--by_time' if BY_TIME.value else '--by_hash'}
    for read in reader(kind).blocks(DATA.value, data, asked):
      block = read()
      if block.malformed:
        hint = '; or another --delimiter, --quoting or --columns' if kind == 'csv' else ''
        raise UserError(f'{block.malformed[0]._replace(path=DATA.value)}{hint}')
      remarks += block.remarks
      lines.append(block.lines)
      parts.append((_texts if BY_TIME.value else _keys)(block.columns[column], column))
  if not any(map(len, lines)):
    raise UserError(f'--data {DATA.value}: found no samples; wanted at least one')
  warn(DATA.value, remarks)
  lines = np.concatenate(lines)
  if BY_TIME.value:
    own, told = _by_time(pa.chunked_array(parts).to_pandas(), column, lines)
  else:
    own, told = _by_hash(np.concatenate(parts), column), [''] * len(SPLITS)
  places = np.full([lines.max() + 1], _NONE, np.int8)
  places[lines] = own
  if kind == 'csv' and header_lines(DATA.value, data):
    places[1] = _ALL
  return places, np.bincount(own, minlength=len(SPLITS)), told


@command_line.command
def main() -> None:
  command_line.end_by_sigterm()
  if (BY_TIME.value is None) == (BY_HASH.value is None):
    found = 'neither' if BY_TIME.value is None else 'both'
    raise UserError(f'found {found}; wanted --by_time COLUMN or --by_hash COLUMN')
  suffix = file_system.suffix_of(DATA.value)
  kind = file_system.SUFFIXES.get(suffix, 'csv')
  if kind in ('orc', 'tfrecord'):
    raise UserError(f'--data {DATA.value}: found {kind}; wanted text in lines, or Parquet')
  for flag, is_used, found, wanted in (
    (AT, BY_TIME.value, '--by_hash', '--by_time'),
    (TIME_FORMAT, BY_TIME.value, '--by_hash', '--by_time'),
    (DELIMITER, kind == 'csv', f'the format {kind}', 'csv'),
    (COLUMNS, kind == 'csv', f'the format {kind}', 'csv'),
    (QUOTING, kind == 'csv' or QUOTING.value == 'doubled', f'the format {kind}', 'csv'),
  ):
    if flag.value and not is_used:
      raise UserError(f'--{flag.name}: found with {found}; wanted {wanted}')
  if file_system.is_directory(DATA.value):
    raise UserError(f'--data {DATA.value}: found a directory; wanted a file')
  before = pass_files.files_of(DATA.value)
  places, counts, told = _places(kind, BY_TIME.value or BY_HASH.value)
  known = suffix in file_system.SUFFIXES
  paths = [os.path.join(OUT.value, split + (suffix if known else '.csv')) for split in SPLITS]
  replaced = {path for path in paths if os.path.exists(path)}
  for path in replaced:
    if os.path.realpath(path) == os.path.realpath(DATA.value) or os.path.isdir(path):
      found = 'a directory' if os.path.isdir(path) else '--data itself'
      raise UserError(f'--out {OUT.value}: {path} is {found}; wanted another directory')
  with plain_errors('cannot write --out'), _all_or_none(paths) as new:
    (_copy_rows if kind == 'parquet' else _copy_lines)(places, new)
    if pass_files.files_of(DATA.value) != before:
      raise UserError(f'--data {DATA.value}: changed meanwhile; wanted a log that is complete')
  for path, count, times in zip(paths, counts, told):
    place = ', in place of the file that was there' * (path in replaced)
    print(f'{path}: {count:,} samples{times}{place}')


if __name__ == '__main__':
  main()
