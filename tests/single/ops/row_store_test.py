"""The row store against a store in Python dicts, and the exchange between ranks against the direct
path.
"""

import dataclasses
import os

os.environ.setdefault('TF_USE_LEGACY_KERAS', '1')

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from ops import library, packing, pooling, row_optimizers, row_store, sharding
from ops.dedupe import dedupe
from ops.policy import Policy
from ops.row_store import FactorPart, RowStore, TableSpec
from tests.support import commands, row_oracle
from tests.support.row_oracle import Optimizer

SLOT_TABLE = [-1, 0, 0, 1]
SEED = 11


def make_tables(linear='adagrad', factors='adagrad'):
  return [
    TableSpec('user', [FactorPart('plain', 5)], 0.1, linear, factors),
    TableSpec('item', [FactorPart('plain', 3), FactorPart('field', 9)], 0.2, 'sgd', factors),
  ]


def make_keys(rng, n, vocabulary=60):
  return (rng.integers(1, 4, n).astype(np.int64) << 52) + rng.integers(0, vocabulary, n) * 1000003


def score_policy(threshold=1.0, **args):
  return Policy(admission='score', admission_threshold=threshold, **args)


def random_push(rng, keys, offsets):
  """shows, clicks, linear gradient, factor gradients (flat), scale."""
  shows = rng.integers(1, 4, len(keys)).astype(np.float32)
  return (
    shows,
    np.minimum(shows, rng.integers(0, 2, len(keys))).astype(np.float32),
    rng.normal(size=len(keys)).astype(np.float32),
    rng.normal(size=offsets[-1]).astype(np.float32),
    rng.uniform(0.5, 1, len(keys)).astype(np.float32),
  )


def nearest(rows):
  """What bfloat16 can say that is nearest, float32."""
  return tf.cast(tf.cast(rows, tf.bfloat16), tf.float32).numpy()


def split(flat, offsets):
  return [flat[a:b] for a, b in zip(offsets[:-1], offsets[1:])]


def contents(store):
  """key -> everything that is kept, from an export."""
  rows = {}
  for chunk in store.export_state():
    left = {t.name: 0 for t in store.tables}
    for i, key in enumerate(chunk['key']):
      table = store.tables[store.slot_table[key >> 52]].name
      factors = ()
      if chunk['admitted'][i]:
        factors = tuple(chunk[f'factors_{table}'][left[table]])
        left[table] += 1
      columns = tuple(
        chunk[c][i].item()
        for c in (
          'show',
          'click',
          'delta_score',
          'unseen_days',
          'age_days',
          'slot',
          'admitted',
          'last_step',
        )
      )
      rows[int(key)] = (*columns, tuple(chunk['linear'][i]), factors)
    for t in store.tables:
      assert left[t.name] == len(chunk[f'factors_{t.name}'])
  return rows


class RowStoreTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.product(
    factors=list(row_optimizers.ROW_OPTIMIZERS), threshold=[1.0, None], grouped=[True, False]
  )
  def test_equals_store_in_dicts(self, factors, threshold, grouped):
    rng = np.random.default_rng(1)
    tables = make_tables('ftrl', factors)
    linear = Optimizer('ftrl', l1=0.01, l2=0.1)
    optimizers = [
      (linear, Optimizer(factors, l2=0.05, l2_mode='catch_up')),
      (Optimizer('sgd', clip=0.5), Optimizer(factors, learning_rate=0.02)),
    ]
    policy = Policy(admission='none') if threshold is None else score_policy(threshold)
    store = RowStore(policy, tables=tables, slot_table=SLOT_TABLE, seed=SEED)
    oracle = row_oracle.Store(tables, optimizers, SLOT_TABLE, SEED, threshold)
    hyper = row_optimizers.hyper(optimizers)
    for step in range(1, 31):
      keys = np.unique(make_keys(rng, 50))
      keys = dedupe(keys).unique.numpy() if grouped else rng.permutation(keys)
      train = step % 5 != 0
      rows = store.pull(keys, train)
      wanted_linear, wanted_factors = oracle.pull(keys, train)
      self.assertAllClose(
        rows.linear, wanted_linear, rtol=5e-4, atol=2e-5
      )  # float32 against float64 over missed steps too
      offsets = rows.offsets.numpy()
      self.assertAllEqual(np.diff(offsets), [0 if f is None else len(f) for f in wanted_factors])
      self.assertAllClose(
        rows.factors,
        np.concatenate([[]] + [f for f in wanted_factors if f is not None]),
        rtol=5e-4,
        atol=2e-5,
      )
      self.assertAllEqual(rows.ids >= 0, store.lookup(keys)['exists'])
      if not train:
        continue
      shows, clicks, linear_grad, factors_grad, scale = random_push(rng, keys, offsets)
      store.push(keys, rows, shows, clicks, linear_grad, factors_grad, scale, hyper, step)
      oracle.push(
        keys,
        np.diff(offsets) > 0,
        shows,
        clicks,
        linear_grad.astype(np.float64),
        split(factors_grad.astype(np.float64), offsets),
        scale.astype(np.float64),
        step,
      )
    self.assertEqual(store.size(), len(oracle.rows))
    keys = np.array(list(oracle.rows))
    found = store.lookup(keys)
    self.assertAllClose(found['show'], [r['show'] for r in oracle.rows.values()])
    self.assertAllEqual(found['admitted'], [r['v'] is not None for r in oracle.rows.values()])
    self.assertBetween(np.mean(found['admitted']), 1.0 if threshold is None else 0.3, 1.0)

  @parameterized.parameters(*row_optimizers.ROW_OPTIMIZERS)
  def test_bfloat16_is_a_float32_step_rounded_by_chance(self, factors):
    """To the bit, against the float32 step on the widened row and NumPy's rounding."""
    rng = np.random.default_rng(5)
    tables = make_tables('ftrl', factors)
    tables[0] = dataclasses.replace(tables[0], dtype='bfloat16')
    store = RowStore(Policy(admission='none'), tables=tables, slot_table=SLOT_TABLE, seed=SEED)
    optimizer = Optimizer(factors, learning_rate=0.02, l1=0.001, l2=0.05)
    hyper = row_optimizers.hyper([(Optimizer('ftrl'), optimizer), (Optimizer('sgd'), Optimizer())])
    width, last = 5, {}
    for step in range(1, 13):
      keys = np.unique(make_keys(rng, 40))
      rows = store.pull(keys)
      offsets = rows.offsets.numpy()
      pushed = random_push(rng, keys, offsets)
      before = {k: row[-1] for k, row in contents(store).items()}
      store.push(keys, rows, *pushed, hyper, step)
      after = {k: row[-1] for k, row in contents(store).items()}
      mine = np.flatnonzero(keys >> 52 < 3)  # of table 0
      # A fresh row is rounded to nearest: its weights, then the state that goes with these.
      initial = nearest(row_store.initial_factors(keys[mine], SEED, width, 0.1))
      old = nearest(row_optimizers.row_init(initial, hyper[0, 1], factors))
      for i, key in enumerate(keys[mine].tolist()):
        if key in before:
          old[i] = row_store.to_float32(np.array(before[key], np.uint16))
        self.assertAllEqual(rows.factors[offsets[mine[i]] : offsets[mine[i] + 1]], old[i, :width])
      gradient = np.stack([split(pushed[3], offsets)[i] for i in mine])
      times = [last.get(k, step) for k in keys[mine].tolist()]
      new = row_optimizers.row_update(
        old, gradient, pushed[4][mine], np.array(times, np.int32), hyper[0, 1], step, factors
      )
      wanted = row_oracle.rounded_by_chance(new.numpy(), keys[mine], SEED, step)
      for i, key in enumerate(keys[mine].tolist()):
        self.assertAllEqual(after[key], wanted[i], f'key {key}, step {step}')
      last |= dict.fromkeys(keys.tolist(), step)

  def one_key(self, policy, **args):
    store = RowStore(policy, tables=make_tables(), slot_table=SLOT_TABLE, seed=SEED, **args)
    return store, np.array([(1 << 52) + 5]), row_optimizers.hyper([(Optimizer(), Optimizer())] * 2)

  def test_push_that_admits_does_not_train_factors(self):
    store, key, hyper = self.one_key(score_policy(1.0))
    rows = store.pull(key)
    self.assertAllEqual(rows.ids, [-1])
    store.push(key, rows, [5.0], [0.0], [1.0], [], [1.0], hyper, 1)
    rows = store.pull(key)
    self.assertAllEqual(rows.offsets, [0, 0])
    self.assertAllClose(rows.linear, [-0.05 / np.sqrt(1.1)])
    store.push(key, rows, [0.0], [1.0], [0.0], [], [1.0], hyper, 2)  # score 0.4 + 1
    rows = store.pull(key)
    self.assertAllClose(rows.factors, row_oracle.initial_factors(key, SEED, 5, 0.1)[0])
    store.push(key, rows, [1.0], [0.0], [0.0], np.ones(5, np.float32), [1.0], hyper, 3)
    self.assertAllClose(store.pull(key).factors, rows.factors - 0.05 / np.sqrt(1.1))

  def test_admission_none_trains_at_once_and_evaluation_reads_zero(self):
    store, key, hyper = self.one_key(Policy(admission='none'))
    self.assertAllEqual(store.pull(key, train=False).offsets, [0, 0])
    rows = store.pull(key, train=True)
    self.assertAllEqual((rows.ids[0], store.size()), (-1, 0))
    initial = row_oracle.initial_factors(key, SEED, 5, 0.1)[0]
    self.assertAllClose(rows.factors, initial)
    store.push(key, rows, [1.0], [0.0], [0.0], np.ones(5, np.float32), [2.0], hyper, 1)
    self.assertAllClose(store.pull(key, train=False).factors, initial - 0.1 / np.sqrt(4.1))

  def test_pull_changes_nothing(self):
    store, key, hyper = self.one_key(score_policy(0.0))
    store.push(key, store.pull(key), [1.0], [1.0], [1.0], [], [1.0], hyper, 1)
    before = contents(store)
    for train in (True, False):
      store.pull(np.concatenate([key, key + np.arange(1, 100)]), train)
    self.assertEqual(contents(store), before)

  def test_repeated_keys_take_their_turns(self):
    store, key, hyper = self.one_key(score_policy(100.0))
    keys = np.repeat(key, 3)
    rows = store.pull(keys)
    self.assertAllEqual(rows.linear, np.zeros(3))
    store.push(keys, rows, [1.0] * 3, [0.0] * 3, [1.0, 2.0, 3.0], [], [1.0], hyper, 1)
    self.assertAllClose(store.lookup(key)['show'], [3.0])
    w, n = 0.0, 0.1
    for g in (1, 2, 3):
      n += g * g
      w -= 0.05 * g / np.sqrt(n)
    self.assertAllClose(store.pull(keys).linear, [w] * 3, rtol=1e-5)

  def test_wrong_ids_are_only_hints(self):
    rng = np.random.default_rng(3)
    keys = np.unique(make_keys(rng, 80))
    stores = [self.one_key(score_policy(0.5))[0] for _ in range(2)]
    hyper = self.one_key(score_policy())[2]
    for step in range(1, 6):
      rows = [s.pull(keys) for s in stores]
      pushed = random_push(np.random.default_rng(step), keys, rows[0].offsets.numpy())
      wrong = rng.permutation(rows[1].ids.numpy()) + np.arange(len(keys)) % 3 * 2**31
      for store, pulled in zip(stores, (rows[0], rows[1]._replace(ids=wrong))):
        store.push(keys, pulled, *pushed[:4], pushed[4], hyper, step)
    self.assertEqual(contents(stores[0]), contents(stores[1]))

  def test_add_merges_differences(self):
    store, key, hyper = self.one_key(score_policy(0.5))
    store.push(key, store.pull(key), [1.0], [1.0], [0.25], [], [1.0], hyper, 1, add=True)
    rows = store.pull(key)
    self.assertAllEqual(rows.linear, [0.25])
    store.push(
      key, rows, [1.0], [0.0], [-0.5], np.arange(5, dtype=np.float32), [1.0], hyper, 2, add=True
    )
    self.assertAllEqual(store.pull(key).linear, [-0.25])
    self.assertAllClose(store.pull(key).factors, rows.factors + np.arange(5))
    rows = store.pull(key)  # then a step, whose state starts here
    store.push(key, rows, [1.0], [0.0], [1.0], np.zeros(5, np.float32), [1.0], hyper, 3)
    self.assertAllClose(store.pull(key).linear, [-0.25 - 0.05 / np.sqrt(1.1)])

  def test_ftrl_goes_on_from_what_was_added(self):
    o = Optimizer('ftrl', l1=0.3, l2=0.2)
    store = RowStore(
      Policy(admission='none'), tables=make_tables('ftrl', 'ftrl'), slot_table=SLOT_TABLE, seed=SEED
    )
    key, hyper = np.array([(1 << 52) + 5]), row_optimizers.hyper([(o, o)] * 2)
    rng = np.random.default_rng(6)
    weights = [np.zeros(1), row_oracle.initial_factors(key, SEED, 5, 0.1)[0]]
    states = [row_oracle.fresh_state(o, w) for w in weights]
    for step in range(1, 40):
      added = step % 3 != 2
      change = [rng.normal(size=w.shape).astype(np.float32) for w in weights]
      if step % 6 == 1:  # to zero, and then a step
        change[1] = -store.pull(key).factors.numpy()
      store.push(key, store.pull(key), [1.0], [0.0], *change, [1.0], hyper, step, add=added)
      for i, (w, state, by) in enumerate(zip(weights, states, change)):
        by = by.astype(np.float64)
        if step % 6 == 1 and i == 1:
          by = -w
        weights[i] = (
          row_oracle.add_row(o, w, state, by)
          if added
          else row_oracle.step_row(o, w, state, by, 1.0, step, 0)
        )
      rows = store.pull(key)
      self.assertAllClose(rows.linear, weights[0], rtol=1e-4, atol=1e-5)
      self.assertAllClose(rows.factors, weights[1], rtol=1e-4, atol=1e-5)

  def test_eviction_frees_rows_for_others(self):
    store, _, hyper = self.one_key(
      score_policy(0.5, decay=1.0, delete_threshold=0.0, delete_after_unseen_days=0)
    )

    def admit(keys, step):
      for _ in range(2):
        rows = store.pull(keys)
        n = len(keys)
        store.push(
          keys,
          rows,
          np.ones(n),
          np.ones(n),
          np.ones(n),
          np.ones(rows.factors.shape),
          [1.0],
          hyper,
          step,
        )

    old, new = (1 << 52) + np.arange(20000), (1 << 52) + np.arange(20000, 40000)
    admit(old, 1)
    held = store.bytes()
    store.age()
    admit(old[:100], 2)
    kept = contents(store)
    evicted = store.evict()
    self.assertAllEqual(np.sort(evicted), old[100:])
    self.assertEqual(contents(store), {k: v for k, v in kept.items() if k < old[100]})
    self.assertAllEqual(store.pull(old[100:]).ids, np.full(19900, -1))
    admit(new[:19900], 3)
    self.assertLessEqual(float(store.bytes()), 1.02 * float(held))
    self.assertAllClose(
      store.pull(new[:19900]).factors[:5],
      row_oracle.initial_factors(new[:1], SEED, 5, 0.1)[0] - 0.05 / np.sqrt(1.1),
    )
    again = store.pull(old[100:101])
    store.push(old[100:101], again, [1.0], [1.0], [0.0], [], [1.0], hyper, 4)  # comes back as new
    self.assertAllEqual(store.pull(old[100:101]).linear, [0.0])

  def test_push_after_eviction_does_not_train_anothers_row(self):
    store, key, hyper = self.one_key(
      score_policy(1.0, decay=1.0, delete_threshold=0.0, delete_after_unseen_days=0)
    )
    store.push(key, store.pull(key), [1.0], [1.0], [0.0], [], [1.0], hyper, 1)
    rows = store.pull(key)
    self.assertAllEqual(rows.offsets, [0, 5])
    store.age()
    store.evict()
    other = key + (np.arange(1, 4000))
    other = other[sharding.shard_of(other) == sharding.shard_of(key)]
    pulled = store.pull(other)
    n = len(other)
    store.push(
      other, pulled, np.ones(n), np.ones(n), np.zeros(n), [], [1.0], hyper, 2
    )  # one of them has the id and the row now
    before = contents(store)
    store.push(key, rows, [1.0], [0.0], [1.0], np.full(5, 9.0), [1.0], hyper, 3)
    after = contents(store)
    self.assertEqual({k: v for k, v in after.items() if k != key[0]}, before)
    self.assertAllEqual(store.pull(key).offsets, [0, 0])

  def fill(self, store, rng, steps=8, vocabulary=300):
    hyper = row_optimizers.hyper([(Optimizer(), Optimizer())] * 2)
    for step in range(1, steps + 1):
      d = dedupe(make_keys(rng, 700, vocabulary))
      rows = store.pull(d.unique)
      _, _, linear_grad, factors_grad, _ = random_push(rng, d.unique.numpy(), rows.offsets.numpy())
      store.push(d.unique, rows, d.shows, d.clicks, linear_grad, factors_grad, [0.7], hyper, step)

  def test_export_and_import_are_lossless(self):
    rng = np.random.default_rng(5)
    store, other = (
      RowStore(
        score_policy(1.0), tables=make_tables('adam', 'ftrl'), slot_table=SLOT_TABLE, seed=SEED
      )
      for _ in range(2)
    )
    self.fill(store, rng)
    self.fill(other, rng)
    wanted = contents(store)
    self.assertBetween(
      sum(bool(r[-1]) for r in wanted.values()), 0.1 * len(wanted), 0.9 * len(wanted)
    )
    other.import_state(store.export_state())
    self.assertEqual(contents(other), wanted)
    # Two halves, as two ranks would have written them.
    other.clear()
    self.assertEqual(other.size(), 0)
    for shards in (range(1000), range(1000, sharding.SHARDS)):
      other.import_state(store.export_state(shards=shards), replace=False)
    self.assertEqual(contents(other), wanted)
    for s in (store, other):
      self.fill(s, np.random.default_rng(6), steps=2)
    self.assertEqual(contents(store), contents(other))

  def test_damaged_import(self):
    store = RowStore(score_policy(1.0), tables=make_tables(), slot_table=SLOT_TABLE, seed=SEED)
    self.fill(store, np.random.default_rng(7), steps=4)
    parts = (range(begin, begin + 512) for begin in range(0, sharding.SHARDS, 512))
    chunks = [next(store.export_state(shards=shards)) for shards in parts]
    other, *_, good = sorted(chunks, key=lambda c: len(c['factors_user']))
    without = {k: v for k, v in good.items() if k != 'linear'}
    for chunk, wanted in (
      (without, 'linear: found nothing'),
      (good | {'linear': good['linear'][:, :1]}, 'linear: found shape'),
      (good | {'factors_user': good['factors_user'][1:]}, r'factors\[0\]: found shape'),
      (good | {'last_step': good['last_step'].astype(np.int64)}, 'last_step: found int64'),
      (good | {'key': good['key'] + (9 << 52)}, 'slot'),
      (good | {'admitted': good['admitted'][1:]}, 'admitted'),
    ):
      with self.assertRaisesRegex(tf.errors.DataLossError, wanted):
        store.import_state([other, chunk])
      self.assertEqual(store.size(), 0)
    store.import_state([good])
    with self.assertRaises(tf.errors.DataLossError):
      store.import_state([good], replace=False)

  def test_linear_weights_only(self):
    tables = [TableSpec('default', [])]
    store = RowStore(Policy(admission='none'), tables=tables, slot_table=[-1, 0], seed=SEED)
    keys = (1 << 52) + np.arange(1000)
    hyper = row_optimizers.hyper([(Optimizer(), Optimizer())])
    for step in (1, 2):
      rows = store.pull(keys)
      self.assertEqual(rows.factors.shape, [0])
      store.push(keys, rows, np.ones(1000), np.zeros(1000), np.ones(1000), [], [1.0], hyper, step)
    other = RowStore(Policy(admission='none'), tables=tables, slot_table=[-1, 0], seed=SEED)
    chunks = list(store.export_state())
    self.assertNotIn('factors_default', chunks[0])
    other.import_state(chunks)
    self.assertAllEqual(other.pull(keys).linear, store.pull(keys).linear)

  def test_memory(self):
    store = RowStore(
      score_policy(2.0),
      tables=[TableSpec('default', [FactorPart('plain', 16)])],
      slot_table=[-1, 0],
      seed=SEED,
    )
    hyper = row_optimizers.hyper([(Optimizer(), Optimizer())])
    n = 400000
    keys = (1 << 52) + np.arange(n)
    ones, empty = np.ones(n, np.float32), tf.zeros([n + 1], tf.int32)

    def push(step):
      store.push(
        keys,
        row_store.PulledRows(tf.fill([n], tf.constant(-1, tf.int64)), empty, None, None),
        ones,
        ones,
        ones,
        [],
        [1.0],
        hyper,
        step,
      )

    push(1)
    self.assertEqual(store.admitted_size(), 0)
    self.assertLessEqual(store.bytes() / n, 96)
    push(2)
    self.assertEqual(store.admitted_size(), n)
    payload = 40 + 4 * (
      2 + 2 + 32
    )  # lifecycle fields; factor row, last step, linear weight and state; factors and state
    self.assertLessEqual(store.bytes() / n, 1.5 * payload)

  def test_memory_in_bfloat16(self):
    """A feature has 40 bytes of the lifecycle, 16 beside them, 34 of 16 factors with one number of
    state and 10 to 11.25 of the index; the rest is chunks and slabs that are not full.
    """
    part = FactorPart('plain', 16)
    store = RowStore(
      score_policy(1.0),
      tables=[TableSpec('default', [part], factors='adagrad_row', dtype='bfloat16')],
      slot_table=[-1, 0],
    )
    hyper, n, worst = row_optimizers.hyper([(Optimizer(), Optimizer('adagrad_row'))]), 50_000, 0
    ones, ids = np.ones(n, np.float32), np.full(n, -1)
    rows = row_store.PulledRows(ids, np.zeros(n + 1, np.int32), None, None)
    for start in range(0, 1_500_000, n):
      keys = (1 << 52) + np.arange(start, start + n)
      store.push(keys, rows, ones, ones, ones, [], [1.0], hyper, 1)
      if start >= 1_000_000:
        worst = max(worst, float(store.bytes() / store.size()))
    self.assertEqual(store.admitted_size(), store.size())
    self.assertLessEqual(worst, 106)

  def test_hostile_input_changes_nothing(self):
    store, key, hyper = self.one_key(score_policy(0.5))
    keys = np.concatenate([key, key + 1])
    store.push(keys, store.pull(keys), [1.0, 1.0], [1.0, 1.0], [1.0, 1.0], [], [1.0], hyper, 1)
    rows = store.pull(keys)
    good = dict(
      keys=keys,
      ids=rows.ids,
      offsets=rows.offsets,
      shows=[1.0, 2.0],
      clicks=[0.0, 1.0],
      linear_grad=[1.0, 2.0],
      factors_grad=np.ones(10),
      scale=[1.0],
      hyper=hyper,
      step=2,
    )
    before = contents(store)
    nan, inf = float('nan'), float('inf')
    bad_hyper = hyper.numpy()
    bad_hyper[0, 1, 0] = nan
    cases = [
      ('keys', -keys, 'keys'),
      ('keys', keys + (3 << 52), 'slot 4'),
      ('keys', keys[:1], 'ids'),
      ('keys', keys[:, None], None),
      ('ids', [0], 'ids'),
      ('offsets', [0, 5], 'offsets'),
      ('offsets', [0, -5, 10], 'offsets'),
      ('offsets', [0, 4, 10], 'offsets'),
      ('offsets', [0, 10, 10], 'offsets'),
      ('offsets', [5, 5, 10], 'offsets'),
      ('offsets', [0, 5, 2**31 - 1], 'offsets'),
      ('shows', [1.0, -1.0], 'shows'),
      ('shows', [nan, 1.0], 'shows'),
      ('shows', [1.0], 'shows'),
      ('clicks', [2.0, 0.0], 'clicks'),
      ('clicks', [inf, 0.0], 'clicks'),
      ('linear_grad', [nan, 0.0], 'linear_grad.0.*of key 4503599627370501'),
      ('factors_grad', [0.0] * 7 + [inf] + [0.0] * 2, 'factors_grad.7.*of key 4503599627370502'),
      ('factors_grad', np.ones(9), 'offsets'),
      ('scale', [nan], 'scale'),
      ('scale', [1.0, inf], 'scale'),
      ('scale', [1.0] * 3, 'scale'),
      ('scale', 1.0, None),
      ('hyper', hyper[:1], 'hyper'),
      ('hyper', bad_hyper, r'hyper\[0, 1\]: learning_rate'),
      ('step', 0, 'step'),
      ('step', 2**31, 'step'),
    ]
    push = library.load().ctr_row_store_push
    for name, value, message in cases:
      error = tf.errors.InvalidArgumentError
      if not np.isfinite(value).all() and name.endswith(('grad', 'scale')):
        error = tf.errors.OutOfRangeError
      with self.assertRaisesRegex(error, message or '', msg=f'{name} {value}'):
        push(store.handle, **{**good, name: value})
      self.assertEqual(contents(store), before)
    push(store.handle, **good)

  def test_hostile_keys_and_handles_are_refused(self):
    store, key, _ = self.one_key(score_policy(0.5))
    for keys in (-key, key + (3 << 52), np.zeros([1, 1], np.int64)):
      with self.assertRaises(tf.errors.InvalidArgumentError):
        store.pull(keys)
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, 'wanted a row store'):
      from ops.feature_lifecycle import FeatureLifecycle

      table = FeatureLifecycle()
      library.load().ctr_row_store_pull(table.handle, [1], train=True)

  def test_hostile_construction(self):
    good = dict(tables=make_tables(), slot_table=SLOT_TABLE)
    for change in (
      dict(slot_table=[2]),
      dict(slot_table=[-2]),
      dict(slot_table=[0] * 3000),
      dict(tables=[TableSpec('a', [FactorPart('plain', -1)])] * 2),
      dict(tables=[TableSpec('a', [], init_scale=float('nan'))] * 2),
      dict(tables=[TableSpec('a', [], linear='adamax')] * 2),
    ):
      with self.assertRaises(tf.errors.InvalidArgumentError, msg=str(change)):
        RowStore(Policy(), **{**good, **change})
    RowStore(Policy(), name='one', **good)
    kept = RowStore(Policy(), name='two', **good)
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, 'store of the same name'):
      RowStore(Policy(), name='two', seed=5, **good)
    self.assertEqual(kept.size(), 0)

  def test_empty_batches(self):
    store, _, hyper = self.one_key(score_policy(0.5))
    d = dedupe(np.zeros([0], np.int64))
    rows = store.pull(d.unique)
    store.push(d.unique, rows, d.shows, d.clicks, [], [], [1.0], hyper, 1)
    self.assertEqual((store.size(), list(store.export_state())), (0, []))

  def test_v1_graph_and_server(self):
    """Two sessions of a tf.distribute.Server see one store on its device;

    gradients flow by tf.gradients.
    """
    server = tf.distribute.Server.create_local_server()
    key = np.array([(1 << 52) + 1])

    def session(fetch):
      with tf.Graph().as_default(), tf.device('/cpu:0'):
        store = RowStore(
          score_policy(0.5), tables=make_tables(), slot_table=SLOT_TABLE, seed=SEED, name='shared'
        )
        keys = tf.compat.v1.placeholder(tf.int64, [None])
        d = dedupe(keys)
        rows = store.pull(d.unique)
        layout = pooling.PoolLayout([0, 0, 1], [t.parts for t in store.tables], totals=True)
        pooled = pooling.pool(rows, d, [1.0], [0], 1, layout)
        grads = tf.gradients(
          tf.reduce_sum(pooled.linear) + tf.reduce_sum(pooled.squares[0][0]),
          [rows.linear, rows.factors],
        )
        hyper = row_optimizers.hyper([(Optimizer(), Optimizer())] * 2, tf.constant(2.0))
        train = store.push(d.unique, rows, d.shows, d.shows, grads[0], grads[1], [1.0], hyper, 1)
        with tf.compat.v1.Session(server.target) as sess:
          return sess.run(train if fetch == 'train' else rows, {keys: key})

    session('train')
    self.assertAllClose(session('rows').linear, [-0.1 / np.sqrt(1.1)])
    self.assertAllClose(session('rows').factors, row_oracle.initial_factors(key, SEED, 5, 0.1)[0])
    session('train')
    self.assertNotAllClose(
      session('rows').factors, row_oracle.initial_factors(key, SEED, 5, 0.1)[0]
    )

  def test_same_for_any_number_of_threads(self):
    code = (
      'import hashlib, sys, numpy as np, tensorflow as tf; n = int(sys.argv[1]);'
      'tf.config.threading.set_intra_op_parallelism_threads(n); '
      'tf.config.threading.set_inter_op_parallelism_threads(n);'
      'from tests.single.ops import row_store_test as t; from ops import row_store as r;'
      's = r.RowStore(t.score_policy(1.0), tables=t.make_tables("adam", "ftrl"), '
      'slot_table=t.SLOT_TABLE, seed=1);'
      't.RowStoreTest().fill(s, np.random.default_rng(0), steps=5, vocabulary=3000);'
      'print(hashlib.md5(repr(sorted(t.contents(s).items())).encode()).hexdigest())'
    )
    found = {
      (done.returncode, done.stdout) for done in (commands.run('-c', code, str(n)) for n in (1, 5))
    }
    self.assertLen(found, 1)
    self.assertEqual(found.pop()[0], 0)


