"""Histories: kept in order, read against the candidate as NumPy does it, and served."""

import os
import tempfile

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from ops.dedupe import dedupe
from ops.pooling import histories
from ops.row_store import PulledRows
from tests.support.batches import make_batch
from tests.support.steps import HISTORY, HISTORY_IDS, make_config, scores, train
from trainer.comm.communicator import SingleProcess
from trainer.data.conversion import prepare_pass
from trainer.data.features import empty_batch
from trainer.data.prepared import PreparedPass
from trainer.embedding.layer_inputs import HistoryVectors, LayerInputs
from trainer.errors import UserError
from trainer.model.layers.din import DIN
from trainer.storage import saved_model
from trainer.storage.chain import Rows
from trainer.training.step import TrainStep

KEEP = {'lifecycle': {'admission': 'none', 'eviction': 'none'}}
COUNT = {'lifecycle': {'admission': 'count', 'admission_count': 3.0, 'eviction': 'none'}}


def features_of(batch, slot):
  """The keys of one slot, a list for each sample."""
  found = [[] for _ in batch.label]
  for key, segment in zip(batch.keys, batch.segments):
    if segment % 3 == slot:
      found[segment // 3].append(key)
  return found


class EmbeddingTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.parameters(KEEP, COUNT)
  def test_features_stand_in_order_and_those_without_factors_are_masked(self, **lifecycle):
    tables = {'default': {'width': 4, 'init_scale': 0.3}, 'other': {'width': 3}}
    slots = [
      dict(s, table='other' if s['name'] == 'b' else 'default') for s in HISTORY['data.slots']
    ]
    # Slots stand by table: a, c, b.
    cfg = make_config(HISTORY | lifecycle | {'sparse.tables': tables, 'data.slots': slots})
    step = TrainStep(cfg, SingleProcess())
    batch = make_batch(np.random.default_rng(0), 30, ids=(1, 1, 2))
    train(step, batch)
    staged = step.stage(batch)
    keys = staged.deduped.unique.numpy()
    rows = step.store.pull(keys, False)
    inputs = step.dense.embedding.embed(staged.batch, staged.deduped, rows)
    history = inputs.histories['c']
    parts = np.split(rows.factors.numpy(), rows.offsets.numpy()[1:-1])
    factors = dict(zip(keys.tolist(), parts))
    expected = features_of(batch, 1)
    self.assertEqual(history.mask.shape, [30, max(map(len, expected))])
    for b, features in enumerate(expected):
      has = [len(factors[key]) > 0 for key in features]
      self.assertAllEqual(history.mask[b, : len(has)], has)
      self.assertFalse(np.any(history.mask[b, len(has) :]))
      for l, key in enumerate(features):
        wanted = factors[key] if has[l] else np.zeros(4)
        self.assertAllClose(history.vectors[b, l], wanted)
      self.assertAllEqual(
        history.vectors[b, len(has) :], np.zeros_like(history.vectors[b, len(has) :])
      )
    self.assertAllEqual(history.candidate, inputs.factors[0][:, 0])

  def test_the_mean_or_sum_of_a_list_of_another_slots_features(self):
    slots = [{k: v for k, v in s.items() if k != 'sequence'} for s in HISTORY['data.slots']]
    for slots, lists in ((HISTORY['data.slots'], 'mean'), (slots, 'mean'), (slots, 'sum')):
      given = {'model.interactions': ['linear', 'fm'], 'data.slots': slots}
      cfg = make_config(HISTORY | KEEP | given | {'sparse.shared_lists': lists})
      step = TrainStep(cfg, SingleProcess())
      batch = make_batch(np.random.default_rng(0), 30, ids=HISTORY_IDS)
      train(step, batch)
      staged = step.stage(batch)
      rows = step.store.pull(staged.deduped.unique, False)
      inputs = step.dense.embedding.embed(*staged, rows)
      linear = rows.linear.numpy()[staged.deduped.inverse.numpy()]
      factors = rows.factors.numpy().reshape(-1, 4)[staged.deduped.inverse.numpy()]
      for b in range(30):
        mine = batch.segments // 3 == b
        lengths = np.bincount(batch.segments[mine] % 3, minlength=3)
        divisors = np.array([1, 1, max(lengths[2], 1) if lists == 'mean' else 1])
        x = batch.values[mine] / divisors[batch.segments[mine] % 3]
        vectors = factors[mine] * x[:, None]
        for f in range(3):
          own = batch.segments[mine] % 3 == f
          self.assertAllClose(inputs.linear[b, f], (linear[mine] * x)[own].sum())
        self.assertAllClose(inputs.totals[0][b], vectors.sum(0), atol=1e-5)
        self.assertAllClose(inputs.squares[b], (vectors**2).sum(), atol=1e-5)

  def test_one_feature_in_each_slot_and_no_samples(self):
    step = TrainStep(make_config(HISTORY | KEEP), SingleProcess())
    batch = make_batch(np.random.default_rng(0), 7, single=True, ids=HISTORY_IDS)
    train(step, batch)
    train(step, empty_batch(2))
    for some, length in ((batch, 1), (empty_batch(2), 0)):
      staged = step.stage(some)
      rows = step.store.pull(staged.deduped.unique, False)
      history = step.dense.embedding.embed(*staged, rows).histories['c']
      self.assertAllEqual(history.mask, np.ones([len(some.label), length], bool))
    self.assertEqual(step.predict(step.stage(empty_batch(2))).shape, (0,))

  def test_samples_without_features_have_empty_histories(self):
    none, nothing = np.zeros([0], np.int32), dedupe(np.zeros([0], np.int64), [1.0], [1.0])
    rows = PulledRows(nothing.unique, tf.zeros([1], tf.int32), tf.zeros([0]), tf.zeros([0]))
    vectors, mask = histories(rows, nothing, none, 1000, slots=3, slot=1, width=4)
    self.assertEqual((vectors.shape, mask.shape), ((1000, 0, 4), (1000, 0)))
    no_offsets = rows._replace(offsets=none)
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, r'offsets: found shape \[0\]'):
      histories(no_offsets, nothing, none, 1000, slots=3, slot=1, width=4)


