"""The feature lifecycle through its Python face:

against a real server's answers, a shadow model, and hostile input.
"""

import gc
import itertools
import json
import os
import time

import numpy as np
import pytest
import tensorflow as tf

from ops import chunks
from ops.feature_lifecycle import FeatureLifecycle, Policy, capacity_cut
from ops.sharding import shards_of

VECTORS = os.path.join(
  os.path.dirname(__file__), '..', '..', '..', '..', 'shared', 'facts', 'lifecycle_vectors.json'
)
InvalidArgument = tf.errors.InvalidArgumentError
FIELDS = ('show', 'click', 'delta_score', 'unseen_days', 'age_days', 'slot', 'admitted')


def keys_of(tensor):
  return sorted(np.asarray(tensor).tolist())


def contents(table):
  """Everything a table holds: key -> fields."""
  return {
    int(c['key'][i]): tuple(c[f][i].item() for f in FIELDS)
    for c in table.export_state()
    for i in range(len(c['key']))
  }


class Shadow:
  """The rules in plain Python:

  a dict of key -> [show, click, delta_score, unseen_days, age_days, slot, admitted].
  """

  def __init__(self, policy):
    self.policy, self.features, self.selected = policy, {}, {'delta': {}, 'base': {}}
    self.of_slot = {slot: policy.for_slot(slot) for slot in range(64)}

  def score(self, p, show, click):
    return (show - click) * p.nonclk_coeff + click * p.clk_coeff

  def observe(self, keys, shows, clicks, slots):
    sums = {}
    for key, show, click, slot in zip(keys, shows, clicks, slots):
      total = sums.setdefault(key, [0.0, 0.0, slot])
      total[0] += show
      total[1] += click
    for key, (show, click, slot) in sums.items():
      f = self.features.setdefault(key, [0.0, 0.0, 0.0, 0, 0, slot, False])
      p = self.of_slot[f[5]]
      f[0] += show
      f[1] += click
      f[2] += self.score(p, show, click)
      f[3] = 0
      f[6] |= {
        'score': self.score(p, f[0], f[1]) >= p.admission_threshold,
        'count': f[0] >= p.admission_count,
        'none': True,
      }[p.admission]
    return [self.features[key][6] for key in keys]

  def decay(self):
    for f in self.features.values():
      f[0] *= self.of_slot[f[5]].decay
      f[1] *= self.of_slot[f[5]].decay

  def age(self):
    for f in self.features.values():
      f[3] += 1
      f[4] += 1

  def evict(self):
    doomed = []
    for key, f in self.features.items():
      p = self.of_slot[f[5]]
      unseen = p.delete_after_unseen_days is not None and f[3] > p.delete_after_unseen_days
      low = f[4] >= (p.min_age_days or 0) and self.score(p, f[0], f[1]) < p.delete_threshold
      if p.eviction != 'none' and (unseen or (p.eviction == 'score' and low)):
        doomed.append(key)
    for key in doomed:
      self._remove(key)
    if self.policy.capacity is not None:

      def rank(item):
        key, f = item
        score = self.score(self.of_slot[f[5]], f[0], f[1])
        return {'score': (-score, key), 'recency': (f[3], -score, key), 'frequency': (-f[0], key)}[
          self.policy.capacity_by
        ]

      for key, _ in sorted(self.features.items(), key=rank)[self.policy.capacity :]:
        self._remove(key)
        doomed.append(key)
    return sorted(doomed)

  def _remove(self, key):
    del self.features[key]
    for selected in self.selected.values():
      selected.pop(key, None)

  def select(self, kind):
    found = {}
    for key, f in self.features.items():
      p = self.of_slot[f[5]]
      least = p.delta_threshold if kind == 'delta' else 0
      if (
        self.score(p, f[0], f[1]) >= p.base_threshold
        and f[2] >= least
        and f[3] <= p.delta_keep_days
      ):
        found[key] = f[2]
    self.selected[kind] = found
    return sorted(found)

  def commit(self, kind):
    other = self.selected['base' if kind == 'delta' else 'delta']
    for key, written in self.selected[kind].items():
      self.features[key][2] -= written
      if key in other:
        other[key] = max(0.0, other[key] - written)
    self.selected[kind] = {}


