"""The steps of parameter servers' workers; workers and servers are threads of one process."""

import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from ops import packing, row_store, sharding
from tests.support import row_oracle, steps
from tests.support.batches import join, make_batch
from tests.support.parameter_servers import PlayedJob, free_addresses
from tests.support.steps import rows_of, train
from tests.support.threads import in_thread
from trainer.comm.communicator import SingleProcess
from trainer.data.features import empty_batch
from trainer.embedding.stores import make_store
from trainer.errors import BadPass, UserError
from trainer.parameter_server.geo import GeoStep
from trainer.parameter_server.servers import Push
from trainer.parameter_server.worker_step import ServerStep
from trainer.training.step import TrainStep

KEEP = {'lifecycle': {'admission': 'none', 'eviction': 'none', 'decay': 1.0}}


def make_config(changes):
  return steps.make_config({'sync': {'mode': 'ps', 'lost_peer_seconds': 20}} | changes)


class LocalCluster:
  """Servers and workers of this process on free loopback ports."""

  def __init__(self, cfg, servers, workers):
    addresses = free_addresses(servers + workers)
    self._cfg = cfg
    self.job = PlayedJob(cfg.sync, addresses[servers:], addresses[:servers])
    self._clusters = [self.job.cluster('worker', i) for i in range(workers)]
    self._servers = [self.job.cluster('ps', i).start_server() for i in range(servers)]
    self.targets = [cluster.start_server().target for cluster in self._clusters]

  def run(self, work, make_step=ServerStep):
    """Returns what work(worker's step, its CoordinatorClient) returned, by worker."""

    def on_worker(client):
      at = self._clusters[client.rank], self.targets[client.rank]
      return work(make_step(self._cfg, client, *at), client)

    return self.job.run(*[on_worker] * len(self._clusters))


STORES = parameterized.parameters('rows', 'tfra')


