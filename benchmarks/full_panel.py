"""Logs at full size, nothing tuned, beside what else one would try: `benchmarks.panel --full`.

It rewrites that part of docs/quality.md. Each model is a process of its own, which reads the CSV
files, trains, and scores test; so CPU seconds and peak memory are those of the whole way. A peer
stops improving after ten minutes of CPU. Finished runs in build/full_panel/ are kept, and the table
holds what was run: `--logs frappe` runs a part of it. Logs in CHOOSE chose the defaults, the others
confirm them. Ours is trained with all seeds where rows are few. `--name mine --set a.b=c` prints a
variant of ours in place of the defaults; the picture has the variants `ensemble`
(`--set model.recipe=ensemble`) and `plain` (`--set data.crosses=[]`) too.
"""

import contextlib
import functools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import yaml
from sklearn.metrics import roc_auc_score

from benchmarks.page import markdown_table
from benchmarks.panel_logs import FULL as LOGS
from benchmarks.run import CONTENDERS

OUT = os.path.join('build', 'full_panel')
PEERS = ('LR', 'LightGBM', 'CatBoost')
PEER_SECONDS, SECONDS_BETWEEN_LOOKS = 600, 0.05
FEW_ROWS = 100_000  # below, one seed says little
CHOOSE = ('frappe', 'films', 'adult', 'census')
PICTURE = os.path.join('docs', 'flights_2001.svg')
CURVES = {  # file of figures -> its curve in the picture
  'LR': 'LR',
  'LightGBM': 'LightGBM',
  'ours_ensemble': 'ours, the ensemble',
  'ours_plain': 'ours, plain, no crosses',
  'ours_defaults': 'ours, the defaults',
}


def figures(labels: np.ndarray, p: np.ndarray) -> dict[str, float]:
  """Returns AUC, logloss and calibration."""
  p = np.clip(p.astype(float), 1e-7, 1 - 1e-7)
  constant = p.std() == 0
  return {
    'auc': 0.5 if constant else roc_auc_score(labels, p),
    'logloss': -np.mean(np.where(labels > 0, np.log(p), np.log1p(-p))),
    'calibration': p.sum() / labels.sum(),
  }


def _write(name: str) -> None:
  """Writes the files of a log, unless they are there."""
  folder = os.path.join(OUT, name)
  meta_path = os.path.join(folder, 'meta.json')
  if not os.path.exists(meta_path):
    os.makedirs(folder, exist_ok=True)
    parts, meta = LOGS[name]()
    columns = ['label', *meta['slots'], *meta['dense']]
    for split, part in parts.items():
      part[columns].to_csv(os.path.join(folder, f'{split}.csv'), index=False)
    labels = {split: part['label'].astype(int) for split, part in parts.items()}
    rate, test = labels['train'].mean(), labels['test']
    meta['rows'] = len(labels['train'])
    meta['constant'] = -float(np.where(test, np.log(rate), np.log1p(-rate)).mean())
    with open(meta_path, 'w', encoding='utf-8') as f:
      json.dump(meta, f)


def meta_of(folder: str) -> dict[str, Any]:
  with open(os.path.join(folder, 'meta.json'), encoding='utf-8') as f:
    return json.load(f)


def kept(path: str, measure: Callable[[], dict[str, Any]] | None) -> dict[str, Any] | None:
  """Returns the figures in a file; if there are none, it measures and writes them, or None."""
  if not os.path.exists(path):
    if measure is None:
      return None
    found = measure()
    with open(path, 'w', encoding='utf-8') as f:
      json.dump(found, f)
  with open(path, encoding='utf-8') as f:
    return json.load(f)


