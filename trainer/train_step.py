"""One training step: rows in, gradients out, ranks met, everything updated."""
import functools
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from ops.row_store import DEDUPED_SPEC, Deduped
from trainer.config import UserError
from trainer.features import SlotBatch, empty_batch, to_tensor
from trainer.losses import per_sample_loss
from trainer.metrics import Metrics
from trainer.model import build
from trainer.sparse.embedding import Embedding
from trainer.sparse.exchange import rows_of
from trainer.sparse.store import make_store

BATCH_SPEC = SlotBatch(
    keys=tf.TensorSpec([None], tf.int64), values=tf.TensorSpec([None], tf.float32), segments=tf.TensorSpec([None], tf.int32),
    dense=tf.TensorSpec([None, None], tf.float32), label=tf.TensorSpec([None], tf.float32), weight=tf.TensorSpec([None], tf.float32),
    group=tf.TensorSpec([None], tf.int64))
ROUTE_SPEC = DEDUPED_SPEC, BATCH_SPEC.weight


class Staged(NamedTuple):
  """A batch on its way into a step, with all that needs nothing of the model: made ahead, while the step before runs."""
  batch: SlotBatch  # tensors
  deduped: Deduped


def traced(function, *specs):
  """`function` as a graph of tensors of these specs.

  A tf.function looks for the graph among several and binds its arguments by name at each call: .8 ms, in which a step does nothing else.
  """
  graph = tf.function(function, autograph=False, input_signature=specs).get_concrete_function()
  return lambda *args: graph._call_flat(tf.nest.flatten(args), graph.captured_inputs)


def dense_optimizer(config):
  """The Keras optimizer that `train.dense_optimizer` names (of the legacy kind: its slots are plain variables)."""
  kinds = tf.keras.optimizers.legacy
  kind = {'sgd': kinds.SGD, 'adagrad': kinds.Adagrad, 'adam': kinds.Adam, 'ftrl': kinds.Ftrl, 'rmsprop': kinds.RMSprop}[config.kind]
  return kind(learning_rate=config.learning_rate, **config.args)


def sample_gradients(model, embedding, loss_fn, batch, deduped, rows, position):
  """Differentiates the *sum* over this process's samples of weight·loss; the division by the global weight comes later, once.

  Args:
    deduped: the batch's unique keys (ops.row_store.dedupe).
    rows: linear float32 [u] and factors (flat) of those keys.
    position: int64 [2], (step, samples of this step on lower ranks): what dropout draws by.
  Returns: (loss sum, weight sum, probabilities [B], gradients of `model.trainable_variables`, of rows.linear [u], of rows.factors).
  """
  with tf.GradientTape() as tape:
    tape.watch([rows.linear, rows.factors])
    logits = model(embedding.embed(batch, deduped, rows)._replace(position=position), training=True)
    loss = tf.reduce_sum(batch.weight * loss_fn(batch.label, logits))
  variables = model.trainable_variables
  *dense, linear, factors = tape.gradient(loss, [*variables, rows.linear, rows.factors], unconnected_gradients='zero')
  return loss, tf.reduce_sum(batch.weight), model.probability(logits), dense, linear, factors


