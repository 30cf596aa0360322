"""One model on a log: `python full_peer.py FOLDER LR|LightGBM|CatBoost SEED CPU_SECONDS OUT`.

FOLDER holds train.csv, valid.csv, test.csv and meta.json (benchmarks/full_panel.py). It writes the
probabilities of test to OUT. Validation chooses C and the number of trees, by logloss; once the
process has used CPU_SECONDS, the model is the best so far.
"""

import json
import os
import sys
import time

import numpy as np
import pandas as pd
from panel_peers import STRENGTHS, logloss

MOST_COLUMNS = 100  # values of a slot with several that trees get as columns of 0 and 1


def read(folder):
  """Returns meta, and for each split labels, slots, raw and skewed numbers."""
  with open(os.path.join(folder, 'meta.json'), encoding='utf-8') as f:
    meta = json.load(f)
  dense, parts = list(meta['transform']), {}
  for split in ('train', 'valid', 'test'):
    texts = dict.fromkeys(meta['slots'], str)
    log = pd.read_csv(os.path.join(folder, f'{split}.csv'), dtype=texts, na_values=[''])
    slots = log[meta['slots']].fillna('')
    parts[split] = log['label'].to_numpy(), slots, log[dense].apply(pd.to_numeric)
  return meta, parts


def words(separator):
  return lambda text: text.split(separator) if text else []


def logistic_regression(meta, parts, _, deadline):
  from scipy import sparse
  from sklearn.feature_extraction.text import CountVectorizer
  from sklearn.linear_model import LogisticRegression
  from sklearn.preprocessing import OneHotEncoder

  plain = [name for name in meta['slots'] if name not in meta['separators']]
  one_hot = OneHotEncoder(handle_unknown='ignore').fit(parts['train'][1][plain])
  several = {
    name: CountVectorizer(analyzer=words(separator)).fit(parts['train'][1][name])
    for name, separator in meta['separators'].items()
  }
  skewed = [name for name, how in meta['transform'].items() if how.startswith('log1p')]

  def numbers(split):
    x = parts[split][2].copy()
    x[skewed] = np.sign(x[skewed]) * np.log1p(np.abs(x[skewed]))
    return x.to_numpy(float)

  mean, std = np.nanmean(numbers('train'), 0), np.nanstd(numbers('train'), 0)
  x = {}
  for split, (_, slots, _) in parts.items():
    blocks = [one_hot.transform(slots[plain])]
    blocks += [of.transform(slots[name]) for name, of in several.items()]
    if len(mean):
      scaled = (numbers(split) - mean) / np.maximum(std, 1e-9)
      blocks += [
        sparse.csr_matrix(np.nan_to_num(scaled)),
        sparse.csr_matrix(np.isnan(scaled) * 1.0),
      ]
    x[split] = sparse.hstack(blocks, 'csr')
  best = None
  for c in STRENGTHS:
    if time.process_time() > deadline:
      break
    model = LogisticRegression(C=c, max_iter=300).fit(x['train'], parts['train'][0])
    lost = logloss(parts['valid'][0], model.predict_proba(x['valid'])[:, 1])
    if best is None or lost < best[0]:
      best = lost, model
  return best[1].predict_proba(x['test'])[:, 1]


def tables_of_trees(meta, parts):
  """Returns {split: table}: texts, numbers, and a column for each frequent value of lists."""
  tables = {}
  for split, (_, slots, numbers) in parts.items():
    columns = [slots.drop(columns=list(meta['separators'])), numbers]
    for name, separator in meta['separators'].items():
      known = parts['train'][1][name].str.get_dummies(separator) if name != 'history' else ()
      if 0 < np.shape(known)[-1] <= MOST_COLUMNS:
        found = slots[name].str.get_dummies(separator).reindex(columns=known.columns, fill_value=0)
        columns.append(found.add_prefix(f'{name} '))
    tables[split] = pd.concat(columns, axis=1)
  return tables


def lightgbm_model(meta, parts, seed, deadline):
  import lightgbm

  tables = tables_of_trees(meta, parts)
  texts = [name for name in meta['slots'] if name not in meta['separators']]
  known = {name: pd.CategoricalDtype(sorted(set(tables['train'][name]))) for name in texts}
  tables = {split: table.astype(known) for split, table in tables.items()}
  train = lightgbm.Dataset(tables['train'], parts['train'][0])

  def in_time(env):
    if time.process_time() > deadline:
      raise lightgbm.callback.EarlyStopException(env.iteration, env.evaluation_result_list)

  settings = {'learning_rate': 0.05, 'bagging_fraction': 0.8, 'bagging_freq': 1}
  settings |= {'feature_fraction': 0.8, 'objective': 'binary', 'metric': 'binary_logloss'}
  model = lightgbm.train(
    settings | {'seed': seed, 'verbosity': -1, 'num_threads': 1, 'deterministic': True},
    train,
    num_boost_round=2000,
    valid_sets=[train.create_valid(tables['valid'], parts['valid'][0])],
    callbacks=[lightgbm.early_stopping(50, verbose=False), in_time],
  )
  return model.predict(tables['test'], num_iteration=model.best_iteration)


def catboost_model(meta, parts, seed, deadline):
  from catboost import CatBoostClassifier, Pool

  class InTime:
    def after_iteration(self, _):
      return time.process_time() < deadline

  tables = tables_of_trees(meta, parts)
  texts = [name for name in meta['slots'] if name not in meta['separators']]
  pools = {s: Pool(table, parts[s][0], cat_features=texts) for s, table in tables.items()}
  model = CatBoostClassifier(
    iterations=2000, random_seed=seed, thread_count=1, verbose=False, allow_writing_files=False
  )
  model.fit(
    pools['train'], eval_set=pools['valid'], early_stopping_rounds=100, callbacks=[InTime()]
  )
  return model.predict_proba(pools['test'])[:, 1]


MODELS = {'LR': logistic_regression, 'LightGBM': lightgbm_model, 'CatBoost': catboost_model}


if __name__ == '__main__':
  folder, model, seed, seconds, out = sys.argv[1:]
  np.save(out, MODELS[model](*read(folder), int(seed), float(seconds)))
