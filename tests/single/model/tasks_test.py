"""Several tasks: their layers against NumPy, blank labels, metrics, serving and mistakes."""

import collections
import os
import sys
import tempfile

import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from sklearn.metrics import log_loss, roc_auc_score

from tests.support.batches import make_batch
from tests.support.steps import TASKS, make_config, rows_of, scores, train
from trainer.comm.communicator import SingleProcess
from trainer.data.conversion import prepare_pass
from trainer.data.features import empty_batch
from trainer.data.prepared import PreparedPass
from trainer.embedding.layer_inputs import LayerInputs
from trainer.errors import UserError
from trainer.evaluation.evaluators import Evaluation, group_auc
from trainer.model.builder import build
from trainer.model.click_model import logit_of_product
from trainer.model.layers.mmoe import MMoE, SharedBottom
from trainer.model.layers.tower import Tower
from trainer.model.losses import per_sample_loss
from trainer.model.metrics import MetricSums, result
from trainer.storage import saved_model
from trainer.storage.chain import Rows
from trainer.training.inputs import Inputs
from trainer.training.step import TrainStep

SHARED = {'model.shared': {'mmoe': {'experts': 3, 'hidden': [6, 4]}}}
KEEP = {'lifecycle': {'admission': 'none', 'eviction': 'none'}}


def inputs_of(vectors, dense, shared=None):
  """LayerInputs of one table with F slots of width D."""
  return LayerInputs(None, [vectors], [], None, None, None, None, dense, shared=shared)


def sigmoid(x):
  return 1 / (1 + np.exp(-np.asarray(x, np.float64)))


def randomised(layer, inputs, seed=5):
  """Builds a layer and draws all its variables."""
  layer.build(tf.nest.map_structure(lambda t: None if t is None else t.shape, inputs))
  rng = np.random.default_rng(seed)
  for v in layer.variables:
    v.assign(rng.normal(scale=0.5, size=v.shape))
  return {v.name.split(':')[0]: v.numpy().astype(np.float64) for v in layer.variables}


def experts_oracle(x, named, experts, widths):
  """Outputs of experts [B, E, H], one at a time."""
  outputs = []
  for e in range(experts):
    h = x
    for l, width in enumerate(widths):
      kernel = named[f'kernel_{l}']
      kernel = kernel[e] if l else kernel.reshape(-1, experts, width)[:, e]
      h = np.tanh(h @ kernel + named[f'bias_{l}'].reshape(experts, width)[e])
    outputs.append(h)
  return np.stack(outputs, 1)


class LayersTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.parameters(5, 1, 0)
  def test_experts_and_their_gates(self, samples):
    rng = np.random.default_rng(0)
    vectors, dense = rng.normal(size=(samples, 3, 4)), rng.normal(size=(samples, 2))
    x = np.concatenate([vectors.reshape(samples, 12), dense], 1)
    inputs = inputs_of(tf.constant(vectors, tf.float32), tf.constant(dense, tf.float32))
    layer = MMoE(experts=3, hidden=[6, 4], activation='tanh', tasks=2)
    named = randomised(layer, inputs)
    experts = experts_oracle(x, named, 3, [6, 4])
    for t, found in enumerate(layer(inputs)):
      scores = np.exp(x @ named['gates'].reshape(14, 2, 3)[:, t])
      gates = scores / scores.sum(1, keepdims=True)
      self.assertAllClose(found, np.einsum('be,beh->bh', gates, experts), rtol=1e-4, atol=1e-5)
    bottom = SharedBottom(hidden=[6, 4], activation='tanh', tasks=2)
    named = randomised(bottom, inputs)
    for found in bottom(inputs, training=True):
      self.assertAllClose(found, experts_oracle(x, named, 1, [6, 4])[:, 0], rtol=1e-4, atol=1e-5)

  def test_tower_reads_what_is_shared(self):
    shared = np.random.default_rng(0).normal(size=(5, 4))
    inputs = inputs_of(None, tf.zeros([5, 0]), tf.constant(shared, tf.float32))
    for hidden in ([3], []):
      layer = Tower(hidden=hidden, activation='tanh')
      named = randomised(layer, inputs)
      h = np.tanh(shared @ named['kernel_0'] + named['bias_0']) if hidden else shared
      self.assertAllClose(layer(inputs), h @ named[f'kernel_{len(hidden)}'], rtol=1e-5, atol=1e-5)

  def test_logit_of_a_product_of_probabilities(self):
    a, b = np.meshgrid(np.linspace(-6, 6, 13), np.linspace(-6, 6, 13))
    found = logit_of_product(tf.constant(a, tf.float32), tf.constant(b, tf.float32))
    self.assertAllClose(tf.sigmoid(found), sigmoid(a) * sigmoid(b), rtol=1e-5)
    far = tf.constant([-80.0, 80.0])
    with tf.GradientTape() as tape:
      tape.watch(far)
      logit = logit_of_product(far, tf.constant([-80.0, 80.0]))
    self.assertAllClose(logit, [-160, 80], atol=1)
    self.assertAllEqual(tf.math.is_finite(tape.gradient(logit, far)), [True, True])