class ServerStepTest(tf.test.TestCase, parameterized.TestCase):
  def check(self, tree, servers, workers, batches_of, days=1, rtol=1e-5):
    """Trains in mode ps and compares with one process on the same global batches.

    Args:
      tree: keys of the config that differ.
      servers: their number.
      workers: their number.
      batches_of: a function of a worker's index that returns its batches, a list a day.
      days: their number.
      rtol: the tolerance.
    """
    cfg = make_config(tree)
    everything = [batches_of(r) for r in range(workers)]
    empty = empty_batch(2, len(cfg.labels))

    def work(step, communicator):
      losses, evicted = [], []
      for day in range(days):
        mine, i, more = everything[communicator.rank][day], 0, True
        while more:
          batch = mine[i] if i < len(mine) else empty
          weight, loss, more, *_ = train(step, batch, has_next=i + 1 < len(mine))
          losses.append(loss / max(weight, 1e-12))
          i += 1
        step.store.decay()
        evicted.append(
          [int(k) for k in step.store.evict(lambda a: communicator.sum_arrays({'c': a})['c'])]
        )
        step.store.age()
        communicator.barrier()
      communicator.barrier()
      probabilities, known = step.predict_and_know(step.stage(everything[0][0][0]))
      counts = communicator.sum_arrays({'n': np.array(step.store.size())})['n']
      return (
        losses,
        evicted,
        list(step.store.export_state()),
        step.dense_state(),
        probabilities,
        known,
        counts,
      )

    results = LocalCluster(cfg, servers, workers).run(work)
    losses, _, _, dense, probabilities, known, features = results[0]
    evicted = [sorted(itertools.chain(*(r[1][day] for r in results))) for day in range(days)]
    rows = rows_of(itertools.chain(*(r[2] for r in results)))
    alone = TrainStep(make_config(tree | {'sparse.store': 'rows'}), SingleProcess())
    expected_losses, expected_evicted = [], []
    for day in range(days):
      for i in range(max(len(e[day]) for e in everything)):
        counts = train(alone, join([e[day][i] for e in everything if i < len(e[day])]))
        expected_losses.append(counts.loss / counts.weight)
      alone.store.decay()
      expected_evicted.append(sorted(int(k) for k in alone.store.evict()))
      alone.store.age()
    expected = rows_of(alone.store.export_state())
    self.assertAllClose(losses, expected_losses, rtol=rtol, atol=1e-7)
    self.assertEqual(evicted, expected_evicted)
    self.assertEqual(rows.keys(), expected.keys())
    self.assertEqual(features, len(expected))
    for key, (show, click, admitted, linear, factors) in expected.items():
      self.assertAllClose(rows[key][0], show, rtol=1e-12)
      self.assertAllClose(rows[key][1], click, rtol=1e-12)
      self.assertEqual(rows[key][2], admitted)
      self.assertAllClose(rows[key][3], linear, rtol=rtol, atol=1e-5)
      if admitted:
        self.assertAllClose(rows[key][4], factors, rtol=rtol, atol=1e-5)
    for name, value in alone.dense_state().items():
      self.assertAllClose(dense[name], value, rtol=rtol, atol=1e-5)
    wanted, wanted_known = alone.predict_and_know(alone.stage(everything[0][0][0]))
    self.assertAllClose(probabilities, wanted, rtol=max(rtol, 1e-5), atol=1e-6)
    self.assertAllEqual(known, wanted_known)

  def uneven(
    self, workers, days=1, steps=4, one_has_none=True, single=False, tasks=1, ids=(1, 2, 3)
  ):
    def batches_of(rank):
      rng = np.random.default_rng(100 + rank)

      def day():
        if one_has_none and workers > 1 and rank == workers - 1:
          return []
        n = steps + 2 * rank
        return [
          make_batch(rng, 5 if i == n - 1 else 16, single=single, tasks=tasks, ids=ids)
          for i in range(n)
        ]  # the last one short

      return [day() for _ in range(days)]

    return batches_of

  @pytest.mark.long
  def test_sgd(self):
    rule = {'kind': 'sgd', 'learning_rate': 0.1, 'clip': None}
    self.check(
      KEEP | {'sparse.tables.default.linear': rule, 'sparse.tables.default.factors': rule},
      2,
      2,
      self.uneven(2, steps=50, one_has_none=False),
    )

  def rules(self, kind, rate, dense=None):
    rule = {'kind': kind, 'learning_rate': rate, 'clip': None}
    return KEEP | {
      'sparse.tables.default.linear': rule,
      'sparse.tables.default.factors': rule,
      'train.dense_optimizer': dense or {'kind': kind, 'learning_rate': rate},
    }

  def test_adagrad_three_workers(self):
    self.check(self.rules('adagrad', 0.05), 2, 3, self.uneven(3, steps=50))

  @STORES
  @pytest.mark.long
  def test_adam(self, store):
    self.check(
      self.rules('adam', 0.002) | {'sparse.store': store},
      1,
      2,
      self.uneven(2, steps=50, one_has_none=False, single=True),
      rtol=1e-4,
    )

  def test_rows_in_bfloat16(self):
    rule = {'width': 4, 'init_scale': 0.1, 'dtype': 'bfloat16', 'factors': {'kind': 'adagrad_row'}}
    self.check(KEEP | {'sparse.tables.default': rule}, 2, 2, self.uneven(2), rtol=2.0**-7)

  def test_rows_on_disk(self):
    """Of each server's features, those of some shards are in memory."""
    limit = {'sparse.memory_limit': 2_500_000, 'sparse.cold_dir': '/var/tmp'}
    self.check(self.rules('adagrad', 0.05) | limit, 2, 2, self.uneven(2))

  @pytest.mark.long
  def test_a_schedule(self):
    schedule = {'kind': 'cosine', 'period': 6, 'warmup_steps': 3}
    self.check(self.rules('adagrad', 0.05) | {'train.schedule': schedule}, 2, 2, self.uneven(2))

  def test_a_schedule_begins_where_the_run_of_init_from_ended(self):
    schedule = {'kind': 'step', 'period': 5, 'factor': 0.1}
    cfg = make_config(self.rules('adagrad', 0.05) | {'train.schedule': schedule})
    batch = make_batch(np.random.default_rng(0), 16)

    def trained(step, communicator):
      del communicator
      step.set_steps(5)
      step.set_rates(0.5, 5)
      train(step, batch)
      return step.dense_state() | {
        str(key): row.linear for key, row in rows_of(step.store.export_state()).items()
      }

    expected = trained(TrainStep(cfg, SingleProcess()), None)
    for mode in ('ps', 'ps_async'):
      of_mode = make_config(
        self.rules('adagrad', 0.05) | {'train.schedule': schedule, 'sync.mode': mode}
      )
      (found,) = LocalCluster(of_mode, 1, 1).run(trained)
      self.assertEqual(found.keys(), expected.keys())
      for name, value in expected.items():
        self.assertAllClose(found[name], value, rtol=1e-5, atol=1e-7, msg=name)

  @pytest.mark.long
  def test_ftrl_one_worker(self):
    self.check(self.rules('ftrl', 0.05), 1, 1, self.uneven(1, steps=50))

  @STORES
  def test_features_whose_weight_is_0_are_known(self, store):
    rules = {'lifecycle': {'admission_threshold': 1e9, 'eviction': 'none', 'decay': 1.0}}
    rules |= {'sparse.tables.default.linear': {'kind': 'ftrl', 'l1': 1e3}, 'sparse.store': store}
    self.check(rules, 2, 2, self.uneven(2))

  @STORES
  def test_admission_eviction_and_gradient_scale_feature(self, store):
    lifecycle = {
      'admission_threshold': 3.0,
      'delete_threshold': 0.4,
      'delete_after_unseen_days': 1,
      'decay': 0.8,
    }
    self.check(
      {'lifecycle': lifecycle, 'sparse.gradient_scale': 'feature', 'sparse.store': store},
      2,
      2,
      self.uneven(2, days=3, one_has_none=False),
    )

  @STORES
  def test_capacity_is_over_all_servers(self, store):
    lifecycle = {'admission': 'count', 'admission_count': 4.0, 'eviction': 'none', 'capacity': 25}
    self.check({'lifecycle': lifecycle, 'sparse.store': store}, 2, 1, self.uneven(1, days=2))

  def test_several_tasks_with_blank_labels(self):
    shared = {'mmoe': {'experts': 2, 'hidden': [8], 'dropout': 0.3}}
    rules = self.rules('sgd', 0.05) | steps.TASKS | {'model.shared': shared}
    self.check(rules, 1, 2, self.uneven(2, steps=8, tasks=2))

  @pytest.mark.long
  def test_histories_equal_one_process(self):
    batches = self.uneven(2, steps=8, ids=steps.HISTORY_IDS)
    self.check(self.rules('sgd', 0.05) | steps.HISTORY, 1, 2, batches)

  @pytest.mark.long
  def test_batch_norm_over_all_workers(self):
    """Worker 0 has no samples any more in the last two steps."""
    self.check(
      self.rules('sgd', 0.05)
      | {'model.interactions': ['linear', {'dnn': {'hidden': [8, 4], 'batch_norm': 'sync'}}]},
      1,
      2,
      self.uneven(2, steps=8, one_has_none=False),
    )

  @pytest.mark.long
  def test_half_precision_costs_fewer_bytes_and_little_accuracy(self):
    batches = [make_batch(np.random.default_rng(i), 32) for i in range(3)]

    def work(step, communicator):
      del communicator
      for batch in batches:
        train(step, batch)
      return rows_of(step.store.export_state()), step.traffic()['bytes_per_sample']

    ((full, bytes_full),) = LocalCluster(make_config(self.rules('sgd', 0.1)), 2, 1).run(work)
    for mode in ('ps', 'ps_async'):
      ((half, bytes_half),) = LocalCluster(
        make_config(
          self.rules('sgd', 0.1) | {'sparse.exchange_dtype': 'bfloat16', 'sync.mode': mode}
        ),
        2,
        1,
      ).run(work)
      self.assertLess(bytes_half, bytes_full)
      self.assertEqual(half.keys(), full.keys())
      for key, (*_, linear, factors) in full.items():
        self.assertAllClose(half[key][3], linear, rtol=0.05, atol=2e-3)
        self.assertAllClose(half[key][4], factors, rtol=0.05, atol=2e-3)

  def test_requests_that_are_refused_or_not_answered(self):
    """Without a barrier the worker goes on: it reads again, and takes its push for done."""
    batches = [make_batch(np.random.default_rng(i), 32) for i in range(3)]

    def second_fails(run, fail):
      calls = []

      def wrapped(*args, **kwargs):
        result = run(*args, **kwargs)
        calls.append(result)
        if len(calls) == 2:
          fail(**kwargs)
        return result

      return wrapped

    def refuse(**_):
      raise tf.errors.AbortedError(None, None, 'of whatever reason')

    def work(step, communicator, fails):
      del communicator
      servers, run = step.servers, step.servers.session.run
      servers.patience = 1
      with servers._graph.as_default(), tf.device('/job:ps/task:0'):
        never = tf.compat.v1.FIFOQueue(1, [tf.float32]).dequeue()
      fail = {
        'refused': refuse,
        'not answered': lambda options, **_: run(never, options=options),
        None: lambda **_: None,
      }[fails]
      servers._pulls = {k: second_fails(pull, fail) for k, pull in servers._pulls.items()}
      servers._push = second_fails(servers._push, fail)
      for batch in batches:
        train(step, batch)
      servers.session.run = second_fails(run, fail)
      return rows_of(step.store.export_state())

    cfg = make_config(self.rules('sgd', 0.1) | {'sync.mode': 'ps_async'})
    (plain,), *others = (
      LocalCluster(cfg, 1, 1).run(functools.partial(work, fails=f))
      for f in (None, 'refused', 'not answered')
    )
    for (other,) in others:
      self.assertEqual(plain.keys(), other.keys())
      for key, row in plain.items():
        self.assertAllClose(row[3], other[key][3])

  @STORES
  def test_a_job_that_forms_again_frees_the_rows_that_servers_had(self, store):
    cfg = make_config(KEEP | {'sync.mode': 'ps_async', 'sparse.store': store})
    cluster = LocalCluster(cfg, 1, 1)

    def features_of(step, generation):
      graph, place = tf.Graph(), '/job:ps/task:0'
      with graph.as_default(), graph.container(f'generation{generation}'), tf.device(place):
        size = make_store(cfg, step.dense.embedding, 'rows').size()
        with tf.compat.v1.Session(cluster.targets[0]) as session:
          return session.run(size)

    def work(step, client):
      train(step, make_batch(np.random.default_rng(0), 8))
      here = [features_of(step, 1), features_of(step, 2)]
      if client.generation == 1:
        self.assertGreater(here[0], 0)
        client.end_by(tf.errors.AbortedError(None, None, 'of whatever reason'))
      return here

    in_thread(lambda: cluster.run(work))
    cluster.job.processes[0].wait_for(lambda p: p.restarts == 1)
    ((first, second),) = cluster.run(work)
    self.assertEqual(first, 0)
    self.assertGreater(second, 0)

  def test_what_is_not_finite_or_weighs_nothing_leaves_the_servers_as_they_are(self):
    rng = np.random.default_rng(0)
    good, other = make_batch(rng, 16), make_batch(rng, 16)
    huge = other._replace(dense=np.full_like(other.dense, 3e38))
    weightless = other._replace(weight=np.zeros_like(other.weight))

    def work(step, communicator):
      del communicator
      found = []
      for batch in (good, weightless, huge):
        if batch is huge:
          with self.assertRaisesRegex(UserError, "not finite .*: dense column 'x' holds values"):
            train(step, batch)
        else:
          self.assertEqual(train(step, batch).weight, batch.weight.sum())
        state, _ = step.servers.state()
        found.append((rows_of(step.store.export_state()), state))
      return found

    for mode, make_step in (('ps', ServerStep), ('ps_async', ServerStep), ('ps_geo', GeoStep)):
      cfg = make_config(self.rules('sgd', 0.1) | {'sync.mode': mode, 'sync.geo_steps': 1})
      ((first, nothing, last),) = LocalCluster(cfg, 1, 1).run(work, make_step)
      for rows, dense in (nothing, last):
        self.assertAllEqual(first[1][0], dense[0])
        for key, row in first[0].items():
          self.assertAllEqual(rows[key].linear, row.linear)
          self.assertAllEqual(rows[key].factors, row.factors)

  def test_all_workers_of_a_step_find_what_is_not_finite(self):
    """One worker's gradient, or a row's sum over workers; they may then take the next step."""
    good = make_batch(np.random.default_rng(0), 4, single=True)
    values = np.zeros([4, 3], np.float32)
    values[:, 0] = 1e38  # of one feature, whose gradient is 2e38
    huge = good._replace(
      keys=np.tile(good.keys[:3], 4),
      values=values.ravel(),
      segments=np.arange(12, dtype=np.int32),
      label=np.zeros(4, np.float32),
      weight=np.ones(4, np.float32),
    )
    ruinous = huge._replace(values=3 * huge.values)

    def work(step, communicator, bad):
      with self.assertRaisesRegex(BadPass, "slot 'a' holds values up to [13]e.38"):
        train(step, bad[communicator.rank])
      counts = train(step, good)
      communicator.barrier()
      rows = rows_of(step.store.export_state()).values()
      self.assertTrue(all(np.isfinite(row.linear).all() for row in rows))
      return counts.weight

    cfg = make_config(KEEP | self.rules('sgd', 0.1) | {'model.interactions': ['linear']})
    for bad in ((good, ruinous), (huge, huge)):
      weights = LocalCluster(cfg, 1, 2).run(functools.partial(work, bad=bad))
      self.assertAllClose(weights, [2 * good.weight.sum()] * 2)

  @STORES
  def test_colliding_pushes_all_count(self, store):
    """With SGD and a linear model the sums of three workers' pushes do not depend on the order."""
    steps, rate = 100, 0.004
    cfg = make_config(
      self.rules('sgd', rate)
      | {
        'sync.mode': 'ps_async',
        'sparse.store': store,
        'model.interactions': ['linear'],
        'model.loss': 'squared_error',
      }
    )
    batch = make_batch(np.random.default_rng(0), 8, vocabulary=3)

    def work(step, communicator):
      communicator.barrier()
      for _ in range(steps):
        # The servers are asked for nothing: the gradient is 1 a feature, whatever the weights are.
        keys = np.unique(batch.keys)
        keys = keys[np.argsort(sharding.shard_of(keys), kind='stable')]
        sent = sharding.owner_counts(keys, step.servers.count).numpy()
        ones = np.ones(len(keys), np.float32)
        rows = row_store.PulledRows(
          None, np.zeros(len(keys) + 1, np.int32), ones, np.zeros(0, np.float32)
        )
        buffer, values = packing.pack_rows(rows, np.arange(len(keys), dtype=np.int32), sent)
        dense = [np.ones(v.shape, np.float32) for v in step.dense.trainable]
        counts = np.array([1, 0, 0, 0, 0], np.float32)
        step.servers.push(
          Push(keys, ones, 0 * ones, buffer.numpy(), sent, values.numpy(), dense, counts)
        )
      communicator.barrier()
      return list(step.store.export_state()), step.dense_state(), step.steps

    results = LocalCluster(cfg, 2, 3).run(work)
    rows = rows_of(itertools.chain(*(r[0] for r in results)))
    self.assertEqual(set(rows), set(batch.keys))
    for show, _, _, linear, _ in rows.values():
      self.assertEqual(show, 3 * steps)
      self.assertAllClose(linear[0], -rate * 3 * steps, rtol=1e-4)
    _, dense, taken = results[0]
    self.assertEqual(taken, 3 * steps)
    for name, value in dense.items():
      if name.endswith('bias:0'):
        self.assertAllClose(value, np.full(value.shape, -rate * 3 * steps), rtol=1e-4)

  @STORES
  @pytest.mark.long
  def test_geo_with_one_worker_is_local_training(self, store):
    """One worker's differences are whole: after each merge the servers have what it has."""
    tree = self.rules('adagrad', 0.05)
    batches = [make_batch(np.random.default_rng(i), 16) for i in range(10)]

    def work(step, communicator):
      del communicator
      for i, batch in enumerate(batches):
        train(step, batch)
        if i == 4:
          step.finish_pass()  # as between two passes
      step.finish_pass()
      return list(step.store.export_state()), step.dense_state(), step.steps

    cfg = make_config(tree | {'sync.mode': 'ps_geo', 'sync.geo_steps': 3, 'sparse.store': store})
    ((chunks, dense, taken),) = LocalCluster(cfg, 2, 1).run(work, GeoStep)
    self.assertEqual(taken, 10)
    alone = TrainStep(cfg, SingleProcess())
    for batch in batches:
      train(alone, batch)
    rows, expected = rows_of(chunks), rows_of(alone.store.export_state())
    self.assertEqual(rows.keys(), expected.keys())
    for key, (show, click, admitted, linear, factors) in expected.items():
      self.assertEqual(rows[key][:3], (show, click, admitted))
      self.assertAllClose(rows[key][3][0], linear[0], rtol=1e-5, atol=1e-6)
      self.assertAllClose(rows[key][4][:4], factors[:4], rtol=1e-5, atol=1e-6)
    for name, value in alone.dense_state().items():
      self.assertAllClose(dense[name], value, rtol=1e-5, atol=1e-6)

  @STORES
  def test_geo_merges_differences(self, store):
    """Two workers in turns train as the formulas in NumPy do, also by FTRL, whose z must follow."""
    sgd, ftrl = (
      {'kind': 'sgd', 'learning_rate': 0.02, 'clip': None},
      {
        'kind': 'ftrl',
        'learning_rate': 0.1,
        'l1': 0.05,
        'l2': 0.1,
        'initial_accumulator': 0.1,
      },
    )
    self.check_merges(store, sgd, {'kind': 'sgd', 'learning_rate': 0.02})
    args = {
      'l1_regularization_strength': 0.05,
      'l2_regularization_strength': 0.1 / 2,
      'initial_accumulator_value': 0.1,
    }
    self.check_merges(store, ftrl, {'kind': 'ftrl', 'learning_rate': 0.1, 'args': args})

  def check_merges(self, store, rule, dense_rule):
    merge_every, rounds, bias = 2, 9, -1  # the bias follows the formulas of rows
    cfg = make_config(
      KEEP
      | {
        'sparse.gradient_scale': 'batch',
        'sparse.tables.default.linear': rule,
        'train.dense_optimizer': dense_rule,
        'sync.mode': 'ps_geo',
        'sync.geo_steps': merge_every,
        'sparse.store': store,
        'model.interactions': ['linear'],
        'model.loss': 'squared_error',
        'data.dense': [],
      }
    )
    batches = [
      [
        make_batch(np.random.default_rng(10 * r + i), 8, vocabulary=5, single=True)._replace(
          dense=np.zeros([8, 0], np.float32)
        )
        for i in range(rounds)
      ]
      for r in range(2)
    ]

    def work(step, communicator):
      for i in range(rounds):
        for turn in range(2):
          if turn == communicator.rank:
            train(step, batches[turn][i])
            if i == rounds - 1:
              step.finish_pass()
          communicator.barrier()
      return list(step.store.export_state()), step.dense_state()

    results = LocalCluster(cfg, 1, 2).run(work, GeoStep)
    o, zero = row_oracle.Optimizer(**rule), np.zeros(1)
    server, local, old, states, touched = {}, [{}, {}], [{}, {}], [{}, {}], [set(), set()]
    for i in range(rounds):
      for r in range(2):
        batch, w, state = batches[r][i], local[r], states[r]
        keys = np.pad(batch.keys.reshape(8, 3), [(0, 0), (0, 1)], constant_values=bias)
        for k in set(keys.ravel()) - set(w):
          w[k] = old[r][k] = server.get(k, zero)
          state[k] = row_oracle.fresh_state(o, w[k])
        predicted = np.array([sum(w[k][0] for k in row) for row in keys])
        slope = 2 * batch.weight * (predicted - batch.label) / batch.weight.sum()
        for k in set(keys.ravel()):
          w[k] = row_oracle.step_row(
            o, w[k], state[k], slope @ (keys == k).sum(1, keepdims=True), 1.0, i + 1, 0
          )
        touched[r] |= set(keys.ravel())
        if i % merge_every == merge_every - 1 or i == rounds - 1:
          for k in touched[r]:
            difference = (w[k] - old[r][k]) / 2
            server[k] = server.get(k, zero) + difference
            w[k] = row_oracle.add_row(o, w[k], state[k], server[k] - (old[r][k] + difference))
            old[r][k] = server[k]
          touched[r] = set()
    found = {k: row[3][0] for k, row in rows_of(itertools.chain(*(r[0] for r in results))).items()}
    (found[bias],) = (v[0] for name, v in results[0][1].items() if name.endswith('bias:0'))
    self.assertEqual(set(found), set(server))
    for key, value in server.items():
      self.assertAllClose(found[key], value[0], rtol=1e-4, atol=1e-6)
