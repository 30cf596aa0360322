"""The quality of several tasks, late conversions, histories and the lifecycle on a real log.

`python -m benchmarks.tasks_quality` (`make quality`) rewrites their tables in docs/quality.md. Each
run is one of `trainer.run` in build/tasks_quality/; finished runs are kept. Figures are medians
over seeds. benchmarks.tasks_data writes missing logs; if the data for a log is not there, its
comparison is skipped and its table stays.
"""

import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from absl import app, flags

from benchmarks import tasks_data
from benchmarks.page import ROOT, markdown_table, write_between
from benchmarks.quality import PAGE, SEEDS, events_of, train

OUT = os.path.join('build', 'tasks_quality')
PICTURE = os.path.join('docs', 'lifecycle.png')

Figures = dict[str, dict[str, float]]  # task ('' if there is one) -> name -> figure


def place_of(comparison: str, model: str, seed: str) -> str:
  """Returns the run_dir of a model with a seed."""
  words = ''.join(c if c.isalnum() else ' ' for c in model).split()
  return os.path.join(OUT, '_'.join([comparison, *words, seed]))


def final_test(run_dir: str) -> Figures:
  """Returns AUC, logloss and calibration of the test set by task."""
  tests = [e for e in events_of(run_dir) if e['event'] == 'eval' and e['split'] == 'test']
  return {
    task: {name: of_task[name] for name in ('auc', 'logloss', 'calibration')}
    for task, of_task in tests[-1].get('tasks', {'': tests[-1]}).items()
  }


def next_days(run_dir: str) -> Figures:
  """Returns means of these over the days from the 32nd on, each scored before its training."""
  days = [e for e in events_of(run_dir) if e['event'] == 'eval' and e['split'] == 'next'][31:]
  found = {}
  for task in days[0].get('tasks', {'': None}):
    of_days = [e['tasks'][task] if task else e for e in days]
    weights = np.array([d['examples'] for d in of_days])
    clicks = weights * [d['ctr'] for d in of_days]
    found[task] = {
      name: float(np.average([d[name] for d in of_days], weights=by))
      for name, by in (('auc', weights), ('logloss', weights), ('calibration', clicks))
    }
  return found


def lifecycle(run_dir: str) -> Figures:
  """Returns the size of the tables at the end, and the AUC and logloss of `next_days`."""
  last = [e for e in events_of(run_dir) if e['event'] == 'day_end'][-1]
  quality = next_days(run_dir)['']
  return {
    '': {
      'features': last['features'],
      'admitted': last['admitted'],
      'MB': last['table_bytes'] / 1e6,
      'auc': quality['auc'],
      'logloss': quality['logloss'],
    }
  }


def lifecycle_picture(run_dirs: dict[str, str], path: str) -> None:
  """Draws features, bytes and the AUC of the next day through the year, a curve per model."""
  import matplotlib

  matplotlib.use('Agg')
  from matplotlib import pyplot

  figure, axes = pyplot.subplots(1, 3, figsize=(10, 2.6), layout='constrained')
  for model, run_dir in run_dirs.items():
    events = events_of(run_dir)
    ends = [e for e in events if e['event'] == 'day_end']
    auc = [e['auc'] for e in events if e['event'] == 'eval' and e['split'] == 'next']
    smooth = np.convolve(auc, np.ones(30) / 30, 'valid')
    axes[0].plot([e['features'] / 1000 for e in ends], label=model)
    axes[1].plot([e['table_bytes'] / 1e6 for e in ends])
    axes[2].plot(np.arange(len(smooth)) + 29, smooth)
  for place, title in zip(axes, ('thousand features', 'MB', 'AUC of the next day, of 30 days')):
    place.set_title(title, fontsize=9)
    place.set_xlabel('day of the year')
    place.spines[['top', 'right']].set_visible(False)
  axes[0].legend(frameon=False, fontsize=8)
  figure.savefig(path, dpi=90)


