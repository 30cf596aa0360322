"""A finished run that goes on with another day: what is kept, predicted, exported and served."""

import contextlib
import io
import os
import pathlib
import shutil
import tempfile
from unittest import mock

import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

from tests.support import small
from trainer import api
from trainer.data.features import hash_keys
from trainer.evaluation.finished_run import open_run
from trainer.reporting.events import EventLog, read_events
from trainer.serving.memory_store import MemoryStore
from trainer.serving.publisher import Publisher
from trainer.serving.requests import Request
from trainer.serving.service import Service
from trainer.storage import chain, export_writer
from trainer.tools import report
from trainer.training import run_log

USERS = [f'u{i}' for i in range(12)]


class ContinuedRunTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(tempfile.mkdtemp(dir=self.get_temp_dir()))
    self.run_dir = str(self.folder / 'run')
    # Of day 1, half of the users click; of day 2, of which data.valid is, the other half does.
    self.write('day_1', seed=1, clicking=USERS[:6])
    self.write('valid', seed=2, clicking=USERS[6:])

  def write(self, name: str, seed: int, clicking: list[str]) -> None:
    rng = np.random.default_rng(seed)
    user = rng.choice(USERS, 400)
    click = (rng.random(400) < 0.1 + 0.7 * np.isin(user, clicking)).astype(int)
    pd.DataFrame({'user': user, 'click': click}).to_csv(self.folder / f'{name}.csv', index=False)

  def fit(self, **sections) -> str:
    """Trains, or goes on with what is new. Returns: what was printed, in one line."""
    data = {'train': [f'{self.folder}/day_*.csv'], 'valid': [f'{self.folder}/valid.csv']}
    tree = small.tree(
      run_dir=self.run_dir,
      data=data | {'label': 'click', 'slots': [{'name': 'user'}]},
      train={'batch_size': 50, 'epochs': 6, 'plateau': {'patience': 1, 'stop_after': 2}},
      export={'delta_every_passes': 1},
    )
    tree = small.tree(tree, **sections)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
      self.assertEqual(api.train_here(api.Source(tree, (), None))[0], 0)
    return ' '.join(printed.getvalue().split())

  def predicted(self) -> np.ndarray:
    frame = pd.DataFrame({'user': USERS, 'click': 0})
    return np.asarray(api.load(self.run_dir).predict(frame))

  def served(self) -> np.ndarray:
    store = MemoryStore()
    service = Service(store, Publisher(os.path.join(self.run_dir, 'exports'), store).advance)
    service.refresh()
    return service.predict(Request({'user': USERS}, len(USERS), by_row=False))[0].outputs[
      'probability'
    ]

  def export(self, kind: str, checkpoint: str) -> None:
    """As ctr-export does."""
    with open_run(self.run_dir, checkpoint=checkpoint) as run:
      export_writer.write(
        run.cfg,
        kind,
        {'step': run.step.steps, 'command': 'test'},
        store=run.step.store,
        model=run.step.dense.model,
        dense_stats=run.step.dense.embedding.stats,
        ancestors=run.progress.ancestors,
        checkpoint=run.progress.ancestors[-1],
      )

  def test_it_goes_on_when_older_events_were_dropped(self):
    class Bounded(EventLog):
      def __init__(self, run_dir, active, keep_bytes=0, most_bytes=None):
        super().__init__(run_dir, active, keep_bytes, 8_000)

    with mock.patch.object(run_log, 'EventLog', Bounded), self.assertLogs() as logged:
      for day in (1, 2, 3):
        self.write(f'day_{day}', seed=day, clicking=USERS[:6])
        printed = self.fit()
        metrics = pathlib.Path(self.run_dir, 'metrics.jsonl')
        self.assertLess(metrics.stat().st_size, 8_000)
        events = read_events(self.run_dir)
        self.assertEqual([*events['event'].iloc[[0, -1]]], ['start', 'end'])
        self.assertIn('kept: ', printed)
    self.assertNotIn('cannot write', ' '.join(logged.output))
    self.assertGreater(events['dropped'].iloc[0], 8_000)
    path = os.path.join(self.get_temp_dir(), 'report.html')
    report.write([self.run_dir], path)
    self.assertIn('(report.keep_mb)', pathlib.Path(path).read_text())

  def chain(self) -> list[str]:
    return [done.name for done in chain.chain(os.path.join(self.run_dir, 'exports'))]

  def test_a_new_day_counts_in_what_is_predicted_and_served(self):
    first = self.fit()
    self.assertIn('stopping after epoch 2; the best is 0, at step 8', first)
    # The deltas are of epochs 0 to 2; at the end, the kept state is exported.
    self.assertEqual(self.chain(), ['000004-base'])
    before = self.predicted()
    self.assertAllClose(self.served(), before, rtol=0, atol=1e-6)

    self.assertIn('nothing left to train', self.fit())
    self.write('day_2', seed=3, clicking=USERS[6:])
    told = self.fit()
    self.assertIn('day_2 is new to it: the state of step 8, the best so far, is no longer', told)
    self.assertIn('kept: epoch 2, the best of data.valid', told)
    after = self.predicted()
    self.assertNotAllClose(before, after, atol=0.05)
    self.assertAllClose(self.served(), after, rtol=0, atol=1e-6)
    # The rows of the best state are not those that the delta changes.
    self.assertEqual(self.chain(), ['000005-delta'])
    events = read_events(self.run_dir)
    self.assertEqual(list(events[events['event'] == 'best']['step']), [8, 32])

  def test_a_new_day_that_data_valid_has_is_told(self):
    self.fit()
    shutil.copy(self.folder / 'valid.csv', self.folder / 'day_2.csv')
    with self.assertLogs(level='WARNING') as logged:
      self.fit()
    wanted = 'day_2.csv holds the samples of .*valid.csv: metrics of data.valid say nothing'
    self.assertRegex('\n'.join(logged.output), wanted)

  def test_learning_rates_rise_again(self):
    self.fit()
    with open_run(self.run_dir, checkpoint='last') as run:
      self.assertLess(run.progress.rate, 0.1)
    self.write('day_2', seed=3, clicking=USERS[6:])
    self.fit()
    with open_run(self.run_dir) as run:
      self.assertEqual((run.progress.rate, run.progress.finished), (1.0, True))

  def test_training_goes_on_from_the_best_state(self):
    # From the second epoch on no step changes anything, so the last state is the best one again.
    plateau = {'patience': 1, 'stop_after': 9, 'factor': 1e-12}
    told = self.fit(train={'epochs': 3, 'plateau': plateau}, model={'interactions': ['dnn']})
    self.assertIn('goes on from the best state, of step 8', told)
    states = []
    for name, steps in (('best', 8), ('last', 24)):
      with open_run(self.run_dir, checkpoint=name) as run:
        self.assertEqual(run.step.steps, steps)
        rows = run.step.store.pull(hash_keys(USERS, 1), train=False)
        states.append([rows.linear, rows.factors, *run.step.dense.trainable])
        self.assertAllClose(states[0], states[-1], rtol=0, atol=1e-6)
        stalls = run.progress.stalls
    # From the state that was saved when training had gone back, a new start goes on as it did.
    shutil.rmtree(*pathlib.Path(self.run_dir, 'checkpoints').glob('*24'))
    self.fit(train={'epochs': 3, 'plateau': plateau}, model={'interactions': ['dnn']})
    with open_run(self.run_dir, checkpoint='last') as run:
      self.assertEqual((run.step.steps, run.progress.stalls), (24, stalls))

  def test_another_metric_or_another_data_valid_begins_anew(self):
    self.fit(train={'epochs': 2, 'plateau': {'patience': 1, 'stop_after': 9}})
    plateau = {'patience': 1, 'stop_after': 9, 'metric': 'auc'}
    told = self.fit(train={'epochs': 3, 'plateau': plateau})
    self.assertIn('data.valid or the metric has changed: the state of step 8, the best', told)
    self.write('other', seed=4, clicking=USERS[:6])
    valid = {'valid': [f'{self.folder}/other.csv']}
    told = self.fit(train={'epochs': 4, 'plateau': plateau}, data=valid)
    self.assertIn('data.valid or the metric has changed: the state of step 24, the best', told)
    self.assertIn('kept: epoch 3', told)

  def test_a_run_without_data_valid_any_more_keeps_its_last_state(self):
    self.fit()
    self.write('day_2', seed=3, clicking=USERS[6:])
    told = self.fit(data={'valid': []}, train={'plateau': None})
    self.assertIn('is no longer kept', told)
    self.assertIn('kept: the last state, after day_2', told)
    self.assertFalse(os.path.exists(f'{self.run_dir}/best'))

  @pytest.mark.long
  def test_a_delta_never_follows_the_export_of_another_state(self):
    self.fit(export={'delta_every_passes': None})
    for kind, checkpoint, wanted in (
      ('base', 'last', ['000001-base']),
      ('delta', 'last', ['000001-base', '000002-delta']),
      ('delta', 'best', ['000003-delta']),  # of an earlier step
      ('base', 'best', ['000004-base']),
    ):
      self.export(kind, checkpoint)
      self.assertEqual(self.chain(), wanted)
    self.assertAllClose(self.served(), self.predicted(), rtol=0, atol=1e-6)
    # No export was of this training, so that its first delta has all rows.
    self.write('day_2', seed=3, clicking=USERS[6:])
    self.fit()
    self.assertAllClose(self.served(), self.predicted(), rtol=0, atol=1e-6)


if __name__ == '__main__':
  tf.test.main()
