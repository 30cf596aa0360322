"""What the lifecycle saves and what it costs: the demo's days with admission and eviction on and
off. `python -m benchmarks.ablation`

Trains each setting in one process (build/ablation/NAME) and writes docs/ablation.md.
"""

import json
import os
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SETTINGS = {
  'none (every feature has factors, none is deleted)': {'admission': 'none', 'eviction': 'none'},
  'admission': {'eviction': 'none', 'delete_after_unseen_days': None},
  'eviction': {'admission': 'none'},
  'admission and eviction (the demo)': {},
}
PAGE = """# What the lifecycle saves, and what it costs

The demo's five days and its test day (`configs/demo.yaml`, one process, seed {seed}), made by
`python -m benchmarks.ablation`. Half of the samples carry a query that is never seen again. Table
bytes are all that is allocated for features and rows after the last day end.

| lifecycle | features after each day | admitted | table MB | test AUC | test logloss |
|---|---|---|---|---|---|
{rows}

With admission and eviction the tables hold {fewer:.1f} times fewer features in {smaller:.1f} times
fewer bytes than with neither, and the test AUC differs by {auc:+.4f}.
"""


def train(name, lifecycle):
  """Returns (features after each day, the last day_end event, the test event)."""
  run_dir = os.path.join(ROOT, 'build', 'ablation', name.split(' (')[0].replace(' ', '_'))
  shutil.rmtree(run_dir, ignore_errors=True)
  overrides = [f'--set=lifecycle.{k}={json.dumps(v)}' for k, v in lifecycle.items()]
  subprocess.run(
    [
      sys.executable,
      '-m',
      'trainer.run',
      '--config',
      'configs/demo.yaml',
      '--run_dir',
      run_dir,
      '--set=train.progressive_validation=false',
      *overrides,
    ],
    cwd=ROOT,
    check=True,
  )
  with open(os.path.join(run_dir, 'metrics.jsonl'), encoding='utf-8') as f:
    events = [json.loads(line) for line in f]
  days = [e for e in events if e['event'] == 'day_end']
  return (
    [d['features'] for d in days],
    days[-1],
    next(e for e in events if e['event'] == 'eval' and e['split'] == 'test'),
  )


def main():
  if not os.path.isdir(os.path.join(ROOT, 'build', 'demo_log')):
    subprocess.run(
      [sys.executable, '-m', 'trainer.synthesize', '--out', 'build/demo_log'], cwd=ROOT, check=True
    )
  results = {name: train(name, lifecycle) for name, lifecycle in SETTINGS.items()}
  rows = [
    f'| {name} | {" · ".join(f"{f:,}" for f in days)} | {last["admitted"]:,} | '
    f'{last["table_bytes"] / 1e6:.1f} | {test["auc"]:.4f} | '
    f'{test["logloss"]:.4f} |'
    for name, (days, last, test) in results.items()
  ]
  (_, off, off_test), *_, (_, on, on_test) = results.values()
  page = PAGE.format(
    seed=0,
    rows='\n'.join(rows),
    fewer=off['features'] / on['features'],
    smaller=off['table_bytes'] / on['table_bytes'],
    auc=on_test['auc'] - off_test['auc'],
  )
  with open(os.path.join(ROOT, 'docs', 'ablation.md'), 'w', encoding='utf-8') as f:
    f.write(page)
  print(page)


if __name__ == '__main__':
  main()
