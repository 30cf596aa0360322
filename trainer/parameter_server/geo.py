"""Mode ps_geo: each worker trains a copy of the model, and now and then merges it with the servers.

This is PaddlePaddle's GEO-SGD. A worker copies the dense variables, and the rows that it uses. With
N workers, each merges after every `sync.geo_steps` of its steps. Here `local` is a value in the
worker's copy, `server` the value on the servers, and `old` what `server` was at the last merge:

  send its own changes:    difference = (local − old) / N;  server += difference;  old += difference
  take others' changes:    local += server − old;  old = server

The optimizer state stays on the worker, and a merge leaves it as it is, except FTRL's z, from which
FTRL computes the weight. Copies are float32, even of a bfloat16 table. A merge sends features'
shows and clicks to the servers, which admit; a copied row gets factors once the server's row has
them. A copied row not used in the previous pass is updated when it is next used.
"""

import dataclasses

import numpy as np
import tensorflow as tf

from ops import packing, row_store, sharding
from ops.dedupe import Deduped, dedupe
from ops.policy import Policy
from trainer.config import Config
from trainer.data.features import SlotBatch
from trainer.embedding.exchange import Routing, gradient_scale
from trainer.parameter_server.client import CoordinatorClient
from trainer.parameter_server.cluster import Cluster
from trainer.parameter_server.servers import Push
from trainer.parameter_server.worker_step import WorkerStep
from trainer.training.step import LEAST_WEIGHT, Staged, StepCounts, StepFlags

# The shows given to a feature to admit it in a copy; no real feature reaches this number.
_ADMITTING_SHOWS = 2.0**40


