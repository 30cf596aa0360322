"""The benchmarks' harness on toy shapes:

data, a contender's rounds, figures and pages. Nothing here asks how fast.
"""

import dataclasses
import http.server
import json
import os
import sys
import tempfile
import threading
import types
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
import yaml
from absl import flags
from absl.testing import flagsaver

from benchmarks import (
  bench_data,
  dtypes,
  full_panel,
  load,
  page,
  quality,
  run,
  serving_bench,
  tasks_quality,
)
from tests.support.exports import RedisServer
from trainer import config
from trainer.data.conversion import prepare_pass
from trainer.data.prepared import PreparedPass

TOY = bench_data.Shape(
  batch=64, slots=4, dense=2, width=4, hidden=(8,), vocabulary=(3, 10, 100, 50), batches=3
)


class DataTest(tf.test.TestCase):
  def _prepared(self, shape):
    directory = os.path.join(self.get_temp_dir(), f'pass_{shape.multi}_{shape.history}')
    file = os.path.join(self.get_temp_dir(), 'config.yaml')
    with open(file, 'w', encoding='utf-8') as f:
      yaml.safe_dump(bench_data.config(shape, directory), f)
    cfg = config.load(file)
    bench_data.prepare(shape, 0, cfg, directory)
    return PreparedPass(directory, cfg)

  def test_all_contenders_train_on_the_same_samples(self):
    keys, dense, label = bench_data.batches(TOY, 0, bench_data.hashed_keys)
    for ours, *theirs in zip(self._prepared(TOY).batches(TOY.batch), keys, dense, label):
      self.assertAllEqual(ours.keys, theirs[0].ravel())
      self.assertAllEqual(ours.dense, theirs[1])
      self.assertAllEqual(ours.label, theirs[2].ravel())
      self.assertEmpty(ours.segments)

  def test_static_ids_are_as_distinct_as_hashed_keys(self):
    static, _, _ = bench_data.batches(TOY, 0, bench_data.static_ids(TOY))
    hashed, _, _ = bench_data.batches(TOY, 0, bench_data.hashed_keys)
    pairs = set(zip(np.ravel(static), np.ravel(hashed)))
    self.assertLen({a for a, _ in pairs}, len(pairs))
    self.assertLen({b for _, b in pairs}, len(pairs))
    self.assertLess(np.max(static), sum(TOY.vocabulary))

  def test_histories_of_both_contenders_hold_the_same_items(self):
    shape = bench_data.Shape(
      **TOY.as_dict() | {'slots': 3, 'vocabulary': (50, 10, 50), 'history': 4}
    )
    ours = next(self._prepared(shape).batches(shape.batch))
    keys, history, dense, label = (a[0] for a in bench_data.history_batches(shape, 0))
    slot = ours.segments % 3
    self.assertAllEqual(ours.keys[slot == 2], bench_data.hashed_keys(0, history.ravel()))
    self.assertAllEqual(ours.keys[slot == 0], bench_data.hashed_keys(0, keys[:, 0]))
    self.assertAllEqual(ours.keys[slot == 1], bench_data.hashed_keys(1, keys[:, 1] - 50))
    self.assertAllEqual(ours.dense, dense)
    self.assertAllEqual(ours.label, label.ravel())

  def test_a_raw_log_is_of_the_same_labels_as_tsv_and_as_parquet(self):
    read = []
    for suffix in ('.tsv', '.parquet'):
      path = os.path.join(self.get_temp_dir(), f'log{suffix}')
      bench_data.write_log(TOY, 0, path)
      cfg = config.Config.model_validate(bench_data.raw_config(TOY, path))
      prepare_pass(cfg, path, path + '.prepared')
      read.append(PreparedPass(path + '.prepared', cfg).batches(TOY.samples))
    (tsv,), (parquet,) = read
    for a, b in zip(tsv, parquet):
      self.assertAllEqual(a, b)
    self.assertAllEqual(tsv.label, bench_data.make(TOY, 0)[3])
    self.assertAllClose(len(tsv.keys) / (TOY.samples * TOY.slots), 0.9, atol=0.05)

    batch = next(self._prepared(bench_data.Shape(**TOY.as_dict() | {'multi': 1})).batches(64))
    slot = batch.segments % TOY.slots
    self.assertAllEqual(batch.keys >> 52, slot + 1)
    self.assertAllEqual(np.bincount(slot)[:3], [64] * 3)
    self.assertGreater(np.sum(slot == 3), 64)


class FullPanelTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.addCleanup(os.chdir, os.getcwd())
    os.chdir(self.get_temp_dir())

  def _keep(self, log, rows, **losses):
    folder = os.path.join(full_panel.OUT, log)
    os.makedirs(folder)
    common = {'auc': 0.7, 'calibration': 0.9, 'seconds': 12.3, 'mib': 2000.0}
    files = {name: common | {'logloss': loss} for name, loss in losses.items()}
    for name, found in {**files, 'meta': {'rows': rows, 'constant': 0.6}}.items():
      with open(os.path.join(folder, f'{name}.json'), 'w', encoding='utf-8') as f:
        json.dump(found, f)

  def test_the_table_holds_what_was_run(self):
    self._keep('flights', 274_000, LR_1=0.5, LightGBM_1=0.6, ours_mine_1=0.4875)
    _, _, row, *rest = full_panel.table([], 'mine', [], 1).splitlines()
    self.assertIn('| flights\\* | 274,000 | 0.6000 | 0.7000 / 0.5000, 12 s, 2,000 MiB |', row)
    self.assertEndsWith(row, '| – | 0.7000 / 0.4875, 12 s, 2,000 MiB | -0.0125 | 0.900 |')
    self.assertEqual(rest[-1], 'Ours over the best, in the mean -0.0125, at most -0.0125.')

  def test_logs_of_few_rows_have_all_seeds(self):
    self._keep('flights', 274_000, LR_1=0.5, ours_mine_1=0.5, ours_mine_2=0.5, ours_mine_3=0.5)
    self._keep('adult', 26_000, LR_1=0.5, ours_mine_1=0.51, ours_mine_2=0.53, ours_mine_3=0.52)
    _, _, *rows = full_panel.table_of_seeds([], 'mine', [], [1, 2, 3]).splitlines()
    of_seeds = ' | '.join(f'0.7000 / 0.5{n}00, 12 s' for n in (1, 3, 2))
    self.assertEqual(rows, [f'| adult | {of_seeds} | 0.5200 | +0.0200 |'])

  def test_the_picture_has_a_curve_of_what_was_run(self):
    self._keep('flights_2001_100k', 100_000, LR_1=0.5, ours_defaults_1=0.45)
    self._keep('flights_2001_1m', 1_000_000, LR_1=0.5)
    full_panel.picture('curves.svg', 1)
    with open('curves.svg', encoding='utf-8') as f:
      text = f.read()
    for word in ('constant', 'LR', 'ours, the defaults', '100,000', '1,000,000'):
      self.assertIn(f'>{word}</text>', text)
    self.assertNotIn('LightGBM', text)

  def test_a_command_is_measured(self):
    used = full_panel.run_on_one_thread(
      [sys.executable, '-c', 'x = b"1" * (200 << 20); sum(x)'], 'log'
    )
    self.assertBetween(used['mib'], 200, 400)
    self.assertGreater(used['seconds'], 0)
    with self.assertRaisesRegex(SystemExit, 'exit.3.: status 3; see log'):
      full_panel.run_on_one_thread([sys.executable, '-c', 'exit(3)'], 'log')


class ContenderTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.addCleanup(os.chdir, os.getcwd())
    os.chdir(self.get_temp_dir())
    os.makedirs(run.OUT, exist_ok=True)
    flags.FLAGS.mark_as_parsed()
    self.enter_context(flagsaver.flagsaver((run.ROUNDS, 2)))

  @pytest.mark.long
  def test_ours_takes_turns_with_its_dense_part(self):
    spec = run.Bench().spec(TOY)
    contenders = {
      'ours': run.Contender('ours', spec),
      'floor': run.Contender('dense_part', {'shape': TOY.as_dict()}),
    }
    rounds, hellos, last, failed = run.interleave(contenders, lambda _: TOY, steps=2, warm_up=3)
    self.assertEmpty(failed)
    self.assertEqual({name: len(rates) for name, rates in rounds.items()}, {'ours': 2, 'floor': 2})
    self.assertEqual(last['ours']['steps'], 1 + 3 + 2 * 2)
    self.assertEqual(last['ours']['samples'], 2 * TOY.batch)
    self.assertEqual(last['ours']['admitted'], last['ours']['features'])
    self.assertGreater(last['ours']['features'], 0)
    self.assertGreater(hellos['ours']['startup_seconds'], 0)
    self.assertLen(rounds.ratios('floor', 'ours'), 2)

  @pytest.mark.long
  def test_din_beside_plain_ops(self):
    shape = dataclasses.replace(TOY, slots=3, vocabulary=(50, 10, 50), history=4)
    self.enter_context(mock.patch.object(run, 'HISTORIES', {4: shape}))
    self.enter_context(flagsaver.flagsaver((run.QUICK, True)))
    bench = run.Bench()
    bench.histories()
    self.assertEmpty(bench.left_out)
    self.assertEqual(list(bench.raw['histories']), ['ours, L = 4', 'plain ops, L = 4'])
    self.assertGreater(bench.figures['din_4_vs_plain'], 0)

  def test_one_that_fails_is_left_out_with_its_last_words(self):
    rounds, _, _, failed = run.interleave(
      {'ours': run.Contender('ours', {'config': 'nowhere.yaml'})}, lambda _: TOY, steps=1
    )
    self.assertEmpty(rounds)
    self.assertRegex(failed['ours'], 'ended with status 1.*nowhere.yaml: no such file')


class Bfloat16Test(tf.test.TestCase):
  def test_products_on_any_processor_round_their_factors_and_nothing_else(self):
    random = np.random.default_rng(0)
    a, b, grad = (random.normal(size=s).astype(np.float32) for s in ((5, 9), (3, 9), (5, 3)))
    left, right = tf.constant(a), tf.constant(b)
    with tf.GradientTape() as tape:
      tape.watch([left, right])
      product = dtypes.product([left[:, :4], left[:, 4:]], right, transpose_b=True)
    of_a, of_b = tape.gradient(product, [left, right], tf.constant(grad))
    near_a, near_b, near_grad = (
      x.astype(tf.bfloat16.as_numpy_dtype).astype(float) for x in (a, b, grad)
    )
    self.assertAllClose(product, near_a @ near_b.T, 1e-6, 1e-6)
    self.assertNotAllClose(product, a @ b.T, 1e-4, 1e-4)
    self.assertAllClose(of_a, near_grad @ near_b, 1e-6, 1e-6)
    self.assertAllClose(of_b, near_grad.T @ near_a, 1e-6, 1e-6)


class ServingTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    flags.FLAGS.mark_as_parsed()
    self.enter_context(flagsaver.flagsaver((serving_bench.ROWS, 70)))

  def test_keys_that_readers_of_its_figures_rely_on(self):
    figures = {}
    lines = [f'day_0_pass  all  – → 0.5  {i}  9.00  1.00 2.00 3.00 3.00' for i in range(12)]
    done = types.SimpleNamespace(stdout='\n'.join(lines), stderr='')
    with mock.patch.object(serving_bench.subprocess, 'run', return_value=done):
      serving_bench.measure_loop(figures)
    measured = {'rate': 200.0, 'p50_ms': 3.0, 'p99_ms': 5.0, 'failed': 0.0}
    with mock.patch.object(serving_bench, 'load', return_value=measured):
      requests_of = {1: ['{}'], 100: ['{}']}
      serving_bench.measure_requests('serve', 1, requests_of, lambda: 0, figures)
    with tempfile.TemporaryDirectory() as folder:
      serving_bench.measure_publishing(folder, figures)
    wanted = {'loop_seconds', 'loop_first_seconds'}
    wanted |= {f'loop_{part}_seconds' for part in ('train', 'export', 'publish', 'apply')}
    wanted |= {
      f'serve_{candidates}_{what}'
      for candidates in (1, 100)
      for what in ('per_second', 'failed', 'p50_ms', 'p99_ms')
    }
    stores = ['embedded'] + ['redis'] * RedisServer.installed()
    wanted |= {f'publish_{s}_{k}_rows_per_second' for s in stores for k in ('base', 'delta')}
    self.assertEqual(set(figures), wanted)


