"""N ranks train the same model as one process on the same global batches. Run under horovodrun."""
import itertools
from unittest import mock

import numpy as np
import tensorflow as tf
import yaml

from tests.batches import join, make_batch
from trainer import config
from trainer.features import empty_batch
from trainer.runtime import Runtime
from trainer.sync import allreduce
from trainer.train_step import TrainStep

CONFIG = '''
seed: 3
data:
  train: [none]
  slots: [{name: a, separator: "|", value_separator: ":"}, {name: b, separator: "|", pooling: sum}, {name: c, separator: "|", pooling: sqrtn}]
  dense: [{name: x}, {name: y, transform: log1p, missing: 0.5}]
sparse:
  tables: {default: {width: 4, init_scale: 0.1}}
model: {interactions: [linear, fm, {dnn: {hidden: [8, 4]}}]}
train: {dense_optimizer: {kind: sgd, learning_rate: 0.1}}
'''


def make_config(tree):
  path = tf.compat.v1.test.get_temp_dir() + '/config.yaml'
  base = yaml.safe_load(CONFIG)
  for key, value in tree.items():
    node = base
    *parents, last = key.split('.')
    for part in parents:
      node = node.setdefault(part, {})
    node[last] = value
  with open(path, 'w', encoding='utf-8') as f:
    yaml.safe_dump(base, f)
  return config.load(path)


def rows_of(step):
  """key -> (show, click, admitted, linear and state, factors and state) of everything this process owns."""
  found = {}
  for chunk in step.store.export_state():
    admitted = 0
    for i, key in enumerate(chunk['key']):
      factors = None
      if chunk['admitted'][i] and 'factors_default' in chunk:
        factors = chunk['factors_default'][admitted]
        admitted += 1
      found[int(key)] = (chunk['show'][i], chunk['click'][i], bool(chunk['admitted'][i]), chunk['linear'][i], factors)
  return found