class VectorsTest(tf.test.TestCase):
  """What a PaddlePaddle 2.6.2 parameter server answered."""

  def test_every_scenario(self):
    if not os.path.exists(VECTORS):
      self.skipTest(f'{os.path.normpath(VECTORS)} is not there')
    with open(VECTORS, encoding='utf-8') as f:
      scenarios = json.load(f)['scenarios']
    self.assertNotEmpty(scenarios)
    for scenario in scenarios:
      with self.subTest(scenario['name']):
        self.play(scenario)

  def play(self, scenario):
    p = scenario['params']
    table = FeatureLifecycle(
      Policy(
        admission_threshold=p['embedx_threshold'],
        nonclk_coeff=p['nonclk_coeff'],
        clk_coeff=p['click_coeff'],
        base_threshold=p['base_threshold'],
        delta_threshold=p['delta_threshold'],
        delta_keep_days=p['delta_keep_days'],
        decay=p['show_click_decay_rate'],
        delete_threshold=p['delete_threshold'],
        delete_after_unseen_days=p['delete_after_unseen_days'],
      )
    )
    for step in scenario['steps']:
      where = f'{scenario["name"]} step {step["step"]}'
      if step['op'] == 'push':
        events = [
          (key, e[1], e[2])
          for e in step['events']
          for key in (e[0] if isinstance(e[0], list) else [e[0]])
        ]
        keys, shows, clicks = (list(column) for column in zip(*events))
        admitted = table.observe(keys, shows, clicks, [7] * len(keys))
        self.assertAllEqual(
          admitted, [step['state_after'][str(key)]['has_embedx'] for key in keys], where
        )
      elif step['op'] == 'shrink':
        before = set(contents(table))
        table.decay()
        self.assertEqual(
          set(keys_of(table.evict())), before - {int(key) for key in step['state_after']}, where
        )
      elif step['mode'] in (1, 2):
        kind = {1: 'delta', 2: 'base'}[step['mode']]
        selected = table.select(kind)
        self.assertEqual(keys_of(selected), sorted(int(key) for key in step['file_rows']), where)
        table.commit(kind, selected)
      else:
        self.assertEqual(
          keys_of(table.select('all')), sorted(int(key) for key in step['file_rows']), where
        )
        if step['mode'] == 3:
          table.age()
      wanted = {int(key): state for key, state in step['state_after'].items()}
      self.assertEqual(set(contents(table)), set(wanted), where)
      found = table.lookup(list(wanted))
      for field in ('show', 'click', 'delta_score', 'unseen_days', 'slot'):
        self.assertAllClose(
          found[field],
          [state[field] for state in wanted.values()],
          rtol=2e-6,
          atol=2e-6,
          msg=f'{where} {field}',
        )
      self.assertAllEqual(
        found['admitted'], [state['has_embedx'] for state in wanted.values()], where
      )
      for kind in ('delta', 'base'):
        if f'{kind}_save_keys' in step:
          self.assertEqual(
            keys_of(table.select(kind)), sorted(step[f'{kind}_save_keys']), f'{where} {kind}'
          )


