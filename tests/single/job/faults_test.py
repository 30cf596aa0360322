"""Faults planted in a log are named in the report's first words; a healthy log has none."""

import os
import tempfile

import numpy as np
import tensorflow as tf

from tests.support import small
from trainer import config
from trainer.tools import findings
from trainer.tools.runs import read_run

DAYS, SAMPLES = 5, 2000


class FaultsTest(tf.test.TestCase):
  def faults(self, plant):
    """Trains on five days of a log, each changed by `plant(day, columns)`; returns what is told."""
    folder, rng = tempfile.mkdtemp(dir=self.get_temp_dir()), np.random.default_rng(0)
    for day in range(DAYS + 1):
      user, item = rng.integers(0, 30, [2, SAMPLES])
      logit = 0.2 * (user - 15) + 0.1 * (item - 15)
      click = rng.random(SAMPLES) < 1 / (1 + np.exp(-logit))
      columns = {'user': user, 'item': item, 'tip': rng.integers(0, 9, SAMPLES), 'click': click}
      plant(day, columns)
      rows = zip(*(c.astype(int).astype(str) if c.dtype != object else c for c in columns.values()))
      name = f'day_{day}.csv' if day < DAYS else 'test.csv'
      with open(f'{folder}/{name}', 'w', encoding='utf-8') as f:
        f.write('\n'.join([','.join(columns), *map(','.join, rows)]) + '\n')
    data = {'train': [f'{folder}/day_*.csv'], 'test': [f'{folder}/test.csv'], 'label': 'click'}
    data['slots'] = [{'name': 'user'}, {'name': 'item'}, {'name': 'tip'}]
    file = small.write(
      f'{folder}/config.yaml',
      run_dir=f'{folder}/run',
      data=data | {'day_pattern': r'day_(\d+)'},
      model={'interactions': ['linear', 'fm']},
      sparse={'tables': {'default': {'width': 4}}},
      train={'batch_size': 50, 'progressive_validation': True},
      checkpoint={'every_passes': None},
    )
    cfg = config.load(file)
    small.job(cfg).run()
    self.assertTrue(os.path.exists(f'{cfg.run_dir}/metrics.jsonl'))
    return findings.faults(read_run(cfg.run_dir))

  def test_a_healthy_log(self):
    self.assertEqual(self.faults(lambda day, columns: None), [])

  def test_a_leak(self):
    def plant(day, columns):
      columns['tip'] = columns['click'].astype(int)

    (told,) = self.faults(plant)
    self.assertEqual((told.code, told.where), ('leak', 'tip'))
    self.assertLess(told.figures['without'], told.figures['auc'] - 0.15)

  def test_a_slot_that_goes_blank(self):
    def plant(day, columns):
      if day >= 3:
        columns['tip'] = np.full(SAMPLES, '', object)

    (told,) = self.faults(plant)
    figures = {'when': 'from day_3 on', 'share': 1.0, 'usual': 0.0, 'of': 'samples'}
    self.assertEqual(told, ('went_blank', 'tip', figures))

  def test_a_label_that_breaks_for_a_day(self):
    def plant(day, columns):
      if day == 2:
        columns['click'] = columns['click'][::-1]

    told = self.faults(plant)
    self.assertEqual((told[0].code, told[0].where), ('label_auc', 'day_2'))
    self.assertLess(told[0].figures['auc'], told[0].figures['usual'] - 0.1)


if __name__ == '__main__':
  tf.test.main()
