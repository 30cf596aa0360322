"""A rank that is killed, or frozen, ends the whole job in bounded time, named, with nothing left
behind.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile

import psutil
import tensorflow as tf

CONFIG = """
data:
  train: [{folder}/day_*.csv]
  label: click
  slots: [{{name: user}}, {{name: item}}]
model: {{interactions: [linear, fm]}}
train: {{batch_size: 64, epochs: 100000, log_every_steps: 5}}
checkpoint: {{every_passes: null}}
sync: {{lost_peer_seconds: 8}}
"""


class LostPeerTest(tf.test.TestCase):
  def lose(self, how):
    """Starts a job of 2 ranks, sends rank 1 the signal once it trains, and returns (status,
    output).
    """
    folder = tempfile.mkdtemp(dir=self.get_temp_dir())
    with open(f'{folder}/day_0.csv', 'w', encoding='utf-8') as f:
      f.write(
        'user,item,click\n' + ''.join(f'{i % 97},{i % 89},{i % 3 == 0:d}\n' for i in range(5000))
      )
    with open(f'{folder}/config.yaml', 'w', encoding='utf-8') as f:
      f.write(CONFIG.format(folder=folder))
    horovodrun = os.path.join(os.path.dirname(sys.executable), 'horovodrun')
    command = [
      horovodrun,
      '-np',
      '2',
      '-H',
      'localhost:2',
      sys.executable,
      '-m',
      'trainer.run',
      '--config',
      f'{folder}/config.yaml',
      '--run_dir',
      f'{folder}/run',
    ]
    job = subprocess.Popen(
      command,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      env=os.environ | {'CTR_THREADS': '1'},
    )
    output, left = '', []
    try:
      for line in job.stdout:
        output += line
        if 'samples/s' in line and not left:  # both ranks train
          family = psutil.Process(job.pid).children(recursive=True)
          ranks = [
            p
            for p in family
            if 'trainer.run' in p.cmdline()
            and p.cmdline()[0] == sys.executable
            and p.environ().get('HOROVOD_RANK') in ('0', '1')
          ]
          left = family
          (victim,) = [
            p for p in ranks if p.environ()['HOROVOD_RANK'] == '1' and p.children() == []
          ]
          os.kill(victim.pid, how)
      status = job.wait(timeout=60)
      _, alive = psutil.wait_procs(
        left, timeout=15
      )  # those that end by themselves, a moment after the launcher
      self.assertEmpty([p.cmdline() for p in alive], 'left behind')
    finally:
      for process in [*left, job]:
        if process.is_running() if process is not job else job.poll() is None:
          process.kill()
    return status, output

  def test_killed(self):
    status, output = self.lose(signal.SIGKILL)
    self.assertNotEqual(status, 0)
    self.assertRegex(output, r'rank 1 \(process \d+ on \S+\) was lost')

  def test_frozen(self):
    status, output = self.lose(signal.SIGSTOP)
    self.assertNotEqual(status, 0)
    self.assertTrue(
      re.search(r'rank 1 \(process \d+ on \S+\) was lost: it was silent for 8 s', output),
      output[-2000:],
    )


if __name__ == '__main__':
  tf.test.main()
