"""What is served is what is predicted, with every shipped config and every kind of store."""

import contextlib
import csv
import os
import pathlib
import tempfile

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests.support.exports import RedisServer
from tests.support.steps import train
from trainer import config
from trainer.comm.communicator import SingleProcess
from trainer.data.conversion import prepare_pass
from trainer.data.prepared import PreparedPass
from trainer.serving import rest
from trainer.serving.memory_store import MemoryStore
from trainer.serving.publisher import Publisher
from trainer.serving.service import Service
from trainer.serving.stores import open_store
from trainer.serving.versioned_store import VersionedStore
from trainer.storage import export_writer
from trainer.training.step import TrainStep

CONFIGS = pathlib.Path(__file__).resolve().parents[3] / 'configs'
# Runs that find items have no scores; recommend_test.py has them.
SHIPPED = sorted(
  path.stem for path in CONFIGS.glob('*.yaml') if 'retrieval:' not in path.read_text()
)
BATCH, BATCHES, RECORDS = 64, 6, 50


def make_records(cfg: config.Config, rng: np.random.Generator, size: int) -> list[dict[str, str]]:
  """Returns records with texts in every column: frequent, rare and blank values."""
  records = []
  for _ in range(size):
    record = {}
    for slot in cfg.data.slots:
      count = rng.integers(0, 4) if slot.separator else rng.random() < 0.9
      values = [f'{int(500 * rng.random() ** 4)}' for _ in range(count)]
      if slot.value_separator:
        values = [f'{value}{slot.value_separator}{rng.random():.2f}' for value in values]
      record[slot.column or slot.name] = (slot.separator or '').join(values)
    for column in cfg.data.dense:
      record.setdefault(column.name, f'{rng.exponential():.3f}' if rng.random() < 0.8 else '')
    for label in cfg.labels:
      record[label.column or label.name] = str(int(rng.random() < 0.4))
    records.append(record)
  return records


