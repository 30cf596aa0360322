"""A worker's step in the modes on parameter servers."""

import time

import numpy as np
import tensorflow as tf

from ops import packing, row_store
from ops.dedupe import Deduped
from ops.tensors import to_tensor
from trainer.config import Config
from trainer.data.features import SlotBatch
from trainer.embedding.exchange import Routing
from trainer.parameter_server.client import CoordinatorClient
from trainer.parameter_server.cluster import Cluster
from trainer.parameter_server.rows_on_servers import RowsOnServers
from trainer.parameter_server.servers import Push, Servers
from trainer.training import dense_dtype
from trainer.training.dense_part import DensePart
from trainer.training.step import (
  DEDUPED_SPEC,
  Staged,
  Step,
  StepCounts,
  StepFlags,
  batch_spec,
)


class WorkerStep(Step):
  """What the steps of all modes share: rows and dense variables come from servers.

  The dense part is a local copy. `is_merged` says whether the servers have the changes of all steps
  of this worker; `target` is the address of its tf.distribute.Server.
  """

  is_merged = True

  def __init__(self, cfg: Config, communicator: CoordinatorClient, cluster: Cluster, target: str):
    multiplies_in = dense_dtype.chosen(cfg.train.dense_dtype, cfg.run_dir, communicator)
    dense = DensePart(cfg, communicator.all_reduce_with_gradient, multiplies_in)
    super().__init__(cfg, communicator, dense)
    self.cluster = cluster
    self.in_lockstep = cfg.sync.mode == 'ps'
    self.servers = Servers(cfg, cluster, target, communicator, self.dense)
    self.store = RowsOnServers(self.servers, communicator)
    self._dtype = tf.as_dtype(cfg.sparse.exchange_dtype)
    self._samples = 0  # since the last call of `traffic`
    self._stale = True  # whether the copy may differ from the servers' variables
    rows = row_store.PulledRows(
      ids=tf.TensorSpec([None], tf.int64),
      offsets=tf.TensorSpec([None], tf.int32),
      linear=tf.TensorSpec([None]),
      factors=tf.TensorSpec([None]),
      show_click=tf.TensorSpec([None, 2]) if cfg.counted_fields() else (),
    )
    self._specs = [batch_spec(len(cfg.labels)), DEDUPED_SPEC, rows]  # of what a step reads
    self._forward = tf.function(self.dense.predict, self._specs, autograph=False)
    if not communicator.late:
      if communicator.rank == 0:
        self.servers.start(self._copies())
      communicator.barrier()
      self.servers.start_worker(communicator.end_by)
      communicator.barrier()

  def route(self, staged: Staged) -> tuple[()]:
    return ()  # keys go to the servers within the step

  def predict_and_know(self, staged: Staged) -> tuple[np.ndarray, np.ndarray]:
    self._refresh()
    batch, deduped = staged
    rows, _, _ = self.servers.pull(deduped.unique.numpy(), False)
    known = self.dense.known(rows).numpy()
    probabilities = self._forward(batch, deduped, tf.nest.map_structure(to_tensor, rows))
    return probabilities.numpy(), known[deduped.inverse.numpy()]

  def merge(self) -> None:
    """Sends the changes that the servers do not have yet. Only mode ps_geo has such changes."""

  def finish_pass(self) -> None:
    """Called after this worker's last step of a pass; from then on its copy is out of date."""
    self._stale = True

  def _take(self, state: list[np.ndarray]) -> None:
    for variable, value in zip(self._copied(), state):
      variable.assign(value)

  def consolidate(self) -> None:
    self._refresh()
    super().consolidate()

  def traffic(self) -> dict[str, float]:
    """Returns the bytes per sample that all workers exchanged since the last call of each."""
    own = np.array([self.servers.bytes, self._samples], np.int64)
    sent, samples = self._communicator.sum_arrays({'bytes': own})['bytes']
    self.servers.bytes = self._samples = 0
    return {'bytes_per_sample': round(sent / max(1, samples), 1)}

  # State

  def _copied(self) -> list[tf.Variable]:
    return [*self.dense.trainable, *self.dense.optimizer.weights]

  def _copies(self) -> list[np.ndarray]:
    return [v.numpy() for v in self._copied()]

  def _refresh(self) -> None:
    """Fetches dense variables and optimizer state if they may be old; no worker may train."""
    if self._stale:
      state, steps = self.servers.state()
      self._take(state)
      self._step.assign(steps)
      self._stale = False

  def _assign(self, **values: object) -> None:
    """Does `Servers.assign` on worker 0, while the others wait; every worker calls it."""
    self._communicator.barrier()
    if self._communicator.rank == 0 and not self._communicator.independent:
      self.servers.assign(**values)
    self._communicator.barrier()

  @property
  def steps(self) -> int:
    if not self.in_lockstep:
      self._refresh()
    return super().steps

  def set_steps(self, value: int) -> None:
    super().set_steps(value)
    self._assign(step=value)

  def set_rates(self, factor: float, first_step: int) -> None:
    super().set_rates(factor, first_step)
    self._assign(rate=factor, first_step=first_step)

  def dense_state(self) -> dict[str, np.ndarray]:
    self._refresh()
    return super().dense_state()

  def load_dense_state(self, arrays: dict[str, np.ndarray]) -> None:
    super().load_dense_state(arrays)
    self._assign(state=self._copies())
    self._stale = False

  def _local_variables(self) -> list[tf.Variable]:
    return [self.dense.embedding.stats, *self.dense.model.non_trainable_variables]

  def local_state(self) -> dict[str, np.ndarray]:
    """Returns the variables that no server has, {name: array}, which a late worker loads."""
    return {v.name: v.numpy() for v in self._local_variables()}

  def load_local_state(self, arrays: dict[str, np.ndarray]) -> None:
    for variable in self._local_variables():
      variable.assign(arrays[variable.name])


