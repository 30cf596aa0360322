"""The launch scripts, with stand-ins for what they start."""

import http.client
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

import pytest
import tensorflow as tf

from tests.support import jobs

ROOT = jobs.ROOT
LAUNCH = ROOT / 'launch'

# Says what it was started as, and with what; the script under test puts it in place of the real
# command.
STAND_IN = '#!/bin/sh\necho "$(basename "$0") $*" "threads=$CTR_THREADS"\n'

# In place of python: runs a stand-in of horovodrun; all else is python's.
PYTHON = f"""#!/bin/sh
case $1 in */launch/horovodrun.py) shift; exec horovodrun "$@";; esac
exec {sys.executable} "$@"
"""

# In place of python: leaves its TF_CONFIG and pid in $RECORD, then ends with $FAILING's status or
# waits to be ended.
PROCESS = f"""#!{sys.executable}
import json, os, signal, sys, time
if sys.argv[1:3] != ['-m', 'trainer.run']:
  os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
task = json.loads(os.environ['TF_CONFIG'])['task']
name = f"{{task['type']}}{{task['index']}}"
if name in os.environ.get('STUBBORN', ''):
  signal.signal(signal.SIGTERM, signal.SIG_IGN)
path = os.path.join(os.environ['RECORD'], name)
with open(path + '.writing', 'w') as f:
  tf_config = json.loads(os.environ['TF_CONFIG'])
  record = {{'tf_config': tf_config, 'argv': sys.argv, 'pid': os.getpid(), 'cwd': os.getcwd()}}
  json.dump(record, f)
os.rename(path + '.writing', path)
sys.stdout.write(f'line of {{name}}\\n')
sys.stdout.flush()
failing, _, status = os.environ.get('FAILING', '').partition('=')
everyone = json.loads(os.environ['EVERYONE'])
while not all(os.path.exists(os.path.join(os.environ['RECORD'], n)) for n in everyone):
  time.sleep(0.02)  # all are there before any ends: polled, for the processes share nothing else
if name == failing:
  sys.exit(int(status))
if name in os.environ.get('OUTLIVING', ''):
  with open(os.path.join(os.environ['RECORD'], failing)) as f:
    pid = json.load(f)['pid']
  while os.path.exists(f'/proc/{{pid}}'):
    time.sleep(0.02)  # until the script has its status
  sys.stdout.write(f'{{name}} goes on\\n')
if name in os.environ.get('WAITING', ''):
  signal.pause()
"""


def _alive(pid):
  try:
    with open(f'/proc/{pid}/stat') as f:
      return f.read().rpartition(')')[2].split()[0] != 'Z'
  except FileNotFoundError:
    return False


