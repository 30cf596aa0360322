"""Writes report.html: what is known about a run, on one page (page.html) that needs no network.

It is made from config.yaml and metrics.jsonl alone, so also if the run is at work or was killed.
"""

import gzip
import importlib.resources
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jinja2
import pandas as pd
import plotly.graph_objects as go
from markupsafe import Markup

from trainer import config, files
from trainer.reporting.events import SCALARS
from trainer.reporting.live_line import short_name
from trainer.reporting.metric_text import Z, auc_interval_of, clicks_of, metric_text
from trainer.tools import comparison, figures, findings, summary
from trainer.tools.runs import RecordedRun, read_run


class _Card(NamedTuple):
  heading: str
  note: str
  body: str
  is_wide: bool = True
  folded: str = ''  # the line to click to see the body


class _Section(NamedTuple):
  heading: str
  cards: Sequence[_Card]
  summary: str = ''  # a run in words, below the cards
  faults: Sequence[str] = ()


# {heading: (what draws a figure, its heading, a note below it)}; the name of what draws a figure is
# the figure's id in the page.
_SECTIONS = {
  'Importance': (
    (
      figures.importance,
      'Slots and dense columns',
      'How much worse without a slot or column, with 95 % intervals; grey may be chance.',
    ),
  ),
  'Quality': (
    (figures.quality('auc', 'AUC'), 'AUC', 'One curve for each split.'),
    (figures.quality('logloss', 'logloss'), 'Logloss', ''),
    (figures.quality('rmse', 'RMSE'), 'RMSE', ''),
    (figures.ranking, 'Ranking of all items', 'Without those of the user in training.'),
    (figures.quality('loss', 'loss'), 'Loss', 'Of the positives against their negatives.'),
    (figures.quality('gauc', 'GAUC'), 'GAUC', 'AUC within each group, weighted by impressions.'),
  ),
  'Calibration': (
    (figures.calibration, 'Over time', 'Above 1, predictions are too high.'),
    (figures.deciles, 'By decile', 'Of the kept state; bars are two standard deviations.'),
    (figures.slot_calibration, 'By slot', 'Where the feature is known, and elsewhere.'),
  ),
  'Predictions': (
    (figures.spread, 'Distribution', 'In a good model, clicks lie further to the right.'),
    (figures.roc, 'ROC', 'The area under the curve is AUC.'),
    (figures.lift, 'Lift', 'Click rate of the highest predictions over that of all.'),
  ),
  'Features': (
    (figures.funnel, 'Seen, admitted, evicted, exported', 'By slot, over the whole run.'),
    (figures.table_bytes, 'Bytes of the tables', "After each pass, and after each day's end."),
    (figures.features, 'Features in the tables', ''),
    (figures.unknown, 'Unknown features', 'Share of the samples that have one, in %.'),
    (figures.drift, 'Bins of numbers', 'Of the slot that has drifted most, without empty bins.'),
  ),
  'Speed': (
    (
      figures.time_spent,
      'Time spent',
      'By process 0, for each pass: exchange is between processes, wait is for batches.',
    ),
    (figures.speed, 'Samples a second', ''),
    (figures.lag, 'Messages behind each pass', 'Of the partitions that have the most.'),
  ),
}
# The figures that take the whole width of the page.
_WIDE = 'auc rmse ranking loss slot_calibration spread funnel unknown importance'.split()
# The part of plotly.js that draws what lies on two axes: a third of what plotly's package has. From
# npm, plotly.js-cartesian-dist-min, of the version that the package has.
PLOTLY = 'plotly-cartesian.min.js.gz'
MOST_EVENTS = 200  # in the table of events
_OF_EACH_TASK = ('Quality', 'Calibration', 'Predictions')


def _plot(name: str, figure: go.Figure) -> Markup:
  shown = {'responsive': True, 'displayModeBar': False}
  return Markup(figure.to_html(full_html=False, include_plotlyjs=False, div_id=name, config=shown))


