"""Checks of made columns: where each kind may be used, and which columns it may read."""

from collections.abc import Callable
from typing import NoReturn

from trainer.config.columns import Bins, Cross, Lookup, Made, Number, Text
from trainer.config.data import Data, DenseColumn, Slot

Fail = Callable[[str, str], NoReturn]


def check_made(data: Data, fail: Fail) -> None:
  """Checks the `from` of all slots and dense columns.

  Args:
    data: the section `data`.
  """
  names = [c.name for c in (*data.slots, *data.dense) if c.made is not None]
  for key, columns in (('data.slots', data.slots), ('data.dense', data.dense)):
    for i, column in enumerate(columns):
      if column.made is None:
        continue
      at = f'{key}.{i}'
      if names.count(column.name) > 1:
        fail(f'{at}.name', f"found '{column.name}', which is made twice; wanted distinct names")
      if isinstance(column, Slot):
        _check_slot(column, column.made, at, fail)
      else:
        _check_dense(column.made, at, fail)
  for key, columns in (('data.slots', data.slots), ('data.dense', data.dense)):
    for i, column in enumerate(columns):
      if column.made is not None:
        _check_reads(data, column, column.made, f'{key}.{i}.from', fail)


def _check_slot(slot: Slot, made: Made, at: str, fail: Fail) -> None:
  if slot.column is not None:
    fail(f'{at}.column', f"found '{slot.column}' with from, which says what is read; wanted null")
  if slot.value_separator is not None:
    fail(f'{at}.value_separator', f'found {slot.value_separator!r} with from; wanted null')
  is_text = isinstance(made, (Text, Lookup)) and not made.is_several
  if slot.separator is not None and not is_text:
    fail(
      f'{at}.separator',
      f'found {slot.separator!r} with {made.kind}, which makes no text to split; wanted null',
    )
  if slot.sequence:
    fail(f'{at}.sequence', f'found with {made.kind}; wanted a history of the log')
  if made.is_fraction:
    fail(
      f'{at}.from',
      f'found {made.kind}, which makes numbers that are not whole; wanted it in data.dense, and '
      'here bins or number of it',
    )


def _check_dense(made: Made, at: str, fail: Fail) -> None:
  if isinstance(made, (Bins, Cross, Number)) or made.is_several:
    fail(
      f'{at}.from',
      f'found {made.kind}, which makes features; wanted it in data.slots, and here time, text, '
      'lookup, expression or overlap',
    )


def _check_reads(data: Data, column: Slot | DenseColumn, made: Made, key: str, fail: Fail) -> None:
  of_name = {c.name: c for c in (*data.slots, *data.dense) if c.made is not None}
  key = f'{key}.{made.kind}'
  for name, how in made.reads():
    source = of_name.get(name) if name != column.name else None
    if source is None:
      slot = next((s for s in data.slots if s.name == name and s.made is None), None)
      if slot and slot.value_separator and how == 'features':
        fail(key, f"found '{name}', whose features have values, which {made.kind} would lose")
      if slot and slot.separator and how != 'features':
        fail(key, f"found '{name}', which holds several features; wanted one {how} a sample")
      continue
    is_bin = isinstance(source.made, Bins) and how == 'number'
    if source.made.has_values or is_bin or (source.made.is_several and how != 'features'):
      fail(
        key,
        f"found '{name}', which is made by {source.made.kind}; wanted one {how} a sample (another "
        f"name for it, where the log's column '{name}' is meant)",
      )
    if source.made.is_fraction and how == 'features':
      fail(key, f"found '{name}', whose numbers are no features; wanted bins of it")
  _check_cycle(of_name, column.name, [], key, fail)


def _check_cycle(
  of_name: dict[str, Slot | DenseColumn], name: str, path: list[str], key: str, fail: Fail
) -> None:
  if name in path:
    fail(key, f'found a cycle: {" reads ".join([*path, name])}; wanted none')
  for read, _ in of_name[name].made.reads():
    if read in of_name and read != name:
      _check_cycle(of_name, read, [*path, name], key, fail)
