"""What a trainer, its ranks and a publisher tell from outside, on their pages and in JSON lines."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import unittest
import urllib.error
import urllib.parse
import urllib.request

import pytest
import tensorflow as tf
import yaml

from tests.support import commands, jobs, small, topics
from trainer.reporting.status import FIGURES

RULES = jobs.ROOT / 'launch' / 'prometheus' / 'rules.yaml'
CONFIG = small.tree(
  data={'label': 'click', 'max_refused_passes': 3},
  model={'interactions': ['linear', 'fm']},
  train={'batch_size': 50},
)


def ask(url: str) -> tuple[int, str]:
  try:
    with urllib.request.urlopen(url, timeout=30) as answer:
      return answer.status, answer.read().decode()
  except urllib.error.HTTPError as e:
    return e.code, e.read().decode()


def figures(url: str, of: str) -> dict[str, float]:
  """The figures of a page, named as in FIGURES."""
  found = re.findall(rf'^ctr_{of}_(\w+?)(?:_total)? (\S+)$', ask(url)[1], re.MULTILINE)
  return {name: float(value) for name, value in found}


class Lines:
  """The lines of a command with --log_json, each of which must be an object of four keys."""

  def __init__(self, *words: str, port: str = '--metrics_port'):
    self.command = commands.start(
      *('-m', *words, port, '0', '--log_json'),
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
    )
    self.found = []

  def until(self, event: str, text: str = '') -> dict:
    """The fields of the next line of this event that has this text."""
    for line in self.command.stdout:
      record = json.loads(line)
      assert list(record) == ['time', 'level', 'event', 'fields'], line
      self.found.append(record)
      if record['event'] == event and text in record['fields'].get('text', ''):
        return record['fields']
    raise AssertionError(f'no {event} {text}: {self.found[-3:]}')

  def url(self, event: str = 'metrics') -> str:
    return re.search(r'http://[^/]+', self.until(event)['text'])[0]

  def stop(self, number: int = signal.SIGTERM) -> int:
    self.command.send_signal(number)
    self.found += map(json.loads, self.command.stdout)
    return self.command.wait(timeout=120)


class Prometheus:
  """Prometheus with our alerts, which fire at once; `targets` are URLs by job, `rules` exprs."""

  def __init__(self, folder: str, targets: dict[str, str]):
    self._folder = pathlib.Path(folder)
    rules = re.sub(' +for: .*\n', '', RULES.read_text('utf-8'))
    (self._folder / 'rules.yaml').write_text(rules)
    (group,) = yaml.safe_load(rules)['groups']
    self.rules = {rule['alert']: rule['expr'] for rule in group['rules']}
    found = {job: [{'files': [f'{folder}/{job}.json']}] for job in targets}
    config = {
      'global': {'scrape_interval': '1s', 'evaluation_interval': '1s'},
      'rule_files': [f'{folder}/rules.yaml'],
      'scrape_configs': [{'job_name': job, 'file_sd_configs': of} for job, of in found.items()],
    }
    (self._folder / 'prometheus.yaml').write_text(yaml.safe_dump(config))
    self.scrape(**targets)
    with socket.create_server(('127.0.0.1', 0)) as free:
      self._at = f'127.0.0.1:{free.getsockname()[1]}'
    files = f'--config.file={folder}/prometheus.yaml', f'--storage.tsdb.path={folder}/tsdb'
    with open(self._folder / 'log', 'w') as log:
      command = ['prometheus', *files, f'--web.listen-address={self._at}']
      self.process = subprocess.Popen(command, stdout=log, stderr=log)

  def scrape(self, **urls: str | None) -> None:
    """Sets the page of a job; None: it has none."""
    for job, url in urls.items():
      targets = [url.removeprefix('http://')] if url else []
      text = json.dumps([{'targets': targets}])
      (self._folder / f'{job}.new').write_text(text)
      (self._folder / f'{job}.new').rename(self._folder / f'{job}.json')

  def until(self, query: str, wanted: dict[str, float]) -> None:
    """Waits until a query has these values by job."""
    limit, found = time.monotonic() + 60, None
    url = f'http://{self._at}/api/v1/query?query={urllib.parse.quote(query)}'
    while found != wanted:
      assert time.monotonic() < limit, (query, found, (self._folder / 'log').read_text()[-2000:])
      time.sleep(0.2)
      with contextlib.suppress(OSError, ValueError):  # it starts
        result = json.loads(ask(url)[1]).get('data', {}).get('result', [])
        found = {one['metric']['job']: float(one['value'][1]) for one in result}


class StatusTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = tempfile.mkdtemp(dir=self.get_temp_dir())
    os.mkdir(f'{self.folder}/passes')
    self.run_dir = f'{self.folder}/run'
    data = {'watch': f'{self.folder}/passes', 'day_pattern': r'day_(\d+)'}
    export = {'base': True, 'delta_every_passes': 1}
    self.config = small.write(f'{self.folder}/config.yaml', CONFIG, data=data, export=export)

  def announce(self, name, samples=200, hours_ago=0):
    rows = [f'{i % 7},{i % 5},{i % 3 == 0:d}\n' for i in range(samples)]
    path = pathlib.Path(f'{self.folder}/passes/{name}')
    path.write_text('user,item,click\n' + ''.join(rows), encoding='utf-8')
    pathlib.Path(f'{path}.done').touch()
    announced = time.time() - 3600 * hours_ago
    os.utime(f'{path}.done', (announced, announced))

  def test_a_trainer_and_its_publisher(self):
    self.announce('day_0_hour_0.csv')
    trainer = Lines('trainer.run', '--config', self.config, '--run_dir', self.run_dir)
    self.addCleanup(trainer.command.kill)
    url = trainer.url()
    trainer.until('message', 'waiting for a pass')
    self.announce('day_0_hour_1.csv', 0)  # without a sample
    self.assertEqual(trainer.until('pass')['fate'], 'refused')
    self.announce('day_0_hour_2.csv', 250)
    self.assertEqual(trainer.until('train')['pass'], 'day_0_hour_2')
    trainer.until('message', 'waiting for a pass')
    events = [
      json.loads(line)
      for line in pathlib.Path(f'{self.run_dir}/metrics.jsonl').read_text('utf-8').splitlines()
    ]
    trained = [event for event in events if event['event'] == 'train']
    found = figures(f'{url}/metrics', 'trainer')
    self.assertContainsSubset(found, FIGURES['trainer'])
    wanted = {
      'passes_trained': 2,
      'passes_refused': 1,
      'passes_waiting': 0,
      'seconds_behind': 0,
      'examples': 450,
      'examples_per_second': 0,  # it waits
      'steps': 9,
      'features': trained[-1]['features'],
      'table_bytes': trained[-1]['table_bytes'],
      'version': max(int(name[:6]) for name in os.listdir(f'{self.run_dir}/exports')),
      'lost': 0,
      'processes': 1,
    }
    self.assertEqual({name: found[name] for name in wanted}, wanted)
    self.assertLess(found['disk_free_bytes'], found['disk_bytes'])
    for path in ('healthz', 'readyz'):
      self.assertEqual(ask(f'{url}/{path}'), (200, 'ok\n'))
    self.assertEqual(ask(f'{url}/healthz?verbose=1')[0], 200)
    self.assertEqual(ask(f'{url}/else')[0], 404)

    store = f'{self.folder}/store'
    publisher = Lines('trainer.cli.publish', '--run_dir', self.run_dir, '--to', store)
    self.addCleanup(publisher.command.kill)
    url = publisher.url()
    self.assertEqual(publisher.until('published')['version'], wanted['version'])
    found = figures(f'{url}/metrics', 'publisher')
    self.assertSameElements(found, FIGURES['publisher'])
    self.assertEqual(found['version'], wanted['version'])
    self.assertEqual((found['exports_applied'], found['exports_refused']), (1, 0))
    self.assertEqual(ask(f'{url}/healthz'), (200, 'ok\n'))
    self.assertEqual(publisher.stop(), 0)
    self.assertEqual(trainer.stop(), 0)
    told = {record['event'] for record in trainer.found}
    self.assertContainsSubset({'start', 'train', 'export', 'save', 'end', 'message'}, told)

    # The figures of the whole run are there again.
    trainer = Lines('trainer.run', '--config', self.config, '--run_dir', self.run_dir)
    self.addCleanup(trainer.command.kill)
    url = trainer.url()
    trainer.until('message', 'waiting for a pass')
    found = figures(f'{url}/metrics', 'trainer')
    self.assertEqual(
      [found[name] for name in ('passes_trained', 'passes_refused', 'steps', 'version')],
      [2, 1, 9, wanted['version']],
    )
    self.assertEqual(trainer.stop(signal.SIGINT), 130)

  @pytest.mark.long
  def test_alerts_that_prometheus_fires(self):
    if not shutil.which('prometheus'):
      raise unittest.SkipTest('needs Prometheus, which this machine has not')
    self.announce('day_0_hour_0.csv')
    trainer = Lines('trainer.run', '--config', self.config, '--run_dir', self.run_dir)
    self.addCleanup(trainer.command.kill)
    urls = {'ctr-trainer': trainer.url()}
    trainer.until('export')
    publisher = Lines(
      'trainer.cli.publish', '--run_dir', self.run_dir, '--to', f'{self.folder}/store'
    )
    self.addCleanup(publisher.command.kill)
    prometheus = Prometheus(self.folder, urls | {'ctr-publisher': publisher.url()})
    self.addCleanup(prometheus.process.wait)
    self.addCleanup(prometheus.process.kill)
    alert = 'ALERTS{{alertname="{}"}}'.format
    prometheus.until('up', {'ctr-trainer': 1, 'ctr-publisher': 1})
    prometheus.until('ctr_trainer_passes_refused_total', {'ctr-trainer': 0})
    prometheus.until('ctr_publisher_exports_refused_total', {'ctr-publisher': 0})
    for name in ('CtrTrainerRefuses', 'CtrPublisherRefuses', 'CtrDown'):
      prometheus.until(alert(name), {})
    self.announce('day_0_hour_1.csv', 0)  # without a sample
    prometheus.until(alert('CtrTrainerRefuses'), {'ctr-trainer': 1})
    pid = publisher.command.pid  # it only watches its one child, which does the work
    worker = int(pathlib.Path(f'/proc/{pid}/task/{pid}/children').read_text())
    os.kill(worker, signal.SIGSTOP)
    prometheus.until(alert('CtrDown'), {'ctr-publisher': 1})
    self.announce('day_0_hour_2.csv', 250)
    (damaged,) = pathlib.Path(trainer.until('export')['path']).glob('rows-*')
    damaged.write_bytes(damaged.read_bytes()[:-1])
    os.kill(worker, signal.SIGCONT)
    prometheus.until(alert('CtrPublisherRefuses'), {'ctr-publisher': 1})
    prometheus.until(alert('CtrDown'), {})
    trainer.command.kill()
    prometheus.until(alert('CtrDown'), {'ctr-trainer': 1})
    prometheus.scrape(**{'ctr-trainer': None})  # its pod is gone
    prometheus.until('up', {'ctr-publisher': 1})
    prometheus.until(prometheus.rules['CtrDown'], {'ctr-trainer': 1})

  @pytest.mark.long
  def test_alerts_on_what_is_late_that_prometheus_fires(self):
    if not shutil.which('prometheus'):
      raise unittest.SkipTest('needs Prometheus, which this machine has not')
    self.announce('day_0_hour_0.csv', hours_ago=5)
    files = Lines('trainer.run', '--config', self.config, '--run_dir', self.run_dir)
    self.addCleanup(files.command.kill)
    urls = {'ctr-files': files.url()}
    old = pathlib.Path(files.until('export')['path'], 'DONE')
    os.utime(old, (time.time() - 5 * 3600,) * 2)
    scorer = Lines('trainer.cli.serve', '--run_dir', self.run_dir, port='--port')
    self.addCleanup(scorer.command.kill)
    urls['ctr-scorer'] = scorer.url('serving')
    cluster = self.enter_context(contextlib.closing(topics.Cluster()))
    messages = [topics.as_json(record) for record in topics.records(200)]
    hours_ago = round(1000 * (time.time() - 5 * 3600))
    cluster.send('clicks', messages[:100], times=[hours_ago] * 100)
    topic = {'brokers': cluster.brokers, 'topic': 'clicks', 'pass': {'records': 200}}
    config = small.write(f'{self.folder}/topic.yaml', CONFIG, data={'topic': topic})
    follower = Lines('trainer.run', '--config', config, '--run_dir', f'{self.folder}/of_topic')
    self.addCleanup(follower.command.kill)
    prometheus = Prometheus(self.folder, urls | {'ctr-topic': follower.url()})
    self.addCleanup(prometheus.process.wait)
    self.addCleanup(prometheus.process.kill)
    alert = 'ALERTS{{alertname="{}"}}'.format
    prometheus.until('up', {'ctr-files': 1, 'ctr-scorer': 1, 'ctr-topic': 1})
    prometheus.until(alert('CtrStreamSilent'), {'ctr-files': 1})
    prometheus.until(alert('CtrScoresStale'), {'ctr-scorer': 1})
    prometheus.until(alert('CtrTrainerBehind'), {'ctr-topic': 1})
    prometheus.until('ctr_trainer_messages_waiting', {'ctr-topic': 100})
    cluster.send('clicks', messages[100:])
    prometheus.until(alert('CtrTrainerBehind'), {})
    prometheus.until('ctr_trainer_messages_waiting', {'ctr-topic': 0})
    self.announce('day_0_hour_1.csv', 250)
    prometheus.until(alert('CtrStreamSilent'), {})
    prometheus.until(alert('CtrScoresStale'), {})

  def test_rank_0_answers_for_the_job(self):
    self.announce('day_0_hour_0.csv')
    flags = ['--config', self.config, '--run_dir', self.run_dir, '--metrics_port', '0']
    with jobs.Ranks(2, flags) as ranks:
      ranks.start(1)
      first = ranks.start(0, stdout=subprocess.PIPE)
      lines = []
      for line in first.stdout:
        lines.append(line)
        if 'waiting for a pass' in line:
          break
      (url,) = re.findall(r'metrics (http://\S+)', ''.join(lines))
      found = figures(url, 'trainer')
      self.assertEqual((found['processes'], found['examples']), (2, 200))
      # Each rank may be the one that is asked to stop, although all wait.
      ranks.processes[1].send_signal(signal.SIGTERM)
      first.stdout.read()
      self.assertEqual([ranks.processes[r].wait(timeout=120) for r in (0, 1)], [0, 0])
      self.assertNotIn('metrics http', ranks.output(1))

  def test_a_port_that_is_taken(self):
    taken = self.enter_context(socket.create_server(('127.0.0.1', 0))).getsockname()[1]
    for host, port in (('192.0.2.1', '0'), ('127.0.0.1', '99999'), ('127.0.0.1', str(taken))):
      done = commands.run(
        *('-m', 'trainer.run', '--config', self.config, '--run_dir', self.run_dir),
        *('--metrics_host', host, '--metrics_port', port),
      )
      self.assertEqual(done.returncode, 2)
      self.assertLen(done.stderr.splitlines(), 1, done.stderr)
      self.assertRegex(done.stderr, '^error: .*metrics_port')


if __name__ == '__main__':
  tf.test.main()