class ServerStep(WorkerStep):
  """The step of modes ps and ps_async.

  In mode ps, N workers with b samples each compute what one process with N·b samples does: workers
  send sums, and the servers divide once, by the weight of all samples. In mode ps_async, each push
  is a step, divided by the weight of that worker's samples.
  """

  def __init__(self, cfg: Config, client: CoordinatorClient, cluster: Cluster, target: str):
    super().__init__(cfg, client, cluster, target)
    # Dropout depends on a sample's place in the global batch, and the loss of each of several tasks
    # is divided by that task's global weight. Both need one more message in each step.
    self._tells_samples = self.in_lockstep and (
      len(cfg.labels) > 1 or 'position' in self.dense.model.needs
    )
    specs = [
      *self._specs,
      tf.TensorSpec([self.servers.count], tf.int32),
      [tf.TensorSpec(v.shape) for v in self.dense.trainable],
      tf.TensorSpec([], tf.int64),
      tf.TensorSpec([] if len(cfg.labels) == 1 else [len(cfg.labels)]),
    ]
    self._gradients = tf.function(self._gradients_graph, specs, autograph=False)

  def train(
    self, staged: Staged, routed: Routing, following: Staged | None, flags: StepFlags
  ) -> tuple[StepCounts, tuple[()]]:
    batch, deduped = staged
    self._samples += len(batch.label)
    lower = 0  # samples of this step on workers of lower rank
    total_weight = batch.weight.numpy().sum(0)
    if self._tells_samples:
      samples, weights = zip(*self._communicator.gather((len(batch.label), total_weight.tolist())))
      lower = sum(samples[: self._communicator.rank])
      total_weight = np.sum(weights, 0, np.float32)
    began = time.monotonic()
    rows, sent, dense = self.servers.pull(deduped.unique.numpy(), True)
    self.exchange_seconds += time.monotonic() - began
    arrays = tf.nest.map_structure(to_tensor, (rows, sent, dense, np.int64(lower), total_weight))
    loss, weight, gradients, buffer, values = self._gradients(batch, deduped, *arrays)
    if not self.in_lockstep:  # otherwise all workers find it below
      self._check_finite(self._step, batch, float(loss))
    counts = np.array([weight, loss, *map(float, flags)], np.float32)
    of_keys = deduped.unique, deduped.shows, deduped.clicks
    began = time.monotonic()
    result = self.servers.push(Push(*of_keys, buffer, sent, values, gradients, counts))
    self.exchange_seconds += time.monotonic() - began
    self._stale = True
    if not self.in_lockstep:
      self._step.assign(to_tensor(result))
      return StepCounts(float(weight), float(loss), *map(int, flags)), ()
    self._check_finite(self._step, batch, result[1])
    # The servers computed the sums from means; rint removes rounding errors from whole numbers.
    return StepCounts(*result[:2], *np.rint(result[2:])), ()

  def _gradients_graph(
    self,
    batch: SlotBatch,
    deduped: Deduped,
    rows: row_store.PulledRows,
    sent: tf.Tensor,
    dense: list[tf.Tensor],
    lower: tf.Tensor,
    total_weight: tf.Tensor,
  ) -> tuple[tf.Tensor, ...]:
    """Computes this worker's gradients, with the servers' values of its dense variables.

    `sent`, int32 [servers], is how many keys go to each server; `lower`, int64 [], how many samples
    of the step are on workers of lower rank; `total_weight`, float32 [], or [T] with several tasks,
    is the weight of all samples. Returns Σ weight·loss, Σ weight, the dense gradients, the packed
    gradients of rows, and how many of the packed values go to each server.
    """
    for variable, value in zip(self.dense.trainable, dense):
      variable.assign(value)
    sums = self.dense.gradients(batch, deduped, rows, tf.stack([self._step, lower]), total_weight)
    if self.in_lockstep:
      self._step.assign_add(1)
      gradients = sums.linear, sums.factors, rows.offsets
      buffer, values = packing.pack_gradients(*gradients, sent, self._dtype)
    else:
      gradients = rows._replace(linear=sums.linear, factors=sums.factors)
      places = tf.range(tf.size(sums.linear))
      buffer, values = packing.pack_rows(gradients, places, sent, self._dtype)
    dense = [tf.convert_to_tensor(g) for g in sums.dense]
    return sums.loss, sums.weight, dense, buffer, values
