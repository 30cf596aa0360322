"""What one pinned set of packages writes, the other reads: checkpoints and exports, both ways.

`make setup` and `make STACK=next setup` make the two environments.
"""

import glob
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import pytest
import tensorflow as tf

from tests.support import small

ROOT = pathlib.Path(__file__).resolve().parents[2]
HERE = pathlib.Path(sys.executable)
OTHER = ROOT / ('.venv' if '.venv-next' in HERE.parts else '.venv-next') / 'bin' / 'python'
CONFIG = small.tree(
  data={
    'day_pattern': r'day_(\d)',
    'label': 'click',
    'slots': [{'name': 'user'}, {'name': 'tags', 'separator': '|'}],
    'dense': [{'name': 'price', 'transform': 'standardise'}],
  },
  lifecycle={'admission_threshold': 1.0},
  model={'interactions': ['linear', 'fm', 'cross', {'dnn': {'hidden': [8], 'batch_norm': 'sync'}}]},
  train={'batch_size': 100},
  export={'base': True, 'saved_model': True},
)
# Scores columns of a SavedModel: plain TensorFlow, nothing of ours.
SCORE = """
import json, sys
import tensorflow as tf
model = tf.saved_model.load(sys.argv[1]).signatures['serving_default']
columns = {name: tf.constant(values) for name, values in json.load(sys.stdin).items()}
print(json.dumps({name: value.numpy().tolist() for name, value in model(**columns).items()}))
"""


@pytest.mark.long
class StacksTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    if not OTHER.exists():
      self.skipTest(f'{OTHER.relative_to(ROOT)} is not set up')
    self.run_python(OTHER, '-m', 'ops.build', timeout=900)  # compiles what has changed
    self.folder = tempfile.mkdtemp(dir=self.get_temp_dir())
    rng = np.random.default_rng(0)
    for day in range(3):
      with open(f'{self.folder}/day_{day}.csv', 'w', encoding='utf-8') as f:
        f.write('user,tags,price,click\n')
        for _ in range(400):
          user, tags = rng.integers(30), rng.integers(9, size=2)
          click = int(rng.random() < 0.1 + 0.02 * user)
          f.write(f'{user},{tags[0]}|{tags[1]},{rng.random():.3f},{click}\n')

  def run_python(self, python, *args, timeout=300, **kwargs):
    path = f'{python.parent}{os.pathsep}{os.environ["PATH"]}'
    done = subprocess.run(
      [python, *args],
      cwd=ROOT,
      env=os.environ | {'PATH': path},
      capture_output=True,
      text=True,
      timeout=timeout,
      **kwargs,
    )
    self.assertEqual(done.returncode, 0, done.stderr)
    return done.stdout

  def train(self, python, run, days):
    """Trains on the first days; what earlier ones have left in `run` is gone on with."""
    train = [f'{self.folder}/day_{day}.csv' for day in range(days)]
    path = small.write(f'{self.folder}/config.yaml', CONFIG, data={'train': train})
    self.run_python(python, '-m', 'trainer.run', '--config', path, '--run_dir', run)

  def test_each_reads_what_the_other_wrote(self):
    columns = {'user': ['3', '4'], 'tags': ['1|2', ''], 'price': [0.5, 0.1]}
    seen = []
    for writer, reader in ((HERE, OTHER), (OTHER, HERE)):
      run = tempfile.mkdtemp(dir=self.folder)
      self.train(writer, run, days=1)
      # Exports: rows go to a store that serving reads, the SavedModel scores.
      self.run_python(
        reader, '-m', 'trainer.cli.publish', '--run_dir', run, '--to', f'{run}/store', '--once'
      )
      (saved_model,) = glob.glob(f'{run}/exports/saved_model/*')
      scores = json.loads(
        self.run_python(reader, '-c', SCORE, saved_model, input=json.dumps(columns))
      )
      # The checkpoint: the second day is trained on.
      self.train(reader, run, days=2)
      data = '--data', f'{self.folder}/day_2.csv'
      predicted = self.run_python(writer, '-m', 'trainer.cli.predict', '--run_dir', run, *data)
      seen.append((scores, np.loadtxt(predicted.splitlines())))
    # A day here and a day there, or the other way round, is the same model.
    self.assertAllClose(seen[0][0], seen[1][0], rtol=1e-4)
    self.assertAllClose(seen[0][1], seen[1][1], rtol=1e-3)
    self.assertGreater(np.ptp(seen[0][1]), 0.05)


if __name__ == '__main__':
  tf.test.main()
