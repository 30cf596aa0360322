"""A mistake in a config, told in one line: file, key, the value found, the value wanted."""

import typing
from collections.abc import Iterator, Sequence
from typing import Any

import pydantic
from pydantic_core import ErrorDetails

from trainer.config.schema import Config
from trainer.config.section import Section
from trainer.errors import nearest, short

# What a value of each of pydantic's types is called.
_KINDS = {
  'int': 'a whole number',
  'float': 'a number',
  'finite': 'a finite number',
  'bool': 'true or false',
  'string': 'a text',
}


def _fields_at(loc: Sequence[str | int]) -> list[str]:
  """The valid keys of the model that holds the key at `loc`."""
  model: type[Section] = Config
  for part in loc[:-1]:
    if isinstance(part, int):
      continue
    fields = getattr(model, 'model_fields', {})
    if part not in fields:  # a key of a dict of models (a table's name)
      continue
    model = next((inner for inner, _ in _sections_in(fields[part].annotation, '')), model)
  return list(getattr(model, 'model_fields', {}))


def _sections_with(key: str) -> list[str]:
  """The sections that have a key of exactly this name, as in `train.dense_optimizer`."""
  found = []

  def look(section: type[Section], path: str) -> None:
    for name, field in section.model_fields.items():
      if name == key:
        found.append(path or 'the top level')
      for inner, place in _sections_in(field.annotation, f'{path}.{name}'.strip('.')):
        look(inner, place)

  look(Config, '')
  return found


def _sections_in(annotation: Any, path: str) -> Iterator[tuple[type[Section], str]]:
  """Yields the sections that a key's annotation holds, each with its path."""
  if isinstance(annotation, type) and issubclass(annotation, Section):
    yield annotation, path
  inner = {list: f'{path}.0', dict: f'{path}.NAME'}.get(typing.get_origin(annotation), path)
  for argument in typing.get_args(annotation):
    yield from _sections_in(argument, inner)


def _as_in(error: ErrorDetails) -> str:
  """Says what stands in a section, or in a list, by an example; `error` is one of pydantic's."""
  found = error['input']
  if error['type'] == 'list_type':
    return 'a list' + (f", as in ['{found}']" if isinstance(found, str) else '')
  off = ', or null for off' if found is False else ''
  name = error.get('ctx', {}).get('class_name')
  model = next((s for s in Section.__subclasses__() if s.__name__ == name), None)
  if model is None:
    return f'keys with values{off}'
  value = found if isinstance(found, str) else '…'
  return f'keys with values, as in {{{next(iter(model.model_fields))}: {value}}}{off}'


def _wanted(error: ErrorDetails) -> str:
  """Says what pydantic wanted, in the words of this project."""
  for limit, sign in (('gt', '>'), ('ge', '>='), ('lt', '<'), ('le', '<=')):
    if limit in error.get('ctx', {}):
      return f'wanted a number {sign} {error["ctx"][limit]}'
  kind = error['type'].partition('_')[0]
  if kind in _KINDS:
    return f'wanted {_KINDS[kind]}'
  return (error['msg'][0].lower() + error['msg'][1:]).replace('input should be', 'wanted')


def one_line(error: pydantic.ValidationError, where: str) -> str:
  first = error.errors()[0]
  loc = first['loc']
  key = '.'.join(str(p) for p in loc)
  if first['type'] == 'extra_forbidden':
    sections = _sections_with(str(loc[-1]))
    told = f"; '{loc[-1]}' is a key of {', '.join(sections)}" if sections else ''
    return f"{where}: unknown key '{key}'{told or nearest(loc[-1], _fields_at(loc))}"
  if first['type'] == 'missing':
    return f"{where}: key '{key}' is missing; it is required"
  if first['type'] == 'wrong':  # of a section's own check
    key = '.'.join(map(str, [*loc, first['ctx']['key']]))
    return f"{where}: key '{key}': {first['msg']}"
  wanted = _wanted(first)
  if first['type'] == 'string_type' and isinstance(first['input'], bool):
    wanted = "wanted a text; YAML reads yes, no, on and off so, but not 'yes' in quotes"
  elif first['type'] in ('model_type', 'dict_type', 'list_type'):
    wanted = 'wanted ' + _as_in(first)
  return f"{where}: key '{key}': found {short(first['input'])}; {wanted}"
