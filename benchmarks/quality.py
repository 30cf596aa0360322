"""Trains the committed Frappe configs and rewrites docs/quality.md: `python -m benchmarks.quality`.

Each model with each seed is one run of `trainer.run` in build/quality/; finished runs are kept. The
table has the figures of the test set at the epoch that is best on validation, medians over seeds.
"""

import json
import os
import statistics
import subprocess
import sys

from absl import app, flags

from benchmarks.page import ROOT, machine, made_by, markdown_table, write_between

# model -> published AUC and logloss (BARS, Frappe_x1, single runs), then the AUC that we want
MODELS = {
  'lr': ((0.9356, 0.3076), 0.9350),
  'fm': ((0.9671, 0.2065), 0.9670),
  'ffm': ((0.9786, 0.1860), 0.9770),
  'dnn': ((0.9833, 0.1622), 0.9830),
  'deepfm': ((0.9842, 0.1482), 0.9835),
  'dcnv2': ((0.9845, 0.1491), 0.9835),
}
NAMES = {'lr': 'LR', 'fm': 'FM', 'ffm': 'FFM', 'dnn': 'DNN', 'deepfm': 'DeepFM', 'dcnv2': 'DCNv2'}

SELECTED = flags.DEFINE_list('models', list(MODELS), 'Models to train.')
SEEDS = flags.DEFINE_list('seeds', ['1', '2', '3'], 'Seeds of each model.')
TWO_RANKS = flags.DEFINE_list('two_ranks', ['deepfm'], 'Models to train on 2 ranks too.')
DATA = os.path.join(ROOT, '..', 'shared', 'data', 'frappe')
OUT = os.path.join('build', 'quality')
PAGE = os.path.join('docs', 'quality.md')


def events_of(run_dir):
  """Returns the events in a run's metrics.jsonl; [] if there is none."""
  path = os.path.join(run_dir, 'metrics.jsonl')
  if not os.path.exists(path):
    return []
  with open(path, encoding='utf-8') as f:
    return [json.loads(text) for text in f]


def final_test(run_dir):
  """Returns (AUC, logloss) of a run's test set; None if it was not evaluated."""
  tests = [e for e in events_of(run_dir) if e['event'] == 'eval' and e['split'] == 'test']
  return (tests[-1]['auc'], tests[-1]['logloss']) if tests else None


def train(config, changes, seed, run_dir, ranks=1):
  """Trains a model with a changed config, unless that is finished; {seed} stands for the seed."""
  events = events_of(run_dir)
  if events and events[-1].get('status') == 'finished':
    return
  command = [sys.executable, '-m', 'trainer.run', '--config', config, '--run_dir', run_dir]
  for change in [f'seed={seed}', *changes]:
    command += ['--set', change.replace('{seed}', seed)]
  if ranks > 1:
    horovodrun = os.path.join(os.path.dirname(sys.executable), 'horovodrun')
    command = [horovodrun, '--gloo', '-np', str(ranks), '-H', f'localhost:{ranks}', *command]
  os.makedirs(os.path.dirname(run_dir), exist_ok=True)
  with open(f'{run_dir}.log', 'wb') as log:
    status = subprocess.run(command, stdout=log, stderr=log, check=False).returncode
  if status:
    raise SystemExit(f'{" ".join(command)} ended with status {status}: see {run_dir}.log')


def frappe(model, seed, ranks):
  """Trains a model on Frappe; returns its (AUC, logloss) on the test set."""
  run_dir = os.path.join(OUT, f'{model}_seed{seed}' + (f'_{ranks}ranks' if ranks > 1 else ''))
  train(os.path.join('configs', f'frappe_{model}.yaml'), [], seed, run_dir, ranks)
  auc, logloss = final_test(run_dir)
  print(
    f'{model}, seed {seed}, {ranks} ranks: test AUC {auc:.5f}, logloss {logloss:.5f}', flush=True
  )
  return auc, logloss


def score(auc, logloss):
  return f'{auc:.4f} / {logloss:.4f}'


def medians(results):
  return tuple(statistics.median(column) for column in zip(*results))


def main(_):
  os.chdir(ROOT)
  for model in [*SELECTED.value, *TWO_RANKS.value]:
    if model not in MODELS:
      raise app.UsageError(f"found '{model}'; wanted some of {', '.join(MODELS)}")
  if not os.path.isdir(DATA):
    print('skipped: ../shared/data/frappe is not there; it may not be redistributed')
    return
  one = {model: [frappe(model, seed, 1) for seed in SEEDS.value] for model in SELECTED.value}
  two = {
    model: [frappe(model, seed, 2) for seed in SEEDS.value]
    for model in TWO_RANKS.value
    if model in one
  }
  rows = [
    [
      NAMES[model],
      score(*medians(results)),
      score(*MODELS[model][0]),
      f'{MODELS[model][1]:.4f}',
      ', '.join(score(*r) for r in results),
      score(*medians(two[model])) if model in two else '',
    ]
    for model, results in one.items()
  ]
  head = ['model', 'ours, median', 'published', 'AUC wanted']
  head += [f'ours, seeds {", ".join(SEEDS.value)}', '2 ranks, median']
  text = markdown_table(head, rows) + f'\n\nAUC / logloss on test. {made_by()}'
  print(text)
  with open(os.path.join('build', 'quality.json'), 'w', encoding='utf-8') as f:
    figures = {'seeds': SEEDS.value, 'one_process': one, 'two_ranks': two, 'machine': machine()}
    json.dump(figures, f, indent=1)
  if set(one) == set(MODELS):
    write_between(PAGE, text)
    print(f'wrote build/quality.json and {PAGE}')


if __name__ == '__main__':
  app.run(main)
