"""Losses of one sample each; the caller weighs, sums, and divides by the global weight."""

import tensorflow as tf

from trainer.errors import UserError


def per_sample_loss(model):
  """The loss that `model` (config's Model) names: fn(labels float32 [B], logits float32 [B, 1]) ->
  float32 [B].

  With z the logit and p = σ(z):
    log_loss: −y log p − (1 − y) log(1 − p)
    focal: the same with each term times (1 − probability of that class)^γ (Lin et al. 2017, "Focal
      Loss for Dense Object Detection",
      without α); γ = 0 is log loss
    squared_error: (z − y)²
  `label_smoothing` s turns y into y (1 − s) + s/2.

  Raises: UserError where label smoothing is asked of squared error.
  """
  smoothing, gamma = model.label_smoothing, model.focal_gamma
  if smoothing and model.loss == 'squared_error':
    raise UserError(
      f"model.label_smoothing: found {smoothing}; 'squared_error' takes none, wanted 0"
    )

  def log_loss(y, z):
    return tf.nn.sigmoid_cross_entropy_with_logits(y, z)

  def focal(y, z):
    # The power as exp of a logarithm, log(1 − p) = −softplus(z): its gradient stays finite where 1
    # − p vanishes and γ < 1.
    return y * tf.exp(-gamma * tf.nn.softplus(z)) * tf.nn.softplus(-z) + (1 - y) * tf.exp(
      -gamma * tf.nn.softplus(-z)
    ) * tf.nn.softplus(z)

  def squared_error(y, z):
    return tf.square(z - y)

  one = {'log_loss': log_loss, 'focal': focal, 'squared_error': squared_error}[model.loss]
  return lambda labels, logits: one(labels * (1 - smoothing) + smoothing / 2, logits[:, 0])
