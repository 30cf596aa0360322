"""Slices by the values of a slot: against scikit-learn, and what their intervals promise."""

import pathlib

import numpy as np
import tensorflow as tf
from sklearn.metrics import log_loss, roc_auc_score

from tests.support.batches import join, make_batch
from tests.support.steps import TASKS, make_config
from tests.support.threads import on_threads
from trainer.comm.communicator import SingleProcess
from trainer.data.features import hash_keys, weigh_labels
from trainer.data.texts import texts_of
from trainer.reporting.metric_text import auc_interval
from trainer.tools.evaluated import in_words, json_text, slice_table, without_auc
from trainer.tools.slices import ALL, BLANK, OTHER, slice_errors, slice_figures, slices


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


class IntervalTest(tf.test.TestCase):
  def test_of_few_samples_it_still_holds(self):
    """95 of 100 intervals hold the truth, also where a slice has a handful of clicks."""
    rng = np.random.default_rng(0)
    for bias, spread in ((-3, 1), (-2, 2.5), (-1, 1.5)):
      logits = bias + spread * rng.standard_normal(200_000)
      clicks = rng.random(len(logits)) < sigmoid(logits)
      true_auc = roc_auc_score(clicks, logits)
      for samples in (30, 300):
        tries = rng.integers(0, len(logits), [400, samples])
        found = [
          slice_figures(clicks[some], sigmoid(logits[some] + 0.2), np.ones(samples))
          for some in tries
          if 0 < clicks[some].sum() < samples
        ]
        self.assertGreater(
          np.mean([f['auc_low'] <= true_auc <= f['auc_high'] for f in found]), 0.92
        )
        if samples > 30:
          true = sigmoid(logits + 0.2).sum() / clicks.sum()
          holds = [f['calibration_low'] <= true <= f['calibration_high'] for f in found]
          self.assertGreater(np.mean(holds), 0.91)

  def test_all_clicks_first_is_no_certainty(self):
    low, high = auc_interval(1.0, 2, 50)
    self.assertLess(low, 0.75)
    self.assertEqual(high, 1)
    low, high = auc_interval(0.75, 4000, 40_000)
    self.assertBetween(low, 0.74, 0.745)
    self.assertBetween(high, 0.755, 0.76)

  def test_of_squared_errors(self):
    rng = np.random.default_rng(0)
    errors = 0.3 + rng.standard_normal([300, 40])
    found = [slice_errors(np.zeros(40), e, np.ones(40)) for e in errors]
    self.assertGreater(np.mean([f['error_low'] <= 0.3 <= f['error_high'] for f in found]), 0.91)
    self.assertAllClose(found[0]['rmse'], np.sqrt(np.mean(errors[0] ** 2)))


