"""Writes configs and their schema as text: keys with types, defaults, meanings and origins."""

import dataclasses
import inspect
import textwrap
import types
import typing
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pydantic
import pydantic_core
import yaml

from trainer.config.schema import Config
from trainer.config.section import MAX_INT, Section
from trainer.config.yaml_text import flatten
from trainer.plain_data import Json, JsonObject

_WIDTH = 100
_NAMES = {bool: 'true or false', int: 'whole number', float: 'number', str: 'text', Any: 'any'}
_BOUNDS = (('gt', '> {}'), ('ge', '>= {}'), ('lt', '< {}'), ('le', '<= {}'))


@dataclasses.dataclass(frozen=True)
class Key:
  """One key of a section.

  Attributes:
    name, attribute: the key in YAML, and the attribute of the section that holds its value.
    wanted: the allowed values, in words.
    default: as YAML in one line; None if the key is required.
    meaning: the key's description in one line.
    section: the class of the section or sections that the value holds, if any.
    container: list or dict if the value holds several sections, else None.
  """

  name: str
  attribute: str
  wanted: str
  default: str | None
  meaning: str
  section: type[pydantic.BaseModel] | None = None
  container: type | None = None


def one_line_yaml(value: Json) -> str:
  style = {'default_flow_style': True, 'sort_keys': False, 'allow_unicode': True, 'width': 10**6}
  text = yaml.safe_dump(pydantic_core.to_jsonable_python(value), **style)
  return text.removesuffix('\n').removesuffix('\n...')


def wanted(annotation: Any, bounds: tuple[Any, ...] = ()) -> str:
  """Describes in words the values that a pydantic field's type and bounds allow."""
  origin, args = typing.get_origin(annotation), typing.get_args(annotation)
  if origin is typing.Annotated:
    return wanted(args[0], args[1:])
  if origin in (typing.Union, types.UnionType):
    return ' or '.join('null' if a is type(None) else wanted(a) for a in args)
  if origin is typing.Literal:
    return ', '.join(map(str, args))
  if origin is list:
    return 'list' if wanted(args[0]) == 'section' else f'list of {wanted(args[0])}'
  if origin is tuple:
    return f'[{", ".join(wanted(a) for a in args)}]'
  if origin is dict:
    return 'mapping'
  if inspect.isclass(annotation) and issubclass(annotation, pydantic.BaseModel):
    return 'section'
  flat = [m for b in bounds for m in getattr(b, 'metadata', [b])]
  said = [
    form.format(f'{getattr(m, name):g}')
    for name, form in _BOUNDS
    for m in flat
    if getattr(m, name, None) not in (None, MAX_INT)
  ]
  return ' '.join([_NAMES.get(annotation, str(annotation)), ' and '.join(said)]).strip()


def _section_of(annotation: Any) -> tuple[type[pydantic.BaseModel] | None, type | None]:
  """Returns the section in the type of a key, and list or dict if the type holds several."""
  origin, args = typing.get_origin(annotation), typing.get_args(annotation)
  if inspect.isclass(annotation) and issubclass(annotation, pydantic.BaseModel):
    return annotation, None
  if origin is typing.Annotated:
    return _section_of(args[0])
  if origin in (list, dict):
    return _section_of(args[-1])[0], origin
  if origin in (typing.Union, types.UnionType):
    return next((of for of in map(_section_of, args) if of[0]), (None, None))
  return None, None


def keys(section: type[pydantic.BaseModel]) -> Iterator[Key]:
  for name, field in section.model_fields.items():
    default = field.get_default(call_default_factory=True)
    required = default is pydantic_core.PydanticUndefined
    inner, container = _section_of(field.annotation)
    yield Key(
      field.alias or name,
      name,
      wanted(field.annotation, tuple(field.metadata)),
      None if required else one_line_yaml(default),
      ' '.join((field.description or '').split()),
      inner,
      container if inner else None,
    )


def explained(cfg: Config, notes: Mapping[str, str]) -> str:
  """Returns a config as YAML with comments: each key's meaning, and where its value comes from.

  `notes` is {key: a remark on where its value comes from}.
  """

  def origin(key: str) -> str:
    return '; '.join([cfg.origin(key), *([notes[key]] if key in notes else [])])

  return '\n'.join(_explained(cfg, '', origin, set())).strip() + '\n'


def _explained(
  section: Section, path: str, origin: Callable[[str], str], told: set[type[Section]]
) -> Iterator[str]:
  """Yields the lines of `explained` for one section, whose key, with a dot at its end, is `path`.

  The keys of the classes in `told` need no comment; this call adds its own class.
  """
  is_new = type(section) not in told
  told.add(type(section))
  for key in keys(type(section)):
    value = getattr(section, key.attribute)
    if is_new:
      yield ''
      meaning = key.meaning if key.wanted == 'section' else f'{key.meaning} [{key.wanted}]'
      yield from (f'# {line}' for line in textwrap.wrap(meaning, _WIDTH))
    if not key.section or not value:
      yield f'{key.name}: {one_line_yaml(value)}  # {origin(path + key.name)}'
      continue
    yield f'{key.name}:'
    inner = enumerate(value) if key.container is list else [('', value)]
    for name, inner_section in value.items() if key.container is dict else inner:
      head = {None: '', list: '-', dict: f'{name}:'}[key.container]
      if head:
        yield f'  {head}'
      place = f'{path}{key.name}.{name}.' if head else f'{path}{key.name}.'
      for line in _explained(inner_section, place, origin, told):
        yield ('    ' + line if head else '  ' + line).rstrip()


def _values(cfg: Config) -> JsonObject:
  """Returns {key: value} of a config, such as 'data.slots.0.name', without nested keys.

  A measured list is one value; a checksum stands for a look-up table's content.
  """
  values: JsonObject = {}
  for key, value in flatten(cfg.model_dump()).items():
    whole = key.rpartition('.')[0]
    if cfg.origin(whole) == 'measured':
      values.setdefault(whole, []).append(value)
    elif key.endswith('.from.content') and value is not None:
      values[key] = f'{zlib.crc32(value.encode()):08x}'
    else:
      values[key] = value
  return values


def changed(cfg: Config) -> Iterator[str]:
  """Yields a line for each key whose value is not the documented default, with its origin."""
  for key, value in _values(cfg).items():
    if (origin := cfg.origin(key)) != 'default':
      yield f'{key}: {one_line_yaml(value)}  # {origin}'


def differences(a: Config, b: Config) -> Iterator[str]:
  """Yields 'KEY: VALUE (ORIGIN) → VALUE (ORIGIN)' where a and b differ; '-' for a missing key."""
  of_a, of_b = (_values(cfg) for cfg in (a, b))
  for key in dict.fromkeys((*of_a, *of_b)):
    if of_a.get(key, ...) != of_b.get(key, ...):
      sides = (
        f'{one_line_yaml(of[key])} ({cfg.origin(key)})' if key in of else '-'
        for cfg, of in ((a, of_a), (b, of_b))
      )
      yield f'{key}: {" → ".join(sides)}'
