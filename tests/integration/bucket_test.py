"""A run_dir in a bucket: trained, killed, continued elsewhere, and used by the commands."""

import json
import os
import tempfile

import boto3
import pytest
import tensorflow as tf

from tests.support import commands, jobs
from tests.support.s3 import S3
from tests.support.states import state_of
from trainer.storage.bucket import EXPORTS, STATE, copy_of


class BucketTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = tempfile.mkdtemp(dir=self.get_temp_dir())
    self.s3 = self.enter_context(S3())
    boto3.client('s3').create_bucket(Bucket='runs')
    self.url = f's3://runs/{self.id()}'  # the stand-in keeps what other tests wrote
    self.config = jobs.write_config(
      self.folder,
      200,
      train={'epochs': 2, 'batch_size': 64, 'deterministic': True},
      checkpoint={'every_passes': 1},
      export={'delta_every_passes': 1},
    )

  def done(self, name, *flags, status=0, machine='one'):
    done = commands.run('-m', commands.module(name), *flags, env=self.on(machine))
    self.assertEqual(done.returncode, status, done.stderr)
    return done.stdout if status == 0 else done.stderr

  def on(self, machine):
    return {'CTR_WORK_DIR': f'{self.folder}/{machine}'}

  def train(self, run_dir=None, **kwargs):
    return self.done('run', '--config', self.config, '--run_dir', run_dir or self.url, **kwargs)

  def test_a_run_that_is_killed_before_a_marker_goes_on_elsewhere(self):
    killed = []

    def kill_before_the_second_marker(method, path):
      if '/checkpoints/' in path and path.endswith('DONE') and method != 'HEAD':
        markers.add(path)
        if len(markers) == 2 and not killed:
          trainer.kill()
          killed.append(path)

    markers = set()
    self.s3.before = kill_before_the_second_marker
    command = '-m', 'trainer.run', '--config', self.config, '--run_dir', self.url
    trainer = commands.start(*command, env=self.on('one'))
    self.assertEqual(trainer.wait(120), -9)
    self.assertLen(killed, 1)
    self.s3.losing = 2  # of the answers to the machine that goes on
    self.assertIn(f'ctr-evaluate --run_dir {self.url} --data', self.train(machine='two'))
    self.assertEqual(self.s3.losing, 0)
    undisturbed = f'{self.folder}/undisturbed'
    self.train(undisturbed)
    with copy_of(self.url, (*STATE, *EXPORTS, 'report.html')) as local:
      wanted, found = state_of(undisturbed), state_of(local)
      self.assertEqual(found.keys(), wanted.keys())
      for part, value in wanted.items():
        self.assertEqual(found[part], value, part)
      self.assertTrue(os.path.exists(f'{local}/report.html'))
    # The first machine has what the bucket has not, and takes up what the bucket has.
    self.assertIn('nothing left to train', self.train(machine='one'))
    data = f'{self.folder}/day_0.csv'
    predicted = [
      self.done('predict', '--run_dir', d, '--data', data) for d in (self.url, undisturbed)
    ]
    self.assertLen(predicted[0].splitlines(), 200)
    self.assertEqual(*predicted)
    told = self.done('publish', '--run_dir', self.url, '--to', f'{self.folder}/store', '--once')
    self.assertIn('delta', told)
    slots = json.loads(self.done('inspect', '--run_dir', self.url, '--json'))['slots']
    self.assertLen(slots, 2)

  def test_the_second_of_two_machines_ends_the_first(self):
    took_over = []

    def take_over(method, path):
      if '/checkpoints/' in path and method != 'HEAD' and not took_over:
        took_over.append(path)
        owner = {'host': 'other', 'process': 7, 'time': 0}
        boto3.client('s3').put_object(
          Bucket='runs',
          Key=f'{self.id()}/trained_by.json',
          Body=json.dumps(owner).encode(),
        )

    self.s3.before = take_over
    line = self.train(status=2).splitlines()[-1]
    self.assertIn(f'run_dir {self.url}: process 7 on host other trains into it since', line)

  @pytest.mark.long
  def test_what_is_not_of_the_run_stays_untouched(self):
    """A prefix that holds something else is refused; what came unchanged is not written again."""
    client = boto3.client('s3')
    for name in ('runA/metrics.jsonl', 'notes.txt', 'exports/mine/rows.csv'):
      key = f'{self.id()}/{name}'
      client.put_object(Bucket='runs', Key=key, Body=b'mine')
      self.s3.requests.clear()
      line = self.train(status=2)
      self.assertIn(f"run_dir {self.url}: holds '{name}', which no run has written there", line)
      self.assertEqual({method for method, _ in self.s3.requests} - {'GET', 'HEAD'}, set())
      client.delete_object(Bucket='runs', Key=key)
    self.train()
    client.put_object(Bucket='runs', Key=f'{self.id()}/runA/best/ckpt-000000001/DONE', Body=b'mine')
    self.s3.requests.clear()
    out = f'{self.folder}/store'
    self.done('publish', '--run_dir', self.url, '--to', out, '--once')
    got = {path.partition(f'{self.id()}/')[2] for method, path in self.s3.requests}
    self.assertContainsSubset({'config.yaml', 'exports/000001-delta/DONE'}, got)
    self.assertEmpty([one for one in got if one.startswith(('checkpoints', 'best', 'runA'))])
    client.delete_object(Bucket='runs', Key=f'{self.id()}/runA/best/ckpt-000000001/DONE')
    self.s3.requests.clear()
    self.train()
    put = {
      path.partition(f'{self.id()}/')[2] for method, path in self.s3.requests if method == 'PUT'
    }
    self.assertContainsSubset({'trained_by.json', 'metrics.jsonl'}, put)
    self.assertEmpty([one for one in put if one.startswith(('config', 'check', 'best', 'exports'))])

  def test_what_cannot_be_done_is_told_in_one_line(self):
    export = 'export', '--run_dir', self.url, '--kind', 'base'
    self.assertIn('wanted --out', self.done(*export, status=2))
    self.assertIn('no such directory', self.done('evaluate', '--run_dir', self.url, status=2))
    modes = 'run', '--config', self.config, '--run_dir', self.url, '--set', 'sync.mode=ps'
    self.assertIn("with sync.mode 'ps'; wanted a directory", self.done(*modes, status=2))


if __name__ == '__main__':
  tf.test.main()