def exchange(parts, splits):
  """Splits parts[r] by splits[r]. Returns: what each rank receives, by sender."""
  pieces = [np.split(p, np.cumsum(s)[:-1]) for p, s in zip(parts, splits)]
  return [np.concatenate([of[rank] for of in pieces]) for rank in range(len(parts))]


class ExchangeTest(tf.test.TestCase, parameterized.TestCase):
  def pull(self, batches, owners, dtype):
    """Every rank's keys to their owners and the rows back, with the all-to-alls done by hand.

    Returns:
      The rows by rank; how many keys ranks sent to owners [rank, owner]; by owner, the keys that
      came and their rows.
    """
    sent = np.stack([sharding.owner_counts(d.unique, len(owners)) for d in batches])
    keys = exchange([d.unique.numpy() for d in batches], sent)
    shows = exchange([d.shows.numpy() for d in batches], sent)
    owned = [dedupe(k, s, [0.0]) for k, s in zip(keys, shows)]
    owned_rows = [store.pull(d.unique) for store, d in zip(owners, owned)]
    packed = [
      packing.pack_rows(r, d.inverse, c, dtype)
      for r, d, c in zip(owned_rows, owned, sent.T.astype(np.int32))
    ]
    self.assertAllEqual(packed[0].buffer.dtype, dtype)
    buffers = exchange([p.buffer.numpy() for p in packed], [p.splits.numpy() for p in packed])
    rows = [
      packing.unpack_rows(b, c.astype(np.int32), d.unique, SLOT_TABLE, owners[0].widths)
      for b, c, d in zip(buffers, sent, batches)
    ]
    return rows, sent, owned, owned_rows

  def push(self, grads, rows, sent, owners, owned, owned_rows, dtype, hyper, step):
    """Every rank's gradients to the owners, which take the step `step`."""
    packed = [
      packing.pack_gradients(*g, r.offsets, c.astype(np.int32), dtype)
      for g, r, c in zip(grads, rows, sent)
    ]
    buffers = exchange([p.buffer.numpy() for p in packed], [p.splits.numpy() for p in packed])
    received = sent.T.astype(np.int32)
    for store, d, r, b, c in zip(owners, owned, owned_rows, buffers, received):
      linear, factors = packing.sum_gradients(b, c, r.offsets, d)
      store.push(d.unique, r, d.shows, d.clicks, linear, factors, [0.1], hyper, step)

  @parameterized.product(ranks=[1, 2, 3], dtype=[tf.float32, tf.float16, tf.bfloat16])
  def test_round_trip_equals_direct_path(self, ranks, dtype):
    """Rows of ranks that meet at their owners are those of one store."""
    rng = np.random.default_rng(ranks)
    hyper = row_optimizers.hyper([(Optimizer(), Optimizer())] * 2)
    one, *owners = (
      RowStore(score_policy(1.0), tables=make_tables(), slot_table=SLOT_TABLE, seed=SEED)
      for _ in range(1 + ranks)
    )
    tolerance = (
      {'rtol': 1e-5, 'atol': 1e-6} if dtype == tf.float32 else {'rtol': 0.05, 'atol': 0.05}
    )
    for step in range(1, 8):
      batches = [dedupe(make_keys(rng, 0 if r == 1 and step % 2 else 200)) for r in range(ranks)]
      rows, sent, owned, owned_rows = self.pull(batches, owners, dtype)
      union = dedupe(
        np.concatenate([d.unique for d in batches]), np.concatenate([d.shows for d in batches])
      )
      direct = one.pull(union.unique)
      place = {int(k): j for j, k in enumerate(union.unique)}
      linear_grad, factors_grad = np.zeros(len(place)), np.zeros(direct.factors.shape)
      grads = []
      for d, r in zip(batches, rows):
        offsets = r.offsets.numpy()
        linear, factors = (
          rng.normal(size=n).astype(np.float32) for n in (len(d.unique), offsets[-1])
        )
        grads.append((linear, factors))
        places = np.array([place[int(k)] for k in d.unique.numpy()], int)
        columns = np.concatenate(
          [[]] + [np.arange(direct.offsets[j], direct.offsets[j + 1]) for j in places]
        ).astype(int)
        self.assertAllEqual(np.diff(offsets), np.diff(direct.offsets)[places])
        self.assertAllClose(r.linear, direct.linear.numpy()[places], **tolerance)
        self.assertAllClose(r.factors, direct.factors.numpy()[columns], **tolerance)
        np.add.at(linear_grad, places, linear)
        np.add.at(factors_grad, columns, factors)
      self.push(grads, rows, sent, owners, owned, owned_rows, dtype, hyper, step)
      counts = union.shows, union.clicks
      one.push(union.unique, direct, *counts, linear_grad, factors_grad, [0.1], hyper, step)
    self.assertEqual(sum(int(s.size()) for s in owners), int(one.size()))
    self.assertGreater(int(one.admitted_size()), 20)
    keys = np.array(list(contents(one)))
    for owner, store in enumerate(owners):
      own = keys[sharding.owner_of(sharding.shard_of(keys), ranks) == owner]
      found, wanted = store.pull(own), one.pull(own)
      self.assertAllEqual(found.offsets, wanted.offsets)
      self.assertAllClose(found.linear, wanted.linear, **tolerance)
      self.assertAllClose(found.factors, wanted.factors, **tolerance)

  def test_features_without_factors_cost_a_value_and_a_bit(self):
    n = 1000
    rows = row_store.PulledRows(
      None, np.zeros(n + 1, np.int32), np.ones(n, np.float32), np.zeros(0, np.float32)
    )
    packed = packing.pack_rows(rows, np.arange(n, dtype=np.int32), np.array([n], np.int32))
    self.assertEqual(packed.splits[0], n + 32)

  def test_nothing_at_all(self):
    zero = np.zeros(0, np.float32)
    for ranks in (0, 1, 2):
      counts = np.zeros(ranks, np.int32)
      d = dedupe(np.zeros(0, np.int64))
      packed = packing.pack_rows(row_store.PulledRows(None, [0], zero, zero), d.inverse, counts)
      self.assertAllEqual(packed.splits, counts)
      rows = packing.unpack_rows(packed.buffer, counts, d.unique, SLOT_TABLE, [5, 12])
      self.assertAllEqual(rows.offsets, [0])
      packed = packing.pack_gradients(zero, zero, [0], counts)
      self.assertAllEqual(packing.sum_gradients(packed.buffer, counts, [0], d)[0], zero)

  def test_hostile_input_is_refused(self):
    keys = (1 << 52) + np.arange(4)
    d = dedupe(keys)
    offsets = np.array([0, 5, 5, 10, 10], np.int32)
    rows = row_store.PulledRows(None, offsets, np.ones(4, np.float32), np.ones(10, np.float32))
    counts = np.array([3, 1], np.int32)
    buffer = packing.pack_rows(rows, d.inverse, counts).buffer.numpy()
    gradients = packing.pack_gradients(rows.linear, rows.factors, offsets, counts).buffer.numpy()
    packing.unpack_rows(buffer, counts, d.unique, SLOT_TABLE, [5, 12])
    packing.sum_gradients(gradients, counts, offsets, d)
    bad_counts = [np.array(c, np.int32) for c in ([3, 2], [3], [5, -1], [], [2**31 - 1, 5 - 2**31])]

    def wrong(f, *args):
      with self.assertRaises(tf.errors.InvalidArgumentError, msg=str(args)):
        f(*args)

    for c in bad_counts:
      wrong(packing.pack_rows, rows, d.inverse, c)
      wrong(packing.unpack_rows, buffer, c, d.unique, SLOT_TABLE, [5, 12])
      wrong(packing.pack_gradients, rows.linear, rows.factors, offsets, c)
      wrong(packing.sum_gradients, gradients, c, offsets, d)
    for left in (0, 2, 5, -1):
      wrong(packing.unpack_rows, buffer[:left], counts, d.unique, SLOT_TABLE, [5, 12])
      wrong(packing.sum_gradients, gradients[:left], counts, offsets, d)
    wrong(packing.unpack_rows, buffer, counts, d.unique + (8 << 52), SLOT_TABLE, [5, 12])
    wrong(packing.unpack_rows, buffer, counts, d.unique, SLOT_TABLE, [2**20, 12])
    wrong(packing.pack_rows, rows._replace(offsets=offsets[::-1].copy()), d.inverse, counts)
    wrong(packing.pack_rows, rows, d.inverse + 1, counts)
    wrong(packing.sum_gradients, gradients, counts, offsets + 1, d)
    wrong(packing.sum_gradients, gradients, counts, offsets, d._replace(order=d.order + 1))
    wrong(packing.sum_gradients, gradients, counts, offsets, d._replace(starts=d.starts * 2))
    packing.sum_gradients(
      gradients, counts, offsets, d._replace(order=d.order[::-1])
    )  # another's occurrences: wrong, but in bounds


if __name__ == '__main__':
  tf.test.main()
