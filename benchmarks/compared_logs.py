"""The logs that several benchmarks train on, and settings; files go to build/compared_logs/."""

import glob
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd
import yaml

from benchmarks.page import ROOT
from benchmarks.tasks_data import SHARED, census, written
from trainer import api, config
from trainer.data.conversion import prepare_pass

OUT = os.path.join('build', 'compared_logs')


def columns_of(path: str, *keys: str) -> dict[str, Any]:
  """Returns `keys`, slots and dense columns of the data section of a config."""
  with open(os.path.join(ROOT, path), encoding='utf-8') as f:
    data = yaml.safe_load(f)['data']
  return {key: data[key] for key in (*keys, 'slots', 'dense') if key in data}


def tuned(path: str) -> dict[str, Any]:
  """Returns the sections of a config that do not describe its log."""
  with open(os.path.join(ROOT, path), encoding='utf-8') as f:
    return {key: v for key, v in yaml.safe_load(f).items() if key in ('sparse', 'model', 'train')}


Splits = Mapping[str, list[str]]  # the paths of the files of each split


def frappe_log() -> Splits:
  folder = os.path.join(SHARED, 'frappe')
  return {split: [os.path.join(folder, f'{split}.csv')] for split in ('train', 'valid', 'test')}


def census_log() -> Splits:
  census()
  return {s: [written(f'census_{s}.csv')] for s in ('train', 'valid', 'test')}


def flights_log() -> Splits:
  """Writes January to October, November, and December as one file each."""
  months = {'train': ['0[1-9]', '10'], 'valid': ['11'], 'test': ['12']}
  found = {}
  for split, some in months.items():
    days = [p for m in some for p in sorted(glob.glob(f'build/flights/flights_2013-{m}-*.csv'))]
    if not days:
      raise FileNotFoundError('build/flights: no flights; make data-flights writes them')
    found[split] = [os.path.join(OUT, f'flights_{split}.csv')]
    pd.concat([pd.read_csv(path) for path in days]).to_csv(found[split][0], index=False)
  return found


def demo_log(samples: int = 80_000, folder: str = os.path.join(OUT, 'demo_log')) -> Splits:
  """Makes up two days of so many samples, and the two days after them."""
  command = [sys.executable, '-m', 'trainer.cli.synthesize', '--out', folder, '--days', '3']
  command += ['--samples_per_day', str(samples)]
  subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
  names = {'train': ['day_00', 'day_01'], 'valid': ['day_02'], 'test': ['test_day_03']}
  return {s: [os.path.join(folder, f'{name}.csv') for name in some] for s, some in names.items()}


# Its name, a function that writes it, its columns, the epochs of FM, and tuned settings of DeepFM.
Log = tuple[str, Callable[[], Splits], dict[str, Any], int, dict[str, Any]]
LOGS: dict[str, Log] = {
  'frappe': (
    'Frappe',
    frappe_log,
    columns_of('configs/frappe_deepfm.yaml', 'label'),
    12,
    tuned('configs/frappe_deepfm.yaml'),
  ),
  'census': (
    'census income',
    census_log,
    columns_of('configs/census_mmoe.yaml') | {'label': 'c41', 'label_positive': r'50000\+\.'},
    10,
    {
      'sparse': {'tables': {'default': {'width': 4, 'factors': {'learning_rate': 0.02}}}},
      'model': {'interactions': ['linear', 'fm', {'dnn': {'hidden': [16, 8], 'dropout': 0.1}}]},
      'train': {'batch_size': 512, 'epochs': 20, 'plateau': {'factor': 0.2, 'stop_after': 3}},
    },
  ),
  'flights': (
    'flights',
    flights_log,
    columns_of('configs/flights.yaml', 'label'),
    3,
    tuned('configs/flights.yaml') | {'train': {'batch_size': 256, 'epochs': 20, 'plateau': {}}},
  ),
  'demo': (
    'demo',
    demo_log,
    columns_of('configs/demo.yaml', 'label'),
    10,
    tuned('configs/demo.yaml') | {'train': {'batch_size': 1024, 'epochs': 20, 'plateau': {}}},
  ),
}


def raw(name: str) -> dict[str, Any]:
  """Writes a log, unless that is done; returns the data section that reads its files."""
  _, write, columns, _, _ = LOGS[name]
  return columns | write()


def prepared(name: str) -> dict[str, Any]:
  """Prepares a log, unless that is done; returns the data section that reads it."""
  _, write, columns, _, _ = LOGS[name]
  done = os.path.join(OUT, f'{name}.yaml')
  if not os.path.exists(done):
    os.makedirs(OUT, exist_ok=True)
    found = write()
    data = columns | {'format': 'prepared'} | {split: [] for split in found}
    raw = {'data': columns | found, 'model': {'interactions': ['fm']}}
    cfg = config.parse(yaml.safe_dump(raw), name)
    for split, paths in found.items():
      for i, path in enumerate(paths):
        data[split].append(os.path.join(OUT, 'prepared', name, f'{split}_{i}'))
        prepare_pass(cfg, path, data[split][-1])
    with open(done, 'w', encoding='utf-8') as f:
      yaml.safe_dump(data, f)
  with open(done, encoding='utf-8') as f:
    return yaml.safe_load(f)


def evaluated(run_dir: str, settings: Mapping[str, Any], seed: int = 1) -> pd.DataFrame:
  """Trains a run, unless that is done; returns the events of its evaluations."""
  finished = os.path.join(run_dir, 'metrics.csv')
  if not os.path.exists(finished):
    metrics = api.fit({**settings, 'run_dir': run_dir, 'seed': seed}).metrics
    metrics.query("event == 'eval'")[['split', 'epoch', 'auc', 'logloss']].to_csv(finished)
  return pd.read_csv(finished)


def of_test(events: pd.DataFrame) -> tuple[float, float]:
  """Returns AUC and logloss on test of the epoch that is best on validation."""
  test = events.query("split == 'test'").iloc[-1]
  return test['auc'], test['logloss']


def fm_settings(kind: str) -> dict[str, Any]:
  """Returns settings of FM that give only the kind of its row optimizers."""
  rule = {'kind': kind}
  return {
    'sparse': {'tables': {'default': {'linear': rule, 'factors': rule}}},
    'model': {'interactions': ['linear', 'fm']},
  }