class ShadowModelTest(tf.test.TestCase):
  @pytest.mark.long
  def test_a_million_operations(self):
    """1.1 million random operations, in batches, over all policies."""
    seed = int(os.environ.get('LIFECYCLE_TEST_SEED', time.time_ns() % 2**32))
    print(f'seed {seed}: LIFECYCLE_TEST_SEED={seed} repeats it')
    policies = [
      Policy(delta_keep_days=3, delete_after_unseen_days=4),
      Policy(
        admission='count',
        admission_count=4,
        eviction='unseen',
        delete_after_unseen_days=2,
        decay=0.5,
      ),
      Policy(admission='none', min_age_days=2, delete_after_unseen_days=None, delta_threshold=1.0),
      Policy(admission='none', eviction='none', nonclk_coeff=1.0, clk_coeff=0.25),
      Policy(capacity=700, capacity_by='score', decay=0.75),
      Policy(eviction='none', capacity=900, capacity_by='recency', decay=0.75),
      Policy(eviction='unseen', capacity=500, capacity_by='frequency', decay=0.75),
      Policy(
        per_slot={
          3: {'admission_threshold': 2.0, 'decay': 0.5},
          5: {'delete_threshold': 3.0, 'delta_keep_days': 0},
          7: {'nonclk_coeff': 0.5},
        }
      ),
    ]
    operations = 0
    for number, policy in enumerate(policies):
      operations += self.play(policy, np.random.default_rng([seed, number]), 140_000)
    self.assertGreaterEqual(operations, 1_000_000)

  def play(self, policy, rng, operations):
    table, shadow, done = FeatureLifecycle(policy), Shadow(policy), 0
    while done < operations:
      n = int(rng.integers(0, 4000))
      # Half of the keys come again and again; numbers that binary fractions hold, so that sums are
      # exact in any order.
      keys = (
        np.where(rng.random(n) < 0.5, rng.integers(0, 100, n), rng.integers(0, 6000, n))
        | rng.integers(0, 8, n) << 52
      )
      shows = rng.integers(0, 9, n) / 2
      clicks = np.where(
        shows > 0, np.minimum(shows, rng.integers(0, 3, n) / 4), rng.integers(0, 2, n)
      )
      slots = keys >> 52 if rng.random() < 0.5 else (keys * 7 + 1) % 8
      given = (
        None
        if slots[:1].tolist() == (keys >> 52)[:1].tolist() and (slots == keys >> 52).all()
        else slots
      )
      wanted = shadow.observe(keys.tolist(), shows.tolist(), clicks.tolist(), slots.tolist())
      self.assertAllEqual(table.observe(keys, shows, clicks, given), np.array(wanted, bool))
      done += n
      choice = rng.integers(0, 6)
      if choice == 0:
        for verb in ('decay', 'age'):
          getattr(table, verb)()
          getattr(shadow, verb)()
        self.assertEqual(keys_of(table.evict()), shadow.evict())
      elif choice in (1, 2):
        kind = ('delta', 'base')[choice - 1]
        self.assertEqual(keys_of(table.select(kind)), shadow.select(kind))
      elif choice in (3, 4):
        kind = ('delta', 'base')[choice - 3]
        selected = np.array(list(shadow.selected[kind]), np.int64)
        table.commit(kind, rng.permutation(selected))
        shadow.commit(kind)
      else:
        asked = rng.integers(0, 7000, 1000) | rng.integers(0, 8, 1000) << 52
        self.assertAllEqual(
          table.admitted(asked),
          [k in shadow.features and shadow.features[k][6] for k in asked.tolist()],
        )
        done += 1000
      self.assertEqual(int(table.size()), len(shadow.features))
    found = contents(table)
    self.assertEqual(found.keys(), shadow.features.keys())
    held = [np.array([side[k] for k in found], np.float64) for side in (found, shadow.features)]
    self.assertAllClose(*held, rtol=1e-9, atol=1e-9)
    return done


class LifecycleTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.table = FeatureLifecycle(Policy())
    self.table.observe([1, 2, 3], [100.0, 1.0, 7.0], [0.0, 1.0, 0.0])

  def test_lookup_creates_nothing(self):
    found = self.table.lookup([1, 9])
    self.assertAllEqual(found['exists'], [True, False])
    self.assertAllEqual(found['show'], [100.0, 0.0])
    self.assertAllEqual(self.table.admitted([9, 1, 9]), [False, True, False])
    self.assertEqual(int(self.table.size()), 3)

  def test_slot_of_a_key_and_given(self):
    self.table.observe([5 << 52 | 1, 6], [1, 1], [0, 0])
    self.table.observe([7, 6], [1, 1], [0, 0], slots=[9, 9])
    self.assertAllEqual(self.table.lookup([5 << 52 | 1, 6, 7])['slot'], [5, 0, 9])

  def test_empty_batches(self):
    for empty in ([], np.zeros([0], np.int64), tf.zeros([0], tf.int64)):
      self.assertAllEqual(self.table.observe(empty, [], [], []), np.zeros([0], bool))
      self.assertAllEqual(self.table.admitted(empty), np.zeros([0], bool))
      self.assertEqual(self.table.lookup(empty)['show'].shape, [0])
      self.table.commit('delta', empty)
    self.assertEqual(int(self.table.size()), 3)

  def test_extreme_keys(self):
    largest = 2**63 - 1
    self.assertAllEqual(self.table.observe([0, largest], [1, 100], [0, 0]), [False, True])
    self.assertAllEqual(self.table.lookup([0, largest])['slot'], [0, 2047])

  def test_hostile_input_is_named_and_changes_nothing(self):
    nan, inf = float('nan'), float('inf')
    cases = [
      ([1, -5], [1, 1], [0, 0], None, r'keys\[1\]: found -5'),
      ([-(2**63)], [1], [0], None, r'keys\[0\]: found -9223372036854775808'),
      ([1, 4], [1, nan], [0, 0], None, r'shows\[1\]: found nan'),
      ([1, 4], [1, inf], [0, 0], None, r'shows\[1\]: found inf'),
      ([1, 4], [1, -2], [0, 0], None, r'shows\[1\]: found -2'),
      ([1, 4], [1, 1e300], [0, 0], None, r'shows\[1\]: found 1e\+300'),
      ([1, 4], [1, 1], [0, nan], None, r'clicks\[1\]: found nan'),
      ([1, 4], [1, 1], [0, -1], None, r'clicks\[1\]: found -1'),
      ([1, 4], [1, 1], [0, 3], None, r'clicks\[1\]: found 3; wanted at most shows\[1\] = 1'),
      ([1, 4], [1], [0, 0], None, 'shows: found 1 elements; wanted 2'),
      ([1, 4], [1, 1], [0, 0, 0], None, 'clicks: found 3 elements; wanted 2'),
      ([1, 4], [1, 1], [0, 0], [1], 'slots: found 1 elements; wanted 2'),
      ([1, 4], [1, 1], [0, 0], [], 'slots: found 0 elements; wanted 2'),
      ([1, 4], [1, 1], [0, 0], [1, 2048], r'slots\[1\]: found 2048'),
      ([1, 4], [1, 1], [0, 0], [-1, 1], r'slots\[0\]: found -1'),
      ([1, 4], [1, 1], [0, 0], [1.0, 1.0], 'slots: found dtype float64'),
      ([1.0, 4.0], [1, 1], [0, 0], None, 'keys: found dtype float64; wanted int64'),
      (['1', '4'], [1, 1], [0, 0], None, 'keys: found dtype str'),
      ([True], [1], [0], None, 'keys: found dtype bool'),
      ([2**63], [1], [0], None, 'keys: found dtype uint64'),
      ([2**70], [1], [0], None, 'keys: found dtype object'),
      ([1, 4], ['a', 'b'], [0, 0], None, 'shows: found dtype str'),
      ([1, 4], [1, 1], [1j, 0], None, 'clicks: found dtype complex128'),
      (tf.constant([1.0, 4.0]), [1, 1], [0, 0], None, 'keys: found dtype float32'),
      ([[1, 4]], [1, 1], [0, 0], None, r'keys: found shape \[1, 2\]; wanted \[n\]'),
      (1, 1, 0, None, r'keys: found shape \[\]'),
      ([[1], [4, 5]], [1, 1], [0, 0], None, 'keys: found a ragged list'),
      ([1, 4], [[1, 1]], [0, 0], None, r'shows: found shape \[1, 2\]'),
    ]
    before = contents(self.table)
    for keys, shows, clicks, slots, message in cases:
      with self.assertRaisesRegex(InvalidArgument, message):
        self.table.observe(keys, shows, clicks, slots)
      self.assertEqual(contents(self.table), before, message)
    for verb in (
      self.table.admitted,
      self.table.lookup,
      lambda keys: self.table.commit('delta', keys),
    ):
      for keys, message in (
        ([1, -1], r'keys\[1\]: found -1'),
        ([1.5], 'keys: found dtype'),
        ([[1]], 'keys: found shape'),
      ):
        with self.assertRaisesRegex(InvalidArgument, message):
          verb(keys)
    with self.assertRaisesRegex(InvalidArgument, "kind: found 'some'"):
      self.table.select('some')
    with self.assertRaisesRegex(InvalidArgument, 'policy: found str'):
      FeatureLifecycle('score')
    self.assertEqual(contents(self.table), before)

  def test_late_click(self):
    self.table.observe([8], [0], [1])
    self.assertAllClose(self.table.lookup([8])['delta_score'], [0.9])

  def test_commit_keeps_a_gain_since_the_selection(self):
    self.assertEqual(keys_of(self.table.select('delta')), [1])
    self.table.observe([1], [20], [0])
    with self.assertRaisesRegex(
      InvalidArgument, r'keys\[1\]: found 2; wanted a key of the last selection'
    ):
      self.table.commit('delta', [1, 2])
    self.assertAllClose(self.table.lookup([1])['delta_score'], [12.0])
    self.table.commit('delta', [1])
    self.assertAllClose(self.table.lookup([1])['delta_score'], [2.0])

  def test_capacity_of_several_processes_is_that_of_one(self):
    rng = np.random.default_rng(5)
    for by, processes in itertools.product(('score', 'recency', 'frequency'), (1, 2, 3)):
      policy = Policy(capacity=500, capacity_by=by, min_age_days=9)
      whole, parts = FeatureLifecycle(policy), [FeatureLifecycle(policy) for _ in range(processes)]
      for day in range(3):
        keys = np.arange(400) + 400 * day
        shows = rng.integers(1, 6, 400).astype(float)
        whole.observe(keys, shows, shows * 0)
        for i, part in enumerate(parts):
          part.observe(keys[i::processes], shows[i::processes], shows[i::processes] * 0)
        for table in [whole, *parts]:
          table.age()
      wanted = keys_of(whole.evict())
      cut = capacity_cut(500, lambda prefix: sum(p.rank_histogram(prefix).numpy() for p in parts))  # noqa: B023
      removed = sum((keys_of(p.evict_below(cut)) for p in parts), [])
      self.assertEqual(sorted(removed), wanted)
      self.assertLen(wanted, 700)

  def test_evict_with_all_reduce(self):
    tables = [FeatureLifecycle(Policy(capacity=10)) for _ in range(2)]
    for table in tables:
      table.observe(np.arange(25), np.arange(25) + 1.0, np.zeros(25))
    removed = [
      keys_of(table.evict(all_reduce))
      for table, all_reduce in zip(tables, (None, lambda counts: counts))
    ]
    self.assertEqual(removed[0], removed[1])
    self.assertEqual(keys_of(tables[0].select('all')), list(range(15, 25)))

  def test_probability_admits_at_its_rate_and_repeatably(self):
    policy = Policy(admission='probability', admission_probability=0.2, seed=11)
    keys, n = np.arange(20000), 20000
    at_once, one_by_one = FeatureLifecycle(policy), FeatureLifecycle(policy)
    wanted = at_once.observe(keys, np.full(n, 4.0), np.zeros(n)).numpy()
    for _ in range(4):
      found = one_by_one.observe(keys[::-1], np.ones(n), np.zeros(n)).numpy()[::-1]
    self.assertAllEqual(found, wanted)
    self.assertNear(wanted.mean(), 1 - 0.8**4, 5 * (0.25 / n) ** 0.5)
    other = FeatureLifecycle(Policy(admission='probability', admission_probability=0.2, seed=12))
    self.assertNotAllEqual(other.observe(keys, np.full(n, 4.0), np.zeros(n)), wanted)

  def test_bytes_are_bounded_and_reused(self):
    table = FeatureLifecycle(Policy())
    keys = np.arange(1_000_000)
    for part in np.split(keys, 20):
      table.observe(part, np.ones(len(part)), np.zeros(len(part)))
    held = int(table.bytes())
    self.assertBetween(held, 48 * len(keys), 64 * len(keys))
    for day in range(3):
      self.assertLen(table.evict(), len(keys))
      table.observe(keys + (day + 1) * 2_000_000, np.ones(len(keys)), np.zeros(len(keys)))
      self.assertLess(int(table.bytes()), 1.1 * held)


