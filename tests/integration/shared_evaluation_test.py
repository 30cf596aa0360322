"""Commands that look at a trained model on several ranks: they tell what one process tells."""

import json
import pathlib
import tempfile

import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

from tests.support import commands, jobs, small


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
      rows = [f'{texts[d]},{i},{c:d},{"XY"[i % 2]},a\n' for d, i, c in zip(device, item, click)]
      with open(f'{folder}/{name}.csv', 'w', encoding='utf-8') as f:
        f.write('device,item,click,country,topic\n' + ''.join(rows))
    data = {'train': [f'{folder}/day_0.csv'], 'test': [f'{folder}/test.csv'], 'label': 'click'}
    data['slots'] = [{'name': 'device'}, {'name': 'item'}, {'name': 'topics', 'column': 'topic'}]
    small.write(
      f'{folder}/config.yaml',
      data=data,
      sparse={'tables': {'default': {'width': 4}}},
      model={'interactions': ['linear', 'fm']},
      train={'batch_size': 200},
    )
    cls.run_dir = f'{folder}/run'
    jobs.run(1, 'trainer.run', '--config', f'{folder}/config.yaml', '--run_dir', cls.run_dir)

  def told(self, name, *arguments, ranks):
    """The JSON object that a command printed."""
    lines = jobs.run(ranks, commands.module(name), *arguments).splitlines()
    (line,) = [line for line in lines if '{' in line]
    return json.loads(line[line.index('{') :])

  def test_slices(self):
    arguments = 'evaluate', '--run_dir', self.run_dir, '--by', 'device'  # to a pipe: JSON
    alone, shared = (self.told(*arguments, ranks=n)['device'] for n in (1, 2))
    self.assertCountEqual(
      [row['value'] for row in alone], ['phone', 'tablet', 'desktop', '(blank)', '(all)']
    )
    for a, b in zip(alone, shared):
      self.assertEqual(a['value'], b['value'])
      self.assertAllClose(*({**row, 'value': 0, 'task': 0} for row in (a, b)), rtol=1e-3)
    everyone = self.told(*arguments[:3], ranks=1)
    self.assertAllClose(
      [alone[-1][key] for key in ('samples', 'auc', 'logloss', 'calibration')],
      [everyone[key] for key in ('examples', 'auc', 'logloss', 'calibration')],
      rtol=1e-4,  # the AUC of all is of bins
    )
    command = '-m', 'trainer.cli.evaluate', *arguments[1:3]
    table = commands.run(*command, '--by', 'item', '--most', '3', '--nojson').stdout
    self.assertIn('(other)', table)
    self.assertLen(table.splitlines(), 7)
    self.assertLessEqual(max(map(len, table.splitlines())), 80)

  def test_slices_of_a_column_that_the_model_does_not_read(self):
    arguments = 'evaluate', '--run_dir', self.run_dir, '--by', 'country', '--by', 'device'
    alone, shared = (self.told(*arguments, ranks=n) for n in (1, 2))
    for told in (alone, shared):
      self.assertCountEqual([row['value'] for row in told['country']], ['X', 'Y', '(all)'])
      self.assertAlmostEqual(told['country'][-1]['auc'], told['device'][-1]['auc'])
    for a, b in zip(alone['country'], shared['country']):
      self.assertAllClose(*({**row, 'value': 0, 'task': 0} for row in (a, b)), rtol=1e-3)
    self.assertEqual(sum(row['samples'] for row in alone['country'][:2]), 4000)
    done = commands.run('-m', 'trainer.cli.evaluate', *arguments[1:3], '--by', 'contry')
    self.assertEqual(done.returncode, 2)
    wanted = "no column 'contry' (--by) among 5 columns; the nearest valid name is"
    self.assertIn(wanted, done.stderr)

  @pytest.mark.long
  def test_slices_of_lists(self):
    rows = [{'device': 'tv', 'item': i, 'click': i % 2, 'country': 'X'} for i in range(40)]
    for row in rows:
      row |= {'topic': ['a', f'b{row["item"] % 3}'], 'tags': [f'c{row["item"] % 3}', 'd']}
    parquet, lines = (
      f'{pathlib.Path(self.run_dir).parent}/lists.{e}' for e in ('parquet', 'jsonl')
    )
    frame = pd.DataFrame(rows)
    frame.to_parquet(parquet)
    frame.iloc[0, frame.columns.get_loc('tags')].clear()  # not all lines have the same kind
    frame.to_json(lines, orient='records', lines=True)
    command = '-m', 'trainer.cli.evaluate', '--run_dir', self.run_dir
    for path in (parquet, lines):
      for column, slot in (('tags', ''), ('topic', ", as 'topics'")):
        done = commands.run(*command, '--data', path, '--by', column)
        self.assertEqual(done.returncode, 2)
        wanted = f'wanted a slot{slot}, or a column of single values'
        self.assertIn(
          f'error: --by {column}: found lists or maps in {path}; {wanted}\n', done.stderr
        )
      done = commands.run(*command, '--data', path, '--by', 'topics')
      rows = {row['value']: row['samples'] for row in json.loads(done.stdout)['topics']}
      self.assertEqual(rows, {'a': 40, 'b0': 14, 'b1': 13, 'b2': 13, '(all)': 40})
    nothing = pathlib.Path(self.get_temp_dir()) / 'nothing.csv'
    nothing.write_text(','.join(frame) + '\n')
    done = commands.run(*command, '--data', nothing, '--by', 'tags')
    told = f'error: {nothing}: found no records; wanted at least one\n'
    self.assertEqual((done.returncode, done.stderr[-len(told) :]), (2, told))

  def test_slices_of_passes(self):
    files = list(map(str, sorted(pathlib.Path(self.run_dir).parent.glob('*.csv'))))
    data = [f'--data={path}' for path in files]
    arguments = 'evaluate', '--run_dir', self.run_dir, '--by', 'pass', *data
    alone, shared = (self.told(*arguments, ranks=n)['pass'] for n in (1, 2))
    self.assertEqual([row['value'] for row in alone], [row['value'] for row in shared])
    self.assertEqual(alone[-1]['value'], '(all)')
    for path, a, b in zip(files, alone, shared):
      self.assertIn(a['value'], path)
      self.assertAllClose(*({**row, 'value': 0, 'task': 0} for row in (a, b)), rtol=1e-3)
      of_file = self.told(*arguments[:3], '--data', path, ranks=1)
      self.assertAllClose(a['auc'], of_file['auc'], rtol=1e-4)
    self.assertLen(alone, len(files) + 1)

  def test_importance(self):
    arguments = 'inspect', '--run_dir', self.run_dir, '--importance', '--json'
    alone, shared = (self.told(*arguments, ranks=n)['importance'] for n in (1, 2))
    for a, b in zip(alone, shared):
      self.assertEqual(a.pop('column'), b.pop('column'))
      self.assertAllClose(a, b, 1e-5, 1e-7)


if __name__ == '__main__':
  tf.test.main()
