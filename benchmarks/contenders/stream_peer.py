"""LightGBM on a stream: `python stream_peer.py FOLDER SEED OUT`.

Each week it is trained anew on all days before, and predicts the days of the week. FOLDER holds
day_*.csv and meta.json (benchmarks/streams.py). Every fourth week, the last tenth of the samples,
held out, chooses the number of trees; then all samples are trained on. It writes the probabilities
of all samples in their order to OUT, with NaN for the first week.
"""

import glob
import json
import os
import sys

import lightgbm
import numpy as np
import pandas as pd

WEEK, CHOOSE_EVERY, MOST_TREES = 7, 4, 500
SETTINGS = {
  'learning_rate': 0.1,
  'bagging_fraction': 0.8,
  'bagging_freq': 1,
  'feature_fraction': 0.8,
  'objective': 'binary',
  'metric': 'binary_logloss',
  'verbosity': -1,
  'num_threads': 1,
  'deterministic': True,
}


def trained(table, labels, trees, settings):
  """Returns a model of so many trees; None: as many as the last tenth of the samples chooses."""
  if trees is not None:
    return lightgbm.train(settings, lightgbm.Dataset(table, labels), trees)
  cut = len(table) * 9 // 10
  first = lightgbm.Dataset(table[:cut], labels[:cut])
  return lightgbm.train(
    settings,
    first,
    MOST_TREES,
    valid_sets=[first.create_valid(table[cut:], labels[cut:])],
    callbacks=[lightgbm.early_stopping(20, verbose=False)],
  )


def main(folder, seed, out):
  with open(os.path.join(folder, 'meta.json'), encoding='utf-8') as f:
    meta = json.load(f)
  texts = dict.fromkeys(meta['slots'], str)
  days = [
    pd.read_csv(path, dtype=texts, na_values=['']).assign(day=day)
    for day, path in enumerate(sorted(glob.glob(os.path.join(folder, 'day_*.csv'))))
  ]
  log = pd.concat(days, ignore_index=True)
  day, labels = log['day'].to_numpy(), log['label'].to_numpy()
  columns = [log[list(meta['transform'])]]
  for name in meta['slots']:
    if name in meta['separators']:
      columns.append(log[name].fillna('').str.get_dummies(meta['separators'][name]))
    else:
      columns.append(log[name].fillna('').astype('category'))
  table, p, trees = pd.concat(columns, axis=1), np.full(len(log), np.nan), None
  settings = SETTINGS | {'seed': seed}
  for week, start in enumerate(range(WEEK, day[-1] + 1, WEEK)):
    first, end = np.searchsorted(day, [start, start + WEEK])
    if week % CHOOSE_EVERY == 0:
      trees = max(1, trained(table[:first], labels[:first], None, settings).best_iteration)
    model = trained(table[:first], labels[:first], trees, settings)
    p[first:end] = model.predict(table[first:end])
    print(f'days from {start}: {first:,} samples, {trees} trees', flush=True)
  np.save(out, p)


main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
