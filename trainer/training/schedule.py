"""Learning rates: plateaus lower them, and a schedule changes them with the steps."""

import math

import tensorflow as tf

from ops.library import TensorLike
from trainer.config import Schedule


class Rates:
  """The factor of all learning rates, dense and sparse: plateau factor times schedule factor.

  Attributes:
    factor: float32 variable, the factor of plateaus: 1 at first, and lowered at each plateau.
    first_step: int64 variable, the step at which the schedule begins.
  """

  def __init__(self, schedule: Schedule | None):
    self.factor = tf.Variable(1.0, trainable=False, name='rate')
    self.first_step = tf.Variable(0, dtype=tf.int64, trainable=False, name='first_step')
    self._schedule = schedule

  def at(self, steps: TensorLike) -> tf.Tensor:
    """Returns the factor of all learning rates after `steps` steps, float32 []."""
    since = steps - self.first_step.read_value()
    return self.factor.read_value() * factor(self._schedule, since)


def factor(schedule: Schedule | None, steps: TensorLike) -> tf.Tensor:
  """Returns the factor of a schedule after `steps` steps, float32 []; 1 without a schedule.

  With t = steps − warmup_steps, and the other names as in train.schedule, it is:

    t < 0     (steps + 1) / warmup_steps
    cosine    floor + (1 − floor)·(1 + cos(π·min(1, t / period))) / 2   (Loshchilov & Hutter 2017)
    step      factor^⌊t / period⌋
    constant  1
  """
  if schedule is None:
    return tf.ones([])
  steps = tf.cast(steps, tf.float32)
  since = steps - schedule.warmup_steps
  if schedule.kind == 'cosine':
    share = tf.minimum(1.0, since / schedule.period)
    later = schedule.floor + (1 - schedule.floor) * (1 + tf.cos(math.pi * share)) / 2
  elif schedule.kind == 'step':
    later = tf.pow(schedule.factor, tf.floor(since / schedule.period))
  else:
    later = tf.ones([])
  return tf.where(since < 0, (steps + 1) / max(1, schedule.warmup_steps), later)
