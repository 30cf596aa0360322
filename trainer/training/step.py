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
from trainer.errors import UserError
from trainer.runtime import HOST
from trainer.training.advice import why_not_finite
from trainer.training.dense_part import DensePart
from trainer.training.retrieval_part import RetrievalPart


def batch_spec(cfg: config.Config) -> SlotBatch:
  samples = [None] if len(cfg.labels) == 1 else [None, len(cfg.labels)]
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
  )


# The smallest divisor of sums, so that nothing is divided by 0 if all weights are 0.
LEAST_WEIGHT = 1e-12


class Staged(NamedTuple):
  """A batch, made ready while the step before it runs; it does not depend on the weights."""

  batch: SlotBatch  # a batch of tensors; with several tasks, each label has a weight
  deduped: Deduped  # its distinct keys, with their shows and clicks


class StepFlags(NamedTuple):
  """The flags that a rank sends to all others in a step."""

  has_next: bool  # it has another batch
  stop: bool  # it was asked to stop
  save: bool  # it asks for a checkpoint


class StepCounts(NamedTuple):
  """The losses, weights and flags of one step, each summed over all ranks."""

  weight: float  # Σ weight
  loss: float  # Σ weight·loss
  has_next: int  # how many ranks raised each flag
  stop: int
  save: int


class Step(abc.ABC):
  """Base class of training steps, on ranks or on parameter servers.

  Args:
    dense: the layers of this process.

  Attributes:
    store: the rows that this process owns.
    in_lockstep: whether all processes take each step together.
    exchange_seconds: how long the steps of this process have been exchanging rows, gradients and
      sums with other processes so far, including the time spent waiting for them.
  """

  exchange_seconds = 0.0
  store: RowTable
  in_lockstep: bool

  def __init__(self, cfg: config.Config, communicator: Communicator, dense: DensePart):
    self._cfg, self._communicator, self.dense = cfg, communicator, dense
    with tf.device(HOST):
      self._step = tf.Variable(0, dtype=tf.int64, trainable=False)  # the number of steps taken
    self._rows_lag = dense.embedding.catches_up  # whether rows miss steps of their penalty

  def stage(self, batch: SlotBatch) -> Staged:
    """Converts a batch of NumPy arrays to tensors, and finds its distinct keys. Thread-safe."""
    batch = SlotBatch(*map(to_tensor, weigh_labels(batch)))
    with tf.device(HOST):
      return Staged(batch, self.dense.embedding.dedupe(batch))

  @abc.abstractmethod
  def route(self, staged: Staged) -> Routing:
    """Sends the keys of a batch to the owners of their rows; pass the result to `train`."""

  @abc.abstractmethod
  def train(
    self, staged: Staged, routed: Routing, following: Staged | None, flags: StepFlags
  ) -> tuple[StepCounts, Routing]:
    """Trains on this process's share of a step.

    Args:
      staged: the batch.
      routed: what `route`, or the call before, returned for this batch.
      following: the batch of the next call, whose keys are routed while this step runs. None if
        there is no next batch; then every process must pass None.
      flags: what this rank tells the others.
    Returns:
      The counts of the step, and the routing of `following`.
    Raises:
      UserError: if the loss or a gradient is not finite.
    """

  def predict(self, staged: Staged) -> np.ndarray:
    """Returns probabilities, float32 [B]; [B, T] with several tasks.

    Every process calls it, even one that has no samples.
    """
    return self.predict_and_know(staged)[0]

  @abc.abstractmethod
  def predict_and_know(self, staged: Staged) -> tuple[np.ndarray, np.ndarray]:
    """Predicts, and finds which features of the batch the model knows.

    Returns:
      The result of `predict`, and for each feature of the batch whether it is known, bool [nnz].
    """

  def consolidate(self) -> None:
    """Prepares the state to be read, saved or exported. Every process calls it.

    With l2_mode catch_up, rows receive the steps of the penalty that they missed. The moving
    statistics of local batch norm are averaged over processes.
    """
    if self._rows_lag:
      self.store.catch_up(self.dense.row_hyperparameters(self._step), self._step)
    if local := self.dense.model.non_trainable_variables:
      for variable, total in zip(local, self._communicator.all_reduce(local)):
        variable.assign(total / self._communicator.size)

  def traffic(self) -> dict[str, float]:
    """Returns further figures of a pass for metrics.jsonl; only parameter servers have some."""
    return {}

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

  def dense_state(self) -> dict[str, np.ndarray]:
    """Returns DensePart.state; with parameter servers, the state that they hold."""
    return self.dense.state()

  def load_dense_state(self, arrays: dict[str, np.ndarray]) -> None:
    """Loads what `dense_state` returned."""
    self.dense.load_state(arrays)


