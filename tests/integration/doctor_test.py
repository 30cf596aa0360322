"""ctr-doctor: what it finds, alone and between two ranks, and what it calls wrong."""

import json
import os
import pathlib
import re
import socket
import tempfile
import time

import tensorflow as tf

from tests.support import commands, jobs
from trainer.storage import run_lock

PROGRAM = '-m', 'trainer.cli.doctor'
ALONE = 'versions', 'op library', 'ranks', 'processor', 'threads', 'memory', 'open files', 'GPUs'
BETWEEN = 'all-reduce', 'all-to-all', 'clock', 'run_dir'


# Runs ctr-doctor where files can neither be written nor removed.
NOT_WRITABLE = """
import errno, os, runpy
from unittest import mock
error = OSError(errno.EROFS, os.strerror(errno.EROFS), 'x')
with mock.patch('trainer.files.write_synced', side_effect=error):
  with mock.patch('os.remove', side_effect=error):
    runpy.run_module('trainer.cli.doctor', run_name='__main__', alter_sys=True)
"""


class DoctorTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(tempfile.mkdtemp(dir=self.get_temp_dir()))

  def doctor(self, *flags):
    return commands.run(*PROGRAM, *flags)

  def test_two_ranks_find_the_network_and_one_run_dir(self):
    with jobs.Ranks(2, ['--run_dir', f'{self.folder}/runs/new', '--json']) as ranks:
      for rank in range(2):
        ranks.start(rank, PROGRAM)
      self.assertEqual([ranks.wait(r) for r in range(2)], [0, 0], ranks.output(0))
      found = json.loads(ranks.output(0))['ranks']
    self.assertLen(found, 2)
    for checks in found:
      by_name = {check['name']: check for check in checks}
      self.assertContainsSubset({*ALONE, *BETWEEN}, set(by_name))
      self.assertIn('2 on', by_name['ranks']['found'])
      self.assertIn(f'{self.folder}: the same for all', by_name['run_dir']['found'])
      self.assertIn('runs/new does not exist yet', by_name['run_dir']['found'])
      for name in 'all-reduce', 'all-to-all':
        latency, rate = re.match(
          r'([\d.]+) ms for 4 bytes, ([\d,]+) MB/s', by_name[name]['found']
        ).groups()
        self.assertGreater(float(latency), 0)
        self.assertGreater(int(rate.replace(',', '')), 0)
    self.assertEmpty(os.listdir(self.folder))  # its probe is gone, and it makes no run_dir

  def test_ranks_that_differ_are_wrong(self):
    package = self.folder / 'path/numpy-9.9.dist-info'
    package.mkdir(parents=True)
    (package / 'METADATA').write_text('Metadata-Version: 2.1\nName: numpy\nVersion: 9.9\n')
    with jobs.Ranks(2, []) as ranks:
      for rank, path in enumerate(('', str(package.parent))):
        folder = tempfile.mkdtemp(dir=self.folder)
        ranks.start(rank, (*PROGRAM, f'--run_dir={folder}'), {'PYTHONPATH': path})
      self.assertEqual([ranks.wait(r) for r in range(2)], [2, 2], ranks.output(0) + ranks.output(1))
      told = ranks.output(0)
    self.assertRegex(
      told, 'wrong  versions .*numpy 9.9, .*; on rank 1; wanted the same environment'
    )
    self.assertRegex(told, 'wrong  run_dir .* not the directory of rank 0; on rank 1; wanted one')

  def test_it_says_where_a_run_stands(self):
    events = [
      {'event': 'pass', 'step': 3, 'time': 1.0, 'pass': 'day_1', 'fate': 'refused'},
      {'event': 'end', 'step': 1234, 'time': 2.0, 'status': 'stopped'},
    ]
    (self.folder / 'metrics.jsonl').write_text('\n'.join(map(json.dumps, events)) + '\n')
    done = self.doctor('--run_dir', str(self.folder))
    self.assertEqual(done.returncode, 2, done.stderr)
    self.assertRegex(
      done.stdout,
      r'wrong  run  +stopped, last event at 1970-.*, step 1,234; 0 checkpoints; 1 passes refused '
      '.*; wanted a checkpoint: nothing is saved yet',
    )

  def test_it_says_whether_the_trainer_was_killed(self):
    (self.folder / 'metrics.jsonl').write_text('{"event": "train", "step": 3, "time": 1.0}\n')
    told = lambda: self.doctor('--run_dir', str(self.folder)).stdout
    self.assertIn('no process trains into it, last event at', told())
    lock = run_lock.RunLock(str(self.folder))
    lock.acquire()
    self.assertIn(f'process {os.getpid()} on host {socket.gethostname()} is at work, last', told())
    owner = json.loads((self.folder / run_lock.FILE).read_text())
    for changes, silent, wanted in (
      ({'started': 1.0}, 0, 'was killed, last event at'),
      ({'place': 'elsewhere'}, 0, 'is at work, last event at'),
      (
        {'place': 'elsewhere'},
        100,
        r'was killed or cut off: it gave its last sign of life 1\d\d s ago',
      ),
      ({'process': 'x'}, 0, 'no process trains into it'),
    ):
      (self.folder / run_lock.FILE).write_text(json.dumps(owner | changes))
      then = time.time() - silent
      os.utime(self.folder / run_lock.FILE, (then, then))
      self.assertRegex(told(), wanted)

  def test_a_directory_that_cannot_be_written(self):
    """Where nothing can be written, its probe cannot be removed either."""
    done = commands.run('-c', NOT_WRITABLE, '--run_dir', str(self.folder))
    self.assertEqual(done.returncode, 2, done.stderr)
    self.assertRegex(
      done.stdout, 'wrong  run_dir  .*Read-only file system.*; wanted another --run_dir'
    )

  def test_a_file_is_no_run_dir(self):
    path = self.folder / 'small.csv'
    path.write_text('click\n')
    for run_dir in (path, path / 'runs' / 'new'):
      done = self.doctor('--run_dir', str(run_dir))
      self.assertEqual(done.returncode, 2, done.stderr)
      self.assertRegex(done.stdout, f'wrong  run_dir  *{path} is a file; wanted a directory\n')

  def test_alone_it_tells_a_port_that_is_taken(self):
    with socket.socket() as taken:
      taken.bind(('', 0))
      port = taken.getsockname()[1]
      config = jobs.write_config(str(self.folder), 10, sync={'ports': [port, port]})
      done = self.doctor('--config', config)
    self.assertEqual(done.returncode, 2, done.stderr)
    self.assertRegex(
      done.stdout, f'wrong  ports  *0 of {port} to {port} are free.*; wanted one for'
    )
    self.assertIn('1 on ', done.stdout)


if __name__ == '__main__':
  tf.test.main()
