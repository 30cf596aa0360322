"""Losses of a batch's samples; the caller multiplies them by weights, and divides by their sum."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from trainer.config import Label, Model

SampleLoss = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


def per_sample_loss(model: Model) -> SampleLoss:
  """Returns a function that computes the loss of each sample, as the config selects it.

  Of labels float32 [B] and logits float32 [B, members] it returns the mean over members, float32
  [B]. `label_smoothing` s turns y into y (1 − s) + s/2, except for squared error. With y the label,
  z the logit and p = σ(z):

    log_loss: −y log p − (1 − y) log(1 − p)
    focal: −y (1 − p)^γ log p − (1 − y) p^γ log(1 − p) (Lin et al. 2017, "Focal Loss for Dense
      Object Detection", without α); γ = 0 is log loss
    squared_error: (z − y)²
    fake_negative: −(1 − y) log(1 − p) − y (log p − log(1 − p)). This is for streams in which every
      sample comes with label 0 at first, and a positive one a second time, with label 1 (Ktena et
      al. 2019, "Addressing Delayed Feedback for Continuous Training with Neural Networks in CTR
      prediction"). The last term cancels the loss of the first time.
  """
  gamma = model.focal_gamma
  smoothing = 0.0 if model.loss == 'squared_error' else model.label_smoothing

  def log_loss(y: tf.Tensor, z: tf.Tensor) -> tf.Tensor:
    return tf.nn.sigmoid_cross_entropy_with_logits(y, z)

  def focal(y: tf.Tensor, z: tf.Tensor) -> tf.Tensor:
    # (1 − p)^γ is computed as exp(−γ softplus(z)), because log(1 − p) = −softplus(z). So the
    # gradient stays finite where 1 − p is 0 and γ < 1.
    of_click = tf.exp(-gamma * tf.nn.softplus(z)) * tf.nn.softplus(-z)
    of_none = tf.exp(-gamma * tf.nn.softplus(-z)) * tf.nn.softplus(z)
    return y * of_click + (1 - y) * of_none

  def squared_error(y: tf.Tensor, z: tf.Tensor) -> tf.Tensor:
    return tf.square(z - y)

  # If a share q turns out positive, the expected gradient of fake_negative is p − q. The paper's
  # weights, 1 + p and (1 − p)(1 + p), make it (1 − p²)(p − q), which is almost 0 where p is near 1.
  def fake_negative(y: tf.Tensor, z: tf.Tensor) -> tf.Tensor:
    return (1 - y) * tf.nn.softplus(z) - y * z

  loss = {
    'log_loss': log_loss,
    'focal': focal,
    'squared_error': squared_error,
    'fake_negative': fake_negative,
  }[model.loss]

  def of_members(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    labels = tf.broadcast_to(labels[:, None], tf.shape(logits))
    return tf.reduce_mean(loss(labels * (1 - smoothing) + smoothing / 2, logits), 1)

  return of_members


def sample_losses(model: Model, labels: Sequence[Label]) -> SampleLoss:
  """Returns `per_sample_loss(model)` or, with `labels` (data.labels), a function for all T tasks.

  It maps labels [B, T] and logits [B, T · members] to losses [B, T], times the labels' weights.
  """
  if not labels:
    return per_sample_loss(model)
  losses = [per_sample_loss(model.model_copy(update={'loss': label.loss})) for label in labels]
  weights = [label.weight for label in labels]

  def of_all(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    columns = zip(losses, tf.unstack(labels, len(losses), 1), tf.split(logits, len(losses), 1))
    return tf.stack([loss(y, z) for loss, y, z in columns], 1) * weights

  return of_all
