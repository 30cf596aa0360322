"""What else a person would try on a small log: `python panel_peers.py FOLDER SEED`.

FOLDER holds train.csv, valid.csv, test.csv and meta.json (benchmarks/panel.py). It writes the
probabilities of test of each model to FOLDER/peers_SEED.npz. Validation chooses C and the number of
trees, by logloss.
"""

import json
import os
import sys

import numpy as np
import pandas as pd

FOLDS, SMOOTHING = 5, 20.0  # of target encoding
STRENGTHS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # C of logistic regression


def logloss(y, p):
  p = np.clip(p, 1e-7, 1 - 1e-7)
  return -np.mean(np.where(y > 0, np.log(p), np.log(1 - p)))


def logistic_regression(slots, dense, labels):
  """Trains on one-hot categories and scaled numbers, with an indicator of missing ones."""
  from scipy import sparse
  from sklearn.linear_model import LogisticRegression
  from sklearn.preprocessing import OneHotEncoder

  encoder = OneHotEncoder(handle_unknown='ignore').fit(slots['train'])
  x = {}
  for split, texts in slots.items():
    numbers = dense[split]
    parts = [encoder.transform(texts)]
    if numbers.shape[1]:
      mean, std = np.nanmean(dense['train'], 0), np.nanstd(dense['train'], 0)
      scaled = (numbers - mean) / np.maximum(std, 1e-9)
      parts += [
        sparse.csr_matrix(np.nan_to_num(scaled)),
        sparse.csr_matrix(np.isnan(numbers) * 1.0),
      ]
    x[split] = sparse.hstack(parts, 'csr')
  best = None
  for c in STRENGTHS:
    model = LogisticRegression(C=c, max_iter=300).fit(x['train'], labels['train'])
    lost = logloss(labels['valid'], model.predict_proba(x['valid'])[:, 1])
    if best is None or lost < best[0]:
      best = lost, model
  return best[1].predict_proba(x['test'])[:, 1]


def boosted(arrays, labels, seed, categories='auto'):
  """Trains LightGBM; returns its probabilities of test."""
  import lightgbm

  train = lightgbm.Dataset(arrays['train'], labels['train'], categorical_feature=categories)
  settings = {'learning_rate': 0.05, 'bagging_fraction': 0.8, 'bagging_freq': 1}
  settings |= {'feature_fraction': 0.8, 'objective': 'binary', 'metric': 'binary_logloss'}
  model = lightgbm.train(
    settings | {'seed': seed, 'verbosity': -1, 'num_threads': 1, 'deterministic': True},
    train,
    num_boost_round=2000,
    valid_sets=[train.create_valid(arrays['valid'], labels['valid'])],
    callbacks=[lightgbm.early_stopping(50, verbose=False)],
  )
  return model.predict(arrays['test'], num_iteration=model.best_iteration)


def target_encoded(categories, clicks, seed):
  """Returns the smoothed click rate of each category; in training, that in the other folds."""
  rate, fold = clicks.mean(), np.random.default_rng(seed).integers(0, FOLDS, len(clicks))

  def encoded(known, of):
    seen = pd.Series(clicks[known]).groupby(categories['train'].to_numpy()[known])
    rates = (seen.sum() + SMOOTHING * rate) / (seen.count() + SMOOTHING)
    return of.map(rates).fillna(rate).to_numpy(float, copy=True)

  found = {split: encoded(np.ones(len(clicks), bool), of) for split, of in categories.items()}
  for i in range(FOLDS):
    found['train'][fold == i] = encoded(fold != i, categories['train'][fold == i])
  return found


def catboost(slots, raw, labels, seed):
  from catboost import CatBoostClassifier, Pool

  names = list(slots['train'])
  pools = {}
  for split in slots:
    table = pd.concat([slots[split], raw[split]], axis=1)
    pools[split] = Pool(table, labels[split], cat_features=names)
  model = CatBoostClassifier(
    iterations=2000, random_seed=seed, thread_count=1, verbose=False, allow_writing_files=False
  )
  model.fit(pools['train'], eval_set=pools['valid'], early_stopping_rounds=100)
  return model.predict_proba(pools['test'])[:, 1]


def main(folder, seed):
  with open(os.path.join(folder, 'meta.json'), encoding='utf-8') as f:
    meta = json.load(f)
  logs = {
    split: pd.read_csv(os.path.join(folder, f'{split}.csv'), dtype=str, keep_default_na=False)
    for split in ('train', 'valid', 'test')
  }
  labels = {split: log['label'].astype(int).to_numpy() for split, log in logs.items()}
  slots = {split: log[meta['slots']] for split, log in logs.items()}
  raw = {split: log[meta['dense']].apply(pd.to_numeric) for split, log in logs.items()}
  skewed = [name for name, how in meta['transform'].items() if how.startswith('log1p')]
  dense = {}
  for split, numbers in raw.items():
    scaled = numbers.copy()
    scaled[skewed] = np.sign(scaled[skewed]) * np.log1p(np.abs(scaled[skewed]))
    dense[split] = scaled.to_numpy(float)
  found = {'LR': logistic_regression(slots, dense, labels)}
  known = {name: pd.CategoricalDtype(sorted(set(slots['train'][name]))) for name in meta['slots']}
  tables = {s: pd.concat([slots[s].astype(known), raw[s]], axis=1) for s in slots}
  found['LightGBM, categories'] = boosted(tables, labels, seed)
  columns = {s: [] for s in slots}
  for name in meta['slots']:
    encoded = target_encoded({s: slots[s][name] for s in slots}, labels['train'], seed)
    for s in slots:
      columns[s].append(encoded[s])
  arrays = {s: np.concatenate([np.stack(columns[s], 1), raw[s].to_numpy(float)], 1) for s in slots}
  found['LightGBM, targets'] = boosted(arrays, labels, seed)
  found['CatBoost'] = catboost(slots, raw, labels, seed)
  np.savez(os.path.join(folder, f'peers_{seed}.npz'), **found)


if __name__ == '__main__':
  main(sys.argv[1], int(sys.argv[2]))