class ServedTest(tf.test.TestCase, parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.stack = contextlib.ExitStack()
    self.addCleanup(self.stack.close)
    self.folder = self.stack.enter_context(tempfile.TemporaryDirectory())

  def train_shipped(self, name: str, changes: tuple[str, ...] = ()) -> None:
    """Trains some steps with a shipped config, on records of its own columns."""
    overrides = [
      f'data.train=[{self.folder}/x.csv]',
      'data.columns=null',
      'data.format=csv',
      'data.label_positive=null',
      'data.group=null',
      'data.watch=null',
      'sparse.store=rows',
      *changes,
    ]
    path = f'{CONFIGS}/{name}.yaml'
    self.cfg = config.load(path, overrides, run_dir=f'{self.folder}/run')
    self.step = TrainStep(self.cfg, SingleProcess())
    rng = np.random.default_rng(1)
    columns = len(self.cfg.data.dense)
    bounds = np.resize([0.3, 0], columns)  # every other one has none
    dense = np.stack([rng.random(columns), np.full(columns, 2.0), bounds])
    if self.cfg.counted_fields():
      dense = np.column_stack([dense, [-0.4, 1, 0]])  # the log-odds of a click
    self.step.dense.embedding.stats.assign(dense.astype(np.float32))
    for batch in self.batches('train', make_records(self.cfg, rng, BATCH * BATCHES)):
      train(self.step, batch, has_next=True)
    self.step.consolidate()
    self.records = make_records(self.cfg, rng, RECORDS)
    self.predict()

  def predict(self) -> None:
    """Sets `predicted`."""
    batches = self.batches('test', self.records)
    self.predicted = np.concatenate([self.step.predict(self.step.stage(b)) for b in batches])

  def batches(self, name, records):
    path = f'{self.folder}/{name}.csv'
    with open(path, 'w', encoding='utf-8', newline='') as f:
      writer = csv.DictWriter(f, records[0].keys(), delimiter=self.cfg.data.delimiter or ',')
      writer.writeheader()
      writer.writerows(records)
    prepare_pass(self.cfg, path, path + '.pass')
    return PreparedPass(path + '.pass', self.cfg).batches(BATCH)

  def export(self, kind='base', cfg=None, store=None, number=1):
    return export_writer.write(
      cfg or self.cfg,
      kind,
      {'number': number},
      store=store or self.step.store,
      model=self.step.dense.model,
      dense_stats=self.step.dense.embedding.stats,
      ancestors=[1],  # all exports are of this checkpoint
      checkpoint=1,
    )

  def columns(self):
    labels = {label.column or label.name for label in self.cfg.labels}
    names = [name for name in self.records[0] if name not in labels]
    return {name: [record[name] for record in self.records] for name in names}

  def served(self, store: VersionedStore) -> np.ndarray:
    """Publishes the exports to a store and returns its scores, [B] or [B, T]."""
    publisher = Publisher(os.path.join(self.cfg.run_dir, 'exports'), store)
    service = Service(store, publisher.advance)
    service.refresh()
    request = rest.request_of({'inputs': self.columns()}, RECORDS)
    outputs = service.predict(request)[0].outputs
    if len(self.cfg.labels) == 1:
      return outputs['probability']
    return np.stack([outputs[label.name] for label in self.cfg.labels], 1)

  @parameterized.parameters(SHIPPED)
  @pytest.mark.long
  def test_shipped_configs(self, name):
    """A score differs only where a filter is told, and only by what it left out."""
    self.train_shipped(name)
    done = self.export()
    store = MemoryStore()
    served = self.served(store)
    if done.left_out.rows:
      self.assertTrue(self.step.store.policy.filters_exports)
      self.assertEqual(done.left_out.rows + done.rows, done.left_out.of)
      self.assertIn('left out', store.version().left_out)
    else:
      self.assertEqual(done.rows, int(self.step.store.size()))
      self.assertIsNone(store.version().left_out)
      self.assertAllClose(served, self.predicted, atol=1e-6, rtol=0)
      self.assertGreater(np.std(served), 1e-4)
      for shared in list(self.columns())[::2]:  # such as the columns of one user
        for record in self.records:
          record[shared] = self.records[0][shared]
      self.predict()
      self.assertAllClose(self.served(store), self.predicted, atol=1e-6, rtol=0)

  @parameterized.parameters(False, True)
  def test_stores_and_saved_model(self, counts):
    # Of tags, a sample may have several or none.
    of_slots = [f'data.slots.{i}.counts=true' for i in (0, 3)] if counts else []
    self.train_shipped('demo', ('lifecycle={}', *of_slots))
    self.export()
    targets = [f'{self.folder}/lmdb']
    if RedisServer.installed():
      redis = RedisServer()
      redis.start()
      self.stack.callback(redis.stop)
      targets.append(redis.url)
    for target in targets:
      store = open_store(target, '--to', writable=True)
      self.stack.callback(store.close)
      self.assertAllClose(self.served(store), self.predicted, atol=1e-6, rtol=0, msg=target)
    if counts:
      self.check_delta(f'{self.folder}/lmdb_of_delta')
    model = tf.saved_model.load(self.export('saved_model', number=2).path)
    columns = self.columns()
    for column in self.cfg.data.dense:
      columns[column.name] = [float(text or 'nan') for text in columns[column.name]]
    answer = model.signatures['serving_default'](**{n: tf.constant(c) for n, c in columns.items()})
    self.assertAllClose(answer['probability'], self.predicted, atol=1e-6, rtol=0)

  def check_delta(self, target: str) -> None:
    """Trains on; a delta brings the counts of its rows to stores that have the base."""
    stores = MemoryStore(), open_store(target, '--to', writable=True)
    self.stack.callback(stores[1].close)
    self.assertAllClose(self.served(stores[0]), self.predicted, atol=1e-6, rtol=0)
    for batch in self.batches('train', make_records(self.cfg, np.random.default_rng(2), BATCH)):
      train(self.step, batch)
    before = self.predicted
    self.predict()
    self.assertGreater(np.abs(self.predicted - before).max(), 1e-3)
    self.export('delta', number=2)
    for store in stores:
      self.assertAllClose(self.served(store), self.predicted, atol=1e-6, rtol=0)

  @parameterized.parameters(
    (
      'lifecycle={admission: score, base_threshold: null, delta_keep_days: null}',
      'delta_threshold',
    ),
    ('sparse.tables.default.factors={l2: 0.5, l2_mode: catch_up}', 'l2_mode catch_up'),
    ('lifecycle={}', None),
  )
  def test_a_delta_brings_all_changes_or_tells_which_it_leaves(self, change, told):
    self.train_shipped('demo', ('lifecycle={}', change))
    self.assertFalse(str(self.export().left_out))
    store = MemoryStore()
    self.assertAllClose(self.served(store), self.predicted, atol=1e-6, rtol=0)
    for batch in self.batches('train', make_records(self.cfg, np.random.default_rng(2), BATCH)):
      train(self.step, batch)
    self.step.consolidate()
    self.predict()
    delta = self.export('delta', number=2)
    served = self.served(store)
    if told:
      self.assertIn(told, str(delta.left_out))
      self.assertIn(told, store.version().left_out)
      self.assertGreater(np.abs(served - self.predicted).max(), 1e-6)
    else:
      self.assertIsNone(store.version().left_out)
      self.assertAllClose(served, self.predicted, atol=1e-6, rtol=0)

  def test_thresholds_left_out_and_taken_back(self):
    """The line tells what is left out; an export with other thresholds is another export."""
    self.train_shipped('demo')
    filtered = self.export()
    keys = np.asarray(self.step.store.select('all'))
    shows = np.asarray(self.step.store.lookup(keys)['show'])
    kept = np.isin(keys, np.asarray(self.step.store.select('base')))
    self.assertEqual(filtered.left_out.rows, np.sum(~kept))
    self.assertEqual(filtered.left_out.of, len(keys))
    self.assertAllClose(filtered.left_out.share_of_shows, shows[~kept].sum() / shows.sum())
    self.assertEqual(self.export().path, filtered.path)
    changes = ['lifecycle.base_threshold=null', 'lifecycle.delta_keep_days=null']
    cfg = config.load(f'{CONFIGS}/demo.yaml', changes, run_dir=self.cfg.run_dir)
    store = TrainStep(cfg, SingleProcess()).store
    store.import_state(list(self.step.store.export_state()))
    whole = self.export('base', cfg, store)
    self.assertNotEqual(whole.path, filtered.path)
    self.assertEqual((whole.rows, whole.left_out.rows), (len(keys), 0))
    self.assertAllClose(self.served(MemoryStore()), self.predicted, atol=1e-6, rtol=0)
    again = self.export()  # the newest is served, so that the first one is not there any more
    self.assertNotIn(again.path, (whole.path, filtered.path))
    self.assertEqual(again.left_out, filtered.left_out)


if __name__ == '__main__':
  tf.test.main()
