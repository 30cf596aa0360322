"""What a finished run prints: narrow tables, the best marked, and what to type next."""

import contextlib
import io
import json
import math
import os
import pathlib
import shlex
import tempfile

import tensorflow as tf
import yaml

from tests.support import runs, small
from trainer import config
from trainer.reporting import live_line
from trainer.reporting.live_line import LiveLine
from trainer.tools import closing
from trainer.tools.runs import read_run

DATA = {'train': ['day_*.csv'], 'valid': ['valid.csv'], 'slots': [{'name': 'user'}]}
CONFIG = small.tree(data=DATA | {'group': 'user'})


class ClosingTest(tf.test.TestCase):
  def printed(self, events, tree=CONFIG):
    folder = pathlib.Path(tempfile.mkdtemp(dir=self.get_temp_dir()))
    runs.write_config(tree, str(folder))
    lines = [json.dumps({'step': i, 'time': i} | e) for i, e in enumerate(events)]
    (folder / 'metrics.jsonl').write_text('\n'.join(lines) + '\n')
    run, out = read_run(str(folder)), io.StringIO()
    with contextlib.redirect_stdout(out):
      for of_task in run.by_task():
        closing.print_table(of_task)
      for line in closing.last_lines(run, run.directory):
        print(line.replace(shlex.quote(str(folder)), 'RUN').replace(str(folder), 'RUN'))
    return out.getvalue().splitlines()

  def events(self, epochs):
    for epoch in range(epochs):
      quality = {
        'logloss': 0.5 - 0.01 * (epoch % 4),
        'auc': 0.7 + 0.01 * (epoch % 4),
        'gauc': 0.6,
        'calibration': 1.0,
      }
      common = {'epoch': epoch, 'examples': 12_345_678} | quality
      yield {'event': 'train', 'pass': 'a_pass_with_a_name_of_some_length_01'} | common
      yield {'event': 'eval', 'split': 'valid', 'pass': 'valid'} | common
      if epoch < 4:
        yield {'event': 'best', 'epoch': epoch}
    yield {'event': 'eval', 'split': 'test', 'pass': 'test'} | common

  def test_the_table_fits_and_marks_the_best_epoch(self):
    lines = self.printed(list(self.events(30)))
    self.assertLessEqual(max(map(len, lines)), closing.WIDTH)
    marked = [line for line in lines if line.startswith(' best')]
    self.assertLen(marked, 1)
    self.assertIn('0.7300', marked[0])
    # The best epoch, the fourth, lies in a gap: train and valid show what is before and after it.
    gaps = [i for i, line in enumerate(lines) if ' more not shown' in line]
    self.assertLen(gaps, 4)
    self.assertEqual(lines[gaps[3] - 1], marked[0])
    self.assertIn(' 0.7300 ', lines[gaps[1] - 1])  # what the fourth epoch trained on
    text = '\n'.join(lines)
    for wanted in (
      'kept: epoch 3, the best of data.valid: logloss 0.4700',
      'test: auc 0.7100',
      'ctr-predict --run_dir RUN',
    ):
      self.assertIn(wanted, text)

  def test_a_constant_knows_only_what_was_trained_before(self):
    def rows(events, rate=1.0, loss='log_loss'):
      model = {'negative_sampling_rate': rate, 'loss': loss}
      lines = self.printed(
        [{'epoch': 0, 'examples': 9} | e for e in events], small.tree(CONFIG, model=model)
      )
      return [line.split() for line in lines if line.split()[:1] == ['constant']]

    def day(event, ctr, weight):
      quality = {'logloss': 0.4, 'auc': 0.7, 'calibration': 1.0}
      return event | {'pass': 'day', 'ctr': ctr, 'weight': weight} | quality

    def figures(p, ctr):
      loss = -ctr * math.log(p) - (1 - ctr) * math.log(1 - p)
      return ['constant', f'{loss:.4f}', '0.5000', f'{p / ctr:.3f}']

    ahead, test = ({'event': 'eval', 'split': split} for split in ('next', 'test'))
    first = [day(ahead, 0.2, 100), day({'event': 'train'}, 0.2, 100)]
    self.assertEqual(rows(first[:1]), [], 'no constant is known yet')
    second = [*first, day(ahead, 0.1, 300), day({'event': 'train'}, 0.1, 300)]
    both = (0.2 * 100 + 0.1 * 300) / 400
    of_train_and_next = [figures(both, 0.1), figures(0.2, 0.1)]
    self.assertEqual(rows(second), of_train_and_next)
    # data.test has all negatives, of which the training log has a fifth.
    all_negatives = both * 0.2 / (both * 0.2 + 1 - both)
    self.assertEqual(
      rows([*second, day(test, 0.03, 50)], rate=0.2),
      [*of_train_and_next, figures(all_negatives, 0.03)],
    )
    numbers = {
      'event': 'train',
      'pass': 'a',
      'rmse': 0.9,
      'mean': 3.0,
      'base_rmse': 1.5,
      'weight': 2,
    }
    other = numbers | test | {'mean': 5.0}
    self.assertEqual(
      rows([numbers, other], loss='squared_error'),
      [['constant', '1.5000'], ['constant', f'{math.hypot(1.5, 2.0):.4f}']],
    )

  def test_a_best_that_was_forgotten_is_not_the_kept_one(self):
    events = [*self.events(2), {'event': 'best_forgotten'}, {'event': 'train', 'pass': 'new'}]
    text = '\n'.join(self.printed(events))
    self.assertIn('kept: the last state, after new', text)

  def test_few_clicks_and_small_loglosses(self):
    rare = {'ctr': 0.005, 'examples': 8000, 'logloss': 0.032134}
    for tree in (CONFIG, small.tree(CONFIG, data={'group': None})):
      lines = self.printed([e | rare for e in self.events(20)], tree)
      self.assertLessEqual(max(map(len, lines)), closing.WIDTH)
      (title,) = [line for line in lines if 'AUC' in line and 'logloss' in line]
      (test,) = [line for line in lines if line.startswith(' test')]
      self.assertIn(' ± ', title)
      self.assertRegex(test, r' 0\.032134 +0\.7300 +0\.0\d\d ')
      (train,) = [line for line in lines if line.startswith(' train')][:1]
      self.assertRegex(
        train, r' 0\.032134 +0\.7000 +(0\.6|1\.000)', 'of samples learned from: no ±'
      )
      self.assertRegex(
        '\n'.join(lines), r'test: auc 0\.7300 ± 0.0\d \(40 clicks\), .*logloss 0\.032134'
      )

  def test_a_run_that_exports_is_served_next(self):
    for export, wanted in (({}, 'ctr-export --run_dir RUN'), ({'base': True}, 'ctr-serve')):
      text = '\n'.join(self.printed(list(self.events(1)), small.tree(CONFIG, export=export)))
      self.assertIn(wanted, text)

  def test_findings_are_told(self):
    bad = {'event': 'train', 'pass': 'x', 'epoch': 0, 'bad': 3}
    fates = (
      {'event': 'pass', 'pass': 'x', 'fate': f, 'reason': 'why'} for f in ('late', 'skipped')
    )
    events = [*self.events(1), bad]
    self.assertIn('3 bad records were left out: x (3).', self.printed(events))
    constant = {'event': 'eval', 'split': 'test', 'pass': 't', 'logloss': 0.5, 'base_logloss': 0.4}
    lines = self.printed([*events, *fates, constant])
    self.assertIn('4 findings in report.html', lines)
    self.assertNotIn('1 pass was skipped: why.', lines)

  def retrieval(self):
    sides = {side: {'slots': [side]} for side in ('user', 'item')}
    data = {'slots': [{'name': 'user'}, {'name': 'item'}]}
    towers = {'query': sides['user'], 'item': sides['item']}
    return small.tree(CONFIG, data=data) | {'model': {'retrieval': towers}}

  def test_rankings_that_do_not_fit_are_left_out_whole(self):
    tree = self.retrieval()
    names = [f'{name}@20' for name in config.RANKING_METRICS]
    event = {'epoch': 0, 'examples': 123_456_789, 'loss': 123.4567} | dict.fromkeys(names, 0.1234)
    lines = self.printed([{'event': 'eval', 'split': 'test', 'pass': 'a_long_name'} | event], tree)
    (row,) = [line for line in lines if line.startswith(' test ')]
    self.assertLessEqual(len(row.rstrip()), closing.WIDTH)
    self.assertRegex(row, r'^ test +\S+ +0 +123,456,789 +123\.4567( +0\.1234)+ *$')

  def test_rankings_stand_beside_the_list_of_the_most_shown_items(self):
    figures = {'epoch': 0, 'examples': 9, 'recall@20': 0.0145, 'unknown_queries': 0.9}
    event = {'event': 'eval', 'split': 'test', 'pass': 'test', 'base_recall@20': 0.066} | figures
    lines = self.printed([event], self.retrieval())
    others = {f'base_{name}@20': 0.5 for name in config.RANKING_METRICS}
    wide = self.printed([event | others], self.retrieval())
    self.assertLessEqual(max(map(len, wide)), closing.WIDTH)
    (row,) = [line.split() for line in lines if 'popular' in line]
    self.assertEqual(row, ['popular', '0.0660'])
    after = lines[lines.index('test: recall@20 0.0145') + 1 :]
    self.assertEqual(after[0].strip(), 'the most shown items reach recall@20 0.0660')
    self.assertEqual(after[1].strip(), '90.0% of the queries are empty or unknown to the model')
    self.assertStartsWith(after[2], 'On data.test the model finds no more than a list of the most')
    better = self.printed([event | {'recall@20': 0.07}], self.retrieval())
    self.assertNotIn('finds no more', '\n'.join(better))

  def test_of_many_passes_together(self):
    many = {'pass': ' '.join(f'valid_{i}' for i in range(31))}
    lines = self.printed([e | (many if e.get('split') == 'valid' else {}) for e in self.events(3)])
    self.assertLessEqual(max(map(len, lines[: lines.index('next:')])), closing.WIDTH)

  def test_a_long_name_keeps_its_day(self):
    days = [f'applications_2026-03-{day}' for day in (30, 31)]
    events = list(self.events(2))
    for event, day in zip([e for e in events if e['event'] == 'train'], days):
      event['pass'] = day
    table = '\n'.join(self.printed(events))
    for day in days:
      self.assertIn(f'train  …{day[-16:]} ', table)
    self.assertEqual(live_line.short_name(days[0], 12, 'applications_2026-03-'), '…_2026-03-30')
    self.assertEqual(live_line.short_name(days[0], 12), 'appl…6-03-30')
    self.assertEqual(live_line.short_name(days[0], 23), days[0])

  def test_each_task_has_a_table_and_the_plateau_names_the_one_that_decides(self):
    tree = small.tree(
      CONFIG,
      data={'labels': [{'name': 'click'}, {'name': 'conversion'}]},
      model={'tasks': {'click': {}, 'conversion': {}}},
      train={'plateau': {'metric': 'logloss', 'task': 'conversion'}},
    )
    events = []
    for epoch, (auc, logloss) in enumerate([(0.7, 0.21), (0.8, 0.20), (0.9, 0.22)]):
      click = {'auc': auc, 'logloss': 0.5, 'calibration': 1.0, 'gauc': 0.61}
      conversion = {'auc': auc - 0.1, 'logloss': logloss, 'calibration': 1.125, 'gauc': 0.62}
      tasks = {'tasks': {'click': click, 'conversion': conversion}, 'epoch': epoch, 'examples': 9}
      events += [
        {'event': 'train', 'pass': 'a', **click, **tasks},
        {'event': 'eval', 'split': 'valid', 'pass': 'valid', **click, **tasks},
      ]
      if epoch < 2:
        events.append({'event': 'best', 'epoch': epoch})
    events += [{'event': 'eval', 'split': 'test', 'pass': 'test', **click, **tasks}]
    lines = self.printed(events, tree)
    text = '\n'.join(lines)
    heads = [line for line in lines if 'pass' in line]
    self.assertEqual([line.split()[0] for line in heads], ['click', 'conversion'])
    marked = [line.split() for line in lines if line.startswith(' best')]
    self.assertEqual(
      [row[-4:] for row in marked],
      [
        ['0.5000', '0.8000', '0.6100', '1.000'],
        ['0.2000', '0.7000', '0.6200', '1.125'],
      ],
    )
    self.assertIn('kept: epoch 1, the best of data.valid: conversion logloss 0.2000', text)
    self.assertIn('test: click auc 0.9000, gauc 0.6100, logloss 0.5000', text)
    self.assertIn('test: conversion auc 0.8000, gauc 0.6200, logloss 0.2200', text)

  def test_lines_without_a_terminal(self):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
      line = LiveLine(active=True, terminal=False)
      for i in range(5):
        line.show(f'step {i}')
      line.show('done', keep=True)
    # One line in ten seconds, and what is kept; each with its time.
    self.assertRegex(out.getvalue(), r'^[-\d]{10} [:\d]{8} step 0\n[-\d]{10} [:\d]{8} done\n$')

  def test_a_full_disk_or_a_closed_pipe_ends_no_training(self):
    for place in ('/dev/full', 'pipe'):
      reading, writing = os.pipe()
      os.close(reading)
      with open(place if place == '/dev/full' else writing, 'w', encoding='ascii') as out:
        if place == '/dev/full':
          os.close(writing)
        with contextlib.redirect_stdout(out), self.assertLogs('absl', 'WARNING') as logs:
          line = LiveLine(active=True)
          line.show('one', keep=True)
          line.show('two', keep=True)
        self.assertLen(logs.output, 1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())  # closing writes what is left

  def test_the_live_line_fits_the_terminal(self):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
      line = LiveLine(active=True, terminal=True)
      line.show('x' * 100)
      line.show('short')
      line.show('kept', keep=True)
    shown = out.getvalue()
    self.assertTrue(all(len(part) < 80 for part in shown.replace('\n', '\r').split('\r')))
    self.assertTrue(shown.endswith('kept'.ljust(5) + '\n'))

  def test_names_of_files_are_shown_as_they_are(self):
    folder = pathlib.Path(tempfile.mkdtemp(dir=self.get_temp_dir())) / 'a run'
    folder.mkdir()
    runs.write_config(CONFIG, str(folder))
    events = [
      {'event': 'train', 'step': 1, 'time': 1, 'pass': name, 'epoch': 0, 'examples': 5}
      for name in ('day [x]', 'day [/x]', 'two\nlines')
    ]
    (folder / 'metrics.jsonl').write_text(''.join(json.dumps(e) + '\n' for e in events))
    run, out = read_run(str(folder)), io.StringIO()
    with contextlib.redirect_stdout(out):
      closing.print_table(run)
      for line in closing.last_lines(run, run.directory):
        print(line)
      LiveLine(active=True).show('epoch 0 · two\nlines', keep=True)
    text = out.getvalue()
    for wanted in ('day [x]', 'day [/x]', 'train  two\\nlines', '· two\\nlines\n', "a run' --data"):
      self.assertIn(wanted, text)

  def test_missing_data_tells_what_it_looks_like(self):
    cfg = config.parse(yaml.safe_dump(CONFIG), 'my.yaml')
    told = config.columns_wanted(cfg, 'my.yaml')
    self.assertTrue(told.startswith('wanted files with the columns label, user; '), told)
    self.assertTrue(told.endswith('the first lines of my.yaml may tell their source'), told)


if __name__ == '__main__':
  tf.test.main()
