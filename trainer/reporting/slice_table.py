"""The table of `trainer.evaluate --by`: the values of a slot, each with its figures."""

from collections.abc import Mapping, Sequence
from typing import Any

from trainer.reporting.live_line import WIDTH, shortened

Figures = Mapping[str, Any]

# Title, field of a slice (or the two ends of an interval), format. The rest is in its --json.
COLUMNS = (
  ('samples', ('samples',), ',.0f'),
  ('clicks', ('clicks',), ',.0f'),
  ('AUC', ('auc',), '.4f'),
  ('95 %', ('auc_low', 'auc_high'), '.3f'),
  ('logloss', ('logloss',), '.4f'),
  ('calibr.', ('calibration',), '.3f'),
  ('95 %', ('calibration_low', 'calibration_high'), '.2f'),
  ('rmse', ('rmse',), ',.4g'),
  ('error', ('error',), ',.3g'),
  ('95 %', ('error_low', 'error_high'), ',.3g'),
)
LEAST_NAME_WIDTH = 6


def _cell(row: Figures, fields: Sequence[str], form: str) -> str:
  values = [row.get(field) for field in fields]
  return '-' if None in values else '..'.join(format(value, form) for value in values)


def slice_table(slot: str, rows: Sequence[Figures]) -> str:
  """Returns the lines of a table of at most 80 columns; long values are cut off at their end.

  Args:
    slot: its name, the first title.
    rows: one a slice, of one task: `value`, and the figures of trainer.model.slices.
  """
  columns = [
    [title, *(_cell(row, fields, form) for row in rows)]
    for title, fields, form in COLUMNS
    if any(row.get(fields[0]) is not None for row in rows)
  ]
  widths = [max(map(len, column)) for column in columns]
  room = max(WIDTH - sum(widths) - len(widths), LEAST_NAME_WIDTH)
  names = [shortened(text, room) for text in (slot, *(str(row['value']) for row in rows))]
  first = max(map(len, names))
  lines = [
    ' '.join([name.ljust(first), *(cell.rjust(width) for cell, width in zip(cells, widths))])
    for name, *cells in zip(names, *columns)
  ]
  return '\n'.join(line.rstrip() for line in lines)
