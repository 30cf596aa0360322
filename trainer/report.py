"""What a run leaves to read: one live line, metrics.jsonl, TensorBoard scalars, a closing table and report.html."""
import base64
import html
import io
import json
import os
import sys
import time

import matplotlib
import rich.box
import rich.console
import rich.table
import tensorflow as tf

from trainer import config

matplotlib.use('Agg')
import matplotlib.pyplot as plt

SCALARS = ('logloss', 'auc', 'gauc', 'calibration', 'rmse', 'examples_per_second', 'features', 'admitted', 'evicted', 'table_bytes')


class Reporter:
  """Writes what happens to `run_dir`; on ranks other than 0 it does nothing.

  Args:
    start: bytes of metrics.jsonl to keep: what a checkpoint had seen. Later lines belong to work that is done again.
  """

  def __init__(self, run_dir, active, start=0):
    self._active = active
    if not active:
      return
    self.path = os.path.join(run_dir, 'metrics.jsonl')
    self._file = open(self.path, 'ab')
    self._file.truncate(start)
    self._board = tf.summary.create_file_writer(os.path.join(run_dir, 'tensorboard'))
    self._line_length = 0

  @property
  def position(self):
    """Bytes of metrics.jsonl written so far."""
    return self._file.tell() if self._active else 0

  def event(self, event, step, **fields):
    """Writes one event (train | eval | day_end | save | export) to metrics.jsonl and its numbers to TensorBoard."""
    if not self._active:
      return
    record = {'event': event, 'step': step, **{k: v for k, v in fields.items() if v is not None}, 'time': round(time.time(), 3)}
    self._file.write((json.dumps(record) + '\n').encode())
    self._file.flush()
    with self._board.as_default(step=step):
      for name in SCALARS:
        if isinstance(record.get(name), (int, float)):
          tf.summary.scalar(f'{event}/{name}', record[name])
    self._board.flush()

  def live(self, text, last=False):
    """Shows `text` in place of the line before; `last` leaves it standing."""
    if not self._active:
      return
    # The carriage return comes last: horovodrun forwards a rank's line when it sees one.
    sys.stdout.write(text.ljust(self._line_length) + ('\n' if last else '\r'))
    sys.stdout.flush()
    self._line_length = 0 if last else len(text)


def read_events(run_dir):
  """The events of a run: list of dicts, in order."""
  with open(os.path.join(run_dir, 'metrics.jsonl'), encoding='utf-8') as f:
    return [json.loads(line) for line in f]


def best_reachable(cfg):
  """Figures of the true probabilities, where the log was synthesized: pass name -> dict auc, logloss (truth.json beside the files)."""
  bounds = {}
  for path in config.expand([*cfg.data.train, *cfg.data.valid, *cfg.data.test], 'data'):
    truth = os.path.join(os.path.dirname(path), 'truth.json')
    if os.path.exists(truth):
      with open(truth, encoding='utf-8') as f:
        bounds |= json.load(f)['passes']
  return bounds


def close(cfg):
  """Prints the closing table and writes report.html; once, by rank 0, when the run is done."""
  bounds = best_reachable(cfg)
  closing_table(read_events(cfg.run_dir), bounds)
  write_html(cfg.run_dir, cfg.run_dir, bounds)
  print(f'metrics.jsonl, report.html, checkpoints/ and tensorboard/ lie in {cfg.run_dir}')


def _number(value, form):
  return '' if value is None else format(value, form)


def closing_table(events, bounds):
  """Prints what was trained, what validation and test said, and what the tables hold; beside it the best that could be reached."""
  table = rich.table.Table(box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
  for name in ('event', 'pass', 'day', 'samples', 'logloss', 'AUC', 'best AUC', 'GAUC', 'calibr.', 'samples/s', 'features', 'admitted', 'evicted', 'MB'):
    table.add_column(name, justify='left' if name in ('event', 'pass') else 'right')
  for e in events:
    if e['event'] not in ('train', 'eval', 'day_end'):
      continue
    best = bounds.get(e.get('pass'), {}).get('auc') if e['event'] == 'eval' else None
    name = ' '.join(filter(None, [e['event'], e.get('split')]))
    table.add_row(name, str(e.get('pass', '')), str(e.get('day', '')), _number(e.get('examples'), ','), _number(e.get('logloss', e.get('rmse')), '.4f'),
                  _number(e.get('auc'), '.4f'), _number(best, '.4f'), _number(e.get('gauc'), '.4f'), _number(e.get('calibration'), '.3f'),
                  _number(e.get('examples_per_second'), ',.0f'), _number(e.get('features'), ','), _number(e.get('admitted'), ','),
                  _number(e.get('evicted'), ','), _number(e['table_bytes'] / 1e6 if 'table_bytes' in e else None, ',.1f'))
  console = rich.console.Console(width=None if sys.stdout.isatty() else 150)
  console.print(table)
  for e in events[::-1]:
    best = bounds.get(e.get('pass'))
    if e['event'] == 'eval' and best:
      console.print(f"{e['split']} {e['pass']}: AUC {e['auc']:.4f}, logloss {e['logloss']:.4f}; "
                    f"the true probabilities reach AUC {best['auc']:.4f}, logloss {best['logloss']:.4f}", highlight=False)
      break


def write_html(run_dir, title, bounds):
  """Writes report.html: curves of quality, speed and tables over the passes, and the events as a table."""
  events = read_events(run_dir)
  figure, axes = plt.subplots(2, 2, figsize=(11, 6.5), constrained_layout=True)
  panels = (('auc', 'AUC'), ('logloss', 'logloss'), ('examples_per_second', 'samples/s'), ('features', 'features'))
  for axis, (name, label) in zip(axes.flat, panels):
    for kind in ('train', 'eval', 'day_end'):
      points = [(e['step'], e[name]) for e in events if e['event'] == kind and name in e]
      if points:
        axis.plot(*zip(*points), marker='.', label=kind)
    if name == 'features':
      points = [(e['step'], e['admitted']) for e in events if 'admitted' in e]
      if points:
        axis.plot(*zip(*points), marker='.', label='admitted')
    points = [(e['step'], bounds[e['pass']][name]) for e in events if e['event'] == 'eval' and name in bounds.get(e.get('pass'), {})]
    if points:
      axis.plot(*zip(*points), ls=':', c='grey', label='best reachable')
    axis.set(title=label, xlabel='step')
    if axis.get_legend_handles_labels()[0]:
      axis.legend(fontsize=7)
  image = io.BytesIO()
  figure.savefig(image, format='png', dpi=110)
  plt.close(figure)
  columns = ['event', 'pass', 'day', 'step', 'examples', *SCALARS]
  rows = ''.join('<tr>' + ''.join(f'<td>{html.escape(f"{e[c]:.6g}" if isinstance(e.get(c), float) else str(e.get(c, "")))}</td>' for c in columns) + '</tr>'
                 for e in events)
  page = (f'<!doctype html><meta charset="utf-8"><title>{html.escape(title)}</title><style>body{{font:14px sans-serif;margin:2em}}'
          'table{border-collapse:collapse}td,th{padding:2px 8px;border-bottom:1px solid #ddd;text-align:right}</style>'
          f'<h1>{html.escape(title)}</h1><img src="data:image/png;base64,{base64.b64encode(image.getvalue()).decode()}">'
          f"<table><tr>{''.join(f'<th>{c}</th>' for c in columns)}</tr>{rows}</table>")
  with open(os.path.join(run_dir, 'report.html'), 'w', encoding='utf-8') as f:
    f.write(page)
