"""Writes a log of users and their items, a tenth of each user's apart.

`python examples/yelp18/prepare.py --train FILE --test FILE --out DIR` reads the format of
LightGCN's data sets, as reczoo/Datasets has Yelp18_m1 and Gowalla_m1: a line `user item item …`,
plain or gzipped. It writes CSV files with the columns user and item:

  all.csv    the items of FILE of --train
  train.csv  the same without a tenth of each user's items
  valid.csv  that tenth, to choose settings and the number of epochs by
  test.csv   the items of FILE of --test
"""

import gzip
import os
from collections.abc import Iterator

import numpy as np
import pandas as pd
from absl import app, flags

TRAIN = flags.DEFINE_string('train', None, 'Lines `user item item …`.', required=True)
TEST = flags.DEFINE_string('test', None, 'Likewise.', required=True)
OUT = flags.DEFINE_string('out', None, 'Directory to write to.', required=True)
SEED = flags.DEFINE_integer('seed', 0, 'Of the tenth that is held out.')
HELD_OUT = 0.1


def pairs(path: str) -> pd.DataFrame:
  """Returns the pairs of a file, in its order."""

  def rows() -> Iterator[tuple[int, int]]:
    opened = gzip.open if path.endswith('.gz') else open
    with opened(path, 'rt', encoding='utf-8') as f:
      for line in f:
        user, *items = line.split() or ['']
        yield from ((int(user), int(item)) for item in items)

  return pd.DataFrame(rows(), columns=['user', 'item'])


def held_out(train: pd.DataFrame, seed: int) -> pd.Series:
  """Returns which rows are a tenth of their user's, rounded; of one or two items none is."""
  drawn = pd.Series(np.random.default_rng(seed).random(len(train)), train.index)
  by_user = drawn.groupby(train['user'])
  count = by_user.transform('size')
  return by_user.rank(method='first') <= (HELD_OUT * count).round().where(count > 2, 0)


def main(_: list[str]) -> None:
  train, test = pairs(TRAIN.value), pairs(TEST.value)
  is_held_out = held_out(train, SEED.value)
  os.makedirs(OUT.value, exist_ok=True)
  for name, part in (
    ('all', train),
    ('train', train[~is_held_out]),
    ('valid', train[is_held_out]),
    ('test', test),
  ):
    part.to_csv(os.path.join(OUT.value, f'{name}.csv'), index=False)
    print(f'{name}.csv: {len(part):,} pairs of {part["user"].nunique():,} users')


if __name__ == '__main__':
  app.run(main)
