"""The gate withholds exports after bad passes, and only after these."""

import os
import tempfile

import numpy as np
import tensorflow as tf

from tests.support import small
from tests.support.steps import make_config
from trainer.config import Gate
from trainer.data.conversion import prepare_pass
from trainer.data.features import hash_keys
from trainer.data.prepared import PreparedPass
from trainer.errors import ConfigError
from trainer.job.pass_meter import presence
from trainer.reporting.events import read_events
from trainer.storage import chain
from trainer.tools.gate import judge
from trainer.training.run_state import Progress


class GateTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.progress = Progress()

  def withheld(self, value, metric='auc', **present):
    gate, present = Gate(metric=metric, tolerance=0.002), {'user': 1.0, 'tags': 0.6} | present
    return judge(gate, self.progress, {metric: value}, present)

  def test_a_fall_beyond_the_tolerance(self):
    for value in (0.75, 0.752, 0.749, 0.7495):
      self.assertIsNone(self.withheld(value))
    finding = self.withheld(0.74)
    self.assertEqual(finding[:2], ('fell', 'auc'))
    self.assertEqual((finding.figures['value'], finding.figures['tolerance']), (0.74, 0.002))
    self.assertBetween(finding.figures['usual'], 0.75, 0.751)
    self.assertEndsWith(finding.sentence, ', or worse by 0.002 at most')
    self.assertIsNone(self.withheld(0.75))

  def test_of_a_loss_more_is_worse(self):
    for value in (0.4, 0.39, 0.4):
      self.assertIsNone(self.withheld(value, 'logloss'))
    self.assertEqual(self.withheld(0.41, 'logloss')[:2], ('fell', 'logloss'))

  def test_a_fall_that_lasts_becomes_the_reference(self):
    self.withheld(0.75)
    verdicts = [self.withheld(0.74) is None for _ in range(40)]
    self.assertFalse(any(verdicts[:5]))
    self.assertTrue(all(verdicts[-10:]))

  def test_what_is_not_finite_never_passes_nor_counts(self):
    self.withheld(0.75)
    for value in (None, float('nan'), float('inf')):
      self.assertEqual(self.withheld(value), ('not_finite', 'auc', {'value': value}))
    self.assertIsNone(self.withheld(0.75))

  def test_a_slot_that_turns_blank(self):
    self.withheld(0.75)
    for slot, share, usual in (('tags', 0.0, 0.6), ('user', 0.01, 1.0)):
      found = self.withheld(0.9, **{slot: share})
      self.assertEqual(found, ('blank', slot, {'share': share, 'usual': usual}))
    self.assertIsNone(self.withheld(0.75, tags=0.3))

  def test_presence_counts_samples_with_a_feature(self):
    cfg = make_config({'data.dense': [], 'data.label': 'label'})
    with tempfile.TemporaryDirectory() as folder:
      path = os.path.join(folder, 'log.csv')
      with open(path, 'w', encoding='utf-8') as f:
        f.write('label,a,b,c\n1,x|y,,z\n0,x,,z\n1,,,z\n0,x,w,z\n')
      prepare_pass(cfg, path, path + '.pass')
      found = presence(cfg.ordered_slots, PreparedPass(path + '.pass', cfg))
      self.assertEqual(found, {'a': 0.75, 'b': 0.25, 'c': 1.0})

  def test_a_bad_pass_is_trained_on_and_the_next_good_one_exports_its_changes(self):
    folder = self.enter_context(tempfile.TemporaryDirectory())
    for day in range(4):
      with open(os.path.join(folder, f'pass_{day}.csv'), 'w', encoding='utf-8') as f:
        f.write('label,a,b,c\n')
        for i in range(200):
          b = '' if day == 2 else f'b{i % 5}'
          f.write(f'{int(i % 3 == 0)},a{day}_{i % 7},{b},c{i % 3}\n')
    cfg = make_config(
      {
        'run_dir': os.path.join(folder, 'run'),
        'data.train': [os.path.join(folder, 'pass_*.csv')],
        'data.dense': [],
        'data.label': 'label',
        'train.progressive_validation': True,
        'train.batch_size': 50,
        'lifecycle': {'delta_threshold': 0.0, 'base_threshold': 0.0},
        'export': {'delta_every_passes': 1, 'gate': {'metric': 'auc', 'tolerance': 0.9}},
      }
    )
    small.job(cfg).run()
    events = read_events(cfg.run_dir)
    withheld = events[events['event'] == 'withheld']
    self.assertEqual(withheld['pass'].tolist(), ['pass_2'])
    self.assertIn("slot 'b' is blank", withheld['reason'].iloc[0])
    exported = events[events['event'] == 'export']
    self.assertEqual(exported['pass'].tolist(), ['pass_0', 'pass_1', 'pass_3'])
    last = chain.RowExport(exported['path'].iloc[-1])
    of_pass_2 = hash_keys([f'a2_{i}' for i in range(7)], 1).numpy()
    self.assertContainsSubset(of_pass_2, np.concatenate([rows.key for rows in last.rows()]))

  def test_what_it_needs(self):
    with self.assertRaisesRegex(ConfigError, "'export.gate': needs train.progressive_validation"):
      make_config({'export.gate': {}})
    on = {'train.progressive_validation': True}
    with self.assertRaisesRegex(ConfigError, "found 'gauc'; it needs data.group"):
      make_config(on | {'export.gate.metric': 'gauc'})
    with self.assertRaisesRegex(ConfigError, "found 'rmse'; the loss 'log_loss' has 'auc', 'gauc'"):
      make_config(on | {'export.gate.metric': 'rmse'})
    self.assertEqual(make_config(on | {'export.gate': {}}).export.gate, Gate())


if __name__ == '__main__':
  tf.test.main()
