"""Writes report.html: what is known about a run, on one page that needs no network.

The page is made from config.yaml and metrics.jsonl alone. So there is a report also of a run that
is at work, was killed, or has lost its data.
"""

import gzip
import html
import importlib.resources
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import pandas as pd
import plotly.graph_objects as go

from trainer import config, files
from trainer.model.slices import Z, auc_interval_of
from trainer.reporting import comparison, figures, findings, slot_figures
from trainer.reporting.events import SCALARS
from trainer.reporting.live_line import short_name
from trainer.reporting.metric_text import clicks_of, metric_text
from trainer.reporting.runs import RecordedRun, read_run


class _Card(NamedTuple):
  """A figure of the report with its heading and a note below it."""

  draw: Callable[[RecordedRun], go.Figure | None]  # its __name__ is the figure's id in the page
  heading: str
  note: str = ''


def _of(metric: str, heading: str, note: str = '') -> _Card:
  return _Card(figures.quality(metric, findings.NAMES.get(metric, metric)), heading, note)


_SECTIONS = {
  'Importance': (
    _Card(
      slot_figures.importance,
      'Slots and dense columns',
      'How much worse without a slot or column, with 95 % intervals; grey may be chance.',
    ),
  ),
  'Quality': (
    _of('auc', 'AUC', 'One curve for each split.'),
    _of('logloss', 'Logloss'),
    _of('rmse', 'RMSE'),
    _Card(figures.ranking, 'Ranking of all items', 'Without those of the user in training.'),
    _of('loss', 'Loss', 'Of the positives against their negatives.'),
    _of('gauc', 'GAUC', 'AUC within each group, weighted by impressions.'),
  ),
  'Calibration': (
    _Card(figures.calibration, 'Over time', 'Above 1, predictions are too high.'),
    _Card(figures.deciles, 'By decile', 'Of the kept state; bars are two standard deviations.'),
    _Card(slot_figures.slot_calibration, 'By slot', 'Where the feature is known, and elsewhere.'),
  ),
  'Predictions': (
    _Card(figures.spread, 'Distribution', 'In a good model, clicks lie further to the right.'),
    _Card(figures.roc, 'ROC', 'The area under the curve is AUC.'),
    _Card(figures.lift, 'Lift', 'Click rate of the highest predictions over that of all.'),
  ),
  'Features': (
    _Card(slot_figures.funnel, 'Seen, admitted, evicted, exported', 'By slot, over the whole run.'),
    _Card(figures.table_bytes, 'Bytes of the tables', "After each pass, and after each day's end."),
    _Card(figures.features, 'Features in the tables'),
    _Card(slot_figures.unknown, 'Unknown features', 'Share of the samples that have one, in %.'),
    _Card(
      slot_figures.drift,
      'Bins of numbers',
      'Of the slot that has drifted most, without empty bins.',
    ),
  ),
  'Speed': (
    _Card(
      figures.time_spent,
      'Time spent',
      'By process 0, for each pass: exchange is between processes, wait is for batches.',
    ),
    _Card(figures.speed, 'Samples a second'),
  ),
}
# The figures that take the whole width of the page.
_WIDE = 'auc rmse ranking loss slot_calibration spread funnel unknown importance'.split()
# The part of plotly.js that draws what lies on two axes: a third of what plotly's package has. From
# npm, plotly.js-cartesian-dist-min, of the version that the package has.
PLOTLY = 'plotly-cartesian.min.js.gz'
MOST_EVENTS = 200  # in the table of events
_OF_EACH_TASK = ('Quality', 'Calibration', 'Predictions')

_STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
html { overflow-y: scroll; }
body { margin: 0; background: #f5f6f8; color: #2b2f36; font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 28px 24px 64px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 8px; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 36px 0 12px; }
h3 { font-size: 15px; margin: 0; }
p { margin: 0; } .where { color: #656b75; margin-bottom: 18px; overflow-wrap: anywhere; }
nav { display: flex; flex-wrap: wrap; gap: 2px 16px; font-size: 14px; }
nav a { color: #3568a8; }
.summary { font-size: 16px; margin-top: 18px; max-width: 76ch; overflow-wrap: anywhere; }
.faults { margin: 14px 0 0; padding: 12px 16px 12px 32px; max-width: 92ch; border-radius: 8px;
  background: #fdf3e7; border: 1px solid #efd3ad; overflow-wrap: anywhere; }
.well { margin: 14px 0 0; color: #2c7a52; }
.grid { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 16px; }
.card { background: #fff; border: 1px solid #e3e6ea; border-radius: 8px; padding: 14px 16px;
  min-width: 0; }
.card.wide { grid-column: 1 / -1; }
.note { color: #656b75; font-size: 13px; min-height: 20px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 10px; border-bottom: 1px solid #eceef1; text-align: right;
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
thead th { color: #656b75; font-weight: 600; white-space: normal; vertical-align: bottom; }
summary { cursor: pointer; font-weight: 600; }
@media (max-width: 760px) {
  main { padding: 18px 12px 40px; } h1 { font-size: 21px; } .summary { font-size: 15px; }
  .note { min-height: 0; } .card { padding: 12px 10px; }
  .grid { grid-template-columns: minmax(0, 1fr); }
}
"""


def _plot(name: str, figure: go.Figure) -> str:
  shown = {'responsive': True, 'displayModeBar': False}
  return figure.to_html(full_html=False, include_plotlyjs=False, div_id=name, config=shown)


def _card(heading: str, note: str, body: str, wide: bool) -> str:
  return (
    f'<section class="card{" wide" * wide}"><h3>{html.escape(heading)}</h3>'
    f'<p class="note">{html.escape(note)}</p>{body}</section>'
  )


def _heading(text: str) -> str:
  name = re.sub(r'\W+', '_', text)
  return f'<h2 id="section_{name}">{html.escape(text)}</h2>'


def _table(table: pd.DataFrame, index: bool = False) -> str:
  def number(x: float) -> str:
    return f'{x:,.0f}' if abs(x) >= 1000 else f'{x:,.4g}'

  def day(x: float) -> str:
    return '' if pd.isna(x) else f'{x:.0f}'

  whole = dict.fromkeys(table.select_dtypes('integer'), '{:,}'.format)
  whole |= {name: day for name in table if name == 'day'}
  shown = table.to_html(index=index, na_rep='', border=0, float_format=number, formatters=whole)
  return f'<div class="scroll">{shown}</div>'


def _folded(heading: str, summary: str, body: str) -> str:
  """Returns a section whose body is hidden until its summary is clicked."""
  details = f'<details><summary>{summary}</summary>{body}</details>'
  return f'{_heading(heading)}<section class="card">{details}</section>'


def _figures(run: RecordedRun) -> str:
  """Returns a table of the metrics on each split, with intervals, beside those of a constant."""
  cards = []
  for of_task in run.by_task():
    splits = {'train': of_task.of_kept('train'), 'next': of_task.evaluated('next')}
    scores = {split: rows.iloc[-1] for split, rows in splits.items() if len(rows)} | of_task.scores
    rows = [row for split, score in scores.items() for row in _rows_of(of_task, split, score)]
    if rows:
      table = _table(pd.DataFrame(rows).dropna(axis=1, how='all'))
      note = 'Next: before its pass was trained; constant: the mean of the labels trained by then.'
      cards.append(_card(of_task.task, note, table, True))
  return f'{_heading("Figures")}<div class="grid">{"".join(cards)}</div>' if cards else ''


def _rows_of(run: RecordedRun, split: str, score: pd.Series) -> Iterator[dict[str, str | None]]:
  """Yields the rows of one split: the run, a constant and, if known, the true probabilities."""
  ranked = run.cfg.model.retrieval.metrics() if run.cfg.model.retrieval else []
  names = (*config.METRICS, *ranked, 'calibration')
  true = {name: run.reachable(score['pass'], name) for name in names}
  place = {'pass': short_name(score['pass'], 24), 'samples': f'{score["examples"]:,.0f}'}
  constant = run.constants.loc[score.name]
  for what, own in ((split, score), ('constant', constant), ('true probabilities', true)):
    row = {'': what} | (place if own is score else dict.fromkeys(place))
    for name in names:
      title, value, ends = findings.NAMES.get(name, name), own.get(name), ()
      row[title] = None if pd.isna(value) else metric_text(name, value)
      if own is score and name == 'auc' and split != 'train':
        ends = auc_interval_of(own) or ()
      elif own is score and name == 'calibration' and value > 0 and (clicks := clicks_of(own)):
        ends = [value * math.exp(z / clicks**0.5) for z in (-Z, Z)]
      row[f'{title}, 95 %'] = ' to '.join(f'{end:.4f}' for end in ends) or None
    if any(pd.notna(own.get(name)) for name in names):
      yield row


def _sections(run: RecordedRun) -> str:
  page = []
  for heading, cards in _SECTIONS.items():
    if heading in _OF_EACH_TASK:
      page += [
        _section(of_task, f'{heading} {of_task.task}'.strip(), cards) for of_task in run.by_task()
      ]
    else:
      page.append(_section(run, heading, cards, _slots(run) if heading == 'Features' else None))
  return ''.join(page)


def _section(
  run: RecordedRun, heading: str, cards: Sequence[_Card], last: str | None = None
) -> str:
  """Returns one section of the page, with a card `last`; '' if there is nothing to show."""
  drawn = [(card, figure) for card in cards if (figure := card.draw(run)) is not None]
  parts, is_right = [], False  # is_right: the next narrow card has one to its left
  for i, (card, figure) in enumerate(drawn):
    # A narrow card takes the whole width if no other narrow card follows.
    name = card.draw.__name__
    is_alone = i + 1 == len(drawn) or drawn[i + 1][0].draw.__name__ in _WIDE
    is_wide = name in _WIDE or (is_alone and not is_right)
    is_right = not (is_wide or is_right)
    name = f'{name}_{run.task}' if run.task else name
    parts.append(_card(card.heading, card.note, _plot(name, figure), is_wide))
  parts += [last] if last else []
  return f'{_heading(heading)}<div class="grid">{"".join(parts)}</div>' if parts else ''


def _slots(run: RecordedRun) -> str | None:
  slots = run.kept_slots()
  if not slots:
    return None
  table = pd.DataFrame(slots).T.infer_objects()
  if 'dead_columns' in table:
    # A slot without dead columns has NaN.
    dead = table['dead_columns'].map(lambda c: c if isinstance(c, list) else [])
    table['dead_columns'] = dead.map(lambda columns: ', '.join(map(str, columns)))
  table.columns = [c.replace('_', ' ').replace('shows', 'impressions') for c in table]
  shared = {s.name: f'{s.name}, with those of {s.shares}' for s in run.cfg.data.slots if s.shares}
  table = table.rename(index=shared)
  note = 'In the kept state, impressions and clicks of one epoch'
  if run.begins_with_another:
    note = 'In the kept state, impressions and clicks of all epochs, and of the run of --init_from'
  decay = run.cfg.policy().decay
  if run.cfg.data.day_pattern is not None and decay < 1:
    note += f', which each end of a day multiplies by {decay:g} (before that of its last day)'
  note += '; blank is of the last pass; '
  if of_items := sorted(run.cfg.columns_of_items() & set(slots)):
    note += f'blank of {", ".join(of_items)}: the share of the items in data.items; '
  note += f'ctr-inspect --run_dir {run.directory} has more.'
  return _card('Slots', note, _table(table, index=True), True)


def _events(run: RecordedRun) -> str:
  columns = ['event', 'split', 'pass', 'day', 'step', 'examples', *SCALARS]
  shown = run.events[~run.events['event'].isin(['window', 'importance'])]
  summary = f'All {len(shown):,} events'
  if len(shown) > MOST_EVENTS:
    summary = f'The last {MOST_EVENTS:,} of {len(shown):,} events; metrics.jsonl has all'
  shown = shown.tail(MOST_EVENTS).reindex(columns=columns).dropna(axis=1, how='all')
  return _folded('Events', summary, _table(shown))


def _words(run: RecordedRun) -> str:
  faults = findings.faults(run)
  summary = f'<p class="summary">{html.escape(" ".join(findings.summary(run)))}</p>'
  if not faults:
    return summary + '<p class="well">Nothing seems wrong.</p>'
  items = ''.join(f'<li>{html.escape(text)}</li>' for text in faults)
  return f'{summary}<ul class="faults">{items}</ul>'


def _page_of(run: RecordedRun) -> str:
  settings = f'<pre class="scroll">{html.escape(config.dump(run.cfg))}</pre>'
  return (
    f'{_figures(run)}{_words(run)}{_sections(run)}{_events(run)}'
    f'{_folded("Config", "config.yaml", settings)}'
  )


def _comparison_of(runs: Sequence[RecordedRun], paired: Mapping[str, pd.DataFrame] | None) -> str:
  differences, notes = comparison.differences(runs)
  page = [_heading('Figures'), _card('', ' '.join(notes), _table(differences), True)]
  if paired:
    note = f'Of {runs[0].name} (first) and of each other run, with paired 95 % intervals.'
    page += [
      _heading('On the same samples'),
      _card('', note, _table(pd.concat(paired, names=['run']).reset_index('run')), True),
    ]
  page.append(_heading('Settings that differ'))
  keys = comparison.settings_that_differ(runs)
  told = _table(keys, index=True) if len(keys) else 'There are none.'
  page.append(f'<section class="card">{told}</section>')
  cards = []
  for metric, title in findings.NAMES.items():
    for split in ('train', 'next', 'valid', 'test'):
      figure = figures.compared(metric, title, split)(runs)
      if figure is not None:
        cards.append(_card(f'{title}, {split}', '', _plot(f'{metric}_{split}', figure), False))
  page.append(f'{_heading("Quality")}<div class="grid">{"".join(cards)}</div>')
  for run in runs:
    page.append(f'{_heading(run.name)}{_words(run)}')
  return ''.join(page)


def write(
  run_dirs: Sequence[str], path: str, paired: Mapping[str, pd.DataFrame] | None = None
) -> None:
  """Writes the report of a run, or the comparison of several, to `path`.

  Args:
    paired: {run_dir: the result of Run.compare with the first run}, to be shown too.
  """
  runs = [read_run(directory) for directory in run_dirs]
  if len(runs) == 1:
    _write(runs[0].name, _page_of(runs[0]), path, runs[0].directory)
  else:
    _write(f'{len(runs)} runs compared', _comparison_of(runs, paired), path)


def write_page(title: str, cards: Mapping[str, str | pd.DataFrame | go.Figure], path: str) -> None:
  """Writes an HTML page of texts, tables and figures, each below its heading.

  Args:
    cards: {heading: what to show below it}. A heading with an empty text is left out.
  """
  body = ''
  for heading, shown in cards.items():
    if isinstance(shown, str):
      drawn = html.escape(shown)
      if not drawn:
        continue
    elif isinstance(shown, pd.DataFrame):
      drawn = _table(shown)
    else:
      drawn = _plot(heading.replace(' ', '_'), shown)
    body += f'{_heading(heading)}<section class="card">{drawn}</section>'
  _write(title, body, path)


def _write(title: str, body: str, path: str, where: str = '') -> None:
  """Writes a page: a title, where the run lies, links to the headings of the body, and the body."""
  headings = re.findall('<h2 id="(.+?)">(.+?)</h2>', body)
  links = ' '.join(f'<a href="#{name}">{text}</a>' for name, text in headings)
  packed = importlib.resources.files('trainer.reporting') / PLOTLY
  page = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    f'<title>{html.escape(title)}</title><style>{_STYLE}</style>'
    f'<script>{gzip.decompress(packed.read_bytes()).decode()}</script></head><body><main>'
    f'<h1>{html.escape(title)}</h1><p class="where">{html.escape(where)}</p>'
    f'<nav>{links}</nav>{body}</main></body></html>'
  )
  with files.whole_file(path) as f:
    f.write(page.encode())
