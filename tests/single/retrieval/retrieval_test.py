"""Two towers: losses and gradients against loops in NumPy, the catalogue, and a whole run."""

import collections
import json
import os
import pathlib
import re
import tempfile
from unittest import mock

import numpy as np
import pandas as pd
import tensorflow as tf

import trainer
from tests.support import commands, small
from tests.support.retrieval import (
  loss_of,
  make_batch,
  make_config,
  make_lines,
  run_config,
  train_run,
  vectors_of,
  write_lines,
)
from tests.support.steps import train
from trainer import config
from trainer.comm.communicator import SingleProcess
from trainer.data.features import hash_keys
from trainer.data.passes import passes
from trainer.errors import ConfigError, UserError
from trainer.evaluation.finished_run import open_run
from trainer.evaluation.task import task_of
from trainer.job.job import Job
from trainer.reporting.status import Status
from trainer.retrieval import items as item_files
from trainer.retrieval import ranking
from trainer.retrieval.losses import bpr, leave_out, softmax
from trainer.retrieval.ranker import Ranker

LOSSES = (
  {'loss': 'sampled_softmax'},
  {'loss': 'sampled_softmax', 'similarity': 'dot', 'logq': 'uniform'},
  {'loss': 'sampled_softmax', 'sampling': 'frequency', 'logq': 'shows', 'logq_positive': True},
  {'loss': 'in_batch_softmax', 'logq': 'shows'},
  {'loss': 'in_batch_softmax', 'similarity': 'dot', 'logq': 'shows', 'logq_positive': True},
  {'loss': 'bpr', 'similarity': 'dot', 'temperature': 1.0},
  {'loss': 'nce', 'logq': 'uniform'},
  {'loss': 'sampled_softmax', 'own_positives': 'pass'},
  {'loss': 'bpr', 'own_positives': 'pass'},
  {'loss': 'in_batch_softmax', 'own_positives': 'pass'},  # has no effect there
)


# The pass that a step's batch is of; 'own_positives: pass' leaves its positives out.
PASS = [make_batch(np.random.default_rng(seed), 15) for seed in (8, 9)]
PASS[0].label[::2] = 0


def keys_of(slot, names):
  return hash_keys(tf.constant([str(n) for n in names]), slot).numpy()


def with_catalogue(cfg, batch):
  """A step whose catalogue has the batch's items and three more, and the batch for it."""
  step = task_of(cfg).step(SingleProcess())
  items = np.unique(batch.keys.reshape(-1, 2)[:, 1])
  keys = np.concatenate([items, [(2 << 52) + i * 7919 for i in (50, 51, 52)]])
  shows = np.arange(1.0, len(keys) + 1)
  catalogue = step.dense.catalogue
  catalogue.load({'catalogue/keys': np.sort(keys), 'catalogue/shows': shows})
  catalogue.learn_positives(mock.Mock(batches=lambda size: PASS))
  return step, catalogue.for_step(batch, 0)


