"""The dense part of a model with model.retrieval: its layers, its loss and its optimizer."""

import numpy as np
import tensorflow as tf

from ops.dedupe import Deduped
from ops.row_store import PulledRows
from trainer import config
from trainer.comm.communicator import Communicator
from trainer.data.features import SlotBatch
from trainer.data.prepared import PreparedPass
from trainer.embedding.layer_inputs import LayerInputs
from trainer.embedding.row_table import RowTable
from trainer.retrieval import losses as retrieval_losses
from trainer.retrieval import model as retrieval
from trainer.retrieval.catalogue import Catalogue
from trainer.training.dense_part import DensePart

# Dropout depends on the number of a sample among those of all ranks. Drawn negatives, which are the
# same on all ranks, are numbered from here on.
_CANDIDATES_FROM = 1 << 40
# In a list of positives, stands for the item of a sample with a negative label. It is not -1, the
# item of samples without one, because it must equal no negative.
_NO_POSITIVE = np.int64(-2)


class RetrievalPart(DensePart):
  """Trains the query and the item tower.

  The loss compares each query with its own item and with negatives. These are the items of the
  step's samples on all ranks (in_batch_softmax), or items drawn from the catalogue.
  """

  def __init__(self, cfg: config.Config, communicator: Communicator):
    super().__init__(cfg, communicator.all_reduce_with_gradient)
    self._communicator, self._settings = communicator, cfg.model.retrieval
    self._in_batch = self._settings.loss == 'in_batch_softmax'
    self._of_pass = self._settings.own_positives == 'pass' and not self._in_batch
    self._ranking_loss = retrieval_losses.LOSSES[self._settings.loss]
    self.catalogue = Catalogue(cfg)  # the items with their shows; part of the state
    self.for_step, self.read_items = self.catalogue.for_step, self.catalogue.read_items

  def begin_pass(self, prepared: PreparedPass, store: RowTable, is_new: bool) -> None:
    """Does what the base class does; the catalogue gets the items and positives of the pass."""
    super().begin_pass(prepared, store, is_new)
    if is_new:
      self.catalogue.refresh(store, self._communicator, prepared)
    self.catalogue.learn_positives(prepared)

  def _loss_of(
    self, batch: SlotBatch, inputs: LayerInputs, weights: tf.Tensor, samples: tf.Tensor
  ) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns Σ weight·loss over this process's B samples, and each sample's loss, float32 [B].

    `weights` are float32 [B]; `samples`, int64 [], is the number of samples that all ranks have.
    """
    size, (step, before) = tf.shape(batch.label)[0], tf.unstack(inputs.position)
    own, drawn = retrieval.split(inputs, size)
    queries, positives = self.model(own, training=True), self.model.items(own, True)
    shares, items = batch.log_share[:size], batch.item[:size]
    place = tf.cast(tf.stack([before, samples - before - tf.cast(size, tf.int64)]), tf.int32)

    def of_all(t: tf.Tensor) -> tf.Tensor:
      """Concatenates the rows of `t` on all ranks; differentiable if `t` is of floats."""
      return self._communicator.all_reduce_with_gradient(tf.pad(t, [place, [0, 0]]))

    if not self._of_pass:
      right = tf.where(batch.label > 0.5, items, _NO_POSITIVE)
      of_users = of_all(tf.stack([batch.group, items, right], 1))
    if self._in_batch:
      joined = of_all(tf.concat([positives, shares[:, None]], 1))
      vectors, negative_shares = joined[:, :-1], joined[:, -1]
      negative_items, count = of_users[:, 1], samples - 1
      blank = tf.where(negative_items < 0, retrieval_losses.NEVER, 0.0)
    else:
      drawn = drawn._replace(position=tf.stack([step, tf.constant(_CANDIDATES_FROM, tf.int64)]))
      vectors, negative_shares = self.model.items(drawn, True), batch.log_share[size:]
      negative_items, count = batch.item[size:], tf.size(negative_shares, tf.int64)

    queries /= self._settings.temperature
    positive = tf.reduce_sum(queries * positives, 1)
    negatives = tf.matmul(queries, vectors, transpose_b=True)
    if self._settings.logq != 'none':
      expected = tf.math.log(tf.cast(tf.maximum(count, 1), tf.float32))
      negatives -= negative_shares + expected
      if self._settings.logq_positive:
        positive -= shares + expected
    if self._in_batch:
      negatives += blank
    if self._of_pass:
      left_out = batch.left_out
    else:
      left_out = retrieval_losses.own_positives(
        batch.group, of_users[:, 0], of_users[:, 2], negative_items
      )
    losses = self._ranking_loss(positive, retrieval_losses.leave_out(negatives, left_out))
    return tf.reduce_sum(weights * losses), losses

  def state(self) -> dict[str, np.ndarray]:
    return super().state() | self.catalogue.state()

  def load_state(self, arrays: dict[str, np.ndarray]) -> None:
    super().load_state(arrays)
    self.catalogue.load(arrays)

  def known(self, rows: PulledRows) -> tf.Tensor:
    """Returns which features have factors, bool [u]: towers read nothing else of a row."""
    return tf.greater(rows.offsets[1:], rows.offsets[:-1])

  def predict(self, batch: SlotBatch, deduped: Deduped, rows: PulledRows) -> tf.Tensor:
    """Returns the vectors of each sample's query and of its item, float32 [B, 2, d]."""
    inputs = self.embedding.embed(batch, deduped, rows)
    with tf.device(self.device):
      return tf.stack([self.model(inputs), self.model.items(inputs)], 1)
