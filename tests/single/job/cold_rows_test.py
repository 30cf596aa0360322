"""A job whose rows lie on disk beyond `sparse.memory_limit`: it equals one that holds all."""

import functools
import os
import re
import tempfile

import numpy as np
import tensorflow as tf

from tests.support import commands, small
from tests.support.damage import cut_scratch_files
from tests.support.states import state_of
from trainer.comm.communicator import SingleProcess
from trainer.embedding.stores import plain_disk_errors
from trainer.errors import UserError
from trainer.evaluation.finished_run import open_run
from trainer.job.job import Job
from trainer.training.step import TrainStep

# Features and rows take 4.2 MB, as there are few. What stays of those on disk takes 2.3 MB, beside
# which the chunks of some shards have room.
LIMIT = 2_500_000


# A limit of a file's size stands for a full disk. Files of the run take less.
FULL_DISK = """
import resource, runpy
resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, 4 << 20))
runpy.run_module('trainer.run', run_name='__main__')
"""


class ColdRowsTest(tf.test.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = tempfile.mkdtemp()
    rng = np.random.default_rng(1)
    cls.logs = [f'{cls.folder}/day_{day}.csv' for day in range(4)]
    for day, path in enumerate(cls.logs):  # the users of a day come back after two days
      users = rng.integers(400, size=300) + 400 * (day % 3)
      with open(path, 'w', encoding='utf-8') as f:
        f.write('user,item,label\n')
        f.writelines(f'{u},{rng.integers(50)},{rng.integers(2)}\n' for u in users)

  def sections(self, run_dir, logs=4, **sparse):
    """The sections of a run's config."""
    data = {'train': self.logs[:logs], 'test': [self.logs[0]], 'day_pattern': r'day_(\d+)'}
    return dict(
      run_dir=run_dir,
      data=data | {'slots': [{'name': 'user', 'counts': True}, {'name': 'item'}]},
      model={'interactions': ['linear', 'fm']},
      sparse={'tables': {'default': {'width': 8}}} | sparse,
      lifecycle={'admission': 'none', 'delete_after_unseen_days': 1, 'decay': 0.9},
      train={'batch_size': 64},
      checkpoint={'every_steps': 2},
      export={'base': True, 'delta_every_passes': 1},
    )

  def run_job(self, run_dir, **changes):
    """Trains a run; returns how many bytes its table takes in memory."""
    cfg = small.config(**self.sections(run_dir, **changes))
    step = TrainStep(cfg, SingleProcess())
    Job(cfg, SingleProcess(), step).run()
    return int(step.store.bytes())

  def limit(self, bytes_=LIMIT):
    folder = tempfile.TemporaryDirectory(dir='/var/tmp')  # a disk; others may lie in memory
    self.addCleanup(folder.cleanup)
    return {'memory_limit': bytes_, 'cold_dir': folder.name}

  @functools.cached_property
  def all_in_memory(self):
    """What a run without a limit leaves, and how many bytes its table takes."""
    run_dir = tempfile.mkdtemp(dir=self.folder) + '/run'
    return self.run_job(run_dir), state_of(run_dir)

  def assert_equals_all_in_memory(self, run_dir):
    _, expected = self.all_in_memory
    found = state_of(run_dir)
    for what in ('rows', 'dense', 'exports'):
      self.assertNotEmpty(expected[what])
      self.assertEqual(found[what], expected[what], what)
    self.assertEqual(found['events'], expected['events'])

  def test_a_run_equals_one_in_memory(self):
    limited, sparse = f'{self.folder}/limited', self.limit()
    self.assertGreater(self.all_in_memory[0], self.run_job(limited, logs=2, **sparse))
    self.run_job(limited, **sparse)  # continues
    self.assert_equals_all_in_memory(limited)
    self.assertEqual(os.listdir(sparse['cold_dir']), [])
    with open_run(limited) as run:
      self.assertEqual(int(run.step.store.size()), len(self.all_in_memory[1]['rows']))

  def test_a_damaged_file_is_refused_by_name(self):
    sparse = self.limit()
    cfg = small.config(**self.sections(f'{self.folder}/damaged', **sparse))
    step = TrainStep(cfg, SingleProcess())
    job = Job(cfg, SingleProcess(), step)
    job.run()
    self.assertNotEmpty(cut_scratch_files())
    named = f'^sparse.cold_dir: {re.escape(sparse["cold_dir"])}: cannot read the row of key'
    with self.assertRaisesRegex(UserError, named), plain_disk_errors():
      list(step.store.export_state())

  def test_a_full_disk_is_one_line_and_the_run_goes_on_where_there_is_room(self):
    run_dir, sparse = f'{self.folder}/full', self.limit()
    config = small.write(f'{self.folder}/full.yaml', **self.sections(run_dir, **sparse))
    ended = commands.run('-c', FULL_DISK, '--config', config)
    errors = [line for line in ended.stderr.splitlines() if line.startswith('error: ')]
    said = f'error: sparse.cold_dir: {sparse["cold_dir"]}: cannot write rows there: File too large'
    self.assertEqual((ended.returncode, errors), (2, [said]), ended.stderr)
    self.assertNotEmpty(os.listdir(f'{run_dir}/checkpoints'))
    self.run_job(run_dir, **sparse)
    self.assert_equals_all_in_memory(run_dir)

  def test_a_mistake_is_one_line(self):
    run_dir = f'{self.folder}/mistakes'
    nowhere = self.limit() | {'cold_dir': f'{self.folder}/none'}
    for sparse, said in (
      (nowhere, f'sparse.cold_dir: found {self.folder}/none, where no file can be made'),
      (self.limit(1e5), 'sparse.memory_limit: found 100000 bytes, while the index of'),
    ):
      with self.assertRaisesRegex(UserError, f'^{re.escape(said)}[^\n]*$'), plain_disk_errors():
        self.run_job(run_dir, **sparse)


if __name__ == '__main__':
  tf.test.main()