def ranking(run_dir: str) -> Figures:
  """Returns HR@5 and NDCG@5 of the purchase, the first of each 100 candidates of the test log.

  A tie counts as a worse rank.
  """
  out = os.path.join(run_dir, 'test.txt')
  if not os.path.exists(out):
    log = os.path.join(tasks_data.OUT, 'grocery_test.csv')
    command = [sys.executable, '-m', 'trainer.cli.predict', '--run_dir', run_dir, '--data', log]
    subprocess.run([*command, '--out', out], check=True, stdout=subprocess.DEVNULL)
  with open(out, encoding='utf-8') as f:
    scores = np.array(f.read().split(), float).reshape(-1, 1 + tasks_data.RANKED)
  rank = (scores[:, 1:] >= scores[:, :1]).sum(1)
  top = rank < 5
  return {'': {'HR@5': top.mean(), 'NDCG@5': np.where(top, 1 / np.log2(rank + 2), 0).mean()}}


class Comparison(NamedTuple):
  """Models that are trained on one log.

  Attributes:
    config: the file of the config.
    log: a file that exists once `make` has written the log.
    make: writes the log; a function of benchmarks.tasks_data.
    models: name -> the keys of the config that the model changes.
    measure: returns the figures of a run_dir.
  """

  config: str
  log: str
  make: Callable[[], None]
  models: dict[str, Sequence[str]]
  measure: Callable[[str], Figures] = final_test


def one_label(label: str, interactions: str, **more: str) -> list[str]:
  """Returns the changes that turn a model of several labels into one of one label."""
  changes = {'label': label} | more
  return [
    *('data.labels=[]', 'model.shared=null', 'model.tasks={}'),
    f'model.interactions={interactions}',
    *(f'data.{key}={value}' for key, value in changes.items()),
  ]


CENSUS_ALONE = '[{dnn: {hidden: [16, 8], dropout: 0.1}}]'
FLIGHTS_ALONE = '[linear, fm, {dnn: {hidden: [64, 32]}}]'
ALL_YEAR = ['data.train=["build/flights/flights_*.csv"]', 'data.test=[]']
RARE = [
  *ALL_YEAR,
  'data.slots=[{name: weekday}, {name: hour}, {name: carrier}, {name: flight}, {name: tailnum}, '
  '{name: origin}, {name: dest}, {name: route}, {name: aircraft_route}]',
]
ADMISSION = ['lifecycle.admission=count', 'lifecycle.admission_count=5']
NO_EVICTION = ['lifecycle.eviction=none', 'lifecycle.delete_after_unseen_days=null']


def late(pattern: str, column: str = 'conversion', loss: str = 'log_loss') -> list[str]:
  """Returns the changes that train on a column of certain files; each seed has its own log."""
  place = tasks_data.LATE + '{seed}'
  return [
    f'data.train=["{place}/{pattern}_*.csv"]',
    f'data.test=["{place}/test_day_*.csv"]',
    f'data.labels.1.column={column}',
    f'data.labels.1.loss={loss}',
    'checkpoint.every_passes=null',
  ]


