"""The feature lifecycle's rules and thresholds; imports no TensorFlow."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Literal

import pydantic

_Finite = Annotated[float, pydantic.Field(allow_inf_nan=False)]
_NonNegative = Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]
_Share = Annotated[float, pydantic.Field(ge=0, le=1)]
_Days = Annotated[int, pydantic.Field(ge=0)]
_Slot = Annotated[int, pydantic.Field(ge=0, le=2047)]
# Thresholds that a slot may set for itself (`Policy.per_slot`).
PER_SLOT = (
  'nonclk_coeff',
  'clk_coeff',
  'admission_threshold',
  'admission_count',
  'admission_probability',
  'base_threshold',
  'delta_threshold',
  'delta_keep_days',
  'decay',
  'delete_threshold',
  'delete_after_unseen_days',
  'min_age_days',
)
_Thresholds = dict[Literal[PER_SLOT], int | float | None]


@pydantic.dataclasses.dataclass(frozen=True, config={'strict': True})
class Policy:
  """The rules, PaddlePaddle's, by which a feature is admitted, decays, is evicted and is exported.

  Most depend on its score, (show - click) * nonclk_coeff + click * clk_coeff.
  """

  admission: Literal['score', 'count', 'probability', 'none'] = 'score'
  """How a feature earns its factors. score: its score reaches admission_threshold; count: it was
  shown admission_count times; probability: a draw at each occurrence; none: it has them at once."""
  eviction: Literal['score', 'unseen', 'none'] = 'score'
  """What deletes a feature at the end of a day. score: a low score or unseen days; unseen: unseen
  days only; none: nothing."""
  nonclk_coeff: _NonNegative = 0.1
  """What a show without a click adds to the score."""
  clk_coeff: _NonNegative = 1.0
  """What a click adds to the score."""
  admission_threshold: _Finite = 10.0
  """admission score: the score that earns factors."""
  admission_count: _NonNegative = 10.0
  """admission count: the shows that earn factors."""
  admission_probability: _Share = 0.1
  """admission probability: the chance of an occurrence, drawn from a hash of (seed, key, count)."""
  seed: Annotated[int, pydantic.Field(ge=0)] = 0
  """The seed of admission by probability."""
  base_threshold: _Finite | None = 1.5
  """Exports leave out features with a lower score; null: none is left out for its score."""
  delta_threshold: _Finite | None = 0.25
  """A delta holds the features whose score has grown by this much since they were last written;
  null: all that were seen since."""
  delta_keep_days: _Days | None = 16
  """Exports leave out features that were unseen for more days than this; null: no bound."""
  decay: _Share = 0.98
  """What show and click are multiplied by at the end of each day."""
  delete_threshold: _Finite = 0.8
  """eviction score: a feature with a lower score is deleted."""
  delete_after_unseen_days: _Days | None = 30
  """A feature that was unseen for more days than this is deleted; null: no bound."""
  min_age_days: _Days | None = None
  """A younger feature is not deleted for its score; null: age does not matter."""
  capacity: Annotated[int, pydantic.Field(gt=0)] | None = None
  """How many features stay at the end of a day, the best by capacity_by; null: all."""
  capacity_by: Literal['score', 'recency', 'frequency'] = 'score'
  """Which features are the best for capacity: score, recency or frequency."""
  empty_push_is_seen: bool = True
  """Whether a push without shows and clicks sets unseen_days to 0, as in PaddlePaddle; False if
  items are drawn as negatives, because a draw must not keep an item alive."""
  per_slot: dict[_Slot, _Thresholds] = dataclasses.field(default_factory=dict)
  """Slot id -> the fields of PER_SLOT in which it differs."""

  def __post_init__(self):
    for fields in self.per_slot.values():
      dataclasses.replace(self, per_slot={}, **fields)

  @property
  def filters_exports(self) -> bool:
    """Whether exports may leave out features of any slot."""
    return any(p.base_threshold is not None or p.delta_keep_days is not None for p in self._every)

  @property
  def delta_takes_gains(self) -> bool:
    """Whether a delta holds only features whose score has grown since they were last written."""
    return all(p.delta_threshold is None or p.delta_threshold > 0 for p in self._every)

  @property
  def _every(self) -> list['Policy']:
    return [self, *(self.for_slot(slot) for slot in self.per_slot)]

  def for_slot(self, slot: int) -> 'Policy':
    """Returns the policy with the thresholds of one slot, and with `per_slot` empty."""
    return dataclasses.replace(self, per_slot={}, **self.per_slot.get(slot, {}))

  def serialize(self) -> str:
    """Returns this policy as a text for the C++ table; equal policies give the same text.

    A line of pairs `name=value`, then `slot name=value ...` for each slot with its own thresholds.
    """

    def text(value: str | float | None) -> str:
      return 'null' if value is None else value if isinstance(value, str) else repr(value)

    def pairs(fields: Mapping[str, str | float | None]) -> str:
      return ' '.join(f'{name}={text(value)}' for name, value in sorted(fields.items()))

    own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != 'per_slot'}
    slots = sorted(self.per_slot.items())
    return '\n'.join([pairs(own), *(f'{slot} {pairs(fields)}' for slot, fields in slots if fields)])
