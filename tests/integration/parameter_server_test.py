"""Jobs of real processes: servers and workers as a launcher starts them, on loopback."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time

import numpy as np
import psutil
import pytest
import tensorflow as tf

from tests.support import commands, jobs, small
from tests.support.parameter_servers import free_addresses
from tests.support.steps import TFRA
from trainer.storage import checkpoint

FROZEN = str(jobs.ROOT / 'tests' / 'support' / 'frozen_rank.py')
STORE = 'tfra' if TFRA else 'rows'  # beside a process with our own store
LIMIT = 280  # seconds a job may take, however busy the machine
SLOTS = [{'name': 'user'}, {'name': 'item'}, {'name': 'tags', 'separator': '|'}]
CONFIG = small.tree(
  seed=1,
  data={
    'day_pattern': r'day_(\d+)',
    'label': 'click',
    'group': 'user',
    'slots': SLOTS,
    'dense': [{'name': 'price', 'transform': 'log1p_standardise'}],
  },
  lifecycle={
    'admission': 'score',
    'admission_threshold': 0.5,
    'eviction': 'score',
    'decay': 0.9,
    'delete_threshold': 0.15,
    'delete_after_unseen_days': 1,
  },
  sparse={
    'tables': {
      'default': {
        'width': 4,
        'init_scale': 0.05,
        'linear': {'kind': 'ftrl', 'learning_rate': 0.1},
        'factors': {'kind': 'adagrad', 'learning_rate': 0.1},
      }
    }
  },
  model={'interactions': ['linear', 'fm', {'dnn': {'hidden': [8]}}]},
  train={'batch_size': 64, 'log_every_steps': 1000},
  sync={'lost_peer_seconds': 20, 'stalled_peer_seconds': 120},
)


def write_log(path, day, samples):
  """A pass in which clicks follow from user and item."""
  rng = np.random.default_rng([5, day])
  user, item = rng.integers(0, 40, samples), (100 * rng.random(samples) ** 2).astype(int) + 10 * day
  click = rng.random(samples) < 1 / (1 + np.exp(1.2 - np.sin(user) - 1.5 * np.cos(item)))
  with open(path, 'w', encoding='utf-8') as f:
    f.write('user,item,tags,price,click\n')
    for u, i, c in zip(user, item, click):
      tags = '|'.join(f't{t}' for t in rng.integers(0, 12, rng.integers(0, 3)))
      f.write(f'u{u},i{i},{tags},{rng.exponential():.3f},{int(c)}\n')


def read_events(run_dir):
  with open(os.path.join(run_dir, 'metrics.jsonl'), encoding='utf-8') as f:
    return [json.loads(line) for line in f]


def state(run_dir):
  """(rows by key, dense variables, progress) of a run's last checkpoint."""
  path = next(iter(checkpoint.candidates(os.path.join(run_dir, 'checkpoints'))))
  chunks = []

  class Store:
    def import_state(self, found):
      chunks.extend(found)

  dense, progress = checkpoint.restore(path, store=Store())
  rows = {}
  for chunk in chunks:
    factors = iter(chunk['factors_default'])
    for i, key in enumerate(chunk['key']):
      rows[int(key)] = np.concatenate(
        [
          [chunk[c][i] for c in ('show', 'click', 'delta_score', 'unseen_days', 'admitted')],
          chunk['linear'][i],
          next(factors) if chunk['admitted'][i] else [],
        ]
      )
  return rows, dense, progress


