"""Which passes there are, and that their global batches are the same for any number of ranks."""

import json
import os
import re
import shutil
from unittest import mock

import numpy as np
import tensorflow as tf

from ops.samples import SampleArrays
from tests.support import commands, small
from trainer.data import prepared
from trainer.data.parse import Parsed
from trainer.data.passes import (
  Pass,
  announced,
  day_after,
  days_between,
  folder_name,
  pass_day,
  passes,
)
from trainer.data.prepared import PreparedPass
from trainer.data.prepared_writer import Writer
from trainer.data.schema import schema
from trainer.errors import ConfigError, UserError

SLOTS, DENSE = 3, 2

# Cuts each file of a pass to several sizes while a process of its own has it open.
CUT_SHORT = """
import json, mmap, os, pathlib, sys
from trainer.data.prepared import PreparedPass
from trainer.errors import UserError

for file in sorted(pathlib.Path(sys.argv[1]).glob('*.npy')):
  whole = file.read_bytes()
  for left in sorted({0, mmap.PAGESIZE, len(whole) // 2, len(whole) - 1}):
    reader, stderr = os.pipe()
    if not (child := os.fork()):
      os.dup2(stderr, 2)
      opened = PreparedPass(sys.argv[1])
      os.truncate(file, left)
      try:
        list(opened.batches(512, shuffle=True))
      except UserError as e:
        print('error:', e, file=sys.stderr, flush=True)
        os._exit(2)
      os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.close(stderr)
    print(json.dumps([str(file), status, os.fdopen(reader).read()]))
    file.write_bytes(whole)
"""


def make_config(**data):
  tree = {
    'slots': [{'name': f's{i}'} for i in range(SLOTS)],
    'dense': [{'name': f'd{i}'} for i in range(DENSE)],
    'weight': 'w',
    'group': 's0',
  }
  return small.config(data=tree | data, model={'loss': 'squared_error'})


