"""The model of clicks: for each label the sum of the logits of interactions, and its prediction."""

import math
from collections.abc import Sequence

import tensorflow as tf

from trainer.config import Config
from trainer.embedding.layer_inputs import LayerInputs, with_fields


def logit_of_product(first: tf.Tensor, second: tf.Tensor) -> tf.Tensor:
  """Returns z with σ(z) = σ(first)·σ(second); z is finite however small the product is.

  As 1/σ(a) = 1 + e^−a, the product p has 1/p − 1 = e^−a + e^−b + e^−(a+b), and z is −log of that.
  """
  terms = tf.stack([-first, -second, -first - second])
  return -tf.reduce_logsumexp(terms, 0)


class CTRModel(tf.keras.Model):
  """A logit for each of T labels: bias_t + the logits of the common and of its own interactions.

  A task with `given` predicts the given task's probability times its own σ(logit), as ESMM does (Ma
  et al. 2018, "Entire Space Multi-Task Model"): p(conversion) = p(click)·p(conversion | click),
  trained on all impressions. This model returns the logit of the product. If the task's loss is
  fake_negative, for late labels, it trains only p(conversion | click): the click's label was known
  at once, and late conversions belong to impressions of earlier days.

  All variables exist once `trainer.model.builder.build` has called it. Their initial values depend
  only on the config, so that all ranks start from the same values.

  Args:
    interactions: the common terms of every label's logit.
    shared: the layer whose output `tower`s read, or None.
    of_tasks: the own interactions of each label, in the order of `Config.labels`.
    dense_embedding: maps the dense columns to vectors, [B, Dn, D]; None: they get no vectors.

  Attributes:
    needs: which of trainer.embedding.layer_inputs.NEEDS the layers read.
  """

  def __init__(
    self,
    cfg: Config,
    interactions: Sequence[tf.keras.layers.Layer],
    shared: tf.keras.layers.Layer | None,
    of_tasks: Sequence[Sequence[tf.keras.layers.Layer]],
    dense_embedding: tf.keras.layers.Layer | None,
  ):
    super().__init__(name='model')
    self._names = [label.name for label in cfg.labels]
    self._predicts_clicks = [label.loss != 'squared_error' for label in cfg.labels]
    self._logit_shift = math.log(cfg.model.negative_sampling_rate)
    self.interactions, self.shared = list(interactions), shared
    self.dense_embedding = dense_embedding
    self.of_tasks = [list(layers) for layers in of_tasks]
    self._given = {name: task.given for name, task in cfg.model.tasks.items() if task.given}
    self._late = {label.name for label in cfg.labels if label.loss == 'fake_negative'}
    layers = [*interactions, *(layer for some in of_tasks for layer in some)]
    layers += [] if shared is None else [shared]
    self.needs = frozenset().union(*(layer.needs for layer in layers)) - {'shared'}
    self.bias = self.add_weight('bias', [len(self._names)], initializer='zeros')

  def call(self, inputs: LayerInputs, training: bool = False) -> tf.Tensor:
    """Returns the logits, float32 [B, T]."""
    if self.dense_embedding is not None:
      inputs = with_fields(inputs, self.dense_embedding(inputs, training=training))
    common = [layer(inputs, training=training) for layer in self.interactions]
    shared = [None] * len(self._names)
    if self.shared is not None:
      shared = self.shared(inputs, training=training)
    own = {}
    for t, (name, layers) in enumerate(zip(self._names, self.of_tasks)):
      of_task = inputs._replace(shared=shared[t])
      terms = common + [layer(of_task, training=training) for layer in layers]
      own[name] = tf.add_n(terms) + self.bias[t]

    def logit(name: str) -> tf.Tensor:
      if name not in self._given:
        return own[name]
      factor = logit(self._given[name])
      return logit_of_product(tf.stop_gradient(factor) if name in self._late else factor, own[name])

    return tf.concat([logit(name) for name in self._names], 1)

  def probability(self, logits: tf.Tensor, in_log: bool = False) -> tf.Tensor:
    """Returns the probabilities of a click; for squared error, the logits themselves.

    If the log kept a share r of the negatives, odds P(1)/P(0) become P(1)/(r·P(0)) in it. So the
    true odds are r times those of the model: p' = p / (p + (1 − p)/r), or ln r added to the logit
    (He et al. 2014, "Practical Lessons from Predicting Clicks on Ads at Facebook").

    Args:
      logits: float32 [B, T].
      in_log: whether to return p, the probabilities in the training log, rather than p'.
    Returns:
      float32 [B]; [B, T] with several labels.
    """
    shift = 0.0 if in_log else self._logit_shift
    columns = zip(tf.unstack(logits, len(self._names), 1), self._predicts_clicks)
    of_labels = [tf.sigmoid(z + shift) if clicks else z for z, clicks in columns]
    return tf.stack(of_labels, 1) if len(of_labels) > 1 else of_labels[0]

  def predictions(self, logits: tf.Tensor) -> dict[str, tf.Tensor]:
    """Returns the outputs of serving, float32 [B]: `probability`, or each task's by its name."""
    values = self.probability(logits)
    if len(self._names) == 1:
      return {'probability': values}
    return dict(zip(self._names, tf.unstack(values, len(self._names), 1)))
