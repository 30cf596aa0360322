"""What a run reports to MLflow, to TensorBoard and, by a callback, to any other tracker."""

import glob
import importlib.util
import os
import tempfile
import threading
from unittest import mock

import mlflow
import tensorflow as tf

from tests.support import small
from trainer import config
from trainer.errors import UserError
from trainer.reporting.events import EventLog
from trainer.reporting.tensorboard import TensorBoard
from trainer.tools import trackers

BIN = {'name': 'bin', 'from': {'bins': 'price', 'quantiles': 3}}
MEASURED = {'data.slots.2.from.boundaries': [1.0, 2.0]}
DATA = {'train': ['day_*.csv'], 'slots': [{'name': 'user'}, {'name': 'item (new)'}, BIN]}


class TrackersTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.run_dir = os.path.join(tempfile.mkdtemp(dir=self.get_temp_dir()), 'mine')
    os.makedirs(self.run_dir)
    self.store = f'file://{self.run_dir}-mlruns'
    variables = {'MLFLOW_TRACKING_URI': self.store, 'MLFLOW_ALLOW_FILE_STORE': 'true'}
    self.enter_context(mock.patch.dict(os.environ, variables))

  def report(self, to, status='finished', active=True, is_waiting=mock.Mock(), **train):
    """Reports a short run; returns its EventLog."""
    tree = small.tree(run_dir=self.run_dir, data=DATA, report={'to': to}, train=train)
    cfg = config.resolve(small.checked(tree), MEASURED)
    config.write_of_run(cfg)
    log = EventLog(self.run_dir, active, None)
    run_log = mock.Mock(events=log, status=mock.Mock(progress=is_waiting))
    by_name = {'tensorboard': TensorBoard, 'mlflow': lambda *of: trackers.Mlflow(*of, run_log)}
    listeners = [by_name[name](cfg.run_dir, cfg.settings()) for name in to]
    log.tell(listeners)
    tasks = {'tasks': {'click': {'auc': 0.7}, 'buy (paid)': {'auc': 0.6}}}
    log.write('train', 10, auc=0.75, examples=99, **{'pass': 'day_1.csv'})
    log.write('eval', 10, split='valid', auc=0.7, logloss=None, **tasks)
    log.write('eval', 20, split='valid', auc=0.72)
    log.write('best', 20, epoch=1)
    log.write('eval', 30, split='valid', auc=0.65)
    log.write('eval', 30, split='test', auc=0.71)
    log.write('importance', 30, split='test', auc=0.79, columns={})
    log.write('end', 30, status=status)
    for listener in listeners:
      listener.close(True)
    return log

  def test_mlflow(self):
    self.assertEqual(self.report(['mlflow'], batch_size=64).troubles, [])
    client = mlflow.MlflowClient(self.store)
    (run,) = client.search_runs(['0'])
    self.assertEqual((run.info.status, run.info.run_name), ('FINISHED', 'mine'))
    self.assertEqual(run.data.params['train.batch_size'], '64')
    self.assertEqual(run.data.params['data.slots.1.name'], 'item (new)')
    history = client.get_metric_history(run.info.run_id, 'valid/auc')
    self.assertEqual([(m.step, m.value) for m in history], [(10, 0.7), (20, 0.72), (30, 0.65)])
    self.assertEqual(run.data.metrics['best/auc'], 0.72)
    self.assertEqual(run.data.metrics['test/auc'], 0.71, 'that of the whole test data')
    self.assertEqual(run.data.metrics['train/auc'], 0.75)
    self.assertEqual(run.data.metrics['valid/auc_buy _paid_'], 0.6)
    self.assertNotIn('importance/auc', run.data.metrics)
    of_bin = {k: v for k, v in run.data.params.items() if k.startswith('data.slots.2.')}
    self.assertContainsSubset({'data.slots.2.from.bins', 'data.slots.2.from.quantiles'}, of_bin)
    self.assertNotIn('data.slots.2.from.boundaries.0', of_bin)
    self.assertNotIn('None', run.data.params.values())
    kept = {artifact.path for artifact in client.list_artifacts(run.info.run_id)}
    self.assertEqual(kept, {'config.yaml', 'metrics.jsonl'})
    # The same run_dir goes on with the same run, also where a setting has changed.
    os.makedirs(f'{self.run_dir}/exports/000001-base')
    with open(f'{self.run_dir}/exports/000001-base/DONE', 'w', encoding='utf-8') as f:
      f.write('{}')
    self.assertEqual(self.report(['mlflow'], status='stopped', batch_size=128).troubles, [])
    (again,) = client.search_runs(['0'])
    self.assertEqual((again.info.run_id, again.info.status), (run.info.run_id, 'KILLED'))
    self.assertEqual(again.data.params['train.batch_size'], '64')
    (base,) = client.list_artifacts(run.info.run_id, 'exports')
    self.assertEqual(base.path, 'exports/000001-base')

  def test_a_tracker_that_fails_is_told_once_and_ends_nothing(self):
    with open(f'{self.run_dir}-mlruns', 'w', encoding='utf-8') as f:
      f.write('a file where MLflow wants a directory')
    log = self.report(['mlflow', 'tensorboard'])
    self.assertLen(log.troubles, 1)
    self.assertStartsWith(log.troubles[0], 'mlflow: ')

  def test_a_tracker_that_hangs_is_waited_for_and_told(self):
    goes_on, waited = threading.Event(), mock.Mock()
    with (
      mock.patch.object(trackers, 'MlflowTracker', lambda *of: goes_on.wait()),
      mock.patch.object(trackers, 'SECONDS_TO_END', 1),
    ):
      log = self.report(['mlflow'], is_waiting=waited)
    goes_on.set()
    waited.assert_called_once()
    self.assertEqual(log.troubles, ['mlflow: TimeoutError: did not take everything within 1 s'])

  def test_a_package_that_is_missing(self):
    with mock.patch.object(importlib.util, 'find_spec', return_value=None):
      with self.assertRaisesRegex(UserError, r"'mlflow'.*pip install 'ctr-trainer\[mlflow\]'"):
        trackers.check_mlflow()

  def test_a_store_that_mlflow_refuses_is_known_before_the_training(self):
    with mock.patch.dict(os.environ, {'MLFLOW_ALLOW_FILE_STORE': 'false'}):
      with self.assertRaisesRegex(UserError, f'MLflow refuses {self.store}: .*; wanted MLFLOW_TRA'):
        trackers.check_mlflow()
    trackers.check_mlflow()  # MLflow keeps a store that it has opened

  def test_one_process_reports(self):
    self.report(['mlflow', 'tensorboard'], active=False)
    self.assertEqual(mlflow.MlflowClient(self.store).search_runs(['0']), [])
    self.assertFalse(os.path.exists(f'{self.run_dir}/tensorboard'))

  def test_tensorboard_has_train_and_valid_in_one_card(self):
    self.report(['tensorboard'])
    tags = {}
    for path in glob.glob(f'{self.run_dir}/tensorboard/**/*tfevents*', recursive=True):
      kind = os.path.relpath(os.path.dirname(path), f'{self.run_dir}/tensorboard')
      for record in tf.data.TFRecordDataset(path):
        summary = tf.compat.v1.Event.FromString(record.numpy()).summary
        tags.setdefault(kind, set()).update(value.tag for value in summary.value)
    self.assertIn('auc', tags['train'])
    self.assertEqual(tags['valid'], {'auc', 'auc/click', 'auc/buy (paid)'})
    self.assertEqual(tags['best'], {'auc'})
    self.assertNotIn('importance', tags)


if __name__ == '__main__':
  tf.test.main()
