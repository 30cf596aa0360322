"""report.html: what it says, and what a browser makes of it."""

import html
import json
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import unittest
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import tensorflow as tf
import yaml
from plotly.offline import get_plotlyjs_version
from sklearn.metrics import log_loss

import trainer
from tests.support import commands, runs, small
from trainer import config
from trainer.errors import UserError
from trainer.tools import closing, comparison, figures, findings, report, summary
from trainer.tools.runs import read_run

BROWSER = next(
  filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome'))), ''
)

# Goes into the page's head: what was wrong, and what the figures show once they are drawn.
PROBE = """<script>
const errors = [];
window.onerror = (text) => { errors.push(String(text)); };
console.error = (...text) => { errors.push(text.join(' ')); };
window.addEventListener('load', () => setTimeout(() => {
  const page = document.documentElement, figures = {}, wide = [];
  for (const plot of document.querySelectorAll('.js-plotly-plot')) {
    figures[plot.id] = {
      traces: plot.data.map(({name, x, y, z}) => ({name, x, y, z})),
      drawn: plot.querySelectorAll('.main-svg').length > 0 && plot.offsetHeight > 100,
    };
    const card = plot.closest('.card').getBoundingClientRect();
    const box = plot.querySelector('.main-svg').getBoundingClientRect();
    if (box.right > card.right || box.left < card.left) wide.push(plot.id);
  }
  // Tables that are wider than their card.
  const cut = [...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth);
  const told = {errors, cut: cut.length, figures, wide, width: page.scrollWidth,
                inner: window.innerWidth, text: document.body.innerText};
  parent.postMessage(JSON.stringify(told), '*');
}, 500));
</script>"""
FRAME = """<body style="margin:0"><iframe src="probed.html" width="{width}" height="5000"
style="border:0"></iframe><pre id="told"></pre><script>
window.addEventListener('message', (e) => {{
  document.getElementById('told').textContent = e.data; }});
</script>"""


def rows_of(table):
  """The rows of the first table in a text of HTML, each as {title: cell}."""
  tree = ElementTree.fromstring(table[table.index('<table') :] + '</table>')
  titles = [cell.text or '' for cell in tree.iterfind('./thead/tr/th')]
  rows = ([cell.text for cell in row] for row in tree.iterfind('./tbody/tr'))
  return [dict(zip(titles, cells, strict=True)) for cells in rows]


# Of a healthy run.
FIGURES = (
  'auc logloss calibration deciles slot_calibration funnel table_bytes features '
  'unknown time_spent speed importance roc lift spread'
).split()


class PageTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = tempfile.mkdtemp(dir=self.get_temp_dir())

  def write(self, name='run', events=None, **train):
    events = runs.healthy_events() if events is None else events
    return runs.write_run(f'{self.folder}/{name}', events, **train)

  def browse(self, path, width):
    """Opens a page in a window of so many pixels, without a network."""
    page = pathlib.Path(path).read_text()
    folder = pathlib.Path(path).parent
    (folder / 'probed.html').write_text(page.replace('<head>', '<head>' + PROBE, 1))
    (folder / 'frame.html').write_text(FRAME.format(width=width))
    done = subprocess.run(
      [
        *(BROWSER, '--headless', '--no-sandbox', '--disable-gpu', '--hide-scrollbars'),
        *('--host-resolver-rules=MAP * ~NOTFOUND', '--virtual-time-budget=20000', '--dump-dom'),
        f'--user-data-dir={self.folder}/browser',
        f'file://{folder}/frame.html',
      ],
      capture_output=True,
      text=True,
      timeout=120,
    )
    told = re.search(r'<pre id="told">(.*?)</pre>', done.stdout, re.DOTALL)
    self.assertTrue(told and told[1], done.stderr[-2000:])
    return json.loads(html.unescape(told[1]))

  def test_it_says_that_older_events_were_dropped(self):
    first, *events = runs.healthy_events()
    later = events[len(events) // 2 :]
    run_dir = self.write(events=[first | {'dropped': 10_000}, *later])
    report.write([run_dir], f'{run_dir}/report.html')
    told = f'Events before step {later[0]["step"]:,} were dropped (report.keep_mb)'
    self.assertIn(told, pathlib.Path(f'{run_dir}/report.html').read_text())

  @unittest.skipUnless(BROWSER, 'no Chromium is installed: apt-get install chromium')
  def test_a_browser_shows_what_the_events_say(self):
    run_dir = self.write('w' * 60)  # that its path has no place to break
    events = runs.healthy_events()
    path = f'{run_dir}/report.html'
    report.write([run_dir], path)
    for width in (1400, 400):
      with self.subTest(width=width):
        page = self.browse(path, width)
        self.assertEqual(page['errors'], [])
        self.assertEqual((page['inner'], page['width'], page['wide']), (width, width, []))
        self.assertTrue(all(figure['drawn'] for figure in page['figures'].values()))
    self.assertContainsSubset(FIGURES, page['figures'])
    shown = {
      (name, trace.get('name')): trace
      for name, figure in page['figures'].items()
      for trace in figure['traces']
    }

    def told(event, field, **where):
      found = [e for e in events if e['event'] == event and where.items() <= e.items()]
      return [e['step'] for e in found], [e[field] for e in found]

    for metric in ('auc', 'logloss', 'calibration'):
      for name, event, where in (
        ('train', 'train', {}),
        ('next', 'eval', {'split': 'next'}),
        ('test', 'eval', {'split': 'test'}),
      ):
        x, y = told(event, metric, **where)
        trace = shown[metric, name]
        self.assertEqual((trace['x'], trace['y']), (x, y), (metric, name))
    within = shown['auc', 'within a pass']
    self.assertEqual((within['x'], within['y']), told('window', 'auc'))
    self.assertNotIn(('auc', 'best'), shown)  # nothing chooses among the states of days
    (deciles,) = told('eval', 'deciles', split='test')[1]
    self.assertEqual(shown['deciles', 'test']['x'], deciles['predicted'])
    self.assertEqual(shown['deciles', 'test']['y'], deciles['ctr'])
    self.assertNotIn(('deciles', 'next'), shown)  # of another state than the one that is kept
    # Seen: those that are there after the last pass, and those that were evicted before it.
    self.assertEqual(
      dict(zip(shown['funnel', 'seen']['y'], shown['funnel', 'seen']['x'])),
      {slot: 4000 * (i + 1) + 3 * 100 for i, slot in enumerate(runs.SLOTS)},
    )
    unknown = [e['slots'] for e in events if e.get('split') == 'next']
    self.assertAllClose(
      page['figures']['unknown']['traces'][0]['z'],
      [[100 * slots[slot]['unknown'] for slots in unknown] for slot in runs.SLOTS],
      atol=5e-3,
    )
    self.assertEqual(
      dict(zip(shown['importance', 'the model']['y'], shown['importance', 'the model']['x'])),
      {slot: v['auc'] for slot, v in events[-2]['columns'].items()},
    )
    self.assertIn('was trained on 400,000 samples: 4 passes of 4 days.', page['text'])

  def test_quality_of_each_task(self):
    events = runs.healthy_events()
    for e in events:
      if 'auc' in e and e['event'] != 'importance':
        click = {figure: e[figure] for figure in ('auc', 'logloss', 'calibration', 'ctr')}
        e['tasks'] = {'click': click, 'conversion': click | {'auc': e['auc'] - 0.25}}
    run_dir = self.write(events=events)
    tree = yaml.safe_load(pathlib.Path(run_dir, 'config.yaml').read_text())
    tree['data'] |= {'valid': ['gone'], 'labels': [{'name': 'click'}, {'name': 'conversion'}]}
    tree['model']['tasks'] = {'click': {}, 'conversion': {}}
    tree['train']['plateau'] = {'metric': 'auc', 'task': 'conversion'}
    runs.write_config(tree, run_dir)
    report.write([run_dir], f'{run_dir}/report.html')
    page = pathlib.Path(run_dir, 'report.html').read_text()
    for name in ('auc', 'logloss', 'calibration'):
      for task in ('click', 'conversion'):
        self.assertEqual(page.count(f'id="{name}_{task}"'), 1)
    self.assertIn('>Calibration conversion</h2>', page)
    ahead = [e for e in events if e.get('split') == 'next']
    last = ahead[-1]['auc'] - 0.25
    self.assertIn(f'Before the training on day_03, its conversion AUC was {last:.4f}', page)
    test = events[-3]['auc']
    for task, auc in (('click', test), ('conversion', test - 0.25)):
      table = page.partition(f'<h3>{task}</h3>')[2].partition('</table>')[0]
      self.assertEqual([r['AUC'] for r in rows_of(table) if r[''] == 'test'], [f'{auc:.4f}'])

  @unittest.skipUnless(BROWSER, 'no Chromium is installed: apt-get install chromium')
  def test_a_browser_compares_runs(self):
    dirs = [self.write('one'), self.write('other', runs.healthy_events(seed=1), batch_size=99)]
    report.write(dirs, f'{self.folder}/comparison.html')
    for width in (1400, 400):
      page = self.browse(f'{self.folder}/comparison.html', width)
      self.assertEqual((page['errors'], page['width'], page['wide']), ([], width, []))
    self.assertLen(page['figures']['auc_next']['traces'], 2)
    self.assertIn('train.batch_size', page['text'])

  @unittest.skipUnless(BROWSER, 'no Chromium is installed: apt-get install chromium')
  def test_headings_of_a_wide_table_wrap(self):
    names = [f'difference of metric {i}' for i in range(12)]
    table = pd.DataFrame([range(12)], columns=names)
    report.write_page('wide', {'table': table}, f'{self.folder}/wide.html')
    for width, cut in ((1400, 0), (400, 1)):
      self.assertEqual(self.browse(f'{self.folder}/wide.html', width)['cut'], cut)

  def test_impressions_and_clicks_of_slots_are_those_of_the_log(self):
    rng, n = np.random.default_rng(0), 2000
    frame = pd.DataFrame({name: rng.integers(0, 9, n) for name in ('user', 'item', 'last')})
    frame['click'] = rng.random(n) < 0.3
    wanted = n, int(frame['click'].sum())
    for counts in (False, True):
      slots = [{'name': 'user', 'counts': counts}, {'name': 'item'}]
      data = {'label': 'click', 'slots': [*slots, {'name': 'last', 'shares': 'item'}]}
      tree = small.tree(data=data, train={'epochs': 3})
      run = trainer.fit(tree, run_dir=f'{self.folder}/{counts}', train=frame)
      page = run.report().path
      shown = runs.slots_in(page)
      self.assertEqual(list(shown), ['user', 'item', 'last, with those of item'])
      for slot, times in (('user', 1), ('item', 2)):  # a sample has two items
        for column, number in zip(('impressions', 'clicks'), wanted):
          self.assertEqual(shown[slot][column], f'{times * number:,}')
        self.assertEqual(shown[slot]['ctr'], f'{wanted[1] / wanted[0]:.4g}')
      self.assertEqual(shown['last, with those of item']['impressions'], '')
      self.assertIn('impressions and clicks of one epoch;', pathlib.Path(page).read_text())

  def test_it_needs_no_network(self):
    run_dir = self.write()
    report.write([run_dir], f'{run_dir}/report.html')
    page = pathlib.Path(f'{run_dir}/report.html').read_text()
    self.assertEmpty(re.findall(r'<(?:script|link|img)[^>]*(?:src|href)=', page))
    # Of the version for which the Python package makes its figures.
    self.assertEqual(page.count(f'plotly.js (cartesian - minified) v{get_plotlyjs_version()}'), 1)
    self.assertLess(len(page), 1.7e6)

  def test_many_passes_fit_in_two_megabytes(self):
    events = runs.healthy_events(500)
    run_dir = self.write(events=events)
    report.write([run_dir], f'{run_dir}/report.html')
    self.assertLess(os.path.getsize(f'{run_dir}/report.html'), 2e6)
    curve = figures.quality('auc', 'AUC')(read_run(run_dir)).data[1]
    trained = [e for e in events if e['event'] == 'train']
    self.assertEqual([curve.x[0], curve.x[-1]], [trained[0]['step'], trained[-1]['step']])

  def test_it_begins_with_figures_beside_those_of_a_constant(self):
    events, rng = runs.healthy_events(), np.random.default_rng(0)
    seen = []  # weights and shares of clicks of the passes trained so far
    ahead = {}
    for e in events:
      if e['event'] in ('train', 'eval'):
        e |= {'ctr': rng.uniform(0.1, 0.3), 'weight': rng.uniform(1, 9)}
        if e['event'] == 'train':
          seen.append((e['weight'], e['ctr']))
        ahead[e.get('split', 'train')] = e, list(seen)
    run_dir = self.write(events=events)
    report.write([run_dir], f'{run_dir}/report.html')
    page = pathlib.Path(run_dir, 'report.html').read_text()
    headings = re.findall('<h2 id="(.+?)">(.+?)</h2>', page)
    self.assertEqual([text for _, text in headings[:3]], ['Figures', 'Importance', 'Quality'])
    self.assertEqual(re.findall('<a href="#(.+?)">(.+?)</a>', page), headings)
    self.assertLess(page.index('<table'), page.index('class="summary"'))
    rows = rows_of(page.partition('>Figures</h2>')[2].partition('</table>')[0])
    self.assertEqual(
      [row[''] for row in rows], ['train', 'constant', 'next', 'constant'] + ['test', 'constant']
    )
    for model, constant in zip(rows[::2], rows[1::2]):
      event, before = ahead[model['']]
      weights, shares = zip(*before)
      share = np.average(shares, weights=weights)
      loss = log_loss([0, 1], [share] * 2, sample_weight=[1 - event['ctr'], event['ctr']])
      self.assertEqual(model['logloss'], f'{event["logloss"]:.4f}')
      self.assertEqual(
        [constant[title] for title in ('AUC', 'logloss', 'calibration')],
        ['0.5000', f'{loss:.4f}', f'{share / event["ctr"]:.4f}'],
      )
    low, high = map(float, rows[-2]['AUC, 95 %'].split(' to '))
    self.assertBetween(float(rows[-2]['AUC']), low, high)
    self.assertEqual(rows[0]['AUC, 95 %'] or '', '', 'of samples learned from')

  def test_the_command_says_what_is_wrong(self):
    for arguments, wanted in (
      ([], 'error: found no RUN_DIR'),
      ([self.folder], f'error: {self.folder}: no config.yaml there; wanted the run_dir'),
    ):
      done = commands.run('-m', 'trainer.cli.report', *arguments)
      self.assertEqual(done.returncode, 2, done.stderr)
      self.assertStartsWith(done.stderr.splitlines()[-1], wanted)


class WordsTest(tf.test.TestCase):
  def run_of(self, events, **train):
    run_dir = f'{tempfile.mkdtemp(dir=self.get_temp_dir())}/run'
    return read_run(runs.write_run(run_dir, events, **train))

  def test_a_healthy_run(self):
    run = self.run_of(runs.healthy_events())
    self.assertEqual(findings.faults(run), [])
    self.assertEqual(summary.state(run), 'finished')
    text = ' '.join(summary.summary(run))
    self.assertIn('A model of linear, fm, dnn over 3 slots', text)
    self.assertIn('24,000 features', text)
    self.assertIn('its passes ran at 150,000 samples/s (median) on 2 processes', text)

  def test_the_disk_of_a_stream_is_forecast(self):
    events = runs.healthy_events()
    ends = [e for e in events if e['event'] == 'day_end']
    self.assertGreater(len(ends), 2)
    for i, end in enumerate(ends):
      end |= {'disk_bytes': 5e6 + 2e6 * i, 'disk_free': 100e6 - 2e6 * i}
    days = (100 - 2 * (len(ends) - 1)) / 2
    self.assertIn(
      f'MB and grows by 2.0 MB a day: its disk is full in {days:.0f} days.',
      ' '.join(summary.summary(self.run_of(events))),
    )
    for end in ends:
      end['disk_bytes'] = 5e6
    self.assertIn(
      'takes 5.0 MB, and 0.1 GB of its disk are free.',
      ' '.join(summary.summary(self.run_of(events))),
    )

  def test_a_run_that_was_killed(self):
    events = runs.healthy_events()
    for kept in (0, 1, 2, 5, 9, len(events) - 1):
      run = self.run_of(events[:kept])
      report.write([run.directory], os.path.join(run.directory, 'report.html'))
      self.assertEqual(summary.state(run), 'unfinished')
      self.assertIn('was killed', ' '.join(summary.summary(run)))
    with open(os.path.join(run.directory, 'metrics.jsonl'), 'a', encoding='utf-8') as f:
      f.write('{"event": "tra')  # as a process that was killed leaves it
    self.assertLen(read_run(run.directory).events, len(events) - 1)

  def test_the_first_pass_of_a_new_model_is_not_broken(self):
    for place, wanted in ((0, []), (2, [('label_auc', 'day_02', 0.5)])):
      events = [e for e in runs.healthy_events() if e.get('split') != 'next']
      [e for e in events if e['event'] == 'train'][place]['auc'] = 0.5
      faults = findings.faults(self.run_of(events))
      self.assertEqual([(f.code, f.where, f.figures['auc']) for f in faults], wanted)

  def test_what_went_wrong_is_named(self):
    def change(event, place, **fields):
      events = runs.healthy_events()
      [e for e in events if e['event'] == event][place].update(fields)
      return events

    def change_slot(place, slot, **fields):
      events = runs.healthy_events()
      for e in [e for e in events if e['event'] == 'train'][place:]:
        e['slots'][slot] |= fields
      return events

    leak = {'user': {'auc': 0.4}, 'item': {'auc': 0.01}, 'query': {'auc': 0.0}}
    late = {
      'event': 'pass',
      'step': 5,
      'pass': 'day_9',
      'fate': 'late',
      'reason': 'day_9.csv: late',
      'time': 1.0,
    }
    refused_then_trained = [
      *runs.healthy_events(),
      late | {'fate': 'refused', 'reason': 'day_9.csv: damaged'},
      next(e for e in runs.healthy_events() if e['event'] == 'train') | {'pass': 'day_9'},
    ]
    reason = 'rank 1 was lost: it hung up. The job ends; run the same command again.'
    lost = {'event': 'lost', 'step': 50, 'reason': reason, 'time': 1.0}
    again = {'event': 'start', 'step': 50, 'processes': 3, 'time': 1.0}
    for events, wanted in (
      (change('train', 2, ctr=0.001), ('label_rate', 'day_02', {'rate': 0.001, 'usual': 0.2})),
      (change('train', 2, auc=0.5), None),
      (change('eval', 2, auc=0.5), ('label_auc', 'day_02', {'auc': 0.5})),
      (change('eval', 2, auc=0.6, examples=40), None),  # of 8 clicks: it may be chance
      (change('train', 2, ctr=0.05, examples=20), None),
      (
        change_slot(2, 'item', blank=0.99),
        ('went_blank', 'item', {'when': 'from day_02 on', 'share': 0.99, 'of': 'samples'}),
      ),
      (
        change_slot(0, 'item', blank=1.0, features=0),
        ('never_filled', '', {'slots': ['item'], 'dense': []}),
      ),
      (change_slot(0, 'item', blank=1.0), None),  # of the first samples of each pass
      (change('importance', 0, auc=0.99, columns=leak), ('leak', 'user', {'auc': 0.99})),
      (change_slot(3, 'query', effective_rank=1.2), ('collapsed', 'query', {'rank': 1.2})),
      (change_slot(3, 'user', dead_columns=[2, 5]), ('dead_columns', 'user', {'columns': [2, 5]})),
      (change('train', 1, bad=17), ('bad_records', '', {'records': {'day_01': 17}})),
      (change('eval', -1, calibration=1.4), ('miscalibrated', 'test', {'calibration': 1.4})),
      (change('eval', -1, calibration=1.4, examples=100), None),
      (
        change('eval', -1, logloss=0.0362, base_logloss=0.0334),
        ('no_help', 'test', {'metric': 'logloss', 'value': 0.0362, 'constant': 0.0334}),
      ),
      (
        [*runs.healthy_events(), late],
        ('set_aside', '', {'fate': 'late', 'reasons': ['day_9.csv: late']}),
      ),
      (
        refused_then_trained,
        (
          'set_aside',
          '',
          {'fate': 'refused', 'reasons': ['day_9.csv: damaged (trained on since)']},
        ),
      ),
      (refused_then_trained[:-1], ('set_aside', '', {'reasons': ['day_9.csv: damaged']})),
      ([*runs.healthy_events(), again], ('interrupted', '', {'steps': [50]})),
      (
        [*runs.healthy_events(), lost],
        ('lost', '', {'step': 50, 'reason': 'rank 1 was lost: it hung up'}),
      ),
    ):
      found = findings.faults(self.run_of(events))
      with self.subTest(wanted=wanted):
        self.assertLen(found, int(wanted is not None), found)
        for finding in found:
          measured = {name: finding.figures.get(name) for name in wanted[2]}
          self.assertEqual((finding.code, finding.where, measured), wanted)

  def static_events(self, train_auc=(0.7, 0.8), valid_auc=(0.7, 0.75), **of_slot):
    """A run of one pass in two epochs, whose slot 'user' has other figures."""
    of_user = {'features': 2000, 'admitted': 500, 'shows': 64_000.0, 'width': runs.WIDTH}
    of_user |= {'bytes_share': 0.95} | of_slot
    events = [{'event': 'start', 'step': 0, 'processes': 1, 'time': 1.0}]
    for epoch, (own, new) in enumerate(zip(train_auc, valid_auc)):
      where = {'step': 10 * (epoch + 1), 'epoch': epoch, 'time': 2.0}
      size = {'features': 2000, 'admitted': 500, 'table_bytes': 1_000_000}
      figures = {'auc': own, 'examples': 32_000, 'examples_per_second': 9e4, 'ctr': 0.2}
      events.append(
        {'event': 'train', 'pass': 'log', 'slots': {'user': of_user}} | figures | where | size
      )
      slots = {'user': {'unknown': 0.4}}
      scored = {'auc': new, 'logloss': 1.2 - new, 'examples': 4_000, 'ctr': 0.2}
      scored |= {'calibration': 1.0, 'slots': slots}
      events.append({'event': 'eval', 'split': 'valid', 'pass': 'valid'} | scored | where)
      if new == max(valid_auc[: epoch + 1]):
        events.append({'event': 'best'} | where)
    return [*events, {'event': 'end', 'step': 20, 'status': 'finished', 'time': 3.0}]

  def test_a_log_trained_on_twice(self):
    run = self.run_of(self.static_events())
    self.assertEqual(findings.faults(run), [])
    text = ' '.join(summary.summary(run))
    self.assertIn('over 3 slots was trained on 32,000 samples: 1 pass, in 2 epochs.', text)
    self.assertIn(
      'The state of epoch 1 (step 20) is kept for prediction: its logloss on data.valid', text
    )
    # The best state is that of the first epoch, and figures of slots are its own.
    run = self.run_of(self.static_events(valid_auc=(0.75, 0.7)))
    self.assertEqual((run.scores['valid']['step'], len(run.of_kept('train'))), (10, 1))

  def test_an_evaluation_from_before_the_last_pass_is_not_of_the_kept_state(self):
    events = runs.healthy_events()
    last = next(i for i, e in enumerate(events) if e['event'] == 'eval' and e['split'] == 'test')
    bad = events[last] | {'split': 'valid', 'logloss': 0.9, 'base_logloss': 0.5}
    events = events[:last]
    for step, splits in ((events[-1]['step'], ['valid']), (events[-1]['step'] - 25, ['next'])):
      run = self.run_of([*events, bad | {'step': step}])
      self.assertEqual(list(run.scores), splits)
      codes = [fault.code for fault in findings.faults(run)]
      self.assertEqual('no_help' in codes, splits == ['valid'])

  def test_a_run_that_began_with_another_counts_its_impressions_too(self):
    for step, shows in ((0, 32_000), (7, 64_000)):
      events = self.static_events()
      events[0]['step'] = step
      run = self.run_of(events)
      path = f'{run.directory}/report.html'
      report.write([run.directory], path)
      self.assertEqual(runs.slots_in(path)['user']['impressions'], f'{shows:,}')
      told = 'impressions and clicks of all epochs, and of the run of --init_from'
      self.assertEqual(told in pathlib.Path(path).read_text(), step > 0)

  def test_bins_without_samples_are_not_drawn(self):
    """Far outliers have left thousands of empty bins between the others and the missing."""
    first, last = np.zeros([2, 8000])
    first[[1, 2, 5]], last[[2, 5, 7000, -1]] = [0.25, 0.25, 0.5], [0.25, 0.25, 0.25, 0.25]
    of_slot = {'psi': 0.3, 'first': first.tolist(), 'last': last.tolist()}
    events = runs.healthy_events()
    events.insert(-1, events[-1] | {'event': 'drift', 'slots': {'user': of_slot}})
    figure = figures.drift(self.run_of(events))
    for bars, shares in zip(figure.data, ([0.25, 0.25, 0.5, 0, 0], [0, 0.25, 0.25, 0.25, 0.25])):
      self.assertEqual(list(bars.x), ['1', '2', '5', '7000', 'missing'])
      self.assertEqual(list(bars.y), shares)
    self.assertEqual(figure.layout.xaxis.type, 'category')

  def test_an_epoch_with_a_better_logloss_than_the_kept_one(self):
    for auc, logloss, found in ((0.699, 0.44, 1), (0.699, 0.499, 0), (0.65, 0.44, 0)):
      events = self.static_events((0.7, 0.7), (0.7, auc))
      scored = [event for event in events if event.get('split') == 'valid']
      for event, value in zip(scored, (0.5, logloss)):
        event['logloss'] = value
      run = self.run_of(events, plateau={'metric': 'auc'})
      self.assertLen(findings.faults(run), found)

  def test_steps_that_are_too_long(self):
    cases = (0, 1.04, 0.46, 1), (0, 0.51, 0.46, 0), (1, 1.04, 0.46, 0)
    for epoch, logloss, base, told in cases:
      events = self.static_events()
      trained = [e for e in events if e['event'] == 'train']
      trained[epoch] |= {'logloss': logloss, 'base_logloss': base}
      faults = findings.faults(self.run_of(events))
      wanted = [('long_steps', 1.04, 0.46)] * told
      found = [(f.code, f.figures['logloss'], f.figures['base']) for f in faults]
      self.assertEqual(found, wanted, faults)
    trained[0] |= {'logloss': 1.04, 'base_logloss': 0.46}
    trained[0]['dense'] = {n: {'missing': 0, 'size': s} for n, s in (('hour', 21.2), ('age', 9))}
    (fault,) = findings.faults(self.run_of(events))
    self.assertEqual((fault.code, fault.figures['sizes']), ('large_columns', {'hour': 21.2}))

  def test_the_auc_of_a_model_that_learns_accuses_no_label(self):
    for last, told in ((0.7, False), (0.5, True)):
      events = self.static_events((0.5, 0.55, 0.68, 0.7, last), [0.7] * 5)
      for k, trained in enumerate(e for e in events if e['event'] == 'train'):
        trained |= {'pass': f'p{k}', 'epoch': 0}
      faults = findings.faults(self.run_of(events))
      labels = [fault for fault in faults if fault.code in ('label_auc', 'label_rate')]
      wanted = [('label_auc', 'p4', {'auc': 0.5, 'usual': 0.68})] * told
      self.assertEqual(labels, wanted, faults)

  def test_a_retrieval_model_that_finds_less_on_later_samples(self):
    slots = [{'name': slot} for slot in runs.SLOTS]
    towers = {'query': {'slots': ['user', 'query']}, 'item': {'slots': ['item']}}
    for found, users, told in ((0.012, 1000, 1), (0.012, 30, 0), (0.03, 1000, 0)):
      events = [e for e in self.static_events() if e['event'] not in ('eval', 'best')]
      for split, recall in (('valid', 0.035), ('test', found)):
        figures = {
          'recall@20': recall,
          'queries': users,
          'examples': users,
          'step': 20,
          'time': 2.5,
        }
        events.insert(-1, {'event': 'eval', 'split': split, 'pass': split} | figures)
      run_dir = runs.write_run(f'{tempfile.mkdtemp(dir=self.get_temp_dir())}/run', events)
      data = {'train': ['gone.csv'], 'slots': slots, 'group': 'user'}
      model = {'retrieval': towers | {'loss': 'bpr', 'negatives': 9, 'eval_at': [20]}}
      runs.write_config(small.tree({'model': model}, data=data), run_dir)
      faults = findings.faults(read_run(run_dir))
      figures_ = {'metric': 'recall@20', 'test': 0.012, 'valid': 0.035}
      self.assertEqual(faults, [('finds_less', '', figures_)] * told)

  def test_a_model_that_is_too_large_for_its_log(self):
    for events, wanted in (
      (
        self.static_events((0.8, 0.97), (0.7, 0.67)),
        ('overfits', '', {'trained': 0.97, 'new': 0.67, 'advice': [], 'added': []}),
      ),
      (
        self.static_events(features=30_000, shows=90_000.0),
        (
          'unique_values',
          'user',
          {'features': 30_000, 'shows': 45_000, 'bytes_share': 0.95, 'unknown': 0.4}
          | {'may_go': ['user'], 'command': ''},
        ),
      ),
      (
        self.static_events(admitted=100_000),
        ('many_weights', 'user', {'weights': 802_000, 'samples': 32_000, 'share': 1}),
      ),
    ):
      self.assertEqual(findings.faults(self.run_of(events)), [wanted])

  def test_overfitting_names_what_helps(self):
    events = self.static_events((0.8, 0.97), (0.7, 0.67), features=6000)
    columns = {
      'user': {'auc': 0.05, 'auc_plus_minus': 0.001},
      'item': {'auc': -0.01, 'auc_plus_minus': 0.002, 'logloss': -1e-4, 'logloss_plus_minus': 1e-3},
      # Two of three intervals of 95 % would miss 0; those that hold for all three do not.
      'query': {'auc': -0.001, 'auc_plus_minus': 0.0009},
      # Better in one metric, worse in the other.
      'age': {'auc': 0.01, 'auc_plus_minus': 0.002, 'logloss': -0.01, 'logloss_plus_minus': 1e-3},
    }
    measured = {'event': 'importance', 'split': 'valid', 'auc': 0.7, 'columns': columns}
    harmful = ('harmful', '', {'may_go': ['item'], 'command': ''})
    counts = ('rare_values', '', {'settings': {'user': 'data.slots.0.counts=true'}})
    run = self.run_of([*events, measured | {'step': 20, 'time': 3.0}])
    wanted = {'trained': 0.97, 'new': 0.67, 'advice': [counts], 'added': []}
    self.assertEqual(findings.faults(run), [('overfits', '', wanted), harmful])
    (setting,) = counts[-1]['settings'].values()
    self.assertTrue(config.load_of_run(run.directory, [setting]).counted_fields())
    text = pathlib.Path(f'{run.directory}/config.yaml').read_text()
    geo = yaml.safe_load(text) | {'sync': {'mode': 'ps_geo'}}
    runs.write_config(geo, run.directory)
    found, _ = findings.faults(read_run(run.directory))
    self.assertEqual(found.figures['advice'], [], 'this mode refuses counts')
    for split, told in (('valid', [harmful]), ('test', [])):  # which only reports the result
      events = [*self.static_events(), measured | {'split': split, 'step': 20, 'time': 3.0}]
      self.assertEqual(findings.faults(self.run_of(events)), told)

  def test_new_values_are_counted_against_impressions_without_the_decay_of_days(self):
    rng = np.random.default_rng(2)
    days = rng.integers(20_000, 60_000, 5)
    for share, told in ((0.45, False), (0.55, True)):
      events, shows = [], 0.0
      for day, samples in enumerate(days):
        shows += samples
        of_user = {'features': round(share * days[: day + 1].sum()), 'shows': shows}
        step = {'step': day + 1, 'time': 2.0}
        size = {'features': 2000, 'admitted': 500, 'table_bytes': 1_000_000}
        figures = {'auc': 0.7, 'examples': int(samples), 'examples_per_second': 9e4, 'ctr': 0.2}
        trained = {'pass': f'p{day}', 'epoch': 0, 'slots': {'user': of_user}}
        events.append({'event': 'train', 'day': day} | trained | figures | size | step)
        events.append({'event': 'day_end', 'day': day} | size | step)
        shows *= 0.8
      run_dir = runs.write_run(f'{tempfile.mkdtemp(dir=self.get_temp_dir())}/run', events)
      data = {'train': ['gone_*.csv'], 'day_pattern': r'_(\d+)', 'slots': [{'name': 'user'}]}
      runs.write_config(small.tree(data=data, lifecycle={'decay': 0.8}), run_dir)
      found = [f for f in findings.faults(read_run(run_dir)) if f.code == 'unique_values']
      self.assertLen(found, told)
      for fault in found:
        self.assertEqual(fault.where, 'user')
        self.assertAllClose(fault.figures['features'], 0.55 * days.sum(), rtol=1e-4)
        self.assertAllClose(fault.figures['shows'], days.sum())

  def test_steps_that_are_too_long_are_told_with_the_rates(self):
    events = self.static_events()
    for e in events:
      if e['event'] == 'train':
        e |= {'logloss': 0.9, 'base_logloss': 0.5}
    run = self.run_of(events)
    rates = [rule.learning_rate for _, rule, _ in run.cfg.sparse.optimizers()]
    self.assertEqual(rates[0], rates[1])
    (found,) = findings.faults(run)

    def keys(table, *parts):
      return [f'sparse.tables.{table}.{part}.learning_rate' for part in parts]

    own = keys('default', 'linear', 'factors')
    self.assertEqual(found.figures['rates'], dict.fromkeys(own, rates[0]))
    linear = {'linear': {'learning_rate': 0.4}}
    for changes, wanted in (
      ({'sparse': {'tables': {'default': linear}}}, {own[0]: 0.4, own[1]: rates[0]}),
      ({'model': {'interactions': ['linear']}}, None),
      (
        {'sparse': {'tables': {'default': {}, 'wide': {}}}},
        dict.fromkeys([*own, *keys('wide', 'linear', 'factors')], rates[0]),
      ),
    ):
      slots = [{'name': 'user'}, {'name': 'item'}, {'name': 'query'}]
      slots[0] |= {'table': 'wide'} if 'wide' in str(changes) else {}
      data, model = {'train': ['gone_*.csv'], 'slots': slots}, {'interactions': ['linear', 'fm']}
      runs.write_config(small.tree(data=data, model=model) | changes, run.directory)
      (found,) = findings.faults(read_run(run.directory))
      if wanted:
        self.assertEqual(found.figures['rates'], wanted)
      else:
        self.assertEqual(list(found.figures['rates']), own[:1])

  def test_a_cold_start(self):
    events = self.static_events((0.8, 0.97), (0.7, 0.67))
    for e in events:
      if e.get('split') == 'valid':
        e['slots'] = {'user': {'unknown': 0.9}, 'item': {'unknown': 0.2}}
    run = self.run_of(events, plateau={})
    (found,) = findings.faults(run)  # which explains why AUC is far from that of the training
    figures_ = {'shares': {'user': {'valid': 0.9}}, 'may_go': ['user']}
    self.assertEqual(found, ('cold', '', found.figures | figures_))
    self.assertEqual(findings.suspicious(run), ['user'])
    given = f'{run.directory}/given.yaml'
    wanted = f'ctr-tune --config {given} --study_dir {run.directory}-columns --columns'
    self.assertEqual(found.figures['command'], wanted)
    self.assertIn(f'  {wanted}', closing.last_lines(run, run.directory))

  def test_a_day_that_is_added_to_a_run(self):
    for step, added, told in ((0, True, ['day_2']), (7, False, None), (0, False, [])):
      events = self.static_events((0.8, 0.97), (0.6, 0.67))
      events[0]['step'] = step
      if added:
        [e for e in events if e['event'] == 'train'][-1]['pass'] = 'day_2'
      run = self.run_of(events, plateau={}, epochs=2)
      found = [f.figures['added'] for f in findings.faults(run)]
      self.assertEqual(found, [] if told is None else [told])
      more = 'the last of 2 epochs was the best: more may help (train.epochs)'
      lines = list(closing.last_lines(run, run.directory))
      self.assertEqual(more in lines, told == [])
      self.assertEqual('no dnn' in ' '.join(lines), told == [])

  def test_few_clicks_are_told(self):
    events = self.static_events((0.8, 0.763), (0.7, 0.66))
    for e in events:
      if e['event'] == 'eval':
        e |= {'examples': 8000, 'ctr': 20 / 8000}
    run = self.run_of(events, plateau={'metric': 'auc'})
    self.assertEqual(findings.faults(run), [], 'the difference from training may be chance')
    self.assertIn('the best, 0.7000 ± 0.11 (20 clicks).', ' '.join(summary.summary(run)))

  def test_a_comparison_says_differences(self):
    folder = tempfile.mkdtemp(dir=self.get_temp_dir())
    found = [
      read_run(runs.write_run(f'{folder}/{n}', self.static_events(valid_auc=(0.5, auc))))
      for n, auc in (('a', 0.7), ('b', 0.8))
    ]
    table, notes = comparison.differences(found)
    self.assertIn('the valid split; differences are from a.', notes[0])
    self.assertLen(notes, 1)
    self.assertEqual(table['AUC difference'].tolist(), ['', '+0.1000'])

  def test_computed_numbers_are_shown_with_the_digits_in_which_they_differ(self):
    found = []
    for rates in ((5 / 54, 0.25), (0.25 / 3, 0.25 + 1e-12)):
      run_dir = runs.write_run(f'{tempfile.mkdtemp(dir=self.get_temp_dir())}/run', [])
      rules = [{'learning_rate': rate} for rate in rates]
      tree = small.tree(
        data={'train': ['gone'], 'slots': [{'name': 'user'}]},
        sparse={'tables': {'default': dict(zip(('linear', 'factors'), rules))}},
        model={'interactions': ['linear', 'fm']},
      )
      runs.write_config(tree, run_dir)
      found.append(read_run(run_dir))
    keys = comparison.settings_that_differ(found)
    key = 'sparse.tables.default'
    self.assertEqual(keys.loc[f'{key}.linear.learning_rate'].tolist(), ['0.09259', '0.08333'])
    self.assertEqual(keys.loc[f'{key}.factors.learning_rate'].tolist(), ['0.25', '0.250000000001'])

  def test_days_are_no_counts(self):
    events = [e | ({'day': 20_260_901} if 'day' in e else {}) for e in runs.healthy_events()]
    run = self.run_of(events)
    report.write([run.directory], f'{run.directory}/page.html')
    page = pathlib.Path(run.directory, 'page.html').read_text()
    self.assertIn('<td>20260901</td>', page)
    self.assertNotIn('20,260,901', page)

  def test_keys_that_differ(self):
    folder = tempfile.mkdtemp(dir=self.get_temp_dir())
    events = runs.healthy_events()
    found = [
      read_run(runs.write_run(f'{folder}/{n}', events, batch_size=8, epochs=n)) for n in (2, 3)
    ]
    keys = comparison.settings_that_differ(found).drop('data.train')
    self.assertEqual(keys.to_numpy().tolist(), [['2', '3']])
    self.assertEqual(list(keys.index), ['train.epochs'])
    tree = yaml.safe_load(pathlib.Path(found[0].directory, 'config.yaml').read_text())
    tree['data']['slots'] = [{'name': 'item', 'separator': '|'}, {'name': 'new'}, {'name': 'user'}]
    runs.write_config(tree, found[0].directory)
    changed = read_run(found[0].directory)
    keys = comparison.settings_that_differ([changed, found[1]]).drop(['data.train', 'train.epochs'])
    self.assertEqual(
      dict(zip(keys.index, keys.to_numpy().tolist())),
      {
        'data.slots.item.separator': ['|', 'None'],
        'data.slots.new': ['there', ''],
        'data.slots.query': ['', 'there'],
      },
    )

  def test_a_directory_without_a_run_is_refused(self):
    with self.assertRaisesRegex(UserError, 'no config.yaml there'):
      read_run(tempfile.mkdtemp(dir=self.get_temp_dir()))


class PlaceTest(tf.test.TestCase):
  """Where --out is no file, what it names stays and is written to."""

  def setUp(self):
    super().setUp()
    self.folder = tempfile.mkdtemp(dir=self.get_temp_dir())
    self.run_dir = runs.write_run(f'{self.folder}/run', runs.healthy_events())

  def report(self, out, stdout=None):
    return commands.start('-m', 'trainer.cli.report', self.run_dir, '--out', out, stdout=stdout)

  def test_the_report_goes_to_pipes_and_devices(self):
    out = f'{self.folder}/out'
    os.symlink('/proc/self/fd/1', out)  # as /dev/stdout is
    job = self.report(out, subprocess.PIPE)
    page = job.stdout.read()
    self.assertEqual(job.wait(120), 0)
    self.assertStartsWith(page, '<!doctype html>')
    self.assertEndsWith(page, '</html>')
    self.assertEqual(os.readlink(out), '/proc/self/fd/1')

  def test_a_pipe(self):
    pipe, out = f'{self.folder}/pipe', f'{self.folder}/out'
    os.mkfifo(pipe)
    os.symlink(pipe, out)
    with subprocess.Popen(['cat', pipe], stdout=subprocess.PIPE) as reader:
      job = self.report(out)
      page = reader.communicate(timeout=120)[0].decode()
    self.assertEqual(job.wait(120), 0)
    self.assertEndsWith(page, '</html>')
    self.assertTrue(pathlib.Path(pipe).is_fifo())
    self.assertEqual(os.readlink(out), pipe)


if __name__ == '__main__':
  tf.test.main()
