"""A small log gets a batch that gives its epoch some steps, and with it the defaults learn."""

import contextlib
import io
import pathlib
import tempfile

import numpy as np
import pandas as pd
import tensorflow as tf
import yaml

from trainer import api, config
from trainer.data.batch_size import suitable


def log(samples, seed):
  """A log whose clicks follow its items, with users that are seen a few times each."""
  rng = np.random.default_rng(seed)
  item = rng.integers(50, size=samples)
  click = rng.random(samples) < 0.05 + 0.4 * (item % 5 == 0)
  user = rng.integers(1000, size=samples)
  return pd.DataFrame({'user': user, 'item': item, 'click': click.astype(int)})


class BatchSizeTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(tempfile.mkdtemp(dir=self.get_temp_dir()))
    self.tree = {
      'run_dir': str(self.folder / 'run'),
      'data': {
        'train': [f'{self.folder}/train*'],
        'label': 'click',
        'slots': [{'name': 'user'}, {'name': 'item'}],
      },
      'model': {'interactions': ['linear', 'fm']},
    }

  def suitable(self):
    return suitable(config.parse(yaml.safe_dump(self.tree), 'test'))

  def test_it_follows_the_number_of_samples(self):
    for samples, size in (
      (3, 64),
      (3839, 64),
      (3840, 128),
      (20_000, 512),
      (122_879, 2048),
      (122_880, 4096),
      (150_000, 4096),
    ):
      log(samples, 0).to_csv(self.folder / 'train.csv', index=False)
      self.assertEqual(self.suitable(), (size, min(samples, 122_880)))

  def test_files_of_every_kind_count(self):
    log(9000, 0).to_parquet(self.folder / 'train_1.parquet')
    log(8000, 0).to_csv(self.folder / 'train_2.csv.gz', index=False)
    self.assertEqual(self.suitable(), (512, 17_000))

  def test_what_cannot_be_read_is_told_later(self):
    (self.folder / 'train.csv').write_text('other,columns\n1,2\n')
    self.assertEqual(self.suitable()[0], 4096)

  def test_a_log_of_4000_samples_is_learnt_from(self):
    log(4000, 0).to_csv(self.folder / 'train.csv', index=False)
    log(2000, 1).to_csv(self.folder / 'valid.csv', index=False)
    self.tree['data']['valid'] = [f'{self.folder}/valid.csv']
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
      run = api.fit(self.tree)
    self.assertIn(
      'train.batch_size: 128, measured: the log has 4,000 samples (4096 in a large one)',
      told.getvalue(),
    )
    valid = run.metrics.query("event == 'eval' and split == 'valid'")
    self.assertLess(valid['logloss'].min(), 0.95 * valid['base_logloss'].iloc[0])
    self.assertGreater(valid['auc'].max(), 0.7)  # the true probabilities reach .74
    # What a run has measured it keeps, though the log grows.
    log(20_000, 0).to_csv(self.folder / 'train.csv', index=False)
    self.assertEqual(api.Source(self.tree).for_its_log().train.batch_size, 128)
    for source, size in (
      (api.Source(self.tree, ['train.batch_size=32']), 32),
      (api.Source(self.tree, (), 'elsewhere'), 512),
    ):
      self.assertEqual(source.for_its_log().train.batch_size, size)


if __name__ == '__main__':
  tf.test.main()