def _table(table: pd.DataFrame, index: bool = False) -> Markup:
  def number(x: float) -> str:
    return f'{x:,.0f}' if abs(x) >= 1000 else f'{x:,.4g}'

  formats = dict.fromkeys(table.select_dtypes('integer'), '{:,}'.format)
  formats |= {'day': lambda x: '' if pd.isna(x) else f'{x:.0f}'} if 'day' in table else {}
  shown = table.to_html(index=index, na_rep='', border=0, float_format=number, formatters=formats)
  return Markup(f'<div class="scroll">{shown}</div>')


def _figures(run: RecordedRun) -> Iterator[_Card]:
  """Yields a table for each task: its metrics on each split, beside those of a constant."""
  for of_task in run.by_task():
    splits = {'train': of_task.of_kept('train'), 'next': of_task.evaluated('next')}
    scores = {split: rows.iloc[-1] for split, rows in splits.items() if len(rows)} | of_task.scores
    rows = [row for split, score in scores.items() for row in _rows_of(of_task, split, score)]
    if rows:
      table = _table(pd.DataFrame(rows).dropna(axis=1, how='all'))
      note = 'Next: before its pass was trained; constant: the mean of the labels trained by then.'
      note = 'Popular: each user gets the most shown items.' if run.cfg.ranking_metrics else note
      yield _Card(of_task.task, note, table)


def _rows_of(run: RecordedRun, split: str, score: pd.Series) -> Iterator[dict[str, str | None]]:
  """Yields the rows of one split: the run, a constant and, if known, the true probabilities."""
  names = (*config.METRICS, *run.cfg.ranking_metrics, 'calibration')
  true = {name: run.reachable(score['pass'], name) for name in names}
  place = {'pass': short_name(score['pass'], 24), 'samples': f'{score["examples"]:,.0f}'}
  constant = run.constants.loc[score.name]
  for what, own in ((split, score), (run.baseline, constant), ('true probabilities', true)):
    row = {'': what} | (place if own is score else dict.fromkeys(place))
    for name in names:
      title, value, ends = summary.NAMES.get(name, name), own.get(name), ()
      row[title] = None if pd.isna(value) else metric_text(name, value)
      if own is score and name == 'auc' and split != 'train':
        ends = auc_interval_of(own) or ()
      elif own is score and name == 'calibration' and value > 0 and (clicks := clicks_of(own)):
        ends = [value * math.exp(z / clicks**0.5) for z in (-Z, Z)]
      row[f'{title}, 95 %'] = ' to '.join(f'{end:.4f}' for end in ends) or None
    if any(pd.notna(own.get(name)) for name in names):
      yield row


def _drawn(run: RecordedRun, section: str) -> Iterator[_Card]:
  for draw, heading, note in _SECTIONS[section]:
    if (figure := draw(run)) is not None and figure.data:
      name = draw.__name__
      plot = _plot(f'{name}_{run.task}' if run.task else name, figure)
      yield _Card(heading, note, plot, name in _WIDE)


def _slots(run: RecordedRun) -> Iterator[_Card]:
  slots = run.kept_slots()
  if not slots:
    return
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
  if run.cfg.data.has_days and decay < 1:
    note += f', which each end of a day multiplies by {decay:g} (before that of its last day)'
  note += '; blank is of the last pass; '
  if of_items := sorted(run.cfg.columns_of_items() & set(slots)):
    note += f'blank of {", ".join(of_items)}: the share of the items in data.items; '
  note += f'ctr-inspect --run_dir {run.directory} has more.'
  yield _Card('Slots', note, _table(table, index=True))


def _events(run: RecordedRun) -> _Card:
  columns = ['event', 'split', 'pass', 'day', 'step', 'examples', *SCALARS]
  shown = run.events[~run.events['event'].isin(['window', 'importance'])]
  told = f'All {len(shown):,} events'
  if len(shown) > MOST_EVENTS:
    told = f'The last {MOST_EVENTS:,} of {len(shown):,} events; metrics.jsonl has all'
  shown = shown.tail(MOST_EVENTS).reindex(columns=columns).dropna(axis=1, how='all')
  return _Card('', '', _table(shown), folded=told)


