"""Says which columns of the log a config reads, and in which form converted samples are stored."""

import difflib
import zlib
from collections.abc import Collection, Sequence

from trainer import config
from trainer.data.features import HASH_NAME, has_log1p
from trainer.errors import UserError, nearest
from trainer.plain_data import JsonObject

_SHOWN = 8  # the most names of missing columns in a message
# From this difflib ratio on, a missing column is a misspelt column that is made from others.
_ALIKE = 0.85


def briefly(made: config.Made) -> JsonObject:
  """Returns the settings of a made column (`from`); a checksum replaces a look-up's content."""
  tree = made.model_dump()
  if tree.get('content') is not None:
    tree['content'] = f'{zlib.crc32(tree["content"].encode()):08x}'
  return tree


def schema(cfg: config.Config) -> JsonObject:
  """Returns the settings that must be the same when a pass is converted and when it is read."""
  data, ids = cfg.data, cfg.slot_ids()
  of_items = sorted(cfg.columns_of_items())  # not read from the log
  return ({'of_items': of_items} if of_items else {}) | {
    'format': 3,
    'hash': HASH_NAME,
    # In canonical order: name, slot id and, for a sequence, its length.
    'slots': [
      [s.name, ids[s.name], *([s.sequence.max_length] if s.sequence else [])]
      for s in cfg.ordered_slots
    ],
    'dense': [[c.name, has_log1p(c)] for c in data.dense],  # statistics depend on log1p
    'made': {name: briefly(made) for name, made in data.made.items()},
    'label': [[label.name, label.loss == 'squared_error'] for label in cfg.labels],
    'weight': data.weight,
    'group': data.group,
  }


def reading(cfg: config.Config) -> JsonObject:
  """Returns the settings by which a raw file is parsed; if they change, it is converted again."""
  data = cfg.data
  return {
    'data_format': [data.format, data.topic.format] if data.topic else data.format,
    'delimiter': data.delimiter,
    'quoting': data.quoting,
    'columns': data.columns,
    'labels': [[label.column, label.positive, label.negative] for label in cfg.labels],
    'missing_values': data.missing_values,
    'numbers': [data.decimal, data.thousands],
    'max_bad_share': data.max_bad_share,
    'slots': [[s.column, s.separator, s.value_separator] for s in cfg.ordered_slots],
    'keep_texts': data.keep_texts,
  }


def wanted_columns(cfg: config.Config, labelled: bool = True) -> dict[str, str]:
  """Returns the columns of the log to read, {column: the config key that needs it}.

  Training and evaluation (`labelled`) read labels, weights and groups too; prediction reads none of
  these, except groups with model.retrieval.
  """
  data, columns = cfg.data, []
  if labelled:
    key = 'data.labels' if data.labels else 'data.label'
    if data.labels or data.label is not None:
      columns += [(label.column or label.name, key) for label in cfg.labels]
    columns += [(data.weight, 'data.weight'), (data.group, 'data.group')]
  elif cfg.predicts_for_users:
    columns.append((data.group, 'data.group'))
  blank = cfg.blank_columns(labelled)
  for column in (*data.dense, *data.slots):
    key = f"slot '{column.name}'" if isinstance(column, config.Slot) else 'data.dense'
    if column.name not in blank:
      columns += [(name, key) for name, _ in data.columns_of(column)]
  wanted: dict[str, str] = {}
  for column, key in columns:
    if column is not None:
      wanted.setdefault(column, key)
  return wanted


def check_columns(
  where: str, names: Sequence[str], wanted: dict[str, str], made: Collection[str] = ()
) -> None:
  """Raises UserError, with the file, if `names` lacks a column of `wanted` or has it twice.

  The message suggests one of `made`, names of columns computed from others, that is very similar.
  """
  for column, key in wanted.items():
    if column not in names:
      is_made = difflib.get_close_matches(column, made, 1, _ALIKE)
      near = nearest(column, made if is_made else names)
      if column in made:
        near = f"; '{column}' is made from itself; wanted it made from columns of the log"
      count = f'{len(names)} column{"s" * (len(names) != 1)}'
      others = [other for other in wanted if other not in names and other != column]
      listed = f'{", ".join(others[:_SHOWN])}{", …" * (len(others) > _SHOWN)}'
      also = f'; also missing: {listed}' if others else ''
      raise UserError(f"{where}: no column '{column}' ({key}) among {count}{near}{also}")
    if (times := list(names).count(column)) > 1:
      raise UserError(f"{where}: column '{column}' ({key}) is there {times} times; wanted once")
