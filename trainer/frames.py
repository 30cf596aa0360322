"""Lets a job read data frames, by writing them to files."""

import contextlib
import itertools
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from trainer import config, files
from trainer.errors import UserError, renamed, short

Frame = pd.DataFrame | pa.Table  # or a Polars frame, or anything else that exports an Arrow stream


def is_frame(data: object) -> bool:
  return isinstance(data, (pd.DataFrame, pa.Table)) or hasattr(data, '__arrow_c_stream__')


def check_frames(by_split: Mapping[str, Frame | Sequence[Frame]]) -> None:
  """Raises UserError if a split has neither a frame nor a list of frames."""
  for split, some in by_split.items():
    for frame in some if isinstance(some, (list, tuple)) else [some]:
      if not is_frame(frame):
        hint = f'; files are given by data.{split} of the config' * isinstance(frame, str)
        found = f'found {short(frame)}'
        raise UserError(f'{split}: {found}; wanted a frame (pandas, Polars, Arrow){hint}')


def _arrow(cfg: config.Config, frame: Frame) -> pa.Table:
  """Returns a frame as an Arrow table.

  Raises:
    UserError: if a column that is read as text has numbers that are not whole.
  """
  from trainer.data.values import WHOLE_NUMBER, whole_numbers  # imports TensorFlow

  if isinstance(frame, pd.DataFrame):
    names = [str(name) for name in frame]
    if twice := [name for name in names if names.count(name) > 1]:
      raise UserError(f"data: the frame has the column '{twice[0]}' twice; wanted it once")
    frame = {str(name): _arrow_column(frame[name]) for name in frame}
  # Without metadata, equal frames make equal files, whatever library they come from.
  table = pa.table(frame).replace_schema_metadata(None)
  for name, is_text in cfg.data.log_columns().items():
    if not is_text or name not in table.column_names or not pa.types.is_floating(table[name].type):
      continue
    column = table[name].combine_chunks()
    _, wrong = whole_numbers(column)
    if wrong.any():
      found = column[int(wrong.argmax())]
      raise UserError(f"data: column '{name}': found {found}; wanted {WHOLE_NUMBER}")
  return table


def _arrow_column(column: pd.Series) -> pa.Array | pa.ChunkedArray:
  if isinstance(column.dtype, pd.SparseDtype):
    column = column.sparse.to_dense()
  try:
    return pa.array(column, from_pandas=True)
  except (pa.ArrowException, OverflowError):  # mixed with texts, or huge: as in a CSV file
    return pa.array(column.map(str, na_action='ignore'), pa.string(), from_pandas=True)


def _lists_as_texts(cfg: config.Config, table: pa.Table) -> dict[str, list[str]]:
  """Returns {column: its texts in a CSV file} for the columns of slots whose values are lists.

  Raises:
    UserError: if a value cannot be written to CSV.
  """
  columns, t = {}, pa.types
  for slot in cfg.data.slots:
    name = slot.column or slot.name
    kind = table[name].type if name in table.column_names else pa.null()
    if not (t.is_nested(kind) or t.is_binary(kind) or t.is_large_binary(kind)):
      continue
    is_list = slot.separator and (t.is_list(kind) or t.is_large_list(kind))
    value = kind.value_type if is_list else kind
    if not (
      t.is_string(value) or t.is_large_string(value) or t.is_integer(value) or t.is_null(value)
    ):
      raise UserError(
        f"data: column '{name}': found {kind}; wanted texts or whole numbers, as in the CSV file "
        'that the run was trained on, or lists of these where the slot has a separator'
      )
    rows = [row or () for row in table[name].to_pylist()]
    for value in itertools.chain.from_iterable(rows):
      if value is None or slot.separator in str(value):
        raise UserError(
          f"data: column '{name}': found {value!r} in a list; wanted texts or whole numbers "
          f"without the slot's separator {slot.separator!r}"
        )
    columns[name] = [slot.separator.join(map(str, row)) for row in rows]
  return columns


def write_passes(
  cfg: config.Config, frames: Mapping[str, Frame | Sequence[Frame]]
) -> Iterator[str]:
  """Writes frames into run_dir/frames, each as a pass.

  Args:
    frames: {split: a frame or a list of frames}.
  Yields:
    The settings, such as `data.SPLIT=[FILES]`, by which a job reads these files.
  Raises:
    UserError: if a frame lacks a column; then nothing is written.
  """
  from trainer.data.parquet_format import known_columns
  from trainer.data.schema import check_columns, wanted_columns

  tables: dict[str, list[pa.Table]] = {}
  wanted = wanted_columns(cfg)
  for split, some in frames.items():
    tables[split] = [_arrow(cfg, frame) for frame in ([some] if is_frame(some) else some)]
    for i, table in enumerate(tables[split]):
      name = split if is_frame(some) else f'{split}[{i}]'
      known = known_columns(table.schema, wanted)
      check_columns(f'the frame {name}', known, wanted, cfg.data.made)
  folder = os.path.join(cfg.run_dir, 'frames')
  os.makedirs(folder, exist_ok=True)
  for split, of_split in tables.items():
    paths = []
    for i, table in enumerate(of_split):
      unfinished = os.path.join(folder, f'{split}{files.UNFINISHED}')
      pq.write_table(table, unfinished)
      # A run that is continued with another frame trains on it as another pass.
      paths.append(os.path.join(folder, f'{split}-{i:03}-{files.crc32_of(unfinished):08x}.parquet'))
      os.replace(unfinished, paths[-1])
    yield f'data.{split}={json.dumps(paths)}'
  if cfg.data.format not in (None, 'parquet'):
    yield 'data.format=null'  # the suffix decides, here and for what is scored later


@contextlib.contextmanager
def file_of(
  cfg: config.Config, frame: Frame, log_format: str, labelled: bool = True
) -> Iterator[str]:
  """Writes a frame to a temporary file, and yields its path.

  Args:
    log_format: the format of the log. If it is csv, the file is CSV too, so that each value gets
      the text that it has in the log. Otherwise the file is Parquet.
    labelled: whether the frame must have labels, weights and groups.
  """
  from trainer.data.schema import wanted_columns

  table = _arrow(cfg, frame)
  with tempfile.TemporaryDirectory(prefix='ctr-frame-') as folder:
    if log_format != 'csv':
      path = os.path.join(folder, 'frame.parquet')
      pq.write_table(table, path)
      with renamed(rf'{re.escape(path)}(:1\b)?', 'the frame'):
        yield path
      return
    path = os.path.join(folder, 'frame.csv')
    columns, wanted = cfg.data.columns, wanted_columns(cfg, labelled)
    missing = [c for c in columns or () if c not in table.column_names]
    for column in missing:
      if column in wanted:
        raise UserError(f"data: the frame has no column '{column}' ({wanted[column]})")
    frame = frame if isinstance(frame, pd.DataFrame) else table.to_pandas()
    frame = frame.assign(**_lists_as_texts(cfg, table), **dict.fromkeys(missing, ''))
    separator, has_header = cfg.data.delimiter or ',', columns is None
    frame.to_csv(path, sep=separator, index=False, columns=columns, header=has_header)
    with renamed(rf'{re.escape(path)}(:1\b)?', 'the frame'):
      yield path
