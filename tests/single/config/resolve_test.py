"""`ctr-resolve` says of each key what it resolves to and where its value comes from."""

import pathlib
import tempfile

import tensorflow as tf
import yaml

from tests.support import commands
from tests.support.runs import begin
from trainer import config
from trainer.cli import resolve
from trainer.config import rules, schema_text
from trainer.errors import UserError

TREE = {
  'data': {'train': ['log.csv'], 'label': 'click', 'slots': [{'name': 'user'}]},
  'model': {'interactions': ['fm']},
  'train': {'dense_dtype': 'bfloat16'},
}


class ResolveTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(tempfile.mkdtemp(dir=self.get_temp_dir()))
    self.tree = TREE | {'run_dir': str(self.folder / 'run')}
    self.tree['data'] = TREE['data'] | {'train': [str(self.folder / 'log.csv')]}
    self.path = str(self.folder / 'config.yaml')
    with open(self.path, 'w', encoding='utf-8') as f:
      yaml.safe_dump(self.tree, f)

  def begin_run(self, batch_size):
    begin(config.resolve(config.load(self.path), {'train.batch_size': batch_size}))

  def lines(self, *args):
    text = resolve.explained(resolve.resolved(*args))
    return [line.strip() for line in text.splitlines() if not line.strip().startswith('#')]

  def test_each_value_says_where_it_comes_from(self):
    lines = self.lines(self.path, ['data.valid=[y.csv]', 'train.plateau={patience: 3}'])
    for line in (
      'label: click  # given',
      'patience: 3  # given',
      'epochs: 20  # from train.plateau',
      'stop_after: 3  # default',
      'batch_size: 4096  # default',  # there is no log that it could be measured on
    ):
      self.assertIn(line, lines)

  def test_a_name_may_have_dots(self):
    self.tree['data']['slots'] = [{'name': 'user', 'table': 'a.b'}]
    self.tree['data']['topic'] = {
      'brokers': 'localhost:9092',
      'topic': 'clicks',
      'pass': {'records': 100},
      'config': {'security.protocol': 'ssl'},
    }
    self.tree['sparse'] = {'tables': {'a.b': {'linear': {'kind': 'adagrad', 'beta1': 0.3}}}}
    cfg = config.parse(yaml.safe_dump(self.tree), 'test')
    lines = list(schema_text.changed(cfg))
    self.assertIn('data.topic.config.security.protocol: ssl  # given', lines)
    self.assertIn('sparse.tables.a.b.linear.beta1: 0.3  # given', lines)
    (warning,) = rules.warnings(cfg)
    self.assertStartsWith(warning, 'sparse.tables.a.b.linear.beta1: found 0.3')

  def test_changed_values_say_where_they_come_from(self):
    stops = ['data.valid=[y.csv]', 'train.plateau={patience: 3}']
    cfg = resolve.resolved(self.path, stops)
    lines = list(schema_text.changed(cfg))
    self.assertIn('train.plateau.patience: 3  # given', lines)
    self.assertIn('train.epochs: 20  # from train.plateau', lines)
    self.assertNotIn('stop_after', ''.join(lines))

  def test_what_is_measured_on_the_log_says_so(self):
    rows = ''.join(f'{i % 2},u{i}\n' for i in range(30_000))
    (self.folder / 'log.csv').write_text('click,user\n' + rows)
    self.assertIn('batch_size: 128  # measured', self.lines(self.path))
    self.assertIn('batch_size: 64  # given', self.lines(self.path, ['train.batch_size=64']))

  def test_what_a_run_has_measured_stays(self):
    self.begin_run(batch_size=256)
    (self.folder / 'run' / 'dense_dtype').write_text('float32')
    for args in ((self.path,), (self.tree['run_dir'],)):
      lines = self.lines(*args)
      self.assertIn('batch_size: 256  # measured', lines)
      self.assertIn('dense_dtype: bfloat16  # given; measured: this run trains in float32', lines)
    run = resolve.resolved(self.tree['run_dir'])
    self.assertEqual(run, config.load_of_run(self.tree['run_dir']))

  def test_a_run_dir_without_a_run(self):
    with self.assertRaisesRegex(UserError, f'{self.folder}: no given.yaml there; wanted the run_d'):
      resolve.resolved(str(self.folder))
    done = commands.run('-m', 'trainer.cli.resolve', '--run_dir=nope')
    wanted = 'error: --run_dir nope: no run there; wanted the run_dir of a training run\n'
    self.assertEqual((done.returncode, done.stderr), (2, wanted))

  def test_a_file_that_is_not_there(self):
    done = commands.run('-m', 'trainer.cli.resolve', '--config=nope')
    wanted = 'error: nope: no such file; wanted a YAML file\n'
    self.assertEqual((done.returncode, done.stderr), (2, wanted))


if __name__ == '__main__':
  tf.test.main()
