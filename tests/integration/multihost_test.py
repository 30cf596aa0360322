"""Hosts for real, on one machine: network namespaces joined by a bridge, a hostname and an sshd in
each.

All name the interface eth0 and know each other from a hosts file of their own, as machines of a
cluster do. Skipped, with the
reason, where the machine allows no namespaces or has no sshd. All that is made is undone.
"""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

import numpy as np
import psutil
import pytest
import tensorflow as tf
import yaml

from tests.support import jobs, small
from tests.support.states import state_of
from trainer.storage import checkpoint

ROOT = pathlib.Path(__file__).resolve().parents[2]
SSHD = '/usr/sbin/sshd'  # sshd wants to be called by its full path
HOSTS = {'hosta': '10.77.31.1', 'hostb': '10.77.31.2', 'hostc': '10.77.31.3'}
PODS = {'worker-0': 'hosta', 'worker-1': 'hostb', 'launcher': 'hostc'}  # on which host each is

ALLREDUCE = """
import os
import horovod.tensorflow as hvd
import tensorflow as tf
hvd.init()
total = hvd.allreduce(tf.constant([1.0 + hvd.rank(), 10.0]), op=hvd.Sum)
lines, sizes = hvd.alltoall(tf.range(3, dtype=tf.int64), splits=[hvd.rank(), 3 - hvd.rank()])
place = hvd.rank(), hvd.size(), hvd.local_size(), os.uname().nodename
print('result', *place, total.numpy().tolist(), sizes.numpy().tolist(), flush=True)
"""


def _run(*args, **kwargs):
  return subprocess.run(
    [str(a) for a in args], check=True, capture_output=True, text=True, timeout=180, **kwargs
  )


