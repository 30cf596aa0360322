"""What a finished run prints and leaves: the closing table and report.html."""

import os
import sys
from typing import Any

import pandas as pd
import rich.box
import rich.console
import rich.table

from trainer import config
from trainer.reporting import report
from trainer.reporting.runs import read_run

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


def write_report(cfg: config.Config) -> None:
  """Writes report.html of the events so far; process 0 calls it."""
  report.write([cfg.run_dir], os.path.join(cfg.run_dir, 'report.html'))


def close(cfg: config.Config) -> None:
  """Prints the closing table and writes report.html; process 0 calls it once the run is done."""
  run = read_run(cfg.run_dir)
  print_table(run.events, run.truth.get('passes', {}))
  if warning := few_admitted(cfg, run.events):
    print(warning)
  write_report(cfg)
  print(f'metrics.jsonl, report.html, checkpoints/ and tensorboard/ lie in {cfg.run_dir}')


FEW_ADMITTED = 0.05


def few_admitted(cfg: config.Config, events: pd.DataFrame) -> str | None:
  """Says which threshold admits almost none of the features that were seen; None where none does.

  Args:
    cfg: the job's config.
    events: of trainer.reporting.events.read_events.
  """
  policy = cfg.policy()
  key = {
    'score': 'admission_threshold',
    'count': 'admission_count',
    'probability': 'admission_probability',
  }.get(policy.admission)
  trained = events.reindex(columns=['event', 'features', 'admitted'])
  trained = trained[trained['event'] == 'train']
  if key is None or not len(trained) or not trained['features'].iloc[-1]:
    return None
  features, admitted = trained['features'].iloc[-1], trained['admitted'].iloc[-1]
  if admitted >= FEW_ADMITTED * features:
    return None
  return (
    f'lifecycle.{key} {getattr(policy, key):g} admits {admitted:,.0f} of the {features:,.0f} '
    f'features seen ({admitted / features:.1%}): all others have a linear weight only'
  )


def _cell(value: Any, form: str) -> str:
  return '' if pd.isna(value) else format(value, form)


def print_table(events: pd.DataFrame, bounds: dict[str, dict[str, float]]) -> None:
  """Prints what was trained, what validation and test said, and what the tables hold.

  Args:
    events: of trainer.reporting.events.read_events.
    bounds: what the true probabilities reach, by pass; stands beside evaluations.
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
