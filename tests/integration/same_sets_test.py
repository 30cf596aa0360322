"""1, 2 and 3 ranks admit and evict identical sets on real clicks, and count the same shows."""

import json
import os
import tempfile

import numpy as np
import pytest
import tensorflow as tf

from tests.support import jobs, small
from trainer.storage import checkpoint

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..')
FRAPPE = os.path.join(ROOT, '..', 'shared', 'data', 'frappe', 'train.csv')
SLOTS = 'user', 'item', 'daytime', 'weekday', 'weather', 'country', 'city'
CONFIG = small.tree(
  data={'day_pattern': r'day_(\d+)', 'slots': [{'name': name} for name in SLOTS]},
  lifecycle={
    'admission_threshold': 2.0,
    'delete_threshold': 0.5,
    'delete_after_unseen_days': 1,
    'decay': 0.7,
    'capacity': 1500,
  },
  model={'interactions': ['linear', 'fm']},
  train={'batch_size': 1000},
)


class Features:
  """Takes up a checkpoint's features: key -> (admitted, show, click)."""

  def __init__(self):
    self.features = {}

  def import_state(self, chunks):
    for chunk in chunks:
      self.features.update(
        zip(
          chunk['key'].tolist(),
          zip(
            chunk['admitted'].tolist(), *(np.round(chunk[c], 6).tolist() for c in ('show', 'click'))
          ),
        )
      )


@pytest.mark.long
class SameSetsTest(tf.test.TestCase):
  def test_frappe_as_three_days(self):
    if not os.path.exists(FRAPPE):
      self.skipTest('../shared/data/frappe is not there')
    folder = tempfile.mkdtemp()
    with open(FRAPPE, encoding='utf-8') as f:
      header, *rows = f
    for day in range(3):
      with open(f'{folder}/day_{day}.csv', 'w', encoding='utf-8') as f:
        f.writelines([header, *rows[day * 10_000 : day * 10_000 + 9_999]])
    small.write(f'{folder}/config.yaml', CONFIG, data={'train': [f'{folder}/day_*.csv']})
    found = {}
    for ranks in (1, 2, 3):
      run_dir = f'{folder}/{ranks}'
      jobs.run(ranks, 'trainer.run', '--config', f'{folder}/config.yaml', '--run_dir', run_dir)
      store = Features()
      checkpoint.restore(next(iter(checkpoint.candidates(f'{run_dir}/checkpoints'))), store=store)
      with open(f'{run_dir}/metrics.jsonl', encoding='utf-8') as f:
        days = [
          (e['features'], e['admitted'], e['evicted'])
          for e in map(json.loads, f)
          if e['event'] == 'day_end'
        ]
      found[ranks] = days, store.features
    days, rows = found[1]
    self.assertTrue(all(evicted for _, _, evicted in days), days)
    self.assertTrue(all(0 < admitted < features <= 1500 for features, admitted, _ in days), days)
    for ranks in (2, 3):
      self.assertEqual(found[ranks][0], days)
      self.assertEqual(found[ranks][1].keys(), rows.keys())
      self.assertEqual(found[ranks][1], rows)


if __name__ == '__main__':
  tf.test.main()
