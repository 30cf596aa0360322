"""Base and delta exports:

replaying base + deltas gives what a shadow of the rules says, crash or not, for 1 to 3 processes.
"""

import builtins
import dataclasses
import os
import shutil
import tempfile
import threading
import types
from unittest import mock

import numpy as np
import pyarrow.parquet as pq
import tensorflow as tf
from absl.testing import parameterized

from ops import row_optimizers
from ops.feature_lifecycle import FeatureLifecycle
from ops.policy import Policy
from ops.row_store import FactorPart, PulledRows, RowStore, TableSpec
from ops.sharding import SHARDS, owner_of, shard_of, shards_of
from tests.support.steps import make_config
from tests.support.threads import in_thread, on_threads
from trainer import config, files
from trainer.errors import DataLoss, UserError
from trainer.storage import chain, export_writer, row_files

# Powers of two, so that the shadow's sums are the table's to the last bit.
POLICY = Policy(
  nonclk_coeff=0.25,
  clk_coeff=1.0,
  admission_threshold=1.0,
  base_threshold=1.0,
  delta_threshold=0.75,
  delta_keep_days=2,
  decay=0.5,
  delete_threshold=0.25,
  delete_after_unseen_days=4,
)
MODEL = types.SimpleNamespace(variables=[tf.Variable([1.0, 2.0], name='bias')])
STATS = np.zeros([3, 0], np.float32)


class Store(FeatureLifecycle):
  """The lifecycle's own table, with rows whose values are the number of pushes so far:

  linear n, factors [n, −n] once admitted.
  """

  def __init__(self, policy=POLICY):
    super().__init__(policy)
    self.pushes, self.ancestors = {}, []

  def push(self, keys, shows, clicks):
    self.observe(keys, shows, clicks)
    for k in keys.tolist():
      self.pushes[k] = self.pushes.get(k, 0) + 1

  def evict(self):
    for k in super().evict().numpy().tolist():
      del self.pushes[k]

  def pull(self, keys, train):
    assert not train
    linear = np.array([self.pushes[k] for k in keys.tolist()], np.float32)
    admitted = self.admitted(keys).numpy()
    factors = np.stack([linear, -linear], 1)[admitted].ravel()
    offsets = np.append(0, np.cumsum(2 * admitted)).astype(np.int32)
    return types.SimpleNamespace(
      linear=tf.constant(linear), factors=tf.constant(factors), offsets=tf.constant(offsets)
    )

  def copy(self):
    new = Store()
    new.import_state(list(self.export_state()))
    new.pushes, new.ancestors = dict(self.pushes), self.ancestors
    return new


class Shadow:
  """The rules in plain Python:

  the state of every feature, and what a consumer of the exports holds.
  """

  def __init__(self):
    self.features, self.exported = {}, {}

  def push(self, keys, shows, clicks):
    for k, s, c in zip(keys.tolist(), shows.tolist(), clicks.tolist()):
      f = self.features.setdefault(
        k, {'show': 0, 'click': 0, 'gain': 0, 'unseen': 0, 'admitted': False, 'pushes': 0}
      )
      f['show'] += s
      f['click'] += c
      f['gain'] += self._score(s, c)
      f['unseen'] = 0
      f['admitted'] |= self._score(f['show'], f['click']) >= POLICY.admission_threshold
      f['pushes'] += 1

  def _score(self, show, click):
    return (show - click) * POLICY.nonclk_coeff + click * POLICY.clk_coeff

  def filtered(self):
    return {
      k
      for k, f in self.features.items()
      if self._score(f['show'], f['click']) >= POLICY.base_threshold
      and f['unseen'] <= POLICY.delta_keep_days
    }

  def row(self, key):
    f = self.features[key]
    return float(f['pushes']), [f['pushes'], -f['pushes']] if f['admitted'] else []

  def export(self, kind):
    """Returns: keys of rows, tombstones."""
    keys = self.filtered()
    gone = {} if kind == 'base' else self.exported.keys() - keys
    written = {
      k
      for k in keys
      if kind == 'base'
      or k not in self.exported
      or self.features[k]['gain'] >= POLICY.delta_threshold
    }
    for k in written:
      self.features[k]['gain'] = 0
    self.exported = {k: self.row(k) if k in written else self.exported[k] for k in keys}
    return written, set(gone)

  def end_day(self):
    for k, f in list(self.features.items()):
      f['show'] *= POLICY.decay
      f['click'] *= POLICY.decay
      if (
        self._score(f['show'], f['click']) < POLICY.delete_threshold
        or f['unseen'] > POLICY.delete_after_unseen_days
      ):
        del self.features[k]
      else:
        f['unseen'] += 1


