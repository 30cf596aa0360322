"""What a finished run prints and leaves: the closing table and report.html."""

import base64
import html
import io
import json
import os
import sys
from typing import Any

import matplotlib
import pandas as pd
import rich.box
import rich.console
import rich.table

from trainer import config
from trainer.reporting.events import SCALARS, read_events

matplotlib.use('Agg')
import matplotlib.pyplot as plt

# The closing table's columns: title, field of the event, format.
COLUMNS = (
  ('day', 'day', '.0f'),
  ('samples', 'examples', ',.0f'),
  ('logloss', 'logloss', '.4f'),
  ('AUC', 'auc', '.4f'),
  ('best AUC', 'best_auc', '.4f'),
  ('GAUC', 'gauc', '.4f'),
  ('calibr.', 'calibration', '.3f'),
  ('samples/s', 'examples_per_second', ',.0f'),
  ('features', 'features', ',.0f'),
  ('admitted', 'admitted', ',.0f'),
  ('evicted', 'evicted', ',.0f'),
  ('MB', 'megabytes', ',.1f'),
)


def best_reachable(cfg: config.Config) -> dict[str, dict[str, float]]:
  """What the true probabilities reach where the log was synthesized (truth.json beside the files).

  Returns:
    By name of the pass: auc and logloss.
  """
  bounds = {}
  for path in config.expand([*cfg.data.train, *cfg.data.valid, *cfg.data.test], 'data'):
    truth = os.path.join(os.path.dirname(path), 'truth.json')
    if os.path.exists(truth):
      with open(truth, encoding='utf-8') as f:
        bounds |= json.load(f)['passes']
  return bounds


def write_report(cfg: config.Config) -> None:
  """Writes report.html of the events so far; process 0 calls it."""
  path = os.path.join(cfg.run_dir, 'report.html')
  write_html(read_events(cfg.run_dir), path, cfg.run_dir, best_reachable(cfg))


def close(cfg: config.Config) -> None:
  """Prints the closing table and writes report.html; process 0 calls it once the run is done."""
  print_table(read_events(cfg.run_dir), best_reachable(cfg))
  write_report(cfg)
  print(f'metrics.jsonl, report.html, checkpoints/ and tensorboard/ lie in {cfg.run_dir}')


def _cell(value: Any, form: str) -> str:
  return '' if pd.isna(value) else format(value, form)


def print_table(events: pd.DataFrame, bounds: dict[str, dict[str, float]]) -> None:
  """Prints what was trained, what validation and test said, and what the tables hold.

  Args:
    events: of trainer.reporting.events.read_events.
    bounds: of `best_reachable`; stands beside evaluations.
  """
  wanted = ['pass', 'split', 'rmse', 'table_bytes', *(field for _, field, _ in COLUMNS)]
  shown = events[events['event'].isin(['train', 'eval', 'day_end'])]
  shown = shown.reindex(columns=['event', *wanted])
  evaluated = shown['event'] == 'eval'
  best = shown['pass'].map(lambda name: bounds.get(name, {}).get('auc'))
  shown = shown.assign(
    best_auc=best.where(evaluated),
    logloss=shown['logloss'].fillna(shown['rmse']),
    megabytes=shown['table_bytes'] / 1e6,
  )
  table = rich.table.Table(box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
  for title in ('event', 'pass'):
    table.add_column(title)
  for title, _, _ in COLUMNS:
    table.add_column(title, justify='right')
  for _, row in shown.iterrows():
    name = row['event'] if pd.isna(row['split']) else f'{row["event"]} {row["split"]}'
    cells = [_cell(row[field], form) for _, field, form in COLUMNS]
    table.add_row(name, _cell(row['pass'], ''), *cells)
  console = rich.console.Console(width=None if sys.stdout.isatty() else 150)
  console.print(table)
  known = shown[evaluated & shown['pass'].isin(list(bounds))]
  if len(known):
    last = known.iloc[-1]
    bound = bounds[last['pass']]
    console.print(
      f'{last["split"]} {last["pass"]}: AUC {last["auc"]:.4f}, logloss {last["logloss"]:.4f}; '
      f'the true probabilities reach AUC {bound["auc"]:.4f}, logloss {bound["logloss"]:.4f}',
      highlight=False,
    )


def write_html(
  events: pd.DataFrame, path: str, title: str, bounds: dict[str, dict[str, float]]
) -> None:
  """Writes report.html: curves of quality, speed and tables over the steps, then all events."""
  figure, axes = plt.subplots(2, 2, figsize=(11, 6.5), constrained_layout=True)
  panels = (
    ('auc', 'AUC'),
    ('logloss', 'logloss'),
    ('examples_per_second', 'samples/s'),
    ('features', 'features'),
  )

  def curve(axis, name, label, rows, **style):
    points = rows.dropna(subset=[name]) if name in rows else rows[:0]
    if len(points):
      axis.plot(points['step'], points[name], label=label, **style)

  for axis, (name, label) in zip(axes.flat, panels):
    for kind in ('train', 'eval', 'day_end'):
      curve(axis, name, kind, events[events['event'] == kind], marker='.')
    if name == 'features':
      curve(axis, 'admitted', 'admitted', events, marker='.')
    evaluated = events[events['event'] == 'eval']
    if len(evaluated):
      best = [bounds.get(p, {}).get(name) for p in evaluated['pass']]
      curve(axis, name, 'best reachable', evaluated.assign(**{name: best}), ls=':', c='grey')
    axis.set(title=label, xlabel='step')
    if axis.get_legend_handles_labels()[0]:
      axis.legend(fontsize=7)
  image = io.BytesIO()
  figure.savefig(image, format='png', dpi=110)
  plt.close(figure)
  columns = ['event', 'pass', 'day', 'step', 'examples', *SCALARS]
  table = events.reindex(columns=columns).to_html(
    index=False, na_rep='', float_format=lambda x: f'{x:.6g}', border=0
  )
  page = (
    f'<!doctype html><meta charset="utf-8"><title>{html.escape(title)}</title>'
    '<style>body{font:14px sans-serif;margin:2em}table{border-collapse:collapse}'
    'td,th{padding:2px 8px;border-bottom:1px solid #ddd;text-align:right}</style>'
    f'<h1>{html.escape(title)}</h1>'
    f'<img src="data:image/png;base64,{base64.b64encode(image.getvalue()).decode()}">{table}'
  )
  with open(path, 'w', encoding='utf-8') as f:
    f.write(page)