class GeoStep(WorkerStep):
  """The step of mode ps_geo: trains this worker's copy of the model; merges it every few steps."""

  def __init__(self, cfg: Config, client: CoordinatorClient, cluster: Cluster, target: str):
    super().__init__(cfg, client, cluster, target)
    self._rows_lag = False  # when next trained, a copied row takes the penalty steps it missed
    self._share = 1 / len(cluster.workers)
    self._every = cfg.sync.geo_steps
    policy = Policy(admission='count', admission_count=_ADMITTING_SHOWS, eviction='none')
    embedding = self.dense.embedding
    tables = [dataclasses.replace(t, dtype='float32') for t in embedding.tables]
    self._local, self._old = (
      row_store.RowStore(policy, tables=tables, slot_table=embedding.slot_table, seed=cfg.seed)
      for _ in range(2)
    )
    self._old_dense = None  # the dense variables at the last merge; None outside a pass
    self._touched, self._steps = [], 0  # since the last merge: (keys, shows, clicks) of each step
    self._step_here = tf.Variable(0, dtype=tf.int64, trainable=False)

  def train(
    self, staged: Staged, routed: Routing, following: Staged | None, flags: StepFlags
  ) -> tuple[StepCounts, tuple[()]]:
    batch, deduped = staged
    self._samples += len(batch.label)
    if self._old_dense is None:
      self._refresh()
      self._old_dense = [v.numpy() for v in self.dense.trainable]
    keys = deduped.unique.numpy()
    columns = self._local.lookup(deduped.unique)
    # `finish_pass` ages all copied rows; a push sets the age back to 0.
    outdated = keys[(columns['unseen_days'].numpy() > 0) | ~columns['exists'].numpy()]
    if len(outdated):
      self._follow(outdated)
    rows = self._local.pull(deduped.unique, False)
    try:
      loss, weight = self._train_copies(batch, deduped, rows)
    except tf.errors.OutOfRangeError:  # the row store refuses a gradient that is not finite
      loss = weight = np.nan
    self._check_finite(self._step_here, batch, float(loss))
    self._touched.append((keys, deduped.shows.numpy(), deduped.clicks.numpy()))
    self._steps += 1
    if self._steps >= self._every:
      self.merge()
    return StepCounts(float(weight), float(loss), *map(int, flags)), ()

  @tf.function(autograph=False, reduce_retracing=True)
  def _train_copies(
    self, batch: SlotBatch, deduped: Deduped, rows: row_store.PulledRows
  ) -> tuple[tf.Tensor, tf.Tensor]:
    """Takes one step on this worker's copies; returns Σ weight·loss and Σ weight of the batch."""
    sums = self.dense.gradients(batch, deduped, rows, tf.stack([self._step_here, 0]))
    scale = 1 / tf.maximum(sums.weight, LEAST_WEIGHT)
    self.dense.apply(sums.dense, scale, self._step_here)
    zeros = tf.zeros_like(deduped.shows)  # only the servers count shows and clicks
    by = gradient_scale(self._cfg.sparse.gradient_scale, scale, deduped.shows)
    step = self._step_here.assign_add(1)
    gradients, hyper = (sums.linear, sums.factors), self.dense.row_hyperparameters(step)
    self._local.push(deduped.unique, rows, zeros, zeros, *gradients, by, hyper, step)
    return sums.loss, sums.weight

  def _add(
    self,
    copy: row_store.RowStore,
    keys: np.ndarray,
    changes: row_store.PulledRows,
    shows: np.ndarray | float = 0.0,
  ) -> None:
    """Adds changes to the weights of a copy's rows, and shows to their features.

    Neither takes an optimizer step. Clicks stay 0: only the servers count them.
    """
    counts = np.full([len(keys)], shows, np.float32), np.zeros([len(keys)], np.float32)
    hyper = self.dense.row_hyperparameters(self._step_here)
    copy.push(keys, changes, *counts, changes.linear, changes.factors, [1.0], hyper, 1, add=True)

  def _follow(self, keys: np.ndarray) -> None:
    """Adds the changes on the servers to copied rows: local += server − old; old = server."""
    server, _, _ = self.servers.pull(keys, True)
    for copy in (self._local, self._old):
      self._follow_lifecycle(copy, keys, has_factors=np.diff(server.offsets) > 0)
    old = self._old.pull(keys, False)
    gained = old._replace(linear=server.linear - old.linear, factors=server.factors - old.factors)
    for copy in (self._local, self._old):
      self._add(copy, keys, gained)

  def _follow_lifecycle(
    self, copy: row_store.RowStore, keys: np.ndarray, has_factors: np.ndarray
  ) -> None:
    """Makes a copy have these features, with factors exactly where the servers have them."""
    rows = copy.pull(keys, False)
    evicted = ~has_factors & (np.diff(rows.offsets) > 0)
    if evicted.any():
      copy.erase(keys[evicted])
      rows = copy.pull(keys, False)
    admitted = has_factors & (np.diff(rows.offsets) == 0)
    is_new = admitted | (rows.ids.numpy() < 0)
    if is_new.any():
      n, none = int(is_new.sum()), np.zeros([0], np.float32)
      unknown = row_store.PulledRows(
        np.full([n], -1), np.zeros([n + 1], np.int32), np.zeros([n], np.float32), none
      )
      self._add(copy, keys[is_new], unknown, np.where(admitted[is_new], _ADMITTING_SHOWS, 0))

  @property
  def is_merged(self) -> bool:
    return not self._steps

  def merge(self) -> None:
    """Sends this worker's changes to the servers; adds the other workers' changes to its copies."""
    if not self._steps:
      return
    touched = dedupe(*(np.concatenate(column) for column in zip(*self._touched)))
    keys = touched.unique.numpy()
    local, old = self._local.pull(keys, False), self._old.pull(keys, False)
    difference = old._replace(
      linear=(local.linear - old.linear) * self._share,
      factors=(local.factors - old.factors) * self._share,
    )
    sent = sharding.owner_counts(keys, self.servers.count)
    buffer, values = packing.pack_rows(difference, tf.range(len(keys)), sent, self._dtype)
    here = [v.numpy() for v in self.dense.trainable]
    changes = [(v - old_v) * np.float32(self._share) for v, old_v in zip(here, self._old_dense)]
    counts = np.array([self._steps, 0, 0, 0, 0], np.float32)
    of_keys = keys, touched.shows, touched.clicks
    self.servers.push(Push(*of_keys, buffer, sent, values, changes, counts))
    self._add(self._old, keys, difference)
    self._follow(keys)
    server = self.servers.state()[0][: len(here)]
    columns = zip(here, server, self._old_dense, changes)
    self._take([v + (new - (old_v + change)) for v, new, old_v, change in columns])
    self._old_dense = server
    self._touched, self._steps, self._stale = [], 0, True

  def finish_pass(self) -> None:
    self.merge()
    super().finish_pass()
    self._old_dense = None
    self._local.age()

  def load_dense_state(self, arrays: dict[str, np.ndarray]) -> None:
    """Does what the base class does; the copies begin anew, as in a new process."""
    super().load_dense_state(arrays)
    for copy in (self._local, self._old):
      copy.clear()
    self._old_dense, self._touched, self._steps = None, [], 0
    self._step_here.assign(0)

  def _take(self, state: list[np.ndarray]) -> None:
    # The optimizer's variables stay each worker's own; a checkpoint holds those of worker 0.
    for variable, value in zip(self.dense.trainable, state):
      self.dense.assign(variable, value)
