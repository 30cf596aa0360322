"""One training step: pulls rows, computes gradients, sums them over ranks, updates the model."""

import abc
import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from ops.dedupe import DEDUPED_SPEC, Deduped
from ops.tensors import to_tensor
from trainer import config
from trainer.comm.communicator import Communicator
from trainer.comm.spans import Spans, seconds_of
from trainer.data.features import SlotBatch, empty_batch, weigh_labels
from trainer.embedding.exchange import Routing, rows_of
from trainer.embedding.row_table import RowTable
from trainer.embedding.stores import make_store
from trainer.errors import BadPass
from trainer.runtime import HOST
from trainer.training.advice import huge_value, lower_rates
from trainer.training.dense_part import DensePart


def batch_spec(tasks: int) -> SlotBatch:
  samples = [None] if tasks == 1 else [None, tasks]
  return SlotBatch(
    keys=tf.TensorSpec([None], tf.int64),
    values=tf.TensorSpec([None], tf.float32),
    segments=tf.TensorSpec([None], tf.int32),
    dense=tf.TensorSpec([None, None], tf.float32),
    label=tf.TensorSpec(samples, tf.float32),
    weight=tf.TensorSpec(samples, tf.float32),
    group=tf.TensorSpec([None], tf.int64),
    item=tf.TensorSpec([None], tf.int64),
    log_share=tf.TensorSpec([None], tf.float32),
    left_out=tf.TensorSpec([None, 2], tf.int64),
  )


# The smallest divisor of sums, so that nothing is divided by 0 if all weights are 0.
LEAST_WEIGHT = 1e-12


class Staged(NamedTuple):
  """A batch as tensors, made while the previous step runs, because it needs no weights."""

  batch: SlotBatch  # with several tasks, each label has a weight
  deduped: Deduped  # the distinct keys of the batch, with their shows and clicks


class StepFlags(NamedTuple):
  """The flags that a rank sends to all others in a step."""

  has_next: bool  # the rank has another batch
  stop: bool  # the rank was asked to stop
  save: bool  # the rank asks for a checkpoint


class StepCounts(NamedTuple):
  """The losses, weights and flags of one step, each summed over all ranks."""

  weight: float  # Σ weight
  loss: float  # Σ weight·loss
  has_next: int  # how many ranks raised each flag
  stop: int
  save: int


