"""Corrections for sampling where popularity drifts: `python -m benchmarks.popularity_drift`.

The stream is made up, so the truth is known. Each user has a taste, each item a kind; on day t an
item is chosen with probability ∝ exp(taste · kind + popularity(t)), where each popularity is a
random walk. A model with in_batch_softmax trains on the days one by one and is evaluated on the
next one. The printed table has medians over seeds: recall and NDCG at 20 with each `logq`, and of
the true probabilities of that day, which a model can exceed only by chance.
"""

import json
import os
import tempfile
from collections.abc import Iterator

import numpy as np
from absl import app, flags, logging

from benchmarks.page import markdown_table
from trainer import config
from trainer.comm.communicator import SingleProcess
from trainer.evaluation.task import task_of
from trainer.job.job import Job
from trainer.retrieval import ranking

SEEDS = flags.DEFINE_integer('seeds', 3, 'Seeds 0, 1, … of the stream and the model.')
DAYS = flags.DEFINE_integer('days', 10, 'Days that a model trains on.')
STEP = flags.DEFINE_float('step', 0.7, "Standard deviation of a day's change of a popularity.")
SAMPLES = flags.DEFINE_integer('samples', 40_000, 'Samples of a day.')

USERS, ITEMS, WIDTH, K = 3000, 2000, 8, 20
VARIANTS = {
  'none': {'logq': 'none'},
  'uniform': {'logq': 'uniform'},
  'shows': {'logq': 'shows'},
  'shows, logq_positive': {'logq': 'shows', 'logq_positive': True},
}
METRICS = (f'recall@{K}', f'ndcg@{K}')


def days(seed: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
  """Yields, day by day, the users and the items of the samples, and all logits, [USERS, ITEMS]."""
  rng = np.random.default_rng(seed)
  taste, kind = rng.normal(size=[USERS, WIDTH]), rng.normal(size=[ITEMS, WIDTH])
  popularity = rng.normal(size=ITEMS) * 1.5
  for _ in range(DAYS.value + 1):
    logits = (taste @ kind.T) / WIDTH**0.5 * 1.5 + popularity
    chances = np.exp(logits - logits.max(1, keepdims=True))
    cumulated = np.cumsum(chances / chances.sum(1, keepdims=True), 1)
    users = rng.integers(0, USERS, SAMPLES.value)
    drawn = rng.random(SAMPLES.value)
    items = np.array([np.searchsorted(cumulated[u], x) for u, x in zip(users, drawn)])
    yield users, np.minimum(items, ITEMS - 1), logits
    # The walk returns a little each day, so that the spread of popularities stays the same.
    keep = (1 - (STEP.value / 1.5) ** 2) ** 0.5
    popularity = keep * popularity + STEP.value * rng.normal(size=ITEMS)


def truth(trained: set[tuple[int, int]], users, items, logits) -> dict[str, float]:
  """Returns the metrics of the true logits on the last day, judged as a model is."""
  wanted = np.array(sorted(set(zip(users.tolist(), items.tolist())) - trained))
  asked, counts = np.unique(wanted[:, 0], return_counts=True)
  seen = np.array(sorted(trained))
  seen = seen[np.isin(seen[:, 0], asked)]
  scores = logits[asked].copy()
  scores[np.searchsorted(asked, seen[:, 0]), seen[:, 1]] = -np.inf
  ranked = np.argsort(-scores, 1)[:, :K]
  pairs = np.searchsorted(asked, wanted[:, 0]), wanted[:, 1]
  return ranking.judge(ranked, pairs, counts, np.zeros([ITEMS]), [K])


def trained(folder: str, name: str, seed: int, settings: dict) -> dict[str, float]:
  """Trains a model on the days in a folder; returns its metrics on the test day."""
  run_dir = os.path.join(folder, name)
  cfg = config.Config.model_validate(
    {
      'run_dir': run_dir,
      'seed': seed,
      'data': {
        'train': [f'{folder}/day_*.csv'],
        'test': [f'{folder}/test_*.csv'],
        'day_pattern': r'day_(\d+)',
        'label': None,
        'group': 'user',
        'slots': [{'name': 'user'}, {'name': 'item'}],
      },
      'lifecycle': {'decay': 0.3},
      'sparse': {'tables': {'default': {'width': 16, 'factors': {'learning_rate': 0.3}}}},
      'model': {
        'retrieval': {
          'query': {'slots': ['user']},
          'item': {'slots': ['item']},
          'similarity': 'dot',
          'temperature': 1.0,
          'loss': 'in_batch_softmax',
          'eval_at': [K],
        }
        | settings
      },
      'train': {'batch_size': 512},
    }
  )
  job = Job(cfg, SingleProcess(), task_of(cfg).step(SingleProcess()))
  assert job.run() == 0
  job.close()
  with open(f'{run_dir}/metrics.jsonl', encoding='utf-8') as f:
    return [e for e in map(json.loads, f) if e['event'] == 'eval' and e['split'] == 'test'][-1]


def main(_):
  found = {name: [] for name in (*VARIANTS, 'the true probabilities')}
  for seed in range(SEEDS.value):
    with tempfile.TemporaryDirectory() as folder:
      seen: set[tuple[int, int]] = set()
      for day, (users, items, logits) in enumerate(days(seed)):
        is_last = day == DAYS.value
        path = f'{folder}/{"test_" * is_last}day_{day:02}.csv'
        np.savetxt(path, np.stack([users, items], 1), '%d', ',', header='user,item', comments='')
        if not is_last:
          seen |= set(zip(users.tolist(), items.tolist()))
      found['the true probabilities'].append(truth(seen, users, items, logits))
      for name, settings in VARIANTS.items():
        found[name].append(trained(folder, name.replace(', ', '_'), seed, settings))
        logging.info('seed %d, %s: %s', seed, name, [found[name][-1][m] for m in METRICS])
  rows = [
    [name, *(f'{np.median([one[m] for one in of_seeds]):.4f}' for m in METRICS)]
    for name, of_seeds in found.items()
  ]
  print(markdown_table(['logq', *METRICS], rows))


if __name__ == '__main__':
  app.run(main)
