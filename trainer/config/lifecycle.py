"""The section `lifecycle`: when features get factors, how counts decay, what is deleted."""

from typing import Annotated, Any, Literal

import pydantic

from trainer.config.section import NonNegative, NonNegativeInt, PositiveInt, Rules, Section, Share

Finite = Annotated[float, pydantic.Field(allow_inf_nan=False)]

# For each threshold, the mode that reads it.
LIFECYCLE_MODES = {
  'admission': {
    'admission_threshold': 'score',
    'admission_count': 'count',
    'admission_probability': 'probability',
  },
  'eviction': {
    'delete_threshold': 'score',
    'min_age_days': 'score',
    'delete_after_unseen_days': 'unseen',
  },
}


class Thresholds(Section):
  """Thresholds of one slot. A threshold that is left out is taken from `lifecycle`."""

  nonclk_coeff: NonNegative = 0.1
  """What an impression without a click adds to the score."""
  clk_coeff: NonNegative = 1.0
  """What a click adds to the score."""
  admission_threshold: Finite | None = None
  """admission score: the score that earns factors. The default is 10 with this admission."""
  admission_count: NonNegative | None = None
  """admission count: the impressions that earn factors. The default is 10 with this admission."""
  admission_probability: Share | None = None
  """admission probability: the chance that an occurrence earns factors, drawn from a hash of (seed,
  key, count). The default is 0.1 with this admission."""
  base_threshold: Finite | None = None
  """Exports leave out features with a lower score; null: none is left out for its score. The
  default is 1.5 where admission or eviction is score."""
  delta_threshold: Finite | None = None
  """A delta holds the features whose score has grown by this much since they were last written;
  null: all that were seen since. The default is 0.25 where admission or eviction is score."""
  delta_keep_days: NonNegativeInt | None = None
  """Exports leave out features that were unseen for more days than this; null: no bound. The
  default is 16 where admission or eviction is score."""
  decay: Share = 0.98
  """What impressions (show) and clicks are multiplied by at the end of each day."""
  delete_threshold: Finite | None = None
  """eviction score: a feature with a lower score is deleted. The default is 0.8 with this
  eviction."""
  delete_after_unseen_days: NonNegativeInt | None = None
  """A feature that was unseen for more days than this is deleted; null: no bound. The default is
  30 where eviction is score or unseen."""
  min_age_days: NonNegativeInt | None = None
  """A feature younger than this is not deleted for its score; null: a feature of any age may be."""

  def idle(self, cfg: Any) -> Rules:
    for kind, modes in LIFECYCLE_MODES.items():
      mode = getattr(cfg.lifecycle, kind)
      for key, reader in modes.items():
        if mode != reader and (key, mode) != ('delete_after_unseen_days', 'score'):
          yield key, f"with lifecycle.{kind} '{mode}'"
    if not cfg.data.has_days:
      yield 'decay', f'without {cfg.data.days_key}: it happens at the end of each day'


class Lifecycle(Thresholds):
  """When a feature gets its factors, is deleted and is exported, by the rules of PaddlePaddle's CTR
  accessor. A feature's score is (show - click) · nonclk_coeff + click · clk_coeff, where show and
  click are the numbers of its impressions and clicks. Both decay at the end of each day."""

  admission: Literal['score', 'count', 'probability', 'none'] = 'none'
  """What earns a feature its factors. score: its score reaches admission_threshold; count: it was
  shown admission_count times; probability: a draw at each occurrence; none: nothing is asked. The
  default is the mode whose threshold, here or of a slot, is not null."""
  eviction: Literal['score', 'unseen', 'none'] = 'none'
  """What deletes a feature at the end of a day. score: a low score or unseen days; unseen: unseen
  days only; none: nothing. The default is score where delete_threshold or min_age_days, here or of
  a slot, is not null, and unseen where delete_after_unseen_days is."""
  capacity: PositiveInt | None = None
  """How many features are kept at the end of a day, the best by capacity_by; null: no bound."""
  capacity_by: Literal['score', 'recency', 'frequency'] = 'score'
  """What capacity ranks features by: their score, or how recently or how often they were seen."""

  def idle(self, cfg: Any) -> Rules:
    yield from super().idle(cfg)
    if self.capacity is None:
      yield 'capacity_by', 'without lifecycle.capacity'