COMPARISONS = {
  'census': Comparison(
    'configs/census_mmoe.yaml',
    'build/tasks/census_train.csv',
    tasks_data.census,
    {
      'MMoE': [],
      'income alone': one_label('c41', CENSUS_ALONE, label_positive=r'"50000\\+\\."'),
      'never married alone': one_label('c7', CENSUS_ALONE, label_positive='Never married'),
    },
  ),
  'flights': Comparison(
    'configs/flights_esmm.yaml',
    'build/flights/flights_2013-12-31.csv',
    tasks_data.flights,
    {
      'ESMM': ALL_YEAR,
      'late alone': [*ALL_YEAR, *one_label('late', FLIGHTS_ALONE)],
      'arrived_late alone': [
        *ALL_YEAR,
        *one_label('arrived_late', FLIGHTS_ALONE, max_bad_share='0.2'),  # blank: landed elsewhere
      ],
    },
    next_days,
  ),
  'grocery': Comparison(
    'configs/grocery_din.yaml',
    'build/tasks/grocery_test.csv',
    tasks_data.grocery,
    {
      'DIN': ['data.test=[]'],
      'mean pooling': ['data.test=[]', 'model.interactions=[linear, {dnn: {hidden: [64, 32]}}]'],
    },
    ranking,
  ),
  'late': Comparison(
    'configs/late_conversions.yaml',
    'build/late_3/wait6_day_09.csv',
    tasks_data.late,
    {
      'fake_negative': late('stream', 'conversion_now', 'fake_negative'),
      'ignored: what is known as the day ends': late('day', 'conversion_seen'),
      **{f'waiting {days} days': late(f'wait{days}_day') for days in tasks_data.WAITED},
      'all known at once': late('day'),
    },
  ),
  'lifecycle': Comparison(
    'configs/flights.yaml',
    'build/flights/flights_2013-12-31.csv',
    tasks_data.flights,
    {
      'neither': [*RARE, *NO_EVICTION],
      'admission': [*RARE, *ADMISSION, *NO_EVICTION],
      'eviction': RARE,
      'both': [*RARE, *ADMISSION],
    },
    lifecycle,
  ),
}
SELECTED = flags.DEFINE_list('comparisons', list(COMPARISONS), 'Comparisons to make.')


def shown(name: str, value: float) -> str:
  """Returns a figure as text for a table."""
  if name in ('features', 'admitted'):
    return f'{value:,.0f}'
  return f'{value:.2f}' if name == 'MB' else f'{value:.4f}'


def table(runs: dict[str, list[Figures]]) -> str:
  """Returns a table of medians over seeds for each model and task, with each seed's figures.

  Args:
    runs: model -> figures of each seed.
  """
  rows, figures = [], []
  for model, of_seeds in runs.items():
    for task in of_seeds[0]:
      figures = list(of_seeds[0][task])
      medians = [statistics.median(run[task][f] for run in of_seeds) for f in figures]
      each = [f for f in figures if f not in ('features', 'admitted', 'MB')]
      seeds = [' / '.join(shown(f, run[task][f]) for f in each) for run in of_seeds]
      rows.append([model, task, *map(shown, figures, medians), ', '.join(seeds)])
  kept = [i for i in range(len(rows[0])) if i != 1 or any(row[1] for row in rows)]
  head = ['model', 'task', *figures, f'seeds {", ".join(SEEDS.value)}']
  return markdown_table([head[i] for i in kept], [[row[i] for i in kept] for row in rows])


def main(_) -> None:
  os.chdir(ROOT)
  os.makedirs(OUT, exist_ok=True)
  for name in SELECTED.value:
    if name not in COMPARISONS:
      raise app.UsageError(f"found '{name}'; wanted some of {', '.join(COMPARISONS)}")
    one = COMPARISONS[name]
    if not os.path.exists(one.log):
      try:
        one.make()
      except (FileNotFoundError, ImportError) as e:
        print(f'skipped {name}: {e}')
        continue
    runs: dict[str, list[Figures]] = {model: [] for model in one.models}
    for seed in SEEDS.value:
      for model, changes in one.models.items():
        run_dir = place_of(name, model, seed)
        train(one.config, changes, seed, run_dir)
        runs[model].append(one.measure(run_dir))
        print(name, model, seed, runs[model][-1], flush=True)
    text = table(runs)
    print(text, flush=True)
    if len(SEEDS.value) == 3:
      write_between(PAGE, text, name)
      if name == 'lifecycle':
        lifecycle_picture({m: place_of(name, m, SEEDS.value[0]) for m in one.models}, PICTURE)


if __name__ == '__main__':
  app.run(main)