class LossTest(tf.test.TestCase):
  def test_bpr_is_a_mean_over_the_negatives_that_are_not_left_out(self):
    positive, negatives = tf.constant([0.5, -1.0]), tf.constant([[1.0, 2.0, 3.0], [0.0, 1.0, 2.0]])
    left_out = leave_out(negatives, tf.constant([[0, 1], [1, 0], [1, 1], [1, 2]], tf.int64))
    wanted = np.mean(np.log1p(np.exp([1.0 - 0.5, 3.0 - 0.5])))
    self.assertAllClose(bpr(positive, left_out), [wanted, 0])

  def test_is_that_of_loops(self):
    for settings in LOSSES:
      with self.subTest(**settings):
        cfg, rng = make_config(**settings), np.random.default_rng(0)
        batch = make_batch(rng, 14)
        batch.label[::5] = 0
        step, batch = with_catalogue(cfg, batch)
        losses = loss_of(cfg, batch, vectors_of(step, batch.keys), PASS)
        counts = train(step, batch)
        self.assertAllClose(counts.loss, batch.weight @ losses, rtol=1e-5)
        self.assertAllClose(counts.weight, batch.weight.sum(), rtol=1e-6)

  def test_gradients_are_those_of_finite_differences(self):
    for settings in LOSSES:
      with self.subTest(**settings):
        cfg, rng = make_config(**settings), np.random.default_rng(1)
        step, batch = with_catalogue(cfg, make_batch(rng, 10))
        before = vectors_of(step, batch.keys)
        counts = train(step, batch)
        after = vectors_of(step, batch.keys)
        for key in sorted(before)[::2]:
          for column in range(4):
            means = []
            for change in (1e-4, -1e-4):
              moved = {k: v.astype(np.float64) for k, v in before.items()}
              moved[key][column] += change
              means.append(batch.weight @ loss_of(cfg, batch, moved, PASS) / counts.weight)
            gradient = (means[0] - means[1]) / 2e-4
            self.assertAllClose(
              after[key][column] - before[key][column], -0.5 * gradient, rtol=2e-3, atol=2e-5
            )

  def test_dropout_sets_numbers_of_the_query_to_0(self):
    query = {'slots': ['user'], 'dropout': 0.4}
    cfg = make_config(query=query, similarity='dot')
    step, batch = with_catalogue(cfg, make_batch(np.random.default_rng(3), 99, users=10**6))
    vectors = vectors_of(step, batch.keys)
    counts = train(step, batch)
    after = vectors_of(step, batch.keys)
    users = [int(key) for key in batch.keys[: 2 * 99 : 2]]
    # What a step sets to 0 learns nothing in it.
    kept = np.array([after[user] != vectors[user] for user in users])
    self.assertBetween(kept.mean(), 0.5, 0.7)
    dropped = {user: vectors[user] * mask / 0.6 for user, mask in zip(users, kept)}
    losses = loss_of(cfg, batch, vectors | dropped, PASS)
    self.assertAllClose(counts.loss, batch.weight @ losses, rtol=1e-5)

  def test_a_sample_that_is_no_positive_weighs_nothing(self):
    batch = make_batch(np.random.default_rng(2), 6)
    label = batch.label.copy()
    label[2] = 0
    _, ready = with_catalogue(make_config(), batch._replace(label=label))
    self.assertAllEqual(ready.weight > 0, [True, True, False, True, True, True])

  def test_candidates_are_no_shows_and_are_not_kept_alive(self):
    cfg = make_config()
    step, batch = with_catalogue(cfg, make_batch(np.random.default_rng(3), 5))
    train(step, batch)
    step.store.age()
    train(step, step.dense.catalogue.for_step(make_batch(np.random.default_rng(4), 5), 1))
    keys = step.dense.catalogue.keys
    found = step.store.lookup(keys)
    shown = np.concatenate(
      [make_batch(np.random.default_rng(s), 5).keys.reshape(-1, 2)[:, 1] for s in (3, 4)]
    )
    self.assertAllEqual(found['show'], [np.sum(shown == key) for key in keys])
    later = make_batch(np.random.default_rng(4), 5).keys
    drawn = np.asarray(found['exists']) & ~np.isin(keys, later)
    self.assertGreater(drawn.sum(), 2)
    self.assertAllEqual(np.asarray(found['unseen_days'])[drawn], np.ones([drawn.sum()]))

  def test_sums_over_draws_are_unbiased_where_their_expected_counts_are_divided_out(self):
    cfg = make_config(sampling='frequency', logq='shows', negatives=300)
    step, _ = with_catalogue(cfg, make_batch(np.random.default_rng(5), 14))
    catalogue = step.dense.catalogue
    worth = np.random.default_rng(6).uniform(1, 3, len(catalogue.keys))  # e^score of each item
    sums = []
    for number in range(200):
      batch = catalogue.for_step(make_batch(np.random.default_rng(7), 3), number)
      drawn = catalogue.places(batch.item[3:])
      sums.append(np.sum(worth[drawn] / (300 * np.exp(batch.log_share[3:]))))
    deviation = np.std(sums) / np.sqrt(len(sums))
    self.assertLess(abs(np.mean(sums) - worth.sum()), 4 * deviation)


class SoftmaxTest(tf.test.TestCase):
  def test_gradient_is_that_of_the_corrected_correction(self):
    """arXiv 2507.09331: (1 − p) times the gradient of log Σ over negatives less the positive."""
    rng = np.random.default_rng(0)
    positive = tf.constant(rng.normal(size=9).astype(np.float32))
    negatives = tf.constant(rng.normal(size=[9, 6]).astype(np.float32))
    with tf.GradientTape(persistent=True) as tape:
      tape.watch([positive, negatives])
      loss = softmax(positive, negatives)
      log_sum = tf.reduce_logsumexp(negatives, 1)
      share = tf.exp(positive) / (tf.exp(positive) + tf.exp(log_sum))
      weighted = tf.stop_gradient(1 - share) * (log_sum - positive)
    for variable in (positive, negatives):
      self.assertAllClose(tape.gradient(loss, variable), tape.gradient(weighted, variable))


