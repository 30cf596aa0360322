"""The feature lifecycle's rules and thresholds.

Imports no TensorFlow: the config checks itself with it.
"""

import dataclasses
import math
from typing import Any

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

  # score: score >= admission_threshold; count: show >= admission_count; probability; none: at once
  admission: str = 'score'
  eviction: str = 'score'  # score: by score and unseen days; unseen: by unseen days only; none
  nonclk_coeff: float = 0.1
  clk_coeff: float = 1.0
  admission_threshold: float = 10.0
  admission_count: float = 10.0  # shows
  admission_probability: float = 0.1  # per occurrence; decided by (seed, key, count)
  seed: int = 0  # of admission by probability
  base_threshold: float = 1.5
  delta_threshold: float = 0.25
  delta_keep_days: int = 16
  decay: float = 0.98  # of show and click, at each day end
  delete_threshold: float = 0.8  # delete below this score
  delete_after_unseen_days: int | None = (
    30  # delete when unseen for more days than this; null: never for that
  )
  min_age_days: int | None = (
    None  # the score test spares features younger than this; null: none is spared
  )
  capacity: int | None = None  # keep the best this many features at each eviction; null: no bound
  capacity_by: str = 'score'  # score | recency | frequency
  per_slot: dict[int, dict[str, Any]] = dataclasses.field(
    default_factory=dict
  )  # slot -> fields of PER_SLOT that differ

  def __post_init__(self):
    def fail(name, wanted):
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
      if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        fail(name, 'a finite number')
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
      optional = name in ('delete_after_unseen_days', 'min_age_days', 'capacity')
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

  def for_slot(self, slot):
    """The policy as it holds for one slot, without `per_slot`."""
    return dataclasses.replace(self, per_slot={}, **self.per_slot.get(slot, {}))

  def serialize(self):
    """The text that ops/cc/lifecycle/policy.h reads; the same for equal policies, and exact.

    A line of `name=value` pairs, then, for each slot that differs, a line `slot name=value ...`.
    """

    def text(value):
      return 'null' if value is None else value if isinstance(value, str) else repr(value)

    def pairs(fields):
      return ' '.join(f'{name}={text(value)}' for name, value in sorted(fields.items()))

    own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != 'per_slot'}
    return '\n'.join(
      [
        pairs(own),
        *(f'{slot} {pairs(fields)}' for slot, fields in sorted(self.per_slot.items()) if fields),
      ]
    )
