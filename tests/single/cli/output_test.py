"""Standard output that is closed, full or without a reader, of every command and of a job."""

import io
import json
import os
import pathlib
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import unittest.mock

import pytest
import tensorflow as tf
import tomli

from tests.support import commands, small
from trainer import command_line

ROOT = pathlib.Path(__file__).resolve().parents[3]
COMMANDS = [
  script.split(':')[0]
  for script in tomli.loads((ROOT / 'pyproject.toml').read_text())['project']['scripts'].values()
]


def start(arguments, **streams):
  command = [sys.executable, '-m', *arguments]
  return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, **streams)


def write_config(folder):
  """Writes a log and its config; returns the path of the config."""
  log = pathlib.Path(folder, 'log.csv')
  log.write_text('click,user\n' + '0,1\n1,2\n' * 50)
  data = {'train': [str(log)], 'label': 'click', 'slots': [{'name': 'user'}]}
  return small.write(pathlib.Path(folder, 'config.yaml'), data=data)


def without_reader():
  reading, writing = os.pipe()
  os.close(reading)
  return writing


class OutputTest(tf.test.TestCase):
  def test_commands_that_nobody_listens_to(self):
    """As `| head` leaves them: quiet, and the status of a command that SIGPIPE has ended."""
    with os.fdopen(without_reader(), 'w') as out, tempfile.TemporaryFile('w+') as err:
      for name in COMMANDS:
        job = commands.start('-m', name, '--help', stdout=out, stderr=err)
        self.assertEqual(job.wait(60), 141, name)
      err.seek(0)
      self.assertEqual(err.read(), '')

  def test_commands_on_a_full_disk_or_without_output(self):
    with open('/dev/full', 'w', encoding='utf-8') as full:
      job = start(['trainer.run', '--help'], stdout=full)
      _, told = job.communicate(timeout=60)
    self.assertEqual(job.returncode, 2)
    self.assertEqual(told, 'error: cannot write to standard output: No space left on device\n')
    job = start(['trainer.run', '--help'], preexec_fn=lambda: os.closerange(0, 2))
    _, told = job.communicate(timeout=60)
    self.assertEqual(job.returncode, 2)
    self.assertEqual(told, 'error: cannot write to standard output: Bad file descriptor\n')

  def test_ctrl_c_while_a_command_imports(self):
    """It leaves no trace; a module that sends the signal stands for whatever is imported."""
    folder = pathlib.Path(tempfile.mkdtemp(dir=self.get_temp_dir()))
    module = 'import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n'
    (folder / 'yaml.py').write_text(module)
    environment = os.environ | {'PYTHONPATH': str(folder)}
    job = start(['trainer.cli.predict', '--run_dir=run'], stdout=subprocess.PIPE, env=environment)
    out, told = job.communicate(timeout=60)
    self.assertEqual((job.returncode, out, told), (-signal.SIGINT, '', ''))

  def test_less_memory_than_its_libraries_take(self):
    def limit():
      resource.setrlimit(resource.RLIMIT_AS, (10**9, 10**9))

    config, run = write_config(self.get_temp_dir()), f'{self.get_temp_dir()}/run'
    job = start(['trainer.run', '--config', config, '--run_dir', run], preexec_fn=limit)
    _, told = job.communicate(timeout=60)
    self.assertEqual(job.returncode, 2, told)
    self.assertRegex(told, r'^error: out of memory[^\n]*; wanted [^\n]*\n$')

  def test_without_descriptors_a_command_may_be_started_again(self):
    program = (
      'import os\nfrom trainer import command_line, errors\n\n\n'
      'def main() -> int:\n'
      '  """A command."""\n'
      '  with errors.plain_errors("cannot write"):\n'
      '    while True:\n'
      '      os.dup(0)\n\n\n'
      'import resource, sys\n'
      'resource.setrlimit(resource.RLIMIT_NOFILE, (99, 99))\n'
      'sys.argv[1:] = []\n'
      'command_line.entry(main)\n'
    )
    done = commands.run('-c', program)
    self.assertEqual(done.stderr, 'error: cannot write: Too many open files\n')
    self.assertEqual(done.returncode, 3)
    done = commands.run('-c', program.replace('errors.plain_errors("cannot write")', 'open("/")'))
    self.assertEqual(done.returncode, 1)

  def test_a_path_in_the_home_directory(self):
    command = '-m', 'trainer.cli.inspect', '--run_dir=~/runs/mine'
    done = commands.run(*command, env={'HOME': '/proc/nowhere'})
    self.assertIn('/proc/nowhere/runs/mine', done.stderr)
    self.assertEqual(done.returncode, 2)

  def test_a_port_that_no_host_has(self):
    done = commands.run('-m', 'trainer.cli.serve', 'exports', '--port', '99999')
    self.assertEqual(done.returncode, 2)
    self.assertRegex(done.stderr, r'^error: .*port=99999.* 65535.*\n$')

  def test_flags_that_are_no_numbers(self):
    for arguments, told in (
      (('serve', 'exports', '--port', 'x: y'), "--port: found 'x: y'; wanted a whole number"),
      (('synthesize', '--drift=much'), "--drift: found 'much'; wanted a number"),
    ):
      done = commands.run('-m', commands.module(arguments[0]), *arguments[1:])
      self.assertEqual((done.returncode, done.stderr), (2, f'error: {told}\n'))

  @pytest.mark.long
  def test_a_job_goes_on_without(self):
    folder = pathlib.Path(tempfile.mkdtemp(dir=self.get_temp_dir()))
    config = write_config(folder)
    writing = without_reader()
    streams = {
      'no_reader': {'stdout': writing},
      'closed': {'preexec_fn': lambda: os.closerange(0, 2)},
    }
    for name, stream in streams.items():
      run = folder / name
      job = start(['trainer.run', f'--config={config}', f'--run_dir={run}'], **stream)
      _, told = job.communicate(timeout=120)
      self.assertEqual(job.returncode, 0, told)
      self.assertTrue((run / 'report.html').exists())
    os.close(writing)

  def test_lines_of_two_threads_are_two_objects(self):
    raw = io.BytesIO()
    with unittest.mock.patch.object(command_line.Output, 'as_json', True):
      out = command_line.Output(raw, 'utf-8', write_through=True)
      out.write('begun ')  # as print() writes the end of a line by itself
      other = threading.Thread(target=print, args=('whole\nerror: two',), kwargs={'file': out})
      other.start()
      other.join()
      out.write('here\n')
    lines = [json.loads(line) for line in raw.getvalue().splitlines()]
    told = [(line['level'], line['fields']['text']) for line in lines]
    self.assertEqual(told, [('info', 'whole'), ('error', 'error: two'), ('info', 'begun here')])

  def test_output_that_is_not_needed_never_raises(self):
    for needed in (False, True):
      for place in ('/dev/full', without_reader()):
        with open(place, 'wb', buffering=0) as to, unittest.mock.patch('sys.stderr', io.StringIO()):
          out = command_line.Output(to, 'utf-8', line_buffering=True)
          out.is_needed = needed
          try:
            for _ in range(3):
              print('text', file=out, flush=True)
            self.assertFalse(needed)
            self.assertLen(sys.stderr.getvalue().splitlines(), 1)
          except SystemExit as e:
            self.assertTrue(needed)
            self.assertEqual(e.code, 2 if place == '/dev/full' else 141)


if __name__ == '__main__':
  tf.test.main()