@functools.cache
def _as_tensor(flags: StepFlags) -> tf.Tensor:
  """Returns flags as float32 [3]; each of the eight possible tensors is made once."""
  return to_tensor(np.array(flags, np.float32))


def check_finite(cfg: config.Config, step: tf.Variable, batch: SlotBatch, loss: float) -> None:
  """Checks that the loss and the gradients of a step are finite.

  Args:
    step: int64 [], the number of the step. It is read only for the error, because reading it takes
      0.3 ms.
    loss: Σ weight·loss, NaN if any gradient is not finite.
  Raises:
    UserError: if they are not finite; the message names the likely cause.
  """
  if not np.isfinite(loss):
    found = f'the loss or a gradient is not finite at step {int(step.numpy())}'
    raise UserError(f'{found}: {why_not_finite(cfg, batch)}; earlier checkpoints are intact')


def traced(function: Callable, *specs: object) -> Callable:
  """Returns a function that runs the graph of `function`, traced for arguments of `specs`.

  Its ops are on the host unless `function` says otherwise.

  Each call of a tf.function looks up the graph and binds arguments by name, which takes 0.8 ms. The
  private `_call_flat` takes the tensors as they are.
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
    dense_dtype: see trainer.model.builder.build.
  """

  in_lockstep = True

  def __init__(
    self, cfg: config.Config, communicator: Communicator, dense_dtype: str | None = None
  ):
    if cfg.model.retrieval is None:
      dense = DensePart(cfg, communicator.all_reduce_with_gradient, dense_dtype)
    else:
      dense = RetrievalPart(cfg, communicator)
    super().__init__(cfg, communicator, dense)
    self.store = make_store(cfg, self.dense.embedding)
    self._spans = Spans()
    self._rows = rows_of(self.store, communicator, cfg, self._spans)
    self._no_samples = self.stage(empty_batch(len(cfg.data.dense), len(cfg.labels)))
    spec = batch_spec(cfg)
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
    following = following or self._no_samples
    routes = (following.deduped, following.batch.weight) if self._routes else ()
    try:
      counts, routed, spans = self._train(staged, routed, routes, _as_tensor(flags))
      counts = StepCounts(*counts.numpy())
    except tf.errors.OutOfRangeError:  # the row store refuses a gradient that is not finite
      counts = StepCounts(0, np.nan, 0, 0, 0)
    check_finite(self._cfg, self._step, staged.batch, counts.loss)
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
    with tf.device(self.dense.device):
      own = [*gradients.dense, tf.concat([[gradients.weight, gradients.loss], flags], 0)]
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

  def predict_and_know(self, staged: Staged) -> tuple[np.ndarray, np.ndarray]:
    probabilities, known = self._predict(staged)
    return probabilities.numpy(), known.numpy()

  def _predict_graph(self, batch: SlotBatch, deduped: Deduped) -> tuple[tf.Tensor, tf.Tensor]:
    rows = self._rows.pull(deduped, self._rows.route(deduped, batch.weight), train=False)
    # We cannot ask other ranks whether a row exists, so it counts as known if its weight is not 0
    # or it has factors.
    known = (rows.linear != 0) | (rows.offsets[1:] > rows.offsets[:-1])
    return self.dense.predict(batch, deduped, rows), tf.gather(known, deduped.inverse)
