"""Follows the findings of a log whose users are new: `python -m benchmarks.cold_start`.

The log is ../shared/data/films, which may not be redistributed: in order of time, with features of
the past, nine in ten samples of valid and test have a user that train lacks. The first run's
findings name columns without which the model may be better, and `ctr-tune --columns` tries them.
What it suggests is compared with the first run on data.test, of which neither knew anything.
"""

import glob
import os
import subprocess
import sys
import tempfile

import pandas as pd
import yaml
from absl import app

import trainer
from benchmarks.tasks_data import SHARED
from trainer.tools.column_search import try_columns
from trainer.tools.findings import faults
from trainer.tools.runs import read_run

FILMS = os.path.join(SHARED, 'films', 'films.csv.gz')


def log() -> pd.DataFrame:
  """Returns the ratings in order of time, each with what its user did before it."""
  films = pd.read_csv(FILMS).sort_values('timestamp', kind='stable')
  seen, liked, columns = {}, {}, []
  for user, film, rating in zip(films['userId'], films['movieId'], films['rating']):
    count, likes = seen.get(user, 0), liked.setdefault(user, [])
    columns.append(('|'.join(likes[-50:]), count, (len(likes) + 2.4) / (count + 5)))
    seen[user] = count + 1
    if rating >= 4:
      likes.append(str(film))
  films[['history', 'user_n', 'user_rate']] = columns
  return films


def write(folder: str) -> str:
  """Writes the log, split in order of time, and a config; returns its path."""
  films = log()
  first, second = len(films) * 8 // 10, len(films) * 9 // 10
  parts = {'train': films[:first], 'valid': films[first:second], 'test': films[second:]}
  for name, part in parts.items():
    part.to_csv(f'{folder}/{name}.csv', index=False)
  slots = [
    *({'name': name} for name in ('userId', 'movieId', 'year')),
    {'name': 'genres', 'separator': '|'},
    {'name': 'history', 'separator': '|', 'shares': 'movieId'},
  ]
  data = {name: [f'{folder}/{name}.csv'] for name in parts}
  data |= {'label': 'rating', 'label_positive': '4|4.5|5', 'slots': slots}
  data['dense'] = [{'name': name, 'transform': 'standardise'} for name in ('user_n', 'user_rate')]
  path = f'{folder}/films.yaml'
  with open(path, 'w', encoding='utf-8') as f:
    yaml.safe_dump({'data': data, 'model': {'interactions': ['linear', 'fm', 'dnn']}}, f)
  return path


def main(_) -> None:
  if not os.path.exists(FILMS):
    print('skipped: ../shared/data/films is not there; it may not be redistributed')
    return
  with tempfile.TemporaryDirectory() as folder:
    path = write(folder)
    dry_run = '-m', 'trainer.run', '--config', path, '--dry_run', '--run_dir', f'{folder}/dry'
    subprocess.run([sys.executable, *dry_run], check=True)
    for line in try_columns(path, f'{folder}/columns', None, (), ()):
      print(line, flush=True)
    for finding in faults(read_run(f'{folder}/columns/all-0')):
      print(finding.sentence)
    for run_dir in sorted(glob.glob(f'{folder}/columns/without-*[0-9]')):
      whole = trainer.load(f'{folder}/columns/all-{run_dir[-1]}')
      compared = whole.compare(trainer.load(run_dir)).to_string(index=False)
      print(f'{os.path.basename(run_dir)} on data.test:\n{compared}')


if __name__ == '__main__':
  app.run(main)
