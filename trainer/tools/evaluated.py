"""What `ctr-evaluate` prints in a terminal: metrics, and those of each value of a column."""

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from trainer.config import METRICS, RANKING_METRICS
from trainer.plain_data import Json, JsonObject
from trainer.reporting.live_line import WIDTH, short_name, shortened
from trainer.reporting.metric_text import (
  decimals,
  has_one_class,
  metric_text,
  plus_minus,
  positives_name,
)
from trainer.tools.sentences import Finding, found

Figures = Mapping[str, Json]

# {title of a printed metric: its field}; --json prints all other metrics too.
FIGURES = {metric.title: name for name, metric in METRICS.items()}
FIGURES |= {"the base rate's logloss": 'base_logloss', "the mean's RMSE": 'base_rmse'}
FIGURES |= {'calibration': 'calibration'}
# Columns of a table of slices: title, field (or the two ends of an interval), format. Without a
# format, the smallest value decides how many decimals the column has.
SLICE_COLUMNS = (
  ('samples', ('samples',), ',.0f'),
  ('clicks', ('clicks',), ',.0f'),
  ('AUC', ('auc',), '.4f'),
  ('95 %', ('auc_low', 'auc_high'), '.3f'),
  ('logloss', ('logloss',), None),
  ('calibr.', ('calibration',), '.3f'),
  ('95 %', ('calibration_low', 'calibration_high'), '.2f'),
  ('rmse', ('rmse',), None),
  ('error', ('error',), ',.3g'),
  ('95 %', ('error_low', 'error_high'), ',.3g'),
)
LEAST_NAME_WIDTH = 6


def json_text(values: JsonObject, is_terminal: bool) -> str:
  """Returns JSON in one line or, for a terminal, indented."""
  return json.dumps(values, indent=2 if is_terminal else None)


def _cells(rows: Sequence[Figures], fields: Sequence[str], form: str | None) -> list[str]:
  """Returns the texts of one column of SLICE_COLUMNS; [] if no row has its field."""
  known = [row[fields[0]] for row in rows if row.get(fields[0]) is not None]
  if not known:
    return []
  form = form or f',.{decimals(fields[0], min(known))}f'
  values = ([row.get(field) for field in fields] for row in rows)
  return ['-' if None in own else '..'.join(format(v, form) for v in own) for own in values]


def slice_table(column: str, rows: Sequence[Figures]) -> str:
  """Returns the slices of one task as a table of at most 80 characters; values are shortened."""
  columns = [
    [positives_name(bool(rows[0].get('task'))) if title == 'clicks' else title, *cells]
    for title, fields, form in SLICE_COLUMNS
    if (cells := _cells(rows, fields, form))
  ]
  widths = [max(map(len, column)) for column in columns]
  room = max(WIDTH - sum(widths) - len(widths), LEAST_NAME_WIDTH)
  names = [shortened(column, room), *(short_name(str(row['value']), room) for row in rows)]
  first = max(map(len, names))
  lines = [
    ' '.join([name.ljust(first), *(cell.rjust(width) for cell, width in zip(cells, widths))])
    for name, *cells in zip(names, *columns)
  ]
  return '\n'.join(line.rstrip() for line in lines)


def without_auc(values: Figures) -> Iterator[Finding]:
  """Yields why the AUC of a task is null, which JSON alone does not say."""
  for task, own in values.get('tasks', {'': values}).items():
    if has_one_class(own) and own.get('auc') is None:
      yield found('no_auc', task, label=own['ctr'])


def baseline_lines(values: Figures) -> Iterator[str]:
  """Yields a line of what the most shown items reach in a ranking, and one of unknown queries."""
  names = [name for name in values.keys() if name.startswith('base_') and '@' in name]
  if names:
    told = [f'{name.removeprefix("base_")} {values[name]:.4f}' for name in names]
    yield f'the most shown items reach {", ".join(told)}'
  if values.get('unknown_queries'):
    yield f'{values["unknown_queries"]:.1%} of the queries are empty or unknown to the model'


def in_words(values: Figures, has_slices: bool = True) -> Iterator[str]:
  """Yields lines of at most 80 characters: each task's metrics, then the flags that show more."""
  for task, own in values.get('tasks', {'': values}).items():
    fields = {field: title for title, field in FIGURES.items()}
    fields |= {name: name for name in own if name.partition('@')[0] in RANKING_METRICS}
    told = [
      f'{title} {metric_text(field, own[field])}{plus_minus(field, own, bool(task))}'
      for field, title in fields.items()
      if own.get(field) is not None
    ]
    told = [*(finding.sentence for finding in without_auc(own)), *told]
    samples = f'{own["examples"]:,} samples'
    if 'queries' in values:
      samples += f' of {values["queries"]:,} users'
    text = ' · '.join([*([task] if task else []), samples, *told])
    yield textwrap.fill(text, WIDTH, subsequent_indent='  ')
    yield from (textwrap.fill(line, WIDTH, subsequent_indent='  ') for line in baseline_lines(own))
  by = '; with --by COLUMN or --by pass: for each value or pass' * has_slices
  yield f'with --json: all metrics{by}'
