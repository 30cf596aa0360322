"""Learning-rate schedules by name: their formulas, and that every rate follows them."""

import math

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tests.support import steps
from tests.support.batches import make_batch
from trainer import config
from trainer.comm.communicator import SingleProcess
from trainer.training import schedule
from trainer.training.step import TrainStep

SGD = {'kind': 'sgd', 'learning_rate': 0.1}
KEEP = {
  'lifecycle': {'admission': 'none', 'eviction': 'none', 'decay': 1.0},
  'sparse.tables.default.linear': SGD,
  'sparse.tables.default.factors': SGD,
}


class FactorTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.parameters(
    ({'warmup_steps': 4}, [0.25, 0.5, 0.75, 1, 1, 1]),
    ({'kind': 'step', 'period': 2, 'factor': 0.5}, [1, 1, 0.5, 0.5, 0.25, 0.25]),
    (
      {'kind': 'step', 'period': 2, 'factor': 0.5, 'warmup_steps': 2},
      [0.5, 1, 1, 1, 0.5, 0.5, 0.25],
    ),
    (
      {'kind': 'cosine', 'period': 4, 'floor': 0.2, 'warmup_steps': 1},
      [1, *(0.2 + 0.4 * (1 + math.cos(math.pi * t / 4)) for t in range(4)), 0.2, 0.2],
    ),
  )
  def test_formulas(self, settings, expected):
    found = [schedule.factor(config.Schedule(**settings), t) for t in range(len(expected))]
    self.assertAllClose(found, expected, atol=1e-6)

  def test_none_is_one(self):
    self.assertAllEqual(schedule.factor(None, 10), 1)


class ScheduledStepTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.batch = make_batch(np.random.default_rng(5), 16)

  def step(self, rate, **changes):
    cfg = steps.make_config(KEEP | {f'train.{key}': value for key, value in changes.items()})
    step = TrainStep(cfg, SingleProcess())
    step.set_rates(rate, 0)
    return step

  def state(self, step):
    rows = steps.rows_of(step.store.export_state())
    return {str(k): np.concatenate([r.linear, r.factors]) for k, r in rows.items()} | {
      name: value for name, value in step.dense_state().items() if 'iter' not in name
    }

  def test_every_rate_follows_it_on_top_of_what_plateaus_left(self):
    """A scheduled step is one of a constant rate; dense variables and rows alike."""
    scheduled = self.step(0.5, schedule={'kind': 'step', 'period': 2, 'factor': 0.1})
    constant = self.step(0.5)
    for expected in (0.5, 0.5, 0.05, 0.05, 0.005):
      constant.set_rates(expected, 0)
      self.assertAllClose(scheduled.dense.rates.at(scheduled.steps), expected)
      for step in (scheduled, constant):
        steps.train(step, self.batch)
    for name, value in self.state(constant).items():
      self.assertAllClose(self.state(scheduled)[name], value, rtol=1e-6, msg=name)

  def test_the_position_is_the_number_of_steps(self):
    step = self.step(1.0, schedule={'kind': 'cosine', 'period': 10})
    step.set_steps(10)
    before = self.state(step)
    steps.train(step, self.batch)
    for name, value in before.items():
      self.assertAllEqual(self.state(step)[name], value)  # the rates have fallen to 0
    step.set_rates(1.0, 10)  # of --init_from
    self.assertAllClose(step.dense.rates.at(10), 1.0)


if __name__ == '__main__':
  tf.test.main()