def replay(directory):
  """What a consumer holds after the last base and the deltas behind it:

  key -> (linear, factors).
  """
  held = {}
  for name in sorted(n for n in os.listdir(directory) if n[0] != '.'):
    path = os.path.join(directory, name)
    if name.endswith('base'):
      held = {}
    for part in sorted(os.listdir(path)):
      if part.startswith('tombstones'):
        for k in pq.read_table(os.path.join(path, part))['key'].to_pylist():
          del held[k]
    for part in sorted(os.listdir(path)):
      if part.startswith('rows'):
        for r in pq.read_table(os.path.join(path, part)).to_pylist():
          assert r['slot'] == r['key'] >> 52
          held[r['key']] = (r['linear'], r['factors'])
  return held


def live_keys(directory):
  """What the newest chain holds, read anew."""
  replay = chain.Replay()
  return replay.live_keys(replay.scan(directory)[2], range(SHARDS)).all()


def make_pass(rng):
  """Keys with shows and clicks of one pass; some features are frequent, most are rare."""
  every = np.concatenate([1 << 52 | np.arange(200), 2 << 52 | np.arange(200)])
  keys = rng.permutation(every)[: rng.integers(0, 120)]
  shows = rng.integers(0, 5, len(keys)).astype(np.float64)
  return keys, shows, np.minimum(shows, rng.integers(0, 2, len(keys)))


class Killed(BaseException):
  """Stands for SIGKILL."""


def contents(directory):
  """relative path -> bytes."""
  found = {}
  for folder, _, names in os.walk(directory):
    for name in names:
      with open(os.path.join(folder, name), 'rb') as f:
        found[os.path.relpath(f.name, directory)] = f.read()
  return found


