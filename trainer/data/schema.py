"""What a config says of the log: the columns to read, and the schema that a prepared pass is bound
to.
"""

import difflib
from collections.abc import Sequence
from typing import Any

from trainer import config
from trainer.data.features import HASH_NAME, has_log1p
from trainer.errors import UserError


def schema(cfg: config.Config) -> dict[str, Any]:
  """What must be equal between the config that prepared a pass and the one that reads it, as JSON
  has it.
  """
  data, ids = cfg.data, cfg.slot_ids()
  return {
    'format': 2,
    'hash': HASH_NAME,
    # canonical order, slot id, and of a sequence its length
    'slots': [
      [s.name, ids[s.name], *([s.sequence.max_length] if s.sequence else [])] for s in cfg.slots
    ],
    'dense': [[c.name, has_log1p(c)] for c in data.dense],  # log1p: the statistics depend on it
    'label': [[x.name, x.loss == 'squared_error'] for x in data.labels]
    or [data.label, cfg.model.loss == 'squared_error'],
    'weight': data.weight,
    'group': data.group,
  }


def reading(cfg: config.Config) -> dict[str, Any]:
  """Returns the settings that a raw file is parsed with, as JSON has them.

  A prepared pass is used again only where these, its `schema` and the file itself are the same.
  """
  data = cfg.data
  return {
    'data_format': data.format,
    'delimiter': data.delimiter,
    'columns': data.columns,
    'label_positive': data.label_positive,
    'label_negative': data.label_negative,
    'missing_values': data.missing_values,
    'max_bad_share': data.max_bad_share,
    'slots': [[s.column, s.separator, s.value_separator] for s in cfg.slots],
  } | ({'labels': [[x.column, x.positive, x.negative] for x in data.labels]} if data.labels else {})


def wanted_columns(cfg: config.Config, labelled: bool = True) -> dict[str, str]:
  """column -> the config key that asks for it, each column once.

  Args:
    cfg: the config.
    labelled: whether labels, weight and group are wanted; what only predicts needs none of them.
  """
  data = cfg.data
  wanted = {}
  if labelled:
    wanted = {x.column or x.name: 'data.labels' for x in data.labels}
    wanted = wanted or {data.label: 'data.label'}
    for column, key in ((data.weight, 'data.weight'), (data.group, 'data.group')):
      if column is not None:
        wanted.setdefault(column, key)
  for c in data.dense:
    wanted.setdefault(c.name, 'data.dense')
  for s in data.slots:
    wanted.setdefault(s.column or s.name, f"slot '{s.name}'")
  return wanted


def nearest_column(column: str, names: Sequence[str]) -> str:
  """The name that was most likely meant: equal but for case, or else the most alike."""
  for name in names:
    if name.strip().casefold() == column.strip().casefold():
      return name
  close = difflib.get_close_matches(column, names, n=1, cutoff=0)
  return close[0] if close else ''


def check_columns(where: str, names: Sequence[str], wanted: dict[str, str]) -> None:
  """Raises UserError at the first wanted column that `names` lacks or has twice."""
  for column, key in wanted.items():
    if column not in names:
      raise UserError(
        f"{where}: no column '{column}' ({key}) among {len(names)} columns; the nearest is "
        f"'{nearest_column(column, names)}'"
      )
    if list(names).count(column) > 1:
      raise UserError(
        f"{where}: column '{column}' ({key}) stands {list(names).count(column)} times; wanted once"
      )
