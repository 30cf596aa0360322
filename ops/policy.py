"""The feature lifecycle's rules and thresholds.

Imports no TensorFlow: the config checks itself with it.
"""

import dataclasses
import math
from typing import Any, NoReturn

SCORE_KEYS = ('score', 'recency', 'frequency')
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


@dataclasses.dataclass(frozen=True)
class Policy:
  """When a feature earns its factors, fades, is deleted and is exported; the rules of
  PaddlePaddle's CTR accessor.

  score(show, click) = (show - click) * nonclk_coeff + click * clk_coeff

  Raises: ValueError naming the field, the value found and the value wanted.
  """

  admission: str = 'score'
  """What earns a feature its factors. score: its score reaches admission_threshold; count: it was
  shown admission_count times; probability: a draw at each occurrence; none: nothing is asked."""
  eviction: str = 'score'
  """What deletes a feature at the end of a day. score: a low score or unseen days; unseen: unseen
  days only; none: nothing."""
  nonclk_coeff: float = 0.1
  """What a show without a click adds to the score."""
  clk_coeff: float = 1.0
  """What a click adds to the score."""
  admission_threshold: float = 10.0
  """admission score: the score that earns factors."""
  admission_count: float = 10.0
  """admission count: the shows that earn factors."""
  admission_probability: float = 0.1
  """admission probability: of each occurrence; decided by (seed, key, count)."""
  seed: int = 0
  """Of admission by probability."""
  base_threshold: float | None = 1.5
  """Exports leave out features with a lower score; null: they leave none out for its score."""
  delta_threshold: float | None = 0.25
  """A delta holds the features whose score has grown by this much since they were last written;
  null: all that were seen since."""
  delta_keep_days: int | None = 16
  """Exports leave out features that were unseen for more days than this; null: none for that."""
  decay: float = 0.98
  """What show and click are multiplied by at the end of each day."""
  delete_threshold: float = 0.8
  """eviction score: a feature with a lower score is deleted."""
  delete_after_unseen_days: int | None = 30
  """A feature that was unseen for more days than this is deleted; null: never for that."""
  min_age_days: int | None = None
  """Features of fewer days are not deleted for their score; null: none is spared."""
  capacity: int | None = None
  """How many features are kept at the end of a day, the best by capacity_by; null: no bound."""
  capacity_by: str = 'score'
  """Which features are the best for capacity: score, recency or frequency."""
  per_slot: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)
  """By slot, fields of PER_SLOT that differ."""

  def __post_init__(self):
    def fail(name: str, wanted: str) -> NoReturn:
      raise ValueError(f'{name}: found {getattr(self, name)!r}; wanted {wanted}')

    for name, valid in (
      ('admission', ('score', 'count', 'probability', 'none')),
      ('eviction', ('score', 'unseen', 'none')),
      ('capacity_by', SCORE_KEYS),
    ):
      if getattr(self, name) not in valid:
        fail(name, 'one of ' + ', '.join(valid))
    for name in (
      'nonclk_coeff',
      'clk_coeff',
      'admission_threshold',
      'admission_count',
      'admission_probability',
      'base_threshold',
      'delta_threshold',
      'decay',
      'delete_threshold',
    ):
      value = getattr(self, name)
      optional = name in ('base_threshold', 'delta_threshold')
      if value is None and optional:
        continue
      if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        fail(name, 'a finite number' + (' or null' if optional else ''))
    for name in ('nonclk_coeff', 'clk_coeff', 'admission_count'):
      if getattr(self, name) < 0:
        fail(name, 'a number >= 0')
    if not 0 <= self.decay <= 1:
      fail('decay', 'a number in [0, 1]')
    if not 0 <= self.admission_probability <= 1:
      fail('admission_probability', 'a number in [0, 1]')
    for name, least in (
      ('seed', 0),
      ('delta_keep_days', 0),
      ('delete_after_unseen_days', 0),
      ('min_age_days', 0),
      ('capacity', 1),
    ):
      value = getattr(self, name)
      optional = name not in ('seed',)
      if value is None and optional:
        continue
      if isinstance(value, bool) or not isinstance(value, int) or value < least:
        fail(name, f'a whole number >= {least}' + (' or null' if optional else ''))
    for slot, fields in self.per_slot.items():
      if isinstance(slot, bool) or not isinstance(slot, int) or not 0 <= slot <= 2047:
        raise ValueError(f'per_slot: found slot {slot!r}; wanted a whole number in [0, 2047]')
      for name in fields:
        if name not in PER_SLOT:
          raise ValueError(
            f'per_slot[{slot}]: unknown field {name!r}; wanted one of ' + ', '.join(PER_SLOT)
          )
      dataclasses.replace(self, per_slot={}, **fields)

  @property
  def filters_exports(self) -> bool:
    """Whether an export may leave features out."""
    every = [self, *(self.for_slot(slot) for slot in self.per_slot)]
    return any(p.base_threshold is not None or p.delta_keep_days is not None for p in every)

  def for_slot(self, slot: int) -> 'Policy':
    """The policy as it holds for one slot, without `per_slot`."""
    return dataclasses.replace(self, per_slot={}, **self.per_slot.get(slot, {}))

  def serialize(self) -> str:
    """The text that ops/cc/lifecycle/policy.h reads; the same for equal policies, and exact.

    A line of `name=value` pairs, then, for each slot that differs, a line `slot name=value ...`.
    """

    def text(value: Any) -> str:
      return 'null' if value is None else value if isinstance(value, str) else repr(value)

    def pairs(fields: dict[str, Any]) -> str:
      return ' '.join(f'{name}={text(value)}' for name, value in sorted(fields.items()))

    own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != 'per_slot'}
    return '\n'.join(
      [
        pairs(own),
        *(f'{slot} {pairs(fields)}' for slot, fields in sorted(self.per_slot.items()) if fields),
      ]
    )
