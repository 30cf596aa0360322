"""The dense part of a model: layers, loss and optimizer. It also pools the rows of a batch."""

import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from ops.dedupe import Deduped
from ops.library import TensorLike
from ops.row_store import PulledRows, has_row
from trainer import config
from trainer.data.features import SlotBatch
from trainer.data.prepared import PreparedPass
from trainer.embedding.embedding import Embedding
from trainer.embedding.layer_inputs import LayerInputs
from trainer.embedding.row_table import RowTable
from trainer.errors import UserError
from trainer.model.builder import build
from trainer.model.losses import sample_losses
from trainer.model.metrics import MetricSums
from trainer.runtime import HOST, dense_device
from trainer.training.schedule import Rates


class Gradients(NamedTuple):
  """Gradients of Σ weight·loss over the samples of one process, before any division by a weight."""

  loss: tf.Tensor  # float32 [], Σ weight·loss; NaN if it or a gradient is not finite
  # float32 [], Σ weight, by which the caller divides the sums. With several tasks, it is the weight
  # of the task whose labels weigh most over all ranks.
  weight: tf.Tensor
  dense: list[tf.Tensor]  # for the trainable variables, in order
  linear: tf.Tensor  # float32 [u], for the linear weights of u distinct keys
  factors: tf.Tensor  # float32, flat, for their factors


def dense_optimizer(settings: config.DenseOptimizer) -> tf.keras.optimizers.legacy.Optimizer:
  """Returns the Keras optimizer that `train.dense_optimizer` names.

  It is one of Keras' legacy optimizers, because their state is in plain variables: checkpoints can
  read them, and parameter servers can hold them.
  """
  name = {'sgd': 'SGD', 'rmsprop': 'RMSprop'}.get(settings.kind, settings.kind.title())
  optimizer = getattr(tf.keras.optimizers.legacy, name)
  return optimizer(learning_rate=settings.learning_rate, **settings.args)


