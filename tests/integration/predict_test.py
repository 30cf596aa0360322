"""trainer.cli.predict as people use it: no labels, columns of the input, from anywhere."""

import json
import os

import numpy as np
import pandas as pd
import tensorflow as tf

from tests.support import commands, small

CONFIG = small.tree(
  data={'label': 'click', 'weight': 'w', 'group': 'user', 'dense': [{'name': 'price'}]},
  model={'interactions': ['linear', 'fm']},
  train={'batch_size': 100},
)


class PredictTest(tf.test.TestCase):
  def run_command(self, name, *args, **kwargs):
    return commands.run('-m', commands.module(name), *args, **kwargs)

  def test_without_labels_and_with_columns(self):
    folder = self.get_temp_dir()
    rng = np.random.default_rng(0)
    table = pd.DataFrame(
      {
        'id': [f'"{i}"' for i in range(500)],
        'user': [f'u{i}' for i in rng.integers(20, size=500)],
        'item': rng.integers(9, size=500),
        'price': rng.random(500).round(3),
        'click': rng.integers(2, size=500),
        'w': 1.0,
      }
    )
    table.to_csv(f'{folder}/train.csv', index=False)
    unlabelled = table.drop(columns=['click', 'w'])
    unlabelled.to_csv(f'{folder}/new.csv', index=False)
    unlabelled.to_parquet(f'{folder}/new.parquet', index=False)
    small.write(f'{folder}/config.yaml', CONFIG, data={'train': [f'{folder}/train.csv']})
    run = f'{folder}/run'
    done = self.run_command('run', '--config', f'{folder}/config.yaml', '--run_dir', run)
    self.assertEqual(done.returncode, 0, done.stderr)

    def predict(*args, **kwargs):
      done = self.run_command('predict', '--run_dir', run, *args, **kwargs)
      self.assertEqual(done.returncode, 0, done.stderr)
      return done.stdout

    want = np.loadtxt(predict('--data', f'{folder}/train.csv').splitlines())
    with open(f'{folder}/new.csv', encoding='utf-8') as f:
      plain = predict('--data', '-', stdin=f)
    self.assertAllEqual(np.loadtxt(plain.splitlines()), want)
    out = f'{folder}/out.csv'
    predict('--data', f'{folder}/new.csv', '--columns', 'id,price', '--out', out)
    found = pd.read_csv(out, dtype={'id': str})
    self.assertEqual(list(found.columns), ['id', 'price', 'probability'])
    self.assertEqual(list(found['id']), list(table['id']))
    self.assertAllClose(found['probability'], want)
    unlabelled.assign(item=unlabelled['item'].astype(float)).to_csv(f'{folder}/f.csv', index=False)
    self.assertEqual(predict('--data', f'{folder}/f.csv'), plain, '7.0 is 7')
    unlabelled.assign(item='x').to_csv(f'{folder}/f.csv', index=False)
    done = self.run_command('predict', '--run_dir', run, '--data', f'{folder}/f.csv')
    self.assertRegex(done.stderr, "slot 'item': 100% of the samples have unknown")
    os.symlink(f'{folder}/linked.txt', f'{folder}/link.txt')
    predict('--data', f'{folder}/new.csv', '--out', f'{folder}/link.txt')
    self.assertAllEqual(np.loadtxt(f'{folder}/linked.txt'), want)
    self.assertTrue(os.path.islink(f'{folder}/link.txt'))
    self.assertEqual(predict('--data', f'{folder}/new.csv', '--out', '/dev/stdout'), plain)
    done = self.run_command(
      'predict', '--run_dir', run, '--data', f'{folder}/new.csv', '--out', '/dev/full'
    )
    self.assertEqual((done.returncode, os.path.isfile('/dev/full')), (2, False))
    self.assertRegex(done.stderr, '^error: cannot write --out: .*No space left on device.*\n$')
    out = f'{folder}/out.parquet'
    predict('--data', f'{folder}/new.parquet', '--columns', 'id,item', '--out', out)
    found = pd.read_parquet(out)
    self.assertAllEqual(found['item'], table['item'])
    self.assertAllClose(found['probability'], want)
    with open(os.devnull, encoding='utf-8') as nothing:
      done = self.run_command('predict', '--run_dir', run, '--data', '-', stdin=nothing)
    told = 'error: --data - (standard input): the file is empty'
    self.assertEqual((done.returncode, done.stderr.splitlines()[-1][: len(told)]), (2, told))
    table.assign(click=0).to_csv(f'{folder}/shows.csv', index=False)
    done = self.run_command('evaluate', '--run_dir', run, '--data', f'{folder}/shows.csv')
    self.assertIsNone(json.loads(done.stdout)['auc'])
    self.assertIn('no AUC: all labels are 0', done.stderr)
    self.assertEqual(sorted(os.listdir(folder))[-1], 'train.csv')  # nothing unfinished is left


if __name__ == '__main__':
  tf.test.main()
