"""Checkpoints:

lossless, atomic, of any number of processes for any other; every kind of damage is refused in one
line.
"""

import builtins
import errno
import json
import os
import shutil
import tempfile
import threading
import warnings
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from ops import chunks as chunks_of_features
from ops import row_optimizers
from ops.dedupe import dedupe
from ops.policy import Policy
from ops.row_store import FactorPart, RowStore, TableSpec
from ops.sharding import SHARDS, shard_of, shards_of, table_shard_of
from tests.support.threads import on_threads
from trainer import errors, files
from trainer.config import RowOptimizer
from trainer.errors import UserError
from trainer.storage import checkpoint, checkpoint_rows
from trainer.storage import merger as merger_module
from trainer.storage.checkpoint import Checkpoints
from trainer.storage.merger import Merger, Scrub

WIDTH = {'small': 4, 'wide': 6}  # floats of an admitted row in each table, optimizer state included
TABLE_SLOTS = {'small': [1, 3], 'narrow': [1, 3], 'wide': [2]}


class Store:
  """Columns in memory, a chunk of at most 7 rows at a time.

  Imports add, as parameter servers' do.
  """

  def __init__(self, columns=None):
    self.chunks = columns or []

  tables, slot_table = (), ()

  def size(self):
    return sum(len(chunk['key']) for chunk in self.chunks)

  def count_changes(self):
    return -1

  def keep_changes(self):
    pass

  def export_state(self, changed=False):
    return iter(self.chunks)

  def within(self, chunk, shards):
    shard = shard_of(chunk['key'])
    kept = (shard >= shards.start) & (shard < shards.stop)
    return chunks_of_features.select(chunk, kept, TABLE_SLOTS)

  def import_state(self, chunks):
    for chunk in chunks:
      self.chunks.append(chunk)

  def clear(self):
    self.chunks = []

  def rows(self):
    """key -> tuple of its bytes in every column."""
    out = {}
    for c in self.chunks:
      at = dict.fromkeys(['small', 'narrow', 'wide'], 0)
      for i, key in enumerate(c['key']):
        row = [
          column[i].tobytes()
          for name, column in sorted(c.items())
          if not name.startswith('factors')
        ]
        table = 'wide' if c['slot'][i] == 2 else 'small' if 'factors_small' in c else 'narrow'
        if c['admitted'][i]:
          row.append(c['factors_' + table][at[table]].tobytes())
          at[table] += 1
        assert int(key) not in out
        out[int(key)] = tuple(row)
    return out


def make_chunks(n, rng):
  slot = rng.integers(1, 4, n)
  keys = slot << 52 | rng.integers(0, 1 << 52, n)
  keys = keys[np.argsort(shard_of(keys), kind='stable')]
  chunks = []
  for begin in range(0, n, 7):
    key = keys[begin : begin + 7]
    m = len(key)
    slots = (key >> 52).astype(np.uint16)
    admitted = rng.random(m) < 0.5
    unseen, age, step = (rng.integers(0, 9, m) for _ in range(3))
    chunk = {
      'key': key,
      'show': rng.random(m),
      'click': rng.random(m),
      'delta_score': rng.random(m),
      'unseen_days': unseen.astype(np.uint16),
      'age_days': age.astype(np.uint16),
      'slot': slots,
      'admitted': admitted,
      'linear': rng.random([m, 2], np.float32),
      'last_step': step.astype(np.int32),
    }
    for name, width in WIDTH.items():
      chunk['factors_' + name] = rng.standard_normal(
        [np.sum(admitted & np.isin(slots, TABLE_SLOTS[name])), width]
      ).astype(np.float32)
    chunks.append(chunk)
  return chunks


def split(chunks, size, shards_of_owner=shards_of):
  """The stores of `size` owners."""
  whole = Store(chunks)
  return [
    Store([c for c in (whole.within(c, shards_of_owner(r, size)) for c in chunks) if len(c['key'])])
    for r in range(size)
  ]


DENSE = {
  'model/dnn/kernel:0': np.arange(6, dtype=np.float32).reshape(2, 3),
  'step': np.int64(7),
  'empty': np.zeros([0, 3]),
}
PROGRESS = {'epoch': 1, 'last': 'day_3', 'rate': 0.1, 'best': None}


def save(directory, stores, step=5, keep=3, dense=None):
  return on_threads(
    len(stores),
    lambda communicator: Checkpoints(directory, communicator, keep).save(
      step,
      store=stores[communicator.rank],
      dense=DENSE if dense is None else dense,
      progress=PROGRESS,
      config_text='seed: 1\n',
    ),
  )


def restore(directory, size):
  stores = [Store() for _ in range(size)]
  return stores, on_threads(
    size,
    lambda communicator: Checkpoints(directory, communicator).restore(stores[communicator.rank]),
  )


class Killed(BaseException):
  """Stands for SIGKILL: nothing catches it, nothing is cleaned up."""