class TaskModelTest(tf.test.TestCase, parameterized.TestCase):
  def test_each_task_has_its_logit_and_a_conversion_wants_a_click(self):
    model = build(make_config(TASKS | SHARED))
    rng = np.random.default_rng(1)
    for v in model.variables:
      v.assign(rng.normal(scale=0.5, size=v.shape))
    self.assertEqual(model.needs, {'linear', 'totals', 'factors'})

    def normal(*shape):
      return tf.constant(rng.normal(size=(7, *shape)), tf.float32)

    inputs = LayerInputs(
      normal(3), [normal(3, 4)], [normal(4)], normal(), None, None, None, normal(2)
    )
    terms = sum(layer(inputs) for layer in model.interactions)
    shared = model.shared(inputs)
    (bias,) = (v for v in model.variables if v.name == 'bias:0')
    own = [
      terms + model.of_tasks[t][0](inputs._replace(shared=shared[t])) + bias[t] for t in (0, 1)
    ]
    found = model.probability(model(inputs)).numpy()
    self.assertAllClose(found[:, 0], sigmoid(own[0])[:, 0], rtol=1e-5)
    self.assertAllClose(found[:, 1], (sigmoid(own[0]) * sigmoid(own[1]))[:, 0], rtol=1e-5)

  def test_labels_that_come_late_do_not_train_what_they_are_given(self):
    labels = [{'name': 'click'}, {'name': 'conversion', 'loss': 'fake_negative'}]
    step = TrainStep(make_config(TASKS | SHARED | KEEP | {'data.labels': labels}), SingleProcess())
    batch = make_batch(np.random.default_rng(6), 30, tasks=2)
    blank = np.full(30, np.nan, np.float32)
    staged = step.stage(batch._replace(label=np.stack([blank, batch.label[:, 1]], 1)))
    rows = step.store.pull(staged.deduped.unique, True)
    gradients = step.dense.gradients(*staged, rows, tf.zeros([2], tf.int64))
    found = {
      v.name: np.abs(g).max() for v, g in zip(step.dense.trainable, map(np.array, gradients.dense))
    }
    towers = [v.name for v in step.dense.model.of_tasks[0][0].trainable_variables]
    self.assertNotEmpty(towers)
    for name in towers:
      self.assertEqual(found[name], 0)
    for v in step.dense.model.of_tasks[1][0].trainable_variables:
      self.assertGreater(found[v.name], 0)

  def test_gradients_by_finite_differences(self):
    cfg = make_config(TASKS | SHARED | KEEP | {'sparse.tables.default.init_scale': 0.3})
    step = TrainStep(cfg, SingleProcess())
    rng = np.random.default_rng(2)
    for v in step.dense.trainable:
      v.assign(rng.normal(scale=0.3, size=v.shape))
    batch, deduped = step.stage(make_batch(rng, 12, tasks=2))
    rows = step.store.pull(deduped.unique, True)
    position = tf.zeros([2], tf.int64)

    def loss(rows=rows):
      return step.dense.gradients(batch, deduped, rows, position).loss

    found = step.dense.gradients(batch, deduped, rows, position)
    direction = tf.constant(rng.normal(size=rows.factors.shape), tf.float32)
    ends = [loss(rows._replace(factors=rows.factors + e * direction)) for e in (1e-2, -1e-2)]
    self.assertAllClose(
      tf.reduce_sum(direction * found.factors), (ends[0] - ends[1]) / 2e-2, rtol=2e-2, atol=2e-2
    )
    for variable, gradient in zip(step.dense.trainable, found.dense):
      direction = tf.constant(rng.normal(size=variable.shape), tf.float32)
      variable.assign_add(1e-2 * direction)
      up = loss()
      variable.assign_sub(2e-2 * direction)
      down = loss()
      variable.assign_add(1e-2 * direction)
      self.assertAllClose(
        tf.reduce_sum(direction * gradient), (up - down) / 2e-2, rtol=2e-2, atol=2e-2
      )

  def test_a_blank_label_brings_no_loss_and_each_task_has_its_own_mean(self):
    step = TrainStep(make_config(TASKS | SHARED | KEEP), SingleProcess())
    batch = make_batch(np.random.default_rng(3), 40, tasks=2)
    self.assertTrue(np.isnan(batch.label[:, 1]).any())
    staged = step.stage(batch)
    deduped, rows = staged.deduped, step.store.pull(staged.deduped.unique, True)
    p = step.dense.predict(staged.batch, deduped, rows).numpy().astype(np.float64)
    counts = train(step, batch)
    wanted = 0
    for t, task_weight in enumerate([1, 0.7]):
      known = ~np.isnan(batch.label[:, t])
      y, w = batch.label[known, t], batch.weight[known]
      losses = -np.log(np.where(y > 0, p[known, t], 1 - p[known, t]))
      wanted += task_weight * np.sum(w * losses) / np.sum(w)
    self.assertAllClose(counts.loss / counts.weight, wanted, rtol=1e-5)
    # A step in which nobody has a label of a task, and one without samples, leave all finite.
    train(step, batch._replace(label=np.full_like(batch.label, np.nan)))
    train(step, empty_batch(2, 2))
    for value in step.dense_state().values():
      self.assertAllEqual(np.isfinite(value), np.ones_like(value, bool))

  def test_shows_and_clicks_of_the_lifecycle(self):
    step = TrainStep(make_config(TASKS | SHARED | KEEP), SingleProcess())
    batch = make_batch(np.random.default_rng(4), 30, tasks=2, single=True)
    train(step, batch)
    clicks = np.nansum(batch.label * [0.25, 0.75], 1)
    for key, row in rows_of(step.store.export_state()).items():
      samples = np.flatnonzero(batch.keys == key) // 3
      self.assertAllClose([row.show, row.click], [len(samples), clicks[samples].sum()])

  def test_metrics_by_task(self):
    cfg = make_config(TASKS | SHARED)
    rng, metrics = np.random.default_rng(5), MetricSums(cfg.kinds_of_labels)
    labels = (rng.random([500, 2]) < 0.3).astype(np.float32)
    weights = np.ones([500, 2], np.float32)
    weights[rng.random(500) < 0.5, 1] = 0
    predictions = rng.uniform(0.01, 0.99, [500, 2]).astype(np.float32)
    metrics.update(*map(tf.constant, (labels, predictions, weights)))
    found = result(metrics.state())
    self.assertEqual(list(found['tasks']), ['click', 'conversion'])
    self.assertEqual((found['auc'], found['examples']), (found['tasks']['click']['auc'], 500))
    for t, of_task in enumerate(found['tasks'].values()):
      some = weights[:, t] > 0
      y, p = labels[some, t], predictions[some, t]
      self.assertAllClose(of_task['auc'], roc_auc_score(y, p), atol=1e-3)
      self.assertAllClose(of_task['logloss'], log_loss(y, p), atol=1e-6)
      self.assertAllClose(of_task['calibration'], p.sum() / y.sum(), rtol=1e-5)