class DINTest(tf.test.TestCase):
  def test_equals_a_loop_over_the_history(self):
    rng = np.random.default_rng(1)
    lengths = [0, 1, 4, 2]
    vectors, mask = np.zeros([4, 4, 3]), np.zeros([4, 4], bool)
    for b, n in enumerate(lengths):
      vectors[b, :n], mask[b, :n] = rng.normal(size=(n, 3)), True
    mask[2, 1], vectors[2, 1] = False, 0  # a feature without factors
    candidate, sums, dense = (rng.normal(size=s) for s in ((4, 3), (4, 2, 3), (4, 2)))
    f32 = [tf.constant(a, tf.float32) for a in (vectors, candidate, sums, dense)]
    history = HistoryVectors(f32[0], tf.constant(mask), f32[1])
    inputs = LayerInputs(
      None, [f32[2]], [], None, None, None, None, f32[3], histories={'c': history}
    )
    layer = DIN(attention=5, hidden=[6], activation='tanh')
    layer.build(tf.nest.map_structure(lambda t: None if t is None else t.shape, inputs))
    for v in layer.variables:
      v.assign(rng.normal(scale=0.5, size=v.shape))
    w = {v.name.split(':')[0]: v.numpy().astype(np.float64) for v in layer.variables}
    for b in range(4):
      c, interest = candidate[b], np.zeros(3)
      for v in vectors[b][mask[b]]:
        hidden = np.concatenate([v, c, v - c, v * c]) @ w['unit_0_kernel'] + w['unit_0_bias']
        score = np.maximum(hidden, 0) @ w['unit_0_out'] + w['unit_0_out_bias']
        interest += score * v
      x = np.concatenate([sums[b].ravel(), dense[b], interest])
      wanted = np.tanh(x @ w['kernel_0'] + w['bias_0']) @ w['kernel_1']
      self.assertAllClose(layer(inputs)[b], wanted, rtol=1e-4, atol=1e-5)

  def test_gradients_by_finite_differences(self):
    changes = {'sparse.tables.default.init_scale': 0.3}
    din = {'din': {'attention': 5, 'hidden': [6], 'activation': 'tanh'}}
    cfg = make_config(HISTORY | KEEP | changes | {'model.interactions': ['linear', din]})
    step = TrainStep(cfg, SingleProcess())
    rng = np.random.default_rng(2)
    for v in step.dense.trainable:
      v.assign(rng.normal(scale=0.3, size=v.shape))
    batch, deduped = step.stage(make_batch(rng, 12, ids=HISTORY_IDS))
    rows = step.store.pull(deduped.unique, True)
    position = tf.zeros([2], tf.int64)

    def loss(rows=rows):
      return step.dense.gradients(batch, deduped, rows, position).loss

    found = step.dense.gradients(batch, deduped, rows, position)
    direction = tf.constant(rng.normal(size=rows.factors.shape), tf.float32)
    ends = [loss(rows._replace(factors=rows.factors + e * direction)) for e in (3e-3, -3e-3)]
    slope = tf.reduce_sum(direction * found.factors)
    self.assertAllClose(slope, (ends[0] - ends[1]) / 6e-3, rtol=3e-2, atol=3e-2)
    for variable, gradient in zip(step.dense.trainable, found.dense):
      direction = tf.constant(rng.normal(size=variable.shape), tf.float32)
      variable.assign_add(3e-3 * direction)
      up = loss()
      variable.assign_sub(6e-3 * direction)
      down = loss()
      variable.assign_add(3e-3 * direction)
      slope = tf.reduce_sum(direction * gradient)
      self.assertAllClose(slope, (up - down) / 6e-3, rtol=3e-2, atol=3e-2)


