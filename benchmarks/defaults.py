"""How good the defaults are: `python -m benchmarks.defaults` rewrites that part of docs/quality.md.

On each of four logs it trains FM that gives only the `kind` of the row optimizers, with the same
number of epochs for each kind, and DeepFM that gives nothing, beside DeepFM with tuned settings.
Then it trains the same FM on 4,000 rows of three logs, and DeepFM on 2 ranks beside one process.
FM should have at most .015 less AUC than the best kind, DeepFM .004 less than when tuned, few rows
a logloss below the base rate's, and 2 ranks at most .0005 AUC less or more than one process. Runs
lie in build/defaults/, and finished ones are kept: remove them after a change of the defaults.
`--only demo`, `--only small` and so on do a part and only print it.
"""

import os
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import yaml
from absl import app, flags

from benchmarks.compared_logs import (
  LOGS,
  demo_log,
  evaluated,
  fm_settings,
  frappe_log,
  of_test,
  prepared,
  raw,
)
from benchmarks.page import ROOT, made_by, markdown_table, write_between
from ops.row_kinds import ROW_OPTIMIZERS

OUT = os.path.join('build', 'defaults')
PAGE = os.path.join('docs', 'quality.md')
KINDS = tuple(ROW_OPTIMIZERS)
FM_MARGIN, DEEPFM_MARGIN, RANKS_MARGIN = 0.015, 0.004, 0.0005
SEEDS = (1, 2, 3)  # of DeepFM
RANKS_EPOCHS = 2
SMALL_ROWS, SMALL_VALID_ROWS = 4000, 2000
PARTS = (*LOGS, 'small', 'ranks')
SELECTED = flags.DEFINE_list('only', list(PARTS), 'Logs to train on, or the tables small, ranks.')


def fm(name: str, kind: str) -> float:
  """Returns the best AUC of FM on validation."""
  data, train = prepared(name) | {'test': []}, {'epochs': LOGS[name][3]}
  settings = {'data': data, **fm_settings(kind), 'train': train}
  return evaluated(os.path.join(OUT, f'{name}_fm_{kind}'), settings)['auc'].max()


def deepfm(name: str, which: str) -> list[tuple[float, float]]:
  """Returns AUC and logloss of DeepFM on test for each seed; `which`: default or tuned."""
  settings = {'model': {'interactions': ['linear', 'fm', 'dnn']}}
  if which == 'tuned':
    settings = LOGS[name][4]
  # What is prepared for FM lacks the bins that DeepFM has by default.
  data = raw(name) if which == 'default' else prepared(name)
  settings = {'data': data, **settings}
  run_dir = os.path.join(OUT, f'{name}_deepfm_{which}')
  return [of_test(evaluated(f'{run_dir}_seed{seed}', settings, seed)) for seed in SEEDS]


def small_log(name: str, data: Mapping[str, Any], splits: Mapping[str, pd.DataFrame]) -> Any:
  """Draws few rows of a log; returns their data section and the base rate's logloss on test."""
  rows = splits['train'].sample(SMALL_ROWS + SMALL_VALID_ROWS, random_state=1)
  parts = {'train': rows[:SMALL_ROWS], 'valid': rows[SMALL_ROWS:], 'test': splits['test']}
  paths = {split: os.path.join(OUT, f'small_{name}_{split}.csv') for split in parts}
  for split, part in parts.items():
    part.to_csv(paths[split], index=False)
  clicks = {
    split: part[data['label']].astype(str).str.fullmatch(data.get('label_positive', '1'))
    for split, part in parts.items()
  }
  rate = clicks['train'].mean()
  base = -np.where(clicks['test'], np.log(rate), np.log1p(-rate)).mean()
  return {**data, **{split: [path] for split, path in paths.items()}}, base


def small_logs() -> dict[str, Any]:
  """Returns the data section and the base rate's logloss of each log."""
  found = {}
  for name, write in (('frappe', frappe_log), ('demo', demo_log)):
    splits = {s: pd.concat(map(pd.read_csv, paths)) for s, paths in write().items()}
    found[LOGS[name][0]] = small_log(name, LOGS[name][2], splits)
  with open(os.path.join(ROOT, 'configs', 'adult.yaml'), encoding='utf-8') as f:
    adult = yaml.safe_load(f)['data']
  names = adult.pop('columns')
  splits = {
    split: pd.read_csv(adult[split][0], names=names, skipinitialspace=True)
    for split in ('train', 'test')
  }
  return found | {'adult': small_log('adult', adult, splits)}