class LaunchTestCase(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(tempfile.mkdtemp(dir=self.get_temp_dir()))
    self.bin = self.folder / 'bin'
    self.bin.mkdir()

  def stand_in(self, name, text=STAND_IN):
    if name == 'horovodrun':
      self.stand_in('python', PYTHON)
    path = self.bin / name
    path.write_text(text)
    path.chmod(0o755)

  def launch(self, script, *args, **env):
    drop = ('CTR_THREADS', 'OMP_NUM_THREADS')
    env = {
      **{k: v for k, v in os.environ.items() if k not in drop},
      'PATH': f'{self.bin}:{os.environ["PATH"]}',
      **env,
    }
    return subprocess.run(
      [LAUNCH / script, *args], capture_output=True, text=True, timeout=60, env=env, cwd=self.folder
    )

  def assert_mistake(self, done, pattern):
    self.assertEqual(done.returncode, 2, done.stderr)
    self.assertRegex(done.stderr, pattern)
    self.assertLen(done.stderr.splitlines(), 1)


class LocalTest(LaunchTestCase):
  def test_ranks_share_the_cores(self):
    self.stand_in('horovodrun')
    self.stand_in('nproc', '#!/bin/sh\necho 8\n')
    done = self.launch('local.sh', '3', '--config', 'a b.yaml')
    self.assertRegex(
      done.stdout,
      '^horovodrun --loopback --gloo -np 3 -H localhost:3 sh .*/launch/rank.sh /tmp/ctr-.* '
      'python -m trainer.run --config a b.yaml threads=2\n$',
    )
    self.assertEqual(
      done.stderr,
      "+ horovodrun --gloo -np 3 -H localhost:3 python -m trainer.run --config 'a b.yaml'\n",
    )
    self.assertIn('threads=5', self.launch('local.sh', '3', CTR_THREADS='5').stdout)
    self.assertIn('threads=1', self.launch('local.sh', '9').stdout)

  def test_other_commands(self):
    self.stand_in('horovodrun')
    done = self.launch('local.sh', '2', 'predict', '--run_dir', 'd')
    self.assertIn('python -m trainer.cli.predict --run_dir d', done.stdout)
    self.assert_mistake(
      self.launch('local.sh', '2', 'serve'), "found 'serve'; wanted an option, or run, evaluate"
    )

  def test_status_is_horovodruns(self):
    self.stand_in('horovodrun', '#!/bin/sh\necho Traceback of its own >&2\nexit 7\n')
    done = self.launch('local.sh', '2')
    self.assertEqual(done.returncode, 7)
    self.assertIn('Traceback of its own', done.stderr)

  def test_rank_0_speaks_without_a_prefix(self):
    said = r'[0]<stdout>:one\r[0]<stdout>:two\n[1]<stdout>:three [0]<stdout>:\n'
    self.stand_in('horovodrun', f"#!/bin/sh\nprintf '{said}'\nprintf '[0]<stderr>:four\n' >&2\n")
    done = self.launch('local.sh', '2')
    self.assertEqual(done.stdout, 'one\ntwo\n[1]<stdout>:three [0]<stdout>:\n')  # \r read as \n
    self.assertEqual(done.stderr.splitlines()[1:], ['four'])

  def test_help_is_the_head_of_the_script(self):
    for script in ('local.sh', 'cluster.sh', 'parameter_servers.sh', 'online_demo.sh'):
      done = self.launch(script, '--help')
      self.assertEqual(done.returncode, 0)
      self.assertStartsWith(done.stdout, f'launch/{script} ')

  def test_mistakes_end_in_one_line(self):
    self.assert_mistake(self.launch('local.sh'), '^local.sh: wanted RANKS')
    for found in ('0', 'two', '-1', '1.5', '1025', '9' * 20):
      self.assert_mistake(
        self.launch('local.sh', found), f"RANKS: found '{found}'; wanted a whole number from 1 to 1"
      )


class JobTest(LaunchTestCase):
  """Jobs of 2 ranks, not stand-ins."""

  def test_a_stopped_job_saves_and_ends_with_the_signal(self):
    config = jobs.write_config(self.folder)
    run_dir = str(self.folder / 'run')
    command = [LAUNCH / 'local.sh', '2', '--config', config, '--run_dir', run_dir]
    for number in signal.SIGTERM, signal.SIGINT:
      job = subprocess.Popen(
        command,
        env=os.environ | {'AWS_SECRET_ACCESS_KEY': 'for-ranks-alone'},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
      )
      output, ranks, answers = '', {}, []
      for line in job.stdout:
        output += line
        if 'samples/s' in line and not ranks:  # both ranks train
          ranks = jobs.ranks_below(job.pid)
          given = [rank.environ()['AWS_SECRET_ACCESS_KEY'] for rank in ranks.values()]
          seen = jobs.seen_by_others()
          port = re.search(r'HOROVOD_GLOO_RENDEZVOUS_PORT=(\d+) .*run_dir ' + run_dir, seen)[1]
          for method in 'PUT', 'GET', 'DELETE', 'HEAD':
            store = http.client.HTTPConnection('127.0.0.1', int(port))
            store.request(method, '/global/0')
            answers.append(store.getresponse().status)
          job.send_signal(number)
      self.assertEqual(job.wait(60), 128 + number, output)
      self.assertRegex(output, 'stopped at step .*; the state is saved')
      self.assertNotIn('Traceback', output)
      self.assertNotIn('Process 0 exit', output)
      self.assertLen(ranks, 2)
      self.assertEmpty([rank for rank in ranks.values() if rank.is_running()])
      self.assertEqual(given, ['for-ranks-alone'] * 2)
      self.assertNotIn('for-ranks-alone', seen)
      self.assertEqual(answers, [403] * 4, 'the store answers strangers')
    self.assertIn('continuing after step', output)

  @pytest.mark.long
  def test_a_mistake_is_one_line(self):
    """One that every rank sees before it knows the others, and one that is found together."""
    for data, pattern in (
      ({'train': ['nowhere.csv']}, "no file that matches 'nowhere.csv'"),
      ({'label': 'clicked'}, "'clicked'"),
    ):
      config = jobs.write_config(self.folder, data=data)
      run_dir = str(self.folder / 'run')
      done = self.launch('local.sh', '2', '--config', config, '--run_dir', run_dir)
      self.assertEqual(done.returncode, 2, done.stderr)
      said = [line for line in done.stderr.splitlines() if not line.startswith('+ ')]
      self.assertLen(said, 1, done.stderr)
      self.assertRegex(said[0], rf'^error: .*{pattern}')
      self.assertEmpty(done.stdout)


# In place of ssh: runs the command here.
SSH = """#!/bin/sh
for last; do host=$command; command=$last; done
exec sh -c "$command"
"""

# In place of horovodrun: each start is a line of the file `starts`. The ranks of line n end with
# the n-th of $STATUSES; with `wait` they wait to be asked to stop.
STARTS = """#!/bin/sh
echo "$*" >>starts
status=$(echo "$STATUSES" | cut -d' ' -f"$(wc -l <starts)")
if [ "$status" = wait ]; then
  while [ "$1" != sh ]; do shift; done
  HOROVOD_RANK=0 sh "$2" "$3" sh -c "echo trains; exec sleep 60" || status=$?
fi
echo 'Traceback of horovodrun: exited with non-zero status' >&2
printf 'Process name: 1\\nExit code: %s\\n' "$status" >&2
exit 1
"""


class RestartsTest(LaunchTestCase):
  def setUp(self):
    super().setUp()
    self.stand_in('horovodrun', STARTS)
    # A host that the file `gone` names does not answer.
    self.stand_in('ssh', SSH.replace('exec', 'grep -sqwF -e "$host" gone && exit 255\nexec'))
    (self.folder / 'hosts').write_text('alpha slots=2\nbeta slots=2\ngamma slots=4\n')

  def run_job(self, statuses, *options, pause='0'):
    done = self.launch(
      'cluster.sh',
      *options,
      '-i',
      'eth0',
      'hosts',
      '--config',
      'c.yaml',
      STATUSES=statuses,
      CTR_EXPORT='STATUSES',
      CTR_RESTART_SECONDS=pause,
    )
    starts = (self.folder / 'starts').read_text().splitlines()
    told = re.findall(r'^[-\d]+ [:\d]+ (restart .*)', done.stderr, re.MULTILINE)
    return done.returncode, [re.search('-np (.*) sh ', line)[1] for line in starts], told

  def test_a_lost_rank_begins_the_job_again(self):
    everybody = '8 -H alpha:2,beta:2,gamma:4'
    status, starts, told = self.run_job('137 3 255 0', '--restarts', '3')
    self.assertEqual(status, 0)
    self.assertEqual(starts, [everybody] * 4)
    self.assertEqual(told[0], 'restart 1 of 3: 8 ranks on alpha, beta, gamma')
    self.assertLen(told, 3)

  def test_no_more_often_than_allowed(self):
    status, starts, _ = self.run_job('137 137 3 0', '--restarts', '2')
    self.assertEqual(status, 3)
    self.assertLen(starts, 3)

  def test_what_a_restart_does_not_mend(self):
    for wrong in '0', '1', '2':
      (self.folder / 'starts').unlink(missing_ok=True)
      status, starts, told = self.run_job(wrong, '--restarts', '3')
      self.assertEqual((status, told), (int(wrong), []))
      self.assertLen(starts, 1)

  def test_on_the_hosts_that_answer(self):
    # beta is gone when rank 1 is lost, and back at the next restart.
    self.stand_in(
      'horovodrun',
      STARTS.replace('if [', '[ $(wc -l <starts) = 1 ] && echo beta >gone || : >gone\nif ['),
    )
    status, starts, told = self.run_job('3 3 0', '--restarts', '3', '--min_ranks', '6')
    self.assertEqual(status, 0)
    self.assertEqual(
      starts, ['8 -H alpha:2,beta:2,gamma:4', '6 -H alpha:2,gamma:4', '8 -H alpha:2,beta:2,gamma:4']
    )
    self.assertEqual(told[0], 'restart 1 of 3: 6 ranks on alpha, gamma; no answer from beta')

  def test_too_few_ranks(self):
    self.stand_in('horovodrun', STARTS.replace('if [', 'echo beta >gone\nif ['))
    status, starts, told = self.run_job('3 0', '--restarts', '2')  # all ranks are wanted
    self.assertEqual(status, 3)
    self.assertLen(starts, 1)
    self.assertEqual(
      told[1],
      'restart 2 of 2: 6 ranks on alpha, gamma; no answer from beta; wanted at least 8 ranks',
    )

  def training_job(self, *flags):
    """A job that trains until it is stopped."""
    job = subprocess.Popen(
      [LAUNCH / 'cluster.sh', *flags, '-i', 'eth0', 'hosts'],
      stdout=subprocess.PIPE,
      env=os.environ
      | {
        'PATH': f'{self.bin}:{os.environ["PATH"]}',
        'STATUSES': 'wait 0',
        'CTR_EXPORT': 'STATUSES',
      },
      cwd=self.folder,
    )
    self.assertEqual(job.stdout.readline(), b'trains\n')
    return job

  def test_asked_to_stop(self):
    # Somebody else stopped a rank: its host is taken away.
    status, starts, _ = self.run_job('143 0', '--restarts', '1')
    self.assertEqual(status, 0)
    self.assertLen(starts, 2)
    # The launcher is asked to.
    (self.folder / 'starts').unlink()
    job = self.training_job('--restarts', '3')
    job.send_signal(signal.SIGTERM)
    self.assertEqual(job.wait(60), 143)
    self.assertLen((self.folder / 'starts').read_text().splitlines(), 1)

  def test_a_killed_launcher_leaves_no_files(self):
    job = self.training_job()
    directory = re.search('/tmp/ctr-[0-9a-f]+', (self.folder / 'starts').read_text())[0]
    self.assertEqual(os.stat(directory).st_mode & 0o777, 0o700)
    job.kill()
    while os.path.exists(directory):  # its shell sees the end of a pipe
      time.sleep(0.02)

  def test_mistakes_end_in_one_line(self):
    self.assert_mistake(
      self.launch('cluster.sh', '--restarts', '-1', 'hosts'), "--restarts: found '-1'"
    )
    self.assert_mistake(self.launch('local.sh', '--restarts', 'x', '2'), "--restarts: found 'x'")
    self.assert_mistake(
      self.launch('cluster.sh', '--min_ranks', '9', 'hosts'), 'found 9; wanted at most the 8'
    )
    for found in 'soon', 'nan', '-1', 'inf':
      done = self.launch('local.sh', '--restarts', '1', '2', CTR_RESTART_SECONDS=found)
      self.assertEqual(done.returncode, 2)
      told = f"CTR_RESTART_SECONDS: found '{found}'; wanted a number of seconds >= 0"
      self.assertEqual(done.stderr.splitlines()[1:], [told])


class ClusterTest(LaunchTestCase):
  def setUp(self):
    super().setUp()
    self.stand_in('horovodrun')
    gone = 'case $host in gone) echo "connect to host gone: No route to host" >&2; exit 255;; esac'
    self.stand_in(
      'ssh', SSH.replace('exec', f'printf "%s\\n" "$*" >>{self.folder}/called\n{gone}\nexec')
    )

  def hosts(self, text):
    (self.folder / 'hosts').write_text(text)
    return 'hosts'  # relative to where the script was called

  def test_hosts_file(self):
    hosts = self.hosts('# ours\r\nalpha slots=2\r\n\r\nbeta  # one rank\r\ngamma.local slots=12')
    done = self.launch('cluster.sh', '-i', 'ib0', hosts, '--config', 'c.yaml')
    self.assertIn(
      'horovodrun --network-interfaces ib0 --gloo -np 15 -H alpha:2,beta:1,gamma.local:12 sh ',
      done.stdout,
    )
    self.assertTrue(done.stderr.startswith('+ horovodrun --gloo -np 15 '), done.stderr)
    self.assertIn('StrictHostKeyChecking=no', (self.folder / 'called').read_text())

  def test_host_keys_are_checked_where_it_is_asked_for(self):
    self.launch('cluster.sh', '-i', 'ib0', self.hosts('alpha'), CTR_STRICT_HOST_KEYS='yes')
    called = (self.folder / 'called').read_text().splitlines()
    self.assertEqual([line for line in called if 'StrictHostKeyChecking=yes' not in line], [])
    self.assertLen(called, 2)
    done = self.launch('cluster.sh', self.hosts('alpha'), CTR_STRICT_HOST_KEYS='maybe')
    self.assert_mistake(done, "CTR_STRICT_HOST_KEYS: found 'maybe'; wanted yes, no or accept-new")

  def test_rank_0_is_stopped_on_its_host(self):
    rank_0 = 'HOROVOD_RANK=0 sh "$2" "$3" sh -c "echo trains; exec sleep 60"'
    self.stand_in('horovodrun', f'#!/bin/sh\nwhile [ "$1" != sh ]; do shift; done\n{rank_0}\n')
    job = subprocess.Popen(
      [LAUNCH / 'cluster.sh', '-i', 'eth0', self.hosts('alpha slots=2')],
      stdout=subprocess.PIPE,
      env=os.environ | {'PATH': f'{self.bin}:{os.environ["PATH"]}'},
      cwd=self.folder,
    )
    self.assertEqual(job.stdout.readline(), b'trains\n')
    job.send_signal(signal.SIGTERM)
    self.assertEqual(job.wait(60), 143)

  def test_mistakes_end_in_one_line(self):
    self.assert_mistake(self.launch('cluster.sh'), 'wanted .* HOSTSFILE')
    self.assert_mistake(
      self.launch('cluster.sh', 'nowhere'), "nowhere: no such file; wanted lines 'host slots=n'"
    )
    self.assert_mistake(self.launch('cluster.sh', '-x', 'hosts'), 'unknown option -x')
    for text, pattern in (
      ('# none\n', 'found no host'),
      ('a slots=1\nb slot=2\n', "hosts:2: found 'b slot=2'; wanted 'host slots=n'"),
      ('a slots=0\n', 'hosts:1: '),
      ('a slots=1 b\n', "found 'a slots=1 b'"),
      ('a slots=99999999999\n', "found 'a slots=99999999999'; wanted .* n from 1 to 1024"),
      ('a;b slots=1\n', "found 'a;b slots=1'"),
      ('a\nb\na slots=2\n', "hosts:3: found the host 'a' again"),
      ('alpha\ngone\n', "host 'gone' of .*ssh without a password failed: .*No route to host"),
    ):
      self.assert_mistake(self.launch('cluster.sh', self.hosts(text)), pattern)


class SlurmTest(LaunchTestCase):
  def test_nodes_become_hosts(self):
    self.stand_in('horovodrun')
    self.stand_in('ssh', SSH)
    self.stand_in('scontrol', '#!/bin/sh\necho node7; echo node8\n')
    done = self.launch(
      'slurm.sh',
      '--config',
      'c.yaml',
      SLURM_SUBMIT_DIR=str(ROOT),
      SLURM_JOB_ID='42',
      SLURM_JOB_NODELIST='node[7-8]',
      SLURM_NTASKS_PER_NODE='4',
      SLURM_CPUS_PER_TASK='6',
      CTR_NIC='eth1',
      CTR_RESTARTS='0',
    )
    self.assertEqual(done.returncode, 0, done.stderr)
    self.assertIn(
      'horovodrun --network-interfaces eth1 --gloo -np 8 -H node7:4,node8:4 sh ', done.stdout
    )
    self.assertIn('python -m trainer.run --config c.yaml threads=6', done.stdout)


class ParameterServersTest(LaunchTestCase):
  def start(self, servers, workers, *args, **env):
    self.stand_in('horovodrun')  # else the environment's own python comes first on the path
    self.stand_in('python', PROCESS)
    names = [f'ps{i}' for i in range(servers)] + [f'worker{i}' for i in range(workers)]
    done = self.launch(
      'parameter_servers.sh',
      str(servers),
      str(workers),
      *args,
      RECORD=str(self.folder),
      EVERYONE=json.dumps(names),
      **env,
    )
    records = {n: json.loads((self.folder / n).read_text()) for n in names}
    for name, record in records.items():
      self.assertFalse(_alive(record['pid']), f'{name} was left behind')
      self.assertEqual(record['cwd'], os.path.realpath(self.folder), "not in the caller's folder")
    return done, records

  def test_tf_config(self):
    done, records = self.start(2, 3, '--config', 'c.yaml')
    self.assertEqual(done.returncode, 0, done.stderr)
    cluster = records['ps0']['tf_config']['cluster']
    self.assertEqual({k: len(v) for k, v in cluster.items()}, {'ps': 2, 'worker': 3})
    addresses = cluster['ps'] + cluster['worker']
    self.assertLen(set(addresses), 5)
    for address in addresses:
      self.assertRegex(address, r'^127\.0\.0\.1:\d+$')
    for name, record in records.items():
      kind, index = re.fullmatch(r'(\D+)(\d)', name).groups()
      self.assertEqual(
        record['tf_config'], {'cluster': cluster, 'task': {'type': kind, 'index': int(index)}}
      )
      self.assertEqual(
        record['argv'][1:], ['-m', 'trainer.run', '--config', 'c.yaml', '--set', 'sync.mode=ps']
      )
    self.assertLen(re.findall("^\\+ env 'TF_CONFIG={", done.stderr, re.MULTILINE), 5)
    self.assertIn('line of worker0\n', done.stdout)
    self.assertIn('[worker 1] line of worker1\n', done.stdout)
    self.assertIn('[ps 0] line of ps0\n', done.stdout)

  def test_a_mode_that_is_given_stays(self):
    for args in (('--set', 'sync.mode=ps_async'), ('--set=sync.mode=ps_async',)):
      _, records = self.start(1, 1, *args)
      self.assertEqual(records['worker0']['argv'][3:], list(args))

  def test_first_failure_ends_the_rest(self):
    done, _ = self.start(1, 2, FAILING='worker1=3', WAITING='ps0 worker0')
    self.assertEqual(done.returncode, 3)
    self.assertIn('worker 1 ended with status 3; ending the rest', done.stderr)

  def test_a_killed_worker_does_not_end_the_others(self):
    done, _ = self.start(1, 2, FAILING='worker1=137', OUTLIVING='ps0 worker0')
    self.assertEqual(done.returncode, 137)
    self.assertIn(
      'worker 1 ended by a signal, with status 137; waiting for the others', done.stderr
    )
    self.assertNotIn('ending', done.stderr)
    self.assertIn('worker0 goes on\n', done.stdout)
    self.assertIn('[ps 0] ps0 goes on\n', done.stdout)

  def test_a_killed_server_ends_the_rest(self):
    done, _ = self.start(1, 2, FAILING='ps0=137', WAITING='worker0 worker1')
    self.assertEqual(done.returncode, 137)
    self.assertIn('ps 0 ended with status 137; ending the rest', done.stderr)

  @pytest.mark.long
  def test_one_that_ignores_sigterm_is_killed(self):
    done, _ = self.start(1, 2, FAILING='ps0=2', WAITING='worker0 worker1', STUBBORN='worker1')
    self.assertEqual(done.returncode, 2)

  def test_a_server_that_does_not_end(self):
    done, _ = self.start(1, 1, WAITING='ps0', CTR_GRACE_SECONDS='1')
    self.assertEqual(done.returncode, 1)
    self.assertIn('still running 1 s after the last worker ended: ps 0', done.stderr)

  def test_mistakes_end_in_one_line(self):
    self.assert_mistake(self.launch('parameter_servers.sh', '1'), 'wanted SERVERS WORKERS')
    self.assert_mistake(self.launch('parameter_servers.sh', '0', '1'), "SERVERS: found '0'")
    self.assert_mistake(self.launch('parameter_servers.sh', '1', 'x'), "WORKERS: found 'x'")


if __name__ == '__main__':
  tf.test.main()