class SlicesTest(tf.test.TestCase):
  def scored(self, batches, seed=0):
    """Batches as steps stage them, with predictions that follow from the sample."""
    staged = [weigh_labels(batch) for batch in batches]
    return [(b, sigmoid(b.weight * np.float32(3.7) % 4 - 3).astype(np.float32)) for b in staged]

  def test_equal_to_scikit_learn_on_any_number_of_processes(self):
    rng = np.random.default_rng(0)
    batches = [make_batch(rng, 200) for _ in range(6)]
    cfg = make_config({})
    alone = slices(cfg, SingleProcess(), self.scored(batches), ['a', 'c'], 5)
    on_three = on_threads(
      3, lambda c: slices(cfg, c, self.scored(batches[c.rank :: 3]), ['a', 'c'], 5)
    )
    for found in on_three:
      self.assertEqual(
        [[row['key'] for row in found[s]] for s in 'ac'],
        [[row['key'] for row in alone[s]] for s in 'ac'],
      )
      for a, b in zip(found['a'], alone['a']):
        self.assertAllClose(a | {'task': 0}, b | {'task': 0}, rtol=1e-9)
    whole = join(batches)
    probability = sigmoid(whole.weight * np.float32(3.7) % 4 - 3).astype(np.float32)
    holders = {BLANK: set(range(1200))}
    for key, segment in zip(whole.keys.tolist(), whole.segments.tolist()):
      if segment % 3 == 0:
        holders.setdefault(key, set()).add(segment // 3)
        holders[BLANK].discard(segment // 3)
    head = {row['key'] for row in alone['a']} - {BLANK, OTHER, ALL}
    self.assertLen(head, 5)
    self.assertEqual(
      sorted(len(holders[k]) for k in head),
      sorted(len(v) for k, v in holders.items() if k != BLANK)[-5:],
    )
    holders[OTHER] = set().union(*(v for k, v in holders.items() if k != BLANK and k not in head))
    holders[ALL] = set(range(1200))
    for row in alone['a']:
      own = sorted(holders[row['key']])
      y, p, w = whole.label[own], probability[own].astype(np.float64), whole.weight[own]
      self.assertEqual(row['samples'], len(own))
      self.assertAllClose(row['auc'], roc_auc_score(y, p, sample_weight=w), rtol=1e-6)
      self.assertAllClose(row['logloss'], log_loss(y, p, sample_weight=w), rtol=1e-6)
      self.assertAllClose(row['calibration'], (w @ p) / (w @ y), rtol=1e-6)
    self.assertEqual(alone['a'][-1]['key'], ALL)
    ends = [row['auc_high'] for row in alone['a'][:-1]]
    self.assertEqual(ends, sorted(ends))

  def test_tasks_and_slots_of_one_value(self):
    rng = np.random.default_rng(1)
    batches = [make_batch(rng, 300, single=True, tasks=2)]
    cfg = make_config(TASKS | {'model.shared': {'shared_bottom': {'hidden': [8]}}})
    batch = weigh_labels(batches[0])
    probabilities = rng.uniform(0.1, 0.9, [300, 2]).astype(np.float32)
    rows = slices(cfg, SingleProcess(), [(batch, probabilities)], ['b'], 100)['b']
    self.assertNotIn(BLANK, [row['key'] for row in rows])
    for t, task in enumerate(('click', 'conversion')):
      of_task = [row for row in rows if row['task'] == task]
      self.assertEqual(sum(row['samples'] for row in of_task[:-1]), (batch.weight[:, t] > 0).sum())
    one = max(of_task[:-1], key=lambda row: row['samples'])
    own = (batch.keys.reshape(-1, 3)[:, 1] == one['key']) & (batch.weight[:, 1] > 0)
    y, w = batch.label[own, 1], batch.weight[own, 1]
    if one['auc'] is not None:
      self.assertAllClose(one['auc'], roc_auc_score(y, probabilities[own, 1], sample_weight=w))


class TableTest(tf.test.TestCase):
  def test_it_fits_80_columns_whatever_the_figures_are(self):
    rng = np.random.default_rng(0)
    huge = {'samples': 123_456_789, 'clicks': 12_345_678.0, 'calibration_high': 1234.5}
    rows = []
    for value, count in (('a value of many words that says much', 400), ('b', 3), ('(blank)', 0)):
      probabilities = rng.random(count)
      figures = slice_figures(rng.random(count) < probabilities, probabilities, np.ones(count))
      rows.append({'value': value, 'task': None} | figures | (huge if count == 400 else {}))
    text = slice_table('a_slot_with_a_name_of_some_length', rows)
    lines = text.splitlines()
    self.assertLen(lines, 4)
    self.assertLessEqual(max(map(len, lines)), 80)
    self.assertIn('a_slot…', lines[0])
    self.assertIn('logloss calibr.', lines[0])
    self.assertNotIn('rmse', lines[0])
    self.assertIn('…', lines[1])
    self.assertIn(f'{rows[0]["auc"]:.4f} {rows[0]["auc_low"]:.3f}..', lines[1])
    self.assertIn(' 123,456,789 12,345,678 ', lines[1])
    self.assertTrue(lines[3].endswith('-'))

  def test_what_a_task_of_several_counts(self):
    for task, title in ((None, 'clicks'), ('booking', 'positives')):
      table = slice_table('city', [{'value': 'Ulm', 'task': task, 'samples': 9, 'clicks': 3.0}])
      self.assertEqual(table.splitlines()[0].split(), ['city', 'samples', title])

  def test_of_squared_errors(self):
    figures = slice_errors(np.zeros(3), np.array([1.0, 2.0, 3.0]), np.ones(3))
    lines = slice_table('city', [{'value': 'Ulm', 'task': None} | figures]).splitlines()
    self.assertEqual(lines[0].split(), ['city', 'samples', 'rmse', 'error', '95', '%'])
    self.assertEqual(lines[1].split()[:4], ['Ulm', '3', '2.1602', '2'])

  def test_small_errors_have_six_decimals(self):
    rows = [{'value': v, 'task': None, 'logloss': x} for v, x in (('a', 0.0123456), ('b', 0.25))]
    cells = [line.split()[-1] for line in slice_table('x', rows).splitlines()]
    self.assertEqual(cells, ['logloss', '0.012346', '0.250000'])
    rows = [{'value': 'a', 'task': None, 'rmse': 0.0123456}]
    self.assertIn(' 0.012346', slice_table('x', rows))

  def test_json_is_indented_in_a_terminal_alone(self):
    for is_terminal, wanted in ((True, '{\n  "auc": 0.5\n}'), (False, '{"auc": 0.5}')):
      self.assertEqual(json_text({'auc': 0.5}, is_terminal), wanted)

  def test_an_evaluation_in_words(self):
    click = {'examples': 12_345_678, 'auc': 0.75, 'logloss': 0.25, 'gauc': None}
    self.assertEqual(list(in_words(click))[0], '12,345,678 samples · AUC 0.7500 · logloss 0.2500')
    click |= {'gauc': 0.7, 'base_logloss': 0.5, 'calibration': 1.02, 'slots': {}, 'deciles': []}
    lines = '\n'.join(in_words(click | {'tasks': {'click': click, 'conversion': click}}))
    self.assertLessEqual(max(map(len, lines.splitlines())), 80)
    self.assertIn('conversion · 12,345,678 samples', lines)
    few = {'examples': 300, 'auc': 0.75, 'ctr': 0.1}
    self.assertRegex(next(in_words(few)), r'AUC 0.7500 ± 0.\d\d \(30 clicks\)')
    self.assertRegex(next(in_words(few | {'tasks': {'booking': few}})), r' \(30 positives\)')
    self.assertIn('calibration 1.0200', ' '.join(lines.split()))
    self.assertIn('--by COLUMN', lines)
    ranked = {'examples': 1888, 'queries': 713, 'recall@20': 0.5}
    lines = '\n'.join(in_words(ranked, False))
    self.assertStartsWith(lines, '1,888 samples of 713 users · recall@20 0.5000')
    self.assertNotIn('--by', lines)

  def test_labels_of_one_class_in_words(self):
    for label in (0, 1):
      metrics = {'examples': 3, 'auc': None, 'ctr': float(label), 'logloss': 0.25}
      told = f'3 samples · no AUC: all labels are {label} · logloss 0.2500'
      self.assertEqual(next(in_words(metrics)), told)
      self.assertEqual(list(without_auc(metrics)), [('no_auc', '', {'label': label})])
      tasks = {'tasks': {'click': metrics, 'buy': metrics | {'auc': 0.5, 'ctr': 0.5}}}
      (finding,) = without_auc(metrics | tasks)
      self.assertEqual(finding.sentence, f'click: no AUC: all labels are {label}')


class TextsTest(tf.test.TestCase):
  def test_texts_of_keys_are_found_again(self):
    folder = pathlib.Path(self.get_temp_dir())
    (folder / 'log.csv').write_text('a,b,c,click\nred:0.5| blue ,7,x|y,1\n,8,z,0\ngreen,7,,1\n')
    cfg = make_config({'data.label': 'click', 'data.dense': []})
    ids = cfg.slot_ids()
    for slot, texts in (('a', ['red', 'blue', 'green']), ('b', ['7', '8']), ('c', ['x', 'y', 'z'])):
      keys = hash_keys(texts, ids[slot]).numpy().tolist()
      found = {}
      of = next(s for s in cfg.data.slots if s.name == slot)
      paths = [f'{folder}/gone.csv', f'{folder}/log.csv']
      for some in texts_of(cfg, paths, of, [*keys, 12345]):
        found |= some
      self.assertEqual(found, dict(zip(keys, texts)))


if __name__ == '__main__':
  tf.test.main()
