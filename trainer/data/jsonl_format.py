"""Reads JSON lines, also compressed (.gz, .zst, .bz2, .lz4); a record is a line with one object.

A slot's value is a string, a whole number (12 or 12.0), true or false, a list of these, or an
object that maps features to numbers; null or absent is missing. Blank lines are skipped. Whether a
line is accepted depends on that line alone.
"""

import collections
import contextlib
import functools
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.json

from trainer import config
from trainer.data.arrays import column_at
from trainer.data.block import BadRecord, Block
from trainer.data.file_system import WHOLE, Part
from trainer.data.schema import check_columns
from trainer.data.text_blocks import text_blocks
from trainer.data.values import WHOLE_NUMBER
from trainer.plain_data import Json, JsonObject

# {column: whether it is read as a slot, else as a number; None: any value, as a text of JSON}
Wanted = dict[str, bool | None]
SlotValue = str | list[str | None] | dict[str, float] | None
_SLOT_TYPES = {
  str: pa.string(),
  list: pa.list_(pa.string()),
  dict: pa.map_(pa.string(), pa.float64()),
}


class WrongValue(ValueError):
  """Raised for a value of a kind that its column cannot hold."""

  def __init__(self, value: Json, wanted: str):
    super().__init__(json.dumps(value, default=repr)[:40])
    self.value, self.wanted = value, wanted


class Twice:
  """Stands for the value of a name that an object has twice; no column can hold it."""

  def __init__(self, name: str):
    self._name = name

  def __repr__(self) -> str:
    return f"the name '{self._name[:80]}' twice"


def value_at(record: JsonObject, name: str) -> Json:
  """Returns the value of the key `name`, else of the path `name`, such as ctx.os, else None."""
  while isinstance(record, dict):
    head, dot, rest = name.partition('.')
    if name in record or not dot:
      return record.get(name)
    record, name = record.get(head), rest
  return record if isinstance(record, Twice) else None


def _refuse(literal: str) -> None:
  raise ValueError(f'{literal} is no JSON')


def _object(pairs: list[tuple[str, Json]]) -> JsonObject:
  value = dict(pairs)
  if len(value) != len(pairs):
    counts = collections.Counter(name for name, _ in pairs)
    value |= {name: Twice(name) for name, count in counts.items() if count > 1}
  return value


_DECODER = json.JSONDecoder(parse_constant=_refuse, object_pairs_hook=_object)


def parse_json(text: bytes) -> Json:
  """Parses JSON in UTF-8, with `Twice` for values of names that are there twice.

  Raises ValueError if the text is no JSON, as NaN and Infinity are none.
  """
  try:
    return _DECODER.decode(text.decode())
  except RecursionError:
    raise ValueError('it is nested too deeply') from None


def _load(line: bytes) -> JsonObject:
  value = parse_json(line)
  if not isinstance(value, dict):
    raise ValueError(f'{type(value).__name__}, not an object')
  return value


def _text(value: Json) -> str | None:
  """Returns a string, whole number or boolean as text, None for null; else raises WrongValue."""
  if value is None or isinstance(value, str):
    return value
  if isinstance(value, bool):
    return 'true' if value else 'false'
  if isinstance(value, int):
    return str(value)
  if isinstance(value, float) and abs(value) < 2**53 and value == int(value):
    return str(int(value))
  raise WrongValue(value, WHOLE_NUMBER)


def slot_value(value: Json) -> SlotValue:
  """Converts a slot's JSON value to a text, a list of texts, or features with their numbers.

  Returns None for a missing value; raises WrongValue for a value that is none of these.
  """
  if isinstance(value, list):
    return [*map(_text, value)]
  if isinstance(value, dict):
    for number in value.values():
      if isinstance(number, Twice):
        raise WrongValue(number, 'a number')
    return {key: _float(number) for key, number in value.items()}
  return _text(value)


def json_text(value: Json) -> str:
  """Returns a value as JSON with escapes only where no encoding has the character."""

  def of_other(part: object) -> str:
    if isinstance(part, Twice):
      raise WrongValue(part, 'each name once')
    return str(part)

  text = json.dumps(value, ensure_ascii=False, default=of_other)
  return text.encode(errors='backslashreplace').decode()  # which is how JSON escapes them, too