class RankingTest(tf.test.TestCase):
  def test_is_that_of_sorting_everything(self):
    rng = np.random.default_rng(0)
    queries, items = rng.normal(size=(23, 5)), rng.normal(size=(41, 5))
    queries, items = queries.astype(np.float32), items.astype(np.float32)
    shows = rng.integers(0, 9, 41).astype(float)
    seen = [set(rng.choice(41, 6, replace=False).tolist()) for _ in queries]
    wanted = [sorted({*rng.choice(41, 5, replace=False).tolist()} - s) for s in seen]
    pairs = np.array([(q, i) for q, some in enumerate(seen) for i in sorted(some)]).T

    def left_out(start, end):
      low, high = np.searchsorted(pairs[0], [start, end])
      return pairs[0][low:high] - start, pairs[1][low:high]

    parts = []
    for first, last in ((0, 17), (17, 41)):  # as two ranks have them

      def of_part(start, end, first=first, last=last):
        q, i = left_out(start, end)
        mine = (i >= first) & (i < last)
        return q[mine], i[mine] - first

      scores, places = ranking.top_k(queries, items[first:last], 7, of_part)
      parts.append((scores, places + first))
    _, found = ranking.merged(*zip(*parts), 7)
    expected = []
    for q in range(23):
      order = sorted(range(41), key=lambda i: (-float(queries[q] @ items[i]), i))
      expected.append([i for i in order if i not in seen[q]][:7])
    self.assertAllEqual(found, expected)

    sought = np.array([len(w) + 1 for w in wanted])  # one of them is in no catalogue
    flat = np.array([(q, i) for q, some in enumerate(wanted) for i in some]).T
    values = ranking.judge(found, tuple(flat), sought, shows, [3, 7])
    popular = set(np.argsort(-shows, kind='stable')[:4].tolist())
    for k in (3, 7):
      recall, ndcg, hit, mrr = [], [], [], []
      for q in range(23):
        hits = [i in wanted[q] for i in expected[q][:k]]
        gains = [1 / np.log2(r + 2) for r in range(k)]
        recall.append(sum(hits) / sought[q])
        ndcg.append(np.dot(hits, gains) / sum(gains[: min(k, sought[q])]))
        hit.append(any(hits))
        mrr.append(1 / (hits.index(True) + 1) if any(hits) else 0)
      all_found = [i for one in expected for i in one[:k]]
      self.assertAllClose(
        [values[f'{name}@{k}'] for name in ('recall', 'ndcg', 'hitrate', 'mrr')],
        [np.mean(m) for m in (recall, ndcg, hit, mrr)],
      )
      self.assertAllClose(values[f'coverage@{k}'], len(set(all_found)) / 41)
      self.assertAllClose(values[f'popular@{k}'], np.mean([i in popular for i in all_found]))


class RunTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = tempfile.mkdtemp(dir=self.get_temp_dir())
    self.lines = make_lines()
    for name, pairs in self.lines.items():
      write_lines(f'{self.folder}/{name}.csv', pairs)

  def make_config(self, run_dir='run', **changes):
    return run_config(self.folder, run_dir, **changes)

  def train(self, cfg, **job):
    return train_run(cfg, **job)

  def events(self, run_dir='run'):
    path = f'{self.folder}/{run_dir}/metrics.jsonl'
    return [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]

  def test_learns_and_is_judged_as_a_brute_force_does(self):
    # The same file as data.test: its report is written too.
    cfg = self.make_config(**{'data.test': [f'{self.folder}/valid.csv']})
    self.train(cfg)
    evaluated = [e for e in self.events() if e.get('split') == 'valid' and e['event'] == 'eval']
    self.assertGreater(evaluated[-1]['recall@3'], evaluated[0]['recall@3'])
    recalls = []
    for user, ranked in self.rankings(cfg.run_dir, seen=('train',)).items():
      wanted = {item for u, item in self.lines['valid'] if u == user}
      recalls.append(len(wanted.intersection(item for item, _ in ranked[:3])) / len(wanted))
    self.assertAllClose(evaluated[-1]['recall@3'], np.mean(recalls))
    self.assertEqual(evaluated[-1]['unknown_queries'], 0)

  def test_stands_beside_the_list_of_the_most_shown_items(self):
    """And tells for how many users there is nothing else, some new, some without a query."""
    train, valid = self.lines['train'], self.lines['valid']
    new = [(user, item) for user in (40, 41, '') for item in (3, 5, 8)]
    write_lines(f'{self.folder}/valid.csv', [*valid, *new])
    cfg = self.make_config(**{'train.epochs': 1})
    self.train(cfg)
    (found,) = [e for e in self.events() if e.get('split') == 'valid' and e['event'] == 'eval']
    shows = collections.Counter(item for _, item in train)
    keys = dict(zip(range(25), keys_of(2, range(25)).tolist()))
    by_shows = sorted(shows, key=lambda item: (-shows[item], keys[item]))
    recalls, users = [], dict.fromkeys(user for user, _ in [*valid, *new])
    for user in users:
      seen, wanted = ({i for u, i in pairs if u == user} for pairs in (train, [*valid, *new]))
      best = [item for item in by_shows if item not in seen][:3]
      recalls.append(len(wanted.intersection(best)) / len(wanted))
    self.assertAllClose(found['base_recall@3'], np.mean(recalls))
    self.assertAllClose(found['unknown_queries'], 3 / len(users))
    out = commands.run(
      '-m',
      'trainer.cli.evaluate',
      '--nojson',
      '--run_dir',
      cfg.run_dir,
      '--data',
      f'{self.folder}/valid.csv',
    ).stdout
    self.assertIn(f'the most shown items reach recall@3 {np.mean(recalls):.4f}', out)
    self.assertIn('9.1% of the queries are empty or unknown to the model', out)

  def rankings(self, run_dir, seen):
    """By user, all items that are not in the passes `seen`, with scores, from the rows alone."""
    with open_run(run_dir, checkpoint='last') as run:
      users = vectors_of(run.step, keys_of(1, range(30)))
      items = vectors_of(run.step, keys_of(2, range(25)))
    found = {}
    for user, key in enumerate(keys_of(1, range(30)).tolist()):
      left_out = {item for split in seen for u, item in self.lines[split] if u == user}
      scores = {}
      for item, of_item in enumerate(keys_of(2, range(25)).tolist()):
        if item not in left_out:
          lengths = np.linalg.norm(users[key]) * np.linalg.norm(items[of_item])
          scores[item] = users[key] @ items[of_item] / lengths
      found[user] = sorted(scores.items(), key=lambda pair: -pair[1])
    return found

  def test_recommends_what_a_brute_force_finds_for_queries_without_items(self):
    cfg = self.make_config()
    self.train(cfg)
    expected = self.rankings(cfg.run_dir, seen=('train', 'valid'))
    asked = [7, 3, 29, 7]
    run = trainer.load(cfg.run_dir, 'last')
    found = run.recommend(pd.DataFrame({'user': asked}), k=5)
    self.assertAllEqual(found['sample'], np.repeat(range(4), 5))
    items = [item for user in asked for item, _ in expected[user][:5]]
    scores = [score for user in asked for _, score in expected[user][:5]]
    self.assertAllEqual(found['item'], [str(item) for item in items])
    self.assertAllClose(found['score'], scores, rtol=1e-5)

    path = f'{self.folder}/asked.csv'
    pathlib.Path(path).write_text('user,place\n' + ''.join(f'{u},p{u}\n' for u in asked))
    for name, options, columns in (
      ('plain.csv', [], ['sample']),
      ('carried.csv', ['--columns', 'place,user'], ['place', 'user']),
    ):
      out = f'{self.folder}/{name}'
      flags = '--run_dir', cfg.run_dir, '--data', path, '--out', out, '--checkpoint', 'last'
      done = commands.run('-m', 'trainer.cli.predict', *flags, '--k', '5', *options)
      self.assertEqual(done.returncode, 0, done.stderr)
      self.assertIn(f'20 recommendations for 4 samples in {out}', done.stderr)
      table = pd.read_csv(out, dtype={'item': str})
      self.assertEqual(list(table), [*columns, 'item', 'score'])
      self.assertAllEqual(table['item'], found['item'])
      self.assertAllClose(table['score'], found['score'], rtol=1e-6)
    self.assertAllEqual(table['user'], np.repeat(asked, 5))

    vectors = run.vectors().set_index('item')
    self.assertLen(vectors, 25)
    self.assertAllClose(np.linalg.norm(vectors.drop(columns='key'), axis=1), np.ones(25))

  def test_leaves_out_what_the_user_chose_or_all_that_it_saw(self):
    labels, pairs = {}, self.lines['train']
    with open(f'{self.folder}/train.csv', 'w', encoding='utf-8') as f:
      f.write('user,item,click\n')
      for i, (user, item) in enumerate(pairs):
        labels.setdefault(user, {}).setdefault(item, set()).add(i % 2)
        f.write(f'{user},{item},{i % 2}\n')
    cfg = self.make_config(**{'data.label': 'click', 'data.valid': []})
    self.train(cfg)
    users, frame = range(30), pd.DataFrame({'user': range(30)})
    for kind in ('positives', 'seen'):
      with open_run(cfg.run_dir, [f'model.retrieval.leave_out={kind}'], 'last') as run:
        frame.to_csv(f'{self.folder}/asked.csv', index=False)
        listed = passes(run.cfg.data, [f'{self.folder}/asked.csv'], '--data')
        prepared = run.inputs.prepared(listed, 'predict', labelled=False)
        tables = list(run.task.recommendations(run.inputs, run.texts, prepared, 25))
      found = pd.concat(table.to_pandas() for table in tables)
      for user in users:
        of_user = labels.get(user, {})
        left_out = {str(i) for i, of in of_user.items() if kind == 'seen' or 1 in of}
        wanted = set(map(str, {item for _, item in pairs})) - left_out
        self.assertEqual(set(found[found['sample'] == user]['item']), wanted)

  def test_exports_items_an_index_and_the_query_tower(self):
    cfg = self.make_config()
    self.train(cfg)
    expected = self.rankings(cfg.run_dir, seen=())

    def export(kind):
      flags = '--run_dir', cfg.run_dir, '--kind', kind, '--checkpoint', 'last'
      return commands.run('-m', 'trainer.cli.export', *flags)

    for kind in ('items', 'saved_model'):
      self.assertEqual(export(kind).returncode, 0)
    refused = export('base')
    self.assertEqual(refused.returncode, 2)
    self.assertIn("--kind: found 'base'", refused.stderr)

    items = pd.read_parquet(f'{cfg.run_dir}/exports/items/1/{item_files.ITEMS}')
    vectors_of_items, texts = np.stack(items['vector']), items['item'].tolist()
    query = tf.saved_model.load(f'{cfg.run_dir}/exports/saved_model/2')
    serve = query.signatures['serving_default']
    self.assertEqual(list(serve.structured_input_signature[1]), ['user'])
    asked = [4, 21, 4]
    vectors = serve(user=tf.constant([str(u) for u in asked]))['vector'].numpy()
    scores = vectors @ vectors_of_items.T
    for user, row in zip(asked, scores):
      found = [int(texts[i]) for i in np.argsort(-row)[:6]]
      self.assertEqual(found, [item for item, _ in expected[user][:6]])
      self.assertAllClose(np.sort(row)[::-1], [s for _, s in expected[user]], rtol=1e-5, atol=1e-6)
    shown = [sum(item == int(text) for _, item in self.lines['train']) for text in texts]
    self.assertEqual(shown, sorted(shown, reverse=True))
    if not item_files.has_faiss():
      self.skipTest('faiss is not installed')
    import faiss

    index = faiss.read_index(f'{cfg.run_dir}/exports/items/1/{item_files.INDEX}')
    found, places = index.search(vectors, 6)
    self.assertAllEqual(places, np.argsort(-scores)[:, :6])
    self.assertAllClose(found, -np.sort(-scores)[:, :6], rtol=1e-5)
    # The example of the page.
    page = pathlib.Path(__file__).parents[3] / 'docs' / 'retrieval.md'
    (example,) = re.findall(r'```python\n(.*?)```', page.read_text('utf-8'), re.DOTALL)
    *lines, last = example.strip().replace('runs/yelp18_mf', cfg.run_dir).splitlines()
    names = {'tf': tf, 'pd': pd, 'faiss': faiss}
    exec('\n'.join(lines), names)
    self.assertLen(eval(last, names), 20)

  def test_goes_on_after_a_kill_as_if_nothing_had_been(self):
    own = {'model.retrieval.own_positives': 'pass'}
    whole = self.train(self.make_config('whole', **own))
    cfg = self.make_config('killed', **own, **{'checkpoint.every_steps': 4})

    class Killed(Exception):
      pass

    steps = 0

    def progress_made():
      nonlocal steps
      steps += 1
      if steps > 20:
        raise Killed

    step, status = task_of(cfg).step(SingleProcess()), Status('trainer', 1800)
    status.also = progress_made
    with self.assertRaises(Killed):
      Job(cfg, SingleProcess(), step, status).run()
    resumed = self.train(cfg)
    self.assertGreater(whole.step.steps, 4)
    for name in ('key', 'show'):
      self.assertAllEqual(*(self.column(one, name) for one in (whole, resumed)))
    self.assertAllEqual(*(self.column(one, 'factors_default') for one in (whole, resumed)))

  def column(self, job, name):
    return np.concatenate([chunk[name] for chunk in job.step.store.export_state()])

  def test_items_without_factors_are_neither_ranked_nor_exported(self):
    """A tower of two layers gives them the vector of its biases."""
    towers = {f'model.retrieval.{side}.hidden': [8, 4] for side in ('query', 'item')}
    admission = {'lifecycle.admission': 'count', 'lifecycle.admission_count': 9}
    cfg = self.make_config(**towers, **admission)
    self.train(cfg)
    with open_run(cfg.run_dir, checkpoint='last') as run:
      keys, vectors = Ranker(run.cfg, run.inputs).all_item_vectors()
      known = run.step.store.lookup(keys_of(2, range(25)))
    admitted = keys_of(2, range(25))[np.asarray(known['admitted'])]
    self.assertBetween(len(admitted), 1, 24)
    self.assertCountEqual(keys, admitted)
    self.assertTrue(np.any(vectors, 1).all())

  def test_a_k_above_the_catalogue_is_told(self):
    cfg = self.make_config()
    cfg = small.config(cfg.model_dump(), {'model.retrieval.eval_at': [99]})
    with self.assertRaisesRegex(UserError, 'eval_at: found 99; wanted at most 25'):
      small.job(cfg).run()


