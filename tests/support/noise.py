"""A log whose labels are noise: whoever predicts them has seen them."""

import os
from typing import Any

import numpy as np

from tests.support import small


def config(folder: str, counts: bool = True, rows_learn: bool = True) -> dict[str, Any]:
  """Writes the log; returns the config of a job of three epochs on it.

  Args:
    folder: where the log goes.
    counts: of its slots, whose features have some 10 and some 60 samples.
    rows_learn: whether the weights and factors of features change.
  """
  rng = np.random.default_rng(0)
  for split, size in (('train', 6000), ('valid', 3000)):
    columns = rng.integers(0, 600, size), rng.integers(0, 100, size), rng.integers(0, 2, size)
    lines = [f'{a},{b},{label}\n' for a, b, label in zip(*columns)]
    with open(os.path.join(folder, f'{split}.csv'), 'w', encoding='utf-8') as f:
      f.write('a,b,label\n' + ''.join(lines))
  optimizer = {} if rows_learn else {'kind': 'sgd', 'learning_rate': 0.0}
  data = {split: [os.path.join(folder, f'{split}.csv')] for split in ('train', 'valid')}
  return small.tree(
    data=data | {'slots': [{'name': name, 'counts': counts} for name in 'ab']},
    sparse={'tables': {'default': {'width': 4, 'linear': optimizer, 'factors': optimizer}}},
    model={'interactions': ['linear', {'dnn': {'hidden': [32]}}]},
    train={'epochs': 3, 'batch_size': 100, 'plateau': None},
  )
