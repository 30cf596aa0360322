"""A model goes on with other slots, layers and rates: nothing that it has learned is mixed up."""

import os
import shutil
import tempfile

import numpy as np
import tensorflow as tf

from ops import row_optimizers, row_store
from tests.support import small
from trainer.data.features import HASH_BITS
from trainer.data.passes import passes as listed
from trainer.embedding.layer_inputs import slot_vectors, vector_width
from trainer.errors import UserError
from trainer.evaluation.evaluators import Evaluation

COLUMNS = ('user', 'item', 'query')


class Square(tf.keras.layers.Layer):
  needs = frozenset({'factors'})

  def build(self, shapes):
    del shapes
    self._w = self.add_weight('w', [16, 16], initializer='ones')

  def call(self, inputs, training=False):
    return tf.reduce_mean(tf.concat(slot_vectors(inputs), 1) @ self._w, 1, keepdims=True)


class Gate(tf.keras.layers.Layer):
  """An ordinary Keras layer: its sublayers have no names, so Keras numbers them."""

  needs = frozenset({'factors'})

  def __init__(self, units=4):
    super().__init__()
    self.hidden = [tf.keras.layers.Dense(units) for _ in range(2)]
    self.head = tf.keras.layers.Dense(1)

  def call(self, inputs, training=False):
    x = tf.concat(slot_vectors(inputs), 1)
    for layer in self.hidden:
      x = layer(x)
    return self.head(x)


class Weights(tf.keras.layers.Layer):
  """Says which axis of its weights has an entry for each input."""

  needs = {'factors'}
  axes = {'w': ('joined', None)}

  def __init__(self, name=None):
    super().__init__(name=name)

  def build(self, shapes):
    small = tf.constant_initializer(0.03)  # so that no probability rounds to 1
    self._w = self.add_weight('w', [vector_width(shapes), 32], initializer=small)

  def call(self, inputs, training=False):
    return tf.reduce_sum(tf.concat(slot_vectors(inputs), 1) @ self._w, 1, keepdims=True)


class WarmStartTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = tempfile.mkdtemp(dir=self.get_temp_dir())
    for name in ('a', 'b'):
      rng = np.random.default_rng(ord(name))
      rows = (f'{",".join(map(str, rng.integers(9, size=3)))},{rng.integers(2)}' for _ in range(60))
      with open(f'{self.folder}/{name}.csv', 'w', encoding='utf-8') as f:
        f.write('\n'.join([','.join(COLUMNS) + ',label', *rows]) + '\n')

  def make_job(
    self,
    slots,
    hidden=8,
    interactions=('linear', 'fm'),
    passes=('a',),
    table=None,
    init_from=None,
    bounds=None,
    **sections,
  ):
    slots = [{'name': name} for name in slots]
    slots += [{'name': 'bin', 'from': {'bins': 'item', 'boundaries': bounds}}] if bounds else []
    tree = small.tree(
      run_dir=f'{self.folder}/{"new" if init_from else "run"}',
      data={'train': [f'{self.folder}/{one}.csv' for one in passes], 'slots': slots},
      sparse={'tables': {'default': {'width': 8} | (table or {})}},
      model={'interactions': [*interactions, {'dnn': {'hidden': [hidden]}}]},
      train={'batch_size': 16},
    )
    return small.job(small.config(tree | sections), init_from=init_from)

  def rows(self, job):
    """What is kept of each feature, by its slot's name and its hash."""
    names = {i: name for name, i in job.cfg.slot_ids().items()}
    found = {}
    for chunk in job.step.store.export_state():
      for i, key in enumerate(chunk['key'].tolist()):
        row = chunk['show'][i], chunk['linear'][i].tolist(), chunk['factors_default'][i].tolist()
        found[names[key >> HASH_BITS], key & ((1 << HASH_BITS) - 1)] = row
    return found

  def kernel(self, job):
    return next(v for n, v in job.step.dense_state().items() if n.endswith('kernel_0:0'))

  def test_a_slot_more_a_slot_less_and_a_wider_layer(self):
    first = self.make_job(['user', 'item'])
    first.run()
    other = self.make_job(['query', 'item'], hidden=12, interactions=('fm', 'fwfm', 'linear'))
    other.open_run()
    self.assertEqual(other.progress.done, 1, 'the place in the data stays')
    items = {key: row for key, row in self.rows(first).items() if key[0] == 'item'}
    self.assertNotEmpty(items)
    self.assertEqual(self.rows(other), items)
    self.assertAllEqual(self.kernel(other)[8:, :8], self.kernel(first)[8:], "item's part")
    fates = dict(other.state.fates)
    self.assertEqual(
      {what: fates[what] for what in ('slot query', 'slot item', 'slot user')},
      {'slot query': 'fresh', 'slot item': 'taken over', 'slot user': 'dropped'},
    )
    self.assertEqual(fates['layer dnn 0'], 'partly')
    self.assertEqual(fates['layer fwfm 0'], 'fresh')
    other.lock.release()
    self.make_job(
      ['query', 'item'], hidden=12, interactions=('fm', 'fwfm', 'linear'), passes=('a', 'b')
    ).run()

  def test_a_slot_in_front_of_the_others(self):
    first = self.make_job(['user', 'item'])
    first.run()
    other = self.make_job(['query', 'user', 'item'])
    other.open_run()
    self.assertEqual(self.rows(other), self.rows(first))
    self.assertAllEqual(self.kernel(other)[8:], self.kernel(first))
    other.lock.release()

  def test_a_layer_of_ones_own_whose_inputs_changed(self):
    """Its kernel is [16, 16]: nothing says which axis is that of the inputs."""
    own = (f'{__name__}.Square',)
    first = self.make_job(['user', 'item'], interactions=own)
    first.run()
    other = self.make_job(['item', 'user'], interactions=own, init_from=f'{self.folder}/run')
    other.open_run()

    def square(job):
      return next(v for n, v in job.step.dense_state().items() if 'square' in n and 'w:0' in n)

    self.assertNotAllEqual(square(first), np.ones([16, 16]))
    self.assertAllEqual(square(other), np.ones([16, 16]))
    self.assertEqual(dict(other.state.fates)['layer square 0'], 'fresh')
    other.lock.release()

  def test_dense_columns_keep_their_weights(self):
    """There are as many of them as slots; what would mix them up is refused."""
    price, rate = {'name': 'query'}, {'name': 'item', 'transform': 'standardise'}

    def job(slots, dense, **more):
      data = {'train': [f'{self.folder}/a.csv'], 'slots': slots, 'dense': dense}
      return self.make_job([], data=data, **more)

    def weights(one):
      return next(
        v for n, v in one.step.dense_state().items() if 'linear' in n and n.endswith('/dense:0')
      )

    user, item = {'name': 'user'}, {'name': 'item'}
    first = job([user, item], [price, rate])
    first.run()
    other = job([item, user], [price, rate])
    other.open_run()
    self.assertAllEqual(weights(other), weights(first))
    self.assertGreater(np.ptp(weights(first)), 0.001)
    other.lock.release()
    begins = {'init_from': f'{self.folder}/run'}
    for slots, dense, told in (
      (
        [user, item],
        [rate, price],
        r'reads other data.dense: query \(none\), item \(standardise\);',
      ),
      ([user, item], [price], 'reads other data.dense'),
      ([user, item], [price | {'transform': 'log1p'}, rate], 'reads other data.dense'),
      (
        [user, item | {'shares': 'user'}],
        [price, rate],
        "slot item has shares null, this .* 'user'",
      ),
    ):
      with self.assertRaisesRegex(UserError, f'^--init_from {self.folder}/run.*: its .*{told}'):
        job(slots, dense, **begins).run()
    tables = {'tables': {'default': {'width': 8}, 'other': {'width': 8}}}
    moved = [user, item | {'table': 'other'}]
    with self.assertRaisesRegex(
      UserError, "its slot item has table 'default', this config 'other'"
    ):
      job(moved, [price, rate], sparse=tables, interactions=('linear',), **begins).run()

  def test_the_order_of_slots_changes_no_prediction(self):
    """Of any layer, also where the lengths of other axes are those of the inputs."""
    rng = np.random.default_rng(4)
    for name in ('a', 'b'):
      with open(f'{self.folder}/{name}.csv', 'w', encoding='utf-8') as f:
        f.write('user,item,seen,liked,price,label\n')
        for _ in range(80):
          lists = ('|'.join(map(str, rng.integers(9, size=3))) for _ in range(2))
          row = (*rng.integers(9, size=2), *lists, round(rng.normal(), 3), rng.integers(2))
          f.write(','.join(map(str, row)) + '\n')
    user, item = {'name': 'user'}, {'name': 'item'}
    seen, liked = (
      {'name': name, 'separator': '|', 'shares': 'item', 'sequence': {'max_length': 3}}
      for name in ('seen', 'liked')
    )
    # With width 8, four slots have as many inputs as an attention unit of din.
    for interactions, dense in (
      (['linear', 'fm', 'fwfm', {'dnn': {'hidden': [32]}}, {'din': {'hidden': [64]}}], []),
      ([{'cross': {'layers': 2}}, {'cross': {'layers': 2, 'low_rank': 33}}], ['price']),
      (['linear', {'dlrm': {'bottom': [4], 'hidden': [6]}}], ['price']),
      ([{'dlrm': {'hidden': [4]}}, f'{__name__}.Weights'], []),
    ):
      logloss = []
      for slots in ([user, item, seen, liked], [liked, item, user, seen], [liked, item, seen]):
        data = {'train': [f'{self.folder}/a.csv'], 'slots': slots}
        job = self.make_job(
          [],
          interactions=interactions,
          init_from=f'{self.folder}/run' if logloss else None,
          data=data | {'dense': [{'name': name} for name in dense]},
          table={'init_scale': 0.5},
          train={'batch_size': 16, 'epochs': 3, 'dense_optimizer': {'learning_rate': 0.02}},
        )
        if logloss:
          job.open_run()
        else:
          job.run()
        passes = listed(job.cfg.data, [f'{self.folder}/b.csv'], 'data.train')
        prepared = job.inputs.prepared(passes, f'split{len(slots)}')
        logloss.append(dict(Evaluation(job.cfg, job.inputs).figures(prepared))['logloss'])
        job.lock.release()
        shutil.rmtree(f'{self.folder}/new', ignore_errors=True)
      self.assertAllClose(logloss[0], logloss[1], rtol=1e-5)
      self.assertNotAllClose(logloss[0], logloss[2], rtol=1e-3)
      shutil.rmtree(f'{self.folder}/run')

  def test_a_model_of_other_labels_or_loss_is_no_beginning(self):
    labels = [{'name': 'label'}, {'name': 'query', 'loss': 'squared_error'}]
    tasks = {'model': {'tasks': {x['name']: {'interactions': ['linear']} for x in labels}}}
    data = {'train': [f'{self.folder}/a.csv'], 'slots': [{'name': 'user'}, {'name': 'item'}]}
    self.make_job(['user', 'item']).run()
    self.make_job([], data=data | {'labels': labels}, run_dir=f'{self.folder}/two', **tasks).run()
    for run, sections, told in (
      ('run', {'model': {'interactions': ['linear'], 'loss': 'squared_error'}}, "has loss 'log_l"),
      (
        'two',
        tasks | {'data': data | {'labels': labels[::-1]}},
        'its labels are label, query, not',
      ),
    ):
      with self.assertRaisesRegex(UserError, f'^--init_from .*{told}.*wanted the same'):
        self.make_job(['user', 'item'], init_from=f'{self.folder}/{run}', **sections).run()

  def test_rates_thresholds_and_the_batch_may_change(self):
    self.make_job(['user', 'item']).run()
    table = {'linear': {'learning_rate': 0.5, 'l2': 1.0}, 'factors': {'clip': 1.0}}
    other = self.make_job(
      ['user', 'item'],
      passes=('a', 'b'),
      table=table,
      lifecycle={'admission_threshold': 2},
      report={'to': []},
      train={'batch_size': 20, 'dense_optimizer': {'kind': 'sgd', 'learning_rate': 0.1}},
    )
    other.run()
    self.assertEqual(other.step.steps, 4 + 3)
    with self.assertRaisesRegex(UserError, 'it holds another model: .*sparse.tables.default'):
      self.make_job(['user', 'item'], table={'init_scale': 0.5}).run()

  def test_a_table_of_another_width_under_other_row_optimizers(self):
    """Weights are taken over; new columns are as if the features were new."""
    first = self.make_job(['user', 'item'])  # width 8, adagrad
    first.run()
    before = self.rows(first)
    for width, linear, factors in (
      (12, 'ftrl', 'adagrad'),
      (8, 'adagrad', 'adam'),
      (3, 'sgd', 'sgd'),
    ):
      table = {'width': width, 'linear': {'kind': linear}, 'factors': {'kind': factors}}
      other = self.make_job(['user', 'item'], init_from=f'{self.folder}/run', table=table)
      other.open_run()
      after = self.rows(other)
      self.assertEqual(after.keys(), before.keys())
      ids, kept = other.cfg.slot_ids(), min(width, 8)
      keys = [hashed | ids[slot] << HASH_BITS for slot, hashed in after]
      new = row_store.initial_factors(keys, other.cfg.seed, width, scale=0.01).numpy()
      for (key, row), fresh in zip(after.items(), new):
        self.assertEqual(row[0], before[key][0])
        self.assertEqual(row[1][0], before[key][1][0], 'the linear weight')
        self.assertEqual(row[2][:kept], before[key][2][:kept])
        self.assertAllEqual(row[2][kept:width], fresh[kept:])
        self.assertLen(row[2], width + row_optimizers.state_floats(factors, width))
      fates = dict(other.state.fates)
      if width != 8:
        self.assertEqual(fates[f'table default, width 8 to {width}'], 'partly')
      if linear != 'adagrad':
        told = f'table default, linear adagrad to {linear}'
        self.assertEqual(fates[told], 'weights taken over')
      other.lock.release()
      self.make_job(['user', 'item'], init_from=f'{self.folder}/run', table=table).run()
      shutil.rmtree(f'{self.folder}/new')

  def test_a_table_of_another_dtype(self):
    """Rows and state go into bfloat16 rounded to nearest, and come back as they are."""
    first = self.make_job(['user', 'item'])
    first.run()
    before = self.rows(first)
    halved = {'table': {'dtype': 'bfloat16'}}
    other = self.make_job(['user', 'item'], init_from=f'{self.folder}/run', **halved)
    other.open_run()
    after = self.rows(other)
    for key, row in before.items():
      factors = row_store.to_float32(np.array(after[key][2], np.uint16))
      self.assertAllEqual(factors, tf.cast(tf.cast(row[2], tf.bfloat16), tf.float32))
      self.assertEqual(after[key][:2], row[:2])
    self.assertEqual(dict(other.state.fates)['table default, float32 to bfloat16'], 'rounded')
    other.lock.release()
    self.make_job(['user', 'item'], init_from=f'{self.folder}/run', **halved).run()
    back = self.make_job(
      ['user', 'item'], init_from=f'{self.folder}/new', run_dir=f'{self.folder}/back'
    )
    back.open_run()
    halves = self.make_job(['user', 'item'], run_dir=f'{self.folder}/new', **halved)
    halves.open_run()
    for key, row in self.rows(halves).items():
      wide = row_store.to_float32(np.array(row[2], np.uint16))
      self.assertAllEqual(self.rows(back)[key][2], wide)
    back.lock.release()
    halves.lock.release()

  def test_the_same_layout_is_taken_bit_by_bit(self):
    """State too: a table whose optimizer stays is as it was beside one that changes."""
    first = self.make_job(['user', 'item'])
    first.run()
    table = {'linear': {'kind': 'ftrl'}}
    other = self.make_job(['user', 'item'], table=table)
    other.open_run()
    for key, row in self.rows(first).items():
      self.assertEqual(self.rows(other)[key][2], row[2], 'factors and their state')
    other.lock.release()

  def test_a_slot_that_is_made_otherwise_starts_fresh(self):
    self.make_job(['user'], bounds=[1, 4]).run()
    for bounds, fate in (([1, 4], None), ([1, 5], 'fresh')):
      job = self.make_job(['user'], bounds=bounds, init_from=f'{self.folder}/run')
      job.open_run()
      names = {name for name, _ in self.rows(job)}
      self.assertEqual(names, {'user', 'bin'} if fate is None else {'user'})
      self.assertEqual(dict(job.state.fates).get('slot bin, which is made otherwise now'), fate)
      job.lock.release()

  def test_so_do_the_slots_that_share_its_features(self):
    def run(bounds, init_from=None):
      binned = {'name': 'bin', 'from': {'bins': 'item', 'boundaries': bounds}}
      again = {'name': 'again', 'from': {'bins': 'query', 'boundaries': [1, 4]}, 'shares': 'bin'}
      data = {'train': [f'{self.folder}/a.csv'], 'slots': [{'name': 'user'}, binned, again]}
      return self.make_job([], init_from=init_from, data=data)

    run([1, 4]).run()
    for bounds, names in (([1, 4], {'user', 'bin'}), ([1, 5], {'user'})):
      job = run(bounds, f'{self.folder}/run')
      job.open_run()
      ids = {job.cfg.slot_ids()[name] for name in names}
      self.assertEqual(
        {key >> HASH_BITS for c in job.step.store.export_state() for key in c['key']}, ids
      )
      told = [f'{what}: {fate}' for what, fate in job.state.fates if 'otherwise' in what]
      wanted = ['bin, which is', 'again, which shares bin, which is']
      wanted = [f'slot {text} made otherwise now: fresh' for text in wanted]
      self.assertEqual(told, [] if 'bin' in names else wanted)
      job.lock.release()

  def test_layers_within_an_own_layer_are_matched_by_their_place(self):
    own = f'{__name__}.Gate'
    first = self.make_job(['user', 'item'], interactions=('linear', own))
    first.run()
    # The same model again in this process, where Keras counts on; then with another before it.
    for interactions in (('linear', own), (own, {own: {'units': 5}}, 'fm')):
      other = self.make_job(['user', 'item'], interactions=interactions)
      other.open_run()
      before, now = (
        [v.numpy() for v in job.step.dense.model.interactions[at].variables]
        for job, at in ((first, 1), (other, interactions.index(own)))
      )
      self.assertLen(now, 6)
      for a, b in zip(before, now, strict=True):
        self.assertAllEqual(a, b)
      other.lock.release()

  def test_a_new_run_from_another(self):
    first = self.make_job(['user', 'item'])
    first.run()
    other = self.make_job(['user', 'item', 'query'], init_from=f'{self.folder}/run', passes=('b',))
    other.open_run()
    self.assertEqual(self.rows(other), self.rows(first))
    self.assertEqual((other.progress.done, other.progress.examples), (0, 0))
    other.lock.release()
    self.make_job(['user', 'item', 'query'], init_from=f'{self.folder}/run', passes=('b',)).run()
    counted = {'name': 'item', 'counts': True}
    data = {'train': [f'{self.folder}/b.csv'], 'slots': [{'name': 'user'}, counted]}
    with self.assertRaisesRegex(UserError, 'no slot has counts in it, item in this config; wanted'):
      run_dir = f'{self.folder}/third'
      self.make_job([], init_from=f'{self.folder}/run', run_dir=run_dir, data=data).run()
    with self.assertRaisesRegex(UserError, '--init_from .*: no finished checkpoint there'):
      self.make_job(['user'], init_from=self.folder, run_dir=f'{self.folder}/third').run()
    self.assertTrue(os.path.exists(f'{self.folder}/new/checkpoints'))


if __name__ == '__main__':
  tf.test.main()
