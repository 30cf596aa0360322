"""What a run_dir keeps of its config, and what happens when the config says otherwise."""

import contextlib
import io
import pathlib
import shutil
import tempfile
from unittest import mock

import tensorflow as tf
import yaml

from tests.support import commands, small
from trainer import api, config, errors
from trainer.comm.communicator import SingleProcess
from trainer.config import loading
from trainer.evaluation.finished_run import open_run
from trainer.evaluation.task import task_of
from trainer.job.callback import Callback
from trainer.training.continuing import Change
from trainer.training.run_state import RunState


def check_run_dir(cfg):
  RunState(cfg, SingleProcess(), task_of(cfg).step(SingleProcess())).check_run_dir()


class RunDirTest(tf.test.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = pathlib.Path(tempfile.mkdtemp())
    (cls.folder / 'log.csv').write_text('label,user,item\n' + '1,a,b\n0,c,d\n' * 40)
    cls.tree = small.tree(
      run_dir=f'{cls.folder}/run',
      data={'train': [f'{cls.folder}/log.csv']},
      model={'interactions': ['linear', {'dnn': {'hidden': [4]}}]},
      train={'epochs': 2},
    )
    api.fit(cls.tree)

  def told(self, *overrides):
    out, copy = io.StringIO(), tempfile.mkdtemp(dir=self.folder)
    shutil.copytree(self.tree['run_dir'], copy, dirs_exist_ok=True)
    with contextlib.redirect_stdout(out):
      check_run_dir(api.Source(self.tree, overrides, copy).with_measured_values())
    return out.getvalue().splitlines()

  def test_what_was_given_and_what_it_resolved_to_are_apart(self):
    run = pathlib.Path(self.tree['run_dir'])
    given = yaml.safe_load((run / 'given.yaml').read_text())
    self.assertEqual(given['train'], {'epochs': 2})
    resolved = config.load_of_run(str(run))
    self.assertEqual((resolved.train.epochs, resolved.train.batch_size), (2, 64))
    given['run_dir'] = str(run)
    measured = {'train.batch_size': 64}
    again = config.parse(yaml.safe_dump(given), 'given')
    self.assertEqual(config.resolve(again, measured), resolved)

  def test_a_start_reads_validates_and_checks_its_config_once(self):
    """Whatever it measures. A run that goes on also reads the two files of its run_dir and, if its
    settings have changed, the config of its checkpoint, the only other one that is validated."""
    log, file = self.folder / 'numbers.csv', self.folder / 'my.yaml'
    log.write_text('label,user,x,tags\n' + '1,a,.5,p|q\n0,c,.7,q\n' * 40)
    columns = {'slots': [{'name': 'user'}, {'name': 'tags', 'separator': '|'}]}
    data = {'train': [str(log)], 'valid': [str(log)], 'dense': [{'name': 'x'}]} | columns
    tree = {'data': data, 'model': {'interactions': ['fm', 'dnn']}, 'train': {'epochs': 1}}
    file.write_text(yaml.safe_dump(tree))
    run_dir, found, whole = str(self.folder / 'counted'), [], config.Config
    with (
      mock.patch.object(yaml, 'load', wraps=yaml.load) as reads,
      mock.patch.object(whole, 'model_validate', wraps=whole.model_validate) as made,
      mock.patch.object(loading, 'check', wraps=loading.check) as checks,
    ):
      counts = reads, made, checks

      class Counted(Callback):
        def on_train_begin(self):
          found.append([count.call_count for count in counts])

      run = api.fit(file, run_dir=run_dir, callbacks=[Counted()])
      for epochs in (1, 2):
        file.write_text(yaml.safe_dump(tree | {'train': {'epochs': epochs}}))
        for count in counts:
          count.reset_mock()
        api.fit(str(file), run_dir=run_dir, callbacks=[Counted()])
    self.assertEqual(found, [[1, 1, 1], [3, 1, 1], [4, 2, 2]])
    self.assertEqual(config.load_of_run(run_dir, ['train.epochs=1']), run.cfg)
    for key in ('model.recipe', 'train.batch_size', 'data.slots.2.from.boundaries'):
      self.assertEqual(run.cfg.origin(key), 'measured')

  def test_each_difference_is_a_line(self):
    self.assertEqual(self.told(), ['train.batch_size: 64, measured when the run began'])
    lines = self.told(
      'train.epochs=3',
      'data.slots=[{name: item}, {name: user, pooling: sum}]',
      'train.batch_size=9',
      'checkpoint.every_passes=null',
      'train.progressive_validation=true',
    )
    for key, old, new in (
      ('train.epochs', 2, 3),
      ('train.batch_size', 64, 9),
      ('data.slots.user.pooling', 'mean', 'sum'),
      ('checkpoint.every_passes', 1, 'null'),
      ('train.progressive_validation', 'false', 'true'),
    ):
      self.assertIn(f'{key}: {new} from here on; the run had {old}', lines)

  def test_a_list_or_section_that_is_gone_is_one_line(self):
    run_dir = tempfile.mkdtemp(dir=self.folder)
    stops = [f'data.valid=[{self.folder}/log.csv]', 'train.plateau={patience: 1}']
    api.fit(self.tree, overrides=stops, run_dir=run_dir)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
      source = api.Source(self.tree, ['data.slots=[{name: item}]'], run_dir)
      check_run_dir(source.with_measured_values())
    told = {line.partition(': ')[0]: line for line in out.getvalue().splitlines()}
    gone = 'from here on; the run had'
    self.assertEqual(told['data.valid'], f'data.valid: [] {gone} [{self.folder}/log.csv]')
    self.assertStartsWith(told['train.plateau'], f'train.plateau: null {gone} {{metric: ')
    self.assertStartsWith(told['data.slots.user'], f'data.slots.user: nothing {gone} {{name: user')
    within = ('data.valid.', 'train.plateau.', 'data.slots.user.')
    self.assertEmpty([key for key in told if key.startswith(within)])
    self.assertNotIn('the run had nothing', out.getvalue())

  def test_a_key_that_is_left_out_has_its_default_whatever_the_run_has(self):
    tree = self.tree | {'train': {}}
    self.assertEqual(api.Source(tree).with_measured_values().train.epochs, 1)

  def test_a_damaged_config_is_mended_by_that_of_a_checkpoint(self):
    copy = pathlib.Path(tempfile.mkdtemp(dir=self.folder))
    shutil.copytree(self.tree['run_dir'], copy, dirs_exist_ok=True)
    whole = config.load_of_run(str(copy))
    (copy / 'config.yaml').write_text('seed: 1\n')
    with self.assertRaisesRegex(errors.UserError, r'config.yaml: .*checkpoints/'):
      config.load_of_run(str(copy))
    shutil.copy(max(copy.glob('checkpoints/ckpt-*/config.yaml')), copy / 'config.yaml')
    self.assertEqual(config.load_of_run(str(copy)), whole)

  def test_a_damaged_given_yaml_is_mended_by_deleting_it(self):
    copy = pathlib.Path(tempfile.mkdtemp(dir=self.folder))
    shutil.copytree(self.tree['run_dir'], copy, dirs_exist_ok=True)
    given, source = copy / 'given.yaml', api.Source(self.tree, (), str(copy))
    whole = source.with_measured_values()
    given.write_text('seed: 1\n')
    with self.assertRaisesRegex(errors.UserError, r'given.yaml: .*delete it'):
      source.with_measured_values()
    given.unlink()
    self.assertEqual(source.with_measured_values(), whole)

  def test_a_start_whose_checkpoint_is_damaged_leaves_the_config_as_it_was(self):
    copy = pathlib.Path(tempfile.mkdtemp(dir=self.folder))
    shutil.copytree(self.tree['run_dir'], copy, dirs_exist_ok=True)
    for path in copy.glob('checkpoints/*/dense.npz'):
      path.write_bytes(path.read_bytes()[:-1])
    before = (copy / 'config.yaml').read_bytes()
    with self.assertRaisesRegex(errors.UserError, 'all of its 2 checkpoints are damaged'):
      api.train_here(api.Source(self.tree, ['train.epochs=3'], str(copy)))
    self.assertEqual((copy / 'config.yaml').read_bytes(), before)

  def test_a_dense_column_that_is_gone_is_named(self):
    before, cfg = (
      config.parse(yaml.safe_dump(self.tree | {'data': self.tree['data'] | {'dense': dense}}), 'c')
      for dense in ([{'name': 'age', 'missing': 1}, {'name': 'price'}], [{'name': 'price'}])
    )
    with self.assertRaisesRegex(errors.UserError, "data.dense lacks its 'age'; wanted the same"):
      Change(before, cfg).check('run')

  def test_another_model_is_refused(self):
    for overrides, key in (
      (['data.slots=[{name: x}, {name: y}]'], 'data.slots'),
      (['data.label=click'], 'data.label'),
      (['seed=3'], 'seed'),
      (['data.dense=[{name: price}]'], "data.dense adds 'price'; wanted the same"),
      (
        ['model={retrieval: {query: {slots: [user]}, item: {slots: [item]}}}', 'data.group=user'],
        'model.interactions, this config model.retrieval;',
      ),
    ):
      with self.assertRaisesRegex(errors.UserError, f'holds another model: .*{key}'):
        self.told(*overrides)

  def test_commands_that_read_a_run_refuse_another_model_in_one_line(self):
    run_dir, log = self.tree['run_dir'], f'{self.folder}/log.csv'
    other = f"run_dir {run_dir}: it holds another model: its config.yaml has data.label = 'label', "
    other += "this config 'nix'; wanted the same, or another --run_dir"
    missing = f"{log}:1: no column 'foo' (slot 'foo') among 3 columns"
    for change, wanted, command in (
      ('data.label=nix', other, ('trainer.cli.evaluate', '--data', log)),
      ('data.label=nix', other, ('trainer.cli.predict', '--data', log, '--out', '-')),
      ('data.label=nix', other, ('trainer.cli.export', '--kind', 'base', '--out', f'{run_dir}/x')),
      ('data.slots.0.name=foo', missing, ('trainer.cli.predict', '--data', log, '--out', '-')),
    ):
      done = commands.run('-m', *command, '--run_dir', run_dir, '--set', change)
      self.assertEqual((done.returncode, done.stdout), (2, ''))
      (line,) = done.stderr.splitlines()
      self.assertStartsWith(line, f'error: {wanted}')

  def test_a_damaged_checkpoint_of_a_run_of_another_model_is_no_matter(self):
    copy = pathlib.Path(tempfile.mkdtemp(dir=self.folder))
    shutil.copytree(self.tree['run_dir'], copy, dirs_exist_ok=True)
    newest = max(copy.glob('checkpoints/ckpt-*'))
    (newest / 'dense.npz').write_bytes(b'')
    with open_run(str(copy)) as run:
      self.assertEqual(run.step.steps, 2)
    with self.assertRaisesRegex(errors.OtherModel, 'data.label'):
      with open_run(str(copy), ['data.label=nix']):
        pass


if __name__ == '__main__':
  tf.test.main()