class GraphTest(tf.test.TestCase):
  def test_tf_function(self):
    table = FeatureLifecycle(Policy(admission='count', admission_count=2))

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def step(keys):
      shows = tf.ones_like(keys, tf.float32)
      first = table.observe(keys, shows, tf.zeros_like(shows))
      table.observe(keys, shows, tf.zeros_like(shows))
      return first, table.admitted(keys), table.lookup(keys)['show']

    first, then, show = step(tf.constant([4, 5], tf.int64))
    self.assertAllEqual(first, [False, False])
    self.assertAllEqual(then, [True, True])
    self.assertAllEqual(show, [2.0, 2.0])
    with self.assertRaises(InvalidArgument):
      step(tf.constant([-4], tf.int64))

  def test_shapes_are_checked_where_the_graph_is_built(self):
    table = FeatureLifecycle(Policy())
    with self.assertRaises(ValueError):
      tf.function(
        lambda: table.observe(tf.constant([1, 2]), tf.constant([1.0]), tf.constant([0.0]))
      )()
    with tf.Graph().as_default():
      graph_table = FeatureLifecycle(Policy())
      self.assertEqual(graph_table.admitted(tf.compat.v1.placeholder(tf.int64, [7])).shape, [7])
      self.assertEqual(graph_table.select('all').shape.rank, 1)
      self.assertEqual(graph_table.size().shape.rank, 0)

  def test_v1_graph_and_server(self):
    server = tf.distribute.Server.create_local_server()
    for expected in (1, 2):  # two graphs, as two workers build them, meet in the server's table
      with tf.Graph().as_default():
        with tf.device('/job:localhost/task:0'):
          table = FeatureLifecycle(Policy(), name='shared')
        keys = tf.compat.v1.placeholder(tf.int64, [None])
        pushed = table.observe(
          keys, tf.ones_like(keys, tf.float64), tf.zeros_like(keys, tf.float64)
        )
        found = table.lookup(keys)['show']
        with tf.compat.v1.Session(server.target) as session:
          session.run(pushed, {keys: [3]})
          self.assertAllEqual(session.run(found, {keys: [3, 4]}), [expected, 0])
          with self.assertRaisesRegex(InvalidArgument, r'keys\[0\]: found -3'):
            session.run(pushed, {keys: [-3]})

  def test_tables_share_by_name(self):
    one, same, other = (
      FeatureLifecycle(name='a'),
      FeatureLifecycle(name='a'),
      FeatureLifecycle(name='b'),
    )
    nameless = FeatureLifecycle()
    one.observe([1], [1], [0])
    self.assertEqual([int(t.size()) for t in (one, same, other, nameless)], [1, 1, 0, 0])
    with self.assertRaisesRegex(InvalidArgument, 'policy: found'):
      FeatureLifecycle(Policy(decay=0.5), name='a')
    del one
    gc.collect()
    self.assertEqual(int(same.size()), 1)
    del same
    gc.collect()
    self.assertEqual(int(FeatureLifecycle(Policy(decay=0.5), name='a').size()), 0)


class StateTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    rng = np.random.default_rng(2)
    self.table = FeatureLifecycle(Policy())
    keys = rng.integers(0, 2**62, 5000)
    shows = rng.random(5000) * 100
    self.table.observe(keys, shows, shows * rng.random(5000))
    self.table.decay()
    self.table.age()
    self.table.observe(keys[:2000], np.ones(2000), np.ones(2000))
    self.wanted = contents(self.table)
    self.assertLen(self.wanted, 5000)

  def test_round_trip(self):
    for source in (list(self.table.export_state()), self.table.export_state()):
      copy = FeatureLifecycle(Policy())
      copy.observe([77], [1], [0])
      copy.import_state(source)
      self.assertEqual(contents(copy), self.wanted)

  def test_any_number_of_parts(self):
    parts = [FeatureLifecycle(Policy()) for _ in range(3)]
    for i, part in enumerate(parts):
      part.import_state(self.table.export_state(shards=shards_of(i, 3)))
    self.assertEqual(sum(int(part.size()) for part in parts), 5000)
    again = FeatureLifecycle(Policy())
    for part in parts:
      again.import_state(part.export_state(), replace=False)
    self.assertEqual(contents(again), self.wanted)

  def test_an_imported_feature_lives_on(self):
    copy = FeatureLifecycle(Policy())
    copy.import_state(self.table.export_state())
    for table in (self.table, copy):
      for _ in range(40):
        table.decay()
        table.age()
    self.assertEqual(keys_of(copy.evict()), keys_of(self.table.evict()))
    self.assertEqual(contents(copy), contents(self.table))

  def test_bad_chunks(self):
    parts = (shards_of(i, 8) for i in range(8))
    good = [next(self.table.export_state(shards=shards)) for shards in parts]

    def changed(**fields):
      chunk = {**good[3], **fields}
      return [*good[:3], chunk, *good[4:]]

    def one(name, i, value):
      column = good[3][name].copy()
      column[i] = value
      return changed(**{name: column})

    cases = [
      (changed(show=good[3]['show'].astype(np.float32)), 'chunk 3: show: found float32'),
      (changed(show=good[3]['show'][1:]), 'chunk 3: .*show'),
      (changed(click=good[3]['click'].tolist()), "chunk 3: click: found <class 'list'>"),
      ([*good, {'key': good[0]['key']}], 'show: found nothing'),
      (one('key', 0, -3), r'chunk 3: .*key\[0\]: found -3'),
      (
        one('key', 1, good[3]['key'][0]),
        r'chunk 3: .*key\[1\]: found .*; wanted a key that stands once',
      ),
      (one('show', 2, np.nan), r'chunk 3: .*show\[2\]: found nan'),
      (one('click', 2, -1), r'chunk 3: .*click\[2\]: found -1'),
      (one('delta_score', 2, np.inf), r'chunk 3: .*delta_score\[2\]: found inf'),
      (one('slot', 2, 2048), r'chunk 3: .*slot\[2\]: found 2048'),
      ([*good, good[3]], r'chunk \d+: .*key\[\d+\]: found .*; wanted a key that stands once'),
    ]
    for damaged, message in cases:
      for replace in (True, False):
        table = FeatureLifecycle(Policy())
        table.observe([1], [1], [0])
        with self.assertRaisesRegex(tf.errors.DataLossError, message):
          table.import_state(damaged, replace=replace)
        self.assertEqual(contents(table), {}, message)

  def test_columns(self):
    chunk = next(self.table.export_state())
    self.assertEqual(
      {name: chunk[name].dtype for name in chunks.COLUMNS},
      {name: np.dtype(dtype) for name, dtype in chunks.COLUMNS.items()},
    )


