"""The commands on logs of an S3 endpoint: as on local ones."""

import json

import boto3
import numpy as np
import tensorflow as tf

from tests.support import commands, small
from tests.support.s3 import S3


class RemoteTest(tf.test.TestCase):
  def run_command(self, name, *args):
    return commands.run('-m', commands.module(name), *args)

  def test_train_evaluate_predict(self):
    folder = self.get_temp_dir()
    rng = np.random.default_rng(0)
    with S3() as s3:
      client = boto3.client('s3')
      client.create_bucket(Bucket='ads')
      for day in (9, 10):
        rows = rng.integers(0, [2, 50, 20], [500, 3])
        text = 'click,user,item\n' + ''.join('{},{},{}\n'.format(*row) for row in rows)
        client.put_object(Bucket='ads', Key=f'log/day_{day}.csv', Body=text.encode())
        with open(f'{folder}/day_{day}.csv', 'w', encoding='utf-8') as f:
          f.write(text)
      predicted = []
      for place in ('s3://ads/log', folder):
        run = f'{folder}/run_{len(predicted)}'
        data = {'train': [f'{place}/day_*.csv'], 'test': [f'{place}/day_10.csv']}
        small.write(
          f'{run}.yaml',
          data=data | {'day_pattern': r'day_(\d+)', 'label': 'click'},
          model={'interactions': ['linear', 'fm']},
          train={'batch_size': 100},
        )
        done = self.run_command('run', '--config', f'{run}.yaml', '--run_dir', run)
        self.assertEqual(done.returncode, 0, done.stderr)
        data = f'{place}/day_9.csv'
        done = self.run_command('evaluate', '--run_dir', run, '--data', data)
        self.assertEqual(json.loads(done.stdout)['examples'], 500, done.stderr)
        done = self.run_command('predict', '--run_dir', run, '--data', data, '--columns', 'item')
        self.assertEqual(done.returncode, 0, done.stderr)
        predicted.append(done.stdout)
      self.assertEqual(*predicted)
      with open(f'{folder}/run_0/ledger.jsonl', encoding='utf-8') as f:
        ledger = [json.loads(line) for line in f]
      self.assertEqual(
        [(e['path'], e['fate']) for e in ledger],
        [(f's3://ads/log/day_{day}.csv', 'trained') for day in (9, 10)],
      )
      s3.stop()
      done = self.run_command('evaluate', '--run_dir', f'{folder}/run_0')
    self.assertEqual(done.returncode, 2, done.stderr)
    line = done.stderr.splitlines()[-1]
    self.assertStartsWith(line, 'error: s3://ads/log/day_10.csv: cannot be read after 6 attempts:')
    self.assertNotIn('Traceback', done.stderr)


if __name__ == '__main__':
  tf.test.main()