class OneLabelTest(tf.test.TestCase):
  def test_its_step_has_the_operations_that_one_label_needs_and_no_more(self):
    cfg = make_config(KEEP)
    step = TrainStep(cfg, SingleProcess())
    dense, loss_of = step.dense, per_sample_loss(cfg.model)
    batch, deduped = step.stage(make_batch(np.random.default_rng(7), 12))
    rows = step.store.pull(deduped.unique, True)
    position = tf.zeros([2], tf.int64)

    def plain(batch, deduped, rows, position):
      """What a step was before there were several tasks."""
      weight = tf.reduce_sum(batch.weight)
      with tf.GradientTape() as tape:
        tape.watch([rows.linear, rows.factors])
        inputs = dense.embedding.embed(batch, deduped, rows)._replace(position=position)
        logits = dense.model(inputs, training=True)
        loss = tf.reduce_sum(batch.weight * loss_of(batch.label, logits))
      found = tape.gradient(
        loss, [*dense.trainable, rows.linear, rows.factors], unconnected_gradients='zero'
      )
      dense.metrics.update(batch.label, dense.model.probability(logits), batch.weight)
      finite = tf.math.is_finite(tf.add_n([tf.reduce_sum(g) for g in found]))
      return tf.where(finite, loss, np.nan), weight, found

    def operations(function):
      graph = tf.function(function, autograph=False).get_concrete_function(
        batch, deduped, rows, position
      )
      counts = collections.Counter(op.type for op in graph.graph.get_operations())
      return collections.Counter(
        {k: n for k, n in counts.items() if k not in ('Const', 'Identity', 'NoOp')}
      )

    # Rows and layers are differentiated apart: no gradient of what pooling divides by is summed,
    # and what is summed on either device is added.
    self.assertEqual(operations(dense.gradients) - operations(plain), {'AddV2': 2})


