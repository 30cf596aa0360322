"""Tells a schema of pydantic sections: its keys with types, defaults and meanings, as text."""

import ast
import dataclasses
import inspect
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import pydantic
import pydantic_core
import yaml

_WIDTH = 100
_NAMES = {
  bool: 'true or false',
  int: 'whole number',
  float: 'number',
  str: 'text',
  Any: 'any value',
}
_BOUNDS = (('gt', '> {}'), ('ge', '>= {}'), ('lt', '< {}'), ('le', '<= {}'))


@dataclasses.dataclass(frozen=True)
class Key:
  """One key of a section.

  Attributes:
    name: of the key.
    wanted: which values it takes.
    default: as YAML in one line; None where the key is required.
    meaning: its description in one line.
    section: the pydantic model of its value, or of each value in a list or mapping of sections.
    container: list or dict where there are several such values, else None.
  """

  name: str
  wanted: str
  default: str | None
  meaning: str
  section: type[pydantic.BaseModel] | None = None
  container: type | None = None


def one_line_yaml(value: Any) -> str:
  """Returns a value as YAML in one line."""
  text = yaml.safe_dump(
    pydantic_core.to_jsonable_python(value),
    default_flow_style=True,
    sort_keys=False,
    allow_unicode=True,
    width=10**6,
  )
  return text.removesuffix('\n').removesuffix('\n...')


def wanted(annotation: Any, bounds: tuple[Any, ...] = ()) -> str:
  """Returns in words which values a type takes.

  Args:
    annotation: of a pydantic field.
    bounds: what pydantic keeps of it beside, such as annotated_types.Gt.
  """
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
    if getattr(m, name, None) is not None
  ]
  return ' '.join([_NAMES.get(annotation, str(annotation)), ' and '.join(said)]).strip()


def _section_of(annotation: Any) -> tuple[type[pydantic.BaseModel] | None, type | None]:
  """The section of a type, directly or as what a list or mapping holds, and that container."""
  origin, args = typing.get_origin(annotation), typing.get_args(annotation)
  if inspect.isclass(annotation) and issubclass(annotation, pydantic.BaseModel):
    return annotation, None
  if origin in (list, dict):
    return _section_of(args[-1])[0], origin
  if origin in (typing.Union, types.UnionType):
    found = [_section_of(a) for a in args]
    return next((f for f in found if f[0]), (None, None))
  return None, None


def keys(section: type[pydantic.BaseModel]) -> Iterator[Key]:
  """Yields the keys of a section in their order."""
  for name, field in section.model_fields.items():
    default = field.get_default(call_default_factory=True)
    required = default is pydantic_core.PydanticUndefined
    inner, container = _section_of(field.annotation)
    yield Key(
      name,
      wanted(field.annotation, tuple(field.metadata)),
      None if required else one_line_yaml(default),
      ' '.join((field.description or '').split()),
      inner,
      container if inner else None,
    )


def dataclass_keys(cls: type, given: Mapping[str, Any]) -> Iterator[Key]:
  """Yields the fields of a dataclass that have defaults; the string under each is its meaning.

  Args:
    cls: the dataclass.
    given: defaults that differ from those of the class.
  """
  (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
  meanings = {
    field.target.id: ' '.join(text.value.value.split())
    for field, text in zip(tree.body, tree.body[1:])
    if isinstance(field, ast.AnnAssign)
    and isinstance(text, ast.Expr)
    and isinstance(text.value, ast.Constant)
  }
  for field in dataclasses.fields(cls):
    if field.default is not dataclasses.MISSING:
      kind = wanted(field.type)
      default = one_line_yaml(given.get(field.name, field.default))
      yield Key(field.name, kind, default, meanings.get(field.name, ''))


def commented_yaml(section: type[pydantic.BaseModel], inside: dict[str, type]) -> str:
  """Returns a section as YAML: every key with its default, its meaning in a comment above it.

  Args:
    section: the outermost.
    inside: for keys that take a mapping, the dataclass that says which keys it has.
  """
  return '\n'.join(_yaml_lines(keys(section), inside)).strip() + '\n'


def _yaml_lines(found: Iterator[Key], inside: dict[str, type]) -> Iterator[str]:
  for key in found:
    yield ''
    told = key.meaning if key.wanted == 'section' else f'{key.meaning} [{key.wanted}]'
    yield from (f'# {line}' for line in textwrap.wrap(told, _WIDTH))
    if key.name in inside:
      below = _yaml_lines(dataclass_keys(inside[key.name], yaml.safe_load(key.default)), {})
    elif key.section:
      below = _yaml_lines(keys(key.section), inside)
    else:
      below = iter(())
    # What is a list, or null, stands there as a comment: the text reads back as the defaults.
    is_comment = key.section and (key.container is list or key.default == 'null')
    value = 'null  # required' if key.default is None else key.default
    if key.section and not is_comment or key.name in inside:
      value = ''
    yield f'{key.name}: {value}'.rstrip()
    if key.container is dict:
      yield '  default:'
    depth = '    ' if key.container is dict else '  '
    for line in below:
      yield (depth + ('# ' if is_comment else '') + line).rstrip() if line else line
