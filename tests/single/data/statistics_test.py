"""Statistics of a log against pandas."""

import os

os.environ.setdefault('TF_USE_LEGACY_KERAS', '1')
import json

import numpy as np
import pandas as pd
import tensorflow as tf

from tests.support import small
from trainer.data.conversion import prepare_pass
from trainer.data.prepared import PreparedPass
from trainer.data.statistics import describe, table


class DescribeTest(tf.test.TestCase):
  def test_statistics_equal_those_of_pandas(self):
    rng = np.random.default_rng(0)
    data = {
      'label': 'click',
      'slots': [{'name': 'user'}, {'name': 'tags', 'separator': '|'}],
      'dense': [{'name': 'price'}],
      'day_pattern': r'(\d+)\.csv',
    }
    cfg = small.config(data=data, model={'interactions': ['linear', 'fm']})
    passes, days = [], []
    for day in (3, 4):
      frame = pd.DataFrame(
        {
          'click': rng.integers(2, size=300),
          'user': [
            None if rng.random() < 0.2 else f'u{rng.integers(200) + 50 * day}' for _ in range(300)
          ],
          'tags': [
            '|'.join(f't{t}' for t in rng.integers(9, size=rng.integers(3))) for _ in range(300)
          ],
          'price': np.where(rng.random(300) < 0.1, np.nan, rng.integers(100, size=300)),
        }
      )
      path = os.path.join(self.get_temp_dir(), f'{day}.csv')
      frame.to_csv(path, index=False)
      out = os.path.join(self.get_temp_dir(), f'out{day}')
      prepare_pass(cfg, path, out)
      passes.append(PreparedPass(out, cfg))
      days.append(frame)
    found = describe(passes, cfg)
    both = pd.concat(days)
    self.assertEqual(found['samples'], 600)
    for day, frame in zip((3, 4), days):
      self.assertEqual(found['days'][day]['samples'], 300)
      self.assertAllClose(found['days'][day]['label_rate'], frame['click'].mean())
    user, counts = found['slots']['user'], both['user'].value_counts()
    self.assertAllClose(user['blank'], both['user'].isna().mean())
    self.assertEqual(user['distinct'], len(counts))
    self.assertAllClose(user['seen_once'], (counts == 1).mean())
    self.assertAllClose(user['head'], counts.iloc[:100].sum() / counts.sum())
    before, after = (set(frame['user'].dropna()) for frame in days)
    self.assertAllClose(user['new_by_day'], {4: len(after - before) / len(after)})
    tags = both['tags'].str.split('|').explode()
    tags = tags[tags != '']
    self.assertAllClose(found['slots']['tags']['features_per_sample'], len(tags) / 600)
    self.assertEqual(found['slots']['tags']['distinct'], tags.nunique())
    price = found['dense']['price']
    self.assertAllClose(price['missing'], both['price'].isna().mean())
    self.assertAllClose(price['quantiles'][3], both['price'].median())
    self.assertEqual(*found['table_bytes'].values())  # every feature is admitted
    for admission in ('score', 'count', 'probability'):
      lifecycle = {'admission': admission, 'admission_threshold': 2.0}
      memory = describe(passes, small.config(cfg.model_dump(), lifecycle=lifecycle))['table_bytes']
      self.assertLess(memory['with_admission'], memory['without_admission'])
    self.assertIn('day 4: 300 samples', table(json.loads(json.dumps(found))))


if __name__ == '__main__':
  tf.test.main()