def small() -> str:
  """Returns the table of FM on few rows."""
  logs = small_logs()
  rows = []
  for kind in KINDS:
    cells = []
    for name, (data, base) in logs.items():
      settings = {'data': data, **fm_settings(kind)}
      auc, logloss = of_test(evaluated(os.path.join(OUT, f'small_{name}_fm_{kind}'), settings))
      worse = ' (worse than the base rate)' if logloss > base else ''
      cells.append(f'{auc:.4f} / {logloss:.4f}{worse}')
    rows.append([f'`{kind}`', *cells])
  rows.append(['the base rate', *(f'0.5 / {base:.4f}' for _, base in logs.values())])
  text = f'FM on {SMALL_ROWS:,} rows, AUC / logloss on test of the epoch that is best on validation'
  return f'{text} ({SMALL_VALID_ROWS:,} rows):\n\n' + markdown_table(['kind', *logs], rows)


def ranks() -> str:
  """Returns the table of DeepFM on 2 ranks."""
  data = raw('frappe')
  settings = {'data': data, 'model': {'interactions': ['linear', 'fm', 'dnn']}}
  settings['train'] = {'epochs': RANKS_EPOCHS}
  file = os.path.join(OUT, 'ranks.yaml')
  with open(file, 'w', encoding='utf-8') as f:
    yaml.safe_dump(settings, f)
  rows, apart = [], []
  for seed in SEEDS:
    reached = []
    for count in (1, 2):
      run_dir = os.path.join(OUT, f'ranks_{count}_seed{seed}')
      if not os.path.exists(os.path.join(run_dir, 'metrics.csv')) and count > 1:
        command = ['launch/local.sh', str(count), '--config', file, '--run_dir', run_dir]
        subprocess.run([*command, '--set', f'seed={seed}'], check=True)
      # For a finished run this reads its figures.
      reached.append(of_test(evaluated(run_dir, settings, seed)))
    apart.append(reached[1][0] - reached[0][0])
    rows.append([str(seed), *(f'{a:.5f} / {b:.5f}' for a, b in reached), f'{apart[-1]:+.5f}'])
  middle = statistics.median(apart)
  far = f'; wanted at most {RANKS_MARGIN:.4f}' if abs(middle) > RANKS_MARGIN else ''
  head = ['seed', 'one process', '2 ranks', 'AUC apart']
  return (
    f'DeepFM by default on Frappe, {RANKS_EPOCHS} epochs, AUC / logloss on test:\n\n'
    + markdown_table(head, rows)
    + f'\n\nIn the median {middle:+.5f}, from {min(apart):+.5f} to {max(apart):+.5f}{far}.'
  )


def told(value: float, best: float, margin: float) -> str:
  """Returns a figure, and how far it is below the best if that is too far."""
  short = best - value
  return f'{value:.4f}' + (f' ({short:.4f} below)' if short > margin else '')


def of_logs(logs: Sequence[str]) -> str:
  """Returns the tables of FM and DeepFM on whole logs."""
  reached = {(name, kind): fm(name, kind) for name in logs for kind in KINDS}
  best = {name: max(reached[name, kind] for kind in KINDS) for name in logs}
  head = ['kind', *(f'{LOGS[name][0]}, {LOGS[name][3]} epochs' for name in logs)]
  rows = [
    [f'`{kind}`', *(told(reached[name, kind], best[name], FM_MARGIN) for name in logs)]
    for kind in KINDS
  ]
  text = 'FM, best AUC of the epochs on validation, one seed:\n\n' + markdown_table(head, rows)
  rows = []
  for name in logs:
    default, tuned = (np.array(deepfm(name, which)) for which in ('default', 'tuned'))
    (auc, logloss), (tuned_auc, tuned_logloss) = np.median(default, 0), np.median(tuned, 0)
    rows.append(
      [
        LOGS[name][0],
        f'{told(auc, tuned_auc, DEEPFM_MARGIN)} / {logloss:.4f}',
        f'{tuned_auc:.4f} / {tuned_logloss:.4f}',
        *(', '.join(f'{value:.4f}' for value in found[:, 0]) for found in (default, tuned)),
      ]
    )
  text += '\n\nDeepFM, AUC / logloss on test of the epoch that is best on validation, medians:\n\n'
  head = ['log', 'all defaults', 'tuned', 'defaults, AUC of seeds 1, 2, 3', 'tuned, likewise']
  return text + markdown_table(head, rows)


def main(_: list[str]) -> None:
  for name in SELECTED.value:
    if name not in PARTS:
      raise app.UsageError(f"found '{name}'; wanted some of {', '.join(PARTS)}")
  os.makedirs(OUT, exist_ok=True)
  parts = SELECTED.value
  logs = [name for name in parts if name in LOGS]
  texts = [of_logs(logs)] if logs else []
  texts += [table() for name, table in (('small', small), ('ranks', ranks)) if name in parts]
  text = '\n\n'.join([*texts, made_by()])
  print(text)
  if set(parts) == set(PARTS):
    write_between(PAGE, text, 'benchmarks.defaults')
    print(f'wrote {PAGE}')


if __name__ == '__main__':
  os.chdir(ROOT)
  app.run(main)
