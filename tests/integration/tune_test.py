"""Searches of settings: what a user sees of a search, and that it goes on."""

import contextlib
import html
import os
import re
import signal
import tempfile
import time
from unittest import mock

import mlflow
import numpy as np
import optuna
import psutil
import pytest
import tensorflow as tf

import trainer
from tests.support import commands, small
from trainer import config, files
from trainer.errors import UserError

SPACE = {
  'sparse.tables.default.width': [2, 4],
  'train.dense_optimizer.learning_rate': (1e-4, 1e-1, 'log'),
}


class TuneTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = tempfile.mkdtemp(dir=self.get_temp_dir())
    rng = np.random.default_rng(0)
    for name in ('train', 'valid'):
      users = rng.integers(20, size=400)
      clicks = rng.random(400) < 0.1 + 0.6 * (users < 7)
      with open(f'{self.folder}/{name}.csv', 'w', encoding='utf-8') as f:
        f.write('label,user\n' + ''.join(f'{int(c)},{u}\n' for c, u in zip(clicks, users)))
    data = {split: [f'{self.folder}/{split}.csv'] for split in ('train', 'valid')}
    self.tree = small.tree(
      data=data | {'slots': [{'name': 'user'}]},
      model={'interactions': ['linear', {'dnn': {'hidden': [4]}}]},
      train={'epochs': 2, 'dense_optimizer': {'learning_rate': 0.01}},
      sparse={'tables': {'default': {'width': 4}}},
    )
    self.study = f'{self.folder}/study'

  def test_a_damaged_list_of_trials_is_told_in_a_line(self):
    os.makedirs(self.study)
    for line in '{"op_code": 0, "worker_id": "x"}\n', '{"op_co\n', '[]\n':
      with open(f'{self.study}/study.log', 'w', encoding='utf-8') as f:
        f.write(line)
      with self.assertRaisesRegex(UserError, r'study.log: cannot be read \(.*another --study_dir$'):
        trainer.tune(self.tree, SPACE, 1, self.study)

  def test_a_search_and_what_it_leaves(self):
    store = f'file://{self.folder}/mlruns'
    variables = {'MLFLOW_TRACKING_URI': store, 'MLFLOW_ALLOW_FILE_STORE': 'true'}
    self.enter_context(mock.patch.dict(os.environ, variables))
    self.tree['report'] = {'to': ['mlflow']}
    first = trainer.tune(self.tree, SPACE, 2, self.study)
    self.assertLen(first, 2)
    rate, width = first[list(SPACE)[::-1]].loc[first['run_dir'].str.endswith('000')].iloc[0]
    self.assertEqual((rate, width), ('0.01', '4'), 'the config itself comes first')
    inside = (first['auc_low'] < first['auc']) & (first['auc'] < first['auc_high'])
    self.assertTrue(inside.all())
    self.assertAllEqual(first['logloss'], sorted(first['logloss']))
    best = trainer.load(first['run_dir'][0])
    self.assertAllClose(best.evaluate(f'{self.folder}/valid.csv')['auc'], first['auc'][0])
    passes = os.listdir(f'{self.study}/prepared/train')
    self.assertEqual(passes, ['train'], 'the trials share them')
    page = open(f'{self.study}/report.html', encoding='utf-8').read()
    self.assertIn('Importance of the settings, of few trials a guess', page)
    wanted = r"[12] of 2 trials have an AUC in the best one's 95 % interval, 0\."
    self.assertRegex(html.unescape(page), wanted)

    with self.subTest('it goes on'):
      more = trainer.tune(self.tree, SPACE, 3, self.study)
      self.assertLen(more, 3)
      self.assertContainsSubset(first['run_dir'], set(more['run_dir']))
    with self.subTest('one run in MLflow is the parent of its trials'):
      client = mlflow.MlflowClient(store)
      runs = {run.info.run_name: run for run in client.search_runs(['0'])}
      parent = runs.pop('study')
      self.assertEqual({run.info.status for run in (parent, *runs.values())}, {'FINISHED'})
      self.assertEqual(parent.data.tags['searched.sparse.tables.default.width'], '[2, 4]')
      for row in more.to_dict('records'):
        tags = runs.pop(os.path.basename(row['run_dir'])).data.tags
        self.assertEqual(tags['mlflow.parentRunId'], parent.info.run_id)
        self.assertEqual(
          {key: tags[f'searched.{key}'] for key in SPACE}, {k: row[k] for k in SPACE}
        )
      self.assertEmpty(runs)
      kept = {artifact.path for artifact in client.list_artifacts(parent.info.run_id)}
      self.assertEqual(kept, {'report.html', 'trials.csv'})
    with (
      self.subTest('another search'),
      self.assertRaisesRegex(UserError, 'its trials had another'),
    ):
      trainer.tune(self.tree, {'sparse.tables.default.width': [2, 8]}, 3, self.study)

  @pytest.mark.long
  def test_a_search_that_is_killed_or_stopped_goes_on_with_its_trial(self):
    self.tree['train'] |= {'epochs': 1000, 'plateau': {'stop_after': 1000}}
    path = small.write(f'{self.folder}/my.yaml', self.tree)
    words = '--config', path, '--set', 'sparse.tables.default.width=2,4', '--trials', '1'
    run_dir = f'{self.study}/trial-000'

    def search():
      return trainer.tune(path, {'sparse.tables.default.width': [2, 4]}, 1, self.study)

    def evaluations():
      with contextlib.suppress(FileNotFoundError):
        return open(f'{run_dir}/metrics.jsonl', encoding='utf-8').read().count('"eval"')
      return 0

    def started():
      """Starts the command, and waits until its trial has gone on."""
      before = evaluations()
      command = commands.start('-m', 'trainer.cli.tune', *words, '--study_dir', self.study)
      while evaluations() == before:
        self.assertIsNone(command.poll())
        time.sleep(0.05)
      return command

    def trial():
      with open(f'{self.study}/lock', encoding='utf-8') as f:
        return int(re.search(r'its trial, process (\d+),', f.read())[1])

    killed = started()
    killed.kill()
    killed.wait(60)
    orphan = trial()
    with self.assertRaisesRegex(UserError, f'process {orphan}, holds it; wanted that process'):
      search()
    os.kill(orphan, signal.SIGTERM)
    with files.exclusive(f'{self.study}/lock', patience=60):  # when it has ended
      pass
    with open(f'{self.study}/study.log', 'a', encoding='utf-8') as f:
      f.write('{"op_code":')  # as a process that is killed while it writes leaves it
    with contextlib.suppress(FileExistsError):  # the kill itself may have left one
      os.symlink('study.log', f'{self.study}/study.log.lock')
    stopped = started()
    stopped.terminate()
    self.assertEqual(stopped.wait(60), 143)
    self.assertFalse(psutil.pid_exists(trial()))
    saved = evaluations()
    with mock.patch.object(optuna.Trial, 'should_prune', lambda _: os.kill(trial(), 15)):
      with self.assertRaisesRegex(UserError, 'trial-000: .*the same search goes on with it'):
        search()
    with mock.patch.object(optuna.Trial, 'should_prune', lambda _: True):
      (row,) = search().to_dict('records')
    self.assertEqual((row['state'], row['run_dir']), ('pruned', run_dir))
    steps = trainer.load(run_dir).metrics.query('event == "eval"')['step']
    self.assertAllEqual(steps, sorted(set(steps)), 'nothing was trained twice')
    self.assertGreaterEqual(len(steps), saved)

  def test_a_search_without_a_good_trial(self):
    self.tree['data']['train'] = [f'{self.folder}/none.csv']
    for _ in range(2):  # the second search begins anew
      with self.assertRaisesRegex(UserError, 'none.csv'):
        trainer.tune(self.tree, SPACE, 2, self.study)
    with self.assertRaisesRegex(UserError, 'trials: found 0; wanted at least 1'):
      trainer.tune(self.tree, SPACE, 0, self.study)

  def test_a_column_without_which_a_model_is_better(self):
    """Nine in ten users of valid and test are new; with users, training learns little of rates."""
    rng = np.random.default_rng(0)
    rate = rng.random(500)
    for name, users in (
      ('train', rng.integers(50, size=4000)),
      ('valid', rng.integers(45, 500, 2000)),
      ('test', rng.integers(45, 500, 2000)),
    ):
      seen = np.clip(rate[users] + 0.3 * rng.normal(size=len(users)), 0, 1)
      rows = zip((rng.random(len(users)) < rate[users]).astype(int), users, seen)
      with open(f'{self.folder}/{name}.csv', 'w', encoding='utf-8') as f:
        f.write('label,user,rate\n' + ''.join(f'{c},{u},{r:.3f}\n' for c, u, r in rows))
    self.tree['data'] |= {'test': [f'{self.folder}/test.csv'], 'dense_bins': 8}
    self.tree['data']['dense'] = [{'name': 'rate', 'transform': 'standardise'}]
    self.tree['train'] |= {'epochs': 4, 'batch_size': 128}
    path = small.write(f'{self.folder}/my.yaml', self.tree)
    search = '-m', 'trainer.cli.tune', '--config', path, '--columns', '--study_dir', self.study
    ended = commands.run(*search)
    self.assertEqual(ended.returncode, 0, ended.stderr)
    gained = re.findall(r"^without '(\w+)', seed (\d): logloss .* gains 0", ended.stdout, re.M)
    self.assertEqual(
      gained, [('user', '0'), ('user', '1')], 'the rate, with its bins, is not tried'
    )
    given = re.search(r"suggested: without 'user'.*\n.* --config (.*) --run_dir", ended.stdout)[1]
    self.assertEqual(list(config.load(given).data.log_columns()), ['rate'])
    whole, better = (trainer.load(f'{self.study}/{n}-0') for n in ('all', 'without-user'))
    table = whole.compare(better).set_index('metric')  # on data.test
    self.assertLess(table['high']['logloss'], 0)
    with self.subTest('another config'):
      again = commands.run(*search, '--set', 'train.epochs=5')
      self.assertEqual(again.returncode, 2)
      self.assertIn('all-0: was trained with another config; wanted another', again.stderr)

  def test_the_command_prints_trials_and_refuses_mistakes(self):
    path = small.write(f'{self.folder}/my.yaml', self.tree)

    def tune(*arguments):
      command = '-m', 'trainer.cli.tune', '--config', path, *arguments
      ended = commands.run(*command, cwd=self.folder)
      return ended.returncode, ended.stdout + ended.stderr

    hidden = 'model.interactions.1.dnn.hidden'
    status, told = tune('--set', f'{hidden}=[4],[4,2]', '--trials', '5', '--metric', 'logloss')
    self.assertEqual(status, 0, told)
    for layers in (r'\[4\]', r'\[4, 2\]'):
      self.assertRegex(
        told, rf'trial-00[01] complete \([12] of 5\): 0\.\d{{6}} · {hidden}={layers}'
      )
    self.assertIn('gave no new settings; the search ends after 2 trials', told)
    self.assertIn('2 of 2 trials have an AUC in the best', told)
    self.assertRegex(told, ' logloss +auc +auc_low +auc_high')
    self.assertIn('next: ctr-evaluate --run_dir runs/my-tune/trial-00', told)
    given = re.search('ctr-train --config (.*given.yaml) --run_dir NEW', told)[1]
    best = config.load(f'{self.folder}/{given}')
    trial = config.load_of_run(f'{self.folder}/{os.path.dirname(given)}')
    self.assertEqual(best.model, trial.model)
    self.assertEqual(best.data.train, trial.data.train)
    linear = ['--set', 'model.interactions=[linear]', '--trials', '1', '--study_dir', 'linear']
    sizes = ['--set', 'sparse.tables.default.width=4,8', '--set', 'train.epochs=1,2']
    status, told = tune(*linear, *sizes)
    self.assertEqual(status, 0, told)
    self.assertEqual(told.count('in any trial'), 1, told)
    self.assertRegex(told, 'run_dir +state +width +epochs +')
    self.assertStartsWith(told, 'sparse.tables.default.width: has no effect in any trial: ')
    for arguments, wanted in (
      (['--set', 'train.epochs=1'], 'found no setting'),
      (['--set', 'train.epohcs=1,2'], "epohcs'.*'epochs'"),
      (['--range', 'train.epochs=3:2'], 'train.epochs: found 3:2; wanted two numbers that rise'),
      (['--range', 'train.epochs'], "--range: found 'train.epochs'; wanted KEY=LOW:HIGH"),
      (['--set', 'seed=1,2', '--set', 'data.valid=[]'], 'data.valid: trials are judged by it'),
      (['--columns', '--set', 'data.valid=[]'], 'data.valid: columns are judged by it; wanted'),
      (['--columns', '--metric', 'rmse'], "--metric: found 'rmse'; wanted auc or logloss, which"),
      (['--columns', '--set', 'seed=1,2'], '--columns: found seed to search; wanted one of the'),
    ):
      status, told = tune('--study_dir', f'{self.folder}/other', *arguments)
      self.assertEqual(status, 2, told)
      self.assertRegex(told, f'error: .*{wanted}')
      self.assertNotIn('--set train', told, 'no flag of a trial that the user did not give')
    # The mistake, now corrected, has left nothing.
    rate = 'train.dense_optimizer.learning_rate'
    corrected = '--range', f'{rate}=.001:.1', '--trials', '1'
    status, told = tune('--study_dir', f'{self.folder}/other', *corrected)
    self.assertEqual(status, 0, told)
    self.assertRegex(told, f'run_dir +state +{rate} +', 'several keys have this name')


if __name__ == '__main__':
  tf.test.main()