class PassTest(tf.test.TestCase):
  """From a file to predictions."""

  def config(self, **changes):
    slots = [{'name': 'user'}, {'name': 'item'}, {'name': 'tag'}]
    labels = [
      {'name': 'click'},
      {'name': 'conversion', 'column': 'bought', 'positive': 'yes.*'},
    ]
    return make_config(
      TASKS
      | SHARED
      | KEEP
      | {'data.slots': slots, 'data.labels': labels, 'data.group': 'user'}
      | changes
    )

  def prepared(self, cfg, lines):
    path = os.path.join(self.enter_context(tempfile.TemporaryDirectory()), 'log.csv')
    with open(path, 'w', encoding='utf-8') as f:
      f.write('\n'.join(['user,item,tag,x,y,click,bought', *lines]) + '\n')
    prepare_pass(cfg, path, path + '.prepared')
    return PreparedPass(path + '.prepared', cfg)

  def lines(self, n, seed=0):
    rng = np.random.default_rng(seed)
    return [
      f'u{rng.integers(5)},i{rng.integers(9)},t{rng.integers(4)},{rng.normal():.3f},1,'
      f'{int(rng.random() < 0.5)},{["", "yes!", "no"][rng.integers(3)]}'
      for _ in range(n)
    ]

  def test_labels_with_blanks(self):
    lines = ['a,b,c,1,1,1,yes', 'a,b,c,1,1,0,', 'a,b,c,1,1, ,yesterday', 'a,b,c,1,1,1,no']
    (batch,) = self.prepared(self.config(), lines).batches(9)
    self.assertAllEqual(batch.label, [[1, 1], [0, np.nan], [np.nan, 1], [1, 0]])
    with self.assertRaisesRegex(
      UserError, "column 'click': found '2'; wanted 0 or 1, or blank; data.labels.0.positive says"
    ):
      self.prepared(self.config(), ['a,b,c,1,1,2,yes'])

  def test_a_pass_of_other_labels_is_refused(self):
    one = self.prepared(self.config(), self.lines(3))
    other = self.config(
      **{
        'data.labels': [{'name': 'click'}, {'name': 'conversion2'}],
        'model.tasks': {'click': {}, 'conversion2': {}},
      }
    )
    with self.assertRaisesRegex(UserError, "prepared for another schema: its 'label'"):
      PreparedPass(one.path, other)

  def test_deciles_are_of_the_first_task_or_of_none(self):
    labels = [{'name': 'amount', 'column': 'click', 'loss': 'squared_error'}, {'name': 'click'}]
    for of_first, ordered in ((False, labels), (True, labels[::-1])):
      cfg = self.config(
        **{'data.labels': ordered, 'model.tasks': {one['name']: {} for one in ordered}}
      )
      inputs = Inputs(cfg, SingleProcess(), TrainStep(cfg, SingleProcess()), lambda: None, '')
      values = dict(Evaluation(cfg, inputs).figures([self.prepared(cfg, self.lines(50))]))
      self.assertEqual('deciles' in values, of_first)
      self.assertEqual('auc' in values, of_first)

  def test_gauc_of_each_task_leaves_blanks_out(self):
    group = np.array([1, 1, 1, 1])
    label, weight = np.array([1, 0, 0, 0.0]), np.array([1, 1, 0, 0.0])
    columns = [(group, label, np.array([0.6, 0.3, 0.9, 0.9]), weight)]
    self.assertEqual(group_auc(columns, SingleProcess()), 1.0)

  def test_saved_model_gives_each_task_by_name(self):
    example = os.path.join(os.path.dirname(__file__), '..', '..', '..', 'examples', 'own_tower')
    sys.path.insert(0, example)
    self.addCleanup(sys.path.remove, example)
    own = {'interactions': ['gated_tower.GatedTower'], 'given': 'click'}
    cfg = self.config(**{'model.tasks': TASKS['model.tasks'] | {'conversion': own}})
    step = TrainStep(cfg, SingleProcess())
    for batch in self.prepared(cfg, self.lines(300)).batches(50):
      train(step, batch)
    lines = self.lines(20, seed=1)
    (batch,) = self.prepared(cfg, lines).batches(50)
    wanted = step.predict(step.stage(batch))
    self.assertEqual(wanted.shape, (20, 2))
    path = self.enter_context(tempfile.TemporaryDirectory())
    keys = step.store.select('all').numpy()
    rows = step.store.pull(keys, train=False)
    rows = Rows(keys, rows.linear.numpy(), np.diff(rows.offsets), rows.factors.numpy())
    dense = step.dense
    saved_model.Serving(cfg, dense.model, dense.embedding.stats, (), rows).save(path)
    columns = list(zip(*(line.split(',') for line in lines)))
    given = {n: tf.constant(c) for n, c in zip(('user', 'item', 'tag'), columns)}
    given |= {n: tf.constant(np.array(c, np.float32)) for n, c in zip('xy', columns[3:5])}
    found = tf.saved_model.load(path).signatures['serving_default'](**given)
    self.assertEqual(set(found), {'click', 'conversion'})
    names = ('user', 'item', 'tag', 'x', 'y')
    scored = scores(step, cfg, {n: list(c) for n, c in zip(names, columns)}, len(lines))
    for t, name in enumerate(('click', 'conversion')):
      self.assertAllClose(found[name], wanted[:, t], rtol=0, atol=1e-6)
      self.assertAllClose(scored[name], wanted[:, t], rtol=0, atol=1e-6)


