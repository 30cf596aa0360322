"""Writes a click log whose true probabilities are known: `ctr-synthesize --out DIR`.

DIR gets day_00.csv … (training), test_day_NN.csv (the day after) and truth.json. truth.json has the
AUC and logloss of the true probabilities for each file. A model can beat them only by chance. It
also has the true importance of each slot: how much worse AUC and logloss become on the test day if
the slot's values are exchanged between samples.

The logit of a click is

  bias + user_bias + item_bias + category_bias + Σ tag_bias + ⟨user factors, item factors⟩
       + effects of hour, device, user × device, price, age and the popular queries

The factors of an item are near those of its category and tags, so something is known about a new
item. Users, items and popular queries are drawn by power laws; half of the queries are typed once
and never again, the long tail that real logs have. Items are born every day and fade, each at its
own pace. Some prices and ages are blank. Equal arguments give equal files; with more days, the
earlier files stay the same.

With conversions, purchases follow clicks after a random delay. It is exponential, and its mean
depends on the category: half a day to 4 days. A file then has four more columns: `conversion`, what
happened in the end; `conversion_seen`, what was known when the day was over; `conversion_now`, what
was known when the click was logged, which is 0; and `delay_days`. In the file of the test day, all
three `conversion…` columns hold what happened in the end. stream_NN.csv is a day as it arrives in a
stream: its impressions; then, for each conversion that came on this day, the impression once more,
with a blank click and conversion_now 1.

With drift R, the log changes from day to day. A share R of the users leaves, and new ones with new
names and tastes take their places. Each user and each item has a worth, which raises the odds that
a click becomes a purchase; every day, it becomes √(1 − R)·worth + √R·N(0, 1).

With histories, a file has the column `history`: the items that the user clicked last before that
day, the oldest first. A click on an item is more likely if the user has clicked items of its
category.
"""

import json
import os
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.csv

from trainer.plain_data import JsonObject

FACTORS, CATEGORIES, TAGS, DEVICES, QUERIES = 2, 30, 50, 4, 3000
FRESH_QUERIES = 0.5  # share of the samples whose query is typed once and never again
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
  importance: dict[str, dict[str, float]] = {}  # by slot: what auc and logloss lose without it


