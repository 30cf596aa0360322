"""Checks of columns with the key `from`: where each kind may be used, and what it may read."""

from collections.abc import Iterator, Mapping, Sequence

from trainer.config.columns import Bins, Lookup, Made, Number, SlotCross, Text
from trainer.config.data import Data, DenseColumn, Slot
from trainer.config.schema import Config

Mistakes = Iterator[tuple[str, str]]  # a key, and what is wrong with it


def made_columns(cfg: Config) -> Mistakes:
  """Yields the mistakes in the keys `from` of all slots and dense columns."""
  data = cfg.data
  columns = {f'data.slots.{i}': slot for i, slot in enumerate(data.slots)}
  columns |= {f'data.dense.{i}': column for i, column in enumerate(data.dense)}
  made = {key: column for key, column in columns.items() if column.made is not None}
  names = [column.name for column in made.values()]
  for key, column in made.items():
    if names.count(column.name) > 1:
      yield f'{key}.name', f"found '{column.name}', which is made twice; wanted distinct names"
    if isinstance(column, Slot):
      yield from _slot(column, column.made, key)
    elif isinstance(column.made, (Bins, SlotCross, Number)) or column.made.is_several:
      found = f'found {column.made.kind}, which makes features'
      here = 'here time, text, lookup, expression or overlap'
      yield f'{key}.from', f'{found}; wanted it in data.slots, and {here}'
  for key, column in made.items():
    yield from _reads(data, column, f'{key}.from.{column.made.kind}')


def _slot(slot: Slot, made: Made, at: str) -> Mistakes:
  if slot.column is not None:
    yield f'{at}.column', f"found '{slot.column}' with from, which says what is read; wanted null"
  if slot.value_separator is not None:
    yield f'{at}.value_separator', f'found {slot.value_separator!r} with from; wanted null'
  is_text = isinstance(made, (Text, Lookup)) and not made.is_several
  if slot.separator is not None and not is_text:
    found = f'found {slot.separator!r} with {made.kind}'
    yield f'{at}.separator', f'{found}, which makes no text to split; wanted null'
  if slot.sequence:
    yield f'{at}.sequence', f'found with {made.kind}; wanted a history of the log'
  if made.is_fraction:
    found = f'found {made.kind}, which makes numbers that are not whole'
    yield f'{at}.from', f'{found}; wanted it in data.dense, and here bins or number of it'


def _reads(data: Data, column: Slot | DenseColumn, key: str) -> Mistakes:
  made, of_name = column.made, data.made
  one = f'wanted one {made.how} a sample'
  for name in made.reads():
    source = of_name.get(name) if name != column.name else None
    if source is None:
      slot = next((s for s in data.slots if s.name == name and s.made is None), None)
      if slot and slot.value_separator and made.how == 'features':
        yield key, f"found '{name}', whose features have values, which {made.kind} would lose"
      if slot and slot.separator and made.how != 'features':
        yield key, f"found '{name}', which holds several features; {one}"
      continue
    is_bin = isinstance(source, Bins) and made.how == 'number'
    if source.has_values or is_bin or (source.is_several and made.how != 'features'):
      other = f"another name for it, where the log's column '{name}' is meant"
      yield key, f"found '{name}', which is made by {source.kind}; {one} ({other})"
    if source.is_fraction and made.how == 'features':
      yield key, f"found '{name}', whose numbers are no features; wanted bins of it"
  yield from _cycles(of_name, [column.name], key)


def _cycles(made: Mapping[str, Made], path: Sequence[str], key: str) -> Mistakes:
  """Yields a mistake for each column that reads itself through other columns with `from`.

  Args:
    made: {name of a column with `from`: how it is computed}.
    path: the names of columns, each of which reads the next one; the search continues at the last.
  """
  for read in made[path[-1]].reads():
    if read in path[:-1]:
      yield key, f'found a cycle: {" reads ".join([*path, read])}; wanted none'
    elif read in made and read != path[-1]:
      yield from _cycles(made, [*path, read], key)
