"""The online loop:

passes announced by donefiles are evaluated, trained on, exported; SIGTERM ends it cleanly with its
state saved.
"""

import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
import tempfile

import tensorflow as tf

from tests.support import commands, small

DOCUMENT = pathlib.Path(__file__).resolve().parents[2] / 'docs' / 'online.md'


class WatchTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = tempfile.mkdtemp(dir=self.get_temp_dir())
    os.mkdir(f'{self.folder}/passes')
    data = {'watch': f'{self.folder}/passes', 'day_pattern': r'day_(\d+)', 'label': 'click'}
    small.write(
      f'{self.folder}/config.yaml',
      data=data,
      lifecycle={'admission_threshold': 0.5, 'delete_threshold': 0.3},
      model={'interactions': ['linear', 'fm']},
      train={'batch_size': 50, 'progressive_validation': True, 'log_every_steps': 1000},
      export={'base': True, 'delta_every_passes': 1},
    )

  def announce(self, name):
    samples = 200 + len(os.listdir(f'{self.folder}/passes'))  # no two passes have the same bytes
    with open(f'{self.folder}/passes/{name}', 'w', encoding='utf-8') as f:
      f.write(
        'user,item,click\n' + ''.join(f'{i % 7},{i % 5},{i % 3 == 0:d}\n' for i in range(samples))
      )
    with open(f'{self.folder}/passes/{name}.done', 'w', encoding='utf-8'):
      pass

  def watch(self, names):
    """Runs the loop, announces each pass once the one before is trained, then asks it to stop.

    Returns its status.
    """
    job = commands.start(
      *('-m', 'trainer.run', '--config', f'{self.folder}/config.yaml'),
      *('--run_dir', f'{self.folder}/run'),
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
    )
    names, output = list(names), ''
    try:
      for line in job.stdout:
        output += line
        if 'waiting for a pass' in line:
          if not names:
            job.send_signal(signal.SIGTERM)
            break
          self.announce(names.pop(0))
      output += job.stdout.read()
      return job.wait(timeout=120), output
    finally:
      job.kill()

  def test_passes_arrive_and_the_loop_is_taken_up_again(self):
    self.announce('day_0_hour_0.csv')
    status, output = self.watch(['day_0_hour_1.csv', 'day_1_hour_0.csv'])
    self.assertEqual(status, 0, output)
    status, output = self.watch(['day_1_hour_1.csv'])
    self.assertEqual(status, 0, output)
    with open(f'{self.folder}/run/metrics.jsonl', encoding='utf-8') as f:
      events = [json.loads(line) for line in f]
    passes = ['day_0_hour_0', 'day_0_hour_1', 'day_1_hour_0', 'day_1_hour_1']
    self.assertEqual([e['pass'] for e in events if e['event'] == 'train'], passes)
    self.assertEqual(
      [e['pass'] for e in events if e['event'] == 'eval' and e['split'] == 'next'], passes
    )
    self.assertEqual([e['day'] for e in events if e['event'] == 'day_end'], [0])  # day 1 goes on
    exports = [(e['kind'], e['pass']) for e in events if e['event'] == 'export']
    self.assertEqual(
      exports,
      [
        ('delta', passes[0]),
        ('delta', passes[1]),
        ('base', passes[1]),
        ('delta', passes[2]),
        ('delta', passes[3]),
      ],
    )
    self.assertTrue(
      all(
        e['seconds_since_announced'] >= e['seconds']
        for e in events
        if e['event'] == 'export' and e['kind'] == 'delta'
      )
    )

  def test_the_documented_start(self):
    """The config and the command of docs/online.md, on two days of parts."""
    with open(DOCUMENT, encoding='utf-8') as f:
      text = f.read()
    settings, command = re.findall(r'```\w*\n(.*?)```', text, re.DOTALL)[:2]
    with open(f'{self.folder}/online.yaml', 'w', encoding='utf-8') as f:
      f.write(settings)
    for i, name in enumerate(['logs/dt=2024-01-31', 'logs/dt=2024-02-01', 'holdout']):
      os.makedirs(f'{self.folder}/{name}')
      with open(f'{self.folder}/{name}/part-0.csv', 'w', encoding='utf-8') as f:
        f.write('user,item,click\n' + f'{i},1,1\n{i},2,0\n' * 50)
      with open(f'{self.folder}/{name}/_SUCCESS', 'w', encoding='utf-8'):
        pass
    name, *arguments = shlex.split(command)
    self.assertEqual(name, 'ctr-train')
    job = commands.start(
      *('-m', 'trainer.run', *arguments),
      cwd=self.folder,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
    )
    self.addCleanup(job.kill)
    output = ''
    for line in job.stdout:
      output += line
      if "waiting for a pass in 'logs'" in line:
        job.send_signal(signal.SIGINT)
        break
    output += job.stdout.read()
    self.assertEqual(job.wait(timeout=120), 130, output)
    with open(f'{self.folder}/runs/online/metrics.jsonl', encoding='utf-8') as f:
      events = [json.loads(line) for line in f]
    self.assertEqual(
      [(e['event'], e['day']) for e in events if e['event'] in ('train', 'day_end')],
      [('train', 20240131), ('day_end', 20240131), ('train', 20240201)],
    )
    for name in ('ledger.jsonl', 'report.html', 'owner.json', 'exports'):
      self.assertTrue(os.path.exists(f'{self.folder}/runs/online/{name}'), name)


if __name__ == '__main__':
  tf.test.main()
