"""What a trainer, its ranks and a publisher tell from outside, on their pages and in JSON lines."""

import json
import os
import pathlib
import re
import signal
import subprocess
import tempfile
import urllib.error
import urllib.request

import tensorflow as tf

from tests.support import commands, jobs
from trainer.reporting.status import FIGURES

CONFIG = """
data:
  watch: {folder}/passes
  day_pattern: 'day_(\\d+)'
  label: click
  slots: [{{name: user}}, {{name: item}}]
  max_refused_passes: 3
model: {{interactions: [linear, fm]}}
train: {{batch_size: 50}}
export: {{base: true, delta_every_passes: 1}}
"""


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

  def __init__(self, *words: str):
    self.command = commands.start(
      *('-m', *words, '--metrics_port', '0', '--log_json'),
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

  def url(self) -> str:
    return re.search(r'http://\S+(?=/metrics)', self.until('metrics')['text'])[0]

  def stop(self, number: int = signal.SIGTERM) -> int:
    self.command.send_signal(number)
    self.found += map(json.loads, self.command.stdout)
    return self.command.wait(timeout=120)


class StatusTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = tempfile.mkdtemp(dir=self.get_temp_dir())
    os.mkdir(f'{self.folder}/passes')
    self.config, self.run_dir = f'{self.folder}/config.yaml', f'{self.folder}/run'
    pathlib.Path(self.config).write_text(CONFIG.format(folder=self.folder), encoding='utf-8')

  def announce(self, name, samples=200):
    rows = [f'{i % 7},{i % 5},{i % 3 == 0:d}\n' for i in range(samples)]
    path = pathlib.Path(f'{self.folder}/passes/{name}')
    path.write_text('user,item,click\n' + ''.join(rows), encoding='utf-8')
    pathlib.Path(f'{path}.done').touch()

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
    self.assertEqual(ask(f'{url}/else')[0], 404)

    store = f'{self.folder}/store'
    publisher = Lines('trainer.publish', '--run_dir', self.run_dir, '--to', store)
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
      [found[f'passes_{fate}'] for fate in ('trained', 'refused')] + [found['steps']], [2, 1, 9]
    )
    self.assertEqual(trainer.stop(signal.SIGINT), 130)

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
    for host, port in (('192.0.2.1', '0'), ('127.0.0.1', '99999')):
      done = commands.run(
        *('-m', 'trainer.run', '--config', self.config, '--run_dir', self.run_dir),
        *('--metrics_host', host, '--metrics_port', port),
      )
      self.assertEqual(done.returncode, 2)
      self.assertLen(done.stderr.splitlines(), 1, done.stderr)
      self.assertRegex(done.stderr, '^error: .*metrics_port')


if __name__ == '__main__':
  tf.test.main()
