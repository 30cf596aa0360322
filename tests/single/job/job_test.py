"""A job in one process: what it writes, keeps and sets aside."""

import contextlib
import dataclasses
import glob
import io
import json
import os
import pathlib
import signal
import tempfile
import threading
from unittest import mock

import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

from ops.sharding import SHARDS
from ops.tensors import to_tensor
from tests.support import small
from tests.support.waiting import stopped_when_it_waits
from trainer import config, files
from trainer.config import rules
from trainer.data.conversion import prepare_pass
from trainer.data.passes import passes
from trainer.errors import BadPass, UserError
from trainer.evaluation import finished_run
from trainer.job import job
from trainer.serving.memory_store import MemoryStore
from trainer.serving.publisher import Publisher
from trainer.serving.stores import open_store
from trainer.storage import chain, checkpoint, checkpoint_rows, row_files, saved_model
from trainer.storage.run_lock import RunLock
from trainer.tools import figures, findings
from trainer.tools.advice import why_no_help
from trainer.tools.runs import read_run
from trainer.training import inputs

pytestmark = pytest.mark.reports


class JobTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = tempfile.mkdtemp(dir=self.get_temp_dir())
    self.run_dir = f'{self.folder}/run'

  def write(self, name, samples=40):
    rng = np.random.default_rng([*name.encode(), samples])
    path = f'{self.folder}/{name}'
    os.makedirs(os.path.dirname(path), exist_ok=True)
    rows = (f'{rng.integers(9)},{rng.integers(5)},{rng.integers(2)}\n' for _ in range(samples))
    with open(path, 'w', encoding='utf-8') as f:
      f.write('user,item,label\n' + ''.join(rows))
    return path

  def make_job(self, data, init_from=None, **sections):
    tree = small.tree(run_dir=self.run_dir, data=data, train={'batch_size': 16})
    return small.job(small.config(tree, **sections), init_from=init_from)

  def watch(self, data, **sections):
    """Trains on what is announced, then stops."""
    data = {'watch': f'{self.folder}/log', 'day_pattern': r'day_(\d+)'} | data
    one = self.make_job(data, **sections)

    with stopped_when_it_waits(one):
      self.assertEqual(0, one.run())
    return one

  def events(self, kind=None):
    with open(f'{self.run_dir}/metrics.jsonl', encoding='utf-8') as f:
      events = [json.loads(line) for line in f]
    around = ('start', 'window', 'save', 'importance', 'end')
    return [e for e in events if kind == e['event'] or (kind is None and e['event'] not in around)]

  def prepared(self):
    return sorted(map(os.path.basename, glob.glob(f'{self.run_dir}/prepared/train/*')))

  def test_one_checkpoint_where_nothing_was_trained_in_between(self):
    data = {'train': [self.write('day_1.csv')], 'valid': [self.write('valid.csv')]}
    data['day_pattern'] = r'day_(\d+)'
    of_run = checkpoint.Checkpoints
    with mock.patch.object(of_run, 'save', autospec=True, side_effect=of_run.save) as saves:
      self.make_job(data).run()
      self.assertEqual(saves.call_count, 1, 'of the pass, the end of its day, and its validation')
      self.make_job(data).run()
      self.assertEqual(saves.call_count, 1, 'nothing was done')
    (last,) = glob.glob(f'{self.run_dir}/checkpoints/ckpt-*')
    (best,) = glob.glob(f'{self.run_dir}/best/ckpt-*')
    for name in checkpoint.check(best)['files']:  # damage to one is none to the other
      self.assertFalse(os.path.samefile(f'{last}/{name}', f'{best}/{name}'), name)
      with open(f'{last}/{name}', 'rb') as one, open(f'{best}/{name}', 'rb') as other:
        self.assertEqual(one.read(), other.read())

  def test_it_is_compared_with_its_checkpoint_not_with_a_config_that_saved_nothing(self):
    data = {'train': [self.write('a.csv')]}
    self.make_job(data).run()
    two = data | {'slots': [{'name': 'user'}]}
    with mock.patch.object(job.Stream, 'next', side_effect=KeyboardInterrupt):
      with self.assertRaises(KeyboardInterrupt):
        self.make_job(two).run()
    other = data | {'slots': [{'name': 'user'}, {'name': 'item', 'separator': '|'}]}
    with self.assertRaisesRegex(UserError, 'it holds another model'):
      self.make_job(other).run()

  def test_the_best_is_kept_though_the_job_died_before_it_was_linked(self):
    data = {'train': [self.write('a.csv')], 'valid': [self.write('valid.csv')]}
    with mock.patch.object(checkpoint, 'link', side_effect=KeyboardInterrupt):
      with self.assertRaises(KeyboardInterrupt):
        self.make_job(data).run()
    self.assertEqual(os.path.exists(f'{self.run_dir}/best'), False)
    self.make_job(data).run()
    (best,) = glob.glob(f'{self.run_dir}/best/ckpt-*')
    checkpoint.check(best)

  def test_a_schedule_goes_on_where_the_run_stood(self):
    data = {'train': [self.write('a.csv')]}  # 3 steps an epoch
    schedule = {'kind': 'cosine', 'period': 8, 'warmup_steps': 2}
    for epochs in (1, 3):
      self.make_job(data, train={'schedule': schedule, 'epochs': epochs}).run()
    told = [e['learning_rate_factor'] for e in self.events('train')]
    expected = [(1 + np.cos(np.pi * (step - 2) / 8)) / 2 for step in (2, 5, 8)]
    self.assertAllClose(told, expected, atol=1e-5)
    train = {'schedule': schedule}
    later = self.make_job(data, self.run_dir, train=train, run_dir=f'{self.folder}/later')
    later.run()
    self.assertEqual(later.step.steps, 12)
    self.assertAllClose(later.step.dense.rates.at(later.step.steps - 1), 1.0)  # its third step

  def test_a_bad_pass_is_set_aside(self):
    for name in ('day_1.csv', 'day_3.csv'):
      self.write(name)
    with open(f'{self.folder}/day_2.csv', 'w', encoding='utf-8'):
      pass
    data = {'train': [f'{self.folder}/day_*.csv'], 'day_pattern': r'day_(\d+)'}
    with self.assertRaisesRegex(BadPass, 'day_2.csv: the file is empty'):
      self.make_job(data).run()
    self.assertEmpty(self.events(), 'before anything was trained')
    self.assertEqual(0, self.make_job(data | {'max_refused_passes': 1}).run())
    self.assertEqual([e['pass'] for e in self.events('train')], ['day_1', 'day_3'])
    (told,) = self.events('pass')
    self.assertEqual((told['pass'], told['fate']), ('day_2', 'refused'))
    self.assertIn('the file is empty', told['reason'])
    with open(f'{self.run_dir}/ledger.jsonl', encoding='utf-8') as f:
      self.assertEqual([json.loads(line)['fate'] for line in f], ['trained', 'refused', 'trained'])

  def announce(self, name, labels):
    path = self.write(f'log/{name}', 0)
    with open(path, 'a', encoding='utf-8') as f:
      f.writelines(f'{i % 9},{name},{label}\n' for i, label in enumerate(labels))
    with open(f'{path}.done', 'w', encoding='utf-8'):
      pass

  def test_passes_of_one_class(self):
    """A stream goes on over passes without a click; a log in data.train is refused."""
    for day, labels in enumerate(('nn', 'n', 'ny', 'nnn', 'yy')):
      self.announce(f'day_{day}.csv', labels)
    texts = {'label_positive': 'y', 'day_pattern': r'day_(\d+)'}
    with self.assertRaisesRegex(BadPass, 'day_0.csv: every label .* is 0'):
      self.make_job(texts | {'train': [f'{self.folder}/log/*.csv']}).run()
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
      self.watch(texts)
    self.assertLen(self.events('train'), 5)
    self.assertEqual(shown.getvalue().count('every label in the column'), 1)
    with mock.patch.object(self, 'run_dir', f'{self.folder}/meant'):
      meant = texts | {'train': [f'{self.folder}/log/*.csv'], 'label_negative': 'n'}
      self.assertEqual(0, self.make_job(meant).run())
      self.announce('day_9.csv', 'nyx')  # a third text
      with self.assertRaisesRegex(BadPass, "day_9.csv:4: column 'label': found 'x'; wanted a text"):
        self.make_job(meant).run()
    with mock.patch.object(self, 'run_dir', f'{self.folder}/misread'):
      self.watch(texts | {'label_positive': 'Y', 'max_refused_passes': 9})
      told = {e['pass']: e['reason'] for e in self.events('pass')}
      self.assertEqual(sorted(told), ['day_2', 'day_4', 'day_9'])
      self.assertRegex(told['day_2'], "label_positive is 'Y'; 'y' is likely meant")

  def test_each_task_wants_both_classes(self):
    path = f'{self.folder}/tasks.csv'
    with open(path, 'w', encoding='utf-8') as f:
      f.write('user,item,click,buy,price\n')
      f.writelines(f'{i},0,{i % 2},{"no" if i % 2 else ""},1\n' for i in range(20))
    labels = [
      {'name': 'click'},
      {'name': 'buy', 'positive': 'yes'},
      {'name': 'price', 'loss': 'squared_error'},
    ]
    tasks = {label['name']: {} for label in labels}
    model = {'interactions': ['linear'], 'tasks': tasks}
    data = {'train': [path], 'labels': labels}
    wrong = (
      "every label in the column 'buy' is 0, which holds 10 × 'no'; data.labels.1.positive is "
      "'yes'; wanted both 0 and 1, or, .* as data.labels.1.negative"
    )
    with self.assertRaisesRegex(BadPass, wrong):
      self.make_job(data, model=model).run()
    labels[1]['negative'] = 'no'
    self.assertEqual(0, self.make_job(data, model=model).run())

  def test_an_empty_directory_is_set_aside_and_read_once_it_has_files(self):
    for day in ('day_1', 'day_3'):
      self.write(f'log/{day}/part-0.csv')
    os.makedirs(f'{self.folder}/log/day_2')
    for day in ('day_1', 'day_2', 'day_3'):
      self.write(f'log/{day}.done', samples=0)
    self.watch({'max_refused_passes': 1, 'late': 'train'})
    fates = [(e['pass'], e['fate']) for e in self.events('pass')]
    self.assertEqual(fates, [('day_2', 'refused')])
    self.assertEqual([e['pass'] for e in self.events('train')], ['day_1', 'day_3'])
    self.write('log/day_2/part-0.csv')
    self.watch({'max_refused_passes': 1, 'late': 'train'})
    self.assertEqual([e['pass'] for e in self.events('train')], ['day_1', 'day_3', 'day_2'])

  def test_the_next_pass_is_converted_while_one_is_trained_on(self):
    days = [self.write(f'day_{day}.csv', 100 * day) for day in (1, 2, 3)]
    one = self.make_job({'train': days})
    trains, converted = threading.Event(), []

    def prepare(cfg, raw_path, *args, **options):
      if raw_path != days[0]:
        self.assertTrue(trains.wait(60), 'converted before anything was trained')
      converted.append((raw_path, threading.current_thread() is threading.main_thread()))
      return prepare_pass(cfg, raw_path, *args, **options)

    def train(*args):
      trains.set()
      return step(*args)

    step = one.step.train
    with mock.patch.object(inputs, 'prepare_pass', prepare):
      with mock.patch.object(one.step, 'train', train):
        self.assertEqual(0, one.run())
    for day in days[1:]:
      self.assertEqual([in_front for path, in_front in converted if path == day], [False, True])
    first = {e['pass']: e for e in self.events('train')}
    self.assertEqual(list(first), ['day_1', 'day_2', 'day_3'])

    # The same model as of passes that were converted before.
    for day in days:
      name = os.path.basename(day).removesuffix('.csv')
      prepare_pass(one.cfg, day, f'{self.folder}/prepared/{name}')
    data = {'train': [f'{self.folder}/prepared/*'], 'format': 'prepared'}
    self.run_dir = f'{self.folder}/other'
    other = self.make_job(data)
    self.assertEqual(0, other.run())
    for e in self.events('train'):
      self.assertEqual(e['logloss'], first[e['pass']]['logloss'])
    states = [list(j.step.store.export_state()) for j in (one, other)]
    for a, b in zip(*states, strict=True):
      self.assertAllEqual(a['key'], b['key'])
      self.assertAllEqual(a['linear'], b['linear'])

  def test_exports_of_a_state_that_is_gone_give_way_to_a_new_chain(self):
    """After a crash or a return to an earlier checkpoint, what is served is what is trained."""
    days = [self.write(f'day_{day}.csv', 48) for day in range(1, 5)]
    data = {'train': [f'{self.folder}/day_*.csv'], 'day_pattern': r'day_(\d+)'}
    exports = f'{self.run_dir}/exports'
    lifecycle = {'base_threshold': None, 'delta_keep_days': None, 'delta_threshold': None}
    settings = {'checkpoint': {'every_passes': 1, 'keep': 9}, 'lifecycle': lifecycle}
    settings['model'] = {'interactions': ['linear', 'fm']}
    stores = [MemoryStore(), open_store(f'{self.folder}/store', '--to', writable=True)]
    self.addCleanup(stores[1].close)

    def written():
      return {os.path.basename(e.path): files.checksum(e.path) for e in chain.exports(exports)}

    def run(back_to, export, **more):
      """Goes back to the state after so many passes and trains. Returns what was printed."""
      for path in glob.glob(f'{self.run_dir}/checkpoints/ckpt-*'):
        if checkpoint.check(path)['step'] > 3 * back_to:
          files.remove(path)
      one = self.make_job(data, export=export, **(settings | more))
      with contextlib.redirect_stdout(io.StringIO()) as shown:
        self.assertEqual(0, one.run())
      now = one.step.store
      keys = np.sort(np.asarray(now.select('all')))
      wanted = now.pull(to_tensor(keys), train=False)
      for store in stores:
        while Publisher(exports, store).advance():
          pass
        rows = store.view().look_up(keys)
        self.assertTrue(rows.present.all())
        self.assertAllEqual(rows.linear, wanted.linear)
        self.assertAllEqual(rows.factors, wanted.factors)
        for name, value in store.view().dense.items():
          if name.endswith(':0'):
            (variable,) = [v for v in one.step.dense.model.variables if v.name in name]
            self.assertAllEqual(value, variable)
      return ' '.join(shown.getvalue().split())

    every_pass = {'base': True, 'delta_every_passes': 1}
    run(0, every_pass)
    first = written()
    self.assertLen(first, 8)
    # The same training again needs no other exports, though it began before them.
    self.assertNotIn('takes its place', run(2, every_pass))
    self.assertEqual(written(), first)
    # With another rate, each is another one.
    told = run(2, every_pass, train={'dense_optimizer': {'learning_rate': 0.3}})
    self.assertIn(
      '000005-delta is of a state or config that the run no longer has: 000009-delta takes its '
      'place and begins a new chain',
      told,
    )
    self.assertEqual(told.count('takes its place'), 3)
    self.assertContainsSubset(first, second := written())
    self.assertLen(second, 12)
    # Other data under the same name, and exports at other places.
    train = {'dense_optimizer': {'learning_rate': 0.3}}
    self.write('other.csv', 48)
    os.rename(f'{self.folder}/other.csv', days[3])
    told = run(3, {'delta_every_passes': 4}, train=train)
    self.assertEqual(told.count('takes its place and begins a new chain'), 1)
    self.assertNotIn('takes its place', run(4, {'delta_every_passes': 4}, train=train))
    self.assertLen(written(), 13)
    self.write('day_5.csv', 48)
    told = run(2, {'delta_every_passes': 5}, train=train)
    self.assertEqual(told.count('takes its place and begins a new chain'), 1)

  def test_the_model_begins_at_the_mean_label(self):
    """Rates are too low to learn, so the mean of the first pass with clicks is predicted."""
    log = pd.DataFrame({'user': range(200), 'item': 0, 'w': [1, 3] * 100, 'price': 7.0})
    log['click'] = [1, 0, 0, 0] * 25 + [0, 1, 0, 0] * 25
    log['buy'] = log['click'] * ([1, 1, 0, 0, 0, 0, 0, 0] * 25)
    labels = [{'name': 'click'}, {'name': 'buy'}, {'name': 'price', 'loss': 'squared_error'}]
    still = {'learning_rate': 1e-12}
    for kind, given in (('adam', {}), ('ftrl', {}), ('adam', {'given': 'click'})):
      run_dir = tempfile.mkdtemp(dir=self.folder)
      with self.subTest(kind, **given), mock.patch.object(self, 'run_dir', run_dir):
        for name, part in (('day_1', log.assign(click=0, buy=0)), ('day_2', log)):
          path = pathlib.Path(self.folder, 'log', f'{name}.csv')
          path.parent.mkdir(exist_ok=True)
          part.to_csv(path, index=False)
          pathlib.Path(f'{path}.done').touch()
        self.watch(
          {'labels': labels, 'weight': 'w'},
          model={'interactions': ['linear'], 'tasks': {'click': {}, 'buy': given, 'price': {}}},
          sparse={'tables': {'default': {'linear': still}}},
          train={'dense_optimizer': {'kind': kind} | still, 'progressive_validation': True},
        )
        first, second = (e['tasks'] for e in self.events('eval'))
        self.assertAllClose(first['price']['rmse'], 0, atol=1e-5)
        self.assertGreater(first['click']['logloss'], 0.6, 'nothing to begin at')
        for task in ('click', 'buy'):
          self.assertAllClose(second[task]['calibration'], 1, rtol=1e-5)

  def test_the_best_state_goes_back_with_the_run(self):
    path = self.write('a.csv', 48)
    data = {'train': [path], 'valid': [path]}  # so that each epoch is better
    metric = {'plateau': {'patience': 9, 'metric': 'logloss'}, 'epochs': 3}
    one = self.make_job(data, train=metric, checkpoint={'keep': 9})
    one.run()
    self.assertEqual(one.progress.best_step, 9)
    for path in glob.glob(f'{self.run_dir}/checkpoints/ckpt-*'):
      if not path.endswith('3'):
        files.remove(path)
    (kept,) = glob.glob(f'{self.run_dir}/best/ckpt-*')
    self.assertEndsWith(kept, '9')
    one = self.make_job(data, train=metric, checkpoint={'keep': 9})
    one.open_run()
    one.lock.release()
    (kept,) = glob.glob(f'{self.run_dir}/best/ckpt-*')
    self.assertEndsWith(kept, '3')
    # Where the best was between, none is left.
    checkpoint.link(glob.glob(f'{self.run_dir}/checkpoints/*3')[0], f'{self.run_dir}/best')
    with mock.patch.object(one.state.progress, 'best_step', 2):
      one.state.keep_best()
      self.assertIsNone(one.state.progress.best_step)
    self.assertEqual(os.path.exists(f'{self.run_dir}/best'), False)

  def test_a_damaged_best_state_is_brought_back_or_told(self):
    data = {'train': [self.write('a.csv')], 'valid': [self.write('valid.csv')]}
    train = {'epochs': 3, 'dense_optimizer': {'learning_rate': 0.3}}

    def run():
      """Runs the job, whose best state has damage; returns the step that it ends with."""
      for path in glob.glob(f'{self.run_dir}/best/*/rows-*.bin'):
        with open(path, 'r+b') as f:
          f.write(bytes([f.read(1)[0] ^ 1]) if not f.seek(0) else b'')
      one = self.make_job(data, train=train, checkpoint={'keep': 9})
      self.assertEqual(one.run(), 0)
      return one.step.steps

    self.assertEqual(run(), 3, 'the first epoch is the best')
    with self.assertLogs('absl', 'WARNING') as logs:
      self.assertEqual(run(), 3)
    self.assertIn('best/ckpt-000000003/rows-', '\n'.join(logs.output))
    (best,) = glob.glob(f'{self.run_dir}/best/*')
    list(checkpoint_rows.read_rows(best, checkpoint.check(best), range(SHARDS)))
    files.remove(f'{self.run_dir}/checkpoints/ckpt-000000003')
    with self.assertLogs('absl', 'WARNING') as logs:
      self.assertEqual(run(), 9)
    self.assertIn('the best state, of step 3, is gone: the best is chosen', '\n'.join(logs.output))
    self.assertEqual(os.path.exists(f'{self.run_dir}/best'), False)

  def test_a_failed_export_costs_no_checkpoint_and_is_written_later(self):
    days = [self.write(f'day_{day}.csv') for day in (1, 2)]
    data = {'train': days, 'day_pattern': r'day_(\d+)'}
    full = OSError(28, 'No space left on device')
    for export, module, name, error in (
      ({'saved_model': True}, saved_model.Serving, 'save', ValueError('no\nway')),
      ({'delta_every_passes': 2}, row_files.pq, 'ParquetWriter', full),
    ):
      self.run_dir = f'{self.folder}/{name}'
      with mock.patch.object(module, name, side_effect=error):
        with self.assertRaisesRegex(UserError, 'ValueError: no$|No space left'):
          self.make_job(data, export=export).run()
      passes = 2 if 'delta_every_passes' in export else 1
      with contextlib.redirect_stdout(io.StringIO()) as shown:
        self.make_job(data, export=export).run()
      self.assertIn(f'epoch 0 has trained {passes} passes', shown.getvalue())
      written = [done.kind for done in chain.exports(f'{self.run_dir}/exports')]
      self.assertEqual(written, ['saved_model'] * 2 if passes == 1 else ['delta'])
      self.assertEqual([e['day'] for e in self.events('day_end')], [1, 2])

  def test_every_loss_from_training_to_its_report(self):
    with open(f'{self.folder}/log.csv', 'w', encoding='utf-8') as f:
      f.write('user,item,click,price\n')
      f.writelines(f'{i % 9},{i % 5},{i % 3 == 0:d},{i % 9 / 3}\n' for i in range(200))
    splits = {split: [f'{self.folder}/log.csv'] for split in ('train', 'valid', 'test')}
    linear = {'interactions': ['linear']}
    price = {'name': 'price', 'loss': 'squared_error'}
    cases = {
      loss: ({'label': 'click'}, linear | {'loss': loss})
      for loss in ('log_loss', 'focal', 'fake_negative', 'squared_error')
    }
    cases['real'] = {'label': 'price'}, linear | {'loss': 'squared_error'}
    for name, labels in (
      ('click first', [{'name': 'click'}, price]),
      ('price first', [price, {'name': 'click'}]),
    ):
      cases[name] = {'labels': labels}, linear | {'tasks': {'click': {}, 'price': {}}}
    for name, (data, model) in cases.items():
      with self.subTest(name), mock.patch.object(self, 'run_dir', f'{self.folder}/{name}'):
        metric = 'rmse' if name in ('squared_error', 'real', 'price first') else 'logloss'
        train = {'plateau': {'stop_after': 1}, 'epochs': 3}
        one = self.make_job(splits | data, model=model, train=train)
        self.assertEqual(0, one.run())
        told = [line for line in rules.warnings(one.cfg) if 'focal' in line]
        self.assertLen(told, name == 'focal')
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown):
          self.assertEqual(one.close(), [], 'nothing of the reports is missing')
        self.assertRegex(shown.getvalue(), f'kept: epoch .*{metric} ')
        self.assertEqual('does not calibrate' in shown.getvalue(), name == 'focal')
        self.assertTrue(os.path.exists(f'{self.run_dir}/report.html'))
        (importance,) = self.events('importance')
        self.assertIn(metric, importance)
        for losses in importance['columns'].values():
          self.assertIn(metric, losses)

  def test_a_new_run_begins_with_the_best_state_of_another(self):
    train = self.write('a.csv')
    with open(train, encoding='utf-8') as f:
      header, *rows = f.read().split()
    with open(f'{self.folder}/valid.csv', 'w', encoding='utf-8') as f:
      f.writelines([f'{header}\n', *(f'{row[:-1]}{1 - int(row[-1])}\n' for row in rows)])
    # What is learnt is wrong for the validation: its best is that of the first epoch, 3 steps.
    for valid, kind, step in (([f'{self.folder}/valid.csv'], 'best', 3), ([], 'checkpoints', 9)):
      data, run_dir = {'train': [train], 'valid': valid}, f'{self.folder}/of_{kind}'
      self.make_job(data, run_dir=run_dir, train={'epochs': 3}).run()
      shown = io.StringIO()
      with contextlib.redirect_stdout(shown):
        later = self.make_job(data, run_dir, run_dir=f'{self.folder}/later_{kind}')
        later.run()
      self.assertEqual(later.progress.first_step, step)
      self.assertRegex(shown.getvalue(), f'begins with the model of {run_dir}/{kind}/ckpt')

  def test_a_run_goes_on_with_another_group(self):
    data = {'train': [self.write('a.csv')]}
    self.make_job(data).run()
    for group in ('user', 'item', None):
      epochs = {'user': 2, 'item': 3, None: 4}[group]
      self.make_job(data | {'group': group}, train={'epochs': epochs}).run()
    self.assertLen(self.events('train'), 4)

  def test_what_is_wrong_late_in_a_pass_is_told_when_it_is_its_turn(self):
    for day in (1, 2, 3):
      self.write(f'day_{day}.csv')
    with open(f'{self.folder}/day_2.csv', 'a', encoding='utf-8') as f:
      f.write('1,2,maybe\n')
    data = {'train': [f'{self.folder}/day_*.csv']}
    with self.assertRaisesRegex(BadPass, "day_2.csv:42: column 'label': found 'maybe'"):
      self.make_job(data).run()
    self.assertEqual([e['pass'] for e in self.events('train')], ['day_1'])
    self.assertEqual(0, self.make_job(data | {'max_refused_passes': 1}).run())
    (told,) = self.events('pass')
    self.assertEqual((told['pass'], told['fate']), ('day_2', 'refused'))
    self.assertEqual(self.prepared(), ['day_1', 'day_3'])

  def test_a_job_that_ends_gives_up_what_is_converted(self):
    days = [self.write(f'day_{day}.csv') for day in (1, 2)]
    os.makedirs(f'{self.run_dir}/prepared/train/day_9.unfinished123')
    one, begun = self.make_job({'train': days}), threading.Event()

    def prepare(cfg, raw_path, out_dir, labelled=True, *, on_block):
      def never_ends(samples):
        begun.set()
        while True:
          on_block(samples)
          threading.Event().wait(0.01)

      return prepare_pass(cfg, raw_path, out_dir, labelled, never_ends)

    def stop(*_):
      self.assertTrue(begun.wait(60))
      one.stop_request.signal = signal.SIGTERM
      return False

    def prepare_first(cfg, raw_path, *args, **options):
      first = raw_path == days[0]
      return (prepare_pass if first else prepare)(cfg, raw_path, *args, **options)

    with mock.patch.object(inputs, 'prepare_pass', prepare_first):
      with mock.patch.object(one, 'train_on', stop):
        self.assertNotEqual(0, one.run())
    self.assertEqual(self.prepared(), ['day_1'])
    self.assertEqual(0, self.make_job({'train': days}).run())
    self.assertEqual(self.prepared(), ['day_1', 'day_2'])

  def test_prepared_passes_are_deleted_behind_the_training(self):
    for day in (1, 2, 3):
      self.write(f'day_{day}.csv')
    data = {'train': [f'{self.folder}/day_*.csv'], 'keep_prepared_passes': 1}
    self.make_job(data, train={'epochs': 2}).run()
    self.assertEqual(self.prepared(), ['day_3'])

  def test_a_watching_job_evaluates_and_reports_at_the_end_of_each_day(self):
    for day in (1, 2):
      self.write(f'log/day={day}/part-0.csv', 30 + day)
      self.write(f'log/day={day}/_SUCCESS')
    data = {'day_pattern': r'day=(\d+)', 'keep_prepared_passes': 0}
    self.watch(data | {'valid': [self.write('valid.csv')], 'test': [self.write('test.csv')]})
    shown = [(e['event'], e.get('split') or e.get('pass') or e['day']) for e in self.events()]
    self.assertEqual(
      shown,
      [
        ('train', 'day=1/part-0'),
        ('day_end', 1),
        ('eval', 'valid'),
        ('eval', 'test'),
        ('train', 'day=2/part-0'),
      ],
    )
    self.assertEqual([e['day'] for e in self.events('eval')], [1, 1], 'the day that ended')
    self.assertEqual([e['waiting'] for e in self.events('train')], [1, 0])
    self.assertTrue(all(e['seconds_behind'] >= 0 for e in self.events('train')))
    # A pass that was refused waits no longer.
    for name, text in (('3/part-0.csv', 'user,item,label\n'), ('3/_SUCCESS', '')):
      os.makedirs(f'{self.folder}/log/day=3', exist_ok=True)
      with open(f'{self.folder}/log/day={name}', 'w', encoding='utf-8') as f:
        f.write(text)
    self.watch(data)
    (refused,) = self.events('pass')
    self.assertEqual((refused['fate'], refused['waiting']), ('refused', 0))
    self.assertEqual(refused['seconds_behind'], 0)
    self.assertTrue(all(e['disk_free'] > e['disk_bytes'] > 0 for e in self.events('day_end')))
    self.assertTrue(os.path.exists(f'{self.run_dir}/report.html'))
    self.assertEqual(self.prepared(), [])
    self.watch(data)
    self.assertLen(self.events('train'), 2, 'taken up again, nothing is trained twice')

  def test_a_dense_column_that_grows_a_thousandfold_ruins_no_day(self):
    rng, likes = np.random.default_rng(0), np.random.default_rng(2).normal(-1, 1, 9)
    for day in range(1, 6):
      user, price = rng.integers(9, size=1000), rng.normal(5, 1, 1000) * (1 if day == 1 else 1000)
      clicks = (rng.random(1000) < 1 / (1 + np.exp(-likes[user]))).astype(int)
      log = pd.DataFrame({'user': user, 'price': price, 'label': clicks})
      log.to_csv(f'{self.folder}/day_{day}.csv', index=False)
    data = {
      'train': [f'{self.folder}/day_*.csv'],
      'slots': [{'name': 'user'}],
      'dense': [{'name': 'price', 'transform': 'standardise'}],
    }
    model = {'interactions': ['linear', 'fm', {'dnn': {'hidden': [64, 32]}}]}
    for days in (r'day_(\d)', None):
      self.run_dir = f'{self.folder}/run_{days is None}'
      self.make_job(
        data | {'day_pattern': days}, model=model, train={'progressive_validation': True}
      ).run()
      over = [e['logloss'] / e['base_logloss'] for e in self.events('eval')[1:]]
      drifts = [e['beyond'] for e in self.events() if e['event'] == 'drift']
      run = read_run(self.run_dir)
      faults = {(f.code, f.where): f.figures for f in findings.faults(run)}
      self.assertIsNone(figures.drift(run), 'of bins, which the log has not')
      if days:
        self.assertAllLess(over, 1)
        self.assertEqual(drifts, [{'price': 1.0}] * 4)
        self.assertEqual(faults['left_range', 'price'], {'share': 1.0, 'when': 'day 5'})
      else:  # what is not a stream is taken as it is
        self.assertGreater(over[0], 5)
        self.assertEmpty(drifts)

  def test_metrics_of_a_sampled_log_are_of_the_log(self):
    data = {'train': [self.write('day_1.csv', 400), self.write('day_2.csv', 400)]}
    self.make_job(
      data | {'valid': data['train']},
      model={'interactions': ['linear'], 'negative_sampling_rate': 0.1},
      train={'epochs': 2, 'progressive_validation': True},
    ).run()
    in_log = [e for e in self.events() if e['event'] == 'train' or e.get('split') == 'next']
    self.assertLen(in_log, 8)
    for event in in_log:
      self.assertBetween(event['calibration'], 0.8, 1.25, event)
    self.assertLess(self.events()[-1]['calibration'], 0.4, 'predictions are corrected')

  def test_worse_than_a_constant_is_told_with_its_cause(self):
    data = {'train': [self.write('a.csv', 200)], 'valid': [self.write('b.csv', 200)]}
    wild = {'kind': 'rmsprop', 'learning_rate': 1.0}
    with self.assertLogs('absl', 'WARNING') as logs:
      self.make_job(data, sparse={'tables': {'default': {'linear': wild}}}).run()
    self.assertRegex(
      str(logs.output),
      'valid: logloss .* is worse than the .* of predicting .*sparse.tables.default.linear takes '
      'steps of rmsprop at learning_rate 1; wanted about 0.01',
    )
    self.assertRegex(
      str(logs.output),
      r'data.valid holds \d\d clicks, fewer than 200: chance ends training and',
    )

    few = {'kind': 'sgd', 'learning_rate': 90.0}  # of its kind, for a batch of 4,096
    with self.assertLogs('absl', 'WARNING') as logs:
      tables = {'default': {'linear': few}}
      self.make_job(
        data, sparse={'tables': tables}, run_dir=f'{self.folder}/few', train={'epochs': 1}
      ).run()
    self.assertRegex(str(logs.output), 'logloss .*: it was trained for 13 steps only; more epochs')
    self.assertNotIn('data.valid holds', str(logs.output), 'one epoch: there is nothing to choose')
    cfg, values = self.make_job(data).cfg, {'auc': 0.67, 'calibration': 3.0}
    for trained, code, figures_ in (
      (0.97, 'overfits_here', {'trained': 0.97, 'new': 0.67}),
      (0.70, 'other_sampling', {'calibration': 3.0}),
      (None, 'other_sampling', {'calibration': 3.0}),
    ):
      self.assertEqual(why_no_help(cfg, values, trained, 500), (code, '', figures_))
    chance = values | {'auc': 0.5, 'calibration': 1.3, 'ctr': 0.005, 'examples': 8000}
    why = why_no_help(cfg, chance, 0.56, 45, later_was_worse=True)
    self.assertEqual(why, ('few_clicks', '', {'clicks': 40.0}))

  def test_the_auc_of_one_class_is_not_known(self):
    clicks = f'{self.folder}/clicks.csv'
    with open(clicks, 'w', encoding='utf-8') as f:
      f.write('user,item,label\n1,2,1\n3,4,1\n')
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
      self.make_job({'train': [self.write('a.csv')], 'test': [clicks]}).run()
    self.assertRegex(shown.getvalue(), r'test +· clicks · logloss \d\.\d{4} · AUC -')
    (event,) = self.events('eval')
    self.assertNotIn('auc', event)

  def test_what_train_asks_for_in_vain_or_at_a_price_is_told(self):
    train = {
      'dense_optimizer': {'kind': 'ftrl'},
      'schedule': {'kind': 'step', 'period': 2},
    }
    model = {'interactions': [{'dnn': {'hidden': [4]}}]}
    one = self.make_job({'train': [self.write('a.csv')]}, model=model, train=train)
    (line,) = rules.warnings(one.cfg)
    self.assertRegex(line, "dense_optimizer.kind: found 'ftrl', .* train.schedule changes")

  def test_a_threshold_that_admits_almost_nothing_is_told(self):
    one = self.make_job({'train': [self.write('a.csv')]}, lifecycle={'admission_threshold': 1000})
    one.run()
    run = read_run(self.run_dir)
    counts = {'threshold': 1000, 'admitted': 0, 'features': 14, 'share': 0}
    wanted = ('few_admitted', 'admission_threshold', counts)
    self.assertEqual(findings.faults(run)[0], wanted)
    plain = one.cfg.model_copy(update={'lifecycle': config.Lifecycle()})
    told = findings.faults(dataclasses.replace(run, cfg=plain))
    self.assertNotIn('few_admitted', [finding.code for finding in told])

  def test_a_run_without_a_checkpoint_pins_nothing(self):
    data = {'train': [self.write('a.csv')]}
    with mock.patch.object(job.Inputs, 'prepared', side_effect=BadPass('bad')):
      with self.assertRaises(BadPass):
        self.make_job(data, sparse={'tables': {'default': {'width': 4}}}).run()
    self.make_job(data).run()
    self.make_job(data, lifecycle={'admission': 'none'}).run()  # the same, in other words
    with self.assertRaisesRegex(UserError, r'another model.*init_scale = 0\.01'):
      self.make_job(data, sparse={'tables': {'default': {'init_scale': 0.5}}}).run()

  def test_commands_leave_the_run_dir_as_it_is(self):
    data = {'train': [self.write('a.csv')], 'valid': [self.write('b.csv')]}
    self.make_job(data).run()

    def tree():
      return sorted(
        (path, os.stat(path).st_mtime_ns)
        for path in glob.glob(f'{self.run_dir}/**', recursive=True)
      )

    other, before = self.write('c.csv'), tree()
    with mock.patch.object(finished_run.runtime, 'start'):
      with (
        finished_run.open_run(self.run_dir) as first,
        finished_run.open_run(self.run_dir) as second,
      ):
        figures = []
        for one in (first, second):
          found = passes(one.cfg.data, [other], '--data')
          figures.append(dict(one.evaluation.figures(one.inputs.prepared(found, 'evaluate'))))
    self.assertEqual(figures[0], figures[1])
    self.assertEqual(tree(), before)

  def test_a_second_trainer_is_refused_and_nothing_of_the_first_is_touched(self):
    data = {'train': [self.write('a.csv')]}
    self.make_job(data).run()
    lock = RunLock(self.run_dir)
    lock.acquire()
    before = self.events()
    with self.assertRaisesRegex(UserError, f'process {os.getpid()} on host .* trains into it'):
      self.make_job(data | {'train': [self.write('a.csv', 50)]}).run()
    lock.release()
    self.assertEqual(self.events(), before)

  def test_samples_that_weigh_nothing(self):
    path = f'{self.folder}/none.csv'
    with open(path, 'w', encoding='utf-8') as f:
      f.write('user,item,label,w\n' + '1,2,1,0\n3,4,0,0\n' * 20)
    told = (
      "none.csv: every weight in the column 'w' is 0; wanted some above 0, or data.weight: null"
    )
    with self.assertRaisesRegex(BadPass, told):
      self.make_job({'train': [path], 'weight': 'w'}).run()
    with open(path, encoding='utf-8') as f, open(f'{self.folder}/some.csv', 'w') as some:
      some.write(f.read() + '5,6,0,1\n7,8,1,1\n')
    with self.assertLogs('absl', 'WARNING') as logs:
      data = {'train': [f'{self.folder}/some.csv'], 'valid': [path], 'weight': 'w'}
      self.assertEqual(0, self.make_job(data, train={'epochs': 2}).run())
    self.assertRegex(str(logs.output), 'data.valid has no logloss: all labels are alike')

  def test_a_validation_set_of_one_class(self):
    train, valid = f'{self.folder}/both.csv', f'{self.folder}/one.csv'
    for path, labels in ((train, (0, 1)), (valid, (0,))):
      with open(path, 'w', encoding='utf-8') as f:
        f.write(
          'user,item,label\n' + ''.join(f'{i % 5},2,{labels[i % len(labels)]}\n' for i in range(40))
        )
    with self.assertLogs('absl', 'WARNING') as logs:
      self.assertEqual(0, self.make_job({'train': [train], 'valid': [valid]}).run())
    told = 'all labels are 0, so they judge no model: hold out samples with labels of both classes'
    self.assertIn(f'On data.valid, {told}.', str(logs.output))
    self.assertNotIn('is worse than', str(logs.output))
    wanted = ('one_class', 'valid', {'label': 0, 'task': ''})
    faults = findings.faults(read_run(self.run_dir))
    self.assertIn(wanted, faults)
    self.assertNotIn('no_help', [fault.code for fault in faults])


if __name__ == '__main__':
  tf.test.main()
