"""Small logs beside LightGBM: `python -m benchmarks.small_logs` rewrites that in docs/quality.md.

On each of four logs it trains LightGBM with ids as numbers and with target encoding (in training,
of the other folds), and DeepFM with defaults: as it is, with `counts: true` on every slot, and with
the numeric columns as such slots too. The figures are those of the test set at the round or epoch
that is best on validation, medians over seeds. DeepFM with counts should have at most .003 less AUC
than LightGBM with target encoding. Runs lie in build/small_logs/; finished ones are kept. `--logs
adult` and so on do a part and only print it.
"""

import json
import os
import re
import subprocess
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from absl import app, flags

from benchmarks.compared_logs import (
  LOGS,
  Splits,
  census_log,
  columns_of,
  demo_log,
  evaluated,
  flights_log,
  of_test,
)
from benchmarks.contenders import lightgbm_rounds
from benchmarks.page import ROOT, made_by, markdown_table, write_between
from benchmarks.run import CONTENDERS, contenders_environment
from trainer.model.slices import slice_figures

OUT = os.path.join('build', 'small_logs')
PAGE = os.path.join('docs', 'quality.md')
MARGIN = 0.003
FOLDS, SMOOTHING = 5, 20.0  # of target encoding


def adult_log() -> Splits:
  """Writes the published halves; a fifth of the training half is for validation."""
  columns = columns_of('configs/adult.yaml', 'columns', 'train', 'test')
  paths = {split: [os.path.join(OUT, f'adult_{split}.csv')] for split in ('train', 'valid', 'test')}
  train, test = (
    pd.read_csv(columns[split][0], names=columns['columns'], dtype=str, skipinitialspace=True)
    for split in ('train', 'test')
  )
  order = np.random.default_rng(0).permutation(len(train))
  cut = len(order) * 8 // 10
  for split, rows in (
    ('train', train.iloc[order[:cut]]),
    ('valid', train.iloc[order[cut:]]),
    ('test', test[test['income'].notna()]),
  ):
    rows.to_csv(paths[split][0], index=False)
  return paths


# log -> a function that writes it, and its columns
SMALL = {
  'adult': (adult_log, columns_of('configs/adult.yaml', 'label', 'label_positive')),
  'census': (census_log, LOGS['census'][2]),
  'flights': (flights_log, LOGS['flights'][2]),
  'made up': (
    lambda: demo_log(20_000, os.path.join(OUT, 'made_up')),
    columns_of('configs/demo.yaml', 'label'),
  ),
}
SELECTED = flags.DEFINE_list('logs', list(SMALL), 'Logs to train on.')
SEEDS = flags.DEFINE_list('seeds', ['1', '2', '3'], 'Seeds of each model.')


def target_encoded(
  categories: Mapping[str, pd.Series], clicks: np.ndarray, seed: int
) -> dict[str, np.ndarray]:
  """Returns the smoothed click rate of each category; in training, that in the other folds."""
  rate, fold = clicks.mean(), np.random.default_rng(seed).integers(0, FOLDS, len(clicks))

  def encoded(known: np.ndarray, of: pd.Series) -> np.ndarray:
    seen = pd.Series(clicks[known]).groupby(categories['train'].to_numpy()[known])
    rates = (seen.sum() + SMOOTHING * rate) / (seen.count() + SMOOTHING)
    return of.map(rates).fillna(rate).to_numpy(float, copy=True)

  found = {split: encoded(np.ones(len(clicks), bool), of) for split, of in categories.items()}
  for i in range(FOLDS):
    found['train'][fold == i] = encoded(fold != i, categories['train'][fold == i])
  return found


