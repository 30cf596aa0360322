"""Prints the closing table of a run, and writes its report.html."""

import os
import shlex
import textwrap
from collections.abc import Iterator

import pandas as pd
import rich.box
import rich.console
import rich.table

from trainer import config, files
from trainer.reporting.listener import Listener
from trainer.reporting.live_line import short_name, shortened
from trainer.reporting.metric_text import decimals, half_interval, metric_text, plus_minus
from trainer.tools import report
from trainer.tools.evaluated import baseline_lines
from trainer.tools.findings import faults
from trainer.tools.runs import RecordedRun, read_run
from trainer.training.run_log import RunLog

# The columns of the closing table: title, field of the event, format.
TABLE_COLUMNS = (
  ('epoch', 'epoch', '.0f'),
  ('samples', 'examples', ',.0f'),
  ('logloss', 'logloss', '.4f'),
  ('AUC', 'auc', '.4f'),
  ('±', 'half_interval', '.3f'),
  ('reach.', 'reachable_auc', '.4f'),
  ('GAUC', 'gauc', '.4f'),
  ('calibr.', 'calibration', '.3f'),
  ('loss', 'loss', '.4f'),
)
WIDTH, NAME_WIDTH, LEAST_NAME_WIDTH = 80, 18, 8
GROUPS = ('train', 'next', 'valid', 'test')
MOST_FINDINGS = 3  # report.html has all
SHOWN_FIRST, SHOWN_LAST = 2, 8  # rows of a group; metrics.jsonl has the rest
SHOWN_MEGABYTES = 0.05  # the smallest file or directory of the run_dir that is listed


class Closing(Listener):
  """Prints the closing table, and writes report.html, in a stream at the end of each day too.

  `shown` is the run_dir as the user gave it: a URL if run_dir is the copy of one in a bucket.
  """

  what = 'report.html'

  def __init__(self, run_dir: str, is_stream: bool, log: RunLog, shown: str):
    self._run_dir, self._is_stream, self._log, self._shown = run_dir, is_stream, log, shown

  def day_ended(self, day: int, is_empty: bool) -> None:
    if self._is_stream and self._log.events.active:
      with self._log.events.guarded(self.what):
        write_report(self._run_dir)

  def close(self, has_trained: bool) -> None:
    if has_trained:
      run = read_run(self._run_dir)
      for of_task in run.by_task():
        print_table(of_task)
    write_report(self._run_dir)
    if has_trained:
      for line in last_lines(run, self._shown):
        print(line)


def write_report(run_dir: str) -> None:
  """Writes report.html from the events so far."""
  report.write([run_dir], os.path.join(run_dir, 'report.html'))