@pytest.mark.long
class MultiHostTest(tf.test.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    if os.geteuid() != 0:
      raise unittest.SkipTest('two hosts need root, to make network namespaces')
    for tool in ('ip', 'unshare', 'ssh', 'ssh-keygen', SSHD):
      if not shutil.which(tool):
        raise unittest.SkipTest(f'two hosts need {tool}, which this machine has not')
    cls.folder = pathlib.Path(tempfile.mkdtemp(prefix='hosts-'))
    cls.addClassCleanup(shutil.rmtree, cls.folder, ignore_errors=True)
    cls.spaces = {}
    for host in HOSTS:
      space = f'ctr{os.getpid()}{host}'
      try:
        _run('ip', 'netns', 'add', space)
      except subprocess.CalledProcessError as e:
        raise unittest.SkipTest(
          f'this machine allows no network namespaces: {e.stderr.strip()}'
        ) from None
      cls.addClassCleanup(subprocess.run, ['ip', 'netns', 'del', space], check=False)
      cls.spaces[host] = space
    try:
      _run('unshare', '-u', 'true')
    except subprocess.CalledProcessError as e:
      raise unittest.SkipTest(
        f'this machine allows no hostname of its own: {e.stderr.strip()}'
      ) from None
    cls._network()
    cls._ssh()

  @classmethod
  def _network(cls):
    *others, last = cls.spaces.values()
    _run('ip', '-n', last, 'link', 'add', 'eth0', 'type', 'bridge')
    for space in others:
      _run(*f'ip -n {last} link add {space[-5:]} type veth peer name eth0 netns {space}'.split())
      _run(*f'ip -n {last} link set {space[-5:]} master eth0 up'.split())
    for host, space in cls.spaces.items():
      _run('ip', '-n', space, 'addr', 'add', f'{HOSTS[host]}/24', 'dev', 'eth0')
      _run('ip', '-n', space, 'link', 'set', 'eth0', 'up')
      _run('ip', '-n', space, 'link', 'set', 'lo', 'up')

  @classmethod
  def _ssh(cls):
    """Keys, configs and an sshd in each host.

    `ip netns exec` lays /etc/netns/NAME over /etc, seen by nobody else.
    """
    _run('ssh-keygen', '-q', '-t', 'ed25519', '-N', '', '-f', cls.folder / 'key')
    if not os.path.isdir('/run/sshd'):
      os.mkdir('/run/sshd')  # where sshd drops its privileges
      cls.addClassCleanup(os.rmdir, '/run/sshd')
    if not os.path.isdir('/etc/netns'):
      os.mkdir('/etc/netns')
      cls.addClassCleanup(os.rmdir, '/etc/netns')
    for host, space in cls.spaces.items():
      etc = pathlib.Path('/etc/netns') / space
      (etc / 'ssh').mkdir(parents=True)
      cls.addClassCleanup(shutil.rmtree, etc, ignore_errors=True)
      (etc / 'hosts').write_text(
        '127.0.0.1 localhost\n'
        + ''.join(f'{a} {h}\n' for h, a in HOSTS.items())
        + ''.join(f'{HOSTS[host]} {pod}\n' for pod, host in PODS.items())
      )
      (etc / 'ssh' / 'ssh_config').write_text(
        f'Host *\n  IdentityFile {cls.folder}/key\n  IdentitiesOnly yes\n  StrictHostKeyChecking '
        'no\n  UserKnownHostsFile /dev/null\n'
        '  LogLevel ERROR\nHost worker-*\n  Port 2222\n'
      )
      (etc / 'ssh' / 'sshd_config').write_text(
        f'ListenAddress {HOSTS[host]}\nHostKey {cls.folder}/key\nAuthorizedKeysFile '
        f'{cls.folder}/key.pub\nPidFile none\n'
        'StrictModes no\nPermitRootLogin yes\nUsePAM no\nMaxStartups 50\n'
      )
    (cls.folder / 'vmstat').write_text('oom_kill 0\n')
    for host in HOSTS:
      cls.addClassCleanup(
        cls._end,
        cls.on(
          host,
          'sh',
          '-c',
          f'mount --bind {cls.folder}/vmstat /proc/vmstat && exec {SSHD} -D -e',
          stdout=subprocess.DEVNULL,
          stderr=open(cls.folder / f'{host}.log', 'w'),
        ),
      )
    cls.addClassCleanup(cls._end_all)
    cls.await_ssh(*HOSTS)

  @classmethod
  def await_ssh(cls, *hosts):
    deadline = time.monotonic() + 30
    for host in hosts:
      words = 'ssh', '-o', 'BatchMode=yes', '-o', 'ConnectTimeout=5', host, 'true'
      while cls.on('hosta', *words, stderr=subprocess.DEVNULL).wait(60) != 0:
        if time.monotonic() > deadline:
          raise RuntimeError(f'no ssh to {host}: {(cls.folder / f"{host}.log").read_text()}')

  @classmethod
  def on(cls, host, *command, **kwargs):
    """Starts `command` on a host, or a pod's: in its network, with its files in /etc and name."""
    return subprocess.Popen(
      [
        'ip',
        'netns',
        'exec',
        cls.spaces[PODS.get(host, host)],
        'unshare',
        '-u',
        'sh',
        '-c',
        f'hostname {host} && exec "$@"',
        'sh',
        *map(str, command),
      ],
      cwd=ROOT,
      **kwargs,
    )

  @staticmethod
  def _end(process):
    process.terminate()
    process.wait(30)

  @classmethod
  def _end_all(cls):
    """Whatever a failed test left on the hosts."""
    for space in cls.spaces.values():
      for pid in _run('ip', 'netns', 'pids', space).stdout.split():
        try:
          os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
          pass

  def finish(self, process, seconds):
    try:
      output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
      process.terminate()
      output, _ = process.communicate(timeout=60)
      self.fail(f'not done within {seconds} s:\n{output[-4000:]}')
    return output

  def environment(self):
    path = os.path.dirname(sys.executable) + os.pathsep + os.environ['PATH']
    return {
      **os.environ,
      'HOME': str(self.folder),
      'CTR_THREADS': '1',
      'PATH': path,
    }  # HOME: horovodrun keeps a cache there

  def test_allreduce(self):
    script = self.folder / 'allreduce.py'
    script.write_text(ALLREDUCE)
    process = self.on(
      'hosta',
      *'horovodrun --gloo -np 2 -H hosta:1,hostb:1 --network-interfaces eth0 python'.split(),
      script,
      env=self.environment(),
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    output = self.finish(process, 180)
    self.assertEqual(process.returncode, 0, output)
    self.assertIn('result 0 2 1 hosta [3.0, 20.0] [0, 1]', output)
    self.assertIn('result 1 2 1 hostb [3.0, 20.0] [3, 2]', output)

  def test_two_hosts_train_as_one_process(self):
    rng = np.random.default_rng(7)
    users, items = rng.integers(0, 50, 3000), rng.integers(0, 20, 3000)
    labels = (rng.random(3000) < 0.2 + 0.6 * (items % 2)).astype(int)
    rows = '\n'.join(f'{y},{u},{i}' for y, u, i in zip(labels, users, items))
    (self.folder / 'log.csv').write_text(f'label,user,item\n{rows}\n')
    small.write(
      self.folder / 'config.yaml',
      data={'train': [str(self.folder / 'log.csv')]},
      model={'interactions': ['linear', 'fm']},
      train={'batch_size': 256},
    )
    (self.folder / 'hosts').write_text('hosta slots=1\nhostb slots=1\n')
    process = self.on(
      'hosta',
      ROOT / 'launch/cluster.sh',
      self.folder / 'hosts',
      '--config',
      self.folder / 'config.yaml',
      '--run_dir',
      self.folder / 'run',
      env=self.environment(),
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    output = self.finish(process, 240)
    self.assertEqual(process.returncode, 0, output)
    self.assertIn('+ horovodrun --gloo -np 2 -H hosta:1,hostb:1 python -m trainer.run', output)
    events = [
      json.loads(line) for line in (self.folder / 'run' / 'metrics.jsonl').read_text().splitlines()
    ]
    trained = [e for e in events if e['event'] == 'train']
    self.assertEqual(trained[-1]['examples'], 3000, 'samples of both hosts, each once')
    self.assertGreater(trained[-1]['auc'], 0.6)

  def test_strangers_and_a_rank_killed_on_another_host(self):
    folder = self.folder / 'killed'
    folder.mkdir()
    config = jobs.write_config(str(folder))
    (folder / 'hosts').write_text('hosta slots=1\r\nhostb slots=1\r\n')
    process = self.on(
      'hosta',
      *(ROOT / 'launch/cluster.sh', folder / 'hosts', '--config', config),
      *('--run_dir', folder / 'run'),
      env=self.environment()
      | {'MLFLOW_TRACKING_TOKEN': 'for-ranks-alone', 'MINE': 'for-nobody-else'},
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    self.addCleanup(process.kill)
    output, ranks = '', {}
    for line in process.stdout:
      output += line
      if 'samples/s' in line and not ranks:
        for found in psutil.process_iter(['cmdline', 'environ']):
          variables, words = found.info['environ'] or {}, found.info['cmdline'] or []
          if 'CTR_JOB' in variables and config in words:
            ranks.setdefault(variables['HOROVOD_RANK'], (found, variables))
        seen = jobs.seen_by_others()
        port = re.search(rf'HOROVOD_GLOO_RENDEZVOUS_PORT=(\d+) .*run_dir {folder}', seen)[1]
        self.assertEqual(self.put(f'http://hosta:{port}/global/0'), '403')
        (self.folder / 'vmstat').write_text('oom_kill 1\n')
        ranks['1'][0].kill()
    self.assertIn(process.wait(60), (3, 137), output)
    self.assertIn('the kernel of hostb has killed processes for lack of memory', output)
    self.assertNotIn('Traceback', output)
    for _, variables in ranks.values():
      self.assertEqual(variables['MLFLOW_TRACKING_TOKEN'], 'for-ranks-alone')
      self.assertNotIn('MINE', variables)
      self.assertFalse(os.path.exists(variables['CTR_SECRET_FILE']))
    self.assertNotIn('for-ranks-alone', seen)
    self.assertNotIn('for-nobody-else', seen)

  def put(self, url):
    """Sends a PUT from hostb. Returns: the status of the answer."""
    program = (
      'import http.client, sys, urllib.parse\n'
      'url = urllib.parse.urlsplit(sys.argv[1])\n'
      'connection = http.client.HTTPConnection(url.netloc)\n'
      "connection.request('PUT', url.path, b'0')\n"
      'print(connection.getresponse().status)\n'
    )
    stranger = self.on(
      'hostb', sys.executable, '-c', program, url, stdout=subprocess.PIPE, text=True
    )
    return stranger.communicate(timeout=60)[0].strip()

  def test_training_goes_on_without_a_lost_host(self):
    """It ends as one that was started again by hand on the host that is left."""
    folder = self.folder / 'lost'
    folder.mkdir()
    run, by_hand = folder / 'run', folder / 'by_hand'
    config = jobs.write_config(
      str(folder),
      2000,
      train={'epochs': 5, 'batch_size': 64, 'deterministic': True, 'log_every_steps': 5},
      checkpoint={'every_passes': 1},
      sync={'lost_peer_seconds': 5},
    )
    (folder / 'hosts').write_text('hosta slots=1\nhostb slots=1\n')
    link = 'ip', '-n', self.spaces['hostb'], 'link', 'set', 'eth0'
    # Last: an attempt to find hostb that began while it was cut off fails for who joins it, too.
    neighbours = 'ip', '-n', self.spaces['hosta'], 'neigh', 'flush', 'dev', 'eth0'
    self.addCleanup(_run, *neighbours)
    self.addCleanup(_run, *link, 'up')
    process = self.on(
      'hosta',
      *(ROOT / 'launch/cluster.sh', '--restarts', '2', '--min_ranks', '1', '-i', 'eth0'),
      *(folder / 'hosts', '--config', config, '--run_dir', run),
      env=self.environment() | {'CTR_RESTART_SECONDS': '0.1'},
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    self.addCleanup(process.kill)
    output, lost, seconds = '', None, None
    for line in process.stdout:
      output += line
      if lost is None and 'samples/s' in line and checkpoint.candidates(f'{run}/checkpoints'):
        _run(*link, 'down')
        lost = time.monotonic()
      elif 'restart 1 of 2' in line:
        shutil.copytree(run, by_hand)
      elif by_hand.exists() and seconds is None and 'samples/s' in line:
        seconds = time.monotonic() - lost
    self.assertEqual(process.wait(180), 0, output)
    self.assertIn('restart 1 of 2: 1 ranks on hosta; no answer from hostb', output)
    print(f'trains again {seconds:.1f} s after the host was lost')
    alone = [sys.executable, '-m', 'trainer.run', '--config', config, '--run_dir', by_hand]
    _run(*alone, cwd=ROOT, env=self.environment())
    found, wanted = (state_of(str(d), without=['lost']) for d in (run, by_hand))
    for part in 'rows', 'dense', 'progress':
      self.assertEqual(found[part], wanted[part], part)

  def pod(self, name, container, folder, **kwargs):
    """Starts a manifest's container on its host."""
    words = [*container['command'], *container['args']]
    words = [re.sub('/(ctr|home/ctr|etc/mpi)/', f'{folder}/', word) for word in words]
    process = self.on(
      name,
      *('unshare', '-pf', '--kill-child', '--mount-proc', *words),
      env=self.environment() | {'CTR_RESTART_SECONDS': '0.1'},
      **kwargs,
    )
    self.addCleanup(process.kill)
    return process

  def take(self, pod):
    """Sends SIGTERM to the first process of a pod."""
    children = pathlib.Path(f'/proc/{pod.pid}/task/{pod.pid}/children').read_text()
    os.kill(int(children), signal.SIGTERM)

  def test_the_pods_of_an_mpi_job(self):
    """SIGTERM takes a worker, and the job goes on without it; SIGTERM at the launcher ends it."""
    folder = self.folder / 'pods'
    folder.mkdir()
    jobs.write_config(str(folder))
    dockerfile = (ROOT / 'Dockerfile').read_text()
    sshd = re.search("'(Port .*)' >/home/ctr/.sshd_config", dockerfile)[1].replace('\\n', '\n')
    sshd += f'AuthorizedKeysFile {self.folder}/key.pub\n'
    sshd = sshd.replace('/home/ctr/.ssh/id_rsa', f'{self.folder}/key')
    (folder / '.sshd_config').write_text(sshd.replace('/home/ctr', str(folder)))
    job = yaml.safe_load((ROOT / 'launch/kubernetes/mpijob.yaml').read_text())['spec']
    hosts = [f'{pod} slots={job["slotsPerWorker"]}\n' for pod in PODS if pod != 'launcher']
    (folder / 'hostfile').write_text(''.join(hosts))
    launcher, worker = (
      job['mpiReplicaSpecs'][kind]['template']['spec']['containers'][0]
      for kind in ('Launcher', 'Worker')
    )
    taken, left = (self.pod(pod, worker, folder) for pod in ('worker-0', 'worker-1'))
    self.await_ssh('worker-0', 'worker-1')
    process = self.pod(
      'launcher', launcher, folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    steps = [
      ('epoch 1 ', lambda: self.take(taken)),
      ('restart 1 of 9999: 2 ranks on worker-1; no answer from worker-0', lambda: None),
      ('continuing after step', lambda: None),
      ('samples/s', lambda: self.take(process)),
    ]
    output = ''
    for line in process.stdout:
      output += line
      if steps and steps[0][0] in line:
        steps.pop(0)[1]()
    self.assertEqual(process.wait(60), 130, output)
    self.assertEqual(taken.wait(60), 130, output)  # no success, so that a node's Job replaces it
    self.assertIsNone(left.poll())
    lines = (folder / 'runs/demo/metrics.jsonl').read_text().splitlines()
    self.assertEqual([json.loads(line)['event'] for line in lines[-2:]], ['save', 'end'])


if __name__ == '__main__':
  tf.test.main()
