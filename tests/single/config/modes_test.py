"""The table of docs/runbook.md: what each sync.mode refuses, and what has no effect in it."""

import os

import tensorflow as tf
import yaml

import trainer
from tests.support import commands
from tests.support.jobs import ROOT
from trainer import api, config, errors
from trainer.config import rules

SLOTS = [{'name': 'user'}, {'name': 'item'}]
CLICKS = {'model': {'interactions': ['linear', {'dnn': {'hidden': [4]}}]}}
RETRIEVAL = {
  'data': {'group': 'user'},
  'model': {'retrieval': {'query': {'slots': ['user']}, 'item': {'slots': ['item']}}},
}
# What each row of the table names: a config beside the slots, and the key that messages name.
ROWS = {
  '`batch_norm: sync`': (
    {'model': {'interactions': [{'dnn': {'hidden': [4], 'batch_norm': 'sync'}}]}},
    'model.interactions.0.batch_norm',
  ),
  '`data.keep_texts`': (CLICKS | {'data': {'keep_texts': ['item']}}, 'data.keep_texts'),
  '`train.schedule`': (
    CLICKS | {'train': {'schedule': {'kind': 'step', 'period': 9}}},
    'train.schedule',
  ),
  '`data.slots.N.counts`': (
    CLICKS | {'data': {'slots': [{'name': 'user', 'counts': True}]}},
    'data.slots.0.counts',
  ),
  '`model.retrieval`': (RETRIEVAL, 'sync.mode'),
  '`run_dir` in a bucket': (CLICKS | {'run_dir': 's3://bucket/run'}, 'run_dir'),
  '`sync.row_exchange`': (CLICKS | {'sync': {'row_exchange': 'horovod'}}, 'sync.row_exchange'),
  '`sync.on_lost_worker`': (CLICKS | {'sync': {'on_lost_worker': 'wait'}}, 'sync.on_lost_worker'),
  '`sync.max_staleness`': (CLICKS | {'sync': {'max_staleness': 3}}, 'sync.max_staleness'),
  '`sync.geo_steps`': (CLICKS | {'sync': {'geo_steps': 3}}, 'sync.geo_steps'),
}
COMMANDS = '`--init_from`', '`trainer.fit`'  # not keys: tested apart


def tree_of(row, mode):
  """Returns the config of a row of the table in this mode."""
  tree, _ = ROWS[row]
  data = {'train': [str(ROOT / 'README.md')], 'label': 'click', 'slots': SLOTS} | tree.get(
    'data', {}
  )
  return tree | {'data': data, 'sync': tree.get('sync', {}) | {'mode': mode}}


def answer(row, mode):
  """Returns what the code does with a row of the table in this mode, in the table's words."""
  _, key = ROWS[row]
  try:
    source = api.Source(tree_of(row, mode))
    source.bucket  # of a run_dir
    cfg = config.parse(yaml.safe_dump(tree_of(row, mode)), 'test')
  except errors.UserError as e:
    return 'refused' if key in str(e) and mode in str(e) else str(e)
  told = [line for line in rules.warnings(cfg) if line.startswith(f'{key}: ')]
  return 'no effect' if told else 'yes'


class ModesTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    page = (ROOT / 'docs' / 'runbook.md').read_text(encoding='utf-8')
    lines = page[page.index('| setting | allreduce |') :].partition('\n\n')[0].splitlines()
    self.modes = [cell.strip() for cell in lines[0].strip('|').split('|')][1:]
    self.table = {}
    for line in lines[2:]:
      names, *cells = (cell.strip() for cell in line.strip('|').split('|'))
      self.table |= {name: dict(zip(self.modes, cells)) for name in names.split(', ')}

  def test_the_table_says_what_the_code_does(self):
    self.assertEqual(set(self.table), {*ROWS, *COMMANDS})
    for row in ROWS:
      with self.subTest(row):
        self.assertEqual({mode: answer(row, mode) for mode in self.modes}, self.table[row])

  def test_fit_trains_only_in_one_process(self):
    for mode, cell in self.table['`trainer.fit`'].items():
      if cell == 'refused':
        with self.assertRaisesRegex(errors.UserError, f"sync.mode: found '{mode}'"):
          trainer.fit(tree_of('`train.schedule`', 'ps') | {'sync': {'mode': mode}, 'train': {}})

  def test_init_from_is_of_ranks(self):
    path = os.path.join(self.get_temp_dir(), 'test.yaml')
    with open(path, 'w') as f:
      yaml.safe_dump(tree_of('`data.keep_texts`', 'ps'), f)
    done = commands.run('-m', 'trainer.run', '--config', path, '--init_from', 'runs/x')
    self.assertEqual(self.table['`--init_from`']['ps'], 'refused')
    self.assertEqual(done.returncode, 2, done.stderr)
    self.assertIn("--init_from: wanted sync.mode 'allreduce'; found 'ps'", done.stderr)


if __name__ == '__main__':
  tf.test.main()