def lightgbm(
  name: str, paths: Splits, columns: Mapping[str, Any], encoding: str, seed: int
) -> tuple[float, float]:
  """Returns AUC and logloss on test of LightGBM.

  Args:
    name: the name of the log.
    paths: its files.
    columns: the columns of its data section.
    encoding: numbers or targets.
    seed: the seed of the folds and of LightGBM.
  """
  file = os.path.join(OUT, f'{name.replace(" ", "_")}_lightgbm_{encoding}_seed{seed}')
  texts = {
    split: pd.concat(pd.read_csv(p, dtype=str, keep_default_na=False) for p in some)
    for split, some in paths.items()
  }
  positive = re.compile(columns.get('label_positive', '1'))
  labels = {
    split: text[columns['label']].map(lambda t: positive.fullmatch(t) is not None).to_numpy(float)
    for split, text in texts.items()
  }
  if not os.path.exists(f'{file}.npy'):
    arrays = {split: [] for split in texts}
    for slot in columns['slots']:
      categories = {split: text[slot.get('column', slot['name'])] for split, text in texts.items()}
      if slot.get('separator'):  # LightGBM reads one feature per slot: take the first
        categories = {
          s: c.str.split(slot['separator'], regex=False).str[0] for s, c in categories.items()
        }
      if encoding == 'numbers':
        ids = {text: i for i, text in enumerate(sorted(set().union(*categories.values())))}
        encoded = {split: of.map(ids).to_numpy(float) for split, of in categories.items()}
      else:
        encoded = target_encoded(categories, labels['train'], seed)
      for split in texts:
        arrays[split].append(encoded[split])
    for column in columns.get('dense', []):
      for split, text in texts.items():
        arrays[split].append(pd.to_numeric(text[column['name']], errors='coerce').to_numpy(float))
    stacked = {split: np.stack(some, 1) for split, some in arrays.items()}
    np.savez(f'{file}.npz', **stacked, **{f'{split}_label': y for split, y in labels.items()})
    python = os.path.join(CONTENDERS, 'bin', 'python')
    command = [python, lightgbm_rounds.__file__, f'{file}.npz', f'{file}.npy', str(seed)]
    subprocess.run(command, check=True)
  figures = slice_figures(labels['test'], np.load(f'{file}.npy'), np.ones(len(labels['test'])))
  return figures['auc'], figures['logloss']


def deepfm(
  name: str, paths: Splits, columns: Mapping[str, Any], counts: str, seed: int
) -> tuple[float, float]:
  """Returns AUC and logloss on test of DeepFM with defaults; `counts`: none, slots or all."""
  slots = [slot | {'counts': counts != 'none'} for slot in columns['slots']]
  if counts == 'all':
    slots += [
      {'name': f'{c["name"]} as slot', 'column': c['name'], 'counts': True}
      for c in columns.get('dense', [])
    ]
  settings = {
    'data': {**columns, **paths, 'slots': slots},
    'model': {'interactions': ['linear', 'fm', 'dnn']},
  }
  run_dir = os.path.join(OUT, f'{name.replace(" ", "_")}_deepfm_{counts}_seed{seed}')
  return of_test(evaluated(run_dir, settings, seed))


def of_log(name: str) -> list[str]:
  """Returns the row of the table for a log."""
  write, columns = SMALL[name]
  file = os.path.join(OUT, f'{name.replace(" ", "_")}.json')
  if not os.path.exists(file):
    paths = write()
    with open(file, 'w', encoding='utf-8') as f:
      json.dump(paths, f)
  with open(file, encoding='utf-8') as f:
    paths = json.load(f)
  found = {}
  for key, train, how in (
    ('numbers', lightgbm, 'numbers'),
    ('targets', lightgbm, 'targets'),
    *((counts, deepfm, counts) for counts in ('none', 'slots', 'all')),
  ):
    each = [train(name, paths, columns, how, int(seed)) for seed in SEEDS.value]
    found[key] = np.median(each, 0)
    print(f'{name}, {key}: ' + ', '.join(f'{a:.4f} / {b:.4f}' for a, b in each), flush=True)
  best = max(found['slots'][0], found['all'][0])
  apart = f'{best - found["targets"][0]:+.4f}'
  return [name, *(f'{auc:.4f} / {logloss:.4f}' for auc, logloss in found.values()), apart]


def main(_: list[str]) -> None:
  if unknown := set(SELECTED.value) - set(SMALL):
    raise app.UsageError(f"found '{min(unknown)}'; wanted some of {', '.join(SMALL)}")
  if why := contenders_environment():
    raise SystemExit(f'no LightGBM: {why}')
  os.makedirs(OUT, exist_ok=True)
  head = ['log', 'LightGBM, ids as numbers', 'LightGBM, target encoding', 'DeepFM, all defaults']
  head += ['`counts` on slots', '`counts`, numbers as slots too', 'AUC beside target encoding']
  text = markdown_table(head, [of_log(name) for name in SELECTED.value])
  text += f'\n\n{made_by()} {len(SEEDS.value)} seeds.'
  print(text)
  if list(SELECTED.value) == list(SMALL):
    write_between(PAGE, text, 'benchmarks.small_logs')


if __name__ == '__main__':
  os.chdir(ROOT)
  app.run(main)
