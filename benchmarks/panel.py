"""Small public logs, nothing tuned, beside what else one would try: `python -m benchmarks.panel`.

It rewrites that part of docs/quality.md. On each log it trains logistic regression, LightGBM,
CatBoost, and ours with columns named and all else left out. The constant predicts the training's
share of positives. Logs are cut to 32,000 training samples. Those in CHOOSE chose the defaults; the
others confirm them. Figures are those of test, medians over seeds. Finished runs in build/panel/
are kept. `--logs adult,bank --name mine --set a.b=c` trains a part of it and only prints. `--full`
is the panel of benchmarks/full_panel.py: logs at full size.
"""

import json
import os
import subprocess
import time
from typing import Any

import numpy as np
import pandas as pd
from absl import app, flags

from benchmarks import full_panel
from benchmarks.full_panel import figures
from benchmarks.page import ROOT, made_by, markdown_table, write_between
from benchmarks.panel_logs import FULL as FULL_LOGS
from benchmarks.panel_logs import MOST
from benchmarks.panel_logs import SMALL as LOGS
from benchmarks.run import CONTENDERS, FULL, contenders_environment
from trainer import api

OUT = os.path.join('build', 'panel')
PAGE = os.path.join('docs', 'quality.md')
PEERS = ('LR', 'LightGBM, categories', 'LightGBM, targets', 'CatBoost')
CHOOSE = ('access', 'coupon', 'criteo', 'hotel')

SELECTED = flags.DEFINE_list('logs', None, 'Logs to train on; default: all.')
NAME = flags.DEFINE_string('name', 'defaults', 'The name of this variant of ours.')
SET = flags.DEFINE_multi_string('set', [], 'Settings of this variant, as for ctr-train.')
KEYS = flags.DEFINE_string('slot_keys', '{}', 'JSON: keys that every slot gets in this variant.')
SEEDS = flags.DEFINE_list('seeds', ['1', '2', '3'], 'Seeds of each model.')


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

  def scored(p: np.ndarray) -> dict[str, float]:
    of_unseen = p[unseen].sum() / max(labels[unseen].sum(), 1)
    return figures(labels, p) | {'calibration_unseen': of_unseen}

  of_seeds: dict[str, list[dict[str, float]]] = {'constant': [scored(np.full(len(labels), rate))]}
  for seed in map(int, SEEDS.value):
    for model, p in peers(folder, seed).items():
      of_seeds.setdefault(model, []).append(scored(p))
    p, seconds = ours(folder, meta, seed)
    of_seeds.setdefault('ours', []).append(scored(p) | {'seconds': seconds})
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
  known = FULL_LOGS if FULL.value else LOGS
  selected = list(known if SELECTED.value is None else SELECTED.value)
  if unknown := set(selected) - set(known):
    raise app.UsageError(f"found '{min(unknown)}'; wanted some of {', '.join(known)}")
  if why := contenders_environment():
    raise SystemExit(f'no contenders: {why}')
  if FULL.value:
    seeds, variant = list(map(int, SEEDS.value)), (NAME.value, SET.value)
    text = full_panel.table(selected, *variant, seeds[0])
    text += '\n\nOurs with all seeds, on logs of few rows:\n\n'
    text += f'{full_panel.table_of_seeds(selected, *variant, seeds)}\n\n{made_by()}'
    print(text)
    if NAME.value == 'defaults':
      write_between(PAGE, text, 'benchmarks.full_panel')
      full_panel.picture(full_panel.PICTURE, seeds[0])
    return
  found = {name: of_log(name) for name in selected}
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
  if NAME.value == 'defaults' and selected == list(LOGS):
    write_between(PAGE, text, 'benchmarks.panel')


if __name__ == '__main__':
  os.chdir(ROOT)
  app.run(main)
