"""What a dry run tells of a log, against counts of the log itself."""

import os
import pathlib
import tempfile

import numpy as np
import tensorflow as tf

from tests.support import small
from trainer.errors import UserError
from trainer.job.source import Source
from trainer.tools import dry_run


class DryRunTest(tf.test.TestCase):
  def test_counts_equal_those_of_the_log(self):
    folder = tempfile.mkdtemp(dir=self.get_temp_dir())
    rng, users, clicks = np.random.default_rng(0), set(), []
    for day in range(2):
      ids = range(50 * day, 50 * day + 50)
      user, item, click = rng.integers(0, 30, 50), rng.integers(0, 9, 50), rng.integers(0, 2, 50)
      users |= set(user.tolist())
      clicks += click.tolist()
      with open(f'{folder}/day_{day}.csv', 'w', encoding='utf-8') as f:
        f.write(
          'user,item,click,id\n'
          + ''.join(f'{u},{i},{c},{at}\n' for u, i, c, at in zip(user, item, click, ids))
        )
    data = {'train': [f'{folder}/day_*.csv'], 'label': 'click', 'day_pattern': r'day_(\d+)'}
    tree = small.tree(
      run_dir=f'{folder}/run',
      data=data | {'slots': [{'name': 'user'}, {'name': 'item'}, {'name': 'id'}]},
      model={'interactions': ['linear', {'dnn': {'hidden': [4]}}]},
      sparse={'tables': {'default': {'width': 3}}},
    )
    text = '\n'.join(dry_run.tell(small.checked(tree)))
    features = len(users) + 9 + 100
    layers = 3 * 3 * 4 + 4 + 4 + 1  # kernel, biases, head, the bias of all
    for wanted in (
      f'data.train: 2 passes, 100 samples, mean label {np.mean(clicks):.4f}',
      r'day_1 +day 1 +50 ',
      rf'user +{len(users)}\n',
      r'item +9\n',
      r'id +100, nearly one a sample: new samples have others\n',
      rf'default +{features * 4} +{features} features',
    ):
      self.assertRegex(text, wanted)
    counts = text.partition('of the layers:\n')[2].partition('parameters of the tables')[0]
    self.assertEqual(sum(int(line.split()[-1]) for line in counts.splitlines()), layers)
    self.assertFalse(os.path.exists(f'{folder}/run/config.yaml'), 'nothing was begun')

  def test_what_a_watched_directory_announces(self):
    folder = tempfile.mkdtemp(dir=self.get_temp_dir())
    watch = f'{folder}/in'

    def tell(**data):
      data = {'label': 'click', 'day_pattern': r'day_(\d+)', 'slots': [{'name': 'user'}]} | data
      tree = small.tree(run_dir=f'{folder}/run', data=data)
      return '\n'.join(dry_run.tell(small.checked(tree)))

    self.assertIn('in: No such file or directory; a run waits for it', tell(watch=watch))
    os.makedirs(f'{watch}/sub')
    nothing = f'{watch}: no pass is announced there; a run waits for one'
    self.assertEqual(tell(watch=watch), nothing)
    for name in ('day_1.csv', 'sub/day_2.csv', 'odd.csv', 'day_3.csv'):
      with open(f'{watch}/{name}', 'w', encoding='utf-8') as f:
        f.write('user,click\n1,1\n2,0\n3,0\n' + '\n' * ('day_2' in name))  # no two are equal
    with open(f'{watch}/day_0.csv', 'w', encoding='utf-8') as f:
      f.write('user,click\n"1,1\n')
    for name in ('day_0.csv', 'day_1.csv', 'sub/day_2.csv', 'odd.csv', 'day_4.csv'):
      with open(f'{watch}/{name}.done', 'w', encoding='utf-8'):
        pass
    for train in ([], [f'{watch}/day_1.csv']):
      text = tell(watch=watch, train=train)
      for wanted in (
        'day_4.csv: is announced but not there; a run waits for it',
        r"odd.csv: data.day_pattern 'day_.*; a run refuses it",
        r'day_0.csv:.*; a run refuses it\n',
        'data.train and data.watch: 2 passes, 6 samples, mean label 0.3333',
        r'  day_1 +day 1 +3 ',
        r'  sub/day_2 +day 2 +3 ',
        r'  user +3\n',
        'an epoch: about 1 steps',
      ):
        self.assertRegex(text, wanted)
    text = tell(train=[f'{watch}/day_0.csv', f'{watch}/day_1.csv'], max_refused_passes=1)
    self.assertRegex(text, r'day_0.csv:.*; a run refuses it\n')
    self.assertIn('data.train: 1 pass, 3 samples', text)
    with self.assertRaisesRegex(UserError, 'day_0.csv'):
      tell(train=[f'{watch}/day_0.csv', f'{watch}/day_1.csv'])
    pathlib.Path(f'{folder}/none.csv').write_text('user,click\n1,0\n2,0\n')
    with self.assertRaisesRegex(UserError, "none.csv: every label in the column 'click' is 0"):
      tell(train=[f'{folder}/none.csv'], day_pattern=None)
    for day in (5, 6):
      with open(f'{watch}/day_{day}.csv', 'w', encoding='utf-8') as f:
        f.write('user,click\n"1,1\n')
    text = tell(train=[f'{watch}/day_5.csv', f'{watch}/day_6.csv'], max_refused_passes=1)
    self.assertIn('data.max_refused_passes allows 1 refused in a row', text)

  def test_the_mean_label_leaves_out_blank_labels(self):
    folder = tempfile.mkdtemp(dir=self.get_temp_dir())
    for name, rows in (('a', '1,0,1\n2,0,0\n3,0,1\n4,1,0\n'), ('b', '5,1,1\n6,0,0\n7,,1\n8,,0\n')):
      pathlib.Path(f'{folder}/{name}.csv').write_text(f'user,click,buy\n{rows}')
    data = {'train': [f'{folder}/*.csv'], 'labels': [{'name': 'click'}, {'name': 'buy'}]}
    data |= {'slots': [{'name': 'user'}]}
    model = {'tasks': {name: {'interactions': ['linear']} for name in ('click', 'buy')}}
    tree = small.tree(run_dir=f'{folder}/run', data=data) | {'model': model}
    text = '\n'.join(dry_run.tell(small.checked(tree)))
    self.assertIn('2 passes, 8 samples, mean label 0.3333', text)
    self.assertRegex(text, r'  a .* 4   label 0.2500\n  b .* 4   label 0.5000\n')

  def test_values_that_training_never_saw(self):
    folder = tempfile.mkdtemp(dir=self.get_temp_dir())
    for name, users in (('train', range(8)), ('valid', range(7, 12)), ('test', range(6, 10))):
      rows = ''.join(f'{u},{u % 3}|{u % 2},{u % 2}\n' for u in users)
      pathlib.Path(f'{folder}/{name}.csv').write_text(f'user,tags,click\n{rows}')
    data = {name: [f'{folder}/{name}.csv'] for name in ('train', 'valid', 'test')}
    data |= {'label': 'click', 'slots': [{'name': 'user'}, {'name': 'tags', 'separator': '|'}]}
    tree = small.tree(run_dir=f'{folder}/run', data=data)
    text = '\n'.join(dry_run.tell(small.checked(tree)))
    self.assertRegex(text, r'user +8, .*new in 80% of data.valid and 50% of data.test\n  tags +3\n')
    told = (
      "Cold start: .* 'user' in 80% of data.valid .* without\\s'user': ctr-tune --columns trains"
    )
    self.assertRegex(text.replace('\n', ' '), told)

  def test_passes_that_are_there_twice_are_told_as_a_run_tells_them(self):
    folder = tempfile.mkdtemp(dir=self.get_temp_dir())
    for i, name in enumerate(('day_1', 'day_2', 'valid', 'test')):
      pathlib.Path(f'{folder}/{name}.csv').write_text(f'user,click\n{i},1\n2,0\n3,0\n')
    os.symlink('day_2.csv', f'{folder}/latest.csv')
    pathlib.Path(f'{folder}/copy.tsv').write_text('user\tclick\n0\t1\n2\t0\n3\t0\n')
    data = {'train': [f'{folder}/*.csv'], 'valid': [f'{folder}/valid.csv', f'{folder}/copy.tsv']}
    data |= {'test': [f'{folder}/test.csv'], 'label': 'click', 'slots': [{'name': 'user'}]}
    tree = small.tree(run_dir=f'{folder}/run', data=data)
    with self.assertLogs('absl', 'WARNING') as logs:  # as a run begins
      cfg = Source(tree).with_measured_values()
    text = '\n'.join([*logs.output, *dry_run.tell(cfg)])
    self.assertEqual(text.count('data.valid: data.train has '), 1, 'told once')
    for wanted in (
      'data.train: 4 passes, 12 samples',
      'latest.csv: a run does not train on it: its content is that of .*/day_2.csv',
      'data.valid: data.train has .*/valid.csv too, so its metrics say nothing of new samples',
      'data.test: data.train has .*/test.csv too',
      '/day_1.csv holds the samples of .*/copy.tsv: metrics of data.valid say nothing',
    ):
      self.assertRegex(text, wanted)


if __name__ == '__main__':
  tf.test.main()
