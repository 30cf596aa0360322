"""The SavedModel, in a fresh process with plain TensorFlow, gives what the trainer predicts."""

import json
import os
import subprocess
import sys
import tempfile

import numpy as np
import tensorflow as tf

from tests.support import small
from tests.support.steps import train
from trainer import config, errors
from trainer.comm.communicator import SingleProcess
from trainer.data.conversion import prepare_pass
from trainer.data.prepared import PreparedPass
from trainer.storage import export_writer
from trainer.training.step import TrainStep

BATCH = 64
# Loads a SavedModel where neither TFRA nor anything of ours can be imported, and writes what it
# predicts.
SERVE = """
import json, sys
class Blocked:
  def find_spec(self, name, path=None, target=None):
    if name.split('.')[0] in ('tensorflow_recommenders_addons', 'ops', 'trainer', 'horovod'):
      raise ImportError(name)
sys.meta_path.insert(0, Blocked())
import tensorflow as tf
COLUMN = {'user_id': 'user id'}
def tensor(texts, dtype):
  if dtype == tf.float32:
    texts = [float(t) if t.strip() else float('nan') for t in texts]
  return tf.constant([int(t) for t in texts] if dtype == tf.int64 else texts, dtype)
def feature(text, dtype):
  if dtype == tf.int64:
    return tf.train.Feature(int64_list=tf.train.Int64List(value=[int(text)]))
  if dtype == tf.float32:
    return tf.train.Feature(float_list=tf.train.FloatList(value=[float(text)]))
  return tf.train.Feature(bytes_list=tf.train.BytesList(value=[text.encode()]))
def example(row, dtypes):
  present = {name: dtype for name, dtype in dtypes.items() if row[name].strip()}
  features = {name: feature(row[name], dtype) for name, dtype in present.items()}
  return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()
def serve(path, rows):
  model = tf.saved_model.load(path)
  signature = model.signatures['serving_default']
  specs = signature.structured_input_signature[1]
  dtypes = {COLUMN.get(name, name): spec.dtype for name, spec in specs.items()}
  columns = {
      name.replace(' ', '_'): tensor([row[name] for row in rows], dtype)
      for name, dtype in dtypes.items()
  }
  examples = tf.constant([example(row, dtypes) for row in rows])
  found = {'columns': signature(**columns),
           'examples': model.signatures['examples'](examples=examples),
           'empty': signature(**{n: c[:0] for n, c in columns.items()})}
  probabilities = {k: v['probability'].numpy().tolist() for k, v in found.items()}
  return probabilities | {'dtypes': {n: d.name for n, d in dtypes.items()}}
jobs, out = sys.argv[1:]
json.dump([serve(*job) for job in json.load(open(jobs))], open(out, 'w'))
"""
SINGLE = [{'name': 'user'}, {'name': 'item'}, {'name': 'ad'}]
MANY = [
  {'name': 'user', 'column': 'user id'},
  {'name': 'tags', 'separator': '|', 'pooling': 'mean'},
  {'name': 'history', 'separator': '|', 'pooling': 'sqrtn', 'shares': 'item'},
  {'name': 'item'},
  {'name': 'topics', 'separator': ';', 'value_separator': ':', 'pooling': 'mean'},
  {'name': 'age'},
]
DENSE = [
  {'name': 'price', 'transform': 'log1p_standardise', 'missing': -0.5},
  {'name': 'age', 'transform': 'log1p'},
  {'name': 'ctr'},
]
POLICY = {'admission': 'count', 'admission_count': 3.0, 'eviction': 'none'}


def make_rows(rng, n, first_id=0):
  """Records as a log has them: text, blanks, several features a field, odd white space."""

  def some(prefix, vocabulary, at_most, separator, value=None):
    names = [
      f'{prefix}{i}'
      for i in rng.integers(first_id, first_id + vocabulary, rng.integers(0, at_most + 1))
    ]
    # A name with a colon in it is split at the last one, so it always has a value.
    return separator.join(
      f'{name}:{rng.integers(-8, 9) / 4}'
      if value and rng.random() < 0.7
      else f' {name} '.replace(':', '')
      for name in names
    )

  rows = []
  for _ in range(n):
    rows.append(
      {
        'user id': f' u{rng.integers(20)}',
        'user': str(rng.integers(30)),
        'item': str(rng.integers(first_id, first_id + 25)),
        'ad': f'größe {rng.integers(9)}',
        'tags': some('t', 15, 4, '|'),
        'topics': some('x:', 12, 3, ';', value=True),
        'history': '|'.join(map(str, rng.integers(0, 40, rng.integers(0, 5)))),
        'age': str(rng.integers(18, 30)) if rng.random() < 0.8 else '',
        'price': f'{rng.normal() * 9:.3f}' if rng.random() < 0.8 else ' ',
        'ctr': f'{rng.random():.4f}',
        'label': str(int(rng.random() < 0.3)),
      }
    )
  return rows


class ServingTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.run_dir = self.enter_context(tempfile.TemporaryDirectory())
    self.exported = 0

  def _config(self, slots, interactions, tables=None, dense=(), policy=None, loss='log_loss'):
    path = os.path.join(self.run_dir, 'in.json')
    rate = 0.5 if loss == 'log_loss' else 1.0
    small.write(
      path,
      run_dir=self.run_dir,
      data={'train': ['x'], 'slots': slots, 'dense': list(dense), 'delimiter': '\t'},
      sparse={'tables': tables or {'default': {'width': 4, 'init_scale': 0.3}}},
      lifecycle=policy or POLICY,
      model={'interactions': interactions, 'loss': loss, 'negative_sampling_rate': rate},
    )
    return config.load(path)

  def _prepared(self, cfg, rows, name):
    path = os.path.join(self.run_dir, f'{name}.csv')
    with open(path, 'w', encoding='utf-8') as f:
      f.writelines(
        '\t'.join(fields) + '\n' for fields in [rows[0].keys(), *(r.values() for r in rows)]
      )
    out = os.path.join(self.run_dir, 'prepared', name)
    os.makedirs(os.path.dirname(out), exist_ok=True)
    prepare_pass(cfg, path, out)
    return PreparedPass(out, cfg)

  def _trained(self, cfg, rows):
    step = TrainStep(cfg, SingleProcess())
    if cfg.data.dense:
      step.dense.embedding.stats.assign(
        np.linspace([-1, 0.5, 3], [1, 2, 0], len(cfg.data.dense), axis=1, dtype=np.float32)
      )
    for batch in self._prepared(cfg, rows, 'train').batches(BATCH):
      train(step, batch, has_next=True)
    return step

  def _serve(self, jobs):
    """What one fresh process gives for [(path of a SavedModel, records) …]."""
    script, given, out = (
      os.path.join(self.run_dir, n) for n in ('serve.py', 'jobs.json', 'out.json')
    )
    with open(script, 'w', encoding='utf-8') as f:
      f.write(SERVE)
    with open(given, 'w', encoding='utf-8') as f:
      json.dump(jobs, f)
    env = {k: v for k, v in os.environ.items() if k not in ('PYTHONPATH', 'TF_USE_LEGACY_KERAS')}
    subprocess.run([sys.executable, script, given, out], check=True, cwd=self.run_dir, env=env)
    with open(out, encoding='utf-8') as f:
      return json.load(f)

  def _ops(self, path):
    """Names of all ops in a SavedModel's graph, joined."""
    with tf.compat.v1.Session(graph=tf.Graph()) as session:
      definition = tf.compat.v1.saved_model.load(session, ['serve'], path).graph_def
    return ' '.join(
      n.op
      for nodes in (definition.node, *(f.node_def for f in definition.library.function))
      for n in nodes
    )

  def test_a_fresh_process_gives_what_the_trainer_predicts(self):
    tables = {
      'small': {'width': 2, 'init_scale': 0.3},
      'wide': {'width': 5, 'init_scale': 0.3, 'linear': {'kind': 'sgd'}},
    }
    by_table = [
      dict(s, table='wide' if s['name'] in ('tags', 'item', 'history') else 'small') for s in MANY
    ]
    cases = {
      'linear': self._config(MANY, ['linear'], dense=DENSE),
      'deepfm': self._config(MANY, ['linear', 'fm', {'dnn': {'hidden': [8]}}], dense=DENSE),
      'dlrm': self._config(MANY, [{'dlrm': {'bottom': [4], 'hidden': [8]}}], dense=DENSE),
      'ffm': self._config(MANY, ['linear', 'ffm'], dense=DENSE),
      'both kinds of factors': self._config(MANY, ['fwfm', {'cross': {}}, 'ffm'], dense=DENSE),
      'one feature a field': self._config(
        SINGLE, ['linear', 'fm', {'dnn': {'hidden': [8], 'batch_norm': 'local'}}]
      ),
      'two tables': self._config(
        by_table, ['linear', {'dnn': {'hidden': [8]}}, 'cross'], tables=tables, dense=DENSE
      ),
      'no admission': self._config(
        MANY, ['linear', 'fm'], policy={'admission': 'none', 'eviction': 'none'}
      ),
      'squared error': self._config(SINGLE, ['linear', 'fm'], loss='squared_error'),
    }
    jobs, wanted = [], []
    for name, cfg in cases.items():
      rng = np.random.default_rng(0)
      step = self._trained(cfg, make_rows(rng, 6 * BATCH))
      rows = make_rows(rng, 50) + make_rows(rng, 20, first_id=1000)  # known and unseen features
      wanted.append(
        np.concatenate(
          [step.predict(step.stage(b)) for b in self._prepared(cfg, rows, 'test').batches(BATCH)]
        )
      )
      self.assertGreater(np.std(wanted[-1]), 1e-3)
      done = export_writer.write(
        cfg,
        'saved_model',
        {'case': name},
        store=step.store,
        model=step.dense.model,
        dense_stats=step.dense.embedding.stats,
        integer_slots=['user', 'item'] if name == 'one feature a field' else [],
      )
      self.assertNotIn('Ctr', self._ops(done.path))
      jobs.append((done.path, rows))
    for name, values, served in zip(cases, wanted, self._serve(jobs)):
      with self.subTest(name):
        self.assertAllClose(served['columns'], values, atol=1e-6, rtol=0)
        self.assertAllClose(served['examples'], values, atol=1e-6, rtol=0)
        self.assertEqual(served['empty'], [])
        if name == 'one feature a field':
          self.assertEqual(served['dtypes'], {'user': 'int64', 'item': 'int64', 'ad': 'string'})

  def test_what_stands_for_a_missing_value(self):
    rows = make_rows(np.random.default_rng(3), 6 * BATCH)
    cfg = self._config(SINGLE, ['linear', 'fm'], dense=[{'name': 'price', 'missing': -0.5}])
    step = self._trained(cfg, rows)
    missing = [row | {'user': '', 'ad': '', 'price': ''} for row in rows[:BATCH]]
    (batch,) = self._prepared(cfg, missing, 'missing').batches(BATCH)
    settings = {'model': step.dense.model, 'dense_stats': step.dense.embedding.stats}
    done = export_writer.write(
      cfg, 'saved_model', {}, store=step.store, integer_slots=['user'], **settings
    )
    found = tf.saved_model.load(done.path).signatures['serving_default'](
      user=tf.constant([-1], tf.int64),
      item=tf.constant([row['item'] for row in missing]),
      ad=tf.constant(['']),
      price=tf.constant([np.nan]),
    )
    self.assertAllClose(found['probability'], step.predict(step.stage(batch)), atol=1e-6, rtol=0)

  def test_columns_of_any_name(self):
    slots = [
      {'name': name, 'column': c} for name, c in zip('abcd', ('self', '用户', '物品', 'class'))
    ]
    dense = [{'name': 'training', 'transform': 'none'}]
    cfg = self._config(slots, ['linear'], dense=dense)
    rng = np.random.default_rng(3)
    columns = [*(slot['column'] for slot in slots), 'training', 'label']
    rows = [{c: str(rng.integers(2)) for c in columns} for _ in range(2 * BATCH)]
    step = self._trained(cfg, rows)
    done = self._exported(cfg, step)
    (batch,) = self._prepared(cfg, rows[:BATCH], 'some').batches(BATCH)
    names = {'column_self': 'self', 'column_u7528u6237': '用户', 'column_u7269u54c1': '物品'}
    names |= {'column_class': 'class'}
    inputs = {name: tf.constant([r[c] for r in rows[:BATCH]]) for name, c in names.items()}
    inputs['training'] = tf.constant([float(r['training']) for r in rows[:BATCH]])
    found = tf.saved_model.load(done.path).signatures['serving_default'](**inputs)
    self.assertAllClose(found['probability'], step.predict(step.stage(batch)), atol=1e-6, rtol=0)

  def test_one_user_and_many_items(self):
    rows = make_rows(np.random.default_rng(2), 40)
    cfg = self._config(MANY, ['linear', 'fm', {'dnn': {'hidden': [8]}}], dense=DENSE)
    done = self._exported(cfg, self._trained(cfg, rows))
    signature = tf.saved_model.load(done.path).signatures['serving_default']

    def columns(names, some):
      values = {n: [r[n] for r in some] for n in names}
      return {
        n.replace(' ', '_'): tf.constant(
          [float(v) if v.strip() else np.nan for v in c] if n in ('price', 'ctr') else c,
          tf.float32 if n in ('price', 'ctr') else tf.string,
        )
        for n, c in values.items()
      }

    context, items = ('user id', 'tags', 'topics', 'age', 'price'), ('item', 'history', 'ctr')
    for user in rows[:5]:
      many = [user | {n: r[n] for n in items} for r in rows]
      wanted = signature(**columns((*context, *items), many))['probability']
      found = signature(**columns(context, [user]), **columns(items, rows))['probability']
      self.assertAllClose(found, wanted, atol=1e-7, rtol=0)
    none = signature(**columns(context, rows[:1]), **columns(items, []))['probability']
    self.assertEqual(none.shape, [0])
    with self.assertRaisesRegex(
      tf.errors.InvalidArgumentError, 'found inputs of lengths.*item 40.*wanted one length, or 1'
    ):
      signature(**columns(context, rows[:3]), **columns(items, rows))

  def test_the_layout_of_tensorflow_serving(self):
    cfg = self._config(SINGLE, ['linear', 'fm'])
    cfg = cfg.model_copy(update={'export': config.Export(keep=2)})
    step = self._trained(cfg, make_rows(np.random.default_rng(5), BATCH))
    for kind in ('saved_model', 'base', 'saved_model', 'saved_model'):
      done = self._exported(cfg, step, kind)
    exports = os.path.join(self.run_dir, 'exports')
    self.assertEqual(done.path, os.path.join(exports, 'saved_model', '4'))
    self.assertEqual(sorted(os.listdir(os.path.join(exports, 'saved_model'))), ['3', '4'])
    self.assertIn('000002-base', os.listdir(exports))

  def _exported(self, cfg, step, kind='saved_model', **more):
    """An export of the step's state; each call's is another one."""
    self.exported += 1
    return export_writer.write(
      cfg,
      kind,
      {'number': self.exported},
      store=step.store,
      model=step.dense.model,
      dense_stats=step.dense.embedding.stats,
      **more,
    )

  def test_before_anything_was_trained(self):
    cfg = self._config(SINGLE, ['linear', 'fm'])
    step = TrainStep(cfg, SingleProcess())
    model = {'store': step.store, 'model': step.dense.model}
    model |= {'dense_stats': step.dense.embedding.stats}
    done = export_writer.write(cfg, 'saved_model', {}, **model)
    self.assertEqual(done.rows, 0)
    # The same state at the same place is not written again; another one is, and told.
    again = export_writer.write(cfg, 'saved_model', {}, **model)
    self.assertEqual((again.path, again.told), (done.path, None))
    self.assertLen(os.listdir(os.path.dirname(done.path)), 1)
    bias = step.dense.model.variables[0]
    bias.assign(bias + 1)
    other = export_writer.write(cfg, 'saved_model', {}, **model)
    self.assertRegex(
      other.told, 'saved_model/1 is of a state .* has: saved_model/2 takes its place$'
    )
    model = tf.saved_model.load(done.path)
    text = tf.constant(['a', ''])
    served = model.signatures['serving_default'](user=text, item=text, ad=text)['probability']
    self.assertAllClose(served, [1 / 3, 1 / 3])  # odds 1 · r = ½

  def test_a_value_that_is_no_number_leaves_its_feature_out(self):
    cfg = self._config(MANY, ['linear'], dense=DENSE)
    step = self._trained(cfg, make_rows(np.random.default_rng(1), 2 * BATCH))
    done = export_writer.write(
      cfg,
      'saved_model',
      {},
      store=step.store,
      model=step.dense.model,
      dense_stats=step.dense.embedding.stats,
    )
    signature = tf.saved_model.load(done.path).signatures['serving_default']
    row = {
      'user_id': 'u1',
      'tags': 't1',
      'history': '3',
      'item': '3',
      'age': '20',
      'price': 1.0,
      'ctr': 0.5,
    }
    topics = ['x:1:oops', 'x:1:nan', '', ':2', 'x:1:1e999']
    served = signature(
      topics=tf.constant(topics), **{k: tf.constant([v] * len(topics)) for k, v in row.items()}
    )['probability']
    self.assertAllEqual(served, [served[2]] * len(topics))

  def test_an_integer_slot_that_is_not_there(self):
    cfg = self._config(SINGLE, ['linear'])
    step = TrainStep(cfg, SingleProcess())
    with self.assertRaisesRegex(errors.UserError, "integer slot 'usr': is not among data.slots"):
      export_writer.write(
        cfg,
        'saved_model',
        {},
        store=step.store,
        model=step.dense.model,
        dense_stats=step.dense.embedding.stats,
        integer_slots=['usr'],
      )


if __name__ == '__main__':
  tf.test.main()