class DensePart:
  """The layers with their loss, optimizer and metrics, on one process.

  The layers, the optimizer and the dense gradients are on the GPU, if there is one. Rows, their
  pooling and the metrics are on the host. So a step copies slot sums and their gradients between
  host and GPU, but no rows.

  Args:
    sum_across_ranks: returns the sum of a float32 tensor over ranks, and is differentiable; sync
      batch norm uses it.
    dense_dtype: the dtype of matrix products in training steps; None for `train.dense_dtype`.

  Attributes:
    device: the TensorFlow device of the layers and their optimizer.
    embedding: turns the rows of a batch into the inputs of the layers.
    metrics: sums over the samples trained on since the last reset.
    rates: computes the factor by which all learning rates are multiplied.
  """

  def __init__(
    self,
    cfg: config.Config,
    sum_across_ranks: Callable[[tf.Tensor], tf.Tensor] | None,
    dense_dtype: str | None = None,
  ):
    self.device = dense_device()
    self.optimizer = dense_optimizer(cfg.train.dense_optimizer)
    with tf.device(self.device):
      self.model = build(cfg, sum_across_ranks, dense_dtype)
      # Makes the optimizer's variables before the first step, so that a checkpoint can be loaded
      # into them. The public way is to trace apply_gradients, which gives them names that differ
      # from those in checkpoints.
      self.optimizer._create_all_weights(self.model.trainable_variables)
    with tf.device(HOST):
      self.embedding = Embedding(cfg, self.model.needs)
      self.metrics = MetricSums(cfg.kinds_of_labels)
      self.rates = Rates(cfg.train.schedule)
    self._loss = sample_losses(cfg.model, cfg.data.labels)
    self._learning_rate = cfg.train.dense_optimizer.learning_rate

  @property
  def trainable(self) -> list[tf.Variable]:
    return self.model.trainable_variables

  def read_items(self, table: PreparedPass) -> None:
    """Called with the content of data.items, which a subclass reads."""

  def begin_pass(self, prepared: PreparedPass, store: RowTable, is_new: bool) -> None:
    """Prepares for training on a pass, from its first batch on if `is_new`.

    Every process calls it. A subclass adds what it learns from the whole pass.
    """
    if is_new:
      self.metrics.reset()

  def for_step(self, batch: SlotBatch, step: int) -> SlotBatch:
    """Prepares a batch of NumPy arrays for a training step. A subclass may add to it."""
    return batch

  def gradients(
    self,
    batch: SlotBatch,
    deduped: Deduped,
    rows: PulledRows,
    position: tf.Tensor,
    total_weight: tf.Tensor | None = None,
    samples: tf.Tensor | None = None,
  ) -> Gradients:
    """Computes the gradients of Σ weight·loss over this process's samples; updates the metrics.

    The gradients are sums. The caller adds them up over ranks and divides once, by the weight of
    all samples of the step. So N ranks with b samples each equal one process with N·b samples.

    With several tasks, a task's mean loss is its sum divided by the weight of the task's labels.
    But the caller divides the losses of all tasks by one number, the greatest of these weights. So
    this method first multiplies a task's loss by the greatest weight / the task's weight.

    Args:
      position: LayerInputs.position.
      total_weight: float32 [T], the weight of each task's labels over all samples of the step; it
        is read only with several tasks. None if this process has all samples.
      samples: int64 [], the number of samples of the step on all ranks, for `_loss_of`.
    """
    with tf.device(HOST):
      weight, weights = tf.reduce_sum(batch.weight, 0), batch.weight
      if weight.shape.rank:  # [T]
        total_weight = weight if total_weight is None else total_weight
        greatest = tf.argmax(total_weight)
        weights *= tf.math.divide_no_nan(total_weight[greatest], total_weight)
        weight = weight[greatest]
      with tf.GradientTape() as pooling:
        pooling.watch([rows.linear, rows.factors])
        inputs = self.embedding.embed(batch, deduped, rows)
      if 'position' in self.model.needs:
        inputs = inputs._replace(position=position)
      pooled = inputs.of_rows()
    with tf.device(self.device):
      with tf.GradientTape() as tape:
        tape.watch(pooled)
        loss, measured = self._loss_of(batch, inputs, weights, samples)
      *dense, of_pooled = tape.gradient(loss, [*self.trainable, pooled])
      dense = [tf.zeros_like(v) if g is None else g for g, v in zip(dense, self.trainable)]
      sum_of_dense = tf.add_n([tf.zeros([]), *(tf.reduce_sum(gradient) for gradient in dense)])
    with tf.device(HOST):
      read = [(x, g) for x, g in zip(pooled, of_pooled) if g is not None]
      linear, factors = pooling.gradient(
        [x for x, _ in read],
        [rows.linear, rows.factors],
        output_gradients=[g for _, g in read],
        unconnected_gradients='zero',
      )
      self.metrics.update(batch.label, measured, batch.weight)
      # The loss, which is summed over processes, becomes NaN if any gradient is not finite. (Adding
      # 0 times a sum of gradients would not do: TensorFlow's graph optimizer replaces it by 0.)
      total = sum_of_dense + tf.reduce_sum(linear) + tf.reduce_sum(factors)
      loss = tf.where(tf.math.is_finite(total), loss, np.nan)
    return Gradients(loss, weight, dense, linear, factors)

  def _loss_of(
    self, batch: SlotBatch, inputs: LayerInputs, weights: tf.Tensor, samples: tf.Tensor | None
  ) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns Σ weight·loss, and the probabilities that the metrics measure, [B] or [B, T]."""
    del samples
    logits = self.model(inputs, training=True)
    loss = tf.reduce_sum(weights * self._loss(batch.label, logits))
    return loss, self.model.probability(self.model.mean_of_members(logits), in_log=True)

  def known(self, rows: PulledRows) -> tf.Tensor:
    """Returns which features the model was trained on, bool [u]: those that have a row."""
    return has_row(rows.linear)

  def predict(self, batch: SlotBatch, deduped: Deduped, rows: PulledRows) -> tf.Tensor:
    """Returns probabilities, float32 [B]; [B, T] with several tasks. It changes no state."""
    with tf.device(HOST):
      inputs = self.embedding.embed(batch, deduped, rows)
    with tf.device(self.device):
      return self.model.probability(self.model(inputs, training=False))

  def apply(self, gradients: list[tf.Tensor], scale: tf.Tensor, steps: TensorLike) -> None:
    """Takes one step of the dense optimizer, after `steps` others.

    `gradients` are those of `trainable`, summed over all samples of the step; times `scale`,
    float32 [], they are means.
    """
    self.optimizer.learning_rate.assign(self._learning_rate * self.rates.at(steps))
    with tf.device(self.device):
      scaled = [gradient * scale for gradient in gradients]
      if scaled:  # a model of rows alone has no dense variables
        self.optimizer.apply_gradients(zip(scaled, self.trainable))

  def assign(self, variable: tf.Variable, value: np.ndarray) -> None:
    """Sets a variable of `trainable`. For FTRL, it also sets z so that the weight follows from it.

    It solves the formula of TensorFlow's ResourceApplyFtrl for z. AddToRow (C++) does so for rows.
    """
    if isinstance(self.optimizer, tf.keras.optimizers.legacy.Ftrl):
      settings = self.optimizer.get_config()
      l1, l2 = settings['l1_regularization_strength'], settings['l2_regularization_strength']
      rate = settings['learning_rate'] / (1 + settings['decay'] * int(self.optimizer.iterations))
      n, z = (self.optimizer.get_slot(variable, name) for name in ('accumulator', 'linear'))
      root = n ** -settings['learning_rate_power']
      solved = -value * ((settings['beta'] + root) / rate + 2 * l2) - l1 * np.sign(value)
      at_zero = tf.clip_by_value(z, -l1, l1)
      z.assign(tf.where(value == variable, z, tf.where(value == 0, at_zero, solved)))
    variable.assign(value)

  def row_hyperparameters(self, steps: TensorLike) -> tf.Tensor:
    """Returns the tables' hyperparameters for `RowStore.push`, after `steps` steps."""
    return self.embedding.hyper(self.rates.at(steps))

  def _variables(self) -> dict[str, tf.Variable]:
    variables = enumerate([*self.model.variables, *self.optimizer.weights])
    return {'dense_stats': self.embedding.stats, **{f'{i:03d}/{v.name}': v for i, v in variables}}

  def state(self) -> dict[str, np.ndarray]:
    """Returns {name: value} of the variables of layers and optimizer, the same on every rank."""
    return {name: v.numpy() for name, v in self._variables().items()}

  def load_state(self, arrays: dict[str, np.ndarray]) -> None:
    """Loads what `state` returned; a UserError names a variable that has no such array."""
    saved = {_uncounted(name): array for name, array in arrays.items()}
    for name, variable in self._variables().items():
      shape, array = tuple(variable.shape), saved.get(_uncounted(name))
      if array is None or tuple(array.shape) != shape:
        raise UserError(f"the checkpoint has no variable '{name}' of shape {shape}")
      variable.assign(array)


def _uncounted(name: str) -> str:
  """Returns the name of a variable, which begins with its place, without the numbers of layers.

  Keras numbers the layers of a process that have no name, such as those within a user's layer. So
  their numbers differ between processes.
  """
  return re.sub(r'_\d+(?=/)', '', name)
