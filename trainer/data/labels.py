"""Passes whose labels are all of one class: most often `data.label_positive` misses their texts."""

import collections
import difflib
import re
from typing import NamedTuple

import numpy as np

from trainer import config
from trainer.data.conversion import raw_blocks
from trainer.data.log_files import files_of
from trainer.data.parse import label_texts
from trainer.data.prepared import PreparedPass, is_prepared
from trainer.errors import UserError

_MOST_TEXTS = 10  # that are shown
_MOST_LENGTH = 40


class OneClass(NamedTuple):
  """A pass that has one class of a label."""

  text: str  # what is wrong, and what is wanted
  is_misread: bool  # whether a text is the positive one but for upper and lower case


def one_class(cfg: config.Config, prepared: PreparedPass) -> OneClass | None:
  """Looks for a label of which a pass has one class, though the config does not say that it may.

  Args:
    cfg: the config.
    prepared: the pass.
  Returns:
    The first such label; None where there is none.
  """
  for i, (label, sole) in enumerate(zip(cfg.labels, prepared.sole_labels())):
    if sole is None or label.negative is not None or label.loss == 'squared_error':
      continue
    key = f'data.labels.{i}.' if cfg.data.labels else 'data.label_'
    path, column = prepared.meta['source']['path'], label.column or label.name
    counts = _texts(cfg, path, column)
    found = f"{path}: every label in the column '{column}' is {sole:.0f}"
    if counts:
      found += f', which holds {_shown(counts)}'
    likely, is_misread = None, False
    if label.positive is not None:
      found += f'; {key}positive is {label.positive!r}'
      if sole == 0:
        likely = next((t for t in counts if re.fullmatch(label.positive, t, re.IGNORECASE)), None)
        is_misread = likely is not None
        near = difflib.get_close_matches(label.positive, counts, 1)
        likely = likely or (near[0] if near else None)
    if likely is not None:
      found += f'; {likely!r} is likely meant'
    return OneClass(
      f'{found}; wanted both 0 and 1, or, where such passes are meant, the text of a 0 as '
      f'{key}negative',
      is_misread,
    )
  return None


def _shown(counts: collections.Counter[str]) -> str:
  """The most frequent texts and how often they stand there."""
  most = counts.most_common(_MOST_TEXTS)
  shown = ', '.join(f'{n:,} × {text[:_MOST_LENGTH]!r}' for text, n in most)
  return shown + (f' and {len(counts) - len(most):,} more' if len(counts) > len(most) else '')


def _texts(cfg: config.Config, path: str, column: str) -> collections.Counter[str]:
  """How often each text stands in the column of a label; none where the raw pass is gone."""
  counts: collections.Counter[str] = collections.Counter()
  try:
    if is_prepared(cfg.data, path):
      return counts
    for file in files_of(path):
      for read in raw_blocks(cfg, file, {column: 'data.label'}):
        distinct, places = label_texts(read().columns[column], column)
        numbers = np.bincount(places, minlength=len(distinct) + 1)
        counts.update(dict(zip(distinct, numbers.tolist())))
  except (OSError, UserError):
    pass
  return counts
