"""What is said of a checkpoint, of its slots and of single features: against the rows."""

import json
import pathlib
import shutil
import tempfile

import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

from examples.synthetic_log import synthesize
from tests.support import commands, runs, small
from trainer import api, config
from trainer.data.features import hash_keys
from trainer.errors import UserError
from trainer.storage.checkpoint_reader import CheckpointReader
from trainer.tools import figures, report
from trainer.tools.runs import read_run

ROOT = pathlib.Path(__file__).resolve().parents[3]


class CheckpointReaderTest(tf.test.TestCase):
  @classmethod
  def setUpClass(cls):
    """Trains on a log whose clicks follow `strong` much, `weak` little and `noise` not at all."""
    super().setUpClass()
    folder = tempfile.mkdtemp()
    rng = np.random.default_rng(0)
    for name in ('day_0', 'day_1', 'test'):
      strong, weak, noise = rng.integers(0, 20, [3, 3000])
      logit = 0.3 * (strong - 10) + 0.05 * (weak - 10)
      click = rng.random(3000) < 1 / (1 + np.exp(-logit))
      rows = [f'{a},{b},{c},{d:d}\n' for a, b, c, d in zip(strong, weak, noise, click)]
      with open(f'{folder}/{name}.csv', 'w', encoding='utf-8') as f:
        f.write('strong,weak,noise,click\n' + ''.join(rows))
    data = {'train': [f'{folder}/day_*.csv'], 'test': [f'{folder}/test.csv'], 'label': 'click'}
    data['slots'] = [{'name': 'strong'}, {'name': 'weak'}, {'name': 'noise'}]
    tree = small.tree(
      run_dir=f'{folder}/run',
      data=data | {'day_pattern': r'day_(\d+)'},
      sparse={'tables': {'default': {'width': 4}}},
      lifecycle={'admission': 'score', 'eviction': 'score', 'decay': 0.5, 'delete_threshold': 2},
      model={'interactions': ['linear', 'fm']},
      train={'batch_size': 100, 'epochs': 1, 'log_every_steps': 10},
      export={'base': True},
    )
    cfg = config.load(small.write(f'{folder}/config.yaml', tree))
    cls.cfg, cls.run_dir, cls.tree = cfg, cfg.run_dir, tree
    job = small.job(cfg)
    job.run()
    cls.rows = [dict(chunk) for chunk in job.step.store.export_state()]
    with open(f'{cfg.run_dir}/metrics.jsonl', encoding='utf-8') as f:
      cls.events = [json.loads(line) for line in f]

  def test_slots_and_layers(self):
    inspection = CheckpointReader(self.run_dir)
    table = inspection.slots()
    for i, slot in enumerate(('strong', 'weak', 'noise')):
      own = [c['slot'] == i + 1 for c in self.rows]
      self.assertEqual(table.loc[slot, 'features'], sum(o.sum() for o in own))
      shows = sum(c['show'][o].sum() for o, c in zip(own, self.rows))
      self.assertAllClose(table.loc[slot, 'shows'], shows, atol=0.1)
    layers = inspection.layers().set_index('variable')
    self.assertEqual(layers.loc['bias:0', 'parameters'], 1)

  def test_a_feature(self):
    found = CheckpointReader(self.run_dir).feature('strong', '7')
    self.assertEqual(found['key'], int(hash_keys(['7'], 1)[0]))
    (chunk,) = [c for c in self.rows if found['key'] in c['key']]
    at = int(np.flatnonzero(chunk['key'] == found['key'])[0])
    self.assertEqual((found['show'], found['click']), (chunk['show'][at], chunk['click'][at]))
    self.assertEqual(found['linear'], chunk['linear'][at, 0])
    admitted = int(chunk['admitted'][:at].sum())
    self.assertAllEqual(found['factors'], chunk['factors_default'][admitted, :4])
    self.assertEndsWith(found['last_export'], '-base')
    # Its score, halved every day, falls below 2 after so many.
    days = int(np.floor(np.log2(found['score'] / 2))) + 1
    self.assertEqual(found['evicted_in_days_unless_seen'], days)
    unknown = CheckpointReader(self.run_dir).feature('strong', '77')
    self.assertEqual((unknown['known'], unknown['near'][0]), (False, '7'))
    with self.assertRaisesRegex(UserError, "the nearest valid name is 'strong'"):
      CheckpointReader(self.run_dir).feature('strnog', '7')

  def test_neighbours(self):
    run = api.load(self.run_dir)
    table = run.embeddings('strong').set_index('text').drop(columns='key')
    own = table.loc['7'].to_numpy()
    cosine = {
      text: np.dot(own, of) / np.sqrt(np.dot(own, own) * np.dot(of, of))
      for text, of in table.iterrows()
      if text != '7'
    }
    wanted = sorted(cosine, key=cosine.get, reverse=True)[:5]
    found = run.neighbours('strong', 7, k=5)
    self.assertEqual(found['text'].tolist(), wanted)
    self.assertAllClose(found['cosine'], [cosine[text] for text in wanted], 1e-5)
    shows = run.features('strong').set_index('text')['show']
    self.assertAllEqual(found['show'], shows[wanted])
    least = float(shows.drop('7').median())
    often = [text for text in sorted(cosine, key=cosine.get, reverse=True) if shows[text] >= least]
    self.assertNotEqual(often[:5], wanted)
    found = run.neighbours('strong', 7, k=5, least_shows=least)
    self.assertEqual(found['text'].tolist(), often[:5])
    with self.assertRaisesRegex(UserError, 'least_shows: found .*; wanted a number'):
      run.neighbours('strong', 7, least_shows='5')
    for slot, text, k, message in (
      ('strnog', '7', 5, "'strnog' is no slot of this model; the nearest valid name is 'strong'"),
      ('strong', '77', 5, "slot 'strong': the run has no feature '77'; similar to it: '7'"),
      ('strong', '7', 0, 'k: found 0; wanted a whole number above 0'),
    ):
      with self.assertRaisesRegex(UserError, message):
        run.neighbours(slot, text, k)

  def test_against_itself(self):
    table = CheckpointReader(self.run_dir).against(CheckpointReader(self.run_dir))
    self.assertEqual(table[['only_here', 'only_there']].to_numpy().sum(), 0)
    self.assertEqual(table['in_both'].sum(), sum(len(c['key']) for c in self.rows))
    self.assertAllEqual(table['mean_change_of_linear'], np.zeros(3))

  def test_against_a_run_whose_slots_have_other_ids(self):
    slots = [{'name': 'again', 'column': 'weak'}, *self.tree['data']['slots'][::-1]]
    slots += [{'name': 'strong_too', 'column': 'strong', 'shares': 'strong'}]
    tree = small.tree(self.tree, data={'slots': slots}) | {'export': {}}
    run = api.fit(tree, run_dir=f'{self.get_temp_dir()}/other')
    here, there = CheckpointReader(self.run_dir), CheckpointReader(run.run_dir)
    table, turned = here.against(there), there.against(here)
    self.assertEqual(list(table.index), ['strong', 'weak', 'noise', 'again'])
    self.assertAllEqual(table['only_here'], [0] * 4)
    self.assertAllEqual(table['only_there'], [0, 0, 0, 20])
    self.assertAllEqual(table['in_both'], [20, 20, 20, 0])
    for slot in ('strong', 'weak', 'noise'):
      own, other = (
        {text: of.feature(slot, text)['linear'] for text in map(str, range(20))}
        for of in (here, there)
      )
      wanted = np.mean([abs(own[text] - other[text]) for text in own])
      self.assertAllClose(table.loc[slot, 'mean_change_of_linear'], wanted)
    names = {'only_here': 'only_there', 'only_there': 'only_here'}
    pd.testing.assert_frame_equal(turned.rename(columns=names)[list(table)].loc[table.index], table)

  @pytest.mark.long
  def test_it_says_of_which_epochs_impressions_and_clicks_are(self):
    folder = self.get_temp_dir()

    def inspected(name, *flags):
      done = commands.run('-m', 'trainer.cli.inspect', f'--run_dir={folder}/{name}', *flags)
      return done.stdout

    frame = pd.DataFrame({'user': [str(i % 7) for i in range(200)], 'click': [0, 1] * 100})
    data = {'label': 'click', 'slots': [{'name': 'user'}]}
    tree = small.tree(data=data, train={'epochs': 3, 'batch_size': 50})
    api.fit(tree, run_dir=f'{folder}/three', train=frame)
    api.fit(tree, ['train.epochs=1'], f'{folder}/one', train=frame)
    api.fit(tree, ['data.slots.0.counts=true'], f'{folder}/counts', train=frame)
    frame.to_csv(f'{folder}/log.csv', index=False)
    small.write(f'{folder}/config.yaml', tree, data={'train': [f'{folder}/log.csv']})
    flags = f'--config={folder}/config.yaml', f'--init_from={folder}/one', '--set=train.epochs=1'
    done = commands.run('-m', 'trainer.run', *flags, f'--run_dir={folder}/begun')
    self.assertEqual(done.returncode, 0, done.stderr)
    for name, wanted in (
      ('three', '\nImpressions and clicks are those of 3 epochs.\n'),
      ('begun', '\nImpressions and clicks are those of 1 epoch, and of the run of --init_from.\n'),
      ('one', ''),
      ('counts', ''),
    ):
      for flags in ([], ['--feature=user=3']):
        told = inspected(name, *flags)
        self.assertIn(wanted or '\n', told)
        self.assertEqual('epoch' in told, bool(wanted), told)
    self.assertNotIn('epochs', inspected('three', '--json'))
    self.assertNotIn('epochs', inspected('three', '--feature=user=9'))

  def test_it_says_before_or_after_which_decay_impressions_and_clicks_are(self):
    inspection = CheckpointReader(self.run_dir)
    counted = inspection.counted()
    self.assertEndsWith(counted, 'of 1 epoch, after the decay of every day that has ended.')
    page = f'{self.get_temp_dir()}/report.html'
    report.write([self.run_dir], page)
    shown = runs.slots_in(page)['weak']['impressions'].replace(',', '')
    self.assertAllClose(inspection.slots().loc['weak', 'shows'], float(shown) * 0.5)
    with open(page, encoding='utf-8') as f:
      self.assertIn('each end of a day multiplies by 0.5 (before that of its last day)', f.read())

  def test_the_features_of_a_slot_with_the_most_impressions(self):
    folder, rng = self.get_temp_dir(), np.random.default_rng(0)
    items = [f'A{n}' for n in np.minimum(rng.geometric(0.1, 600), 40)]
    seen = [f'{a}|{b}' for a, b in zip(items[::-1], items[1:] + items[:1])]
    frame = pd.DataFrame({'item': items, 'seen': seen, 'click': rng.integers(0, 2, 600)})
    frame['user'] = rng.integers(0, 5, 600)
    frame.to_csv(f'{folder}/items.csv', index=False)
    slots = [{'name': 'item'}, {'name': 'user'}]
    slots += [{'name': 'seen', 'separator': '|', 'shares': 'item'}]
    tree = small.tree(
      data={'train': [f'{folder}/items.csv'], 'label': 'click', 'slots': slots},
      sparse={'tables': {'default': {'width': 4}}},
      lifecycle={'admission': 'score', 'admission_threshold': 25},
      model={'interactions': ['linear', 'fm']},
      train={'batch_size': 50},
    )
    run = api.fit(tree, run_dir=f'{folder}/items')

    def inspected(*flags):
      return commands.run('-m', 'trainer.cli.inspect', f'--run_dir={run.run_dir}', *flags)

    def in_words(number):
      return '–' if number is None else f'{number:.4g}'

    told = inspected('--features=item')
    wanted = run.features('item')
    self.assertGreater(len(wanted), 20)
    top = wanted[:20]
    self.assertBetween(top['admitted'].sum(), 1, 19)
    norms = [None if row is None else np.linalg.norm(row) for row in top['factors']]
    numbers = zip(top['show'], top['click'], top['linear'], norms)
    rows = [[text, *map(in_words, of)] for text, of in zip(top['text'], numbers)]
    titles, *shown = told.stdout.partition('\nfeatures\n')[2].splitlines()
    self.assertEqual(titles.split(), ['text', 'impressions', 'clicks', 'linear', 'norm'])
    self.assertEqual([line.split() for line in shown[:20]], rows, told.stderr)
    last = f"… of {len(wanted)} features; run.features('item') in Python has all"
    self.assertEqual(shown[20], last)
    # The item and both features of a history are counted.
    self.assertAllClose(wanted['show'].sum(), 3 * len(frame))
    note = "item: its impressions and clicks also count its features in slot 'seen'"
    for flags in (['--features=item'], ['--features=seen'], ['--feature=item=A1'], []):
      self.assertIn(note, ' '.join(inspected(*flags).stdout.split()))
    listed = json.loads(inspected('--features=item', '--json').stdout)['features']
    self.assertEqual([row['text'] for row in listed], list(top['text']))
    self.assertEqual([row['key'] for row in listed], list(top['key']))
    self.assertAllClose([row['linear'] for row in listed], top['linear'])

    # All of a slot with few features, after its texts have gone.
    pathlib.Path(f'{folder}/items.csv').unlink()
    few = inspected('--features=user').stdout
    self.assertNotIn('also count', few)
    keys = run.features('user')['key']
    self.assertEqual([line.split()[0] for line in few.splitlines()[-5:]], list(map(str, keys)))
    for flags, found in (
      (
        '--feature=item',
        "--feature: found 'item'; wanted SLOT=TEXT; --features item lists its features",
      ),
      ('--feature=A1', "--feature: found 'A1'; wanted SLOT=TEXT"),
      ('--features=itme', "'itme' is no slot of this model; the nearest valid name is 'item'"),
    ):
      done = inspected(flags)
      self.assertEqual((done.returncode, done.stderr), (2, f'error: {found}\n'))

  def test_data_that_no_view_reads_is_refused(self):
    for flags, found in (
      ([], 'no --importance'),
      (['--importance', '--feature=strong=7'], '--feature'),
      ([f'--against={self.run_dir}'], '--against'),
    ):
      flags = [f'--run_dir={self.run_dir}', '--data=small.csv', *flags]
      done = commands.run('-m', 'trainer.cli.inspect', *flags)
      wanted = (
        f'error: --data small.csv: found {found}; wanted --importance alone, which reads it\n'
      )
      self.assertEqual((done.returncode, done.stderr), (2, wanted))

  def test_a_trainer_that_removes_the_checkpoint_which_is_read(self):
    """It is removed while its rows are read; the one that is left is taken."""
    run = shutil.copytree(self.run_dir, pathlib.Path(tempfile.mkdtemp()) / 'run')
    kept = CheckpointReader(str(run)).path
    removed = run / 'checkpoints' / 'ckpt-999999999'
    race = f"""
import shutil
from trainer.cli import inspect
from trainer.storage import checkpoint_rows
read_rows = checkpoint_rows.read_rows
def racing(path, *rest):
  shutil.rmtree({str(removed)!r}, ignore_errors=True)
  return read_rows(path, *rest)
checkpoint_rows.read_rows = racing
inspect.main()
"""
    for arguments in ([], ['--feature=strong=7']):
      shutil.copytree(kept, removed)
      done = commands.run('-c', race, f'--run_dir={run}', *arguments)
      self.assertEqual(done.returncode, 0, done.stderr)
      self.assertStartsWith(done.stdout, f'checkpoint {kept}, step')
      widest = max(map(len, done.stdout.split('\n')[1:]))  # the first line has a path
      self.assertLessEqual(widest, 80)
      self.assertNotIn('\\', done.stdout)
      self.assertFalse(removed.exists())

  def test_importance_follows_the_clicks(self):
    (event,) = [e for e in self.events if e['event'] == 'importance']
    losses = {slot: values['auc'] for slot, values in event['columns'].items()}
    self.assertEqual(sorted(losses, key=losses.get), ['noise', 'weak', 'strong'])
    drawn = figures.importance(read_run(self.run_dir)).layout.xaxis.title.text
    of = f'{event["examples"]:,} samples of data.{event["split"]}'
    self.assertEqual(drawn, f'AUC lost on {of}')
    done = commands.run('-m', 'trainer.cli.inspect', f'--run_dir={self.run_dir}', '--importance')
    self.assertIn(f'\nOn {event["examples"]:,} samples of data.test.\n', done.stdout)
    self.assertGreater(losses['strong'], 0.2)
    self.assertLess(abs(losses['noise']), 0.02)

  def test_the_job_told_its_events(self):
    kinds = [e['event'] for e in self.events]
    self.assertEqual(kinds[0], 'start')
    self.assertEqual(kinds[-1], 'end')
    for e in (e for e in self.events if e['event'] == 'train'):
      windows = [w for w in self.events if w['event'] == 'window' and w['pass'] == e['pass']]
      self.assertEqual(sum(w['examples'] for w in windows), e['examples'])
      self.assertEqual(e['slots']['strong']['features'], 20)
      self.assertContainsSubset({'step', 'wait'}, e['seconds'])
    ends = [e for e in self.events if e['event'] == 'day_end']
    for e in ends:
      self.assertEqual(sum(s['evicted'] for s in e['slots'].values()), e['evicted'])
    for e in (e for e in self.events if e['event'] == 'export'):
      self.assertEqual(sum(s['rows'] for s in e['slots'].values()), e['rows'])

  def test_tensorboard_has_splits_and_histograms(self):
    tags = set()
    for path in pathlib.Path(self.run_dir, 'tensorboard').glob('**/*tfevents*'):
      for record in tf.data.TFRecordDataset(str(path)):
        summary = tf.compat.v1.Event.FromString(record.numpy()).summary
        kind = path.parent.name
        tags |= {(kind, v.tag, v.metadata.plugin_data.plugin_name) for v in summary.value}
    self.assertContainsSubset(
      {
        ('train', 'auc', 'scalars'),
        ('test', 'auc', 'scalars'),
        ('test', 'predictions', 'histograms'),
        ('train', 'norm/strong', 'histograms'),
      },
      tags,
    )
    self.assertIn('hparams', {plugin for _, _, plugin in tags})


class TrueImportanceTest(tf.test.TestCase):
  @pytest.mark.long
  def test_importances_recover_the_generators(self):
    folder = self.get_temp_dir()
    truth = synthesize(folder, 3, 80_000, seed=1, users=100, items=200)['importance']
    cfg = config.load(
      ROOT / 'configs' / 'demo.yaml',
      [
        f'data.train=[{folder}/day_*.csv]',
        f'data.test=[{folder}/test_day_*.csv]',
        'train.progressive_validation=false',
      ],
      f'{folder}/run',
    )
    small.job(cfg).run()
    with open(f'{cfg.run_dir}/metrics.jsonl', encoding='utf-8') as f:
      (found,) = [e['columns'] for e in map(json.loads, f) if e['event'] == 'importance']
    for metric in ('auc', 'logloss'):
      table = pd.DataFrame(
        {slot: [truth[slot][metric], found[slot][metric]] for slot in truth}, ['true', 'found']
      )
      self.assertGreaterEqual(table.T.corr('spearman').loc['true', 'found'], 0.95, table)


if __name__ == '__main__':
  tf.test.main()