def run_on_one_thread(command: Sequence[str], log: str) -> dict[str, float]:
  """Runs a command on one thread; returns its CPU seconds and its peak memory."""
  environment, mib = os.environ | {'CTR_THREADS': '1', 'OMP_NUM_THREADS': '1'}, 0.0
  with open(log, 'w', encoding='utf-8') as f:
    process = subprocess.Popen(command, stdout=f, stderr=f, env=environment)
  while not (ended := os.wait4(process.pid, os.WNOHANG))[0]:
    # ru_maxrss would count the memory of this process too, which the other one began as.
    with contextlib.suppress(OSError), open(f'/proc/{process.pid}/status', encoding='utf-8') as f:
      peak = re.search(r'VmHWM:\s+(\d+) kB', f.read())
      mib = max(mib, int(peak[1]) / 1024 if peak else 0)
    time.sleep(SECONDS_BETWEEN_LOOKS)
  _, status, used = ended
  if status:
    raise SystemExit(f'{" ".join(command)}: status {os.waitstatus_to_exitcode(status)}; see {log}')
  return {'seconds': used.ru_utime + used.ru_stime, 'mib': mib}


def _peer(folder: str, model: str, seed: int) -> dict[str, float]:
  out = os.path.join(folder, f'{model}_{seed}.npy')
  python = os.path.join(CONTENDERS, 'bin', 'python')
  script = os.path.join('benchmarks', 'contenders', 'full_peer.py')
  command = [python, script, folder, model, str(seed), str(PEER_SECONDS), out]
  used = run_on_one_thread(command, os.path.join(folder, f'{model}_{seed}.log'))
  labels = pd.read_csv(os.path.join(folder, 'test.csv'), usecols=['label'])['label'].to_numpy()
  return used | figures(labels, np.load(out))


def write_config(folder: str, name: str, data: dict[str, Any], **more: Any) -> str:
  """Writes the config NAME.yaml; returns its path.

  The section `data` names the files, as given, and the columns of the log; `more` are other keys.
  """
  meta = meta_of(folder)
  slots = [{'name': n} for n in meta['slots']]
  for slot in slots:
    if slot['name'] in meta['separators']:
      slot['separator'] = meta['separators'][slot['name']]
  if 'history' in meta['slots']:
    slots[-1]['shares'] = 'movieId'
  dense = [{'name': n, 'transform': how} for n, how in meta['transform'].items()]
  tree = {
    'data': {**data, 'slots': slots, 'dense': dense},
    'model': {'interactions': ['linear', 'fm', 'dnn']},
    **more,
  }
  path = os.path.join(folder, f'{name}.yaml')
  with open(path, 'w', encoding='utf-8') as f:
    yaml.safe_dump(tree, f)
  return path


def _ours(folder: str, name: str, settings: Sequence[str], seed: int) -> dict[str, float]:
  data = {s: [os.path.join(folder, f'{s}.csv')] for s in ('train', 'valid', 'test')}
  config = write_config(folder, 'ours', data)
  run_dir = os.path.join(folder, f'ours_{name}_{seed}')
  command = [sys.executable, '-m', 'trainer.run', '--config', config, '--run_dir', run_dir]
  for setting in [f'seed={seed}', *settings]:
    command += ['--set', setting]
  used = run_on_one_thread(command, f'{run_dir}.log')
  with open(os.path.join(run_dir, 'metrics.jsonl'), encoding='utf-8') as f:
    events = [json.loads(text) for text in f]
  test = [e for e in events if e['event'] == 'eval' and e['split'] == 'test'][-1]
  return used | {key: test[key] for key in ('auc', 'logloss', 'calibration')}


def _kept_ours(
  folder: str, name: str, settings: Sequence[str], seed: int, runs: bool
) -> dict[str, float] | None:
  measure = functools.partial(_ours, folder, name, settings, seed) if runs else None
  return kept(os.path.join(folder, f'ours_{name}_{seed}.json'), measure)


def title(log: str, chose: Sequence[str] = CHOOSE) -> str:
  """Returns the name of a log in a table, with a star if it did not choose the defaults."""
  return f'{log}{"" if log in chose else chr(92) + "*"}'.replace('_', ' ')


