"""The model of clicks: it sums the logits of interactions, and predicts one or more labels."""

import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from trainer.config import Label, Model
from trainer.embedding.layer_inputs import LayerInputs, with_fields


def logit_of_product(first: tf.Tensor, second: tf.Tensor) -> tf.Tensor:
  """Returns the logit z of a product of probabilities: σ(z) = σ(first)·σ(second).

  It is finite even if the product p underflows: as 1/σ(a) = 1 + e^−a, z = −log(1/p − 1) where 1/p −
  1 = e^−a + e^−b + e^−(a+b).
  """
  return -tf.reduce_logsumexp(tf.stack([-first, -second, -first - second]), 0)


def first_biases(model: Model, labels: Sequence[Label], means: np.ndarray) -> np.ndarray:
  """Returns the biases with which a model without features predicts labels' `means`, float64 [T].

  A task that is `given` another begins at its share of the other's positives. The bias is NaN where
  labels are unknown or all equal.
  """
  names, biases = [label.name for label in labels], means.copy()
  smoothing = model.label_smoothing
  for t, label in enumerate(labels):
    task = model.tasks.get(label.name)
    of = means[names.index(task.given)] if task and task.given else 1.0
    if label.loss != 'squared_error':
      biases[t] = math.nan
      if 0 < means[t] < of:
        share = means[t] / of * (1 - smoothing) + smoothing / 2
        biases[t] = math.log(share / (1 - share))
  return biases


class CTRModel(tf.keras.Model):
  """Computes a logit for each of T labels.

  The logit is the sum of the label's bias, of the logits of the interactions that all labels share,
  and of the logits of the label's own interactions.

  A task with the key `given` names another task. Its prediction is that task's probability times
  its own σ(logit), as in ESMM (Ma et al. 2018, "Entire Space Multi-Task Model"): p(conversion) =
  p(click)·p(conversion | click), trained on all impressions. The model's output is the logit of
  this product. With the loss fake_negative, for conversions that come late, the task trains only
  p(conversion | click), because the clicks of these impressions were trained on earlier.

  `trainer.model.builder.build` makes the layers, with variables whose initial values depend only on
  the config, so that all ranks start from the same.

  Args:
    shared: the layer of `model.shared`, whose output the interaction `tower` reads.
    of_tasks: for each label, in the order of `Config.labels`, its own interactions.
  """

  def __init__(
    self,
    model: Model,
    labels: Sequence[Label],
    interactions: Sequence[tf.keras.layers.Layer],
    shared: tf.keras.layers.Layer | None,
    of_tasks: Sequence[Sequence[tf.keras.layers.Layer]],
    dense_embedding: tf.keras.layers.Layer | None,
  ):
    super().__init__(name='model')
    self._names = [label.name for label in labels]
    self._predicts_clicks = [label.loss != 'squared_error' for label in labels]
    self._logit_shift = math.log(model.negative_sampling_rate)
    self.interactions, self.shared = list(interactions), shared
    self.dense_embedding = dense_embedding
    self.of_tasks = [list(layers) for layers in of_tasks]
    self._given = {name: task.given for name, task in model.tasks.items() if task.given}
    self._late = {label.name for label in labels if label.loss == 'fake_negative'}
    layers = [*interactions, *(layer for some in of_tasks for layer in some)]
    layers += [] if shared is None else [shared]
    self.members = max((getattr(layer, 'members', 1) for layer in layers), default=1)
    # Which of trainer.embedding.layer_inputs.NEEDS the layers read.
    self.needs = frozenset().union(*(layer.needs for layer in layers)) - {'shared'}
    self.bias = self.add_weight('bias', [len(self._names)], initializer='zeros')

  def call(self, inputs: LayerInputs, training: bool = False) -> tf.Tensor:
    """Returns logits, float32 [B, T]; in training [B, T · members], those of a label in a row."""
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
      own[name] = sum(terms) + self.bias[t]

    def logit(name: str) -> tf.Tensor:
      if name not in self._given:
        return own[name]
      factor = logit(self._given[name])
      return logit_of_product(tf.stop_gradient(factor) if name in self._late else factor, own[name])

    logits = [logit(name) for name in self._names]
    if training and self.members > 1:  # a label's may have no members
      logits = [tf.broadcast_to(z, [tf.shape(z)[0], self.members]) for z in logits]
    return tf.concat(logits, 1)

  def mean_of_members(self, logits: tf.Tensor) -> tf.Tensor:
    """Returns the mean over members of logits of a training step, float32 [B, T]."""
    if self.members == 1:
      return logits
    return tf.reduce_mean(tf.reshape(logits, [-1, len(self._names), self.members]), 2)

  def probability(self, logits: tf.Tensor, in_log: bool = False) -> tf.Tensor:
    """Returns the probabilities of a click; for squared error, the logits themselves.

    Logits are float32 [B, T]; the result is [B], or [B, T] with several labels. If the log kept
    only a share r of the negatives (negative_sampling_rate), the odds in the log are 1/r times the
    true odds. So p' = p / (p + (1 − p)/r) turns the model's p into the true probability; this adds
    ln r to the logit (He et al. 2014, "Practical Lessons from Predicting Clicks on Ads at
    Facebook"). With `in_log`, it is p.
    """
    shift = 0.0 if in_log else self._logit_shift
    columns = zip(tf.unstack(logits, len(self._names), 1), self._predicts_clicks)
    of_labels = [tf.sigmoid(z + shift) if clicks else z for z, clicks in columns]
    return tf.stack(of_labels, 1) if len(of_labels) > 1 else of_labels[0]

  def predictions(self, logits: tf.Tensor) -> dict[str, tf.Tensor]:
    """Returns what serving outputs: {label, or `probability` for a single one: float32 [B]}."""
    values = self.probability(logits)
    if len(self._names) == 1:
      return {'probability': values}
    return dict(zip(self._names, tf.unstack(values, len(self._names), 1)))