class ExportTest(tf.test.TestCase, parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.run_dir = self.enter_context(tempfile.TemporaryDirectory())
    self.directory = os.path.join(self.run_dir, 'exports')
    self.cfg = make_config({})

  def _write(self, stores, kind, position, run_dir=None, replay=None, checkpoint=None):
    """As a trainer does, whose state the stores hold; or, with `checkpoint`, as ctr-export."""
    cfg = self.cfg.model_copy(update={'run_dir': run_dir or self.run_dir})
    written = on_threads(
      len(stores),
      lambda communicator: export_writer.write(
        cfg,
        kind,
        position,
        store=stores[communicator.rank],
        model=MODEL,
        dense_stats=STATS,
        communicator=communicator,
        ancestors=stores[0].ancestors,
        checkpoint=checkpoint,
        replay=replay,
      ),
    )
    if checkpoint is None and isinstance(written[0], export_writer.WrittenExport):
      for store in stores:
        store.ancestors = [written[0].checksum]
    return written

  def _push(self, stores, one):
    owner = owner_of(shard_of(one[0]), len(stores))
    for r, store in enumerate(stores):
      store.push(*(c[owner == r] for c in one))

  @parameterized.parameters(*[(n, seed) for n in (1, 2, 3) for seed in (0, 1)])
  def test_base_and_deltas_replay_to_the_shadow(self, size, seed):
    rng = np.random.default_rng(seed)
    stores, shadow = [Store() for _ in range(size)], Shadow()
    seen = {'tombstones': 0, 'older': 0, 'back': 0}
    for day in range(12):
      for part in range(rng.integers(1, 4)):
        one = make_pass(rng)
        self._push(stores, one)
        shadow.push(*one)
        before = dict(shadow.exported)
        if rng.random() < 0.8:
          written, gone = shadow.export('delta')
          results = self._write(stores, 'delta', {'day': day, 'part': part})
          for result in results:
            self.assertEqual((result.rows, result.tombstones), (len(written), len(gone)))
          self.assertEqual(replay(self.directory), shadow.exported)
          self.assertEqual(shadow.exported.keys(), shadow.filtered())
          seen['tombstones'] += len(gone)
          seen['older'] += sum(shadow.exported[k] != shadow.row(k) for k in shadow.exported)
          seen['back'] += sum(shadow.features[k]['pushes'] > 1 and k not in before for k in written)
      if rng.random() < 0.4:
        shadow.export('base')
        self._write(stores, 'base', {'day': day})
        self.assertEqual(replay(self.directory), shadow.exported)
        self.assertEqual(shadow.exported, {k: shadow.row(k) for k in shadow.filtered()})
      shadow.end_day()
      for store in stores:
        store.decay()
        store.evict()
        store.age()
      self.assertEqual(sum(int(s.size()) for s in stores), len(shadow.features))
    for what, count in seen.items():  # the days held every case
      self.assertGreater(count, 0, what)

  @parameterized.parameters(None, 0.75)
  def test_a_delta_that_looks_at_what_changed_alone_is_that_of_all_features(self, threshold):
    rng = np.random.default_rng(3)
    policy = dataclasses.replace(
      POLICY, base_threshold=None, delta_keep_days=None, delta_threshold=threshold
    )
    one, other, kept = Store(policy), Store(policy), chain.Replay()
    among = []
    one.select = lambda kind, of=None: among.append(of) or FeatureLifecycle.select(one, kind, of)
    keys, ones, folder = 1 << 52 | np.arange(30_000), np.ones(30_000), f'{self.run_dir}/other'

    def export(kind, part, fails=False):
      among.clear()
      if fails:
        with mock.patch.object(files, 'publish', side_effect=OSError('disk is full')):
          (result,) = self._write([one], kind, {'part': part}, replay=kept)
        self.assertIsInstance(result, UserError)
        return
      (seen,) = self._write([one], kind, {'part': part}, replay=kept)
      (anew,) = self._write([other], kind, {'part': part}, folder)
      self.assertEqual(
        files.read_manifest(seen.path)['made_of'], files.read_manifest(anew.path)['made_of']
      )
      self.assertEqual(seen.tombstones, anew.tombstones)

    def push(keys):
      shows = rng.integers(1, 5, len(keys)).astype(np.float64)
      for store in (one, other):
        store.push(keys, shows, np.minimum(shows, 1) * (keys % 3 == 0))

    for store in (one, other):
      store.push(keys, ones, ones)
    export('base', 0)
    looked = []
    for part in range(1, 13):
      push(rng.choice(1 << 52 | np.arange(31_000), 900, replace=False))
      if part == 5:
        export('delta', part, fails=True)  # the next one looks at all
      if part == 7:
        for store in (one, other):
          store.decay()
          store.evict()
          store.age()
      if part == 9:
        export('base', 'of the day')
        push(rng.choice(keys, 100, replace=False))
      export('delta', part)
      looked.append(among[0] is not None)
    self.assertEqual(looked, [part not in (5, 7) for part in range(1, 13)])
    self.assertEqual(replay(self.directory), replay(f'{folder}/exports'))

  def test_a_writer_reads_each_export_once_and_notices_what_others_did(self):
    rng, store, replay = np.random.default_rng(7), Store(), chain.Replay()

    def write(part, kind='delta'):
      store.push(*make_pass(rng))
      (written,) = self._write([store], kind, {'part': part}, replay=replay)
      links = replay.scan(self.directory)[2]
      live = replay.live_keys(links, range(SHARDS)).all()
      self.assertAllEqual(live, live_keys(self.directory))
      return written.path

    write(0, 'base')
    with mock.patch.object(chain, 'RowExport', wraps=chain.RowExport) as opened:
      replay.live_keys(replay.scan(self.directory)[2], range(SHARDS))
      self.assertEqual(opened.call_count, 0)
    paths = [write(part) for part in range(1, 5)]
    # Another process has taken the last one away, and written one of its name.
    shutil.rmtree(paths[-1])
    store.ancestors = [chain.RowExport(paths[-2]).checksum]
    store.push(*make_pass(rng))
    (again,) = self._write([store], 'delta', {'part': 'of another'})
    self.assertEqual(again.path, paths[-1])
    write(5)
    # Where the chain is broken, the next delta begins another.
    shutil.rmtree(paths[1])
    self.assertIsNone(chain.RowExport(write(6)).previous)

  def test_the_number_of_processes_may_change_within_a_chain(self):
    rng, shadow = np.random.default_rng(5), Shadow()
    stores = [Store()]
    for i, size in enumerate([1, 3, 2, 1]):
      before, pushes = stores, {k: v for s in stores for k, v in s.pushes.items()}
      stores = [Store() for _ in range(size)]
      for r, store in enumerate(stores):
        own, store.ancestors = shards_of(r, size), before[0].ancestors
        store.import_state([c for s in before for c in s.export_state(shards=own)])
        store.pushes = pushes
      one = make_pass(rng)
      self._push(stores, one)
      shadow.push(*one)
      shadow.export('delta' if i else 'base')
      self._write(stores, 'delta' if i else 'base', {'part': i})
      self.assertEqual(replay(self.directory), shadow.exported)

  def _days(self, rng):
    """Events of a few days: lists of (verb, argument), the same for the same rng."""
    for day in range(2):
      for part in range(2):
        yield 'push', make_pass(rng)
        yield 'delta', {'day': day, 'part': part}
      yield 'base', {'day': day}
      yield 'end', None

  def _play(self, stores, events, run_dir):
    for verb, argument in events:
      if verb == 'push':
        self._push(stores, argument)
      elif verb == 'end':
        for store in stores:
          store.decay()
          store.evict()
          store.age()
      else:
        for result in self._write(stores, verb, argument, run_dir):
          if isinstance(result, BaseException):
            raise result

  @parameterized.parameters(1, 2)
  def test_killed_anywhere_and_played_again_the_exports_are_the_same(self, size):
    events = list(self._days(np.random.default_rng(7)))
    whole = [Store() for _ in range(size)]
    self._play(whole, events, self.run_dir)
    wanted, stage, killed = contents(self.directory), 0, True
    while killed:
      stage += 4 if stage < 40 else 19
      run_dir = self.enter_context(tempfile.TemporaryDirectory())
      stores = [Store() for _ in range(size)]
      self._play(stores, events[:4], run_dir)
      saved = [s.copy() for s in stores]
      with self.subTest(stage=stage):
        patches = self._patched(stage)
        try:
          self._play(stores, events[4:], run_dir)
          killed = False
        except (Killed, threading.BrokenBarrierError):
          pass
        finally:
          for p in patches:
            p.stop()
        directory = os.path.join(run_dir, 'exports')
        for _, _, path in chain.exports(directory):  # what is visible is whole
          name = os.path.basename(path)
          self.assertEqual(
            contents(path),
            {os.path.relpath(n, name): b for n, b in wanted.items() if n.startswith(name)},
          )
        self._play(saved, events[4:], run_dir)
        self.assertEqual(contents(directory), wanted)
        for a, b in zip(whole, saved):
          self.assertEqual(
            [{n: np.asarray(c).tolist() for n, c in chunk.items()} for chunk in a.export_state()],
            [{n: np.asarray(c).tolist() for n, c in chunk.items()} for chunk in b.export_state()],
          )
    self.assertGreater(stage, 40)

  def _patched(self, n):
    """The n-th fsync, rename or open of a file from now on raises;

    every write lies between two of them.
    """
    count = [0]

    def counting(original):
      def call(*args, **kwargs):
        count[0] += 1
        if count[0] == n:
          raise Killed()
        return original(*args, **kwargs)

      return call

    patches = [
      mock.patch.object(target, name, counting(getattr(target, name)))
      for target, name in ((os, 'fsync'), (os, 'rename'), (builtins, 'open'))
    ]
    for p in patches:
      p.start()
    return patches

  def test_nothing_is_committed_where_the_export_failed(self):
    rng = np.random.default_rng(3)
    stores = [Store(), Store()]
    self._push(stores, make_pass(rng))
    before = [list(s.export_state()) for s in stores]
    with mock.patch.object(pq, 'ParquetWriter', side_effect=OSError(28, 'No space left on device')):
      for e in self._write(stores, 'base', {'day': 1}):
        self.assertIsInstance(e, UserError)
        self.assertRegex(
          str(e), f'cannot export into {self.directory}: No space left on device; wanted free space'
        )
    for a, b in zip(before, [list(s.export_state()) for s in stores]):
      self.assertAllEqual(
        np.concatenate([c['delta_score'] for c in a]), np.concatenate([c['delta_score'] for c in b])
      )
    self.assertEqual(chain.exports(self.directory), [])
    self.assertEqual(
      [r.path for r in self._write(stores, 'base', {'day': 1})],
      [os.path.join(self.directory, '000001-base')] * 2,
    )

  def test_a_broken_chain_begins_anew(self):
    rng, store = np.random.default_rng(4), Store()
    for i, kind in enumerate(['base', 'delta', 'delta']):
      store.push(*make_pass(rng))
      self._write([store], kind, {'part': i})
    shutil.rmtree(os.path.join(self.directory, '000002-delta'))
    with self.assertLogs('absl', 'WARNING') as logs:
      self._write([store], 'delta', {'part': 9})
    self.assertRegex(logs.output[0], '000002-delta: is missing, and .*000003-delta follows it')
    path = chain.exports(self.directory)[-1][2]
    manifest = files.read_manifest(path)
    self.assertEqual(
      (manifest['base'], manifest['previous'], manifest['sequence']), (None, None, 4)
    )
    keys = pq.read_table(os.path.join(path, 'rows-00000-of-00001.parquet'))['key'].to_numpy()
    self.assertAllEqual(np.sort(keys), np.sort(store.select('base').numpy()))

  def test_a_run_that_goes_on_with_other_slots_begins_a_chain(self):
    rng, store = np.random.default_rng(4), Store()
    slots = [slot.model_dump(exclude_defaults=True) for slot in self.cfg.data.slots]
    for i, changes in enumerate(
      (
        {'data.slots': slots[::-1]},
        {'sparse.tables.default.width': 9},
        {'model.interactions': ['linear']},
      )
    ):
      for kind in ('base', 'delta'):
        store.push(*make_pass(rng))
        self._write([store], kind, {'part': [i, kind]})
      self.cfg = make_config(changes)
      store.push(*make_pass(rng))
      self._write([store], 'delta', {'part': [i, 'new']})
      export_ = chain.RowExport(chain.exports(self.directory)[-1].path)
      self.assertTrue(export_.begins_chain)
      keys = export_.keys('rows', shards_of(0, 1))
      self.assertAllEqual(np.sort(keys), np.sort(store.select('base').numpy()))
      self._write([store], 'delta', {'part': [i, 'after']})
      self.assertLen(chain.chain(self.directory), 2)

  def test_a_damaged_chain_is_refused(self):
    rng, store = np.random.default_rng(4), Store()
    store.push(*make_pass(rng))
    self._write([store], 'base', {})
    os.truncate(os.path.join(self.directory, '000001-base/rows-00000-of-00001.parquet'), 100)
    (error,) = self._write([store], 'delta', {})
    self.assertRegex(str(error), 'rows-00000-of-00001.parquet: has 100 bytes; wanted')

  def test_a_flipped_bit_never_changes_what_a_chain_holds(self):
    rng, store = np.random.default_rng(6), Store()
    for i, kind in enumerate(['base', 'delta', 'delta']):
      store.push(*make_pass(rng))
      self._write([store], kind, {'part': i})
    wanted = live_keys(self.directory)
    self.assertNotEmpty(wanted)
    parts = [
      os.path.join(folder, name)
      for folder, _, names in os.walk(self.directory)
      for name in names
      if name.endswith('.parquet')
    ]
    refused = 0
    for _ in range(300):
      path = parts[rng.integers(len(parts))]
      with open(path, 'rb') as f:
        original = f.read()
      flipped = bytearray(original)
      flipped[rng.integers(len(flipped))] ^= 1 << rng.integers(8)
      with open(path, 'wb') as f:
        f.write(flipped)
      try:
        found = live_keys(self.directory)
        self.assertAllEqual(found, wanted)
      except DataLoss as e:
        self.assertIn(path, str(e))
        refused += 1
      with open(path, 'wb') as f:
        f.write(original)
    self.assertGreater(refused, 50)

  def test_a_delta_of_the_state_of_a_base_is_empty(self):
    """Also where the base's gains were not committed: another process exported it."""
    rng, store = np.random.default_rng(8), Store()
    store.push(*make_pass(rng))
    store.ancestors = [7]
    self._write([store.copy()], 'base', {'last': 'p1'}, checkpoint=7)
    (delta,) = self._write([store.copy()], 'delta', {'last': 'p1'}, checkpoint=7)
    self.assertEqual((delta.rows, delta.tombstones), (0, 0))
    (delta,) = self._write([store.copy()], 'delta', {'last': 'p2'}, checkpoint=7)
    self.assertGreater(delta.rows, 0)

  def test_a_folder_of_its_own_needs_no_run_dir(self):
    store, folder = Store(), os.path.join(self.get_temp_dir(), 'elsewhere')
    store.push(*make_pass(np.random.default_rng(8)))
    found = [
      export_writer.write(
        self.cfg.model_copy(update={'run_dir': '/proc/nothing'}),
        kind,
        {'last': 'p1'},
        store=store,
        model=MODEL,
        dense_stats=STATS,
        folder=folder,
        ancestors=[7],
        checkpoint=7,
      )
      for kind in ('base', 'delta')
    ]
    self.assertGreater(found[0].rows, 0)
    self.assertEqual(found[1].rows, 0)
    self.assertLen(chain.chain(folder), 2)

  def test_old_exports_are_removed(self):
    self.cfg = self.cfg.model_copy(update={'export': config.Export(keep=2)})
    rng, store = np.random.default_rng(9), Store()

    def left():
      return [os.path.basename(one.path) for one in chain.exports(self.directory)]

    for i, kind in enumerate(['delta', 'base', 'delta', 'base', 'delta', 'delta']):
      store.push(*make_pass(rng))
      self._write([store], kind, {'part': i})
    self.assertEqual(
      left(), ['000002-base', '000003-delta', '000004-base', '000005-delta', '000006-delta']
    )
    store.push(*make_pass(rng))
    self._write([store], 'base', {'part': 9})
    self.assertEqual(left(), ['000004-base', '000005-delta', '000006-delta', '000007-base'])
    self.assertLen(chain.chain(self.directory), 1)

  def test_manifest_and_files(self):
    rng, store = np.random.default_rng(4), Store()
    store.push(*make_pass(rng))
    self._write([store], 'base', {'pass': 'p1'})
    self._write([store], 'delta', {'pass': 'p1'})
    path = os.path.join(self.directory, '000002-delta')
    self.assertEqual(
      sorted(os.listdir(path)),
      [
        'DONE',
        'MANIFEST.json',
        'config.yaml',
        'dense.npz',
        'rows-00000-of-00001.parquet',
        'tombstones-00000-of-00001.parquet',
      ],
    )
    position = {'pass': 'p1', 'rules': POLICY.serialize()}
    manifest = files.read_manifest(path)
    self.assertEqual(
      [
        manifest[k]
        for k in ('kind', 'sequence', 'base', 'previous', 'position', 'parts', 'rows', 'tombstones')
      ],
      ['delta', 2, '000001-base', '000001-base', position, 1, 0, 0],
    )
    with np.load(os.path.join(path, 'dense.npz')) as z:
      self.assertAllEqual(z['000/bias:0'], [1.0, 2.0])
    self.assertEqual(
      pq.read_schema(os.path.join(path, 'rows-00000-of-00001.parquet')).names,
      ['key', 'slot', 'linear', 'factors'],
    )

  def test_rows_in_bfloat16_take_half_the_room(self):
    """Numbers are those of the store, to the bit."""
    sizes, n, width = {}, 20_000, 32
    keys = row_files.by_shard((1 << 52) + np.arange(n))
    for dtype in ('float32', 'bfloat16'):
      spec = TableSpec('default', (FactorPart('plain', width),), dtype=dtype)
      policy = Policy(admission_threshold=0.0)
      store = RowStore(policy, tables=[spec], slot_table=[-1, 0])
      ids, offsets = np.full(n, -1), np.zeros(n + 1, np.int32)
      one, rule = np.ones(n, np.float32), config.RowOptimizer()
      none, hyper = PulledRows(ids, offsets, None, None), row_optimizers.hyper([(rule, rule)])
      store.push(keys, none, one, one, one, [], [1.0], hyper, tf.constant(1, tf.int64))
      path = os.path.join(self.get_temp_dir(), f'{dtype}.parquet')
      row_files.write_parquet(path, row_files.SCHEMA, row_files.row_tables(store, keys))
      sizes[dtype] = os.path.getsize(path)
      rows = store.pull(keys, train=False)
      read = chain.concatenate(list(chain.read_rows(path)))
      self.assertAllEqual(read.key, keys)
      self.assertAllEqual(read.linear, rows.linear)
      self.assertAllEqual(read.factors, rows.factors)
    self.assertLess(sizes['bfloat16'], 0.6 * sizes['float32'])

  def test_exports_of_two_processes_take_turns(self):
    """Two begin at once; one that is held up for too long is told by whom."""
    store = Store()
    store.push(np.arange(20), np.ones(20, np.float32), np.ones(20, np.float32))
    cfg = make_config({}).model_copy(update={'run_dir': self.get_temp_dir() + '/two'})

    def write(number, **options):
      at = {'number': number}
      done = export_writer.write(
        cfg, 'base', at, store=store, model=MODEL, dense_stats=STATS, **options
      )
      return os.path.basename(done.path), done.rows

    writing = [in_thread(lambda n=n: write(n)) for n in range(4)]
    found = sorted(one.result(60) for one in writing)
    self.assertEqual(found, [(f'00000{n}-base', 20) for n in range(1, 5)])
    with files.exclusive(os.path.join(cfg.run_dir, export_writer.LOCK)):
      with mock.patch.object(export_writer, 'PATIENCE', 0.1):
        wanted = (
          rf'exports.lock: process {os.getpid()} on host \S+ has held it for 0 s; wanted that'
        )
        with self.assertRaisesRegex(UserError, wanted):
          write(5)
    self.assertEqual(write(5)[0], '000005-base')


if __name__ == '__main__':
  tf.test.main()