class World:
  """The users and items of a synthetic log, and how likely a user clicks on an item.

  Args:
    items: the number of items on the first day; a tenth as many are born on each further day.
    conversions: whether purchases follow clicks.
    histories: whether a user's clicks make later clicks more likely.
    drift: R, the share of users that leave each day, which also sets how fast purchases change.
  """

  def __init__(
    self,
    seed: int,
    users: int,
    items: int,
    days: int,
    conversions: bool = False,
    histories: bool = False,
    drift: float = 0.0,
  ):
    self._seed, self._drift, self._conversions = seed, drift, conversions
    self._clicked = [[] for _ in range(users)] if histories else None
    rng = self._rng(0)
    normal = rng.standard_normal
    self.hour_effect = 0.3 * np.sin(2 * np.pi * (np.arange(24) - 14) / 24)
    self.device_effect = 0.3 * normal(DEVICES)
    self.category_bias, category_factors = 0.4 * normal(CATEGORIES), normal([CATEGORIES, FACTORS])
    # The last tag stands for none.
    self.tag_bias, tag_factors = 0.2 * normal(TAGS + 1), normal([TAGS + 1, FACTORS])
    self.tag_bias[TAGS] = tag_factors[TAGS] = 0
    self.user_names = rng.permutation(users)
    self.user_bias, self.user_factors = 0.8 * normal(users), normal([users, FACTORS])
    self.user_device = 0.4 * normal([users, DEVICES])
    self.user_age = rng.integers(16, 80, users)
    self.user_age_known = rng.random(users) >= BLANK_AGE
    self.query_effect = 0.2 * self._rng(3).standard_normal(QUERIES)
    cohorts = [self._born(day, items if day == 0 else items // 10) for day in range(days)]
    self.born, self.weight, self.pace, self.category, self.tags, bias, price, own = (
      np.concatenate(c) for c in zip(*cohorts)
    )
    rng = self._rng(5)
    self.user_worth = rng.standard_normal(users)
    self.delay = rng.uniform(*MEAN_DELAY_DAYS, CATEGORIES)
    self.item_worth = rng.standard_normal(len(bias))  # drawn last: more days have more items
    self.item_price, self.item_bias, self.item_factors = price, bias, own
    self.category_factors, self.tag_factors = category_factors, tag_factors
    self.tag_text = pa.array(['|'.join(f't{t}' for t in row if t != TAGS) for row in self.tags])

  def _rng(self, *place: int) -> np.random.Generator:
    return np.random.default_rng([self._seed, *place])

  def _born(self, day: int, count: int) -> tuple[np.ndarray, ...]:
    """Draws the items that are born on a day.

    Returns:
      For each item: the day of its birth, its initial popularity, the days in which that falls to
      1/e, category, tags, bias, price and own factors; each [count] or [count, …].
    """
    rng = self._rng(1, day)
    tags = rng.integers(0, TAGS, [count, MAX_TAGS])
    tags[np.arange(MAX_TAGS) >= rng.integers(0, MAX_TAGS + 1, [count, 1])] = TAGS
    tags.sort(1)
    tags[:, 1:][tags[:, 1:] == tags[:, :-1]] = TAGS  # each tag once
    # The items of the first day were born before it.
    born = day - (rng.exponential(3, count) if day == 0 else np.zeros(count))
    weight, pace = (1 + rng.permutation(count)) ** -0.8, rng.uniform(1.5, 6, count)
    category = (CATEGORIES * rng.random(count) ** 2).astype(int)
    price = np.exp(2.5 + 0.8 * rng.standard_normal(count))
    bias, own_factors = 0.4 * rng.standard_normal(count), rng.standard_normal([count, FACTORS])
    return born, weight, pace, category, tags, bias, price, own_factors

  def _move(self, day: int) -> None:
    """Applies a day's drift: replaces some users, and changes what is bought."""
    rng, kept = self._rng(8, day), np.sqrt(1 - self._drift)
    users = len(self.user_names)
    gone = np.flatnonzero(rng.random(users) < self._drift)
    self.user_names[gone] = day * users + gone
    self.user_bias[gone] = 0.8 * rng.standard_normal(len(gone))
    self.user_factors[gone] = rng.standard_normal([len(gone), FACTORS])
    for worth in (self.user_worth, self.item_worth):  # items last: more days have more items
      worth[:] = kept * worth + np.sqrt(self._drift) * rng.standard_normal(len(worth))

  def _logits(
    self, slots: Mapping[str, np.ndarray], price: np.ndarray, age: np.ndarray
  ) -> np.ndarray:
    """Returns the logits of clicks, float64 [n].

    Args:
      slots: {name: int64 [n]}, for each sample the number of the user, item, category, hour, device
        and query (−1 for a query that is typed once). `tags` holds the number of the item, and
        `history` the number of the user.
      price: [n], the prices of the items.
      age: [n], the ages of the users.
    """
    user, item, category, device = (slots[s] for s in ('user', 'item', 'category', 'device'))
    tags, query = self.tags[slots['tags']], slots['query']
    factors = (
      0.75 * self.category_factors[category]
      + 0.5 * self.tag_factors[tags].sum(1)
      + 0.3 * self.item_factors[item]
    )
    logit = (
      BIAS
      + self.user_bias[user]
      + (self.item_bias[item] + self.category_bias[category] + self.tag_bias[tags].sum(1))
      + 0.7 * np.einsum('nd,nd->n', self.user_factors[user], factors)
      + self.hour_effect[slots['hour']]
      + self.device_effect[device]
      + self.user_device[user, device]
      - 0.5 * (np.log1p(price) - 2.5)
      + 0.02 * (age - 48)
      + np.where(query < 0, 0, self.query_effect[query])
    )
    if self._clicked is not None:
      logit += INTEREST * (self._interest(slots['history'], category) - 0.5)
    return logit

  def log(self, day: int, samples: int, importances: bool = False) -> Log:
    """Draws the records of one day.

    With histories or drift, days must be drawn in order.

    Args:
      day: the number of the day, from 0.
      importances: whether to measure the true importances of slots.
    """
    if self._drift and day:
      self._move(day)
    rng = self._rng(2, day)
    user = (len(self.user_names) * rng.random(samples) ** 2.5).astype(np.int64)
    # An item's share fades from its birth on, until it is gone.
    left = np.exp((self.born - day) / self.pace)
    weight = np.where((self.born <= day) & (left > 0.1), self.weight * left, 0)
    item = np.searchsorted(np.cumsum(weight), weight.sum() * rng.random(samples), side='right')
    hour, device = rng.integers(0, 24, samples), rng.integers(0, DEVICES, samples)
    asked = self._rng(4, day)
    query = (QUERIES * asked.random(samples) ** 2.5).astype(int)
    fresh = asked.random(samples) < FRESH_QUERIES
    price = np.round(self.item_price[item] * np.exp(0.2 * rng.standard_normal(samples)), 2)
    slots = {
      'user': user,
      'item': item,
      'category': self.category[item],
      'tags': item,
      'query': np.where(fresh, -1, query),
      'hour': hour,
      'device': device,
    }
    if self._clicked is not None:
      slots['history'] = user
    age = self.user_age[user]

    def probabilities(slots: Mapping[str, np.ndarray]) -> np.ndarray:
      return 1 / (1 + np.exp(-self._logits(slots, price, age)))

    probability = probabilities(slots)
    click = rng.random(samples) < probability
    importance = {}
    if importances:
      order = self._rng(7, day).permutation(samples)
      whole = best_reachable(probability, click)
      for name, column in slots.items():
        without = best_reachable(probabilities(slots | {name: column[order]}), click)
        loss = None if whole['auc'] is None else whole['auc'] - without['auc']
        importance[name] = {'auc': loss, 'logloss': without['logloss'] - whole['logloss']}
    category = self.category[item]
    devices = pa.array(['phone', 'tablet', 'desktop', 'tv'])
    columns = {
      'user': self.user_names[user],
      'item': item,
      'category': pa.array([f'c{c}' for c in range(CATEGORIES)]).take(pa.array(category)),
      'tags': self.tag_text.take(pa.array(item)),
      'query': np.where(fresh, QUERIES + day * samples + np.arange(samples), query),
      'hour': hour,
      'device': devices.take(pa.array(device)),
      'price': pa.array(price, mask=rng.random(samples) < BLANK_PRICE),
      'age': pa.array(age, mask=~self.user_age_known[user]),
      'click': click.astype(np.int8),
    }
    if self._clicked is not None:
      texts = ['|'.join(map(str, items)) for items in self._clicked]
      columns['history'] = pa.array(texts).take(pa.array(user))
      for u, i in zip(user[click].tolist(), item[click].tolist()):
        self._clicked[u] = [*self._clicked[u][1 - HISTORY :], i]
    if not self._conversions:
      return Log(pa.table(columns), probability, click, importance=importance)
    rng = self._rng(6, day)
    logit = CONVERSION_BIAS + 0.8 * (self.user_worth[user] + self.item_worth[item])
    bought = 1 / (1 + np.exp(-logit))
    conversion = click & (rng.random(samples) < bought)
    delay = self.delay[category] * rng.exponential(size=samples)
    arrival = np.floor(day + hour / 24 + delay).astype(np.int64)
    columns |= {
      'conversion': conversion.astype(np.int8),
      'conversion_seen': (conversion & (arrival == day)).astype(np.int8),
      'conversion_now': np.zeros(samples, np.int8),
      'delay_days': pa.array(np.round(delay, 3), mask=~conversion),
    }
    own = probability * bought
    return Log(pa.table(columns), probability, click, own, conversion, arrival, importance)

  def _interest(self, user: np.ndarray, category: np.ndarray) -> np.ndarray:
    """Returns log(1 + c), float64 [n]; c counts the user's last clicked items of this category."""
    counts = np.zeros([len(self._clicked), CATEGORIES])
    for u, items in enumerate(self._clicked):
      np.add.at(counts[u], self.category[items], 1)
    return np.log1p(counts[user, category])


def best_reachable(probability: np.ndarray, click: np.ndarray) -> dict[str, float | None]:
  """Returns the metrics of a model that predicts the true probabilities.

  Returns:
    samples, their number; ctr, the click rate; auc, None if all samples are clicked or none is; and
    logloss.
  """
  clicks = int(click.sum())
  others = len(click) - clicks
  _, rank, count = np.unique(probability, return_inverse=True, return_counts=True)
  mean_rank = np.cumsum(count) - (count - 1) / 2  # of equal probabilities together
  auc = None
  if clicks and others:
    auc = (mean_rank[rank][click].sum() - clicks * (clicks + 1) / 2) / (clicks * others)
  logloss = -np.log(np.where(click, probability, 1 - probability)).mean()
  return {'samples': len(click), 'ctr': clicks / len(click), 'auc': auc, 'logloss': logloss}


def _replaced(table: pa.Table, **columns: pa.Array) -> pa.Table:
  for name, column in columns.items():
    table = table.set_column(table.column_names.index(name), name, column)
  return table


def _late(log: Log, day: int) -> pa.Table:
  """Returns the impressions whose conversions came on a day; their clicks are blank."""
  some = log.table.filter(pa.array(log.conversion & (log.arrival == day)))
  ones = pa.array(np.ones(len(some), np.int8))
  blank = pa.nulls(len(some), pa.int8())
  return _replaced(some, click=blank, conversion_seen=ones, conversion_now=ones)


def synthesize(
  out: str,
  days: int,
  samples_per_day: int,
  seed: int,
  users: int,
  items: int,
  conversions: bool = False,
  histories: bool = False,
  drift: float = 0.0,
) -> JsonObject:
  """Writes a synthetic log into the directory `out`: `days` to train on, and one to test on.

  Returns:
    The content of truth.json: {'passes': {name: result of `best_reachable`}, 'importance': {slot:
    {'auc', 'logloss'}}, …the arguments}. With conversions, a pass also has 'tasks': {'click': …,
    'conversion': …}.
  """
  world = World(seed, users, items, days + 1, conversions, histories, drift)
  passes: dict[str, JsonObject] = {}
  os.makedirs(out, exist_ok=True)

  def write(name: str, table: pa.Table) -> None:
    path = os.path.join(out, name + '.csv')
    pa.csv.write_csv(table, path, pa.csv.WriteOptions(quoting_style='none'))

  logs = []
  for day in range(days + 1):
    name = f'day_{day:02d}' if day < days else f'test_day_{day:02d}'
    log = world.log(day, samples_per_day, importances=day == days)
    table = log.table
    if conversions and day == days:
      known = table['conversion']
      table = _replaced(table, conversion_seen=known, conversion_now=known)
    write(name, table)
    best = passes[name] = best_reachable(log.probability, log.click)
    if conversions:
      of_conversions = best_reachable(log.conversion_probability, log.conversion)
      best['tasks'] = {'click': dict(best), 'conversion': of_conversions}
      logs.append(log)
      if day < days:
        late = [_late(earlier, day) for earlier in logs]
        write(f'stream_{day:02d}', pa.concat_tables([table, *late]))
  truth = {'seed': seed, 'days': days, 'samples_per_day': samples_per_day}
  truth |= {'users': users, 'items': items, 'passes': passes, 'importance': log.importance}
  with open(os.path.join(out, 'truth.json'), 'w', encoding='utf-8') as f:
    json.dump(truth, f, indent=1)
  return truth