class PassTest(tf.test.TestCase):
  """From a file to predictions."""

  def setUp(self):
    super().setUp()
    slots = [
      {'name': 'item'},
      {'name': 'user'},
      {'name': 'history', 'separator': '|', 'shares': 'item', 'sequence': {'max_length': 3}},
    ]
    changes = {'data.slots': slots, 'data.dense': []}
    changes['model.interactions'] = ['fm', *HISTORY['model.interactions']]
    self.cfg = make_config(HISTORY | COUNT | changes)

  def prepared(self, lines):
    path = os.path.join(self.enter_context(tempfile.TemporaryDirectory()), 'log.csv')
    with open(path, 'w', encoding='utf-8') as f:
      f.write('\n'.join(['item,user,history,label', *lines]) + '\n')
    prepare_pass(self.cfg, path, path + '.prepared')
    return PreparedPass(path + '.prepared', self.cfg)

  def lines(self, n, seed=0):
    rng = np.random.default_rng(seed)
    return [
      f'i{rng.integers(9)},u{rng.integers(5)},'
      f'{"|".join(f"i{i}" for i in rng.integers(0, 12, rng.integers(0, 6)))},{rng.integers(2)}'
      for _ in range(n)
    ]

  def test_the_last_features_of_a_history_are_kept_in_order(self):
    (batch,) = self.prepared(['i4,u,i1|i2|i3|i4,1', 'i3,u,,0', 'i2,u,i3,0']).batches(9)
    keys = dict(zip(('i4', 'i3', 'i2'), (features_of(batch, 0)[b][0] for b in range(3))))
    wanted = [[keys[n] for n in names] for names in (('i2', 'i3', 'i4'), (), ('i3',))]
    self.assertEqual(features_of(batch, 2), wanted)

  def test_saved_model(self):
    step = TrainStep(self.cfg, SingleProcess())
    for batch in self.prepared(self.lines(300)).batches(50):
      train(step, batch)
    lines = self.lines(40, seed=1)
    (batch,) = self.prepared(lines).batches(50)
    wanted = step.predict(step.stage(batch))
    self.assertGreater(np.std(wanted), 1e-3)
    path = self.enter_context(tempfile.TemporaryDirectory())
    keys = step.store.select('all').numpy()
    rows = step.store.pull(keys, train=False)
    rows = Rows(keys, rows.linear.numpy(), np.diff(rows.offsets), rows.factors.numpy())
    dense = step.dense
    saved_model.Serving(self.cfg, dense.model, dense.embedding.stats, (), rows).save(path)
    columns = list(zip(*(line.split(',') for line in lines)))
    given = {n: tf.constant(c) for n, c in zip(('item', 'user', 'history'), columns)}
    serve = tf.saved_model.load(path).signatures['serving_default']
    self.assertAllClose(serve(**given)['probability'], wanted, rtol=0, atol=1e-6)
    given_lists = {n: list(c) for n, c in zip(('item', 'user', 'history'), columns)}
    scored = scores(step, self.cfg, given_lists, len(lines))
    self.assertAllClose(scored['probability'], wanted, rtol=0, atol=1e-6)
    self.assertEqual(serve(**{n: c[:0] for n, c in given.items()})['probability'].shape, [0])
    # One user and his history, and many items.
    one = given | {n: given[n][:1] for n in ('user', 'history')}
    same = given | {n: tf.repeat(given[n][:1], 40) for n in ('user', 'history')}
    self.assertAllClose(serve(**one)['probability'], serve(**same)['probability'], atol=1e-7)


class MistakesTest(tf.test.TestCase):
  def test_one_line_each(self):
    history = HISTORY['data.slots'][2]
    cases = [
      (dict(history, shares=None), "data.slots.2.shares': found null; a sequence needs the slot"),
      (dict(history, value_separator=':'), 'a sequence has no values; wanted null'),
      (dict(history, sequence={'max_length': 0}), 'max_length.: found 0'),
      (dict(history, sequence=None), "found 'din', which reads histories; wanted a slot with"),
    ]
    for slot, wanted in cases:
      with self.subTest(wanted), self.assertRaisesRegex(UserError, wanted):
        make_config(HISTORY | {'data.slots': [*HISTORY['data.slots'][:2], slot]})


if __name__ == '__main__':
  tf.test.main()