class TrainStep:
  """The step of one process or of one of N ranks, and the state that it changes.

  N ranks with b samples each equal one process with the same N·b samples, whatever their sizes, zero included: every rank
  differentiates its sum, sums and counts meet in one allreduce, and the division happens after it.

  Parameter servers have a step with the same methods (trainer.sync.parameter_server).

  Args:
    peers: how ranks meet (trainer.sync.allreduce).

  Attributes:
    store: where the rows that this process owns live; lifecycle verbs, counts and state (trainer.sparse.store).
    model: trainer.model.CTRModel. embedding: trainer.sparse.embedding.Embedding.
    metrics: trainer.metrics.Metrics of this process's samples since they were last reset.
    lockstep: whether all processes take each step together.
  """
  lockstep = True

  def __init__(self, cfg, peers):
    self._peers = peers
    self.model = build(cfg, peers.sum_with_gradient)
    self.embedding = Embedding(cfg, self.model.needs)
    self.store = self._open_rows(cfg, peers)
    self.metrics = Metrics(cfg)
    self._loss = per_sample_loss(cfg.model)
    self._optimizer = dense_optimizer(cfg.train.dense_optimizer)
    self._optimizer._create_all_weights(self.model.trainable_variables)  # now, so that a checkpoint can fill them before the first step
    self._step = tf.Variable(0, dtype=tf.int64, trainable=False)
    self._rate = tf.Variable(1.0, trainable=False)  # what a plateau lowers; multiplies every learning rate
    self._dense_rate = cfg.train.dense_optimizer.learning_rate

  def _open_rows(self, cfg, peers):
    """Readies what a step needs. Returns: `store`."""
    store = make_store(cfg, self.embedding)
    self._rows = rows_of(store, peers, cfg)
    self._nothing = self.stage(empty_batch(len(cfg.data.dense)))
    self._ahead = None, None  # a Staged, and what routing its keys gave
    return store

  @functools.cached_property
  def _train(self):
    routed = self._rows.routed
    return traced(self._train_graph, BATCH_SPEC, DEDUPED_SPEC, routed, routed and ROUTE_SPEC, tf.TensorSpec([3]))

  @functools.cached_property
  def _predict(self):
    return traced(self._predict_graph, BATCH_SPEC, DEDUPED_SPEC)

  @functools.cached_property
  def _route(self):
    return traced(self._rows.route, *ROUTE_SPEC)

  # One step

  def stage(self, batch):
    """SlotBatch (NumPy) -> Staged. Any thread may call it."""
    batch = SlotBatch(*map(to_tensor, batch))
    return Staged(batch, self.embedding.dedupe(batch))

  def train(self, staged, flags, following=None):
    """Trains on this process's share of a step.

    Args:
      staged: Staged; B may be 0.
      flags: three numbers, this process's (has a next batch, asks to stop, asks for a checkpoint).
      following: the Staged of the next call, on every rank or on none: its keys go to their owners while this step runs.
    Returns: float32 [5], summed over ranks: weight, loss, and how many ranks raised each flag.
    """
    of, routed = self._ahead
    if of is not staged:
      routed = self._route(staged.deduped, staged.batch.weight)
    following = following or self._nothing
    counts, routed = self._train(*staged, routed, self._rows.routed and (following.deduped, following.batch.weight),
                                 to_tensor(np.array(flags, np.float32)))
    self._ahead = following, routed
    return counts.numpy()

  def predict(self, staged):
    """Staged -> probabilities float32 [B]; changes nothing. Every rank calls it, with zero samples too."""
    return self._predict(*staged).numpy()

  def _train_graph(self, batch, deduped, routed, following, flags):
    total, before = self._rows.totals(batch.weight, routed)
    scale = 1 / tf.maximum(total, 1e-12)  # a step in which nobody has a sample changes nothing
    rows = self._rows.pull(deduped, routed, train=True)
    loss, weight, probabilities, dense, linear, factors = sample_gradients(
        self.model, self.embedding, self._loss, batch, deduped, rows, tf.stack([self._step, before]))
    *dense, counts = self._peers.sum_all([*dense, tf.concat([[weight, loss], flags], 0)])
    self._rows.push(deduped, rows, linear, factors, scale, self.embedding.hyper(self._rate), self._step + 1)
    self._optimizer.apply_gradients([(g * scale, v) for g, v in zip(dense, self.model.trainable_variables)])
    self._step.assign_add(1)
    self.metrics.update(batch.label, probabilities, batch.weight)
    return counts, self._rows.route(*following) if following else ()

  def _predict_graph(self, batch, deduped):
    rows = self._rows.pull(deduped, self._rows.route(deduped, batch.weight), train=False)
    return self.model.probability(self.model(self.embedding.embed(batch, deduped, rows), training=False))

  def align(self):
    """Makes state fit to be read, saved or exported; every rank calls it.

    Rows take the steps they owe (l2_mode owed); what each rank keeps by itself, the moving statistics of local batch norm, is averaged.
    """
    if self.embedding.owes:
      self.store.settle(self.embedding.hyper(self._rate), self._step)
    kept = self.model.non_trainable_variables
    for variable, total in zip(kept, self._peers.sum_all(kept) if kept else []):
      variable.assign(total / self._peers.size)

  def report(self):
    """Further figures of this pass for metrics.jsonl."""
    return {}

  # State

  @property
  def step(self):
    """Steps taken."""
    return int(self._step.numpy())

  @step.setter
  def step(self, value):
    self._step.assign(value)

  def set_rate(self, factor):
    """Multiplies the configured learning rates, dense and sparse, by `factor`."""
    self._rate.assign(factor)
    self._optimizer.learning_rate = self._dense_rate * factor

  def set_dense_stats(self, stats):
    """What dense columns are standardised with: float32 [2, Dn] (trainer.features.dense_stats)."""
    self.embedding.stats.assign(stats)

  def _variables(self):
    variables = [*self.model.variables, *self._optimizer.weights]
    return {'dense_stats': self.embedding.stats} | {f'{i:03d}/{v.name}': v for i, v in enumerate(variables)}

  def dense(self):
    """name -> NumPy array of everything that is not in rows; the same on every rank."""
    return {name: v.numpy() for name, v in self._variables().items()}

  def load_dense(self, arrays):
    """The inverse of `dense`. Raises: UserError naming a variable that is missing or of another shape."""
    for name, variable in self._variables().items():
      if name not in arrays or tuple(arrays[name].shape) != tuple(variable.shape):
        raise UserError(f"the checkpoint has no dense variable '{name}' of shape {tuple(variable.shape)}; it is of another model")
      variable.assign(arrays[name])
