"""Settings that have no effect are refused or told of."""

import glob
import os
import tempfile

from absl.testing import absltest

from tests.support import jobs
from trainer import api, config, errors
from trainer.config import rules

CONFIG = """
data: {train: [a.csv], slots: [{name: a}, {name: b}]}
model: {interactions: [linear, fm]}
"""


def load(*overrides):
  return config.parse(CONFIG, 'f.yaml', overrides)


class EffectsTest(absltest.TestCase):
  def test_what_happens_at_the_end_of_a_day_wants_days(self):
    for override, key in (
      ('lifecycle.delete_threshold=1', 'lifecycle.eviction'),
      ('lifecycle.capacity=5', 'lifecycle.capacity'),
      ('export.base=true', 'export.base'),
      ('export.saved_model=true', 'export.saved_model'),
    ):
      with self.assertRaisesRegex(
        errors.ConfigError, f"f.yaml: key '{key}': .*without data.day_pattern"
      ):
        rules.check_days(load(override), 'f.yaml')
      rules.check_days(load(override, 'data.day_pattern=(1)'), 'f.yaml')
      topic = 'data.topic={brokers: b, topic: t, pass: {records: 9}}'
      with self.assertRaisesRegex(errors.ConfigError, 'wanted data.topic.days, or this left out'):
        rules.check_days(load(override, topic, 'data.train=[]'), 'f.yaml')

  def test_settings_without_effect_are_told(self):
    linear, days = 'sparse.tables.default.linear', 'data.day_pattern=(1)'
    mode = 'with lifecycle.admission'
    for setting, why, without, acts in (
      (f'{linear}.beta1=.5', "on kind 'adagrad'", '', f'{linear}.kind=adam'),
      (f'{linear}.beta1=.5', "on kind 'sgd'", f'{linear}.kind=sgd', f'{linear}.kind=adam'),
      (f'{linear}.l2_mode=catch_up', 'without l1 or l2', '', f'{linear}.l2=.1'),
      (f'{linear}.l2_mode=catch_up', 'without l1 or l2', '', f'{linear}.l1=.1'),
      (
        f'{linear}.l2_mode=catch_up',
        "on kind 'ftrl'",
        f'{linear}.kind=ftrl',
        f'{linear}.kind=adam',
      ),
      ('lifecycle.decay=.5', 'without data.day_pattern', '', days),
      (
        'model.recipe=plain',
        'without data.valid and a dnn without `hidden` beside at most linear and fm',
        'model.interactions=[{dnn:{hidden:[8]}}] data.valid=[v.csv]',
        'model.interactions=[dnn] data.valid=[v.csv]',
      ),
      (
        'model.recipe=stream',
        'without days that are trained on once and a dnn without `hidden`',
        'model.interactions=[dnn] data.valid=[v.csv]',
        f'model.interactions=[dnn] {days}',
      ),
      ('lifecycle.admission_count=3', mode, 'lifecycle.admission=score', ''),
      ('data.slots.0.lifecycle.min_age_days=3', '', 'lifecycle.eviction=unseen', ''),
      ('lifecycle.capacity_by=recency', 'without lifecycle.capacity', '', 'lifecycle.capacity=9'),
      (
        'data.slots.0.counts=true',
        'with ffm and fm alone: linear and dnn read dense columns',
        'model.interactions=[fm,ffm]',
        'model.interactions=[linear,fm]',
      ),
      ('sparse.tables.default.width=3', 'no factors', 'model.interactions=[linear]', ''),
      (
        'sparse.tables.default.factors.learning_rate=.1',
        'no factors',
        'model.interactions=[linear]',
        '',
      ),
      ('model.focal_gamma=3', 'without a loss of kind focal', '', 'model.loss=focal'),
      ('model.label_smoothing=.1', 'on squared_error', 'model.loss=squared_error', ''),
      ('model.negative_sampling_rate=.1', 'on squared_error', 'model.loss=squared_error', ''),
      ('sync.geo_steps=3', "'allreduce': it is of 'ps_geo'", '', 'sync.mode=ps_geo'),
      ('sync.max_staleness=3', "it is of 'ps_async'", 'sync.mode=ps', 'sync.mode=ps_async'),
      ('sync.on_lost_worker=wait', "it is of 'ps'", '', 'sync.mode=ps'),
    ):
      with self.subTest(setting):
        key, _, _ = setting.partition('=')
        (line,) = rules.warnings(load(setting, *without.split()))
        self.assertRegex(line, f'^{key}: found .*, which has no effect .*{why}')
        told = rules.warnings(load(setting, *acts.split()))
        self.assertEmpty([line for line in told if 'has no effect' in line])

  def test_the_sum_of_a_history_is_told(self):
    history = {'name': 'seen', 'separator': '|', 'shares': 'item'}
    for lists, pooling in (('mean', 'sum'), ('mean', 'sqrtn'), ('sum', 'sum')):
      slots = [{'name': 'item'}, history | {'pooling': pooling}]
      tree = {'data': {'train': ['x'], 'slots': slots}, 'model': {'interactions': ['dnn']}}
      tree['sparse'] = {'shared_lists': lists}
      told = list(rules.warnings(config.Config.model_validate(tree)))
      wanted = (
        "data.slots.1.pooling: found 'sum', which has no effect on a list of features of 'item' "
        'with sparse.shared_lists: mean'
      )
      self.assertEqual(told, [wanted] * ((lists, pooling) == ('mean', 'sum')))
      slots.pop()
      (line,) = rules.warnings(config.Config.model_validate(tree))
      self.assertEqual(
        line,
        f"sparse.shared_lists: found '{lists}', which has no effect without a list of another "
        "slot's features",
      )

  def test_counts_of_a_slot_that_another_shares_are_told(self):
    for counts in (True, False):
      slots = [{'name': 'item', 'counts': counts}, {'name': 'last', 'shares': 'item'}]
      tree = {'data': {'train': ['x'], 'slots': slots}, 'model': {'interactions': ['linear']}}
      told = list(rules.warnings(config.Config.model_validate(tree)))
      wanted = (
        "slot 'item': its counts also count its features in slot 'last'; a second slot of the same "
        'column (`column`) has counts of its own'
      )
      self.assertEqual(told, [wanted] * counts)

  def test_a_job_tells_them_at_its_start_once(self):
    log = os.path.join(self.enter_context(tempfile.TemporaryDirectory()), 'log.csv')
    with open(log, 'w') as f:
      f.write('a,b,label\n1,2,0\n')
    tree = {
      'data': {'train': [log], 'slots': [{'name': 'a'}, {'name': 'b'}]},
      'model': {'interactions': ['linear']},
      'train': {'batch_size': 8},
      'sync': {'geo_steps': 3},
    }
    with self.assertLogs('absl', 'WARNING') as logs:
      api.Source(tree).with_measured_values()
    self.assertLen(logs.output, 1)
    self.assertIn('sync.geo_steps: found 3, which has no effect', logs.output[0])
    with self.assertNoLogs('absl', 'WARNING'):
      api.Source(tree).with_measured_values(tells=False)

  def test_shipped_configs_are_told_of_nothing(self):
    for path in glob.glob(os.path.join(jobs.ROOT, 'configs', '**', '*.yaml'), recursive=True):
      with self.subTest(path):
        self.assertEmpty(list(rules.warnings(config.load(path))))


if __name__ == '__main__':
  absltest.main()