class PassesTest(tf.test.TestCase):
  def path(self, *names):
    return os.path.join(self.get_temp_dir(), *names)

  def touch(self, *names):
    for name in names:
      os.makedirs(os.path.dirname(self.path(name)), exist_ok=True)
      open(self.path(name), 'w').close()

  def names(self, cfg, *patterns, key='data.train'):
    return [one.name for one in passes(cfg.data, [self.path(p) for p in patterns], key)]

  def test_order_names_and_days(self):
    self.touch('day_10.csv', 'day_02.csv.gz', 'first_day_3.parquet', 'other/x')
    cfg = make_config(day_pattern=r'day_(\d+)')
    found = passes(cfg.data, [self.path('day_*'), self.path('first*')], 'data.train')
    self.assertEqual(
      found,
      [
        Pass('day_02', self.path('day_02.csv.gz'), 2),
        Pass('first_day_3', self.path('first_day_3.parquet'), 3),
        Pass('day_10', self.path('day_10.csv'), 10),
      ],
    )
    self.assertEqual(
      passes(cfg.data, [self.path('other/x')], 'data.test'), [Pass('x', self.path('other/x'), 0)]
    )
    self.assertEqual(passes(make_config().data, [self.path('day_10.csv')], 'data.train')[0].day, 0)

  def test_numbers_in_names_are_numbers(self):
    self.touch(*(f'h/part_{i}.csv' for i in (9, 10, 100, 1)), 'h/b.csv')
    wanted = ['b', 'part_1', 'part_9', 'part_10', 'part_100']
    self.assertEqual(self.names(make_config(), 'h/*'), wanted)
    self.assertEqual(
      self.names(make_config(), 'h/part_1*', 'h/b.csv'),
      ['part_1', 'part_10', 'part_100', 'b'],
      'without days a pattern at a time',
    )

  def test_days_are_dates_anywhere_in_the_path(self):
    for day in ('2024-02-01', '2024-01-31'):
      self.touch(f'log/dt={day}/part-0.csv', f'log/dt={day}/part-1.csv')
    one_group = make_config(day_pattern=r'dt=(\d+-\d+-\d+)')
    three = make_config(day_pattern=r'dt=(\d+)-(\d+)-(\d+)')
    for cfg in (one_group, three):
      found = passes(cfg.data, [self.path('log/dt=*/part-*')], 'data.train')
      self.assertEqual(
        [(one.name, one.day) for one in found],
        [
          ('dt=2024-01-31/part-0', 20240131),
          ('dt=2024-01-31/part-1', 20240131),
          ('dt=2024-02-01/part-0', 20240201),
          ('dt=2024-02-01/part-1', 20240201),
        ],
      )
    self.assertLen(set(map(folder_name, ('a/b', 'a+b', 'a%2Bb', 'a%2Fb', 'a_b'))), 5)
    for path, day in (('day_1/day_2.csv', 2), ('day_1/x.csv', 1), ('x.csv', None)):
      self.assertEqual(pass_day(make_config(day_pattern=r'day_(\d+)').data, path), day)

  def test_days_by_groups_with_names(self):
    for pattern, path in (
      (r'(?P<day>\d+)\.(?P<month>\d+)\.(?P<year>\d+)', 'klicks_01.12.2025.csv'),
      (r'(log|klicks)_(?P<month>\d+)-(?P<day>\d+)-(?P<year>\d{4})', 'klicks_12-01-2025.csv'),
      (r'(\d+)-(\d+)-(\d+)', '2025-12-1.csv'),
      (r'_(?P<day>\d+)', 'klicks_20251201.csv'),
    ):
      self.assertEqual(pass_day(make_config(day_pattern=pattern).data, path), 20251201)
    named = r'_(?P<day>\d+)\.(?P<month>\d+)\.(?P<year>\d+)'
    hint = r'; groups named year, month and day read any order, as (?P<day>\d+)'
    for pattern, found, why in (
      (r'_(.*)\.csv', '31.11.2025', 'not a whole number'),
      (r'_(\d+)\.(\d+)\.(\d+)', '31-11-2025', 'day is out of range for month'),
      (named, '2025-11-31', 'day is out of range for month'),
    ):
      with self.assertRaises(UserError) as caught:
        pass_day(make_config(day_pattern=pattern).data, 'klicks_31.11.2025.csv')
      text = str(caught.exception)
      wanted = "data.day_pattern: found '{}' in {}; wanted a whole number or a date as 2024-01-31 ("
      self.assertStartsWith(text, wanted.format(found, 'klicks_31.11.2025.csv') + why)
      self.assertEndsWith(text, ')' if pattern == named else hint)

  def test_days_follow_the_calendar(self):
    self.assertEqual(
      [day_after(day) for day in (3, 20240131, 20240228, 20241231)],
      [4, 20240201, 20240229, 20250101],
    )
    self.assertEqual(days_between(3, 6), [4, 5])
    self.assertEqual(days_between(3, 4), [])
    self.assertEqual(days_between(3, 3), [])
    self.assertEqual(days_between(20240228, 20240302), [20240229, 20240301])
    self.assertEqual(days_between(20240228, 20240229), [])
    self.assertLen(days_between(0, 10**9), 366)
    self.assertEqual(days_between(0, 10**9)[-1], 10**9 - 1)

  def test_equal_names_in_different_directories(self):
    self.touch('a/x.csv', 'b/x.csv')
    names = self.names(make_config(), 'a/x.csv', 'b/x.csv')
    self.assertEqual([n[-3:] for n in names], ['a/x', 'b/x'])
    self.assertEqual(self.names(make_config(), '*/x.csv'), ['a/x', 'b/x'])
    self.assertEqual(self.names(make_config(), 'a/*', 'a/x.csv'), ['x'], 'one file, one pass')

  def test_a_file_that_is_there_is_no_pattern(self):
    self.touch('x[1].csv', 'x1/y.csv')
    self.assertEqual(self.names(make_config(), 'x[1].csv'), ['x[1]'])
    self.assertEqual(self.names(make_config(), 'x[1]/y.csv'), ['x1/y'])

  def test_markers_announce_passes(self):
    self.touch('w/day_2.csv', 'w/day_2.csv.done', 'w/day_10.csv', 'w/day_10.csv.done')
    self.touch('w/day_3.csv.done', 'w/day_4.csv', 'w/none.csv', 'w/none.csv.done')
    self.touch('w/day_5/p-1.csv', 'w/day_5/p-0.csv', 'w/day_5/_SUCCESS', 'w/day_5/_x', 'w/day_5/.x')
    cfg = make_config(day_pattern=r'day_(\d+)', watch=self.path('w'))
    found, missing, wrong = announced(cfg.data)
    self.assertEqual(
      [(one.name, one.day) for one in found],
      [('day_2', 2), ('day_5/p-0', 5), ('day_5/p-1', 5), ('day_10', 10)],
    )
    listed = self.names(cfg, 'w/day_2.csv', 'w/*/p-*', 'w/day_10.csv')
    self.assertEqual(listed, [one.name for one in found], 'the same names as of data.train')
    self.assertEqual(missing, [self.path('w/day_3.csv')])
    self.assertEqual(list(wrong), [self.path('w/none.csv')])
    with self.assertRaises(FileNotFoundError):
      announced(make_config(watch=self.path('nowhere')).data)

  def test_announced_passes_that_need_no_more_work_are_passed_over(self):
    """What is known of them goes with their files."""
    self.touch('w/1.csv', 'w/1.csv.done', 'w/d/2.csv', 'w/d/2.csv.done', 'w/3.csv', 'w/3.csv.done')
    cfg, asked, settled = make_config(watch=self.path('w')), [], {}

    def look():
      asked.clear()
      is_settled = lambda path: asked.append(path) or not path.endswith('3.csv')
      return [one.name for one in announced(cfg.data, is_settled, settled)[0]], len(asked)

    self.assertEqual(look(), (['3'], 3))
    self.assertEqual(look(), (['3'], 1))
    self.assertEqual(settled[self.path('w')], {'1.csv', '1.csv.done'})
    shutil.rmtree(self.path('w/d'))
    os.remove(self.path('w/1.csv'))
    self.assertEqual(look(), (['3'], 1))
    self.assertEqual(settled, {self.path('w'): {'1.csv.done'}})

  def test_mistakes(self):
    self.touch('a.csv', 'a.csv.gz', 'day_x.csv', 'day_².csv', f'day_{"9" * 30}.csv')
    self.touch('day_2024-13-45.csv', 'b/x')
    cfg = make_config(day_pattern=r'day_(.+)\.csv')
    with self.assertRaisesRegex(ConfigError, "data.train: found no file that matches '.*nothing"):
      passes(cfg.data, [self.path('nothing*')], 'data.train')
    with self.assertRaisesRegex(UserError, 'a.csv: data.day_pattern .* does not match'):
      passes(cfg.data, [self.path('a.csv')], 'data.train')
    for day in ('x', '²', '9' * 30, '2024-13-45'):
      with self.assertRaisesRegex(
        UserError, f"data.day_pattern: found '{day}' in .*; wanted a whole number or a date"
      ):
        passes(cfg.data, [self.path(f'day_{day}.csv')], 'data.train')
    with self.assertRaisesRegex(UserError, "are both named '.*a'"):
      passes(make_config().data, [self.path('a.*')], 'data.train')
    with self.assertRaisesRegex(UserError, 'not a prepared pass'):
      passes(make_config(format='prepared').data, [self.path('b')], 'data.train')


