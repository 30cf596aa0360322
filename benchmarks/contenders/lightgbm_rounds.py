"""LightGBM on arrays: `python lightgbm_rounds.py ARRAYS.npz PREDICTIONS.npy SEED`.

The arrays are train, valid and test, float [n, columns], and train_label and so on. It writes the
probabilities of test by the round that has the best AUC on valid.
"""

import sys

import numpy as np

if __name__ == '__main__':
  import lightgbm

  source, target, seed = sys.argv[1:]
  arrays = np.load(source)
  train = lightgbm.Dataset(arrays['train'], arrays['train_label'])
  settings = {'learning_rate': 0.05, 'bagging_fraction': 0.8, 'bagging_freq': 1}
  settings |= {'feature_fraction': 0.8, 'objective': 'binary', 'metric': 'auc'}
  model = lightgbm.train(
    settings | {'seed': int(seed), 'verbosity': -1, 'num_threads': 1, 'deterministic': True},
    train,
    num_boost_round=1000,
    valid_sets=[train.create_valid(arrays['valid'], arrays['valid_label'])],
    callbacks=[lightgbm.early_stopping(50, verbose=False)],
  )
  np.save(target, model.predict(arrays['test'], num_iteration=model.best_iteration))
