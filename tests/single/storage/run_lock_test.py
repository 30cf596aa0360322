"""One owner of a run_dir."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from unittest import mock

import psutil
import tensorflow as tf

from trainer import files
from trainer.errors import UserError
from trainer.storage.run_lock import FILE, RunLock


class RunLockTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.run_dir = tempfile.mkdtemp(dir=self.get_temp_dir())
    self.path = os.path.join(self.run_dir, FILE)

  def owner(self):
    with open(self.path, encoding='utf-8') as f:
      return json.load(f)

  def give_to(self, seconds_ago=0.0, **changes):
    """Writes an owner's file: this process's with changes."""
    elsewhere = tempfile.mkdtemp(dir=self.get_temp_dir())
    lock = RunLock(elsewhere)
    lock.acquire()
    with open(os.path.join(elsewhere, FILE), encoding='utf-8') as f:
      owner = json.load(f) | {'id': 'another'} | changes
    lock.release()
    with open(self.path, 'w', encoding='utf-8') as f:
      json.dump(owner, f)
    then = time.time() - seconds_ago
    os.utime(self.path, (then, then))

  def take(self, **options):
    lock = RunLock(self.run_dir, **options)
    lock.acquire()
    self.assertEqual(self.owner()['process'], os.getpid())
    lock.release()

  def test_a_second_trainer_is_refused_by_name(self):
    child = subprocess.Popen(['sleep', '60'])
    self.addCleanup(child.wait)
    self.addCleanup(child.kill)
    started = psutil.Process(child.pid).create_time()
    self.give_to(host='here', process=child.pid, started=started)
    with self.assertRaisesRegex(
      UserError,
      f'process {child.pid} on host here trains into it; wanted that process to end first',
    ):
      RunLock(self.run_dir).acquire()

  def test_a_lock_is_free_once_released(self):
    for _ in range(2):
      lock = RunLock(self.run_dir)
      lock.acquire()
      self.assertEqual(self.owner()['process'], os.getpid())
      lock.check()
      with self.assertRaises(UserError):
        RunLock(self.run_dir).acquire()
      lock.release()
      lock.release()

  def test_a_dead_owner_of_this_host_is_followed_at_once(self):
    child = subprocess.Popen(['true'])
    started = psutil.Process(child.pid).create_time()
    child.wait()
    self.give_to(process=child.pid, started=started)
    self.take()
    self.give_to(started=1.0)  # a later process has its number
    self.take()
    self.give_to()  # this process, before it started itself again
    self.take()
    with open(self.path, 'w', encoding='utf-8') as f:
      f.write('{"host":')
    self.take()

  def test_an_owner_elsewhere_is_dead_when_its_file_stands_still(self):
    self.give_to(seconds_ago=100, place='elsewhere', host='far')
    self.take()
    self.give_to(seconds_ago=0, place='elsewhere', host='far')
    with self.assertLogs('absl', 'WARNING') as logs:
      self.take(stale_seconds=0.5)
    self.assertRegex(str(logs.output), 'on host far trained into it last; waiting up to ')
    self.give_to(seconds_ago=10, place='elsewhere', host='far', process=7)
    lock = RunLock(self.run_dir, stale_seconds=60)
    beats = iter(range(9))

    def beat(_):
      at = time.time() - 9 + next(beats)
      os.utime(self.path, (at, at))

    with mock.patch('trainer.storage.run_lock.time.sleep', beat):
      with self.assertRaisesRegex(UserError, 'process 7 on host far trains into it'):
        lock.acquire()

  def test_another_process_of_the_job_follows_a_lost_owner_or_one_that_gives_way(self):
    child = subprocess.Popen(['sleep', '60'])  # the owner, frozen: it lives
    self.addCleanup(child.wait)
    self.addCleanup(child.kill)
    started = psutil.Process(child.pid).create_time()
    self.give_to(process=child.pid, started=started, id='of the job')
    lock = RunLock(self.run_dir)
    lock.follow('of the job')
    lock.check()
    self.assertEqual((self.owner()['process'], self.owner()['id']), (os.getpid(), 'of the job'))
    with self.assertRaisesRegex(UserError, f'process {os.getpid()} on host .* trains into it'):
      RunLock(self.run_dir).acquire()
    lock.leave()
    self.give_to(process=child.pid, started=started, id='of the job')  # it is here again
    lock.release()
    self.assertEqual(self.owner()['process'], child.pid)
    self.give_to(id='of another job')
    with self.assertRaisesRegex(UserError, 'has taken it over while this one stood still'):
      lock.follow('of the job')

  def test_who_stood_still_and_was_followed_ends(self):
    lock = RunLock(self.run_dir)
    lock.acquire()
    with open(self.path, 'w', encoding='utf-8') as f:
      json.dump({'host': 'b', 'process': 5, 'started': 0, 'place': '', 'id': 'x'}, f)
    with self.assertRaisesRegex(UserError, 'process 5 on host b has taken it over'):
      lock.check()
    lock.release()
    self.assertEqual(self.owner()['id'], 'x', 'the lock of another is left alone')


class TemporaryDirectoryTest(tf.test.TestCase):
  def test_a_killed_process_leaves_nothing_for_long(self):
    folder = tempfile.mkdtemp(dir=self.get_temp_dir())
    script = (
      'import os, signal; from trainer.files import temporary_directory\n'
      'with temporary_directory(): os.kill(os.getpid(), signal.SIGKILL)'
    )
    place = {'TMPDIR': folder}
    killed = subprocess.run([sys.executable, '-c', script], env=os.environ | place, check=False)
    self.assertEqual(killed.returncode, -signal.SIGKILL)
    (left,) = os.listdir(folder)
    with mock.patch.object(tempfile, 'gettempdir', lambda: folder):
      with files.temporary_directory(folder) as held:
        for name in (left, os.path.basename(held)):
          os.utime(f'{folder}/{name}', (0, 0))
        os.mkdir(f'{folder}/ctr-trainer-young')
        with files.temporary_directory(folder):
          self.assertIn(left, os.listdir(folder), 'another folder is not cleared')
        with files.temporary_directory():
          self.assertNotIn(left, os.listdir(folder))
          self.assertIn(os.path.basename(held), os.listdir(folder))
    self.assertEqual(os.listdir(folder), ['ctr-trainer-young'])


if __name__ == '__main__':
  tf.test.main()
