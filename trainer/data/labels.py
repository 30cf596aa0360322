"""Finds passes that teach nothing: all labels are 0 or all 1, or all weights are 0.

Often the cause is a wrong `data.label_positive`.
"""

import collections
import contextlib
import difflib
import re
from typing import NamedTuple

import numpy as np

from trainer import config
from trainer.data.conversion import blocks_of_pass
from trainer.data.parse import label_texts
from trainer.data.prepared import PreparedPass, is_prepared
from trainer.errors import UserError

_MOST_TEXTS = 10  # in a message
_MOST_LENGTH = 40  # of such a text


class Nothing(NamedTuple):
  """Describes a pass in which all labels of a task are 0, or all are 1, or all weights are 0."""

  text: str  # what is wrong, and what is wanted
  # Whether a run refuses the pass. A stream (data.watch) refuses it only if the log has the text of
  # label_positive in other capitals; otherwise the pass may truly have no clicks.
  is_refused: bool


def nothing_to_learn(cfg: config.Config, prepared: PreparedPass) -> Nothing | None:
  """Describes a pass without weights, or the first task whose labels are all the same; else None.

  Tasks where this may be right are skipped: those with a text for 0 (`negative`), those with
  squared error as loss, and retrieval, which learns from positives alone.
  """
  if prepared.weighs_nothing():
    path = prepared.meta['source']['path']
    text = f"{path}: every weight in the column '{cfg.data.weight}' is 0"
    return Nothing(f'{text}; wanted some above 0, or data.weight: null', not cfg.data.stream)
  kinds = cfg.kinds_of_labels
  for i, (label, sole) in enumerate(zip(cfg.labels, prepared.sole_labels())):
    if sole is None or label.negative is not None or kinds[label.name] != 'clicks':
      continue
    key = f'data.labels.{i}.' if cfg.data.labels else 'data.label_'
    path, column = prepared.meta['source']['path'], label.column or label.name
    counts = _texts(cfg.data, path, column)
    text = f"{path}: every label in the column '{column}' is {sole:.0f}"
    if counts:
      most = counts.most_common(_MOST_TEXTS)
      text += ', which holds ' + ', '.join(f'{n:,} × {t[:_MOST_LENGTH]!r}' for t, n in most)
      text += f' and {len(counts) - len(most):,} more' * (len(counts) > len(most))
    likely, is_misread = None, False
    if label.positive is not None:
      text += f'; {key}positive is {label.positive!r}'
      if sole == 0:
        likely = next((t for t in counts if re.fullmatch(label.positive, t, re.IGNORECASE)), None)
        is_misread = likely is not None
        likely = likely or next(iter(difflib.get_close_matches(label.positive, counts, 1)), None)
    if likely is not None:
      text += f'; {likely!r} is likely meant'
    text += (
      f'; wanted both 0 and 1, or, where such passes are meant, the text of a 0 as {key}negative'
    )
    return Nothing(text, is_misread or not cfg.data.stream)
  return None


def _texts(data: config.Data, path: str, column: str) -> collections.Counter[str]:
  """Counts the texts in a column of labels; returns no counts if the log file is gone."""
  counts: collections.Counter[str] = collections.Counter()
  with contextlib.suppress(OSError, UserError):
    if not is_prepared(data, path):
      for block in blocks_of_pass(data, path, {column: 'data.label'}):
        distinct, places = label_texts(block.columns[column], column)
        numbers = np.bincount(places, minlength=len(distinct) + 1)
        counts.update(dict(zip(distinct, numbers.tolist())))
  return counts
