"""N ranks train the same model as one process on the same global batches. Run under horovodrun."""

import itertools
import os
import sys
import tempfile
from unittest import mock

import numpy as np
import tensorflow as tf

from ops import bfloat16
from tests.support import small
from tests.support.batches import join, make_batch
from tests.support.ranks import ranks
from tests.support.steps import (
  COUNTS,
  HISTORY,
  HISTORY_IDS,
  TASKS,
  make_config,
  rows_of,
  train,
)
from trainer.comm.communicator import SingleProcess
from trainer.data import values as of_numbers
from trainer.data.features import empty_batch
from trainer.job.job import Job
from trainer.training.step import StepFlags, TrainStep


class EqualityTest(tf.test.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.communicator = ranks()

  def check(self, tree, batches_of, days=1, rtol=1e-5, atol=1e-6, communicator=None):
    """batches_of(rank) -> this rank's list of batches, one list a day;

    trains on them and compares with one process.
    """
    cfg = make_config(tree)
    size, rank = self.communicator.size, self.communicator.rank
    step, losses, evicted = TrainStep(cfg, communicator or self.communicator), [], []
    everything = [batches_of(r) for r in range(size)]
    empty = empty_batch(2, len(cfg.labels))
    for day in range(days):
      mine = everything[rank][day]
      steps = max(len(e[day]) for e in everything)
      staged = [step.stage(batch) for batch in mine + [empty] * (steps - len(mine))]
      routed = step.route(staged[0]) if staged else None
      for i in range(steps):
        # The keys of every third step go to their owners within it, the others' ahead of it.
        ahead = i + 1 < steps and i % 3 > 0
        flags = StepFlags(i + 1 < len(mine), False, False)
        counts, routed = step.train(staged[i], routed, staged[i + 1] if ahead else None, flags)
        if i + 1 < steps and not ahead:
          routed = step.route(staged[i + 1])
        losses.append(counts.loss / max(counts.weight, 1e-12))
        self.assertEqual(counts.has_next, sum(i + 1 < len(e[day]) for e in everything))
      step.store.decay()
      evicted.append(
        sorted(
          itertools.chain(
            *self.communicator.gather(
              [
                int(k)
                for k in step.store.evict(lambda a: self.communicator.sum_arrays({'c': a})['c'])
              ]
            )
          )
        )
      )
      step.store.age()
    own = [[key, *row] for key, row in rows_of(step.store.export_state()).items()]
    parts = [{key: tuple(row) for key, *row in part} for part in self.communicator.gather(own)]
    if rank:
      return
    rows = {k: v for part in parts for k, v in part.items()}
    self.assertEqual(len(rows), sum(map(len, parts)), 'a key has two owners')
    alone = TrainStep(cfg, SingleProcess())
    expected_losses, expected_evicted, samples = [], [], 0
    for day in range(days):
      for i in range(max(len(e[day]) for e in everything)):
        batch = join([e[day][i] for e in everything if i < len(e[day])])
        samples += len(batch.keys)
        counts = train(alone, batch)
        expected_losses.append(counts.loss / counts.weight)
      alone.store.decay()
      expected_evicted.append(sorted(int(k) for k in alone.store.evict()))
      alone.store.age()
    expected = rows_of(alone.store.export_state())
    self.assertAllClose(losses, expected_losses, rtol=rtol, atol=1e-7)
    self.assertEqual(evicted, expected_evicted)
    self.assertEqual(rows.keys(), expected.keys())
    for key, (show, click, admitted, linear, factors) in expected.items():
      self.assertAllClose(rows[key][0], show, rtol=1e-12)
      self.assertAllClose(rows[key][1], click, rtol=1e-12)
      self.assertEqual(rows[key][2], admitted)
      self.assertAllClose(rows[key][3], linear, rtol=rtol, atol=atol)
      if admitted:
        self.assertAllClose(rows[key][4], factors, rtol=rtol, atol=atol)
    for name, value in alone.dense_state().items():
      self.assertAllClose(step.dense_state()[name], value, rtol=rtol, atol=atol)
    if days == 1 and not any(expected_evicted):
      self.assertAllClose(sum(r[0] for r in rows.values()), 1.0 * samples)  # decay is 1 in these
    return rows

  def test_features_whose_weight_is_0_are_known_to_all_ranks(self):
    rule = {'kind': 'ftrl', 'l1': 1e3}
    lifecycle = {'admission_threshold': 1e9, 'eviction': 'none'}
    cfg = make_config({'lifecycle': lifecycle, 'sparse.tables.default.linear': rule})
    step, rank = TrainStep(cfg, self.communicator), self.communicator.rank
    own = make_batch(np.random.default_rng(rank), 16)
    train(step, own)
    keys = np.concatenate(self.communicator.gather(np.asarray(own.keys)))
    for seed in (rank, rank + 1, 99):
      batch = make_batch(np.random.default_rng(seed), 16)
      _, known = step.predict_and_know(step.stage(batch))
      self.assertAllEqual(known, np.isin(batch.keys, keys))

  def uneven(self, single=False, days=1, one_has_none=True, tasks=1, ids=(1, 2, 3)):
    def batches_of(rank):
      rng = np.random.default_rng(100 + rank)

      def day():
        if one_has_none and rank == self.communicator.size - 1:
          return []
        n = 3 + 2 * rank
        return [
          make_batch(rng, 5 if i == n - 1 else 16, single=single, tasks=tasks, ids=ids)
          for i in range(n)
        ]  # the last one short

      return [day() for _ in range(days)]

    return batches_of

  keep = {'lifecycle': {'admission': 'none', 'eviction': 'none', 'decay': 1.0}}

  def test_uneven_data_adagrad(self):
    """Shows count every occurrence."""
    rows = self.check(self.keep, self.uneven())
    if rows is not None:
      total = sum(len(b.keys) for r in range(self.communicator.size) for b in self.uneven()(r)[0])
      self.assertEqual(sum(r[0] for r in rows.values()), total)

  def test_uneven_data_sgd_one_feature_a_slot(self):
    """The layers read counts."""
    rule = {'kind': 'sgd', 'learning_rate': 0.5, 'clip': None}
    rules = {'sparse.tables.default.linear': rule, 'sparse.tables.default.factors': rule}
    batches = self.uneven(single=True, one_has_none=False)
    self.check(self.keep | COUNTS | rules, batches, atol=1e-5)

  def test_adam_with_a_schedule_and_gradient_scale_feature(self):
    rule = {'kind': 'adam', 'learning_rate': 0.01}
    self.check(
      self.keep
      | {
        'sparse.tables.default.linear': rule,
        'sparse.tables.default.factors': rule,
        'sparse.gradient_scale': 'feature',
        'train.dense_optimizer': {'kind': 'adam', 'learning_rate': 0.01},
        'train.schedule': {'kind': 'cosine', 'period': 4, 'warmup_steps': 2},
      },
      self.uneven(),
      rtol=1e-4,
    )

  def test_admission_and_eviction_are_the_same_sets(self):
    """On the second day nobody has data."""
    lifecycle = {
      'admission_threshold': 3.0,
      'delete_threshold': 0.4,
      'delete_after_unseen_days': 1,
      'decay': 0.8,
    }

    def batches_of(rank):
      first, *others = self.uneven(days=3)(rank)
      return [first, [], *others]

    self.check({'lifecycle': lifecycle}, batches_of, days=4)

  def test_capacity_is_over_all_ranks(self):
    """Of two tasks with blank labels."""
    lifecycle = {'admission': 'count', 'admission_count': 4.0, 'eviction': 'none', 'capacity': 25}
    shared = {'mmoe': {'experts': 3, 'hidden': [8, 4], 'dropout': 0.3}}
    tasks = TASKS | {'model.shared': shared, 'lifecycle': lifecycle}
    self.check(tasks, self.uneven(days=2, tasks=2), atol=1e-5)

  def test_tfra_store(self):
    tfra = self.keep | COUNTS | {'sparse.store': 'tfra', 'train.dense_optimizer': {'kind': 'adam'}}
    self.check(tfra, self.uneven(days=2), days=2, rtol=1e-4, atol=1e-5)

  normed = {
    'model': {
      'interactions': ['linear', {'dnn': {'hidden': [8, 4], 'batch_norm': 'sync', 'dropout': 0.3}}]
    }
  }

  def test_batch_norm_and_dropout_of_the_global_batch(self):
    self.check(self.keep | self.normed, self.uneven(one_has_none=False), rtol=1e-4)

  def test_everything_by_horovod(self):
    """One rank has no samples; the layers read counts."""
    self.check(
      self.keep | COUNTS | self.normed,
      self.uneven(),
      rtol=1e-4,
      atol=1e-5,
      communicator=ranks(row_exchange='horovod'),
    )

  def test_labels_that_come_late_and_a_tower_of_the_users(self):
    example = os.path.join(os.path.dirname(__file__), '..', '..', 'examples', 'own_tower')
    sys.path.insert(0, example)
    self.addCleanup(sys.path.remove, example)
    labels = [{'name': 'click'}, {'name': 'conversion', 'loss': 'fake_negative'}]
    own = {'conversion': {'interactions': ['gated_tower.GatedTower'], 'given': 'click'}}
    changes = {
      'data.labels': labels,
      'model.shared': {'shared_bottom': {'hidden': [8], 'dropout': 0.3}},
      'model.tasks': TASKS['model.tasks'] | own,
    }
    self.check(self.keep | TASKS | changes, self.uneven(tasks=2), atol=1e-5)

  def test_histories_equal_one_process(self):
    self.check(self.keep | HISTORY, self.uneven(ids=HISTORY_IDS), atol=1e-5)

  def test_a_pass_that_ruins_the_state_is_refused_by_all(self):
    """One record's value overflows on one rank, or only in the sum over ranks, at the row's owner.

    All go back to the state before the pass, and train on the next one.
    """
    communicator = self.communicator
    made = tempfile.mkdtemp(dir=self.get_temp_dir()) if communicator.rank == 0 else None
    folder = communicator.broadcast(made)
    for case, huge in enumerate(([1e30], [3e38] * 16)):
      run_dir, paths = f'{folder}/run{case}', [f'{folder}/{case}{name}.csv' for name in 'abc']
      for path, values in zip(paths, ([], huge, [])):
        rows = [f'{i % 7},{i % 3},{i % 2}\n' for i in range(20 + ord(path[-5]) % 8)]
        rows += [f'{i % 7},{value},{i % 2}\n' for i, value in enumerate(values)]
        if communicator.rank == 0:
          with open(path, 'w', encoding='utf-8') as f:
            f.write('user,price,label\n' + ''.join(rows))
      slots = [{'name': 'user'}, {'name': 'price', 'from': {'number': 'price'}}]
      cfg = small.config(
        run_dir=run_dir,
        data={'train': paths, 'slots': slots, 'max_refused_passes': 1},
        model={'interactions': ['linear', 'fm'] if case == 0 else ['linear']},
        train={'batch_size': 8},
      )
      communicator.barrier()
      job = Job(cfg, communicator, TrainStep(cfg, communicator))
      with mock.patch.object(
        of_numbers, 'MOST', np.finfo(np.float32).max
      ):  # else it is a bad record
        self.assertEqual(job.run(), 0)
      fates = [entry.fate for entry in job.state.ledger]
      self.assertEqual(sorted(fates), ['refused', 'trained', 'trained'])
      self.assertTrue(all(np.isfinite(v).all() for v in job.step.dense_state().values()))

  def test_products_in_bfloat16(self):
    if not bfloat16.available():
      self.skipTest('wants a processor with avx512_bf16')
    self.check(
      self.keep | self.normed | {'train.dense_dtype': 'bfloat16'}, self.uneven(), rtol=1e-4
    )

  def test_rows_in_bfloat16(self):
    """Where sums differ in their last digit, a number now and then is rounded the other way."""
    rule = {'width': 4, 'init_scale': 0.1, 'dtype': 'bfloat16', 'factors': {'kind': 'adagrad_row'}}
    self.check(self.keep | {'sparse.tables.default': rule}, self.uneven(), rtol=2.0**-7)


if __name__ == '__main__':
  tf.test.main()