class ParameterServerTest(tf.test.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.work = os.path.join(tf.compat.v1.test.get_temp_dir(), 'parameter_server')
    shutil.rmtree(cls.work, ignore_errors=True)
    os.makedirs(cls.work)
    for day, samples in ((0, 2000), (1, 3001)):
      write_log(os.path.join(cls.work, f'day_{day}.csv'), day, samples)
    write_log(os.path.join(cls.work, 'day_9.csv'), 9, 20000)  # a long one
    cls.processes = []

  def tearDown(self):
    for process in self.processes:
      process.kill()
    self.processes.clear()
    super().tearDown()

  def config(self, days, **sections):
    train = {'train': [os.path.join(self.work, f'day_{d}.csv') for d in days]}
    path = os.path.join(self.work, f'{self.id()}_{len(os.listdir(self.work))}.yaml')
    return small.write(path, small.tree(CONFIG, data=train), **sections)

  def start(self, tf_config, config, run_dir, *overrides, program=('-m', 'trainer.run')):
    env = {'CTR_THREADS': '1'} | ({'TF_CONFIG': json.dumps(tf_config)} if tf_config else {})
    log = open(os.path.join(self.work, f'log_{len(self.processes)}'), 'w+', encoding='utf-8')
    process = commands.start(
      *(*program, '--config', config, '--run_dir', run_dir, *overrides),
      env=env,
      stdout=log,
      stderr=subprocess.STDOUT,
    )
    process.log = log
    self.processes.append(process)
    return process

  def cluster(self, servers, workers):
    addresses = free_addresses(servers + workers)
    return {'ps': addresses[:servers], 'worker': addresses[servers:]}

  def start_job(self, cluster, config, run_dir, *overrides, frozen=None):
    """Starts all processes of a job.

    Args:
      cluster: addresses by kind.
      config: its path.
      run_dir: of the job.
      *overrides: further flags.
      frozen: {name: where that process freezes} (see tests/support/frozen_rank.py).
    Returns:
      The processes by name.
    """
    job = {}
    for kind in ('ps', 'worker'):
      for i in range(len(cluster[kind])):
        name, tf_config = f'{kind} {i}', {'cluster': cluster, 'task': {'type': kind, 'index': i}}
        place = (frozen or {}).get(name)
        program = (FROZEN, place) if place else ('-m', 'trainer.run')
        job[name] = self.start(tf_config, config, run_dir, *overrides, program=program)
    return job

  def text(self, process):
    process.log.seek(0)
    return process.log.read()

  def finish(self, job, expected=0):
    deadline = time.monotonic() + LIMIT
    for name, process in job.items():
      try:
        status = process.wait(max(1, deadline - time.monotonic()))
      except subprocess.TimeoutExpired:
        self.fail(f'{name} still runs:\n{self.text(process)}')
      self.assertEqual(status, expected, f'{name}:\n{self.text(process)}')

  def directory(self, name):
    return os.path.join(self.work, name)

  def assert_same(self, a, b):
    rows, dense, progress = state(a)
    expected, expected_dense, expected_progress = state(b)
    self.assertEqual(set(rows), set(expected))
    for key, row in expected.items():
      self.assertAllClose(rows[key], row, rtol=1e-4, atol=1e-5)
    self.assertEqual(dense.keys(), expected_dense.keys())
    for name, value in expected_dense.items():
      if not name.startswith('metrics/'):
        self.assertAllClose(dense[name], value, rtol=1e-4, atol=1e-5)
    for name in ('step', 'examples', 'done', 'last'):
      self.assertEqual(progress[name], expected_progress[name])

  def wait_for(self, condition, job):
    deadline = time.monotonic() + LIMIT
    while not condition():
      for name, process in job.items():
        if process.poll() is not None or time.monotonic() > deadline:
          self.fail(f'{name}:\n{self.text(process)}')
      time.sleep(0.05)  # between looks

  def checkpoints(self, run_dir):
    return checkpoint.candidates(os.path.join(run_dir, 'checkpoints'))

  def test_ps_equals_one_process_and_each_reads_the_others_checkpoints(self):
    """Servers keep rows on TFRA's tables, the one process in our store; batch norm is over all.

    The layers read counts, too.
    """
    one, two, back = self.directory('one'), self.directory('two'), self.directory('back')
    model = {'interactions': ['linear', 'fm', {'dnn': {'hidden': [8], 'batch_norm': 'sync'}}]}
    data = {'slots': [slot | {'counts': slot['name'] != 'user'} for slot in SLOTS]}
    first, both = (self.config(days, model=model, data=data) for days in ([0], [0, 1]))
    tfra = '--set', 'sync.mode=ps', '--set', f'sparse.store={STORE}'
    job = self.start_job(self.cluster(2, 2), first, two, *tfra)
    self.finish({'one process': self.start(None, first, one)})
    self.finish(job)  # every process by itself, the servers too
    self.assert_same(two, one)
    shutil.copytree(one, back)
    job = self.start_job(self.cluster(1, 3), both, back, *tfra)  # from one process to three workers
    self.finish({'one process': self.start(None, both, two)})  # and from two workers to one process
    self.finish({'one process': self.start(None, both, one)})
    self.finish(job)
    self.assert_same(two, one)
    self.assert_same(back, one)
    for a, b in zip(read_events(back), read_events(one), strict=True):
      self.assertEqual(a['event'], b['event'])
      for name in ('step', 'examples', 'features', 'admitted', 'evicted'):
        self.assertEqual(a.get(name), b.get(name))
      for name in ('logloss', 'auc', 'calibration'):
        if name in b:
          self.assertAllClose(a[name], b[name], rtol=1e-4)

  @pytest.mark.long
  def test_a_run_goes_on_with_any_number_of_ranks_or_servers(self):
    """Each day on another number of ranks, one on servers: as one process that trains all days."""
    one, many = self.directory('alone'), self.directory('many')
    evaluation = os.path.join(self.work, 'day_1.csv')
    for day in (2, 3, 4, 5):
      write_log(os.path.join(self.work, f'day_{day}.csv'), day, 1500 + day)
    jobs.run(1, 'trainer.run', '--config', self.config(range(6)), '--run_dir', one)
    for day, number in enumerate((1, 3, 2, 1, None, 3)):
      config = self.config(range(day + 1))
      if number is None:
        self.finish(self.start_job(self.cluster(2, 2), config, many, '--set', 'sync.mode=ps'))
      else:
        jobs.run(number, 'trainer.run', '--config', config, '--run_dir', many)
      # What was saved predicts the same on the next number of ranks.
      if day in (0, 1):
        found = [
          json.loads(
            re.search(
              r'{.*}', jobs.run(n, 'trainer.cli.evaluate', '--run_dir', many, '--data', evaluation)
            ).group()
          )
          for n in (1, 3, 2)
        ]
        for other in found[1:]:
          self.assertAllClose(
            [other[k] for k in ('logloss', 'auc', 'gauc')],
            [found[0][k] for k in ('logloss', 'auc', 'gauc')],
            rtol=1e-6,
          )
    self.assert_same(many, one)
    for a, b in zip(
      *([e for e in read_events(d) if e['event'] in ('train', 'day_end')] for d in (many, one)),
      strict=True,
    ):
      self.assertEqual(
        [a.get(k) for k in ('event', 'step', 'features', 'admitted', 'evicted')],
        [b.get(k) for k in ('event', 'step', 'features', 'admitted', 'evicted')],
      )
      if 'logloss' in b:
        self.assertAllClose([a['logloss'], a['auc']], [b['logloss'], b['auc']], rtol=1e-5)

  def with_a_ruinous_day(self):
    """Writes days 6, 7 and 8, of which training refuses 7; returns sections of their config."""
    for day in (6, 7, 8):
      path = os.path.join(self.work, f'day_{day}.csv')
      write_log(path, day, 500)
      with open(path, encoding='utf-8') as f:
        head, *lines = f
      with open(path, 'w', encoding='utf-8') as f:
        f.writelines([f'cost,{head}', *(f',{line}' for line in lines)])
    with open(os.path.join(self.work, 'day_7.csv'), 'a', encoding='utf-8') as f:
      # Some of each batch are predicted wrongly, and the sum of their factors' gradients overflows.
      f.writelines(f'1.8e19,u1,i1,,,{i % 2}\n' for i in range(200))
    costs = [{'name': f'cost{i}', 'from': {'number': 'cost'}} for i in range(8)]
    return {
      'data': {'slots': [*SLOTS, *costs], 'max_refused_passes': 1},
      'lifecycle': {'admission': 'none', 'eviction': 'none'},
    }

  def assert_refused(self, run_dir, expected, rows_of_clean):
    """Checks which passes were trained, and that the counts of rows are those of a clean run."""
    events = read_events(run_dir)
    told = [(e['event'], e['pass']) for e in events if e['event'] in ('train', 'pass')]
    self.assertEqual(told, expected)
    for e in events:
      if e['event'] == 'pass':
        self.assertEqual(e['fate'], 'refused')
        self.assertRegex(
          e['reason'], r"finite.*slot 'cost\d' holds values up to 1.8e.19.*day_7.csv:502$"
        )
    rows = state(run_dir)[0]
    self.assertEqual(rows.keys(), rows_of_clean.keys())
    for key, row in rows_of_clean.items():
      self.assertAllClose(rows[key][:5], row[:5])  # without the weights

  @pytest.mark.long
  def test_a_pass_that_ruins_the_state_is_refused(self):
    """The state is that of a run without the pass; in asynchronous modes, what has no order is.

    Later epochs are worse than the first, so that training goes back to the best state, too.
    """
    keys, epochs = self.with_a_ruinous_day(), 3
    with open(os.path.join(self.work, 'day_6.csv'), encoding='utf-8') as f:
      turned = [f'{line[:-2]}{1 - int(line[-2])}\n' for line in f.readlines()[1:]]
    valid = os.path.join(self.work, 'turned.csv')
    with open(valid, 'w', encoding='utf-8') as f:
      f.writelines(['cost,user,item,tags,price,click\n', *turned])
    keys['data']['valid'] = [valid]
    keys['train'] = {'epochs': epochs, 'plateau': {'stop_after': 9}}
    clean = self.directory('clean')
    self.finish({'one process': self.start(None, self.config([6, 8], **keys), clean)})
    self.assertIn('goes on from the best state', self.text(self.processes[0]))
    config, rows_of_clean = self.config([6, 7, 8], **keys), state(clean)[0]
    jobs = {
      mode: self.start_job(
        self.cluster(1, 2), config, self.directory(mode), '--set', f'sync.mode={mode}'
      )
      for mode in ('ps', 'ps_async', 'ps_geo')
    }
    for mode, job in jobs.items():
      self.finish(job)
    # Started again, in one process, it has nothing left to train on.
    self.finish({'again': self.start(None, config, self.directory('ps_async'))})
    of_epoch = [('train', 'day_6'), ('pass', 'day_7'), ('train', 'day_8')]
    for mode, job in jobs.items():
      run_dir = self.directory(mode)
      with self.subTest(mode):
        self.assertIn('goes on from the best state', self.text(job['worker 0']))
        self.assert_refused(run_dir, epochs * of_epoch, rows_of_clean)
        progress = state(run_dir)[2]
        self.assertEqual((progress['done'], progress['examples']), (2, epochs * 1000))
    self.assert_same(self.directory('ps'), clean)

  @pytest.mark.long
  def test_a_worker_that_joins_a_ruinous_pass_goes_back_with_the_others(self):
    """Its predecessor froze before it did anything, and the other one before it gives up."""
    keys = self.with_a_ruinous_day() | {
      'sync': {'lost_peer_seconds': 120, 'stalled_peer_seconds': 240}
    }
    clean = self.directory('only_8')
    self.finish({'one process': self.start(None, self.config([8], **keys), clean)})
    config, client = self.config([7, 8], **keys), 'trainer.parameter_server.client'
    frozen = {
      'worker 0': f'{client}:CoordinatorClient.give_up:call',
      'worker 1': f'{client}:CoordinatorClient.claim:call',
    }
    jobs = {}
    for mode in ('ps_async', 'ps_geo'):
      cluster, flags = (
        self.cluster(1, 2),
        (self.directory(f'late_{mode}'), f'--set=sync.mode={mode}'),
      )
      jobs[mode] = cluster, flags, self.start_job(cluster, config, *flags, frozen=frozen)
    for cluster, flags, job in jobs.values():
      for name in frozen:
        process = psutil.Process(job[name].pid)
        self.wait_for(lambda p=process: p.status() == psutil.STATUS_STOPPED, job)
      job['worker 1'].kill()
      job['worker 1'].wait()
      late = {'cluster': cluster, 'task': {'type': 'worker', 'index': 1}}
      job['worker 1'] = self.start(late, config, *flags)
    for mode, (_, (run_dir, _), job) in jobs.items():
      with self.subTest(mode):
        self.wait_for(lambda j=job: 'worker 1 is here again' in self.text(j['ps 0']), job)
        job['worker 0'].send_signal(signal.SIGCONT)
        self.finish(job)
        self.assert_refused(run_dir, [('pass', 'day_7'), ('train', 'day_8')], state(clean)[0])

  def test_async_goes_on_without_a_lost_worker_which_comes_back(self):
    run_dir, epochs = self.directory('async'), 10  # long enough for the lost one to come back
    config = self.config([9], checkpoint={'every_steps': 40}, train={'epochs': epochs})
    cluster = self.cluster(1, 2)
    job = self.start_job(cluster, config, run_dir, '--set', 'sync.mode=ps_async')
    self.wait_for(lambda: len(self.checkpoints(run_dir)) >= 2, job)
    job['worker 1'].kill()
    job['worker 1'].wait()
    job['worker 1'] = self.start(
      {'cluster': cluster, 'task': {'type': 'worker', 'index': 1}},
      config,
      run_dir,
      '--set',
      'sync.mode=ps_async',
    )
    self.finish(job)
    said = self.text(job['worker 0'])
    # Where it was lost while all met, to write a checkpoint, they go on from the one before.
    self.assertRegex(said, r'worker 1 \(process \d+ on .*\) was lost: .*The others go on')
    self.assertGreater(len(self.checkpoints(run_dir)), 2)
    with open(f'{run_dir}/metrics.jsonl', encoding='utf-8') as f:
      trained = [e['samples'] for e in map(json.loads, f) if e['event'] == 'train']
    told = re.findall(r'of ([\d,]+) of 20,000 samples: a lost worker', said)
    self.assertEqual(told, [f'{samples:,}' for samples in trained if samples < 20000])
    _, _, progress = state(run_dir)
    # Every batch was a step; the one under way perhaps twice.
    self.assertBetween(progress['step'], steps := epochs * -(-20000 // 64), steps + 1)

  @pytest.mark.long
  def test_async_goes_on_without_a_worker_that_was_lost_between_passes(self):
    """The other one restarts itself, which takes longer than a silence may last."""
    run_dir, config = self.directory('between'), self.config([0], sync={'lost_peer_seconds': 6})
    place = 'trainer.parameter_server.client:CoordinatorClient.close_pass:return'
    job = self.start_job(
      self.cluster(1, 2), config, run_dir, '--set', 'sync.mode=ps_async', frozen={'worker 1': place}
    )
    frozen = job.pop('worker 1')
    self.finish(job)
    self.assertRegex(
      self.text(job['worker 0']),
      r'worker 1 \(process \d+ on .*\) was lost: it was silent for 6 s\. The others go on from the '
      'last checkpoint',
    )
    self.assertEqual(state(run_dir)[2]['done'], 1)
    frozen.send_signal(signal.SIGCONT)
    self.finish({'frozen': frozen}, 3)

  @pytest.mark.long
  def test_the_lock_of_a_lost_worker_0_goes_to_the_next(self):
    run_dir = self.directory('followed')
    config = self.config([9], checkpoint={'every_steps': 40}, train={'epochs': 1000})
    job = self.start_job(self.cluster(1, 2), config, run_dir, '--set', 'sync.mode=ps_async')
    self.wait_for(lambda: self.checkpoints(run_dir), job)

    def owner():
      with open(os.path.join(run_dir, 'owner.json'), encoding='utf-8') as f:
        found = re.search(r'"process": (\d+)', f.read())
      return found and int(found[1])

    self.assertEqual(owner(), job['worker 0'].pid)
    lost = job.pop('worker 0')
    lost.kill()
    lost.wait()
    self.wait_for(lambda: owner() == job['worker 1'].pid, job)
    second = self.start(None, config, run_dir)
    self.finish({'second': second}, 2)
    self.assertRegex(self.text(second), rf'process {job["worker 1"].pid} on host .* trains into it')
    job['worker 1'].send_signal(signal.SIGTERM)
    self.finish(job, 143)

  def test_a_lost_server_ends_the_job_and_the_next_continues(self):
    run_dir, config = self.directory('lost'), self.config([9], checkpoint={'every_steps': 50})
    job = self.start_job(self.cluster(2, 1), config, run_dir, '--set', 'sync.mode=ps')
    self.wait_for(lambda: self.checkpoints(run_dir), job)
    lost = job.pop('ps 1')
    lost.kill()
    lost.wait()
    self.finish(job, 3)
    for process in job.values():
      self.assertRegex(
        self.text(process),
        r'ps 1 \(process \d+ on .*\) was lost: .*run the same command again to continue from the '
        r'last checkpoint',
      )
    job = self.start_job(
      self.cluster(1, 1),
      config,
      run_dir,
      '--set',
      'sync.mode=ps_geo',
      '--set',
      'sync.geo_steps=5',
      '--set',
      f'sparse.store={STORE}',
    )  # another mode and store take it up
    self.finish(job)
    rows, _, progress = state(run_dir)
    self.assertEqual(progress['done'], 1)
    self.assertGreater(len(rows), 40)

  @pytest.mark.long
  def test_a_stop_of_one_server_saves_the_state_and_ends_all(self):
    run_dir = self.directory('stopped')
    config = self.config([9], checkpoint={'every_steps': 20}, train={'epochs': 1000})
    job = self.start_job(self.cluster(2, 2), config, run_dir, '--set', 'sync.mode=ps')
    self.wait_for(lambda: self.checkpoints(run_dir), job)
    job['ps 1'].send_signal(signal.SIGINT)
    self.finish(job, 130)
    self.assertIn('the state is saved', self.text(job['worker 0']))
    step = state(run_dir)[2]['step']
    self.assertIn(f'stopped at step {step};', self.text(job['worker 0']))

  @pytest.mark.long
  def test_a_process_that_freezes_at_the_start_is_named(self):
    places = {
      'ps 1': 'trainer.parameter_server.client:CoordinatorClient.wait:call',
      'worker 0': 'trainer.parameter_server.worker_step:WorkerStep.__init__:call',
    }
    config = self.config([0], sync={'lost_peer_seconds': 10})
    for name, place in places.items():
      job = self.start_job(
        self.cluster(2, 2),
        config,
        self.directory('frozen'),
        '--set',
        'sync.mode=ps',
        frozen={name: place},
      )
      frozen = job.pop(name)
      self.finish(job, 3)
      frozen.kill()
      for process in job.values():
        lost = rf'{name} \(process \d+ on .*\) was lost: it was silent for 10 s'
        self.assertRegex(self.text(process), lost)

  def test_a_mistake_that_workers_find_is_told_by_all(self):
    path = self.directory('file')
    with open(path, 'w', encoding='utf-8'):
      pass
    job = self.start_job(self.cluster(2, 2), self.config([0]), path, '--set', 'sync.mode=ps')
    self.finish(job, 2)
    for process in job.values():
      lines = [line for line in self.text(process).splitlines() if line.startswith('error: ')]
      self.assertLen(lines, 1)
      self.assertStartsWith(lines[0], f'error: cannot use run_dir {path}')

  def test_mistakes_end_in_one_line(self):
    run_dir, config = self.directory('errors'), self.config([0])
    cluster = self.cluster(1, 2)
    with socket.create_server(('', int(cluster['worker'][1].rpartition(':')[2]))):
      taken = self.start(
        {'cluster': cluster, 'task': {'type': 'worker', 'index': 1}},
        config,
        run_dir,
        '--set',
        'sync.mode=ps',
      )
      unset = self.start(None, config, run_dir, '--set', 'sync.mode=ps')
      self.finish({'port taken': taken, 'TF_CONFIG unset': unset}, 2)
    apart = self.start(
      {'cluster': cluster, 'task': {'type': 'worker', 'index': 0}},
      config,
      run_dir,
      '--set',
      'sync.mode=ps_async',
      '--set',
      'model.interactions=[{dnn: {hidden: [4], batch_norm: sync}}]',
    )
    self.finish({'sync batch norm': apart}, 2)
    self.assertIn(
      "key 'model.interactions.0.batch_norm': found 'sync' with sync.mode 'ps_async', where no two",
      self.text(apart),
    )
    self.assertRegex(
      self.text(taken), r'error: .*TF_CONFIG: the port \d+ of worker 1 is in use on this host'
    )
    self.assertRegex(self.text(unset), 'error: .*TF_CONFIG: is not set; sync.mode=ps needs it')
    cluster = self.cluster(1, 1)
    self.finish(
      {
        kind: self.start(
          {'cluster': cluster, 'task': {'type': kind, 'index': 0}},
          config,
          run_dir,
          '--set',
          'sync.mode=ps',
          '--set',
          f'seed={seed}',
        )
        for seed, kind in enumerate(('ps', 'worker'))
      },
      2,
    )
    for process in self.processes[-2:]:
      self.assertIn(
        'error: seed: found 1 on worker 0 and 0 on ps 0; wanted the same command on every process',
        self.text(process),
      )


if __name__ == '__main__':
  tf.test.main()
