"""Commands that look at a trained model on several ranks: they tell what one process tells."""

import json
import os
import subprocess
import sys
import tempfile
from unittest import mock

import numpy as np
import tensorflow as tf
import yaml


class SharedEvaluationTest(tf.test.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = tempfile.mkdtemp()
    rng = np.random.default_rng(0)
    texts = np.array(['phone', 'tablet', 'desktop', ''])
    for name in ('day_0', 'test'):
      device, item = rng.integers(0, 4, 4000), rng.integers(0, 30, 4000)
      click = rng.random(4000) < 1 / (1 + np.exp(-(0.2 * (item - 20) + 0.3 * device)))
      rows = [f'{texts[d]},{i},{c:d}\n' for d, i, c in zip(device, item, click)]
      with open(f'{folder}/{name}.csv', 'w', encoding='utf-8') as f:
        f.write('device,item,click\n' + ''.join(rows))
    tree = {
      'data': {
        'train': [f'{folder}/day_0.csv'],
        'test': [f'{folder}/test.csv'],
        'label': 'click',
        'slots': [{'name': 'device'}, {'name': 'item'}],
      },
      'sparse': {'tables': {'default': {'width': 4}}},
      'model': {'interactions': ['linear', 'fm']},
      'train': {'batch_size': 200},
    }
    with open(f'{folder}/config.yaml', 'w', encoding='utf-8') as f:
      yaml.safe_dump(tree, f)
    cls.run_dir = f'{folder}/run'
    cls.run_command('run', '--config', f'{folder}/config.yaml', '--run_dir', cls.run_dir)

  @staticmethod
  def run_command(name, *arguments, ranks=1):
    command = [sys.executable, '-m', f'trainer.{name}', *arguments]
    if ranks > 1:
      launcher = ['horovodrun', '--gloo', '-np', str(ranks), '-H', f'localhost:{ranks}']
      command = [*launcher, *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout

  def told(self, *arguments, ranks):
    """The JSON object that a command printed."""
    lines = self.run_command(*arguments, ranks=ranks).splitlines()
    (line,) = [line for line in lines if '{' in line]
    return json.loads(line[line.index('{') :])

  def test_slices(self):
    arguments = 'evaluate', '--run_dir', self.run_dir, '--by', 'device'  # to a pipe: JSON
    alone, shared = (self.told(*arguments, ranks=n)['device'] for n in (1, 2))
    self.assertCountEqual(
      [row['value'] for row in alone], ['phone', 'tablet', 'desktop', '(blank)']
    )
    for a, b in zip(alone, shared):
      self.assertEqual(a['value'], b['value'])
      self.assertAllClose(*({**row, 'value': 0, 'task': 0} for row in (a, b)), rtol=1e-3)
    with mock.patch.dict(os.environ, {'CTR_TERMINAL': '1'}):
      table = self.run_command(*arguments[:3], '--by', 'item', '--most', '3')
    self.assertIn('(other)', table)
    self.assertLen(table.splitlines(), 6)
    self.assertLessEqual(max(map(len, table.splitlines())), 80)

  def test_importance(self):
    arguments = 'inspect', '--run_dir', self.run_dir, '--importance', '--json'
    alone, shared = (self.told(*arguments, ranks=n)['importance'] for n in (1, 2))
    for a, b in zip(alone, shared):
      self.assertEqual(a.pop('column'), b.pop('column'))
      self.assertAllClose(a, b, 1e-5, 1e-7)


if __name__ == '__main__':
  tf.test.main()
