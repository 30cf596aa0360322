"""Small public logs, nothing tuned, beside what else one would try: `python -m benchmarks.panel`.

It rewrites that part of docs/quality.md. On each log it trains logistic regression, LightGBM,
CatBoost, and ours with columns named and all else left out. The constant predicts the training's
share of positives. Logs are cut to 32,000 training samples. Those in CHOOSE chose the defaults; the
others confirm them. Figures are those of test, medians over seeds. Finished runs in build/panel/
are kept. `--logs adult,bank --name mine --set a.b=c` trains a part of it and only prints.
"""

import json
import os
import subprocess
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
from absl import app, flags
from sklearn.metrics import roc_auc_score

from benchmarks.page import ROOT, made_by, markdown_table, write_between
from benchmarks.run import CONTENDERS, contenders_environment
from benchmarks.tasks_data import CENSUS, SHARED
from trainer import api

OUT = os.path.join('build', 'panel')
PAGE = os.path.join('docs', 'quality.md')
MOST = {'train': 32_000, 'valid': 4000, 'test': 20_000}
PEERS = ('LR', 'LightGBM, categories', 'LightGBM, targets', 'CatBoost')
CHOOSE = ('access', 'coupon', 'criteo', 'hotel')

Log = tuple[dict[str, pd.DataFrame], dict[str, Any]]  # splits; label, slots, dense, transform