def print_table(run: RecordedRun) -> None:
  """Prints a table of each split's metrics, beside those of a constant prediction."""
  of_rankings = [(name, name, '.4f') for name in run.cfg.ranking_metrics]
  fields = [*TABLE_COLUMNS, *of_rankings]
  names = [field for _, field, _ in fields]
  shown = run.events.reindex(columns=['event', 'split', 'pass', 'rmse', 'ctr', *names])
  shown['group'] = shown['split'].where(shown['event'] == 'eval', shown['event'])
  shown = shown[shown['group'].isin(GROUPS)]
  reachable = [run.reachable(name, 'auc') for name in shown['pass']]
  halves = [half_interval(row) for _, row in shown.iterrows()]
  is_evaluated = shown['event'] == 'eval'
  shown = shown.assign(
    reachable_auc=pd.Series(reachable, shown.index, float).where(is_evaluated),
    logloss=shown['logloss'].fillna(shown['rmse']),
    half_interval=pd.Series(halves, shown.index, float).where(is_evaluated),
  )
  last = shown.groupby('group').tail(1)
  constants = run.constants.loc[last.index].set_axis(last['group']).dropna(how='all')
  constants['logloss'] = constants['logloss'].fillna(constants['rmse'])
  shown = pd.concat([shown, constants.reindex(columns=shown.columns)])
  cells = {}
  for title, field, form in fields:
    if shown[field].notna().any():
      title = 'rmse' if field == 'logloss' and shown['rmse'].notna().any() else title
      form = f'.{decimals(field, shown[field].min())}f' if field == 'logloss' else form
      cells[title] = ['' if pd.isna(value) else format(value, form) for value in shown[field]]
  cells = pd.DataFrame(cells, shown.index)
  first = shortened(run.task, NAME_WIDTH)
  # Each column takes two characters more. A table of many columns leaves less room for the names of
  # passes, and none for the last ranking metrics.
  widths = {title: 2 + max(map(len, (title, *cells[title]))) for title in cells}
  left = WIDTH - 5 - max(len(first), len(GROUPS[0])) - sum(widths.values())
  for title, *_ in reversed(of_rankings):
    if left < LEAST_NAME_WIDTH:
      left += widths.pop(title, 0)
  cells = cells[list(widths)]
  room = min(NAME_WIDTH, max(left, LEAST_NAME_WIDTH))
  table = rich.table.Table(box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
  for title in (first, 'pass'):
    table.add_column(title, no_wrap=True)
  for title in cells:
    table.add_column(title, justify='right', no_wrap=True)
  best = None if run.best is None else run.best.name
  for group in GROUPS:
    rows = shown[shown['group'] == group]
    until_best = [] if best is None else rows.index[rows.index <= best][-1:]
    shared = os.path.commonprefix(rows['pass'].dropna().tolist())
    shown_rows = {*rows.index[:SHOWN_FIRST], *rows.index[-SHOWN_LAST:], *until_best}
    left_out = 0
    for index, name in rows['pass'].items():
      if index not in shown_rows:
        left_out += 1
        continue
      if left_out:
        told = f'{left_out} more not shown'
        table.add_row('', told if len(told) <= room else f'… {left_out} more')
        left_out = 0
      mark = 'best' if index == best else ''
      name = '' if pd.isna(name) else short_name(name, room, shared)
      table.add_row(mark or group, name, *cells.loc[index], style='bold' if mark else None)
    if group in constants.index:
      table.add_row('', run.baseline, *cells.loc[group], style='dim')
    table.add_section()
  rich.console.Console(width=WIDTH, markup=False).print(table)


def last_lines(run: RecordedRun, run_dir: str) -> Iterator[str]:
  """Yields the lines below the closing table: the kept state, findings, sizes, next commands."""
  decides = run.deciding
  if (best := decides.best) is not None:
    what = f'{run.deciding_task} {decides.metric}'.strip()
    value = metric_text(decides.metric, best[decides.metric])
    yield f'kept: epoch {best["epoch"]:.0f}, the best of data.valid: {what} {value}'
  elif len(trained := run.of('train')):
    yield f'kept: the last state, after {short_name(trained.iloc[-1]["pass"], NAME_WIDTH)}'
  for run_of_task in run.by_task():
    for _, test in run_of_task.evaluated('test').tail(1).iterrows():
      names = [n for n in (*config.METRICS, *run.cfg.ranking_metrics) if pd.notna(test.get(n))]
      several = bool(run_of_task.task)
      values = [f'{n} {metric_text(n, test[n])}{plus_minus(n, test, several)}' for n in names]
      yield f'test: {run_of_task.task} {", ".join(values)}'.replace('  ', ' ')
      for line in baseline_lines(test.dropna()):
        yield from textwrap.wrap(line, WIDTH, initial_indent=' ' * 6, subsequent_indent=' ' * 8)
      bound = run_of_task.reachable(test['pass'], 'auc')
      if bound is not None:
        yield f'      the true probabilities reach AUC {bound:.4f}'
  is_last = best is not None and best['epoch'] == run.cfg.train.epochs - 1 > 0
  # After a new day, more epochs would repeat that day.
  if is_last and not (run.begins_with_another or run.added_passes()):
    yield f'the last of {run.cfg.train.epochs} epochs was the best: more may help (train.epochs)'
  findings = faults(run)
  for finding in findings[:MOST_FINDINGS]:
    yield from textwrap.wrap(
      finding.sentence, WIDTH, subsequent_indent='  ', break_on_hyphens=False
    )
  if len(findings) > MOST_FINDINGS:
    yield f'{len(findings)} findings in report.html'
  entries = sorted(os.scandir(run.directory), key=lambda entry: entry.name)
  sizes = {entry.name: files.size_of(entry.path) / 1e6 for entry in entries}
  shown = [f'{name} {size:,.1f} MB' for name, size in sizes.items() if size >= SHOWN_MEGABYTES]
  text = f'{run_dir}, {sum(sizes.values()):,.1f} MB: {", ".join(shown)}'
  yield from textwrap.wrap(text.removesuffix(': '), WIDTH, subsequent_indent='  ')
  yield 'next:'
  directory = shlex.quote(run_dir)
  if tries := next((f.figures['command'] for f in findings if f.figures.get('may_go')), ''):
    yield f'  {tries}'
  yield f'  ctr-evaluate --run_dir {directory} --data FILE'
  if run.cfg.ranking_metrics:
    yield f'  ctr-predict --run_dir {directory} --data FILE --k 20 --out recommendations.csv'
    return
  yield f'  ctr-predict --run_dir {directory} --data FILE --out probabilities.txt'
  if run.cfg.export.base or run.cfg.export.delta_every_passes:
    yield f'  ctr-serve --run_dir {directory}'
  else:
    yield f'  ctr-export --run_dir {directory} --kind saved_model'