class EqualityTest(tf.test.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    import horovod.tensorflow as hvd
    hvd.init()
    cls.runtime = Runtime(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size())
    cls.peers = allreduce.peers(cls.runtime)

  def check(self, tree, batches_of, days=1, rtol=1e-5, peers=None):
    """batches_of(rank) -> this rank's list of batches, one list a day; trains on them and compares with one process."""
    cfg = make_config(tree)
    size, rank = self.peers.size, self.peers.rank
    step, losses, evicted = TrainStep(cfg, peers or self.peers), [], []
    everything = [batches_of(r) for r in range(size)]
    empty = empty_batch(2)
    for day in range(days):
      mine = everything[rank][day]
      steps = max(len(e[day]) for e in everything)
      staged = [step.stage(batch) for batch in mine + [empty] * (steps - len(mine))]
      for i in range(steps):
        # The keys of every third step go to their owners within it, the others' ahead.
        flags = step.train(staged[i], [i + 1 < len(mine), 0, 0], staged[i + 1] if i + 1 < steps and i % 3 else None)
        losses.append(flags[1] / max(flags[0], 1e-12))
        self.assertEqual(flags[2], sum(i + 1 < len(e[day]) for e in everything))
      step.store.decay()
      evicted.append(sorted(itertools.chain(*self.peers.gather([int(k) for k in step.store.evict(lambda a: self.peers.sum_arrays({'c': a})['c'])]))))
      step.store.age()
    parts = self.peers.gather(rows_of(step))
    if rank:
      return
    rows = {k: v for part in parts for k, v in part.items()}
    self.assertEqual(len(rows), sum(map(len, parts)), 'a key has two owners')
    alone = TrainStep(cfg, allreduce.Alone())
    expected_losses, expected_evicted, samples = [], [], 0
    for day in range(days):
      for i in range(max(len(e[day]) for e in everything)):
        batch = join([e[day][i] for e in everything if i < len(e[day])])
        samples += len(batch.keys)
        flags = alone.train(alone.stage(batch), [0, 0, 0])
        expected_losses.append(flags[1] / flags[0])
      alone.store.decay()
      expected_evicted.append(sorted(int(k) for k in alone.store.evict()))
      alone.store.age()
    expected = rows_of(alone)
    self.assertAllClose(losses, expected_losses, rtol=rtol, atol=1e-7)
    self.assertEqual(evicted, expected_evicted)
    self.assertEqual(rows.keys(), expected.keys())
    for key, (show, click, admitted, linear, factors) in expected.items():
      self.assertAllClose(rows[key][0], show, rtol=1e-12)
      self.assertAllClose(rows[key][1], click, rtol=1e-12)
      self.assertEqual(rows[key][2], admitted)
      self.assertAllClose(rows[key][3], linear, rtol=rtol, atol=1e-6)
      if admitted:
        self.assertAllClose(rows[key][4], factors, rtol=rtol, atol=1e-6)
    for name, value in alone.dense().items():
      self.assertAllClose(step.dense()[name], value, rtol=rtol, atol=1e-6)
    if days == 1 and not any(expected_evicted):
      self.assertAllClose(sum(r[0] for r in rows.values()), 1.0 * samples)  # decay is 1 in these
    return rows

  def uneven(self, single=False, days=1, one_has_none=True):
    def batches_of(rank):
      rng = np.random.default_rng(100 + rank)
      def day():
        if one_has_none and rank == self.peers.size - 1:
          return []
        n = 3 + 2 * rank
        return [make_batch(rng, 5 if i == n - 1 else 16, single=single) for i in range(n)]  # the last one short
      return [day() for _ in range(days)]
    return batches_of

  keep = {'lifecycle': {'admission': 'none', 'eviction': 'none', 'decay': 1.0}}

  def test_uneven_data_adagrad(self):
    self.check(self.keep, self.uneven())

  def test_uneven_data_sgd_one_feature_a_slot(self):
    rule = {'kind': 'sgd', 'learning_rate': 0.5}
    self.check(self.keep | {'sparse.tables.default.linear': rule, 'sparse.tables.default.factors': rule}, self.uneven(single=True, one_has_none=False))

  def test_adam(self):
    rule = {'kind': 'adam', 'learning_rate': 0.01}
    self.check(self.keep | {'sparse.tables.default.linear': rule, 'sparse.tables.default.factors': rule,
                            'train.dense_optimizer': {'kind': 'adam', 'learning_rate': 0.01}}, self.uneven(), rtol=1e-4)

  def test_gradient_scale_feature(self):
    self.check(self.keep | {'sparse.gradient_scale': 'feature'}, self.uneven())

  def test_nobody_has_data_on_some_day(self):
    self.check(self.keep, lambda rank: [[], [make_batch(np.random.default_rng(rank), 4)]], days=2)

  def test_admission_and_eviction_are_the_same_sets(self):
    lifecycle = {'admission_threshold': 3.0, 'delete_threshold': 0.4, 'delete_after_unseen_days': 1, 'decay': 0.8}
    self.check({'lifecycle': lifecycle}, self.uneven(days=3))

  def test_capacity_is_over_all_ranks(self):
    self.check({'lifecycle': {'admission': 'count', 'admission_count': 4.0, 'eviction': 'none', 'capacity': 25}}, self.uneven(days=2))

  def test_shows_count_every_occurrence(self):
    rows = self.check(self.keep, self.uneven())
    if rows is not None:
      total = sum(len(b.keys) for r in range(self.peers.size) for b in self.uneven()(r)[0])
      self.assertEqual(sum(r[0] for r in rows.values()), total)

  def test_tfra_store(self):
    self.check(self.keep | {'sparse.store': 'tfra'}, self.uneven())

  normed = {'model': {'interactions': ['linear', {'dnn': {'hidden': [8, 4], 'batch_norm': 'sync', 'dropout': 0.3}}]}}

  def test_batch_norm_and_dropout_of_the_global_batch(self):
    self.check(self.keep | self.normed, self.uneven(one_has_none=False), rtol=1e-4)
    self.check(self.keep | self.normed, self.uneven(), rtol=1e-4)

  def test_sums_by_horovod_as_between_gpus(self):
    import horovod.tensorflow as hvd
    with mock.patch.object(hvd, 'allreduce', wraps=hvd.allreduce) as over_horovod:
      self.check(self.keep | self.normed, self.uneven(), rtol=1e-4, peers=allreduce.Horovod('localhost', nccl=True))
    self.assertGreater(over_horovod.call_count, 1)  # dense gradients, and batch norm's sums

  def test_one_rank_without_a_gpu_is_enough_for_lanes(self):
    import horovod.tensorflow as hvd
    peers = allreduce.Horovod('localhost', nccl=self.peers.rank == 0)
    with mock.patch.object(hvd, 'allreduce', side_effect=AssertionError):
      self.assertAllEqual(peers.sum_all([tf.ones([3])])[0], [self.peers.size] * 3)

  def test_sums_over_ranks(self):
    rank, size = self.peers.rank, self.peers.size
    ranks = np.arange(size)
    tensors = [np.full([2, 3], rank, np.float32), np.full([], rank, np.float32), np.zeros([0, 4], np.float32), np.full([1001], rank, np.float32)]
    for value, total in zip(tensors, self.peers.sum_all(tensors)):
      self.assertAllEqual(total, np.full(value.shape, ranks.sum()))
    arrays = {'counts': np.array([rank, 2 ** 60], np.int64), 'loss': np.array(0.1 * rank), 'more': np.ones([2, 2], np.int64)}
    sums = self.peers.sum_arrays(arrays)
    self.assertAllEqual(sums['counts'], [ranks.sum(), size * 2 ** 60])
    self.assertAllClose(sums['loss'], 0.1 * ranks.sum(), rtol=1e-15)
    self.assertAllEqual(sums['more'], np.full([2, 2], size))
    self.assertEqual({k: v.dtype for k, v in sums.items()}, {k: v.dtype for k, v in arrays.items()})


if __name__ == '__main__':
  tf.test.main()
