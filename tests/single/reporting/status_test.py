"""The figures of a job and of a publisher while they work, and the alerts that read them."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import tempfile
import threading
import time
import types
import urllib.error
import urllib.request
from unittest import mock

import prometheus_client.parser
import tensorflow as tf
import yaml

from tests.support import small
from tests.support.scorer import served
from trainer.comm.communicator import SingleProcess
from trainer.errors import UserError
from trainer.job.callback import Callback
from trainer.job.job import Job
from trainer.reporting import status
from trainer.reporting.status import FIGURES, Status
from trainer.serving.memory_store import MemoryStore
from trainer.serving.publisher import Publisher
from trainer.serving.service import Service
from trainer.training.step import TrainStep

LAUNCH = pathlib.Path(__file__).resolve().parents[3] / 'launch'
RULES = yaml.safe_load((LAUNCH / 'prometheus' / 'rules.yaml').read_text('utf-8'))
ALERTS = {r['alert']: r['expr'] for group in RULES['groups'] for r in group['rules']}
HOURS = 3600


def samples(text: str) -> dict[str, float]:
  families = prometheus_client.parser.text_string_to_metric_families(text)
  return {s.name: s.value for family in families for s in family.samples if not s.labels}


def page_names(command: str) -> list[str]:
  """The names of all figures of a command on its page."""
  found = FIGURES[command].items()
  return [f'ctr_{command}_{name}{"_total" * figure.is_counter}' for name, figure in found]


class Page:
  """A Status with its page."""

  def __init__(self, command: str, stalled_after_seconds: float = 1800):
    self.status = Status(command, stalled_after_seconds)
    with mock.patch('trainer.command_line.say') as say:
      self.status.serve('127.0.0.1', 0)
    self.url = re.search('http://[^/]+', say.call_args.args[0])[0]

  def ask(self, path: str) -> tuple[int, str]:
    try:
      with urllib.request.urlopen(self.url + path, timeout=30) as answer:
        return answer.status, answer.read().decode()
    except urllib.error.HTTPError as e:
      return e.code, e.read().decode()

  def samples(self) -> dict[str, float]:
    return samples(self.ask('/metrics')[1])


class StatusTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = tempfile.mkdtemp(dir=self.get_temp_dir())
    os.mkdir(f'{self.folder}/passes')
    self.run_dir = f'{self.folder}/run'
    gate = {'metric': 'auc', 'tolerance': 0.1}
    tree = small.tree(
      run_dir=self.run_dir,
      data={'watch': f'{self.folder}/passes', 'label': 'click', 'max_refused_passes': 3},
      train={'batch_size': 50, 'progressive_validation': True},
      export={'base': True, 'delta_every_passes': 1, 'gate': gate},
    )
    self.cfg = small.checked(tree)

  def announce(self, name, size, hours_ago=0, clicks=lambda i: i % 3 == 0):
    rows = [f'{i % 7},{i % 5},{clicks(i):d}\n' for i in range(size)]
    path = pathlib.Path(f'{self.folder}/passes/{name}.csv')
    path.write_text('user,item,click\n' + ''.join(rows), encoding='utf-8')
    pathlib.Path(f'{path}.done').touch()
    announced = time.time() - hours_ago * HOURS
    os.utime(f'{path}.done', (announced, announced))

  def train(self, on_pass_end, page):
    """Trains until `on_pass_end`, which is called with the name of each pass, has asked to stop."""
    one = SingleProcess()

    class Told(Callback):
      def on_pass_end(self, name, logs):
        on_pass_end(name)

    handlers = [(n, signal.getsignal(n)) for n in (signal.SIGTERM, signal.SIGINT)]
    try:
      job = Job(self.cfg, one, TrainStep(self.cfg, one), page.status, callbacks=[Told()])
      self.assertEqual(job.run(), 0)
      job.close()
    finally:
      for number, handler in handlers:
        signal.signal(number, handler)

  def assert_flips(self, alert, quiet, loud):
    """The alert holds for the second value of what it compares, and not for the first."""
    compares, threshold = re.search(r' ([<>]) ([\d.]+)$', ALERTS[alert]).groups()
    signs = [(value - float(threshold)) * (1 if compares == '>' else -1) for value in (quiet, loud)]
    self.assertLessEqual(signs[0], 0)
    self.assertGreater(signs[1], 0)

  def test_the_alerts_on_a_job(self):
    page, seen = Page('trainer'), {}
    self.assertEqual(page.ask('/readyz'), (503, 'it starts\n'))
    self.announce('a', 200, hours_ago=5)
    self.announce('b', 250, hours_ago=3)
    self.announce('c', 0)
    self.announce('d', 300)

    def on_pass_end(name):
      seen[name] = page.samples()
      if name == 'd':
        self.assertEqual(page.ask('/readyz')[0], 200)
        full = types.SimpleNamespace(total=100, free=5)
        with mock.patch.object(shutil, 'disk_usage', lambda path: full):
          seen['full'] = page.samples()
        # The time that the pass would have hung for.
        page.status._progress -= 1000
        seen['hangs'] = page.samples()
        self.assertEqual(page.ask('/healthz')[0], 200)
        page.status._progress -= 1000
        code, text = page.ask('/healthz')
        self.assertEqual(code, 503)
        self.assertRegex(text, '^no progress for 200')
        signal.raise_signal(signal.SIGTERM)

    self.train(on_pass_end, page)
    behind = [seen[name]['ctr_trainer_seconds_behind'] for name in 'abd']
    self.assertAllClose(behind, [5 * HOURS, 3 * HOURS, 0], atol=300)
    self.assertEqual([seen[name]['ctr_trainer_passes_waiting'] for name in 'abd'], [3, 2, 0])
    self.assert_flips('CtrTrainerBehind', behind[2], behind[0])
    refused = [seen[name]['ctr_trainer_passes_refused_total'] for name in 'bd']
    self.assert_flips('CtrTrainerRefuses', 0, refused[1] - refused[0])
    free = seen['full']['ctr_trainer_disk_free_bytes'] / seen['full']['ctr_trainer_disk_bytes']
    self.assert_flips('CtrTrainerDisk', 0.5, free)
    idle = [
      seen[name]['ctr_trainer_seconds_since_progress']
      / seen[name]['ctr_trainer_stalled_after_seconds']
      for name in ('d', 'hangs')
    ]
    self.assert_flips('CtrTrainerHangs', *idle)
    self.assertAllClose(
      [seen[name]['ctr_trainer_seconds_since_arrival'] for name in 'abd'], [0] * 3, atol=300
    )
    messages = {'ctr_trainer_messages_waiting': 0}  # only of a topic
    self.assert_named(seen['d'] | messages, 'ctr_trainer')
    runbook = (LAUNCH.parent / 'docs' / 'runbook.md').read_text('utf-8')
    self.assertSameElements(re.findall(r'^\| `(Ctr\w+)`', runbook, re.MULTILINE), ALERTS)

  def test_the_alerts_on_quality_and_silence(self):
    for size, name in enumerate('abc', 2000):  # the same bytes would be seen before
      self.announce(name, size, 5, clicks=lambda i: i % 7 < 2)
    self.announce('d', 2000, 4, clicks=lambda i: i % 7 > 1)
    page, seen = Page('trainer'), {}

    def on_pass_end(name):
      seen[name] = page.samples()
      if name == 'd':
        signal.raise_signal(signal.SIGTERM)

    self.train(on_pass_end, page)
    quality = [
      [seen[name][f'ctr_trainer_next_{of}'] for of in ('auc', 'logloss', 'calibration')]
      for name in 'cd'
    ]
    with open(f'{self.run_dir}/metrics.jsonl', encoding='utf-8') as f:
      evaluated = [e for e in map(json.loads, f) if e.get('split') == 'next']
    self.assertAllClose(
      quality, [[e[of] for of in ('auc', 'logloss', 'calibration')] for e in evaluated[-2:]]
    )
    (auc, logloss, calibration), (lower, higher, off) = quality
    self.assert_flips('CtrAucFalls', 0, auc - lower)
    self.assert_flips('CtrLoglossRises', 1, higher / logloss)
    self.assert_flips('CtrCalibrationOff', abs(calibration - 1), abs(off - 1))
    withheld = [seen[name]['ctr_trainer_exports_withheld_total'] for name in 'cd']
    self.assert_flips('CtrExportsWithheld', *withheld)
    silent = [seen[name]['ctr_trainer_seconds_since_arrival'] for name in 'cd']
    self.assertAllClose(silent, [4 * HOURS] * 2, atol=300)
    self.assert_flips('CtrStreamSilent', 0, silent[0])

  def assert_named(self, page, prefix):
    """The page has every figure with this prefix that alerts and dashboard name."""
    texts = [*ALERTS.values(), (LAUNCH / 'prometheus' / 'dashboard.json').read_text('utf-8')]
    named = set(re.findall(rf'\b{prefix}_\w+', ' '.join(texts)))
    self.assertNotEmpty(named)
    self.assertContainsSubset(named, page)

  def test_a_request_has_a_time_however_often_a_byte_comes(self):
    with mock.patch.object(status, '_SECONDS_TO_ASK', 0.3):
      page = Page('trainer')
    with socket.create_connection(('127.0.0.1', int(page.url.rpartition(':')[2]))) as slow:
      slow.settimeout(0.1)
      with self.assertRaises(ConnectionError):
        for _ in range(100):
          slow.sendall(b'x')
          with contextlib.suppress(TimeoutError):
            if not slow.recv(1):
              raise ConnectionError

  def test_heartbeats_have_the_figures_of_the_page(self):
    page, beats = Page('trainer'), threading.Semaphore(0)
    note = Status.note

    def noted(one, record):
      note(one, record)
      if record['event'] == 'heartbeat':
        beats.release()

    self.announce('a', 200)
    self.announce('b', 250)
    found = []

    def on_pass_end(name):
      if name == 'a':
        found.append(page.samples())
        while beats.acquire(blocking=False):
          pass
        for _ in range(2):  # the first may have been begun before
          self.assertTrue(beats.acquire(timeout=60))
        with open(f'{self.run_dir}/metrics.jsonl', encoding='utf-8') as f:
          found.append([e for e in map(json.loads, f) if e['event'] == 'heartbeat'][-1])
      else:
        signal.raise_signal(signal.SIGTERM)

    with (
      mock.patch.object(status, 'SECONDS_BETWEEN_HEARTBEATS', 0.01),
      mock.patch.object(Status, 'note', noted),
    ):
      self.train(on_pass_end, page)
    page, beat = found
    changing = {
      'seconds_behind',
      'seconds_since_arrival',
      'seconds_since_progress',
      'disk_free_bytes',
    }
    names = zip(FIGURES['trainer'], page_names('trainer'))
    told = {name: page[there] for name, there in names if there in page}
    self.assertSameElements(beat.keys() - {'event', 'step', 'time'}, told)
    self.assertEqual(
      {n: v for n, v in told.items() if n not in changing},
      {n: beat[n] for n in told.keys() - changing},
    )

  def test_a_lost_rank_counts_after_the_restart(self):
    lost = {'event': 'lost', 'step': 3, 'reason': 'rank 1 was lost'}
    os.mkdir(self.run_dir)
    lines = [json.dumps(lost | {'time': 1}) + '\n'] * 3
    pathlib.Path(f'{self.run_dir}/metrics.jsonl').write_text(''.join(lines), encoding='utf-8')
    page, found = Page('trainer'), []
    self.announce('a', 200)

    def on_pass_end(name):
      found.append(page.samples())
      signal.raise_signal(signal.SIGTERM)

    self.train(on_pass_end, page)
    self.assertEqual(found[0]['ctr_trainer_lost_total'], 3)
    self.assert_flips('CtrTrainerLosesRanks', 0, found[0]['ctr_trainer_lost_total'])

  def test_the_alerts_on_what_is_served(self):
    self.announce('a', 200)
    self.train(lambda name: signal.raise_signal(signal.SIGTERM), Page('trainer'))
    exports, page = f'{self.run_dir}/exports', Page('publisher')
    publisher = Publisher(exports, MemoryStore())
    page.status.set(**publisher.figures())
    publisher.advance()
    quiet = page.samples()
    self.assertEqual(quiet['ctr_publisher_seconds_behind'], 0)
    self.assert_named(page_names('publisher'), 'ctr_publisher')  # the command shows all of them
    written = time.time() - 5 * HOURS
    for export in pathlib.Path(exports).iterdir():
      os.utime(export / 'DONE', (written, written))
    store = MemoryStore()
    late = Publisher(exports, store)
    page.status.set(**late.figures())
    with mock.patch.object(store, 'apply', side_effect=UserError('the store cannot be reached')):
      for _ in range(2):
        with self.assertRaises(UserError):
          late.advance()
    loud = page.samples()['ctr_publisher_seconds_behind']
    self.assertNear(loud, 5 * HOURS, 300)
    self.assert_flips('CtrPublisherBehind', 0, loud)
    ages = []
    for publisher in (publisher, late):
      service = Service(publisher._store, publisher.advance)
      service.refresh()
      with served(service) as client:
        text = [client.ask('GET', '/metrics')[1].decode() for _ in range(2)][-1]  # counts the first
      ages.append(samples(text)['ctr_version_age_seconds'])
      names = set(re.findall(r'^ctr_\w+', text, re.MULTILINE))
    self.assert_flips('CtrScoresStale', *ages)
    self.assert_named(names, 'ctr(?!_trainer|_publisher)')
    serving = (LAUNCH / 'kubernetes' / 'serving' / 'serving.yaml').read_text('utf-8')
    self.assertContainsSubset(re.findall(r'metric: {name: (\w+)}', serving), names)
    publisher.advance()
    self.assertEqual(page.samples()['ctr_publisher_seconds_behind'], 0)

  def test_an_export_that_is_refused(self):
    self.announce('a', 200)
    self.train(lambda name: signal.raise_signal(signal.SIGTERM), Page('trainer'))
    for path in pathlib.Path(f'{self.run_dir}/exports').rglob('*.npz'):
      path.write_bytes(path.read_bytes()[:-1])
    publisher = Publisher(f'{self.run_dir}/exports', MemoryStore())
    self.assertIsNone(publisher.advance())
    self.assertIsNotNone(publisher.refused)
    self.assertIsNotNone(publisher.behind_since)


if __name__ == '__main__':
  tf.test.main()
