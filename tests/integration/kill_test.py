"""A job killed with SIGKILL at any moment and started again ends in the very state, and the very
exports, of one that was left alone.

KILL_TRIALS sets how many kills are tried (default 4, half of them on 2 ranks); each is seeded by
its number. In half of the trials, most rows lie on disk; in the job that was left alone, none.
"""

import functools
import json
import os
import random
import signal
import subprocess
import tempfile
import time

import pytest
import tensorflow as tf

from tests.support import commands, jobs, small
from tests.support.states import state_of

SLOTS = [{'name': 'user'}, {'name': 'item', 'counts': True}, {'name': 'tags', 'separator': '|'}]
DENSE = [{'name': 'price', 'transform': 'log1p_standardise'}]
CONFIG = small.tree(
  seed=5,
  data={'day_pattern': r'day_(\d+)', 'label': 'click', 'slots': SLOTS, 'dense': DENSE},
  lifecycle={
    'admission_threshold': 1.0,
    'delete_threshold': 0.3,
    'delete_after_unseen_days': 1,
    'decay': 0.8,
  },
  sparse={'tables': {'default': {'width': 4}}},
  model={'interactions': ['linear', 'fm', {'dnn': {'hidden': [8]}}]},
  train={'batch_size': 256, 'deterministic': True, 'log_every_steps': 1},
  checkpoint={'every_steps': 3},
  export={'base': True, 'delta_every_passes': 1},
)
# With this limit, most features lie on disk.
LIMIT = 1_500_000


class KillTest(tf.test.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = tempfile.mkdtemp()
    commands.run(
      *('-m', 'trainer.cli.synthesize', '--out', cls.folder, '--days', '3'),
      *('--samples_per_day', '2500', '--users', '200', '--items', '100'),
    ).check_returncode()
    data = {'train': [f'{cls.folder}/day_*.csv'], 'test': [f'{cls.folder}/test_day_*.csv']}
    small.write(f'{cls.folder}/config.yaml', CONFIG, data=data)

  def run_job(self, ranks, dtype, run_dir, kill_at=None, limited=False):
    """Runs a job to its end, or kills all of it after `kill_at` signs of life.

    Returns how many it gave.
    """
    flags = ['--config', f'{self.folder}/config.yaml', '--run_dir', run_dir]
    flags += ['--set', f'sparse.tables.default.dtype={dtype}']
    if limited:
      # A folder for temporary files may lie in memory.
      flags += ['--set', f'sparse.memory_limit={LIMIT}', '--set', 'sparse.cold_dir=/var/tmp']
    with jobs.Ranks(ranks, flags) as job:
      first = job.start(0, stdout=subprocess.PIPE)
      for rank in range(1, ranks):
        job.start(rank)
      signs, wanted = 0, 0
      for line in first.stdout:  # the live line's carriage returns are line ends, too
        signs += any(word in line for word in ('samples/s', 'checkpoint ', ' ended '))
        if signs == kill_at and not wanted:
          time.sleep(random.random() * 0.05)  # to hit what comes between two signs
          for process in job.processes.values():
            process.kill()
          wanted = -signal.SIGKILL
      statuses = [job.wait(rank) for rank in range(ranks)]
      self.assertContainsSubset(statuses, [0, wanted], job.output(0))
    return signs

  @classmethod
  @functools.cache
  def reference(cls, ranks, dtype):
    """Returns the signs of life and the state of a job that is left alone."""
    run_dir = tempfile.mkdtemp(dir=cls.folder) + '/run'
    return cls().run_job(ranks, dtype, run_dir), state_of(run_dir)

  def assert_state(self, run_dir, expected, words, without=()):
    with open(f'{run_dir}/metrics.jsonl', encoding='utf-8') as f:
      for line in f:
        json.loads(line)
    found = state_of(run_dir, without)
    for what in ('rows', 'dense', 'progress', 'exports'):
      self.assertEqual(found[what], expected[what], f'{what} of {words}')
    self.assertAllEqual(found['metrics'], expected['metrics'])
    self.assertLen(found['events'], len(expected['events']))
    for one, wanted in zip(found['events'], expected['events']):
      self.assertEqual(one, wanted, words)
    self.assertFalse([n for n in os.listdir(f'{run_dir}/exports') if 'unfinished' in n])

  def check(self, ranks, dtype, trials):
    signs, expected = self.reference(ranks, dtype)
    self.assertNotEmpty(expected['rows'])
    self.assertNotEmpty(expected['exports'])
    for trial in trials:
      random.seed(trial)
      run_dir = tempfile.mkdtemp(dir=self.folder) + '/run'
      kill_at = random.randrange(1, signs)
      words = f'trial {trial}: {ranks} rank(s), killed after sign {kill_at} of {signs}'
      print(words, flush=True)
      self.run_job(ranks, dtype, run_dir, kill_at, limited=trial % 4 > 1)
      self.run_job(ranks, dtype, run_dir, limited=trial % 4 > 1)
      self.assert_state(run_dir, expected, words)

  trials = int(os.environ.get('KILL_TRIALS', '4'))

  @pytest.mark.long
  def test_one_process(self):
    self.check(1, 'float32', range(0, self.trials, 2))

  def test_two_ranks(self):
    self.check(2, 'bfloat16', range(1, self.trials, 2))

  def both_ranks(self, job):
    """Returns the processes of both ranks; they train no longer than it takes to find them."""
    while len(ranks := jobs.ranks_below(job.pid)) < 2:
      self.assertIsNone(job.poll())
      time.sleep(0.05)
    return ranks

  @pytest.mark.long
  def test_a_lost_rank_begins_the_job_again(self):
    """Both ranks are killed one after the other, and nobody starts the job again by hand."""
    _, expected = self.reference(2, 'bfloat16')
    run_dir = tempfile.mkdtemp(dir=self.folder) + '/run'
    job = subprocess.Popen(
      [
        'launch/local.sh',
        *('--restarts', '2', '2', '--config', f'{self.folder}/config.yaml', '--run_dir', run_dir),
        *('--set', 'sparse.tables.default.dtype=bfloat16'),
      ],
      cwd=jobs.ROOT,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      env=os.environ | {'CTR_THREADS': '1', 'CTR_RESTART_SECONDS': '0.1'},
    )
    self.addCleanup(job.kill)
    output, to_kill = '', [1, 0]
    ranks = self.both_ranks(job)
    for line in job.stdout:
      output += line
      if 'restart ' in line:
        ranks = self.both_ranks(job)
      if 'samples/s' in line and ranks and to_kill:
        ranks[to_kill.pop(0)].kill()
        ranks = None
    self.assertEqual(job.wait(60), 0, output)
    for restart in 1, 2:
      self.assertIn(f'restart {restart} of 2: 2 ranks on localhost', output)
    self.assert_state(run_dir, expected, output, without=['lost'])


if __name__ == '__main__':
  tf.test.main()