def _float(value: Json) -> float:
  """Returns a number or boolean as a float; NaN for other values and for too large integers."""
  with contextlib.suppress(OverflowError):
    return float(value) if isinstance(value, (int, float)) else math.nan
  return math.nan


def _kind(value: SlotValue) -> type:
  return list if isinstance(value, list) else dict if isinstance(value, dict) else str


def slot_array(values: Sequence[SlotValue]) -> pa.Array:
  """Makes a column of results of `slot_value`: strings, lists or maps, or a union if mixed."""
  kinds = {_kind(value) for value in values if value is not None}
  if len(kinds) < 2:
    kind = next(iter(kinds), str)
    if kind is dict:
      values = [None if value is None else [*value.items()] for value in values]
    return pa.array(values, _SLOT_TYPES[kind])
  of_record = [*map(_kind, values)]
  kinds = [*dict.fromkeys(of_record)]
  counts = {kind: itertools.count() for kind in kinds}
  return pa.UnionArray.from_dense(
    pa.array([kinds.index(kind) for kind in of_record], pa.int8()),
    pa.array([next(counts[kind]) for kind in of_record], pa.int32()),
    [slot_array([v for v, own in zip(values, of_record) if own is kind]) for kind in kinds],
  )


def _number(value: Json, decimal: str) -> str | None:
  """Returns a JSON number as text with this decimal mark; a text as it is; else WrongValue."""
  if isinstance(value, (list, dict, Twice)):
    raise WrongValue(value, 'a number')
  if isinstance(value, bool):
    return _text(value)
  return value if value is None or isinstance(value, str) else repr(value).replace('.', decimal)


def _arrow_type(value: Json, is_slot: bool) -> pa.DataType | None:
  """Returns the Arrow type for a column that begins with `value`; None if Arrow cannot read it."""
  if not is_slot:
    return {bool: pa.bool_(), str: pa.string(), Twice: None}.get(type(value), pa.float64())
  if isinstance(value, list) and value and not isinstance(value[0], (list, dict)):
    inner = _arrow_type(value[0], True)
    return inner and pa.list_(inner)
  return {bool: pa.bool_(), int: pa.int64(), str: pa.string()}.get(type(value))


def _fast(lines: list[bytes], raw: bytes, wanted: Wanted) -> dict[str, pa.Array] | None:
  """Parses lines, none blank, with Arrow; None if json might give another result for a line."""
  # A line that begins with { and ends with } cannot continue in the next one.
  if None in wanted.values() or not all(
    line.startswith(b'{') and line.endswith(b'}') for line in lines
  ):
    return None
  try:
    raw.decode()
    first = _load(lines[0])
    types = {name: _arrow_type(value_at(first, name), slot) for name, slot in wanted.items()}
  except ValueError:
    return None
  if None in types.values():
    return None
  paths = {name for name in wanted if '.' in name and name not in first}
  # A name with dots may be a name in one record, and a path in another.
  if len(_without(dict.fromkeys(paths, ''), raw, whole=True)) < len(paths):
    return None
  schema = _schema({tuple(n.split('.')) if n in paths else (n,): t for n, t in types.items()})
  parsing = pa.json.ParseOptions(pa.schema(schema), unexpected_field_behavior='ignore')
  reading = pa.json.ReadOptions(use_threads=False, block_size=len(raw) + 1)
  try:
    table = pa.json.read_json(pa.BufferReader(raw), reading, parsing)
  except pa.ArrowException:
    return None
  if table.num_rows != len(lines):  # several objects in a line
    return None
  return {name: column_at(table, name) for name in wanted}


def _schema(types: Mapping[tuple[str, ...], pa.DataType]) -> list[tuple[str, pa.DataType]]:
  """Returns the fields of a nested Arrow struct, given {path of a value: its type}."""
  fields: dict[str, dict[tuple[str, ...], pa.DataType]] = {}
  for path, kind in types.items():
    fields.setdefault(path[0], {})[path[1:]] = kind
  return [
    (name, inner[()] if () in inner else pa.struct(_schema(inner)))
    for name, inner in fields.items()
  ]