def split_at(log: pd.DataFrame, by_time: bool) -> dict[str, pd.DataFrame]:
  """Splits a log 8:1:1, as it is or at random, and cuts each part."""
  if not by_time:
    log = log.sample(frac=1, random_state=2026)
  cuts = [len(log) * 8 // 10, len(log) * 9 // 10]
  parts = dict(zip(MOST, (log[: cuts[0]], log[cuts[0] : cuts[1]], log[cuts[1] :])))
  return {split: part[-MOST[split] :] for split, part in parts.items()}


def panel(name: str) -> Log:
  folder = os.path.join(SHARED, 'panel', name)
  with open(os.path.join(folder, 'meta.json'), encoding='utf-8') as f:
    meta = json.load(f)
  parts = {
    split: pd.read_csv(os.path.join(folder, f'{split}.csv.gz'), dtype=str, keep_default_na=False)
    for split in MOST
  }
  return parts, meta


def scaled(names: list[str], skewed: list[str]) -> dict[str, str]:
  return {n: 'log1p_standardise' if n in skewed else 'standardise' for n in names}


def adult() -> Log:
  names = ['age', 'workclass', 'fnlwgt', 'education', 'education_num', 'marital_status']
  names += ['occupation', 'relationship', 'race', 'sex', 'capital_gain', 'capital_loss']
  names += ['hours_per_week', 'native_country', 'label']
  train, test = (
    pd.read_csv(
      os.path.join(SHARED, 'adult', f'adult.{part}'),
      names=names,
      dtype=str,
      keep_default_na=False,
      skipinitialspace=True,
      comment='|',
    )
    for part in ('data', 'test')
  )
  log = pd.concat([train.sample(frac=1, random_state=2026), test])
  log['label'] = log['label'].str.startswith('>').astype(int).astype(str)
  cut = len(train) * 8 // 10
  parts = dict(zip(MOST, (log[:cut], log[cut : len(train)], log[len(train) :])))
  dense = ['age', 'fnlwgt', 'education_num', 'capital_gain', 'capital_loss', 'hours_per_week']
  slots = [n for n in names[:-1] if n not in dense]
  return parts, _meta(slots, scaled(dense, ['capital_gain', 'capital_loss']))


def census() -> Log:
  source = os.path.join(SHARED, 'census', 'census-income.test.gz')
  log = pd.read_csv(source, names=CENSUS, dtype=str, keep_default_na=False, skipinitialspace=True)
  log['label'] = log['c41'].str.startswith('50000').astype(int).astype(str)
  dense = ['c0', 'c5', 'c16', 'c17', 'c18', 'c30', 'c39']
  slots = [n for n in CENSUS[:41] if n not in (*dense, 'c24')]  # c24 is the weight of the survey
  return split_at(log, False), _meta(slots, scaled(dense, dense[1:5]))


def avazu() -> Log:
  path = os.path.join(SHARED, 'avazu_9k', 'train.csv')
  first = pd.read_csv(path, dtype=str, keep_default_na=False)
  others = [
    pd.read_csv(
      os.path.join(SHARED, 'avazu_9k', f'{part}.csv'),
      names=first.columns,
      dtype=str,
      keep_default_na=False,
    )
    for part in ('dev', 'test')
  ]
  log = pd.concat([first, *others]).rename(columns={'click': 'label'})
  slots = [n for n in log.columns if n not in ('id', 'label', 'hour')]
  return split_at(log, False), _meta(slots, {})


def criteo() -> Log:
  names = ['label', *(f'I{i}' for i in range(1, 14)), *(f'C{i}' for i in range(1, 27))]
  path = os.path.join(SHARED, 'criteo_10k', 'criteo_first10000.txt')
  log = pd.read_csv(path, sep='\t', names=names, dtype=str, keep_default_na=False)
  dense = names[1:14]
  return split_at(log, True), _meta(names[14:], scaled(dense, dense))


def _meta(slots: list[str], transform: dict[str, str]) -> dict[str, Any]:
  return {'label': 'label', 'slots': slots, 'dense': list(transform), 'transform': transform}


LOGS: dict[str, Callable[[], Log]] = {
  **{n: lambda n=n: panel(n) for n in ('access', 'bank', 'coupon', 'hotel', 'shoppers')},
  'adult': adult,
  'census': census,
  'avazu': avazu,
  'criteo': criteo,
}
SELECTED = flags.DEFINE_list('logs', list(LOGS), 'Logs to train on.')
NAME = flags.DEFINE_string('name', 'defaults', 'The name of this variant of ours.')
SET = flags.DEFINE_multi_string('set', [], 'Settings of this variant, as for ctr-train.')
KEYS = flags.DEFINE_string('slot_keys', '{}', 'JSON: keys that every slot gets in this variant.')
SEEDS = flags.DEFINE_list('seeds', ['1', '2', '3'], 'Seeds of each model.')


def figures(labels: np.ndarray, p: np.ndarray, unseen: np.ndarray) -> dict[str, float]:
  """Returns AUC, logloss and calibration; `unseen`: bool [n], samples with an unseen value."""
  p = np.clip(p.astype(float), 1e-7, 1 - 1e-7)
  constant = p.std() == 0
  return {
    'auc': 0.5 if constant else roc_auc_score(labels, p),
    'logloss': -np.mean(np.where(labels > 0, np.log(p), np.log1p(-p))),
    'calibration': p.sum() / labels.sum(),
    'calibration_unseen': p[unseen].sum() / max(labels[unseen].sum(), 1),
  }


def written(name: str) -> tuple[str, dict[str, Any]]:
  """Writes the files of a log, unless they are there; returns their folder and columns."""
  folder = os.path.join(OUT, name)
  meta_path = os.path.join(folder, 'meta.json')
  if not os.path.exists(meta_path):
    os.makedirs(folder, exist_ok=True)
    parts, meta = LOGS[name]()
    for split, part in parts.items():
      part[['label', *meta['slots'], *meta['dense']]].to_csv(
        os.path.join(folder, f'{split}.csv'), index=False
      )
    with open(meta_path, 'w', encoding='utf-8') as f:
      json.dump(meta, f)
  with open(meta_path, encoding='utf-8') as f:
    return folder, json.load(f)


def peers(folder: str, seed: int) -> dict[str, np.ndarray]:
  """Returns the probabilities of test of each of PEERS."""
  path = os.path.join(folder, f'peers_{seed}.npz')
  if not os.path.exists(path):
    python = os.path.join(CONTENDERS, 'bin', 'python')
    script = os.path.join('benchmarks', 'contenders', 'panel_peers.py')
    subprocess.run([python, script, folder, str(seed)], check=True)
  return dict(np.load(path))


def ours(folder: str, meta: dict[str, Any], seed: int) -> tuple[np.ndarray, float]:
  """Returns the probabilities of test of our defaults, and the seconds of training."""
  path = os.path.join(folder, f'{NAME.value}_{seed}.npz')
  if not os.path.exists(path):
    files = {split: [os.path.join(folder, f'{split}.csv')] for split in MOST}
    settings = {
      'seed': seed,
      'data': {
        **files,
        'slots': [{'name': name, **json.loads(KEYS.value)} for name in meta['slots']],
        'dense': [{'name': n, 'transform': meta['transform'][n]} for n in meta['dense']],
      },
      'model': {'interactions': ['linear', 'fm', 'dnn']},
    }
    started = time.process_time()
    run = api.fit(settings, SET.value, run_dir=os.path.join(folder, f'{NAME.value}_{seed}'))
    seconds = time.process_time() - started
    np.savez(path, p=run.predict(), seconds=seconds)
  found = np.load(path)
  return found['p'], float(found['seconds'])


def of_log(name: str) -> dict[str, dict[str, float]]:
  """Returns {model: {figure: its median over seeds}} of a log."""
  folder, meta = written(name)
  logs = {
    split: pd.read_csv(os.path.join(folder, f'{split}.csv'), dtype=str, keep_default_na=False)
    for split in ('train', 'test')
  }
  labels = logs['test']['label'].astype(int).to_numpy()
  unseen = np.any([~logs['test'][n].isin(logs['train'][n].unique()) for n in meta['slots']], axis=0)
  rate = logs['train']['label'].astype(int).mean()
  of_seeds: dict[str, list[dict[str, float]]] = {
    'constant': [figures(labels, np.full(len(labels), rate), unseen)]
  }
  for seed in map(int, SEEDS.value):
    for model, p in peers(folder, seed).items():
      of_seeds.setdefault(model, []).append(figures(labels, p, unseen))
    p, seconds = ours(folder, meta, seed)
    of_seeds.setdefault('ours', []).append(figures(labels, p, unseen) | {'seconds': seconds})
  found = {
    model: {key: float(np.median([f[key] for f in each])) for key in each[0]}
    for model, each in of_seeds.items()
  }
  best = min(found[m]['logloss'] for m in PEERS)
  for each in found.values():
    each['over'] = each['logloss'] - best
    each['skill'] = 1 - each['logloss'] / found['constant']['logloss']
  o = found['ours']
  line = f'{name:9} best {best:.4f} ours {o["auc"]:.4f} / {o["logloss"]:.4f} over {o["over"]:+.4f}'
  line += f' auc {o["auc"] - max(found[m]["auc"] for m in PEERS):+.4f}'
  line += f' cal {o["calibration"]:.3f} unseen {o["calibration_unseen"]:.3f}'
  print(line + f' {o["seconds"]:.0f} s', flush=True)
  return found


def main(_: list[str]) -> None:
  if unknown := set(SELECTED.value) - set(LOGS):
    raise app.UsageError(f"found '{min(unknown)}'; wanted some of {', '.join(LOGS)}")
  if why := contenders_environment():
    raise SystemExit(f'no contenders: {why}')
  found = {name: of_log(name) for name in SELECTED.value}
  models, found_keys = ['constant', *PEERS, 'ours'], ('auc', 'logloss', 'over', 'skill')
  rows = [
    [
      f'{name}{"" if name in CHOOSE else "*"}',
      *(f'{of[m]["auc"]:.4f} / {of[m]["logloss"]:.4f}' for m in models),
      f'{of["ours"]["over"]:+.4f}',
      f'{of["ours"]["calibration"]:.3f} / {of["ours"]["calibration_unseen"]:.3f}',
    ]
    for name, of in found.items()
  ]
  mean = {
    m: {key: np.mean([of[m][key] for of in found.values()]) for key in found_keys} for m in models
  }
  rows.append(
    [
      'mean',
      *(f'{mean[m]["auc"]:.4f} / {mean[m]["logloss"]:.4f}' for m in models),
      f'{mean["ours"]["over"]:+.4f}',
      '',
    ]
  )
  rows.append(['skill', *(f'{mean[m]["skill"]:.3f}' for m in models), '', ''])
  head = ['log', *models, 'over the best', 'calibration, of unseen']
  text = markdown_table(head, rows) + f'\n\n{made_by()}'
  print(text)
  worst = max(of['ours']['over'] for of in found.values())
  short = np.mean([of['ours']['auc'] - max(of[m]['auc'] for m in PEERS) for of in found.values()])
  print(f'{NAME.value}: over {mean["ours"]["over"]:+.4f}, worst {worst:+.4f}, auc {short:+.4f}')
  if NAME.value == 'defaults' and list(SELECTED.value) == list(LOGS):
    write_between(PAGE, text, 'benchmarks.panel')


if __name__ == '__main__':
  os.chdir(ROOT)
  app.run(main)
