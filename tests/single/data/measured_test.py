"""What a config leaves open is measured on its log: the batch size of a small one, and bins."""

import contextlib
import io
import os
import pathlib
import tempfile
from unittest import mock

import numpy as np
import pandas as pd
import tensorflow as tf
import yaml

from tests.support import commands, small
from tests.support.runs import begin
from tests.support.threads import on_threads
from trainer import api, config
from trainer.cli import resolve
from trainer.config import schema_text
from trainer.data import crosses, measured
from trainer.data.columns import lookup
from trainer.data.conversion import prepare_pass
from trainer.data.features import HASH_BITS
from trainer.data.measured import open_values, suitable
from trainer.data.prepared import PreparedPass
from trainer.errors import UserError
from trainer.storage.checkpoint_reader import CheckpointReader


def log(samples, seed):
  """A log whose clicks follow its items, with users that are seen a few times each."""
  rng = np.random.default_rng(seed)
  item = rng.integers(50, size=samples)
  click = rng.random(samples) < 0.05 + 0.4 * (item % 5 == 0)
  user = rng.integers(1000, size=samples)
  return pd.DataFrame({'user': user, 'item': item, 'click': click.astype(int)})


class LogTest(tf.test.TestCase):
  """The config of a log of users and items."""

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(tempfile.mkdtemp(dir=self.get_temp_dir()))
    self.tree = small.tree(
      run_dir=str(self.folder / 'run'),
      data={'train': [f'{self.folder}/train*'], 'label': 'click'},
      model={'interactions': ['linear', 'fm']},
    )