class Step(abc.ABC):
  """Base class of training steps, on ranks or on parameter servers.

  Attributes:
    dense: the layers of this process, with their loss and optimizer.
    store: the rows that this process owns.
    no_samples: an empty batch.
    in_lockstep: whether all processes take each step together.
    exchange_seconds: the time so far in which this process exchanged rows, gradients and sums with
      other processes, including the time spent waiting for them.
  """

  exchange_seconds = 0.0
  store: RowTable
  in_lockstep: bool

  def __init__(self, cfg: config.Config, communicator: Communicator, dense: DensePart):
    self._cfg, self._communicator, self.dense = cfg, communicator, dense
    with tf.device(HOST):
      self._step = tf.Variable(0, dtype=tf.int64, trainable=False)  # the number of steps taken
    self._rows_lag = dense.embedding.catches_up  # whether rows take penalty steps late
    self.no_samples = self.stage(empty_batch(len(cfg.data.dense), len(cfg.labels)))

  def stage(self, batch: SlotBatch) -> Staged:
    """Converts a batch of NumPy arrays to tensors, and finds its distinct keys. Thread-safe."""
    batch = SlotBatch(*map(to_tensor, weigh_labels(batch)))
    with tf.device(HOST):
      return Staged(batch, self.dense.embedding.dedupe(batch))

  @abc.abstractmethod
  def route(self, staged: Staged) -> Routing:
    """Sends the keys of a batch to the owners of their rows; returns their routing for `train`."""

  @abc.abstractmethod
  def train(
    self, staged: Staged, routed: Routing, following: Staged | None, flags: StepFlags
  ) -> tuple[StepCounts, Routing]:
    """Trains on this process's share of a step; returns sums, and the routing of `following`.

    It raises BadPass if the loss or a gradient is not finite; on every process, if they train in
    lockstep.

    Args:
      routed: the routing of `staged`, from `route` or from the previous call of `train`.
      following: the samples of the next step, whose keys are routed while this step runs. None if
        there is no next step; then every process must pass None.
    """

  def predict(self, staged: Staged) -> np.ndarray:
    """Returns probabilities, float32 [B]; [B, T] with several tasks. Every process calls it."""
    return self.predict_and_know(staged)[0]

  @abc.abstractmethod
  def predict_and_know(self, staged: Staged) -> tuple[np.ndarray, np.ndarray]:
    """Predicts, and finds which features of the batch the model was trained on.

    Returns the result of `predict`; and bool [nnz], true for each feature that is known.
    """

  def consolidate(self) -> None:
    """Prepares the state to be read, saved or exported. Every process calls it.

    With l2_mode catch_up, rows take the steps of the penalty on weights that they have missed. The
    moving statistics of local batch norm are averaged over processes.
    """
    if self._rows_lag:
      self.store.catch_up(self.dense.row_hyperparameters(self._step), self._step)
    if local := self.dense.model.non_trainable_variables:
      for variable, total in zip(local, self._communicator.all_reduce(local)):
        variable.assign(total / self._communicator.size)

  def traffic(self) -> dict[str, float]:
    """Returns fields for metrics.jsonl: the bytes per sample exchanged with parameter servers."""
    return {}

  def _check_finite(self, step: tf.Variable, batch: SlotBatch, loss: float) -> None:
    """Raises BadPass, which names the likely cause, if the loss or a gradient is not finite.

    `step` is its number, which takes 0.3 ms to read, so only an error does; `loss` is
    Σ weight·loss, NaN if any gradient is not finite, the same for all processes in lockstep.
    """
    if np.isfinite(loss):
      return
    cfg, found = self._cfg, f'the loss or a gradient is not finite at step {int(step.numpy())}'
    why = huge_value(cfg.data, cfg.ordered_slots, batch)
    if self.in_lockstep:
      why = next(filter(None, self._communicator.gather(why)), None)
    why = why or lower_rates(cfg.train, cfg.sparse, cfg.features_per_sample)
    raise BadPass(f'{found}: {why}; earlier checkpoints are intact')

  @property
  def steps(self) -> int:
    return int(self._step.numpy())

  def set_steps(self, value: int) -> None:
    """Sets the number of steps taken, after a checkpoint was restored."""
    self._step.assign(value)

  def set_rates(self, factor: float, first_step: int) -> None:
    """Sets `factor` and `first_step` of the learning rates (trainer.training.schedule.Rates)."""
    self.dense.rates.factor.assign(factor)
    self.dense.rates.first_step.assign(first_step)

  def set_biases(self, values: np.ndarray) -> None:
    """Sets the bias of each task; NaN leaves one as it is. Every process calls it."""
    self.dense_state()  # a worker's copy follows the servers
    bias = self.dense.model.bias
    self.dense.assign(bias, np.where(np.isnan(values), bias.numpy(), values).astype(np.float32))
    self.load_dense_state(self.dense.state())

  def dense_state(self) -> dict[str, np.ndarray]:
    """Returns {name: value} of the variables of layers and optimizer."""
    return self.dense.state()

  def load_dense_state(self, arrays: dict[str, np.ndarray]) -> None:
    self.dense.load_state(arrays)


@functools.cache
def _as_tensor(flags: StepFlags) -> tf.Tensor:
  return to_tensor(np.array(flags, np.float32))


def traced(function: Callable, *specs: object) -> Callable:
  """Traces `function` for arguments of the given specs; returns a function that runs the graph.

  The ops are on the host unless `function` places them elsewhere.

  A tf.function takes 0.8 ms a call to look up the graph and to bind arguments by name. The private
  `_call_flat`, which takes a flat list of tensors, saves that time.
  """

  def on_host(*args: object) -> object:
    with tf.device(HOST):
      return function(*args)

  graph = tf.function(on_host, autograph=False, input_signature=specs).get_concrete_function()
  return lambda *args: graph._call_flat(tf.nest.flatten(args), graph.captured_inputs)


