"""Numbers as features: `python -m benchmarks.numbers` rewrites its tables in docs/quality.md.

It trains FM and FFM with numeric columns as dense columns, which only `linear` reads, and with 20
quantile bins of them as further slots; and DeepFM with plain scaling, with bins, and with each kind
of `model.dense_embedding`. For each seed it splits the small logs, Criteo's 10,000 rows and Avazu's
9,000, anew, 6:2:2. Their learning rates, and the metric that chooses the epoch, were chosen on
Criteo's validation data for FM without bins. Avazu has no numbers, so some of its ids are read as
numbers too. On census and flights rows learn at 0.2, with bins or without. Finished runs in
build/numbers/ are kept.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from absl import app

from benchmarks.compared_logs import (
  LOGS,
  Splits,
  census_log,
  columns_of,
  evaluated,
  flights_log,
  of_test,
)
from benchmarks.page import ROOT, made_by, markdown_table, write_between
from benchmarks.tasks_data import SHARED

OUT = os.path.join('build', 'numbers')
PAGE = os.path.join('docs', 'quality.md')
SEEDS = (1, 2, 3)
BINS = 20


def _cut(name: str, lines: list[str], seed: int) -> Splits:
  """Writes the lines in random order into three files."""
  drawn = np.array(lines, object)[np.random.default_rng(seed).permutation(len(lines))]
  paths, ends = {}, (len(lines) * 6 // 10, len(lines) * 8 // 10)
  for split, some in zip(('train', 'valid', 'test'), np.split(drawn, ends)):
    paths[split] = [os.path.join(OUT, f'{name}_{split}_{seed}.csv')]
    with open(paths[split][0], 'w', encoding='utf-8') as f:
      f.writelines(some)
  return paths


def criteo_log(seed: int) -> Splits:
  with open(os.path.join(SHARED, 'criteo_10k', 'criteo_first10000.txt'), encoding='utf-8') as f:
    return _cut('criteo', f.readlines(), seed)


def avazu_log(seed: int) -> Splits:
  folder = os.path.join(SHARED, 'avazu_9k')
  names = columns_of('configs/avazu.yaml', 'columns')['columns']
  frames = [
    pd.read_csv(os.path.join(folder, f'{split}.csv'), names=names, dtype=str)
    for split in ('train', 'dev', 'test')
  ]
  rows = pd.concat(frames)
  rows = rows[rows['click'] != 'click'].drop_duplicates('id')
  lines = rows.to_csv(index=False, header=False).splitlines(keepends=True)
  return _cut('avazu', lines, seed)


AVAZU_NUMBERS = [
  {'name': f'{c}_number', 'from': {'expression': c}, 'transform': 'log1p_standardise'}
  for c in ('C14', 'C16', 'C17', 'C19', 'C20', 'C21')
]
LOW, HIGH = ({'linear': r, 'factors': r} for r in ({'learning_rate': 0.01}, {'learning_rate': 0.2}))
SMALL = {
  'sparse': LOW,
  'train': {'plateau': {'metric': 'logloss'}},
}
# log -> its name, a function that writes it, its data section, and settings of table and training
LOGS_OF_NUMBERS: dict[str, tuple[str, Callable[[int], Splits], dict[str, Any], dict[str, Any]]] = {
  'criteo': (
    'Criteo, 10,000 rows',
    criteo_log,
    columns_of('configs/criteo.yaml', 'delimiter', 'columns', 'label'),
    SMALL,
  ),
  'avazu': (
    'Avazu, 9,000 rows',
    avazu_log,
    columns_of('configs/avazu.yaml', 'columns', 'label')
    | {'label': 'click', 'dense': AVAZU_NUMBERS},
    SMALL,
  ),
  'census': ('census income', lambda _: census_log(), LOGS['census'][2], {'sparse': HIGH}),
  'flights': ('flights', lambda _: flights_log(), LOGS['flights'][2], {'sparse': HIGH}),
}


def _binned(data: Mapping[str, Any]) -> dict[str, Any]:
  """Adds a slot of bins for each dense column."""
  bins = [
    {'name': f'bin_{c["name"]}', 'from': {'bins': c['name'], 'quantiles': BINS}}
    for c in data['dense']
  ]
  return {**data, 'slots': [*data['slots'], *bins]}


MODELS = {
  'FM': (4, ['linear', 'fm']),
  'FFM': (4, ['linear', 'ffm']),
  'DeepFM': (8, ['linear', 'fm', {'dnn': {'hidden': [64, 32], 'dropout': 0.1}}]),
}


def figures(log: str, model: str, how: str) -> str:
  """Trains on a log; returns the medians of AUC and logloss on test, and each seed's AUC.

  Args:
    log: a key of LOGS_OF_NUMBERS.
    model: a key of MODELS.
    how: plain, bins, or a kind of model.dense_embedding.
  """
  _, write, data, settings = LOGS_OF_NUMBERS[log]
  width, interactions = MODELS[model]
  found = []
  for seed in SEEDS:
    run = {
      'data': (_binned(data) if how == 'bins' else data) | write(seed),
      'sparse': {'tables': {'default': {'width': width} | settings.get('sparse', {})}},
      'model': {'interactions': interactions}
      | ({} if how in ('plain', 'bins') else {'dense_embedding': how}),
      'train': settings.get('train', {}),
    }
    run_dir = os.path.join(OUT, f'{log}_{model}_{how}_{seed}')
    found.append(of_test(evaluated(run_dir, run, seed)))
  auc, logloss = np.median(found, 0)
  return f'{auc:.4f} / {logloss:.4f} ({", ".join(f"{a:.4f}" for a, _ in found)})'


def main(argv: list[str]) -> None:
  os.makedirs(OUT, exist_ok=True)
  os.makedirs(os.path.join('build', 'compared_logs'), exist_ok=True)
  logs = argv[1:] or list(LOGS_OF_NUMBERS)
  names = {log: LOGS_OF_NUMBERS[log][0] for log in logs}
  ways = [(model, how) for model in ('FM', 'FFM') for how in ('plain', 'bins')]
  rows = [[names[log], *(figures(log, *way) for way in ways)] for log in logs]
  text = markdown_table(['log', *(' with '.join(way) for way in ways)], rows)
  kinds = ('plain', 'bins', 'autodis', 'piecewise_linear')
  rows = [
    [names[log], *(figures(log, 'DeepFM', how) for how in kinds)]
    for log in logs
    if log != 'flights'
  ]
  text += '\n\n' + markdown_table(['log', *(f'DeepFM with {kind}' for kind in kinds)], rows)
  text += f'\n\n{made_by()}'
  print(text)
  if logs == list(LOGS_OF_NUMBERS):
    write_between(PAGE, text, 'benchmarks.numbers')


if __name__ == '__main__':
  os.chdir(ROOT)
  app.run(main)