class BatchSizeTest(LogTest):
  def suitable(self):
    return suitable(small.checked(self.tree))[:2]

  def test_it_follows_the_number_of_samples_and_epochs(self):
    for samples, epochs, size in (
      (3, 20, 64),
      (3839, 20, 64),
      (3840, 20, 128),
      (20_000, 20, 512),
      (122_879, 20, 2048),
      (122_880, 20, 4096),
      (150_000, 20, 4096),
      (25_599, 1, 64),
      (25_600, 1, 128),
      (150_000, 1, 512),
      (150_000, 2, 1024),
    ):
      log(samples, 0).to_csv(self.folder / 'train.csv', index=False)
      self.tree['train'] = {'epochs': epochs}
      most = 4096 * max(30, 200 // epochs)
      self.assertEqual(self.suitable(), (size, min(samples, most)), (samples, epochs))

  def test_of_a_stream_more_passes_come(self):
    log(4000, 0).to_csv(self.folder / 'train.csv', index=False)
    self.tree['data']['watch'] = f'{self.folder}/incoming'
    self.assertEqual(self.suitable(), (256, 4000))

  def test_of_days_that_are_trained_on_once(self):
    self.tree['data']['day_pattern'] = r'(\d+)\.csv'
    for day in range(40):
      log(10_500, day).to_csv(self.folder / f'train{day}.csv', index=False)
    self.assertEqual(self.suitable(), (1024, 10_500))
    self.tree['train'] = {'epochs': 2}
    self.assertEqual(self.suitable(), (4096, 409_600))

  def announce(self, name, samples):
    folder = self.folder / 'incoming'
    folder.mkdir(exist_ok=True)
    log(samples, samples).to_csv(folder / name, index=False)
    (folder / f'{name}.done').touch()

  def begin_run(self):
    """Returns the batch size of a start, what it prints, and what ctr-resolve says of the size."""
    told, (config_file, run) = io.StringIO(), (self.folder / 'c.yaml', self.folder / 'run')
    small.write(config_file, self.tree)
    with contextlib.redirect_stdout(told):
      cfg = api.Source(str(config_file)).with_measured_values()
    before = resolve.resolved(str(config_file)).origin('train.batch_size')
    begin(cfg)
    after = resolve.resolved(str(run)).origin('train.batch_size')
    self.assertEqual(before, after)
    return cfg.train.batch_size, told.getvalue().strip(), after

  def test_a_stream_is_measured_on_what_is_there_when_it_begins(self):
    self.tree['data'] |= {'train': [], 'watch': f'{self.folder}/incoming'}
    self.announce('a.csv', 16_000)
    self.announce('b.csv', 15_224)
    (self.folder / 'incoming' / 'c.csv').write_text('user,item,click\n1,2,0\n' * 9000)
    self.assertEqual(self.suitable(), (256, 15_612), 'c.csv is not announced')
    (self.folder / 'incoming' / 'c.csv').write_text('other\n1\n')
    (self.folder / 'incoming' / 'c.csv.done').touch()
    self.assertEqual(self.suitable(), (256, 15_612), 'c.csv is refused')
    self.tree['data']['train'] = [f'{self.folder}/incoming/a.csv']
    self.assertEqual(self.suitable(), (256, 15_612), 'a.csv counts once')
    size, told, origin = self.begin_run()
    wanted = 'train.batch_size: 256, measured: a pass has 15,612 samples (4096 in a large one)'
    self.assertEqual((size, told, origin), (256, wanted, 'measured'))
    self.announce('d.csv', 150_000)
    wanted = 'train.batch_size: 256, measured when the run began'
    self.assertEqual(self.begin_run(), (256, wanted, 'measured'))
    dry_run = commands.run(
      '-m',
      'trainer.run',
      '--dry_run',
      '--config',
      self.folder / 'c.yaml',
      '--run_dir',
      self.folder / 'n',
    )
    self.assertIn('an epoch: about 354 steps of 512 samples', dry_run.stdout)

  def test_a_stream_without_a_pass_begins_with_the_default_and_keeps_it(self):
    self.tree['data'] |= {'train': [], 'watch': f'{self.folder}/incoming'}
    (self.folder / 'incoming').mkdir()
    (self.folder / 'incoming' / 'late.csv.done').touch()
    wanted = (
      f"train.batch_size: 4096, the default: data.watch: '{self.folder}/incoming' has no pass to "
      'measure it on; if a pass has fewer than 245,760 samples, a smaller one learns faster'
    )
    self.assertEqual(self.begin_run(), (4096, wanted, 'default'))
    self.announce('a.csv', 17_112)
    wanted = 'train.batch_size: 4096, the default, as when the run began'
    self.assertEqual(self.begin_run(), (4096, wanted, 'default'))

  def test_ranks_agree_though_they_see_different_passes(self):
    def begin(communicator):
      folder = self.folder / f'seen_by_{communicator.rank}'
      tree = self.tree | {'data': self.tree['data'] | {'train': [], 'watch': str(folder)}}
      source = api.Source(tree)
      return source.with_measured_values(False, None, communicator.on_first).train.batch_size

    for rank in range(2):
      folder = self.folder / f'seen_by_{rank}'
      folder.mkdir()
      log(16_000 * (1 + rank), 0).to_csv(folder / 'a.csv', index=False)
      (folder / 'a.csv.done').touch()
    self.assertEqual(on_threads(2, begin), [256, 256])

  def test_files_of_every_kind_count(self):
    log(9000, 0).to_parquet(self.folder / 'train_1.parquet')
    log(8000, 0).to_csv(self.folder / 'train_2.csv.gz', index=False)
    self.assertEqual(self.suitable(), (64, 17_000))

  def test_what_cannot_be_read_is_told_later(self):
    (self.folder / 'train.csv').write_text('other,columns\n1,2\n')
    self.assertEqual(self.suitable()[0], 4096)

  def test_a_log_of_4000_samples_is_learnt_from(self):
    log(4000, 0).to_csv(self.folder / 'train.csv', index=False)
    log(2000, 1).to_csv(self.folder / 'valid.csv', index=False)
    self.tree['data']['valid'] = [f'{self.folder}/valid.csv']
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
      run = api.fit(self.tree)
    self.assertIn(
      'train.batch_size: 128, measured: the log has 4,000 samples (4096 in a large one)',
      told.getvalue(),
    )
    self.assertRegex(told.getvalue(), ' valid · logloss')
    valid = run.metrics.query("event == 'eval' and split == 'valid'")
    self.assertLess(valid['logloss'].min(), 0.95 * valid['base_logloss'].iloc[0])
    self.assertGreater(valid['auc'].max(), 0.7)  # the true probabilities reach .74
    # What a run has measured it keeps, though the log grows.
    log(20_000, 0).to_csv(self.folder / 'train.csv', index=False)
    self.assertEqual(api.Source(self.tree).with_measured_values().train.batch_size, 128)
    for source, size in (
      (api.Source(self.tree, ['train.batch_size=32']), 32),
      (api.Source(self.tree, (), 'elsewhere'), 512),
    ):
      self.assertEqual(source.with_measured_values().train.batch_size, size)

  def test_what_a_run_measured_that_ended_at_a_mistake_is_not_kept(self):
    log(4000, 0).to_csv(self.folder / 'train.csv', index=False)
    with contextlib.redirect_stdout(io.StringIO()):
      with self.assertRaisesRegex(UserError, "no column 'usr'"):
        api.fit(self.tree, overrides=['data.slots.0.name=usr'])
      self.assertTrue((self.folder / 'run' / 'config.yaml').exists())
      self.assertEqual(api.fit(self.tree).cfg.train.batch_size, 64)


class RecipeTest(LogTest):
  """Which defaults a dnn without `hidden` has follows from the number of samples."""

  def setUp(self):
    super().setUp()
    self.tree['data'] |= {'valid': [f'{self.folder}/valid.csv'], 'dense': [{'name': 'price'}]}
    self.tree['model']['interactions'] = ['linear', 'dnn']
    self.enter_context(mock.patch.object(measured, 'MOST_OF_ENSEMBLE', 1000))
    self.write(999)

  def write(self, samples):
    for split, size in (('train', samples), ('valid', 300)):
      frame = log(size, 0).assign(price=np.arange(size))
      frame.to_csv(self.folder / f'{split}.csv', index=False)

  def config(self, **keys):
    with contextlib.redirect_stdout(io.StringIO()) as told:
      cfg = api.Source(self.tree, **keys).with_measured_values()
    self.told = told.getvalue()
    return cfg

  def test_it_follows_the_number_of_samples(self):
    cfg = self.config()
    self.assertEqual((cfg.model.recipe, cfg.train.plateau.patience), ('ensemble', 4))
    self.assertIn(
      'model.recipe: ensemble, measured for a log of less than 1,000 samples', self.told
    )
    self.write(1000)
    cfg = self.config()
    self.assertEqual((cfg.model.recipe, cfg.train.plateau.patience), ('plain', 1))
    self.assertIn('model.recipe: plain, measured for a log of at least 1,000 samples', self.told)
    self.assertLen(cfg.data.slots[2].made.boundaries, 31)
    self.assertEqual(cfg.origin('model.recipe'), 'measured')
    given = self.config(overrides=['model.recipe=ensemble'])
    self.assertEqual((given.model.recipe, given.train.plateau.patience), ('ensemble', 4))
    self.assertNotIn('recipe', self.told)
    for other in ('model.interactions=[linear, fm]', 'data.valid=[]'):
      self.assertIsNone(self.config(overrides=[other]).model.recipe, other)
      self.assertNotIn('recipe', self.told)

  def test_a_run_keeps_it(self):
    begin(cfg := self.config())
    self.write(1000)
    self.assertEqual(self.config(), cfg)
    self.assertIn('model.recipe: ensemble, measured when the run began', self.told)
    self.assertEqual(self.config(run_dir=str(self.folder / 'new')).model.recipe, 'plain')
    new = str(self.folder / 'new')
    with contextlib.redirect_stdout(io.StringIO()):
      of_other = api.Source(self.tree, run_dir=new).with_measured_values(init_from=cfg.run_dir)
    self.assertEqual(of_other.model.recipe, 'ensemble')

  def test_a_run_that_began_before_there_were_recipes_goes_on(self):
    begin(cfg := self.config())
    path = f'{cfg.run_dir}/config.yaml'
    with open(path, encoding='utf-8') as f:
      tree = yaml.safe_load(f)
    del tree['model']['recipe']
    with open(path, 'w', encoding='utf-8') as f:
      f.write(config.loading._stamped(tree))
    self.write(1000)
    found = self.config()
    self.assertIsNone(found.model.recipe)
    self.assertEqual(found.model_copy(update={'model': cfg.model}), cfg)
    self.assertEqual(found.model.interactions, cfg.model.interactions)

  def test_a_stream_has_its_own(self):
    self.tree['data']['day_pattern'] = r'(\d+)\.csv'
    log(500, 0).assign(price=1).to_csv(self.folder / 'train1.csv', index=False)
    (self.folder / 'train.csv').unlink()
    cfg = self.config()
    self.assertIn('model.recipe: stream, measured for a log trained on once', self.told)
    self.assertEqual(cfg.model.interactions[1].args, {'hidden': [256, 128]})
    rows = cfg.sparse.tables['default']
    self.assertAllClose((rows.linear.learning_rate, rows.factors.learning_rate), (0.05, 0.2))
    self.assertEqual((rows.factors.l2, cfg.data.counts, cfg.train.plateau), (0, False, None))
    own = 'sparse.tables.default.linear.learning_rate=0.2'
    self.assertEqual(
      self.config(overrides=[own]).sparse.tables['default'].linear.learning_rate, 0.2
    )
    for other in ('train.epochs=2', 'model.recipe=plain', 'model.interactions=[linear, fm]'):
      found = self.config(overrides=[other])
      self.assertNotIn('recipe', self.told)
      self.assertEqual(found.sparse.tables['default'].linear.learning_rate, 0.2)
    begin(cfg)
    self.assertEqual(self.config(), cfg)
    path = f'{cfg.run_dir}/config.yaml'  # as of a run that began before there was a recipe
    with open(path, encoding='utf-8') as f:
      tree = yaml.safe_load(f)
    tree['model']['recipe'] = None
    with open(path, 'w', encoding='utf-8') as f:
      f.write(config.loading._stamped(tree))
    found = self.config()
    self.assertEqual((found.model.recipe, found.model.interactions[1].args), (None, {}))

  def write_numbers(self, is_bent):
    rng = np.random.default_rng(0)
    for split, size in (('train', 4000), ('valid', 2000)):
      x, item = rng.normal(size=(size, 8)), rng.integers(5, size=size)
      z = 4 * np.abs(x[:, 0]) - 4 if is_bent else x[:, 0]
      frame = pd.DataFrame(x, columns=[f'x{i}' for i in range(8)]).assign(user=item, item=item)
      frame['click'] = (rng.random(size) < 1 / (1 + np.exp(-z))).astype(int)
      frame.to_csv(self.folder / f'{split}.csv', index=False)
    self.tree['data']['dense'] = [{'name': f'x{i}'} for i in range(8)]
    self.tree['data']['counts'] = False

  def test_a_plain_run_finds_out_whether_bins_help(self):
    self.write_numbers(is_bent=True)
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
      run = api.fit(self.tree, ['train.epochs=1'])
    self.assertRegex(
      told.getvalue(), r'bins: 32, measured \(logloss 0.\d* better with bins, after 2 epochs'
    )
    self.assertLen(run.cfg.data.slots, 10)
    self.assertFalse((self.folder / 'run' / 'prepared' / 'race').exists())
    self.write_numbers(is_bent=False)
    with contextlib.redirect_stdout(told):
      again = api.fit(self.tree, ['train.epochs=2'])
      other = api.fit(self.tree, ['train.epochs=1'], str(self.folder / 'other'))
    self.assertLen(again.cfg.data.slots, 10)
    self.assertRegex(
      told.getvalue(), r'bins: null, measured \(logloss 0.\d* worse with bins, after 2 epochs'
    )
    self.assertEqual((other.cfg.data.dense_bins, len(other.cfg.data.slots)), (None, 2))
    given = api.fit(
      self.tree,
      ['train.epochs=1', 'data.dense_bins=null', 'model.recipe=plain'],
      str(self.folder / 'given'),
    )
    frame = self.folder / 'valid.csv'
    self.assertAllEqual(other.predict(frame), given.predict(frame))  # a race leaves no trace

  def test_prepared_passes_suit_the_run(self):
    self.write(100_000)
    file = small.write(self.folder / 'config.yaml', self.tree)
    out = str(self.folder / 'prepared')
    told = commands.run('-m', 'trainer.cli.prepare', '--config', file, '--out', out).stdout
    self.assertIn('model.recipe: plain, measured', told)
    prepared = [f'data.{split}=[{out}/{split}/*]' for split in ('train', 'valid')]
    cfg = self.config(overrides=['data.format=prepared', *prepared])
    self.assertEqual(cfg.model.recipe, 'plain')
    batch = next(PreparedPass(f'{out}/train/train', cfg).batches(4))
    self.assertAllEqual(batch.keys >> HASH_BITS, [1, 2, 3] * 4)


class CrossesTest(LogTest):
  """A plain run finds the crosses of slots that tell more than their parts."""

  def setUp(self):
    super().setUp()
    self.enter_context(mock.patch.object(measured, 'MOST_OF_ENSEMBLE', 1000))
    self.tree['data'] |= {
      'valid': [f'{self.folder}/valid.csv'],
      'slots': [{'name': name} for name in ('a', 'b', 'c', 'd')],
      'counts': False,
    }
    self.tree['data']['slots'] += [{'name': 'tags', 'separator': '|'}]
    self.tree['model']['interactions'] = ['linear', 'dnn']

  def write(self, columns):
    """Clicks follow the combination of the values of `columns`, and no value alone."""
    rng = np.random.default_rng(0)
    signs = rng.choice([-2, 2], size=[5] * len(columns))
    for split, size in (('train', 8000), ('valid', 4000)):
      frame = pd.DataFrame(rng.integers(5, size=[size, 4]), columns=['a', 'b', 'c', 'd'])
      z = signs[tuple(frame[c] for c in columns)] if columns else np.zeros([size])
      frame['click'] = (rng.random(size) < 1 / (1 + np.exp(-z))).astype(int)
      frame['tags'] = rng.choice(['x', 'x|y', ''], size=size)  # so samples differ in features
      frame.to_csv(self.folder / f'{split}.csv', index=False)

  def found(self):
    return crosses.found(small.checked(self.tree))

  def test_they_are_found(self):
    self.write(['a', 'c'])
    self.assertEqual(self.found(), [['a', 'c']])
    self.tree['data']['slots'] += [{'name': 'mine', 'from': {'cross': ['c', 'a']}}]
    self.assertEqual(self.found(), [])
    self.write([])
    self.assertEqual(self.found(), [])
    (self.folder / 'valid.csv').write_text('click,a,b,c,d,tags\n')
    self.assertEqual(self.found(), [])

  def test_one_may_grow(self):
    self.write(['a', 'b', 'd'])
    found = self.found()
    self.assertIn(['a', 'b', 'd'], found)
    self.assertLessEqual(len(found), crosses.MOST_CROSSES)

  def test_a_run_keeps_those_that_help(self):
    self.write(['a', 'c'])
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
      run = api.fit(self.tree, ['train.epochs=1'])
    line = r'data.crosses: \[\["a", "c"\]\], measured \(logloss 0.\d* better with a x c, after 2'
    self.assertRegex(told.getvalue(), line)
    self.assertEqual(run.cfg.data.crosses, [['a', 'c']])
    self.assertEqual([slot.name for slot in run.cfg.data.slots[4:]], ['tags', 'a x c'])
    self.write(['b', 'd'])
    with contextlib.redirect_stdout(told):
      again = api.fit(self.tree, ['train.epochs=2'])
      given = api.fit(self.tree, ['train.epochs=1', 'data.crosses=[]'], str(self.folder / 'given'))
    self.assertIn("data.crosses: [['a', 'c']], measured when the run began", told.getvalue())
    self.assertEqual(again.cfg.data, run.cfg.data)
    self.assertLen(given.cfg.data.slots, 5)
    self.assertEqual(told.getvalue().count('after 2 epochs'), 1)

  def test_a_race_that_cannot_judge_leaves_the_default(self):
    self.write(['a', 'c'])
    cfg = config.resolve(small.checked(self.tree), {'model.recipe': 'plain'})
    for results in ((None,), (-0.5, None)):
      race = mock.Mock(side_effect=results)
      with mock.patch.object(measured, 'measured', wraps=measured.measured) as measures:
        chosen, (line,) = measured._raced(cfg, ['data.crosses'], race)
      self.assertEqual((chosen, measures.call_count), ({'data.crosses': []}, 2))
      self.assertEqual(line, 'data.crosses: [], the default: data.valid cannot judge')

  def test_a_stream_that_begins_with_a_plain_run_keeps_its_bins_and_crosses(self):
    self.write(['a', 'c'])
    self.tree['data'] |= {'slots': [{'name': 'a'}, {'name': 'c'}], 'dense': [{'name': 'b'}]}
    chosen = {'model.recipe': 'plain', 'data.dense_bins': 32, 'data.crosses': [['a', 'c']]}
    plain = config.resolve(small.checked(self.tree), chosen)
    begin(config.resolve(plain, measured.measured(plain)[0]))
    log = pd.read_csv(self.folder / 'train.csv').assign(b=7)
    log.to_csv(self.folder / 'train1.csv', index=False)
    days = [f'data.train=[{self.folder}/train1.csv]', r'data.day_pattern=(\d+)\.csv']
    new = str(self.folder / 'new')
    with contextlib.redirect_stdout(io.StringIO()):
      cfg = api.Source(self.tree, days, new).with_measured_values(init_from=plain.run_dir)
      begin(cfg)
      again = api.Source(self.tree, days, new).with_measured_values()
    self.assertEqual((cfg.model.recipe, cfg.data.crosses), ('stream', [['a', 'c']]))
    self.assertEqual(cfg.data.slots[2].made.boundaries, [1, 2, 3, 4])
    self.assertEqual(again, cfg)
    with contextlib.redirect_stdout(io.StringIO()) as told:
      begin(api.Source(self.tree, days, f'{new}er').with_measured_values())
      api.Source(self.tree, days, f'{new}er').with_measured_values()
    self.assertNotIn('crosses', told.getvalue())


class ManySlotsTest(LogTest):
  def test_the_first_epoch_of_500_slots_is_better_than_a_constant(self):
    rng, names = np.random.default_rng(0), [f's{i}' for i in range(500)]
    for split, size in (('train', 6000), ('valid', 2000)):
      x = rng.integers(4, size=(size, 500))
      z = 0.4 * (x[:, :100] > 1).sum(1) - 22
      frame = pd.DataFrame(x, columns=names).assign(click=rng.random(size) < 1 / (1 + np.exp(-z)))
      frame.astype({'click': int}).to_csv(self.folder / f'{split}.csv', index=False)
    self.tree['data'] |= {'slots': [{'name': n} for n in names]}
    self.tree['data'] |= {'valid': [f'{self.folder}/valid.csv']}
    self.tree |= {'model': {'interactions': ['linear', 'fm', 'dnn']}}
    constant = -np.log(np.abs(1 - frame['click'] - frame['click'].mean())).mean()
    given = ['train.epochs=1', 'train.batch_size=256']
    importance = {'examples': 0, 'columns': {}}  # of 500 slots it takes long
    with mock.patch('trainer.tools.importance.column_importance', return_value=importance):
      run = api.fit(self.tree, given)
    (epoch,) = run.metrics.query("event == 'eval'")['logloss']
    self.assertEqual(run.cfg.model.recipe, 'ensemble')
    self.assertLess(epoch, constant)


class FeaturesTest(LogTest):
  def setUp(self):
    super().setUp()
    self.tree['data']['slots'] += [
      {'name': 'tags', 'separator': '|'},
      {'name': 'seen', 'separator': '|', 'shares': 'item', 'sequence': {'max_length': 5}},
    ]
    self.tree['train'] = {'batch_size': 512}
    rng = np.random.default_rng(0)
    frame, self.features = log(2000, 0), 0
    frame['user'] = frame['user'].where(rng.random(2000) < 0.9)
    for name, prefix, most in (('tags', 't', 36), ('seen', '', 9)):
      counts = rng.integers(0, most, 2000)
      frame[name] = ['|'.join(f'{prefix}{i}' for i in rng.integers(50, size=c)) for c in counts]
      self.features += 2000 if name == 'seen' else counts.sum()  # a history counts as one
    self.features += frame['user'].notna().sum() + 2000
    self.frame = frame
    frame.to_csv(self.folder / 'train.csv', index=False)

  def config(self, **keys):
    with contextlib.redirect_stdout(io.StringIO()) as self.told:
      return api.Source(self.tree, **keys).with_measured_values()

  def test_the_learning_rates_follow_the_mean_of_the_first_samples(self):
    cfg, mean = self.config(), self.features / 2000
    self.assertBetween(mean, 18, 22)
    self.assertAllClose(cfg.sparse.features_per_sample, mean, atol=0.05)
    wanted = 0.2 * (10 / cfg.sparse.features_per_sample) ** 1.5
    for _, rule, _ in cfg.sparse.optimizers():
      self.assertAllClose(rule.learning_rate, wanted)
    self.assertIn(
      f'features_per_sample: {cfg.sparse.features_per_sample}, measured', self.told.getvalue()
    )
    self.assertEqual(cfg.origin('sparse.features_per_sample'), 'measured')
    prepare_pass(cfg, f'{self.folder}/train.csv', f'{self.folder}/prepared')
    self.tree['data'] |= {'train': [f'{self.folder}/prepared'], 'format': 'prepared'}
    self.assertEqual(self.config().sparse.features_per_sample, cfg.sparse.features_per_sample)

  def test_a_run_keeps_it(self):
    found = self.config().sparse.features_per_sample
    begin(self.config())
    self.frame['tags'] = 'one'
    self.frame.to_csv(self.folder / 'train.csv', index=False)
    self.assertEqual(self.config().sparse.features_per_sample, found)
    self.assertLess(self.config(run_dir=str(self.folder / 'new')).sparse.features_per_sample, 10)
    given = self.config(overrides=['sparse.features_per_sample=40'])
    self.assertAllClose(given.sparse.tables['default'].linear.learning_rate, 0.025)

  def test_a_run_keeps_how_it_adds_up_lists_of_shared_features(self):
    cfg = self.config()
    self.assertEqual(cfg.sparse.shared_lists, 'mean')
    self.assertEqual(cfg.origin('sparse.shared_lists'), 'default')
    begin(cfg)
    self.assertEqual(self.config().sparse.shared_lists, 'mean')
    # A run that began before there was the key goes on as it began.
    self.tree['run_dir'] = str(self.folder / 'earlier')
    begin(small.checked(self.tree))
    self.assertIsNone(self.config().sparse.shared_lists)
    self.tree['run_dir'] = str(self.folder / 'new')
    self.tree['sparse'] = {'shared_lists': 'sum'}
    cfg = self.config()
    self.assertEqual(cfg.sparse.shared_lists, 'sum')
    # Then each feature of a history counts.
    self.assertAllClose(cfg.sparse.features_per_sample, self.features / 2000 + 1.5, atol=1.5)
    self.tree['data']['slots'].pop()
    self.tree['sparse'], self.tree['run_dir'] = {}, str(self.folder / 'newer')
    self.assertIsNone(self.config().sparse.shared_lists)

  def test_a_run_that_did_not_measure_it_goes_on_without(self):
    for change, samples in (({'batch_size': 512}, 0), ({'batch_size': 256}, 2000)):
      self.frame[:samples].to_csv(self.folder / 'train.csv', index=False)
      self.tree['train'] = change
      cfg = self.config()
      self.assertIsNone(cfg.sparse.features_per_sample)
      self.assertAllClose(cfg.sparse.tables['default'].linear.learning_rate, 0.2)
      self.assertEqual(cfg.origin('sparse.features_per_sample'), 'default')
      begin(cfg)

  def test_at_least_the_number_of_slots_and_none_where_each_holds_one(self):
    self.frame[['tags', 'seen']] = ''
    self.frame.to_csv(self.folder / 'train.csv', index=False)
    self.assertEqual(self.config().sparse.features_per_sample, 4)
    self.tree['data']['slots'] = [{'name': 'user'}, {'name': 'item'}]
    self.assertIsNone(self.config().sparse.features_per_sample)


class BinsTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(tempfile.mkdtemp(dir=self.get_temp_dir()))
    bins = {
      'bin': {'bins': 'x', 'quantiles': 8},
      'wide': {'bins': 'x', 'widths': 4},
      'ratio': {'bins': 'half', 'quantiles': 3},
    }
    data = {'train': [f'{self.folder}/day_*'], 'label': 'click', 'day_pattern': r'day_(\d)'}
    data['slots'] = [{'name': n, 'from': b} for n, b in bins.items()]
    data['dense'] = [{'name': 'half', 'from': {'expression': 'x / 2'}}]
    model = {'interactions': ['linear', 'fm']}
    self.tree = small.tree(run_dir=str(self.folder / 'run'), data=data, model=model)
    rng = np.random.default_rng(0)
    self.x = np.where(rng.random(2000) < 0.4, 0, rng.normal(3, 2, 2000)).astype(np.float32)
    self.write('day_1.csv', self.x)
    self.write('day_2.csv', 100 + self.x)

  def write(self, name, x):
    texts = np.where(np.arange(len(x)) % 7 == 0, '', x.astype(str))
    frame = pd.DataFrame({'x': texts, 'click': np.arange(len(x)) % 2})
    frame.to_csv(self.folder / name, index=False)

  def config(self):
    return small.checked(self.tree)

  def of(self, cfg):
    return {slot.name: slot.made.boundaries for slot in cfg.data.slots}

  def test_quantiles_and_widths_of_the_first_pass(self):
    found = dict(zip(('bin', 'wide', 'ratio'), open_values(self.config()).values()))
    present = np.sort(self.x[np.arange(2000) % 7 != 0]).astype(np.float64)
    counts = np.bincount(np.searchsorted(np.float32(found['bin']), np.float32(present), 'right'))
    # 0 is a bin of its own. The other values share six bins, one of which 0 cuts in two.
    of_zero = found['bin'].index(0.0) + 1
    self.assertEqual(counts[of_zero], (present == 0).sum())
    others = np.delete(counts, of_zero)
    self.assertLen(others, 7)
    self.assertContainsSubset(np.float32(found['bin']), self.x)
    share = (present != 0).sum() / 6
    self.assertAllClose(others[: of_zero - 1], np.full(of_zero - 1, share), atol=1.01)
    self.assertAllClose(others[of_zero + 1 :], np.full(6 - of_zero, share), atol=1.01)
    self.assertNear(others[of_zero - 1] + others[of_zero], share, 2)
    wanted = present.min() + (present.max() - present.min()) * np.arange(1, 4) / 4
    self.assertAllClose(found['wide'], wanted, rtol=1e-6)
    self.assertEqual(found['ratio'][0], 0)

  def test_a_frequent_value_leaves_the_other_bins_to_the_others(self):
    often, rare = [0] * 90 + [3] * 4 + [5, 6, 7, 8, 9, 9], [0] * 9 + [1] + [2] * 9 + [3] + [4] * 9
    for x, bins, wanted in (
      (often, 2, [3]),
      (often, 4, [3, 5, 8]),
      (often, 100, [3, 5, 6, 7, 8, 9]),
      (rare, 4, [2, 3, 4]),
      ([7, 7, 7], 4, [7]),
    ):
      self.tree['data']['slots'] = [{'name': 'bin', 'from': {'bins': 'x', 'quantiles': bins}}]
      del self.tree['data']['dense'][:]
      pd.DataFrame({'x': x, 'click': 0}).to_csv(self.folder / 'day_1.csv', index=False)
      self.assertEqual(list(open_values(self.config()).values()), [wanted])

  def test_a_run_keeps_what_it_measured(self):
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
      run = api.fit(self.tree)
    bins = self.of(run.cfg)
    self.assertIn(
      f"data.slots.0.from.boundaries of 'bin': {bins['bin']}, measured", told.getvalue()
    )
    made = CheckpointReader(run.run_dir).made()
    self.assertIn(str(bins['wide']), made.loc['wide', 'from'])
    resolved = resolve.explained(resolve.resolved(run.run_dir))
    self.assertIn(f'boundaries: {bins["bin"]}  # measured\n', resolved)
    changed = list(schema_text.changed(resolve.resolved(run.run_dir)))
    self.assertIn(f'data.slots.0.from.boundaries: {bins["bin"]}  # measured', changed)
    # Written out, they are what they are anyway.
    self.tree['data']['slots'][0]['from']['boundaries'] = bins['bin']
    self.write('day_0.csv', 5 * self.x)
    self.assertEqual(self.of(api.Source(self.tree).with_measured_values()), bins)
    frame = pd.DataFrame({'x': self.x[:50]})
    self.assertLen(run.predict(frame), 50)
    # Another run measures its own log, or takes those of the run that it begins with.
    del self.tree['data']['slots'][0]['from']['boundaries']
    other = api.Source(self.tree, (), str(self.folder / 'other'))
    self.assertNotEqual(self.of(other.with_measured_values())['wide'], bins['wide'])
    self.assertEqual(self.of(other.with_measured_values(init_from=run.run_dir)), bins)
    small.write(self.folder / 'other.yaml', self.tree)
    flags = '--config', self.folder / 'other.yaml', '--run_dir', self.folder / 'other'
    command = '-m', 'trainer.run', '--dry_run', '--init_from', run.run_dir, *flags
    told = commands.run(*command).stdout
    self.assertIn(f'boundaries: {bins["wide"]}, as in {run.run_dir}', told)
    flags = '--config', self.folder / 'other.yaml', '--init_from', 'absent'
    done = commands.run('-m', 'trainer.run', '--dry_run', *flags)
    wanted = 'error: --init_from absent: no such directory; wanted the run_dir of a run\n'
    self.assertEqual((done.returncode, done.stderr), (2, wanted))

  def test_prepared_passes_bring_theirs(self):
    bins = open_values(self.config())
    cfg = config.resolve(small.checked(self.tree), bins)
    prepare_pass(cfg, f'{self.folder}/day_2.csv', f'{self.folder}/prepared')
    self.tree['data'] |= {'train': [f'{self.folder}/prepared'], 'format': 'prepared'}
    self.assertEqual(open_values(self.config()), bins)
    self.tree['data']['slots'][0]['from']['quantiles'] = 9
    with self.assertRaisesRegex(UserError, "slot 'bin' is made of .*wants .*'quantiles': 9"):
      open_values(self.config())

  def test_tables_of_lookups(self):
    rows = {'x': [1, 2.0, 3.0], 'kind': ['a', None, 'ü'], 'price': [1.5, 2.0, None]}
    pd.DataFrame(rows).to_csv(self.folder / 'items.csv', index=False)
    pd.DataFrame(rows).to_csv(self.folder / 'items.txt', index=False, sep=';')
    pd.DataFrame(rows).to_parquet(self.folder / 'items.parquet')
    found = []
    for suffix in ('csv', 'txt', 'parquet'):
      path = str(self.folder / f'items.{suffix}')
      kind = {'lookup': 'x', 'table': path, 'value': 'kind'}
      price = {'lookup': 'id', 'table': path, 'value': 'price', 'key': 'x'}
      self.tree['data'] |= {
        'slots': [
          {'name': 'kind', 'from': kind},
          {'name': 'b', 'from': {'bins': 'p', 'widths': 2}},
        ],
        'dense': [{'name': 'p', 'from': price}],
      }
      rows = ''.join(f'{i % 5}.0,{i % 6},{i % 2}\n' for i in range(60))
      (self.folder / 'day_1.csv').write_text('x,id,click\n' + rows)
      (self.folder / 'day_2.csv').unlink(missing_ok=True)
      found.append(open_values(self.config()))
    self.assertEqual(found, [found[0]] * 3)
    self.assertEqual(found[0]['data.slots.1.from.boundaries'], [1.75])
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
      run = api.fit(self.tree)
    self.assertIn(f"'p': its look-up table {path}, read", told.getvalue())
    frame = pd.DataFrame({'x': ['1', '9'], 'id': [2, 7]})
    before = run.predict(frame)
    self.assertCountEqual(run.features('kind')['text'], ['a', 'ü'])
    changed = list(schema_text.changed(resolve.resolved(run.run_dir)))
    self.assertIn('data.slots.1.from.boundaries: [1.75]  # measured', changed)
    (content,) = [line for line in changed if line.startswith('data.slots.0.from.content: ')]
    self.assertRegex(content, "content: '?[0-9a-f]{8}'?  # measured$")  # a checksum
    # The run has a copy, and says that the file is another now.
    pd.DataFrame({'x': [1], 'kind': ['b'], 'price': [7]}).to_parquet(path)
    with contextlib.redirect_stdout(told):
      self.assertEqual(api.Source(self.tree).with_measured_values(), run.cfg)
    self.assertIn('items.parquet has changed since', told.getvalue())
    (self.folder / 'items.parquet').unlink()
    self.assertAllEqual(api.load(run.run_dir).predict(frame), before)
    missing = r'^data.slots.0.from.table: .*/items.{}: no such file$'
    with self.assertRaisesRegex(UserError, missing.format('parquet')):
      open_values(self.config())
    self.tree['data']['slots'] = [
      {'name': 'k', 'from': kind | {'table': f'{self.folder}/items.csv'}}
    ]
    (self.folder / 'items.csv').unlink()
    with self.assertRaisesRegex(UserError, missing.format('csv')):
      open_values(self.config())
    os.mkfifo(self.folder / 'items.csv')
    with self.assertRaisesRegex(UserError, 'items.csv: is a device, a pipe or a socket; wanted'):
      open_values(self.config())
    (self.folder / 'items.csv').unlink()
    (self.folder / 'items.csv').write_text('x,kind\n1,a\n1.0,b\n')
    with self.assertRaisesRegex(UserError, "items.csv: the key '1' is there twice"):
      open_values(self.config())
    for row, found in ((b'gr\xfcn,a', r'gr\\xfcn'), (b'2,\xff', r'\\xff')):
      (self.folder / 'items.csv').write_bytes(b'x,kind\n1,a\n' + row + b'\n')
      told = f"items.csv:3: column '(x|kind)': found '{found}'; wanted text in UTF-8"
      with self.assertRaisesRegex(UserError, told):
        open_values(self.config())
    # A text that is no number is told with its place in the table, unless it stands for missing.
    (self.folder / 'items.csv').write_text('x,kind,price\n1,a,2.5\n2,b,unkonwn\n')
    price = price | {'table': f'{self.folder}/items.csv'}
    self.tree['data']['dense'] = [{'name': 'p', 'from': price}]
    with self.assertRaisesRegex(
      UserError, "items.csv: column 'price' beside '2': found 'unkonwn'; wanted a finite number"
    ):
      open_values(self.config())
    self.tree['data']['missing_values'] = ['unkonwn']
    content = open_values(self.config())['data.dense.0.from.content']
    self.assertEqual(content, lookup.encoded({'1': '2.5', '2': ''}))
    self.tree['data']['slots'][0]['from']['value'] = 'knd'
    with self.assertRaisesRegex(UserError, r"items.csv:1: no column 'knd' \(data.slots.0.*'kind'"):
      open_values(self.config())

  def test_what_cannot_be_measured(self):
    with self.assertRaisesRegex(UserError, "bins of 'x': boundaries is left open"):
      prepare_pass(self.config(), f'{self.folder}/day_1.csv', f'{self.folder}/prepared')
    (self.folder / 'day_0.csv').write_text('x,click\n,1\n,0\n')
    with self.assertRaisesRegex(UserError, "day_0.csv: slot 'bin': found no number in the colum"):
      open_values(self.config())
    data = {'slots': [{'name': 'x'}], 'dense': [{'name': 'x'}], 'dense_bins': 4}
    self.assertEqual(
      open_values(small.config(self.tree, data=data)), {'data.slots.1.from.boundaries': [0.0]}
    )
    self.tree['data'] |= {'train': [], 'watch': str(self.folder)}
    with self.assertRaisesRegex(UserError, 'slots.0.from.boundaries: found no pass in .* wanted'):
      open_values(self.config())
    (self.folder / 'day_2.csv.done').touch()
    self.assertGreater(min(open_values(self.config())['data.slots.1.from.boundaries']), 90)


if __name__ == '__main__':
  tf.test.main()
