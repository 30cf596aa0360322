"""The base class of the sections of the config; types of numbers, and helpers for rules."""

import functools
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NoReturn

import pydantic
import pydantic_core

from trainer.plain_data import Json

Rules = Iterator[tuple[str, str]]  # a key of the section, or /KEY of the whole config, and a text


class Section(pydantic.BaseModel):
  """A part of the config. It refuses unknown keys, and cannot be changed.

  A section may have rules, which rules.py runs once on the whole config, those of the sections
  within it first. Their `cfg` is that Config, which no section can import: it imports them all.
  """

  model_config = pydantic.ConfigDict(
    extra='forbid',
    frozen=True,
    protected_namespaces=(),
    use_attribute_docstrings=True,
    serialize_by_alias=True,  # `from` is no name in Python
  )

  def mistakes(self, cfg: Any) -> Rules:
    """Yields what is wrong with a key. The first is told, so that later ones may rely on it."""
    return iter(())

  def idle(self, cfg: Any) -> Rules:
    """Yields why a key has no effect, which is told if it is given and is not its default."""
    return iter(())


UNSET = object()


def set_value(node: Any, path: Sequence[str]) -> Any:
  """Returns the value of the key at a path, such as ['data', 'slots', '0', 'from'].

  If the key is not set, so that it is absent or has the schema's own default, returns UNSET.
  """
  if not path:
    return node
  if isinstance(node, Section):
    name = _attribute(node, path[0])
    return set_value(getattr(node, name), path[1:]) if name in node.model_fields_set else UNSET
  if isinstance(node, (list, tuple)):
    i = int(path[0])
    return set_value(node[i], path[1:]) if i < len(node) else UNSET
  if not isinstance(node, dict):
    return UNSET
  key, rest = _entry(node, path)
  return set_value(node[key], rest) if key in node else UNSET


def with_value(node: Any, path: Sequence[str], value: object) -> Any:
  """Returns a copy of a section, a list or a mapping in which the key at a path has this value.

  The value is not validated: it is one that our code has found.
  """
  if not path:
    return value
  if isinstance(node, Section):
    name = _attribute(node, path[0])
    return node.model_copy(update={name: with_value(getattr(node, name), path[1:], value)})
  if isinstance(node, dict):
    key, rest = _entry(node, path)
    return node | {key: with_value(node.get(key), rest, value)}
  i = int(path[0])
  return [*node[:i], with_value(node[i], path[1:], value), *node[i + 1 :]]


def _entry(node: dict[Any, Any], path: Sequence[str]) -> tuple[Any, Sequence[str]]:
  """Returns the key of the dict's entry that a path begins with, and the rest of the path.

  A key may have dots, as security.protocol in data.topic.config, and so fill parts of the path.
  """
  text, names = '.'.join(path), {str(key): key for key in node}
  of_entry = [name for name in names if f'{text}.'.startswith(f'{name}.')]
  name = max(of_entry, key=len, default=path[0])
  rest = text[len(name) + 1 :]
  return names.get(name, name), rest.split('.') if rest else []


def _attribute(section: Section, key: str) -> str:
  """Returns the attribute that holds the value of a key: `made` of the key `from`."""
  return _attributes(type(section)).get(key, key)


@functools.cache
def _attributes(section: type[Section]) -> dict[str, str]:
  return {field.alias: name for name, field in section.model_fields.items() if field.alias}


MAX_INT = 2**63 - 1
NOT_OF_RETRIEVAL = 'found true; a model with model.retrieval has none yet; wanted it left out'
Positive = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]
# A learning rate or an initial scale. Larger ones make float32 weights overflow in a few steps.
Scale = Annotated[float, pydantic.Field(ge=0, le=1e6)]
PositiveInt = Annotated[int, pydantic.Field(gt=0, le=MAX_INT, strict=True)]
NonNegativeInt = Annotated[int, pydantic.Field(ge=0, le=MAX_INT, strict=True)]
Port = Annotated[int, pydantic.Field(ge=1, le=65535, strict=True)]
Share = Annotated[float, pydantic.Field(ge=0, le=1)]
PositiveShare = Annotated[float, pydantic.Field(gt=0, le=1)]
DropoutRate = Annotated[float, pydantic.Field(ge=0, lt=1)]


def wrong(key: str, text: str) -> NoReturn:
  """Raises an error for a wrong value at a `key` below the type whose validator calls this."""
  parts = [key] if key else []
  raise pydantic_core.PydanticCustomError('wrong', '{text}', {'key': parts, 'text': text})


def _text_of(value: Json) -> Json:
  """Returns the text of a whole number, such as the label 0, which YAML reads as a number."""
  return str(value) if type(value) is int else value


def _compiles(text: str) -> str:
  try:
    re.compile(text)
  except re.error as e:
    wrong('', f'found {text!r}; wanted a regular expression ({e})')
  return text


RegularExpression = Annotated[
  str, pydantic.BeforeValidator(_text_of), pydantic.AfterValidator(_compiles)
]


def distinct(key: str, names: Sequence[str]) -> Rules:
  """Yields a mistake at `key` for each name that is in `names` twice."""
  for name in sorted({name for name in names if names.count(name) > 1}):
    yield key, f"the name '{name}' is there twice; wanted distinct names"
