"""Makes the config of a job of what was given, what was measured, and defaults.

What was given is validated once, as a Config with the schema's own defaults. Measured values, and
the defaults that follow from other keys, are set on copies of it; they are valid as our code finds
them.
"""

from collections.abc import Mapping
from typing import TypeVar

from trainer.config.defaults import completed
from trainer.config.section import Section, with_value
from trainer.config.train import BATCH_SIZE
from trainer.plain_data import Json

Config = TypeVar('Config', bound=Section)  # that of schema.py, which imports this file


def resolve(cfg: Config, measured: Mapping[str, Json] = {}) -> Config:
  """Returns a config with measured values, {key: value}, and all defaults that follow from them.

  What `cfg` had measured before stays. A key that was given may not be among `measured`.
  """
  given, measured = cfg._given or cfg, cfg._measured | measured
  of_columns = {key: value for key, value in measured.items() if '.from.' in key}
  found = given.model_copy(update={'run_dir': cfg.run_dir})
  for key in measured.keys() - of_columns.keys():
    found = with_value(found, key.split('.'), measured[key])
  found, origins = completed(found)
  for key, value in of_columns.items():  # also of the slots that data.dense_bins has added
    found = with_value(found, key.split('.'), value)
  for key, value in measured.items():
    origins[key] = 'default' if is_default(key, value) else 'measured'
  if 'run_dir' in cfg._origins:
    origins['run_dir'] = cfg._origins['run_dir']
  found._given, found._measured, found._origins = given, measured, origins
  return found


def with_given(cfg: Config, values: Mapping[str, Json]) -> Config:
  """Returns a config as if other values, {key: value}, had been given; they are not validated."""
  found = cfg._given
  for key, value in values.items():
    found = with_value(found, key.split('.'), value)
  cfg = cfg.model_copy()
  cfg._given = found
  return resolve(cfg)


def is_default(key: str, value: Json) -> bool:
  """Returns whether a value that a run has measured or recorded for a key is its default."""
  return value is None or (key, value) in (
    ('train.batch_size', BATCH_SIZE),
    ('sparse.shared_lists', 'mean'),
  )
