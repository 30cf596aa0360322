"""The model of several tasks: towers over shared parts, and what turns logits into predictions."""

from collections.abc import Mapping, Sequence

import tensorflow as tf

from trainer.config import Label
from trainer.embedding.layer_inputs import LayerInputs


def logit_of_product(first: tf.Tensor, second: tf.Tensor) -> tf.Tensor:
  """Returns z with σ(z) = σ(first)·σ(second), finite however small the product is.

  With 1/σ(a) = 1 + e^−a, 1/p − 1 = e^−a + e^−b + e^−(a+b), and z is −log of that.

  Args:
    first: float32 logits of any shape.
    second: likewise.
  """
  terms = tf.stack([-first, -second, -first - second])
  return -tf.reduce_logsumexp(terms, 0)


class TaskModel(tf.keras.Model):
  """A logit for each task t of T: bias_t + Σ over the shared and its own interactions.

  A task with `given` predicts that task's probability times its own σ(logit), as ESMM does (Ma et
  al. 2018, "Entire Space Multi-Task Model"): p(conversion) = p(click)·p(conversion | click), which
  is trained on all impressions. The logit that this model gives for it is that of the product. A
  loss of labels that come late trains p(conversion | click) alone: the click's own label was known
  at once, and what comes on a day, of impressions of days before, says nothing of that day's.

  Args:
    labels: of the config, T.
    interactions: terms of every task's logit.
    shared: gives what `tower`s read, or None.
    of_tasks: each task's own interactions, in the order of `labels`.
    given: task -> the task that its prediction is multiplied by.
    dense_columns: Dn.

  Attributes:
    needs: what the layers read of a batch, names of trainer.embedding.layer_inputs.NEEDS.
  """

  def __init__(
    self,
    labels: Sequence[Label],
    interactions: Sequence[tf.keras.layers.Layer],
    shared: tf.keras.layers.Layer | None,
    of_tasks: Sequence[Sequence[tf.keras.layers.Layer]],
    given: Mapping[str, str],
    dense_columns: int,
  ):
    super().__init__(name='model')
    self._names = [label.name for label in labels]
    self._predicts_clicks = [label.loss != 'squared_error' for label in labels]
    self.interactions, self.shared = list(interactions), shared
    self.of_tasks = [list(layers) for layers in of_tasks]
    self._given = dict(given)
    self._late = {label.name for label in labels if label.loss == 'fake_negative'}
    self._dense_columns = dense_columns
    layers = [*interactions, *(layer for some in of_tasks for layer in some)]
    layers += [] if shared is None else [shared]
    self.needs = frozenset().union(*(layer.needs for layer in layers)) - {'shared'}
    self._bias = self.add_weight('bias', [len(labels)], initializer='zeros')

  def call(self, inputs: LayerInputs, training: bool = False) -> tf.Tensor:
    """Returns the logits, float32 [B, T]."""
    inputs = inputs._replace(dense=tf.ensure_shape(inputs.dense, [None, self._dense_columns]))
    common = [layer(inputs, training=training) for layer in self.interactions]
    shared = [None] * len(self._names)
    if self.shared is not None:
      shared = self.shared(inputs, training=training)
    own = {}
    for t, (name, layers) in enumerate(zip(self._names, self.of_tasks)):
      seen = inputs._replace(shared=shared[t])
      terms = common + [layer(seen, training=training) for layer in layers]
      own[name] = tf.add_n(terms) + self._bias[t]

    def logit(name: str) -> tf.Tensor:
      if name not in self._given:
        return own[name]
      given = logit(self._given[name])
      return logit_of_product(tf.stop_gradient(given) if name in self._late else given, own[name])

    return tf.concat([logit(name) for name in self._names], 1)

  def probability(self, logits: tf.Tensor, in_log: bool = False) -> tf.Tensor:
    """Returns predictions float32 [B, T]: probabilities; for squared error, the logits.

    Args:
      logits: float32 [B, T].
      in_log: as of CTRModel.probability; no label of several was sampled, so it changes nothing.
    """
    columns = zip(tf.unstack(logits, len(self._names), 1), self._predicts_clicks)
    return tf.stack([tf.sigmoid(z) if clicks else z for z, clicks in columns], 1)

  def predictions(self, logits: tf.Tensor) -> dict[str, tf.Tensor]:
    """Returns the predictions by task, float32 [B] each."""
    columns = tf.unstack(self.probability(logits), len(self._names), 1)
    return dict(zip(self._names, columns))
