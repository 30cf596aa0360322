"""A rank that is killed or frozen ends the whole job, named; strangers at our ports never do."""

import concurrent.futures
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

import psutil
import pytest
import tensorflow as tf

from tests.support import jobs
from trainer.comm import messages

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

  def test_a_killed_rank_is_named(self):
    self.assertRegex(self.lose(signal.SIGKILL), r'rank 1 \(process \d+ on \S+\) was lost')

  @pytest.mark.long
  def test_a_frozen_rank_is_named(self):
    self.assertRegex(
      self.lose(signal.SIGSTOP),
      rf'rank 1 \(process \d+ on \S+\) was lost: it was silent for {LOST_SECONDS} s',
    )

  @pytest.mark.long
  def test_frozen_at_every_stage_of_the_start(self):
    seconds = 10  # within which busy processors start both ranks
    never_came = rf'rank {{rank}} was lost: it did not start within {seconds} s'
    silent = rf'rank {{rank}} \(process \d+ on \S+\) was lost: .*silent for {seconds} s'
    stages = {
      'trainer.comm.heartbeat:Heartbeat.__init__:call': never_came,
      'trainer.runtime:start:call': f'{never_came}|{silent}',  # it greets in a thread, which a
      'horovod.tensorflow:init:call': f'{never_came}|{silent}',  # busy machine may start late
      'horovod.tensorflow:init:return': silent,
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

  @pytest.mark.long
  def test_ranks_that_do_not_meet_end_in_time(self):
    """Gloo takes whoever comes first to its port for a rank, and a rank may be too slow."""
    env = {'HOROVOD_GLOO_TIMEOUT_SECONDS': '15'}
    slow = (
      'import runpy, time, horovod.tensorflow as hvd\n'
      'hvd.init = lambda: time.sleep(600)\n'
      'runpy.run_module("trainer.run", run_name="__main__", alter_sys=True)'
    )
    with self.job(lost_peer_seconds=60) as ranks:
      ranks.start(0, env=env)
      ranks.start(1, ['-c', slow], env=env)
      self.assertEqual([ranks.wait(rank) for rank in range(2)], [3, 3])
      self.assertRegex(ranks.output(0), 'the ranks did not meet within 14 s: .* run the same comm')
      self.assertLen(ranks.output(0).splitlines(), 1)
      self.assertEmpty(ranks.output(1))
    with self.job() as ranks, contextlib.ExitStack() as stack:
      first = ranks.start(0, env=env)
      while not (ports := _ports([psutil.Process(first.pid)])):
        self.assertIsNone(first.poll(), ranks.output(0))
        time.sleep(0.02)
      for address in ports:
        stack.enter_context(socket.create_connection(address)).sendall(bytes(64))
      ranks.start(1, env=env)
      statuses = [ranks.wait(rank) for rank in range(2)]
      output = ranks.output(0) + ranks.output(1)
      self.assertContainsSubset(statuses, [3, -signal.SIGABRT], output)
      self.assertRegex(output, 'did not meet|was lost|gloo::')

  @pytest.mark.long
  def test_strangers_do_not_end_the_job(self):
    with self.job() as ranks:
      first = ranks.start(0)
      strangers = [s for name in _unix_sockets(first, 1) for s in _strangers(name)]  # come first
      second = ranks.start(1)
      # For heartbeats, where it is rank 0, and for rows.
      for process, count in (first, 2), (second, 1):
        for name in _unix_sockets(process, count):
          strangers += _strangers(name)
      for stranger in strangers:
        with contextlib.suppress(ConnectionResetError):
          while stranger.recv(1 << 12):  # until the listener gives him up
            pass
      while first.poll() is None and 'samples/s' not in ranks.output(0):
        time.sleep(0.1)
      first.send_signal(signal.SIGTERM)
      statuses = [ranks.wait(rank) for rank in range(2)]
      self.assertEqual(statuses, [143, 143], ranks.output(0) + ranks.output(1))

  def test_what_the_store_of_horovodrun_tells_proves_nothing(self):
    with self.job() as ranks:
      first = ranks.start(0)
      text, end = None, time.monotonic() + 60
      while text is None:
        try:
          with urllib.request.urlopen(f'{ranks.rendezvous}/ctr_trainer/heartbeat') as response:
            text = response.read()
        except urllib.error.HTTPError:  # the first rank has not written it yet
          self.assertLess(time.monotonic(), end)
          self.assertIsNone(first.poll())
          time.sleep(0.1)
      record = json.loads(text)
      for secret in (text, b'', *(str(value).encode() for value in record.values())):
        with self.assertRaises(ConnectionError):
          messages.connect(record['address'], secret, LOST_SECONDS)
      self.assertIsNone(first.poll())

  @pytest.mark.long
  def test_who_knows_only_the_ports_that_are_open(self):
    for mode, launcher in (
      ('allreduce', ['launch/local.sh', '2']),
      (
        'ps',
        ['launch/parameter_servers.sh', '1', '2'],
      ),
    ):
      folder = tempfile.mkdtemp(dir=self.get_temp_dir())
      # On a busy machine, two ranks may start many seconds apart.
      config = jobs.write_config(
        folder, sync={'lost_peer_seconds': 30, 'mode': mode}, train={'log_every_steps': 5}
      )
      with self.subTest(mode), open(f'{folder}/log', 'w+', encoding='utf-8') as log:
        job = subprocess.Popen(
          [*launcher, '--config', config, '--run_dir', f'{folder}/run'],
          cwd=jobs.ROOT,
          stdout=log,
          stderr=log,
          env=os.environ | {'CTR_THREADS': '1'},
        )
        self.addCleanup(job.kill)
        trained = _Output(job, log.name)
        trained.wait_for('samples/s', 1)
        family = psutil.Process(job.pid).children(recursive=True)
        ports = _ports(family)
        # TensorFlow's servers listen on all interfaces, and nobody can ask them not to.
        open_ports = [port for host, port in ports if host != '127.0.0.1']
        self.assertLen(open_ports, 0 if mode == 'allreduce' else 3)
        strangers = [s for _, port in ports for s in _strangers(('127.0.0.1', port))]
        for _, port in ports:
          _forge_an_end(port)
        trained.wait_for('samples/s', trained.count('samples/s') + 3)
        for stranger in strangers:
          stranger.close()
        job.send_signal(signal.SIGTERM)
        self.assertEqual(job.wait(timeout=60), 143, trained.text())


class _Output:
  """What a job has written so far."""

  def __init__(self, job, path):
    self._job, self._path = job, path

  def text(self):
    with open(self._path, encoding='utf-8') as f:
      return f.read()

  def count(self, words):
    return self.text().count(words)

  def wait_for(self, words, times):
    while self.count(words) < times:
      if self._job.poll() is not None:
        raise AssertionError(f'it ended: {self.text()}')
      time.sleep(0.1)


def _ports(processes):
  """Returns (host, port) of all that processes listen at, as `ss -ltnp` shows them."""
  found = set()
  for process in processes:
    with contextlib.suppress(psutil.Error):
      connections = process.net_connections('tcp')
      found |= {tuple(c.laddr) for c in connections if c.status == psutil.CONN_LISTEN}
  return sorted(found)


def _forge_an_end(port):
  """Says at a port that the job ends: with what an HTTP store there tells, and with guesses."""
  keys = [b'', b'ctr_trainer']
  with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
    url = f'http://127.0.0.1:{port}/ctr_trainer/heartbeat'
    with urllib.request.urlopen(url, timeout=2) as response:
      record = json.loads(response.read())
    keys += [str(value).encode() for value in record.values()]
    false = json.dumps(record | {'address': ['127.0.0.1', 9]}).encode()
    urllib.request.urlopen(urllib.request.Request(url, false, method='PUT'), timeout=2)
    for key in keys:
      with contextlib.suppress(ConnectionError):
        messages.connect(record['address'], key, 2).send_bytes(messages.encode(['end', 'x', 0]))
  for key in keys:
    with contextlib.suppress(ConnectionError):
      messages.connect(['127.0.0.1', port], key, 2).send_bytes(messages.encode(['end', 'x', 0]))


def _unix_sockets(process, count):
  """Returns the names of the Unix sockets that a process listens at, once there are so many."""
  while process.poll() is None:
    found = psutil.Process(process.pid).net_connections('unix')
    names = {c.laddr for c in found if c.laddr.startswith('@')}
    if len(names) >= count:
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
