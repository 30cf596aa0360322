"""Writes a click log with known ground truth: `python -m trainer.synthesize --out DIR [--days 5]
[--samples_per_day 250000] [--seed 0] …`.

DIR gets day_00.csv … (training), test_day_NN.csv (the day after) and truth.json: the AUC and
logloss of the true probabilities of each
file, which no model can beat but by chance.

The world: a click's logit is

  bias + user_bias + item_bias + category_bias + Σ tag_bias + ⟨user factors, item factors⟩ + hour,
  device and user × device effects
       + effects of price, age and of the popular queries

Item factors lie around those of the item's category and tags, so that new items can be told by
them. Users, items and popular queries
are drawn by power laws; half of the queries are typed once and never again, the long tail that real
logs have. Items are born every day
and fade, each at a pace of its own. Prices and ages are partly blank. Equal arguments give equal
files; more days leave the earlier
ones as they are.

With conversions, clicks are followed by purchases, after a delay that is exponential, with a mean
of half a day to 4 days by category. A file has four more columns: `conversion`, as it was in the
end; `conversion_seen`, as it was known when the day was over; `conversion_now`, 0, as it was when
the click was logged; and `delay_days`. In the test day's file all three are as in the end.
stream_NN.csv is the day as a stream has it: its impressions, and once more those whose conversion
came on it, of this day or an earlier one, with a blank click and conversion_now 1.

With histories, a file has the column `history`, the user's last clicked items before that day, the
oldest first; what the user clicked of an item's category makes a click on it likelier.
"""

import json
import os
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.csv

FACTORS, CATEGORIES, TAGS, DEVICES, QUERIES = 2, 30, 50, 4, 3000
FRESH_QUERIES = (
  0.5  # share of the samples whose query was never seen before and never will be again
)
MAX_TAGS = 3
BIAS = -2.4
BLANK_PRICE, BLANK_AGE = 0.05, 0.2  # shares
CONVERSION_BIAS, MEAN_DELAY_DAYS = -1.0, (0.5, 4.0)
HISTORY, INTEREST = 20, 0.9


class Log(NamedTuple):
  """The records of one day, n of them."""

  table: pa.Table
  probability: np.ndarray  # float64 [n], of a click
  click: np.ndarray  # bool [n]
  conversion_probability: np.ndarray | None = None  # float64 [n], of a click and a conversion
  conversion: np.ndarray | None = None  # bool [n]
  arrival: np.ndarray | None = None  # int64 [n], the day that the conversion comes on


