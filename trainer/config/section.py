"""The base class of sections, types of numbers, and helpers for checks."""

import re
from collections.abc import Sequence
from typing import Annotated, NoReturn

import pydantic
import pydantic_core

from trainer.plain_data import Json


class Section(pydantic.BaseModel):
  """A part of the config. It refuses unknown keys, and cannot be changed."""

  model_config = pydantic.ConfigDict(
    extra='forbid',
    frozen=True,
    protected_namespaces=(),
    use_attribute_docstrings=True,
    serialize_by_alias=True,  # `from` is no name in Python
  )


MAX_INT = 2**63 - 1
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
  """Raises an error for a wrong value. Only pydantic validators may call it.

  Args:
    key: the wrong key, relative to the validator's section; '' in the validator of a key.
    text: what was found and what is wanted, in one line.
  """
  parts = key.split('.') if key else []
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


def check_distinct(key: str, names: Sequence[str]) -> None:
  """Refuses a list that contains a name twice.

  Args:
    key: the key of the list, relative to the validator's section.
  """
  twice = {name for name in names if names.count(name) > 1}
  if twice:
    wrong(key, f"the name '{min(twice)}' is there twice; wanted distinct names")
