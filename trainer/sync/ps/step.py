"""The training step of a worker: rows and dense variables from the servers, gradients to them; the rest is TrainStep's."""
import numpy as np
import tensorflow as tf

from ops import row_store
from trainer.config import INTERACTIONS
from trainer.features import to_tensor
from trainer.sparse.store import make_store
from trainer.sync.ps.servers import Servers
from trainer.sync.ps.store import ServedStore
from trainer.train_step import BATCH_SPEC, DEDUPED_SPEC, TrainStep, dense_optimizer, sample_gradients


class PsStep(TrainStep):
  """The step of modes ps and ps_async.

  In mode ps N workers with b samples each equal one process with the same N·b samples, as N ranks do: workers send sums, the servers
  divide once, by the global weight. In mode ps_async a worker's push is a step of its own and divides by its own weight.

  The model and its optimizer's slots here are copies: what counts is on the servers.

  Args:
    cluster: trainer.sync.ps.cluster.Cluster; target: of this worker's tf.distribute.Server.
    peers: trainer.sync.ps.hub.Peers.
  """

  def __init__(self, cfg, peers, cluster, target):
    self.cluster, self._target = cluster, target
    self.lockstep = cfg.sync.mode == 'ps'
    # Dropout draws by a sample's place in the global batch, which costs a message more.
    self._draws = self.lockstep and any(i.kind not in INTERACTIONS or i.args.get('dropout') for i in cfg.model.interactions)
    super().__init__(cfg, peers)
    self._samples = 0  # since the last report
    if not peers.late:
      if peers.rank == 0:
        self.servers.start(self._copies())
      peers.barrier()
      self.servers.start_worker(peers.fail_by)
      peers.barrier()
    self._stale = True  # whether the copies may differ from what is on the servers

  def _open_rows(self, cfg, peers):
    self.servers = Servers(cfg, self.cluster, self._target, peers, [v.shape for v in self.model.trainable_variables],
                           lambda: dense_optimizer(cfg.train.dense_optimizer), lambda name: make_store(cfg, self.embedding, name),
                           np.asarray(self.embedding.hyper(1.0)))
    self._dtype = tf.as_dtype(cfg.sparse.exchange_dtype)
    rows = [tf.TensorSpec([None]), tf.TensorSpec([None]), tf.TensorSpec([None], tf.int32)]
    dense = [tf.TensorSpec(v.shape) for v in self.model.trainable_variables]
    self._gradients = tf.function(self._gradients_graph, autograph=False, input_signature=[
        BATCH_SPEC, DEDUPED_SPEC, *rows, tf.TensorSpec([self.servers.count], tf.int32), dense, tf.TensorSpec([], tf.int64)])
    self._forward = tf.function(self._forward_graph, autograph=False, input_signature=[BATCH_SPEC, DEDUPED_SPEC, *rows])
    return ServedStore(self.servers, peers)

  # One step

  def train(self, staged, flags, following=None):
    """As TrainStep.train; in mode ps_async the sums are of this worker alone."""
    batch, deduped = staged
    self._samples += len(batch.label)
    before = sum(self._peers.gather(len(batch.label))[:self._peers.rank]) if self._draws else 0
    rows, sent, dense = self.servers.pull(deduped.unique.numpy(), True)
    arrays = tf.nest.map_structure(to_tensor, (rows.linear, rows.factors, rows.offsets, sent, dense, np.int64(before)))
    loss, weight, gradients, buffer, values = self._gradients(batch, deduped, *arrays)
    counts = np.array([weight, loss, *map(float, flags)], np.float32)
    result = self.servers.push(deduped.unique.numpy(), deduped.shows.numpy(), deduped.clicks.numpy(), buffer.numpy(), sent, values.numpy(),
                               *(g.numpy() for g in gradients), counts)
    self._stale = True
    if not self.lockstep:
      self._step.assign(to_tensor(result))
      return counts
    return np.concatenate([result[:2], np.rint(result[2:])])  # the accumulators' mean of flags times the workers is not whole to the bit

  def _gradients_graph(self, batch, deduped, linear, factors, offsets, sent, dense, before):
    for variable, value in zip(self.model.trainable_variables, dense):
      variable.assign(value)
    rows = row_store.Rows(None, offsets, linear, factors)
    loss, weight, probabilities, dense, linear, factors = sample_gradients(
        self.model, self.embedding, self._loss, batch, deduped, rows, tf.stack([self._step, before]))
    self.metrics.update(batch.label, probabilities, batch.weight)
    if self.lockstep:
      self._step.assign_add(1)
      buffer, values = row_store.pack_gradients(linear, factors, offsets, sent, self._dtype)
    else:
      buffer, values = row_store.pack_rows(row_store.Rows(None, offsets, linear, factors), tf.range(tf.size(linear)), sent, self._dtype)
    return loss, weight, [tf.convert_to_tensor(g) for g in dense], buffer, values

  def predict(self, staged):
    self._refresh()
    batch, deduped = staged
    rows, _, _ = self.servers.pull(deduped.unique.numpy(), False)
    return self._forward(batch, deduped, *map(to_tensor, (rows.linear, rows.factors, rows.offsets))).numpy()

  def _forward_graph(self, batch, deduped, linear, factors, offsets):
    rows = row_store.Rows(None, offsets, linear, factors)
    return self.model.probability(self.model(self.embedding.embed(batch, deduped, rows), training=False))

  def finish(self):
    """After the last step before all meet: nothing of this worker's is on the way any more."""
    self._stale = True

  def align(self):
    self._refresh()
    super().align()

  def report(self):
    """Bytes that workers and servers exchanged for a sample, since the last report: keys, rows, gradients, dense variables."""
    total = self._peers.sum_arrays({'bytes': np.array([self.servers.bytes, self._samples], np.int64)})['bytes']
    self.servers.bytes = self._samples = 0
    return {'bytes_per_sample': round(total[0] / max(1, total[1]), 1)}

  # State

  def _copies(self):
    return [v.numpy() for v in [*self.model.trainable_variables, *self._optimizer.weights]]

  def _refresh(self):
    """Makes the copies equal to what is on the servers, where they may differ. Nobody trains meanwhile."""
    if not self._stale:
      return
    state, step, _ = self.servers.state()
    self._take(state)
    self._step.assign(step)
    self._stale = False

  def _take(self, state):
    for variable, value in zip([*self.model.trainable_variables, *self._optimizer.weights], state):
      variable.assign(value)

  @property
  def step(self):
    if not self.lockstep:
      self._refresh()
    return int(self._step.numpy())

  @step.setter
  def step(self, value):
    self._step.assign(value)
    self._assign(step=value)

  def set_rate(self, factor):
    super().set_rate(factor)
    self._assign(rate=factor)

  def dense(self):
    self._refresh()
    return super().dense()

  def load_dense(self, arrays):
    super().load_dense(arrays)
    self._assign(state=self._copies())
    self._stale = False

  def _assign(self, **values):
    """One worker sets it on the servers; every worker calls this."""
    self._peers.barrier()
    if self._peers.rank == 0 and not self._peers.alone:
      self.servers.assign(**values)
    self._peers.barrier()

  def local(self):
    """name -> array of what a worker keeps by itself and one that comes late needs."""
    kept = [self.embedding.stats, *self.model.non_trainable_variables]
    return {v.name: v.numpy() for v in kept}

  def load_local(self, arrays):
    for variable in [self.embedding.stats, *self.model.non_trainable_variables]:
      variable.assign(arrays[variable.name])