class MistakesTest(tf.test.TestCase):
  def test_a_log_without_items(self):
    folder = self.get_temp_dir()
    for text, wanted in (
      ('user,itm\n1,2\n', "no column 'item' \\(slot 'item'\\)"),
      ('user,item\n1,\n2,\n', "train.csv: slot 'item' is blank in all samples; wanted the items"),
    ):
      path = pathlib.Path(folder, 'train.csv')
      path.write_text(text)
      run_dir = tempfile.mkdtemp(dir=folder)
      cfg = make_config({'run_dir': run_dir, 'data.train': [str(path)], 'train.batch_size': 2})
      with self.subTest(wanted), self.assertRaisesRegex(UserError, wanted) as caught:
        small.job(cfg).run()
      self.assertNotIn('\n', str(caught.exception))

  def test_each_is_one_line(self):
    path = os.path.join(self.get_temp_dir(), 'config.yaml')
    cfg = make_config()
    pathlib.Path(path).write_text(config.dump(cfg))
    retrieval = 'model.retrieval'
    for text, wanted in (
      ('model.interactions=[fm]', "'model.retrieval': found beside model.interactions"),
      (f'{retrieval}.item.slots=[]', r"'model.retrieval.item.slots': found \[\]; wanted at least"),
      (f'{retrieval}.query.slots=[]', "'model.retrieval.query.slots': found"),
      (f'{retrieval}.item.slots=[itm]', "'model.retrieval.item.slots.0': found 'itm'.*'item'"),
      (f'{retrieval}.query.slots=[item]', 'wanted it in one|which the query is to find'),
      (f'{retrieval}.query.hidden=[3]', 'its towers give vectors of the widths'),
      (f'{retrieval}.query.encoder={{sasrec: {{}}}}', 'reads one history; found 0'),
      (f'{retrieval}.loss=hinge', "'model.retrieval.loss': found 'hinge'"),
      (f'{retrieval}.query.dropout=1', "'model.retrieval.query.dropout': found 1"),
      (f'{retrieval}.eval_at=[3, 3]', 'wanted distinct numbers'),
      (f'{retrieval}.logq_positive=true', "found true with logq 'none'"),
      ('data.group=null', "'data.group': found null; model.retrieval wants"),
      ('sparse.tables={}', "'data.slots.0.table': found 'default'"),
      ('sync.mode=ps', "'sync.mode': found 'ps'; model.retrieval wants 'allreduce'"),
      ('train.progressive_validation=true', 'has none yet'),
      ('model.loss=focal', "'model.loss': is of models of clicks"),
    ):
      with self.subTest(text), self.assertRaisesRegex(ConfigError, wanted):
        config.load(path, [text])


if __name__ == '__main__':
  tf.test.main()
