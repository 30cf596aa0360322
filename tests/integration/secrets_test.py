"""A command that is given a secret in the clear refuses it in a line, and keeps nothing of it."""

import os
import pathlib
import tempfile

import tensorflow as tf

from tests.support import commands, small
from trainer import api
from trainer.errors import UserError, fit_to_print

SECRET = 'gEh3/iM+x'
ADDRESSES = (
  f's3://AKIA:{SECRET}@bucket/log.csv',
  f'kafka://u:{SECRET}@127.0.0.1:1/topic',
  f'redis://:{SECRET}@127.0.0.1:1/0',
  f'https://host/log.csv?Expires=9&Signature={SECRET}',
)
CONFIG = small.tree(data={'train': ['no.csv']})
# Settings of librdkafka that it calls sensitive (rdkafka_conf.c), and others that sound so.
SETTINGS = (
  *('ssl.key.password', 'ssl.key.pem', 'ssl_key', 'ssl.ca.pem', 'ssl.keystore.password'),
  *('sasl.password', 'sasl.oauthbearer.config', 'sasl.oauthbearer.client.secret'),
  'sasl.oauthbearer.client.credentials.client.secret',
  *(f'sasl.oauthbearer.assertion.private.key.{name}' for name in ('passphrase', 'pem')),
  *('sasl.jaas.config', 'some.new.password'),
)


class SecretsTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = tempfile.mkdtemp(dir=self.get_temp_dir())

  def write(self, name, **data):
    path = f'{self.folder}/{name}.yaml'
    return small.write(path, CONFIG, run_dir=f'{self.folder}/run', data=data)

  def assert_refused(self, *words, wanted='found a secret in'):
    """Runs a command, which must refuse a secret in a line that does not show it."""
    for json in ((), ('--log_json',)) if words[0] == 'run' else ((),):
      done = commands.run('-m', commands.module(words[0]), *words[1:], *json, cwd=self.folder)
      said = done.stdout + done.stderr
      self.assertEqual(done.returncode, 2, said)
      self.assertNotIn(SECRET[:3], said)
      (line,) = [line for line in said.splitlines() if 'error: ' in line or '"error"' in line]
      self.assertIn(wanted, line)
    for base, _, names in os.walk(self.folder):
      for name in {*names} - {'bad.yaml'}:
        content = pathlib.Path(base, name).read_bytes()
        self.assertNotIn(SECRET[:3].encode(), content, f'{base}/{name}')

  def test_no_command_takes_an_address_with_a_secret(self):
    config, run_dir = self.write('good'), f'--run_dir={self.folder}/run'
    for address in ADDRESSES:
      bad = self.write('bad', train=[address])
      for words in (
        ('run', '--config', bad),
        ('run', '--config', config, '--set', f'data.train=[{address}]'),
        ('run', '--config', config, '--set', f'{address}'),
        ('run', '--config', config, f'--set=data.test=[{address}'),
        ('run', '--config', config, '--run_dir', address),
        ('run', '--config', config, '--init_from', address),
        ('prepare', '--config', bad, '--out', f'{self.folder}/out'),
        ('prepare', '--config', config, '--out', address),
        ('split', '--data', address, '--out', f'{self.folder}/out', '--by_hash', 'user'),
        ('synthesize', '--out', address),
        ('tune', '--config', bad, '--set', 'seed=1,2'),
        ('tune', '--config', config, '--set', f'data.train={address}', '--study_dir', 'study'),
        ('tune', '--config', config, '--study_dir', address),
        ('evaluate', '--run_dir', address),
        ('evaluate', run_dir, f'--data={address}'),
        ('predict', run_dir, '--data', address),
        ('predict', run_dir, '--data', 'x.csv', '--out', address),
        ('inspect', run_dir, '--against', address),
        ('export', run_dir, '--kind', 'base', '--out', address),
        ('report', address),
        ('resolve', '--config', bad),
        ('doctor', '--config', bad),
        ('doctor', '--run_dir', address),
        ('publish', run_dir, '--once', '--to', address),
        ('publish', '--run_dir', address, '--to', 'store'),
        ('serve', '--store', address),
        ('serve', '--run_dir', address),
      ):
        with self.subTest(words=words):
          self.assert_refused(*words)

  def test_no_setting_of_kafka_takes_a_secret(self):
    topic = {'brokers': '127.0.0.1:1', 'topic': 'log'}
    for setting in SETTINGS:
      bad = self.write('bad', topic=topic | {'config': {setting: SECRET}}, train=[])
      self.assert_refused('run', '--config', bad, wanted=f"'{setting}'")
    good = self.write('good', topic=topic, train=[])
    for value in (f'{{sasl.password: {SECRET}}}', f'{{sasl.password: [{SECRET}]}}', SECRET):
      set_it = f'--set=data.topic.config={value}'
      self.assert_refused('run', '--config', good, set_it, wanted='--set data.topic.config: ')
    set_it = f'--set=data.topic.config={{sasl.password: [{SECRET}'
    self.assert_refused('run', '--config', good, set_it, wanted='--set data.topic.config:1: ')
    set_it = f'--set=data.topic.brokers=u:{SECRET}@127.0.0.1:1'
    self.assert_refused('run', '--config', good, set_it, wanted="an address with an '@'")

  def test_python(self):
    for address in ADDRESSES:
      tree = small.tree(CONFIG, data={'train': [address]})
      for arguments in (tree,), (CONFIG, [f'data.train=[{address}]']), (CONFIG, [], address):
        with self.assertRaisesRegex(UserError, 'found a secret in') as raised:
          api.fit(*arguments)
        self.assertNotIn(SECRET[:3], str(raised.exception))

  def test_addresses_without_a_secret_stay_as_they_are(self):
    for address in (
      *('s3://bucket/dt=2024-01-0?/key=5/a:b@c', 'hdfs://user@host:8020/user@x/y'),
      *('redis://USER@host:6379/0', 'kafka://a:9092,b:9092/topic', 'http://[::1]:8501/v1'),
      *('kafka://clicks/2024-01-31T10:00:00/0:17-29', 's3://bucket/x?region=eu-west-1'),
    ):
      self.assertEqual(fit_to_print(address), address)


if __name__ == '__main__':
  tf.test.main()