class TrainStep(Step):
  """The training step of one process, or of one of N Horovod ranks.

  N ranks equal one process that has all their samples. It does not matter how the samples are
  divided among ranks; a rank may have none. Every rank computes the gradients of the sum of its
  losses, one allreduce adds them up, and they are then divided, once, by the weight of all samples.

  Args:
    dense: the layers with their loss and optimizer; None: those of a model that predicts labels.
  """

  in_lockstep = True

  def __init__(
    self, cfg: config.Config, communicator: Communicator, dense: DensePart | None = None
  ):
    dense = dense or DensePart(cfg, communicator.all_reduce_with_gradient)
    super().__init__(cfg, communicator, dense)
    self.store = make_store(cfg, self.dense.embedding)
    self._spans = Spans()
    self._rows = rows_of(
      self.store,
      communicator,
      by=cfg.sparse.gradient_scale,
      reads_counts=bool(cfg.counted_fields()),
      dtype=cfg.sparse.exchange_dtype,
      tasks=len(cfg.labels),
      spans=self._spans,
    )
    spec = batch_spec(len(cfg.labels))
    route_specs = DEDUPED_SPEC, spec.weight
    routed = self._rows.routed
    self._routes = bool(routed)
    self._route = traced(self._rows.route, *route_specs)
    following = route_specs if self._routes else ()
    self._train = traced(
      self._train_graph, spec, DEDUPED_SPEC, routed, following, tf.TensorSpec([3])
    )
    self._predict = traced(self._predict_graph, spec, DEDUPED_SPEC)

  def route(self, staged: Staged) -> Routing:
    return self._route(staged.deduped, staged.batch.weight)

  def train(
    self, staged: Staged, routed: Routing, following: Staged | None, flags: StepFlags
  ) -> tuple[StepCounts, Routing]:
    following = following or self.no_samples
    routes = (following.deduped, following.batch.weight) if self._routes else ()
    try:
      counts, routed, spans = self._train(staged, routed, routes, _as_tensor(flags))
      counts = StepCounts(*counts.numpy())
    except tf.errors.OutOfRangeError:  # the row store refuses a gradient that is not finite
      counts = StepCounts(0, np.nan, 0, 0, 0)
    self._check_finite(self._step, staged.batch, counts.loss)
    if self._routes:  # there are other ranks
      self.exchange_seconds += seconds_of(spans.numpy())
    return counts, routed

  def _train_graph(
    self, batch: SlotBatch, deduped: Deduped, routed: Routing, following: tuple, flags: tf.Tensor
  ) -> tuple[tf.Tensor, Routing, tf.Tensor]:
    self._spans.collect()  # discards the spans of an earlier trace
    total_weight, lower_samples, samples = self._rows.weight_and_samples(batch.weight, routed)
    scale = 1 / tf.maximum(tf.reduce_max(total_weight), LEAST_WEIGHT)
    rows = self._rows.pull(deduped, routed, train=True)
    position = tf.stack([self._step, lower_samples])
    gradients = self.dense.gradients(batch, deduped, rows, position, total_weight, samples)
    loss = gradients.loss
    if self._routes:
      loss = tf.where(self._rows.overflowed, np.nan, loss)  # of the step before, on this rank
    with tf.device(self.dense.device):
      own = [*gradients.dense, tf.concat([[gradients.weight, loss], flags], 0)]
      *sums, counts = self._spans.timed(lambda: self._communicator.all_reduce(own), own)
    self._rows.push(
      deduped,
      rows,
      gradients.linear,
      gradients.factors,
      scale,
      self.dense.row_hyperparameters(self._step),
      self._step + 1,
    )
    self.dense.apply(sums, scale, self._step)
    self._step.assign_add(1)
    spans = self._spans.collect()
    return counts, self._rows.route(*following) if following else (), spans

  def set_steps(self, value: int) -> None:
    super().set_steps(value)
    if self._routes:
      self._rows.overflowed.assign(False)

  def consolidate(self) -> None:
    """Does what the base class does; first, raises BadPass on all ranks if the last push failed."""
    if self._routes:
      flag = {'overflowed': np.array(self._rows.overflowed.numpy(), np.int64)}
      if self._communicator.sum_arrays(flag)['overflowed']:
        self._check_finite(self._step, self.no_samples.batch, np.nan)
    super().consolidate()

  def predict_and_know(self, staged: Staged) -> tuple[np.ndarray, np.ndarray]:
    probabilities, known = self._predict(staged)
    return probabilities.numpy(), known.numpy()

  def _predict_graph(self, batch: SlotBatch, deduped: Deduped) -> tuple[tf.Tensor, tf.Tensor]:
    rows = self._rows.pull(deduped, self._rows.route(deduped, batch.weight), train=False)
    known = tf.gather(self.dense.known(rows), deduped.inverse)
    return self.dense.predict(batch, deduped, rows), known