def _words(run: RecordedRun, heading: str, cards: Iterable[_Card] = ()) -> _Section:
  faults = [finding.sentence for finding in findings.faults(run)]
  return _Section(heading, list(cards), ' '.join(summary.summary(run)), faults)


def _page_of(run: RecordedRun) -> Iterator[_Section]:
  shown = list(_figures(run))
  yield _words(run, 'Figures' * bool(shown), shown)
  for heading in _SECTIONS:
    for of_task in run.by_task() if heading in _OF_EACH_TASK else [run]:
      own = f'{heading} {of_task.task}'.strip() if of_task is not run else heading
      cards = [*_drawn(of_task, heading), *(_slots(run) if heading == 'Features' else ())]
      yield _Section(own, cards)
  yield _Section('Events', [_events(run)])
  settings = Markup('<pre class="scroll">{}</pre>').format(config.dump(run.cfg))
  yield _Section('Config', [_Card('', '', settings, folded='config.yaml')])


def _comparison_of(
  runs: Sequence[RecordedRun], paired: Mapping[str, pd.DataFrame] | None
) -> Iterator[_Section]:
  differences, notes = comparison.differences(runs)
  yield _Section('Figures', [_Card('', ' '.join(notes), _table(differences))])
  if paired:
    note = f'Of {runs[0].name} (first) and of each other, with paired 95 % intervals: of the '
    note += 'samples alone for one run each; for several seeds each (--seeds), of these too.'
    table = _table(pd.concat(paired, names=['run']).reset_index('run'))
    yield _Section('On the same samples', [_Card('', note, table)])
  keys = comparison.settings_that_differ(runs)
  told = _table(keys, index=True) if len(keys) else 'There are none.'
  yield _Section('Settings that differ', [_Card('', '', told)])
  cards = [
    _Card(f'{title}, {split}', '', _plot(f'{metric}_{split}', figure), False)
    for metric, title in summary.NAMES.items()
    for split in ('train', 'next', 'valid', 'test')
    if (figure := figures.compared(runs, metric, title, split)) is not None
  ]
  yield _Section('Quality', cards)
  for run in runs:
    yield _words(run, run.name)


def write(
  run_dirs: Sequence[str], path: str, paired: Mapping[str, pd.DataFrame] | None = None
) -> None:
  """Writes the report of a run, or the comparison of several, to `path`.

  `paired` is {run_dir: the result of `compare` with the first runs}, to be shown too.
  """
  runs = [read_run(directory) for directory in run_dirs]
  if len(runs) == 1:
    _write(runs[0].name, _page_of(runs[0]), path, runs[0].directory)
  else:
    _write(f'{len(runs)} runs compared', _comparison_of(runs, paired), path)


def write_page(title: str, cards: Mapping[str, str | pd.DataFrame | go.Figure], path: str) -> None:
  """Writes an HTML page of texts, tables and figures, each below its heading; '' is left out."""
  sections = []
  for heading, shown in cards.items():
    if isinstance(shown, pd.DataFrame):
      shown = _table(shown)
    elif isinstance(shown, go.Figure):
      shown = _plot(heading.replace(' ', '_'), shown)
    sections.append(_Section(heading, [_Card('', '', shown)] if shown else []))
  _write(title, sections, path)


def _write(title: str, sections: Iterable[_Section], path: str, where: str = '') -> None:
  environment = jinja2.Environment(loader=jinja2.PackageLoader('trainer', 'tools'), autoescape=True)
  packed = importlib.resources.files('trainer.tools') / PLOTLY
  page = environment.get_template('page.html').render(
    title=title,
    where=where,
    plotly=Markup(gzip.decompress(packed.read_bytes()).decode()),
    sections=[section for section in sections if section.cards or section.summary],
  )
  with files.whole_file(path) as f:
    f.write(page.encode())
