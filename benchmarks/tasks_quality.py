"""The quality of several tasks and of late conversions: `python -m benchmarks.tasks_quality`.

Each run is one of `trainer.run`, in build/tasks_quality/; a finished one is not done again. It
prints AUC, logloss and calibration of each task on test, as medians over seeds; docs/quality.md has
them. The logs come from benchmarks.tasks_data and trainer.synthesize.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence

from absl import app, flags

from benchmarks.page import ROOT, markdown_table

SEEDS = flags.DEFINE_list('seeds', ['1', '2', '3'], 'Seeds of each.')
SELECTED = flags.DEFINE_list('only', ['census', 'late'], 'Which comparisons.')
OUT = os.path.join('build', 'tasks_quality')
ONE_TASK = [
  'data.labels=[]',
  'model.shared=null',
  'model.tasks={}',
  'model.interactions=[{dnn: {hidden: [16, 8], dropout: 0.1}}]',
]
KNOWN = ['data.labels.1.loss=log_loss']
# comparison -> its config, the log that it wants, and by name what each model changes
COMPARISONS = {
  'census': (
    'configs/census_mmoe.yaml',
    'build/tasks/census_train.csv',
    {
      'MMoE': [],
      'income alone': [*ONE_TASK, 'data.label=c41', r'data.label_positive="50000\\+\\."'],
      'never married alone': [*ONE_TASK, 'data.label=c7', 'data.label_positive=Never married'],
    },
  ),
  'late': (
    'configs/late_conversions.yaml',
    'build/late/stream_00.csv',
    {
      'fake_negative': [],
      'ignoring what comes late': [
        *KNOWN,
        'data.train=["build/late/day_*.csv"]',
        'data.labels.1.column=conversion_seen',
      ],
      'waiting 6 days': [
        *KNOWN,
        'data.train=["build/late/day_0[0-3].csv"]',
        'data.labels.1.column=conversion',
      ],
    },
  ),
}
FIGURES = ('auc', 'logloss', 'calibration')


def final_test(run_dir: str) -> dict[str, dict[str, float]] | None:
  """Figures of the test set by task ('' where there is one), or None where a run is not done."""
  path = os.path.join(run_dir, 'metrics.jsonl')
  if not os.path.exists(path):
    return None
  with open(path, encoding='utf-8') as f:
    events = [json.loads(text) for text in f]
  tests = [e for e in events if e['event'] == 'eval' and e.get('split') == 'test']
  return tests[-1].get('tasks', {'': tests[-1]}) if tests else None


def train(config: str, changes: Sequence[str], seed: str, run_dir: str) -> dict:
  """Trains one model unless it is there; returns what `final_test` does."""
  found = final_test(run_dir)
  if found is None:
    command = [sys.executable, '-m', 'trainer.run', '--config', config, '--run_dir', run_dir]
    for change in [f'seed={seed}', *changes]:
      command += ['--set', change]
    os.makedirs(OUT, exist_ok=True)
    with open(f'{run_dir}.log', 'wb') as log:
      status = subprocess.run(command, stdout=log, stderr=log, check=False).returncode
    found = final_test(run_dir)
    if status or found is None:
      raise SystemExit(f'{" ".join(command)} ended with status {status}: see {run_dir}.log')
  return found


def main(_) -> None:
  os.chdir(ROOT)
  for name in SELECTED.value:
    if name not in COMPARISONS:
      raise app.UsageError(f"found '{name}'; wanted some of {', '.join(COMPARISONS)}")
    config, log, models = COMPARISONS[name]
    if not os.path.exists(log):
      print(f'skipped {name}: {log} is not there; the first lines of {config} say how to make it')
      continue
    rows = []
    for model, changes in models.items():
      place = os.path.join(OUT, f'{name}_{model.replace(" ", "_")}')
      runs = [train(config, changes, seed, f'{place}_{seed}') for seed in SEEDS.value]
      for task in runs[0]:
        medians = [statistics.median(run[task][figure] for run in runs) for figure in FIGURES]
        rows.append([model, task, *(f'{x:.4f}' for x in medians)])
    print(markdown_table(['model', 'task', *FIGURES], rows), flush=True)


if __name__ == '__main__':
  app.run(main)
