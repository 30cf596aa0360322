"""Two ranks on labels that are noise: counts tell no more of them than on one process."""

import json
import os
import tempfile

import pytest
import tensorflow as tf
import yaml

from tests.support import jobs, noise


@pytest.mark.long
class NoiseTest(tf.test.TestCase):
  def test_noise_stays_noise_on_two_ranks(self):
    folder = tempfile.mkdtemp(dir=self.get_temp_dir())
    path = os.path.join(folder, 'config.yaml')
    with open(path, 'w', encoding='utf-8') as f:
      yaml.safe_dump(noise.config(folder, rows_learn=False), f)
    found = []
    for size in (1, 2):
      run_dir = os.path.join(folder, f'run_{size}')
      jobs.run(size, 'trainer.run', '--config', path, '--run_dir', run_dir)
      with open(os.path.join(run_dir, 'metrics.jsonl'), encoding='utf-8') as f:
        events = [json.loads(line) for line in f]
      found.append([e['auc'] for e in events if e['event'] in ('train', 'eval')])
    self.assertLen(found[0], 6)  # of three epochs
    self.assertAllClose(found[0], [0.5] * 6, atol=0.04)
    self.assertAllClose(found[1], found[0], atol=1e-4)


if __name__ == '__main__':
  tf.test.main()