class CheckpointTest(tf.test.TestCase, parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.directory = os.path.join(self.enter_context(tempfile.TemporaryDirectory()), 'checkpoints')
    self.chunks = make_chunks(3000, np.random.default_rng(0))
    self.rows = Store(self.chunks).rows()

  @parameterized.parameters((1, 1), (1, 3), (3, 2), (2, 1), (2, 3), (3, 1), (1, 2), (2, 2), (3, 3))
  def test_any_number_reads_any_others(self, writers, readers):
    paths = save(self.directory, split(self.chunks, writers))
    self.assertEqual(paths, [os.path.join(self.directory, 'ckpt-000000005')] * writers)
    stores, results = restore(self.directory, readers)
    union = {}
    for rank, (store, (path, dense, progress)) in enumerate(zip(stores, results)):
      self.assertEqual(path, paths[0])
      self.assertEqual(progress, PROGRESS)
      self.assertEqual(dense.keys(), DENSE.keys())
      for name, value in DENSE.items():
        self.assertEqual(dense[name].dtype, np.asarray(value).dtype)
        self.assertAllEqual(dense[name], value)
      own = shards_of(rank, readers)
      for chunk in store.chunks:
        self.assertTrue(np.isin(shard_of(chunk['key']), own).all())
      union.update(store.rows())
    self.assertEqual(union, self.rows)
    for name in ('key', 'linear'):  # in the order of shards
      self.assertAllEqual(
        np.concatenate([c[name] for s in stores for c in s.chunks]),
        np.concatenate([c[name] for c in self.chunks]),
      )

  def test_each_process_reads_only_its_own_rows(self):
    save(self.directory, split(self.chunks, 1))
    (path,) = checkpoint.candidates(self.directory)
    # Much of the first three quarters of the bytes is damaged, and the reader of the last quarter
    # of the shards does not see it.
    name = os.path.join(path, 'rows-1-00000-of-00001.bin')
    with open(name, 'r+b') as f:
      f.write(b'\xff' * int(os.path.getsize(name) * 0.6))
    own, store = shards_of(3, 4), split(self.chunks, 4)[3]
    found = checkpoint_rows.read_rows(path, checkpoint.check(path), own)
    self.assertEqual(Store([store.within(chunk, own) for chunk in found]).rows(), store.rows())
    with self.assertRaisesRegex(
      errors.DataLoss, '00001.bin: the checksum of its block at byte 0 is .*; wanted'
    ):
      list(checkpoint_rows.read_rows(path, checkpoint.check(path), range(SHARDS)))

  def test_rows_take_no_more_bytes_than_they_hold(self):
    save(self.directory, split(self.chunks, 1))
    (path,) = checkpoint.candidates(self.directory)
    held = sum(column.nbytes for chunk in self.chunks for column in chunk.values())
    self.assertEqual(os.path.getsize(os.path.join(path, 'rows-1-00000-of-00001.bin')), held)
    rows = {'rows-1-00000-of-00001.bin', 'rows-1-00000-of-00001.json'}
    self.assertEqual(
      set(os.listdir(path)),
      rows | {'dense.npz', 'progress.json', 'config.yaml', 'MANIFEST.json', 'DONE'},
    )
    with open(os.path.join(path, 'config.yaml'), encoding='utf-8') as f:
      self.assertEqual(f.read(), 'seed: 1\n')

  @parameterized.parameters('float32', 'bfloat16')
  def test_the_row_store_comes_back_to_the_bit(self, dtype):
    tables = [
      TableSpec('narrow', (FactorPart('plain', 2),), factors='adam', linear='ftrl'),
      TableSpec('wide', (FactorPart('plain', 5),), linear='adam', dtype=dtype),
    ]

    def make():
      return RowStore(
        Policy(admission='count', admission_count=3.0), tables=tables, slot_table=[-1, 0, 1]
      )

    rng, one = np.random.default_rng(0), make()
    hyper = row_optimizers.hyper([(RowOptimizer(), RowOptimizer())] * 2)
    for step in range(1, 4):
      d = dedupe(rng.integers(1, 3, 900) << 52 | rng.integers(0, 400, 900))
      rows = one.pull(d.unique)
      noise = [rng.standard_normal(t.shape).astype(np.float32) for t in (rows.linear, rows.factors)]
      one.push(
        d.unique, rows, d.shows, d.clicks, *noise, tf.ones([1]), hyper, tf.constant(step, tf.int64)
      )
    one.decay()
    one.age()
    wanted = Store(list(one.export_state())).rows()
    Checkpoints(self.directory).save(1, store=one, dense={}, progress={}, config_text='')
    for size in (3, 2, 1):  # each reads what the one before wrote
      stores = [make() for _ in range(size)]
      on_threads(
        size,
        lambda communicator, stores=stores: Checkpoints(self.directory, communicator).restore(
          stores[communicator.rank]
        ),
      )
      self.assertEqual(
        {k: row for s in stores for k, row in Store(list(s.export_state())).rows().items()}, wanted
      )
      save(self.directory, stores, step=1 + size)
    self.assertGreater(len(wanted), 500)

  def test_blocks_of_wide_rows_are_small(self):
    keys = np.arange(1 << 52, (1 << 52) + 20_000)
    keys = keys[table_shard_of(keys) == 7][:40]
    store = RowStore(
      Policy(admission='none'),
      tables=[TableSpec('wide', (FactorPart('plain', 500_000),), factors='sgd')],
      slot_table=[-1, 0],
    )
    for part in np.array_split(keys, 10):
      rows = store.pull(part)
      store.push(
        part,
        rows,
        tf.ones([4]),
        tf.zeros([4]),
        tf.zeros([4]),
        tf.zeros_like(rows.factors),
        [1.0],
        row_optimizers.hyper([(RowOptimizer(), RowOptimizer(kind='sgd'))]),
        1,
      )
    chunks = [(len(chunk['key']), chunk['factors_wide'].nbytes) for chunk in store.export_state()]
    self.assertLess(max(size for _, size in chunks), 17 << 20)
    self.assertEqual(sum(n for n, _ in chunks), 40)

  def test_rows_of_another_layout_are_refused(self):
    save(self.directory, [Store(self.chunks)])
    store = RowStore(
      tables=[
        TableSpec('small', (FactorPart('plain', 1),)),
        TableSpec('wide', (FactorPart('plain', 9),)),
      ],
      slot_table=[-1, 0, 1, 0],
    )
    with self.assertRaisesRegex(UserError, 'ckpt-000000005: .* this table: .*wanted'):
      Checkpoints(self.directory).restore(store)

  def test_bfloat16_is_half_as_large_and_what_is_not_finite_is_refused(self):
    sizes = {}
    for dtype in ('float32', 'bfloat16'):
      spec = TableSpec('wide', (FactorPart('plain', 64),), factors='sgd', linear='sgd', dtype=dtype)
      store = RowStore(Policy(admission='none'), tables=[spec], slot_table=[-1, 0])
      keys = (1 << 52) + np.arange(300)

      def push(gradient, store=store, keys=keys):
        rows, one = store.pull(keys), tf.ones([300])
        rule = RowOptimizer(kind='sgd', learning_rate=1e6)
        hyper = row_optimizers.hyper([(rule, rule)])
        gradients = tf.zeros([300]), tf.fill([300 * 64], gradient)
        store.push(keys, rows, one, one, *gradients, [1.0], hyper, tf.constant(1, tf.int64))

      push(1e-6)
      save(self.directory, [store])
      path = os.path.join(self.directory, 'ckpt-000000005')
      (block,) = checkpoint_rows.read_rows(path, checkpoint.check(path), range(SHARDS))
      sizes[dtype] = block['factors_wide'].nbytes
      self.assertEqual(block['factors_wide'].dtype, spec.factors_dtype)
      push(1e32 if dtype == 'float32' else 1e36)  # finite as float32, but their sum is not
      with warnings.catch_warnings():
        warnings.simplefilter('error')
        (refused,) = save(self.directory, [store], step=9)
      self.assertRegex(str(refused), '^after step 9, factors_wide holds values that are not finite')
      shutil.rmtree(self.directory)
    self.assertEqual(sizes['bfloat16'] * 2, sizes['float32'])

  def test_a_process_without_rows(self):
    few = split(self.chunks, 85)[0].chunks  # of shards 0 to 3
    save(self.directory, split(few, 2))
    stores, _ = restore(self.directory, 3)
    self.assertEqual([len(s.rows()) > 0 for s in stores], [True, False, False])
    self.assertEqual(stores[0].rows(), Store(few).rows())

  def test_nothing_there_yet(self):
    self.assertIsNone(Checkpoints(self.directory).restore(Store()))

  def test_keeps_the_newest(self):
    for step in (1, 2, 3, 4):
      save(self.directory, [Store(self.chunks[:5])], step=step, keep=2)
    self.assertEqual(
      [os.path.basename(p) for p in checkpoint.candidates(self.directory)],
      ['ckpt-000000004', 'ckpt-000000003'],
    )

  def test_the_same_step_again_and_an_earlier_one_are_newer(self):
    for step in (7, 7, 7, 2):
      save(self.directory, [Store(self.chunks[:5])], step=step, keep=3)
    names = [os.path.basename(p) for p in checkpoint.candidates(self.directory)]
    self.assertEqual(names, ['ckpt-000000002', 'ckpt-000000007-3', 'ckpt-000000007-2'])

  # Damage

  def _damage(self, path, kind):
    own = f'rows-{checkpoint.check(path)["serial"]}-'
    part = os.path.join(path, f'{own}00001-of-00002')

    def flip(name, at):
      with open(os.path.join(path, name), 'r+b') as f:
        f.seek(at if at >= 0 else os.path.getsize(f.name) + at)
        byte = f.read(1)[0]
        f.seek(-1, 1)
        f.write(bytes([byte ^ 4]))

    if kind == 'missing_index':
      os.remove(part + '.json')
    elif kind == 'missing_rows':
      os.remove(part + '.bin')
    elif kind == 'foreign_part':
      shutil.copy(part + '.bin', os.path.join(path, f'{own}00001-of-00003.bin'))
    elif kind == 'truncated':
      os.truncate(part + '.bin', os.path.getsize(part + '.bin') - 4)
    elif kind == 'not_done':
      os.remove(os.path.join(path, 'DONE'))
    else:
      name, at = kind.rsplit('@', 1)
      flip(name.replace('rows-', own), int(at))

  @parameterized.parameters(
    ('missing_index', '00001-of-00002.json: is missing'),
    ('missing_rows', '00001-of-00002.bin: is missing'),
    ('foreign_part', '00001-of-00003.bin: .* does not list it'),
    ('truncated', '00001-of-00002.bin: has .* bytes; wanted'),
    ('rows-00001-of-00002.bin@-1', '00002.bin: the checksum of its block at byte'),
    ('rows-00001-of-00002.bin@9', '00002.bin: the checksum of its block at byte 0'),
    ('rows-00000-of-00002.bin@30000', '00002.bin: the checksum of its block at byte'),
    ('rows-00000-of-00002.json@50', '00002.json: its checksum'),
    ('dense.npz@100', 'dense.npz: its checksum'),
    ('progress.json@5', 'progress.json: its checksum'),
    ('config.yaml@1', 'config.yaml: its checksum'),
    ('MANIFEST.json@9', 'MANIFEST.json: its checksum'),
    ('DONE@3', 'DONE: is damaged'),
    ('DONE@-3', 'MANIFEST.json: its checksum'),
  )
  def test_damage_is_refused_in_one_line_and_the_one_before_is_used(self, kind, message):
    before = make_chunks(500, np.random.default_rng(1))
    save(self.directory, split(before, 1), step=1)
    save(self.directory, split(self.chunks, 2), step=2)
    self._damage(os.path.join(self.directory, 'ckpt-000000002'), kind)
    with self.assertLogs('absl', 'WARNING') as logs:
      stores, results = restore(self.directory, 2)
    self.assertEqual([os.path.basename(r[0]) for r in results], ['ckpt-000000001'] * 2)
    self.assertEqual({**stores[0].rows(), **stores[1].rows()}, Store(before).rows())
    self.assertRegex('\n'.join(logs.output), message)
    shutil.rmtree(os.path.join(self.directory, 'ckpt-000000001'))
    _, errors = restore(self.directory, 2)
    for e in errors:
      self.assertIsInstance(e, UserError)
      self.assertRegex(str(e), message)
      self.assertNotIn('\n', str(e))

  def test_not_done_is_passed_over(self):
    save(self.directory, split(self.chunks, 2), step=1)
    save(self.directory, split(self.chunks[:9], 2), step=2)
    self._damage(os.path.join(self.directory, 'ckpt-000000002'), 'not_done')
    _, results = restore(self.directory, 1)
    self.assertEqual(os.path.basename(results[0][0]), 'ckpt-000000001')
    with self.assertRaisesRegex(errors.DataLoss, 'DONE: is missing; the directory does not count'):
      checkpoint.restore(os.path.join(self.directory, 'ckpt-000000002'), store=Store())

  # Atomicity

  def test_killed_at_every_stage(self):
    old, new = make_chunks(40, np.random.default_rng(2)), make_chunks(60, np.random.default_rng(3))
    stage, killed = 0, True
    while killed:
      stage += 3
      shutil.rmtree(self.directory, ignore_errors=True)
      save(self.directory, [Store(old)], step=1)
      with self.subTest(stage=stage):
        patches = self._patched(stage, Killed)
        (result,) = save(self.directory, [Store(new)], step=2)
        for p in patches:
          p.stop()
        killed = isinstance(result, Killed)
        self.assertTrue(killed or isinstance(result, str), result)
        found = [os.path.basename(p) for p in checkpoint.candidates(self.directory)]
        store = Store()
        path, _, _ = Checkpoints(self.directory).restore(store)
        self.assertIn(found, (['ckpt-000000001'], ['ckpt-000000002', 'ckpt-000000001']))
        self.assertEqual(store.rows(), Store(new if len(found) == 2 else old).rows())
        # The next save works, whatever was left, and leaves nothing unfinished.
        (again,) = save(self.directory, [Store(new)], step=2)
        self.assertTrue(os.path.isdir(again))
        self.assertEqual(
          {os.path.join(self.directory, n) for n in os.listdir(self.directory)},
          set(checkpoint.candidates(self.directory)),
        )
    self.assertGreater(stage, 25)

  def _patched(self, n, error):
    """The n-th fsync, rename or open from now on raises; every write lies between two of them."""
    count = [0]

    def counting(original):
      def call(*args, **kwargs):
        count[0] += 1
        if count[0] == n:
          raise error()
        return original(*args, **kwargs)

      return call

    patches = [
      mock.patch.object(target, name, counting(getattr(target, name)))
      for target, name in ((os, 'fsync'), (os, 'rename'), (builtins, 'open'))
    ]
    for p in patches:
      p.start()
    return patches

  @parameterized.parameters(
    (errno.ENOSPC, 'No space left on device.*wanted free space'),
    (errno.EACCES, 'Permission denied'),
    (errno.EROFS, 'Read-only file system.*can be written'),
  )
  def test_the_system_refuses(self, number, message):
    save(self.directory, split(self.chunks, 2), step=1)
    before = sorted(os.walk(self.directory))
    for n in (1, 4, 12, 25):
      patches = self._patched(n, lambda: OSError(number, os.strerror(number)))
      results = save(self.directory, split(self.chunks, 2), step=2)
      for p in patches:
        p.stop()
      for e in results:
        self.assertIsInstance(e, UserError)
        self.assertRegex(str(e), f'^cannot save a checkpoint in {self.directory}: .*{message}')
        self.assertNotIn('\n', str(e))
      self.assertEqual(sorted(os.walk(self.directory)), before)
    stores, _ = restore(self.directory, 1)
    self.assertEqual(stores[0].rows(), self.rows)

  def test_without_descriptors_no_checkpoint_counts_as_damaged(self):
    for step in (1, 2):
      save(self.directory, split(self.chunks, 1), step=step)
    lacks = lambda: OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    for n in range(1, 6):
      with mock.patch.object(files.time, 'sleep'):  # once others have closed theirs, it goes on
        patches = self._patched(n, lacks)
        path, _, _ = Checkpoints(self.directory).restore(Store())
        for p in patches:
          p.stop()
      self.assertEndsWith(path, 'ckpt-000000002')
    opened = lambda path, *_, **__: exec('raise e', {'e': lacks()})
    with mock.patch.object(files, '_PATIENCE', 0), mock.patch.object(builtins, 'open', opened):
      with self.assertRaisesRegex(errors.Exhausted, 'Too many open files'):
        Checkpoints(self.directory).restore(Store())

  def test_a_file_size_limit_is_one_line(self):
    """A true refusal by the system, in the middle of a column."""
    import resource
    import signal

    save(self.directory, split(self.chunks, 1), step=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
      resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
      with self.assertRaisesRegex(UserError, 'cannot save a checkpoint in .*File too large'):
        Checkpoints(self.directory).save(
          2, store=Store(self.chunks), dense={}, progress={}, config_text=''
        )
    finally:
      resource.setrlimit(resource.RLIMIT_FSIZE, limits)
      signal.signal(signal.SIGXFSZ, handler)
    self.assertEqual(os.listdir(self.directory), ['ckpt-000000001'])

  def test_a_file_where_the_directory_should_be(self):
    path = self.enter_context(tempfile.NamedTemporaryFile()).name
    with self.assertRaisesRegex(UserError, f'cannot save a checkpoint in {path}: '):
      Checkpoints(path).save(1, store=Store(), dense={}, progress={}, config_text='')

  def test_progress_is_json(self):
    (path,) = save(self.directory, [Store()])
    with open(os.path.join(path, 'progress.json'), encoding='utf-8') as f:
      self.assertEqual(json.load(f), PROGRESS)


TABLES = (
  TableSpec('a', (FactorPart('plain', 3),), linear='adagrad', factors='adagrad'),
  TableSpec('b', (FactorPart('plain', 5),), linear='ftrl', factors='adam', dtype='bfloat16'),
)


def first_of(size, action):
  """What `action` returned to the first process, or the error that it raised."""
  found = on_threads(size, action)[0]
  if isinstance(found, Exception):
    raise found
  return found


class IncrementsTest(tf.test.TestCase, parameterized.TestCase):
  """A chain of saves that write changed rows alone is read as a save of all rows is."""

  def setUp(self):
    super().setUp()
    self.directory = tempfile.mkdtemp(dir=self.get_temp_dir())
    self.rng = np.random.default_rng(5)
    self.step = 0

  def stores(self, size):
    policy = Policy(admission='count', admission_count=2.0, eviction='unseen')
    table = {'tables': TABLES, 'slot_table': [-1, 0, 1], 'seed': 3}
    return [RowStore(policy, **table) for _ in range(size)]

  def push(self, stores, keys):
    """Trains on some features, each on its owner."""
    self.step += 1
    tables = [(RowOptimizer(kind=t.linear), RowOptimizer(kind=t.factors)) for t in TABLES]
    hyper = row_optimizers.hyper(tables)
    for rank, store in enumerate(stores):
      own = np.unique(keys)
      own = own[np.isin(shard_of(own), shards_of(rank, len(stores)))]
      ones = np.ones([len(own)], np.float32)
      d = dedupe(own, ones, 0 * ones)
      rows = store.pull(d.unique)
      gradients = tf.sin(tf.cast(d.unique % 97 + self.step, tf.float32))
      factors = tf.cos(tf.range(tf.size(rows.factors), dtype=tf.float32) * 0.1)
      store.push(d.unique, rows, d.shows, d.clicks, gradients, factors, [1.0], hyper, self.step)

  def keys(self, n, of=6000):
    keys = self.rng.integers(0, of, n)
    return (1 + keys % 2) << 52 | keys * 7919

  def save(self, stores, base, most_layers=20, keep=3, merger=None, scrub=None):
    if scrub and not merger:
      merger = Merger(self.directory, scrub)

    def save(communicator):
      rank = communicator.rank
      one = Checkpoints(self.directory, communicator, keep, most_layers, None if rank else merger)
      one.latest = base or ''
      state = {'dense': DENSE, 'progress': PROGRESS, 'config_text': 'seed: 1\n'}
      return one.save(self.step, store=stores[rank], **state)

    return first_of(len(stores), save)

  def two(self, stores, most_layers=20, merger=None):
    """Two checkpoints that share nothing; the next one adds to the second."""
    first = self.save(stores, None, most_layers, merger=merger)
    return self.save(stores, first, most_layers, merger=merger)

  def read(self, path, size):
    """The rows that a checkpoint gives to so many processes."""
    stores = self.stores(size)
    first_of(
      size,
      lambda communicator: checkpoint.restore(
        path, store=stores[communicator.rank], communicator=communicator
      ),
    )
    return self.rows(stores), stores

  def rows(self, stores):
    rows = {}
    for store in stores:
      for chunk in store.export_state():
        at = {name: 0 for name in chunk if name.startswith('factors_')}
        for i, key in enumerate(chunk['key'].tolist()):
          row = [c[i].tobytes() for name, c in chunk.items() if name not in at]
          name = 'factors_a' if chunk['slot'][i] == 1 else 'factors_b'
          if chunk['admitted'][i]:
            row.append(chunk[name][at[name]].tobytes())
            at[name] += 1
          self.assertNotIn(key, rows)
          rows[key] = row
    return rows

  def layers(self, path):
    return checkpoint.check(path)['layers']

  def own_bytes(self, path):
    names = [n for n in os.listdir(path) if n.startswith(f'rows-{self.layers(path)[-1][0]}-')]
    return sum(os.path.getsize(os.path.join(path, n)) for n in names)

  def test_any_chain_is_read_by_any_number(self):
    stores = self.stores(1)
    for _ in range(4):
      self.push(stores, self.keys(4000))
    path, sizes = self.two(stores), [1, 2, 3, 1, 2]
    full = self.own_bytes(path)
    self.assertLen(self.layers(path), 1)
    for size in sizes:
      rows, stores = self.read(path, size)
      for store in stores:
        store.keep_changes()
      self.assertEqual(rows, self.rows(stores))
      for _ in range(2):
        self.push(stores, self.keys(100, of=7000))
        before, path = path, self.save(stores, path)
        self.assertEqual(len(self.layers(path)), 1 + len(self.layers(before)))
        self.assertLess(self.own_bytes(path), full / 15)
        for reader in (1, 3):
          self.assertEqual(self.read(path, reader)[0], self.rows(stores))
        # The files of the earlier saves are the same, not copies.
        name = f'rows-{self.layers(path)[0][0]}-00000-of-00001.bin'
        files = [os.stat(os.path.join(p, name)).st_ino for p in (path, before)]
        self.assertEqual(*files)
    # The newest three, and the newest that shares nothing with them.
    self.assertLen(checkpoint.candidates(self.directory), 4)

  def test_when_all_rows_are_written(self):
    stores = self.stores(2)
    self.push(stores, self.keys(6000))
    path = self.two(stores)

    def saved(change, most_layers=20):
      nonlocal path
      change()
      path = self.save(stores, path, most_layers)
      self.assertEqual(self.read(path, 1)[0], self.rows(stores))
      return len(self.layers(path))

    few = lambda: self.push(stores, self.keys(50))
    self.assertEqual([saved(few, 3) for _ in range(4)], [2, 3, 1, 2])
    self.assertEqual(saved(lambda: self.push(stores, self.keys(9000))), 1)
    self.assertEqual(saved(few), 2)

    def end_of_day():
      for store in stores:
        store.decay()
        store.evict()
        store.age()

    self.assertEqual(saved(end_of_day), 1)
    self.assertEqual(saved(few), 2)
    for store in stores:
      key = next(store.export_state())['key'][:1]
      store.erase(key)
    self.assertEqual(saved(few), 1)
    path = None  # as after another run's rows were taken over
    self.assertEqual(saved(few), 1)
    os.remove(os.path.join(path, f'rows-{self.layers(path)[0][0]}-00001-of-00002.bin'))
    self.assertEqual(saved(few), 1)
    shutil.rmtree(path)
    self.assertEqual(saved(few), 1)

  def wait(self, name=Merger.THREAD):
    """Waits for a thread, as a run does not."""
    for thread in threading.enumerate():
      if thread.name == name:
        thread.join()

  def test_saves_are_merged_in_the_background(self):
    stores = self.stores(2)
    self.push(stores, self.keys(6000))
    merger = Merger(self.directory, Scrub())
    path, counts = self.two(stores, 6, merger), []
    for _ in range(12):
      self.push(stores, self.keys(40))
      path = self.save(stores, path, 6, merger=merger)
      for size in (1, 3):
        self.assertEqual(self.read(path, size)[0], self.rows(stores))
      counts.append(len(self.layers(path)))
      self.wait()
    # At four of at most six, all four become one, to which the next is added.
    self.assertEqual(counts, [2, 3, 4, 2, 3, 4, 2, 3, 4, 2, 3, 4])
    (whole,) = [layer for layer in self.layers(path) if layer[0].endswith('-merged')]
    self.assertEqual(whole[1:], [1, self.layers(path)[0][2]])
    # What comes between begins and end of a merge is kept beside it.
    gate, read = threading.Event(), merger_module.read_rows

    def late(*arguments):
      gate.wait()
      yield from read(*arguments)

    with mock.patch.object(merger_module, 'read_rows', late):
      merger.begin(path, checkpoint.check(path))
      merged = path
      for _ in range(2):
        self.push(stores, self.keys(40))
        path = self.save(stores, path, 9, keep=1, merger=merger)
      self.assertLen(self.layers(path), 6)
      self.assertIn(merged, checkpoint.candidates(self.directory))  # it is being read
      gate.set()
      self.wait()
    path = self.save(stores, path, 9, keep=1, merger=merger)
    self.assertEqual(
      [name.partition('-')[2] for name, *_ in self.layers(path)], ['merged', '', '', '']
    )
    self.assertEqual(self.read(path, 2)[0], self.rows(stores))
    self.assertEqual(list(checkpoint.candidates(self.directory)), [path])
    # A merge that fails costs nothing but a save of all rows.
    with mock.patch.object(merger_module, 'read_rows', side_effect=OSError(errno.ENOSPC, 'full')):
      for _ in range(5):
        self.push(stores, self.keys(40))
        path = self.save(stores, path, 6, merger=merger)
        self.wait()
        self.assertEqual(self.read(path, 2)[0], self.rows(stores))

  def test_a_save_that_fails_loses_no_change(self):
    stores = self.stores(1)
    self.push(stores, self.keys(6000))
    path = self.two(stores)
    self.push(stores, self.keys(70))
    with mock.patch.object(checkpoint.files, 'publish', side_effect=OSError(errno.ENOSPC, 'full')):
      with self.assertRaises(UserError):
        self.save(stores, path)
    self.push(stores, self.keys(70))
    path = self.save(stores, path)
    self.assertLen(self.layers(path), 2)
    self.assertEqual(self.read(path, 2)[0], self.rows(stores))

  def test_a_damaged_or_missing_increment_is_refused_by_name(self):
    stores = self.stores(1)
    self.push(stores, self.keys(6000))
    path = self.two(stores)
    for _ in range(3):
      self.push(stores, self.keys(60))
      path = self.save(stores, path)
    name = f'rows-{self.layers(path)[2][0]}-00000-of-00001'
    for damage, what in (('remove', 'is missing'), ('cut', 'has .* bytes'), ('flip', 'checksum')):
      for suffix in ('.bin', '.json'):
        damaged = os.path.join(self.get_temp_dir(), f'{damage}{suffix}')
        shutil.copytree(path, damaged)
        file = os.path.join(damaged, name + suffix)
        if damage == 'remove':
          os.remove(file)
        elif damage == 'cut':
          os.truncate(file, os.path.getsize(file) - 1)
        else:
          with open(file, 'r+b') as f:
            f.write(bytes([f.read(1)[0] ^ 4]) if not f.seek(0) else b'')
        with self.assertRaisesRegex(errors.DataLoss, f'{name}{suffix}.*{what}'):
          self.read(damaged, 1)

  # Damage to files that checkpoints share

  def newest(self, directory, scrub=None):
    """The path and the rows of the checkpoint that a run would go on from."""
    stores = self.stores(1)
    merger = Merger(directory, scrub) if scrub else None
    path, _, _ = Checkpoints(directory, merger=merger).restore(stores[0])
    return path, self.rows(stores)

  def flip(self, path, layer=0):
    """Flips a bit of a layer in place, for all checkpoints that share it."""
    name = f'rows-{self.layers(path)[layer][0]}-00000-of-0000{self.layers(path)[layer][1]}.bin'
    with open(os.path.join(path, name), 'r+b') as f:
      f.seek(os.path.getsize(f.name) // 2)
      byte = f.read(1)[0]
      f.seek(-1, os.SEEK_CUR)
      f.write(bytes([byte ^ 1]))

  @parameterized.parameters((2, 1), (3, 2), (10, 1))
  def test_damage_to_any_one_file_leaves_a_checkpoint(self, keep, size):
    """In place, where all checkpoints that share the file have the damage."""
    stores, states, path = self.stores(size), {}, None
    merger = Merger(self.directory, Scrub())
    self.push(stores, self.keys(900, of=900))
    for i in range(14):
      self.push(stores, self.keys(12, of=900))
      path = self.save(stores, path, 6, keep, merger)
      states[path] = self.rows(stores)
      if i % 3:
        self.wait()
      if i not in (1, 6, 13):
        continue
      files = {}  # by inode
      for one in checkpoint.candidates(self.directory):
        files |= {e.inode(): e.path for e in os.scandir(one)}
      self.assertLessEqual(len(checkpoint.candidates(self.directory)), keep + 2)
      for how, file in enumerate(sorted(files.values())):
        with open(file, 'rb') as f:
          data = f.read()
        if how % 2:
          os.truncate(file, len(data) // 2)
        else:
          with open(file, 'r+b') as f:
            f.seek(len(data) // 2)
            f.write(bytes([data[len(data) // 2] ^ 1]))
        found, rows = self.newest(self.directory)
        self.assertEqual(rows, states[found], file)
        with open(file, 'r+b') as f:  # mends it
          f.write(data)

  def test_after_damage_was_found_a_save_links_nothing(self):
    stores = self.stores(2)
    self.push(stores, self.keys(3000))
    scrub = Scrub()
    merger, path = Merger(self.directory, scrub), self.two(stores)
    for by in ('scrub', 'merger', 'restore'):
      with self.subTest(by=by):
        for _ in range(2):
          self.push(stores, self.keys(30))
          path = self.save(stores, path, keep=2, scrub=scrub)
        self.assertGreater(len(self.layers(path)), 1)
        paths = checkpoint.candidates(self.directory)
        with mock.patch.object(os, 'posix_fadvise', wraps=os.posix_fadvise) as forgets:
          scrub.begin(paths)
          self.wait(Scrub.THREAD)
        self.assertEqual(scrub.news, [], 'nothing is damaged')
        listed = [name for path in paths for name in checkpoint.check(path)['files']]
        self.assertEqual(forgets.call_count, len(listed), 'the disk is read, not the memory')
        self.flip(path)
        with self.assertLogs('absl', 'WARNING') as logs:
          if by == 'scrub':
            scrub.begin(checkpoint.candidates(self.directory))
            self.wait(Scrub.THREAD)
          elif by == 'merger':
            merger.begin(path, checkpoint.check(path))
            self.wait()
          else:
            self.newest(self.directory, scrub)
        self.assertIn('checksum of its block', '\n'.join(logs.output))
        self.assertNotEmpty(scrub.news)
        # A save that fails changes nothing of it.
        with mock.patch.object(checkpoint.files, 'publish', side_effect=OSError(28, 'full')):
          with self.assertRaises(UserError):
            self.save(stores, path, keep=2, scrub=scrub)
        self.push(stores, self.keys(30))
        with self.assertLogs('absl', 'WARNING') as logs:
          path = self.save(stores, path, keep=2, scrub=scrub)
        self.assertRegex(logs.output[0], 'writes all rows and links no file.*checksum of its block')
        self.assertLen(self.layers(path), 1)
        self.assertEqual(self.read(path, 1)[0], self.rows(stores))
        # There are still two copies without damage.
        self.flip(path)
        self.assertNotEqual(self.newest(self.directory)[0], path)
        self.flip(path)
        for _ in range(2):
          self.push(stores, self.keys(30))
          path = self.save(stores, path, keep=2, scrub=scrub)
        self.assertEqual(self.newest(self.directory), (path, self.rows(stores)))
        left = set(checkpoint.candidates(self.directory))
        self.assertEmpty(left & scrub.damaged, 'they are removed')

  def test_what_is_removed_by_hand_costs_a_line(self):
    stores, scrub = self.stores(1), Scrub()
    merger = Merger(self.directory, scrub)
    self.push(stores, self.keys(3000))
    path = self.two(stores, 6, merger)

    def saved(count=1):
      nonlocal path
      for _ in range(count):
        self.push(stores, self.keys(30))
        path = self.save(stores, path, 6, merger=merger, scrub=scrub)
        self.wait()
      self.assertEqual(self.newest(self.directory), (path, self.rows(stores)))
      return len(self.layers(path))

    self.assertEqual(saved(3), 4)  # which are merged
    shutil.rmtree(merger.folder)
    with self.assertLogs('absl', 'WARNING') as logs:
      self.assertEqual(saved(), 5)
    self.assertIn('merged rows are missing', logs.output[0])
    self.assertEqual(saved(), 2)
    for remove in (
      lambda: os.remove(os.path.join(path, f'rows-{self.layers(path)[0][0]}-00000-of-00001.bin')),
      lambda: shutil.rmtree(path),
    ):
      remove()
      with self.assertLogs('absl', 'WARNING') as logs:
        self.assertEqual(saved(), 1)
      self.assertRegex(
        logs.output[0], 'writes all rows and links no file of an earlier one: .*is mi'
      )
    shutil.rmtree(self.directory)
    self.assertEqual(saved(), 1)


if __name__ == '__main__':
  tf.test.main()
