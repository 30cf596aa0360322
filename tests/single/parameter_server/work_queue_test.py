"""The units of a pass: each is trained on once, whoever asks, stops or is lost."""

import numpy as np
import tensorflow as tf

from trainer.parameter_server.work_queue import Claimed, WorkQueue


class WorkQueueTest(tf.test.TestCase):
  def claim(self, work, worker, stop=False, save=False):
    """What the worker itself gets at once; None where it has to wait."""
    work.claim(worker, stop, save)
    return work.hand_out().get(worker)

  def finish(self, work):
    """Claims in turns until nobody gets anything; returns units by worker, and what ended it."""
    units, ends = {worker: [] for worker in work.workers}, []
    asking = work.workers
    while asking:
      worker = asking.pop(0)
      work.claim(worker, False, False)
      for other, claimed in work.hand_out().items():
        if claimed.unit is None:
          ends.append(claimed)
        else:
          units[other].append(claimed.unit)
          asking.append(other)
    return units, ends

  def test_every_unit_goes_to_one_worker(self):
    work = WorkQueue([0, 3], slices=2, first=4, total=41)
    units, ends = self.finish(work)
    self.assertEqual(sorted(units[0] + units[3]), list(range(4, 41)))
    self.assertEqual(ends, [Claimed(None, 'end', 20)] * 2)
    self.assertTrue(work.is_over)

  def test_a_pause_comes_at_a_whole_batch(self):
    work = WorkQueue([0, 1], slices=2, first=4, total=40, pause_after=9)
    units, ends = self.finish(work)
    self.assertEqual(sorted(units[0] + units[1]), list(range(4, 14)))
    self.assertEqual(ends, [Claimed(None, 'save', 7)] * 2)
    # Where the pass ends before the pause, there is none.
    _, ends = self.finish(WorkQueue([0], slices=2, first=14, total=20, pause_after=9))
    self.assertEqual(ends, [Claimed(None, 'end', 10)])

  def test_asked_to_stop_or_to_save_it_ends_at_the_batch_that_is_begun(self):
    for reason in ('stop', 'save'):
      work = WorkQueue([0, 1], slices=2, first=0, total=1000)
      self.assertEqual([self.claim(work, i % 2).unit for i in range(5)], [0, 1, 2, 3, 4])
      asked = {reason: True}
      self.assertEqual(self.claim(work, 1, **asked).unit, 5)  # the other half of batch 2
      self.assertIsNone(self.claim(work, 1))
      work.claim(0, False, False)
      self.assertEqual(work.hand_out(), dict.fromkeys([0, 1], Claimed(None, reason, 3)))

  def test_a_stop_is_stronger_than_a_checkpoint(self):
    work = WorkQueue([0], slices=1, first=0, total=10, pause_after=5)
    self.assertEqual(self.claim(work, 0).unit, 0)
    self.assertEqual(self.claim(work, 0, stop=True), Claimed(None, 'stop', 1))

  def test_a_lost_workers_unit_goes_to_another(self):
    work = WorkQueue([0, 1], slices=1, first=0, total=3)
    self.assertEqual([self.claim(work, i).unit for i in (0, 1)], [0, 1])
    self.assertEqual(self.claim(work, 0).unit, 2)
    self.assertIsNone(self.claim(work, 0))  # unit 1 may come back
    work.leave(1)
    self.assertEqual(work.workers, [0])
    self.assertEqual(work.hand_out(), {0: Claimed(1)})
    self.assertEqual(self.claim(work, 0), Claimed(None, 'end', 3))

  def test_units_that_a_lost_worker_had_not_merged_go_to_another(self):
    work = WorkQueue([0, 1], slices=1, first=0, total=5)
    for unit in range(3):
      work.claim(1, False, False, is_merged=unit < 2)
      self.assertEqual(work.hand_out(), {1: Claimed(unit)})
    self.assertEqual([self.claim(work, 0).unit for _ in range(2)], [3, 4])
    work.leave(1)
    self.assertCountEqual([self.claim(work, 0).unit for _ in range(2)], [1, 2])
    work.claim(0, False, False, is_merged=False)
    self.assertEqual(work.hand_out(), {0: Claimed(None, 'merge')})
    self.assertEqual(self.claim(work, 0), Claimed(None, 'end', 5))

  def test_who_asks_for_the_first_time_when_all_is_done_is_told_so(self):
    work = WorkQueue([0, 1], slices=1, first=0, total=1)
    self.assertEqual(self.claim(work, 0).unit, 0)
    self.assertEqual(self.claim(work, 0), Claimed(None, 'end', 1))
    self.assertEqual(self.claim(work, 1), Claimed(None, 'end', 1))

  def test_nobody_is_further_ahead_than_allowed(self):
    rng = np.random.default_rng(0)
    work = WorkQueue(range(3), slices=1, first=0, total=200, max_ahead=4)
    claims, taken, free = dict.fromkeys(range(3), 0), [], {0, 1, 2}
    while not work.is_over:
      worker = int(rng.choice(sorted(free)))
      free.remove(worker)
      claims[worker] += 1
      work.claim(worker, False, False)
      for other, claimed in work.hand_out().items():
        free.add(other)
        self.assertLess(claims[other] - min(claims.values()), 4 + 1)
        taken.append(claimed.unit)
    self.assertEqual(sorted(taken[:200]), list(range(200)))
    self.assertEqual(taken[200:], [None] * 3)

  def test_who_enters_counts_as_even_with_the_slowest(self):
    work = WorkQueue([0], slices=1, first=0, total=100, max_ahead=2)
    for _ in range(10):
      self.claim(work, 0)
    work.enter(5)
    self.assertEqual(self.claim(work, 5).unit, 10)
    self.assertEqual(self.claim(work, 0).unit, 11)
    self.assertIsNone(self.claim(work, 0))  # it is 2 ahead
    self.assertEqual(work.workers, [0, 5])


if __name__ == '__main__':
  tf.test.main()