class Answers(http.server.BaseHTTPRequestHandler):
  """Answers 200 to even numbers and 500 to odd ones."""

  protocol_version = 'HTTP/1.1'

  def do_POST(self):
    body = self.rfile.read(int(self.headers['Content-Length']))
    self.send_response(500 if int(body) % 2 else 200)
    self.send_header('Content-Length', str(len(body)))
    self.end_headers()
    self.wfile.write(body)

  def log_message(self, *_):
    pass


class LoadTest(tf.test.TestCase):
  def test_answers_are_counted_and_failures_told(self):
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
      bodies = [str(i) for i in range(10)]
      found = load.measure(server.server_port, bodies, connections=3, seconds=0.3, rate=100)
      self.assertEqual(found['failed'], 15)
      self.assertLessEqual(found['p50_ms'], found['p99_ms'])
      self.assertEqual(load.measure(server.server_port, ['2'], 2, 0.1)['failed'], 0)
    finally:
      server.shutdown()
      thread.join()
      server.server_close()
    self.assertEqual(load.measure(server.server_port, ['2'], 2, 0.1)['failed'], 2)


class PageTest(tf.test.TestCase):
  def _result(self, **figures):
    return {
      **dict.fromkeys(page.WANTED),
      **figures,
      'seed': 0,
      'rounds': 2,
      'machine': page.machine(),
      'spread': {},
      'raw': {},
      'left_out': {},
      'others': {},
    }

  def test_keys_that_readers_of_bench_json_rely_on(self):
    self.assertContainsSubset(
      [
        'vs_tfra_adagrad',
        'vs_tfra_adam',
        'vs_torch_static',
        'vs_keras_static',
        'over_dense_floor',
        'two_rank_efficiency',
        'input_over_train',
      ],
      json.loads(json.dumps(run.Bench().figures)),
    )

  def test_a_figure_stands_beside_what_is_wanted_of_it(self):
    text = page.side_by_side({'A': {'vs_torch_static': 1.5, 'over_dense_floor': [2.0, 1.8, 2.2]}})
    self.assertRegex(text, r'`vs_torch_static` .* ≥ 1\.30 \| 1\.50 \|')
    self.assertRegex(text, r'`over_dense_floor` .* ≤ 1\.25 \| \*\*2\.00\*\* \(1\.80 to 2\.20\) \|')
    self.assertRegex(text, r'`vs_tfra_adam` .* – ')

  def test_a_page_says_why_a_contender_was_left_out(self):
    text = page.tables(self._result() | {'left_out': {'TFRA, Adam': 'not installable'}})
    self.assertIn('Left out: TFRA, Adam: not installable.', text)

  def test_only_what_is_between_the_markers_is_rewritten(self):
    path = os.path.join(self.get_temp_dir(), 'page.md')
    with open(path, 'w', encoding='utf-8') as f:
      f.write(f'before\n{page.BEGIN}\nold\n{page.END}\nafter\n')
    for text in ('new', 'newer'):
      page.write_between(path, text)
    with open(path, encoding='utf-8') as f:
      self.assertEqual(f.read(), f'before\n{page.BEGIN}\n\nnewer\n\n{page.END}\nafter\n')

  def test_figures_of_several_processors_stand_side_by_side(self):
    path = os.path.join(self.get_temp_dir(), 'page.md')
    with open(path, 'w', encoding='utf-8') as f:
      f.write(f'before\n{page.BEGIN}\n{page.END}\n')
    for cpu, value in (('A', 1.5), ('B', 0.5), ('A', 1.4)):
      result = self._result(vs_torch_static=value)
      result['machine'] |= {'cpu': cpu, 'vectors': 'avx2', 'cores_used': 2}
      page.write_results(path, result)
    with open(path, encoding='utf-8') as f:
      text = f.read()
    self.assertRegex(text, r'\| A, avx2, 2 cores \| B, avx2, 2 cores \|')
    self.assertRegex(text, r'`vs_torch_static` [^\n]* ≥ 1.30 \| 1.40 \| \*\*0.50\*\* \|')
    self.assertEqual([text.count(f'## {cpu}, avx2') for cpu in 'AB'], [1, 1])

  def test_missed_goals_are_named(self):
    text = page.missed({'vs_torch_static': 1.2, 'startup_seconds': 1.2})
    self.assertStartsWith(text, 'missed: vs_torch_static 1.20 (≥ 1.30 wanted)\nnot measured: vs_')
    self.assertNotIn('startup_seconds', text)

  def test_our_pages_have_the_markers(self):
    for name in (run.PAGE, quality.PAGE):
      with open(os.path.join(page.ROOT, name), encoding='utf-8') as f:
        text = f.read()
      self.assertEqual((text.count(page.BEGIN), text.count(page.END)), (1, 1), name)
    with open(os.path.join(page.ROOT, run.PAGE), encoding='utf-8') as f:
      text = f.read()
    with open(os.path.join(page.ROOT, 'docs', 'performance.json'), encoding='utf-8') as f:
      for processor in json.load(f):
        self.assertIn(f' {processor} |', text)
    with open(os.path.join(page.ROOT, quality.PAGE), encoding='utf-8') as f:
      text = f.read()
    for by in ('benchmarks.defaults', 'benchmarks.dtypes'):
      self.assertEqual([text.count(mark) for mark in page.markers(by)], [1, 1], by)

  def test_each_comparison_has_a_table_of_its_own(self):
    with open(os.path.join(page.ROOT, tasks_quality.PAGE), encoding='utf-8') as f:
      text = f.read()
    for name in tasks_quality.COMPARISONS:
      self.assertEqual(
        [text.count(m) for m in page.markers(name)], [1, 1], f'{name} in {tasks_quality.PAGE}'
      )
    figures = {'auc': [0.75, 0.7, 0.8], 'logloss': [0.3, 0.1, 0.2], 'MB': [5, 7, 6]}
    runs = [{'': {name: values[i] for name, values in figures.items()}} for i in range(3)]
    flags.FLAGS.mark_as_parsed()
    self.enter_context(flagsaver.flagsaver((quality.SEEDS, ['1', '2', '3'])))
    self.assertEqual(
      tasks_quality.table({'DIN': runs}).splitlines()[2],
      '| DIN | 0.7500 | 0.2000 | 6.00 | 0.7500 / 0.3000, 0.7000 / 0.1000, 0.8000 / 0.2000 |',
    )

  def test_changes_of_each_comparison_are_keys_of_its_config(self):
    for one in tasks_quality.COMPARISONS.values():
      for changes in one.models.values():
        config.load(
          os.path.join(page.ROOT, one.config), [c.replace('{seed}', '1') for c in changes]
        )

  def test_the_final_test_score_is_read_from_a_run(self):
    self.assertIsNone(quality.final_test(self.get_temp_dir()))
    with tempfile.TemporaryDirectory() as run_dir:
      with open(os.path.join(run_dir, 'metrics.jsonl'), 'w', encoding='utf-8') as f:
        for event in (
          {'event': 'train', 'auc': 0.9, 'logloss': 0.3},
          {'event': 'eval', 'split': 'valid', 'auc': 0.8, 'logloss': 0.4},
          {'event': 'eval', 'split': 'test', 'auc': 0.7, 'logloss': 0.5},
        ):
          f.write(json.dumps(event) + '\n')
      self.assertEqual(quality.final_test(run_dir), (0.7, 0.5))