def _block(raw: bytes, first_line: int, wanted: Wanted, decimal: str) -> Block:
  """Parses whole lines to a Block."""
  all_lines = [line.strip() for line in raw.split(b'\n')[:-1]]
  rows = np.flatnonzero([bool(line) for line in all_lines])
  lines = [all_lines[row] for row in rows]

  def block(columns: dict[str, pa.Array], rows: np.ndarray, malformed: list[BadRecord]) -> Block:
    text = lambda i: all_lines[rows[i]].decode(errors='replace')
    return Block(columns, first_line + rows, text, malformed)

  if lines and (columns := _fast(lines, raw, wanted)) is not None:
    return block(columns, rows, [])
  values = {name: [] for name in wanted}
  good, malformed = [], []
  for row, line in zip(rows.tolist(), lines):
    try:
      record = _load(line)
      own = {}
      for name, is_slot in wanted.items():
        value = value_at(record, name)
        if is_slot is None:
          own[name] = None if value is None else json_text(value)
        else:
          own[name] = slot_value(value) if is_slot else _number(value, decimal)
      json.dumps([*own.values()], ensure_ascii=False).encode()  # fails for lone surrogates
    except ValueError as e:
      shown, of = ' '.join(str(e).split())[:200], 'a JSON object'
      if isinstance(e, WrongValue):
        shown, of = f"{shown} in the column '{name}'", e.wanted
      malformed.append(BadRecord(first_line + row, shown, of, line.decode(errors='replace')))
      continue
    good.append(row)
    for name, value in own.items():
      values[name].append(value)
  columns = {
    name: slot_array(values[name]) if is_slot else pa.array(values[name], pa.string())
    for name, is_slot in wanted.items()
  }
  for name in (name for name, is_slot in wanted.items() if is_slot is None):
    columns[name] = pa.ExtensionArray.from_storage(pa.json_(), columns[name])
  return block(columns, np.array(good, np.int64), malformed)


def _kinds(data: config.Data, wanted: dict[str, str]) -> Wanted:
  numbers = [data.label, data.weight, *(label.column or label.name for label in data.labels)]
  texts = dict.fromkeys(numbers, False) | data.log_columns() | {data.group: True}
  return {name: texts.get(name, True) for name in wanted}


def of_messages(values: Sequence[bytes], data: config.Data, wanted: dict[str, str]) -> Block:
  """Parses messages of a topic, one object each, to a Block whose lines are indices from 0."""
  lines = [value.replace(b'\n', b' ') if value.strip() else b'null' for value in values]
  return _block(b'\n'.join([*lines, b'']), 0, _kinds(data, wanted), data.decimal)


def blocks(
  path: str,
  data: config.Data,
  wanted: dict[str, str],
  part: Part = WHOLE,
  as_written: bool = False,
) -> Iterator[Callable[[], Block]]:
  """Reads a JSON lines file in blocks; arguments and results are those of `csv_format.blocks`.

  With `as_written`, columns are texts of JSON.
  """
  kinds, unseen, names = _kinds(data, wanted), dict(wanted), []
  if as_written:
    kinds = dict.fromkeys(wanted)
  for lines, raw in text_blocks(path, part):
    if not names:
      names = next(filter(None, map(_names, raw.split(b'\n', 10)[:10])), [])
    unseen = _without(unseen, raw)
    yield functools.partial(_block, raw, lines.start, kinds, data.decimal)
  if unseen and part != WHOLE:  # other parts of the file may have these columns
    for _, raw in text_blocks(path):
      unseen = _without(unseen, raw)
  if names:  # a record may lack a column; if all records lack it, its name is wrong
    check_columns(path, names, unseen, data.made)


def _without(unseen: dict[str, str], raw: bytes, whole: bool = False) -> dict[str, str]:
  """Returns those of `unseen` whose columns do not occur in `raw`, some lines of the file.

  Unless `whole`, the last part of a path such as ctx.device.os is enough.
  """

  def occurs(name: str) -> bool:
    texts = [json.dumps(name), json.dumps(name, ensure_ascii=False)]
    last = name.rpartition('.')[2]
    return any(t.encode() in raw for t in texts) or (not whole and last != name and occurs(last))

  return {name: key for name, key in unseen.items() if not occurs(name)}


def _names(line: bytes) -> list[str]:
  with contextlib.suppress(ValueError):
    return list(_load(line))
  return []
