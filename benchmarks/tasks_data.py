"""Logs for the quality of several tasks and of histories, split by seed or by time.

`python -m benchmarks.tasks_data --out build/tasks` writes those whose data is there: census-income
(../shared/data/census) and grocery purchases (../shared/data/grocery).
"""

import os

import numpy as np
import pandas as pd
from absl import app, flags

from benchmarks.page import ROOT

OUT = flags.DEFINE_string('out', os.path.join('build', 'tasks'), 'Directory to write to.')
SHARED = os.path.join(ROOT, '..', 'shared', 'data')
CENSUS = [f'c{i}' for i in range(42)]
NEGATIVES, RANKED = 4, 99  # drawn beside each purchase that is trained on, and that is ranked
HISTORY = 20  # purchases


def census(source: str, out: str) -> None:
  """Splits the rows 6:2:2 by seed; c7 is the marital status, c41 the income."""
  rows = pd.read_csv(source, names=CENSUS, dtype=str, skipinitialspace=True)
  order = np.random.default_rng(0).permutation(len(rows))
  cuts = np.split(order, [len(rows) * 6 // 10, len(rows) * 8 // 10])
  for name, some in zip(('train', 'valid', 'test'), cuts):
    rows.iloc[some].to_csv(os.path.join(out, f'census_{name}.csv'), index=False)


def grocery(source: str, out: str) -> None:
  """Writes purchases as clicks, each beside drawn items that the user never had.

  The history is the user's earlier purchases. A user's last purchase but one validates, with 4
  drawn items as in training, the last is ranked among 99.
  """
  parts = [
    pd.read_csv(os.path.join(source, f'{name}.csv'), sep=',').assign(split=name)
    for name in ('train', 'dev', 'test')
  ]
  rows = pd.concat(parts).sort_values(['user_id', 'time'], kind='stable')
  meta = pd.read_csv(os.path.join(source, 'item_meta.csv.gz'), sep=None, engine='python')
  category = dict(zip(meta['item_id'], meta['i_category']))
  items = np.array(sorted(set(rows['item_id'])))
  rng = np.random.default_rng(0)
  lines = {name: [] for name in ('train', 'dev', 'test')}
  for user, of_user in rows.groupby('user_id', sort=False):
    bought = of_user['item_id'].tolist()
    had, order = set(bought), {'train': 0, 'dev': 1, 'test': 2}
    turns = sorted(zip(of_user['split'].map(order), range(len(bought))))
    bought = [bought[i] for _, i in turns]
    names = [('train', 'dev', 'test')[s] for s, _ in turns]
    for i, (name, item) in enumerate(zip(names, bought)):
      history = '|'.join(map(str, bought[max(0, i - HISTORY) : i]))
      count = RANKED if name == 'test' else NEGATIVES
      drawn = []
      while len(drawn) < count:
        some = items[rng.integers(0, len(items), count)].tolist()
        drawn += [x for x in dict.fromkeys(some) if x not in had and x not in drawn]
      for label, one in [(1, item), *((0, x) for x in drawn[:count])]:
        lines[name].append(f'{user},{one},{category.get(one, "")},{history},{label}\n')
  for name, some in lines.items():
    with open(os.path.join(out, f'grocery_{name}.csv'), 'w', encoding='utf-8') as f:
      f.write('user,item,category,history,label\n')
      f.writelines(some)


def main(_) -> None:
  os.makedirs(OUT.value, exist_ok=True)
  for write, path in (
    (census, os.path.join(SHARED, 'census', 'census-income.test.gz')),
    (grocery, os.path.join(SHARED, 'grocery')),
  ):
    if os.path.exists(path):
      write(path, OUT.value)
    else:
      print(f'skipped: {path} is not there')


if __name__ == '__main__':
  app.run(main)
