"""A run_dir's copies into a bucket and back: what checkpoints share travels once."""

import itertools
import os
import pathlib
import shutil
import tempfile
from unittest import mock

import boto3
import tensorflow as tf

from tests.support.s3 import S3
from trainer import files
from trainer.data import file_system
from trainer.storage.bucket import STATE, Bucket


class BucketTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.enter_context(S3())
    name = f'bucket{len(self.id())}'  # a client keeps the endpoint of a name
    boto3.client('s3').create_bucket(Bucket=name)
    self.here = pathlib.Path(tempfile.mkdtemp(dir=self.get_temp_dir()))
    self.bucket = Bucket(f's3://{name}/{self.id()}', str(self.here))
    self.bucket.take()

  def checkpoint(self, step, own, before=None):
    """Writes a checkpoint with rows of its own, and links those of the one before."""
    final = self.here / 'checkpoints' / f'ckpt-{step:09d}'
    unfinished = pathlib.Path(f'{final}.unfinished')
    unfinished.mkdir(parents=True)
    for path in before.glob('rows-*') if before else ():
      os.link(path, unfinished / path.name)
    for suffix in ('.bin', '.json'):
      (unfinished / f'rows-{step}-00000-of-00001{suffix}').write_text(f'{own}{suffix}')
    files.publish(str(unfinished), str(final), {'step': step, 'rows': own})
    return final

  def moved(self, action):
    """The names of the files that `action` reads from the bucket, and of those it writes."""
    moved = {'open_file': [], 'open_to_write': []}
    with mock.patch.multiple(
      file_system,
      **{
        name: lambda path, names=names, action=getattr(file_system, name): (
          names.append(path.partition(f'{self.id()}/')[2]) or action(path)
        )
        for name, names in moved.items()
      },
    ):
      action()
    return [{n for n in names if '/' in n and '.bin' in n} for names in moved.values()]

  def content(self, folder):
    paths = folder.glob('checkpoints/*/*')
    return {str(p.relative_to(folder)): p.read_text() for p in paths}

  def test_rows_that_checkpoints_share_travel_once(self):
    first = self.checkpoint(1, 'all')
    name = 'checkpoints/ckpt-00000000{}/rows-{}-00000-of-00001.bin'.format
    self.assertEqual(self.moved(self.bucket.upload), [set(), {name(1, 1)}])
    second = self.checkpoint(2, 'few', first)
    third = self.checkpoint(3, 'more', second)
    self.assertEqual(self.moved(self.bucket.upload), [set(), {name(2, 2), name(3, 3)}])
    shutil.rmtree(first)
    self.assertEqual(self.moved(self.bucket.upload), [set(), set()])
    there = pathlib.Path(tempfile.mkdtemp(dir=self.get_temp_dir()))
    other = Bucket(self.bucket.run_dir, str(there))
    read, written = self.moved(lambda: other.refresh(STATE))
    self.assertLen(read, 3)  # of six
    self.assertEmpty(written)
    self.assertEqual(self.content(there), self.content(self.here))
    # A checkpoint that was downloaded is linked as well.
    other.take()
    self.here = there
    self.checkpoint(4, 'last', there / third.relative_to(third.parents[1]))
    self.assertEqual(self.moved(other.upload), [set(), {name(4, 4)}])

  def test_the_best_state_shares_no_file_with_checkpoints_there_or_here(self):
    first = self.checkpoint(1, 'all')
    shutil.copytree(first, self.here / 'best' / first.name)
    _, written = self.moved(self.bucket.upload)
    self.assertEqual({name.split('/')[0] for name in written}, {'checkpoints', 'best'})
    there = tempfile.mkdtemp(dir=self.get_temp_dir())
    Bucket(self.bucket.run_dir, there).refresh(STATE)
    names = [f'{there}/{folder}/{first.name}' for folder in ('checkpoints', 'best')]
    for one, other in itertools.product(*map(os.scandir, names)):
      self.assertNotEqual(one.inode(), other.inode())

  def test_other_rows_of_the_same_name_travel(self):
    self.checkpoint(1, 'all')
    self.bucket.upload()
    there = pathlib.Path(tempfile.mkdtemp(dir=self.get_temp_dir()))
    shutil.copytree(self.here, there, dirs_exist_ok=True)
    shutil.rmtree(self.here / 'checkpoints')
    self.checkpoint(1, 'others')
    self.checkpoint(2, 'few', self.checkpoint(3, 'some'))
    self.bucket.upload()
    Bucket(self.bucket.run_dir, str(there)).refresh(STATE)
    self.assertEqual(self.content(there), self.content(self.here))


if __name__ == '__main__':
  tf.test.main()