def table(logs: Sequence[str], name: str, settings: Sequence[str], seed: int) -> str:
  """Runs what is missing of `logs`; returns the table of all logs on which ours was run."""
  head = ['log', 'training rows', 'constant', *PEERS, 'ours', 'over the best', 'calibration']
  rows, over = [], []
  for log in LOGS:
    runs, folder = log in logs, os.path.join(OUT, log)
    if runs:
      _write(log)
    of = {}
    for peer in PEERS:
      measure = functools.partial(_peer, folder, peer, seed) if runs else None
      of[peer] = kept(os.path.join(folder, f'{peer}_{seed}.json'), measure)
    ours = of['ours'] = _kept_ours(folder, name, settings, seed, runs)
    if ours is None:
      continue
    meta, losses = meta_of(folder), [of[peer]['logloss'] for peer in PEERS if of[peer]]
    over.append(ours['logloss'] - min(losses))
    cells = [
      f'{f["auc"]:.4f} / {f["logloss"]:.4f}, {f["seconds"]:.0f} s, {f["mib"]:,.0f} MiB'
      if f
      else '–'
      for f in of.values()
    ]
    rows.append([title(log), f'{meta["rows"]:,}', f'{meta["constant"]:.4f}', *cells])
    rows[-1] += [f'{over[-1]:+.4f}', f'{ours["calibration"]:.3f}']
    print(' | '.join(rows[-1]), flush=True)
  mean = f'Ours over the best, in the mean {np.mean(over):+.4f}, at most {max(over):+.4f}.'
  return f'{markdown_table(head, rows)}\n\n{mean}'


def table_of_seeds(
  logs: Sequence[str], name: str, settings: Sequence[str], seeds: Sequence[int]
) -> str:
  """Runs ours with all seeds on those of `logs` with few rows; returns the table of all such."""
  rows = []
  for log in LOGS:
    folder = os.path.join(OUT, log)
    if not os.path.exists(os.path.join(folder, 'meta.json')) or meta_of(folder)['rows'] >= FEW_ROWS:
      continue
    each = [_kept_ours(folder, name, settings, seed, log in logs) for seed in seeds]
    if None in each:
      continue
    peers = [kept(os.path.join(folder, f'{peer}_{seeds[0]}.json'), None) for peer in PEERS]
    middle = np.median([f['logloss'] for f in each])
    cells = [f'{f["auc"]:.4f} / {f["logloss"]:.4f}, {f["seconds"]:.0f} s' for f in each]
    over = middle - min(f['logloss'] for f in peers if f)
    rows.append([title(log), *cells, f'{middle:.4f}', f'{over:+.4f}'])
  head = ['log', *(f'seed {seed}' for seed in seeds), 'median logloss', 'over the best']
  return markdown_table(head, rows)


def picture(path: str, seed: int) -> None:
  """Draws logloss by training rows on the flights of 2001, a curve per model that was run."""
  import matplotlib

  matplotlib.use('Agg')
  from matplotlib import pyplot

  matplotlib.rcParams |= {'svg.fonttype': 'none', 'svg.hashsalt': 'flights'}
  folders = [os.path.join(OUT, log) for log in LOGS if log.startswith('flights_2001')]
  of = {f: meta_of(f) for f in folders if os.path.exists(os.path.join(f, 'meta.json'))}
  figure, axes = pyplot.subplots(figsize=(6, 3.2), layout='constrained')
  rows, constant = [m['rows'] for m in of.values()], [m['constant'] for m in of.values()]
  axes.semilogx(rows, constant, ':', color='#444444', label='constant')
  for model, label in CURVES.items():
    found = {f: kept(os.path.join(f, f'{model}_{seed}.json'), None) for f in of}
    known = [(of[f]['rows'], figures['logloss']) for f, figures in found.items() if figures]
    if known:
      axes.semilogx(*zip(*known), marker='o', label=label)
  axes.set_xticks(rows, [f'{n:,}' for n in rows])
  axes.minorticks_off()
  axes.set_xlabel('training rows')
  axes.set_ylabel('logloss on test')
  axes.legend(frameon=False, fontsize=8)
  axes.spines[['top', 'right']].set_visible(False)
  figure.savefig(path, metadata={'Date': None})