class BatchesTest(tf.test.TestCase):
  def write(self, n, ragged, name='pass'):
    """A pass whose samples can be told apart, and its content by sample.

    Returns: (PreparedPass, list of comparable tuples).
    """
    rng = np.random.default_rng(n)
    counts = rng.integers(0, 4, [n, SLOTS]) if ragged else np.ones([n, SLOTS], np.int64)
    keys = np.arange(counts.sum())
    values = rng.random(len(keys)).astype(np.float32) if ragged else None
    self.values = values  # by key
    dense = rng.random([n, DENSE]).astype(np.float32)
    label, weight, group = (
      (np.arange(n) + 0.25).astype(np.float32),
      rng.random(n).astype(np.float32),
      rng.integers(0, 9, n),
    )
    directory = os.path.join(self.get_temp_dir(), name)
    os.makedirs(directory, exist_ok=True)
    cfg = make_config()
    writer = Writer(directory, cfg.data, cfg.labels)
    split = n // 3
    ends = np.cumsum(counts.sum(1))
    slot = np.repeat(np.tile(np.arange(SLOTS), n), counts.ravel())  # of each key
    for lo, hi in ((0, split), (split, n)):
      a, b = (0 if lo == 0 else ends[lo - 1]), (0 if hi == 0 else ends[hi - 1])
      of_slots = [a + np.flatnonzero(slot[a:b] == f) for f in range(SLOTS)]
      writer.add(
        Parsed(
          counts[lo:hi].astype(np.int32),
          [keys[own] for own in of_slots],
          None if values is None else [values[own] for own in of_slots],
          dense[lo:hi],
          label[lo:hi, None],
          weight[lo:hi],
          group[lo:hi],
        )
      )
    writer.close({'schema': schema(make_config()), 'day': 4})
    starts = (np.cumsum(counts) - counts.ravel()).reshape(n, SLOTS)
    by_slot = [[tuple(keys[s : s + c]) for s, c in zip(starts[i], counts[i])] for i in range(n)]
    samples = [(*by_slot[i], tuple(dense[i]), label[i], weight[i], group[i]) for i in range(n)]
    return PreparedPass(directory, make_config()), samples

  def samples(self, batch):
    """A batch, sample by sample, as `write` has them."""
    b = len(batch.label)
    segments = batch.segments if len(batch.segments) else np.arange(len(batch.keys))
    by_slot = [tuple(batch.keys[segments == s]) for s in range(b * SLOTS)]
    return [
      (
        *by_slot[i * SLOTS : (i + 1) * SLOTS],
        tuple(batch.dense[i]),
        batch.label[i],
        batch.weight[i],
        batch.group[i],
      )
      for i in range(b)
    ]

  def test_batches_in_order_give_the_samples_in_order(self):
    for n in (1, 7, 40):
      for ragged in (False, True):
        one, samples = self.write(n, ragged)
        self.assertEqual((one.day, one.num_batches(8)), (4, -(-n // 8)))
        self.assertEqual([s for b in one.batches(8) for s in self.samples(b)], samples)

  def test_ranks_side_by_side_are_one_process(self):
    for n in (1, 2, 100):
      for ragged in (False, True):
        one, samples = self.write(n, ragged)
        options = {'seed': 5, 'epoch': 2, 'shuffle': True}
        alone = [self.samples(b) for b in one.batches(16, **options)]
        self.assertEqual([len(b) for b in alone], [16] * (n // 16) + [n % 16])
        self.assertCountEqual([s for b in alone for s in b], samples)
        for size in (2, 3):
          ranks = [list(one.batches(16, rank, size, **options)) for rank in range(size)]
          self.assertEqual(
            [len(r) for r in ranks], [one.num_batches(16)] * size
          )  # an empty slice is a batch too
          self.assertEqual(
            [sum((self.samples(b) for b in step), []) for step in zip(*ranks)], alone
          )

  def test_empty_slice(self):
    one, _ = self.write(1, True)
    batch = next(one.batches(16, rank=0, size=2))
    shapes = [a.shape for a in batch[:7]]
    self.assertEqual(shapes, [(0,), (0,), (0,), (0, DENSE), (0,), (0,), (0,)])

  def test_places_and_arrays_that_are_no_pass_are_refused(self):
    for splits in (None, np.array([0, 1, 3, 0, 2], np.uint32)):
      arrays = {
        'codes': np.zeros([4, 2], np.uint16),
        'bases': np.array([[[0, 0], [3, 3]]]),
        'keys': np.arange(5),
        'splits': splits,
        'values': None,
        'dense': None,
      }

      def gather(rows, arrays=arrays, **changed):
        return SampleArrays(**arrays | changed, slots=1, chunk=9).gather(np.array(rows))

      self.assertEqual((gather([1]).keys.tolist(), gather([1]).group.tolist()), ([0], [3]))
      for rows, changed in (
        ([4], {}),
        ([-1], {}),
        ([0], {'bases': np.zeros([0, 2, 2], np.int64)}),
        ([0], {'bases': np.array([[[5, 5], [5, 5]]])}),
        ([0], {'bases': np.array([[[2**63 - 1] * 2, [-(2**63)] * 2]])}),
        ([0], {'codes': np.full([4, 2], 9, np.uint16)}),
        ([0], {'values': np.ones([4], np.float32)}),
        ([0], {'codes': np.zeros([4, 3], np.uint16)}),
        ([0], {'keys': np.arange(3)}),
      ):
        with self.assertRaises(tf.errors.InvalidArgumentError):
          gather(rows, **changed)

  def test_a_file_that_is_cut_short_while_it_is_read(self):
    """Of every array, whatever is left: status 2, a line that names the file, and no sample."""
    one, _ = self.write(5000, True)
    ended = commands.run('-c', CUT_SHORT, one.path)
    self.assertEqual(ended.returncode, 0, ended.stderr)
    arrays = set()
    for line in ended.stdout.splitlines():
      file, status, told = json.loads(line)
      arrays.add(os.path.basename(file))
      self.assertEqual(status, 2, line)
      self.assertRegex(told, rf'^error: {re.escape(file)}: (was cut short|had \d+ bytes).*again\n$')
    self.assertLen(arrays, len(one.meta['arrays']))
    shutil.rmtree(one.path)
    self.assertLen(list(one.batches(512)), -(-5000 // 512), 'what was removed stays mapped')

  def test_values_travel_with_their_keys(self):
    one, _ = self.write(60, True)
    for batch in one.batches(16, rank=1, size=3, shuffle=True):
      self.assertAllEqual(batch.values, self.values[batch.keys])

  def test_order_follows_seed_epoch_and_name(self):
    one, _ = self.write(50, False)
    other, _ = self.write(50, False, 'other')

    def order(p, **options):
      return [b.label.tolist() for b in p.batches(16, shuffle=True, **options)]

    self.assertEqual(order(one, seed=1, epoch=1), order(PreparedPass(one.path), seed=1, epoch=1))
    different = [
      order(one, seed=1, epoch=1),
      order(one, seed=2, epoch=1),
      order(one, seed=1, epoch=2),
      order(other, seed=1, epoch=1),
    ]
    self.assertEqual(len({str(o) for o in different}), 4)

  def test_blocks_and_windows(self):
    # The way of large passes: every sample once, the same for all ranks, resumed anywhere, mixed
    # across blocks.
    with mock.patch.multiple(prepared, SMALL_PASS=10, BLOCK=8, WINDOW=32):
      for n in (10, 64, 203, 1000):
        one, _ = self.write(n, True)
        alone = [self.samples(b) for b in one.batches(7, seed=3, shuffle=True)]
        labels = np.array([s[-3] for b in alone for s in b])
        self.assertAllEqual(np.sort(labels), np.arange(n) + 0.25)
        if n > 32:  # neighbours are mostly of different blocks
          self.assertGreater(np.count_nonzero(np.diff(labels // 8)), n // 2)
        ranks = [
          [self.samples(b) for b in one.batches(7, r, 3, seed=3, shuffle=True)] for r in range(3)
        ]
        self.assertEqual([a + b + c for a, b, c in zip(*ranks)], alone)
        for start in (1, len(alone) // 2, len(alone)):
          self.assertEqual(
            [self.samples(b) for b in one.batches(7, seed=3, shuffle=True, start_batch=start)],
            alone[start:],
          )

  def test_resume_at_a_batch(self):
    for shuffle in (False, True):
      one, _ = self.write(50, True)
      alone = [self.samples(b) for b in one.batches(8, rank=1, size=2, shuffle=shuffle)]
      for start in (0, 3, 6, 7):
        self.assertEqual(
          [
            self.samples(b)
            for b in one.batches(8, rank=1, size=2, shuffle=shuffle, start_batch=start)
          ],
          alone[start:],
        )


if __name__ == '__main__':
  tf.test.main()
