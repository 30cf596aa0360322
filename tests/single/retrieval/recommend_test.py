"""Items over HTTP: what is served is what is predicted, by one run or by two, through deltas."""

import json
import os
import shutil
import tempfile

import numpy as np
import pandas as pd
import tensorflow as tf

import trainer
from tests.support import commands
from tests.support.retrieval import (
  make_config,
  make_lines,
  run_config,
  train_run,
  write_lines,
)
from tests.support.scorer import served
from tests.support.steps import make_config as make_ranker_config
from tests.support.steps import train
from trainer import config
from trainer.comm.communicator import SingleProcess
from trainer.data.conversion import prepare_pass
from trainer.data.prepared import PreparedPass
from trainer.data.request_columns import Shared
from trainer.errors import ConfigError, UserError
from trainer.evaluation.task import task_of
from trainer.retrieval import items as item_files
from trainer.retrieval.item_search import ItemSearch
from trainer.retrieval.items import Change, Items
from trainer.retrieval.ranker import Ranker
from trainer.retrieval.recommend import Recommender
from trainer.serving.limits import Limits
from trainer.serving.memory_store import MemoryStore
from trainer.serving.publisher import Publisher
from trainer.serving.requests import Request
from trainer.serving.service import Service
from trainer.serving.stores import open_store
from trainer.storage import chain, export_writer
from trainer.storage.chain import RowExport
from trainer.training.inputs import Inputs

PATH = '/v1/models/ctr:recommend'


def service_of(run_dir: str) -> Service:
  """Serves what the exports of a run hold now."""
  store = MemoryStore()
  service = Service(store, Publisher(os.path.join(run_dir, 'exports'), store).advance)
  service.refresh()
  return service


def exported(step, cfg, kind, number, items=None, folder=None):
  return export_writer.write(
    cfg,
    kind,
    {'number': number},
    store=step.store,
    model=step.dense.model,
    dense_stats=step.dense.embedding.stats,
    items=items,
    folder=folder,
    ancestors=[1],  # all exports are of this checkpoint
    checkpoint=1,
  )


