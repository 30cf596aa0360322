"""Ranks predict one input together: its rows in order, as one process predicts them."""

import os

import numpy as np
import pandas as pd
import tensorflow as tf

from tests.support import jobs, small


class SharedPredictionTest(tf.test.TestCase):
  def test_ranks_predict_in_input_order(self):
    folder = self.get_temp_dir()
    rng = np.random.default_rng(0)
    table = pd.DataFrame(
      {
        'id': np.arange(1051),
        'user': rng.integers(300, size=1051),
        'item': rng.integers(40, size=1051),
        'price': rng.random(1051).round(3),
        'click': rng.integers(2, size=1051),
      }
    )
    # The last batch of the first file is short; the second has no sample for most ranks.
    table[:1050].to_csv(f'{folder}/part_1.csv', index=False)
    table[1050:].to_csv(f'{folder}/part_2.csv', index=False)
    data = {'train': [f'{folder}/part_1.csv'], 'label': 'click', 'dense': [{'name': 'price'}]}
    small.write(
      f'{folder}/config.yaml',
      data=data,
      model={'interactions': ['linear', 'fm', 'dnn']},
      train={'batch_size': 200},
    )
    run = f'{folder}/run'
    jobs.run(1, 'trainer.run', '--config', f'{folder}/config.yaml', '--run_dir', run)
    arguments = ['--run_dir', run, '--data', f'{folder}/part_*.csv']
    found = []
    for ranks in (1, 2, 3):
      out = f'{folder}/{ranks}.csv'
      jobs.run(ranks, 'trainer.cli.predict', *arguments, '--columns', 'id', '--out', out)
      found.append(pd.read_csv(out))
      self.assertAllEqual(found[-1]['id'], table['id'])
      self.assertAllClose(found[-1]['probability'], found[0]['probability'], rtol=1e-6, atol=0)
    self.assertGreater(found[0]['probability'].nunique(), 900)
    self.assertEqual(len(os.listdir(folder)), 7, os.listdir(folder))  # nothing unfinished is left
    with jobs.Ranks(2, arguments) as job:
      for rank in range(2):
        job.start(rank, ('-m', 'trainer.cli.predict'))
      self.assertEqual([job.wait(rank) for rank in range(2)], [2, 2])
      self.assertIn('--out: found -, which ranks do not share; wanted a file', job.output(0))


if __name__ == '__main__':
  tf.test.main()