class World:
  """Everything that is drawn once: users, and items as they are born."""

  def __init__(self, seed, users, items, days, conversions=False, histories=False):
    self._seed = seed
    self._conversions = conversions
    self._clicked = [[] for _ in range(users)] if histories else None
    rng = np.random.default_rng([seed, 0])
    normal = rng.standard_normal
    self.hour_effect = 0.3 * np.sin(2 * np.pi * (np.arange(24) - 14) / 24)
    self.device_effect = 0.3 * normal(DEVICES)
    self.category_bias, category_factors = 0.4 * normal(CATEGORIES), normal([CATEGORIES, FACTORS])
    self.tag_bias, tag_factors = (
      0.2 * normal(TAGS + 1),
      normal([TAGS + 1, FACTORS]),
    )  # the last stands for no tag
    self.tag_bias[TAGS] = tag_factors[TAGS] = 0
    self.user_names = rng.permutation(users)
    self.user_bias, self.user_factors = 0.8 * normal(users), normal([users, FACTORS])
    self.user_device = 0.4 * normal([users, DEVICES])
    self.user_age = rng.integers(16, 80, users)
    self.user_age_known = rng.random(users) >= BLANK_AGE
    self.query_effect = 0.2 * np.random.default_rng([seed, 3]).standard_normal(QUERIES)
    cohorts = [self._born(day, items if day == 0 else items // 10) for day in range(days)]
    self.born, self.weight, self.pace, self.category, self.tags, bias, price, own = (
      np.concatenate(c) for c in zip(*cohorts)
    )
    rng = np.random.default_rng([seed, 5])
    self.user_worth = rng.standard_normal(users)
    self.delay = rng.uniform(*MEAN_DELAY_DAYS, CATEGORIES)
    self.item_worth = 0.8 * rng.standard_normal(len(bias))  # last: more days, more items
    self.item_price = price
    self.item_bias = bias + self.category_bias[self.category] + self.tag_bias[self.tags].sum(1)
    self.item_factors = (
      0.75 * category_factors[self.category] + 0.5 * tag_factors[self.tags].sum(1) + 0.3 * own
    )
    texts = np.array([str(t) for t in range(TAGS)] + [''])
    self.tag_text = pa.array(
      ['|'.join('t' + texts[t] for t in row if t != TAGS) for row in self.tags]
    )

  def _born(self, day, count):
    """The items of one day:

    born, weight, pace [count], category, tags [count, MAX_TAGS], bias, price, own factors [count,
    FACTORS].
    """
    rng = np.random.default_rng([self._seed, 1, day])
    tags = rng.integers(0, TAGS, [count, MAX_TAGS])
    tags[np.arange(MAX_TAGS) >= rng.integers(0, MAX_TAGS + 1, [count, 1])] = TAGS
    tags.sort(1)
    tags[:, 1:][tags[:, 1:] == tags[:, :-1]] = TAGS  # each tag once
    # Items that are there on the first day were born before it.
    born = day - (rng.exponential(3, count) if day == 0 else np.zeros(count))
    weight, pace = (1 + rng.permutation(count)) ** -0.8, rng.uniform(1.5, 6, count)
    category = (CATEGORIES * rng.random(count) ** 2).astype(int)
    price = np.exp(2.5 + 0.8 * rng.standard_normal(count))
    return (
      born,
      weight,
      pace,
      category,
      tags,
      0.4 * rng.standard_normal(count),
      price,
      rng.standard_normal([count, FACTORS]),
    )

  def log(self, day, samples):
    """The records of one day, as `Log`; with histories, days come in their order."""
    rng = np.random.default_rng([self._seed, 2, day])
    user = (len(self.user_names) * rng.random(samples) ** 2.5).astype(np.int64)
    # An item's share fades from its birth on, until it is gone.
    left = np.exp((self.born - day) / self.pace)
    weight = np.where((self.born <= day) & (left > 0.1), self.weight * left, 0)
    item = np.searchsorted(np.cumsum(weight), weight.sum() * rng.random(samples), side='right')
    hour, device = rng.integers(0, 24, samples), rng.integers(0, DEVICES, samples)
    asked = np.random.default_rng([self._seed, 4, day])
    query, fresh = (
      (QUERIES * asked.random(samples) ** 2.5).astype(int),
      asked.random(samples) < FRESH_QUERIES,
    )
    price = np.round(self.item_price[item] * np.exp(0.2 * rng.standard_normal(samples)), 2)
    logit = (
      BIAS
      + self.user_bias[user]
      + self.item_bias[item]
      + 0.7 * np.einsum('nd,nd->n', self.user_factors[user], self.item_factors[item])
      + self.hour_effect[hour]
      + self.device_effect[device]
      + self.user_device[user, device]
      - 0.5 * (np.log1p(price) - 2.5)
      + 0.02 * (self.user_age[user] - 48)
      + np.where(fresh, 0, self.query_effect[query])
    )
    if self._clicked is not None:
      logit += INTEREST * (self._interest(user, item) - 0.5)
    probability = 1 / (1 + np.exp(-logit))
    click = rng.random(samples) < probability
    table = pa.table(
      {
        'user': self.user_names[user],
        'item': item,
        'category': pa.array([f'c{c}' for c in range(CATEGORIES)]).take(
          pa.array(self.category[item])
        ),
        'tags': self.tag_text.take(pa.array(item)),
        'query': pa.array(np.where(fresh, QUERIES + day * samples + np.arange(samples), query)),
        'hour': hour,
        'device': pa.array(['phone', 'tablet', 'desktop', 'tv']).take(pa.array(device)),
        'price': pa.array(price, mask=rng.random(samples) < BLANK_PRICE),
        'age': pa.array(self.user_age[user], mask=~self.user_age_known[user]),
        'click': click.astype(np.int8),
      }
    )
    if self._clicked is not None:
      texts = ['|'.join(map(str, items)) for items in self._clicked]
      table = table.append_column('history', pa.array(texts).take(pa.array(user)))
      for u, i in zip(user[click].tolist(), item[click].tolist()):
        self._clicked[u] = [*self._clicked[u][1 - HISTORY :], i]
    if not self._conversions:
      return Log(table, probability, click)
    rng = np.random.default_rng([self._seed, 6, day])
    logit = CONVERSION_BIAS + 0.8 * self.user_worth[user] + self.item_worth[item]
    bought = 1 / (1 + np.exp(-logit))
    conversion = click & (rng.random(samples) < bought)
    delay = self.delay[self.category[item]] * rng.exponential(size=samples)
    arrival = np.floor(day + hour / 24 + delay).astype(np.int64)
    seen = conversion & (arrival == day)
    for name, column in (
      ('conversion', conversion.astype(np.int8)),
      ('conversion_seen', seen.astype(np.int8)),
      ('conversion_now', np.zeros(samples, np.int8)),
      ('delay_days', pa.array(np.round(delay, 3), mask=~conversion)),
    ):
      table = table.append_column(name, pa.array(column))
    return Log(table, probability, click, probability * bought, conversion, arrival)

  def _interest(self, user, item):
    """log(1 + how many of the user's clicked items are of this item's category), float64 [n]."""
    counts = np.zeros([len(self._clicked), CATEGORIES])
    for u, items in enumerate(self._clicked):
      np.add.at(counts[u], self.category[items], 1)
    return np.log1p(counts[user, self.category[item]])


def best_reachable(probability, click):
  """What the true probabilities [n] reach on the clicks [n]:

  dict samples, ctr, auc (null where all clicks are equal), logloss.
  """
  clicks = int(click.sum())
  others = len(click) - clicks
  _, rank, count = np.unique(probability, return_inverse=True, return_counts=True)
  mean_rank = np.cumsum(count) - (count - 1) / 2  # of equal probabilities together
  auc = (
    (mean_rank[rank][click].sum() - clicks * (clicks + 1) / 2) / (clicks * others)
    if clicks and others
    else None
  )
  logloss = -np.log(np.where(click, probability, 1 - probability)).mean()
  return {'samples': len(click), 'ctr': clicks / len(click), 'auc': auc, 'logloss': logloss}


def _replaced(table, **columns):
  """A table with some columns replaced."""
  for name, column in columns.items():
    table = table.set_column(table.column_names.index(name), name, column)
  return table


def _late(log, day):
  """The impressions of a log again whose conversion came on a day; the click is blank."""
  some = log.table.filter(pa.array(log.conversion & (log.arrival == day)))
  one = pa.array(np.ones(len(some), np.int8))
  blank = pa.nulls(len(some), pa.int8())
  return _replaced(some, click=blank, conversion_seen=one, conversion_now=one)


def synthesize(out, days, samples_per_day, seed, users, items, conversions=False, histories=False):
  """Writes the log.

  Returns: the content of truth.json: {'passes': {name: `best_reachable`}, …the arguments}; with
    conversions a pass also has 'tasks', {'click': …, 'conversion': …}.
  """
  world = World(seed, users, items, days + 1, conversions, histories)
  truth = {
    'seed': seed,
    'days': days,
    'samples_per_day': samples_per_day,
    'users': users,
    'items': items,
    'passes': {},
  }
  os.makedirs(out, exist_ok=True)

  def write(name, table):
    path = os.path.join(out, name + '.csv')
    pa.csv.write_csv(table, path, pa.csv.WriteOptions(quoting_style='none'))

  logs = []
  for day in range(days + 1):
    name = f'day_{day:02d}' if day < days else f'test_day_{day:02d}'
    log = world.log(day, samples_per_day)
    table = log.table
    if conversions and day == days:
      known = table['conversion']
      table = _replaced(table, conversion_seen=known, conversion_now=known)
    write(name, table)
    best = truth['passes'][name] = best_reachable(log.probability, log.click)
    if conversions:
      of_conversions = best_reachable(log.conversion_probability, log.conversion)
      best['tasks'] = {'click': dict(best), 'conversion': of_conversions}
      logs.append(log)
      if day < days:
        late = [_late(one, day) for one in logs]
        write(f'stream_{day:02d}', pa.concat_tables([table, *late]))
  with open(os.path.join(out, 'truth.json'), 'w', encoding='utf-8') as f:
    json.dump(truth, f, indent=1)
  return truth
