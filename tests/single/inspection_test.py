"""What is said of a checkpoint, of its slots and of single features: against the rows."""

import json
import pathlib
import shutil
import tempfile

import numpy as np
import pandas as pd
import tensorflow as tf
import yaml

from tests.support import commands
from trainer import config
from trainer.comm.communicator import SingleProcess
from trainer.data.features import hash_keys
from trainer.data.synthetic import synthesize
from trainer.errors import UserError
from trainer.reporting.inspection import Inspection
from trainer.training.job import Job
from trainer.training.step import TrainStep

ROOT = pathlib.Path(__file__).resolve().parents[2]


class InspectionTest(tf.test.TestCase):
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
    tree = {
      'run_dir': f'{folder}/run',
      'data': {
        'train': [f'{folder}/day_*.csv'],
        'test': [f'{folder}/test.csv'],
        'day_pattern': r'day_(\d+)',
        'label': 'click',
        'slots': [{'name': 'strong'}, {'name': 'weak'}, {'name': 'noise'}],
      },
      'sparse': {'tables': {'default': {'width': 4}}},
      'lifecycle': {'admission': 'score', 'eviction': 'score', 'decay': 0.5, 'delete_threshold': 2},
      'model': {'interactions': ['linear', 'fm']},
      'train': {'batch_size': 100, 'epochs': 1, 'log_every_steps': 10},
      'export': {'base': True},
    }
    path = f'{folder}/config.yaml'
    with open(path, 'w', encoding='utf-8') as f:
      yaml.safe_dump(tree, f)
    cfg = config.load(path)
    cls.cfg, cls.run_dir = cfg, cfg.run_dir
    job = Job(cfg, SingleProcess(), TrainStep(cfg, SingleProcess()))
    job.run()
    cls.rows = [dict(chunk) for chunk in job.step.store.export_state()]
    with open(f'{cfg.run_dir}/metrics.jsonl', encoding='utf-8') as f:
      cls.events = [json.loads(line) for line in f]

  def test_slots_and_layers(self):
    inspection = Inspection(self.run_dir)
    table = inspection.slots()
    for i, slot in enumerate(('strong', 'weak', 'noise')):
      own = [c['slot'] == i + 1 for c in self.rows]
      self.assertEqual(table.loc[slot, 'features'], sum(o.sum() for o in own))
      shows = sum(c['show'][o].sum() for o, c in zip(own, self.rows))
      self.assertAllClose(table.loc[slot, 'shows'], shows, atol=0.1)
    layers = inspection.layers().set_index('variable')
    self.assertEqual(layers.loc['bias:0', 'parameters'], 1)

  def test_a_feature(self):
    found = Inspection(self.run_dir).feature('strong', '7')
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
    unknown = Inspection(self.run_dir).feature('strong', '77')
    self.assertEqual((unknown['known'], unknown['near'][0]), (False, '7'))
    with self.assertRaisesRegex(UserError, "the nearest valid name is 'strong'"):
      Inspection(self.run_dir).feature('strnog', '7')

  def test_against_itself(self):
    table = Inspection(self.run_dir).against(Inspection(self.run_dir))
    self.assertEqual(table[['only_here', 'only_there']].to_numpy().sum(), 0)
    self.assertEqual(table['in_both'].sum(), sum(len(c['key']) for c in self.rows))
    self.assertAllEqual(table['mean_change_of_linear'], np.zeros(3))

  def test_a_trainer_that_removes_the_checkpoint_which_is_read(self):
    """It is removed while its rows are read; the one that is left is taken."""
    run = shutil.copytree(self.run_dir, pathlib.Path(tempfile.mkdtemp()) / 'run')
    kept = Inspection(str(run)).path
    removed = run / 'checkpoints' / 'ckpt-999999999'
    race = f"""
import shutil
from trainer import inspect
from trainer.storage import checkpoint
read_rows = checkpoint.read_rows
def racing(path, *rest):
  shutil.rmtree({str(removed)!r}, ignore_errors=True)
  return read_rows(path, *rest)
checkpoint.read_rows = racing
inspect.main()
"""
    for arguments in ([], ['--feature=strong=7']):
      shutil.copytree(kept, removed)
      done = commands.run('-c', race, f'--run_dir={run}', *arguments)
      self.assertEqual(done.returncode, 0, done.stderr)
      self.assertStartsWith(done.stdout, f'checkpoint {kept}, step')
      widest = max(map(len, done.stdout.split('\n')[1:]))  # the first line has a path
      self.assertLessEqual(widest, 80)
      self.assertFalse(removed.exists())

  def test_importance_follows_the_clicks(self):
    (event,) = [e for e in self.events if e['event'] == 'importance']
    losses = {slot: values['auc'] for slot, values in event['slots'].items()}
    self.assertEqual(sorted(losses, key=losses.get), ['noise', 'weak', 'strong'])
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
    Job(cfg, SingleProcess(), TrainStep(cfg, SingleProcess())).run()
    with open(f'{cfg.run_dir}/metrics.jsonl', encoding='utf-8') as f:
      (found,) = [e['slots'] for e in map(json.loads, f) if e['event'] == 'importance']
    for metric in ('auc', 'logloss'):
      table = pd.DataFrame(
        {slot: [truth[slot][metric], found[slot][metric]] for slot in truth}, ['true', 'found']
      )
      self.assertGreaterEqual(table.T.corr('spearman').loc['true', 'found'], 0.95, table)


if __name__ == '__main__':
  tf.test.main()