class ServedTest(tf.test.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = tempfile.mkdtemp()
    cls.addClassCleanup(shutil.rmtree, cls.folder)
    cls.lines = make_lines()
    rest, last = cls.lines['train'][:-20], cls.lines['train'][-20:]
    passes = [('first', rest), ('second', last), ('valid', cls.lines['valid'])]
    paths = [write_lines(f'{cls.folder}/{name}.csv', pairs) for name, pairs in passes]
    changes = {
      'data.train': paths[:2],
      'data.keep_texts': ['item'],
      'train.epochs': 1,
      'export.delta_every_passes': 1,
    }
    cls.cfg = run_config(cls.folder, **changes)
    train_run(cls.cfg)
    cls.run_ = trainer.load(cls.cfg.run_dir, 'last')
    cls.service = service_of(cls.cfg.run_dir)

  def ask(self, client, body):
    status, text, _ = client.ask('POST', PATH, body)
    return status, json.loads(text)

  def test_importance_is_of_models_of_clicks(self):
    told = f'importance: run_dir {self.cfg.run_dir}: found a run with model.retrieval; wanted one'
    with self.assertRaisesRegex(UserError, f'^{told} with model.interactions$'):
      self.run_.importance(f'{self.folder}/valid.csv')
    flags = '--run_dir', self.cfg.run_dir, '--importance', '--data', f'{self.folder}/valid.csv'
    done = commands.run('-m', 'trainer.cli.inspect', *flags)
    self.assertEqual(
      (done.returncode, done.stderr), (2, f'error: --{told} with model.interactions\n')
    )

  def test_recommends_what_the_run_does(self):
    asked = [7, 3, 29, 7]
    seen = [[i for part in self.lines.values() for u, i in part if u == user] for user in asked]
    expected = self.run_.recommend(pd.DataFrame({'user': asked}), k=5)
    with served(self.service) as client:
      by_row = {'instances': [{'user': str(u)} for u in asked], 'k': 5, 'seen': seen}
      status, answer = self.ask(client, by_row)
      self.assertEqual((status, answer['model_version']), (200, '2'))
      found = answer['predictions']
      self.assertAllEqual(sum((f['items'] for f in found), []), expected['item'])
      self.assertAllClose(sum((f['scores'] for f in found), []), expected['score'], rtol=1e-5)
      _, by_column = self.ask(client, {'inputs': {'user': asked}, 'k': 5, 'seen': seen})
      self.assertEqual(by_column['outputs']['items'], [f['items'] for f in found])
      # Fewer are left than are wanted; all items without `seen`.
      _, answer = self.ask(client, {'inputs': {'user': 7}, 'k': 25, 'seen': [seen[0]]})
      self.assertLen(answer['outputs']['items'][0], 25 - len(seen[0]))
      _, answer = self.ask(client, {'inputs': {'user': 7}})
      self.assertLen(answer['outputs']['items'][0], 20)

      _, text, _ = client.ask('GET', '/v1/models/ctr/metadata')
      described = json.loads(text)
      definition = described['metadata']['signature_def']['signature_def']['recommend']
      self.assertEqual(list(definition['inputs']), ['user'])
      self.assertEqual(list(definition['outputs']), ['items', 'scores'])
      status, _ = self.ask(client, described['example_recommend_request'])
      self.assertEqual(status, 200)
      _, text, _ = client.ask('GET', '/')
      paths = json.loads(text)
      self.assertEqual(paths['recommend'], f'POST {PATH}')
      self.assertNotIn('predict', paths)

  def test_an_unknown_user_finds_nothing(self):
    with self.assertLogs(level='WARNING') as told:
      expected = self.run_.recommend(pd.DataFrame({'user': ['7', 'nobody']}), k=5)
    wanted = 'no items for 1 of 2 samples, whose queries have no feature with a row: sample 1'
    self.assertIn(wanted, ' '.join(' '.join(told.output).split()))
    self.assertAllEqual(expected['sample'], [0] * 5)
    with served(self.service) as client:
      _, answer = self.ask(client, {'inputs': {'user': ['nobody']}, 'k': 5})
      self.assertEqual(answer['outputs'], {'items': [[]], 'scores': [[]]})

  def test_mistakes(self):
    ok = {'instances': [{'user': '7'}]}
    with served(self.service, Limits(strict=True)) as client:
      for change, wanted in (
        (
          {'instances': [{'user': '7', 'usr': 1}]},
          "column 'usr' is unknown; the nearest valid name is 'user'",
        ),
        ({'instances': [{'usr': '7'}]}, "column 'usr' is unknown"),
        ({'instances': [{'user': ''}]}, 'sample 0: an empty query; wanted a value of user'),
        ({'instances': []}, "'instances': wanted a list of objects"),
        ({'k': 26}, 'k: found 26; wanted at most 25, the items of the catalogue'),
        ({'k': 99999}, 'k: found 99999; wanted at most 25'),
        ({'k': 0}, 'k: found 0; wanted a whole number of at least 1'),
        ({'k': '5'}, 'k: found 5; wanted a whole number'),
        ({'seen': ['5']}, 'seen: wanted a list of items for each query'),
        ({'seen': [['5'], []]}, 'seen: found 2 lists; wanted 1'),
        ({'seen': [[['5']]]}, "'seen': found a list within"),
        ({'sen': [['5']]}, "the body: 'sen' is unknown; the nearest valid name is 'seen'"),
      ):
        with self.subTest(wanted):
          status, answer = self.ask(client, ok | change)
          self.assertEqual(status, 400)
          self.assertIn(wanted, answer['error'])
          self.assertNotIn('\n', answer['error'])
      self.assertEqual(client.ask('GET', PATH)[0], 405)
      status, answer = client.predict(ok)
      self.assertEqual(status, 404)
      self.assertIn('wanted :recommend', answer['error'])
    with served(self.service) as client:
      for queries, k, cost in ((501, 1, 20), (401, 99, 25)):
        status, answer = self.ask(client, {'inputs': {'user': ['7'] * queries}, 'k': k})
        wanted = f'found {queries} queries, each of which costs as much as {cost} samples; wanted'
        self.assertEqual(status, 413)
        self.assertStartsWith(answer['error'], f'{wanted} at most {10_000 // cost} queries')
    with self.assertRaisesRegex(UserError, 'k: found 26; wanted at most 25'):
      self.run_.recommend(pd.DataFrame({'user': [7]}), k=26)
    folder = os.path.join(self.cfg.run_dir, 'exports')
    store = open_store(f'{self.folder}/lmdb', '--to', writable=True)
    self.addCleanup(store.close)
    with self.assertRaisesRegex(UserError, 'whose items no store holds; wanted ctr-serve'):
      Publisher(folder, store).advance()

  def test_deltas_replay_to_a_new_base(self):
    folder = os.path.join(self.cfg.run_dir, 'exports')
    kinds = [one.kind for one in chain.exports(folder)]
    self.assertEqual(kinds, ['delta', 'delta'])
    table = self.run_.vectors().sort_values('key')
    store = MemoryStore()
    Publisher(folder, store).advance()
    view = store.view()
    self.assertAllEqual(view.items.items.keys, table['key'])
    self.assertAllEqual(view.items.items.texts, table['item'])
    self.assertAllClose(view.items.items.vectors, table.iloc[:, 2:], rtol=1e-6)
    with self.assertRaisesRegex(ConfigError, r'keep_texts.*wanted \[item\]'):
      path = f'{self.folder}/config.yaml'
      with open(path, 'w', encoding='utf-8') as f:
        f.write(config.dump(self.cfg))
      config.load(path, ['data.keep_texts=[]'])


class PairTest(tf.test.TestCase):
  """One run finds, another one ranks."""

  def setUp(self):
    super().setUp()
    self.folder = self.enter_context(tempfile.TemporaryDirectory())

  def export(self, cfg, name, retrieval):
    """Trains a little on the lines, and exports; returns the run_dir."""
    run_dir = f'{self.folder}/{name}'
    cfg = cfg.model_copy(update={'run_dir': run_dir})
    step, lines = task_of(cfg).step(SingleProcess()), make_lines()['train']
    rows = [(u, f'{i},{(u * i) % 2},{u % 3}') for u, i in lines]
    path = write_lines(f'{self.folder}/{name}.csv', rows, 'user,item,click,place')
    prepare_pass(cfg, path, path + '.pass')
    prepared = PreparedPass(path + '.pass', cfg)
    if retrieval:
      step.dense.catalogue.refresh(step.store, SingleProcess(), prepared)
    for number, batch in enumerate(prepared.batches(32)):
      train(step, step.dense.catalogue.for_step(batch, number) if retrieval else batch)
    items = None
    if retrieval:
      inputs = Inputs(cfg, SingleProcess(), step, lambda: None, self.folder)
      keys, vectors = Ranker(cfg, inputs).all_item_vectors()
      names = dict(zip(item_keys(range(25)), map(str, range(25))))
      items = Items(keys, np.array([names[key] for key in keys.tolist()], object), vectors)
    exported(step, cfg, 'items' if retrieval else 'base', 1, items)
    with open(f'{run_dir}/config.yaml', 'w', encoding='utf-8') as f:
      f.write(config.dump(cfg))
    return run_dir

  def test_ranks_what_is_found_as_by_hand(self):
    finder_dir = self.export(make_config(), 'finder', True)
    changes = {
      'data.label': 'click',
      'data.slots': [{'name': 'user'}, {'name': 'item'}, {'name': 'place'}],
      'data.dense': [],
      'model.interactions': ['linear', 'fm'],
    }
    ranker_dir = self.export(make_ranker_config(changes), 'ranker', False)
    finder, ranker = service_of(finder_dir), service_of(ranker_dir)
    users, seen = ['3', '11'], [['1', '2'], []]
    queries = Request({'user': users}, 2, by_row=True)
    expected = []
    for user, (items, _) in zip(users, finder.find(queries, 9, seen)[0].items):
      columns = {'user': Shared([user]), 'item': items, 'place': Shared(['1'])}
      scores, _ = ranker.predict(Request(columns, 9, by_row=False))
      scores = scores.outputs['probability']
      order = np.argsort(-scores)[:4]
      expected.append(([items[i] for i in order], scores[order]))
    instances = [{'user': user, 'place': '1'} for user in users]
    body = {'instances': instances, 'k': 4, 'seen': seen}
    with served(ranker, recommender=Recommender(finder, ranker, candidates=9)) as client:
      status, text, _ = client.ask('POST', PATH, body)
      answer = json.loads(text)
      self.assertEqual(
        (status, answer['model_version'], answer['retrieval_version']), (200, '1', '1')
      )
      for found, (items, scores) in zip(answer['predictions'], expected):
        self.assertEqual(found['items'], items)
        self.assertAllClose(found['scores'], scores, rtol=1e-6)
      self.assertEqual(client.predict({'inputs': {'user': '3', 'item': '4', 'place': '1'}})[0], 200)
      _, text, _ = client.ask('GET', '/v1/models/ctr/metadata')
      described = json.loads(text)
      self.assertEqual(client.ask('POST', PATH, described['example_recommend_request'])[0], 200)
      self.assertEqual(client.predict(described['example_request'])[0], 200)
      self.assertEqual(
        set(described['example_recommend_request']['instances'][0]), {'user', 'place'}
      )
      status, text, _ = client.ask('POST', PATH, {'instances': [{'user': '3'}]})
      self.assertEqual((status, json.loads(text)['error'][:25]), (400, "column 'place' is missing"))
    with served(ranker) as client:
      status, text, _ = client.ask('POST', PATH, body)
      self.assertEqual(status, 404)
      self.assertIn(
        'found a run without model.retrieval; wanted :predict', json.loads(text)['error']
      )

    flags = '--run_dir', finder_dir, '--retrieve_run_dir', ranker_dir
    refused = commands.run('-m', 'trainer.cli.serve', *flags)
    self.assertEqual(refused.returncode, 2)
    self.assertIn('--retrieve_run_dir: found a run with model.interactions', refused.stderr)
    for found, flags in (('both', ['--run_dir=r', '--store=s']), ('neither', [])):
      refused = commands.run('-m', 'trainer.cli.serve', *flags)
      wanted = f'error: --run_dir, --store: found {found}; wanted one of them\n'
      self.assertEqual((refused.returncode, refused.stderr), (2, wanted))


def item_keys(items):
  from trainer.data.features import hash_keys

  return hash_keys(tf.constant([str(i) for i in items]), 2).numpy().tolist()


class DeltaTest(tf.test.TestCase):
  def test_of_items_and_of_the_rows_of_histories(self):
    """Rows of items that only negatives have changed are in the delta: a history reads them."""
    changes = {
      'data.slots': [
        {'name': 'user'},
        {'name': 'item'},
        {'name': 'bought', 'separator': '|', 'shares': 'item', 'sequence': {'max_length': 5}},
      ]
    }
    folder = self.enter_context(tempfile.TemporaryDirectory())
    cfg = make_config(changes | {'run_dir': folder}, query={'slots': ['user', 'bought']})
    step, rng = task_of(cfg).step(SingleProcess()), np.random.default_rng(0)
    inputs = Inputs(cfg, SingleProcess(), step, lambda: None, folder)

    def train_pass(name, items):
      lines = [(rng.integers(9), f'{i},{rng.choice(items)}|{rng.choice(items)}') for i in items]
      path = write_lines(f'{folder}/{name}.csv', lines, 'user,item,bought')
      prepare_pass(cfg, path, path + '.pass')
      prepared = PreparedPass(path + '.pass', cfg)
      step.dense.catalogue.refresh(step.store, SingleProcess(), prepared)
      for number, batch in enumerate(prepared.batches(8)):
        train(step, step.dense.catalogue.for_step(batch, number))

    names = dict(zip(item_keys(range(40)), map(str, range(40))))

    def write(kind, number, to):
      keys, vectors = Ranker(cfg, inputs).all_item_vectors()
      texts = np.array([names[key] for key in keys.tolist()], object)
      done = exported(step, cfg, kind, number, Items(keys, texts, vectors), f'{folder}/{to}')
      return RowExport(done.path)

    train_pass('first', range(20))
    stores = MemoryStore(), MemoryStore()
    write('items', 1, 'chain')
    Publisher(f'{folder}/chain', stores[0]).advance()
    train_pass('second', range(17, 24))  # few batches: not all items are drawn
    gone = np.array(item_keys([3, 5]))
    step.store.erase(gone)
    delta = write('delta', 2, 'chain')
    self.assertEqual(delta.previous, 'items/1')
    change = item_files.read(delta)
    self.assertAllEqual(np.sort(change.gone), np.sort(gone))
    self.assertContainsSubset(['20', '23'], change.items.texts)
    self.assertBetween(len(change.items.keys), 8, 21)
    write('items', 2, 'base')
    Publisher(f'{folder}/chain', stores[0]).advance()
    Publisher(f'{folder}/base', stores[1]).advance()
    replayed, whole = (store.view() for store in stores)
    self.assertEqual(replayed.version.sequence, 2)
    for one, other in zip(replayed.items.items, whole.items.items):
      self.assertAllEqual(one, other)
    keys = np.unique(np.asarray(step.store.select('all')))
    for one, other in zip(replayed.look_up(keys), whole.look_up(keys)):
      self.assertAllEqual(one, other)

    queries = Request({'user': ['1', ''], 'bought': ['18|30', '20|19']}, 2, by_row=True)
    service = Service(stores[0])
    service.refresh()
    for seen, left_out in ((None, [{'18'}, {'20', '19'}]), ([[], ['19']], [set(), {'19'}])):
      found, _ = service.find(queries, len(whole.items.items.keys), seen)
      for (items, scores), own in zip(found.items, left_out):
        self.assertEqual(set(whole.items.items.texts) - set(items), own)
        self.assertAllEqual(scores, sorted(scores, reverse=True))

    os.remove(os.path.join(delta.path, chain.ITEMS))  # as if a trainer had retired the export
    with self.assertRaises(FileNotFoundError):  # it is not damaged
      item_files.read(delta)


class ItemSearchTest(tf.test.TestCase):
  def test_by_index_is_as_exact_through_changes(self):
    if not item_files.has_faiss():
      self.skipTest('faiss is not installed')
    rng = np.random.default_rng(0)
    folder = self.get_temp_dir()

    def made(keys):
      vectors = rng.normal(size=[len(keys), 8]).astype(np.float32)
      return Items(np.array(keys), np.array([f'i{k}' for k in keys], object), vectors)

    class Base:
      """Stands in for a RowExport of all items."""

      path = folder

      def content(self, name):
        with open(f'{folder}/{name}', 'rb') as f:
          return f.read()

    all_items = made(rng.permutation(500) * 3)
    Change(all_items, np.zeros([0], np.int64)).save(folder)
    all_items.save_index(folder)
    searches = [ItemSearch.of_base(Base(), exact_up_to) for exact_up_to in (0, 10**6)]
    changes = [Change(made([3, 7, 30, 31]), np.array([0, 6])), Change(made([6, 7]), np.array([30]))]
    for change in (None, *changes):
      if change is not None:
        searches = [search.changed(change) for search in searches]
      self.assertEqual([search.by_index for search in searches], [True, False])
      for query in rng.normal(size=[9, 8]).astype(np.float32):
        seen = rng.integers(0, 490, 30)
        indexed, exact = (search.best(query, 7, seen) for search in searches)
        self.assertAllEqual(indexed[0], exact[0])
        self.assertAllClose(indexed[1], exact[1], rtol=1e-5)
        self.assertEmpty(set(exact[0].tolist()) & set(seen.tolist()))
    # Where a quarter of the index is not of now, all is searched.
    many = made(np.arange(0, 600, 3))
    searches = [search.changed(Change(many, np.array([33000]))) for search in searches]
    self.assertEqual([search.by_index for search in searches], [False, False])
    self.assertAllEqual(*(search.best(many.vectors[0], 5, seen)[0] for search in searches))


if __name__ == '__main__':
  tf.test.main()
