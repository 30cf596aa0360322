"""The table of items: its columns in training, rankings, exports and requests; its mistakes."""

import json
import os
import pathlib
import tempfile

import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

import trainer
from tests.support import commands, runs, small
from tests.support.retrieval import (
  ITEM_COLUMNS,
  ITEM_TABLE,
  make_lines,
  run_config,
  train_run,
  write_items,
  write_queries,
)
from trainer import config
from trainer.comm.communicator import SingleProcess
from trainer.data import statistics
from trainer.data.conversion import prepare_pass
from trainer.data.prepared import PreparedPass
from trainer.errors import ConfigError, UserError
from trainer.evaluation.task import task_of
from trainer.job.job import Job
from trainer.retrieval.dense_part import RetrievalPart
from trainer.serving.memory_store import MemoryStore
from trainer.serving.publisher import Publisher
from trainer.serving.requests import Request
from trainer.serving.service import Service
from trainer.tools import dry_run, findings, report
from trainer.tools.runs import read_run
from trainer.training.inputs import Inputs
from trainer.training.step import TrainStep

pytestmark = pytest.mark.reports


class ItemTableTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = tempfile.mkdtemp(dir=self.get_temp_dir())
    self.lines = make_lines()
    for name, pairs in self.lines.items():
      write_queries(f'{self.folder}/{name}.csv', pairs)
    self.table = write_items(f'{self.folder}/items.csv', ITEM_TABLE.items())

  def make_config(self, run_dir='run', **changes):
    columns = ITEM_COLUMNS | {'data.items': self.table}
    return run_config(self.folder, run_dir, **columns | changes)

  def prepared(self, cfg):
    prepare_pass(cfg, cfg.data.train[0], f'{cfg.run_dir}_train')
    return PreparedPass(f'{cfg.run_dir}_train', cfg)

  def catalogue(self, cfg):
    """The catalogue of a new model at the beginning of data.train."""
    step = task_of(cfg).step(SingleProcess())
    inputs = Inputs(cfg, SingleProcess(), step, lambda: None, f'{cfg.run_dir}_items')
    catalogue = step.dense.catalogue
    inputs.items()
    catalogue.refresh(step.store, SingleProcess(), self.prepared(cfg))
    return catalogue

  def test_a_step_reads_what_a_log_joined_with_the_table_has(self):
    cfg = self.make_config()
    catalogue = self.catalogue(cfg)
    self.assertLen(catalogue.keys, 26)
    batch = catalogue.for_step(self.prepared(cfg).gather(np.arange(40)), 0)
    items = [int(catalogue.table.texts[int(key)]) for key in batch.item]
    pairs = self.lines['train'][:40]
    self.assertEqual(items[:40], [item for _, item in pairs])
    path = f'{self.folder}/joined.csv'
    users = [user for user, _ in pairs] + [None] * 20  # the negatives
    write_queries(path, zip(users, items), ITEM_TABLE)
    # To a reader without data.items, all columns are of the log.
    joined = cfg.model_copy(
      update={'data': cfg.data.model_copy(update={'items': None, 'train': [path]})}
    )
    expected = self.prepared(joined).gather(np.arange(60))
    self.assertAllEqual(batch.dense, expected.dense)
    self.assertAllEqual(batch.segments, expected.segments)
    self.assertAllEqual(batch.keys, expected.keys)
    self.assertAllEqual(batch.values, expected.values)

  def test_what_is_predicted_exported_and_served_is_one(self):
    cfg = self.make_config(**{'export.delta_every_passes': 1})
    train_run(cfg)
    run = trainer.load(cfg.run_dir)
    vectors = run.vectors().set_index('item').drop(columns='key')
    self.assertLen(vectors, 26)
    self.assertGreater(np.abs(vectors.loc['30']).max(), 0, 'an item that is in no log')
    frame = pd.DataFrame({'user': [4, 21], 'kinds': ['k1|k4', 'k0|k4']})
    for k in (0, '3'):
      with self.assertRaisesRegex(UserError, f'^k: found {k!r}; wanted a whole number above 0'):
        run.recommend(frame, k)
    found = run.recommend(frame, k=3)

    store = MemoryStore()
    service = Service(store, Publisher(os.path.join(cfg.run_dir, 'exports'), store).advance)
    service.refresh()
    exported = store.view().items.items
    self.assertCountEqual(exported.texts, vectors.index)
    for text, vector in zip(exported.texts, exported.vectors):
      self.assertAllClose(vector, vectors.loc[text], rtol=1e-5, atol=1e-6)
    seen = [
      [str(item) for split in self.lines.values() for u, item in split if u == user]
      for user in frame['user']
    ]
    columns = {name: frame[name].astype(str).tolist() for name in frame}
    served, _ = service.find(Request(columns, 2, by_row=False), 3, seen)
    for sample, (items, scores) in enumerate(served.items):
      rows = found[found['sample'] == sample]
      self.assertEqual(items, rows['item'].tolist())
      self.assertAllClose(scores, rows['score'], rtol=1e-5)

  def test_figures_of_its_columns_are_counted_in_the_table(self):
    many = ITEM_TABLE | {100 + i: ('k1', 't1', '2') for i in range(1200)}  # never shown
    write_items(self.table, many.items())
    bins = {'name': 'bin', 'from': {'bins': 'price', 'boundaries': [3, 50]}}
    item = ITEM_COLUMNS['model.retrieval.item']
    cfg = self.make_config(
      **{
        'data.train': [f'{self.folder}/{name}.csv' for name in self.lines],
        'data.valid': [],
        'data.slots': [*ITEM_COLUMNS['data.slots'], bins],
        'model.retrieval.item': item | {'slots': [*item['slots'], 'bin']},
        'model.retrieval.negatives': 1000,  # in some step each item is drawn
      }
    )
    told = '\n'.join(dry_run.tell(cfg))
    train_run(cfg)
    path = f'{cfg.run_dir}/report.html'
    report.write([cfg.run_dir], path)
    shown = runs.slots_in(path)
    kinds, tags, prices = zip(*many.values())
    for slot, of_items in (
      ('kind', [{kind} - {''} for kind in kinds]),
      ('tags', [{tag.partition(':')[0] for tag in of.split('|')} - {''} for of in tags]),
      ('bin', [{p and (float(p) > 3) + (float(p) > 50)} for p in prices]),  # '': no number
    ):
      count, blank = len(set().union(*of_items)), of_items.count(set())
      self.assertRegex(told, rf'  {slot} +{count}, in data.items\n')
      self.assertEqual(shown[slot]['features'], str(count))
      self.assertEqual(shown[slot]['blank'], f'{blank / len(many):.4g}')
    self.assertRegex(told, rf'  item +{len(many):,}, with those of data.items\n')
    self.assertRegex(told, r'  kinds +\d+, with those of kind\n')
    run = read_run(cfg.run_dir)
    self.assertIn(f'{run.of("train")["features"].iloc[-1]:,.0f} features ×', told)
    self.assertEqual(shown['kinds, with those of kind']['blank'], '0')
    (fault,) = findings.faults(run)
    self.assertEqual(fault.code, 'many_weights')  # of few samples
    self.assertEmpty(run.of('drift'), 'the log has no bins')
    done = commands.run('-m', 'trainer.cli.inspect', '--run_dir', cfg.run_dir)
    self.assertIn('\nkinds: with those of kind\n', done.stdout, done.stderr)
    described = statistics.describe([self.prepared(cfg)], cfg)
    self.assertEqual(list(described['slots']), ['user', 'kinds', 'item'])
    self.assertEmpty(described['dense'])
    wanted = 'not counted, because data.items has them: bin, kind, price, tags'
    self.assertEndsWith(statistics.table(described), wanted)

  def test_an_item_of_which_nothing_is_known_has_no_vector(self):
    new = {31: ('', '', ''), 32: ('', '', '7'), 33: ('k9', '', '')}
    write_items(self.table, [*ITEM_TABLE.items(), *new.items()])
    # Items that are drawn as negatives would have rows.
    cfg = self.make_config(**{'model.retrieval.loss': 'in_batch_softmax'})
    train_run(cfg)
    self.assertCountEqual(trainer.load(cfg.run_dir).vectors()['item'], map(str, [*ITEM_TABLE, 32]))

  def test_goes_on_in_the_middle_of_a_pass_as_if_nothing_had_been(self):
    whole = train_run(self.make_config('whole'))
    cfg = self.make_config('stopped', **{'checkpoint.every_steps': 3})

    class Killed(Exception):
      pass

    class Step(TrainStep):
      def train(self, *args):
        if self.steps == 7:
          raise Killed
        return super().train(*args)

    with self.assertRaises(Killed):
      Job(
        cfg, SingleProcess(), Step(cfg, SingleProcess(), RetrievalPart(cfg, SingleProcess()))
      ).run()
    resumed = train_run(cfg)
    for chunk, other in zip(whole.step.store.export_state(), resumed.step.store.export_state()):
      self.assertAllEqual(chunk['factors_default'], other['factors_default'])
    for dense in zip(whole.step.dense.trainable, resumed.step.dense.trainable):
      self.assertAllEqual(*dense)

  def test_new_items_join_and_others_leave_with_the_table(self):
    cfg = self.make_config()
    train_run(cfg)
    table = {i: columns for i, columns in ITEM_TABLE.items() if i != 3}
    write_items(self.table, [*table.items(), (77, ('k2', '', '5'))])
    found = trainer.load(cfg.run_dir, 'last').vectors()['item']
    self.assertCountEqual(found, [*map(str, table), '77'])

  def test_items_that_the_table_lacks_are_told_and_left_out(self):
    lacking = {3, 8}
    table = {i: columns for i, columns in ITEM_TABLE.items() if i not in lacking}
    write_items(self.table, table.items())
    cfg = self.make_config()
    with self.assertLogs('absl', 'WARNING') as logs:
      catalogue = self.catalogue(cfg)
    count = sum(item in lacking for _, item in self.lines['train'])
    self.assertLen(logs.output, 1)
    self.assertIn(
      f'train.csv: data.items lacks the items of {count} of 180 samples: they are left out',
      logs.output[0],
    )
    batch = catalogue.for_step(self.prepared(cfg).gather(np.arange(180)), 0)
    is_known = [item not in lacking for _, item in self.lines['train']]
    self.assertAllEqual(batch.weight > 0, is_known)
    self.assertAllEqual(batch.item[:180] >= 0, is_known)
    plain = run_config(self.folder, 'plain', **{'data.items': self.table})
    before = self.prepared(plain).gather(np.arange(180))
    with self.assertLogs('absl', 'WARNING'):
      alone = self.catalogue(plain).for_step(before, 0)
    self.assertAllEqual(alone.item[:180] >= 0, is_known)
    self.assertAllEqual(alone.keys[:360], self.prepared(plain).gather(np.arange(180)).keys)
    train_run(cfg)  # positives that are in no catalogue are not found
    lines = pathlib.Path(f'{cfg.run_dir}/metrics.jsonl').read_text().splitlines()
    (*_, last) = [e for e in map(json.loads, lines) if e['event'] == 'eval']
    self.assertEqual((last['items'], last['examples']), (24, 60))

  def test_a_pass_of_items_that_the_table_lacks_is_refused(self):
    """So is one whose items are all blank, even before any other."""
    write_queries(f'{self.folder}/lacks.csv', [(user, 99) for user in range(9)])
    write_queries(f'{self.folder}/blank.csv', [(user, '') for user in range(9)])
    paths = [f'{self.folder}/{name}.csv' for name in ('blank', 'lacks', 'train')]
    changes = {'data.train': paths, 'data.max_refused_passes': 2, 'train.epochs': 1}
    cfg = self.make_config(**changes)
    job = small.job(cfg)
    self.assertEqual(job.run(), 0)
    fates = [(entry.fate, entry.reason) for entry in job.state.ledger]
    self.assertEqual([fate for fate, _ in fates], ['refused', 'refused', 'trained'])
    self.assertRegex(fates[0][1], "blank.csv: (slot|column) 'item' is blank in")
    self.assertIn('lacks.csv: data.items lacks the items of 9 of 9 samples', fates[1][1])

  def test_mistakes_are_one_line(self):
    rows = list(ITEM_TABLE.items())
    for table, header, wanted in (
      (
        [*rows, (4, ('k', 't', '1'))],
        None,
        "items.csv: the item '4' is there twice; wanted it once",
      ),
      ([*rows, ('', ('k', 't', '1'))], None, "column 'item' is blank in 1 of 27 lines; wanted"),
      (rows, 'item,knd,tags,price', "items.csv:1: no column 'kind' .*is 'knd'"),
      ([(4, ('k', 't', 'x'))], None, "items.csv:2: column 'price': found 'x'"),
      ([(99, ('k', 't', '1'))], None, 'lacks the items of 180 of 180 samples; wanted the items of'),
      (None, None, '^data.items: .*items.csv: no such file$'),
      ('pipe', None, 'items.csv: is a device, a pipe or a socket; wanted a file'),
    ):
      if table is None:
        pathlib.Path(self.table).unlink()
      elif table == 'pipe':
        os.mkfifo(self.table)
      else:
        write_items(self.table, table, *([header] if header else []))
      run_dir = tempfile.mkdtemp(dir=self.folder)
      with self.subTest(wanted), self.assertRaisesRegex(UserError, wanted) as caught:
        train_run(self.make_config(run_dir.rpartition('/')[2]))
      self.assertNotIn('\n', str(caught.exception))

    path = f'{self.folder}/config.yaml'
    pathlib.Path(path).write_text(config.dump(self.make_config()))
    for text, wanted in (
      ('data.items=null', "'model.retrieval.item': reads more than the id 'item'; wanted data.it"),
      (
        'model.retrieval.query.slots=[user, kinds, kind]',
        "'model.retrieval.query.slots': found 'kind'",
      ),
      ('model.retrieval.item.slots=[]', r"'model.retrieval.item.slots': found \[\]; wanted at"),
    ):
      with self.subTest(text), self.assertRaisesRegex(ConfigError, wanted):
        config.load(path, [text])
    pathlib.Path(path).write_text(
      'data: {train: [t.csv], items: items.csv, slots: [{name: a}]}\nmodel: {interactions: [fm]}\n'
    )
    with self.assertRaisesRegex(ConfigError, "key 'data.items': found 'items.csv'"):
      config.load(path)


if __name__ == '__main__':
  tf.test.main()