class MistakesTest(tf.test.TestCase):
  def test_one_line_each(self):
    cases = [
      ({'data.labels': []}, 'model.shared.: is for several tasks; wanted data.labels'),
      ({'data.labels': [{'name': 'click'}]}, 'wanted at least two, or the one as data.label'),
      (
        {'data.labels': [{'name': 'click', 'click': 1}, {'name': 'conversion', 'click': 0.5}]},
        r'found click \[1.0, 0.5\]; wanted shares that sum to at most 1',
      ),
      ({'data.label': 'x'}, 'found beside the keys of data.label'),
      (
        {'data.labels': [{'name': 'click'}, {'name': 'a b'}]},
        "found the name 'a b'; wanted letters, digits and underscores alone",
      ),
      (
        {'model.tasks': {'click': {}, 'conversio': {}}},
        "'model.tasks.conversio': is no name of data.labels; the nearest .* 'conversion'",
      ),
      ({'model.tasks': {'click': {}}}, "model.tasks': has no 'conversion'"),
      (
        {'model.tasks': {'click': {'given': 'conversion'}, 'conversion': {'given': 'click'}}},
        "model.tasks.conversion.given': found a cycle, click → conversion → click; wanted one of",
      ),
      (
        {'model.tasks': {'click': {'given': 'conversion'}, 'conversion': {'given': 'conversion'}}},
        "model.tasks.conversion.given': found a cycle, conversion → conversion; wanted one of",
      ),
      (
        {'model.tasks': {'click': {'given': 'conversio'}, 'conversion': {}}},
        "click.given': found 'conversio'; wanted another task; the nearest .* 'conversion'",
      ),
      ({'model.shared': None}, "found 'tower', which reads model.shared"),
      ({'model.shared': 'mmo'}, "unknown layer 'mmo'; the nearest valid name is 'mmoe'"),
      ({'model.negative_sampling_rate': 0.5}, 'data.labels has several; wanted 1'),
      ({'model.loss': 'focal'}, 'wanted the key loss of each of data.labels'),
    ]
    for changes, wanted in cases:
      with self.subTest(wanted), self.assertRaisesRegex(UserError, wanted):
        make_config(TASKS | SHARED | changes)
    for shared, wanted in (
      ({'mmoe': {'expert': 3}}, "model.shared: unknown argument 'expert' of 'mmoe'"),
      ({'mmoe': {'experts': 0}}, 'experts: found 0; wanted a whole number >= 1'),
      ({'shared_bottom': {'hidden': []}}, r'hidden: found \[\]; wanted a list of whole numbers'),
    ):
      with self.subTest(wanted), self.assertRaisesRegex(UserError, wanted):
        build(make_config(TASKS | {'model.shared': shared}))


if __name__ == '__main__':
  tf.test.main()
