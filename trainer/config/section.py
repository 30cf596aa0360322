"""The base class of sections with its rules, types of numbers, and helpers for rules."""

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, NoReturn

import pydantic
import pydantic_core

from trainer.plain_data import Json

if TYPE_CHECKING:
  from trainer.config.schema import Config

Rules = Iterator[tuple[str, str]]  # a key of the section, or /KEY of the whole config, and a text


class Section(pydantic.BaseModel):
  """A part of the config. It refuses unknown keys, and cannot be changed.

  A section may have rules, which rules.py runs once on the whole config, those of the sections
  within it first.
  """

  model_config = pydantic.ConfigDict(
    extra='forbid',
    frozen=True,
    protected_namespaces=(),
    use_attribute_docstrings=True,
    serialize_by_alias=True,  # `from` is no name in Python
  )

  def mistakes(self, cfg: 'Config') -> Rules:
    """Yields what is wrong with a key. The first is told, so that later ones may rely on it."""
    return iter(())

  def idle(self, cfg: 'Config') -> Rules:
    """Yields why a key has no effect, which is told if it is given and is not its default."""
    return iter(())


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
