"""A run of an earlier version is taken up: its config, checkpoint, exports and metrics.

tests/data/old_run.tgz is a run_dir with its log and config, made by the version of commit 34ba324,
and the probabilities that this version predicted for the test file.
"""

import json
import os
import pathlib
import tarfile
import tempfile

os.environ.setdefault('TF_USE_LEGACY_KERAS', '1')
import numpy as np
import tensorflow as tf

from trainer import config
from trainer.comm.communicator import SingleProcess
from trainer.data.passes import passes
from trainer.storage import chain
from trainer.training.job import Job, finished_job
from trainer.training.step import TrainStep

OLD_RUN = pathlib.Path(__file__).parents[1] / 'data' / 'old_run.tgz'


class OldRunTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = tempfile.mkdtemp(dir=self.get_temp_dir())
    with tarfile.open(OLD_RUN) as archive:
      archive.extractall(self.folder, filter='data')
    before = os.getcwd()
    os.chdir(self.folder)  # its paths are relative
    self.addCleanup(os.chdir, before)

  def test_it_predicts_as_before(self):
    with finished_job('run') as job:
      prepared = job.inputs.prepared(passes(job.cfg, ['log/test.csv'], 'data.test'), 'test')
      found = np.concatenate([p for _, p in job.evaluation.predict(prepared[0])])
    self.assertAllClose(found, np.loadtxt('before.txt'), rtol=0, atol=1e-6)

  def test_it_goes_on(self):
    exports = [one.path for one in chain.exports('run/exports')]
    self.assertLen(exports, 4)
    with open('log/day_2.csv', 'w', encoding='utf-8') as new, open('log/test.csv') as old:
      new.write(old.read())
    cfg = config.load('config.yaml')
    self.assertTrue(Job(cfg, SingleProcess(), TrainStep(cfg, SingleProcess())).run())
    with open('run/metrics.jsonl', encoding='utf-8') as f:
      events = [json.loads(line) for line in f]
    trained = [(e['pass'], e['step']) for e in events if e['event'] == 'train']
    self.assertEqual(trained, [('day_0', 3), ('day_1', 6), ('day_2', 9)])
    new = [one.path for one in chain.exports('run/exports')][len(exports) :]
    self.assertEqual([chain.RowExport(p).kind for p in new], ['delta', 'base'])
    first_new = chain.RowExport(new[0])
    self.assertEqual(os.path.join('run/exports', first_new.previous), exports[-1])


if __name__ == '__main__':
  tf.test.main()
