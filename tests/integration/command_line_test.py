"""The commands as a user types them:

train, continue, evaluate, predict; and every mistake ends in one line and status 2.
"""

import json
import os
import signal
import subprocess
import tempfile

import numpy as np
import sklearn.metrics
import tensorflow as tf

from tests.support import commands, small

DENSE = [{'name': 'price', 'transform': 'standardise'}]
CONFIG = small.tree(
  data={'label': 'click', 'group': 'user', 'dense': DENSE},
  model={'interactions': ['linear', 'fm']},
  train={'batch_size': 100, 'log_every_steps': 1},
)


def command(name, *args):
  return commands.run('-m', commands.module(name), *args)


class CommandLineTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = tempfile.mkdtemp(dir=self.get_temp_dir())
    rng = np.random.default_rng(0)
    for name in ('train', 'test'):
      rows = [
        f'{rng.integers(30)},{rng.integers(20)},{rng.random():.3f},{int(rng.random() < 0.3)}'
        for _ in range(950)
      ]
      self.write(f'{name}.csv', rows)
    self.config()

  def write(self, name, rows, header='user,item,price,click'):
    with open(f'{self.folder}/{name}', 'w', encoding='utf-8') as f:
      f.write('\n'.join([header, *rows] if header else rows) + '\n' * bool(header or rows))

  def config(self, **data):
    files = {split: [f'{self.folder}/{split}.csv'] for split in ('train', 'test')}
    small.write(f'{self.folder}/config.yaml', CONFIG, data=files | data)

  def flags(self):
    return '--config', f'{self.folder}/config.yaml', '--run_dir', f'{self.folder}/run'

  def train(self, *args):
    return command('run', *self.flags(), *args)

  def assert_narrow(self, done):
    """What a job says is at most 100 columns wide, but for commands to copy."""
    for line in (done.stdout + done.stderr).splitlines():
      if not line.startswith('  ctr-'):
        self.assertLessEqual(len(line), 100, line)

  def events(self):
    with open(f'{self.folder}/run/metrics.jsonl', encoding='utf-8') as f:
      return [json.loads(line) for line in f]

  def test_train_evaluate_predict_continue(self):
    done = self.train()
    self.assertEqual(done.returncode, 0, done.stderr)
    train, test = [e for e in self.events() if e['event'] in ('train', 'eval')]
    shown = [e['event'] for e in self.events()]
    self.assertEqual(
      shown, ['start', *['window'] * 10, 'train', 'save', 'eval', 'importance', 'end']
    )
    windows = [e for e in self.events() if e['event'] == 'window']
    self.assertEqual(sum(e['examples'] for e in windows), 950)
    self.assertEqual(
      (train['event'], train['examples'], train['pass'], test['event']),
      ('train', 950, 'train', 'eval'),
    )
    fields = 'logloss auc calibration examples_per_second features admitted table_bytes step'
    self.assertContainsSubset(fields.split(), train)
    for name in ('config.yaml', 'tensorboard', 'checkpoints', 'report.html'):
      self.assertTrue(os.path.exists(f'{self.folder}/run/{name}'), name)
    evaluated = json.loads(command('evaluate', '--run_dir', f'{self.folder}/run').stdout)
    self.assertAllClose(evaluated['auc'], test['auc'])
    out = f'{self.folder}/predicted.txt'
    done = command(
      'predict',
      '--run_dir',
      f'{self.folder}/run',
      '--data',
      f'{self.folder}/test.csv',
      '--out',
      out,
    )
    self.assertEqual(done.returncode, 0, done.stderr)
    predicted = np.loadtxt(out)
    with open(f'{self.folder}/test.csv', encoding='utf-8') as f:
      labels = np.array([int(line.rsplit(',', 1)[1]) for line in list(f)[1:]])
    self.assertLen(predicted, 950)
    self.assertAllClose(
      evaluated['auc'], sklearn.metrics.roc_auc_score(labels, predicted), atol=1e-3
    )
    self.assertAllClose(
      evaluated['logloss'], sklearn.metrics.log_loss(labels, predicted), atol=1e-6
    )
    self.assertAllClose(evaluated['calibration'], predicted.sum() / labels.sum(), rtol=1e-6)
    again = self.train()
    self.assertEqual(again.returncode, 0, again.stderr)
    self.assertLen([e for e in self.events() if e['event'] == 'train'], 1)
    self.assert_narrow(again)
    more = self.train('--set', 'train.epochs=2')
    self.assertEqual(more.returncode, 0, more.stderr)
    self.assertEqual([e['step'] for e in self.events() if e['event'] == 'train'], [10, 20])
    other = self.train('--set', 'sparse.tables.default.init_scale=0.5')
    wanted = 'it holds another model: .* sparse.tables.default.init_scale = 0.01, this config 0.5'
    self.assert_mistake(other, wanted)

  def test_a_validation_is_part_of_what_a_run_continues_from(self):
    valid = f'data.valid=[{self.folder}/test.csv]'
    self.assertEqual(self.train('--set', valid, '--set', 'train.epochs=1').returncode, 0)
    before = [e for e in self.events() if (e['event'], e.get('split')) == ('eval', 'valid')]
    self.assertLen(before, 1)
    self.assertEqual(self.train('--set', valid, '--set', 'train.epochs=2').returncode, 0)
    after = [e for e in self.events() if (e['event'], e.get('split')) == ('eval', 'valid')]
    self.assertEqual((after[0], len(after)), (before[0], 2))

  def test_plateau(self):
    """Nothing counts as better than the first epoch:

    the rates fall at every second stall, and the fifth is the last.
    """
    plateau = 'train.plateau={factor: 0.5, patience: 2, stop_after: 5, min_delta: 1}'
    valid = f'data.valid=[{self.folder}/test.csv,{self.folder}/train.csv]'
    done = self.train('--set', valid, '--set', 'train.epochs=9', '--set', plateau)
    self.assertEqual(done.returncode, 0, done.stderr)
    self.assertIn('data.valid: data.train has', done.stderr)
    self.assert_narrow(done)
    self.assertLen(
      [e for e in self.events() if (e['event'], e.get('split')) == ('eval', 'valid')], 6
    )
    with open(f'{self.folder}/run/checkpoints/ckpt-000000060/progress.json', encoding='utf-8') as f:
      self.assertEqual(json.load(f)['rate'], 0.25)

  def test_interrupted_run_continues(self):
    job = commands.start(
      *('-m', 'trainer.run', *self.flags(), '--set', 'train.epochs=30'),
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
    )
    for line in job.stdout:
      if 'epoch 1' in line:
        job.send_signal(signal.SIGINT)  # Ctrl-C; launch_test.py has SIGTERM
        break
    output = job.stdout.read()
    self.assertEqual(job.wait(timeout=120), 130, output)
    self.assertIn('the state is saved', output)
    done = self.train('--set', 'train.epochs=30')
    self.assertEqual(done.returncode, 0, done.stderr)
    trained = [e for e in self.events() if e['event'] == 'train']
    self.assertEqual([e['step'] for e in trained], [10 * i for i in range(1, 31)])
    self.assertEqual([e['examples'] for e in trained], [950] * 30)

  def assert_mistake(self, done, pattern):
    self.assertEqual(done.returncode, 2, done.stderr)
    lines = [line for line in done.stderr.splitlines() if line.startswith('error: ')]
    self.assertLen(lines, 1, done.stderr)
    self.assertRegex(lines[0], pattern)
    self.assertNotIn('Traceback', done.stderr)

  def test_mistakes_in_the_config(self):
    for args, pattern in [
      (
        ('--set', 'train.batch_sise=1'),
        "unknown key 'train.batch_sise'; the nearest valid name is 'batch_size'",
      ),
      (('--set', 'train.batch_size=many'), "'train.batch_size': found 'many'"),
      (
        ('--set', 'data.train=[nowhere.csv]'),
        "data.train: found no file that matches 'nowhere.csv'",
      ),
      (('--sett', 'x=1'), 'Unknown command line flag'),
      (('--epochs', '3'), 'unknown flag --epochs; wanted --set KEY=VALUE, .* train.epochs'),
      (('--set', 'train.epochs=x'), '--set train.epochs=x: key .train.epochs.: found .x.; wanted'),
      (('more',), "unknown argument 'more'"),
      (('--run_dir=',), '--run_dir is empty; wanted a value'),
    ]:
      self.assert_mistake(self.train(*args), pattern)
    self.assert_mistake(
      command('evaluate', '--run_dir', f'{self.folder}/nothing'), 'no config.yaml there'
    )

  def test_mistakes_in_the_data(self):
    for rows, header, pattern in [
      (['1,2,0.5,1'], 'user,itme,price,click', "'item'"),
      (['1,2,0.5,1', '1,2,0.5'], 'user,item,price,click', r'train.csv:3: '),
      (
        ['1,2,0.5,1', '1,2,0.5,7'],
        'user,item,price,click',
        r"train.csv:3: .*found '7'; wanted 0 or 1",
      ),
      (['1,2,nan,1'], 'user,item,price,click', r'train.csv:2: .*price'),
      ([], None, 'the file is empty'),
    ]:
      self.write('train.csv', rows, header)
      self.assert_mistake(self.train(), pattern)

  def test_bad_records_under_the_share_are_counted(self):
    self.write('train.csv', ['1,2,0.5,0', *['1,2,0.5,1'] * 98, '1,2,0.5,7'])
    done = self.train('--set', 'data.max_bad_share=0.02')
    self.assertEqual(done.returncode, 0, done.stderr)
    self.assertIn('dropped 1 bad of 100 records', done.stderr)
    (train,) = [e for e in self.events() if e['event'] == 'train']
    self.assertEqual(train['examples'], 99)


if __name__ == '__main__':
  tf.test.main()
