"""A rank that is killed or frozen ends the whole job, named; a stranger never does."""

import concurrent.futures
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time

import psutil
import tensorflow as tf

from tests.support import jobs

FROZEN = str(jobs.ROOT / 'tests' / 'support' / 'frozen_rank.py')
LOST_SECONDS = 6


class LostPeerTest(tf.test.TestCase):
  def job(self, size=2, **sync):
    folder = tempfile.mkdtemp(dir=self.get_temp_dir())
    config = jobs.write_config(folder, sync={'lost_peer_seconds': LOST_SECONDS} | sync)
    return jobs.Ranks(size, ['--config', config, '--run_dir', f'{folder}/run'])

  def lose(self, how):
    """Starts a job of 2 ranks by horovodrun and sends rank 1 the signal once it trains.

    Returns:
      What the job said.
    """
    folder = tempfile.mkdtemp(dir=self.get_temp_dir())
    config = jobs.write_config(folder, sync={'lost_peer_seconds': LOST_SECONDS})
    horovodrun = os.path.join(os.path.dirname(sys.executable), 'horovodrun')
    command = [horovodrun, '-np', '2', '-H', 'localhost:2', sys.executable, '-m', 'trainer.run']
    job = subprocess.Popen(
      [*command, '--config', config, '--run_dir', f'{folder}/run'],
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      env=os.environ | {'CTR_THREADS': '1'},
    )
    output, family = '', []
    try:
      for line in job.stdout:
        output += line
        if 'samples/s' in line and not family:  # both ranks train
          family = psutil.Process(job.pid).children(recursive=True)
          jobs.ranks_below(job.pid)[1].send_signal(how)
      self.assertNotEqual(job.wait(timeout=60), 0)
      # Some end by themselves a moment after the launcher.
      _, alive = psutil.wait_procs(family, timeout=15)
      self.assertEmpty([p.cmdline() for p in alive], 'left behind')
    finally:
      for process in [*family, job]:
        if process.is_running() if process is not job else job.poll() is None:
          process.kill()
    with open(f'{folder}/run/metrics.jsonl', encoding='utf-8') as f:
      lost = [e['reason'] for e in map(json.loads, f) if e['event'] == 'lost']
    self.assertLen(lost, 1)
    self.assertIn('rank 1 (process', lost[0])
    return output

  def test_killed(self):
    self.assertRegex(self.lose(signal.SIGKILL), r'rank 1 \(process \d+ on \S+\) was lost')

  def test_frozen(self):
    self.assertRegex(
      self.lose(signal.SIGSTOP),
      rf'rank 1 \(process \d+ on \S+\) was lost: it was silent for {LOST_SECONDS} s',
    )

  def test_frozen_at_every_stage_of_the_start(self):
    seconds = 10  # within which busy processors start both ranks
    never_came = rf'rank {{rank}} was lost: it did not start within {seconds} s'
    silent = rf'rank {{rank}} \(process \d+ on \S+\) was lost: .*silent for {seconds} s'
    stages = {
      'trainer.comm.heartbeat:Heartbeat.__init__:call': never_came,
      'trainer.runtime:start:call': f'{never_came}|{silent}',  # it greets in a thread
      'horovod.common.basics:HorovodBasics.init:call': silent,
      'horovod.common.basics:HorovodBasics.init:return': silent,
      'trainer.comm.connections:Connector.__init__:call': silent,
      'trainer.comm.connections:Connector.connect:call': silent,
    }

    def freeze(place, frozen):
      with self.job(lost_peer_seconds=seconds) as ranks:
        ranks.start(1 - frozen)
        ranks.start(frozen, [FROZEN, place])
        status = ranks.wait(1 - frozen)
        return status, ranks.output(1 - frozen)

    cases = [(place, 1) for place in stages] + [(place, 0) for place in list(stages)[::3]]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
      for case, (status, output) in zip(cases, pool.map(freeze, *zip(*cases))):
        with self.subTest(case):
          place, frozen = case
          self.assertEqual(status, 3, output)
          self.assertRegex(output, stages[place].format(rank=frozen))

  def test_strangers_do_not_end_the_job(self):
    port = _free_port()
    with self.job(ports=[port, port]) as ranks:
      first = ranks.start(0)
      strangers = _strangers(_when_listening(first, port))  # before any rank has come
      second = ranks.start(1)
      for process in first, second:
        # Each has a Unix socket for the other rank, and rank 0 a port for heartbeats.
        for address in _unix_sockets(process):
          strangers += _strangers(address)
      strangers += _strangers(('127.0.0.1', port))
      for stranger in strangers:
        with contextlib.suppress(ConnectionResetError):
          while stranger.recv(1 << 12):  # until the listener gives him up
            pass
      while first.poll() is None and 'samples/s' not in ranks.output(0):
        time.sleep(0.1)
      first.send_signal(signal.SIGTERM)
      statuses = [ranks.wait(rank) for rank in range(2)]
      self.assertEqual(statuses, [143, 143], ranks.output(0) + ranks.output(1))


def _free_port() -> int:
  with socket.create_server(('127.0.0.1', 0)) as server:
    return server.getsockname()[1]


def _when_listening(process, port):
  """Returns the address once a process listens at it."""
  while process.poll() is None:
    found = psutil.Process(process.pid).net_connections('tcp')
    if any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in found):
      return '127.0.0.1', port
    time.sleep(0.05)
  raise AssertionError('it ended')


def _unix_sockets(process):
  """Returns the names of the Unix sockets that a process listens at, once there is one."""
  while process.poll() is None:
    found = psutil.Process(process.pid).net_connections('unix')
    names = {c.laddr for c in found if c.laddr.startswith('@')}
    if names:
      return [b'\0' + name[1:].encode() for name in names]
    time.sleep(0.05)
  raise AssertionError('it ended')


def _strangers(address) -> list[socket.socket]:
  """Connects one who is silent, one who talks rubbish and one who hangs up; returns the first two.

  A length that promises more, and a greeting of another job, are rubbish, too.
  """
  sayings = b'', b'GET / HTTP/1.0\r\n\r\n', b'\xff' * 100, b'\0\0\0\x14#CHALLENGE#1234567890', None
  family = socket.AF_INET if isinstance(address, tuple) else socket.AF_UNIX
  staying = []
  for saying in sayings:
    stranger = socket.socket(family)
    stranger.settimeout(60)
    stranger.connect(address)
    if saying is None:
      stranger.close()
    else:
      stranger.sendall(saying)
      staying.append(stranger)
  return staying


if __name__ == '__main__':
  tf.test.main()