class PolicyTest(tf.test.TestCase):
  def test_refuses_what_cannot_be(self):
    for fields in (
      {'admission': 'maybe'},
      {'decay': 1.5},
      {'decay': float('nan')},
      {'capacity': 0},
      {'delta_keep_days': -1},
      {'admission_probability': 2},
      {'per_slot': {3000: {}}},
      {'per_slot': {1: {'capacity': 3}}},
      {'seed': -1},
    ):
      with pytest.raises(ValueError, match=next(iter(fields))):
        Policy(**fields)

  def test_extremes_reach_the_table(self):
    table = FeatureLifecycle(
      Policy(
        admission_threshold=0.9,
        eviction='score',
        delete_threshold=0.9,
        delete_after_unseen_days=None,
        capacity=2**62,
        decay=1e-300,
        seed=2**64 - 1,
        per_slot={2047: {'nonclk_coeff': 1 / 3, 'delete_threshold': 0.0}},
      )
    )
    keys = np.array([1 << 52, 2047 << 52], np.int64)
    table.observe(keys, [3.0, 3.0], [0.0, 0.0])
    # Three shows without a click: .3 by the coefficient of all slots, 1 by that of slot 2047.
    self.assertAllEqual(table.admitted(keys), [False, True])
    table.decay()
    self.assertAllClose(table.lookup(keys)['show'], [3e-300, 3e-300], rtol=1e-12, atol=0)
    self.assertAllEqual(table.evict(lambda histogram: histogram), keys[:1])
    self.assertEqual(table.size(), 1)


if __name__ == '__main__':
  tf.test.main()
