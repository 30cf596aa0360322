"""What every section of the schema is made of: the base class, and the kinds of numbers."""

from typing import Annotated, NoReturn

import pydantic
import pydantic_core


class Section(pydantic.BaseModel):
  """A part of the config: unknown keys are errors, and nothing changes once it was read."""

  model_config = pydantic.ConfigDict(
    extra='forbid', frozen=True, protected_namespaces=(), use_attribute_docstrings=True
  )


MAX_INT = 2**63 - 1
Positive = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]
# Of learning rates and initial scales: what lies above makes every float32 overflow in a few steps.
Scale = Annotated[float, pydantic.Field(ge=0, le=1e6)]
PositiveInt = Annotated[int, pydantic.Field(gt=0, le=MAX_INT, strict=True)]
NonNegativeInt = Annotated[int, pydantic.Field(ge=0, le=MAX_INT, strict=True)]
Port = Annotated[int, pydantic.Field(ge=1, le=65535, strict=True)]
Share = Annotated[float, pydantic.Field(ge=0, le=1)]
PositiveShare = Annotated[float, pydantic.Field(gt=0, le=1)]


def wrong(key: str, text: str) -> NoReturn:
  """Refuses a value, in a validator of the section that has the key.

  Args:
    key: relative to the section.
    text: what was found and what is wanted, in one line.
  """
  raise pydantic_core.PydanticCustomError('wrong', '{text}', {'key': key, 'text': text})
