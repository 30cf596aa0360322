"""Makes Arrow tables of data frames, and writes those that a job trains on to files."""

import collections
import contextlib
import datetime
import decimal
import numbers
import os
import uuid
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from trainer import config, files
from trainer.data.file_system import first_line
from trainer.errors import UserError, short
from trainer.plain_data import JsonObject

Frame = pd.DataFrame | pa.Table  # or a Polars frame, or anything else that exports an Arrow stream
FRAME = 'the frame'  # in messages
# The objects that a column may mix. Each is read as the text that it has in a CSV file.
_MIXED = (
  *(str, numbers.Real, decimal.Decimal, np.bool_, uuid.UUID),
  *(datetime.date, datetime.time, pd.Period, pd.Interval),
)


def is_frame(data: object) -> bool:
  is_column = isinstance(data, (pd.Series, pa.ChunkedArray))  # they export a stream too
  return isinstance(data, pd.DataFrame) or hasattr(data, '__arrow_c_stream__') and not is_column


def found(data: object) -> str:
  """Returns 'found …', which says in a message what was given in place of a frame."""
  is_plain = data is None or isinstance(data, (str, bool, numbers.Real))
  return f'found {short(data) if is_plain else f"a {type(data).__name__}"}'


def check_frames(by_split: Mapping[str, Frame | Sequence[Frame]]) -> None:
  """Raises UserError if a split has neither a frame nor a list of frames."""
  for split, some in by_split.items():
    for frame in some if isinstance(some, (list, tuple)) and some else [some]:
      if not is_frame(frame):
        hint = f'; files are given by data.{split} of the config' * isinstance(frame, str)
        raise UserError(f'{split}: {found(frame)}; wanted a frame (pandas, Polars, Arrow){hint}')


def table_of(
  frame: Frame, wanted: Mapping[str, str], made: Collection[str], where: str = FRAME
) -> pa.Table:
  """Returns a frame as an Arrow table of types that logs have.

  Columns that nobody reads are left out if they have other types, or a name that is there twice.

  Args:
    wanted: {column to read: the config key that needs it}.
    made: names of columns that are computed from others, for messages.
    where: what messages call the frame.
  Raises:
    UserError: if the frame lacks a wanted column, has it twice, or holds other types there.
  """
  from trainer.data.parquet_format import known_columns, plain  # imports TensorFlow
  from trainer.data.schema import check_columns

  if isinstance(frame, pd.DataFrame):
    columns = [(str(name), frame.iloc[:, i]) for i, name in enumerate(frame)]
  else:
    try:
      table = frame if isinstance(frame, pa.Table) else pa.table(frame)
    except Exception as e:  # the library that exports it may raise any
      kind = type(frame).__name__
      raise UserError(f'{where}: found a {kind} that is no table: {first_line(e)}') from None
    columns = list(zip(table.column_names, table.columns))
  # The names in the header of a CSV file are stripped, too.
  columns = [(name if name in wanted else name.strip(), column) for name, column in columns]
  times = collections.Counter(name for name, _ in columns)
  read = {part for name in wanted for part in (name, name.partition('.')[0])}
  arrays = {}
  for name, column in columns:
    try:
      if times[name] == 1:
        chunks = column if isinstance(column, pa.ChunkedArray) else _of_series(column, name)
        arrays[name] = pa.chunked_array(
          [plain(c, name) for c in chunks.chunks or [chunks.combine_chunks()]]
        )
    except UserError as e:
      if name in read:
        raise UserError(f'{where}: {e}') from None
  # Without metadata, equal frames make equal files, whatever library they come from.
  table = pa.table(arrays)
  nested = known_columns(table.schema, wanted)[len(arrays) :]
  check_columns(where, [*times.elements(), *nested], wanted, made)
  return table


def _of_series(column: pd.Series, name: str) -> pa.ChunkedArray:
  """Returns a pandas column as Arrow arrays, mixed objects as texts; UserError if one has none."""
  if isinstance(column.dtype, pd.SparseDtype):
    column = column.sparse.to_dense()
  kind = column.cat.categories.dtype if hasattr(column, 'cat') else column.dtype
  array = None
  if not isinstance(kind, (pd.PeriodDtype, pd.IntervalDtype)):  # whose Arrow types have no texts
    with contextlib.suppress(Exception):  # Arrow runs code of the objects that it finds
      array = pa.array(column, from_pandas=True)
  # Newer versions of Arrow make a type of its own of UUIDs.
  if array is None or isinstance(array.type, pa.BaseExtensionType):
    odd = next((v for v in column.dropna() if not isinstance(v, _MIXED)), None)
    if odd is not None:
      wanted = 'texts, numbers, booleans or times, or lists or dicts of one kind'
      raise UserError(f"column '{name}': {found(odd)} among its values; wanted {wanted}")
    try:
      array = pa.array(column.map(str, na_action='ignore'), from_pandas=True)
    except UnicodeError:
      raise UserError(f"column '{name}': found a text that is not Unicode") from None
  return array if isinstance(array, pa.ChunkedArray) else pa.chunked_array([array])


def write_passes(cfg: config.Config, frames: Mapping[str, Frame | Sequence[Frame]]) -> JsonObject:
  """Writes frames, {split: one or several}, into run_dir/frames, each as a pass.

  Returns the settings, such as {'data.SPLIT': FILES}, by which a job reads these files. If a frame
  lacks a column, it is a UserError and nothing is written.
  """
  from trainer.data.schema import wanted_columns  # imports TensorFlow

  tables: dict[str, list[pa.Table]] = {}
  wanted = wanted_columns(cfg)
  for split, some in frames.items():
    many = isinstance(some, (list, tuple))
    tables[split] = [
      table_of(frame, wanted, cfg.data.made, f'{FRAME} {split}' + f'[{i}]' * many)
      for i, frame in enumerate(some if many else [some])
    ]
  folder = os.path.join(cfg.run_dir, 'frames')
  os.makedirs(folder, exist_ok=True)
  settings: JsonObject = {}
  for split, of_split in tables.items():
    paths = []
    for i, table in enumerate(of_split):
      unfinished = os.path.join(folder, f'{split}{files.UNFINISHED}')
      pq.write_table(table, unfinished)
      # A run that is continued with another frame trains on it as another pass.
      paths.append(os.path.join(folder, f'{split}-{i:03}-{files.crc32_of(unfinished):08x}.parquet'))
      os.replace(unfinished, paths[-1])
    settings[f'data.{split}'] = paths
  if cfg.data.format not in (None, 'parquet'):
    settings['data.format'] = None  # the suffix decides, here and for what is scored later
  return settings
